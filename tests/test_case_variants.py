"""More situations of the kinds of CASES.md: other numbers, other orders, gaps in what is known.

`test_cases` holds the reported values; these ask whether the kind is held, not the case.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attached_pair import attached_pair
from field import Model, Product, Say, Seen, corpus, observe, slowed
from scripted_server import spec_metrics
from test_cases import REPLAY, after_first, jitter, route, shadow, two_engines, words

from speccheck.records import Arm, PlannedRequest


@pytest.fixture
def product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Product:
    (tmp_path / "guardrails.yaml").write_text("speculative_decoding_guardrails: {}\n")
    return Product(tmp_path, capsys)


def number_of(request: PlannedRequest) -> int:
    """Which prompt of `field.corpus` it is."""
    return int(request.prompt.prompt_id.removeprefix("p"))


# --- T01, T02: divergence ------------------------------------------------------------------------


def parted(ids: list[int], at: int) -> list[int]:
    """The same answer with another token at one place."""
    return [*ids[:at], ids[at] + 1, *ids[at + 1 :]]


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_t01_near_ties_of_a_server_that_scores_alike_twice(product: Product, noise: float) -> None:
    """Nine diverge at gaps up to 0.004 nats, four do in the A/A control; that two scorings agree to
    the last digit makes no near tie a violation.
    """
    gaps = {(i, 3 + i): 0.0005 * i for i in range(9)}

    def target(i: int, n: int, _body: dict[str, Any]) -> Say:
        return Say(f"right {i}", parted(words(i), 3 + i) if n == 1 and i < 4 else words(i))

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        ids = parted(words(i), 3 + i) if i < 9 else words(i)
        return Say(f"right {i}", ids, metrics=spec_metrics([(3, 4)] * 4, 4))

    with attached_pair(
        product.folder,
        target=Model(target, gaps, noise=noise),
        speculative=Model(speculative, gaps),
        routes=route(max_quality_regression_cases=0),
        **REPLAY,
    ):
        corpus(product.folder, 60, check=lambda i: {"kind": "exact", "answer": f"right {i}"})
        told = product.stage("replay")
    violations = told.finding("max_lossless_violations")
    assert (violations["verdict"], violations["estimate"]["high"]) == ("pass", 0), told.text
    assert "9 of 60" in violations["why"]
    assert "4 of 60" in violations["why"]
    assert not re.search("identical|proven|lossless and", told.text)


def test_t02_a_token_outside_the_target_s_candidates(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve of 60 answers leave the target's five likeliest tokens; a third of the TPOT and an
    acceptance of .9 do not soften it, and neither do twelve answers that got better.
    """

    def target(i: int, _n: int, _body: dict[str, Any]) -> Say:
        return Say(f"{'right' if i < 48 else 'wrong'} {i}", words(i))

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        ids = [*words(i)[:7], 9_000 + i, *words(i)[8:]] if i < 12 else words(i)
        says = "wrong" if i < 12 else "right"
        return Say(f"{says} {i}", ids, metrics=spec_metrics([(9, 10)] * 8, 10))

    slowed(monkeypatch, lambda r: 30.0 if r.arm == Arm.TARGET_ONLY else 10.0)
    with attached_pair(
        product.folder,
        target=Model(target, noise=0.001),
        speculative=Model(speculative),
        routes=route(max_quality_regression_cases=0, min_acceptance_rate=0.5),
        **REPLAY,
    ):
        corpus(product.folder, 60, check=lambda i: {"kind": "exact", "answer": f"right {i}"})
        told = product.stage("replay")
    assert (told.code, told.action) == (1, "fall_back")
    assert "12 lossless violations" in told.reason
    quality = told.finding("max_quality_regression_cases", "temperature 0")
    assert (quality["verdict"], quality["estimate"]["value"]) == ("fail", 12)
    assert "12 confirmed improvements" in quality["why"]
    assert told.finding("min_acceptance_rate")["verdict"] == "pass"


# --- T06: nothing accepted -----------------------------------------------------------------------


@pytest.mark.parametrize(("requests", "verdict"), [(4, "inconclusive"), (12, "fail")])
def test_t06_none_accepted_of_few_requests(
    product: Product, monkeypatch: pytest.MonkeyPatch, requests: int, verdict: str
) -> None:
    """By the replies' own counts: 0 of 12 requests accept anything, which bounds acceptance by
    .22; of 4 it bounds it by .53, and a limit of .5 is open.
    """

    def see(request: PlannedRequest) -> Seen:
        spec = request.arm == Arm.SPECULATIVE
        return Seen(drafted=90 if spec else None, accepted=0, steps=30)

    observe(monkeypatch, see)
    settings = shadow(requests)
    with attached_pair(product.folder, routes=route(min_acceptance_rate=0.5), **settings):
        corpus(product.folder, requests)
        told = product.stage("shadow")
    acceptance = told.finding("min_acceptance_rate")
    assert acceptance["verdict"] == verdict
    assert acceptance["estimate"]["value"] == 0
    assert "accepted" in acceptance["why"]
    assert told.action == ("fall_back" if verdict == "fail" else "inconclusive")


# --- T08: made-up prompts ------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "action"), [(0.0, "inconclusive"), (0.4, "fall_back")])
def test_t08_random_ids_are_no_reason_to_promote_either(
    product: Product, monkeypatch: pytest.MonkeyPatch, share: float, action: str
) -> None:
    """Acceptance .9 and half the time on random ids pass every rule and promote nothing; broken
    streams are broken on any prompts.
    """
    noise = jitter(80)

    def see(request: PlannedRequest) -> Seen:
        spec = request.arm == Arm.SPECULATIVE
        if spec and number_of(request) < 130 * share:
            return Seen(error="stream_error")
        return Seen((10 if spec else 20) * noise(), drafted=100 if spec else None, accepted=90)

    observe(monkeypatch, see)
    rules = route(min_acceptance_rate=0.5, max_error_rate=0.1, max_tpot_p95_regression=0.1)
    with attached_pair(product.folder, routes=rules, **shadow(130)):
        corpus(product.folder, 130, source="random_token_ids")
        told = product.stage("shadow")
    assert told.action == action
    if not share:
        assert told.code == 3
        assert "random" in told.reason
        assert told.finding("min_acceptance_rate")["verdict"] == "pass"


# --- T12: a slice --------------------------------------------------------------------------------


def test_t12_a_slice_of_which_half_carries_no_counts(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt in ten is of middle length and accepts 5 %; half of those replies have no counts:
    what is missing is no 0, and the slice fails by the other half.
    """
    noise = jitter(120)

    def see(request: PlannedRequest) -> Seen:
        number = number_of(request)
        long, spec = number % 10 == 0, request.arm == Arm.SPECULATIVE
        drafted: int | None = 200 if long else 80
        if not spec or (long and number % 20 == 0):
            drafted = None
        accepted = 10 + number % 3 if long else 50 + number % 5
        tpot = (12 if spec else 10) if long else (6 if spec else 10)
        tokens = 400 if long else 90
        return Seen(tpot * noise(), prompt_tokens=tokens, drafted=drafted, accepted=accepted)

    observe(monkeypatch, see)
    rules = route(min_acceptance_rate=0.4)
    with attached_pair(product.folder, routes=rules, **shadow(800)):
        corpus(product.folder, 800)
        told = product.stage("shadow")
    assert (told.code, told.action) == (1, "fall_back")
    assert told.finding("min_acceptance_rate")["verdict"] == "pass"
    slice_ = told.finding("min_acceptance_rate", "prompt 256-1023")
    assert slice_["verdict"] == "fail"
    assert slice_["estimate"]["value"] == pytest.approx(11 / 200, rel=0.03)
    assert 30 <= slice_["estimate"]["n"] <= 60
    assert "carry no usable counts" in slice_["why"]
    assert "fails at prompt 256-1023" in told.json["decisions"][0]["scope"]


# --- T15, T17: slices of quality -----------------------------------------------------------------


def test_t15_one_format_of_three_breaks(product: Product) -> None:
    """SQL-like JSON is lost in 5 of 30, the others in none, five get better elsewhere: the mirror
    does not cancel a confirmed regression, and the task is named.
    """

    def say(i: int, *, lost: bool) -> Say:
        broken = (30 <= i < 35) if lost else (60 <= i < 65)
        return Say('{"n": 1' if broken else '{"n": 1}', words(i))

    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: say(i, lost=False)),
        speculative=Model(lambda i, _n, _body: say(i, lost=True)),
        routes=route(max_quality_regression_cases=0, max_error_rate=0.05),
        **REPLAY,
    ):
        corpus(
            product.folder,
            90,
            task=lambda i: ("plan", "invoice", "ticket")[i // 30],
            check=lambda _i: {"kind": "json"},
        )
        told = product.stage("replay")
    assert (told.code, told.action) == (1, "fall_back")
    lost = told.finding("max_quality_regression_cases", "temperature 0, invoice")
    assert (lost["verdict"], lost["estimate"]["value"], lost["estimate"]["n"]) == ("fail", 5, 30)
    assert "invoice" in told.reason
    whole = told.finding("max_quality_regression_cases", "temperature 0")
    assert "5 confirmed improvements" in whole["why"]


@pytest.mark.parametrize("ignored", ["frequency_penalty", "presence_penalty"])
def test_t17_one_penalty_of_three_is_ignored(product: Product, ignored: str) -> None:
    """The other two are honoured; the one that is not is named."""
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def say(i: int, body: dict[str, Any], deaf: str) -> Say:
        used = [
            n
            for n in names
            if n != deaf and body.get(n, 1 if n[0] == "r" else 0) != 1 - (n[0] != "r")
        ]
        ids = (
            words(i) if not used else [*words(i)[:5], *(900 + len(used[0]) + j for j in range(30))]
        )
        return Say(f"answer {i} {used}", ids, "stop" if used else "length")

    settings = REPLAY["replay"] | {"slices": ["penalties"], "slice_prompts": 5}
    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, body: say(i, body, "")),
        speculative=Model(lambda i, _n, body: say(i, body, ignored)),
        routes=route(max_slice_failures=0),
        **REPLAY | {"replay": settings},
    ):
        corpus(product.folder, 40)
        told = product.stage("replay")
    assert (told.code, told.action) == (1, "fall_back")
    assert ignored in told.reason
    assert "is ignored" in told.reason
    for other in set(names) - {ignored}:
        assert other not in told.reason


# --- T20, T21, T22: counts -----------------------------------------------------------------------


def test_t20_no_reply_carries_counts(product: Product) -> None:
    """Without a single count and without counters acceptance is not known, which is not 0."""
    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: Say(f"a {i}", words(i))),
        speculative=Model(lambda i, _n, _body: Say(f"a {i}", words(i), stop="\n\n")),
        routes=route(min_acceptance_rate=0.4),
        **REPLAY,
    ) as pair:
        pair.servers[Arm.SPECULATIVE].metrics_text = None
        corpus(product.folder, 40)
        told = product.stage("replay")
    acceptance = told.finding("min_acceptance_rate")
    assert (told.code, told.action) == (4, "inconclusive")
    assert (acceptance["verdict"], acceptance["estimate"]) == ("error", None)
    assert "ended on a stop string" in acceptance["why"]


def test_t21_one_engine_restarts_idle_and_one_begins(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine 0 is back at 0 and counted nothing since, engine 1 went on, engine 2 is new."""
    before = two_engines((900, 3600, 3000), (100, 400, 100))
    after = two_engines((0, 0, 0), (400, 1600, 820), (50, 200, 90))
    with attached_pair(product.folder, routes=route(min_acceptance_rate=0.2), **shadow(80)) as pair:
        pair.servers[Arm.SPECULATIVE].metrics_text = before
        observe(monkeypatch, after_first(pair, {Arm.SPECULATIVE: after}, lambda _: Seen()))
        corpus(product.folder, 80)
        told = product.stage("shadow")
    acceptance = told.finding("min_acceptance_rate")
    assert f"{720 + 90} of {1200 + 200} drafted tokens accepted" in acceptance["why"]
    assert acceptance["estimate"]["value"] == pytest.approx(810 / 1400)
    assert "restart" in told.text


ODD_COUNTS: dict[str, dict[str, Any]] = {
    "more accepted than drafted": {"num_draft_tokens": 40, "num_accepted_draft_tokens": 58},
    "a negative count": {"num_draft_tokens": -84, "num_accepted_draft_tokens": -1},
    "a text": {"num_draft_tokens": "many", "num_accepted_draft_tokens": None},
    "not a number": {"num_draft_tokens": 84.5, "num_accepted_draft_tokens": True},
    "a histogram of other steps": {"acceptance_histogram": [1, 1, 1]},
}


@pytest.mark.parametrize("odd", ODD_COUNTS)
def test_t22_counts_that_cannot_be(product: Product, odd: str) -> None:
    """A warning on the receipt; no acceptance over 1 or under 0 comes of it, and no crash."""
    sound = spec_metrics([(5, 7)] * 10, 7)
    broken = {"speculative_decoding": sound["speculative_decoding"] | ODD_COUNTS[odd]}

    def speculative(i: int, _n: int, _body: dict[str, Any]) -> Say:
        return Say(f"a {i}", words(i, 64), "length", metrics=broken)

    with attached_pair(
        product.folder,
        target=Model(lambda i, _n, _body: Say(f"a {i}", words(i, 64), "length")),
        speculative=Model(speculative),
        routes=route(min_acceptance_rate=0.1),
        **REPLAY,
    ):
        corpus(product.folder, 6, max_tokens=64)
        told = product.stage("replay")
        listed = product.run("receipts", "list", "--arm", "speculative")
    acceptance = told.finding("min_acceptance_rate")["estimate"]
    if acceptance is not None:
        assert 0 <= acceptance["low"] <= acceptance["value"] <= acceptance["high"] <= 1
    for receipt in listed.json["receipts"]:
        assert receipt["completion_tokens"] == 64
        assert receipt["warnings"] or receipt["counts_note"]


# --- T25: times ----------------------------------------------------------------------------------


def test_t25_clocks_that_stand_still_are_no_times(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of every answer are read at one instant: TPOT is not known, which is no pass."""
    observe(monkeypatch, lambda _r: Seen(tpot_ms=0.0, drafted=100, accepted=60))
    rules = route(max_tpot_p95_regression=0.1)
    with attached_pair(product.folder, routes=rules, **shadow(120)):
        corpus(product.folder, 120)
        told = product.stage("shadow")
    tpot = told.finding("max_tpot_p95_regression")
    assert tpot["verdict"] == "error"
    assert told.code == 4
    assert told.action == "inconclusive"


def test_one_arm_that_is_empty(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every speculative request fails: an error rate of 1, and no latency of nothing."""

    def see(request: PlannedRequest) -> Seen:
        return Seen(error="server_error" if request.arm == Arm.SPECULATIVE else None)

    observe(monkeypatch, see)
    rules = route(max_tpot_p95_regression=0.1, max_error_rate=0.01, min_acceptance_rate=0.5)
    with attached_pair(product.folder, routes=rules, **shadow(40)):
        corpus(product.folder, 40)
        told = product.stage("shadow")
        matrix = product.run("matrix")
    assert (told.code, told.action) == (1, "fall_back")
    assert told.finding("max_error_rate")["estimate"]["value"] == 1
    assert told.finding("max_tpot_p95_regression")["verdict"] == "error"
    assert {row["verdict"] for row in matrix.json["rows"]} == {"inconclusive"}


def test_a_route_with_a_single_prompt(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred and fifty copies of one request, twice as fast and all accepted: one case."""
    noise = jitter(1)

    def see(request: PlannedRequest) -> Seen:
        spec = request.arm == Arm.SPECULATIVE
        return Seen((10 if spec else 20) * noise(), drafted=100 if spec else None, accepted=80)

    observe(monkeypatch, see)
    rules = route(max_tpot_p95_regression=0.1, min_acceptance_rate=0.5)
    with attached_pair(product.folder, routes=rules, **shadow(150)):
        corpus(product.folder, 1)
        told = product.stage("shadow")
        matrix = product.run("matrix")
    assert told.action == "inconclusive", told.text
    assert told.finding("min_acceptance_rate")["estimate"]["low"] == 0
    tpot = told.finding("max_tpot_p95_regression")
    assert tpot["verdict"] == "inconclusive"
    assert "these are of 1 prompt, and under 5" in tpot["why"]
    assert "about 1 more" not in told.text
    assert {row["verdict"] for row in matrix.json["rows"]} == {"inconclusive"}
