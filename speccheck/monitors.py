"""Monitors of a live route: its rules, looked at after every request, with evidence that allows it.

Each rule has one method that holds at every moment: a beta-binomial e-process for rates, bets on
acceptance, rank bands for quantiles, an asymptotic sequence for means. So looking after each
request costs no false alarms, and nothing has to be fixed beforehand but the level. A pass does not
expire; a later failure overrides it, and nothing overrides a failure.

The level of failing is shared: half of it by the rules of the whole route, half by their slices, in
the order in which slices appear (1/2, 1/6, 1/12 ... of it). So a healthy route is failed with
`ALPHA_FAIL` at most, however long it is watched. Where the share grows in steps, times are compared
twice: over all steps, thinned to one mix of them, and to fail within the present step alone, so
that a route that got much slower is not left on until the mix has enough.

A monitor starts anew when what it watches changes (engine config, policy, models): what was seen of
another version is no evidence for this one.

They speak of the traffic that comes. Where prompts come again, as in a canary that is made of a
corpus, that is the mix of these prompts: whether more prompts would do the same is for the stages
before, which take prompts as clusters. Of acceptance, exact copies are not counted twice.

What is said here is a function of the receipts, in the order in which they came, and of no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from speccheck import guardrails, measure, stats
from speccheck.guardrails import (
    ALPHA_FAIL,
    LOOP_SHARE,
    RULES,
    Rule,
    RuleLimit,
    Standing,
    with_implied,
)
from speccheck.plan import assign_share
from speccheck.records import Arm, Estimate, Finding, Measurement, Outcome, Receipt, Stage, Verdict

AcceptanceMethod = Literal["betting", "asymptotic"]
"""What gates acceptance: bets on each request's accepted/drafted, which hold from the first request
on, or the sequence of the pooled rate over tokens, silent before request 50."""

Said = Literal["nothing", "something", "copy"]
"""What a receipt says of a metric; a copy says what an earlier one said already."""

MISMATCH_ALPHA = 0.001
"""Level at which requests are said not to fall to the arms as planned."""

_MOST_BANDS = 100_000
"""Prompts whose band is remembered."""

OUTAGE = 3
"""Failed requests of one arm in a row that are called one incident."""

_VERSIONS = (
    *("engine_config_id", "policy_version", "target_model", "proposer", "algorithm"),
    *("draft_sampling", "engine"),
)
"""What a receipt says of the version that served it. The proposal length is no part: a policy may
set it per request."""


# --- one rule on one cohort ---------------------------------------------------------------------


class Count:
    """A count against a limit, exact: no chance, no level."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.count = 0
        self.n = 0

    def add(self, *, event: bool) -> None:
        """One more request."""
        self.n += 1
        self.count += event

    def shows(self, side: stats.Side) -> bool:
        """See `stats.Process`."""
        over = self.count > self._limit
        return over if side == "over" else not over and self.n > 0

    def evidence(self, side: stats.Side) -> float:
        """See `stats.Process`; certain or nothing."""
        return math.inf if self.shows(side) else 0.0

    def estimate(self, alpha: float) -> Estimate:
        """See `stats.Process`."""
        if self.n == 0:
            return stats.unknown("count of requests", n=0, alpha=alpha)
        count = float(self.count)
        return Estimate(count, count, count, self.n, "count of requests", alpha)

    def needed(self) -> int | None:
        """See `stats.Process`; a count is what it is."""
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a monitor stands: its figures, its evidence on both sides, and what would decide it.

    Evidence is odds: `pass_evidence` of `pass_needs` passes the rule, `fail_evidence` of
    `fail_needs` fails it. `fail_p` is the always-valid p of being within the limit, as of now.
    """

    rule: str
    cohort: str
    method: str
    verdict: str
    counted: bool
    n: int
    estimate: Estimate | None
    limit: float
    unit: str
    pass_evidence: float
    pass_needs: float
    fail_evidence: float
    fail_needs: float
    fail_p: float
    passed_at: int | None
    failed_at: int | None
    why: str
    next: str


@dataclass
class Monitor:
    """One rule on one cohort: its process, and the verdicts that it has reached."""

    rule: Rule
    limit: RuleLimit
    cohort: str
    process: stats.Process
    levels: stats.Levels
    feed: Callable[[Receipt], Said]
    """Takes a receipt in and tells what it says of this metric."""
    loops: stats.Rate | None = None
    """Answers at the length limit, for the rule on acceptance that is too high."""
    copies: int = 0
    passed_at: int | None = None
    """n at the first pass; None if it never passed."""
    is_on_loan: bool = False
    """Whether the pass rests on requests of earlier stages, too."""
    failed_at: int | None = None
    loads: set[int] = field(default_factory=set)
    by_load: bool = True
    """Whether times at different loads are kept apart."""
    steps: int = 1
    """Steps in which the share grows."""
    new_step: Callable[[], Monitor] | None = None
    """Makes a monitor for one step alone, at its part of the level of failing."""
    step: Monitor | None = None
    """That of the present step; once it has failed it stays as it was."""
    share: float | None = None
    """Of a step: its share of requests on the speculative arm."""

    @property
    def n(self) -> int:
        """Requests that said something; of the smaller arm where two are compared."""
        return self.process.n + self.copies

    @property
    def verdict(self) -> Verdict:
        """What stands: a failure over a pass, a pass for good."""
        if self.failed_at is not None:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.passed_at is None else Verdict.PASS

    @property
    def is_judged(self) -> bool:
        """Times at different loads are not pooled: such a monitor says nothing."""
        return not self.by_load or len(self.loads) <= 1 or not self.rule.is_timed

    @property
    def fails(self) -> stats.Side:
        """The side of the limit that fails the rule."""
        return "over" if self.rule.direction == "max" else "under"

    @property
    def passes(self) -> stats.Side:
        """The side of the limit that passes the rule."""
        return "under" if self.rule.direction == "max" else "over"

    @property
    def min_n(self) -> int:
        """Requests before which the rule is not passed."""
        return self.rule.min_n if self.limit.min_n is None else self.limit.min_n

    def add(self, receipt: Receipt) -> None:
        """Take a receipt in."""
        said = self.feed(receipt)
        self.copies += said == "copy"
        if said != "nothing":
            self.loads.add(receipt.concurrency)

    def look(self) -> bool:
        """Look at the evidence; whether the rule has failed at this look."""
        if self.failed_at is not None or not self.is_judged:
            return False
        if self.step is not None and self.step.look():
            self.failed_at = self.step.failed_at
            return True
        if self.n == 0:
            return False
        if self.process.shows(self.fails) and (self.loops is None or self.loops.shows("over")):
            self.failed_at = self.n
            return True
        self._return_loan()
        if self.passed_at is None and self._has_enough:
            # Acceptance may be as high as it likes where answers end by themselves.
            ends = self.loops is not None and self.loops.shows("under")
            if ends or self.process.shows(self.passes):
                self.passed_at = self.n
                self.is_on_loan = isinstance(self.process, stats.Rate) and self.process.is_borrowed
        return False

    @property
    def _has_enough(self) -> bool:
        """Whether the rule may be passed; what earlier stages saw is not enough by itself."""
        own = self.process.added if isinstance(self.process, stats.Rate) else self.n
        return self.n >= self.min_n and own >= min(self.min_n, self.rule.min_n)

    def _return_loan(self) -> None:
        """A pass that rests on requests of earlier stages does not outlive an event here."""
        if self.is_on_loan and isinstance(self.process, stats.Rate):
            if self.process.events:
                self.passed_at = None
            self.is_on_loan = not self.process.events and self.process.is_borrowed

    def needed(self) -> int | None:
        """About how many more requests decide it; None where that is open or decided."""
        if self.verdict is not Verdict.INCONCLUSIVE or self.n == 0:
            return None
        more = self.process.needed()
        return None if more is None else max(more, self.min_n - self.n) or None

    def standing(self) -> Standing:
        """The verdict as the rules take it."""
        note = f"it passed at request {self.passed_at}, and a pass does not expire"
        if self.loops is not None and self.loops.shows("under"):
            note = "but answers end by themselves"
        return Standing(self.verdict, self.needed(), note)

    def reading(self, finding: Finding) -> Reading:
        """Where it stands, with what the rules made of it."""
        passes, fails = self.process.evidence(self.passes), self._fail_evidence()
        estimate = self.estimate() if self.speaking.n else None
        return Reading(
            rule=self.rule.name,
            cohort=self.cohort,
            method="" if estimate is None else estimate.method,
            verdict=finding.verdict.word,
            counted=finding.counted,
            n=self.speaking.n,
            estimate=estimate,
            limit=self.rule.metric_limit(self.limit.limit),
            unit=self.rule.unit,
            pass_evidence=_odds(passes),
            pass_needs=1 / self.levels[self.passes],
            fail_evidence=_odds(fails),
            fail_needs=1 / self.levels[self.fails],
            fail_p=float(stats.always_valid_p([fails])[0]),
            passed_at=self.passed_at,
            failed_at=self.failed_at,
            why=finding.why,
            next=self._next(),
        )

    def _next(self) -> str:
        """What would decide it, or what stands, in one sentence."""
        if self.failed_at is not None:
            return f"failed at request {self.failed_at}, and nothing but a reset undoes that"
        parts = []
        if self.passed_at is not None:
            stands = "while it sees no failure" if self.is_on_loan else "which does not expire"
            parts.append(f"passed at request {self.passed_at}, {stands}")
        elif self.n == 0:
            parts.append("no request has said anything yet")
        elif isinstance(self.process, stats.Rate):
            more = self.needed()
            whole = stats.clean_needed(0, 0, self.limit.limit, alpha=self.levels[self.passes])
            parts.append(
                "no number of clean requests passes it"
                if more is None
                else f"{more} more clean requests pass it ({whole} clean ones from nothing)"
            )
        else:
            more = self.needed()
            where = " on each arm" if self.rule.is_timed else ""
            parts.append(
                "open: it is too near its limit to tell"
                if more is None
                else f"about {more} more requests{where} decide it, if it stays as it is"
            )
        if isinstance(self.process, stats.Rate):
            parts.append(f"{self.process.failures_needed()} in a row fail it")
        elif isinstance(self.process, Count):
            parts = ["fails at the first one over the limit"]
        return "; ".join(parts)

    @property
    def speaking(self) -> Monitor:
        """Whose figures are shown: the present step's where that failed, else its own."""
        failed = self.step is not None and self.step.failed_at is not None
        return self.step if failed and self.step is not None else self

    def _fail_evidence(self) -> float:
        """Evidence (log) for failing, a part of the stake on the present step alone."""
        own = self.process.evidence(self.fails)
        if self.new_step is None:
            return own
        step = -math.inf if self.step is None else self.step.process.evidence(self.fails)
        return max(own, step - math.log(self.steps)) - math.log(2)

    def estimate(self) -> Estimate:
        """The metric with its anytime interval at the level of passing."""
        if self.speaking is not self:
            return self.speaking.estimate()
        e = self.process.estimate(measure.ALPHA)
        low, high = e.low, e.high
        if self.rule.kind == "rate":
            low, high = max(low, 0.0), min(high, 1.0)
        elif self.rule.kind == "tokens":
            low = max(low, 1.0)
        return Estimate(e.value, low, high, max(self.n, e.n), e.method, e.alpha)


def odds_text(evidence: float, needs: float) -> str:
    """Odds for a person: `24 of 20`, what there is of what decides."""
    shown = f"{evidence:.2g}" if evidence < 100 else f"{min(evidence, 1e6):,.0f}"
    if evidence < 0.01:
        shown = "0"
    elif evidence > 1e6:
        shown = f"over {shown}"
    return f"{shown} of {needs:,.0f}"


def _odds(log_evidence: float) -> float:
    """Evidence as odds; what no float holds is the largest one."""
    return math.exp(min(log_evidence, 700.0))


def _served(receipt: Receipt) -> bool:
    """Whether a request of the speculative arm counts in its error rate."""
    return (
        receipt.arm == Arm.SPECULATIVE
        and not measure.is_refused(receipt)
        and receipt.outcome != Outcome.CANCELLED
    )


def monitor_of(
    rule: Rule,
    limit: RuleLimit,
    cohort: str,
    *,
    alpha_fail: float,
    acceptance: AcceptanceMethod,
    earlier: tuple[int, int] = (0, 0),
    floor: Estimate | None = None,
    steps: int = 1,
    by_load: bool = True,
) -> Monitor:
    """The monitor of a rule: its method, and what it takes from a receipt.

    `alpha_fail` is the level at which this one rule fails; the rest as in `Monitors`.
    """
    bound = rule.metric_limit(limit.limit)
    level = _levels(rule, alpha_fail)

    def made(process: stats.Process, feed: Callable[[Receipt], Said]) -> Monitor:
        return Monitor(rule, limit, cohort, process, level, feed, by_load=by_load)

    if rule.metric == "error_rate":
        errors = stats.Rate(bound, level, earlier=earlier)
        return made(errors, _events(errors, _served, measure.is_error))
    if rule.metric == "unsupported_requests":
        count = Count(bound)
        return made(count, _events(count, _is_speculative, measure.is_refused))
    if rule.metric == "fallback_rate":
        fell = stats.Rate(bound, level)
        return made(fell, _events(fell, _was_meant, _fell_back))
    if rule.metric == "acceptance_rate":
        if rule.direction == "max":  # either half passes: a low rate, or answers that end
            level = {**level, "under": level["under"] / 2}
        mean: stats.BoundedMean | stats.RatioOfSums
        if acceptance == "betting":
            mean = stats.BoundedMean(bound, level)
        else:
            mean = stats.RatioOfSums(bound, level)
        monitor = made(mean, _drafts(mean, "proposed_tokens"))
        if rule.direction == "max":
            monitor.loops = stats.Rate(LOOP_SHARE, level)
            cut = _events(monitor.loops, _completed, lambda r: r.finish_reason == "length")
            take = monitor.feed

            def feed(receipt: Receipt) -> Said:
                cut(receipt)
                return take(receipt)

            monitor.feed = feed
        return monitor
    if rule.metric == "mean_acceptance_length":
        length = stats.RatioOfSums(bound, level, offset=1.0)
        return made(length, _drafts(length, "verify_steps"))
    log_noise = guardrails.noise(rule, bound, floor)
    noise = math.exp(log_noise) if log_noise < 700 else math.inf
    over_all = _timed(rule, limit, cohort, alpha_fail / (2 if steps > 1 else 1), noise)
    over_all.by_load = by_load
    if steps > 1:
        over_all.levels = level
        over_all.steps = steps
        over_all.new_step = lambda: _timed(rule, limit, cohort, alpha_fail / 2 / steps, noise)
    return over_all


def _levels(rule: Rule, alpha_fail: float) -> stats.Levels:
    if rule.direction == "min":
        return {"over": measure.ALPHA, "under": alpha_fail}
    return {"over": alpha_fail, "under": measure.ALPHA}


def _timed(rule: Rule, limit: RuleLimit, cohort: str, alpha_fail: float, noise: float) -> Monitor:
    """The monitor of a rule on times."""
    bound, level = rule.metric_limit(limit.limit), _levels(rule, alpha_fail)
    process: stats.MeanRatio | stats.QuantileRatio
    if rule.metric == "e2e_mean_ratio":
        name, process = "e2e", stats.MeanRatio(bound, level, noise=noise)
    else:
        name, label = rule.metric.removesuffix("_ratio").rsplit("_", 1)
        process = stats.QuantileRatio(bound, level, p=measure.QUANTILES[label], noise=noise)
    return Monitor(rule, limit, cohort, process, level, _times(process, name))


def _is_speculative(receipt: Receipt) -> bool:
    return receipt.arm == Arm.SPECULATIVE


def _fell_back(receipt: Receipt) -> bool:
    return receipt.decision == "fell_back"


def _was_meant(receipt: Receipt) -> bool:
    """Whether a request was meant for the speculative arm."""
    return receipt.arm == Arm.SPECULATIVE or _fell_back(receipt)


def _completed(receipt: Receipt) -> bool:
    return receipt.arm == Arm.SPECULATIVE and receipt.outcome == Outcome.OK


def _events(
    process: stats.Rate | Count,
    counts: Callable[[Receipt], bool],
    happened: Callable[[Receipt], bool],
) -> Callable[[Receipt], Said]:
    def feed(receipt: Receipt) -> Said:
        if not counts(receipt):
            return "nothing"
        process.add(event=happened(receipt))
        return "something"

    return feed


def _drafts(
    process: stats.BoundedMean | stats.RatioOfSums, per: Literal["proposed_tokens", "verify_steps"]
) -> Callable[[Receipt], Said]:
    """Accepted tokens per drafted token or per verify step, copies of an answer once.

    At temperature 0 a prompt that comes again gives the same answer with the same counts: it says
    nothing new about other traffic. It is counted as a request and left out of the evidence.
    """
    seen: set[tuple[str, str | None, int, int]] = set()

    def feed(receipt: Receipt) -> Said:
        accepted, drafted = receipt.accepted_tokens, receipt.proposed_tokens
        base = drafted if per == "proposed_tokens" else receipt.verify_steps
        if receipt.arm != Arm.SPECULATIVE or not receipt.has_counts or not drafted or not base:
            return "nothing"
        assert accepted is not None  # noqa: S101 (for the type checker)
        copy = (receipt.prompt_id, receipt.output_digest, accepted, base)
        if copy in seen:
            return "copy"
        seen.add(copy)
        if isinstance(process, stats.RatioOfSums):
            process.add(accepted, base)
        else:
            process.add(accepted / base)
        return "something"

    return feed


def _times(process: stats.MeanRatio | stats.QuantileRatio, name: str) -> Callable[[Receipt], Said]:
    """A latency of completed requests on both arms; those a fallback moved are no control."""

    def feed(receipt: Receipt) -> Said:
        value = measure.latency(receipt, name)
        if value is None or _fell_back(receipt):
            return "nothing"
        process.add(value, speculative=receipt.arm == Arm.SPECULATIVE)
        return "something"

    return feed


# --- assignment ---------------------------------------------------------------------------------


class Assignment:
    """Whether requests fall to the arms as planned (sample ratio mismatch), at any time.

    A key that comes again at a larger share is drawn anew only if it was outside before, with the
    chance that is left: (share - before) / (1 - before). Who was in stays in, and says nothing.
    """

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._counts: dict[float, list[int]] = {}
        self.speculative = 0
        self.target_only = 0
        self.expected = 0.0
        """Speculative requests that the shares promised, over all requests so far."""

    def add(self, receipt: Receipt, share: float) -> None:
        """A request that was assigned at this share."""
        is_in = _was_meant(receipt)
        self.speculative += is_in
        self.target_only += not is_in
        self.expected += share
        key = f"{receipt.prompt_id}#{receipt.repeat}"
        before = self._shares.get(key, 0.0)
        if before < share:
            counts = self._counts.setdefault((share - before) / (1 - before), [0, 0])
            counts[0] += is_in
            counts[1] += 1
        self._shares[key] = 1.0 if is_in else max(share, before)

    def evidence(self) -> float:
        """Evidence (log) against the planned shares."""
        return sum(float(stats.share_off(k, n, share)) for share, (k, n) in self._counts.items())

    @property
    def is_off(self) -> bool:
        """Whether the shares are not those that were planned."""
        return self.evidence() >= stats.log_odds_against(MISMATCH_ALPHA)


# --- a route ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restart:
    """All processes began anew: after how many requests, and why."""

    requests: int
    reason: str


@dataclass(frozen=True, slots=True)
class Incident:
    """Failed requests of the speculative arm in a row: one incident, however many they are."""

    failures: int
    started_ns: int
    ended_ns: int
    kinds: str
    target_failures: int
    """Of target-only in the same time: then it is not speculation's own."""

    @property
    def text(self) -> str:
        """One line."""
        lasted = (self.ended_ns - self.started_ns) / 1e9
        beside = (
            f"target-only failed {self.target_failures} times meanwhile"
            if self.target_failures
            else "target-only did not fail meanwhile"
        )
        return (
            f"one outage: {self.failures} requests in a row failed within {lasted:.3g} s"
            f" ({self.kinds}); {beside}"
        )


class Monitors:
    """All monitors of one route, fed with its live receipts in the order in which they came."""

    def __init__(
        self,
        route: str,
        rules: Mapping[str, RuleLimit],
        *,
        acceptance: AcceptanceMethod,
        earlier: Sequence[Receipt] = (),
        floors: Mapping[str, Estimate] | None = None,
        alpha_fail: float = ALPHA_FAIL,
        mix_share: float | None = None,
        steps: int = 1,
        slices: Sequence[str] = ("concurrency", "prompt", "temperature"),
        keep: int | None = None,
    ) -> None:
        """Begin to watch a route.

        Args:
            route: its name.
            rules: what it is judged by, with limits; those of other stages are left out.
            acceptance: the method that gates acceptance.
            earlier: the route's receipts from before it was live (replay, shadow). Requests of the
                speculative arm among them help to pass the error rate (see `stats.Rate`) as long as
                they were served by the same version. They never help to fail it, and no other rule
                looks at them.
            floors: A/A ratios by metric (`measure.noise_floors`): beyond a limit on times by less
                than target-only differs from itself decides nothing, see `guardrails.judge`.
            alpha_fail: level of failing over all monitors of the route together.
            mix_share: share whose ratio of arms the times of every step are thinned to. Most of
                target-only comes in the first steps and most of the speculative arm in the last, so
                a machine that got slower meanwhile would be taken for a slower arm; the draw knows
                nothing of the times. None where the share stays.
            steps: how often the share may change; the level of failing is parted between them.
            slices: by what the route is sliced. Without concurrency, requests at different loads
                are compared together: right where the arms share all loads by a draw, as they do
                in service, and no load is set.
            keep: how many of the last receipts to keep at least, for notes and worst cases; None:
                all.
        """
        self._bands: dict[str, str] = {}
        self._slice_kinds = tuple(slices)
        self._keep = keep
        self._given = dict(rules)
        self._mix_share = mix_share
        self._steps = steps
        self.route = route
        self.receipts: list[Receipt] = []
        self.restarts: list[Restart] = []
        self._rules = {
            name: limit
            for name, limit in with_implied(rules).items()
            if Stage.CANARY in RULES[name].stages
        }
        self._acceptance: AcceptanceMethod = acceptance
        self.floors = floors or {}
        self._alpha_fail = alpha_fail
        self._versions: dict[str, tuple[object, ...]] = {}
        self._since_ns: dict[str, int] = {}
        for receipt in earlier:
            self._versions[receipt.arm] = _version(receipt)
            self._banded(receipt)
        served = [
            r
            for r in earlier
            if _served(r)
            and not r.kept_off
            and not r.warm_up
            and _version(r) == self._versions[r.arm]
        ]
        self._earlier = sum(map(measure.is_error, served)), len(served)
        self._begin()

    def _begin(self) -> None:
        self.receipts = []
        self.seen = 0
        self._left_out = 0
        self._share: float | None = None
        self.assignment = Assignment()
        self._cohorts: dict[str, list[Monitor]] = {"": self._made("", self._alpha_fail / 2)}
        self._kinds: Counter[str] = Counter()

    def _made(self, cohort: str, alpha: float) -> list[Monitor]:
        tests = sum(RULES[name].kind != "count" for name in self._rules)
        return [
            monitor_of(
                RULES[name],
                limit,
                cohort,
                alpha_fail=alpha / max(tests, 1),
                acceptance=self._acceptance,
                earlier=(0, 0) if cohort else self._earlier,
                floor=self.floors.get(RULES[name].metric),
                steps=self._steps,
                by_load="concurrency" in self._slice_kinds,
            )
            for name, limit in self._rules.items()
        ]

    def add(self, receipt: Receipt, *, share: float | None = None, late: str = "") -> list[Monitor]:
        """Take in one finished request and look; the monitors that fail at this look.

        `share` is the planned share of the speculative arm when it was assigned; None where nobody
        assigned it. `late` says why our own client was too late to time it, or is empty: its times
        are void then. Warm-up, protected traffic, what the eligibility policy keeps off and late
        answers of a version that was replaced say nothing.
        """
        if receipt.warm_up or receipt.kept_off or receipt.priority == "protected":
            return []
        if self._is_straggler(receipt):
            return []
        receipt = self._banded(receipt)
        self._note_version(receipt)
        self.receipts.append(receipt)
        self.seen += 1
        if self._keep is not None and len(self.receipts) > 2 * self._keep:
            del self.receipts[: -self._keep]
        if share is not None:
            self.assignment.add(receipt, share)
        failed: list[Monitor] = []
        is_in_mix = self._is_in_mix(receipt, share)
        self._left_out += not is_in_mix and not late
        cohorts = ("", *self._begun(receipt))
        if share != self._share:
            self._share = share
            self._begin_step()
        for cohort in cohorts:
            for monitor in self._cohorts[cohort]:
                if monitor.rule.is_timed and late:
                    continue
                if monitor.step is not None and monitor.step.failed_at is None:
                    monitor.step.add(receipt)
                if is_in_mix or not monitor.rule.is_timed:
                    monitor.add(receipt)
                if self._is_open(cohort) and monitor.look():
                    failed.append(monitor)
        return failed

    def _banded(self, receipt: Receipt) -> Receipt:
        """A failed request, which has no count of prompt tokens, in the band of its prompt: by
        itself it would be in a slice that holds nothing but failures.
        """
        if receipt.prompt_band != measure.UNKNOWN_BAND:
            if len(self._bands) < _MOST_BANDS:
                self._bands[receipt.prompt_id] = receipt.prompt_band
            return receipt
        band = self._bands.get(receipt.prompt_id, receipt.prompt_band)
        return replace(receipt, prompt_band=band)

    def _begin_step(self) -> None:
        """A share begins: what fails within it alone has seen nothing of it yet."""
        for monitor in (m for made in self._cohorts.values() for m in made):
            if monitor.failed_at is None:
                self._renew(monitor)

    def _renew(self, monitor: Monitor) -> None:
        if monitor.new_step is not None:
            monitor.step = monitor.new_step()
            monitor.step.share = self._share

    def _is_in_mix(self, receipt: Receipt, share: float | None) -> bool:
        """Whether the times of a request belong to a mix of steps that both arms have alike.

        At share s the arms get requests as s to 1 - s. Of the arm that gets more than its part at
        the share of the mix, so much is left out that every step has them in that ratio.
        """
        if share is None or self._mix_share is None:
            return True
        odds = share / (1 - share) / (self._mix_share / (1 - self._mix_share))
        chance = 1 / odds if receipt.arm == Arm.SPECULATIVE else odds
        return chance >= 1 or assign_share(receipt.receipt_id, "mix of steps", chance)

    def _begun(self, receipt: Receipt) -> tuple[str, ...]:
        """Names of the slices that a receipt is in, new ones begun."""
        names = self._slices(receipt)
        for name in names:
            if name not in self._cohorts:
                j = len(self._cohorts)
                self._cohorts[name] = self._made(name, self._alpha_fail / 2 / (j * (j + 1)))
                for monitor in self._cohorts[name]:
                    self._renew(monitor)
                self._kinds[_kind(name)] += 1
        return names

    def _slices(self, receipt: Receipt) -> tuple[str, ...]:
        """The slices that a receipt is in."""
        return tuple(name for name in _slices(receipt) if _kind(name) in self._slice_kinds)

    def _is_open(self, cohort: str) -> bool:
        """Whether a cohort is judged: the route, and slices where there are two of a kind."""
        return not cohort or self._kinds[_kind(cohort)] > 1

    def _is_straggler(self, receipt: Receipt) -> bool:
        """Whether it was sent before the present version of its arm served its first request."""
        return (
            receipt.scheduled_ns < self._since_ns.get(receipt.arm, receipt.scheduled_ns)
            and _version(receipt) != self._versions[receipt.arm]
        )

    def _note_version(self, receipt: Receipt) -> None:
        version = _version(receipt)
        known = self._versions.get(receipt.arm)
        self._versions[receipt.arm] = version
        if known is None or known == version:
            return
        changed = [
            f"{name} {old} became {new}"
            for name, old, new in zip(_VERSIONS, known, version, strict=True)
            if old != new
        ]
        self.restarts.append(Restart(self.seen, f"on {receipt.arm}: {', '.join(changed[:2])}"))
        self._since_ns[receipt.arm] = receipt.scheduled_ns
        self._earlier = (0, 0)
        self._begin()

    @property
    def monitors(self) -> list[Monitor]:
        """Those that are judged, the whole route's first."""
        return [
            monitor
            for cohort, monitors in self._cohorts.items()
            if self._is_open(cohort)
            for monitor in monitors
            if monitor.is_judged
        ]

    def standings(self) -> dict[tuple[str, str], Standing]:
        """The verdict of each monitor that has seen something, by rule and cohort."""
        return {(m.rule.name, m.cohort): m.standing() for m in self.monitors if m.speaking.n}

    def measurements(self) -> list[Measurement]:
        """What the monitors estimate, with anytime intervals, for `guardrails.judge`.

        Counts of what happened (failed, refused, cut and moved requests, drafted tokens) give the
        notes and the worst cases.
        """
        found: list[Measurement] = []
        for cohort, monitors in self._cohorts.items():
            if not self._is_open(cohort):
                continue
            mine = [r for r in self.receipts if not cohort or cohort in self._slices(r)]
            counted = {
                m.metric: m
                for m in measure.measure_counts(
                    mine,
                    cohort=cohort,
                    share=len(mine) / len(self.receipts) if self.receipts else 1.0,
                    stage=Stage.CANARY,
                    route=self.route,
                )
            }
            done: set[str] = set()
            for monitor in monitors:
                if monitor.rule.metric in done or not monitor.is_judged:
                    continue
                done.add(monitor.rule.metric)
                found.append(self._measurement(monitor, counted, mine))
            found += [m for name, m in counted.items() if name in _BESIDE]
        return found

    def judge(self) -> tuple[Finding, ...]:
        """The findings of the route, as of now."""
        return guardrails.judge(
            self._given,
            self.measurements(),
            stage=Stage.CANARY,
            route=self.route,
            noise_floors=self.floors,
            standings=self.standings(),
        )

    def readings(self, findings: Iterable[Finding]) -> list[Reading]:
        """Where each monitor stands, for those that there is a finding about, in its order."""
        by_name = {(m.rule.name, m.cohort): m for m in self.monitors}
        return [
            by_name[finding.rule, finding.cohort].reading(finding)
            for finding in findings
            if (finding.rule, finding.cohort) in by_name
        ]

    def _measurement(
        self, monitor: Monitor, counted: Mapping[str, Measurement], receipts: Sequence[Receipt]
    ) -> Measurement:
        metric = monitor.rule.metric
        beside = counted.get(metric)
        note = _times_note(monitor, receipts) if beside is None else beside.note
        if monitor.speaking is not monitor:
            note += f"; of the step at a share of {monitor.speaking.share or 0:.3g} alone"
        elif monitor.rule.is_timed and self._left_out and not monitor.cohort:
            note += (
                f"; {self._left_out} of them are left out, by a draw, so that the times of both"
                " arms come from the steps alike"
            )
        if metric == "error_rate":
            note = self._errors_note(monitor, note, receipts)
        elif monitor.copies:
            note += f"; {monitor.copies} exact copies of earlier answers are no evidence"
        return Measurement(
            metric,
            Stage.CANARY,
            self.route,
            monitor.cohort,
            monitor.estimate() if monitor.speaking.n else None,
            note,
            () if beside is None else beside.examples,
            share=1.0 if not receipts else len(receipts) / len(self.receipts),
        )

    def _errors_note(self, monitor: Monitor, note: str, receipts: Sequence[Receipt]) -> str:
        process = monitor.process
        if isinstance(process, stats.Rate) and process.n > process.added:
            events, before = self._earlier
            note += f"; with {before} requests of replay and shadow, {events} failed"
        outages = incidents(receipts)
        if outages:
            note += "; " + "; ".join(outage.text for outage in outages)
        return note


_BESIDE = ("error_rate_target_only", "length_finish_rate", "draft_coverage")
"""Metrics of no rule that are shown, or looked up by one."""


def _slices(receipt: Receipt) -> tuple[str, ...]:
    """The slices that a receipt is in, named as `measure.measure_route` names them."""
    is_known = receipt.prompt_band != measure.UNKNOWN_BAND
    return (
        f"concurrency {receipt.concurrency}",
        *([f"prompt {receipt.prompt_band}"] if is_known else []),
        f"temperature {receipt.temperature_band}",
    )


def _kind(cohort: str) -> str:
    return cohort.split(" ", 1)[0]


def _times_note(monitor: Monitor, receipts: Sequence[Receipt]) -> str:
    arms = [
        sum(r.arm == arm and not _fell_back(r) and r.outcome == Outcome.OK for r in receipts)
        for arm in (Arm.TARGET_ONLY, Arm.SPECULATIVE)
    ]
    note = f"unpaired: {arms[0]} target-only and {arms[1]} speculative requests completed"
    process = monitor.speaking.process
    if isinstance(process, stats.QuantileRatio) and process.observed is not None:
        target, speculative = (1e3 * seconds for seconds in process.observed)
        label = monitor.rule.subject.split()[-1]
        note = f"{label} {target:.3g} ms target-only, {speculative:.3g} ms speculative; {note}"
    return note


def _version(receipt: Receipt) -> tuple[object, ...]:
    return tuple(getattr(receipt, name) for name in _VERSIONS)


def incidents(receipts: Iterable[Receipt]) -> list[Incident]:
    """Outages of the speculative arm: `OUTAGE` and more of its requests in a row that failed."""
    ordered = list(receipts)
    mine = [r for r in ordered if _served(r)]
    found: list[Incident] = []
    row: list[Receipt] = []
    for receipt in [*mine, None]:
        if receipt is not None and measure.is_error(receipt):
            row.append(receipt)
            continue
        if len(row) >= OUTAGE:
            started = min(r.scheduled_ns for r in row)
            ended = max(r.done_ns or r.scheduled_ns for r in row)
            kinds = sorted({r.error_class or str(r.outcome) for r in row})
            found.append(
                Incident(
                    len(row),
                    started,
                    ended,
                    ", ".join(kinds),
                    sum(
                        r.arm == Arm.TARGET_ONLY
                        and measure.is_error(r)
                        and started <= r.scheduled_ns <= ended
                        for r in ordered
                    ),
                )
            )
        row = []
    return found
