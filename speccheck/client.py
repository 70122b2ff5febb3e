"""One OpenAI-compatible client: chunks (or whole answers) in, timings and counts out.

One function makes the receipts of both arms, so that they are measured with one instrument. A
chunk is never taken for a token: under speculation one chunk holds several, so tokens are counted
by their ids, else by the server's running or final usage. Nothing is retried here, since a retried
request is a second receipt. The hot path (bytes, events, JSON, one timestamp per read) is kept flat
because a client that is late measures itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from speccheck import dialects
from speccheck.errors import EngineError
from speccheck.records import (
    Answer,
    Arm,
    ArmDescription,
    Outcome,
    PlannedRequest,
    Receipt,
    digest,
    prompt_band,
    receipt_key,
    temperature_band,
)

MAX_EVENT_BYTES = 32 * 2**20
"""Longest server-sent event that is taken; a longer one is a broken stream."""

_MESSAGE_CHARS = 500
"""Servers quote the request in their errors: enough to act on, not enough to keep a prompt."""

_MAX_COUNT = 2**53
"""What is no smaller is no count, and would not fit the store."""

_UNSUPPORTED = re.compile(
    r"not (?:yet )?support|unsupported|unrecognized|unknown (?:param|field|arg)|extra inputs"
    r"|not (?:permitted|allowed|implemented)|unexpected (?:param|field|keyword)",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(r"context length|maximum context|max_model_len|too long", re.IGNORECASE)

_PARAMETERS = (
    "min_p",
    "logit_bias",
    "top_k",
    "top_p",
    "temperature",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logprobs",
    "top_logprobs",
    "response_format",
    "stream_options",
    "continuous_usage_stats",
    "return_token_ids",
    "cache_salt",
    "priority",
    "ignore_eos",
    "max_tokens",
    "n",
    "stream",
    "tools",
    "tool_choice",
    "speculative",
)
"""Fields a server's refusal may name: those we send, and two that speculation rules out."""


@dataclass(frozen=True, slots=True)
class SpecCounts:
    """Speculation counts of one request, from the engine's own per-request metrics."""

    verify_steps: int | None
    """None where the server does not say (llama.cpp)."""
    proposed_tokens: int
    accepted_tokens: int
    histogram: tuple[int, ...] | None
    """Entry j: verify steps that accepted exactly j drafted tokens."""
    accepted_per_step: tuple[int, ...] | None = None
    """Of each verify step, in order; None but in vLLM's detailed metrics."""
    drafted_per_step: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLogprob:
    """One generated token as the server scored it; ids are None where it names no ids.

    `top` lists (token id, logprob) in the order the server sent.
    """

    token_id: int | None
    logprob: float
    top: tuple[tuple[int | None, float], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A further choice of an answer with n > 1."""

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What one request attempt showed, before it is joined with what was planned.

    Times are `time.perf_counter_ns` when the bytes were read. `first_token_ns` is the first chunk
    that carries token ids or, where the server sends none, content or reasoning.
    """

    outcome: Outcome
    sent_ns: int
    done_ns: int
    http_status: int | None = None
    error_class: str | None = None
    error_message: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    first_token_ns: int | None = None
    first_content_ns: int | None = None
    last_token_ns: int | None = None
    max_chunk_gap_ns: int | None = None
    chunks: int | None = None
    """Chunks that carried output; None where nothing was streamed."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    tokens_source: str = "none"
    """How completion tokens were counted: ids, usage or none."""
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: str = ""
    """Names and arguments of tool calls as they were streamed, joined per call."""
    calls: tuple[tuple[str, str], ...] = ()
    """The same as (name, arguments)."""
    logprobs: tuple[OutputLogprob, ...] | None = None
    """Of the first choice; None where none were sent."""
    others: tuple[Choice, ...] = ()
    """Choices after the first, by index."""
    counts: SpecCounts | None = None
    counts_note: str = ""
    """Why `counts` is None, in a few words."""
    server_queue_ms: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position of a teacher-forced sequence, as the target sees it.

    `logprob` and `rank` (1 is the most likely) are those of the token that is there; `top` lists
    (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer of `complete`. `prompt_logprobs[i]` is None where nothing precedes position i."""

    token_ids: tuple[int, ...] | None
    text: str
    finish_reason: str | None
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    logprobs: tuple[Mapping[int, float], ...] = ()
    """Per generated position, as it was decoded: token id -> logprob of the top k."""


# --- sending ------------------------------------------------------------------------------------


def open_session() -> aiohttp.ClientSession:
    """A session for one arm: connections are reused, never capped, never shared between arms.

    Idle connections are dropped after 3 s, before uvicorn's 5 s: a request written into a
    connection that the server is just closing would be an error of our making.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        read_bufsize=2**20,
        max_line_size=2**16,
        max_field_size=2**16,
    )


def api_url(base_url: str, path: str) -> str:
    """`base_url` with or without `/v1` and slashes, and a path such as `/v1/models`."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/") + path


def no_connection(error: aiohttp.ClientConnectorError) -> str:
    """Why a server could not be reached, without its address: that is nothing for clients."""
    number = error.os_error.errno or 0
    return os.strerror(number) if number > 0 else type(error.os_error).__name__


def request_body(
    model: str,
    request: PlannedRequest,
    *,
    extra: Mapping[str, Any] | None = None,
    omit: Collection[str] = (),
) -> dict[str, Any]:
    """The JSON sent for a planned request. Options at their neutral value are left out.

    `extra` adds fields, `omit` names fields that this server refuses.
    """
    sampler = request.sampler
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in request.prompt.messages],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "max_tokens": request.max_tokens,
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
    }
    optional = {
        "top_k": (sampler.top_k, 0),
        "min_p": (sampler.min_p, 0.0),
        "frequency_penalty": (sampler.frequency_penalty, 0.0),
        "presence_penalty": (sampler.presence_penalty, 0.0),
        "repetition_penalty": (sampler.repetition_penalty, 1.0),
        "seed": (sampler.seed, None),
        "cache_salt": (request.cache_salt, ""),
        "priority": (request.priority, 0),
        "ignore_eos": (request.ignore_eos, False),
    }
    body.update({name: value for name, (value, neutral) in optional.items() if value != neutral})
    if sampler.stop:
        body["stop"] = list(sampler.stop)
    if sampler.logprobs is not None:
        body["logprobs"] = True
        body["top_logprobs"] = sampler.logprobs
        body["return_tokens_as_token_ids"] = True
    if request.n > 1:
        body["n"] = request.n
    if not request.stream:
        body["stream"] = False
        del body["stream_options"]
    if request.prompt.response_format is not None:
        body["response_format"] = dict(request.prompt.response_format)
    elif sampler.response_format is not None:
        body["response_format"] = {"type": sampler.response_format}
    body.update(request.fields)
    if request.arm is Arm.SPECULATIVE and request.decision == "target_only":
        body["speculation"] = "off"  # the embedded engine's switch; vLLM ignores the field
    body.update(extra or {})
    for name in omit:
        body.pop(name, None)
    if "continuous_usage_stats" in omit and "stream_options" in body:
        body["stream_options"] = {"include_usage": True}
    return body


async def send(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str,
    request: PlannedRequest,
    *,
    timeout_s: float = 600.0,
    api_key: str | None = None,
    extra: Mapping[str, Any] | None = None,
    omit: Collection[str] = (),
) -> Observation:
    """Send one planned request, once, and watch its answer stream in.

    Whatever the server or the network does ends in an Observation; only cancellation is raised
    (the connection is closed then, which tells the server to stop).
    """
    body = request_body(model, request, extra=extra, omit=omit)
    payload = json.dumps(body).encode()
    stream = Stream(started_ns=time.perf_counter_ns())
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                api_url(base_url, "/v1/chat/completions"),
                data=payload,
                headers=_headers(api_key),
                allow_redirects=False,  # it would be a second request, key included
            ) as response,
        ):
            stream.status = response.status
            if response.status != 200:
                text = await error_text(response)
                stream.fail(*refusal(response.status, text, body))
            elif not request.stream:
                stream.take_whole(await response.read(), time.perf_counter_ns())
            elif response.content_type != "text/event-stream":
                text = await error_text(response)
                stream.fail(
                    Outcome.ERROR,
                    "bad_stream",
                    f"expected text/event-stream, got {response.content_type}: {_message(text)}",
                )
            else:
                await _read_stream(response.content, stream)
    except TimeoutError:
        stream.fail(Outcome.ERROR, "timeout", f"no complete answer within {timeout_s:g} s")
    except (aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError) as error:
        stream.fail_in_answer("connection", f"the answer broke off: {_one_line(error)}")
    except aiohttp.ClientConnectorError as error:
        stream.fail(Outcome.ERROR, "unreachable", f"cannot connect: {_one_line(error)}")
    except (aiohttp.ClientError, OSError) as error:
        stream.fail_in_answer("connection", f"connection lost: {_one_line(error)}")
    return stream.observation(request, body, api_key)


async def chat(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    timeout_s: float = 120.0,
    api_key: str | None = None,
) -> str:
    """One whole answer of a chat model at temperature 0, not streamed: for a judge, never measured.

    Raises:
        EngineError: where the server does not answer in time, refuses, or sends something else.
    """
    body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
    url = api_url(base_url, "/v1/chat/completions")
    value = await _post(session, url, body, timeout_s=timeout_s, api_key=api_key)
    try:
        content = value["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"{url}: not a chat reply: {_one_line(error)}") from error
    return content if isinstance(content, str) else ""


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    api_key: str | None,
) -> Any:
    """The JSON of a reply with status 200; EngineError otherwise."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                url,
                data=json.dumps(body).encode(),
                headers=_headers(api_key),
                allow_redirects=False,  # it would be a second request, key included
            ) as reply,
        ):
            raw = await reply.read()
            status = reply.status
    except TimeoutError:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{url}: {_one_line(error)}; is the server still running?") from error
    if status != 200:
        text = _redact(_message(raw.decode("utf-8", "replace")), api_key)
        raise EngineError(f"{url}: HTTP {status}: {text}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise EngineError(f"{url}: not JSON: {_one_line(error)}") from error


async def complete(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 1,
    temperature: float = 0.0,
    prompt_logprobs: int | None = None,
    logprobs: int | None = None,
    timeout_s: float = 600.0,
    api_key: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Completion:
    """Continue a prompt given as token ids through `/v1/completions`, not streamed.

    With `prompt_logprobs` = k the server scores the prompt itself (teacher forcing): at each
    position the top k, and the logprob and rank of the token that is there. With `logprobs` = k
    the answer's own positions come with their top k.

    Raises:
        EngineError: where the server does not answer, refuses, or sends something else.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
        **({} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}),
        **({} if logprobs is None else {"logprobs": logprobs, "return_tokens_as_token_ids": True}),
        **(extra or {}),
    }
    url = api_url(base_url, "/v1/completions")
    value = await _post(session, url, body, timeout_s=timeout_s, api_key=api_key)
    try:
        choice = value["choices"][0]
        ids = choice.get("token_ids")
        scored = choice.get("prompt_logprobs") or []
        if prompt_logprobs is not None and len(scored) != len(token_ids):
            raise EngineError(
                f"{url}: {len(scored)} prompt logprobs for {len(token_ids)} prompt tokens; "
                "does this server support prompt_logprobs?"
            )
        return Completion(
            token_ids=None if ids is None else tuple(ids),
            text=choice.get("text") or "",
            finish_reason=choice.get("finish_reason"),
            prompt_logprobs=tuple(
                None if entry is None else _token_logprob(token, entry)
                for token, entry in zip(token_ids, scored, strict=False)
            ),
            logprobs=tuple(
                {int(name.removeprefix("token_id:")): float(value) for name, value in top.items()}
                for top in (choice.get("logprobs") or {}).get("top_logprobs") or ()
            ),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"{url}: not a completions reply: {_one_line(error)}") from error


def _token_logprob(token_id: int, entry: Mapping[str, Any]) -> TokenLogprob:
    """From vLLM's {"token id": {"logprob", "rank", ...}}, the actual token always among them."""
    actual = entry[str(token_id)]
    top = sorted(((int(t), float(e["logprob"])) for t, e in entry.items()), key=lambda te: -te[1])
    return TokenLogprob(token_id, float(actual["logprob"]), actual.get("rank"), tuple(top))


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        # A compressing proxy would hold chunks back and time itself.
        "Accept-Encoding": "identity",
    }
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


# --- the stream ---------------------------------------------------------------------------------


class SseParser:
    """Server-sent events out of bytes that may be cut anywhere.

    Takes LF, CRLF and CR line ends, comments, multi-line data and fields other than data (which
    are dropped). `feed` returns the data of each event that is complete; bytes are decoded by the
    caller, per event, so a UTF-8 character split over two reads is whole again.
    """

    __slots__ = ("_after_cr", "_pending")

    def __init__(self) -> None:
        self._pending = bytearray()
        self._after_cr = False

    @property
    def pending_bytes(self) -> int:
        """Size of the event that has begun and not yet ended."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that end within `data`, in order."""
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
        self._after_cr = False
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        pending = self._pending
        if pending:
            scan_from = len(pending) - 1
            pending += data
            end = pending.rfind(b"\n\n", scan_from)
            if end < 0:
                return []
            whole = bytes(pending[:end])
            del pending[: end + 2]
        elif data.endswith(b"\n\n"):  # nearly every read of a healthy stream
            whole = data[:-2]
        else:
            end = data.rfind(b"\n\n")
            if end < 0:
                pending += data
                return []
            whole = data[:end]
            pending += data[end + 2 :]
        payloads: list[bytes] = []
        for event in whole.split(b"\n\n"):
            if b"\n" not in event and event.startswith(b"data: "):
                payloads.append(event[6:])
            elif (payload := event_data(event)) is not None:
                payloads.append(payload)
        return payloads


def event_data(event: bytes) -> bytes | None:
    """The data of one event without its blank line; None where it has none (a comment)."""
    lines = [
        line[5:].removeprefix(b" ") if line.startswith(b"data:") else b""
        for line in event.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(lines) if lines else None


async def _read_stream(content: aiohttp.StreamReader, stream: Stream) -> None:
    parser = SseParser()
    feed, take, now = parser.feed, stream.take, time.perf_counter_ns
    while data := await content.readany():
        at_ns = now()
        for payload in feed(data):
            take(payload, at_ns)
        if parser.pending_bytes > MAX_EVENT_BYTES:
            stream.fail(
                Outcome.ERROR, "bad_stream", f"an event longer than {MAX_EVENT_BYTES >> 20} MiB"
            )
            return


@dataclass(slots=True)
class _Choice:
    """Everything seen of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    """Pieces of names and of arguments, by index of the call."""
    logprobs: list[Any] | None = None
    """As sent."""
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class Stream:
    """Everything seen of one answer so far: chunks go in as they come, an observation comes out."""

    started_ns: int
    status: int | None = None
    failure: tuple[Outcome, str, str] | None = None
    error: str = ""
    """An error event, as JSON."""
    is_done: bool = False
    is_whole: bool = False
    chunks: int = 0
    first_ids_ns: int | None = None
    last_ids_ns: int | None = None
    first_output_ns: int | None = None
    last_output_ns: int | None = None
    first_content_ns: int | None = None
    last_chunk_ns: int | None = None
    max_gap_ns: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    first: _Choice = field(default_factory=_Choice)
    others: dict[int, _Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    """vLLM's per-request metrics, or another server's in its words."""
    warnings: list[str] = field(default_factory=list)

    def take(self, payload: bytes, at_ns: int) -> dict[str, Any] | None:
        """One event's data, read; None for an error, the end, or what is no chunk.

        The order of the tests follows how often each is true.
        """
        if payload == b"[DONE]":
            self.is_done = True
            return None
        try:
            chunk: dict[str, Any] = json.loads(payload.decode())
            if error := chunk.get("error"):
                self.fail(Outcome.ERROR, "stream_error", _message_of(error))
                self.error = payload.decode()
                return None
            if usage := chunk.get("usage"):
                self.usage = dict(usage)
            if metrics := chunk.get("metrics"):
                self.metrics = dict(metrics)
            elif not dialects.KEYS.isdisjoint(chunk):
                self._take_dialect(chunk)
            for choice in chunk.get("choices") or ():
                self._take_choice(chunk, choice, delta_of(choice), at_ns)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as wrong:
            self.fail(Outcome.ERROR, "bad_stream", f"not a chat chunk: {_one_line(wrong)}")
            return None
        return chunk

    def take_whole(self, payload: bytes, at_ns: int) -> None:
        """The body of an answer that was not streamed: one time, that of its end."""
        self.is_whole = self.is_done = True
        try:
            body = json.loads(payload.decode())
            self.usage = dict(body.get("usage") or {}) or None
            self.metrics = dict(body.get("metrics") or {}) or None
            self._take_dialect(body)
            for choice in body["choices"]:
                message = _text_of(choice) or choice["message"]
                self._take_choice(body, choice, message, at_ns)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as wrong:
            self.fail(Outcome.ERROR, "bad_stream", f"not a chat answer: {_one_line(wrong)}")

    def _take_dialect(self, reply: Mapping[str, Any]) -> None:
        """What servers other than vLLM say of speculation; the last word counts."""
        if self.metrics is None or "dialect" in self.metrics:
            counts = dialects.of_reply(reply)
            if counts is not None:
                self.metrics = {"speculative_decoding": counts, "dialect": True}

    def _take_choice(
        self, chunk: dict[str, Any], choice: dict[str, Any], delta: dict[str, Any], at_ns: int
    ) -> None:
        index = choice.get("index")
        into = self.others.setdefault(_whole(index), _Choice()) if index else self.first
        ids = choice.get("token_ids")
        content = delta.get("content")
        has_output = False
        if ids:
            if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < _MAX_COUNT:
                raise TypeError("token_ids are not token ids")
            into.token_ids += ids
            self.last_ids_ns = at_ns
            if self.first_ids_ns is None:
                self.first_ids_ns = at_ns
            has_output = True
        if content:
            if content.__class__ is not str:
                raise TypeError("content is not text")
            into.text.append(content)
            self.last_output_ns = at_ns
            if self.first_content_ns is None:
                self.first_content_ns = at_ns
                if self.first_output_ns is None:
                    self.first_output_ns = at_ns
            has_output = True
        elif thought := delta.get("reasoning") or delta.get("reasoning_content"):
            into.reasoning.append(str(thought))
            self.last_output_ns = at_ns
            if self.first_output_ns is None:
                self.first_output_ns = at_ns
            has_output = True
        if calls := delta.get("tool_calls"):
            for i, call in enumerate(calls):
                function = call.get("function") or {}
                # Only pieces carry an index: in a whole answer the place is the index.
                name, arguments = into.calls.setdefault(call.get("index", i), ([], []))
                name.append(str(function.get("name") or ""))
                arguments.append(str(function.get("arguments") or ""))
            self.last_output_ns = at_ns
            if self.first_output_ns is None:
                self.first_output_ns = at_ns
            has_output = True
        if has_output:
            self.chunks += 1
            if self.last_chunk_ns is not None and at_ns - self.last_chunk_ns > self.max_gap_ns:
                self.max_gap_ns = at_ns - self.last_chunk_ns
            self.last_chunk_ns = at_ns
        if logprobs := choice.get("logprobs"):
            into.logprobs = (into.logprobs or []) + (logprobs.get("content") or [])
        if reason := choice.get("finish_reason"):
            into.finish_reason = _clean(str(reason))
            stop = choice.get("stop_reason")
            into.stop_reason = None if stop is None else _clean(str(stop))
        if self.prompt_token_ids is None:
            self.prompt_token_ids = _ids(
                chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
            )

    @property
    def n_ended(self) -> int:
        """Choices that have come to an end."""
        return sum(one.finish_reason is not None for one in (self.first, *self.others.values()))

    def fail(self, outcome: Outcome, error_class: str, message: str) -> None:
        """Note why the attempt failed; the first cause stands."""
        if self.failure is None:
            self.failure = (outcome, error_class, message)

    def fail_in_answer(self, error_class: str, message: str) -> None:
        """A loss that cuts an answer which had begun is incomplete; before that, an error."""
        outcome = Outcome.ERROR if self.status is None else Outcome.INCOMPLETE
        self.fail(outcome, error_class, message)

    def observation(
        self, request: PlannedRequest, body: Mapping[str, Any], api_key: str | None
    ) -> Observation:
        """Close the books: outcome, counts, and what does not add up."""
        done_ns = time.perf_counter_ns()
        first, others = self.first, [self.others[index] for index in sorted(self.others)]
        reasons = [choice.finish_reason for choice in (first, *others)]
        if self.failure is None:
            if None in reasons:
                self.fail(Outcome.INCOMPLETE, "no_finish_reason", "the stream ended in mid-answer")
            elif not self.is_done:
                self.fail(Outcome.INCOMPLETE, "no_done", "the stream ended without [DONE]")
            elif "abort" in reasons:
                self.fail(Outcome.CANCELLED, "aborted", "the server aborted the request")
            elif "error" in reasons:
                self.fail(Outcome.ERROR, "server_error", "finish_reason error")
        if (refused := self._refused(body)) is not None:
            self.failure = refused
        outcome, error_class, message = self.failure or (Outcome.OK, None, None)
        usage = self.usage or {}
        usage_tokens = _count(usage.get("completion_tokens"))
        completion_tokens, tokens_source = usage_tokens, "usage" if self.usage else "none"
        if first.token_ids:
            completion_tokens = sum(len(choice.token_ids) for choice in (first, *others))
            tokens_source = "ids"
            if usage_tokens is not None and usage_tokens != completion_tokens:
                self.warnings.append(
                    f"{completion_tokens} token ids received, usage says {usage_tokens}"
                )
        prompt_tokens = _count(usage.get("prompt_tokens"))
        if prompt_tokens is None and self.prompt_token_ids is not None:
            prompt_tokens = len(self.prompt_token_ids)
        reasoning_tokens = _detail(usage, "completion_tokens_details", "reasoning_tokens")
        if reasoning_tokens is not None and reasoning_tokens > (usage_tokens or 0):
            self.warnings.append(
                f"usage does not add up: {reasoning_tokens} reasoning tokens of "
                f"{usage_tokens} completion tokens"
            )
        if completion_tokens is not None and completion_tokens > request.max_tokens * request.n:
            self.warnings.append(
                f"{completion_tokens} completion tokens, {request.max_tokens} were allowed"
            )
        logprobs: tuple[OutputLogprob, ...] | None = None
        if first.logprobs is not None:
            try:
                logprobs = tuple(map(_output_logprob, first.logprobs))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.warnings.append(f"unreadable logprobs: {_one_line(error)}")
        has_ids = self.first_ids_ns is not None
        counts, note = self._counts(request, body, completion_tokens)
        return Observation(
            outcome=outcome,
            sent_ns=self.started_ns,
            done_ns=done_ns,
            http_status=self.status,
            error_class=error_class,
            error_message=None if message is None else _redact(message, api_key),
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            first_token_ns=None
            if self.is_whole
            else self.first_ids_ns
            if has_ids
            else self.first_output_ns,
            first_content_ns=None if self.is_whole else self.first_content_ns,
            last_token_ns=self.last_ids_ns if has_ids else self.last_output_ns,
            max_chunk_gap_ns=self.max_gap_ns if self.chunks > 1 and not self.is_whole else None,
            chunks=self.chunks if self.status == 200 and not self.is_whole else None,
            prompt_tokens=prompt_tokens,
            cached_tokens=_detail(usage, "prompt_tokens_details", "cached_tokens"),
            completion_tokens=completion_tokens,
            reasoning_tokens=reasoning_tokens,
            tokens_source=tokens_source,
            token_ids=tuple(first.token_ids) if first.token_ids else None,
            prompt_token_ids=self.prompt_token_ids,
            text=_clean("".join(first.text)),
            reasoning=_clean("".join(first.reasoning)),
            tool_calls="\n".join("".join(call) for call in _calls(first)),
            calls=_calls(first),
            logprobs=logprobs,
            others=tuple(
                Choice(
                    _clean("".join(choice.text)),
                    tuple(choice.token_ids) if choice.token_ids else None,
                    choice.finish_reason,
                )
                for choice in others
            ),
            counts=counts,
            counts_note=note,
            server_queue_ms=_number((self.metrics or {}).get("queue_time_ms")),
            warnings=tuple(self.warnings),
        )

    def _refused(self, body: Mapping[str, Any]) -> tuple[Outcome, str, str] | None:
        """A refusal that came as an event: vLLM checks sampling parameters when a stream has begun.

        None for errors of another kind, and where anything was generated.
        """
        if not self.error or self.last_ids_ns is not None or self.last_output_ns is not None:
            return None
        error = json.loads(self.error)["error"]
        code = error.get("code") if isinstance(error, dict) else None
        return refusal(code, self.error, body) if code in (400, 422) else None

    def _counts(
        self, request: PlannedRequest, body: Mapping[str, Any], completion_tokens: int | None
    ) -> tuple[SpecCounts | None, str]:
        raw = (self.metrics or {}).get("speculative_decoding")
        if raw is None:
            return None, self._why_no_counts(request)
        try:
            counts, warnings = parse_counts(raw, completion_tokens)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.warnings.append(f"unreadable speculative_decoding metrics: {_one_line(error)}")
            return None, "unreadable metrics"
        self.warnings += warnings
        asked_off = (
            request.arm is Arm.TARGET_ONLY
            or body.get("speculative") is False
            or body.get("speculation") == "off"
        )
        if asked_off and counts.proposed_tokens > 0:
            self.warnings.append(
                f"speculation was asked to be off, but the server drafted "
                f"{counts.proposed_tokens} tokens in {counts.verify_steps} steps: this receipt "
                "belongs to the speculative arm; control it by server, not by request field"
            )
        return counts, ""

    def _why_no_counts(self, request: PlannedRequest) -> str:
        """Missing is not zero; the reason tells the two apart (VLLM.md 2.4)."""
        if self.failure is not None:
            return f"no metrics: {self.failure[1]}"
        if request.arm is Arm.TARGET_ONLY:
            return "target-only"
        if self.usage is None:
            return "no usage chunk, which carries the metrics"
        if request.n > 1:
            return "several choices, for which the engine sends no metrics"
        # An integer stop_reason is a stop token, which the engine itself sees.
        stop = self.first.stop_reason
        if stop is not None and not stop.lstrip("-").isdecimal():
            return "ended on a stop string, for which the engine sends no metrics"
        return "the server sent no per-request metrics"


def delta_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk adds to a choice, in the words of a chat."""
    return choice.get("delta") or _text_of(choice)


def _text_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What /v1/completions says of a choice, in the words of a chat."""
    return {"content": choice["text"]} if "text" in choice else {}


def _calls(choice: _Choice) -> tuple[tuple[str, str], ...]:
    """(name, arguments) of each call, in order."""
    joined = (choice.calls[index] for index in sorted(choice.calls))
    return tuple((_clean("".join(name)), _clean("".join(text))) for name, text in joined)


def _output_logprob(entry: Mapping[str, Any]) -> OutputLogprob:
    """From OpenAI's {"token", "logprob", "top_logprobs"}, tokens named "token_id:N" as in vLLM."""

    def token_id(name: str) -> int | None:
        return int(name.removeprefix("token_id:")) if name.startswith("token_id:") else None

    return OutputLogprob(
        token_id(entry["token"]),
        float(entry["logprob"]),
        tuple((token_id(e["token"]), float(e["logprob"])) for e in entry["top_logprobs"] or ()),
    )


def parse_counts(
    raw: Mapping[str, Any], completion_tokens: int | None
) -> tuple[SpecCounts, list[str]]:
    """Counts of vLLM's `SpeculativeDecodingMetrics`, and which of its invariants are broken.

    Checked (VLLM.md 2.4): the histogram has k+1 entries, sums to the steps, and weighs to the
    accepted tokens; drafted <= steps * k; per-step lists sum to the totals; more than one block (k)
    above what was delivered. Accepted + steps may exceed the tokens delivered by up
    to one block: the last one is cut at a stop or at max_tokens, so equality is not asserted.

    Raises:
        ValueError, TypeError, KeyError: for counts that are missing, negative or not whole, and for
            more accepted than drafted: an acceptance over 1 is none.
    """
    # llama.cpp does not tell its verify steps.
    steps = None if raw["num_spec_steps"] is None else _whole(raw["num_spec_steps"])
    accepted = _whole(raw["num_accepted_draft_tokens"])
    proposed = _whole(raw["num_draft_tokens"])
    k = None if raw.get("num_spec_tokens") is None else _whole(raw["num_spec_tokens"])
    histogram = raw.get("acceptance_histogram")
    bins = None if histogram is None else tuple(_whole(count) for count in histogram)
    broken: list[str] = []
    if bins is not None:
        if k is not None and len(bins) != k + 1:
            broken.append(f"{len(bins)} histogram entries for k={k}")
        if steps is not None and sum(bins) != steps:
            broken.append(f"histogram sums to {sum(bins)}, steps are {steps}")
        weighed = sum(j * count for j, count in enumerate(bins))
        if weighed != accepted:
            broken.append(f"histogram weighs {weighed}, accepted are {accepted}")
    if accepted > proposed:
        raise ValueError(f"accepted {accepted} of {proposed} drafted")
    if k is not None and steps is not None and proposed > steps * k:
        broken.append(f"drafted {proposed} in {steps} steps of at most {k}")
    per_step: dict[str, tuple[int, ...]] = {}
    for name, total in (("per_step_accepted", accepted), ("per_step_drafted", proposed)):
        if raw.get(name) is not None:
            per_step[name] = tuple(_whole(count) for count in raw[name])
            if len(per_step[name]) != steps or sum(per_step[name]) != total:
                broken.append(
                    f"{name} has {len(per_step[name])} steps and sums to {sum(per_step[name])}"
                )
    if completion_tokens is not None and k is not None and steps is not None:
        over = accepted + steps - completion_tokens
        if over > k:
            broken.append(f"accepted + steps exceeds the {completion_tokens} delivered by {over}")
    warnings = [f"speculation metrics do not add up: {text}" for text in broken]
    accepted_per_step, drafted_per_step = map(
        per_step.get, ("per_step_accepted", "per_step_drafted")
    )
    counts = SpecCounts(steps, proposed, accepted, bins, accepted_per_step, drafted_per_step)
    return counts, warnings


# --- receipts -----------------------------------------------------------------------------------


def make_receipt(
    observation: Observation,
    request: PlannedRequest,
    run_id: str,
    arm_description: ArmDescription,
    policy_version: str,
    *,
    scheduled_ns: int | None = None,
    attempt: int = 0,
) -> Receipt:
    """Join what was planned with what was observed; the same function for both arms.

    `scheduled_ns` is the intended send time on the same clock (by default the real one).
    """
    sampler, prompt, counts = request.sampler, request.prompt, observation.counts
    spec = arm_description.speculative_config or {}
    is_drafting = counts is not None and counts.proposed_tokens > 0
    return Receipt(
        receipt_id=receipt_key(request, run_id, attempt),
        run_id=run_id,
        stage=request.stage,
        phase=request.phase,
        arm=request.arm,
        route=request.route,
        prompt_id=prompt.prompt_id,
        pair_id=request.pair_id,
        repeat=request.repeat,
        attempt=attempt,
        block=request.block,
        warm_up=request.warm_up,
        mirror=request.mirror,
        target_model=arm_description.model,
        proposer=_text(spec.get("model") or spec.get("method")),
        algorithm=_text(spec.get("rejection_sample_method")),
        draft_sampling=_text(spec.get("draft_sample_method")),
        k=_count(request.fields.get("k", spec.get("num_speculative_tokens"))),
        engine=arm_description.engine,
        engine_config_id=arm_description.engine_config_id,
        policy_version=policy_version,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        seed=sampler.seed,
        frequency_penalty=sampler.frequency_penalty,
        presence_penalty=sampler.presence_penalty,
        repetition_penalty=sampler.repetition_penalty,
        stop_count=len(sampler.stop),
        response_format=sampler.response_format,
        logprobs=sampler.logprobs,
        task=prompt.task,
        language=prompt.language,
        priority=prompt.priority,
        prompt_band=prompt_band(observation.prompt_tokens),
        output_band=prompt.output_band,
        temperature_band=temperature_band(sampler.temperature),
        features=",".join(sampling_features(request)),
        concurrency=request.concurrency,
        prompt_tokens=observation.prompt_tokens,
        cached_tokens=observation.cached_tokens,
        completion_tokens=observation.completion_tokens,
        reasoning_tokens=observation.reasoning_tokens,
        proposed_tokens=None if counts is None else counts.proposed_tokens,
        accepted_tokens=None if counts is None else counts.accepted_tokens,
        discarded_tokens=None
        if counts is None
        else counts.proposed_tokens - counts.accepted_tokens,
        target_passes=target_passes(
            observation.completion_tokens,
            counts,
            request.arm if not is_drafting else Arm.SPECULATIVE,
        ),
        verify_steps=None if counts is None else counts.verify_steps,
        acceptance_histogram=None if counts is None else counts.histogram,
        counts_source="none" if counts is None else "engine",
        counts_note=observation.counts_note,
        scheduled_ns=observation.sent_ns if scheduled_ns is None else scheduled_ns,
        sent_ns=observation.sent_ns,
        first_token_ns=observation.first_token_ns,
        first_content_ns=observation.first_content_ns,
        last_token_ns=observation.last_token_ns,
        done_ns=observation.done_ns,
        server_queue_ms=observation.server_queue_ms,
        max_chunk_gap_ns=observation.max_chunk_gap_ns,
        chunks=observation.chunks,
        outcome=observation.outcome,
        http_status=observation.http_status,
        error_class=observation.error_class,
        error_message=observation.error_message,
        finish_reason=observation.finish_reason,
        stop_reason=observation.stop_reason,
        decision=request.decision,
        decision_reason=request.decision_reason,
        output_digest=output_digest(observation),
        warnings=observation.warnings,
    )


def make_answer(observation: Observation, receipt_id: str) -> Answer:
    """The full answer for the texts table; call it only where the plan says `keep_text`."""
    counts = observation.counts
    return Answer(
        receipt_id,
        observation.text,
        observation.token_ids,
        None if counts is None else counts.accepted_per_step,
        None if counts is None else counts.drafted_per_step,
        _details(observation),
    )


def _details(observation: Observation) -> dict[str, Any] | None:
    """`Answer.details`."""
    found: dict[str, Any] = {}
    if observation.logprobs is not None:
        # A masked token may come as -inf, which JSON does not have.
        found["logprobs"] = [
            [p.token_id, _finite(p.logprob), [[t, _finite(value)] for t, value in p.top]]
            for p in observation.logprobs
        ]
    if observation.others:
        found["choices"] = [asdict(choice) for choice in observation.others]
    if observation.calls:
        found["tool_calls"] = [list(call) for call in observation.calls]
    return found or None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def output_digest(observation: Observation) -> str | None:
    """Digest of the token ids, else of reasoning, text and tool calls; None without output."""
    if observation.token_ids:
        ids = [list(observation.token_ids), *(list(c.token_ids or ()) for c in observation.others)]
        return digest("output", ids if observation.others else ids[0])
    parts = [observation.reasoning, observation.text, observation.tool_calls]
    return digest("text", parts) if any(parts) else None


def target_passes(completion_tokens: int | None, counts: SpecCounts | None, arm: Arm) -> int | None:
    """Decode passes of the target for one request, prefill excluded; None where unknown.

    The prefill yields the first token. Every later pass is either a verify step, which yields its
    accepted tokens and one more, or a plain step, which yields one. With n tokens delivered, a
    accepted and s verify steps:

        passes = s + max(0, n - 1 - a - s)

    and n - 1 on target-only. The last block may be cut at a stop or at max_tokens, which hides
    that many plain steps: the result is low by at most the tokens cut, which is at most k. Where s
    is not known it is n - 1 - a, which is low by the same.
    Where a prompt was wholly cached, vLLM counts the prefill itself as a verify step that accepts
    nothing; the result is then high by one.

    >>> target_passes(64, SpecCounts(12, 84, 58, None), Arm.SPECULATIVE)
    12
    >>> target_passes(64, None, Arm.TARGET_ONLY)
    63
    """
    if completion_tokens is None or (counts is None and arm is Arm.SPECULATIVE):
        return None
    after_prefill = max(0, completion_tokens - 1)
    if counts is None:
        return after_prefill
    accepted = counts.accepted_tokens
    steps = 0 if counts.verify_steps is None else counts.verify_steps
    return steps + max(0, after_prefill - accepted - steps)


def sampling_features(request: PlannedRequest) -> list[str]:
    """Sorted names of the sampling features in use: the corpus's own and those of the sampler."""
    sampler = request.sampler
    in_use = {
        "top_p": sampler.top_p < 1.0,
        "top_k": sampler.top_k > 0,
        "min_p": sampler.min_p > 0.0,
        "penalties": (
            sampler.frequency_penalty,
            sampler.presence_penalty,
            sampler.repetition_penalty,
        )
        != (0.0, 0.0, 1.0),
        "stop": bool(sampler.stop),
        "logprobs": sampler.logprobs is not None,
        f"{sampler.response_format}": sampler.response_format is not None,
        "n": request.n > 1,
    }
    names = {name for name, is_used in in_use.items() if is_used}
    # tool_choice goes with tools, and the proposal length is the policy's, not the caller's.
    names |= request.fields.keys() - {"tool_choice", "k"}
    return sorted(names.union(request.prompt.features))


# --- errors -------------------------------------------------------------------------------------


async def error_text(response: aiohttp.ClientResponse) -> str:
    """At most 64 KiB of a body that explains a failure; where it is cut, the status must do."""
    try:
        raw = await response.content.read(2**16)
    except (aiohttp.ClientError, OSError):
        return ""
    return raw.decode("utf-8", "replace")


def refusal(status: int, text: str, body: Mapping[str, Any]) -> tuple[Outcome, str, str]:
    """Outcome, class and message of a reply other than 200."""
    message = _message(text) or f"HTTP {status}"
    if 300 <= status < 400:
        return Outcome.REJECTED, "redirected", f"HTTP {status}: give the server's own URL"
    if status in (400, 422):
        blamed = _blame(message, text, body) if _UNSUPPORTED.search(message) else None
        if blamed is not None:
            return Outcome.REJECTED, "unsupported_parameter", blamed
        error_class = "context_length" if _TOO_LONG.search(message) else "bad_request"
        return Outcome.REJECTED, error_class, message
    if status in (401, 403):
        return Outcome.REJECTED, "unauthorised", message
    if status == 404:
        return Outcome.REJECTED, "not_found", message
    if status in (429, 503):
        return Outcome.REJECTED, "overloaded", message
    if status >= 500:
        return Outcome.ERROR, "server_error", message
    return Outcome.REJECTED, "bad_request", message


def _blame(message: str, text: str, body: Mapping[str, Any]) -> str | None:
    """The message with the parameter named: those the refusal names and this request carries,
    first. None where it names no parameter.
    """
    named = [name for name in _PARAMETERS if re.search(rf"\b{name}\b", message)]
    try:
        param = json.loads(text)["error"]["param"]
    except (ValueError, KeyError, TypeError):
        param = None
    if isinstance(param, str) and param and param not in named:
        named.insert(0, _clean(param))
    options = body.get("stream_options") or {}
    sent = [name for name in named if name in body or name in options]
    if sent:
        return f"parameter {', '.join(sent)}: {message}"
    if named:
        return (
            f"parameter {', '.join(named)} (not in this request: the model's generation_config "
            f"may set it): {message}"
        )
    return None


def _message(text: str) -> str:
    """The readable part of an error body: OpenAI's and FastAPI's forms, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return _clip(text)
    if isinstance(value, dict):
        for key in ("error", "detail", "message"):
            if value.get(key):
                return _message_of(value[key])
    return _clip(text)


def _message_of(error: Any) -> str:
    if isinstance(error, dict) and error.get("message"):
        return _clip(str(error["message"]))
    return _clip(error if isinstance(error, str) else json.dumps(error))


def _clip(text: str) -> str:
    line = " ".join(_clean(text).split())
    return line if len(line) <= _MESSAGE_CHARS else line[:_MESSAGE_CHARS] + "…"


def _one_line(error: BaseException) -> str:
    return _clip(str(error) or type(error).__name__)


def _clean(text: str) -> str:
    r"""Text that has a UTF-8 form: JSON may hold half a character (`\ud83d`)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _redact(message: str, api_key: str | None) -> str:
    """No key reaches a receipt, even where a server quotes it."""
    return message.replace(api_key, "[api key]") if api_key else message


# --- values at the border -----------------------------------------------------------------------


def _whole(value: Any) -> int:
    count = _count(value)
    if count is None:
        raise ValueError(f"{value!r} is not a count")
    return count


def _count(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value < _MAX_COUNT else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MAX_COUNT else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _detail(usage: Mapping[str, Any], group: str, name: str) -> int | None:
    details = usage.get(group)
    return _count(details.get(name)) if isinstance(details, Mapping) else None
