"""Where does speculation pay? Receipts to measurements per route, and the workload decision matrix.

Speed-up depends on the traffic: the task, the lengths, the temperature and above all the load,
since verifying k+1 positions is nearly free on an idle machine and costs as much as k+1 steps on a
full one. So nothing is averaged over loads: each load level is measured and judged by itself, and
the matrix has one row per cohort with the verdict (speculate with k, target-only, inconclusive)
and, for each no, the reason.

The arms' receipts are joined by pair id, never by position. Receipts without a partner are counted
and said. A pair in which one side failed says nothing about latency; it counts as an error.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from speccheck import stats
from speccheck.lossless import CaseStatus
from speccheck.records import Arm, Estimate, Measurement, Outcome, Receipt

ALPHA = 0.05
"""One-sided level at which a rule is passed."""

TPOT_MIN_TOKENS = 32
"""Shorter outputs are left out of TPOT: their last, cut round dominates it."""

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_BLOCKS_NEEDED = 8
"""Fewer pairs of blocks than this give no usable block bootstrap."""


# --- the arithmetic of speed (Leviathan et al. 2023; the last position's bonus included) ---------


def tokens_per_round(rates: Sequence[float]) -> float:
    """Expected tokens per verify step: 1 + sum over k of the chance that k drafts are accepted.

    `rates[i]` is the conditional acceptance of position i+1, given that those before were accepted.

    >>> round(tokens_per_round([0.8] * 4), 4)
    3.3616
    """
    return 1 + float(np.cumprod(np.asarray(rates, dtype=float)).sum())


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in target-equivalent passes: one plain decode step at the same batch size is 1.

    `draft` is one draft step; `verify` is a verify step, per proposal length (1 for k = 0);
    `rollback` is what a round costs besides (state rollback, catch-up pass, bookkeeping).
    """

    draft: float
    verify: Mapping[int, float]
    rollback: float = 0.0


def speedup(rates: Sequence[float], costs: Costs) -> float:
    """Tokens per unit of cost, against 1 for target-only. `rates` as in `tokens_per_round`.

    Raises:
        KeyError: the verify step was not calibrated at this proposal length.
    """
    k = len(rates)
    return tokens_per_round(rates) / (k * costs.draft + costs.verify[k] + costs.rollback)


def break_even_acceptance(k: int, costs: Costs) -> float:
    """Accepted/drafted at which speculation neither gains nor loses at proposal length k."""
    return (k * costs.draft + costs.verify[k] - 1 + costs.rollback) / k


def best_proposal_length(rates: Sequence[float], costs: Costs) -> int:
    """The k (0: target-only) with the largest speed-up among those drafted and calibrated.

    No claim is made beyond the measured positions.
    """
    ks = [k for k in range(len(rates) + 1) if k == 0 or k in costs.verify]
    return max(ks, key=lambda k: 1.0 if k == 0 else speedup(rates[:k], costs))


def saved_passes(accepted: float, drafted: float, rounds: float, k: int, costs: Costs) -> float:
    """Modelled saved target passes: accepted - drafting - extra verification - rollback.

    The correction or bonus token of a round is paid for by the round's own pass, so it is never
    saved. All in target-equivalent passes; `accepted` counts delivered tokens only.
    """
    return (
        accepted - costs.draft * drafted - (costs.verify[k] - 1) * rounds - costs.rollback * rounds
    )


def saved_passes_measured(speculative: Sequence[Receipt], target_tpot_s: float) -> float:
    """Measured saved target passes: decode tokens delivered, minus decode time in target steps.

    `target_tpot_s` is the target-only arm's seconds per token at the same load. Receipts without
    times or counts are left out.
    """
    saved = 0.0
    for r in speculative:
        if r.tpot_s is not None and r.completion_tokens is not None:
            steps = r.completion_tokens - 1
            saved += steps - r.tpot_s * steps / target_tpot_s
    return saved


# --- pairs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both arms' receipts joined by pair id, and what could not be joined."""

    pairs: tuple[tuple[Receipt, Receipt], ...]
    """(target-only, speculative), both completed."""
    target: tuple[Receipt, ...]
    """Every target-only receipt that counts, completed or not."""
    speculative: tuple[Receipt, ...]
    unpaired: int
    """Receipts whose partner was never sent or is missing."""
    failed: int
    """Pairs in which at least one side did not complete."""

    @property
    def note(self) -> str:
        """What was left out of the pairs, or empty."""
        parts = []
        if self.unpaired:
            parts.append(f"{self.unpaired} receipts without a partner left out")
        if self.failed:
            parts.append(f"{self.failed} pairs with a side that did not complete left out")
        return "; ".join(parts)


def _fell_back(receipt: Receipt) -> bool:
    return receipt.decision == "fell_back"


def is_control(receipt: Receipt) -> bool:
    """Whether the receipt is the second half of an A/A pair: it carries another phase's pair id."""
    return receipt.arm == Arm.TARGET_ONLY and not receipt.pair_id.startswith(f"{receipt.phase}:")


def pair_receipts(receipts: Iterable[Receipt]) -> Pairing:
    """Join the arms by pair id; the last attempt counts.

    Warm-up, A/A controls and requests that were moved to target-only after a fallback do not: the
    last came later than what they would be compared with.
    """
    latest: dict[tuple[str, str], Receipt] = {}
    for r in receipts:
        if r.warm_up or is_control(r) or (r.arm == Arm.TARGET_ONLY and _fell_back(r)):
            continue
        known = latest.get((r.pair_id, r.arm))
        if known is None or r.attempt > known.attempt:
            latest[r.pair_id, r.arm] = r
    target = {key: r for (key, arm), r in latest.items() if arm == Arm.TARGET_ONLY}
    speculative = {key: r for (key, arm), r in latest.items() if arm == Arm.SPECULATIVE}
    both = [(target[key], speculative[key]) for key in target if key in speculative]
    done = [(t, s) for t, s in both if t.outcome == s.outcome == Outcome.OK]
    return Pairing(
        tuple(done),
        tuple(target.values()),
        tuple(speculative.values()),
        len(target) + len(speculative) - 2 * len(both),
        len(both) - len(done),
    )


# --- measurements for the rules -----------------------------------------------------------------

_LATENCIES: dict[str, Callable[[Receipt], float | None]] = {
    "ttft": lambda r: r.ttft_s,
    "tpot": lambda r: r.tpot_s,
    "e2e": lambda r: r.e2e_s,
    "queue_age": lambda r: r.queue_age_s,
}


def measure_route(
    receipts: Sequence[Receipt],
    *,
    stage: str,
    route: str,
    rng: np.random.Generator,
    tpot_min_tokens: int = TPOT_MIN_TOKENS,
) -> list[Measurement]:
    """Every metric that receipts of both arms can give, for the route and for slices of it.

    Slices are named "concurrency 16", "prompt >=4096" and "temperature high" and appear where there
    are two or more of a kind. Latencies at different loads are never pooled: with several loads
    they are measured per load only. Protected traffic has its own metric (`measure_protected`).

    Metrics: acceptance_rate, mean_acceptance_length, draft_coverage; ttft, tpot, e2e and queue_age
    ratios at p50, p95, p99 (tpot_p95_ratio ...); e2e_mean_ratio; error_rate,
    error_rate_target_only, unsupported_requests; length_finish_rate; fallback_rate.

    Outputs under `tpot_min_tokens` tokens, and pairs of unequal length, are left out of TPOT.
    """
    mine = [
        r
        for r in receipts
        if r.route == route and r.stage == stage and r.priority != "protected" and not r.warm_up
    ]
    loads = sorted({r.concurrency for r in mine})

    def measure(name: str, here: Sequence[Receipt]) -> list[Measurement]:
        return _measure(
            here,
            cohort=name,
            share=len(here) / len(mine) if mine else 1.0,
            stage=stage,
            route=route,
            rng=rng,
            tpot_min_tokens=tpot_min_tokens,
        )

    found = measure("", mine)
    if len(loads) > 1:
        for load in loads:
            found += measure(f"concurrency {load}", [r for r in mine if r.concurrency == load])
    for field, name in (("prompt_band", "prompt"), ("temperature_band", "temperature")):
        values = sorted({getattr(r, field) for r in mine})
        if len(values) > 1:
            for value in values:
                found += measure(f"{name} {value}", [r for r in mine if getattr(r, field) == value])
    return found


def _measure(
    receipts: Sequence[Receipt],
    *,
    cohort: str,
    share: float,
    stage: str,
    route: str,
    rng: np.random.Generator,
    tpot_min_tokens: int,
) -> list[Measurement]:
    pairing = pair_receipts(receipts)
    spec = pairing.speculative

    def measured(
        metric: str,
        estimate: Callable[[float], Estimate] | None,
        note: str = "",
        examples: Sequence[Receipt] = (),
    ) -> Measurement:
        return Measurement(
            metric,
            stage,
            route,
            cohort,
            estimate(ALPHA) if estimate else None,
            note,
            tuple(r.receipt_id for r in examples[:5]),
            tuple(estimate(level) for level in stats.FAIL_LEVELS) if estimate else (),
            share,
        )

    found = _acceptance(spec, measured)
    if len({r.concurrency for r in receipts}) <= 1:
        for name, get in _LATENCIES.items():
            found += _latency(
                pairing, name, get, measured, rng=rng, tpot_min_tokens=tpot_min_tokens
            )
    found += _outcomes(pairing, measured)
    found.append(_fallbacks(receipts, measured))
    return found


Measured = Callable[..., Measurement]


def _acceptance(spec: Sequence[Receipt], measured: Measured) -> list[Measurement]:
    counted = [r for r in spec if r.proposed_tokens is not None and r.accepted_tokens is not None]
    drafting = [r for r in counted if r.proposed_tokens]
    drafted = sum(r.proposed_tokens or 0 for r in drafting)
    accepted = sum(r.accepted_tokens or 0 for r in drafting)
    completed = sum(r.outcome == Outcome.OK for r in spec)
    with_counts = sum(r.outcome == Outcome.OK for r in counted)
    parts = [f"{accepted} of {drafted} drafted tokens accepted"] if drafted else []
    if with_counts < completed:
        reasons = Counter(
            r.counts_note or "no reason given" for r in spec if r.proposed_tokens is None
        )
        parts.append(
            f"from {with_counts} of {completed} completed requests"
            f" ({with_counts / completed:.0%}); the others carry no counts:"
            f" {reasons.most_common(1)[0][0]}"
        )
    if counted and not drafted:
        parts.append(f"no token was drafted in {len(counted)} requests")
    if not counted:
        parts.append("no speculative request carries draft counts")
    note = "; ".join(parts)
    worst = sorted(drafting, key=lambda r: (r.accepted_tokens or 0) / (r.proposed_tokens or 1))
    A = [r.accepted_tokens or 0 for r in drafting]
    D = [r.proposed_tokens or 0 for r in drafting]
    stepping = [r for r in drafting if r.verify_steps]
    steps = [r.verify_steps or 0 for r in stepping]
    A_stepping = [r.accepted_tokens or 0 for r in stepping]
    return [
        measured(
            "acceptance_rate",
            (lambda a: stats.acceptance_rate(A, D, alpha=a)) if drafting else None,
            note,
            worst,
        ),
        measured(
            "mean_acceptance_length",
            (lambda a: stats.mean_acceptance_length(A_stepping, steps, alpha=a))
            if stepping
            else None,
            note if stepping else "no speculative request carries verify steps",
            worst,
        ),
        _coverage(counted, measured),
    ]


def _coverage(counted: Sequence[Receipt], measured: Measured) -> Measurement:
    """Verify steps with drafts over all decode passes of the target."""
    known = [r for r in counted if r.verify_steps is not None and r.target_passes]
    steps = [r.verify_steps or 0 for r in known]
    passes = [r.target_passes or 0 for r in known]
    return measured(
        "draft_coverage",
        (lambda a: stats.acceptance_rate(steps, passes, alpha=a)) if known else None,
        f"{sum(steps)} of {sum(passes)} decode passes checked drafts"
        if known
        else "no request carries verify steps and decode passes",
    )


def _latency(
    pairing: Pairing,
    name: str,
    get: Callable[[Receipt], float | None],
    measured: Measured,
    *,
    rng: np.random.Generator,
    tpot_min_tokens: int,
) -> list[Measurement]:
    note = pairing.note
    pairs = pairing.pairs
    if name == "tpot":
        comparable = [(t, s) for t, s in pairs if _same_length(t, s, tpot_min_tokens)]
        if len(comparable) < len(pairs):
            left_out = len(pairs) - len(comparable)
            reason = (
                f"{left_out} pairs under {tpot_min_tokens} tokens or of unequal length left out"
            )
            note = f"{note}; {reason}" if note else reason
        pairs = tuple(comparable)
    values = [(t, s, get(t), get(s)) for t, s in pairs]
    known = [(t, s, a, b) for t, s, a, b in values if a is not None and b is not None]
    if len(known) < len(values):
        note = f"{note}; {len(values) - len(known)} pairs without times".removeprefix("; ")
    metrics = [f"{name}_{label}_ratio" for label in _QUANTILES]
    if not known and not pairing.pairs and pairing.target and pairing.speculative:
        return _unpaired_latency(pairing, name, get, measured)
    if not known:
        none = note or "no completed pair"
        return [
            measured(metric, None, none)
            for metric in (*metrics, *(["e2e_mean_ratio"] if name == "e2e" else []))
        ]
    target = np.array([a for _, _, a, _ in known])
    speculative = np.array([b for _, _, _, b in known])
    blocks = _blocks([(t, s) for t, s, _, _ in known])
    slowest = [s for _, s, a, b in sorted(known, key=lambda x: -(x[3] / x[2] if x[2] else 0))]
    draws = stats.bootstrap_quantile_ratios(
        target, speculative, tuple(_QUANTILES.values()), rng=rng, blocks=blocks
    )
    found = [
        measured(
            f"{name}_{label}_ratio",
            lambda a, p=p: draws.estimate(p, alpha=a),
            _times_note(stats.quantile(target, p), stats.quantile(speculative, p), label, note),
            slowest,
        )
        for label, p in _QUANTILES.items()
    ]
    if name == "e2e":
        found.append(
            measured(
                "e2e_mean_ratio",
                lambda a: stats.geometric_mean_ratio(target, speculative, alpha=a, blocks=blocks),
                note,
                slowest,
            )
        )
    return found


def _times_note(target_s: float, speculative_s: float, label: str, note: str) -> str:
    times = f"{label} {_ms(target_s)} target-only, {_ms(speculative_s)} speculative"
    return f"{times}; {note}" if note else times


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _unpaired_latency(
    pairing: Pairing, name: str, get: Callable[[Receipt], float | None], measured: Measured
) -> list[Measurement]:
    """A canary sends each request to one arm: independent samples, conservative intervals."""

    def values(side: Sequence[Receipt]) -> list[float]:
        return [v for r in side if r.outcome == Outcome.OK and (v := get(r)) is not None]

    target, speculative = values(pairing.target), values(pairing.speculative)
    if not target or not speculative:
        return [
            measured(f"{name}_{label}_ratio", None, "one arm has no times") for label in _QUANTILES
        ]
    note = f"unpaired: {len(target)} target-only and {len(speculative)} speculative requests"
    found = [
        measured(
            f"{name}_{label}_ratio",
            lambda a, p=p: stats.order_statistic_ratio(target, speculative, p, alpha=a),
            _times_note(stats.quantile(target, p), stats.quantile(speculative, p), label, note),
        )
        for label, p in _QUANTILES.items()
    ]
    if name == "e2e":
        found.append(
            measured(
                "e2e_mean_ratio",
                lambda a: stats.unpaired_mean_ratio(target, speculative, alpha=a),
                note,
            )
        )
    return found


def _same_length(target: Receipt, speculative: Receipt, least: int) -> bool:
    a, b = target.completion_tokens, speculative.completion_tokens
    return a is not None and b is not None and min(a, b) >= least and abs(a - b) <= 0.1 * max(a, b)


def _blocks(pairs: Sequence[tuple[Receipt, Receipt]]) -> list[str] | None:
    """The block of each pair (two neighbours where the arms took turns), if there are enough."""
    names = [f"{t.phase}/{t.block if t.block == s.block else t.block // 2}" for t, s in pairs]
    return names if len(set(names)) >= _BLOCKS_NEEDED else None


def _is_refused(receipt: Receipt) -> bool:
    return receipt.error_class == "unsupported_parameter"


def _is_error(receipt: Receipt) -> bool:
    """Timeout, server error, broken or cut stream, refusal of another kind, no finish reason.

    Cancelled by us is no error; refused for a parameter the arm does not support has its own rule.
    """
    if _is_refused(receipt) or receipt.outcome == Outcome.CANCELLED:
        return False
    if receipt.outcome != Outcome.OK:
        return True
    return receipt.finish_reason is None or receipt.completion_tokens == 0


def _outcomes(pairing: Pairing, measured: Measured) -> list[Measurement]:
    found = []
    for metric, side in (
        ("error_rate", pairing.speculative),
        ("error_rate_target_only", pairing.target),
    ):
        judged = [r for r in side if not _is_refused(r) and r.outcome != Outcome.CANCELLED]
        bad = [r for r in judged if _is_error(r)]
        kinds = Counter(r.error_class or r.outcome for r in bad)
        note = f"{len(bad)} of {len(judged)} requests failed"
        if bad:
            note += f": {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(3))}"
        k, n = len(bad), len(judged)
        found.append(
            measured(
                metric,
                (lambda a, k=k, n=n: stats.clopper_pearson(k, n, alpha=a)) if n else None,
                note if n else "no request was sent",
                bad,
            )
        )
    spec = pairing.speculative
    refused = [r for r in spec if _is_refused(r)]
    completed = [r for r in spec if r.outcome == Outcome.OK]
    cut = sum(r.finish_reason == "length" for r in completed)
    count = float(len(refused))
    found += [
        measured(
            "unsupported_requests",
            (lambda a: Estimate(count, count, count, len(spec), "count of requests", a))
            if spec
            else None,
            _refusal_note(refused, spec),
            refused,
        ),
        measured(
            "length_finish_rate",
            (lambda a: stats.clopper_pearson(cut, len(completed), alpha=a)) if completed else None,
            f"{cut} of {len(completed)} completed answers ran to the length limit",
        ),
    ]
    return found


def _fallbacks(receipts: Sequence[Receipt], measured: Measured) -> Measurement:
    """Share of the requests meant for the speculative arm that fell back."""
    meant = [r for r in receipts if r.arm == Arm.SPECULATIVE or _fell_back(r)]
    fell = [r for r in meant if _fell_back(r)]
    return measured(
        "fallback_rate",
        (lambda a: stats.clopper_pearson(len(fell), len(meant), alpha=a)) if meant else None,
        f"{len(fell)} of {len(meant)} requests fell back" if meant else "no request was sent",
        fell,
    )


def _options(receipt: Receipt) -> set[str]:
    """Names of the options that a request used."""
    used = {
        "min_p": receipt.min_p > 0,
        "top_p": receipt.top_p < 1,
        "top_k": receipt.top_k > 0,
        "seed": receipt.seed is not None,
        "frequency_penalty": receipt.frequency_penalty != 0,
        "presence_penalty": receipt.presence_penalty != 0,
        "repetition_penalty": receipt.repetition_penalty != 1,
        "stop": receipt.stop_count > 0,
        "logprobs": receipt.logprobs is not None,
        "response_format": receipt.response_format is not None,
    }
    names = {name for name, is_used in used.items() if is_used}
    return names | {name for name in receipt.features.split(",") if name}


def _refusal_note(refused: Sequence[Receipt], spec: Sequence[Receipt]) -> str:
    """How many were refused, and the option that tells them from those that were served."""
    if not spec:
        return "no request was sent"
    if not refused:
        return f"0 of {len(spec)} requests refused"
    served = set().union(*(_options(r) for r in spec if not _is_refused(r)), set())
    common = set.intersection(*(_options(r) for r in refused))
    blamed = sorted(common - served)
    message = Counter(r.error_message or "no message" for r in refused).most_common(1)[0][0]
    text = f"{len(refused)} of {len(spec)} requests ({len(refused) / len(spec):.0%}) refused by"
    text += " this arm for what they ask, not by chance"
    if blamed:
        text += f"; all of them carry {', '.join(blamed)}, none of those served does"
    elif not common:
        text += (
            "; no option of theirs explains it: look at the defaults that the server adds"
            " (generation_config)"
        )
    return f"{text}; the server says {message[:160]!r}"


def measure_protected(receipts: Sequence[Receipt], *, stage: str, route: str) -> list[Measurement]:
    """Metric protected_e2e_ratio: protected traffic in blocks with speculative work, over without.

    `receipts` are all of a switchback run, those of other routes too: a block counts as "with" if
    any receipt in it ran (or was mirrored) on the speculative arm. Empty without protected traffic.
    """
    run = [r for r in receipts if r.stage == stage and not r.warm_up and not is_control(r)]
    protected = [r for r in run if r.priority == "protected" and r.outcome == Outcome.OK]
    if not protected:
        return []
    loaded = {(r.phase, r.block) for r in run if r.arm == Arm.SPECULATIVE}
    timed = [(r, seconds) for r in protected if (seconds := r.effective_s)]
    number = {key: i for i, key in enumerate(sorted({(r.phase, r.block) for r in protected}))}

    def estimate(alpha: float) -> Estimate:
        return stats.block_log_ratio(
            [math.log(seconds) for _, seconds in timed],
            [number[r.phase, r.block] for r, _ in timed],
            [(r.phase, r.block) in loaded for r, _ in timed],
            alpha=alpha,
        )

    with_n = sum((r.phase, r.block) in loaded for r, _ in timed)
    return [
        Measurement(
            "protected_e2e_ratio",
            stage,
            route,
            "",
            estimate(ALPHA),
            f"{with_n} protected requests beside speculative work, {len(timed) - with_n} without",
            tuple(r.receipt_id for r, _ in sorted(timed, key=lambda x: -x[1])[:5]),
            tuple(estimate(level) for level in stats.FAIL_LEVELS),
        )
    ]


def noise_floors(receipts: Sequence[Receipt], *, rng: np.random.Generator) -> dict[str, Estimate]:
    """Target-only over target-only: metric name (as in `measure_route`) -> ratio of the A/A pairs.

    What the measurement shows where nothing differs. Empty without A/A receipts.
    """
    controls = {r.pair_id: r for r in receipts if is_control(r) and r.outcome == Outcome.OK}
    pairs = [
        (r, controls[r.pair_id])
        for r in receipts
        if r.arm == Arm.TARGET_ONLY
        and not is_control(r)
        and r.outcome == Outcome.OK
        and not r.warm_up
        and r.pair_id in controls
        and r.concurrency == controls[r.pair_id].concurrency
    ]
    found: dict[str, Estimate] = {}
    for name, get in _LATENCIES.items():
        known = [
            (a, b) for s, t in pairs if (a := get(s)) is not None and (b := get(t)) is not None
        ]
        if not known:
            continue
        first, second = zip(*known, strict=True)
        draws = stats.bootstrap_quantile_ratios(first, second, tuple(_QUANTILES.values()), rng=rng)
        for label, p in _QUANTILES.items():
            found[f"{name}_{label}_ratio"] = draws.estimate(p, alpha=ALPHA)
        if name == "e2e":
            found["e2e_mean_ratio"] = stats.geometric_mean_ratio(first, second, alpha=ALPHA)
    return found


def acceptance_from_counters(
    accepted: int, drafted: int, requests: int, *, stage: str, route: str
) -> Measurement:
    """Metric acceptance_rate from the server's own counters, where requests carry no counts.

    Counter differences over the run, after resets were taken care of.
    """
    return Measurement(
        "acceptance_rate",
        stage,
        route,
        "",
        stats.acceptance_from_totals(accepted, drafted, requests, alpha=ALPHA) if drafted else None,
        f"{accepted} of {drafted} drafted tokens accepted, from the server's counters",
        (),
        tuple(
            stats.acceptance_from_totals(accepted, drafted, requests, alpha=level)
            for level in stats.FAIL_LEVELS
        )
        if drafted
        else (),
    )


# --- the matrix ---------------------------------------------------------------------------------

MatrixVerdict = Literal["speculate", "target_only", "inconclusive"]

DIMENSIONS = (
    "route",
    "concurrency",
    "task",
    "priority",
    "temperature_band",
    "prompt_band",
    "output_band",
    "features",
    "language",
)
"""What makes a cohort, most important first. Small cohorts are pooled from the end."""


@dataclass(frozen=True, slots=True)
class LatencyCell:
    """One latency quantile of a cohort on both arms."""

    metric: str
    """ttft, tpot or e2e."""
    quantile: str
    target_s: float
    speculative_s: float
    ratio: Estimate
    """Speculative over target-only, paired."""


@dataclass(frozen=True, slots=True)
class KResult:
    """What one proposal length did in a cohort; `e2e_ratio` decides, never acceptance alone."""

    k: int
    n_pairs: int
    e2e_ratio: Estimate
    acceptance: Estimate | None
    mean_acceptance_length: Estimate | None


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One cohort of the workload decision matrix: the numbers of its best k, verdict and reason."""

    cohort: Mapping[str, str]
    """Dimension -> value; "any" where small cohorts were pooled over it."""
    name: str
    pooled: tuple[str, ...]
    """The small cohorts in it, by name; empty for a cohort of its own."""
    n_target: int
    n_speculative: int
    n_pairs: int
    unpaired: int
    k: int | None
    """Proposal length that the numbers belong to; None where nothing was drafted."""
    by_k: tuple[KResult, ...]
    drafted: int
    accepted: int
    acceptance: Estimate | None
    mean_acceptance_length: Estimate | None
    draft_coverage: float | None
    saved_modelled: float | None
    """Share of the target's decode passes saved according to the cost model."""
    saved_measured: float | None
    """The same from measured times; the gap is overhead that the model does not explain."""
    saved_note: str
    latency: tuple[LatencyCell, ...]
    e2e_ratio: Estimate | None
    errors_target: int
    errors_speculative: int
    refused: int
    quality_cases: int
    quality_regressions: int
    quality_improvements: int
    verdict: MatrixVerdict
    why: str
    """One plain sentence."""
    share: float = 1.0
    """Share of all requests in the matrix."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The workload decision matrix and what to beware of when reading it."""

    rows: tuple[MatrixRow, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MatrixLimits:
    """What makes a row a yes. Ratios are speculative over target-only."""

    min_speedup: float = 1.0
    """e2e speed-up that the whole interval must exceed."""
    max_tpot_p95_ratio: float = 1.10
    indifferent: float = 0.02
    """An e2e ratio that is surely above 1 minus this has nothing to gain."""


def workload_matrix(
    receipts: Sequence[Receipt],
    *,
    rng: np.random.Generator,
    limits: MatrixLimits = MatrixLimits(),
    costs: Mapping[int, Costs] | None = None,
    quality: Mapping[str, CaseStatus] | None = None,
    min_pairs: int = 20,
) -> Matrix:
    """Cohorts to rows. `costs` is the calibration per concurrency; `quality` is each prompt's case
    status; cohorts of fewer than `min_pairs` pairs are pooled, and named.
    """
    counted = [r for r in receipts if not r.warm_up and not is_control(r)]
    rows = [
        _row(
            key,
            pooled=pooled,
            members=members,
            total=len(counted),
            rng=rng,
            limits=limits,
            costs=costs or {},
            quality=quality or {},
            min_pairs=min_pairs,
        )
        for key, pooled, members in _cohorts(counted, min_pairs)
    ]
    return Matrix(tuple(rows), tuple(_reversals(rows, counted)))


def _cohort_key(receipt: Receipt, dimensions: int) -> tuple[str, ...]:
    values = [str(getattr(receipt, name)) for name in DIMENSIONS[:dimensions]]
    return (*values, *["any"] * (len(DIMENSIONS) - dimensions))


def _cohort_name(key: Sequence[str]) -> str:
    cohort = dict(zip(DIMENSIONS, key, strict=True))
    parts = [cohort.pop("route")]
    for dimension, value in cohort.items():
        if value in ("any", "", "unknown") or (dimension, value) in (
            ("priority", "normal"),
            ("language", "en"),
        ):
            continue
        label = dimension.removesuffix("_band")
        parts.append(value if label in ("task", "priority") else f"{label} {value}")
    return ", ".join(parts)


def _cohorts(
    receipts: Sequence[Receipt], min_pairs: int
) -> list[tuple[tuple[str, ...], tuple[str, ...], list[Receipt]]]:
    """Disjoint cohorts, each of at least `min_pairs` pairs as far as possible, with what they pool.

    Starting from all dimensions, cohorts that are too small are joined by dropping one dimension
    after the other, least important first; what is left at the end is the rest of its route.
    """
    found = []
    rest = list(receipts)
    for dimensions in range(len(DIMENSIONS), 0, -1):
        groups: dict[tuple[str, ...], list[Receipt]] = defaultdict(list)
        for r in rest:
            groups[_cohort_key(r, dimensions)].append(r)
        rest = []
        for key, members in groups.items():
            if len(pair_receipts(members).pairs) < min_pairs and dimensions > 1:
                rest += members
                continue
            names = {_cohort_name(_cohort_key(r, len(DIMENSIONS))) for r in members}
            found.append((key, tuple(sorted(names)) if len(names) > 1 else (), members))
    return sorted(found, key=lambda cohort: [_natural(part) for part in cohort[0]])


def _natural(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


def _row(
    key: tuple[str, ...],
    *,
    pooled: tuple[str, ...],
    members: list[Receipt],
    total: int,
    rng: np.random.Generator,
    limits: MatrixLimits,
    costs: Mapping[int, Costs],
    quality: Mapping[str, CaseStatus],
    min_pairs: int,
) -> MatrixRow:
    everything = pair_receipts(members)
    by_k = {k: pair_receipts(group) for k, group in _by_k(members).items()}
    results = tuple(_k_result(k, pairing) for k, pairing in sorted(by_k.items()) if pairing.pairs)
    best, tie = _best_k(results)
    pairing = by_k[best.k] if best else everything
    k = best.k if best and best.k > 0 else None
    spec = pairing.speculative
    drafting = [r for r in spec if r.proposed_tokens and r.accepted_tokens is not None]
    load = key[DIMENSIONS.index("concurrency")]
    cost = costs.get(int(load)) if load.isdigit() else None
    modelled, measured_share, note = _saved(pairing, drafting, k, cost)
    status = Counter(quality[p] for p in {r.prompt_id for r in members} if p in quality)
    known = [r for r in drafting if r.verify_steps and r.target_passes]
    cells = tuple(_cells(pairing, rng))
    refused = [r for r in everything.speculative if _is_refused(r)]
    row = MatrixRow(
        cohort=dict(zip(DIMENSIONS, key, strict=True)),
        name=_cohort_name(key),
        pooled=pooled,
        n_target=len(pairing.target),
        n_speculative=len(spec),
        n_pairs=len(pairing.pairs),
        unpaired=everything.unpaired,
        k=k,
        by_k=results,
        drafted=sum(r.proposed_tokens or 0 for r in drafting),
        accepted=sum(r.accepted_tokens or 0 for r in drafting),
        acceptance=best.acceptance if best else None,
        mean_acceptance_length=best.mean_acceptance_length if best else None,
        draft_coverage=sum(r.verify_steps or 0 for r in known)
        / sum(r.target_passes or 0 for r in known)
        if known
        else None,
        saved_modelled=modelled,
        saved_measured=measured_share,
        saved_note=note,
        latency=cells,
        e2e_ratio=best.e2e_ratio if best else None,
        errors_target=sum(_is_error(r) for r in everything.target),
        errors_speculative=sum(_is_error(r) for r in everything.speculative),
        refused=len(refused),
        quality_cases=sum(n for s, n in status.items() if s != "not_applicable"),
        quality_regressions=status["regression"],
        quality_improvements=status["improvement"],
        verdict="inconclusive",
        why="",
        share=len(members) / total,
    )
    verdict, why = _judge_row(
        row, refused=refused, cost=cost, limits=limits, min_pairs=min_pairs, tie=tie
    )
    return replace(row, verdict=verdict, why=why)


def _by_k(members: Sequence[Receipt]) -> dict[int, list[Receipt]]:
    """Speculative receipts by proposal length (0: nothing proposed), with their partners."""
    partners: dict[str, list[Receipt]] = defaultdict(list)
    for r in members:
        if r.arm == Arm.TARGET_ONLY:
            partners[r.pair_id].append(r)
    groups: dict[int, list[Receipt]] = defaultdict(list)
    for r in members:
        if r.arm == Arm.SPECULATIVE:
            groups[r.k or 0] += [r, *partners[r.pair_id]]
    return groups


def _k_result(k: int, pairing: Pairing) -> KResult:
    times = [
        (a, b)
        for t, s in pairing.pairs
        if (a := t.e2e_s) is not None and (b := s.e2e_s) is not None
    ]
    ratio = stats.geometric_mean_ratio([a for a, _ in times], [b for _, b in times], alpha=ALPHA)
    drafting = [
        r for r in pairing.speculative if r.proposed_tokens and r.accepted_tokens is not None
    ]
    A = [r.accepted_tokens or 0 for r in drafting]
    D = [r.proposed_tokens or 0 for r in drafting]
    steps = [r.verify_steps or 0 for r in drafting]
    return KResult(
        k,
        len(pairing.pairs),
        ratio,
        stats.acceptance_rate(A, D, alpha=ALPHA) if drafting else None,
        stats.mean_acceptance_length(A, steps, alpha=ALPHA) if any(steps) else None,
    )


def _best_k(results: Sequence[KResult]) -> tuple[KResult | None, tuple[int, ...]]:
    """The proposal length with the lowest e2e ratio, and those that cannot be told from it.

    Among equals the shortest wins: it drafts and verifies least. Acceptance length is no criterion,
    since it grows with k whatever it costs.
    """
    known = [r for r in results if r.e2e_ratio.is_known]
    if not known:
        return (results[0] if results else None), ()
    best = min(known, key=lambda r: r.e2e_ratio.value)
    equals = [r for r in known if not _differ(r.e2e_ratio, best.e2e_ratio)]
    chosen = min(equals, key=lambda r: r.k)
    return chosen, tuple(r.k for r in equals if r is not chosen)


def _differ(a: Estimate, b: Estimate) -> bool:
    """Whether two ratios differ beyond the combined half-width of their intervals (log scale)."""
    if min(a.low, b.low) <= 0 or math.isinf(a.high) or math.isinf(b.high):
        return False
    width = math.hypot(math.log(a.high / a.low) / 2, math.log(b.high / b.low) / 2)
    return abs(math.log(a.value / b.value)) > width


def _saved(
    pairing: Pairing, drafting: Sequence[Receipt], k: int | None, cost: Costs | None
) -> tuple[float | None, float | None, str]:
    """Saved target passes as a share of the delivered decode tokens: modelled, measured, note."""
    notes = []
    modelled: float | None = None
    counted = [
        r
        for r in drafting
        if r.completion_tokens and r.target_passes is not None and r.verify_steps is not None
    ]
    tokens = sum((r.completion_tokens or 1) - 1 for r in counted)
    if k is None or cost is None or k not in cost.verify:
        notes.append(
            "modelled: not estimated, the verify step is not calibrated at this load and k"
        )
    elif not tokens:
        notes.append("modelled: not estimated, requests carry no pass counts")
    else:
        # Each pass delivers one token of its own: what is left was accepted *and* delivered.
        passes = sum(r.target_passes or 0 for r in counted)
        accepted = min(sum(r.accepted_tokens or 0 for r in counted), max(0, tokens - passes))
        drafted = sum(r.proposed_tokens or 0 for r in counted)
        rounds = sum(r.verify_steps or 0 for r in counted)
        modelled = saved_passes(accepted, drafted, rounds, k, cost) / tokens
    timed = [(t, s) for t, s in pairing.pairs if t.tpot_s is not None and s.tpot_s is not None]
    target_tokens = sum((t.completion_tokens or 1) - 1 for t, _ in timed)
    target_s = sum((t.tpot_s or 0.0) * ((t.completion_tokens or 1) - 1) for t, _ in timed)
    delivered = sum((s.completion_tokens or 1) - 1 for _, s in timed)
    if not delivered or not target_s:
        notes.append("measured: not estimated, no pair with token times")
        return modelled, None, "; ".join(notes)
    measured_passes = saved_passes_measured([s for _, s in timed], target_s / target_tokens)
    return modelled, measured_passes / delivered, "; ".join(notes)


_CELL_MINIMUM = {"p50": 10, "p95": 59, "p99": 299}
"""Pairs below which a quantile's ratio is not shown: no upper limit at 95 % could exist."""


def _cells(pairing: Pairing, rng: np.random.Generator) -> Iterable[LatencyCell]:
    for name in ("ttft", "tpot", "e2e"):
        get = _LATENCIES[name]
        known = [
            (a, b)
            for t, s in pairing.pairs
            if (a := get(t)) is not None and (b := get(s)) is not None
        ]
        shown = {q: p for q, p in _QUANTILES.items() if len(known) >= _CELL_MINIMUM[q]}
        if not shown:
            continue
        target, speculative = (np.array(side) for side in zip(*known, strict=True))
        draws = stats.bootstrap_quantile_ratios(target, speculative, tuple(shown.values()), rng=rng)
        for q, p in shown.items():
            yield LatencyCell(
                name,
                q,
                stats.quantile(target, p),
                stats.quantile(speculative, p),
                draws.estimate(p, alpha=ALPHA),
            )


def _interval(e: Estimate) -> str:
    return f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g})"


def _judge_row(
    row: MatrixRow,
    *,
    refused: Sequence[Receipt],
    cost: Costs | None,
    limits: MatrixLimits,
    min_pairs: int,
    tie: tuple[int, ...],
) -> tuple[MatrixVerdict, str]:
    if row.cohort["priority"] == "protected":
        return "target_only", "protected traffic: speculation must never delay it"
    if refused and row.n_pairs < row.refused:
        return "target_only", f"this server refuses it when speculating: {_refused_why(refused)}"
    if row.quality_regressions:
        return "target_only", (
            f"{row.quality_regressions} of {row.quality_cases} prompts fail their check each time"
            " with speculation and pass it each time without"
        )
    ratio = row.e2e_ratio
    if ratio is None or not ratio.is_known or row.n_pairs < min_pairs:
        return "inconclusive", f"too little evidence: {row.n_pairs} pairs, {min_pairs} needed"
    if row.k is None or not row.drafted:
        return "target_only", "nothing was drafted here, so nothing can be saved"
    tail = next((c for c in row.latency if (c.metric, c.quantile) == ("tpot", "p95")), None)
    if tail and tail.ratio.low > limits.max_tpot_p95_ratio:
        return "target_only", (
            f"TPOT p95 is {_interval(tail.ratio)} times target-only, over"
            f" {limits.max_tpot_p95_ratio:.3g}; {_cause(row, cost)}"
        )
    if 1 - limits.indifferent < ratio.low <= 1:
        return "target_only", (
            f"nothing to gain: requests take {_interval(ratio)} times as long as target-only"
        )
    if ratio.low > 1:
        return "target_only", (
            f"requests take {_interval(ratio)} times as long as target-only; {_cause(row, cost)}"
        )
    if ratio.high < min(1.0, 1 / limits.min_speedup):
        also = f"; k {', '.join(map(str, tie))} cannot be told from it" if tie else ""
        return "speculate", (
            f"with k {row.k} requests take {_interval(ratio)} times as long as target-only{also}"
        )
    needed = stats.needed_for_interval(ratio, 1 / limits.min_speedup)
    more = f", about {needed} more pairs would decide" if needed else ""
    return "inconclusive", (
        f"requests take {_interval(ratio)} times as long as target-only: undecided{more}"
    )


def _cause(row: MatrixRow, cost: Costs | None) -> str:
    """Why it does not pay: drafts miss, or verifying costs more than it saves at this load."""
    if row.acceptance is None or row.k is None:
        return "the requests carry no acceptance counts"
    known = cost is not None and row.k in cost.verify
    needed = break_even_acceptance(row.k, cost) if cost is not None and known else 0.3
    at = f"at concurrency {row.cohort['concurrency']}"
    if row.acceptance.value < needed:
        break_even = f", break-even {at} is {needed:.2f}" if known else ""
        return f"acceptance is low ({row.acceptance.value:.2f}{break_even})"
    return (
        f"it costs more than it saves {at} (acceptance {row.acceptance.value:.2f} is not the cause)"
    )


def _refused_why(refused: Sequence[Receipt]) -> str:
    common = set.intersection(*(_options(r) for r in refused))
    if common:
        return ", ".join(sorted(common))
    return repr((refused[0].error_message or "no message")[:120])


def _reversals(rows: Sequence[MatrixRow], receipts: Sequence[Receipt]) -> list[str]:
    """Where the average over a route says one thing and its cohorts another (Simpson)."""
    found = []
    for route in sorted({r.route for r in receipts}):
        here = [
            row
            for row in rows
            if row.cohort["route"] == route
            and row.cohort["priority"] != "protected"
            and row.e2e_ratio is not None
            and row.e2e_ratio.is_known
        ]
        if len(here) < 2:
            continue
        overall = _unweighted_ratio([r for r in receipts if r.route == route])
        slower = [row for row in here if row.e2e_ratio and row.e2e_ratio.low > 1]
        faster = [row for row in here if row.e2e_ratio and row.e2e_ratio.high < 1]
        if overall < 1 and slower:
            found.append(
                f"route {route}: on average requests take {overall:.3g} times as long, yet they get"
                f" slower in: {'; '.join(row.name for row in slower)}"
            )
        if overall > 1 and faster:
            found.append(
                f"route {route}: on average requests take {overall:.3g} times as long, yet they get"
                f" faster in: {'; '.join(row.name for row in faster)}"
            )
    return found


def _unweighted_ratio(receipts: Sequence[Receipt]) -> float:
    """Mean e2e over all completed requests of each arm: the number a dashboard would show."""
    pairing = pair_receipts(r for r in receipts if r.priority != "protected")

    def mean(side: Sequence[Receipt]) -> float:
        times = [r.e2e_s for r in side if r.outcome == Outcome.OK and r.e2e_s is not None]
        return sum(times) / len(times) if times else math.nan

    return mean(pairing.speculative) / mean(pairing.target)
