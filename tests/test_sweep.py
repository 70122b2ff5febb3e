"""`speccheck sweep` on two scripted servers: whole rounds, resumed after a kill, read by anyone."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from attached_pair import attached_pair
from scripted_server import answer, spec_metrics
from test_cli import speccheck

from speccheck import context, launch, results
from speccheck.cli import main
from speccheck.config import package_dir
from speccheck.console import Reporter, sweep_lines
from speccheck.errors import UsageError
from speccheck.records import CALIBRATION, SWEEP, Arm, Stage, Verdict
from speccheck.store import Store
from speccheck.sweep import calibration, cells
from speccheck.sweep import rounds as measuring

LOOSE = {"loop_cpu_share": None, "lag_floor_s": 60, "loop_stall_s": 60, "loop_stall_share": 1}
"""Limits that any machine keeps: these tests are not about the client."""
EMBEDDED = {
    "name": "embedded",
    "speculation": {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 3},
    "corpus": {"paths": ["corpus.jsonl"]},
    "client_limits": LOOSE,
    "warm_up": 1,
    "routes": [{"name": "dev", "tasks": ["code"]}],
    "sweep": {"k": [1, 3], "concurrency": [2], "rounds": 2, "calibration_rounds": 2, "mix": None},
}
GRID = {"concurrency": [1, 4], "rounds": 2, "calibration_rounds": 2}
PER_TURN = 4


def target_answer(_body, _n):
    """16 tokens, one a chunk, a millisecond each."""
    return answer([[i] for i in range(16)], finish="length", delay_s=0.001)


def speculative_answer(_body, _n):
    """The same in chunks of four, with counts."""
    steps = [[4 * i + j for j in range(4)] for i in range(4)]
    metrics = spec_metrics([(3, 4)] * 4, 4)
    return answer(steps, finish="length", metrics=metrics, delay_s=0.001)


def swept_pair(folder, *, speculative=speculative_answer, **changes):
    given = {"sweep": GRID, "client_limits": LOOSE} | changes
    return attached_pair(folder, target=target_answer, speculative=speculative, **given)


def sweep(pair, folder, **settings):
    """The sweep in this process: its result."""
    with context.open_run(pair.rollout, folder / "run", Reporter(), fresh=False) as opened:
        return measuring.sweep(opened, measuring.Settings(**settings))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A sweep of one load, the same again, then of both: folder, results, requests sent by each."""
    folder = tmp_path_factory.mktemp("sweep")
    with swept_pair(folder) as pair:
        pair.servers[Arm.SPECULATIVE].metrics_text = "process_resident_memory_bytes 1.5e+08\n"
        results, sent = [], []
        for loads in ((1,), (1,), None):
            results.append(sweep(pair, folder, concurrency=loads, price_per_engine_hour=1.0))
            sent.append(sum(len(server.seen) for server in pair.servers.values()))
    return Done(folder, results[-1], results, sent)


@dataclass
class Done:
    """What the module's sweep left."""

    folder: Path
    result: measuring.Result
    results: list[measuring.Result]
    sent: list[int]


def test_the_same_command_again_sends_nothing(done):
    """A finished sweep only tells its result again; another load is measured beside it."""
    first, second, both = done.results
    assert done.sent[0] == done.sent[1] < done.sent[2]
    assert second.loads == first.loads
    assert [load.concurrency for load in both.loads] == [1, 4]
    assert both.loads[0] == first.loads[0]


def receipts_of(folder, **filters):
    with Store.read(folder / "run" / context.STORE_NAME) as store:
        return store.receipts(store.runs()[-1].run_id, **filters)


def test_every_round_is_whole(done):
    """Both arms on the same prompts, as many rounds as the rollout says, nothing twice."""
    folder, result = done.folder, done.result
    receipts = receipts_of(folder, stage=SWEEP, warm_up=False)
    turns = Counter((r.concurrency, r.arm, r.block) for r in receipts)
    assert turns == {(c, arm, block): PER_TURN for c in (1, 4) for arm in Arm for block in range(2)}
    arms = defaultdict(set)
    for r in receipts:
        arms[r.pair_id].add((r.arm, r.k))
    assert all(both == {("target_only", None), ("speculative", 4)} for both in arms.values())
    assert [(load.task, load.concurrency, load.cells[0].n_rounds) for load in result.loads] == [
        ("qa", 1, 2),
        ("qa", 4, 2),
    ]
    with Store.read(folder / "run" / context.STORE_NAME) as store:
        assert store.verify() == []


def test_the_arms_take_turns(done):
    """No request of one arm goes out while the other has one in flight; the order is mirrored."""
    folder = done.folder
    receipts = receipts_of(folder, stage=SWEEP, warm_up=False, concurrency=4)
    spans = defaultdict(list)
    for r in receipts:
        spans[r.block, r.arm].append((r.sent_ns, r.done_ns))
    turns = {
        key: (min(start for start, _ in times), max(end for _, end in times))
        for key, times in spans.items()
    }
    ordered = sorted(turns.items(), key=lambda item: item[1])
    for (_, (_, end)), (_, (start, _)) in itertools.pairwise(ordered):
        assert end < start
    order = [arm for (_, arm), _ in ordered]
    assert order == ["target_only", "speculative", "speculative", "target_only"]


def test_cells_can_be_computed_from_exported_receipts(done):
    """Anybody with the receipts gets the same cells, acceptance and costs."""
    folder, result = done.folder, done.result
    receipts = receipts_of(folder)
    for load, again in zip(result.loads, cells.loads(receipts), strict=True):
        for name, ratio in load.cells[0].ratios.items():
            other = again.cells[0].ratios[name]
            for field in ("value", "low", "high"):  # sums in another order: equal but for rounding
                number = getattr(ratio, field)
                assert getattr(other, field) == pytest.approx(number, rel=1e-9, nan_ok=True)
            assert (other.n, other.method, other.alpha) == (ratio.n, ratio.method, ratio.alpha)
        assert load.cells[0].acceptance.value == 0.75
        assert [e.value for e in load.cells[0].per_position] == [1, 1, 1, 0]
        assert load.cells[0].mean_acceptance_length.value == 4
    known = calibration.calibrate(receipts)
    assert {c: found.costs for c, found in result.calibrations.items()} == {
        c: found.costs for c, found in known.items()
    }
    assert set(known) == {1, 4}
    assert known[4].note == calibration.LOOKUP


def test_memory_is_what_the_servers_tell(done):
    """From the metrics of an attached server; one that does not tell has none, not 0."""
    result = done.result
    for load in result.loads:
        assert load.arms[4].figures["memory_bytes"].value == 1.5e8
        assert "memory_bytes" not in load.target.figures


def test_the_matrix_and_the_packet_take_a_sweep(done):
    """Its cohorts are rows of the matrix with modelled savings; calibration is no cohort."""
    folder = done.folder
    with Store.read(folder / "run" / context.STORE_NAME) as store:
        evidence = results.evidence(store, store.runs()[-1].run_id)
        measured = store.measurements(evidence.run["run_id"], SWEEP)
    assert {row.cohort["stage"] for row in evidence.matrix} == {SWEEP}
    assert sum(row.n_target for row in evidence.matrix) == 16
    assert evidence.receipts == []
    assert {"e2e_mean_ratio", "verify_cost", "saved_target_passes_modelled"} <= {
        m.metric for m in measured
    }


def test_the_stages_do_not_see_a_sweep(done):
    """No stage result, no decision, and a run that is not promoted by it."""
    folder = done.folder
    with Store.read(folder / "run" / context.STORE_NAME) as store:
        ended = results.outcome(store, store.runs()[-1].run_id)
    assert ended.stages == {}
    assert [d.action for d in ended.decisions] == ["inconclusive"]


def test_a_stage_goes_on_beside_a_sweep(tmp_path):
    """A sweep before or after does not bind the pair of the stages, nor the other way round."""
    with swept_pair(tmp_path) as pair:
        sweep(pair, tmp_path, concurrency=(1,))
        ended = pair.run(Stage.SHADOW)
        assert list(ended.stages) == ["shadow"]
        again = sweep(pair, tmp_path, concurrency=(1, 4))
    assert [load.concurrency for load in again.loads] == [1, 4]
    with Store.read(tmp_path / "run" / context.STORE_NAME) as store:
        evidence = results.evidence(store, store.runs()[-1].run_id)
        assert store.verify() == []
    assert {row.cohort["stage"] for row in evidence.matrix} == {"sweep", "shadow"}
    assert {r.stage for r in evidence.receipts} == {"shadow"}


@pytest.mark.slow
def test_the_embedded_engine_is_swept(tmp_path, monkeypatch):
    """One server per proposal length and the controls that tell c from V, on the real pair."""
    monkeypatch.setattr(launch, "CONTROL_LENGTHS", (6,))  # one less to start
    (tmp_path / "rollout.yaml").write_text(json.dumps(EMBEDDED), encoding="utf-8")
    lines = (package_dir("corpora") / "code.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
    with context.open_run(
        tmp_path / "rollout.yaml", tmp_path / "run", Reporter(), fresh=False
    ) as opened:
        result = measuring.sweep(opened, measuring.Settings())
    (load,) = result.loads
    assert [cell.k for cell in load.cells] == [1, 3]
    assert load.cells[1].mean_acceptance_length.value > load.cells[0].mean_acceptance_length.value
    assert all(arm.errors == 0 for arm in (load.target, *load.arms.values()))
    assert load.arms[3].figures["memory_bytes"].value > 1e7
    known = result.calibrations[2]
    assert known.note == calibration.SEPARATE
    assert set(known.verify) == {1, 3}
    assert {cell.saved_modelled is not None for cell in load.cells} == {True}
    arms = Counter((r.k, r.proposer) for r in receipts_of(tmp_path, stage=CALIBRATION))
    assert set(arms) == {
        (None, None),
        (1, "packaged"),
        (3, "packaged"),
        (6, "ngram"),
    }
    assert len(set(arms.values())) == 1
    greedy = defaultdict(set)
    for r in receipts_of(tmp_path, stage=SWEEP, warm_up=False):
        greedy[r.pair_id].add(r.output_digest)
    assert all(len(digests) == 1 for digests in greedy.values())


def test_another_proposal_length_than_the_server_has(tmp_path):
    """An attached server has one k: asking for another is an error before anything is sent."""
    with swept_pair(tmp_path) as pair:
        with pytest.raises(UsageError, match="runs with 4"):
            sweep(pair, tmp_path, k=(2, 4))
        assert not any(server.seen for server in pair.servers.values())


def test_rounds_in_which_the_client_was_late_do_not_count(tmp_path):
    """They are left out and said; after three the load is given up: no data is no verdict."""
    late = LOOSE | {"loop_stall_s": 0}
    with swept_pair(tmp_path, client_limits=late) as pair:
        result = sweep(pair, tmp_path, concurrency=(1,), tasks=("qa",))
    assert result.loads == ()
    assert result.verdict is Verdict.ERROR
    assert "6 rounds left out: our own client was late in them" in result.notes


def test_a_budget_ends_the_sweep(tmp_path):
    """On a clock of the test's own: the small pass, then what is open, until the time is up."""
    ticks = itertools.count()
    with swept_pair(tmp_path) as pair:
        result = sweep(pair, tmp_path, budget_s=30.0, now_s=lambda: float(next(ticks)))
    assert result.loads
    assert result.seconds < 45
    rounds = Counter(
        (r.concurrency, r.block) for r in receipts_of(tmp_path, stage=SWEEP, warm_up=False)
    )
    assert set(rounds.values()) == {2 * PER_TURN}
    if result.verdict is Verdict.INCONCLUSIVE:
        assert all(": " in text for text in result.open_cells)


def test_a_budget_that_is_too_short_says_what_was_not_measured(tmp_path):
    """Loads that no time was left for are cells without a verdict, not cells that are gone."""
    ticks = itertools.count(step=20)
    with swept_pair(tmp_path) as pair:
        result = sweep(pair, tmp_path, budget_s=100.0, now_s=lambda: float(next(ticks)))
    assert result.n_unmeasured == 2
    assert any(note.startswith("not measured: ") for note in result.notes)
    assert result.verdict is Verdict.ERROR


def test_a_proposal_length_that_the_engine_does_not_take(tmp_path):
    """An error with the limit in it, before a server is started."""
    (tmp_path / "rollout.yaml").write_text(json.dumps(EMBEDDED), encoding="utf-8")
    lines = (package_dir("corpora") / "code.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    with (
        context.open_run(
            tmp_path / "rollout.yaml", tmp_path / "run", Reporter(), fresh=False
        ) as opened,
        pytest.raises(UsageError, match="num_speculative_tokens is 20; 1 to 15"),
    ):
        measuring.sweep(opened, measuring.Settings(k=(2, 20)))
    assert not (tmp_path / "run" / "logs").exists()


def test_a_killed_sweep_goes_on(tmp_path):
    """After kill -9 in the middle of a turn the same command measures what is missing: whole rounds
    stay, the cut one is left out and made again, and no request is sent twice.
    """

    def hangs_once(body, n):
        # Of the speculative arm: 1 warm-up, 4 in each of three rounds, the second of the fourth.
        script = speculative_answer(body, n)
        return replace(script, parts=[60.0]) if n == 14 else script

    with swept_pair(tmp_path, speculative=hangs_once) as pair:
        process = subprocess.Popen(
            [sys.executable, "-m", "speccheck", "sweep", "--out", "run"],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and len(pair.servers[Arm.SPECULATIVE].seen) < 15:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        before = {r.receipt_id: r for r in receipts_of(tmp_path)}
        ended = speccheck("sweep", "--out", "run", "--json", cwd=tmp_path)
        told = json.loads(ended.stdout)
        after = {r.receipt_id: r for r in receipts_of(tmp_path)}
        sent = sum(len(server.seen) for server in pair.servers.values())
    assert ended.returncode == told["exit_code"] in (0, 3), ended.stderr
    assert before.items() <= after.items()
    assert any(note.startswith("1 rounds left out: cut") for note in told["notes"]), told["notes"]
    assert [c["n_rounds"] for load in told["loads"] for c in load["cells"]] == [2, 2]
    measured = [r for r in after.values() if not r.warm_up]
    turns = Counter((r.stage, r.concurrency, r.arm, r.block) for r in measured)
    assert turns.pop((SWEEP, 4, "target_only", 0)) == PER_TURN
    assert turns.pop((SWEEP, 4, "speculative", 0), 0) < PER_TURN
    assert turns == {
        **{(CALIBRATION, c, arm, block): 4 for c in (1, 4) for arm in Arm for block in (0, 1)},
        **{(SWEEP, 1, arm, block): 4 for arm in Arm for block in (0, 1)},
        **{(SWEEP, 4, arm, block): 4 for arm in Arm for block in (1, 2)},
    }
    # Each process warms both arms up; what was in flight at the kill (up to 4) has no receipt.
    assert sent - 4 <= len(measured) + 2 * 2 <= sent


def test_the_page_fits_a_terminal(done):
    """80 columns, with every figure, and how many cells are decided."""
    result = done.result
    lines = sweep_lines(result, with_figures=True)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "chat, qa: e2e speed-up over target-only" in text
    assert f"{result.n_cells - len(result.open_cells)} of 2 cells decided" in text


def test_servers_that_are_gone(tmp_path, monkeypatch, capsys):
    """One clear line and exit code 4."""
    with swept_pair(tmp_path):
        monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "--out", "run"])
    assert ended.value.code == 4
    assert "is the server running?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "10"), "a time such as 90s, 10m or 1h"),
        (("--k", "3,1"), "growing numbers"),
        (("--k", "0"), "whole numbers from 1 up"),
        (("--concurrency", "x"), "whole numbers from 1 up"),
        (("--price", "0"), "--price"),
        (("--task", "nothing"), "no route has prompts of task nothing"),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, capsys, arguments, words):
    """One clear line, exit code 2, nothing sent."""
    monkeypatch.chdir(tmp_path)
    with swept_pair(tmp_path) as pair:
        with pytest.raises(SystemExit) as ended:
            main(["sweep", *arguments])
        assert (ended.value.code, words in capsys.readouterr().err) == (2, True)
        assert not any(server.seen for server in pair.servers.values())
