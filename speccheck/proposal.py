"""From the workload decision matrix to a proposed eligibility policy, as text to accept.

A proposal is rules with reasons and figures: first what must stay on target-only (what the server
refuses, slices that failed a rule, cohorts that do not pay), then what may speculate, each bounded
by what was measured, and at the end of each route target-only for the rest. It replaces its own
earlier block in the file and nothing else: rules that a person wrote stay, and those at the top
that keep traffic off stay above it.

Pure: records and text in, text out; the file is written by who accepts it.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

from speccheck.decision import KEPT_OFF, is_kept_off
from speccheck.eligibility import KNOWN_FEATURES, Eligibility, Range
from speccheck.errors import UsageError
from speccheck.guardrails import RULES
from speccheck.matrix import Matrix, MatrixRow, Refusal
from speccheck.records import SWEEP, Estimate, Finding, Stage, Verdict

BEGIN = "# --- proposed by speccheck matrix"
END = "# --- end of the proposal"

_WIDTH = 96

_HEADER = """\
# The eligibility policy: which requests may speculate. Rules are read from the top and the first
# that matches decides; what no rule matches, and what is not known, stays on target-only.
version: 1
rules:
"""

_TEMPERATURES: dict[str, dict[str, float]] = {
    "greedy": {"at_most": 0},
    "low": {"above": 0, "at_most": 0.5},
    "mid": {"above": 0.5, "at_most": 1.0},
    "high": {"above": 1.0},
}
_PROMPTS: dict[str, dict[str, float]] = {
    "<64": {"below": 64},
    "64-255": {"at_least": 64, "below": 256},
    "256-1023": {"at_least": 256, "below": 1024},
    "1024-4095": {"at_least": 1024, "below": 4096},
    ">=4096": {"at_least": 4096},
}
"""The bands of `records.temperature_band` and `records.prompt_band` as conditions."""

Region = Mapping[str, frozenset[str]]
"""Dimension -> values, of those in _SPLIT; a dimension that is not there is any."""

_SPLIT = ("task", "temperature_band", "prompt_band", "output_band", "features", "language")


@dataclass(frozen=True)
class ProposedRule:
    """One rule, and the comment lines with the figures that it rests on."""

    name: str
    when: Mapping[str, Any]
    use: str
    k: int | None
    reason: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """Proposed rules, and what was left undecided."""

    run_id: str
    rules: tuple[ProposedRule, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know that no rule says."""


def propose(
    matrix: Matrix,
    findings: Sequence[Finding],
    *,
    run_id: str,
    routes: Sequence[str],
    usable_k: Callable[[int], bool],
    pays_below: Mapping[str, float] | None = None,
    old: Eligibility | None = None,
) -> Proposal:
    """Rules for each route, from the matrix and from what failed.

    Args:
        matrix: of the run.
        findings: of its stages.
        run_id: named in the text.
        routes: of the rollout, in its order; rows of other traffic propose nothing.
        usable_k: whether the engine can be asked for a proposal length.
        pays_below: by route, the e2e ratio below which speculation pays; else 1.
        old: the policy that the run obeyed; its rules about what failed stay while that fails.
    """
    rules: list[ProposedRule] = []
    notes = [warning for warning in matrix.warnings if "times are void" in warning]
    for route in routes:
        mine = [row for row in matrix.rows if row.cohort["route"] == route]
        failed, open_ = _failed(route, findings, mine, old)
        found = [_refused(refusal) for refusal in matrix.refusals if refusal.route == route]
        found += failed
        notes += open_
        if not any(rule.when == {"route": route} for rule in found):
            split = [row for row in mine if _is_split(row, failed)]
            kept = [row for row in mine if row not in split]
            found += _target_only(route, kept)
            below = (pays_below or {}).get(route, 1.0)
            speculate, unusable = _speculate(route, kept, usable_k, below)
            found += speculate
            notes += unusable
            undecided = [_figure(row) for row in kept if row.verdict == "inconclusive"]
            undecided += [
                f"{row.name}: in part kept off above; of the rest: not known" for row in split
            ]
            is_live = any(not _is_closed_loop(row) for row in mine)
            if failed and not is_live and not speculate:
                found += _not_decided(route, old, undecided)
            else:
                found.append(_the_rest(route, undecided, is_else=bool(speculate)))
        rules += found
    return Proposal(run_id, tuple(_named(rules)), tuple(notes))


def _the_rest(route: str, undecided: Sequence[str], *, is_else: bool) -> ProposedRule:
    why = (
        "nothing else was measured on this route and found to pay"
        if is_else
        else "nothing on this route was found to pay so far"
    )
    return ProposedRule("the rest", {"route": route}, "target_only", None, why, (*undecided,))


_NOT_DECIDED = "not decided"


def _not_decided(
    route: str, old: Eligibility | None, undecided: Sequence[str]
) -> list[ProposedRule]:
    """What is left of a route that failed in some slices and has seen no live traffic yet.

    Kept off too, the next run's shadow and canary would have nothing to look at. Where a person
    wrote a policy its own rules say what becomes of the rest, so there is none of ours.
    """
    ours = f"{route}: {_NOT_DECIDED}"
    if old is not None and all(rule.name != ours for rule in old.rules):
        return []
    why = "nothing is known against it; the next run's shadow and canary decide"
    return [ProposedRule(_NOT_DECIDED, {"route": route}, "speculate", None, why, (*undecided,))]


def _is_split(row: MatrixRow, failed: Sequence[ProposedRule]) -> bool:
    """Whether a row's regressions are those of a slice that a rule keeps off, and the row has more.

    Such a row pools what failed with what did not (both temperatures of few prompts): it says
    nothing of the second.
    """
    if not row.quality_regressions or row.refused or row.cohort["priority"] == "protected":
        return False
    return any(_covers_part(rule.when, row) for rule in failed)


def _covers_part(when: Mapping[str, Any], row: MatrixRow) -> bool:
    """Whether some of a row's requests meet these conditions, and some do not."""
    region = _region(row)
    held: list[tuple[bool, bool]] = []  # by condition: (some do, all do)
    for name, bands, table in (
        ("temperature", region["temperature_band"], _TEMPERATURES),
        ("prompt_tokens", region["prompt_band"], _PROMPTS),
    ):
        if name in when:
            wanted = Range.model_validate(when[name])
            met = [band in table and _lies_within(table[band], wanted) for band in bands]
            held.append((any(met), all(met)))
    if "task" in when:
        met = [task in when["task"] for task in region["task"]]
        held.append((any(met), all(met)))
    if "features" in when or "concurrency" in when:
        return False  # their rows are not pooled over these
    return bool(held) and all(some for some, _ in held) and not all(every for _, every in held)


def _lies_within(band: Mapping[str, float], wanted: Range) -> bool:
    """Whether every value of a band is wanted, by its ends."""
    inside = []
    if "at_least" in band:
        inside.append(wanted.holds(band["at_least"]))
    if "above" in band:
        inside.append(wanted.holds(band["above"] + 1e-9))
    if "at_most" in band:
        inside.append(wanted.holds(band["at_most"]))
    if "below" in band:
        inside.append(wanted.holds(band["below"] - 1e-9))
    if not {"at_most", "below"} & band.keys():
        inside.append(wanted.at_most is None and wanted.below is None)
    return all(inside)


# --- what stays on target-only ------------------------------------------------------------------


def _refused(refusal: Refusal) -> ProposedRule:
    share = f"{refusal.n} of {refusal.of} requests"
    when: dict[str, Any] = {"route": refusal.route}
    if refusal.options:
        when["features"] = {"any_of": list(refusal.options)}
        reason = f"the speculative server refuses {share} for it"
    else:
        reason = f"the speculative server refuses {share}, and no option of theirs explains it"
    says = f"the server says: {_plain(refusal.message)[:200]}"
    return ProposedRule("refused", when, "target_only", None, reason, (says,))


def _failed(
    route: str,
    findings: Sequence[Finding],
    rows: Sequence[MatrixRow],
    old: Eligibility | None,
) -> tuple[list[ProposedRule], list[str]]:
    """Rules for slices that failed a guardrail; what failed on a whole route where no slice does.

    A correctness rule that fails on the whole route, and in no slice that could be kept off, keeps
    the whole route off. One about speed is for the cohorts to explain.
    """
    tasks = {task for row in rows for task in row.observed.get("task", ())}
    mine = [f for f in findings if f.route == route and f.verdict is Verdict.FAIL]
    by_slice: dict[str, tuple[Mapping[str, Any], list[Finding]]] = {}
    explained = set()
    for f in mine:
        when = slice_conditions(f.cohort, tasks)
        if when:
            by_slice.setdefault(json.dumps(when), (when, []))[1].append(f)
            explained.add((f.rule, f.stage))
    rules = [
        ProposedRule(
            "failed",
            {"route": route, **when},
            "target_only",
            None,
            f"{_listed(sorted({f.rule for f in group}))} failed in {group[0].stage}",
            tuple(f"{f.stage}, {f.cohort}: {f.why}" for f in group),
        )
        for when, group in by_slice.values()
    ]
    rules = _without_implied(rules)
    rules += _still_failing(route, old, [f for f in mine if is_kept_off(f)])
    whole = [f for f in mine if not f.cohort and (f.rule, f.stage) not in explained]
    # What is refused has a rule of its own already.
    broken = [
        f
        for f in whole
        if f.rule in RULES
        and RULES[f.rule].any_workload
        and f.rule != "max_unsupported_requests"
        and f.counted
    ]
    if broken:
        names = _listed(sorted({f.rule for f in broken}))
        return [
            ProposedRule(
                "failed",
                {"route": route},
                "target_only",
                None,
                f"{names} failed, and in no slice that could be kept off alone",
                tuple(f"{f.stage}: {f.why}" for f in broken),
            )
        ], []
    return rules, [
        f"route {route}: {f.rule} failed on the whole route in {f.stage}; whether it still does"
        " under this policy is for the next run to say"
        for f in whole
        if f.rule not in ("max_unsupported_requests", "min_speedup")
    ]


def _without_implied(rules: Sequence[ProposedRule]) -> list[ProposedRule]:
    """Rules that no other implies by asking for less; their figures go to the one that does."""
    found: list[ProposedRule] = []
    for rule in sorted(rules, key=lambda r: len(r.when)):
        for i, other in enumerate(found):
            if other.when.items() <= rule.when.items():
                found[i] = replace(other, figures=(*other.figures, *rule.figures))
                break
        else:
            found.append(rule)
    return found


def _still_failing(
    route: str, old: Eligibility | None, failing: Sequence[Finding]
) -> list[ProposedRule]:
    """Earlier rules about what failed, while something that the policy keeps off still fails."""
    if old is None or not failing:
        return []
    return [
        ProposedRule(
            "failed",
            rule.when.model_dump(mode="json", exclude_none=True) | {"route": route},
            "target_only",
            None,
            rule.reason,
            tuple(f"still so in {f.stage}: {f.why}" for f in failing[:3]),
        )
        for rule in old.rules
        if rule.use == "target_only" and rule.name.startswith(f"{route}: failed")
    ]


def slice_conditions(cohort: str, tasks: Collection[str]) -> dict[str, Any] | None:
    """Conditions that keep a slice off, from a finding's cohort; None where there are none for it.

    >>> slice_conditions("temperature 0.7, sql", {"sql"})
    {'temperature': {'above': 0}, 'task': ['sql']}
    >>> slice_conditions("concurrency 64", ())
    {'concurrency': {'at_least': 64}}
    >>> slice_conditions("features stop", ())
    {'features': {'any_of': ['stop']}}
    """
    found: dict[str, Any] = {}
    for part in filter(None, cohort.removeprefix(KEPT_OFF).split(", ")):
        kind, _, value = part.partition(" ")
        if kind == "temperature" and value in _TEMPERATURES:
            found["temperature"] = dict(_TEMPERATURES[value])
        elif part == "temperature > 0":
            found["temperature"] = {"above": 0}
        elif kind == "temperature" and re.fullmatch(r"\d+(\.\d+)?", value):
            found["temperature"] = {"above": 0} if float(value) else {"at_most": 0}
        elif kind == "prompt" and value in _PROMPTS:
            found["prompt_tokens"] = dict(_PROMPTS[value])
        elif kind == "concurrency" and value.isdigit():
            found["concurrency"] = {"at_least": int(value)}
        elif kind == "features" and value in KNOWN_FEATURES:
            found["features"] = {"any_of": [value]}
        elif part in tasks:
            found["task"] = [part]
        else:
            return None
    return found or None


@dataclass(frozen=True)
class _Area:
    """A region of a route with what is said of it."""

    region: Region
    rows: tuple[MatrixRow, ...]
    k: int | None = None
    above: int | None = None
    """Concurrency beyond which it starts; None from the least on."""
    at_most: int | None = None
    """Concurrency up to which it reaches; None as far as it goes."""
    reasons: frozenset[str] = field(default_factory=frozenset)


def _target_only(route: str, rows: Sequence[MatrixRow]) -> list[ProposedRule]:
    """Cohorts that are better off on target-only. Load is a condition where less of it pays."""
    yes = [row for row in rows if row.verdict == "speculate"]
    areas = []
    for row in rows:
        if row.verdict != "target_only":
            continue
        lighter = [
            other.in_flight
            for other in yes
            if other.in_flight is not None
            and row.in_flight is not None
            and other.in_flight < row.in_flight
            and _overlap(_region(other), _region(row))
        ]
        by_load = _is_closed_loop(row) and not _regardless_of_load(row) and bool(lighter)
        above = row.in_flight - 1 if by_load and row.in_flight is not None else None
        areas.append(_Area(_region(row), (row,), above=above))
    return [
        ProposedRule(
            "slower" if not any(map(_regardless_of_load, area.rows)) else "kept off",
            _when(route, area, rows, exact=False),
            "target_only",
            None,
            _shortest(area.rows),
            tuple(map(_figure, area.rows)),
        )
        for area in _merged(areas)
    ]


def _regardless_of_load(row: MatrixRow) -> bool:
    return bool(row.quality_regressions or row.refused) or row.cohort["priority"] == "protected"


def _is_closed_loop(row: MatrixRow) -> bool:
    return row.cohort["stage"] in (Stage.REPLAY, SWEEP)


# --- what may speculate -------------------------------------------------------------------------


def _speculate(
    route: str,
    rows: Sequence[MatrixRow],
    usable_k: Callable[[int], bool],
    pays_below: float,
) -> tuple[list[ProposedRule], list[str]]:
    """Cohorts that pay, each up to the load at which that was measured."""
    groups: dict[tuple[Any, ...], list[MatrixRow]] = defaultdict(list)
    for row in rows:
        groups[tuple(sorted((d, tuple(sorted(v))) for d, v in _region(row).items()))].append(row)
    areas: list[_Area] = []
    notes: list[str] = []
    for group in groups.values():
        if any(row.verdict == "target_only" and not _is_closed_loop(row) for row in group):
            continue  # it did not pay in live traffic, whatever a loop of a fixed size says
        found, unusable = _by_load(group, usable_k, pays_below)
        areas += found
        notes += [f"route {route}: {text}" for text in unusable]
    areas = sorted(_merged(areas), key=lambda a: (_size(a.region), a.at_most or 0, a.k or 0))
    return [
        ProposedRule(
            "pays",
            _when(route, area, rows, exact=True),
            "speculate",
            area.k,
            _worst(area.rows),
            tuple(map(_figure, area.rows)),
        )
        for area in areas
    ], notes


def _by_load(
    group: Sequence[MatrixRow], usable_k: Callable[[int], bool], pays_below: float
) -> tuple[list[_Area], list[str]]:
    """Stretches of load at which a cohort pays with one proposal length, from the least load on.

    The first load that does not pay, or is undecided, ends them: nothing is said beyond.
    """
    levels: dict[int, list[MatrixRow]] = defaultdict(list)
    for row in group:
        if row.in_flight is not None and (row.verdict == "speculate" or _is_closed_loop(row)):
            levels[row.in_flight].append(row)
    areas: list[_Area] = []
    notes: list[str] = []
    reached: int | None = None
    for level, here in sorted(levels.items()):
        if any(row.verdict != "speculate" for row in here):
            if areas:
                break
            reached = level if all(row.verdict == "target_only" for row in here) else None
            continue
        best = here[0].k
        k = best
        if best is None or not usable_k(best):
            k = _next_best(here[0], usable_k, pays_below)
        if k != best:
            notes.append(
                f"{here[0].name}: k {best} was best, which this engine cannot be asked for; set"
                " speculation.num_speculative_tokens to it and measure again"
            )
        if k is None:
            break
        last = areas[-1] if areas else None
        if last is not None and last.k == k:
            areas[-1] = replace(last, rows=(*last.rows, *here), at_most=level)
        else:
            areas.append(_Area(_region(here[0]), tuple(here), k, reached, level))
        reached = level
    return areas, notes


def _next_best(row: MatrixRow, usable_k: Callable[[int], bool], pays_below: float) -> int | None:
    """The best of the proposal lengths that can be asked for and that surely pay."""
    known = [r for r in row.by_k if r.k and usable_k(r.k) and r.e2e_ratio.high < pays_below]
    return min(known, key=lambda r: (r.e2e_ratio.value, r.k)).k if known else None


# --- regions ------------------------------------------------------------------------------------


def _region(row: MatrixRow) -> Region:
    return {name: frozenset(row.observed[name]) for name in _SPLIT}


def _everything(rows: Iterable[MatrixRow]) -> Region:
    """Every value that a route's rows have, by dimension."""
    found: dict[str, frozenset[str]] = {name: frozenset() for name in _SPLIT}
    for row in rows:
        for name, values in _region(row).items():
            found[name] |= values
    return found


def _overlap(a: Region, b: Region) -> bool:
    return all(a[name] & b[name] for name in _SPLIT)


def _size(region: Region) -> int:
    size = 1
    for name in _SPLIT:
        size *= len(region[name])
    return size


def _merged(areas: Sequence[_Area]) -> list[_Area]:
    """Areas that differ in one dimension only become one; so do those that lie within another."""
    left = list(areas)
    i = 0
    while i < len(left):
        for j in range(i + 1, len(left)):
            both = _union(left[i], left[j])
            if both is not None:
                left[i] = both
                del left[j]
                i = -1  # the larger area may now meet one that was passed over
                break
        i += 1
    return left


def _union(a: _Area, b: _Area) -> _Area | None:
    """Two areas as one where that says nothing more than the two do, else None."""
    if (a.k, a.above, a.at_most) != (b.k, b.above, b.at_most) or not _is_gapless(a, b):
        return None
    differing = [name for name in _SPLIT if a.region[name] != b.region[name]]
    if len(differing) > 1 and not (_within(a.region, b.region) or _within(b.region, a.region)):
        return None
    region = {name: a.region[name] | b.region[name] for name in _SPLIT}
    return replace(a, region=region, rows=(*a.rows, *b.rows))


def _is_gapless(a: _Area, b: _Area) -> bool:
    """Whether bands of both stand side by side: a range over them claims nothing between."""
    for name, table in (("temperature_band", _TEMPERATURES), ("prompt_band", _PROMPTS)):
        both = a.region[name] | b.region[name]
        places = [i for i, band in enumerate(table) if band in both]
        if places and places[-1] - places[0] >= len(places):
            return False
    return True


def _within(a: Region, b: Region) -> bool:
    return all(a[name] <= b[name] for name in _SPLIT)


def _when(route: str, area: _Area, rows: Sequence[MatrixRow], *, exact: bool) -> dict[str, Any]:
    """Conditions of an area among all rows of its route. `exact`: not beyond what was measured, for
    rules that say speculate.

    What all requests of the route have in common is no condition, but for numbers: they are known
    of every request and bound what is claimed.
    """
    when: dict[str, Any] = {"route": route}
    region, whole = area.region, _everything(rows)
    elsewhere = {
        option
        for row in rows
        if not _region(row)["features"] <= region["features"]
        for option in row.options
    }
    for name in ("task", "language", "output_band"):
        if region[name] != whole[name]:
            when[name] = sorted(region[name])
    if exact or region["temperature_band"] != whole["temperature_band"]:
        low, high = _span(area, "temperature")
        greedy = "greedy" in region["temperature_band"]
        bounds = _band_range(region["temperature_band"], _TEMPERATURES)
        if exact:
            when["temperature"] = ({} if greedy else {"at_least": low}) | {
                "at_most": 0 if set(region["temperature_band"]) == {"greedy"} else high
            }
        elif bounds:
            when["temperature"] = bounds
    if (exact or region["prompt_band"] != whole["prompt_band"]) and "unknown" not in region[
        "prompt_band"
    ]:
        bounds = _band_range(region["prompt_band"], _PROMPTS)
        if exact and "below" not in bounds:
            bounds["at_most"] = _span(area, "prompt_tokens")[1]
        if bounds:
            when["prompt_tokens"] = bounds
    used = {option for row in area.rows for option in row.options}
    if exact or region["features"] == {""} != whole["features"]:
        when["features"] = {"only": sorted(used)}
    elif region["features"] != whole["features"] and (only_here := used - elsewhere):
        when["features"] = {"any_of": sorted(only_here)}
    load: dict[str, int] = {}
    if area.above is not None:
        load["above"] = area.above
    if area.at_most is not None:
        load["at_most"] = area.at_most
    if load:
        when["concurrency"] = load
    return when


def _span(area: _Area, name: str) -> tuple[float, float]:
    spans = [row.spans[name] for row in area.rows if name in row.spans]
    return min(low for low, _ in spans), max(high for _, high in spans)


def _band_range(bands: Iterable[str], table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One range that holds these bands, and those between them."""
    order = [band for band in table if band in set(bands)]
    if not order:
        return {}
    first, last = table[order[0]], table[order[-1]]
    lower = {kind: first[kind] for kind in ("at_least", "above") if kind in first}
    return lower | {kind: last[kind] for kind in ("at_most", "below") if kind in last}


# --- words --------------------------------------------------------------------------------------


def _figure(row: MatrixRow) -> str:
    return f"{row.name}: {row.why}"


def _ratio(e: Estimate) -> str:
    return f"{e.value:.3g} ({e.low:.3g} to {e.high:.3g})"


def _worst(rows: Sequence[MatrixRow]) -> str:
    """The least favourable e2e ratio of the rows, with what they rest on."""
    known = [row for row in rows if row.e2e_ratio is not None]
    row = max(known, key=lambda r: r.e2e_ratio.value if r.e2e_ratio else 0.0)
    n = sum(r.e2e_ratio.n for r in known if r.e2e_ratio)
    at_worst = "at worst " if len(known) > 1 else ""
    ratio = _ratio(row.e2e_ratio) if row.e2e_ratio else "-"
    return f"e2e {at_worst}{ratio} times target-only, n {n}"


def _shortest(rows: Sequence[MatrixRow]) -> str:
    """The reason of the rows, of the first where they have several."""
    also = f" (and {len(rows) - 1} more cohorts)" if len(rows) > 1 else ""
    return f"{rows[0].why}{also}"


def _named(rules: Sequence[ProposedRule]) -> Iterable[ProposedRule]:
    """Each rule with a name of its own: its route, what it is about, and a number if need be."""
    counts: dict[str, int] = defaultdict(int)
    for rule in rules:
        parts = [f"{rule.when['route']}: {rule.name}"]
        for name, condition in rule.when.items():
            if name in ("task", "features") and rule.name != "pays":
                values = condition if isinstance(condition, list) else condition.get("any_of", [])
                parts += [str(value) for value in values[:2]]
            if name == "task" and rule.name == "pays":
                parts += [str(value) for value in condition[:3]]
        name = ", ".join(parts)[:70]
        counts[name] += 1
        yield replace(rule, name=name if counts[name] == 1 else f"{name} ({counts[name]})")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plain(text: str) -> str:
    """Foreign text for a comment: one line, nothing that does not print."""
    return "".join(c if c.isprintable() else " " for c in text)


# --- text ---------------------------------------------------------------------------------------


def merged_text(old: str | None, proposal: Proposal) -> str:
    """The policy's file with the proposal in it, in place of an earlier one.

    Raises:
        UsageError: the file is written in a way that rules cannot be put into (flow style).
    """
    if old is None:
        return f"{_HEADER}{block(proposal)}"
    lines = old.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.strip().startswith(BEGIN)), None)
    end = next((i for i, line in enumerate(lines) if line.strip().startswith(END)), None)
    if begin is not None and end is not None and begin < end:
        indent = len(lines[begin]) - len(lines[begin].lstrip())
        before, after = lines[:begin], lines[end + 1 :]
    else:
        at, indent = _place(old)
        while at > 0 and lines[at - 1].strip().startswith("#"):
            at -= 1
        before, after = lines[:at], lines[at:]
        if after:
            after.insert(0, "")
    middle = textwrap.indent(textwrap.dedent(block(proposal)), " " * indent).splitlines()
    return "\n".join([*before, *middle, *after]) + "\n"


def _place(old: str) -> tuple[int, int]:
    """(line before which the proposal goes, indentation): after leading target-only rules."""
    from ruamel.yaml import YAML

    data = YAML(typ="rt").load(StringIO(old))
    rules = data.get("rules")
    if not rules:
        raise UsageError("the eligibility policy has no rules to put a proposal before; remove it")
    if rules.fa.flow_style():
        raise UsageError("the eligibility policy's rules stand in one line; put each on its own")
    for i, rule in enumerate(rules):
        line, column = rules.lc.item(i)
        if rule.get("use") == "speculate":
            return line, column - 2
    return len(old.splitlines()), rules.lc.item(0)[1] - 2


def block(proposal: Proposal) -> str:
    """The rules as YAML, each under a comment with its figures."""
    lines = [f"  {BEGIN}, run {proposal.run_id}"]
    lines += _comment(
        "What all measured requests of a route share (task, language, expected output) is no"
        " condition; numbers bound what was measured."
    )
    for note in proposal.notes:
        lines += _comment(f"Note: {note}.")
    for rule in proposal.rules:
        lines.append("")
        for figure in rule.figures:
            lines += _comment(_plain(figure))
        lines.append(f"  - name: {json.dumps(rule.name, ensure_ascii=False)}")
        lines.append("    when:")
        for name, condition in rule.when.items():
            lines.append(f"      {name}: {_flow(condition)}")
        lines.append(f"    use: {rule.use}")
        if rule.k is not None:
            lines.append(f"    k: {rule.k}")
        lines.append(f"    reason: {json.dumps(_plain(rule.reason), ensure_ascii=False)}")
    lines.append(f"  {END}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  # ",
        subsequent_indent="  #   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


_NO_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""What a YAML reader may take for something else than a word."""


def _flow(value: Any) -> str:
    """A condition in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value) and value.lower() not in _NO_WORDS
        return value if is_word else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) and value != int(value) else str(int(value))


def as_policy(text: str) -> Eligibility:
    """The rules of a proposed text, checked.

    Raises:
        ValueError: it is no policy.
    """
    from ruamel.yaml import YAML

    return Eligibility.model_validate(YAML(typ="safe").load(StringIO(text)))


def naming(rollout: str, policy: str) -> str | None:
    """A rollout's text with `policy` as its eligibility file; None where no line can say so."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    line = f"eligibility: {policy}"
    named, n = re.subn(r"(?m)^eligibility:.*$", line, rollout)
    if not n:
        named = f"{rollout.rstrip()}\n{line}\n"
    try:
        data = YAML(typ="safe").load(StringIO(named))
    except YAMLError:
        return None  # flow style, as JSON is
    return named if isinstance(data, dict) and data.get("eligibility") == policy else None


def diff(old: str | None, new: str, name: str) -> str:
    """A unified diff, as `patch` takes it; empty where nothing changes."""
    return "".join(
        difflib.unified_diff(
            [] if old is None else old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            "/dev/null" if old is None else name,
            name,
        )
    )
