"""The fixture stage's evidence: declared tolerances, verdicts, wrong verifiers, traces."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from speccheck.controls import NEGATIVE_CONTROLS
from speccheck.errors import UsageError
from speccheck.fixture import (
    check,
    chi_square,
    format_trace,
    negative_controls,
    reference,
    run_fixture,
    trace,
)
from speccheck.law import DRAFT_SAMPLING, Decoding
from speccheck.tables import load_table
from speccheck.verifier import ALGORITHMS, Token

CORPORA = Path(__file__).parents[1] / "corpora"
T4 = load_table(CORPORA / "fixture_t4.json")
STRESS = load_table(CORPORA / "fixture_block.json")


def chi2_sf(statistic, df):
    return float(chi2.sf(statistic, df))


@pytest.fixture(scope="module")
def result():
    """The packaged fixture as the stage runs it, without the wrong verifiers."""
    return run_fixture(
        T4, algorithm="token", draft_sampling="probabilistic", chi2_sf=chi2_sf, controls=()
    )


# --- a right verifier passes ---


def test_the_packaged_fixture_passes(result):
    """Token verification with p/q drafts: exact equality, every cell, every count."""
    assert (result.verdict, result.reasons) == ("pass", ())
    checks = result.checks
    assert checks.exact.equal
    assert (checks.exact.sequences, checks.exact.total_variation) == (3125, 0)
    assert checks.exact.first_difference is None
    assert len(checks.cells) == 25
    assert max(abs(c.speculative - c.exact) for c in checks.cells) == pytest.approx(
        0.0067, abs=5e-5
    )
    assert [t.df for t in checks.chi_squares] == [4] * 5 + [24] * 4
    assert result.greedy.equal
    assert result.mean["target_passes"] == pytest.approx(40517 / 20000)
    assert sum(result.first_tau) == 20000


def test_declared_tolerances_are_those_of_the_notes(result):
    """0.015 and 0.020 a cell, 0.031 on mean passes, 0.020 on rounds from position 4, 1e-3/9."""
    checks = result.checks
    assert {(c.tolerance_exact, c.tolerance_control) for c in checks.cells} == {(0.015, 0.02)}
    assert {t.level for t in checks.chi_squares} == {1e-3 / 9}
    by_name = {c.name: c for c in checks.counters}
    passes = by_name["mean target passes per run"]
    assert (passes.exact, passes.tolerance) == ("203/100", 0.031)
    start = by_name["first draft stands, of rounds that start at position 4"]
    assert (start.exact, start.tolerance) == ("11/20", 0.02)
    assert by_name["accepted tokens + target passes - tokens, over all runs"].tolerance == 0


def test_the_false_alarm_statement_has_its_numbers(result):
    """7e-5 for the table, 2e-4 for the control, 1e-3 for chi-square, all in one sentence."""
    alarm = result.false_alarm
    assert alarm.cells_exact == pytest.approx(7e-5, abs=5e-6)
    assert alarm.cells_control == pytest.approx(2.1e-4, abs=1e-5)
    assert alarm.chi_square == 1e-3
    statement = alarm.statement(20_000)
    assert statement.startswith("Declared before the first run")
    assert "7e-05" in statement
    assert "0 to 19999" in statement


@pytest.mark.parametrize(
    ("algorithm", "draft_sampling"),
    [
        ("token", "greedy"),
        ("one_hot", "ngram"),
        ("sampler_match", "sampled_one_hot"),
        ("block", "probabilistic"),
        ("greedy", "probabilistic"),
        ("greedy", "greedy"),
        ("target_only", "probabilistic"),
    ],
)
def test_every_algorithm_passes_on_another_table(algorithm, draft_sampling):
    """The block stress table declares no tolerances, so they come from the formula."""
    result = run_fixture(
        STRESS,
        algorithm=algorithm,
        draft_sampling=draft_sampling,
        chi2_sf=chi2_sf,
        n_seeds=5000,
        controls=(),
    )
    assert (result.verdict, result.reasons) == ("pass", ())


def test_tolerances_follow_the_formula_where_none_are_declared():
    """A cell may be z sqrt(p(1-p)/N) off, sqrt(2) times that from the control; z = 4.75 here."""
    result = run_fixture(
        T4,
        algorithm="token",
        draft_sampling="greedy",
        chi2_sf=chi2_sf,
        n_seeds=10_000,
        controls=(),
    )
    cell = result.checks.cells[0]
    assert cell.exact == pytest.approx(0.6)
    assert cell.tolerance_exact == pytest.approx(4.753 * math.sqrt(0.24 / 10_000), rel=1e-3)
    assert cell.tolerance_control == pytest.approx(cell.tolerance_exact * math.sqrt(2))
    alarm = result.false_alarm
    assert alarm.cells_exact + alarm.cells_control == pytest.approx(1e-4, rel=1e-6)


def test_a_greedy_run_has_no_tolerance():
    """At temperature 0 every cell is 0 or 1, exactly."""
    result = run_fixture(
        T4,
        algorithm="greedy",
        draft_sampling="greedy",
        chi2_sf=chi2_sf,
        n_seeds=500,
        controls=(),
    )
    assert result.verdict == "pass"
    assert {c.speculative for c in result.checks.cells} == {0.0, 1.0}
    assert {c.tolerance_exact for c in result.checks.cells} == {0.0}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_table_passes_the_exact_checks(data):
    """Zeros and certainties included: nothing divides by them and nothing is refused."""
    weights = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)

    def row(position):
        p, q = data.draw(weights), data.draw(weights)
        return {
            "position": position,
            "after": "*",
            "target": [f"{w}/{sum(p)}" for w in p],
            "draft": [f"{w}/{sum(q)}" for w in q],
        }

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        content = {"name": "any", "vocabulary": ["a", "b", "c"], "horizon": 3}
        path.write_text(json.dumps(content | {"rows": [row(i) for i in (1, 2, 3)]}))
        table = load_table(path)
    for algorithm in ("token", "block"):
        result = run_fixture(
            table,
            algorithm=algorithm,
            draft_sampling="probabilistic",
            chi2_sf=chi2_sf,
            n_seeds=200,
            trace_seeds=(0, 1),
            controls=(),
        )
        assert result.checks.exact.equal
        assert result.greedy.equal
        json.dumps(result.to_dict(), allow_nan=False)


# --- and a wrong one does not ---


def test_a_wrong_verifier_gives_a_failed_result(monkeypatch):
    """The verdict follows the checks, and each reason carries the number and the limit."""
    wrong = NEGATIVE_CONTROLS[0].verifier
    monkeypatch.setitem(ALGORITHMS, "token", wrong)
    result = run_fixture(
        T4,
        algorithm="token",
        draft_sampling="probabilistic",
        chi2_sf=chi2_sf,
        trace_seeds=(),
        controls=(),
    )
    assert result.verdict == "fail"
    text = " ".join(result.reasons)
    assert "TV 0.1683" in text
    assert "position 3 token X" in text
    assert "limit 0.0150" in text
    assert result.to_dict()["verdict"] == "fail"


def test_an_impossible_token_fails_whatever_its_count():
    """A token of target probability 0 has no tolerance."""
    statistic, _ = chi_square(np.array([10, 1]), np.array([11.0, 0.0]))
    assert statistic == math.inf
    assert chi_square(np.array([11, 0]), np.array([11.0, 0.0])) == (0.0, 0)


def test_rare_cells_are_pooled():
    """Cells that expect fewer than 5 count together, so the chi-square tail holds."""
    statistic, df = chi_square(np.array([90, 4, 4, 2]), np.array([90.0, 3.0, 4.0, 3.0]))
    assert (statistic, df) == (0.0, 1)


def test_controls_are_run_live_on_the_table_that_is_given():
    """On a table that lacks the context, the kept suffix is invisible and says so."""
    flat = load_table(CORPORA / "fixture_block.json")
    rows = {r["name"]: r for r in negative_controls(flat, chi2_sf=chi2_sf, n_seeds=2000)}
    assert rows["suffix kept"]["total_variation"] == 0
    assert "exact law" not in rows["suffix kept"]["caught_by"]
    assert "exact law" in rows["block with token residual"]["caught_by"]


def test_control_and_speculative_runs_are_both_compared():
    """A cell is out of tolerance if either comparison is."""
    right = reference(Decoding(T4, Token()), n_seeds=300)
    checks = check(right.decoding, right, chi2_sf=chi2_sf)
    for cell in checks.cells:
        near_exact = abs(cell.speculative - cell.exact) <= cell.tolerance_exact
        near_control = abs(cell.speculative - cell.target_only) <= cell.tolerance_control
        assert cell.within == (near_exact and near_control)


# --- what is handed on ---


def test_the_result_is_json(result):
    """Strict JSON, with the exact numbers as fractions beside their floats."""
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["verdict"] == "pass"
    assert data["marginals"][3] == ["33/100", "7/50", "9/100", "4/25", "7/25"]
    assert data["per_run"]["target_passes"]["exact"] == "203/100"
    assert data["acceptance_rate"] == {"exact": "297/500", "expected": 0.594}
    assert data["tokens_per_pass"]["expected"] == pytest.approx(2.463, abs=5e-4)
    assert [r["exact"] for r in data["first_round"]] == [
        "1/10",
        "27/200",
        "153/500",
        "153/1000",
        "153/500",
    ]
    assert data["table"]["rows"][3] == {
        "position": 4,
        "after": "C",
        "target": [0.05, 0.1, 0.05, 0.6, 0.2],
        "draft": [0.1, 0.1, 0.1, 0.55, 0.15],
        "overlap": pytest.approx(0.9),
    }
    assert len(data["traces"]) == 3


def test_nothing_drafted_has_no_acceptance_rate():
    """Target-only: a rate of 0 out of 0 is not a rate."""
    result = run_fixture(
        STRESS,
        algorithm="target_only",
        draft_sampling="probabilistic",
        chi2_sf=chi2_sf,
        n_seeds=300,
        controls=(),
    )
    assert result.to_dict()["acceptance_rate"] is None


def test_unknown_names_are_usage_errors():
    """An algorithm, a way of drafting or a number of seeds that does not exist."""
    right = {"algorithm": "token", "draft_sampling": "greedy", "chi2_sf": chi2_sf}
    for change, message in (
        ({"algorithm": "medusa"}, "unknown algorithm 'medusa'"),
        ({"draft_sampling": "argmax"}, "unknown draft sampling 'argmax'"),
        ({"n_seeds": 0}, "at least one seed"),
    ):
        with pytest.raises(UsageError, match=message):
            run_fixture(T4, **(right | change))


def test_the_same_table_gives_the_same_result(result):
    """Seeds are enumerated, so a second run is the first."""
    again = run_fixture(
        T4, algorithm="token", draft_sampling="probabilistic", chi2_sf=chi2_sf, controls=()
    )
    assert again.to_dict() == result.to_dict()


GOLDEN_TRACE = """\
Seed 18 on table T4: token verification, probabilistic drafts

Round 1, after (empty): drafted A B C D
   1 A      p 0.600  q 0.500  accept if u < 1.0000  u 0.6764  accepted
   2 B      p 0.450  q 0.600  accept if u < 0.7500  u 0.3586  accepted
   3 C      p 0.200  q 0.500  accept if u < 0.4000  u 0.8850  rejected
     C is rejected; corrected distribution A 0.250  X 0.750
   3 X      drawn from it with u 0.8828
   4 D      discarded untested: drafted after C, which was rejected
     committed A B X

Round 2, after A B X: drafted D
   4 D      p 0.050  q 0.300  accept if u < 0.1667  u 0.7247  rejected
     D is rejected; corrected distribution A 0.444  B 0.111  X 0.444
   4 X      drawn from it with u 0.6983
     committed X

Round 3, after A B X X: drafted nothing
   5 C      no draft; target token with u 0.4643
     committed C

Run: A B X X C
     5 tokens in 3 target passes: 2 accepted of 5 drafted, 1 discarded"""


def test_the_trace_reads_as_it_should():
    """Seed 18: A B C D drafted, A and B stand, C becomes X, D is never tested."""
    record = trace(T4, 18, algorithm="token", draft_sampling="probabilistic")
    assert format_trace(record) == GOLDEN_TRACE
    assert record["tokens"] == ["A", "B", "X", "X", "C"]
    assert record["counters"]["discarded"] == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_traces_fit_the_terminal(algorithm):
    """80 columns, whatever the algorithm and the way of drafting, and JSON."""
    for draft_sampling in DRAFT_SAMPLING:
        for seed in range(25):
            record = trace(T4, seed, algorithm=algorithm, draft_sampling=draft_sampling)
            json.dumps(record, allow_nan=False)
            assert max(len(line) for line in format_trace(record).splitlines()) <= 80
