"""Answers in words: the answer itself, a pattern, an outer form, citations, a refusal."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Container, Mapping
from decimal import Decimal
from typing import Any

from speccheck.errors import UsageError
from speccheck.grading import answers, sandbox
from speccheck.grading.grade import PASSED, Grade, failed, need, shown


def _one_line(text: str) -> str:
    return " ".join(_normal(text).split())


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


_WORD_OR_NOT = re.compile(r"(?<=\d)\.(?=\d)|[^\W_]|\x00|[\u0300-\u036f]|(.)", re.DOTALL)


def plain(text: str) -> str:
    """A text for comparison: NFKC, no case, no punctuation, single blanks; numbers keep points.

    >>> plain("  The  \u201cEiffel-Tower\u201d, 1,000.5 m! ")
    'the eiffel tower 1000.5 m'
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<!\w)[-−](?=\d)", "\x00", text)
    kept = _WORD_OR_NOT.sub(lambda m: " " if m.group(1) else m.group(0), text)
    return " ".join(kept.replace("\x00", "-").split())


def check_match(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer is one of `answers` but for case, punctuation, blanks and articles."""
    found = _without_articles(text)
    if any(_without_articles(str(answer)) == found for answer in need(check, "answers")):
        return PASSED
    return failed(f"{shown(text.strip())} is none of the answers, {shown(check['answers'][0])} ...")


def _without_articles(text: str) -> str:
    return " ".join(word for word in plain(text).split() if word not in ("a", "an", "the"))


def check_contains(check: Mapping[str, Any], text: str) -> Grade:
    """Words (but for case and punctuation): each of `all`, one of `any`, none of `none`."""
    found = f" {plain(text)} "

    def there(words: object) -> bool:
        return f" {plain(str(words))} " in found

    for words in check.get("all", ()):
        if not there(words):
            return failed(f"does not contain {shown(words)}")
    for words in check.get("none", ()):
        if there(words):
            return failed(f"contains {shown(words)}")
    if check.get("any") and not any(map(there, check["any"])):
        return failed(f"contains none of {shown(', '.join(map(str, check['any'])))}")
    return PASSED


_NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")


def check_number(check: Mapping[str, Any], text: str) -> Grade:
    """The last number in the answer is `answer`, within `tolerance` where given."""
    answer, found = Decimal(str(need(check, "answer"))), _NUMBER.findall(text)
    if not found:
        return failed(f"no number in {shown(text.strip())}")
    last = found[-1].replace(",", "").replace("−", "-")
    distance = abs(Decimal(last) - answer)
    if distance <= Decimal(str(check.get("tolerance", 0))):
        return PASSED
    return failed(f"the last number is {shown(last)}, expected {shown(check['answer'])}")


def compiled(pattern: object) -> str:
    """The pattern, if it is a regular expression.

    Raises:
        UsageError: it is none.
    """
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"check pattern {shown(pattern)} is no regular expression: {error}"
        ) from None
    return str(pattern)


def check_regex(check: Mapping[str, Any], text: str) -> Grade:
    """The whole answer (outer blanks dropped, dot matches newline) matches `pattern`."""
    pattern = compiled(need(check, "pattern"))
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


_QUOTED = re.compile(r'"([^"\n]{1,600})"|“([^”\n]{1,600})”|«([^»\n]{1,600})»')
_MARK = re.compile(r"\[([^\[\]\n]{1,40})\](?!\()")


def _marks(text: str, sources: Container[str]) -> list[str]:
    """What stands in brackets, each of several ([K1, K2]) by itself; a link's text is none."""
    found = []
    for mark in _MARK.findall(text):
        parts = [mark] if mark in sources else re.split(r"\s*[,;]\s*", mark.strip())
        found += parts
    return found


def check_citations(check: Mapping[str, Any], text: str) -> Grade:
    """Marks like [K1] or [K1, K2]: only of given sources, each in `must_cite`, each text in
    `contains`.

    Where `sources` gives the texts too (id -> text), what stands in quotation marks must stand in
    the source that is cited after it in the same sentence, or in any source where none is; at least
    `quotes` such passages of three words and more are needed.
    """
    sources = need(check, "sources")
    cited = _marks(text, sources)
    for mark in cited:
        if mark not in sources:
            return failed(f"cites {shown(mark)}, which is no source")
    for mark in check.get("must_cite", ()):
        if mark not in cited:
            return failed(f"does not cite {shown(mark)}")
    answer = _one_line(text)
    for part in check.get("contains", ()):
        if _one_line(part) not in answer:
            return failed(f"does not contain {shown(part)}")
    if isinstance(sources, Mapping):
        problem = _misquoted(sources, text, check.get("quotes", 0))
        if problem:
            return failed(problem)
    if not cited and not check.get("must_cite"):
        return failed("cites nothing")
    return PASSED


def _misquoted(sources: Mapping[str, str], text: str, least: int) -> str:
    """What is wrong with the passages in quotation marks, or empty."""
    known = {mark: _one_line(source).casefold() for mark, source in sources.items()}
    found = 0
    for match in _QUOTED.finditer(text):
        quote = _one_line(next(group for group in match.groups() if group is not None))
        if len(quote.split()) < 3:
            continue  # a title or a single word is no quotation of a source
        rest = re.split(r"[.!?](?:\s|$)|\n", text[match.end() :], maxsplit=1)[0]
        after = _MARK.search(rest)
        where = _marks(after.group(), known) if after else list(known)
        if not any(quote.rstrip(".,;:!?").casefold() in known[mark] for mark in where):
            named = where[0] if len(where) == 1 else "any source"
            return f"quotes {shown(quote)}, which does not stand in {named}"
        found += 1
    return "" if found >= least else f"{found} quotations of a source, at least {least} expected"


def check_refusal(check: Mapping[str, Any], text: str) -> Grade:
    """The answer refuses, or does not, as `expected` says; what refusing is: `answers.refuses`."""
    refused = answers.refuses(text)
    if refused == need(check, "expected"):
        return PASSED
    return failed(f"{'refuses' if refused else 'does not refuse'}: {shown(text.strip())}")


def check_none(_check: Mapping[str, Any], _text: str) -> Grade:
    """No check: nothing to judge."""
    return Grade("not_applicable", "this prompt has no check")
