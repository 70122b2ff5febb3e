"""A live route that is made up: receipts and scrapes with times, for the tests of its guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rule_receipts import receipt

from speccheck import fallback, telemetry
from speccheck.config import FallbackConfig, Guardrails, Rollout
from speccheck.fallback import Machine, Sample, Settings
from speccheck.records import Arm, Receipt, Transition
from speccheck.telemetry import Snapshot, failed_scrape

S = 1_000_000_000

RULES = {"min_acceptance_rate": 0.55, "max_tpot_p50_regression": 0.10, "max_error_rate": 0.01}


def settings(
    rules: dict[str, float] | None = None, *, evidence: str = "receipts", **config: Any
) -> Settings:
    """The settings of route `chat`."""
    rollout = Rollout(
        name="test",
        speculation={"method": "ngram"},
        routes=({"name": "chat"},),
        fallback=FallbackConfig(**config),
    )
    guardrails = Guardrails(speculative_decoding_guardrails=rules or RULES)
    return fallback.settings_of(rollout, guardrails, "chat", evidence=evidence)


def served(number: int, at_ns: int, arm: str = "speculative", **fields: Any) -> Receipt:
    """A live request that was sent at this time; see `rule_receipts.receipt`."""
    made = receipt(number, arm, stage="live", phase="live", scheduled_ns=at_ns, **fields)
    moved = {
        name: value + at_ns
        for name in ("sent_ns", "first_token_ns", "first_content_ns", "last_token_ns", "done_ns")
        if (value := getattr(made, name)) is not None
    }
    return replace(made, **moved)


def traffic(
    rng: np.random.Generator,
    n: int,
    *,
    rate_per_s: float = 10.0,
    share: float = 0.9,
    start_ns: int = S,
    first: int = 0,
    acceptance: float = 0.7,
    slower: float = 0.7,
    errors: float = 0.0,
    target_errors: float = 0.0,
    **fields: Any,
) -> Iterator[Receipt]:
    """Poisson requests, a share of them speculative, with times of 20 ms a token, log-sd 0.3."""
    at_s = start_ns / S
    for number in range(first, first + n):
        at_s += rng.exponential(1 / rate_per_s)
        arm = "speculative" if rng.random() < share else "target_only"
        is_spec = arm == "speculative"
        values: dict[str, Any] = {
            "tpot_ms": 20.0 * rng.lognormal(0, 0.3) * (slower if is_spec else 1.0)
        }
        if is_spec:
            rate = float(np.clip(rng.normal(acceptance, 0.15), 0, 1))
            values["accepted_tokens"] = round(100 * rate)
        if rng.random() < (errors if is_spec else target_errors):
            values |= {"outcome": "error", "error_class": "server_error", "http_status": 500}
        yield served(number, round(at_s * S), arm, **(values | fields))


def feed(machine: Machine, receipts: Iterator[Receipt] | list[Receipt]) -> list[Transition]:
    """Hand receipts in as a gateway does; what came of it."""
    made: list[Transition] = []
    for one in receipts:
        moved = machine.observe(one, one.done_ns or one.scheduled_ns)
        while moved is not None:
            made.append(moved)
            moved = machine.tick(0)
    return made


def first_move(machine: Machine, receipts: Iterator[Receipt]) -> tuple[int, Transition | None]:
    """How many receipts were handed in until the route moved, and the transition."""
    n = 0
    for n, one in enumerate(receipts, 1):
        moved = machine.observe(one, one.done_ns or one.scheduled_ns)
        if moved is not None:
            return n, moved
    return n, None


def page(at_ns: int, **values: float) -> Snapshot:
    """A scrape with these gauges and counters: running, waiting, tokens, drafts, drafted, ..."""
    names = {
        "running": telemetry.RUNNING,
        "waiting": telemetry.WAITING,
        "tokens": telemetry.GENERATION_TOKENS,
        "drafts": telemetry.DRAFTS,
        "drafted": telemetry.DRAFT_TOKENS,
        "accepted": telemetry.ACCEPTED_TOKENS,
        "tpot_sum": f"{telemetry.TPOT}_sum",
        "tpot_count": f"{telemetry.TPOT}_count",
        "e2e_sum": f"{telemetry.E2E}_sum",
        "e2e_count": f"{telemetry.E2E}_count",
    }
    samples = {(names[n], (("engine", "0"),)): float(v) for n, v in values.items() if n in names}
    for reason in ("stop", "length", "error", "abort"):
        if reason in values:
            labels = (("engine", "0"), ("finished_reason", reason))
            samples[telemetry.FINISHED, labels] = float(values[reason])
    return Snapshot(at_ns, samples)


def scraped(machine: Machine, at_ns: int, **arms: Snapshot | str) -> Transition | None:
    """Hand in scrapes of arms, or why they failed, and let them be judged."""
    for arm, snapshot in arms.items():
        taken = failed_scrape(snapshot, at_ns) if isinstance(snapshot, str) else snapshot
        machine.telemetry(Sample(Arm(arm), taken), at_ns)
    return machine.tick(at_ns + fallback.GRACE_NS + 1)
