"""What each compatibility slice checks: is the feature honoured, as the target honours it.

Every check is total: whatever a server sent gives ok, fault, refused or unclear, with a line why. A
fault is a breach that chance cannot make (a stop string in the text, log-probabilities of other
tokens, an answer that differs where the target is sure). Where two answers differ at a token that
the target holds nearly tied, that is noise and ok; where the target cannot be asked it is unclear.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from speccheck import grading, lossless
from speccheck.config import SliceName
from speccheck.grading import CodeExecution
from speccheck.records import Answer, Arm, Outcome, PlannedRequest, Prompt, Receipt, Sampler
from speccheck.slices.asked import N_CHOICES, TOOL, VARIANTS, Source, banned, schema_of

_LOGPROB_LIMIT = 0.01
"""Nats that a log-probability may be off where the target's own noise is smaller still."""

_SERVER_FAULTS = ("server_error", "stream_error", "bad_stream", "no_finish_reason", "no_done")
"""Ends of a request that are the server's doing, and not the network's or ours."""


@dataclass(frozen=True, slots=True)
class Check:
    """What one arm's answers to one prompt say of the feature."""

    outcome: Literal["ok", "fault", "refused", "unclear"]
    why: str = ""
    graded: int = 0
    """Answers with a grade, where the slice grades them."""
    passed: int = 0


OK = Check("ok")


@dataclass(frozen=True, slots=True)
class Reply:
    """One request with what came of it."""

    request: PlannedRequest
    receipt: Receipt
    answer: Answer | None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Token ids; None where none were sent or kept."""
        return None if self.answer is None else self.answer.token_ids

    @property
    def text(self) -> str:
        """The text; empty where none was kept."""
        return "" if self.answer is None else self.answer.text

    def detail(self, name: str) -> Any:
        """A part of `Answer.details`; None where it is not there."""
        details = None if self.answer is None else self.answer.details
        return None if details is None else details.get(name)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt in one variant of a slice, on both arms."""

    prompt_id: str
    route: str
    variant: int
    target: Check
    speculative: Check
    receipt_id: str
    """The speculative arm's receipt."""
    kept_off: bool
    """Whether the eligibility policy keeps this request off the speculative arm."""
    drafted: int | None = None
    """Tokens drafted for it; None where the server does not say."""

    @property
    def is_broken(self) -> bool:
        """Whether target-only serves it rightly and the speculative arm does not."""
        return self.target.outcome == "ok" and self.speculative.outcome == "fault"


class Oracle(Protocol):
    """The target, asked about single tokens."""

    tau: float | None
    """Largest gap that its own noise explains, nats; None where that is not known."""

    async def prompt_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """A prompt's token ids as the server renders it."""

    async def logprobs(self, ids: Sequence[int]) -> Sequence[float | None] | None:
        """Log-probability of each id after those before it, all in one pass."""


@dataclass(frozen=True, slots=True)
class Group:
    """All replies to one prompt in a slice, by (variant, arm)."""

    source: Source
    replies: Mapping[tuple[int, Arm], Reply]
    code_execution: CodeExecution = "off"

    @property
    def variants(self) -> list[int]:
        """Variants that were sent, in order."""
        return sorted({variant for variant, _ in self.replies})

    def of(self, variant: int, arm: Arm) -> Reply | None:
        """One reply."""
        return self.replies.get((variant, arm))


Checked = tuple[int, Check, Check]
"""(variant, target-only, speculative)."""


async def check(name: SliceName, group: Group, oracle: Oracle) -> list[Item]:
    """The items of one prompt in one slice."""
    found = await _CHECKS[name](group, oracle)
    items = []
    for variant, target, speculative in found:
        replies = [r for arm in Arm if (r := group.of(variant, arm)) is not None]
        last = replies[-1]
        items.append(
            Item(
                last.receipt.prompt_id,
                last.receipt.route,
                variant,
                target,
                speculative,
                last.receipt.receipt_id,
                last.receipt.kept_off,
                last.receipt.proposed_tokens if last.receipt.arm == Arm.SPECULATIVE else None,
            )
        )
    return items


# --- parts --------------------------------------------------------------------------------------


def _served(reply: Reply | None) -> Check | None:
    """Why a reply cannot be looked at, or None where it is whole."""
    if reply is None:
        return Check("unclear", "it was not sent")
    r = reply.receipt
    message = f"{r.error_message or r.error_class or r.outcome}"
    if r.outcome == Outcome.REJECTED and r.error_class in ("unsupported_parameter", "bad_request"):
        return Check("refused", message)
    if r.error_class == "context_length":
        return Check("unclear", "it was longer than the server takes")
    if r.outcome != Outcome.OK:
        fault = r.error_class in _SERVER_FAULTS
        return Check(
            "fault" if fault else "unclear", f"the request ended as {r.outcome}: {message}"
        )
    return None


Judge = Callable[[Reply], Check]


def _each(group: Group, judge: Judge) -> list[Checked]:
    """Every variant, each arm by itself."""

    def one(variant: int, arm: Arm) -> Check:
        reply = group.of(variant, arm)
        broken = _served(reply)
        if broken is not None or reply is None:
            return broken or OK
        return judge(reply)

    return [
        (variant, one(variant, Arm.TARGET_ONLY), one(variant, Arm.SPECULATIVE))
        for variant in group.variants
    ]


async def _each_async(group: Group, judge: Callable[[Reply], Awaitable[Check]]) -> list[Checked]:
    known: dict[str, Check] = {}
    for reply in group.replies.values():
        broken = _served(reply)
        known[reply.receipt.receipt_id] = broken or await judge(reply)
    return _each(group, lambda reply: known[reply.receipt.receipt_id])


async def _same(
    oracle: Oracle,
    prompt: Prompt,
    target: Sequence[int] | None,
    other: Sequence[int] | None,
    *,
    what: str,
    sampler: Sampler | None = None,
) -> Check:
    """Whether `other` is what the target says, up to a tie where the two part.

    `sampler` has penalties that both were made under: the target's gap is taken as they change it.
    """
    if target is None or other is None:
        return Check("unclear", "the server sent no token ids to compare")
    at = lossless.first_divergence(target, other)
    if at is None:
        return OK
    where = f"{what} at token {at.index}"
    if at.target_token is None or at.other_token is None:
        return Check("unclear", f"{where}, where one of the two ends")
    prompt_ids = await oracle.prompt_ids(prompt)
    before = list(target[: at.index])
    gap = None
    if prompt_ids is not None:
        prefix = [*prompt_ids, *before]
        scored = [await oracle.logprobs([*prefix, t]) for t in (at.target_token, at.other_token)]
        ends = [s[-1] for s in scored if s and s[-1] is not None]
        if len(ends) == 2:
            gap = _penalised(
                ends, (at.target_token, at.other_token), prompt_ids, before, sampler or Sampler()
            )
    kind = "unknown" if oracle.tau is None else lossless.classify(gap, oracle.tau)
    if kind == "tie":
        return Check("ok", f"{where}, a tie")
    if kind == "violation":
        return Check("fault", f"{where}, where the target is sure ({gap:.3g} nats)")
    said = f"{gap:.3g} nats apart" if gap is not None else "whose gap is not known"
    return Check("unclear", f"{where}, {said}")


def _penalised(
    logprobs: Sequence[float],
    tokens: tuple[int, int],
    prompt: Sequence[int],
    before: Sequence[int],
    sampler: Sampler,
) -> float | None:
    """The gap between two tokens as penalties leave it; None where that cannot be told.

    Frequency and presence penalties are subtracted from logits, so from gaps too. A repetition
    penalty scales logits, which log-probabilities do not show: only tokens that it spares can be
    compared.
    """
    seen = Counter(before)
    if sampler.repetition_penalty != 1 and any(t in seen or t in prompt for t in tokens):
        return None
    value = [
        p - sampler.frequency_penalty * seen[t] - sampler.presence_penalty * (seen[t] > 0)
        for p, t in zip(logprobs, tokens, strict=True)
    ]
    return value[0] - value[1]


def _miscounted(reply: Reply) -> str:
    """What the client saw not to add up in counts of tokens; empty where all did."""
    return next((w for w in reply.receipt.warnings if "token ids received" in w), "")


# --- structured output and tools ----------------------------------------------------------------


async def _structured(group: Group, _oracle: Oracle) -> list[Checked]:
    def judge(reply: Reply) -> Check:
        wanted = reply.request.prompt.response_format or {}
        if reply.receipt.finish_reason == "length":
            return Check("unclear", "the answer was cut at its length limit")
        if wanted.get("type") == "json_schema":
            check = {"kind": "json_schema", "schema": schema_of(reply.request.prompt)}
        else:
            check = {"kind": "json_schema", "schema": {"type": "object"}}
        grade = grading.grade(check, reply.text)
        return OK if grade.outcome == "pass" else Check("fault", grade.reason)

    return _each(group, judge)


async def _tools(group: Group, _oracle: Oracle) -> list[Checked]:
    schema = schema_of(next(iter(group.replies.values())).request.prompt)

    def judge(reply: Reply) -> Check:
        calls = reply.detail("tool_calls") or []
        if reply.receipt.finish_reason == "length":
            return Check("unclear", "the call was cut at its length limit")
        if [name for name, _ in calls] != [TOOL]:
            return Check("fault", f"{len(calls)} calls came, one of {TOOL} was asked for")
        grade = grading.grade({"kind": "json_schema", "schema": schema}, calls[0][1])
        if grade.outcome != "pass":
            return Check("fault", f"arguments: {grade.reason}")
        # The streamed call is variant 0; its pieces must join to the whole one of variant 1.
        streamed = group.of(0, Arm(reply.receipt.arm))
        if streamed is None or not streamed.ids or streamed.ids != reply.ids:
            return OK
        if streamed.detail("tool_calls") != calls:
            return Check("fault", "the same tokens, streamed, join to another call")
        return OK

    return _each(group, judge)


# --- stop strings -------------------------------------------------------------------------------


async def _stop(group: Group, _oracle: Oracle) -> list[Checked]:
    def judge(reply: Reply) -> Check:
        stop = reply.request.sampler.stop[0]
        expected = group.source.text[: group.source.text.find(stop)]
        text = reply.text
        if stop in text:
            return Check("fault", f"the stop string {stop!r} is in the text")
        logprobs = reply.detail("logprobs")
        tokens = reply.receipt.completion_tokens
        if logprobs is not None and len(logprobs) != tokens:
            return Check("fault", f"{len(logprobs)} logprobs for {tokens} tokens")
        if problem := _miscounted(reply):
            return Check("fault", problem)
        if text == expected:
            reason = reply.receipt.finish_reason
            if reason != "stop":
                return Check("fault", f"it ended at the stop string with finish_reason {reason}")
            return OK
        if text.startswith(expected):
            return Check("fault", f"the text goes on after the stop: {text[len(expected) :]!r}")
        if expected.startswith(text):
            return Check("fault", f"the text lacks its end: {expected[len(text) :]!r}")
        return Check("unclear", "the answer is another one than without the stop string")

    found = _each(group, judge)
    for i, (variant, target, speculative) in enumerate(found):
        a, b = group.of(variant, Arm.TARGET_ONLY), group.of(variant, Arm.SPECULATIVE)
        if a is None or b is None or (target.outcome, speculative.outcome) != ("ok", "ok"):
            continue
        if a.ids is not None and b.ids is not None and len(b.ids) > len(a.ids):
            extra = len(b.ids) - len(a.ids)
            found[i] = (variant, target, Check("fault", f"{extra} token ids past the stop string"))
    return found


# --- log-probabilities --------------------------------------------------------------------------


async def _logprobs(group: Group, oracle: Oracle) -> list[Checked]:
    async def judge(reply: Reply) -> Check:
        return await _logprobs_of(reply, oracle)

    return await _each_async(group, judge)


async def _logprobs_of(reply: Reply, oracle: Oracle) -> Check:
    entries = reply.detail("logprobs")
    tokens = reply.receipt.completion_tokens
    if not entries:
        return Check("fault", "no log-probabilities came")
    if len(entries) != tokens:
        return Check("fault", f"{len(entries)} log-probabilities for {tokens} tokens")
    limit = max(_LOGPROB_LIMIT, 2 * (oracle.tau or 0.0))
    greedy = reply.request.sampler.temperature == 0
    for i, (token, value, top) in enumerate(entries):
        if problem := _entry_problem(
            token,
            value,
            top,
            sent=None if reply.ids is None else reply.ids[i],
            limit=limit,
            greedy=greedy,
        ):
            return Check("fault", f"token {i}: {problem}")
    prompt_ids = await oracle.prompt_ids(reply.request.prompt)
    if prompt_ids is None or reply.ids is None:
        return Check("unclear", "the answer cannot be scored without token ids")
    scored = await oracle.logprobs([*prompt_ids, *reply.ids])
    if scored is None:
        return Check("unclear", "the target scores no prompts")
    for i, (entry, forced) in enumerate(zip(entries, scored[len(prompt_ids) :], strict=True)):
        said = -math.inf if entry[1] is None else entry[1]
        if forced is not None and abs(said - forced) > limit:
            return Check(
                "fault",
                f"token {i}: log-probability {said:.4g}, the target says {forced:.4g} "
                f"(limit {limit:.3g} nats)",
            )
    return OK


def _entry_problem(
    token: int | None,
    value: float | None,
    top: Sequence[tuple[int | None, float | None]],
    *,
    sent: int | None,
    limit: float,
    greedy: bool,
) -> str:
    """What is wrong with one token's log-probabilities by themselves; empty where nothing is."""
    if None not in (token, sent) and token != sent:
        return f"the log-probability is of id {token}, the token is {sent}"
    if value is None or value > 1e-6:
        return "the log-probability is no number of at most 0"
    values = [-math.inf if v is None else v for _, v in top]
    # vLLM puts the token itself first, whatever its rank.
    others = values[1:] if top and top[0][0] in (token, None) else values
    if others != sorted(others, reverse=True):
        return "the alternatives are not in order"
    if sum(map(math.exp, values)) > 1 + 1e-3:
        return f"the alternatives' probabilities sum to {sum(map(math.exp, values)):.4g}"
    named = [t for t, _ in top if t is not None]
    if values and len(named) == len(values):
        if value > min(values) + limit and token not in named:
            return "the token is likelier than its alternatives and not among them"
        if token in named and abs(values[named.index(token)] - value) > 1e-4:
            return "the token and its alternatives disagree on its log-probability"
    if greedy and values and value < max(values) - limit:
        return "at temperature 0 it is not the most likely one"
    return ""


# --- penalties and other sampling options -------------------------------------------------------


async def _penalties(group: Group, oracle: Oracle) -> list[Checked]:
    found = _each(group, lambda _: OK)
    for i, (variant, target, speculative) in enumerate(found):
        a, b = group.of(variant, Arm.TARGET_ONLY), group.of(variant, Arm.SPECULATIVE)
        if a is not None and b is not None and target == speculative == OK:
            name = VARIANTS["penalties"][variant]
            found[i] = (variant, *await _penalty(name, group.source, a, b, oracle))
    return found


async def _penalty(
    name: str, source: Source, a: Reply, b: Reply, oracle: Oracle
) -> tuple[Check, Check]:
    """One penalty on both arms: it must change what it changes on target-only, and as there."""
    if a.ids is None or b.ids is None:
        nothing = Check("unclear", "the server sent no token ids to compare")
        return nothing, nothing
    if a.ids == source.ids:
        nothing = Check("unclear", f"{name} changes nothing here")
        return nothing, nothing
    if b.ids == source.speculative_ids:
        why = f"{name} is ignored: the answer is the one without it, token for token"
        return OK, Check("fault" if source.ids == b.ids else "unclear", why)
    what, sampler = "parts from target-only", a.request.sampler
    return OK, await _same(oracle, source.prompt, a.ids, b.ids, what=what, sampler=sampler)


async def _min_p(group: Group, oracle: Oracle) -> list[Checked]:
    """Only the most likely token is left, so the answer is the greedy one."""
    source = group.source

    async def judge(reply: Reply) -> Check:
        if reply.ids is not None and reply.ids in (source.ids, source.speculative_ids):
            return OK
        return await _same(
            oracle, source.prompt, source.ids, reply.ids, what="min_p 1 left another token"
        )

    return await _each_async(group, judge)


async def _logit_bias(group: Group, _oracle: Oracle) -> list[Checked]:
    token = banned(group.source)

    def judge(reply: Reply) -> Check:
        if reply.ids is None:
            return Check("unclear", "the server sent no token ids to look for")
        if token in reply.ids:
            return Check("fault", f"id {token}, which a bias of -100 forbids, is in the answer")
        return OK

    return _each(group, judge)


async def _seed(group: Group, _oracle: Oracle) -> list[Checked]:
    """Reported only: batches change the arithmetic, so a seed need not reproduce an answer."""

    def of(arm: Arm) -> Check:
        replies = [group.of(variant, arm) for variant in (0, 1)]
        for reply in replies:
            if (broken := _served(reply)) is not None:
                return broken
        one, two = (r for r in replies if r is not None)
        same = (one.ids or one.text) == (two.ids or two.text)
        return OK if same else Check("unclear", "one seed gave two answers")

    return [(1, of(Arm.TARGET_ONLY), of(Arm.SPECULATIVE))]


async def _n(group: Group, _oracle: Oracle) -> list[Checked]:
    def judge(reply: Reply) -> Check:
        others = reply.detail("choices") or []
        texts = [reply.text, *(choice["text"] for choice in others)]
        if len(texts) != N_CHOICES:
            return Check("fault", f"{len(texts)} of {N_CHOICES} choices came")
        if empty := sum(not text for text in texts):
            return Check("fault", f"{empty} of {N_CHOICES} choices are empty")
        return _graded(group, reply.request.prompt, texts)

    return _each(group, judge)


def _graded(group: Group, prompt: Prompt, texts: Sequence[str]) -> Check:
    """Served well, with how many of the texts pass the prompt's own check."""
    grades = [
        grading.grade(prompt.check, text, code_execution=group.code_execution).outcome
        for text in texts
    ]
    judged = [grade for grade in grades if grade != "not_applicable"]
    return Check("ok", "", len(judged), judged.count("pass"))


# --- context and cache --------------------------------------------------------------------------


async def _long_context(group: Group, oracle: Oracle) -> list[Checked]:
    def judge(reply: Reply) -> Check:
        if (reply.receipt.completion_tokens or 0) > reply.request.max_tokens:
            return Check("fault", f"more than the {reply.request.max_tokens} tokens asked for")
        return _graded(group, reply.request.prompt, [reply.text])

    ((variant, target, speculative),) = _each(group, judge)
    a, b = group.of(variant, Arm.TARGET_ONLY), group.of(variant, Arm.SPECULATIVE)
    if a is None or b is None or (target.outcome, speculative.outcome) != ("ok", "ok"):
        return [(variant, target, speculative)]
    same = await _same(oracle, a.request.prompt, a.ids, b.ids, what="parts from target-only")
    return [(variant, target, replace(same, graded=speculative.graded, passed=speculative.passed))]


async def _warm_cache(group: Group, oracle: Oracle) -> list[Checked]:
    """A, B, A: the second A must be the first, on each arm and on both."""
    prompt = group.source.prompt
    cold = group.of(0, Arm.TARGET_ONLY)

    async def of(arm: Arm) -> Check:
        one, two = group.of(0, arm), group.of(1, arm)
        for reply in (one, two):
            if (broken := _served(reply)) is not None:
                return broken
        if one is None or two is None:
            return Check("unclear", "it was not sent")
        if two.receipt.cached_tokens == 0:
            return Check("unclear", "the second time nothing was found in a cache")
        checks = [await _same(oracle, prompt, one.ids, two.ids, what="the warm answer parts")]
        if arm is Arm.SPECULATIVE and cold is not None and _served(cold) is None:
            checks.append(
                await _same(oracle, prompt, cold.ids, two.ids, what="parts from target-only")
            )
        for outcome in ("fault", "unclear"):
            for found in checks:
                if found.outcome == outcome:
                    return found
        return OK

    return [(1, await of(Arm.TARGET_ONLY), await of(Arm.SPECULATIVE))]


async def _streaming(group: Group, oracle: Oracle) -> list[Checked]:
    """Streamed and whole: the same tokens must have the same text, end and counts."""

    async def of(arm: Arm) -> Check:
        streamed, whole = group.of(0, arm), group.of(1, arm)
        for reply in (streamed, whole):
            if (broken := _served(reply)) is not None:
                return broken
        if streamed is None or whole is None:
            return Check("unclear", "it was not sent")
        if problem := _miscounted(streamed) or _miscounted(whole):
            return Check("fault", problem)
        if streamed.ids is None or whole.ids is None:
            same = streamed.text == whole.text
            return OK if same else Check("unclear", "two texts, and no token ids to compare")
        if streamed.ids != whole.ids:
            what = "streamed and whole answers part"
            return await _same(oracle, group.source.prompt, whole.ids, streamed.ids, what=what)
        for name, a, b in (
            ("text", streamed.text, whole.text),
            ("finish_reason", streamed.receipt.finish_reason, whole.receipt.finish_reason),
            ("prompt_tokens", streamed.receipt.prompt_tokens, whole.receipt.prompt_tokens),
        ):
            if a != b:
                return Check("fault", f"the same tokens, but {name} {_cut(a)} streamed, {_cut(b)}")
        return OK

    return [(1, await of(Arm.TARGET_ONLY), await of(Arm.SPECULATIVE))]


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- fields that a server does not know ---------------------------------------------------------


async def _ignored_fields(group: Group, _oracle: Oracle) -> list[Checked]:
    """Informational: what becomes of a field that asks for speculation to be off."""

    def judge(reply: Reply) -> Check:
        r = reply.receipt
        if r.arm == Arm.TARGET_ONLY:
            return OK
        if r.proposed_tokens is None:
            return Check("unclear", "the server does not say whether it drafted")
        if r.proposed_tokens:
            return Check(
                "ok",
                f"ignored: {r.proposed_tokens} tokens were drafted in {r.verify_steps} steps",
            )
        return Check("ok", "honoured: nothing was drafted")

    return _each(group, judge)


_CHECKS: Mapping[SliceName, Callable[[Group, Oracle], Awaitable[list[Checked]]]] = {
    "json_object": _structured,
    "json_schema": _structured,
    "stop": _stop,
    "logprobs": _logprobs,
    "penalties": _penalties,
    "min_p": _min_p,
    "logit_bias": _logit_bias,
    "seed": _seed,
    "n": _n,
    "long_context": _long_context,
    "warm_cache": _warm_cache,
    "streaming": _streaming,
    "tools": _tools,
    "ignored_fields": _ignored_fields,
}
