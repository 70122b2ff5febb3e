"""Ask the running target what it thinks: teacher forcing, and its own noise floor.

A greedy divergence says little by itself. What counts is how far apart the target held the two
candidates at the first differing token, and how far that gap moves between two of the target's own
computations: decoding token by token, and scoring the same tokens in one pass. Only requests to
the target-only arm are sent, one at a time, so that batch size adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import aiohttp

from speccheck import client
from speccheck.drive import Endpoint
from speccheck.errors import EngineError

TOP_K = 5


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
        scored = await _score(session, target, [*prefix, chosen])
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
) -> list[float]:
    """Per position: how much the target's top-2 gap differs between decoding and scoring, nats.

    Each prompt (token ids) is answered greedily by decoding with log-probabilities, then prompt
    and answer are scored in one pass. One entry per generated position where both computations
    rank the same two tokens on top.

    Raises:
        EngineError: the server does not answer or gives no log-probabilities.
    """
    changes: list[float] = []
    for prompt in prompts:
        answer = await client.complete(
            session,
            target.description.url,
            target.served_model,
            prompt,
            max_tokens=max_tokens,
            api_key=target.api_key,
            logprobs=TOP_K,
        )
        if not answer.token_ids:
            continue
        if len(answer.logprobs) != len(answer.token_ids):
            raise EngineError(f"{target.description.url}: no log-probabilities with the answer")
        scored = await _score(session, target, [*prompt, *answer.token_ids])
        for decoded, forced in zip(answer.logprobs, scored[len(prompt) :], strict=True):
            change = _gap_change(decoded, None if forced is None else dict(forced.top))
            if change is not None:
                changes.append(change)
    return changes


def _gap_change(decoded: Mapping[int, float], forced: Mapping[int, float] | None) -> float | None:
    if forced is None or len(decoded) < 2:
        return None
    first, second = sorted(decoded, key=lambda token: -decoded[token])[:2]
    if first not in forced or second not in forced:
        return None
    return (decoded[first] - decoded[second]) - (forced[first] - forced[second])


async def _score(
    session: aiohttp.ClientSession, target: Endpoint, token_ids: Sequence[int]
) -> tuple[client.TokenLogprob | None, ...]:
    answer = await client.complete(
        session,
        target.description.url,
        target.served_model,
        token_ids,
        prompt_logprobs=TOP_K,
        api_key=target.api_key,
    )
    return answer.prompt_logprobs
