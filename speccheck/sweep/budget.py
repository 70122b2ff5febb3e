"""Which load of a sweep takes its next round, so that a budget goes where verdicts are open.

First every load gets a small pass, one round after the other, so that nothing is left unseen. Then
the load that can be settled soonest goes first: rounds until its next look or until the pairs its
nearest open cell needs, times what one of its rounds takes. Settling the cheap ones first settles
the most cells in the time there is; a cell whose value sits on its limit can eat a budget whole and
comes last.

Pure: records in, a name out. Time left is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ROUNDS = 2
"""Rounds of the small pass over all loads: the fewest that give an interval."""

MAX_VOID = 3
"""Void rounds (our own client was late) over valid ones at which a load is given up."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one load is. Its order among the others is its place in the sequence."""

    name: str
    rounds: int
    """Valid rounds done."""
    void: int
    """Rounds done and left out."""
    round_s: float | None
    """What its last round took; None before the first."""
    pairs_per_round: int
    needed: tuple[int | None, ...]
    """Further pairs of each cell that was open at the last look; None where that cannot be said.
    Empty when every cell is decided."""
    wanted_rounds: int | None = None
    """For a load that is no cell (calibration): as many rounds as it wants, no verdict."""


def next_load(standings: Sequence[Standing], *, left_s: float) -> str | None:
    """The name of the load whose round comes next; None where all is decided or time is up.

    A round that is expected to take longer than `left_s` is not begun; one that was never timed is.
    """
    if not left_s > 0:
        return None
    able = [
        s
        for s in standings
        if s.void - s.rounds < MAX_VOID and (s.round_s is None or s.round_s <= left_s)
    ]
    unseen = [s for s in able if s.rounds < min(FIRST_ROUNDS, s.wanted_rounds or FIRST_ROUNDS)]
    if unseen:
        return min(unseen, key=lambda s: s.rounds + s.void).name
    wanting = [s for s in able if s.wanted_rounds is not None and s.rounds < s.wanted_rounds]
    if wanting:
        return min(wanting, key=lambda s: s.rounds).name
    still_open = [s for s in able if s.wanted_rounds is None and s.needed]
    if not still_open:
        return None
    return min(still_open, key=_cost).name


def next_look(rounds: int) -> int:
    """Rounds at which a load of so many is looked at next: 2, 4, 8 ...

    >>> [next_look(rounds) for rounds in (0, 1, 2, 3, 4, 7, 8)]
    [2, 2, 4, 4, 8, 8, 16]
    """
    return max(FIRST_ROUNDS, 1 << rounds.bit_length())


def last_look(rounds: int) -> int:
    """The most rounds that a look was taken at, out of so many; 0 before the first look.

    >>> [last_look(rounds) for rounds in (0, 1, 2, 3, 4, 7, 8)]
    [0, 0, 2, 2, 4, 4, 8]
    """
    return 1 << rounds.bit_length() - 1 if rounds >= FIRST_ROUNDS else 0


def _cost(s: Standing) -> tuple[float, float]:
    """Seconds until its nearest open cell is expected to be decided, then until its next look."""
    seconds = s.round_s or 0.0
    to_look = next_look(s.rounds) - s.rounds
    known = [needed for needed in s.needed if needed is not None]
    if not known:
        return math.inf, to_look * seconds
    since_look = s.rounds - last_look(s.rounds)
    rounds = math.ceil(min(known) / s.pairs_per_round) - since_look
    return max(to_look, rounds) * seconds, to_look * seconds
