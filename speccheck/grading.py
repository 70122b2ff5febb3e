"""Is this answer right for its task? One deterministic check per prompt, judged alike on both arms.

A grade is pass, fail or not_applicable with a reason; comparisons are made between arms, never with
other models, so a modest target is no problem. Every check is total: whatever a model wrote gives a
grade and no exception. A check that is itself broken (unknown kind, missing key, gold query that
does not run) is the user's to mend and raises; `validate` finds it before the first request.

Answers are hostile input. SQL runs in a throw-away in-memory database that may touch nothing else.
Patterns and model-written code run in a separate process with limits. That process stops accidents
(endless loops, memory, files, sockets, child processes); it is no sandbox against an attacker who
knows CPython, so code runs only where the user asked for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from speccheck import stats
from speccheck.errors import UsageError
from speccheck.records import Arm, Measurement, Outcome, Receipt

GradeOutcome = Literal["pass", "fail", "not_applicable"]
CodeExecution = Literal["off", "subprocess"]

_TIME_LIMIT_S = 5.0
"""Wall clock of one SQL query, pattern or code run; a timeout is a fail."""

_MEMORY_MB = 512
_MOST_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of a check and one line why; the reason is safe to print (nothing unescaped)."""

    outcome: GradeOutcome
    reason: str


_PASSED = Grade("pass", "as expected")


def _failed(reason: str) -> Grade:
    return Grade("fail", reason)


def _shown(value: object) -> str:
    """Foreign text for a reason: quoted, control and bidi characters escaped, cut short."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


# --- entry --------------------------------------------------------------------------------------


def grade(
    check: Mapping[str, Any],
    text: str,
    *,
    receipt: Receipt | None = None,
    code_execution: CodeExecution = "off",
) -> Grade:
    """Grade one answer.

    `check["kind"]` is exact, json, json_schema, sql, code, citations, regex, format, all, any or
    none. With a `receipt`, an answer that did not complete is not_applicable: errors, refusals and
    cut streams have their own rules, and a half answer must not count as a wrong one.

    Raises:
        UsageError: the check itself is broken.
    """
    if receipt is not None and receipt.outcome != Outcome.OK:
        return Grade("not_applicable", f"the request ended as {receipt.outcome}")
    if check.get("kind") == "code":
        return _code(check, text, code_execution)
    if check.get("kind") in ("all", "any"):
        parts = [
            grade(part, text, code_execution=code_execution) for part in _need(check, "checks")
        ]
        return _combined(check["kind"], parts)
    return _checker(check)(check, text)


def validate(check: Mapping[str, Any]) -> None:
    """Check a check: kind and keys known, pattern and schema valid, gold query runs.

    Raises:
        UsageError: with the reason.
    """
    kind = check.get("kind")
    unknown = set(check) - _KEYS.get(str(kind), set()) - {"kind"}
    if kind not in _KEYS or unknown:
        what = f"key {min(unknown)!r}" if kind in _KEYS else f"kind {kind!r}"
        raise UsageError(f"check {_shown(json.dumps(dict(check)))}: unknown {what}; see grading")
    if kind in ("all", "any"):
        parts = _need(check, "checks")
        if not parts:
            raise UsageError(f"check of kind {kind!r} has no checks in it")
        for part in parts:
            validate(part)
    elif kind == "code":
        try:
            compile(_need(check, "tests"), "tests", "exec")
        except SyntaxError as error:
            raise UsageError(f"check of kind 'code': its tests do not compile: {error}") from None
    else:
        _CHECKERS[kind](check, "")


_KEYS: dict[str, set[str]] = {
    "exact": {"answer", "ignore_case", "tolerance"},
    "json": {"expect"},
    "json_schema": {"schema", "expect"},
    "sql": {"setup", "gold"},
    "code": {"tests"},
    "citations": {"sources", "must_cite", "contains"},
    "regex": {"pattern"},
    "format": {
        "starts_with",
        "ends_with",
        "bullets",
        "sentences",
        "lines",
        "min_words",
        "max_words",
    },
    "all": {"checks"},
    "any": {"checks"},
    "none": set(),
}


def _need(check: Mapping[str, Any], key: str) -> Any:
    if key not in check:
        raise UsageError(f"a check of kind {check.get('kind')!r} needs the key {key!r}")
    return check[key]


def _checker(check: Mapping[str, Any]) -> Callable[[Mapping[str, Any], str], Grade]:
    kind = check.get("kind")
    if kind not in _CHECKERS:
        raise UsageError(f"unknown check kind {kind!r}; known: {', '.join(sorted(_KEYS))}")
    return _CHECKERS[kind]


def _combined(kind: str, parts: Sequence[Grade]) -> Grade:
    """all: the first fail, else the first not_applicable, else pass; any: the mirror."""
    order = ("fail", "not_applicable") if kind == "all" else ("pass", "not_applicable")
    for outcome in order:
        for part in parts:
            if part.outcome == outcome:
                return part
    return parts[0] if parts else Grade("not_applicable", "no checks in it")


# --- text ---------------------------------------------------------------------------------------


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _exact(check: Mapping[str, Any], text: str) -> Grade:
    """The answer itself: NFC, outer blanks dropped; numbers within `tolerance` where given."""
    expected, found = _normal(str(_need(check, "answer"))), _normal(text)
    if "tolerance" in check:
        try:
            distance = abs(Decimal(found.replace(",", "")) - Decimal(expected.replace(",", "")))
        except ArithmeticError:
            return _failed(f"not a number: {_shown(found)}")
        within = distance.is_finite() and distance <= Decimal(str(check["tolerance"]))
        return _PASSED if within else _failed(f"{_shown(found)}, expected {_shown(expected)}")
    if check.get("ignore_case"):
        expected, found = expected.casefold(), found.casefold()
    if found == expected:
        return _PASSED
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    return _failed(f"differs at character {at}: {_shown(found[at:])} for {_shown(expected[at:])}")


def _regex(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer (outer blanks dropped, dot matches newline) matches `pattern`."""
    pattern = _need(check, "pattern")
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"check pattern {_shown(pattern)} is no regular expression: {error}"
        ) from None
    result = _in_child(_MATCH, {"pattern": pattern, "text": _normal(text)})
    if result == "match":
        return _PASSED
    if result == "no match":
        return _failed(f"does not match {_shown(pattern)}")
    return _failed(f"matching {_shown(pattern)} {result}")


def _format(check: Mapping[str, Any], text: str) -> Grade:
    """Outer form: beginning, end, numbers of bullets, sentences, lines and words."""
    answer = _normal(text)
    words = len(answer.split())
    counts = {
        "bullets": len(re.findall(r"(?m)^[ \t]*[-*•] ", answer)),
        "sentences": len(re.findall(r"[.!?]+(?=[\s\"')\]]|$)", answer)),
        "lines": sum(bool(line.strip()) for line in answer.splitlines()),
    }
    if not answer.startswith(str(check.get("starts_with", "")).lstrip()):
        return _failed(f"begins with {_shown(answer[:30])}, not {_shown(check['starts_with'])}")
    if not answer.endswith(str(check.get("ends_with", "")).rstrip()):
        return _failed(f"ends with {_shown(answer[-30:])}, not {_shown(check['ends_with'])}")
    for name, found in counts.items():
        if name in check and found != check[name]:
            return _failed(f"{found} {name}, expected {check[name]}")
    if words < check.get("min_words", 0):
        return _failed(f"{words} words, at least {check['min_words']} expected")
    if words > check.get("max_words", math.inf):
        return _failed(f"{words} words, at most {check['max_words']} expected")
    return _PASSED


def _citations(check: Mapping[str, Any], text: str) -> Grade:
    """Marks like [K1]: only of given sources, each one in `must_cite`, each text in `contains`."""
    cited = re.findall(r"\[([^\[\]\n]{1,40})\]", text)
    for mark in cited:
        if mark not in _need(check, "sources"):
            return _failed(f"cites {_shown(mark)}, which is no source")
    for mark in check.get("must_cite", ()):
        if mark not in cited:
            return _failed(f"does not cite {_shown(mark)}")
    answer = " ".join(_normal(text).split())
    for part in check.get("contains", ()):
        if " ".join(_normal(part).split()) not in answer:
            return _failed(f"does not contain {_shown(part)}")
    if not cited and not check.get("must_cite"):
        return _failed("cites nothing")
    return _PASSED


def _none(_check: Mapping[str, Any], _text: str) -> Grade:
    return Grade("not_applicable", "this prompt has no check")


# --- JSON ---------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parsed(text: str) -> tuple[Any, str]:
    """The value and an empty problem, or None and the problem."""
    try:
        return json.loads(text.strip(), parse_constant=_refuse_constant), ""
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, f"no JSON: {_shown(error)}"


def _same(a: Any, b: Any) -> bool:
    """Equality as JSON means it: true is not 1, but 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _expected(check: Mapping[str, Any], value: Any) -> Grade:
    if "expect" not in check or _same(value, check["expect"]):
        return _PASSED
    expect = check["expect"]
    if isinstance(expect, dict) and isinstance(value, dict):
        for key in sorted(expect.keys() | value.keys()):
            if key not in value:
                return _failed(f"field {_shown(key)} is missing")
            if key not in expect:
                return _failed(f"field {_shown(key)} was not asked for")
            if not _same(value[key], expect[key]):
                return _failed(
                    f"field {_shown(key)} is {_shown(value[key])}, expected {_shown(expect[key])}"
                )
    return _failed(f"is {_shown(value)}, expected {_shown(expect)}")


def _json(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer is one JSON value, equal to `expect` where given."""
    value, problem = _parsed(text)
    return _failed(problem) if problem else _expected(check, value)


def _json_schema(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer is one JSON value, valid against `schema`, equal to `expect` where given."""
    import jsonschema
    import referencing.exceptions

    schema = _need(check, "schema")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UsageError(f"check schema is invalid: {_shown(error.message)}") from None
    value, problem = _parsed(text)
    if problem:
        return _failed(problem)
    # An empty registry: a $ref to the net must not be fetched.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        breach = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except referencing.exceptions.Unresolvable as error:
        raise UsageError(f"check schema has a broken reference: {_shown(error)}") from None
    except RecursionError:
        return _failed("nested too deeply")
    if breach is not None:
        where = "/".join(str(part) for part in breach.absolute_path)
        return _failed(f"breaks the schema at {_shown('/' + where)}: {_shown(breach.message)}")
    return _expected(check, value)


def structure(check: Mapping[str, Any], text: str) -> Grade:
    """Only the form of a JSON answer: does it parse, and meet the schema? Values are not compared.

    not_applicable for a check that asks for no JSON.
    """
    if check.get("kind") in ("all", "any"):
        parts = [structure(part, text) for part in check.get("checks", ())]
        asked = [part for part in parts if part.outcome != "not_applicable"]
        return (
            _combined(check["kind"], asked) if asked else Grade("not_applicable", "no JSON asked")
        )
    if check.get("kind") not in ("json", "json_schema"):
        return Grade("not_applicable", "no JSON asked")
    return grade({key: value for key, value in check.items() if key != "expect"}, text)


@dataclass(frozen=True, slots=True)
class Structured:
    """The `structure` grade of one request that asked for structured output."""

    arm: str
    receipt_id: str
    outcome: GradeOutcome
    cohort: str = ""


def measure_structured_validity(
    graded: Sequence[Structured], *, stage: str, route: str, alpha: float = 0.05
) -> list[Measurement]:
    """Metric structured_output_validity of the speculative arm: route, then each cohort that is
    worse than on the target-only arm. Not-applicable grades do not count.
    """
    metric = "structured_output_validity"
    cohorts = sorted({g.cohort for g in graded if g.cohort})
    found = []
    for cohort in ["", *(cohorts if len(cohorts) > 1 else [])]:
        here = [
            g
            for g in graded
            if g.outcome != "not_applicable" and (not cohort or g.cohort == cohort)
        ]
        sides = {arm: [g for g in here if g.arm == arm] for arm in Arm}
        valid = {arm: sum(g.outcome == "pass" for g in side) for arm, side in sides.items()}
        spec, target = sides[Arm.SPECULATIVE], sides[Arm.TARGET_ONLY]
        worse = valid[Arm.SPECULATIVE] * len(target) < valid[Arm.TARGET_ONLY] * len(spec)
        if cohort and not worse:
            continue
        if not spec:
            found.append(Measurement(metric, stage, route, cohort, None, "no structured output"))
            continue
        k, n = valid[Arm.SPECULATIVE], len(spec)
        found.append(
            Measurement(
                metric,
                stage,
                route,
                cohort,
                stats.clopper_pearson(k, n, alpha=alpha),
                f"valid {k} of {n}; target-only {valid[Arm.TARGET_ONLY]} of {len(target)}",
                tuple(g.receipt_id for g in spec if g.outcome == "fail")[:5],
                tuple(stats.clopper_pearson(k, n, alpha=a) for a in stats.FAIL_LEVELS),
                share=len(spec) / max(1, sum(g.arm == Arm.SPECULATIVE for g in graded)),
            )
        )
    return found


# --- SQL ----------------------------------------------------------------------------------------


def _sql(check: Mapping[str, Any], text: str) -> Grade:
    """One SELECT whose rows equal the gold query's: as a multiset, or in order if gold orders."""
    gold = str(_need(check, "gold"))
    expected, problem = _rows(str(_need(check, "setup")), gold)
    if problem:
        raise UsageError(f"check of kind 'sql': setup or gold query fails: {problem}")
    # A lone surrogate (half a character that a model may emit) has no UTF-8 form.
    query = _unfenced(text).encode(errors="replace").decode()
    found, problem = _rows(str(check["setup"]), query)
    if problem:
        return _failed(problem)
    ordered = re.search(r"\border\s+by\b", gold, re.IGNORECASE) is not None
    if found == expected or (not ordered and Counter(found) == Counter(expected)):
        return _PASSED
    if Counter(found) == Counter(expected):
        return _failed(f"the right {len(found)} rows in the wrong order")
    return _failed(
        f"{len(found)} rows for {len(expected)}; first {_shown(found[:1])} for"
        f" {_shown(expected[:1])}"
    )


@functools.lru_cache(maxsize=512)
def _rows(setup: str, query: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Rows of one SELECT in a fresh in-memory database, as comparable text; or the problem.

    No files, no network, no extensions, little memory, one thread, a time limit, and no way to
    change any of these from inside. Cached, since both arms usually give the same query.
    """
    import duckdb

    with duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "memory_limit": f"{_MEMORY_MB // 2}MB",
            "threads": "1",
        },
    ) as connection:
        timer = threading.Timer(_TIME_LIMIT_S, connection.interrupt)
        try:
            connection.execute(setup)
            connection.execute("SET lock_configuration = true")
            statements = connection.extract_statements(query)
            if len(statements) != 1:
                return (), f"{len(statements)} statements instead of one"
            if statements[0].type != duckdb.StatementType.SELECT:
                return (), f"a {statements[0].type.name} statement, not a SELECT"
            timer.start()
            rows = connection.execute(statements[0]).fetchmany(_MOST_ROWS + 1)
        except duckdb.InterruptException:
            return (), f"the query ran over {_TIME_LIMIT_S:g} s"
        except (duckdb.Error, RuntimeError, MemoryError) as error:
            return (), f"the query fails: {_shown(error)}"
        finally:
            timer.cancel()
    if len(rows) > _MOST_ROWS:
        return (), f"the query returns more than {_MOST_ROWS} rows"
    return tuple(tuple(_cell(value) for value in row) for row in rows), ""


def _cell(value: object) -> str:
    """A cell so that 2, 2.0 and DECIMAL 2.00 are one value, floats to nine digits."""
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return f"{float(value):.9g}"
    return f"{type(value).__name__}:{value}"


# --- code ---------------------------------------------------------------------------------------


def _unfenced(text: str) -> str:
    """The first ``` block, or the whole text where there is none."""
    block = re.search(r"```[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", text, re.DOTALL)
    return block.group(1) if block else text


def _code(check: Mapping[str, Any], text: str, code_execution: CodeExecution) -> Grade:
    """Python that compiles and passes `tests`, run after it in a limited process."""
    tests = str(_need(check, "tests"))
    if code_execution == "off":
        return Grade("not_applicable", "model-written code is run only where the user asks for it")
    result = _in_child(_RUN, {"source": _unfenced(text), "tests": tests})
    return _PASSED if result == "passed" else _failed(_shown(result)[1:-1])


_LIMITS = """
import json, os, resource, sys
job = json.loads(sys.stdin.buffer.read())
result_fd = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
def say(word):
    os.write(result_fd, (job["token"] + json.dumps(word)).encode())
    os._exit(0)
for name, most in (
    ("RLIMIT_CPU", job["seconds"]), ("RLIMIT_AS", job["bytes"]), ("RLIMIT_FSIZE", 65536),
    ("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 32), ("RLIMIT_NPROC", 0),
):
    resource.setrlimit(getattr(resource, name), (most, most))
"""

_MATCH = (
    _LIMITS
    + """
import re
say("match" if re.fullmatch(job["pattern"], job["text"], re.DOTALL) else "no match")
"""
)

_RUN = (
    _LIMITS
    + """
library = os.path.dirname(os.__file__) + os.sep
refused = (
    "socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system",
    "os.kill", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link",
    "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.listdir", "os.scandir", "shutil.",
    "ctypes.", "pty.", "signal.", "mmap.", "fcntl.", "syslog.", "webbrowser.", "urllib.", "ftplib.",
    "sqlite3.", "resource.",
)
def guard(event, args):
    if event.startswith(refused):
        if event in ("os.listdir", "os.scandir") and str(args[0]).startswith(library):
            return
        raise PermissionError(event + " is refused")
    if event == "open":
        path, mode, flags = args
        reading = not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if not (reading and isinstance(path, str) and os.path.realpath(path).startswith(library)):
            raise PermissionError("opening files is refused")
def told(error):
    return type(error).__name__ + ": " + str(error)[:200]
try:
    answer = compile(job["source"], "answer", "exec")
except BaseException as error:
    say("does not compile: " + told(error))
tests = compile(job["tests"], "tests", "exec")
space = {"__name__": "answer"}
sys.addaudithook(guard)
try:
    exec(answer, space)
except BaseException as error:
    say("fails when run: " + told(error))
try:
    exec(tests, space)
except AssertionError as error:
    say("fails the test " + job["tests"].splitlines()[error.__traceback__.tb_next.tb_lineno - 1])
except BaseException as error:
    say("fails when tested: " + told(error))
say("passed")
"""
)


def _in_child(program: str, job: dict[str, str]) -> str:
    """Run a program of ours on a job in a limited process and return the word it says.

    Isolated mode, empty environment, empty folder, limits on CPU, memory, files and processes, a
    wall-clock limit on the whole process group. The word comes back behind a random token in a file
    that cannot outgrow the file-size limit: an answer that exits or prints early has said nothing.
    """
    token = secrets.token_hex(16)
    limits = {"token": token, "seconds": int(_TIME_LIMIT_S), "bytes": _MEMORY_MB * 2**20}
    payload = json.dumps({**job, **limits}).encode(errors="surrogatepass")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", program],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as child,
    ):
        try:
            child.communicate(payload, timeout=_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"ran over {_TIME_LIMIT_S:g} s"
        finally:
            _end(child)
        said.seek(0)
        answer = said.read(65536).decode(errors="replace")
    _, found, word = answer.rpartition(token)
    if found:
        with contextlib.suppress(ValueError):
            return str(json.loads(word))
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"used over {_TIME_LIMIT_S:g} s of CPU"
    return "ended without a result"


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# --- how an answer ended ------------------------------------------------------------------------


def ending_problems(receipt: Receipt, text: str, stop: Sequence[str], max_tokens: int) -> list[str]:
    """What is wrong with the way an answer ended: stop strings, length limit, finish reason.

    Empty for a sound ending. Only what the receipt shows is judged; a count that the server did not
    give is not a problem.
    """
    problems = [
        f"the text runs past the stop string {_shown(word)}"
        for word in stop
        if word and word in text
    ]
    n = receipt.completion_tokens
    if n is not None and n > max_tokens:
        problems.append(f"{n} tokens were returned, {max_tokens} allowed")
    if receipt.outcome == Outcome.OK and receipt.finish_reason is None:
        problems.append("no finish reason")
    if receipt.finish_reason == "length" and n is not None and n < max_tokens:
        problems.append(f"finish reason is length at {n} of {max_tokens} tokens")
    if receipt.stop_reason in stop and receipt.finish_reason == "length":
        problems.append("a stop string ended the text, but the finish reason is length")
    return problems


_CHECKERS: dict[str, Callable[[Mapping[str, Any], str], Grade]] = {
    "exact": _exact,
    "json": _json,
    "json_schema": _json_schema,
    "sql": _sql,
    "citations": _citations,
    "regex": _regex,
    "format": _format,
    "none": _none,
}
