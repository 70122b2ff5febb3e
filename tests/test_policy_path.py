"""From a failed slice to a policy that is obeyed: replay, matrix --accept, replay, shadow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attached_pair import attached_pair
from field import PATIENT, Model, Product, Say, corpus
from ruamel.yaml import YAML
from scripted_server import spec_metrics

from speccheck.context import STORE_NAME
from speccheck.store import Store

N = 40
ROLLOUT: dict[str, Any] = {
    "warm_up": 0,
    "client_limits": PATIENT,
    "guardrails": "guardrails.yaml",
    "replay": {"confirmations": 2, "slices": "off", "probe": {"samples": 0}},
    "shadow": {"requests_per_route": 40, "rate_per_s": 200, "blocks": 4},
    "routes": [
        {
            "name": "chat",
            "rules": {"max_quality_regression_cases": 0},
            "shadow": {"temperature": 0.7},
        }
    ],
}


def target(i: int, _n: int, _body: dict[str, Any]) -> Say:
    """Always right."""
    return Say(f"right {i}", [200 + i + j for j in range(40)])


def speculative(i: int, _n: int, body: dict[str, Any]) -> Say:
    """Wrong at a temperature above 0 on ten prompts, as a sampler without its residual may be."""
    said = target(i, 0, body)
    if body.get("temperature") and i < 10:
        said.text = f"wrong {i}"
    said.metrics = spec_metrics([(3, 4)] * 10, 4)
    return said


@pytest.fixture
def product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Product:
    (tmp_path / "guardrails.yaml").write_text("speculative_decoding_guardrails: {}\n")
    return Product(tmp_path, capsys)


def test_a_failed_slice_becomes_a_policy_and_no_longer_blocks(product: Product) -> None:
    """Sampled answers get worse: the route falls back; the policy keeps temperature > 0 off, the
    next run passes replay and says so, and its sampled shadow traffic stays on target-only.
    """
    with attached_pair(
        product.folder, target=Model(target), speculative=Model(speculative), **ROLLOUT
    ):
        corpus(product.folder, N, check=lambda i: {"kind": "exact", "answer": f"right {i}"})
        before = product.stage("replay")
        assert (before.code, before.action) == (1, "fall_back")
        assert before.finding("max_quality_regression_cases", "temperature 0.7")

        rollout = str(product.folder / "rollout.yaml")
        accepted = product.run("matrix", "--accept", "--rollout", rollout)
        assert accepted.code == 0
        text = (product.folder / "eligibility.yaml").read_text(encoding="utf-8")
        assert "temperature: {above: 0}" in text
        assert "max_quality_regression_cases failed in replay" in text
        assert "then add `eligibility: eligibility.yaml`" in accepted.text, "it is JSON, one line"
        named = json.loads((product.folder / "rollout.yaml").read_text(encoding="utf-8"))
        (product.folder / "rollout.yaml").write_text(
            json.dumps(named | {"eligibility": "eligibility.yaml"}), encoding="utf-8"
        )
        # What pays is not the question here: scripted servers have no speed, and may seem to.
        policy = YAML(typ="safe").load(text)
        failed = [rule for rule in policy["rules"] if rule["name"] == "chat: failed"]
        calm = {"name": "calm", "when": {"route": "chat"}, "use": "speculate", "reason": "as is"}
        (product.folder / "eligibility.yaml").write_text(
            json.dumps(policy | {"rules": [*failed, calm]}), encoding="utf-8"
        )

        after = product.stage("replay")
        (made,) = after.json["decisions"]
        assert after.action != "fall_back", after.text
        assert "the eligibility policy keeps 40 of 80 requests on target-only" in made["scope"]
        assert "max_quality_regression_cases would fail" in made["scope"]
        shown = [f for f in made["findings"] if f["cohort"].startswith("kept off by policy")]
        assert shown
        assert not any(f["counted"] for f in shown)

        shadowed = product.stage("shadow")
        assert shadowed.action == "hold"
        assert "lets none of its requests speculate" in shadowed.reason
    with Store.read(product.folder / "run" / STORE_NAME) as store:
        sent = store.receipts(shadowed.json["run_id"], stage="shadow", warm_up=False)
    assert {(r.arm, r.decision) for r in sent} == {("target_only", "target_only")}
    assert all("chat: failed" in r.decision_reason for r in sent)
    assert shadowed.json["run_id"] == after.json["run_id"] != before.json["run_id"]
