"""Where speculation pays: rows of the matrix, each with its verdict and its reason."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from rule_receipts import pair, pairs, receipt
from scipy import stats as sp

from speccheck import matrix, stats
from speccheck.records import to_json
from speccheck.speed import Costs
from speccheck.sweep import cells


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
    found = rows(receipts, rng, limits=matrix.MatrixLimits(max_tpot_p95_ratio=1.05))
    verdicts = {r.cohort["concurrency"]: r.verdict for r in found.rows}
    assert verdicts["1"] == verdicts["16"] == "speculate"
    assert verdicts["64"] == "target_only"
    assert verdicts["32"] != "speculate"
    assert "within the limit of +5%" in row_at(found, 32).why
    assert "is over the limit of +5%" in row_at(found, 64).why
    assert "pays up to concurrency 16 and no more at 32" in " ".join(found.advice)
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


def test_a_slice_that_the_average_hides(rng):
    """T12: the route gets faster, its long prompts slower; the advice is to route those away."""
    receipts = pairs(
        rng, 420, target_ms=14.6, speculative_ms=9.8, acceptance=0.55, prompt_tokens=2000
    )
    receipts += pairs(
        rng,
        30,
        first=420,
        target_ms=19.5,
        speculative_ms=27.9,
        acceptance=0.06,
        prompt_tokens=17_000,
    )
    found = rows(receipts, rng)
    short, long = found.rows
    assert (short.verdict, long.verdict) == ("speculate", "target_only")
    assert long.cohort["prompt_band"] == ">=4096"
    assert "requests take 1.4" in long.why
    assert "acceptance is low (0.0" in long.why
    assert any("yet they get slower in: chat, shadow" in w for w in found.warnings)
    (advice,) = found.advice
    assert "prompts of 4096 tokens and more to target-only" in advice
    assert "vLLM has no gate by prompt length" in advice


def test_what_a_server_refuses_is_advice(rng):
    """T13: the parameter that all refused requests carry is named, with how many it were."""
    refused = {
        "outcome": "rejected",
        "error_class": "unsupported_parameter",
        "error_message": "The min_p and logit_bias sampling parameters are not yet supported",
    }
    receipts = pairs(rng, 360)
    for i in range(360, 400):
        receipts += pair(i, target={}, speculative=refused, min_p=0.05, features="min_p")
    found = rows(receipts, rng)
    (refusal,) = found.refusals
    assert (refusal.options, refusal.n, refusal.of) == (("min_p",), 40, 400)
    assert "min_p on target-only: the speculative server refuses 40 of 400" in found.advice[0]
    bare = [replace(r, min_p=0.0, features="") for r in receipts]
    assert "generation_config" in rows(bare, rng).advice[0]


def test_times_of_a_late_client_decide_nothing(rng):
    """Neither a yes nor a no by time; what quality says stands."""
    receipts = pairs(rng, 60, speculative_ms=5) + pairs(
        rng, 60, first=60, speculative_ms=40, task="sql"
    )
    late = rows(receipts, rng, void={"shadow": "send lag p99 31 ms > limit 10 ms"})
    assert {r.verdict for r in late.rows} == {"inconclusive"}
    assert "void: send lag p99 31 ms" in late.rows[0].why
    assert late.warnings == ("shadow: times are void: send lag p99 31 ms > limit 10 ms",)
    quality = {"greedy": {"p1": "regression"}}
    judged = rows(receipts, rng, void={"shadow": "late"}, quality=quality)
    assert judged.rows[0].verdict == "target_only"


def test_limits_of_a_route_are_its_own(rng):
    """A route that asks for more speed-up than it gets is not a yes; another is."""
    receipts = pairs(rng, 60, speculative_ms=16) + pairs(
        rng, 60, first=60, speculative_ms=16, route="bulk"
    )
    strict = {"bulk": matrix.MatrixLimits(min_speedup=2.0)}
    bulk, chat = rows(receipts, rng, route_limits=strict).rows
    assert (chat.verdict, bulk.verdict) == ("speculate", "inconclusive")
    assert "the speed-up of 2 that it must reach" in bulk.why


def test_prompts_of_random_ids_are_not_decisive(rng):
    """T08: neither a yes nor a no, whatever the numbers, until a real sample was measured."""
    why = "its prompts are random ids"
    for ms in (5, 40):
        found = rows(pairs(rng, 60, speculative_ms=ms), rng, unrepresentative={"chat": why})
        assert found.rows[0].verdict == "inconclusive"
        assert "not decisive: its prompts are random ids" in found.rows[0].why


# --- mixes of the arms --------------------------------------------------------------------------


def mixed_canary(rng, shares, n=200):
    """Requests of two tasks on two arms; `shares` are prose's share of each arm."""
    return [
        receipt(
            i + n * j,
            arm,
            stage="canary",
            phase="step-1",
            task="prose" if rng.random() < share else "json",
        )
        for j, (arm, share) in enumerate(zip(("target_only", "speculative"), shares, strict=True))
        for i in range(n)
    ]


def test_a_shift_of_the_mix_is_warned_of(rng):
    """Beyond chance, with n, naming the class that moved most."""
    (warning,) = [
        w for w in rows(mixed_canary(rng, (0.3, 0.6)), rng).warnings if "traffic differs" in w
    ]
    for words in ("route chat, canary", "chi-square", "n 200 speculative and 200", "task"):
        assert words in warning


def test_the_same_mix_gives_no_warning(rng):
    """Sixty canaries of one mix: none is warned of at a level of 1 in 1,000."""
    warned = 0
    for _ in range(60):
        receipts = mixed_canary(rng, (0.4, 0.4), n=60)
        warned += len(matrix._mix_shifts(receipts))
    assert warned == 0


def test_a_key_that_comes_again_is_one(rng):
    """Later steps of a canary send the same keys to the same arm: no new evidence of a shift."""
    once = mixed_canary(rng, (0.4, 0.55), n=80)
    again = [
        replace(r, phase=f"step-{i}", receipt_id=f"{r.receipt_id}-{i}")
        for i in range(8)
        for r in once
    ]
    assert matrix._mix_shifts(once) == matrix._mix_shifts(again) == []


# --- sweeps -------------------------------------------------------------------------------------


def sweep(rng, *, load=8, task="json", target_ms=20.0, by_k=((2, 12.0), (5, 15.0)), rounds=4):
    """A cell per k: each arm takes its turn on the same prompts, four a round."""
    found = []
    for block in range(rounds):
        for i in range(4):
            number, shared = 4 * block + i, rng.lognormal(0, 0.1)
            arms = [("target_only", None, target_ms), *(("speculative", k, ms) for k, ms in by_k)]
            for arm, k, ms in arms:
                turn = rng.lognormal(0, 0.02)
                phase = f"c{load}" if k is None else f"c{load}-k{k}"
                found.append(
                    receipt(
                        number,
                        arm,
                        stage="sweep",
                        phase=phase,
                        pair_id=f"c{load}:{task}{number}:0",
                        receipt_id=f"{phase}:{task}:{number}",
                        prompt_id=f"{task}{number}",
                        prompt_tokens=60 + number,
                        task=task,
                        concurrency=load,
                        block=block,
                        k=k,
                        tpot_ms=ms * shared * turn,
                    )
                )
    return found


def test_a_cell_of_a_sweep_is_a_row_of_its_own(rng):
    """Sixteen pairs in four rounds decide; the cell is not split by prompt length, nor pooled."""
    found = rows(sweep(rng) + sweep(rng, load=64, by_k=((2, 30.0), (5, 44.0))), rng)
    assert [(r.cohort["concurrency"], r.verdict, r.k) for r in found.rows] == [
        ("8", "speculate", 2),
        ("64", "target_only", 2),
    ]
    busy = found.rows[0]
    assert (busy.n_pairs, busy.in_flight) == (16, 8)
    assert [r.k for r in busy.by_k] == [2, 5]
    assert busy.observed["prompt_band"] == ("64-255", "<64")
    assert "4 rounds" in busy.e2e_ratio.method, "as the sweep itself has it"


def test_one_round_of_a_sweep_is_too_little(rng):
    """The unit of noise is the round: one has no interval."""
    (row,) = rows(sweep(rng, rounds=1), rng).rows
    assert row.verdict == "inconclusive"


def test_what_was_in_flight_is_counted_where_arrivals_set_the_load(rng):
    """Four requests at a time, one after the other: the row says four, not the cap of 64."""
    receipts = [
        replace(
            r,
            sent_ns=(i // 2 // 4) * 10**10 + i,
            done_ns=(i // 2 // 4) * 10**10 + 10**9,
        )
        for i, r in enumerate(pairs(rng, 60, concurrency=64))
    ]
    assert rows(receipts, rng).rows[0].in_flight == 4


@pytest.mark.parametrize("asked", [0.0, 0.5, 1.0])
def test_a_speed_up_that_may_be_a_loss_still_has_to_be_one(asked):
    """min_speedup 0 is a limit that a file may hold: no division by it, and 1 is what pays."""
    assert matrix.MatrixLimits(min_speedup=asked).e2e_ratio == 1
    assert cells.Limits(min_speedup=asked).ratio("chat") == 1
    assert matrix.MatrixLimits(min_speedup=1.25).e2e_ratio == pytest.approx(0.8)


# --- prompts that come again ---------------------------------------------------------------------


def again(rng, prompts, times, **fields):
    """Shadow pairs in which each of so many prompts comes so many times, answers as before."""
    found = []
    for number in range(prompts * times):
        prompt, ids = number % prompts, {"pair_id": f"load:n{number}"}
        ids["prompt_id"] = f"p{prompt}"
        accepted = 30 + 9 * prompt % 60
        found += pair(
            number,
            target={"tpot_ms": 20 * rng.lognormal(0, 0.05)},
            speculative={"tpot_ms": 10 * rng.lognormal(0, 0.05), "accepted_tokens": accepted},
            **ids | fields,
        )
    return found


def test_repeats_of_one_prompt_are_no_cohort(rng):
    """Forty mirrored copies of one prompt say nothing of other prompts: no limits, no verdict."""
    (row,) = rows(again(rng, 1, 40), rng).rows
    assert (row.n_pairs, row.verdict) == (40, "inconclusive")
    assert (row.acceptance.low, row.acceptance.high) == (0, 1)
    assert row.e2e_ratio.high == math.inf
    for cell in row.latency:
        assert (cell.ratio.low, cell.ratio.high) == (0, math.inf)
    assert (row.n_prompts, "needed" in row.why) == (1, False)
    assert row.why.endswith(
        "undecided; these are of 1 prompt, and under 5 a quantile has no limits, however often each"
        " is sent: give the route more prompts"
    )


def test_a_row_takes_prompts_as_clusters(rng):
    """Acceptance, lengths and times of a cohort whose prompts come again, by hand."""
    receipts = again(rng, 8, 10)
    (row,) = rows(receipts, rng).rows
    mine = [r for r in receipts if r.arm == "speculative"]
    accepted = np.array([sum(r.accepted_tokens for r in mine[i::8]) for i in range(8)])
    rate = accepted.sum() / 8000
    error = math.sqrt(8 / 7 * ((accepted - rate * 1000) ** 2).sum()) / 8000
    reach = sp.t.isf(0.05, 7) * error
    assert (row.acceptance.value, row.acceptance.n) == (pytest.approx(rate), 80)
    assert row.acceptance.low == pytest.approx(rate - reach)
    assert row.acceptance.high == pytest.approx(rate + reach)
    assert row.mean_acceptance_length.low == pytest.approx(1 + 4 * (rate - reach))
    logs = np.log([s.e2e_s / t.e2e_s for t, s in zip(receipts[::2], receipts[1::2], strict=True)])
    means = np.array([logs[i::8].mean() for i in range(8)])
    reach = sp.t.isf(0.05, 7) * means.std(ddof=1) / math.sqrt(8)
    assert row.e2e_ratio.low == pytest.approx(math.exp(means.mean() - reach))
    assert row.e2e_ratio.high == pytest.approx(math.exp(means.mean() + reach))


def test_a_canary_row_takes_prompts_as_clusters(rng):
    """Two prompts, of which one is slow on the speculative arm, are two cases and not 160."""
    receipts = [
        replace(r, prompt_id=f"p{i}")
        for i, ms in enumerate((5.0, 18.0))
        for r in canary(rng, 80, share=0.5, first=80 * i, speculative_ms=ms)
    ]
    (row,) = rows(receipts, rng).rows
    assert row.verdict == "inconclusive"
    assert "clustered by 2 prompts" in row.e2e_ratio.method
    by_prompt = [
        np.mean([math.log(r.e2e_s) for r in receipts if (r.arm, r.prompt_id) == key])
        for key in itertools.product(("target_only", "speculative"), ("p0", "p1"))
    ]
    change = np.array(by_prompt[2:]) - by_prompt[:2]
    reach = sp.t.isf(0.05, 1) * change.std(ddof=1) / math.sqrt(2)
    assert row.e2e_ratio.value == pytest.approx(math.exp(change.mean()))
    assert row.e2e_ratio.high == pytest.approx(math.exp(change.mean() + reach))


def test_the_tail_of_a_row_is_that_of_the_rules(rng):
    """Under 100 pairs p95 is not resampled, and outputs under 32 tokens are in no tail."""
    receipts = pairs(rng, 80, target_ms=10, speculative_ms=20)
    (row,) = rows(receipts, rng).rows
    tail = next(c for c in row.latency if (c.metric, c.quantile) == ("tpot", "p95"))
    sides = ([r.tpot_s for r in receipts[at::2]] for at in (0, 1))
    assert tail.ratio == stats.order_statistic_ratio(*sides, 0.95, alpha=0.05)
    short = pairs(rng, 300, target_ms=10, speculative_ms=20, completion_tokens=8)
    (row,) = rows(short, rng).rows
    assert {c.quantile for c in row.latency if c.metric == "tpot"} == {"p50"}
    assert "TPOT" not in row.why


@pytest.mark.parametrize(("n", "shown"), [(71, False), (72, True)])
def test_a_tail_is_shown_where_its_limits_exist(rng, n, shown):
    """Two arms' order statistics at half the level each need 72 values: before, none is said."""
    (row,) = rows(pairs(rng, n, stage="replay"), rng).rows
    tails = [c.ratio for c in row.latency if c.quantile == "p95"]
    assert bool(tails) is shown
    assert all(math.isfinite(ratio.high) and ratio.low > 0 for ratio in tails)


def test_a_failed_request_stays_in_the_cohort_of_its_pair(rng):
    """It counts no prompt tokens; its row is that of its pair, and the arms' mix is no other."""
    lost = {"outcome": "error", "error_class": "timeout", "prompt_tokens": None}
    receipts = [
        r
        for i in range(120)
        for r in pair(i, target={}, speculative=lost if i % 3 == 0 else {"tpot_ms": 10.0})
    ]
    found = rows(receipts, rng)
    (row,) = found.rows
    assert (row.n_pairs, row.unpaired, row.errors_speculative) == (80, 0, 40)
    assert found.warnings == ()
