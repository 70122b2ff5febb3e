"""The adaptive proposal length: bounded, deterministic, explained, no matter to the law."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shortcuts import DropUnlikelyDraft
from test_engine_models import perturbed_model, random_model

from speccheck.config import package_dir
from speccheck.engine.adaptive import (
    FIRST_AGREEMENT,
    LOOKUP_COSTS,
    PROBE_EVERY,
    Adaptive,
    Agreement,
    LengthState,
    ProposalLengths,
    StepCosts,
)
from speccheck.engine.engine import Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings, SpeculativeSettings
from speccheck.errors import UsageError
from speccheck.law import Decoding, GreedyDraft, exact_law, target_law, total_variation
from speccheck.tables import load_table
from speccheck.verifier import Block, OneHot, Token

CHEAP = StepCosts()


def lengths(k_max=8, k_min=0, costs=CHEAP):
    return ProposalLengths(Adaptive(k_min, costs), k_max)


def chosen(found, states, *, limits=None, waiting=0):
    return found.choose(states, limits or [15] * len(states), waiting, [0] * len(states))[0]


def seen(accepted, drafted, *, by=None, rounds=40):
    """A sequence whose every round went so, perhaps the only one that a controller saw."""
    state = LengthState()
    for _ in range(rounds):
        (by or lengths()).observe(state, accepted, drafted)
    return state


# --- what is chosen -----------------------------------------------------------------------------


def tokens_per_time(ks, rates, costs):
    """Spelled out once more: expected tokens of a step over what it costs."""
    tokens = sum(sum(a**j for j in range(k + 1)) for k, a in zip(ks, rates, strict=True))
    n = len(ks)
    time = costs.step + costs.sequence * n + costs.token * sum(k + 1 for k in ks)
    time += costs.cell * n * (max(ks) + 1) + costs.draft_step * max(ks)
    return tokens / time


@settings(deadline=None)
@given(
    st.lists(st.floats(0.0, 0.99), min_size=1, max_size=3),
    st.floats(0.01, 0.5),
    st.floats(0.0, 0.5),
)
def test_the_lengths_are_the_best_of_all(rates, token, draft) -> None:
    """No other lengths of up to 4 give more expected tokens per time: by trying them all."""
    costs = StepCosts(token=token, draft_step=draft)
    found = lengths(4, costs=costs)._best(rates, 0)
    everything = [()]
    for _ in rates:
        everything = [(*ks, k) for ks in everything for k in range(5)]
    best = max(tokens_per_time(ks, rates, costs) for ks in everything)
    assert tokens_per_time(found, rates, costs) == pytest.approx(best, rel=1e-9)


def test_more_agreement_drafts_more() -> None:
    """From nothing to the bound, and never beyond."""
    found = []
    for accepted in range(9):
        controller = lengths()
        found += chosen(controller, [seen(accepted, 8, by=controller)])
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 8


def test_load_drafts_less() -> None:
    """With the same agreement: fewer tokens the more sequences decode, or wait."""
    alone = chosen(lengths(), [seen(3, 4)])[0]
    many = chosen(lengths(), [seen(3, 4) for _ in range(64)])[0]
    assert many < alone
    assert chosen(lengths(), [seen(3, 4)], waiting=40)[0] < alone


def test_each_sequence_has_its_own_length() -> None:
    """One that agrees drafts beside one that does not."""
    good, bad = chosen(lengths(), [seen(8, 8), seen(0, 8)])
    assert good > 3
    assert bad < 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20),
    st.lists(st.integers(0, 15), min_size=1, max_size=5),
    st.integers(0, 100),
    st.integers(0, 3),
    st.integers(3, 15),
)
def test_lengths_stay_within_their_bounds(rounds, limits, waiting, k_min, k_max) -> None:
    """Between k_min and k_max, and never more than the answer may still hold."""
    found = lengths(k_max, k_min)
    states = [LengthState() for _ in limits]
    for accepted, more in rounds:
        for state in states:
            found.observe(state, accepted, accepted + more)
    for k, limit in zip(chosen(found, states, limits=limits, waiting=waiting), limits, strict=True):
        assert min(k_min, limit) <= k <= min(max(k_max, k_min), limit)


def test_the_same_rounds_give_the_same_lengths() -> None:
    """Nothing but what was observed goes in."""

    def run():
        found, state, told = lengths(), LengthState(), []
        for i in range(60):
            (k,), (change,) = found.choose([state], [15], i % 7, [i])
            told.append((k, change))
            found.observe(state, min(k, i % 4), k)
        return told

    assert run() == run()


def test_a_sequence_that_gave_up_probes() -> None:
    """One token is drafted after so many rounds without, so that better times are noticed."""
    found = lengths()
    state, drafted = seen(0, 8, by=found), []
    for _ in range(3 * PROBE_EVERY + 5):
        k = chosen(found, [state])[0]
        drafted.append(k)
        found.observe(state, 0, k)
    assert sum(drafted) == 3
    assert set(drafted) == {0, 1}


def test_target_only_requests_do_not_draft() -> None:
    """A request with speculation off takes part as a cost only, and has nothing to explain."""
    found = lengths()
    ks, changes = found.choose([LengthState(), LengthState()], [0, 15], 0, [0, 0])
    assert ks[0] == 0 < ks[1]
    assert changes[0] is None


def test_untested_drafts_say_nothing() -> None:
    """Accepted 1 of 8: two were tested, and one of them held."""
    agreement = Agreement()
    agreement.observe(1, 8)
    assert (agreement.accepted, agreement.tested) == (1, 2)
    assert Agreement().rate(FIRST_AGREEMENT) == FIRST_AGREEMENT


def test_a_change_says_why() -> None:
    """Step, length, agreement and load, once for each change."""
    found, state = lengths(), LengthState()
    (first,), (change,) = found.choose([state], [15], 0, [1])
    assert change is not None
    assert change.reason == f"agreement 0.70, 1 decoding, 0 waiting: {first} drafts pay"
    assert found.choose([state], [15], 0, [2])[1] == [None]
    assert "40 waiting" in found.choose([state], [15], 40, [3])[1][0].reason


# --- the law ------------------------------------------------------------------------------------


class AdaptiveLength(Decoding):
    """The controller of the engine in the loop whose law can be summed up exactly.

    `memory` is the history of rounds as (accepted, drafted), replayed into a fresh controller: with
    costs under which history changes the length on the fixture's table.
    """

    costs = StepCosts(step=1.0, sequence=0.0, token=0.12, cell=0.0, draft_step=0.3)

    def length(self, state):
        history = state.memory or ()
        found, mine = ProposalLengths(Adaptive(0, self.costs), 3), LengthState()
        for accepted, drafted in history:
            found.observe(mine, accepted, drafted)
        limit = self.table.horizon - state.n - 1
        # The load changes too: as many wait as rounds were made.
        return found.choose([mine], [limit], len(history), [0])[0][0]

    def commit(self, state, drafted, tau, tail):
        tokens, after = super().commit(state, drafted, tau, tail)
        return tokens, after._replace(memory=(*(state.memory or ()), (tau, len(drafted))))


@pytest.fixture(scope="module")
def table():
    return load_table(package_dir("corpora") / "fixture_t4.json")


@pytest.mark.parametrize("verifier", [Token(), Block()], ids=["token", "block"])
def test_the_law_is_exactly_the_targets(table, verifier) -> None:
    """Equality of fractions over all sequences, while the lengths do vary with the past."""
    decoding = AdaptiveLength(table, verifier)
    law = exact_law(decoding)
    assert law.sequences == target_law(table)
    fixed = [exact_law(Decoding(table, verifier, proposal_length=k)).drafted for k in range(5)]
    assert law.drafted not in fixed, "the lengths did not vary"


def test_the_law_is_the_targets_with_drafts_without_chance(table) -> None:
    """The default of vLLM and of the engine."""
    decoding = AdaptiveLength(table, OneHot(), GreedyDraft())
    assert exact_law(decoding).sequences == target_law(table)


def test_a_length_that_looks_at_the_draft_is_caught(table) -> None:
    """W39: the same controller, its blocks cut where the drawn token is unlikely, bends the law."""
    law = exact_law(AdaptiveLength(table, DropUnlikelyDraft()))
    assert total_variation(law.sequences, target_law(table)) > 0.05


# --- settings -----------------------------------------------------------------------------------

CONFIG = {"method": "ngram", "num_speculative_tokens": 8}


def test_the_setting_comes_back_as_it_went_in() -> None:
    """True means the defaults; what is not adaptive says nothing of it."""
    on = SpeculativeSettings.parse(CONFIG | {"adaptive": True})
    assert on.adaptive == Adaptive(0, LOOKUP_COSTS)
    assert SpeculativeSettings.parse(on.as_config()) == on
    mine = {"min_speculative_tokens": 2, "costs": {"token": 0.1}}
    given = SpeculativeSettings.parse(CONFIG | {"adaptive": mine}).adaptive
    assert given == Adaptive(2, replace(LOOKUP_COSTS, token=0.1))
    for off in (False, None):
        assert "adaptive" not in SpeculativeSettings.parse(CONFIG | {"adaptive": off}).as_config()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("yes", "true, false or an object"),
        ({"min": 1}, "min_speculative_tokens"),
        ({"min_speculative_tokens": 9}, "min_speculative_tokens"),
        ({"costs": {"tokens": 1}}, "token"),
        ({"costs": {"token": -1}}, "from 0 up"),
        ({"costs": {"token": True}}, "from 0 up"),
        ({"costs": {"step": 0, "sequence": 0, "token": 0, "cell": 0}}, "cost something"),
        ({"costs": 3}, "object"),
    ],
)
def test_a_wrong_setting_is_named(value, words: str) -> None:
    """A typo must not quietly become a default."""
    with pytest.raises(UsageError, match=words):
        SpeculativeSettings.parse(CONFIG | {"adaptive": value})


# --- in the engine ------------------------------------------------------------------------------


def test_the_engine_says_what_was_chosen_and_why(tmp_path) -> None:
    """Greedy answers are target-only's; each change of length stands in the request's metrics."""
    target = random_model(tmp_path / "target", seed=3, vocab=24, layers=1, sharpness=1.6)
    draft = perturbed_model(target, tmp_path / "draft", seed=4, noise=0.4)
    spec = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 6}
    answers = []
    for config in (None, spec | {"adaptive": True}):
        raw = {"model": str(target), "speculative_config": config, "max_num_seqs": 2}
        engine = Engine(EngineSettings.parse(raw))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        requests = [Request(str(i), (3, 5, 7 + i), params) for i in range(4)]
        answers.append(engine.generate(requests))
    plain, adaptive = answers
    assert [a.token_ids for a in plain] == [a.token_ids for a in adaptive]
    assert sum(sum(a.stats.accepted_per_step) for a in adaptive) > 0
    told = [a.stats.as_metrics(6)["speculative_decoding"] for a in adaptive]
    for found in told:
        changes = found["proposal_length_changes"]
        assert changes[0]["step"] == 1
        assert max(found["per_step_drafted"]) <= max(change["k"] for change in changes)
        assert "decoding" in changes[0]["reason"]
    waited = [c["reason"] for found in told for c in found["proposal_length_changes"]]
    assert any(", 2 waiting" in reason for reason in waited), "four requests, two rows"
    fixed = plain[0].stats.as_metrics(None)
    assert fixed["speculative_decoding"] is None
