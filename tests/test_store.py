"""The store: what goes in comes out again, and survives."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import threading
import typing
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speccheck import client, results
from speccheck import store as store_module
from speccheck.errors import StoreError, UsageError
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
    Outcome,
    Receipt,
    RouteState,
    Transition,
    Verdict,
    digest,
)
from speccheck.store import SCHEMA, STORE_VERSION, Anchor, DriveRecord, Run, StageResult, Store
from speccheck.telemetry import Counted, Snapshot

HERE = Path(__file__).parent
RUN = Run("run-1", 1_000, 7, "corpus:a", "rules:b", {"stages": ["replay"], "k": 4})
ARM = ArmDescription(Arm.SPECULATIVE, "http://s", "scripted 1", "target", {"k": 4}, {"argv": ["a"]})


def receipt(n: int = 0, **changes) -> Receipt:
    """A plausible receipt, with its key derived by hand from what it says."""
    values: dict[str, typing.Any] = {
        "run_id": "run-1",
        "stage": "replay",
        "phase": "greedy",
        "arm": "speculative",
        "route": "chat",
        "prompt_id": f"p{n}",
        "pair_id": f"greedy:p{n}:0",
        "repeat": 0,
        "attempt": 0,
        "block": 0,
        "warm_up": False,
        "mirror": False,
        "target_model": "target",
        "proposer": "draft",
        "algorithm": "standard",
        "draft_sampling": None,
        "k": 4,
        "engine": "scripted 1",
        "engine_config_id": ARM.engine_config_id,
        "policy_version": "policy:1",
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_count": 0,
        "response_format": None,
        "logprobs": None,
        "task": "qa",
        "language": "en",
        "priority": "normal",
        "prompt_band": "<64",
        "output_band": "short",
        "temperature_band": "greedy",
        "features": "",
        "concurrency": 1,
        "prompt_tokens": 10,
        "cached_tokens": None,
        "completion_tokens": 3,
        "reasoning_tokens": None,
        "proposed_tokens": 8,
        "accepted_tokens": 1,
        "discarded_tokens": 7,
        "target_passes": 2,
        "verify_steps": 2,
        "acceptance_histogram": (1, 1, 0, 0, 0),
        "counts_source": "engine",
        "counts_note": "",
        "scheduled_ns": 1_000 + n,
        "sent_ns": 2_000,
        "first_token_ns": 1_000_000_000_000_000_123,
        "first_content_ns": None,
        "last_token_ns": 1_000_000_000_000_000_323,
        "done_ns": 1_000_000_000_000_000_423,
        "server_queue_ms": 0.25,
        "max_chunk_gap_ns": 100,
        "chunks": 2,
        "outcome": "ok",
        "http_status": 200,
        "error_class": None,
        "error_message": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "decision": "speculate",
        "decision_reason": "",
        "output_digest": digest("output", [1, 2, 3]),
        "warnings": (),
    }
    values.update(changes)
    key = ("run_id", "stage", "phase", "arm", "prompt_id", "repeat", "attempt")
    values.setdefault("receipt_id", digest("receipt", [values[name] for name in key]))
    return Receipt(**values)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "receipts.duckdb"


@pytest.fixture
def store(path):
    with Store.open(path) as opened:
        opened.begin_run(RUN, wall_ns=5, clock_ns=6)
        opened.put_arm("run-1", ARM)
        yield opened


# --- the schema ---------------------------------------------------------------------------------


def test_every_column_says_what_it_is():
    """The schema is its own documentation: no column without a comment."""
    body = re.findall(r"CREATE TABLE \w+ \((.*?)\n\);", SCHEMA, re.DOTALL)
    lines = [line for table in body for line in table.strip("\n").splitlines()]
    assert [ln for ln in lines if "--" not in ln and "PRIMARY KEY (" not in ln] == []


def test_receipt_columns_are_the_receipt_fields():
    """Records and SQL use the same names in the same order."""
    table = re.search(r"CREATE TABLE receipts \((.*?)\n\);", SCHEMA, re.DOTALL)
    assert table is not None
    names = re.findall(r"^\s+(\w+) [A-Z]", table[1], re.MULTILINE)
    assert names == [field.name for field in fields(Receipt)]


def test_help_does_not_load_duckdb():
    """Importing the module stays cheap: DuckDB is loaded when a store is opened."""
    code = "import sys, speccheck.store; sys.exit('duckdb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- in and out ---------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
big = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)


def strategy_for(annotation: typing.Any) -> st.SearchStrategy:
    """Any value of a receipt field's type."""
    known: dict[typing.Any, st.SearchStrategy] = {
        str: texts,
        int: big,
        float: finite,
        bool: st.booleans(),
        type(None): st.none(),
        tuple[int, ...]: st.lists(big, max_size=4).map(tuple),
        tuple[str, ...]: st.lists(texts, max_size=3).map(tuple),
    }
    if annotation in known:
        return known[annotation]
    return st.one_of([known[part] for part in typing.get_args(annotation)])


receipts = st.builds(
    Receipt, **{name: strategy_for(kind) for name, kind in typing.get_type_hints(Receipt).items()}
)
once = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One store for all examples of a property (making one takes longer than an example)."""
    with Store.open(tmp_path_factory.mktemp("shared") / "s.duckdb") as opened:
        yield opened


def emptied(store: Store) -> Store:
    for table in ("receipts", "decisions"):
        store._connection.execute(f"DELETE FROM {table}")  # noqa: S608
    return store


@once
@given(st.lists(receipts, max_size=5, unique_by=lambda r: r.receipt_id))
def test_receipts_come_out_as_they_went_in(shared, batch):
    """Every field of every receipt, NULLs, huge integers, empty lists and odd text included."""
    with nullcontext(emptied(shared)) as store:
        assert store.append_receipts([(r, None) for r in batch]) == len(batch)
        for run_id in {r.run_id for r in batch}:
            expected = [r for r in batch if r.run_id == run_id]
            got = store.receipts(run_id)
            assert {r.receipt_id: r for r in got} == {r.receipt_id: r for r in expected}
            assert got == sorted(got, key=lambda r: (r.scheduled_ns, r.receipt_id.encode()))


estimates = st.none() | st.builds(
    Estimate,
    value=st.floats(allow_nan=False),
    low=st.floats(allow_nan=False),
    high=st.floats(allow_nan=False),
    n=st.integers(0, 2**40),
    method=texts,
    alpha=st.floats(0, 1),
)
findings = st.builds(
    Finding,
    rule=texts,
    verdict=st.sampled_from(list(Verdict)),
    route=texts,
    cohort=texts,
    stage=texts,
    estimate=estimates,
    limit=st.none() | st.floats(allow_nan=False),
    unit=texts,
    why=texts,
    needed=st.none() | st.integers(0, 2**40),
    counted=st.booleans(),
    examples=st.lists(texts, max_size=2).map(tuple),
)
measurements = st.builds(
    Measurement,
    metric=texts,
    stage=texts,
    route=texts,
    cohort=texts,
    estimate=estimates,
    note=texts,
    examples=st.lists(texts, max_size=2).map(tuple),
)
decisions = st.builds(
    Decision,
    route=texts,
    action=st.sampled_from(list(Action)),
    stage=texts,
    reason=texts,
    findings=st.lists(findings, max_size=2).map(tuple),
    k=st.none() | st.integers(1, 99),
    scope=texts,
)


@once
@given(
    st.lists(measurements, max_size=3),
    st.lists(findings, max_size=3),
    st.lists(decisions, max_size=3),
)
def test_judgement_comes_out_as_it_went_in(shared, measured, judged, decided):
    """Estimates with infinite bounds, findings and decisions are read back equal, in order."""
    with nullcontext(emptied(shared)) as store:
        store.put_measurements("r", "replay", measured)
        store.put_measurements("r", "replay", measured)
        store.put_findings("r", "replay", judged)
        store.put_findings("r", "replay", judged)
        for i, decision in enumerate(decided):
            store.append_decision("r", decision, decided_at_ns=i)
        assert store.measurements("r") == measured
        assert store.measurements("r", "shadow") == []
        assert store.findings("r", "replay") == judged
        assert [row.decision for row in store.decisions("r")] == decided
        assert [row.seq for row in store.decisions("r")] == list(range(len(decided)))
        assert store.verify() == []


def test_unknown_estimates_stay_nan(store):
    """NaN means that nothing could be estimated, and is not turned into missing."""
    nothing = Estimate(math.nan, math.nan, math.nan, 0, "none", 0.05)
    store.put_measurements("run-1", "replay", [Measurement("m", "replay", "r", "", nothing)])
    got = store.measurements("run-1")[0].estimate
    assert got is not None
    assert not got.is_known


def test_texts_are_kept_only_where_given(store):
    """An answer comes back by its receipt, with and without token ids."""
    with_ids = Answer(
        receipt(0).receipt_id, "né\x00🙂", (1, 2, 3), (0, 2), (4, 3), {"tool_calls": [["f", "{}"]]}
    )
    without = Answer(receipt(1).receipt_id, "", None)
    store.append_receipts([(receipt(0), with_ids), (receipt(1), without), (receipt(2), None)])
    ids = [receipt(n).receipt_id for n in range(3)]
    assert store.answers(ids) == {ids[0]: with_ids, ids[1]: without}
    assert store.answers([]) == {}


def test_a_receipt_is_written_once(store):
    """The second writing of a key changes nothing and is not counted as new."""
    assert store.append_receipts([(receipt(0), None), (receipt(1), None)]) == 2
    late = replace(receipt(0), outcome="error")
    assert store.append_receipts([(late, None), (receipt(2), None)]) == 1
    assert [r.outcome for r in store.receipts("run-1")] == ["ok"] * 3
    assert store.append_receipts([]) == 0


def test_receipts_come_out_in_the_order_in_which_they_came_in(tmp_path):
    """Whatever their keys, their times and their batches; known ones keep their first place."""
    rng = np.random.default_rng(4)
    numbers = rng.permutation(300).tolist()
    path = tmp_path / "s.duckdb"
    at = 0
    while at < len(numbers):
        size = int(rng.integers(1, 40))
        again = [int(n) for n in rng.choice(numbers[: at + 1], 3)]
        with Store.open(path) as store:
            new = [receipt(n, scheduled_ns=1000 - n) for n in numbers[at : at + size]]
            old = [receipt(n, outcome="error") for n in again if n in numbers[:at]]
            assert store.append_receipts([(r, None) for r in [*old, *new, *new]]) == len(new)
        at += size
    with Store.read(path) as store:
        arrived = store.arrived("run-1")
        scheduled = store.receipts("run-1")
        assert store.arrived("run-1", arm="target_only") == []
    assert [r.prompt_id for r in arrived] == [f"p{n}" for n in numbers]
    assert [r.prompt_id for r in scheduled] == [f"p{n}" for n in sorted(numbers, reverse=True)]


def test_done_keys_are_those_of_stage_and_phase(store):
    """Resuming asks per stage, or per phase of it."""
    others = [receipt(0, phase="load-4"), receipt(0, stage="shadow"), receipt(0, run_id="run-2")]
    store.append_receipts([(r, None) for r in [receipt(0), *others]])
    assert store.done_keys("run-1", "replay", "greedy") == {receipt(0).receipt_id}
    assert store.done_keys("run-1", "replay") == {receipt(0).receipt_id, others[0].receipt_id}
    assert store.done_keys("run-1", "canary") == set()


def test_filters(store):
    """Equal, any of, missing; an empty list matches nothing; an unknown column is an error."""
    rows = [receipt(0), receipt(1, outcome="error", error_class="timeout"), receipt(2, k=2)]
    store.append_receipts([(r, None) for r in rows])
    assert store.receipts("run-1", outcome="error") == [rows[1]]
    assert store.receipts("run-1", error_class=None, warm_up=False) == [rows[0], rows[2]]
    assert store.receipts("run-1", k=[2, 3]) == [rows[2]]
    assert store.receipts("run-1", prompt_id=[]) == []
    with pytest.raises(UsageError, match="no column outcme"):
        store.receipts("run-1", outcme="ok")
    with pytest.raises(UsageError, match="no column 1; DROP"):
        store.columns("run-1", ["1; DROP TABLE receipts"])


def test_columns_are_arrays_with_nan_for_missing(store):
    """Numbers are float64, truths bool, texts objects; all of one length, in scheduled order."""
    rows = [receipt(1, k=None, proposer=None), receipt(0), receipt(2, completion_tokens=None)]
    store.append_receipts([(r, None) for r in rows])
    names = ["prompt_id", "k", "warm_up", "proposer", "tpot_s", "ttft_s", "error_class"]
    got = store.columns("run-1", names)
    assert list(got) == names
    assert got["prompt_id"].tolist() == ["p0", "p1", "p2"]
    assert got["proposer"].tolist() == ["draft", None, "draft"]
    assert got["error_class"].tolist() == [None, None, None]
    assert got["warm_up"].dtype == np.bool_
    np.testing.assert_array_equal(got["k"], [4, np.nan, 4])
    np.testing.assert_allclose(got["tpot_s"], [100e-9, 100e-9, np.nan])
    assert {
        name: len(array) for name, array in store.columns("none", names).items()
    } == dict.fromkeys(names, 0)


@once
@given(st.lists(receipts, max_size=4, unique_by=lambda r: r.receipt_id))
def test_times_in_sql_are_the_times_of_the_record(shared, batch):
    """The view `timings` and the receipt's properties are the same formulas."""
    small = [
        replace(
            r,
            run_id="r",
            completion_tokens=None
            if r.completion_tokens is None
            else abs(r.completion_tokens) % 2**40,
            **{
                name: None if getattr(r, name) is None else abs(getattr(r, name)) % 10**15
                for name in ("scheduled_ns", "sent_ns", "first_token_ns", "last_token_ns")
            },
        )
        for r in batch
    ]
    names = ["ttft_s", "e2e_s", "effective_s", "queue_age_s", "tpot_s"]
    with nullcontext(emptied(shared)) as store:
        store.append_receipts([(r, None) for r in small])
        got = store.columns("r", ["receipt_id", *names])
        by_id = {r.receipt_id: r for r in small}
        for i, receipt_id in enumerate(got["receipt_id"]):
            for name in names:
                wanted = getattr(by_id[receipt_id], name)
                assert got[name][i] == pytest.approx(
                    math.nan if wanted is None else wanted, rel=1e-12, nan_ok=True
                )


# --- runs, arms, stages, samples ----------------------------------------------------------------


def test_after_a_restart_of_the_machine_a_run_keeps_its_clock(tmp_path):
    """The monotonic clock begins anew; what is written then stands on the clock of the first boot.

    Begun at wall 1000 with clock 700 of boot A; resumed at wall 5000 with clock 100 of boot B.
    """
    path = tmp_path / "s.duckdb"
    with Store.open(path) as store:
        store.begin_run(RUN, wall_ns=1000, clock_ns=700, boot="A")
        store.append_receipts([(receipt(0, scheduled_ns=710, sent_ns=711, done_ns=720), None)])
    with Store.open(path) as store:
        store.begin_run(RUN, wall_ns=2000, clock_ns=1690, boot="A")  # 10 ns of drift are no restart
        assert store.run_clock_ns("run-1", 1700) == 1700
    with Store.open(path) as store:
        store.begin_run(RUN, wall_ns=5000, clock_ns=100, boot="B")
        assert store.run_clock_ns("run-1", 100) == 4700
        late = receipt(1, scheduled_ns=150, sent_ns=151, first_token_ns=None, done_ns=160)
        store.append_receipts([(late, None)])
        store.append_samples("run-1", Arm.SPECULATIVE, [Snapshot(170, {("x", ()): 1.0})])
        first, second = store.receipts("run-1")
        assert (first.scheduled_ns, second.scheduled_ns) == (710, 4750)
        assert (second.sent_ns, second.first_token_ns, second.done_ns) == (4751, None, 4760)
        assert store.snapshots("run-1", Arm.SPECULATIVE)[0].taken_ns == 4770
        assert [anchor.boot for anchor in store.anchors("run-1")] == ["A", "A", "B"]


def test_an_unknown_boot_is_taken_for_the_same(tmp_path):
    """A system that does not tell its boots gets no clock of its own making."""
    with Store.open(tmp_path / "s.duckdb") as store:
        store.begin_run(RUN, wall_ns=1000, clock_ns=700, boot="")
        store.begin_run(RUN, wall_ns=5000, clock_ns=100, boot="B")
        assert store.run_clock_ns("run-1", 100) == 100


def test_drives_come_back_as_they_went_in(store):
    """Health with figures that are not known, counters of one arm, and why there are none."""
    health = ClientHealth(
        valid=False, reasons=("late",), is_late=True, driven_s=3.5, lag_p99_s=0.02, held_requests=2
    )
    counted = Counted(
        seconds=4.0,
        drafts=10,
        draft_tokens=40,
        accepted_tokens=30,
        accepted_per_position=(9, 8, 7, 6),
        generation_tokens=None,
        prompt_tokens=5,
        preemptions=None,
        finished={"stop": 3},
        tpot_buckets={"+Inf": 3, "0.01": 2},
        resets=("1",),
    )
    counters = {Arm.SPECULATIVE: counted, Arm.TARGET_ONLY: "/metrics: HTTP 404"}
    kept = [
        DriveRecord("shadow", "mirror", ("a", "b"), 90, health, counters),
        DriveRecord("shadow", "again", (), 0, replace(health, valid=True, reasons=()), {}),
    ]
    for drive in kept:
        store.append_drive("run-1", drive)
    store.append_drive("run-1", replace(kept[0], stage="canary"))
    assert [repr(d) for d in store.drives("run-1", "shadow")] == [repr(d) for d in kept]
    assert store.drives("run-2", "shadow") == []


def test_a_run_is_begun_once_and_come_back_to(store):
    """The same run again adds a clock anchor; other rules under its id are refused."""
    store.begin_run(replace(RUN, created_at_ns=99), wall_ns=7, clock_ns=8)
    assert store.anchors("run-1") == [Anchor(5, 6, ""), Anchor(7, 8, "")]
    assert store.run("run-1") == RUN
    assert store.runs() == [RUN]
    with pytest.raises(UsageError, match="another rules_digest, config"):
        store.begin_run(replace(RUN, rules_digest="rules:c", config={}), wall_ns=0, clock_ns=0)
    with pytest.raises(UsageError, match="no run run-2; there are: run-1"):
        store.run("run-2")


def test_arms_come_back_with_their_digest(store):
    """Descriptions are recorded once per configuration."""
    other = replace(ARM, arm=Arm.TARGET_ONLY, speculative_config=None)
    for description in (other, ARM, ARM):
        store.put_arm("run-1", description)
    assert store.arms("run-1") == [ARM, other]
    assert next(a.engine_config_id for a in store.arms("run-1")) == ARM.engine_config_id


def test_arms_of_a_stage_are_those_with_receipts_in_it(store):
    """A sweep's servers are told from the pair of the stages by what they answered."""
    sweeping = replace(ARM, speculative_config={"k": 8})
    for description in (ARM, sweeping):
        store.put_arm("run-1", description)
    own = receipt(0, stage="shadow", engine_config_id=ARM.engine_config_id)
    swept = receipt(1, stage="sweep", engine_config_id=sweeping.engine_config_id)
    store.append_receipts([(own, None), (swept, None)])
    assert store.arms("run-1", ["replay", "shadow"]) == [ARM]
    assert store.arms("run-1", ["sweep"]) == [sweeping]
    assert store.arms("run-1", []) == []
    assert store.arms("run-1") == [ARM, sweeping]


def test_the_last_result_of_a_stage_stands(store):
    """A stage that was run again replaces nothing, but its later result is the answer."""
    assert store.get_stage("run-1", "replay") is None
    first = StageResult("run-1", "replay", 1, Verdict.FAIL, {"n": [1, 2], "x": None})
    store.put_stage(first)
    assert store.get_stage("run-1", "replay") == first
    second = StageResult("run-1", "replay", 2, Verdict.PASS, {"bad": math.nan, "t": (1, math.inf)})
    store.put_stage(second)
    got = store.get_stage("run-1", "replay")
    assert got is not None
    assert (got.verdict, got.evidence) == (Verdict.PASS, {"bad": None, "t": [1, None]})


def test_samples_come_back_as_snapshots(store):
    """Scrapes are kept by arm, in order of time, and without what is not a number."""
    running = ("vllm:num_requests_running", (("engine", "0"), ("model_name", 'a"b\n')))
    snapshots = [Snapshot(2, {running: 3.0, ("up", ()): 1.0}), Snapshot(9, {running: 0.0})]
    odd = Snapshot(12, {running: math.inf})
    store.append_samples("run-1", Arm.SPECULATIVE, [*reversed(snapshots), odd])
    assert store.snapshots("run-1", Arm.SPECULATIVE) == snapshots
    assert store.snapshots("run-1", Arm.TARGET_ONLY) == []


# --- verify -------------------------------------------------------------------------------------


def tampered(path: Path, sql: str) -> list[str]:
    connection = duckdb.connect(path)
    connection.execute(sql)
    connection.close()
    with Store.read(path) as store:
        return store.verify()


@pytest.fixture
def full(path):
    """A store with one of everything, closed."""
    decision = Decision("chat", Action.HOLD, "replay", "so", ())
    with Store.open(path) as store:
        store.begin_run(RUN, wall_ns=5, clock_ns=6)
        store.put_arm("run-1", ARM)
        store.append_receipts([(receipt(0), Answer(receipt(0).receipt_id, "x", (1, 2, 3)))])
        for i in range(3):
            store.append_decision("run-1", decision, decided_at_ns=i)
        assert store.verify() == []
    return path


def test_several_choices_verify(path):
    """With n > 1 the digest is of all choices, and a further one that was changed is found."""
    further = client.Choice("y", (4, 5), "stop")
    seen = client.Observation(Outcome.OK, 0, 1, token_ids=(1, 2, 3), others=(further,))
    kept = replace(receipt(0), output_digest=client.output_digest(seen))
    details = {"choices": [asdict(further)]}
    with Store.open(path) as store:
        store.begin_run(RUN, wall_ns=5, clock_ns=6)
        store.put_arm("run-1", ARM)
        answer = Answer(kept.receipt_id, "x", (1, 2, 3), details=details)
        store.append_receipts([(kept, answer)])
        assert store.verify() == []
    changed = "UPDATE texts SET details = replace(details, '5', '6')"
    assert ["kept tokens" in p for p in tampered(path, changed)] == [True]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("UPDATE receipts SET prompt_id = 'p9'", "its key says"),
        ("UPDATE receipts SET discarded_tokens = 1", "discarded is not proposed less accepted"),
        ("UPDATE receipts SET accepted_tokens = NULL", "discarded is not proposed less accepted"),
        ("UPDATE receipts SET counts_source = 'none'", "counts without a source"),
        ("UPDATE receipts SET first_token_ns = 0", "times out of order"),
        ("UPDATE receipts SET cached_tokens = -1", "a negative count"),
        ("UPDATE receipts SET output_digest = 'x'", "its kept tokens are not the digest's"),
        ("DELETE FROM receipts", "text without a receipt"),
        ("DELETE FROM runs", "run is not in table runs"),
        ("DELETE FROM arms", "engine_config_id is not in table arms"),
        ("UPDATE arms SET model = 'other'", "is not its digest"),
        ("UPDATE decisions SET reason = 'no' WHERE seq = 1", "decision 1: was changed"),
        ("DELETE FROM decisions WHERE seq = 1", "decision 2: does not follow"),
        ("DELETE FROM decisions WHERE seq = 0", "decision 1: does not follow"),
    ],
)
def test_verify_finds_what_was_changed(full, sql, words):
    """Each identity and invariant is derived again from the rows themselves."""
    problems = tampered(full, sql)
    assert any(words in problem for problem in problems), problems


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["csv", "parquet", "jsonl"])
def test_export_writes_what_is_stored(store, tmp_path, fmt):
    """Every format holds the filtered rows, with missing values missing."""
    store.append_receipts([(receipt(n, k=None if n else 4), None) for n in range(3)])
    target = tmp_path / f"it's.{fmt}"
    assert store.export(target, fmt, prompt_id=["p0", "p1"]) == 2
    if fmt == "csv":
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["k"] for row in rows] == ["4", ""]
    elif fmt == "jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        assert rows[0]["acceptance_histogram"] == [1, 1, 0, 0, 0]
        assert rows[1].get("k") is None
    else:
        rows = duckdb.read_parquet(str(target)).fetchall()
        assert len(rows) == 2
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_export_names_what_there_is(store, tmp_path):
    """Unknown tables, formats and columns are usage errors; a bad folder is a store error."""
    with pytest.raises(UsageError, match="no table nope; there are: store_version, runs"):
        store.export(tmp_path / "x", "csv", table="nope")
    with pytest.raises(UsageError, match="no format xls"):
        store.export(tmp_path / "x", "xls")
    with pytest.raises(UsageError, match="no column nope"):
        store.export(tmp_path / "x", "csv", nope=1)
    with pytest.raises(StoreError, match="folder does not exist"):
        store.export(tmp_path / "no" / "x", "csv")
    assert store.export(tmp_path / "runs.csv", "csv", table="runs") == 1


# --- what can be wrong with a file --------------------------------------------------------------


def test_a_store_held_by_another_process_names_it(path):
    """One clear line with the process number, for writers and readers alike."""
    code = (
        "import sys, time; from speccheck.store import Store\n"
        f"store = Store.open({str(path)!r})\n"
        "print('open', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        for mode in ("write", "read"):
            with pytest.raises(StoreError, match=f"held by process {holder.pid}") as caught:
                Store.open(path, mode)
            assert "choose another --out" in str(caught.value)
            assert "\n" not in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
    with Store.open(path) as store:
        assert store.runs() == []


def test_a_store_that_is_held_for_a_moment_is_waited_for(path):
    """As a gateway holds its own between two answers: the reader does not see it."""
    with Store.open(path):
        pass
    code = (
        "import sys; from speccheck.store import Store\n"
        f"with Store.open({str(path)!r}):\n"
        "    print('open', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert holder.stdin is not None
        let_go = threading.Timer(0.3, holder.stdin.close)
        let_go.start()
        with results.open_store(path.parent) as store:
            assert store.runs() == []
        let_go.join()


def test_runs_stand_in_the_order_in_which_they_were_taken_up(path):
    """An older run that is gone on with is the latest."""
    other = replace(RUN, run_id="run-2", created_at_ns=RUN.created_at_ns + 1)
    with Store.open(path) as store:
        for run, wall_ns in ((RUN, 10), (other, 20), (RUN, 30)):
            store.begin_run(run, wall_ns=wall_ns, clock_ns=1)
            assert store.runs()[-1].run_id == run.run_id
        assert len(store.runs()) == 2
        assert results.pick_run(store, None) == RUN.run_id


def test_a_missing_store_is_not_made_by_reading(path):
    """Reading makes nothing and says what to do."""
    with pytest.raises(StoreError, match="no store there; run a stage first"):
        Store.read(path)
    assert not path.exists()


def test_files_that_are_no_store_are_refused_unharmed(path, tmp_path):
    """Another file format, another database and a folder each get their own line."""
    path.write_text("not a database\n" * 1000)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a DuckDB file"):
        Store.open(path)
    assert path.read_bytes() == before
    other = tmp_path / "other.duckdb"
    connection = duckdb.connect(other)
    connection.execute("CREATE TABLE mine (x INTEGER)")
    connection.close()
    with pytest.raises(StoreError, match="not a speccheck store"):
        Store.open(other)
    with pytest.raises(StoreError, match="a folder, not a store"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="its folder does not exist"):
        Store.open(tmp_path / "no" / "x.duckdb")


def test_a_store_of_a_newer_version_is_refused(full):
    """A schema that this version does not know is never guessed at."""
    connection = duckdb.connect(full)
    connection.execute("UPDATE store_version SET version = 99")
    connection.close()
    for mode in ("read", "write"):
        with pytest.raises(StoreError, match=f"version 99, this .* reads {STORE_VERSION}"):
            Store.open(full, mode)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_store_of_version_4_is_brought_up_to_date(tmp_path, mode):
    """What an older speccheck wrote is read as it was, and what is new in it is missing, not 0."""
    path = tmp_path / "old.duckdb"
    old = {k: v for k, v in asdict(receipt(3)).items() if not k.startswith("handover_")}
    with duckdb.connect(path) as connection:
        connection.execute((HERE / "gold" / "store_v4.sql").read_text(encoding="utf-8"))
        connection.execute("INSERT INTO store_version VALUES (4)")
        connection.execute("INSERT INTO runs VALUES ('run-1', 1, 7, 'c', 'r', '{}')")
        marks = ", ".join("?" * len(old))
        connection.execute(f"INSERT INTO receipts VALUES ({marks})", [*old.values()])  # noqa: S608
    with Store.open(path, mode) as store:
        assert store.receipts("run-1") == [receipt(3)]
        assert list(store.columns("run-1", ["lag_s"])["lag_s"]) == [(2_000 - 1_003) / 1e9]
    with Store.open(path) as store:
        joined = receipt(4, handover_at=7, handover_from="speculative", handover_kind="exact")
        store.append_receipts([(joined, None)])
        assert store.receipts("run-1", handover_at=7) == [joined]
    with duckdb.connect(path) as connection, duckdb.connect(tmp_path / "new.duckdb") as new:
        new.execute(SCHEMA)
        for table in ("receipts", "timings", "transitions"):
            described = f"DESCRIBE {table}"
            assert (
                sorted(connection.execute(described).fetchall())
                == sorted(new.execute(described).fetchall())
            )  # fmt: skip


def moved(seq: int, **fields: typing.Any) -> Transition:
    """A transition of route chat."""
    values = {
        "route": "chat",
        "seq": seq,
        "at_ns": 10 * seq,
        "before": RouteState.ENABLED,
        "after": RouteState.FELL_BACK,
        "rule": "max_error_rate",
        "cohort": "prompt <64",
        "estimate": Estimate(0.5, 0.25, math.inf, 12, "beta-binomial e-process", 0.05),
        "limit": 0.01,
        "unit": "share",
        "window_s": 12.5,
        "n": 12,
        "share": 0.0,
        "fallbacks": 1,
        "why": "error rate 50% is over the limit",
        "who": "",
    }
    return Transition(**values | fields)


def test_transitions_come_out_as_they_went_in_by_rollout_and_route(tmp_path):
    """Each route of a rollout has a chain of its own, in whatever run it was written."""
    timed = moved(1, estimate=None, limit=None, window_s=None, n=0, rule="cool_down", unit="")
    with Store.open(tmp_path / "x.duckdb") as store:
        for one, run_id in ((moved(0), "run-1"), (timed, "run-2")):
            store.append_transition("a", one, run_id=run_id, wall_ns=7, settings="fallback:1")
        other = moved(0, route="code")
        store.append_transition("a", other, run_id="", wall_ns=8, settings="fallback:1")
        store.append_transition("b", moved(0), run_id="", wall_ns=9, settings="fallback:2")
        assert [r.transition for r in store.transitions("a")] == [moved(0), timed, other]
        assert [r.run_id for r in store.transitions("a", "chat")] == ["run-1", "run-2"]
        assert [(r.wall_ns, r.settings) for r in store.transitions("b")] == [(9, "fallback:2")]
        assert store.verify() == []


def test_a_transition_that_does_not_follow_is_refused(tmp_path):
    """Two guards of one route: the second to write is told, and writes nothing."""
    with Store.open(tmp_path / "x.duckdb") as store:
        store.append_transition("a", moved(0), run_id="", wall_ns=1, settings="s")
        for seq in (0, 2):
            with pytest.raises(StoreError, match="moved by another process"):
                store.append_transition("a", moved(seq), run_id="", wall_ns=1, settings="s")
        assert len(store.transitions("a")) == 1


def test_a_transition_that_was_changed_is_found(tmp_path):
    """The chain covers every field of a row."""
    path = tmp_path / "x.duckdb"
    with Store.open(path) as store:
        for seq in (0, 1):
            store.append_transition("a", moved(seq), run_id="", wall_ns=1, settings="s")
    with duckdb.connect(path) as connection:
        connection.execute("UPDATE transitions SET high = 0.3 WHERE seq = 0")
    with Store.read(path) as store:
        assert store.verify() == ["route a/chat, transition 0: was changed after it was taken"]


def test_receipts_after_a_place(full):
    """What came in since the last look, in order, of some stages."""
    with Store.read(full) as store:
        every, last = store.arrived_after("run-1", -1, ["replay"])
        assert every == store.arrived("run-1") == [receipt(0)]
        assert store.arrived_after("run-1", last, ["replay"]) == ([], last)
        assert store.arrived_after("run-1", -1, ["canary"]) == ([], -1)


def test_a_store_that_no_migration_reaches_is_refused(full):
    """Versions before the first migration are named, and left alone."""
    with duckdb.connect(full) as connection:
        connection.execute("UPDATE store_version SET version = 3")
    for mode in ("read", "write"):
        with pytest.raises(StoreError, match="store version 3, this speccheck reads"):
            Store.open(full, mode)


def test_a_folder_without_permission(tmp_path):
    """The message says that it is about permission, not about the database."""
    folder = Path("/proc/sys/kernel") if os.geteuid() == 0 else tmp_path
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=r"no permission to write here|folder does not exist"):
        Store.open(folder / "x.duckdb")


def test_writing_to_a_store_opened_to_read(full):
    """A read-only store says so, and stays usable."""
    with Store.read(full) as store:
        with pytest.raises(StoreError, match="opened to read only"):
            store.append_receipts([(receipt(5), None)])
        assert len(store.receipts("run-1")) == 1


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from test_store import receipt
from speccheck.errors import StoreError
from speccheck.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store.open({path!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
n = 0
try:
    while n < 100_000:
        batch = [receipt(n + i, error_message=str(i) * 400) for i in range(50)]
        store.append_receipts([(r, None) for r in batch])
        n += 50
except StoreError as error:
    print(n, error)
    try:
        store.close()
    except StoreError as error:
        print(error)
"""


def test_a_full_disk_loses_nothing_that_was_acknowledged(path):
    """Writing stops with one clear line, and all earlier batches are there afterwards."""
    code = FULL_DISK.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    n, _, message = done.stdout.partition(" ")
    assert "the disk is full" in message, (done.stdout, done.stderr)
    assert int(n) > 0
    assert (done.returncode, done.stderr) == (0, "")
    with Store.open(path) as store:
        assert len(store.done_keys("run-1", "replay")) >= int(n)


def test_causes_have_no_loose_ends():
    """Every explanation can be filled in, whatever the pattern caught."""
    for pattern, text in store_module._CAUSES:
        assert text.format("7", first="x")
        assert re.compile(pattern)


def test_a_bug_in_our_sql_keeps_its_traceback(store):
    """Only what the user can mend becomes a StoreError."""
    with pytest.raises(duckdb.BinderException):
        store._rows("SELECT nope FROM runs", [])


def test_a_watchs_own_run_is_no_run_to_show_receipts_of(tmp_path):
    """Commands on receipts pass it over unless it is named; those on guards do not."""
    with Store.open(tmp_path / "receipts.duckdb") as store:
        store.begin_run(RUN, wall_ns=2_000, clock_ns=1)
        watched = Run("seen", 3_000, 7, "", "", {"watch": "run-1"})
        store.begin_run(watched, wall_ns=3_000, clock_ns=1)
        assert results.pick_run(store, None) == "run-1"
        assert results.pick_run(store, "seen") == results.pick_guarded(store, None) == "seen"
