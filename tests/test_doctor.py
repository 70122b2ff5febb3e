"""What the doctor finds before any load: pairs that do not fit, servers that differ."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from speccheck import doctor
from speccheck.cli import cli
from speccheck.engine.settings import PAIR_DIR
from speccheck.errors import UsageError

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


def unigram(pieces: list[str]) -> dict:
    """A tokenizer.json of SentencePiece's kind: pieces with scores, ids by their order."""
    return {"model": {"type": "Unigram", "vocab": [[piece, -1.5] for piece in pieces]}}


@pytest.mark.parametrize(
    ("draft", "state"),
    [
        (unigram(["a", "b", "c"]), "ok"),
        (unigram(["a", "b", "c", "more"]), "ok"),
        (unigram(["b", "a", "c"]), "bad"),
        ({}, "warn"),
        ({"model": None, "added_tokens": [{"content": "a", "id": 7}]}, "warn"),
        ({"model": {"vocab": ["a"]}}, "warn"),
        (unigram(["a", "b", "c"]) | {"added_tokens": None}, "ok"),
    ],
)
def test_tokenizers_of_other_kinds(pair, draft, state):
    """Ids by order, ids that only the draft has, a file that tells none."""
    (pair / "target/tokenizer.json").write_text(json.dumps(unigram(["a", "b", "c"])))
    (pair / "draft/tokenizer.json").write_text(json.dumps(draft))
    assert states(write(pair))["tokenizer"] == state


def test_a_vocabulary_that_stands_with_the_text_model(pair):
    """As models that see images have it; one that is not stated is no fault."""
    config = json.loads((pair / "target/config.json").read_text())
    size = config.pop("vocab_size")
    path = pair / "target/config.json"
    for inner, state in (({"vocab_size": size}, "ok"), ({"vocab_size": 7}, "bad"), ({}, "warn")):
        path.write_text(json.dumps(config | {"text_config": inner}))
        assert states(write(pair))["vocabulary"] == state


def test_a_head_may_map_fewer_tokens(pair):
    """Its config tells another size, and it is no fault."""
    edit(pair / "draft/config.json", vocab_size=1024)
    speculation = {"method": "eagle3", "model": str(pair / "draft"), "num_speculative_tokens": 4}
    assert states(write(pair, speculation=speculation))["vocabulary"] == "warn"


@pytest.mark.parametrize(("given", "state"), [({}, "warn"), ({"async_scheduling": False}, "ok")])
def test_asynchronous_scheduling_that_both_arms_leave(pair, given, state):
    """N-gram switches it off: a difference, unless both were told to."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    servers = {"target": str(pair / "target"), "args": given}
    assert states(write(pair, speculation=speculation, vllm=servers))["speculation"] == state


def test_a_pair_that_does_not_fit_is_not_started(pair):
    """`run` says what the doctor says, before it starts or writes anything."""
    edit(pair / "draft/config.json", vocab_size=1024)
    arguments = ["run", "--rollout", str(write(pair)), "--out", str(pair / "out")]
    with pytest.raises(UsageError, match="vocabulary: target 2048, draft 1024 tokens"):
        CliRunner().invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)
    assert not (pair / "out").exists()


def test_a_draft_that_cannot_be_looked_at(pair):
    """A name at a hub: that vLLM compares vocabulary sizes only is said."""
    speculation = {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 4}
    path = write(pair, speculation=speculation)
    (check,) = [c for c in doctor.examine(path, None) if c.name == "draft"]
    assert (check.state, "vocabulary sizes only" in check.text) == ("warn", True)


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


@pytest.mark.parametrize(
    ("given", "rope", "state"),
    [
        ("1k", None, "ok"),
        ("2K", None, "bad"),
        ("auto", None, "ok"),
        (-1, None, "ok"),
        (2048, {"rope_type": "linear", "factor": 2.0}, "ok"),
        (2048, {"type": "dynamic", "factor": 1.5}, "bad"),
        (2048, {"rope_type": "yarn", "factor": 4.0}, "bad"),
    ],
)
def test_lengths_as_vllm_reads_them(pair, given, rope, state):
    """With a letter, left to it, or of a model that is stretched (`_get_and_verify_max_len`)."""
    for role in ("target", "draft"):
        edit(pair / role / "config.json", max_position_embeddings=1024, rope_scaling=rope)
    servers = {"target": str(pair / "target"), "args": {"max-model-len": given}}
    assert states(write(pair, vllm=servers))["max length"] == state


@pytest.mark.parametrize(
    "args",
    [
        {"override-generation-config": {"min_p": 0.1}},
        {"override_generation_config": '{"min_p": 0.1}', "generation-config": "vllm"},
    ],
)
def test_min_p_among_the_arguments(pair, args):
    """Overrides hold, wherever the other defaults come from."""
    servers = {"target": str(pair / "target"), "args": args}
    assert states(write(pair, vllm=servers))["generation_config"] == "bad"


WELL = {
    "/v1/models": {"data": [{"id": "m"}]},
    "/version": {"version": "1"},
    "/server_info": {"vllm_config": {"model_config": {"model": "x"}}},
    "/tokenize": {"count": 2, "tokens": [1, 2]},
}


@contextmanager
def says(raw: bytes | None = None, **pages: Any) -> Iterator[str]:
    """A server that answers these pages, or the same bytes to each who comes; its URL."""
    told = WELL | {f"/{name.replace('__', '/')}": page for name, page in pages.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if raw is not None:
                self.wfile.write(raw)
                return
            page = told.get(self.path.partition("?")[0])
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def attached_states(folder: Path, speculative: str) -> dict[str, str]:
    """As `states`, of a server that is well and another one."""
    with says() as target:
        both = {"target_only": f"{target}/v1/", "speculative": speculative}
        return states(write(folder, engine="attached", attached=both))


@pytest.mark.parametrize(
    "answer",
    [
        {"raw": b"SSH-2.0-OpenSSH_9.6\r\n"},
        {"raw": b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"data"'},
        {"v1__models": {"data": None}},
        {"v1__models": {"data": ["m"]}},
        {"v1__models": {"data": 5}},
        {"v1__models": {"data": [{"id": None}]}},
        {"server_info": b"[" * 100_000},
        {"server_info": {"speculative_config": [1]}},
        {"server_info": {"speculative_config": "ngram"}},
    ],
)
def test_a_server_that_answers_nonsense_is_a_line(pair, answer):
    """And no traceback: its address is that of something else."""
    with says(**answer) as url:
        assert attached_states(pair, url)["servers"] == "bad"


@pytest.mark.parametrize("config", ["text", {"model_config": None}, {"model_config": [1]}])
def test_a_configuration_of_another_shape_is_a_difference(pair, config):
    """What is not where vLLM has it is not there."""
    with says(server_info={"vllm_config": config}) as url:
        assert attached_states(pair, url)["differences"] == "bad"


@pytest.mark.parametrize(
    ("page", "state"),
    [
        ({"count": 2, "tokens": [1, 2]}, "ok"),
        ({"count": 2, "tokens": [1, 3]}, "bad"),
        ({"tokens": []}, "warn"),
        ({"error": "no such thing"}, "warn"),
        ([1], "warn"),
        (None, "warn"),
    ],
)
def test_chats_are_compared_where_both_servers_render_them(pair, page, state):
    """What neither of them says is no agreement (llama.cpp answers an empty list)."""
    with says(tokenize=page) as url:
        assert attached_states(pair, url)["chat template"] == state


def test_two_servers_that_render_nothing_do_not_agree(pair, monkeypatch):
    """The same empty answer of both was taken for the same tokens."""
    monkeypatch.setitem(WELL, "/tokenize", {"tokens": []})
    with says() as url:
        assert attached_states(pair, url)["chat template"] == "warn"
