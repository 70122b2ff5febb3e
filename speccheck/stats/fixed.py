"""Statistics: functions from arrays to an Estimate with value, interval, n and method.

A verdict is decided by an interval, so nothing here returns a bare point. All intervals are
one-sided at level `alpha` on each side; both sides together have coverage 1 - 2 alpha. Everything
is a plain function of arrays, and chance comes in as a `numpy.random.Generator`. A NaN or an
infinity in the input gives an unknown estimate (all NaN): a broken measurement must not turn into
a number. Ratios are always speculative over target-only, formed within pairs where pairs exist,
since the prompt explains most of the spread of a latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from speccheck.records import Estimate
from speccheck.stats import tails

Floats = npt.NDArray[np.float64]

DRAWS = 2000
"""Bootstrap draws: the Monte Carlo error of a 95 % limit is then a twentieth of its distance."""

FAIL_LEVELS = (0.01, 0.005, 0.002, 0.001, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6)
"""One-sided levels at which estimates are kept for judging failures over cohorts and looks."""

TAIL_VALUES = 5
"""Values that an arm must have beyond a quantile before resampling says anything about it."""

FEWEST_CLUSTERS = 5
"""Blocks or prompts below which resampling them gives no limit at 5 %: all of four lie on one side
of their median with a chance of 1/16."""

_CHUNK = 2_000_000
"""Weights held at once by the bootstrap (draws times requests): 16 MB."""


def unknown(method: str, *, n: int, alpha: float) -> Estimate:
    """No estimate: value and both limits NaN. `method` says why."""
    return Estimate(math.nan, math.nan, math.nan, n, method, alpha)


def _finite(*arrays: npt.ArrayLike) -> tuple[Floats, ...] | None:
    """The arrays as floats, or None if any value in any of them is NaN or infinite."""
    floats = tuple(np.asarray(a, dtype=float) for a in arrays)
    return floats if all(np.isfinite(a).all() for a in floats) else None


# --- quantiles ----------------------------------------------------------------------------------


def quantile(values: npt.ArrayLike, p: float) -> float:
    """Smallest value x with at least a share p of all values <= x (inverse of the empirical CDF).

    An observed value, never an interpolation between two: the order-statistic interval is exact for
    it. NaN for no values or if any value is not finite.
    """
    data = _finite(values)
    if data is None or data[0].size == 0:
        return math.nan
    ordered = np.sort(data[0])
    return float(ordered[_rank(p, ordered.size) - 1])


def _rank(p: float, n: int) -> int:
    # 0.95 * 100 is 95.00000000000001 in floats for some p and n: shave the rounding off.
    return max(1, math.ceil(p * n - 1e-9))


def existence_minimum(p: float, alpha: float) -> int:
    """Smallest n for which an upper limit of the p-quantile exists at all: ln(alpha)/ln(p)."""
    return math.ceil(math.log(alpha) / math.log(p))


@lru_cache(maxsize=4096)
def order_statistic_ranks(n: int, p: float, alpha: float) -> tuple[int | None, int | None]:
    """Ranks (1-based) of the lower and upper limit of the p-quantile, each at level alpha.

    None where no rank reaches the level. Distribution-free: the number of values below the quantile
    is Bin(n, p).
    """
    below = tails.binomial_cdf(np.arange(n + 1), n, p)
    # Lower: the largest l with P(Bin <= l-1) <= alpha; upper: the smallest u with P(Bin >= u) <= a.
    low = int(np.searchsorted(below, alpha, side="right"))
    at_least = tails.binomial_sf(np.arange(n + 1) - 1, n, p)
    reaching = np.nonzero(at_least <= alpha)[0]
    reaching = reaching[reaching >= 1]
    high = int(reaching[0]) if reaching.size else None
    return (low or None), high


def order_statistic_interval(values: npt.ArrayLike, p: float, *, alpha: float) -> Estimate:
    """The p-quantile of one arm with its exact distribution-free limits.

    A limit is infinite where there are too few values for one to exist.
    """
    method = f"order statistics, p{100 * p:g}"
    data = _finite(values)
    if data is None or data[0].size == 0:
        return unknown(method, n=np.size(values), alpha=alpha)
    ordered = np.sort(data[0])
    low, high = order_statistic_ranks(ordered.size, p, alpha)
    return Estimate(
        quantile(ordered, p),
        float(ordered[low - 1]) if low else -math.inf,
        float(ordered[high - 1]) if high else math.inf,
        ordered.size,
        method,
        alpha,
    )


def order_statistic_ratio(
    target: npt.ArrayLike, speculative: npt.ArrayLike, p: float, *, alpha: float
) -> Estimate:
    """Ratio of the arms' p-quantiles from the two exact intervals at alpha/2 each.

    Valid without pairs and without any assumption but independence, hence wide: the conservative
    fallback where the bootstrap has too few pairs.
    """
    method = f"ratio of order-statistic intervals, p{100 * p:g}"
    n = min(np.size(target), np.size(speculative))
    data = _finite(target, speculative)
    if data is None or n == 0 or min(data[0].min(), data[1].min()) <= 0:
        return unknown(method, n=n, alpha=alpha)
    t = order_statistic_interval(data[0], p, alpha=alpha / 2)
    s = order_statistic_interval(data[1], p, alpha=alpha / 2)
    low = s.low / t.high if s.low > 0 and math.isfinite(t.high) else 0.0
    high = s.high / t.low if t.low > 0 and math.isfinite(s.high) else math.inf
    return Estimate(s.value / t.value, low, high, n, method, alpha)


@dataclass(frozen=True, slots=True)
class RatioDraws:
    """Bootstrap draws of log(quantile_speculative / quantile_target), one row per quantile.

    Drawn once and read at several levels: `estimate(p, alpha)`.
    """

    n: int
    method: str
    values: Mapping[float, float]
    """Quantile -> observed log ratio."""
    draws: Mapping[float, Floats] = field(repr=False)
    """Quantile -> log ratios of the draws, sorted."""

    def estimate(self, p: float, *, alpha: float) -> Estimate:
        """The ratio of the p-quantiles with percentile limits.

        Beyond the resolution of the draws (fewer than ten draws outside the limit) the wider of the
        outermost draw and a normal limit with the draws' standard deviation is used, so that small
        levels, as Holm's procedure asks for, exist. A ratio without draws has no limits.
        """
        method = f"{self.method}, p{100 * p:g}"
        if p not in self.values:
            return unknown(method, n=self.n, alpha=alpha)
        value, draws = self.values[p], self.draws.get(p)
        if draws is None:
            return Estimate(math.exp(value), 0.0, math.inf, self.n, method, alpha)
        low, high = np.quantile(draws, (alpha, 1 - alpha))
        if alpha * draws.size < 10:
            reach = tails.normal_isf(alpha) * float(draws.std())
            low, high = min(draws[0], value - reach), max(draws[-1], value + reach)
        return Estimate(
            math.exp(value), math.exp(float(low)), math.exp(float(high)), self.n, method, alpha
        )


def bootstrap_quantile_ratios(
    target: npt.ArrayLike,
    speculative: npt.ArrayLike,
    quantiles: Sequence[float],
    *,
    rng: np.random.Generator,
    blocks: npt.ArrayLike | None = None,
    prompts: npt.ArrayLike | None = None,
    draws: int = DRAWS,
) -> RatioDraws:
    """Paired percentile bootstrap of quantile ratios (Efron), of pairs or of clusters of pairs.

    `target[i]` and `speculative[i]` are one pair (same prompt, same load), any positive unit.
    With `blocks` (one id per pair) whole blocks are resampled, for requests that are correlated in
    time; with `prompts` whole prompts, whose repeats do the same work; with both a pair weighs the
    product of the two (the pigeonhole bootstrap of crossed clusters: Owen 2007, on the safe side).
    Quantiles are inverse empirical CDFs, so a draw is a weight per pair and a cumulative sum. n
    counts pairs either way; the method says how many blocks and prompts. Of fewer than
    `FEWEST_CLUSTERS` blocks or prompts nothing is drawn, and the ratio has no limits.

    Raises:
        ValueError: arrays of different length.
    """
    if np.size(target) != np.size(speculative):
        raise ValueError("paired arrays of different length: pair by id first")
    n = np.size(target)
    given = {"blocks": blocks, "prompts": prompts}
    named = {
        name: np.unique(np.asarray(ids), return_inverse=True)[1]
        for name, ids in given.items()
        if ids is not None
    }
    units = list(named.values()) or [np.arange(n)]
    sizes = [int(unit.max()) + 1 if n else 0 for unit in units]
    over = " and ".join(f"{size} {name}" for name, size in zip(named, sizes, strict=False))
    kind = "block bootstrap" if blocks is not None else "paired bootstrap"
    method = f"{kind}{f' over {over}' if over else ''}, {draws} draws"
    data = _finite(target, speculative)
    if data is None or n < 2 or min(data[0].min(), data[1].min()) <= 0:
        return RatioDraws(n, method, {}, {})
    values = {p: math.log(quantile(data[1], p) / quantile(data[0], p)) for p in quantiles}
    if named and min(sizes) < FEWEST_CLUSTERS:
        return RatioDraws(n, f"{kind} over {over}: too few for a limit", values, {})
    orders = [np.argsort(arm, kind="stable") for arm in data]
    rows_at_once = max(1, _CHUNK // n)
    logs: list[Floats] = []
    for start in range(0, draws, rows_at_once):
        rows = min(rows_at_once, draws - start)
        weights = np.ones((rows, n), dtype=np.int64)
        for unit, size in zip(units, sizes, strict=True):
            picks = rng.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
            counts = np.bincount(picks.ravel(), minlength=rows * size).reshape(rows, size)
            weights *= counts[:, unit]
        weights[weights.sum(axis=1) == 0] = 1  # no pair has both its block and its prompt drawn
        arms = [
            _weighted_quantiles(arm[order], weights[:, order], quantiles)
            for arm, order in zip(data, orders, strict=True)
        ]
        logs.append(np.log(arms[1] / arms[0]))
    drawn = np.sort(np.concatenate(logs), axis=0)
    return RatioDraws(n, method, values, {p: drawn[:, j] for j, p in enumerate(quantiles)})


def unpaired_quantile_ratios(
    target: npt.ArrayLike,
    speculative: npt.ArrayLike,
    quantiles: Sequence[float],
    *,
    rng: np.random.Generator,
    prompts: tuple[Sequence[str], Sequence[str]] | None = None,
    draws: int = DRAWS,
) -> RatioDraws:
    """Percentile bootstrap of quantile ratios of two independent samples, any positive unit.

    Each arm is resampled on its own (Efron); with `prompts` (one id per value of each arm) whole
    prompts are, with all that they sent to either arm. A quantile needs some values beyond it on
    both arms: where fewer than `TAIL_VALUES` are expected there is no draw for it, and
    `order_statistic_ratio` is what remains. n counts the smaller arm. Of fewer than
    `FEWEST_CLUSTERS` prompts nothing is drawn, and the ratio has no limits.
    """
    method = f"unpaired bootstrap, {draws} draws"
    n = min(np.size(target), np.size(speculative))
    data = _finite(target, speculative)
    if data is None or n == 0 or min(data[0].min(), data[1].min()) <= 0:
        return RatioDraws(n, method, {}, {})
    known = tuple(p for p in quantiles if n * min(p, 1 - p) >= TAIL_VALUES)
    if not known:
        return RatioDraws(n, method, {}, {})
    values = {p: math.log(quantile(data[1], p) / quantile(data[0], p)) for p in known}

    def drawn_counts(size: int) -> npt.NDArray[np.int64]:
        picks = rng.integers(0, size, (draws, size)) + size * np.arange(draws)[:, None]
        return np.bincount(picks.ravel(), minlength=draws * size).reshape(draws, size)

    if prompts is None:
        weights = [drawn_counts(arm.size) for arm in data]
    else:
        names, unit = np.unique(np.concatenate([*prompts]), return_inverse=True)
        method = f"unpaired bootstrap over {names.size} prompts"
        if names.size < FEWEST_CLUSTERS:
            return RatioDraws(n, f"{method}: too few for a limit", values, {})
        method += f", {draws} draws"
        counts = drawn_counts(names.size)
        weights = [counts[:, unit[: data[0].size]], counts[:, unit[data[0].size :]]]
        for side in weights:
            side[side.sum(axis=1) == 0] = 1  # no prompt that was drawn went to this arm
    logs = []
    for arm, side in zip(data, weights, strict=True):
        order = np.argsort(arm, kind="stable")
        logs.append(np.log(_weighted_quantiles(arm[order], side[:, order], known)))
    drawn = np.sort(logs[1] - logs[0], axis=0)
    return RatioDraws(n, method, values, {p: drawn[:, j] for j, p in enumerate(known)})


def _weighted_quantiles(
    ordered: Floats, weights: npt.NDArray[np.int64], quantiles: Sequence[float]
) -> Floats:
    """Quantiles (draws x quantiles) of values in ascending order under weights (draws x values)."""
    reached = np.cumsum(weights, axis=1)
    total = reached[:, -1]
    found = [
        ordered[np.argmax(reached >= np.maximum(1, np.ceil(p * total - 1e-9))[:, None], axis=1)]
        for p in quantiles
    ]
    return np.stack(found, axis=1)


def histogram_quantile_bounds(
    buckets: Sequence[tuple[float, float]], p: float
) -> tuple[float, float]:
    """Between which two bucket borders the p-quantile lies: (low, high], in the buckets' unit.

    `buckets` are Prometheus' cumulative (upper border, count) with +Inf last. A histogram knows no
    more than this; interpolating inside a bucket would invent a number. NaN for an empty histogram.
    """
    ordered = sorted(buckets)
    total = ordered[-1][1] if ordered else math.nan
    if not total > 0:
        return math.nan, math.nan
    low = 0.0
    for border, count in ordered:
        if count >= p * total:
            return low, border
        low = border
    return low, math.inf


# --- means and ratios ---------------------------------------------------------------------------


def geometric_mean_ratio(
    target: npt.ArrayLike,
    speculative: npt.ArrayLike,
    *,
    alpha: float,
    blocks: npt.ArrayLike | None = None,
    prompts: npt.ArrayLike | None = None,
) -> Estimate:
    """Geometric mean of speculative/target over pairs, t-interval on the log ratios.

    With `blocks` (one id per pair), or `prompts`, the standard error is clustered by them and the
    degrees of freedom are clusters - 1; with both it is that of crossed clusters (variance by block
    plus by prompt less by both together: Cameron, Gelbach, Miller 2011; never less than either),
    the degrees of freedom the fewer ones. n counts pairs either way; the method says how many.

    Raises:
        ValueError: arrays of different length.
    """
    if np.size(target) != np.size(speculative):
        raise ValueError("paired arrays of different length: pair by id first")
    method = "geometric mean of paired ratios, t-interval"
    data = _finite(target, speculative)
    if data is None or data[0].size == 0 or min(data[0].min(), data[1].min()) <= 0:
        return unknown(method, n=np.size(target), alpha=alpha)
    logs = np.log(data[1] / data[0])
    units = {
        name: np.unique(np.asarray(ids), return_inverse=True)[1]
        for name, ids in (("blocks", blocks), ("prompts", prompts))
        if ids is not None
    }
    if units:
        counted = (f"{int(unit.max()) + 1} {name}" for name, unit in units.items())
        method += f" clustered by {' and '.join(counted)}"
    clusters = list(units.values()) or [np.arange(logs.size)]
    errors = [_error_by(logs, unit) for unit in clusters]
    freedom = [int(unit.max()) for unit in clusters]
    if len(clusters) > 1:
        joined = np.unique(np.stack(clusters), axis=1, return_inverse=True)[1]
        variance = sum(error**2 for error in errors) - _error_by(logs, joined.ravel()) ** 2
        errors.append(math.sqrt(max(variance, 0.0)))
        freedom.append(min(freedom))
    value = float(logs.mean())
    reach = max(
        float(tails.student_isf(alpha, df)) * error if df else math.inf
        for error, df in zip(errors, freedom, strict=True)
    )
    return Estimate(
        math.exp(value), math.exp(value - reach), _exp(value + reach), logs.size, method, alpha
    )


def _error_by(values: Floats, unit: npt.NDArray[np.int64]) -> float:
    """Standard error of the mean with clusters of values as units; 0 of a single cluster."""
    totals, sizes = np.bincount(unit, values), np.bincount(unit).astype(float)
    residuals = totals - values.mean() * sizes
    correction = sizes.size / max(sizes.size - 1, 1)
    return math.sqrt(correction * float(residuals @ residuals)) / values.size


def unpaired_mean_ratio(
    target: npt.ArrayLike,
    speculative: npt.ArrayLike,
    *,
    alpha: float,
    prompts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Estimate:
    """Ratio of geometric means of two independent samples, Welch's t-interval on the logs.

    For a canary, in which each request runs on one arm only. n is the smaller arm's. With `prompts`
    (one id per value of each arm) the standard error of the difference is clustered by them, over
    both arms together, with clusters - 1 degrees of freedom.
    """
    method = "ratio of geometric means, unpaired, Welch t-interval"
    n = min(np.size(target), np.size(speculative))
    data = _finite(target, speculative)
    if data is None or n < 2 or min(data[0].min(), data[1].min()) <= 0:
        return unknown(method, n=n, alpha=alpha)
    t, s = np.log(data[0]), np.log(data[1])
    if prompts is not None:
        shares = np.concatenate([-(t - t.mean()) / t.size, (s - s.mean()) / s.size])
        clusters = np.unique(np.concatenate([*prompts]), return_inverse=True)[1]
        size = int(clusters.max()) + 1
        method = f"ratio of geometric means, unpaired, t-interval clustered by {size} prompts"
        value = float(s.mean() - t.mean())
        reach = math.inf
        if size > 1:
            totals = np.bincount(clusters, shares)
            error = math.sqrt(size / (size - 1) * float(totals @ totals))
            reach = float(tails.student_isf(alpha, size - 1)) * error
        return Estimate(
            math.exp(value), math.exp(value - reach), _exp(value + reach), n, method, alpha
        )
    parts = [float(x.var(ddof=1)) / x.size for x in (t, s)]
    value, variance = float(s.mean() - t.mean()), sum(parts)
    if variance == 0:
        return Estimate(math.exp(value), math.exp(value), math.exp(value), n, method, alpha)
    df = variance**2 / sum(part**2 / (x.size - 1) for part, x in zip(parts, (t, s), strict=True))
    reach = float(tails.student_isf(alpha, df)) * math.sqrt(variance)
    return Estimate(math.exp(value), math.exp(value - reach), _exp(value + reach), n, method, alpha)


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def clustered_ratio(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, alpha: float
) -> Estimate:
    """Ratio of sums with requests as clusters: sum A / sum D, linearised, t with n-1 df.

    For acceptance A is accepted and D drafted tokens per request. Tokens of one request are far
    from independent (design effects of 6 to 31 are usual), so a binomial interval on tokens is
    grossly too narrow. Clusters with D = 0 say nothing about the ratio and are left out (they
    belong in draft coverage). Cochran, Sampling Techniques, 6.3.
    """
    method = "ratio of sums, requests as clusters, t-interval"
    data = _finite(numerators, denominators)
    if data is None:
        return unknown(method, n=np.size(numerators), alpha=alpha)
    A, D = (a[data[1] > 0] for a in data)
    n = int(D.size)
    if n == 0:
        return unknown(method, n=0, alpha=alpha)
    r = float(A.sum() / D.sum())
    if n < 2:
        return Estimate(r, -math.inf, math.inf, n, method, alpha)
    residuals = A - r * D
    se = math.sqrt(n / (n - 1) * float(residuals @ residuals)) / float(D.sum())
    reach = float(tails.student_isf(alpha, n - 1)) * se
    return Estimate(r, r - reach, r + reach, n, method, alpha)


def mean(values: npt.ArrayLike, *, alpha: float) -> Estimate:
    """Arithmetic mean with Student's t-interval; unbounded for a single value."""
    estimate = clustered_ratio(values, np.ones(np.size(values)), alpha=alpha)
    return Estimate(
        estimate.value, estimate.low, estimate.high, estimate.n, "mean, t-interval", alpha
    )


def acceptance_rate(accepted: npt.ArrayLike, drafted: npt.ArrayLike, *, alpha: float) -> Estimate:
    """Accepted/drafted tokens, pooled, requests as clusters; limits within [0, 1].

    Where no token at all (or every token) was accepted, the spread between requests is zero and the
    t-interval a point. The limit is then that of n requests of which none did: 1 - alpha^(1/n).
    """
    estimate = clustered_ratio(accepted, drafted, alpha=alpha)
    low, high = estimate.low, estimate.high
    if estimate.value == 0:
        high = zero_events_bound(estimate.n, alpha=alpha)
    elif estimate.value == 1:
        low = 1 - zero_events_bound(estimate.n, alpha=alpha)
    if estimate.is_known:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(estimate.value, low, high, estimate.n, estimate.method, alpha)


def acceptance_from_totals(accepted: int, drafted: int, requests: int, *, alpha: float) -> Estimate:
    """Acceptance from server counters, which hold sums over requests and nothing else.

    The spread between requests is unknown, so the worst is taken: each request accepted all or
    nothing, a binomial with n = requests (Clopper-Pearson with a fractional count).
    """
    method = "counters: sums only, interval as if each request accepted all or nothing"
    if drafted <= 0 or requests <= 0:
        return unknown(method, n=max(requests, 0), alpha=alpha)
    share = accepted / drafted
    low, high = _beta_limits(share * requests, requests, alpha)
    return Estimate(share, low, high, requests, method, alpha)


def mean_acceptance_length(
    accepted: npt.ArrayLike, verify_steps: npt.ArrayLike, *, alpha: float
) -> Estimate:
    """1 + accepted tokens per verify step (bonus token included), requests as clusters."""
    e = clustered_ratio(accepted, verify_steps, alpha=alpha)
    return Estimate(1 + e.value, max(1 + e.low, 1.0), 1 + e.high, e.n, e.method, alpha)


def block_log_ratio(
    logs: npt.ArrayLike, blocks: npt.ArrayLike, is_speculative: npt.ArrayLike, *, alpha: float
) -> Estimate:
    """Speculative/target ratio of a switchback (ABBA) run, the block as unit, t-interval.

    `logs` are log latencies, one per request, with its block number (in time order) and whether the
    block ran the speculative arm. The i-th speculative block is compared with the i-th target-only
    block, which in ABBA orders is its neighbour, so slow drift cancels. n counts pairs of blocks; a
    block without a partner is left out and the method says so.

    Raises:
        ValueError: a block that holds both arms.
    """
    method = "switchback blocks, t-interval on block log ratios"
    data = _finite(logs)
    if data is None:
        return unknown(method, n=0, alpha=alpha)
    block, arm = np.asarray(blocks), np.asarray(is_speculative, dtype=bool)
    means: dict[bool, list[float]] = {False: [], True: []}
    for number in np.unique(block):
        here = block == number
        sides = np.unique(arm[here])
        if sides.size != 1:
            raise ValueError(f"block {number} holds both arms: not a switchback run")
        means[bool(sides[0])].append(float(data[0][here].mean()))
    n = min(len(means[True]), len(means[False]))
    left_out = len(means[True]) + len(means[False]) - 2 * n
    if left_out:
        method += f", {left_out} block(s) without a partner left out"
    if n == 0:
        return unknown(method, n=0, alpha=alpha)
    differences = np.subtract(means[True][:n], means[False][:n])
    value = float(differences.mean())
    if n < 2:
        return Estimate(math.exp(value), 0.0, math.inf, n, method, alpha)
    reach = float(tails.student_isf(alpha, n - 1)) * float(differences.std(ddof=1)) / math.sqrt(n)
    return Estimate(math.exp(value), math.exp(value - reach), _exp(value + reach), n, method, alpha)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """How much the second of two independent estimates is above the first, from their limits.

    Square-and-add (Zou and Donner 2008): each limit is as far from the difference as the two limits
    that it comes from are from their values, added in quadrature, so that skewed intervals stay
    skewed. n is the smaller one's.

    Raises:
        ValueError: limits at different levels.
    """
    if first.alpha != second.alpha:
        raise ValueError("limits at different levels cannot be combined")
    value = second.value - first.value
    low = math.hypot(second.value - second.low, first.high - first.value)
    high = math.hypot(second.high - second.value, first.value - first.low)
    method = f"difference of two estimates, square-and-add; each: {second.method}"
    n = min(first.n, second.n)
    return Estimate(value, value - low, value + high, n, method, first.alpha)


def total_variation(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    rng: np.random.Generator,
    alpha: float,
    draws: int = DRAWS,
) -> Estimate:
    """Half the sum of absolute differences of two samples' shares; counts over the same cells.

    Chance alone makes it positive, so both limits come from redrawing each sample from its own
    shares (parametric bootstrap): the upper limit is the draws' quantile, the lower one reflects it
    (basic), and both err to the side of "not known". n is the smaller sample's.
    """
    method = f"total variation, parametric bootstrap, {draws} draws"
    a, b = np.asarray(first, float), np.asarray(second, float)
    n = int(min(a.sum(), b.sum()))
    if n == 0:
        return unknown(method, n=0, alpha=alpha)
    value = 0.5 * float(np.abs(a / a.sum() - b / b.sum()).sum())
    drawn = [rng.multinomial(int(x.sum()), x / x.sum(), draws) / x.sum() for x in (a, b)]
    high = float(np.quantile(0.5 * np.abs(drawn[0] - drawn[1]).sum(axis=1), 1 - alpha))
    high = min(max(high, value), 1.0)
    return Estimate(value, max(0.0, 2 * value - high), high, n, method, alpha)


def homogeneity(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Pearson's chi-square of two samples over the same cells, and its p-value; no empty cells."""
    table = np.array([first, second], float)
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    df = table.shape[1] - 1
    return statistic, tails.chi2_sf(statistic, df) if df else 1.0


# --- proportions --------------------------------------------------------------------------------


def _beta_limits(k: float, n: float, alpha: float) -> tuple[float, float]:
    low = float(special.betaincinv(k, n - k + 1, alpha)) if k > 0 else 0.0
    high = float(special.betaincinv(k + 1, n - k, 1 - alpha)) if k < n else 1.0
    return low, high


def clopper_pearson(k: int, n: int, *, alpha: float) -> Estimate:
    """Share k/n with exact one-sided binomial limits (Clopper and Pearson 1934)."""
    if n <= 0:
        return unknown("Clopper-Pearson", n=0, alpha=alpha)
    return Estimate(k / n, *_beta_limits(k, n, alpha), n, "Clopper-Pearson", alpha)


def clustered_share(hits: npt.ArrayLike, sizes: npt.ArrayLike, *, alpha: float) -> Estimate:
    """Share of hits, pooled, where those of a cluster are not independent (repeats of a prompt).

    `hits[g]` of the `sizes[g]` cases of cluster g. Limits are Clopper and Pearson's, exact near 0
    and 1, where shares of interest are and a t-interval over clusters is far too short. They are
    those of (sum n)^2 / sum n^2 cases (Kish 1965), the clusters where all are of one size: as if
    all cases of a cluster came out alike, which is the worst. n counts clusters.

    Raises:
        ValueError: arrays of different length.
    """
    k, n = (np.asarray(x, dtype=float) for x in (hits, sizes))
    if k.shape != n.shape:
        raise ValueError("counts of clusters of different length")
    k, n = k[n > 0], n[n > 0]
    clusters, total = int(n.size), float(n.sum())
    if clusters == total:
        return clopper_pearson(int(k.sum()), clusters, alpha=alpha)
    share, independent = float(k.sum()) / total, total**2 / float((n**2).sum())
    limits = _beta_limits(share * independent, independent, alpha)
    method = f"Clopper-Pearson, {clusters} prompts as clusters"
    return Estimate(share, *limits, clusters, method, alpha)


def zero_events_bound(n: int, *, alpha: float = 0.05) -> float:
    """Upper limit of a rate after n cases without an event: 1 - alpha^(1/n); 1 for n = 0."""
    return 1 - alpha ** (1 / n) if n > 0 else 1.0


def mcnemar_exact(b: int, c: int) -> float:
    """One-sided exact McNemar p: P(Bin(b + c, 1/2) >= b).

    b: target passes and speculative fails; c: the reverse. It tests "any difference"; for
    non-inferiority use `tango`.
    """
    return float(tails.binomial_sf(b - 1, b + c, 0.5))


def tango(b: int, c: int, n: int, *, alpha: float) -> Estimate:
    """Score interval for the paired difference (b - c)/n (Tango 1998).

    b: target passes and speculative fails; c: the reverse; n: all paired cases. Positive is worse.
    """
    if n <= 0:
        return unknown("Tango score interval", n=0, alpha=alpha)
    low, high = _tango_limits(b, c, n, alpha)
    return Estimate((b - c) / n, low, high, n, "Tango score interval", alpha)


def _tango_limits(b: float, c: float, n: float, alpha: float) -> tuple[float, float]:
    from scipy.optimize import brentq

    z = tails.normal_isf(alpha)

    def score(d: float) -> float:
        A, B, C = 2 * n, -b - c + (2 * n - b + c) * d, -c * d * (1 - d)
        q = (math.sqrt(max(B * B - 4 * A * C, 0.0)) - B) / (2 * A)
        variance = n * (2 * q + d * (1 - d))
        difference = b - c - n * d
        if variance <= 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / math.sqrt(variance)

    value = (b - c) / n

    def root(level: float, inner: float, outer: float) -> float:
        # The score falls from +inf at d=-1 to -inf at d=1; the limit lies between value and end.
        return float(brentq(lambda d: max(min(score(d), 1e6), -1e6) - level, inner, outer))

    low = -1.0 if value <= -1 else root(z, -1.0, value)
    high = 1.0 if value >= 1 else root(-z, value, 1.0)
    return low, high


FEW_CLUSTERS = 5
"""Clusters that differ, below which their spread says nothing: whole clusters count as one case."""


def tango_clustered(
    b: npt.ArrayLike, c: npt.ArrayLike, n: npt.ArrayLike, *, alpha: float
) -> Estimate:
    """Tango's interval where cases come in clusters (one source document, one conversation).

    `b[g]`, `c[g]` and `n[g]` are the counts of cluster g. Counts are divided by the design effect
    of the difference, never under 1 (the effective sample of Rao and Scott 1992); where fewer than
    `FEW_CLUSTERS` clusters differ it is the mean cluster size, as if all cases of a cluster were
    one. `n` of the estimate counts clusters, its value is over all cases.

    Raises:
        ValueError: arrays of different length.
    """
    worse, better, sizes = (np.asarray(x, dtype=np.float64) for x in (b, c, n))
    if not worse.shape == better.shape == sizes.shape:
        raise ValueError("counts of clusters of different length")
    held = sizes > 0
    worse, better, sizes = worse[held], better[held], sizes[held]
    total, clusters = float(sizes.sum()), int(sizes.size)
    if total == clusters:  # each case on its own
        return tango(int(worse.sum()), int(better.sum()), clusters, alpha=alpha)
    method = f"Tango score interval, {clusters} clusters (Rao-Scott)"
    if not clusters:
        return unknown(method, n=0, alpha=alpha)
    lost, gained = float(worse.sum()), float(better.sum())
    value = (lost - gained) / total
    effect = total / clusters
    if int(((worse > 0) | (better > 0)).sum()) >= FEW_CLUSTERS:
        residuals = worse - better - value * sizes
        spread = clusters / (clusters - 1) * float((residuals**2).sum())
        effect = max(1.0, spread / max(lost + gained - total * value**2, 1e-12))
    low, high = _tango_limits(lost / effect, gained / effect, total / effect, alpha)
    return Estimate(value, low, high, clusters, method, alpha)


@dataclass(frozen=True, slots=True)
class RateComparison:
    """Two event rates compared: their ratio and the one-sided p of "the first is not higher"."""

    ratio: float
    p_value: float


def compare_rates(
    events: int, exposure: float, control_events: int, control_exposure: float
) -> RateComparison:
    """Is the first rate higher than the control's? Exact, conditional on the sum of events.

    Under equal rates events ~ Bin(events + control_events, exposure share). For greedy divergence
    exposure counts compared tokens. NaN without exposure on both sides.
    """
    if exposure <= 0 or control_exposure <= 0:
        return RateComparison(math.nan, math.nan)
    total = events + control_events
    p = float(tails.binomial_sf(events - 1, total, exposure / (exposure + control_exposure)))
    if control_events == 0:
        return RateComparison(math.inf if events else math.nan, p)
    return RateComparison(events / exposure / (control_events / control_exposure), p)


def fisher_all_against_none(k: int) -> float:
    """One-sided Fisher p of k passes in k against 0 in k: 1/C(2k, k)."""
    return 1 / math.comb(2 * k, k)


def same_mix(target: Sequence[int], speculative: Sequence[int]) -> tuple[float, int, float]:
    """Chi-square test that two samples share one mix: (statistic, degrees of freedom, p).

    Counts per class, the same classes in both. The smallest classes are joined until each expects
    5 in both samples; where fewer than two are left there is nothing to compare and p is 1.
    """
    table = np.array([target, speculative], dtype=float)
    table = table[:, np.argsort(table.sum(axis=0), kind="stable")]
    sizes, total = table.sum(axis=1, keepdims=True), table.sum()
    while table.shape[1] > 1 and (sizes.min() / total) * table[:, 0].sum() < 5:
        table = np.concatenate([table[:, :2].sum(axis=1, keepdims=True), table[:, 2:]], axis=1)
        table = table[:, np.argsort(table.sum(axis=0), kind="stable")]
    df = table.shape[1] - 1
    if df < 1:
        return 0.0, 0, 1.0
    expected = sizes * table.sum(axis=0) / total
    statistic = float(((table - expected) ** 2 / expected).sum())
    return statistic, df, tails.chi2_sf(statistic, df)


# --- several tests ------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given. A NaN counts as 1: no evidence."""
    p = np.nan_to_num(np.asarray(p_values, dtype=float), nan=1.0)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    return [float(x) for x in adjusted]


# --- how many more ------------------------------------------------------------------------------

_MOST = 1_000_000
"""An answer above this is no answer: the estimate sits on its limit."""

_MOST_CLUSTERS = 2_048
"""The same for clusters."""


def needed_for_interval(estimate: Estimate, limit: float, *, power: float = 0.8) -> int | None:
    """How many more units until the interval lies on one side of the limit, with the given power,
    if the true value is the one measured: the width shrinks with the square root of n.

    Positive values with a positive limit are taken on the log scale where the interval is one of a
    ratio (its limits are positive). None where nothing can be said: no estimate, no finite limit
    on the side that matters, or the value on its limit.
    """
    value, low, high = estimate.value, estimate.low, estimate.high
    if math.isnan(value) or estimate.n < 1:
        return None
    bound = high if value < limit else low
    if not math.isfinite(bound) or value == limit:
        return None
    if min(value, limit, bound) > 0:
        value, limit, bound = math.log(value), math.log(limit), math.log(bound)
    z = tails.normal_isf(estimate.alpha)
    growth = ((z + tails.normal_quantile(power)) / z * (bound - value) / (limit - value)) ** 2
    if estimate.n * growth > _MOST:
        return None
    return max(0, math.ceil(estimate.n * growth) - estimate.n)


def needed_clusters(
    estimate: Estimate,
    limit: float,
    clusters: int,
    *,
    alpha_at: Callable[[int], float],
    power: float = 0.8,
) -> int | None:
    """How many more clusters until the interval lies on one side of the limit, as
    `needed_for_interval`, for an interval of few clusters: Student's quantile falls from 6.3 at two
    to 1.9 at eight, so the width shrinks far faster than with the square root.

    Args:
        estimate: Student's interval over `clusters` clusters; on the log scale if all is positive.
        limit: what the interval is held against.
        clusters: how many it rests on.
        alpha_at: one-sided level of the interval over so many clusters.
        power: chance that the interval decides then, if the true value is the one measured.

    Returns:
        None where nothing can be said: a single cluster, no estimate, or the value on its limit.
    """
    value, low, high = estimate.value, estimate.low, estimate.high
    bound = high if value < limit else low
    if not (math.isfinite(value) and math.isfinite(bound)) or value == limit or clusters < 2:
        return None
    if min(value, limit) > 0 and bound > 0:
        value, limit, bound = math.log(value), math.log(limit), math.log(bound)
    spread = abs(bound - value) / float(tails.student_isf(estimate.alpha, clusters - 1))
    sizes = np.arange(clusters + 1, _MOST_CLUSTERS + 1)
    levels = np.array([alpha_at(int(size)) for size in sizes])
    reach = tails.student_isf(levels, sizes - 1) + tails.normal_quantile(power)
    enough = reach * spread * np.sqrt(clusters / sizes) <= abs(limit - value)
    return int(sizes[np.argmax(enough)]) - clusters if enough.any() else None


def needed_for_share(k: int, n: int, limit: float, *, alpha: float) -> int | None:
    """How many more requests until Clopper-Pearson decides against the limit at the same rate.

    For k = 0 these are the clean requests still missing: ln(alpha)/ln(1 - limit) in all.
    """
    if n <= 0:
        return math.ceil(math.log(alpha) / math.log1p(-limit)) if 0 < limit < 1 else None
    rate = k / n
    if rate == limit:
        return None

    def decided(size: int) -> bool:
        low, high = _beta_limits(rate * size, size, alpha)
        return high <= limit if rate < limit else low > limit

    size = n
    while not decided(size):
        size *= 2
        if size > _MOST:
            return None
    undecided = size // 2
    while size - undecided > 1:
        middle = (size + undecided) // 2
        size, undecided = (middle, undecided) if decided(middle) else (size, middle)
    return max(0, size - n)


def certify_share_n(k: int, limit: float, *, alpha: float) -> int:
    """Smallest n at which k events still certify a rate <= limit (Clopper-Pearson upper limit)."""
    n = k + 1
    while _beta_limits(k, n, alpha)[1] > limit:
        n += 1
    return n


def quantile_ratio_n(
    log_sd: float, p: float, true_ratio: float, *, limit: float, alpha: float, power: float = 0.8
) -> int:
    """Requests per arm to pass `ratio <= limit`, unpaired, lognormal latencies of this log-sd.

    n = 2 (c (z_alpha + z_power) / (ln limit - ln ratio))^2 with c = log_sd sqrt(p(1-p))/phi(z_p),
    but never below what an upper limit needs to exist.

    Raises:
        ValueError: a true ratio at or above the limit can never pass.
    """
    if true_ratio >= limit:
        raise ValueError(f"a true ratio of {true_ratio} never passes a limit of {limit}")
    c = log_sd * math.sqrt(p * (1 - p)) / tails.normal_pdf(tails.normal_quantile(p))
    z = tails.normal_isf(alpha) + tails.normal_quantile(power)
    return math.ceil(2 * (c * z / (math.log(limit) - math.log(true_ratio))) ** 2)
