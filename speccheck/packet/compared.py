"""What was compared with what, and what the comparison does not prove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speccheck import stats
from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import (
    ARM_NAMES,
    STAGES,
    counted,
    listed,
    load_name,
    part_of,
    stage_evidence,
)
from speccheck.packet.settings import setting_lines, setting_text, without_userinfo
from speccheck.packet.view import Figure, Missing
from speccheck.records import Arm, Outcome, Stage


def comparison_view(evidence: RunEvidence) -> view.ComparisonView:
    """Arms, what differs between them, versions, digests, machine and the rollout."""
    run = evidence.run
    waived = run.get("waived", {})
    return view.ComparisonView(
        arms=tuple(
            view.ArmView(
                arm=ARM_NAMES.get(arm["arm"], arm["arm"]),
                url=without_userinfo(arm["url"]),
                engine=arm["engine"],
                model=arm["model"],
                engine_config_id=arm["engine_config_id"],
                speculative_config=setting_lines(arm["speculative_config"] or {}),
                config=setting_lines(arm["config"]),
            )
            for arm in evidence.arms
        ),
        differences=tuple(
            view.DifferenceLine(
                key=key,
                target_only=setting_text(key, target),
                speculative=setting_text(key, speculative),
                waived=waived.get(key, ""),
            )
            for key, (target, speculative) in run.get("differences", {}).items()
        ),
        versions=setting_lines(run.get("versions", {})),
        digests=setting_lines(run.get("digests", {})),
        traffic=_traffic(run.get("traffic", ())),
        machine=setting_lines(run.get("machine", {})),
        config=setting_lines(run.get("config", {})),
        seed=str(run.get("seed", "not recorded")),
    )


_SHOWN = 20
"""Cohorts of the traffic mix that are shown; the smaller ones are summed up."""


def _traffic(mix: Sequence[Mapping[str, Any]]) -> tuple[view.TrafficLine, ...]:
    lines = [
        view.TrafficLine(one["cohort"], one["n"], Figure("", one["share"], "share"))
        for one in mix[:_SHOWN]
    ]
    if rest := mix[_SHOWN:]:
        share = Figure("", sum(one["share"] for one in rest), "share")
        name = counted(len(rest), "smaller cohort")
        lines.append(view.TrafficLine(name, sum(one["n"] for one in rest), share))
    return tuple(lines)


_NOT_BETTER = (
    "Speculation is a scheduling optimisation, not a better model. Nothing here says that an "
    "answer is good; it says whether the speculative arm answers as target-only does, and how fast."
)
_SAMPLED = (
    "Sampled outputs (temperature above 0) cannot be proved identical by testing. The fixture "
    "proves the algorithm exactly on its table; tests on a live server only bound a deviation."
)
_GREEDY = (
    "Equal greedy outputs are evidence for these prompts alone. Divergences within the noise floor "
    "are what the target does to itself; they are not proof of identity."
)
_EMBEDDED = (
    "The embedded engine runs a small model on a CPU. Its times and ratios are not GPU figures and "
    "forecast none."
)
_OPEN = (
    "A pass holds for the cohorts with enough requests. Where a table says “inconclusive” or “not "
    "measured”, nothing was shown either way."
)


def not_proved(evidence: RunEvidence) -> tuple[view.Sentence, ...]:
    """The limits of this very run, with its numbers."""
    sentences: list[view.Sentence] = [(_NOT_BETTER,), (_covered(evidence),)]
    part = stage_evidence(evidence, Stage.REPLAY)
    cases = part_of(part, "cases", "")
    if not isinstance(cases, Missing) and not part.get("regressions", ()):
        before = (
            f"No regression case in {cases:,} checked cases is not a rate of zero: the true rate "
            "may be as high as "
        )
        sentences.append((before, Figure("", stats.zero_events_bound(cases), "share"), _ONE_SIDED))
    served = [r for r in evidence.receipts if not r.warm_up and r.arm == Arm.SPECULATIVE]
    if served:
        failed = sum(r.outcome != Outcome.OK for r in served)
        rate = stats.clopper_pearson(failed, len(served), alpha=0.05)
        before = (
            f"{failed:,} of {len(served):,} requests on the speculative arm did not complete; the "
            "true share may be as high as "
        )
        sentences.append((before, Figure("", rate.high, "share"), _ONE_SIDED))
    sentences += [(_SAMPLED,), (_GREEDY,)]
    if any("embedded" in str(arm["engine"]).lower() for arm in evidence.arms):
        sentences.append((_EMBEDDED,))
    return (*sentences, (_OPEN,))


_ONE_SIDED = " (one-sided 95 % bound)."


def _covered(evidence: RunEvidence) -> str:
    measured = [r for r in evidence.receipts if not r.warm_up]
    prompts = counted(len({r.prompt_id for r in measured}), "tested prompt")
    temperatures = listed([f"{t:g}" for t in sorted({r.temperature for r in measured})])
    by_load = sorted(measured, key=lambda r: (STAGES.index(r.stage), r.concurrency))
    loads = listed([*dict.fromkeys(load_name(evidence, r) for r in by_load)])
    return (
        f"It covers the {prompts}, temperatures {temperatures or 'none'}, loads "
        f"({loads or 'none'}), and the versions listed above. Another model, draft, "
        "engine, driver, machine or traffic mix needs a new run."
    )
