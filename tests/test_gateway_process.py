"""The gateway as its users run it: real processes, the embedded pair, the openai client, curl.

Both servers are real. A proxy in front of the speculative one cuts its answers after a given number
of events; `kill -9` of the server itself comes last.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import openai
import pytest
from gateway_pair import gateway
from scripted_server import ScriptedServer, refusal
from test_engine_server import Running as Engine
from test_store import receipt

from speccheck import fallback, launch
from speccheck.config import FallbackConfig
from speccheck.corpus import load_corpus
from speccheck.errors import UsageError
from speccheck.gateway import control
from speccheck.gateway.board import Board
from speccheck.gateway.exercise import CUTS, exercise
from speccheck.gateway.outbox import Moved, Writer
from speccheck.gateway.relay import Events, payload_of
from speccheck.records import Arm
from speccheck.store import Run, Store

SPEC = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}
CORPORA = Path(__file__).resolve().parent.parent / "corpora"
WAIT_S = 120.0
PROMPTS = ("json", "prose", "code")
MAX_TOKENS = 24


def messages(task: str, n: int = 0) -> list[dict[str, str]]:
    """A prompt of the packaged corpus."""
    line = (CORPORA / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[n]
    return json.loads(line)["messages"]


def eventually(check: Callable[[], Any]) -> Any:
    """The first true value of a check."""
    deadline = time.monotonic() + WAIT_S
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[Arm, Engine]]:
    """The packaged pair, as two server processes."""
    pair = {
        Arm.TARGET_ONLY: Engine({"seed": 1}),
        Arm.SPECULATIVE: Engine({"seed": 1, "speculative_config": SPEC}),
    }
    yield pair
    for engine in pair.values():
        engine.process.kill()
        engine.process.wait()


class Cutter:
    """Passes everything on to a server, and resets the connection after so many chat events."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self.cut_after: int | None = None
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _connection(self, reader, writer) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)

        n_events = 0

        async def up() -> None:
            nonlocal n_events
            while data := await reader.read(65_536):
                n_events = 0  # another request on a kept connection
                up_writer.write(data)
            up_writer.close()

        task = asyncio.ensure_future(up())
        last = b""
        while data := await up_reader.read(65_536):
            at = 0
            while self.cut_after is not None and (end := (last + data).find(b"\n\n", at)) >= 0:
                n_events, at = n_events + 1, end + 2
                if n_events == self.cut_after:
                    writer.write(data[: at - len(last)])
                    await writer.drain()
                    up_writer.transport.abort()
                    writer.close()
                    task.cancel()
                    return
            last = data[-1:] if at < len(last + data) else b""
            writer.write(data)
        writer.close()
        task.cancel()


@pytest.fixture(scope="module")
def cutting(engines, tmp_path_factory):
    """Two gateways over the real pair: cut at each event, and at each token.

    The second has target-only as its first arm too, since that sends one token an event.
    """
    folder = tmp_path_factory.mktemp("cut")
    target = engines[Arm.TARGET_ONLY].url
    made = {}
    with Cutter(engines[Arm.SPECULATIVE].url) as blocks, Cutter(target) as tokens:
        for name, cutter in (("blocks", blocks), ("tokens", tokens)):
            (folder / name).mkdir()
            urls = {Arm.TARGET_ONLY: target, Arm.SPECULATIVE: cutter.url}
            context = gateway(folder / name, urls=urls)
            made[name] = (context.__enter__(), cutter, context)
        yield {name: pair[:2] for name, pair in made.items()}
        for _, _, context in made.values():
            context.__exit__(None, None, None)


def streamed(url: str, **body: Any) -> tuple[str, list[int], list[str], dict[str, Any]]:
    """Text, ids, finish reasons and usage of a streamed chat."""
    wanted = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    data = json.dumps({"temperature": 0, "max_tokens": MAX_TOKENS, **wanted, **body}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, kind)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        raw = reply.read()
    events = [json.loads(p) for e in Events().feed(raw) if (p := payload_of(e)) != b"[DONE]"]
    assert raw.endswith(b"data: [DONE]\n\n")
    assert not [e for e in events if "error" in e], raw
    choices = [c for e in events for c in e["choices"]]
    assert sum("role" in c["delta"] for c in choices) == 1
    assert len({e["id"] for e in events}) == 1
    return (
        "".join(c["delta"].get("content") or "" for c in choices),
        [t for c in choices for t in c.get("token_ids") or ()],
        [c["finish_reason"] for c in choices if c["finish_reason"]],
        next(e["usage"] for e in events if not e["choices"]),
    )


@pytest.mark.parametrize("which", ["blocks", "tokens"])
@pytest.mark.parametrize("task", PROMPTS)
def test_cut_anywhere_the_answer_is_target_onlys(cutting, engines, which, task):
    """At temperature 0, token for token, at every cut point: after each event of either kind."""
    running, cutter = cutting[which]
    asked = {"messages": messages(task)}
    truth = streamed(engines[Arm.TARGET_ONLY].url, **asked)
    n_joined = 0
    for events in range(1, MAX_TOKENS + 2):
        cutter.cut_after = events
        before = len(running.kept.receipts)
        answer = streamed(running.url, **asked)
        assert answer[:3] == truth[:3], events
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer[3][name] == truth[3][name]
        last = running.kept.wait(before + 1)[-1]
        if last.handover_kind is None:
            break
        assert last.handover_kind in ("exact", "restarted")
        n_joined += 1
    assert n_joined >= (3 if which == "blocks" else min(len(truth[1]), 8) - 1)


@pytest.mark.parametrize("which", ["blocks", "tokens"])
def test_a_stop_string_over_the_joint_of_real_servers(cutting, engines, which):
    """Wherever the answer is cut, it ends before the stop string, with the same reason."""
    running, cutter = cutting[which]
    whole = streamed(engines[Arm.TARGET_ONLY].url, messages=messages("json"))[0]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]  # some tokens wide
    asked = {"messages": messages("json"), "stop": [stop]}
    truth = streamed(engines[Arm.TARGET_ONLY].url, **asked)
    assert stop not in truth[0]
    for events in range(1, MAX_TOKENS):
        cutter.cut_after = events
        before = len(running.kept.receipts)
        assert streamed(running.url, **asked)[:3] == truth[:3], events
        if running.kept.wait(before + 1)[-1].handover_kind is None:
            break


def test_a_repetition_penalty_goes_over_the_joint(cutting, engines):
    """It looks at prompt and answer alike, so that their border does not matter."""
    running, cutter = cutting["tokens"]
    asked = {"messages": messages("prose"), "repetition_penalty": 1.3, "ignore_eos": True}
    truth = streamed(engines[Arm.TARGET_ONLY].url, **asked)
    assert truth[1] != streamed(engines[Arm.TARGET_ONLY].url, messages=messages("prose"))[1]
    for events in (3, 7, 12, 20):
        cutter.cut_after = events
        assert streamed(running.url, **asked)[:3] == truth[:3], events


def test_the_exercise_cuts_answers_off_and_counts_what_came_of_them(engines):
    """On the real pair all are joined and equal; a server without ids is said, and not tried."""
    pair = launch.Arms(
        launch._describe(Arm.TARGET_ONLY, engines[Arm.TARGET_ONLY].url, None, None),
        launch._describe(Arm.SPECULATIVE, engines[Arm.SPECULATIVE].url, None, None),
    )
    prompts = load_corpus([CORPORA / f"{task}.jsonl" for task in PROMPTS]).prompts[::60]
    done = exercise(pair, prompts)
    assert done.answers >= 2
    assert (done.joined, done.broken, done.equal) == (done.answers, 0, done.answers)
    assert done.answers + done.ended == len(CUTS) * (len(prompts) - done.skipped)
    assert f"of {done.answers} answers cut off on purpose" in done.note
    with ScriptedServer(lambda _b, _n: refusal(404, "no")) as bare:
        other = launch.Arms(replace(pair.target_only, url=bare.url), pair.speculative)
        assert "was not exercised" in exercise(other, prompts).note
        assert all("messages" not in seen.body for seen in bare.seen)


# --- the command --------------------------------------------------------------------------------

ROLLOUT = {
    "name": "live",
    "engine": "embedded",
    "speculation": SPEC,
    "eligibility": "eligibility.yaml",
    "routes": [{"name": "chat", "tasks": ["*"]}],
    "gateway": {"port": 0, "workers": 2, "flush_s": 0.2},
    "fallback": {"max_unreachable_s": 1.0, "cool_down_s": 86_000},
}


@contextmanager
def command(folder: Path, rollout: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`speccheck gateway`, running; its URL and its process."""
    (folder / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
    policy = {"rules": [{"name": "all", "use": "speculate"}]}
    (folder / "eligibility.yaml").write_text(json.dumps(policy), encoding="utf-8")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "speccheck", "gateway", "--json"),
            *("--rollout", str(folder / "rollout.yaml"), "--out", str(folder / "out")),
        ],
        stdout=subprocess.PIPE,
        stderr=(folder / "err").open("w"),
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        yield json.loads(line)["url"], process
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.stdout.close()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another speccheck command on the gateway's folder."""
    return subprocess.run(
        [sys.executable, "-m", "speccheck", *arguments, "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def children(pid: int, word: str) -> list[int]:
    """Processes of this parent whose command line has a word in it."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            line = (stat.parent / "cmdline").read_bytes().decode()
        except (OSError, IndexError):
            continue
        if parent == pid and word in line:
            found.append(int(stat.parent.name))
    return sorted(found)


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S) as reply:
        return reply.read().decode()


def test_the_gateway_end_to_end(tmp_path):
    """One life of it: clients, kill switch, SIGHUP, a worker and a server killed, its end."""
    with command(tmp_path, ROLLOUT) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-secret-key", max_retries=0)
        asked = {"messages": messages("prose"), "temperature": 0, "max_tokens": 40}
        more = {"extra_body": {"ignore_eos": True}}

        def ask(arm: str, **extra: Any) -> str:
            reply = client.chat.completions.with_raw_response.create(
                model="speccheck-target", **asked, **more, **extra
            )
            assert reply.headers["x-speccheck-arm"] == arm
            return reply.parse().choices[0].message.content

        truth = ask("speculative")
        assert [model.id for model in client.models.list()] == ["speccheck-target"]
        done = client.completions.create(model="speccheck-target", prompt="a", max_tokens=2)
        assert done.usage.completion_tokens <= 2
        curl = subprocess.run(
            [
                *("curl", "-sN", "-i", f"{url}/v1/chat/completions"),
                *("-d", json.dumps({**asked, "ignore_eos": True, "stream": True})),
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        ).stdout
        assert "x-speccheck-decision: speculate: rule 'all'" in curl
        assert curl.endswith("data: [DONE]\n\n")

        # The kill switch, by command.
        assert run(tmp_path, "route", "disable", "chat").returncode == 0
        assert ask("target_only") == truth
        status = json.loads(run(tmp_path, "route", "status", "--json").stdout)
        assert status["routes"]["chat"]["is_disabled"] is True
        assert run(tmp_path, "route", "enable", "chat").returncode == 0
        assert ask("speculative") == truth

        # SIGHUP: a new policy, and a wrong one, which changes nothing.
        rule = {"name": "none", "use": "target_only", "reason": "not today"}
        policy = tmp_path / "eligibility.yaml"
        policy.write_text(json.dumps({"rules": [rule]}), encoding="utf-8")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "read again" in (tmp_path / "err").read_text())
        assert ask("target_only") == truth
        long = [{"name": f"r{n}", "use": "speculate", "reason": "x" * 20_000} for n in range(60)]
        wrong = ("rules: [", "rules: " + "[" * 5000, json.dumps({"rules": long}))
        for n, text in enumerate(wrong, 1):
            policy.write_text(text, encoding="utf-8")
            process.send_signal(signal.SIGHUP)
            eventually(lambda n=n: (tmp_path / "err").read_text().count("stays as it was") == n)
            assert ask("target_only") == truth
        policy.write_text(json.dumps({"rules": [{"name": "all", "use": "speculate"}]}))
        process.send_signal(signal.SIGHUP)
        eventually(lambda: (tmp_path / "err").read_text().count("read again") == 2)

        # A worker is killed: it is started again, and the other one serves meanwhile.
        worker = children(process.pid, "speccheck.gateway.worker")[0]
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: "it is started again" in (tmp_path / "err").read_text())
        assert ask("speculative") == truth
        eventually(lambda: "worker_restarts_total 1.0" in metrics(url))

        # The speculative server is killed in mid-stream.
        server = children(process.pid, "num_speculative_tokens")[0]
        pieces = []
        with client.chat.completions.create(
            model="speccheck-target",
            stream=True,
            stream_options={"include_usage": True},
            **asked,
            **more,
        ) as stream:
            for chunk in stream:
                pieces += [c.delta.content or "" for c in chunk.choices]
                if len(pieces) == 3:
                    os.kill(server, signal.SIGKILL)
                if chunk.usage is not None:
                    assert chunk.usage.completion_tokens == 40
        assert "".join(pieces) == truth
        assert ask("target_only") == truth
        # Another gateway on the same folder is refused and takes nothing away.
        second = run(tmp_path, "gateway", "--rollout", str(tmp_path / "rollout.yaml"))
        assert second.returncode == 2
        assert f"a gateway runs there already (PID {process.pid})" in second.stderr
        page = metrics(url)
        assert 'handovers_total{kind="restarted",route="chat"} 1.0' in page
        health = json.loads(urllib.request.urlopen(f"{url}/health", timeout=WAIT_S).read())
        assert health["target_only"] == "ok"
        assert health["speculative"] == "down"

        # The guard sees it too, and the next request knows.
        eventually(lambda: "chat: enabled -> fell_back: " in (tmp_path / "err").read_text())
        assert ask("target_only") == truth
        eventually(lambda: 'route_state{route="chat",state="fell_back"} 1.0' in metrics(url))

        # Others can read the store while the gateway runs.
        listed = eventually(lambda: run(tmp_path, "receipts", "list", "--json").stdout)
        assert "gateway" in listed
        workers = children(process.pid, "speccheck.gateway.worker")
    assert process.returncode == 0
    for pid in workers:
        assert not Path(f"/proc/{pid}").exists()
    with Store.read(tmp_path / "out" / "receipts.duckdb") as store:
        receipts = store.receipts(store.runs()[0].run_id)
        assert store.verify() == []
        (row,) = store.transitions("live")
    assert (row.transition.rule, row.transition.after) == ("max_unreachable_s", "fell_back")
    assert receipts[-1].decision_reason.startswith("fell_back: the speculative server has not")
    assert "127.0.0.1" not in row.transition.why  # it is told to clients
    again = run(tmp_path, "fallback", "replay")
    assert again.returncode == 1
    assert "max_unreachable_s" in again.stdout
    assert "  as recorded\n" in again.stdout
    kinds = [r.handover_kind for r in receipts if r.handover_kind]
    assert kinds == ["exact", "restarted"]
    assert {r.policy_version for r in receipts} > {receipts[0].policy_version}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-secret-key" not in written
    prompt = messages("prose")[-1]["content"].encode()
    assert prompt not in written


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    """Before anything is started: an admin token that is not there, and no gateway to switch."""
    rollout = {**ROLLOUT, "eligibility": None, "gateway": {"admin_token_env": "SURELY_NOT_SET"}}
    (tmp_path / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
    done = run(tmp_path, "gateway", "--rollout", str(tmp_path / "rollout.yaml"))
    assert done.returncode == 2
    assert "SURELY_NOT_SET is not set" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with pytest.raises(UsageError, match="no gateway has run there"):
        control.switch(tmp_path, "chat", is_off=True)


def test_only_routes_that_there_are_can_be_switched(tmp_path):
    """By name, as the board lists them."""
    (tmp_path / "gateway" / "off").mkdir(parents=True)
    said = {"routes": {"chat": {"share": 1.0, "state": "enabled", "reason": ""}}}
    Board.create(
        tmp_path / "gateway" / "board", {**said, "policy_version": "p", "receipts": {}}
    ).close()
    with pytest.raises(UsageError, match="no route nope; there are: chat"):
        control.switch(tmp_path, "nope", is_off=True)
    control.switch(tmp_path, "chat", is_off=True)
    control.switch(tmp_path, "chat", is_off=True)
    assert control.status(tmp_path)["routes"]["chat"]["is_disabled"] is True
    control.switch(tmp_path, "chat", is_off=False)
    assert control.status(tmp_path)["routes"]["chat"]["is_disabled"] is False
    assert control.status(tmp_path)["is_running"] is False


# --- receipts where the store takes none --------------------------------------------------------

RUN = Run("run-1", 1_000, 7, "c", "r", {})
HOLD = """
import sys
from speccheck.store import Store
with Store.open(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
FULL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from test_gateway_process import writer_of
from test_store import receipt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
said = []
writer = writer_of({path!r}, said, limit=3000)
writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
for n in range(4000):
    writer.put((receipt(n, error_message=str(n) * 100), None))
writer.flush()
print(writer.written, writer.lost, writer.waiting, said[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def writer_of(path: Any, said: list[str], *, limit: int) -> Writer:
    """A writer that is flushed by hand."""

    def begin(store: Store) -> None:
        store.begin_run(RUN, wall_ns=1, clock_ns=1)

    return Writer(Path(path), begin=begin, limit=limit, every_s=999, say=said.append)


def test_receipts_wait_while_the_store_is_locked(tmp_path):
    """Held by another process: kept up to the limit, then lost and counted; later written."""
    path = tmp_path / "receipts.duckdb"
    Store.open(path).close()
    said: list[str] = []
    writer = writer_of(path, said, limit=5)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    for n in range(8):
        writer.put((receipt(n), None))
    writer.flush()
    writer.flush()
    assert (writer.lost, writer.waiting, writer.written) == (3, 5, 0)
    assert "held by process" in writer.problem
    assert len(said) == 1  # once, not at each try
    holder.communicate("")
    writer.flush()
    assert (writer.lost, writer.waiting, writer.written, writer.problem) == (3, 0, 5, "")
    assert said[1] == "receipts are written again"
    with Store.read(path) as store:
        assert len(store.receipts("run-1")) == 5


def test_transitions_are_kept_and_those_of_others_are_found(tmp_path):
    """A guard's own moves are rows; where an operator moved the route meanwhile, that stands."""
    path = tmp_path / "receipts.duckdb"
    told: list[tuple[list[Any], set[str]]] = []

    def begin(store: Store) -> None:
        store.begin_run(RUN, wall_ns=1, clock_ns=1)

    writer = Writer(
        path,
        begin=begin,
        limit=5,
        every_s=999,
        say=print,
        rollout="live",
        run_id="run-1",
        found=lambda rows, overtaken: told.append((rows, overtaken)),
    )
    machine = fallback.Machine(fallback.sticky(FallbackConfig()), "chat")
    off = machine.disable(5, "me")
    assert off is not None
    writer.put_transition(Moved(off, 5, "s"))
    writer.flush()
    assert [row.transition for row in told[-1][0]] == [off]
    writer.flush()
    assert len(told) == 1  # nothing new: the store is left alone
    back = machine.reset(9, "you")
    assert back is not None
    with Store.open(path) as store:
        store.append_transition("live", back, run_id="", wall_ns=9, settings="s")
    writer.flush()
    assert [row.transition for row in told[-1][0]] == [off, back]
    late = replace(back, why="ours, decided before we knew")
    writer.put_transition(Moved(late, 10, "s"))
    writer.flush()
    rows, overtaken = told[-1]
    assert [row.transition for row in rows] == [off, back]
    assert overtaken == {"chat"}


def test_receipts_wait_while_the_disk_is_full(tmp_path):
    """What was written stays, what does not fit is counted, and the writer goes on."""
    code = FULL.format(tests=str(Path(__file__).parent), path=str(tmp_path / "r.duckdb"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    written, lost, waiting, *words = done.stdout.split(" ")
    assert "disk is full" in " ".join(words)
    assert int(lost) >= 1000
    assert int(written) + int(lost) + int(waiting) == 4000
    with Store.open(tmp_path / "r.duckdb") as store:
        assert len(store.receipts("run-1")) >= int(written)
