"""What a request asks for, as far as it decides where the request goes.

A body is read once, here, and never trusted: a field of the wrong type is not known, and what is
not known never speculates. Nothing is refused: that is the server's to do, in its own words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from speccheck.eligibility import Facts
from speccheck.records import Sampler

Kind = Literal["chat", "completion"]

PATHS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}

_COMPLETION_TOKENS = 16
"""Length of a completion whose request says nothing of it; a chat may take what fits (vLLM)."""

_MOST_NESTED = 200
"""Arrays and objects in one another; servers take no more (pydantic), and we write what we read."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 32
"""Fields that we do not know and yet name in a receipt, and how they may be spelt."""

_OURS = ("k", "speculation")
"""Extensions by which the embedded engine speculates more or less: the policy's to say."""

_STRUCTURED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}

_CARRIED = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "repetition_penalty", "stop_token_ids"),
        *("ignore_eos", "skip_special_tokens", "priority", "cache_salt", "user"),
    }
)
"""Fields that mean the same for the rest of an answer as for the whole of it."""

_ACCOUNTED = frozenset(
    {
        *("messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("seed", "stop", "include_stop_str_in_output", "return_token_ids", "request_id"),
        *("session_id", "metadata", "store", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "chat_template", "stream_interval"),
        *("tool_choice", "parallel_tool_calls", "speculation", "k"),
    }
)
"""Fields that are spent once the prompt's ids are known, or that the gateway itself looks after."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "use_beam_search": (False,),
}
"""Values, beside null, with which a field that rules out a hand-over does not."""

_PENALTIES = ("frequency_penalty", "presence_penalty")

_NUMBERS = frozenset({*("temperature", "top_p", "min_p", "repetition_penalty"), *_PENALTIES})
_WHOLE = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "n", "best_of", "top_k", "seed", "min_tokens"),
        *("top_logprobs", "prompt_logprobs"),
    }
)
_YES_OR_NO = frozenset(
    {"include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "echo", "use_beam_search"}
)

_KNOWN = frozenset(
    {*_CARRIED, *_ACCOUNTED, *_NEUTRAL, *_STRUCTURED, "structured_outputs", "prompt_logprobs"}
)


@dataclass(frozen=True)
class Asked:
    """A request for an answer. `body` is its JSON object as it came."""

    kind: Kind
    body: Mapping[str, Any]

    @property
    def is_stream(self) -> bool:
        """Whether the answer is wanted in pieces."""
        return self.body.get("stream") is True

    @cached_property
    def wants_ids(self) -> bool:
        """Whether the client itself asked for token ids."""
        return self.body.get("return_token_ids") is True

    @cached_property
    def wants_usage(self) -> bool:
        """Whether the client asked for the last chunk, with usage."""
        return self.stream_options.get("include_usage") is True

    @cached_property
    def wants_running_usage(self) -> bool:
        """Whether the client asked for usage in every chunk."""
        return self.wants_usage and self.stream_options.get("continuous_usage_stats") is True

    @property
    def stream_options(self) -> Mapping[str, Any]:
        """What the client wants in its stream."""
        return self.body.get("stream_options") or {}

    @cached_property
    def max_tokens(self) -> int | None:
        """Answer length that the request allows; None where it names none."""
        names = ("max_completion_tokens", "max_tokens") if self.kind == "chat" else ("max_tokens",)
        return next((n for name in names if (n := _whole(self.body.get(name))) is not None), None)

    @property
    def limit(self) -> int | None:
        """The same with the default of those that say nothing; None: what fits the model."""
        is_silent = self.kind == "completion" and "max_tokens" not in self.body
        return _COMPLETION_TOKENS if is_silent else self.max_tokens

    @property
    def n(self) -> int:
        """Choices asked for."""
        return _whole(self.body.get("n")) or 1

    @property
    def n_choices(self) -> int:
        """Choices that the answer has: n of each prompt."""
        prompt = self.body.get("prompt")
        n_prompts = len(prompt) if isinstance(prompt, list) and not self._one_prompt else 1
        return self.n * n_prompts

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings."""
        stop = self.body.get("stop")
        if isinstance(stop, str):
            return (stop,) if stop else ()
        if isinstance(stop, list):
            return tuple(one for one in stop if isinstance(one, str) and one)
        return ()

    @property
    def is_greedy(self) -> bool:
        """Whether the answer is the likeliest one and not drawn."""
        temperature = _number(self.body.get("temperature"))
        return temperature is not None and temperature < 1e-5

    @cached_property
    def sampler(self) -> Sampler:
        """Sampling options as a receipt carries them; unreadable ones at their defaults."""
        body, form = self.body, self.body.get("response_format")
        kind = form.get("type") if isinstance(form, Mapping) else None
        return Sampler(
            temperature=_number(body.get("temperature"), 1.0),
            top_p=_number(body.get("top_p"), 1.0),
            top_k=max(0, _whole(body.get("top_k")) or 0),
            min_p=_number(body.get("min_p"), 0.0),
            seed=_whole(body.get("seed")),
            frequency_penalty=_number(body.get("frequency_penalty"), 0.0),
            presence_penalty=_number(body.get("presence_penalty"), 0.0),
            repetition_penalty=_number(body.get("repetition_penalty"), 1.0),
            stop=self.stop,
            logprobs=self._logprobs,
            response_format=kind if _is_name(kind) and kind != "text" else None,
        )

    @property
    def _logprobs(self) -> int | None:
        wanted = self.body.get("logprobs")
        if self.kind == "chat":
            return _whole(self.body.get("top_logprobs")) or 0 if wanted is True else None
        return _whole(wanted)

    @cached_property
    def features(self) -> frozenset[str]:
        """Sampling features in use, by the names that policies know; others by their field."""
        body, sampler = self.body, self.sampler
        used = {
            name
            for name, is_used in {
                "frequency_penalty": sampler.frequency_penalty != 0,
                "presence_penalty": sampler.presence_penalty != 0,
                "repetition_penalty": sampler.repetition_penalty != 1,
                "top_p": sampler.top_p < 1,
                "top_k": sampler.top_k > 0,
                "min_p": sampler.min_p > 0,
                "seed": sampler.seed is not None,
                "stop": bool(sampler.stop),
                "logprobs": sampler.logprobs is not None,
                "n": self.n > 1,
                "min_tokens": bool(body.get("min_tokens")),
                "prompt_logprobs": body.get("prompt_logprobs") is not None,
                "logit_bias": bool(body.get("logit_bias")),
                "tools": bool(body.get("tools")),
            }.items()
            if is_used
        }
        if used & {"frequency_penalty", "presence_penalty", "repetition_penalty"}:
            used.add("penalties")
        if sampler.response_format is not None:
            used |= {"response_format", sampler.response_format}
        used |= {name for field, name in _STRUCTURED.items() if body.get(field)}
        others = sorted(name for name in self._other_names if _is_name(name))
        return frozenset(used.union(others[:_MOST_NAMES]))

    @property
    def _other_names(self) -> set[str]:
        """Features by names of the client's own."""
        names = {name for name in self.body if name not in _KNOWN and self.body[name]}
        structured = self.body.get("structured_outputs")
        if isinstance(structured, Mapping):
            names |= {"json_schema" if name == "json" else name for name in structured}
        return names

    @property
    def unsupported(self) -> str:
        """An option that vLLM refuses when it speculates (VLLM.md 2.2); empty: none."""
        return next((name for name in ("min_p", "logit_bias") if name in self.features), "")

    @cached_property
    def unreadable(self) -> str:
        """A field that decides something and is not of its type; empty: none.

        A server may yet take "3" and 3.0 for 3, and would then do what nobody here decided.
        """
        wrong = next((n for n, value in self.body.items() if not self._is_read(n, value)), "")
        if wrong:
            return wrong
        names = self._other_names
        return "" if len(names) <= _MOST_NAMES and all(map(_is_name, names)) else "a field's name"

    def _is_read(self, name: str, value: Any) -> bool:
        if value is None:
            return True
        if name in _NUMBERS:
            return _number(value) is not None
        if name in _WHOLE or (name == "logprobs" and self.kind == "completion"):
            return _whole(value) is not None
        if name in _YES_OR_NO or name == "logprobs":
            return _is_bool(value)
        if name == "response_format":
            return isinstance(value, Mapping) and _is_name(value.get("type"))
        if name == "stop":
            many = value if isinstance(value, list) else [value]
            return all(isinstance(one, str) for one in many)
        return True

    @cached_property
    def not_joinable(self) -> str:
        """Why a running answer could not be continued exactly from its ids; empty: it could.

        What is not known to be harmless is taken for harmful.
        """
        body = self.body
        if not self.is_stream:
            return ""  # nothing is sent before the answer is whole: it can be asked for again
        for name in _PENALTIES:
            if _number(body.get(name), 0.0) != 0:
                return f"{name}: the counts of what was written would change"
        if body.get("tools") and body.get("tool_choice") != "none":
            return "tools: the server parses the answer"
        for name, value in body.items():
            if name in _CARRIED or name in _ACCOUNTED or value is None:
                continue
            if any(
                value == other and _is_bool(value) == _is_bool(other)
                for other in _NEUTRAL.get(name, ())
            ):
                continue
            if name == "tools":
                continue
            return f"{name}: the rest of such an answer cannot be asked for alone"
        if not self._one_prompt:
            return "several prompts in one request"
        return ""

    @property
    def _one_prompt(self) -> bool:
        if self.kind == "chat":
            return True
        prompt = self.body.get("prompt")
        if isinstance(prompt, list):
            return bool(prompt) and (type(prompt[0]) is int or len(prompt) == 1)
        return isinstance(prompt, str)

    def facts(self, headers: Mapping[str, str]) -> Facts:
        """What is known of the request. Labels come by header, since OpenAI's API has none.

        `x-speccheck-priority` is `normal` where it is not sent; all other facts are not known then.
        """
        band = headers.get("x-speccheck-output-band")
        prompt = self.body.get("prompt")
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        return Facts(
            route=headers.get("x-speccheck-route"),
            task=headers.get("x-speccheck-task"),
            language=headers.get("x-speccheck-language"),
            priority=headers.get("x-speccheck-priority", "normal"),
            prompt_tokens=len(prompt) if isinstance(prompt, list) and is_ids else None,
            output_band=band if band in ("short", "medium", "long") else None,
            max_tokens=self.limit,
            temperature=_number(self.body.get("temperature")),
            features=self.features,
        )

    def carried(self) -> dict[str, Any]:
        """The fields that the rest of an answer is asked for with."""
        return {name: value for name, value in self.body.items() if name in _CARRIED}


def read(path: str, raw: bytes, extra: Mapping[str, Any] | None = None) -> Asked | None:
    """The request in a body, or None where it is none that the gateway understands.

    `extra` is what every request carries beside what its client sent: it is part of what is asked.
    """
    kind = PATHS.get(path)
    if kind is None:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not _is_shallow(raw, body):
        return None
    body = {**(extra or {}), **{name: body[name] for name in body if name not in _OURS}}
    options = body.get("stream_options")
    switches = [body.get("stream"), body.get("return_token_ids")]
    if isinstance(options, dict):
        switches += [options.get("include_usage"), options.get("continuous_usage_stats")]
    elif options is not None:
        return None
    # Servers take 1 and "true" for true, and the answer would come in another form than is read.
    if not all(one is None or _is_bool(one) for one in switches):
        return None
    return Asked(kind, body)


def _is_shallow(raw: bytes, body: Any) -> bool:
    """Whether it nests no deeper than servers read; few brackets need no look."""
    if raw.count(b"[") + raw.count(b"{") <= _MOST_NESTED:
        return True
    level = [body]
    for _ in range(_MOST_NESTED):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)  # and 0 is not False here: `logprobs: 0` asks for some


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**53 else None


def _number(value: Any, default: Any = None) -> Any:
    """A finite number, or the default."""
    if type(value) in (int, float) and math.isfinite(value) and abs(value) < 2**53:
        return float(value)
    return default
