"""The live guard: a state machine per route that turns speculation off, and lets it come back.

    enabled --a rule fails--> fell back --cool-down, server well--> probation --it passes--> enabled
                                  ^                                    |
                                  +----------a rule fails--------------+    too often: off, until
                                                                            an operator resets it

Pure: no clock, no store, no threads. What it knows is what it was told, receipt by receipt and
scrape by scrape, with the time of each; so the same receipts give the same decisions, in whatever
portions they come, and `speccheck fallback replay` can show it. What time moves is stamped with the
moment at which it was due, whenever the next call comes. Scrapes wait for `GRACE_NS` for receipts
that completed before them and are still on their way.

A window that is looked at after every request must not alarm more often than it says. The rules on
receipts are the canary's monitors, valid at every look, begun anew every half window, so that two
overlap and a change after a long calm is seen by one that began not long before it; short windows
see it soon, long ones see little of it. Each is given the part of `false_alarms_per_day` that makes
all of a day's windows together keep to it, whatever the traffic. What is counted or read off a
gauge (verifier errors, refusals, stall, queue, a server that does not answer) is exact: it has no
chance in it, and holds for as long as the settings say.

Hysteresis: a route falls back when a rule is certain to be beyond its limit, and comes back when
the same rule is certain to be within it, on a small share and on new evidence.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from speccheck import measure, stats, telemetry
from speccheck.config import FallbackConfig, Guardrails, Rollout
from speccheck.errors import ExitCode, UsageError
from speccheck.guardrails import ALPHA_FAIL, RULES, RuleLimit, rule_limits
from speccheck.monitors import AcceptanceMethod, Count, Monitor, Monitors
from speccheck.records import (
    Arm,
    Estimate,
    Outcome,
    Receipt,
    RouteState,
    Stage,
    Transition,
    Verdict,
    digest,
)
from speccheck.scraped import Scraped
from speccheck.telemetry import Snapshot

LIVE_LIMITS: dict[str, float] = {
    "max_tpot_p50_regression": 0.10,
    "max_e2e_p50_regression": 0.10,
    "max_acceptance_rate": 0.95,
    "max_unsupported_requests": 2,
}
"""Limits on live traffic where no file names any. A p95 takes hundreds of requests on each arm to
fail, a median some dozens; a refusal or two is a client's slip, not a server's; telling 1 from 0.98
takes more than a thousand."""

ENGINE_ERRORS = "max_engine_error_rate"
VERIFIER_ERRORS = "max_verifier_errors"
UNACCEPTED = "max_unaccepted_tokens"
QUEUE = "max_queued"
STALL = "max_stall_s"
UNREACHABLE = "max_unreachable_s"
PROTECTED = "max_protected_delay"
"""Rules of the live guard beside the guardrails; names are those of their settings."""

OF_SCRAPES = frozenset({QUEUE, STALL, UNREACHABLE})
"""Rules that no receipt can decide."""

COOL_DOWN = "cool_down"
PROBATION = "probation"
RESET = "reset"
DISABLED = "disabled"
"""What moves a route beside rules: time, a probation that went well, an operator."""

_ENGINE_ERRORS = frozenset(
    {
        *("server_error", "stream_error", "bad_stream", "no_finish_reason", "no_done"),
        *("connection", "unreachable", "stall"),
    }
)
"""Error classes that are the server's own fault. A timeout may be a long answer: it counts in the
error rate only."""

_LOST = _ENGINE_ERRORS | {"timeout"}
"""Why the speculative arm lost an answer that target-only ended: what its hand-over says first."""

_DOES_NOT_ADD_UP = "speculation metrics do not add up"
"""First words of a receipt's warning that its verifier's counts cannot be (see `client`)."""

_RULE_SHARE, _OWN_SHARE = 0.8, 0.1
"""Of a window's level: for the guardrails, and for each of the two rates of our own."""

_PROBATION_RATE = 0.05
"""A rate of errors that failed must be shown to be under this, or its limit where that is more:
certifying 1 % on a small share of the traffic would take longer than finding out."""

_LONGEST = 24
"""Windows of slow traffic are closed after so many times their length, whatever they saw; after
such a pause they begin anew."""

_LEAST_UNACCEPTED = {"receipts": 10, "metrics": 3}
"""Answers, or scrape intervals, in a row without an accepted token that show a dead draft."""

_FAILED_SCRAPES = 3
"""Tries without an answer before a server is said not to answer."""

_KEEP = 1000
"""Receipts that a window keeps for the notes of a finding."""

_REFERENCE = 500
"""Latencies of protected traffic without speculation that are kept as its control."""

GRACE_NS = 1_000_000_000
"""How late a receipt may be handed in after a scrape or a tick of the same moment, and still come
before it."""

DAY_S = 86_400.0


# --- settings -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides on a route, resolved: the guard's settings and the limits of its rules."""

    config: FallbackConfig
    limits: Mapping[str, RuleLimit]
    acceptance: AcceptanceMethod = "betting"
    floors: Mapping[str, Estimate] = field(default_factory=dict)
    """A/A ratios by metric, see `guardrails.judge`."""
    evidence: Literal["receipts", "metrics"] = "receipts"
    """What the rules on requests are judged from; metrics only where nobody has receipts."""
    protected_s: tuple[float, ...] = ()
    """e2e of protected traffic without speculation, seconds: the control of its delay."""
    unrepresentative: str = ""
    """Why prompts are not the route's own; then only rules that hold on any workload count."""

    def alpha_fail(self, length_s: float | None) -> float:
        """Level of failing of one window of a length: a day's windows keep to the day's rate.

        They begin half their length apart, and each length has its part of the rate.
        """
        if length_s is None:
            return ALPHA_FAIL
        config = self.config
        per_day = config.false_alarms_per_day / len(config.windows_s)
        return min(per_day * length_s / 2 / DAY_S, 0.1)

    @property
    def digest(self) -> str:
        """Tagged digest of what decides; hooks are no part of it."""
        return digest(
            "fallback",
            [
                self.config.model_dump(mode="json"),
                {n: [x.limit, x.min_n, x.counted] for n, x in self.limits.items()},
                self.acceptance,
                {name: [e.low, e.high, e.n] for name, e in self.floors.items()},
                self.evidence,
                list(self.protected_s),
                self.unrepresentative,
            ],
        )


def settings_of(rollout: Rollout, rules: Guardrails, route: str, **more: Any) -> Settings:
    """The settings of a route: its guardrails, overlaid with `fallback.limits` of the rollout.

    Rules that ask whether speculation pays turn nothing off, rules in dry run neither. `more` goes
    to `Settings`.
    """
    own = rollout.fallback.limits.model_dump(exclude_none=True)
    merged = {name: RuleLimit(limit) for name, limit in LIVE_LIMITS.items()}
    merged |= rule_limits(rules, route)
    merged |= {name: RuleLimit(limit) for name, limit in own.items()}
    live = {
        name: limit
        for name, limit in merged.items()
        if limit.counted
        and (Stage.CANARY in RULES[name].stages or name == PROTECTED)
        and not RULES[name].pays
        and name != "max_fallback_rate"  # what the guard does is no evidence for it
    }
    return Settings(rollout.fallback, live, rollout.canary.acceptance_method, **more)


def sticky(config: FallbackConfig, unrepresentative: str = "") -> Settings:
    """Settings of a canary: its first failure turns the route off, and no window is ever closed.

    The monitors, with their limits and levels, are the canary's own.
    """
    return Settings(
        config.model_copy(
            update={
                "windows_s": (),
                "min_requests": 1,
                "most_fallbacks": 0,
                "max_engine_error_rate": None,
                "max_verifier_errors": None,
                "max_unaccepted_tokens": None,
            }
        ),
        {},
        unrepresentative=unrepresentative,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one arm's server; one that failed holds the reason (`failed_scrape`)."""

    arm: Arm
    snapshot: Snapshot


SCRAPED = "speccheck:scraped"
"""Series of every kept scrape that was answered: a page without any series we know is one too."""

BEGAN = "speccheck:guard_began"
"""Series of a mark: a route's machine was made anew from its rows. Labels: route, seq, wall_ns."""

LATE = "speccheck:taken_in_late"
"""Series of a mark: a receipt was taken in then and not at its `done_ns`. Label: receipt."""

TAKEN = "speccheck:taken_in"
"""Series of a mark: a guard took in receipts that it read from a store. Labels: first, last, n."""


@dataclass(frozen=True, slots=True)
class Began:
    """A machine made anew: at `at_ns` on the clock of receipts, from its first `seq` rows."""

    at_ns: int
    wall_ns: int
    seq: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Receipts that were taken in together, `n` of a run from `first` to `last` as they came in.

    Each at its `done_ns`, but none before `at_ns`, and none before the one ahead of it.
    """

    at_ns: int
    first: str
    last: str
    n: int


def kept_sample(sample: Sample) -> Snapshot:
    """As it is kept."""
    snapshot = sample.snapshot
    if snapshot.failure is not None:
        return snapshot
    return replace(snapshot, samples={**snapshot.samples, (SCRAPED, ()): 1.0})


def began_mark(route: str, began: Began) -> Snapshot:
    """As it is kept among the scrapes."""
    labels = {"route": route, "seq": str(began.seq), "wall_ns": str(began.wall_ns)}
    return Snapshot(began.at_ns, {(BEGAN, tuple(sorted(labels.items()))): 1.0})


def late_mark(receipt_id: str, at_ns: int) -> Snapshot:
    """As it is kept among the scrapes."""
    return Snapshot(at_ns, {(LATE, (("receipt", receipt_id),)): 1.0})


def taken_mark(taken: Taken) -> Snapshot:
    """As it is kept among the scrapes."""
    labels = (("first", taken.first), ("last", taken.last), ("n", str(taken.n)))
    return Snapshot(taken.at_ns, {(TAKEN, labels): 1.0})


@dataclass(frozen=True, slots=True)
class Kept:
    """What a guard kept beside receipts, so that it can be replayed exactly."""

    samples: tuple[Sample, ...]
    began: Mapping[str, tuple[Began, ...]]
    """By route, in order; none where nobody noted it."""
    late: Mapping[str, int]
    """Receipt id -> when it was taken in, where that was later than what the receipts say."""
    taken: tuple[Taken, ...] = ()
    """In order; only of a guard that read its receipts from a store."""


def kept_of(snapshots: Mapping[Arm, Iterable[Snapshot]]) -> Kept:
    """Scrapes and marks apart."""
    samples: list[Sample] = []
    began: dict[str, list[Began]] = {}
    late: dict[str, int] = {}
    taken: list[Taken] = []
    for arm, scraped in snapshots.items():
        for one in scraped:
            series = dict(one.samples)
            for name, labels in one.samples:
                said = dict(labels)
                if name == BEGAN:
                    mark = Began(one.taken_ns, int(said["wall_ns"]), int(said["seq"]))
                    began.setdefault(said["route"], []).append(mark)
                elif name == LATE:
                    late[said["receipt"]] = one.taken_ns
                elif name == TAKEN:
                    taken.append(Taken(one.taken_ns, said["first"], said["last"], int(said["n"])))
                else:
                    continue
                del series[name, labels]
            if series:
                samples.append(Sample(arm, replace(one, samples=series)))
    marks = {name: tuple(found) for name, found in began.items()}
    return Kept(tuple(samples), marks, late, tuple(taken))


@dataclass
class Thinned:
    """Which scrapes are worth keeping: a server that is well says the same every second.

    A round of scrapes is quiet where each server answers, its queue is short and its tokens flow.
    Of a row of quiet rounds the first and the last are all that a decision can rest on.
    """

    most_queued: int | None
    _last: dict[Arm, Snapshot] = field(default_factory=dict)
    _was_quiet: bool = False
    _held: Sequence[Sample] = ()

    def begin(self) -> None:
        """A guard begins anew: it knows nothing of the rounds before."""
        self._was_quiet = False

    def keep(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What to keep now that this round, one sample of each arm, has come."""
        is_quiet = all(self._is_quiet(sample) for sample in samples)
        self._last |= {sample.arm: sample.snapshot for sample in samples}
        if is_quiet and self._was_quiet:
            self._held = samples
            return ()
        kept = (*self._held, *samples)
        self._was_quiet, self._held = is_quiet, ()
        return kept

    def _is_quiet(self, sample: Sample) -> bool:
        before, after = self._last.get(sample.arm), sample.snapshot
        if before is None or before.failure is not None or after.failure is not None:
            return False
        waiting = after.total(telemetry.WAITING)
        is_short = waiting is None or self.most_queued is None or waiting <= self.most_queued // 2
        return is_short and not telemetry.stalled_for_s([before, after])


@dataclass
class Notes:
    """When the guards of one process were told what, on the one line of time of a replay.

    Nothing is told for a time before one that was told already, so each receipt and each scrape has
    the time at which it is found again.
    """

    most_queued: int | None
    _thinned: Thinned = field(init=False)
    _latest_ns: int = 0
    """When the last of the receipts so far was taken in."""
    _ticked_ns: int = 0
    """How far the guards have judged; what comes in later belongs there."""
    _sampled_ns: int = -1
    """When the last round of scrapes was taken in."""

    def __post_init__(self) -> None:
        self._thinned = Thinned(self.most_queued)

    @property
    def floor_ns(self) -> int:
        """Before this no receipt is taken in any more."""
        return max(self._latest_ns, self._ticked_ns)

    def next_ns(self, now_ns: int) -> int:
        """Now, or the first moment after all that was told."""
        return max(now_ns, self._ticked_ns, self._latest_ns + 1, self._sampled_ns + 1)

    def began(self, route: str, began: Began) -> Snapshot:
        """A route's machine is made anew at such a moment; the mark to keep."""
        self._ticked_ns = max(self._ticked_ns, began.at_ns)
        self._thinned.begin()
        return began_mark(route, began)

    def receipt(self, receipt: Receipt) -> tuple[int, bool]:
        """When a receipt that comes in now is taken in, and whether that is later than it says."""
        self._latest_ns = max(self._latest_ns, ended_ns(receipt))
        is_late = self._ticked_ns > self._latest_ns
        self._latest_ns = self.floor_ns
        return self._latest_ns, is_late

    def scrapes(self, taken: Sequence[Sample]) -> Sequence[Sample]:
        """A round of scrapes, one of each arm, as it is to be handed in at each `taken_ns`."""
        first_ns = max(self.floor_ns, self._sampled_ns + 1)
        found = [
            replace(
                one, snapshot=replace(one.snapshot, taken_ns=max(one.snapshot.taken_ns, first_ns))
            )
            for one in taken
        ]
        self._sampled_ns = max((s.snapshot.taken_ns for s in found), default=self._sampled_ns)
        return found

    def worth_keeping(self, samples: Sequence[Sample]) -> Sequence[tuple[Arm, Snapshot]]:
        """What to keep now that this round was handed in."""
        return [(sample.arm, kept_sample(sample)) for sample in self._thinned.keep(samples)]

    def ticked(self, now_ns: int) -> None:
        """All guards were told that it is now."""
        self._ticked_ns = max(self._ticked_ns, now_ns - GRACE_NS)


# --- evidence -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """A rule that is beyond its limit, with the evidence."""

    rule: str
    cohort: str
    estimate: Estimate | None
    limit: float | None
    unit: str
    n: int
    why: str


@dataclass(frozen=True, slots=True)
class Gauge:
    """Where one rule stands: its estimate, its limit, and how near it is to turning the route off.

    `weight` is the evidence for failing as a part of what fails it, in logarithms: 1 fails.
    """

    rule: str
    cohort: str
    estimate: Estimate
    limit: float
    unit: str
    weight: float


class Window:
    """Evidence on the speculative arm since some moment: the monitors, and what is counted."""

    def __init__(
        self,
        settings: Settings,
        route: str,
        began_ns: int,
        length_s: float | None,
        *,
        watch: Monitors | None = None,
        reference_s: Iterable[float] = (),
    ) -> None:
        self.began_ns = began_ns
        self.length_s = length_s
        """None: it is never closed."""
        self.speculative = 0
        """Requests that the speculative arm served, or should have."""
        self._settings = settings
        self.alpha_fail = alpha = settings.alpha_fail(length_s)
        config = settings.config
        rules = {name: limit for name, limit in settings.limits.items() if name != PROTECTED}
        self.watch: Monitors | Scraped
        if watch is not None:
            self.watch = watch
        elif settings.evidence == "receipts":
            self.watch = Monitors(
                route,
                rules,
                acceptance=settings.acceptance,
                floors=settings.floors,
                alpha_fail=_RULE_SHARE * alpha,
                # A slice has too few requests for a short window to see anything of it.
                slices=("prompt", "temperature")
                if length_s is None or length_s == config.windows_s[-1]
                else (),
                keep=_KEEP,
            )
        else:
            self.watch = Scraped(
                route,
                rules,
                acceptance=settings.acceptance,
                floors=settings.floors,
                alpha_fail=_RULE_SHARE * alpha,
            )
        levels: stats.Levels = {"over": _OWN_SHARE * alpha, "under": measure.ALPHA}
        self.engine_errors = (
            None
            if config.max_engine_error_rate is None
            else stats.Rate(config.max_engine_error_rate, levels)
        )
        self.verifier_errors = (
            None if config.max_verifier_errors is None else Count(config.max_verifier_errors)
        )
        self.protected: stats.QuantileRatio | None = None
        if PROTECTED in settings.limits:
            limit = 1 + settings.limits[PROTECTED].limit
            self.protected = stats.QuantileRatio(limit, levels, p=0.5)
            for value in reference_s:
                self.protected.add(value, speculative=False)

    def add(self, receipt: Receipt, *, share: float | None, late: str) -> None:
        """Take in a finished request of the route."""
        if not isinstance(self.watch, Monitors):
            return
        receipt = _as_served(receipt)
        self.watch.add(receipt, share=share, late=late)
        counts = receipt.arm == Arm.SPECULATIVE and not (
            receipt.kept_off or receipt.warm_up or receipt.priority == "protected"
        )
        if not counts:
            return
        self.speculative += 1
        if self.engine_errors is not None and not (
            measure.is_refused(receipt) or receipt.outcome == Outcome.CANCELLED
        ):
            self.engine_errors.add(event=receipt.error_class in _ENGINE_ERRORS)
        if self.verifier_errors is not None and receipt.proposed_tokens is not None:
            self.verifier_errors.add(
                event=any(text.startswith(_DOES_NOT_ADD_UP) for text in receipt.warnings)
            )

    def add_protected(self, receipt: Receipt) -> None:
        """Take in a request of protected traffic that was served beside speculation."""
        value = measure.latency(receipt, "e2e")
        if self.protected is not None and value:
            self.protected.add(value, speculative=True)

    def add_interval(self, arm: Arm, change: telemetry.Difference) -> None:
        """Take in what an arm's counters did between two scrapes."""
        if isinstance(self.watch, Scraped):
            self.watch.add(arm, change)
            self.speculative = self.watch.speculative
            if arm is Arm.SPECULATIVE and self.verifier_errors is not None:
                drafted = change.total(telemetry.DRAFT_TOKENS)
                accepted = change.total(telemetry.ACCEPTED_TOKENS)
                if drafted is not None and accepted is not None:
                    self.verifier_errors.add(event=accepted > drafted)

    def failure(self) -> Failure | None:
        """The rule that turns the route off, now; what is counted first, it needs no minimum."""
        broken = self._broken()
        counted = self._counted_failure(broken)
        if counted is not None:
            return counted
        if self.speculative < self._settings.config.min_requests:
            return None
        if broken:
            return self._of_monitor(broken[0])
        errors = self.engine_errors
        if errors is not None and errors.shows("over"):
            limit = self._settings.config.max_engine_error_rate or 0.0
            e = errors.estimate(measure.ALPHA)
            how = (
                f"are over the limit of {limit:g}"
                if e.value > limit
                else f"came too close together for the limit of {limit:g}"
            )
            why = (
                f"engine errors {e.value:.3g} ({e.low:.3g} to {e.high:.3g}, n {e.n}) {how}"
                f" [{errors.events} of {errors.added} requests]"
            )
            return Failure(ENGINE_ERRORS, "", e, limit, "share", e.n, why)
        if self.protected is not None and self.protected.shows("over"):
            e = self.protected.estimate(measure.ALPHA)
            limit = 1 + self._settings.limits[PROTECTED].limit
            why = (
                f"protected traffic's e2e p50 {e.value:.3g} times ({e.low:.3g} to {e.high:.3g},"
                f" n {e.n}) what it is without speculation, over the limit of {limit:g}"
            )
            return Failure(PROTECTED, "", e, limit, "ratio", e.n, why)
        return None

    def _counted_failure(self, broken: Iterable[Monitor]) -> Failure | None:
        for monitor in broken:
            if monitor.rule.kind == "count":
                return self._of_monitor(monitor)
        wrong = self.verifier_errors
        if wrong is None or not wrong.shows("over"):
            return None
        e, limit = (
            wrong.estimate(measure.ALPHA),
            float(self._settings.config.max_verifier_errors or 0),
        )
        why = (
            f"{wrong.count} of {wrong.n} answers have counts of drafted and accepted tokens that"
            f" cannot be, over the limit of {limit:g}"
        )
        return Failure(VERIFIER_ERRORS, "", e, limit, "count", e.n, why)

    def _broken(self) -> list[Monitor]:
        """Failed rules that turn speculation off. On random ids only wrong output does.

        Those of the present version: where another one came meanwhile, monitors began anew.
        """
        return [
            monitor
            for monitor in self.watch.monitors
            if monitor.failed_at is not None
            and monitor.limit.counted
            and not monitor.rule.pays
            and (monitor.rule.any_workload or not self._settings.unrepresentative)
        ]

    def _of_monitor(self, monitor: Monitor) -> Failure:
        found = next(
            f
            for f in self.watch.judge()
            if (f.rule, f.cohort) == (monitor.rule.name, monitor.cohort)
        )
        n = 0 if found.estimate is None else found.estimate.n
        return Failure(
            found.rule, found.cohort, found.estimate, found.limit, found.unit, n, found.why
        )

    def clears(self, rule: str, cohort: str) -> str:
        """Why the rule that failed is shown to be within its limit again, or empty: not yet."""
        if self.speculative < self._settings.config.probation_requests:
            return ""
        all_well = f"{self.speculative} speculative requests, and no rule failed"
        if rule == ENGINE_ERRORS and self.engine_errors is not None:
            limit = self._settings.config.max_engine_error_rate or 0.0
            return self._clears_rate(rule, self.engine_errors, limit)
        if rule == PROTECTED and self.protected is not None:
            return (
                f"{all_well}; {rule} is within its limit" if self.protected.shows("under") else ""
            )
        acceptance = "min_acceptance_rate"  # what a dead draft fails, too, if it is judged
        wanted = acceptance if rule == UNACCEPTED else rule
        mine = [m for m in self.watch.monitors if m.rule.name == wanted]
        if not mine:
            return all_well
        monitor = next((m for m in mine if m.cohort == cohort), mine[0])
        if isinstance(monitor.process, stats.Rate):
            limit = monitor.rule.metric_limit(monitor.limit.limit)
            return self._clears_rate(rule, monitor.process, limit)
        if monitor.verdict is not Verdict.PASS:
            return ""
        return f"{all_well}; {wanted} is within its limit again, n {monitor.n}"

    def _clears_rate(self, rule: str, rate: stats.Rate, limit: float) -> str:
        limit = max(limit, _PROBATION_RATE)
        shown = float(stats.rate_under(rate.events, rate.added, limit))
        if shown < stats.log_odds_against(measure.ALPHA):
            return ""
        return f"{rule}: {rate.events} of {rate.added} requests, certain to be under {limit:.3g}"


def _as_served(receipt: Receipt) -> Receipt:
    """What the speculative arm made of a request: an answer that it began and target-only ended
    is a failure of the speculative arm, and its times are no one arm's.
    """
    cause = (receipt.handover_reason or "").partition(":")[0].strip()
    if receipt.handover_from != Arm.SPECULATIVE or cause not in _LOST:
        return receipt
    return replace(
        receipt,
        arm=Arm.SPECULATIVE,
        outcome=Outcome.ERROR,
        error_class=cause,
        decision="speculate",
    )


@dataclass
class _Row:
    """Drafted tokens in a row of which none was accepted."""

    began_ns: int = 0
    drafted: int = 0
    n: int = 0
    """Answers or scrape intervals that they came in."""

    def add(self, drafted: float | None, accepted: float | None, at_ns: int) -> None:
        """One more answer or interval; without counts it says nothing."""
        if not drafted or accepted is None:
            return
        if accepted > 0:
            self.drafted = self.n = 0
            return
        self.began_ns = at_ns if self.n == 0 else self.began_ns
        self.drafted += round(drafted)
        self.n += 1


@dataclass
class _Server:
    """What the scrapes of one arm's server say, by gauges and by whether it answers."""

    last: Snapshot | None = None
    """The scrape before, if that was answered."""
    counted: tuple[int, Snapshot] | None = None
    """When the last one with counters in it was taken in, and that one."""
    answered_ns: int | None = None
    failing_ns: int | None = None
    failures: int = 0
    why: str = ""
    stalls: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Engine that hangs -> when its last token was seen at the latest, and scrapes since."""
    queued_ns: int | None = None
    queued: list[float] = field(default_factory=list)

    def take(self, snapshot: Snapshot, at_ns: int, most_queued: int | None) -> None:
        """One more scrape."""
        failure = snapshot.failure
        if failure is not None:
            self.failing_ns = at_ns if self.failing_ns is None else self.failing_ns
            self.failures += 1
            self.why = failure
            # What was running or waiting is not known any more.
            self.last = self.queued_ns = None
            self.stalls = {}
            return
        if self.last is not None and self.answered_ns is not None:
            began, hangs = (self.answered_ns, 0), telemetry.stalled_engines(self.last, snapshot)
            known = {engine: self.stalls.get(engine, began) for engine in hangs or ()}
            self.stalls = {engine: (since, n + 1) for engine, (since, n) in known.items()}
        waiting = snapshot.total(telemetry.WAITING)
        if waiting is None or most_queued is None or waiting <= most_queued:
            self.queued_ns, self.queued = None, []
        else:
            self.queued_ns = at_ns if self.queued_ns is None else self.queued_ns
            self.queued.append(waiting)
        self.last, self.answered_ns = snapshot, at_ns
        self.failing_ns, self.failures, self.why = None, 0, ""

    def is_clear(self, most_queued: int | None) -> bool:
        """Whether it answers, its tokens flow and its queue is down to half of the limit.

        One that never answered has no /metrics, and nothing is known against it.
        """
        answers = self.failing_ns is None or self.answered_ns is None
        waiting = None if self.last is None else self.last.total(telemetry.WAITING)
        short = waiting is None or most_queued is None or waiting <= most_queued // 2
        return answers and not self.stalls and short


# --- the machine --------------------------------------------------------------------------------


class Machine:
    """One route's live guard.

    Every call takes the time in ns, on one clock with the receipts' own times, and gives back a
    transition or None. A call may cause two (time had moved the route before the receipt came); the
    second is handed out by the next call, with its own time. So call `tick` every second or so, and
    again until it gives None: that is when scrapes are judged and when time moves the route. Time
    that goes back is taken for no time at all.

    Hand in every receipt of the route when it completes, at its `done_ns`, and every receipt of
    protected traffic, whatever its route; others are ignored. `prompt_id` must name the prompt (a
    digest will do), since an answer that is an exact copy of an earlier one is no new evidence.
    """

    def __init__(self, settings: Settings, route: str, *, watch: Monitors | None = None) -> None:
        """Begin in state enabled, without evidence.

        Args:
            settings: see `settings_of`.
            route: its name.
            watch: monitors to use instead of windows of our own (a canary's).
        """
        self.settings = settings
        self.route = route
        self.state = RouteState.ENABLED
        self.since_ns = 0
        self.seq = 0
        """Of the next transition."""
        self._given = watch
        self._now_ns = 0
        self._fallbacks_ns: list[int] = []
        self._blamed = ("", "")
        self._clear_ns = 0
        self._last_good_ns = -1
        self._received_ns: int | None = None
        self._reference_s: deque[float] = deque(settings.protected_s, maxlen=_REFERENCE)
        self._held: list[tuple[int, str, Sample]] = []
        self._servers = {arm: _Server() for arm in Arm}
        self._windows: list[Window] = []
        self._row = _Row()
        self._pending: deque[Transition] = deque()

    @classmethod
    def restore(cls, settings: Settings, route: str, rows: Iterable[Transition]) -> Machine:
        """A machine in the state that its transitions led to; evidence begins from nothing.

        Rows are those of the route, in order, with times on the clock of the calls to come (see
        `resume`).
        """
        machine = cls(settings, route)
        for row in rows:
            machine._apply(row)
        return machine

    @property
    def share(self) -> float:
        """Of the eligible traffic that may speculate now: 1, 0, or that of a probation.

        A control arm is the caller's to keep: without target-only receipts of the route, times are
        not judged.
        """
        return _share(self.state, self.settings.config)

    @property
    def windows(self) -> Sequence[Window]:
        """Those that collect evidence now, the oldest first; none while nothing speculates."""
        return tuple(self._windows)

    @property
    def due_ns(self) -> int | None:
        """When time alone will move the route; None where it will not."""
        config = self.settings.config
        if self.state is RouteState.FELL_BACK:
            doubled = config.cool_down_s * 2.0 ** max(len(self._fallbacks_ns) - 1, 0)
            return self.since_ns + round(1e9 * min(doubled, config.period_s))
        if self.state is RouteState.PROBATION:
            return self.since_ns + round(1e9 * config.probation_most_s)
        return None

    @property
    def fallbacks(self) -> int:
        """Fallbacks that count, within the period that ends now."""
        return len(self._recent(self._now_ns))

    def observe(
        self, receipt: Receipt, at: int, *, share: float | None = None, late: str = ""
    ) -> Transition | None:
        """Take in a finished request.

        `share` and `late` as for `Monitors.add`: the planned share of the speculative arm where a
        draw assigned it, and why our own client was too late to time it.
        """
        at = self._advance(at)
        self._take(receipt, at, share, late)
        self._look(at)
        return self._next()

    def telemetry(self, sample: Sample, at: int) -> Transition | None:
        """Take in a scrape of one arm's server, judged when later receipts or ticks come.

        Series that are not there are no evidence.
        """
        insort(self._held, (max(at, self._now_ns), sample.arm, sample), key=lambda held: held[:2])
        return self._next()

    def tick(self, at: int) -> Transition | None:
        """Let time pass; the transition that was due, or that another call left over."""
        self._advance(at - GRACE_NS)
        return self._next()

    def reset(self, at: int, who: str) -> Transition | None:
        """An operator lets the route speculate again, on probation first; None if it does already.

        Its fallbacks are forgotten, its evidence begins from nothing.
        """
        at = self._advance(at)
        if self.state in (RouteState.FELL_BACK, RouteState.OFF):
            why = f"{who} lets it be tried again; it was {_WORDS[self.state]}: {self._last_rule()}"
            self._go(RouteState.PROBATION, RESET, why, at, who=who)
        return self._next()

    def disable(self, at: int, who: str) -> Transition | None:
        """An operator turns the route off until it is reset; None if it is off already."""
        at = self._advance(at)
        if self.state is not RouteState.OFF:
            self._go(RouteState.OFF, DISABLED, f"{who} turned speculation off", at, who=who)
        return self._next()

    def gauges(self) -> list[Gauge]:
        """Where each rule stands in the oldest long window; none while nothing speculates."""
        if not self._windows:
            return []
        window = next(w for w in self._windows if w.length_s == self._windows[-1].length_s)
        found = [
            Gauge(
                m.rule.name,
                m.cohort,
                m.estimate(),
                m.rule.metric_limit(m.limit.limit),
                m.rule.unit,
                min(m.process.evidence(m.fails) / stats.log_odds_against(m.levels[m.fails]), 1.0),
            )
            for m in window.watch.monitors
            if m.n
        ]
        errors, limit = window.engine_errors, self.settings.config.max_engine_error_rate
        if errors is not None and limit is not None and errors.n:
            e = errors.estimate(measure.ALPHA)
            needs = stats.log_odds_against(_OWN_SHARE * window.alpha_fail)
            weight = min(errors.evidence("over") / needs, 1.0)
            found.append(Gauge(ENGINE_ERRORS, "", e, limit, "share", weight))
        return found

    # --- taking in ------------------------------------------------------------------------------

    def _take(self, receipt: Receipt, at: int, share: float | None, late: str) -> None:
        if receipt.priority == "protected":
            if self.share > 0:
                for window in self._open(at):
                    window.add_protected(receipt)
            elif (value := measure.latency(receipt, "e2e")) is not None:
                self._reference_s.append(value)
            return
        if receipt.route != self.route or self.share == 0:
            return
        if receipt.scheduled_ns < self.since_ns and self.seq > 0:
            return  # sent under the state before
        if (
            receipt.arm == Arm.SPECULATIVE
            and receipt.outcome == Outcome.OK
            and receipt.handover_from is None
        ):
            self._last_good_ns = at
        if self.state is RouteState.ENABLED:
            self._renew(at)
        for window in self._open(at):
            window.add(receipt, share=share, late=late)
        if receipt.arm == Arm.SPECULATIVE and not (receipt.warm_up or receipt.kept_off):
            self._row.add(receipt.proposed_tokens, receipt.accepted_tokens, at)
        self._received_ns = at

    def _take_sample(self, sample: Sample, at: int) -> None:
        server = self._servers[sample.arm]
        was_clear = self._is_clear()
        server.take(sample.snapshot, at, self.settings.config.max_queued)
        if not was_clear and self._is_clear():
            self._clear_ns = at
        if self.settings.evidence == "metrics":
            self._take_counters(sample, at)
        self._look_at_servers(at)
        self._look(at)

    def _take_counters(self, sample: Sample, at: int) -> None:
        """What an arm's counters did since the last page that had any: a scrape that failed between
        loses nothing.
        """
        server, after = self._servers[sample.arm], sample.snapshot
        if not after.has_counters:
            return
        began_ns, before = server.counted or (at, after)
        server.counted = at, after
        change = telemetry.difference(before, after)
        if change.resets:  # another process answers: what was seen is of the one before
            self._windows = []
            self._row = _Row()
            return
        if before is after or (began_ns < self.since_ns and self.seq > 0):
            return  # partly of the state before
        if sample.arm is Arm.SPECULATIVE:
            drafted = change.total(telemetry.DRAFT_TOKENS)
            self._row.add(drafted, change.total(telemetry.ACCEPTED_TOKENS), at)
        if self.state is RouteState.ENABLED:
            self._renew(at)
        for window in self._open(at):
            window.add_interval(sample.arm, change)
        self._received_ns = at

    def _open(self, at: int) -> list[Window]:
        """The windows that take evidence in, the first ones begun; none while nothing speculates.

        A probation has one, which is never closed: it is small, and ends by itself.
        """
        if self.share > 0 and not self._windows:
            lengths = self.settings.config.windows_s
            is_one = self.state is RouteState.PROBATION or not lengths
            self._windows = [
                self._new_window(at, length) for length in ((None,) if is_one else lengths)
            ]
        return self._windows

    def _new_window(self, at: int, length_s: float | None) -> Window:
        watch, self._given = self._given, None
        return Window(
            self.settings, self.route, at, length_s, watch=watch, reference_s=self._reference_s
        )

    def _renew(self, at: int) -> None:
        """Begin a window each half length, and close the one before the last of that length."""
        lengths = self.settings.config.windows_s
        if not lengths or not self._windows:
            return
        longest_ns = 1e9 * _LONGEST * lengths[-1]
        if self._received_ns is not None and at - self._received_ns >= longest_ns:
            self._windows = []
            return
        kept: list[Window] = []
        for length_s in lengths:
            mine = [window for window in self._windows if window.length_s == length_s]
            age_s = (at - mine[-1].began_ns) / 1e9
            is_full = (
                mine[-1].speculative >= self.settings.config.window_requests
                or age_s >= _LONGEST * length_s
            )
            if age_s >= length_s / 2 and is_full:
                mine = [mine[-1], self._new_window(at, length_s)]
            kept += mine
        self._windows = kept

    # --- deciding -------------------------------------------------------------------------------

    def _look(self, at: int) -> None:
        """Whether the evidence moves the route."""
        dead = self._dead_draft()
        if dead is not None:
            self._fall_back(dead, at, self._row.began_ns)
            return
        for window in self._windows:
            failure = window.failure()
            if failure is not None:
                self._fall_back(failure, at, window.began_ns)
                return
        if self.state is RouteState.PROBATION and self._windows and self._is_clear():
            cleared = self._windows[0].clears(*self._blamed)
            if cleared:
                self._go(RouteState.ENABLED, PROBATION, cleared, at)

    def _dead_draft(self) -> Failure | None:
        row, limit = self._row, self.settings.config.max_unaccepted_tokens
        least = _LEAST_UNACCEPTED[self.settings.evidence]
        if limit is None or self.share == 0 or row.drafted <= limit or row.n < least:
            return None
        e = Estimate(row.drafted, row.drafted, row.drafted, row.n, "count of tokens in a row", 0.0)
        what = "answers" if self.settings.evidence == "receipts" else "scrape intervals"
        why = (
            f"not one of {row.drafted} drafted tokens in a row was accepted, in {row.n} {what},"
            f" over the limit of {limit}: the draft or head does not belong to this target, is"
            " damaged, or is loaded under the wrong method name"
        )
        return Failure(UNACCEPTED, "", e, float(limit), "tokens", row.n, why)

    def _look_at_servers(self, at: int) -> None:
        if self.share == 0:
            return
        mine, control = self._servers[Arm.SPECULATIVE], self._servers[Arm.TARGET_ONLY]
        config = self.settings.config
        beside = "; target-only does not" if control.answered_ns is not None else ""

        def held(since: int | None, limit_s: float | None) -> float | None:
            """Seconds that something has lasted, if longer than its limit."""
            if since is None or limit_s is None or at - since < 1e9 * limit_s:
                return None
            return (at - since) / 1e9

        # An answer that was completed is a sign of life, whatever /metrics does.
        silent_ns = None if mine.failing_ns is None else max(mine.failing_ns, self._last_good_ns)
        lasted = held(silent_ns, config.max_unreachable_s)
        if (
            lasted is not None
            and mine.failing_ns is not None
            and mine.failures >= _FAILED_SCRAPES
            and mine.answered_ns is not None
            and control.failing_ns is None
            and (control.answered_ns or 0) >= mine.failing_ns
        ):
            why = (
                f"the speculative server has not answered for {lasted:.3g} s and {mine.failures}"
                f" tries, over the limit of {config.max_unreachable_s:g} s, and no request"
                f" completed meanwhile; target-only answers [{mine.why}]"
            )
            self._fall_exactly(UNREACHABLE, lasted, mine.failures, why, at, silent_ns)
            return
        since_ns, n = min(mine.stalls.values(), default=(None, 0))
        beside_ns, _ = min(control.stalls.values(), default=(at, 0))
        lasted = held(since_ns, config.max_stall_s)
        # Of target-only a second without tokens is a prefill; it stalls, too, if that goes on.
        if lasted is not None and n >= 2 and (at - beside_ns) / 1e9 < lasted / 2:
            why = (
                f"requests run on the speculative server and no token has come for {lasted:.3g} s,"
                f" over the limit of {config.max_stall_s:g} s{beside}"
            )
            self._fall_exactly(STALL, lasted, n + 1, why, at, since_ns)
            return
        lasted = held(mine.queued_ns, config.queued_for_s)
        if lasted is not None and control.queued_ns is None:
            low, high, n = min(mine.queued), max(mine.queued), len(mine.queued)
            e = Estimate(mine.queued[-1], low, high, n, _EXACT, 0.0)
            why = (
                f"{e.value:g} requests wait on the speculative server ({low:g} to {high:g}, n {n}"
                f" scrapes in {lasted:.3g} s), over the limit of {config.max_queued}{beside}"
            )
            limit = float(config.max_queued or 0)
            failure = Failure(QUEUE, "", e, limit, "requests", n, why)
            self._fall_back(failure, at, mine.queued_ns)

    def _fall_exactly(
        self, rule: str, lasted_s: float, n: int, why: str, at: int, began_ns: int | None
    ) -> None:
        e = Estimate(lasted_s, lasted_s, lasted_s, n, _EXACT, 0.0)
        limit = float(getattr(self.settings.config, rule))
        self._fall_back(Failure(rule, "", e, limit, "s", n, why), at, began_ns)

    def _fall_back(self, failure: Failure, at: int, began_ns: int | None) -> None:
        config = self.settings.config
        count = len(self._recent(at)) + 1
        after = RouteState.OFF if count > config.most_fallbacks else RouteState.FELL_BACK
        why = failure.why
        if after is RouteState.OFF and config.most_fallbacks:
            why += (
                f"; fallback {count} within {config.period_s:g} s, more than"
                f" {config.most_fallbacks}, so it stays off until an operator resets it"
            )
        self._go(after, failure.rule, why, at, failure=failure, began_ns=began_ns)

    def _recent(self, at: int) -> list[int]:
        period_ns = 1e9 * self.settings.config.period_s
        return [ns for ns in self._fallbacks_ns if at - ns < period_ns]

    def _advance(self, until: int) -> int:
        """Go on to a time, through all that comes before it; the time, never an earlier one."""
        while self._held and self._held[0][0] < until:
            at, _, sample = self._held.pop(0)
            self._pass(at)
            self._take_sample(sample, at)
            self._pass(at)
        self._pass(until)
        return self._now_ns

    def _pass(self, until: int) -> None:
        """Let time pass, and move the route where it was due."""
        self._now_ns = max(self._now_ns, until)
        while (due := self._due()) is not None and due <= self._now_ns:
            if self.state is RouteState.FELL_BACK:
                why = f"{(due - self.since_ns) / 1e9:g} s after it fell back"
                self._go(RouteState.PROBATION, COOL_DOWN, why, due)
            else:
                rule, cohort = self._blamed
                why = (
                    f"a probation of {self.settings.config.probation_most_s:g} s did not show that"
                    f" {rule or 'it'} is within its limit"
                )
                undecided = Failure(PROBATION, cohort, None, None, "", 0, why)
                self._go(RouteState.FELL_BACK, PROBATION, why, due, failure=undecided)

    def _due(self) -> int | None:
        """When time moves the route: a server that is not well yet is waited for."""
        due = self.due_ns
        if due is None or self.state is RouteState.PROBATION:
            return due
        return max(due, self._clear_ns) if self._is_clear() else None

    def _is_clear(self) -> bool:
        return self._servers[Arm.SPECULATIVE].is_clear(self.settings.config.max_queued)

    def _last_rule(self) -> str:
        return self._blamed[0] or DISABLED

    # --- moving ---------------------------------------------------------------------------------

    def _go(
        self,
        after: RouteState,
        rule: str,
        why: str,
        at: int,
        *,
        failure: Failure | None = None,
        began_ns: int | None = None,
        who: str = "",
    ) -> None:
        is_fallback = failure is not None and rule != PROBATION
        moved = Transition(
            route=self.route,
            seq=self.seq,
            at_ns=at,
            before=self.state,
            after=after,
            rule=rule,
            cohort="" if failure is None else failure.cohort,
            estimate=None if failure is None else failure.estimate,
            limit=None if failure is None else failure.limit,
            unit="" if failure is None else failure.unit,
            window_s=None if began_ns is None else (at - began_ns) / 1e9,
            n=0 if failure is None else failure.n,
            share=_share(after, self.settings.config),
            fallbacks=0 if rule == RESET else len(self._recent(at)) + is_fallback,
            why=why,
            who=who,
        )
        self._apply(moved)
        self._pending.append(moved)

    def _apply(self, moved: Transition) -> None:
        """Be in the state that a transition led to."""
        at = moved.at_ns
        if moved.rule == RESET:
            self._fallbacks_ns = []
        elif moved.rule == DISABLED:
            self._blamed = ("", "")
        elif is_fallback(moved):
            self._fallbacks_ns = [*self._recent(at), at]
            self._blamed = (moved.rule, moved.cohort)
        self._now_ns = max(self._now_ns, at)
        self.state, self.since_ns, self.seq = moved.after, at, moved.seq + 1
        self._windows = []
        self._row = _Row()
        self._received_ns = None

    def _next(self) -> Transition | None:
        return self._pending.popleft() if self._pending else None


_EXACT = "lowest and highest of consecutive scrapes"

_WORDS = {
    RouteState.ENABLED: "enabled",
    RouteState.FELL_BACK: "fallen back",
    RouteState.PROBATION: "on probation",
    RouteState.OFF: "off",
}


def _share(state: RouteState, config: FallbackConfig) -> float:
    if state is RouteState.ENABLED:
        return 1.0
    return config.probation_share if state is RouteState.PROBATION else 0.0


def is_fallback(moved: Transition) -> bool:
    """Whether a rule took speculation away: not time, not an operator."""
    return moved.after in (RouteState.FELL_BACK, RouteState.OFF) and moved.rule not in (
        PROBATION,
        DISABLED,
    )


def ended_ns(receipt: Receipt) -> int:
    """When a receipt is to be handed in: when its request ended, or else was due."""
    return receipt.scheduled_ns if receipt.done_ns is None else receipt.done_ns


Timed = Sequence[tuple[int, Receipt]]
"""Receipts, each with the time at which it was handed in, in order."""


def as_arrived(receipts: Iterable[Receipt], late: Mapping[str, int]) -> Timed:
    """Receipts that were handed in as they came in, some of them later than they say."""
    found: list[tuple[int, Receipt]] = []
    latest = 0
    for receipt in receipts:
        latest = max(latest, late.get(receipt.receipt_id, ended_ns(receipt)))
        found.append((latest, receipt))
    return found


def as_taken(receipts: Sequence[Receipt], taken: Iterable[Taken]) -> Timed:
    """Receipts that were read from a store, of all those that came in there.

    Raises:
        UsageError: some of them are not here.
    """
    places = {receipt.receipt_id: place for place, receipt in enumerate(receipts)}
    found: list[tuple[int, Receipt]] = []
    for mark in sorted(taken, key=lambda mark: mark.at_ns):
        first, last = places.get(mark.first), places.get(mark.last)
        if first is None or last is None or last - first + 1 != mark.n:
            raise UsageError(
                f"the {mark.n} receipts that were taken in together, from {mark.first} to"
                f" {mark.last}, are not all here: what was decided on them cannot be decided again"
            )
        latest = mark.at_ns
        for receipt in receipts[first : last + 1]:
            latest = max(latest, ended_ns(receipt))
            found.append((latest, receipt))
    return found


def replay(
    machine: Machine,
    receipts: Iterable[Receipt],
    samples: Iterable[Sample] = (),
    operated: Iterable[Transition] = (),
    *,
    until_ns: int = 0,
) -> list[Transition]:
    """The transitions that a machine makes of what was kept; the machine is moved on.

    Args:
        machine: new, or restored from what came before.
        receipts: in the order in which they were handed in, each when it ended.
        samples: with the time at which they were handed in, as `taken_ns`.
        operated: transitions that an operator made meanwhile.
        until_ns: how far time went, where that is beyond the last of all these.
    """
    timed = as_arrived(receipts, {})
    made, last_ns = _replayed(machine, timed, samples, operated)
    return made + _passed(machine, max(until_ns, last_ns))


def _replayed(
    machine: Machine,
    receipts: Timed,
    samples: Iterable[Sample],
    operated: Iterable[Transition] = (),
) -> tuple[list[Transition], int]:
    """Without what time alone brings after the last of all these; and when that was."""
    events: list[tuple[int, int, Receipt | Sample | Transition]] = []
    events += [(at, 0, receipt) for at, receipt in receipts]
    events += [(sample.snapshot.taken_ns, 1, sample) for sample in samples]
    events += [(moved.at_ns, 2, moved) for moved in operated]
    events.sort(key=lambda event: event[:2])
    made: list[Transition] = []
    for at, _, event in events:
        if isinstance(event, Receipt):
            moved = machine.observe(event, at)
        elif isinstance(event, Sample):
            moved = machine.telemetry(event, at)
        elif event.rule == RESET:
            moved = machine.reset(at, event.who)
        else:
            moved = machine.disable(at, event.who)
        while moved is not None:
            made.append(moved)
            moved = machine.tick(0)
    return made, events[-1][0] if events else 0


def _passed(machine: Machine, until_ns: int) -> list[Transition]:
    """What time brings, up to and including that moment."""
    return list(iter(lambda: machine.tick(until_ns + GRACE_NS + 1), None))


def replay_all(
    settings: Settings,
    route: str,
    rows: Sequence[tuple[Transition, int]],
    receipts: Timed,
    kept: Kept,
    *,
    mine: Collection[int],
    until_ns: int,
) -> tuple[Machine, list[Transition], bool]:
    """Replay a guard that noted when its machine was made anew: at each start, at each reset.

    Args:
        settings: as for `Machine`.
        route: its name.
        rows: all recorded transitions of the route, with their wall clock.
        receipts: of the run, see `as_arrived` and `as_taken`.
        kept: what was noted; of this route at least one `Began`.
        mine: `seq` of the rows that this guard wrote; others moved the route as well.
        until_ns: how far time went.

    Returns:
        The machine at the end, all transitions that were made, and whether those that were recorded
        between two beginnings are the first ones made there.
    """
    made: list[Transition] = []
    begun = sorted(kept.began[route], key=lambda mark: mark.at_ns)
    ends: list[Began | None] = [*begun[1:], None]
    agrees = True
    for mark, end in zip(begun, ends, strict=True):
        low, high = mark.at_ns, None if end is None else end.at_ns

        def is_within(at: int, low: int = low, high: int | None = high) -> bool:
            return low <= at and (high is None or at < high)

        before = [row for row in rows if row[0].seq < mark.seq]
        machine = resume(settings, route, before, now_wall_ns=mark.wall_ns, now_ns=mark.at_ns)
        here, last_ns = _replayed(
            machine,
            [one for one in receipts if is_within(one[0])],
            [sample for sample in kept.samples if is_within(sample.snapshot.taken_ns)],
        )
        recorded = [
            row
            for row, _ in rows
            if row.seq >= mark.seq
            and (end is None or row.seq < end.seq)
            and row.seq in mine
            and not row.who
        ]
        # How long a machine went on before the next one was made is known from its decisions only.
        if end is None:
            here += _passed(machine, max(until_ns, last_ns))
        elif recorded:
            here += _passed(machine, recorded[-1].at_ns)
        agrees = agrees and here[: len(recorded)] == recorded
        made += here
    return machine, made, agrees


_EXIT = {
    RouteState.ENABLED: ExitCode.PASS,
    RouteState.PROBATION: ExitCode.INCONCLUSIVE,
    RouteState.FELL_BACK: ExitCode.JUDGED_BAD,
    RouteState.OFF: ExitCode.JUDGED_BAD,
}


def exit_code(states: Iterable[RouteState]) -> ExitCode:
    """Where routes stand as an exit code, the worst first; no route could not be judged."""
    codes = {_EXIT[state] for state in states}
    worst = (ExitCode.JUDGED_BAD, ExitCode.INCONCLUSIVE, ExitCode.PASS)
    return next((code for code in worst if code in codes), ExitCode.COULD_NOT_JUDGE)


def resume(
    settings: Settings,
    route: str,
    kept: Iterable[tuple[Transition, int]],
    *,
    now_wall_ns: int,
    now_ns: int,
) -> Machine:
    """The machine of a route from what the store kept of it: transitions with their wall clock.

    They may have been written by other processes, with other monotonic clocks; the wall clock puts
    them on the present one (`now_ns`).
    """
    shift_ns = now_ns - now_wall_ns
    # A clock that was set back since would put them into the future, where no receipt counts.
    rows = [replace(moved, at_ns=min(wall_ns + shift_ns, now_ns)) for moved, wall_ns in kept]
    return Machine.restore(settings, route, rows)
