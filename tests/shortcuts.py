"""The wrong shortcuts W01 to W39: verifiers and decoding loops that each get one thing wrong.

Built as the product's own wrong verifiers are, by overriding single pieces; six of them are those.
`CATALOGUE` says what each does to table T4: exact total variation, worst single-position error and
its cell, accepted/drafted and tokens per pass, as printed in the statistics notes (to the printed
digits). They were worked out by a program that shares no code with this one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from speccheck.controls import (
    BlockWithTokenResidual,
    BonusFromDraft,
    KeepSuffix,
    Lenience,
    ResampleFromTarget,
    ResidualNotNormalised,
)
from speccheck.law import Decoding, Drafting, Table
from speccheck.verifier import (
    Block,
    Greedy,
    OneHot,
    Token,
    Verifier,
    norm,
    one_hot,
)


def top(row, n):
    """The n largest entries of a row, the others zeroed."""
    kept = 0 * row
    for token in sorted(range(len(row)), key=lambda t: (-row[t], t))[:n]:
        kept[token] = row[token]
    return kept


def certain(token, like):
    """All mass on one token."""
    return one_hot(np.array([token]), like)[0]


# --- accepting wrongly ---


class AcceptIfLikelier(Token):
    """W02: accept if and only if p >= q."""

    def accept_probs(self, step):
        return (step.at_draft(step.p) >= step.at_draft(step.q)).astype(step.p.dtype)


class AcceptAboveThreshold(Token):
    """W03: accept if and only if p >= 0.20."""

    def accept_probs(self, step):
        return (step.at_draft(step.p) >= Fraction(1, 5)).astype(step.p.dtype)


class TypicalAcceptance(ResampleFromTarget):
    """W04: Medusa's typical acceptance, p > min(0.09, 0.3 exp(-entropy)), then a draw from p."""

    def accept_probs(self, step):
        rows = step.p[: step.k].astype(float)
        entropy = [-sum(p * math.log(p) for p in row if p) for row in rows]
        limit = np.array([min(0.09, 0.3 * math.exp(-h)) for h in entropy])
        return (step.at_draft(rows) > limit).astype(step.p.dtype)


class AcceptWithTarget(Token):
    """W05: accept with p(x), but correct with the residual of the ratio test."""

    def accept_probs(self, step):
        return OneHot().accept_probs(step)


class FreshDrawAfterMismatch(AcceptWithTarget, ResampleFromTarget):
    """W06: sampler match that draws once more after a mismatch."""


class ForgetDroppedDrafts(Token):
    """W09: a drafted token that the claimed q has cut away counts as accepted (p/0)."""

    def accept_probs(self, step):
        pairs = zip(step.at_draft(step.p), step.at_draft(step.q), strict=True)
        h = [min(1, p / q) if q else 1 for p, q in pairs]
        return np.array(h, dtype=step.p.dtype)


class SharedUniform(Token):
    """W14: one uniform for the tests of all positions."""

    def test_sites(self, k):
        return [("accept", 0)] * k


class AcceptUniformInResidual(Token):
    """W15: the uniform of the failed test draws the correction too."""

    def final_sites(self, k):
        return [("accept", tau) for tau in range(k)] + [("final", k)]


class DraftUniformInTest(Token):
    """W16: the uniform that drew the draft tests it too."""

    def test_sites(self, k):
        return [("draft", i) for i in range(k)]


class InvertedRatio(Token):
    """W25: min(1, q/p)."""

    def accept_probs(self, step):
        return np.minimum(1, step.at_draft(step.q) / step.at_draft(step.p))


class GreedyMatch(Token):
    """W28: prefix match against the argmax at temperature 1; only the bonus is sampled."""

    def accept_probs(self, step):
        return Greedy().accept_probs(step)

    def final(self, step, tau):
        return Greedy().final(step, tau) if tau < step.k else step.row(tau)


# --- correcting wrongly ---


class DraftNoiseInResidual(Token):
    """W17: the exponential race that drew the draft token is run again on the residual.

    E_j ~ Exp(1), x = argmin E_j/q_j, y = argmin E_j/r_j with the same E. With a = E_x/q_x, b =
    E_y/r_y = s a the law of y given x is q_x r_y times the integral of 1/D(s)^2 over s > q_y/r_y,
    D(s) = q_x + r_y s + sum over the others of max(q_j, r_j s), divided by q_x.
    """

    def final(self, step, tau):
        if tau == step.k:
            return step.row(tau)
        q, r, x = step.q[tau], super().final(step, tau), step.x[tau]
        law = 0 * q
        for y in np.flatnonzero(r):
            others = [j for j in range(len(q)) if j not in (x, y)]
            kinks = {q[j] / r[j] for j in others if r[j]}
            cuts = [q[y] / r[y], *sorted(s for s in kinks if s > q[y] / r[y])]
            for low, high in zip(cuts, [*cuts[1:], None], strict=True):
                passed = [j for j in others if r[j] and q[j] / r[j] <= low]
                alpha = q[x] + sum(q[j] for j in others if j not in passed)
                beta = r[y] + sum(r[j] for j in passed)
                upper = 0 if high is None else 1 / (beta * (alpha + beta * high))
                law[y] += r[y] * (1 / (beta * (alpha + beta * low)) - upper)
        return law


class ResidualFallsToFirst(Token):
    """W19: residual not normalised, what is left over goes to id 0."""

    def final(self, step, tau):
        if tau == step.k:
            return step.row(tau)
        weights = self.residual(step, tau).copy()
        weights[0] += 1 - weights.sum()
        return weights


class AbsoluteResidual(Token):
    """W20: |p - q|."""

    def residual(self, step, tau):
        return abs(step.p[tau] - step.q[tau])


class SwappedResidual(Token):
    """W21: max(0, q - p)."""

    def residual(self, step, tau):
        return np.maximum(0, step.q[tau] - step.p[tau])


class TruncatedResidual(Token):
    """W22: the residual of the top two of p instead of p."""

    def residual(self, step, tau):
        kept = top(step.row(tau), 2)
        return np.maximum(0, norm(kept, kept) - step.q[tau])


class TargetWithoutRejected(Token):
    """W23: p with the rejected token zeroed, after a soft test."""

    def residual(self, step, tau):
        weights = step.row(tau).copy()
        weights[step.x[tau]] = 0
        return weights


class ArgmaxResidual(Token):
    """W24: the most probable token of the residual, always."""

    def residual(self, step, tau):
        weights = super().residual(step, tau)
        return certain(weights.argmax(), step.p)


class ForcedFromResidual(Token):
    """W38: the block is cut after two tokens and the cut corrected as if it were a rejection."""

    def window(self, step):
        low, high = super().window(step)
        high = high.copy()
        high[2:] = 0 * high[2:]
        return low, high


class ForcedFromTarget(ForcedFromResidual):
    """The right way to W38: after a forced rejection draw from p."""

    def final(self, step, tau):
        return step.row(tau) if tau == 2 else super().final(step, tau)


class DropUnlikelyDraft(Token):
    """W39: a drawn token with q < 0.15 is dropped, and p drawn from in its place."""

    def window(self, step):
        low, high = super().window(step)
        return low, np.where(self.dropped(step), 0 * high, high)

    def final(self, step, tau):
        if tau < step.k and self.dropped(step)[tau]:
            return step.row(tau)
        return super().final(step, tau)

    def dropped(self, step):
        return step.at_draft(step.q).astype(float) < 0.15 - 1e-12


# --- block verification ---


class BlockStopsAtFailure(Block):
    """W32: block tests, but the first failure ends the round."""

    stops_at_first_rejection = True

    def accepted(self, passed):
        return Token().accepted(passed)


class BlockWithoutLookAhead(Block):
    """W33: h_i = P_i."""

    def accept_probs(self, step):
        return np.array(self.path_weights(step)[1:], dtype=step.p.dtype)


# --- drafts that are not what the verifier is told ---


class Sharpened(Drafting):
    """W07: drawn at temperature 0.5, verified with the q of temperature 1."""

    def drawn(self, q, position):
        return norm(q * q, q)


class TopTwoDrawn(Drafting):
    """W08: drawn from the top two, verified with the whole q."""

    def drawn(self, q, position):
        return norm(top(q, 2), q)


class TopTwoClaimed(Drafting):
    """W09: drawn from the whole q, verified with its top two."""

    def claimed(self, q, x):
        return norm(top(q, 2), q)


class ArgmaxDrawn(Drafting):
    """W10: the argmax, verified with the soft q."""

    def drawn(self, q, position):
        return certain(q.argmax(), q)


# --- loops that lose or keep the wrong thing ---


class NoCorrection(Decoding):
    """W11: a rejection commits nothing, the position is drafted again."""

    def tail(self, step, tau):
        return super().tail(step, tau) if tau == step.k else []


class NoBonus(Decoding):
    """W12: a block that stands brings no extra token. Lossless, but wasteful."""

    def tail(self, step, tau):
        return [] if tau == step.k > 0 else super().tail(step, tau)


class BonusAfterRejection(Decoding):
    """W13: the bonus row is drawn from after a correction as well."""

    def tail(self, step, tau):
        bonus = [step.row(step.k)] if tau < step.k else []
        return [*super().tail(step, tau), *bonus]


class ShiftedTarget(Decoding):
    """W27: every row of the target is that of the next position."""

    def target_row(self, state, drafted):
        previous = drafted[-1] if drafted else state.previous
        position = min(state.n + len(drafted) + 2, self.table.horizon)
        return self.table.target_row(position, previous)

    def distinguishes(self, position, previous):
        return True


class RemembersRejected(Decoding):
    """A loop whose next round still has the rejected token in some cache."""

    def commit(self, state, drafted, tau, tail):
        tokens, after = super().commit(state, drafted, tau, tail)
        rejected = drafted[tau] if tau < len(drafted) else None
        return tokens, after._replace(memory=rejected)

    def stale(self, rows, state, drafted):
        previous = drafted[-1] if drafted else state.previous
        if not drafted and state.memory is not None:
            previous = state.memory
        return rows(state.n + len(drafted) + 1, previous)


class StaleDraft(RemembersRejected):
    """W34: the draft's cache keeps the rejected token; the same q is verified. Lossless."""

    def draft_row(self, state, drafted):
        return self.stale(self.table.draft_row, state, drafted)


class StaleDraftFreshClaim(RemembersRejected):
    """W35: drawn from the stale draft row, verified with the fresh one."""

    def drawn_row(self, state, drafted):
        return self.stale(self.table.draft_row, state, drafted)


class StaleTarget(RemembersRejected):
    """W36: the target's cache keeps the rejected token."""

    def target_row(self, state, drafted):
        return self.stale(self.table.target_row, state, drafted)


class NotRolledBack(Decoding):
    """W37: cache lengths are not rolled back, so the next round's rows are those further on."""

    def commit(self, state, drafted, tau, tail):
        tokens, after = super().commit(state, drafted, tau, tail)
        return tokens, after._replace(memory=len(drafted) - tau)

    def target_row(self, state, drafted):
        return self.shifted(self.table.target_row, state, drafted)

    def draft_row(self, state, drafted):
        return self.shifted(self.table.draft_row, state, drafted)

    def shifted(self, rows, state, drafted):
        previous = drafted[-1] if drafted else state.previous
        position = state.n + len(drafted) + 1 + (state.memory or 0)
        return rows(min(position, self.table.horizon), previous)

    def distinguishes(self, position, previous):
        return True


@dataclass(frozen=True)
class Shortcut:
    """A wrong loop and what it does to T4."""

    id: str
    build: Callable[[Table], Decoding]
    tv: str
    worst: str
    """Largest single-position error, and its cell."""
    acceptance: str
    tokens_per_pass: str
    right: Verifier
    """What it should have been."""


def loop(kind, verifier, drafting=None):
    """A builder of a loop on a table."""
    return lambda table: kind(table, verifier, drafting)


def _row(name, build, *printed, right=None):
    return Shortcut(name, build, *printed, Token() if right is None else right)


CATALOGUE = [
    _row("W01", loop(Decoding, ResampleFromTarget()), ".168", ".120 3X", ".600", "2.498"),
    _row("W02", loop(Decoding, AcceptIfLikelier()), ".702", ".450 2B", ".288", "1.613"),
    _row("W03", loop(Decoding, AcceptAboveThreshold()), ".650", ".400 1A", ".400", "2.000"),
    _row("W04", loop(Decoding, TypicalAcceptance()), ".450", ".330 3C", ".759", "3.232"),
    _row("W05", loop(Decoding, AcceptWithTarget()), ".541", ".348 1A", ".134", "1.277"),
    _row("W06", loop(Decoding, FreshDrawAfterMismatch()), ".148", ".119 2B", ".138", "1.288"),
    _row("W07", loop(Decoding, Token(), Sharpened()), ".361", ".233 1A", ".555", "2.295"),
    _row("W08", loop(Decoding, Token(), TopTwoDrawn()), ".520", ".246 1A", ".493", "2.073"),
    _row(
        "W09",
        loop(Decoding, ForgetDroppedDrafts(), TopTwoClaimed()),
        ".301",
        ".210 1A",
        ".463",
        "2.077",
    ),
    _row("W10", loop(Decoding, Token(), ArgmaxDrawn()), ".658", ".400 1A", ".539", "2.222"),
    _row("W11", loop(NoCorrection, Token()), ".265", ".200 3X", ".716", "2.655"),
    _row("W12", loop(NoBonus, Token()), "0", "0", ".594", "1.887"),
    _row("W13", loop(BonusAfterRejection, Token()), ".101", ".052 4A", ".603", "3.163"),
    _row("W14", loop(Decoding, SharedUniform()), ".086", ".046 3C", ".637", "2.660"),
    _row("W15", loop(Decoding, AcceptUniformInResidual()), ".148", ".100 3X", ".594", "2.463"),
    _row("W16", loop(Decoding, DraftUniformInTest()), ".265", ".150 2B", ".660", "2.588"),
    _row("W17", loop(Decoding, DraftNoiseInResidual()), ".028", ".026 4X", ".594", "2.463"),
    _row("W18", loop(Decoding, ResidualNotNormalised()), ".171", ".119 4X", ".594", "2.463"),
    _row("W19", loop(Decoding, ResidualFallsToFirst()), ".270", ".180 3X", ".594", "2.463"),
    _row("W20", loop(Decoding, AbsoluteResidual()), ".295", ".155 4D", ".605", "2.528"),
    _row("W21", loop(Decoding, SwappedResidual()), ".511", ".300 3X", ".615", "2.597"),
    _row("W22", loop(Decoding, TruncatedResidual()), ".082", ".050 2C", ".594", "2.463"),
    _row("W23", loop(Decoding, TargetWithoutRejected()), ".116", ".084 3X", ".595", "2.472"),
    _row("W24", loop(Decoding, ArgmaxResidual()), ".250", ".200 4A", ".594", "2.463"),
    _row("W25", loop(Decoding, InvertedRatio()), ".510", ".300 3C", ".770", "3.405"),
    _row("W26", loop(Decoding, Lenience()), ".129", ".113 2B", ".703", "2.832"),
    _row("W27", loop(ShiftedTarget, Token()), ".676", ".500 1A", ".328", "1.829"),
    _row("W28", loop(Decoding, GreedyMatch()), ".951", ".670 4A", ".203", "1.408"),
    _row("W29", loop(Decoding, BonusFromDraft()), ".093", ".062 5X", ".594", "2.463"),
    _row("W30", loop(KeepSuffix, Token()), ".165", ".165 4D", ".608", "2.952"),
    _row(
        "W31",
        loop(Decoding, BlockWithTokenResidual()),
        ".0098",
        ".0075 3X",
        ".632",
        "2.628",
        right=Block(),
    ),
    _row(
        "W32",
        loop(Decoding, BlockStopsAtFailure()),
        ".384",
        ".207 3X",
        ".388",
        "1.874",
        right=Block(),
    ),
    _row(
        "W33",
        loop(Decoding, BlockWithoutLookAhead()),
        ".164",
        ".089 3C",
        ".720",
        "2.800",
        right=Block(),
    ),
    _row("W34", loop(StaleDraft, Token()), "0", "0", ".591", "2.445"),
    _row("W35", loop(StaleDraftFreshClaim, Token()), ".040", ".025 4X", ".590", "2.436"),
    _row("W36", loop(StaleTarget, Token()), ".165", ".165 4D", ".597", "2.481"),
    _row("W37", loop(NotRolledBack, Token()), ".142", ".065 4A", ".642", "2.739"),
    _row("W38", loop(Decoding, ForcedFromResidual()), ".268", ".230 3X", "-", "1.941"),
    _row("W39", loop(Decoding, DropUnlikelyDraft()), ".325", ".113 2B", "-", "1.776"),
]
"""In the order of the notes. W11 counts only the passes that commit a token."""
