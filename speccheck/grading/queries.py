"""A model's SQL, run in a throw-away in-memory DuckDB that may touch nothing else.

It runs in a process of its own (`sqlworker`), which is kept for the next query and ended where a
query does not end by itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccheck.errors import SpeccheckError, UsageError
from speccheck.grading.grade import PASSED, Grade, failed, need, shown, unfenced

TIME_LIMIT_S = 5.0
"""Wall clock of one query; a timeout is a fail."""

_PATIENCE = 2.0
"""Time limits after which a query that takes no interrupt is ended with its process."""

_START_S = 60.0
"""How long a process may take to start, on a machine that does much else."""

_PROCESS_BYTES = 2 * 2**30

Rows = tuple[tuple[str, ...], ...]


def gold_rows(check: Mapping[str, Any]) -> Rows:
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
    expected = gold_rows(check)
    # A lone surrogate (half a character that a model may emit) has no UTF-8 form.
    query = unfenced(text).encode(errors="replace").decode()
    found, problem = _rows(str(check["setup"]), query)
    if problem:
        return failed(problem)
    ordered = orders(str(check["gold"]))
    if found == expected or (not ordered and Counter(found) == Counter(expected)):
        return PASSED
    if Counter(found) == Counter(expected):
        return failed(f"the right {len(found)} rows in the wrong order")
    return failed(
        f"{len(found)} rows for {len(expected)}; first {shown(found[:1])} for {shown(expected[:1])}"
    )


_NO_CODE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)


def orders(query: str) -> bool:
    """Whether a query orders its rows: by its own ORDER BY, not by that of a window or subquery.

    >>> orders("SELECT a FROM t ORDER BY a"), orders("SELECT rank() OVER (ORDER BY a) FROM t")
    (True, False)
    """
    query = _NO_CODE.sub(" ", query)
    inner = 1
    while inner:
        query, inner = re.subn(r"\([^()]*\)", " ", query)
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None


# --- the process --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _rows(setup: str, query: str) -> tuple[Rows, str]:
    """Rows of one SELECT, or the problem. Cached, since both arms usually give the same query."""
    job = json.dumps({"setup": setup, "query": query, "seconds": TIME_LIMIT_S})
    answer = _PROCESS.ask(job)
    if answer is not None and "Memory" in answer:
        # Earlier queries may have used it up: what this one needs shows in a fresh process alone.
        _PROCESS.close()
        answer = _PROCESS.ask(job)
    if answer is None:
        return (), "the query ended the process that ran it"
    rows, problem = json.loads(answer) if answer else ((), "timeout")
    if problem == "timeout":
        return (), f"the query ran over {TIME_LIMIT_S:g} s"
    if problem.startswith("the query fails: "):
        problem = f"the query fails: {shown(problem.removeprefix('the query fails: '))}"
    return tuple(map(tuple, rows)), problem


class _Process:
    """The running `sqlworker`, started when it is first asked; one question at a time."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[str] | None = None
        self._asking = threading.Lock()

    def ask(self, job: str) -> str | None:
        """Its answer to a job, a line; empty where it was ended after the time limit, None where it
        ended by itself.
        """
        with self._asking:
            child = self._running
            if child is None or child.poll() is not None:
                child = self._started()
            try:
                child.stdin.write(job + "\n")  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                answer, ended = "", False
            else:
                answer, ended = _line(child, _PATIENCE * TIME_LIMIT_S)
            if not answer:
                self._end()
            return answer or ("" if ended else None)

    def _started(self) -> subprocess.Popen[str]:
        self._end()
        self._running = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(_PROCESS_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            encoding="utf-8",
        )
        if not _line(self._running, _START_S)[0]:
            self._end()
            raise SpeccheckError(f"{_PROGRAM}: the process that runs SQL does not start")
        return self._running

    def _end(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None

    def close(self) -> None:
        """End it, if it runs."""
        with self._asking:
            self._end()


def _line(child: subprocess.Popen[str], seconds: float) -> tuple[str, bool]:
    """The next line of a process, and whether it was ended because none came in time."""
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    line = child.stdout.readline()  # type: ignore[union-attr]
    timer.cancel()
    return line, late.is_set()


_PROGRAM = Path(__file__).with_name("sqlworker.py")
_PROCESS = _Process()
atexit.register(_PROCESS.close)
