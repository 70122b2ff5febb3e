"""Whether the server preserves outputs: regression cases and what else replay showed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from speccheck import stats
from speccheck.grading.blind import PreferenceSummary
from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import (
    each,
    interval,
    known,
    listed,
    part_of,
    stage_evidence,
    verdict_mark,
    words,
)
from speccheck.packet.view import Figure, Mark, Missing
from speccheck.records import Stage

NOT_JUDGED = Mark("not judged", "–", "plain")

REGRESSION_LABELS = {
    "real": "the target was not in doubt where the texts part",
    "numerical_tie": "the texts part at a tie of the target's two best tokens",
    "not_attributed": "how sure the target was where the texts part is not known",
    "sampled": "every sample of one arm passes and every one of the other fails",
}


FEATURE_MARKS = {
    "ok": Mark("pass", "✓", "good"),
    "broken": Mark("fail", "✗", "bad"),
    "unsupported": Mark("route to target-only", "→", "unsure"),
    "not_offered": Mark("not offered", "–", "unsure"),
    "ignored": Mark("ignored", "!", "unsure"),
    "unclear": Mark("inconclusive", "?", "unsure"),
}
"""Statuses of server features: what is refused or not offered is no failure."""


def replay_view(evidence: RunEvidence) -> view.ReplayView | Missing:
    """What replay showed, or why nothing is known."""
    if Stage.REPLAY not in evidence.stages:
        return Missing("the replay stage did not run")
    part = stage_evidence(evidence, Stage.REPLAY)
    cases = part_of(part, "cases", "replay checked no answers")
    regressions = part_of(part, "regressions", "replay gave no regression cases")
    found: tuple[view.Regression, ...] | Missing = (
        regressions
        if isinstance(regressions, Missing)
        else tuple(_regression(i, case) for i, case in enumerate(regressions, 1))
    )
    return view.ReplayView(
        cases=cases,
        improvements=part_of(part, "improvements", "replay did not count the mirror case"),
        bound=_bound(cases, found),
        regressions=found,
        quality=each(part, "quality", "no task was graded", _quality),
        form=each(part, "form", "the form of the answers was not looked at", _form),
        preferences=tuple(map(_preference, evidence.preferences))
        or Missing("no judge and no reviewer was asked (speccheck judge, speccheck review)"),
        divergences=_divergences(part),
        noise_floor=_noise_floor(part),
        lossless=_distributions(part),
        features=each(part, "features", "no server feature was checked", _feature),
    )


def _bound(
    cases: int | Missing, regressions: tuple[view.Regression, ...] | Missing
) -> Figure | Missing:
    """What "no regressions" leaves open: the largest true rate that n clean cases allow."""
    if isinstance(cases, Missing):
        return cases
    if isinstance(regressions, Missing):
        return regressions
    if regressions:
        return Missing("regressions were found")
    return Figure("largest true rate", stats.zero_events_bound(cases), "share")


def _regression(number: int, case: Mapping[str, Any]) -> view.Regression:
    divergence = part_of(case, "divergence", "not attributed")
    return view.Regression(
        number=number,
        prompt_id=case["prompt_id"],
        route=case["route"],
        task=case["task"],
        phase=case["phase"],
        label=words(case["label"]),
        meaning=REGRESSION_LABELS.get(case["label"], ""),
        check=case["check"],
        reason=case["reason"],
        runs=case["runs"],
        target_passes=case["target_passes"],
        speculative_passes=case["speculative_passes"],
        prompt=case["prompt"],
        target_text=case["target_text"],
        speculative_text=case["speculative_text"],
        common_chars=_common(case["target_text"], case["speculative_text"]),
        receipts=tuple(case["receipts"]),
        divergence=divergence if isinstance(divergence, Missing) else _divergence(divergence),
    )


def _common(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _divergence(case: Mapping[str, Any]) -> view.DivergenceLine:
    why = "outside the target's top k" if case["kind"] == "violation" else "the target gave no gap"
    return view.DivergenceLine(
        prompt_id=case["prompt_id"],
        route=case["route"],
        position=case["position"],
        gap=known(case["gap"], why, "nats"),
        kind=case["kind"],
        target_token=case["target_token"],
        speculative_token=case["speculative_token"],
    )


def _quality(task: Mapping[str, Any]) -> view.QualityLine:
    return view.QualityLine(
        task=task["task"],
        n=task["n"],
        target_passes=task["target_passes"],
        speculative_passes=task["speculative_passes"],
        lost=task["lost"],
        gained=task["gained"],
        flipped=part_of(task, "flipped", "target-only ran once"),
        confirmed=f"{task.get('regressions', 0)} worse, {task.get('improvements', 0)} better",
        mcnemar_p=known(task["mcnemar_p"], "nothing differed", "p"),
        difference=interval(task["difference"], "share", "no pair was graded"),
        margin=task["margin"],
        mark=verdict_mark(task["verdict"]),
        why=task["why"],
    )


def _form(found: Mapping[str, Any]) -> view.FormView:
    return view.FormView(
        temperature=found["temperature"],
        pairs=found["pairs"],
        faults=tuple(
            view.FaultLine(
                **{k: v for k, v in fault.items() if k not in ("difference", "mcnemar_p")},
                difference=interval(fault["difference"], "share", "no pair"),
                mcnemar_p=known(fault["mcnemar_p"], "nothing differed", "p"),
            )
            for fault in found["faults"]
        ),
        none_shown=listed(found["none_shown"]),
        changes=tuple(
            view.ChangeLine(
                what=change["what"],
                n=change["n"],
                changed=change["changed"],
                control=f"{change['control_changed']} of {change['control_n']}"
                if change["control_n"]
                else "no control",
                p_value=known(change["p_value"], "no control", "p"),
            )
            for change in found["changes"]
        ),
        length=interval(found["length"], "ratio", "no token counts"),
    )


def _preference(one: PreferenceSummary) -> view.PreferenceLine:
    return view.PreferenceLine(
        source=one.source,
        who=one.who,
        n=one.n,
        target_only=one.target_only,
        speculative=one.speculative,
        ties=one.ties,
        unclear=one.unclear,
        difference=interval(one.difference, "share", "no pair was judged"),
        p_value=known(one.p_value, "nothing was preferred", "p"),
    )


def _divergences(part: Mapping[str, Any]) -> view.DivergencesView | Missing:
    found = part_of(part, "divergences", "greedy outputs were not compared token by token")
    if isinstance(found, Missing):
        return found
    return view.DivergencesView(
        pairs=found["pairs"],
        tokens=found["tokens"],
        diverged=found["diverged"],
        ties=found["ties"],
        near=found["near"],
        violations=found["violations"],
        unknown=found["unknown"],
        tau=known(found["tau"], "no noise floor was measured", "nats"),
        per_1000=known(found["per_1000"], "nothing was compared", "number"),
        control_per_1000=known(found["control_per_1000"], "no A/A control was run", "number"),
        p_value=known(found["p_value"], "no A/A control was run", "p"),
        cases=tuple(_divergence(case) for case in found["cases"]),
    )


def _noise_floor(part: Mapping[str, Any]) -> view.NoiseFloorView | Missing:
    found = part_of(part, "noise_floor", "no A/A control was run")
    if isinstance(found, Missing):
        return found
    return view.NoiseFloorView(
        pairs=found["pairs"],
        tokens=found["tokens"],
        diverged=found["diverged"],
        flipped=found["flipped"],
        tau=known(found["tau"], found.get("why_no_tau") or "no gap was probed", "nats"),
        positions=found["positions"],
        content_missed=known(found["content_missed"], "no gap was probed", "share"),
        axes=tuple(
            view.NoiseAxisLine(axis["name"], Figure("", axis["largest"], "nats"), axis["n"])
            for axis in found["axes"]
        ),
    )


def _distributions(part: Mapping[str, Any]) -> view.DistributionsView | Missing:
    found = part_of(part, "lossless", "no distribution test was run")
    if isinstance(found, Missing):
        return found
    return view.DistributionsView(
        mark=verdict_mark(found["verdict"]),
        alpha=found["alpha"],
        tested=tuple(found["tested"]),
        not_tested=tuple(found["not_tested"]),
        tests=tuple(_lossless(test) for test in found["tests"]),
    )


def _lossless(test: Mapping[str, Any]) -> view.LosslessLine:
    unit = test["effect_unit"]
    control = interval(test["control"], unit, "this test has no control")
    return view.LosslessLine(
        name=test["name"],
        catches=test["catches"],
        n=test["n"],
        unit=test["unit"],
        effect=interval(test["effect"], unit, test["why"]),
        control=control if isinstance(control, Missing) else Figure("", control.value, unit),
        limit=known(test["limit"], "no limit", unit),
        seen=known(test["seen"], "does not apply", unit),
        p_value=known(test["p_value"], "does not apply", "p"),
        mark=NOT_JUDGED if test["verdict"] is None else verdict_mark(test["verdict"]),
        why=test["why"],
    )


def _feature(check: Mapping[str, Any]) -> view.FeatureLine:
    return view.FeatureLine(
        feature=check["feature"],
        checked=check["checked"],
        n=check["n"],
        target_ok=check["target_ok"],
        speculative_ok=check["speculative_ok"],
        mark=FEATURE_MARKS[check["status"]],
        why=check["why"],
    )
