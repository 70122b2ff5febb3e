"""Processes: one metric against one limit, request by request, at any time.

Each holds what its formula in `sequential` needs and no more, so that a look after each request
costs microseconds. `shows` says whether the evidence decides at the level of a side, and is cheap;
evidence, estimate and what is still needed are worked out when they are asked for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from speccheck.records import Estimate
from speccheck.stats.fixed import quantile, unknown
from speccheck.stats.sequential import (
    BURN_IN,
    PRIOR_WEIGHT,
    band_limits,
    clean_needed,
    failure_run,
    first,
    log_odds_against,
    needed_for_mean,
    one_sided_evidence,
    one_sided_reach,
    rank_band,
    rate_over,
    rate_sequence,
    rate_under,
)

Side = Literal["over", "under"]
"""Of the limit on which the metric may be shown to lie."""

Levels = Mapping[Side, float]
"""The level at which each side is decided."""


class Process(Protocol):
    """What all processes have in common; how values are added differs."""

    @property
    def n(self) -> int:
        """Requests that count; of the smaller arm where two are compared."""
        ...

    def shows(self, side: Side) -> bool:
        """Whether the metric is shown to be on this side of the limit, now."""
        ...

    def evidence(self, side: Side) -> float:
        """Evidence (log) that it is on this side; log(1/level) shows it."""
        ...

    def estimate(self, alpha: float) -> Estimate:
        """Value with one-sided anytime limits, each at this level."""
        ...

    def needed(self) -> int | None:
        """About how many more requests decide it, if all goes on as it looks; None: open."""
        ...


class Rate:
    """A rate of events against a limit, by beta-binomial e-processes and failures in a row.

    `earlier` is (events, requests) of the same kind from before. They count for being under the
    limit, never for being over it. Under is shown if all requests together show it and, once there
    is an event among those added here, these alone show it too: what happens here must not drown
    in what came before. Both at once are never likelier than the first, so the level holds.
    """

    def __init__(self, limit: float, levels: Levels, *, earlier: tuple[int, int] = (0, 0)) -> None:
        self._limit = limit
        self._levels = levels
        self._earlier = earlier
        self._row = 0
        self._best_row = -math.inf
        self.events = 0
        self.added = 0

    @property
    def n(self) -> int:
        """Requests, those from before included as long as none here was an event."""
        return self.added + (0 if self.events else self._earlier[1])

    def add(self, *, event: bool) -> None:
        """One more request."""
        self.events += event
        self.added += 1
        self._row = self._row + 1 if event else 0
        if event:
            run = failure_run(self._row, self.added - self._row, self._limit)
            self._best_row = max(self._best_row, run)

    def shows(self, side: Side) -> bool:
        """See `Process`."""
        if side == "over" and not self.events:
            return False
        return self.evidence(side) >= log_odds_against(self._levels[side])

    def evidence(self, side: Side) -> float:
        """See `Process`. Over: half the stake lies on the rate, half on failures in a row."""
        if side == "over":
            return self._over(self.events, self.added, self._best_row)
        k, n = self._earlier
        together = float(rate_under(k + self.events, n + self.added, self._limit))
        if not self.events:
            return together
        return min(together, float(rate_under(self.events, self.added, self._limit)))

    @property
    def is_borrowed(self) -> bool:
        """Whether what was added here alone would not show that the rate is under."""
        alone = float(rate_under(self.events, self.added, self._limit))
        return alone < log_odds_against(self._levels["under"])

    def _over(self, events: int, n: int, row: float) -> float:
        return max(float(rate_over(events, n, self._limit)), row) - math.log(2)

    def estimate(self, alpha: float) -> Estimate:
        """See `Process`; with those from before as long as none here was an event."""
        if self.events:
            return rate_sequence(self.events, self.added, alpha=alpha)
        k, n = self._earlier
        return rate_sequence(k, n + self.added, alpha=alpha)

    def needed(self) -> int | None:
        """How many more clean requests show that it is under."""
        k, n = self._earlier
        alpha = self._levels["under"]
        together = clean_needed(k + self.events, n + self.added, self._limit, alpha=alpha)
        if not self.events or together is None:
            return together
        alone = clean_needed(self.events, self.added, self._limit, alpha=alpha)
        return None if alone is None else max(together, alone)

    def failures_needed(self) -> int | None:
        """How many events in a row, from now on, would show that it is over."""
        enough = log_odds_against(self._levels["over"])

        def shown(more: int) -> bool:
            row = failure_run(self._row + more, self.added - self._row, self._limit)
            return self._over(self.events + more, self.added + more, row) >= enough

        return first(shown)


class BoundedMean:
    """The mean of values in [0, 1] against a limit, by betting; holds at every n, without burn-in.

    Two players start with 1. One bets on a mean over the limit, the other on one under it, at
    request i with the stake min(sqrt(2 ln(1/alpha) / (s2 i ln(1+i))), half of what can be lost);
    s2 is the variance of the values before, begun at 1/4. For acceptance a value is one request's
    accepted/drafted: the mean is over requests, where the pooled rate is over tokens.
    """

    def __init__(self, limit: float, levels: Levels) -> None:
        self._limit = limit
        self._enough = {side: log_odds_against(alpha) for side, alpha in levels.items()}
        self._levels = levels
        self._values: list[float] = []
        self._stakes: dict[Side, list[float]] = {"over": [], "under": []}
        self._won: dict[Side, float] = {"over": 0.0, "under": 0.0}
        self._sum = 0.0
        self._squares = 0.25

    @property
    def n(self) -> int:
        """Values so far."""
        return len(self._values)

    def add(self, value: float) -> None:
        """One more value.

        Raises:
            ValueError: it is not in [0, 1], so that a bet on it could lose more than all.
        """
        if not 0 <= value <= 1:
            raise ValueError(f"{value} is not in [0, 1]")
        i = self.n + 1
        spread = self._squares * math.log1p(i)  # s2 i ln(1+i), since s2 is squares/i
        gain = value - self._limit
        for side, enough in self._enough.items():
            stake = math.sqrt(2 * enough / spread)
            self._stakes[side].append(stake)
            at_risk = self._limit if side == "over" else 1 - self._limit
            won = gain if side == "over" else -gain
            self._won[side] += math.log1p(min(stake, _half(at_risk)) * won)
        self._sum += value
        self._values.append(value)
        self._squares += (value - (0.5 + self._sum) / (i + 1)) ** 2

    def shows(self, side: Side) -> bool:
        """See `Process`."""
        return self._won[side] >= self._enough[side]

    def evidence(self, side: Side) -> float:
        """See `Process`."""
        return self._won[side]

    def estimate(self, alpha: float) -> Estimate:
        """See `Process`; the limits are the means against which these bets have not won 1/alpha."""
        method = "betting e-process, mean over requests"
        if not self._values:
            return unknown(method, n=0, alpha=alpha)
        x = np.asarray(self._values)
        stakes = {side: np.asarray(of) for side, of in self._stakes.items()}
        enough = log_odds_against(alpha)

        def is_over(m: float) -> bool:
            won = np.log1p(np.minimum(stakes["over"], _half(m)) * (x - m))
            return float(won.sum()) >= enough

        def is_under(m: float) -> bool:
            won = np.log1p(np.minimum(stakes["under"], _half(1 - m)) * (m - x))
            return float(won.sum()) >= enough

        value = self._sum / self.n
        return Estimate(
            value, _last(is_over, 0.0, value), _last(is_under, 1.0, value), self.n, method, alpha
        )

    def needed(self) -> int | None:
        """See `Process`; by the reach of the asymptotic sequence."""
        if self.n < 2:
            return None
        distance = self._sum / self.n - self._limit
        alpha = self._levels["over" if distance > 0 else "under"]
        return needed_for_mean(distance, float(np.std(self._values, ddof=1)), self.n, alpha=alpha)


def _half(room: float) -> float:
    """The largest stake that loses at most half where `room` is the most that can be lost."""
    return 0.5 / room if room > 0 else math.inf


def _last(holds: Callable[[float], bool], outer: float, inner: float) -> float:
    """The last value from `outer` towards `inner` at which something holds; `outer` if at none."""
    if not holds(outer):
        return outer
    for _ in range(40):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if holds(middle) else (outer, middle)
    return outer


_LEAST_SD = 1e-3
"""Requests that are all alike would make the smallest distance certain."""


class RatioOfSums:
    """A ratio of sums (accepted over drafted tokens, say) against a limit, requests as clusters.

    Asymptotic confidence sequence of the linearised residuals e_i = a_i - r d_i: the pooled rate
    itself, valid for large n only, silent before `BURN_IN` requests. Requests without a denominator
    say nothing and are left out.
    """

    def __init__(self, limit: float, levels: Levels, *, offset: float = 0.0) -> None:
        """`offset` is added to the ratio: 1 for the bonus token of an acceptance length."""
        self._limit = limit
        self._offset = offset
        self._levels = levels
        self._a = self._d = self._aa = self._ad = self._dd = 0.0
        self.n = 0

    def add(self, numerator: float, denominator: float) -> None:
        """One more request."""
        if denominator <= 0:
            return
        self.n += 1
        self._a += numerator
        self._d += denominator
        self._aa += numerator * numerator
        self._ad += numerator * denominator
        self._dd += denominator * denominator

    def _spread(self) -> tuple[float, float]:
        """The value, and the standard deviation of e_i over the mean denominator."""
        r = self._a / self._d
        squares = max(self._aa - 2 * r * self._ad + r * r * self._dd, 0.0)
        sd = math.sqrt(squares / max(self.n - 1, 1)) * self.n / self._d
        return r + self._offset, max(sd, _LEAST_SD)

    def shows(self, side: Side) -> bool:
        """See `Process`."""
        return self.evidence(side) >= log_odds_against(self._levels[side])

    def evidence(self, side: Side) -> float:
        """See `Process`."""
        if self.n < BURN_IN:
            return 0.0
        value, sd = self._spread()
        distance = (value - self._limit) * (1 if side == "over" else -1)
        return one_sided_evidence(distance / sd, self.n, self._levels[side])

    def estimate(self, alpha: float) -> Estimate:
        """See `Process`."""
        method = "asymptotic confidence sequence, ratio of sums, requests as clusters"
        if self.n == 0:
            return unknown(method, n=0, alpha=alpha)
        value, sd = self._spread()
        reach = sd * one_sided_reach(self.n, alpha=alpha) if self.n >= BURN_IN else math.inf
        return Estimate(value, value - reach, value + reach, self.n, method, alpha)

    def needed(self) -> int | None:
        """See `Process`."""
        if self.n < 2:
            return None
        value, sd = self._spread()
        alpha = self._levels["over" if value > self._limit else "under"]
        return needed_for_mean(value - self._limit, sd, self.n, alpha=alpha)


def _evidence_of(shown: Callable[[float], bool]) -> float:
    """log(1/alpha) of the smallest level alpha at which something is shown; 0 if at none."""
    low, high = math.log(2), 700.0
    if not shown(math.exp(-low)):
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if shown(math.exp(-middle)) else (low, middle)
    return low


def _is_shown(limits: tuple[float, float], limit: float, side: Side, noise: float) -> bool:
    """Whether a ratio lies beyond the limit by more than the factor `noise`."""
    return limits[0] > limit * noise if side == "over" else limits[1] * noise <= limit


class MeanRatio:
    """Ratio of geometric means of two independent arms, speculative over target-only.

    Each arm's log mean has an asymptotic confidence sequence at half the level; silent before
    `BURN_IN` requests on both. `noise` is a factor of at least 1 that target-only shows against
    itself: the ratio must lie beyond the limit by more than that.
    """

    def __init__(self, limit: float, levels: Levels, *, noise: float = 1.0) -> None:
        self._limit = limit
        self._noise = noise
        self._levels = levels
        self._sizes = [0, 0]
        self._sums = [0.0, 0.0]
        self._squares = [0.0, 0.0]

    @property
    def n(self) -> int:
        """Requests of the smaller arm."""
        return min(self._sizes)

    def add(self, value: float, *, speculative: bool) -> None:
        """One more request, in any positive unit."""
        log, arm = math.log(value), int(speculative)
        self._sizes[arm] += 1
        self._sums[arm] += log
        self._squares[arm] += log * log

    def _mean(self, arm: int) -> float:
        return self._sums[arm] / self._sizes[arm]

    def _sd(self, arm: int) -> float:
        squares = self._squares[arm] - self._sizes[arm] * self._mean(arm) ** 2
        return max(math.sqrt(max(squares, 0.0) / (self._sizes[arm] - 1)), _LEAST_SD)

    def _limits(self, alpha: float) -> tuple[float, float]:
        """Lower and upper limit of the ratio, each at level alpha."""
        if self.n < BURN_IN:
            return 0.0, math.inf
        arms = ((arm, self._sizes[arm]) for arm in (0, 1))
        reach = sum(self._sd(arm) * one_sided_reach(n, alpha=alpha / 2) for arm, n in arms)
        value = self._mean(1) - self._mean(0)
        return math.exp(value - reach), math.exp(min(value + reach, 700.0))

    def shows(self, side: Side) -> bool:
        """See `Process`."""
        return _is_shown(self._limits(self._levels[side]), self._limit, side, self._noise)

    def evidence(self, side: Side) -> float:
        """See `Process`."""
        return _evidence_of(
            lambda alpha: _is_shown(self._limits(alpha), self._limit, side, self._noise)
        )

    def estimate(self, alpha: float) -> Estimate:
        """See `Process`."""
        method = "asymptotic confidence sequence, geometric means, unpaired"
        if self.n == 0:
            return unknown(method, n=0, alpha=alpha)
        value = math.exp(self._mean(1) - self._mean(0))
        return Estimate(value, *self._limits(alpha), self.n, method, alpha)

    def needed(self) -> int | None:
        """See `Process`; requests on each arm."""
        if self.n < 2 or self._limit <= 0:
            return None
        distance = self._mean(1) - self._mean(0) - math.log(self._limit)
        alpha = self._levels["over" if distance > 0 else "under"] / 2
        if abs(distance) <= math.log(self._noise):
            return None
        distance = abs(distance) - math.log(self._noise)
        return needed_for_mean(distance, self._sd(0) + self._sd(1), self.n, alpha=alpha)


class _Bands:
    """`sequential.rank_band` of every n so far, found one step at a time."""

    def __init__(self, p: float, alpha: float) -> None:
        a, b = PRIOR_WEIGHT * p, PRIOR_WEIGHT * (1 - p)
        self._prior = a, b
        self._steps = math.log(p), math.log1p(-p)
        self._enough = (
            log_odds_against(alpha) + math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
        )
        self._known = [(0, 0)]

    def _is_credible(self, count: int, n: int) -> bool:
        (a, b), (inside, outside) = self._prior, self._steps
        rest = n - count
        mixture = math.lgamma(a + count) + math.lgamma(b + rest) - math.lgamma(a + b + n)
        return mixture - count * inside - rest * outside < self._enough

    def of(self, n: int) -> tuple[int, int]:
        """Lowest and highest credible count of n."""
        while len(self._known) <= n:
            size = len(self._known)
            low, high = self._known[-1]
            # Evidence is convex in the count, so the band has no holes; its ends move by little.
            while low < size and not self._is_credible(low, size):
                low += 1
            high = max(high, low)
            while high < size and self._is_credible(high + 1, size):
                high += 1
            while high > low and not self._is_credible(high, size):
                high -= 1
            self._known.append((low, high))
        return self._known[n]


@lru_cache(maxsize=512)
def _bands(p: float, alpha: float) -> _Bands:
    """Shared by all processes of one level: windows that begin anew need the same ones again."""
    return _Bands(p, alpha)


class RankBand:
    """`sequential.rank_band` of a growing n, one step at a time."""

    def __init__(self, p: float, alpha: float) -> None:
        self._bands = _bands(p, alpha)
        self.n = 0
        self.low = 0
        self.high = 0

    def grow(self) -> None:
        """One more value."""
        self.n += 1
        self.low, self.high = self._bands.of(self.n)


class QuantileRatio:
    """Ratio of two independent arms' p-quantiles, speculative over target-only, against a limit.

    From each arm's rank band at half the level: no assumption but exchangeable requests, and ties
    only make it wider. An upper limit of p95 exists from 81 values at 5 %. `noise` as in
    `MeanRatio`.
    """

    def __init__(self, limit: float, levels: Levels, *, p: float, noise: float = 1.0) -> None:
        self._limit = limit
        self._noise = noise
        self._levels = levels
        self._p = p
        self._arms: tuple[list[float], list[float]] = ([], [])
        self._bands = {
            side: (RankBand(p, alpha / 2), RankBand(p, alpha / 2)) for side, alpha in levels.items()
        }

    @property
    def n(self) -> int:
        """Requests of the smaller arm."""
        return min(map(len, self._arms))

    @property
    def observed(self) -> tuple[float, float] | None:
        """The arms' quantiles, target-only and speculative; None before both have a value."""
        if self.n == 0:
            return None
        target, speculative = (quantile(arm, self._p) for arm in self._arms)
        return target, speculative

    def add(self, value: float, *, speculative: bool) -> None:
        """One more request, in any positive unit."""
        insort(self._arms[speculative], value)
        for bands in self._bands.values():
            bands[speculative].grow()

    def _limits(self, bands: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Lower and upper limit of the ratio from the arms' rank bands."""
        (t_low, t_high), (s_low, s_high) = (
            band_limits(arm, *band) for arm, band in zip(self._arms, bands, strict=True)
        )
        low = s_low / t_high if s_low > 0 else 0.0
        return low, s_high / t_low if t_low > 0 else math.inf

    def _limits_at(self, alpha: float) -> tuple[float, float]:
        return self._limits([rank_band(len(a), self._p, alpha=alpha / 2) for a in self._arms])

    def shows(self, side: Side) -> bool:
        """See `Process`."""
        limits = self._limits([(band.low, band.high) for band in self._bands[side]])
        return _is_shown(limits, self._limit, side, self._noise)

    def evidence(self, side: Side) -> float:
        """See `Process`."""
        return _evidence_of(
            lambda alpha: _is_shown(self._limits_at(alpha), self._limit, side, self._noise)
        )

    def estimate(self, alpha: float) -> Estimate:
        """See `Process`; limits are 0 or infinite where there are too few values for one."""
        method = f"rank-band confidence sequence, p{100 * self._p:g}, unpaired"
        if self.observed is None:
            return unknown(method, n=0, alpha=alpha)
        target, speculative = self.observed
        return Estimate(speculative / target, *self._limits_at(alpha), self.n, method, alpha)

    def needed(self) -> int | None:
        """See `Process`; requests on the smaller arm, both arms growing alike."""
        if self.observed is None:
            return None
        target, speculative = self.observed
        side: Side = "over" if speculative / target > self._limit else "under"
        alpha = self._levels[side] / 2

        def shown(more: int) -> bool:
            bands = []
            for arm in self._arms:
                size = math.ceil(len(arm) * (self.n + more) / self.n)
                low, high = rank_band(size, self._p, alpha=alpha)
                # The ranks of the larger sample as ranks of this one; its ends may not exist yet.
                scale = len(arm) / size
                above = math.ceil((high + 1) * scale) - 1 if high < size else len(arm)
                bands.append((math.floor(low * scale), above))
            return _is_shown(self._limits(bands), self._limit, side, self._noise)

        return first(shown, most=20 * self.n + 200)
