"""Answers in words: the answer itself, a pattern, an outer form, citations, a refusal."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from speccheck.errors import UsageError
from speccheck.grading import sandbox
from speccheck.grading.grade import PASSED, Grade, failed, need, shown


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def check_exact(check: Mapping[str, Any], text: str) -> Grade:
    """The answer itself: NFC, outer blanks dropped; numbers within `tolerance` where given."""
    expected, found = _normal(str(need(check, "answer"))), _normal(text)
    if "tolerance" in check:
        try:
            distance = abs(Decimal(found.replace(",", "")) - Decimal(expected.replace(",", "")))
        except ArithmeticError:
            return failed(f"not a number: {shown(found)}")
        within = distance.is_finite() and distance <= Decimal(str(check["tolerance"]))
        return PASSED if within else failed(f"{shown(found)}, expected {shown(expected)}")
    if check.get("ignore_case"):
        expected, found = expected.casefold(), found.casefold()
    if found == expected:
        return PASSED
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    return failed(f"differs at character {at}: {shown(found[at:])} for {shown(expected[at:])}")


def check_regex(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer (outer blanks dropped, dot matches newline) matches `pattern`."""
    pattern = need(check, "pattern")
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"check pattern {shown(pattern)} is no regular expression: {error}"
        ) from None
    result = sandbox.match(pattern, _normal(text))
    if result == "match":
        return PASSED
    if result == "no match":
        return failed(f"does not match {shown(pattern)}")
    return failed(f"matching {shown(pattern)} {result}")


def check_format(check: Mapping[str, Any], text: str) -> Grade:
    """Outer form: beginning, end, numbers of bullets, sentences, lines and words."""
    answer = _normal(text)
    words = len(answer.split())
    counts = {
        "bullets": len(re.findall(r"(?m)^[ \t]*[-*•] ", answer)),
        "sentences": len(re.findall(r"[.!?]+(?=[\s\"')\]]|$)", answer)),
        "lines": sum(bool(line.strip()) for line in answer.splitlines()),
    }
    if not answer.startswith(str(check.get("starts_with", "")).lstrip()):
        return failed(f"begins with {shown(answer[:30])}, not {shown(check['starts_with'])}")
    if not answer.endswith(str(check.get("ends_with", "")).rstrip()):
        return failed(f"ends with {shown(answer[-30:])}, not {shown(check['ends_with'])}")
    for name, found in counts.items():
        if name in check and found != check[name]:
            return failed(f"{found} {name}, expected {check[name]}")
    if words < check.get("min_words", 0):
        return failed(f"{words} words, at least {check['min_words']} expected")
    if words > check.get("max_words", math.inf):
        return failed(f"{words} words, at most {check['max_words']} expected")
    return PASSED


def check_citations(check: Mapping[str, Any], text: str) -> Grade:
    """Marks like [K1]: only of given sources, each one in `must_cite`, each text in `contains`."""
    cited = re.findall(r"\[([^\[\]\n]{1,40})\]", text)
    for mark in cited:
        if mark not in need(check, "sources"):
            return failed(f"cites {shown(mark)}, which is no source")
    for mark in check.get("must_cite", ()):
        if mark not in cited:
            return failed(f"does not cite {shown(mark)}")
    answer = " ".join(_normal(text).split())
    for part in check.get("contains", ()):
        if " ".join(_normal(part).split()) not in answer:
            return failed(f"does not contain {shown(part)}")
    if not cited and not check.get("must_cite"):
        return failed("cites nothing")
    return PASSED


def check_none(_check: Mapping[str, Any], _text: str) -> Grade:
    """No check: nothing to judge."""
    return Grade("not_applicable", "this prompt has no check")
