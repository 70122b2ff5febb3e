"""Negative controls: wrong verifiers that the fixture's checks must catch, each a real mistake.

A check that never failed proves little, so a packet shows these beside the verdict. Each overrides
one piece of a right verifier or decoding loop; nothing here is ever served.
"""

from dataclasses import dataclass

import numpy as np

from speccheck.law import Decoding
from speccheck.verifier import Block, Row, Step, Token, Verifier


class ResampleFromTarget(Token):
    """After a rejection draws from p instead of the residual: the rejected token may come back."""

    def final(self, step: Step, tau: int) -> Row:
        """The target row in every case."""
        return step.row(tau)


class ResidualNotNormalised(Token):
    """Draws from max(0, p - q) as if it summed to 1: u past its mass falls to the last id."""

    def final(self, step: Step, tau: int) -> Row:
        """The weights as they are, the missing mass on the last id."""
        if tau == step.k:
            return step.row(tau)
        weights = self.residual(step, tau).copy()
        weights[-1] += 1 - weights.sum()
        return weights


class BonusFromDraft(Token):
    """Draws the bonus token from the draft's row: the right shape, the wrong model."""

    def final(self, step: Step, tau: int) -> Row:
        """The draft row after a whole block that stands."""
        return np.asarray(step.q[tau]) if tau == step.k > 0 else super().final(step, tau)


class Lenience(Token):
    """Accepts with min(1, p/(0.8 q)): Leviathan's lenience, lossy by design."""

    def accept_probs(self, step: Step) -> Row:
        """min(1, p/(l q)), l = 4/5."""
        ratio = step.at_draft(step.p) / step.at_draft(step.q)
        return np.asarray(np.minimum(1, ratio * 5 / 4))


class BlockWithTokenResidual(Block):
    """Block acceptance, then the residual of token verification: P_tau forgotten."""

    def residual(self, step: Step, tau: int) -> Row:
        """max(0, p - q), without the path weight."""
        return Token().residual(step, tau)


class KeepSuffix(Decoding):
    """Replaces a rejected token and goes on with the drafts after it: D kept after rejecting C.

    They are accepted or corrected in rows that were computed after the rejected token.
    """

    def tail(self, step: Step, tau: int) -> list[Row]:
        """The correction, then a law for each later draft: it stands with h, else corrected."""
        laws = super().tail(step, tau)
        h = self.verifier.accept_probs(step)
        for i in range(tau + 1, step.k):
            law = (1 - h[i]) * self.verifier.final(step, i)
            law[step.x[i]] += h[i]
            laws.append(law)
        return laws


@dataclass(frozen=True)
class NegativeControl:
    """A wrong decoding loop, and the right one that it should have been."""

    name: str
    mistake: str
    """One sentence."""
    loop: type[Decoding]
    verifier: Verifier
    right: Verifier


NEGATIVE_CONTROLS: tuple[NegativeControl, ...] = (
    NegativeControl(
        "resample from p",
        "after a rejection the token is drawn from the target row, not from the residual",
        Decoding,
        ResampleFromTarget(),
        Token(),
    ),
    NegativeControl(
        "residual not normalised",
        "max(0, p - q) is drawn from as if it summed to 1",
        Decoding,
        ResidualNotNormalised(),
        Token(),
    ),
    NegativeControl(
        "bonus from q",
        "the bonus token is drawn from the draft's row",
        Decoding,
        BonusFromDraft(),
        Token(),
    ),
    NegativeControl(
        "suffix kept",
        "drafts after a rejected token stay, tested in rows that saw the rejected token",
        KeepSuffix,
        Token(),
        Token(),
    ),
    NegativeControl(
        "lenience 0.8",
        "a draft is accepted with min(1, p/(0.8 q))",
        Decoding,
        Lenience(),
        Token(),
    ),
    NegativeControl(
        "block with token residual",
        "block acceptance, but the correction is drawn from norm(max(0, p - q))",
        Decoding,
        BlockWithTokenResidual(),
        Block(),
    ),
)
"""The wrong verifiers that a packet shows."""
