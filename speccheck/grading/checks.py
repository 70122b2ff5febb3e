"""One deterministic check per prompt, judged alike on both arms.

Every check is total: whatever a model wrote gives a grade and no exception. A check that is itself
broken (unknown kind, missing key, gold query that does not run) is the user's to mend and raises;
`validate` finds it before the first request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from speccheck.errors import UsageError
from speccheck.grading import sandbox
from speccheck.grading.grade import PASSED, Grade, failed, need, shown, unfenced
from speccheck.grading.queries import check_sql, gold_rows
from speccheck.grading.structured import check_config, check_json, check_json_schema
from speccheck.grading.texts import (
    check_citations,
    check_contains,
    check_exact,
    check_format,
    check_match,
    check_none,
    check_number,
    check_refusal,
    check_regex,
    compiled,
)

CodeExecution = Literal["off", "subprocess"]


def grade(check: Mapping[str, Any], text: str, *, code_execution: CodeExecution = "off") -> Grade:
    """Grade one complete answer; `check["kind"]` is one of `KINDS`.

    Raises:
        UsageError: the check itself is broken.
    """
    kind = check.get("kind")
    if kind == "code":
        return _code(check, text, code_execution)
    if kind in ("all", "any"):
        parts = [grade(part, text, code_execution=code_execution) for part in need(check, "checks")]
        return _combined(kind, parts)
    if kind not in _CHECKERS:
        raise UsageError(f"unknown check kind {kind!r}; known: {', '.join(KINDS)}")
    return _CHECKERS[kind](check, text)


def validate(check: Mapping[str, Any]) -> None:
    """Check a check: kind and keys known, pattern and schema valid, gold query runs.

    Raises:
        UsageError: with the reason.
    """
    kind = check.get("kind")
    unknown = set(check) - _KEYS.get(str(kind), set()) - {"kind"}
    if kind not in _KEYS or unknown:
        what = f"key {min(unknown)!r}" if kind in _KEYS else f"kind {kind!r}"
        raise UsageError(f"check {shown(json.dumps(dict(check)))}: unknown {what}; see grading")
    if kind in ("all", "any"):
        parts = need(check, "checks")
        if not parts:
            raise UsageError(f"check of kind {kind!r} has no checks in it")
        for part in parts:
            validate(part)
    elif kind == "code":
        try:
            compile(need(check, "tests"), "tests", "exec")
        except SyntaxError as error:
            raise UsageError(f"check of kind 'code': its tests do not compile: {error}") from None
    elif kind == "regex":
        compiled(need(check, "pattern"))
    elif kind == "sql":
        gold_rows(check)
    else:
        _CHECKERS[kind](check, "")


def form_of(check: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The check of the form alone of a JSON answer (it parses, and meets the schema); None where
    a check asks for no JSON.
    """
    kind = check.get("kind")
    if kind in ("all", "any"):
        parts = [form for part in check.get("checks", ()) if (form := form_of(part)) is not None]
        return {"kind": kind, "checks": parts} if parts else None
    if kind not in ("json", "json_schema"):
        return None
    return {key: value for key, value in check.items() if key != "expect"}


def _combined(kind: str, parts: Sequence[Grade]) -> Grade:
    """all: the first fail, else the first not_applicable, else pass; any: the mirror."""
    order = ("fail", "not_applicable") if kind == "all" else ("pass", "not_applicable")
    for outcome in order:
        for part in parts:
            if part.outcome == outcome:
                return part
    return parts[0] if parts else Grade("not_applicable", "no checks in it")


def _code(check: Mapping[str, Any], text: str, code_execution: CodeExecution) -> Grade:
    """Python that compiles and passes `tests`, run after it in a limited process."""
    tests = str(need(check, "tests"))
    if code_execution == "off":
        return Grade("not_applicable", "model-written code is run only where the user asks for it")
    result = sandbox.run_tests(unfenced(text), tests)
    if result.startswith(sandbox.UNSAFE):
        return Grade("not_applicable", f"code is not run here: it {shown(result)[1:-1]}")
    return PASSED if result == "passed" else failed(shown(result)[1:-1])


_KEYS: dict[str, set[str]] = {
    "exact": {"answer", "ignore_case", "tolerance"},
    "json": {"expect"},
    "json_schema": {"schema", "expect"},
    "config": {"format", "expect"},
    "sql": {"setup", "gold"},
    "code": {"tests"},
    "citations": {"sources", "must_cite", "contains", "quotes"},
    "match": {"answers"},
    "contains": {"all", "any", "none"},
    "number": {"answer", "tolerance"},
    "refusal": {"expected"},
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

KINDS = tuple(sorted(_KEYS))

_CHECKERS: dict[str, Callable[[Mapping[str, Any], str], Grade]] = {
    "exact": check_exact,
    "json": check_json,
    "json_schema": check_json_schema,
    "config": check_config,
    "sql": check_sql,
    "citations": check_citations,
    "match": check_match,
    "contains": check_contains,
    "number": check_number,
    "refusal": check_refusal,
    "regex": check_regex,
    "format": check_format,
    "none": check_none,
}
