"""What this machine can run, and whether a pair of models can be compared: asked before any load.

Each check is a line: what was looked at, what was found, what to do. Nothing is started and nothing
is written. Servers that run already (attached) are asked what they are; models that vLLM or the
embedded engine would load are read as files.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccheck import coverage, gpus, launch, vllm
from speccheck.config import Rollout
from speccheck.context import read_rollout
from speccheck.engine.settings import PAIR_DIR
from speccheck.errors import EngineError, SpeccheckError
from speccheck.model_files import Check, State, check_models

_GIB = 1 << 30


def examine(path: Path | None, python: str | None) -> list[Check]:
    """What this machine can run and, of a rollout, whether its arms can be compared.

    Args:
        path: a rollout file, or None for the machine alone.
        python: interpreter that has vLLM; None takes the rollout's, or ours.
    """
    loaded, checks = None, []
    if path is not None:
        try:
            loaded, _, corpus = read_rollout(path)
        except SpeccheckError as error:
            checks.append(Check("rollout", "bad", str(error)))
        else:
            n = len(loaded.routes)
            text = f"{n} route{'' if n == 1 else 's'}, {len(corpus.prompts)} prompts"
            checks = [Check("rollout", "ok", text), *_rollout(loaded)]
            python = python or loaded.vllm.python
    found = launch.machine()
    return [
        Check("machine", "ok", f"{found['processor']}, {found['cores']} cores, {found['system']}"),
        Check("python", "ok", f"{found['python']}, speccheck {found['speccheck']}"),
        _memory(),
        _disk(Path.cwd()),
        _loopback(),
        _gpus(),
        _embedded(),
        *_vllm(python, needed=loaded is not None and loaded.engine == "vllm"),
        *checks,
    ]


def _memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError):
        return Check("memory", "warn", "not known on this system")
    state: State = "ok" if free > _GIB else "warn"
    advice = "" if state == "ok" else "; the embedded pair needs about 0.5 GiB, vLLM several"
    return Check("memory", state, f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free{advice}")


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("folder", "bad", f"{folder} cannot be written; run where receipts can be kept")
    state: State = "ok" if free > _GIB else "warn"
    return Check("folder", state, f"{folder} can be written, {free / _GIB:.1f} GiB free")


def _loopback() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Check("ports", "bad", f"127.0.0.1 gives no port ({error.strerror})")
    return Check("ports", "ok", "127.0.0.1 gives free ports")


def _gpus() -> Check:
    """GPUs with their memory, by nvidia-ml-py or by nvidia-smi, which comes with the driver."""
    if seen := gpus.found():
        shown = [
            f"{g.index}: {g.name}, {(g.memory_bytes - g.used_bytes) / _GIB:.0f} of"
            f" {g.memory_bytes / _GIB:.0f} GiB free"
            + ("" if g.utilisation is None else f", {g.utilisation:.0%} busy")
            for g in seen
        ]
        return Check("gpu", "ok", "; ".join(shown))
    command = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.used,utilization.gpu"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except FileNotFoundError:
        return Check("gpu", "ok", "none (no nvidia-smi): vLLM's CPU build or the embedded engine")
    except (OSError, subprocess.SubprocessError) as error:
        return Check("gpu", "warn", f"nvidia-smi does not answer ({error})")
    return Check("gpu", "ok", "; ".join(done.stdout.strip().splitlines()) or "none")


def _embedded() -> Check:
    missing = [
        str(path)
        for role in ("target", "draft")
        for name in ("config.json", "graph.onnx", "model.safetensors", "tokenizer.json")
        if not (path := PAIR_DIR / role / name).is_file()
    ]
    if missing:
        return Check("embedded", "bad", f"{missing[0]} is missing; install speccheck again")
    return Check("embedded", "ok", "the packaged pair is there: engine: embedded runs here")


def _vllm(python: str | None, *, needed: bool) -> list[Check]:
    try:
        installed = vllm.find(python)
    except EngineError as error:
        return [Check("vllm", "bad", str(error))]
    if installed is None:
        text = f"{python or 'this interpreter'} has none; attached servers need none here"
        return [Check("vllm", "bad" if needed or python else "ok", text)]
    text = f"{installed.distribution} {installed.version} in {installed.python}"
    state: State = "ok" if installed.version.startswith("0.32.") else "warn"
    if state == "warn":
        text += "; speccheck was tried with 0.32"
    return [Check("vllm", state, text), Check("start", "ok", installed.start_note)]


# --- a rollout's pair ---------------------------------------------------------------------------


def _rollout(loaded: Rollout) -> list[Check]:
    checks = [*_speculation(loaded), *check_models(loaded)]
    return [*checks, *_attached(loaded)] if loaded.engine == "attached" else checks


def _speculation(loaded: Rollout) -> list[Check]:
    refused = coverage.check_coverage(loaded.speculation)
    checks = [Check("speculation", "bad", text) for text in refused]
    if loaded.engine != "embedded":
        remarks = vllm.check_speculation(loaded.speculation, loaded.vllm.args)
        checks += [Check("speculation", "bad", text) for text in remarks.errors]
        checks += [Check("speculation", "warn", text) for text in remarks.warnings]
    method = loaded.speculation["method"]
    k = loaded.speculation.get("num_speculative_tokens")
    return checks or [Check("speculation", "ok", f"{method}, {k} tokens a step")]


def _attached(loaded: Rollout) -> list[Check]:
    """Two servers that run: what they say of themselves, and how they render the same chat."""
    try:
        pair = launch.describe(loaded)
    except SpeccheckError as error:
        return [Check("servers", "bad", str(error))]
    checks = [
        Check(str(arm.arm), "ok", f"{arm.engine}, model {arm.model}, {arm.url}") for arm in pair
    ]
    differing = launch.differences(pair)
    accepted = launch.accepted(differing, loaded.waive)
    if not any(arm.config for arm in pair):
        checks.append(
            Check(
                "differences",
                "warn",
                "the servers do not say how they are configured (vLLM: VLLM_SERVER_DEV_MODE=1)",
            )
        )
    for name, (target, speculative) in differing.items():
        checks.append(
            Check(
                "differences",
                "ok" if name in accepted else "bad",
                f"{name}: {target!r} target-only, {speculative!r} speculative"
                + (f" ({accepted[name]})" if name in accepted else "; make them equal or waive it"),
            )
        )
    for name in ("enable_prefix_caching", "async_scheduling", "max_model_len"):
        values = {str(_setting(arm.config, name)) for arm in pair}
        if len(values) == 1:
            shown = name.removeprefix("enable_").replace("_", " ")
            checks.append(Check(shown, "ok", f"{values.pop()} on both"))
    return [*checks, _chat(pair)]


def _setting(config: Mapping[str, Any], name: str) -> Any:
    for key, value in launch.flat(config).items():
        if key.rsplit(".", 1)[-1] == name:
            return value
    return "not stated"


_CHAT = (
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Name a colour, please."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another."},
)


def _chat(pair: launch.Arms) -> Check:
    """Chat template and system prompt: both servers must make the same tokens of the same chat."""
    rendered = [launch.render(arm.url, arm.model, _CHAT, pair.api_key) for arm in pair]
    if any(one is None or not one["tokens"] for one in rendered):
        return Check("chat template", "warn", "a server does not render chats (/tokenize)")
    if rendered[0] != rendered[1]:
        return Check("chat template", "bad", "the servers make other tokens of the same chat")
    return Check("chat template", "ok", "the same tokens of the same chat, system prompt included")
