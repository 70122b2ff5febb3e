"""Are the answers as good? Regression cases, and the paired difference over all cases.

A case is a prompt with a deterministic check, graded on every run of both arms. A regression is one
that the target passes each time and the speculative arm fails each time. Cases on which the target
contradicts itself are no evidence against the other arm one by one; they stay in the aggregate, the
paired difference of first runs, where noise falls on both sides alike. Pure functions: the stage
does the sending, `grading` the grading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from speccheck import stats
from speccheck.lossless import DivergenceKind
from speccheck.records import Estimate, Measurement

CaseStatus = Literal[
    "agree", "unstable", "candidate", "regression", "improvement", "not_applicable"
]

Ties = Literal["count", "aggregate_only"]
"""Whether a confirmed regression that begins at a numerical tie counts against the zero limit, or
is left to the aggregate."""

FEWEST_OF_A_TASK = 100
"""Cases of a task type below which "no regression" bounds the true rate by no better than 3 %."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its check, graded on every run of both arms.

    Outcomes are pass, fail or not_applicable, in the order of the runs; at temperature 0 the first
    two of the target are its A/A pair. `divergence` attributes a first difference where known.
    `cohort` is the task; `slices` are further names under which regressions are counted (a feature,
    "json with reasoning"). Cases with the same `group` (a source document, a conversation, a prompt
    at two temperatures) are not independent.
    """

    prompt_id: str
    target: tuple[str, ...]
    speculative: tuple[str, ...]
    receipt_id: str = ""
    """The speculative arm's first receipt."""
    cohort: str = ""
    divergence: DivergenceKind | None = None
    slices: tuple[str, ...] = ()
    group: str = ""

    @property
    def lost(self) -> bool:
        """Whether the first runs went from pass on target-only to fail on the speculative arm."""
        return _first(self) == ("pass", "fail")

    @property
    def gained(self) -> bool:
        """The mirror of `lost`."""
        return _first(self) == ("fail", "pass")


def _first(case: Case) -> tuple[str, str]:
    """Outcomes of the first runs, which alone are sent for every case alike."""
    return next(iter(case.target), ""), next(iter(case.speculative), "")


def flips(case: Case) -> bool:
    """Whether the target's first two runs, the A/A pair at temperature 0, came out differently."""
    return set(case.target[:2]) == {"pass", "fail"}


def case_status(case: Case, runs: int) -> CaseStatus:
    """What one case says, given that `runs` runs per arm confirm.

    regression: the target passes each run, the speculative arm fails each, at least `runs` of both.
    improvement: the mirror. candidate: so far one-sided, but fewer runs. unstable: an arm
    contradicts itself (never counted against the zero gate). not_applicable: the check could not be
    applied to a first run. A later run that could not be judged (an error, a cut stream) is no run:
    it confirms nothing and clears nothing.
    """
    if not set(_first(case)) <= {"pass", "fail"}:
        return "not_applicable"
    target, speculative = (
        [outcome for outcome in runs_of_arm if outcome in ("pass", "fail")]
        for runs_of_arm in (case.target, case.speculative)
    )
    if len(set(target)) > 1 or len(set(speculative)) > 1:
        return "unstable"
    if target[0] == speculative[0]:
        return "agree"
    if min(len(target), len(speculative)) < runs:
        return "candidate"
    return "regression" if target[0] == "pass" else "improvement"


def confirming_runs(cases: int, *, alpha: float = 0.05) -> int:
    """Runs per arm so that k passes against k fails is not chance in any of so many cases.

    For sampled outputs: Fisher's exact p is 1/C(2k, k), Bonferroni over the cases: 12 cases need 5,
    171 need 7.
    """
    k = 1
    while stats.fisher_all_against_none(k) > alpha / max(cases, 1):
        k += 1
    return k


def confirming_greedy_runs(cases: int, *, alpha: float = 0.05) -> int:
    """Runs per arm that confirm at temperature 0: 3, and more for many cases.

    A case that passes with probability pi on either arm looks like a regression after k runs of
    both with probability pi^k (1 - pi)^k <= 4^-k, so that not more than `alpha` false ones are
    expected over all cases, were every one of them unstable: 48 cases need 5, 200 need 6.
    """
    return max(3, math.ceil(math.log(max(cases, 1) / alpha, 4)))


# --- measurements -------------------------------------------------------------------------------


def measure_quality(
    cases: Iterable[Case],
    *,
    stage: str,
    route: str,
    runs: int,
    ties: Ties = "count",
    alpha: float = 0.05,
) -> list[Measurement]:
    """Metrics quality_regression_cases and quality_difference, for the route and its slices.

    The count's limits hold what is confirmed: low counts regressions, high adds candidates (target
    passed, speculative failed, too few runs). n counts cases that could be judged; slices with a
    one-sided case in it are named. The difference is the paired share of first runs that became
    worse minus better, with Tango's interval, for the route and each task.
    """
    all_cases = list(cases)

    def count(mine: Sequence[Case], name: str) -> Measurement:
        return _count(mine, name, stage=stage, route=route, runs=runs, ties=ties, alpha=alpha)

    whole = count(all_cases, "")
    bad = {
        name: mine
        for name, mine in _slices(all_cases).items()
        if any(case_status(case, runs) in ("regression", "candidate") for case in mine)
    }
    telling = _most_telling(bad, runs)
    return [
        replace(whole, note=f"{whole.note}; {telling}" if telling else whole.note),
        *measure_difference(all_cases, stage=stage, route=route, alpha=alpha),
        *(count(mine, name) for name, mine in bad.items()),
    ]


def _most_telling(slices: Mapping[str, Sequence[Case]], runs: int) -> str:
    """The slice with the most regressions, the smallest of such, in words; empty without any."""
    lost = {
        name: sum(case_status(case, runs) == "regression" for case in mine)
        for name, mine in slices.items()
    }
    if not any(lost.values()):
        return ""
    name = min(lost, key=lambda name: (-lost[name], len(slices[name])))
    return f"{lost[name]} of the regressions are in the slice {name} ({len(slices[name])} cases)"


def _slices(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases by slice; a slice that holds all of them, or just those of one before, says no more."""
    found: dict[str, list[Case]] = {}
    known = {frozenset(case.prompt_id for case in cases)}
    for name in dict.fromkeys(chain((c.cohort for c in cases), *(c.slices for c in cases))):
        mine = [case for case in cases if name and (name == case.cohort or name in case.slices)]
        members = frozenset(case.prompt_id for case in mine)
        if mine and members not in known:
            known.add(members)
            found[name] = mine
    return dict(sorted(found.items()))


def measure_difference(
    cases: Sequence[Case], *, stage: str, route: str, alpha: float = 0.05
) -> list[Measurement]:
    """Metric quality_difference of a route and of each of its tasks, at all levels of failing."""
    judged = [case for case in cases if set(_first(case)) <= {"pass", "fail"}]
    if not cases:
        return []
    tasks = sorted({case.cohort for case in judged if case.cohort})
    found = []
    for task in ["", *(tasks if len(tasks) > 1 else [])]:
        mine = [case for case in judged if not task or case.cohort == task]
        lost, gained = sum(case.lost for case in mine), sum(case.gained for case in mine)
        found.append(
            Measurement(
                "quality_difference",
                stage,
                route,
                task,
                difference(mine, alpha=alpha) if mine else None,
                f"first runs: {lost} worse, {gained} better of {len(mine)}"
                f" (exact McNemar p {stats.mcnemar_exact(lost, gained):.2g})"
                if mine
                else "no case could be judged",
                tuple(case.receipt_id for case in mine if case.lost and case.receipt_id)[:5],
                tuple(difference(mine, alpha=a) for a in stats.FAIL_LEVELS),
                share=len(mine) / len(judged) if judged else 1.0,
            )
        )
    return found


def difference(cases: Sequence[Case], *, alpha: float) -> Estimate:
    """(lost - gained)/n over first runs with Tango's interval: a positive value is a loss.

    Cases that share a group, or a prompt (at two temperatures), are one cluster.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group or case.prompt_id, []).append(case)
    counts = [
        (sum(c.lost for c in mine), sum(c.gained for c in mine), len(mine))
        for mine in groups.values()
    ]
    lost, gained, sizes = zip(*counts, strict=True) if counts else ((), (), ())
    return stats.tango_clustered(lost, gained, sizes, alpha=alpha)


def _count(
    cases: Sequence[Case],
    cohort: str,
    *,
    stage: str,
    route: str,
    runs: int,
    ties: Ties,
    alpha: float,
) -> Measurement:
    metric = "quality_regression_cases"
    by_status: dict[CaseStatus, list[Case]] = {}
    for case in cases:
        by_status.setdefault(case_status(case, runs), []).append(case)
    skipped = len(by_status.get("not_applicable", ()))
    n = len(cases) - skipped
    if n == 0:
        return Measurement(metric, stage, route, cohort, None, "no case could be judged")
    confirmed = by_status.get("regression", [])
    at_ties = [case for case in confirmed if case.divergence == "tie"]
    left_out = at_ties if ties == "aggregate_only" else []
    regressions = [case for case in confirmed if case not in left_out]
    worse = [case for case in by_status.get("candidate", ()) if case.target[0] == "pass"]
    unstable = by_status.get("unstable", [])
    flipped = sum(map(flips, unstable))
    parts = [f"{len(confirmed)} confirmed regressions in {n} cases"]
    if at_ties:
        where = ", which are left to the aggregate" if left_out else ""
        parts[0] += f" ({len(at_ties)} at numerical ties{where})"
    parts.append(f"{len(by_status.get('improvement', ()))} confirmed improvements")
    if worse:
        parts.append(f"{len(worse)} became worse but were not run {runs} times on both arms")
    if unstable:
        own = f", target-only differs from itself on {flipped}" if flipped else ""
        parts.append(f"{len(unstable)} unstable and not counted{own}")
    if skipped:
        parts.append(f"{skipped} not judged")
    if not confirmed and not worse:
        parts.append(zero_bound(n))
    count = len(regressions)
    return Measurement(
        metric,
        stage,
        route,
        cohort,
        Estimate(count, count, count + len(worse), n, f"cases confirmed by {runs} runs", alpha),
        "; ".join(parts),
        tuple(c.receipt_id for c in (*regressions, *worse) if c.receipt_id)[:5],
    )


def zero_bound(n: int) -> str:
    """What no regression in n cases leaves open, in words.

    >>> zero_bound(50)
    '0 in 50 bounds the true rate by 5.8%'
    """
    return f"0 in {n} bounds the true rate by {stats.zero_events_bound(n):.1%}"


# --- one task, for people -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskQuality:
    """Paired outcomes of one task type at one temperature; rates are over first runs."""

    n: int
    target_passes: int
    speculative_passes: int
    lost: int
    gained: int
    flipped: int | None
    """Cases on which target-only differed from itself; None where it ran once."""
    regressions: int
    """Confirmed, numerical ties included."""
    improvements: int
    mcnemar_p: float
    difference: Estimate
    note: str
    """What n is too few for, or empty."""


def task_quality(cases: Sequence[Case], runs: int, *, control: bool) -> TaskQuality:
    """What the cases of one task say together. `control`: whether an A/A pair was run."""
    judged = [case for case in cases if case_status(case, runs) != "not_applicable"]
    statuses = [case_status(case, runs) for case in judged]
    n, lost = len(judged), sum(case.lost for case in judged)
    gained = sum(case.gained for case in judged)
    note = ""
    if n < FEWEST_OF_A_TASK:
        bound = f": {zero_bound(n)}" if "regression" not in statuses and not lost else ""
        note = f"under {FEWEST_OF_A_TASK} cases say little{bound}"
    return TaskQuality(
        n=n,
        target_passes=sum(case.target[0] == "pass" for case in judged),
        speculative_passes=sum(case.speculative[0] == "pass" for case in judged),
        lost=lost,
        gained=gained,
        flipped=sum(map(flips, judged)) if control else None,
        regressions=statuses.count("regression"),
        improvements=statuses.count("improvement"),
        mcnemar_p=stats.mcnemar_exact(lost, gained),
        difference=difference(judged, alpha=0.05),
        note=note,
    )
