"""Estimates that hold at every moment: look after each request, stop when you like.

A test of a fixed size that is looked at again and again alarms far too often (36 % instead of 5 %
in 20,000 requests). Here evidence is a bet against a hypothesis: a process that no rule of play can
grow under it, so that it ever reaches 1/alpha with probability alpha at most (Ville). Evidence is
kept as a natural logarithm; what is compared with it is log(1/alpha). The limits of an `Estimate`
are those of the values that the evidence has not ruled out, a confidence sequence.

What each process assumes of its requests is their exchangeability given the arm: a burst of
failures that have one cause counts as many. All of it is cumulative. A change after a long calm
shows late, except for failures in a row, which have a process of their own (`failure_run`).

Formulas and worked numbers: STATS.md 4.6. Beta-binomial mixtures and rank bands after Howard,
Ramdas, McAuliffe and Sekhon 2021 and Howard and Ramdas 2022; bets after Waudby-Smith and Ramdas
2024; the asymptotic sequence after Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from speccheck.records import Estimate
from speccheck.stats.fixed import Floats, unknown

_TINY = 1e-290
"""Below this a regularised incomplete beta is taken from its continued fraction, in logarithms."""

PRIOR_WEIGHT = 10.0
"""Weight, in requests, of the prior around a share or a quantile's probability: (9.5, 0.5) for p95.
A light one: it sees a gross mismatch within a dozen requests, and costs little on a small one."""

_RUN_SPREAD = 100
"""Over how many first requests the stake on failures in a row is spread about evenly."""

TUNED_AT = 500
"""Requests at which the asymptotic sequence is at its tightest."""

BURN_IN = 50
"""Requests before which the asymptotic sequence says nothing."""

_MOST = 1_000_000
"""An answer to "how many more" above this is no answer."""


def log_odds_against(alpha: float) -> float:
    """Evidence (a logarithm) that decides at level alpha: log(1/alpha)."""
    return -math.log(alpha)


def always_valid_p(log_evidence: npt.ArrayLike) -> Floats:
    """Always-valid p after each of several looks: the smallest 1/E so far, at most 1."""
    best = np.maximum.accumulate(np.maximum(np.asarray(log_evidence, dtype=float), 0.0))
    p: Floats = np.exp(-best)
    return p


# --- rates --------------------------------------------------------------------------------------


def _log_lower(a: Floats, b: Floats, x: float) -> Floats:
    """Log P(Beta(a, b) <= x), also where the probability itself is too small for a float."""
    below = special.betainc(a, b, x)
    if (below > _TINY).all():
        return np.asarray(np.log(below))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        front = a * math.log(x) + b * math.log1p(-x) - np.log(a) - special.betaln(a, b)
        far = front - np.log(_fraction(a, b, x))
        return np.where(below > _TINY, np.log(below), far)


def _fraction(a: Floats, b: Floats, x: float) -> Floats:
    """The continued fraction of the incomplete beta (DLMF 8.17.22) by Lentz's method, x < mean."""
    value = np.ones_like(a + b)
    c, d = value.copy(), np.zeros_like(value)
    for j in range(1, 20_000):
        m = j // 2
        if j % 2:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + step * d)
        c = 1 + step / c
        value = value * c * d
        if np.abs(c * d - 1).max() < 1e-14:
            break
    return value


@lru_cache
def _log_prior(a: float, b: float, x: float) -> float:
    return float(_log_lower(np.asarray(a), np.asarray(b), x))


def _beta_binomial(k: Floats, n: Floats, share: float, a: float, b: float) -> Floats:
    """Log likelihood of k of n under a Beta(a, b) mixture over that under the share itself."""
    mixture = (
        special.betaln(a + k, b + n - k) - math.lgamma(a) - math.lgamma(b) + math.lgamma(a + b)
    )
    return np.asarray(mixture - k * math.log(share) - (n - k) * math.log1p(-share))


def rate_over(k: npt.ArrayLike, n: npt.ArrayLike, limit: float) -> Floats:
    """Evidence that a rate is over the limit, after k events in n requests (log; arrays are fine).

    Beta-binomial e-process with the prior Beta(1, 0.3/limit), cut to rates over the limit, so that
    it holds against every rate up to it. At 1 % that is (1, 30): mean 3 %.
    """
    events, size = np.asarray(k, dtype=float), np.asarray(n, dtype=float)
    if limit <= 0:
        return np.where(events > 0, math.inf, 0.0)
    if limit >= 1:
        return np.zeros_like(events + size)
    a, b = 1.0, 0.3 / limit
    # Above the limit is below it for the complement, and its small tail keeps its digits there.
    posterior = _log_lower(b + size - events, a + events, 1 - limit)
    return _beta_binomial(events, size, limit, a, b) + posterior - _log_prior(b, a, 1 - limit)


def rate_under(k: npt.ArrayLike, n: npt.ArrayLike, limit: float) -> Floats:
    """Evidence that a rate is under the limit, after k events in n requests (log; arrays are fine).

    Beta-binomial e-process with the prior Beta(0.5, 1/limit), cut to rates under the limit. At 1 %
    that is (0.5, 100): mean 0.5 %, and 358 clean requests reach 1/0.05.
    """
    events, size = np.asarray(k, dtype=float), np.asarray(n, dtype=float)
    if limit <= 0:
        return np.zeros_like(events + size)
    if limit >= 1:
        return np.where(events < size, math.inf, 0.0)
    a, b = 0.5, 1 / limit
    posterior = _log_lower(a + events, b + size - events, limit)
    return _beta_binomial(events, size, limit, a, b) + posterior - _log_prior(a, b, limit)


def share_off(k: npt.ArrayLike, n: npt.ArrayLike, share: float) -> Floats:
    """Two-sided evidence that requests do not fall to an arm at this share (sample ratio, log)."""
    events, size = np.asarray(k, dtype=float), np.asarray(n, dtype=float)
    a, b = PRIOR_WEIGHT * share, PRIOR_WEIGHT * (1 - share)
    return _beta_binomial(events, size, share, a, b)


def failure_run(length: int, start: int, limit: float) -> float:
    """Evidence that a rate is over the limit, from `length` failures in a row (log).

    `start` counts requests from 0 to where the row began. At each request a bet is opened on
    failures alone, with a share c/((start+c)(start+c+1)) of the stake (c = 100; they sum to 1): it
    pays 1/limit each time a failure comes, nothing after the first success. So a server that dies
    after 10,000 clean requests is seen after five failures, where the cumulative rate would ask for
    hundreds, and two failures in flight together are not called an outage yet.
    """
    if length == 0:
        return -math.inf
    stake = _RUN_SPREAD / ((start + _RUN_SPREAD) * (start + _RUN_SPREAD + 1))
    return math.inf if limit <= 0 else math.log(stake) - length * math.log(limit)


def rate_sequence(k: int, n: int, *, alpha: float) -> Estimate:
    """Rate k/n with anytime limits: those that `rate_over` and `rate_under` do not rule out."""
    from scipy.optimize import brentq

    method = "beta-binomial e-process"
    if n <= 0:
        return unknown(method, n=0, alpha=alpha)
    enough = log_odds_against(alpha)
    value = k / n

    def root(evidence: Callable[[int, int, float], Floats], inner: float, outer: float) -> float:
        def gap(log_limit: float) -> float:
            return float(np.clip(evidence(k, n, math.exp(log_limit)), -1e6, 1e6)) - enough

        return math.exp(brentq(gap, math.log(inner), math.log(outer), xtol=1e-7))

    # The prior moves with the limit, so one event alone rules out no limit, however small.
    least, most = 1e-9, 1 - 1e-9
    low, high = 0.0, 1.0
    if k > 0 and float(rate_over(k, n, least)) > enough:
        low = root(rate_over, least, min(value, most))
    if k < n and float(rate_under(k, n, most)) > enough:
        high = root(rate_under, max(value, least), most)
    return Estimate(value, low, high, n, method, alpha)


def clean_needed(k: int, n: int, limit: float, *, alpha: float) -> int | None:
    """How many more requests without an event until `rate_under` passes the limit.

    358 for a limit of 1 % from nothing. 0 where it passes already; None for a limit of 0.
    """
    if limit <= 0:
        return None
    enough = log_odds_against(alpha)
    return first(lambda more: float(rate_under(k, n + more, limit)) >= enough)


def failures_needed(k: int, n: int, limit: float, *, alpha: float) -> int | None:
    """How many more requests, all of them failed, until `rate_over` fails the limit."""
    enough = log_odds_against(alpha)
    return first(lambda more: float(rate_over(k + more, n + more, limit)) >= enough)


def first(holds: Callable[[int], bool], *, most: int = _MOST) -> int | None:
    """Smallest number from 0 at which something begins to hold; None if not before `most`."""
    if holds(0):
        return 0
    high = 1
    while not holds(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# --- means --------------------------------------------------------------------------------------


def _tuned(alpha: float) -> float:
    """Spread rho of the normal mixture that is tightest at `TUNED_AT` requests."""
    two_logs = -2 * math.log(alpha)
    return math.sqrt((two_logs + math.log(two_logs + 1)) / TUNED_AT)


def one_sided_reach(n: int, *, alpha: float) -> float:
    """How far the one-sided asymptotic limit lies from the mean, in its own sd.

    The two-sided sequence at 2 alpha: each of its sides is crossed with half its chance.
    """
    rho = _tuned(min(2 * alpha, 0.5))
    spread = n * rho * rho + 1
    return math.sqrt(spread * (math.log(spread) - 2 * math.log(2 * alpha))) / (n * rho)


def one_sided_evidence(distance: float, n: int, alpha: float) -> float:
    """Evidence (log) for a mean over 0 that was observed `distance` sd over it, at least 0.

    log(1/alpha) exactly where `one_sided_reach` at that alpha is the distance; other values are
    read off the same mixture, tuned for alpha.
    """
    if distance <= 0:
        return 0.0
    rho = _tuned(min(2 * alpha, 0.5))
    spread = n * rho * rho + 1
    exponent = (distance * n * rho) ** 2 / (2 * spread)
    return max(0.0, exponent + math.log(2) - math.log(spread) / 2)


def needed_for_mean(distance: float, sd: float, n: int, *, alpha: float) -> int | None:
    """How many more values until the one-sided reach is shorter than the distance to the limit."""
    if distance == 0:
        return None

    def decides(more: int) -> bool:
        size = n + more
        return size >= BURN_IN and sd * one_sided_reach(size, alpha=alpha) <= abs(distance)

    return first(decides)


# --- quantiles ----------------------------------------------------------------------------------


def rank_band(n: int, p: float, *, alpha: float) -> tuple[int, int]:
    """Lowest and highest count of n values at or below their p-quantile that is credible.

    That count is Bin(n, p); credible is what its beta-binomial evidence against p does not rule out
    at alpha (prior of weight 10 around p), at all n together. The quantile lies between the low-th
    and the (high+1)-th of the values in order (`band_limits`).
    """
    counts = np.arange(n + 1, dtype=float)
    size = np.full_like(counts, n)
    a, b = PRIOR_WEIGHT * p, PRIOR_WEIGHT * (1 - p)
    credible = np.nonzero(_beta_binomial(counts, size, p, a, b) < log_odds_against(alpha))[0]
    return int(credible[0]), int(credible[-1])


def band_limits(ordered: Sequence[float], low: int, high: int) -> tuple[float, float]:
    """The values at a band's ends; infinite where the band reaches past the sample."""
    below = ordered[low - 1] if low >= 1 else -math.inf
    above = ordered[high] if high < len(ordered) else math.inf
    return below, above
