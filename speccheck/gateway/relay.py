"""One request through to an arm and back, handed over where that arm fails.

What the client did not ask for (token ids, usage) is asked for all the same, since receipts and
hand-over need it, and is cut out of the bytes on the way back; all other bytes pass as they are,
event by event and in order. An event is forwarded only when it is whole and has been read: an error
inside a stream must not reach the client where the answer can go on. The upstream is read only when
the client has taken what was read before.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from speccheck.client import (
    MAX_EVENT_BYTES,
    Stream,
    api_url,
    delta_of,
    event_data,
    make_answer,
    make_receipt,
    no_connection,
    refusal,
)
from speccheck.gateway.asked import Asked
from speccheck.gateway.choose import FELL_BACK, Decided
from speccheck.gateway.gate import Gate, Header
from speccheck.gateway.joint import (
    CannotJoinError,
    Committed,
    Continued,
    Decode,
    Piece,
    chunk,
    continuation,
    event,
    usage_chunk,
    usage_of,
)
from speccheck.records import (
    GATEWAY,
    Answer,
    Arm,
    Handover,
    Outcome,
    PlannedRequest,
    Prompt,
    Receipt,
)

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
OnEvent = Callable[[bytes, dict[str, Any] | None], Awaitable[None]]
"""One whole event as it came, and its JSON; None for comments and [DONE]."""

CLIENT_GONE = "the client went away"
"""Why a request is cancelled, where it is not the gateway that ends."""
DONE = b"data: [DONE]\n\n"
_MAX_ANSWER = 64 << 20  # bytes of an answer that is not streamed
_MAX_REFUSAL = 1 << 20
_LAST_WORDS_S = 1.0
_BLANK = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
_USAGE = re.compile(rb',\s*"usage"\s*:\s*null')
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
    }
)
_NO_END = ("abort", "error")
"""Finish reasons of answers that did not come to their end."""
_CLIENTS_FAULT = frozenset({"bad_request", "context_length", "unauthorised", "not_found"})
"""Error classes of refusals that the other arm would repeat."""


class ArmFailedError(Exception):
    """An arm did not answer, or not to the end. `raw` and `headers` are of its refusal."""

    def __init__(
        self,
        outcome: Outcome,
        error_class: str,
        message: str,
        *,
        status: int | None = None,
        raw: bytes = b"",
        headers: Sequence[Header] = (),
    ) -> None:
        super().__init__(message)
        self.outcome, self.error_class, self.message = outcome, error_class, message
        self.status, self.raw, self.headers = status, raw, headers

    @property
    def line(self) -> str:
        """For a receipt."""
        return f"{self.error_class}: {self.message}"


class Events:
    """Whole events, byte for byte, out of reads that cut them anywhere."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end within `data`, each with its blank line."""
        pending = self._pending
        before = max(0, len(pending) - 3)  # a blank line may have begun in the read before
        pending += data
        events, at = [], 0
        for found in _BLANK.finditer(pending, before):
            events.append(bytes(pending[at : found.end()]))
            at = found.end()
        del pending[:at]
        return events

    @property
    def pending_bytes(self) -> int:
        """Size of the event that has begun and not ended."""
        return len(self._pending)


def payload_of(raw: bytes) -> bytes | None:
    """The data of one whole event."""
    if raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.count(b"\n") == 2:
        return raw[6:-2]
    return event_data(raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").rstrip(b"\n"))


def stripped(asked: Asked, raw: bytes, value: Mapping[str, Any]) -> bytes:
    """An event without what the client did not ask for; empty where nothing is left of it.

    The bytes are cut and not written anew: a quotation mark that follows a comma directly can only
    open a key or a value of the JSON itself, since inside a text it would be escaped.
    """
    if not asked.wants_usage:
        if value.get("usage") and not value.get("choices"):
            return b""
        raw = _USAGE.sub(b"", raw)
    if not asked.wants_ids:
        raw = _IDS.sub(b"", raw)
    return raw


def upstream_headers(headers: Sequence[Header], api_key: str | None) -> list[tuple[str, str]]:
    """A client's headers as they go on: without those of the connection, and our own."""
    named = [(name.decode("latin-1"), _text(value)) for name, value in headers]
    dropped = _hops(value for name, value in named if name == "connection")
    kept = [
        (name, value)
        for name, value in named
        if name not in dropped and not name.startswith("x-speccheck-")
    ]
    if api_key and not any(name == "authorization" for name, _ in kept):
        kept.append(("authorization", f"Bearer {api_key}"))
    return kept


def _text(value: bytes) -> str:
    """What aiohttp, which writes UTF-8, makes the same bytes of wherever they are UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _hops(connection: Iterable[str]) -> frozenset[str]:
    """Names of headers that concern one connection, those included that it names itself."""
    return _HOP_BY_HOP.union(
        one.strip().lower() for value in connection for one in value.split(",")
    )


def client_headers(
    response: aiohttp.ClientResponse, url: str, *, keep_encoding: bool
) -> list[Header]:
    """A server's headers as they go back; `url` is the arm's, which clients do not learn.

    A redirect to the server itself becomes one to the same path here: to follow its own words, a
    client would go round the gateway.
    """
    dropped = _hops(response.headers.getall("connection", ()))
    if not keep_encoding:
        dropped |= {"content-encoding"}
    server = api_url(url, "").encode()
    kept = []
    for raw_name, value in response.raw_headers:
        name = raw_name.lower()
        text = name.decode("latin-1")
        if text in dropped or text.startswith("x-speccheck-"):
            continue
        path = value.removeprefix(server) or b"/"
        is_own = name == b"location" and path[:1] in (b"/", b"?")
        kept.append((name, path if is_own else value))
    return kept


def error_body(status: int, message: str, kind: str) -> bytes:
    """An error in OpenAI's form."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


# --- one answer of one arm ----------------------------------------------------------------------


async def watch_stream(
    gate: Gate,
    arm: Arm,
    path: str,
    body: Mapping[str, Any],
    headers: Sequence[tuple[str, str]],
    stream: Stream,
    on_head: Callable[[list[Header]], None],
    on_event: OnEvent,
    flush: Callable[[], Awaitable[None]],
) -> None:
    """Send a request that is answered in events, and hand each on as soon as it is whole.

    `stream` takes them all; `on_head` gets the response headers before the first; `flush` is called
    after all that one read brought, and takes as long as the client does. Returns when the answer
    has ended as it should.

    Raises:
        ArmFailedError: whatever else the arm did.
    """
    limits, loop = gate.config.timeouts, asyncio.get_running_loop()
    events, is_begun = Events(), False
    try:
        async with asyncio.timeout(limits.connect_s + limits.first_byte_s) as timer:
            posted = await _post(gate, arm, path, json.dumps(body).encode(), headers)
            async with posted as response:
                stream.status = response.status
                await _check_stream(response, gate.arms[arm].url, body)
                on_head(client_headers(response, gate.arms[arm].url, keep_encoding=False))
                deadline = loop.time() + limits.first_byte_s
                timer.reschedule(deadline)
                while data := await response.content.readany():
                    timer.reschedule(None)  # a slow client is no stall of the arm
                    came_s, is_news = loop.time(), False
                    now = time.perf_counter_ns()
                    for raw in events.feed(data):
                        payload = payload_of(raw)
                        value = None if payload is None else stream.take(payload, now)
                        if stream.failure is not None:
                            raise ArmFailedError(*stream.failure)
                        if (reason := stream.first.finish_reason) in _NO_END:
                            raise ArmFailedError(
                                Outcome.ERROR, "server_error", f"finish_reason {reason}"
                            )
                        await on_event(raw, value)
                        is_news = is_news or value is not None  # keep-alives are none
                        if stream.is_done:
                            break  # what follows is no part of the answer
                    await flush()
                    is_begun = is_begun or stream.first_output_ns is not None
                    is_begun = is_begun or stream.first_ids_ns is not None
                    if events.pending_bytes > MAX_EVENT_BYTES:
                        raise ArmFailedError(
                            Outcome.ERROR,
                            "bad_stream",
                            f"an event longer than {MAX_EVENT_BYTES >> 20} MiB",
                        )
                    if stream.is_done:
                        break
                    if is_begun and is_news:
                        deadline = loop.time() + limits.idle_s
                    else:
                        deadline += loop.time() - came_s
                    timer.reschedule(deadline)
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, ValueError) as error:
        raise _lost(stream, error) from error
    except TimeoutError:  # ours: aiohttp's own, of connecting, is one of the above
        raise _late(stream, limits.idle_s if is_begun else limits.first_byte_s) from None
    except OSError as error:
        raise _lost(stream, error) from error
    if stream.first.finish_reason is None or any(
        one.finish_reason is None for one in stream.others.values()
    ):
        raise ArmFailedError(
            Outcome.INCOMPLETE, "no_finish_reason", "the stream ended in mid-answer"
        )
    if not stream.is_done:
        raise ArmFailedError(Outcome.INCOMPLETE, "no_done", "the stream ended without [DONE]")


async def watch_whole(
    gate: Gate,
    arm: Arm,
    path: str,
    body: Mapping[str, Any],
    headers: Sequence[tuple[str, str]],
    stream: Stream,
) -> tuple[bytes, list[Header]]:
    """Send a request that is answered in one piece; the answer's bytes and headers.

    Raises:
        ArmFailedError: whatever else the arm did.
    """
    limits = gate.config.timeouts
    try:
        async with (
            asyncio.timeout(limits.connect_s + limits.total_s),
            await _post(gate, arm, path, json.dumps(body).encode(), headers) as response,
        ):
            stream.status = response.status
            if response.status != 200:
                await _refused(response, gate.arms[arm].url, body)
            raw = await _read(response, _MAX_ANSWER)
            back = client_headers(response, gate.arms[arm].url, keep_encoding=False)
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, ValueError) as error:
        raise _lost(stream, error) from error
    except TimeoutError:
        raise _late(stream, limits.total_s) from None
    except OSError as error:
        raise _lost(stream, error) from error
    stream.take_whole(raw, time.perf_counter_ns())
    if stream.failure is not None:
        raise ArmFailedError(*stream.failure)
    if stream.first.finish_reason in (None, *_NO_END):
        raise ArmFailedError(
            Outcome.ERROR, "server_error", f"finish_reason {stream.first.finish_reason}"
        )
    return raw, back


async def _post(
    gate: Gate, arm: Arm, path: str, payload: bytes, headers: Sequence[tuple[str, str]]
) -> aiohttp.ClientResponse:
    """The response as soon as its head is there. Sent again, once, where a kept connection broke
    before it: the server had closed it as we wrote.
    """
    asked = [(name, value) for name, value in headers if name != "accept-encoding"]
    asked.append(("accept-encoding", "identity"))  # compression would hold chunks back
    for is_last in (False, True):
        try:
            return await gate.session.post(
                gate.url(arm, path), data=payload, headers=asked, allow_redirects=False
            )
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if is_last:
                raise
    raise AssertionError("unreachable")


async def _check_stream(
    response: aiohttp.ClientResponse, url: str, body: Mapping[str, Any]
) -> None:
    if response.status != 200:
        await _refused(response, url, body)
    if response.content_type != "text/event-stream":
        raise ArmFailedError(
            Outcome.ERROR,
            "bad_stream",
            f"expected text/event-stream, got {response.content_type}",
            status=502,
        )


async def _refused(response: aiohttp.ClientResponse, url: str, body: Mapping[str, Any]) -> None:
    raw = await _read(response, _MAX_REFUSAL)
    outcome, error_class, message = refusal(response.status, raw.decode("utf-8", "replace"), body)
    raise ArmFailedError(
        outcome,
        error_class,
        message,
        status=response.status,
        raw=raw,
        headers=client_headers(response, url, keep_encoding=False),
    )


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """A body that is no longer than `limit` bytes. ValueError where it is."""
    body = bytearray()
    while data := await response.content.readany():
        body += data
        if len(body) > limit:
            raise ValueError(f"more than {limit >> 20} MiB")
    return bytes(body)


def _late(stream: Stream, seconds: float) -> ArmFailedError:
    if stream.first_output_ns is not None or stream.first_ids_ns is not None:
        return ArmFailedError(Outcome.INCOMPLETE, "stall", f"silent for {seconds:g} s", status=504)
    return ArmFailedError(Outcome.ERROR, "timeout", f"no output in {seconds:g} s", status=504)


def _lost(stream: Stream, error: Exception) -> ArmFailedError:
    said = str(error)
    if isinstance(error, aiohttp.ClientConnectorError):
        said = no_connection(error)
    elif isinstance(error, aiohttp.ConnectionTimeoutError):
        said = ""
    elif isinstance(error, aiohttp.ClientResponseError):
        said = error.message  # without the URL
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    what = " ".join(what.split())[:300]
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return ArmFailedError(Outcome.ERROR, "unreachable", what, status=502)
    if isinstance(error, ValueError):
        return ArmFailedError(Outcome.ERROR, "bad_stream", what, status=502)
    outcome = Outcome.ERROR if stream.status is None else Outcome.INCOMPLETE
    return ArmFailedError(outcome, "connection", what, status=502)


# --- one request of a client --------------------------------------------------------------------


class _EndedError(Exception):
    """A stop string ended the answer; the arm need not go on."""


@dataclass
class Relay:
    """A request that was decided, on its way."""

    gate: Gate
    asked: Asked
    path: str
    raw_headers: Sequence[Header]
    decided: Decided
    request_id: str
    arrived_ns: int
    send: Send
    is_mirror: bool = False
    """A copy of a target-only request: its output goes nowhere, its failure concerns nobody."""
    cut_after: int | None = None
    """Events after which the speculative arm is cut off on purpose, to try the hand-over."""
    # What follows is of this copy alone: `replace` makes it anew.
    is_started: bool = field(default=False, init=False)
    """Whether the client has the head of the answer."""
    is_over: bool = field(default=False, init=False)
    """Whether the client has all of it; what comes after is ours alone."""
    _arm: Arm = field(default=Arm.TARGET_ONLY, init=False)
    _stream: Stream = field(default_factory=lambda: Stream(started_ns=0), init=False)
    _handover: dict[str, Any] = field(default_factory=dict, init=False)
    _head: dict[str, Any] = field(default_factory=dict, init=False)
    """The last chunk with a choice that the client has from the first arm."""
    _out: bytearray = field(default_factory=bytearray, init=False)
    """Written and not flushed: what one read of the arm brought goes out at once."""
    _back: list[Header] = field(default_factory=list, init=False)
    _sent: str = field(default="", init=False)
    """Text of the first choice that the client has from the first arm."""
    _n_sent: int = field(default=0, init=False)
    """Token ids of the first choice that are in events that the client has."""
    _end: tuple[str | None, str | None] | None = field(default=None, init=False)
    """Finish and stop reason, once the client has every choice to its end."""
    _has_usage: bool = field(default=False, init=False)
    """Whether the client has the chunk with usage."""
    _lacks_ids: bool = field(default=False, init=False)
    _n_events: int = field(default=0, init=False)
    _is_telling: bool = field(default=False, init=False)
    """Whether the client is to take something just now."""
    _in_flight: int = field(default=1, init=False)
    _attempt: int = field(default=0, init=False)
    _failure: ArmFailedError | None = field(default=None, init=False)

    async def run(self) -> None:
        """Answer the client, whatever happens, and leave a receipt for each attempt."""
        self._arm = self.decided.arm
        try:
            await self._in_time()
        except asyncio.CancelledError as why:
            self._failure = (
                ArmFailedError(Outcome.CANCELLED, "client_gone", CLIENT_GONE)
                if CLIENT_GONE in why.args
                else ArmFailedError(Outcome.CANCELLED, "gateway_stopped", "the gateway was stopped")
            )
            raise
        finally:
            self._leave_receipt()

    async def _in_time(self) -> None:
        seconds = self.gate.config.timeouts.total_s
        try:
            async with asyncio.timeout(seconds):
                await self._on_arm()
        except TimeoutError:
            if self._is_telling:  # no arm can help that
                outcome, error_class = Outcome.CANCELLED, "client_slow"
            else:
                outcome = Outcome.INCOMPLETE if self.is_started else Outcome.ERROR
                error_class = "timeout"
            late = ArmFailedError(
                outcome, error_class, f"no complete answer within {seconds:g} s", status=504
            )
            self._failure = late
            if self._handover:
                self._handover |= {"handover_kind": Handover.BROKEN, "handover_to": None}
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):  # a client that reads nothing gets none
                    await self._end_in_error(late)

    async def _on_arm(self) -> None:
        """Ask the arm that was decided, and the target-only one where that fails."""
        try:
            await self._ask()
        except ArmFailedError as failed:
            is_last = self.is_mirror or self._arm is Arm.TARGET_ONLY
            if is_last or failed.error_class in _CLIENTS_FAULT:
                await self._end_in_error(failed)
            elif self._head:
                await self._go_on(failed)
            else:  # the client has nothing, or signs of life at most
                await self._restart(failed)

    async def _ask(self) -> None:
        self._stream = Stream(started_ns=time.perf_counter_ns())
        with self.gate.in_flight(self._arm) as self._in_flight:
            if not self.asked.is_stream:
                body = self._body()
                raw, headers = await watch_whole(
                    self.gate, self._arm, self.path, body, self._headers(), self._stream
                )
                await self._start(200, [*headers, (b"content-length", b"%d" % len(raw))])
                self.is_over = True
                await self._tell({"type": "http.response.body", "body": raw})
                return
            try:
                await watch_stream(
                    self.gate,
                    self._arm,
                    self.path,
                    self._body(),
                    self._headers(),
                    self._stream,
                    self._keep_head,
                    self._forward,
                    self._flush,
                )
            except ArmFailedError as failed:
                if self._end is None:
                    raise
                stream = self._stream
                self._forget_unsent()
                stream.first.finish_reason, stream.first.stop_reason = self._end
                stream.warnings.append(f"after the end of the answer: {failed.line}")
        if self._stream.is_done and self._stream.failure is None:
            await self._finish(b"")
        else:
            await self._close_books()

    def _body(self) -> dict[str, Any]:
        """What goes to the arm: the client's body, and what receipts and hand-over need."""
        omit = self.gate.omit
        body = dict(self.asked.body)
        if self.asked.is_stream and "stream_options" not in omit:
            options = {**self.asked.stream_options, "include_usage": True}
            if not self.asked.wants_usage:  # alone it means nothing, and now it would
                options.pop("continuous_usage_stats", None)
            body["stream_options"] = options
        if self.asked.is_stream and not self.gate.no_joint and "return_token_ids" not in omit:
            body["return_token_ids"] = True
        if self._arm is Arm.SPECULATIVE and self.decided.k is not None:
            body["k"] = self.decided.k
        return body

    def _headers(self) -> list[tuple[str, str]]:
        return upstream_headers(self.raw_headers, self.gate.api_key)

    def _keep_head(self, headers: list[Header]) -> None:
        """The arm's response headers, for when the client's answer begins."""
        self._back = headers

    async def _forward(self, raw: bytes, value: dict[str, Any] | None) -> None:
        """One event of the arm to the client."""
        if value is None:
            if not self._stream.is_done:  # [DONE] goes out when the answer is known to be whole
                await self._write(raw)
            return
        choices, stream = value.get("choices"), self._stream
        if choices:
            choice = choices[0]
            text = delta_of(choice).get("content")
            if self._end is not None and (text or choice.get("finish_reason")):
                raise ArmFailedError(Outcome.ERROR, "bad_stream", "more after the end")
            self._lacks_ids = self._lacks_ids or bool(text and not choice.get("token_ids"))
            if stream.first.reasoning:
                self.gate.parses = "the server parses reasoning"
            limit, n = self.asked.max_tokens, len(stream.first.token_ids)
            if limit is not None and n > limit:
                raise ArmFailedError(
                    Outcome.ERROR, "bad_stream", f"{n} tokens where {limit} were allowed"
                )
            self._head, self._sent, self._n_sent = value, self._sent + (text or ""), n
            if choice.get("finish_reason") and stream.n_ended >= self.asked.n_choices:
                self._end = stream.first.finish_reason, stream.first.stop_reason
        elif value.get("usage"):
            self._has_usage = True
        await self._write(stripped(self.asked, raw, value))
        self._n_events += 1
        if self._arm is Arm.SPECULATIVE and self._n_events == self.cut_after:
            raise ArmFailedError(Outcome.INCOMPLETE, "connection", "cut off on purpose")

    async def _tell(self, message: Mapping[str, Any]) -> None:
        """To the client, in its own time."""
        self._is_telling = True
        await self.send(message)
        self._is_telling = False

    async def _write(self, data: bytes) -> None:
        if data:
            if not self.is_started:
                await self._start(200, self._back)
            self._out += data

    async def _flush(self) -> None:
        """What was written goes to the client; how long that takes is the client's to say."""
        if self._out:
            data, self._out = bytes(self._out), bytearray()
            await self._tell({"type": "http.response.body", "body": data, "more_body": True})

    async def _start(self, status: int, headers: Sequence[Header]) -> None:
        self.is_started = True
        told = self.gate.told(self._arm, self.decided)
        await self._tell(
            {"type": "http.response.start", "status": status, "headers": [*headers, *told]}
        )

    async def _finish(self, data: bytes) -> None:
        """The last bytes of a stream."""
        if not self.is_started:
            await self._start(200, self._back)
        self.is_over = True
        last = bytes(self._out) + data + DONE
        await self._tell({"type": "http.response.body", "body": last, "more_body": False})

    async def _end_in_error(self, failed: ArmFailedError) -> None:
        """The server's own refusal, or an error in its form; inside a stream, as an event."""
        self._failure = failed
        message = self._redacted(f"{self._arm}: {failed.message}")
        body = error_body(failed.status or 502, message, "upstream_error")
        if self.is_started:
            if self.asked.is_stream:
                await self._finish(b"data: " + body + b"\n\n")
            return
        headers: Sequence[Header] = [(b"content-type", b"application/json")]
        if failed.raw:
            body, headers = failed.raw, failed.headers
            if self.gate.api_key:  # the client's own key it may see
                body = body.replace(self.gate.api_key.encode(), b"[api key]")
        status = failed.status or 502
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.is_over = True
        await self._tell({"type": "http.response.body", "body": body})

    def _redacted(self, text: str) -> str:
        """Text of a server without the keys that it may quote."""
        for key in (bearer(self.raw_headers), self.gate.api_key):
            if key:
                text = text.replace(key, "[api key]")
        return text

    # -- hand-over --------------------------------------------------------------------------------

    async def _restart(self, failed: ArmFailedError) -> None:
        """Nothing has reached the client: the whole request goes to target-only."""
        self._note(failed, 0, Handover.RESTARTED)
        self._failure = failed
        self._leave_receipt()
        self._failure, self._handover, self._attempt = None, {}, self._attempt + 1
        self._arm = Arm.TARGET_ONLY
        reason = f"the speculative arm failed ({failed.error_class})"
        self.decided = replace(
            self.decided, arm=self._arm, decision=FELL_BACK, reason=reason, k=None
        )
        try:
            await self._ask()
        except ArmFailedError as again:
            await self._end_in_error(again)

    async def _go_on(self, failed: ArmFailedError) -> None:
        """The client has part of the answer: it gets the rest, or is told that there is none."""
        n = len(self._stream.first.token_ids)
        self._note(failed, n, Handover.BROKEN)
        try:
            await self._flush()
            await self._join(failed)
        except CannotJoinError as error:
            self._note(failed, n, Handover.BROKEN)
            message = f"{failed.message}; the answer cannot be continued: {error}"
            await self._end_in_error(
                ArmFailedError(failed.outcome, failed.error_class, message, status=failed.status)
            )
        except ArmFailedError as again:
            self._note(failed, n, Handover.BROKEN)
            message = f"{failed.message}; then target-only: {again.message}"
            await self._end_in_error(
                ArmFailedError(again.outcome, again.error_class, message, status=again.status)
            )

    def _note(self, failed: ArmFailedError, at: int, kind: Handover) -> None:
        """The joint, for the receipt; noted before it is made, for clients that leave in it."""
        self._handover = {
            "handover_at": at,
            "handover_from": Arm.SPECULATIVE,
            "handover_to": None if kind is Handover.BROKEN else Arm.TARGET_ONLY,
            "handover_kind": kind,
            "handover_reason": self._redacted(failed.line),
            "error_class": failed.error_class,  # whoever judges the arm finds it where it looks
        }

    async def _join(self, failed: ArmFailedError) -> None:
        """Continue on target-only from what was committed."""
        stream, gate = self._stream, self.gate
        if gate.no_joint:
            raise CannotJoinError(gate.no_joint)
        if self._lacks_ids:
            raise CannotJoinError("the server sent text without token ids")
        if stream.first.reasoning or stream.first.calls or stream.others:
            raise CannotJoinError("the server parsed the answer (reasoning, tool calls)")
        committed = Committed(
            stream.prompt_token_ids or (),
            tuple(stream.first.token_ids),
            self._sent,
            self._head,
        )
        body, kind = continuation(self.asked, committed, gate.max_model_len)
        most = body["max_tokens"]
        going_on = Continued(self.asked, committed, self._decode(), gate.special)
        held_back = await going_on.begin()
        self._note(failed, len(committed.ids), kind)
        stream.failure, stream.error = None, ""
        self._forget_unsent()
        stream.first.finish_reason = None
        await self._give(Piece(committed.ids[self._n_sent :], held_back))
        await self._flush()
        rest = Stream(started_ns=time.perf_counter_ns())
        n = 0

        async def on_event(raw: bytes, value: dict[str, Any] | None) -> None:
            nonlocal n
            if value is None:
                if not rest.is_done:
                    await self._write(raw)
                return
            for choice in value.get("choices") or ():
                ids, text = choice.get("token_ids") or (), delta_of(choice).get("content") or ""
                if text and not ids:
                    raise CannotJoinError("target-only sent text without token ids")
                n += len(ids)
                if n > most:
                    raise CannotJoinError(f"target-only sent {n} tokens where {most} were allowed")
                piece = await going_on.feed(
                    ids,
                    text,
                    choice.get("finish_reason"),
                    choice.get("stop_reason"),
                )
                await self._give(piece)
                if piece.finish_reason is not None:
                    raise _EndedError

        with suppress(_EndedError):
            await watch_stream(
                gate,
                Arm.TARGET_ONLY,
                "/v1/completions",
                body,
                self._headers(),
                rest,
                lambda _headers: None,
                on_event,
                self._flush,
            )
        await self._close_books()

    def _decode(self) -> Decode:
        headers = [(n, v) for n, v in self._headers() if n == "authorization"]

        async def decode(ids: Sequence[int]) -> str:
            if not ids:
                return ""
            payload = json.dumps({"model": self.asked.body.get("model"), "tokens": list(ids)})
            try:
                async with (
                    asyncio.timeout(self.gate.config.timeouts.idle_s),
                    await _post(
                        self.gate,
                        Arm.TARGET_ONLY,
                        "/detokenize",
                        payload.encode(),
                        [("content-type", "application/json"), *headers],
                    ) as response,
                ):
                    value = json.loads(await _read(response, _MAX_ANSWER))
                    text = value["prompt"]
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
                raise CannotJoinError("target-only does not answer /detokenize") from None
            if not isinstance(text, str):
                raise CannotJoinError("target-only does not answer /detokenize")
            return text

        return decode

    async def _give(self, piece: Piece) -> None:
        """A piece of the new arm, in the words of the old one, to the receipt and to the client."""
        if not piece.ids and not piece.text and piece.finish_reason is None:
            return
        value = chunk(self.asked, self._head, piece)
        self._stream.take(json.dumps(value).encode(), time.perf_counter_ns())
        if self.asked.wants_running_usage:
            value["usage"] = usage_of(*self._counts())
        await self._write(stripped(self.asked, event(value), value))

    def _forget_unsent(self) -> None:
        """Go on from what the client has: the event that failed may have been read in part."""
        first = self._stream.first
        if not self._stream.others:
            del first.token_ids[self._n_sent :]
            first.text[:] = [self._sent]

    def _counts(self) -> tuple[int, int]:
        stream = self._stream
        return len(stream.prompt_token_ids or ()), len(stream.first.token_ids)

    async def _close_books(self) -> None:
        """Usage over both arms, and the end."""
        stream = self._stream
        stream.failure, stream.error, stream.is_done = None, "", True
        if stream.prompt_token_ids and stream.first.token_ids and not stream.others:
            stream.usage = {**usage_of(*self._counts())}
        is_owed = self.asked.wants_usage and not self._has_usage and stream.usage is not None
        await self._finish(event(usage_chunk(self._head, stream.usage or {})) if is_owed else b"")

    # -- receipts ---------------------------------------------------------------------------------

    def _leave_receipt(self) -> None:
        receipt, answer = self.receipt()
        self.gate.outbox.put(receipt, answer)
        self.gate.meters.receipt(receipt)

    def receipt(self) -> tuple[Receipt, Answer | None]:
        """What this attempt came to."""
        gate, stream = self.gate, self._stream
        if self._failure is not None:
            stream.failure = None
            stream.fail(self._failure.outcome, self._failure.error_class, self._failure.message)
            if stream.status is None:
                stream.status = self._failure.status if self._failure.raw else None
        planned = planned_request(
            gate,
            self.asked,
            self.raw_headers,
            self.decided,
            self.request_id,
            self._in_flight,
            mirror=self.is_mirror,
        )
        observation = stream.observation(planned, self.asked.body, gate.api_key)
        if self._failure is not None:
            observation = replace(
                observation,
                outcome=self._failure.outcome,
                error_class=self._failure.error_class,
            )
        made = make_receipt(
            observation,
            planned,
            gate.run_id,
            gate.arms[self._arm],
            gate.policy_version,
            scheduled_ns=self.arrived_ns,
            attempt=self._attempt,
        )
        if self._handover:
            made = replace(made, **self._handover)
        if made.error_message is not None:
            made = replace(made, error_message=self._redacted(made.error_message))
        answer = None
        if gate.config.store_prompts == "on":
            answer = make_answer(observation, made.receipt_id)
            asked = {name: self.asked.body.get(name) for name in ("messages", "prompt")}
            # JSON may hold half a surrogate, the store may not.
            whole = json.dumps(asked, ensure_ascii=False).encode("utf-8", "replace")
            answer = replace(answer, details={**(answer.details or {}), "asked": json.loads(whole)})
        return made, answer


def bearer(headers: Sequence[Header]) -> str | None:
    """A client's key, so that it can be kept out of what is written."""
    for name, value in headers:
        if name == b"authorization":
            return value.decode("latin-1").removeprefix("Bearer ").strip() or None
    return None


def planned_request(
    gate: Gate,
    asked: Asked,
    headers: Sequence[Header],
    decided: Decided,
    request_id: str,
    in_flight: int,
    *,
    mirror: bool = False,
) -> PlannedRequest:
    """A live request in the words of a planned one, so that one function makes all receipts."""
    labels = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    facts = asked.facts(labels)
    limit = facts.max_tokens or gate.max_model_len or 2**31
    prompt = Prompt(
        prompt_id=gate.prompt_id(asked),
        task=facts.task or "unknown",
        route=decided.route or "",
        messages=(),
        max_tokens=limit,
        check={},
        priority=facts.priority or "normal",
        language=facts.language or "unknown",
        output_band=facts.output_band or "unknown",
        features=tuple(sorted(asked.features)),
    )
    return PlannedRequest(
        stage=GATEWAY,
        phase="mirror" if mirror else "live",
        arm=decided.arm,
        route=decided.route or "",
        prompt=prompt,
        pair_id=request_id,
        repeat=int(request_id[:15], 16),  # what tells the requests of one prompt apart
        sampler=asked.sampler,
        max_tokens=limit,
        concurrency=in_flight,
        mirror=mirror,
        decision=decided.decision,
        decision_reason=decided.reason,
        stream=asked.is_stream,
        n=asked.n,
        fields={"k": decided.k} if decided.k and decided.arm is Arm.SPECULATIVE else {},
    )


async def nowhere(_message: Mapping[str, Any]) -> None:
    """Where the output of a mirrored request goes."""
