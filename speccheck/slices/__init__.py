"""Compatibility slices: whether each server feature survives speculation, request by request.

`asked` makes the requests from the corpus, `checks` looks at both arms' answers, `support` makes
rows, measurements and evidence of them; here the three meet the store and the target.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from speccheck import client, launch, plan, probe
from speccheck.config import SliceName
from speccheck.context import RunContext
from speccheck.drive import Endpoint
from speccheck.errors import EngineError
from speccheck.grading import CodeExecution
from speccheck.records import Answer, Arm, PlannedRequest, Prompt, Receipt, Stage
from speccheck.slices.asked import (
    BETWEEN,
    LONG,
    RERUN,
    VARIANTS,
    Asker,
    Source,
    plan_slice,
    sources,
)
from speccheck.slices.checks import Group, Item, Reply, check
from speccheck.slices.support import (
    Row,
    Status,
    confirmed,
    evidence,
    measure,
    refused,
    row,
    summary,
)

__all__ = [
    "Asked",
    "Item",
    "Row",
    "Status",
    "Target",
    "asked",
    "confirmed",
    "evidence",
    "groups",
    "judge",
    "measure",
    "n_requests",
    "refused",
    "reruns",
    "row",
    "rows",
    "summary",
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The plan of all slices, and what it was made from."""

    requests: Mapping[SliceName, Sequence[PlannedRequest]]
    sources: Mapping[str, Source]
    """By prompt id."""
    missing: Mapping[SliceName, str]
    """Why a slice asks nothing."""


def n_requests(names: Sequence[SliceName], prompts: int) -> int:
    """About how many requests the slices send, both arms together."""
    extra = prompts if "warm_cache" in names else 0
    return 2 * (sum(len(VARIANTS[name]) for name in names) * prompts + extra)


def asked(run: RunContext, prompts: Sequence[Prompt]) -> Asked:
    """Plan the slices that the rollout names, from what replay has stored so far.

    Raises:
        EngineError: a server does not answer.
    """
    settings = run.rollout.replay
    receipts = [
        r
        for r in run.store.receipts(run.run_id, stage=Stage.REPLAY, warm_up=False)
        if r.phase in ("greedy", "sampled")
    ]
    answers = run.store.answers(r.receipt_id for r in receipts)
    found = sources(prompts, receipts, answers)
    longest = settings.long_context_tokens
    if longest is None and "long_context" in settings.slice_names:
        pair = run.arms()
        taken = [launch.longest_context(arm, pair.api_key) for arm in pair]
        longest = None if None in taken else min(n for n in taken if n is not None)
    requests: dict[SliceName, Sequence[PlannedRequest]] = {}
    missing: dict[SliceName, str] = {}

    def count(messages: Sequence[Mapping[str, str]]) -> int | None:
        return launch.count_prompt_tokens(run.rollout, {"": messages}).get("")

    for name in settings.slice_names:
        asker = Asker(name, run.run_id, settings, longest, run.rng("slice", name), count)
        requests[name] = plan_slice(asker, found)
        if not requests[name]:
            missing[name] = _why_nothing(name, found, longest)
    return Asked(requests, {source.prompt.prompt_id: source for source in found}, missing)


def _why_nothing(name: SliceName, found: Sequence[Source], longest: int | None) -> str:
    if not found:
        return "no prompt has an answer at temperature 0 that is long enough"
    if name == "long_context" and longest is None:
        return "the servers do not say how much they take; set replay.long_context_tokens"
    if name in ("penalties", "min_p", "logit_bias") and not any(s.ids for s in found):
        return "the servers give no token ids, without which this cannot be told"
    return "no prompt of the corpus is fit for it"


def judge(run: RunContext, planned: Asked, tau: float | None) -> dict[SliceName, list[Item]]:
    """Look at what came of every slice; what looks broken is asked again on both arms first.

    `tau` is the noise of the target's gaps, nats.

    Raises:
        EngineError: a server cannot be reached.
        StoreError: receipts cannot be written.
        UsageError: a check of the corpus is broken.
    """
    found = asyncio.run(_look(run, planned.requests, planned.sources, tau))
    suspects = {
        name: reruns(planned.requests[name], items)
        for name, items in found.items()
        if any(item.is_broken for item in items)
    }
    if suspects:
        run.drive("slices again", [r for part in suspects.values() for r in part])
        again = asyncio.run(_look(run, suspects, planned.sources, tau))
        found |= {name: confirmed(found[name], items) for name, items in again.items()}
    return found


def reruns(requests: Sequence[PlannedRequest], items: Sequence[Item]) -> list[PlannedRequest]:
    """All requests of the prompts that look broken in a slice, once more and with a cold cache."""
    broken = {item.prompt_id for item in items if item.is_broken}
    return [
        replace(
            request,
            repeat=request.repeat + RERUN,
            pair_id=f"{request.pair_id}:again",
            cache_salt=f"{request.cache_salt}:again",
        )
        for request in requests
        if request.prompt.prompt_id.removesuffix(BETWEEN) in broken
    ]


async def _look(
    run: RunContext,
    requests: Mapping[SliceName, Sequence[PlannedRequest]],
    known: Mapping[str, Source],
    tau: float | None,
) -> dict[SliceName, list[Item]]:
    receipts = [
        r
        for r in run.store.receipts(run.run_id, stage=Stage.REPLAY, warm_up=False)
        if r.phase.startswith(plan.SLICE_PHASE)
    ]
    answers = run.store.answers(r.receipt_id for r in receipts)
    code_execution = run.rollout.corpus.code_execution
    found: dict[SliceName, list[Item]] = {}
    async with client.open_session() as session:
        target = Target(session, run.target(), tau)
        for name, part in requests.items():
            found[name] = []
            for group in groups(part, receipts, answers, known, code_execution=code_execution):
                found[name] += await check(name, group, target)
    return found


def groups(
    requests: Sequence[PlannedRequest],
    receipts: Sequence[Receipt],
    answers: Mapping[str, Answer],
    known: Mapping[str, Source],
    *,
    code_execution: CodeExecution = "off",
) -> list[Group]:
    """Requests of one slice with what came of them, one group per prompt; `known` by prompt id."""
    by_key = {(r.phase, r.prompt_id, r.repeat, Arm(r.arm)): r for r in receipts}
    replies: dict[str, dict[tuple[int, Arm], Reply]] = defaultdict(dict)
    for request in requests:
        prompt_id = request.prompt.prompt_id
        receipt = by_key.get((request.phase, prompt_id, request.repeat, request.arm))
        if receipt is not None and not prompt_id.endswith(BETWEEN):
            reply = Reply(request, receipt, answers.get(receipt.receipt_id))
            replies[prompt_id][request.repeat % RERUN, request.arm] = reply
    return [
        Group(known[prompt_id.removesuffix(LONG)], mine, code_execution)
        for prompt_id, mine in replies.items()
    ]


def rows(planned: Asked, found: Mapping[SliceName, Sequence[Item]]) -> list[Row]:
    """One row per slice."""
    return [row(name, items, planned.missing.get(name, "")) for name, items in found.items()]


class Target:
    """The target-only server as `checks.Oracle`."""

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, tau: float | None
    ) -> None:
        self.tau = tau
        self._session = session
        self._endpoint = endpoint
        self._prompts: dict[str, Sequence[int] | None] = {}

    async def prompt_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """See `checks.Oracle`."""
        key = repr(prompt.messages)
        if key not in self._prompts:
            self._prompts[key] = await probe.prompt_ids(self._session, self._endpoint, prompt)
        return self._prompts[key]

    async def logprobs(self, ids: Sequence[int]) -> Sequence[float | None] | None:
        """See `checks.Oracle`."""
        try:
            answer = await client.complete(
                self._session,
                self._endpoint.description.url,
                self._endpoint.served_model,
                ids,
                prompt_logprobs=0,
                api_key=self._endpoint.api_key,
                extra=self._endpoint.extra,
            )
        except EngineError:
            return None  # what then cannot be told is unclear, never fine
        return [None if entry is None else entry.logprob for entry in answer.prompt_logprobs]
