"""The whole job on the embedded engine, small, as processes: run, kill, resume, look, decide."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from test_cli import ROLLOUT, command, speccheck

from speccheck.config import Rollout, load_rollout, package_dir
from speccheck.console import Reporter
from speccheck.context import open_run
from speccheck.eligibility import load_eligibility, policy_version
from speccheck.launch import count_prompt_tokens
from speccheck.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A small run that was taken through all four stages; its folder and its JSON."""
    folder = tmp_path_factory.mktemp("run")
    write_rollout(folder)
    done = speccheck(
        *("run", "--keep-going", "--json", "--junit", "junit.xml", "--summary", "summary.md"),
        cwd=folder,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode, done.stderr
    return folder, told


POLICY = """\
rules:
  - {name: sampled, when: {temperature: {above: 0}}, use: target_only, reason: not looked at}
  - {name: long, when: {prompt_tokens: {at_least: LONG}}, use: target_only, reason: too long}
  - {name: the rest, use: speculate}
"""
"""Keeps the sampled half of replay off, and the longest prompt in every stage."""


def write_rollout(folder: Path) -> None:
    (folder / "rollout.yaml").write_text(
        f"{ROLLOUT}eligibility: eligibility.yaml\n", encoding="utf-8"
    )
    lines = (package_dir("corpora") / "support.jsonl").read_text(encoding="utf-8").splitlines()
    tools = (package_dir("corpora") / "tool_text.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines[:6] + tools[:4]) + "\n"
    (folder / "corpus.jsonl").write_text(text, encoding="utf-8")
    chats = {line: json.loads(line)["messages"] for line in lines[:6]}
    longest = max(count_prompt_tokens(load_rollout(folder / "rollout.yaml"), chats).values())
    policy = POLICY.replace("LONG", str(longest))
    (folder / "eligibility.yaml").write_text(policy, encoding="utf-8")


def test_all_four_stages_ran(finished: tuple[Path, dict]) -> None:
    """Each stage has a verdict, and the fixture passes."""
    _, told = finished
    assert list(told["stages"]) == ["fixture", "replay", "shadow", "canary"]
    assert told["stages"]["fixture"]["verdict"] == "pass"
    assert told["stages"]["replay"]["counts"]["ok"] >= 12


def test_so_few_requests_promote_nothing(finished: tuple[Path, dict]) -> None:
    """A handful of requests never ends in promote: too little evidence is no pass."""
    _, told = finished
    assert [d["action"] for d in told["decisions"]] != ["promote"]
    assert told["exit_code"] in (1, 3, 4)


def test_every_form_tells_the_same(finished: tuple[Path, dict]) -> None:
    """JSON, JUnit, the step summary, `decide` and the packet agree on the outcome."""
    folder, told = finished
    again = command("decide", "--json", cwd=folder)
    assert again.returncode == told["exit_code"]
    assert json.loads(again.stdout)["decisions"] == told["decisions"]
    suites = ET.parse(folder / "junit.xml").getroot()  # noqa: S314 (we wrote it)
    red = suites.findall(".//failure") + suites.findall(".//error")
    assert bool(red) == (told["exit_code"] != 0)
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert f"Exit code {told['exit_code']}" in summary
    view = json.loads((folder / "speccheck-run" / "packet.json").read_text(encoding="utf-8"))
    assert view["complete"] is True
    assert view["exit_code"] == told["exit_code"]


def test_greedy_outputs_of_the_arms_are_equal(finished: tuple[Path, dict]) -> None:
    """At temperature 0 both arms give the same token ids for each prompt."""
    folder, told = finished
    with Store.read(folder / "speccheck-run" / "receipts.duckdb") as store:
        receipts = store.receipts(told["run_id"], stage="replay", phase="greedy")
    digests: dict[str, set[str | None]] = {}
    for receipt in receipts:
        digests.setdefault(receipt.prompt_id, set()).add(receipt.output_digest)
    assert digests
    assert all(len(values) == 1 for values in digests.values())


def test_speculation_really_happened(finished: tuple[Path, dict]) -> None:
    """Speculative receipts carry the engine's own counts; target-only ones drafted nothing."""
    folder, told = finished
    with Store.read(folder / "speccheck-run" / "receipts.duckdb") as store:
        receipts = store.receipts(told["run_id"], stage="shadow", warm_up=False)
    spec = [r for r in receipts if r.arm == "speculative"]
    assert sum(r.accepted_tokens or 0 for r in spec) > 0
    assert {r.counts_source for r in spec} == {"engine"}
    assert all(not r.proposed_tokens for r in receipts if r.arm == "target_only")


def test_the_policy_decides_who_speculates(finished: tuple[Path, dict]) -> None:
    """What it keeps off goes to target-only with the reason, and is asked on both in replay."""
    folder, told = finished
    with Store.read(folder / "speccheck-run" / "receipts.duckdb") as store:
        receipts = store.receipts(told["run_id"], warm_up=False, route="support")
        # What tries features and the verifier itself goes to both arms whatever the policy says.
        receipts = [r for r in receipts if r.stage != "probe" and "slice" not in r.phase]
        plain = store.run(told["run_id"]).config["rollout"]
    policy = load_eligibility(folder / "eligibility.yaml")
    longest = policy.rules[1].when.prompt_tokens.at_least
    assert {r.policy_version for r in receipts} == {
        policy_version(Rollout.model_validate(plain), policy)
    }
    for r in receipts:
        long = r.prompt_tokens >= longest
        assert r.kept_off == (long or r.temperature > 0), r
        if r.kept_off and r.stage in ("shadow", "canary"):
            assert (r.arm, r.decision) == ("target_only", "target_only")
            assert r.decision_reason == "eligibility policy: rule 'long': too long"
    kept = {(r.stage, r.arm) for r in receipts if r.kept_off}
    assert kept >= {("replay", "speculative"), ("replay", "target_only"), ("shadow", "target_only")}
    replayed = told["decisions"][0]["scope"]
    assert "the eligibility policy keeps" in replayed
    assert "rule 'long': too long" in replayed


def test_the_servers_own_counters_agree(finished: tuple[Path, dict]) -> None:
    """What the embedded engines counted in shadow and canary is what the receipts say, exactly."""
    _, told = finished
    for stage in ("shadow", "canary"):
        counters = told["stages"][stage]["server_counters"]
        for arm in ("target_only", "speculative"):
            assert {row["gap"] for row in counters[arm]["rows"]} == {0}, counters[arm]
        drafted = [row["quantity"] for row in counters["speculative"]["rows"]]
        assert "drafted tokens" in drafted


def test_the_same_command_again_sends_nothing(finished: tuple[Path, dict]) -> None:
    """A finished run is only judged again: no new receipt, the same decisions."""
    folder, told = finished
    with Store.read(folder / "speccheck-run" / "receipts.duckdb") as store:
        before = len(store.receipts(told["run_id"]))
    done = command("run", "--keep-going", "--json", cwd=folder)
    assert done.stdout, done.stderr
    again = json.loads(done.stdout)
    assert again["run_id"] == told["run_id"]
    assert again["decisions"] == told["decisions"]
    with Store.read(folder / "speccheck-run" / "receipts.duckdb") as store:
        assert len(store.receipts(told["run_id"])) == before
        assert store.verify() == []


def test_receipts_can_be_listed_shown_and_exported(
    finished: tuple[Path, dict], tmp_path: Path
) -> None:
    """Each export holds every receipt; `show` takes the beginning of an id."""
    import duckdb

    folder, _ = finished
    listed = json.loads(command("receipts", "list", "--json", cwd=folder).stdout)
    assert listed["count"] > 0
    shown = command("receipts", "list", "--limit", "3", cwd=folder)
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    first = listed["receipts"][0]
    page = command("receipts", "show", first["receipt_id"], cwd=folder)
    assert first["prompt_id"] in page.stdout
    for ending in ("csv", "parquet", "jsonl"):
        path = tmp_path / f"all.{ending}"
        assert command("receipts", "export", path, cwd=folder).returncode == 0
        reader = {"csv": "read_csv", "parquet": "read_parquet", "jsonl": "read_json"}[ending]
        ((count,),) = duckdb.sql(f"SELECT count(*) FROM {reader}('{path}')").fetchall()  # noqa: S608
        assert count == listed["count"]


def test_another_seed_is_another_run(finished: tuple[Path, dict]) -> None:
    """A changed rollout never continues a run that was begun under another one."""
    folder, told = finished
    text = (folder / "rollout.yaml").read_text(encoding="utf-8")
    (folder / "other.yaml").write_text(f"seed: 5\n{text}", encoding="utf-8")
    out = folder / "speccheck-run"
    with open_run(folder / "other.yaml", out, Reporter(), fresh=False) as run:
        assert run.run_id != told["run_id"]
        assert not run.store.receipts(run.run_id)
    with open_run(folder / "rollout.yaml", out, Reporter(), fresh=False) as run:
        assert run.run_id == told["run_id"]


def test_prompts_that_nothing_grades_are_no_pass(tmp_path: Path) -> None:
    """Replay of prompts without checks could not judge quality, and says that they have none."""
    write_rollout(tmp_path)
    lines = (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    prompts = [json.loads(line) | {"check": {"kind": "none"}} for line in lines]
    text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (tmp_path / "corpus.jsonl").write_text(text, encoding="utf-8")
    done = command("stage", "replay", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode == 4
    assert "none of the route's 2 prompts has a check" in told["decisions"][0]["reason"]


def test_killed_at_any_moment_the_run_is_resumed_whole(tmp_path: Path) -> None:
    """A replay killed (-9) while servers start and twice in the middle of its requests: nothing is
    lost, nothing is doubled.
    """
    write_rollout(tmp_path)
    store_path = tmp_path / "speccheck-run" / "receipts.duckdb"
    rng = random.Random(1)
    seen: set[str] = set()
    cut = 0
    for words in ("waiting for the two servers", "temperature 0: ", "temperature 0.7: "):
        process = subprocess.Popen(
            [sys.executable, "-m", "speccheck", "stage", "replay"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if words in line:  # first of each phase: how many requests it will send
                break
        time.sleep(rng.uniform(0.2, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        kept = receipt_ids(store_path)
        assert seen <= kept, "a receipt was lost"
        cut += seen < kept
        seen = kept
    assert cut, "kills must come in mid-run, or nothing was shown"
    done = command("stage", "replay", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    with Store.read(store_path) as store:
        receipts = store.receipts(told["run_id"], stage="replay", warm_up=False)
        assert store.verify() == []
    ids = [r.receipt_id for r in receipts]
    assert len(ids) == len(set(ids))
    assert seen <= receipt_ids(store_path)
    # The route's six prompts: both arms at two temperatures, and the control.
    planned = [r for r in receipts if r.phase in ("greedy", "aa", "sampled")]
    assert len(planned) == 6 * 5
    assert {r.outcome for r in planned} == {"ok"}


def receipt_ids(path: Path) -> set[str]:
    """Receipt ids in a store that no process holds."""
    with Store.open(path) as store:
        return {r.receipt_id for run in store.runs() for r in store.receipts(run.run_id)}
