"""Answers that set out to break their graders, or that two readers would read differently."""

from __future__ import annotations

import pytest

from speccheck.grading import form_of, grade, queries
from speccheck.grading.grade import unfenced
from speccheck.grading.judge import verdict_in

SETUP = "CREATE TABLE t (a BIGINT, b VARCHAR); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (2, 'z');"


def sql(gold: str, query: str) -> tuple[str, str]:
    found = grade({"kind": "sql", "setup": SETUP, "gold": gold}, query)
    return found.outcome, found.reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n": 2, "n": 2}', "field 'n' comes twice"),
        ('{"n": {"m": 1, "k": 2, "m": 1}}', "field 'm' comes twice"),
        ('{"n": NaN}', "NaN is not JSON"),
        ('{"n": 1e999}', "beyond what a number holds: 1e999"),
        ('{"n": 1' + "0" * 400 + "}", "beyond what a number holds"),
        ('{"n": 1' + "0" * 5000 + "}", "beyond what a number holds"),
        ('{"n": -Infinity}', "-Infinity is not JSON"),
        ('{"n": 2} {"n": 2}', "Extra data"),
        ('{"n": 2}\x00', "Extra data"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_json_that_parsers_read_differently(kind, text, why):
    """A name twice, NaN and numbers beyond a float are faults of form, and no exception."""
    schema = {"type": "object", "properties": {"n": {"multipleOf": 0.5}}}
    check = {"kind": kind, "expect": {"n": 2}} | ({"schema": schema} if "schema" in kind else {})
    for one in (check, form_of(check)):
        found = grade(one, text)
        assert found.outcome == "fail"
        assert why in found.reason.replace('\\"', '"').replace("\\'", "'")
    assert grade(check, ' {"n": 2.0}\n').outcome == "pass"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```\n", "x = 1"),
        ("Here: ```python\nx = 1\n``` done", "x = 1\n``` done"),
        ('```python title="a.py"\nx = 1\n```', "x = 1"),
        ("``` {.c#}\r\nx = 1\r\n```\r\nand more", "x = 1"),
        ("~~~sql\nSELECT 1\n~~~", "SELECT 1"),
        ("````md\n```python\nx\n```\n````", "```python\nx\n```"),
        ('```python\ns = """\n```json\n{}\n"""\n```\nend', 's = """\n```json\n{}\n"""'),
        ("1. first\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1"),
        ("```\n```", ""),
        ("```python\nx = 1", "x = 1"),
        ("no fence", "no fence"),
        ("a ``` b", "a ``` b"),
    ],
)
def test_the_block_of_an_answer(text, code):
    """The first fenced block as CommonMark has it: longer fences, words, tildes, lists, CRLF."""
    assert unfenced(text) == code


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT content FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "COPY t TO '/tmp/breaker-stolen.csv'",
        "ATTACH '/tmp/breaker-stolen.db'",
        "EXPORT DATABASE '/tmp/breaker-stolen'",
        "SET enable_external_access = true",
        "SELECT a FROM t; COPY t TO '/tmp/breaker-stolen.csv'",
        "INSTALL httpfs",
        "SELECT getenv('HOME')",
        "SELECT " + "(" * 3000 + "1" + ")" * 3000,
        "SELECT " + "NOT " * 50_000 + "true",
        "SELECT repeat('a', 4000000000)",
        "SELECT \ud800",
        "",
    ],
)
def test_sql_that_reaches_out(query):
    """Files, settings and other statements: a fail with its reason, and the next query is well."""
    outcome, reason = sql("SELECT a FROM t", query)
    assert outcome == "fail"
    assert reason
    assert sql("SELECT a FROM t", "SELECT a FROM t -- all")[0] == "pass"


def test_sql_that_takes_no_interrupt(monkeypatch):
    """One call that runs for minutes is ended with its process, and the next query is well."""
    monkeypatch.setattr(queries, "TIME_LIMIT_S", 0.25)
    endless = "SELECT levenshtein(repeat('a', 900000), repeat('b', 900000)) AS d"
    assert queries._rows("", endless) == ((), "the query ran over 0.25 s")
    monkeypatch.undo()
    assert queries._rows("", "SELECT 41 + 1 AS d") == ((("42",),), "")


def test_sql_whose_process_dies():
    """A crash of the database is a fail of that answer, not of the replay."""
    assert queries._rows("", "SELECT 1 AS first") == ((("1",),), "")
    queries._PROCESS._running.kill()
    queries._PROCESS._running.wait()
    assert queries._rows("", "SELECT 1 AS second") == ((("1",),), "")


@pytest.mark.parametrize(
    ("gold", "query", "expected"),
    [
        (
            "SELECT b, rank() OVER (ORDER BY a) FROM t",
            "SELECT b, 1 + (a - 1) FROM t ORDER BY b DESC",
            "pass",
        ),
        ("SELECT b FROM (SELECT * FROM t ORDER BY a)", "SELECT b FROM t ORDER BY b DESC", "pass"),
        ("SELECT b, 'order by' FROM t", "SELECT b, 'order by' FROM t ORDER BY b DESC", "pass"),
        ("SELECT b FROM t -- order by b", "SELECT b FROM t ORDER BY b DESC", "pass"),
        ("SELECT b FROM t ORDER BY (b)", "SELECT b FROM t ORDER BY b DESC", "fail"),
        ("SELECT 1234567890123", "SELECT 1234567890124", "fail"),
        ("SELECT 1234567890123", "SELECT 1234567890123.0", "pass"),
        (
            "SELECT 170141183460469231731687303715884105727",
            "SELECT 170141183460469231731687303715884105726",
            "fail",
        ),
        ("SELECT 0.1 + 0.2", "SELECT 0.3::DOUBLE", "pass"),
        ("SELECT sum(a) / 2 FROM t", "SELECT 2.5", "pass"),
        ("SELECT 'nan'::DOUBLE", "SELECT 'nan'::DOUBLE", "pass"),
        ("SELECT 'inf'::DOUBLE", "SELECT 1e308", "fail"),
        ("SELECT true", "SELECT 1", "fail"),
    ],
)
def test_sql_that_is_right_or_nearly(gold, query, expected):
    """Rows are compared in order only where the gold query itself orders, numbers to the digit."""
    assert sql(gold, query)[0] == expected


SOURCES = {"K1": "The pump runs at 40 Hz in winter.", "K10": "The pump runs at 40 Hz, as a rule."}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It runs [K1, K10].", "pass"),
        ("It runs [K1; K10].", "pass"),
        ("It runs [K10][K1].", "pass"),
        ("It runs [K1, K2].", "fail"),
        ("It runs [K10].", "fail"),  # K1 must be cited, and K10 is another source
        ("It runs [K1], see [the manual](http://x).", "pass"),
        ('"runs at 40 Hz in winter" [K10], [K1].', "fail"),
        ('"The pump runs at 40 Hz" [K10, K1].', "pass"),
        ('"The pump runs at 40 Hz" [K1] and "40 Hz, as a rule" [K10].', "pass"),
        ('"The pump runs at 50 Hz" [K1].', "fail"),
    ],
)
def test_citations_of_sources_that_overlap(text, expected):
    """A name that begins another, the same words in both, several sources in one mark, links."""
    check = {"kind": "citations", "sources": SOURCES, "must_cite": ["K1"]}
    assert grade(check, text).outcome == expected


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"winner": "1", "why": "answer 2 uses {} where {x: 1} is meant"}', "1"),
        ('I weighed both.\n{"winner": 2, "why": "a \\"quoted\\" {brace"}', "2"),
        ('{"winner": "1"} on reflection {"winner": "tie"}', "tie"),
        ('{"scores": {"winner": "1"}, "winner": "2"}', "2"),
        ("The winner is answer 2, clearly.", None),
        ("Both {are} fine", None),
        ('{"winner": "1" or "2" or "tie"}', None),
        ('{"winner": null}', None),
        ("{" * 5000, None),
        ("", None),
        ("Tie.", "tie"),
    ],
)
def test_a_judge_that_writes_more_than_it_should(reply, verdict):
    """Braces in its reasons are no other verdict, and prose is none."""
    assert verdict_in(reply) == verdict
