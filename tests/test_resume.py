"""A driving process killed at random moments: nothing acknowledged is lost, nothing is doubled."""

from __future__ import annotations

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

    # Whoever runs the tests in the background may have them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


class Gate:
    """Lets the servers answer so many requests; those after hang until their client is killed."""

    def __init__(self) -> None:
        self.open = 0

    def __call__(self, body, _n) -> Script:
        """The prompt decides the answer, so that a doubled request would look the same."""
        if self.open <= 0:
            return Script([3600.0])
        self.open -= 1
        number = int(body["messages"][0]["content"])
        script = answer([[number, number + 1], [number + 2]])
        return Script([0.01, *script.parts], script.token_ids, script.text)


KILLS = 6


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_a_killed_run_is_resumed_whole(tmp_path, how):
    """After any number of kills the receipts are exactly the plan, each of them once."""
    store_path, acknowledged_path = tmp_path / "s.duckdb", tmp_path / "acknowledged"
    acknowledged_path.touch()
    moments = random.Random(3)
    expected = {receipt_key(request, RUN_ID) for request in planned()}
    done: set[str] = set()
    cut = 0
    gate = Gate()
    with ScriptedServer(gate) as one, ScriptedServer(gate) as other:
        arguments = [str(store_path), str(acknowledged_path), one.url, other.url]
        for kill in range(KILLS + 1):
            # Servers that stop answering keep the run from ending before it is killed, and a kill
            # that waits for a write falls into the run however slow the machine is.
            gate.open = moments.randint(20, 50) if kill < KILLS else sys.maxsize
            size = acknowledged_path.stat().st_size
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if kill < KILLS:
                while gate.open > 0 and process.poll() is None:
                    time.sleep(0.005)
                unwritten = kill % 2 == 0
                while unwritten and process.poll() is None:
                    unwritten = acknowledged_path.stat().st_size == size
                    time.sleep(0.005)
                time.sleep(moments.uniform(0, 0.4))
                process.send_signal(how)
            process.wait(120)
            with Store.open(store_path) as store:
                before, done = done, store.done_keys(RUN_ID, "replay")
                assert store.verify() == []
            lines = acknowledged_path.read_text().split("\n")[:-1]
            cut += 0 < len(done) < len(expected)
            assert set(lines) <= done
            assert before <= done <= expected
            assert len(lines) == len(set(lines))
        requests = len(one.seen) + len(other.seen)
    assert done == expected
    assert cut >= KILLS / 2, "kills must come in mid-run, or nothing was shown"
    assert requests >= len(expected)
    with Store.read(store_path) as store:
        receipts = store.receipts(RUN_ID)
        assert len(receipts) == len(expected)
        kept = store.answers(r.receipt_id for r in receipts)
    assert {r.outcome for r in receipts} == {"ok"}
    assert {r.receipt_id for r in receipts if r.phase == "greedy"} == set(kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
