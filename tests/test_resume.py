"""A driving process killed at random moments: nothing acknowledged is lost, nothing is doubled."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_server import Script, ScriptedServer, answer

from speccheck import plan
from speccheck.records import Arm, Prompt, Stage, receipt_key
from speccheck.store import Store

RUN_ID = "run:resume"
N_PROMPTS = 150


def planned():
    """The plan of the driven process; pure, so this process knows it too."""
    import numpy as np

    prompts = [
        Prompt(f"p{i}", "qa", "chat", ({"role": "user", "content": f"{i}"},), 32, {"kind": "none"})
        for i in range(N_PROMPTS)
    ]
    rng = np.random.default_rng(11)
    greedy = plan.Phase(RUN_ID, Stage.REPLAY, "greedy", concurrency=3, keep_text=True)
    load = plan.Phase(RUN_ID, Stage.REPLAY, "load", concurrency=32)
    offsets = plan.poisson_offsets(100, 200.0, rng)
    return [
        *plan.closed_loop(greedy, prompts, rng=rng),
        *plan.open_loop(load, prompts, offsets, rng=rng),
    ]


def main(store_path: str, acknowledged_path: str, target_only: str, speculative: str) -> None:
    """What the killed process runs: resume, drive, and log what the store acknowledged."""
    import asyncio

    from speccheck.drive import Endpoint, MonotonicClock, drive
    from speccheck.records import ArmDescription
    from speccheck.store import Run

    arms = {
        arm: Endpoint(ArmDescription(arm, url, "scripted 1", "t", None), "policy", "t")
        for arm, url in ((Arm.TARGET_ONLY, target_only), (Arm.SPECULATIVE, speculative))
    }
    with Store.open(store_path) as store, Path(acknowledged_path).open("a") as acknowledged:
        run = Run(RUN_ID, 1, 11, "corpus:x", "rules:x", {})
        store.begin_run(run, wall_ns=time.time_ns(), clock_ns=time.perf_counter_ns())
        for endpoint in arms.values():
            store.put_arm(RUN_ID, endpoint.description)

        def write(batch) -> None:
            store.append_receipts(batch)
            acknowledged.write("".join(f"{receipt.receipt_id}\n" for receipt, _ in batch))
            acknowledged.flush()

        left = plan.remaining(planned(), RUN_ID, store.done_keys(RUN_ID, "replay"))
        asyncio.run(drive(left, arms, clock=MonotonicClock(), run_id=RUN_ID, write=write))


def steps_for(body, _n) -> Script:
    """The prompt decides the answer, so that a doubled request would look the same."""
    number = int(body["messages"][0]["content"])
    script = answer([[number, number + 1], [number + 2]])
    return Script([0.01, *script.parts], script.token_ids, script.text)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_a_killed_run_is_resumed_whole(tmp_path, how):
    """After any number of kills the receipts are exactly the plan, each of them once."""
    store_path, acknowledged_path = tmp_path / "s.duckdb", tmp_path / "acknowledged"
    moments = random.Random(3)
    expected = {receipt_key(request, RUN_ID) for request in planned()}
    done: set[str] = set()
    kills = cut = 0
    with ScriptedServer(steps_for) as one, ScriptedServer(steps_for) as other:
        arguments = [str(store_path), str(acknowledged_path), one.url, other.url]
        for _ in range(40):
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            # Counted from requests, not from the start: a busy machine may take seconds to import.
            enough = len(one.seen) + len(other.seen) + moments.randint(1, 40)
            while process.poll() is None and len(one.seen) + len(other.seen) < enough:
                time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Grows, so that the run gets on however slow the machine is.
                process.wait(moments.uniform(0.2, 0.8) + 0.1 * kills)
            if process.poll() is None:
                kills += 1
                process.send_signal(how)
                process.wait(30)
            with Store.open(store_path) as store:
                before, done = done, store.done_keys(RUN_ID, "replay")
                assert store.verify() == []
            acknowledged = acknowledged_path.read_text() if acknowledged_path.exists() else ""
            lines = acknowledged.split("\n")[:-1]
            cut += 0 < len(done) < len(expected)
            assert set(lines) <= done
            assert before <= done <= expected
            assert len(lines) == len(set(lines))
            if done == expected:
                break
        requests = len(one.seen) + len(other.seen)
    assert done == expected
    assert cut > 0, "no kill came in mid-run, so nothing was shown"
    assert requests >= len(expected)
    with Store.read(store_path) as store:
        receipts = store.receipts(RUN_ID)
        assert len(receipts) == len(expected)
        kept = store.answers(r.receipt_id for r in receipts)
    assert {r.outcome for r in receipts} == {"ok"}
    assert {r.receipt_id for r in receipts if r.phase == "greedy"} == set(kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
