"""The engine's counters under vLLM's names, so that one scraper reads both engines.

The engine thread only adds numbers to plain lists; the Prometheus text is made when somebody
scrapes. As in vLLM, the speculation counters do not exist on a target-only server (absent is not
0), accepted tokens count before a stop cuts the block, and a request that ends with one token
records a time per output token of 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any

from speccheck.engine.sequence import RequestStats

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASON = "max_num_queued_reqs"
# vLLM 0.32, v1/metrics: seconds.
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Bucket counts and a sum; cumulative only when it is read."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count up to it) pairs as Prometheus wants them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        total, buckets = 0, []
        for bound, count in zip(names, self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class EngineMetrics:
    """Everything /metrics shows. Written by the engine's thread, read by the server's."""

    def __init__(self, k: int | None, max_model_len: int) -> None:
        """`k` is the proposal length, None on a target-only server."""
        self.k = k
        counts = _one_two_five(max_model_len)
        self.n_running = 0
        self.n_waiting = 0
        self.cache_usage = 0.0
        self.n_prompt_tokens = 0
        self.n_prefix_queries = 0
        self.n_prefix_hits = 0
        self.n_generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.n_rejected = 0
        self.n_drafts = 0
        self.n_draft_tokens = 0
        self.n_accepted = 0
        self.accepted_per_pos = [0] * (k or 0)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_TTFT),
            "inter_token_latency_seconds": Histogram(_PER_TOKEN),
            "request_time_per_output_token_seconds": Histogram(_PER_TOKEN),
            "e2e_request_latency_seconds": Histogram(_REQUEST),
            "request_queue_time_seconds": Histogram(_REQUEST),
            "request_prefill_time_seconds": Histogram(_REQUEST),
            "request_decode_time_seconds": Histogram(_REQUEST),
            "request_inference_time_seconds": Histogram(_REQUEST),
            "request_prompt_tokens": Histogram(counts),
            "request_generation_tokens": Histogram(counts),
            "iteration_tokens_total": Histogram(_ITERATION),
        }

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram of this name (without the `vllm:`)."""
        self.histograms[name].observe(value)

    def count_draft(self, accepted: int, drafted: int) -> None:
        """One verify step of one request that had drafts."""
        self.n_drafts += 1
        self.n_draft_tokens += drafted
        self.n_accepted += accepted
        for position in range(accepted):
            self.accepted_per_pos[position] += 1

    def count_finished(self, reason: str, stats: RequestStats) -> None:
        """A request ended; its times are observed if it produced anything."""
        self.finished[reason] += 1
        if not stats.n_output:
            return
        decode_s = stats.last_token_s - stats.first_token_s
        gaps = stats.n_output - 1
        self.observe("e2e_request_latency_seconds", stats.last_token_s - stats.arrival_s)
        self.observe("request_queue_time_seconds", stats.scheduled_s - stats.arrival_s)
        self.observe("request_prefill_time_seconds", stats.first_token_s - stats.scheduled_s)
        self.observe("request_decode_time_seconds", decode_s)
        self.observe("request_inference_time_seconds", stats.last_token_s - stats.scheduled_s)
        self.observe("request_time_per_output_token_seconds", decode_s / gaps if gaps > 0 else 0.0)
        self.observe("request_prompt_tokens", stats.n_prompt)
        self.observe("request_generation_tokens", stats.n_output)


class Collector:
    """A prometheus_client collector over `EngineMetrics`."""

    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Any]:
        """Metric families, in vLLM's names."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        m = self._metrics
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, help_: str, value: float) -> Any:
            family = GaugeMetricFamily("vllm:" + name, help_, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, help_: str, value: float) -> Any:
            family = CounterMetricFamily("vllm:" + name, help_, labels=names)
            family.add_metric(values, value)
            return family

        yield gauge("num_requests_running", "Requests in the running batch.", m.n_running)
        yield gauge("num_requests_waiting", "Requests waiting for a row.", m.n_waiting)
        yield gauge("kv_cache_usage_perc", "Share of cache tokens in use, 0 to 1.", m.cache_usage)
        yield counter("num_preemptions", "Preemptions; this engine makes none.", 0)
        yield counter("prompt_tokens", "Prompt tokens, cached or read.", m.n_prompt_tokens)
        yield counter("prefix_cache_queries", "Prompt tokens looked up.", m.n_prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found.", m.n_prefix_hits)
        yield counter("generation_tokens", "Tokens generated.", m.n_generation_tokens)
        family = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason in FINISH_REASONS:
            family.add_metric([*values, reason], m.finished[reason])
        yield family
        family = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused at the door.",
            labels=[names[0], "reason"],
        )
        family.add_metric([values[0], REJECTION_REASON], m.n_rejected)
        yield family
        if m.k is not None:
            yield counter("spec_decode_num_drafts", "Verify steps with drafts.", m.n_drafts)
            yield counter("spec_decode_num_draft_tokens", "Drafted tokens.", m.n_draft_tokens)
            yield counter("spec_decode_num_accepted_tokens", "Accepted tokens.", m.n_accepted)
            family = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens per draft position.",
                labels=[*names, "position"],
            )
            for position, count in enumerate(m.accepted_per_pos):
                family.add_metric([*values, str(position)], count)
            yield family
        for name, histogram in m.histograms.items():
            buckets = HistogramMetricFamily("vllm:" + name, name.replace("_", " "), labels=names)
            buckets.add_metric(values, histogram.cumulative(), histogram.sum)
            yield buckets


def exposition(metrics: EngineMetrics, model_name: str) -> bytes:
    """The text of /metrics."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(metrics, model_name))
    text: bytes = generate_latest(registry)
    return text


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the limit: vLLM's buckets for token counts."""
    bounds: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > limit:
                return tuple(bounds)
            bounds.append(step * decade)
        decade *= 10
