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


def unfenced(text: str) -> str:
    """The first ``` block of an answer, or the whole text where there is none."""
    block = re.search(r"```[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", text, re.DOTALL)
    return block.group(1) if block else text
