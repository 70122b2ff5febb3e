"""Guardrail rules: measurements in, findings out. Pure.

The interval decides. Wholly inside the limit passes, wholly outside fails, anything else is
inconclusive, and so is a sample under the rule's minimum. What was not measured is an error, never
a pass. Passing is judged per cohort at 5 % without correction, since all must pass (an
intersection-union test); failing is judged at 1 % over all rules and cohorts together (Holm), since
one is enough. Counts of confirmed cases are exact: they are compared as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from speccheck import stats
from speccheck.config import Guardrails
from speccheck.errors import UsageError
from speccheck.records import Estimate, Finding, Measurement, Stage, Verdict

ALPHA_FAIL = 0.01
"""Level of failing, over all rules and cohorts of one judgement together."""

QUALITY_MARGIN = 0.02
"""Rise of wrong or malformed answers, as a share of all, that is certainly too much."""

SMALL_SHARE = 0.1
"""A cohort with a smaller share of the route's requests need not pass; it must not fail."""

Kind = Literal["regression", "rate", "share", "difference", "tokens", "count", "speedup"]

_LIVE = (Stage.SHADOW, Stage.CANARY)
_ALL = (Stage.REPLAY, Stage.SHADOW, Stage.CANARY)


@dataclass(frozen=True, slots=True)
class Rule:
    """One guardrail: which metric, on which side of the limit, from how many requests, and why.

    `direction` max: the metric must not exceed the limit; min: it must reach it. A regression limit
    is a share on top of target-only (0.10 allows a ratio of 1.10). `min_n` is needed to pass,
    `min_n_fail` to fail. A rule is judged in its `stages` only.
    """

    name: str
    metric: str
    direction: Literal["max", "min"]
    kind: Kind
    subject: str
    """The metric in words, for sentences."""
    stages: tuple[Stage, ...]
    min_n: int
    min_n_fail: int
    meaning: str
    """One sentence for the reference table."""
    pays: bool = False
    """Failing it means that speculation does not pay, not that something broke."""
    slices: Literal["pass", "no_fail"] = "pass"
    """Whether each slice of the route must pass too, or only must not fail. A rate near zero cannot
    be certified slice by slice without hundreds of requests in each."""
    counts: str = "requests"
    """What n counts. How many more are needed is only handed on where these are requests."""
    any_workload: bool = False
    """It holds on any prompts, random ones included: a wrong output is wrong everywhere."""

    @property
    def is_timed(self) -> bool:
        """Whether its metric is made of times, which are void where our own client was late."""
        return self.kind in ("regression", "speedup")

    def metric_limit(self, limit: float) -> float:
        """The configured limit in the metric's own unit."""
        if self.kind == "regression":
            return 1 + limit
        if self.kind == "speedup":
            return 1 / limit if limit > 0 else math.inf
        return limit

    @property
    def unit(self) -> str:
        """Unit of estimate and limit in a finding."""
        return {
            "regression": "ratio",
            "speedup": "ratio",
            "rate": "share",
            "difference": "share",
        }.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Standing:
    """A verdict that a monitor has reached on a rule: it takes the place of the interval's.

    The interval that is shown is the one of now; a pass was reached at some moment and stands.
    """

    verdict: Verdict
    needed: int | None = None
    """About how many more requests decide it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class RuleLimit:
    """What a user set for one rule: the limit as configured, perhaps a minimum n, a dry run.

    `must_pass` is False for what is judged although nobody set it: it must not fail, and what it
    leaves open is shown without being counted.
    """

    limit: float
    min_n: int | None = None
    counted: bool = True
    must_pass: bool = True


def _slower(name: str, metric: str, subject: str, pairs: int, meaning: str) -> Rule:
    return Rule(name, metric, "max", "regression", subject, _LIVE, pairs, pairs, meaning)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "min_acceptance_rate",
            "acceptance_rate",
            "min",
            "rate",
            "acceptance",
            _ALL,
            60,
            30,
            "Accepted over drafted tokens, pooled: the draft still matches this traffic. Depends on"
            " the proposal length, so set the two together.",
        ),
        Rule(
            "max_acceptance_rate",
            "acceptance_rate",
            "max",
            "rate",
            "acceptance",
            _ALL,
            60,
            30,
            "Acceptance too high while answers run to the length limit: a repetition loop.",
        ),
        Rule(
            "min_mean_acceptance_length",
            "mean_acceptance_length",
            "min",
            "tokens",
            "mean acceptance length",
            _ALL,
            60,
            30,
            "Tokens per verify step, the bonus token included.",
        ),
        _slower(
            "max_tpot_p50_regression",
            "tpot_p50_ratio",
            "TPOT p50",
            30,
            "Median time per output token against target-only.",
        ),
        _slower(
            "max_tpot_p95_regression",
            "tpot_p95_ratio",
            "TPOT p95",
            100,
            "95th percentile of time per output token against target-only, at each load.",
        ),
        _slower(
            "max_e2e_p50_regression",
            "e2e_p50_ratio",
            "e2e p50",
            30,
            "Median request time against target-only.",
        ),
        _slower(
            "max_e2e_p95_regression",
            "e2e_p95_ratio",
            "e2e p95",
            100,
            "95th percentile of request time against target-only.",
        ),
        _slower(
            "max_e2e_p99_regression",
            "e2e_p99_ratio",
            "e2e p99",
            1000,
            "99th percentile of request time against target-only; needs many requests.",
        ),
        _slower(
            "max_ttft_p50_regression",
            "ttft_p50_ratio",
            "TTFT p50",
            30,
            "Median time to first token against target-only.",
        ),
        _slower(
            "max_ttft_p95_regression",
            "ttft_p95_ratio",
            "TTFT p95",
            100,
            "95th percentile of time to first token against target-only.",
        ),
        _slower(
            "max_queue_age_p95_regression",
            "queue_age_p95_ratio",
            "queue age p95",
            100,
            "95th percentile of the time from schedule to first token: waiting in queues included.",
        ),
        Rule(
            "max_error_rate",
            "error_rate",
            "max",
            "share",
            "error rate",
            _ALL,
            30,
            1,
            "Requests of the speculative arm that failed: timeouts, server errors, broken streams,"
            " no finish reason. Refused parameters are counted by max_unsupported_requests.",
            slices="no_fail",
            any_workload=True,
        ),
        Rule(
            "max_unsupported_requests",
            "unsupported_requests",
            "max",
            "count",
            "refused requests",
            _ALL,
            1,
            1,
            "Requests that the speculative arm refuses for what they ask. Judged with limit 0"
            " wherever max_error_rate is.",
            slices="no_fail",
            any_workload=True,
        ),
        Rule(
            "max_quality_regression_cases",
            "quality_regression_cases",
            "max",
            "count",
            "confirmed quality regressions",
            (Stage.REPLAY,),
            30,
            1,
            "Prompts that target-only passes each time and the speculative arm fails each time.",
            slices="no_fail",
            any_workload=True,
        ),
        Rule(
            "max_quality_loss",
            "quality_difference",
            "max",
            "difference",
            "loss of passes",
            (Stage.REPLAY,),
            100,
            10,
            "Graded passes lost minus gained, as a share of the cases, unstable ones included. Not"
            " certain to be over 2 % wherever max_quality_regression_cases is judged; where it is"
            " set, each task must be certain to be within it.",
            counts="cases",
            any_workload=True,
        ),
        Rule(
            "max_output_drift",
            "output_drift",
            "max",
            "difference",
            "rise of faults of form",
            (Stage.REPLAY,),
            100,
            10,
            "Answers cut at the token limit, past a stop string, malformed, empty, in circles,"
            " refused or in another language, more often than on target-only. Not certain to be"
            " over 2 % wherever max_quality_regression_cases is judged.",
            slices="no_fail",
            counts="cases",
            any_workload=True,
        ),
        Rule(
            "max_lossless_violations",
            "lossless_violations",
            "max",
            "count",
            "lossless violations",
            (Stage.REPLAY,),
            3000,
            1,
            "Greedy divergences at tokens where the target is sure beyond its own noise.",
            counts="compared tokens",
            any_workload=True,
        ),
        Rule(
            "max_slice_failures",
            "slice_failures",
            "max",
            "count",
            "broken server features",
            (Stage.REPLAY,),
            1,
            1,
            "Requests with a server feature (stop strings, log-probabilities, penalties ...) that"
            " target-only serves rightly and the speculative arm does not. Judged with limit 0"
            " wherever slices run.",
            slices="no_fail",
            any_workload=True,
        ),
        Rule(
            "max_sampled_violations",
            "sampled_violations",
            "max",
            "count",
            "sampled violations",
            (Stage.REPLAY,),
            800,
            1,
            "Distribution tests at temperature 1 in which speculative answers differ from the"
            " target's law by more than the target does from its own.",
            counts="verified tokens",
            any_workload=True,
        ),
        Rule(
            "min_structured_output_validity",
            "structured_output_validity",
            "min",
            "share",
            "valid structured output",
            (Stage.REPLAY,),
            30,
            10,
            "Share of structured answers of the speculative arm that parse and meet the schema.",
            slices="no_fail",
            counts="prompts",
            any_workload=True,
        ),
        Rule(
            "max_protected_delay",
            "protected_e2e_ratio",
            "max",
            "regression",
            "protected traffic's e2e",
            (Stage.SHADOW,),
            8,
            4,
            "Protected traffic beside speculative work against without, in alternating blocks.",
            counts="pairs of blocks",
        ),
        Rule(
            "max_fallback_rate",
            "fallback_rate",
            "max",
            "share",
            "fallback rate",
            (Stage.CANARY,),
            30,
            30,
            "Requests that fell back to target-only.",
            slices="no_fail",
        ),
        Rule(
            "min_speedup",
            "e2e_mean_ratio",
            "max",
            "speedup",
            "e2e speed-up",
            _LIVE,
            30,
            30,
            "Mean speed-up of whole requests. Failing it means that speculation does not pay here."
            " Judged with limit 1 where it is not set.",
            pays=True,
        ),
    )
}
"""Every rule, by name."""


def rule_limits(rules: Guardrails, route: str) -> dict[str, RuleLimit]:
    """What a route is judged by, as the files say."""
    return {
        name: RuleLimit(
            limit,
            min_n=rules.minimum_requests.get(name),
            counted=name not in rules.dry_run,
        )
        for name, limit in rules.limits(route).items()
    }


def judge(
    rules: Mapping[str, RuleLimit],
    measurements: Sequence[Measurement],
    *,
    stage: Stage,
    route: str,
    noise_floors: Mapping[str, Estimate] | None = None,
    standings: Mapping[tuple[str, str], Standing] | None = None,
    alpha_fail: float = ALPHA_FAIL,
    small_share: float = SMALL_SHARE,
) -> tuple[Finding, ...]:
    """Judge one route in one stage: a finding per rule and cohort, worst first.

    Rules that belong to other stages are left out. `noise_floors` are A/A ratios by metric: where
    target-only differs from itself by more than half of what a regression rule allows, the rule is
    decided only by effects that exceed the limit (or stay inside it) by more than that noise.
    `standings` are verdicts that monitors have reached, by rule and cohort; they stand.

    Raises:
        UsageError: a rule that does not exist.
    """
    for name in rules:
        if name not in RULES:
            raise UsageError(f"no rule is called {name!r}; known: {', '.join(sorted(RULES))}")
    asked = [
        (RULES[name], limit)
        for name, limit in with_implied(rules).items()
        if stage in RULES[name].stages
    ]
    limit_of = {rule.name: limit for rule, limit in asked}
    mine = [m for m in measurements if m.route == route and m.stage == stage]
    known = {m.metric for m in mine if _is_whole(m.estimate)}
    counted = {m.metric for m in mine if not m.cohort}
    jobs = [
        (rule, limit, m)
        for rule, limit in asked
        for m in mine
        # A slice without a single case says no more than the whole route's count does.
        if m.metric == rule.metric
        and not (rule.kind == "count" and m.cohort and m.metric in counted and _is_zero(m))
    ]
    floors = noise_floors or {}
    # Counts are exact and no tests: they take no part in the correction for many tests.
    p_values = [
        _fail_p(m, rule, rule.metric_limit(limit.limit), floors.get(rule.metric))
        for rule, limit, m in jobs
    ]
    tests = [
        i for i, (rule, _, m) in enumerate(jobs) if rule.kind != "count" and _is_whole(m.estimate)
    ]
    for i, p in zip(tests, stats.holm([p_values[i] for i in tests]), strict=True):
        p_values[i] = p
    findings = [
        _finding(
            rule,
            limit,
            m,
            p_fail=p,
            floor=floors.get(rule.metric),
            standing=(standings or {}).get((rule.name, m.cohort)),
            alpha_fail=alpha_fail,
            small_share=small_share,
            mine=mine,
            known=known,
        )
        for (rule, limit, m), p in zip(jobs, p_values, strict=True)
    ]
    # What need not pass slice by slice is shown for a slice only where it fails.
    findings = [
        f
        for f in findings
        if not f.cohort
        or f.verdict is Verdict.FAIL
        or (RULES[f.rule].slices == "pass" and limit_of[f.rule].must_pass)
    ]
    measured = {rule.name for rule, _, _ in jobs}
    findings += [
        Finding(
            rule.name,
            Verdict.ERROR,
            route,
            "",
            stage,
            None,
            rule.metric_limit(limit.limit),
            rule.unit,
            f"{rule.subject} was not measured in this stage, so the rule cannot be judged",
            counted=limit.counted and limit.must_pass,
        )
        for rule, limit in asked
        if rule.name not in measured
    ]
    return tuple(sorted(findings, key=lambda f: (-f.verdict, f.cohort != "", f.rule, f.cohort)))


LATE = " is void: our client was late ("
"""Stands between the subject of a void finding and the reason, which all of them share."""

HELD = ", but the load was not as planned: "
"""Stands between what a finding says and why its pass is void, which all of them share."""


def void_times(findings: Sequence[Finding], late: str) -> tuple[Finding, ...]:
    """The findings where our own client was too late to time anything; `late` says why, or is
    empty: then they stay as they are.

    What rests on times could not be judged (an error, neither slow nor fast); the rest stands.
    """
    return tuple(
        replace(
            f,
            verdict=Verdict.ERROR,
            estimate=None,
            needed=None,
            why=f"{RULES[f.rule].subject}{LATE}{late})",
        )
        if late and _is_timed(f)
        else f
        for f in findings
    )


def void_passes(findings: Sequence[Finding], held: str) -> tuple[Finding, ...]:
    """The findings where requests were held back, so that the load was lighter than planned.

    Times look no worse for it: a failure stands, a pass could not be judged. `held` says why, or
    is empty: then they stay as they are.
    """
    return tuple(
        replace(f, verdict=Verdict.ERROR, why=f"{f.why}{HELD}{held}")
        if held and _is_timed(f) and f.verdict is Verdict.PASS
        else f
        for f in findings
    )


def _is_timed(finding: Finding) -> bool:
    return finding.rule in RULES and RULES[finding.rule].is_timed


def with_implied(rules: Mapping[str, RuleLimit]) -> dict[str, RuleLimit]:
    """What is judged though not set: refusals beside errors, and beside regression cases the
    aggregate of all cases and the form of the answers.
    """
    implied = dict(rules)
    if "max_error_rate" in rules and "max_unsupported_requests" not in rules:
        implied["max_unsupported_requests"] = RuleLimit(0, counted=rules["max_error_rate"].counted)
    if "max_quality_regression_cases" in rules:
        counted = rules["max_quality_regression_cases"].counted
        for name in ("max_quality_loss", "max_output_drift"):
            implied.setdefault(name, RuleLimit(QUALITY_MARGIN, counted=counted, must_pass=False))
    return implied


def _is_whole(e: Estimate | None) -> bool:
    """Whether there is an estimate without a NaN in it; half an interval decides nothing."""
    return e is not None and not any(math.isnan(x) for x in (e.value, e.low, e.high))


def _is_zero(m: Measurement) -> bool:
    return m.estimate is not None and m.estimate.high == 0


# --- one finding --------------------------------------------------------------------------------


def _outside(rule: Rule, e: Estimate, limit: float) -> bool:
    return e.low > limit if rule.direction == "max" else e.high < limit


def _inside(rule: Rule, e: Estimate, limit: float) -> bool:
    return e.high <= limit if rule.direction == "max" else e.low >= limit


def _fail_p(m: Measurement, rule: Rule, limit: float, floor: Estimate | None) -> float:
    """Smallest level at which the metric is beyond its limit: an upper bound of the p-value.

    Exact counts have no chance in them: 0 if beyond.
    """
    if m.estimate is None or not _is_whole(m.estimate):
        return 1.0
    if rule.kind == "count":
        return 0.0 if _outside(rule, m.estimate, limit) else 1.0
    levels = [
        e.alpha
        for e in (m.estimate, *m.fail_estimates)
        if _is_whole(e) and _outside(rule, _widened(e, rule, limit, floor), limit)
    ]
    return min(levels, default=1.0)


def noise(rule: Rule, limit: float, floor: Estimate | None) -> float:
    """Log noise of the A/A control if it is more than half of what the rule allows, else 0.

    `limit` is in the metric's unit.
    """
    if floor is None or not rule.is_timed or not _is_whole(floor):
        return 0.0
    if floor.low <= 0 or math.isinf(floor.high):
        return math.inf
    shown = max(abs(math.log(floor.low)), abs(math.log(floor.high)))
    allowed = abs(math.log(limit)) if rule.kind == "regression" else 0.0
    return shown if shown > allowed / 2 else 0.0


def _floor_text(rule: Rule, limit: float, floor: Estimate | None, verdict: Verdict) -> str:
    """What target-only shows against itself, for a rule on times; empty where it is not known."""
    if floor is None or not rule.is_timed or not _is_whole(floor):
        return ""
    shown = f"{_change(floor.low)} to {_change(floor.high)} (noise floor, n {floor.n})"
    if verdict is Verdict.INCONCLUSIVE and noise(rule, limit, floor) > 0:
        return f"; target-only against itself already shows {shown}"
    return f"; target-only against itself {shown}"


def _widened(e: Estimate, rule: Rule, limit: float, floor: Estimate | None) -> Estimate:
    log_noise = noise(rule, limit, floor)
    if log_noise == 0:
        return e
    factor = math.exp(log_noise) if log_noise < 700 else math.inf
    return Estimate(e.value, e.low / factor, e.high * factor, e.n, e.method, e.alpha)


def _finding(
    rule: Rule,
    limit: RuleLimit,
    m: Measurement,
    *,
    p_fail: float,
    floor: Estimate | None,
    standing: Standing | None,
    alpha_fail: float,
    small_share: float,
    mine: Sequence[Measurement],
    known: AbstractSet[str],
) -> Finding:
    bound = rule.metric_limit(limit.limit)
    e = m.estimate
    min_n = limit.min_n if limit.min_n is not None else rule.min_n
    needed: int | None = None
    if e is None or not _is_whole(e):
        # A slice without data beside others that have some is thin, not broken.
        thin = m.cohort and m.metric in known
        verdict = Verdict.INCONCLUSIVE if thin else Verdict.ERROR
        why = f"{rule.subject} could not be estimated: {m.note or 'no data'}"
        needed = min_n if thin else None
    else:
        figure = _figure(rule, e, bound)
        # The limit of "none of n" at acceptance 0 holds at any n; the t-interval needs its minimum.
        min_n_fail = 1 if rule.kind == "rate" and e.value == 0 else rule.min_n_fail
        fails = p_fail <= alpha_fail and e.n >= min_n_fail
        is_inside = _inside(rule, _widened(e, rule, bound, floor), bound)
        passes = is_inside and e.n >= min_n
        if standing is not None:
            fails, passes = (standing.verdict is v for v in (Verdict.FAIL, Verdict.PASS))
        verdict, word = Verdict.INCONCLUSIVE, ""
        if fails:
            verdict = Verdict.FAIL
            word = "is over" if rule.direction == "max" and not rule.pays else "is under"
            if (
                standing is not None
                and word == "is over"
                and rule.kind == "share"
                and e.value <= bound
            ):
                word = "came too close together for"  # a change, after a long calm
        elif passes:
            verdict = Verdict.PASS
            word = "is within" if is_inside else "is not clear of"
        elif e.n < min_n:
            word = f"is from fewer than {min_n} {rule.counts}, too few to judge by"
            needed = min_n - e.n
        else:
            word = "is not clear of"
            needed = _needed(rule, e, bound)
        if standing is not None:
            needed = standing.needed
        why = f"{figure} {word} {_limit_text(rule, limit.limit)}"
        if passes and not is_inside and standing is not None:
            why += f"; {standing.note}"
        if needed and rule.counts != "requests":
            why += f"; about {needed} more {rule.counts} are needed"
            needed = None
        why += _floor_text(rule, bound, floor, verdict)
        if rule.name == "max_acceptance_rate":
            judged, word = _loop_verdict(verdict, m, mine)
            why += word
            # What a monitor has failed stands: it has seen how answers end.
            verdict = judged if standing is None else verdict
        if m.note:
            why += f" [{m.note}]"
        if rule.metric == "acceptance_rate" and e.value == 0:
            why += (
                "; nothing at all is accepted: the draft or head does not belong to this target or"
                " is loaded under the wrong method name"
            )
    counted = limit.counted and (limit.must_pass or verdict is Verdict.FAIL)
    if limit.counted and not counted and verdict is not Verdict.PASS:
        why += "; it was not set, so it need not pass, it must not fail"
    if m.cohort and m.share < small_share and verdict is not Verdict.FAIL:
        counted = False
        why += f"; a small slice ({m.share:.1%} of requests) need not pass, it must not fail"
    return Finding(
        rule.name,
        verdict,
        m.route,
        m.cohort,
        m.stage,
        e,
        bound,
        rule.unit,
        why,
        needed if verdict is Verdict.INCONCLUSIVE else None,
        counted,
        m.examples,
    )


LOOP_SHARE = 0.05
"""Share of answers at the length limit above which high acceptance looks like repetition."""


def _loop_verdict(
    verdict: Verdict, m: Measurement, mine: Sequence[Measurement]
) -> tuple[Verdict, str]:
    """High acceptance alone is good news; it is a loop if answers also run to the length limit."""
    if verdict is not Verdict.FAIL:
        return verdict, ""
    beside = next(
        (x for x in mine if (x.metric, x.cohort) == ("length_finish_rate", m.cohort)), None
    )
    if beside is None or beside.estimate is None or not beside.estimate.is_known:
        return Verdict.INCONCLUSIVE, ", but how answers ended is not known"
    rate = beside.estimate
    if rate.low > LOOP_SHARE:
        return Verdict.FAIL, f", and {beside.note}: repetition loops"
    if rate.high < LOOP_SHARE:
        return Verdict.PASS, f", but answers end by themselves ({beside.note})"
    return Verdict.INCONCLUSIVE, f", and {beside.note}, which does not tell a loop"


def _needed(rule: Rule, e: Estimate, limit: float) -> int | None:
    if rule.kind == "count":
        return None  # the open cases need reruns, not more requests
    if rule.kind == "share":
        if rule.direction == "max":
            return stats.needed_for_share(round(e.value * e.n), e.n, limit, alpha=e.alpha)
        failures = round((1 - e.value) * e.n)
        return stats.needed_for_share(failures, e.n, 1 - limit, alpha=e.alpha)
    p = _probability(rule)
    if p is not None and math.isinf(e.high):
        # Order statistics of each arm at half the level: before this there is no upper limit. Past
        # it, other prompts are missing, and not requests.
        return max(stats.existence_minimum(p, e.alpha / 2) - e.n, 0) or None
    return stats.needed_for_interval(e, limit)


def _probability(rule: Rule) -> float | None:
    """The p of the quantile that a rule is about: 0.95 for tpot_p95_ratio."""
    found = re.search(r"_p(\d+)_ratio$", rule.metric)
    return int(found[1]) / 100 if found else None


PLANNED_SPREAD = 0.3
"""Log standard deviation of a latency that sample sizes are planned with before any is measured."""


def planned_need(rule: Rule, limit: RuleLimit) -> str:
    """What a rule will take to pass, before anything was measured: for those who size a run.

    At 5 %, 80 % power for quantiles (STATS 4.2, 4.3, 4.6). Empty where a count says it all.
    """
    if rule.kind == "share" and rule.direction == "max":
        if limit.limit == 0:
            return f"no number of {rule.counts} passes it"
        alpha = 0.05
        once = stats.certify_share_n(0, limit.limit, alpha=alpha)
        looked_at = stats.clean_needed(0, 0, limit.limit, alpha=alpha)
        return f"{once} clean {rule.counts}, {looked_at} where it is looked at all the time"
    p = _probability(rule)
    if p is not None and limit.limit > 0:
        faster, same = (
            stats.quantile_ratio_n(PLANNED_SPREAD, p, ratio, limit=1 + limit.limit, alpha=0.05)
            for ratio in (0.9, 1.0)
        )
        least = max(rule.min_n if limit.min_n is None else limit.min_n, 1)
        return f"about {max(faster, least)} {rule.counts} if 10% faster, {max(same, least)} if not"
    if rule.kind == "count":
        return ""
    return f"{rule.min_n if limit.min_n is None else limit.min_n} {rule.counts}"


# --- sentences ----------------------------------------------------------------------------------


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.3g}%" if 0 < ratio < math.inf else "no bound"


def _apart(value: float, limit: float, show: str) -> str:
    """The value with enough digits that it does not read as the limit unless it is."""
    digits = 3
    while (
        digits < 9 and value != limit and f"{value:.{digits}{show}}" == f"{limit:.{digits}{show}}"
    ):
        digits += 1
    return f"{value:.{digits}{show}}"


def _figure(rule: Rule, e: Estimate, limit: float) -> str:
    """Subject, value, interval and n, in the unit that people speak of."""
    if rule.kind == "count":
        upper = f" (up to {e.high:g} with open ones)" if e.high > e.value else ""
        counts = "" if rule.counts == "requests" else f" {rule.counts}"
        return f"{e.value:g} {rule.subject}{upper} in {e.n}{counts}"
    if rule.kind == "regression":
        value = _apart(100 * (e.value - 1), 100 * (limit - 1), "g")
        sign = "" if value.startswith("-") else "+"
        return (
            f"{rule.subject} {sign}{value}% ({_change(e.low)} to {_change(e.high)}, n {e.n})"
            " against target-only"
        )
    if rule.kind == "speedup":
        low, high = (1 / e.high if e.high else 0.0), (1 / e.low if e.low > 0 else math.inf)
        value = _apart(1 / e.value, 1 / limit if limit else math.inf, "g")
        upper = f"{high:.3g}" if math.isfinite(high) else "no bound"
        return f"{rule.subject} {value} ({low:.3g} to {upper}, n {e.n})"
    if rule.kind in ("share", "difference"):
        value = _apart(100 * e.value, 100 * limit, "g")
        return f"{rule.subject} {value}% ({100 * e.low:.3g}% to {100 * e.high:.3g}%, n {e.n})"
    return f"{rule.subject} {_apart(e.value, limit, 'g')} ({e.low:.3g} to {e.high:.3g}, n {e.n})"


def _limit_text(rule: Rule, limit: float) -> str:
    side = "at most" if rule.direction == "max" else "at least"
    if rule.kind == "regression":
        return f"the limit of {100 * limit:+g}%"
    if rule.kind == "speedup":
        return f"the limit of at least {limit:g}"
    if rule.kind in ("share", "difference"):
        return f"the limit of {side} {100 * limit:g}%"
    return f"the limit of {side} {limit:g}"
