"""What the gateway adds to a request, beside a plain reverse proxy, in one run.

Run it as `python tests/bench/gateway.py [--quick] [--litellm PYTHON]`. A scripted server writes
into each chunk when it was sent; the client reads the same clock when the chunk comes in, so a
delay is that of one chunk on its way. All ways to the server take turns, round by round, over kept
connections:

    direct         no proxy
    nginx          a plain reverse proxy without buffering (skipped where it is not installed)
    gateway, t     the gateway with one worker, kept on target-only by its share
    gateway, s     the same, speculative: token ids are asked for, watched and cut out again
    litellm        LiteLLM's proxy, where --litellm names a Python that has it

What is printed: TTFT and delay per chunk at one stream (p50 and p99, and what is added to direct),
and chunks per CPU second of the proxy's processes at 32 streams: throughput of one core, which what
else runs on the machine does not change. For the gateway that is its worker; the parent, which
writes the receipts, is shown beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

CHUNKS = 40
GAP_S = 0.004
PAUSE_S = 0.05  # what is left to do of one request must not delay the next
BUSY_STREAMS = 32
_STAMP = re.compile(rb'"content":"(\d+)"')
_TICKS = os.sysconf("SC_CLK_TCK")
_ENV = {
    **os.environ,
    "NO_PROXY": "127.0.0.1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch one
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


# --- the scripted server ------------------------------------------------------------------------


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Chats in vLLM's form; each chunk says when it was sent. Also what the gateway tries out."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = json.loads(body) if body else {}
    if not asked.get("stream"):
        page = json.dumps(_whole(scope["path"], asked)).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(page))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": page})
        return
    gap_s = asked.get("seed", 0) / 1000  # the one field that every proxy passes on
    wants_ids = asked.get("return_token_ids")
    options = asked.get("stream_options") or {}
    head = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": head})

    async def event(text: str) -> None:
        data = b"data: " + text.encode() + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})

    common = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"target"'
    prompt = ',"prompt_token_ids":[1,2,3]' if wants_ids else ""
    role = '"delta":{"role":"assistant","content":""}'
    await event(f'{common},"choices":[{{"index":0,{role},"finish_reason":null}}]{prompt}}}')
    for i in range(CHUNKS):
        if gap_s and i:
            await asyncio.sleep(gap_s)
        finish = '"stop"' if i == CHUNKS - 1 else "null"
        ids = f',"token_ids":[{i}]' if wants_ids else ""
        delta = f'"delta":{{"content":"{time.perf_counter_ns()}"}}'
        await event(
            f'{common},"choices":[{{"index":0,{delta},"logprobs":null,'
            f'"finish_reason":{finish},"stop_reason":null{ids}}}]}}'
        )
    if options.get("include_usage"):
        usage = f'{{"prompt_tokens":3,"total_tokens":{3 + CHUNKS},"completion_tokens":{CHUNKS}}}'
        await event(f'{common},"choices":[],"usage":{usage}}}')
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _whole(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/models":
        return {"data": [{"id": "target", "max_model_len": 4096}]}
    if path == "/detokenize":
        return {"prompt": "x"}
    prompt = asked.get("prompt")
    ids = prompt if isinstance(prompt, list) else [1, 2]
    choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": [3]}
    return {"choices": [{**choice, "prompt_token_ids": ids}]}


# --- the ways to it -----------------------------------------------------------------------------


@dataclass
class Way:
    """One way to the server. `pids` are the processes that carry the load."""

    name: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    """The gateway's parent."""


@contextmanager
def process(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    running = subprocess.Popen(command, text=True, **more)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(30)


def wait_for(url: str) -> None:
    """Until something answers."""
    for _ in range(3000):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"{url} does not answer")


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[Way]:
    """One worker, no buffering, kept connections on both sides."""
    port, where = free_port(), urlsplit(upstream).netloc
    (folder / "nginx.conf").write_text(
        f"""
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 1024; }}
http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  keepalive_requests 1000000;
  upstream server {{ server {where}; keepalive 64; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://server;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }} }}
""",
        encoding="ascii",
    )
    with process(["nginx", "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL) as running:
        wait_for(f"http://127.0.0.1:{port}/v1/models")
        yield Way("nginx", f"http://127.0.0.1:{port}", pids=tuple(children(running.pid)))


@contextmanager
def gateway(folder: Path, target: str, speculative: str, share: float) -> Iterator[Way]:
    """One worker."""
    name = "gateway, s" if share else "gateway, t"
    rollout = {
        "name": "bench",
        "engine": "attached",
        "attached": {"target_only": target, "speculative": speculative},
        "speculation": {"method": "ngram", "num_speculative_tokens": 4},
        "corpus": {"paths": ["packaged:prose"]},
        "routes": [{"name": "all", "tasks": ["*"]}],
        "gateway": {"port": 0, "workers": 1, "share": share},
    }
    folder = folder / name.replace(", ", "-")
    folder.mkdir()
    (folder / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
    command = [sys.executable, "-m", "speccheck", "gateway", "--json"]
    command += ["--rollout", str(folder / "rollout.yaml"), "--out", str(folder / "out")]
    with process(command, stdout=subprocess.PIPE) as running:
        if running.stdout is None:
            raise SystemExit("no standard output")
        url = json.loads(running.stdout.readline())["url"]
        yield Way(name, url, pids=tuple(children(running.pid)), beside=(running.pid,))


@contextmanager
def litellm(folder: Path, python: str, upstream: str) -> Iterator[Way]:
    """LiteLLM's proxy with one worker."""
    port = free_port()
    params = {"model": "openai/target", "api_base": f"{upstream}/v1", "api_key": "x"}
    config = {"model_list": [{"model_name": "target", "litellm_params": params}]}
    (folder / "litellm.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [str(Path(python).with_name("litellm")), "--config", str(folder / "litellm.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    log = (folder / "litellm.log").open("w")
    with process(command, stdout=log, stderr=log, env=_ENV) as running:
        wait_for(f"http://127.0.0.1:{port}/health/liveliness")
        pids = (running.pid, *children(running.pid))
        yield Way("litellm", f"http://127.0.0.1:{port}", {"Authorization": "Bearer x"}, pids)


# --- the client ---------------------------------------------------------------------------------


async def stream(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], way: Way, gap_s: float
) -> tuple[float, list[float]]:
    """TTFT and the delay of each chunk, seconds."""
    reader, writer = connection
    body = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    raw = json.dumps(
        {**body, "temperature": 0, "max_tokens": 64, "seed": round(gap_s * 1000)}
    ).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in way.headers.items())
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(raw)}\r\n\r\n"
    )
    sent = time.perf_counter_ns()
    writer.write(head.encode() + raw)
    first, delays, tail = None, [], b""
    while True:
        data = await reader.read(1 << 16)
        now = time.perf_counter_ns()
        if not data:
            raise SystemExit(f"{way.name}: the answer broke off: {tail!r}")
        stamps = _STAMP.findall(data)
        first = first or (now if stamps else None)
        delays += [(now - int(stamp)) / 1e9 for stamp in stamps]
        tail = (tail + data)[-64:]
        if tail.endswith(b"0\r\n\r\n") and b"[DONE]" in tail:
            break
    if first is None:
        raise SystemExit(f"{way.name}: no chunk was understood")
    return (first - sent) / 1e9, delays


async def connect(way: Way) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(way.url)
    return await asyncio.open_connection(where.hostname, where.port)


async def calm(way: Way, n: int) -> tuple[list[float], list[float]]:
    """One stream after the other, with a pause."""
    connection = await connect(way)
    ttft, delays = [], []
    for _ in range(n):
        one, several = await stream(connection, way, GAP_S)
        ttft.append(one)
        delays += several
        await asyncio.sleep(PAUSE_S)
    connection[1].close()
    return ttft, delays


async def busy(way: Way, n: int) -> None:
    """Many at once, as fast as they come."""

    async def worker() -> None:
        connection = await connect(way)
        for _ in range(n // BUSY_STREAMS):
            await stream(connection, way, 0.0)
        connection[1].close()

    await asyncio.gather(*(worker() for _ in range(BUSY_STREAMS)))


def cpu_s(pids: tuple[int, ...]) -> float:
    """CPU seconds that processes have used."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


# --- the run ------------------------------------------------------------------------------------


def ms(values: list[float], q: float) -> float:
    return float(np.quantile(values, q)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of it")
    parser.add_argument("--litellm", metavar="PYTHON", help="an interpreter that has litellm")
    options = parser.parse_args()
    rounds, calm_n, busy_n = (2, 10, 128) if options.quick else (6, 20, 320)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        ports = [free_port(), free_port()]
        for port in ports:
            command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent)]
            command += ["gateway:app", "--port", str(port), "--log-level", "error"]
            command += ["--lifespan", "off", "--timeout-keep-alive", "600"]
            stack.enter_context(process(command))
            wait_for(f"http://127.0.0.1:{port}/v1/models")
        target, speculative = (f"http://127.0.0.1:{port}" for port in ports)
        ways = [Way("direct", target)]
        if shutil.which("nginx"):
            ways.append(stack.enter_context(nginx(folder, target)))
        else:
            print("nginx is not installed: no plain reverse proxy to compare with")
        ways += [
            stack.enter_context(gateway(folder, target, speculative, share)) for share in (0.0, 1.0)
        ]
        if options.litellm:
            ways.append(stack.enter_context(litellm(folder, options.litellm, target)))
        ttft: dict[str, list[float]] = {way.name: [] for way in ways}
        delay: dict[str, list[float]] = {way.name: [] for way in ways}
        used: dict[str, float] = dict.fromkeys(ttft, 0.0)
        beside: dict[str, float] = dict.fromkeys(ttft, 0.0)
        for way in ways:
            asyncio.run(calm(way, 3))  # warm
        for turn in range(rounds):
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                one, several = asyncio.run(calm(way, calm_n))
                ttft[way.name].extend(one)
                delay[way.name].extend(several)
                before, parent = cpu_s(way.pids), cpu_s(way.beside)
                asyncio.run(busy(way, busy_n))
                used[way.name] += cpu_s(way.pids) - before
                beside[way.name] += cpu_s(way.beside) - parent
            print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        show(ways, ttft, delay, used, beside, rounds * busy_n * CHUNKS)


def show(
    ways: list[Way],
    ttft: dict[str, list[float]],
    delay: dict[str, list[float]],
    used: dict[str, float],
    beside: dict[str, float],
    n_chunks: int,
) -> None:
    """The table, and ratios to nginx."""
    print(
        f"{len(ttft['direct'])} streams of {CHUNKS} chunks per way, {GAP_S * 1e3:g} ms apart; "
        f"{n_chunks} chunks at {BUSY_STREAMS} streams"
    )
    print("             TTFT ms         added           per chunk ms    added           chunks per")
    print("             p50     p99     p50     p99     p50     p99     p50     p99     CPU second")
    for way in ways:
        mine, base = (
            [ms(values[name], q) for values in (ttft, delay) for q in (0.5, 0.99)]
            for name in (way.name, "direct")
        )
        more = [v - b for v, b in zip(mine, base, strict=True)]
        cells = [f"{v:<8.2f}" for v in (*mine[:2], *more[:2], *mine[2:], *more[2:])]
        seconds = used[way.name]
        rate = f"{n_chunks / seconds:,.0f}" if seconds else "-"
        parent = beside[way.name]
        more = f" (parent {100 * parent / seconds:.0f} % more)" if parent and seconds else ""
        print(f"{way.name:<13}{''.join(cells)}{rate}{more}")
    rates = {w.name: n_chunks / used[w.name] for w in ways if used[w.name]}
    if "nginx" in rates:
        said = ", ".join(
            f"{name} {rate / rates['nginx']:.3f}" for name, rate in rates.items() if name != "nginx"
        )
        print(f"throughput per core, nginx = 1: {said}")
    first = {way.name: ms(ttft[way.name], 0.5) for way in ways}
    said = ", ".join(f"{name} {own / first['direct']:.2f}" for name, own in first.items())
    print(f"TTFT p50, direct = 1: {said}")


if __name__ == "__main__":
    main()
