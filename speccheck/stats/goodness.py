"""Goodness of fit of sampled tokens to the law that a model states for each of them.

Every position j has a row of probabilities over categories: the k likeliest tokens of the target
in falling order, and one lumped tail. Under the null the token drawn at j follows that row given
its own prefix, so sums of h_j(x_j) - E h_j are martingales: no test here assumes that positions are
independent of each other, or that rows are alike.

Each test gives a p-value and an effect with its limits, in the unit of the effect; a share is a
distance between probabilities, and none of them exceeds the mean total variation where it says so.
`seen` is the effect that the test finds nine times in ten at the level it was declared with: what a
test could not have seen it does not speak about. Sums whose normal approximation is not to be
trusted (few uncertain positions) get a Chernoff bound, which errs towards no finding.

Rows are (n, c) float64 and sum to 1; `seen` categories are (n,) int.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from speccheck.records import Estimate
from speccheck.stats import tails

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EFFECT_ALPHA = 0.05
"""One-sided level of each limit of an effect."""

POWER = 0.9
"""Share of runs in which an effect of size `seen` is found."""

LEAST_VARIANCE = 5.0
"""Variance of a count under which a chi-square cell is merged with its neighbour (Cochran's 5)."""

MOST_SKEW = 0.1
"""Skewness of a sum above which its tail is bounded (Chernoff) rather than approximated (normal):
at 4 standard deviations the normal tail is then off by a factor of about two."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What one test found. `effect` is unknown and `p_value` NaN where it does not apply."""

    statistic: float
    p_value: float
    n: int
    """Tokens (or samples) that went in."""
    effect: Estimate
    seen: float
    """Smallest effect found with probability `POWER` at the declared level."""
    where: str = ""
    """The part with the largest effect, where the test has parts."""

    @property
    def applies(self) -> bool:
        """Whether there was anything to test."""
        return not math.isnan(self.p_value)


def no_fit(method: str, n: int = 0) -> Fit:
    """A test that does not apply; `method` says why."""
    unknown = Estimate(math.nan, math.nan, math.nan, n, method, EFFECT_ALPHA)
    return Fit(math.nan, math.nan, n, unknown, math.nan)


# --- T1: probability integral transform ---------------------------------------------------------


def pit(rows: Floats, seen: Ints, w: Floats) -> Floats:
    """T1: (n,) randomised PIT, U = F(before the category) + w * p(category), w uniform.

    Under the null i.i.d. uniform over positions and requests, the lumped tail included
    (Rosenblatt 1952).

    >>> row = np.array([[0.5, 0.3, 0.15, 0.05]])
    >>> round(float(pit(row, np.array([1]), np.array([0.4]))[0]), 12)
    0.62
    """
    at = np.arange(len(rows))
    below = np.cumsum(rows, axis=1)[at, seen] - rows[at, seen]
    values: Floats = np.clip(below + w * rows[at, seen], 0.0, 1.0)
    return values


def uniform_ks(u: Floats, *, alpha: float) -> Fit:
    """T1: Kolmogorov-Smirnov of PIT values against the uniform.

    The effect is the distance itself, a lower bound of the mean total variation, with the limits
    of Dvoretzky, Kiefer and Wolfowitz (Massart's constant). The p-value is twice the exact one of
    the larger side: below 0.05 exact to 2e-5 of itself (Miller 1956), above it too large.
    """
    n = u.size
    if n == 0:
        return no_fit("no tokens")
    ordered = np.sort(u)
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    reach = math.sqrt(math.log(2 / EFFECT_ALPHA) / (2 * n))
    effect = Estimate(
        distance,
        max(0.0, distance - reach),
        distance + reach,
        n,
        "Kolmogorov distance, DKW limits",
        EFFECT_ALPHA,
    )
    # P(D_n > d) is about 2 exp(-2 n d^2); a shift of that size is passed half of the time.
    critical = math.sqrt(math.log(2 / alpha) / (2 * n))
    seen = critical + tails.normal_quantile(POWER) / (2 * math.sqrt(n))
    return Fit(distance, min(1.0, 2 * tails.smirnov_sf(distance, n)), n, effect, seen)


def uniform_bins(u: Floats, *, alpha: float, bins: int = 20) -> Fit:
    """T1: chi-square of PIT values in `bins` equal bins; the effect as in `node_fit`."""
    n = u.size
    if n < 5 * bins:
        return no_fit(f"fewer than {5 * bins} tokens", n)
    counts = np.bincount(np.minimum((u * bins).astype(int), bins - 1), minlength=bins)
    statistic = float(((counts - n / bins) ** 2).sum() * bins / n)
    return _chi_square(statistic, bins - 1, n, alpha=alpha)


def _chi_square(statistic: float, df: int, n: int, *, alpha: float) -> Fit:
    """A chi-square of n draws with its effect: half the root of the chi-square distance.

    For laws p and pi the distance sum (pi - p)^2 / p bounds the total variation: TV <= half its
    root. The statistic has noncentrality n times the distance, whose limits are those of the
    noncentral chi-square.
    """
    effect = Estimate(
        _half_root(max(0.0, statistic - df) / n),
        _half_root(_noncentrality(statistic, df, 1 - EFFECT_ALPHA) / n),
        # A statistic below its mean would bound the distance by nothing: it is taken at its mean.
        _half_root(_noncentrality(max(statistic, df), df, EFFECT_ALPHA) / n),
        n,
        "half the root of the chi-square distance, noncentral chi-square limits",
        EFFECT_ALPHA,
    )
    seen = _half_root(noncentrality_for_power(df, alpha) / n)
    return Fit(statistic, tails.chi2_sf(statistic, df), n, effect, seen)


def _half_root(distance: float) -> float:
    return math.sqrt(distance) / 2


def _noncentrality(statistic: float, df: int, level: float) -> float:
    """The noncentrality at which a value as small as `statistic` has probability `level`."""
    from scipy.optimize import brentq

    if tails.chi2_cdf(statistic, df) <= level:
        return 0.0
    high = statistic + 10 * math.sqrt(statistic + df) + 50
    return float(brentq(lambda x: tails.noncentral_chi2_cdf(statistic, df, x) - level, 1e-9, high))


def noncentrality_for_power(df: int, alpha: float, power: float = POWER) -> float:
    """Noncentrality at which a chi-square of level alpha is passed with this power (STATS 1.6)."""
    from scipy.optimize import brentq

    critical = tails.chi2_isf(alpha, df)

    def missed(noncentrality: float) -> float:
        return tails.noncentral_chi2_cdf(critical, df, noncentrality)

    high = 10.0
    while missed(high) > 1 - power:
        high *= 2
    return float(brentq(lambda x: missed(x) - (1 - power), 1e-9, high))


# --- T2: how often which rank -------------------------------------------------------------------

RANK_BINS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, 20))
"""Ranks pooled by T2; what lies beyond is the tail."""


def rank_categories(rows: Floats, seen: Ints, *, alpha: float) -> Fit:
    """T2: observed minus expected counts of ranks 1, 2, 3, 4-6, 7-20 and the tail.

    Covariance diag(sum E) - sum E_j E_j' (one bin dropped), valid because the differences are
    martingale increments. Bins whose count hardly varies are merged with the one before. The effect
    is the largest difference of a bin per token, limits for all bins at once (Bonferroni): a lower
    bound of the mean total variation.
    """
    n, width = rows.shape
    edges = [0, *(high for _, high in RANK_BINS if high < width - 1), width - 1, width]
    edges = sorted(set(edges))
    expected = np.add.reduceat(rows, edges[:-1], axis=1)
    hit = np.searchsorted(edges, seen, side="right") - 1
    # From the tail inwards: a bin that hardly varies joins the one before it.
    kept = list(range(expected.shape[1]))
    groups: list[list[int]] = []
    for b in reversed(kept):
        if groups and _variance(expected[:, groups[-1]].sum(axis=1)) < LEAST_VARIANCE:
            groups[-1].append(b)
        else:
            groups.append([b])
    if len(groups) > 1 and _variance(expected[:, groups[-1]].sum(axis=1)) < LEAST_VARIANCE:
        last = groups.pop()
        groups[-1] += last
    if len(groups) < 2:
        return no_fit("the target is all but certain of each token", n)
    groups = [sorted(group) for group in reversed(groups)]
    E = np.stack([expected[:, group].sum(axis=1) for group in groups], axis=1)
    counts = np.bincount(hit, minlength=expected.shape[1])
    observed = np.array([counts[group].sum() for group in groups])
    difference = observed - E.sum(axis=0)
    covariance = np.diag(E.sum(axis=0)) - E.T @ E
    reduced = difference[:-1]
    statistic = float(reduced @ np.linalg.solve(covariance[:-1, :-1], reduced))
    df = len(groups) - 1
    errors = np.sqrt(np.diag(covariance))
    effect, where = _largest(difference / n, errors / n, n, "largest difference of a rank bin")
    names = [_rank_name(edges[group[0]], edges[group[-1] + 1], width) for group in groups]
    seen_effect = math.sqrt(noncentrality_for_power(df, alpha)) * float(np.median(errors)) / n
    return Fit(statistic, tails.chi2_sf(statistic, df), n, effect, seen_effect, names[where])


def _variance(share: Floats) -> float:
    return float((share * (1 - share)).sum())


def _rank_name(first: int, end: int, width: int) -> str:
    if end == width:
        return "the tail" if first == width - 1 else f"ranks from {first + 1}"
    return f"rank {end}" if end == first + 1 else f"ranks {first + 1}-{end}"


def _largest(differences: Floats, errors: Floats, n: int, what: str) -> tuple[Estimate, int]:
    """The largest of several absolute differences, with limits that hold for all at once."""
    z = tails.normal_isf(EFFECT_ALPHA / len(differences))
    sizes = np.abs(differences)
    where = int(np.argmax(sizes))
    value = float(sizes[where])
    low = float(np.max(np.maximum(sizes - z * errors, 0.0)))
    high = float(np.max(sizes + z * errors)) + _rare(n)
    return Estimate(value, min(low, value), high, n, f"{what}, Bonferroni limits", EFFECT_ALPHA), (
        where
    )


def _rare(n: int) -> float:
    """What n tokens without an event leave open: near certainty a variance of 0 bounds nothing."""
    return -math.log(EFFECT_ALPHA) / n


# --- T3, T6: sums of a function of the token ----------------------------------------------------


def calibration(
    h: Floats,
    rows: Floats,
    seen: Ints,
    *,
    alpha: float,
    effect_alpha: float = EFFECT_ALPHA,
) -> Fit:
    """T3 and T6: z = sum(h_j(x_j) - E h_j) / sqrt(sum Var h_j), two-sided.

    `h` (n, c) may be any function of the prefix and the category. The effect is the size of the
    mean difference in the unit of h; for h within [0, 1] a lower bound of the mean total variation.
    """
    n = len(rows)
    if n == 0:
        return no_fit("no tokens")
    mean = (rows * h).sum(axis=1)
    centred = h - mean[:, None]
    variances = (rows * centred**2).sum(axis=1)
    total = float(centred[np.arange(n), seen].sum())
    variance = float(variances.sum())
    error = math.sqrt(variance)
    span = float(h.max() - h.min())
    if span == 0:
        return no_fit("nothing to tell tokens apart by", n)
    skew = float((rows * centred**3).sum()) / error**3 if error > 0 else math.inf
    if abs(skew) <= MOST_SKEW:
        p_value = float(2 * tails.normal_sf(abs(total) / error))
    else:
        p_value = min(1.0, 2 * _chernoff(centred, rows, total))
    size = abs(total) / n
    z = tails.normal_isf(effect_alpha)
    effect = Estimate(
        size,
        max(0.0, size - z * error / n - span * _rare(n) / 3),
        size + z * error / n + span * _rare(n),
        n,
        "mean of h - E h",
        effect_alpha,
    )
    seen_z = tails.normal_isf(alpha / 2) + tails.normal_quantile(POWER)
    statistic = total / error if error > 0 else math.copysign(math.inf, total) if total else 0.0
    return Fit(statistic, p_value, n, effect, max(seen_z * error / n, span * _rare(n)))


def _chernoff(centred: Floats, rows: Floats, total: float) -> float:
    """Bound of P(sum beyond `total`, on its side): min over t of exp(sum log E e^(t h) - t total).

    Exact in the moment generating function of every position, so it holds for any sample size.
    """
    from scipy.optimize import minimize_scalar

    side = math.copysign(1.0, total)
    live = (rows * centred**2).sum(axis=1) > 0
    if not live.any():
        return 1.0 if abs(total) < 1e-9 else 0.0
    weights = rows[live]
    values = np.where(weights > 0, side * centred[live], -np.inf)
    span = float(np.ptp(values[weights > 0]))

    def exponent(t: float) -> float:
        grown = t * values if t > 0 else np.zeros_like(values)
        top = grown.max(axis=1)
        log_mgf = top + np.log((weights * np.exp(grown - top[:, None])).sum(axis=1))
        return float(log_mgf.sum()) - t * abs(total)

    found = minimize_scalar(exponent, bounds=(0.0, 700.0 / span), method="bounded")
    return math.exp(min(0.0, float(found.fun)))


def surprisal(rows: Floats) -> Floats:
    """T3: h = -log p of the category, nats; 0 where the category has no mass."""
    with np.errstate(divide="ignore"):
        values: Floats = np.where(rows > 0, -np.log(np.maximum(rows, 1e-300)), 0.0)
    return values


def draft_sign(rows: Floats, draft: Floats) -> Floats:
    """T6: h = 1 where the draft's probability exceeds the target's. draft: (n, c)."""
    return (draft > rows).astype(float)


def draft_log_ratio(rows: Floats, draft: Floats) -> Floats:
    """T6: h = log(q/p) clipped to [-3, 3]."""
    floor = 1e-12
    ratios: Floats = np.log(np.maximum(draft, floor) / np.maximum(rows, floor))
    return np.clip(ratios, -3.0, 3.0)


# --- T4: token ids ------------------------------------------------------------------------------


def token_ids(
    ids: Ints, rows: Floats, tokens: Ints, *, alpha: float, least_variance: float = 20.0
) -> Fit:
    """T4: z per token id, sum(1{x = v} - p_j(v)) / sqrt(sum p(1-p)), Holm over ids.

    ids: (n, k) the categories' token ids (the tail has none), tokens: (n,) what was drawn. Only ids
    whose count varies enough; an id that falls out of the target's top k counts at those positions
    neither as expected nor as drawn. Catches faults that fall through to one id.
    """
    n, k = ids.shape
    if n == 0:
        return no_fit("no tokens")
    names, flat = np.unique(ids, return_inverse=True)
    flat = flat.reshape(n, k)
    p = rows[:, :k]
    expected = np.bincount(flat.ravel(), p.ravel(), minlength=names.size)
    variance = np.bincount(flat.ravel(), (p * (1 - p)).ravel(), minlength=names.size)
    drawn = (ids == tokens[:, None]).ravel()
    observed = np.bincount(flat.ravel()[drawn], minlength=names.size)
    chosen = np.flatnonzero(variance >= least_variance)
    if chosen.size == 0:
        return no_fit("no token id is drawn often enough", n)
    difference, errors = (observed - expected)[chosen], np.sqrt(variance[chosen])
    z = difference / errors
    p_value = min(1.0, chosen.size * 2 * float(tails.normal_sf(np.abs(z).max())))
    effect, where = _largest(difference / n, errors / n, n, "largest difference of a token id")
    level = alpha / chosen.size
    seen = (
        (tails.normal_isf(level / 2) + tails.normal_quantile(POWER)) * float(np.median(errors)) / n
    )
    name = f"id {names[chosen[where]]}"
    return Fit(float(z[np.abs(z).argmax()]), p_value, n, effect, seen, name)


# --- T5: repeated samples -----------------------------------------------------------------------


def node_fit(nodes: Iterable[tuple[Ints, Floats]], *, alpha: float, top: int = 5) -> Fit:
    """T5: chi-square over prefixes that were met often; statistics and degrees of freedom add up.

    A node is (counts per category, the target's row there). Cells are its `top` likeliest tokens
    and the rest, as far as each is expected at least 5 times; a node with one cell says nothing.
    n counts visits. The effect bounds the mean total variation at these prefixes.
    """
    statistic, df, visits = 0.0, 0, 0
    for counts, row in nodes:
        n = int(counts.sum())
        order = np.argsort(-row, kind="stable")[:top]
        cells = [int(c) for c in order if row[c] * n >= LEAST_VARIANCE]
        observed = [float(counts[c]) for c in cells]
        expected = [float(row[c] * n) for c in cells]
        rest = n - sum(expected)
        if rest >= LEAST_VARIANCE:
            observed.append(n - sum(observed))
            expected.append(rest)
        elif len(cells) > 1:  # too little is left for a cell of its own: it joins the least one
            observed[-1] += n - sum(observed)
            expected[-1] += rest
        if len(expected) < 2:
            continue
        o, e = np.array(observed), np.array(expected)
        statistic += float(((o - e) ** 2 / e).sum())
        df += len(e) - 1
        visits += n
    if df == 0:
        return no_fit("no prefix was met often with more than one likely token after it", visits)
    return _chi_square(statistic, df, visits, alpha=alpha)


# --- T7: parts ----------------------------------------------------------------------------------


def worst_part(parts: Mapping[str, Fit]) -> Fit:
    """T7: several parts of the tokens tested alike, as one test (Bonferroni over the parts).

    P-value, effect and place are those of the part with the smallest p-value; the upper limit is
    the largest of all parts, so that it bounds each of them.
    """
    known = {name: fit for name, fit in parts.items() if fit.applies}
    if not known:
        return no_fit("no part has tokens to test")
    name = min(known, key=lambda part: known[part].p_value)
    fit = known[name]
    high = max(f.effect.high for f in known.values())
    return replace(
        fit,
        p_value=min(1.0, len(known) * fit.p_value),
        n=sum(f.n for f in known.values()),
        effect=replace(fit.effect, high=high),
        seen=max(f.seen for f in known.values()),
        where=name,
    )


# --- T8: two samples, no probabilities ----------------------------------------------------------

_RARE = 5
"""Prefixes seen less often, over both arms, are lumped into one cell."""


def two_samples(
    samples: Sequence[tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]],
    *,
    rng: np.random.Generator,
    alpha: float,
    depth: int = 6,
    permutations: int = 1999,
) -> Fit:
    """T8: do two arms sample from one law? Permutation test over repeated samples of prompts.

    `samples` holds per prompt the token ids of the control's and of the arm's samples, drawn with
    different seeds. The statistic is a chi-square over prefixes of 2 to `depth` tokens (the first
    token comes from the prompt's pass and is never drafted), summed over prompts; labels are
    permuted within prompts, so the p-value (1 + as large) / (1 + permutations) is exact. n counts
    the smaller arm's samples.

    The effect bounds the total variation of prefixes: with the triangular discrimination D of two
    laws D/2 <= TV <= sqrt(D/2) (Topsoe 2000); its limits take the spread under permutation.
    """
    observed, drawn = 0.0, np.zeros(permutations)
    weight = 0.0
    n = 0
    for control, arm in samples:
        a, b = len(control), len(arm)
        if min(a, b) < 2:
            continue
        n += min(a, b)
        outputs = [*control, *arm]
        is_control = np.arange(a + b) < a
        labels = np.stack([is_control, *(rng.permutation(is_control) for _ in range(permutations))])
        for length in range(2, depth + 1):
            prefixes: dict[tuple[int, ...], int] = {}
            nodes = [prefixes.setdefault(tuple(ids[:length]), len(prefixes)) for ids in outputs]
            distances = _node_distances(np.asarray(nodes), labels, a, b)
            observed += float(distances[0])
            drawn += distances[1:]
            weight += 2 * a * b / (a + b)
    if n == 0:
        return no_fit("no prompt has samples on both arms")
    method = f"prefixes of 2 to {depth} tokens: bounds of the total variation"
    if observed == 0 == drawn.max():  # every sample of every prompt is the same
        effect = Estimate(0.0, 0.0, min(1.0, _rare(n)), n, method, EFFECT_ALPHA)
        return Fit(0.0, 1.0, n, effect, min(1.0, _rare(n)))
    p_value = (1 + int((drawn >= observed - 1e-9).sum())) / (1 + permutations)
    # For equal samples the statistic is their number times D, plus what chance adds.
    spread = float(drawn.std()) / weight
    excess = (observed - float(drawn.mean())) / weight
    z = tails.normal_isf(EFFECT_ALPHA)
    effect = Estimate(
        math.sqrt(max(0.0, excess) / 2),
        max(0.0, excess - z * spread) / 2,
        math.sqrt(max(0.0, excess + z * spread) / 2) + _rare(n),
        n,
        method,
        EFFECT_ALPHA,
    )
    seen = math.sqrt((tails.normal_isf(alpha) + tails.normal_quantile(POWER)) * spread / 2)
    return Fit(observed / float(drawn.mean()), p_value, n, effect, seen)


def _node_distances(nodes: Ints, labels: npt.NDArray[np.bool_], n: int, m: int) -> Floats:
    """Two-sample chi-square over nodes for each row of labels (True: one of n control samples)."""
    rare = np.bincount(nodes) < _RARE
    cells = np.where(rare, 0, np.cumsum(~rare))[nodes]
    pooled = np.bincount(cells)
    rows, size = len(labels), len(pooled)
    flat = (cells + size * np.arange(rows)[:, None]).ravel()
    a = np.bincount(flat, labels.ravel(), minlength=rows * size).reshape(rows, size)
    gaps = a / n - (pooled - a) / m
    distances: Floats = n * m * (gaps**2 / np.maximum(pooled, 1)).sum(axis=1)
    return distances
