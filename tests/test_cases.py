"""The cases from the field (CASES.md), from the network to the words that a user reads.

Each feeds a reported situation in through a real interface (server replies, metrics text, receipts,
configuration) and holds the product to what ought to be said about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attached_pair import attached_pair
from field import PATIENT, Model, Product, Say, corpus, slowed
from scripted_server import spec_metrics

from speccheck.records import Arm

RULES = {"name": "chat"}


@pytest.fixture
def product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Product:
    return Product(tmp_path, capsys)


def route(**rules: Any) -> list[dict[str, Any]]:
    return [{"name": "chat", "rules": rules}]


REPLAY = {"warm_up": 0, "client_limits": PATIENT, "replay": {"confirmations": 2}}
SHADOW = {"warm_up": 0, "client_limits": PATIENT}


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
