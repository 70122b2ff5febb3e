"""What replay sends because of the answers it got, and what it makes of them, over the network."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from attached_pair import attached_pair
from field import PATIENT, Model, Product, Say, corpus, script_of
from scripted_server import refusal, spec_metrics

from speccheck.records import Arm
from speccheck.store import Store

RULES = [{"name": "chat", "rules": {"max_quality_regression_cases": 0}}]
OFF = {"slices": "off", "probe": {"samples": 0}}
REPLAY = {"warm_up": 0, "client_limits": PATIENT, "routes": RULES, "replay": OFF}


@pytest.fixture
def product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Product:
    return Product(tmp_path, capsys)


def receipts(product: Product) -> list[Any]:
    with Store.read(product.folder / "run" / "receipts.duckdb") as store:
        (run,) = store.runs()
        return [r for r in store.receipts(run.run_id) if r.stage == "replay"]


def finding(told, rule: str, words: str = "") -> dict[str, Any]:
    """The worst finding of a rule whose slice has these words in its name."""
    (made,) = told.json["decisions"]
    return next(f for f in made["findings"] if f["rule"] == rule and words in f["cohort"])


# --- cases from the field -----------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_t15_json_that_breaks_beside_reasoning_names_its_slice(product: Product) -> None:
    """29 of 30 against 17 of 30 with reasoning, 30 of 30 without, HTTP 200 throughout: 12 new
    regressions in one slice; an error rate of 0 is no evidence of health.
    """

    def says(i: int, valid: int, body: dict[str, Any], metrics: Any = None) -> Say:
        reasons = i < 30
        broken = reasons and i >= valid and not body["temperature"]
        text = f'{{"n": {i}' if broken else f'{{"n": {i}}}'
        return Say(text, [1, 2, 3], metrics=metrics, reasoning_tokens=2 if reasons else 0)

    metrics = spec_metrics([(1, 2)], 2)
    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, b: says(i, 29, b)),
        speculative=Model(lambda i, _n, b: says(i, 17, b, metrics)),
        **REPLAY,
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        corpus(
            product.folder,
            60,
            response_format=form,
            check=lambda i: {"kind": "json_schema", "schema": SCHEMA, "expect": {"n": i}},
        )
        told = product.stage("replay")
    assert (told.code, told.action) == (1, "fall_back")
    cases = finding(told, "max_quality_regression_cases")
    assert "12 confirmed regressions in 60 cases" in cases["why"]
    slices = finding(told, "max_quality_regression_cases", "with reasoning")
    assert slices["cohort"] == "temperature 0, with reasoning"
    assert slices["estimate"]["value"] == 12
    assert "12 of the regressions are in the slice with reasoning (30 cases)" in told.reason
    drift = finding(told, "max_output_drift", "malformed JSON, with reasoning")
    assert drift["verdict"] == "fail"
    assert "13 of 60 answers, target-only 1" in drift["why"], "at two temperatures"
    assert {r.outcome for r in receipts(product)} == {"ok"}


def test_t17_a_penalty_without_effect_is_a_class_to_block(product: Product) -> None:
    """1 of 60 against 19 of 60 answers run to the token limit, and only those with the penalty;
    nothing grades them, and it is told all the same.
    """

    def says(i: int, cut: int) -> Say:
        if i < cut:
            return Say("word " * 100, list(range(100)), "length")
        return Say(f"an answer {i}", [1, 2, 3])

    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _b: says(i, 1)),
        speculative=Model(lambda i, _n, _b: says(i, 19)),
        **REPLAY,
    ):
        corpus(
            product.folder,
            120,
            features=lambda i: ["repetition_penalty"] if i < 60 else [],
            check=lambda i: (
                {"kind": "none"} if i < 60 else {"kind": "exact", "answer": f"an answer {i}"}
            ),
        )
        told = product.stage("replay")
    assert (told.code, told.action) == (1, "fall_back")
    drift = finding(told, "max_output_drift", "repetition_penalty")
    assert drift["cohort"] == "cut at the token limit, repetition_penalty"
    assert "38 of 120 answers, target-only 2" in drift["why"], "at two temperatures"
    assert finding(told, "max_quality_regression_cases")["verdict"] == "pass"


# --- conversations ------------------------------------------------------------------------------


def test_later_turns_are_sent_with_the_arms_own_answers(product: Product) -> None:
    """Each arm, the A/A control and each temperature go on from what they themselves said."""

    def server(arm: str):
        def script(body: dict[str, Any], n: int):
            said = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
            hot = "hot" if body["temperature"] else "cold"
            return script_of(Say(f"{arm} {hot} turn {len(said) + 1} call {n}", [1, 2]), [7])

        return script

    with attached_pair(
        product.folder, target=server("T"), speculative=server("S"), **REPLAY
    ) as pair:
        corpus(
            product.folder,
            3,
            follow_up=lambda i: ["second?", "third?"] if i < 2 else [],
            follow_checks=lambda i: (
                [{"kind": "none"}, {"kind": "contains", "any": ["turn 3"]}] if i < 2 else []
            ),
        )
        told = product.stage("replay")
        sent = {
            arm: [s for s in server.seen if "messages" in s.body and s.body["max_tokens"] > 1]
            for arm, server in pair.servers.items()
        }
        again = product.stage("replay")
    assert again.json["decisions"] == told.json["decisions"]
    for arm, letter, phases in ((Arm.TARGET_ONLY, "T", 3), (Arm.SPECULATIVE, "S", 2)):
        lengths = Counter(len(s.body["messages"]) for s in sent[arm])
        assert lengths == {1: 3 * phases, 3: 2 * phases, 5: 2 * phases}
        for seen in sent[arm]:
            answers = [m for m in seen.body["messages"] if m["role"] == "assistant"]
            hot = "hot" if seen.body["temperature"] else "cold"
            for turn, message in enumerate(answers, 1):
                assert message["content"].startswith(f"{letter} {hot} turn {turn}")
            roles = [m["role"] for m in seen.body["messages"]]
            assert roles == ["user", "assistant"] * len(answers) + ["user"]
    # The control's second turn follows its own first turn, not the first run's.
    cold = [
        [m["content"] for m in s.body["messages"][1::2]]
        for s in sent[Arm.TARGET_ONLY]
        if not s.body["temperature"] and len(s.body["messages"]) == 5
    ]
    assert len({tuple(said) for said in cold}) == 4
    kept = Counter((r.prompt_id, r.phase, r.arm) for r in receipts(product))
    assert kept["p0#3", "aa", "target_only"] == 1
    assert kept["p1#2", "sampled", "speculative"] == 1
    assert "p2#2" not in {r.prompt_id for r in receipts(product)}
    assert (
        "0 confirmed regressions in 2 cases" in finding(told, "max_quality_regression_cases")["why"]
    )


def test_a_turn_without_its_history_is_not_sent(product: Product) -> None:
    """Where the first answer failed there is nothing to go on from: no receipt, no case."""

    def speculative(body: dict[str, Any], _n: int):
        if "question 0" in json.dumps(body["messages"][0]):
            return refusal(500, "broken")
        return script_of(Say("fine", [1]), [7])

    with attached_pair(
        product.folder,
        target=lambda _b, _n: script_of(Say("fine", [1]), [7]),
        speculative=speculative,
        **REPLAY,
    ):
        corpus(product.folder, 2, follow_up=["go on"])
        product.stage("replay")
    seconds = {(r.prompt_id, r.arm) for r in receipts(product) if r.prompt_id.endswith("#2")}
    assert seconds == {("p0#2", "target_only"), ("p1#2", "target_only"), ("p1#2", "speculative")}


# --- reruns -------------------------------------------------------------------------------------


def test_reruns_stop_where_an_arm_contradicts_itself(product: Product) -> None:
    """A broken prompt is run K times on both arms, one that flips is dropped at its first rerun,
    one that gets better is confirmed as well, and agreeing ones are not run again.
    """

    def target(i: int, n: int, _b: dict[str, Any]) -> Say:
        return Say("wrong" if i == 2 else "right", [1, n % 2, 3] if i == 1 else [1, 2, 3])

    def speculative(i: int, n: int, b: dict[str, Any]) -> Say:
        wrong = i == 0 or (i == 1 and n == 0 and not b["temperature"])
        return Say("wrong" if wrong else "right", [1, 5, 3])

    with attached_pair(
        product.folder,
        target=Model(target),
        speculative=Model(speculative),
        **REPLAY,
    ):
        corpus(product.folder, 12, check={"kind": "exact", "answer": "right"})
        told = product.stage("replay")
    runs = Counter((r.prompt_id, r.phase, r.arm) for r in receipts(product))
    for arm in Arm:
        assert runs["p0", "greedy-confirm", arm] == 3, "4 runs at temperature 0 for 12 cases"
        assert runs["p1", "greedy-confirm", arm] == 1
        assert runs["p2", "greedy-confirm", arm] == 3
        assert runs["p0", "sampled-confirm", arm] == 4, "5 sampled runs for 12 cases"
        assert runs["p3", "greedy-confirm", arm] == 0
    why = finding(told, "max_quality_regression_cases")["why"]
    assert "1 confirmed regressions in 12 cases; 1 confirmed improvements" in why
    assert "1 unstable and not counted" in why
    assert told.action == "fall_back"


def test_a_rerun_that_breaks_off_clears_nothing(product: Product) -> None:
    """A regression whose reruns the speculative arm answers with an error stays open."""

    def target(_i: int, _n: int, _b: dict[str, Any]) -> Say:
        return Say("right", [1, 2])

    def speculative(body: dict[str, Any], n: int):
        if "messages" in body and n >= 24:
            return refusal(500, "out of order")
        broken = "question 0" in json.dumps(body["messages"])
        return script_of(Say("wrong" if broken else "right", [1, 2]), [7])

    with attached_pair(product.folder, target=Model(target), speculative=speculative, **REPLAY):
        corpus(product.folder, 12, check={"kind": "exact", "answer": "right"})
        told = product.stage("replay")
    found = finding(told, "max_quality_regression_cases")
    assert found["verdict"] == "inconclusive"
    assert "1 became worse but were not run 4 times on both arms" in found["why"]


def test_an_answer_that_ends_wrongly_is_a_wrong_answer(product: Product) -> None:
    """Right words that run past the stop string, or over the token limit, fail their check."""

    def speculative(i: int, _n: int, _b: dict[str, Any]) -> Say:
        if i == 0:
            return Say("right END and more", [1, 2])
        return Say("right", list(range(101)) if i == 1 else [1, 2])

    with attached_pair(
        product.folder,
        target=Model(lambda _i, _n, _b: Say("right", [1, 2])),
        speculative=Model(speculative),
        **REPLAY,
    ):
        corpus(product.folder, 30, stop=["END"], check={"kind": "contains", "any": ["right"]})
        told = product.stage("replay")
        product.run("packet")
    assert "2 confirmed regressions in 30" in finding(told, "max_quality_regression_cases")["why"]
    packet = json.loads((product.folder / "run" / "packet.json").read_text(encoding="utf-8"))
    reasons = {r["reason"] for r in packet["replay"]["regressions"]}
    assert reasons == {
        "the text runs past the stop string 'END'",
        "101 tokens were returned, 100 allowed",
    }
    (at_zero, _) = packet["replay"]["form"]
    assert [(f["fault"], f["only_speculative"]) for f in at_zero["faults"]] == [("wrong ending", 2)]


def test_numerical_ties_may_be_left_to_the_aggregate(product: Product) -> None:
    """A confirmed regression that begins at a tie counts by default, and does not where the rollout
    says aggregate_only; it is shown with its label either way.
    """

    def run(ties: str) -> Any:
        folder = product.folder / ties
        folder.mkdir()
        metrics = spec_metrics([(1, 2)], 2)
        with attached_pair(
            folder,
            target=Model(lambda _i, _n, _b: Say("right", [1, 2, 3] * 30), noise=0.002),
            speculative=Model(
                lambda i, _n, b: (
                    Say("wrong", [1, 3, 3], metrics=metrics)
                    if i == 0 and not b["temperature"]
                    else Say("right", [1, 2, 3] * 30, metrics=metrics)
                ),
                {(0, 1): 0.001},
            ),
            **REPLAY | {"replay": OFF | {"ties": ties}},
        ) as pair:
            pair.servers[Arm.TARGET_ONLY].script.gaps = {(0, 1): 0.001}
            corpus(folder, 30, check={"kind": "exact", "answer": "right"})
            return Product(folder, product.capsys).stage("replay")

    counted, left = (
        finding(run(ties), "max_quality_regression_cases") for ties in ("count", "aggregate_only")
    )
    assert counted["verdict"] == "fail"
    assert "1 confirmed regressions in 30 cases (1 at numerical ties)" in counted["why"]
    assert left["verdict"] == "pass"
    assert "(1 at numerical ties, which are left to the aggregate)" in left["why"]


def test_a_broken_check_is_told_before_anything_is_sent(product: Product) -> None:
    """A gold query that does not run names its prompt, and no server hears of it."""
    with attached_pair(product.folder, **REPLAY) as pair:
        broken = {"kind": "sql", "setup": "CREATE TABLE t (a INT)", "gold": "SELECT b FROM t"}
        corpus(product.folder, 3, check=lambda i: broken if i == 2 else {"kind": "none"})
        told = product.run("stage", "replay", "--rollout", str(pair.rollout), "--keep-going")
        assert told.code == 2
        assert "prompt p2: check of kind 'sql': setup or gold query fails" in told.json["error"]
        assert not any(server.seen for server in pair.servers.values())
