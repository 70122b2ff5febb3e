"""The canary: its ramp, the guard that watches a route while it runs, and where it stands.

The share grows from step to step by rule: only when no monitor says fail and the step has seen its
minimum of speculative requests. Every finished request is looked at (see `monitors`); a rule that
fails turns speculation off for the route at once, and every later request goes to target-only: the
guard is the live one (`fallback.Machine`) with the canary's monitors, off at its first failure. A
look costs a fraction of a millisecond, so it is taken on the load loop, at the receipt.

A fallback is sticky. It stands in the store's chain of decisions, for the route, in whatever run
came to it: a resumed or repeated canary sends nothing until an operator has reset the route. After
a promotion the route goes on being watched, with the same monitors.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from speccheck import corpus, decision, fallback, hooks, monitors, plan, shadow
from speccheck.config import CanaryConfig, Guardrails, Rollout, Route
from speccheck.context import RunContext
from speccheck.errors import SpeccheckError, UsageError
from speccheck.gateway.exercise import Exercise, exercise
from speccheck.guardrails import RULES, rule_limits
from speccheck.health import Punctuality
from speccheck.records import (
    Action,
    Arm,
    Decision,
    Finding,
    PlannedRequest,
    Receipt,
    Sampler,
    Stage,
    Transition,
    Verdict,
    worst,
)
from speccheck.replay import grades
from speccheck.store import RecordedDecision, Store

RESET = "operator_reset"
"""Finding of a decision that an operator took: the route may be tried again."""

RAMP = "canary_ramp"
"""Finding about a share that did not grow as far as planned."""

ASSIGNMENT = "canary_assignment"
"""Finding about requests that did not fall to the arms as planned."""

_AFTER_FALLBACK = 30
"""Requests of a step that are still sent, to target-only, after the route fell back in it."""

_MOST_STRETCHES = 4
"""A step is given up at so many times the requests that should have held its minimum."""


# --- the ramp -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One share of the ramp, or the watch after a promotion."""

    name: str
    """`step-1` ..., or `watch`."""
    phase: str
    share: float
    requests: int
    """Requests on both arms that are planned at first."""
    minimum: int
    """Requests of the speculative arm that must have been seen before the share grows."""
    is_watch: bool = False
    """Whether it follows a promotion."""


def ramp(settings: CanaryConfig, route: str, resets: int) -> list[Step]:
    """The steps of a route, and last the watch that follows a promotion, if there is one.

    After a reset the phases have names of their own: what was seen before is no evidence then.
    """
    before = f"{route}-again-{resets}" if resets else route
    steps = [
        Step(
            f"step {number}",
            f"{before}-step-{number}",
            share,
            max(settings.requests_per_step, math.ceil(settings.min_speculative / share)),
            settings.min_speculative,
        )
        for number, share in enumerate(settings.shares, start=1)
    ]
    if settings.watch_requests:
        share, requests = settings.watch_share, settings.watch_requests
        steps.append(Step("watch", f"{before}-watch", share, requests, 0, is_watch=True))
    return steps


def plan_step(run: RunContext, route: Route, step: Step, requests: int) -> list[PlannedRequest]:
    """One step: Poisson arrivals, a sticky share of the keys on the speculative arm.

    With more `requests` the plan begins with the same ones.
    """
    settings = run.rollout.canary
    traffic = route.traffic("canary")
    phase = plan.Phase(
        run.run_id,
        Stage.CANARY,
        step.phase,
        Sampler(temperature=traffic.temperature, top_p=traffic.top_p),
        concurrency=settings.max_in_flight,
        max_tokens=traffic.max_tokens,
    )
    prompts = run.prompts(route, traffic)
    offsets = plan.poisson_offsets(requests, settings.rate_per_s, run.rng("canary", step.phase))
    # The order of the prompts must not change between steps, or the same key would not come again.
    order = run.rng("canary-order", route.name)
    warm_up = plan.warm_up(replace(phase, concurrency=4), prompts, run.rollout.warm_up)
    share, salt = step.share, run.run_id
    return warm_up + plan.canary(phase, prompts, offsets, rng=order, share=share, salt=salt)


def drive_step(run: RunContext, route: Route, step: Step, guard: Guard) -> None:
    """Send a step, and go on until its minimum was seen (or it will never be).

    Raises:
        SpeccheckError: receipts or the guard's decision could not be written.
    """
    requests = step.requests
    while True:
        run.drive(
            f"{route.name} at {step.share:.0%}",
            plan_step(run, route, step, requests),
            give_up_after=None,  # a server that died is for the error rule to judge
            on_receipt=guard.receipt,
            should_send=guard.decide,
            is_enough=guard.is_enough,
        )
        guard.settle()
        missing = step.minimum - guard.seen(step)
        if guard.decision is not None or missing <= 0:
            return
        if requests >= _MOST_STRETCHES * step.requests:
            return
        requests += math.ceil(missing / step.share)


# --- off until reset ----------------------------------------------------------------------------


def standing_fallback(store: Store, run_id: str, route: str) -> RecordedDecision | None:
    """The fallback that keeps a route off, or None.

    The last word on the route in a canary of this rollout (runs of the same name in this store): a
    changed rule or a run that is measured anew is no reset.
    """
    name = store.run(run_id).config["rollout"]["name"]
    words = [
        kept
        for run in store.runs()
        if run.config["rollout"]["name"] == name
        for kept in store.decisions(run.run_id, route)
        if kept.decision.stage == Stage.CANARY
    ]
    last = max(words, key=lambda kept: kept.decided_at_ns, default=None)
    return last if last is not None and last.decision.action is Action.FALL_BACK else None


def resets_of(store: Store, run_id: str, route: str) -> int:
    """How often an operator has reset a route in a run."""
    return sum(_is_reset(kept.decision) for kept in store.decisions(run_id, route))


def _is_reset(made: Decision) -> bool:
    return any(finding.rule == RESET for finding in made.findings)


def reset(store: Store, run_id: str, route: str, why: str, *, now_ns: int) -> Decision:
    """An operator lets a route that fell back be tried again; the decision goes into the chain.

    It promotes nothing: the next canary begins at the first share, with no evidence.

    Args:
        store: open for writing.
        run_id: the run in which the next canary will be run.
        route: its name.
        why: the operator's reason, kept with the decision.
        now_ns: wall clock.

    Raises:
        UsageError: there is no such route, or it is not off.
    """
    known = [entry["name"] for entry in store.run(run_id).config["rollout"]["routes"]]
    if route not in known:
        raise UsageError(f"{store.path}: no route {route!r} in {run_id}; it has {', '.join(known)}")
    fallen = standing_fallback(store, run_id, route)
    if fallen is None:
        raise UsageError(f"{store.path}: route {route} is not off, so there is nothing to reset")
    text = f"reset by an operator: {why}"
    finding = Finding(RESET, Verdict.INCONCLUSIVE, route, "", Stage.CANARY, None, None, "", text)
    reason = f"{text}; it may be tried again, and was off since {_when(fallen.decided_at_ns)}"
    made = Decision(route, Action.INCONCLUSIVE, Stage.CANARY, reason, (finding,))
    store.append_decision(run_id, made, decided_at_ns=now_ns)
    return made


def _when(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")


# --- the guard ----------------------------------------------------------------------------------


def watched(
    store: Store, run_id: str, route: str, rollout: Rollout, rules: Guardrails
) -> tuple[monitors.Monitors, list[Step]]:
    """The monitors of a route before its first live request, and the steps of its ramp.

    Requests of the speculative arm in replay and shadow help to pass the error rate: some 360 clean
    requests certify 1 %, more than a canary sends to a small route. This is sound, and said: the
    e-process for passing simply begins with them, in the order in which they came, so it is one
    process over one sequence; its hypothesis is that the rate is over the limit in all of it. What
    must not happen is mixing it with an interval of a fixed n, or letting errors of the canary
    drown in clean requests of another kind. Hence failing looks at the canary alone, and so does
    passing, in addition, as soon as the canary has seen one error (`stats.Rate`): a pass that rests
    on earlier requests is a loan, and ends with the first error that the canary sees. Both only
    ever take a pass away, so the level holds. Reruns and slices of replay are left out, and what
    another version served. No other rule looks at earlier stages: latencies and acceptance belong
    to the traffic at hand.
    """
    earlier = [
        r
        for r in store.receipts(
            run_id, stage=[Stage.REPLAY, Stage.SHADOW], route=route, warm_up=False
        )
        if grades.in_figures(r)
    ]
    steps = ramp(rollout.canary, route, resets_of(store, run_id, route))
    watch = monitors.Monitors(
        route,
        rule_limits(rules, route),
        acceptance=rollout.canary.acceptance_method,
        earlier=earlier,
        floors=shadow.latency_floors(store, run_id),
        mix_share=rollout.canary.shares[-1],
        steps=len(steps),
    )
    return watch, steps


class Guard:
    """Watches one route of the canary. Its callbacks run on the load loop, at each receipt."""

    def __init__(self, run: RunContext, route: Route) -> None:
        self._run = run
        self._route = route.name
        self._seen: Counter[str] = Counter()
        self._moved = 0
        self._writing: threading.Thread | None = None
        self._failure: SpeccheckError | None = None
        self.decision: Decision | None = None
        """The fallback, once it has happened (also in an earlier process, or run)."""
        self.fell_back_ns: int | None = None
        self.monitors, self.steps = watched(
            run.store, run.run_id, route.name, run.rollout, run.guardrails
        )
        self._by_phase = {step.phase: step for step in self.steps}
        self._punctuality = Punctuality(run.rollout.client_limits)
        self._unrepresentative = corpus.unrepresentative(
            run.prompts(route, route.traffic("canary"))
        )
        self._machine = fallback.Machine(
            fallback.sticky(run.rollout.fallback, self._unrepresentative),
            route.name,
            watch=self.monitors,
        )
        fallen = standing_fallback(run.store, run.run_id, route.name)
        if fallen is not None:
            self.decision = _still_off(fallen, run.run_id)
        for receipt in run.store.arrived(run.run_id, stage=Stage.CANARY, route=route.name):
            self.receipt(receipt)
        self.settle()

    def receipt(self, receipt: Receipt) -> None:
        """Take note of a finished request, and look."""
        step = self._by_phase.get(receipt.phase)
        if step is None:  # warm-up, or from before a reset
            return
        speculative = receipt.arm == Arm.SPECULATIVE and not receipt.kept_off
        self._seen[receipt.phase] += int(speculative)
        late = self._punctuality.add(receipt)
        if self.decision is not None:
            self.monitors.add(receipt, share=step.share, late=late)
            return
        at = receipt.scheduled_ns if receipt.done_ns is None else receipt.done_ns
        moved = self._machine.observe(receipt, at, share=step.share, late=late)
        if moved is not None:
            self._fall_back(moved)

    def decide(self, request: PlannedRequest) -> PlannedRequest:
        """The last word before a request goes out: to target-only once the route fell back."""
        if self.decision is None or request.arm is Arm.TARGET_ONLY:
            return request
        self._moved += 1
        return plan.reroute(request, f"route fell back: {broken(self.decision).rule}")

    def is_enough(self) -> bool:
        """Whether the rest of a step need not be sent: moved requests were seen to be served."""
        return self._moved >= _AFTER_FALLBACK

    def seen(self, step: Step) -> int:
        """Requests of the speculative arm that a step has seen."""
        return self._seen[step.phase]

    def has_begun(self, step: Step) -> bool:
        """Whether a step has seen any request."""
        return step.phase in self._seen

    def hold(self, step: Step) -> str:
        """Why the share must not grow to that of a step, or empty."""
        if self.decision is not None:
            return self.decision.reason
        if self.monitors.assignment.is_off:
            return _assignment_text(self.monitors.assignment)
        number = self.steps.index(step)
        before = self.steps[number - 1] if number else None
        if before is not None and self.seen(before) < before.minimum:
            return (
                f"{before.name} at {before.share:.3g} saw {self.seen(before)} of the"
                f" {before.minimum} speculative requests that it needs"
            )
        return ""

    def findings(self, held: str) -> list[Finding]:
        """What speaks against the canary beside its rules: the assignment, and a held ramp."""
        found = []
        if self.monitors.assignment.is_off:
            text = _assignment_text(self.monitors.assignment)
            found.append(self._finding(ASSIGNMENT, Verdict.ERROR, text))
        elif held and self.decision is None:
            found.append(self._finding(RAMP, Verdict.INCONCLUSIVE, f"the share stays: {held}"))
        return found

    def _finding(self, rule: str, verdict: Verdict, why: str) -> Finding:
        return Finding(rule, verdict, self._route, "", Stage.CANARY, None, None, "", why)

    def settle(self) -> None:
        """Wait until the decision is written.

        Raises:
            SpeccheckError: it could not be.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            raise self._failure

    def _fall_back(self, moved: Transition) -> None:
        found = self.monitors.judge()
        made = decision.decide(
            self._route, Stage.CANARY, found, unrepresentative=self._unrepresentative
        )
        self.decision = replace(
            made,
            action=Action.FALL_BACK,
            reason=f"speculation was turned off in mid-stage: {made.reason}",
            k=None,
        )
        self.fell_back_ns = self._run.store.run_clock_ns(self._run.run_id, time.perf_counter_ns())
        # The load loop must not wait for the disk.
        self._writing = threading.Thread(target=self._write, args=(moved,))
        self._writing.start()
        self._run.report.line(f"  {self._route}: fell back: {made.reason}")

    def _write(self, moved: Transition) -> None:
        assert self.decision is not None  # noqa: S101 (for the type checker; the caller set it)
        rollout, now_ns = self._run.rollout, time.time_ns()
        try:
            self._run.store.append_decision(self._run.run_id, self.decision, decided_at_ns=now_ns)
            telling = hooks.Hooks(rollout.fallback.hooks, say=self._run.report.line)
        except SpeccheckError as error:
            self._failure = error
            return
        telling.fire(hooks.Event(rollout.name, moved, now_ns))
        telling.close()


_EXERCISED = 2
"""Prompts of each route that the hand-over is tried with."""


def handover(run: RunContext, routes: Sequence[Route]) -> Exercise | None:
    """What comes of answers whose speculative arm fails in the middle: once per run.

    None for servers that are not ours to disturb, and where this process has sent nothing.
    """
    if run.rollout.engine == "attached":
        return None
    before = run.store.get_stage(run.run_id, Stage.CANARY)
    kept = {} if before is None else before.evidence["evidence"]
    if "handover" in kept:
        return Exercise(**kept["handover"])
    if not run.has_arms:
        return None
    prompts = [
        prompt
        for route in routes
        for prompt in run.prompts(route, route.traffic("canary"))[:_EXERCISED]
    ]
    return exercise(run.arms(), prompts)


def broken(fallen: Decision) -> Finding:
    """The finding that a fallback rests on: failed, counted, and no matter of whether it pays."""
    failed = [f for f in fallen.findings if f.verdict is Verdict.FAIL and f.counted]
    return min(failed or fallen.findings, key=lambda f: f.rule in RULES and RULES[f.rule].pays)


def _still_off(fallen: RecordedDecision, run_id: str) -> Decision:
    """A fallback of an earlier run as the decision of this one; of this run as it stands."""
    if fallen.run_id == run_id:
        return fallen.decision
    reason = fallen.decision.reason.removeprefix(_STILL_OFF)
    return replace(fallen.decision, reason=f"{_STILL_OFF}{reason}")


_STILL_OFF = "it fell back before and stays off until `speccheck canary reset`: "


def _assignment_text(assignment: monitors.Assignment) -> str:
    sent = assignment.speculative + assignment.target_only
    return (
        f"requests do not fall to the arms as planned: {assignment.speculative} of {sent} went to"
        f" the speculative arm, {assignment.expected:.0f} were expected (evidence"
        f" {math.exp(min(assignment.evidence(), 700)):.3g} of {1 / monitors.MISMATCH_ALPHA:.0f}),"
        " so the arms cannot be compared"
    )


# --- where it stands ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """Where a route's canary stands, from its receipts and decisions alone."""

    route: str
    state: str
    """not begun, running, promoted, held, undecided, off or reset."""
    verdict: str | None
    """Of its decision; of its monitors before there is one, None where no request was sent."""
    why: str
    """What was decided last, or why nothing was."""
    step: str
    share: float | None
    """Planned share of the speculative arm in the last step that sent anything."""
    speculative: int
    target_only: int
    expected: float
    """Speculative requests that the shares promised."""
    mismatch_evidence: float
    """Odds against the planned shares; `mismatch_needs` makes it a finding."""
    mismatch_needs: float
    restarts: tuple[str, ...]
    incidents: tuple[str, ...]
    readings: tuple[monitors.Reading, ...]


def survey(store: Store, run_id: str) -> list[RouteStatus]:
    """Where every route's canary stands, from the store alone.

    The monitors are fed again with the receipts in the order in which they came, so what is said is
    what the guard saw.
    """
    config = store.run(run_id).config
    rollout = Rollout.model_validate(config["rollout"])
    rules = Guardrails.model_validate(config["guardrails"])
    return [_status(store, run_id, route.name, rollout, rules) for route in rollout.routes]


def _status(
    store: Store, run_id: str, route: str, rollout: Rollout, rules: Guardrails
) -> RouteStatus:
    watch, steps = watched(store, run_id, route, rollout, rules)
    by_phase = {step.phase: step for step in steps}
    punctuality = Punctuality(rollout.client_limits)
    last: Step | None = None
    for receipt in store.arrived(run_id, stage=Stage.CANARY, route=route):
        step = by_phase.get(receipt.phase)
        if step is not None:
            watch.add(receipt, share=step.share, late=punctuality.add(receipt))
            last = step
    found = watch.judge()
    assignment = watch.assignment
    words = [
        kept.decision
        for kept in store.decisions(run_id, route)
        if kept.decision.stage == Stage.CANARY
    ]
    verdict: Verdict | None = worst(f.verdict for f in found if f.counted)
    state, why = "running", "the canary has not come to a decision"
    if words:
        if not _is_reset(words[-1]):
            verdict = decision.verdict_of(words[-1])
        state = {
            Action.PROMOTE: "promoted",
            Action.FALL_BACK: "off",
            Action.HOLD: "held",
            Action.INCONCLUSIVE: "reset" if _is_reset(words[-1]) else "undecided",
        }[words[-1].action]
        why = words[-1].reason
    elif (fallen := standing_fallback(store, run_id, route)) is not None:
        state, why, verdict = "off", _still_off(fallen, run_id).reason, Verdict.FAIL
    elif last is None:
        state, why, verdict = "not begun", "no request of its canary was sent", None
    if state == "reset" and last is None:
        verdict = Verdict.INCONCLUSIVE
    elif verdict is not None and assignment.is_off:
        verdict, why = max(verdict, Verdict.ERROR), _assignment_text(assignment)
    return RouteStatus(
        route=route,
        state=state,
        verdict=None if verdict is None else verdict.word,
        why=why,
        step="" if last is None else last.name,
        share=None if last is None else last.share,
        speculative=assignment.speculative,
        target_only=assignment.target_only,
        expected=assignment.expected,
        mismatch_evidence=math.exp(min(assignment.evidence(), 700.0)),
        mismatch_needs=1 / monitors.MISMATCH_ALPHA,
        restarts=(*_resets(store, run_id, route), *_restarts(watch)),
        incidents=tuple(incident.text for incident in monitors.incidents(watch.receipts)),
        readings=tuple(watch.readings(found)) if last is not None else (),
    )


def _resets(store: Store, run_id: str, route: str) -> list[str]:
    return [
        kept.decision.findings[0].why
        for kept in store.decisions(run_id, route)
        if _is_reset(kept.decision)
    ]


def _restarts(watch: monitors.Monitors) -> list[str]:
    return [f"after {r.requests} requests: {r.reason}" for r in watch.restarts]


# --- evidence -----------------------------------------------------------------------------------


def evidence(
    run: RunContext, route: str, guard: Guard, receipts: Sequence[Receipt], origin_ns: int
) -> dict[str, list[dict[str, Any]]]:
    """`packet.CanaryEvidence` of one route: steps, events, monitors and the assignment."""
    watch = guard.monitors
    readings = watch.readings(watch.judge())
    assignment = watch.assignment
    return {
        "steps": _steps(route, guard, receipts, origin_ns),
        "events": _events(run, route, guard, receipts, origin_ns),
        "monitors": [{"route": route, **asdict(reading)} for reading in readings],
        "assignment": [
            {
                "route": route,
                "speculative": assignment.speculative,
                "target_only": assignment.target_only,
                "expected": assignment.expected,
                "evidence": math.exp(min(assignment.evidence(), 700.0)),
                "needs": 1 / monitors.MISMATCH_ALPHA,
            }
        ]
        if receipts
        else [],
    }


def _steps(
    route: str, guard: Guard, receipts: Sequence[Receipt], origin_ns: int
) -> list[dict[str, Any]]:
    """`packet.CanaryStep` for each step that sent anything."""
    rows = []
    for step in guard.steps:
        mine = [r for r in receipts if r.phase == step.phase]
        if not mine:
            continue
        moved = sum(r.decision == "fell_back" for r in mine)
        speculative = [r for r in mine if r.arm == Arm.SPECULATIVE]
        if guard.decision is not None and (moved or step.phase == _last_phase(receipts)):
            verdict = "fail"
            why = f"the route fell back; {moved} requests went to target-only instead"
        elif len(speculative) < step.minimum:
            verdict = "inconclusive"
            why = f"{len(speculative)} of the {step.minimum} speculative requests that it needs"
        else:
            verdict, why = "pass", "its minimum was seen, and no monitor said fail"
        rows.append(
            {
                "step": f"{route}, {step.name}",
                "route": route,
                "share": step.share,
                "started_s": (min(r.scheduled_ns for r in mine) - origin_ns) / 1e9,
                "ended_s": (max(r.done_ns or r.scheduled_ns for r in mine) - origin_ns) / 1e9,
                "speculative_n": len(speculative),
                "target_n": sum(r.arm == Arm.TARGET_ONLY for r in mine),
                "verdict": verdict,
                "why": why,
            }
        )
    return rows


def _last_phase(receipts: Sequence[Receipt]) -> str:
    return max(receipts, key=lambda r: r.scheduled_ns).phase


def _events(
    run: RunContext, route: str, guard: Guard, receipts: Sequence[Receipt], origin_ns: int
) -> list[dict[str, Any]]:
    """`packet.CanaryEvent`: outages, restarts and the fallback of one route."""
    last = max((r.done_ns or r.scheduled_ns for r in receipts), default=origin_ns)
    found = [
        _event(incident.started_ns, "outage", route, incident.text)
        for incident in monitors.incidents(guard.monitors.receipts)
    ]
    found += [
        _event(origin_ns, "restart", route, text)
        for text in (*_resets(run.store, run.run_id, route), *_restarts(guard.monitors))
    ]
    if guard.decision is not None:
        moved = [r.scheduled_ns for r in receipts if r.decision == "fell_back"]
        finding = broken(guard.decision)
        found.append(
            {
                **_event(
                    guard.fell_back_ns or min(moved, default=last), "fall_back", route, finding.why
                ),
                "rule": finding.rule,
                "action": run.guardrails.speculative_decoding_guardrails.fallback_action,
                "handed_over": 0,
            }
        )
    return [{**event, "at_s": (event["at_s"] - origin_ns) / 1e9} for event in found]


def _event(at_ns: int, kind: str, route: str, text: str) -> dict[str, Any]:
    return {"at_s": at_ns, "kind": kind, "route": route, "text": text}
