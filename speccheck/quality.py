"""Are the answers as good? Regression cases, and the paired difference over all cases.

A case is a prompt with a deterministic check, graded on every run of both arms. A regression is one
that the target passes each time and the speculative arm fails each time. Pure functions: the stage
does the sending, `grading` the grading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from speccheck import stats
from speccheck.lossless import DivergenceKind
from speccheck.records import Estimate, Measurement

CaseStatus = Literal[
    "agree", "unstable", "candidate", "regression", "improvement", "not_applicable"
]


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its check, graded on every run of both arms.

    Outcomes are pass, fail or not_applicable, in the order of the runs; at temperature 0 the first
    two of the target are its A/A pair. `divergence` attributes a first difference where known.
    """

    prompt_id: str
    target: tuple[str, ...]
    speculative: tuple[str, ...]
    receipt_id: str = ""
    """The speculative arm's first receipt."""
    cohort: str = ""
    divergence: DivergenceKind | None = None


def case_status(case: Case, runs: int) -> CaseStatus:
    """What one case says, given that `runs` runs per arm confirm.

    regression: the target passes each run, the speculative arm fails each, at least `runs` of both.
    improvement: the mirror. candidate: so far one-sided, but fewer runs. unstable: an arm
    contradicts itself (never counted against the zero gate). not_applicable: the check could not
    be applied on one side.
    """
    outcomes = {*case.target, *case.speculative}
    if not case.target or not case.speculative or outcomes - {"pass", "fail"}:
        return "not_applicable"
    if len(set(case.target)) > 1 or len(set(case.speculative)) > 1:
        return "unstable"
    if case.target[0] == case.speculative[0]:
        return "agree"
    if min(len(case.target), len(case.speculative)) < runs:
        return "candidate"
    return "regression" if case.target[0] == "pass" else "improvement"


def confirming_runs(cases: int, *, alpha: float = 0.05) -> int:
    """Runs per arm so that k passes against k fails is not chance in any of so many cases.

    Fisher's exact p is 1/C(2k, k), Bonferroni over the cases: 12 cases need 5, 171 need 7.
    """
    k = 1
    while stats.fisher_all_against_none(k) > alpha / max(cases, 1):
        k += 1
    return k


def measure_quality(
    cases: Iterable[Case], *, stage: str, route: str, runs: int, alpha: float = 0.05
) -> list[Measurement]:
    """Metrics quality_regression_cases and quality_difference, for the route and for each cohort
    with a one-sided case in it.

    The count's limits hold what is confirmed: low counts regressions, high adds candidates (target
    passed, speculative failed, too few runs). n counts cases that could be judged. The difference
    is the paired share of first runs that became worse minus better, with Tango's interval.
    """
    all_cases = list(cases)
    found = [_count_cases(all_cases, "", stage=stage, route=route, runs=runs, alpha=alpha)]
    if all_cases:
        judged = [c for c in all_cases if case_status(c, runs) != "not_applicable"]
        b = sum((c.target[0], c.speculative[0]) == ("pass", "fail") for c in judged)
        c_ = sum((c.target[0], c.speculative[0]) == ("fail", "pass") for c in judged)
        found.append(
            Measurement(
                "quality_difference",
                stage,
                route,
                "",
                stats.tango(b, c_, len(judged), alpha=alpha) if judged else None,
                f"first runs: {b} worse, {c_} better of {len(judged)}"
                f" (exact McNemar p {stats.mcnemar_exact(b, c_):.2g})",
            )
        )
    sliced = {
        c.cohort
        for c in all_cases
        if c.cohort and case_status(c, runs) in ("regression", "candidate")
    }
    if {c.cohort for c in all_cases} - sliced:
        found += [
            _count_cases(
                [c for c in all_cases if c.cohort == name],
                name,
                stage=stage,
                route=route,
                runs=runs,
                alpha=alpha,
            )
            for name in sorted(sliced)
        ]
    return found


def _count_cases(
    cases: Sequence[Case], cohort: str, *, stage: str, route: str, runs: int, alpha: float
) -> Measurement:
    metric = "quality_regression_cases"
    by_status: dict[CaseStatus, list[Case]] = {}
    for case in cases:
        by_status.setdefault(case_status(case, runs), []).append(case)
    skipped = len(by_status.get("not_applicable", ()))
    n = len(cases) - skipped
    if n == 0:
        return Measurement(metric, stage, route, cohort, None, "no case could be judged")
    regressions = by_status.get("regression", [])
    candidates = by_status.get("candidate", [])
    worse = [c for c in candidates if c.target[0] == "pass"]
    ties = sum(c.divergence == "tie" for c in regressions)
    parts = [f"{len(regressions)} confirmed regressions in {n} cases"]
    if ties:
        parts[0] += f" ({ties} at numerical ties)"
    parts.append(f"{len(by_status.get('improvement', ()))} confirmed improvements")
    if worse:
        parts.append(f"{len(worse)} became worse but were not run {runs} times on both arms")
    if by_status.get("unstable"):
        parts.append(f"{len(by_status['unstable'])} unstable and not counted")
    if skipped:
        parts.append(f"{skipped} not judged")
    if not regressions and not worse:
        parts.append(f"0 in {n} bounds the true rate by {stats.zero_events_bound(n):.1%}")
    confirmed = len(regressions)
    return Measurement(
        metric,
        stage,
        route,
        cohort,
        Estimate(
            confirmed,
            confirmed,
            confirmed + len(worse),
            n,
            f"cases confirmed by {runs} runs",
            alpha,
        ),
        "; ".join(parts),
        tuple(c.receipt_id for c in (*regressions, *worse) if c.receipt_id)[:5],
    )
