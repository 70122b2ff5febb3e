"""View 3, service latency: both arms under load, over time, and what the neighbours felt.

Figures come from shadow and canary receipts; replay is not service. Distributions stand side by
side only for requests that may be compared (pairs in shadow, routes with both arms in the canary);
what was left out is counted and said.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from speccheck import stats
from speccheck.charts import (
    Curve,
    Distributions,
    Moment,
    Panel,
    Series,
    Share,
    Strip,
    StripRow,
    Strips,
    Timeline,
    Track,
)
from speccheck.measure import is_control
from speccheck.monitors import odds_text
from speccheck.packet import view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.parts import (
    ARM_NAMES,
    STAGES,
    counted,
    figure,
    interval,
    load_name,
    part_of,
    seconds,
    stage_evidence,
    verdict_mark,
    words,
)
from speccheck.packet.view import Figure, Missing
from speccheck.records import Arm, Outcome, Receipt, Stage

P95_NEEDS, P99_NEEDS = 20, 100
"""Fewest requests for which a p95 or a p99 is not simply the slowest request."""
WINDOWS = 24
"""Time windows of a canary chart."""
CURVE_POINTS = 120
"""Points of a distribution curve: more than a column has pixels to show."""
FALL_BACK = "fall_back"
"""The kind of the canary event that turned speculation off."""

METRICS: tuple[tuple[str, Callable[[Receipt], float | None]], ...] = (
    ("TTFT", lambda r: r.ttft_s),
    ("TPOT", lambda r: r.tpot_s),
    ("e2e", lambda r: r.e2e_s),
    ("queue age", lambda r: r.queue_age_s),
)
METRIC_TEXTS = {
    "TTFT": "send to first chunk with a token id",
    "TPOT": "(last token - first token) / (tokens - 1), per request",
    "e2e": "send to last token",
    "queue age": "scheduled time to first token, waiting in our own client included",
}


def service_view(evidence: RunEvidence) -> view.ServiceView | Missing:
    """Latency under service conditions: shadow and canary receipts, both arms."""
    measured = [
        r for r in evidence.receipts if r.stage in (Stage.SHADOW, Stage.CANARY) and not r.warm_up
    ]
    if not measured:
        return Missing("no request was measured in shadow or canary")
    kept, left_out = _comparable(measured)
    groups = _by_load(evidence, kept)
    if not groups:
        return Missing(
            "neither shadow nor canary has completed requests on both arms"
            + "".join(f"; {reason}" for reason in left_out)
        )
    shadow = stage_evidence(evidence, Stage.SHADOW)
    return view.ServiceView(
        summary=_service_summary(groups),
        sharing=shadow.get("sharing", ""),
        left_out=tuple(left_out),
        loads=tuple(
            view.LoadLine(
                metric=metric,
                stage=stage,
                load=load,
                target=_quantiles(_values(arms[Arm.TARGET_ONLY], get)),
                speculative=_quantiles(_values(arms[Arm.SPECULATIVE], get)),
            )
            for metric, get in METRICS
            for (stage, load), arms in groups.items()
        ),
        noise_floor=_noise_floor(shadow),
        strips=tuple(_strip_chart(metric, groups) for metric, _ in METRICS),
        distributions=tuple(
            chart
            for number, (key, arms) in enumerate(groups.items())
            for metric, get in METRICS[:3]
            if (chart := _distribution_chart(f"d{number}", metric, get, key, arms)) is not None
        ),
        scheduling=_scheduling(shadow),
        protected=_protected(shadow),
        canary=_canary(evidence, [r for r in measured if r.stage == Stage.CANARY]),
    )


Groups = dict[tuple[str, str], dict[str, list[Receipt]]]


def _comparable(measured: Sequence[Receipt]) -> tuple[list[Receipt], list[str]]:
    """Receipts that may stand side by side, and a sentence for each kind that may not.

    Shadow compares the same prompts, so a pair needs both arms; the canary compares routes on
    which both arms served.
    """
    reasons: Counter[str] = Counter()
    done: list[Receipt] = []
    for receipt in measured:
        if receipt.priority == "protected" and receipt.stage == Stage.SHADOW:
            reasons["of protected traffic, which has its own part below"] += 1
        elif is_control(receipt):
            reasons["of the A/A control, which has its own part below"] += 1
        elif receipt.outcome != Outcome.OK:
            reasons["that did not complete"] += 1
        else:
            done.append(receipt)
    arms_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for receipt in done:
        arms_of[_partner(receipt)].add(receipt.arm)
    kept = []
    for receipt in done:
        if len(arms_of[_partner(receipt)]) > 1:
            kept.append(receipt)
        elif receipt.stage == Stage.SHADOW:
            reasons["in shadow without a partner on the other arm"] += 1
        else:
            reasons["in the canary on routes that one arm alone served"] += 1
    return kept, [f"{counted(n, 'request')} {reason}" for reason, n in reasons.items()]


def _partner(receipt: Receipt) -> tuple[str, str]:
    return receipt.stage, receipt.pair_id if receipt.stage == Stage.SHADOW else receipt.route


def _by_load(evidence: RunEvidence, receipts: Iterable[Receipt]) -> Groups:
    """(stage, load) -> arm -> receipts; target-only first, low loads first."""
    found: Groups = {}
    for receipt in sorted(receipts, key=lambda r: (STAGES.index(r.stage), r.concurrency)):
        arms = found.setdefault((receipt.stage, load_name(evidence, receipt)), {})
        arms.setdefault(receipt.arm, []).append(receipt)
    return {
        key: {arm: arms[arm] for arm in ARM_NAMES}
        for key, arms in found.items()
        if len(arms) == len(ARM_NAMES)
    }


def _service_summary(groups: Groups) -> str:
    parts = [
        f"{stage}, {load}: "
        + " and ".join(f"{len(of_arm):,} {ARM_NAMES[arm]}" for arm, of_arm in arms.items())
        for (stage, load), arms in groups.items()
    ]
    return f"Completed requests per load: {'; '.join(parts)}."


def _quantiles(values: Sequence[float]) -> view.Quantiles:
    def at(p: float, needs: int) -> Figure | Missing:
        if len(values) < needs:
            return Missing(f"n {len(values)} is under {needs}")
        return Figure(f"p{p * 100:g}", stats.quantile(values, p), "s")

    return view.Quantiles(len(values), at(0.5, 1), at(0.95, P95_NEEDS), at(0.99, P99_NEEDS))


def _values(receipts: Iterable[Receipt], get: Callable[[Receipt], float | None]) -> list[float]:
    return sorted(value for r in receipts if (value := get(r)) is not None)


def _series(arm: str) -> Series:
    return Series(ARM_NAMES[arm], second=arm == Arm.SPECULATIVE)


def _strip_chart(metric: str, groups: Groups) -> view.Chart:
    get = dict(METRICS)[metric]
    rows = []
    table: list[tuple[view.Cell, ...]] = []
    for (stage, load), arms in groups.items():
        strips = []
        for arm, receipts in arms.items():
            values = _values(receipts, get)
            if values:
                at = [stats.quantile(values, p) * 1e3 for p in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)]
                strips.append(Strip(_series(arm), *at))
            numbers = _quantiles(values)
            label = f"{stage}, {load}"
            quantiles = (numbers.p50, numbers.p95, numbers.p99)
            table.append((label, ARM_NAMES[arm], len(values), *quantiles))
        rows.append(StripRow(f"{stage}\n{load}", tuple(strips)))
    return view.Chart(
        name=f"strips-{metric.replace(' ', '-')}",
        title=f"{metric} by load",
        description=f"{metric}: {METRIC_TEXTS[metric]}. Per load and arm: thin line p5 to p95, box "
        "p25 to p75, tall bar p50, short bar p95, cross p99.",
        table=view.ChartTable(("load", "arm", "n", "p50", "p95", "p99"), tuple(table)),
        picture=Strips(tuple(rows)),
    )


def _distribution_chart(
    prefix: str,
    metric: str,
    get: Callable[[Receipt], float | None],
    key: tuple[str, str],
    arms: Mapping[str, Sequence[Receipt]],
) -> view.Chart | None:
    curves = []
    table: list[tuple[view.Cell, ...]] = []
    for arm, receipts in arms.items():
        values = _values(receipts, get)
        if not values:
            continue
        shares = [i / CURVE_POINTS for i in range(1, CURVE_POINTS + 1)]
        x = tuple(stats.quantile(values, share) * 1e3 for share in shares)
        curves.append(Curve(_series(arm), x, tuple(shares)))
        tenths = [stats.quantile(values, p) for p in (0.1, 0.25, 0.5, 0.75, 0.9)]
        table.append((ARM_NAMES[arm], len(values), *(Figure("", x, "s") for x in tenths)))
    if not curves:
        return None
    stage, load = key
    return view.Chart(
        name=f"{prefix}-{metric}",
        title=f"{metric}, {stage}, {load}",
        description=f"Share of requests (upwards) whose {metric} was at most so long (to the "
        "right, log scale). A line further left is faster.",
        table=view.ChartTable(("arm", "n", "p10", "p25", "p50", "p75", "p90"), tuple(table)),
        picture=Distributions(tuple(curves)),
    )


def _noise_floor(shadow: Mapping[str, Any]) -> view.LatencyFloor | Missing:
    part = part_of(shadow, "noise_floor", "shadow gave no A/A control")
    if isinstance(part, Missing):
        return part
    return view.LatencyFloor(
        pairs=part["pairs"],
        ratios=tuple(
            view.RatioLine(words(name), interval(ratio, "ratio", "not estimated"))
            for name, ratio in part["ratios"].items()
        ),
    )


def _scheduling(shadow: Mapping[str, Any]) -> view.SchedulingTable | Missing:
    lines = part_of(shadow, "scheduling", "shadow gave no scheduling figures")
    if isinstance(lines, Missing):
        return lines
    columns = tuple(dict.fromkeys(name for line in lines for name in line["figures"]))
    return view.SchedulingTable(
        columns=tuple(figure(name, 0).name for name in columns),
        lines=tuple(
            view.SchedulingLine(
                load=line["load"],
                traffic=line["traffic"],
                arm=ARM_NAMES.get(line["arm"], line["arm"]),
                n=line["n"],
                figures=tuple(
                    Missing("not reported")
                    if (value := line["figures"].get(name)) is None
                    else figure(name, value)
                    for name in columns
                ),
            )
            for line in lines
        ),
    )


def _protected(shadow: Mapping[str, Any]) -> view.ProtectedView | Missing:
    part = part_of(shadow, "protected", "shadow gave no protected-traffic result")
    if isinstance(part, Missing):
        return part
    without, beside = sorted(part["without_mirror_s"]), sorted(part["with_mirror_s"])
    return view.ProtectedView(
        metric=part["metric"],
        design=part["design"],
        mark=verdict_mark(part["verdict"]),
        ratio=interval(part["ratio"], "ratio", "no ratio was estimated"),
        limit=part["limit"],
        why=part["why"],
        chart=_protected_chart(part["metric"], without, beside),
        blocks=tuple(
            view.BlockLine(
                block=block["block"],
                mirror=block["mirror"],
                n=block["n"],
                p50=seconds(block["p50_s"], "no request"),
                p95=seconds(block["p95_s"], "too few requests"),
            )
            for block in part["blocks"]
        ),
    )


def _protected_chart(
    metric: str, without: Sequence[float], beside: Sequence[float]
) -> view.Chart | Missing:
    if not without or not beside:
        return Missing("protected traffic was not timed both with and without the mirror")
    curves = []
    table: list[tuple[view.Cell, ...]] = []
    for label, values in (("without mirror", without), ("with mirror", beside)):
        shares = [i / CURVE_POINTS for i in range(1, CURVE_POINTS + 1)]
        x = tuple(stats.quantile(values, share) * 1e3 for share in shares)
        curves.append(Curve(Series(label, second=label == "with mirror"), x, tuple(shares)))
        at = [Figure("", stats.quantile(values, p), "s") for p in (0.5, 0.95)]
        table.append((label, len(values), *at))
    return view.Chart(
        name="protected",
        title="Protected traffic with and without the mirror",
        description=f"{metric}: share of protected requests (upwards) that took at most so long "
        "(to the right, log scale). A line further right was delayed.",
        table=view.ChartTable(("blocks", "n", "p50", "p95"), tuple(table)),
        picture=Distributions(tuple(curves)),
    )


def _canary(evidence: RunEvidence, receipts: Sequence[Receipt]) -> view.CanaryView | Missing:
    part = stage_evidence(evidence, Stage.CANARY)
    if Stage.CANARY not in evidence.stages:
        return Missing("the canary stage did not run")
    steps: Sequence[Mapping[str, Any]] = part.get("steps", ())
    events: Sequence[Mapping[str, Any]] = part.get("events", ())
    if not steps and not events:
        return Missing("the canary stage gave neither steps nor events")
    begin = {"origin_ns": min((r.scheduled_ns for r in receipts), default=0)}
    by_route: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        if receipt.outcome == Outcome.OK:
            by_route[receipt.route].append(receipt)
    fallen = [event["route"] for event in events if event["kind"] == FALL_BACK]
    routes = dict.fromkeys([*fallen, *(step["route"] for step in steps)])
    return view.CanaryView(
        steps=tuple(_step_line(step) for step in steps),
        monitors=tuple(_monitor_line(monitor) for monitor in part.get("monitors", ())),
        assignment=tuple(_assignment_line(line) for line in part.get("assignment", ())),
        events=tuple(_event_line(event) for event in events),
        charts=tuple(
            _canary_chart(f"canary-{number}", route, by_route[route], {**begin, **part})
            for number, route in enumerate(routes)
            if by_route[route]
        ),
    )


def _step_line(step: Mapping[str, Any]) -> view.StepLine:
    return view.StepLine(
        step=step["step"],
        route=step["route"],
        share=Figure("share", step["share"], "share"),
        began=Figure("began", step["started_s"], "clock"),
        ended=Missing("still running when the stage ended")
        if step["ended_s"] is None
        else Figure("ended", step["ended_s"], "clock"),
        speculative_n=step["speculative_n"],
        target_n=step["target_n"],
        mark=verdict_mark(step["verdict"]),
        why=step["why"],
    )


def _monitor_line(monitor: Mapping[str, Any]) -> view.MonitorLine:
    to_pass, to_fail = (
        odds_text(monitor[f"{side}_evidence"], monitor[f"{side}_needs"])
        for side in ("pass", "fail")
    )
    is_count = monitor["unit"] == "count"
    return view.MonitorLine(
        route=monitor["route"],
        rule=monitor["rule"],
        cohort=monitor["cohort"],
        method=monitor["method"],
        n=monitor["n"],
        estimate=interval(monitor["estimate"], monitor["unit"], "no request said anything"),
        limit=monitor["limit"],
        unit=monitor["unit"],
        evidence="exact count" if is_count else f"{to_pass} to pass, {to_fail} to fail",
        mark=verdict_mark(monitor["verdict"]),
        next=monitor["next"],
    )


def _assignment_line(assignment: Mapping[str, Any]) -> view.AssignmentLine:
    return view.AssignmentLine(
        route=assignment["route"],
        speculative=assignment["speculative"],
        target_only=assignment["target_only"],
        expected=round(assignment["expected"]),
        mismatch=odds_text(assignment["evidence"], assignment["needs"]),
    )


def _event_line(event: Mapping[str, Any]) -> view.EventLine:
    fell_back = event["kind"] == FALL_BACK
    return view.EventLine(
        at=Figure("at", event["at_s"], "clock"),
        kind=words(event["kind"]),
        route=event["route"],
        text=event["text"],
        rule=event.get("rule", ""),
        action=event.get("action", ""),
        handed_over=part_of(event, "handed_over", "not counted") if fell_back else None,
        tone="bad" if fell_back else "plain",
    )


def _canary_chart(
    name: str, route: str, receipts: Sequence[Receipt], canary: Mapping[str, Any]
) -> view.Chart:
    """TPOT and queue age of one route over time, its share, and the moment of fallback."""
    steps = [step for step in canary.get("steps", ()) if step["route"] == route]
    falls = [
        event
        for event in canary.get("events", ())
        if event["route"] == route and event["kind"] == FALL_BACK
    ]
    origin_ns = canary["origin_ns"]
    at = [(r.scheduled_ns - origin_ns) / 1e9 for r in receipts]
    ended = [step["ended_s"] for step in steps if step["ended_s"] is not None]
    start = min([*at, *(step["started_s"] for step in steps)])
    end = max([*at, *(event["at_s"] for event in falls), *ended])
    width = (end - start) / WINDOWS or 1.0
    windows: dict[tuple[int, str], list[Receipt]] = defaultdict(list)
    for receipt, second in zip(receipts, at, strict=True):
        windows[min(int((second - start) / width), WINDOWS - 1), receipt.arm].append(receipt)
    panels = []
    columns = ["seconds", "arm", "n"]
    cells: dict[tuple[int, str], list[view.Cell]] = {}
    for metric in ("TPOT", "queue age"):
        get = dict(METRICS)[metric]
        tracks = []
        for arm in ARM_NAMES:
            middle: list[float | None] = []
            high: list[float | None] = []
            for window in range(WINDOWS):
                values = _values(windows.get((window, arm), ()), get)
                row = cells.setdefault((window, arm), [len(windows.get((window, arm), ()))])
                for p, track in ((0.5, middle), (0.95, high)):
                    value = stats.quantile(values, p) if values else None
                    track.append(None if value is None else value * 1e3)
                    row.append(seconds(value, "no request"))
            centres = tuple(start + (window + 0.5) * width for window in range(WINDOWS))
            tracks.append(Track(_series(arm), centres, tuple(middle), tuple(high)))
        panels.append(Panel(f"{metric}, ms: median (dots), p95 (thin line)", tuple(tracks)))
        columns += [f"{metric} p50", f"{metric} p95"]
    shares = [Share(step["started_s"], step["share"]) for step in steps]
    shares += [Share(e["at_s"], 0.0) for e in falls]
    return view.Chart(
        name=name,
        title=f"{route}: TPOT, queue age and share over the canary",
        description=f"Each point is a window of the canary, {WINDOWS} in all; with few requests in "
        "a window its p95 is the slowest. A vertical line marks the fallback."
        if falls
        else f"Each point is a window of the canary, {WINDOWS} in all; with few requests in a "
        "window its p95 is the slowest. No fallback happened.",
        table=view.ChartTable(
            tuple(columns),
            tuple(
                (Figure("", start + (window + 0.5) * width, "clock"), ARM_NAMES[arm], *row)
                for (window, arm), row in sorted(cells.items())
                if row[0]
            ),
        ),
        picture=Timeline(
            panels=tuple(panels),
            shares=tuple(sorted(shares, key=lambda share: share.from_s)),
            start_s=start,
            end_s=start + WINDOWS * width,
            moments=tuple(Moment(e["at_s"], "fall back") for e in falls),
        ),
    )
