"""A model's SQL, run in a throw-away in-memory DuckDB that may touch nothing else."""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from speccheck.errors import UsageError
from speccheck.grading.grade import PASSED, Grade, failed, need, shown, unfenced

TIME_LIMIT_S = 5.0
"""Wall clock of one query; a timeout is a fail."""

_MEMORY = "256MB"
_MOST_ROWS = 10_000


def gold_rows(check: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """What the gold query gives.

    Raises:
        UsageError: setup or gold query fail.
    """
    rows, problem = _rows(str(need(check, "setup")), str(need(check, "gold")))
    if problem:
        raise UsageError(f"check of kind 'sql': setup or gold query fails: {problem}")
    return rows


def check_sql(check: Mapping[str, Any], text: str) -> Grade:
    """One SELECT whose rows equal the gold query's: as a multiset, or in order if gold orders."""
    expected, gold = gold_rows(check), str(check["gold"])
    # A lone surrogate (half a character that a model may emit) has no UTF-8 form.
    query = unfenced(text).encode(errors="replace").decode()
    found, problem = _rows(str(check["setup"]), query)
    if problem:
        return failed(problem)
    ordered = re.search(r"\border\s+by\b", gold, re.IGNORECASE) is not None
    if found == expected or (not ordered and Counter(found) == Counter(expected)):
        return PASSED
    if Counter(found) == Counter(expected):
        return failed(f"the right {len(found)} rows in the wrong order")
    return failed(
        f"{len(found)} rows for {len(expected)}; first {shown(found[:1])} for {shown(expected[:1])}"
    )


@functools.lru_cache(maxsize=512)
def _rows(setup: str, query: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Rows of one SELECT in a fresh in-memory database, as comparable text; or the problem.

    No files (not even to spill to), no network, no extensions, little memory, one thread, a time
    limit, and no way to change any of these from inside. Cached, since both arms usually give the
    same query.
    """
    import duckdb

    with duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "memory_limit": _MEMORY,
            "threads": "1",
            "max_temp_directory_size": "0KB",
        },
    ) as connection:
        timer = threading.Timer(TIME_LIMIT_S, connection.interrupt)
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
            return (), f"the query ran over {TIME_LIMIT_S:g} s"
        except (duckdb.Error, RuntimeError, MemoryError) as error:
            return (), f"the query fails: {shown(error)}"
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
