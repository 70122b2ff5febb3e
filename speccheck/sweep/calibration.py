"""Receipts to costs: what a draft step and a verify step cost on this engine, at each batch size.

Measured from outside, through the public API, at fixed batch sizes: one wave of requests of one
output length, so that the batch stays full and nothing is read while it decodes. Time per pass of a
speculative arm over that of target-only in the same round of turns is the cost of a whole round,

    R(B, k) = V(B, k) + c k + o    in target-equivalent passes (STATS 2.1),

and a sum is all that one server shows. Where the launcher can start prompt-lookup servers beside
(controls), their rounds draft for nothing, so they give what one more verified token costs; the
line through the rest over the proposal lengths has the draft step c as its slope and the overhead o
at k = 0. V(B, k) is then R less both, so that the sum is what was measured, whatever the line left.
V from target-only at a larger batch is no substitute: rows of one sequence share its cache and
cost far less than rows of several.

The unit of noise is the round of turns, so intervals are Student's over rounds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from speccheck import speed, stats
from speccheck.measure import ALPHA
from speccheck.records import CALIBRATION, Arm, Estimate, Outcome, Receipt
from speccheck.speed import Costs

LOOKUP_METHODS = ("ngram", "suffix")
"""Proposers that look drafts up in text: no model runs for them."""

SEPARATE = "c and o told from V by prompt-lookup controls"
LOOKUP = "prompt lookup: no draft model, its look-up is timed in V"
TOGETHER = "draft, verify step and overhead in one: nothing here times the draft apart"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What decoding costs at one batch size. Costs are in target-equivalent passes."""

    concurrency: int
    """The batch size B."""
    step_s: Estimate
    """One decode step of target-only, seconds."""
    round: Mapping[int, Estimate]
    """k -> a whole speculative round, drafting included."""
    verify: Mapping[int, Estimate]
    """k -> V(B, k)."""
    draft: Estimate | None
    """c, one draft step; None where it cannot be told from V (see `note`)."""
    overhead: Estimate | None
    """o, what a round costs besides; None as for `draft`."""
    note: str
    """How c, V and o were told apart, or that they were not."""
    costs: Costs
    """The point estimates, for the model. With `draft` None its draft cost is 0 and V holds all."""
    by_round: tuple[Costs, ...]
    """The same from each round of turns alone: what the model's own intervals come from."""


def calibrate(receipts: Iterable[Receipt], *, alpha: float = ALPHA) -> dict[int, Calibration]:
    """Batch size -> its costs, from the receipts of stage `calibration` among those given.

    Rounds in which an arm is missing that others have, or a request failed, are left out; batch
    sizes without a whole round are not there.
    """
    blocks: dict[tuple[int, int], list[Receipt]] = defaultdict(list)
    for r in receipts:
        if r.stage == CALIBRATION and not r.warm_up:
            blocks[r.concurrency, r.block].append(r)
    turns: dict[int, list[dict[_Turn, _Pass]]] = defaultdict(list)
    for (concurrency, _), members in sorted(blocks.items()):
        if all(r.outcome == Outcome.OK for r in members):
            turns[concurrency].append(_turns(members))
    found = {}
    for concurrency, rounds in turns.items():
        # Rounds of one set of arms, the one with most rounds: a cut round lacks some.
        sets = Counter(frozenset(turn) for turn in rounds if _TARGET in turn and len(turn) > 1)
        if sets:
            chosen = max(sets, key=lambda arms: (sets[arms], len(arms)))
            whole = [turn for turn in rounds if turn.keys() == chosen]
            found[concurrency] = _calibration(concurrency, whole, alpha)
    return found


def costs(receipts: Iterable[Receipt]) -> dict[int, Costs]:
    """Batch size -> point estimates, as `matrix.workload_matrix` takes them."""
    return {concurrency: found.costs for concurrency, found in calibrate(receipts).items()}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One arm: target-only (k 0), a proposal length, or a prompt-lookup control."""

    k: int
    is_lookup: bool = False


_TARGET = _Turn(0)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A mean decode pass of an arm's turn."""

    seconds: float
    drafted: float
    """Tokens drafted in it, per sequence."""


def _turns(members: Iterable[Receipt]) -> dict[_Turn, _Pass]:
    arms: dict[_Turn, list[Receipt]] = defaultdict(list)
    for r in members:
        turn = _TARGET
        if r.arm == Arm.SPECULATIVE:
            turn = _Turn(r.k or 0, (r.proposer or "").startswith(LOOKUP_METHODS))
        arms[turn].append(r)
    found = {}
    for turn, mine in arms.items():
        done = speed.work(mine)
        if done.passes and (turn == _TARGET or done.drafted):
            found[turn] = _Pass(done.decode_s / done.passes, done.drafted / done.passes)
    return found


def _calibration(concurrency: int, rounds: list[dict[_Turn, _Pass]], alpha: float) -> Calibration:
    lookups = [turn for turn in rounds[0] if turn.is_lookup]
    models = [turn for turn in rounds[0] if turn.k and not turn.is_lookup]
    separate = len(models) > 1 and bool(lookups)
    if separate:
        solved = [_apart(turn, models, lookups) for turn in rounds]
        note = SEPARATE
    else:
        measured = models or lookups
        solved = [Costs(0.0, {t.k: _per_round(turn, t) for t in measured}) for turn in rounds]
        note = TOGETHER if models else LOOKUP
    ks = sorted(solved[0].verify)

    def over_rounds(values: Iterable[float]) -> Estimate:
        estimate = stats.mean(list(values), alpha=alpha)
        return replace(estimate, method="mean over rounds of turns, t-interval")

    def arm(k: int) -> _Turn:
        return _Turn(k, is_lookup=not models)

    verify = {k: over_rounds(one.verify[k] for one in solved) for k in ks}
    draft = over_rounds(one.draft for one in solved)
    overhead = over_rounds(one.rollback for one in solved)
    return Calibration(
        concurrency=concurrency,
        step_s=over_rounds(turn[_TARGET].seconds for turn in rounds),
        round={k: over_rounds(_per_round(turn, arm(k)) for turn in rounds) for k in ks},
        verify=verify,
        draft=draft if note != TOGETHER else None,
        overhead=overhead if separate else None,
        note=note,
        costs=Costs(
            draft.value, {k: estimate.value for k, estimate in verify.items()}, overhead.value
        ),
        by_round=tuple(solved),
    )


def _ratio(turn: Mapping[_Turn, _Pass], arm: _Turn) -> float:
    """A mean pass of an arm, in target-equivalent passes."""
    return turn[arm].seconds / turn[_TARGET].seconds


def _per_round(turn: Mapping[_Turn, _Pass], arm: _Turn) -> float:
    """A round of k drafted tokens. The last rounds of an answer draft fewer, and prompt lookup
    often none, so what a pass costs more than one is scaled to k.
    """
    return 1 + (_ratio(turn, arm) - 1) * arm.k / turn[arm].drafted


def _apart(turn: Mapping[_Turn, _Pass], models: list[_Turn], lookups: list[_Turn]) -> Costs:
    """Least squares: V = 1 + v d through the controls, then R - V = o + c d over the arms.

    That line is for c and o only; V takes what it leaves, so that V + c k + o is R as measured.
    """
    d = np.array([turn[arm].drafted for arm in lookups])
    extra = np.array([_ratio(turn, arm) for arm in lookups]) - 1
    v = float(d @ extra / (d @ d))
    d = np.array([turn[arm].drafted for arm in models])
    rest = np.array([_ratio(turn, arm) for arm in models]) - (1 + v * d)
    c, o = (float(x) for x in np.polyfit(d, rest, 1))
    return Costs(c, {arm.k: _per_round(turn, arm) - c * arm.k - o for arm in models}, o)


def interval_of_saved(done: speed.Work, calibration: Calibration, *, alpha: float) -> Estimate:
    """Modelled saved passes as a share of delivered decode tokens, from each round's costs.

    The interval is that of the calibration; the counts of these very requests have none.
    """
    method = f"cost model, {len(calibration.by_round)} calibration rounds, t-interval"
    if not done.tokens:
        return stats.unknown(method, n=0, alpha=alpha)
    values = []
    for one in calibration.by_round:
        try:
            values.append(done.saved(one) / done.tokens)
        except KeyError:
            return stats.unknown("drafted beyond what is calibrated", n=0, alpha=alpha)
    estimate = stats.mean(values, alpha=alpha)
    if not math.isfinite(estimate.value):
        return stats.unknown(method, n=estimate.n, alpha=alpha)
    return replace(estimate, method=method)
