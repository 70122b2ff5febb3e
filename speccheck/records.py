"""The records that cross a module border: frozen, with units in their names.

This is the language spoken at every arrow of the design: a corpus yields `Prompt`s, a plan is
`PlannedRequest`s, a drive yields `Receipt`s, statistics yield `Estimate`s, rules yield `Finding`s
and a stage ends in `Decision`s. Missing is None, never 0. Counts are stored, ratios are computed.
Identity is a tagged digest of canonical JSON, so that anyone can derive it again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

SCHEMA_VERSION = 1
"""Version of every machine-readable output (`--json`, packet.json)."""


# --- identity -----------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no blanks, no NaN: equal values give equal text.

    Raises:
        ValueError: for NaN or infinities, which have no JSON form.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(kind: str, value: Any) -> str:
    """`kind:` and the first 20 hex digits of the SHA-256 of kind and canonical JSON.

    The kind is hashed too, so that a prompt and a plan with the same content differ.
    """
    text = f"{kind}\n{canonical_json(value)}"
    return f"{kind}:{hashlib.sha256(text.encode()).hexdigest()[:20]}"


# --- verdicts -----------------------------------------------------------------------------------


class Verdict(IntEnum):
    """PASS < INCONCLUSIVE < ERROR < FAIL; the worst wins."""

    PASS = 0
    INCONCLUSIVE = 1
    ERROR = 2
    FAIL = 3

    @property
    def word(self) -> str:
        """Lower-case name for texts."""
        return self.name.lower()


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst verdict; of nothing it is ERROR, since nothing measured is never a pass."""
    return max(verdicts, default=Verdict.ERROR)


class Arm(StrEnum):
    """The two sides of every comparison."""

    TARGET_ONLY = "target_only"
    SPECULATIVE = "speculative"


class Stage(StrEnum):
    """The four stages, in the order in which they run."""

    FIXTURE = "fixture"
    REPLAY = "replay"
    SHADOW = "shadow"
    CANARY = "canary"


SWEEP = "sweep"
"""`stage` of a sweep's receipts: both arms at every proposal length and load. It decides nothing,
so it is none of the four stages."""

CALIBRATION = "calibration"
"""`stage` of the receipts that costs are calibrated from: batches of one size, outputs of one
length. They are no traffic and belong in no cohort."""

PROBE = "probe"
"""`stage` of the samples that losslessness is tested with, at temperature 1: no traffic either."""

GATEWAY = "gateway"
"""`stage` of the receipts of live traffic that went through the gateway: nobody planned it."""

FOLLOWED = "watch"
"""In the config of a run: it is a watch's own, of what it observed; the id of the run followed."""


class Action(StrEnum):
    """What is decided for a route."""

    PROMOTE = "promote"
    HOLD = "hold"
    FALL_BACK = "fall_back"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; never a bare float.

    value, low, high share the unit of the metric. `low`/`high` may be infinite where no bound
    exists; all three are NaN where nothing could be estimated (n says why). `n` counts the
    independent units (requests, pairs or blocks) that `method` used, `alpha` is the *one-sided*
    level of each bound.
    """

    value: float
    low: float
    high: float
    n: int
    method: str
    alpha: float

    @property
    def is_known(self) -> bool:
        """Whether there is a value at all."""
        return not math.isnan(self.value)


# --- corpus -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling options sent with a request (OpenAI/vLLM names)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    response_format: str | None = None
    """Kind of structured output asked for: json_object, json_schema or None."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One corpus entry. `messages` are chat messages; `check` is how its answer is graded.

    `follow_up` holds later user turns that need the answers before them (Spec-Bench): replay sends
    them in order with the arm's own answers in between, other stages do not. `follow_checks` grades
    their answers, one check for each; none for a turn that nothing grades.
    """

    prompt_id: str
    task: str
    route: str
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    check: Mapping[str, Any]
    priority: str = "normal"
    """normal, or protected: traffic that speculation must never delay."""
    language: str = "en"
    output_band: str = "medium"
    """Expected output: short (< 32 tokens), medium (32-79) or long (80 and more)."""
    stop: tuple[str, ...] = ()
    response_format: Mapping[str, Any] | None = None
    features: tuple[str, ...] = ()
    follow_up: tuple[str, ...] = ()
    follow_checks: tuple[Mapping[str, Any], ...] = ()
    group: str = ""
    """Source document or conversation that prompts share: such prompts are no independent cases.
    Empty for a prompt on its own."""
    source: str = ""


# --- plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request as intended, before anything is sent. Pure data; the receipt copies only ids.

    Key: (run, stage, phase, arm, prompt, repeat). `phase` names the part of the stage (greedy,
    sampled, aa, load-4, block-3, step-2 ...); `pair_id` joins the arms' receipts of one prompt;
    `offset_s` is the intended send time after the start of the phase, or of its block where it has
    several (open loop), or None (closed loop: as soon as a worker is free). `warm_up` requests are
    driven but excluded from estimates.
    """

    stage: str
    """A `Stage`, SWEEP, CALIBRATION or PROBE."""
    phase: str
    arm: Arm
    route: str
    prompt: Prompt
    pair_id: str
    repeat: int
    sampler: Sampler
    max_tokens: int
    concurrency: int
    """Offered concurrency of the phase (closed loop) or the cap on requests in flight."""
    offset_s: float | None = None
    block: int = 0
    """Index of the time block (ABBA); the unit of block-wise intervals."""
    warm_up: bool = False
    cache_salt: str = ""
    priority: int = 0
    """Server priority, lower first (vLLM's field)."""
    keep_text: bool = False
    """Whether the answer's text goes to the texts table (replay); otherwise only its digest."""
    ignore_eos: bool = False
    """Fix the output length at max_tokens on both arms (paired TPOT in shadow)."""
    mirror: bool = False
    """A copy of primary traffic whose output is discarded."""
    decision: str = "speculate"
    """Policy decision: speculate, target_only or fell_back."""
    decision_reason: str = ""
    stream: bool = True
    """False: the answer in one piece, without chunks to time."""
    n: int = 1
    """Choices asked for."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body, as the server knows them: logit_bias, tools, tool_choice ..."""


# --- receipts -----------------------------------------------------------------------------------


POLICY = "eligibility policy"
"""First words of `decision_reason` where the policy keeps a request on target-only."""


class Outcome(StrEnum):
    """How a request attempt ended."""

    OK = "ok"
    ERROR = "error"
    REJECTED = "rejected"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"


class Handover(StrEnum):
    """How an answer went on when the arm that had begun it failed."""

    EXACT = "exact"
    """From the committed token ids: the same law, and at temperature 0 the same tokens."""
    UNSEEDED = "unseeded"
    """As exact in law, but what the request's seed would have drawn is not reproduced."""
    RESTARTED = "restarted"
    """Nothing had reached the client: the whole request was sent to the other arm."""
    BROKEN = "broken"
    """It could not be continued exactly, so it ended in an error."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One request attempt as observed: small, written once, never updated.

    Times are nanoseconds on the driver's monotonic clock (`time.perf_counter_ns`), which the run
    row anchors to the wall clock. Token counts come from the server (usage, ids or per-request
    metrics), never from counting chunks: under speculation a chunk holds several tokens.
    """

    # identity
    receipt_id: str
    run_id: str
    stage: str
    phase: str
    arm: str
    route: str
    prompt_id: str
    pair_id: str
    repeat: int
    attempt: int
    block: int
    warm_up: bool
    mirror: bool
    # versions
    target_model: str
    proposer: str | None
    algorithm: str | None
    draft_sampling: str | None
    k: int | None
    engine: str
    engine_config_id: str
    policy_version: str
    # sampler
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    stop_count: int
    response_format: str | None
    logprobs: int | None
    # cohort
    task: str
    language: str
    priority: str
    prompt_band: str
    """By prompt tokens as the server counted them: <64, 64-255, 256-1023, 1024-4095, >=4096."""
    output_band: str
    temperature_band: str
    """greedy (0), low (<= 0.5), mid (<= 1.0), high (> 1.0)."""
    features: str
    """Sampling features in use, comma-joined and sorted; empty for none."""
    concurrency: int
    # counts
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    proposed_tokens: int | None
    accepted_tokens: int | None
    discarded_tokens: int | None
    target_passes: int | None
    """Decode passes of the target for this request, verify steps included, prefill excluded."""
    verify_steps: int | None
    acceptance_histogram: tuple[int, ...] | None
    """Entry j: verify steps that accepted exactly j drafted tokens."""
    counts_source: str
    """engine (per-request metrics), counters, estimated or none; the reason is in counts_note."""
    counts_note: str
    # times, ns on the driver's monotonic clock
    scheduled_ns: int
    sent_ns: int | None
    first_token_ns: int | None
    first_content_ns: int | None
    last_token_ns: int | None
    done_ns: int | None
    server_queue_ms: float | None
    max_chunk_gap_ns: int | None
    chunks: int | None
    # outcome
    outcome: str
    http_status: int | None
    error_class: str | None
    """unsupported_parameter, server_error, timeout, connection, stream_error, bad_stream ..."""
    error_message: str | None
    finish_reason: str | None
    stop_reason: str | None
    # policy and output
    decision: str
    decision_reason: str
    output_digest: str | None
    """Digest of the output's token ids (of its text where the server gives no ids)."""
    warnings: tuple[str, ...] = ()
    # hand-over of a running answer; all None where none was needed
    handover_at: int | None = None
    """Tokens that the first arm had committed at the joint; 0: nothing had been sent yet."""
    handover_from: str | None = None
    handover_to: str | None = None
    """The arm that ended the answer; None where the answer broke."""
    handover_kind: str | None = None
    """A `Handover`."""
    handover_reason: str | None = None
    """What the first arm did: its error class and message, one line."""

    @property
    def kept_off(self) -> bool:
        """Whether the eligibility policy keeps such a request on target-only.

        It is evidence of neither arm then: what may not speculate is no control of what may. Both
        sides of a pair are marked alike, in replay too, where both arms are asked all the same.
        """
        return self.decision_reason.startswith(POLICY)

    @property
    def has_counts(self) -> bool:
        """Whether it says how many tokens were drafted and accepted, in numbers that can be."""
        drafted, accepted = self.proposed_tokens, self.accepted_tokens
        return drafted is not None and accepted is not None and 0 <= accepted <= drafted

    @property
    def ttft_s(self) -> float | None:
        """Send to first chunk that carries a token id, seconds."""
        return _span_s(self.sent_ns, self.first_token_ns)

    @property
    def e2e_s(self) -> float | None:
        """Send to last token, seconds."""
        return _span_s(self.sent_ns, self.last_token_ns)

    @property
    def effective_s(self) -> float | None:
        """Scheduled time to last token, seconds: waiting in our own client counts."""
        return _span_s(self.scheduled_ns, self.last_token_ns)

    @property
    def queue_age_s(self) -> float | None:
        """Scheduled time to first token, seconds: how long the request waited to be served."""
        return _span_s(self.scheduled_ns, self.first_token_ns)

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (completion tokens - 1), seconds; None under 2 tokens.

        Also None where all tokens were read at one instant: our client was behind then, and 0
        seconds per token is no measurement.
        """
        span = _span_s(self.first_token_ns, self.last_token_ns)
        if not span or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return span / (self.completion_tokens - 1)


def _span_s(start_ns: int | None, end_ns: int | None) -> float | None:
    if start_ns is None or end_ns is None:
        return None
    return (end_ns - start_ns) / 1e9


def receipt_key(request: PlannedRequest, run_id: str, attempt: int = 0) -> str:
    """The receipt's id: a digest of run, stage, phase, arm, prompt, repeat and attempt.

    Phase is part of the key because one stage sends one prompt at several temperatures and loads.
    """
    return digest(
        "receipt",
        [
            run_id,
            request.stage,
            request.phase,
            request.arm,
            request.prompt.prompt_id,
            request.repeat,
            attempt,
        ],
    )


def prompt_band(prompt_tokens: int | None) -> str:
    """Cohort band of a prompt length."""
    if prompt_tokens is None:
        return "unknown"
    for limit, name in ((64, "<64"), (256, "64-255"), (1024, "256-1023"), (4096, "1024-4095")):
        if prompt_tokens < limit:
            return name
    return ">=4096"


def temperature_band(temperature: float) -> str:
    """Cohort band of a temperature."""
    if temperature < 1e-5:
        return "greedy"
    if temperature <= 0.5:
        return "low"
    return "mid" if temperature <= 1.0 else "high"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request returned, in full: kept in the texts table in replay only."""

    receipt_id: str
    text: str
    token_ids: tuple[int, ...] | None
    accepted_per_step: tuple[int, ...] | None = None
    """Drafted tokens accepted in each verify step, in order; None where the server does not say."""
    drafted_per_step: tuple[int, ...] | None = None
    details: Mapping[str, Any] | None = None
    """What else came with it, plain JSON, None where nothing did: `logprobs`, a list of [token id
    or null, log-probability, [[token id or null, log-probability], ...]] per token; `choices`, the
    further ones, each with text, token_ids and finish_reason; `tool_calls`, [name, arguments]."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Which of two answers somebody preferred, not knowing the arms. Information, never a gate."""

    source: str
    """judge (a language model) or human."""
    who: str
    """The judge's model, or the reviewer."""
    pair_id: str
    verdict: str
    """target_only, speculative, tie, or unclear: a reply that was no verdict."""
    note: str = ""


# --- judgement ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """One metric of one route (or of a cohort in it), estimated and not yet judged.

    `estimate` is None where nothing could be measured; `note` then says why in a few words. For
    counts (quality_regression_cases, unsupported_requests, lossless_violations) the estimate's
    value is the count and n the number of cases looked at.
    """

    metric: str
    stage: str
    route: str
    cohort: str
    estimate: Estimate | None
    note: str = ""
    examples: tuple[str, ...] = ()
    """Receipt ids of the worst cases."""
    fail_estimates: tuple[Estimate, ...] = ()
    """The same estimate at ever smaller one-sided levels, largest first. A failure is judged over
    all cohorts and rules together (Holm), at levels that depend on how many there are."""
    share: float = 1.0
    """Share of the route's requests that the cohort holds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule judged for one cohort or route: the number, the limit, and why.

    `why` is one plain sentence with the number and the limit in it. `needed` is how many more
    requests would decide it, where that can be said.
    """

    rule: str
    verdict: Verdict
    route: str
    cohort: str
    """Readable cohort within the route; empty for the whole route."""
    stage: str
    estimate: Estimate | None
    limit: float | None
    unit: str
    why: str
    needed: int | None = None
    counted: bool = True
    """False for a rule in dry run: shown, not counted."""
    examples: tuple[str, ...] = ()
    """Receipt ids of the worst cases."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for a route, and by which findings."""

    route: str
    action: Action
    stage: str
    reason: str
    findings: tuple[Finding, ...]
    k: int | None = None
    """Proposal length to run with where the action is promote."""
    scope: str = ""
    """What the decision covers (loads, temperatures) where that is less than the whole route."""


class RouteState(StrEnum):
    """Where a live route stands."""

    ENABLED = "enabled"
    FELL_BACK = "fell_back"
    """Target-only until the cool-down is over."""
    PROBATION = "probation"
    """A small share speculates, to see whether it is well again."""
    OFF = "off"
    """Target-only until an operator resets the route."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A live route went from one state to another: by which rule, on what evidence, and why.

    `estimate`, `limit`, `unit` and `n` are those of the rule. They are None, empty and 0 where time
    or an operator moved the route.
    """

    route: str
    seq: int
    """0, 1, 2 ... of the route."""
    at_ns: int
    """On the caller's clock: that of the receipts."""
    before: RouteState
    after: RouteState
    rule: str
    """A guardrail, or one of the live guard's own (see `fallback`)."""
    cohort: str
    """The slice of the route that failed; empty for all of it."""
    estimate: Estimate | None
    limit: float | None
    unit: str
    window_s: float | None
    """How long the evidence had been collected, seconds."""
    n: int
    share: float
    """Of the eligible traffic that may speculate from now on."""
    fallbacks: int
    """Fallbacks within the period that counts them, this one included."""
    why: str
    """One sentence with the number and the limit in it."""
    who: str = ""
    """The operator; empty where the guard decided."""


@dataclass(frozen=True, slots=True)
class ArmDescription:
    """What an arm really ran: captured from the server and the launcher, hashed into receipts.

    `engine` is name and version. `speculative_config` is None on the target-only arm. `config` is
    everything else that was captured (argv, server_info, model digests, machine); two arms may
    differ in the speculative config only.
    """

    arm: Arm
    url: str
    engine: str
    model: str
    speculative_config: Mapping[str, Any] | None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine_config_id(self) -> str:
        """Digest of engine, model and both configs; the URL is not part of it."""
        return digest(
            "engine",
            [self.arm, self.engine, self.model, self.speculative_config, dict(self.config)],
        )


def to_json(value: Any) -> Any:
    """A record as plain JSON values: enums by name, tuples as lists, NaN and infinity as None."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_json(item) for name, item in asdict(value).items()}
    if isinstance(value, Verdict):
        return value.word
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
