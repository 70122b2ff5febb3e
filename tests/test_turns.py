"""Later turns: keyed on their own, sent with the answers before them, left out without those."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck import plan, turns
from speccheck.records import Arm, Prompt, Sampler, Stage


def prompt(number: int, follow_up: tuple[str, ...] = (), **fields) -> Prompt:
    first = ({"role": "user", "content": f"q{number}"},)
    return Prompt(f"p{number}", "t", "r", first, 9, {"kind": "none"}, follow_up=follow_up, **fields)


def test_each_later_turn_is_a_prompt_with_its_own_check():
    """Ids, checks and the cluster of a conversation; second turns come before third ones."""
    checks = ({"kind": "match", "answers": ["a"]}, {"kind": "number", "answer": 1})
    talks = [prompt(0, ("b", "c"), follow_checks=checks), prompt(1, ("d",), group="doc"), prompt(2)]
    later = turns.later_turns(talks)
    assert [t.prompt.prompt_id for t in later] == ["p0#2", "p1#2", "p0#3"]
    assert [t.prompt.check["kind"] for t in later] == ["match", "none", "number"]
    assert [t.prompt.group for t in later] == ["p0", "doc", "p0"]
    assert all(t.prompt.follow_up == () for t in later)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    missing=st.sets(st.tuples(st.sampled_from(list(Arm)), st.integers(0, 4), st.integers(1, 3))),
)
def test_a_turn_goes_out_with_all_its_history_or_not_at_all(lengths, missing):
    """Messages alternate and hold this arm's answers in order; a gap drops the turn, no other."""
    talks = [prompt(i, tuple(f"u{i}.{n}" for n in range(k))) for i, k in enumerate(lengths)]
    said = {
        (arm, "greedy", turns.turn_id(talk, n), 0): f"{arm} {i} {n}"
        for i, talk in enumerate(talks)
        for n in range(1, len(talk.follow_up) + 1)
        for arm in Arm
        if (arm, i, n) not in missing
    }
    phase = plan.Phase("run", Stage.REPLAY, "greedy", Sampler())
    later = turns.later_turns(talks)
    planned = plan.closed_loop(
        phase, [*talks, *(t.prompt for t in later)], rng=np.random.default_rng(0)
    )
    sent = {
        (r.arm, r.prompt.prompt_id): r.prompt for r in turns.own_histories(planned, later, said)
    }
    for i, talk in enumerate(talks):
        for arm in Arm:
            assert sent[arm, talk.prompt_id].messages == talk.messages
            for n in range(2, len(talk.follow_up) + 2):
                whole = all((arm, i, before) not in missing for before in range(1, n))
                found = sent.get((arm, f"p{i}#{n}"))
                assert (found is not None) == whole
                if found is not None:
                    answers = [f"{arm} {i} {before}" for before in range(1, n)]
                    users = [f"q{i}", *talk.follow_up[: n - 1]]
                    contents = [m["content"] for m in found.messages]
                    assert contents[0::2] == users
                    assert contents[1::2] == answers


def test_a_rerun_asks_again_with_the_history_of_the_first_run():
    """Whether the turn goes wrong again is the question, not what would have been said before."""
    talk = prompt(0, ("then",))
    said = {(Arm.SPECULATIVE, "sampled", "p0", 0): "first run"}
    later = turns.later_turns([talk])
    phase = plan.Phase("run", Stage.REPLAY, "sampled-confirm", Sampler(temperature=0.7))
    planned = plan.closed_loop(
        phase, [later[0].prompt], rng=np.random.default_rng(0), first_repeat=3
    )
    (sent,) = turns.own_histories(planned, later, said)
    assert (sent.arm, sent.repeat, sent.pair_id) == (Arm.SPECULATIVE, 3, "sampled-confirm:p0#2:3")
    assert [m["content"] for m in sent.prompt.messages] == ["q0", "first run", "then"]
    assert turns.own_histories([replace(planned[0], phase="sampled")], later, {}) == []
