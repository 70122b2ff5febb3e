"""Plans are data: complete, interleaved, ordered, the same for the same seed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck import plan
from speccheck.errors import UsageError
from speccheck.records import SWEEP, Arm, Prompt, Sampler, Stage, receipt_key

B, S = Arm.TARGET_ONLY, Arm.SPECULATIVE


def prompts(n: int, **changes) -> list[Prompt]:
    base = Prompt("p", "qa", "chat", ({"role": "user", "content": "x"},), 32, {"kind": "none"})
    return [replace(base, prompt_id=f"p{i}", **changes) for i in range(n)]


def phase(**changes) -> plan.Phase:
    return replace(plan.Phase("run", Stage.REPLAY, "greedy", concurrency=4), **changes)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def keys(planned) -> list[str]:
    return [receipt_key(request, "run") for request in planned]


counts = st.integers(0, 20)
seeds = st.integers(0, 2**32)


def some_plan(kind: str, n: int, seed: int):
    """One plan of each kind over n prompts."""
    draws, some = rng(seed), prompts(n)
    offsets = plan.poisson_offsets(2 * n, 5.0, draws) if n else []
    make = {
        "closed_loop": lambda: plan.closed_loop(phase(), some, rng=draws, repeats=2),
        "open_loop": lambda: plan.open_loop(phase(), some, offsets, rng=draws),
        "a_a": lambda: plan.a_a(phase(name="aa"), some, "greedy", rng=draws),
        "mirror": lambda: plan.mirror(phase(), some, offsets, rng=draws),
        "canary": lambda: plan.canary(phase(), some, offsets, rng=draws, share=0.3, salt="s"),
        "warm_up": lambda: plan.warm_up(phase(), some, 2 * n),
    }
    return make[kind]()


KINDS = ["closed_loop", "open_loop", "a_a", "mirror", "canary", "warm_up"]


@pytest.mark.parametrize("kind", KINDS)
@given(n=counts, seed=seeds)
def test_the_same_seed_gives_the_same_plan_with_unique_keys(kind, n, seed):
    """A plan can be made again after a crash, and no two requests share a receipt."""
    planned = some_plan(kind, n, seed)
    assert planned == some_plan(kind, n, seed)
    assert len(set(keys(planned))) == len(planned)


@given(n=counts, seed=seeds, repeats=st.integers(1, 3))
def test_closed_loop_sends_every_prompt_to_every_arm(n, seed, repeats):
    """Complete, and interleaved: at any moment the arms are at most one request apart."""
    planned = plan.closed_loop(phase(), prompts(n), rng=rng(seed), repeats=repeats)
    got = Counter((r.arm, r.prompt.prompt_id, r.repeat) for r in planned)
    assert got == Counter(
        (arm, f"p{i}", repeat) for arm in (B, S) for i in range(n) for repeat in range(repeats)
    )
    ahead = np.cumsum([1 if r.arm is S else -1 for r in planned])
    assert np.all(np.abs(ahead) <= 1)
    for first, second in zip(planned[::2], planned[1::2], strict=True):
        assert first.pair_id == second.pair_id


def test_the_order_of_arms_is_drawn_per_prompt():
    """Neither arm is always the one that finds the machine warm."""
    planned = plan.closed_loop(phase(), prompts(200), rng=rng())
    first = Counter(request.arm for request in planned[::2])
    assert 60 < first[S] < 140


@given(n=counts, seed=seeds, rate=st.floats(0.01, 1e4))
def test_offsets_are_in_order(n, seed, rate):
    """Arrivals never go back in time and start after zero."""
    offsets = plan.poisson_offsets(n, rate, rng(seed))
    assert len(offsets) == n
    assert np.all(np.diff(offsets, prepend=0.0) >= 0)


def test_arrivals_are_a_poisson_process():
    """Counts per second have mean and variance of the rate (20 000 arrivals, five sigma)."""
    offsets = plan.poisson_offsets(20_000, 10.0, rng())
    per_second = np.histogram(offsets, bins=np.arange(0, 1900))[0]
    assert abs(per_second.mean() - 10) < 5 * np.sqrt(10 / 1899)
    assert abs(per_second.var() / 10 - 1) < 5 * np.sqrt(2 / 1899)


@given(n=st.integers(1, 20), arrivals=st.integers(0, 50), seed=seeds)
def test_open_loop_gives_both_arms_the_same_arrivals(n, arrivals, seed):
    """At each offset one prompt goes to both arms; prompts are used again with a new repeat."""
    offsets = plan.poisson_offsets(arrivals, 3.0, rng(seed))
    planned = plan.open_loop(phase(), prompts(n), offsets, rng=rng(seed))
    assert [r.offset_s for r in planned] == np.repeat(offsets, 2).tolist()
    by_arm = {arm: [(r.pair_id, r.offset_s) for r in planned if r.arm is arm] for arm in (B, S)}
    assert by_arm[B] == by_arm[S]
    used = Counter(r.prompt.prompt_id for r in planned if r.arm is B)
    assert max(used.values(), default=0) <= -(-arrivals // n)


def test_a_a_pairs_with_the_compared_phase():
    """The control's receipts carry the pair ids of the receipts they are compared with."""
    main = plan.closed_loop(phase(), prompts(5), rng=rng())
    control = plan.a_a(phase(name="aa", concurrency=9), prompts(5), "greedy", rng=rng(1))
    assert {r.arm for r in control} == {B}
    assert {(r.repeat, r.concurrency) for r in control} == {(1, 9)}
    assert {r.pair_id for r in control} == {r.pair_id for r in main}
    assert not set(keys(control)) & set(keys(main))


@given(n=st.integers(1, 12), size=st.integers(1, 20), blocks=st.integers(1, 5), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_turns_of_a_sweep_pair_up(n, size, blocks, seed):
    """Each arm of a block gets the same prompts; over blocks each prompt comes equally often."""
    arms = [(B, "c4"), (S, "c4-k1"), (S, "c4-k8")]
    planned = [
        plan.turn(
            phase(stage=SWEEP, name=name),
            arm,
            prompts(n),
            block=block,
            places=range(block * size, (block + 1) * size),
            control="c4",
            rng=rng(seed),
        )
        for block in range(blocks)
        for arm, name in arms
    ]
    for i in range(0, len(planned), 3):
        pairs = [[r.pair_id for r in turn] for turn in planned[i : i + 3]]
        assert pairs[0] == pairs[1] == pairs[2]
        assert {r.pair_id.split(":")[0] for r in planned[i]} == {"c4"}
        assert {r.block for turn in planned[i : i + 3] for r in turn} == {i // 3}
    everything = [r for turn in planned for r in turn]
    assert len(set(keys(everything))) == len(everything) == 3 * size * blocks
    often = Counter(r.prompt.prompt_id for turn in planned[::3] for r in turn)
    assert max(often.values()) - min(often.get(f"p{i}", 0) for i in range(n)) <= 1


def test_mirror_discards_the_speculative_copy():
    """The primary answer is target-only's; the copy arrives at the same moment, marked."""
    planned = plan.mirror(phase(), prompts(4), [0.0, 1.0], rng=rng())
    assert [(r.offset_s, r.mirror) for r in planned if r.arm is S] == [(0.0, True), (1.0, True)]
    assert [(r.offset_s, r.mirror) for r in planned if r.arm is B] == [(0.0, False), (1.0, False)]


def test_canary_says_why_a_request_is_where_it_is():
    """Each decision has its reason: in the share, or outside of it."""
    for share, arm, where in ((1.0, S, "in the canary share of 1"), (0.0, B, "outside the")):
        planned = plan.canary(phase(), prompts(3), np.arange(6.0), rng=rng(), share=share, salt="s")
        assert {(r.arm, r.repeat) for r in planned} == {(arm, 0), (arm, 1)}
        assert all(r.decision_reason.startswith(where) for r in planned)


def test_warm_up_stays_apart_from_what_is_measured():
    """Its keys, phase and caches differ; each arm gets as many as asked for."""
    warm = plan.warm_up(phase(), prompts(2), 5)
    main = plan.closed_loop(phase(), prompts(2), rng=rng())
    assert Counter(r.arm for r in warm) == {B: 5, S: 5}
    assert all(r.warm_up for r in warm)
    assert not set(keys(warm)) & set(keys(main))
    assert not {r.cache_salt for r in warm} & {r.cache_salt for r in main}


# --- canary share -------------------------------------------------------------------------------


@given(st.text(max_size=8), st.text(max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_a_share_is_sticky_and_monotone(key, salt, one, other):
    """Who is in at a small share stays in at a larger one."""
    low, high = sorted((one, other))
    assert plan.assign_share(key, salt, low) == plan.assign_share(key, salt, low)
    assert plan.assign_share(key, salt, low) <= plan.assign_share(key, salt, high)
    assert plan.assign_share(key, salt, 1.0)
    assert not plan.assign_share(key, salt, 0.0)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_share_is_what_it_says(share):
    """Of 20 000 keys the share is in, within five sigma; another salt picks others."""
    n = 20_000
    first = [plan.assign_share(f"user-{i}", "a", share) for i in range(n)]
    second = [plan.assign_share(f"user-{i}", "b", share) for i in range(n)]
    tolerance = 5 * np.sqrt(n * share * (1 - share))
    assert abs(sum(first) - n * share) < tolerance
    both = sum(x and y for x, y in zip(first, second, strict=True))
    assert abs(both - n * share**2) < 5 * np.sqrt(n * share**2)


@pytest.mark.parametrize("share", [-0.1, 1.1, 5, float("nan")])
def test_a_share_is_a_fraction(share):
    """5 for 5 % would mean everybody."""
    with pytest.raises(UsageError, match="give a number from 0 to 1"):
        plan.assign_share("k", "s", share)


# --- samplers, salts, limits --------------------------------------------------------------------


def test_seeds_differ_by_prompt_and_repeat_and_not_by_arm():
    """One seed for all would make every repeat the same draw; arms share theirs. 0 is a seed."""
    sampled = phase(sampler=Sampler(temperature=0.7, seed=0))
    planned = plan.closed_loop(sampled, prompts(3), rng=rng(), repeats=2)
    assert all(r.sampler.seed is not None and 0 <= r.sampler.seed < 2**31 for r in planned)
    by_pair = defaultdict(set)
    for request in planned:
        by_pair[request.pair_id].add(request.sampler.seed)
    assert all(len(seeds) == 1 for seeds in by_pair.values())
    assert len(set.union(*by_pair.values())) == 6
    unseeded = plan.closed_loop(phase(), prompts(1), rng=rng())
    assert [r.sampler.seed for r in unseeded] == [None, None]


def test_what_a_prompt_asks_for_joins_the_sampler():
    """Stops are joined without doubles, structured output is named."""
    some = prompts(1, stop=("a", "b"), response_format={"type": "json_object"})
    (request, _) = plan.closed_loop(phase(sampler=Sampler(stop=("b", "c"))), some, rng=rng())
    assert request.sampler.stop == ("b", "c", "a")
    assert request.sampler.response_format == "json_object"


def test_cache_salts_keep_arms_runs_and_phases_apart():
    """Within a phase an arm shares its cache; phases share one only where they say so."""
    planned = plan.closed_loop(phase(), prompts(3), rng=rng())
    assert len({r.cache_salt for r in planned}) == 2
    assert all(0 < len(r.cache_salt) <= 128 for r in planned)
    again = plan.closed_loop(phase(name="warm", cache="greedy"), prompts(3), rng=rng())
    other = plan.closed_loop(phase(name="load"), prompts(3), rng=rng())
    third = plan.closed_loop(phase(run_id="run-2"), prompts(3), rng=rng())
    salts = [{r.cache_salt for r in p} for p in (planned, again, other, third)]
    assert salts[0] == salts[1]
    assert not salts[0] & salts[2]
    assert not salts[0] & salts[3]


def test_priorities_and_lengths_come_from_the_phase():
    """No priority is sent unless the phase maps it; a fixed length overrides the prompt's."""
    some = prompts(1, priority="protected")
    plain, _ = plan.closed_loop(phase(), some, rng=rng())
    assert (plain.priority, plain.max_tokens, plain.ignore_eos) == (0, 32, False)
    fixed = phase(priorities={"protected": -1}, max_tokens=128, ignore_eos=True, keep_text=True)
    request, _ = plan.closed_loop(fixed, some, rng=rng())
    assert (request.priority, request.max_tokens, request.ignore_eos) == (-1, 128, True)
    assert request.keep_text


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(n=st.integers(0, 8), seed=seeds, data=st.data())
def test_remaining_and_done_are_the_whole_plan(kind, n, seed, data):
    """What is left is what has no receipt, in the plan's order and with the plan's distances."""
    planned = some_plan(kind, n, seed)
    done = {key for key in keys(planned) if data.draw(st.booleans())}
    left = plan.remaining(planned, "run", done)
    assert keys(left) == [key for key in keys(planned) if key not in done]
    original = {key: r.offset_s for key, r in zip(keys(planned), planned, strict=True)}
    shifts = defaultdict(set)
    for key, request in zip(keys(left), left, strict=True):
        if request.offset_s is not None:
            assert request.offset_s >= 0
            shift = original[key] - request.offset_s
            shifts[request.phase, request.block].add(round(shift, 6))
    assert all(len(found) == 1 for found in shifts.values())
    assert plan.remaining(planned, "run", set()) == planned


def test_a_rerouted_request_is_done_under_its_new_arm():
    """The receipt of a fallback has the other arm's key, and the request is not sent again."""
    planned = plan.canary(phase(), prompts(3), [0.0] * 3, rng=rng(), share=1.0, salt="s")
    moved = plan.reroute(planned[0], "acceptance fell")
    assert (moved.arm, moved.decision, moved.decision_reason) == (
        B,
        "fell_back",
        "acceptance fell",
    )
    assert plan.remaining(planned, "run", {receipt_key(moved, "run")}) == planned[1:]
    both = plan.closed_loop(phase(), prompts(1), rng=rng())
    target_only = next(r for r in both if r.arm is B)
    assert len(plan.remaining(both, "run", {receipt_key(target_only, "run")})) == 1


# --- bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_are_positive(rate):
    """Anything else has no arrivals."""
    with pytest.raises(UsageError, match="give a rate above 0"):
        plan.poisson_offsets(3, rate, rng())


@pytest.mark.parametrize("offsets", [[1.0, 0.5], [-1.0], [float("nan")], [float("inf")]])
def test_offsets_are_finite_and_in_order(offsets):
    """A trace that goes back in time is a mistake in the trace."""
    with pytest.raises(UsageError, match="finite, from 0 up, and in order"):
        plan.open_loop(phase(), prompts(2), offsets, rng=rng())


def test_plans_without_prompts():
    """Arrivals need prompts; nothing of nothing is an empty plan."""
    with pytest.raises(UsageError, match="no prompts for the planned arrivals"):
        plan.open_loop(phase(), [], [0.0], rng=rng())
    with pytest.raises(UsageError, match="no prompts to warm up with"):
        plan.warm_up(phase(), [], 1)
    assert plan.open_loop(phase(), [], [], rng=rng()) == []
    assert plan.closed_loop(phase(), [], rng=rng()) == []
