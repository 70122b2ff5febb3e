"""`speccheck sweep`: every proposal length at every load, in turns, and what that comes to.

One round of a load is one turn of each of its arms on the same prompts, one arm after the other: on
a shared machine, arms at the same time would measure each other. The order rotates and is mirrored
from round to round, so that drift is not taken for an effect. `grid` says what is sent, `budget`
which load takes the next round, `cells` and `calibration` what receipts come to.

A round counts once its receipts are in the store and its mark beside them. A round that a crash cut
through is left out and another is made: its arms would not have been measured within minutes of
each other. The same command goes on where it stopped and sends nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from speccheck import client, launch, plan, store
from speccheck.context import RunContext
from speccheck.drive import Endpoint, MonotonicClock, Written, drive
from speccheck.errors import EngineError, UsageError
from speccheck.health import ClientHealth, pooled_health
from speccheck.records import (
    CALIBRATION,
    SWEEP,
    Arm,
    ArmDescription,
    Estimate,
    Measurement,
    PlannedRequest,
    Receipt,
    Verdict,
    to_json,
)
from speccheck.sweep import budget, calibration, cells, grid
from speccheck.sweep.calibration import Calibration
from speccheck.sweep.cells import MIXED, Cell, Limits, Load
from speccheck.sweep.grid import PlannedLoad, load_name
from speccheck.telemetry import Snapshot, scrape

ROUND_MARK = "speccheck:sweep_round_seconds"
"""Sample that closes a round: how long it took; its labels name load, block and client health."""
MEMORY = "process_resident_memory_bytes"
"""Sample of a server's resident memory after a turn; its label names the arm of the load."""

_SAY_EVERY_S = 5.0
_LAG_FLOOR_S = 1.0
"""Turns are closed loops: a request that leaves late lowers the load a little and is timed from
when it left. What voids a round is a client that stalls or runs out of CPU.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command asks for beside the rollout; None takes the rollout's own."""

    k: tuple[int, ...] | None = None
    concurrency: tuple[int, ...] | None = None
    tasks: tuple[str, ...] = ()
    budget_s: float | None = None
    price_per_engine_hour: float | None = None
    now_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Result:
    """What a sweep knows when it ends, also when the time was up before."""

    run_id: str
    loads: tuple[Load, ...]
    calibrations: Mapping[int, Calibration]
    lines: tuple[str, ...]
    """Where it pays and where not, per task; loads are never averaged."""
    notes: tuple[str, ...]
    """What to beware of: rounds left out, what was not measured and why."""
    open_cells: tuple[str, ...]
    """Cells without a verdict, each with how many more pairs would decide it."""
    n_cells: int
    n_unmeasured: int
    """Cells that the time was up for."""
    verdict: Verdict
    """PASS: every cell has a verdict, whichever. INCONCLUSIVE: some are open. ERROR: no data."""
    seconds: float
    """That this command took."""


@dataclass
class Standing:
    """One load and the rounds it has, as the run goes on."""

    load: PlannedLoad
    ks: tuple[int, ...]
    """Proposal lengths that this command is about; there may be receipts of others."""
    limits: Limits
    valid: list[list[Receipt]] = field(default_factory=list)
    """Receipts of each whole round in which our client was well, in order."""
    late: int = 0
    cut: int = 0
    next_block: int = 0
    round_s: float | None = None
    rounds: Counter[int] = field(default_factory=Counter)
    """k -> valid rounds that it took part in."""
    needed: dict[int, list[int | None]] = field(default_factory=dict)
    """k -> further pairs of its cells that were open at its last look; empty: all decided."""

    def add(self, receipts: list[Receipt], seconds: float, *, is_late: bool) -> None:
        """A round is done. Cells are judged at looks only, see `budget.next_look`."""
        self.round_s = seconds
        if is_late:
            self.late += 1
            return
        self.valid.append(receipts)
        took_part = {r.k for r in receipts if r.arm == Arm.SPECULATIVE and r.k}
        self.rounds.update(took_part)
        at_look = {k for k in took_part if budget.last_look(self.rounds[k]) == self.rounds[k]}
        if at_look:
            self._look(at_look)

    def _look(self, ks: set[int]) -> None:
        """Judge the cells of these lengths, beside all others of the load: they share a level."""
        mine = [r for members in self.valid for r in members]
        self.needed |= {k: [] for k in ks}
        for found in cells.loads(mine, limits=self.limits):
            for cell in found.cells:
                if cell.k in ks and cell.verdict == "open":
                    self.needed[cell.k].append(cell.needed)

    def lengths(self) -> list[int]:
        """Proposal lengths of the next round: those that lack rounds or a verdict."""
        wanted = self.load.wanted_rounds
        if wanted is not None:
            return [k for k in self.ks if self.rounds[k] < wanted]
        return [k for k in self.ks if k not in self.needed or self.needed[k]]

    def for_budget(self) -> budget.Standing:
        """As the scheduler sees it."""
        lacking = self.lengths()
        return budget.Standing(
            name=self.load.name,
            rounds=min((self.rounds[k] for k in lacking or self.ks), default=0),
            void=self.late,
            round_s=self.round_s,
            pairs_per_round=self.load.n,
            needed=tuple(pairs for k in lacking for pairs in self.needed.get(k, ())),
            wanted_rounds=self.load.wanted_rounds,
        )


def sweep(run: RunContext, settings: Settings) -> Result:
    """Measure what is not measured yet, then say what all receipts of the sweep come to.

    Args:
        run: an open run; the receipts become part of it.
        settings: the grid, and the time there is.

    Raises:
        UsageError: nothing to sweep, or the run was begun on other servers.
        EngineError: a server does not start or answer.
        StoreError: receipts cannot be written.
    """
    begun_s = settings.now_s()
    own = run.rollout.sweep
    swept = grid.families(run, settings.tasks)
    planned = grid.planned_loads(
        run,
        swept,
        settings.concurrency or own.concurrency,
        rounds=own.rounds if settings.budget_s is None else None,
    )
    with ExitStack() as stack:
        servers = _attached(run, stack)
        ks = _lengths(run, settings, servers)
        standings = _resume(run, planned, ks)
        progress = _Progress(run, settings, begun_s)
        while True:
            seen = [standing.for_budget() for standing in standings.values()]
            chosen = budget.next_load(seen, left_s=progress.left_s())
            if chosen is None:
                break
            if servers is None:
                servers = stack.enter_context(
                    launch.sweep_servers(run.rollout, ks, run.out / "logs", run.report.line)
                )
            if not progress.rounds:
                _admit(run, servers)
                _warm_up(run, servers, swept[0])
            progress.tell(seen, chosen)
            _round(run, servers, standings[chosen], settings)
    result = _result(run, standings.values(), settings, begun_s)
    _keep(run, result)
    return result


# --- servers ------------------------------------------------------------------------------------


def _attached(run: RunContext, stack: ExitStack) -> launch.SweepServers | None:
    """The servers that run already, whose proposal length is given; None where we start them."""
    if run.rollout.engine != "attached":
        return None
    return stack.enter_context(
        launch.sweep_servers(run.rollout, (), run.out / "logs", run.report.line)
    )


def _lengths(
    run: RunContext, settings: Settings, servers: launch.SweepServers | None
) -> tuple[int, ...]:
    """Proposal lengths to measure; an attached server has the one it was started with."""
    asked = settings.k or run.rollout.sweep.k
    if servers is None:
        return asked
    (has,) = (k for k in servers.arms if k)
    if settings.k and settings.k != (has,):
        raise UsageError(
            f"--k: the attached speculative server runs with {has} and k cannot be set per request;"
            f" leave out --k, or start it with another num_speculative_tokens"
        )
    run.report.line(f"  attached: k {has} only, as the speculative server was started")
    return (has,)


def _admit(run: RunContext, servers: launch.SweepServers) -> None:
    """Take the servers into the run, or refuse them where it was begun on others."""
    known = run.store.arms(run.run_id)
    for arm in [*servers.arms.values(), *servers.controls.values()]:
        same = {a.engine_config_id for a in known if _kind(a) == _kind(arm)}
        if same and arm.engine_config_id not in same:
            raise UsageError(
                f"{run.out}: this run was begun on another {_name(arm)} server; measure it anew "
                "with --again"
            )
        run.store.put_arm(run.run_id, arm)


def _kind(arm: ArmDescription) -> tuple[Any, ...]:
    """What makes two servers the same arm of a sweep."""
    config = arm.speculative_config or {}
    return arm.arm, config.get("method"), config.get("num_speculative_tokens")


def _name(arm: ArmDescription) -> str:
    if arm.speculative_config is None:
        return "target-only"
    return f"k {arm.speculative_config.get('num_speculative_tokens')}"


def _turns(
    servers: launch.SweepServers, ks: Sequence[int], *, with_controls: bool
) -> list[tuple[str, ArmDescription]]:
    """(suffix of its phase, server) of each arm: none is target-only, then -k5, and -lookup4."""
    found = [("" if k == 0 else f"-k{k}", servers.arms[k]) for k in (0, *ks)]
    if with_controls:
        found += [(f"-lookup{k}", arm) for k, arm in servers.controls.items()]
    return found


def _warm_up(run: RunContext, servers: launch.SweepServers, family: grid.Family) -> None:
    run.report.line("  warming up")
    ks = sorted(k for k in servers.arms if k)
    for suffix, arm in _turns(servers, ks, with_controls=True):
        phase = plan.Phase(run.run_id, SWEEP, f"sweep{suffix}", family.sampler, concurrency=4)
        prompts = family.classes[0].prompts
        warm = plan.warm_up(phase, prompts, run.rollout.warm_up, arms=[arm.arm])
        _send(run, servers, arm, warm)


def _send(
    run: RunContext,
    servers: launch.SweepServers,
    arm: ArmDescription,
    planned: Sequence[PlannedRequest],
) -> tuple[list[Receipt], ClientHealth]:
    """Drive one arm's requests: its receipts, all of them in the store, and our client's health."""
    got: list[Receipt] = []
    endpoint = Endpoint(
        description=arm,
        policy_version=run.rollout.policy_version,
        served_model=arm.model,
        api_key=servers.api_key,
    )

    def write(batch: Sequence[Written]) -> None:
        run.store.append_receipts(batch)

    report = asyncio.run(
        drive(
            planned,
            {arm.arm: endpoint},
            clock=MonotonicClock(),
            run_id=run.run_id,
            write=write,
            on_receipt=got.append,
            give_up_after=20,
            limits=run.rollout.client_limits,
        )
    )
    return got, report.health


# --- rounds -------------------------------------------------------------------------------------


def _round(
    run: RunContext,
    servers: launch.SweepServers,
    standing: Standing,
    settings: Settings,
) -> None:
    """One turn of each arm, then the mark that closes the round."""
    load, block = standing.load, standing.next_block
    standing.next_block += 1
    began_s = settings.now_s()
    receipts: list[Receipt] = []
    drives: list[ClientHealth] = []
    turns = _turns(servers, standing.lengths(), with_controls=load.family.stage == CALIBRATION)
    for place in grid.turn_order(len(turns), block):
        suffix, arm = turns[place]
        got, health = _send(run, servers, arm, grid.turn(run, load, suffix, arm.arm, block))
        receipts += got
        drives.append(health)
        _sample_memory(run, servers, load, arm)
    seconds = settings.now_s() - began_s
    limits = run.rollout.client_limits.model_copy(update={"lag_floor_s": _LAG_FLOOR_S})
    is_late = not pooled_health(drives, receipts, limits).valid
    word = "late" if is_late else "ok"
    labels = (("block", str(block)), ("health", word), ("load", load.name))
    _sample(run, ROUND_MARK, labels, seconds)
    standing.add(receipts, seconds, is_late=is_late)


def _sample_memory(
    run: RunContext, servers: launch.SweepServers, load: PlannedLoad, arm: ArmDescription
) -> None:
    """Resident memory of a server after its turn, by the system or by its own metrics."""
    if load.family.stage != SWEEP:
        return
    pid = servers.pids.get(arm.url)
    resident = (
        asyncio.run(_scraped_memory(arm.url, servers.api_key))
        if pid is None
        else launch.resident_bytes(pid)
    )
    if resident is not None:
        k = (arm.speculative_config or {}).get("num_speculative_tokens", 0)
        key = cells.arm_key(load.family.route, load.family.name, load.concurrency, k)
        _sample(run, MEMORY, (("arm", key),), float(resident))


async def _scraped_memory(url: str, api_key: str | None) -> float | None:
    """What the server's own metrics say; None where it has none."""
    async with client.open_session() as session:
        try:
            page = await scrape(
                session, url, now_ns=time.perf_counter_ns, names=[MEMORY], api_key=api_key
            )
        except EngineError:
            return None
    return page.total(MEMORY)


def _sample(run: RunContext, name: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
    taken = Snapshot(time.perf_counter_ns(), {(name, labels): value})
    run.store.append_samples(run.run_id, Arm.TARGET_ONLY, [taken])


def _resume(
    run: RunContext, planned: Iterable[PlannedLoad], ks: tuple[int, ...]
) -> dict[str, Standing]:
    """Every load with the rounds that the store has of it."""
    limits = _limits(run)
    found = {load.name: Standing(load, ks, limits) for load in planned}
    blocks: dict[tuple[str, int], list[Receipt]] = defaultdict(list)
    for r in run.store.receipts(run.run_id, stage=[SWEEP, CALIBRATION], warm_up=False):
        blocks[load_name(r), r.block].append(r)
    marks = {
        (load, block): (seconds, is_late)
        for load, block, seconds, is_late in _marks(run.store, run.run_id)
    }
    for (name, block), receipts in sorted(blocks.items()):
        standing = found.get(name)
        if standing is None:
            continue
        standing.next_block = block + 1
        mark = marks.get((name, block))
        if mark is None:
            standing.cut += 1
        else:
            standing.add(receipts, mark[0], is_late=mark[1])
    return found


def that_count(opened: store.Store, run_id: str, receipts: Iterable[Receipt]) -> list[Receipt]:
    """Receipts without those of a sweep's rounds that were cut, or in which our client was late."""
    well = {(load, block) for load, block, _, is_late in _marks(opened, run_id) if not is_late}
    return [
        r
        for r in receipts
        if r.stage not in (SWEEP, CALIBRATION) or (load_name(r), r.block) in well
    ]


def calibrated(opened: store.Store, run_id: str) -> dict[int, Calibration]:
    """Batch size -> what decoding costs there, as far as a sweep of this run calibrated it."""
    receipts = opened.receipts(run_id, stage=CALIBRATION)
    return calibration.calibrate(that_count(opened, run_id, receipts))


def _marks(opened: store.Store, run_id: str) -> list[tuple[str, int, float, bool]]:
    """(load, block, seconds, whether our client was late) of each round that was closed."""
    return [
        (dict(labels)["load"], int(dict(labels)["block"]), value, dict(labels)["health"] == "late")
        for snapshot in opened.snapshots(run_id, Arm.TARGET_ONLY)
        for (name, labels), value in snapshot.samples.items()
        if name == ROUND_MARK
    ]


def _limits(run: RunContext) -> Limits:
    default = run.guardrails.speculative_decoding_guardrails.min_speedup
    routes = {
        route.name: limit
        for route in run.rollout.routes
        if (limit := run.guardrails.limits(route.name).get("min_speedup")) is not None
    }
    return Limits(1.0 if default is None else default, routes)


# --- progress -----------------------------------------------------------------------------------


@dataclass
class _Progress:
    """A line every few seconds: what is done, what comes next, how long it will take."""

    run: RunContext
    settings: Settings
    begun_s: float
    rounds: int = 0
    said_s: float | None = None

    def left_s(self) -> float:
        """Of the budget, seconds; without one as long as it takes."""
        if self.settings.budget_s is None:
            return float("inf")
        return self.settings.budget_s - (self.settings.now_s() - self.begun_s)

    def tell(self, standings: Sequence[budget.Standing], chosen: str) -> None:
        """A round begins; say so unless something was said just now."""
        self.rounds += 1
        now_s = self.settings.now_s()
        if self.said_s is not None and now_s - self.said_s < _SAY_EVERY_S:
            return
        self.said_s = now_s
        done = sum(s.rounds + s.void for s in standings)
        if self.settings.budget_s is None:
            missing = [(s.wanted_rounds or 0) - s.rounds for s in standings]
            timed = [s.round_s for s in standings if s.round_s is not None]
            usual_s = sum(timed) / len(timed) if timed else None
            left_s = sum(
                n * (s.round_s or usual_s or 0.0) for n, s in zip(missing, standings, strict=True)
            )
            left = "" if usual_s is None else f", about {clock_time(left_s)} left"
            text = f"round {done + 1} of {done + sum(missing)}{left}"
        else:
            unseen = sum(s.rounds < budget.FIRST_ROUNDS for s in standings)
            still = sum(len(s.needed) for s in standings)
            what = f"small pass, {unseen} loads to go" if unseen else f"{still} cells open"
            text = f"round {done + 1}, {what}, {clock_time(self.left_s())} left"
        self.run.report.line(f"  {text}: {chosen}")


def clock_time(seconds: float) -> str:
    """Seconds as people say them.

    >>> clock_time(65), clock_time(3725), clock_time(9)
    ('1m05s', '1h02m', '9s')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


# --- what it comes to ---------------------------------------------------------------------------


def _result(
    run: RunContext,
    standings: Iterable[Standing],
    settings: Settings,
    begun_s: float,
) -> Result:
    """From the rounds that count, of the loads that this command is about."""
    known = list(standings)
    counted = [r for one in known for members in one.valid for r in members]
    calibrations = calibration.calibrate(counted)
    loads = cells.loads(
        counted,
        calibrations=calibrations,
        limits=_limits(run),
        memory=_memory(run),
        price_per_engine_hour=settings.price_per_engine_hour
        or run.rollout.sweep.price_per_engine_hour,
    )
    unmeasured = [one.load for one in known if one.load.family.stage == SWEEP and not one.valid]
    open_cells = [
        f"{load.route}, {load.task}, concurrency {load.concurrency}, k {cell.k}: {_needs(cell)}"
        for load in loads
        for cell in load.cells
        if cell.verdict == "open"
    ]
    n_missing = sum(
        len(one.load.family.classes) * len(one.ks) for one in known if one.load in unmeasured
    )
    verdict = Verdict.INCONCLUSIVE if open_cells or unmeasured else Verdict.PASS
    return Result(
        run_id=run.run_id,
        loads=loads,
        calibrations=calibrations,
        lines=tuple(cells.findings(loads)),
        notes=(*_notes(run, known, calibrations, counted), *_memory_note(loads)),
        open_cells=tuple(open_cells),
        n_cells=sum(len(load.cells) for load in loads) + n_missing,
        n_unmeasured=n_missing,
        verdict=verdict if loads else Verdict.ERROR,
        seconds=settings.now_s() - begun_s,
    )


def _memory(run: RunContext) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for snapshot in run.store.snapshots(run.run_id, Arm.TARGET_ONLY):
        for (name, labels), value in snapshot.samples.items():
            if name == MEMORY and "arm" in dict(labels):
                found[dict(labels)["arm"]].append(value)
    return found


def _needs(cell: Cell) -> str:
    if cell.needed:
        return f"about {cell.needed} more pairs"
    if cell.n_rounds < budget.FIRST_ROUNDS:
        return f"{cell.n_rounds} rounds, {budget.FIRST_ROUNDS} are needed for an interval"
    return "too close to the limit to say how many more pairs"


def _notes(
    run: RunContext,
    standings: Sequence[Standing],
    calibrations: Mapping[int, Calibration],
    counted: Sequence[Receipt],
) -> list[str]:
    notes = []
    if late := sum(one.late for one in standings):
        notes.append(f"{late} rounds left out: our own client was late in them")
    if cut := sum(one.cut for one in standings):
        notes.append(f"{cut} rounds left out: cut by an interruption, and made again")
    unmeasured = [one.load.name for one in standings if not one.valid]
    if unmeasured:
        notes.append(f"not measured: {', '.join(unmeasured)}")
    if not any(one.load.family.route == MIXED for one in standings):
        notes.append("no mixed traffic: not asked for, or the corpus lacks one of its classes")
    notes += [f"costs: {note}" for note in sorted({one.note for one in calibrations.values()})]
    missing = sorted({one.load.concurrency for one in standings} - set(calibrations))
    if missing:
        notes.append(
            f"modelled savings at concurrency {', '.join(map(str, missing))}: not estimated, the "
            "verify step is not calibrated there"
        )
    rows = run.rollout.embedded.max_num_seqs
    above = [c for c in sorted({one.load.concurrency for one in standings}) if c > rows]
    if run.rollout.engine == "embedded" and above:
        notes.append(f"at concurrency above {rows} requests queue: that is embedded.max_num_seqs")
    short = [
        r
        for r in counted
        if r.route == MIXED and r.arm == Arm.SPECULATIVE and r.decision == "target_only"
    ]
    if drafted := sum(bool(r.proposed_tokens) for r in short):
        notes.append(
            f"mixed traffic: the server drafted for {drafted} of {len(short)} short requests that "
            "asked for speculation off; it has no switch per request"
        )
    return notes


def _memory_note(loads: Sequence[Load]) -> list[str]:
    arms = [arm for load in loads for arm in (load.target, *load.arms.values())]
    if any("memory_bytes" in arm.figures for arm in arms):
        return []
    return [f"memory: not measured, the servers are not ours and do not tell ({MEMORY})"]


def _keep(run: RunContext, result: Result) -> None:
    """Cells and costs as measurements of the run, and how the sweep ended."""
    measured = [
        Measurement(
            metric,
            SWEEP,
            load.route,
            f"{load.task}, concurrency {load.concurrency}, k {cell.k}",
            estimate,
        )
        for load in result.loads
        for cell in load.cells
        for metric, estimate in _cell_metrics(cell)
    ]
    measured += [
        Measurement(metric, CALIBRATION, "", f"concurrency {c}{where}", estimate, found.note)
        for c, found in result.calibrations.items()
        for metric, where, estimate in _cost_metrics(found)
    ]
    run.store.put_measurements(run.run_id, SWEEP, measured)
    evidence = {
        "verdict": result.verdict.word,
        "reasons": list(result.open_cells),
        "lines": list(result.lines),
        "notes": list(result.notes),
        "seconds": result.seconds,
        "calibrations": to_json(dict(result.calibrations)),
    }
    kept = store.StageResult(run.run_id, SWEEP, time.time_ns(), result.verdict, evidence)
    run.store.put_stage(kept)


def _cell_metrics(cell: Cell) -> list[tuple[str, Estimate | None]]:
    return [
        *((f"{name}_mean_ratio", estimate) for name, estimate in cell.ratios.items()),
        ("acceptance_rate", cell.acceptance),
        ("mean_acceptance_length", cell.mean_acceptance_length),
        ("draft_coverage", cell.coverage),
        ("saved_target_passes_measured", cell.saved_measured),
        ("saved_target_passes_modelled", cell.saved_modelled),
        ("e2e_mean_ratio_modelled", cell.predicted),
        *((f"acceptance_at_position_{i}", share) for i, share in enumerate(cell.per_position, 1)),
    ]


def _cost_metrics(found: Calibration) -> list[tuple[str, str, Estimate | None]]:
    metrics: list[tuple[str, str, Estimate | None]] = [
        ("target_step_s", "", found.step_s),
        ("draft_cost", "", found.draft),
        ("round_overhead", "", found.overhead),
    ]
    for k in found.verify:
        metrics += [
            ("verify_cost", f", k {k}", found.verify[k]),
            ("round_cost", f", k {k}", found.round[k]),
        ]
    return metrics
