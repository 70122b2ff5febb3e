"""The scheduler of a sweep, on a clock of the test's own: what it never does, what comes first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck.sweep import budget
from speccheck.sweep.budget import FIRST_ROUNDS, Standing


@dataclass
class Fake:
    """A load that is decided once it has `decided_at` rounds, which nobody knows beforehand."""

    name: str
    round_s: float
    decided_at: int | None
    """None: its value sits on the limit, and no number of rounds decides it."""
    wanted: int | None = None
    rounds: int = 0
    void: int = 0
    looked: int = 0
    late: list[bool] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """At the last look."""
        return self.decided_at is None or self.looked < self.decided_at

    def standing(self) -> Standing:
        needed: tuple[int | None, ...] = ()
        if self.wanted is None and self.looked and self.is_open:
            more = None if self.decided_at is None else 4 * (self.decided_at - self.looked)
            needed = (more,)
        done = self.rounds + self.void
        return Standing(
            self.name,
            self.rounds,
            self.void,
            self.round_s if done else None,
            4,
            needed,
            self.wanted,
        )

    def run(self) -> None:
        if self.late and self.late.pop():
            self.void += 1
            return
        self.rounds += 1
        self.looked = budget.last_look(self.rounds)


fakes = st.lists(
    st.builds(
        Fake,
        st.just(""),
        st.floats(0.5, 20),
        st.one_of(st.none(), st.integers(2, 40)),
        st.one_of(st.none(), st.integers(2, 4)),
        late=st.lists(st.booleans(), max_size=4),
    ),
    min_size=1,
    max_size=6,
)


def play(loads: list[Fake], budget_s: float) -> list[tuple[str, float]]:
    """(load, time left when its round began) until the scheduler stops."""
    left_s, played = budget_s, []
    while True:
        name = budget.next_load([load.standing() for load in loads], left_s=left_s)
        if name is None:
            return played
        played.append((name, left_s))
        load = next(load for load in loads if load.name == name)
        load.run()
        left_s -= load.round_s
        assert len(played) < 5000


def named(loads: list[Fake]) -> list[Fake]:
    for i, load in enumerate(loads):
        load.name = f"load {i}"
    return loads


@given(fakes, st.floats(0.5, 120))
@settings(max_examples=120, deadline=None)
def test_time_is_kept_and_spent_where_verdicts_are_open(loads, budget_s):
    """No round without time for it; the small pass first; nothing for a load that is decided; and
    when it stops, every load that is open and alive is too long for the time that is left.
    """
    named(loads)
    played = play(loads, budget_s)
    seen = {load.name: 0 for load in loads}
    by_name = {load.name: load for load in loads}
    left_s = budget_s
    for name, began_with_s in played:
        load = by_name[name]
        assert began_with_s > 0
        if seen[name]:
            assert load.round_s <= began_with_s
        seen[name] += 1
        left_s = began_with_s - load.round_s
    for load in loads:
        assert load.void - load.rounds <= budget.MAX_VOID
        if load.wanted is not None:
            assert load.rounds <= load.wanted
        elif load.decided_at is not None:
            decided = max(FIRST_ROUNDS, 1 << math.ceil(math.log2(load.decided_at)))
            assert load.rounds <= decided, "rounds after its verdict"
        missing = FIRST_ROUNDS if load.wanted is None else load.wanted
        wants = load.rounds < missing or (load.wanted is None and load.is_open)
        if wants and load.void - load.rounds < budget.MAX_VOID:
            never_tried = load.rounds + load.void == 0
            assert left_s <= 0 if never_tried else load.round_s > left_s


@given(fakes, st.floats(0.5, 120))
@settings(max_examples=30, deadline=None)
def test_the_small_pass_comes_first_and_goes_round(loads, budget_s):
    """While a load lacks its first rounds, nobody gets a third and nobody is two ahead."""
    named(loads)
    for load in loads:
        load.late, load.round_s = [], 1.0
    counts = dict.fromkeys((load.name for load in loads), 0)
    for name, _ in play(loads, budget_s):
        if min(counts.values()) < FIRST_ROUNDS:
            assert counts[name] == min(counts.values())
        counts[name] += 1


@given(fakes, st.floats(0.5, 120))
@settings(max_examples=30, deadline=None)
def test_the_same_timings_give_the_same_order(loads, budget_s):
    """Nothing but its arguments goes in."""
    from copy import deepcopy

    named(loads)
    assert play(deepcopy(loads), budget_s) == play(deepcopy(loads), budget_s)


def standing(name, rounds=2, round_s=1.0, needed=(40,), **how):
    return Standing(name, rounds, 0, round_s, 4, tuple(needed), **how)


def test_what_is_settled_soonest_goes_first():
    """Few pairs missing before many, cheap rounds before dear ones, hopeless ones last."""
    far, near = standing("far", needed=(400,)), standing("near", needed=(8,))
    dear = standing("dear", round_s=30.0, needed=(8,))
    stuck = standing("stuck", needed=(None,))
    done = standing("done", needed=())
    everything = [stuck, far, dear, near, done]
    order = []
    while (name := budget.next_load(everything, left_s=100)) is not None:
        order.append(name)
        everything = [s for s in everything if s.name != name]
    assert order == ["near", "dear", "far", "stuck"]
    assert budget.next_load([done], left_s=100) is None


def test_a_load_is_not_left_between_two_looks():
    """Once begun, a load goes on to its next look: in between nothing can be decided."""
    begun = standing("begun", rounds=3, needed=(8,))
    other = standing("other", rounds=2, needed=(8,))
    assert budget.next_load([other, begun], left_s=100) == "begun"


def test_calibration_is_finished_before_cells_are_refined():
    """After the small pass its missing rounds come before those of open cells."""
    calibrating = standing("costs", needed=(), wanted_rounds=3)
    assert budget.next_load([standing("cell"), calibrating], left_s=100) == "costs"
    whole = standing("costs", rounds=3, needed=(), wanted_rounds=3)
    assert budget.next_load([standing("cell"), whole], left_s=100) == "cell"


def test_fixed_rounds_go_round_until_all_have_theirs():
    """Without a budget every load wants its rounds, and time has no end."""
    loads = [Fake(f"load {i}", 1.0, None, wanted=4) for i in range(3)]
    order = [name for name, _ in play(loads, math.inf)]
    assert order == ["load 0", "load 1", "load 2"] * 4


def test_a_load_whose_rounds_are_void_is_given_up():
    """Three rounds in which the client was late end it; the others go on."""
    lame = Fake("lame", 1.0, 2, late=[True] * 9)
    well = Fake("well", 1.0, 2)
    order = [name for name, _ in play([lame, well], 100)]
    assert order.count("lame") == budget.MAX_VOID
    assert order.count("well") == 2
