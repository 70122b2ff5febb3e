"""The load loop against scripted servers: what is sent, when, and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from scripted_server import Script, ScriptedServer, answer, chunk, refusal, sse

from speccheck import plan
from speccheck.config import HealthLimits
from speccheck.drive import Endpoint, MonotonicClock, drive
from speccheck.errors import EngineError, StoreError, UsageError
from speccheck.health import HELD, pooled_health
from speccheck.records import Arm, ArmDescription, Prompt, Stage, receipt_key

B, S = Arm.TARGET_ONLY, Arm.SPECULATIVE


def prompts(n: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", "qa", "chat", ({"role": "user", "content": f"{i}"},), 32, {"kind": "none"})
        for i in range(n)
    ]


def phase(**changes) -> plan.Phase:
    return replace(plan.Phase("run", Stage.REPLAY, "greedy", concurrency=2), **changes)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def endpoint(arm: Arm, url: str) -> Endpoint:
    spec = {"num_speculative_tokens": 4} if arm is S else None
    return Endpoint(ArmDescription(arm, url, "scripted 1", "t", spec), "policy", "t")


class Arms:
    """Two scripted servers and what a drive against them wrote."""

    def __init__(self, servers: dict[Arm, ScriptedServer]) -> None:
        self.servers = servers
        self.written: list = []
        self.endpoints = {arm: endpoint(arm, server.url) for arm, server in servers.items()}

    async def drive(self, planned, **options):
        return await drive(
            planned,
            options.pop("arms", self.endpoints),
            clock=options.pop("clock", MonotonicClock()),
            run_id="run",
            write=options.pop("write", self.written.extend),
            limits=options.pop("limits", HealthLimits(lag_floor_s=60, loop_stall_s=60)),
            **options,
        )

    @property
    def receipts(self):
        return [receipt for receipt, _ in self.written]

    def sent(self, arm: Arm) -> list[str]:
        return [seen.body["messages"][0]["content"] for seen in self.servers[arm].seen]


@pytest.fixture
def serve():
    """Starts both arms with one script each, and stops them."""
    with ExitStack() as running:

        def start(script=lambda _body, _n: answer([[1], [2, 3]])) -> Arms:
            return Arms({arm: running.enter_context(ScriptedServer(script)) for arm in (B, S)})

        yield start


# --- what is sent -------------------------------------------------------------------------------


async def test_every_planned_request_is_sent_once(serve):
    """Both arms get each prompt, and each request has one receipt with its own key."""
    arms = serve()
    planned = plan.closed_loop(phase(), prompts(10), rng=rng(), repeats=2)
    report = await arms.drive(planned)
    assert {r.receipt_id for r in arms.receipts} == {receipt_key(r, "run") for r in planned}
    assert len(arms.receipts) == len(planned) == report.planned == report.completed == 40
    for arm in (B, S):
        assert Counter(arms.sent(arm)) == Counter({str(i): 2 for i in range(10)})
    assert report.outcomes == {"ok": 40}
    assert report.health.valid


async def test_closed_loop_keeps_to_its_concurrency(serve):
    """No arm ever has more requests in flight than planned, and connections are reused."""
    flying: Counter[int] = Counter()
    peak: Counter[int] = Counter()

    def script(_body, _n):
        thread = threading.get_ident()
        flying[thread] += 1
        peak[thread] = max(peak[thread], flying[thread])
        return CountedScript(flying, thread)

    class CountedScript(Script):
        """Leaves the flight when its last part is taken."""

        def __init__(self, count, thread) -> None:
            super().__init__([*answer([[1]]).parts[:-1], 0.01])
            whole = self.parts

            def parts():
                yield from whole
                count[thread] -= 1
                yield answer([[1]]).parts[-1]

            self.parts = parts()

    arms = serve(script)
    await arms.drive(plan.closed_loop(phase(concurrency=3), prompts(20), rng=rng()))
    assert sorted(peak.values()) == [3, 3]
    for server in arms.servers.values():
        assert {seen.connection for seen in server.seen} == {1, 2, 3}


async def test_open_loop_sends_at_the_offsets_whatever_the_server_does(serve):
    """A slow server does not slow the load; scheduled times are the plan's own."""
    slow = Script([sse(chunk(" a", [1])), 0.3, *answer([[2]]).parts])
    arms = serve(lambda _body, _n: slow)
    offsets = [0.0, 0.05, 0.06, 0.2]
    planned = plan.open_loop(phase(concurrency=64), prompts(4), offsets, rng=rng())
    started = time.perf_counter_ns()
    report = await arms.drive(planned)
    assert report.completed == 8
    by_key = {r.receipt_id: r for r in arms.receipts}
    start_ns = min(r.scheduled_ns for r in arms.receipts)
    assert start_ns >= started
    for request in planned:
        receipt = by_key[receipt_key(request, "run")]
        assert receipt.scheduled_ns - start_ns == round((request.offset_s or 0) * 1e9)
        assert receipt.sent_ns >= receipt.scheduled_ns


async def test_waiting_for_the_cap_is_no_lag_of_ours_and_no_valid_run(serve):
    """An open loop that may not send keeps the intended time; the load was not as planned."""
    slow = Script([0.05, *answer([[2]]).parts])
    arms = serve(lambda _body, _n: slow)
    planned = plan.open_loop(phase(concurrency=1), prompts(4), [0.0] * 4, rng=rng(), arms=[B])
    report = await arms.drive(planned, limits=HealthLimits())
    lags = sorted(r.sent_ns - r.scheduled_ns for r in arms.receipts)
    assert lags[-1] > 100_000_000
    assert not report.health.valid
    assert not report.health.is_late
    assert "3 of 4 requests waited for the cap in flight" in report.health.reasons[0]
    assert sorted(HELD in r.warnings for r in arms.receipts) == [False, True, True, True]
    assert pooled_health([report.health], arms.receipts, HealthLimits()).held_requests == 3
    assert max(r.effective_s for r in arms.receipts) > 0.15


async def test_blocks_take_turns(serve):
    """One block is done before the next begins, also across arms."""
    arms = serve(lambda _body, _n: Script([0.01, *answer([[2]]).parts]))
    whole = plan.closed_loop(phase(concurrency=4), prompts(12), rng=rng())
    planned = [
        replace(request, block=2 * (i // 6) + (request.arm is S))
        for arm in (B, S)
        for i, request in enumerate(r for r in whole if r.arm is arm)
    ]
    planned.sort(key=lambda request: request.block)
    await arms.drive(planned)
    spans = {}
    for receipt in arms.receipts:
        first, last = spans.get(receipt.block, (math.inf, 0))
        spans[receipt.block] = (min(first, receipt.sent_ns), max(last, receipt.done_ns))
    ordered = [spans[block] for block in sorted(spans)]
    assert len(ordered) == len({r.block for r in planned}) == 4
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))


async def test_warm_up_is_driven_first_and_not_judged(serve):
    """Warm-up receipts are kept and marked; the client's health is that of the measured part."""
    arms = serve()
    warm = plan.warm_up(phase(), prompts(2), 3)
    report = await arms.drive(warm)
    assert [r.warm_up for r in arms.receipts] == [True] * 6
    assert report.health.reasons == ("nothing was sent",)
    arms.written.clear()
    report = await arms.drive([*warm, *plan.closed_loop(phase(), prompts(2), rng=rng())])
    assert [r.warm_up for r in arms.receipts] == [True] * 6 + [False] * 4
    assert report.health.valid


async def test_an_empty_plan_is_not_a_valid_run(serve):
    """Nothing measured is never a pass."""
    report = await serve().drive([])
    assert not report.health.valid
    assert report.planned == 0


async def test_texts_are_handed_on_only_where_planned(serve):
    """The answer goes with the receipt in replay, not elsewhere."""
    arms = serve()
    for keep in (True, False):
        arms.written.clear()
        await arms.drive(plan.closed_loop(phase(keep_text=keep), prompts(1), rng=rng()))
        assert [a is not None for _, a in arms.written] == [keep, keep]
        if keep:
            receipt, kept = arms.written[0]
            assert (kept.receipt_id, kept.token_ids) == (receipt.receipt_id, (1, 2, 3))


# --- the last word ------------------------------------------------------------------------------


async def test_a_fallback_in_mid_stage_reroutes_what_is_left(serve):
    """From the moment the guard says so, speculative requests go to target-only, marked."""
    arms = serve()
    seen = []
    planned = plan.canary(
        phase(stage=Stage.CANARY, name="step-1", concurrency=1),
        prompts(8),
        np.arange(8) * 0.01,
        rng=rng(),
        share=1.0,
        salt="s",
    )

    def should_send(request):
        return plan.reroute(request, "acceptance fell") if len(seen) >= 3 else request

    await arms.drive(planned, on_receipt=seen.append, should_send=should_send)
    assert len(arms.sent(S)) == 3
    assert len(arms.sent(B)) == 5
    fell_back = [r for r in arms.receipts if r.decision == "fell_back"]
    assert [(r.arm, r.decision_reason) for r in fell_back] == [(B, "acceptance fell")] * 5
    assert plan.remaining(planned, "run", {r.receipt_id for r in arms.receipts}) == []


async def test_enough_is_enough(serve):
    """Once there is enough, what is left of an open loop is neither sent nor waited for."""
    arms = serve()
    seen = []
    offsets = [0.0, 0.0, 0.0, 3600.0, 7200.0]
    planned = plan.open_loop(phase(concurrency=1), prompts(5), offsets, rng=rng(), arms=(B,))
    report = await arms.drive(planned, on_receipt=seen.append, is_enough=lambda: len(seen) >= 2)
    assert 2 <= report.completed <= 3
    assert report.completed + report.skipped == 5


async def test_a_rerouted_twin_is_skipped_not_doubled(serve):
    """Where the plan sends the prompt to target-only anyway, the reroute is left out."""
    arms = serve()
    planned = plan.closed_loop(phase(), prompts(4), rng=rng())
    report = await arms.drive(
        planned, should_send=lambda r: plan.reroute(r, "x") if r.arm is S else r
    )
    assert (report.completed, report.skipped) == (4, 4)
    assert len({r.receipt_id for r in arms.receipts}) == 4
    report = await arms.drive(planned, should_send=lambda _r: None)
    assert (report.completed, report.skipped) == (0, 8)


# --- faults -------------------------------------------------------------------------------------


async def test_errors_of_the_server_are_receipts(serve):
    """A bad request in between stops nothing."""
    arms = serve(lambda _body, n: refusal(500, "x") if n % 2 else answer([[1]]))
    report = await arms.drive(plan.closed_loop(phase(), prompts(10), rng=rng()))
    assert report.outcomes == {"ok": 10, "error": 10}


async def test_an_arm_without_a_server_is_a_usage_error(serve):
    """Found before the first request."""
    arms = serve()
    planned = plan.closed_loop(phase(), prompts(1), rng=rng())
    with pytest.raises(UsageError, match="the plan sends to speculative, which has no server"):
        await arms.drive(planned, arms={B: arms.endpoints[B]})
    with pytest.raises(UsageError, match="rerouted to target_only"):
        await arms.drive(
            [r for r in planned if r.arm is S],
            arms={S: arms.endpoints[S]},
            should_send=lambda r: plan.reroute(r, "x"),
        )
    assert arms.written == []


async def test_a_key_that_is_planned_twice_is_a_usage_error(serve):
    """Two routes with one prompt would share a receipt, and one of them would be lost."""
    arms = serve()
    planned = plan.closed_loop(phase(), prompts(1), rng=rng())
    twice = [*planned, replace(planned[0], route="other")]
    with pytest.raises(UsageError, match=r"prompt p0 is planned twice .*routes chat and other"):
        await arms.drive(twice)


async def test_a_server_that_is_gone_ends_the_drive(serve):
    """After so many attempts in a row it says which server; what was measured is written."""
    arms = serve()
    arms.endpoints[S] = endpoint(S, "http://127.0.0.1:1")
    planned = plan.closed_loop(phase(), prompts(50), rng=rng())
    with pytest.raises(
        EngineError, match=r"speculative server at http.*5 attempts in a row.*--again"
    ):
        await arms.drive(planned, give_up_after=5)
    assert sum(r.error_class == "unreachable" for r in arms.receipts) >= 5
    report = await arms.drive(planned)
    assert report.outcomes == {"ok": 50, "error": 50}


async def test_cancelling_writes_all_that_is_complete(serve):
    """Ctrl-C loses no finished answer, and sends nothing more."""
    arms = serve(lambda _body, _n: Script([0.01, *answer([[2]]).parts]))
    seen = []
    under_way = asyncio.Event()

    def listen(receipt):
        seen.append(receipt)
        if len(seen) == 20:
            under_way.set()

    planned = plan.closed_loop(phase(), prompts(500), rng=rng())
    task = asyncio.create_task(arms.drive(planned, on_receipt=listen))
    await under_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {r.receipt_id for r in arms.receipts} == {r.receipt_id for r in seen}
    assert len(arms.receipts) < len(planned)
    before = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == before


async def test_a_store_that_fails_stops_the_drive(serve):
    """What cannot be kept is not measured any further; the error is the store's own."""
    arms = serve(lambda _body, _n: Script([0.02, *answer([[2]]).parts]))

    def write(_batch):
        raise StoreError("the disk is full")

    planned = plan.closed_loop(phase(), prompts(500), rng=rng())
    with pytest.raises(StoreError, match="the disk is full"):
        await arms.drive(planned, write=write)
    assert sum(len(server.seen) for server in arms.servers.values()) < 500


async def test_an_error_of_the_callback_is_not_swallowed(serve):
    """A bug in what listens stops the drive with its own error, after writing."""
    arms = serve()

    def listen(_receipt):
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        await arms.drive(plan.closed_loop(phase(), prompts(4), rng=rng()), on_receipt=listen)
    assert len(arms.receipts) >= 1


async def test_writing_happens_beside_the_loop_one_batch_at_a_time(serve):
    """The loop's thread never waits for a disk, and batches do not overlap."""
    arms = serve(lambda _body, _n: Script([0.01, *answer([[2]]).parts]))
    threads, running, overlaps = set(), [0], [0]

    def write(batch):
        overlaps[0] += running[0]
        running[0] += 1
        threads.add(threading.get_ident())
        time.sleep(0.05)
        arms.written.extend(batch)
        running[0] -= 1

    planned = plan.closed_loop(phase(), prompts(60), rng=rng())
    await arms.drive(planned, write=write)
    assert threading.get_ident() not in threads
    assert overlaps == [0]
    assert len({r.receipt_id for r in arms.receipts}) == len(arms.receipts) == 120


# --- health of the client -----------------------------------------------------------------------


async def test_a_stalled_loop_makes_the_run_invalid(serve):
    """A callback that blocks is our own lateness, and is told from a slow server."""
    arms = serve()
    planned = plan.closed_loop(phase(concurrency=1), prompts(2), rng=rng())
    report = await arms.drive(
        planned,
        on_receipt=lambda _r: time.sleep(0.3),
        limits=HealthLimits(lag_floor_s=60, loop_stall_s=0.2),
    )
    assert not report.health.valid
    assert report.health.loop_stall_max_s > 0.2
    assert any("event loop stalled" in reason for reason in report.health.reasons)


async def test_a_client_out_of_cpu_makes_the_run_invalid(serve):
    """A loop thread that computes all the time cannot stamp chunks in time."""
    arms = serve()

    def burn(_receipt):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    planned = plan.closed_loop(phase(), prompts(5), rng=rng())
    limits = HealthLimits(lag_floor_s=60, loop_stall_s=60, loop_cpu_share=0.2)
    report = await arms.drive(planned, on_receipt=burn, limits=limits)
    assert not report.health.valid
    assert "of a core" in report.health.reasons[0]


async def test_the_lag_limit_grows_with_the_median_ttft(serve):
    """A lag that is small against the answers measured is no reason against the run."""
    slow = Script([0.4, *answer([[2]]).parts])
    arms = serve(lambda _body, _n: slow)
    planned = plan.closed_loop(phase(), prompts(1), rng=rng())
    limits = HealthLimits(lag_floor_s=0.0, lag_share=10.0, loop_stall_s=60)
    assert (await arms.drive(planned, limits=limits)).health.valid
    limits = HealthLimits(lag_floor_s=0.0, lag_share=0.0, loop_stall_s=60)
    assert not (await arms.drive(planned, limits=limits)).health.valid


def test_keys_stay_out_of_sight():
    """An endpoint can be printed without telling its key."""
    shown = repr(replace(endpoint(S, "http://x"), api_key="sk-secret"))
    assert "sk-secret" not in shown
