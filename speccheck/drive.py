"""Run a plan against the arms on a given clock; the only load loop.

Closed loops, open loops, warm-up, mirrors and canaries are all plans, so there is one loop to
trust. It keeps three things apart that load generators like to mix: when a request was
meant to go out (`scheduled_ns`), when it did (`sent_ns`), and whether our own process was fit to
measure at all (`ClientHealth`): a late client makes a run invalid, not slow. Receipts are handed on
as they complete, and written from one thread beside the loop, so that neither a slow disk delays a
timestamp nor a crash loses what was acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import aiohttp

from speccheck import client
from speccheck.config import HealthLimits
from speccheck.errors import EngineError, UsageError
from speccheck.health import HELD, ClientHealth, LoopWatch, unknown_health
from speccheck.records import (
    Answer,
    Arm,
    ArmDescription,
    PlannedRequest,
    Receipt,
    receipt_key,
)

Written = tuple[Receipt, Answer | None]
"""A receipt and, where the plan keeps texts, its answer."""


class Clock(Protocol):
    """Monotonic nanoseconds, and waiting for one of them."""

    def now_ns(self) -> int:
        """Now, on the clock of `time.perf_counter_ns`."""
        ...

    async def sleep_until_ns(self, at_ns: int) -> None:
        """Return at `at_ns` or as soon after it as possible; at once where it has passed."""
        ...


class MonotonicClock:
    """The real clock, the same one that the client stamps chunks with."""

    def now_ns(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    async def sleep_until_ns(self, at_ns: int) -> None:
        """Wait on the event loop's timer."""
        delay_ns = at_ns - time.perf_counter_ns()
        if delay_ns > 0:
            await asyncio.sleep(delay_ns / 1e9)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an arm is reached and what it runs. The key stays out of every repr and receipt."""

    description: ArmDescription
    policy_version: str
    served_model: str
    """The name to ask for, as `/v1/models` lists it."""
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to each body."""
    omit: frozenset[str] = frozenset()
    """Fields this server refuses (a plain OpenAI server: return_token_ids, cache_salt ...)."""


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What became of a plan. planned = completed + skipped, unless the drive was stopped."""

    planned: int
    completed: int
    skipped: int
    """Requests that `should_send` held back, whose rerouted twin was already planned, or that came
    after enough."""
    outcomes: Mapping[str, int]
    started_ns: int
    ended_ns: int
    health: ClientHealth


async def drive(
    plan: Sequence[PlannedRequest],
    arms: Mapping[Arm, Endpoint],
    *,
    clock: Clock,
    run_id: str,
    write: Callable[[Sequence[Written]], None],
    on_receipt: Callable[[Receipt], None] | None = None,
    should_send: Callable[[PlannedRequest], PlannedRequest | None] | None = None,
    is_enough: Callable[[], bool] | None = None,
    timeout_s: float = 600.0,
    give_up_after: int | None = None,
    limits: HealthLimits | None = None,
) -> DriveReport:
    """Send every planned request once and hand on every receipt.

    The plan is run group by group, a group being the neighbours with the same phase and block;
    one group finishes before the next begins, in the plan's order. Where requests carry offsets
    the group is an open loop from its start, else a closed loop of `concurrency` workers for each
    arm.

    Args:
        plan: what to send; take away what is done with `plan.remaining`.
        arms: an endpoint for every arm of the plan.
        clock: must tell the time of `time.perf_counter_ns`.
        run_id: part of every receipt's key.
        write: makes a batch durable; called from one thread at a time, beside the event loop.
            When it returns, the batch counts as acknowledged.
        on_receipt: called on the event loop for each receipt as it completes; must be quick.
        is_enough: asked before each request of an open loop is waited for; once it says yes, those
            that are left are skipped.
        should_send: the last word before a request goes out: the request, another one (a fallback
            sends it to target-only, see `plan.reroute`), or None to skip it.
        timeout_s: for one whole answer.
        give_up_after: stop after so many attempts in a row that could not even connect to an arm.
        limits: when to call the client itself late.

    Raises:
        UsageError: for an arm of the plan without an endpoint, or a key that is planned twice.
        EngineError: when an arm cannot be reached and `give_up_after` is passed.
        StoreError: from `write`; the drive stops, since what it measures would be lost.
        asyncio.CancelledError: after all completed receipts were written.
    """
    missing = sorted({request.arm for request in plan} - set(arms))
    if missing:
        raise UsageError(f"the plan sends to {', '.join(missing)}, which has no server")
    keys = _unique_keys(plan, run_id)
    if not plan:
        health = unknown_health("nothing was planned")
        now = clock.now_ns()
        return DriveReport(0, 0, 0, {}, now, now, health)
    run = _Run(
        arms=arms,
        clock=clock,
        run_id=run_id,
        on_receipt=on_receipt,
        should_send=should_send,
        is_enough=is_enough,
        timeout_s=timeout_s,
        give_up_after=give_up_after,
        keys=keys,
        pending=_Pending(write),
    )
    started_ns = clock.now_ns()
    watch = LoopWatch()
    sessions = {arm: client.open_session() for arm in arms}
    run.sessions = sessions
    flusher = asyncio.create_task(run.pending.keep_writing())
    try:
        for is_warm_up, group in _groups(plan):
            with nullcontext() if is_warm_up else watch.measuring():
                await _until_failed(_run_group(run, group), flusher)
    finally:
        # Also on Ctrl-C: what has completed is written before the cancellation goes on.
        try:
            await asyncio.shield(run.pending.close(flusher))
        finally:
            for session in sessions.values():
                await session.close()
    return DriveReport(
        planned=len(plan),
        completed=run.completed,
        skipped=run.skipped,
        outcomes=dict(run.outcomes),
        started_ns=started_ns,
        ended_ns=clock.now_ns(),
        health=watch.health(run.lags_s, run.ttfts_s, run.held, limits or HealthLimits()),
    )


# --- one run ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """State of one drive."""

    arms: Mapping[Arm, Endpoint]
    clock: Clock
    run_id: str
    on_receipt: Callable[[Receipt], None] | None
    should_send: Callable[[PlannedRequest], PlannedRequest | None] | None
    is_enough: Callable[[], bool] | None
    timeout_s: float
    give_up_after: int | None
    keys: set[str]
    pending: _Pending
    sessions: Mapping[Arm, aiohttp.ClientSession] = field(default_factory=dict)
    completed: int = 0
    skipped: int = 0
    held: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    unreachable: Counter[Arm] = field(default_factory=Counter)
    lags_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)

    async def attempt(
        self, planned: PlannedRequest, scheduled_ns: int, warnings: tuple[str, ...] = ()
    ) -> None:
        """Ask, send, make the receipt (with these warnings of our own), hand it on."""
        request = self._decide(planned)
        if request is None:
            self.skipped += 1
            return
        arm = self.arms[request.arm]
        observation = await client.send(
            self.sessions[request.arm],
            arm.description.url,
            arm.served_model,
            request,
            timeout_s=self.timeout_s,
            api_key=arm.api_key,
            extra=arm.extra,
            omit=arm.omit,
        )
        receipt = client.make_receipt(
            observation,
            request,
            self.run_id,
            arm.description,
            arm.policy_version,
            scheduled_ns=scheduled_ns,
        )
        receipt = replace(receipt, warnings=receipt.warnings + warnings)
        keeps = request.keep_text
        answer = client.make_answer(observation, receipt.receipt_id) if keeps else None
        self.pending.add((receipt, answer))
        self.completed += 1
        self.outcomes[receipt.outcome] += 1
        if not request.warm_up:
            if HELD in warnings:
                self.held += 1
            else:
                self.lags_s.append((observation.sent_ns - scheduled_ns) / 1e9)
            if receipt.ttft_s is not None:
                self.ttfts_s.append(receipt.ttft_s)
        if self.on_receipt is not None:
            self.on_receipt(receipt)
        self._count_unreachable(request.arm, arm.description.url, receipt)

    def _decide(self, planned: PlannedRequest) -> PlannedRequest | None:
        if self.should_send is None:
            return planned
        request = self.should_send(planned)
        if request is None:
            return None
        if request.arm not in self.arms:
            raise UsageError(f"a request was rerouted to {request.arm}, which has no server")
        key = receipt_key(request, self.run_id)
        if key != receipt_key(planned, self.run_id) and key in self.keys:
            return None  # its twin on that arm is in the plan: twice would be a double receipt
        return request

    def _count_unreachable(self, arm: Arm, url: str, receipt: Receipt) -> None:
        if receipt.error_class != "unreachable":
            self.unreachable[arm] = 0
            return
        self.unreachable[arm] += 1
        if self.give_up_after is not None and self.unreachable[arm] >= self.give_up_after:
            raise EngineError(
                f"{arm} server at {url}: {self.unreachable[arm]} attempts in a row could not "
                f"connect ({receipt.error_message}); start it and run the same command to resume "
                "(these attempts stay in the run as errors; --again measures anew without them)"
            )


def _unique_keys(plan: Sequence[PlannedRequest], run_id: str) -> set[str]:
    """The plan's receipt keys; a key that is planned twice would lose one of its receipts."""
    first: dict[str, PlannedRequest] = {}
    for request in plan:
        other = first.setdefault(receipt_key(request, run_id), request)
        if other is not request:
            raise UsageError(
                f"prompt {request.prompt.prompt_id} is planned twice for {request.arm} in phase "
                f"{request.phase} (routes {other.route} and {request.route}): give each route "
                "prompts of its own"
            )
    return set(first)


def _groups(plan: Sequence[PlannedRequest]) -> Iterator[tuple[bool, list[PlannedRequest]]]:
    """Neighbours of one phase and block, in the plan's order."""
    for (_, _, is_warm_up), group in groupby(plan, lambda r: (r.phase, r.block, r.warm_up)):
        yield is_warm_up, list(group)


async def _run_group(run: _Run, group: list[PlannedRequest]) -> None:
    if group[0].offset_s is not None:
        await _open_loop(run, group)
    else:
        queues: dict[Arm, list[PlannedRequest]] = {}
        for request in group:
            queues.setdefault(request.arm, []).append(request)
        await _closed_loops(run, list(queues.values()))


async def _closed_loops(run: _Run, queues: list[list[PlannedRequest]]) -> None:
    """Workers that take the next request when their last is answered, until the queue is empty."""

    async def work(waiting: deque[PlannedRequest]) -> None:
        while waiting:
            request = waiting.popleft()
            await run.attempt(request, run.clock.now_ns())

    async with _task_group() as tasks:
        for queue in queues:
            waiting = deque(queue)
            for _ in range(min(queue[0].concurrency, len(queue))):
                tasks.create_task(work(waiting))


async def _open_loop(run: _Run, group: list[PlannedRequest]) -> None:
    """Requests go out at their offsets, whatever the server does, up to the cap in flight.

    A request that waits for the cap keeps its intended time as `scheduled_ns`: the wait shows in
    its effective latency, and its receipt says so.
    """
    start_ns = run.clock.now_ns()
    free_ns = start_ns
    slots = asyncio.Semaphore(max(request.concurrency for request in group))

    async def one(request: PlannedRequest, due_ns: int, warnings: tuple[str, ...]) -> None:
        try:
            await run.attempt(request, due_ns, warnings)
        finally:
            slots.release()

    async with _task_group() as tasks:
        for request in sorted(group, key=lambda r: r.offset_s or 0.0):
            if run.is_enough is not None and run.is_enough():
                run.skipped += 1
                continue
            due_ns = start_ns + round((request.offset_s or 0.0) * 1e9)
            await run.clock.sleep_until_ns(due_ns)
            must_wait = slots.locked()
            await slots.acquire()
            if must_wait:
                free_ns = run.clock.now_ns()
            # Held too is who was due while an earlier one waited for its slot.
            is_held = must_wait or due_ns < free_ns
            tasks.create_task(one(request, due_ns, (HELD,) if is_held else ()))


@asynccontextmanager
async def _task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first error comes out as itself, not wrapped in an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _until_failed(work: Coroutine[Any, Any, None], flusher: asyncio.Task[None]) -> None:
    """Wait for the work, or stop it as soon as writing has failed."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, flusher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await flusher  # it only ever ends early by raising
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# --- writing ------------------------------------------------------------------------------------


class _Pending:
    """Receipts that are complete and not yet durable; written in batches, twice a second."""

    _EVERY_S = 0.5

    def __init__(self, write: Callable[[Sequence[Written]], None]) -> None:
        self._write = write
        self._waiting: list[Written] = []

    def add(self, item: Written) -> None:
        self._waiting.append(item)

    async def keep_writing(self) -> None:
        """Until cancelled; a failed write ends it with that error and keeps the batch."""
        while True:
            await asyncio.sleep(self._EVERY_S)
            await self._flush()

    async def close(self, flusher: asyncio.Task[None]) -> None:
        """Write what is left, unless writing itself has failed: then raise that."""
        if flusher.done():
            flusher.result()
        flusher.cancel()
        await asyncio.gather(flusher, return_exceptions=True)
        await self._flush()

    async def _flush(self) -> None:
        if not self._waiting:
            return
        batch = list(self._waiting)
        # Shielded: a cancellation must not leave the thread writing a batch that close() will
        # write again at the same time.
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, batch))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            del self._waiting[: len(batch)]
            raise
        del self._waiting[: len(batch)]
