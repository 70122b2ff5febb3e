"""The fault matrix: what a client sees, what the receipt says, which decision follows.

The gateway is `speccheck gateway`, each server a process of its own (tests/faulty_server.py). One
place per fault; where the details of one are tested elsewhere, this is where:

    fault                          here                            details
    server killed (-9)             test_a_server_that_is_killed    test_gateway_process, bench/kill
    server stopped (SIGSTOP)       test_a_server_that_is_stopped   test_watch
    slow, gzip                     MATRIX                          test_gateway_relay
    reset, closed, half an event   MATRIX                          test_gateway_relay, _joint
    broken SSE, truncated JSON     MATRIX                          test_gateway_relay
    error in a 200 stream          MATRIX                          test_gateway_relay
    429, 500, 503, content type    MATRIX                          test_gateway_relay
    silence, stall, keep-alives    MATRIX                          test_gateway_relay
    endless stream, huge line      MATRIX                          test_gateway_relay
    target-only down               test_target_only_is_down        test_gateway_relay
    store locked, disk full        test_the_store_is_locked_...    test_gateway_process
    clock step                     test_the_clock_is_set
    gateway worker killed          test_a_worker_is_killed         test_gateway_process
    gateway killed, begun again    test_the_gateway_is_killed
    1,000 streams                                                  test_gateway_relay
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from faulty_server import IDS, N_BEGUN, TEXT
from test_gateway_process import HOLD, WAIT_S, children, eventually, metrics, run
from test_gateway_relay import events_of, said

from speccheck.cli.main import cli
from speccheck.errors import StoreError
from speccheck.records import Receipt, Transition
from speccheck.store import RecordedTransition, Store

STALL_S = 8.0
"""Long enough for a server of ours that is well, on a machine that is busy."""
TOTAL_S = 30.0
ERRORS = {"max_error_rate", "max_engine_error_rate"}
ROLLOUT: dict[str, Any] = {
    "name": "faults",
    "engine": "attached",
    "speculation": {"method": "ngram", "num_speculative_tokens": 4},
    "routes": [{"name": "chat"}],
    "gateway": {
        "port": 0,
        "workers": 1,
        "flush_s": 0.2,
        "timeouts": {
            "connect_s": STALL_S,
            "first_byte_s": STALL_S,
            "idle_s": STALL_S,
            "total_s": TOTAL_S,
        },
    },
    "fallback": {"cool_down_s": 86_000},
}


class Server:
    """An arm of the pair, as a process."""

    def __init__(self, arm: str) -> None:
        self._arm, self.port = arm, 0
        self.start()

    def start(self) -> None:
        """Start it, again on the port it had."""
        code = str(Path(__file__).with_name("faulty_server.py"))
        self.process = subprocess.Popen(
            [sys.executable, code, self._arm, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.port = int(self.url.rsplit(":", 1)[1])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S) as reply:
            return json.loads(reply.read())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass
class Answer:
    """What a client has of one request."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""
    is_cut: bool = False
    """The connection was closed before the end."""

    @property
    def arm(self) -> str:
        return self.headers["x-speccheck-arm"]

    @property
    def is_whole(self) -> bool:
        """Every token once, one role, one end."""
        return self.status == 200 and said(self.raw) == (TEXT, ["stop"], ["assistant"])


@dataclass
class Live:
    """A gateway over two servers."""

    folder: Path
    url: str
    process: subprocess.Popen[str]
    target: Server
    speculative: Server
    seen_off: set[str] = field(default_factory=set)
    """Routes that were waited for."""

    async def ask(
        self, session: aiohttp.ClientSession, user: str, route: str, begun: asyncio.Semaphore | None
    ) -> Answer:
        answer = Answer()
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "max_tokens": 16,
            "stream": True,
            "user": user,
        }
        headers = {"x-speccheck-route": route}
        try:
            async with session.post(
                f"{self.url}/v1/chat/completions", json=body, headers=headers
            ) as reply:
                answer.status, answer.headers = reply.status, dict(reply.headers)
                async for data, _ in reply.content.iter_chunks():
                    answer.raw += data
                    if begun is not None and answer.raw.count(b"content") > N_BEGUN:
                        begun.release()
                        begun = None
        except aiohttp.ClientError:
            answer.is_cut = True
        return answer

    async def all(self, n: int, user: str, route: str = "chat") -> list[Answer]:
        """So many at once, each with the time that every request has at most."""
        timeout = aiohttp.ClientTimeout(total=4 * TOTAL_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return list(
                await asyncio.gather(*(self.ask(session, user, route, None) for _ in range(n)))
            )

    def ask_now(self, n: int, user: str, route: str = "chat") -> list[Answer]:
        return asyncio.run(self.all(n, user, route))

    def held(self, n: int, route: str, then: Callable[[], Any]) -> list[Answer]:
        """So many that have all begun when `then` is called."""

        async def both() -> list[Answer]:
            begun = asyncio.Semaphore(0)
            timeout = aiohttp.ClientTimeout(total=4 * TOTAL_S)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                tasks = [
                    asyncio.create_task(self.ask(session, "held", route, begun)) for _ in range(n)
                ]
                for _ in range(n):
                    await asyncio.wait_for(begun.acquire(), WAIT_S)
                await asyncio.to_thread(then)
                return list(await asyncio.gather(*tasks))

        return asyncio.run(both())

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def off(self, *routes: str) -> None:
        """Wait until these have fallen back."""

        def are_off() -> bool:
            page = metrics(self.url)
            return all(
                f'route_state{{route="{name}",state="fell_back"}}' in page for name in routes
            )

        eventually(are_off)
        self.seen_off |= set(routes)

    def kept(self, n: int, route: str = "chat") -> list[Receipt]:
        """The receipts of a route, once there are so many."""

        def read() -> list[Receipt] | None:
            try:
                with Store.read(self.store) as store:
                    receipts = store.receipts(store.runs()[0].run_id, route=route)
            except StoreError:  # the gateway is writing
                return None
            return receipts if len(receipts) >= n else None

        receipts: list[Receipt] = eventually(read)
        assert len(receipts) == n
        return sorted(receipts, key=lambda one: (one.scheduled_ns, one.attempt))

    @property
    def store(self) -> Path:
        return self.folder / "out" / "receipts.duckdb"

    def end(self) -> dict[str, list[Transition]]:
        """Stop it; transitions by route. What it kept must be sound, and decide the same again."""
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0
        with Store.read(self.store) as store:
            rows = store.transitions("faults")
            assert store.verify() == []
        moved: dict[str, list[Transition]] = {}
        for row in rows:
            moved.setdefault(row.transition.route, []).append(row.transition)
        replays = [replayed(self.folder / "out") for _ in range(2)]
        assert replays[0] == replays[1]
        for route in json.loads(replays[0])["routes"]:
            assert route["agrees"] is (True if route["route"] in moved else None), replays[0]
        return moved


def replayed(out: Path) -> str:
    """What `speccheck fallback replay` says of a folder."""
    arguments = ["fallback", "replay", "--json", "--out", str(out)]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None, done.exception
    return done.output


@contextmanager
def live(folder: Path, *, env: Mapping[str, str] | None = None, **changes: Any) -> Iterator[Live]:
    """Servers and gateway as processes; `changes` are of the rollout, blocks merged."""
    with ExitStack() as stack:
        target, speculative = Server("target"), Server("speculative")
        stack.callback(target.kill)
        stack.callback(speculative.kill)
        urls = {"target_only": target.url, "speculative": speculative.url}
        rollout = {**ROLLOUT, "attached": urls}
        for name, value in changes.items():
            old = rollout.get(name)
            rollout[name] = {**old, **value} if isinstance(old, dict) else value
        (folder / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
        process = begin(folder, env or {})
        stack.callback(stop, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        yield Live(folder, json.loads(line)["url"], process, target, speculative)


def begin(folder: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    with (folder / "err").open("a") as err:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "speccheck", "gateway", "--json"),
                *("--rollout", str(folder / "rollout.yaml"), "--out", str(folder / "out")),
            ],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, **env},
        )


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


# --- what a server can do wrong -----------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is expected of one row. `n` requests at once, before any decision can follow."""

    error: str | None
    """Error class in the receipt of the speculative attempt; None: there is none."""
    kind: str | None
    """How the answer went on: restarted, exact, broken; None: it needed nothing."""
    rules: frozenset[str] = frozenset()
    """The rule that turns the route off is one of these; none: the route stays enabled."""
    n: int = 12


E = frozenset(ERRORS)
MATRIX = {
    "good": Fault(None, None),
    "slow": Fault(None, None),
    "gzip": Fault(None, None),
    "500": Fault("server_error", "restarted", E),
    "503": Fault("overloaded", "restarted", E),
    "429": Fault("overloaded", "restarted", E),
    "html": Fault("bad_stream", "restarted", E),
    "reset-first": Fault("connection", "restarted", E),
    "error-first": Fault("stream_error", "restarted", E),
    "silent": Fault("timeout", "restarted", E),
    "reset": Fault("connection", "exact", E),
    "closed": Fault("connection", "exact", E),
    "unfinished": Fault("no_finish_reason", "exact", E),
    "error-inside": Fault("stream_error", "exact", E),
    "truncated-json": Fault("bad_stream", "exact", E),
    "broken-sse": Fault("connection", "exact", E),
    "half-event": Fault("connection", "exact", E),
    "stall": Fault("stall", "exact", E),
    "keep-alive": Fault("stall", "exact", E),
    "huge-line": Fault("bad_stream", "exact", n=1),
    "endless": Fault("bad_stream", "broken", E),
}


OTHER = ("stopped", "spare", "killed", "down", "worker")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One gateway, a route for each fault, so that each has a guard of its own."""
    folder = tmp_path_factory.mktemp("pair")
    routes = [{"name": name} for name in (*MATRIX, *OTHER)]
    blind = {"max_unreachable_s": None, "max_stall_s": None}  # of all routes at once
    with live(folder, routes=routes, gateway={"workers": 2}, fallback=blind) as running:
        yield running
        moved = running.end()
    assert moved.keys() == running.seen_off
    for name, (one,) in moved.items():
        assert one.rule in (MATRIX[name].rules if name in MATRIX else ERRORS)
        assert (one.before, one.after, one.share) == ("enabled", "fell_back", 0.0)
        assert one.estimate is not None
        assert one.limit is not None
        assert one.n >= 10


@dataclass
class Came:
    """What came of the whole matrix, driven at once."""

    answers: dict[str, list[Answer]]
    continued: dict[str, int]
    """Requests that target-only got, by fault."""


@pytest.fixture(scope="module")
def came(pair):
    """All rows at once: each has the time that it needs, and no more."""

    async def drive() -> list[list[Answer]]:
        rows = MATRIX.items()
        return await asyncio.gather(*(pair.all(fault.n, name, name) for name, fault in rows))

    answers = dict(zip(MATRIX, asyncio.run(drive()), strict=True))
    return Came(answers, pair.target.get("/seen"))


@pytest.mark.parametrize("name", MATRIX)
def test_matrix(pair, came, name):
    """The client has one whole answer or one clear error; nothing lost, nothing doubled."""
    fault, answers = MATRIX[name], came.answers[name]
    for answer in answers:
        assert answer.status == 200
        assert not answer.is_cut
        assert answer.arm == ("target_only" if fault.kind == "restarted" else "speculative")
        if fault.kind == "broken":
            assert "cannot be continued" in events_of(answer.raw)[-1]["error"]["message"]
        else:
            assert answer.is_whole, answer.raw
    twice = fault.kind == "restarted"
    receipts = pair.kept(fault.n * (2 if twice else 1), name)
    assert len({r.pair_id for r in receipts}) == fault.n
    assert len({r.receipt_id for r in receipts}) == len(receipts)
    first = [r for r in receipts if r.attempt == 0]
    assert {(r.arm, r.error_class, r.handover_kind) for r in first} == {
        ("speculative", fault.error, fault.kind)
    }
    again = [r for r in receipts if r.attempt == 1]
    assert len(again) == (fault.n if twice else 0)
    assert all((r.arm, r.outcome, r.decision) == ("target_only", "ok", "fell_back") for r in again)
    if fault.kind == "exact":
        joints = {(r.outcome, r.handover_at, r.completion_tokens) for r in first}
        assert joints == {("ok", N_BEGUN, len(IDS))}
    assert came.continued.get(name, 0) == (0 if fault.kind in (None, "broken") else fault.n)
    if fault.rules:
        pair.off(name)
    (later,) = pair.ask_now(1, "good", name)
    assert later.is_whole
    assert later.arm == ("target_only" if fault.rules else "speculative")
    if fault.rules:
        assert later.headers["x-speccheck-decision"].startswith("fell_back: fell_back: ")


def test_a_server_that_is_stopped(pair):
    """It holds its connections and says nothing: in time, all is as if it had died."""
    pid = pair.speculative.process.pid
    try:
        answers = pair.held(12, "stopped", lambda: os.kill(pid, signal.SIGSTOP))
        assert all(answer.is_whole for answer in answers)
        assert {r.error_class for r in pair.kept(12, "stopped")} == {"stall"}
        pair.off("stopped")
        assert pair.ask_now(1, "good", "stopped")[0].arm == "target_only"
    finally:
        os.kill(pid, signal.SIGCONT)
    (after,) = pair.ask_now(1, "good", "spare")
    assert (after.is_whole, after.arm) == (True, "speculative")


def test_a_server_that_is_killed(pair):
    """Running answers are continued, new ones go to target-only, and the route falls back."""
    answers = pair.held(12, "killed", pair.speculative.kill)
    pair.off("killed")
    (late,) = pair.ask_now(1, "good", "killed")
    pair.speculative.start()
    assert all(answer.is_whole and answer.arm == "speculative" for answer in answers)
    assert late.is_whole
    assert late.headers["x-speccheck-decision"].startswith("fell_back: fell_back: ")
    assert str(pair.speculative.port) not in str(late.headers)
    joined = [r for r in pair.kept(13, "killed") if r.handover_kind == "exact"]
    assert len(joined) == 12


def test_target_only_is_down(pair):
    """Speculation does not become the only arm: what was decided for target-only ends in an error,
    /health says so, and an answer that would have to be continued breaks with a clear error.
    """
    off = pair.folder / "out" / "gateway" / "off" / "down"
    pair.target.kill()
    off.touch()
    (refused,) = pair.ask_now(1, "good", "down")
    off.unlink()
    (served,) = pair.ask_now(1, "good", "down")
    (broken,) = pair.ask_now(1, "reset", "down")
    (neither,) = pair.ask_now(1, "500", "down")
    with pytest.raises(urllib.error.HTTPError) as health:
        urllib.request.urlopen(f"{pair.url}/health", timeout=WAIT_S)
    pair.target.start()
    assert (refused.status, refused.arm) == (502, "target_only")
    assert json.loads(refused.raw)["error"]["message"].startswith("target_only: ")
    assert str(pair.target.port) not in refused.raw.decode()
    assert (served.is_whole, served.arm) == (True, "speculative")
    assert "cannot be continued" in events_of(broken.raw)[-1]["error"]["message"]
    assert neither.status == 502
    assert health.value.code == 503
    assert json.loads(health.value.read())["target_only"] == "down"
    assert [(r.arm, r.outcome) for r in pair.kept(5, "down")] == [
        ("target_only", "error"),
        ("speculative", "ok"),
        ("speculative", "incomplete"),
        ("speculative", "error"),
        ("target_only", "error"),
    ]
    assert pair.ask_now(1, "reset", "down")[0].is_whole


# --- what can happen to the gateway -------------------------------------------------------------


def test_a_worker_is_killed(pair):
    """Its clients see their connection closed; the other's, and all that come later, are served."""
    victims: list[int] = []

    def workers() -> list[int]:
        return children(pair.process.pid, "speccheck.gateway.worker")

    def kill() -> None:
        assert len(workers()) == 2
        victims.append(max(workers(), key=lambda pid: len(list(Path(f"/proc/{pid}/fd").iterdir()))))
        os.kill(victims[0], signal.SIGKILL)
        pair.speculative.get("/go")  # at once: the other's answers are not to stall

    answers = pair.held(8, "worker", kill)
    eventually(lambda: "it is started again" in pair.err)
    cut = [answer for answer in answers if answer.is_cut]
    assert cut
    assert all(b"[DONE]" not in answer.raw for answer in cut)
    assert all(answer.is_whole for answer in answers if not answer.is_cut)
    eventually(lambda: "worker_restarts_total 1.0" in metrics(pair.url))
    eventually(lambda: len(workers()) == 2)
    assert victims[0] not in workers()
    eventually(lambda: "speccheck_gateway_in_flight 0.0" in metrics(pair.url))
    assert all(answer.is_whole for answer in pair.ask_now(8, "good", "worker"))
    assert len(pair.kept(16 - len(cut), "worker")) == 16 - len(cut)


def test_the_store_is_locked_and_then_the_disk_is_full(tmp_path):
    """Requests flow; what does not fit the queue is counted and shown, the rest is written later.

    The disk is full where no file of the gateway's parent may grow.
    """
    with live(tmp_path, gateway={"receipts": 5}) as running:
        eventually(running.store.exists)
        holder = eventually(lambda: held_by(running.store))
        try:
            assert all(answer.is_whole for answer in running.ask_now(12, "good"))
            eventually(lambda: "receipts_lost_total 7.0" in metrics(running.url))
            eventually(lambda: "receipts wait: " in running.err)
            assert "5 waiting, 7 lost" in run(tmp_path, "route", "status").stdout
        finally:
            holder.communicate("")
        eventually(lambda: "receipts are written again" in running.err)
        assert len(running.kept(5)) == 5

        pid, most = running.process.pid, resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, most))
        assert all(answer.is_whole for answer in running.ask_now(12, "good"))
        eventually(lambda: running.err.count("receipts wait: ") == 2)
        assert all(answer.is_whole for answer in running.ask_now(12, "good"))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        eventually(lambda: running.err.count("receipts are written again") == 2)
        assert all(answer.is_whole for answer in running.ask_now(1, "good"))
        assert running.end() == {}
    with Store.read(running.store) as store:
        n = len(store.receipts(store.runs()[0].run_id))
    assert 5 < n < 30  # of 37, 7 are lost to the lock
    assert f"lost: {37 - n} receipts ({n} were written)" in running.err


def held_by(path: Path) -> subprocess.Popen[str] | None:
    """A process that holds the store, once it could."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() == "held\n":
        return holder
    holder.communicate("")
    return None


CLOCK = """
import os, time
from pathlib import Path
_file, _time_ns = Path(os.environ["TEST_CLOCK"]), time.time_ns
time.time_ns = lambda: _time_ns() + int(_file.read_text())
time.time = lambda: time.time_ns() / 1e9
"""


def test_the_clock_is_set(tmp_path):
    """Days forward and back: times, windows and cool-downs are those of a clock that is not set."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CLOCK)
    clock = tmp_path / "clock"
    clock.write_text("0")
    day_ns = 86_400 * 10**9
    path = f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with live(tmp_path, env={"PYTHONPATH": path, "TEST_CLOCK": str(clock)}) as running:
        running.ask_now(6, "good")
        clock.write_text(str(2 * day_ns))
        running.ask_now(6, "good")
        clock.write_text(str(-day_ns))
        assert all(answer.is_whole for answer in running.ask_now(24, "reset"))
        running.off("chat")
        clock.write_text(str(3 * day_ns))  # far beyond the cool-down, by the wall clock
        assert running.ask_now(1, "good")[0].arm == "target_only"
        receipts = running.kept(37)
        (moved,) = running.end()["chat"]
    assert all(r.scheduled_ns <= r.sent_ns <= r.done_ns for r in receipts)
    assert all(r.done_ns - r.scheduled_ns < WAIT_S * 1e9 for r in receipts)
    assert moved.rule in ERRORS
    assert moved.window_s is not None
    assert 0 <= moved.window_s < 2 * WAIT_S


def test_the_gateway_is_killed(tmp_path):
    """What it had written stays, workers go with it, and the next one stands where it stood."""
    with live(tmp_path) as running:
        running.ask_now(24, "reset")
        running.off("chat")
        running.kept(24)
        eventually(lambda: transitions(running.store))
        workers = children(running.process.pid, "speccheck.gateway.worker")
        running.process.kill()
        running.process.wait()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        again = begin(tmp_path, {})
        try:
            assert again.stdout is not None
            url = json.loads(again.stdout.readline())["url"]
            second = Live(tmp_path, url, again, running.target, running.speculative)
            (answer,) = second.ask_now(1, "good")
            assert answer.is_whole
            assert answer.headers["x-speccheck-decision"].startswith("fell_back: fell_back: ")
            assert second.kept(25)[-1].arm == "target_only"
            reset = ("fallback", "reset", "chat", "--reason", "test")
            eventually(lambda: run(tmp_path, *reset).returncode == 0)
            eventually(lambda: 'state="probation"' in metrics(url))
            moved = second.end()["chat"]
        finally:
            stop(again)
    assert [(one.seq, one.after) for one in moved] == [(0, "fell_back"), (1, "probation")]


def transitions(path: Path) -> list[RecordedTransition]:
    """What the store has; none while the gateway writes."""
    try:
        with Store.read(path) as store:
            return store.transitions("faults")
    except StoreError:
        return []
