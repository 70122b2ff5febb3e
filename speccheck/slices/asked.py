"""What each compatibility slice asks: requests made from the corpus, the same on both arms.

A slice needs to know what the target says without the feature (where would a stop string cut? which
token is there to ban?), so it is made from prompts that replay has answered at temperature 0.
Everything is derived from stored answers and the run's seed: a resumed run plans the same requests.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speccheck import plan
from speccheck.config import ReplayConfig, SliceName
from speccheck.records import (
    Answer,
    Arm,
    Outcome,
    PlannedRequest,
    Prompt,
    Receipt,
    Sampler,
    Stage,
)

N_CHOICES = 3
PENALTIES: Mapping[str, Sampler] = {
    "frequency_penalty 2": Sampler(frequency_penalty=2.0),
    "presence_penalty 2": Sampler(presence_penalty=2.0),
    "repetition_penalty 1.3": Sampler(repetition_penalty=1.3),
}
"""Strong, so that an ignored one shows; each is tried alone, as variant 0, 1 and 2."""

TOP_LOGPROBS = 5
TOOL = "record"

_LEAST_TOKENS = 8
"""Shorter answers leave nothing to speculate on, and no room for a stop string."""

_CACHED_TOKENS = 40
"""Prompt tokens that fill a cache's blocks of 16 at least twice."""

_JSON_TOKENS = 192
"""Answers in a format are longer than free ones, and a cut one proves nothing."""

_LONG_PROMPTS = 2
_LONG_OUTPUT = 32
_LONG_MARGIN = 0.1
"""Share of the context left free where prompt lengths can only be estimated from characters."""

_ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
"""Schema for prompts that come without one."""

RERUN = 8
"""Added to the repeat of a request that is asked again because it looked broken."""

VARIANTS: Mapping[SliceName, tuple[str, ...]] = {
    "json_object": ("temperature 0", "sampled"),
    "json_schema": ("temperature 0", "sampled"),
    "stop": ("plain", "with logprobs"),
    "logprobs": ("temperature 0", "sampled"),
    "penalties": tuple(PENALTIES),
    "min_p": ("min_p 1 at temperature 1",),
    "logit_bias": ("one token at -100",),
    "seed": ("first", "again"),
    "n": (f"n = {N_CHOICES}",),
    "long_context": ("near the longest context",),
    "warm_cache": ("first", "again"),
    "streaming": ("streamed", "whole"),
    "tools": ("streamed", "whole"),
    "ignored_fields": ("speculative: false",),
}
"""What the repeats of a prompt are in each slice, in order."""


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt that replay answered: what both arms said at temperature 0, and target-only sampled.

    Ids are None where a server gives none.
    """

    prompt: Prompt
    text: str
    """Target-only, temperature 0."""
    ids: tuple[int, ...] | None
    speculative_ids: tuple[int, ...] | None
    sampled_ids: tuple[int, ...] | None
    prompt_tokens: int | None


def sources(
    prompts: Sequence[Prompt], receipts: Sequence[Receipt], answers: Mapping[str, Answer]
) -> list[Source]:
    """Prompts whose greedy answer on target-only is stored and long enough to be of use."""
    found: dict[tuple[str, str, str], tuple[Receipt, Answer]] = {}
    for r in receipts:
        answer = answers.get(r.receipt_id)
        if r.outcome == Outcome.OK and r.repeat == 0 and answer is not None:
            found[r.prompt_id, r.phase, r.arm] = (r, answer)

    def ids(prompt: Prompt, phase: str, arm: Arm) -> tuple[int, ...] | None:
        known = found.get((prompt.prompt_id, phase, arm))
        return None if known is None else known[1].token_ids

    made = []
    for prompt in prompts:
        greedy = found.get((prompt.prompt_id, "greedy", Arm.TARGET_ONLY))
        if greedy is None or (greedy[0].completion_tokens or 0) < _LEAST_TOKENS:
            continue
        made.append(
            Source(
                prompt,
                greedy[1].text,
                greedy[1].token_ids,
                ids(prompt, "greedy", Arm.SPECULATIVE),
                ids(prompt, "sampled", Arm.TARGET_ONLY),
                greedy[0].prompt_tokens,
            )
        )
    return made


# --- one slice ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asker:
    """What the requests of one slice share."""

    name: SliceName
    run_id: str
    settings: ReplayConfig
    longest: int | None
    """Tokens of prompt and answer that both servers take, where they say so."""
    rng: np.random.Generator
    count: Callable[[Sequence[Mapping[str, str]]], int | None] = lambda _: None
    """Tokens of a chat as the target counts them; None where it does not say."""

    @property
    def sampled(self) -> Sampler:
        """A sampled request of this slice; one seed for all, so that repeats can be compared."""
        return Sampler(temperature=self.settings.sampled_temperature, seed=7)

    def ask(self, prompt: Prompt, variant: int, **changes: Any) -> list[PlannedRequest]:
        """One request on each arm, greedy unless `changes` say otherwise."""
        concurrency = 1 if self.name == "warm_cache" else self.settings.concurrency
        phase = plan.Phase(
            self.run_id,
            Stage.REPLAY,
            f"{plan.SLICE_PHASE}{self.name}",
            concurrency=concurrency,
            keep_text=True,
        )
        made = plan.single(phase, prompt, variant)
        sampler: Sampler = changes.pop("sampler", Sampler())
        # What the prompt itself asks for stays: its stop strings, its structured output.
        kept = made[0].sampler
        sampler = replace(
            sampler, stop=(*sampler.stop, *kept.stop), response_format=kept.response_format
        )
        return [replace(request, sampler=sampler, **changes) for request in made]

    def pick(self, found: Sequence[Source]) -> list[Source]:
        """As many as the settings say, from each route in turn, drawn by the run's seed."""
        by_route: dict[str, list[Source]] = defaultdict(list)
        for i in self.rng.permutation(len(found)):
            by_route[found[int(i)].prompt.route].append(found[int(i)])
        picked: list[Source] = []
        queues = [by_route[route] for route in sorted(by_route)]
        while any(queues) and len(picked) < self.settings.slice_prompts:
            for queue in queues:
                if queue and len(picked) < self.settings.slice_prompts:
                    picked.append(queue.pop())
        return picked


def plan_slice(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    """The requests of one slice on both arms; empty where no prompt is fit for it."""
    return _PLANS[asker.name](asker, found)


def _json_object(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return _structured(asker, found, lambda _: {"type": "json_object"})


def _json_schema(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return _structured(
        asker,
        found,
        lambda prompt: {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema_of(prompt)},
        },
    )


def _structured(
    asker: Asker, found: Sequence[Source], wanted: Callable[[Prompt], dict[str, Any]]
) -> list[PlannedRequest]:
    asked = []
    for prompt in _for_json(asker, found):
        formed = replace(prompt, response_format=wanted(prompt))
        asked += asker.ask(formed, 0) + asker.ask(formed, 1, sampler=asker.sampled)
    return asked


def _for_json(asker: Asker, found: Sequence[Source]) -> list[Prompt]:
    """Prompts that ask for JSON where the corpus has some; else others, with a line that does."""
    fitting = [s for s in found if _json_check(s.prompt.check) is not None]
    prompts = [source.prompt for source in asker.pick(fitting or found)]
    if not fitting:
        prompts = [_with_line(prompt, "Answer with a JSON object.") for prompt in prompts]
    return [replace(p, max_tokens=max(p.max_tokens, _JSON_TOKENS), stop=()) for p in prompts]


def _json_check(check: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a check that asks for JSON."""
    if check.get("kind") in ("json", "json_schema"):
        return check
    parts = check.get("checks", ()) if check.get("kind") == "all" else ()
    return next((part for part in parts if _json_check(part) is not None), None)


def schema_of(prompt: Prompt) -> Mapping[str, Any]:
    """The schema that a prompt's check has, or one with a single text in it."""
    check = _json_check(prompt.check) or {}
    schema = check.get("schema")
    if schema is None and isinstance(check.get("expect"), Mapping) and check["expect"]:
        types = {str: "string", bool: "boolean", int: "integer", float: "number"}
        if all(type(value) in types for value in check["expect"].values()):
            fields = {name: {"type": types[type(v)]} for name, v in check["expect"].items()}
            schema = {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
    return schema if schema is not None else _ANY_OBJECT


def _with_line(prompt: Prompt, line: str) -> Prompt:
    last = prompt.messages[-1]
    changed = {**last, "content": f"{last['content']}\n{line}"}
    return replace(prompt, messages=(*prompt.messages[:-1], changed))


def _stop(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    asked = []
    for source in asker.pick([s for s in found if stop_inside(s.text)]):
        stop = (stop_inside(source.text),)
        asked += asker.ask(source.prompt, 0, sampler=Sampler(stop=stop))
        asked += asker.ask(source.prompt, 1, sampler=Sampler(stop=stop, logprobs=1))
    return asked


def stop_inside(text: str) -> str:
    """A stop string from the middle of a text, across a blank and so across tokens; or empty.

    >>> stop_inside("The order has left the depot.")
    'er h'
    """
    for at in range(len(text) // 3, len(text) - 2):
        if text[at] == " " and at > 2:
            stop = text[at - 2 : at + 2]
            if text.find(stop) > 0:
                return stop
    return ""


def _logprobs(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    asked = []
    for source in asker.pick(found):
        asked += asker.ask(source.prompt, 0, sampler=Sampler(logprobs=TOP_LOGPROBS))
        asked += asker.ask(source.prompt, 1, sampler=replace(asker.sampled, logprobs=TOP_LOGPROBS))
    return asked


def _penalties(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    """On the answers that repeat most tokens: they have most to be penalised."""
    known = [s for s in found if s.ids and s.speculative_ids]
    ranked = sorted(known, key=lambda s: (-_repeats(s.ids or ()), s.prompt.prompt_id))
    return [
        request
        for source in asker.pick(ranked[: 2 * asker.settings.slice_prompts])
        for variant, sampler in enumerate(PENALTIES.values())
        for request in asker.ask(source.prompt, variant, sampler=sampler)
    ]


def _repeats(ids: Sequence[int]) -> int:
    """Tokens that stood before in the same answer."""
    return len(ids) - len(set(ids))


def _min_p(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    """With min_p 1 only the most likely token is left, so sampling must give the greedy answer.

    Only prompts whose sampled answer is another one can tell.
    """
    telling = [s for s in found if s.ids and s.sampled_ids and s.ids != s.sampled_ids]
    sampler = Sampler(temperature=1.0, min_p=1.0, seed=7)
    return [r for s in asker.pick(telling) for r in asker.ask(s.prompt, 0, sampler=sampler)]


def _logit_bias(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return [
        request
        for source in asker.pick([s for s in found if s.ids])
        for request in asker.ask(
            source.prompt, 0, fields={"logit_bias": {str(banned(source)): -100}}
        )
    ]


def banned(source: Source) -> int:
    """A token that the target's greedy answer holds, from its second third; never the last one."""
    ids = source.ids or ()
    return ids[len(ids) // 3]


def _seed(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return [
        request
        for source in asker.pick(found)
        for variant in (0, 1)
        for request in asker.ask(source.prompt, variant, sampler=asker.sampled)
    ]


def _n(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    # Each choice is graded: checks that run code would make that slow.
    quick = [s for s in found if s.prompt.check.get("kind") != "code"]
    return [
        request
        for source in asker.pick(quick or found)
        for request in asker.ask(source.prompt, 0, sampler=asker.sampled, n=N_CHOICES)
    ]


def _long_context(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    longest = asker.settings.long_context_tokens or asker.longest
    if longest is None:
        return []
    asked = []
    for source in asker.pick(found)[:_LONG_PROMPTS]:
        output = min(source.prompt.max_tokens, _LONG_OUTPUT)
        prompt = _filled(asker, source, found, longest - output)
        if prompt is not None:
            asked += asker.ask(prompt, 0, max_tokens=output)
    return asked


LONG = "+long"
"""End of the id of a prompt that was made long."""


def _filled(asker: Asker, source: Source, found: Sequence[Source], tokens: int) -> Prompt | None:
    """A prompt of at most so many tokens and not much less: others before its own last message."""
    known = [s for s in found if s.prompt_tokens]
    characters = sum(len(m["content"]) for s in known for m in s.prompt.messages)
    own = source.prompt_tokens
    if not known or not own or not characters:
        return None
    # The template's own tokens count as text here, so the first guess is on the short side.
    room = (tokens - own) * characters / sum(s.prompt_tokens or 0 for s in known)
    for _ in range(_GUESSES):
        if room < 1:
            break
        prompt = _with_filler(source.prompt, found, int(room))
        n = asker.count(prompt.messages)
        if n is None:
            return _with_filler(source.prompt, found, int(room * (1 - _LONG_MARGIN)))
        if 0.98 * tokens <= n <= tokens:
            return prompt
        room *= 0.99 * (tokens - own) / max(1, n - own)
    return None


_GUESSES = 12


def _with_filler(prompt: Prompt, found: Sequence[Source], room: int) -> Prompt:
    """So many characters of other prompts put before a prompt's last message."""
    pieces: list[str] = []
    length = number = 0
    while length < room:
        other = found[number % len(found)].prompt
        number += 1
        pieces.append(f"[{number}] {other.messages[-1]['content']}")
        length += len(pieces[-1]) + 1
    filler = "\n".join(pieces)[:room]
    last = prompt.messages[-1]
    changed = {**last, "content": f"{filler}\n{last['content']}"}
    return replace(
        prompt,
        prompt_id=f"{prompt.prompt_id}{LONG}",  # a policy asks for its length by this id
        messages=(*prompt.messages[:-1], changed),
    )


def _warm_cache(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    """A, B, A with one cache: B begins like A and ends like another prompt.

    Caches hold whole blocks of tokens, so short prompts are left out where there are others.
    """
    long_enough = [s for s in found if (s.prompt_tokens or 0) >= _CACHED_TOKENS]
    picked = asker.pick(long_enough or found)
    asked = []
    for source, other in zip(picked, [*picked[1:], *picked[:1]], strict=True):
        first = source.prompt
        between = replace(
            first,
            prompt_id=f"{first.prompt_id}{BETWEEN}",
            messages=(*first.messages[:-1], other.prompt.messages[-1]),
        )
        asked += asker.ask(first, 0) + asker.ask(between, 0) + asker.ask(first, 1)
    return asked


BETWEEN = "+between"
"""End of the id of the B in A, B, A, which nothing is asked about."""


def _streaming(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return [
        request
        for source in asker.pick(found)
        for variant, stream in enumerate((True, False))
        for request in asker.ask(source.prompt, variant, stream=stream)
    ]


def _tools(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    asked = []
    for prompt in _for_json(asker, found):
        function = {
            "name": TOOL,
            "description": "Record what was asked for.",
            "parameters": json.loads(json.dumps(schema_of(prompt))),
        }
        fields = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": TOOL}},
        }
        for variant, stream in enumerate((True, False)):
            asked += asker.ask(prompt, variant, fields=fields, stream=stream)
    return asked


def _ignored_fields(asker: Asker, found: Sequence[Source]) -> list[PlannedRequest]:
    return [
        request
        for source in asker.pick(found)
        for request in asker.ask(source.prompt, 0, fields={"speculative": False})
    ]


_PLANS: Mapping[SliceName, Callable[[Asker, Sequence[Source]], list[PlannedRequest]]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
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
