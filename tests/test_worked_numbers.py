"""Worked numbers of the notes (STATS.md 2 to 6) that no test of a single module holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rule_receipts import receipt
from scipy import stats as sp

from speccheck import quality, stats


def test_positions_of_a_noise_floor():
    """3.3: at 95 % confidence the largest of 299 changes bounds 99 % of positions, 2,995 99.9 %."""
    for n, missed in ((299, 0.01), (2995, 0.001)):
        assert stats.zero_events_bound(n) <= missed < stats.zero_events_bound(n - 1)


def test_a_planned_number_of_looks_is_dearer_than_the_e_process():
    """4.6: 358 clean requests certify 1 % at any time; with 3, 5 and 10 planned looks (Bonferroni)
    it takes 408, 459 and 528.
    """
    planned = [stats.certify_share_n(0, 0.01, alpha=0.05 / looks) for looks in (3, 5, 10)]
    assert planned == [408, 459, 528]
    assert stats.clean_needed(0, 0, 0.01, alpha=0.05) == 358


def test_looking_again_and_again_at_a_fixed_test():
    """4.6: an exact binomial test at 5 %, looked at after each error of 20,000 requests at a true
    rate of 1 %, alarms in 36.5 % of runs (within 3 sd of 600); the e-process in 5 % at most.
    """
    rng = np.random.default_rng(46)
    naive = anytime = 0
    for _ in range(600):
        n = 1 + np.flatnonzero(rng.random(20_000) < 0.01)
        k = np.arange(1, n.size + 1)
        naive += bool((sp.binom.sf(k - 1, n, 0.01) <= 0.05).any())
        anytime += bool((stats.rate_over(k, n, 0.01) >= math.log(20)).any())
    assert naive / 600 == pytest.approx(0.365, abs=0.06)
    assert anytime / 600 <= 0.05


def test_request_weighted_acceptance_is_another_number():
    """4.4: the mean of ratios is .5625 where the pooled rate is .604; bets are on the former."""
    A = [40, 12, 55, 30, 8, 61, 25, 44, 19, 37]
    D = [64, 40, 72, 52, 32, 80, 48, 60, 44, 56]
    process = stats.BoundedMean(0.55, {"over": 0.05, "under": 0.01})
    for accepted, drafted in zip(A, D, strict=True):
        process.add(accepted / drafted)
    assert process.estimate(0.05).value == pytest.approx(0.5625, abs=5e-5)
    assert stats.acceptance_rate(A, D, alpha=0.05).value == pytest.approx(0.604015, abs=5e-7)


@pytest.mark.parametrize(
    ("tokens", "mean", "p95"),
    [
        *((2, 20, 20), (3, 13.1, 20), (5, 9.5, 15), (9, 8.5, 12.5), (17, 7.8, 11.3)),
        *((33, 7.5, 9.4), (65, 7.3, 8.8), (129, 7.3, 8.3), (257, 7.3, 8.0)),
    ],
)
def test_short_outputs_make_the_tail_of_tpot(tokens, mean, p95):
    """5.3: steps of 20 ms, acceptance .7, four drafts: TPOT of outputs of so many tokens, ms."""
    rng = np.random.default_rng(tokens)
    found = []
    for _ in range(2000 if tokens < 50 else 600):
        rounds, left = 0, tokens - 1
        while left > 0:
            accepted = int(np.argmin([*(rng.random(4) < 0.7), False]))
            left, rounds = left - accepted - 1, rounds + 1
        tpot_ms = 20 * rounds / (tokens - 1)
        found.append(receipt(1, "speculative", completion_tokens=tokens, tpot_ms=tpot_ms).tpot_s)
    assert 1e3 * np.mean(found) == pytest.approx(mean, rel=0.03)
    assert 1e3 * stats.quantile(found, 0.95) == pytest.approx(p95, abs=20 / (tokens - 1) * 1.01)


def test_false_confirmations_of_an_unstable_case():
    """6: after K runs of both arms at most 4^-K, so that hundreds of cases need K of 5 and more."""
    for k, most in ((2, 0.0625), (3, 0.0156), (5, 0.00098)):
        worst = max((p * (1 - p)) ** k for p in np.linspace(0, 1, 101))
        assert worst == pytest.approx(most, rel=0.01)
    for cases in (50, 200, 600):
        k = quality.confirming_greedy_runs(cases)
        assert cases * 4.0**-k <= 0.05 < cases * 4.0 ** -(k - 1)
        assert k >= 5
