"""Receipts with chosen numbers, for the tests of matrix, guardrails and decision."""

from __future__ import annotations

from typing import Any

import numpy as np

from speccheck.records import Receipt, prompt_band, temperature_band


def receipt(number: int, arm: str, **fields: Any) -> Receipt:
    """One completed request. `ttft_ms`, `tpot_ms` and `completion_tokens` make its times."""
    values = {
        "ttft_ms": 50.0,
        "tpot_ms": 20.0,
        "completion_tokens": 64,
        "phase": "load",
        "temperature": 0.0,
        "prompt_tokens": 100,
        "proposed_tokens": 100 if arm == "speculative" else None,
        "accepted_tokens": 60 if arm == "speculative" else None,
        "verify_steps": 25 if arm == "speculative" else 0,
        "target_passes": 25 if arm == "speculative" else 63,
        "k": 4 if arm == "speculative" else None,
        "outcome": "ok",
    } | fields
    ttft_ns = round(1e6 * values.pop("ttft_ms"))
    tokens = values["completion_tokens"]
    last_ns = ttft_ns + round(1e6 * values.pop("tpot_ms") * ((tokens or 1) - 1))
    done = values["outcome"] == "ok"
    return Receipt(
        **{
            "receipt_id": f"{arm}:{values['phase']}:{number}",
            "run_id": "run",
            "stage": "shadow",
            "arm": arm,
            "route": "chat",
            "prompt_id": f"p{number}",
            "pair_id": f"{values['phase']}:p{number}:0",
            "repeat": 0,
            "attempt": 0,
            "block": 0,
            "warm_up": False,
            "mirror": False,
            "target_model": "target",
            "proposer": None,
            "algorithm": None,
            "draft_sampling": None,
            "engine": "scripted",
            "engine_config_id": f"engine:{arm}",
            "policy_version": "policy:1",
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": None,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_count": 0,
            "response_format": None,
            "logprobs": None,
            "task": "chat",
            "language": "en",
            "priority": "normal",
            "prompt_band": prompt_band(values["prompt_tokens"]),
            "output_band": "medium",
            "temperature_band": temperature_band(values["temperature"]),
            "features": "",
            "concurrency": 1,
            "cached_tokens": 0,
            "reasoning_tokens": None,
            "discarded_tokens": None,
            "acceptance_histogram": None,
            "counts_source": "engine",
            "counts_note": "",
            "scheduled_ns": 0,
            "sent_ns": 0,
            "first_token_ns": ttft_ns if done else None,
            "first_content_ns": ttft_ns if done else None,
            "last_token_ns": last_ns if done else None,
            "done_ns": last_ns,
            "server_queue_ms": None,
            "max_chunk_gap_ns": None,
            "chunks": 1,
            "http_status": 200,
            "error_class": None,
            "error_message": None,
            "finish_reason": "stop" if done else None,
            "stop_reason": None,
            "decision": "speculate",
            "decision_reason": "",
            "output_digest": None,
            **values,
        }
    )


def pair(
    number: int, *, target: dict[str, Any], speculative: dict[str, Any], **both: Any
) -> list[Receipt]:
    """Both arms' receipts of one prompt."""
    return [
        receipt(number, "target_only", **both | target),
        receipt(number, "speculative", **both | speculative),
    ]


def pairs(
    rng: np.random.Generator,
    n: int,
    *,
    target_ms: float = 20.0,
    speculative_ms: float = 10.0,
    target_ttft_ms: float = 50.0,
    speculative_ttft_ms: float = 50.0,
    acceptance: float = 0.6,
    first: int = 0,
    noise: float = 0.03,
    **both: Any,
) -> list[Receipt]:
    """Make n pairs with these median TPOTs and TTFTs: spread shared by the pair, noise of each."""
    found = []
    for number in range(first, first + n):
        shared, share = rng.lognormal(0, 0.1), acceptance
        if 0 < acceptance < 1:
            share = float(np.clip(rng.normal(acceptance, 0.05), 0, 1))
        sides = [
            {"tpot_ms": tpot * spread, "ttft_ms": ttft * spread}
            for tpot, ttft in ((target_ms, target_ttft_ms), (speculative_ms, speculative_ttft_ms))
            for spread in [shared * rng.lognormal(0, noise)]
        ]
        sides[1]["accepted_tokens"] = int(rng.binomial(100, share))
        found += pair(number, target=sides[0], speculative=sides[1], **both)
    return found
