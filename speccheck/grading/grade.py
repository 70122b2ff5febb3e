"""What every check gives: pass, fail or not_applicable, with one line why that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from speccheck.errors import UsageError

GradeOutcome = Literal["pass", "fail", "not_applicable"]


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of a check and one line why; the reason is safe to print (nothing unescaped)."""

    outcome: GradeOutcome
    reason: str


PASSED = Grade("pass", "as expected")


def failed(reason: str) -> Grade:
    """A fail with its reason."""
    return Grade("fail", reason)


def shown(value: object) -> str:
    """Foreign text for a reason: quoted, control and bidi characters escaped, cut short."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def need(check: Mapping[str, Any], key: str) -> Any:
    """What a check must say.

    Raises:
        UsageError: it does not.
    """
    if key not in check:
        raise UsageError(f"a check of kind {check.get('kind')!r} needs the key {key!r}")
    return check[key]


# The end is a fence of its own line, at least as long, without a word: ```python begins another.
_BLOCK = re.compile(
    r"(?P<in>(?:^|(?<=\n))[ \t]*)?(?P<fence>`{3,}|(?:^|(?<=\n))~{3,})[^`\n]*\n"
    r"(?P<block>.*?)(?:(?:^|(?<=\n))[ \t]*(?P=fence)[`~]*[ \t]*(?=\n|\Z)|\Z)",
    re.DOTALL,
)


def unfenced(text: str) -> str:
    """The first ``` (or ~~~) block of an answer, or the whole text where there is none.

    The indentation of its fence is taken off its lines (a block in a list), as CommonMark has it.
    """
    text = text.replace("\r\n", "\n")
    found = _BLOCK.search(text)
    if found is None:
        return text
    block = found["block"].removesuffix("\n")
    depth = len(found["in"] or "")
    return re.sub(rf"(?m)^[ \t]{{1,{depth}}}", "", block) if depth else block
