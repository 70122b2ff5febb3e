"""Goodness of fit to stated rows: golden values, exact oracles, false alarms, and power.

The synthetic model is that of the statistics notes (3.2): 400 contexts, 400 tokens, entropy 2.4
nats, mean acceptance .746. Rates are stated: with `RUNS` runs under the null, more alarms at level
.01 than `MOST_ALARMS` happen by chance once in a thousand times.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as sp

from speccheck.stats import goodness as g

ALPHA = 1e-3
K = 20
RUNS = 100
MOST_ALARMS = 5  # Binomial(100, .01) exceeds it with probability .0005


# --- golden values ------------------------------------------------------------------------------


def rows_of(row, counts):
    """The same row for each draw, and categories drawn that often."""
    seen = np.repeat(np.arange(len(counts)), counts)
    return np.tile(np.array(row, float), (len(seen), 1)), seen


def test_pit_of_the_notes():
    """P = (.5, .3, .15, .05), rank 2, W = .4 gives .62; in the tail the tail's mass is used."""
    rows, seen = rows_of((0.5, 0.3, 0.15, 0.05), (0, 1, 0, 1))
    np.testing.assert_allclose(g.pit(rows, seen, np.array([0.4, 0.5])), [0.62, 0.975])


@pytest.mark.parametrize("n", [1, 5, 60, 700])
def test_the_kolmogorov_distance_and_its_p_value_are_scipys(n):
    """To five digits where the p-value says something, and never below it."""
    rng = np.random.default_rng(n)
    for power in (1.0, 1.15, 1.6):
        u = rng.random(n) ** power
        ours, theirs = g.uniform_ks(u, alpha=ALPHA), sp.kstest(u, "uniform")
        assert ours.statistic == pytest.approx(theirs.statistic, rel=1e-12)
        assert theirs.pvalue * (1 - 1e-4) <= ours.p_value <= 1
        if theirs.pvalue < 0.05:
            assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-4)


def test_rank_categories_of_one_row_are_pearsons_chi_square():
    """Where all rows are alike the covariance is the multinomial one."""
    rows, seen = rows_of((0.5, 0.3, 0.2), (60, 25, 15))
    fit = g.rank_categories(rows, seen, alpha=ALPHA)
    oracle = sp.chisquare([60, 25, 15], [50, 30, 20])
    assert fit.statistic == pytest.approx(oracle.statistic)
    assert fit.p_value == pytest.approx(oracle.pvalue)
    assert fit.effect.value == pytest.approx(0.10)
    assert fit.where == "rank 1"


def test_rank_categories_of_mixed_rows_have_their_martingale_covariance():
    """Two kinds of rows: the variance of a count is a sum of p(1-p), not that of the mean row."""
    rows = np.array([[0.9, 0.1]] * 200 + [[0.6, 0.4]] * 100)
    seen = np.array([0] * 170 + [1] * 30 + [0] * 60 + [1] * 40)
    fit = g.rank_categories(rows, seen, alpha=ALPHA)
    expected = (230 - 240) ** 2 / (200 * 0.09 + 100 * 0.24)
    assert fit.statistic == pytest.approx(expected)


def test_bins_that_hardly_vary_are_merged_with_the_one_before():
    """A tail of a millionth is no chi-square cell; nothing but such cells is no test."""
    rows, seen = rows_of((0.7, 0.29, 0.009999, 1e-6), (70, 29, 1, 0))
    assert g.rank_categories(rows, seen, alpha=ALPHA).applies
    sure, seen = rows_of((1 - 2e-6, 1e-6, 1e-6), (500, 0, 0))
    assert not g.rank_categories(sure, seen, alpha=ALPHA).applies


def test_surprisal_of_two_categories_is_a_binomial_z():
    """30 instead of 25 of 100 at p = 1/4: z = 5 / sqrt(18.75); effect in nats, log 3 apart."""
    rows, seen = rows_of((0.75, 0.25), (70, 30))
    fit = g.calibration(g.surprisal(rows), rows, seen, alpha=ALPHA)
    assert fit.statistic == pytest.approx(5 / math.sqrt(18.75))
    assert fit.effect.value == pytest.approx(0.05 * math.log(3))
    assert fit.effect.low == 0 < fit.effect.value < fit.effect.high


def test_draft_functions():
    """H is 1 where the draft's probability exceeds the target's; log ratios are clipped."""
    rows = np.array([[0.5, 0.3, 0.2]])
    draft = np.array([[0.2, 0.8, 0.0]])
    assert g.draft_sign(rows, draft).tolist() == [[0, 1, 0]]
    np.testing.assert_allclose(
        g.draft_log_ratio(rows, draft), [[math.log(0.4), math.log(8 / 3), -3]]
    )


def test_few_uncertain_positions_are_bounded_not_approximated():
    """200 positions of p = .001: the p-value bounds the exact tail, where z would be absurd."""
    rows = np.tile([0.999, 0.001], (200, 1))
    h = np.tile([0.0, 1.0], (200, 1))
    for hits in (1, 2, 3):
        seen = np.array([1] * hits + [0] * (200 - hits))
        fit = g.calibration(h, rows, seen, alpha=ALPHA)
        exact = sp.binom.sf(hits - 1, 200, 0.001)
        assert exact <= fit.p_value <= 10 * exact
        normal = 2 * sp.norm.sf(abs(fit.statistic))
        assert normal < exact / 2, "the approximation would have raised an alarm"


def test_an_impossible_token_is_found():
    """One draw of a token of probability 1e-6 among ten thousand certain ones."""
    rows = np.tile([1 - 1e-6, 1e-6], (10_000, 1))
    seen = np.zeros(10_000, int)
    seen[17] = 1
    fit = g.calibration(g.surprisal(rows), rows, seen, alpha=ALPHA)
    assert 0.0099 < fit.p_value < 0.1  # that happens once in a hundred times
    seen[:4] = 1
    assert g.calibration(g.surprisal(rows), rows, seen, alpha=ALPHA).p_value < 1e-8


def test_certain_positions_without_a_miss_bound_little_and_alarm_nobody():
    """Nothing varies and nothing is off: p 1, and an upper limit of three in n."""
    rows = np.tile([1 - 1e-12, 1e-12], (300, 1))
    h = np.tile([1.0, 0.0], (300, 1))
    fit = g.calibration(h, rows, np.zeros(300, int), alpha=ALPHA)
    assert fit.p_value == 1
    assert fit.effect.high == pytest.approx(3 / 300, rel=0.01)


def test_token_ids_are_counted_wherever_they_rank():
    """Id 7 is first in one kind of row and second in the other; Bonferroni over the ids."""
    ids = np.array([[7, 8]] * 200 + [[9, 7]] * 200)
    rows = np.tile([0.6, 0.3, 0.1], (400, 1))
    tokens = np.array([7] * 150 + [8] * 50 + [9] * 120 + [7] * 80)
    fit = g.token_ids(ids, rows, tokens, alpha=ALPHA)
    z = (230 - 180) / math.sqrt(200 * 0.24 + 200 * 0.21)
    assert fit.statistic == pytest.approx(z)
    assert fit.p_value == pytest.approx(3 * 2 * sp.norm.sf(z))
    assert (fit.where, fit.effect.value) == ("id 7", pytest.approx(50 / 400))


def test_node_statistics_add_up():
    """Two prefixes: chi-squares and degrees of freedom are sums; small cells join the rest."""
    nodes = [
        (np.array([40, 35, 20, 5]), np.array([0.5, 0.3, 0.15, 0.05])),
        (np.array([70, 30, 0, 0]), np.array([0.6, 0.37, 0.02, 0.01])),
        (np.array([12, 0, 0, 0]), np.array([0.97, 0.01, 0.01, 0.01])),
    ]
    fit = g.node_fit(nodes, alpha=ALPHA, top=3)
    first = sp.chisquare([40, 35, 20, 5], [50, 30, 15, 5]).statistic
    second = sp.chisquare([70, 30], [60, 40]).statistic
    assert fit.statistic == pytest.approx(first + second)
    assert fit.p_value == pytest.approx(sp.chi2.sf(first + second, 4))
    assert fit.n == 200
    assert not g.node_fit(nodes[2:], alpha=ALPHA).applies


def test_a_chi_square_effect_is_half_the_root_of_the_distance():
    """Limits are those of the noncentral chi-square; under its mean it bounds as at its mean."""
    nodes = [(np.array([650, 350]), np.array([0.6, 0.4]))]
    fit = g.node_fit(nodes, alpha=ALPHA)
    assert fit.effect.value == pytest.approx(math.sqrt((fit.statistic - 1) / 1000) / 2)
    noncentrality = 1000 * (2 * fit.effect.high) ** 2
    assert sp.ncx2.cdf(fit.statistic, 1, noncentrality) == pytest.approx(0.05)
    nothing = g.node_fit([(np.array([600, 400]), np.array([0.6, 0.4]))], alpha=ALPHA)
    assert nothing.effect.value == 0 < nothing.effect.high


def test_power_of_the_noncentral_chi_square():
    """Recipe of the notes (1.6): at that noncentrality the critical value is passed 9 in 10."""
    for df in (1, 5, 95):
        noncentrality = g.noncentrality_for_power(df, ALPHA)
        assert sp.ncx2.sf(sp.chi2.isf(ALPHA, df), df, noncentrality) == pytest.approx(0.9)


def test_the_worst_part_is_corrected_for_their_number():
    """Parts that do not apply are not counted; without any there is no test."""
    rows, seen = rows_of((0.75, 0.25), (60, 40))
    fit = g.calibration(g.surprisal(rows), rows, seen, alpha=ALPHA)
    worst = g.worst_part({"index 1": fit, "index 2": fit, "bonus": g.no_fit("none")})
    assert worst.p_value == pytest.approx(2 * fit.p_value)
    assert worst.n == 200
    assert not g.worst_part({}).applies


def test_two_samples_against_the_exact_permutation_law():
    """24 outputs, eight of them another: how many fall to the control is hypergeometric."""
    control, arm = [[0, 1]] * 10 + [[0, 2]] * 2, [[0, 1]] * 6 + [[0, 2]] * 6
    rng = np.random.default_rng(3)
    fit = g.two_samples([(control, arm)], rng=rng, alpha=ALPHA, depth=2, permutations=4999)
    law = sp.hypergeom(24, 8, 12)
    exact = law.cdf(2) + law.sf(5)
    assert fit.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 4999))
    assert fit.effect.low <= 1 / 3 <= fit.effect.high  # the total variation of these frequencies


def test_equal_samples_and_none():
    """All outputs alike: p 1 and no error. No prompt on both arms: no test."""
    rng = np.random.default_rng(0)
    same = [[1, 2, 3]] * 40
    fit = g.two_samples([(same, same)], rng=rng, alpha=ALPHA)
    assert (fit.p_value, fit.n, fit.effect.value) == (1.0, 40, 0.0)
    assert not g.two_samples([], rng=rng, alpha=ALPHA).applies
    assert not g.two_samples([(same, [])], rng=rng, alpha=ALPHA).applies


# --- false alarms and power ---------------------------------------------------------------------


def softmax(logits):
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def model():
    """(p, q): rows of the notes' synthetic pair."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3.4, (400, 400))
    p, q = softmax(logits), softmax(logits + rng.normal(0, 0.8, logits.shape))
    assert -(p * np.log(p)).sum(axis=1).mean() == pytest.approx(2.4, abs=0.05)
    assert np.minimum(p, q).sum(axis=1).mean() == pytest.approx(0.746, abs=0.005)
    return p, q


def deviations(p, q):
    """Laws of one committed token under verifiers that each get one thing wrong."""
    accepted = np.minimum(p, q)
    rejected = 1 - accepted.sum(axis=1, keepdims=True)
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum(axis=1, keepdims=True)
    lenient = np.minimum(q, p / 0.8)
    warm = p ** (1 / 0.95)
    return {
        "resample from p": accepted + rejected * p,
        "no correction token": accepted / (1 - rejected),
        "lenience .8": lenient + (1 - lenient.sum(axis=1, keepdims=True)) * residual,
        "T .95": warm / warm.sum(axis=1, keepdims=True),
    }


def lumped(p):
    """(ids of the top K, rows with a tail)."""
    ids = np.argsort(-p, axis=1, kind="stable")[:, :K]
    top = np.take_along_axis(p, ids, axis=1)
    return ids, np.concatenate([top, 1 - top.sum(axis=1, keepdims=True)], axis=1)


def draw(law, ids, contexts, rng):
    """Tokens drawn in these contexts, and their categories."""
    cumulative = np.cumsum(law, axis=1)[contexts]
    tokens = (rng.random((len(contexts), 1)) > cumulative).sum(axis=1)
    match = ids[contexts] == tokens[:, None]
    return tokens, np.where(match.any(axis=1), match.argmax(axis=1), K)


def fits(p, q, law, n, rng, only=None):
    """T1 to T6 of n tokens drawn from a law and judged by p."""
    ids, rows = lumped(p)
    q_top = np.take_along_axis(q, ids, axis=1)
    q_rows = np.concatenate([q_top, 1 - q_top.sum(axis=1, keepdims=True)], axis=1)
    contexts = rng.integers(0, len(p), n)
    tokens, seen = draw(law, ids, contexts, rng)
    r, d = rows[contexts], q_rows[contexts]
    u = g.pit(r, seen, rng.random(n))
    tests = {
        "T1": lambda: g.uniform_ks(u, alpha=ALPHA),
        "T1b": lambda: g.uniform_bins(u, alpha=ALPHA),
        "T2": lambda: g.rank_categories(r, seen, alpha=ALPHA),
        "T3": lambda: g.calibration(g.surprisal(r), r, seen, alpha=ALPHA),
        "T4": lambda: g.token_ids(ids[contexts], r, tokens, alpha=ALPHA, least_variance=5),
        "T6": lambda: g.calibration(g.draft_sign(r, d), r, seen, alpha=ALPHA),
        "T6b": lambda: g.calibration(g.draft_log_ratio(r, d), r, seen, alpha=ALPHA),
    }
    return {name: test() for name, test in tests.items() if only is None or name in only}


def test_right_samples_raise_no_alarm(model):
    """Under the null each test alarms at its level (.01) and its effect stays in reach of 0."""
    p, q = model
    rng = np.random.default_rng(7)
    found = [fits(p, q, p, 400, rng) for _ in range(RUNS)]
    for name in found[0]:
        known = [f[name] for f in found if f[name].applies]
        assert sum(f.p_value <= 0.01 for f in known) <= MOST_ALARMS, name
        # Its lower limit excludes 0 in about one run of ten (two sides of .05), not more.
        assert sum(f.effect.low > 0 for f in known) <= 0.2 * RUNS, name


@pytest.mark.parametrize(
    ("name", "sign", "log_ratio"),
    [
        ("resample from p", 504, 363),
        ("no correction token", 260, 180),
        ("lenience .8", 750, 778),
    ],
)
def test_sizes_of_the_notes(model, name, sign, log_ratio):
    """Samples for 90 % power at level .001, from exact rows: the notes' numbers within 15 %."""
    p, q = model
    law = deviations(p, q)[name]
    z = sp.norm.isf(ALPHA / 2) + sp.norm.ppf(0.9)
    for h, printed in (
        (g.draft_sign(p, q), sign),
        (g.draft_log_ratio(p, q), log_ratio),
    ):
        shift = ((law - p) * h).sum(axis=1).mean()
        variance = ((p * h**2).sum(axis=1) - (p * h).sum(axis=1) ** 2).mean()
        assert z**2 * variance / shift**2 == pytest.approx(printed, rel=0.15)


def test_sizes_are_enough_when_sampled(model):
    """At the notes' 504 tokens the draft-aware test finds raw resampling in most runs, and the
    pooled tests, which do not look at the draft, do not (point 7 of the decisions).
    """
    p, q = model
    law = deviations(p, q)["resample from p"]
    rng = np.random.default_rng(11)
    found = [fits(p, q, law, 504, rng, ("T1", "T3", "T6")) for _ in range(40)]
    assert sum(f["T6"].p_value <= ALPHA for f in found) >= 30  # .9 expected; < 30 once in 10,000
    assert sum(f["T1"].p_value <= ALPHA for f in found) <= 3
    assert sum(f["T3"].p_value <= ALPHA for f in found) <= 3


def test_a_wrong_temperature_is_found_by_the_pooled_tests(model):
    """T .95 for 1 at 5,000 tokens: the notes give power 1, 1, .97, 1 at .01."""
    p, q = model
    law = deviations(p, q)["T .95"]
    rng = np.random.default_rng(12)
    found = [fits(p, q, law, 5000, rng, ("T1", "T1b", "T2", "T3")) for _ in range(8)]
    for name in found[0]:
        assert sum(f[name].p_value <= 0.01 for f in found) >= 6, name


@pytest.mark.parametrize(("contexts", "printed"), [(1, 600), (5, 958), (20, 1599), (50, 2340)])
def test_sizes_of_repeated_samples(model, contexts, printed):
    """T5, top five and the tail: total samples for 90 % power; within 40 % of the notes, since few
    contexts of another synthetic model differ from theirs.
    """
    p, q = model
    law = deviations(p, q)["resample from p"]

    def cells(rows):
        order = np.argsort(-p, axis=1, kind="stable")[:, :5]
        top = np.take_along_axis(rows, order, axis=1)
        return np.concatenate([top, 1 - top.sum(axis=1, keepdims=True)], axis=1)

    distance = ((cells(law) - cells(p)) ** 2 / cells(p)).sum(axis=1).mean()
    n = g.noncentrality_for_power(5 * contexts, ALPHA) / distance
    assert n == pytest.approx(printed, rel=0.4)


def test_permutation_p_values_are_uniform_under_one_law(model):
    """Of 60 runs at most six fall under .05 (seven happen once in 90 times)."""
    p, _ = model
    rng = np.random.default_rng(4)
    low = 0
    for _ in range(60):
        columns = [rng.choice(400, 60, p=p[i]) for i in (0, 1, 2)]
        outputs = np.stack([np.zeros(60, int), *columns], axis=1).tolist()
        fit = g.two_samples(
            [(outputs[:30], outputs[30:])], rng=rng, alpha=ALPHA, depth=3, permutations=199
        )
        low += fit.p_value <= 0.05
    assert low <= 6


def test_two_samples_find_raw_resampling(model):
    """2,000 samples per arm on five prompts, no logprobs."""
    p, q = model
    law = deviations(p, q)["resample from p"]
    rng = np.random.default_rng(1)
    samples = []
    for prompt in range(5):
        arms = [
            np.stack([rng.choice(400, 400, p=rows[3 * prompt + i]) for i in range(3)], axis=1)
            for rows in (p, law)
        ]
        samples.append(tuple(np.insert(arm, 0, 0, axis=1).tolist() for arm in arms))
    fit = g.two_samples(samples, rng=rng, alpha=ALPHA, depth=3, permutations=1999)
    assert fit.p_value <= ALPHA
    assert fit.effect.low > 0
