"""The fixture stage's evidence: strict tables, declared tolerances, verdicts, what it refuses."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from speccheck.errors import UsageError
from speccheck.fixture import (
    NEGATIVE_CONTROLS,
    _chi_square,
    check,
    check_coverage,
    format_trace,
    load_table,
    negative_controls,
    reference,
    run_fixture,
    trace,
)
from speccheck.law import DRAFT_SAMPLING, Decoding
from speccheck.verifier import ALGORITHMS, Token

CORPORA = Path(__file__).parents[1] / "corpora"
T4_PATH = CORPORA / "fixture_t4.json"
T4 = load_table(T4_PATH)
STRESS = load_table(CORPORA / "fixture_block.json")


def chi2_sf(statistic, df):
    return float(chi2.sf(statistic, df))


@pytest.fixture(scope="module")
def result():
    """The packaged fixture as the stage runs it, without the wrong verifiers."""
    return run_fixture(
        T4, algorithm="token", draft_sampling="probabilistic", chi2_sf=chi2_sf, controls=()
    )


# --- table files ---


def written(tmp_path, change):
    """A copy of T4's file with one change made to its data."""
    data = json.loads(T4_PATH.read_text())
    change(data)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    return path


def set_row(number, key, value):
    """A change of one entry of one row (counted from 1, as messages do)."""

    def change(data):
        data["rows"][number - 1][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_row(2, "target", [10, 45, 15, 5, 24]), "row 2 .position 2 after '.'.: target sums to"),
        (set_row(2, "draft", [10, 60, 10, 5, 16]), "row 2 .*draft sums to 1.01"),
        (set_row(3, "target", [0.2, 0.05, 0.2, 0.1, 0.45]), "not an exact probability"),
        (set_row(3, "target", ["0.2", "x", "0.2", "0.1", "0.45"]), "row 3.*token B: 'x' is not"),
        (set_row(3, "target", ["nan", 5, 20, 10, 45]), "row 3.*token A: 'nan' is not a number"),
        (set_row(3, "target", ["1/0", 5, 20, 10, 45]), "row 3.*'1/0' is not a number"),
        (set_row(3, "target", ["inf", 5, 20, 10, 45]), "row 3.*'inf' is not a number"),
        (set_row(3, "target", [-10, 35, 20, 10, 45]), "row 3.*token A: -10 is negative"),
        (set_row(3, "target", ["-0.1", 35, 20, 10, 45]), "row 3.*is negative"),
        (set_row(3, "target", [True, 24, 20, 10, 45]), "row 3.*True is neither"),
        (set_row(3, "target", [None, 25, 20, 10, 45]), "row 3.*None is neither"),
        (set_row(3, "target", [50, 50]), "row 3.*must list 5 numbers.*found 2"),
        (set_row(3, "target", "even"), "row 3.*must list 5 numbers.*found 'even'"),
        (set_row(4, "after", "Z"), "row 4: unknown token 'Z'"),
        (set_row(4, "after", 2), "row 4: unknown token 2"),
        (set_row(4, "after", ["C"]), r"row 4: unknown token \['C'\]"),
        (set_row(4, "after", "*"), "row 5: position 4 after '.' is given twice"),
        (set_row(1, "after", "A"), "row 1: position 1 has no token before it"),
        (set_row(1, "position", 0), "row 1: position must be a whole number from 1 to 5"),
        (set_row(1, "position", 6), "row 1: position must be"),
        (set_row(1, "position", "1"), "row 1: position must be"),
        (lambda d: d["rows"][0].update(position=True), "row 1: position must be"),
        (set_row(1, "targets", []), "row 1: unknown key 'targets'"),
        (lambda d: d["rows"].pop(), "position 5 has no row after"),
        (lambda d: d["rows"].pop(0), "position 1 has no row after"),
        (lambda d: d["rows"].pop(4), "position 4 has no row after"),
        (lambda d: d["rows"][0].pop("draft"), "row 1: key 'draft' is missing"),
        (lambda d: d["rows"].append(7), "row 7: a row is an object"),
        (lambda d: d.update(rows={}), "rows must be a list"),
        (lambda d: d.pop("horizon"), "key 'horizon' is missing"),
        (lambda d: d.update(horizons=5), "unknown key 'horizons'"),
        (lambda d: d.update(horizon=1), "horizon must be a whole number from 2 to 15"),
        (lambda d: d.update(horizon=16), "horizon must be"),
        (lambda d: d.update(horizon=9), "100000000 cases"),
        (lambda d: d.update(horizon=6), "100000 cases, more than the 50000"),
        (lambda d: d.update(name=""), "name must be a printable text"),
        (lambda d: d.update(name="T\x1b[2J"), "name must be a printable text"),
        (lambda d: d.update(vocabulary=["A", "B", "C", "D", "\x1b"]), "vocabulary must list"),
        (lambda d: d.update(vocabulary=["A", "B", "C", "D", ""]), "vocabulary must list"),
        (set_row(3, "target", ["1e999999999", 5, 20, 10, 45]), "'1e999999999' is not a number"),
        (set_row(3, "target", ["1_0", 5, 20, 10, 45]), "'1_0' is not a number"),
        (lambda d: d.update(vocabulary=["A"]), "vocabulary must list two or more"),
        (lambda d: d.update(vocabulary=["A", "B", "C", "D", "A"]), "vocabulary must list"),
        (lambda d: d.update(vocabulary=["A", "B", "C", "D", "*"]), "vocabulary must list"),
        (lambda d: d.update(vocabulary="ABCDX"), "vocabulary must list"),
        (lambda d: d.update(tolerances=3), "tolerances must be an object"),
        (lambda d: d["tolerances"].update(run=1), "tolerances: unknown key 'run'"),
        (lambda d: d["tolerances"].update(runs=0), "runs must be a positive whole number"),
        (lambda d: d["tolerances"].update(exact="wide"), "tolerances: exact: 'wide' is not"),
    ],
)
def test_a_table_with_a_mistake_is_refused_by_name(tmp_path, change, message):
    """Each mistake is one line that names the file and, where there is one, the row."""
    path = written(tmp_path, change)
    with pytest.raises(UsageError, match=message) as raised:
        load_table(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a fixture table is an object"),
        ('{"name": "a", "name": "b"}', "key 'name' is given twice"),
        ('{"horizon": ' + "9" * 5000 + "}", "not JSON"),
        ('{"horizon": NaN}', "NaN is not an exact probability"),
        ('{"horizon": -Infinity}', "-Infinity is not an exact probability"),
        ('{"horizon": 1e999}', "1e999 is not an exact probability"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, message):
    """Not JSON, not an object, a key twice, a number that is not exact."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        load_table(path)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    """A missing file, a folder and bytes that are no text."""
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(UsageError, match="cannot read the fixture table"):
            load_table(path)


def test_integers_decimals_and_fractions_say_the_same(tmp_path):
    """30 per 100 is "0.3" is "3/10", exactly."""
    path = written(tmp_path, set_row(6, "target", ["1/4", "0.1", 20, "3/20", "0.30"]))
    assert load_table(path).target[5, None].tolist() == T4.target[5, None].tolist()


def test_every_previous_token_may_have_its_own_row(tmp_path):
    """A row after '*' is only needed where some previous token has none."""

    def spread(data):
        data["rows"] = [r for r in data["rows"] if (r["position"], r["after"]) != (4, "*")]
        other = {"target": [40, 15, 10, 5, 30], "draft": [20, 10, 30, 30, 10]}
        data["rows"] += [{"position": 4, "after": t, **other} for t in ("A", "B", "D", "X")]

    table = load_table(written(tmp_path, spread))
    assert all(
        table.target_row(4, token).tolist() == T4.target_row(4, token).tolist()
        for token in range(5)
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
    statistic, _ = _chi_square(np.array([10, 1]), np.array([11.0, 0.0]))
    assert statistic == math.inf
    assert _chi_square(np.array([11, 0]), np.array([11.0, 0.0])) == (0.0, 0)


def test_rare_cells_are_pooled():
    """Cells that expect fewer than 5 count together, so the chi-square tail holds."""
    statistic, df = _chi_square(np.array([90, 4, 4, 2]), np.array([90.0, 3.0, 4.0, 3.0]))
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


# --- what the fixture does not cover ---


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        {"method": "eagle3", "model": "m", "draft_sample_method": "greedy"},
        {"method": "draft_model", "model": "m", "draft_sample_method": "probabilistic"},
        {"method": "deepseek_mtp", "rejection_sample_method": "standard"},
        {"method": "draft_model", "rejection_sample_method": "block"},
        {"method": "suffix", "rejection-sample-method": "standard", "lenience": 1},
        {"algorithm": "sampler_match", "method": "draft_model"},
        {"synthetic_acceptance_rates": None, "enable_adaptive_verification": False},
    ],
)
def test_covered_configs_have_no_reason_to_refuse(config):
    """What vLLM and the embedded engine run by default is covered."""
    assert check_coverage(config) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rejection_sample_method": "synthetic"}, "'synthetic' accepts at a fixed rate"),
        ({"rejection-sample-method": "synthetic"}, "lossy, refused"),
        ({"rejection_sample_method": "fly"}, "intentionally lossy"),
        ({"rejection_sample_method": "new"}, "'new' is not covered; the fixture covers token"),
        ({"acceptance_method": "typical_acceptance_sampler"}, "by the target's entropy"),
        ({"algorithm": "medusa"}, "'medusa' is not covered"),
        ({"algorithm": ["token"]}, "is not covered"),
        ({"synthetic_acceptance_rates": [0.9]}, "fixes the acceptance rates: lossy"),
        ({"synthetic_acceptance_length": 3.0}, "fixes the acceptance length: lossy"),
        ({"posterior_threshold": 0.09}, "typical acceptance: lossy"),
        ({"posterior_alpha": 0.3}, "typical acceptance: lossy"),
        ({"lenience": 0.8}, "lenience 0.8 accepts"),
        ({"enable_adaptive_verification": True}, "cuts blocks by what was drawn"),
        ({"draft_sample_method": "beam"}, "'beam' is not covered"),
        ({"method": "custom_class"}, "'custom_class' is not covered"),
        ({"method": "dspark"}, "'dspark' is not covered"),
        ({"speculative_token_tree": "[(0,), (1,)]"}, "covers single chains"),
    ],
)
def test_lossy_and_unknown_configs_are_refused(config, message):
    """A reason names the setting and says why; unknown is refused, never passed by default."""
    reasons = check_coverage(config)
    assert len(reasons) == 1
    assert message in reasons[0]


def test_every_reason_is_given():
    """Two wrong settings, two reasons."""
    assert len(check_coverage({"rejection_sample_method": "fly", "lenience": 0.5})) == 2
