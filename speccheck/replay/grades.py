"""The answers of a replay with their grades, and what is sent because of them.

Later turns of a conversation need the answers before them, and a case that differs between the arms
is run again on both before it may be called a regression. Reruns are adaptive: a case is dropped as
soon as an arm contradicts itself, which most sampled ones do at the first rerun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speccheck import drift, grading, plan, quality, turns
from speccheck.context import RunContext
from speccheck.errors import UsageError
from speccheck.lossless import DivergenceKind
from speccheck.records import Answer, Arm, Outcome, PlannedRequest, Prompt, Receipt, Stage

NEAR_PHASE = "greedy-near"
"""Replays that settle whether a near divergence is noise."""

RERUNS = ("greedy-confirm", "sampled-confirm", NEAR_PHASE)
"""Phases of reruns: they ask suspects again and would bias every figure they went into."""


def in_figures(receipt: Receipt) -> bool:
    """Whether a receipt is part of figures: reruns and compatibility slices are not."""
    return receipt.phase not in RERUNS and not receipt.phase.startswith(plan.SLICE_PHASE)


GREEDY_PHASES = ("greedy", "aa", RERUNS[0])
SAMPLED_PHASES = ("sampled", RERUNS[1])


@dataclass(frozen=True, slots=True)
class Temperature:
    """One of the temperatures of a replay: its phases, its name, and the runs that confirm."""

    phases: tuple[str, ...]
    label: str
    runs: int


def temperatures(run: RunContext, cases: int) -> tuple[Temperature, Temperature]:
    """Temperature 0 and the sampled one. The more cases, the more runs confirm a regression."""
    settings = run.rollout.replay
    greedy = settings.confirmations or quality.confirming_greedy_runs(cases)
    sampled = f"temperature {settings.sampled_temperature:g}"
    return (
        Temperature(GREEDY_PHASES, "temperature 0", greedy),
        Temperature(SAMPLED_PHASES, sampled, quality.confirming_runs(cases)),
    )


MakePlan = Callable[[Sequence[Prompt], np.random.Generator], list[PlannedRequest]]
"""Prompts of one turn (or of one rerun) to requests."""


@dataclass(frozen=True)
class Graded:
    """Replay receipts by prompt id, with their answers and grades by receipt id."""

    by_prompt: Mapping[str, Sequence[Receipt]]
    answers: Mapping[str, Answer]
    grades: Mapping[str, grading.Grade]
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names beside its task under which a prompt's case is counted, by prompt id."""

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
        self, prompt: Prompt, phases: Sequence[str], kind: DivergenceKind | None = None
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
            self.slices.get(prompt.prompt_id, ()),
            prompt.group,
        )


def validate_checks(prompts: Sequence[Prompt]) -> None:
    """That every check of every turn can be applied, before anything is sent.

    Raises:
        UsageError: with the prompt's id, for a schema, query or test that is itself wrong.
    """
    for prompt in prompts:
        for check in (prompt.check, *prompt.follow_checks):
            try:
                grading.validate(check)
            except UsageError as error:
                raise UsageError(f"prompt {prompt.prompt_id}: {error}") from None


Known = dict[tuple[str, str], grading.Grade]
"""Grades by prompt id and text: identical answers are graded once, over all calls."""


def grade_all(run: RunContext, prompts: Sequence[Prompt], known: Known | None = None) -> Graded:
    """Grade every replay answer to these prompts that is in the store.

    Raises:
        UsageError: a check of the corpus is broken.
    """
    receipts = run.store.receipts(run.run_id, stage=Stage.REPLAY, warm_up=False)
    answers = run.store.answers(r.receipt_id for r in receipts)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    known = {} if known is None else known
    grades: dict[str, grading.Grade] = {}
    groups: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        prompt = by_id.get(receipt.prompt_id)
        if prompt is None or receipt.phase not in (*GREEDY_PHASES, *SAMPLED_PHASES):
            continue
        answer = answers.get(receipt.receipt_id)
        grades[receipt.receipt_id] = _grade(run, prompt, receipt, answer, known)
        groups[receipt.prompt_id].append(receipt)
    return Graded(groups, answers, grades, _slices(groups))


def _grade(
    run: RunContext, prompt: Prompt, receipt: Receipt, answer: Answer | None, known: Known
) -> grading.Grade:
    """A complete answer's grade: its check's, and that it ended as it should."""
    if receipt.outcome != Outcome.OK or answer is None:
        # Errors, refusals and cut streams have their own rules: a half answer is no wrong answer.
        why = f" ({receipt.error_class})" if receipt.error_class else ""
        return grading.Grade("not_applicable", f"the request ended as {receipt.outcome}{why}")
    key = (receipt.prompt_id, answer.text)
    if key not in known:
        known[key] = grading.grade(
            prompt.check, answer.text, code_execution=run.rollout.corpus.code_execution
        )
    found = known[key]
    problems = _ending(prompt, receipt, answer) if found.outcome == "pass" else []
    return grading.Grade("fail", problems[0]) if problems else found


def _ending(prompt: Prompt, receipt: Receipt, answer: Answer) -> list[str]:
    return grading.ending_problems(receipt, answer.text, prompt.stop, prompt.max_tokens)


def _slices(groups: Mapping[str, Sequence[Receipt]]) -> dict[str, tuple[str, ...]]:
    """A prompt's sampling features, and whether the target reasoned first where only some do."""
    reasons = {
        prompt_id: any((r.reasoning_tokens or 0) > 0 for r in group if r.arm == Arm.TARGET_ONLY)
        for prompt_id, group in groups.items()
    }
    mixed = len(set(reasons.values())) == 2
    found = {}
    for prompt_id, group in groups.items():
        names = sorted({name for r in group for name in r.features.split(",") if name})
        if mixed:
            how = "with reasoning" if reasons[prompt_id] else "without reasoning"
            names += [how, f"{group[0].task} {how}"]
        found[prompt_id] = tuple(names)
    return found


# --- what is sent -------------------------------------------------------------------------------


def send(
    run: RunContext,
    label: str,
    prompts: Sequence[Prompt],
    make_plan: MakePlan,
    *,
    warm_up: Sequence[PlannedRequest] = (),
) -> None:
    """Drive one phase: all first turns, then turn by turn with each arm's own answers between.

    Raises:
        EngineError: an arm cannot be reached.
        StoreError: receipts cannot be written.
    """
    run.drive(label, [*warm_up, *make_plan(prompts, run.rng(label))])
    later = turns.later_turns(prompts)
    for number in sorted({turn.number for turn in later}):
        mine = [turn for turn in later if turn.number == number]
        planned = make_plan([turn.prompt for turn in mine], run.rng(label, number))
        run.drive(f"{label}, turn {number}", turns.own_histories(planned, mine, said(run)))


def said(run: RunContext) -> turns.Said:
    """Every complete answer of the replay, by arm, phase, prompt and repeat."""
    receipts = run.store.receipts(run.run_id, stage=Stage.REPLAY, warm_up=False, outcome=Outcome.OK)
    answers = run.store.answers(r.receipt_id for r in receipts)
    return {
        (r.arm, r.phase, r.prompt_id, r.repeat): answers[r.receipt_id].text
        for r in receipts
        if r.receipt_id in answers
    }


def with_later_turns(run: RunContext, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts and, for each later turn that was sent, one more: as target-only had it."""
    known = said(run) if any(prompt.follow_up for prompt in prompts) else {}
    found = list(prompts)
    for turn in turns.later_turns(prompts):
        answers = turns.history(turn, known, Arm.TARGET_ONLY, "greedy", 0)
        found.append(turns.with_history(turn, answers) if answers else turn.prompt)
    return found


def same_question(run: RunContext, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, and those later turns before which both arms said the same at temperature 0.

    Only their answers can be compared token by token.
    """
    known = said(run) if any(prompt.follow_up for prompt in prompts) else {}
    found = list(prompts)
    for turn in turns.later_turns(prompts):
        target, speculative = (turns.history(turn, known, arm, "greedy", 0) for arm in Arm)
        if target is not None and target == speculative:
            found.append(turns.with_history(turn, target))
    return found


def confirm(
    run: RunContext,
    at: Temperature,
    prompts: Sequence[Prompt],
    phase: plan.Phase,
    known: Known,
) -> None:
    """Run one-sided cases again on both arms, one rerun at a time, until each has `at.runs` runs.

    Improvements are run again as regressions are: their count is only a mirror if both are held to
    the same. `phase` is that of the reruns.
    """
    later = turns.later_turns(prompts)
    everything = [*prompts, *(turn.prompt for turn in later)]
    for repeat in range(at.runs - 1):
        graded = grade_all(run, everything, known)
        suspects = [
            prompt
            for prompt in everything
            if quality.case_status(graded.case(prompt, at.phases), at.runs) == "candidate"
            and not all(_was_run(graded, prompt, arm, at.phases[-1], repeat) for arm in Arm)
        ]
        if suspects:
            rng = run.rng("confirm", at.label, repeat)
            planned = plan.closed_loop(phase, suspects, rng=rng, first_repeat=repeat)
            run.drive(
                f"confirm, {at.label}, run {repeat + 2} of {at.runs}",
                turns.own_histories(planned, later, said(run)),
            )


def _was_run(graded: Graded, prompt: Prompt, arm: Arm, phase: str, repeat: int) -> bool:
    return any(r.repeat == repeat for r in graded.of(prompt, arm, (phase,)))


# --- the form of the answers --------------------------------------------------------------------


def looked(graded: Graded, prompts: Sequence[Prompt], phases: Sequence[str]) -> list[drift.Looked]:
    """First answers of both arms to each prompt, and of the A/A control where `phases` has one."""
    found = []
    known: dict[str, grading.Seen] = {}
    first, control = phases[0], "aa" if "aa" in phases else ""
    for prompt in prompts:
        target, speculative, own = (
            _look(graded, prompt, arm, phase, known)
            for arm, phase in (
                (Arm.TARGET_ONLY, first),
                (Arm.SPECULATIVE, first),
                (Arm.TARGET_ONLY, control),
            )
        )
        if target is not None and speculative is not None:
            found.append(
                drift.Looked(
                    prompt.prompt_id,
                    target,
                    speculative,
                    own,
                    graded.of(prompt, Arm.SPECULATIVE, (first,))[0].receipt_id,
                    prompt.language,
                    (prompt.task, *graded.slices.get(prompt.prompt_id, ())),
                    prompt.group,
                )
            )
    return found


def _look(
    graded: Graded, prompt: Prompt, arm: Arm, phase: str, known: dict[str, grading.Seen]
) -> drift.Look | None:
    receipt = next(iter(graded.of(prompt, arm, (phase,))), None)
    answer = graded.answers.get(receipt.receipt_id) if receipt is not None else None
    if receipt is None or answer is None or receipt.outcome != Outcome.OK:
        return None
    if answer.text not in known:
        known[answer.text] = grading.see(answer.text)
    asked = asked_structure(prompt)
    return drift.Look(
        seen=known[answer.text],
        finish_reason=receipt.finish_reason,
        problems=tuple(_ending(prompt, receipt, answer)),
        well_formed=None if asked is None else grading.grade(asked, answer.text).outcome == "pass",
        tokens=receipt.completion_tokens,
    )


def asked_structure(prompt: Prompt) -> Mapping[str, Any] | None:
    """The check of the form alone of what a prompt's check or response_format asks for as JSON."""
    if (form := grading.form_of(prompt.check)) is not None:
        return form
    if prompt.response_format is None or prompt.response_format["type"] == "text":
        return None
    if prompt.response_format["type"] == "json_schema":
        schema = prompt.response_format["json_schema"]["schema"]
        return {"kind": "json_schema", "schema": schema}
    return {"kind": "json"}
