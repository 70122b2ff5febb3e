"""Prometheus scrapes of a server, and differences of counters that survive a restart.

Servers under vLLM's names are read as they are: a series that is not there is absent, not 0 (a
target-only server has no speculation counters at all). When one engine restarts in mid-run its
counters begin anew; naive subtraction then gives negative drafts or an acceptance of 110 %, so
everything is differenced per engine, a reset is noticed once for all counters of that engine, and
its after-values stand for what it did since.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from speccheck.client import api_url, no_connection
from speccheck.errors import EngineError
from speccheck.records import Arm

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Sample name and labels sorted by name."""

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
FINISHED = "vllm:request_success_total"
PREEMPTIONS = "vllm:num_preemptions_total"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
TPOT_BUCKETS = f"{TPOT}_bucket"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"

WATCHED = (
    DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    ACCEPTED_PER_POSITION,
    GENERATION_TOKENS,
    RUNNING,
    WAITING,
    PROMPT_TOKENS,
    "vllm:kv_cache_usage_perc",
    PREEMPTIONS,
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    FINISHED,
)
"""What a background sampler keeps: a whole page takes long enough to parse to delay chunks."""

GUARDED = (
    *WATCHED,
    *(f"{histogram}_{part}" for histogram in (TPOT, E2E) for part in ("sum", "count")),
    *(f"{name.removesuffix('_total')}_created" for name in (GENERATION_TOKENS, FINISHED)),
)
"""What the live guard reads: the same, the means of two times, and what tells a restart."""

STALLING = (RUNNING, GENERATION_TOKENS, WAITING)
"""What tells that requests run and no token comes."""

_LONGEST_PAGE = 32 << 20
"""Bytes of a page above which it is no page of metrics."""

FAILED = "speccheck:scrape_failed"
"""Series of a scrape that failed, with the reason as its label, so that it can be kept as well."""

_TALLIED = (
    DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    ACCEPTED_PER_POSITION,
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    FINISHED,
    PREEMPTIONS,
)
TALLIED = (*_TALLIED, *(n.removesuffix("_total") + "_created" for n in _TALLIED), TPOT_BUCKETS)
"""What is read before and after a drive; `_created` tells a restart."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape: values by series. `taken_ns` is on the receipts' monotonic clock."""

    taken_ns: int
    samples: Mapping[Series, float]

    def total(self, name: str) -> float | None:
        """Sum over all labels and engines, or None where no such series is there."""
        values = [value for (series, _), value in self.samples.items() if series == name]
        return math.fsum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label; empty where no such series is there."""
        return _by_label(self.samples, name, label)

    @property
    def has_counters(self) -> bool:
        """Whether a counter is in it: not in a scrape that failed, nor in an empty page."""
        return any(_is_counter(name) for name, _ in self.samples)

    @property
    def failure(self) -> str | None:
        """Why the scrape failed; None where it did not."""
        return next((dict(labels)["why"] for name, labels in self.samples if name == FAILED), None)


def failed_scrape(why: str, taken_ns: int) -> Snapshot:
    """A scrape that brought nothing, as a snapshot that says why."""
    return Snapshot(taken_ns, {(FAILED, (("why", why),)): 1.0})


@dataclass(frozen=True, slots=True)
class Difference:
    """What counters did between two scrapes. Never negative.

    `values` holds every counter series of the later scrape (histogram buckets, sums and counts
    too). `resets` names the engines that restarted in between; their values count from the
    restart, so that what they did before it is lost: the difference is a lower bound there.
    """

    seconds: float
    values: Mapping[Series, float]
    resets: tuple[str, ...]

    def total(self, name: str) -> float | None:
        """Sum over engines, or None where no such counter is there: absent is not 0."""
        values = [value for (series, _), value in self.values.items() if series == name]
        return math.fsum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums over engines by the value of one label (position, le, finished_reason)."""
        return _by_label(self.values, name, label)


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Speculation between two scrapes, over all engines. None where the server has no series.

    The acceptance rate is accepted_tokens / draft_tokens and the mean acceptance length
    1 + accepted_tokens / drafts; both are left to whoever has an interval to go with them.
    `accepted_per_position[i]` counts verify steps that accepted position i.
    """

    drafts: int | None
    draft_tokens: int | None
    accepted_tokens: int | None
    accepted_per_position: tuple[int, ...] | None
    generation_tokens: int | None
    resets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a server counted while requests were driven: `SpecCounters` and what goes with them.

    None where the server has no such series; sums over engines. `finished` is by reason,
    `tpot_buckets` are the cumulative counts of TPOT by upper border in seconds, as text.
    """

    seconds: float
    drafts: int | None
    draft_tokens: int | None
    accepted_tokens: int | None
    accepted_per_position: tuple[int, ...] | None
    generation_tokens: int | None
    prompt_tokens: int | None
    preemptions: int | None
    finished: Mapping[str, int]
    tpot_buckets: Mapping[str, int]
    resets: tuple[str, ...]
    """Engines that restarted: what they counted before is lost."""
    longest_stall_s: float | None = None
    """Longest time in which requests ran and no token came; None where nobody looked."""
    waiting: tuple[float, float, float] | None = None
    """Requests in the server's queue: mean over the first and the last third of the looks, and the
    most; None where nobody looked."""


# --- scraping -----------------------------------------------------------------------------------


def parse_metrics(text: str, taken_ns: int, names: Collection[str] | None = None) -> Snapshot:
    """A page in Prometheus text format as a snapshot; of `names` only, where given.

    NaN samples (an unset summary) and infinite ones are left out: absent.

    Raises:
        EngineError: for text in another format.
    """
    if names is not None:
        wanted = set(names)
        lines = (line for line in text.splitlines() if line and line[0] != "#")
        kept = (line for line in lines if line.partition("{")[0].split(" ", 1)[0] in wanted)
        text = "\n".join(kept) + "\n"
    samples: dict[Series, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    series = (sample.name, tuple(sorted(sample.labels.items())))
                    samples[series] = float(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"/metrics is not in Prometheus text format: {error}") from error
    return Snapshot(taken_ns, samples)


async def scrape(
    session: aiohttp.ClientSession,
    base_url: str,
    *,
    now_ns: Callable[[], int],
    names: Collection[str] | None = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
) -> Snapshot:
    """Read a server's /metrics once.

    Raises:
        EngineError: where it does not answer in time, or with something else.
    """
    url = api_url(base_url, "/metrics")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with asyncio.timeout(timeout_s), session.get(url, headers=headers) as response:
            taken_ns = now_ns()
            if response.status != 200:
                raise EngineError(f"{url}: HTTP {response.status}; is /metrics turned on?")
            page = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                page += chunk
                if len(page) > _LONGEST_PAGE:
                    raise EngineError(f"{url}: a page of over {_LONGEST_PAGE >> 20} MiB")
            text = page.decode("utf-8", "replace")
    except TimeoutError:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise EngineError(f"{url}: no connection ({no_connection(error)})") from error
    except (aiohttp.ClientError, OSError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"{url}: {said}") from error
    return parse_metrics(text, taken_ns, names)


async def scrape_or_failure(
    session: aiohttp.ClientSession,
    base_url: str,
    *,
    now_ns: Callable[[], int],
    names: Collection[str] | None = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
) -> Snapshot:
    """Read a server's /metrics once; where that fails, why (`failed_scrape`).

    Without the address: the reason of a fallback is shown, and a URL may hold a password.
    """
    try:
        return await scrape(
            session, base_url, now_ns=now_ns, names=names, timeout_s=timeout_s, api_key=api_key
        )
    except EngineError as error:
        why = str(error).replace(api_url(base_url, "/metrics"), "/metrics")
        return failed_scrape(why, now_ns())


async def scrape_all(
    urls: Mapping[Arm, str], *, now_ns: Callable[[], int], api_key: str | None = None
) -> dict[Arm, Snapshot | str]:
    """What each arm's server has counted so far, or why it does not tell; never an error.

    Many servers have no /metrics: that must neither end a run nor pass for zeros.
    """

    async def one(session: aiohttp.ClientSession, url: str) -> Snapshot | str:
        try:
            return await scrape(session, url, now_ns=now_ns, names=TALLIED, api_key=api_key)
        except EngineError as error:
            # Without the address: what is said here reaches packets, and a URL may hold a password.
            return str(error).replace(api_url(url, "/metrics"), "/metrics")

    async with aiohttp.ClientSession() as session:
        found = await asyncio.gather(*(one(session, url) for url in urls.values()))
    return dict(zip(urls, found, strict=True))


async def sample(
    session: aiohttp.ClientSession,
    base_url: str,
    *,
    now_ns: Callable[[], int],
    interval_s: float,
    on_sample: Callable[[Snapshot], None],
    on_failure: Callable[[EngineError], None],
    names: Collection[str] = WATCHED,
    timeout_s: float = 5.0,
    api_key: str | None = None,
) -> NoReturn:
    """Scrape every `interval_s` until cancelled. A failed scrape is reported and the next one
    tried: whoever judges decides what a hole in the data means.
    """
    while True:
        try:
            snapshot = await scrape(
                session,
                base_url,
                now_ns=now_ns,
                names=names,
                timeout_s=timeout_s,
                api_key=api_key,
            )
        except EngineError as error:
            on_failure(error)
        else:
            on_sample(snapshot)
        await asyncio.sleep(interval_s)


# --- differences --------------------------------------------------------------------------------


def difference(before: Snapshot, after: Snapshot) -> Difference:
    """What each counter did from `before` to `after`, per engine, with restarts seen.

    An engine has restarted where any of its counters went down or its `_created` times are others
    (older ones: another replica answers): then *all* its counters use their after-values, since one
    that grew fast may have passed its old value again. Counters that are new in `after` count from
    0. Gauges are no part of this.
    """
    restarted: set[str] = set()
    for series, value in after.samples.items():
        earlier = before.samples.get(series)
        if earlier is None:
            continue
        name = series[0]
        went_down = _is_counter(name) and value < earlier
        was_recreated = name.endswith("_created") and value != earlier
        if went_down or was_recreated:
            restarted.add(_engine(series))
    values = {
        series: value if _engine(series) in restarted else value - before.samples.get(series, 0.0)
        for series, value in after.samples.items()
        if _is_counter(series[0])
    }
    seconds = (after.taken_ns - before.taken_ns) / 1e9
    return Difference(seconds, values, tuple(sorted(restarted)))


def spec_counters(change: Difference) -> SpecCounters:
    """The speculation counters of a difference, summed over engines."""
    positions = change.by_label(ACCEPTED_PER_POSITION, "position")
    per_position = None
    if positions:
        last = max(int(position) for position in positions)
        per_position = tuple(round(positions.get(str(i), 0.0)) for i in range(last + 1))
    return SpecCounters(
        drafts=_whole(change.total(DRAFTS)),
        draft_tokens=_whole(change.total(DRAFT_TOKENS)),
        accepted_tokens=_whole(change.total(ACCEPTED_TOKENS)),
        accepted_per_position=per_position,
        generation_tokens=_whole(change.total(GENERATION_TOKENS)),
        resets=change.resets,
    )


def counted(change: Difference) -> Counted:
    """A difference in the figures that receipts can be held against."""
    spec = spec_counters(change)
    return Counted(
        seconds=change.seconds,
        drafts=spec.drafts,
        draft_tokens=spec.draft_tokens,
        accepted_tokens=spec.accepted_tokens,
        accepted_per_position=spec.accepted_per_position,
        generation_tokens=spec.generation_tokens,
        prompt_tokens=_whole(change.total(PROMPT_TOKENS)),
        preemptions=_whole(change.total(PREEMPTIONS)),
        finished=_rounded(change.by_label(FINISHED, "finished_reason")),
        tpot_buckets=_rounded(change.by_label(TPOT_BUCKETS, "le")),
        resets=change.resets,
    )


def together(several: Sequence[Counted]) -> Counted:
    """The same figures summed over drives; one that is missing in any of them is missing.

    Raises:
        ValueError: nothing to sum.
    """
    if not several:
        raise ValueError("no counts to sum")

    def total(name: str) -> int | None:
        values = [getattr(one, name) for one in several]
        return None if None in values else sum(values)

    def merged(name: str) -> dict[str, int]:
        keys = dict.fromkeys(key for one in several for key in getattr(one, name))
        return {key: sum(getattr(one, name).get(key, 0) for one in several) for key in keys}

    positions = [one.accepted_per_position for one in several]
    stalls = [one.longest_stall_s for one in several]
    return Counted(
        seconds=math.fsum(one.seconds for one in several),
        drafts=total("drafts"),
        draft_tokens=total("draft_tokens"),
        accepted_tokens=total("accepted_tokens"),
        accepted_per_position=None
        if None in positions
        else tuple(map(sum, itertools.zip_longest(*(p or () for p in positions), fillvalue=0))),
        generation_tokens=total("generation_tokens"),
        prompt_tokens=total("prompt_tokens"),
        preemptions=total("preemptions"),
        finished=merged("finished"),
        tpot_buckets=merged("tpot_buckets"),
        resets=tuple(engine for one in several for engine in one.resets),
        longest_stall_s=None if None in stalls else max(s for s in stalls if s is not None),
        waiting=max((one.waiting for one in several if one.waiting), key=max, default=None),
    )


def stalled_for_s(snapshots: Sequence[Snapshot]) -> float | None:
    """How long, up to the last snapshot, an engine has had requests running without one token.

    Seconds; 0 where tokens flow or nothing runs; None where that cannot be told (no snapshots, or
    a server without these series). A health check does not see this: a hung engine still
    answers 200.
    """
    stalled_s = None
    for stalled_s in _stalls(snapshots):  # noqa: B007 (the last one is what is asked for)
        pass
    return stalled_s


def longest_stall_s(snapshots: Sequence[Snapshot]) -> float | None:
    """The longest such time up to any snapshot, seconds; None where it can be told at none."""
    return max((s for s in _stalls(snapshots) if s is not None), default=None)


def waiting(snapshots: Sequence[Snapshot]) -> tuple[float, float, float] | None:
    """`Counted.waiting`; None where fewer than three looks found the series."""
    seen = [value for one in snapshots if (value := one.total(WAITING)) is not None]
    third = len(seen) // 3
    if third == 0:
        return None
    return math.fsum(seen[:third]) / third, math.fsum(seen[-third:]) / third, max(seen)


def _stalls(snapshots: Sequence[Snapshot]) -> Iterator[float | None]:
    """`stalled_for_s` at each snapshot from the second on."""
    stalled_s: dict[str, float] = {}
    for earlier, later in itertools.pairwise(snapshots):
        stalled = stalled_engines(earlier, later)
        seconds = (later.taken_ns - earlier.taken_ns) / 1e9
        stalled_s = {engine: stalled_s.get(engine, 0.0) + seconds for engine in stalled or ()}
        yield None if stalled is None else max(stalled_s.values(), default=0.0)


def stalled_engines(earlier: Snapshot, later: Snapshot) -> frozenset[str] | None:
    """Engines that had requests running at both scrapes and no token between them: one that hangs
    is not seen in the sum, where others go on. None where no engine tells.
    """
    tokens = _by_engine(difference(earlier, later).values, GENERATION_TOKENS)
    before, now = (_by_engine(one.samples, RUNNING) for one in (earlier, later))
    known = tokens.keys() & before.keys() & now.keys()
    if not known:
        return None
    return frozenset(e for e in known if tokens[e] == 0 and before[e] > 0 and now[e] > 0)


def _by_engine(samples: Mapping[Series, float], name: str) -> dict[str, float]:
    """Sums of a series by engine."""
    sums: dict[str, float] = {}
    for series, value in samples.items():
        if series[0] == name:
            sums[_engine(series)] = sums.get(_engine(series), 0.0) + value
    return sums


def _is_counter(name: str) -> bool:
    """By the format's own naming; gauges and `_created` times are none."""
    return name.endswith(("_total", "_count", "_bucket", "_sum"))


def _engine(series: Series) -> str:
    """The engine (data-parallel rank) a series belongs to; empty where it has no such label."""
    return next((value for label, value in series[1] if label == "engine"), "")


def _by_label(samples: Mapping[Series, float], name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (series, labels), value in samples.items():
        key = dict(labels).get(label)
        if series == name and key is not None:
            sums[key] = sums.get(key, 0.0) + value
    return sums


def _rounded(values: Mapping[str, float]) -> dict[str, int]:
    return {key: round(value) for key, value in values.items()}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
