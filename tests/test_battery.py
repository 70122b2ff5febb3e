"""The battery on a pair whose law is known: right verifiers pass, wrong ones are caught.

The pair is a Markov chain: rows of target and draft depend on the token before. Answers are made by
the product's own verification (`verifier.verify`) and by wrong ones, so rounds are real; what the
battery is told is what servers would tell it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from shortcuts import AcceptUniformInResidual, FreshDrawAfterMismatch, TargetWithoutRejected

from speccheck import battery, decision, guardrails, stats
from speccheck import verifier as v
from speccheck.battery import KINDS, SLICE, Battery, Judged, Sampled, Scores
from speccheck.controls import ResampleFromTarget
from speccheck.guardrails import RuleLimit
from speccheck.records import Action, Estimate, Stage, Verdict

VOCAB, K, LENGTH, LISTED = 24, 4, 21, 12
MARGIN = 0.04


# --- rounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "accepted", "drafted", "found"),
    [
        (6, (2, 0), (4, 2), [(1, 4, 2), (4, 2, 0), (5, 0, 0)]),
        (6, (4,), (4,), [(1, 4, 4)]),
        (4, (4,), (4,), [(1, 4, 4)]),  # cut at a stop in mid-block
        (2, (), (), [(1, 0, 0)]),  # one token left: nothing to draft
        (1, (), (), []),
        (9, (1,), (4,), None),  # steps without drafts, and nobody knows where
        (3, (1, 1), (4, 4), None),  # more steps than tokens
    ],
)
def test_rounds_of_a_draft_model(n, accepted, drafted, found):
    """Verify steps laid over the answer; what does not fit is not known, never guessed."""
    assert battery.rounds(n, accepted, drafted) == found


def test_rounds_of_a_drafter_that_may_find_nothing():
    """Its plain steps are where it would have proposed nothing."""
    proposals = {1: 0, 2: 4, 5: 0, 6: 1}
    found = battery.rounds(8, (2, 1), (4, 1), lambda at: proposals[at])
    assert found == [(1, 0, 0), (2, 4, 2), (5, 0, 0), (6, 1, 1)]
    assert battery.strata(8, found) == ("", "1", "2", "3", "", "1", "bonus")
    assert battery.rounds(8, (2, 1), (4, 2), lambda at: proposals[at]) is None


# --- answers of a chain -------------------------------------------------------------------------


class BonusFromDraft(v.Token):
    """W29, of its kind: the bonus is drawn from a draft row."""

    def final(self, step, tau):
        return step.q[-1] if tau == step.k > 0 else super().final(step, tau)


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def pair():
    """(p, q): rows by the token before."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1.8, (VOCAB, VOCAB))
    return softmax(logits), softmax(logits + rng.normal(0, 0.9, logits.shape))


def answers(pair, verifier, n, seed, *, argmax_draft=False, target_only=False):
    """`n` answers of LENGTH tokens with everything that servers would tell of them."""
    p, q = pair
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        tokens, accepted, drafted = [0], [], []
        while len(tokens) < LENGTH:
            k = 0 if target_only else min(K, LENGTH - len(tokens) - 1)
            x, last = [], tokens[-1]
            for _ in range(k):
                row = q[last]
                last = int(row.argmax() if argmax_draft else v.inverse_cdf(row, rng.random()))
                x.append(last)
            before = [tokens[-1], *x]
            rows = q[before[:k]] if k else None
            out = v.verify(verifier, p[before], rows, np.array(x, int), rng.random(k), rng.random())
            tokens += [*x[: out.accepted], out.token]
            if k:
                accepted.append(out.accepted)
                drafted.append(k)
        found.append(sampled(pair, tuple(tokens), accepted, drafted, target_only=target_only))
    return found


def sampled(pair, tokens, accepted, drafted, *, target_only=False):
    p, q = pair
    before = list(tokens[:-1])
    steps = None if target_only else battery.rounds(len(tokens), accepted, drafted)
    return Sampled(
        "prompt",
        tokens,
        scores(p[before]),
        scores(q[before]),
        strata=None if steps is None else battery.strata(len(tokens), steps),
    )


def scores(rows):
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :LISTED]
    return Scores(ids, np.take_along_axis(rows, ids, axis=1))


@pytest.fixture(scope="module")
def control(pair):
    """Target-only answers."""
    return answers(pair, v.Token(), 300, 99, target_only=True)


@pytest.fixture(scope="module")
def right(pair):
    """Answers of a right verifier."""
    return answers(pair, v.Token(), 300, 3)


@pytest.fixture(scope="module")
def wrong_bonus(pair):
    """Answers of W29."""
    return answers(pair, BonusFromDraft(), 300, 3)


def run(arm, control, wanted=tuple(name for name in KINDS if name != "T8")):
    """The battery, but for the slow permutations where they are not asked for."""
    rng = np.random.default_rng(1)
    return battery.run(arm, control, rng=rng, margin=MARGIN, wanted=wanted)


def named(found: Battery) -> dict[str, Judged]:
    return {t.name: t for t in found.tests}


@pytest.mark.parametrize("verifier", [v.OneHot(), v.SamplerMatch(), v.Block()])
def test_right_verifiers_pass(pair, control, verifier):
    """One-hot, sampler-match and block verification keep the law; token does in other tests."""
    found = run(answers(pair, verifier, 300, 3), control)
    assert found.verdict is Verdict.PASS, [t.why for t in found.judged]
    assert {"T1", "T2", "T3", "T6", "T6b", "T7"} <= {t.name for t in found.judged}
    assert found.tokens == 300 * (LENGTH - 1)


@pytest.mark.parametrize(
    ("verifier", "argmax", "caught"),
    [
        (ResampleFromTarget(), False, "T6"),
        (FreshDrawAfterMismatch(), False, "T6"),
        (AcceptUniformInResidual(), False, "T5"),
        (TargetWithoutRejected(), False, "T6"),
        (v.Token(), True, "T1"),
    ],
    ids=["W01", "W06", "W15", "W23", "W10"],
)
def test_wrong_verifiers_are_caught(pair, control, verifier, argmax, caught):
    """Each by the test that was made for it; the verdict names it with effect, A/A and p."""
    found = run(answers(pair, verifier, 300, 3, argmax_draft=argmax), control)
    assert found.verdict is Verdict.FAIL
    test = named(found)[caught]
    assert test.verdict is Verdict.FAIL, test.why
    assert test.why.startswith("differs: ")
    assert "A/A" in test.why


def test_a_wrong_bonus_shows_at_the_bonus_alone(wrong_bonus, control):
    """Stratified by index in the round, W29 is found at the bonus and nowhere else (STATS 1.8)."""
    arm = wrong_bonus
    assert named(run(arm, control))["T7"].fit.where == "the bonus token"
    drafted = [
        replace(s, strata=tuple("" if name == "bonus" else name for name in s.strata)) for s in arm
    ]
    without = named(run(drafted, control))["T7"]
    assert without.fit.p_value > 1e-3


def test_without_logprobs_there_is_the_two_sample_test_alone(pair, right, control):
    """It still finds a grossly wrong verifier, and few samples are no pass."""
    bare = [Sampled(s.prompt, s.tokens) for s in control]
    wrong = answers(pair, v.Token(), 300, 3, argmax_draft=True)
    found = run([Sampled(s.prompt, s.tokens) for s in wrong], bare, KINDS)
    assert [t.name for t in found.tests if t.fit.applies] == ["T8"]
    assert found.verdict is Verdict.FAIL
    found = run([Sampled(s.prompt, s.tokens) for s in right], bare, KINDS)
    assert found.verdict is Verdict.INCONCLUSIVE
    _, not_tested = battery.scope(found, max_tokens=LENGTH, concurrency=8)
    assert any(line.startswith("T1, T1b, T2, T3, T4, T5") for line in not_tested)


def test_nothing_sampled_is_an_error(control):
    """No samples, no verdict."""
    assert run([], control).verdict is Verdict.ERROR


def test_unlisted_draft_tokens_do_not_alarm(right, control):
    """What the draft does not list is guessed, which costs power and no validity."""
    arm = [replace(s, draft=Scores(s.draft.ids[:, :3], s.draft.probs[:, :3])) for s in right]
    test = named(run(arm, control))["T6"]
    assert test.fit.p_value > 0.001


# --- verdicts -----------------------------------------------------------------------------------


def fit(value, low, high, p, n=10_000):
    return stats.Fit(1.0, p, n, Estimate(value, low, high, n, "m", 0.05), 0.01)


@pytest.mark.parametrize(
    ("mine", "control", "verdict"),
    [
        (fit(0.005, 0.0, 0.012, 0.4), fit(0.004, 0, 0.011, 0.5), Verdict.PASS),
        (fit(0.05, 0.04, 0.06, 1e-9), fit(0.004, 0, 0.011, 0.5), Verdict.FAIL),
        (fit(0.05, 0.04, 0.06, 1e-9), None, Verdict.FAIL),
        # certain, but no larger than numerics make it
        (fit(0.0045, 0.003, 0.006, 1e-9), fit(0.001, 0, 0.003, 0.5), Verdict.PASS),
        # certain and small is a difference all the same
        (fit(0.012, 0.009, 0.015, 1e-9), fit(0.006, 0, 0.012, 0.5), Verdict.FAIL),
        # A/A shows the like: numerics, not the verifier
        (fit(0.05, 0.04, 0.06, 1e-9), fit(0.048, 0.038, 0.058, 1e-8), Verdict.PASS),
        (fit(0.05, 0.04, 0.08, 1e-9), fit(0.048, 0.038, 0.058, 1e-8), Verdict.INCONCLUSIVE),
        # far beyond what A/A shows
        (fit(0.2, 0.19, 0.21, 1e-9), fit(0.048, 0.038, 0.058, 1e-8), Verdict.FAIL),
        # nothing found, but too wide to say so
        (fit(0.015, 0.0, 0.035, 0.2), fit(0.004, 0, 0.011, 0.5), Verdict.INCONCLUSIVE),
        # nothing found in few
        (fit(0.005, 0.0, 0.012, 0.4, n=500), None, None),
        # few suffice to find something
        (fit(0.2, 0.15, 0.25, 1e-9, n=500), None, Verdict.FAIL),
    ],
)
def test_a_test_against_a_a_and_margin(mine, control, verdict):
    """The upper limit decides a pass, the adjusted p with A/A a failure, the rest is open."""
    tested = battery.judge("T6", mine, control, mine.p_value, 0.02)
    assert tested.verdict is verdict, tested.why


def test_more_tokens_are_asked_for_where_that_helps():
    """A limit missed by the width of the interval is a matter of n; by the value it is not."""
    wide = battery.judge("T6", fit(0.01, 0.0, 0.03, 0.2), None, 0.2, 0.02)
    off = battery.judge("T6", fit(0.03, 0.01, 0.05, 0.01), None, 0.01, 0.02)
    found = Battery((wide,), 10_000, None, 10_000, 1, 400, 0.02)
    assert battery.needed_tokens(found) == 30_000
    assert battery.needed_tokens(replace(found, tests=(off,))) is None
    few = battery.judge("T6", fit(0.0, 0.0, 0.01, 0.4, n=300), None, 0.4, 0.02)
    assert battery.needed_tokens(replace(found, tests=(few,))) == 500


def test_what_is_said_claims_no_more_than_was_seen(right, control):
    """Tokens, positions, temperatures and sizes are named; nothing is identical or proven."""
    found = run(right, control)
    tested, not_tested = battery.scope(found, max_tokens=LENGTH, concurrency=8)
    said = " ".join([*tested, *not_tested, *(t.why for t in found.tests)])
    for words in ("6,000 verified tokens", "temperature 1", "tokens 2 to 21", "first token"):
        assert words in said
    assert "nine times in ten: T1" in said
    assert "identical" not in said
    assert "proven" not in said
    assert found.open_tokens is not None
    assert f"{found.open_tokens:,} of them open" in said


# --- the rule -----------------------------------------------------------------------------------


def judged(found, why=""):
    measured = battery.measurement(found, why, stage=Stage.REPLAY, route="chat")
    (finding,) = guardrails.judge(
        {"max_sampled_violations": RuleLimit(0)}, [measured], stage=Stage.REPLAY, route="chat"
    )
    return finding


def test_the_rule_names_the_slice_and_the_decision_says_so(wrong_bonus, control):
    """A wrong sampler is a matter of temperature > 0: greedy traffic may be eligible still."""
    finding = judged(run(wrong_bonus, control))
    assert (finding.verdict, finding.cohort) == (Verdict.FAIL, SLICE)
    assert "verified tokens is over the limit" in finding.why
    assert "differs: " in finding.why
    made = decision.decide("chat", Stage.REPLAY, [finding])
    assert made.action is Action.FALL_BACK
    assert made.scope == f"fails at {SLICE}"


def test_the_rule_passes_holds_and_errs(right, control):
    """A right sampler passes; too few tokens do not; no samples are an error with its reason."""
    assert judged(run(right, control)).verdict is Verdict.PASS
    few = judged(run(right[:20], control[:20]))
    assert few.verdict is Verdict.INCONCLUSIVE
    assert "more verified tokens are needed" in few.why
    none = judged(None, "no sample came back")
    assert none.verdict is Verdict.ERROR
    assert "no sample came back" in none.why


def test_every_kind_of_test_is_run(right, control):
    """No test of the list is forgotten, and names that are not wanted are not run."""
    assert [t.name for t in run(right[:60], control, KINDS).tests] == list(KINDS)
    assert [t.name for t in run(right[:60], control, ("T3", "T5")).tests] == ["T3", "T5"]
    assert math.isnan(named(run(right[:1], control[:1]))["T4"].p_adjusted)
