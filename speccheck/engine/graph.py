"""Builds the weightless ONNX graph of a Llama model, so that the weights exist only once.

The graph (some kB) says how to compute; the weights come from the model's own `model.safetensors`
at load time (`model.py`). The same folder therefore loads in vLLM, and a new training run needs a
new graph only when the shape of the model changes. Building needs the `onnx` package; running does
not, because the built `graph.onnx` lies beside the weights. `python -m speccheck.engine.graph DIR`
builds it.

Shape of the computation. A call scores T new tokens that belong to B sequences, at most S of them
to one sequence. The weight products run over the T real tokens, so a sequence that proposes
nothing costs one row, not S; only attention sees the padded B x S view. The cache is an input and
never copied: scores against the past and against the new block are two products, joined on the
score axis for one softmax, split again, and multiplied with the two value blocks. The new keys and
values are an output, and the host writes them into its cache (`cache.py`).

com.microsoft's GroupQueryAttention would be shorter, but it refuses several sequences with several
new tokens over a past, which is what verifying k+1 positions of a batch is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from speccheck.engine.llama import LlamaConfig
from speccheck.errors import UsageError

GRAPH_FILE = "graph.onnx"
METADATA_KEY = "speccheck_shape"
_OPSET = 18


def initializer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the float32 weights the graph expects at load time.

    The query, key and value projections are one matrix: fewer, larger steps. All matrices are
    (inputs, outputs), the transpose of Hugging Face's layout.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    heads, kv_heads, size = config.n_heads, config.n_kv_heads, config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "norm": (hidden,),
        "lm_head": (hidden, config.vocab_size),
        "cos": (config.max_positions, size // 2),
        "sin": (config.max_positions, size // 2),
    }
    for layer in range(config.n_layers):
        shapes[f"{layer}.attention_norm"] = (hidden,)
        shapes[f"{layer}.qkv"] = (hidden, (heads + 2 * kv_heads) * size)
        shapes[f"{layer}.o"] = (heads * size, hidden)
        shapes[f"{layer}.mlp_norm"] = (hidden,)
        shapes[f"{layer}.gate"] = shapes[f"{layer}.up"] = (hidden, width)
        shapes[f"{layer}.down"] = (width, hidden)
    return shapes


def build_graph(config: LlamaConfig) -> bytes:
    """The serialised graph for models of this shape.

    Inputs (int64 unless said): `tokens` (T), `pad_index` (B, S) which token of T fills each padded
    cell, `pack_index` (T) which cell of B*S holds each token, `positions` (B, S), `logit_rows` (R)
    the tokens of T whose logits are wanted, `past_mask` float32 (B, 1, 1, P) and `block_mask`
    float32 (1, 1, G*S, S) added to the scores (G query heads share a key head; rows run over
    head, then position), `past_key.i` and `past_value.i` float32 (B, kv_heads, P, head_size).
    Outputs, float32: `logits` (R, vocab), `new_kv` (2*layers*B, kv_heads, S, head_size): the keys
    of all layers, then the values.
    """
    from onnx import TensorProto, helper  # only at build time; the product ships the result

    heads, kv_heads, size = config.n_heads, config.n_kv_heads, config.head_size
    nodes: list[Any] = []
    constants: list[Any] = []

    def node(op: str, inputs: list[str], outputs: list[str], *, ms: bool = False, **kw: Any) -> str:
        domain = "com.microsoft" if ms else ""
        nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **kw))
        return outputs[0]

    def shape(name: str, dims: list[int]) -> str:
        constants.append(helper.make_tensor(name, TensorProto.INT64, [len(dims)], dims))
        return name

    # In a reshape 0 keeps a dimension and -1 is what is left, so B and S need not be known.
    shape("all_heads", [0, 0, heads + 2 * kv_heads, size])
    shape("grouped", [0, kv_heads, -1, size])
    shape("ungrouped", [0, heads, -1, size])
    shape("cells", [-1, heads * size])
    shape("qkv_heads", [heads, kv_heads, kv_heads])
    node("Shape", ["past_mask"], ["past_len"], start=3, end=4)
    node("Shape", ["block_mask"], ["block_len"], start=3, end=4)
    node("Concat", ["past_len", "block_len"], ["score_sizes"], axis=0)

    scale = size**-0.5
    node("Gather", ["embed", "tokens"], ["h.0"], axis=0)
    new_keys: list[str] = []
    new_values: list[str] = []
    residual, delta = "h.0", ""
    for i in range(config.n_layers):
        p = f"{i}."
        if delta:
            node(
                "SkipSimplifiedLayerNormalization",
                [residual, delta, p + "attention_norm"],
                [p + "x", "", "", p + "h"],
                ms=True,
                epsilon=config.rms_norm_eps,
            )
            residual = p + "h"
        else:
            node(
                "SimplifiedLayerNormalization",
                [residual, p + "attention_norm"],
                [p + "x"],
                epsilon=config.rms_norm_eps,
                axis=-1,
            )
        node("MatMul", [p + "x", p + "qkv"], [p + "qkv_t"])
        node("Gather", [p + "qkv_t", "pad_index"], [p + "qkv_bs"], axis=0)
        node("Reshape", [p + "qkv_bs", "all_heads"], [p + "qkv_bshd"])
        node("Transpose", [p + "qkv_bshd"], [p + "qkv_bhsd"], perm=[0, 2, 1, 3])
        node("Split", [p + "qkv_bhsd", "qkv_heads"], [p + "q0", p + "k0", p + "v"], axis=1)
        node("RotaryEmbedding", [p + "q0", "positions", "cos", "sin"], [p + "q1"], ms=True)
        node("RotaryEmbedding", [p + "k0", "positions", "cos", "sin"], [p + "k"], ms=True)
        node("Reshape", [p + "q1", "grouped"], [p + "q"])
        new_keys.append(p + "k")
        new_values.append(p + "v")
        score = {"ms": True, "transB": 1, "alpha": scale}
        node("FusedMatMul", [p + "q", f"past_key.{i}"], [p + "sp0"], **score)
        node("Add", [p + "sp0", "past_mask"], [p + "sp"])
        node("FusedMatMul", [p + "q", p + "k"], [p + "sn0"], **score)
        node("Add", [p + "sn0", "block_mask"], [p + "sn"])
        node("Concat", [p + "sp", p + "sn"], [p + "scores"], axis=-1)
        node("Softmax", [p + "scores"], [p + "weights"], axis=-1)
        node("Split", [p + "weights", "score_sizes"], [p + "wp", p + "wn"], axis=-1)
        node("MatMul", [p + "wp", f"past_value.{i}"], [p + "cp"])
        node("MatMul", [p + "wn", p + "v"], [p + "cn"])
        node("Add", [p + "cp", p + "cn"], [p + "c"])
        node("Reshape", [p + "c", "ungrouped"], [p + "c_bhsd"])
        node("Transpose", [p + "c_bhsd"], [p + "c_bshd"], perm=[0, 2, 1, 3])
        node("Reshape", [p + "c_bshd", "cells"], [p + "c_bs"])
        node("Gather", [p + "c_bs", "pack_index"], [p + "c_t"], axis=0)
        node("MatMul", [p + "c_t", p + "o"], [p + "attention"])
        node(
            "SkipSimplifiedLayerNormalization",
            [residual, p + "attention", p + "mlp_norm"],
            [p + "y", "", "", p + "h2"],
            ms=True,
            epsilon=config.rms_norm_eps,
        )
        residual = p + "h2"
        node("MatMul", [p + "y", p + "gate"], [p + "g"])
        node("MatMul", [p + "y", p + "up"], [p + "u"])
        node("QuickGelu", [p + "g"], [p + "silu"], ms=True, alpha=1.0)  # x * sigmoid(1 * x)
        node("Mul", [p + "silu", p + "u"], [p + "m"])
        delta = node("MatMul", [p + "m", p + "down"], [p + "mlp"])

    node("Gather", [residual, "logit_rows"], ["rows_h"], axis=0)
    node("Gather", [delta, "logit_rows"], ["rows_d"], axis=0)
    node(
        "SkipSimplifiedLayerNormalization",
        ["rows_h", "rows_d", "norm"],
        ["final"],
        ms=True,
        epsilon=config.rms_norm_eps,
    )
    node("MatMul", ["final", "lm_head"], ["logits"])
    node("Concat", new_keys + new_values, ["new_kv"], axis=0)

    for name, dims in initializer_shapes(config).items():
        constants.append(_external(name, dims))
    value = helper.make_tensor_value_info
    cache_shape: list[str | int | None] = ["B", kv_heads, "P", size]
    inputs = [
        value("tokens", TensorProto.INT64, ["T"]),
        value("pad_index", TensorProto.INT64, ["B", "S"]),
        value("pack_index", TensorProto.INT64, ["T"]),
        value("positions", TensorProto.INT64, ["B", "S"]),
        value("logit_rows", TensorProto.INT64, ["R"]),
        value("past_mask", TensorProto.FLOAT, ["B", 1, 1, "P"]),
        value("block_mask", TensorProto.FLOAT, [1, 1, "GS", "S"]),
    ]
    inputs += [
        value(f"past_{what}.{i}", TensorProto.FLOAT, cache_shape)
        for what in ("key", "value")
        for i in range(config.n_layers)
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["R", config.vocab_size]),
        value("new_kv", TensorProto.FLOAT, ["LB", kv_heads, "S", size]),
    ]
    graph = helper.make_graph(nodes, "llama", inputs, outputs, constants)
    proto = helper.make_model(
        graph,
        producer_name="speccheck",
        ir_version=9,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)],
    )
    helper.set_model_props(proto, {METADATA_KEY: shape_key(config)})
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def shape_key(config: LlamaConfig) -> str:
    """What a graph depends on, as JSON; stored in the graph and compared when it is loaded."""
    return json.dumps(config.shape(), sort_keys=True)


def _external(name: str, dims: tuple[int, ...]) -> Any:
    """An initialiser without data: ONNX Runtime takes the values from the session options."""
    from onnx import TensorProto

    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="given-at-load-time")
    return tensor


def main(arguments: list[str]) -> int:
    """`python -m speccheck.engine.graph DIR...`: write DIR/graph.onnx from DIR/config.json."""
    if not arguments:
        raise UsageError("python -m speccheck.engine.graph: name at least one model directory")
    for argument in arguments:
        folder = Path(argument)
        data = build_graph(LlamaConfig.read(folder))
        (folder / GRAPH_FILE).write_bytes(data)
        print(f"{folder / GRAPH_FILE}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
