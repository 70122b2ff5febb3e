"""What this machine can run, and whether a pair of models can be compared: asked before any load.

Each check is a line: what was looked at, what was found, what to do. Nothing is started and nothing
is written. Servers that run already (attached) are asked what they are; models that vLLM or the
embedded engine would load are read as files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from speccheck import coverage, gpus, launch, vllm
from speccheck.config import Rollout
from speccheck.context import read_rollout
from speccheck.engine.settings import PAIR_DIR
from speccheck.errors import EngineError, SpeccheckError

State = Literal["ok", "warn", "bad"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a doctor's report."""

    name: str
    state: State
    text: str


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
            text = f"{len(loaded.routes)} routes, {len(corpus.prompts)} prompts"
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
    checks = _speculation(loaded)
    if loaded.engine == "attached":
        return [*checks, *_attached(loaded)]
    draft = loaded.speculation.get("model")
    if loaded.engine == "embedded":
        served = _Served(loaded.embedded.model, draft, loaded.embedded.max_model_len, "vllm", None)
    else:
        args = loaded.vllm.args
        served = _Served(
            loaded.vllm.target,
            draft,
            _argument(args, "max-model-len"),
            str(_argument(args, "generation-config") or "auto"),
            _argument(args, "dtype"),
        )
    return [*checks, *_models(served)]


@dataclass(frozen=True, slots=True)
class _Served:
    """Models and arguments of a pair that is not running."""

    target: str
    draft: Any
    max_model_len: int | None
    generation_config: str
    dtype: str | None


def _speculation(loaded: Rollout) -> list[Check]:
    refused = coverage.check_coverage(loaded.speculation)
    checks = [Check("speculation", "bad", text) for text in refused]
    if loaded.engine != "embedded":
        remarks = vllm.check_speculation(loaded.speculation)
        checks += [Check("speculation", "bad", text) for text in remarks.errors]
        checks += [Check("speculation", "warn", text) for text in remarks.warnings]
    method = loaded.speculation["method"]
    k = loaded.speculation.get("num_speculative_tokens")
    return checks or [Check("speculation", "ok", f"{method}, {k} tokens a step")]


def _argument(args: Mapping[str, Any], name: str) -> Any:
    return next(
        (v for key, v in args.items() if key.lstrip("-").replace("_", "-") == name),
        None,
    )


def _models(served: _Served) -> list[Check]:
    """What the files of target and draft say of each other."""
    folder = Path(vllm.model_path(served.target))
    if not folder.is_dir():
        text = f"{served.target} is no folder here, so it cannot be looked at"
        return [Check("target", "warn", text)]
    checks = [_generation_config(folder, served.generation_config), *_lengths(folder, served)]
    if not isinstance(served.draft, str):
        return checks
    other = Path(vllm.model_path(served.draft, "draft"))
    if not other.is_dir():
        return [*checks, Check("draft", "warn", f"{other} is no folder here: not looked at")]
    return [*checks, *_compared(folder, other, served.max_model_len)]


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _generation_config(folder: Path, source: str) -> Check:
    """Defaults that the server would add to every request, min_p above all."""
    given = _read(folder, "generation_config.json")
    refused = {name: given[name] for name in ("min_p", "logit_bias") if given.get(name)}
    shown = {
        name: given[name]
        for name in ("temperature", "top_p", "top_k", "repetition_penalty", "min_p")
        if name in given
    }
    if refused and source != "vllm":
        return Check(
            "generation_config",
            "bad",
            f"{folder.name} sets {refused}: vLLM answers every speculative request with 400;"
            " start both arms with generation-config: vllm",
        )
    if shown and source != "vllm":
        return Check(
            "generation_config",
            "warn",
            f"{folder.name} sets {shown}, which the server adds to requests that do not",
        )
    return Check("generation_config", "ok", "adds no sampling default to requests")


def _lengths(folder: Path, served: _Served) -> list[Check]:
    config = _read(folder, "config.json")
    own = config.get("max_position_embeddings")
    stored = config.get("dtype") or config.get("torch_dtype") or "not stated"
    dtype = served.dtype or f"{stored} (of the weights)"
    used = served.max_model_len or own
    state: State = "ok"
    text = f"--max-model-len {used}" if used else "not stated"
    if isinstance(own, int) and isinstance(used, int) and used > own:
        state, text = "bad", f"--max-model-len {used} is over the model's {own}"
    return [
        Check("max length", state, text),
        Check(
            "dtype",
            "ok",
            dtype
            if served.dtype == "float32"
            else f"{dtype}; below float32 expect greedy ties that break either way",
        ),
    ]


def _compared(target: Path, draft: Path, max_model_len: int | None) -> list[Check]:
    checks = []
    a, b = _read(target, "config.json"), _read(draft, "config.json")
    sizes = (a.get("vocab_size"), b.get("vocab_size"))
    if sizes[0] != sizes[1]:
        checks.append(
            Check(
                "vocabulary",
                "bad",
                f"target {sizes[0]}, draft {sizes[1]} tokens: a draft must share the vocabulary",
            )
        )
    else:
        checks.append(Check("vocabulary", "ok", f"{sizes[0]} tokens in both"))
    checks.append(_tokenizers(target, draft))
    stops = (a.get("eos_token_id"), b.get("eos_token_id"))
    same = stops[0] == stops[1]
    checks.append(
        Check(
            "stop tokens",
            "ok" if same else "warn",
            f"eos {stops[0]}"
            if same
            else f"target {stops[0]}, draft {stops[1]}: the target's hold",
        )
    )
    limit = b.get("max_position_embeddings")
    if isinstance(limit, int) and max_model_len is not None and limit < max_model_len:
        checks.append(
            Check("draft length", "warn", f"the draft knows {limit} positions, fewer than served")
        )
    if a.get("architectures") == b.get("architectures") and _digest(target) == _digest(draft):
        checks.append(Check("draft", "warn", "draft and target have the same weights"))
    return checks


def _tokenizers(target: Path, draft: Path) -> Check:
    """VLLM compares sizes only; ids that mean other texts are drafts that never fit."""
    if not (draft / "tokenizer.json").is_file():
        return Check("tokenizer", "ok", "the draft has none of its own; the target's is used")
    words, others = (_vocabulary(folder) for folder in (target, draft))
    if words == others:
        return Check("tokenizer", "ok", "the same ids for the same texts in both")
    differing = sum(others.get(text) != number for text, number in words.items())
    return Check(
        "tokenizer",
        "bad",
        f"{differing} of {len(words)} tokens have another id in the draft: it drafts other texts"
        " than it means",
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    model = _read(folder, "tokenizer.json")
    words = dict(model.get("model", {}).get("vocab", {}))
    added = {entry["content"]: entry["id"] for entry in model.get("added_tokens", ())}
    return words | added


def _digest(folder: Path) -> str:
    path = folder / "model.safetensors"
    if not path.is_file():
        return str(folder)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            checks.append(Check(name, "ok", f"{values.pop()} on both"))
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
    if None in rendered:
        return Check("chat template", "warn", "a server does not render chats (/tokenize)")
    if rendered[0] != rendered[1]:
        return Check("chat template", "bad", "the servers make other tokens of the same chat")
    return Check("chat template", "ok", "the same tokens of the same chat, system prompt included")
