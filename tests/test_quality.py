"""Regressions told from chance."""

from __future__ import annotations

import pytest

from speccheck import quality
from speccheck.quality import Case
from speccheck.replay import attribution
from speccheck.replay.grades import Temperature

P, F, N = "pass", "fail", "not_applicable"


@pytest.mark.parametrize(
    ("target", "speculative", "status"),
    [
        ((P, P, P), (F, F, F), "regression"),
        ((F, F, F), (P, P, P), "improvement"),
        ((P, P, P), (P, P, P), "agree"),
        ((F, F), (F,), "agree"),
        ((P, P), (F,), "candidate"),
        ((P, P, P), (F, F), "candidate"),
        ((P, F), (F,), "unstable"),
        ((P, P, P), (F, P, F), "unstable"),
        ((P, N), (F,), "candidate"),
        ((P, P, P), (F, F, N), "candidate"),
        ((P, P, N, P), (F, F, N, F), "regression"),
        ((N, P), (F,), "not_applicable"),
        ((P, P), (N, F), "not_applicable"),
        ((), (F,), "not_applicable"),
    ],
)
def test_case_status(target, speculative, status):
    """A regression is one that reruns confirm on both arms; contradictions are never counted."""
    assert quality.case_status(Case("p", target, speculative), 3) == status


@pytest.mark.parametrize(("cases", "runs"), [(1, 3), (12, 5), (171, 7), (643, 8)])
def test_confirming_runs(cases, runs):
    """So many runs per arm that not even one of so many cases is likely to be chance."""
    assert quality.confirming_runs(cases) == runs


def measured(cases, runs=3):
    return quality.measure_quality(cases, stage="replay", route="chat", runs=runs)


def test_confirmed_regressions_are_counted_with_their_mirror():
    """Regressions, improvements, ties and unstable cases are all said."""
    cases = (
        [Case(f"r{i}", (P,) * 3, (F,) * 3, f"id{i}", divergence="tie") for i in range(2)]
        + [Case(f"i{i}", (F,) * 3, (P,) * 3) for i in range(5)]
        + [Case("u", (P, F), (F,))]
        + [Case(f"a{i}", (P, P), (P,)) for i in range(92)]
    )
    found = measured(cases)
    count = found[0]
    assert (count.estimate.value, count.estimate.high, count.estimate.n) == (2, 2, 100)
    assert "2 confirmed regressions in 100 cases (2 at numerical ties)" in count.note
    assert "5 confirmed improvements" in count.note
    assert "1 unstable and not counted" in count.note
    assert count.examples == ("id0", "id1")
    difference = found[1]
    assert difference.metric == "quality_difference"
    assert difference.estimate.value == pytest.approx((3 - 5) / 100)


def test_candidates_stay_open_until_they_are_rerun():
    """A case that was not rerun widens the upper limit and confirms nothing."""
    found = measured([Case("c", (P, P), (F,))] + [Case(f"a{i}", (P, P), (P,)) for i in range(49)])
    assert (found[0].estimate.low, found[0].estimate.high) == (0, 1)
    assert "1 became worse but were not run 3 times" in found[0].note


def test_zero_regressions_are_printed_with_their_bound():
    """0 in 100 cases bounds the true rate by 3 %."""
    found = measured([Case(f"a{i}", (P, P), (P,)) for i in range(100)])
    assert "0 in 100 bounds the true rate by 3.0%" in found[0].note


def test_a_bad_slice_is_named():
    """T15: JSON broken at the reasoning boundary only: 12 regressions, all in one slice."""
    cases = (
        [Case(f"b{i}", (P,) * 3, (F,) * 3, cohort="json with reasoning") for i in range(12)]
        + [Case(f"c{i}", (P, P), (P,), cohort="json with reasoning") for i in range(18)]
        + [Case(f"d{i}", (P, P), (P,), cohort="json without reasoning") for i in range(30)]
    )
    found = {m.cohort: m for m in measured(cases) if m.metric == "quality_regression_cases"}
    assert set(found) == {"", "json with reasoning"}
    assert found["json with reasoning"].estimate.value == 12


def test_no_judged_case_is_no_estimate():
    """Cases that could not be judged are no evidence of quality."""
    assert measured([])[0].estimate is None
    assert measured([Case("n", (N, N), (N,))])[0].estimate is None


@pytest.mark.parametrize(("cases", "runs"), [(1, 3), (3, 3), (4, 4), (12, 4), (48, 5), (200, 6)])
def test_confirming_greedy_runs(cases, runs):
    """At most .05 false regressions are expected were every case unstable: n/4^k."""
    assert quality.confirming_greedy_runs(cases) == runs
    assert runs == 3 or cases * 4.0**-runs <= 0.05 < cases * 4.0 ** -(runs - 1)


def test_flips_of_the_target_stay_in_the_aggregate():
    """The A/A flip set is not counted one by one, and is part of the paired difference."""
    cases = [Case(f"u{i}", (P, F), (F,)) for i in range(7)]
    cases += [Case(f"a{i}", (P, P), (P,)) for i in range(93)]
    count, difference = measured(cases)[:2]
    assert count.estimate.value == 0
    assert "7 unstable and not counted, target-only differs from itself on 7" in count.note
    assert difference.estimate.value == pytest.approx(0.07)
    assert difference.estimate.low > 0.02, "seven first runs of a hundred got worse"
    table = quality.task_quality(cases, 3, control=True)
    assert (table.flipped, table.lost, table.regressions) == (7, 7, 0)
    assert quality.task_quality(cases, 3, control=False).flipped is None


def test_a_small_task_says_that_it_is_small():
    """Under 100 cases the bound of none is printed with them."""
    clean = [Case(f"a{i}", (P, P), (P,)) for i in range(50)]
    assert quality.task_quality(clean, 3, control=True).note == (
        "under 100 cases say little: 0 in 50 bounds the true rate by 5.8%"
    )
    assert quality.task_quality(clean * 2, 3, control=True).note == ""


def test_ties_left_to_the_aggregate_are_still_shown():
    """They leave the count and stay in the note and in the difference."""
    cases = [Case("r", (P,) * 3, (F,) * 3, "id", divergence="tie")]
    cases += [Case(f"a{i}", (P, P), (P,)) for i in range(39)]
    count, difference = quality.measure_quality(
        cases, stage="replay", route="r", runs=3, ties="aggregate_only"
    )[:2]
    assert count.estimate.value == 0
    assert "1 confirmed regressions in 40 cases (1 at numerical ties, which are left" in count.note
    assert difference.estimate.value == pytest.approx(1 / 40)


def test_cases_of_one_document_are_one_cluster():
    """Ten questions to each of ten documents, all lost in one of them: n counts documents."""
    cases = [
        Case(f"p{d}.{q}", (P, P), (F,) if d == 0 else (P,), group=f"doc{d}")
        for d in range(10)
        for q in range(10)
    ]
    found = quality.difference(cases, alpha=0.05)
    alone = quality.difference(
        [Case(c.prompt_id, c.target, c.speculative) for c in cases], alpha=0.05
    )
    assert (found.value, found.n) == (pytest.approx(0.1), 10)
    assert alone.n == 100
    assert found.low < 0.02 < alone.low, "one bad document of ten shows little"


def test_a_slice_that_says_no_more_is_left_out():
    """A feature that every case has, or that holds the same cases as the task, is named once."""
    cases = [
        Case(f"b{i}", (P,) * 3, (F,) * 3, cohort="json", slices=("json_schema", "all"))
        for i in range(3)
    ] + [Case(f"a{i}", (P, P), (P,), cohort="prose", slices=("all",)) for i in range(40)]
    found = [m.cohort for m in measured(cases) if m.metric == "quality_regression_cases"]
    assert found == ["", "json"]
    assert "3 of the regressions are in the slice json (3 cases)" in measured(cases)[0].note


@pytest.mark.parametrize(
    ("lost", "rows", "verdict"), [(6, 20, "inconclusive"), (6, 1, "inconclusive"), (25, 20, "fail")]
)
def test_no_task_of_a_table_fails_by_being_one_of_many(lost, rows, verdict):
    """A row of the packet fails at the rules' level over all rows; 5 % each fails one of 20."""
    cases = [Case(f"l{i}", ("pass",) * 3, ("fail",) * 3) for i in range(lost)]
    cases += [Case(f"c{i}", ("pass",) * 3, ("pass",) * 3) for i in range(120 - lost)]
    at = Temperature(("greedy", "aa"), "temperature 0", 3)
    row = attribution._quality("chat", cases, at, 0.02, 0.01 / rows)
    assert row["verdict"] == verdict
    assert ("but not at the level" in row["why"]) == (
        row["difference"].low > 0.02 and verdict != "fail"
    )
