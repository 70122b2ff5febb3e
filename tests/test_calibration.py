"""Costs from receipts whose costs are known: the equations of STATS 2.1 solved back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rule_receipts import receipt

from speccheck import speed
from speccheck.records import CALIBRATION
from speccheck.speed import Costs
from speccheck.sweep import calibration

STEP_MS = 20.0
KS = (1, 2, 3, 5, 8)


def wave(block, k, costs_ms, *, proposer="draft", coverage=1.0, n=4, noise=1.0, concurrency=8):
    """One arm's turn: n requests of 49 tokens whose passes take `costs_ms` each on average."""
    found = []
    for i in range(n):
        passes = 48 if k == 0 else 12 + i
        steps = round(passes * coverage)
        arm = "speculative" if k else "target_only"
        decode_ms = passes * costs_ms * noise
        found.append(
            replace(
                receipt(
                    i,
                    arm,
                    stage=CALIBRATION,
                    phase=f"cal-{proposer}-k{k}" if k else "cal",
                    block=block,
                    concurrency=concurrency,
                    completion_tokens=49,
                    tpot_ms=decode_ms / 48,
                    target_passes=passes,
                    verify_steps=steps if k else 0,
                    proposed_tokens=steps * k if k else None,
                    accepted_tokens=48 - passes if k else None,
                    k=k or None,
                    proposer=proposer if k else None,
                ),
                receipt_id=f"{block}-{proposer}-{k}-{i}",
            )
        )
    return found


def measured(c, v, o, *, rounds=3, controls=(4, 16), coverage=0.5, rng=None, ks=KS):
    """Receipts of an engine with draft cost c, v per verified token and overhead o."""
    found = []
    for block in range(rounds):

        def noise():
            return 1.0 if rng is None else math.exp(rng.normal(0, 0.01))

        found += wave(block, 0, STEP_MS, noise=noise())
        for k in ks:
            found += wave(block, k, STEP_MS * (1 + v * k + c * k + o), noise=noise())
        for k in controls:
            cost = STEP_MS * (1 + v * k * coverage)
            found += wave(block, k, cost, proposer="ngram", coverage=coverage, noise=noise())
    return found


@pytest.mark.parametrize(("c", "v", "o"), [(0.05, 0.02, 0.1), (0.3, 0.2, 0.0), (0.0, 0.5, 0.05)])
def test_costs_are_solved_back(c, v, o):
    """c, V and o of an engine that obeys the equations come out as they went in."""
    found = calibration.calibrate(measured(c, v, o))[8]
    assert found.draft.value == pytest.approx(c, abs=1e-3)
    assert found.overhead.value == pytest.approx(o, abs=4e-3)
    for k in KS:
        assert found.verify[k].value == pytest.approx(1 + v * k, abs=6e-3)
        assert found.round[k].value == pytest.approx(1 + (c + v) * k + o, abs=6e-3)
    assert found.step_s.value == pytest.approx(STEP_MS / 1e3)
    assert (found.step_s.n, found.draft.n) == (3, 3)
    assert found.note == calibration.SEPARATE


def test_the_intervals_hold_the_truth():
    """With noise on every turn, nine of ten intervals at 5 % a side hold c and the round's cost."""
    rng = np.random.default_rng(5)
    hits = {"draft": 0, "round": 0}
    for _ in range(60):
        found = calibration.calibrate(measured(0.05, 0.1, 0.1, rng=rng, rounds=4))[8]
        hits["draft"] += found.draft.low <= 0.05 <= found.draft.high
        hits["round"] += found.round[3].low <= 1.55 <= found.round[3].high
    assert all(count >= 48 for count in hits.values()), hits


def test_one_server_shows_the_sum_only():
    """Without controls the draft is in the round: V holds all, and c is not made up."""
    found = calibration.calibrate(measured(0.05, 0.02, 0.1, controls=()))[8]
    assert (found.draft, found.overhead) == (None, None)
    assert found.note == calibration.TOGETHER
    assert found.costs.draft == 0
    assert found.costs.verify[5] == pytest.approx(1.45, abs=5e-3)
    single = calibration.calibrate(measured(0.05, 0.02, 0.1, ks=(4,)))[8]
    assert single.note == calibration.TOGETHER


def test_prompt_lookup_drafts_for_nothing():
    """An n-gram pair has no draft cost, and its verify step is scaled up from its coverage."""
    receipts = []
    for block in range(3):
        receipts += wave(block, 0, STEP_MS)
        cost = STEP_MS * (1 + 0.1 * 4 * 0.5)
        receipts += wave(block, 4, cost, proposer="ngram", coverage=0.5)
    found = calibration.calibrate(receipts)[8]
    assert (found.note, found.draft.value) == (calibration.LOOKUP, 0)
    assert found.verify[4].value == pytest.approx(1.4, abs=0.02)


def test_a_round_that_lacks_an_arm_or_failed_is_left_out():
    """Only whole rounds count, and batch sizes without one are not calibrated at all."""
    whole = measured(0.05, 0.02, 0.1, rounds=3)
    cut = [r for r in whole if not (r.block == 2 and r.k == 8)]
    assert calibration.calibrate(cut)[8].step_s.n == 2
    failed = [replace(r, outcome="error") if r.block == 1 else r for r in whole]
    assert calibration.calibrate(failed)[8].step_s.n == 2
    assert calibration.calibrate([r for r in whole if r.arm == "speculative"]) == {}
    assert calibration.calibrate([replace(r, stage="sweep") for r in whole]) == {}


def test_one_round_has_no_interval():
    """A single round gives values without bounds, never a point that looks exact."""
    found = calibration.calibrate(measured(0.05, 0.02, 0.1, rounds=1))[8]
    assert math.isinf(found.draft.high)
    assert math.isinf(found.verify[1].high)


def test_the_model_predicts_what_the_engine_does():
    """Saved passes by the model are those measured, on an engine that obeys the equations."""
    costs = calibration.costs(measured(0.05, 0.02, 0.1))[8]
    served = speed.work(wave(0, 3, STEP_MS * (1 + 0.07 * 3 + 0.1)))
    assert served.tokens == served.accepted + served.passes
    assert served.saved(costs) == pytest.approx(served.saved_measured(STEP_MS / 1e3), abs=0.3)


def test_verify_costs_between_the_calibrated_lengths():
    """V is 1 at nothing drafted and linear in between; beyond the last nothing is claimed."""
    costs = Costs(0.05, {2: 1.2, 4: 1.6})
    assert [costs.verify_at(d) for d in (0, 1, 2, 3, 4)] == pytest.approx([1, 1.1, 1.2, 1.4, 1.6])
    with pytest.raises(KeyError):
        costs.verify_at(4.1)
