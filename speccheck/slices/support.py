"""Slices as rows: what each server feature is worth on the speculative arm, and for the rules.

A feature is broken where the target serves a request rightly and the speculative arm does not, both
times that they are asked; one such request is enough, since the checks leave no room for chance. A
feature that the speculative arm refuses is no error: its requests belong on target-only, and the
eligibility policy is where that is said. What both arms refuse is not offered and concerns nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from speccheck import stats
from speccheck.config import SliceName
from speccheck.eligibility import KNOWN_FEATURES
from speccheck.measure import ALPHA
from speccheck.records import Estimate, Measurement, Stage
from speccheck.slices.asked import VARIANTS
from speccheck.slices.checks import Check, Item

Status = Literal["ok", "broken", "unsupported", "not_offered", "ignored", "unclear"]

LABELS: Mapping[SliceName, str] = {
    "json_object": "structured output, json_object",
    "json_schema": "structured output, json_schema",
    "stop": "stop strings",
    "logprobs": "log-probabilities",
    "penalties": "penalties",
    "min_p": "min_p",
    "logit_bias": "logit_bias",
    "seed": "seeds",
    "n": "several choices, n > 1",
    "long_context": "long context",
    "warm_cache": "warm prefix cache",
    "streaming": "streaming against whole",
    "tools": "tool calls",
    "ignored_fields": "unknown fields",
}
"""Slices by the names that people see."""

CHECKED: Mapping[SliceName, str] = {
    "json_object": "the answer is one JSON object",
    "json_schema": "the answer is JSON and valid under the schema",
    "stop": "text ends before the stop, finish_reason is stop, no token id or logprob past it",
    "logprobs": "one per token, of that token, as the target scores it; alternatives in order",
    "penalties": "each of three changes the answer, and as on target-only",
    "min_p": "min_p 1 leaves the most likely token only, or is refused",
    "logit_bias": "a token at -100 never comes, or the field is refused",
    "seed": "one seed twice on one arm gives one answer (told, not judged)",
    "n": "every choice comes, with text; all are graded",
    "long_context": "near the longest context, greedy answers are the target's",
    "warm_cache": "A, B, A: both A's are equal, and as on target-only",
    "streaming": "the same tokens have one text, finish_reason and counts",
    "tools": "the named function is called with valid arguments; pieces join to the same call",
    "ignored_fields": "what becomes of speculative: false (told, not judged)",
}
"""What each slice looks at, in a few words."""

VERDICTS: Mapping[Status, str] = {
    "ok": "pass",
    "broken": "fail",
    "unsupported": "pass",
    "not_offered": "pass",
    "ignored": "pass",
    "unclear": "inconclusive",
}
"""What a status means as a verdict: a feature that is refused is not broken."""


@dataclass(frozen=True, slots=True)
class Row:
    """One slice: how both arms did, and what follows."""

    slice: SliceName
    feature: str
    checked: str
    status: Status
    n: int
    """Requests per arm that could be judged on target-only."""
    target_ok: int
    speculative_ok: int
    why: str
    examples: tuple[str, ...] = ()
    """Receipt ids of what went wrong, on the speculative arm."""
    message: str = ""
    """What the speculative server says where it refuses."""


def row(name: SliceName, items: Sequence[Item], missing: str = "") -> Row:
    """One slice as a row. `missing` says why nothing was asked, where nothing was."""
    label = LABELS[name]
    if not items:
        return Row(
            name,
            label,
            CHECKED[name],
            "unclear",
            0,
            0,
            0,
            missing or "no prompt of the corpus is fit",
        )
    judged = [i for i in items if i.target.outcome in ("ok", "fault")]
    broken = [i for i in judged if i.is_broken]
    refused = [i for i in judged if i.speculative.outcome == "refused"]
    right = [i for i in judged if i.speculative.outcome == "ok"]
    status, why, shown = _status(name, items, broken, refused, right)
    return Row(
        name,
        label,
        CHECKED[name],
        status,
        len(judged),
        sum(i.target.outcome == "ok" for i in judged),
        len(right),
        why,
        tuple(i.receipt_id for i in shown[:5]),
        refused[0].speculative.why if refused else "",
    )


def _status(
    name: SliceName,
    items: Sequence[Item],
    broken: Sequence[Item],
    refused: Sequence[Item],
    right: Sequence[Item],
) -> tuple[Status, str, Sequence[Item]]:
    if broken:
        return "broken", _told(name, items, broken), broken
    if refused:
        why = f"the speculative server refuses it ({refused[0].speculative.why})"
        return "unsupported", f"route to target-only: {why}", refused
    if all(i.target.outcome == "refused" for i in items):
        if any(i.speculative.outcome == "ok" for i in items):
            return "unclear", f"target-only alone refuses it ({items[0].target.why})", ()
        return "not_offered", f"both servers refuse it ({items[0].target.why})", ()
    ignoring = [i for i in right if i.speculative.why.startswith("ignored")]
    if name == "ignored_fields" and ignoring:
        why = f"speculative: false is {ignoring[0].speculative.why}"
        return "ignored", f"{why}; speculation is controlled by server, not by field", ignoring
    both_wrong = [i for i in items if i.target.outcome == i.speculative.outcome == "fault"]
    open_ = [i for i in items if i.speculative.outcome == "unclear"]
    if right and name != "ignored_fields" and all(i.drafted == 0 for i in right):
        return "unclear", "nothing was drafted, so speculation was not at work", ()
    if right:
        quality = _quality(right)
        if quality is not None and quality.loss.low > 0:
            lost = [i for i in right if _lost(i) > 0]
            return "unclear", f"it may cost quality: {quality.text}", lost
        notes = ["" if quality is None else quality.text, _ties(right)]
        if open_:
            notes.append(f"{len(open_)} of {len(items)} could not be told: {_reason(open_)}")
        if both_wrong:
            notes.append(f"{len(both_wrong)} wrong on both arms: {both_wrong[0].target.why}")
        return "ok", "; ".join(filter(None, notes)) or "as target-only", ()
    if both_wrong:
        return "unclear", f"wrong on both arms: {both_wrong[0].target.why}", both_wrong
    return "unclear", f"could not be told: {_reason(open_ or items)}", ()


def confirmed(items: Sequence[Item], again: Sequence[Item]) -> list[Item]:
    """Items of one slice, what looked broken standing only where it did again, `again` being the
    items of the reruns. A crash that does not come back is no property of a feature.
    """
    twice = {(i.prompt_id, i.variant) for i in again if i.is_broken}
    return [
        i
        if not i.is_broken or (i.prompt_id, i.variant) in twice
        else replace(i, speculative=Check("unclear", f"{i.speculative.why}; not when asked again"))
        for i in items
    ]


def _told(name: SliceName, items: Sequence[Item], broken: Sequence[Item]) -> str:
    """How many are broken, in which variants where there are several, and the commonest reason."""
    share = f"{len(broken)} of {len(items)}"
    if len({i.variant for i in items}) > 1:
        variants = Counter(VARIANTS[name][i.variant] for i in broken)
        share += f" ({', '.join(f'{n} {variant}' for variant, n in variants.items())})"
    whys = Counter(i.speculative.why for i in broken)
    return f"{share}: {whys.most_common(1)[0][0]}"


def _reason(items: Sequence[Item]) -> str:
    whys = Counter(i.speculative.why or i.target.why for i in items)
    return whys.most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class _Quality:
    """Graded answers of a slice on both arms; prompts are the clusters."""

    items: Sequence[Item]
    """Those that are graded alike on both arms."""
    loss: Estimate
    """Share of passes lost, with Tango's interval."""
    text: str
    """Both counts, the loss, and the exact one-sided sign test over prompts."""


def _quality(items: Sequence[Item]) -> _Quality | None:
    """Whether answers that are graded pass less often here; None where none are."""
    told = [i for i in items if i.target.graded and i.target.graded == i.speculative.graded]
    if not told:
        return None
    worse = len({i.prompt_id for i in told if _lost(i) > 0})
    better = len({i.prompt_id for i in told if _lost(i) < 0})
    p_value = stats.mcnemar_exact(worse, better)
    n = sum(i.target.graded for i in told)
    target, speculative = (
        sum(check.passed for check in side)
        for side in ([i.target for i in told], [i.speculative for i in told])
    )
    loss = _loss(told, ALPHA)
    return _Quality(
        told,
        loss,
        f"answers pass their checks in {target} of {n} on target-only, {speculative} of {n} here"
        f" (loss {loss.value:.0%}, {loss.low:.0%} to {loss.high:.0%}; prompts: {worse} worse,"
        f" {better} better of {loss.n}, exact p {p_value:.2g})",
    )


def _lost(item: Item) -> int:
    """Passes that an item lost; negative where it gained."""
    return item.target.passed - item.speculative.passed


def _loss(items: Sequence[Item], alpha: float) -> Estimate:
    """Share of passes lost, with Tango's interval, prompts as clusters."""
    sums: dict[str, list[int]] = {}
    for i in items:
        mine = sums.setdefault(i.prompt_id, [0, 0, 0])
        mine[0] += max(_lost(i), 0)
        mine[1] += max(-_lost(i), 0)
        mine[2] += i.target.graded
    worse, better, sizes = zip(*sums.values(), strict=True)
    return stats.tango_clustered(worse, better, sizes, alpha=alpha)


def _ties(items: Sequence[Item]) -> str:
    ties = sum(i.speculative.why.endswith("a tie") for i in items)
    return f"{ties} differ at a tie of the target" if ties else ""


# --- for rules, policy and packet ---------------------------------------------------------------


def measure(
    found: Mapping[SliceName, Sequence[Item]], *, route: str, kept_off: bool = False
) -> list[Measurement]:
    """Metric slice_failures of a route: requests that target-only serves rightly, this arm not.

    For all slices together and for each that fails (cohort "features stop", "slice warm prefix
    cache"): exact counts, without chance in them. Where answers of a slice are graded, metric
    quality_difference of it too, which must not be certain to be too much. With `kept_off` only
    what the eligibility policy keeps off the speculative arm.
    """
    mine = {
        name: [i for i in items if i.route == route and i.kept_off is kept_off]
        for name, items in found.items()
    }
    made = [_measurement("", route, [i for items in mine.values() for i in items], "")]
    for name, items in mine.items():
        broken = [i for i in items if i.is_broken]
        if broken:
            note = _told(name, items, broken)
            made.append(_measurement(_cohort(name), route, items, note))
    for name, items in mine.items():
        served = [i for i in items if (i.target.outcome, i.speculative.outcome) == ("ok", "ok")]
        if (quality := _quality(served)) is not None:
            made.append(_difference(_cohort(name), route, quality))
    return made


def _difference(cohort: str, route: str, quality: _Quality) -> Measurement:
    """Metric quality_difference of a slice: a few prompts, and none of them the route's traffic."""
    told = quality.items
    return Measurement(
        "quality_difference",
        Stage.REPLAY,
        route,
        cohort,
        quality.loss,
        quality.text,
        tuple(i.receipt_id for i in told if _lost(i) > 0)[:5],
        tuple(_loss(told, level) for level in stats.FAIL_LEVELS),
        share=0.0,
    )


def _cohort(name: SliceName) -> str:
    """A slice as a cohort: in the words of the eligibility policy where it can keep it off."""
    return f"features {name}" if name in KNOWN_FEATURES else f"slice {LABELS[name]}"


def _measurement(cohort: str, route: str, items: Sequence[Item], note: str) -> Measurement:
    judged = [
        i for i in items if i.target.outcome == "ok" and i.speculative.outcome in ("ok", "fault")
    ]
    broken = [i for i in judged if i.is_broken]
    count = float(len(broken))
    estimate = Estimate(count, count, count, len(judged), "count of requests", 0.05)
    return Measurement(
        "slice_failures",
        Stage.REPLAY,
        route,
        cohort,
        estimate if judged else None,
        note if judged else "no request of the route's prompts could be judged",
        tuple(i.receipt_id for i in broken[:5]),
    )


def evidence(rows: Sequence[Row]) -> dict[str, Any]:
    """For the packet (`features`) and the eligibility policy (`feature_support`); else nothing.

    `feature_support` maps each slice to its status, the reason, the number of requests and what a
    refusing server says: what is "unsupported" or "broken" belongs on target-only. Names are those
    of `Receipt.features` and of `eligibility.KNOWN_FEATURES` where the slice is a sampling feature.
    """
    if not rows:
        return {}
    return {
        "features": [{**asdict(r), "verdict": VERDICTS[r.status]} for r in rows],
        "feature_support": {
            r.slice: {"status": r.status, "why": r.why, "n": r.n, "message": r.message}
            for r in rows
        },
    }


def refused(found: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Sampling features that the speculative arm alone refuses: name -> (requests, its message).

    `found` is a replay's evidence; empty where it tried no slices.
    """
    return {
        name: (part["n"], part["message"])
        for name, part in found.get("feature_support", {}).items()
        if part["status"] == "unsupported" and name in KNOWN_FEATURES
    }


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines for a terminal: how many are as on target-only, then each that is not, and why."""
    good = sum(r.status == "ok" for r in rows)
    words: Mapping[Status, str] = {
        "broken": "BROKEN",
        "unsupported": "refused",
        "not_offered": "not offered",
        "ignored": "ignored",
        "unclear": "open",
    }
    return [
        f"server features: {good} of {len(rows)} as on target-only",
        *(f"  {words[r.status]}: {r.feature}: {r.why}" for r in rows if r.status != "ok"),
    ]
