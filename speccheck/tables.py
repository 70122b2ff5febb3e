"""Table files of the fixture stage: read strictly, as exact fractions.

What the fixture proves, it proves about the numbers in such a file, so a number that is not exact,
a key that is not known or a row that does not sum to exactly 1 is refused with file and row: a
binary float would make `==` a matter of rounding, and a default would prove something else.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from speccheck.errors import UsageError
from speccheck.law import Table
from speccheck.verifier import MAX_POSITION, Row

MAX_WAYS = 50_000
"""Most ways a round (blocks times outcomes of their tests) and most sequences that are enumerated
in seconds; T4 has 10,000 and 3,125."""

_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30}|/\d{1,30})?")
"""What a string may hold: no exponents, whose value may be larger than memory."""

_TABLE_KEYS = {"name", "about", "vocabulary", "horizon", "tolerances", "rows"}
_ROW_KEYS = {"position", "after", "target", "draft"}


def load_table(path: Path) -> Table:
    """Read a table file; anything odd in it is a UsageError that names the file and the row.

    JSON: `name`, `vocabulary` (token names), `horizon` (tokens of a run, 2..15), `rows`, each with
    `position` (1..horizon), `after` (the previous token, or "*" for any other), `target` and
    `draft`: one number a token, an integer per 100 or a decimal or fraction as a string ("0.05",
    "1/3"), summing to exactly 1. Optional: `about`, and `tolerances` {runs, exact, control}, the
    largest deviation of a cell that is declared for that many runs.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the fixture table: {error}") from None
    try:
        data = json.loads(
            text, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
        )
    except _BadNumberError as error:
        raise UsageError(f"{path}: {error}") from None
    except _DuplicateKeyError as error:
        raise UsageError(f"{path}: key {error} is given twice in one object; keep one") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    return _table(path, data)


class _DuplicateKeyError(ValueError):
    pass


class _BadNumberError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    for key, n in counts.items():
        if n > 1:
            raise _DuplicateKeyError(repr(key))
    return dict(pairs)


def _no_float(text: str) -> float:
    raise _BadNumberError(
        f"{text} is not an exact probability; write an integer per 100 or a string such as "
        '"0.05" or "1/3"'
    )


def _table(path: Path, data: Any) -> Table:
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a fixture table is an object with {sorted(_TABLE_KEYS)}")
    _keys(f"{path}", data, _TABLE_KEYS, _TABLE_KEYS - {"about", "tolerances"})
    name, vocabulary, horizon = data["name"], data["vocabulary"], data["horizon"]
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(f"{path}: name must be a printable text")
    if (
        not isinstance(vocabulary, list)
        or len(vocabulary) < 2
        or not all(isinstance(token, str) and token.isprintable() for token in vocabulary)
        or {"", "*"} & set(vocabulary)
        or len(set(vocabulary)) != len(vocabulary)
    ):
        raise UsageError(
            f"{path}: vocabulary must list two or more different printable token names, "
            "none of them empty or '*'"
        )
    if type(horizon) is not int or not 2 <= horizon <= MAX_POSITION:
        raise UsageError(f"{path}: horizon must be a whole number from 2 to {MAX_POSITION}")
    ways = max(len(vocabulary) ** horizon, (2 * len(vocabulary)) ** (horizon - 1))
    if ways > MAX_WAYS:
        raise UsageError(
            f"{path}: {len(vocabulary)} tokens over {horizon} positions are {ways} cases, more "
            f"than the {MAX_WAYS} that can be enumerated; take fewer tokens or positions"
        )
    if not isinstance(data["rows"], list):
        raise UsageError(f"{path}: rows must be a list")
    target: dict[tuple[int, int | None], Row] = {}
    draft: dict[tuple[int, int | None], Row] = {}
    for number, row in enumerate(data["rows"], start=1):
        where = f"{path}: row {number}"
        key = _row_key(where, row, vocabulary, horizon)
        if key in target:
            raise UsageError(
                f"{where}: position {key[0]} after {row['after']!r} is given twice; keep one"
            )
        where += f" (position {key[0]} after {row['after']!r})"
        target[key] = _probabilities(f"{where}: target", row["target"], vocabulary)
        draft[key] = _probabilities(f"{where}: draft", row["draft"], vocabulary)
    for position in range(1, horizon + 1):
        if (position, None) not in target:
            given = [(position, token) in target for token in range(len(vocabulary))]
            if position == 1 or not all(given):
                raise UsageError(
                    f"{path}: position {position} has no row after '*', so not every previous "
                    "token has one; add it"
                )
    declared = _declared(path, data.get("tolerances"))
    return Table(name, tuple(vocabulary), horizon, target, draft, declared)


def _keys(where: str, data: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    if unknown := sorted(set(data) - known):
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are {sorted(known)}")
    if missing := sorted(needed - set(data)):
        raise UsageError(f"{where}: key {missing[0]!r} is missing")


def _row_key(where: str, row: Any, vocabulary: list[str], horizon: int) -> tuple[int, int | None]:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a row is an object with {sorted(_ROW_KEYS)}")
    _keys(where, row, _ROW_KEYS, _ROW_KEYS)
    position, after = row["position"], row["after"]
    if type(position) is not int or not 1 <= position <= horizon:
        raise UsageError(f"{where}: position must be a whole number from 1 to {horizon}")
    if after == "*":
        return position, None
    if after not in vocabulary:
        raise UsageError(
            f"{where}: unknown token {after!r} in after; the vocabulary has {vocabulary}"
        )
    if position == 1:
        raise UsageError(f"{where}: position 1 has no token before it; write after '*'")
    return position, vocabulary.index(after)


def _probabilities(where: str, numbers: Any, vocabulary: list[str]) -> Row:
    if not isinstance(numbers, list) or len(numbers) != len(vocabulary):
        found = f"{len(numbers)} numbers" if isinstance(numbers, list) else repr(numbers)
        raise UsageError(f"{where} must list {len(vocabulary)} numbers, one a token; found {found}")
    row = [
        _fraction(f"{where}, token {token}", number)
        for token, number in zip(vocabulary, numbers, strict=True)
    ]
    if sum(row) != 1:
        raise UsageError(
            f"{where} sums to {_decimal(sum(row))}, not 1 (integers count per 100): {numbers}"
        )
    return np.array(row, dtype=object)


def _fraction(where: str, number: Any) -> Fraction:
    if type(number) is int:
        value = Fraction(number, 100)
    elif isinstance(number, str):
        if not _NUMBER.fullmatch(number) or re.search(r"/0+$", number):
            raise UsageError(
                f'{where}: {number!r} is not a number; write a decimal ("0.05") or a fraction '
                '("1/3")'
            )
        value = Fraction(number)
    else:
        raise UsageError(
            f"{where}: {number!r} is neither an integer per 100 nor a number as a string"
        )
    if value < 0:
        raise UsageError(f"{where}: {number} is negative")
    return value


def _declared(path: Path, tolerances: Any) -> tuple[int, float, float] | None:
    if tolerances is None:
        return None
    where, keys = f"{path}: tolerances", {"runs", "exact", "control"}
    if not isinstance(tolerances, dict):
        raise UsageError(f"{where} must be an object with {sorted(keys)}")
    _keys(where, tolerances, keys, keys)
    if type(tolerances["runs"]) is not int or tolerances["runs"] < 1:
        raise UsageError(f"{where}: runs must be a positive whole number")
    exact, control = (_fraction(f"{where}: {key}", tolerances[key]) for key in ("exact", "control"))
    return tolerances["runs"], float(exact), float(control)


def _decimal(value: Any) -> str:
    return f"{float(value):.6g}"
