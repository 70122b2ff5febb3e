"""What a sweep sends: families of traffic, loads, and one arm's requests of a round. Pure.

A family is traffic that takes its turns together: one task of a route at the route's temperature,
the mixed traffic of three classes, or the batches that costs are calibrated from. A load is a
family at one concurrency. Everything follows from the rollout, its corpus and its seed, so that a
crashed sweep plans the same requests again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from speccheck import plan
from speccheck.context import RunContext
from speccheck.errors import UsageError
from speccheck.records import CALIBRATION, SWEEP, Arm, PlannedRequest, Prompt, Receipt, Sampler
from speccheck.sweep.cells import FIXED, MIXED, SEQUENTIAL

LEAST_PER_TURN = 4
"""Requests that a turn has at least, whatever the concurrency."""

CALIBRATION_TOKENS = 48
"""Output length of calibration requests: long against the reading of their prompts."""
CALIBRATION_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Class:
    """One kind of requests of a family: its task, or a class of mixed traffic."""

    name: str
    prompts: tuple[Prompt, ...]
    share: float = 1.0
    is_target_only: bool = False
    """Short requests of mixed traffic: sent with speculation off on every arm."""


@dataclass(frozen=True, slots=True)
class Family:
    """Traffic that takes its turns together."""

    route: str
    name: str
    classes: tuple[Class, ...]
    sampler: Sampler
    max_tokens: int | None = None
    stage: str = SWEEP
    prefix: str = ""
    """Of its phases, so that one prompt in two families has two keys."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One load to measure."""

    family: Family
    concurrency: int
    n: int
    """Requests per turn: whole waves of the concurrency."""
    wanted_rounds: int | None
    """None: as many as its open cells need and a budget allows."""

    @property
    def name(self) -> str:
        """Its name in samples and in progress, see `load_name`."""
        return f"{self.family.route}/{self.family.name}/c{self.concurrency}"


def load_name(receipt: Receipt) -> str:
    """The name of the load that a receipt was sent for."""
    name = receipt.task
    if receipt.stage == CALIBRATION:
        name = "batch"
    elif receipt.route == MIXED:
        name = MIXED
    return f"{receipt.route}/{name}/c{receipt.concurrency}"


# --- families and loads -------------------------------------------------------------------------


def families(run: RunContext, tasks: Sequence[str]) -> list[Family]:
    """Each task of each route, then mixed traffic; of `tasks` only, where any are named.

    Raises:
        UsageError: nothing is left.
    """
    found = []
    for route in run.rollout.routes:
        prompts = run.prompts(route)
        for task in sorted({prompt.task for prompt in prompts}):
            if tasks and task not in tasks:
                continue
            mine = tuple(prompt for prompt in prompts if prompt.task == task)
            sampler = Sampler(temperature=route.temperature, top_p=route.top_p)
            found.append(Family(route.name, task, (Class(task, mine),), sampler, route.max_tokens))
    if not tasks or MIXED in tasks:
        found += _mixed(run)
    if not found:
        raise UsageError(f"{run.path}: no route has prompts of task {', '.join(tasks)}")
    return found


def _mixed(run: RunContext) -> list[Family]:
    """Mixed traffic from the whole corpus; nothing where it lacks one of the classes."""
    mix = run.rollout.sweep.mix
    if mix is None:
        return []
    short = [p for p in run.corpus.prompts if p.output_band == "short"]
    long = [p for p in run.corpus.prompts if p.output_band != "short"]
    wanted = (
        ("short", mix.short, short),
        ("high_agreement", mix.high_agreement, _of(long, mix.high_agreement_tasks)),
        ("low_agreement", mix.low_agreement, _of(long, mix.low_agreement_tasks)),
    )
    classes = tuple(
        Class(
            name,
            tuple(replace(prompt, route=MIXED, task=name) for prompt in prompts),
            share,
            is_target_only=name == "short",
        )
        for name, share, prompts in wanted
        if share
    )
    if not all(one.prompts for one in classes):
        return []
    return [Family(MIXED, MIXED, classes, Sampler(), prefix="mix-")]


def _of(prompts: Sequence[Prompt], tasks: Sequence[str]) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.task in tasks]


def calibrating(run: RunContext) -> Family:
    """Short prompts and outputs of one length: a batch that is full from beginning to end."""
    prompts = sorted(
        run.corpus.prompts,
        key=lambda p: (sum(len(message["content"]) for message in p.messages), p.prompt_id),
    )[:CALIBRATION_PROMPTS]
    batch = Class("batch", tuple(replace(prompt, route=CALIBRATION) for prompt in prompts))
    return Family(
        CALIBRATION, batch.name, (batch,), Sampler(), CALIBRATION_TOKENS, CALIBRATION, "cal-"
    )


def planned_loads(
    run: RunContext,
    swept: Sequence[Family],
    concurrencies: Sequence[int],
    *,
    rounds: int | None,
) -> list[PlannedLoad]:
    """Every family at every concurrency; calibration first, since all predictions need it.

    `rounds` is how many each load gets, None where that is for a budget to say.
    """
    own = run.rollout.sweep
    batches = calibrating(run)
    found = [
        PlannedLoad(batches, c, c * -(-LEAST_PER_TURN // c), own.calibration_rounds)
        for c in concurrencies
    ]
    for family in swept:
        found += [
            PlannedLoad(
                family, c, c * max(own.requests_per_worker, -(-LEAST_PER_TURN // c)), rounds
            )
            for c in concurrencies
        ]
    return found


# --- one round ----------------------------------------------------------------------------------


def turn_order(n_arms: int, block: int) -> list[int]:
    """Places of the arms in a round: mirrored in every second one, rotated after every two.

    Over each two rounds every arm's mean time is the same, so linear drift cancels; over 2 n rounds
    every arm has stood everywhere.

    >>> [turn_order(3, block) for block in range(4)]
    [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]
    """
    shift = (block // 2) % n_arms
    order = [(i + shift) % n_arms for i in range(n_arms)]
    return order[::-1] if block % 2 else order


def class_slots(shares: Sequence[float], n: int) -> list[int]:
    """Which class each of n requests belongs to: always the one that lags its share the most.

    >>> class_slots([0.4, 0.4, 0.2], 10)
    [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
    """
    sent = [0] * len(shares)
    found = []
    for place in range(1, n + 1):
        lag = [round(share * place - count, 9) for share, count in zip(shares, sent, strict=True)]
        chosen = lag.index(max(lag))
        sent[chosen] += 1
        found.append(chosen)
    return found


def turn(
    run: RunContext, load: PlannedLoad, suffix: str, arm: Arm, block: int
) -> list[PlannedRequest]:
    """One arm's requests of a round: its classes by their shares, the same on every arm.

    `suffix` tells the arm's phase from that of target-only, whose suffix is empty.
    """
    family = load.family
    control = f"{family.prefix}c{load.concurrency}"
    phase = plan.Phase(
        run.run_id,
        family.stage,
        f"{control}{suffix}",
        family.sampler,
        concurrency=load.concurrency,
        cache=f"{control}/{block}",  # every round finds its prompts cold, on every arm
        ignore_eos=family.stage == CALIBRATION,
        max_tokens=family.max_tokens,
    )
    slots = class_slots([one.share for one in family.classes], (block + 1) * load.n)
    before, here = slots[: block * load.n], slots[block * load.n :]
    queues = []
    for i, one in enumerate(family.classes):
        start = before.count(i)
        requests = plan.turn(
            phase,
            arm,
            one.prompts,
            block=block,
            places=range(start, start + here.count(i)),
            control=control,
            rng=run.rng(SWEEP, load.name, one.name),
        )
        speculates = arm is Arm.SPECULATIVE and not one.is_target_only
        decision = "speculate" if speculates else "target_only"
        reason = SEQUENTIAL if load.wanted_rounds is None else FIXED
        queues.append(
            iter([replace(r, decision=decision, decision_reason=reason) for r in requests])
        )
    return [next(queues[i]) for i in here]
