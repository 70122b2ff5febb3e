"""Where proposals come from: a small model, or the request's own earlier text.

Both propose without a look at the verifier's chance, which is what keeps verification lossless.
A drafter may propose fewer tokens than wanted, or none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from speccheck.engine.cache import KVCache
from speccheck.engine.llama import Floats
from speccheck.engine.model import Model
from speccheck.engine.prefix import Block
from speccheck.engine.sampling import Probs, softmax
from speccheck.engine.sequence import Sequence
from speccheck.verifier import Stream, inverse_cdf, uniform


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, and the rows (k, vocab) they were drawn from (None: without chance)."""

    tokens: list[int]
    rows: Probs | None = None


NO_DRAFT = Draft([])


class Drafter(Protocol):
    """What the engine needs of a drafter."""

    def prefill(self, sequence: Sequence, start: int, tokens: Seq[int]) -> None:
        """See prompt tokens start..start+len(tokens) of a running sequence."""

    def propose(self, sequences: Seq[Sequence], wanted: Seq[int]) -> list[Draft]:
        """Up to wanted[i] tokens for the sequence in row i."""

    def kept(self, row: int) -> Floats | None:
        """Its own keys and values of a row whose prompt is read, for the prefix cache; or None."""

    def restore(self, row: int, position: int, block: Block) -> None:
        """Take tokens from `position` on from the prefix cache instead of seeing them."""

    def move(self, source: int, target: int) -> None:
        """A sequence changes rows."""

    def fit(self, n_tokens: int, n_rows: int) -> None:
        """Make room for `n_tokens` in each of the first `n_rows` rows."""


class ModelDrafter:
    """Drafts with a small model that has a cache of its own, row for row with the target's.

    After a round the cache holds keys of rejected tokens; `Sequence.draft_len` says how much of it
    is still right, and the next round starts with what is missing: one token after a rejection,
    two after a fully accepted draft (the last drafted token was never fed).
    """

    def __init__(self, folder: Path, n_rows: int, *, probabilistic: bool) -> None:
        """`probabilistic` draws from softmax(logits / temperature) and keeps the rows, else argmax.

        Raises EngineError when the model cannot be run.
        """
        self.model = Model(folder)
        self._cache = KVCache(self.model.config, n_rows)
        self._probabilistic = probabilistic

    def prefill(self, sequence: Sequence, start: int, tokens: Seq[int]) -> None:
        """See `Drafter`."""
        self.model.forward(self._cache, sequence.row, [start], [tokens], last_only=True)
        sequence.draft_len = start + len(tokens)

    def propose(self, sequences: Seq[Sequence], wanted: Seq[int]) -> list[Draft]:
        """See `Drafter`. One forward pass per position, over all sequences that still draft."""
        tokens: list[list[int]] = [[] for _ in sequences]
        rows: list[list[Probs]] = [[] for _ in sequences]
        new = [
            sequence.ids[sequence.draft_len :] if k else []
            for sequence, k in zip(sequences, wanted, strict=True)
        ]
        past = [sequence.draft_len for sequence in sequences]
        for position in range(max(wanted)):
            logits = self.model.forward(self._cache, 0, past, new, last_only=True)
            active = [i for i, k in enumerate(wanted) if k > position]
            chosen = self._choose(logits, [sequences[i] for i in active], position)
            for i, fed in enumerate(new):
                past[i] += len(fed)
            new = [[] for _ in sequences]
            for i, (token, row) in zip(active, chosen, strict=True):
                tokens[i].append(token)
                if row is not None:
                    rows[i].append(row)
                if wanted[i] > position + 1:
                    new[i] = [token]
        for sequence, length in zip(sequences, past, strict=True):
            sequence.draft_len = length
        return [
            Draft(drafted, np.stack(row) if row else None)
            for drafted, row in zip(tokens, rows, strict=True)
        ]

    def _choose(
        self, logits: np.ndarray, sequences: Seq[Sequence], position: int
    ) -> list[tuple[int, Probs | None]]:
        """The token drafted after each row of logits, and the row it was drawn from if any."""
        chosen: list[tuple[int, Probs | None]] = [(t, None) for t in logits.argmax(axis=1).tolist()]
        if not self._probabilistic:
            return chosen
        drawn = [i for i, sequence in enumerate(sequences) if not sequence.request.params.greedy]
        if not drawn:
            return chosen
        temperatures = np.array([sequences[i].request.params.temperature for i in drawn])
        for i, row in zip(drawn, softmax(logits[drawn], temperatures), strict=True):
            u = uniform(sequences[i].seed, Stream.DRAFT, sequences[i].stats.n_steps, position)
            chosen[i] = (inverse_cdf(row, u), row)
        return chosen

    def kept(self, row: int) -> Floats | None:
        """See `Drafter`."""
        return self._cache.row(row)

    def restore(self, row: int, position: int, block: Block) -> None:
        """See `Drafter`."""
        if block.draft is not None:
            self._cache.write(row, position, block.draft)

    def move(self, source: int, target: int) -> None:
        """See `Drafter`."""
        self._cache.move(source, target)

    def fit(self, n_tokens: int, n_rows: int) -> None:
        """See `Drafter`."""
        self._cache.fit(n_tokens, n_rows)


class NgramDrafter:
    """Prompt lookup: what followed the last n tokens when they occurred first, longest n first.

    As vLLM's `ngram`: no match, no draft. The index of a sequence grows with it, so a proposal
    costs a few dictionary look-ups however long the text is.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """`shortest` and `longest` are prompt_lookup_min and prompt_lookup_max (tokens)."""
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[str, NgramIndex] = {}

    def prefill(self, sequence: Sequence, start: int, tokens: Seq[int]) -> None:
        """Nothing to do: the index is built on the first proposal."""

    def propose(self, sequences: Seq[Sequence], wanted: Seq[int]) -> list[Draft]:
        """See `Drafter`."""
        known = self._indices
        self._indices = {  # sequences that left are forgotten here
            sequence.request.request_id: known.get(sequence.request.request_id)
            or NgramIndex(self._sizes)
            for sequence in sequences
        }
        return [
            Draft(self._indices[sequence.request.request_id].follow(sequence.ids, k))
            if k
            else NO_DRAFT
            for sequence, k in zip(sequences, wanted, strict=True)
        ]

    def kept(self, row: int) -> Floats | None:  # noqa: ARG002
        """None: nothing is kept by row."""
        return None

    def restore(self, row: int, position: int, block: Block) -> None:
        """Nothing to do: nothing is kept by row."""

    def move(self, source: int, target: int) -> None:
        """Nothing to do: nothing is kept by row."""

    def fit(self, n_tokens: int, n_rows: int) -> None:
        """Nothing to do: nothing is kept by row."""


class NgramIndex:
    """Where each n-gram of one sequence first ended, for the sizes asked."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def follow(self, ids: Seq[int], k: int) -> list[int]:
        """Up to k tokens that followed the longest known n-gram at the end of `ids`."""
        for end in range(self._n_indexed + 1, len(ids)):  # the last n-gram has no follower yet
            for n in self._sizes:
                if n <= end:
                    self._ends.setdefault(tuple(ids[end - n : end]), end)
        self._n_indexed = max(self._n_indexed, len(ids) - 1)
        for n in self._sizes:
            start = self._ends.get(tuple(ids[-n:])) if n <= len(ids) else None
            if start is not None:
                return list(ids[start : start + k])
        return []
