"""Where does speculation pay? The workload decision matrix: cohorts to rows, each with a verdict.

Speed-up depends on the traffic: the task, the lengths, the temperature and above all the load. So
the matrix has one row per cohort with the verdict (speculate with k, target-only, inconclusive)
and, for each no, the reason. Each load level is judged by itself, and where the average over a
route says something else than its cohorts, that is said.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from speccheck import stats
from speccheck.lossless import CaseStatus
from speccheck.measure import (
    ALPHA,
    LATENCIES,
    QUANTILES,
    Pairing,
    is_control,
    is_error,
    is_refused,
    pair_receipts,
    used_options,
)
from speccheck.records import Arm, Estimate, Outcome, Receipt
from speccheck.speed import Costs, break_even_acceptance, saved_passes, saved_passes_measured

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
    refused = [r for r in everything.speculative if is_refused(r)]
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
        errors_target=sum(is_error(r) for r in everything.target),
        errors_speculative=sum(is_error(r) for r in everything.speculative),
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
        get = LATENCIES[name]
        known = [
            (a, b)
            for t, s in pairing.pairs
            if (a := get(t)) is not None and (b := get(s)) is not None
        ]
        shown = {q: p for q, p in QUANTILES.items() if len(known) >= _CELL_MINIMUM[q]}
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
    common = set.intersection(*(used_options(r) for r in refused))
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
