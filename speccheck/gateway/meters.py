"""The gateway's own /metrics: one page over all workers, whichever of them is asked.

prometheus-client's multi-process mode keeps each process's values in a mapped file, so that counts
of a worker that died are not lost. What the parent knows (states, losses) comes from the board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from speccheck.records import Receipt

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_PREFIX = "speccheck_gateway_"


class Meters:
    """Counts of one worker."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: where the values are kept; None: nowhere but in the mapped files."""
        self._requests = Counter(
            f"{_PREFIX}requests",
            "Attempts by route, arm, decision and outcome.",
            ("route", "arm", "decision", "outcome"),
            registry=registry,
        )
        self._passed = Counter(
            f"{_PREFIX}passed_on",
            "Requests that are no chat or completion, passed to target-only.",
            registry=registry,
        )
        self._refused = Counter(
            f"{_PREFIX}refused",
            "Requests that the gateway itself refused, by reason.",
            ("reason",),
            registry=registry,
        )
        self._handovers = Counter(
            f"{_PREFIX}handovers",
            "Answers whose arm failed: exact, unseeded, restarted or broken.",
            ("route", "kind"),
            registry=registry,
        )
        self._lost = Counter(
            f"{_PREFIX}worker_receipts_lost",
            "Receipts that did not fit on their way to the parent.",
            registry=registry,
        )
        self._mirrors = Counter(
            f"{_PREFIX}mirrored",
            "Copies to the speculative arm: sent, or skipped at the limit.",
            ("what",),
            registry=registry,
        )
        self._in_flight = Gauge(
            f"{_PREFIX}in_flight",
            "Requests being answered.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._ttft = Histogram(
            f"{_PREFIX}ttft_seconds",
            "From arrival at the gateway to the first token.",
            ("route", "arm"),
            buckets=_TTFT_S,
            registry=registry,
        )

    def receipt(self, receipt: Receipt) -> None:
        """An attempt is over."""
        self._requests.labels(
            receipt.route, receipt.arm, receipt.decision, str(receipt.outcome)
        ).inc()
        if receipt.handover_kind is not None:
            self._handovers.labels(receipt.route, str(receipt.handover_kind)).inc()
        if receipt.queue_age_s is not None and not receipt.mirror:
            self._ttft.labels(receipt.route, receipt.arm).observe(receipt.queue_age_s)

    def passed_on(self) -> None:
        """A request of another kind."""
        self._passed.inc()

    def refused(self, reason: str) -> None:
        """A request that went no further."""
        self._refused.labels(reason).inc()

    def lost(self, n: int) -> None:
        """Receipts that nobody will see."""
        self._lost.inc(n)

    def mirrored(self, what: str) -> None:
        """A copy, sent or skipped."""
        self._mirrors.labels(what).inc()

    def in_flight(self, n: int) -> None:
        """Requests of this worker."""
        self._in_flight.set(n)


class _Said:
    """What the board says, as metrics."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._said = said

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        store = self._said["receipts"]
        for name, text in (
            ("lost", "Receipts that the store never took."),
            ("written", "Receipts in the store."),
        ):
            yield CounterMetricFamily(f"{_PREFIX}receipts_{name}", text, value=store[name])
        yield CounterMetricFamily(
            f"{_PREFIX}scrapes_lost",
            "Looks at the servers that the store never took; a replay lacks them.",
            value=store["scrapes_lost"],
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}receipts_waiting", "Receipts for the store.", value=store["waiting"]
        )
        share = GaugeMetricFamily(
            f"{_PREFIX}route_share",
            "Share of eligible traffic that may speculate.",
            labels=["route"],
        )
        state = GaugeMetricFamily(
            f"{_PREFIX}route_state", "1 for the state a route is in.", labels=["route", "state"]
        )
        for route, one in self._said["routes"].items():
            share.add_metric([route], one["share"])
            state.add_metric([route, one["state"]], 1)
        yield share
        yield state
        yield CounterMetricFamily(
            f"{_PREFIX}worker_restarts", "Workers that died.", value=self._said["restarts"]
        )


def exposition(folder: str, said: Mapping[str, Any]) -> bytes:
    """The page, over all workers that keep their values in this folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    registry.register(_Said(said))
    return generate_latest(registry)
