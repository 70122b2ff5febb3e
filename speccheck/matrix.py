"""Where does speculation pay? The workload decision matrix: cohorts to rows, each with a verdict.

Speed-up depends on the traffic: the task, the lengths, the temperature and above all the load. So
the matrix has one row per cohort with the verdict (speculate with k, target-only, inconclusive)
and, for each no, the reason. Each stage and load level is judged by itself, and where the average
over a route says something else than its cohorts, that is said.

Replay and shadow send each prompt to both arms, so their cohorts are compared in pairs. A canary
sends each request to one arm: its cohorts have rows of their own, compared as independent samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from speccheck import speed, stats
from speccheck.measure import (
    ALPHA,
    LATENCIES,
    QUANTILES,
    TPOT_MIN_TOKENS,
    acceptance_rate,
    blamed_options,
    clusters_of,
    few_prompts,
    is_control,
    is_error,
    is_refused,
    mean_acceptance_length,
    pair_receipts,
    quantile_ratio,
    same_length,
    used_options,
    with_prompt_bands,
)
from speccheck.quality import CaseStatus
from speccheck.records import SWEEP, Arm, Estimate, Outcome, Receipt, Stage
from speccheck.speed import Costs, break_even_acceptance
from speccheck.sweep import cells

MatrixVerdict = Literal["speculate", "target_only", "inconclusive"]

DIMENSIONS = (
    "route",
    "stage",
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

NEVER_POOLED = 2
"""Route and stage: what is left of a route's canary is not thrown in with its replay."""

SWEPT = 4
"""Route, stage, concurrency and task make a cell of a sweep, which is taken whole: its rounds are
planned so, and the unit of its noise is the round."""

MIX_DIMENSIONS = (
    "task",
    "temperature_band",
    "prompt_band",
    "output_band",
    "features",
    "language",
)
"""What makes the traffic mix of an arm."""

MIX_ALPHA = 1e-3
"""Level at which a difference of mix between the arms is beyond chance, over all tests."""

_STAGES = (*(stage.value for stage in Stage), SWEEP)
_OPEN_LOOP = (Stage.SHADOW, Stage.CANARY)
"""Stages whose load is an arrival rate; their `concurrency` only bounds what is in flight."""


@dataclass(frozen=True, slots=True)
class LatencyCell:
    """One latency quantile of a cohort on both arms."""

    metric: str
    """ttft, tpot or e2e."""
    quantile: str
    target_s: float
    speculative_s: float
    ratio: Estimate
    """Speculative over target-only, within pairs if the cohort has them."""


@dataclass(frozen=True, slots=True)
class KResult:
    """What one proposal length did in a cohort; `e2e_ratio` decides, never acceptance alone."""

    k: int
    n: int
    """What the ratio rests on: pairs, or completed requests of the smaller arm."""
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
    n_prompts: int
    """Different prompts that the compared requests are of."""
    unpaired: int
    """Requests that should have a partner and have none."""
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
    is_paired: bool = True
    """False for a canary: each request ran on one arm, so the arms are independent samples."""
    observed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dimension -> every value that its requests have."""
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """temperature and prompt_tokens: the least and the most that was sent."""
    options: tuple[str, ...] = ()
    """Sampling features that requests used."""
    in_flight: int | None = None
    """Requests at once on the speculative arm: the concurrency of a closed loop; where arrivals set
    the load, what 95 % of requests found when they were sent, themselves included."""
    tied: tuple[int, ...] = ()
    """Proposal lengths that cannot be told from `k`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Requests that the speculative arm turns down for what they ask, on one route."""

    route: str
    options: tuple[str, ...]
    """What all of them carry and none that was served does; empty where nothing explains them."""
    n: int
    of: int
    """Speculative requests of the route."""
    message: str
    """What the server says."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The workload decision matrix, what to beware of when reading it, and what to do."""

    rows: tuple[MatrixRow, ...]
    warnings: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """One plain sentence each."""
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class _Arms:
    """Both arms' receipts of a cohort, and which of them are compared."""

    target: tuple[Receipt, ...]
    """All of the arm, completed or not."""
    speculative: tuple[Receipt, ...]
    compared: tuple[tuple[Receipt, ...], tuple[Receipt, ...]]
    """Completed, target-only and speculative; those at the same place are pairs if `is_paired`."""
    unpaired: int
    """Receipts that should have a partner and have none."""
    is_paired: bool

    @property
    def n(self) -> int:
        """Pairs, or completed requests of the smaller arm."""
        return min(map(len, self.compared))

    def timed(
        self, get: Callable[[Receipt], float | None]
    ) -> tuple[Sequence[Receipt], Sequence[Receipt]]:
        """The compared receipts that carry a time; of a pair both must."""
        target, speculative = self.compared
        if not self.is_paired:
            return (
                [r for r in target if get(r) is not None],
                [r for r in speculative if get(r) is not None],
            )
        both = [
            (t, s)
            for t, s in zip(target, speculative, strict=True)
            if get(t) is not None and get(s) is not None
        ]
        return [t for t, _ in both], [s for _, s in both]

    def times(self, get: Callable[[Receipt], float | None]) -> tuple[list[float], list[float]]:
        """The times of `timed`."""
        target, speculative = (
            [value for r in side if (value := get(r)) is not None] for side in self.timed(get)
        )
        return target, speculative


@dataclass(frozen=True, slots=True)
class MatrixLimits:
    """What makes a row a yes. Ratios are speculative over target-only."""

    min_speedup: float = 1.0
    """e2e speed-up that the whole interval must exceed."""
    max_tpot_p95_ratio: float = 1.10
    indifferent: float = 0.02
    """An e2e ratio that is surely above 1 minus this has nothing to gain."""

    @property
    def e2e_ratio(self) -> float:
        """The e2e ratio below which it pays; never above 1."""
        return 1 / max(1.0, self.min_speedup)


def workload_matrix(
    receipts: Sequence[Receipt],
    *,
    rng: np.random.Generator,
    limits: MatrixLimits = MatrixLimits(),
    route_limits: Mapping[str, MatrixLimits] | None = None,
    costs: Mapping[int, Costs] | None = None,
    quality: Mapping[str, Mapping[str, CaseStatus]] | None = None,
    void: Mapping[str, str] | None = None,
    unrepresentative: Mapping[str, str] | None = None,
    min_pairs: int = 20,
) -> Matrix:
    """Cohorts to rows.

    Args:
        receipts: of any stages and routes; warm-up and A/A controls are left out.
        rng: for the intervals of quantiles.
        limits: what makes a row a yes.
        route_limits: in their place, by route.
        costs: calibrated costs by batch size (concurrency).
        quality: each prompt's case status in replay, "greedy" and "sampled".
        void: stage -> why its times are void (our own client was late).
        unrepresentative: route -> why its prompts are not its own traffic (random token ids).
        min_pairs: smaller cohorts (in a canary: completed requests of the smaller arm) are pooled,
            and named.
    """
    counted = with_prompt_bands(
        _protect_copies(
            [
                r
                for r in receipts
                # Where policy decides who is sent where, those it keeps off have no other side.
                if not (r.warm_up or is_control(r) or (r.kept_off and r.stage in _OPEN_LOOP))
            ]
        )
    )
    in_flight = _in_flight(counted)
    rows = [
        _row(
            key,
            pooled=pooled,
            members=members,
            total=len(counted),
            in_flight=in_flight,
            rng=rng,
            limits=(route_limits or {}).get(members[0].route, limits),
            costs=costs or {},
            quality=quality or {},
            void=(void or {}).get(members[0].stage, ""),
            unrepresentative=(unrepresentative or {}).get(members[0].route, ""),
            min_pairs=min_pairs,
        )
        for key, pooled, members in _cohorts(counted, min_pairs)
    ]
    refusals = _refusals(counted)
    late = [f"{stage}: times are void: {why}" for stage, why in (void or {}).items()]
    return Matrix(
        tuple(rows),
        (*late, *_reversals(rows, counted, void or {}), *_mix_shifts(counted)),
        tuple(_advice(rows, refusals)),
        refusals,
    )


def _protect_copies(receipts: Sequence[Receipt]) -> list[Receipt]:
    """A mirrored copy of protected traffic runs at normal priority; its cohort is its original's.

    Else the pair would meet only where priorities are pooled, in a row that could say "speculate".
    """
    protected = {(r.stage, r.route, r.pair_id) for r in receipts if r.priority == "protected"}
    return [
        replace(r, priority="protected") if (r.stage, r.route, r.pair_id) in protected else r
        for r in receipts
    ]


def _cohort_key(receipt: Receipt, dimensions: int) -> tuple[str, ...]:
    values = [str(getattr(receipt, name)) for name in DIMENSIONS[:dimensions]]
    return (*values, *["any"] * (len(DIMENSIONS) - dimensions))


def _cohort_name(key: Sequence[str]) -> str:
    cohort = dict(zip(DIMENSIONS, key, strict=True))
    parts = [cohort.pop("route"), cohort.pop("stage")]
    if parts[1] in _OPEN_LOOP:
        del cohort["concurrency"]
    for dimension, value in cohort.items():
        if value in ("any", "", "unknown") or (dimension, value) in (
            ("priority", "normal"),
            ("language", "en"),
        ):
            continue
        label = dimension.removesuffix("_band")
        parts.append(value if label in ("task", "priority") else f"{label} {value}")
    if set(cohort.values()) == {"any"}:
        parts.append("the rest")
    return ", ".join(parts)


def _cohorts(
    receipts: Sequence[Receipt], min_pairs: int
) -> list[tuple[tuple[str, ...], tuple[str, ...], list[Receipt]]]:
    """Disjoint cohorts, each of at least `min_pairs` pairs as far as possible, with what they pool.

    Starting from all dimensions, cohorts that are too small are joined by dropping one dimension
    after the other, least important first; what is left at the end is the rest of its route in
    that stage.
    """
    swept: dict[tuple[str, ...], list[Receipt]] = defaultdict(list)
    for r in receipts:
        if r.stage == SWEEP:
            swept[_cohort_key(r, SWEPT)].append(r)
    found = [_cohort(key, members) for key, members in swept.items()]
    rest = [r for r in receipts if r.stage != SWEEP]
    for dimensions in range(len(DIMENSIONS), NEVER_POOLED - 1, -1):
        groups: dict[tuple[str, ...], list[Receipt]] = defaultdict(list)
        for r in rest:
            groups[_cohort_key(r, dimensions)].append(r)
        rest = []
        for key, members in groups.items():
            if _arms(members).n < min_pairs and dimensions > NEVER_POOLED:
                rest += members
            else:
                found.append(_cohort(key, members))
    return sorted(found, key=lambda cohort: [_natural(part) for part in cohort[0]])


def _cohort(
    key: tuple[str, ...], members: list[Receipt]
) -> tuple[tuple[str, ...], tuple[str, ...], list[Receipt]]:
    """(key, names of the small cohorts pooled in it, members); a cohort of its own pools none."""
    whole = _cohort_key(members[0], len(DIMENSIONS))
    names = {_cohort_name(_cohort_key(r, len(DIMENSIONS))) for r in members}
    return (key, tuple(sorted(names)), members) if len(names) > 1 else (whole, (), members)


def _natural(text: str) -> tuple[int, int, str]:
    """Numbers by size, stages in their order, the rest by name."""
    if text in _STAGES:
        return (0, _STAGES.index(text), "")
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


def _arms(members: Sequence[Receipt]) -> _Arms:
    """Both arms of receipts of one stage.

    In a canary, what a fallback moved to target-only counts there, on the arm that answered it:
    there is no partner that it came too late for.
    """
    if any(r.stage != Stage.CANARY for r in members):
        pairing = pair_receipts(members)
        pairs = pairing.pairs
        return _Arms(
            pairing.target,
            pairing.speculative,
            (tuple(t for t, _ in pairs), tuple(s for _, s in pairs)),
            pairing.unpaired,
            is_paired=True,
        )
    latest = {(r.pair_id, r.arm): r for r in sorted(members, key=lambda r: r.attempt)}.values()
    target = tuple(r for r in latest if r.arm == Arm.TARGET_ONLY)
    speculative = tuple(r for r in latest if r.arm == Arm.SPECULATIVE)
    done = [tuple(r for r in side if r.outcome == Outcome.OK) for side in (target, speculative)]
    return _Arms(target, speculative, (done[0], done[1]), 0, is_paired=False)


def _row(
    key: tuple[str, ...],
    *,
    pooled: tuple[str, ...],
    members: list[Receipt],
    total: int,
    in_flight: Mapping[str, int],
    rng: np.random.Generator,
    limits: MatrixLimits,
    costs: Mapping[int, Costs],
    quality: Mapping[str, Mapping[str, CaseStatus]],
    void: str,
    unrepresentative: str,
    min_pairs: int,
) -> MatrixRow:
    everything = _arms(members)
    by_k = {k: _arms(group) for k, group in _by_k(members).items()}
    if key[DIMENSIONS.index("stage")] == SWEEP:
        results, best, tie = _swept(members)
    else:
        lengths = sum(k > 0 and arms.n > 0 for k, arms in by_k.items())
        results = tuple(
            _k_result(k, arms, ALPHA / max(lengths, 1))
            for k, arms in sorted(by_k.items())
            if arms.n
        )
        best, tie = _best_k(results)
    arms = by_k[best.k] if best else everything
    k = best.k if best and best.k > 0 else None
    spec = arms.speculative
    drafting = _drafting(spec)
    load = key[DIMENSIONS.index("concurrency")]
    # Arrivals set the load of an open loop; its concurrency is a bound, not a batch size.
    is_batch = load.isdigit() and key[DIMENSIONS.index("stage")] not in _OPEN_LOOP
    cost = costs.get(int(load)) if is_batch else None
    modelled, measured_share, note = _saved(arms, drafting, k, cost)
    runs = {
        ("greedy" if r.temperature_band == "greedy" else "sampled", r.prompt_id) for r in members
    }
    status = Counter(found for kind, p in runs if (found := quality.get(kind, {}).get(p)))
    known = [r for r in drafting if r.verify_steps and r.target_passes]
    latency = tuple(_cells(arms, rng))
    refused = [r for one in by_k.values() for r in one.speculative if is_refused(r)]
    flights = [in_flight[r.receipt_id] for r in spec if r.receipt_id in in_flight]
    acceptance, length = _acceptance(spec)
    row = MatrixRow(
        cohort=dict(zip(DIMENSIONS, key, strict=True)),
        name=_cohort_name(key),
        pooled=pooled,
        n_target=len(arms.target),
        n_speculative=len(spec),
        n_pairs=arms.n if arms.is_paired else 0,
        n_prompts=len({r.prompt_id for side in arms.compared for r in side}),
        unpaired=everything.unpaired,
        k=k,
        by_k=results,
        drafted=sum(r.proposed_tokens or 0 for r in drafting),
        accepted=sum(r.accepted_tokens or 0 for r in drafting),
        acceptance=acceptance,
        mean_acceptance_length=length,
        draft_coverage=sum(r.verify_steps or 0 for r in known)
        / sum(r.target_passes or 0 for r in known)
        if known
        else None,
        saved_modelled=modelled,
        saved_measured=measured_share,
        saved_note=note,
        latency=latency,
        e2e_ratio=best.e2e_ratio if best else None,
        errors_target=sum(is_error(r) for r in arms.target),
        errors_speculative=sum(is_error(r) for r in spec),
        refused=len(refused),
        quality_cases=sum(n for s, n in status.items() if s != "not_applicable"),
        quality_regressions=status["regression"],
        quality_improvements=status["improvement"],
        verdict="inconclusive",
        why="",
        share=len(members) / total,
        is_paired=arms.is_paired,
        observed={
            name: tuple(sorted({str(getattr(r, name)) for r in members}, key=_natural))
            for name in DIMENSIONS
        },
        spans={
            name: (min(values), max(values))
            for name in ("temperature", "prompt_tokens")
            if (values := [x for r in members if (x := getattr(r, name)) is not None])
        },
        options=tuple(sorted(set().union(*(used_options(r) for r in members)))),
        in_flight=int(load)
        if is_batch
        else math.ceil(stats.quantile(flights, 0.95))
        if flights
        else None,
        tied=tie,
    )
    verdict, why = _judge_row(
        row,
        n=arms.n,
        refused=refused,
        cost=cost,
        limits=limits,
        void=void,
        unrepresentative=unrepresentative,
        min_pairs=min_pairs,
    )
    return replace(row, verdict=verdict, why=why)


def _by_k(members: Sequence[Receipt]) -> dict[int, list[Receipt]]:
    """Speculative receipts by proposal length (0: nothing proposed), with what they are compared
    with: their partners, or in a canary all of target-only.
    """
    alone = [r for r in members if r.arm == Arm.TARGET_ONLY and r.stage == Stage.CANARY]
    partners: dict[str, list[Receipt]] = defaultdict(list)
    for r in members:
        if r.arm == Arm.TARGET_ONLY and r.stage != Stage.CANARY:
            partners[r.pair_id].append(r)
    groups: dict[int, list[Receipt]] = defaultdict(lambda: list(alone))
    for r in members:
        if r.arm == Arm.SPECULATIVE:
            groups[r.k or 0] += [r, *partners[r.pair_id]]
    return groups


def _k_result(k: int, arms: _Arms, alpha: float) -> KResult:
    """One length; `alpha` is the cohort's level, shared by its lengths: the best is chosen."""
    get = LATENCIES["e2e"]
    target, speculative = arms.times(get)
    sides = arms.timed(get)
    if arms.is_paired:
        clusters = clusters_of(list(zip(*sides, strict=True)))
        ratio = stats.geometric_mean_ratio(target, speculative, alpha=alpha, **clusters)
    else:
        prompts = _repeated_prompts(sides)
        ratio = stats.unpaired_mean_ratio(target, speculative, alpha=alpha, prompts=prompts)
    return KResult(k, arms.n, ratio, *_acceptance(arms.speculative))


def _repeated_prompts(
    sides: tuple[Sequence[Receipt], Sequence[Receipt]],
) -> tuple[list[str], list[str]] | None:
    """Prompt ids of both arms' receipts where any comes again: such requests are one cluster."""
    target, speculative = ([r.prompt_id for r in side] for side in sides)
    every = [*target, *speculative]
    return (target, speculative) if len(set(every)) < len(every) else None


def _swept(
    members: Sequence[Receipt],
) -> tuple[tuple[KResult, ...], KResult | None, tuple[int, ...]]:
    """One load of a sweep, as `sweep.cells` has it: its lengths, the best, and those equal to it.

    Where none pays, the best is the one that loses least.
    """
    found = cells.loads(members)
    if not found:
        return (), None, ()
    (load,) = found
    results = tuple(
        KResult(c.k, c.n_pairs, c.ratios["e2e"], c.acceptance, c.mean_acceptance_length)
        for c in load.cells
        if c.n_pairs
    )
    chosen = next((result for result in results if result.k == load.best), None)
    if chosen is None:
        return results, _best_k(results)[0], ()
    return results, chosen, load.tied


def _drafting(receipts: Iterable[Receipt]) -> list[Receipt]:
    return [r for r in receipts if r.proposed_tokens and r.has_counts]


def _acceptance(receipts: Iterable[Receipt]) -> tuple[Estimate | None, Estimate | None]:
    """Acceptance rate and mean acceptance length of all that drafted, paired or not."""
    drafting = _drafting(receipts)
    stepping = [r for r in drafting if r.verify_steps]
    return (
        acceptance_rate(drafting, alpha=ALPHA) if drafting else None,
        mean_acceptance_length(stepping, alpha=ALPHA) if stepping else None,
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
    arms: _Arms, drafting: Sequence[Receipt], k: int | None, cost: Costs | None
) -> tuple[float | None, float | None, str]:
    """Saved target passes as a share of the delivered decode tokens: modelled, measured, note."""
    notes = []
    modelled: float | None = None
    done = speed.work(drafting)
    if k is None or cost is None or k not in cost.verify:
        notes.append(
            "modelled: not estimated, the verify step is not calibrated at this load and k"
        )
    elif not done.tokens:
        notes.append("modelled: not estimated, requests carry no pass counts")
    else:
        modelled = done.saved(cost) / done.tokens
    target, speculative = (speed.work(side) for side in arms.timed(LATENCIES["tpot"]))
    if not speculative.tokens or not target.decode_s:
        what = "pair" if arms.is_paired else "request"
        notes.append(f"measured: not estimated, no {what} with token times on both arms")
        return modelled, None, "; ".join(notes)
    saved = speculative.saved_measured(target.decode_s / target.tokens)
    return modelled, saved / speculative.tokens, "; ".join(notes)


_CELL_MINIMUM = {"p50": 10, "p95": 72, "p99": 368}
"""Pairs (or requests of the smaller arm) below which a quantile's ratio is not shown: no upper
limit could exist at 95 %, with half of the level for each arm.
"""


def _cells(arms: _Arms, rng: np.random.Generator) -> Iterable[LatencyCell]:
    """Quantiles of the latencies on both arms.

    Tails of TPOT are over what the rules judge: outputs of `TPOT_MIN_TOKENS` and more, of equal
    length where they are paired. Short outputs are most of a tail whatever the arm does, and the
    limit that a tail is held against is that of the rules.
    """
    for name in ("ttft", "tpot", "e2e"):
        target, speculative = arms.timed(LATENCIES[name])
        yield from _quantiles(name, (target, speculative), arms, QUANTILES.keys() & {"p50"}, rng)
        if name == "tpot" and arms.is_paired:
            equal = [
                pair
                for pair in zip(target, speculative, strict=True)
                if same_length(*pair, TPOT_MIN_TOKENS)
            ]
            target, speculative = [t for t, _ in equal], [s for _, s in equal]
        elif name == "tpot":
            target, speculative = (
                [r for r in side if (r.completion_tokens or 0) >= TPOT_MIN_TOKENS]
                for side in (target, speculative)
            )
        yield from _quantiles(name, (target, speculative), arms, QUANTILES.keys() - {"p50"}, rng)


def _quantiles(
    name: str,
    sides: tuple[Sequence[Receipt], Sequence[Receipt]],
    arms: _Arms,
    labels: Iterable[str],
    rng: np.random.Generator,
) -> Iterable[LatencyCell]:
    target, speculative = ([LATENCIES[name](r) or 0.0 for r in side] for side in sides)
    n = min(len(target), len(speculative))
    shown = {q: QUANTILES[q] for q in sorted(labels) if n >= _CELL_MINIMUM[q]}
    if not shown:
        return
    quantiles = tuple(shown.values())
    if arms.is_paired:
        clusters = clusters_of(list(zip(*sides, strict=True)))
        draws = stats.bootstrap_quantile_ratios(
            target,
            speculative,
            quantiles,
            rng=rng,
            blocks=clusters.get("blocks"),
            prompts=clusters.get("prompts"),
        )
    else:
        draws = stats.unpaired_quantile_ratios(
            target, speculative, quantiles, rng=rng, prompts=_repeated_prompts(sides)
        )
    for q, p in shown.items():
        yield LatencyCell(
            name,
            q,
            stats.quantile(target, p),
            stats.quantile(speculative, p),
            quantile_ratio(draws, target, speculative, p, alpha=ALPHA),
        )


def _interval(e: Estimate) -> str:
    return f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g})"


def _judge_row(
    row: MatrixRow,
    *,
    n: int,
    refused: Sequence[Receipt],
    cost: Costs | None,
    limits: MatrixLimits,
    void: str,
    unrepresentative: str,
    min_pairs: int,
) -> tuple[MatrixVerdict, str]:
    if row.cohort["priority"] == "protected":
        return "target_only", "protected traffic: speculation must never delay it"
    if refused and n < row.refused:
        return "target_only", f"this server refuses it when speculating: {_refused_why(refused)}"
    if row.quality_regressions:
        return "target_only", (
            f"{row.quality_regressions} of {row.quality_cases} prompts fail their check each time"
            " with speculation and pass it each time without"
        )
    if void:
        return "inconclusive", f"its times are void: {void}"
    if unrepresentative:
        return "inconclusive", (
            f"not decisive: {unrepresentative}; measure a sample of the route's own traffic"
        )
    ratio = row.e2e_ratio
    if ratio is None or not ratio.is_known or n < _needed(row, min_pairs):
        have = f"{n} pairs" if row.is_paired else f"{n} completed requests on the smaller arm"
        return "inconclusive", f"too little evidence: {have}, {_needed(row, min_pairs)} needed"
    if row.k is None or not row.drafted:
        return "target_only", "nothing was drafted here, so nothing can be saved"
    tail = next((c for c in row.latency if (c.metric, c.quantile) == ("tpot", "p95")), None)
    takes = f"requests take {_interval(ratio)} times as long as target-only"
    if tail and tail.ratio.low > limits.max_tpot_p95_ratio:
        return "target_only", (
            f"TPOT p95 {_change(tail.ratio)} is over the limit of"
            f" {100 * (limits.max_tpot_p95_ratio - 1):+.3g}%; {takes}; {_cause(row, cost)}"
        )
    within = _within(tail, limits)
    if ratio.low > 1:
        return "target_only", f"{takes}{within}; {_cause(row, cost)}"
    if 1 - limits.indifferent < ratio.low:
        return "target_only", f"nothing to gain: {takes}{within}"
    if ratio.high < limits.e2e_ratio:
        also = f"; k {', '.join(map(str, row.tied))} cannot be told from it" if row.tied else ""
        return "speculate", f"with k {row.k} {takes}{also}"
    wanted = (
        f"the speed-up of {limits.min_speedup:g} that it must reach is undecided"
        if limits.min_speedup > 1
        else "undecided"
    )
    needed = stats.needed_for_interval(ratio, limits.e2e_ratio)
    units = "pairs" if row.is_paired else "requests on each arm"
    more = f", about {needed} more {units} would decide" if needed else ""
    if row.n_prompts < stats.FEWEST_CLUSTERS:
        more = f"; {few_prompts(row.n_prompts)}"
    return "inconclusive", f"{takes}{within}: {wanted}{more}"


def _needed(row: MatrixRow, min_pairs: int) -> int:
    """Pairs (or requests) that a row needs; a cell of a sweep has its rounds for that."""
    return 2 if row.cohort["stage"] == SWEEP else min_pairs


def _change(ratio: Estimate) -> str:
    """A ratio as a change in percent, with its interval."""
    low = f"{100 * (ratio.low - 1):+.3g}%" if ratio.low > 0 else "no bound"
    high = f"{100 * (ratio.high - 1):+.3g}%" if math.isfinite(ratio.high) else "no bound"
    return f"{100 * (ratio.value - 1):+.3g}% ({low} to {high})"


def _within(tail: LatencyCell | None, limits: MatrixLimits) -> str:
    """What the limit on the tail says where it does not forbid, or empty."""
    if tail is None or not tail.ratio.is_known or math.isinf(limits.max_tpot_p95_ratio):
        return ""
    limit = f"the limit of {100 * (limits.max_tpot_p95_ratio - 1):+.3g}%"
    inside = tail.ratio.high <= limits.max_tpot_p95_ratio
    return f"; TPOT p95 {_change(tail.ratio)} is {'within' if inside else 'not clear of'} {limit}"


def _cause(row: MatrixRow, cost: Costs | None) -> str:
    """Why it does not pay: drafts miss, or verifying costs more than it saves at this load."""
    if row.acceptance is None or row.k is None:
        return "the requests carry no acceptance counts"
    known = cost is not None and row.k in cost.verify
    needed = break_even_acceptance(row.k, cost) if cost is not None and known else 0.3
    at = (
        "at this load"
        if row.cohort["stage"] in _OPEN_LOOP
        else f"at concurrency {row.cohort['concurrency']}"
    )
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


def _reversals(
    rows: Sequence[MatrixRow], receipts: Sequence[Receipt], void: Mapping[str, str]
) -> list[str]:
    """Where the average over a route says one thing and its cohorts another (Simpson).

    Within a stage: the stages send different traffic.
    """
    found = []
    for route, stage in _routes_and_stages(receipts):
        if stage in void:
            continue
        here = [
            row
            for row in rows
            if (row.cohort["route"], row.cohort["stage"]) == (route, stage)
            and row.cohort["priority"] != "protected"
            and row.e2e_ratio is not None
            and row.e2e_ratio.is_known
        ]
        if len(here) < 2:
            continue
        overall = _unweighted_ratio([r for r in receipts if (r.route, r.stage) == (route, stage)])
        slower = [row for row in here if row.e2e_ratio and row.e2e_ratio.low > 1]
        faster = [row for row in here if row.e2e_ratio and row.e2e_ratio.high < 1]
        average = f"route {route}, {stage}: on average requests take {overall:.3g} times as long"
        if overall < 1 and slower:
            names = "; ".join(row.name for row in slower)
            found.append(f"{average}, yet they get slower in: {names}")
        if overall > 1 and faster:
            names = "; ".join(row.name for row in faster)
            found.append(f"{average}, yet they get faster in: {names}")
    return found


def _unweighted_ratio(receipts: Sequence[Receipt]) -> float:
    """Mean e2e of each arm over all that is compared: the number a dashboard would show."""
    arms = _arms([r for r in receipts if r.priority != "protected"])
    means = [
        sum(times) / len(times) if times else math.nan for times in arms.times(LATENCIES["e2e"])
    ]
    return means[1] / means[0]


def _routes_and_stages(receipts: Iterable[Receipt]) -> list[tuple[str, str]]:
    return sorted({(r.route, r.stage) for r in receipts}, key=lambda x: (x[0], _STAGES.index(x[1])))


def _mix_shifts(receipts: Sequence[Receipt]) -> list[str]:
    """Where the arms got different traffic: their ratio then compares mixes, not arms.

    A request that comes again under its key (a canary's later step) is one: its arm is sticky.
    """
    found = []
    tests = _routes_and_stages(receipts)
    for route, stage in tests:
        keys: dict[str, dict[tuple[str, int], tuple[str, ...]]] = {arm: {} for arm in Arm}
        for r in receipts:
            if (r.route, r.stage) == (route, stage) and r.priority != "protected":
                mix = tuple(str(getattr(r, name)) for name in MIX_DIMENSIONS)
                keys[r.arm][r.prompt_id, r.repeat] = mix
        target, speculative = (
            Counter(keys[arm].values()) for arm in (Arm.TARGET_ONLY, Arm.SPECULATIVE)
        )
        classes = sorted(target | speculative)
        if not target or not speculative or len(classes) < 2:
            continue
        n, m = target.total(), speculative.total()
        statistic, df, p = stats.same_mix(
            [target[c] for c in classes], [speculative[c] for c in classes]
        )
        if p < MIX_ALPHA / len(tests):
            most = max(classes, key=lambda c: abs(speculative[c] / m - target[c] / n))
            found.append(
                f"route {route}, {stage}: the arms' traffic differs beyond chance (chi-square"
                f" {statistic:.3g}, df {df}, p {p:.1g}, n {m} speculative and {n} target-only):"
                f" {_mix_name(most, classes)} is {speculative[most] / m:.0%} of speculative and"
                f" {target[most] / n:.0%} of target-only requests; compare within cohorts only"
            )
    return found


def _mix_name(mix: Sequence[str], among: Sequence[Sequence[str]]) -> str:
    """What tells a class of traffic from the others."""
    parts = [
        f"{name.removesuffix('_band')} {value or 'none'}"
        for i, (name, value) in enumerate(zip(MIX_DIMENSIONS, mix, strict=True))
        if len({other[i] for other in among}) > 1
    ]
    return ", ".join(parts)


def _refusals(receipts: Sequence[Receipt]) -> tuple[Refusal, ...]:
    """What the speculative arm turns down on each route, and target-only does not."""
    found = []
    for route in sorted({r.route for r in receipts}):
        mine = [r for r in receipts if r.route == route and r.stage != SWEEP]
        both = {r.pair_id for r in mine if r.arm == Arm.TARGET_ONLY and is_refused(r)}
        speculative = [r for r in mine if r.arm == Arm.SPECULATIVE and r.pair_id not in both]
        refused = [r for r in speculative if is_refused(r)]
        if not refused:
            continue
        message = Counter(r.error_message or "no message" for r in refused).most_common(1)[0][0]
        options = tuple(blamed_options(refused, [r for r in speculative if not is_refused(r)]))
        found.append(Refusal(route, options, len(refused), len(speculative), message))
    return tuple(found)


def _in_flight(receipts: Sequence[Receipt]) -> dict[str, int]:
    """Receipt id -> requests on the speculative arm when it was sent there, itself included."""
    found: dict[str, int] = {}
    for stage in _OPEN_LOOP:
        sent = [
            (r.sent_ns, r.done_ns, r.receipt_id)
            for r in receipts
            if (r.stage, r.arm) == (stage, Arm.SPECULATIVE)
            and r.sent_ns is not None
            and r.done_ns is not None
        ]
        starts, ends = (np.sort([times[i] for times in sent]) for i in (0, 1))
        for start, _, receipt_id in sent:
            begun = int(np.searchsorted(starts, start, side="right"))
            found[receipt_id] = begun - int(np.searchsorted(ends, start, side="right"))
    return found


# --- what to do ---------------------------------------------------------------------------------


def _advice(rows: Sequence[MatrixRow], refusals: Sequence[Refusal]) -> Iterable[str]:
    """What follows for the eligibility policy, where a server has no switch of its own for it."""
    for refusal in refusals:
        share = f"{refusal.n} of {refusal.of} requests"
        if refusal.options:
            yield (
                f"route {refusal.route}: keep requests with {', '.join(refusal.options)} on"
                f" target-only: the speculative server refuses {share} for it"
            )
        else:
            yield (
                f"route {refusal.route}: the speculative server refuses {share} and no option of"
                " theirs explains it: look at the defaults that it adds (generation_config)"
            )
    for route in sorted({row.cohort["route"] for row in rows}):
        mine = [row for row in rows if row.cohort["route"] == route]
        slow = _bands(mine, "prompt_band", "target_only")
        fast = _bands(mine, "prompt_band", "speculate")
        long = [band for band in slow if fast and _lower(band) > max(map(_lower, fast))]
        if long:
            yield (
                f"route {route}: send prompts of {_lower(long[0])} tokens and more to target-only;"
                " vLLM has no gate by prompt length, so the router must do it (eligibility policy)"
            )
        off, on = (
            [
                row.in_flight
                for row in mine
                if row.verdict == verdict and row.is_paired and row.in_flight is not None
            ]
            for verdict in ("target_only", "speculate")
        )
        if on and off and min(off) > max(on):
            yield (
                f"route {route}: it pays up to concurrency {max(on)} and no more at {min(off)};"
                " limit it by requests in flight (eligibility policy), or in vLLM by"
                " num_speculative_tokens_per_batch_size"
            )


def _bands(rows: Sequence[MatrixRow], dimension: str, verdict: MatrixVerdict) -> list[str]:
    """Values of a dimension in rows of that verdict and in no row of the other, by size."""
    with_it = {v for row in rows if row.verdict == verdict for v in row.observed[dimension]}
    other = {
        v
        for row in rows
        if row.verdict not in (verdict, "inconclusive")
        for v in row.observed[dimension]
    }
    return sorted((v for v in with_it - other if v != "unknown"), key=_lower)


def _lower(band: str) -> int:
    """Smallest prompt length of a band.

    >>> [_lower(band) for band in ("<64", "64-255", ">=4096")]
    [0, 64, 4096]
    """
    if band.startswith("<"):
        return 0
    return int(band.removeprefix(">=").split("-")[0])
