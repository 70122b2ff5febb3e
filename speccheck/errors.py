"""What can go wrong, as one small family.

Everything the user can mend is a `SpeccheckError`; its message says what is wrong, where, and what
to do next, in one line. `cli.main` is the one place that turns it into that line and an exit code.
Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every command; the README's table is generated from here."""

    PASS = 0
    JUDGED_BAD = 1
    USAGE = 2
    INCONCLUSIVE = 3
    COULD_NOT_JUDGE = 4
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """One line for a person who was paged."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.PASS: "promote, or the stage passed",
    ExitCode.JUDGED_BAD: "judged bad: hold or fall back, or an incomplete packet",
    ExitCode.USAGE: "usage or configuration error; nothing was sent",
    ExitCode.INCONCLUSIVE: "inconclusive: more evidence is needed, the text says how much",
    ExitCode.COULD_NOT_JUDGE: "could not judge: no data, or a server, client or store failed",
    ExitCode.INTERRUPTED: "interrupted; run the same command again to resume",
}


class SpeccheckError(Exception):
    """Base of all errors a user can mend. Raised as it is only where no child fits."""

    exit_code = ExitCode.COULD_NOT_JUDGE


class UsageError(SpeccheckError):
    """A wrong option, file, rule, corpus or table. Found before the first request is sent."""

    exit_code = ExitCode.USAGE


class EngineError(SpeccheckError):
    """A server that does not start, does not answer, or is not what it should be."""


class StoreError(SpeccheckError):
    """The receipt store is locked, unreadable, read-only, full or from another version."""


class StoreHeldError(StoreError):
    """Another process has the store open; a gateway that writes has it for a moment only."""
