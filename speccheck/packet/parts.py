"""What all sections are built from: marks, optional parts, figures with units, plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from speccheck.packet.evidence import RunEvidence
from speccheck.packet.view import Figure, Interval, Mark, Missing
from speccheck.records import Arm, Estimate, Receipt, Stage, Verdict, to_json

T = TypeVar("T")

STAGES = tuple(stage.value for stage in Stage)
ARM_NAMES = {Arm.TARGET_ONLY.value: "target-only", Arm.SPECULATIVE.value: "speculative"}
VERDICT_MARKS = {
    Verdict.PASS: Mark("pass", "✓", "good"),
    Verdict.INCONCLUSIVE: Mark("inconclusive", "?", "unsure"),
    Verdict.ERROR: Mark("error", "!", "broken"),
    Verdict.FAIL: Mark("fail", "✗", "bad"),
}

_UNITS = (
    ("_per_s", "per_s"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("_share", "share"),
    ("_rate", "share"),
    ("_ratio", "ratio"),
    ("_bytes", "bytes"),
)


def load_name(evidence: RunEvidence, receipt: Receipt) -> str:
    """The load a receipt was measured under: an arrival rate, or requests at once in a closed loop.

    Where arrivals set the load, a receipt's `concurrency` only bounds what is in flight.
    """
    settings = evidence.run.get("config", {}).get(receipt.stage)
    rate = settings.get("rate_per_s") if isinstance(settings, Mapping) else None
    if isinstance(rate, (int, float)):
        return f"{rate:g} requests/s"
    return f"concurrency {receipt.concurrency}"


def figure(name: str, value: float) -> Figure:
    """A figure whose name ends in its unit: `send_lag_p99_s` is "send lag p99" in seconds."""
    for ending, unit in _UNITS:
        if name.endswith(ending):
            shown = name if unit in ("share", "ratio") else name.removesuffix(ending)
            return Figure(words(shown) + (" per s" if unit == "per_s" else ""), value, unit)
    return Figure(words(name), value, "number")


def figures(values: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Every number of a mapping as a figure; what is no number is left out."""
    return tuple(
        figure(name, value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )


def part_of(values: Mapping[str, Any], name: str, why: str) -> Any:
    """An optional part of the evidence, or why it is missing."""
    found = values.get(name)
    if found is None:
        return Missing(why)
    if isinstance(found, Mapping) and "not_measured" in found:
        return Missing(str(found["not_measured"]))
    return found


def each(
    part: Mapping[str, Any], name: str, why: str, line: Callable[[Mapping[str, Any]], T]
) -> tuple[T, ...] | Missing:
    """An optional list, line by line, or why it is missing."""
    found = part_of(part, name, why)
    return found if isinstance(found, Missing) else tuple(line(item) for item in found)


def stage_evidence(evidence: RunEvidence, stage: Stage) -> Mapping[str, Any]:
    """A stage's own evidence; empty if the stage did not run."""
    found = evidence.stages.get(stage)
    return {} if found is None else found["evidence"]


def interval(value: Any, unit: str, why: str) -> Interval | Missing:
    """An `Estimate`, its dict form, a "not measured", or nothing, for the page."""
    if value is None:
        return Missing(why)
    if isinstance(value, Estimate):
        value = to_json(value)
    if "not_measured" in value:
        return Missing(str(value["not_measured"]))
    if _finite(value["value"]) is None:
        return Missing(f"{value['method']}, n {value['n']}")
    return Interval(
        value=value["value"],
        low=_finite(value["low"]),
        high=_finite(value["high"]),
        n=value["n"],
        method=value["method"],
        alpha=value["alpha"],
        unit=unit,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def known(value: float | None, why: str, unit: str) -> Figure | Missing:
    """A figure, or why there is none."""
    return Missing(why) if value is None or not math.isfinite(value) else Figure("", value, unit)


def seconds(value: float | None, why: str) -> Figure | Missing:
    """A duration, or why there is none."""
    return known(value, why, "s")


def verdict_mark(word: str) -> Mark:
    """The mark of a verdict word; an unknown word is a bug of ours, and a KeyError."""
    return VERDICT_MARKS[Verdict[word.upper()]]


def words(name: str) -> str:
    """A name as words."""
    return name.replace("_", " ")


def counted(n: int, noun: str) -> str:
    """A number with its noun: 1 route, 2 routes."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(items: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(p for p in (", ".join(items[:-1]), *items[-1:]) if p)
