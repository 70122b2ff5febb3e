"""Each interval covers as often as it says, by enumeration where that is possible, else simulated.

Seeds are fixed. Where a simulated count is bounded, the bound is one that a correct interval breaks
in less than one of a hundred seeds.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from speccheck import stats
from speccheck.records import Estimate


def within(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


@pytest.mark.parametrize("n", [20, 59, 200, 500])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_clopper_pearson_covers_at_every_rate(n, alpha):
    """Enumerated over all counts: each limit is missed with alpha at most, whatever the rate."""
    limits = [stats.clopper_pearson(k, n, alpha=alpha) for k in range(n + 1)]
    for rate in (0.001, 0.01, 0.05, 0.3, 0.5, 0.99):
        chances = scipy_stats.binom.pmf(np.arange(n + 1), n, rate)
        below = sum(c for c, e in zip(chances, limits, strict=True) if e.low > rate)
        above = sum(c for c, e in zip(chances, limits, strict=True) if e.high < rate)
        assert max(below, above) <= alpha + 1e-12


@pytest.mark.parametrize(("n", "p"), [(60, 0.95), (100, 0.95), (300, 0.99), (41, 0.5)])
def test_order_statistics_cover_exactly(n, p):
    """The chance that a quantile lies beyond a rank is binomial: each limit holds its level."""
    low, high = stats.order_statistic_ranks(n, p, 0.05)
    if low is not None:
        assert scipy_stats.binom.cdf(low - 1, n, p) <= 0.05
    if high is not None:
        assert scipy_stats.binom.sf(high - 1, n, p) <= 0.05


def test_order_statistic_ratio_is_conservative():
    """Without pairs and on heavy tails the ratio is covered in 95 % of 300 samples and more.

    Nominal is 90 %; the union of two exact intervals at half the level covers more.
    """
    rng = np.random.default_rng(31)
    hits = 0
    for _ in range(300):
        target, speculative = rng.pareto(2.5, 150) + 1, 0.8 * (rng.pareto(2.5, 130) + 1)
        e = stats.order_statistic_ratio(target, speculative, 0.95, alpha=0.05)
        hits += within(e, 0.8)
    assert hits >= 285


def test_block_bootstrap_covers_where_pairs_do_not():
    """With 24 blocks slow together, 90 % intervals of 150 samples: by blocks 82 to 97 % cover.

    Resampling pairs, as if they were independent, covers in under two thirds.
    """
    rng = np.random.default_rng(32)
    block = np.repeat(np.arange(24), 10)
    hits = {"blocks": 0, "pairs": 0}
    for _ in range(150):
        slow = rng.lognormal(0, 0.25, 24)[block]
        target = rng.lognormal(0, 0.1, 240)
        speculative = slow * rng.lognormal(0, 0.1, 240)
        truth = 1.0
        for name, blocks in (("blocks", block), ("pairs", None)):
            draws = stats.bootstrap_quantile_ratios(
                target, speculative, [0.5], rng=rng, blocks=blocks, draws=300
            )
            hits[name] += within(draws.estimate(0.5, alpha=0.05), truth)
    assert 123 <= hits["blocks"] <= 146
    assert hits["pairs"] < 100


@pytest.mark.parametrize("clustered", [False, True])
def test_geometric_mean_ratio_covers(clustered):
    """90 % intervals of 400 samples cover 86 to 94 %, clustered by block where requests are."""
    rng = np.random.default_rng(33)
    block = np.repeat(np.arange(16), 8)
    hits = 0
    for _ in range(400):
        shared = rng.normal(0, 0.2, 16)[block] if clustered else 0.0
        target = rng.lognormal(0, 0.3, 128)
        speculative = 0.8 * target * np.exp(shared + rng.normal(0, 0.2, 128))
        blocks = block if clustered else None
        e = stats.geometric_mean_ratio(target, speculative, alpha=0.05, blocks=blocks)
        hits += within(e, 0.8)
    assert 344 <= hits <= 376


def test_unpaired_mean_ratio_covers():
    """Unequal arms with unequal spreads: 90 % intervals of 500 samples cover 87 to 93 %."""
    rng = np.random.default_rng(34)
    hits = sum(
        within(
            stats.unpaired_mean_ratio(
                rng.lognormal(0, 0.3, 200), rng.lognormal(np.log(0.8), 0.6, 30), alpha=0.05
            ),
            0.8,
        )
        for _ in range(500)
    )
    assert 433 <= hits <= 466


def test_switchback_ratio_covers_under_drift():
    """ABBA blocks with a drifting machine: 90 % intervals of 400 runs cover 86 to 94 %."""
    rng = np.random.default_rng(35)
    arms = np.tile([False, True, True, False], 6)
    hits = 0
    for _ in range(400):
        drift = np.linspace(0, 0.3, arms.size)
        levels = drift + rng.normal(0, 0.1, arms.size) + np.log(0.8) * arms
        logs = (levels[:, None] + rng.normal(0, 0.2, (arms.size, 5))).ravel()
        e = stats.block_log_ratio(
            logs, np.repeat(np.arange(arms.size), 5), np.repeat(arms, 5), alpha=0.05
        )
        hits += within(e, 0.8)
    assert 344 <= hits <= 378


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_acceptance_from_counters_is_conservative(spread):
    """However much requests differ, 90 % intervals of 300 samples cover in 90 % and more."""
    rng = np.random.default_rng(36)
    hits = 0
    for _ in range(300):
        rates = rng.beta(0.6 * spread, 0.4 * spread, 40)
        accepted = rng.binomial(100, rates)
        e = stats.acceptance_from_totals(int(accepted.sum()), 4000, 40, alpha=0.05)
        hits += within(e, 0.6)
    assert hits >= 275


def test_mean_acceptance_length_covers():
    """Requests of different length as clusters: 90 % intervals of 300 samples cover 85 to 95 %."""
    rng = np.random.default_rng(37)
    hits = 0
    for _ in range(300):
        steps = rng.integers(10, 60, 60)
        accepted = rng.binomial(4 * steps, rng.beta(3, 2, 60))
        e = stats.mean_acceptance_length(accepted, steps, alpha=0.05)
        hits += within(e, 1 + 4 * 0.6)
    assert 253 <= hits <= 285


@pytest.mark.parametrize("discordant", [5, 10, 31])
def test_mcnemar_holds_its_level(discordant):
    """Enumerated: with no difference between the arms p is at most any level that often."""
    counts = np.arange(discordant + 1)
    chances = scipy_stats.binom.pmf(counts, discordant, 0.5)
    p = np.array([stats.mcnemar_exact(int(b), int(discordant - b)) for b in counts])
    for level in (0.05, 0.01, 0.2):
        assert chances[p <= level].sum() <= level + 1e-12


@pytest.mark.parametrize("difference", [0.0, 0.02])
def test_tango_covers_small_differences(difference):
    """Around the margin of 2 points: 90 % intervals of 400 samples cover 86 to 97 %."""
    rng = np.random.default_rng(38)
    hits = 0
    for b, c, _ in rng.multinomial(300, [0.03 + difference, 0.03, 0.94 - difference], 400):
        hits += within(stats.tango(int(b), int(c), 300, alpha=0.05), difference)
    assert 344 <= hits <= 388


def test_holm_alarms_once_in_alpha_over_all_tests():
    """Of 2,000 families of 12 true hypotheses 5 % alarm at all, and more without it."""
    rng = np.random.default_rng(39)
    p = rng.random((2000, 12))
    alarms = np.mean([min(stats.holm(list(row))) <= 0.05 for row in p])
    assert 0.038 <= alarms <= 0.062
    assert (p.min(axis=1) <= 0.05).mean() > 0.4


def test_passing_all_is_no_easier_than_passing_each():
    """Intersection-union: with one of four rates over its limit all pass in 5 % of 600 at most."""
    rng = np.random.default_rng(40)
    passes = 0
    for _ in range(600):
        counts = [rng.binomial(400, rate) for rate in (0.001, 0.001, 0.001, 0.01)]
        passes += all(stats.clopper_pearson(int(k), 400, alpha=0.05).high <= 0.01 for k in counts)
    assert passes / 600 <= 0.05
