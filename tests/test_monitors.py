"""Monitors: looked at after every request, they fail what is broken and leave alone what is not.

Receipts with chosen numbers come in one by one, as they would on a live route.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rule_receipts import receipt

from speccheck import guardrails, monitors, stats
from speccheck.decision import decide
from speccheck.guardrails import RULES, RuleLimit, judge
from speccheck.monitors import Assignment, Monitor, Monitors, incidents
from speccheck.plan import assign_share
from speccheck.records import Action, Estimate, Receipt, Stage, Verdict

THREE = {
    "min_acceptance_rate": RuleLimit(0.55),
    "max_tpot_p95_regression": RuleLimit(0.10),
    "max_error_rate": RuleLimit(0.01),
}
"""The rules of the default block that a canary judges."""


def watch(rules: dict[str, RuleLimit] | None = None, **more: Any) -> Monitors:
    """Monitors of the route `chat`."""
    return Monitors("chat", rules or THREE, **{"acceptance": "betting", **more})


def live(number: int, arm: str = "speculative", **fields: Any) -> Receipt:
    """One request of the canary."""
    return receipt(number, arm, stage="canary", **{"phase": "chat-step-1", **fields})


def traffic(
    rng: np.random.Generator,
    n: int,
    *,
    errors: float = 0.0,
    acceptance: float = 0.7,
    slower: float = 0.7,
    share: float = 0.5,
    **fields: Any,
) -> Iterator[Receipt]:
    """A route's requests: each on one arm, with these truths on the speculative one."""
    spec = rng.random(n) < share
    failed = rng.random(n) < errors
    accepted = rng.beta(4 * acceptance, 4 * (1 - acceptance), n)
    tpot = 20 * rng.lognormal(0, 0.3, n) * np.where(spec, slower, 1.0)
    for i in range(n):
        if not spec[i]:
            yield live(i, "target_only", tpot_ms=float(tpot[i]), **fields)
        elif failed[i]:
            yield live(i, outcome="error", error_class="timeout", proposed_tokens=None, **fields)
        else:
            drafted = {"proposed_tokens": 1000, "accepted_tokens": round(1000 * accepted[i])}
            yield live(i, tpot_ms=float(tpot[i]), **{**drafted, **fields})


def feed(watched: Monitors, receipts: Iterator[Receipt] | list[Receipt]) -> list[str]:
    """Rules that failed, in order; all receipts are taken in."""
    return [m.rule.name for r in receipts for m in watched.add(r)]


def monitor(watched: Monitors, rule: str, cohort: str = "") -> Monitor:
    """The monitor of a rule."""
    return next(m for m in watched.monitors if (m.rule.name, m.cohort) == (rule, cohort))


def verdicts(watched: Monitors) -> dict[str, Verdict]:
    """Verdict of each rule on the whole route."""
    return {m.rule.name: m.verdict for m in watched.monitors if not m.cohort}


def findings(watched: Monitors, rules: dict[str, RuleLimit] | None = None):
    """What the rules make of it."""
    return judge(
        rules or THREE,
        watched.measurements(),
        stage=Stage.CANARY,
        route="chat",
        standings=watched.standings(),
    )


# --- every rule ---------------------------------------------------------------------------------


def every_rule() -> dict[str, RuleLimit]:
    """All rules of a canary with usual limits."""
    limits = {
        "min_acceptance_rate": 0.4,
        "max_acceptance_rate": 0.98,
        "min_mean_acceptance_length": 2.0,
        "max_error_rate": 0.01,
        "max_unsupported_requests": 0,
        "max_fallback_rate": 0.05,
        "min_speedup": 1.05,
    }
    return {
        name: RuleLimit(limits.get(name, 0.1))
        for name, rule in RULES.items()
        if Stage.CANARY in rule.stages
    }


def test_every_rule_of_a_canary_has_a_monitor_with_a_named_method():
    """None of them is judged by an interval of a fixed n, and a healthy route fails none."""
    watched = watch(every_rule())
    assert feed(watched, traffic(np.random.default_rng(1), 800, slower=0.6)) == []
    found = findings(watched, every_rule())
    assert {f.rule for f in found} == set(every_rule())
    methods = {f.rule: f.estimate.method for f in found if f.estimate is not None}
    assert set(methods) == set(every_rule())
    anytime = ("e-process", "confidence sequence", "count of requests")
    assert all(any(word in method for word in anytime) for method in methods.values()), methods
    passed = {f.rule for f in found if f.verdict is Verdict.PASS}
    assert {
        "min_acceptance_rate",
        "max_error_rate",
        "max_tpot_p95_regression",
        "max_e2e_p50_regression",
        "min_speedup",
    } <= passed


def test_rules_of_other_stages_are_left_out():
    """What replay or shadow judge has no monitor here; refusals are watched beside errors."""
    watched = watch({"max_error_rate": RuleLimit(0.01), "max_lossless_violations": RuleLimit(0)})
    assert {m.rule.name for m in watched.monitors} == {
        "max_error_rate",
        "max_unsupported_requests",
    }


def test_nothing_seen_is_an_error_and_no_pass():
    """Without a request each rule could not be judged."""
    assert {f.verdict for f in findings(watch())} == {Verdict.ERROR}


@pytest.mark.parametrize("method", ["betting", "asymptotic"])
def test_one_method_gates_acceptance(method):
    """It is the one that the configuration names, and the finding says which."""
    watched = watch(acceptance=method)
    feed(watched, traffic(np.random.default_rng(2), 200))
    found = next(f for f in findings(watched) if f.rule == "min_acceptance_rate")
    assert (method == "betting") == ("betting" in found.estimate.method)
    assert (method == "asymptotic") == ("asymptotic" in found.estimate.method)


# --- false alarms and detection -----------------------------------------------------------------


def test_false_alarms_of_a_whole_route():
    """On the limit of every rule at once, 25 runs of 200 requests alarm once at most (1 %)."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(25):
        run = traffic(rng, 200, errors=0.01, acceptance=0.55, slower=1.1)
        alarms += bool(feed(watch(), run))
    assert alarms <= 1


@pytest.mark.parametrize(
    ("truth", "rule", "within"),
    [
        ({"errors": 0.1}, "max_error_rate", 75),
        ({"errors": 0.05}, "max_error_rate", 220),
        ({"acceptance": 0.3}, "min_acceptance_rate", 40),
        ({"acceptance": 0.02}, "min_acceptance_rate", 18),
        ({"slower": 2.5, "share": 0.2}, "max_tpot_p95_regression", 60),
    ],
)
def test_what_is_broken_is_failed_soon(truth, rule, within):
    """Median speculative requests until its own rule fails, the level shared with the others."""
    rng = np.random.default_rng(4)
    found = []
    for _ in range(7):
        watched = watch()
        for r in traffic(rng, 1200, **truth):
            if failed := watched.add(r):
                assert [m.rule.name for m in failed] == [rule]
                break
        found.append(sum(x.arm == "speculative" for x in watched.receipts))
    assert np.median(found) <= within


def test_the_level_of_failing_is_shared():
    """Half of it by the rules of the route, half by the slices, and in all never more than it."""
    watched = watch(alpha_fail=0.01)
    for i in range(40):
        watched.add(live(i, prompt_tokens=(10, 100, 500, 2000, 9000)[i % 5], concurrency=1 + i % 3))
    spent = {
        (m.rule.name, m.cohort): m.levels[m.fails]
        for made in watched._cohorts.values()
        for m in made
        if m.rule.kind != "count"
    }
    whole = sum(alpha for (_, cohort), alpha in spent.items() if not cohort)
    assert whole == pytest.approx(0.005)
    assert 0.004 < sum(spent.values()) - whole < 0.005


# --- verdicts over time -------------------------------------------------------------------------


def clean(first: int, n: int) -> list[Receipt]:
    """Speculative requests that went well."""
    return [live(first + i) for i in range(n)]


def failing(first: int, n: int, **fields: Any) -> list[Receipt]:
    """Speculative requests that failed."""
    broken = {"outcome": "error", "error_class": "server_error", "proposed_tokens": None}
    return [live(first + i, **(broken | fields)) for i in range(n)]


def test_358_clean_requests_pass_and_the_pass_does_not_expire():
    """At 357 it is open and says one more; errors within the limit later on change nothing."""
    watched = watch()
    feed(watched, clean(0, 357))
    errors = monitor(watched, "max_error_rate")
    assert (errors.verdict, errors.needed()) == (Verdict.INCONCLUSIVE, 1)
    feed(watched, clean(357, 1))
    assert (errors.verdict, errors.passed_at) == (Verdict.PASS, 358)
    feed(watched, [*failing(358, 1), *clean(359, 60), *failing(419, 1), *clean(420, 30)])
    assert errors.verdict is Verdict.PASS
    found = next(f for f in findings(watched) if f.rule == "max_error_rate")
    assert found.verdict is Verdict.PASS
    assert "is not clear of the limit" in found.why
    assert "it passed at request 358, and a pass does not expire" in found.why


def test_a_later_failure_overrides_a_pass_and_stands():
    """Nothing that comes after a failure undoes it."""
    watched = watch()
    assert feed(watched, clean(0, 400)) == []
    assert feed(watched, failing(400, 12)) == ["max_error_rate"]
    errors = monitor(watched, "max_error_rate")
    assert errors.passed_at == 358
    assert errors.verdict is Verdict.FAIL
    feed(watched, clean(412, 500))
    assert errors.verdict is Verdict.FAIL
    assert next(f for f in findings(watched) if f.rule == "max_error_rate").verdict is Verdict.FAIL


def test_each_failure_is_told_once():
    """The look at which a rule fails names it; later looks do not."""
    watched = watch()
    told = [m.rule.name for r in failing(0, 30) for m in watched.add(r)]
    assert told == ["max_error_rate"]


def test_a_rule_in_dry_run_is_watched_but_not_counted():
    """Its finding fails and does not count."""
    rules = THREE | {"max_error_rate": RuleLimit(0.01, counted=False)}
    watched = watch(rules)
    feed(watched, failing(0, 20))
    found = next(f for f in findings(watched, rules) if f.rule == "max_error_rate")
    assert (found.verdict, found.counted) == (Verdict.FAIL, False)


def test_a_minimum_of_the_user_delays_a_pass_and_no_failure():
    """With 500 requests asked for, 358 clean ones do not pass; an outage fails all the same."""
    watched = watch({"max_error_rate": RuleLimit(0.01, min_n=500)})
    feed(watched, clean(0, 400))
    errors = monitor(watched, "max_error_rate")
    assert (errors.verdict, errors.needed()) == (Verdict.INCONCLUSIVE, 100)
    assert feed(watched, failing(400, 10)) == ["max_error_rate"]


# --- what comes from before ---------------------------------------------------------------------


def test_requests_of_earlier_stages_help_to_pass_the_error_rate_only():
    """300 clean ones from replay and 58 here pass; acceptance and times are the canary's own."""
    earlier = [replace(live(i), stage="replay") for i in range(300)]
    watched = watch(earlier=earlier)
    feed(watched, clean(300, 58))
    assert verdicts(watched)["max_error_rate"] is Verdict.PASS
    assert monitor(watched, "min_acceptance_rate").n == 58
    found = next(f for f in findings(watched) if f.rule == "max_error_rate")
    assert found.estimate.n == 358
    assert "with 300 requests of replay and shadow, 0 failed" in found.why


def test_errors_of_the_canary_do_not_drown_in_earlier_requests():
    """3,000 clean requests from before pass while it is clean itself, and not with two errors."""
    watched = watch(earlier=[replace(live(i), stage="shadow") for i in range(3000)])
    feed(watched, clean(3000, 29))
    assert verdicts(watched)["max_error_rate"] is Verdict.INCONCLUSIVE, "29 of its own are too few"
    feed(watched, clean(3029, 1))
    assert verdicts(watched)["max_error_rate"] is Verdict.PASS
    assert (
        "while it sees no failure"
        in monitor(watched, "max_error_rate")
        .reading(next(f for f in findings(watched) if f.rule == "max_error_rate"))
        .next
    )
    feed(watched, [*failing(3030, 1), *clean(3031, 10), *failing(3041, 1)])
    assert verdicts(watched)["max_error_rate"] is Verdict.INCONCLUSIVE
    assert next(f for f in findings(watched) if f.rule == "max_error_rate").estimate.n == 42


def test_earlier_errors_fail_nothing():
    """Errors of shadow were judged there; the canary, clean itself, only does not pass."""
    watched = watch(earlier=[replace(r, stage="shadow") for r in failing(0, 50)])
    assert feed(watched, clean(50, 400)) == []
    assert verdicts(watched)["max_error_rate"] is Verdict.INCONCLUSIVE


def test_what_another_version_served_before_does_not_count():
    """Replay ran on another engine: the canary starts anew, and says so."""
    earlier = [replace(live(i), stage="replay", engine_config_id="engine:old") for i in range(300)]
    watched = watch(earlier=earlier)
    feed(watched, clean(300, 58))
    assert verdicts(watched)["max_error_rate"] is Verdict.INCONCLUSIVE
    assert "engine:old became engine:speculative" in watched.restarts[0].reason


# --- restarts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"engine_config_id": "engine:b"},
        {"policy_version": "policy:2"},
        {"target_model": "target-2"},
        {"proposer": "draft-2"},
        {"engine": "scripted 2"},
    ],
    ids=lambda c: next(iter(c)),
)
@pytest.mark.parametrize("arm", ["speculative", "target_only"])
def test_every_process_starts_anew_when_a_version_changes(changed, arm):
    """On either arm; the reason is kept, and a pass of the old version is worth nothing."""
    watched = watch()
    feed(watched, [*clean(0, 400), live(400, "target_only")])
    assert verdicts(watched)["max_error_rate"] is Verdict.PASS
    feed(watched, [live(401, arm, **changed), *(live(402 + i, **changed) for i in range(9))])
    (restart, *_) = watched.restarts
    name, value = next(iter(changed.items()))
    assert restart.requests == 401
    assert name in restart.reason
    assert value in restart.reason
    assert verdicts(watched)["max_error_rate"] is Verdict.INCONCLUSIVE
    assert monitor(watched, "max_error_rate").n <= 10


def test_late_answers_of_the_old_version_start_nothing_anew():
    """Sent before the change and finished after it, they are left out; going back starts anew."""
    old, new = {"engine_config_id": "engine:a"}, {"engine_config_id": "engine:b"}
    watched = watch()
    feed(watched, [live(i, scheduled_ns=i, **old) for i in range(20)])
    feed(watched, [live(20, scheduled_ns=21, **new), live(21, scheduled_ns=20, **old)])
    feed(watched, [live(22, scheduled_ns=22, **new)])
    assert len(watched.restarts) == 1
    assert monitor(watched, "max_error_rate").n == 2
    feed(watched, [live(23, scheduled_ns=23, **old)])
    assert len(watched.restarts) == 2


def test_a_proposal_length_per_request_is_no_other_version():
    """A policy may set k; nothing starts anew."""
    watched = watch()
    feed(watched, [live(i, k=1 + i % 4) for i in range(50)])
    assert watched.restarts == []


# --- slices and loads ---------------------------------------------------------------------------


def test_a_slice_hidden_by_the_average_fails():
    """T12 on a canary: acceptance passes .40 over all, prompts of 4096 and more are at .06."""
    rng = np.random.default_rng(5)
    rules = {"min_acceptance_rate": RuleLimit(0.40)}
    watched = watch(rules)
    for i in range(450):
        long = i % 15 == 0
        rate = 0.06 if long else 0.55
        accepted = int(rng.binomial(290 if long else 120, rate))
        watched.add(
            live(
                i,
                prompt_tokens=20_000 if long else 500,
                proposed_tokens=290 if long else 120,
                accepted_tokens=accepted,
            )
        )
    found = findings(watched, rules)
    by_cohort = {f.cohort: f.verdict for f in found}
    assert by_cohort[""] is Verdict.PASS
    assert by_cohort["prompt >=4096"] is Verdict.FAIL
    assert by_cohort["prompt 256-1023"] is Verdict.PASS
    made = decide("chat", Stage.CANARY, found)
    assert made.action is Action.FALL_BACK
    assert "fails at prompt >=4096; passes at prompt 256-1023" in made.scope


def test_times_of_different_loads_are_never_pooled():
    """T10 on a canary: on at 1 and 16, off at 64; the overall mean hides nothing."""
    rng = np.random.default_rng(6)
    rules = {"max_tpot_p95_regression": RuleLimit(0.05), "min_acceptance_rate": RuleLimit(0.5)}
    watched = watch(rules)
    speculative = {1: 8.9 / 14.1, 16: 13.0 / 18.8, 64: 39.5 / 22.6}
    for i in range(2400):
        load = (1, 16, 64)[i % 3]
        arm = "speculative" if i % 2 else "target_only"
        ms = 20 * rng.lognormal(0, 0.1) * (speculative[load] if i % 2 else 1.0)
        drafts = {"accepted_tokens": int(rng.binomial(100, 0.58))} if i % 2 else {}
        watched.add(live(i, arm, concurrency=load, tpot_ms=ms, **drafts))
    found = {(f.rule, f.cohort): f.verdict for f in findings(watched, rules)}
    times = {c: v for (rule, c), v in found.items() if rule == "max_tpot_p95_regression"}
    assert times == {
        "concurrency 1": Verdict.PASS,
        "concurrency 16": Verdict.PASS,
        "concurrency 64": Verdict.FAIL,
    }
    assert found["min_acceptance_rate", ""] is Verdict.PASS
    assert found["min_acceptance_rate", "concurrency 64"] is Verdict.PASS


def test_one_slice_alone_is_the_route():
    """Where all prompts are alike there is no slice to judge."""
    watched = watch()
    feed(watched, clean(0, 50))
    assert {m.cohort for m in watched.monitors} == {""}


@pytest.mark.parametrize(("slower", "verdict"), [(1.25, "inconclusive"), (2.0, "fail")])
def test_within_the_noise_of_target_only_nothing_is_decided(slower, verdict):
    """With an A/A floor of 30 %, 25 % slower does not fail a limit of 10 %; twice as slow does."""
    floor = Estimate(1.0, 0.77, 1.3, 100, "paired bootstrap", 0.05)
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    watched = watch(rules, floors={"tpot_p95_ratio": floor})
    told = feed(watched, traffic(np.random.default_rng(9), 2000, slower=slower))
    assert told == (["max_tpot_p95_regression"] if verdict == "fail" else [])
    bare = watch(rules)
    assert feed(bare, traffic(np.random.default_rng(9), 2000, slower=slower)), "it does without"
    (found,) = judge(
        rules,
        watched.measurements(),
        stage=Stage.CANARY,
        route="chat",
        noise_floors=watched.floors,
        standings=watched.standings(),
    )
    assert found.verdict.word == verdict
    assert "noise floor" in found.why


# --- what a receipt says ------------------------------------------------------------------------


def test_exact_copies_of_an_answer_are_no_evidence():
    """300 requests of one greedy prompt say as much of acceptance as one; they do count as n."""
    watched = watch()
    feed(watched, [live(0, repeat=i, accepted_tokens=90) for i in range(300)])
    acceptance = monitor(watched, "min_acceptance_rate")
    assert (acceptance.n, acceptance.process.n) == (300, 1)
    assert acceptance.verdict is Verdict.INCONCLUSIVE
    found = next(f for f in findings(watched) if f.rule == "min_acceptance_rate")
    assert "299 exact copies of earlier answers are no evidence" in found.why
    feed(watched, [live(0, repeat=300 + i, accepted_tokens=i) for i in range(12)])
    assert acceptance.process.n == 13, "a draft that changed is no copy"


def test_a_dead_drafter_fails_with_a_hint():
    """T06: nothing accepted of what was drafted is a failure within 20 requests, not missing."""
    watched = watch()
    told = feed(watched, [live(i, proposed_tokens=30, accepted_tokens=0) for i in range(20)])
    assert told == ["min_acceptance_rate"]
    found = next(f for f in findings(watched) if f.rule == "min_acceptance_rate")
    assert "wrong method name" in found.why
    assert "0 of 600 drafted tokens accepted" in found.why


def test_a_refused_request_fails_under_its_own_name():
    """T13: refused for a parameter is counted by itself and is no error."""
    watched = watch()
    refused = live(0, outcome="rejected", error_class="unsupported_parameter", http_status=400)
    assert feed(watched, [refused]) == ["max_unsupported_requests"]
    assert monitor(watched, "max_error_rate").n == 0


def test_a_stream_that_died_counts_as_an_error_and_gives_no_time():
    """T18: HTTP 200 without an end is one error and no TPOT."""
    watched = watch()
    feed(watched, [live(0, outcome="incomplete", http_status=200, error_class="stream_error")])
    assert monitor(watched, "max_error_rate").process.events == 1
    assert monitor(watched, "max_tpot_p95_regression").n == 0


def test_what_is_no_evidence_is_not_taken_in():
    """Warm-up, protected traffic and what the policy keeps off change nothing."""
    watched = watch()
    kept_off = "eligibility policy: rule 'x': why"
    ignored = [
        live(0, warm_up=True),
        live(1, priority="protected"),
        live(2, "target_only", decision_reason=kept_off),
    ]
    assert feed(watched, ignored) == []
    assert watched.receipts == []


def test_what_a_fallback_moved_is_no_control():
    """It came later than what it would be compared with; it counts as moved."""
    rules = THREE | {"max_fallback_rate": RuleLimit(0.05)}
    watched = watch(rules)
    moved = [live(i, "target_only", decision="fell_back") for i in range(40)]
    assert feed(watched, [*clean(100, 40), *moved]) == ["max_fallback_rate"]
    assert monitor(watched, "max_tpot_p95_regression").n == 0


@pytest.mark.parametrize(("finish", "verdict"), [("length", Verdict.FAIL), ("stop", Verdict.PASS)])
def test_high_acceptance_is_a_loop_only_if_answers_run_to_the_limit(finish, verdict):
    """Acceptance over the limit fails with answers at the length limit, and passes without."""
    rules = {"max_acceptance_rate": RuleLimit(0.95)}
    watched = watch(rules)
    feed(watched, [live(i, accepted_tokens=100, finish_reason=finish) for i in range(250)])
    found = findings(watched, rules)[0]
    assert found.verdict is verdict
    assert ("repetition loops" in found.why) == (verdict is Verdict.FAIL)
    if verdict is Verdict.PASS:
        assert "answers end by themselves" in found.why


@pytest.mark.parametrize("rule", ["max_acceptance_rate", "min_acceptance_rate"])
def test_a_rule_that_two_things_pass_shares_its_level(rule):
    """A low rate or answers that end: either passes, so each does at half of the level."""
    made = monitors.monitor_of(
        guardrails.RULES[rule], RuleLimit(0.9), "", alpha_fail=0.01, acceptance="betting"
    )
    assert made.levels[made.passes] == (0.025 if made.loops is not None else 0.05)
    assert made.levels[made.fails] == 0.01
    assert (made.loops is not None) == (rule == "max_acceptance_rate")


# --- incidents ----------------------------------------------------------------------------------


def at(receipts: list[Receipt], second: float) -> list[Receipt]:
    """The same, scheduled one after another from a second on."""
    return [
        replace(
            r, scheduled_ns=round((second + i / 10) * 1e9), done_ns=round((second + i / 10) * 1e9)
        )
        for i, r in enumerate(receipts)
    ]


def test_an_outage_is_one_incident_and_still_fails():
    """Twelve failures in a row are told as one, with what target-only did meanwhile."""
    watched = watch()
    outage = at(failing(500, 12, error_class="unreachable"), 50)
    neighbour = replace(live(900, "target_only", outcome="error"), scheduled_ns=round(50.5e9))
    order = [*at(clean(0, 400), 0), *outage[:6], neighbour, *outage[6:], *at(clean(600, 20), 60)]
    assert feed(watched, order) == ["max_error_rate"]
    (incident,) = incidents(watched.receipts)
    assert (incident.failures, incident.target_failures) == (12, 1)
    found = next(f for f in findings(watched) if f.rule == "max_error_rate")
    assert found.verdict is Verdict.FAIL
    assert "one outage: 12 requests in a row failed within 1.1 s (unreachable)" in found.why
    assert "target-only failed 1 times meanwhile" in found.why


def test_an_outage_after_thousands_of_requests_fails_at_once():
    """Six failures in a row, where the rate over all requests is still 0.2 %."""
    watched = watch({"max_error_rate": RuleLimit(0.01)})
    for r in clean(0, 3_000):
        watched.add(r)
    told = [i for i, r in enumerate(failing(3_000, 8), start=1) if watched.add(r)]
    assert told
    assert told[0] <= 6


def test_scattered_failures_are_no_outage():
    """Two in a row are not yet called one."""
    order = [*failing(0, 2), *clean(2, 3), *failing(5, 2), *clean(7, 1)]
    assert incidents(order) == []


# --- assignment ---------------------------------------------------------------------------------


def assigned(n: int, share: float, salt: str, *, repeat: int = 0) -> list[Receipt]:
    """Requests as a canary sends them at a share."""
    return [
        live(
            i,
            "speculative" if assign_share(f"p{i}#{repeat}", salt, share) else "target_only",
            repeat=repeat,
        )
        for i in range(n)
    ]


def test_shares_as_planned_are_not_called_a_mismatch():
    """Over a whole ramp that sends the same keys again, in 20 runs, none alarms at 0.1 %."""
    for run in range(20):
        seen = Assignment()
        for share in (0.01, 0.05, 0.25, 0.5):
            for r in assigned(200, share, f"salt {run}"):
                seen.add(r, share)
        assert not seen.is_off
        assert seen.expected == pytest.approx(162)


def test_lost_requests_of_one_arm_are_a_mismatch():
    """Every other receipt of the speculative arm missing is seen within 300 requests."""
    seen = Assignment()
    kept = [r for i, r in enumerate(assigned(400, 0.5, "s")) if r.arm == "target_only" or i % 2]
    for r in kept[:300]:
        seen.add(r, 0.5)
    assert seen.is_off


def test_a_request_that_fell_back_was_assigned_to_speculative():
    """Moving a request after the assignment is no mismatch."""
    seen = Assignment()
    for r in assigned(300, 0.5, "s"):
        moved = r.arm == "speculative"
        seen.add(replace(r, arm="target_only", decision="fell_back") if moved else r, 0.5)
    assert not seen.is_off


# --- the same receipts, the same verdicts -------------------------------------------------------


def test_the_same_receipts_give_the_same_readings():
    """No clock, no chance: two sets of monitors that saw the same say the same."""
    receipts = list(traffic(np.random.default_rng(7), 300, errors=0.02))
    first, second = watch(), watch()
    feed(first, receipts)
    feed(second, receipts)
    assert first.readings(findings(first)) == second.readings(findings(second))


def test_a_reading_says_what_would_decide():
    """Evidence, what is needed of it, and how many more requests, for a tired person."""
    watched = watch()
    feed(watched, [live(i, tpot_ms=19 + i % 7) for i in range(100)])
    feed(watched, [live(200 + i, "target_only", tpot_ms=20 + i % 7) for i in range(60)])
    by_rule = {r.rule: r for r in watched.readings(findings(watched))}
    errors = by_rule["max_error_rate"]
    assert errors.next == (
        "258 more clean requests pass it (358 clean ones from nothing); 3 in a row fail it"
    )
    assert errors.pass_needs == pytest.approx(20)
    assert 2 < errors.pass_evidence < 3
    assert errors.fail_p == 1.0
    assert "more requests on each arm decide it" in by_rule["max_tpot_p95_regression"].next
    assert by_rule["max_unsupported_requests"].next == "fails at the first one over the limit"
    feed(watched, failing(900, 10))
    failed = {r.rule: r for r in watched.readings(findings(watched))}["max_error_rate"]
    assert failed.next.startswith("failed at request 10")
    assert failed.fail_p < 1 / failed.fail_needs


@pytest.mark.parametrize(
    ("odds", "text"),
    [(0.001, "0 of 20"), (2.345, "2.3 of 20"), (312.4, "312 of 20"), (1e9, "over 1,000,000 of 20")],
)
def test_odds_are_written_for_people(odds, text):
    """Two digits, no exponents."""
    assert monitors.odds_text(odds, 20) == text


def test_a_standing_takes_the_place_of_the_interval():
    """`judge` takes a monitor's verdict as it is, in both directions."""
    watched = watch({"max_error_rate": RuleLimit(0.01)})
    feed(watched, clean(0, 10))
    measured = [m for m in watched.measurements() if m.metric == "error_rate"]
    for verdict in (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL):
        (found,) = (
            f
            for f in judge(
                {"max_error_rate": RuleLimit(0.01)},
                measured,
                stage=Stage.CANARY,
                route="chat",
                standings={("max_error_rate", ""): guardrails.Standing(verdict, 7, "so it is")},
            )
            if f.rule == "max_error_rate"
        )
        assert found.verdict is verdict
        assert found.needed == (7 if verdict is Verdict.INCONCLUSIVE else None)


def test_levels_of_a_monitor_are_those_of_its_sides():
    """A max rule fails over its limit, a min rule under it, each at the shared level."""
    watched = watch()
    for rule, fails in (("max_error_rate", "over"), ("min_acceptance_rate", "under")):
        found = monitor(watched, rule)
        assert found.fails == fails
        assert found.levels[found.passes] == 0.05
        assert found.levels[found.fails] == pytest.approx(0.005 / 3)
    assert stats.log_odds_against(0.05) == pytest.approx(np.log(20))


# --- times that say nothing of the arms ---------------------------------------------------------


@pytest.mark.parametrize("change", [1.3, 0.8], ids=["slower", "faster"])
def test_a_machine_that_changes_from_step_to_step_is_no_change_of_the_arm(change):
    """Equal arms, every step so much slower than the one before: neither failed nor passed.

    Target-only comes mostly in the first steps and the speculative arm in the last, so without
    thinning to one mix of steps the ramp itself fails or passes rules on times (20 of 20 runs).
    """
    rules = {"min_speedup": RuleLimit(1.0)}
    plain, mixed = watch(rules), watch(rules, mix_share=0.5)
    rng = np.random.default_rng(8)
    for number, share in enumerate((0.05, 0.25, 0.5, 0.9)):
        for made in traffic(rng, 400, slower=1.0, share=share):
            key = f"{number}-{made.receipt_id}"
            first, last = made.first_token_ns, made.last_token_ns
            assert first is not None
            assert last is not None
            last = first + round((last - first) * change**number)
            slowed = replace(made, receipt_id=key, last_token_ns=last)
            for watched in (plain, mixed):
                watched.add(slowed, share=share)
    assert monitor(plain, "min_speedup").verdict in (Verdict.FAIL, Verdict.PASS)
    assert monitor(mixed, "min_speedup").verdict is Verdict.INCONCLUSIVE
    assert monitor(mixed, "min_speedup").n > 250
    (told,) = [m for m in mixed.measurements() if m.metric == "e2e_mean_ratio"]
    assert "both arms come from the steps alike" in told.note


def test_much_slower_is_failed_in_a_small_step():
    """Three times as slow fails within a dozen requests at 1 %; the mix of steps has too few."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    rng = np.random.default_rng(12)
    stepped, mixed = watch(rules, mix_share=0.5, steps=5), watch(rules, mix_share=0.5)
    told: list[float] = []
    for number, (share, n) in enumerate(((0.01, 1500), (0.05, 400))):
        for made in traffic(rng, n, slower=3.0, share=share):
            key = replace(made, receipt_id=f"{number}-{made.receipt_id}")
            told += [share for _ in stepped.add(key, share=share)]
            assert mixed.add(key, share=share) == []
    assert told == [0.01]
    failed = monitor(stepped, "max_tpot_p95_regression")
    assert failed.failed_at is not None
    assert failed.failed_at <= 15
    found = next(f for f in findings(stepped, rules) if f.rule == "max_tpot_p95_regression")
    assert found.verdict is Verdict.FAIL
    assert "of the step at a share of 0.01 alone" in found.why
    assert found.estimate.low > 1.1
    (reading,) = stepped.readings([found])
    assert reading.fail_evidence >= reading.fail_needs


def test_a_restart_in_mid_step_watches_the_step_anew():
    """After a change of version times are compared within the step again, and fail there."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    rng = np.random.default_rng(14)
    watched = watch(rules, mix_share=0.5, steps=5)
    for r in traffic(rng, 300, share=0.1):
        assert watched.add(r, share=0.1) == []
    changed = {"policy_version": "policy:2"}
    told = [
        m
        for r in traffic(rng, 800, share=0.1, slower=3, **changed)
        for m in watched.add(r, share=0.1)
    ]
    assert [m.rule.name for m in told] == ["max_tpot_p95_regression"]
    assert len(watched.restarts) <= 2


def test_steps_share_the_level_of_failing():
    """On the limit of a rule on times, 20 runs over three steps alarm once at most (1 %)."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    rng = np.random.default_rng(13)
    alarms = 0
    for _ in range(20):
        watched = watch(rules, mix_share=0.5, steps=3)
        for share in (0.1, 0.3, 0.5):
            alarms += any(
                watched.add(r, share=share) for r in traffic(rng, 150, slower=1.1, share=share)
            )
    assert alarms <= 1


def test_times_read_by_a_late_client_are_no_evidence():
    """A regression seen only while our client was late fails nothing; acceptance counts on."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10), "min_acceptance_rate": RuleLimit(0.55)}
    late, on_time = watch(rules), watch(rules)
    for made in traffic(np.random.default_rng(3), 600, slower=3.0):
        late.add(made, late="send lag p99 40 ms > limit 10 ms")
        on_time.add(made)
    assert monitor(on_time, "max_tpot_p95_regression").verdict is Verdict.FAIL
    assert monitor(late, "max_tpot_p95_regression").n == 0
    assert monitor(late, "min_acceptance_rate").n == monitor(on_time, "min_acceptance_rate").n > 0


def test_failed_requests_are_no_slice_of_their_own():
    """A failure has no count of prompt tokens. Five in 2,000 are 0.25 %, within a limit of 1 %, and
    not all of a slice "prompt unknown"; they count where their prompts belong.
    """
    lost = {"outcome": "error", "error_class": "timeout", "prompt_tokens": None}
    lost["proposed_tokens"] = lost["accepted_tokens"] = None
    receipts = []
    for i in range(2000):
        fields: dict[str, Any] = {"prompt_id": f"p{i % 40}", "prompt_tokens": 50 + 20 * (i % 40)}
        receipts.append(live(i, **fields | (lost if i % 400 == 399 else {})))
    watched = watch({"max_error_rate": RuleLimit(0.01)})
    assert feed(watched, receipts) == []
    assert {f.cohort for f in findings(watched) if "unknown" in f.cohort} == set()
    assert monitor(watched, "max_error_rate").verdict is Verdict.PASS
    slices = [m for m in watched.monitors if m.cohort and m.rule.name == "max_error_rate"]
    assert sum(m.process.events for m in slices) == 5
    assert sum(m.n for m in slices) == 2000


def test_failures_of_one_band_are_failed_there():
    """Where only long prompts die, their slice says so, though a dead request counts no tokens."""
    receipts = []
    for i in range(400):
        long = i % 10 == 9
        fields: dict[str, Any] = {"prompt_id": f"p{i % 20}", "prompt_tokens": 5000 if long else 50}
        if long and i > 20:
            fields |= {"outcome": "error", "error_class": "server_error", "prompt_tokens": None}
        receipts.append(live(i, **fields))
    watched = watch({"max_error_rate": RuleLimit(0.2)})
    feed(watched, receipts)
    failed = [m.cohort for m in watched.monitors if m.verdict is Verdict.FAIL]
    assert failed == ["prompt >=4096"]


def test_a_request_that_took_no_time_says_nothing_of_times():
    """A clock that ran backwards, or stood still, neither stops the guard nor is a fast request."""
    watched = watch({"min_speedup": RuleLimit(1.05), "max_tpot_p95_regression": RuleLimit(0.1)})
    for i in range(4):
        seen = live(i, ("target_only", "speculative")[i % 2])
        watched.add(replace(seen, sent_ns=10**15, first_token_ns=10**15, last_token_ns=i))
        watched.add(replace(seen, sent_ns=5, first_token_ns=5, last_token_ns=5))
    assert {m.n for m in watched.monitors if m.rule.is_timed} == {0}
