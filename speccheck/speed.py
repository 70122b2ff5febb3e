"""The arithmetic of speed: what a verify step brings, what it costs, what is saved.

From Leviathan et al. 2023, with two things their formula leaves out: the bonus token after a block
that stands whole, and a verify step that costs more than a plain one, which is the case on every
busy machine and the reason why speculation stops paying under load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from speccheck.records import Receipt


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in target-equivalent passes: one plain decode step at the same batch size is 1.

    `draft` is one draft step; `verify` is a verify step, per proposal length (1 for k = 0);
    `rollback` is what a round costs besides (state rollback, catch-up pass, bookkeeping).
    """

    draft: float
    verify: Mapping[int, float]
    rollback: float = 0.0

    def verify_at(self, drafted: float) -> float:
        """A verify step of `drafted` tokens, which may be a mean: V is 1 at 0 and linear between
        the calibrated proposal lengths.

        Raises:
            KeyError: more tokens than calibrated for; nothing is claimed beyond.
        """
        points = sorted({0: 1.0, **self.verify}.items())
        if drafted > points[-1][0]:
            raise KeyError(drafted)
        return float(np.interp(drafted, [k for k, _ in points], [cost for _, cost in points]))


def break_even_acceptance(k: int, costs: Costs) -> float:
    """Accepted/drafted at which speculation neither gains nor loses at proposal length k."""
    return (k * costs.draft + costs.verify[k] - 1 + costs.rollback) / k


def saved_passes(accepted: float, drafted: float, rounds: float, k: float, costs: Costs) -> float:
    """Modelled saved passes: accepted - drafting - extra verification - rollback (STATS 2.2).

    The correction or bonus token of a round is paid for by the round's own pass, so it is never
    saved. All in target-equivalent passes; `accepted` counts delivered tokens only, `k` is what a
    round drafts, on average.

    Raises:
        KeyError: the verify step is not calibrated as far as k.
    """
    extra = costs.verify_at(k) - 1 + costs.rollback
    return accepted - costs.draft * drafted - extra * rounds


@dataclass(frozen=True, slots=True)
class Work:
    """What completed speculative requests did after their first token, summed over requests.

    Each pass of the target delivers one token of its own, so tokens = accepted + passes: what the
    verifier accepted and a stop then cut off is in neither.
    """

    n: int
    """Requests."""
    tokens: int
    """Delivered decode tokens, the first of each answer left out."""
    passes: int
    """Decode passes of the target, verify steps included."""
    drafted: int
    rounds: int
    """Verify steps."""
    decode_s: float
    """First to last token."""

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted and delivered."""
        return self.tokens - self.passes

    def saved(self, costs: Costs) -> float:
        """Modelled saved target passes, see `saved_passes`.

        Raises:
            KeyError: the verify step is not calibrated as far as was drafted.
        """
        if not self.rounds:
            return float(self.accepted)
        k = self.drafted / self.rounds
        return saved_passes(self.accepted, self.drafted, self.rounds, k, costs)

    def saved_measured(self, target_step_s: float) -> float:
        """Measured: tokens, less the decode time in target-only steps of the same load."""
        return self.tokens - self.decode_s / target_step_s


def work(receipts: Iterable[Receipt]) -> Work:
    """Sum over the receipts that carry tokens, passes and times; `n` says how many those are."""
    known = [
        (r, r.tpot_s, r.completion_tokens - 1, r.target_passes)
        for r in receipts
        if r.tpot_s is not None and r.completion_tokens is not None and r.target_passes
    ]
    return Work(
        n=len(known),
        tokens=sum(tokens for _, _, tokens, _ in known),
        passes=sum(passes for *_, passes in known),
        drafted=sum(r.proposed_tokens or 0 for r, *_ in known),
        rounds=sum(r.verify_steps or 0 for r, *_ in known),
        decode_s=sum(tpot_s * tokens for _, tpot_s, tokens, _ in known),
    )
