"""Receipts with missing, zero and impossible fields: nothing crashes, and nothing passes on it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rule_receipts import receipt

from speccheck import decision, guardrails, matrix, measure, monitors
from speccheck.guardrails import RULES, RuleLimit
from speccheck.records import Finding, Receipt, Stage, Verdict, to_json
from speccheck.sweep import cells

LIMITS = {"rate": 0.5, "share": 0.05, "difference": 0.02, "tokens": 2.0, "count": 0}
ODD: dict[str, tuple[Any, ...]] = {
    "proposed_tokens": (None, 0, 1, 10**9),
    "accepted_tokens": (None, 0, 1, 10**9),
    "verify_steps": (None, 0, 1),
    "target_passes": (None, 0, 1),
    "completion_tokens": (0, 1, 2, 10**7),
    "prompt_tokens": (None, 0, 10**7),
    "tpot_ms": (0.0, 1e-6, 1e9),
    "ttft_ms": (0.0, 1e9),
    "outcome": ("error", "rejected", "incomplete", "cancelled"),
    "error_class": ("unsupported_parameter", "timeout"),
    "finish_reason": (None, "length"),
    "concurrency": (0, 4),
    "temperature": (1.0, 2.0),
    "k": (None, 0, 8),
    "priority": ("protected",),
    "warm_up": (True,),
    "decision": ("fell_back",),
    "decision_reason": ("eligibility policy: no",),
}
CLOCKS = ("sent_ns", "first_token_ns", "last_token_ns", "done_ns", "first_content_ns")


def odd_receipts(rng: random.Random, stage: str) -> list[Receipt]:
    """Up to 60 receipts of either arm, of few prompts and blocks, some of them odd in some way."""
    share, found = rng.choice([0.0, 0.02, 0.2, 0.6]), []
    prompts, blocks = rng.choice([1, 3, 50]), rng.choice([1, 4, 20])
    for i in range(rng.choice([0, 1, 2, 5, 40, 60])):
        fields: dict[str, Any] = {
            "stage": stage,
            "phase": "load",
            "prompt_id": f"p{rng.randrange(prompts)}",
            "pair_id": f"load:q{rng.randrange(30)}:0",
            "block": rng.randrange(blocks),
        }
        fields |= {name: rng.choice(odd) for name, odd in ODD.items() if rng.random() < share / 2}
        made = receipt(i, rng.choice(["speculative", "target_only"]), **fields)
        if rng.random() < share:
            made = replace(made, **{rng.choice(CLOCKS): rng.choice([None, 0, 10**15])})
        found.append(made)
    return found


def findings(receipts: list[Receipt], stage: str, seed: int) -> tuple[Finding, ...]:
    """What the rules, or in a canary the monitors, make of them."""
    limits = {
        name: RuleLimit(LIMITS.get(rule.kind, 1.05 if rule.kind == "speedup" else 0.1))
        for name, rule in RULES.items()
    }
    rng = np.random.default_rng(seed)
    if stage != "canary":
        measured = measure.measure_route(receipts, stage=stage, route="chat", rng=rng)
        measured += measure.measure_protected(receipts, stage=stage, route="chat")
        floors = measure.noise_floors(receipts, rng=rng)
        return guardrails.judge(
            limits, measured, stage=Stage(stage), route="chat", noise_floors=floors
        )
    watched = monitors.Monitors("chat", limits, acceptance="betting", mix_share=0.5, steps=2)
    for i, one in enumerate(receipts):
        watched.add(one, share=(0.3, 0.5)[2 * i // len(receipts)])
    found = guardrails.judge(
        limits,
        watched.measurements(),
        stage=Stage.CANARY,
        route="chat",
        standings=watched.standings(),
    )
    assert len(watched.readings(found)) <= len(found)
    return found


@pytest.mark.parametrize("stage", ["replay", "shadow", "canary", "sweep"])
@pytest.mark.parametrize("seed", range(6))
def test_odd_receipts_are_survived_and_pass_nothing(stage: str, seed: int) -> None:
    """No exception, no pass without a whole estimate, no acceptance outside of 0 to 1, plain JSON,
    every receipt in one row of the matrix, and no row that pays from a single prompt.
    """
    rng = random.Random(f"{stage}{seed}")
    for _ in range(4):
        receipts = odd_receipts(rng, stage)
        if stage != "sweep":
            found = findings(receipts, stage, seed)
            for f in found:
                numbers = [f.estimate.value, f.estimate.low, f.estimate.high] if f.estimate else []
                assert f.verdict is not Verdict.PASS or numbers
                assert f.verdict is not Verdict.PASS or not any(map(math.isnan, numbers))
                if f.rule == "min_acceptance_rate" and numbers:
                    value, low, high = numbers
                    assert 0 <= low <= value + 1e-9
                    assert value <= high + 1e-9 <= 1 + 2e-9
            json.dumps(to_json(decision.decide("chat", Stage(stage), found)))
        else:
            json.dumps(to_json(cells.loads(receipts)))
        table = matrix.workload_matrix(receipts, rng=np.random.default_rng(seed))
        json.dumps(to_json(table))
        assert sum(row.share for row in table.rows) == pytest.approx(1 if table.rows else 0)
        if len({r.prompt_id for r in receipts}) == 1:
            assert not any(row.verdict == "speculate" for row in table.rows)
