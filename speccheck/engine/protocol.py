"""Requests and answers in the OpenAI shapes as vLLM extends them.

Unknown fields are ignored with HTTP 200, as vLLM does, but a known field that would change the
answer and that this engine cannot honour is refused by name: a silently ignored option is one of
the bugs speccheck looks for.

Extensions of ours, per request: `speculation` ("on" | "off" or a boolean) and `k` (proposal length,
at most the server's). vLLM has no such switch; there they are unknown fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speccheck.engine.grammar import Expression, compile_format, compile_schema
from speccheck.engine.sampling import SamplingParams, TokenLogprobs
from speccheck.engine.sequence import Output
from speccheck.engine.text import Tokenizer
from speccheck.errors import UsageError

T = TypeVar("T", bound=BaseModel)
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "BadRequestError",
    503: "ServiceUnavailableError",
}
_UNSUPPORTED = (
    "use_beam_search", "best_of", "suffix", "echo", "allowed_token_ids", "bad_words",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "logprob_token_ids", "truncate_prompt_tokens", "prompt_embeds", "repetition_detection",
    "thinking_token_budget",
)  # fmt: skip
MOST_CHOICES = 128
SPECULATION_REFUSAL = (  # vLLM's words, which clients and our rules match on
    "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
)


class ApiError(Exception):
    """An answer that is an error, in the OpenAI shape."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "InternalServerError"),
                "param": param,
                "code": status,
            }
        }


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """The fields both generation endpoints share; defaults are vLLM's."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[int, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: dict[str, Any] | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    speculation: Literal["on", "off"] | bool | None = None
    k: int | None = Field(None, ge=0)

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk with usage and metrics is wanted."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries running usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def wanted_logprobs(self) -> int | None:
        """How many alternatives per output token, None for no logprobs."""
        raise NotImplementedError

    def budget(self) -> int | None:
        """The wanted number of output tokens, None for as many as fit."""
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    """`/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    add_special_tokens: bool = True

    def wanted_logprobs(self) -> int | None:
        """See the base class."""
        return self.logprobs


class ChatRequest(GenerationRequest):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def wanted_logprobs(self) -> int | None:
        """See the base class."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def budget(self) -> int | None:
        """See the base class."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class TokenizeRequest(BaseModel):
    """`/tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[int]


def parse(shape: type[T], raw: Any) -> T:
    """The request, or ApiError 400 that names the field."""
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{field}: {first['msg']}", field or None) from None


@dataclass(frozen=True)
class Limits:
    """What this server can do."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    k: int | None


def sampling_params(request: GenerationRequest, n_prompt: int, limits: Limits) -> SamplingParams:
    """Checked sampling parameters. Raises ApiError 400 in vLLM's words where it has them."""
    extra = request.model_extra or {}
    for name in _UNSUPPORTED:
        if extra.get(name):
            raise ApiError(400, f"{name} is not supported by the embedded engine.", name)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(
            400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
        )
    if request.stream_options and not request.stream:
        raise ApiError(
            400, "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            400, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )
    max_tokens = request.budget()
    _check_length(n_prompt, max_tokens, limits)
    if max_tokens is None:
        max_tokens = limits.max_model_len - n_prompt
    temperature = _number(request.temperature, 1.0, "temperature", low=0.0)
    min_p = _number(request.min_p, 0.0, "min_p", low=0.0, high=1.0)
    if limits.k is not None and (min_p > 1e-5 or request.logit_bias):
        raise ApiError(400, SPECULATION_REFUSAL)
    top_p = _number(request.top_p, 1.0, "top_p", high=1.0)
    if top_p <= 0:
        raise ApiError(400, f"top_p must be in (0, 1], got {top_p}.", "top_p")
    repetition = _number(request.repetition_penalty, 1.0, "repetition_penalty")
    if repetition <= 0:
        raise ApiError(
            400, f"repetition_penalty must be above 0, got {repetition}.", "repetition_penalty"
        )
    top_k = request.top_k or 0
    if top_k < -1:
        raise ApiError(400, f"top_k must be 0 or -1 (off) or at least 1, got {top_k}.", "top_k")
    if not 0 <= request.min_tokens <= max_tokens:
        raise ApiError(
            400,
            f"min_tokens must be in 0..max_tokens={max_tokens}, got {request.min_tokens}.",
            "min_tokens",
        )
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if "" in stop:
        raise ApiError(400, "stop cannot contain an empty string.", "stop")
    for name, tokens in (
        ("stop_token_ids", request.stop_token_ids or []),
        ("logit_bias", list(request.logit_bias or {})),
    ):
        if not all(0 <= token < limits.vocab_size for token in tokens):
            raise ApiError(
                400, f"{name}: ids must be in 0..{limits.vocab_size - 1}, got {tokens}.", name
            )
    greedy = temperature < 1e-5
    n_choices = 1 if request.n is None else request.n
    if not 1 <= n_choices <= MOST_CHOICES:
        raise ApiError(400, f"n must be in 1..{MOST_CHOICES}, got {n_choices}.", "n")
    if n_choices > 1 and greedy:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n_choices}.", "n")
    return SamplingParams(
        temperature=temperature,
        top_p=1.0 if greedy else top_p,
        top_k=0 if greedy else max(top_k, 0),
        min_p=0.0 if greedy else min_p,
        logit_bias={
            token: min(100.0, max(-100.0, _number(bias, 0.0, "logit_bias")))  # clamped as in vLLM
            for token, bias in (request.logit_bias or {}).items()
        },
        frequency_penalty=_number(request.frequency_penalty, 0.0, "frequency_penalty", -2.0, 2.0),
        presence_penalty=_number(request.presence_penalty, 0.0, "presence_penalty", -2.0, 2.0),
        repetition_penalty=repetition,
        seed=None if request.seed == -1 else request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=stop,
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=_alternatives(request.wanted_logprobs(), "sample logprobs", limits),
        prompt_logprobs=_alternatives(request.prompt_logprobs, "prompt logprobs", limits),
    )


def chosen_tool(request: GenerationRequest) -> dict[str, Any] | None:
    """The one function that the answer must call; None for text.

    tool_choice "none" and "auto" hand the tools to the chat template and leave the answer text.
    Raises ApiError 400 for other choices that this engine cannot honour.
    """
    if not isinstance(request, ChatRequest) or request.tool_choice in (None, "none"):
        return None
    choice = request.tool_choice
    if not request.tools:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "auto":
        return None
    if isinstance(choice, str):
        raise ApiError(
            400,
            f"tool_choice {choice!r} is not supported by the embedded engine; known are none, "
            "auto and a named function.",
            "tool_choice",
        )
    name = (choice.get("function") or {}).get("name")
    for tool in request.tools:
        function: dict[str, Any] = tool.get("function") or {}
        if isinstance(name, str) and function.get("name") == name:
            return function
    raise ApiError(
        400,
        "The tool specified in `tool_choice` does not match any of the specified `tools`.",
        "tool_choice",
    )


def structure(request: GenerationRequest) -> tuple[str, Expression] | None:
    """The language that the answer must be in, with a text that identifies it; None for any text.

    From `response_format`, or the parameters of the function that must be called. Raises ApiError
    400, naming the part, for what the engine's grammar does not cover.
    """
    tool = chosen_tool(request)
    wanted = request.response_format or {"type": "text"}
    try:
        expression = compile_format(wanted)
        if tool is not None:
            if expression is not None:
                raise ApiError(
                    400, "tool_choice and response_format exclude each other.", "tool_choice"
                )
            wanted = tool.get("parameters") or {"type": "object"}
            expression = compile_schema(wanted, f"tools.{tool['name']}.parameters")
    except UsageError as error:
        name = "response_format" if tool is None else "tools"
        raise ApiError(400, f"{error}.", name) from None
    if expression is None:
        return None
    if request.min_tokens:
        raise ApiError(
            400, "min_tokens is not supported together with structured output.", "min_tokens"
        )
    return json.dumps(wanted), expression  # keys unsorted: they give the order of properties


def proposal_length(request: GenerationRequest, limits: Limits) -> int | None:
    """The request's own k: 0 for target-only, None for the server's. Raises ApiError 400."""
    if request.speculation in ("off", False) or request.k == 0:
        return 0
    asked = request.k is not None or request.speculation in ("on", True)
    if asked and limits.k is None:
        raise ApiError(
            400, "This server has no speculative config: leave out speculation and k.", "k"
        )
    if request.k is not None and request.k > (limits.k or 0):
        raise ApiError(
            400, f"k={request.k} exceeds num_speculative_tokens={limits.k} of this server.", "k"
        )
    return request.k


def _check_length(n_prompt: int, max_tokens: int | None, limits: Limits) -> None:
    room = limits.max_model_len
    if n_prompt == 0:
        raise ApiError(400, "The prompt is empty.", "prompt")
    if n_prompt >= room:
        raise ApiError(
            400,
            f"This model's maximum context length is {room} tokens. However, your request has "
            f"{n_prompt} input tokens. Please reduce the length of the input messages.",
            "prompt",
        )
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if max_tokens is not None and n_prompt + max_tokens > room:
        raise ApiError(
            400,
            f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's "
            f"maximum context length is {room} tokens and your request has {n_prompt} input "
            f"tokens ({max_tokens} > {room} - {n_prompt}).",
            "max_tokens",
        )


def _number(
    value: float | None, default: float, name: str, low: float = -math.inf, high: float = math.inf
) -> float:
    if value is None:
        return default
    if not low <= value <= high or math.isinf(value):
        raise ApiError(400, f"{name} must be in [{low}, {high}], got {value}.", name)
    return value


def _alternatives(n: int | None, what: str, limits: Limits) -> int | None:
    if n is None:
        return None
    if n < -1:
        raise ApiError(400, f"{what} must be at least -1, got {n}.", "logprobs")
    allowed = limits.max_logprobs
    if allowed >= 0 and (n > allowed or n == -1):
        asked = limits.vocab_size if n == -1 else n
        raise ApiError(
            400,
            f"Requested {what} of {asked}, which is greater than max allowed: {allowed}",
            "logprobs",
        )
    return n


def normal_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text content. Raises ApiError 400 for parts that are no text."""
    if not messages:
        raise ApiError(400, "messages: at least one message is wanted.", "messages")
    normal = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ApiError(400, f"messages.{i}.role: a string is wanted.", "messages")
        if isinstance(content, list):
            if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
                raise ApiError(400, f"messages.{i}.content: only text parts work.", "messages")
            content = "\n".join(part["text"] for part in content)
        if not isinstance(content, str | None):
            raise ApiError(400, f"messages.{i}.content: text is wanted.", "messages")
        normal.append({**message, "content": content or ""})
    return normal


@dataclass
class _Progress:
    """How far one choice of an answer is."""

    n_tokens: int = 0
    offset: int = 0
    """Characters of token names so far, for `text_offset`."""
    started: bool = False


class AnswerWriter:
    """Builds the JSON of one answer, whole or in chunks, from the engine's outputs."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        answer_id: str,
        model: str,
        created: int,
        fingerprint: str,
        k: int | None,
    ) -> None:
        self._request = request
        self._prompt = list(prompt)
        self._tokenizer = tokenizer
        self._chat = isinstance(request, ChatRequest)
        self._head = {
            "id": answer_id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._fingerprint = fingerprint
        self._k = k
        tool = chosen_tool(request)
        self._tool = None if tool is None else str(tool["name"])
        self._choices = [_Progress() for _ in range(request.n or 1)]

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The body of an answer that is not streamed; one output, everything at once, a choice."""
        request = self._request
        extras: dict[str, Any] = {}
        if request.return_token_ids:
            extras["prompt_token_ids"] = self._prompt
        if request.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self._prompt_logprobs(outputs[0].prompt_logprobs or [])
        choices = []
        for index, output in enumerate(outputs):
            self._choices[index].n_tokens = len(output.token_ids)
            choice: dict[str, Any] = {"index": index}
            if self._chat:
                choice["message"] = {"role": "assistant", **self._content(output.text, index)}
            else:
                choice["text"] = output.text
            choice |= self._ending(output, index)
            if request.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice if self._chat else choice | extras)
        body: dict[str, Any] = {**self._head, "choices": choices, "usage": self._usage(outputs[0])}
        if self._chat:
            body.update(extras)
        body["system_fingerprint"] = self._fingerprint
        body["metrics"] = self._metrics(outputs[0])
        return body

    def chunks(self, output: Output, index: int = 0) -> list[dict[str, Any]]:
        """The stream's chunks for new output of a choice: before its first, chat sends its role."""
        chunks = []
        progress = self._choices[index]
        progress.n_tokens += len(output.token_ids)
        first, progress.started = not progress.started, True
        prompt = {"prompt_token_ids": self._prompt} if self._request.return_token_ids else {}
        if first and self._chat:
            role: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
            role |= {"logprobs": None, "finish_reason": None}
            chunks.append(self._chunk(role, n_completion=0) | prompt)
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["delta"] = self._content(output.text, index, first=first)
        else:
            choice["text"] = output.text
        choice |= self._ending(output, index)
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
            if first and not self._chat:
                choice |= prompt
        chunks.append(self._chunk(choice, n_completion=progress.n_tokens))
        return chunks

    def last_chunk(self, output: Output) -> dict[str, Any] | None:
        """The chunk with usage and metrics, if it was asked for; `output` is a choice's last."""
        if not self._request.include_usage:
            return None
        return {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [],
            "usage": self._usage(output),
            "system_fingerprint": self._fingerprint,
            "metrics": self._metrics(output),
        }

    def _content(self, text: str, index: int, *, first: bool = True) -> dict[str, Any]:
        """Text as content, or as arguments of the call that was asked for; its name comes first."""
        if self._tool is None:
            return {"content": text}
        call: dict[str, Any] = {"index": 0} if self._request.stream else {}
        function = {"arguments": text}
        if first:
            call |= {"id": f"call-{self._head['id']}-{index}", "type": "function"}
            function = {"name": self._tool, **function}
        return {"content": None, "tool_calls": [call | {"function": function}]}

    def _chunk(self, choice: dict[str, Any], n_completion: int) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._chat:
            chunk["object"] = "chat.completion.chunk"
        if self._request.continuous_usage:
            chunk["usage"] = self._counts(n_completion)
        return chunk

    def _usage(self, output: Output) -> dict[str, Any]:
        """All choices together, and how much of the prompt was cached."""
        n_cached = output.stats.n_cached if output.stats else 0
        details = {"prompt_tokens_details": {"cached_tokens": n_cached}}
        return self._counts(sum(choice.n_tokens for choice in self._choices)) | details

    def _counts(self, n_completion: int) -> dict[str, Any]:
        n_prompt = len(self._prompt)
        return {
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt + n_completion,
            "completion_tokens": n_completion,
        }

    def _metrics(self, output: Output) -> dict[str, Any] | None:
        """Per-request metrics; none for several choices, as in vLLM."""
        if output.stats is None or len(self._choices) > 1:
            return None
        return output.stats.as_metrics(self._k)

    def _ending(self, output: Output, index: int) -> dict[str, Any]:
        logprobs = output.logprobs
        return {
            "logprobs": None if logprobs is None else self._logprobs(logprobs, index),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _name(self, token: int) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _logprobs(self, tokens: list[TokenLogprobs], index: int) -> dict[str, Any]:
        n_top = self._request.wanted_logprobs() or 0
        if self._chat:
            return {
                "content": [
                    self._chat_logprob(one.token, one.logprob)
                    | {"top_logprobs": [self._chat_logprob(*pair) for pair in one.top]}
                    for one in tokens
                ]
            }
        names = [self._name(one.token) for one in tokens]
        offsets = []
        progress = self._choices[index]
        for name in names:
            offsets.append(progress.offset)
            progress.offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in tokens],
            "tokens": names,
            # As vLLM: the token itself is always among its alternatives.
            "top_logprobs": [
                {self._name(token): value for token, value in one.top}
                | {self._name(one.token): one.logprob}
                for one in tokens
            ]
            if n_top
            else [{name: one.logprob} for name, one in zip(names, tokens, strict=True)],
        }

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def _prompt_logprobs(
        self, tokens: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, Any] | None]:
        return [None if one is None else self._prompt_logprob(one) for one in tokens]

    def _prompt_logprob(self, one: TokenLogprobs) -> dict[str, Any]:
        """The form of vLLM: the token first, then the alternatives, each with its rank."""
        ranked = [(one.token, one.logprob, one.rank)]
        ranked += [
            (token, value, rank)
            for rank, (token, value) in enumerate(one.top, start=1)
            if token != one.token
        ]
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": self._name(token)}
            for token, value, rank in ranked
        }
