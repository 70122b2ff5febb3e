"""Sampled losslessness of a running pair: draw answers on both arms, have the target score them,
judge the battery.

Used by replay (small) and by `speccheck probe` (as large as asked). Answers are receipts of stage
`probe`, drawn once and kept: the same command comes back to them, a larger one adds to them. What
the target thinks of them is asked anew each time, since it is no observation of the arm.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from speccheck import battery, plan, probe
from speccheck.battery import Battery, Sampled, Scores
from speccheck.client import open_session
from speccheck.config import ProbeConfig
from speccheck.context import RunContext
from speccheck.drive import Endpoint
from speccheck.engine.drafters import NgramIndex
from speccheck.errors import EngineError
from speccheck.records import (
    PROBE,
    Answer,
    Arm,
    Outcome,
    PlannedRequest,
    Prompt,
    Sampler,
    Verdict,
)

CANDIDATES = 4
"""Prompts looked at for each that is chosen."""

DRAFTED, UNKNOWN = 20, 60
"""Samples per prompt where `ProbeConfig.samples` is None: with and without the draft's proposals,
so that one test of each kind reaches its minimum on four prompts of 24 tokens."""


@dataclass(frozen=True)
class Result:
    """What the battery found, or why it could not be run."""

    battery: Battery | None
    why: str
    """Why there is no battery; empty where there is one."""
    tested: Sequence[str] = ()
    not_tested: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """The battery's; an error where there is none."""
        return Verdict.ERROR if self.battery is None else self.battery.verdict

    def to_dict(self) -> dict[str, Any]:
        """`packet.Distributions`."""
        if self.battery is None:
            return {"not_measured": self.why}
        said = {"tested": list(self.tested), "not_tested": list(self.not_tested)}
        return battery.to_dict(self.battery) | said


def run_battery(
    run: RunContext,
    prompts: Sequence[Prompt],
    settings: ProbeConfig,
    *,
    wanted: Sequence[str] = tuple(battery.KINDS),
) -> Result:
    """Draw, score and judge.

    Raises:
        EngineError: an arm cannot be reached.
    """
    samples, why = draw(run, prompts, settings)
    if why:
        return Result(None, why)
    judged = battery.run(
        samples[Arm.SPECULATIVE],
        samples[Arm.TARGET_ONLY],
        rng=run.rng("battery"),
        margin=settings.margin,
        wanted=wanted,
    )
    tested, not_tested = battery.scope(
        judged, max_tokens=settings.max_tokens, concurrency=run.rollout.replay.concurrency
    )
    return Result(judged, "", tested, not_tested)


def draw(
    run: RunContext, prompts: Sequence[Prompt], settings: ProbeConfig
) -> tuple[Mapping[Arm, Sequence[Sampled]], str]:
    """Scored samples of both arms in the order of repeats, and why there are none (else empty).

    Prompts are chosen where the target is sure of the first token and open about the next, since
    tokens that it is certain of show nothing. Prompts with options that change the law (stop
    strings, structured output) are left out.

    Raises:
        EngineError: an arm cannot be reached.
    """
    if settings.samples == 0:
        return {}, "left out: replay.probe.samples is 0"
    plain = [p for p in prompts if p.response_format is None and not p.features and not p.stop]
    if not plain:
        return {}, (
            "every prompt asks for something that changes the target's law (stop strings, a format,"
            " a feature); replay.probe.samples: 0 leaves these tests out"
        )
    arms = run.endpoints()
    draft = run.draft()
    drafting = _drafting(arms[Arm.SPECULATIVE], draft)
    repeats = settings.samples
    if repeats is None:
        repeats = DRAFTED if drafting != "unknown" else UNKNOWN
    phase = plan.Phase(
        run.run_id,
        PROBE,
        f"t{settings.max_tokens}",
        Sampler(temperature=1.0),
        concurrency=run.rollout.replay.concurrency,
        keep_text=True,
        max_tokens=settings.max_tokens,
    )
    chosen = asyncio.run(_choose(run, phase, plain, settings))
    run.drive(
        f"samples at temperature 1 of {len(chosen)} prompts",
        [
            _seeded(request, run.rollout.seed)
            for request in plan.closed_loop(phase, chosen, rng=run.rng("probe"), repeats=repeats)
        ],
    )
    answers = _answers(run, phase, chosen, repeats)
    if not all(answers.values()):
        return {}, _why_none(run, phase)
    run.target()  # it scores what both have said
    return asyncio.run(_scored(run, arms, draft, drafting, chosen, answers)), ""


# --- drawing ------------------------------------------------------------------------------------


async def _choose(
    run: RunContext, phase: plan.Phase, prompts: Sequence[Prompt], settings: ProbeConfig
) -> list[Prompt]:
    """Prompts worth sampling, best first; those that have samples already stay chosen.

    Candidates are taken from all tasks in turn. Worth is the probability of the first token times
    the mean entropy of those after it, along the target's greedy answer.
    """
    known = {r.prompt_id for r in run.store.receipts(run.run_id, stage=PROBE, phase=phase.name)}
    by_task: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: p.prompt_id not in known):
        by_task[prompt.route, prompt.task].append(prompt)
    rows = max(len(group) for group in by_task.values())
    in_turn = [group[i] for i in range(rows) for group in by_task.values() if i < len(group)]
    candidates = sorted(in_turn, key=lambda p: p.prompt_id not in known)
    candidates = candidates[: CANDIDATES * settings.prompts]
    if len([p for p in candidates if p.prompt_id in known]) >= settings.prompts:
        return candidates[: settings.prompts]
    target = run.target()
    async with open_session() as session:
        try:
            worth = await probe.in_parallel(
                [
                    partial(_worth, session, target, prompt, settings.max_tokens)
                    for prompt in candidates
                ],
                phase.concurrency,
            )
        except EngineError:
            return candidates[: settings.prompts]  # no log-probabilities: any prompt will do
    order = sorted(
        zip(candidates, worth, strict=True),
        key=lambda pair: (pair[0].prompt_id not in known, -pair[1]),
    )
    return [prompt for prompt, _ in order[: settings.prompts]]


async def _worth(session: Any, target: Endpoint, prompt: Prompt, max_tokens: int) -> float:
    ids = await probe.prompt_ids(session, target, prompt)
    if ids is None:
        return 0.0
    rows = await probe.greedy_rows(session, target, ids, max_tokens=max_tokens)
    if len(rows) < 2:
        return 0.0
    entropies = [-sum(math.exp(logp) * logp for logp in row.values()) for row in rows[1:]]
    return math.exp(max(rows[0].values())) * sum(entropies) / len(entropies)


def _seeded(request: PlannedRequest, seed: int) -> PlannedRequest:
    """The request with a seed of its own: no two samples, and no two arms, share their chance."""
    text = f"{seed}\n{request.arm}\n{request.prompt.prompt_id}\n{request.repeat}"
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
    return replace(request, sampler=replace(request.sampler, seed=own))


def _answers(
    run: RunContext, phase: plan.Phase, prompts: Sequence[Prompt], samples: int
) -> dict[Arm, list[tuple[str, Answer]]]:
    """(prompt id, answer) of each sample, by arm, in the order of repeats."""
    wanted = {prompt.prompt_id for prompt in prompts}
    receipts = [
        r
        for r in run.store.receipts(run.run_id, stage=PROBE, phase=phase.name, outcome=Outcome.OK)
        if r.prompt_id in wanted and r.repeat < samples
    ]
    kept = run.store.answers(r.receipt_id for r in receipts)
    found: dict[Arm, list[tuple[str, Answer]]] = {arm: [] for arm in Arm}
    for receipt in sorted(receipts, key=lambda r: (r.repeat, r.prompt_id)):
        found[Arm(receipt.arm)].append((receipt.prompt_id, kept[receipt.receipt_id]))
    return found


def _why_none(run: RunContext, phase: plan.Phase) -> str:
    receipts = run.store.receipts(run.run_id, stage=PROBE, phase=phase.name)
    failed = next((r for r in receipts if r.outcome != Outcome.OK), None)
    if failed is None:
        return "no sample was drawn"
    return f"no sample came back from {failed.arm}: {failed.error_message or failed.outcome}"


# --- scoring ------------------------------------------------------------------------------------


def _drafting(arm: Endpoint, draft: Endpoint | None) -> str:
    """How the draft's proposals can be known: soft, one_hot, ngram or unknown."""
    config = arm.description.speculative_config or {}
    if draft is not None:
        return "soft" if config.get("draft_sample_method") == "probabilistic" else "one_hot"
    return "ngram" if config.get("method") == "ngram" else "unknown"


async def _scored(
    run: RunContext,
    arms: Mapping[Arm, Endpoint],
    draft: Endpoint | None,
    drafting: str,
    prompts: Sequence[Prompt],
    answers: Mapping[Arm, Sequence[tuple[str, Answer]]],
) -> dict[Arm, list[Sampled]]:
    """Every sample with the target's and the draft's probabilities, as far as they are given."""
    target = arms[Arm.TARGET_ONLY]
    spec = arms[Arm.SPECULATIVE].description.speculative_config or {}
    tokens = {
        (prompt_id, answer.token_ids)
        for given in answers.values()
        for prompt_id, answer in given
        if answer.token_ids is not None and len(answer.token_ids) > 1
    }
    async with open_session() as session:
        starts = {}
        for prompt in prompts:
            starts[prompt.prompt_id] = await probe.prompt_ids(session, target, prompt)
        jobs = {
            key: (*start, *key[1])
            for key in sorted(tokens)
            if (start := starts[key[0]]) is not None
        }
        servers = [(target, probe.TOP_ROWS)]
        if draft is not None:
            servers.append((draft, probe.TOP_ROWS if drafting == "soft" else 1))
        with run.report.phase("asking for their probabilities", len(jobs) * len(servers)):
            scored = await asyncio.gather(
                *(
                    probe.rows_of(
                        session,
                        server,
                        {key: (ids, len(ids) - len(key[1])) for key, ids in jobs.items()},
                        top_k=top_k,
                        step=run.report.step,
                    )
                    for server, top_k in servers
                )
            )
    target_rows = scored[0]
    draft_rows = scored[1] if draft is not None else {}
    return {
        arm: [
            _sampled(
                prompt_id,
                answer,
                starts[prompt_id],
                target_rows.get((prompt_id, answer.token_ids or ())),
                draft_rows.get((prompt_id, answer.token_ids or ())),
                drafting,
                spec,
            )
            for prompt_id, answer in given
        ]
        for arm, given in answers.items()
    }


def _sampled(
    prompt_id: str,
    answer: Answer,
    start: Sequence[int] | None,
    target: Scores | None,
    draft: Scores | None,
    drafting: str,
    spec: Mapping[str, Any],
) -> Sampled:
    if answer.token_ids is None:
        # No ids: words are compared, between the arms only.
        words = tuple(zlib.crc32(word.encode()) for word in answer.text.split())
        return Sampled(prompt_id, words)
    tokens = answer.token_ids
    n = len(tokens)
    proposals = None
    if drafting == "ngram" and start is not None:
        proposals = _lookups(spec, start, tokens)
    found = None
    if answer.accepted_per_step is not None and answer.drafted_per_step is not None:
        found = battery.rounds(
            n,
            answer.accepted_per_step,
            answer.drafted_per_step,
            None if proposals is None else lambda at: len(proposals[at]),
        )
    proposed: tuple[int | None, ...] | None = None
    if proposals is not None:
        proposed = _proposed(n, proposals, found)
    elif drafting == "one_hot" and draft is not None:
        proposed, draft = tuple(int(i) for i in draft.ids[:, 0]), None
    return Sampled(
        prompt_id,
        tokens,
        target,
        draft,
        proposed,
        None if found is None else battery.strata(n, found),
    )


def _lookups(
    spec: Mapping[str, Any], start: Sequence[int], tokens: Sequence[int]
) -> list[list[int]]:
    """Prompt lookup's proposal after the first i tokens of an answer, for each i."""
    low = int(spec.get("prompt_lookup_min") or spec.get("prompt_lookup_max") or 5)
    high = int(spec.get("prompt_lookup_max") or low)
    index = NgramIndex(range(high, low - 1, -1))
    ids = [*start, *tokens]
    k = int(spec["num_speculative_tokens"])
    return [index.follow(ids[: len(start) + i], k) for i in range(len(tokens))]


def _proposed(
    n: int, proposals: Sequence[Sequence[int]], found: Sequence[battery.Round] | None
) -> tuple[int | None, ...]:
    """What was proposed at each token from the second on: in its round, where rounds are known."""
    if found is None:
        return tuple(proposals[i][0] if proposals[i] else None for i in range(1, n))
    names: list[int | None] = [None] * n
    for at, drafted, accepted in found:
        for offset in range(min(drafted, accepted + 1, n - at)):
            names[at + offset] = proposals[at][offset]
    return tuple(names[1:])
