"""Faults of form on either arm, held against chance, and changes held against the A/A control."""

from __future__ import annotations

import dataclasses
import math

import pytest
from scipy.stats import binomtest

from speccheck import drift
from speccheck.drift import Look, Looked
from speccheck.grading import see

FINE = Look(
    see("The order is on its way to you, and it should be there by the end of the week."),
    "stop",
    tokens=8,
)
REFUSES = dataclasses.replace(FINE, seen=see("I'm sorry, but I can't help with that."))
CUT = dataclasses.replace(FINE, finish_reason="length", tokens=100)


def looks(fault: str) -> Look:
    """An answer with one fault."""
    return {
        "cut at the token limit": CUT,
        "wrong ending": dataclasses.replace(FINE, problems=("no finish reason",)),
        "malformed JSON": dataclasses.replace(FINE, well_formed=False),
        "empty": dataclasses.replace(FINE, seen=see(" ")),
        "repeats itself": dataclasses.replace(FINE, seen=see("round and round we go " * 20)),
        "refuses": REFUSES,
        "other language": dataclasses.replace(
            FINE,
            seen=see("Die Bestellung ist auf dem Weg und wird bis zum Ende der Woche da sein."),
        ),
    }[fault]


def pairs(*sides: tuple[Look, Look, int], **fields) -> list[Looked]:
    """(target, speculative, how many) each."""
    found = [(target, spec) for target, spec, n in sides for _ in range(n)]
    return [
        Looked(f"p{i}", target, spec, receipt_id=f"r{i}", language="en", **fields)
        for i, (target, spec) in enumerate(found)
    ]


@pytest.mark.parametrize("fault", drift.FAULTS)
def test_each_fault_is_counted_on_its_arm(fault):
    """2 of 10 on target-only, one of them on both arms, 4 on the other."""
    bad = looks(fault)
    sides = [(bad, bad, 1), (bad, FINE, 1), (FINE, bad, 3), (FINE, FINE, 5)]
    asked = {None: True, False: False}
    told = [
        (*(dataclasses.replace(look, well_formed=asked[look.well_formed]) for look in pair), n)
        for *pair, n in sides
    ]
    found = drift.count_fault(pairs(*told), fault)
    assert (found.target, found.speculative) == (2, 4)
    assert (found.only_speculative, found.only_target) == (3, 1)
    assert found.mcnemar_p == pytest.approx(binomtest(3, 4, alternative="greater").pvalue)
    assert drift.count_fault(pairs(*told), drift.ANY).speculative == 4


def test_what_cannot_be_told_is_no_pair():
    """A short answer has no language and a request without a finish reason no ending."""
    short = dataclasses.replace(FINE, seen=see("Ja."), finish_reason=None)
    assert drift.count_fault(pairs((FINE, short, 5)), "other language").n == 0
    assert drift.count_fault(pairs((FINE, short, 5)), "cut at the token limit").n == 0
    assert drift.count_fault(pairs((FINE, FINE, 5)), "malformed JSON").n == 0


def test_what_is_known_of_one_arm_only_is_no_fault_of_it():
    """A finish reason that only the speculative arm's server gives makes its answers no worse."""
    silent = dataclasses.replace(FINE, finish_reason=None)
    found = drift.count_fault(pairs((silent, CUT, 12), (FINE, FINE, 8)), drift.ANY)
    assert (found.only_speculative, found.only_target) == (0, 0)


def test_a_fault_that_differs_is_named_with_its_slice():
    """Faults and slices in which the arms do not differ are not named."""
    made = pairs((FINE, CUT, 10), (FINE, FINE, 10), slices=("penalty",)) + [
        dataclasses.replace(p, prompt_id=f"q{p.prompt_id}")
        for p in pairs((FINE, FINE, 19), (CUT, FINE, 1), slices=("plain",))
    ]
    found = {m.cohort: m for m in drift.measure_drift(made, stage="replay", route="r")}
    cut = "cut at the token limit"
    assert set(found) == {"", cut, f"{cut}, penalty", f"{cut}, plain"}
    worst = found["cut at the token limit, penalty"]
    assert (worst.estimate.value, worst.share) == (0.5, 0.5)
    assert worst.note == (
        "cut at the token limit: 10 of 20 answers, target-only 0 (exact McNemar p 0.00098)"
    )
    assert worst.examples == ("r0", "r1", "r2", "r3", "r4")
    assert worst.fail_estimates[-1].alpha < worst.estimate.alpha


def test_refusing_less_is_told_as_refusing_more_is():
    """For prompts that ought to be refused, an answer is the fault."""
    found = drift.measure_drift(pairs((REFUSES, FINE, 9), (FINE, FINE, 21)), stage="s", route="r")
    assert [m.cohort for m in found] == ["", "refuses", "no longer refuses"]
    assert [m.estimate.value for m in found] == pytest.approx([-9 / 30, -9 / 30, 9 / 30])


def test_faults_that_became_rarer_take_part_in_the_correction():
    """Under no difference half of the faults grow by chance: all that differ are tests."""
    many = pairs((FINE, CUT, 3), (CUT, FINE, 3), (REFUSES, FINE, 4), (FINE, REFUSES, 2))
    named = [m.cohort for m in drift.measure_drift(many, stage="s", route="r")]
    assert named == ["", "cut at the token limit", "refuses", "no longer refuses"]


def test_one_prompt_at_two_temperatures_is_one_cluster():
    """N counts prompts, not pairs."""
    both = [*pairs((FINE, CUT, 6), (FINE, FINE, 34)), *pairs((FINE, CUT, 6), (FINE, FINE, 34))]
    assert drift.count_fault(both, "cut at the token limit").difference.n == 40


def test_nothing_to_compare_is_no_estimate():
    """No pair of complete answers measures nothing."""
    (found,) = drift.measure_drift([], stage="replay", route="r")
    assert found.estimate is None


def test_changes_are_held_against_the_control():
    """3 of 10 structures differ between the arms, 1 of 10 in the A/A control."""
    listed = dataclasses.replace(FINE, seen=see("- one\n- two"))
    made = [
        dataclasses.replace(p, control=listed if i == 0 else FINE)
        for i, p in enumerate(pairs((FINE, listed, 3), (FINE, FINE, 7)))
    ]
    found = {c.what: c for c in drift.changes(made)}
    structure = found["structure"]
    assert (structure.changed, structure.n) == (3, 10)
    assert (structure.control_changed, structure.control_n) == (1, 10)
    assert structure.p_value == pytest.approx(binomtest(3, 4, 0.5, alternative="greater").pvalue)
    assert found["refusal"].changed == 0
    alone = {c.what: c for c in drift.changes(pairs((FINE, listed, 3)))}
    assert math.isnan(alone["structure"].p_value)


def test_the_ratio_of_lengths():
    """Answers that are three times as long throughout show as 3; unknown lengths are left out."""
    longer = dataclasses.replace(FINE, tokens=24)
    unknown = dataclasses.replace(FINE, tokens=None)
    found = drift.length_ratio(pairs((FINE, longer, 10), (FINE, unknown, 3)))
    assert (found.value, found.n) == (pytest.approx(3.0), 10)
    assert not drift.length_ratio([]).is_known
