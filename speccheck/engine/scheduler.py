"""Who runs, in which cache row, and whose prompt is processed next. No model, no clock, no text.

Rows 0..n_decoding hold decoding sequences, the rows after them sequences whose prompt is still
being read, with no gaps: a decode step is then one slice of the cache. When a sequence leaves or
starts to decode, at most two others move.

Order is by priority (lower first, as in vLLM), then arrival. Decoding is never held up by more
than one step's share of prompt tokens, and a running sequence is never evicted: every admitted
request finishes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler knows of a sequence."""

    row: int
    """Cache row while running, -1 before and after."""
    order: tuple[int, int]
    """(priority, arrival), set by the scheduler; smaller goes first."""
    n_prefilled: int
    """Prompt tokens whose keys are cached."""

    @property
    def priority(self) -> int:
        """Lower goes first."""

    @property
    def n_prompt(self) -> int:
        """Prompt tokens."""


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True)
class PrefillChunk(Generic[S]):
    """Process `n_tokens` prompt tokens of `sequence`, from its `n_prefilled` on."""

    sequence: S
    n_tokens: int


@dataclass
class Scheduler(Generic[S]):
    """Admission, rows and prompt chunks. `move(source, target)` copies a cache row.

    `n_rows` sequences run at most; `chunk_tokens` prompt tokens are processed per step while
    something decodes, `idle_chunk_tokens` otherwise.
    """

    n_rows: int
    move: Callable[[int, int], None]
    chunk_tokens: int = 128
    idle_chunk_tokens: int = 512
    rows: list[S] = field(default_factory=list)
    n_decoding: int = 0
    _waiting: list[tuple[tuple[int, int], S]] = field(default_factory=list)
    _arrivals: int = 0

    @property
    def n_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    @property
    def decoding(self) -> list[S]:
        """Sequences in rows 0..n_decoding, in row order."""
        return self.rows[: self.n_decoding]

    def add(self, sequence: S) -> None:
        """Queue a new sequence."""
        sequence.order = (sequence.priority, self._arrivals)
        self._arrivals += 1
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def admit(self) -> Iterator[S]:
        """Give free rows to waiting sequences, first in order first; yields those admitted."""
        while self._waiting and len(self.rows) < self.n_rows:
            _, sequence = heapq.heappop(self._waiting)
            sequence.row = len(self.rows)
            self.rows.append(sequence)
            yield sequence

    def prefill_chunks(self) -> list[PrefillChunk[S]]:
        """Prompt processing of one step, first in order first."""
        budget = self.chunk_tokens if self.n_decoding else self.idle_chunk_tokens
        chunks = []
        for sequence in sorted(self.rows[self.n_decoding :], key=lambda s: s.order):
            if budget <= 0:
                break
            n_tokens = min(budget, sequence.n_prompt - sequence.n_prefilled)
            chunks.append(PrefillChunk(sequence, n_tokens))
            budget -= n_tokens
        return chunks

    def start_decoding(self, sequence: S) -> None:
        """The prompt is read: move the sequence to the end of the decoding rows."""
        self._exchange(sequence.row, self.n_decoding)
        self.n_decoding += 1

    def remove(self, sequence: S) -> None:
        """Free the row of a running sequence, or the place of a waiting one, at once."""
        if sequence.row < 0:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
            return
        hole = sequence.row
        if hole < self.n_decoding:
            self.n_decoding -= 1
            self._fill(hole, self.n_decoding)
            hole = self.n_decoding
        self._fill(hole, len(self.rows) - 1)
        self.rows.pop()
        sequence.row = -1

    def _fill(self, hole: int, source: int) -> None:
        """Move the sequence of row `source` into row `hole`, whose content is not needed."""
        if hole != source:
            self.move(source, hole)
            self.rows[hole] = self.rows[source]
            self.rows[hole].row = hole

    def _exchange(self, a: int, b: int) -> None:
        """Exchange two rows, through the row after the last (the cache keeps one spare)."""
        if a != b:
            spare = self.n_rows
            self.move(a, spare)
            self.move(b, a)
            self.move(spare, b)
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            self.rows[a].row, self.rows[b].row = a, b
