"""Pairs of receipts, and what is measured of them for the rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rule_receipts import pair, pairs, receipt

from speccheck import guardrails, measure, stats
from speccheck.records import Arm, Stage, Verdict, to_json


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def by_metric(found, cohort=""):
    return {m.metric: m for m in found if m.cohort == cohort}


def shadow(receipts, rng, **how):
    return measure.measure_route(receipts, stage="shadow", route="chat", rng=rng, **how)


# --- pairs --------------------------------------------------------------------------------------


def test_pairs_are_joined_by_id(rng):
    """Any order of receipts gives the same pairs; the lonely are counted, not dropped silently."""
    receipts = pairs(rng, 30)
    lonely = [r for r in receipts if not (r.arm == "speculative" and r.prompt_id in ("p3", "p7"))]
    shuffled = [lonely[i] for i in rng.permutation(len(lonely))]
    found = measure.pair_receipts(shuffled)
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
    found = measure.pair_receipts([receipts[0], again, first, *receipts[2:]])
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
    found = measure.pair_receipts([*warm, *control, *receipts])
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
    assert len(found["tpot_p95_ratio"].fail_estimates) == len(stats.FAIL_LEVELS)
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


def test_what_both_arms_refuse_is_no_fault_of_speculation(rng):
    """A request that target-only refuses as well is named, and not counted against the arm."""
    refusal = {
        "outcome": "rejected",
        "error_class": "unsupported_parameter",
        "error_message": "response_format is not supported",
        "response_format": "json_schema",
    }
    receipts = pairs(rng, 40)
    receipts += [receipt(i, arm, **refusal) for i in range(40, 45) for arm in Arm]
    found = by_metric(shadow(receipts, rng))["unsupported_requests"]
    assert found.estimate.value == 0
    assert "5 more are refused by target-only too" in found.note


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


def test_how_many_pairs_got_slower_is_told_beside_the_quantile(rng):
    """Eight of forty pairs take half as long again: their share, with its interval and n."""
    receipts = pairs(rng, 40, speculative_ms=16.0)
    slow = [
        replace(r, last_token_ns=r.first_token_ns + 3 * (r.last_token_ns - r.first_token_ns) // 2)
        if r.arm == "speculative" and int(r.prompt_id[1:]) < 8
        else r
        for r in pairs(rng, 40, target_ms=20.0, speculative_ms=16.0)
    ]
    plain, found = by_metric(shadow(receipts, rng)), by_metric(shadow(slow, rng))
    assert plain["tpot_slower_share"].estimate.value == 0
    e = found["tpot_slower_share"].estimate
    assert (e.value, e.n, e.method) == (0.2, 40, "Clopper-Pearson")
    assert "8 of 40 pairs took over 1.1 times as long" in found["tpot_p95_ratio"].note


def test_repeats_of_a_prompt_add_no_certainty_to_shares(rng):
    """Coverage and slower pairs of ten prompts, four times each: no narrower than of ten."""

    def widths(found):
        estimates = [found[m].estimate for m in ("draft_coverage", "tpot_slower_share")]
        return [e.high - e.low for e in estimates], [e.n for e in estimates]

    once = [
        replace(r, verify_steps=3 + int(r.prompt_id[1:]) % 5, target_passes=10)
        if r.arm == "speculative"
        else r
        for r in pairs(rng, 10, target_ms=20.0, speculative_ms=21.9)
    ]
    often = [
        replace(r, pair_id=f"{r.pair_id}/{i}", receipt_id=f"{r.receipt_id}/{i}")
        for i in range(4)
        for r in once
    ]
    one, few = widths(by_metric(shadow(once, rng)))
    many, n = widths(by_metric(shadow(often, rng)))
    assert many == pytest.approx(one)
    assert (few, n) == ([10, 10], [40, 40])


def test_errors_are_told_against_the_control(rng):
    """Six failures against two: the absolute rate is judged, the difference says whose they are."""
    receipts = [
        replace(r, outcome="error", error_class="timeout")
        if int(r.prompt_id[1:]) < (6 if r.arm == "speculative" else 2)
        else r
        for r in pairs(rng, 100)
    ]
    found = by_metric(shadow(receipts, rng))
    assert (
        found["error_rate"].note == "6 of 100 requests failed: 6 timeout; 2 of 100 on target-only"
    )
    e = found["error_rate_difference"].estimate
    assert e.value == pytest.approx(0.04)
    assert e.low < 0 < e.high


def test_a_thin_tail_is_left_to_order_statistics(rng):
    """With 60 pairs nothing is resampled for p95, and no upper limit exists; p50 has one."""
    found = by_metric(shadow(pairs(rng, 60), rng))
    assert "order-statistic" in found["tpot_p95_ratio"].estimate.method
    assert found["tpot_p95_ratio"].estimate.high == float("inf")
    assert "bootstrap" in found["tpot_p50_ratio"].estimate.method
    many = by_metric(shadow(pairs(rng, 100), rng))
    assert "bootstrap" in many["tpot_p95_ratio"].estimate.method


def test_a_canary_is_unpaired(rng):
    """Each request on one arm: independent samples, each resampled on its own."""
    receipts = pairs(rng, 400)
    canary = [r for r in receipts if (int(r.prompt_id[1:]) % 2 == 0) == (r.arm == "speculative")]
    found = by_metric(shadow(canary, rng))
    assert found["e2e_mean_ratio"].estimate.method.endswith("Welch t-interval")
    assert "unpaired bootstrap" in found["tpot_p95_ratio"].estimate.method
    assert found["tpot_p95_ratio"].estimate.low < 0.5 < found["tpot_p95_ratio"].estimate.high


def test_latency_from_receipts_not_histograms(rng):
    """T25: p95 5.1 ms against 8.6 ms, both under the first bucket: the receipts see +68.6 %."""
    receipts = pairs(rng, 300, target_ms=5.1, speculative_ms=5.1 * 1.686)
    e = by_metric(shadow(receipts, rng))["tpot_p95_ratio"].estimate
    assert 1.6 < e.low < 1.686 < e.high


def test_blocks_are_the_unit(rng):
    """With eight blocks and more the bootstrap resamples blocks."""
    receipts = [replace(r, block=j) for j in range(10) for r in pairs(rng, 10, first=10 * j)]
    found = by_metric(shadow(receipts, rng))
    assert "10 blocks" in found["tpot_p95_ratio"].estimate.method
    assert "10 blocks" in found["e2e_mean_ratio"].estimate.method
    assert found["e2e_mean_ratio"].estimate.n == 100


def test_repeats_of_a_prompt_are_one_cluster_of_latency_too(rng):
    """Where prompts come again, intervals are over prompts; n still counts requests."""
    receipts = [
        replace(r, prompt_id=f"p{int(r.prompt_id[1:]) % 25}", block=int(r.prompt_id[1:]) // 10)
        for r in pairs(rng, 100)
    ]
    found = by_metric(shadow(receipts, rng))
    for metric in ("tpot_p95_ratio", "e2e_mean_ratio"):
        assert "10 blocks and 25 prompts" in found[metric].estimate.method
        assert found[metric].estimate.n == 100
    few = by_metric(shadow([replace(r, block=0) for r in receipts], rng))
    assert "over 25 prompts" in few["tpot_p95_ratio"].estimate.method
    assert "clustered by 25 prompts" in few["e2e_mean_ratio"].estimate.method


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
    found = measure.measure_protected(protected_run(rng, delay=1.1), stage="shadow", route="chat")
    e = found[0].estimate
    assert 1 < e.low < 1.1 < e.high
    assert e.n == 10
    assert "100 protected requests beside speculative work, 100 without" in found[0].note


def test_no_protected_traffic_is_no_measurement(rng):
    """Without protected traffic there is nothing to say about it."""
    assert measure.measure_protected(pairs(rng, 20), stage="shadow", route="chat") == []


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
    found = measure.noise_floors(receipts + control, rng=rng)
    assert found["e2e_mean_ratio"].low < 1 < found["e2e_mean_ratio"].high
    assert found["e2e_p95_ratio"].n == 100
    assert measure.noise_floors(receipts, rng=rng) == {}


def a_a(rng, n, *, noise, drift=0.0, blocks=8, first=500, **fields):
    """Receipts of an A/A control: n requests twice, in neighbouring blocks 2j and 2j+1.

    Each side has noise of its own (log-sd); `drift` is the log change from block to block.
    """
    found = []
    for number in range(n):
        block = 2 * (number % (blocks // 2))
        shared = rng.lognormal(0, 0.2)
        for half in (0, 1):
            spread = shared * rng.lognormal(0, noise) * np.exp(drift * (block + half))
            made = receipt(
                first + number,
                "target_only",
                tpot_ms=20 * spread,
                ttft_ms=50 * spread,
                **{"block": block + half, "repeat": half} | fields,
            )
            pair_id = f"load-aa:p{first + number}:0"
            found.append(replace(made, pair_id=pair_id, receipt_id=f"aa{number}-{half}"))
    return found


def test_a_a_pairs_are_twice_target_only(rng):
    """Both halves share a pair id and completed; they are no pairs of the arms, nor unpaired."""
    control = a_a(rng, 12, noise=0.01)
    broken = replace(control[0], outcome="error", last_token_ns=None)
    receipts = [*pairs(rng, 20), broken, *control[1:]]
    assert len(measure.a_a_pairs(receipts)) == 11
    found = measure.pair_receipts(receipts)
    assert (len(found.pairs), found.unpaired) == (20, 0)


def test_drift_between_the_blocks_of_an_a_a_control_cancels(rng):
    """Each block 3 % slower than the one before: no bias, where one order alone would show 3 %."""
    control = a_a(rng, 120, noise=0.005, drift=0.03)
    e = measure.noise_floors(control, rng=rng)["e2e_mean_ratio"]
    assert e.low < 1 < e.high
    assert e.high / e.low < 1.02
    one_way = measure.noise_floors([r for r in control if r.block < 2], rng=rng)["e2e_mean_ratio"]
    assert one_way.low > 1.02


def test_a_noise_floor_needs_pairs(rng):
    """Ten pairs for any, 20 for a p95, 100 for a p99; unequal answers are no equal work."""
    for n, known in ((9, set()), (12, {"p50"}), (20, {"p50", "p95"}), (100, {"p50", "p95", "p99"})):
        found = measure.noise_floors(a_a(rng, n, noise=0.01), rng=rng)
        assert {name.split("_")[1] for name in found if name.startswith("tpot")} == known
    control = a_a(rng, 40, noise=0.01)
    unequal = [
        replace(r, completion_tokens=90) if r.receipt_id.endswith("-1") else r for r in control
    ]
    found = measure.noise_floors(unequal, rng=rng)
    assert not [name for name in found if name.startswith(("tpot", "e2e"))]
    assert found["ttft_p50_ratio"].n == 40


@pytest.mark.parametrize(
    ("noise", "speculative_ms", "verdict"),
    [
        (0.01, 18.0, Verdict.PASS),
        (0.5, 18.0, Verdict.INCONCLUSIVE),
        (0.01, 25.0, Verdict.FAIL),
        (0.3, 25.0, Verdict.INCONCLUSIVE),
        (0.3, 80.0, Verdict.FAIL),
        (0.3, 8.0, Verdict.PASS),
    ],
)
def test_a_rule_is_decided_beyond_the_noise_floor_only(rng, noise, speculative_ms, verdict):
    """Quiet: decided. Noisy: inconclusive, unless the effect exceeds limit and noise together."""
    receipts = pairs(rng, 200, target_ms=20, speculative_ms=speculative_ms)
    floors = measure.noise_floors(a_a(rng, 100, noise=noise), rng=rng)
    found = guardrails.judge(
        {"max_tpot_p95_regression": guardrails.RuleLimit(0.10)},
        shadow(receipts, rng),
        stage=Stage.SHADOW,
        route="chat",
        noise_floors=floors,
    )
    (finding,) = [f for f in found if f.rule == "max_tpot_p95_regression"]
    assert finding.verdict is verdict, finding.why
    assert "(noise floor, n 100)" in finding.why


def test_acceptance_from_counters(rng):
    """T06: 0 of 6630 by the server's counters is an acceptance of 0, with a limit."""
    found = measure.acceptance_from_counters(0, 6630, 50, stage="shadow", route="chat")
    assert found.estimate.value == 0
    assert found.estimate.high == pytest.approx(1 - 0.05 ** (1 / 50))
    none = measure.acceptance_from_counters(0, 0, 50, stage="shadow", route="chat")
    assert none.estimate is None


def test_an_empty_block_takes_its_neighbour_out(rng):
    """A block that no protected request fell into does not shift the comparison of later ones."""
    receipts = []
    for block in range(16):
        with_mirror = block % 4 in (1, 2)
        if with_mirror:
            receipts.append(receipt(1000 + block, "speculative", block=block, mirror=True))
        if block == 5:
            continue  # nobody protected came
        drift = 2.0 ** (block // 2)  # far larger than the effect: only right neighbours cancel it
        for i in range(3):
            ms = 10 * drift * (1.2 if with_mirror else 1.0)
            fields = {"block": block, "priority": "protected", "route": "protected"}
            request = receipt(block * 10 + i, "target_only", ttft_ms=ms, tpot_ms=ms, **fields)
            receipts.append(request)
    (found,) = measure.measure_protected(receipts, stage="shadow", route="protected")
    assert found.estimate.n == 7
    assert found.estimate.value == pytest.approx(1.2)


def test_counters_that_cannot_be_are_no_acceptance():
    """More accepted than drafted (a reset that nobody saw) is said and estimated from nothing."""
    made = measure.acceptance_from_counters(330, 300, 80, stage="shadow", route="chat")
    assert (made.estimate, made.fail_estimates) == (None, ())
    assert "330 of 300 drafted tokens accepted" in made.note
    assert "cannot be" in made.note


def test_failed_requests_are_no_slice_of_their_own(rng):
    """Two of 300 requests fail, without a count of prompt tokens: 0.67 %, and no slice of 100 %."""
    lost = {"outcome": "error", "error_class": "timeout", "prompt_tokens": None}
    receipts = [
        r
        for i in range(300)
        for r in pair(
            i,
            target={"prompt_tokens": 100 + 10 * (i % 30)},
            speculative=lost if i in (70, 200) else {"prompt_tokens": 100 + 10 * (i % 30)},
        )
    ]
    found = measure.measure_route(receipts, stage="shadow", route="chat", rng=rng)
    rates = {m.cohort: m.estimate for m in found if m.metric == "error_rate"}
    assert set(rates) == {"", "prompt 64-255", "prompt 256-1023"}
    assert sum(round(e.value * e.n) for name, e in rates.items() if name) == 2
    assert sum(e.n for name, e in rates.items() if name) == 300


def test_more_accepted_than_drafted_is_no_acceptance(rng):
    """Counts that cannot be are said and left out; they do not lift the rate, or make it 145 %."""
    odd = {"proposed_tokens": 40, "accepted_tokens": 58}
    receipts = [r for i in range(90) for r in pair(i, target={}, speculative=odd if i % 3 else {})]
    found = measure.measure_route(receipts, stage="shadow", route="chat", rng=rng)
    (rate,) = [m for m in found if (m.metric, m.cohort) == ("acceptance_rate", "")]
    assert (rate.estimate.value, rate.estimate.n) == (0.6, 30)
    assert "from 30 of 90 completed requests (33%)" in rate.note
    assert "more accepted tokens than drafted ones" in rate.note


@pytest.mark.parametrize("broken", [{"sent_ns": 10**15}, {"sent_ns": None}])
def test_one_broken_clock_takes_one_pair_out(rng, broken):
    """A request that ended before it was sent was not timed; the other 149 are measured."""
    receipts = pairs(rng, 150)
    receipts[41] = replace(receipts[41], **broken)
    found = measure.measure_route(receipts, stage="shadow", route="chat", rng=rng)
    by_metric = {m.metric: m for m in found if not m.cohort}
    for metric in ("e2e_mean_ratio", "e2e_p95_ratio", "ttft_p95_ratio"):
        assert by_metric[metric].estimate.n == 149
        assert by_metric[metric].estimate.is_known
        assert "1 pairs without times" in by_metric[metric].note
    equal = replace(receipts[7], sent_ns=receipts[7].first_token_ns)
    assert measure.LATENCIES["ttft"](equal) is None
    assert measure.LATENCIES["e2e"](equal) == equal.e2e_s
