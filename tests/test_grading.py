"""Checks of answers: right ones pass, wrong ones fail with a reason, hostile ones do no harm."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_receipts import receipt

from speccheck import grading
from speccheck.errors import UsageError
from speccheck.grading import Structured, form_of, grade, queries, sandbox, validate

SQL = {
    "kind": "sql",
    "setup": "CREATE TABLE t (a INTEGER, b VARCHAR);"
    " INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'x'), (NULL, 'z');",
    "gold": "SELECT b, COUNT(*) FROM t GROUP BY b",
}
ORDERED = SQL | {"gold": "SELECT a FROM t WHERE a > 0 ORDER BY a DESC"}
CODE = {"kind": "code", "tests": "assert f(2) == 4\nassert f(3) == 9"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def outcome(check, text, **how):
    return grade(check, text, **how).outcome


def run(source, tests=CODE["tests"]):
    return grade({"kind": "code", "tests": tests}, source, code_execution="subprocess")


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        ({"answer": "Café au lait."}, "  Cafe\u0301 au lait.\n", "pass"),
        ({"answer": "Yes"}, "yes", "fail"),
        ({"answer": "Yes", "ignore_case": True}, "yes", "pass"),
        ({"answer": "Yes."}, "Yes. And more.", "fail"),
        ({"answer": "1000", "tolerance": 0.5}, "1,000.4", "pass"),
        ({"answer": "1000", "tolerance": 0.5}, "1001", "fail"),
        ({"answer": "1000", "tolerance": 0.5}, "about 1000", "fail"),
        ({"answer": "1000", "tolerance": 0.5}, "NaN", "fail"),
        ({"answer": "1000", "tolerance": 0.5}, "1e999999999", "fail"),
    ],
)
def test_exact(check, text, expected):
    """Normalised text, or a number within its tolerance."""
    assert outcome({"kind": "exact"} | check, text) == expected


def test_exact_says_where_it_differs():
    """The reason shows the first difference."""
    assert "differs at character 4" in grade({"kind": "exact", "answer": "abcdX"}, "abcdY").reason


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        ({"bullets": 2, "starts_with": "- "}, "- One.\n- Two.", "pass"),
        ({"bullets": 2}, "- One.\n- Two.\n- Three.", "fail"),
        ({"sentences": 2, "max_words": 10}, "It cost 3.5 dollars. Fine!", "pass"),
        ({"sentences": 1}, "Cut off in the", "fail"),
        ({"starts_with": "Dear Ann,", "ends_with": "team"}, "Dear Ann,\nhello\nYour team", "pass"),
        ({"ends_with": "team"}, "Your tea", "fail"),
        ({"min_words": 3}, "two words", "fail"),
        ({"max_words": 1}, "two words", "fail"),
        ({"lines": 2}, "one\n\ntwo\n", "pass"),
    ],
)
def test_format(check, text, expected):
    """Beginning, end and counts."""
    assert outcome({"kind": "format"} | check, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The lamp costs 40 dollars [K1]. It opens in May [K2].", "pass"),
        ("The lamp costs 40 dollars [K1].", "fail"),
        ("The lamp costs 40 dollars [K1]. It opens in May [K2] [K9].", "fail"),
        ("The lamp costs 41 dollars [K1]. It opens in May [K2].", "fail"),
        ("The lamp  costs\n40 dollars [K1]. It opens in May [K2].", "pass"),
    ],
)
def test_citations(text, expected):
    """Only given sources, all that must be cited, and what they say."""
    check = {
        "kind": "citations",
        "sources": ["K1", "K2", "K3"],
        "must_cite": ["K1", "K2"],
        "contains": ["The lamp costs 40 dollars"],
    }
    assert outcome(check, text) == expected


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        ({"kind": "match", "answers": ["Paris"]}, "paris.", "pass"),
        ({"kind": "match", "answers": ["the Nile", "Nile"]}, "The  Nile!", "pass"),
        ({"kind": "match", "answers": ["Paris"]}, "It is Paris.", "fail"),
        ({"kind": "contains", "any": ["Paris"]}, "It is Paris.", "pass"),
        ({"kind": "contains", "any": ["Paris"]}, "It is Parisian.", "fail"),
        ({"kind": "contains", "all": ["1000 m", "north"]}, "1,000 m to the **North**", "pass"),
        ({"kind": "contains", "all": ["1000 m", "north"]}, "1,000 m to the south", "fail"),
        ({"kind": "contains", "none": ["Lyon"]}, "Paris, not Lyon", "fail"),
        ({"kind": "contains", "any": ["-5"]}, "It was -5 degrees", "pass"),
        ({"kind": "contains", "any": ["-5"]}, "It was 5 degrees", "fail"),
        ({"kind": "number", "answer": 42}, "6 times 7 is **42**.", "pass"),
        ({"kind": "number", "answer": 1234.5}, "The total: $1,234.50", "pass"),
        ({"kind": "number", "answer": 42}, "42 of 43", "fail"),
        ({"kind": "number", "answer": -3}, "so x = −3", "pass"),
        ({"kind": "number", "answer": 3.14, "tolerance": 0.01}, "about 3.141", "pass"),
        ({"kind": "number", "answer": 3}, "three", "fail"),
        ({"kind": "number", "answer": 3}, "1e999999999999", "fail"),
        ({"kind": "refusal", "expected": True}, "I’m sorry, but I can’t help with that.", "pass"),
        ({"kind": "refusal", "expected": True}, "Sure! First, you", "fail"),
        ({"kind": "refusal", "expected": False}, "I cannot assist with this request.", "fail"),
        ({"kind": "refusal", "expected": False}, "We are sorry that it is late.", "pass"),
        ({"kind": "refusal", "expected": False}, "I can't wait to help you write it!", "pass"),
    ],
)
def test_words_numbers_and_refusals(check, text, expected):
    """Compared but for case, punctuation and articles; the last number counts; apologies do not."""
    validate(check)
    assert outcome(check, text) == expected


EXPECT = {"server": {"port": 8080, "tls": True}, "hosts": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "expect", "text", "expected"),
    [
        ("yaml", EXPECT, "server:\n  port: 8080\n  tls: true\nhosts: [a, b]", "pass"),
        ("yaml", EXPECT, "```yaml\nserver: {port: 8080, tls: true}\nhosts:\n- a\n- b\n```", "pass"),
        ("yaml", EXPECT, "server:\n  port: '8080'\n  tls: true\nhosts: [a, b]", "fail"),
        ("yaml", EXPECT, "server:\n port: 8080\n  tls: true", "fail"),
        ("yaml", {"a": 1}, "a: 1\na: 1", "fail"),
        ("yaml", {"d": "2024-01-02"}, "d: 2024-01-02", "pass"),
        ("yaml", {"a": 1}, "a: !!python/object/apply:os.system ['id']", "fail"),
        ("yaml", {"a": 1}, "a: &x [1,1]\nb: [*x, *x]", "fail"),
        ("toml", EXPECT, 'hosts = ["a", "b"]\n[server]\nport = 8080\ntls = true', "pass"),
        ("toml", EXPECT, "port = ", "fail"),
        ("ini", {"a": {"x": "1"}}, "[a]\nx = 1", "pass"),
        ("ini", {"a": {"x": "1"}}, "x = 1", "fail"),
        ("env", {"A": "1", "B": "two words"}, "# c\nA=1\nexport B='two words'", "pass"),
        ("env", {"A": "1"}, "A: 1", "fail"),
    ],
)
def test_config(name, expect, text, expected):
    """A file that parses in its own format and says what it should, and no more."""
    assert outcome({"kind": "config", "format": name, "expect": expect}, text) == expected


QUOTING = {
    "kind": "citations",
    "sources": {"K1": "The lamp costs 40 dollars in May.", "K2": "Shipping takes 3 days."},
    "must_cite": ["K1"],
    "quotes": 1,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('They say "the lamp costs 40 dollars" [K1].', "pass"),
        ("They say “The lamp  costs 40 dollars.” [K1]", "pass"),
        ('They say "the lamp costs 41 dollars" [K1].', "fail"),
        ('They say "Shipping takes 3 days" [K1].', "fail"),
        ('They say "Shipping takes 3 days" [K2], and more [K1].', "pass"),
        ("The lamp costs 40 dollars [K1].", "fail"),
        ('Yes, "the lamp costs 40 dollars" [K1][K9].', "fail"),
    ],
)
def test_quotations_stand_in_the_source_that_is_cited(text, expected):
    """What is quoted must be there, in that source, and the cited ids must exist."""
    assert outcome(QUOTING, text) == expected


def test_regex_matches_the_whole_answer():
    """Lookaheads work, a dot crosses lines, and a partial match is no match."""
    check = {"kind": "regex", "pattern": r"(?=.*\bAnn\b)(?=.*\b42\b).+"}
    assert outcome(check, "42 pieces\nfor Ann") == "pass"
    assert outcome(check, "42 pieces for Annabel") == "fail"
    assert outcome({"kind": "regex", "pattern": "a"}, "ab") == "fail"


def test_a_catastrophic_pattern_is_stopped(monkeypatch):
    """A pattern that would run for years is a fail within the time limit."""
    monkeypatch.setattr(sandbox, "CPU_LIMIT_S", 1)
    found = grade({"kind": "regex", "pattern": "(a+)+b"}, "a" * 60)
    assert found.outcome == "fail"
    assert "1 s" in found.reason


# --- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ann", "n": 3}', "pass"),
        ('\n{"n": 3.0, "name": "Ann"} ', "pass"),
        ('{"name": "Ann", "n": 4}', "fail"),
        ('{"name": "Ann"}', "fail"),
        ('{"name": "Ann", "n": 3, "x": 1}', "fail"),
        ('{"name": "Ann", "n": 3} Hope this helps!', "fail"),
        ('```json\n{"name": "Ann", "n": 3}\n```', "fail"),
        ("[" * 100_000, "fail"),
        ("NaN", "fail"),
        ("", "fail"),
        ('{"name": "Ann", "n": ' + "9" * 10_000 + "}", "fail"),
    ],
)
@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_json(kind, text, expected):
    """The whole answer is one value with the right fields."""
    check = {"kind": kind, "expect": {"name": "Ann", "n": 3}}
    if kind == "json_schema":
        check["schema"] = SCHEMA
    assert outcome(check, text) == expected


def test_true_is_not_one():
    """JSON's booleans and numbers are different values, as Python's are not."""
    assert outcome({"kind": "json", "expect": {"a": 1}}, '{"a": true}') == "fail"
    assert outcome({"kind": "json", "expect": [0]}, "[false]") == "fail"


def test_the_form_of_a_check_asks_for_no_values():
    """Wrong values in the right form are well formed, prose is not, text asks for none."""
    check = {"kind": "json_schema", "schema": SCHEMA, "expect": {"name": "Ann", "n": 3}}
    form = form_of(check)
    assert outcome(form, '{"name": "Bob", "n": 9}') == "pass"
    assert outcome(form, '{"name": "Bob"}') == "fail"
    assert form_of({"kind": "all", "checks": [YES, check]}) == {"kind": "all", "checks": [form]}
    assert form_of(YES) is None


def test_a_schema_reference_to_the_net_is_not_fetched():
    """A $ref that would need a request fails as a broken reference instead."""
    check = {"kind": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/schema.json"}}
    with pytest.raises(UsageError, match="reference"):
        grade(check, "{}")


def test_structured_validity_names_the_slice():
    """T15: validity 17 of 30 with reasoning against 29 of 30, and nothing to report without it."""
    graded = [
        Structured(
            arm, f"{cohort}{i}", f"{arm}{cohort}{i}", "pass" if i < valid else "fail", cohort
        )
        for cohort, arm, valid in (
            ("with reasoning", "target_only", 29),
            ("with reasoning", "speculative", 17),
            ("without reasoning", "target_only", 30),
            ("without reasoning", "speculative", 30),
        )
        for i in range(30)
    ]
    found = {
        m.cohort: m for m in grading.measure_structured_validity(graded, stage="replay", route="r")
    }
    assert set(found) == {"", "with reasoning"}
    assert found["with reasoning"].estimate.value == pytest.approx(17 / 30)
    assert found["with reasoning"].note == "valid 17 of 30; target-only 29 of 30"
    assert found[""].estimate.n == 60


def test_repeats_that_agree_are_no_further_evidence():
    """Thirty prompts say as much asked once as asked four times with the same outcome, and far less
    than 120 prompts; n counts prompts, so repeats do not make up a minimum.
    """

    def measured(prompts: int, repeats: int):
        graded = [
            Structured("speculative", f"p{i}", f"{i}-{j}", "fail" if i % 30 < 3 else "pass")
            for i in range(prompts)
            for j in range(repeats)
        ]
        (found,) = grading.measure_structured_validity(graded, stage="replay", route="r")
        return found

    once, repeated, others = measured(30, 1), measured(30, 4), measured(120, 1)
    for one, again, more in zip(
        (once.estimate, *once.fail_estimates),
        (repeated.estimate, *repeated.fail_estimates),
        (others.estimate, *others.fail_estimates),
        strict=True,
    ):
        assert (again.value, again.n) == (one.value, one.n) == (0.9, 30)
        assert (again.low, again.high) == pytest.approx((one.low, one.high))
        assert again.low < more.low < 0.9 < more.high < again.high
    assert repeated.note.startswith("valid 108 of 120 answers to 30 prompts")
    assert "30 prompts as clusters" in repeated.estimate.method


# --- SQL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT b, COUNT(*) FROM t GROUP BY b;", "pass"),
        ("select b, count(*) as c from t group by b order by c", "pass"),
        ("SELECT * FROM (VALUES ('x', 2.0), ('y', 1.0), ('z', 1.0))", "pass"),
        ("```sql\nSELECT b, COUNT(*) FROM t GROUP BY b\n```", "pass"),
        ("SELECT b, COUNT(a) FROM t GROUP BY b", "fail"),
        ("SELECT b FROM t GROUP BY b", "fail"),
        ("SELECT b, COUNT(*) FROM t GROUP BY b; SELECT 1", "fail"),
        ("SELEC b", "fail"),
        ("", "fail"),
        ("DROP TABLE t", "fail"),
        ("SELECT * FROM read_csv('/etc/passwd')", "fail"),
        ("COPY t TO 'stolen.csv'", "fail"),
        ("ATTACH 'other.db'", "fail"),
        ("SET enable_external_access = true", "fail"),
        ("INSTALL httpfs", "fail"),
        ("SELECT * FROM range(20000)", "fail"),
        ("SELECT '\ud800'", "fail"),
    ],
)
def test_sql(query, expected):
    """Rows are compared as a multiset, numbers by value; anything but one SELECT fails."""
    assert outcome(SQL, query) == expected


def test_sql_order_counts_where_gold_orders():
    """The same rows in another order fail only against an ordered gold query."""
    assert outcome(ORDERED, "SELECT a FROM t WHERE a > 0 ORDER BY a DESC") == "pass"
    found = grade(ORDERED, "SELECT a FROM t WHERE a > 0 ORDER BY a")
    assert (found.outcome, found.reason) == ("fail", "the right 3 rows in the wrong order")


def test_null_is_not_the_word_none():
    """NULL and the text 'None' are different cells."""
    check = SQL | {"gold": "SELECT NULL::VARCHAR"}
    assert outcome(check, "SELECT 'None'") == "fail"
    assert outcome(check, "SELECT NULL") == "pass"


def test_an_endless_query_is_interrupted(monkeypatch):
    """A query over the time limit is a fail."""
    monkeypatch.setattr(queries, "TIME_LIMIT_S", 0.5)
    query = "SELECT count(*) FROM range(10000000000) a, range(1000) b WHERE a.range + b.range = 1"
    assert "ran over" in grade(SQL, query).reason


# --- code ---------------------------------------------------------------------------------------


def test_code_is_not_run_unless_asked_for():
    """Off is the default, and is no verdict on the answer."""
    assert outcome(CODE, "def f(x): return x * x") == "not_applicable"


def test_code_passes_its_tests():
    """Plain or fenced, the standard library at hand."""
    assert run("def f(x):\n    return x * x").outcome == "pass"
    fenced = "Here:\n```python\nimport math, collections, re\ndef f(x):\n    return x * x\n```\nBye"
    assert run(fenced).outcome == "pass"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(x): return 4", "fails the test assert f(3) == 9"),
        ("def f(x) return 4", "does not compile: SyntaxError"),
        ("def g(x): return 4", "fails when tested: NameError"),
        ("1 / 0", "fails when run: ZeroDivisionError"),
        ("raise SystemExit(0)", "fails when run: SystemExit"),
        ("import os; os._exit(0)", "ended without a result"),
        ("x = [0] * 10**11", "MemoryError"),
        ("import socket; socket.socket()", "socket.__new__ is refused"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen is refused"),
        ("import os; os.fork()", "os.fork is refused"),
        ("import os; os.kill(os.getppid(), 9)", "os.kill is refused"),
        ("import ctypes", "is refused"),
        ("open('/etc/passwd')", "opening files is refused"),
        ("open('x', 'w')", "opening files is refused"),
        ("import os; os.listdir('/')", "os.listdir is refused"),
        ("import os; os.remove('x')", "os.remove is refused"),
        ("def f(x): raise Exception('\u202e\x1b[31m')", "\\u202e\\x1b[31m"),
        ("\x00", "does not compile"),
        ("(" * 5000, "does not compile"),
    ],
)
def test_code_that_fails_or_misbehaves(source, reason):
    """Each ends as a fail with its reason, escaped, and without harm."""
    found = run(source)
    assert found.outcome == "fail"
    assert reason in found.reason


def test_code_sees_no_secret_of_ours(monkeypatch):
    """The environment, with its API keys, is not handed down."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    source = "import os\ndef f(x):\n    assert 'OPENAI_API_KEY' not in os.environ\n    return x * x"
    assert run(source).outcome == "pass"


def test_printing_success_is_not_success():
    """Output of the answer is dropped: only the harness can say that the tests passed."""
    assert run("print('\"passed\"'); import os; os._exit(0)").outcome == "fail"
    assert (
        run("import sys; sys.stdout.write('x' * 10**7)\ndef f(x): return x * x").outcome == "pass"
    )


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_code_is_stopped(monkeypatch, source):
    """Busy or asleep, it ends at the time limit."""
    monkeypatch.setattr(sandbox, "CPU_LIMIT_S", 1)
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 2.0)
    found = run(source)
    assert found.outcome == "fail"
    assert "over 1 s of CPU" in found.reason or "ran over 2 s" in found.reason


# --- combinations and broken checks -------------------------------------------------------------

YES, NO, NONE = (
    {"kind": "exact", "answer": "x"},
    {"kind": "exact", "answer": "y"},
    {"kind": "none"},
)


@pytest.mark.parametrize(
    ("kind", "parts", "expected"),
    [
        ("all", [YES, YES], "pass"),
        ("all", [YES, NO], "fail"),
        ("all", [NONE, NO], "fail"),
        ("all", [YES, NONE], "not_applicable"),
        ("any", [NO, YES], "pass"),
        ("any", [NO, NO], "fail"),
        ("any", [NO, NONE], "not_applicable"),
    ],
)
def test_combinations(kind, parts, expected):
    """All needs each, any needs one; a part that cannot be judged leaves it open."""
    assert outcome({"kind": kind, "checks": parts}, "x") == expected


@pytest.mark.parametrize(
    "check",
    [
        {},
        {"kind": "exactly", "answer": "x"},
        {"kind": "exact"},
        {"kind": "exact", "answer": "x", "ignorecase": True},
        {"kind": "regex", "pattern": "("},
        {"kind": "json_schema", "schema": {"type": "objekt"}},
        {"kind": "sql", "setup": "CREATE TABLE t (a INT)", "gold": "SELECT b FROM t"},
        {"kind": "code", "tests": "assert f("},
        {"kind": "all", "checks": []},
        {"kind": "all", "checks": [{"kind": "nothing"}]},
        {"kind": "match"},
        {"kind": "number"},
        {"kind": "refusal"},
        {"kind": "config", "format": "xml"},
    ],
)
def test_a_broken_check_is_found_before_the_first_request(check):
    """Typos, bad patterns, schemas, gold queries and tests are usage errors."""
    with pytest.raises(UsageError):
        validate(check)


def test_sound_checks_are_sound():
    """The checks used in these tests validate."""
    for check in (SQL, ORDERED, CODE, YES, NONE, {"kind": "json_schema", "schema": SCHEMA}):
        validate(check)


@settings(max_examples=60, deadline=None)
@given(
    st.text(),
    st.sampled_from(
        [
            "exact",
            "json",
            "json_schema",
            "citations",
            "quotes",
            "format",
            "match",
            "contains",
            "number",
            "refusal",
            "config",
        ]
    ),
)
def test_every_text_gets_a_grade(text, kind):
    """No text raises, and every reason prints on one line."""
    checks = {
        "exact": {"answer": "x"},
        "json": {"expect": 1},
        "json_schema": {"schema": SCHEMA},
        "citations": {"sources": ["K1"]},
        "format": {"sentences": 2, "starts_with": "A"},
        "quotes": QUOTING,
        "match": {"answers": ["x"]},
        "contains": {"all": ["x"], "any": ["y"], "none": ["z"]},
        "number": {"answer": 3},
        "refusal": {"expected": True},
        "config": {"format": "yaml", "expect": {"a": 1}},
    }
    found = grade({"kind": kind} | checks[kind], text)
    assert found.outcome in {"pass", "fail"}
    assert found.reason.isprintable()


# --- endings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "stop", "problem"),
    [
        ({}, "fine", ["END"], None),
        ({}, "text END more", ["END"], "runs past the stop string"),
        ({"completion_tokens": 101}, "x", [], "101 tokens were returned, 100 allowed"),
        ({"finish_reason": None}, "x", [], "no finish reason"),
        ({"finish_reason": "length", "completion_tokens": 64}, "x", [], "length at 64 of 100"),
        ({"finish_reason": "length", "completion_tokens": 100}, "x", [], None),
        (
            {"finish_reason": "length", "completion_tokens": 100, "stop_reason": "END"},
            "x",
            ["END"],
            "but the finish reason is length",
        ),
    ],
)
def test_endings(fields, text, stop, problem):
    """Stop strings are honoured, lengths kept, and the finish reason says what happened."""
    found = grading.ending_problems(receipt(1, "speculative", **fields), text, stop, 100)
    assert found == [] if problem is None else (len(found) == 1 and problem in found[0])


def test_grades_are_plain_records():
    """They are frozen, so that nothing changes a verdict afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        grade(YES, "x").outcome = "fail"
