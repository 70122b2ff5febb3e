"""A sweep's receipts to its cells: what each proposal length does at each load, for each task.

A load is one task family at one concurrency. In a round every arm of a load (target-only, then each
proposal length) takes its turn on the same prompts, one after the other, in an order that is
mirrored from round to round; so a cell (load x k) is compared within pairs, and what the machine
does to a whole turn is noise between rounds. The interval of a ratio is therefore clustered by
rounds, and by prompts.

One length is chosen out of those of a load, so their ratios share its level: each has 1/m of it
where there are m (Bonferroni). Their intervals then hold all at once, and that of the chosen one
after the choice; at a level of its own each, the best of five useless lengths would "pay" far more
often than one time in twenty. Loads share nothing: each is a cohort with a decision of its own, as
cohorts are everywhere (STATS 4.1).

A sweep with a budget looks while it runs. A cell is judged after 2, 4, 8 ... rounds and look j has
the level ALPHA/(j (j + 1)), which adds up to ALPHA over however many looks: an interval of such a
cell holds its truth although it was looked at before. A sweep that ends between looks is judged at
the level of the look to come: whoever ends and resumes it there has looked once more than the sum
counts.

Pure: no clock, no store. An independent computation from exported receipts needs this page only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from speccheck import speed, stats
from speccheck.measure import ALPHA, by_prompt, is_error, pair_receipts, positive
from speccheck.records import SWEEP, Arm, Estimate, Outcome, Receipt
from speccheck.sweep.calibration import Calibration, interval_of_saved

CellVerdict = Literal["pays", "does not pay", "open"]

MIXED = "mixed"
"""Route of the mixed traffic, whose classes (the receipts' task) share each turn."""

SEQUENTIAL = "sweep, looked at while it runs"
"""`decision_reason` of receipts whose sweep had a budget."""
FIXED = "sweep, rounds fixed beforehand"

INDIFFERENT = 0.02
"""An e2e ratio that is surely above 1 minus this has nothing to gain."""

RATIOS: dict[str, Callable[[Receipt], float | None]] = {
    "e2e": lambda r: positive(r.e2e_s),
    "effective": lambda r: positive(r.effective_s),
    "ttft": lambda r: positive(r.ttft_s),
    "tpot": lambda r: positive(r.tpot_s),
    "queue_age": lambda r: positive(r.queue_age_s),
}
"""Latencies of a request, seconds."""

_QUANTILES = {"p50": 0.5, "p95": 0.95}


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm of a load, by itself. Latencies in seconds, from completed requests."""

    k: int
    """0 is target-only."""
    n: int
    """Requests sent."""
    errors: int
    in_flight: float | None
    """Requests at once, averaged over the turns: the load that the offered concurrency came to."""
    figures: Mapping[str, Estimate]
    """ttft_p50_s ... queue_age_p95_s, throughput_tokens_per_s, error_rate, memory_bytes,
    cost_per_1k_tokens; what was not measured is not there."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The pairs of a cell whose prompts are of one length, where the cell has several."""

    prompt_band: str
    n_pairs: int
    e2e_ratio: Estimate
    acceptance: Estimate | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One proposal length at one load. Ratios are speculative over target-only."""

    k: int
    n_pairs: int
    n_rounds: int
    ratios: Mapping[str, Estimate]
    """e2e, effective, ttft, tpot, queue_age: within pairs. throughput: within rounds."""
    acceptance: Estimate | None
    per_position: tuple[Estimate, ...]
    """Entry i: share of verify steps that accepted position i + 1, unconditional (vLLM's)."""
    mean_acceptance_length: Estimate | None
    coverage: Estimate | None
    """Verify steps over all decode passes."""
    saved_measured: Estimate | None
    """Saved target passes as a share of the delivered decode tokens."""
    saved_modelled: Estimate | None
    """The same from calibrated costs; None is "not estimated", never V = 1."""
    predicted: Estimate | None
    """e2e ratio that the cost model gives, reading the prompt taken as on target-only."""
    break_even: float | None
    """Accepted/drafted at which the model neither gains nor loses."""
    verdict: CellVerdict
    needed: int | None
    """Further pairs that would decide an open cell; None where that cannot be said."""
    slices: tuple[Slice, ...] = ()
    """By prompt length: a cell that pays may hold a slice that is slower."""

    @property
    def saved_gap(self) -> float | None:
        """Modelled less measured share: overhead that the cost model does not explain."""
        if self.saved_measured is None or self.saved_modelled is None:
            return None
        return self.saved_modelled.value - self.saved_measured.value


@dataclass(frozen=True, slots=True)
class Load:
    """One task (or class of mixed traffic) at one concurrency, all proposal lengths."""

    route: str
    task: str
    concurrency: int
    target: ArmFigures
    arms: Mapping[int, ArmFigures]
    cells: tuple[Cell, ...]
    best: int | None
    """Proposal length with the lowest e2e ratio (the shortest of those that cannot be told apart);
    0 is target-only; None while no cell pays and one is open."""
    tied: tuple[int, ...]
    """Lengths that cannot be told from the best."""
    predicted_best: int | None
    """The cost model's choice; None without a calibration at this batch size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What "pays" means: an e2e speed-up that the whole interval exceeds, per route."""

    min_speedup: float = 1.0
    routes: Mapping[str, float] = field(default_factory=dict)

    def ratio(self, route: str) -> float:
        """The e2e ratio below which it pays; never above 1."""
        return 1 / max(1.0, self.routes.get(route, self.min_speedup))


def loads(
    receipts: Iterable[Receipt],
    *,
    calibrations: Mapping[int, Calibration] | None = None,
    limits: Limits = Limits(),
    memory: Mapping[str, Sequence[float]] | None = None,
    price_per_engine_hour: float | None = None,
) -> tuple[Load, ...]:
    """Every load that has target-only receipts, in order of route, task and concurrency.

    Rounds that do not count (`rounds.that_count`) have been left out before.
    `memory` has resident bytes of the servers as sampled during a load, by `arm_key`.
    """
    by_load: dict[tuple[str, str, int], list[Receipt]] = defaultdict(list)
    turns: dict[tuple[str, str, int, int, int], list[Receipt]] = defaultdict(list)
    for r in receipts:
        if r.stage == SWEEP and not r.warm_up:
            by_load[r.route, r.task, r.concurrency].append(r)
            turns[turn_of(r)].append(r)
    found = []
    for key in sorted(by_load):
        members = by_load[key]
        target = [r for r in members if r.arm == Arm.TARGET_ONLY]
        if not target:
            continue
        load = _Members(
            route=key[0],
            concurrency=key[2],
            target=target,
            by_k=_by_k(members),
            turns=turns,
            calibration=(calibrations or {}).get(key[2]),
            limit=limits.ratio(key[0]),
        )
        cells = tuple(_cell(load, k) for k in sorted(load.by_k))
        best, tied = _best(load, cells)

        def arm(k: int, mine: list[Receipt], key: tuple[str, str, int] = key) -> ArmFigures:
            sampled = (memory or {}).get(arm_key(*key, k), ())
            return _arm(k, mine, turns, sampled, price_per_engine_hour)

        found.append(
            Load(
                *key,
                target=arm(0, target),
                arms={k: arm(k, mine) for k, mine in sorted(load.by_k.items())},
                cells=cells,
                best=best,
                tied=tied,
                predicted_best=_predicted_best(cells),
            )
        )
    return tuple(found)


def turn_of(r: Receipt) -> tuple[str, str, int, int, int]:
    """(route, task, concurrency, k, block): the turn of an arm that a receipt was sent in.

    The classes of mixed traffic share their turns, so its task is empty. k 0 is target-only.
    """
    task = "" if r.route == MIXED else r.task
    return r.route, task, r.concurrency, _k(r), r.block


def arm_key(route: str, task: str, concurrency: int, k: int) -> str:
    """Names an arm of a load in samples; mixed traffic is one load."""
    return f"{route}/{'' if route == MIXED else task}/c{concurrency}/k{k}"


def look_alpha(rounds: int) -> float:
    """One-sided level of a load looked at after 2, 4, 8 ... rounds; their sum is below ALPHA.

    >>> [round(look_alpha(rounds), 4) for rounds in (2, 4, 8)]
    [0.025, 0.0083, 0.0042]
    """
    j = max(1, math.ceil(math.log2(max(rounds, 1))))
    return ALPHA / (j * (j + 1))


# --- one cell -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Members:
    """The receipts of one load."""

    route: str
    concurrency: int
    target: list[Receipt]
    by_k: Mapping[int, list[Receipt]]
    turns: Mapping[tuple[str, str, int, int, int], list[Receipt]]
    calibration: Calibration | None
    limit: float


def _k(r: Receipt) -> int:
    return (r.k or 0) if r.arm == Arm.SPECULATIVE else 0


def _by_k(members: Iterable[Receipt]) -> dict[int, list[Receipt]]:
    found: dict[int, list[Receipt]] = defaultdict(list)
    for r in members:
        if r.arm == Arm.SPECULATIVE:
            found[_k(r)].append(r)
    return dict(found)


def _cell(load: _Members, k: int) -> Cell:
    spec = load.by_k[k]
    pairs = pair_receipts([*load.target, *spec]).pairs
    rounds = sorted({t.block for t, _ in pairs})
    alpha = look_alpha(len(rounds)) if _is_sequential(spec) else ALPHA
    lengths = len(load.by_k)
    ratios = {name: _paired(pairs, get, alpha, lengths) for name, get in RATIOS.items()}
    throughput = _throughput_ratio(load, pairs, alpha, lengths)
    if throughput is not None:
        ratios["throughput"] = throughput
    verdict = verdict_of(ratios["e2e"], load.limit)
    drafting = [r for r in spec if r.proposed_tokens and r.has_counts]
    stepping = [r for r in drafting if r.verify_steps]
    modelled, predicted = _modelled(load, pairs, alpha)
    known = load.calibration is not None and k in load.calibration.costs.verify
    return Cell(
        k=k,
        n_pairs=len(pairs),
        n_rounds=len(rounds),
        ratios=ratios,
        acceptance=_by_prompt(stats.acceptance_rate, drafting, _accepted, _proposed, alpha),
        per_position=_per_position(stepping, k, alpha),
        mean_acceptance_length=_by_prompt(
            stats.mean_acceptance_length, stepping, _accepted, _steps, alpha
        ),
        coverage=_by_prompt(
            stats.acceptance_rate, [r for r in spec if r.target_passes], _steps, _passes, alpha
        ),
        saved_measured=_saved_measured(pairs, alpha) if drafting else None,
        saved_modelled=modelled,
        predicted=predicted,
        break_even=speed.break_even_acceptance(k, load.calibration.costs)
        if known and load.calibration is not None
        else None,
        verdict=verdict,
        needed=_needed(load, ratios["e2e"], len(pairs), len(rounds), spec)
        if verdict == "open"
        else None,
        slices=_slices(pairs, alpha, lengths),
    )


def _needed(
    load: _Members, ratio: Estimate, n_pairs: int, n_rounds: int, spec: Sequence[Receipt]
) -> int | None:
    """Pairs of the rounds that would decide it, to whichever side it leans."""

    def alpha_at(rounds: int) -> float:
        return (look_alpha(rounds) if _is_sequential(spec) else ALPHA) / len(load.by_k)

    no_gain = min(load.limit, 1 - INDIFFERENT)
    sides = [load.limit] if ratio.value < load.limit else []
    sides += [no_gain] if ratio.value > no_gain else []
    rounds = [
        more
        for side in sides
        if (more := stats.needed_clusters(ratio, side, n_rounds, alpha_at=alpha_at)) is not None
    ]
    return math.ceil(min(rounds) * n_pairs / n_rounds) if rounds else None


def _slices(
    pairs: Sequence[tuple[Receipt, Receipt]], alpha: float, lengths: int
) -> tuple[Slice, ...]:
    bands = sorted({t.prompt_band for t, _ in pairs})
    if len(bands) < 2:
        return ()
    found = []
    for band in bands:
        mine = [(t, s) for t, s in pairs if t.prompt_band == band]
        drafting = [s for _, s in mine if s.proposed_tokens and s.has_counts]
        acceptance = _by_prompt(stats.acceptance_rate, drafting, _accepted, _proposed, alpha)
        ratio = _paired(mine, RATIOS["e2e"], alpha, lengths)
        found.append(Slice(band, len(mine), ratio, acceptance))
    return tuple(found)


def verdict_of(e2e_ratio: Estimate, limit: float) -> CellVerdict:
    """The whole interval decides. Surely within INDIFFERENT of target-only has nothing to gain."""
    if not e2e_ratio.is_known:
        return "open"
    if e2e_ratio.low > min(limit, 1 - INDIFFERENT):
        return "does not pay"
    return "pays" if e2e_ratio.high < limit else "open"


def _is_sequential(receipts: Iterable[Receipt]) -> bool:
    return any(r.decision_reason.startswith(SEQUENTIAL) for r in receipts)


def _paired(
    pairs: Sequence[tuple[Receipt, Receipt]],
    get: Callable[[Receipt], float | None],
    alpha: float,
    lengths: int,
) -> Estimate:
    """Geometric mean ratio of the pairs, clustered by round and by prompt, one of `lengths` that
    share the level `alpha`.
    """
    known = [(t, a, b) for t, s in pairs if (a := get(t)) is not None and (b := get(s)) is not None]
    ratio = stats.geometric_mean_ratio(
        [a for _, a, _ in known],
        [b for _, _, b in known],
        alpha=alpha / lengths,
        blocks=[t.block for t, _, _ in known],
        prompts=[t.prompt_id for t, _, _ in known],
    )
    method = ratio.method.replace("blocks", "rounds") + _for_all(lengths)
    if alpha != ALPHA:
        method += ", valid after repeated looks"
    return replace(ratio, method=method)


def _for_all(lengths: int) -> str:
    return f", for all {lengths} k at once" if lengths > 1 else ""


def _throughput_ratio(
    load: _Members, pairs: Sequence[tuple[Receipt, Receipt]], alpha: float, lengths: int
) -> Estimate | None:
    """Delivered tokens per second of a turn over that of target-only in the same round."""
    both: dict[int, tuple[float, float]] = {}
    for t, s in pairs:
        if t.block == s.block and t.block not in both:
            sides = [_throughput(load.turns[turn_of(r)]) for r in (t, s)]
            if sides[0] is not None and sides[1] is not None:
                both[t.block] = (sides[0], sides[1])
    if not both:
        return None
    target, speculative = zip(*both.values(), strict=True)
    ratio = stats.geometric_mean_ratio(target, speculative, alpha=alpha / lengths)
    method = f"geometric mean over {len(both)} rounds, t-interval{_for_all(lengths)}"
    return replace(ratio, method=method)


def _throughput(turn: Sequence[Receipt]) -> float | None:
    """Delivered tokens per second of wall time, from the first request sent to the last token."""
    sent = [r.sent_ns for r in turn if r.sent_ns is not None]
    last = [r.last_token_ns for r in turn if r.last_token_ns is not None]
    tokens = sum(r.completion_tokens or 0 for r in turn if r.outcome == Outcome.OK)
    if not sent or not last or not tokens or max(last) <= min(sent):
        return None
    return tokens / ((max(last) - min(sent)) / 1e9)


def _in_flight(turn: Sequence[Receipt]) -> float | None:
    """Requests at once (Little): the sum of their times over the wall time of the turn."""
    spans = [
        (r.sent_ns, r.last_token_ns)
        for r in turn
        if r.sent_ns is not None and r.last_token_ns is not None
    ]
    if not spans:
        return None
    wall_ns = max(end for _, end in spans) - min(start for start, _ in spans)
    return sum(end - start for start, end in spans) / wall_ns if wall_ns else None


# --- acceptance ---------------------------------------------------------------------------------


def _accepted(r: Receipt) -> int:
    return r.accepted_tokens or 0


def _proposed(r: Receipt) -> int:
    return r.proposed_tokens or 0


def _steps(r: Receipt) -> int:
    return r.verify_steps or 0


def _passes(r: Receipt) -> int:
    return r.target_passes or 0


def _by_prompt(
    estimator: Callable[..., Estimate],
    receipts: Sequence[Receipt],
    numerator: Callable[[Receipt], int],
    denominator: Callable[[Receipt], int],
    alpha: float,
) -> Estimate | None:
    """A ratio of sums with prompts as clusters: repeats of a prompt are copies at temperature 0."""
    above, below = by_prompt(receipts, numerator, denominator)
    if not any(below):
        return None
    estimate = estimator(above, below, alpha=alpha)
    return replace(estimate, method=estimate.method.replace("requests", "prompts"))


def _per_position(stepping: Sequence[Receipt], k: int, alpha: float) -> tuple[Estimate, ...]:
    known = [r for r in stepping if r.acceptance_histogram is not None]
    found = []
    for position in range(1, k + 1):

        def reached(r: Receipt, position: int = position) -> int:
            return sum((r.acceptance_histogram or ())[position:])

        share = _by_prompt(
            stats.acceptance_rate,
            known,
            reached,
            lambda r: sum(r.acceptance_histogram or ()),
            alpha,
        )
        if share is not None:
            found.append(share)
    return tuple(found)


# --- saved passes and the model -----------------------------------------------------------------


def _saved_measured(pairs: Sequence[tuple[Receipt, Receipt]], alpha: float) -> Estimate | None:
    """Share of target passes saved: 1 less decode time in target-only steps, per delivered token.

    The step is that of target-only on the same prompts in the same round (STATS 2.2).
    """
    by_round: dict[int, list[tuple[Receipt, Receipt]]] = defaultdict(list)
    for t, s in pairs:
        by_round[t.block].append((t, s))
    tokens, saved = [], []
    for members in by_round.values():
        target = speed.work(t for t, _ in members)
        speculative = speed.work(s for _, s in members)
        if target.tokens and speculative.tokens:
            tokens.append(speculative.tokens)
            saved.append(speculative.saved_measured(target.decode_s / target.tokens))
    if not tokens:
        return None
    estimate = stats.clustered_ratio(saved, tokens, alpha=alpha)
    return replace(estimate, method="ratio of sums, rounds as clusters, t-interval")


def _modelled(
    load: _Members, pairs: Sequence[tuple[Receipt, Receipt]], alpha: float
) -> tuple[Estimate | None, Estimate | None]:
    """(saved share, e2e ratio) by the cost model; None where it is not calibrated here."""
    if load.calibration is None:
        return None, None
    done = speed.work(s for _, s in pairs)
    if not done.rounds:
        return None, None
    saved = interval_of_saved(done, load.calibration, alpha=alpha)
    if not saved.is_known:
        return None, None
    target = [t for t, _ in pairs if t.ttft_s is not None and t.tpot_s is not None]
    prefill_s = sum(t.ttft_s or 0.0 for t in target)
    decode_s = speed.work(target).decode_s
    share = decode_s / (prefill_s + decode_s) if target else math.nan

    def e2e(saved_share: float) -> float:
        return 1 - share * saved_share

    method = f"{saved.method}; TTFT as on target-only"
    predicted = Estimate(
        e2e(saved.value), e2e(saved.high), e2e(saved.low), saved.n, method, saved.alpha
    )
    return saved, predicted


def _predicted_best(cells: Sequence[Cell]) -> int | None:
    """The length with the lowest predicted e2e ratio, 0 where none is below 1."""
    known = {cell.k: cell.predicted.value for cell in cells if cell.predicted is not None}
    if not known:
        return None
    best = min(known, key=lambda k: (known[k], k))
    return best if known[best] < 1 else 0


def _best(load: _Members, cells: Sequence[Cell]) -> tuple[int | None, tuple[int, ...]]:
    """The best length and those that cannot be told from it, compared on the same prompts.

    Among equals the shortest: it drafts and verifies least. Never by acceptance length, which grows
    with k whatever it costs.
    """
    known = [cell for cell in cells if cell.ratios["e2e"].is_known]
    if not known:
        return None, ()
    leader = min(known, key=lambda cell: cell.ratios["e2e"].value)
    equal = [leader.k]
    for cell in known:
        if cell is leader:
            continue
        direct = _paired(
            _same_prompts(load.by_k[leader.k], load.by_k[cell.k]),
            RATIOS["e2e"],
            leader.ratios["e2e"].alpha,
            1,
        )
        if not direct.is_known or direct.low <= 1:
            equal.append(cell.k)
    best = min(equal)
    tied = tuple(sorted(set(equal) - {best}))
    verdicts = {cell.k: cell.verdict for cell in cells}
    if verdicts[best] == "pays":
        return best, tied
    paying = [cell.k for cell in cells if cell.verdict == "pays"]
    if paying:
        chosen = min(paying, key=lambda k: next(c for c in cells if c.k == k).ratios["e2e"].value)
        return chosen, tuple(k for k in sorted(equal) if k != chosen)
    return (0, ()) if all(v == "does not pay" for v in verdicts.values()) else (None, tied)


def _same_prompts(
    one: Sequence[Receipt], other: Sequence[Receipt]
) -> list[tuple[Receipt, Receipt]]:
    done = {r.pair_id: r for r in one if r.outcome == Outcome.OK}
    return [(done[r.pair_id], r) for r in other if r.outcome == Outcome.OK and r.pair_id in done]


# --- one arm ------------------------------------------------------------------------------------


def _arm(
    k: int,
    mine: Sequence[Receipt],
    turns: Mapping[tuple[str, str, int, int, int], list[Receipt]],
    memory: Sequence[float],
    price_per_engine_hour: float | None,
) -> ArmFigures:
    alpha = look_alpha(len({r.block for r in mine})) if _is_sequential(mine) else ALPHA
    done = [r for r in mine if r.outcome == Outcome.OK]
    figures: dict[str, Estimate] = {}
    for name, get in RATIOS.items():
        values = [value for r in done if (value := get(r)) is not None]
        if values:
            figures |= {
                f"{name}_{label}_s": stats.order_statistic_interval(values, p, alpha=alpha)
                for label, p in _QUANTILES.items()
            }
    whole = [turns[key] for key in sorted({turn_of(r) for r in mine})]
    rates = [rate for turn in whole if (rate := _throughput(turn)) is not None]
    if rates:
        throughput = replace(stats.mean(rates, alpha=alpha), method="mean over rounds, t-interval")
        figures["throughput_tokens_per_s"] = throughput
        if price_per_engine_hour is not None:
            figures["cost_per_1k_tokens"] = _cost(throughput, price_per_engine_hour)
    errors = sum(is_error(r) for r in mine)
    figures["error_rate"] = stats.clopper_pearson(errors, len(mine), alpha=alpha)
    if memory:
        most = max(memory)
        method = f"largest of {len(memory)} samples of resident memory"
        figures["memory_bytes"] = Estimate(most, most, most, len(memory), method, alpha)
    flights = [at_once for turn in whole if (at_once := _in_flight(turn)) is not None]
    return ArmFigures(
        k=k,
        n=len(mine),
        errors=errors,
        in_flight=sum(flights) / len(flights) if flights else None,
        figures=figures,
    )


def _cost(throughput: Estimate, price_per_engine_hour: float) -> Estimate:
    """Per 1,000 output tokens, in the price's currency, at this throughput."""

    def cost(tokens_per_s: float) -> float:
        return price_per_engine_hour / 3.6 / tokens_per_s if tokens_per_s > 0 else math.inf

    return replace(
        throughput,
        value=cost(throughput.value),
        low=cost(throughput.high),
        high=cost(throughput.low),
        method=f"price of an engine hour over throughput, {throughput.method}",
    )


# --- where it gains and loses -------------------------------------------------------------------


def findings(found: Sequence[Load]) -> list[str]:
    """One plain line per task and class: where it pays with which k, where not, what is open.

    Loads are never averaged: a mean over them would hide that the effect changes sign.
    """
    lines = []
    families: dict[tuple[str, str], list[Load]] = defaultdict(list)
    for load in found:
        families[load.route, load.task].append(load)
    for (route, task), mine in families.items():
        said = []
        pays = [(load.concurrency, load.best) for load in mine if load.best]
        if pays:
            said.append("pays at " + ", ".join(f"{c} (k {k})" for c, k in pays))
        never = [load.concurrency for load in mine if load.best == 0]
        if never:
            said.append(f"does not pay at {_listed(never)}")
        slower = [
            load.concurrency
            for load in mine
            if any(cell.ratios["e2e"].low > 1 for cell in load.cells)
        ]
        if pays and slower:
            said.append(f"slower with some k at {_listed(slower)}")
        said += [
            f"k {cell.k} at {load.concurrency} is slower for prompts of {one.prompt_band} tokens "
            f"(x{one.e2e_ratio.value:.2f}): route those to target-only"
            for load in mine
            for cell in load.cells
            if cell.verdict == "pays"
            for one in cell.slices
            if one.e2e_ratio.low > 1
        ]
        undecided = Counter(
            load.concurrency for load in mine for cell in load.cells if cell.verdict == "open"
        )
        if undecided:
            said.append(
                "open: " + ", ".join(f"{n} of k at {c}" for c, n in sorted(undecided.items()))
            )
        lines.append(f"{route}, {task}, concurrency: {'; '.join(said) or 'nothing measured'}")
    return lines


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
