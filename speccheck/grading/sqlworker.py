"""The process that runs a model's SQL: one JSON line in, one out, until its input ends.

A process of its own, since a query can go on past every limit that DuckDB has: `repeat('a', 1e9)`
takes memory that its memory limit does not count and time in which it takes no interrupt, and a
crash inside it would take the whole replay along. `queries` starts this file, and ends it where it
does not answer. It imports nothing of speccheck.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from decimal import Decimal
from typing import Any

import duckdb

_MOST_ROWS = 10_000
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "memory_limit": "256MB",
    "threads": "1",
    "max_temp_directory_size": "0KB",
}
"""No files (not even to spill to), no network, no extensions, little memory, one thread."""


def rows(setup: str, query: str, seconds: float) -> tuple[list[list[str]], str]:
    """Rows of one SELECT in a fresh in-memory database, as comparable text; or the problem."""
    with duckdb.connect(":memory:", config=_CONFIG) as connection:
        timer = threading.Timer(seconds, connection.interrupt)
        try:
            connection.execute(setup)
            connection.execute("SET lock_configuration = true")
            statements = connection.extract_statements(query)
            if len(statements) != 1:
                return [], f"{len(statements)} statements instead of one"
            if statements[0].type != duckdb.StatementType.SELECT:
                return [], f"a {statements[0].type.name} statement, not a SELECT"
            timer.start()
            found = connection.execute(statements[0]).fetchmany(_MOST_ROWS + 1)
        except duckdb.InterruptException:
            return [], "timeout"
        except (duckdb.Error, RuntimeError, MemoryError) as error:
            return [], f"the query fails: {error}"
        finally:
            timer.cancel()
    if len(found) > _MOST_ROWS:
        return [], f"the query returns more than {_MOST_ROWS} rows"
    return [[cell(value) for value in row] for row in found], ""


def cell(value: object) -> str:
    """A cell so that 2, 2.0 and DECIMAL 2.00 are one value; whole numbers to the last digit, others
    to nine.

    >>> cell(2.0), cell(Decimal("2.00")), cell(1234567890123), cell(0.1 + 0.2)
    ('2', '2', '1234567890123', '0.3')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (float, Decimal)):
        number = float(value)
        if abs(number) < 2**53 and abs(number - round(number)) <= 1e-9 * max(1.0, abs(number)):
            return str(int(value) if value == int(value) else round(number))
        return f"{number:.9g}"
    return f"{type(value).__name__}:{value}"


def main(most_bytes: int) -> None:
    """Answer each job on standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    print("ready", flush=True)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        print(json.dumps(rows(job["setup"], job["query"], job["seconds"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
