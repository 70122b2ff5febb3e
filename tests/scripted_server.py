"""A scripted OpenAI-compatible server that knows what it sent.

Raw asyncio rather than a framework: tests decide every byte, where a chunk is cut, when the
connection drops. Each request is answered by a `Script`; what really went out is written down in
`ScriptedServer.seen`, and tests compare the client's view with that, never with a second
computation of the client's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

EVENT_STREAM = "text/event-stream; charset=utf-8"


class Drop:
    """A part of a script: close the connection here, in mid-answer."""


class Reset(Drop):
    """The same with a TCP reset, in place of an orderly end."""


@dataclass
class Script:
    """One answer: bytes to send, seconds to wait, or a `Drop`, in order.

    `token_ids` and `text` are the truth that the parts were made from.
    """

    parts: list[bytes | float | Drop]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    status: int = 200
    content_type: str | None = EVENT_STREAM
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request as it arrived, and what was really sent back by when (perf_counter_ns)."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    arrived_ns: int
    script: Script | None = None
    sent_at_ns: list[int] = field(default_factory=list)
    cut_off: bool = False
    """Whether the client went away before the script was done."""
    connection: int = 0
    """Which connection it came in on: reuse shows as equal numbers."""


def sse(value: Any, end: str = "\n\n") -> bytes:
    """One event with JSON data."""
    return f"data: {json.dumps(value)}{end}".encode()


def chunk(
    content: str | None = None,
    ids: Sequence[int] | None = None,
    *,
    finish: str | None = None,
    stop: str | int | None = None,
    usage: dict[str, Any] | None = None,
    **delta: Any,
) -> dict[str, Any]:
    """A chat chunk in vLLM's form."""
    choice: dict[str, Any] = {"index": 0, "delta": dict(delta), "finish_reason": finish}
    if content is not None:
        choice["delta"]["content"] = content
    if ids is not None:
        choice["token_ids"] = list(ids)
    if stop is not None:
        choice["stop_reason"] = stop
    value: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
    if usage is not None:
        value["usage"] = usage
    return value


def usage_of(prompt: int, completion: int, **details: int) -> dict[str, Any]:
    """A usage object; `reasoning` and `cached` become the nested details."""
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if "reasoning" in details:
        value["completion_tokens_details"] = {"reasoning_tokens": details["reasoning"]}
    if "cached" in details:
        value["prompt_tokens_details"] = {"cached_tokens": details["cached"]}
    return value


DONE = b"data: [DONE]\n\n"


def text_of(token_id: int) -> str:
    """The text of a token: some of them long, some outside ASCII, some empty."""
    return ("", " a", " né", " 世界", " 🙂", "\n")[token_id % 6]


def answer(
    steps: Sequence[Sequence[int]],
    *,
    ids: bool = True,
    continuous_usage: bool = True,
    final_usage: bool = True,
    metrics: Any = None,
    finish: str | None = "stop",
    stop: str | int | None = None,
    done: bool = True,
    prompt_tokens: int = 5,
    delay_s: float = 0.0,
) -> Script:
    """A well-behaved answer of one chunk per step, with anything left out that is asked for."""
    values: list[dict[str, Any]] = []

    def running(n: int) -> dict[str, Any] | None:
        return usage_of(prompt_tokens, n) if continuous_usage else None

    role = chunk("", role="assistant", usage=running(0))
    if ids:
        role["prompt_token_ids"] = list(range(prompt_tokens))
    values.append(role)
    sent: list[int] = []
    for i, step in enumerate(steps):
        sent += step
        last = i == len(steps) - 1
        values.append(
            chunk(
                "".join(map(text_of, step)),
                step if ids else None,
                finish=finish if last else None,
                stop=stop if last else None,
                usage=running(len(sent)),
            )
        )
    if not steps:
        values.append(chunk("", finish=finish, stop=stop, usage=running(0)))
    if final_usage:
        closing: dict[str, Any] = {"choices": [], "usage": usage_of(prompt_tokens, len(sent))}
        if metrics is not None:
            closing["metrics"] = metrics
        values.append(closing)
    parts: list[bytes | float | Drop] = []
    for value in values:
        parts.append(sse(value))
        if delay_s:
            parts.append(delay_s)
    if done:
        parts.append(DONE)
    return Script(parts, token_ids=sent, text="".join(map(text_of, sent)))


def spec_metrics(per_step: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """VLLM's metrics object for verify steps given as (accepted, drafted)."""
    histogram = [0] * (k + 1)
    for accepted, _ in per_step:
        histogram[accepted] += 1
    accepted, drafted = sum(a for a, _ in per_step), sum(d for _, d in per_step)
    return {
        "queue_time_ms": 1.5,
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / len(per_step) if per_step else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": len(per_step),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": k,
            "per_step_accepted": [a for a, _ in per_step],
            "per_step_drafted": [d for _, d in per_step],
        },
    }


def recut(script: Script, sizes: Sequence[int], pause_s: float = 0.0) -> Script:
    """The same bytes cut elsewhere: chunks of the given sizes, used in turn."""
    data = b"".join(part for part in script.parts if isinstance(part, bytes))
    parts: list[bytes | float | Drop] = []
    at = i = 0
    while at < len(data):
        size = max(1, sizes[i % len(sizes)])
        parts.append(data[at : at + size])
        if pause_s:
            parts.append(pause_s)
        at += size
        i += 1
    return Script(parts, script.token_ids, script.text, script.status, script.content_type)


def refusal(status: int, message: str, param: str | None = None) -> Script:
    """An error reply in OpenAI's form."""
    error = {"error": {"message": message, "type": "E", "param": param, "code": status}}
    return Script([json.dumps(error).encode()], status=status, content_type="application/json")


# --- a pair for the gateway ---------------------------------------------------------------------

MODELS = {"/v1/models": {"object": "list", "data": [{"id": "target"}]}, "/health": {}}


def target_says(steps: list[list[int]] | None = None) -> Callable[[dict[str, Any], int], Script]:
    """A target-only server that continues any ids with those of a fixed answer.

    It answers chats, completions of text or ids (prompt ids 0..4 and then the answer's own), and
    /detokenize, in the words of `text_of`.
    """
    ids = [token for step in steps or [[7], [8], [9], [10], [11], [2]] for token in step]

    def script(body: dict[str, Any], _n: int) -> Script:
        if "tokens" in body:
            text = "".join(map(text_of, body["tokens"]))
            return whole({"prompt": text})
        prompt = body.get("prompt")
        done = len(prompt) - 5 if isinstance(prompt, list) else 0
        rest = ids[done : done + body.get("max_tokens", 16)]
        ended = done + len(rest) == len(ids)
        made = answer([[token] for token in rest], finish="stop" if ended else "length")
        return made if prompt is None else as_completion(made)

    return script


def whole(value: Any, status: int = 200) -> Script:
    """A JSON answer in one piece."""
    return Script([json.dumps(value).encode()], status=status, content_type="application/json")


def as_completion(script: Script) -> Script:
    """A chat's chunks as those of /v1/completions."""
    parts: list[Any] = []
    for part in script.parts:
        if not isinstance(part, bytes) or part.startswith(b"data: ["):
            parts.append(part)
            continue
        value = json.loads(part[6:])
        for choice in value["choices"]:
            delta = choice.pop("delta")
            if "role" in delta:
                break
            choice["text"] = delta.get("content", "")
        else:
            parts.append(f"data: {json.dumps(value)}\n\n".encode())
    return Script(parts, script.token_ids, script.text)


class ScriptedServer:
    """Runs in a thread with an event loop of its own. `script` answers each request.

    `script` gets the request body and how many came before. `/metrics` serves `metrics_text` if it
    is not None, a GET of one of `pages` its JSON; any other GET is 404.
    """

    def __init__(
        self,
        script: Callable[[dict[str, Any], int], Script],
        pages: Mapping[str, Any] | None = None,
        port: int = 0,
    ) -> None:
        self._port = port
        self.script = script
        self.pages = pages or {}
        self.metrics_text: str | None = "# nothing counted\n"
        self.seen: list[Seen] = []
        self.url = ""
        self._connections = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, backlog=4096)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        # Cancelled only when the server is stopped; asyncio.streams would log that as an error.
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            try:
                while await self._request(reader, writer, number):
                    pass
            finally:  # a script that raises is a connection that closes, not a client that waits
                writer.close()

    async def _request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        """Serve one request; whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        request_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        path = request_line.split(" ")[1]
        body = json.loads(raw) if raw else {}
        seen = Seen(path, headers, body, time.perf_counter_ns(), connection=number)
        if path == "/metrics" and self.metrics_text is not None:
            script = Script([self.metrics_text.encode()], content_type="text/plain")
        elif request_line.startswith("GET") and path in self.pages:
            page = json.dumps(self.pages[path]).encode()
            script = Script([page], content_type="application/json")
        elif request_line.startswith("GET"):
            script = refusal(404, "no such page")
        else:
            n = len(self.seen)
            self.seen.append(seen)
            script = self.script(body, n)
        seen.script = script
        try:
            return await self._answer(reader, writer, script, seen)
        except ConnectionError:
            seen.cut_off = True
            return False

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        script: Script,
        seen: Seen,
    ) -> bool:
        lines = [f"HTTP/1.1 {script.status} X", "Transfer-Encoding: chunked"]
        if script.content_type is not None:
            lines.append(f"Content-Type: {script.content_type}")
        lines += [f"{name}: {value}" for name, value in script.headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for part in script.parts:
            if isinstance(part, Drop):
                if isinstance(part, Reset):
                    connection = writer.get_extra_info("socket")
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return False
            if isinstance(part, float):
                await asyncio.sleep(part)
                if reader.at_eof() or writer.is_closing():
                    raise ConnectionResetError
                continue
            # Before the write: on a busy machine the client may read before this thread goes on.
            seen.sent_at_ns.append(time.perf_counter_ns())
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def gzipped(script: Script) -> Script:
    """The same answer, compressed by a proxy in between."""
    data = b"".join(part for part in script.parts if isinstance(part, bytes))
    headers = {"Content-Encoding": "gzip"}
    return Script([gzip.compress(data)], script.token_ids, script.text, headers=headers)
