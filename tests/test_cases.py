"""The cases from the field (CASES.md), from the network to the words that a user reads.

Each feeds a reported situation in through a real interface (server replies, metrics text, receipts,
configuration) and holds the product to what ought to be said about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attached_pair import ROLLOUT, Pair, attached_pair
from field import PATIENT, Model, Product, Say, Seen, Told, corpus, observe, slowed
from scripted_server import spec_metrics
from test_cells import T09, swept

from speccheck.config import Rollout, load_guardrails
from speccheck.context import STORE_NAME
from speccheck.records import Arm, PlannedRequest, Receipt
from speccheck.store import Run, Store
from speccheck.sweep.grid import load_name
from speccheck.sweep.rounds import ROUND_MARK
from speccheck.telemetry import Snapshot


@pytest.fixture
def product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Product:
    (tmp_path / "guardrails.yaml").write_text("speculative_decoding_guardrails: {}\n")
    return Product(tmp_path, capsys)


def route(**rules: Any) -> list[dict[str, Any]]:
    """The one route, with these rules and no others but those that always hold."""
    return [{"name": "chat", "rules": rules}]


REPLAY = {
    "warm_up": 0,
    "client_limits": PATIENT,
    "guardrails": "guardrails.yaml",
    "replay": {"confirmations": 2, "slices": "off", "probe": {"samples": 0}},
}


def shadow(requests: int) -> dict[str, Any]:
    """A rollout whose shadow stage mirrors so many requests, in no time."""
    return {
        "warm_up": 0,
        "client_limits": PATIENT,
        "guardrails": "guardrails.yaml",
        "shadow": {"requests_per_route": requests, "rate_per_s": 20_000, "blocks": 4}
        | {"max_in_flight": 10_000},
    }


def words(seed: int, n: int = 80) -> list[int]:
    """Token ids of an answer."""
    return [200 + (seed * 31 + 7 * j) % 500 for j in range(n)]


# --- T01, T02 -----------------------------------------------------------------------------------

NEAR_TIES = [0.0000, 0.0003, 0.0011, 0.0002, 0.0000, 0.0008]


def test_t01_a_near_tie_is_not_a_regression(product: Product) -> None:
    """Six pairs diverge at near ties, five of the target with itself; 171 of 200 right on both."""

    def answered(i: int, *, other: bool) -> Say:
        ids = words(i)
        if other:
            ids = [*ids[:10], ids[10] + 1, *ids[11:]]
        return Say(f"{'right' if i < 171 else 'wrong'} {i}", ids, metrics=None)

    def target(i: int, n: int, _body: dict[str, Any]) -> Say:
        return answered(i, other=n == 1 and i < 5)

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        said = answered(i, other=i < 6)
        said.metrics = spec_metrics([(3, 4)] * 4, 4)
        return said

    gaps = {(i, 10): gap for i, gap in enumerate(NEAR_TIES)}
    with attached_pair(
        product.folder,
        target=Model(target, gaps, noise=0.0015),
        speculative=Model(speculative, gaps),
        routes=route(max_quality_regression_cases=0),
        **REPLAY,
    ):
        corpus(product.folder, 200, check=lambda i: {"kind": "exact", "answer": f"right {i}"})
        told = product.stage("replay")
    assert told.code == 0, told.text
    assert told.action == "promote"
    assert "6 of 200" in told.reason
    assert "5 of 200" in told.reason
    assert "identical" not in told.text
    assert "proven" not in told.text
    quality = told.finding("max_quality_regression_cases")
    assert (quality["verdict"], quality["estimate"]["value"]) == ("pass", 0)


def test_t02_verification_that_is_not_enforced_falls_back(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """47 of 80 diverge where the target is sure and 22 answers are lost; twice the speed does not
    soften it.
    """

    def target(i: int, n: int, _body: dict[str, Any]) -> Say:
        ids = words(i)
        if n == 1 and i == 79:
            ids = [*ids[:10], ids[10] + 1, *ids[11:]]
        return Say(f"{'right' if i < 73 else 'wrong'} {i}", ids)

    def speculative(i: int, _n: int, body: dict[str, Any]) -> Say:
        ids = words(i)
        if i < 47:
            ids = [*ids[:10], ids[10] + 1, *ids[11:]]
        right = 22 <= i < 73 or (body["temperature"] and i < 73)
        metrics = spec_metrics([(3, 4), (3, 4), (2, 4), (3, 4), (3, 4)], 4)
        return Say(f"{'right' if right else 'wrong'} {i}", ids, metrics=metrics)

    slowed(monkeypatch, lambda r: 22.8 if r.arm == Arm.TARGET_ONLY else 11.2)
    gaps = {(i, 10): 2.9 for i in range(47)} | {(79, 10): 0.001}
    with attached_pair(
        product.folder,
        target=Model(target, gaps, noise=0.0015),
        speculative=Model(speculative, gaps),
        routes=route(max_quality_regression_cases=0, min_acceptance_rate=0.55),
        **REPLAY,
    ):
        corpus(product.folder, 80, check=lambda i: {"kind": "exact", "answer": f"right {i}"})
        told = product.stage("replay")
    assert told.code == 1
    assert told.action == "fall_back"
    assert "47 lossless violations" in told.reason
    assert "22 confirmed quality regressions" in told.reason
    assert told.finding("max_lossless_violations")["verdict"] == "fail"
    assert told.finding("min_acceptance_rate")["verdict"] == "pass"


# --- T06, T08, T12, T25: shadow -----------------------------------------------------------------


def jitter(seed: int, spread: float = 0.03) -> Callable[[], float]:
    """Noise of a time, the same in every run of the test."""
    rng = np.random.default_rng(seed)
    return lambda: float(rng.lognormal(0, spread))


def after_first(pair: Pair, pages: Mapping[Arm, str], see: Callable[[PlannedRequest], Seen]) -> Any:
    """`see`, and from the first request on these metrics pages."""

    def seen(request: PlannedRequest) -> Seen:
        for arm, text in pages.items():
            pair.servers[arm].metrics_text = text
        return see(request)

    return seen


DEAD = """\
vllm:spec_decode_num_drafts_total{engine="0"} 2210
vllm:spec_decode_num_draft_tokens_total{engine="0"} 6630
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0
vllm:generation_tokens_total{engine="0"} 2260
"""


def test_t06_a_dead_drafter_is_a_failure_and_not_missing_data(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 of 6630 drafted tokens accepted by the server's counters, no error anywhere, TPOT p95
    +38 %, and a method that does not fit the head's name.
    """
    noise = jitter(6)

    def see(request: PlannedRequest) -> Seen:
        return Seen((27.6 if request.arm == Arm.SPECULATIVE else 20.0) * noise(), tokens=66)

    dead = {"method": "eagle", "model": "acme/foo-eagle3", "num_speculative_tokens": 3}
    with attached_pair(
        product.folder,
        routes=route(min_acceptance_rate=0.5, max_tpot_p95_regression=0.1, max_error_rate=0.1),
        **shadow(150) | {"speculation": dead},
    ) as pair:
        pair.servers[Arm.SPECULATIVE].metrics_text = re.sub(r"\d+\n", "0\n", DEAD)
        observe(monkeypatch, after_first(pair, {Arm.SPECULATIVE: DEAD}, see))
        corpus(product.folder, 150)
        told = product.stage("shadow")
    assert told.code == 1
    assert told.action == "fall_back"
    acceptance = told.finding("min_acceptance_rate")
    assert acceptance["verdict"] == "fail"
    assert acceptance["estimate"]["value"] == 0
    assert "0 of 6630 drafted tokens accepted" in acceptance["why"]
    assert "method name" in told.reason
    assert told.finding("max_tpot_p95_regression")["verdict"] == "fail"
    assert told.finding("max_error_rate")["verdict"] == "pass"


def two_engines(*engines: tuple[int, int, int]) -> str:
    """A metrics page: drafts, draft tokens and accepted tokens of each engine."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return "".join(
        f'vllm:spec_decode_{name}_total{{engine="{i}"}} {value}\n'
        for i, values in enumerate(engines)
        for name, value in zip(names, values, strict=True)
    )


def test_t21_two_engines_of_which_one_restarted(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(6600 + 1650) of (12000 + 3300) drafted tokens, not the 110 % of a plain subtraction."""
    before = two_engines((5000, 15000, 8250), (5200, 15600, 8580))
    after = two_engines((9000, 27000, 14850), (1100, 3300, 1650))
    with attached_pair(product.folder, routes=route(min_acceptance_rate=0.2), **shadow(80)) as pair:
        pair.servers[Arm.SPECULATIVE].metrics_text = before
        observe(monkeypatch, after_first(pair, {Arm.SPECULATIVE: after}, lambda _: Seen()))
        corpus(product.folder, 80)
        told = product.stage("shadow")
    acceptance = told.finding("min_acceptance_rate")
    assert acceptance["estimate"]["value"] == pytest.approx(8250 / 15300)
    assert "8250 of 15300 drafted tokens accepted" in acceptance["why"]
    assert "restart" in told.text
    assert "110%" not in told.text
    assert "1.1 " not in acceptance["why"]


def test_t08_random_token_ids_decide_nothing(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance .31 under a limit of .50, measured on prompts of random ids."""
    noise = jitter(8)

    def see(request: PlannedRequest) -> Seen:
        spec = request.arm == Arm.SPECULATIVE
        return Seen(20.0 * noise(), drafted=100 if spec else None, accepted=31)

    observe(monkeypatch, see)
    with attached_pair(product.folder, routes=route(min_acceptance_rate=0.5), **shadow(128)):
        corpus(product.folder, 128, source="random_token_ids")
        told = product.stage("shadow")
    assert told.code == 3
    assert told.action == "inconclusive"
    assert told.reason.startswith("not decisive: ")
    assert "random" in told.reason
    assert "sample of the route's own traffic" in told.reason
    assert told.finding("min_acceptance_rate")["verdict"] == "fail"


def test_t12_a_slice_that_the_average_hides(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """420 short prompts get faster, 30 long ones slower; the total .478 passes a limit of .40."""
    noise = jitter(12)

    def see(request: PlannedRequest) -> Seen:
        long = int(request.prompt.prompt_id.removeprefix("p")) >= 420
        spec = request.arm == Arm.SPECULATIVE
        base, mirrored = (19.5, 27.9) if long else (14.6, 9.8)
        drafted, accepted = (290, 17) if long else (120, 66)
        return Seen(
            (mirrored if spec else base) * noise(),
            prompt_tokens=16_500 if long else 2_000,
            drafted=drafted if spec else None,
            accepted=accepted + (request.repeat + request.block) % 2,
        )

    observe(monkeypatch, see)
    with attached_pair(
        product.folder,
        routes=route(min_acceptance_rate=0.4, max_tpot_p95_regression=0.05),
        **shadow(450),
    ):
        corpus(product.folder, 450)
        told = product.stage("shadow")
    assert told.code == 1
    assert told.action == "fall_back"
    assert told.finding("min_acceptance_rate")["verdict"] == "pass"
    slice_ = told.finding("min_acceptance_rate", "prompt >=4096")
    assert slice_["verdict"] == "fail"
    assert slice_["estimate"]["value"] == pytest.approx(0.06, abs=0.005)
    assert "prompt >=4096" in told.reason
    assert "fails at prompt >=4096" in told.json["decisions"][0]["scope"]
    page = " ".join(product.page("matrix").split())
    assert "send prompts of 4096 tokens and more to target-only" in page
    assert "vLLM has no gate by prompt length" in page


def test_t25_a_p95_below_the_first_bucket_is_seen_by_receipts(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.1 ms against 8.6 ms: one histogram bucket, and +68.6 % by the receipts."""
    noise = jitter(25, 0.02)

    def see(request: PlannedRequest) -> Seen:
        spec = request.arm == Arm.SPECULATIVE
        return Seen((8.6 if spec else 5.1) * noise(), ttft_ms=20, drafted=100, accepted=60)

    def histogram(first: int) -> str:
        name = "vllm:request_time_per_output_token_seconds"
        counts = {"0.01": first, "0.025": 512, "+Inf": 512}
        lines = [f'{name}_bucket{{engine="0",le="{le}"}} {n}' for le, n in counts.items()]
        return "\n".join(
            [*lines, f'{name}_count{{engine="0"}} 512', f'{name}_sum{{engine="0"}} 3\n']
        )

    pages = {Arm.TARGET_ONLY: histogram(505), Arm.SPECULATIVE: histogram(498)}
    with attached_pair(
        product.folder, routes=route(max_tpot_p95_regression=0.1), **shadow(512)
    ) as pair:
        for server in pair.servers.values():
            server.metrics_text = re.sub(r" \d+\n", " 0\n", pages[Arm.TARGET_ONLY])
        observe(monkeypatch, after_first(pair, pages, see))
        corpus(product.folder, 512)
        told = product.stage("shadow")
    assert told.code == 1
    assert told.action == "fall_back"
    tpot = told.finding("max_tpot_p95_regression")
    assert tpot["verdict"] == "fail"
    assert tpot["estimate"]["value"] == pytest.approx(8.6 / 5.1, rel=0.02)
    (note,) = [n for n in told.json["stages"]["shadow"]["notes"] if "histograms" in n]
    assert "under 10 ms on both arms" in note
    assert "custom-histogram-buckets" in note


# --- T09, T10: the matrix ------------------------------------------------------------------------


def swept_run(product: Product, receipts: list[Receipt], **rules: Any) -> None:
    """A run in the store that swept these receipts."""
    rollout = Rollout.model_validate({**ROLLOUT, "engine": "embedded", "routes": route(**rules)})
    guardrails = load_guardrails(product.folder / "guardrails.yaml", rollout.routes)
    config = {
        "rollout": rollout.model_dump(mode="json"),
        "guardrails": guardrails.model_dump(mode="json"),
    }
    (product.folder / "run").mkdir()
    with Store.open(product.folder / "run" / STORE_NAME) as store:
        run = Run("run:swept", 0, 1, "corpus:1", "rules:1", config)
        store.begin_run(run, wall_ns=0, clock_ns=0)
        rows = [(replace(r, run_id="run:swept"), None) for r in receipts]
        assert store.append_receipts(rows) == len(receipts)
        for at, (load, block) in enumerate(sorted({(load_name(r), r.block) for r in receipts})):
            labels = (("block", str(block)), ("health", "ok"), ("load", load))
            closed = Snapshot(at, {(ROUND_MARK, labels): 1.0})
            store.append_samples("run:swept", Arm.TARGET_ONLY, [closed])


def rows_by_load(told: Told) -> dict[str, dict[str, Any]]:
    return {row["cohort"]["concurrency"]: row for row in told.json["rows"]}


def test_t09_acceptance_length_does_not_choose_the_proposal_length(product: Product) -> None:
    """With k 4 a step accepts (2.96 tokens against 2.38), and k 2 wins at concurrency 8."""
    rng = np.random.default_rng(4)
    receipts = swept(rng, 1, 1e3 / 35, {2: 1e3 / 56, 4: 1e3 / 57}, counts=T09, noise=0.1)
    receipts += swept(rng, 8, 1e3 / 110, {2: 1e3 / 271, 4: 1e3 / 188}, counts=T09, noise=0.1)
    swept_run(product, receipts)
    told = product.run("matrix")
    assert told.code == 0
    rows = rows_by_load(told)
    assert (rows["8"]["verdict"], rows["8"]["k"]) == ("speculate", 2)
    lengths = {cell["k"]: cell["mean_acceptance_length"]["value"] for cell in rows["8"]["by_k"]}
    assert lengths == {2: pytest.approx(2.38), 4: pytest.approx(2.96)}
    assert (rows["1"]["verdict"], rows["1"]["k"]) == ("speculate", 2)
    assert "k 4 cannot be told from it" in rows["1"]["why"]
    assert "k 2: " in product.page("matrix")


def test_t10_a_crossover_with_concurrency(product: Product) -> None:
    """On up to 16, over the limit at 64; acceptance is .58 at all loads and never the cause."""
    rng = np.random.default_rng(10)
    receipts = []
    for load, base, spec in ((1, 14.1, 8.9), (16, 18.8, 16.0), (32, 22.4, 23.1), (64, 30.6, 39.5)):
        receipts += swept(rng, load, base, {4: spec}, n=16, accepted_tokens=58)
    swept_run(product, receipts, max_tpot_p95_regression=0.05)
    told = product.run("matrix")
    rows = rows_by_load(told)
    assert {load: row["verdict"] for load, row in rows.items()} == {
        "1": "speculate",
        "16": "speculate",
        "32": "target_only",
        "64": "target_only",
    }
    assert "over the limit of +5%" in rows["64"]["why"]
    assert "over the limit" not in rows["32"]["why"]
    assert "acceptance 0.58 is not the cause" in rows["64"]["why"]
    page = " ".join(product.page("matrix").split())
    assert "it pays up to concurrency 16" in page


# --- T15, T17, T20, T22: replies ----------------------------------------------------------------

SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


def test_t15_json_that_breaks_at_the_reasoning_boundary(product: Product) -> None:
    """With reasoning 29 of 30 valid against 17 of 30, without it all; every reply is HTTP 200."""

    def say(i: int, *, lost: bool) -> Say:
        broken = i == 0 or (lost and i <= 12)
        if i >= 60:
            return Say(f"free text {i}", words(i), metrics=None)
        return Say('{"city": "Rome"' if broken else '{"city": "Rome"}', words(i))

    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: say(i, lost=False)),
        speculative=Model(lambda i, _n, body: say(i, lost=not body["temperature"])),
        routes=route(max_quality_regression_cases=0, max_error_rate=0.05),
        **REPLAY,
    ):
        corpus(
            product.folder,
            90,
            task=lambda i: ("json_with_reasoning", "json", "prose")[i // 30],
            check=lambda i: (
                {"kind": "json_schema", "schema": SCHEMA} if i < 60 else {"kind": "none"}
            ),
            response_format=lambda i: schema if i < 60 else None,
        )
        told = product.stage("replay")
    assert told.code == 1
    assert told.action == "fall_back"
    assert told.reason.startswith("12 confirmed quality regressions")
    assert "json_with_reasoning" in told.reason
    assert told.finding("max_error_rate")["estimate"]["value"] == 0
    lost = told.finding("max_quality_regression_cases", "temperature 0, json_with_reasoning")
    assert (lost["verdict"], lost["estimate"]["value"], lost["estimate"]["n"]) == ("fail", 12, 30)


def test_t17_a_penalty_that_the_speculative_server_ignores(product: Product) -> None:
    """What repetition_penalty changes on target-only it does not change on the other server."""

    def target(i: int, _n: int, body: dict[str, Any]) -> Say:
        penalised = body.get("repetition_penalty", 1) != 1
        ids = words(i) if not penalised else [*words(i)[:5], *(900 + j for j in range(30))]
        return Say(f"answer {i} {penalised}", ids, "stop" if penalised else "length")

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        return Say(f"answer {i} False", words(i), "length")

    settings = REPLAY["replay"] | {"slices": ["penalties"], "slice_prompts": 20}
    with attached_pair(
        product.folder,
        target=Model(target),
        speculative=Model(speculative),
        routes=route(max_slice_failures=0),
        **REPLAY | {"replay": settings},
    ):
        corpus(product.folder, 60)
        told = product.stage("replay")
    assert told.code == 1
    assert told.action == "fall_back"
    assert "repetition_penalty 1.3 is ignored" in told.reason
    assert "penalties)" in told.reason


def test_t20_counts_that_are_missing_for_stop_strings(product: Product) -> None:
    """60 % of the answers come with counts (5400 of 9000 over 60 such), the others with none."""

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        if i % 5 < 3:
            return Say(f"a {i}", words(i), metrics=spec_metrics([(3, 5)] * 30, 5))
        return Say(f"a {i}", words(i), stop="\n\nQ:")

    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: Say(f"a {i}", words(i))),
        speculative=Model(speculative),
        routes=route(min_acceptance_rate=0.4),
        **REPLAY,
    ):
        corpus(product.folder, 50)
        told = product.stage("replay")
    acceptance = told.finding("min_acceptance_rate")
    assert acceptance["estimate"]["value"] == pytest.approx(0.6)
    assert acceptance["estimate"]["n"] == 60
    assert "5400 of 9000 drafted tokens accepted" in acceptance["why"]
    assert "from 60 of 100 completed requests (60%)" in acceptance["why"]
    assert "ended on a stop string" in acceptance["why"]


T22_METRICS = {
    "speculative_decoding": {
        "num_spec_tokens": 7,
        "acceptance_histogram": [1, 0, 2, 0, 1, 2, 2, 4],
        "num_spec_steps": 12,
        "num_accepted_draft_tokens": 58,
        "num_draft_tokens": 84,
        "mean_acceptance_length": 5.83,
        "draft_acceptance_rate": 0.69,
    }
}


def test_t22_usage_that_does_not_add_up(product: Product) -> None:
    """71 reasoning tokens of 64 is a warning; 58 accepted in 12 steps for 64 delivered is none."""

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        return Say(f"a {i}", words(i, 64), "length", metrics=T22_METRICS, reasoning_tokens=71)

    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: Say(f"a {i}", words(i, 64), "length")),
        speculative=Model(speculative),
        routes=route(),
        **REPLAY,
    ):
        corpus(product.folder, 4, max_tokens=64)
        told = product.stage("replay")
        listed = product.run("receipts", "list", "--arm", "speculative")
    assert told.code in (0, 3), told.text
    for receipt in listed.json["receipts"]:
        assert receipt["completion_tokens"] == 64
        assert [w for w in receipt["warnings"] if "reasoning" in w and "71" in w]
        assert not [w for w in receipt["warnings"] if "70" in w]
        assert receipt["accepted_tokens"] == 58
