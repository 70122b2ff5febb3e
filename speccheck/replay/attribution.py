"""What replay finds beyond receipts: regression cases, and divergences attributed.

The stage plans and drives, `grades` grades; here grades become cases (a prompt, every run of both
arms, pass or fail), greedy outputs are compared token by token, and the target is asked about each
first difference.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speccheck import battery, drift, grading, lossless, probe, quality, stats
from speccheck.client import open_session
from speccheck.context import RunContext
from speccheck.drive import Endpoint
from speccheck.errors import EngineError
from speccheck.guardrails import ALPHA_FAIL, QUALITY_MARGIN
from speccheck.records import (
    Arm,
    Measurement,
    Outcome,
    Prompt,
    Receipt,
    Stage,
)
from speccheck.replay.distributions import Result
from speccheck.replay.grades import (
    GREEDY_PHASES,
    NEAR_PHASE,
    Graded,
    Temperature,
    asked_structure,
    looked,
)

NOISE_PROMPTS = 12
"""Prompts whose every position is decoded and scored for the noise floor: over 300 positions."""

NEAR_REPLAYS = 3
"""Replays on both arms that settle whether a near divergence is noise (STATS 3.3)."""


def part(graded: Graded, asked: Attribution, *, kept_off: bool) -> tuple[Graded, Attribution]:
    """Of what was found, that which the eligibility policy keeps off, or that which it does not."""
    by_prompt = {
        prompt_id: [r for r in group if r.kept_off is kept_off]
        for prompt_id, group in graded.by_prompt.items()
    }
    mine = replace(graded, by_prompt=by_prompt)
    greedy = {r.prompt_id for r in mine.receipts if r.phase == "greedy"}
    return mine, replace(
        asked,
        compared={p: pair for p, pair in asked.compared.items() if p in greedy},
        controls={p: pair for p, pair in asked.controls.items() if p in greedy},
    )


# --- divergence ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribution:
    """Greedy outputs compared, first differences attributed, and the noise floor they had."""

    compared: Mapping[str, lossless.Compared]
    """Speculative against target-only, by prompt id."""
    controls: Mapping[str, lossless.Compared]
    """Target-only against itself, by prompt id."""
    floor: lossless.NoiseFloor | None
    floor_note: str
    """Why there is no floor; empty where there is one."""


async def attribute(run: RunContext, graded: Graded, prompts: Sequence[Prompt]) -> Attribution:
    """Compare greedy outputs and ask the target about each first difference.

    Raises:
        EngineError: the target-only server cannot be reached.
    """
    compared: dict[str, lossless.Compared] = {}
    controls: dict[str, lossless.Compared] = {}
    for prompt in prompts:
        target = graded.of(prompt, Arm.TARGET_ONLY, ("greedy",))
        for others, into in (
            (graded.of(prompt, Arm.SPECULATIVE, ("greedy",)), compared),
            (graded.of(prompt, Arm.TARGET_ONLY, ("aa",)), controls),
        ):
            if target and others:
                pair = _compare(graded, target[0], others[0])
                if pair is not None:
                    into[prompt.prompt_id] = pair
    diverged = [p for p in prompts if _differs(compared, p) or _differs(controls, p)]
    endpoint = run.target()
    async with open_session() as session:
        ids = {}
        floor, note = None, ""
        for prompt in [*diverged, *prompts[:NOISE_PROMPTS]]:
            ids[prompt.prompt_id] = await probe.prompt_ids(session, endpoint, prompt)
        sample = [found for p in prompts[:NOISE_PROMPTS] if (found := ids[p.prompt_id])]
        try:
            changes = await probe.gap_changes(
                session,
                endpoint,
                sample,
                max_tokens=48,
                concurrency=run.rollout.replay.concurrency,
            )
            resolution = probe.resolution(endpoint.description)
            floor = lossless.noise_floor(changes, resolution=resolution)
            note = "" if floor else "the server gave no log-probabilities to compare"
        except EngineError as error:
            note = f"the server gave no log-probabilities ({error})"
        for into in (compared, controls):
            for prompt in diverged:
                if _differs(into, prompt):
                    into[prompt.prompt_id] = await _asked(
                        session,
                        endpoint,
                        graded,
                        prompt,
                        ids[prompt.prompt_id],
                        into[prompt.prompt_id],
                        floor,
                    )
    return Attribution(compared, controls, floor, note)


def _differs(compared: Mapping[str, lossless.Compared], prompt: Prompt) -> bool:
    pair = compared.get(prompt.prompt_id)
    return pair is not None and pair.divergence is not None


def _compare(graded: Graded, target: Receipt, other: Receipt) -> lossless.Compared | None:
    a, b = graded.answers.get(target.receipt_id), graded.answers.get(other.receipt_id)
    if a is None or b is None or a.token_ids is None or b.token_ids is None:
        return None
    if target.outcome != Outcome.OK or other.outcome != Outcome.OK:
        return None
    return lossless.Compared(
        pair_id=other.pair_id,
        receipt_id=other.receipt_id,
        exposure=lossless.exposure(a.token_ids, b.token_ids),
        divergence=lossless.first_divergence(a.token_ids, b.token_ids),
        cohort=target.task,
    )


async def _asked(
    session: Any,
    endpoint: Endpoint,
    graded: Graded,
    prompt: Prompt,
    prompt_ids: Sequence[int] | None,
    pair: lossless.Compared,
    floor: lossless.NoiseFloor | None,
) -> lossless.Compared:
    """A diverged pair with the target's gap at the first differing token, classified."""
    at = pair.divergence
    (target,) = graded.of(prompt, Arm.TARGET_ONLY, ("greedy",))
    answer = graded.answers[target.receipt_id]
    if at is None or at.target_token is None or at.other_token is None or not prompt_ids:
        return replace(pair, gap=None, kind="unknown")
    prefix = [*prompt_ids, *(answer.token_ids or ())[: at.index]]
    gap = await probe.gap_at(session, endpoint, prefix, at.target_token, at.other_token)
    if floor is not None:
        return replace(pair, gap=gap, kind=lossless.classify(gap, floor.tau))
    # Without a floor nothing is told from noise, but outside the top k is outside of any.
    is_outside = gap is not None and math.isinf(gap)
    return replace(pair, gap=gap, kind="violation" if is_outside else "unknown")


def near(asked: Attribution, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts whose divergence is between one and two noise floors: to be replayed."""
    return [
        p
        for p in prompts
        if p.prompt_id in asked.compared and asked.compared[p.prompt_id].kind == "near"
    ]


def settle(run: RunContext, asked: Attribution, prompts: Sequence[Prompt]) -> Attribution:
    """The same attribution with near divergences settled by their replays (phase greedy-near)."""
    receipts = run.store.receipts(
        run.run_id, stage=Stage.REPLAY, phase=NEAR_PHASE, outcome=Outcome.OK
    )
    answers = run.store.answers(r.receipt_id for r in receipts)
    ids = {(r.prompt_id, r.arm, r.repeat): answers[r.receipt_id].token_ids for r in receipts}
    compared = dict(asked.compared)
    for prompt in prompts:
        pair = compared[prompt.prompt_id]
        replays = [
            lossless.first_divergence(a, b)
            for repeat in range(NEAR_REPLAYS)
            if (a := ids.get((prompt.prompt_id, Arm.TARGET_ONLY, repeat))) is not None
            and (b := ids.get((prompt.prompt_id, Arm.SPECULATIVE, repeat))) is not None
        ]
        if pair.divergence is not None:
            kind = lossless.settle_near(pair.divergence, replays)
            compared[prompt.prompt_id] = replace(pair, kind=kind)
    return replace(asked, compared=compared)


# --- what the rules and the packet get ----------------------------------------------------------


def measure(
    run: RunContext,
    route: str,
    graded: Graded,
    asked: Attribution,
    prompts: Sequence[Prompt],
    temperatures: Sequence[Temperature],
    distributions: Result,
) -> list[Measurement]:
    """Quality, losslessness, form and structured output of one route."""
    stage = Stage.REPLAY
    found: list[Measurement] = []
    counts: list[Measurement] = []
    every: list[quality.Case] = []
    for at in temperatures:
        cases = [graded.case(p, at.phases, _kind(asked, p, at)) for p in prompts]
        measured = quality.measure_quality(
            cases, stage=stage, route=route, runs=at.runs, ties=run.rollout.replay.ties
        )
        every += cases
        counts += [
            replace(m, note=f"{at.label}: {m.note}")
            for m in measured
            if m.metric == "quality_regression_cases" and not m.cohort
        ]
        found += [
            replace(m, cohort=f"{at.label}, {m.cohort}" if m.cohort else at.label) for m in measured
        ]
    found.append(_both_temperatures(counts, prompts))
    found += [
        m
        for m in quality.measure_difference(every, stage=stage, route=route)
        if not m.cohort  # tasks are shown at each temperature
    ]
    pairs = [pair for at in temperatures for pair in looked(graded, prompts, at.phases)]
    found += drift.measure_drift(pairs, stage=stage, route=route)
    # All routes share one verifier, so the tokens compared on the others count as evidence too;
    # the violations are the route's own.
    tokens = sum(pair.exposure for pair in asked.compared.values())
    for m in lossless.measure_lossless(
        [asked.compared[p.prompt_id] for p in prompts if p.prompt_id in asked.compared],
        [asked.controls[p.prompt_id] for p in prompts if p.prompt_id in asked.controls],
        asked.floor,
        stage=stage,
        route=route,
    ):
        if m.metric == "lossless_violations" and m.estimate is not None:
            estimate = replace(m.estimate, n=tokens)
            note = f"{m.note}; {tokens} tokens were compared over all routes"
            found.append(replace(m, estimate=estimate, note=note))
        else:
            found.append(m)
    # One verifier serves all routes: what the battery found holds for each that samples.
    if any(r.phase == "sampled" and r.route == route for r in graded.receipts):
        found.append(
            battery.measurement(distributions.battery, distributions.why, stage=stage, route=route)
        )
    structured = [
        grading.Structured(
            r.arm,
            r.prompt_id,
            r.receipt_id,
            grading.grade(form, graded.answers[r.receipt_id].text).outcome,
            next((name for name in graded.slices[p.prompt_id] if name.startswith(p.task)), p.task),
        )
        for p in prompts
        if (form := asked_structure(p)) is not None
        for r in graded.by_prompt.get(p.prompt_id, ())
        if r.phase in ("greedy", "sampled") and r.receipt_id in graded.answers
        if r.outcome == Outcome.OK
    ]
    if structured:
        found += grading.measure_structured_validity(structured, stage=stage, route=route)
    return found


def _both_temperatures(counts: Sequence[Measurement], prompts: Sequence[Prompt]) -> Measurement:
    """Regression cases of a route at all temperatures together: counts and cases add up."""
    known = [m.estimate for m in counts if m.estimate is not None]
    estimate = None
    if known:
        estimate = replace(
            known[0],
            value=sum(e.value for e in known),
            low=sum(e.low for e in known),
            high=sum(e.high for e in known),
            n=sum(e.n for e in known),
        )
    examples = tuple(example for m in counts for example in m.examples)
    return replace(
        counts[0],
        cohort="",
        estimate=estimate,
        note=" | ".join(m.note for m in counts)
        if any(prompt.check.get("kind") != "none" for prompt in prompts)
        else f"none of the route's {len(prompts)} prompts has a check that grades its answer",
        examples=examples,
    )


def _kind(asked: Attribution, prompt: Prompt, at: Temperature) -> lossless.DivergenceKind | None:
    pair = asked.compared.get(prompt.prompt_id)
    return pair.kind if pair is not None and at.phases == GREEDY_PHASES else None


def evidence(
    run: RunContext,
    graded: Graded,
    asked: Attribution,
    prompts: Sequence[Prompt],
    temperatures: Sequence[Temperature],
    distributions: Result,
) -> dict[str, Any]:
    """`packet.ReplayEvidence`, and each prompt's case status for the matrix, greedy and sampled."""
    regressions: list[dict[str, Any]] = []
    statuses: dict[str, dict[str, str]] = {}
    tasks: list[tuple[str, list[quality.Case], Temperature]] = []
    for at in temperatures:
        by_task: dict[str, list[quality.Case]] = defaultdict(list)
        statuses[at.phases[0]] = {}
        for prompt in prompts:
            case = graded.case(prompt, at.phases, _kind(asked, prompt, at))
            status = quality.case_status(case, at.runs)
            statuses[at.phases[0]][prompt.prompt_id] = status
            if status != "not_applicable":
                by_task[prompt.task].append(case)
            if status == "regression":
                regressions.append(_regression(graded, asked, prompt, case, at))
        tasks += [(task, cases, at) for task, cases in sorted(by_task.items())]
    margin, level = _margin(run), ALPHA_FAIL / max(len(tasks), 1)
    known = [list(found.values()) for found in statuses.values()]
    return {
        "cases": sum(status != "not_applicable" for status in known[0]),
        "improvements": sum(found.count("improvement") for found in known),
        "regressions": regressions,
        "quality": [_quality(*row, margin, level) for row in tasks],
        "form": [_form(graded, prompts, at) for at in temperatures],
        "divergences": _divergences(asked, prompts),
        "noise_floor": _noise_floor(graded, asked, prompts),
        "lossless": distributions.to_dict(),
        "case_status": statuses,
    }


def _margin(run: RunContext) -> float:
    """Loss of passes that the table by task is held against: the rule's limit, or its default."""
    limit = run.guardrails.speculative_decoding_guardrails.max_quality_loss
    return QUALITY_MARGIN if limit is None else limit


def _regression(
    graded: Graded, asked: Attribution, prompt: Prompt, case: quality.Case, at: Temperature
) -> dict[str, Any]:
    target = graded.of(prompt, Arm.TARGET_ONLY, at.phases)[0]
    speculative = graded.of(prompt, Arm.SPECULATIVE, at.phases)[0]
    labels = {"tie": "numerical_tie", "violation": "real"}
    greedy = at.phases == GREEDY_PHASES
    found: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "route": prompt.route,
        "task": prompt.task,
        "phase": at.label,
        "label": labels.get(str(case.divergence), "not_attributed") if greedy else "sampled",
        "check": str(prompt.check.get("kind")),
        "reason": graded.grades[speculative.receipt_id].reason,
        "runs": min(len(case.target), len(case.speculative)),
        "target_passes": case.target.count("pass"),
        "speculative_passes": case.speculative.count("pass"),
        "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages),
        "target_text": graded.answers[target.receipt_id].text,
        "speculative_text": graded.answers[speculative.receipt_id].text,
        "receipts": [target.receipt_id, speculative.receipt_id],
    }
    if greedy and _differs(asked.compared, prompt):
        found["divergence"] = _divergence(prompt, asked.compared[prompt.prompt_id])
    return found


def _quality(
    task: str, cases: Sequence[quality.Case], at: Temperature, margin: float, level: float
) -> dict[str, Any]:
    """`packet.QualityOfTask`; a failure at `level`, which holds for all rows of the table together,
    so that none of them fails where the rule does not.
    """
    found = quality.task_quality(cases, at.runs, control="aa" in at.phases)
    passes = found.difference.high <= margin
    fails = quality.difference(cases, alpha=level).low > margin
    is_outside = found.difference.low > margin
    where = "within" if passes else "outside" if is_outside else "across"
    verdict = "pass" if passes and not found.note else "fail" if fails else "inconclusive"
    why = (
        f"{found.regressions} confirmed worse and {found.improvements} better by {at.runs} runs;"
        f" the interval of the loss is {where} the margin"
    )
    if is_outside and not fails:
        why += ", but not at the level at which any task of several fails"
    return {
        "task": f"{task}, {at.label}",
        "n": found.n,
        "target_passes": found.target_passes,
        "speculative_passes": found.speculative_passes,
        "lost": found.lost,
        "gained": found.gained,
        "flipped": found.flipped,
        "regressions": found.regressions,
        "improvements": found.improvements,
        "mcnemar_p": found.mcnemar_p,
        "difference": found.difference,
        "margin": margin,
        "verdict": verdict,
        "why": f"{why}; {found.note}" if found.note else why,
    }


def _form(graded: Graded, prompts: Sequence[Prompt], at: Temperature) -> dict[str, Any]:
    """`packet.FormOfAnswers`: faults that either arm shows, changes, and the ratio of lengths."""
    pairs = looked(graded, prompts, at.phases)
    faults = [drift.count_fault(pairs, fault) for fault in drift.FAULTS]
    return {
        "temperature": at.label,
        "pairs": len(pairs),
        "faults": [asdict(found) for found in faults if found.target or found.speculative],
        "none_shown": [f.fault for f in faults if f.n and not (f.target or f.speculative)],
        "changes": [asdict(found) for found in drift.changes(pairs)],
        "length": drift.length_ratio(pairs),
    }


def _divergences(asked: Attribution, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """`packet.Divergences`."""
    if not asked.compared:
        return {"not_measured": "the servers return no token ids, so outputs cannot be compared"}
    pairs = [(p, asked.compared[p.prompt_id]) for p in prompts if p.prompt_id in asked.compared]
    kinds = Counter(pair.kind for _, pair in pairs if pair.divergence is not None)
    worst = sorted(
        ((p, pair) for p, pair in pairs if pair.divergence is not None),
        key=lambda item: -(item[1].gap if item[1].gap is not None else float("inf")),
    )
    tokens = sum(pair.exposure for _, pair in pairs)
    control_tokens = sum(pair.exposure for pair in asked.controls.values())
    parted = sum(pair.divergence is not None for pair in asked.controls.values())
    against = stats.compare_rates(sum(kinds.values()), tokens, parted, control_tokens)
    return {
        "pairs": len(pairs),
        "tokens": tokens,
        "per_1000": 1000 * sum(kinds.values()) / tokens if tokens else None,
        "control_per_1000": 1000 * parted / control_tokens if control_tokens else None,
        "p_value": against.p_value,
        "diverged": sum(kinds.values()),
        "ties": kinds["tie"],
        "near": kinds["near"],
        "violations": kinds["violation"],
        "unknown": kinds["unknown"],
        "tau": asked.floor.tau if asked.floor is not None else None,
        "cases": [_divergence(p, pair) for p, pair in worst[:10]],
    }


def _divergence(prompt: Prompt, pair: lossless.Compared) -> dict[str, Any]:
    at = pair.divergence
    return {
        "prompt_id": prompt.prompt_id,
        "route": prompt.route,
        "position": at.index if at is not None else None,
        "gap": pair.gap,
        "kind": pair.kind or "unknown",
        "target_token": _token(at.target_token if at else None),
        "speculative_token": _token(at.other_token if at else None),
    }


def _token(token_id: int | None) -> str:
    return "end" if token_id is None else f"id {token_id}"


def _noise_floor(graded: Graded, asked: Attribution, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """`packet.NoiseFloor`."""
    if not asked.controls:
        return {"not_measured": "no A/A pair could be compared"}
    pairs = [asked.controls[p.prompt_id] for p in prompts if p.prompt_id in asked.controls]
    flipped = 0
    for prompt in prompts:
        runs = graded.outcomes(prompt, Arm.TARGET_ONLY, ("greedy", "aa"))
        flipped += set(runs) == {"pass", "fail"}
    floor = asked.floor
    return {
        "pairs": len(pairs),
        "tokens": sum(pair.exposure for pair in pairs),
        "diverged": sum(pair.divergence is not None for pair in pairs),
        "flipped": flipped,
        "tau": floor.tau if floor is not None else None,
        "why_no_tau": asked.floor_note,
        "positions": floor.n if floor is not None else 0,
        "content_missed": floor.content_missed if floor is not None else None,
        "axes": [asdict(axis) for axis in floor.axes] if floor is not None else [],
    }
