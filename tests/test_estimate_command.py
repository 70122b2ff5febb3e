"""`speccheck estimate`: what a user gives, sees and gets as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calibration import measured

from speccheck.cli import main
from speccheck.context import STORE_NAME
from speccheck.records import Arm
from speccheck.store import Run, Store
from speccheck.sweep.grid import load_name
from speccheck.sweep.rounds import ROUND_MARK
from speccheck.telemetry import Snapshot


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twelve answers that repeat their prompts, two tasks."""
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "id": f"p{i}",
            "task": ("code", "chat")[i % 2],
            "temperature": 0,
            "prompt_token_ids": (text := [(i * 7 + j * j) % 97 for j in range(40)]),
            "output_token_ids": [*text[2:30], 999, *text[5:20]],
        }
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def speccheck(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    told = json.loads(out.out) if "--json" in arguments else {}
    return int(ended.value.code or 0), out.out + out.err, told


def test_the_page_fits_80_columns_and_says_what_is_not_estimated(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every cohort and k with interval and n; no best k without costs."""
    code, text, _ = speccheck(capsys, "estimate", log, "--k", "2,8", "--ngram", "2-4")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("    k = 8 ") == 9
    assert "all answers: 12 prompts, 12 answers, 516 decode tokens" in text
    assert "Best k: not estimated without verify costs; give --costs" in text


def test_json_holds_every_number_with_its_interval(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight proposal lengths per method and cohort; with costs a best k in words and numbers."""
    code, _, told = speccheck(
        capsys, "estimate", log, "--json", "--verify-cost", "1:1.1,8:1.5", "--no-suffix"
    )
    assert code == 0
    assert [c["name"] for c in told["cohorts"]] == ["all answers", "chat, greedy", "code, greedy"]
    lines = told["cohorts"][0]["drafting"]
    assert [(d["method"], d["k"]) for d in lines] == [("ngram 5-5", k) for k in range(1, 9)]
    for d in lines:
        for name in ("acceptance", "coverage", "tokens_per_pass", "saved_share"):
            assert {"value", "low", "high", "n", "method", "alpha"} <= set(d[name])
        assert d["accepted"] <= d["drafted"]
    (best,) = told["cohorts"][0]["best"]
    assert best["load"] == "given costs"
    assert best["speedup"]["low"] > 1
    assert told["skipped"] == 0


def test_bad_lines_end_it_or_are_counted(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line and cause, exit 2; with --skip-bad their number."""
    log.write_text(log.read_text() + "\n{oops\n")
    code, text, _ = speccheck(capsys, "estimate", log)
    assert code == 2
    assert f"{log}:13: not JSON" in text
    code, text, _ = speccheck(capsys, "estimate", log, "--skip-bad", "--k", "2")
    assert code == 0
    assert "1 lines left out" in text


def test_texts_say_how_rough_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that came as text was cut into tokens again, by the packaged tokenizer."""
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "The cat sat.", "output": "The cat sat."}))
    _, text, _ = speccheck(capsys, "estimate", path, "--k", "1")
    assert "1 answers came as text" in text.replace("\n  ", " ")
    assert "packaged tokenizer" in text.replace("\n  ", " ")


def test_a_single_prompt_has_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cluster tells nothing of the spread: no infinities on the page, no best k claimed."""
    path = tmp_path / "log.jsonl"
    text = list(range(20))
    path.write_text(json.dumps({"prompt": [*text, 0], "output_token_ids": text[1:]}))
    code, page, _ = speccheck(
        capsys, "estimate", path, "--k", "2", "--ngram", "1", "--verify-cost", "2:1.1"
    )
    assert code == 0
    assert "inf" not in page
    assert "(no interval)" in page
    assert "open; k = 2" in page
    _, page, _ = speccheck(capsys, "estimate", path, "--k", "4", "--verify-cost", "2:1.1")
    assert "none is calibrated as far as these k" in page


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give LOGS, or --from-run DIR"),
        (["LOG", "--from-run", "x"], "give LOGS, or --from-run DIR"),
        (["LOG", "--k", "0"], "--k '0'"),
        (["LOG", "--k", "9-3"], "--k '9-3'"),
        (["LOG", "--ngram", "4-2"], "--ngram '4-2'"),
        (["LOG", "--verify-cost", "2"], "--verify-cost '2'"),
        (["LOG", "--draft-cost", "0.1"], "--draft-cost alone"),
        (["LOG", "--verify-cost", "2:1", "--costs", "x"], "not both"),
        (["none.jsonl"], "cannot be read"),
    ],
)
def test_a_wrong_option_is_one_line(
    log: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, and what to give instead."""
    code, text, _ = speccheck(capsys, "estimate", *[log if a == "LOG" else a for a in arguments])
    assert code == 2
    assert why in text
    assert "Traceback" not in text


def test_no_run_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--from-run of a folder without receipts could not look: exit 4."""
    code, text, _ = speccheck(capsys, "estimate", "--from-run", tmp_path)
    assert code == 4
    assert "no receipts there" in text


def test_costs_come_from_the_calibration_of_a_sweep(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V of prompt lookup at each batch size that was calibrated; late rounds do not count."""
    receipts = [
        replace(r, run_id="run:1", proposer="ngram" if r.proposer else None, route="batch")
        for r in measured(0.0, 0.05, 0.0, controls=())
    ]
    with Store.open(tmp_path / STORE_NAME) as store:
        store.begin_run(Run("run:1", 0, 1, "c", "r", {"rollout": {}}), wall_ns=0, clock_ns=0)
        store.append_receipts([(r, None) for r in receipts])
        for block in range(2):
            labels = (("block", str(block)), ("health", "ok"), ("load", load_name(receipts[0])))
            closed = Snapshot(block, {(ROUND_MARK, labels): 1.0})
            store.append_samples("run:1", Arm.TARGET_ONLY, [closed])
    code, _, told = speccheck(
        capsys, "estimate", log, "--json", "--no-suffix", "--costs", tmp_path, "--k", "2,4"
    )
    assert code == 0
    (best,) = told["cohorts"][0]["best"]
    assert best["load"] == "8 at once"
    line = told["cohorts"][0]["drafting"][1]
    tokens, passes = told["cohorts"][0]["decode_tokens"], line["passes"]
    assert line["speedup"]["8 at once"]["value"] == pytest.approx(
        tokens / (passes + 0.05 * line["drafted"]), rel=1e-3
    )
