"""How many tokens to draft next: as many as pay, by recent agreement and by who else is waiting.

A drafted token pays where the chance that it is accepted is worth more than the time that drafting
and verifying it takes from everybody: tokens per time is what is maximised over the whole batch
(the goodput of TurboSpec, 2406.14066; the marginal rule of the statistics notes, 2.1). Requests in
the queue raise the price of time, since every step makes them wait too.

What goes in is of earlier rounds only: how many drafts were accepted, how many sequences decode and
wait. Never a token that was drafted for the round itself: cutting a draft after looking at what was
drawn bends the output's law (W39 of the wrong shortcuts). There is no clock and no chance here, so
the same rounds give the same lengths. What a seeded request draws does depend on the lengths, as it
does on `num_speculative_tokens`; the law it is drawn from does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

_LOG = logging.getLogger(__name__)

MEMORY = 0.9
"""Weight of what was seen before each further round: some ten rounds are remembered."""

PRIOR_TOKENS = 4.0
"""Tested drafts that the agreement of all requests counts for in one that has its own to show."""

FIRST_AGREEMENT = 0.7
"""What is assumed before anything was drafted."""

PROBE_EVERY = 16
"""Rounds without a draft after which one token is drafted, to learn whether it pays again."""


@dataclass(frozen=True)
class StepCosts:
    """What a step costs, in any one unit; only ratios matter.

    A round over n sequences costs `step` + `sequence` n + `token` for each row that is verified +
    `cell` for each cell of the batch, which is as wide as its longest block + `draft_step` for each
    position that is drafted (by however many: what a drafted token costs by itself is in `token`,
    since each is verified too). The defaults are those of the packaged pair on a CPU, in
    target-only passes of one sequence; `tests/bench/adaptive.py --costs` measures them.
    """

    step: float = 0.91
    sequence: float = 0.02
    token: float = 0.04
    cell: float = 0.03
    draft_step: float = 0.11


LOOKUP_COSTS = StepCosts(draft_step=0.0)
"""Of prompt lookup, which drafts for nothing."""


@dataclass(frozen=True)
class Adaptive:
    """The setting `adaptive` of a speculative config."""

    min_speculative_tokens: int = 0
    costs: StepCosts = StepCosts()


@dataclass
class Agreement:
    """How often drafts were accepted lately: accepted over tested, old rounds fading.

    A draft after the first rejection was never tested and says nothing.
    """

    accepted: float = 0.0
    tested: float = 0.0

    def observe(self, accepted: int, drafted: int) -> None:
        """One verified round."""
        self.accepted = MEMORY * self.accepted + accepted
        self.tested = MEMORY * self.tested + min(accepted + 1, drafted)

    def rate(self, prior: float) -> float:
        """Chance that the next draft is accepted, leaning on `prior` while little is known."""
        return (self.accepted + PRIOR_TOKENS * prior) / (self.tested + PRIOR_TOKENS)


@dataclass(frozen=True)
class LengthChange:
    """A proposal length that differs from the one before, and why."""

    step: int
    """Step of the request, from 0."""
    k: int
    agreement: float
    decoding: int
    waiting: int

    @property
    def reason(self) -> str:
        """In words."""
        if self.k == 0:
            what = "no draft pays"
        else:
            what = "1 draft pays" if self.k == 1 else f"{self.k} drafts pay"
        return (
            f"agreement {self.agreement:.2f}, {self.decoding} decoding, {self.waiting} waiting:"
            f" {what}"
        )


@dataclass
class LengthState:
    """What is kept of one sequence between rounds."""

    agreement: Agreement = field(default_factory=Agreement)
    k: int | None = None
    """The length last chosen, before what is left of the answer cut it."""
    undrafted: int = 0
    """Rounds since it last drafted."""


class ProposalLengths:
    """Chooses every sequence's proposal length, round by round."""

    def __init__(self, settings: Adaptive, k_max: int) -> None:
        self._costs = settings.costs
        self._k_min = settings.min_speculative_tokens
        self._k_max = k_max
        self._all = Agreement()

    def observe(self, state: LengthState, accepted: int, drafted: int) -> None:
        """A sequence's round was verified; drafted is what was tested, be it less than chosen."""
        if drafted:
            state.agreement.observe(accepted, drafted)
            self._all.observe(accepted, drafted)
            state.undrafted = 0
        else:
            state.undrafted += 1

    def choose(
        self, states: Seq[LengthState], limits: Seq[int], n_waiting: int, steps: Seq[int]
    ) -> tuple[list[int], list[LengthChange | None]]:
        """Lengths of the next round, and for each sequence the change to report, if any.

        limits: what each sequence may draft at most (its own k, what is left of its answer).
        steps: how many steps each has made, for the report.
        """
        prior = self._all.rate(FIRST_AGREEMENT)
        # Who may not draft takes part as a cost only.
        rates = [
            state.agreement.rate(prior) if limit else 0.0
            for state, limit in zip(states, limits, strict=True)
        ]
        best = self._best(rates, n_waiting)
        lengths: list[int] = []
        changes: list[LengthChange | None] = []
        for i, (state, limit) in enumerate(zip(states, limits, strict=True)):
            if limit == 0:
                lengths.append(0)
                changes.append(None)
                continue
            k = max(best[i], self._k_min)
            if k == 0 and state.undrafted >= PROBE_EVERY:
                k = 1
            lengths.append(min(k, limit))
            change = None
            if k != state.k:
                change = LengthChange(steps[i], k, round(rates[i], 3), len(states), n_waiting)
                _LOG.debug("proposal length %d: %s", k, change.reason)
            state.k = k
            changes.append(change)
        return lengths, changes

    def _best(self, rates: Seq[float], n_waiting: int) -> list[int]:
        """Lengths up to k_max that give the most tokens per time over the batch.

        By Dinkelbach's iteration: at a price of time, a position is drafted where its gain is worth
        its time; the batch that results sets the price anew. A position is opened for all or for
        none of those it is worth it for, since opening it costs in itself.
        """
        costs, n = self._costs, len(rates)
        fixed = costs.step + (costs.sequence + costs.token + costs.cell) * n
        opening = costs.draft_step + costs.cell * n
        chances = np.cumprod(np.repeat(np.array(rates)[:, None], self._k_max, axis=1), axis=1)
        crowd = 1 + n_waiting / n
        rate = n / fixed
        lengths = np.zeros(n, np.int64)
        for _ in range(8):
            price = rate * crowd
            pays = chances > price * costs.token
            gains = np.where(pays, chances, 0.0).sum(axis=0)
            times = np.where(pays.any(axis=0), opening + costs.token * pays.sum(axis=0), np.inf)
            surplus = np.cumsum(gains - price * times)
            width = int(surplus.argmax()) + 1 if surplus.max() > 0 else 0
            chosen = pays[:, :width].sum(axis=1)
            rate = (n + gains[:width].sum()) / (fixed + times[:width].sum())
            if np.array_equal(chosen, lengths):
                break
            lengths = chosen
        found: list[int] = lengths.tolist()
        return found
