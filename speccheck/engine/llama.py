"""What a Llama model directory holds: its shape (config.json) and its weights (safetensors).

Only what the graph computes is accepted; anything else a config.json may ask for (biases, scaled
RoPE, another activation) is refused by name, because ignoring it would give wrong answers quietly.
Weights are stored as fp16 or float32 and computed in float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccheck.errors import EngineError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama model, in the words of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """The config of a model directory. Raises EngineError where it is no plain Llama."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"{path}: no readable model config ({error})") from error
        return cls.parse(raw, str(path))

    @classmethod
    def parse(cls, raw: dict[str, Any], where: str) -> LlamaConfig:
        """The config from config.json's content. Raises EngineError; `where` names the file."""
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or {}
        wanted = {
            "model_type": (raw.get("model_type"), ("llama",)),
            "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
            "attention_bias": (raw.get("attention_bias", False), (False,)),
            "mlp_bias": (raw.get("mlp_bias", False), (False,)),
            "rope type": (
                rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type"),
                (None, "default"),
            ),
        }
        for what, (value, allowed) in wanted.items():
            if value not in allowed:
                raise EngineError(
                    f"{where}: {what} {value!r} is not what the embedded engine computes "
                    f"(plain Llama); use vLLM for this model"
                )
        try:
            heads = int(raw["num_attention_heads"])
            eos = raw.get("eos_token_id")
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                n_layers=int(raw["num_hidden_layers"]),
                n_heads=heads,
                n_kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_size=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                max_positions=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
                tied=bool(raw.get("tie_word_embeddings", False)),
                bos_id=raw.get("bos_token_id"),
                eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{where}: {error!r} in a Llama config.json") from error

    def shape(self) -> dict[str, float]:
        """What the graph depends on; equal shapes may share a graph."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_size": self.head_size,
            "max_positions": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
        }


def read_weights(folder: Path, config: LlamaConfig) -> dict[str, Floats]:
    """The weights under the graph's names (`graph.initializer_shapes`), float32.

    Reads `model.safetensors`. Raises EngineError when a tensor is missing, left over or misshapen.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    try:
        raw = load_file(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: no readable weights ({error})") from error

    def take(name: str, *dims: int) -> Floats:
        try:
            tensor = raw.pop(name)
        except KeyError:
            raise EngineError(f"{path}: tensor {name} is missing") from None
        if tensor.shape != dims:
            raise EngineError(f"{path}: {name} has shape {tensor.shape}, config.json says {dims}")
        if tensor.dtype not in (np.float16, np.float32):
            raise EngineError(f"{path}: {name} is {tensor.dtype}; store weights as fp16 or float32")
        return tensor.astype(np.float32)

    def matrix(names: list[tuple[str, int]], inputs: int) -> Floats:
        rows = [take(name, outputs, inputs) for name, outputs in names]
        return np.ascontiguousarray(np.concatenate(rows).T)

    hidden, width, size = config.hidden_size, config.intermediate_size, config.head_size
    q_width, kv_width = config.n_heads * size, config.n_kv_heads * size
    weights: dict[str, Floats] = {}
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        weights[f"{i}.attention_norm"] = take(layer + "input_layernorm.weight", hidden)
        weights[f"{i}.mlp_norm"] = take(layer + "post_attention_layernorm.weight", hidden)
        weights[f"{i}.qkv"] = matrix(
            [
                (attention + "q_proj.weight", q_width),
                (attention + "k_proj.weight", kv_width),
                (attention + "v_proj.weight", kv_width),
            ],
            hidden,
        )
        weights[f"{i}.o"] = matrix([(attention + "o_proj.weight", hidden)], q_width)
        weights[f"{i}.gate"] = matrix([(mlp + "gate_proj.weight", width)], hidden)
        weights[f"{i}.up"] = matrix([(mlp + "up_proj.weight", width)], hidden)
        weights[f"{i}.down"] = matrix([(mlp + "down_proj.weight", hidden)], width)
    weights["norm"] = take("model.norm.weight", hidden)
    weights["embed"] = take("model.embed_tokens.weight", config.vocab_size, hidden)
    head = raw.pop("lm_head.weight", None)  # some writers store the tied head again
    if config.tied:
        weights["lm_head"] = np.ascontiguousarray(weights["embed"].T)
    elif head is None:
        raise EngineError(f"{path}: tensor lm_head.weight is missing and embeddings are not tied")
    else:
        raw["lm_head.weight"] = head
        weights["lm_head"] = matrix([("lm_head.weight", config.vocab_size)], hidden)
    if raw:
        raise EngineError(f"{path}: tensors the graph does not use: {', '.join(sorted(raw))}")
    weights["cos"], weights["sin"] = rope_tables(config)
    return weights


def rope_tables(config: LlamaConfig) -> tuple[Floats, Floats]:
    """Cosines and sines of the rotary angles, (max_positions, head_size/2), computed in float64."""
    half = config.head_size // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(config.max_positions)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
