"""Sampled answers that went over a joint follow the target's law, jointly on both sides of it.

The law is exact: the server's own probabilities of the first token and of the second after each
first. The first arm sends one token, drawn by the same engine with the request's seed, and dies.
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request

import aiohttp
import numpy as np
import pytest
from gateway_pair import gateway
from scipy import stats as scipy_stats
from scripted_server import Drop, Script, sse
from served_pair import small_pair
from test_engine_server import Running as Engine

from speccheck.gateway import joint
from speccheck.gateway.relay import Events, payload_of
from speccheck.records import Arm

ALPHA = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One small model of high entropy; it is both arms, since the joint alone is asked about."""
    pair = small_pair(tmp_path_factory.mktemp("small"))
    engine = Engine({"model": pair["target"], "max_logprobs": -1, "seed": 3})
    yield engine
    engine.process.kill()
    engine.process.wait()


def law_after(url: str, model: str, ids: list[int]) -> dict[int, float]:
    """Probabilities of the next token at temperature 1."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1, "logprobs": -1}
    body |= {"return_tokens_as_token_ids": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        top = json.load(reply)["choices"][0]["logprobs"]["top_logprobs"][0]
    law = {int(name.removeprefix("token_id:")): math.exp(value) for name, value in top.items()}
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    return law


def dies_after_one(url: str):
    """An arm whose first token is the engine's own for that seed, and that then is gone."""

    def script(body, _n) -> Script:
        asked = {name: value for name, value in body.items() if not name.startswith("stream")}
        raw = json.dumps({**asked, "max_tokens": 1}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", raw), timeout=60
        ) as reply:
            choice = json.load(reply)["choices"][0]
        choice["finish_reason"] = None
        return Script([sse({"id": "x", "model": body["model"], "choices": [choice]}), Drop()])

    return script


async def joined_pairs(running, model: str, ids: list[int], n: int) -> list[tuple[int, int]]:
    """The first two tokens of n answers, each with a seed of its own."""
    gate = asyncio.Semaphore(8)

    async def one(session: aiohttp.ClientSession, seed: int) -> tuple[int, int]:
        body = {"model": model, "prompt": ids, "max_tokens": 2, "temperature": 1, "seed": seed}
        body |= {"stream": True, "return_token_ids": True}
        async with gate, session.post(f"{running.url}/v1/completions", json=body) as reply:
            raw = await reply.read()
        events = [json.loads(p) for e in Events().feed(raw) if (p := payload_of(e)) != b"[DONE]"]
        first, second = (t for e in events for c in e["choices"] for t in c.get("token_ids") or ())
        return first, second

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, seed) for seed in range(n)))


def p_value(pairs: list[tuple[int, int]], law: dict[tuple[int, int], float]) -> float:
    """Pearson's goodness of fit; cells of fewer than 3 expected are one."""
    cells = [cell for cell, p in law.items() if p * len(pairs) >= 3]
    counts = np.array([pairs.count(cell) for cell in cells], float)
    expected = np.array([law[cell] * len(pairs) for cell in cells])
    counts = np.append(counts, len(pairs) - counts.sum())
    expected = np.append(expected, len(pairs) - expected.sum())
    assert len(cells) > 10
    return float(scipy_stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize(("is_broken", "n"), [(False, 500), (True, 200)])
def test_both_sides_of_a_joint_follow_the_law_together(server, tmp_path, monkeypatch, is_broken, n):
    """With a seed of its own the rest is drawn anew; with the first arm's it depends on the first
    half, which is seen.
    """
    ids = [5, 9, 3]
    model = server.call("/v1/models")[1]["data"][0]["id"]
    if is_broken:
        monkeypatch.setattr(joint, "_next_seed", lambda asked, _committed: asked.sampler.seed)
    law = {
        (first, second): p * q
        for first, p in law_after(server.url, model, ids).items()
        for second, q in law_after(server.url, model, [*ids, first]).items()
    }
    with gateway(
        tmp_path,
        speculative=dies_after_one(server.url),
        urls={Arm.TARGET_ONLY: server.url},
    ) as running:
        pairs = asyncio.run(joined_pairs(running, model, ids, n))
        kinds = {r.handover_kind for r in running.kept.wait(n)}
    assert kinds == {"unseeded"}
    assert (p_value(pairs, law) < ALPHA) == is_broken
