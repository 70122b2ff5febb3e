"""Ask a running target what it thinks: teacher forcing, and its own noise floor.

A greedy divergence says little by itself. What counts is how far apart the target held the two
candidates at the first differing token, and how far that gap moves between two of the target's own
computations: alone or among others in a batch, decoding token by token or scoring the same tokens
in one pass. A sampled token is judged by the probabilities that the target gives at its place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
import numpy as np

from speccheck import client, lossless
from speccheck.battery import Scores
from speccheck.drive import Endpoint
from speccheck.errors import EngineError
from speccheck.records import Arm, ArmDescription, PlannedRequest, Prompt, Sampler, Stage

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

TOP_K = 5
"""Candidates asked for where the gap between two of them is wanted."""

TOP_ROWS = 20
"""Candidates asked for where the whole row is wanted, the rest lumped; vLLM's default maximum."""

SCORING_CONCURRENCY = 8

BATCH, PATH = "alone against in a batch", "decoding against scoring"
"""The two axes of the noise floor."""


async def prompt_ids(
    session: aiohttp.ClientSession, target: Endpoint, prompt: Prompt
) -> Sequence[int] | None:
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
    seen = await client.send(
        session,
        target.description.url,
        target.served_model,
        request,
        api_key=target.api_key,
        extra=target.extra,
        omit=target.omit,
    )
    return seen.prompt_token_ids


async def in_parallel(
    jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], at_once: int
) -> list[T]:
    """Results of the jobs in order, at most `at_once` of them running.

    The first error ends the others and is raised.
    """
    slots = asyncio.Semaphore(at_once)

    async def one(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with slots:
            return await job()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


# --- gaps ---------------------------------------------------------------------------------------


async def gap_at(
    session: aiohttp.ClientSession,
    target: Endpoint,
    prefix: Sequence[int],
    chosen: int,
    other: int,
) -> float | None:
    """Log p(chosen) - log p(other) under the target after `prefix`, in nats.

    Infinite where `other` is outside the target's top `TOP_K`; None where the server gives no
    usable log-probabilities (the divergence is then unknown, not harmless).
    """
    try:
        scored = await _score(session, target, [*prefix, chosen], TOP_K)
    except EngineError:
        return None
    last = scored[-1]
    if last is None:
        return None
    top = dict(last.top)
    if chosen not in top and not math.isfinite(last.logprob):
        return None
    if other not in top:
        return math.inf
    return top.get(chosen, last.logprob) - top[other]


async def gap_changes(
    session: aiohttp.ClientSession,
    target: Endpoint,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
) -> dict[str, list[float]]:
    """Per axis and position: how much the target's top-2 gap differs between two of its own ways to
    compute it, nats.

    Each prompt (token ids) is answered greedily alone, then again with `concurrency` requests in
    flight (`BATCH`), then prompt and first answer are scored in one pass (`PATH`). One entry per
    position with the same tokens before it and the same two candidates on top.

    Raises:
        EngineError: the server does not answer or gives no log-probabilities; no prompts.
    """
    if not prompts:
        raise EngineError(f"{target.description.url}: no token ids came with any prompt")
    changes: dict[str, list[float]] = {BATCH: [], PATH: []}
    decode = partial(_decode, session, target, max_tokens=max_tokens, top_k=TOP_K)
    alone = [await decode(prompt) for prompt in prompts]
    crowd = [prompts[i % len(prompts)] for i in range(max(concurrency, len(prompts)))]
    together = await in_parallel([partial(decode, prompt) for prompt in crowd], concurrency)
    for prompt, one, other in zip(prompts, alone, together, strict=False):
        ids = one.token_ids or ()
        same = lossless.exposure(ids, other.token_ids or ())
        changes[BATCH] += _gap_changes(one.logprobs[:same], other.logprobs[:same])
        if ids:
            scored = await _score(session, target, [*prompt, *ids], TOP_K)
            rows = [{} if row is None else dict(row.top) for row in scored[len(prompt) :]]
            changes[PATH] += _gap_changes(one.logprobs, rows)
    return changes


def _gap_changes(
    rows: Sequence[Mapping[int, float]], others: Sequence[Mapping[int, float]]
) -> list[float]:
    """Changes of the gap between the first's top two, where the second lists both."""
    found = []
    for row, other in zip(rows, others, strict=False):
        if len(row) < 2:
            continue
        first, second = sorted(row, key=lambda token: -row[token])[:2]
        if first in other and second in other:
            found.append((row[first] - row[second]) - (other[first] - other[second]))
    return found


def resolution(target: ArmDescription) -> float:
    """The smallest noise floor that makes sense for the target's arithmetic, nats (STATS 3.3).

    Two steps of its numbers for a top logit in [16, 32), where large models have theirs. A server
    that does not say what it computes in is taken for bf16, as most are: gaps that come out equal
    twice on a handful of prompts do not make it exact. 0 for float32, whose own noise is measured.
    """
    config: Any = target.config.get("vllm_config") or {}
    dtype = str((config.get("model_config") or {}).get("dtype"))
    if "float32" in dtype:
        return 0.0
    fp16 = "float16" in dtype and "bfloat16" not in dtype
    return 2 * lossless.bf16_step(16.0) / (8 if fp16 else 1)


# --- rows ---------------------------------------------------------------------------------------


async def greedy_rows(
    session: aiohttp.ClientSession, target: Endpoint, prompt: Sequence[int], *, max_tokens: int
) -> tuple[Mapping[int, float], ...]:
    """Log-probabilities of the top candidates at each position of the greedy answer.

    Raises:
        EngineError: the server does not answer or gives no log-probabilities.
    """
    answer = await _decode(session, target, prompt, max_tokens=max_tokens, top_k=TOP_ROWS)
    return answer.logprobs


async def rows_of(
    session: aiohttp.ClientSession,
    server: Endpoint,
    sequences: Mapping[Key, tuple[Sequence[int], int]],
    *,
    top_k: int,
    step: Callable[[], None],
) -> dict[Key, Scores]:
    """A model's likeliest tokens at the generated positions of sequences, by teacher forcing.

    `sequences` maps a name to (prompt and answer ids, index of the answer's first id); rows are
    those from the answer's second token on. A server that refuses `top_k` is asked for `TOP_K`;
    empty where it gives no log-probabilities at all. `step` is called after each sequence.

    Raises:
        EngineError: the server stops answering after it has scored something.
    """
    found: dict[Key, Scores] = {}

    async def one(key: Key, k: int) -> None:
        ids, start = sequences[key]
        scored = await _score(session, server, ids, k)
        found[key] = _rows(scored[start + 1 :], k)
        step()

    names = list(sequences)
    for k in dict.fromkeys((top_k, min(top_k, TOP_K))):
        try:
            for name in names[:1]:
                await one(name, k)
        except EngineError:
            continue
        rest = [partial(one, name, k) for name in names[1:]]
        await in_parallel(rest, SCORING_CONCURRENCY)
        return found
    return {}


def _rows(scored: Sequence[client.TokenLogprob | None], top_k: int) -> Scores:
    """The top k of each position. The token that is there may be listed beside them and must not
    be one of them for that: categories may not depend on what was drawn.
    """
    ids = np.zeros((len(scored), top_k), np.int64)
    probs = np.zeros((len(scored), top_k))
    width = top_k
    for i, row in enumerate(scored):
        if row is None:
            raise EngineError("the server left a position without log-probabilities")
        top = sorted(row.top, key=lambda pair: (-pair[1], pair[0]))[:top_k]
        width = min(width, len(top))
        ids[i, : len(top)] = [token for token, _ in top]
        probs[i, : len(top)] = [math.exp(logp) for _, logp in top]
    return Scores(ids[:, :width], probs[:, :width])


async def _decode(
    session: aiohttp.ClientSession,
    target: Endpoint,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    top_k: int,
) -> client.Completion:
    """A greedy answer with the top k at each of its positions."""
    answer = await client.complete(
        session,
        target.description.url,
        target.served_model,
        prompt,
        max_tokens=max_tokens,
        api_key=target.api_key,
        logprobs=top_k,
    )
    if len(answer.logprobs) != len(answer.token_ids or ()):
        raise EngineError(f"{target.description.url}: no log-probabilities with the answer")
    return answer


async def _score(
    session: aiohttp.ClientSession, target: Endpoint, token_ids: Sequence[int], top_k: int
) -> tuple[client.TokenLogprob | None, ...]:
    answer = await client.complete(
        session,
        target.description.url,
        target.served_model,
        token_ids,
        prompt_logprobs=top_k,
        api_key=target.api_key,
    )
    return answer.prompt_logprobs
