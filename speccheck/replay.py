"""What replay finds beyond receipts: grades, regression cases, and divergences attributed.

The stage plans and drives; here its receipts and texts become cases (a prompt, every run of both
arms, pass or fail), greedy outputs are compared token by token, and the target is asked about each
first difference. Identical answers to one prompt are graded once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speccheck import grading, lossless, probe, quality, stats
from speccheck.client import open_session, send
from speccheck.context import RunContext
from speccheck.drive import Endpoint
from speccheck.errors import EngineError
from speccheck.records import (
    Answer,
    Arm,
    Measurement,
    Outcome,
    PlannedRequest,
    Prompt,
    Receipt,
    Sampler,
    Stage,
)

QUALITY_MARGIN = 0.02
"""Loss of graded passes, as a share, that the aggregate test allows (non-inferiority margin)."""

NOISE_PROMPTS = 12
"""Prompts whose every position is decoded and scored for the noise floor: over 300 positions."""

RERUNS = ("greedy-confirm", "sampled-confirm")
"""Phases of reruns: they ask suspects again and would bias every figure they went into."""

GREEDY_PHASES = ("greedy", "aa", RERUNS[0])
SAMPLED_PHASES = ("sampled", RERUNS[1])


@dataclass(frozen=True)
class Graded:
    """Replay receipts by prompt id, with their answers and grades by receipt id."""

    by_prompt: Mapping[str, Sequence[Receipt]]
    answers: Mapping[str, Answer]
    grades: Mapping[str, grading.Grade]

    @property
    def receipts(self) -> list[Receipt]:
        """All graded receipts."""
        return [receipt for group in self.by_prompt.values() for receipt in group]

    def of(self, prompt: Prompt, arm: Arm, phases: Sequence[str]) -> list[Receipt]:
        """A prompt's receipts on one arm: in the order of `phases`, then of repeats."""
        mine = self.by_prompt.get(prompt.prompt_id, ())
        found = [r for r in mine if r.arm == arm and r.phase in phases]
        return sorted(found, key=lambda r: (phases.index(r.phase), r.repeat))

    def outcomes(self, prompt: Prompt, arm: Arm, phases: Sequence[str]) -> tuple[str, ...]:
        """Grades (pass, fail, not_applicable) of a prompt's runs on one arm."""
        return tuple(self.grades[r.receipt_id].outcome for r in self.of(prompt, arm, phases))

    def case(
        self, prompt: Prompt, phases: Sequence[str], kind: lossless.DivergenceKind | None = None
    ) -> quality.Case:
        """All runs of a prompt on both arms as one case."""
        speculative = self.of(prompt, Arm.SPECULATIVE, phases)
        return quality.Case(
            prompt.prompt_id,
            self.outcomes(prompt, Arm.TARGET_ONLY, phases),
            self.outcomes(prompt, Arm.SPECULATIVE, phases),
            speculative[0].receipt_id if speculative else "",
            prompt.task,
            kind,
        )


def grade_all(run: RunContext, prompts: Sequence[Prompt]) -> Graded:
    """Grade every replay answer that is in the store.

    Raises:
        UsageError: a check of the corpus is broken.
    """
    receipts = run.store.receipts(run.run_id, stage=Stage.REPLAY, warm_up=False)
    answers = run.store.answers(r.receipt_id for r in receipts)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    known: dict[tuple[str, str], grading.Grade] = {}
    grades: dict[str, grading.Grade] = {}
    for receipt in receipts:
        answer, prompt = answers.get(receipt.receipt_id), by_id.get(receipt.prompt_id)
        if prompt is None:
            continue
        if receipt.outcome != Outcome.OK or answer is None:
            grades[receipt.receipt_id] = grading.Grade(
                "not_applicable", f"the request ended as {receipt.outcome}"
            )
            continue
        key = (receipt.prompt_id, answer.text)
        if key not in known:
            known[key] = grading.grade(
                prompt.check, answer.text, code_execution=run.rollout.corpus.code_execution
            )
        grades[receipt.receipt_id] = known[key]
    groups: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        if receipt.receipt_id in grades:
            groups[receipt.prompt_id].append(receipt)
    return Graded(groups, answers, grades)


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


def to_confirm(graded: Graded, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts whose greedy outcomes are stable on target-only and other on the speculative arm."""
    found = []
    for prompt in prompts:
        target = graded.outcomes(prompt, Arm.TARGET_ONLY, ("greedy", "aa"))
        speculative = graded.outcomes(prompt, Arm.SPECULATIVE, ("greedy",))
        if len(set(target)) == 1 and speculative and {*target, *speculative} == {"pass", "fail"}:
            found.append(prompt)
    return found


def lost_once(graded: Graded, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts whose first sampled run passed on target-only and failed on the speculative arm."""
    return [
        prompt
        for prompt in prompts
        if graded.outcomes(prompt, Arm.TARGET_ONLY, ("sampled",)) == ("pass",)
        and graded.outcomes(prompt, Arm.SPECULATIVE, ("sampled",)) == ("fail",)
    ]


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
    endpoint = run.endpoints()[Arm.TARGET_ONLY]
    async with open_session() as session:
        ids = {}
        floor, note = None, ""
        for prompt in [*diverged, *prompts[:NOISE_PROMPTS]]:
            ids[prompt.prompt_id] = await _prompt_ids(session, endpoint, prompt)
        sample = [found for p in prompts[:NOISE_PROMPTS] if (found := ids[p.prompt_id])]
        try:
            changes = await probe.gap_changes(session, endpoint, sample, max_tokens=48)
            floor = lossless.noise_floor(changes) if changes else None
            note = "" if changes else "the server gave no log-probabilities to compare"
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
    kind = lossless.classify(gap, floor.tau) if floor is not None else "unknown"
    return replace(pair, gap=gap, kind=kind)


async def _prompt_ids(session: Any, endpoint: Endpoint, prompt: Prompt) -> Sequence[int] | None:
    """A prompt's token ids as the server itself renders it, from an answer of one token."""
    request = PlannedRequest(
        stage=Stage.REPLAY,
        phase="probe",
        arm=Arm.TARGET_ONLY,
        route=prompt.route,
        prompt=prompt,
        pair_id="",
        repeat=0,
        sampler=Sampler(),
        max_tokens=1,
        concurrency=1,
    )
    seen = await send(
        session,
        endpoint.description.url,
        endpoint.served_model,
        request,
        api_key=endpoint.api_key,
        extra=endpoint.extra,
        omit=endpoint.omit,
    )
    return seen.prompt_token_ids


# --- what the rules and the packet get ----------------------------------------------------------


def measure(
    run: RunContext,
    route: str,
    graded: Graded,
    asked: Attribution,
    prompts: Sequence[Prompt],
    sampled_runs: int,
) -> list[Measurement]:
    """Quality, losslessness and structured output of one route."""
    stage = Stage.REPLAY
    found: list[Measurement] = []
    counts: list[Measurement] = []
    for phases, label, runs in _temperatures(run, sampled_runs):
        cases = [graded.case(p, phases, _kind(asked, p, phases)) for p in prompts]
        measured = quality.measure_quality(cases, stage=stage, route=route, runs=runs)
        counts += [m for m in measured if m.metric == "quality_regression_cases" and not m.cohort]
        found += [
            replace(m, cohort=f"{label}, {m.cohort}" if m.cohort else label) for m in measured
        ]
    found.append(_both_temperatures(counts, prompts))
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
    structured = [
        grading.Structured(r.arm, r.receipt_id, grading.structure(p.check, text).outcome, p.task)
        for p in prompts
        for r in graded.by_prompt.get(p.prompt_id, ())
        if r.phase in ("greedy", "sampled")
        and r.outcome == Outcome.OK
        and (text := graded.answers[r.receipt_id].text) is not None
    ]
    if any(s.outcome != "not_applicable" for s in structured):
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


def _temperatures(
    run: RunContext, sampled_runs: int
) -> tuple[tuple[tuple[str, ...], str, int], ...]:
    """(phases, label, confirming runs) of the two temperatures."""
    settings = run.rollout.replay
    return (
        (
            GREEDY_PHASES,
            "temperature 0",
            settings.confirmations or quality.confirming_greedy_runs(0),
        ),
        (SAMPLED_PHASES, f"temperature {settings.sampled_temperature:g}", sampled_runs),
    )


def _kind(
    asked: Attribution, prompt: Prompt, phases: Sequence[str]
) -> lossless.DivergenceKind | None:
    pair = asked.compared.get(prompt.prompt_id)
    return pair.kind if pair is not None and phases == GREEDY_PHASES else None


def evidence(
    run: RunContext,
    graded: Graded,
    asked: Attribution,
    prompts: Sequence[Prompt],
    sampled_runs: int,
) -> dict[str, Any]:
    """`packet.ReplayEvidence`, and each prompt's case status for the matrix, greedy and sampled."""
    regressions: list[dict[str, Any]] = []
    improvements = judged = 0
    statuses: dict[str, dict[str, str]] = {"greedy": {}, "sampled": {}}
    by_tasks: list[dict[str, Any]] = []
    for phases, label, runs in _temperatures(run, sampled_runs):
        by_task: dict[str, list[quality.Case]] = defaultdict(list)
        for prompt in prompts:
            case = graded.case(prompt, phases, _kind(asked, prompt, phases))
            status = quality.case_status(case, runs)
            improvements += status == "improvement"
            statuses[phases[0]][prompt.prompt_id] = status
            if status != "not_applicable":
                by_task[prompt.task].append(case)
                judged += phases == GREEDY_PHASES
            if status == "regression":
                regressions.append(_regression(graded, asked, prompt, case, phases, label))
        by_tasks += [_quality(f"{task}, {label}", cases) for task, cases in sorted(by_task.items())]
    return {
        "cases": judged,
        "improvements": improvements,
        "regressions": regressions,
        "quality": by_tasks,
        "divergences": _divergences(asked, prompts),
        "noise_floor": _noise_floor(graded, asked, prompts),
        "case_status": statuses,
    }


def _regression(
    graded: Graded,
    asked: Attribution,
    prompt: Prompt,
    case: quality.Case,
    phases: Sequence[str],
    label: str,
) -> dict[str, Any]:
    target = graded.of(prompt, Arm.TARGET_ONLY, phases)[0]
    speculative = graded.of(prompt, Arm.SPECULATIVE, phases)[0]
    found: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "route": prompt.route,
        "task": prompt.task,
        "phase": label,
        "label": "numerical_tie" if case.divergence == "tie" else "real",
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
    if phases == GREEDY_PHASES and _differs(asked.compared, prompt):
        found["divergence"] = _divergence(prompt, asked.compared[prompt.prompt_id])
    return found


def _quality(task: str, cases: Sequence[quality.Case]) -> dict[str, Any]:
    """`packet.QualityOfTask`: first runs of both arms, paired."""
    n = len(cases)
    lost = sum((c.target[0], c.speculative[0]) == ("pass", "fail") for c in cases)
    gained = sum((c.target[0], c.speculative[0]) == ("fail", "pass") for c in cases)
    difference = stats.tango(lost, gained, n, alpha=0.05)
    passes = difference.high <= QUALITY_MARGIN
    fails = difference.low > QUALITY_MARGIN
    return {
        "task": task,
        "n": n,
        "target_passes": sum(c.target[0] == "pass" for c in cases),
        "speculative_passes": sum(c.speculative[0] == "pass" for c in cases),
        "lost": lost,
        "gained": gained,
        "mcnemar_p": stats.mcnemar_exact(lost, gained),
        "difference": difference,
        "margin": QUALITY_MARGIN,
        "verdict": "pass" if passes else "fail" if fails else "inconclusive",
        "why": f"{lost} lost and {gained} gained of {n}; the interval of the loss "
        f"[{difference.low:.3f}, {difference.high:.3f}] is "
        f"{'within' if passes else 'outside' if fails else 'across'} the margin {QUALITY_MARGIN}",
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
    return {
        "pairs": len(pairs),
        "tokens": sum(pair.exposure for _, pair in pairs),
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
        "positions": floor.n if floor is not None else 0,
        "content_missed": floor.content_missed if floor is not None else None,
        "latency": {},
    }
