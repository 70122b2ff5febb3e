"""The receipt store: one DuckDB file, one SCHEMA string, and all the SQL of speccheck.

What was observed is only ever added to. A receipt is written once under its key and survives a
kill -9 from the moment `append_receipts` returns; decisions form a hash chain; `verify` derives
every identity again. DuckDB lets one process hold a file, even against readers, so the holder is
named in one clear error instead of a traceback. Rows go in as one JSON parameter per batch: DuckDB
binds parameters row by row, which is some fifteen times slower and would stall the load loop.
"""

# ruff: noqa: S608 -- names in the SQL come from SCHEMA or were checked against it (_known)

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from speccheck.errors import StoreError, StoreHeldError, UsageError
from speccheck.health import ClientHealth
from speccheck.records import (
    Action,
    Answer,
    Arm,
    ArmDescription,
    Decision,
    Estimate,
    Finding,
    Measurement,
    Preference,
    Receipt,
    RouteState,
    Transition,
    Verdict,
    canonical_json,
    digest,
)
from speccheck.telemetry import Counted, Snapshot

if TYPE_CHECKING:
    import duckdb

STORE_VERSION = 6
"""Version of SCHEMA. History: 1, the first; 2, verify steps and details of answers; 3, preferences
of judges and reviewers; 4, drives, and the boot of each anchor; 5, hand-over of running answers;
6, transitions of live routes."""

SCHEMA = """
CREATE TABLE store_version (
    version INTEGER NOT NULL           -- of this schema; a newer one is refused, not guessed at
);

-- One row per run: what was fixed before its first request.
CREATE TABLE runs (
    run_id VARCHAR PRIMARY KEY,        -- digest of what identifies the run
    created_at_ns BIGINT NOT NULL,     -- wall clock, ns since 1970-01-01 UTC
    seed BIGINT NOT NULL,              -- of every generator of the run
    corpus_digest VARCHAR NOT NULL,    -- of the prompts, in order
    rules_digest VARCHAR NOT NULL,     -- of guardrails, levels, minimum n and stopping rule
    config VARCHAR NOT NULL            -- JSON: all else it was started with; its expiry may change
);

-- One row per process that wrote to a run: joins its monotonic clock to the wall clock.
CREATE TABLE anchors (
    run_id VARCHAR NOT NULL,           -- the run
    wall_ns BIGINT NOT NULL,           -- wall clock, ns since 1970-01-01 UTC
    clock_ns BIGINT NOT NULL,          -- the monotonic clock (perf_counter_ns), read together
    boot VARCHAR NOT NULL              -- since when that clock counts: the machine's boot id
);

-- One row per drive: a part of a stage that one process sent, written when it had ended.
CREATE TABLE drives (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order within the run
    stage VARCHAR NOT NULL,            -- stage
    label VARCHAR NOT NULL,            -- in words
    routes VARCHAR[] NOT NULL,         -- whose requests went to the speculative arm
    completed BIGINT NOT NULL,         -- requests, warm-up left out
    health VARCHAR NOT NULL,           -- JSON: the client's health
    counters VARCHAR NOT NULL,         -- JSON: per arm what the server counted, or why not
    PRIMARY KEY (run_id, seq)
);

-- What each arm really ran, as captured from server and launcher.
CREATE TABLE arms (
    run_id VARCHAR NOT NULL,           -- the run
    arm VARCHAR NOT NULL,              -- target_only or speculative
    engine_config_id VARCHAR NOT NULL, -- digest of arm, engine, model and both configs
    url VARCHAR NOT NULL,              -- where it was reached; not part of the digest
    engine VARCHAR NOT NULL,           -- name and version
    model VARCHAR NOT NULL,            -- the target
    speculative_config VARCHAR,        -- JSON; NULL on the target-only arm
    config VARCHAR NOT NULL,           -- JSON: argv, server info, model digests, machine
    PRIMARY KEY (run_id, arm, engine_config_id)
);

-- One row per request attempt, never updated. Missing is NULL, never 0.
CREATE TABLE receipts (
    receipt_id VARCHAR PRIMARY KEY,    -- digest of run, stage, phase, arm, prompt, repeat, attempt
    run_id VARCHAR NOT NULL,           -- the run
    stage VARCHAR NOT NULL,            -- replay, shadow, canary; sweep, calibration, probe, gateway
    phase VARCHAR NOT NULL,            -- part of the stage: greedy, sampled, aa, c8, c8-k5 ...
    arm VARCHAR NOT NULL,              -- target_only or speculative: the server that answered
    route VARCHAR NOT NULL,            -- class of traffic that is switched on and off
    prompt_id VARCHAR NOT NULL,        -- in the corpus
    pair_id VARCHAR NOT NULL,          -- joins the arms' receipts of one prompt
    repeat BIGINT NOT NULL,            -- 0 for the first time the prompt is sent in the phase
    attempt BIGINT NOT NULL,           -- 0; a retry would be a receipt of its own
    block BIGINT NOT NULL,             -- time block (ABBA), 0 where there are none
    warm_up BOOLEAN NOT NULL,          -- driven but kept out of estimates
    mirror BOOLEAN NOT NULL,           -- copy of primary traffic, its output discarded
    target_model VARCHAR NOT NULL,     -- model (and revision) of the target
    proposer VARCHAR,                  -- draft model or drafting method
    algorithm VARCHAR,                 -- verification algorithm
    draft_sampling VARCHAR,            -- how the proposer picks: greedy or probabilistic
    k BIGINT,                          -- proposal length
    engine VARCHAR NOT NULL,           -- name and version
    engine_config_id VARCHAR NOT NULL, -- of table arms
    policy_version VARCHAR NOT NULL,   -- of the eligibility policy
    temperature DOUBLE NOT NULL,       -- as sent
    top_p DOUBLE NOT NULL,             -- as sent; 1 is off
    top_k BIGINT NOT NULL,             -- as sent; 0 is off
    min_p DOUBLE NOT NULL,             -- as sent; 0 is off
    seed BIGINT,                       -- as sent
    frequency_penalty DOUBLE NOT NULL, -- as sent; 0 is off
    presence_penalty DOUBLE NOT NULL,  -- as sent; 0 is off
    repetition_penalty DOUBLE NOT NULL,-- as sent; 1 is off
    stop_count BIGINT NOT NULL,        -- number of stop strings
    response_format VARCHAR,           -- kind of structured output asked for
    logprobs BIGINT,                   -- number of top logprobs asked for
    task VARCHAR NOT NULL,             -- cohort: task type
    language VARCHAR NOT NULL,         -- cohort
    priority VARCHAR NOT NULL,         -- cohort: normal or protected
    prompt_band VARCHAR NOT NULL,      -- cohort: by prompt tokens
    output_band VARCHAR NOT NULL,      -- cohort: by expected output length
    temperature_band VARCHAR NOT NULL, -- cohort: greedy, low, mid or high
    features VARCHAR NOT NULL,         -- cohort: sampling features, sorted, comma-joined
    concurrency BIGINT NOT NULL,       -- cohort: offered concurrency
    prompt_tokens BIGINT,              -- as the server counted
    cached_tokens BIGINT,              -- of the prompt, found in a prefix cache
    completion_tokens BIGINT,          -- delivered: by token ids, else by the server's usage
    reasoning_tokens BIGINT,           -- of the completion
    proposed_tokens BIGINT,            -- drafted
    accepted_tokens BIGINT,            -- drafted and accepted
    discarded_tokens BIGINT,           -- drafted and not accepted
    target_passes BIGINT,              -- decode passes of the target, prefill excluded
    verify_steps BIGINT,               -- passes that checked drafts
    acceptance_histogram BIGINT[],     -- entry j: verify steps that accepted exactly j
    counts_source VARCHAR NOT NULL,    -- engine, counters, estimated or none
    counts_note VARCHAR NOT NULL,      -- why there are no counts
    scheduled_ns BIGINT NOT NULL,      -- intended send time, clock of the run's first anchor
    sent_ns BIGINT,                    -- real send time
    first_token_ns BIGINT,             -- first chunk with token ids (else content or reasoning)
    first_content_ns BIGINT,           -- first chunk with visible text
    last_token_ns BIGINT,              -- last chunk with token ids (else output)
    done_ns BIGINT,                    -- end of the attempt
    server_queue_ms DOUBLE,            -- in the server's queue, by its own account
    max_chunk_gap_ns BIGINT,           -- longest wait between two chunks with output
    chunks BIGINT,                     -- with output; a chunk is not a token
    outcome VARCHAR NOT NULL,          -- ok, error, rejected, incomplete or cancelled
    http_status BIGINT,                -- NULL where no reply came
    error_class VARCHAR,               -- unsupported_parameter, stream_error, timeout ...
    error_message VARCHAR,             -- one line, clipped, without keys
    finish_reason VARCHAR,             -- as the server said
    stop_reason VARCHAR,               -- as the server said: stop string or token id
    decision VARCHAR NOT NULL,         -- policy: speculate, target_only or fell_back
    decision_reason VARCHAR NOT NULL,  -- one line
    output_digest VARCHAR,             -- of the token ids, of the text where there are none
    warnings VARCHAR[] NOT NULL,       -- what did not add up
    handover_at BIGINT,                -- tokens at the joint; NULL: no hand-over was needed
    handover_from VARCHAR,             -- arm that began the answer
    handover_to VARCHAR,               -- arm that ended it; NULL where it broke
    handover_kind VARCHAR,             -- exact, unseeded, restarted or broken
    handover_reason VARCHAR            -- what the first arm did, one line
);
CREATE INDEX receipts_by_phase ON receipts (run_id, stage, phase);

-- Receipts with their times in seconds, computed and never stored.
CREATE VIEW timings AS SELECT *,
    (first_token_ns - sent_ns) / 1e9 AS ttft_s,            -- send to first token
    (last_token_ns - sent_ns) / 1e9 AS e2e_s,              -- send to last token
    (last_token_ns - scheduled_ns) / 1e9 AS effective_s,   -- our own waiting counts
    (first_token_ns - scheduled_ns) / 1e9 AS queue_age_s,  -- how long it waited to be served
    (sent_ns - scheduled_ns) / 1e9 AS lag_s,               -- how late the client was
    CASE WHEN completion_tokens >= 2 AND last_token_ns <> first_token_ns
        THEN (last_token_ns - first_token_ns) / 1e9 / (completion_tokens - 1)
    END AS tpot_s                                          -- per token after the first
FROM receipts;

-- Answers in full: in replay and probe only, or where the user asked. User content.
CREATE TABLE texts (
    receipt_id VARCHAR PRIMARY KEY,    -- of table receipts
    text VARCHAR NOT NULL,             -- visible answer
    token_ids BIGINT[],                -- all tokens, reasoning included; NULL where not sent
    accepted_per_step BIGINT[],        -- accepted in each verify step; NULL where not sent
    drafted_per_step BIGINT[],         -- drafted in each verify step; NULL where not sent
    details VARCHAR                    -- JSON: log-probabilities, further choices, tool calls
);

-- Which of two answers a judge or a reviewer preferred, arms hidden. Information only.
CREATE TABLE preferences (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order of writing; the last verdict on a pair stands
    given_at_ns BIGINT NOT NULL,       -- wall clock, ns since 1970-01-01 UTC
    source VARCHAR NOT NULL,           -- judge or human
    who VARCHAR NOT NULL,              -- the judge's model, or the reviewer
    pair_id VARCHAR NOT NULL,          -- joins the arms' receipts of the two answers
    verdict VARCHAR NOT NULL,          -- target_only, speculative, tie or unclear
    note VARCHAR NOT NULL,             -- comment, or why it is unclear
    PRIMARY KEY (run_id, seq)
);

-- Metrics as estimated, before any rule. Derived: a stage that is run again replaces its own.
CREATE TABLE measurements (
    run_id VARCHAR NOT NULL,           -- the run
    put_by VARCHAR NOT NULL,           -- stage whose results these are
    seq BIGINT NOT NULL,               -- order within the stage
    stage VARCHAR NOT NULL,            -- stage the receipts are from
    metric VARCHAR NOT NULL,           -- name, as in rules
    route VARCHAR NOT NULL,            -- the route
    cohort VARCHAR NOT NULL,           -- readable; empty for the whole route
    value DOUBLE,                      -- NULL with n: nothing could be measured
    low DOUBLE,                        -- one-sided bound
    high DOUBLE,                       -- one-sided bound
    n BIGINT,                          -- independent units used by the method
    method VARCHAR,                    -- of the interval
    alpha DOUBLE,                      -- one-sided level of each bound
    note VARCHAR NOT NULL,             -- why nothing could be measured
    examples VARCHAR[] NOT NULL        -- receipt ids of the worst cases
);

-- Rules as judged. Derived, replaced like measurements.
CREATE TABLE findings (
    run_id VARCHAR NOT NULL,           -- the run
    put_by VARCHAR NOT NULL,           -- stage whose results these are
    seq BIGINT NOT NULL,               -- order within the stage
    stage VARCHAR NOT NULL,            -- stage the receipts are from
    rule VARCHAR NOT NULL,             -- name of the rule
    verdict VARCHAR NOT NULL,          -- pass, inconclusive, error or fail
    route VARCHAR NOT NULL,            -- the route
    cohort VARCHAR NOT NULL,           -- readable; empty for the whole route
    value DOUBLE,                      -- the estimate's, NULL with n where there is none
    low DOUBLE,                        -- one-sided bound
    high DOUBLE,                       -- one-sided bound
    n BIGINT,                          -- independent units used by the method
    method VARCHAR,                    -- of the interval
    alpha DOUBLE,                      -- one-sided level of each bound
    limit_value DOUBLE,                -- the rule's limit
    unit VARCHAR NOT NULL,             -- of value and limit
    why VARCHAR NOT NULL,              -- one sentence with number and limit
    needed BIGINT,                     -- further requests that would decide it
    counted BOOLEAN NOT NULL,          -- false for a rule in dry run
    examples VARCHAR[] NOT NULL        -- receipt ids of the worst cases
);

-- Decisions in the order they were taken; each row holds the hash of the one before.
CREATE TABLE decisions (
    run_id VARCHAR NOT NULL,           -- the run; one chain per run
    seq BIGINT NOT NULL,               -- 0, 1, 2 ... without gaps
    decided_at_ns BIGINT NOT NULL,     -- wall clock, ns since 1970-01-01 UTC
    stage VARCHAR NOT NULL,            -- stage in which it was decided
    route VARCHAR NOT NULL,            -- the route
    action VARCHAR NOT NULL,           -- promote, hold, fall_back or inconclusive
    reason VARCHAR NOT NULL,           -- one sentence
    k BIGINT,                          -- proposal length to run with
    scope VARCHAR NOT NULL,            -- loads, temperatures where less than the whole route
    findings VARCHAR NOT NULL,         -- JSON: the findings it rests on
    previous_hash VARCHAR NOT NULL,    -- hash of row seq - 1; empty for the first
    hash VARCHAR NOT NULL,             -- digest of this row with previous_hash
    PRIMARY KEY (run_id, seq)
);

-- Live routes as they turned themselves off and on; each row holds the hash of the one before.
CREATE TABLE transitions (
    rollout VARCHAR NOT NULL,          -- name of the rollout; one chain per route of it
    route VARCHAR NOT NULL,            -- the route
    seq BIGINT NOT NULL,               -- 0, 1, 2 ... without gaps
    run_id VARCHAR NOT NULL,           -- the run in which it was written; empty for none
    wall_ns BIGINT NOT NULL,           -- wall clock, ns since 1970-01-01 UTC
    at_ns BIGINT NOT NULL,             -- when it was due, on the clock of receipts
    from_state VARCHAR NOT NULL,       -- enabled, fell_back, probation or off
    to_state VARCHAR NOT NULL,         -- the same
    rule VARCHAR NOT NULL,             -- guardrail or rule of the live guard; reset, disabled ...
    cohort VARCHAR NOT NULL,           -- slice that failed; empty for the whole route
    value DOUBLE,                      -- the estimate's, NULL where none moved the route
    low DOUBLE,                        -- one-sided bound
    high DOUBLE,                       -- one-sided bound
    estimate_n BIGINT,                 -- independent units used by the method
    method VARCHAR,                    -- of the interval
    alpha DOUBLE,                      -- one-sided level of each bound; 0 where it is exact
    limit_value DOUBLE,                -- the rule's limit
    unit VARCHAR NOT NULL,             -- of value and limit
    window_s DOUBLE,                   -- how long the evidence had been collected
    n BIGINT NOT NULL,                 -- requests, scrapes or intervals it rests on
    share DOUBLE NOT NULL,             -- of eligible traffic that may speculate from now on
    fallbacks BIGINT NOT NULL,         -- within the period, this one included
    why VARCHAR NOT NULL,              -- one sentence
    who VARCHAR NOT NULL,              -- operator; empty where the guard decided
    settings VARCHAR NOT NULL,         -- digest of the settings that it was decided by
    previous_hash VARCHAR NOT NULL,    -- hash of row seq - 1; empty for the first
    hash VARCHAR NOT NULL,             -- digest of this row with previous_hash
    PRIMARY KEY (rollout, route, seq)
);

-- Results of stages; the last row of a stage stands, earlier ones stay.
CREATE TABLE stages (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order of writing within the run
    stage VARCHAR NOT NULL,            -- fixture, replay, shadow, canary or sweep
    ended_at_ns BIGINT NOT NULL,       -- wall clock, ns since 1970-01-01 UTC
    verdict VARCHAR NOT NULL,          -- pass, inconclusive, error or fail
    evidence VARCHAR NOT NULL,         -- JSON: fixture result, client health, divergences ...
    PRIMARY KEY (run_id, seq)
);

-- Server telemetry over time.
CREATE TABLE samples (
    run_id VARCHAR NOT NULL,           -- the run
    arm VARCHAR NOT NULL,              -- whose server
    at_ns BIGINT NOT NULL,             -- clock of receipts
    name VARCHAR NOT NULL,             -- series, as in /metrics
    labels VARCHAR NOT NULL,           -- JSON
    value DOUBLE NOT NULL,             -- as read
    PRIMARY KEY (run_id, arm, at_ns, name, labels)
);
"""

_TIMINGS = SCHEMA[SCHEMA.index("CREATE VIEW timings") : SCHEMA.index("-- Answers in full")]
_TRANSITIONS = SCHEMA[SCHEMA.index("CREATE TABLE transitions") : SCHEMA.index("-- Results of")]

MIGRATIONS: Mapping[int, str] = {
    4: f"""
ALTER TABLE receipts ADD COLUMN handover_at BIGINT;
ALTER TABLE receipts ADD COLUMN handover_from VARCHAR;
ALTER TABLE receipts ADD COLUMN handover_to VARCHAR;
ALTER TABLE receipts ADD COLUMN handover_kind VARCHAR;
ALTER TABLE receipts ADD COLUMN handover_reason VARCHAR;
DROP VIEW timings;
{_TIMINGS}
""",
    5: _TRANSITIONS,
}
"""Version -> what makes the next one of it; what was observed stays as it is."""

Format = Literal["csv", "parquet", "jsonl"]
Filter = str | int | bool | None | Sequence[str] | Sequence[int]


_TABLES = tuple(re.findall(r"CREATE TABLE (\w+)", SCHEMA))
_CLOCK_FIELDS = (
    *("scheduled_ns", "sent_ns", "first_token_ns", "first_content_ns", "last_token_ns", "done_ns"),
)
_TIMES = ("ttft_s", "e2e_s", "effective_s", "queue_age_s", "lag_s", "tpot_s")
_RECEIPT_FIELDS = tuple(field.name for field in fields(Receipt))
_COLUMNS = (*_RECEIPT_FIELDS, *_TIMES)


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as fixed before its first request."""

    run_id: str
    created_at_ns: int
    seed: int
    corpus_digest: str
    rules_digest: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a stage ended. `evidence` is plain JSON; non-finite numbers in it come back as None."""

    run_id: str
    stage: str
    ended_at_ns: int
    verdict: Verdict
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Anchor:
    """One process's clocks, read together, in ns; `boot` says since when the monotonic one counts.

    An empty boot is unknown and taken for the same one.
    """

    wall_ns: int
    clock_ns: int
    boot: str


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """A part of a stage that one process sent, once it had ended.

    `routes` are those whose requests went to the speculative arm, `completed` leaves warm-up out,
    `counters` holds per arm what its server counted meanwhile, or why that is not known.
    """

    stage: str
    label: str
    routes: tuple[str, ...]
    completed: int
    health: ClientHealth
    counters: Mapping[Arm, Counted | str]


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """A decision with its place in the run's hash chain."""

    run_id: str
    seq: int
    decided_at_ns: int
    decision: Decision
    previous_hash: str
    hash: str


class _OldStoreError(Exception):
    """A store that is opened to read and must be brought up to date first."""


@dataclass(frozen=True, slots=True)
class RecordedTransition:
    """A transition of a live route with its place in the route's hash chain."""

    rollout: str
    run_id: str
    wall_ns: int
    settings: str
    transition: Transition
    previous_hash: str
    hash: str


class Store:
    """An open store. Use as a context manager; safe to call from several threads.

    Every method raises StoreError where the file cannot be read or written any more.
    """

    def __init__(self, path: Path, connection: duckdb.DuckDBPyConnection) -> None:
        self.path = path
        self._connection = connection
        self._lock = threading.RLock()
        self._structures: dict[str, str] = {}
        self._shifts: dict[str, int] = {}
        """Run -> what this process adds to its clock: see `run_clock_ns`."""

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path, mode: Literal["write", "read"] = "write") -> Self:
        """Open a store; in mode write it is made where it does not exist.

        Raises:
            StoreError: held by another process, read-only, full, not a store, newer than this
                version, or (mode read) not there.
        """
        import duckdb

        where = Path(path)
        if mode == "read" and not where.exists():
            raise StoreError(f"{where}: no store there; run a stage first, or give its --out")
        with _plain_errors(where):
            connection = duckdb.connect(
                where,
                read_only=mode == "read",
                # One thread: the store works beside a load loop that must not be disturbed.
                config={"threads": 1, "autoinstall_known_extensions": False},
            )
        store = cls(where, connection)
        try:
            with _plain_errors(where):
                store._check_version(mode)
        except _OldStoreError:
            connection.close()
            cls.open(where, "write").close()  # brings it up to date
            return cls.open(where, mode)
        except BaseException:
            connection.close()
            raise
        return store

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open an existing store read-only.

        Raises:
            StoreError: as `open`.
        """
        return cls.open(path, "read")

    def close(self) -> None:
        """Give the file free for others. What was written is durable already."""
        with self._lock, _plain_errors(self.path):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_version(self, mode: Literal["write", "read"]) -> None:
        tables = {row[0] for row in self._connection.execute("SHOW TABLES").fetchall()}
        if not tables and mode == "write":
            self._connection.begin()
            self._connection.execute(SCHEMA)
            self._connection.execute("INSERT INTO store_version VALUES (?)", [STORE_VERSION])
            self._connection.commit()
            return
        if "store_version" not in tables:
            raise StoreError(f"{self.path}: a DuckDB file, but not a speccheck store; move it away")
        row = self._connection.execute("SELECT max(version) FROM store_version").fetchone()
        version = row[0] if row else None
        if version == STORE_VERSION:
            return
        steps = range(version or 0, STORE_VERSION)
        if not steps or any(step not in MIGRATIONS for step in steps):
            raise StoreError(
                f"{self.path}: store version {version}, this speccheck reads {STORE_VERSION}; "
                "use the speccheck that wrote it, or choose another --out"
            )
        if mode == "read":
            raise _OldStoreError(version)
        self._connection.begin()
        for step in steps:
            self._connection.execute(MIGRATIONS[step])
        self._connection.execute("UPDATE store_version SET version = ?", [STORE_VERSION])
        self._connection.commit()

    # --- runs and arms --------------------------------------------------------------------------

    def begin_run(self, run: Run, *, wall_ns: int, clock_ns: int, boot: str = "") -> None:
        """Register a run, or come back to it, and anchor this process's clock.

        Args:
            run: what the run is; when it exists already, digests, seed and config must agree.
            wall_ns: wall clock now, ns since 1970-01-01 UTC.
            clock_ns: the receipts' monotonic clock, read at the same moment.
            boot: since when that clock counts; after a restart of the machine it begins anew, and
                what this process writes is put on the clock of the run's first one.

        Raises:
            UsageError: where the run exists under the same id and anything but its creation time
                differs: rules and corpora may not change within a run.
        """
        with self._writing() as connection:
            known = self._run(run.run_id)
            if known is None:
                connection.execute(
                    "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        run.run_id,
                        run.created_at_ns,
                        run.seed,
                        run.corpus_digest,
                        run.rules_digest,
                        canonical_json(run.config),
                    ],
                )
            else:
                changed = [
                    name
                    for name in ("seed", "corpus_digest", "rules_digest", "config")
                    if canonical_json(getattr(known, name)) != canonical_json(getattr(run, name))
                ]
                if changed:
                    raise UsageError(
                        f"{self.path}: run {run.run_id} was begun with another "
                        f"{', '.join(changed)}; a change is a new run, so give it a new name"
                    )
            connection.execute(
                "INSERT INTO anchors VALUES (?, ?, ?, ?)", [run.run_id, wall_ns, clock_ns, boot]
            )
        self.resume_run(run.run_id, wall_ns=wall_ns, clock_ns=clock_ns, boot=boot)

    def resume_run(self, run_id: str, *, wall_ns: int, clock_ns: int, boot: str = "") -> None:
        """Go on in a run that this process has begun, in a store that was closed in between.

        Arguments as for `begin_run`, which does this too.
        """
        first = self.anchors(run_id)[0]
        self._shifts[run_id] = (
            0
            if first.boot in ("", boot) or not boot
            else (wall_ns - clock_ns) - (first.wall_ns - first.clock_ns)
        )

    def put_expiry(self, run_id: str, expires: str | int | None) -> None:
        """Until when the decisions of a run hold: the one thing in its rollout that may change.

        Raises:
            UsageError: there is no such run.
        """
        config = self.run(run_id).config
        changed = {**config, "rollout": {**config["rollout"], "expires": expires}}
        with self._writing() as connection:
            connection.execute(
                "UPDATE runs SET config = ? WHERE run_id = ?", [canonical_json(changed), run_id]
            )

    def run_clock_ns(self, run_id: str, clock_ns: int) -> int:
        """A time of this process on the clock of the run, which is that of its first process.

        They are one clock until the machine is started again; then the wall clock joins them.
        """
        return clock_ns + self._shifts.get(run_id, 0)

    def runs(self) -> list[Run]:
        """All runs, that which a process took up last last."""
        rows = self._rows(
            "SELECT * FROM runs ORDER BY coalesce((SELECT max(wall_ns) FROM anchors"
            " WHERE anchors.run_id = runs.run_id), created_at_ns), created_at_ns, run_id",
            [],
        )
        return [_run(row) for row in rows]

    def run(self, run_id: str) -> Run:
        """One run.

        Raises:
            UsageError: where there is none with that id.
        """
        found = self._run(run_id)
        if found is None:
            known = ", ".join(run.run_id for run in self.runs()) or "none"
            raise UsageError(f"{self.path}: no run {run_id}; there are: {known}")
        return found

    def _run(self, run_id: str) -> Run | None:
        rows = self._rows("SELECT * FROM runs WHERE run_id = ?", [run_id])
        return _run(rows[0]) if rows else None

    def anchors(self, run_id: str) -> list[Anchor]:
        """The clocks of each process that wrote to the run, in order."""
        rows = self._rows(
            "SELECT wall_ns, clock_ns, boot FROM anchors WHERE run_id = ? ORDER BY rowid", [run_id]
        )
        return [Anchor(*row) for row in rows]

    def put_arm(self, run_id: str, description: ArmDescription) -> None:
        """Record what an arm ran; the same description again changes nothing."""
        spec = description.speculative_config
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO arms VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    run_id,
                    description.arm,
                    description.engine_config_id,
                    description.url,
                    description.engine,
                    description.model,
                    None if spec is None else canonical_json(spec),
                    canonical_json(description.config),
                ],
            )

    def arms(self, run_id: str, stages: Sequence[str] | None = None) -> list[ArmDescription]:
        """What the arms ran, target-only last; more than one per arm where it was changed, and in
        a sweep, which has one speculative server per proposal length.

        With `stages`, only those that have receipts in one of them.
        """
        rows = self._rows(
            "SELECT arm, url, engine, model, speculative_config, config FROM arms "
            "WHERE run_id = $1 AND ($2::VARCHAR[] IS NULL OR engine_config_id IN (SELECT "
            "engine_config_id FROM receipts WHERE run_id = $1 AND stage IN (SELECT unnest($2)))) "
            "ORDER BY arm, rowid",
            [run_id, None if stages is None else list(stages)],
        )
        return [_arm(row) for row in rows]

    # --- receipts -------------------------------------------------------------------------------

    def append_receipts(self, batch: Sequence[tuple[Receipt, Answer | None]]) -> int:
        """Write receipts, and answers where given, in one transaction; how many were new.

        A receipt whose id is there already is left as it is. When this returns, the batch
        survives a crash of this process.
        """
        if not batch:
            return 0
        first: dict[str, Receipt] = {}
        for receipt, _ in batch:
            first.setdefault(receipt.receipt_id, receipt)
        answers = [
            asdict(a) | {"details": None if a.details is None else canonical_json(a.details)}
            for _, a in batch
            if a is not None
        ]
        with self._writing():
            known = self._rows(
                "SELECT receipt_id FROM receipts WHERE receipt_id IN (SELECT unnest(?::VARCHAR[]))",
                [list(first)],
            )
            # Known ones are taken out here: DuckDB's OR IGNORE loses the order of the rows.
            for (receipt_id,) in known:
                del first[receipt_id]
            receipts = [_receipt_row(r, self._shifts.get(r.run_id, 0)) for r in first.values()]
            if receipts:
                self._insert("receipts", receipts, on_known="ABORT")
            if answers:
                self._insert("texts", answers)
        return len(receipts)

    def done_keys(self, run_id: str, stage: str, phase: str | None = None) -> set[str]:
        """Receipt ids already written: what a resumed plan need not send again."""
        where, values = _where({"run_id": run_id, "stage": stage}, _RECEIPT_FIELDS)
        if phase is not None:
            where, values = f"{where} AND phase = ?", [*values, phase]
        return {row[0] for row in self._rows(f"SELECT receipt_id FROM receipts{where}", values)}

    def receipts(self, run_id: str, **filters: Filter) -> list[Receipt]:
        """Receipts of a run in the order they were scheduled.

        `filters` are column=value; a sequence means any of, None means missing.

        Raises:
            UsageError: for a name that is no column.
        """
        where, values = _where({"run_id": run_id, **filters}, _RECEIPT_FIELDS)
        rows = self._rows(
            f"SELECT {', '.join(_RECEIPT_FIELDS)} FROM receipts{where} "
            "ORDER BY scheduled_ns, receipt_id",
            values,
        )
        return [_receipt(row) for row in rows]

    def arrived(self, run_id: str, **filters: Filter) -> list[Receipt]:
        """Receipts of a run in the order in which they came in, however many processes wrote them.

        Filters as for `receipts`.

        Raises:
            UsageError: for a name that is no column.
        """
        where, values = _where({"run_id": run_id, **filters}, _RECEIPT_FIELDS)
        names = ", ".join(_RECEIPT_FIELDS)
        rows = self._rows(f"SELECT {names} FROM receipts{where} ORDER BY rowid", values)
        return [_receipt(row) for row in rows]

    def arrived_after(
        self, run_id: str, place: int, stages: Sequence[str]
    ) -> tuple[list[Receipt], int]:
        """Receipts of a run that came in after a place, in that order, and the place of the last.

        Places grow from 0 with each receipt of the store; -1 is before all.
        """
        names = ", ".join(_RECEIPT_FIELDS)
        rows = self._rows(
            f"SELECT rowid, {names} FROM receipts WHERE run_id = ? AND rowid > ? "
            "AND stage IN (SELECT unnest(?::VARCHAR[])) ORDER BY rowid",
            [run_id, place, list(stages)],
        )
        return [_receipt(row[1:]) for row in rows], rows[-1][0] if rows else place

    def columns(
        self, run_id: str, names: Sequence[str], **filters: Filter
    ) -> dict[str, NDArray[Any]]:
        """Columns of a run's receipts as arrays of one length, in the order they were scheduled.

        `names` are receipt columns or the times of the view `timings` (ttft_s, tpot_s, e2e_s,
        effective_s, queue_age_s, lag_s), in seconds. Numbers come as float64 with NaN where
        missing, truths as bool, texts as objects with None where missing.

        Raises:
            UsageError: for a name that is no column.
        """
        _known(names, _COLUMNS)
        where, values = _where({"run_id": run_id, **filters}, _COLUMNS)
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT {', '.join(names)} FROM timings{where} ORDER BY scheduled_ns, receipt_id",
                values,
            ).fetchnumpy()
        return {name: _plain_array(found[name]) for name in names}

    def answers(self, receipt_ids: Iterable[str]) -> dict[str, Answer]:
        """Answers in full, by receipt id; ids without one are left out."""
        wanted = list(receipt_ids)
        rows = self._rows(
            "SELECT receipt_id, text, token_ids, accepted_per_step, drafted_per_step, details "
            "FROM texts "
            "WHERE receipt_id IN (SELECT unnest(?::VARCHAR[]))",
            [wanted],
        )
        return {
            row[0]: Answer(
                receipt_id=row[0],
                text=row[1],
                token_ids=_tuple(row[2]),
                accepted_per_step=_tuple(row[3]),
                drafted_per_step=_tuple(row[4]),
                details=None if row[5] is None else json.loads(row[5]),
            )
            for row in rows
        }

    # --- judgement ------------------------------------------------------------------------------

    def put_measurements(
        self, run_id: str, stage: str, measurements: Sequence[Measurement]
    ) -> None:
        """Replace the measurements of a stage."""
        rows = [
            [
                run_id,
                stage,
                i,
                m.stage,
                m.metric,
                m.route,
                m.cohort,
                *_estimate_row(m.estimate),
                m.note,
                list(m.examples),
            ]
            for i, m in enumerate(measurements)
        ]
        self._replace("measurements", run_id, stage, rows)

    def measurements(self, run_id: str, stage: str | None = None) -> list[Measurement]:
        """Measurements of a run, or of one stage of it, in the order they were put."""
        return [
            Measurement(
                stage=row[3],
                metric=row[4],
                route=row[5],
                cohort=row[6],
                estimate=_estimate(row[7:13]),
                note=row[13],
                examples=tuple(row[14]),
            )
            for row in self._derived("measurements", run_id, stage)
        ]

    def put_preferences(
        self, run_id: str, given: Sequence[Preference], *, given_at_ns: int
    ) -> None:
        """Add what was preferred; the last verdict of one source and person on a pair stands."""
        with self._writing() as connection:
            ((seq,),) = self._rows("SELECT count(*) FROM preferences WHERE run_id = ?", [run_id])
            for i, p in enumerate(given):
                connection.execute(
                    "INSERT INTO preferences VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [run_id, seq + i, given_at_ns, p.source, p.who, p.pair_id, p.verdict, p.note],
                )

    def preferences(self, run_id: str) -> list[Preference]:
        """What stands, in the order it was given."""
        rows = self._rows(
            "SELECT source, who, pair_id, verdict, note FROM preferences WHERE run_id = ? "
            "ORDER BY seq",
            [run_id],
        )
        return list({row[:3]: Preference(*row) for row in rows}.values())

    def put_findings(self, run_id: str, stage: str, findings: Sequence[Finding]) -> None:
        """Replace the findings of a stage."""
        rows = [
            [
                run_id,
                stage,
                i,
                f.stage,
                f.rule,
                f.verdict.word,
                f.route,
                f.cohort,
                *_estimate_row(f.estimate),
                f.limit,
                f.unit,
                f.why,
                f.needed,
                f.counted,
                list(f.examples),
            ]
            for i, f in enumerate(findings)
        ]
        self._replace("findings", run_id, stage, rows)

    def findings(self, run_id: str, stage: str | None = None) -> list[Finding]:
        """Findings of a run, or of one stage of it, in the order they were put."""
        return [
            Finding(
                stage=row[3],
                rule=row[4],
                verdict=Verdict[row[5].upper()],
                route=row[6],
                cohort=row[7],
                estimate=_estimate(row[8:14]),
                limit=row[14],
                unit=row[15],
                why=row[16],
                needed=row[17],
                counted=row[18],
                examples=tuple(row[19]),
            )
            for row in self._derived("findings", run_id, stage)
        ]

    def append_decision(self, run_id: str, decision: Decision, *, decided_at_ns: int) -> str:
        """Add a decision to the run's chain; returns its hash. `decided_at_ns` is wall clock."""
        with self._writing() as connection:
            last = self._rows(
                "SELECT seq, hash FROM decisions WHERE run_id = ? ORDER BY seq DESC LIMIT 1",
                [run_id],
            )
            seq, previous = (last[0][0] + 1, last[0][1]) if last else (0, "")
            row = [
                run_id,
                seq,
                decided_at_ns,
                decision.stage,
                decision.route,
                str(decision.action),
                decision.reason,
                decision.k,
                decision.scope,
                canonical_json([_finding_json(finding) for finding in decision.findings]),
                previous,
            ]
            hashed = digest("decision", row)
            connection.execute(
                "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [*row, hashed]
            )
        return hashed

    def decisions(self, run_id: str, route: str | None = None) -> list[RecordedDecision]:
        """Decisions of a run, or of one route of it, in the order they were taken."""
        rows = self._rows("SELECT * FROM decisions WHERE run_id = ? ORDER BY seq", [run_id])
        return [_decision(row) for row in rows if route is None or row[4] == route]

    def append_transition(
        self, rollout: str, moved: Transition, *, run_id: str, wall_ns: int, settings: str
    ) -> str:
        """Add a transition to the chain of its route; returns its hash.

        Args:
            rollout: name of the rollout; a route stays off in whatever run of it.
            moved: what happened, next in order to the last one kept, on the clock of this process.
            run_id: the run in which it is written, empty for none.
            wall_ns: wall clock of `moved.at_ns`.
            settings: digest of the settings that it was decided by.

        Raises:
            StoreError: it does not follow the last one: somebody else moved the route.
        """
        with self._writing() as connection:
            last = self._rows(
                "SELECT seq, hash FROM transitions WHERE rollout = ? AND route = ? "
                "ORDER BY seq DESC LIMIT 1",
                [rollout, moved.route],
            )
            seq, previous = (last[0][0] + 1, last[0][1]) if last else (0, "")
            if seq != moved.seq:
                raise StoreError(
                    f"{self.path}: route {moved.route} was moved by another process meanwhile "
                    f"(transition {moved.seq} does not follow {seq - 1}); start this one again"
                )
            row = [
                rollout,
                moved.route,
                seq,
                run_id,
                wall_ns,
                self.run_clock_ns(run_id, moved.at_ns),
                str(moved.before),
                str(moved.after),
                moved.rule,
                moved.cohort,
                *_estimate_row(moved.estimate),
                moved.limit,
                moved.unit,
                moved.window_s,
                moved.n,
                moved.share,
                moved.fallbacks,
                moved.why,
                moved.who,
                settings,
                previous,
            ]
            hashed = digest("transition", [_in_words(value) for value in row])
            marks = ", ".join("?" * (len(row) + 1))
            connection.execute(f"INSERT INTO transitions VALUES ({marks})", [*row, hashed])
        return hashed

    def transitions(self, rollout: str, route: str | None = None) -> list[RecordedTransition]:
        """Transitions of the live routes of a rollout, or of one, each route's in order."""
        rows = self._rows(
            "SELECT * FROM transitions WHERE rollout = ? AND route = coalesce(?, route) "
            "ORDER BY route, seq",
            [rollout, route],
        )
        return [_transition(row) for row in rows]

    def put_stage(self, result: StageResult) -> None:
        """Record how a stage ended; it stands until the stage is put again."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO stages SELECT ?, count(*), ?, ?, ?, ? FROM stages WHERE run_id = ?",
                [
                    result.run_id,
                    result.stage,
                    result.ended_at_ns,
                    result.verdict.word,
                    canonical_json(_finite(result.evidence)),
                    result.run_id,
                ],
            )

    def get_stage(self, run_id: str, stage: str) -> StageResult | None:
        """The last result of a stage, or None where it has not ended."""
        rows = self._rows(
            "SELECT ended_at_ns, verdict, evidence FROM stages WHERE run_id = ? AND stage = ? "
            "ORDER BY seq DESC LIMIT 1",
            [run_id, stage],
        )
        if not rows:
            return None
        ended_at_ns, verdict, evidence = rows[0]
        return StageResult(
            run_id, stage, ended_at_ns, Verdict[verdict.upper()], json.loads(evidence)
        )

    # --- telemetry ------------------------------------------------------------------------------

    def append_drive(self, run_id: str, drive: DriveRecord) -> None:
        """Keep how a drive went. One that did not end (a killed process) has no row."""
        counters = {
            arm: one if isinstance(one, str) else asdict(one) for arm, one in drive.counters.items()
        }
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO drives SELECT ?, count(*), ?, ?, ?, ?, ?, ? FROM drives "
                "WHERE run_id = ?",
                [
                    run_id,
                    drive.stage,
                    drive.label,
                    list(drive.routes),
                    drive.completed,
                    canonical_json(_finite(asdict(drive.health))),
                    canonical_json(counters),
                    run_id,
                ],
            )

    def drives(self, run_id: str, stage: str) -> list[DriveRecord]:
        """The drives of a stage that ended, in order, of every process that sent for it."""
        rows = self._rows(
            "SELECT stage, label, routes, completed, health, counters FROM drives "
            "WHERE run_id = ? AND stage = ? ORDER BY seq",
            [run_id, stage],
        )
        return [_drive(row) for row in rows]

    def append_samples(self, run_id: str, arm: Arm, snapshots: Sequence[Snapshot]) -> None:
        """Keep scrapes of an arm's server. NaN samples are left out, as absent."""
        rows = [
            {
                "run_id": run_id,
                "arm": arm,
                "at_ns": self.run_clock_ns(run_id, snapshot.taken_ns),
                "name": name,
                "labels": canonical_json(dict(labels)),
                "value": value,
            }
            for snapshot in snapshots
            for (name, labels), value in snapshot.samples.items()
            if np.isfinite(value)
        ]
        if rows:
            with self._writing():
                self._insert("samples", rows)

    def snapshots(self, run_id: str, arm: Arm) -> list[Snapshot]:
        """The kept scrapes of an arm, in order of time."""
        rows = self._rows(
            "SELECT at_ns, name, labels, value FROM samples WHERE run_id = ? AND arm = ? "
            "ORDER BY at_ns, rowid",
            [run_id, arm],
        )
        by_time: dict[int, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for at_ns, name, labels, value in rows:
            series = (name, tuple(sorted(json.loads(labels).items())))
            by_time.setdefault(at_ns, {})[series] = value
        return [Snapshot(at_ns, samples) for at_ns, samples in by_time.items()]

    # --- checking and export --------------------------------------------------------------------

    def verify(self) -> list[str]:
        """Derive every identity again and check every invariant; one line per breach, or none."""
        problems = [
            f"receipt {row[0]}: its key says {wanted}"
            for row in self._rows(
                "SELECT receipt_id, run_id, stage, phase, arm, prompt_id, repeat, attempt "
                "FROM receipts ORDER BY receipt_id",
                [],
            )
            # The same values, in the same order, as `records.receipt_key`.
            if (wanted := digest("receipt", list(row[1:]))) != row[0]
        ]
        for text, sql in _INVARIANTS:
            problems += [f"{row[0]}: {text}" for row in self._rows(sql, [])]
        for run_id, config_id, *rest in self._rows(
            "SELECT run_id, engine_config_id, arm, url, engine, model, speculative_config, config "
            "FROM arms ORDER BY ALL",
            [],
        ):
            if _arm(rest).engine_config_id != config_id:
                problems.append(f"run {run_id}, arm {rest[0]}: {config_id} is not its digest")
        for receipt_id, wanted, token_ids, details in self._rows(
            "SELECT t.receipt_id, r.output_digest, t.token_ids, t.details FROM texts t "
            "JOIN receipts r USING (receipt_id) WHERE t.token_ids IS NOT NULL ORDER BY ALL",
            [],
        ):
            # As `client.output_digest`: of all choices where there are several.
            others = [] if details is None else json.loads(details).get("choices") or []
            every = [token_ids, *(choice["token_ids"] or [] for choice in others)]
            if digest("output", every if others else token_ids) != wanted:
                problems.append(f"receipt {receipt_id}: its kept tokens are not the digest's")
        problems += self._broken_chains()
        return problems

    def export(
        self, path: str | Path, fmt: Format, *, table: str = "receipts", **filters: Filter
    ) -> int:
        """Write a table (or the view `timings`) to a file; how many rows. Replaces the file.

        Raises:
            UsageError: for an unknown table, format or column.
        """
        if table not in (*_TABLES, "timings"):
            raise UsageError(f"no table {table}; there are: {', '.join((*_TABLES, 'timings'))}")
        options = {
            "csv": "FORMAT csv, HEADER",
            "parquet": "FORMAT parquet",
            "jsonl": "FORMAT json, ARRAY false",
        }
        if fmt not in options:
            raise UsageError(f"no format {fmt}; there are: {', '.join(options)}")
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        with self._reading() as connection, _plain_errors(target):
            described = connection.execute(f"DESCRIBE {table}").fetchall()
            columns = [row[0] for row in described]
            where, values = _where(filters, columns)
            order = "scheduled_ns, receipt_id" if "scheduled_ns" in columns else "ALL"
            try:
                # COPY takes no parameters, a temporary table does.
                connection.execute(
                    f"CREATE OR REPLACE TEMP TABLE exported AS "
                    f"SELECT * FROM {table}{where} ORDER BY {order}",
                    values,
                )
                name = str(partial).replace("'", "''")
                connection.execute(f"COPY exported TO '{name}' ({options[fmt]})")
                row = connection.execute("SELECT count(*) FROM exported").fetchone()
                connection.execute("DROP TABLE exported")
                os.replace(partial, target)  # noqa: PTH105 -- one call, whole or not at all
            finally:
                partial.unlink(missing_ok=True)
        return int(row[0]) if row else 0

    # --- parts ----------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._lock, _plain_errors(self.path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """One transaction: all of it, or nothing."""
        import duckdb

        with self._lock, _plain_errors(self.path):
            self._connection.begin()
            try:
                yield self._connection
                self._connection.commit()
            except BaseException:
                # A failed commit has ended the transaction already; the first error counts.
                with suppress(duckdb.Error):
                    self._connection.rollback()
                raise

    def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._reading() as connection:
            return connection.execute(sql, values).fetchall()

    def _insert(
        self,
        table: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        on_known: Literal["IGNORE", "ABORT"] = "IGNORE",
    ) -> None:
        """Add rows, those whose key is not there. Types come from SCHEMA, strictly.

        With ABORT a known key is an error, and rows keep their order.
        """
        if table not in self._structures:
            described = self._connection.execute(f"DESCRIBE {table}").fetchall()
            shape = {
                name: [kind.removesuffix("[]")] if kind.endswith("[]") else kind
                for name, kind, *_ in described
            }
            self._structures[table] = json.dumps([shape])
        rows_json = json.dumps(rows, ensure_ascii=False, allow_nan=False)
        verb = "INSERT OR IGNORE" if on_known == "IGNORE" else "INSERT"
        self._connection.execute(
            # Two steps: unnesting list and struct at once parses the text once per column.
            f"{verb} INTO {table} BY NAME SELECT unnest(item) FROM (SELECT unnest("
            f"from_json_strict(?, '{self._structures[table]}')) AS item)",
            [rows_json],
        )

    def _replace(self, table: str, run_id: str, stage: str, rows: list[list[Any]]) -> None:
        with self._writing() as connection:
            connection.execute(
                f"DELETE FROM {table} WHERE run_id = ? AND put_by = ?", [run_id, stage]
            )
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)

    def _derived(self, table: str, run_id: str, stage: str | None) -> list[tuple[Any, ...]]:
        return self._rows(
            f"SELECT * FROM {table} WHERE run_id = ? AND put_by = coalesce(?, put_by) "
            "ORDER BY put_by, seq",
            [run_id, stage],
        )

    def _broken_chains(self) -> list[str]:
        problems: list[str] = []
        for kind, owners in (("decision", ("run_id",)), ("transition", ("rollout", "route"))):
            expected: dict[tuple[str, ...], tuple[int, str]] = {}
            order = ", ".join((*owners, "seq"))
            for *row, hashed in self._rows(f"SELECT * FROM {kind}s ORDER BY {order}", []):
                owner, seq, previous = tuple(row[: len(owners)]), row[len(owners)], row[-1]
                name = f"{'run' if kind == 'decision' else 'route'} {'/'.join(owner)}"
                if (seq, previous) != expected.get(owner, (0, "")):
                    problems.append(f"{name}, {kind} {seq}: does not follow the one before")
                if digest(kind, [_in_words(value) for value in row]) != hashed:
                    problems.append(f"{name}, {kind} {seq}: was changed after it was taken")
                expected[owner] = (seq + 1, hashed)
        return problems


def read_receipts(path: str | Path) -> list[Receipt]:
    """Receipts of a file that `Store.export` wrote (.parquet, .jsonl, .csv), by time.

    Raises:
        UsageError: no such file, another ending, or not receipts.
    """
    import duckdb

    where = Path(path)
    readers = {
        ".parquet": "read_parquet(?)",
        ".jsonl": "read_json(?, format='newline_delimited')",
        ".csv": "read_csv(?, all_varchar=true, allow_quoted_nulls=false)",
    }
    reader = readers.get(where.suffix.lower())
    if reader is None:
        raise UsageError(f"{where}: name a .parquet, .jsonl or .csv file of receipts")
    if not where.is_file():
        raise UsageError(f"{where}: no such file; `speccheck receipts export` writes one")
    with duckdb.connect(":memory:", config={"autoinstall_known_extensions": False}) as connection:
        connection.execute(SCHEMA)
        try:
            connection.execute(f"INSERT INTO receipts BY NAME SELECT * FROM {reader}", [str(where)])
        except duckdb.Error as error:
            raise UsageError(f"{where}: not receipts: {_first_line(str(error))}") from error
        rows = connection.execute(
            f"SELECT {', '.join(_RECEIPT_FIELDS)} FROM receipts ORDER BY scheduled_ns, receipt_id"
        ).fetchall()
    return [_receipt(row) for row in rows]


_INVARIANTS = (
    (
        "run is not in table runs",
        (
            "SELECT DISTINCT run_id FROM receipts WHERE run_id NOT IN (SELECT run_id FROM runs) "
            "ORDER BY ALL"
        ),
    ),
    (
        "engine_config_id is not in table arms",
        (
            "SELECT receipt_id FROM receipts ANTI JOIN arms USING (run_id, arm, engine_config_id) "
            "ORDER BY ALL"
        ),
    ),
    (
        "text without a receipt",
        "SELECT receipt_id FROM texts ANTI JOIN receipts USING (receipt_id) ORDER BY ALL",
    ),
    (
        "times out of order",
        (
            "SELECT receipt_id FROM receipts WHERE first_token_ns < sent_ns "
            "OR last_token_ns < first_token_ns OR done_ns < last_token_ns OR done_ns < sent_ns "
            "ORDER BY ALL"
        ),
    ),
    (
        "discarded is not proposed less accepted",
        (
            "SELECT receipt_id FROM receipts "
            "WHERE discarded_tokens IS DISTINCT FROM proposed_tokens - accepted_tokens ORDER BY ALL"
        ),
    ),
    (
        "counts without a source",
        (
            "SELECT receipt_id FROM receipts "
            "WHERE counts_source = 'none' AND proposed_tokens IS NOT NULL ORDER BY ALL"
        ),
    ),
    (
        "a negative count",
        (
            "SELECT receipt_id FROM receipts WHERE least(prompt_tokens, cached_tokens, "
            "completion_tokens, reasoning_tokens, proposed_tokens, accepted_tokens, target_passes, "
            "verify_steps) < 0 ORDER BY ALL"
        ),
    ),
)
"""What must hold for every row: the breach in words, and the query that finds it.

That the engine's own numbers add up is not among them: where they do not, the receipt says so in
its warnings, and is evidence as it stands.
"""


# --- rows and records ---------------------------------------------------------------------------


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _receipt_row(receipt: Receipt, shift_ns: int) -> dict[str, Any]:
    row = {name: getattr(receipt, name) for name in _RECEIPT_FIELDS}
    if shift_ns:
        row |= {name: row[name] + shift_ns for name in _CLOCK_FIELDS if row[name] is not None}
    return row


_HISTOGRAM = _RECEIPT_FIELDS.index("acceptance_histogram")
_WARNINGS = _RECEIPT_FIELDS.index("warnings")


def _receipt(row: tuple[Any, ...]) -> Receipt:
    values = list(row)
    values[_HISTOGRAM] = None if row[_HISTOGRAM] is None else tuple(row[_HISTOGRAM])
    values[_WARNINGS] = tuple(row[_WARNINGS])
    return Receipt(*values)


def _run(row: tuple[Any, ...]) -> Run:
    run_id, created_at_ns, seed, corpus_digest, rules_digest, config = row
    return Run(run_id, created_at_ns, seed, corpus_digest, rules_digest, json.loads(config))


def _arm(row: Sequence[Any]) -> ArmDescription:
    arm, url, engine, model, spec, config = row
    return ArmDescription(
        arm=Arm(arm),
        url=url,
        engine=engine,
        model=model,
        speculative_config=None if spec is None else json.loads(spec),
        config=json.loads(config),
    )


def _estimate_row(estimate: Estimate | None) -> list[Any]:
    if estimate is None:
        return [None] * 6
    return [
        estimate.value,
        estimate.low,
        estimate.high,
        estimate.n,
        estimate.method,
        estimate.alpha,
    ]


def _estimate(row: Sequence[Any]) -> Estimate | None:
    return None if row[3] is None else Estimate(*row)


def _finding_json(finding: Finding) -> dict[str, Any]:
    """A finding as JSON that keeps infinities and NaN, as the words Python reads back."""
    estimate = _estimate_row(finding.estimate)
    return {
        **{f.name: getattr(finding, f.name) for f in fields(Finding)},
        "verdict": finding.verdict.word,
        "estimate": None if finding.estimate is None else [_in_words(v) for v in estimate],
        "limit": _in_words(finding.limit),
    }


def _finding(value: Mapping[str, Any]) -> Finding:
    estimate, limit = value["estimate"], value["limit"]
    if estimate is not None:
        number, low, high, n, method, alpha = estimate
        estimate = Estimate(float(number), float(low), float(high), n, method, float(alpha))
    return Finding(
        **{
            **value,
            "verdict": Verdict[value["verdict"].upper()],
            "estimate": estimate,
            "limit": None if limit is None else float(limit),
            "examples": tuple(value["examples"]),
        }
    )


def _in_words(value: Any) -> Any:
    is_odd = isinstance(value, float) and not np.isfinite(value)
    return str(value) if is_odd else value


def _drive(row: tuple[Any, ...]) -> DriveRecord:
    stage, label, routes, completed, health, counters = row
    seen: dict[str, Any] = {
        name: math.nan if x is None else x for name, x in json.loads(health).items()
    }
    return DriveRecord(
        stage=stage,
        label=label,
        routes=tuple(routes),
        completed=completed,
        health=ClientHealth(**seen | {"reasons": tuple(seen["reasons"])}),
        counters={
            Arm(arm): one if isinstance(one, str) else _counted(one)
            for arm, one in json.loads(counters).items()
        },
    )


def _counted(value: Mapping[str, Any]) -> Counted:
    positions = value["accepted_per_position"]
    return Counted(
        **{
            **value,
            "accepted_per_position": None if positions is None else tuple(positions),
            "resets": tuple(value["resets"]),
            "waiting": None if (queue := value.get("waiting")) is None else tuple(queue),
        }
    )


def _decision(row: tuple[Any, ...]) -> RecordedDecision:
    run_id, seq, decided_at_ns, stage, route, action, reason, k, scope, findings = row[:10]
    return RecordedDecision(
        run_id=run_id,
        seq=seq,
        decided_at_ns=decided_at_ns,
        decision=Decision(
            route=route,
            action=Action(action),
            stage=stage,
            reason=reason,
            findings=tuple(_finding(value) for value in json.loads(findings)),
            k=k,
            scope=scope,
        ),
        previous_hash=row[10],
        hash=row[11],
    )


def _transition(row: tuple[Any, ...]) -> RecordedTransition:
    rollout, route, seq, run_id, wall_ns, at_ns, before, after, rule, cohort = row[:10]
    limit, unit, window_s, n, share, fallbacks, why, who, settings, previous, hashed = row[16:]
    return RecordedTransition(
        rollout=rollout,
        run_id=run_id,
        wall_ns=wall_ns,
        settings=settings,
        transition=Transition(
            route=route,
            seq=seq,
            at_ns=at_ns,
            before=RouteState(before),
            after=RouteState(after),
            rule=rule,
            cohort=cohort,
            estimate=None if row[13] is None else Estimate(*row[10:16]),
            limit=limit,
            unit=unit,
            window_s=window_s,
            n=n,
            share=share,
            fallbacks=fallbacks,
            why=why,
            who=who,
        ),
        previous_hash=previous,
        hash=hashed,
    )


def _finite(value: Any) -> Any:
    """Evidence as JSON has it: non-finite numbers as None, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _plain_array(found: Any) -> NDArray[Any]:
    """Without masks: numbers as float64 with NaN, the rest as objects with None."""
    array = np.ma.asarray(found)
    if array.dtype.kind in "iuf":
        return np.ma.filled(array.astype(np.float64), np.nan)
    if array.dtype.kind == "b" and not np.ma.is_masked(array):
        return np.asarray(array)
    plain: NDArray[Any] = np.asarray(array.data, dtype=object).copy()
    plain[np.ma.getmaskarray(array)] = None
    return plain


# --- SQL parts ----------------------------------------------------------------------------------


def _known(names: Iterable[str], columns: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(columns))
    if unknown:
        raise UsageError(f"no column {', '.join(unknown)}; there are: {', '.join(columns)}")


def _where(filters: Mapping[str, Filter], columns: Sequence[str]) -> tuple[str, list[Any]]:
    """A WHERE clause with parameters; names are checked, since they go into the text."""
    _known(filters, columns)
    clauses: list[str] = []
    values: list[Any] = []
    for name, value in filters.items():
        if value is None:
            clauses.append(f"{name} IS NULL")
        elif isinstance(value, (str, int)):
            clauses.append(f"{name} = ?")
            values.append(value)
        elif len(value) == 0:
            clauses.append("false")
        else:
            clauses.append(f"{name} IN ({', '.join('?' * len(value))})")
            values += list(value)
    return (f" WHERE {' AND '.join(clauses)}" if clauses else ""), values


# --- errors -------------------------------------------------------------------------------------


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Turn what DuckDB and the file system say into one line: what, where, what next."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        known = _explain(str(error))
        if known is None and isinstance(error, duckdb.ProgrammingError):
            raise  # wrong SQL is a bug of ours and keeps its traceback
        kind = StoreHeldError if re.search(_HELD, str(error), re.IGNORECASE) else StoreError
        raise kind(f"{path}: {known or _first_line(str(error))}") from error
    except OSError as error:
        known = _explain(f"{error.strerror}: {error}")
        raise StoreError(f"{path}: {known or error.strerror}") from error


def _explain(message: str) -> str | None:
    """What to tell the user instead, where the cause is known."""
    for pattern, text in _CAUSES:
        if found := re.search(pattern, message, re.IGNORECASE):
            return text.format(*found.groups(), first=_first_line(message))
    return None


def _first_line(message: str) -> str:
    return " ".join(message.split("\n", 1)[0].split())


_HELD = r"conflicting lock is held in .*\(PID (\d+)\)"

_CAUSES = (
    (
        _HELD,
        (
            "held by process {0} (a run or gateway that is still going); "
            "wait until it ends, or choose another --out"
        ),
    ),
    (
        r"could not set lock|different configuration than existing|already (?:attached|open)",
        (
            "held by another process or by another part of this one; "
            "wait until it ends, or choose another --out"
        ),
    ),
    (
        (
            rf"no space left|{re.escape(os.strerror(errno.ENOSPC))}|disk quota"
            rf"|{re.escape(os.strerror(errno.EFBIG))}|out of disk|could not write all bytes"
        ),
        (
            "the disk is full (or a file size limit is reached); what was acknowledged before is "
            "kept: make room and run the same command to resume"
        ),
    ),
    (
        r"not a valid DuckDB database",
        "not a DuckDB file; choose another --out",
    ),
    (
        r"permission denied|read-only file system",
        "no permission to write here ({first}); choose an --out folder of yours",
    ),
    (
        r"is a directory",
        "a folder, not a store; give the path of a file, such as receipts.duckdb",
    ),
    (
        r"no such file or directory",
        "its folder does not exist; make it, or choose another --out",
    ),
    (
        r"storage version|newer version of duckdb|serialization",
        "written by another DuckDB version ({first}); use the speccheck that wrote it",
    ),
    (
        r"attached in read-only mode",
        "opened to read only, so nothing can be written",
    ),
)
"""Patterns in DuckDB's and the system's messages, and what to tell the user instead."""
