"""Where speculation pays: rows of the matrix, each with its verdict and its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rule_receipts import pair, pairs

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
