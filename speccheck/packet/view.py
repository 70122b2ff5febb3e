"""The view models of a packet: frozen, complete, nothing rounded, nothing left to compute.

Templates print these and decide nothing. They are also packet.json: `to_json(view)` is the file,
and its schema is read off these classes, so the page and the file cannot disagree. A part that was
not measured is a `Missing` with its reason, in the page and in the file. `None` is used for a
bound that does not exist, for a text that a field does not need, and for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speccheck.charts import Picture

Tone = Literal["good", "bad", "unsure", "broken", "plain"]


@dataclass(frozen=True)
class Mark:
    """A verdict as a word and a symbol; colour only repeats what they say."""

    word: str
    symbol: str
    tone: Tone


@dataclass(frozen=True)
class Missing:
    """A part that is not there, and why."""

    not_measured: str


@dataclass(frozen=True)
class Figure:
    """A number with its unit, for the filters to print."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Interval:
    """An estimate; `low` or `high` is None where no bound exists."""

    value: float
    low: float | None
    high: float | None
    n: int
    method: str
    alpha: float
    unit: str


@dataclass(frozen=True)
class Setting:
    """A dotted key and its value as text."""

    key: str
    value: str


Sentence = tuple[str | Figure, ...]
"""Text with numbers in it that are not rounded yet."""


# --- verdict ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MissingView:
    """One of the three views that the packet lacks."""

    number: int
    name: str
    why: str


@dataclass(frozen=True)
class RouteLine:
    """What was decided for a route: one line."""

    route: str
    mark: Mark
    stage: str
    after: str
    """The stage again, or "" where the mark names it: "passes replay"."""
    k: int | None
    scope: str
    reason: str


@dataclass(frozen=True)
class CounterLine:
    """One quantity of a stage by one arm's server and by our receipts, warm-up included."""

    stage: str
    arm: str
    quantity: str
    server: Figure | Missing
    receipts: Figure | Missing
    gap: Figure | Missing
    why: str


@dataclass(frozen=True)
class StageLine:
    """One of the four stages: how it ended and what was counted."""

    name: str
    mark: Mark
    reasons: tuple[str, ...]
    started: str
    finished: str
    counts: tuple[Figure, ...]
    client: ClientLine | Missing
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ClientLine:
    """Whether our own client was in time during a stage."""

    mark: Mark
    why: str
    figures: tuple[Figure, ...]


# --- view 1: probability fixture ----------------------------------------------------------------


@dataclass(frozen=True)
class ProbabilityRow:
    """One row of the fixture's table: p and q of each token at a position."""

    position: int
    after: str
    target: tuple[Figure, ...]
    draft: tuple[Figure, ...]
    overlap: Figure
    """Sum of min(p, q): the chance that a draft is accepted here."""


@dataclass(frozen=True)
class ProbabilityTable:
    """A made-up pair of models, small enough to know everything about."""

    name: str
    vocabulary: tuple[str, ...]
    horizon: int
    rows: tuple[ProbabilityRow, ...]


@dataclass(frozen=True)
class ProofLine:
    """The exact law against the target's, without tolerance."""

    name: str
    mark: Mark
    sequences: int
    total_variation: Figure
    first_difference: str


@dataclass(frozen=True)
class ExactLine:
    """A quantity as an exact fraction, as a number, and as observed."""

    name: str
    exact: str
    expected: Figure
    observed: Figure


@dataclass(frozen=True)
class ToleranceLine:
    """What was declared before the first run, and the worst that was observed."""

    name: str
    declared: Figure
    observed: Figure
    where: str
    mark: Mark


@dataclass(frozen=True)
class CellValue:
    """How often one token stood at one position."""

    token: str
    exact: str
    expected: Figure
    speculative: Figure
    target_only: Figure
    within: bool


@dataclass(frozen=True)
class CellRow:
    """The cells of one position."""

    position: int
    cells: tuple[CellValue, ...]


@dataclass(frozen=True)
class ChiSquareLine:
    """Goodness of fit of one position or of two neighbours."""

    name: str
    statistic: Figure | Missing
    df: int
    p_value: Figure
    level: float
    mark: Mark


@dataclass(frozen=True)
class TraceTest:
    """One drafted token's test: it stands if low <= u < high."""

    position: int
    token: str
    p: Figure
    q: Figure
    low: Figure
    high: Figure
    u: Figure
    outcome: str
    tone: Tone


@dataclass(frozen=True)
class TraceRound:
    """One round: the drafts, their tests, what followed, what was committed."""

    title: str
    tests: tuple[TraceTest, ...]
    steps: tuple[Sentence, ...]
    committed: str


@dataclass(frozen=True)
class TraceView:
    """One run, step by step, with its random numbers."""

    seed: int
    rounds: tuple[TraceRound, ...]
    result: str


@dataclass(frozen=True)
class ControlLine:
    """A wrong verifier run through the same checks: they can fail."""

    name: str
    mistake: str
    mark: Mark
    total_variation: Figure
    largest_deviation: Figure
    where: str
    caught_by: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class FixtureView:
    """Probability fixture."""

    mark: Mark
    reasons: tuple[str, ...]
    algorithm: str
    draft_sampling: str
    verification: str
    """Both in the words of vLLM's settings."""
    n_seeds: int
    statement: str
    table: ProbabilityTable
    proofs: tuple[ProofLine, ...]
    per_run: tuple[ExactLine, ...]
    first_round: tuple[ExactLine, ...]
    tolerances: tuple[ToleranceLine, ...]
    cells: tuple[CellRow, ...]
    chi_squares: tuple[ChiSquareLine, ...]
    traces: tuple[TraceView, ...]
    controls: tuple[ControlLine, ...]
    not_covered: tuple[str, ...]


# --- view 2: workload decision matrix -----------------------------------------------------------


@dataclass(frozen=True)
class LatencyLine:
    """One latency quantile of a cohort on both arms, and their ratio."""

    quantile: str
    target: Figure
    speculative: Figure
    ratio: Interval | Missing


@dataclass(frozen=True)
class LatencyGroup:
    """The quantiles of one metric in a cohort; those that too few pairs carry are `Missing`."""

    metric: str
    lines: tuple[LatencyLine | Missing, ...]


@dataclass(frozen=True)
class ProposalLine:
    """What one proposal length did in a cohort."""

    k: int
    n: int
    """Pairs, or where unpaired the completed requests of the smaller arm."""
    e2e_ratio: Interval | Missing
    acceptance: Interval | Missing
    mean_acceptance_length: Interval | Missing


@dataclass(frozen=True)
class CohortRow:
    """One row of the matrix."""

    number: int
    name: str
    mark: Mark
    k: int | None
    why: str
    share: Figure
    in_flight: int | None
    """Requests at once on the speculative arm."""
    dimensions: tuple[Setting, ...]
    pooled: tuple[str, ...]
    is_paired: bool
    """False for a canary, which sends each request to one arm."""
    n_pairs: int
    n_target: int
    n_speculative: int
    unpaired: int
    accepted: int
    drafted: int
    acceptance: Interval | Missing
    mean_acceptance_length: Interval | Missing
    draft_coverage: Figure | Missing
    saved_modelled: Figure | Missing
    saved_measured: Figure | Missing
    latency: tuple[LatencyGroup, ...]
    e2e_ratio: Interval | Missing
    by_k: tuple[ProposalLine, ...]
    errors_target: int
    errors_speculative: int
    refused: int
    quality: CohortQuality | Missing


@dataclass(frozen=True)
class CohortQuality:
    """Checked cases of a cohort: those that got worse, those that got better."""

    cases: int
    regressions: int
    improvements: int


@dataclass(frozen=True)
class MatrixView:
    """Workload decision matrix."""

    counts: tuple[Figure, ...]
    """Cohorts by verdict."""
    level: Figure
    """One-sided level of a row, which its proposal lengths share."""
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    rows: tuple[CohortRow, ...]
    chart: Chart | Missing


# --- view 3: service latency --------------------------------------------------------------------


@dataclass(frozen=True)
class Quantiles:
    """Latency of one arm. A quantile that n cannot carry is a `Missing`."""

    n: int
    p50: Figure | Missing
    p95: Figure | Missing
    p99: Figure | Missing


@dataclass(frozen=True)
class LoadLine:
    """One metric at one load, on both arms."""

    metric: str
    stage: str
    load: str
    target: Quantiles
    speculative: Quantiles


Cell = str | int | Figure | Missing
"""What stands in a table of numbers."""


@dataclass(frozen=True)
class ChartTable:
    """The numbers of a chart as a small table: its text alternative."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A chart: what it shows in words, in numbers, and as data to draw."""

    name: str
    """Identifier on the page."""
    title: str
    description: str
    table: ChartTable
    picture: Picture


@dataclass(frozen=True)
class SchedulingLine:
    """How the scheduler treated one class of traffic at one load on one arm."""

    load: str
    traffic: str
    arm: str
    n: int
    figures: tuple[Figure | Missing, ...]


@dataclass(frozen=True)
class SchedulingTable:
    """Scheduling figures: one column per figure that any line has."""

    columns: tuple[str, ...]
    lines: tuple[SchedulingLine, ...]


@dataclass(frozen=True)
class BlockLine:
    """One time block of the protected-traffic design."""

    block: int
    mirror: bool
    n: int
    p50: Figure | Missing
    p95: Figure | Missing


@dataclass(frozen=True)
class ProtectedView:
    """Protected traffic with and without the mirror."""

    metric: str
    design: str
    mark: Mark
    ratio: Interval | Missing
    limit: float | None
    why: str
    chart: Chart | Missing
    blocks: tuple[BlockLine, ...]


@dataclass(frozen=True)
class MonitorLine:
    """Where one rule's monitor stands on a route of the canary."""

    route: str
    rule: str
    cohort: str
    method: str
    n: int
    estimate: Interval | Missing
    limit: float | None
    unit: str
    evidence: str
    """Odds so far, of those that pass the rule, and of those that fail it."""
    mark: Mark
    next: str


@dataclass(frozen=True)
class AssignmentLine:
    """How a route's requests fell to the arms."""

    route: str
    speculative: int
    target_only: int
    expected: int
    """Speculative requests that the shares promised."""
    mismatch: str
    """Evidence against the planned shares, as odds, of those that make it a finding."""


@dataclass(frozen=True)
class StepLine:
    """One step of the canary."""

    step: str
    route: str
    share: Figure
    began: Figure
    ended: Figure | Missing
    speculative_n: int
    target_n: int
    mark: Mark
    why: str


@dataclass(frozen=True)
class EventLine:
    """Something that happened to a route during the canary."""

    at: Figure
    kind: str
    route: str
    text: str
    rule: str
    action: str
    handed_over: int | Missing | None
    """None for an event that hands nothing over."""
    tone: Tone


@dataclass(frozen=True)
class CanaryView:
    """Canary: steps, monitors, events and one time chart per route."""

    steps: tuple[StepLine, ...]
    monitors: tuple[MonitorLine, ...]
    assignment: tuple[AssignmentLine, ...]
    events: tuple[EventLine, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class RatioLine:
    """A named ratio."""

    name: str
    ratio: Interval | Missing


@dataclass(frozen=True)
class LatencyFloor:
    """Target-only against target-only at the same load: what the measurement tells apart."""

    pairs: int
    ratios: tuple[RatioLine, ...]


@dataclass(frozen=True)
class ServiceView:
    """Service latency."""

    summary: str
    sharing: str
    left_out: tuple[str, ...]
    loads: tuple[LoadLine, ...]
    noise_floor: LatencyFloor | Missing
    strips: tuple[Chart, ...]
    distributions: tuple[Chart, ...]
    scheduling: SchedulingTable | Missing
    protected: ProtectedView | Missing
    canary: CanaryView | Missing


# --- decisions and findings ---------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiptLine:
    """A receipt that a finding points at; `known` is False where this run does not hold it."""

    receipt_id: str
    known: bool
    prompt_id: str
    arm: str
    outcome: str
    error: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class FindingLine:
    """One rule judged for one cohort or route."""

    rule: str
    mark: Mark
    route: str
    cohort: str
    stage: str
    estimate: Interval | Missing
    limit: float | None
    unit: str
    why: str
    needed: int | None
    counted: bool
    examples: tuple[ReceiptLine, ...]


@dataclass(frozen=True)
class RouteFindings:
    """A route's decisions with all findings on that route, worst first."""

    route: str
    decisions: tuple[RouteLine, ...]
    """One per stage that decided on the route, in order of the stages."""
    counts: tuple[Figure, ...]
    """Counted findings by verdict."""
    open: tuple[FindingLine, ...]
    """What counts and did not pass, worst first."""
    passed: tuple[FindingLine, ...]
    uncounted: tuple[FindingLine, ...]
    """Shown but not counted: rules in dry run, small slices, what a later stage judges again."""


# --- regression cases and preservation of outputs -----------------------------------------------


@dataclass(frozen=True)
class DivergenceLine:
    """First differing token of a greedy pair."""

    prompt_id: str
    route: str
    position: int
    gap: Figure | Missing
    kind: str
    target_token: str
    speculative_token: str


@dataclass(frozen=True)
class Regression:
    """A regression case with both texts."""

    number: int
    prompt_id: str
    route: str
    task: str
    phase: str
    label: str
    meaning: str
    check: str
    reason: str
    runs: int
    target_passes: int
    speculative_passes: int
    prompt: str
    target_text: str
    speculative_text: str
    common_chars: int
    """Length of the beginning that both texts share."""
    receipts: tuple[str, ...]
    divergence: DivergenceLine | Missing


@dataclass(frozen=True)
class QualityLine:
    """Paired pass/fail of one task type."""

    task: str
    n: int
    target_passes: int
    speculative_passes: int
    lost: int
    gained: int
    flipped: int | Missing
    """Cases on which target-only differed from itself."""
    confirmed: str
    """Confirmed regressions and improvements: "1 worse, 0 better"."""
    mcnemar_p: Figure | Missing
    difference: Interval | Missing
    margin: float
    mark: Mark
    why: str


@dataclass(frozen=True)
class FaultLine:
    """One fault of the form of answers, paired."""

    fault: str
    n: int
    target: int
    speculative: int
    only_speculative: int
    only_target: int
    difference: Interval | Missing
    mcnemar_p: Figure | Missing


@dataclass(frozen=True)
class ChangeLine:
    """One property that differs between the arms, beside target-only against itself."""

    what: str
    n: int
    changed: int
    control: str
    """"0 of 40", or that there was none."""
    p_value: Figure | Missing


@dataclass(frozen=True)
class FormView:
    """Whether the form of the answers changed, at one temperature."""

    temperature: str
    pairs: int
    faults: tuple[FaultLine, ...]
    none_shown: str
    """Faults that no answer shows, in words."""
    changes: tuple[ChangeLine, ...]
    length: Interval | Missing


@dataclass(frozen=True)
class PreferenceLine:
    """What one judge or reviewer preferred, arms hidden."""

    source: str
    who: str
    n: int
    target_only: int
    speculative: int
    ties: int
    unclear: int
    difference: Interval | Missing
    p_value: Figure | Missing


@dataclass(frozen=True)
class DivergencesView:
    """Greedy outputs compared token by token."""

    pairs: int
    tokens: int
    diverged: int
    ties: int
    near: int
    violations: int
    unknown: int
    tau: Figure | Missing
    per_1000: Figure | Missing
    """Divergences in 1,000 compared tokens; the control's beside it."""
    control_per_1000: Figure | Missing
    p_value: Figure | Missing
    """That the rate is no higher than the control's: conditional binomial."""
    cases: tuple[DivergenceLine, ...]


@dataclass(frozen=True)
class NoiseAxisLine:
    """One way in which the target was computed twice, and how far a top-2 gap moved at most."""

    name: str
    largest: Figure
    n: int


@dataclass(frozen=True)
class NoiseFloorView:
    """Target-only against target-only."""

    pairs: int
    tokens: int
    diverged: int
    flipped: int
    tau: Figure | Missing
    positions: int
    content_missed: Figure | Missing
    axes: tuple[NoiseAxisLine, ...]


@dataclass(frozen=True)
class LosslessLine:
    """One distribution test on a live server."""

    name: str
    catches: str
    n: int
    unit: str
    effect: Interval | Missing
    control: Figure | Missing
    """The same effect, target-only against target-only."""
    limit: Figure | Missing
    """What the effect's upper limit may reach: control + margin."""
    seen: Figure | Missing
    """Smallest effect that is found nine times in ten."""
    p_value: Figure | Missing
    """Holm-adjusted over the tests."""
    mark: Mark
    why: str


@dataclass(frozen=True)
class DistributionsView:
    """Sampled answers against the law that the target states for each of their tokens."""

    mark: Mark
    alpha: float
    tested: tuple[str, ...]
    not_tested: tuple[str, ...]
    tests: tuple[LosslessLine, ...]


@dataclass(frozen=True)
class FeatureLine:
    """One server feature on both arms."""

    feature: str
    checked: str
    n: int
    target_ok: int
    speculative_ok: int
    mark: Mark
    why: str


@dataclass(frozen=True)
class ReplayView:
    """What replay showed about outputs."""

    cases: int | Missing
    improvements: int | Missing
    bound: Figure | Missing
    """Upper 95 % bound on the true regression rate where no case was found."""
    regressions: tuple[Regression, ...] | Missing
    quality: tuple[QualityLine, ...] | Missing
    form: tuple[FormView, ...] | Missing
    preferences: tuple[PreferenceLine, ...] | Missing
    divergences: DivergencesView | Missing
    noise_floor: NoiseFloorView | Missing
    lossless: DistributionsView | Missing
    features: tuple[FeatureLine, ...] | Missing


# --- what was compared with what ----------------------------------------------------------------


@dataclass(frozen=True)
class ArmView:
    """One arm as it ran."""

    arm: str
    url: str
    engine: str
    model: str
    engine_config_id: str
    speculative_config: tuple[Setting, ...]
    config: tuple[Setting, ...]


@dataclass(frozen=True)
class DifferenceLine:
    """A key in which the arms differ beside the speculative config."""

    key: str
    target_only: str
    speculative: str
    waived: str
    """Why it does not count; empty where it does."""


@dataclass(frozen=True)
class TrafficLine:
    """One cohort of the traffic that was measured."""

    cohort: str
    n: int
    share: Figure


@dataclass(frozen=True)
class ComparisonView:
    """Versions, configurations, digests, and what differs between the arms."""

    arms: tuple[ArmView, ...]
    differences: tuple[DifferenceLine, ...]
    versions: tuple[Setting, ...]
    digests: tuple[Setting, ...]
    traffic: tuple[TrafficLine, ...]
    machine: tuple[Setting, ...]
    config: tuple[Setting, ...]
    seed: str


# --- the packet ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PacketView:
    """The whole packet."""

    schema_version: int
    title: str
    headline: str
    complete: bool
    missing: tuple[MissingView, ...]
    mark: Mark
    exit_code: int
    exit_meaning: str
    summary: str
    run_id: str
    created: str
    expires: str
    override: str
    routes: tuple[RouteLine, ...]
    stages: tuple[StageLine, ...]
    counters: tuple[CounterLine, ...]
    fixture: FixtureView | Missing
    matrix: MatrixView | Missing
    service: ServiceView | Missing
    findings: tuple[RouteFindings, ...]
    replay: ReplayView | Missing
    comparison: ComparisonView
    not_proved: tuple[Sentence, ...]
