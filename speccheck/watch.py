"""Following a live pair without a gateway: its /metrics, and the receipts of a store if one grows.

The decisions are those of `fallback`, from the same rules; obeying them is left to the hooks, since
nothing here is in the way of traffic. A server that restarts, dies, stops or hangs is what this is
for: each scrape has its timeout, a failed one is kept as such, and the loop goes on.

A store that another process holds (DuckDB lets one hold a file) is tried again; transitions that
cannot be written meanwhile wait, and what is still waiting at the end is said.

What is decided with a store is kept there in a run of the watch's own, on the clock of the run
that it follows: scrapes (`fallback.Thinned`) and when which receipts were taken in
(`fallback.Notes`), so that `speccheck fallback replay` decides it again. By /metrics alone nothing
is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Literal

import aiohttp

from speccheck import __version__, fallback, launch, telemetry
from speccheck.config import Guardrails, Rollout, http_url
from speccheck.errors import ExitCode, StoreError, UsageError
from speccheck.fallback import GRACE_NS, Began, Gauge, Machine, Notes, Sample, Taken, ended_ns
from speccheck.hooks import Event, Hooks
from speccheck.records import (
    FOLLOWED,
    GATEWAY,
    Arm,
    Receipt,
    RouteState,
    Stage,
    Transition,
    digest,
)
from speccheck.store import RecordedTransition, Run, Store
from speccheck.telemetry import Snapshot

LIVE = (GATEWAY, Stage.CANARY)
"""Stages whose receipts are live traffic."""

PAIR = "pair"
"""Name of the one route that is watched where a rollout has several and nobody tells them apart."""

_MOST_UNWRITTEN = 1000
_MOST_KEPT = 20_000
"""Scrapes and marks that wait while the store is held."""
_KEEP_EVERY_S = 10.0
"""How often they are written where no route moves: writing keeps others out for a moment."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """One arm's server as last seen; None where it does not say, or did not answer."""

    arm: str
    failure: str | None
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    acceptance: float | None
    """Accepted over drafted tokens since the last scrape: for the eye, it decides nothing."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """One route as it stands."""

    route: str
    state: RouteState
    share: float
    since_s: float | None
    """How long it has stood there; None: since the beginning."""
    due_s: float | None
    """Until time moves it."""
    fallbacks: int
    why: str
    gauges: tuple[Gauge, ...]


@dataclass(frozen=True, slots=True)
class View:
    """What is seen at one moment."""

    wall_ns: int
    evidence: str
    servers: tuple[ServerView, ...]
    routes: tuple[RouteView, ...]
    note: str
    """What is in the way of seeing or writing, or empty."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What to follow: the files, the servers, and where rows go."""

    rollout: Rollout
    rules: Guardrails
    urls: Mapping[Arm, str]
    store: Path | None
    """receipts.duckdb with live receipts; transitions are kept there. None: by /metrics alone."""
    api_key: str | None = None
    interval_s: float = 5.0
    timeout_s: float = 3.0


@dataclass
class _Receipts:
    """The growing receipts of a store, read now and then."""

    path: Path
    rollout: str
    place: int = -1
    run_id: str = ""
    shift_ns: int = 0
    """From our clock to that of the run."""

    def find(self, store: Store) -> bool:
        """Look for the live run: that which a process took up last; whether it is another now."""
        named = [r for r in store.runs() if r.config["rollout"]["name"] == self.rollout]
        runs = [r for r in named if FOLLOWED not in r.config]
        live = [r.run_id for r in runs if r.config.get("gateway")] or [r.run_id for r in runs]
        latest = live[-1] if live else ""
        if latest == self.run_id:
            return False
        self.run_id, self.place, self.shift_ns = latest, -1, 0
        first = store.anchors(latest)[0]
        if first.boot not in ("", launch.boot_id()):
            now = time.time_ns() - time.perf_counter_ns()
            self.shift_ns = now - (first.wall_ns - first.clock_ns)
        return True

    def more(self, store: Store, since_ns: int) -> list[Receipt]:
        """Those that came in since the last look; at the first, from the first one that ended since
        a time.
        """
        if not self.run_id:
            return []
        is_first = self.place < 0
        found, self.place = store.arrived_after(self.run_id, self.place, LIVE)
        return list(dropwhile(lambda r: ended_ns(r) < since_ns, found)) if is_first else found


@dataclass
class Follower:
    """The state of a watch: machines, what was scraped last, what is not written yet."""

    watched: Watched
    hooks: Hooks
    say: Callable[[Transition], None]
    machines: dict[str, Machine] = field(default_factory=dict)
    last: dict[Arm, tuple[Snapshot, Snapshot | None]] = field(default_factory=dict)
    """Arm -> the latest scrape and the one before."""
    why: dict[str, str] = field(default_factory=dict)
    unwritten: list[tuple[Transition, int, str]] = field(default_factory=list)
    note: str = ""
    answered: bool = False
    """Whether the speculative server has ever told anything."""
    receipts: _Receipts | None = None
    unkept: list[tuple[Run, Arm, Snapshot]] = field(default_factory=list)
    """Scrapes and marks that are not written yet, and the run that they are of."""
    lost: int = 0
    """Those that were too many to wait."""
    _notes: Notes = field(init=False)
    _run: Run | None = None
    _begun: set[str] = field(default_factory=set)
    _kept_s: float = 0.0

    def begin(self) -> None:
        """Take up each route where the store says it stands.

        Raises:
            UsageError: the store is another rollout's only.
        """
        w = self.watched
        names = [route.name for route in w.rollout.routes]
        if w.store is None and len(names) > 1:
            names = [PAIR]
        rows: list[RecordedTransition] = []
        if w.store is not None:
            self.receipts = _Receipts(w.store, w.rollout.name)
            with self._reading() as store:
                self.receipts.find(store)
                rows = store.transitions(w.rollout.name)
        self._kept_s = time.monotonic()
        self._follow()
        for name in names:
            self._take_up(name, rows)

    def _follow(self) -> None:
        """Keep what is observed from here on with the run that is followed now."""
        w = self.watched
        self._notes = Notes(w.rollout.fallback.max_queued)
        if self.receipts is None:
            return
        config = {
            FOLLOWED: self.receipts.run_id,
            "rollout": w.rollout.model_dump(mode="json", exclude={"gateway"}),
            "guardrails": w.rules.model_dump(mode="json"),
            "speccheck": __version__,
        }
        self._run = Run(
            run_id=digest("run", config),
            created_at_ns=time.time_ns(),
            seed=w.rollout.seed,
            corpus_digest="",
            rules_digest="",
            config=config,
        )

    def _keep(self, arm: Arm, snapshot: Snapshot) -> None:
        """Note what a replay needs, if there is a store."""
        if self._run is None:
            return
        if len(self.unkept) < _MOST_KEPT:
            self.unkept.append((self._run, arm, snapshot))
        else:
            self.lost += 1

    def _take_up(self, name: str, rows: Sequence[RecordedTransition]) -> None:
        """A route's machine anew, where the rows of the store say that it stands."""
        w = self.watched
        evidence: Literal["metrics", "receipts"] = "metrics" if w.store is None else "receipts"
        settings = fallback.settings_of(w.rollout, w.rules, name, evidence=evidence)
        kept = [(row.transition, row.wall_ns) for row in rows if row.transition.route == name]
        now_wall_ns, now_ns = time.time_ns(), self._notes.next_ns(self.clock_ns())
        machine = fallback.resume(settings, name, kept, now_wall_ns=now_wall_ns, now_ns=now_ns)
        self.machines[name] = machine
        began = Began(now_ns, now_wall_ns, machine.seq)
        self._keep(Arm.SPECULATIVE, self._notes.began(name, began))
        self.unwritten = [one for one in self.unwritten if one[0].route != name]
        if kept:
            self.why[name] = kept[-1][0].why

    def _adopt(self, store: Store) -> None:
        """Be where the store says a route is, if somebody else moved it (a gateway, an operator's
        reset), and follow the run that is live now.
        """
        if self.receipts is None:
            return
        rows = store.transitions(self.watched.rollout.name)
        is_other = self.receipts.find(store)
        if is_other:
            self._follow()
        for name, machine in self.machines.items():
            ours = [moved.seq for moved, _, _ in self.unwritten if moved.route == name]
            written = sum(row.transition.route == name for row in rows)
            if is_other or written > min(ours, default=machine.seq):
                self._take_up(name, rows)

    def clock_ns(self) -> int:
        """The clock of receipts, now."""
        shift = 0 if self.receipts is None else self.receipts.shift_ns
        return time.perf_counter_ns() + shift

    async def look(self, session: aiohttp.ClientSession) -> None:
        """One round: both servers, new receipts, time, and what is waiting to be written."""
        w = self.watched

        async def one(arm: Arm) -> Snapshot:
            return await telemetry.scrape_or_failure(
                session,
                w.urls[arm],
                now_ns=self.clock_ns,
                names=telemetry.GUARDED,
                timeout_s=w.timeout_s,
                api_key=w.api_key,
            )

        arms = list(w.urls)
        taken = await asyncio.gather(*map(one, arms))
        samples = self._notes.scrapes([Sample(*pair) for pair in zip(arms, taken, strict=True)])
        for sample in samples:
            arm, snapshot = sample.arm, sample.snapshot
            before = self.last.get(arm)
            self.last[arm] = (snapshot, None if before is None else before[0])
            self.answered |= arm is Arm.SPECULATIVE and snapshot.failure is None
            for machine in self.machines.values():
                self._moved(machine.telemetry(sample, snapshot.taken_ns))
        for of, kept in self._notes.worth_keeping(samples):
            self._keep(of, kept)
        self._take_receipts()
        # By /metrics alone there are no receipts to wait for.
        now_ns = self.clock_ns() + (GRACE_NS + 1 if w.store is None else 0)
        for machine in self.machines.values():
            while self._moved(machine.tick(now_ns)):
                pass
        self._notes.ticked(now_ns)
        if self.unwritten or time.monotonic() >= self._kept_s + _KEEP_EVERY_S:
            self._write()

    def end(self) -> None:
        """Write what waits, once more."""
        self._write()

    def _take_receipts(self) -> None:
        if self.receipts is None:
            return
        if self.unwritten:  # before another one's rows are taken for newer than ours
            self._write()
        try:
            with self._reading() as store:
                self._adopt(store)
                windows_s = self.watched.rollout.fallback.windows_s
                back_ns = round(2e9 * windows_s[-1]) if windows_s else 0
                found = self.receipts.more(store, self.clock_ns() - back_ns)
        except StoreError as error:
            self.note = f"no receipts: {error}"
            return
        self.note = ""
        if found:
            ids = found[0].receipt_id, found[-1].receipt_id
            mark = fallback.taken_mark(Taken(self._notes.floor_ns, *ids, len(found)))
            self._keep(Arm.SPECULATIVE, mark)
        for receipt in found:
            at, _ = self._notes.receipt(receipt)
            for machine in self.machines.values():
                moved = machine.observe(receipt, at)
                while self._moved(moved):
                    moved = machine.tick(0)

    def _reading(self) -> Store:
        path = self.watched.store
        if path is None:
            raise StoreError("no store is watched")
        return Store.read(path)

    def _moved(self, moved: Transition | None) -> bool:
        """A route moved: say it, fire the hooks, keep the row."""
        if moved is None:
            return False
        wall_ns = time.time_ns() - (self.clock_ns() - moved.at_ns)
        self.why[moved.route] = moved.why
        self.say(moved)
        self.hooks.fire(Event(self.watched.rollout.name, moved, wall_ns))
        if self.watched.store is not None:
            settings = self.machines[moved.route].settings.digest
            self.unwritten.append((moved, wall_ns, settings))
        return True

    def _write(self) -> None:
        """Keep what waits, if the store lets us: first what transitions rest on, then these."""
        path = self.watched.store
        if path is None or self._run is None or not (self.unwritten or self.unkept):
            return
        try:
            with Store.open(path) as store:
                self._begin_runs(store)
                for run in {run.run_id: run for run, _, _ in self.unkept}.values():
                    for arm in Arm:
                        mine = [x for of, a, x in self.unkept if of is run and a is arm]
                        store.append_samples(run.run_id, arm, mine)
                self.unkept, self._kept_s = [], time.monotonic()
                while self.unwritten:
                    moved, wall_ns, settings = self.unwritten[0]
                    store.append_transition(
                        self.watched.rollout.name,
                        moved,
                        run_id=self._run.run_id,
                        wall_ns=wall_ns,
                        settings=settings,
                    )
                    del self.unwritten[0]
        except StoreError as error:
            waits = f"{len(self.unwritten)} transitions" if self.unwritten else "what was seen"
            self.note = f"{waits} not written: {error}"
            del self.unwritten[:-_MOST_UNWRITTEN]

    def _begin_runs(self, store: Store) -> None:
        """Those of ours that this process has not begun yet. Their clock is that of the run that
        is followed, whatever ours was since the machine was started.
        """
        waiting = [run for run, _, _ in self.unkept]
        for run in waiting if self._run is None else [*waiting, self._run]:
            if run.run_id not in self._begun:
                store.begin_run(run, wall_ns=time.time_ns(), clock_ns=self.clock_ns())
                self._begun.add(run.run_id)

    def view(self) -> View:
        """What is seen now."""
        now = self.clock_ns()
        routes = tuple(
            RouteView(
                route=name,
                state=machine.state,
                share=machine.share,
                since_s=None if machine.seq == 0 else (now - machine.since_ns) / 1e9,
                due_s=None if machine.due_ns is None else (machine.due_ns - now) / 1e9,
                fallbacks=machine.fallbacks,
                why=self.why.get(name, ""),
                gauges=tuple(machine.gauges()),
            )
            for name, machine in self.machines.items()
        )
        return View(
            wall_ns=time.time_ns(),
            evidence="/metrics alone" if self.watched.store is None else "receipts and /metrics",
            servers=tuple(_server_view(arm, *scrapes) for arm, scrapes in self.last.items()),
            routes=routes,
            note=self.note,
        )

    def exit_code(self) -> ExitCode:
        """What it ended with: the worst route; no look at the speculative server judges nothing."""
        states = [machine.state for machine in self.machines.values()]
        code = fallback.exit_code(states)
        is_blind = not self.answered and code is ExitCode.PASS
        return ExitCode.COULD_NOT_JUDGE if is_blind else code


def _server_view(arm: Arm, now: Snapshot, before: Snapshot | None) -> ServerView:
    change = None
    if before is not None and before.failure is None and now.failure is None:
        change = telemetry.difference(before, now)
    tokens = None if change is None else change.total(telemetry.GENERATION_TOKENS)
    drafted = None if change is None else change.total(telemetry.DRAFT_TOKENS)
    accepted = None if change is None else change.total(telemetry.ACCEPTED_TOKENS)
    return ServerView(
        arm=arm,
        failure=now.failure,
        running=now.total(telemetry.RUNNING),
        waiting=now.total(telemetry.WAITING),
        tokens_per_s=None if change is None or tokens is None else tokens / change.seconds,
        acceptance=accepted / drafted if accepted is not None and drafted else None,
    )


def urls_of(rollout: Rollout, given: Mapping[Arm, str | None]) -> dict[Arm, str]:
    """The pair's addresses: as given, else those of an attached rollout.

    Raises:
        UsageError: one is missing, or is no URL.
    """
    attached = rollout.attached
    named = {
        Arm.TARGET_ONLY: None if attached is None else attached.target_only,
        Arm.SPECULATIVE: None if attached is None else attached.speculative,
    }
    found = {arm: given.get(arm) or url for arm, url in named.items()}
    missing = [arm for arm, url in found.items() if not url]
    if missing:
        option = f"--{missing[0].replace('_', '-')}"
        raise UsageError(
            f"rollout {rollout.name} does not say where its {missing[0]} server is (engine:"
            f" {rollout.engine}); give {option} URL"
        )
    for arm, url in found.items():
        try:
            http_url(str(url))
        except ValueError as error:
            raise UsageError(f"--{arm.replace('_', '-')}: {error}") from None
    return {arm: str(url).rstrip("/") for arm, url in found.items()}


async def follow(
    follower: Follower,
    *,
    on_view: Callable[[View], None],
    rounds: int | None,
    ends: Callable[[Sequence[RouteState]], bool],
) -> None:
    """Look every interval until `ends` says so of the routes' states, or so many rounds are over.

    Args:
        follower: begun already.
        on_view: told what is seen after each round.
        rounds: None goes on until cancelled.
        ends: asked after each round.
    """
    every_s = follower.watched.interval_s
    done = 0
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        while True:
            started_s = time.monotonic()
            await follower.look(session)
            on_view(follower.view())
            done += 1
            if rounds is not None and done >= rounds:
                return
            if ends([machine.state for machine in follower.machines.values()]):
                return
            await asyncio.sleep(max(0.0, started_s + every_s - time.monotonic()))
