"""What the files of a target and its draft say of each other, before anything is started.

vLLM compares vocabulary sizes and starts; a draft whose ids mean other texts, or a generation
config that makes it refuse requests, shows only under load. Models that are no folder here (hub
names) are said to be not looked at.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from speccheck import vllm
from speccheck.config import Rollout

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, what to do: one line of a doctor's report."""

    name: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class _Served:
    """Models and arguments of a pair that is not running."""

    target: str
    draft: Any
    method: str
    max_model_len: int | None
    generation_config: str
    """Where sampling defaults come from: vllm (none), auto (the target's folder), a folder."""
    overrides: dict[str, Any]
    """Sampling defaults that are given by themselves."""
    dtype: str | None


def check_models(loaded: Rollout) -> list[Check]:
    """Whether target and draft can be a pair, from their files."""
    draft, method = loaded.speculation.get("model"), loaded.speculation["method"]
    if loaded.engine == "attached":
        if method != "draft_model":
            return []
        text = "with the server, not looked at; vLLM compares vocabulary sizes only"
        return [Check("draft", "warn", text)]
    if loaded.engine == "embedded":
        served = _Served(
            loaded.embedded.model, draft, method, loaded.embedded.max_model_len, "vllm", {}, None
        )
    else:
        args = loaded.vllm.args
        served = _Served(
            loaded.vllm.target,
            draft,
            method,
            _length(vllm.argument(args, "max-model-len")),
            str(vllm.argument(args, "generation-config") or "auto"),
            _object(vllm.argument(args, "override-generation-config")),
            vllm.argument(args, "dtype"),
        )
    return _models(served)


def _models(served: _Served) -> list[Check]:
    """What the files of target and draft say of each other."""
    folder = Path(vllm.model_path(served.target))
    if not folder.is_dir():
        text = f"{served.target} is no folder here, so it cannot be looked at"
        return [Check("target", "warn", text)]
    checks = [_generation_config(folder, served), *_lengths(folder, served)]
    if not isinstance(served.draft, str):
        return checks
    other = Path(vllm.model_path(served.draft, "draft"))
    if not other.is_dir():
        text = f"{other} is no folder here: not looked at; vLLM compares vocabulary sizes only"
        return [*checks, Check("draft", "warn", text)]
    return [*checks, *_compared(folder, other, served)]


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _object(value: Any) -> dict[str, Any]:
    """A setting as an object, given as one or as JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return dict(value) if isinstance(value, dict) else {}


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _length(value: Any) -> int | None:
    """--max-model-len as vLLM reads it (8k, 8K); None where it is left to the server.

    >>> _length("25.6k"), _length("8K"), _length("auto"), _length(-1)
    (25600, 8192, None, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", str(value).strip())
    return round(float(found[1]) * _SIZES[found[2]]) if found else None


def _generation_config(folder: Path, served: _Served) -> Check:
    """Defaults that the server would add to every request, min_p above all."""
    source = served.generation_config
    folder = folder if source in ("auto", "vllm") else Path(source)
    given = {} if source == "vllm" else _read(folder, "generation_config.json")
    given |= served.overrides
    refused = {name: given[name] for name in ("min_p", "logit_bias") if given.get(name)}
    shown = {
        name: given[name]
        for name in ("temperature", "top_p", "top_k", "repetition_penalty", "min_p")
        if name in given
    }
    if refused:
        return Check(
            "generation_config",
            "bad",
            f"{folder.name} or its overrides set {refused}: vLLM answers sampled speculative"
            " requests with 400; start both arms with generation-config: vllm and without these",
        )
    if shown:
        return Check(
            "generation_config",
            "warn",
            f"{folder.name} or its overrides set {shown}, which the server adds to requests that"
            " do not",
        )
    return Check("generation_config", "ok", "adds no sampling default to requests")


def _lengths(folder: Path, served: _Served) -> list[Check]:
    config = _read(folder, "config.json")
    own = _own_length(config)
    stored = config.get("dtype") or config.get("torch_dtype") or "not stated"
    dtype = served.dtype or f"{stored} (of the weights)"
    used = served.max_model_len or own
    state: State = "ok"
    text = f"--max-model-len {used}" if used else "not stated"
    if own is not None and used is not None and used > own:
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


def _own_length(config: dict[str, Any]) -> int | None:
    """Positions that a model knows, stretched as vLLM does it; None where it does not say."""
    inner = config.get("text_config")
    config = config | inner if isinstance(inner, dict) else config
    own = config.get("max_position_embeddings")
    rope = _object(config.get("rope_parameters") or config.get("rope_scaling"))
    factor = rope.get("factor")
    # The others (YaRN, Llama 3) state the stretched number.
    is_stretched = (rope.get("rope_type") or rope.get("type")) in ("linear", "dynamic")
    if not isinstance(own, int):
        return None
    return round(own * factor) if is_stretched and isinstance(factor, int | float) else own


def _compared(target: Path, draft: Path, served: _Served) -> list[Check]:
    """A draft model must have the target's ids; heads (EAGLE, Medusa) may map a smaller set."""
    checks = []
    unfit: State = "bad" if served.method == "draft_model" else "warn"
    max_model_len = served.max_model_len
    a, b = _read(target, "config.json"), _read(draft, "config.json")
    sizes = _vocabulary_size(a), _vocabulary_size(b)
    if None in sizes:
        text = f"not stated by {target.name if sizes[0] is None else draft.name}'s config.json"
        checks.append(Check("vocabulary", "warn", text))
    elif sizes[0] != sizes[1]:
        checks.append(
            Check(
                "vocabulary",
                unfit,
                f"target {sizes[0]}, draft {sizes[1]} tokens: a draft must share the vocabulary",
            )
        )
    else:
        checks.append(Check("vocabulary", "ok", f"{sizes[0]} tokens in both"))
    checks.append(_tokenizers(target, draft, unfit))
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
    limit = _own_length(b)
    if limit is not None and max_model_len is not None and limit < max_model_len:
        checks.append(
            Check("draft length", "warn", f"the draft knows {limit} positions, fewer than served")
        )
    if a.get("architectures") == b.get("architectures") and _digest(target) == _digest(draft):
        checks.append(Check("draft", "warn", "draft and target have the same weights"))
    return checks


def _vocabulary_size(config: dict[str, Any]) -> int | None:
    """Rows of the embedding; models that see images keep it with their text model."""
    inner = config.get("text_config")
    size = (config | inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None


def _tokenizers(target: Path, draft: Path, unfit: State) -> Check:
    """VLLM compares sizes only; ids that mean other texts are drafts that never fit."""
    if not (draft / "tokenizer.json").is_file():
        return Check("tokenizer", "ok", "the draft has none of its own; the target's is used")
    words, others = (_vocabulary(folder) for folder in (target, draft))
    if not words or not others:
        text = "no tokenizer.json that tells its ids: not compared"
        return Check("tokenizer", "warn", text)
    differing = sum(others.get(text) != number for text, number in words.items())
    if not differing:
        return Check("tokenizer", "ok", "the same ids for the same texts in both")
    return Check(
        "tokenizer",
        unfit,
        f"{differing} of {len(words)} tokens have another id in the draft: it drafts other texts"
        " than it means",
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json, empty where it has none."""
    tokenizer = _read(folder, "tokenizer.json")
    try:
        words = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(words, list):  # Unigram: pieces with their scores, in the order of their ids
            words = {piece: number for number, (piece, _) in enumerate(words)}
        added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {**words, **added} if words else {}


def _digest(folder: Path) -> str:
    path = folder / "model.safetensors"
    if not path.is_file():
        return str(folder)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
