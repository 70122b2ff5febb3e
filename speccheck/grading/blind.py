"""Pairs of answers shown without their arms, and what was preferred. Information, never a gate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from speccheck import stats
from speccheck.records import Arm, Estimate, Preference

Choice = Literal["1", "2", "tie"]
"""Which of two answers as shown."""


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Both arms' answers to one prompt, and the chat that they answer."""

    pair_id: str
    task: str
    route: str
    messages: tuple[Mapping[str, str], ...]
    target: str
    speculative: str

    @property
    def differs(self) -> bool:
        """Whether there is anything to prefer."""
        return self.target.strip() != self.speculative.strip()

    def shown(self, first: Arm) -> tuple[str, str]:
        """The answers in the order in which they are shown."""
        both = (self.target, self.speculative)
        return both if first is Arm.TARGET_ONLY else (both[1], both[0])


def first_arm(key: str, pair_id: str) -> Arm:
    """Which arm is shown first: a coin that only the holder of the key can toss again."""
    heads = hashlib.sha256(f"first\n{key}\n{pair_id}".encode()).digest()[0] & 1
    return Arm.SPECULATIVE if heads else Arm.TARGET_ONLY


def draw(pairs: Sequence[AnswerPair], n: int, key: str) -> list[AnswerPair]:
    """At most `n` of the pairs that differ, in an order drawn with the key."""

    def place(pair: AnswerPair) -> bytes:
        return hashlib.sha256(f"place\n{key}\n{pair.pair_id}".encode()).digest()

    return sorted((pair for pair in pairs if pair.differs), key=place)[:n]


def preferred(first: Arm, choice: Choice) -> str:
    """The arm that was preferred, or tie."""
    if choice == "tie":
        return "tie"
    other = Arm.SPECULATIVE if first is Arm.TARGET_ONLY else Arm.TARGET_ONLY
    return (first if choice == "1" else other).value


@dataclass(frozen=True, slots=True)
class PreferenceSummary:
    """What one judge or reviewer preferred, over the pairs whose answers differ.

    n leaves out `unclear`. `difference` is the share that prefers target-only minus the share that
    prefers the speculative arm (Tango): positive is a loss; `p_value` is the sign test's.
    """

    source: str
    who: str
    n: int
    target_only: int
    speculative: int
    ties: int
    unclear: int
    difference: Estimate
    p_value: float


def summarise(given: Iterable[Preference], *, alpha: float = 0.05) -> list[PreferenceSummary]:
    """One summary per judge and reviewer."""
    by_who: dict[tuple[str, str], list[str]] = {}
    for one in given:
        by_who.setdefault((one.source, one.who), []).append(one.verdict)
    found = []
    for (source, who), verdicts in sorted(by_who.items()):
        target, speculative, ties = (
            verdicts.count(word) for word in (Arm.TARGET_ONLY, Arm.SPECULATIVE, "tie")
        )
        n = target + speculative + ties
        found.append(
            PreferenceSummary(
                source,
                who,
                n,
                target,
                speculative,
                ties,
                len(verdicts) - n,
                stats.tango(target, speculative, n, alpha=alpha),
                stats.mcnemar_exact(target, speculative),
            )
        )
    return found
