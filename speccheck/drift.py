"""Whether the form of the answers changed, where nothing grades what they say.

Two questions about pairs of answers to one prompt. Faults: is one arm's answer cut at the token
limit, past its stop string, malformed, empty, going in circles, refused or in another language
where the other arm's is not? A fault is as likely on either arm if speculation changes nothing, so
the paired difference is tested as quality is (Tango). Changes: does structure, language, refusal or
length differ at all? Those have no bad side; they are held against what the target shows against
itself in the A/A control. Pure functions over what `grading` sees of each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from speccheck import stats
from speccheck.grading import Seen
from speccheck.records import Estimate, Measurement

METRIC = "output_drift"


@dataclass(frozen=True, slots=True)
class Look:
    """One complete answer of one arm, as far as its form goes. None: not known or not asked for."""

    seen: Seen
    finish_reason: str | None = None
    problems: tuple[str, ...] = ()
    """What is wrong with its ending (`grading.ending_problems`)."""
    well_formed: bool | None = None
    """Whether it is the JSON that was asked for; None where none was."""
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """The answers of both arms to one prompt, and of the target once more where it was asked twice.

    `language` is the prompt's; `slices` and `group` are as in `quality.Case`.
    """

    prompt_id: str
    target: Look
    speculative: Look
    control: Look | None = None
    receipt_id: str = ""
    """The speculative arm's."""
    language: str = ""
    slices: tuple[str, ...] = ()
    group: str = ""


Fault = Callable[[Looked, Look], bool | None]


def _foreign(pair: Looked, look: Look) -> bool | None:
    known = look.seen.language
    return None if known is None or not pair.language else known != pair.language


FAULTS: dict[str, Fault] = {
    "cut at the token limit": lambda _, look: (
        None if look.finish_reason is None else look.finish_reason == "length"
    ),
    "wrong ending": lambda _, look: bool(look.problems),
    "malformed JSON": lambda _, look: None if look.well_formed is None else not look.well_formed,
    "empty": lambda _, look: look.seen.empty,
    "repeats itself": lambda _, look: look.seen.repeats,
    "refuses": lambda _, look: look.seen.refuses,
    "other language": _foreign,
}
"""Faults an answer can have by itself, whatever the other arm says."""

ANY = "any fault of form"
STOPPED = "no longer refuses"
"""The mirror of refusing: for prompts that should be refused it is the fault."""


@dataclass(frozen=True, slots=True)
class FaultCount:
    """How many pairs have one fault on which arm; n pairs could be told on both."""

    fault: str
    n: int
    target: int
    speculative: int
    only_speculative: int
    only_target: int
    difference: Estimate
    """Share on the speculative arm minus share on target-only: positive is worse."""
    mcnemar_p: float


def count_fault(pairs: Sequence[Looked], fault: str, *, alpha: float = 0.05) -> FaultCount:
    """Count one of `FAULTS`, `ANY` or `STOPPED` over pairs."""
    told: list[tuple[Looked, bool, bool]] = []
    for pair in pairs:
        sides = [_has(fault, pair, look) for look in (pair.target, pair.speculative)]
        if sides[0] is not None and sides[1] is not None:
            told.append((pair, sides[0], sides[1]))
    groups: dict[str, list[tuple[bool, bool]]] = {}
    for pair, target, speculative in told:
        groups.setdefault(pair.group or pair.prompt_id, []).append((target, speculative))
    worse = [sum(side == (False, True) for side in mine) for mine in groups.values()]
    better = [sum(side == (True, False) for side in mine) for mine in groups.values()]
    sizes = [len(mine) for mine in groups.values()]
    return FaultCount(
        fault=fault,
        n=len(told),
        target=sum(target for _, target, _ in told),
        speculative=sum(speculative for _, _, speculative in told),
        only_speculative=sum(worse),
        only_target=sum(better),
        difference=stats.tango_clustered(worse, better, sizes, alpha=alpha),
        mcnemar_p=stats.mcnemar_exact(sum(worse), sum(better)),
    )


def _has(fault: str, pair: Looked, look: Look) -> bool | None:
    if fault == ANY:  # of those that can be told on both arms: what is not known is no fault
        sides = (pair.target, pair.speculative)
        return any(
            found(pair, look)
            for found in FAULTS.values()
            if None not in [found(pair, side) for side in sides]
        )
    if fault == STOPPED:
        return not look.seen.refuses
    return FAULTS[fault](pair, look)


def measure_drift(
    pairs: Sequence[Looked], *, stage: str, route: str, alpha: float = 0.05
) -> list[Measurement]:
    """Metric output_drift: any fault over the route, then each fault that differs, and its slices.

    A fault is named for the route and for each slice in which the arms differ in it, so that a
    request class can be told apart (T17: answers with a repetition penalty run to the token limit).
    In whichever direction: rules are judged over all that is named, and naming only what became
    worse would leave half of the tests out of that correction.
    """
    if not pairs:
        return [Measurement(METRIC, stage, route, "", None, "no pair of complete answers")]

    def measured(mine: Sequence[Looked], fault: str, cohort: str) -> Measurement:
        found = count_fault(mine, fault, alpha=alpha)
        examples = [
            pair.receipt_id
            for pair in mine
            if (_has(fault, pair, pair.target), _has(fault, pair, pair.speculative))
            == (False, True)
        ]
        return Measurement(
            METRIC,
            stage,
            route,
            cohort,
            found.difference,
            f"{found.fault}: {found.speculative} of {found.n} answers, target-only {found.target}"
            f" (exact McNemar p {found.mcnemar_p:.2g})",
            tuple(filter(None, examples))[:5],
            tuple(count_fault(mine, fault, alpha=a).difference for a in stats.FAIL_LEVELS),
            share=len(mine) / len(pairs),
        )

    found = [measured(pairs, ANY, "")]
    names = dict.fromkeys(chain.from_iterable(pair.slices for pair in pairs))
    for fault in (*FAULTS, STOPPED):
        if not _differs(pairs, fault):
            continue
        found.append(measured(pairs, fault, fault))
        for name in names:
            mine = [pair for pair in pairs if name in pair.slices]
            if len(mine) < len(pairs) and _differs(mine, fault):
                found.append(measured(mine, fault, f"{fault}, {name}"))
    return found


def _differs(pairs: Sequence[Looked], fault: str) -> bool:
    found = count_fault(pairs, fault)
    return found.only_speculative + found.only_target > 0


# --- changes without a bad side -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """How often one property of the answer differs between the arms, and in the A/A control."""

    what: str
    n: int
    changed: int
    control_n: int
    control_changed: int
    p_value: float
    """One-sided, exact: of "no more often than in the control". NaN without a control."""


CHANGES: dict[str, Callable[[Look], object]] = {
    "structure": lambda look: look.seen.structure,
    "language": lambda look: look.seen.language,
    "refusal": lambda look: look.seen.refuses,
    "finish reason": lambda look: look.finish_reason,
}


def changes(pairs: Sequence[Looked]) -> list[Change]:
    """Each property compared; a property that is not known on one side is no change."""
    found = []
    for what, of in CHANGES.items():
        arms = [(of(p.target), of(p.speculative)) for p in pairs]
        own = [(of(p.target), of(p.control)) for p in pairs if p.control is not None]
        (changed, n), (control_changed, control_n) = (_differing(s) for s in (arms, own))
        p_value = (
            stats.compare_rates(changed, n, control_changed, control_n).p_value
            if n and control_n
            else float("nan")
        )
        found.append(Change(what, n, changed, control_n, control_changed, p_value))
    return found


def _differing(sides: Sequence[tuple[object, object]]) -> tuple[int, int]:
    known = [(a, b) for a, b in sides if a is not None and b is not None]
    return sum(a != b for a, b in known), len(known)


def length_ratio(pairs: Sequence[Looked], *, alpha: float = 0.05) -> Estimate:
    """Geometric mean ratio of answer lengths, speculative over target-only, in tokens."""
    known = [
        (p.target.tokens, p.speculative.tokens, p.group or p.prompt_id)
        for p in pairs
        if p.target.tokens and p.speculative.tokens
    ]
    target, speculative, groups = zip(*known, strict=True) if known else ((), (), ())
    return stats.geometric_mean_ratio(target, speculative, alpha=alpha, prompts=groups)
