"""A sweep's receipts to cells: who wins at which load, and intervals that hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rule_receipts import receipt
from scipy import stats as sp

from speccheck import matrix, stats
from speccheck.records import SWEEP, Estimate
from speccheck.speed import Costs
from speccheck.sweep import cells
from speccheck.sweep.calibration import Calibration
from speccheck.sweep.cells import FIXED, MIXED, SEQUENTIAL


def swept(
    rng: np.random.Generator,
    load: int,
    target_ms: float,
    by_k: dict[int, float],
    *,
    rounds: int = 8,
    n: int = 8,
    round_noise: float = 0.01,
    noise: float = 0.01,
    counts: dict[int, dict[str, Any]] | None = None,
    reason: str = FIXED,
    **fields: Any,
):
    """Receipts of one load: each round every arm on the same n prompts, TPOT in ms by k."""
    found = []
    for block in range(rounds):
        spread = rng.lognormal(0, 0.1, n)
        for k, ms in {0: target_ms, **by_k}.items():
            turn = math.exp(rng.normal(0, round_noise))
            for i in range(n):
                number = block * n + i
                tpot_ms = ms * spread[i] * turn * math.exp(rng.normal(0, noise))
                found.append(
                    receipt(
                        number,
                        "speculative" if k else "target_only",
                        **{
                            "receipt_id": f"c{load}-k{k}-{number}",
                            "stage": SWEEP,
                            "phase": f"c{load}-k{k}" if k else f"c{load}",
                            "pair_id": f"c{load}:p{number}:0",
                            "block": block,
                            "concurrency": load,
                            "k": k or None,
                            "tpot_ms": tpot_ms,
                            "ttft_ms": 5.0,
                            "decision_reason": reason,
                        }
                        | ((counts or {}).get(k, {}))
                        | fields,
                    )
                )
    return found


@pytest.fixture
def rng():
    return np.random.default_rng(4)


T09 = {
    4: {
        "proposed_tokens": 400,
        "accepted_tokens": 196,
        "verify_steps": 100,
        "acceptance_histogram": (19, 24, 21, 14, 22),
    },
    2: {
        "proposed_tokens": 200,
        "accepted_tokens": 138,
        "verify_steps": 100,
        "acceptance_histogram": (20, 22, 58),
    },
}


def test_too_many_draft_tokens(rng):
    """T09: k 2 wins at concurrency 8 and ties at 1, though k 4 has the longer acceptance length."""
    receipts = swept(rng, 1, 1e3 / 35, {2: 1e3 / 56, 4: 1e3 / 57}, counts=T09, noise=0.1)
    receipts += swept(rng, 8, 1e3 / 110, {2: 1e3 / 271, 4: 1e3 / 188}, counts=T09, noise=0.1)
    idle, busy = cells.loads(receipts)
    assert (busy.concurrency, busy.best, busy.tied) == (8, 2, ())
    assert (idle.concurrency, idle.best, idle.tied) == (1, 2, (4,))
    two, four = busy.cells
    assert four.mean_acceptance_length.value == pytest.approx(2.96)
    assert two.mean_acceptance_length.value == pytest.approx(2.38)
    assert [e.value for e in four.per_position] == pytest.approx([0.81, 0.57, 0.36, 0.22])
    assert [e.value for e in two.per_position] == pytest.approx([0.80, 0.58])
    assert (four.acceptance.value, two.acceptance.value) == pytest.approx((0.49, 0.69))


T10 = ((1, 14.1, 8.9), (16, 18.8, 16.0), (32, 22.4, 23.1), (64, 30.6, 39.5))


def test_crossover_with_concurrency(rng):
    """T10: on up to 16, off at 64; the page names the loads and gives no mean over them."""
    receipts = [
        r
        for load, base, spec in T10
        for r in swept(rng, load, base, {4: spec}, n=16, acceptance_histogram=None)
    ]
    found = cells.loads(receipts)
    assert {load.concurrency: load.best for load in found} == {1: 4, 16: 4, 32: 0, 64: 0}
    ratios = {load.concurrency: load.cells[0].ratios["e2e"] for load in found}
    for load, base, spec in T10:
        truth = (5 + 63 * spec) / (5 + 63 * base)
        assert ratios[load].low <= truth <= ratios[load].high
    (line,) = cells.findings(found)
    assert "pays at 1 (k 4), 16 (k 4)" in line
    assert "does not pay at 32, 64" in line
    limits = matrix.MatrixLimits(max_tpot_p95_ratio=1.05)
    rows = matrix.workload_matrix(receipts, rng=rng, limits=limits).rows
    by_load = {row.cohort["concurrency"]: row for row in rows}
    assert by_load["1"].verdict == by_load["16"].verdict == "speculate"
    assert by_load["64"].verdict == "target_only"
    assert "over the limit of +5%" in by_load["64"].why
    assert "over the limit" not in by_load["32"].why


def test_a_slice_hidden_by_the_average(rng):
    """T12: the cell pays at acceptance .48, long prompts get slower at .06; both are said."""
    short = swept(
        rng, 8, 14.6, {4: 9.8}, n=28, prompt_tokens=2000, accepted_tokens=66, proposed_tokens=120
    )
    long = swept(
        rng, 8, 19.5, {4: 27.9}, n=2, prompt_tokens=16384, accepted_tokens=17, proposed_tokens=290
    )
    moved = [
        replace(
            r,
            receipt_id=f"long-{r.receipt_id}",
            prompt_id=f"long-{r.prompt_id}",
            pair_id=r.pair_id.replace("p", "long-p"),
        )
        for r in long
    ]
    (load,) = cells.loads([*short, *moved])
    (cell,) = load.cells
    total = (224 * 66 + 16 * 17) / (224 * 120 + 16 * 290)
    assert cell.acceptance.value == pytest.approx(total)
    assert (cell.verdict, total > 0.4) == ("pays", True)
    by_band = {one.prompt_band: one for one in cell.slices}
    assert by_band[">=4096"].acceptance.value == pytest.approx(0.06, abs=2e-3)
    truth = (5 + 63 * 27.9) / (5 + 63 * 19.5)
    assert by_band[">=4096"].e2e_ratio.value == pytest.approx(truth, abs=0.03)
    assert by_band["1024-4095"].e2e_ratio.high < 1
    (line,) = cells.findings((load,))
    assert "k 4 at 8 is slower for prompts of >=4096 tokens (x1.4" in line
    assert "route those to target-only" in line


def test_a_ratio_by_hand(rng):
    """Mean of log ratios and Student's interval over rounds, computed apart from our code."""
    receipts = swept(rng, 4, 20.0, {3: 12.0}, rounds=6, round_noise=0.05)
    (load,) = cells.loads(receipts)
    (cell,) = load.cells
    times = {(r.pair_id, r.k): r.last_token_ns / 1e9 for r in receipts}
    logs = {}
    for r in receipts:
        if r.k == 3:
            logs.setdefault(r.block, []).append(
                math.log(times[r.pair_id, 3] / times[r.pair_id, None])
            )
    means = np.array([np.mean(values) for values in logs.values()])
    reach = sp.t.ppf(0.95, 5) * means.std(ddof=1) / math.sqrt(6)
    ratio = cell.ratios["e2e"]
    assert ratio.value == pytest.approx(math.exp(means.mean()))
    assert (ratio.low, ratio.high) == pytest.approx(
        (math.exp(means.mean() - reach), math.exp(means.mean() + reach))
    )
    assert (cell.n_pairs, cell.n_rounds, ratio.n, ratio.alpha) == (48, 6, 48, 0.05)
    assert "6 rounds and 48 prompts" in ratio.method
    work = [r for r in receipts if r.k == 3 and r.block == 0]
    wall_s = max(r.last_token_ns for r in work) / 1e9
    first = 64 * 8 / wall_s
    assert load.arms[3].figures["throughput_tokens_per_s"].low < first * 1.3


def test_rounds_and_prompts_are_clusters(rng):
    """Noise between rounds widens an interval that pairs alone would call sharp, and so do prompts
    that differ.
    """
    noisy = swept(rng, 4, 20.0, {3: 12.0}, round_noise=0.2)
    (load,) = cells.loads(noisy)
    pairs = stats.geometric_mean_ratio(
        [r.e2e_s for r in noisy if r.k is None], [r.e2e_s for r in noisy if r.k], alpha=0.05
    )
    ratio = load.cells[0].ratios["e2e"]
    assert math.log(ratio.high / ratio.low) > 2 * math.log(pairs.high / pairs.low)
    differing = [
        replace(r, prompt_id=f"p{number % 4}", last_token_ns=round(r.last_token_ns * factor))
        for r in swept(rng, 4, 20.0, {3: 12.0}, round_noise=0)
        for number in [int(r.prompt_id[1:])]
        for factor in [1.5 if r.k and number % 4 == 0 else 1.0]
    ]
    (load,) = cells.loads(differing)
    ratio = load.cells[0].ratios["e2e"]
    # One prompt of four is slower by half: by hand, over four prompts.
    spread = np.array([math.log(1.5), 0, 0, 0]).std(ddof=1) / 2
    assert math.log(ratio.high / ratio.low) > 1.8 * sp.t.ppf(0.95, 3) * spread


def test_one_round_decides_nothing(rng):
    """However large the effect: a single round has no interval."""
    (load,) = cells.loads(swept(rng, 4, 20.0, {3: 2.0}, rounds=1))
    (cell,) = load.cells
    assert (cell.verdict, cell.needed, load.best) == ("open", None, None)
    assert math.isinf(cell.ratios["e2e"].high)


@pytest.mark.parametrize(
    ("low", "high", "limit", "verdict"),
    [
        (0.5, 0.9, 1.0, "pays"),
        (0.5, 1.01, 1.0, "open"),
        (1.01, 1.2, 1.0, "does not pay"),
        (0.985, 0.999, 1.0, "does not pay"),
        (0.97, 0.999, 1.0, "pays"),
        (0.9, 0.94, 1 / 1.05, "pays"),
        (0.9, 0.96, 1 / 1.05, "open"),
        (0.96, 0.99, 1 / 1.05, "does not pay"),
        (math.nan, math.nan, 1.0, "open"),
    ],
)
def test_the_interval_decides(low, high, limit, verdict):
    """Wholly below the limit pays, wholly above does not, nothing to gain does not."""
    ratio = Estimate((low + high) / 2, low, high, 10, "t", 0.05)
    assert cells.verdict_of(ratio, limit) == verdict


def test_routes_have_their_own_limit(rng):
    """A speed-up of 1.1 pays on a route that asks for 1.05, not on one that asks for 1.3."""
    receipts = swept(rng, 4, 20.0, {3: 18.0})
    for limit, verdict in ((1.05, "pays"), (1.3, "does not pay")):
        limits = cells.Limits(1.0, {"chat": limit})
        assert cells.loads(receipts, limits=limits)[0].cells[0].verdict == verdict


def test_looks_share_one_level():
    """Over as many looks as one likes the levels add up to at most 5 %."""
    assert sum(cells.look_alpha(2**j) for j in range(1, 60)) <= 0.05


def ever_pays(rng, alpha_at, *, sims=500, looks=(2, 4, 8, 16, 32)):
    """Share of sweeps at a true ratio of 1 that are called faster at one look or another."""
    wrong = 0
    for _ in range(sims):
        logs = rng.normal(0, 0.05, looks[-1])
        for rounds in looks:
            ratio = stats.geometric_mean_ratio(
                np.ones(rounds), np.exp(logs[:rounds]), alpha=alpha_at(rounds)
            )
            if ratio.high < 1:
                wrong += 1
                break
    return wrong / sims


def test_looking_while_it_runs_keeps_the_level(rng):
    """With the levels of looks at most 5 % are wrong; at 5 % a look it would be far more."""
    assert ever_pays(rng, cells.look_alpha) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500)
    assert ever_pays(rng, lambda _: 0.05) > 0.1


def test_the_lengths_of_a_load_share_its_level(rng):
    """By hand, from scipy: the ratio of each of four lengths at a quarter of 5 %, so that all four
    intervals hold at once; other loads, and a length alone, do not pay for them.
    """
    lengths = {1: 19.0, 2: 18.0, 3: 17.0, 5: 20.0}
    receipts = swept(rng, 4, 20.0, lengths, rounds=6, round_noise=0.05)
    alone = [r for r in receipts if r.k in (None, 3)]
    other = swept(rng, 8, 20.0, {3: 15.0}, rounds=6)
    (load, second) = cells.loads([*receipts, *other])
    times = {(r.pair_id, r.k): r.last_token_ns / 1e9 for r in receipts}
    for cell in load.cells:
        mine = [r for r in receipts if r.k == cell.k]
        logs = [math.log(times[r.pair_id, r.k] / times[r.pair_id, None]) for r in mine]
        means = np.array(logs).reshape(6, -1).mean(axis=1)
        reach = sp.t.isf(0.05 / 4, 5) * means.std(ddof=1) / math.sqrt(6)
        ratio = cell.ratios["e2e"]
        assert (ratio.low, ratio.high) == pytest.approx(
            (math.exp(means.mean() - reach), math.exp(means.mean() + reach))
        )
        assert ratio.alpha == cell.ratios["throughput"].alpha == 0.05 / 4
        assert "for all 4 k at once" in ratio.method
    assert second.cells[0].ratios["e2e"].alpha == 0.05
    (single,) = cells.loads(alone)
    assert single.cells[0].ratios["e2e"].alpha == 0.05
    looked = cells.loads([replace(r, decision_reason=SEQUENTIAL) for r in receipts])[0]
    assert looked.cells[0].ratios["e2e"].alpha == cells.look_alpha(6) / 4


def test_an_open_cell_says_what_would_decide_it(rng):
    """Once it has the pairs that it asked for, most cells are decided; and it leans both ways."""
    decided = 0
    for _ in range(20):
        everything = swept(rng, 8, 20.0, {3: 18.5}, rounds=40, n=4, round_noise=0.05)
        everything = [replace(r, decision_reason=SEQUENTIAL) for r in everything]
        (load,) = cells.loads([r for r in everything if r.block < 4])
        needed, rounds = load.cells[0].needed, 4
        if needed is not None:
            rounds = min(40, 4 + math.ceil(needed / 4))
        (load,) = cells.loads([r for r in everything if r.block < rounds])
        decided += load.cells[0].verdict != "open"
    assert decided >= 10
    even = swept(rng, 8, 20.0, {3: 20.0}, rounds=4, n=4, round_noise=0.02)
    (load,) = cells.loads([replace(r, decision_reason=SEQUENTIAL) for r in even])
    (cell,) = load.cells
    assert cell.verdict == "open"
    assert cell.needed is not None, "nothing to gain can be decided too"


def test_a_budgeted_sweep_has_wider_intervals(rng):
    """Receipts of a sweep that is looked at carry it, and their intervals pay for it."""
    fixed = swept(rng, 4, 20.0, {3: 12.0}, rounds=4)
    looked = [replace(r, decision_reason=SEQUENTIAL) for r in fixed]
    one, other = (cells.loads(r)[0].cells[0].ratios["e2e"] for r in (fixed, looked))
    assert (one.alpha, other.alpha) == (0.05, pytest.approx(0.05 / 6))
    assert other.low < one.low < one.high < other.high
    assert "repeated looks" in other.method


def calibrated(costs: Costs) -> Calibration:
    unknown = Estimate(math.nan, math.nan, math.nan, 0, "", 0.05)
    return Calibration(8, unknown, {}, {}, unknown, unknown, "", costs, (costs,) * 3)


def test_the_model_beside_the_measurement(rng):
    """On an engine that obeys its costs the model saves what is measured, and predicts e2e."""
    costs = Costs(0.05, {4: 1.2}, 0.1)
    per_pass = 1.2 + 0.2 + 0.1
    # 64 tokens: 63 decode tokens in 25 passes, all of them verify steps of 4.
    ms = 20.0 * per_pass * 25 / 63
    receipts = swept(rng, 8, 20.0, {4: ms}, round_noise=0, noise=0)
    (load,) = cells.loads(receipts, calibrations={8: calibrated(costs)})
    (cell,) = load.cells
    assert cell.saved_measured.value == pytest.approx(1 - per_pass * 25 / 63, abs=1e-6)
    assert cell.saved_modelled.value == pytest.approx(cell.saved_measured.value, abs=1e-6)
    assert cell.saved_gap == pytest.approx(0, abs=1e-6)
    assert cell.predicted.value == pytest.approx(cell.ratios["e2e"].value, abs=1e-3)
    assert cell.break_even == pytest.approx((4 * 0.05 + 0.2 + 0.1) / 4)
    assert (load.best, load.predicted_best) == (4, 4)


def test_no_calibration_is_not_estimated(rng):
    """Without V at this batch size nothing is modelled; V is never taken as 1."""
    receipts = swept(rng, 8, 20.0, {4: 12.0})
    for known in (
        {},
        {16: calibrated(Costs(0.05, {4: 1.2}))},
        {8: calibrated(Costs(0.1, {2: 1.2}))},
    ):
        (load,) = cells.loads(receipts, calibrations=known)
        (cell,) = load.cells
        assert (cell.saved_modelled, cell.saved_gap, cell.predicted) == (None, None, None)
        assert load.predicted_best is None
        assert cell.saved_measured is not None


def test_classes_of_mixed_traffic_share_their_turns(rng):
    """Throughput is of the whole turn, latency of each class by itself."""
    mixed = [
        replace(
            r,
            route=MIXED,
            task="short" if int(r.prompt_id[1:]) % 2 else "high_agreement",
            proposed_tokens=0 if r.k and int(r.prompt_id[1:]) % 2 else r.proposed_tokens,
        )
        for r in swept(rng, 8, 20.0, {4: 12.0}, rounds=4)
    ]
    high, short = cells.loads(mixed)
    assert (high.task, short.task) == ("high_agreement", "short")
    assert high.target.n == short.target.n == 16
    name = "throughput_tokens_per_s"
    assert high.target.figures[name] == short.target.figures[name]
    assert high.target.in_flight == short.target.in_flight == pytest.approx(8, rel=0.25)
    assert short.cells[0].acceptance is None
    assert short.cells[0].saved_measured is None


def test_cost_follows_throughput(rng):
    """Price per engine hour over tokens per hour; no price, no cost."""
    receipts = swept(rng, 8, 20.0, {4: 12.0})
    (load,) = cells.loads(receipts, price_per_engine_hour=3.6)
    rate, cost = (
        load.arms[4].figures[name] for name in ("throughput_tokens_per_s", "cost_per_1k_tokens")
    )
    assert cost.value == pytest.approx(1 / rate.value)
    assert (cost.low, cost.high) == pytest.approx((1 / rate.high, 1 / rate.low))
    (load,) = cells.loads(receipts)
    assert "cost_per_1k_tokens" not in load.arms[4].figures


def test_errors_and_memory_of_an_arm(rng):
    """Failed requests are counted and leave the pairs; memory is the largest sample."""
    receipts = swept(rng, 8, 20.0, {4: 12.0}, rounds=4)
    failed = [
        replace(r, outcome="error", last_token_ns=None) if i == 40 and r.k is None else r
        for i, r in enumerate(receipts)
    ]
    failed = [replace(failed[10], outcome="error"), *failed[:10], *failed[11:]]
    key = cells.arm_key("chat", "chat", 8, 4)
    (load,) = cells.loads(failed, memory={key: [1e8, 3e8, 2e8]})
    assert load.arms[4].errors + load.target.errors == 1
    assert load.cells[0].n_pairs == 31
    assert load.arms[4].figures["memory_bytes"].value == 3e8
    assert "memory_bytes" not in load.target.figures


def test_a_load_without_target_only_is_not_there(rng):
    """Nothing to compare with, no row; no receipts, no loads."""
    receipts = swept(rng, 8, 20.0, {4: 12.0})
    assert cells.loads([r for r in receipts if r.k]) == ()
    assert cells.loads([replace(r, stage="shadow") for r in receipts]) == ()
    assert cells.loads([]) == ()
