"""Watching a pair of real processes that are killed, stopped, hung and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from live_route import S, served, settings

from speccheck import fallback
from speccheck.cli import cli
from speccheck.cli.watch import lines, moved_line, table
from speccheck.config import Guardrails, Rollout
from speccheck.errors import ExitCode, UsageError
from speccheck.hooks import Hooks
from speccheck.records import GATEWAY, Arm, ArmDescription, RouteState, Transition, digest
from speccheck.store import Run, Store
from speccheck.watch import Follower, View, Watched, follow, urls_of

HERE = Path(__file__).parent
SPEC, TARGET = Arm.SPECULATIVE, Arm.TARGET_ONLY
QUICK = {"cool_down_s": 0.5, "max_unreachable_s": 0.5, "max_stall_s": 0.5, "probation_requests": 8}


class Server:
    """A server process of ours."""

    def __init__(self, arm: Arm, folder: Path) -> None:
        self.arm = arm
        self.told = folder / f"{arm}.told"
        self.tell("well")
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had."""
        argv = [HERE / "metrics_server.py", self.told, self.arm, str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, argv)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def tell(self, mode: str) -> None:
        """Whole at every moment: it is read at each scrape."""
        new = self.told.with_suffix(".new")
        new.write_text(mode)
        new.replace(self.told)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[dict[Arm, Server]]:
    servers = {arm: Server(arm, tmp_path) for arm in Arm}
    yield servers
    for server in servers.values():
        with suppress(ProcessLookupError):
            server.signal(signal.SIGCONT)
        server.kill()


def rollout(**config: Any) -> Rollout:
    return Rollout(
        name="watched",
        speculation={"method": "ngram"},
        routes=({"name": "chat"},),
        fallback=QUICK | config,
    )


RULES = Guardrails(speculative_decoding_guardrails={"min_acceptance_rate": 0.3})


class Watch:
    """A watch in this process, that acts when it has seen something."""

    def __init__(self, pair: dict[Arm, Server], store: Path | None = None, **config: Any) -> None:
        loaded = rollout(**config)
        self.moved: list[Transition] = []
        self.views: list[View] = []
        self.said: list[str] = []
        self.hooks = Hooks(loaded.fallback.hooks, say=self.said.append)
        urls = {arm: server.url for arm, server in pair.items()}
        self.follower = Follower(
            Watched(loaded, RULES, urls, store, None, 0.05, 0.2), self.hooks, self.moved.append
        )
        self.follower.begin()

    def until(self, holds: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Look on until something holds."""
        until = time.monotonic() + within_s

        def ends(_: object) -> bool:
            assert time.monotonic() < until, lines(self.views[-1])
            return holds()

        asyncio.run(follow(self.follower, on_view=self.views.append, rounds=None, ends=ends))

    def looks(self, more: int) -> None:
        """Look on so often."""
        asyncio.run(
            follow(self.follower, on_view=self.views.append, rounds=more, ends=lambda _: False)
        )

    @property
    def state(self) -> RouteState:
        return self.follower.machines["chat"].state


def test_a_server_that_is_killed_turns_the_route_off_and_comes_back(pair, tmp_path):
    """Kill -9, the hook is told, and once another process answers the route is tried again."""
    told = tmp_path / "hook"
    hook = f'echo "$SPECCHECK_BEFORE $SPECCHECK_AFTER $SPECCHECK_RULE" >> {told}'
    watch = Watch(pair, hooks={"command": ["/bin/sh", "-c", hook], "command_timeout_s": 60})
    watch.looks(3)
    pair[SPEC].kill()
    watch.until(lambda: bool(watch.moved))
    assert watch.moved[0].rule == "max_unreachable_s"
    assert watch.follower.exit_code() is ExitCode.JUDGED_BAD
    watch.looks(5)
    assert watch.state is RouteState.FELL_BACK  # its cool-down is over, and nobody answers
    pair[SPEC].start()
    watch.until(lambda: watch.state is RouteState.ENABLED)
    watch.hooks.close()
    assert watch.said == []
    assert told.read_text().split("\n")[:3] == [
        "enabled fell_back max_unreachable_s",
        "fell_back probation cool_down",
        "probation enabled probation",
    ]


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_a_server_that_answers_no_more_turns_the_route_off(pair, how):
    """SIGSTOP, where the kernel still takes connections, and a /metrics that hangs."""
    watch = Watch(pair)
    watch.looks(3)
    if how == "stopped":
        pair[SPEC].signal(signal.SIGSTOP)
    else:
        pair[SPEC].tell("hang")
    watch.until(lambda: bool(watch.moved))
    assert watch.moved[0].rule == "max_unreachable_s"
    assert "no answer within" in watch.moved[0].why
    pair[SPEC].tell("well")
    pair[SPEC].signal(signal.SIGCONT)
    watch.until(lambda: watch.state is RouteState.ENABLED)


def test_tokens_that_stop_coming_and_a_draft_that_is_dead(pair):
    """The server answers all the while."""
    watch = Watch(pair)
    watch.looks(3)
    pair[SPEC].tell("stuck")
    watch.until(lambda: bool(watch.moved))
    pair[SPEC].tell("well")
    watch.until(lambda: watch.state is RouteState.ENABLED)
    pair[SPEC].tell("dead_draft")
    watch.until(lambda: watch.moved[-1].after is RouteState.FELL_BACK)
    rules = [m.rule for m in watch.moved if fallback.is_fallback(m)]
    assert rules == ["max_stall_s", "max_unaccepted_tokens"]


def test_a_server_that_restarts_soon_moves_nothing(pair):
    """Its counters begin anew: no rate is over one, and no route falls back."""
    watch = Watch(pair, max_unreachable_s=60)
    watch.looks(8)
    pair[SPEC].kill()
    watch.looks(2)
    pair[SPEC].start()
    watch.looks(8)
    assert watch.moved == []
    seen = [s.acceptance for v in watch.views for s in v.servers if s.acceptance is not None]
    assert seen
    assert all(0 < rate <= 1 for rate in seen)


def test_a_pair_that_is_down_could_not_be_judged(pair):
    """Neither server answers, so nothing says that it is speculation's fault."""
    for server in pair.values():
        server.kill()
    watch = Watch(pair)
    watch.looks(20)
    assert watch.moved == []
    assert watch.follower.exit_code() is ExitCode.COULD_NOT_JUDGE
    for server in pair.values():
        server.start()


def test_the_command_ends_with_ctrl_c_and_says_what_it_ended_with(pair, tmp_path):
    """JSON lines, and the exit code of the state."""
    file = tmp_path / "rollout.yaml"
    file.write_text(
        "name: watched\nspeculation: {method: ngram}\nroutes: [{name: chat}]\n"
        "fallback: {max_unreachable_s: 0.5, cool_down_s: 600}\n"
    )
    argv = [
        *(sys.executable, "-m", "speccheck", "watch", "--rollout", str(file), "--json"),
        *("--interval", "0.2", "--timeout", "0.2"),
        *("--target-only", pair[TARGET].url, "--speculative", pair[SPEC].url),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(json.loads(line))
        answered = "view" in told[-1] and not told[-1]["view"]["servers"][1]["failure"]
        if answered and pair[SPEC].process.poll() is None:
            pair[SPEC].kill()
        if "transition" in told[-1]:
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=60)
    told += [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == ExitCode.JUDGED_BAD, errors
    assert [t["transition"]["rule"] for t in told if "transition" in t] == ["max_unreachable_s"]
    assert told[-1]["exit_code"] == 1
    pair[SPEC].start()


def test_once_is_two_scrapes_and_one_exit_code(pair, tmp_path):
    """For a pipeline: the view of now, 0 where every route is enabled."""
    file = tmp_path / "rollout.yaml"
    file.write_text("name: w\nspeculation: {method: ngram}\nroutes: [{name: a}, {name: b}]\n")
    given = ["watch", "--rollout", str(file), "--once", "--interval", "0.2"]
    urls = ["--target-only", pair[TARGET].url, "--speculative", pair[SPEC].url]
    done = CliRunner().invoke(cli, [*given, *urls], standalone_mode=False)
    assert done.return_value is ExitCode.PASS, done.output
    assert "pair: enabled, share 1" in done.output  # without receipts routes are not told apart
    assert "exit code 0: every route is enabled" in done.output
    pair[SPEC].kill()
    done = CliRunner().invoke(cli, [*given, *urls], standalone_mode=False)
    assert done.return_value is ExitCode.COULD_NOT_JUDGE
    pair[SPEC].start()


def test_servers_that_nobody_names_are_a_usage_error():
    """An embedded rollout has no addresses of its own."""
    with pytest.raises(UsageError, match="give --target-only URL"):
        urls_of(rollout(), {})


# --- with a store ------------------------------------------------------------------------------

CONFIG = rollout(cool_down_s=600).model_dump(mode="json")
RUN = Run("run-1", 1, 0, "", "", {"gateway": True, "rollout": CONFIG})
ARMS = {arm: ArmDescription(arm, f"http://{arm}", "scripted 1", "target", None, {}) for arm in Arm}


def live(number: int, at_ns: int, **fields: Any) -> Any:
    made = served(number, at_ns, run_id="run-1", discarded_tokens=40, **fields)
    key = {"stage": GATEWAY, "engine_config_id": ARMS[Arm(made.arm)].engine_config_id}
    made = replace(made, **key)
    return replace(made, receipt_id=key_of(made))


def key_of(receipt: Any) -> str:
    fields = ("run_id", "stage", "phase", "arm", "prompt_id", "repeat", "attempt")
    return digest("receipt", [getattr(receipt, name) for name in fields])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "receipts.duckdb"
    with Store.open(path) as opened:
        opened.begin_run(RUN, wall_ns=time.time_ns(), clock_ns=time.perf_counter_ns())
        for arm in ARMS.values():
            opened.put_arm("run-1", arm)
    return path


def grow(path: Path, receipts: list[Any]) -> None:
    with Store.open(path) as opened:
        assert opened.append_receipts([(r, None) for r in receipts]) == len(receipts)


DEAD = {"outcome": "error", "error_class": "connection"}


def test_receipts_of_a_store_are_followed_and_its_rows_outlive_the_watch(pair, store):
    """The guard judges by receipts, keeps what it decided, and takes it up again."""
    watch = Watch(pair, store, cool_down_s=600)
    watch.looks(1)
    now = time.perf_counter_ns()
    grow(store, [live(i, now + i, completion_tokens=2, **DEAD) for i in range(12)])
    watch.until(lambda: bool(watch.moved))
    (moved,) = watch.moved
    assert moved.rule in ("max_error_rate", "max_engine_error_rate")
    with Store.read(store) as opened:
        (row,) = opened.transitions("watched", "chat")
        assert row.transition == moved
        assert opened.run(row.run_id).config["watch"] == "run-1"
        assert opened.verify() == []
    again = Watch(pair, store, cool_down_s=600)
    assert again.state is RouteState.FELL_BACK
    again.looks(2)
    assert again.moved == []
    assert again.views[-1].routes[0].why == moved.why


def test_a_store_that_is_held_is_tried_again(pair, store):
    """Nothing is lost while another process writes: not the receipts, not our rows."""
    watch = Watch(pair, store, cool_down_s=600)
    code = (
        "import sys; from speccheck.store import Store\n"
        f"with Store.open({str(store)!r}): print('held', flush=True); sys.stdin.read()"
    )
    now = time.perf_counter_ns()
    grow(store, [live(i, now + i, completion_tokens=2, **DEAD) for i in range(12)])
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    watch.looks(2)
    assert f"held by process {holder.pid}" in watch.views[-1].note
    holder.communicate()
    watch.until(lambda: bool(watch.moved) and not watch.follower.unwritten)
    with Store.read(store) as opened:
        assert len(opened.transitions("watched")) == 1


def test_a_route_that_somebody_else_moved_is_where_they_put_it(pair, store):
    """An operator's reset is obeyed, and what is decided after it can be written."""
    watch = Watch(pair, store, cool_down_s=600)
    now = time.perf_counter_ns()
    grow(store, [live(i, now + i, completion_tokens=2, **DEAD) for i in range(12)])
    watch.until(lambda: bool(watch.moved) and not watch.follower.unwritten)
    assert watch.state is RouteState.FELL_BACK
    assert invoke("reset", "chat", "--reason", "mended", "--out", str(store.parent))[0] == 0
    watch.looks(1)
    assert watch.state is RouteState.PROBATION
    now = time.perf_counter_ns()
    grow(store, [live(i, now + i, completion_tokens=2, **DEAD) for i in range(20, 40)])
    watch.until(lambda: len(watch.moved) == 2 and not watch.follower.unwritten)
    assert watch.views[-1].note == ""
    with Store.read(store) as opened:
        assert [row.transition.seq for row in opened.transitions("watched")] == [0, 1, 2]


def test_a_new_run_is_followed_from_its_beginning(pair, store):
    """A gateway that was started again with other settings has another run."""
    watch = Watch(pair, store, cool_down_s=600)
    watch.looks(1)
    other = replace(RUN, run_id="run-2", created_at_ns=2)
    with Store.open(store) as opened:
        opened.begin_run(other, wall_ns=time.time_ns(), clock_ns=time.perf_counter_ns())
        for arm in ARMS.values():
            opened.put_arm("run-2", arm)
    now = time.perf_counter_ns()
    made = [
        replace(live(i, now + i, completion_tokens=2, **DEAD), run_id="run-2") for i in range(12)
    ]
    grow(store, [replace(r, receipt_id=key_of(r)) for r in made])
    watch.until(lambda: bool(watch.moved))
    assert watch.state is RouteState.FELL_BACK
    with Store.open(store) as opened:  # the first one is taken up again
        opened.begin_run(RUN, wall_ns=time.time_ns(), clock_ns=time.perf_counter_ns())
    watch.looks(1)
    assert watch.follower.receipts is not None
    assert watch.follower.receipts.run_id == "run-1"


def test_a_cool_down_outlives_the_start_of_the_machine(pair, tmp_path):
    """The clock of a run from before it began anew: the wall clock says how long it has been."""
    path = tmp_path / "receipts.duckdb"
    day_ns, then_ns = 86_400 * 10**9, time.time_ns() - 30 * 10**9
    with Store.open(path) as opened:
        opened.begin_run(RUN, wall_ns=then_ns - day_ns, clock_ns=5, boot="another one")
    fell = Transition(
        route="chat",
        seq=0,
        at_ns=day_ns,
        before=RouteState.ENABLED,
        after=RouteState.FELL_BACK,
        rule="max_error_rate",
        cohort="",
        estimate=None,
        limit=None,
        unit="",
        window_s=None,
        n=9,
        share=0.0,
        fallbacks=1,
        why="it failed",
    )
    with Store.open(path) as opened:
        opened.append_transition("watched", fell, run_id="run-1", wall_ns=then_ns, settings="s")
    watch = Watch(pair, path, cool_down_s=600)
    watch.looks(2)
    assert watch.state is RouteState.FELL_BACK
    due_s = watch.views[-1].routes[0].due_s
    assert due_s is not None
    assert 0 < due_s <= 570


@pytest.mark.parametrize("url", ["gpu1:8000", "http://", "http://[::1:8000"])
def test_an_address_that_is_none_is_a_usage_error(url):
    """And no server that does not answer."""
    with pytest.raises(UsageError, match="--speculative: not an http"):
        urls_of(rollout(), {Arm.TARGET_ONLY: "http://[::1]:8000", Arm.SPECULATIVE: url})


def invoke(*argv: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["fallback", *argv], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value), done.output


def test_status_replay_and_reset_from_a_store(store):
    """What was decided live is decided again, byte for byte; an operator lets it be tried."""
    out = ("--out", str(store.parent))
    assert invoke("status", *out) == (0, "chat: enabled, as it began\n")
    machine = fallback.Machine(settings({"min_acceptance_rate": 0.3}), "chat")
    base = time.perf_counter_ns()
    receipts = [live(i, base + i * S, completion_tokens=40) for i in range(30)]
    receipts += [live(i, base + i * S, completion_tokens=2, **DEAD) for i in range(30, 60)]
    moved = [m for r in receipts if (m := machine.observe(r, r.done_ns))]
    assert [m.after for m in moved] == [RouteState.FELL_BACK]
    grow(store, receipts)
    with Store.open(store) as opened:
        opened.append_transition(
            "watched",
            moved[0],
            run_id="run-1",
            wall_ns=time.time_ns(),
            settings=machine.settings.digest,
        )
    code, said = invoke("status", *out)
    assert code == 1
    assert "chat: fell_back since" in said
    file = store.parent / "rollout.yaml"
    file.write_text(
        "name: watched\nspeculation: {method: ngram}\nguardrails: rules.yaml\n"
        "routes: [{name: chat}]\n"
    )
    (store.parent / "rules.yaml").write_text(
        "speculative_decoding_guardrails: {min_acceptance_rate: 0.3}\n"
    )
    code, said = invoke("replay", "--rollout", str(file), *out)
    assert (code, "as recorded" in said, "NOT" in said) == (1, True, False)
    assert moved_line(moved[0]) in said
    code, text = invoke("replay", "--rollout", str(file), "--json", *out)
    assert text == invoke("replay", "--rollout", str(file), "--json", *out)[1]
    assert json.loads(text)["routes"][0]["agrees"] is True
    code, said = invoke("reset", "chat", "--reason", "driver fixed", *out)
    assert (code, "fell_back -> probation" in said) == (0, True)
    code, said = invoke("status", "--json", *out)
    assert code == 3
    rows = json.loads(said)["routes"][0]["transitions"]
    assert rows[-1]["who"] == "an operator (driver fixed)"
    with pytest.raises(UsageError, match="nothing to reset"):
        invoke("reset", "chat", "--reason", "again", *out)
    with pytest.raises(UsageError, match="no route 'nope'"):
        invoke("reset", "nope", "--reason", "x", *out)


def replayed(path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code, text = invoke("replay", "--json", "--out", str(path.parent), *more)
    assert text == invoke("replay", "--json", "--out", str(path.parent), *more)[1]
    return code, json.loads(text)


def test_what_a_watch_decided_from_gauges_is_decided_again(pair, store):
    """Stuck, dead, well again, in two processes' lives: each move as recorded."""
    watch = Watch(pair, store)
    watch.looks(3)
    pair[SPEC].tell("stuck")
    watch.until(lambda: watch.state is RouteState.FELL_BACK)
    pair[SPEC].tell("well")
    watch.until(lambda: watch.state is RouteState.PROBATION)
    watch.follower.end()
    again = Watch(pair, store)
    again.looks(3)
    pair[SPEC].kill()
    again.until(lambda: again.state is RouteState.FELL_BACK)
    pair[SPEC].start()
    again.until(lambda: again.state is RouteState.PROBATION)
    again.follower.end()
    moved = [m.rule for m in (*watch.moved, *again.moved)]
    assert moved == ["max_stall_s", "cool_down", "max_unreachable_s", "cool_down"]
    code, told = replayed(store)
    (route,) = told["routes"]
    assert route["agrees"] is True
    assert [one["rule"] for one in route["transitions"]] == moved
    assert code == ExitCode.INCONCLUSIVE


def test_what_a_watch_decided_from_receipts_that_came_late_is_decided_again(pair, store):
    """Handed in long after they ended, between scrapes, in portions, beside an operator's reset."""
    watch = Watch(pair, store, cool_down_s=600)
    watch.looks(3)
    first = time.perf_counter_ns()
    watch.until(lambda: time.perf_counter_ns() > first + 2 * S)
    for portion in range(4):
        numbers = range(5 * portion, 5 * portion + 5)
        grow(store, [live(i, first + i, completion_tokens=2, **DEAD) for i in numbers])
        watch.looks(1)
    watch.until(lambda: bool(watch.moved) and not watch.follower.unwritten)
    assert invoke("reset", "chat", "--reason", "mended", "--out", str(store.parent))[0] == 0
    watch.looks(1)
    now = time.perf_counter_ns()
    grow(store, [live(i, now + i, completion_tokens=2, **DEAD) for i in range(20, 40)])
    watch.until(lambda: len(watch.moved) == 2 and not watch.follower.unwritten)
    watch.follower.end()
    _, told = replayed(store)
    (route,) = told["routes"]
    assert route["agrees"] is True
    assert route["receipts"] == 40
    assert [one["after"] for one in route["transitions"]] == ["fell_back", "fell_back"]
    # The live run has no decisions of its own.
    _, told = replayed(store, "--run", "run-1")
    assert told["routes"][0]["agrees"] is None
    with Store.read(store) as opened:
        assert opened.verify() == []


def test_a_replay_of_other_receipts_says_so(store):
    """What the store says was decided, and what it rests on, do not agree: exit code 4."""
    out = ("--out", str(store.parent))
    machine = fallback.Machine(settings(), "chat")
    moved = [m for i in range(12) if (m := machine.observe(live(i, S + i, **DEAD), S + i))]
    with Store.open(store) as opened:
        opened.append_transition(
            "watched", moved[0], run_id="run-1", wall_ns=1, settings="fallback:other"
        )
    code, said = invoke("replay", *out)
    assert code == ExitCode.COULD_NOT_JUDGE
    assert "NOT as recorded; it was decided by other settings then" in said


def test_what_a_watch_without_kept_scrapes_decided_is_not_called_wrong(store):
    """As those of before did: its replay says that, not that the store was tampered with."""
    out = ("--out", str(store.parent))
    moved = Transition(
        route="chat",
        seq=0,
        at_ns=S,
        before=RouteState.ENABLED,
        after=RouteState.FELL_BACK,
        share=0.0,
        rule=fallback.UNREACHABLE,
        cohort="",
        estimate=None,
        limit=5.0,
        unit="s",
        window_s=10.0,
        n=3,
        fallbacks=1,
        why="the speculative server has not answered for 10 s",
    )
    with Store.open(store) as opened:
        opened.append_transition("watched", moved, run_id="run-1", wall_ns=1, settings="s")
    code, said = invoke("replay", *out)
    assert code == 0
    assert "NOT" not in said
    assert "it rests on scrapes, and none were kept in this run" in said


def test_a_view_fits_a_terminal_of_80_columns(pair):
    """Nothing of the screen is wider, whatever a server says."""
    from rich.console import Console

    watch = Watch(pair)
    watch.looks(4)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(table(watch.views[-1]))
    text = console.export_text()
    assert "min_acceptance_rate" in text
    assert all(len(line) <= 80 for line in text.splitlines())
