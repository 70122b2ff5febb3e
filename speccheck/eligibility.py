"""The eligibility policy: which requests may speculate, with which proposal length, and why not.

Rules are read from the top and the first that matches decides. Uncertain means target-only: a rule
that says speculate never matches a request of which it asks something that is not known, and a rule
that says target-only already holds where it might. What no rule matches stays on target-only.

The policy is data and `decide` is pure, so that the stages, the gateway and `speccheck explain` say
the same of the same request.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from speccheck.client import sampling_features
from speccheck.config import Model, Positive, Rollout, load_model
from speccheck.records import (
    POLICY,
    Arm,
    PlannedRequest,
    Receipt,
    Stage,
    digest,
)

PRESSURE = ("concurrency", "queued")
"""Facts that are known only at the instant at which a request goes out."""

KNOWN_FEATURES = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "penalties"),
    *("json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"),
    *(
        "response_format",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "min_p",
        "min_tokens",
        "n",
        "seed",
        "stop",
    ),
    *("tools", "top_k", "top_p"),
)
"""Sampling features by the names that receipts use; a corpus may add some of its own."""


# --- the file -----------------------------------------------------------------------------------


Bound = Annotated[float, Field(allow_inf_nan=False)]


class Range(Model):
    """Bounds of a number; at least one."""

    at_least: Bound | None = None
    above: Bound | None = None
    at_most: Bound | None = None
    below: Bound | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Range:
        given = [x for x in (self.at_least, self.above, self.at_most, self.below) if x is not None]
        if not given:
            raise ValueError("a bound is needed: at_least, above, at_most or below")
        if self.at_least is not None and self.above is not None:
            raise ValueError("at_least and above are two lower bounds; give one")
        if self.at_most is not None and self.below is not None:
            raise ValueError("at_most and below are two upper bounds; give one")
        low = self.at_least if self.at_least is not None else self.above
        high = self.at_most if self.at_most is not None else self.below
        if low is not None and high is not None:
            closed = self.at_least is not None and self.at_most is not None
            if low > high or (low == high and not closed):
                raise ValueError("nothing lies between these bounds")
        return self

    def holds(self, value: float) -> bool:
        """Whether a number lies within."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


class Features(Model):
    """Sampling features in use: any of these, or none but these."""

    any_of: tuple[str, ...] | None = None
    only: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one(self) -> Features:
        if (self.any_of is None) == (self.only is None):
            raise ValueError("give any_of or only")
        if self.any_of is not None and not self.any_of:
            raise ValueError("any_of: at least one feature is needed")
        return self

    @field_validator("any_of", "only")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> Any:
        return _check_known(value, info, "features")

    def holds(self, used: frozenset[str]) -> bool:
        """Whether what a request uses fits."""
        if self.any_of is not None:
            return not used.isdisjoint(self.any_of)
        return used.issubset(self.only or ())


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
Bands = Annotated[
    tuple[Literal["short", "medium", "long"], ...],
    BeforeValidator(_one_or_more),
    Field(min_length=1),
]
Priorities = Annotated[
    tuple[Literal["normal", "protected"], ...],
    BeforeValidator(_one_or_more),
    Field(min_length=1),
]


class When(Model):
    """Conditions of a rule; all of them must hold, and none at all matches everything."""

    route: Names | None = None
    task: Names | None = None
    language: Names | None = None
    priority: Priorities | None = None
    prompt_tokens: Range | None = None
    output_band: Bands | None = None
    """Expected output: short (< 32 tokens), medium (32-79) or long (80 and more)."""
    max_tokens: Range | None = None
    """Output length that the request allows."""
    temperature: Range | None = None
    features: Features | None = None
    concurrency: Range | None = None
    """Requests in flight on the speculative arm, this one included."""
    queued: Range | None = None
    """Requests that wait in the speculative server's queue."""

    @field_validator("route")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> Any:
        return _check_known(value, info, "routes")

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Fact name -> condition, those given only."""
        given = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: condition for name, condition in given if condition is not None}


class EligibilityRule(Model):
    """One rule: when it matches, what happens, and why."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    when: When = When()
    use: Literal["speculate", "target_only"]
    k: Positive | None = None
    """Proposal length; None as the server runs it."""
    reason: str = ""

    @model_validator(mode="after")
    def _k_needs_drafts(self) -> EligibilityRule:
        if self.k is not None and self.use == "target_only":
            raise ValueError("k means nothing on target_only")
        return self


class RouteRule(Model):
    """Which route a live request is on that does not name its own."""

    route: str
    when: When

    @field_validator("route")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> Any:
        return (_check_known((value,), info, "routes") or (value,))[0]

    @field_validator("when")
    @classmethod
    def _says_something(cls, value: When) -> When:
        if value.route is not None:
            raise ValueError("the route is what this rule finds; ask for something else")
        return value


class Eligibility(Model):
    """eligibility.yaml."""

    version: Literal[1] = 1
    rules: tuple[EligibilityRule, ...]
    routes: tuple[RouteRule, ...] = ()
    """Read by the gateway only; from the top, the first that surely matches."""

    @field_validator("rules")
    @classmethod
    def _names_are_unique(cls, value: tuple[EligibilityRule, ...]) -> Any:
        names = [rule.name for rule in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two are called {name!r}")
        return value

    @property
    def digest(self) -> str:
        """Tagged digest of the rules; comments and layout are no part of it."""
        said = self.model_dump(mode="json", exclude_none=True)
        if not self.routes:  # policies without it keep the digest that they had before it existed
            del said["routes"]
        return digest("eligibility", said)

    @property
    def asks_for(self) -> frozenset[str]:
        """Names of the facts that its rules ask for."""
        rules: tuple[EligibilityRule | RouteRule, ...] = (*self.rules, *self.routes)
        return frozenset(name for rule in rules for name in rule.when.conditions)


def load_eligibility(
    path: Path, *, routes: Iterable[str] = (), features: Iterable[str] = ()
) -> Eligibility:
    """Read and check an eligibility.yaml.

    Args:
        path: the file.
        routes: names of the rollout's routes; a rule about another is an error. Empty: any.
        features: sampling features that the corpus names beside those that speccheck knows.

    Raises:
        UsageError: with file and line, for anything that is not as the model says.
    """
    known = {"routes": sorted(routes), "features": sorted({*KNOWN_FEATURES, *features})}
    return load_model(path, Eligibility, context=known)


def _check_known(value: tuple[str, ...] | None, info: ValidationInfo, what: str) -> Any:
    """Names that the loader knows; a policy made in memory is not checked."""
    known: Sequence[str] = (info.context or {}).get(what, ())
    for name in value or () if known else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{name!r} is none of the {what}; {hint}")
    return value


def usable_k(rollout: Rollout, k: int) -> bool:
    """Whether the rollout's engine can be asked for a proposal length per request.

    vLLM runs one length per server; the embedded engine takes any up to the configured one.
    """
    configured = rollout.speculation.get("num_speculative_tokens")
    if not isinstance(configured, int):
        return True
    return k <= configured if rollout.engine == "embedded" else k == configured


def policy_version(rollout: Rollout, policy: Eligibility | None) -> str:
    """Digest of what decides which requests may speculate: routes, their rules and the policy."""
    if policy is None:
        return rollout.policy_version
    return digest("policy", [rollout.policy_version, policy.digest])


# --- one request --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a request before it goes out; None is not known. Names as in `When`."""

    route: str | None = None
    task: str | None = None
    language: str | None = None
    priority: str | None = None
    prompt_tokens: int | None = None
    output_band: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    features: frozenset[str] | None = None
    concurrency: int | None = None
    queued: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What the policy says of a request: the arm, k, the rule that said it, and why."""

    use: Literal["speculate", "target_only"]
    k: int | None
    rule: str
    """Name of the rule; empty where none matched."""
    number: int
    """Its place in the file, from 1; 0 where none matched."""
    reason: str

    @property
    def speculates(self) -> bool:
        """Whether the request may speculate."""
        return self.use == "speculate"

    @property
    def receipt_reason(self) -> str:
        """The reason that a receipt carries; `Receipt.kept_off` knows it by its first word."""
        rule = f"rule {self.rule!r}: " if self.rule else ""
        return f"{POLICY}: {rule}{self.reason}"


def decide(policy: Eligibility, facts: Facts) -> Choice:
    """The first rule that matches, uncertain meaning target-only.

    >>> policy = Eligibility(rules=({"name": "calm", "use": "speculate", "k": 2,
    ...     "when": {"concurrency": {"at_most": 8}}},))
    >>> decide(policy, Facts(concurrency=4)).k
    2
    >>> decide(policy, Facts()).reason
    "concurrency is not known, which rule 'calm' asks for"
    """
    uncertain = ""
    for number, rule in enumerate(policy.rules, 1):
        missing = _missing(rule.when, facts)
        if missing is None:
            continue
        if not missing:
            reason = rule.reason or "no reason is given in the policy"
            return Choice(rule.use, rule.k, rule.name, number, reason)
        lacking = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not known"
        if rule.use == "target_only":
            reason = f"{lacking}, so it may apply ({rule.reason})" if rule.reason else lacking
            return Choice("target_only", None, rule.name, number, reason)
        uncertain = uncertain or f"{lacking}, which rule {rule.name!r} asks for"
    return Choice("target_only", None, "", 0, uncertain or "no rule says speculate")


def route_of(policy: Eligibility, facts: Facts) -> str | None:
    """The route of a request that does not name its own; None where no rule surely matches."""
    found = (rule.route for rule in policy.routes if _missing(rule.when, facts) == [])
    return next(found, None)


def _missing(when: When, facts: Facts) -> list[str] | None:
    """Facts that are asked for and not known; None where the conditions surely do not hold."""
    missing = []
    for name, condition in when.conditions.items():
        value = getattr(facts, name)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            missing.append(name)
        elif isinstance(condition, tuple):
            if value not in condition:
                return None
        elif not condition.holds(value):
            return None
    return missing


def decide_at_best(policy: Eligibility, facts: Facts) -> Choice:
    """The choice at the pressure that is kindest to speculation: whether it may speculate at all.

    Where it may not at any, the choice at the least pressure.
    """
    levels = itertools.product(*(_levels(policy, name) for name in PRESSURE))
    choices = (decide(policy, replace(facts, concurrency=c, queued=q)) for c, q in levels)
    least = next(choices)
    return least if least.speculates else next((c for c in choices if c.speculates), least)


def _levels(policy: Eligibility, name: str) -> list[int]:
    """One level of pressure in each interval between the bounds that rules set, and on each."""
    bounds: set[float] = set()
    for rule in policy.rules:
        condition = rule.when.conditions.get(name)
        if condition is not None:
            bounds |= set(condition.model_dump(exclude_none=True).values())
    least = 1 if name == "concurrency" else 0
    around = {least, *(int(b) + d for b in bounds for d in (-1, 0, 1))}
    return sorted(level for level in around if level >= least)


def explain(policy: Eligibility, facts: Facts) -> str:
    """One line: what happens to such a request, by which rule, and why.

    Where the load is not given and matters, up to which load.

    >>> policy = Eligibility(rules=({"name": "calm", "use": "speculate", "k": 2,
    ...     "when": {"concurrency": {"at_most": 8}}, "reason": "e2e 0.7"},))
    >>> explain(policy, Facts())
    "speculate with k 2 up to concurrency 8: rule 1 'calm': e2e 0.7; then target-only"
    >>> explain(policy, Facts(concurrency=9))
    'target-only: no rule says speculate'
    """
    if facts.concurrency is not None or "concurrency" not in policy.asks_for:
        return _said(decide(policy, facts))
    levels = _levels(policy, "concurrency")
    choices = [decide(policy, replace(facts, concurrency=level)) for level in levels]
    if not any(choice.speculates for choice in choices):
        return _said(choices[0])
    parts = []
    for i, choice in enumerate(choices):
        is_last = i + 1 == len(choices)
        if is_last or not _alike(choice, choices[i + 1]):
            upto = "" if is_last else f" up to concurrency {levels[i + 1] - 1}"
            whole = choice.speculates or not is_last
            parts.append(_said(choice, upto) if whole else "then target-only")
    return "; ".join(parts)


def _alike(a: Choice, b: Choice) -> bool:
    return (a.use, a.k, a.rule) == (b.use, b.k, b.rule)


def _said(choice: Choice, upto: str = "") -> str:
    what = "target-only"
    if choice.speculates:
        what = "speculate" if choice.k is None else f"speculate with k {choice.k}"
    rule = f"rule {choice.number} {choice.rule!r}: " if choice.rule else ""
    return f"{what}{upto}: {rule}{choice.reason}"


# --- facts of what the stages plan --------------------------------------------------------------


def facts_of(request: PlannedRequest, prompt_tokens: Mapping[str, int]) -> Facts:
    """What is known of a planned request. `prompt_tokens` is what servers counted, by prompt id."""
    prompt = request.prompt
    return Facts(
        route=request.route,
        task=prompt.task,
        language=prompt.language,
        priority=prompt.priority,
        prompt_tokens=prompt_tokens.get(prompt.prompt_id),
        output_band=prompt.output_band,
        max_tokens=request.max_tokens,
        temperature=request.sampler.temperature,
        features=features_of(request),
    )


def features_of(request: PlannedRequest) -> frozenset[str]:
    """Sampling features in use, under the names of cohorts and under those of single options."""
    sampler = request.sampler
    options = {
        "frequency_penalty": sampler.frequency_penalty != 0,
        "presence_penalty": sampler.presence_penalty != 0,
        "repetition_penalty": sampler.repetition_penalty != 1,
        "response_format": sampler.response_format is not None,
        "seed": sampler.seed is not None,
    }
    used = {name for name, is_used in options.items() if is_used}
    return frozenset(used.union(sampling_features(request)))


def enforce(
    policy: Eligibility,
    plan: Sequence[PlannedRequest],
    routes: Collection[str],
    prompt_tokens: Mapping[str, int],
) -> list[PlannedRequest]:
    """The plan as the policy has it: what may speculate at no pressure is marked and kept off.

    Warm-up, and traffic beside the rollout's routes, is left as it is.
    """
    choices: dict[str, Choice] = {}
    enforced: list[PlannedRequest] = []
    for request in plan:
        if request.route not in routes or request.warm_up:
            enforced.append(request)
            continue
        choice = choices.get(request.pair_id)
        if choice is None:
            choice = decide_at_best(policy, facts_of(request, prompt_tokens))
            choices[request.pair_id] = choice
        asked = applied(request, choice)
        if asked is not None:
            enforced.append(asked)
    return enforced


def applied(request: PlannedRequest, choice: Choice) -> PlannedRequest | None:
    """A request as the choice has it: with its proposal length, or kept on target-only."""
    if not choice.speculates:
        return keep_on_target(request, choice)
    fields = {name: value for name, value in request.fields.items() if name != "k"}
    if choice.k is not None and request.arm is Arm.SPECULATIVE:
        fields["k"] = choice.k
    return replace(request, fields=fields)


def keep_on_target(request: PlannedRequest, choice: Choice) -> PlannedRequest | None:
    """A request that must not speculate, marked with the reason; None for a mirrored copy.

    Replay asks both arms all the same, so that what the policy excludes can be looked at.
    """
    marked = replace(request, decision_reason=choice.receipt_reason)
    if request.stage is Stage.REPLAY:
        return marked
    if request.mirror:
        return None
    return replace(marked, arm=Arm.TARGET_ONLY, decision="target_only")


class Door:
    """The policy where requests leave: asks at send time, with what is in flight then.

    Both requests of a pair get one answer, and the control arm is asked as if it were to speculate:
    what may not speculate is no control of what may.
    """

    def __init__(
        self, policy: Eligibility, routes: Collection[str], prompt_tokens: Mapping[str, int]
    ) -> None:
        self._policy = policy
        self._routes = routes
        self._prompt_tokens = prompt_tokens
        self._in_flight = 0
        self._pairs: dict[str, Choice] = {}

    def send(self, request: PlannedRequest) -> PlannedRequest | None:
        """The request as it may go out, or None for a mirrored copy that may not."""
        if request.route not in self._routes or request.warm_up:
            return request
        if request.decision != "fell_back":
            choice = self._pairs.get(request.pair_id)
            if choice is None:
                facts = facts_of(request, self._prompt_tokens)
                choice = decide(self._policy, replace(facts, concurrency=self._in_flight + 1))
                self._pairs[request.pair_id] = choice
            asked = applied(request, choice)
            if asked is None or not choice.speculates:
                return asked
            request = asked
        if request.arm is Arm.SPECULATIVE:
            self._in_flight += 1
        return request

    def receipt(self, receipt: Receipt) -> None:
        """A request is finished."""
        if receipt.arm == Arm.SPECULATIVE and receipt.route in self._routes and not receipt.warm_up:
            self._in_flight -= 1
