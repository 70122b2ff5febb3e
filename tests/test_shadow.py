"""The plan of the mirror: blocks, their A/A control, and what is sent in all."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from attached_pair import attached_pair
from rule_receipts import receipt

from speccheck import context, measure, shadow
from speccheck.console import Reporter
from speccheck.records import Arm, Stage, receipt_key
from speccheck.store import Store

LOOSE = {"lag_floor_s": 60, "loop_stall_s": 60, "loop_stall_share": 1}
"""Limits that any client keeps: these tests are about something else than its lateness."""
SHADOW = {"requests_per_route": 60, "rate_per_s": 20, "blocks": 8, "protected_rate_per_s": 5}


@pytest.fixture
def planned(tmp_path):
    """A run with one route and protected traffic, its plan of the mirror, and the rollout."""
    with (
        attached_pair(tmp_path, shadow=SHADOW, prompts=20, protected=5) as pair,
        context.open_run(pair.rollout, tmp_path / "run", Reporter(), fresh=False) as run,
    ):
        yield run, shadow.plan_mirror(run, run.rollout.routes), run.rollout


def blocks_of(plan):
    blocks = defaultdict(list)
    for request in plan:
        blocks[request.block].append(request)
    return blocks


def test_each_request_has_a_key_of_its_own(planned):
    """No key twice, or a receipt would be lost; about as many requests as were announced."""
    run, plan, rollout = planned
    assert len({receipt_key(request, run.run_id) for request in plan}) == len(plan)
    announced = sum(shadow.planned_counts(rollout, run.protected_prompts()))
    assert len(plan) == pytest.approx(announced, rel=0.15)


def test_blocks_without_the_mirror_are_an_a_a_control(planned):
    """In each four blocks those without the mirror send the same at the same offsets, twice."""
    _, plan, _ = planned
    blocks = blocks_of(plan)
    for four in (range(4), range(4, 8)):
        alone = [b for b in four if not any(r.mirror for r in blocks[b])]
        assert len(alone) == 2
        first, second = (
            {
                (r.pair_id, r.prompt.prompt_id, r.offset_s)
                for r in blocks[b]
                if r.prompt.priority != "protected"
            }
            for b in alone
        )
        assert first
        assert first == second
        assert all(r.arm is Arm.TARGET_ONLY for b in alone for r in blocks[b])
    twice = Counter(r.pair_id for r in plan if r.pair_id.startswith(shadow.A_A))
    assert set(twice.values()) == {2}


def test_protected_traffic_is_no_part_of_the_control(planned):
    """It arrives once, in all blocks, under pair ids of its own."""
    _, plan, _ = planned
    protected = [r for r in plan if r.prompt.priority == "protected"]
    assert {r.block for r in protected} > {0}
    assert not [r for r in protected if r.pair_id.startswith(shadow.A_A)]


def test_each_block_starts_with_a_cold_prefix_cache(planned):
    """A salt per block and arm: what one block sent is not found warm by the next."""
    _, plan, _ = planned
    salts = defaultdict(set)
    for request in plan:
        salts[request.block, request.arm].add(request.cache_salt)
    assert all(len(found) == 1 for found in salts.values())
    assert len(set.union(*salts.values())) == len(salts)


def test_blocks_that_are_short_against_a_request_are_noted(planned):
    """Three times the longest request, or a note with both numbers."""
    run, _, _ = planned
    # 60 requests at 20/s are 3 s with the mirror, in 4 blocks: 0.75 s each.
    receipts = [receipt(0, "target_only", ttft_ms=100, tpot_ms=1, completion_tokens=100)]
    assert shadow.block_notes(run, receipts) == []
    receipts = [receipt(0, "target_only", ttft_ms=100, tpot_ms=2, completion_tokens=101)]
    (note,) = shadow.block_notes(run, receipts)
    assert "lasts 0.75 s, under three times the longest request (0.3 s)" in note


def test_the_stage_keeps_the_floor(tmp_path):
    """What target-only shows against itself is in the evidence, and in what findings say."""
    settings = SHADOW | {"requests_per_route": 120, "rate_per_s": 300}
    with attached_pair(tmp_path, shadow=settings, client_limits=LOOSE) as pair:
        ended = pair.run(Stage.SHADOW)
    with Store.read(tmp_path / "run" / context.STORE_NAME) as store:
        kept = store.get_stage(ended.run_id, Stage.SHADOW)
        pairs = measure.a_a_pairs(store.receipts(ended.run_id, stage=Stage.SHADOW))
    assert kept is not None
    floor = kept.evidence["evidence"]["noise_floor"]
    assert floor["pairs"] == len(pairs) > 20
    assert floor["ratios"]["ttft_p50_ratio"]["n"] == len(pairs)
    (why,) = [f.why for d in ended.decisions for f in d.findings if f.rule == "min_speedup"]
    assert "noise floor" in why


@pytest.mark.parametrize(("warm_up", "notes"), [(3, 1), (30, 0)])
def test_a_short_warm_up_is_said_in_the_packet(tmp_path, warm_up, notes):
    """Step times settle late (STATS 5.5): fewer than 30 requests per arm are not passed over."""
    with attached_pair(tmp_path, client_limits=LOOSE, warm_up=warm_up) as pair:
        told = pair.run(Stage.SHADOW).to_dict()["stages"]["shadow"]["notes"]
    assert sum(f"warmed up with {warm_up} requests per arm" in note for note in told) == notes
