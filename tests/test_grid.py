"""What a sweep sends: orders that cancel drift, shares that are kept, families from a rollout."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from attached_pair import attached_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck import context
from speccheck.console import Reporter
from speccheck.errors import UsageError
from speccheck.records import Arm, receipt_key
from speccheck.sweep import grid
from speccheck.sweep.cells import MIXED, SEQUENTIAL


@given(st.integers(1, 8), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_linear_drift_cancels_over_two_rounds(n_arms, pair):
    """The mean place of every arm over a mirrored pair of rounds is the same."""
    first, second = grid.turn_order(n_arms, 2 * pair), grid.turn_order(n_arms, 2 * pair + 1)
    assert sorted(first) == sorted(second) == list(range(n_arms))
    assert {first.index(arm) + second.index(arm) for arm in range(n_arms)} == {n_arms - 1}


@given(st.integers(1, 8))
@settings(max_examples=8, deadline=None)
def test_every_arm_stands_everywhere(n_arms):
    """Over 2 n rounds each arm has each place twice: a place that is slow harms all alike."""
    places = Counter(
        (arm, place)
        for block in range(2 * n_arms)
        for place, arm in enumerate(grid.turn_order(n_arms, block))
    )
    assert set(places.values()) == {2}


def test_turns_without_mirror_would_keep_the_drift():
    """The check above can fail: one fixed order gives the last arm all of the drift."""
    drift = np.arange(8.0)
    fixed = [drift[[0, 4]].mean(), drift[[3, 7]].mean()]
    order = [grid.turn_order(4, block) for block in range(2)]
    mirrored = [
        np.mean([drift[4 * block + order[block].index(arm)] for block in range(2)])
        for arm in (0, 3)
    ]
    assert fixed[0] != fixed[1]
    assert mirrored[0] == mirrored[1]


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=4).map(
        lambda parts: [part / sum(parts) for part in parts]
    ),
    st.integers(0, 60),
)
@settings(max_examples=40, deadline=None)
def test_shares_are_kept_at_every_moment(shares, n):
    """After any number of requests no class is a whole request off its share by more than one."""
    slots = grid.class_slots(shares, n)
    for place in range(n + 1):
        for i, share in enumerate(shares):
            assert abs(slots[:place].count(i) - share * place) < 1 + 1e-6


def corpus(folder):
    """Short, code and prose prompts of one route, and a protected one that is left out."""
    lines = [
        {
            "id": f"{task}{i}",
            "task": task,
            "route": "chat",
            "messages": [{"role": "user", "content": f"question {i}"}],
            "max_tokens": 40,
            "output_band": band,
            "check": {"kind": "none"},
        }
        for task, band in (("qa", "short"), ("code", "long"), ("prose", "medium"))
        for i in range(5)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "corpus.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    """An open run over three tasks. Opening one asks no server."""
    with attached_pair(tmp_path, sweep={"concurrency": [1, 4, 6]}) as pair:
        corpus(tmp_path)
        with context.open_run(pair.rollout, tmp_path / "run", Reporter(), fresh=False) as opened:
            yield opened


def test_families_are_the_tasks_of_routes_and_mixed_traffic(run):
    """One family per task, then the mix, whose classes have no prompt in common."""
    found = grid.families(run, ())
    assert [(f.route, f.name) for f in found] == [
        ("chat", "code"),
        ("chat", "prose"),
        ("chat", "qa"),
        (MIXED, MIXED),
    ]
    mixed = found[-1]
    assert [(c.name, c.is_target_only) for c in mixed.classes] == [
        ("short", True),
        ("high_agreement", False),
        ("low_agreement", False),
    ]
    ids = [p.prompt_id for c in mixed.classes for p in c.prompts]
    assert len(ids) == len(set(ids)) == 15
    assert [f.name for f in grid.families(run, ["code"])] == ["code"]
    with pytest.raises(UsageError, match="no route has prompts of task sql"):
        grid.families(run, ["sql"])


def test_a_corpus_without_a_class_has_no_mixed_traffic(tmp_path):
    """The mix is left out, not made of what there is."""
    with (
        attached_pair(tmp_path) as pair,
        context.open_run(pair.rollout, tmp_path / "run", Reporter(), fresh=False) as opened,
    ):
        assert [f.name for f in grid.families(opened, ())] == ["qa"]


def test_turns_are_whole_waves_and_batches_are_full(run):
    """Calibration batches are waves of the batch size; turns have at least four requests."""
    loads = grid.planned_loads(run, grid.families(run, ["code"]), (1, 4, 6), rounds=None)
    assert [(load.family.stage, load.n) for load in loads] == [
        ("calibration", 4),
        ("calibration", 4),
        ("calibration", 6),
        ("sweep", 4),
        ("sweep", 4),
        ("sweep", 6),
    ]
    assert [load.wanted_rounds for load in loads] == [3, 3, 3, None, None, None]
    assert all(load.n % load.concurrency == 0 for load in loads)


def test_every_arm_gets_the_same_requests_of_every_class(run):
    """Mixed turns: same pairs on every arm, short requests with speculation off, new keys."""
    load = grid.planned_loads(run, grid.families(run, [MIXED]), (6,), rounds=None)[-1]
    keys = set()
    for block in range(5):
        target = grid.turn(run, load, "", Arm.TARGET_ONLY, block)
        spec = grid.turn(run, load, "-k3", Arm.SPECULATIVE, block)
        assert [r.pair_id for r in target] == [r.pair_id for r in spec]
        assert {r.phase for r in target} == {"mix-c6"}
        assert {r.phase for r in spec} == {"mix-c6-k3"}
        assert {r.decision for r in spec if r.prompt.task == "short"} == {"target_only"}
        assert {r.decision for r in spec if r.prompt.task != "short"} == {"speculate"}
        assert {r.decision_reason for r in spec} == {SEQUENTIAL}
        keys |= {receipt_key(r, run.run_id) for r in [*target, *spec]}
        assert [r.cache_salt for r in target] != [r.cache_salt for r in spec]
    assert len(keys) == 5 * 2 * 6
    tasks = Counter(
        r.prompt.task
        for block in range(5)
        for r in grid.turn(run, load, "", Arm.TARGET_ONLY, block)
    )
    assert tasks == {"short": 12, "high_agreement": 12, "low_agreement": 6}
