"""Does the server keep the target's outputs? Divergence and its attribution.

Equal outputs are not the question: the same target run twice at another batch size differs too,
because floating-point sums depend on shape. So a greedy divergence is attributed: at the first
differing token the target is asked how far apart its two candidates are. A gap within the noise
that the target shows against itself (A/A control) is a tie; a gap beyond twice the noise is a
violation, since a lossless verifier cannot choose a token that the target clearly ranks lower.
What comes after the first differing token is another text and is not compared.

Pure functions: the stage does the sending.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from speccheck import stats
from speccheck.records import Estimate, Measurement

DivergenceKind = Literal["tie", "near", "violation", "unknown"]


# --- greedy divergence --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two token sequences differ.

    `index` counts output tokens from 0; a token is None where that sequence had ended.
    """

    index: int
    target_token: int | None
    other_token: int | None


def first_divergence(target_ids: Sequence[int], other_ids: Sequence[int]) -> Divergence | None:
    """Where two outputs part, or None if they are equal; a shorter output parts at its end.

    >>> first_divergence([5, 6, 7], [5, 9, 7])
    Divergence(index=1, target_token=6, other_token=9)
    """
    for index, (a, b) in enumerate(zip_longest(target_ids, other_ids)):
        if a != b:
            return Divergence(index, a, b)
    return None


def exposure(target_ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Compared tokens: up to and including the first differing one, or all."""
    divergence = first_divergence(target_ids, other_ids)
    return len(target_ids) if divergence is None else divergence.index + 1


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How far the target's top-2 gap moves between two of its own computations, in nats.

    `tau` is the largest of `n` observed changes (or the arithmetic's own step where that is
    larger): with 95 % confidence at most a share `content_missed` of positions moves more.
    """

    tau: float
    n: int
    """Positions of the axis that has fewest."""
    content_missed: float
    axes: tuple[NoiseAxis, ...] = ()


@dataclass(frozen=True, slots=True)
class NoiseAxis:
    """One way in which the target's arithmetic may differ from itself: largest change, nats."""

    name: str
    largest: float
    n: int


def noise_floor(
    gap_changes: Mapping[str, Sequence[float]], *, resolution: float = 0.0
) -> NoiseFloor | None:
    """Tolerance from A/A controls: |gap in one run - gap in the other| per position, nats, by axis
    (alone against in a batch, decoding against scoring). None where no axis has a position.

    `resolution` is the smallest tau that makes sense for the arithmetic, twice `bf16_step` for
    bf16 logits. n = 299 positions give 99 % content at 95 % confidence (Wilks 1941).

    Raises:
        ValueError: a NaN among the changes; a broken probe must not become a tolerance.
    """
    axes = []
    for name, changes in gap_changes.items():
        if any(math.isnan(change) for change in changes):
            raise ValueError("a gap change is NaN: the A/A probe failed, no noise floor is drawn")
        if changes:
            axes.append(NoiseAxis(name, max(abs(change) for change in changes), len(changes)))
    if not axes:
        return None
    n = min(axis.n for axis in axes)
    tau = max(resolution, *(axis.largest for axis in axes))
    return NoiseFloor(tau, n, stats.zero_events_bound(n), tuple(axes))


def bf16_step(logit: float) -> float:
    """Spacing of bf16 numbers at this size: 0.125 for |logit| in [16, 32), 0.0625 in [8, 16)."""
    return 2.0 ** (math.frexp(abs(logit))[1] - 8) if logit else 2.0**-133


def classify(gap: float | None, tau: float) -> DivergenceKind:
    """What a divergence is, from the target's log-probability gap at the first differing token.

    `gap` is log p(target's token) - log p(other's token) in nats at the common prefix; infinite
    where the other token is outside the top k, None (or NaN) where the probe gave no answer. A
    slightly negative gap is noise and a tie.
    """
    if gap is None or math.isnan(gap):
        return "unknown"
    if gap <= tau:
        return "tie"
    return "near" if gap <= 2 * tau else "violation"


def settle_near(first: Divergence, replays: Sequence[Divergence | None]) -> DivergenceKind:
    """A near divergence after replays of both arms: a violation if each replay parts likewise.

    Noise does not choose the same token at the same place each time. Without replays it stays near.
    """
    if not replays:
        return "near"
    return "violation" if all(replay == first for replay in replays) else "tie"


@dataclass(frozen=True, slots=True)
class Compared:
    """One greedy output compared with the target's, after attribution."""

    pair_id: str
    receipt_id: str
    """The other arm's receipt."""
    exposure: int
    divergence: Divergence | None
    gap: float | None = None
    """Nats, see `classify`; None where nothing diverged or nothing was answered."""
    kind: DivergenceKind | None = None
    """None where nothing diverged."""
    cohort: str = ""


def measure_lossless(
    compared: Sequence[Compared],
    controls: Sequence[Compared],
    floor: NoiseFloor | None,
    *,
    stage: str,
    route: str,
    alpha: float = 0.05,
) -> list[Measurement]:
    """Metrics lossless_violations and divergences_per_1000 of one route.

    `controls` are the A/A comparisons (target against target). The violation count's limits hold
    what is settled: low counts violations, high adds near and unknown divergences. n counts
    compared tokens. Without a noise floor nothing can be told from noise: a divergence is then
    unknown, unless the other token is not even among the target's top k.
    """
    if not compared:
        note = "no greedy outputs were compared"
        return [
            Measurement(metric, stage, route, "", None, note)
            for metric in ("lossless_violations", "divergences_per_1000")
        ]
    tokens = sum(c.exposure for c in compared)
    diverged = [c for c in compared if c.divergence is not None]
    kinds = Counter(
        (c.kind or "unknown") if floor or c.gap == math.inf else "unknown" for c in diverged
    )
    violations = kinds["violation"]
    open_ones = kinds["near"] + kinds["unknown"]
    control_tokens = sum(c.exposure for c in controls)
    control_diverged = sum(c.divergence is not None for c in controls)
    gaps = sorted(c.gap for c in diverged if c.gap is not None)
    parts = [
        f"{len(diverged)} of {len(compared)} outputs diverge within {tokens} compared tokens",
        f"{control_diverged} of {len(controls)} do in the A/A control"
        if controls
        else "no A/A control was run",
    ]
    if kinds:
        words = {"tie": "near ties", "near": "unsettled", "violation": "where the target is sure"}
        parts.append(
            ", ".join(f"{n} {words.get(kind, 'not attributed')}" for kind, n in kinds.items())
        )
    if gaps:
        parts.append(f"median gap {gaps[len(gaps) // 2]:.3g} nats")
    parts.append(
        f"noise floor {floor.tau:.3g} nats from {floor.n} positions"
        if floor
        else "no noise floor was measured"
    )
    note = "; ".join(parts)
    worst = sorted(
        (c for c in diverged if c.kind != "tie"), key=lambda c: -(c.gap if c.gap is not None else 0)
    )
    count = Estimate(
        violations, violations, violations + open_ones, tokens, "count of compared tokens", alpha
    )
    rate = stats.clopper_pearson(len(diverged), tokens, alpha=alpha)
    against = stats.compare_rates(len(diverged), tokens, control_diverged, control_tokens)
    rate_note = (
        f"{len(diverged)} in {tokens} tokens against {control_diverged} in {control_tokens} in the"
        f" A/A control (p {against.p_value:.2g} for no higher)"
        if control_tokens
        else f"{len(diverged)} in {tokens} tokens; no A/A control was run"
    )
    return [
        Measurement(
            "lossless_violations",
            stage,
            route,
            "",
            count,
            note,
            tuple(c.receipt_id for c in worst[:5]),
        ),
        Measurement(
            "divergences_per_1000",
            stage,
            route,
            "",
            Estimate(
                1000 * rate.value, 1000 * rate.low, 1000 * rate.high, tokens, rate.method, alpha
            ),
            rate_note,
        ),
    ]
