"""What the doctor finds before any load: pairs that do not fit, servers that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from speccheck import doctor
from speccheck.cli import cli
from speccheck.engine.settings import PAIR_DIR

GUARDRAILS = {"speculative_decoding_guardrails": {"min_acceptance_rate": 0.5}}


@pytest.fixture
def pair(tmp_path):
    """Copies of the packaged target and draft, to be spoilt."""
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            shutil.copy(PAIR_DIR / role / name, tmp_path / role / name)
    return tmp_path


def write(folder: Path, **changes) -> Path:
    """A rollout of the pair on vLLM."""
    rollout = {
        "name": "d",
        "engine": "vllm",
        "vllm": {"target": str(folder / "target"), "args": {"dtype": "float32"}},
        "speculation": {
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": 4,
        },
        "guardrails": "guardrails.yaml",
        "routes": [{"name": "r", "tasks": ["*"]}],
    } | changes
    for name, value in (("rollout.yaml", rollout), ("guardrails.yaml", GUARDRAILS)):
        with (folder / name).open("w", encoding="utf-8") as file:
            YAML().dump(value, file)
    return folder / "rollout.yaml"


def edit(path: Path, **values) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def states(path: Path) -> dict[str, str]:
    """Name -> worst state of a rollout's checks."""
    found: dict[str, str] = {}
    for check in doctor.examine(path, None):
        if found.get(check.name) != "bad":
            found[check.name] = check.state
    return found


def test_the_packaged_pair_fits(pair):
    """Nothing to mend but the vLLM that this interpreter has not."""
    found = states(write(pair))
    assert {name for name, state in found.items() if state == "bad"} == {"vllm"}
    assert {"vocabulary", "tokenizer", "stop tokens", "generation_config"} <= set(found)


def test_another_vocabulary(pair):
    """The draft's ids would mean nothing to the target."""
    path = write(pair)
    edit(pair / "draft/config.json", vocab_size=1024)
    assert states(path)["vocabulary"] == "bad"


def test_ids_that_mean_other_texts(pair):
    """Equal sizes, which is all that vLLM compares, and two words swapped."""
    path = write(pair)
    file = pair / "draft/tokenizer.json"
    value = json.loads(file.read_text())
    words = value["model"]["vocab"]
    a, b = list(words)[100:102]
    words[a], words[b] = words[b], words[a]
    file.write_text(json.dumps(value))
    (check,) = [c for c in doctor.examine(path, None) if c.name == "tokenizer"]
    assert check.state == "bad"
    assert check.text.startswith("2 of ")


def test_min_p_in_the_generation_config(pair):
    """Every speculative request would be answered with 400, unless the file is not used."""
    edit(pair / "target/generation_config.json", min_p=0.05)
    assert states(write(pair))["generation_config"] == "bad"
    servers = {"target": str(pair / "target"), "args": {"generation_config": "vllm"}}
    assert states(write(pair, vllm=servers))["generation_config"] == "ok"


def test_a_length_over_the_models_own(pair):
    """VLLM would refuse to start."""
    servers = {"target": str(pair / "target"), "args": {"max-model-len": 8192}}
    assert states(write(pair, vllm=servers))["max length"] == "bad"


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"},
        {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "fly"},
    ],
)
def test_lossy_settings_are_named(pair, speculation):
    """Before a server is started with them."""
    assert states(write(pair, speculation=speculation))["speculation"] == "bad"


def test_a_broken_rollout_is_a_line_too(tmp_path):
    """The machine's checks stand beside it."""
    (tmp_path / "rollout.yaml").write_text("name: [")
    found = states(tmp_path / "rollout.yaml")
    assert found["rollout"] == "bad"
    assert found["ports"] == "ok"


def test_the_command_says_it_in_json_and_by_its_exit_code(pair):
    """2 while something is to be mended; each check with its state."""
    edit(pair / "draft/config.json", vocab_size=1024)
    done = CliRunner().invoke(cli, ["doctor", "--rollout", str(write(pair)), "--json"])
    said = json.loads(done.stdout)
    assert {"vocabulary", "vllm"} <= {c["name"] for c in said["checks"] if c["state"] == "bad"}
    assert said["bad"] >= 2
    fine = CliRunner().invoke(cli, ["doctor"], standalone_mode=False)
    assert fine.return_value == 0
    assert "nothing to mend" in fine.stdout
