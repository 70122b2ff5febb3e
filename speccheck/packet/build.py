"""Evidence to view: the whole packet, put together from its sections.

Pure: records in, frozen view models out. Nothing is rounded and nothing is invented: what a stage
did not hand over becomes a `Missing` with the reason. Text from models and users passes through
untouched; the pages escape it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from speccheck.decision import Check, exit_code, run_checks
from speccheck.decision import final as final_decisions
from speccheck.errors import ExitCode
from speccheck.packet import view
from speccheck.packet.cohorts import matrix_view
from speccheck.packet.compared import comparison_view, not_proved
from speccheck.packet.decisions import (
    counter_lines,
    decision_mark,
    only_passes,
    route_findings,
    route_line,
    stage_line,
)
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.outputs import replay_view
from speccheck.packet.parts import STAGES, counted, listed
from speccheck.packet.proof import fixture_view
from speccheck.packet.service import service_view
from speccheck.packet.view import Mark, Missing
from speccheck.records import SCHEMA_VERSION, Action, Decision, Verdict

_SENTENCES = {
    Action.FALL_BACK: "Speculative decoding is turned off on {}.",
    Action.HOLD: "It stays off on {}: not every rule passed, and nothing broke.",
    Action.INCONCLUSIVE: "The evidence does not decide {}.",
    Action.PROMOTE: "It may run on {}.",
}
_PASSES = "Nothing speaks against it so far on {}; only the canary promotes."


def build_view(evidence: RunEvidence) -> view.PacketView:
    """The whole packet, from plain evidence.

    A packet that lacks one of the three views is incomplete: its headline and its exit code (1)
    say so, whatever was decided.
    """
    run = evidence.run
    fixture, matrix, service = (
        fixture_view(evidence),
        matrix_view(evidence),
        service_view(evidence),
    )
    missing = tuple(
        view.MissingView(number, name, part.not_measured)
        for number, name, part in (
            (1, "probability fixture", fixture),
            (2, "workload decision matrix", matrix),
            (3, "service latency", service),
        )
        if isinstance(part, Missing)
    )
    final = final_decisions(evidence.decisions)
    stages = tuple(stage_line(name, evidence.stages.get(name)) for name in STAGES)
    checks = run_checks(evidence.stages, [part.name for part in missing])
    if not evidence.decisions:
        checks.append(Check("routes", Verdict.ERROR, "no route was decided"))
    code = exit_code(evidence.decisions, checks)
    headline = _headline(final, missing, code)
    return view.PacketView(
        schema_version=SCHEMA_VERSION,
        title=f"{headline} · speccheck packet · {run['run_id']}",
        headline=headline,
        complete=not missing,
        missing=missing,
        mark=_mark(final, missing, code),
        exit_code=int(code),
        exit_meaning=code.meaning,
        summary=_summary(evidence, final, stages, missing),
        run_id=run["run_id"],
        created=run["created"],
        expires=run.get("expires", ""),
        override=run.get("override", ""),
        routes=tuple(route_line(decision) for decision in final),
        stages=stages,
        counters=counter_lines(evidence.stages),
        fixture=fixture,
        matrix=matrix,
        service=service,
        findings=route_findings(evidence),
        replay=replay_view(evidence),
        comparison=comparison_view(evidence),
        not_proved=not_proved(evidence),
    )


def _mark(final: Sequence[Decision], missing: Sequence[view.MissingView], code: ExitCode) -> Mark:
    if missing:
        return Mark("incomplete", "!", "broken")
    if code is ExitCode.COULD_NOT_JUDGE:
        return Mark("could not judge", "!", "broken")
    return decision_mark(final[0])


def _headline(
    final: Sequence[Decision], missing: Sequence[view.MissingView], code: ExitCode
) -> str:
    if missing:
        views = "view" if len(missing) == 1 else "views"
        return f"INCOMPLETE packet: no {listed([part.name for part in missing])} {views}"
    if not final:
        return "Nothing decided"
    counts = Counter(decision_mark(decision).word for decision in final)  # worst first, as final is
    parts = [f"{word} {n}" for word, n in counts.items()]
    text = f"{', '.join(parts)} of {counted(len(final), 'route')}"
    if code is ExitCode.COULD_NOT_JUDGE:
        return f"Could not judge: {text}"
    return f"{text[0].upper()}{text[1:]}"


def _summary(
    evidence: RunEvidence,
    final: Sequence[Decision],
    stages: Sequence[view.StageLine],
    missing: Sequence[view.MissingView],
) -> str:
    """The verdict in one paragraph."""
    told: dict[str, list[str]] = defaultdict(list)
    for decision in final:
        k = f" (k = {decision.k})" if decision.action is Action.PROMOTE and decision.k else ""
        sentence = _PASSES if only_passes(decision) else _SENTENCES[decision.action]
        told[sentence].append(f"{decision.route}{k}")
    parts = [text.format(listed(routes)) for text, routes in told.items()]
    parts = parts or ["No route was decided."]
    if missing:
        parts.insert(0, "What follows does not stand until the packet is whole.")
    measured = sum(not receipt.warm_up for receipt in evidence.receipts)
    parts.append(f"Stages: {', '.join(f'{line.name} {line.mark.word}' for line in stages)}.")
    parts.append(f"{counted(measured, 'receipt')} behind it, warm-up left out.")
    return " ".join(parts)
