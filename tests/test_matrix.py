"""Where speculation pays: golden speed tables, pairing, measurements and the matrix."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_receipts import pair, pairs, receipt

from speccheck import matrix
from speccheck.matrix import Costs
from speccheck.records import to_json

A_FIRST = [0.9, 0.765, 0.459, 0.306]
"""Chance that k drafts are accepted, k = 1..4: the fixture table's first round."""
RATES = [A_FIRST[0], *(b / a for a, b in pairwise(A_FIRST))]


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def by_metric(found, cohort=""):
    return {m.metric: m for m in found if m.cohort == cohort}


def shadow(receipts, rng, **how):
    return matrix.measure_route(receipts, stage="shadow", route="chat", rng=rng, **how)


# --- speed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "golden"), [(1, 1.8), (3, 2.952), (4, 3.3616), (5, 3.6893)])
def test_tokens_per_round(k, golden):
    """At a constant acceptance of .8."""
    assert matrix.tokens_per_round([0.8] * k) == pytest.approx(golden, abs=5e-5)


def test_speedup_golden():
    """Leviathan's formula at .8, k 4, draft cost .05."""
    assert matrix.speedup([0.8] * 4, Costs(0.05, {4: 1.0})) == pytest.approx(2.801, abs=5e-4)


@pytest.mark.parametrize(
    ("costs", "golden", "best"),
    [
        (Costs(0.1, dict.fromkeys(range(5), 1.0)), (1, 1.727, 2.221, 2.403, 2.450), 4),
        (Costs(0.2, {k: 1 + 0.05 * k for k in range(5)}), (1, 1.52, 1.777, 1.785, 1.715), 3),
        (Costs(0.3, {k: 1 + 0.05 * k for k in range(5)}), (None, None, 1.568, None, None), 2),
    ],
)
def test_best_proposal_length_golden(costs, golden, best):
    """Speed-up by k on the fixture table's first round, and the best k."""
    for k, expected in enumerate(golden):
        if expected is not None:
            assert matrix.speedup(RATES[:k], costs) == pytest.approx(expected, abs=6e-4)
    assert matrix.best_proposal_length(RATES, costs) == best


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
    found = [matrix.speedup([0.7] * k, costs) for k in (1, 2, 3, 4, 6)]
    assert found == pytest.approx(golden, abs=6e-4)
    assert matrix.best_proposal_length([0.7] * 6, costs) == best


def test_speculation_that_never_pays_has_best_length_zero():
    """Nothing beats target-only where drafts cost more than they bring."""
    assert matrix.best_proposal_length([0.1] * 4, Costs(0.5, dict.fromkeys(range(5), 1.0))) == 0


def test_break_even_golden():
    """Acceptance at which k 4 breaks even: .07 for c .05 and V 1.08."""
    assert matrix.break_even_acceptance(4, Costs(0.05, {4: 1.08})) == pytest.approx(0.07)


@pytest.mark.parametrize(("draft", "a"), [(0.05, 0.1668), (0.1, 0.2871), (0.2, 0.4553)])
def test_break_even_per_token(draft, a):
    """At the per-token acceptance that breaks even, k 4 neither gains nor loses."""
    costs = Costs(draft, {4: 1.0})
    assert matrix.speedup([a] * 4, costs) == pytest.approx(1, abs=2e-4)
    pooled = sum(a**i for i in range(1, 5)) / 4
    assert pooled == pytest.approx(matrix.break_even_acceptance(4, costs), abs=2e-4)


def test_saved_passes_golden():
    """2.3076 of 5 tokens on the fixture table, 1.52 in the worked round."""
    costs = Costs(0.1, {4: 1.08})
    saved = matrix.saved_passes(2.97, 5, 2.03, 4, costs)
    assert saved == pytest.approx(2.3076)
    assert 5 / (5 - saved) == pytest.approx(1.857, abs=5e-4)
    assert matrix.saved_passes(2, 4, 1, 4, costs) == pytest.approx(1.52)


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
    saved = matrix.saved_passes(total, 4 * rounds, rounds, 4, costs)
    assert saved == pytest.approx((total + rounds) - spent)


def test_measured_saving_is_zero_at_equal_speed():
    """Requests as fast as target-only saved nothing; twice as fast, half of their passes."""
    same = [receipt(i, "speculative", tpot_ms=20) for i in range(5)]
    fast = [receipt(i, "speculative", tpot_ms=10) for i in range(5)]
    assert matrix.saved_passes_measured(same, 0.020) == pytest.approx(0, abs=1e-6)
    assert matrix.saved_passes_measured(fast, 0.020) == pytest.approx(5 * 63 / 2)


# --- pairs --------------------------------------------------------------------------------------


def test_pairs_are_joined_by_id(rng):
    """Any order of receipts gives the same pairs; the lonely are counted, not dropped silently."""
    receipts = pairs(rng, 30)
    lonely = [r for r in receipts if not (r.arm == "speculative" and r.prompt_id in ("p3", "p7"))]
    shuffled = [lonely[i] for i in rng.permutation(len(lonely))]
    found = matrix.pair_receipts(shuffled)
    assert len(found.pairs) == 28
    assert all(t.pair_id == s.pair_id for t, s in found.pairs)
    assert found.unpaired == 2
    assert "2 receipts without a partner" in found.note
    note = by_metric(shadow(shuffled, rng))["e2e_p50_ratio"].note
    assert "2 receipts without a partner" in note


def test_failed_sides_leave_latency_but_not_the_error_rate(rng):
    """A pair with a failed side says nothing about latency."""
    receipts = pairs(rng, 40)
    broken = [
        replace(r, outcome="error", error_class="stream_error", last_token_ns=None)
        if r.arm == "speculative" and r.prompt_id == "p1"
        else r
        for r in receipts
    ]
    found = by_metric(shadow(broken, rng))
    assert found["e2e_p50_ratio"].estimate.n == 39
    assert found["error_rate"].estimate.value == pytest.approx(1 / 40)
    assert "1 stream_error" in found["error_rate"].note
    assert found["error_rate_target_only"].estimate.value == 0


def test_the_last_attempt_counts(rng):
    """A retried request is a second receipt; the first attempt neither pairs nor counts."""
    receipts = pairs(rng, 10)
    first = replace(receipts[1], outcome="error", receipt_id="first")
    again = replace(receipts[1], attempt=1)
    found = matrix.pair_receipts([receipts[0], again, first, *receipts[2:]])
    assert (len(found.pairs), found.failed, found.unpaired) == (10, 0, 0)


def test_warm_up_and_controls_are_left_out(rng):
    """Warm-up receipts and the A/A control do not enter the comparison of arms."""
    receipts = pairs(rng, 20)
    warm = [replace(r, warm_up=True, pair_id=f"warmup-load:{r.prompt_id}:0") for r in receipts[:6]]
    control = [
        replace(r, phase="aa", repeat=1, receipt_id=f"aa{i}")
        for i, r in enumerate(receipts)
        if r.arm == "target_only"
    ]
    found = matrix.pair_receipts([*warm, *control, *receipts])
    assert (len(found.pairs), found.unpaired) == (20, 0)


# --- measurements -------------------------------------------------------------------------------


def test_measurements_find_what_was_put_in(rng):
    """Ratios, acceptance and lengths of synthetic receipts lie inside their intervals."""
    found = by_metric(shadow(pairs(rng, 300, target_ms=20, speculative_ms=12), rng))
    truths = {
        "tpot_p50_ratio": 0.6,
        "tpot_p95_ratio": 0.6,
        "ttft_p50_ratio": 1.0,
        "acceptance_rate": 0.6,
        "mean_acceptance_length": 1 + 60 / 25,
    }
    for metric, truth in truths.items():
        # At the level of 1 in 1,000 per side, five intervals miss once in a hundred runs.
        e = next(e for e in found[metric].fail_estimates if e.alpha == 0.001)
        assert e.low < truth < e.high
        assert found[metric].estimate.n == 300
    assert found["draft_coverage"].estimate.value == 1.0
    assert found["fallback_rate"].estimate.value == 0
    assert len(found["tpot_p95_ratio"].fail_estimates) == len(matrix.stats.FAIL_LEVELS)
    assert len(found["tpot_p95_ratio"].examples) == 5


def test_measuring_twice_gives_the_same(rng):
    """The same receipts and the same seed give the same numbers."""
    receipts = pairs(rng, 60)
    first, second = (to_json(shadow(receipts, np.random.default_rng(1))) for _ in range(2))
    assert first == second


def test_loads_are_never_pooled(rng):
    """With two loads latency is measured at each, and only there."""
    receipts = pairs(rng, 50, concurrency=1, phase="load-1") + pairs(
        rng, 50, first=50, speculative_ms=30, concurrency=16, phase="load-16"
    )
    found = shadow(receipts, rng)
    assert "tpot_p95_ratio" not in by_metric(found)
    assert by_metric(found)["acceptance_rate"].estimate.n == 100
    assert by_metric(found, "concurrency 1")["e2e_mean_ratio"].estimate.high < 1
    assert by_metric(found, "concurrency 16")["e2e_mean_ratio"].estimate.low > 1


def test_acceptance_says_how_much_it_saw(rng):
    """T20: counts are missing for 40 of 100 requests; they are left out, not averaged as 0."""
    with_counts = [
        receipt(i, "speculative", proposed_tokens=150, accepted_tokens=90) for i in range(60)
    ]
    without = [
        receipt(
            i,
            "speculative",
            proposed_tokens=None,
            accepted_tokens=None,
            counts_source="none",
            counts_note="no metrics after a stop string",
            stop_reason="Q:",
        )
        for i in range(60, 100)
    ]
    found = by_metric(shadow(with_counts + without, rng))["acceptance_rate"]
    assert found.estimate.value == pytest.approx(5400 / 9000)
    assert "from 60 of 100 completed requests (60%)" in found.note
    assert "no metrics after a stop string" in found.note


def test_nothing_drafted_is_no_acceptance(rng):
    """Requests that drafted nothing have no acceptance rate: not 0, and not 1."""
    receipts = [receipt(i, "speculative", proposed_tokens=0, accepted_tokens=0) for i in range(30)]
    found = by_metric(shadow(receipts, rng))["acceptance_rate"]
    assert found.estimate is None
    assert found.note == "no token was drafted in 30 requests"


def test_a_slice_by_prompt_length(rng):
    """T12: acceptance of the long prompts is measured apart from the total that hides it."""
    receipts = [
        receipt(i, "speculative", prompt_tokens=500, proposed_tokens=120, accepted_tokens=66)
        for i in range(420)
    ] + [
        receipt(i, "speculative", prompt_tokens=20000, proposed_tokens=290, accepted_tokens=a)
        for i, a in zip(range(420, 450), [17, 18] * 15, strict=True)
    ]
    found = shadow(receipts, rng)
    total = by_metric(found)["acceptance_rate"]
    assert total.estimate.value == pytest.approx((27720 + 525) / 59100)
    long = by_metric(found, "prompt >=4096")["acceptance_rate"]
    assert long.estimate.value == pytest.approx(0.06, abs=0.001)
    assert long.share == pytest.approx(30 / 450)


def test_short_and_unequal_outputs_are_no_tpot_pairs(rng):
    """Short outputs and pairs of unequal length leave TPOT, and are counted."""
    receipts = pairs(rng, 40) + pairs(rng, 10, first=40, completion_tokens=8)
    receipts += pair(50, target={"completion_tokens": 64}, speculative={"completion_tokens": 40})
    found = by_metric(shadow(receipts, rng))["tpot_p50_ratio"]
    assert found.estimate.n == 40
    assert "11 pairs under 32 tokens or of unequal length left out" in found.note


def test_refused_requests_are_not_instability(rng):
    """T13: 40 of 400 are refused for min_p: their own count, named, and no error rate."""
    receipts = pairs(rng, 360)
    receipts += [
        receipt(
            i,
            "speculative",
            outcome="rejected",
            http_status=400,
            min_p=0.05,
            features="min_p",
            error_class="unsupported_parameter",
            error_message="The min_p and logit_bias sampling parameters are not yet supported",
        )
        for i in range(360, 400)
    ]
    receipts += [receipt(i, "target_only", min_p=0.05, features="min_p") for i in range(360, 400)]
    found = by_metric(shadow(receipts, rng))
    assert found["error_rate"].estimate.value == 0
    refused = found["unsupported_requests"]
    assert refused.estimate.value == 40
    assert "40 of 400 requests (10%) refused" in refused.note
    assert "all of them carry min_p" in refused.note


def test_refusals_without_a_cause_point_to_server_defaults(rng):
    """T13: all are refused though none carries an option: the server's own defaults add it."""
    receipts = [
        receipt(
            i,
            "speculative",
            outcome="rejected",
            error_class="unsupported_parameter",
            error_message="min_p is not yet supported",
        )
        for i in range(20)
    ]
    note = by_metric(shadow(receipts, rng))["unsupported_requests"].note
    assert "generation_config" in note


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "error", "error_class": "timeout"},
        {"outcome": "incomplete", "error_class": "stream_error"},
        {"outcome": "rejected", "error_class": "overloaded"},
        {"finish_reason": None},
        {"completion_tokens": 0},
    ],
)
def test_what_is_an_error(fields, rng):
    """Timeouts, cut streams, other refusals, no finish reason and empty bodies are errors."""
    receipts = [receipt(0, "speculative", **fields), receipt(1, "speculative")]
    assert by_metric(shadow(receipts, rng))["error_rate"].estimate.value == 0.5


def test_cancelling_is_no_error(rng):
    """What we cancelled ourselves is neither an error nor a success."""
    receipts = [receipt(0, "speculative", outcome="cancelled"), receipt(1, "speculative")]
    found = by_metric(shadow(receipts, rng))["error_rate"].estimate
    assert (found.value, found.n) == (0, 1)


def test_a_canary_is_unpaired(rng):
    """Each request on one arm: independent samples with their conservative intervals."""
    receipts = pairs(rng, 400)
    canary = [r for r in receipts if (int(r.prompt_id[1:]) % 2 == 0) == (r.arm == "speculative")]
    found = by_metric(shadow(canary, rng))
    assert found["e2e_mean_ratio"].estimate.method.endswith("Welch t-interval")
    assert "order-statistic" in found["tpot_p95_ratio"].estimate.method
    assert found["tpot_p95_ratio"].estimate.low < 0.5 < found["tpot_p95_ratio"].estimate.high


def test_latency_from_receipts_not_histograms(rng):
    """T25: p95 5.1 ms against 8.6 ms, both under the first bucket: the receipts see +68.6 %."""
    receipts = pairs(rng, 300, target_ms=5.1, speculative_ms=5.1 * 1.686)
    e = by_metric(shadow(receipts, rng))["tpot_p95_ratio"].estimate
    assert 1.6 < e.low < 1.686 < e.high


def test_abba_blocks_are_the_unit(rng):
    """With eight pairs of blocks and more the bootstrap resamples blocks."""
    receipts = []
    for j in range(10):
        for r in pairs(rng, 10, first=10 * j, phase="abba"):
            first = (j % 2 == 0) == (r.arm == "target_only")
            receipts.append(replace(r, block=2 * j + (0 if first else 1)))
    found = by_metric(shadow(receipts, rng))
    assert "10 blocks" in found["tpot_p95_ratio"].estimate.method
    assert "10 blocks" in found["e2e_mean_ratio"].estimate.method
    assert found["e2e_mean_ratio"].estimate.n == 100


def test_fallbacks_are_moved_requests(rng):
    """Requests moved to target-only after a fallback count as such, and compare with nothing."""
    receipts = pairs(rng, 40)
    moved = [receipt(i, "target_only", decision="fell_back") for i in range(40, 50)]
    found = by_metric(shadow(receipts + moved, rng))
    assert found["fallback_rate"].estimate.value == pytest.approx(10 / 50)
    assert found["error_rate_target_only"].estimate.n == 40
    assert found["e2e_mean_ratio"].note == ""


def test_mirrored_pairs_lie_in_one_block(rng):
    """Where both arms of a pair ran in the same block, that block is the unit."""
    receipts = [
        replace(r, block=b, mirror=r.arm == "speculative")
        for b in range(9)
        for r in pairs(rng, 8, first=8 * b, phase="mirror")
    ]
    found = by_metric(shadow(receipts, rng))
    assert "9 blocks" in found["e2e_mean_ratio"].estimate.method


def protected_run(rng, *, delay: float, blocks: int = 20):
    """Protected requests in blocks; every other pair of blocks has speculative work beside it."""
    receipts = []
    for block in range(blocks):
        loaded = block % 4 in (1, 2)
        for i in range(10):
            number = 10 * block + i
            tpot = 20 * rng.lognormal(0, 0.1) * (delay if loaded else 1)
            receipts.append(
                receipt(
                    number,
                    "target_only",
                    tpot_ms=tpot,
                    priority="protected",
                    block=block,
                    route="core",
                    phase="protected",
                )
            )
            if loaded:
                beside = {"block": block, "phase": "protected", "mirror": True}
                receipts.append(receipt(1000 + number, "speculative", **beside))
    return receipts


def test_protected_delay_is_found(rng):
    """Protected traffic that is 10 % slower beside speculative work shows as 1.10."""
    found = matrix.measure_protected(protected_run(rng, delay=1.1), stage="shadow", route="chat")
    e = found[0].estimate
    assert 1 < e.low < 1.1 < e.high
    assert e.n == 10
    assert "100 protected requests beside speculative work, 100 without" in found[0].note


def test_no_protected_traffic_is_no_measurement(rng):
    """Without protected traffic there is nothing to say about it."""
    assert matrix.measure_protected(pairs(rng, 20), stage="shadow", route="chat") == []


def test_noise_floor_of_latency(rng):
    """Target-only against itself: a ratio near 1 from the A/A pairs alone."""
    receipts = pairs(rng, 100, phase="greedy", stage="replay")
    control = [
        replace(
            r,
            phase="aa",
            repeat=1,
            receipt_id=f"aa{i}",
            last_token_ns=round(r.last_token_ns * rng.lognormal(0, 0.03)),
        )
        for i, r in enumerate(receipts)
        if r.arm == "target_only"
    ]
    found = matrix.noise_floors(receipts + control, rng=rng)
    assert found["e2e_mean_ratio"].low < 1 < found["e2e_mean_ratio"].high
    assert found["e2e_p95_ratio"].n == 100
    assert matrix.noise_floors(receipts, rng=rng) == {}


def test_acceptance_from_counters(rng):
    """T06: 0 of 6630 by the server's counters is an acceptance of 0, with a limit."""
    found = matrix.acceptance_from_counters(0, 6630, 50, stage="shadow", route="chat")
    assert found.estimate.value == 0
    assert found.estimate.high == pytest.approx(1 - 0.05 ** (1 / 50))
    none = matrix.acceptance_from_counters(0, 0, 50, stage="shadow", route="chat")
    assert none.estimate is None


# --- the matrix ---------------------------------------------------------------------------------


def rows(receipts, rng, **how):
    return matrix.workload_matrix(receipts, rng=rng, **how)


def row_at(found, concurrency):
    return next(r for r in found.rows if r.cohort["concurrency"] == str(concurrency))


def test_crossover_with_load(rng):
    """T10: on up to 16, off at 64, and acceptance is not called the cause."""
    receipts = []
    for j, (load, b, s) in enumerate(
        ((1, 14.1, 8.9), (16, 18.8, 16.0), (32, 22.4, 23.1), (64, 30.6, 39.5))
    ):
        receipts += pairs(
            rng,
            150,
            target_ms=b,
            speculative_ms=s,
            acceptance=0.58,
            concurrency=load,
            phase=f"load-{load}",
            first=150 * j,
        )
    found = rows(receipts, rng)
    verdicts = {r.cohort["concurrency"]: r.verdict for r in found.rows}
    assert verdicts["1"] == verdicts["16"] == "speculate"
    assert verdicts["64"] == "target_only"
    assert verdicts["32"] != "speculate"
    worst = row_at(found, 64)
    assert "not the cause" in worst.why
    assert "at concurrency 64" in worst.why
    assert worst.saved_measured < 0 < row_at(found, 1).saved_measured
    assert any("faster in" in w or "slower in" in w for w in found.warnings)


def test_proposal_length_is_chosen_by_time(rng):
    """T09: k 2 wins at concurrency 8 and ties at 1, though k 4 has the longer acceptance length."""
    receipts = []
    for j, (load, k, target, ms, length) in enumerate(
        (
            (1, 4, 30.0, 17.5, 2.96),
            (1, 2, 30.0, 17.86, 2.38),
            (8, 4, 9.0, 5.32, 2.96),
            (8, 2, 9.0, 3.69, 2.38),
        )
    ):
        counts = {"k": k, "proposed_tokens": 25 * k, "accepted_tokens": round(25 * (length - 1))}
        receipts += [
            replace(r, **counts) if r.arm == "speculative" else r
            for r in pairs(
                rng,
                60,
                target_ms=target,
                speculative_ms=ms,
                concurrency=load,
                phase=f"load-{load}-k{k}",
                first=60 * j,
                noise=0.06,
            )
        ]
    found = rows(receipts, rng)
    busy, idle = row_at(found, 8), row_at(found, 1)
    assert (busy.verdict, busy.k) == ("speculate", 2)
    lengths = {r.k: r.mean_acceptance_length.value for r in busy.by_k}
    assert lengths[4] > lengths[2]
    assert idle.k == 2
    assert "k 4 cannot be told from it" in idle.why


def test_low_acceptance_is_named_as_the_reason(rng):
    """Where drafts miss, the reason is acceptance; with a calibration it is said against it."""
    receipts = pairs(rng, 100, target_ms=10, speculative_ms=14, acceptance=0.06)
    plain = rows(receipts, rng).rows[0]
    assert plain.verdict == "target_only"
    assert "acceptance is low (0.06)" in plain.why
    assert "not estimated" in plain.saved_note
    costs = {1: Costs(0.1, {4: 1.2})}
    calibrated = rows(receipts, rng, costs=costs).rows[0]
    assert "break-even at concurrency 1 is 0.15" in calibrated.why
    assert calibrated.saved_modelled is not None


def test_protected_traffic_is_never_speculated_on(rng):
    """However fast it would be."""
    found = rows(pairs(rng, 60, speculative_ms=5, priority="protected"), rng).rows[0]
    assert found.verdict == "target_only"
    assert "protected" in found.why


def test_refused_cohorts_stay_on_target_only(rng):
    """A cohort that the server refuses gets the option's name as its reason."""
    receipts = [
        r
        for i in range(30)
        for r in pair(
            i,
            target={},
            speculative={
                "outcome": "rejected",
                "error_class": "unsupported_parameter",
                "error_message": "min_p is not supported",
            },
            min_p=0.1,
            features="min_p",
        )
    ]
    found = rows(receipts, rng).rows[0]
    assert (found.verdict, found.refused) == ("target_only", 30)
    assert "min_p" in found.why


def test_quality_overrules_speed(rng):
    """One confirmed regression keeps a fast cohort on target-only."""
    receipts = pairs(rng, 60, speculative_ms=5)
    found = rows(receipts, rng, quality={"p1": "regression", "p2": "agree"}).rows[0]
    assert found.verdict == "target_only"
    assert "1 of 2 prompts fail" in found.why


def test_small_cohorts_are_pooled_and_named(rng):
    """Each receipt is in exactly one row, and a pooled row lists what it pools."""
    receipts = pairs(rng, 60, task="json") + pairs(rng, 5, first=60, task="sql")
    receipts += pairs(rng, 5, first=65, task="rag") + pairs(rng, 40, first=70, language="de")
    found = rows(receipts, rng)
    assert sum(r.n_pairs for r in found.rows) == 110
    assert sum(r.share for r in found.rows) == pytest.approx(1)
    pooled = next(r for r in found.rows if r.pooled)
    assert {name.split(", ")[2] for name in pooled.pooled} == {"sql", "rag"}
    assert (pooled.verdict, pooled.n_pairs) == ("inconclusive", 10)
    assert "10 pairs, 20 needed" in pooled.why
    assert any("language de" in r.name for r in found.rows)


def test_nothing_to_gain_is_target_only(rng):
    """A ratio settled at 1 is no reason to speculate."""
    receipts = pairs(rng, 400, target_ms=20, speculative_ms=20, noise=0.01)
    found = rows(receipts, rng).rows[0]
    assert found.verdict == "target_only"


def test_undecided_rows_say_how_many_more(rng):
    """An interval across the limit asks for more pairs."""
    receipts = pairs(rng, 30, target_ms=20, speculative_ms=19, noise=0.25)
    found = rows(receipts, rng).rows[0]
    assert found.verdict == "inconclusive"
    assert "more pairs would decide" in found.why


def test_rows_are_plain_json(rng):
    """A row goes into the packet's JSON as it is."""
    plain = to_json(rows(pairs(rng, 60), rng).rows[0])
    assert plain["verdict"] == "speculate"
    assert plain["e2e_ratio"]["n"] == 60
    assert all(math.isfinite(cell["ratio"]["value"]) for cell in plain["latency"])


def test_no_receipts_no_rows(rng):
    """Nothing measured gives an empty matrix, not a row of zeros."""
    assert rows([], rng).rows == ()
