"""The mirror experiment: its plan, and its figures per class of traffic.

Blocks alternate between target-only traffic alone (A) and the same kind of traffic with a mirror on
the speculative arm (B), ABBA or BAAB by draw, so that drift of the machine cancels. Every route and
the protected traffic arrive by their own Poisson process (given how many there are, arrival times
are uniform), cut into blocks. The mirrored copy leaves at the same instant as its original; its
output is thrown away, only the digest stays.

The two A blocks of each four send the same requests of the routes at the same offsets: target-only
against target-only, which shows what this measurement tells apart, and costs no request more. Every
block starts with a cold prefix cache, so that neither arm nor block finds prompts of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speccheck import measure, plan, stats
from speccheck.config import Rollout, Route
from speccheck.context import PROTECTED, RunContext, latest_arms, named_rng
from speccheck.estimate import scheduling_notes
from speccheck.records import (
    Arm,
    Estimate,
    Finding,
    Measurement,
    Outcome,
    PlannedRequest,
    Prompt,
    Receipt,
    Sampler,
    Stage,
)
from speccheck.store import Store
from speccheck.sweep.calibration import Calibration

PHASE = "mirror"
A_A = "mirror-aa"
"""First part of the pair ids of the A/A control: both halves are target-only."""
ALONE_SHARE = 0.5
"""Length of a block without the mirror, as a share of one with it."""


def plan_mirror(run: RunContext, routes: Sequence[Route]) -> list[PlannedRequest]:
    """All blocks, in the order in which they are driven.

    Each route sends `requests_per_route` mirrored requests, and as many again times `ALONE_SHARE`
    in the blocks without the mirror.
    """
    settings = run.rollout.shadow
    mirrored_s = settings.requests_per_route * len(routes) / settings.rate_per_s
    total_s = mirrored_s * (1 + ALONE_SHARE)
    rng = run.rng("shadow-plan")
    arrivals: list[PlannedRequest] = []
    for route in routes:
        traffic = route.traffic("shadow")
        phase = _phase(run, Sampler(temperature=traffic.temperature, top_p=traffic.top_p))
        n = round(settings.requests_per_route * (1 + ALONE_SHARE))
        arrivals += plan.mirror(
            replace(phase, max_tokens=traffic.max_tokens),
            run.prompts(route, traffic),
            np.sort(rng.uniform(0, total_s, n)),
            rng=rng,
        )
    protected = run.protected_prompts()
    if protected:
        # Mirrored as well, so that both servers carry the same load and compare fairly. The copy
        # is no protected traffic: nobody waits for it.
        phase = replace(_phase(run, Sampler()), priorities=_priorities(run))
        offsets_s = np.sort(rng.uniform(0, total_s, round(settings.protected_rate_per_s * total_s)))
        arrivals += [
            replace(request, prompt=replace(request.prompt, priority="normal"))
            if request.mirror
            else request
            for request in plan.mirror(phase, protected, offsets_s, rng=rng)
        ]
    half = settings.blocks // 2
    length_s = mirrored_s / half
    with_mirror = [_cut(arrivals, i * length_s, length_s) for i in range(half)]
    alone = [
        [
            request
            for request in _cut(
                arrivals, mirrored_s + i * length_s * ALONE_SHARE, length_s * ALONE_SHARE
            )
            if request.arm is Arm.TARGET_ONLY
        ]
        for i in range(half)
    ]
    unused = 1 + max((request.repeat for request in arrivals), default=0)
    alone = [
        block
        for first, second in zip(alone[::2], alone[1::2], strict=True)
        for block in _a_a(first, second, unused)
    ]
    planned: list[PlannedRequest] = []
    for block, mirror in enumerate(_order(settings.blocks, rng)):
        for request in (with_mirror if mirror else alone).pop(0):
            salt = plan.cache_salt(run.run_id, request.arm, f"{PHASE}-{block}")
            planned.append(replace(request, block=block, cache_salt=salt))
    return planned


def _a_a(
    first: Sequence[PlannedRequest], second: Sequence[PlannedRequest], unused: int
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Two blocks without the mirror as an A/A control: the first's requests in both of them.

    Protected traffic stays as it arrived: with and without the mirror are compared on it. Copies
    need keys of their own: repeats from `unused` on are free.
    """
    ours = [
        replace(r, pair_id=plan.pair_id(A_A, r.prompt.prompt_id, r.repeat))
        for r in first
        if r.prompt.priority != PROTECTED
    ]
    copies = [replace(r, repeat=unused + r.repeat) for r in ours]
    return (
        ours + [r for r in first if r.prompt.priority == PROTECTED],
        copies + [r for r in second if r.prompt.priority == PROTECTED],
    )


def planned_counts(rollout: Rollout, protected: Sequence[Prompt]) -> tuple[int, int]:
    """How many requests `plan_mirror` makes: of the routes, and about how many protected ones.

    Each counts with its mirrored copy where it has one.
    """
    settings, routes = rollout.shadow, len(rollout.routes)
    copies = 2 + ALONE_SHARE
    mirrored_s = settings.requests_per_route * routes / settings.rate_per_s
    beside = settings.protected_rate_per_s * mirrored_s * copies if protected else 0.0
    return round(routes * settings.requests_per_route * copies), round(beside)


def warm_up(run: RunContext, routes: Sequence[Route]) -> list[PlannedRequest]:
    """Requests on both arms that are driven before the first block and never estimated from."""
    prompts: list[Prompt] = [prompt for route in routes for prompt in run.prompts(route)]
    return plan.warm_up(
        replace(_phase(run, Sampler()), concurrency=4), prompts, run.rollout.warm_up
    )


def _phase(run: RunContext, sampler: Sampler) -> plan.Phase:
    return plan.Phase(
        run.run_id, Stage.SHADOW, PHASE, sampler, concurrency=run.rollout.shadow.max_in_flight
    )


def _priorities(run: RunContext) -> dict[str, int]:
    """The server's number for protected traffic (lower goes first).

    Servers without priority scheduling refuse the field, so it is sent only where the captured
    configuration says that they have it.
    """
    captured = run.arms().target_only.config.get("vllm_config", {})
    policy = captured.get("scheduler_config", {}).get("policy")
    return {PROTECTED: -1} if policy == "priority" else {}


def _cut(
    arrivals: Sequence[PlannedRequest], start_s: float, length_s: float
) -> list[PlannedRequest]:
    """The arrivals of one block, their offsets counted from its start."""
    return [
        replace(request, offset_s=request.offset_s - start_s)
        for request in arrivals
        if request.offset_s is not None and start_s <= request.offset_s < start_s + length_s
    ]


def _order(blocks: int, rng: np.random.Generator) -> list[bool]:
    """Whether each block has the mirror: ABBA or BAAB, drawn for every four blocks."""
    order: list[bool] = []
    for _ in range(blocks // 4):
        first = bool(rng.integers(2))
        order += [first, not first, not first, first]
    return order


# --- figures ------------------------------------------------------------------------------------


def latency_floors(opened: Store, run_id: str) -> dict[str, Estimate]:
    """What target-only shows against itself in a run, see `measure.noise_floors`."""
    receipts = opened.receipts(run_id, stage=Stage.SHADOW, warm_up=False)
    return measure.noise_floors(receipts, rng=named_rng(opened.run(run_id).seed, "floor"))


def block_notes(run: RunContext, receipts: Sequence[Receipt]) -> list[str]:
    """What speaks against the length of the blocks: they should be three times the longest request.

    Each block ends before the next begins, so no load is carried over; but in a short block most
    of the time is spent filling up and draining, under less than the planned load.
    """
    settings = run.rollout.shadow
    mirrored_s = settings.requests_per_route * len(run.rollout.routes) / settings.rate_per_s
    block_s = mirrored_s / (settings.blocks // 2)
    longest_s = max((r.e2e_s for r in receipts if r.e2e_s is not None), default=0.0)
    if block_s >= 3 * longest_s:
        return []
    note = (
        f"a block with the mirror lasts {block_s:.3g} s, under three times the longest request "
        f"({longest_s:.3g} s), so it is seldom under the planned load: more requests per route, or "
        "fewer blocks"
    )
    return [note]


def evidence(
    run: RunContext,
    receipts: Sequence[Receipt],
    measured: Sequence[Measurement],
    finding: Finding | None,
    floors: Mapping[str, Estimate],
) -> dict[str, Any]:
    """`packet.ShadowEvidence`. `finding` is the judged rule on protected traffic, if any."""
    settings = run.rollout.shadow
    pairs = len(measure.a_a_pairs(receipts))
    few = f"{pairs} A/A pairs completed, {measure.FLOOR_LEAST} of equal length are needed"
    return {
        "noise_floor": {"pairs": pairs, "ratios": dict(floors)}
        if floors
        else {"not_measured": few},
        "scheduling": _scheduling(receipts, f"{settings.rate_per_s:g} requests/s"),
        "protected": _protected(receipts, measured, finding, settings.blocks),
        "sharing": "two servers and the client on one machine"
        if run.rollout.engine == "embedded"
        else "two servers, as attached",
    }


def _scheduling(receipts: Sequence[Receipt], load: str) -> list[dict[str, Any]]:
    """`packet.SchedulingFigures` per class of traffic and arm, blocks with the mirror only."""
    mirrored = _mirrored_blocks(receipts)
    rows = []
    classes = sorted({(receipt.route, receipt.arm) for receipt in receipts})
    for name, arm in classes:
        mine = [
            r
            for r in receipts
            if (r.route, r.arm) == (name, arm) and r.block in mirrored and r.outcome == Outcome.OK
        ]
        if not mine:
            continue
        queue_ages = [r.queue_age_s for r in mine if r.queue_age_s is not None]
        effective = [r.effective_s for r in mine if r.effective_s is not None]
        queued = [r.server_queue_ms / 1e3 for r in mine if r.server_queue_ms is not None]
        gaps = [r.max_chunk_gap_ns / 1e9 for r in mine if r.max_chunk_gap_ns is not None]
        rows.append(
            {
                "load": load,
                "traffic": name,
                "arm": arm,
                "n": len(mine),
                "figures": {
                    "queue_age_p50_s": _quantile(queue_ages, 0.5),
                    "queue_age_p95_s": _quantile(queue_ages, 0.95),
                    "server_queue_p95_s": _quantile(queued, 0.95),
                    "effective_latency_p50_s": _quantile(effective, 0.5),
                    "effective_latency_p95_s": _quantile(effective, 0.95),
                    "longest_chunk_gap_p95_s": _quantile(gaps, 0.95),
                },
            }
        )
    return rows


def _protected(
    receipts: Sequence[Receipt],
    measured: Sequence[Measurement],
    finding: Finding | None,
    blocks: int,
) -> dict[str, Any]:
    """`packet.ProtectedTraffic`."""
    mine = [
        r
        for r in receipts
        if r.priority == PROTECTED and r.outcome == Outcome.OK and r.effective_s is not None
    ]
    if not mine or not measured:
        return {"not_measured": "the corpus has no protected prompts"}
    mirrored = _mirrored_blocks(receipts)
    rows = []
    for block in sorted({r.block for r in mine}):
        times = [r.effective_s for r in mine if r.block == block and r.effective_s is not None]
        rows.append(
            {
                "block": block,
                "mirror": block in mirrored,
                "n": len(times),
                "p50_s": _quantile(times, 0.5),
                "p95_s": _quantile(times, 0.95),
            }
        )
    return {
        "metric": "effective latency, scheduled to last token",
        "design": f"{blocks} blocks, ABBA or BAAB by draw; each block ends before the next begins",
        "without_mirror_s": [r.effective_s for r in mine if r.block not in mirrored],
        "with_mirror_s": [r.effective_s for r in mine if r.block in mirrored],
        "blocks": rows,
        "ratio": measured[0].estimate,
        "limit": finding.limit if finding is not None else None,
        "verdict": finding.verdict.word if finding is not None else "inconclusive",
        "why": finding.why
        if finding is not None
        else "no rule limits the delay (max_protected_delay); where servers share cores, as the "
        "embedded pair does, the mirror itself slows everybody",
    }


def _mirrored_blocks(receipts: Sequence[Receipt]) -> set[int]:
    return {receipt.block for receipt in receipts if receipt.mirror}


def _quantile(values: Sequence[float], p: float) -> float | None:
    return stats.quantile(values, p) if values else None


def lookup_notes(run: RunContext, calibrated: Mapping[int, Calibration]) -> list[str]:
    """What lookup drafting should save on each route, estimated without load (see `estimate`).

    Empty for drafts of a model, and where the target's tokenizer is not on this machine.
    """
    target = latest_arms(run.store, run.run_id).get(Arm.TARGET_ONLY)
    captured = {} if target is None else target.config.get("vllm_config", {})
    folder = Path(str(captured.get("model_config", {}).get("model", "")))
    if not (folder / "tokenizer.json").is_file():
        return []
    return scheduling_notes(run.store, run.run_id, run.rollout, run.corpus, folder, calibrated)
