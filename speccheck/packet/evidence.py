"""What the stages hand over: everything a packet is made of, as records and plain dicts.

Typed dicts rather than classes, because this is what comes back from the store as JSON. Three
conventions hold throughout:

- An *optional part* may be left out, or be `{"not_measured": "why"}`; the packet then says
  "not measured: why". It never shows a blank or a zero in its place.
- Verdicts are words: pass, inconclusive, error, fail. Times of day are ISO strings, durations are
  seconds, shares are 0..1. A figure whose name is free ends in its unit (`queue_age_p95_s`,
  `kv_cache_share`, `output_tokens_per_s`); without one it is a plain number.
- An `Interval` is an `Estimate` or its `to_json` form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from speccheck.grading.blind import PreferenceSummary
from speccheck.matrix import MatrixRow
from speccheck.records import Decision, Estimate, Finding, Receipt


class NotMeasured(TypedDict):
    """In place of any optional part: why it is not there."""

    not_measured: str


class EstimateDict(TypedDict):
    """`to_json(Estimate)`: None for an unknown value and for a bound that does not exist."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    alpha: float


Interval = Estimate | EstimateDict | NotMeasured | None


class TrafficShare(TypedDict):
    """One cohort of the traffic mix."""

    cohort: str
    n: int
    share: float


class RunFacts(TypedDict, total=False):
    """The run row. Only `run_id` and `created` are needed; all else is shown where it is given."""

    run_id: str
    created: str
    """Wall-clock ISO time of the run row; the packet has no other clock."""
    config: Mapping[str, Any]
    """rollout.yaml as it was resolved, defaults included."""
    digests: Mapping[str, str]
    """What the decisions rest on: target, draft, engines, corpus, rules, policy ...: name ->
    tagged digest, in words where that says more."""
    traffic: Sequence[TrafficShare]
    """The traffic that was measured, by cohort: what the decisions rest on, too."""
    seed: int
    versions: Mapping[str, str]
    """speccheck, python, numpy, onnxruntime, vllm ...: name -> version."""
    machine: Mapping[str, Any]
    """cpu, cores, gpu, driver, os ...: whatever was captured."""
    differences: Mapping[str, Sequence[Any]]
    """`launch.differences`, the waived ones included: dotted key -> (target-only, speculative)."""
    waived: Mapping[str, str]
    """Those that do not make the comparison void -> why (`launch.accepted`)."""
    expires: str
    """When the decision ends by itself, or what makes it void (new model, engine, policy)."""
    override: str
    """A person's override of a decision, with the reason: shown at the top."""


class ArmFacts(TypedDict):
    """`ArmDescription` as a dict, with its digest."""

    arm: str
    url: str
    engine: str
    model: str
    speculative_config: Mapping[str, Any] | None
    engine_config_id: str
    config: Mapping[str, Any]


class ClientHealth(TypedDict):
    """Whether our own client was in time: `asdict(health.ClientHealth)`.

    Further numbers may be added, their names ending in their unit.
    """

    valid: bool
    reasons: Sequence[str]
    """Why it was not in time; empty if it was."""
    is_late: bool
    """Whether its own lateness speaks against it, or only requests that it had to hold back."""
    lag_p99_s: float | None
    loop_stall_max_s: float | None
    loop_cpu_share: float | None


class CounterRow(TypedDict):
    """One quantity by a server's counters and by the receipts of what it answered."""

    quantity: str
    server: int | None
    """None: the server has no such counter."""
    receipts: int | None
    """None: no receipt carries it."""
    gap: int | None
    """Server less receipts."""
    why: str
    """Each known reason for the gap, or that they agree."""


class ServerCounters(TypedDict):
    """What one arm's server counted during a stage, warm-up included, beside its receipts."""

    rows: Sequence[CounterRow]
    resets: Sequence[str]
    """Engines that restarted in mid-stage."""
    acceptance: Interval
    """Accepted over drafted by the counters alone."""
    tpot_p95: Mapping[str, float] | None
    """low_s and high_s: the borders of the histogram bucket that TPOT p95 lies in."""


class StageEvidence(TypedDict):
    """One entry of `RunEvidence.stages`; the key is fixture, replay, shadow or canary."""

    verdict: str
    reasons: Sequence[str]
    """One plain sentence each, worst first."""
    started: str
    finished: str
    """ISO time, or "" where the stage was cut off."""
    counts: Mapping[str, int]
    """planned, sent, ok, error, rejected, incomplete, cancelled, unpaired, warnings ..."""
    client_health: ClientHealth | NotMeasured
    """{"not_measured": "no requests are sent"} for the fixture."""
    server_counters: Mapping[str, ServerCounters | NotMeasured] | NotMeasured
    """By arm."""
    notes: Sequence[str]
    evidence: Mapping[str, Any]
    """fixture: `FixtureResult.to_dict()`; replay: `ReplayEvidence`; shadow: `ShadowEvidence`;
    canary: `CanaryEvidence`."""


class RegressionCase(TypedDict):
    """A prompt that target-only answers rightly and the speculative arm does not, with reruns."""

    prompt_id: str
    route: str
    task: str
    phase: str
    label: str
    """real, or numerical_tie (the first divergence is a tie of the target's top two)."""
    check: str
    """What the answer was checked for, in words: "valid JSON for the schema", "number 42"."""
    reason: str
    """Why the speculative answer failed the check."""
    runs: int
    """Runs per arm (K)."""
    target_passes: int
    speculative_passes: int
    prompt: str
    target_text: str
    speculative_text: str
    receipts: Sequence[str]
    """Receipt ids: target-only, speculative."""
    divergence: NotRequired[Divergence]


class Divergence(TypedDict):
    """First differing token of a greedy pair."""

    prompt_id: str
    route: str
    position: int
    """Index of the first differing output token, from 0."""
    gap: float | None
    """logp(target's token) - logp(speculative token) under the target, nats; None: outside its
    top k (a violation), or no answer (unknown)."""
    kind: str
    """tie, near, violation or unknown."""
    target_token: str
    speculative_token: str


class Divergences(TypedDict):
    """Greedy outputs compared token by token, speculative against target-only."""

    pairs: int
    tokens: int
    """Tokens compared, up to and including the first difference (exposure)."""
    diverged: int
    ties: int
    near: int
    violations: int
    unknown: int
    tau: float | None
    """Largest gap that counts as a tie, nats; None: no noise floor was measured."""
    per_1000: float | None
    """Divergences in 1,000 compared tokens."""
    control_per_1000: float | None
    """The same, target-only against target-only; None: there was no control."""
    p_value: float | None
    """One-sided, that the rate is no higher than the control's (conditional binomial)."""
    cases: Sequence[Divergence]
    """The worst, not all."""


class NoiseAxis(TypedDict):
    """One way in which the target was computed twice: alone against in a batch, decoding against
    scoring.
    """

    name: str
    largest: float
    """Largest change of a top-2 gap, nats."""
    n: int


class NoiseFloor(TypedDict):
    """Target-only against target-only on the same prompts: what cannot be told apart from noise."""

    pairs: int
    tokens: int
    diverged: int
    flipped: int
    """Cases whose check came out differently in the two target-only runs."""
    tau: float | None
    """Largest change of the target's top-2 gap between two of its own computations, nats."""
    why_no_tau: NotRequired[str]
    positions: int
    """Positions that tau was taken from."""
    content_missed: float | None
    """Share of positions that may move more, at 95 % confidence."""
    axes: Sequence[NoiseAxis]


class QualityOfTask(TypedDict):
    """Paired pass/fail of one task type, all cases (the aggregate test)."""

    task: str
    n: int
    target_passes: int
    speculative_passes: int
    lost: int
    """Target passes, speculative fails (b)."""
    gained: int
    """Target fails, speculative passes (c)."""
    flipped: NotRequired[int | None]
    """A/A flip set: cases on which target-only differed from itself. None where it ran once."""
    regressions: NotRequired[int]
    """Confirmed, at numerical ties too."""
    improvements: NotRequired[int]
    """The confirmed mirror."""
    mcnemar_p: float | None
    """Exact, one-sided."""
    difference: Interval
    """(lost - gained)/n with Tango's interval."""
    margin: float
    verdict: str
    why: str


class FaultOfForm(TypedDict):
    """One fault of the form of answers, paired: cut at the token limit, refuses ..."""

    fault: str
    n: int
    target: int
    speculative: int
    only_speculative: int
    only_target: int
    difference: Interval
    """Share on the speculative arm minus share on target-only, with Tango's interval."""
    mcnemar_p: float


class ChangeOfForm(TypedDict):
    """One property that differs between the arms' answers, beside the A/A control."""

    what: str
    n: int
    changed: int
    control_n: int
    control_changed: int
    p_value: float | None


class FormOfAnswers(TypedDict):
    """Whether the form of the answers changed, at one temperature."""

    temperature: str
    pairs: int
    faults: Sequence[FaultOfForm]
    """Those that either arm shows."""
    none_shown: Sequence[str]
    """Faults that were looked for and that no answer shows."""
    changes: Sequence[ChangeOfForm]
    length: Interval
    """Tokens of an answer, speculative over target-only, geometric mean ratio."""


class LosslessTest(TypedDict):
    """One distribution test on a live server (PIT, rank categories, repeated samples ...)."""

    name: str
    catches: str
    """What kind of fault it is there for."""
    n: int
    unit: str
    """What n counts: tokens, visits, samples."""
    statistic: float | None
    p_value: float | None
    """Holm-adjusted over the tests; None: it does not apply."""
    effect: Interval
    effect_unit: str
    """share or nats."""
    where: str
    """The part with the largest effect, where the test has parts."""
    control: Interval
    """The same effect on target-only answers; None: not known."""
    limit: float
    """What the effect's upper limit may reach, in its unit: control + margin."""
    seen: float | None
    """Smallest effect that is found nine times in ten."""
    verdict: str | None
    """None: not judged."""
    why: str


class Distributions(TypedDict):
    """Sampled answers against the target's law: `battery.to_dict` and what was tested."""

    verdict: str
    alpha: float
    """Level of all tests together, declared before."""
    margin: float
    tokens: int
    """Verified tokens of the speculative arm."""
    open_tokens: int | None
    control_tokens: int
    prompts: int
    samples: int
    needed_tokens: int | None
    tests: Sequence[LosslessTest]
    tested: Sequence[str]
    """One sentence each."""
    not_tested: Sequence[str]


class FeatureCheck(TypedDict):
    """One server feature on both arms: stop strings, logprobs, min_p, structured output ..."""

    slice: str
    """Its short name, as in `Receipt.features` where it is a sampling feature."""
    feature: str
    checked: str
    """What was looked at, in a few words."""
    status: str
    """ok, broken, unsupported (refused by the speculative arm alone), not_offered, ignored or
    unclear."""
    n: int
    target_ok: int
    speculative_ok: int
    verdict: str
    why: str


class ReplayEvidence(TypedDict, total=False):
    """Replay: the same prompts on both arms. All parts are optional parts."""

    cases: int
    """Prompts whose answers were checked on both arms: what "0 regressions" is out of."""
    improvements: int
    """The mirror count: target-only fails K of K, speculative passes K of K."""
    regressions: Sequence[RegressionCase]
    quality: Sequence[QualityOfTask]
    form: Sequence[FormOfAnswers]
    divergences: Divergences | NotMeasured
    noise_floor: NoiseFloor | NotMeasured
    lossless: Distributions | NotMeasured
    features: Sequence[FeatureCheck]


class SchedulingFigures(TypedDict):
    """How the scheduler treated one class of traffic at one load on one arm."""

    load: str
    """"8 concurrent", "2.5 requests/s" ..."""
    traffic: str
    """Class of traffic: protected, normal, mirror, or a route."""
    arm: str
    n: int
    figures: Mapping[str, float | None]
    """Names end in their unit: queue_age_p95_s, server_queue_p95_s, kv_cache_share,
    output_tokens_per_s, preemptions ..."""


class ProtectedBlock(TypedDict):
    """One time block of the ABBA design."""

    block: int
    mirror: bool
    """Whether mirrored (speculative) traffic ran in this block."""
    n: int
    p50_s: float | None
    p95_s: float | None


class ProtectedTraffic(TypedDict):
    """Protected traffic with and without the mirror: an ABBA design, the block is the unit."""

    metric: str
    """What was timed, in words: "TTFT, scheduled to first token"."""
    design: str
    """"ABBA BAAB, 8 blocks of 20 s, 2 s washout"."""
    without_mirror_s: Sequence[float]
    with_mirror_s: Sequence[float]
    blocks: Sequence[ProtectedBlock]
    ratio: Interval
    limit: float | None
    verdict: str
    why: str


class LatencyFloor(TypedDict):
    """Target-only against target-only at the same load, in neighbouring blocks."""

    pairs: int
    ratios: Mapping[str, Interval]
    """By metric name: ttft_p95_ratio, tpot_p95_ratio, e2e_mean_ratio ..."""


class ShadowEvidence(TypedDict, total=False):
    """Shadow: load on both arms. Latency figures come from the receipts, not from here."""

    scheduling: Sequence[SchedulingFigures]
    protected: ProtectedTraffic | NotMeasured
    noise_floor: LatencyFloor | NotMeasured
    sharing: str
    """How the arms shared the machine: "two servers, alternating blocks", "two GPUs" ..."""


class CanaryMonitor(TypedDict):
    """Where a rule's monitor stands at the end: `monitors.Reading`, with its route.

    Evidence is odds: `pass_evidence` of `pass_needs` passes the rule, likewise to fail.
    """

    route: str
    rule: str
    cohort: str
    method: str
    verdict: str
    n: int
    estimate: Interval
    limit: float | None
    unit: str
    pass_evidence: float
    pass_needs: float
    fail_evidence: float
    fail_needs: float
    next: str
    """What would decide it, or since when it is decided."""


class CanaryAssignment(TypedDict):
    """How a route's requests fell to the arms, and the odds against the planned share."""

    route: str
    speculative: int
    target_only: int
    expected: float
    """Speculative requests that the shares promised."""
    evidence: float
    needs: float


class CanaryStep(TypedDict):
    """One step of the canary. Times are seconds from the canary's start."""

    step: str
    route: str
    share: float
    """Planned share of eligible requests on the speculative arm."""
    started_s: float
    ended_s: float | None
    speculative_n: int
    target_n: int
    verdict: str
    why: str


class CanaryEvent(TypedDict):
    """Something that happened to a route during the canary."""

    at_s: float
    kind: str
    """step, outage, fall_back, restart, override ..."""
    route: str
    text: str
    rule: NotRequired[str]
    action: NotRequired[str]
    """What was done: "disable_speculative_decoding_for_route"."""
    handed_over: NotRequired[int]
    """Requests moved to target-only in mid-answer."""


class CanaryEvidence(TypedDict, total=False):
    """Canary: a share of traffic on the speculative arm."""

    origin_ns: int
    """The receipts' clock at the canary's start. Left out: the first scheduled request."""
    steps: Sequence[CanaryStep]
    events: Sequence[CanaryEvent]
    monitors: Sequence[CanaryMonitor]
    assignment: Sequence[CanaryAssignment]


@dataclass(frozen=True)
class RunEvidence:
    """All that a packet is made of."""

    run: Mapping[str, Any]
    """`RunFacts`."""
    arms: Sequence[Mapping[str, Any]]
    """`ArmFacts`."""
    stages: Mapping[str, Mapping[str, Any]]
    """`StageEvidence` by stage name; a stage that did not run is left out."""
    receipts: Sequence[Receipt]
    matrix: Sequence[MatrixRow]
    findings: Sequence[Finding]
    decisions: Sequence[Decision]
    preferences: Sequence[PreferenceSummary] = ()
    """What judges and reviewers preferred: shown, never judged."""
    matrix_warnings: Sequence[str] = ()
    """`Matrix.warnings`: what to beware of when reading the matrix."""
    matrix_advice: Sequence[str] = ()
    """`Matrix.advice`: what follows from it."""
