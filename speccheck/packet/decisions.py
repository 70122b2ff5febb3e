"""Decisions, findings and stages: what was decided, by which rule, from which number."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from speccheck.decision import final as final_decisions
from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import (
    ARM_NAMES,
    STAGES,
    VERDICT_MARKS,
    figures,
    interval,
    known,
    part_of,
    verdict_mark,
    words,
)
from speccheck.packet.service import METRICS
from speccheck.packet.view import Figure, Mark, Missing
from speccheck.records import Action, Decision, Finding, Receipt, Stage, Verdict

ACTION_MARKS = {
    Action.FALL_BACK: Mark("fall back", "✗", "bad"),
    Action.HOLD: Mark("hold", "–", "unsure"),
    Action.INCONCLUSIVE: Mark("inconclusive", "?", "unsure"),
    Action.PROMOTE: Mark("promote", "✓", "good"),
}
"""Worst first: the order of routes and of the headline."""

IN_TIME = Mark("in time", "✓", "good")
LATE = Mark("late, run invalid", "!", "broken")
HELD_BACK = Mark("requests held back, no pass on times", "!", "broken")
NOT_RUN = Mark("not run", "·", "plain")


def decision_mark(decision: Decision) -> Mark:
    """What a decision comes to: a yes before the canary passes its stage and promotes nothing."""
    mark = ACTION_MARKS[decision.action]
    return replace(mark, word=f"passes {decision.stage}") if only_passes(decision) else mark


def only_passes(decision: Decision) -> bool:
    """Whether it is a yes of a stage before the canary."""
    return decision.action is Action.PROMOTE and decision.stage != Stage.CANARY


def route_line(decision: Decision) -> view.RouteLine:
    """A decision as one line."""
    return view.RouteLine(
        route=decision.route,
        mark=decision_mark(decision),
        stage=decision.stage,
        after="" if only_passes(decision) else decision.stage,
        k=decision.k,
        scope=decision.scope,
        reason=decision.reason,
    )


def stage_line(name: str, stage: Mapping[str, Any] | None) -> view.StageLine:
    """How one stage ended; None if it did not run."""
    if stage is None:
        why = Missing("the stage did not run")
        return view.StageLine(name, NOT_RUN, ("this stage did not run",), "", "", (), why, ())
    health = part_of(stage, "client_health", "the stage gave no client figures")
    client: view.ClientLine | Missing
    if isinstance(health, Missing):
        client = health
    else:
        client = view.ClientLine(
            mark=IN_TIME if health["valid"] else LATE if health["is_late"] else HELD_BACK,
            why="; ".join(health["reasons"]),
            figures=figures(health),
        )
    return view.StageLine(
        name=name,
        mark=verdict_mark(stage["verdict"]),
        reasons=tuple(stage["reasons"]),
        started=stage["started"],
        finished=stage["finished"],
        counts=tuple(Figure(words(key), n, "count") for key, n in stage["counts"].items()),
        client=client,
        notes=tuple(stage["notes"]),
    )


def counter_lines(
    stages: Mapping[str, Mapping[str, Any]],
) -> tuple[view.CounterLine, ...]:
    """What servers counted beside what receipts say, stage by stage and arm by arm."""
    lines: list[view.CounterLine] = []
    for stage in STAGES:
        found = part_of(stages.get(stage, {}), "server_counters", "")
        if isinstance(found, Missing):
            continue  # no requests were sent
        for arm, name in ARM_NAMES.items():
            part = part_of(found, arm, "not read")
            if isinstance(part, Missing):
                server, other = Missing("not available"), Missing("not compared")
                why = part.not_measured
                lines.append(view.CounterLine(stage, name, "all", server, other, other, why))
                continue
            lines += [
                view.CounterLine(
                    stage,
                    name,
                    row["quantity"],
                    known(row["server"], "no such counter", "count"),
                    known(row["receipts"], "no receipt carries it", "count"),
                    known(row["gap"], "not known", "count"),
                    row["why"],
                )
                for row in part["rows"]
            ]
    return tuple(lines)


def route_findings(evidence: RunEvidence) -> tuple[view.RouteFindings, ...]:
    """Per route, in the order of the decisions: all findings, worst first."""
    receipts = {r.receipt_id: r for r in evidence.receipts}
    final = final_decisions(evidence.decisions)
    by_route: dict[str, dict[Any, Finding]] = {decision.route: {} for decision in final}
    every = [f for decision in evidence.decisions for f in decision.findings]
    for finding in [*every, *evidence.findings]:
        key = (finding.rule, finding.stage, finding.cohort, finding.counted, finding.why)
        by_route.setdefault(finding.route, {})[key] = finding
    lines: dict[str, list[view.RouteLine]] = defaultdict(list)
    for decision in sorted(evidence.decisions, key=lambda d: STAGES.index(d.stage)):
        lines[decision.route].append(route_line(decision))
    return tuple(
        _of_route(
            route,
            lines[route],
            sorted(
                found.values(),
                key=lambda f: (-f.verdict, f.rule, f.stage, f.cohort),
            ),
            receipts,
        )
        for route, found in by_route.items()
    )


def _of_route(
    route: str,
    decisions: Sequence[view.RouteLine],
    findings: Sequence[Finding],
    receipts: Mapping[str, Receipt],
) -> view.RouteFindings:
    def lines(wanted: Callable[[Finding], bool]) -> tuple[view.FindingLine, ...]:
        return tuple(_finding_line(f, receipts) for f in findings if wanted(f))

    counts = Counter(finding.verdict for finding in findings if finding.counted)
    return view.RouteFindings(
        route=route,
        decisions=tuple(decisions),
        counts=tuple(
            Figure(verdict.word, counts[verdict], "count")
            for verdict in reversed(Verdict)
            if counts[verdict]
        ),
        open=lines(lambda f: f.counted and f.verdict is not Verdict.PASS),
        passed=lines(lambda f: f.counted and f.verdict is Verdict.PASS),
        uncounted=lines(lambda f: not f.counted),
    )


def _finding_line(finding: Finding, receipts: Mapping[str, Receipt]) -> view.FindingLine:
    return view.FindingLine(
        rule=finding.rule,
        mark=VERDICT_MARKS[finding.verdict],
        route=finding.route,
        cohort=finding.cohort,
        stage=finding.stage,
        estimate=interval(finding.estimate, finding.unit, finding.why),
        limit=finding.limit,
        unit=finding.unit,
        why=finding.why,
        needed=finding.needed,
        counted=finding.counted,
        examples=tuple(_receipt_line(i, receipts.get(i)) for i in finding.examples),
    )


def _receipt_line(receipt_id: str, receipt: Receipt | None) -> view.ReceiptLine:
    if receipt is None:
        return view.ReceiptLine(
            receipt_id, known=False, prompt_id="", arm="", outcome="", error="", figures=()
        )
    figures = [
        Figure(metric, value, "s")
        for metric, get in METRICS[:3]
        if (value := get(receipt)) is not None
    ]
    counts = (
        ("tokens", receipt.completion_tokens),
        ("drafted", receipt.proposed_tokens),
        ("accepted", receipt.accepted_tokens),
    )
    figures += [Figure(name, n, "count") for name, n in counts if n is not None]
    return view.ReceiptLine(
        receipt_id=receipt_id,
        known=True,
        prompt_id=receipt.prompt_id,
        arm=ARM_NAMES.get(receipt.arm, receipt.arm),
        outcome=receipt.outcome,
        error=": ".join(t for t in (receipt.error_class, receipt.error_message) if t),
        figures=tuple(figures),
    )
