"""Whether our own client was fit to measure: send lag, event-loop stalls, CPU.

A client that is late measures itself, so what it saw then is void: neither slow nor fast. Three
things are watched while a plan is driven: how late requests left (from the receipts), how late the
event loop woke (a tick every 20 ms), and who used the CPU: the loop's thread, the whole process,
and the cores we may run on. That those cores are busy says little where the servers share them, so
the kernel is also asked how long the loop's thread was ready to run and had to wait for a core.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speccheck.config import HealthLimits
from speccheck.records import Receipt

STALL_FROM_S = 0.010
"""A tick that is less late is no stall: the timers of a shared machine do no better."""

HELD = "waited for the cap in flight"
"""Warning on a receipt that left late because the cap was reached, which is the servers' doing."""

HELD_SHARE = 0.01
"""Of requests; above it the load was not the one that was planned."""

_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether this client was fit to measure; `reasons` say why not. Warm-up is not judged.

    Figures are NaN where nothing was driven, or where the system does not tell; a run that
    measured nothing is not valid. Shares of CPU are of one core for thread and process, and of all
    cores that we may run on for `machine_cpu_share`, servers on them included.
    """

    valid: bool
    reasons: tuple[str, ...]
    is_late: bool
    """Whether the fault is the client's own: all times are void then. An invalid client that is not
    late had to hold requests back: times look no worse than they were, so a failure stands."""
    driven_s: float = 0.0
    """How long the loop was watched."""
    lag_p99_s: float = math.nan
    """Scheduled to sent, of requests that had not to wait for the cap in flight."""
    loop_stall_max_s: float = math.nan
    loop_stall_total_s: float = math.nan
    """Lateness of all ticks that were late by `STALL_FROM_S` and more."""
    loop_cpu_share: float = math.nan
    """Of the event loop's thread."""
    process_cpu_share: float = math.nan
    cpu_wait_share: float = math.nan
    """Time in which the loop's thread was ready to run and no core was free, of the driven time."""
    machine_cpu_share: float = math.nan
    held_requests: int = 0
    """Requests that waited for the cap in flight: the servers were behind, or it is too low."""


# --- watching -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Running totals, seconds; NaN where the system does not tell."""

    wall_s: float
    thread_s: float
    process_s: float
    waited_s: float
    """The thread, ready to run, waiting for a core."""
    busy_s: float
    """All cores that we may run on, whoever used them."""
    capacity_s: float
    """Idle or busy: the same cores."""


def read_cpu() -> CpuReading:
    """Where the CPU went so far, as seen from the calling thread."""
    busy_s, capacity_s = _cores()
    return CpuReading(
        wall_s=time.perf_counter(),
        thread_s=time.thread_time(),
        process_s=time.process_time(),
        waited_s=_waited_s(),
        busy_s=busy_s,
        capacity_s=capacity_s,
    )


def _waited_s() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return math.nan


def _cores() -> tuple[float, float]:
    try:
        return core_seconds(Path("/proc/stat").read_text(), os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return math.nan, math.nan


def core_seconds(text: str, cores: Collection[int]) -> tuple[float, float]:
    """Busy seconds and all seconds of these cores, from the text of /proc/stat (proc(5)).

    Idle and waiting for a disk is not busy; stolen by the hypervisor is. NaN where no core is
    found.
    """
    names = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    # user nice system idle iowait irq softirq steal; guest time is in user already.
    ticks = [[int(number) for number in row[1:9]] for row in rows if row[0] in names]
    if not ticks:
        return math.nan, math.nan
    per_second = os.sysconf("SC_CLK_TCK")
    capacity = sum(map(sum, ticks))
    idle = sum(row[3] + row[4] for row in ticks)
    return (capacity - idle) / per_second, capacity / per_second


class LoopWatch:
    """How late the event loop wakes, and where the CPU goes, while measuring."""

    def __init__(self, read: Callable[[], CpuReading] = read_cpu) -> None:
        self.stall_max_s = 0.0
        self.stall_total_s = 0.0
        self._read = read
        self._spans: list[tuple[CpuReading, CpuReading]] = []
        self._due_s = math.inf

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch for the length of the block. What is late at its end counts too."""
        before = self._read()
        ticker = asyncio.ensure_future(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            self.note_lateness(time.perf_counter() - self._due_s)
            self._due_s = math.inf
            self._spans.append((before, self._read()))

    async def _tick(self) -> None:
        while True:
            self._due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.note_lateness(time.perf_counter() - self._due_s)

    def note_lateness(self, late_s: float) -> None:
        """Take in how late one tick was (negative: not due yet)."""
        self.stall_max_s = max(self.stall_max_s, late_s)
        if late_s >= STALL_FROM_S:
            self.stall_total_s += late_s

    def health(
        self, lags_s: Sequence[float], ttfts_s: Sequence[float], held: int, limits: HealthLimits
    ) -> ClientHealth:
        """What was watched, with the lags and TTFTs of the requests sent meanwhile, judged."""
        driven_s = self._spent("wall_s")

        def share(name: str, of: float) -> float:
            return self._spent(name) / of if of > 0 else math.nan

        return _judged(
            ClientHealth(
                valid=True,
                reasons=(),
                is_late=False,
                driven_s=driven_s,
                loop_stall_max_s=self.stall_max_s,
                loop_stall_total_s=self.stall_total_s,
                loop_cpu_share=share("thread_s", driven_s),
                process_cpu_share=share("process_s", driven_s),
                cpu_wait_share=share("waited_s", driven_s),
                machine_cpu_share=share("busy_s", self._spent("capacity_s")),
                held_requests=held,
            ),
            lags_s,
            ttfts_s,
            limits,
        )

    def _spent(self, name: str) -> float:
        return math.fsum(getattr(end, name) - getattr(begin, name) for begin, end in self._spans)


# --- judging ------------------------------------------------------------------------------------


def pooled_health(
    drives: Sequence[ClientHealth], receipts: Sequence[Receipt], limits: HealthLimits
) -> ClientHealth:
    """The client's fitness over several drives of one stage, from all their receipts together.

    The lag's p99 of a hundred requests is the worst of them: one hiccup would void a stage of a
    thousand. Shares of CPU and the longest stall are the worst of the drives, stalls are summed.
    """

    def worst(name: str) -> float:
        known = [x for drive in drives if not math.isnan(x := getattr(drive, name))]
        return max(known, default=math.nan)

    watched = [drive for drive in drives if not math.isnan(drive.loop_stall_total_s)]
    stalls_s = [drive.loop_stall_total_s for drive in watched]
    lags_s, ttfts_s, held = _times(receipts)
    return _judged(
        ClientHealth(
            valid=True,
            reasons=(),
            is_late=False,
            driven_s=math.fsum(drive.driven_s for drive in watched),
            loop_stall_max_s=worst("loop_stall_max_s"),
            loop_stall_total_s=math.fsum(stalls_s) if watched else math.nan,
            loop_cpu_share=worst("loop_cpu_share"),
            process_cpu_share=worst("process_cpu_share"),
            cpu_wait_share=worst("cpu_wait_share"),
            machine_cpu_share=worst("machine_cpu_share"),
            held_requests=held,
        ),
        lags_s,
        ttfts_s,
        limits,
    )


def lateness(receipts: Iterable[Receipt], limits: HealthLimits) -> str:
    """Why these requests left too late for their times to mean anything, or empty. Pure.

    For a look at a run that is still going on, where receipts are all there is.
    """
    lags_s, ttfts_s, _ = _times(receipts)
    return _late(lags_s, ttfts_s, limits) if lags_s else ""


class Punctuality:
    """Our lateness over the last requests, for looks at each of them while a run goes on."""

    def __init__(self, limits: HealthLimits, *, window: int = 100) -> None:
        self._limits = limits
        self._last: deque[Receipt] = deque(maxlen=window)

    def add(self, receipt: Receipt) -> str:
        """Take in a finished request; why the times of these last ones are void, or empty.

        One hiccup in a hundred is let pass, as in a stage; in fewer requests it is not.
        """
        self._last.append(receipt)
        return lateness(self._last, self._limits)


def unknown_health(reason: str) -> ClientHealth:
    """The health of a client that measured nothing: not valid."""
    return ClientHealth(valid=False, reasons=(reason,), is_late=True)


def _times(receipts: Iterable[Receipt]) -> tuple[list[float], list[float], int]:
    """Send lags and TTFTs, seconds, of what was measured, and how many were held back."""
    sent = [r for r in receipts if r.sent_ns is not None and not r.warm_up]
    free = [r for r in sent if HELD not in r.warnings]
    lags_s = [(r.sent_ns - r.scheduled_ns) / 1e9 for r in free if r.sent_ns is not None]
    ttfts_s = [ttft_s for r in sent if (ttft_s := r.ttft_s) is not None]
    return lags_s, ttfts_s, len(sent) - len(free)


def _late(lags_s: Sequence[float], ttfts_s: Sequence[float], limits: HealthLimits) -> str:
    if max(lags_s) <= limits.lag_floor_s:  # no quantile is over it; asked at every request
        return ""
    lag_s = float(np.quantile(lags_s, 0.99))
    limit_s = limits.lag_floor_s
    if ttfts_s:
        limit_s = max(limit_s, limits.lag_share * float(np.median(ttfts_s)))
    if lag_s <= limit_s:
        return ""
    return f"send lag p99 {lag_s * 1e3:.1f} ms > limit {limit_s * 1e3:.1f} ms"


def _judged(
    seen: ClientHealth, lags_s: Sequence[float], ttfts_s: Sequence[float], limits: HealthLimits
) -> ClientHealth:
    """`seen` with its lag, and the reasons against it, each with its number and its limit."""
    sent = len(lags_s) + seen.held_requests
    if not sent:
        return unknown_health("nothing was sent")
    late = []
    if lags_s and (lag := _late(lags_s, ttfts_s, limits)):
        late.append(lag)
    if seen.loop_stall_max_s > limits.loop_stall_s:
        late.append(
            f"the event loop stalled for {seen.loop_stall_max_s * 1e3:.0f} ms "
            f"> limit {limits.loop_stall_s * 1e3:.0f} ms"
        )
    # A short drive may have one stall as long as a single one may be, whatever its share.
    if seen.loop_stall_total_s > max(limits.loop_stall_s, limits.loop_stall_share * seen.driven_s):
        late.append(
            f"the event loop stalled for {seen.loop_stall_total_s:.1f} s of "
            f"{seen.driven_s:.0f} s > limit {limits.loop_stall_share:.0%}"
        )
    for share, limit, words in (
        (seen.loop_cpu_share, limits.loop_cpu_share, "the event loop used {} of a core"),
        (seen.process_cpu_share, limits.process_cpu_share, "the process used {} of a core"),
        (seen.cpu_wait_share, limits.cpu_wait_share, "the loop waited for a core {} of the time"),
        (seen.machine_cpu_share, limits.machine_cpu_share, "the client's cores were {} busy"),
    ):
        if limit is not None and share > limit:
            late.append(
                f"{words.format(f'{share:.0%}')} > limit {limit:.0%}: "
                "send less, or measure from another machine"
            )
    held = []
    if seen.held_requests > HELD_SHARE * sent:
        held.append(
            f"{seen.held_requests} of {sent} requests {HELD}: the servers were behind the load "
            "that was planned; send less, or raise max_in_flight"
        )
    return replace(
        seen,
        valid=not late and not held,
        reasons=(*late, *held),
        is_late=bool(late),
        lag_p99_s=float(np.quantile(lags_s, 0.99)) if lags_s else math.nan,
    )
