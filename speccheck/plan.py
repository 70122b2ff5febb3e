"""Prompts, an arrival process, arms and a seed give the list of planned requests. Pure.

The whole load is data before the first byte is sent: offsets are drawn up front, in order, from a
generator that is passed in, so that a late server can never slow its own load down (coordinated
omission), a run can be repeated, and a crashed run can be resumed by asking which keys are missing.
Nothing here reads a clock, sends, or knows an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccheck.errors import UsageError
from speccheck.records import (
    Arm,
    PlannedRequest,
    Prompt,
    Sampler,
    digest,
    receipt_key,
)

SLICE_PHASE = "slice-"
"""Beginning of the phases that try one server feature each: they are part of no other figure."""

WARM_UP_ADVISED = 30
"""Warm-up requests per arm under which step times may not be stable yet (STATS 5.5)."""

BOTH_ARMS = (Arm.TARGET_ONLY, Arm.SPECULATIVE)


@dataclass(frozen=True, slots=True)
class Phase:
    """What all requests of one part of a stage share.

    `name` is the phase of the request key (greedy, sampled, aa, load-4 ...). `concurrency` is the
    number of workers in a closed loop and the cap on requests in flight in an open loop. `cache`
    names the prefix cache that the phase uses: phases with the same name find each other's
    prompts warm; by default each phase has its own and starts cold. `priorities` maps a prompt's
    priority (normal, protected) to the server's number; servers without priority scheduling
    refuse the field, so by default none is sent.
    """

    run_id: str
    stage: str
    name: str
    sampler: Sampler = field(default_factory=Sampler)
    concurrency: int = 1
    cache: str = ""
    keep_text: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    """Output length for every prompt of the phase; None for each prompt's own."""
    priorities: Mapping[str, int] = field(default_factory=dict)


# --- arrivals -----------------------------------------------------------------------------------


def poisson_offsets(n: int, rate_per_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """`n` arrival times of a Poisson process, seconds after the start, ascending.

    Raises:
        UsageError: for a rate that is not positive and finite.
    """
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise UsageError(f"arrival rate {rate_per_s} per second: give a rate above 0")
    offsets: NDArray[np.float64] = np.cumsum(rng.exponential(1.0 / rate_per_s, size=n))
    return offsets


# --- plans --------------------------------------------------------------------------------------


def closed_loop(
    phase: Phase,
    prompts: Sequence[Prompt],
    *,
    rng: np.random.Generator,
    arms: Sequence[Arm] = BOTH_ARMS,
    repeats: int = 1,
    first_repeat: int = 0,
) -> list[PlannedRequest]:
    """Each prompt on each arm, `repeats` times, sent as soon as a worker is free.

    Prompts are shuffled; the arms of one prompt follow each other in an order drawn per prompt, so
    that neither arm is always second and drift of the machine meets both alike. `first_repeat` lets
    a later plan ask the same prompts again under new keys.
    """
    return [
        _request(phase, arm, prompt, first_repeat + repeat)
        for prompt, repeat in _shuffled(prompts, repeats, rng)
        for arm in _drawn_order(arms, rng)
    ]


def single(
    phase: Phase, prompt: Prompt, repeat: int, *, arms: Sequence[Arm] = BOTH_ARMS, **changes: Any
) -> list[PlannedRequest]:
    """One prompt once on each arm, with what differs from the phase's other requests.

    `repeat` tells variants of one prompt apart; `changes` are fields of `PlannedRequest`.
    """
    return [replace(_request(phase, arm, prompt, repeat), **changes) for arm in arms]


def open_loop(
    phase: Phase,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float] | NDArray[np.float64],
    *,
    rng: np.random.Generator,
    arms: Sequence[Arm] = BOTH_ARMS,
) -> list[PlannedRequest]:
    """One arrival per offset; at each, the next prompt goes to every arm at that same instant.

    Prompts are shuffled and, where there are more offsets than prompts, used again with the next
    repeat. Both arms thus see the same arrivals of the same prompts.

    Raises:
        UsageError: for offsets that are negative or not in order, or without prompts.
    """
    return [
        replace(_request(phase, arm, prompt, repeat), offset_s=offset)
        for (prompt, repeat), offset in _arrivals(prompts, offsets_s, rng)
        for arm in _drawn_order(arms, rng)
    ]


def a_a(
    phase: Phase,
    prompts: Sequence[Prompt],
    compared_phase: str,
    *,
    rng: np.random.Generator,
) -> list[PlannedRequest]:
    """The control: target-only once more, as repeat 1, usually under another batch size.

    A pair is the target-only receipt of `compared_phase` (repeat 0) and the one planned here:
    both carry the pair id of the compared phase. What differs between them is the noise floor.
    """
    return [
        replace(
            _request(phase, Arm.TARGET_ONLY, prompt, 1),
            pair_id=pair_id(compared_phase, prompt.prompt_id, 0),
        )
        for prompt, _ in _shuffled(prompts, 1, rng)
    ]


def turn(
    phase: Phase,
    arm: Arm,
    prompts: Sequence[Prompt],
    *,
    block: int,
    places: range,
    control: str,
    rng: np.random.Generator,
) -> list[PlannedRequest]:
    """One arm's turn of a sweep: these places of an endless walk over the shuffled prompts.

    Every arm of a block (target-only, and each proposal length in a phase of its own) gets the same
    prompts if it is given a generator in the same state, and the pair ids of the phase `control`,
    that of target-only. A closed loop: no offsets.
    """
    cycles = -(-places.stop // len(prompts))
    walk = _shuffled(prompts, cycles, rng)[places.start : places.stop]
    return [
        replace(
            _request(phase, arm, prompt, repeat),
            pair_id=pair_id(control, prompt.prompt_id, repeat),
            block=block,
        )
        for prompt, repeat in walk
    ]


def mirror(
    phase: Phase,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float] | NDArray[np.float64],
    *,
    rng: np.random.Generator,
) -> list[PlannedRequest]:
    """Primary traffic on target-only and, at the same instants, a discarded copy on speculative.

    Raises:
        UsageError: as `open_loop`.
    """
    return [
        replace(request, mirror=request.arm is Arm.SPECULATIVE)
        for request in open_loop(phase, prompts, offsets_s, rng=rng)
    ]


def canary(
    phase: Phase,
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float] | NDArray[np.float64],
    *,
    rng: np.random.Generator,
    share: float,
    salt: str,
) -> list[PlannedRequest]:
    """One arrival per offset, each on one arm: speculative for a sticky `share` of the keys.

    A key is prompt and repeat, which stand for one user's request. What the eligibility policy says
    of it comes after (`eligibility.enforce`).

    Raises:
        UsageError: as `open_loop`, or for a share outside 0 to 1.
    """
    planned: list[PlannedRequest] = []
    for (prompt, repeat), offset in _arrivals(prompts, offsets_s, rng):
        if assign_share(f"{prompt.prompt_id}#{repeat}", salt, share):
            arm, reason = Arm.SPECULATIVE, f"in the canary share of {share:.3g}"
        else:
            arm, reason = Arm.TARGET_ONLY, f"outside the canary share of {share:.3g}"
        request = _request(phase, arm, prompt, repeat)
        planned.append(replace(request, offset_s=offset, decision_reason=reason))
    return planned


def warm_up(
    phase: Phase, prompts: Sequence[Prompt], n: int, *, arms: Sequence[Arm] = BOTH_ARMS
) -> list[PlannedRequest]:
    """`n` requests per arm that are driven and kept, but never estimated from.

    They run as phase `warmup-<phase>` with a cache of their own, so that the measured prompts
    stay cold. `WARM_UP_ADVISED` and more are advised: graphs and drafters' caches settle late.
    """
    if not prompts and n:
        raise UsageError("no prompts to warm up with: give a corpus that has some for this route")
    warm = replace(phase, name=f"warmup-{phase.name}", cache="", keep_text=False)
    return [
        replace(_request(warm, arm, prompts[i % len(prompts)], i // len(prompts)), warm_up=True)
        for i in range(n)
        for arm in arms
    ]


# --- canary share -------------------------------------------------------------------------------


def assign_share(key: str, salt: str, share: float) -> bool:
    """Whether `key` belongs to the first `share` (0 to 1) of all keys under `salt`.

    Sticky and monotone: the same key gets the same answer everywhere, and who is in at 5 % stays
    in at 20 %. Another salt draws another order.

    >>> [assign_share("user-7", "run-1", share) for share in (0.0, 1.0)]
    [False, True]

    Raises:
        UsageError: for a share outside 0 to 1, and for NaN.
    """
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"share {share}: give a number from 0 to 1 (5 % is 0.05)")
    hashed = hashlib.sha256(f"share\n{len(salt)}\n{salt}\n{key}".encode()).digest()
    return int.from_bytes(hashed[:8], "big") < share * 2**64


# --- resuming -----------------------------------------------------------------------------------


def remaining(
    planned: Sequence[PlannedRequest], run_id: str, done: Collection[str]
) -> list[PlannedRequest]:
    """What is still to be sent after a crash: the plan without the keys in `done`.

    `done` holds receipt ids (`Store.done_keys`). A request that a fallback sent to the other arm
    counts as done too, as long as the plan has no request of its own under that key. Offsets of a
    part-done phase are moved so that its first missing request is due at once.
    """
    keys = {receipt_key(request, run_id) for request in planned}
    left: list[PlannedRequest] = []
    touched: set[tuple[str, int]] = set()
    for request in planned:
        other = receipt_key(replace(request, arm=_other(request.arm)), run_id)
        if receipt_key(request, run_id) in done or (other in done and other not in keys):
            touched.add((request.phase, request.block))
        else:
            left.append(request)
    starts: dict[tuple[str, int], float] = {}
    for request in left:
        group = (request.phase, request.block)
        if group in touched and request.offset_s is not None:
            starts[group] = min(request.offset_s, starts.get(group, request.offset_s))
    return [
        request
        if request.offset_s is None
        else replace(
            request,
            offset_s=request.offset_s - starts.get((request.phase, request.block), 0.0),
        )
        for request in left
    ]


def reroute(request: PlannedRequest, reason: str) -> PlannedRequest:
    """The same request on the target-only arm, marked as fallen back: for a drive's `should_send`.

    The cache salt goes along: it only has to differ between runs and phases, not between servers.
    """
    return replace(
        request, arm=Arm.TARGET_ONLY, mirror=False, decision="fell_back", decision_reason=reason
    )


# --- parts --------------------------------------------------------------------------------------


def pair_id(phase: str, prompt_id: str, repeat: int) -> str:
    """Joins the arms' receipts of one prompt: `phase:prompt:repeat`."""
    return f"{phase}:{prompt_id}:{repeat}"


def cache_salt(run_id: str, arm: Arm, cache: str) -> str:
    """Keeps prefix caches of arms, runs and phases apart (vLLM's field, under 128 characters)."""
    return digest("salt", [run_id, arm, cache])


def _request(phase: Phase, arm: Arm, prompt: Prompt, repeat: int) -> PlannedRequest:
    return PlannedRequest(
        stage=phase.stage,
        phase=phase.name,
        arm=arm,
        route=prompt.route,
        prompt=prompt,
        pair_id=pair_id(phase.name, prompt.prompt_id, repeat),
        repeat=repeat,
        sampler=_sampler(phase.sampler, prompt, repeat),
        max_tokens=phase.max_tokens or prompt.max_tokens,
        concurrency=phase.concurrency,
        cache_salt=cache_salt(phase.run_id, arm, phase.cache or phase.name),
        priority=phase.priorities.get(prompt.priority, 0),
        keep_text=phase.keep_text,
        ignore_eos=phase.ignore_eos,
        decision="speculate" if arm is Arm.SPECULATIVE else "target_only",
    )


def _sampler(base: Sampler, prompt: Prompt, repeat: int) -> Sampler:
    """The phase's sampler with what the prompt itself asks for.

    A seed is spread over prompts and repeats, alike on both arms: one seed for all would make
    every repeat of a prompt the same draw.
    """
    seed = base.seed
    if seed is not None:
        text = f"{seed}\n{prompt.prompt_id}\n{repeat}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1
    kind: Any = (prompt.response_format or {}).get("type")
    return replace(
        base,
        seed=seed,
        stop=tuple(dict.fromkeys((*base.stop, *prompt.stop))),
        response_format=base.response_format if kind is None else str(kind),
    )


def _shuffled(
    prompts: Sequence[Prompt], repeats: int, rng: np.random.Generator
) -> list[tuple[Prompt, int]]:
    """Every prompt once per repeat, each repeat in an order of its own."""
    return [
        (prompts[int(i)], repeat)
        for repeat in range(repeats)
        for i in rng.permutation(len(prompts))
    ]


def _arrivals(
    prompts: Sequence[Prompt],
    offsets_s: Sequence[float] | NDArray[np.float64],
    rng: np.random.Generator,
) -> list[tuple[tuple[Prompt, int], float]]:
    """Shuffled prompts, cycled with a growing repeat, one for each offset."""
    offsets = np.asarray(offsets_s, dtype=np.float64)
    if offsets.size and not prompts:
        raise UsageError("no prompts for the planned arrivals: give a corpus that has some")
    if np.any(~np.isfinite(offsets)) or np.any(np.diff(offsets, prepend=0.0) < 0):
        raise UsageError("arrival offsets must be finite, from 0 up, and in order")
    repeats = -(-offsets.size // len(prompts)) if prompts else 0
    order = _shuffled(prompts, repeats, rng)[: offsets.size]
    return list(zip(order, offsets.tolist(), strict=True))


def _drawn_order(arms: Sequence[Arm], rng: np.random.Generator) -> list[Arm]:
    return [arms[int(i)] for i in rng.permutation(len(arms))]


def _other(arm: Arm) -> Arm:
    return Arm.TARGET_ONLY if arm is Arm.SPECULATIVE else Arm.SPECULATIVE
