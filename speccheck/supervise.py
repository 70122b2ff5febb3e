"""Run a command so that it cannot outlive whoever started it: `python -m speccheck.supervise`.

vLLM's servers are several processes and know nothing of the program that started them. This one
stands between: it ends with its parent, even where that was killed (the kernel tells it), and takes
the whole process group of the command with it. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
GRACE_S = 15.0
"""How long the command may take to end by itself; vLLM's engine frees its memory in that time."""


ENDED = "speccheck.supervise: the server ended with "
"""Begins the line in its log that says so; its workers may take seconds more."""


def described(code: int) -> str:
    """An exit code of `subprocess` in words."""
    return f"signal {-code}" if code < 0 else f"code {code}"


def main(argv: Sequence[str]) -> int:
    """Run `argv[1:]` until it ends, or the process `argv[0]`, our parent, does."""
    parent = int(argv[0])
    signal.signal(signal.SIGTERM, _ended)
    signal.signal(signal.SIGINT, _ended)
    _end_with_parent()
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # it ended before the kernel was told
    child = subprocess.Popen(argv[1:], process_group=0, preexec_fn=_end_with_parent)  # noqa: PLW1509
    try:
        code = child.wait()
        print(f"{ENDED}{described(code)}", file=sys.stderr, flush=True)
        return code
    finally:
        # Also where it ended by itself: a server that was killed leaves its engine behind, with the
        # memory that the next one needs.
        _stop_group(child)


def _ended(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop_group(child: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # a second one would leave the job half done
    if not _signal(child.pid, signal.SIGTERM):
        return
    deadline = time.monotonic() + GRACE_S
    while _signal(child.pid, 0) and time.monotonic() < deadline:
        child.poll()  # a zombie would keep its group alive
        time.sleep(0.05)
    _signal(child.pid, signal.SIGKILL)  # what is left of the group, workers included
    child.wait()


def _signal(group: int, signum: int) -> bool:
    """Signal a process group; whether anybody was left in it."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
