"""Receipts on their way from the workers to the store: bounded everywhere, every loss counted.

A worker writes lines into a socket; what the parent has not read yet waits in the worker's buffer,
which has a limit. The parent keeps what the store has not taken yet in a queue with a limit, and
opens the store only while it writes, so that others can read it in between. Whatever is full, a
request never waits.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from speccheck.errors import SpeccheckError
from speccheck.records import Answer, Arm, Receipt, Transition
from speccheck.store import RecordedTransition, Store
from speccheck.telemetry import Snapshot

MOST_WAITING_BYTES = 4 << 20
"""Of one worker, while the parent does not read."""
MOST_KEPT_BYTES = 512 << 20
"""Of all workers, while the store takes nothing: with prompts, a receipt may be megabytes."""
LONGEST_LINE = 64 << 20
"""Of one receipt and its answer; the parent takes no longer one."""
_BATCH = 500

Written = tuple[Receipt, Answer | None]


@dataclass(frozen=True, slots=True)
class Moved:
    """A transition with the wall clock, and the digest of the settings that it was decided by."""

    transition: Transition
    wall_ns: int
    settings: str


class Outbox(Protocol):
    """Where a worker's receipts go."""

    def put(self, receipt: Receipt, answer: Answer | None) -> None:
        """Take it or lose it, at once."""


class SocketOutbox:
    """The worker's end."""

    def __init__(self, transport: asyncio.WriteTransport, lost: Callable[[int], None]) -> None:
        """`lost` is told how many receipts did not fit."""
        self._transport = transport
        self._lost = lost

    def put(self, receipt: Receipt, answer: Answer | None) -> None:
        """Write it, or count it as lost where it is too long, or the parent is behind or gone."""
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self._lost(1)
            return
        line = line_of(receipt, answer)
        if len(line) > LONGEST_LINE:
            self._lost(1)
            return
        transport.write(line)


def line_of(receipt: Receipt, answer: Answer | None) -> bytes:
    """One receipt, and its answer, as a line."""
    value = {"receipt": asdict(receipt), "answer": None if answer is None else asdict(answer)}
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def written_of(line: bytes) -> Written:
    """What `line_of` wrote."""
    value = json.loads(line)
    receipt: dict[str, Any] = value["receipt"]
    receipt["warnings"] = tuple(receipt["warnings"])
    if receipt["acceptance_histogram"] is not None:
        receipt["acceptance_histogram"] = tuple(receipt["acceptance_histogram"])
    answer = value["answer"]
    if answer is not None:
        for name in ("token_ids", "accepted_per_step", "drafted_per_step"):
            if answer[name] is not None:
                answer[name] = tuple(answer[name])
    return Receipt(**receipt), None if answer is None else Answer(**answer)


class Writer:
    """The parent's end: a thread that writes what waits, and tries again where it cannot."""

    def __init__(
        self,
        path: Path,
        *,
        begin: Callable[[Store], None],
        limit: int,
        every_s: float,
        say: Callable[[str], None],
        rollout: str = "",
        run_id: str = "",
        found: Callable[[list[RecordedTransition], set[str]], None] | None = None,
    ) -> None:
        """A writer that `start` sets going.

        Args:
            path: the store.
            begin: registers the run in it.
            limit: how many receipts may wait.
            every_s: how often they are written.
            say: told, from the thread, when writing fails and when it works again.
            rollout: whose transitions are kept.
            run_id: the run in which they are written.
            found: told, from the thread, all transitions that the store holds when it was open, and
                the routes that somebody else had moved when we tried to.
        """
        self._path, self._begin, self._limit, self._every_s = path, begin, limit, every_s
        self._say, self._rollout, self._run_id, self._found = say, rollout, run_id, found
        self._moves: deque[Moved] = deque()
        self._samples: deque[tuple[Arm, Snapshot]] = deque()
        self._changed_ns = 0
        """When the store's file was last changed, as far as we know of it."""
        self._waiting: deque[Written] = deque()
        self._sizes: deque[int] = deque()
        self._bytes = 0
        """Sum of the sizes of what waits."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receipts")
        self._has_begun = False
        self.lost = 0
        self.samples_lost = 0
        self.written = 0
        self.problem = ""
        """Why the store takes nothing just now; empty: it does."""

    @property
    def waiting(self) -> int:
        """Receipts that the store has not taken yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, item: Written, n_bytes: int = 0) -> None:
        """Take a receipt that came as so many bytes, or lose it where too much waits."""
        with self._lock:
            if len(self._waiting) >= self._limit or self._bytes + n_bytes > MOST_KEPT_BYTES:
                self.lost += 1
            else:
                self._waiting.append(item)
                self._sizes.append(n_bytes)
                self._bytes += n_bytes

    def put_transition(self, moved: Moved) -> None:
        """Keep a transition; these are few, and none is lost."""
        with self._lock:
            self._moves.append(moved)

    def put_sample(self, arm: Arm, snapshot: Snapshot) -> None:
        """Keep a scrape, or a mark of the guard, or lose it where too many wait."""
        with self._lock:
            if len(self._samples) >= self._limit:
                self.samples_lost += 1
            else:
                self._samples.append((arm, snapshot))

    def stop(self) -> str:
        """Write what waits, once more, and end; what of it the store did not take, if anything."""
        self._ending.set()
        self._thread.join()
        with self._lock:
            self.lost += len(self._waiting)
            self.samples_lost += len(self._samples)
            self._waiting.clear()
            self._samples.clear()
            parts = [
                (self.lost, f"receipts ({self.written} were written)"),
                (self.samples_lost, "scrapes"),
                (len(self._moves), "transitions"),
            ]
        return ", ".join(f"{n} {what}" for n, what in parts if n)

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self.flush()
            self.flush()
        except Exception as error:
            self.problem = f"nothing is written any more: {type(error).__name__}"
            self._say(self.problem)
            raise

    def flush(self) -> None:
        """Write what waits now."""
        with self._lock:
            batch, moves = list(self._waiting), list(self._moves)
            samples = list(self._samples)
        # Another process may have reset a route.
        is_same = self._has_begun and _changed_ns(self._path) == self._changed_ns
        if is_same and not batch and not moves and not samples:
            return
        try:
            with Store.open(self._path) as store:
                self._begin(store)
                self._has_begun = True
                for at in range(0, len(batch), _BATCH):
                    self._write(store, batch[at : at + _BATCH])
                self._sample(store, samples)
                overtaken = self._move(store, moves)
                rows = store.transitions(self._rollout)
            self._changed_ns = _changed_ns(self._path)
            if self._found is not None:
                self._found(rows, overtaken)
        except SpeccheckError as error:
            if not self.problem:
                self._say(f"receipts wait: {error}")
            self.problem = str(error)
        else:
            if self.problem:
                self._say("receipts are written again")
            self.problem = ""

    def _write(self, store: Store, batch: Sequence[Written]) -> None:
        n_lost = 0
        try:
            store.append_receipts(batch)
        except SpeccheckError:
            raise
        except Exception as error:  # noqa: BLE001 - what no table can hold keeps no others out
            if len(batch) > 1:
                for one in batch:
                    self._write(store, [one])
                return
            n_lost = 1
            self._say(f"a receipt is lost: {type(error).__name__}")
        with self._lock:
            for _ in batch:
                self._waiting.popleft()
                self._bytes -= self._sizes.popleft()
            self.lost += n_lost
        self.written += len(batch) - n_lost

    def _sample(self, store: Store, samples: Sequence[tuple[Arm, Snapshot]]) -> None:
        for arm in Arm:
            store.append_samples(self._run_id, arm, [one for of, one in samples if of is arm])
        with self._lock:
            for _ in samples:
                self._samples.popleft()

    def _move(self, store: Store, moves: Sequence[Moved]) -> set[str]:
        """Write transitions; the routes that somebody else had moved since."""
        overtaken: set[str] = set()
        for moved in moves:
            known = store.transitions(self._rollout, moved.transition.route)
            if moved.transition.route in overtaken or len(known) != moved.transition.seq:
                overtaken.add(moved.transition.route)
            else:
                store.append_transition(
                    self._rollout,
                    moved.transition,
                    run_id=self._run_id,
                    wall_ns=moved.wall_ns,
                    settings=moved.settings,
                )
            with self._lock:
                self._moves.popleft()
        return overtaken


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
