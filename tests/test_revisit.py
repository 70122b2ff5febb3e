"""Revisits: what changed since is named, what did not is current, and the worst decides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_receipts import receipt

from speccheck import launch, stats
from speccheck.cli import main
from speccheck.config import Rollout
from speccheck.context import STORE_NAME
from speccheck.errors import EngineError
from speccheck.records import (
    Action,
    Arm,
    ArmDescription,
    Decision,
    Receipt,
    Stage,
    Verdict,
)
from speccheck.revisit import Item, Now, measured_traffic, mix, revisit, validity
from speccheck.store import Run, Store, read_receipts

TODAY = date(2026, 11, 29)
CREATED_NS = 1_795_910_400 * 10**9  # 2026-11-29
ROLLOUT: dict[str, Any] = {
    "name": "chat",
    "speculation": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "routes": [{"name": "chat", "tasks": ["*"]}],
}


def traffic(
    rng: np.random.Generator,
    n: int,
    *,
    code: float = 0.3,
    acceptance: float = 0.6,
    stage: str = "canary",
    prefix: str = "p",
) -> list[Receipt]:
    """Canary requests on the speculative arm, a share of them of task code."""
    return [
        replace(
            receipt(
                i,
                "speculative",
                stage=stage,
                phase="step-0",
                task="code" if rng.random() < code else "chat",
                accepted_tokens=int(rng.binomial(100, np.clip(rng.normal(acceptance, 0.08), 0, 1))),
            ),
            receipt_id=f"{prefix}{i}",
            prompt_id=f"{prefix}{i}",
            policy_version=Rollout.model_validate(ROLLOUT).policy_version,
        )
        for i in range(n)
    ]


def arms(**config: Any) -> launch.Arms:
    described = [
        ArmDescription(
            arm=arm,
            url="http://x",
            engine="vllm 0.32.0",
            model="acme/target",
            speculative_config=None
            if arm is Arm.TARGET_ONLY
            else {
                "method": "draft_model",
                "model": "acme/draft",
                "model_files": {"model.safetensors": "sha256:dd"},
            },
            config={"max_num_seqs": 64, "model_files": {"model.safetensors": "sha256:aa"}} | config,
        )
        for arm in Arm
    ]
    return launch.Arms(described[0], described[1])


def build(path: Path, **rollout: Any) -> None:
    """A store with a run that promoted the route chat on 400 canary requests."""
    config = {"rollout": json.loads(json.dumps({**ROLLOUT, **rollout}))}
    config["guardrails"] = {"speculative_decoding_guardrails": {}}
    pair = arms()
    rows = [
        replace(r, run_id="run:1", engine_config_id=pair.speculative.engine_config_id)
        for r in traffic(np.random.default_rng(1), 400)
    ]
    rows += [
        replace(
            r,
            receipt_id=f"t{r.receipt_id}",
            arm=Arm.TARGET_ONLY,
            engine_config_id=pair.target_only.engine_config_id,
            proposed_tokens=None,
            accepted_tokens=None,
        )
        for r in rows[:50]
    ]
    with Store.open(path) as store:
        run = Run("run:1", CREATED_NS, 1, "corpus:1", "rules:1", config)
        store.begin_run(run, wall_ns=CREATED_NS, clock_ns=0)
        for arm in pair:
            store.put_arm("run:1", arm)
        store.append_receipts([(r, None) for r in rows])
        promoted = Decision("chat", Action.PROMOTE, Stage.CANARY, "all pass", ())
        store.append_decision("run:1", promoted, decided_at_ns=CREATED_NS)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, made once."""
    path = tmp_path_factory.mktemp("decided") / STORE_NAME
    build(path, expires="2026-12-31")
    return path


@pytest.fixture
def decided(template: Path, tmp_path: Path) -> Iterator[tuple[Store, str]]:
    """A store of one's own, open, and its run."""
    path = tmp_path / STORE_NAME
    shutil.copyfile(template, path)
    store = Store.open(path)
    yield store, "run:1"
    store.close()


def looked(
    decided: tuple[Store, str], *, now: launch.Arms | EngineError | None = None, **parts: Any
) -> dict[str, Item]:
    """The counted items by name."""

    def look() -> launch.Arms:
        if isinstance(now, EngineError):
            raise now
        return now or arms()

    store, run_id = decided
    found = revisit(store, run_id, Now(arms=look, **parts), today=TODAY)
    return {item.name: item for item in found.items if item.counted} | {
        "": Item("", found.verdict, "")
    }


def test_nothing_changed_is_current(decided: tuple[Store, str]) -> None:
    """Same arms, same traffic: current, and what was not given is not counted."""
    items = looked(decided)
    assert {item.verdict for item in items.values()} == {Verdict.PASS}
    assert set(items) - {""} == {
        "expiry",
        "target",
        "draft",
        "target-only engine",
        "speculative engine",
    }


@pytest.mark.parametrize(
    ("change", "stale", "words"),
    [
        (
            {"model": "acme/target-v2"},
            {"target", "target-only engine", "speculative engine"},
            "model: acme/target then, acme/target-v2 now",
        ),
        (
            {"engine": "vllm 0.33.0"},
            {"target-only engine", "speculative engine"},
            "engine: vllm 0.32.0 then, vllm 0.33.0 now",
        ),
    ],
)
def test_a_changed_model_or_engine_is_stale(
    decided: tuple[Store, str], change: dict[str, str], stale: set[str], words: str
) -> None:
    """By name, with what it was and what it is."""
    pair = launch.Arms(*(replace(arm, **change) for arm in arms()))  # type: ignore[arg-type]
    items = looked(decided, now=pair)
    assert {name for name, item in items.items() if item.verdict is Verdict.FAIL} - {""} == stale
    assert words in items["speculative engine"].why
    assert items[""].verdict is Verdict.FAIL


def test_a_changed_draft_is_stale(decided: tuple[Store, str]) -> None:
    """The draft's weights under the same name: told by the digest of its files."""
    pair = arms()
    files = {"model_files": {"model.safetensors": "sha256:ee"}}
    spec = {**(pair.speculative.speculative_config or {}), **files}
    items = looked(
        decided,
        now=launch.Arms(pair.target_only, replace(pair.speculative, speculative_config=spec)),
    )
    assert items["draft"].verdict is Verdict.FAIL
    assert "sha256:dd" in items["draft"].why
    assert "sha256:ee" in items["draft"].why
    assert items["target"].verdict is Verdict.PASS


def test_another_setting_is_named(decided: tuple[Store, str]) -> None:
    """A changed key of the captured configuration, by its dotted name."""
    items = looked(decided, now=arms(max_num_seqs=32))
    assert items["target-only engine"].why == "max_num_seqs: 64 then, 32 now"


def test_a_server_that_does_not_answer_could_not_be_looked_at(
    decided: tuple[Store, str],
) -> None:
    """Not current, not stale: an error, with the server's own words; stale still wins over it."""
    silent = EngineError("http://x/v1/models: no answer (refused); is the server running?")
    store = decided
    items = looked(store, now=silent)
    assert items["engines"].verdict is Verdict.ERROR
    assert "no answer (refused)" in items["engines"].why
    assert items[""].verdict is Verdict.ERROR
    assert looked(store, now=silent, expires=date(2026, 11, 1))[""].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("expires", "verdict", "words"),
    [
        (None, Verdict.PASS, "no date is set"),
        (date(2026, 11, 29), Verdict.PASS, "0 days"),
        (date(2026, 11, 28), Verdict.FAIL, "expired on 2026-11-28"),
    ],
)
def test_the_expiry_date_is_the_last_day(
    decided: tuple[Store, str], expires: date | None, verdict: Verdict, words: str
) -> None:
    """It holds through its date; the date of today is given, never read."""
    item = looked(decided, expires=expires)["expiry"]
    assert item.verdict is verdict
    assert words in item.why


def test_changed_files_are_named(decided: tuple[Store, str]) -> None:
    """Policy, rules and corpus, by digest."""
    policy = Rollout.model_validate(ROLLOUT).policy_version
    items = looked(decided, files={"policy": policy, "rules": "rules:2", "corpus": "corpus:1"})
    assert items["policy"].verdict is items["corpus"].verdict is Verdict.PASS
    assert items["rules"].why == "rules:1 then, rules:2 now"


# --- traffic ------------------------------------------------------------------------------------


def test_the_same_traffic_is_current(decided: tuple[Store, str]) -> None:
    """Another draw of the same mix and the same acceptance, with its numbers."""
    recent = traffic(np.random.default_rng(2), 800, prefix="r")
    items = looked(decided, receipts=recent)
    assert items["traffic mix"].verdict is Verdict.PASS, items["traffic mix"].why
    assert "n 450 then, 800 now" in items["traffic mix"].why
    drift = [item for name, item in items.items() if name.startswith("acceptance, ")]
    assert len(drift) == 2
    assert {item.verdict for item in drift} == {Verdict.PASS}, [item.why for item in drift]


def test_a_shifted_mix_is_stale_and_acceptance_within_cohorts_is_not(
    decided: tuple[Store, str],
) -> None:
    """Code from 30 % to 70 %: the mix moved, each cohort accepts as before."""
    recent = traffic(np.random.default_rng(3), 800, code=0.7, prefix="r")
    items = looked(decided, receipts=recent)
    assert items["traffic mix"].verdict is Verdict.FAIL
    assert "chi-square" in items["traffic mix"].why
    assert "most: chat, " in items["traffic mix"].why
    drift = [item for name, item in items.items() if name.startswith("acceptance, ")]
    assert {item.verdict for item in drift} == {Verdict.PASS}


@pytest.mark.parametrize("phase", ["sampled-confirm", "slice-penalties"])
def test_reruns_and_slices_of_a_replay_are_not_the_acceptance_that_was_measured(
    decided: tuple[Store, str], phase: str
) -> None:
    """What asks suspects again, or with odd options, says nothing of how traffic accepts."""
    recent = traffic(np.random.default_rng(3), 800, prefix="r")
    other = traffic(np.random.default_rng(5), 400, acceptance=0.1, stage="replay", prefix="x")
    decided[0].append_receipts([(replace(r, run_id="run:1", phase=phase), None) for r in other])
    items = looked(decided, receipts=recent)
    drift = [item for name, item in items.items() if name.startswith("acceptance, ")]
    assert {item.verdict for item in drift} == {Verdict.PASS}


def test_drifted_acceptance_is_stale_and_the_mix_is_not(
    decided: tuple[Store, str],
) -> None:
    """Acceptance from .6 to .4 in every cohort: named per cohort, with the interval."""
    recent = traffic(np.random.default_rng(4), 800, acceptance=0.4, prefix="r")
    items = looked(decided, receipts=recent)
    assert items["traffic mix"].verdict is Verdict.PASS
    drift = [item for name, item in items.items() if name.startswith("acceptance, ")]
    assert {item.verdict for item in drift} == {Verdict.FAIL}
    for item in drift:
        assert item.estimate is not None
        assert item.estimate.high < -0.1


def test_little_traffic_is_too_little_evidence(
    decided: tuple[Store, str],
) -> None:
    """Forty recent requests decide neither: inconclusive, and how many are needed."""
    items = looked(decided, receipts=traffic(np.random.default_rng(5), 40, prefix="r"))
    assert items["traffic mix"].verdict is Verdict.INCONCLUSIVE
    assert "100 of each are needed" in items["traffic mix"].why
    assert items[""].verdict is Verdict.INCONCLUSIVE


def test_traffic_that_was_never_measured_is_stale(
    decided: tuple[Store, str],
) -> None:
    """A new cohort of the same route with more than 5 % of the requests."""
    rng = np.random.default_rng(6)
    new = [replace(r, prompt_band=">=4096") for r in traffic(rng, 80, prefix="n")]
    items = looked(decided, receipts=[*traffic(rng, 720, prefix="r"), *new])
    assert items["traffic mix"].verdict is Verdict.FAIL
    assert "10% of it was never measured, such as chat, greedy, >=4096" in items["traffic mix"].why


def test_false_alarms_stay_below_the_level() -> None:
    """Two draws of one mix, 300 times: stale by total variation at most 1 % of the time or so,
    and the upper limit holds the truth (0) always.
    """
    rng = np.random.default_rng(7)
    shares = [0.4, 0.3, 0.15, 0.1, 0.05]
    alarms = 0
    for _ in range(300):
        a, b = rng.multinomial(200, shares), rng.multinomial(200, shares)
        estimate = stats.total_variation(a, b, rng=rng, alpha=0.01, draws=500)
        alarms += estimate.low > 0.05
    assert alarms <= 3


def test_total_variation_and_homogeneity_agree_with_scipy() -> None:
    """Chi-square of a 2 x 3 table as scipy has it; the value of a worked example."""
    from scipy.stats import chi2_contingency

    a, b = [50, 30, 20], [80, 90, 30]
    expected = chi2_contingency([a, b], correction=False)
    statistic, p = stats.homogeneity(a, b)
    assert statistic == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue)
    found = stats.total_variation(a, b, rng=np.random.default_rng(0), alpha=0.05)
    assert found.value == pytest.approx((0.1 + 0.15 + 0.05) / 2)
    assert found.low < found.value < found.high


def test_the_difference_of_two_estimates_covers() -> None:
    """Two clustered ratios of one acceptance, 400 times: the 90 % interval of their difference
    holds 0 in 85 to 95 % of them.
    """
    rng = np.random.default_rng(8)
    held = 0
    for _ in range(400):
        sides = []
        for n in (60, 120):
            rate = np.clip(rng.normal(0.6, 0.15, n), 0, 1)
            sides.append(stats.acceptance_rate(rng.binomial(40, rate), np.full(n, 40), alpha=0.05))
        change = stats.difference(*sides)
        held += change.low <= 0 <= change.high
    assert 340 <= held <= 380
    with pytest.raises(ValueError, match="different levels"):
        stats.difference(sides[0], stats.acceptance_rate([1, 2], [3, 3], alpha=0.01))


def test_the_mix_counts_each_request_once() -> None:
    """The canary if there is one, else shadow without its mirror, else target-only replay."""
    canary = traffic(np.random.default_rng(9), 10)
    mirrored = [replace(r, stage="shadow", mirror=True) for r in canary]
    shadow = [replace(r, stage="shadow", arm=Arm.TARGET_ONLY) for r in canary]
    assert measured_traffic([*canary, *shadow, *mirrored]) == canary
    assert measured_traffic([*shadow, *mirrored]) == shadow
    replayed = [replace(r, stage="replay", phase="greedy", arm=arm) for r in canary for arm in Arm]
    assert len(measured_traffic(replayed)) == 10
    shares = mix(canary)
    assert sum(share.n for share in shares) == 10
    assert sum(share.share for share in shares) == pytest.approx(1)


# --- files and commands -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_exported_receipts_come_back_as_they_were(
    decided: tuple[Store, str], tmp_path: Path, ending: str
) -> None:
    """What `receipts export` writes is what revisit reads."""
    store, run_id = decided
    path = tmp_path / f"recent.{ending}"
    store.export(path, ending, run_id=run_id)  # type: ignore[arg-type]
    assert read_receipts(path) == store.receipts(run_id)


def test_the_packet_says_how_long_it_holds(decided: tuple[Store, str]) -> None:
    """A date, days from the beginning, or until something changes."""
    changed = "something it rests on changes (speccheck revisit tells)"
    for expires, wanted in (
        (None, changed),
        (30, f"2026-12-29, or until {changed}"),
        ("2027-01-31", f"2027-01-31, or until {changed}"),
    ):
        run = Run("run:2", CREATED_NS, 1, "c", "r", {"rollout": {"expires": expires}})
        assert validity(run) == wanted


def speccheck(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    told = json.loads(out.out) if "--json" in arguments else {}
    return int(ended.value.code or 0), out.out + out.err, told


def test_the_command_tells_and_exits_accordingly(
    decided: tuple[Store, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text, JSON and exit code agree: 0 current, 1 stale, 3 too little, 4 could not look."""
    store, run_id = decided
    recent = tmp_path / "recent.parquet"
    store.export(recent, "parquet", run_id=run_id)
    store.close()
    monkeypatch.setattr(launch, "describe", lambda _rollout, _then: arms())
    base = ("revisit", "--out", tmp_path, "--today", "2026-11-30")
    code, text, _ = speccheck(capsys, *base, "--receipts", recent)
    assert code == 0, text
    assert text.startswith("✓ current: ")
    assert max(map(len, text.splitlines())) <= 80
    code, text, told = speccheck(capsys, *base, "--json")
    assert (code, told["verdict"], told["exit_code"]) == (0, "current", 0)
    assert {item["verdict"] for item in told["items"]} == {"current", "not_compared"}
    code, text, told = speccheck(capsys, *base[:-1], "2027-01-01", "--json")
    assert (code, told["verdict"]) == (1, "stale")
    code, text, _ = speccheck(
        capsys, *base, "--receipts", recent, "--max-drift", "1%", "--max-shift", "1%"
    )
    assert code == 3
    assert text.startswith("? too little evidence: ")

    other = tmp_path / "later"
    other.mkdir()
    shutil.copyfile(tmp_path / STORE_NAME, other / STORE_NAME)
    code, text, _ = speccheck(capsys, *base, "--receipts", other)
    assert code == 0, text
    code, text, _ = speccheck(capsys, *base, "--receipts", tmp_path)
    assert code == 2
    assert "that is the run itself" in text

    def silent(rollout: Rollout, then: launch.Arms | None) -> launch.Arms:
        raise EngineError("no answer")

    monkeypatch.setattr(launch, "describe", silent)
    code, text, told = speccheck(capsys, *base, "--json")
    assert (code, told["verdict"]) == (4, "could_not_look")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--today", "soon"], "--today 'soon'"),
        (["--max-shift", "150%"], "--max-shift 150%"),
        (["--max-drift", "much"], "--max-drift"),
        (["--receipts", "none.parquet"], "no such file"),
        (["--receipts", "none.xls"], "name a .parquet, .jsonl or .csv"),
    ],
)
def test_a_wrong_option_is_one_line(
    decided: tuple[Store, str],
    tmp_path: Path,
    arguments: Sequence[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 2, and what to give instead."""
    decided[0].close()
    code, text, _ = speccheck(capsys, "revisit", "--out", tmp_path, *arguments)
    assert code == 2
    assert why in text
    assert "Traceback" not in text


def test_receipts_of_something_else_are_refused(
    decided: tuple[Store, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CSV that holds no receipts is named, not guessed at."""
    decided[0].close()
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    code, text, _ = speccheck(capsys, "revisit", "--out", tmp_path, "--receipts", other)
    assert code == 2
    assert "not receipts" in text


def test_a_run_that_decided_nothing_has_nothing_to_revisit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said so, exit 2."""
    with Store.open(tmp_path / STORE_NAME) as store:
        run = Run("run:1", CREATED_NS, 1, "c", "r", {"rollout": ROLLOUT})
        store.begin_run(run, wall_ns=0, clock_ns=0)
    code, text, _ = speccheck(capsys, "revisit", "--out", tmp_path)
    assert code == 2
    assert "has decided nothing yet" in text
