"""The canary's plan, and the guard that watches a route while it runs.

The guard looks at the guardrails each `look_every` receipts, beside the load loop. Looks are fixed
beforehand and share the level of failing between them (Bonferroni), so that looking often does not
alarm more often. A rule that fails turns speculation off for the route at once: the decision is
written with its rule, value, interval and limit, and every later request of the route goes to
target-only. It stays off: nothing here promotes again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Self

import numpy as np

from speccheck import graded, guardrails, measure, plan
from speccheck.config import Route
from speccheck.context import RunContext
from speccheck.records import (
    Action,
    Arm,
    Decision,
    Finding,
    Measurement,
    PlannedRequest,
    Receipt,
    Sampler,
    Stage,
    Verdict,
)


def plan_step(run: RunContext, route: Route, step: int, share: float) -> list[PlannedRequest]:
    """One step: Poisson arrivals, a sticky share of the keys on the speculative arm."""
    settings = run.rollout.canary
    traffic = route.traffic("canary")
    rng = run.rng("canary", route.name, step)
    phase = plan.Phase(
        run.run_id,
        Stage.CANARY,
        phase_name(route.name, step),
        Sampler(temperature=traffic.temperature, top_p=traffic.top_p),
        concurrency=settings.max_in_flight,
        max_tokens=traffic.max_tokens,
    )
    prompts = run.prompts(route, traffic)
    offsets = plan.poisson_offsets(settings.requests_per_step, settings.rate_per_s, rng)
    # The order of the prompts must not change between steps, or the same key would not come again.
    order = run.rng("canary-order", route.name)
    warm_up = plan.warm_up(replace(phase, concurrency=4), prompts, run.rollout.warm_up)
    return warm_up + plan.canary(phase, prompts, offsets, rng=order, share=share, salt=run.run_id)


def phase_name(route: str, step: int) -> str:
    """Phase of the receipts of one step."""
    return f"{route}-step-{step + 1}"


def planned_looks(run: RunContext) -> int:
    """How often a route is judged, at most, the end included; the level of failing is shared."""
    settings = run.rollout.canary
    return 1 + len(settings.shares) * settings.requests_per_step // settings.look_every


def look(
    receipts: Sequence[Receipt],
    rules: Mapping[str, guardrails.RuleLimit],
    route: str,
    alpha_fail: float,
    rng: np.random.Generator,
) -> tuple[Finding, ...]:
    """Judge a route of the canary from what has come so far, at this level of failing."""
    measured = measure.measure_route(receipts, stage=Stage.CANARY, route=route, rng=rng)
    return guardrails.judge(rules, measured, stage=Stage.CANARY, route=route, alpha_fail=alpha_fail)


def _start_worker() -> None:
    """Looks give way to the load loop and to servers on this machine; Ctrl-C is for the parent."""
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed closes no pool, and a pool's worker would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Guard:
    """Watches one route of the canary; use as a context manager around its drives.

    Its callbacks run on the load loop and only take notes. The looking happens in a process of its
    own: half a second of arithmetic in a thread would hold the interpreter and delay timestamps.
    """

    def __init__(
        self, run: RunContext, route: Route, rules: Mapping[str, guardrails.RuleLimit]
    ) -> None:
        self._run = run
        self._route = route.name
        self._rules = rules
        self._alpha = guardrails.ALPHA_FAIL / planned_looks(run)
        self._receipts: list[Receipt] = list(
            run.store.receipts(run.run_id, stage=Stage.CANARY, route=route.name, warm_up=False)
        )
        self._unseen = 0
        self._pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        self._pending: list[Future[tuple[Finding, ...]]] = []
        self.looks: list[dict[str, Any]] = []
        self.decision: Decision | None = None
        """The fallback, once it has happened (also in an earlier process of this run)."""
        self.fell_back_ns: int | None = None
        for kept in run.store.decisions(run.run_id, route.name):
            if (kept.decision.stage, kept.decision.action) == (Stage.CANARY, Action.FALL_BACK):
                self.decision = kept.decision

    def __enter__(self) -> Self:
        # The worker is started, and has imported what it needs, before anything is timed.
        self._look(()).result()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def receipt(self, receipt: Receipt) -> None:
        """Take note of a finished request; start a look when enough have come."""
        self._receipts.append(receipt)
        self._unseen += 1
        if self._unseen >= self._run.rollout.canary.look_every and self.decision is None:
            self._unseen = 0
            future = self._look(tuple(self._receipts))
            self._pending.append(future)
            future.add_done_callback(self._looked)

    def decide(self, request: PlannedRequest) -> PlannedRequest:
        """The last word before a request goes out: to target-only once the route fell back."""
        if self.decision is None or request.arm is Arm.TARGET_ONLY:
            return request
        return plan.reroute(request, f"route fell back: {self.decision.findings[0].rule}")

    def settle(self) -> None:
        """Wait for the looks that are under way.

        Raises:
            SpeccheckError: a look could not be taken.
        """
        for future in self._pending:
            future.result()
        self._pending.clear()

    def _look(self, receipts: Sequence[Receipt]) -> Future[tuple[Finding, ...]]:
        rng = self._run.rng("look", self._route, len(receipts))
        return self._pool.submit(look, receipts, self._rules, self._route, self._alpha, rng)

    def _looked(self, future: Future[tuple[Finding, ...]]) -> None:
        """Take in a look (on the pool's thread); a rule that failed turns speculation off."""
        if future.cancelled() or future.exception() is not None:
            return  # `settle` raises it
        findings = future.result()
        self.looks += [
            {
                "rule": f.rule,
                "n": f.estimate.n if f.estimate is not None else 0,
                "estimate": f.estimate,
                "limit": f.limit,
                "unit": f.unit,
                "verdict": f.verdict.word,
            }
            for f in findings
            if f.cohort == ""
        ]
        broken = [
            f
            for f in findings
            if f.verdict is Verdict.FAIL and f.counted and not guardrails.RULES[f.rule].pays
        ]
        if not broken or self.decision is not None:
            return
        self.decision = Decision(
            route=self._route,
            action=Action.FALL_BACK,
            stage=Stage.CANARY,
            reason=f"speculation was turned off in mid-stage: {broken[0].why}",
            findings=tuple(broken),
        )
        self.fell_back_ns = time.perf_counter_ns()
        self._run.store.append_decision(
            self._run.run_id, self.decision, decided_at_ns=time.time_ns()
        )
        self._run.report.line(f"  {self._route}: fell back: {broken[0].why}")


# --- evidence -----------------------------------------------------------------------------------


def steps_evidence(
    run: RunContext, route: str, guard: Guard, receipts: Sequence[Receipt], origin_ns: int
) -> list[dict[str, Any]]:
    """`packet.CanaryStep` for each step that sent anything."""
    rows = []
    for step, share in enumerate(run.rollout.canary.shares):
        mine = [r for r in receipts if r.phase == phase_name(route, step)]
        if not mine:
            continue
        moved = sum(r.decision == "fell_back" for r in mine)
        later = any(r.phase == phase_name(route, step + 1) for r in receipts)
        broke = guard.decision is not None and not later
        rows.append(
            {
                "step": f"{route}, step {step + 1}",
                "route": route,
                "share": share,
                "started_s": (min(r.scheduled_ns for r in mine) - origin_ns) / 1e9,
                "ended_s": (max(r.done_ns or r.scheduled_ns for r in mine) - origin_ns) / 1e9,
                "speculative_n": sum(r.arm == Arm.SPECULATIVE for r in mine),
                "target_n": sum(r.arm == Arm.TARGET_ONLY for r in mine),
                "verdict": "fail" if broke else "pass",
                "why": f"the route fell back; {moved} requests went to target-only instead"
                if broke
                else "no guardrail failed so far",
                "looks": guard.looks if step == 0 else [],
            }
        )
    return rows


def event_evidence(
    run: RunContext, guard: Guard, receipts: Sequence[Receipt], origin_ns: int
) -> list[dict[str, Any]]:
    """`packet.CanaryEvent`: the fallback of one route, if it fell back."""
    if guard.decision is None:
        return []
    moved = [r.scheduled_ns for r in receipts if r.decision == "fell_back"]
    last = max((r.done_ns or r.scheduled_ns for r in receipts), default=origin_ns)
    at_ns = guard.fell_back_ns or min(moved, default=last)
    finding = guard.decision.findings[0]
    return [
        {
            "at_s": (at_ns - origin_ns) / 1e9,
            "kind": "fall_back",
            "route": guard.decision.route,
            "text": finding.why,
            "rule": finding.rule,
            "action": run.guardrails.speculative_decoding_guardrails.fallback_action,
            "handed_over": 0,
        }
    ]


def with_earlier_errors(
    run: RunContext, route: str, measured: Sequence[Measurement]
) -> list[Measurement]:
    """The canary's measurements, its error rate taken over all stages where the canary had none.

    A rate of 1 % takes some 300 clean requests to certify, more than a canary sends to a small
    route, so the route's requests in replay and shadow count as well. Not where the canary itself
    saw errors: they must not drown in clean requests of another kind. Reruns and slices do not.
    """
    alone = next(m for m in measured if m.metric == "error_rate" and not m.cohort)
    if alone.estimate is None or alone.estimate.value > 0:
        return list(measured)
    receipts = [
        replace(r, stage=Stage.CANARY)
        for r in run.store.receipts(run.run_id, route=route, warm_up=False)
        if graded.in_figures(r)
    ]
    rng = run.rng("errors", route)
    together = measure.measure_route(receipts, stage=Stage.CANARY, route=route, rng=rng)
    pooled = next(m for m in together if m.metric == "error_rate" and not m.cohort)
    note = f"{pooled.note}, in replay, shadow and canary together"
    return [replace(pooled, note=note) if m is alone else m for m in measured]
