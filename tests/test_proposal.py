"""From a matrix to a policy: what is proposed is what was measured, each rule with its figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_receipts import pair, pairs
from test_matrix import sweep

from speccheck import proposal
from speccheck.eligibility import Eligibility, Facts, decide
from speccheck.errors import UsageError
from speccheck.matrix import KResult, Matrix, MatrixRow, workload_matrix
from speccheck.records import Estimate, Finding, Verdict


@pytest.fixture
def rng():
    return np.random.default_rng(21)


def proposed(receipts, rng, findings=(), *, k=8, old=None, quality=None, pays_below=None):
    found = workload_matrix(receipts, rng=rng, quality=quality)
    routes = sorted({r.route for r in receipts} - {"mixed"})
    return proposal.propose(
        found,
        findings,
        run_id="run:1",
        routes=routes,
        usable_k=lambda x: x <= k,
        pays_below=pays_below,
        old=old,
    )


def policy_of(made) -> Eligibility:
    return proposal.as_policy(proposal.merged_text(None, made))


def facts(**known):
    usual = {
        "route": "chat",
        "task": "json",
        "language": "en",
        "priority": "normal",
        "prompt_tokens": 100,
        "output_band": "medium",
        "max_tokens": 64,
        "temperature": 0.0,
        "features": frozenset(),
        "concurrency": 1,
    }
    return Facts(**usual | known)


def fail(rule, cohort, stage="replay", **fields):
    return Finding(rule, Verdict.FAIL, "chat", cohort, stage, None, 0.0, "count", "3 > 0", **fields)


# --- what pays, and up to where -----------------------------------------------------------------


def test_a_crossover_becomes_a_bound_on_concurrency(rng):
    """T10: speculate up to the last load that pays; target-only from the first that does not."""
    receipts = []
    for j, (load, b, s) in enumerate(
        ((1, 14.1, 8.9), (16, 18.8, 16.0), (32, 22.4, 23.1), (64, 30.6, 39.5))
    ):
        receipts += pairs(
            rng,
            100,
            target_ms=b,
            speculative_ms=s,
            acceptance=0.58,
            concurrency=load,
            stage="replay",
            phase=f"load-{load}",
            first=100 * j,
            task="json",
        )
    policy = policy_of(proposed(receipts, rng))
    assert [decide(policy, facts(concurrency=c)).speculates for c in (1, 16, 17, 32, 64)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert "requests take" in decide(policy, facts(concurrency=64)).reason
    assert decide(policy, facts(concurrency=None)).use == "target_only"


def test_the_proposal_length_may_change_with_the_load(rng):
    """A sweep that finds k 5 best at 1 and k 2 best at 8 gives two rules."""
    receipts = sweep(rng, load=1, by_k=((2, 14.0), (5, 8.0)))
    receipts += sweep(rng, load=8, by_k=((2, 12.0), (5, 18.0)))
    receipts += sweep(rng, load=64, by_k=((2, 30.0), (5, 40.0)))
    policy = policy_of(proposed(receipts, rng))
    k = {c: decide(policy, facts(concurrency=c)).k for c in (1, 2, 8, 9, 64)}
    assert k == {1: 5, 2: 2, 8: 2, 9: None, 64: None}


def test_a_length_that_the_engine_cannot_be_asked_for_is_not_proposed(rng):
    """The next best that surely gets faster is, and a note says what was better."""
    made = proposed(sweep(rng, load=1, by_k=((2, 14.0), (5, 8.0))), rng, k=2)
    assert decide(policy_of(made), facts()).k == 2
    assert any("k 5 was best" in note for note in made.notes)


def test_the_next_best_length_has_to_pay_too(rng):
    """A ratio of 14/20 is faster, and no speed-up of 2."""
    receipts = sweep(rng, load=1, by_k=((2, 14.0), (5, 8.0)))
    made = proposed(receipts, rng, k=2, pays_below={"chat": 0.5})
    assert not decide(policy_of(made), facts()).speculates


def test_nothing_is_claimed_beyond_what_was_measured(rng):
    """Other tasks, longer prompts, warmer requests, other features: target-only."""
    receipts = pairs(rng, 60, task="json") + pairs(rng, 60, first=60, task="sql", speculative_ms=30)
    policy = policy_of(proposed(receipts, rng))
    assert decide(policy, facts()).speculates
    for other in (
        {"task": "sql"},
        {"task": "prose"},
        {"prompt_tokens": 5000},
        {"temperature": 0.5},
        {"features": frozenset({"min_p"})},
        {"route": "other"},
        {"task": None},
    ):
        assert not decide(policy, facts(**other)).speculates, other


def test_what_all_requests_of_a_route_share_is_no_condition(rng):
    """Where every task pays, a caller need not say its task; numbers stay bounded."""
    receipts = pairs(rng, 60, task="json") + pairs(rng, 60, first=60, task="sql")
    policy = policy_of(proposed(receipts, rng))
    (yes,) = [rule for rule in policy.rules if rule.use == "speculate"]
    assert set(yes.when.conditions) == {
        "route",
        "prompt_tokens",
        "temperature",
        "features",
        "concurrency",
    }
    assert decide(policy, facts(task=None, language=None, output_band=None)).speculates


def test_bands_with_a_gap_between_do_not_merge(rng):
    """Prompts under 64 and of 1,024 tokens pay; of those between nothing is known."""
    receipts = pairs(rng, 60, prompt_tokens=20) + pairs(rng, 60, first=60, prompt_tokens=2000)
    receipts += pairs(rng, 60, first=120, prompt_tokens=300, speculative_ms=30)
    policy = policy_of(proposed(receipts, rng))
    said = [
        decide(policy, facts(task="chat", prompt_tokens=n)).speculates for n in (20, 100, 300, 2000)
    ]
    assert said == [True, False, False, True]


def test_live_traffic_that_lost_overrules_a_loop_that_won(rng):
    """The same cohort pays in replay and not in shadow: target-only."""
    receipts = pairs(rng, 60, stage="replay", task="json")
    receipts += pairs(rng, 60, first=60, speculative_ms=30, task="json")
    choice = decide(policy_of(proposed(receipts, rng)), facts())
    assert not choice.speculates
    assert "times as long" in choice.reason


def test_mixed_traffic_of_a_sweep_proposes_nothing(rng):
    """It is no route of the rollout."""
    receipts = sweep(rng) + [replace(r, route="mixed") for r in sweep(rng, task="short")]
    policy = policy_of(proposed(receipts, rng))
    assert {route for rule in policy.rules for route in rule.when.route} == {"chat"}


# --- what failed --------------------------------------------------------------------------------


def test_a_refused_option_stays_on_target(rng):
    """T13: a rule for the parameter, with the server's words above it."""
    refused = {
        "outcome": "rejected",
        "error_class": "unsupported_parameter",
        "error_message": "min_p is not\nsupported",
    }
    receipts = pairs(rng, 60, task="json")
    for i in range(100, 120):
        receipts += pair(i, target={}, speculative=refused, min_p=0.05, features="min_p")
    made = proposed(receipts, rng, [fail("max_unsupported_requests", "")])
    choice = decide(policy_of(made), facts(features=frozenset({"min_p"})))
    assert choice.reason == "the speculative server refuses 20 of 80 requests for it"
    assert "min_p is not supported" in proposal.block(made)
    assert decide(policy_of(made), facts()).speculates


@pytest.mark.parametrize(
    ("cohort", "off", "on"),
    [
        ("temperature 0.7", {"temperature": 0.7}, {}),
        ("temperature mid", {"temperature": 0.7}, {}),
        ("temperature > 0", {"temperature": 0.1}, {}),
        ("features stop", {"features": frozenset({"stop"})}, {}),
        ("temperature 0.7, sql", {"temperature": 0.7, "task": "sql"}, {}),
        ("prompt >=4096", {"prompt_tokens": 5000}, {}),
        ("concurrency 64", {"concurrency": 64}, {}),
    ],
)
def test_a_slice_that_failed_stays_on_target(rng, cohort, off, on):
    """Its rule names what failed; what did not fail may speculate."""
    receipts = pairs(rng, 60, task="json") + pairs(rng, 60, first=60, task="sql")
    made = proposed(receipts, rng, [fail("max_lossless_violations", cohort)])
    choice = decide(policy_of(made), facts(**off))
    assert (choice.use, choice.reason) == (
        "target_only",
        "max_lossless_violations failed in replay",
    )
    assert decide(policy_of(made), facts(**on)).speculates


def test_a_route_that_is_wrong_everywhere_stays_on_target(rng):
    """A correctness rule that fails on the whole route and in no slice overrules all speed."""
    made = proposed(pairs(rng, 60), rng, [fail("max_lossless_violations", "")])
    (rule,) = policy_of(made).rules
    assert (rule.use, set(rule.when.conditions)) == ("target_only", {"route"})


def test_a_slice_that_explains_a_failure_keeps_the_rest(rng):
    """The whole route fails since its sampled half does: only that half is kept off."""
    found = [
        fail("max_quality_regression_cases", ""),
        fail("max_quality_regression_cases", "temperature 0.7"),
    ]
    assert decide(policy_of(proposed(pairs(rng, 60), rng, found)), facts(task="chat")).speculates


def test_a_speed_rule_that_fails_on_the_whole_route_is_noted(rng):
    """The matrix says where it pays; that it may fail again is said."""
    made = proposed(pairs(rng, 60), rng, [fail("min_acceptance_rate", "", "shadow")])
    assert decide(policy_of(made), facts(task="chat")).speculates
    assert "min_acceptance_rate failed on the whole route in shadow" in made.notes[0]


def test_what_still_fails_behind_the_policy_stays_kept_off(rng):
    """A second proposal keeps the rule of the first while what it keeps off still fails."""
    first = policy_of(
        proposed(pairs(rng, 60), rng, [fail("max_lossless_violations", "temperature 0.7")])
    )
    again = [fail("max_lossless_violations", "kept off by policy", counted=False)]
    second = policy_of(proposed(pairs(rng, 60), rng, again, old=first))
    assert not decide(second, facts(task="chat", temperature=0.7)).speculates
    assert "failed in replay" in decide(second, facts(task="chat", temperature=0.7)).reason
    mended = policy_of(proposed(pairs(rng, 60), rng, [], old=first))
    assert [rule.name for rule in mended.rules if "failed" in rule.name] == []


def test_quality_that_got_worse_is_kept_off_at_any_load(rng):
    """A regression in a loop of eight is no matter of load."""
    receipts = pairs(rng, 60, stage="replay", concurrency=8, task="sql")
    receipts += pairs(rng, 60, stage="replay", concurrency=1, first=60, task="sql", phase="slow")
    made = proposed(receipts, rng, quality={"greedy": {"p1": "regression"}})
    assert not decide(policy_of(made), facts(task="sql")).speculates


def few_at_two_temperatures(rng):
    """A replay of few prompts, whose cohorts pool both temperatures, and what failed in it."""
    receipts = pairs(rng, 12, stage="replay", task="json", phase="greedy")
    warm = {"temperature": 0.7, "temperature_band": "mid", "phase": "sampled"}
    receipts += pairs(rng, 12, stage="replay", task="json", **warm)
    quality = {"sampled": {f"p{i}": "regression" for i in range(8)}}
    return receipts, quality


@pytest.mark.parametrize("cohort", ["temperature 0.7", "temperature > 0"])
def test_a_failed_temperature_leaves_the_other_to_the_next_run(rng, cohort):
    """Replay alone ran, its sampled half failed: the greedy half is left for the next run's shadow
    and canary to decide, not kept off for what its neighbours did.
    """
    receipts, quality = few_at_two_temperatures(rng)
    found = [fail("max_quality_regression_cases", c) for c in ("", cohort, f"{cohort}, json")]
    made = proposed(receipts, rng, found, quality=quality)
    policy = policy_of(made)
    assert not decide(policy, facts(temperature=0.7)).speculates
    assert decide(policy, facts(temperature=0.0)).speculates
    assert [r.use for r in policy.rules] == ["target_only", "speculate"]
    again = policy_of(proposed(receipts, rng, found, quality=quality, old=policy))
    assert decide(again, facts(temperature=0.0)).speculates


def test_a_persons_own_rules_say_what_becomes_of_the_rest(rng):
    """Where a policy was there already, what failed is kept off above it and nothing is added."""
    receipts, quality = few_at_two_temperatures(rng)
    own = Eligibility.model_validate(
        {"rules": [{"name": "mine", "use": "target_only", "reason": "not yet"}]}
    )
    found = [fail("max_quality_regression_cases", "temperature 0.7")]
    made = proposed(receipts, rng, found, quality=quality, old=own)
    assert {rule.use for rule in made.rules} == {"target_only"}


def test_regressions_that_no_slice_explains_keep_their_row_off(rng):
    """The slice that failed is another one: the row's own regressions count against it."""
    receipts, quality = few_at_two_temperatures(rng)
    made = proposed(receipts, rng, [fail("max_output_drift", "prompt >=4096")], quality=quality)
    assert not decide(policy_of(made), facts(temperature=0.0)).speculates


# --- any matrix ---------------------------------------------------------------------------------

PROMPT = {"<64": 20, "64-255": 100, "256-1023": 500}
HEAT = {"greedy": 0.0, "mid": 0.7, "high": 1.3}


def row(task, prompt, heat, stage, in_flight, verdict) -> MatrixRow:
    ratio = Estimate(0.8, 0.7, 0.9, 40, "by hand", 0.05)
    values = {
        "route": "chat",
        "stage": stage,
        "concurrency": str(in_flight if stage != "shadow" else 64),
        "task": task,
        "priority": "normal",
        "temperature_band": heat,
        "prompt_band": prompt,
        "output_band": "medium",
        "features": "",
        "language": "en",
    }
    return MatrixRow(
        cohort=values,
        name=f"{task} {prompt} {heat} {stage} {in_flight}",
        pooled=(),
        n_target=40,
        n_speculative=40,
        n_pairs=40,
        n_prompts=40,
        unpaired=0,
        k=4,
        by_k=(KResult(4, 40, ratio, None, None),),
        drafted=1,
        accepted=1,
        acceptance=None,
        mean_acceptance_length=None,
        draft_coverage=None,
        saved_modelled=None,
        saved_measured=None,
        saved_note="",
        latency=(),
        e2e_ratio=ratio,
        errors_target=0,
        errors_speculative=0,
        refused=0,
        quality_cases=0,
        quality_regressions=0,
        quality_improvements=0,
        verdict=verdict,
        why="measured",
        observed={name: (value,) for name, value in values.items()},
        spans={"temperature": (HEAT[heat],) * 2, "prompt_tokens": (PROMPT[prompt],) * 2},
        in_flight=in_flight,
    )


matrices = st.lists(
    st.builds(
        row,
        st.sampled_from(["json", "sql"]),
        st.sampled_from(sorted(PROMPT)),
        st.sampled_from(sorted(HEAT)),
        st.sampled_from(["replay", "shadow", "sweep"]),
        st.sampled_from([1, 4, 16]),
        st.sampled_from(["speculate", "speculate", "target_only", "inconclusive"]),
    ),
    min_size=1,
    max_size=10,
)


def facts_of_row(one: MatrixRow, concurrency: int) -> Facts:
    return facts(
        task=one.cohort["task"],
        prompt_tokens=PROMPT[one.cohort["prompt_band"]],
        temperature=HEAT[one.cohort["temperature_band"]],
        concurrency=concurrency,
    )


@settings(max_examples=50, deadline=None)
@given(matrices)
def test_no_proposal_goes_beyond_its_matrix(found: list[MatrixRow]) -> None:
    """What lost stays off where it lost; what may speculate was measured to pay at that load or
    more, in just that cohort; and the text is a policy.
    """
    made = proposal.propose(
        Matrix(tuple(found), ()), (), run_id="r", routes=["chat"], usable_k=bool
    )
    policy = policy_of(made)
    for one in found:
        if one.verdict == "target_only":
            assert not decide(policy, facts_of_row(one, one.in_flight)).speculates
    for task in sorted({one.cohort["task"] for one in found}):
        for prompt, tokens in PROMPT.items():
            for heat, temperature in HEAT.items():
                for load in (1, 4, 5, 17):
                    asked = facts(
                        task=task, prompt_tokens=tokens, temperature=temperature, concurrency=load
                    )
                    if decide(policy, asked).speculates:
                        assert any(
                            (one.verdict, one.cohort["task"]) == ("speculate", task)
                            and one.cohort["prompt_band"] == prompt
                            and one.cohort["temperature_band"] == heat
                            and one.in_flight >= load
                            for one in found
                        ), (asked, policy)


# --- the text -----------------------------------------------------------------------------------


def test_every_rule_carries_its_figures(rng):
    """Above each rule stands what it rests on, with intervals; no line is too wide."""
    receipts = pairs(rng, 60, task="json") + pairs(rng, 60, first=60, task="sql", speculative_ms=30)
    text = proposal.block(proposed(receipts, rng))
    assert "#   chat, shadow" in text or "# chat, shadow" in text
    assert "with k 4 requests take" in text
    assert all(len(line) <= 100 for line in text.splitlines() if line.strip().startswith("#"))


HAND = """\
# ours
version: 1
rules:
  # never the board's mail
  - name: board
    when: {task: board}
    use: target_only
    reason: asked for by legal

  # as it always was
  - name: everything else
    use: speculate
"""


def test_rules_of_a_person_stay(rng):
    """The block goes in below leading target-only rules; a second one takes its place."""
    one = proposal.merged_text(HAND, proposed(pairs(rng, 60), rng))
    policy = proposal.as_policy(one)
    assert policy.rules[0].name == "board"
    assert policy.rules[-1].name == "everything else"
    assert one.index("# as it always was") > one.index(proposal.END)
    assert not decide(policy, facts(task="board")).speculates
    assert decide(policy, facts(route="other", task="x")).speculates
    slower = proposal.merged_text(one, proposed(pairs(rng, 60, speculative_ms=40), rng))
    assert slower.count(proposal.BEGIN) == 1
    assert not decide(proposal.as_policy(slower), facts(task="chat")).speculates
    removed = proposal.diff(one, slower, "eligibility.yaml")
    assert "-    use: speculate" in removed
    assert "board" not in removed


def test_the_same_proposal_changes_nothing(rng):
    """Merging it again gives the same bytes, and an empty diff."""
    made = proposed(pairs(rng, 60), rng)
    for old in (None, HAND, HAND.replace("  - ", "- ").replace("\n    ", "\n  ")):
        once = proposal.merged_text(old, made)
        assert proposal.merged_text(once, made) == once
        assert proposal.diff(once, once, "x") == ""
        proposal.as_policy(once)


@pytest.mark.parametrize(
    "text", ["version: 1\nrules: [{name: a, use: speculate}]\n", "rules: []\n"]
)
def test_a_file_that_cannot_be_merged_into_says_so(rng, text):
    """Flow style has no line to put rules before."""
    with pytest.raises(UsageError, match="rules"):
        proposal.merged_text(text, proposed(pairs(rng, 60), rng))


def test_words_that_yaml_takes_for_others_are_quoted(rng):
    """A task called `null` stays a task."""
    receipts = pairs(rng, 60, task="null") + pairs(
        rng, 60, first=60, task="x y: #", speculative_ms=30
    )
    policy = policy_of(proposed(receipts, rng))
    assert decide(policy, facts(task="null")).speculates
    assert not decide(policy, facts(task="x y: #")).speculates
