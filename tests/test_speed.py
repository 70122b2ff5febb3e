"""The arithmetic of speed against golden tables and the identity it rests on."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_receipts import receipt

from speccheck import speed
from speccheck.speed import Costs

A_FIRST = [0.9, 0.765, 0.459, 0.306]
"""Chance that k drafts are accepted, k = 1..4: the fixture table's first round."""
RATES = [A_FIRST[0], *(b / a for a, b in pairwise(A_FIRST))]


def speedup(rates, costs):
    """N/(N - saved) for one expected round of as many drafts as there are rates: what is saved is
    the product's, what is expected Leviathan's.
    """
    accepted = sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
    saved = speed.saved_passes(accepted, len(rates), 1, len(rates), costs)
    return (accepted + 1) / (accepted + 1 - saved)


def best_length(rates, costs):
    """The number of drafts with the largest speed-up; 0 is target-only."""
    return max(range(len(rates) + 1), key=lambda k: speedup(rates[:k], costs))


def test_speedup_golden():
    """Leviathan's formula at .8, k 4, draft cost .05."""
    assert speedup([0.8] * 4, Costs(0.05, {4: 1.0})) == pytest.approx(2.801, abs=5e-4)


@pytest.mark.parametrize(("k", "golden"), [(1, 1.8), (3, 2.952), (4, 3.3616), (5, 3.6893)])
def test_free_drafts_bring_the_tokens_of_a_round(k, golden):
    """At a constant acceptance of .8."""
    costs = Costs(0.0, dict.fromkeys(range(6), 1.0))
    assert speedup([0.8] * k, costs) == pytest.approx(golden, abs=5e-5)


@pytest.mark.parametrize(
    ("costs", "golden", "best"),
    [
        (Costs(0.1, dict.fromkeys(range(5), 1.0)), (1, 1.727, 2.221, 2.403, 2.450), 4),
        (Costs(0.2, {k: 1 + 0.05 * k for k in range(5)}), (1, 1.52, 1.777, 1.785, 1.715), 3),
        (Costs(0.3, {k: 1 + 0.05 * k for k in range(5)}), (None, None, 1.568, None, None), 2),
    ],
)
def test_best_length_golden(costs, golden, best):
    """Speed-up by k on the fixture table's first round, and the best k."""
    for k, expected in enumerate(golden):
        if expected is not None:
            assert speedup(RATES[:k], costs) == pytest.approx(expected, abs=6e-4)
    assert best_length(RATES, costs) == best


@pytest.mark.parametrize(
    ("batch", "golden", "best"),
    [
        (1, (1.614, 1.979, 2.184, 2.286, 2.317), 5),
        (32, (1.483, 1.694, 1.760, 1.749, 1.628), 3),
        (128, (1.260, 1.290, 1.237, 1.157, 0.989), 2),
        (256, (1.126, 1.084, 1.001, 0.912, 0.753), 1),
        (512, (1.012, 0.928, 0.833, 0.745, 0.602), 1),
    ],
)
def test_speedup_falls_with_the_batch(batch, golden, best):
    """At acceptance .7 and a knee of 300 tokens, by k = 1, 2, 3, 4, 6."""
    verify = {k: (1 + batch * (k + 1) / 300) / (1 + batch / 300) for k in range(7)}
    costs = Costs(0.05, verify)
    found = [speedup([0.7] * k, costs) for k in (1, 2, 3, 4, 6)]
    assert found == pytest.approx(golden, abs=6e-4)
    assert best_length([0.7] * 6, costs) == best


def test_speculation_that_never_pays_has_best_length_zero():
    """Nothing beats target-only where drafts cost more than they bring."""
    assert best_length([0.1] * 4, Costs(0.5, dict.fromkeys(range(5), 1.0))) == 0


def test_break_even_golden():
    """Acceptance at which k 4 breaks even: .07 for c .05 and V 1.08."""
    assert speed.break_even_acceptance(4, Costs(0.05, {4: 1.08})) == pytest.approx(0.07)


@pytest.mark.parametrize(("draft", "a"), [(0.05, 0.1668), (0.1, 0.2871), (0.2, 0.4553)])
def test_break_even_per_token(draft, a):
    """At the per-token acceptance that breaks even, k 4 neither gains nor loses."""
    costs = Costs(draft, {4: 1.0})
    assert speedup([a] * 4, costs) == pytest.approx(1, abs=2e-4)
    pooled = sum(a**i for i in range(1, 5)) / 4
    assert pooled == pytest.approx(speed.break_even_acceptance(4, costs), abs=2e-4)


@pytest.mark.parametrize(
    ("batch", "a"), [(1, 0.176), (32, 0.374), (128, 0.621), (256, 0.748), (512, 0.852)]
)
def test_break_even_rises_with_the_batch(batch, a):
    """Per-token acceptance at which k 4 breaks even, with a knee of 300 tokens."""
    costs = Costs(0.05, {4: (1 + batch * 5 / 300) / (1 + batch / 300)})
    pooled = sum(a**i for i in range(1, 5)) / 4
    assert pooled == pytest.approx(speed.break_even_acceptance(4, costs), abs=1.5e-3)


def test_what_a_stop_cut_off_is_not_saved_and_was_paid_for():
    """T22's counts: 58 accepted in 12 steps, of 64 tokens. The cut ones count in neither tokens nor
    accepted, the verify cost of their step stays.
    """
    cut = receipt(
        0,
        "speculative",
        completion_tokens=64,
        verify_steps=12,
        target_passes=12,
        proposed_tokens=84,
        accepted_tokens=58,
        k=7,
    )
    done = speed.work([cut])
    assert (done.tokens, done.passes, done.accepted) == (63, 12, 51)
    costs = Costs(0.05, {7: 1.4}, 0.1)
    assert done.saved(costs) == pytest.approx(51 - 0.05 * 84 - 0.4 * 12 - 0.1 * 12)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=20),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0, 0.3),
)
@settings(max_examples=50, deadline=None)
def test_work_obeys_the_identity(rounds, draft, per_token, rollback):
    """Tokens = accepted + passes, and saved is the target-only cost less the speculative one, with
    plain passes among the rounds as prompt lookup has them.
    """
    receipts = [
        receipt(
            i,
            "speculative",
            completion_tokens=accepted + 1 + plain + 1,
            verify_steps=1,
            target_passes=1 + plain,
            proposed_tokens=4,
            accepted_tokens=accepted,
        )
        for i, (accepted, plain) in enumerate(rounds)
    ]
    done = speed.work(receipts)
    assert done.tokens == done.accepted + done.passes
    assert done.accepted == sum(accepted for accepted, _ in rounds)
    costs = Costs(draft, {4: 1 + 4 * per_token}, rollback)
    spent = done.passes + done.rounds * (4 * per_token + 4 * draft + rollback)
    assert done.saved(costs) == pytest.approx(done.tokens - spent)


def test_high_acceptance_on_little_coverage_saves_little():
    """90 % of what was drafted, drafted in 5 % of the passes: a few passes in a hundred."""
    one = receipt(
        0,
        "speculative",
        completion_tokens=1 + 95 + 5 * 4 + 3,
        verify_steps=5,
        target_passes=100,
        proposed_tokens=20,
        accepted_tokens=18,
    )
    done = speed.work([one])
    assert done.accepted == 18
    assert done.saved(Costs(0, {4: 1.4})) / done.tokens == pytest.approx(16 / 118)


def test_saved_passes_golden():
    """2.3076 of 5 tokens on the fixture table, 1.52 in the worked round."""
    costs = Costs(0.1, {4: 1.08})
    saved = speed.saved_passes(2.97, 5, 2.03, 4, costs)
    assert saved == pytest.approx(2.3076)
    assert 5 / (5 - saved) == pytest.approx(1.857, abs=5e-4)
    assert speed.saved_passes(2, 4, 1, 4, costs) == pytest.approx(1.52)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.floats(0, 0.5),
    st.floats(1, 2),
    st.floats(0, 0.3),
)
def test_saved_is_target_only_cost_minus_speculative_cost(accepted, draft, verify, rollback):
    """The identity that the definition rests on, for any rounds of k 4."""
    rounds, total = len(accepted), sum(accepted)
    costs = Costs(draft, {4: verify}, rollback)
    spent = rounds * (verify + 4 * draft + rollback)
    saved = speed.saved_passes(total, 4 * rounds, rounds, 4, costs)
    assert saved == pytest.approx((total + rounds) - spent)


def test_measured_saving_is_zero_at_equal_speed():
    """Requests as fast as target-only saved nothing; twice as fast, half of their passes."""
    same = [receipt(i, "speculative", tpot_ms=20) for i in range(5)]
    fast = [receipt(i, "speculative", tpot_ms=10) for i in range(5)]
    assert speed.work(same).saved_measured(0.020) == pytest.approx(0, abs=1e-6)
    assert speed.work(fast).saved_measured(0.020) == pytest.approx(5 * 63 / 2)
