"""Answer pairs of a replay, for a judge or for people, and what they preferred, kept in the store.

Information beside the verdicts, never a gate: a judge has tastes of its own, and people disagree.
Pairs come from the first runs of both arms at temperature 0 and at the sampled one; those whose
answers are equal have nothing to prefer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speccheck import turns
from speccheck.client import chat, open_session
from speccheck.context import STORE_NAME, Reporter, RunContext, read_rollout
from speccheck.errors import EngineError, StoreError, UsageError
from speccheck.grading.blind import AnswerPair, draw
from speccheck.grading.judge import judge_pair
from speccheck.records import Arm, Outcome, Preference, Receipt, Stage
from speccheck.replay import grades
from speccheck.store import Store

GIVE_UP_AFTER = 5
"""Pairs in a row that a judge did not answer, after which it is asked no more."""


@contextmanager
def open_replay(
    path: Path, out: Path, run_id: str | None, report: Reporter, mode: Literal["read", "write"]
) -> Iterator[RunContext]:
    """A run that was replayed, with its prompts, to look at: nothing is begun and nothing sent.

    Raises:
        StoreError: there is no store in `out`.
        UsageError: no such run, or its prompts are not those of the rollout at `path`.
    """
    where = out / STORE_NAME
    if not where.exists():
        raise StoreError(f"{where}: no receipts there; run a stage first, or give the --out of one")
    rollout, guardrails, corpus = read_rollout(path)
    with Store.open(where, mode) as opened:
        known = [run for run in opened.runs() if run_id is None or run.run_id.startswith(run_id)]
        mine = [run for run in known if run.corpus_digest == corpus.digest]
        if not mine:
            what = "no run was made of these prompts" if known else f"no run {run_id or 'yet'}"
            raise UsageError(f"{where}: {what} ({path}); give the --rollout of the run")
        yield RunContext(path, rollout, guardrails, corpus, opened, mine[-1].run_id, out, report)


def answer_pairs(run: RunContext, route: str | None = None) -> list[AnswerPair]:
    """First complete answers of both arms to each prompt of the replay, turns included.

    A later turn is shown as target-only had it; where the arms had said different things before,
    the pair is of two conversations and is left out.

    Raises:
        UsageError: replay kept no answers.
    """
    first = [p for r in run.rollout.routes if route in (None, r.name) for p in run.prompts(r)]
    prompts = {p.prompt_id: p for p in grades.same_question(run, first)}
    later = {turn.prompt.prompt_id for turn in turns.later_turns(first)}
    sides: dict[str, dict[str, Receipt]] = {}
    for receipt in run.store.receipts(
        run.run_id, stage=Stage.REPLAY, warm_up=False, outcome=Outcome.OK
    ):
        if receipt.phase in ("greedy", "sampled") and receipt.prompt_id in prompts:
            sides.setdefault(receipt.pair_id, {})[receipt.arm] = receipt
    both = {pair_id: arms for pair_id, arms in sides.items() if len(arms) == len(Arm)}
    texts = run.store.answers(r.receipt_id for arms in both.values() for r in arms.values())
    found = []
    for pair_id, arms in both.items():
        target, speculative = (texts.get(arms[arm].receipt_id) for arm in Arm)
        prompt = prompts[arms[Arm.TARGET_ONLY].prompt_id]
        parted = prompt.prompt_id in later and arms[Arm.TARGET_ONLY].phase == "sampled"
        if target is not None and speculative is not None and not parted:
            found.append(
                AnswerPair(
                    pair_id,
                    prompt.task,
                    prompt.route,
                    prompt.messages,
                    target.text,
                    speculative.text,
                )
            )
    if not found:
        raise UsageError(
            f"{run.store.path}: the replay of run {run.run_id} kept no pair of answers"
            f"{f' on route {route}' if route else ''}; run `speccheck stage replay` first"
        )
    return found


@dataclass(frozen=True, slots=True)
class Judge:
    """Where the judge is reached. The key comes from the environment and is kept nowhere."""

    url: str
    model: str
    api_key: str | None
    timeout_s: float = 120.0
    concurrency: int = 4
    max_tokens: int = 512


async def judge(
    run: RunContext,
    judge_at: Judge,
    pairs: Sequence[AnswerPair],
    n: int,
    told: Callable[[Preference], None],
) -> int:
    """Have at most `n` of the pairs that differ judged; each verdict is in the store when told.

    Pairs that this judge has judged before are not asked again, so the same command resumes.

    Returns:
        How many pairs the judge did not answer.

    Raises:
        EngineError: it did not answer `GIVE_UP_AFTER` pairs in a row, or none at all.
    """
    known = {
        p.pair_id
        for p in run.store.preferences(run.run_id)
        if (p.source, p.who) == ("judge", judge_at.model)
    }
    left = [pair for pair in draw(pairs, n, run.run_id) if pair.pair_id not in known]
    failed: list[EngineError] = []
    in_a_row = 0
    gate = asyncio.Semaphore(judge_at.concurrency)
    async with open_session() as session:

        async def ask(messages: Sequence[Mapping[str, str]]) -> str:
            return await chat(
                session,
                judge_at.url,
                judge_at.model,
                messages,
                max_tokens=judge_at.max_tokens,
                timeout_s=judge_at.timeout_s,
                api_key=judge_at.api_key,
            )

        async def one(pair: AnswerPair) -> None:
            nonlocal in_a_row
            async with gate:
                if in_a_row >= GIVE_UP_AFTER:
                    return
                try:
                    found = await judge_pair(ask, pair, who=judge_at.model)
                except EngineError as error:
                    failed.append(error)
                    in_a_row += 1
                    return
                in_a_row = 0
                run.store.put_preferences(run.run_id, [found], given_at_ns=time.time_ns())
                told(found)

        await asyncio.gather(*(one(pair) for pair in left))
    if in_a_row >= GIVE_UP_AFTER or len(failed) == len(left) > 0:
        raise EngineError(
            f"the judge did not answer: {failed[-1]}; what it judged is kept, the same command "
            "goes on from there"
        )
    return len(failed)
