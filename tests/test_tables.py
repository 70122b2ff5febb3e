"""Table files: each mistake is refused by name, and exact numbers stay exact."""

import json
from pathlib import Path

import pytest

from speccheck.errors import UsageError
from speccheck.tables import load_table

T4_PATH = Path(__file__).parents[1] / "corpora" / "fixture_t4.json"
T4 = load_table(T4_PATH)


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
