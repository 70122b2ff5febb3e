"""rollout.yaml and rules: strict, and errors that say where."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccheck.config import (
    IMPLIED,
    CanaryConfig,
    Guardrails,
    Model,
    Rollout,
    Route,
    load_guardrails,
    load_rollout,
    package_dir,
)
from speccheck.errors import UsageError

BLOCK = """\
speculative_decoding_guardrails:
  min_acceptance_rate: 0.55
  max_tpot_p95_regression: "10%"
  max_error_rate: "1%"
  max_quality_regression_cases: 0
  fallback_action: "disable_speculative_decoding_for_route"
"""

ROLLOUT = """\
name: test
speculation:
  method: draft_model
  num_speculative_tokens: 4
routes:
  - name: support
    temperature: 0.0
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_guardrail_block_loads_as_it_stands(tmp_path: Path) -> None:
    """The block of the design loads, percent strings as fractions."""
    rules = load_guardrails(write(tmp_path / "g.yaml", BLOCK))
    assert rules.limits("any") == {
        "min_acceptance_rate": 0.55,
        "max_tpot_p95_regression": 0.10,
        "max_error_rate": 0.01,
        "max_quality_regression_cases": 0,
        **IMPLIED,
    }


def test_the_packaged_guardrails_hold_the_block() -> None:
    """rules/guardrails.yaml gives the design's five rules their values."""
    limits = load_guardrails(package_dir("rules") / "guardrails.yaml").limits("any")
    assert limits["min_acceptance_rate"] == 0.55
    assert limits["max_tpot_p95_regression"] == 0.10
    assert limits["max_error_rate"] == 0.01
    assert limits["max_quality_regression_cases"] == 0


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (BLOCK.replace("max_error_rate", "max_eror_rate"), 4, "did you mean 'max_error_rate'"),
        (BLOCK + "  max_error_rate: 2\n", 7, "max_error_rate"),
        (BLOCK.replace('"1%"', '"one"'), 4, "not a number or a percentage"),
        (BLOCK.replace('"1%"', '"nan%"'), 4, "not a number"),
        (BLOCK.replace("0.55", "1.55"), 2, "less than or equal to 1"),
        (BLOCK.replace("0.55", "true"), 2, "not true or false"),
        (BLOCK.replace("disable_speculative_decoding_for_route", "page_me"), 6, "disable_spec"),
        (BLOCK + "dry_run: [max_latency]\n", None, "no rule is called 'max_latency'"),
        (BLOCK + "routes:\n  chat:\n    min_acceptence_rate: 0.1\n", 9, "unknown key"),
        ("speculative_decoding_guardrails: [\n", None, "not valid YAML"),
    ],
)
def test_a_broken_rule_is_an_error_with_its_line(
    tmp_path: Path, text: str, line: int | None, words: str
) -> None:
    """A typo, a duplicate or a wrong value never turns into a default."""
    path = write(tmp_path / "g.yaml", text)
    with pytest.raises(UsageError) as caught:
        load_guardrails(path)
    assert words in str(caught.value)
    if line is not None:
        assert f"{path}:{line}:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROLLOUT.replace("temperature", "temprature"), "did you mean 'temperature'"),
        (ROLLOUT + "  - name: support\n", "defined twice"),
        (ROLLOUT.replace("method: draft_model\n", ""), "`method` is missing"),
        (ROLLOUT + "engine: attached\n", "two URLs"),
        (ROLLOUT + "engine: attached\nattached: {target_only: ftp://x, speculative: y}\n", "http"),
        (ROLLOUT + "canary: {shares: [0.5, 0.2]}\n", "must grow"),
        (ROLLOUT + "fixture: {seeds: 1000000000000}\n", "less than or equal"),
        (ROLLOUT + f"warm_up: {10**30}\n", "less than or equal"),
        (ROLLOUT + "canary: {shares: [0.5, 1]}\n", "control arm"),
        (ROLLOUT + "shadow: {blocks: 6}\n", "multiple of 4"),
        (ROLLOUT.replace("name: support", "name: '<script>'"), "pattern"),
        ("just text\n", "mapping"),
        ("routes: []\nname: x\nspeculation: {method: ngram}\n", "at least one route"),
    ],
)
def test_a_broken_rollout_is_a_usage_error(tmp_path: Path, text: str, words: str) -> None:
    """Each broken rollout says what is wrong."""
    with pytest.raises(UsageError, match=r"r\.yaml") as caught:
        load_rollout(write(tmp_path / "r.yaml", text))
    assert words in str(caught.value)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    """The error of a missing rollout names `speccheck init`."""
    with pytest.raises(UsageError, match="speccheck init"):
        load_rollout(tmp_path / "none.yaml")


def test_off_is_a_word_in_yaml_1_2(tmp_path: Path) -> None:
    """`code_execution: off` is read as the word it is."""
    rollout = load_rollout(write(tmp_path / "r.yaml", ROLLOUT + "corpus: {code_execution: off}\n"))
    assert rollout.corpus.code_execution == "off"


def test_route_rules_override_the_file(tmp_path: Path) -> None:
    """A route's own rules win over the file's, and a route nobody has is an error."""
    text = ROLLOUT + "    rules: {min_acceptance_rate: 0.2}\n"
    routes = load_rollout(write(tmp_path / "r.yaml", text)).routes
    rules = load_guardrails(write(tmp_path / "g.yaml", BLOCK), routes)
    assert rules.limits("support")["min_acceptance_rate"] == 0.2
    assert rules.limits("other")["min_acceptance_rate"] == 0.55
    stray = write(tmp_path / "h.yaml", BLOCK + "routes:\n  chat: {min_speedup: 0.1}\n")
    with pytest.raises(UsageError, match="no such route"):
        load_guardrails(stray, routes)


def test_some_rules_hold_whatever_a_file_says(tmp_path: Path) -> None:
    """Wrong outputs are never fine and a promotion must pay, unless a file says otherwise."""
    rules = load_guardrails(write(tmp_path / "g.yaml", BLOCK))
    assert rules.limits("any")["max_lossless_violations"] == 0
    assert rules.limits("any")["min_speedup"] == 1
    said = BLOCK + "routes:\n  any: {min_speedup: 1.2}\n"
    rules = load_guardrails(write(tmp_path / "h.yaml", said))
    assert rules.limits("any")["min_speedup"] == 1.2
    assert rules.limits("other")["min_speedup"] == 1


@pytest.mark.parametrize("model", [Rollout, Route, CanaryConfig, Guardrails])
def test_every_model_refuses_unknown_keys(model: type[Model]) -> None:
    """A misspelt key is refused by each model."""
    with pytest.raises(ValueError, match="xyzzy"):
        model.model_validate({"xyzzy": 1})


@given(st.integers(0, 1000))
def test_percent_strings_are_fractions(tenths: int) -> None:
    """`"x%"` is x / 100 for any x."""
    text = f"{tenths / 10}%"
    rules = Guardrails.model_validate(
        {"speculative_decoding_guardrails": {"max_tpot_p95_regression": text}}
    )
    assert rules.limits("r")["max_tpot_p95_regression"] == pytest.approx(tenths / 1000)


def test_the_policy_version_changes_with_the_routes(tmp_path: Path) -> None:
    """Two rollouts with different routes have different policy versions."""
    one = load_rollout(write(tmp_path / "a.yaml", ROLLOUT))
    two = load_rollout(write(tmp_path / "b.yaml", ROLLOUT.replace("0.0", "0.5")))
    assert one.policy_version != two.policy_version
    assert one.policy_version == load_rollout(tmp_path / "a.yaml").policy_version


def expiring(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rollout.yaml"
    path.write_text(
        f"name: x\nexpires: {text}\nspeculation: {{method: ngram}}\nroutes: [{{name: a}}]\n"
    )
    return path


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("2026-12-31", date(2026, 12, 31)),
        ('"2026-12-31"', date(2026, 12, 31)),
        ("30", date(2026, 12, 29)),
        ("null", None),
    ],
)
def test_expires_is_a_date_or_days(tmp_path: Path, text: str, last: date | None) -> None:
    """A date stands; days count from the run's beginning; none is none."""
    assert load_rollout(expiring(tmp_path, text)).expiry(date(2026, 11, 29)) == last


@pytest.mark.parametrize("text", ["soon", "0", "-3", "1.5", "true", "2026-13-01", "99999999"])
def test_another_expiry_is_an_error_with_its_line(tmp_path: Path, text: str) -> None:
    """Never a default, never a traceback."""
    with pytest.raises(UsageError, match=r"rollout.yaml:2: expires"):
        load_rollout(expiring(tmp_path, text))


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_model_folder_is_looked_for_beside_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Wherever the command is run from; what vLLM would look up by name stays a name."""
    rollout = tmp_path / "chat" / "rollout.yaml"
    for model in ("pair/draft", "target"):
        (rollout.parent / model).mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    blocks = {"embedded": "embedded: {model: ../chat/target}", "vllm": "vllm: {target: target}"}
    write(
        rollout,
        f"name: x\nengine: {engine}\n{blocks[engine]}\nroutes: [{{name: a}}]\n"
        "speculation: {method: draft_model, model: pair/draft, num_speculative_tokens: 2}\n",
    )
    loaded = load_rollout(rollout)
    target = loaded.embedded.model if engine == "embedded" else loaded.vllm.target
    assert Path(target) == rollout.parent / "target"
    assert Path(loaded.speculation["model"]) == rollout.parent / "pair" / "draft"
    if engine == "vllm":
        write(rollout, rollout.read_text().replace("pair/draft", "acme/draft"))
        assert load_rollout(rollout).speculation["model"] == "acme/draft"


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("{wrokers: 2}", "did you mean 'workers'"),
        ("{shares: {nope: 0.5}}", "no route is called 'nope'"),
        ("{hand_over: maybe}", "gateway.hand_over"),
        ("{share: 2}", "gateway.share"),
        ("{key_header: 'x y'}", "gateway.key_header"),
        ("{store_prompts: true}", "gateway.store_prompts"),
    ],
)
def test_the_gateways_block_is_checked(tmp_path: Path, block: str, why: str) -> None:
    """A typo never turns into a default."""
    with pytest.raises(UsageError, match=why):
        load_rollout(write(tmp_path / "r.yaml", f"{ROLLOUT}gateway: {block}\n"))


def test_the_gateway_is_on_loopback_and_keeps_no_prompts_by_default(tmp_path: Path) -> None:
    """What is not said is the careful choice."""
    gateway = load_rollout(write(tmp_path / "r.yaml", ROLLOUT)).gateway
    assert (gateway.host, gateway.store_prompts, gateway.hand_over) == (
        "127.0.0.1",
        "off",
        "refuse",
    )
    assert gateway.admin_token_env is None
    assert gateway.mirror.share == 0
    changed = load_rollout(
        write(tmp_path / "s.yaml", f"{ROLLOUT}gateway: {{share: '5%', shares: {{support: 0.5}}}}\n")
    )
    assert (changed.gateway.share_of("support"), changed.gateway.share) == (0.5, 0.05)
