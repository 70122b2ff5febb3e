"""Monitors of a pair of servers by their /metrics alone, where nobody has its receipts.

The unit is one scrape interval: its acceptance (accepted over drafted tokens), its mean TPOT and
e2e, and how its requests ended. The rules are those of the receipts, with the same processes, and
say on what they rest. What a page cannot show is not judged: a p95 (the buckets are too wide), what
the client saw, which request was whose.

Intervals overlap in the requests they see, so they are less independent than requests are; the
level is nominal. Where there are receipts, use these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from speccheck import stats, telemetry
from speccheck.guardrails import RULES, RuleLimit, judge
from speccheck.monitors import AcceptanceMethod, Monitor, monitor_of
from speccheck.records import Arm, Estimate, Finding, Measurement, Stage
from speccheck.telemetry import Difference

SHOWN = (
    "min_acceptance_rate",
    "max_acceptance_rate",
    "min_mean_acceptance_length",
    "max_tpot_p50_regression",
    "max_e2e_p50_regression",
    "max_error_rate",
)
"""Rules that a page can show something about."""

_TIMES = {"tpot_p50_ratio": telemetry.TPOT, "e2e_p50_ratio": telemetry.E2E}
"""Histograms whose sum over count is an interval's mean, by metric."""


class Scraped:
    """The monitors of one pair, fed with what counters did between two scrapes of an arm."""

    def __init__(
        self,
        route: str,
        rules: Mapping[str, RuleLimit],
        *,
        acceptance: AcceptanceMethod,
        floors: Mapping[str, Estimate],
        alpha_fail: float,
    ) -> None:
        """Begin to watch; arguments as for `Monitors`, rules that no page can show left out."""
        self.route = route
        self.speculative = 0
        """Requests that the speculative server finished."""
        self._floors = floors
        self._rules = {name: limit for name, limit in rules.items() if name in SHOWN}
        self.monitors = [
            monitor_of(
                RULES[name],
                limit,
                "",
                alpha_fail=alpha_fail / len(self._rules),
                acceptance=acceptance,
                floor=floors.get(RULES[name].metric),
                by_load=False,
            )
            for name, limit in self._rules.items()
        ]

    def add(self, arm: Arm, change: Difference) -> list[Monitor]:
        """Take in one scrape interval of an arm and look; the monitors that fail at this look."""
        reasons = change.by_label(telemetry.FINISHED, "finished_reason")
        ended = {reason: round(n) for reason, n in reasons.items() if reason != "abort" and n > 0}
        if arm is Arm.SPECULATIVE:
            self.speculative += sum(ended.values())
        for monitor in self.monitors:
            self._feed(monitor, arm, change, ended)
        return [monitor for monitor in self.monitors if monitor.look()]

    def _feed(
        self, monitor: Monitor, arm: Arm, change: Difference, ended: Mapping[str, int]
    ) -> None:
        process, metric = monitor.process, monitor.rule.metric
        if metric in _TIMES:
            mean_s = _mean(change, _TIMES[metric])
            if mean_s and isinstance(process, stats.QuantileRatio):
                process.add(mean_s, speculative=arm is Arm.SPECULATIVE)
            return
        if arm is not Arm.SPECULATIVE:
            return
        if isinstance(process, stats.Rate):
            _spread(process, ended.get("error", 0), sum(ended.values()))
            return
        if monitor.loops is not None:
            _spread(monitor.loops, ended.get("length", 0), sum(ended.values()))
        accepted = change.total(telemetry.ACCEPTED_TOKENS)
        drafted = change.total(telemetry.DRAFT_TOKENS)
        base = drafted if metric == "acceptance_rate" else change.total(telemetry.DRAFTS)
        if accepted is None or not drafted or not base:
            return
        if isinstance(process, stats.BoundedMean):
            process.add(min(accepted / base, 1.0))
        elif isinstance(process, stats.RatioOfSums):
            process.add(accepted, base)

    def judge(self) -> tuple[Finding, ...]:
        """The findings, as of now."""
        measured = [
            Measurement(
                m.rule.metric,
                Stage.CANARY,
                self.route,
                "",
                m.estimate() if m.n else None,
                _note(m),
            )
            for m in self.monitors
        ]
        beside = next((m.loops for m in self.monitors if m.loops is not None), None)
        if beside is not None and beside.n:
            note = f"{beside.events} of {beside.n} answers reached the length limit"
            measured.append(
                Measurement(
                    "length_finish_rate", Stage.CANARY, self.route, "", beside.estimate(0.05), note
                )
            )
        return judge(
            self._rules,
            measured,
            stage=Stage.CANARY,
            route=self.route,
            noise_floors=self._floors,
            standings={(m.rule.name, ""): m.standing() for m in self.monitors if m.n},
        )


def _note(monitor: Monitor) -> str:
    if isinstance(monitor.process, stats.Rate):
        return f"{monitor.process.events} of {monitor.process.added} failed, by /metrics"
    return "by /metrics: n counts scrape intervals"


def _mean(change: Difference, histogram: str) -> float | None:
    """Mean of what a histogram took in, in its unit; None where it took in nothing."""
    count = change.total(f"{histogram}_count")
    total = change.total(f"{histogram}_sum")
    if not count or total is None or not math.isfinite(total) or total <= 0:
        return None
    return total / count


def _spread(rate: stats.Rate, events: int, n: int) -> None:
    """Events evenly among n: in which order they came is not known, so none are in a row."""
    for i in range(n):
        rate.add(event=(i + 1) * events // n > i * events // n)
