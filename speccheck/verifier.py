"""The verification algorithms of speculative decoding, written to be read beside the papers.

A draft model proposes k tokens, one target pass gives k+1 rows, and a *verifier* decides how many
of the k tokens stand and which one token follows them. Each algorithm here is a small object of
pure pieces:

    accept_probs   h_1..h_k, the chance that each drafted token passes its test
    window         the part of [0, 1) in which the uniform of a test makes it pass, usually [0, h)
    accepted       tau, the number of tokens that stand, from which tests passed
    final          the law of the one token after them: correction if tau < k, bonus if tau = k

The pieces are arithmetic on arrays and nothing else, so they run on float64 rows and on object
arrays of `Fraction` alike. `verify` draws one round through them and is what the embedded engine
calls; `law` sums over them and gives the exact law, so what the fixture proves with `==` is the
code that serves. A wrong shortcut is a subclass that overrides one piece.

Symbols are those of the papers: p target row, q draft row, x drafted token, tau accepted length,
h acceptance probability, norm(w) = w / sum(w). Rows of a round count from 0: p[i] is the target
row that x[i] is tested in, p[k] the bonus row.

Sources: token verification: Leviathan et al. 2023 (arXiv 2211.17192, Algorithm 1), Chen et al.
2023 (2302.01318, Algorithm 2). Block verification: Sun et al. 2024 (2403.10444, Algorithm 2).
Several candidates at one position: SpecInfer (2305.09781), RSD (2402.14160), Sequoia (2402.12374).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from speccheck.errors import SpeccheckError

Row = npt.NDArray[Any]
"""(V,) probabilities of one position: float64, or object holding `Fraction` for exact work."""
Rows = npt.NDArray[Any]
"""(n, V) rows of consecutive positions."""
Ids = npt.NDArray[Any]
"""Token ids."""
Floats = npt.NDArray[np.float64]
Site = tuple[str, int]
"""Which uniform a decision reads: ("draft", i), ("accept", i) or ("final", tau)."""

MASS_TOLERANCE = 1e-3
"""How far from 1 a float row may sum before it is called broken rather than rounded."""


class VerificationError(SpeccheckError):
    """Rows, ids or uniforms no right engine hands over, or a trace that breaks an invariant."""


# ---------------------------------------------------------------------------------------------
# Chance: counter-based uniforms and the inverse CDF


class Stream(IntEnum):
    """What a uniform is for. Separate streams make using one number twice impossible."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    CONTROL = 5


MAX_POSITION = 15
"""The counter is round * 16 + position, so a larger position would repeat the next round's."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _splitmix64(x: int) -> int:
    z = (x + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, stream: int, round_: int, position: int) -> float:
    """The uniform in [0, 1) for (seed, stream, round, position), position in 0..15.

    splitmix64 chained over the counters, 53 bits. Nothing is kept between calls, so a trace can be
    replayed from its seed alone. Raises VerificationError for a position that would collide.

    >>> uniform(0, Stream.DRAFT, 0, 1)
    0.27471265698820735
    >>> uniform(18, Stream.ACCEPT, 0, 2)
    0.3585585779709066
    """
    _check_position(position)
    x = _splitmix64(_splitmix64(seed & _MASK) ^ int(stream))
    return (_splitmix64(x ^ (round_ * 16 + position)) >> 11) * 2.0**-53


def uniforms(seeds: npt.NDArray[Any], stream: int, round_: int, position: int) -> Floats:
    """`uniform` for an (N,) array of seeds at once; the same numbers, bit for bit."""
    _check_position(position)

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        z = x + np.uint64(_GOLDEN)  # array arithmetic wraps modulo 2**64, as the generator wants
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        return z ^ (z >> np.uint64(31))

    x = mix(mix(seeds.astype(np.uint64)) ^ np.uint64(int(stream)))
    x = mix(x ^ np.uint64(round_ * 16 + position))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_position(position: int) -> None:
    if not 0 <= position <= MAX_POSITION:
        raise VerificationError(
            f"position {position} is outside 0..{MAX_POSITION}: its counter would collide with "
            "another round's; count positions within the round"
        )


def inverse_cdf(probs: Row, u: float) -> int:
    """First id whose cumulative sum exceeds u; never an id of zero mass.

    probs: (V,) non-negative, summing to 1 up to rounding. u in [0, 1) is compared relative to the
    sum, and a u that rounding leaves past the end gives the last id that has mass: round-off can
    move a boundary by an ulp but cannot pick an impossible token. Raises VerificationError for a
    row that is not normalised or holds NaN.

    >>> inverse_cdf(np.array([0.25, 0.0, 0.0, 0.0, 0.75]), 0.25)
    4
    """
    cumulative = _cumulative(probs)
    token = int(cumulative.searchsorted(u * cumulative[-1], side="right"))
    return token if token < len(probs) else int(np.flatnonzero(probs)[-1])


def inverse_cdfs(probs: Row, u: Floats) -> Ids:
    """`inverse_cdf` of one row for an (N,) array of uniforms."""
    cumulative = _cumulative(probs)
    tokens = cumulative.searchsorted(u * cumulative[-1], side="right")
    return np.asarray(np.minimum(tokens, np.flatnonzero(probs)[-1]))


def _cumulative(probs: Row) -> Row:
    cumulative: Row = probs.cumsum()
    if not abs(cumulative[-1] - 1) <= MASS_TOLERANCE:  # in this form NaN fails too
        raise VerificationError(
            f"a row to draw from sums to {cumulative[-1]}, not 1: not normalised, or NaN in it"
        )
    return cumulative


# ---------------------------------------------------------------------------------------------
# The algorithms


def norm(w: Row, fallback: Row) -> Row:
    """The weights w divided by their sum; `fallback` if they have none, which takes rounding."""
    total = w.sum()
    return np.asarray(w / total) if total > 0 else fallback


def one_hot(ids: Ids, like: Rows) -> Rows:
    """(n, V) rows with all mass on `ids`, numbers as in `like`: the q of a draft without chance."""
    rows = np.zeros((len(ids), like.shape[-1]), dtype=like.dtype)
    rows[np.arange(len(ids)), ids] = Fraction(1) if like.dtype == object else 1.0
    return rows


@dataclass(frozen=True, slots=True)
class Step:
    """What a verify step sees."""

    p: Rows
    """(k+1, V) target rows after all processing: temperature, penalties, top-k, top-p, masks."""
    q: Rows
    """(k, V) the rows the drafts were *really drawn from*; further rows are not looked at."""
    x: Ids
    """(k,) drafted ids; k = 0 is a target-only step."""

    @property
    def k(self) -> int:
        """Proposal length of this step, in tokens."""
        return len(self.x)

    def row(self, i: int) -> Row:
        """(V,) target row i."""
        return np.asarray(self.p[i])

    def at_draft(self, rows: Rows) -> Row:
        """(k,) entries rows[i, x_i]."""
        return np.asarray(rows[np.arange(len(self.x)), self.x])


class Verifier:
    """One verification algorithm as pure pieces; the module docstring names them."""

    name = ""
    stops_at_first_rejection = True
    """Whether tests after the first failure are left out: their prefix is not committed."""

    def compared(self, step: Step) -> Step:
        """The p and q that are really compared, where they are not those of the step."""
        return step

    def accept_probs(self, step: Step) -> Row:
        """h, (k,): the chance that each drafted token passes its own test."""
        raise NotImplementedError

    def window(self, step: Step) -> tuple[Row, Row]:
        """(low, high), (k,) each: test i passes if and only if low[i] <= u_i < high[i].

        Strict at the top: u is in [0, 1), so h = 0 never passes and h = 1 always does.
        """
        h = self.accept_probs(step)
        return np.zeros_like(h), h

    def accepted(self, passed: Sequence[bool]) -> int:
        """tau, the number of drafted tokens that stand: here those before the first failure."""
        for i, ok in enumerate(passed):
            if not ok:
                return i
        return len(passed)

    def path_weights(self, step: Step) -> list[Any]:
        """P_0..P_k, the factor on p in the residual after x[:tau]: 1 but in block verification."""
        return [1] * (step.k + 1)

    def residual(self, step: Step, tau: int) -> Row:
        """(V,) weights of the correction after x[:tau], tau < k, not normalised."""
        compared = self.compared(step)
        P = self.path_weights(step)
        p = compared.p[tau] if P[tau] == 1 else P[tau] * compared.p[tau]
        return np.asarray(np.maximum(0, p - compared.q[tau]))

    def final(self, step: Step, tau: int) -> Row:
        """(V,) law of the token after x[:tau]: correction if tau < k, bonus if tau = k."""
        if tau == step.k:
            return self.compared(step).row(tau)
        return norm(self.residual(step, tau), step.row(tau))

    def test_sites(self, k: int) -> list[Site]:
        """Which uniform each of the k tests reads."""
        return [("accept", i) for i in range(k)]

    def final_sites(self, k: int) -> list[Site]:
        """Which uniform the final token reads, for tau = 0..k."""
        return [("final", tau) for tau in range(k + 1)]


class Token(Verifier):
    """Token verification: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.

    Accept x_i with probability min(1, p_i(x_i)/q_i(x_i)). At the first rejection draw from
    norm(max(0, p_i - q_i)); without one draw the bonus from p_{k+1}. Lossless: at each position
    min(p, q)(y) + Z * max(0, p - q)(y)/Z = p(y), with Z = 1 - sum min(p, q) the rejected mass.

    >>> p = np.array([[0.20, 0.05, 0.20, 0.10, 0.45], [0.25, 0.10, 0.20, 0.15, 0.30]])
    >>> q = np.array([[0.10, 0.15, 0.50, 0.10, 0.15]])
    >>> rejected_c = Step(p, q, np.array([2]))
    >>> Token().accept_probs(rejected_c).tolist()
    [0.4]
    >>> Token().final(rejected_c, 0).round(12).tolist()
    [0.25, 0.0, 0.0, 0.0, 0.75]
    """

    name = "token"

    def accept_probs(self, step: Step) -> Row:
        """min(1, p_i(x_i)/q_i(x_i))."""
        compared = self.compared(step)
        return np.asarray(np.minimum(1, step.at_draft(compared.p) / step.at_draft(compared.q)))


class OneHot(Token):
    """Token verification of drafts taken as certain, whatever they came from: n-gram and greedy.

    With q = 1 at x the ratio is p(x) and the residual is p without x. Lossless for any proposal
    made without a look at the verifier's chance: P(y) = p(x)[y = x] + (1 - p(x)) * p(y)[y != x] /
    (1 - p(x)) = p(y). The price is acceptance: p(x) instead of min(1, p(x)/q(x)).

    >>> p = np.array([[0.20, 0.05, 0.20, 0.10, 0.45], [0.25, 0.10, 0.20, 0.15, 0.30]])
    >>> OneHot().final(Step(p, p, np.array([2])), 0).round(12).tolist()
    [0.25, 0.0625, 0.0, 0.125, 0.5625]
    """

    name = "one_hot"

    def compared(self, step: Step) -> Step:
        """The draft row replaced by certainty about x."""
        return Step(step.p, one_hot(step.x, step.p), step.x)


class SamplerMatch(OneHot):
    """Draw y_i from p_i as target-only would, accept x_i if y_i = x_i, commit y_i *either way*.

    The law and the acceptance of `OneHot` with one uniform where that uses two: the test passes if
    the uniform falls into x's slot of the CDF, and a correction is read with the same uniform. A
    fresh draw after a mismatch would bend the law.

    >>> p = np.array([[0.25, 0.75], [0.5, 0.5]])
    >>> low, high = SamplerMatch().window(Step(p, p, np.array([1])))
    >>> low.tolist(), high.tolist()
    ([0.25], [1.0])
    """

    name = "sampler_match"

    def window(self, step: Step) -> tuple[Row, Row]:
        """The slot of x_i in the CDF of p_i."""
        cumulative = step.p[: step.k].cumsum(axis=1)
        cumulative = cumulative / cumulative[:, -1:]  # a match here is then a match in inverse_cdf
        high = step.at_draft(cumulative)
        before = cumulative[np.arange(step.k), np.maximum(step.x - 1, 0)]
        return np.where(step.x > 0, before, 0 * high), high

    def final(self, step: Step, tau: int) -> Row:
        """The target row: the uniform of the failed test already excludes x."""
        return step.row(tau)

    def final_sites(self, k: int) -> list[Site]:
        """The uniform of the failed test, or a new one for the bonus."""
        return [("accept", tau) for tau in range(k)] + [("final", k)]


class Greedy(OneHot):
    """Temperature 0: accept x_i if it is the argmax of p_i; correction and bonus are argmaxes.

    `OneHot` with p replaced by certainty about its argmax. Ties go to the lowest id, on both arms.

    >>> p = np.array([[0.4, 0.4, 0.2], [0.1, 0.2, 0.7]])
    >>> step = Step(p, p, np.array([1]))
    >>> Greedy().accept_probs(step).tolist(), Greedy().final(step, 0).tolist()
    ([0.0], [1.0, 0.0, 0.0])
    """

    name = "greedy"

    def compared(self, step: Step) -> Step:
        """Both rows replaced by certainty: about argmax p, and about x."""
        p, x = step.p, step.x
        return Step(one_hot(p.argmax(axis=1), p), one_hot(x, p), x)


class Block(Verifier):
    """Block verification: Sun et al. 2024, Algorithm 2. Expects at least `Token`'s acceptance.

    P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i)/q_i(x_i));
    S_i = sum_y max(0, P_i p_{i+1}(y) - q_{i+1}(y)), h_i = S_i/(S_i + 1 - P_i), h_k = P_k.
    All k tests are made and tau is the *last* that passes. The correction is drawn from
    norm(max(0, P_tau p_{tau+1} - q_{tau+1})): the same P_tau as in the test.

    The paper's example, p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, k = 2, expects 11/9 accepted
    tokens where `Token` expects 10/9. One of its blocks:

    >>> p, q = np.array([[1/3, 2/3]] * 3), np.array([[2/3, 1/3]] * 2)
    >>> Block().accept_probs(Step(p, q, np.array([0, 1]))).round(6).tolist()
    [0.0, 1.0]
    """

    name = "block"
    stops_at_first_rejection = False

    def path_weights(self, step: Step) -> list[Any]:
        """P_0..P_k."""
        weights: list[Any] = [1]
        for ratio in step.at_draft(step.p) / step.at_draft(step.q):
            weights.append(min(1, weights[-1] * ratio))
        return weights

    def accept_probs(self, step: Step) -> Row:
        """h_1..h_k."""
        p, q, k = step.p, step.q, step.k
        P = self.path_weights(step)
        h = np.ones(k, dtype=p.dtype)
        for i in range(1, k):
            S = np.maximum(0, P[i] * p[i] - q[i]).sum()
            if S + (1 - P[i]) > 0:  # 0 only if P_i = 1 and the rows are equal: nothing to lose
                h[i - 1] = S / (S + (1 - P[i]))
        h[k - 1 :] = P[k]
        return h

    def accepted(self, passed: Sequence[bool]) -> int:
        """tau, the last test that passed, whatever happened before it."""
        return max((i + 1 for i, ok in enumerate(passed) if ok), default=0)


class TargetOnly(Verifier):
    """No draft stands, the token comes from the first target row: plain decoding.

    Also what a *forced* rejection must do (a draft cut by a grammar, a placeholder id): draw from
    p and not from the residual, because no test was made and so none was lost.
    """

    name = "target_only"

    def compared(self, step: Step) -> Step:
        """A draft row of zeros: no drafted token is compared with anything."""
        return Step(step.p, 0 * step.p[: step.k], step.x)

    def accept_probs(self, step: Step) -> Row:
        """0 for every draft."""
        return np.zeros(step.k, dtype=step.p.dtype)


ALGORITHMS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (Token(), OneHot(), SamplerMatch(), Greedy(), Block(), TargetOnly())
}
"""Every algorithm the embedded engine can run, by its name in rules, records and packet."""


# ---------------------------------------------------------------------------------------------
# One round, drawn


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round commits: draft[:accepted], then `token`."""

    accepted: int
    """tau, drafted tokens that stand (count)."""
    token: int
    """Id of the correction or bonus token."""
    bonus: bool
    """True if every drafted token stood, so that `token` is the extra one of the same pass."""


def verify(
    algorithm: Verifier,
    p: Rows,
    q: Rows | None,
    draft: Ids,
    accept_u: Sequence[float] | Floats,
    final_u: float,
) -> RoundOutcome:
    """Draw one round of `algorithm`.

    p: (k+1, V) processed target rows. q: (k, V) rows the drafts were drawn from, or None for
    drafts made without chance (n-gram, greedy), which is the one-hot q. draft: (k,) int ids.
    accept_u: (k,) uniforms of the tests. final_u: one uniform in [0, 1) for correction or bonus.
    k = 0 is a target-only step and takes the same path.

    Raises VerificationError for shapes that do not fit, an id outside the vocabulary (cut padding
    ids off before), a drafted id of draft probability 0, and a row that does not sum to 1 where it
    is drawn from.

    >>> p = np.array([[0.6, 0.4], [0.5, 0.5]])
    >>> verify(ALGORITHMS["token"], p, np.array([[0.2, 0.8]]), np.array([1]), [0.7], 0.5)
    RoundOutcome(accepted=0, token=0, bonus=False)
    """
    k = len(draft)
    if p.ndim != 2 or len(p) != k + 1 or len(accept_u) != k or (q is not None and len(q) < k):
        raise VerificationError(
            f"{k} drafted tokens need {k + 1} target rows, {k} draft rows and {k} uniforms; got "
            f"target {p.shape}, draft {None if q is None else q.shape}, {len(accept_u)} uniforms"
        )
    if k and not 0 <= min(draft) <= max(draft) < p.shape[1]:
        raise VerificationError(f"drafted ids {list(draft)} are not all in 0..{p.shape[1] - 1}")
    step = Step(p, one_hot(draft, p) if q is None else q, draft)
    if k and not min(step.at_draft(step.q)) > 0:
        raise VerificationError(
            f"one of the drafted ids {list(draft)} has draft probability 0: q is not the "
            "distribution it was drawn from"
        )

    def u(site: Site) -> float:
        return float(accept_u[site[1]]) if site[0] == "accept" else final_u

    _, tau, token = draw(algorithm, step, u)
    return RoundOutcome(tau, token, tau == k)


def draw(
    algorithm: Verifier, step: Step, u: Callable[[Site], float]
) -> tuple[list[bool], int, int]:
    """(tests that were made and whether they passed, tau, final token) for given uniforms."""
    low, high = algorithm.window(step)
    passed: list[bool] = []
    for site, a, b in zip(algorithm.test_sites(step.k), low.tolist(), high.tolist(), strict=True):
        passed.append(a <= u(site) < b)
        if not passed[-1] and algorithm.stops_at_first_rejection:
            break
    tau = algorithm.accepted(passed)
    token = inverse_cdf(algorithm.final(step, tau), u(algorithm.final_sites(step.k)[tau]))
    return passed, tau, token


def greedy_round(target_argmax: Sequence[int], draft: Sequence[int]) -> RoundOutcome:
    """`Greedy` when the k+1 argmaxes are known: the prefix that matches, then the next argmax.

    >>> greedy_round([0, 1, 4, 0, 4], [0, 1, 2, 3])
    RoundOutcome(accepted=2, token=4, bonus=False)
    """
    k = len(draft)
    if len(target_argmax) != k + 1:
        raise VerificationError(f"{k} drafts need {k + 1} argmaxes, got {len(target_argmax)}")
    tau = 0
    while tau < k and target_argmax[tau] == draft[tau]:
        tau += 1
    return RoundOutcome(tau, int(target_argmax[tau]), tau == k)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is left of a round's tokens when generation ends inside it."""

    tokens: tuple[int, ...]
    """Ids that reach the user, the stop token included."""
    accepted: int
    """Accepted draft tokens among them: those after the stop are not saved work (count)."""
    dropped: int
    """Committed tokens after the stop (count)."""


def deliver(draft: Sequence[int], outcome: RoundOutcome, stop: Collection[int]) -> Delivery:
    """Cut a round after its first stop token.

    >>> deliver([0, 1, 2, 3], RoundOutcome(3, 4, bonus=False), {1})
    Delivery(tokens=(0, 1), accepted=2, dropped=2)
    """
    committed = (*(int(t) for t in draft[: outcome.accepted]), outcome.token)
    end = next((i + 1 for i, token in enumerate(committed) if token in stop), len(committed))
    return Delivery(committed[:end], min(end, outcome.accepted), len(committed) - end)


# ---------------------------------------------------------------------------------------------
# Several candidates at one position: a node of a draft tree


class Candidates:
    """K candidates for one position, tried in turn; SpecInfer's multi-step scheme.

    p^1 = p, q^1 = q. For j = 1..K: x_j ~ q^j, accept with min(1, p^j(x_j)/q^j(x_j)), otherwise
    p^{j+1} = norm(max(0, p^j - q^j)). If none is accepted, y ~ p^{K+1}. Here q^{j+1} = q^j: drawn
    with replacement. A path through a tree is a sequence of such nodes.
    """

    name = "with_replacement"

    def drawn(self, q: Row) -> Row:
        """The law x_j is really drawn from, given q^j."""
        return q

    def claimed(self, q: Row) -> Row:
        """The draft row of test and residual; lossless only if it is `drawn`."""
        return self.drawn(q)

    def next_target(self, p: Row, q: Row) -> Row:
        """p^{j+1}, given p^j and the claimed row."""
        return norm(np.maximum(0, p - q), p)

    def next_draft(self, q: Row, x: int) -> Row:  # noqa: ARG002  x matters to the children
        """q^{j+1}, given q^j and the rejected x_j."""
        return q


class CandidatesWithoutReplacement(Candidates):
    """Recursive rejection sampling: q^{j+1} = norm(q^j with x_j zeroed). RSD, Sequoia."""

    name = "without_replacement"

    def next_draft(self, q: Row, x: int) -> Row:
        """norm(q with x zeroed); all zero once every candidate was tried."""
        rest = q.copy()
        rest[x] = 0
        return norm(rest, rest)


class TopCandidates(CandidatesWithoutReplacement):
    """The K most probable draft tokens, each taken as certain: EAGLE-style deterministic trees."""

    name = "top_k"

    def drawn(self, q: Row) -> Row:
        """All mass on the largest entry left."""
        return np.asarray(one_hot(np.array([q.argmax()]), q)[0])


NODE_ALGORITHMS: dict[str, Candidates] = {
    scheme.name: scheme
    for scheme in (Candidates(), CandidatesWithoutReplacement(), TopCandidates())
}
"""How several candidates at one position are verified, by name."""


def node_law(scheme: Candidates, p: Row, q: Row, K: int) -> tuple[Row, Any]:
    """((V,) law of the committed token, probability that a candidate is accepted), exact.

    >>> p = np.array([Fraction(n, 100) for n in (20, 5, 20, 10, 45)])
    >>> q = np.array([Fraction(n, 100) for n in (10, 15, 50, 10, 15)])
    >>> law, accepted = node_law(Candidates(), p, q, 2)
    >>> bool((law == p).all()), accepted
    (True, Fraction(7, 10))
    """
    if K == 0 or not q.sum() > 0:
        return p, 0 * p[0]
    drawn, claimed = scheme.drawn(q), scheme.claimed(q)
    law, accepted = 0 * p, 0 * p[0]
    for x in np.flatnonzero(drawn):
        h = min(1, p[x] / claimed[x])
        law[x] += drawn[x] * h
        accepted += drawn[x] * h
        if h < 1:
            rest, later = node_law(
                scheme, scheme.next_target(p, claimed), scheme.next_draft(q, int(x)), K - 1
            )
            law = law + drawn[x] * (1 - h) * rest
            accepted += drawn[x] * (1 - h) * later
    return law, accepted


def verify_node(
    scheme: Candidates, p: Row, q: Row, chance: Sequence[tuple[float, float]], final_u: float
) -> tuple[int | None, int]:
    """(index of the accepted candidate or None, committed token) for given uniforms.

    p, q: (V,) target and draft row. chance: K pairs, the uniform that draws the candidate and the
    uniform of its test. final_u: one uniform for the token if no candidate is accepted.

    >>> p = np.array([0.20, 0.05, 0.20, 0.10, 0.45])
    >>> q = np.array([0.10, 0.15, 0.50, 0.10, 0.15])
    >>> verify_node(Candidates(), p, q, [(0.5, 0.7), (0.9, 0.99)], 0.0)
    (1, 4)
    """
    for j, (u_draft, u_test) in enumerate(chance):
        if not q.sum() > 0:
            break
        x = inverse_cdf(scheme.drawn(q), u_draft)
        claimed = scheme.claimed(q)
        if u_test < p[x] / claimed[x]:
            return j, x
        p, q = scheme.next_target(p, claimed), scheme.next_draft(q, x)
    return None, inverse_cdf(p, final_u)
