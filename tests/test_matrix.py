"""Where speculation pays: rows of the matrix, each with its verdict and its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rule_receipts import pair, pairs, receipt

from speccheck import matrix
from speccheck.records import to_json
from speccheck.speed import Costs


@pytest.fixture
def rng():
    return np.random.default_rng(20)


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
            stage="replay",
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
                stage="replay",
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
    receipts = pairs(rng, 100, target_ms=10, speculative_ms=14, acceptance=0.06, stage="replay")
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


def test_the_copy_of_protected_traffic_is_protected(rng):
    """A mirrored copy at normal priority does not make its pair a candidate for speculation."""
    receipts = [
        replace(r, priority="protected") if r.arm == "target_only" else r
        for r in pairs(rng, 60, speculative_ms=5)
    ]
    (row,) = rows(receipts, rng).rows
    assert (row.verdict, row.n_pairs, row.unpaired) == ("target_only", 60, 0)
    assert "protected" in row.why


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
    quality = {"greedy": {"p1": "regression", "p2": "agree"}, "sampled": {"p3": "regression"}}
    found = rows(receipts, rng, quality=quality).rows[0]
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
    assert pooled.name == "chat, shadow, the rest"
    assert (pooled.verdict, pooled.n_pairs) == ("inconclusive", 10)
    assert "10 pairs, 20 needed" in pooled.why
    assert any("language de" in r.name for r in found.rows)


def canary(rng, n, *, share=0.25, first=0, target_ms=20.0, speculative_ms=30.0, **fields):
    """One receipt per request, on one arm by a fixed pattern."""
    found = []
    for number in range(first, first + n):
        speculative = number % round(1 / share) == 0
        arm = "speculative" if speculative else "target_only"
        counts = {"accepted_tokens": int(rng.binomial(100, 0.04))} if speculative else {}
        found.append(
            receipt(
                number,
                arm,
                stage="canary",
                phase="step-1",
                concurrency=64,
                decision="speculate" if speculative else "target_only",
                tpot_ms=(speculative_ms if speculative else target_ms) * rng.lognormal(0, 0.1),
                **counts | fields,
            )
        )
    return found


def test_a_canary_is_compared_without_pairs(rng):
    """Its row counts every request of both arms, says that it is unpaired, and gives a reason."""
    receipts = canary(rng, 160)
    (row,) = rows(receipts, rng).rows
    assert (row.is_paired, row.n_pairs, row.unpaired) == (False, 0, 0)
    assert (row.n_speculative, row.n_target) == (40, 120)
    mine = [r for r in receipts if r.arm == "speculative"]
    assert (row.drafted, row.accepted) == (4000, sum(r.accepted_tokens for r in mine))
    assert row.acceptance.value == row.accepted / 4000
    assert row.mean_acceptance_length.value == pytest.approx(1 + row.accepted / (25 * 40))
    assert row.draft_coverage == 1
    assert row.verdict == "target_only"
    assert "acceptance is low (0.04)" in row.why
    assert row.name.startswith("chat, canary")
    # 50 ms + 63 tokens at 30 and at 20 ms, by hand
    assert row.e2e_ratio.value == pytest.approx(1.94 / 1.31, rel=0.06)
    assert row.e2e_ratio.low < row.e2e_ratio.value < row.e2e_ratio.high
    assert "unpaired" in row.e2e_ratio.method
    assert {cell.quantile for cell in row.latency} == {"p50"}
    assert row.saved_measured == pytest.approx(1 - 30 / 20, abs=0.1)


def test_a_canary_that_pays_is_a_yes(rng):
    """Independent samples can say yes too."""
    (row,) = rows(canary(rng, 160, share=0.5, speculative_ms=10.0), rng).rows
    assert (row.verdict, row.k) == ("speculate", 4)
    assert {cell.quantile for cell in row.latency} == {"p50", "p95"}


def test_a_canary_never_stands_in_a_row_with_pairs(rng):
    """However small both are: same route, same task, two rows."""
    small = pairs(rng, 5, concurrency=64) + canary(rng, 12, first=100)
    found = rows(small, rng).rows
    assert [(r.cohort["stage"], r.n_pairs) for r in found] == [("shadow", 5), ("canary", 0)]
    assert "3 completed requests on the smaller arm, 20 needed" in found[1].why
    assert found[1].drafted == 300
    assert found[1].acceptance is not None


def test_canary_cohorts_are_formed_by_their_smaller_arm(rng):
    """With fewer than 20 requests on one arm a cohort is pooled, whatever the other has."""
    receipts = canary(rng, 160, task="json")
    receipts += canary(rng, 60, first=200, task="sql") + canary(rng, 60, first=300, task="rag")
    found = rows(receipts, rng).rows
    assert [(r.cohort["task"], r.n_speculative, r.n_target) for r in found] == [
        ("any", 30, 90),
        ("json", 40, 120),
    ]
    assert len(found[0].pooled) == 2


def test_what_fell_back_counts_on_the_arm_that_answered(rng):
    """A request that a fallback moved to target-only is one of target-only's."""
    receipts = canary(rng, 160)
    moved = [
        replace(r, decision="fell_back") if r.arm == "target_only" and i % 2 else r
        for i, r in enumerate(receipts)
    ]
    assert any(r.decision == "fell_back" for r in moved)
    (row,) = rows(moved, rng).rows
    assert (row.n_speculative, row.n_target) == (40, 120)


def test_a_canary_does_not_bend_the_average_of_the_pairs(rng):
    """A route whose mirrored traffic gets faster gets no warning for what its canary did."""
    receipts = pairs(rng, 40, speculative_ms=10, task="json")
    receipts += pairs(rng, 40, first=40, speculative_ms=12, task="sql")
    receipts += canary(rng, 400, first=100, target_ms=2.0, speculative_ms=60.0)
    found = rows(receipts, rng)
    assert [r.cohort["stage"] for r in found.rows] == ["shadow", "shadow", "canary"]
    assert found.warnings == ()


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
