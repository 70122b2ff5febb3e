"""Rules with their cases: pass, fail, too little, no data; and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from rule_receipts import pairs, receipt

from speccheck import battery, drift, grading, guardrails, lossless, measure, quality, slices, stats
from speccheck.config import IMPLIED, load_guardrails
from speccheck.errors import UsageError
from speccheck.grading import Structured
from speccheck.guardrails import RULES, RuleLimit, judge
from speccheck.lossless import Compared, Divergence
from speccheck.quality import Case
from speccheck.records import Estimate, Measurement, Stage, Verdict
from speccheck.slices.checks import Check

CASES = YAML(typ="safe").load(Path(__file__).parent / "cases" / "rules.yaml")
VERDICTS = {
    "pass": Verdict.PASS,
    "fail": Verdict.FAIL,
    "too_little": Verdict.INCONCLUSIVE,
    "undecided": Verdict.INCONCLUSIVE,
    "no_data": Verdict.ERROR,
}


def looked(n: int, target: int, speculative: int) -> list[drift.Looked]:
    """Pairs of which the first few ran to the token limit on one arm, other few on the other."""
    seen = grading.see("Some words that say little.")
    sides = [drift.Look(seen, finish_reason="stop"), drift.Look(seen, finish_reason="length")]
    return [
        drift.Looked(f"p{i}", sides[i < target], sides[n - i <= speculative], receipt_id=f"r{i}")
        for i in range(n)
    ]


def measurements(data: dict[str, Any], stage: Stage) -> list[Measurement]:
    """Synthetic evidence of one stage, measured as the stages measure it."""
    rng = np.random.default_rng(7)
    if "quality" in data:
        runs = {"agree": ("pass", "pass"), "regression": ("pass", "fail")}
        cases = [
            Case(f"{kind}{i}", (runs[kind][0],) * 3, (runs[kind][1],) * 3)
            for kind in runs
            for i in range(data["quality"].get(kind, 0))
        ]
        cases += [
            Case(f"c{i}", ("pass", "pass"), ("fail",))
            for i in range(data["quality"].get("candidate", 0))
        ]
        return quality.measure_quality(cases, stage=stage, route="chat", runs=3)
    if "drift" in data:
        return drift.measure_drift(looked(**data["drift"]), stage=stage, route="chat")
    if "greedy" in data:
        equal = [Compared(f"p{i}", f"r{i}", 60, None) for i in range(data["greedy"]["equal"])]
        parted = [
            Compared(f"d{i}", f"s{i}", 11, Divergence(10, 1, 2), gap, lossless.classify(gap, 0.1))
            for i, gap in enumerate(data["greedy"]["gaps"])
        ]
        floor = lossless.NoiseFloor(0.1, 300, 0.01)
        return lossless.measure_lossless(equal + parted, equal, floor, stage=stage, route="chat")
    if "slices" in data:
        items = [
            slices.Item(f"p{i}", "chat", 0, Check("ok"), Check(outcome), f"r{i}", kept_off=False)
            for outcome, n in data["slices"].items()
            for i in range(n)
        ]
        return slices.measure({"stop": items}, route="chat")
    if "tests" in data:
        n = data["tests"]["tokens"]
        tests = tuple(
            battery.judge(
                "T6",
                stats.Fit(1, p, n, Estimate(e, e - 0.01, e + 0.01, n, "m", 0.05), 0.01),
                None,
                p,
                0.04,
            )
            for e in data["tests"]["effects"]
            for p in [1e-9 if e > 0.1 else 0.2]
        )
        found = battery.Battery(tests, n, n, n, 4, n // 24, 0.04)
        return [battery.measurement(found, "no sample came back", stage=stage, route="chat")]
    if "structured" in data:
        valid, n = data["structured"]["valid"], data["structured"]["n"]
        graded = [
            Structured("speculative", f"p{i}", f"r{i}", "pass" if i < valid else "fail")
            for i in range(n)
        ]
        return grading.measure_structured_validity(graded, stage=stage, route="chat")
    if "protected" in data:
        receipts = []
        for number in range(10 * data["protected"]["blocks"]):
            block = number // 10
            loaded = block % 4 in (1, 2)
            delay = data["protected"]["delay"] if loaded else 1
            fields = {"block": block, "phase": "protected", "stage": stage}
            spread = rng.lognormal(0, 0.05)
            receipts.append(
                receipt(
                    number,
                    "target_only",
                    priority="protected",
                    tpot_ms=20 * delay * spread,
                    ttft_ms=50 * delay * spread,
                    **fields,
                )
            )
            if loaded:
                receipts.append(receipt(10_000 + number, "speculative", **fields))
        return measure.measure_protected(receipts, stage=stage, route="chat")
    receipts = []
    if "pairs" in data:
        plan = dict(data["pairs"])
        if plan.pop("counts", "") == "none":
            plan |= {"proposed_tokens": None}
        receipts = pairs(rng, plan.pop("n"), stage=stage, **plan)
    if "change" in data:
        change = dict(data["change"])
        arm, count = change.pop("arm"), change.pop("count")
        chosen = [r.receipt_id for r in receipts if r.arm == arm][:count]
        receipts = [replace(r, **change) if r.receipt_id in chosen else r for r in receipts]
    return measure.measure_route(receipts, stage=stage, route="chat", rng=rng)


@pytest.mark.parametrize(
    ("rule", "case"),
    [(rule, case) for rule, cases in CASES.items() for case in cases if case != "limit"],
)
def test_rule_case(rule, case):
    """Each case of each rule gets its verdict, its sentence, and, if open, what is missing."""
    spec = CASES[rule][case]
    stage = RULES[rule].stages[-1] if case != "no_data" else RULES[rule].stages[0]
    if rule == "max_protected_delay" and case == "no_data":
        found = judge({rule: RuleLimit(0.03)}, [], stage=stage, route="chat")
    else:
        found = judge(
            {rule: RuleLimit(CASES[rule]["limit"])},
            measurements(spec["data"], stage),
            stage=stage,
            route="chat",
        )
    finding = next(f for f in found if f.rule == rule)
    expected = Verdict[spec["verdict"].upper()] if "verdict" in spec else VERDICTS[case]
    assert finding.verdict is expected, finding.why
    assert spec["why"] in finding.why
    assert finding.cohort == (battery.SLICE if rule == "max_sampled_violations" else "")
    if case == "too_little":
        counts = RULES[rule].counts
        assert finding.needed or f"more {counts} are needed" in finding.why


def test_every_rule_has_its_cases():
    """Pass, fail and no data for each rule; too little for each that has a minimum."""
    assert set(CASES) == set(RULES)
    for name, cases in CASES.items():
        wanted = {"limit", "pass", "fail", "no_data"}
        if RULES[name].min_n > 1:
            wanted.add("too_little")
        assert wanted <= set(cases), name


def test_every_rule_names_a_metric_that_someone_emits():
    """No rule waits for a metric that nothing measures."""
    emitted = {
        m.metric
        for data, stage in (
            ({"pairs": {"n": 20}}, Stage.CANARY),
            ({"quality": {"agree": 5}}, Stage.REPLAY),
            ({"drift": {"n": 5, "target": 0, "speculative": 0}}, Stage.REPLAY),
            ({"greedy": {"equal": 5, "gaps": []}}, Stage.REPLAY),
            ({"tests": {"tokens": 5, "effects": []}}, Stage.REPLAY),
            ({"structured": {"valid": 5, "n": 5}}, Stage.REPLAY),
            ({"slices": {"ok": 5}}, Stage.REPLAY),
            ({"protected": {"blocks": 8, "delay": 1}}, Stage.SHADOW),
        )
        for m in measurements(data, stage)
    }
    assert {rule.metric for rule in RULES.values()} <= emitted


def test_the_shipped_block_loads_and_names_real_rules():
    """The block of the design loads as it stands, percent strings included."""
    path = Path(__file__).parent.parent / "rules" / "guardrails.yaml"
    limits = load_guardrails(path).limits("any")
    assert limits == {
        "min_acceptance_rate": 0.55,
        "max_tpot_p95_regression": 0.10,
        "max_error_rate": 0.01,
        "max_quality_regression_cases": 0,
        **IMPLIED,
    }
    assert set(limits) <= set(RULES)


def test_config_and_rules_agree():
    """Every rule can be set in the configuration, and nothing else can."""
    from speccheck.config import RuleLimits

    assert set(RuleLimits.model_fields) == set(RULES)


def test_the_commented_rules_are_real():
    """What the shipped file shows as a comment loads once it is no comment any more."""
    text = (Path(__file__).parent.parent / "rules" / "guardrails.yaml").read_text()
    shown = {
        line.split("#", 1)[1].split(":")[0].strip()
        for line in text.splitlines()
        if line.startswith("  # m") and ":" in line
    }
    assert shown < set(RULES)
    assert len(shown) >= 12


def test_an_unknown_rule_is_an_error():
    """A misspelt rule is refused, not ignored."""
    with pytest.raises(UsageError, match="min_acceptence_rate"):
        judge({"min_acceptence_rate": RuleLimit(0.5)}, [], stage=Stage.SHADOW, route="chat")


# --- the interval decides -----------------------------------------------------------------------


def measured(
    low: float,
    value: float,
    high: float,
    *,
    metric: str = "tpot_p95_ratio",
    n: int = 500,
    cohort: str = "",
    share: float = 1.0,
    fail_scale: float = 1.0,
) -> Measurement:
    """A measurement whose limits at all small levels are those given, widened by a scale."""
    wide = (low - (fail_scale - 1), high + (fail_scale - 1))
    return Measurement(
        metric,
        "shadow",
        "chat",
        cohort,
        Estimate(value, low, high, n, "given", 0.05),
        fail_estimates=tuple(
            Estimate(value, *wide, n, "given", level) for level in stats.FAIL_LEVELS
        ),
        share=share,
    )


def verdict(m: Measurement, limit: float = 0.10, rule: str = "max_tpot_p95_regression", **how):
    found = judge({rule: RuleLimit(limit)}, [m], stage=Stage.SHADOW, route="chat", **how)
    return next(f for f in found if f.rule == rule)


bounds = st.tuples(*[st.floats(0.5, 2.0)] * 3).map(sorted)


@given(bounds)
def test_interval_decides_wholly(limits):
    """Inside passes, outside fails, across is inconclusive, for any interval."""
    low, value, high = limits
    found = verdict(measured(low, value, high))
    expected = Verdict.FAIL if low > 1.1 else Verdict.PASS if high <= 1.1 else Verdict.INCONCLUSIVE
    assert found.verdict is expected


@given(bounds, st.integers(0, 2))
def test_nan_is_never_a_pass(limits, where):
    """A NaN in any place of an estimate does not pass."""
    broken = [*limits]
    broken[where] = math.nan
    found = verdict(measured(*broken))
    assert found.verdict is not Verdict.PASS


def test_a_limit_is_met_by_reaching_it():
    """An interval that ends exactly on the limit is inside."""
    assert verdict(measured(1.0, 1.05, 1 + 0.10)).verdict is Verdict.PASS


def test_rounding_does_not_turn_a_miss_into_a_hit():
    """A value just over the limit is shown with the digits that tell it from the limit."""
    found = verdict(measured(1.100005, 1.100006, 1.100007))
    assert found.verdict is Verdict.FAIL
    assert "+10.001%" in found.why


def test_a_failure_needs_the_small_level():
    """Outside at 5 % but not at 1 % is not yet a failure."""
    found = verdict(measured(1.12, 1.15, 1.2, fail_scale=1.05))
    assert found.verdict is Verdict.INCONCLUSIVE


def test_many_cohorts_make_failing_harder():
    """One failure in 60 looks needs a smaller level than one in one look (Holm)."""

    def levels(low_at: float) -> Measurement:
        m = measured(1.12, 1.15, 1.2, cohort="concurrency 1")
        estimates = tuple(
            replace(e, low=1.12 if e.alpha >= low_at else 1.0) for e in m.fail_estimates
        )
        return replace(m, fail_estimates=estimates)

    others = [measured(0.8, 0.9, 1.0, cohort=f"concurrency {i}") for i in range(2, 61)]
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}

    def worst(found):
        return next(f for f in found if f.cohort == "concurrency 1").verdict

    at_005, at_0001 = (
        worst(judge(rules, [levels(a), *others], stage=Stage.SHADOW, route="chat"))
        for a in (0.005, 0.0001)
    )
    assert verdict(levels(0.005)).verdict is Verdict.FAIL
    assert (at_005, at_0001) == (Verdict.INCONCLUSIVE, Verdict.FAIL)


def test_family_of_healthy_slices_rarely_fails():
    """With 20 slices exactly on the limit, at most 3 in 60 runs see a failure (level .01)."""
    rng = np.random.default_rng(3)
    rules = {"min_acceptance_rate": RuleLimit(0.5)}
    alarms = 0
    for _ in range(60):
        found = []
        for i in range(20):
            accepted = rng.binomial(100, np.clip(rng.normal(0.5, 0.1, 60), 0, 1))

            def estimate(a: float, accepted=accepted) -> Estimate:
                return stats.acceptance_rate(accepted, [100] * 60, alpha=a)

            found.append(
                Measurement(
                    "acceptance_rate",
                    "shadow",
                    "chat",
                    f"concurrency {i}",
                    estimate(0.05),
                    fail_estimates=tuple(estimate(a) for a in (0.01, 0.0005, 0.0001)),
                )
            )
        verdicts = {f.verdict for f in judge(rules, found, stage=Stage.SHADOW, route="chat")}
        alarms += Verdict.FAIL in verdicts
    assert alarms <= 3


def test_a_small_slice_must_not_fail_but_need_not_pass():
    """Under a tenth of the requests an open slice is shown and not counted, a failed one counts."""
    whole = measured(0.8, 0.9, 1.0)
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    for low, high, is_counted in ((0.9, 1.3, False), (1.2, 1.3, True)):
        small = measured(low, 1.25, high, cohort="prompt >=4096", share=0.05)
        found = judge(rules, [whole, small], stage=Stage.SHADOW, route="chat")
        finding = next(f for f in found if f.cohort)
        assert finding.counted is is_counted
    assert verdict(measured(0.9, 1.25, 1.3, cohort="x", share=0.5)).counted


def test_noise_floor_makes_a_gate_untestable():
    """Where target-only differs from itself by 8 %, a change of 9 % is neither pass nor fail."""
    floor = {"tpot_p95_ratio": Estimate(1.0, 0.93, 1.08, 200, "A/A", 0.05)}
    within = measured(1.02, 1.04, 1.06)
    beyond = measured(1.12, 1.14, 1.16)
    assert verdict(within).verdict is Verdict.PASS
    assert verdict(beyond).verdict is Verdict.FAIL
    for m in (within, beyond):
        found = verdict(m, noise_floors=floor)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "noise floor" in found.why
    clear = verdict(measured(0.6, 0.65, 0.7), noise_floors=floor)
    assert clear.verdict is Verdict.PASS
    awful = verdict(measured(1.4, 1.5, 1.6), noise_floors=floor)
    assert awful.verdict is Verdict.FAIL
    quiet = {"tpot_p95_ratio": Estimate(1.0, 0.99, 1.01, 200, "A/A", 0.05)}
    assert verdict(within, noise_floors=quiet).verdict is Verdict.PASS


def test_dry_run_is_shown_and_not_counted():
    """A rule in dry run keeps its verdict."""
    found = judge(
        {"max_tpot_p95_regression": RuleLimit(0.10, counted=False)},
        [measured(1.2, 1.3, 1.4)],
        stage=Stage.SHADOW,
        route="chat",
    )
    finding = next(f for f in found if f.rule == "max_tpot_p95_regression")
    assert (finding.verdict, finding.counted) == (Verdict.FAIL, False)


def test_minimum_n_can_be_set():
    """The user's own minimum replaces the built-in one."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10, min_n=1000)}
    found = judge(rules, [measured(0.8, 0.9, 1.0)], stage=Stage.SHADOW, route="chat")
    finding = next(f for f in found if f.rule == "max_tpot_p95_regression")
    assert (finding.verdict, finding.needed) == (Verdict.INCONCLUSIVE, 500)


def test_refusals_are_judged_wherever_errors_are():
    """T13: with only an error rule set, 10 % refused requests fail under their own name."""
    spec = CASES["max_unsupported_requests"]["fail"]["data"]
    found = judge(
        {"max_error_rate": RuleLimit(0.01)},
        measurements(spec, Stage.SHADOW),
        stage=Stage.SHADOW,
        route="chat",
    )
    assert found[0].rule == "max_unsupported_requests"
    assert found[0].verdict is Verdict.FAIL
    assert "not by chance" in found[0].why
    assert next(f for f in found if f.rule == "max_error_rate").verdict is not Verdict.FAIL


def test_a_dead_drafter_fails_with_a_hint():
    """T06: 0 of 6630 drafted tokens accepted is a failure, not missing data, with a hint."""
    data = measure.acceptance_from_counters(0, 6630, 12, stage="shadow", route="chat")
    found = verdict(data, 0.55, "min_acceptance_rate")
    assert found.verdict is Verdict.FAIL
    assert "0 of 6630 drafted tokens accepted" in found.why
    assert "wrong method name" in found.why


def test_a_hidden_slice_fails():
    """T12: the total passes .40, the long prompts at .06 fail."""
    rng = np.random.default_rng(1)
    receipts = [
        receipt(i, "speculative", prompt_tokens=n, proposed_tokens=d, accepted_tokens=a)
        for i, (n, d, a) in enumerate(
            [(500, 120, int(a)) for a in rng.binomial(120, 0.55, 420)]
            + [(20000, 290, int(a)) for a in rng.binomial(290, 0.06, 30)]
        )
    ]
    found = judge(
        {"min_acceptance_rate": RuleLimit(0.40)},
        measure.measure_route(receipts, stage="shadow", route="chat", rng=rng),
        stage=Stage.SHADOW,
        route="chat",
    )
    verdicts = {f.cohort: f.verdict for f in found if f.rule == "min_acceptance_rate"}
    assert verdicts[""] is Verdict.PASS
    assert verdicts["prompt >=4096"] is Verdict.FAIL
    assert verdicts["prompt 256-1023"] is Verdict.PASS


def test_a_measurement_of_another_stage_or_route_does_not_count():
    """Judging a stage in which nothing was measured is an error, whatever other stages found."""
    rules = {"max_tpot_p95_regression": RuleLimit(0.10)}
    for stage, route in ((Stage.CANARY, "chat"), (Stage.SHADOW, "other")):
        found = judge(rules, [measured(0.8, 0.9, 1.0)], stage=stage, route=route)
        assert {f.verdict for f in found} == {Verdict.ERROR}
    assert judge(rules, [], stage=Stage.REPLAY, route="chat") == ()


def test_each_rule_states_what_it_means():
    """The reference table has a sentence for each rule."""
    assert all(rule.meaning.endswith(".") for rule in RULES.values())
    assert all(rule.min_n_fail <= rule.min_n for rule in RULES.values())
    assert guardrails.ALPHA_FAIL in stats.FAIL_LEVELS


# --- what is judged although nobody set it ------------------------------------------------------


def judged_quality(data, **limits):
    """Findings of replay for a quality case of the rule cases, by (rule, cohort)."""
    rules = {"max_quality_regression_cases": RuleLimit(100)} | limits
    found = judge(rules, measurements(data, Stage.REPLAY), stage=Stage.REPLAY, route="chat")
    return {(f.rule, f.cohort): f for f in found}


def test_the_aggregate_must_not_fail_and_need_not_pass_unless_it_is_set():
    """Beside the count, the loss of passes counts where it fails; open, it is only shown."""
    few = judged_quality({"quality": {"agree": 50}})["max_quality_loss", ""]
    assert (few.verdict, few.counted) == (Verdict.INCONCLUSIVE, False)
    assert "it was not set, so it need not pass, it must not fail" in few.why
    lost = judged_quality({"quality": {"agree": 80, "regression": 20}})["max_quality_loss", ""]
    assert (lost.verdict, lost.counted) == (Verdict.FAIL, True)
    asked = judged_quality({"quality": {"agree": 50}}, max_quality_loss=RuleLimit(0.02))
    assert asked["max_quality_loss", ""].counted
    unseen = judged_quality({"quality": {"agree": 50}})["max_output_drift", ""]
    assert (unseen.verdict, unseen.counted) == (Verdict.ERROR, False)


def test_a_rule_in_dry_run_takes_its_implied_ones_along():
    """Nobody asked for them to count."""
    dry = RuleLimit(0, counted=False)
    found = judge(
        {"max_quality_regression_cases": dry},
        measurements({"quality": {"agree": 80, "regression": 20}}, Stage.REPLAY),
        stage=Stage.REPLAY,
        route="chat",
    )
    assert {f.counted for f in found} == {False}


def test_each_task_must_pass_where_the_loss_is_set():
    """A task of its own that is open keeps the rule open; unset, only one that fails is shown."""
    cases = [Case(f"a{i}", ("pass",) * 2, ("pass",), cohort="json") for i in range(300)]
    cases += [Case(f"b{i}", ("pass",) * 2, ("pass",), cohort="sql") for i in range(60)]
    made = quality.measure_quality(cases, stage="replay", route="chat", runs=3)
    for limits, shown in (
        ({"max_quality_regression_cases": RuleLimit(0)}, {""}),
        ({"max_quality_loss": RuleLimit(0.02)}, {"", "json", "sql"}),
    ):
        found = judge(limits, made, stage=Stage.REPLAY, route="chat")
        losses = {f.cohort: f.verdict for f in found if f.rule == "max_quality_loss"}
        assert set(losses) == shown
    assert losses == {"": Verdict.PASS, "json": Verdict.PASS, "sql": Verdict.INCONCLUSIVE}


# --- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "limit", "text"),
    [
        ("max_error_rate", 0.01, "299 clean requests, 358 where it is looked at all the time"),
        ("max_tpot_p95_regression", 0.1, "about 124 requests if 10% faster, 548 if not"),
        ("min_acceptance_rate", 0.55, "60 requests"),
        ("max_unsupported_requests", 0, ""),
        ("max_error_rate", 0.0, "no number of requests passes it"),
    ],
)
def test_what_a_rule_will_take_is_told_before_a_run(rule, limit, text):
    """The sample sizes of STATS 4.2, 4.3 and 4.6, for those who size a rollout."""
    assert guardrails.planned_need(RULES[rule], RuleLimit(limit)) == text


def test_a_tail_too_thin_for_a_limit_asks_for_the_existence_minimum():
    """A p95 of 30 pairs has no upper limit however fast they are; 42 more and one exists."""
    data = measure.measure_route(
        pairs(np.random.default_rng(1), 30, speculative_ms=10),
        stage="shadow",
        route="chat",
        rng=np.random.default_rng(1),
    )
    found = judge(
        {"max_tpot_p95_regression": RuleLimit(0.1, min_n=20)},
        data,
        stage=Stage.SHADOW,
        route="chat",
    )[0]
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "no bound" in found.why
    assert found.needed == stats.existence_minimum(0.95, 0.025) - 30 == 42


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.PASS])
def test_a_loop_that_a_monitor_has_failed_stays_failed(verdict: Verdict) -> None:
    """After a fallback few answers run long, so the interval of now may not tell a loop any more:
    nothing but a reset undoes a failure.
    """
    high = Estimate(0.97, 0.95, 0.99, 80, "test", 0.05)
    cut = Estimate(0.08, 0.02, 0.2, 80, "test", 0.05)
    found = judge(
        {"max_acceptance_rate": RuleLimit(0.9)},
        [
            Measurement("acceptance_rate", Stage.CANARY, "chat", "", high),
            Measurement("length_finish_rate", Stage.CANARY, "chat", "", cut, "6 of 80"),
        ],
        stage=Stage.CANARY,
        route="chat",
        standings={("max_acceptance_rate", ""): guardrails.Standing(verdict)},
    )
    assert [f.verdict for f in found] == [verdict]
