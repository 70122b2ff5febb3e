"""`speccheck matrix` and `speccheck explain`: read, propose, accept, ask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rule_receipts import pair, pairs

from speccheck.cli import main
from speccheck.config import load_rollout, package_dir
from speccheck.context import STORE_NAME, read_policy, read_rollout
from speccheck.eligibility import Facts, decide, load_eligibility
from speccheck.records import Finding, Stage, Verdict
from speccheck.store import Run, StageResult, Store

ROLLOUT = """\
name: test
speculation: {method: draft_model, model: packaged, num_speculative_tokens: 4}
guardrails: packaged   # ours
routes:
  - {name: chat, tasks: [support, json]}
"""

REFUSED = {
    "outcome": "rejected",
    "error_class": "unsupported_parameter",
    "error_message": "min_p is not supported with speculative decoding",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rollout and a run: json pays, sql does not, min_p is refused, sampled text is lost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "rollout.yaml").write_text(ROLLOUT, encoding="utf-8")
    rng = np.random.default_rng(3)
    receipts = pairs(rng, 60, task="json", speculative_ms=10)
    receipts += pairs(rng, 60, first=60, task="sql", speculative_ms=30)
    for i in range(200, 230):
        receipts += pair(i, target={}, speculative=REFUSED, min_p=0.1, features="min_p")
    with Store.open(tmp_path / "speccheck-run" / STORE_NAME) as store:
        run = Run(
            run_id="run:1",
            created_at_ns=1,
            seed=1,
            corpus_digest="corpus:1",
            rules_digest="rules:1",
            config={
                "rollout": load_rollout(tmp_path / "rollout.yaml").model_dump(mode="json"),
                "guardrails": {"speculative_decoding_guardrails": {"min_speedup": 1.05}},
            },
        )
        store.begin_run(run, wall_ns=1, clock_ns=0)
        store.append_receipts([(replace(r, run_id="run:1"), None) for r in receipts])
        failed = Finding(
            "max_lossless_violations",
            Verdict.FAIL,
            "chat",
            "temperature 0.7",
            "replay",
            None,
            0.0,
            "count",
            "2 lossless violations in 30",
        )
        store.put_findings("run:1", Stage.REPLAY, [failed])
        health = {"client_health": {"valid": True, "is_late": False, "reasons": []}}
        evidence = {"verdict": "pass", "reasons": [], "evidence": {}, **health}
        store.put_stage(StageResult("run:1", Stage.SHADOW, 1, Verdict.PASS, evidence))
    return tmp_path


@pytest.fixture(autouse=True)
def _made(tmp_path: Path) -> None:
    (tmp_path / "speccheck-run").mkdir(exist_ok=True)


def speccheck(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_matrix_reads_on_eighty_columns(folder: Path, capsys) -> None:
    """Verdict, cohort, number with interval and reason; what follows; nothing is too wide."""
    code, page, _ = speccheck(capsys, "matrix")
    assert code == 0
    assert all(len(line) <= 80 for line in page.splitlines())
    assert "✓ speculate, k 4: shadow, json" in page
    assert "– target-only: shadow, sql" in page
    assert "with k 4 requests take" in page
    flat = " ".join(page.split())
    assert "Do: route chat: keep requests with min_p on target-only" in flat
    assert "chat: 1 speculate (" in page


def test_the_matrix_is_json(folder: Path, capsys) -> None:
    """The rows as the packet has them, with verdicts, intervals and observed values."""
    _, out, _ = speccheck(capsys, "matrix", "--json")
    told = json.loads(out)
    rows = {row["cohort"]["task"]: row for row in told["rows"] if row["n_pairs"]}
    assert rows["json"]["verdict"] == "speculate"
    assert rows["json"]["e2e_ratio"]["n"] == 60
    assert rows["json"]["spans"]["temperature"] == [0, 0]
    assert told["refusals"][0]["options"] == ["min_p"]


def test_nothing_is_written_before_it_is_accepted(folder: Path, capsys) -> None:
    """--propose shows a diff of both files and touches neither."""
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    code, diff, err = speccheck(capsys, "matrix", "--propose")
    assert code == 0
    assert "nothing was written" in err
    assert "--- /dev/null" in diff
    assert "+eligibility: eligibility.yaml" in diff
    assert "guardrails: packaged   # ours" in diff
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_what_is_accepted_is_what_the_next_run_obeys(folder: Path, capsys) -> None:
    """The policy loads with the rollout, says what was measured, and is proposed no second time."""
    _, proposed, _ = speccheck(capsys, "matrix", "--propose")
    code, accepted, err = speccheck(capsys, "matrix", "--accept")
    assert (code, accepted) == (0, proposed)
    assert "wrote eligibility.yaml" in err
    assert "wrote rollout.yaml" in err
    rollout, _, corpus = read_rollout(Path("rollout.yaml"))
    assert rollout.eligibility == "eligibility.yaml"
    policy = read_policy(Path("rollout.yaml"), rollout, corpus)
    usual = Facts(
        route="chat",
        task="json",
        priority="normal",
        prompt_tokens=100,
        temperature=0.0,
        features=frozenset(),
        concurrency=1,
    )
    assert decide(policy, usual).k == 4
    assert not decide(policy, replace(usual, task="sql")).speculates
    assert "max_lossless_violations" in decide(policy, replace(usual, temperature=0.7)).reason
    assert "refuses" in decide(policy, replace(usual, features=frozenset({"min_p"}))).reason
    text = (folder / "eligibility.yaml").read_text(encoding="utf-8")
    assert "2 lossless violations in 30" in text
    _, again, err = speccheck(capsys, "matrix", "--propose")
    assert again == ""
    assert "nothing to propose" in err


def test_the_packaged_policy_is_not_written_into(folder: Path, capsys) -> None:
    """A rollout that names it gets a file of its own."""
    packaged = package_dir("rules") / "eligibility.yaml"
    before = packaged.read_bytes()
    path = folder / "rollout.yaml"
    path.write_text(f"eligibility: packaged\n{ROLLOUT}", encoding="utf-8")
    speccheck(capsys, "matrix", "--accept")
    assert packaged.read_bytes() == before
    assert path.read_text(encoding="utf-8").startswith("eligibility: eligibility.yaml\n")
    assert load_eligibility(folder / "eligibility.yaml").rules


def test_the_proposal_is_json_too(folder: Path, capsys) -> None:
    """Diff, policy and what was written."""
    _, out, _ = speccheck(capsys, "matrix", "--propose", "--json")
    told = json.loads(out)
    assert told["written"] == []
    assert told["policy"]["rules"][-1]["name"] == "chat: the rest"
    assert told["diff"].startswith("--- /dev/null")


def test_a_proposal_for_another_rollout_is_refused(folder: Path, capsys) -> None:
    """Routes that the run does not know cannot be decided from it."""
    (folder / "rollout.yaml").write_text(ROLLOUT.replace("chat", "talk"), encoding="utf-8")
    code, _, err = speccheck(capsys, "matrix", "--propose")
    assert code == 2
    assert "not those of run run:1" in err


def test_a_run_that_measured_nothing_has_no_matrix(folder: Path, capsys) -> None:
    """Exit code 4, and what to run."""
    with Store.open(folder / "speccheck-run" / STORE_NAME) as store:
        empty = replace(store.run("run:1"), run_id="run:2", created_at_ns=2)
        store.begin_run(empty, wall_ns=2, clock_ns=0)
    code, _, err = speccheck(capsys, "matrix")
    assert code == 4
    assert "speccheck sweep" in err


# --- explain ------------------------------------------------------------------------------------


def test_explain_says_it_in_one_line(folder: Path, capsys) -> None:
    """Arm and k, the rule, why, and the policy version; the load where it matters."""
    speccheck(capsys, "matrix", "--accept")
    _, line, _ = speccheck(capsys, "explain", "--prompt-id", "json-003")
    assert len(line.splitlines()) == 1
    assert "prompt_tokens" not in line
    short = ("--prompt", "word " * 70, "--task", "json")
    _, line, _ = speccheck(capsys, "explain", *short)
    assert line.startswith("speculate with k 4 up to concurrency")
    assert "e2e" in line
    assert line.rstrip().endswith("]")
    assert "[policy:" in line
    _, line, _ = speccheck(capsys, "explain", *short, "--concurrency", "500")
    assert line.startswith("target-only: ")
    _, line, _ = speccheck(capsys, "explain", *short, "--temperature", "0.7")
    assert "max_lossless_violations failed in replay" in line
    _, line, _ = speccheck(capsys, "explain", *short, "--feature", "min_p")
    assert "the speculative server refuses 30 of 150 requests for it" in line


def test_explain_without_a_policy(folder: Path, capsys) -> None:
    """All of every route may speculate then, and the line says so."""
    _, line, _ = speccheck(capsys, "explain")
    assert "names no eligibility policy" in line


def test_explain_is_json_with_its_facts(folder: Path, capsys) -> None:
    """What went into the choice stands beside it."""
    speccheck(capsys, "matrix", "--accept")
    arguments = ("explain", "--prompt", "word " * 70, "--task", "json", "--concurrency", "1")
    _, out, _ = speccheck(capsys, *arguments, "--json")
    told = json.loads(out)
    assert (told["use"], told["k"]) == ("speculate", 4)
    assert told["facts"]["prompt_tokens"] > 64
    assert told["facts"]["features"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "x", "--prompt-id", "y"), "one of them"),
        (("--prompt-id", "nobody"), "no prompt 'nobody'"),
        (("--route", "talk"), "no route 'talk'"),
    ],
)
def test_explain_refuses_what_it_cannot_answer(folder: Path, capsys, arguments, words) -> None:
    """One line, exit code 2."""
    code, _, err = speccheck(capsys, "explain", *arguments)
    assert code == 2
    assert words in err
