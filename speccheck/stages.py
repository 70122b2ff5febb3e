"""THE MAIN PATH: the four stages, each one a screen: plan, drive, estimate, judge, decide.

`run_stage` is what they share: refuse where an earlier stage said no, run the stage on the routes
that are still in, keep its evidence, findings and decisions. A route that a stage does not pass
stays where it is (target-only) and later stages leave it out; the others go on. Nothing is computed
here: estimates come from `measure`, `lossless` and `grading`, verdicts from `guardrails`, actions
from `decision`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speccheck import (
    canary,
    corpus,
    coverage,
    decision,
    fixture,
    guardrails,
    kernels,
    launch,
    measure,
    plan,
    shadow,
    slices,
    stats,
    store,
    tables,
    tally,
    vllm,
)
from speccheck.config import Route, package_dir, resolve
from speccheck.context import (
    LIVE,
    PROTECTED,
    RunContext,
    measured_arms,
    protected_prompts,
    read_rollout,
    route_prompts,
)
from speccheck.errors import UsageError
from speccheck.health import pooled_health
from speccheck.law import Table
from speccheck.records import (
    Action,
    Decision,
    Finding,
    Measurement,
    Receipt,
    Sampler,
    Stage,
    Verdict,
    to_json,
    worst,
)
from speccheck.replay import attribution, distributions, grades
from speccheck.sweep import rounds

_CONSEQUENCES = ("low", "medium", "high")

_HEADINGS = {
    Stage.FIXTURE: "does the verifier keep the target's distribution?",
    Stage.REPLAY: "are the answers as good, on the same prompts?",
    Stage.SHADOW: "does it pay under traffic, and is protected traffic left alone?",
    Stage.CANARY: "does it hold on live traffic, at a growing share?",
}


@dataclass
class Judged:
    """What one stage found: evidence for the packet, findings, and a decision per route."""

    evidence: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    """Of the stage as a whole where it decides no routes; else the worst of its decisions."""


def run_all(run: RunContext, *, stop_early: bool) -> None:
    """All four stages, in order.

    Args:
        run: an open run.
        stop_early: leave out the stages after one that no route passed.

    Raises:
        SpeccheckError: what a stage cannot judge.
    """
    for stage in Stage:
        why = _no_room(run, stage) or (_refusal(run, stage) if stop_early else "")
        if why:
            run.report.stage(stage, f"not run: {why}")
        else:
            run_stage(run, stage, stop_early=stop_early)


def run_stage(run: RunContext, stage: Stage, *, stop_early: bool) -> None:
    """One stage on the routes that passed those before it; what it finds is in the store.

    Raises:
        UsageError: an earlier stage did not pass, and `stop_early`; or both servers are needed at
            once and only one fits.
        SpeccheckError: what the stage cannot judge.
    """
    if no_room := _no_room(run, stage):
        raise UsageError(f"{stage}: not run: {no_room}")
    why = _refusal(run, stage)
    if why and stop_early:
        raise UsageError(f"{stage}: not run: {why}; --keep-going runs it all the same")
    routes = [r for r in run.rollout.routes if not stop_early or _passed(run, stage, r.name)]
    run.report.stage(stage, _HEADINGS[stage])
    started = _now()
    judged = _STAGES[stage](run, routes)
    _keep(run, stage, judged, started)


# --- fixture ------------------------------------------------------------------------------------


def fixture_stage(run: RunContext, routes: Sequence[Route]) -> Judged:
    """Prove the candidate configuration's verification algorithm on a table of probabilities."""
    del routes  # the verifier is the same for all of them
    settings = run.rollout.fixture
    path = resolve(settings.table, run.path, package_dir("corpora") / "fixture_t4.json")
    table = tables.load_table(path)
    refused = coverage.check_coverage(run.rollout.speculation)
    if refused:
        return Judged(evidence={"refused": refused}, reasons=refused, verdict=Verdict.FAIL)
    algorithm, draft_sampling = _verification(run.rollout.speculation)
    run.report.line(f"  {algorithm} verification, {draft_sampling} drafts, {settings.seeds} seeds")
    result = fixture.run_fixture(
        table,
        algorithm=algorithm,
        draft_sampling=draft_sampling,
        n_seeds=settings.seeds,
        trace_seeds=settings.trace_seeds or _worked_seeds(table, algorithm, draft_sampling),
        chi2_sf=stats.chi2_sf,
    )
    texts = [fixture.format_trace(trace) for trace in result.traces]
    run.write("traces.txt", "\n\n".join(texts) + "\n")
    run.write("traces.json", json.dumps(list(result.traces), indent=1))
    conforms = _vllm_kernels(run, table, algorithm, draft_sampling)
    reasons = [*result.reasons, *conforms.get("reasons", ())]
    return Judged(
        evidence=result.to_dict() | ({"kernels": conforms} if conforms else {}),
        reasons=reasons,
        verdict=Verdict.FAIL if reasons else Verdict.PASS,
    )


def _vllm_kernels(
    run: RunContext, table: Table, algorithm: str, draft_sampling: str
) -> Mapping[str, Any]:
    """What the vLLM at hand makes of the table: `kernels.Kernels`, {"not_run": why}, or nothing
    where the engine is another one, or attached and no vLLM is here.
    """
    if run.rollout.engine == "embedded":
        return {}
    installed = vllm.find(run.rollout.vllm.python)
    if installed is None:
        return {}
    run.report.line(f"  the rejection sampler of vLLM {installed.version} on the same table")
    found = kernels.run(
        table,
        installed.python,
        algorithm=algorithm,
        draft_sampling=draft_sampling,
        chi2_sf=stats.chi2_sf,
    )
    return {"not_run": found} if isinstance(found, str) else found.to_dict()


def _worked_seeds(table: Table, algorithm: str, draft_sampling: str) -> tuple[int, ...]:
    """Seeds 0 and 1, and before them the first whose first round shows every kind of step.

    That is: two drafts accepted, one corrected and one discarded untested. A table too small for
    that has none.
    """
    for seed in range(2_000) if table.horizon > 4 else ():
        record = fixture.trace(table, seed, algorithm=algorithm, draft_sampling=draft_sampling)
        counters = record["rounds"][0]["counters"]
        if (counters["accepted"], counters["rejected"], counters["discarded"]) == (2, 1, 1):
            return tuple(dict.fromkeys((seed, 0, 1)))
    return (0, 1)


def _verification(speculation: Mapping[str, Any]) -> tuple[str, str]:
    """(algorithm, draft sampling) of the fixture for a speculative config that it covers.

    As in vLLM: drafts are greedy and certain unless draft_sample_method says probabilistic.
    """
    block = speculation.get("rejection_sample_method") == "block"
    if str(speculation["method"]).startswith(("ngram", "suffix")):
        return ("block" if block else "one_hot"), "ngram"
    if speculation.get("draft_sample_method", "greedy") == "probabilistic":
        return ("block" if block else "token"), "probabilistic"
    return ("block" if block else "one_hot"), "greedy"


# --- replay -------------------------------------------------------------------------------------


def replay_stage(run: RunContext, routes: Sequence[Route]) -> Judged:
    """Every prompt on both arms at temperature 0 and at one sampled temperature, graded."""
    settings = run.rollout.replay
    prompts = [prompt for route in routes for prompt in run.prompts(route)]
    grades.validate_checks(prompts)

    def phase(name: str, temperature: float, concurrency: int) -> plan.Phase:
        sampler = Sampler(temperature=temperature)
        return plan.Phase(
            run.run_id, Stage.REPLAY, name, sampler, concurrency=concurrency, keep_text=True
        )

    greedy = phase("greedy", 0.0, settings.concurrency)
    control = phase("aa", 0.0, settings.control_concurrency)
    at_temperature = phase("sampled", settings.sampled_temperature, settings.concurrency)
    grades.send(
        run,
        "temperature 0",
        prompts,
        lambda some, rng: plan.closed_loop(greedy, some, rng=rng),
        warm_up=plan.warm_up(greedy, prompts, run.rollout.warm_up),
    )
    grades.send(
        run,
        "A/A control",
        prompts,
        lambda some, rng: plan.a_a(control, some, "greedy", rng=rng),
    )
    grades.send(
        run,
        f"temperature {settings.sampled_temperature:g}",
        prompts,
        lambda some, rng: plan.closed_loop(at_temperature, some, rng=rng),
    )

    # What looks like a regression is run again on both arms before it may be called one.
    everything = grades.with_later_turns(run, prompts)
    known: grades.Known = {}
    temperatures = grades.temperatures(run, len(everything))
    for at, first in zip(temperatures, (greedy, at_temperature), strict=True):
        grades.confirm(run, at, prompts, replace(first, name=at.phases[-1]), known)

    features = slices.asked(run, prompts)
    run.drive("compatibility slices", [r for part in features.requests.values() for r in part])

    run.report.line("  grading, and asking the target about divergences")
    found = grades.grade_all(run, everything, known)
    asked = asyncio.run(attribution.attribute(run, found, grades.same_question(run, prompts)))
    if unsettled := attribution.near(asked, prompts):
        again = phase(grades.NEAR_PHASE, 0.0, settings.concurrency)
        run.drive(
            "near divergences once more",
            plan.closed_loop(
                again, unsettled, rng=run.rng("near"), repeats=attribution.NEAR_REPLAYS
            ),
        )
        asked = attribution.settle(run, asked, unsettled)
    battery = distributions.run_battery(run, prompts, settings.probe)
    tau = asked.floor.tau if asked.floor is not None else None
    items = slices.judge(run, features, tau)
    tried = slices.rows(features, items)
    for line in slices.summary(tried) if tried else ():
        run.report.line(f"  {line}")
    receipts = [r for r in found.receipts if r.phase in ("greedy", "sampled")]
    judged = Judged(
        evidence=attribution.evidence(run, found, asked, everything, temperatures, battery)
        | slices.evidence(tried)
    )
    for route in routes:
        mine = [prompt for prompt in everything if prompt.route == route.name]
        measured, excluded = (
            [
                *measure.measure_route(
                    receipts,
                    stage=Stage.REPLAY,
                    route=route.name,
                    rng=run.rng("replay", route.name),
                    kept_off=kept_off,
                ),
                *attribution.measure(
                    run,
                    route.name,
                    *attribution.part(found, asked, kept_off=kept_off),
                    mine,
                    temperatures,
                    battery,
                ),
                *slices.measure(items, route=route.name, kept_off=kept_off),
            ]
            if run.policy is not None or not kept_off
            else []
            for kept_off in (False, True)
        )
        _judge_route(run, judged, Stage.REPLAY, route.name, measured, excluded=excluded)
    return judged


# --- shadow -------------------------------------------------------------------------------------


def shadow_stage(run: RunContext, routes: Sequence[Route]) -> Judged:
    """Traffic answered by target-only and, in half of the blocks, mirrored to speculative."""
    settings = run.rollout.shadow
    run.drive(
        f"mirror, {settings.rate_per_s:g} requests/s, {settings.blocks} blocks",
        shadow.warm_up(run, routes) + shadow.plan_mirror(run, routes),
    )
    receipts = run.store.receipts(run.run_id, stage=Stage.SHADOW, warm_up=False)
    protected = measure.measure_protected(receipts, stage=Stage.SHADOW, route=PROTECTED)
    judged = Judged()
    for route in routes:
        rng = run.rng("shadow", route.name)
        measured = [
            *measure.measure_route(receipts, stage=Stage.SHADOW, route=route.name, rng=rng),
            *(replace(m, route=route.name) for m in protected),
        ]
        hung = tally.stalls(
            run.store.drives(run.run_id, Stage.SHADOW),
            run.rollout.fallback.max_stall_s,
            stage=Stage.SHADOW,
            route=route.name,
        )
        _judge_route(run, judged, Stage.SHADOW, route.name, measured, beside=hung)
    delay = next((f for f in judged.findings if f.rule == "max_protected_delay"), None)
    judged.evidence = shadow.evidence(
        run, receipts, protected, delay, shadow.latency_floors(run.store, run.run_id)
    )
    judged.notes = [
        *shadow.block_notes(run, receipts),
        *shadow.lookup_notes(run, rounds.calibrated(run.store, run.run_id)),
    ]
    return judged


# --- canary -------------------------------------------------------------------------------------


def canary_stage(run: RunContext, routes: Sequence[Route]) -> Judged:
    """A growing share of each route's traffic on the speculative arm, beside its control.

    Routes of low consequence first. Every finished request is looked at; a rule that fails turns
    speculation off for the route at once and until it is reset. What is promoted is watched on.
    """
    judged = Judged(evidence={"steps": [], "events": [], "monitors": [], "assignment": []})
    for route in sorted(routes, key=lambda r: _CONSEQUENCES.index(r.consequence)):
        guard = canary.Guard(run, route)
        held = ""
        for step in guard.steps:
            held = guard.hold(step)
            if held:
                run.report.line(f"  {route.name}: not raised to {step.share:.0%}: {held}")
                break
            if step.is_watch and not guard.has_begun(step):
                _, made = _conclude_canary(run, route.name, guard, held)
                if made.action is not Action.PROMOTE:
                    break
                _record(run, made)
                run.report.line(f"  {route.name}: promoted, and watched on at {step.share:.0%}")
            canary.drive_step(run, route, step, guard)
        findings, made = _conclude_canary(run, route.name, guard, held)
        judged.measurements += guard.monitors.measurements()
        judged.findings += findings
        judged.decisions.append(made)
        receipts = run.store.receipts(
            run.run_id, stage=Stage.CANARY, route=route.name, warm_up=False
        )
        judged.evidence["origin_ns"] = origin_ns = _canary_origin_ns(run)
        shown = canary.evidence(run, route.name, guard, receipts, origin_ns)
        for name, rows in shown.items():
            judged.evidence[name] += rows
    tried = canary.handover(run, routes)
    if tried is not None:
        judged.evidence["handover"] = tried.to_dict()
        judged.notes.append(tried.note)
    return judged


def _conclude_canary(
    run: RunContext, route: str, guard: canary.Guard, held: str
) -> tuple[list[Finding], Decision]:
    """What the monitors of a route come to, as of now."""
    if guard.decision is not None and not guard.monitors.receipts:
        return list(guard.decision.findings), guard.decision
    return _conclude(
        run,
        Stage.CANARY,
        route,
        guard.monitors.measurements(),
        fell_back=guard.decision,
        standings=guard.monitors.standings(),
        beside=guard.findings(held),
    )


def _canary_origin_ns(run: RunContext) -> int:
    times = run.store.columns(run.run_id, ["scheduled_ns"], stage=Stage.CANARY)["scheduled_ns"]
    return int(times.min()) if len(times) else 0


_STAGES = {
    Stage.FIXTURE: fixture_stage,
    Stage.REPLAY: replay_stage,
    Stage.SHADOW: shadow_stage,
    Stage.CANARY: canary_stage,
}


def describe(path: Path) -> dict[str, Any]:
    """What a run of this rollout would send, without touching anything (`--dry-run`).

    Raises:
        UsageError: the rollout, its rules or its corpus are wrong.
    """
    rollout, rules, corpus = read_rollout(path)
    probed = rollout.replay.probe
    samples = distributions.DRAFTED if probed.samples is None else probed.samples
    per_prompt = (
        "each prompt twice at temperature 0, once more for A/A, twice sampled; slices, reruns; "
        f"and {samples} samples of {probed.prompts} prompts on both arms"
    )
    replayed = [route_prompts(path, corpus, route) for route in rollout.routes]
    n_replay = 5 * sum(1 + len(p.follow_up) for prompts in replayed for p in prompts)
    n_slices = slices.n_requests(rollout.replay.slice_names, rollout.replay.slice_prompts)
    n_shadow, n_protected = shadow.planned_counts(rollout, protected_prompts(rollout, corpus))
    ramp = canary.ramp(rollout.canary, "", 0)
    n_canary = len(rollout.routes) * sum(step.requests for step in ramp)
    shares = ", ".join(f"{step.share:.0%}" for step in ramp if not step.is_watch)
    return {
        "run_name": rollout.name,
        "corpus": corpus.digest,
        "prompts": len(corpus.prompts),
        "warm_up": 2 * rollout.warm_up,
        "stages": [
            {"stage": "fixture", "requests": 0, "note": f"{rollout.fixture.seeds} seeds"},
            {
                "stage": "replay",
                "requests": n_replay + n_slices + 2 * probed.prompts * samples,
                "note": per_prompt,
            },
            {
                "stage": "shadow",
                "requests": n_shadow + n_protected,
                "note": f"{rollout.shadow.blocks} blocks at {rollout.shadow.rate_per_s:g}/s; about "
                f"{n_protected} of them are protected traffic and its mirror",
            },
            {
                "stage": "canary",
                "requests": n_canary,
                "note": f"steps at {shares} per route, and the watch after a promotion",
            },
        ],
        "routes": [
            {
                "route": route.name,
                "prompts": len(prompts),
                "rules": rules.limits(route.name),
                "needs": {
                    name: guardrails.planned_need(guardrails.RULES[name], limit)
                    for name, limit in guardrails.rule_limits(rules, route.name).items()
                },
            }
            for route, prompts in zip(rollout.routes, replayed, strict=True)
        ],
    }


# --- what the stages share ----------------------------------------------------------------------


def _no_room(run: RunContext, stage: Stage) -> str:
    """Why a stage cannot run where servers take turns, or empty: live traffic goes to both."""
    rollout = run.rollout
    if stage in LIVE and rollout.engine == "vllm" and rollout.vllm.layout == "alternate":
        return (
            "vllm.layout is alternate, and it sends to both servers at once; use side_by_side with"
            " a share of the GPU for each (vllm.args gpu-memory-utilization), or attach to two"
        )
    return ""


def _refusal(run: RunContext, stage: Stage) -> str:
    """Why a stage must not run, or empty. A stage that was not run at all refuses nothing."""
    proof = run.store.get_stage(run.run_id, Stage.FIXTURE)
    if stage is not Stage.FIXTURE and proof is not None and proof.verdict is not Verdict.PASS:
        return "the fixture did not pass"
    if not any(_passed(run, stage, route.name) for route in run.rollout.routes):
        return "no route passed the stages before it"
    return ""


def _passed(run: RunContext, stage: Stage, route: str) -> bool:
    """Whether no stage before this one said no to a route; what was not run says nothing."""
    before = list(Stage)[: list(Stage).index(stage)]
    last = {
        kept.decision.stage: kept.decision.action
        for kept in run.store.decisions(run.run_id, route)
        if kept.decision.stage in before
    }
    return all(action is Action.PROMOTE for action in last.values())


def _findings(
    run: RunContext,
    stage: Stage,
    route: str,
    rules: Mapping[str, guardrails.RuleLimit],
    measured: Sequence[Measurement],
    *,
    late: str,
    held: str,
    standings: Mapping[tuple[str, str], guardrails.Standing] | None = None,
) -> list[Finding]:
    """Judge one route. What a later stage judges again need not be settled now, only not fail.

    `late` says why our own client was too late to time anything, `held` why the load was lighter
    than planned, or they are empty. No later stage makes good what could not be judged here.
    """
    later = list(Stage)[list(Stage).index(stage) + 1 :]
    judged = guardrails.judge(
        rules,
        measured,
        stage=stage,
        route=route,
        noise_floors=shadow.latency_floors(run.store, run.run_id) if stage in LIVE else None,
        standings=standings,
    )
    found = []
    for finding in guardrails.void_passes(guardrails.void_times(judged, late), held):
        made = finding
        again = [s for s in later if s in guardrails.RULES[finding.rule].stages]
        if made.verdict is Verdict.INCONCLUSIVE and again:
            why = f"{made.why}; judged again in {again[0]}"
            made = replace(made, counted=False, why=why)
        found.append(made)
    return found


def _rules(run: RunContext, route: str) -> dict[str, guardrails.RuleLimit]:
    limits = guardrails.rule_limits(run.guardrails, route)
    if run.rollout.replay.slice_names:
        limits.setdefault("max_slice_failures", guardrails.RuleLimit(0))
    if run.rollout.replay.probe.samples != 0:
        limits.setdefault("max_sampled_violations", guardrails.RuleLimit(0))
    return limits


def _judge_route(
    run: RunContext,
    judged: Judged,
    stage: Stage,
    route: str,
    measured: Sequence[Measurement],
    *,
    excluded: Sequence[Measurement] = (),
    beside: Sequence[Finding] = (),
) -> None:
    """Findings and decision of one route, added to what the stage found."""
    findings, made = _conclude(run, stage, route, measured, excluded=excluded, beside=beside)
    judged.measurements += measured
    judged.findings += findings
    judged.decisions.append(made)


def _conclude(
    run: RunContext,
    stage: Stage,
    route: str,
    measured: Sequence[Measurement],
    *,
    fell_back: Decision | None = None,
    excluded: Sequence[Measurement] = (),
    standings: Mapping[tuple[str, str], guardrails.Standing] | None = None,
    beside: Sequence[Finding] = (),
) -> tuple[list[Finding], Decision]:
    """Findings and decision of one route.

    `excluded` is measured where the eligibility policy keeps requests off: it is judged and shown,
    and does not count. `standings` are what monitors have reached, `beside` findings of no rule.
    """
    measured = tally.with_counters(
        measured,
        run.store.drives(run.run_id, stage),
        run.store.receipts(run.run_id, stage=stage),
        stage=stage,
        route=route,
    )
    late, held = _unfit(_health(run, stage))
    rules = _rules(run, route)
    # What is measured only where the policy keeps requests off is asked only there.
    moved = {m.metric for m in excluded} - {m.metric for m in measured}
    mine = {n: limit for n, limit in rules.items() if guardrails.RULES[n].metric not in moved}
    findings = _findings(
        run, stage, route, mine, measured, late=late, held=held, standings=standings
    )
    findings += decision.of_kept_off(
        _findings(run, stage, route, rules, excluded, late=late, held=held)
    )
    findings += beside
    sent = {
        r.pair_id: r
        for r in run.store.receipts(run.run_id, stage=stage, route=route, warm_up=False)
        if grades.in_figures(r)
    }
    return findings, fell_back or decision.decide(
        route,
        stage,
        findings,
        k=run.rollout.speculation.get("num_speculative_tokens"),
        invalid=_invalid(run),
        unrepresentative=_unrepresentative(run, stage, route),
        kept_off=Counter(r.decision_reason for r in sent.values() if r.kept_off),
        requests=len(sent),
    )


def _unrepresentative(run: RunContext, stage: Stage, route: str) -> str:
    """Why what a stage sends on a route is no sample of its traffic, or empty."""
    mine = next(r for r in run.rollout.routes if r.name == route)
    traffic = None if stage is Stage.REPLAY else getattr(mine, stage.value)
    return corpus.unrepresentative(run.prompts(mine, traffic))


def _invalid(run: RunContext) -> str:
    """Why the arms that were measured cannot be compared, or empty.

    From what was captured when they were measured, so that it holds in a resumed run too.
    """
    pair = measured_arms(run.store, run.run_id)
    if pair is None:
        return ""
    differing = launch.differences(pair)
    accepted = launch.accepted(differing, run.rollout.waive)
    for name, (target, speculative) in differing.items():
        if name not in accepted:
            return (
                f"the arms differ in more than speculation: {name} is {target!r} on target-only "
                f"and {speculative!r} on the other; make them equal, or name it under `waive`"
            )
    captured = pair.speculative.speculative_config or {}
    refused = coverage.check_coverage(captured)
    if refused:
        return f"the speculative server's own configuration is not proved: {refused[0]}"
    for name in ("method", "num_speculative_tokens", "rejection_sample_method"):
        stated, found = run.rollout.speculation.get(name), captured.get(name)
        if None not in (stated, found) and stated != found:
            return f"the speculative server runs {name} {found!r}, the rollout says {stated!r}"
    return ""


def _keep(run: RunContext, stage: Stage, judged: Judged, started: str) -> None:
    """Write what a stage found."""
    for made in judged.decisions:
        _record(run, made)
    verdict = judged.verdict
    if verdict is None:
        verdict = worst(decision.verdict_of(made) for made in judged.decisions)
    run.store.put_measurements(run.run_id, stage, judged.measurements)
    run.store.put_findings(run.run_id, stage, judged.findings)
    receipts = run.store.receipts(run.run_id, stage=stage, warm_up=False)
    health = _health(run, stage)
    reasons = judged.reasons + [
        f"{made.route}: {made.reason}"
        for made in judged.decisions
        if made.action is not Action.PROMOTE
    ]
    counters, notes = _counters(run, stage)
    if stage in LIVE and run.rollout.warm_up < plan.WARM_UP_ADVISED:
        notes.append(
            f"servers were warmed up with {run.rollout.warm_up} requests per arm, "
            f"{plan.WARM_UP_ADVISED} are advised (warm_up): graphs and drafters' caches settle late"
        )
    late, held = _unfit(health) if receipts and judged.decisions else ("", "")
    void = ""
    if late:
        void = f"our client was late, so times are void: {late}"
    elif held:
        void = f"passes on times are void: {held}"
    if void and stage in LIVE:
        reasons.insert(0, void)
    elif void:  # what replay finds rests on no times, but the matrix shows some
        notes.append(void)
    evidence = {
        "verdict": verdict.word,
        "reasons": reasons,
        "started": started,
        "finished": _now(),
        "counts": _counts(receipts),
        "client_health": health,
        "server_counters": to_json(counters),
        "notes": [*judged.notes, *notes],
        "evidence": to_json(judged.evidence),
    }
    run.store.put_stage(store.StageResult(run.run_id, stage, time.time_ns(), verdict, evidence))
    run.report.line(f"  {stage}: {verdict.word}" + "".join(f"\n    {r}" for r in reasons))


def _record(run: RunContext, made: Decision) -> None:
    """Add a decision to the run's chain; one that stands already is not written twice."""
    kept = [
        k.decision
        for k in run.store.decisions(run.run_id, made.route)
        if k.decision.stage == made.stage
    ]
    if not kept or to_json(kept[-1]) != to_json(made):
        run.store.append_decision(run.run_id, made, decided_at_ns=time.time_ns())


def _counts(receipts: Sequence[Receipt]) -> dict[str, int]:
    outcomes = Counter(str(receipt.outcome) for receipt in receipts)
    warnings = sum(len(receipt.warnings) for receipt in receipts)
    return {"sent": len(receipts), **dict(sorted(outcomes.items())), "warnings": warnings}


def _health(run: RunContext, stage: Stage) -> dict[str, Any]:
    """`packet.ClientHealth` of a stage, from all its receipts and drives, of every process."""
    if stage is Stage.FIXTURE:
        return {"not_measured": "no requests are sent"}
    drives = [drive.health for drive in run.store.drives(run.run_id, stage)]
    receipts = run.store.receipts(run.run_id, stage=stage, warm_up=False)
    return asdict(pooled_health(drives, receipts, run.rollout.client_limits))


def _counters(run: RunContext, stage: Stage) -> tuple[dict[str, Any], list[str]]:
    """`packet.ServerCounters` by arm, and what has to be said about them."""
    if stage is Stage.FIXTURE:
        return {"not_measured": "no requests are sent"}, []
    drives = run.store.drives(run.run_id, stage)
    receipts = run.store.receipts(run.run_id, stage=stage)
    counters = tally.beside_receipts(drives, receipts)
    notes = (
        tally.cut_off_note(drives, receipts),
        tally.histogram_note(counters),
        tally.queue_note(drives),
    )
    return counters, [note for note in notes if note]


def _unfit(health: Mapping[str, Any]) -> tuple[str, str]:
    """Why our own client was late, and why the load was lighter than planned; empty if not."""
    why = "" if health["valid"] else str(health["reasons"][0])
    return (why, "") if health["is_late"] else ("", why)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
