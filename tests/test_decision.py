"""One decision per route, and the same decision in text, JSON, JUnit and exit code."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_receipts import pairs

from speccheck import lossless, measure, quality
from speccheck.decision import (
    Check,
    decide,
    exit_code,
    final,
    junit,
    of_kept_off,
    run_checks,
    summary_markdown,
    verdict_of,
)
from speccheck.errors import ExitCode
from speccheck.guardrails import RULES, RuleLimit, judge
from speccheck.lossless import Compared, Divergence
from speccheck.quality import Case
from speccheck.records import Action, Finding, Stage, Verdict, to_json, worst

P, I, E, F = Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL  # noqa: E741


def finding(verdict, rule="max_tpot_p95_regression", cohort="", needed=None, **fields):
    return Finding(
        rule,
        verdict,
        "chat",
        cohort,
        "shadow",
        None,
        1.1,
        "ratio",
        f"{rule} said so",
        needed,
        **fields,
    )


def parsed(report):
    return ET.fromstring(report.encode("utf-8"))  # noqa: S314 (our own report)


def decided(*findings, **how):
    return decide("chat", Stage.SHADOW, findings, k=4, **how)


@pytest.mark.parametrize(
    ("verdicts", "action", "code"),
    [
        ([P], Action.PROMOTE, ExitCode.PASS),
        ([P, P], Action.PROMOTE, ExitCode.PASS),
        ([P, I], Action.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        ([P, E], Action.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE),
        ([I, E], Action.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE),
        ([P, F], Action.FALL_BACK, ExitCode.JUDGED_BAD),
        ([I, F], Action.FALL_BACK, ExitCode.JUDGED_BAD),
        ([E, F], Action.FALL_BACK, ExitCode.JUDGED_BAD),
        ([], Action.INCONCLUSIVE, ExitCode.COULD_NOT_JUDGE),
    ],
)
def test_worst_finding_decides(verdicts, action, code):
    """Each pair of verdicts gives its action and its exit code; nothing judged is no pass."""
    found = decided(*[finding(v) for v in verdicts])
    assert (found.action, exit_code([found])) == (action, code)


@pytest.mark.parametrize("first", list(Verdict))
@pytest.mark.parametrize("second", list(Verdict))
def test_exit_code_of_two_routes_is_the_worse(first, second):
    """Pair by pair, the worse route gives the exit code."""
    one, other = decided(finding(first)), decided(finding(second))
    assert verdict_of(one) is first
    codes = {
        P: ExitCode.PASS,
        I: ExitCode.INCONCLUSIVE,
        E: ExitCode.COULD_NOT_JUDGE,
        F: ExitCode.JUDGED_BAD,
    }
    assert exit_code([one, other]) == codes[worst([first, second])]


@pytest.mark.parametrize("before", list(Verdict))
@pytest.mark.parametrize("after", list(Verdict))
def test_one_decision_per_route_has_the_exit_code_of_them_all(before, after):
    """Pair by pair, what two stages said of a route: the process and the packet exit alike."""
    shadow = decided(finding(before))
    canary = decide("chat", Stage.CANARY, [finding(after)], k=4)
    (stands,) = final([canary, shadow])
    assert exit_code([stands]) == exit_code([shadow, canary])
    assert stands.stage == (Stage.SHADOW if before > after else Stage.CANARY)


def test_nothing_decided_could_not_be_judged():
    """The worst of nothing is an error in every form."""
    assert exit_code([]) == ExitCode.COULD_NOT_JUDGE
    assert '<error type="could_not_judge"' in junit([])
    assert "nothing was decided" in summary_markdown([])


def test_k_only_where_it_is_promoted():
    """A proposal length stands on promotions alone."""
    assert decided(finding(P)).k == 4
    assert decided(finding(F)).k is None


def test_what_does_not_pay_is_held():
    """Failing the speed-up rule alone is no reason to fall back; another failure is."""
    slow = finding(F, "min_speedup")
    held = decided(slow, finding(P))
    assert held.action is Action.HOLD
    assert held.reason.startswith("it does not pay")
    assert exit_code([held]) == ExitCode.JUDGED_BAD
    assert decided(slow, finding(F)).action is Action.FALL_BACK


def test_inconclusive_says_how_many_more():
    """The largest need is asked for."""
    found = decided(finding(I, needed=40), finding(I, "max_error_rate", needed=199))
    assert found.reason.startswith("about 199 more requests are needed")


def test_a_dry_run_does_not_count():
    """A failed rule in dry run changes nothing; a route with nothing else is not judged."""
    dry = finding(F, "max_error_rate", counted=False)
    assert decided(finding(P), dry).action is Action.PROMOTE
    assert exit_code([decided(dry)]) == ExitCode.COULD_NOT_JUDGE


def test_findings_of_other_routes_do_not_count():
    """A decision is about its own route."""
    other = decide("other", Stage.SHADOW, [finding(F)])
    assert other.findings == ()
    assert other.action is Action.INCONCLUSIVE


def test_an_invalid_run_judges_nothing():
    """A late client makes the run invalid, not slow: neither pass nor fall back."""
    for verdict in (P, F):
        found = decided(finding(verdict), invalid="our own client sent 12% of requests late")
        assert found.action is Action.INCONCLUSIVE
        assert exit_code([found]) == ExitCode.COULD_NOT_JUDGE
        assert "late" in found.reason


def test_random_prompts_are_not_decisive():
    """T08: acceptance .31 on random token ids neither passes nor falls back; a violation does."""
    doubt = {"unrepresentative": "prompts are random ids"}
    found = decided(finding(F, "min_acceptance_rate"), finding(P), **doubt)
    assert found.action is Action.INCONCLUSIVE
    assert found.reason.startswith("not decisive: prompts are random ids")
    assert "own traffic" in found.reason
    assert exit_code([found]) == ExitCode.INCONCLUSIVE
    assert decided(finding(P), **doubt).action is Action.INCONCLUSIVE
    wrong = finding(F, "max_lossless_violations")
    assert decided(wrong, **doubt).action is Action.FALL_BACK


def test_the_slices_that_pass_are_named():
    """A failure at one load names the loads that pass every rule."""
    found = decided(
        finding(P, "min_acceptance_rate"),
        finding(P, cohort="concurrency 1"),
        finding(I, cohort="concurrency 32"),
        finding(F, cohort="concurrency 64"),
    )
    assert found.action is Action.FALL_BACK
    assert found.scope.startswith("fails at concurrency 64; passes at concurrency 1:")
    assert decided(finding(F)).scope == ""
    assert decided(finding(P, cohort="concurrency 1")).scope == "measured at concurrency 1"


# --- whole cases --------------------------------------------------------------------------------


def test_case_near_ties_pass():
    """T01: ties within the noise floor and no regression pass both replay rules."""
    gaps = [0.0, 0.0003, 0.0011, 0.0002, 0.0, 0.0008]
    compared = [
        Compared(f"d{i}", f"r{i}", 11, Divergence(10, 1, 2), g, lossless.classify(g, 0.0015))
        for i, g in enumerate(gaps)
    ] + [Compared(f"e{i}", f"q{i}", 60, None) for i in range(194)]
    control = compared[:5] + [Compared(f"c{i}", f"s{i}", 60, None) for i in range(195)]
    cases = [Case(f"p{i}", ("pass",) * 2, ("pass",)) for i in range(171)]
    cases += [Case(f"f{i}", ("fail",) * 2, ("fail",)) for i in range(29)]
    measurements = lossless.measure_lossless(
        compared, control, lossless.NoiseFloor(0.0015, 300, 0.01), stage="replay", route="chat"
    ) + quality.measure_quality(cases, stage="replay", route="chat", runs=3)
    rules = {"max_lossless_violations": RuleLimit(0), "max_quality_regression_cases": RuleLimit(0)}
    found = judge(rules, measurements, stage=Stage.REPLAY, route="chat")
    result = decide("chat", Stage.REPLAY, found)
    assert result.action is Action.PROMOTE
    assert "6 of 200" in summary_markdown([result])
    assert "5 of 200" in result.reason
    assert "identical" not in result.reason
    assert "proven" not in result.reason


def test_case_verification_not_enforced():
    """T02: certain divergences and 22 regressions fall back; a doubled speed does not soften it."""
    rng = np.random.default_rng(2)
    compared = [
        Compared(f"d{i}", f"r{i}", 11, Divergence(10, 1, 2), 2.9, lossless.classify(2.9, 0.1))
        for i in range(47)
    ] + [Compared(f"e{i}", f"q{i}", 60, None) for i in range(33)]
    cases = [Case(f"w{i}", ("pass",) * 3, ("fail",) * 3) for i in range(22)]
    cases += [Case(f"p{i}", ("pass",) * 2, ("pass",)) for i in range(51)]
    cases += [Case(f"f{i}", ("fail",) * 2, ("fail",)) for i in range(7)]
    replay = judge(
        {
            "max_lossless_violations": RuleLimit(0),
            "max_quality_regression_cases": RuleLimit(0),
            "min_acceptance_rate": RuleLimit(0.55),
        },
        lossless.measure_lossless(
            compared,
            compared[:1] + compared[47:],
            lossless.NoiseFloor(0.1, 300, 0.01),
            stage="replay",
            route="chat",
        )
        + quality.measure_quality(cases, stage="replay", route="chat", runs=3)
        + measure.measure_route(
            pairs(rng, 80, target_ms=22.8, speculative_ms=11.2, acceptance=0.71, stage="replay"),
            stage="replay",
            route="chat",
            rng=rng,
        ),
        stage=Stage.REPLAY,
        route="chat",
    )
    verdicts = {f.rule: f.verdict for f in replay}
    assert verdicts["max_lossless_violations"] is F
    assert verdicts["max_quality_regression_cases"] is F
    assert verdicts["min_acceptance_rate"] is P
    result = decide("chat", Stage.REPLAY, replay)
    assert result.action is Action.FALL_BACK
    assert "47 lossless violations" in result.reason
    assert "22 confirmed quality regressions" in result.reason


def test_case_crossover():
    """T10: TPOT fails at 64 alone, 1 and 16 pass, and acceptance passes everywhere."""
    rng = np.random.default_rng(10)
    receipts = []
    for j, (load, b, s) in enumerate(
        ((1, 14.1, 8.9), (16, 18.8, 16.0), (32, 22.4, 23.1), (64, 30.6, 39.5))
    ):
        receipts += pairs(
            rng,
            300,
            target_ms=b,
            speculative_ms=s,
            acceptance=0.58,
            concurrency=load,
            phase=f"load-{load}",
            first=300 * j,
            noise=0.02,
        )
    found = judge(
        {"max_tpot_p95_regression": RuleLimit(0.05), "min_acceptance_rate": RuleLimit(0.5)},
        measure.measure_route(receipts, stage="shadow", route="chat", rng=rng),
        stage=Stage.SHADOW,
        route="chat",
    )
    tpot = {f.cohort: f for f in found if f.rule == "max_tpot_p95_regression"}
    assert tpot["concurrency 1"].verdict is tpot["concurrency 16"].verdict is P
    assert tpot["concurrency 32"].verdict is not F
    assert tpot["concurrency 64"].verdict is F
    assert tpot["concurrency 64"].estimate.value == pytest.approx(1.291, abs=0.03)
    assert "" not in tpot
    assert {f.verdict for f in found if f.rule == "min_acceptance_rate"} == {P}
    result = decide("chat", Stage.SHADOW, found)
    assert result.action is Action.FALL_BACK
    assert "passes at concurrency 1, concurrency 16" in result.scope


# --- one decision, many forms -------------------------------------------------------------------

findings_strategy = st.lists(
    st.builds(
        finding,
        st.sampled_from(list(Verdict)),
        rule=st.sampled_from(sorted(RULES)),
        cohort=st.sampled_from(["", "concurrency 1", "concurrency 64"]),
        needed=st.none() | st.integers(1, 500),
        counted=st.booleans(),
    ),
    max_size=6,
)
doubt = st.sampled_from(["", "a reason"])


@given(st.lists(st.tuples(findings_strategy, doubt, doubt)))
def test_text_json_junit_and_exit_code_agree(routes):
    """Whatever was found, every form of the result says the same."""
    decisions = [
        decided(*findings, invalid=invalid, unrepresentative=unrepresentative)
        for findings, invalid, unrepresentative in routes
    ]
    code = exit_code(decisions)
    suites = parsed(junit(decisions)).findall("testsuite")
    red = {
        case.tag for suite in suites for case in suite.iter() if case.tag in ("failure", "error")
    }
    assert bool(red) is (code is not ExitCode.PASS)
    markdown = summary_markdown(decisions)
    assert f"Exit code {int(code)}: {code.meaning}." in markdown
    plain = to_json(decisions)
    assert (code is ExitCode.PASS) is (bool(plain) and all(d["action"] == "promote" for d in plain))
    for decision, suite in zip(decisions, suites, strict=bool(decisions)):
        verdict = verdict_of(decision)
        own = suite.find("testcase[@name='decision']")
        kinds = {P: None, I: "inconclusive", E: "could_not_judge", F: "fail"}
        marks = [child.get("type") for child in own]
        assert marks == ([kinds[verdict]] if kinds[verdict] else [])
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("errors")) == len(suite.findall("testcase/error"))
        assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped"))
        assert int(suite.get("tests")) == len(suite.findall("testcase"))
        assert f"**{decision.action.replace('_', ' ')}**" in markdown
        assert decision.reason
        if verdict is P:
            assert all(f.verdict is P for f in decision.findings if f.counted)
        if any(f.verdict is F and f.counted for f in decision.findings):
            assert decision.action is not Action.PROMOTE


HOSTILE = "x\x00\x1b[31m\u202e<script>|`]]>&\ud800\n| pass |"


def test_hostile_text_stays_text():
    """Names and messages from servers cannot break the XML or the table, or become markup."""
    bad = Finding("max_error_rate", F, HOSTILE, HOSTILE, "shadow", None, 0.01, "share", HOSTILE)
    found = decide(HOSTILE, Stage.SHADOW, [bad])
    report = junit([found])
    root = parsed(report)
    assert root.find("testsuite").get("failures") == "2"
    markdown = summary_markdown([found])
    assert "<script>" not in markdown
    assert "\u202e" not in markdown + report
    rows = [line for line in markdown.splitlines() if line.startswith("| x")]
    assert len(rows) == 2


@given(st.text(max_size=40))
def test_any_text_gives_well_formed_xml(text):
    """Characters that XML cannot hold are written as escapes."""
    found = decide("chat", Stage.SHADOW, [finding(F, cohort=text)])
    parsed(junit([found]))


def test_checks_beside_routes_agree_in_every_form():
    """A fixture that failed, or passed alone, says the same in exit code, JUnit and summary."""
    for verdict, code in (
        (Verdict.PASS, ExitCode.PASS),
        (Verdict.FAIL, ExitCode.JUDGED_BAD),
        (Verdict.ERROR, ExitCode.COULD_NOT_JUDGE),
    ):
        checks = [Check("fixture", verdict, "because")]
        assert exit_code([], checks) is code
        report = parsed(junit([], checks))
        red = report.findall(".//failure") + report.findall(".//error")
        assert bool(red) == (code is not ExitCode.PASS)
        assert f"Exit code {int(code)}" in summary_markdown([], checks)


# --- what the eligibility policy keeps off ------------------------------------------------------

REASON = "eligibility policy: rule 'sampled': 2 regressions"


def test_what_the_policy_excludes_does_not_block_and_is_said() -> None:
    """A failure confined to what the policy keeps off is shown, not counted; the scope says so."""
    outside = of_kept_off([finding(F), finding(F, cohort="temperature mid"), finding(I)])
    assert [f.cohort for f in outside] == [
        "kept off by policy",
        "kept off by policy, temperature mid",
    ]
    made = decided(finding(P), *outside, kept_off={REASON: 45}, requests=90)
    assert made.action is Action.PROMOTE
    assert made.scope == (
        "the eligibility policy keeps 45 of 90 requests on target-only (45: rule 'sampled': "
        "2 regressions), where max_tpot_p95_regression would fail"
    )
    assert made.findings[1:] == tuple(outside), "they stay visible"


def test_without_the_policy_the_same_failure_blocks() -> None:
    """The check above can fail: counted, it is a fallback."""
    assert decided(finding(P), finding(F)).action is Action.FALL_BACK
    also = decided(finding(F), *of_kept_off([finding(F)]), kept_off={REASON: 45}, requests=90)
    assert also.action is Action.FALL_BACK, "what may speculate failed too"


def test_a_route_of_which_nothing_may_speculate_is_held() -> None:
    """Nothing was judged, and nothing is promoted: it stays on target-only as the policy says."""
    made = decided(finding(E), kept_off={REASON: 90}, requests=90)
    assert made.action is Action.HOLD
    assert "none of its requests" in made.reason
    assert "rule 'sampled'" in made.scope


def test_the_fixture_and_the_packet_are_judged_in_one_place():
    """A refused fixture and a missing view each fail the run, with the reason; a pass says why."""
    assert run_checks({}, ()) == []
    stages = {"fixture": {"verdict": "fail", "reasons": ["lossy"]}}
    checks = run_checks(stages, ["service latency"])
    assert [(c.name, c.verdict, c.why) for c in checks] == [
        ("packet", Verdict.FAIL, "no service latency view"),
        ("fixture", Verdict.FAIL, "lossy"),
    ]
    (passed,) = run_checks({"fixture": {"verdict": "pass", "reasons": []}}, ())
    assert passed.verdict is Verdict.PASS
    assert "exact law" in passed.why
