"""rollout.yaml, rules/*.yaml and routes: strict models, checked once, at the border.

A typo must never turn into a default: unknown keys and duplicate keys are errors that name the
file and the line. YAML is read as version 1.2, where `off` is a word and not a boolean. Paths in a
file are relative to that file, so that a rollout can be run from anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from speccheck.errors import UsageError
from speccheck.records import digest

MOST_DRAFTED = 256
"""Proposal length above which a rollout is taken for a typing error."""

PACKAGED = "packaged"
"""Written in place of a path: the file that comes with speccheck."""


SECRET_NAME = re.compile(
    r"(?i)(api[-_]?key|secret|passw(or)?d|authorization|bearer|(access|auth|hf)[-_]?token)"
)
"""Names of settings whose values are never kept and never shown."""


def package_dir(name: str) -> Path:
    """Folder of the data shipped with speccheck: rules, templates or corpora.

    In a checkout they lie at the top, where users look for them; in a wheel under `_data`.

    Raises:
        UsageError: the installation is incomplete.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "_data" / name, here.parent / name):
        if folder.is_dir():
            return folder
    raise UsageError(f"this installation of speccheck lacks its {name} folder; install it again")


def fraction(value: Any) -> Any:
    """`"10%"` as 0.10; numbers stay as they are."""
    if isinstance(value, str):
        number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", value.strip())
        if number:
            return float(number[1]) / 100
        raise ValueError(f'{value!r} is not a number or a percentage such as "10%"')
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")  # noqa: TRY004 (pydantic's word)
    return value


Fraction = Annotated[float, BeforeValidator(fraction), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(fraction), Field(ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Positive = Annotated[int, Field(ge=1, strict=True)]


class Model(BaseModel):
    """Strict base: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# --- rules --------------------------------------------------------------------------------------


class RuleLimits(Model):
    """Limits of the guardrail rules; a rule that is not named is not judged.

    Regressions are relative: `"10%"` allows a ratio of 1.10 to the target-only arm.
    """

    min_acceptance_rate: Share | None = None
    max_acceptance_rate: Share | None = None
    min_mean_acceptance_length: Fraction | None = None
    max_tpot_p50_regression: Fraction | None = None
    max_tpot_p95_regression: Fraction | None = None
    max_e2e_p50_regression: Fraction | None = None
    max_e2e_p95_regression: Fraction | None = None
    max_e2e_p99_regression: Fraction | None = None
    max_ttft_p50_regression: Fraction | None = None
    max_ttft_p95_regression: Fraction | None = None
    max_queue_age_p95_regression: Fraction | None = None
    max_error_rate: Share | None = None
    max_unsupported_requests: Count | None = None
    max_quality_regression_cases: Count | None = None
    max_quality_loss: Fraction | None = None
    max_output_drift: Fraction | None = None
    max_lossless_violations: Count | None = None
    max_slice_failures: Count | None = None
    max_sampled_violations: Count | None = None
    min_structured_output_validity: Share | None = None
    max_protected_delay: Fraction | None = None
    max_fallback_rate: Share | None = None
    min_speedup: Fraction | None = None


IMPLIED: dict[str, float] = {"max_lossless_violations": 0, "min_speedup": 1.0}
"""Judged whether or not a file says so: wrong outputs are never fine, and a promotion must pay."""


class GuardrailBlock(RuleLimits):
    """The block `speculative_decoding_guardrails`: limits and what is done when one breaks."""

    fallback_action: Literal["disable_speculative_decoding_for_route"] = (
        "disable_speculative_decoding_for_route"
    )


class Guardrails(Model):
    """rules/guardrails.yaml: the default block, overrides per route, sample sizes, dry runs."""

    speculative_decoding_guardrails: GuardrailBlock
    routes: dict[str, RuleLimits] = {}
    minimum_requests: dict[str, Positive] = {}
    """Rule name -> smallest n at which it may decide; the built-in minimums hold otherwise."""
    dry_run: tuple[str, ...] = ()
    """Rules that are judged and shown but do not count."""

    @model_validator(mode="after")
    def _rule_names(self) -> Guardrails:
        names = set(RuleLimits.model_fields)
        for where, used in (
            ("minimum_requests", self.minimum_requests),
            ("dry_run", self.dry_run),
        ):
            for name in used:
                if name not in names:
                    raise ValueError(f"{where}: no rule is called {name!r}")
        return self

    def limits(self, route: str) -> dict[str, float]:
        """Rule name -> limit for one route, its overrides applied."""
        found = IMPLIED | self.speculative_decoding_guardrails.model_dump(
            exclude_none=True, exclude={"fallback_action"}
        )
        if route in self.routes:
            found |= self.routes[route].model_dump(exclude_none=True)
        return found


# --- rollout ------------------------------------------------------------------------------------


class Embedded(Model):
    """The embedded engine's own settings, the same on both arms."""

    model: str = PACKAGED
    max_num_seqs: Positive = 64
    max_model_len: Positive = 4096


def http_url(value: str) -> str:
    """A URL that a request can be sent to, as it is.

    Raises:
        ValueError: it is none; without its text, which may be a secret.
    """
    try:
        parts = urlsplit(value)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        is_one = False
    if not is_one or not value.isprintable() or " " in value:
        raise ValueError("not an http:// or https:// URL with a host")
    return value


class Attached(Model):
    """A pair of OpenAI-compatible servers that run already."""

    target_only: str
    speculative: str
    draft: str | None = None
    """The draft model served alone, target-only: makes the distribution tests far stronger."""
    model: str | None = None
    """Model name to ask for; None takes the first that /v1/models lists."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; the key itself is never stored."""
    extra: dict[str, Any] = {}
    """Fields added to every request of both arms (SGLang: return_spec_tokens_details: true)."""
    omit: tuple[str, ...] = ()
    """Fields that these servers refuse and that are left out (return_token_ids, cache_salt ...)."""

    @field_validator("target_only", "speculative", "draft")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "@" in http_url(value).partition("://")[2].partition("/")[0]:
            raise ValueError("an address with a user in it: keys go by api_key_env")
        return value.rstrip("/").removesuffix("/v1").rstrip("/")

    @model_validator(mode="after")
    def _two(self) -> Attached:
        if self.target_only == self.speculative:
            raise ValueError(
                f"both arms are {self.speculative!r}: one server cannot be compared with itself"
            )
        return self


class ArmGpus(Model):
    """CUDA_VISIBLE_DEVICES of each server."""

    target_only: str
    speculative: str


class VllmServers(Model):
    """Two vLLM servers that speccheck starts; they differ in the speculative config only."""

    target: str = PACKAGED
    """Model folder or hub name."""
    name: str = "target"
    """Model name that requests ask for (--served-model-name)."""
    python: str | None = None
    """Interpreter that has vLLM; None is the one that runs speccheck."""
    args: dict[str, Any] = {}
    """Further arguments of both servers: name (without dashes) -> value; true is a bare flag."""
    env: dict[str, str] = {}
    """Environment of both servers, beside ours."""
    ports: tuple[int, int] = (0, 0)
    """Of target-only and speculative; 0 takes a free one."""
    gpus: ArmGpus | None = None
    """Which GPUs each server sees; None leaves CUDA_VISIBLE_DEVICES as it is."""
    layout: Literal["side_by_side", "alternate"] = "side_by_side"
    """Both at once, or in turns where only one fits: then replay is what can run, since shadow and
    canary send to both."""
    start_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0

    @field_validator("args")
    @classmethod
    def _ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = {
            *("model", "host", "port", "served-model-name", "speculative-config", "sc"),
            *("spec-method", "spec-model", "spec-tokens", "per-request-spec-decode-metrics"),
        }
        for name in value:
            if name.lstrip("-").replace("_", "-") in ours:
                raise ValueError(f"{name!r} is set by speccheck; leave it out")
        return value

    @field_validator("args", "env")
    @classmethod
    def _no_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if SECRET_NAME.search(name) and isinstance(given, str) and given:
                raise ValueError(
                    f"{name!r}: what stands here is kept with the run; servers have our environment"
                    " beside it, so set keys there"
                )
        return value

    @model_validator(mode="after")
    def _apart(self) -> VllmServers:
        if self.ports[0] == self.ports[1] != 0:
            raise ValueError(f"ports: both servers cannot have port {self.ports[0]}")
        return self


class CorpusConfig(Model):
    """Which prompts."""

    paths: tuple[str, ...] = (PACKAGED,)
    format: Literal["auto", "native", "spec_bench", "openai_batch", "lines"] = "auto"
    limit_per_task: Positive | None = None
    code_execution: Literal["off", "subprocess"] = "off"
    """Whether model-written code may be run, in a separate limited process, to grade it."""


class FixtureConfig(Model):
    """Probability fixture."""

    table: str = PACKAGED
    seeds: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = 20_000
    trace_seeds: tuple[Count, ...] | None = None
    """Runs to write down step by step; None picks one that accepts, corrects and discards."""


SliceName = Literal[
    "json_object",
    "json_schema",
    "stop",
    "logprobs",
    "penalties",
    "min_p",
    "logit_bias",
    "seed",
    "n",
    "long_context",
    "warm_cache",
    "streaming",
    "tools",
    "ignored_fields",
]
"""Server features that replay tries on both arms."""


class ProbeConfig(Model):
    """How many answers at temperature 1 losslessness is tested with, on each arm."""

    prompts: Positive = 4
    samples: Count | None = None
    """Answers per prompt and arm. None: 20, or 60 where the draft's proposals are not known, since
    tests that cannot use them need more. 0 leaves the tests out of replay."""
    max_tokens: Annotated[int, Field(ge=4, strict=True)] = 24
    margin: Annotated[float, BeforeValidator(fraction), Field(gt=0, lt=1)] = 0.04
    """How far beyond target-only against itself (A/A) the tests may reach; see `speccheck probe`,
    which takes more samples and holds 0.02."""


class ReplayConfig(Model):
    """Offline quality replay."""

    sampled_temperature: Temperature = 0.7
    concurrency: Positive = 8
    control_concurrency: Positive = 1
    """Concurrency of the A/A control: another batch size than `concurrency`, on purpose."""
    confirmations: Annotated[int, Field(ge=2, strict=True)] | None = None
    """K: runs on both arms that make a regression case confirmed at temperature 0; None: by the
    number of cases."""
    ties: Literal["count", "aggregate_only"] = "count"
    """Whether regressions that begin at a numerical tie count against the zero limit, or are left
    to max_quality_loss."""
    slices: Literal["all", "off"] | tuple[SliceName, ...] = "all"
    """Compatibility slices: which server features are tried on both arms."""
    slice_prompts: Positive = 4
    """Prompts per compatibility slice."""
    long_context_tokens: Positive | None = None
    """Prompt and answer of the long-context slice, tokens; None: the longest the server takes."""
    probe: ProbeConfig = ProbeConfig()

    @property
    def slice_names(self) -> tuple[SliceName, ...]:
        """The slices that run, in their order."""
        if self.slices == "off":
            return ()
        return get_args(SliceName) if self.slices == "all" else self.slices


class ShadowConfig(Model):
    """Mirrored traffic."""

    requests_per_route: Positive = 150
    rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 6.0
    blocks: Annotated[int, Field(ge=4, multiple_of=4, strict=True)] = 16
    """ABBA blocks, without (A) and with (B) the mirror."""
    protected_rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    max_in_flight: Positive = 64


class CanaryConfig(Model):
    """Live traffic at a growing share, looked at after every request."""

    shares: tuple[Share, ...] = (0.01, 0.05, 0.25, 0.5)
    requests_per_step: Positive = 400
    """Of both arms together, at least."""
    min_speculative: Positive = 10
    """Requests of the speculative arm that a step must have seen before the share grows; the step
    goes on until then."""
    watch_requests: Count = 200
    """Of both arms, watched on after a promotion; 0 for none."""
    watch_share: Share = 0.9
    acceptance_method: Literal["betting", "asymptotic"] = "betting"
    """What gates acceptance: bets on each request's rate, which hold from the first request on, or
    the pooled rate over tokens with an asymptotic confidence sequence from the 50th."""
    rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    max_in_flight: Positive = 64

    @field_validator("shares")
    @classmethod
    def _growing(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or any(b <= a for a, b in pairwise(value)):
            raise ValueError("shares must grow from step to step")
        if value[0] <= 0 or value[-1] >= 1:
            raise ValueError("shares must lie between 0 and 1: a control arm is always kept")
        return value

    @model_validator(mode="after")
    def _watched(self) -> CanaryConfig:
        if not self.shares[-1] <= self.watch_share < 1:
            raise ValueError(
                f"watch_share {self.watch_share:g} must not be under the last of the shares, and"
                " under 1: a control arm is always kept"
            )
        return self


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HooksConfig(Model):
    """What is told of each transition of a live route. Neither ever holds a decision up."""

    command: tuple[str, ...] = ()
    """Program and arguments, run without a shell, the facts in its environment (SPECCHECK_...)."""
    command_timeout_s: Seconds = 10.0
    webhook: str | None = None
    """URL that gets the transition as JSON by POST."""
    webhook_secret_env: str | None = None
    """Name of the environment variable with the key of its HMAC-SHA256 signature."""
    webhook_timeout_s: Seconds = 5.0
    webhook_attempts: Annotated[int, Field(ge=1, le=20, strict=True)] = 6
    """Tries in all, 1, 2, 4 ... s apart."""

    @field_validator("command")
    @classmethod
    def _runnable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and not value[0]:
            raise ValueError("the first word must name a program")
        return value

    @field_validator("webhook")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else http_url(value)


class FallbackConfig(Model):
    """The live guard: when a route turns itself off, and when it may come back.

    A limit of None is not judged.
    """

    limits: RuleLimits = RuleLimits()
    """Limits on live traffic, in place of those of guardrails.yaml."""
    max_engine_error_rate: Share | None = 0.005
    """Server errors, broken and silent streams, lost and refused connections."""
    max_verifier_errors: Count | None = 0
    """Answers whose counts of drafted and accepted tokens cannot be, in one window."""
    max_unaccepted_tokens: Positive | None = 1000
    """Drafted tokens in a row of which not one was accepted: the draft does not belong here."""
    max_queued: Positive | None = 32
    """Requests that wait in the speculative server's queue, all of `queued_for_s`."""
    queued_for_s: Seconds = 10.0
    max_stall_s: Seconds | None = 20.0
    """Requests running on the speculative server without one token coming."""
    max_unreachable_s: Seconds | None = 15.0
    """No answer of the speculative server's /metrics, while target-only answers."""
    windows_s: tuple[Seconds, ...] = (60.0, 600.0)
    """How far back the evidence reaches: short windows see what breaks at once, long ones what is a
    little off. None at all: to the beginning."""
    window_requests: Positive = 100
    """Speculative requests before which a window is not closed, however slow the traffic is."""
    min_requests: Positive = 10
    """Speculative requests before which no rule on them turns a route off; counts do."""
    false_alarms_per_day: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.01
    """Of all rules of a route together, at most."""
    cool_down_s: Seconds = 300.0
    """Target-only after a fallback; twice as long after each further one in the period."""
    probation_share: Annotated[float, BeforeValidator(fraction), Field(gt=0, lt=1)] = 0.10
    probation_requests: Positive = 60
    """Speculative requests that must go well, and show the rule that failed within its limit."""
    probation_most_s: Seconds = 86_400.0
    """A probation that is undecided so long ends in another fallback."""
    most_fallbacks: Count = 3
    """Within the period; one more, and the route is off until an operator resets it."""
    period_s: Seconds = 86_400.0
    hooks: Annotated[HooksConfig, Field(exclude=True)] = HooksConfig()
    """Never written down with a run: the URL of a webhook is often a secret."""

    @field_validator("windows_s")
    @classmethod
    def _growing(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(b <= a for a, b in pairwise(value)):
            raise ValueError("give growing lengths, each once")
        return value

    @model_validator(mode="after")
    def _counted(self) -> FallbackConfig:
        if self.period_s <= self.cool_down_s:
            raise ValueError(
                f"period_s {self.period_s:g} must be longer than cool_down_s {self.cool_down_s:g}:"
                " no two fallbacks would ever count together"
            )
        return self


class MixConfig(Model):
    """Mixed traffic of a sweep: the share of requests of each class, and the tasks it is made of.

    Short requests (output band `short`, of any task) are target-only: on the speculative arm they
    are sent with speculation off, so they show what speculating neighbours do to others.
    """

    short: Share = 0.4
    high_agreement: Share = 0.4
    low_agreement: Share = 0.2
    high_agreement_tasks: tuple[str, ...] = ("code", "support", "json")
    low_agreement_tasks: tuple[str, ...] = ("prose",)

    @model_validator(mode="after")
    def _whole(self) -> MixConfig:
        total = self.short + self.high_agreement + self.low_agreement
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the three shares must add up to 1, not {total:g}")
        return self


class SweepConfig(Model):
    """`speccheck sweep`: every proposal length at every load, on each route's tasks."""

    k: tuple[Positive, ...] = (1, 2, 3, 5, 8)
    concurrency: tuple[Positive, ...] = (1, 4, 8, 16, 32, 64)
    rounds: Annotated[int, Field(ge=2, strict=True)] = 4
    """Rounds per cell without a budget; in a round each arm takes its turn on the same prompts."""
    calibration_rounds: Annotated[int, Field(ge=2, strict=True)] = 3
    requests_per_worker: Positive = 1
    """Requests of a round per request in flight; at least 4 in all."""
    mix: MixConfig | None = MixConfig()
    """Mixed traffic as one more family; null leaves it out."""
    price_per_engine_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What an hour of one engine costs, in any currency; without it no cost is shown."""

    @field_validator("k", "concurrency")
    @classmethod
    def _growing(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or any(b <= a for a, b in pairwise(value)):
            raise ValueError("give growing numbers, each once")
        return value


HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)]


class GatewayLimits(Model):
    """What a client of the gateway may send, and how much of it at once."""

    max_body_bytes: Positive = 4 * 2**20
    max_header_bytes: Positive = 32 * 2**10
    max_in_flight: Positive = 1024
    """Requests per worker; one more gets a 503."""


class GatewayTimeouts(Model):
    """Seconds."""

    request_s: Seconds = 30.0
    """For a client to send its head, and then its body."""
    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 120.0
    """From sending to the first chunk that carries output: queue and prefill."""
    idle_s: Seconds = 30.0
    """Between two chunks; a longer silence is a stall."""
    total_s: Seconds = 900.0
    """Of one request, hand-over included."""


class MirrorConfig(Model):
    """Copies of target-only traffic to the speculative arm, their output thrown away."""

    share: Share = 0.0
    max_in_flight: Positive = 4
    """Per worker; what would be one more is left out and counted."""


class GatewayConfig(Model):
    """`speccheck gateway`: the two arms behind one OpenAI-compatible address."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535, strict=True)] = 8080
    workers: Annotated[int, Field(ge=1, le=64, strict=True)] = 2
    share: Share = 1.0
    """Of the traffic that may speculate, how much does; the rest is its live control."""
    shares: dict[str, Share] = {}
    """The same for single routes."""
    key_header: HeaderName = "x-speccheck-key"
    """What the canary share is sticky to: the same key stays on its arm."""
    hand_over: Literal["refuse", "join", "off"] = "refuse"
    """When the speculative arm fails in mid-answer. refuse: it is continued on target-only, and
    requests that could not be continued exactly do not speculate. join: they do, and end in an
    error then. off: every such answer ends in an error."""
    mirror: MirrorConfig = MirrorConfig()
    limits: GatewayLimits = GatewayLimits()
    timeouts: GatewayTimeouts = GatewayTimeouts()
    store_prompts: Literal["off", "on"] = "off"
    """on: messages and answers go into the texts table. They are your users' content."""
    admin_token_env: str | None = None
    """Environment variable with the bearer token of /speccheck/...; without it that is closed."""
    receipts: Positive = 20_000
    """Receipts that may wait for the store; what comes beyond is lost, and counted."""
    flush_s: Seconds = 2.0
    """How often they are written; the file is free for others in between."""

    def share_of(self, route: str) -> float:
        """The configured share of a route."""
        return self.shares.get(route, self.share)


class HealthLimits(Model):
    """When our own client was too late to time anything; past one of them its times are void.

    Send lag p99 may be `lag_share` of the median TTFT, yet at least `lag_floor_s`: below a few
    milliseconds an event loop on a shared machine cannot do better. A limit of None is not judged.
    """

    lag_share: Fraction = 0.05
    lag_floor_s: Fraction = 0.010
    loop_stall_s: Fraction = 0.250
    """The longest stall of the event loop."""
    loop_stall_share: Share = 0.05
    """All its stalls together, of the time driven."""
    loop_cpu_share: Fraction | None = 0.90
    """Of one core, used by the event loop's thread."""
    process_cpu_share: Fraction | None = None
    """Of one core, used by all threads of the client."""
    cpu_wait_share: Share | None = None
    """Of the time driven, in which the loop's thread was ready to run and no core was free."""
    machine_cpu_share: Share | None = None
    """Of all cores that the client may run on, whoever used them: servers here do."""


class Traffic(Model):
    """What is sent on a route: which corpus tasks, sampled how."""

    tasks: tuple[str, ...] | None = None
    """Corpus tasks; None takes the prompts whose route is this one."""
    temperature: Temperature = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Positive | None = None


class Route(Traffic):
    """A named class of traffic, the unit that is switched on and off."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    consequence: Literal["low", "medium", "high"] = "medium"
    """Canaries start with the routes of low consequence."""
    shadow: Traffic | None = None
    """Traffic in shadow, where it differs from the route's own."""
    canary: Traffic | None = None
    """Traffic in the canary, where it differs from the route's own."""
    rules: RuleLimits | None = None
    """Overrides of rules/guardrails.yaml for this route."""

    def traffic(self, stage: Literal["shadow", "canary"]) -> Traffic:
        """What this route sends in a stage."""
        return getattr(self, stage) or self


class Rollout(Model):
    """rollout.yaml."""

    version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=128)]
    seed: Count = 0
    engine: Literal["embedded", "vllm", "attached"] = "embedded"
    embedded: Embedded = Embedded()
    vllm: VllmServers = VllmServers()
    attached: Attached | None = None
    speculation: dict[str, Any]
    """The speculative config, in vLLM's own words (`--speculative-config`)."""
    corpus: CorpusConfig = CorpusConfig()
    guardrails: str = PACKAGED
    eligibility: str | None = None
    """Which requests may speculate: a file, or `packaged`. None: all of every route."""
    client_limits: HealthLimits = HealthLimits()
    warm_up: Count = 8
    """Requests per arm that are driven before a stage measures, and never estimated from."""
    fixture: FixtureConfig = FixtureConfig()
    replay: ReplayConfig = ReplayConfig()
    shadow: ShadowConfig = ShadowConfig()
    canary: CanaryConfig = CanaryConfig()
    fallback: FallbackConfig = FallbackConfig()
    sweep: SweepConfig = SweepConfig()
    gateway: GatewayConfig = GatewayConfig()
    routes: tuple[Route, ...]
    protected_tasks: tuple[str, ...] | None = None
    """Tasks whose prompts are the protected traffic; None takes prompts of priority `protected`."""
    waive: tuple[str, ...] = ()
    """Differences between the arms, by name, that are accepted beside the speculative config."""
    expires: date | int | None = None
    """When a promotion ends by itself: a date, or days from the run's beginning."""

    @field_validator("expires", mode="before")
    @classmethod
    def _day(cls, value: Any) -> Any:
        if value is None or (type(value) is int and 1 <= value <= 36_500):
            return value
        with suppress(TypeError, ValueError):
            return date.fromisoformat(value)
        raise ValueError(f"{value!r} is neither a date such as 2026-12-31 nor a number of days")

    def expiry(self, created: date) -> date | None:
        """The last day on which decisions of a run that began on `created` hold, if one is set."""
        if isinstance(self.expires, int):
            return created + timedelta(days=self.expires)
        return self.expires

    @field_validator("speculation")
    @classmethod
    def _drafts(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("method"), str):
            raise ValueError("`method` is missing (draft_model, ngram, eagle3, ...)")  # noqa: TRY004
        k = value.get("num_speculative_tokens", 1)
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST_DRAFTED:
            raise ValueError(
                f"num_speculative_tokens is {k!r}; give a whole number from 1 to {MOST_DRAFTED}"
            )
        return value

    @model_validator(mode="after")
    def _whole(self) -> Rollout:
        if self.engine == "attached" and self.attached is None:
            raise ValueError("engine: attached needs the block `attached` with two URLs")
        if not self.routes:
            raise ValueError("routes: at least one route is needed")
        names = [route.name for route in self.routes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"routes: {name!r} is defined twice")
        for name in self.gateway.shares:
            if name not in names:
                raise ValueError(f"gateway.shares: no route is called {name!r}")
        return self

    @property
    def policy_version(self) -> str:
        """Digest of what decides which requests may speculate: routes and their rules."""
        return digest("policy", [route.model_dump(mode="json") for route in self.routes])


def load_rollout(path: Path) -> Rollout:
    """Read and check a rollout.yaml; folders of models in it are taken from where the file is.

    Raises:
        UsageError: with file and line, for anything that is not as the model says.
    """
    loaded = load_model(path, Rollout)
    if loaded.engine == "attached":
        return loaded  # what those servers run is theirs to name
    update: dict[str, Any] = {}
    draft = loaded.speculation.get("model")
    if isinstance(draft, str):
        update["speculation"] = loaded.speculation | {"model": _model_beside(path, draft, loaded)}
    if loaded.engine == "vllm":
        target = _model_beside(path, loaded.vllm.target, loaded)
        update["vllm"] = loaded.vllm.model_copy(update={"target": target})
    else:
        target = _model_beside(path, loaded.embedded.model, loaded)
        update["embedded"] = loaded.embedded.model_copy(update={"model": target})
    return loaded.model_copy(update=update)


def _model_beside(path: Path, model: str, rollout: Rollout) -> str:
    """A model's folder as an absolute path; a name that vLLM would look up stays as it is."""
    folder = path.parent.absolute() / Path(model).expanduser()
    is_name = rollout.engine == "vllm" and not (model.startswith((".", "~")) or folder.is_dir())
    return model if model == PACKAGED or is_name else os.path.normpath(folder)


def load_guardrails(path: Path, routes: tuple[Route, ...] = ()) -> Guardrails:
    """Read and check rules/guardrails.yaml, overlaid with the routes' own rules.

    Raises:
        UsageError: with file and line; also for an override of a route that does not exist.
    """
    rules = load_model(path, Guardrails)
    names = {route.name for route in routes}
    unknown = sorted(set(rules.routes) - names)
    if routes and unknown:
        raise UsageError(
            f"{path}: rules for route {unknown[0]!r}, but the rollout has no such route "
            f"(it has {', '.join(sorted(names))})"
        )
    overrides = dict(rules.routes)
    for route in routes:
        if route.rules is not None:
            base = overrides.get(route.name, RuleLimits())
            overrides[route.name] = base.model_copy(
                update=route.rules.model_dump(exclude_none=True)
            )
    return rules.model_copy(update={"routes": overrides})


def resolve(path: str, beside: Path, packaged: Path) -> Path:
    """A path written in the file `beside`: `packaged`, or relative to that file."""
    return packaged if path == PACKAGED else (beside.parent / path)


def write_example(folder: Path, name: str, *, overwrite: bool = False) -> list[Path]:
    """Write a packaged rollout (as rollout.yaml), its rules and its policy into a folder.

    Raises:
        UsageError: a file is there already, or the folder cannot be written.
    """
    source = package_dir("rules")
    wanted = {"rollout.yaml": source / name}
    wanted |= {file: source / file for file in ("guardrails.yaml", "eligibility.yaml")}
    there = [folder / target for target in wanted if (folder / target).exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]}: is there already; --force overwrites it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, origin in wanted.items():
            (folder / target).write_bytes(origin.read_bytes())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from None
    return [folder / target for target in wanted]


# --- YAML with line numbers ---------------------------------------------------------------------


T = TypeVar("T", bound=BaseModel)


def load_model(path: Path, model: type[T], context: Any = None) -> T:
    """A YAML file as a strict model; `context` is handed to the model's validators.

    Raises:
        UsageError: with file and line, for anything that is not as the model says.
    """
    data = _read_yaml(path)
    if not isinstance(data, Mapping):
        raise UsageError(f"{path}: a mapping of keys to values is needed at the top")
    try:
        return model.model_validate(_plain(data), context=context)
    except ValidationError as error:
        lines = [_explain(path, data, item, model) for item in error.errors(include_url=False)]
        raise UsageError("\n".join(lines)) from None


def _read_yaml(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError, RoundTripConstructor
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    class DatesAsText(RoundTripConstructor):
        """What looks like a date is text: whether it is one is for the model to say."""

    DatesAsText.add_constructor(
        "tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node)
    )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; `speccheck init` writes a commented rollout.yaml and rules"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    try:
        yaml = YAML(typ="rt")
        yaml.Constructor = DatesAsText
        return yaml.load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = str(error.problem).split(" with value")[0]
        raise UsageError(f"{path}:{line}: {problem}; a key may stand once only") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else "?"
        raise UsageError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from None


def _plain(value: Any) -> Any:
    """The YAML library's containers and scalars as plain dict, list, str, int, float."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def _explain(path: Path, data: Any, item: Any, model: type[BaseModel]) -> str:
    """One pydantic error as `file:line: where: what`."""
    line = None
    node = data
    names: list[str] = []
    for part in item["loc"]:
        if isinstance(node, Mapping) and part in node:
            line = node.lc.key(part)[0] + 1  # type: ignore[attr-defined]  # ruamel's CommentedMap
            node = node[part]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0] + 1  # type: ignore[attr-defined]
            node = node[part]
        names.append(str(part))
    where = ".".join(names)
    what = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        what = f"unknown key{_did_you_mean(item['loc'], model)}"
    elif item["type"] == "missing":
        what = "this key is missing"
    at = f"{path}:{line}" if line else str(path)
    return f"{at}: {where}: {what}" if where else f"{at}: {what}"


def _did_you_mean(loc: tuple[Any, ...], model: type[BaseModel]) -> str:
    import difflib

    close = difflib.get_close_matches(str(loc[-1]), sorted(_keys(model)), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _keys(annotation: Any) -> set[str]:
    """Every key that a model, or a model within it, knows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return set(fields).union(*(_keys(field.annotation) for field in fields.values()))
    return set().union(*(_keys(part) for part in get_args(annotation)))
