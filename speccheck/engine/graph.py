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

    The query, key and value projections are one matrix, as are gate and up: fewer products over
    the same weights. All matrices are (inputs, outputs), the transpose of Hugging Face's layout.
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
        shapes[f"{layer}.gate_up"] = (hidden, 2 * width)
        shapes[f"{layer}.down"] = (width, hidden)
    return shapes


def build_graph(config: LlamaConfig) -> bytes:
    """The serialised graph for models of this shape.

    Inputs (int64 unless said): `tokens` (T), `pad_index` (B, S) which token of T fills each padded
    cell, `pack_index` (T) which cell of B*S holds each token, `positions` (B, S), `logit_rows` (R)
    the tokens of T whose logits are wanted, `past_mask` float32 (B, 1, 1, P) and `block_mask`
    float32 (1, 1, S*G, S) added to the scores (G query heads share a key head; rows run over
    position, then head), `past_key.i` and `past_value.i` float32 (B, kv_heads, P, head_size).
    Outputs, float32: `logits` (R, vocab), `new_kv` (2*layers*B, kv_heads, S, head_size): the keys
    of all layers, then the values.
    """
    from onnx import TensorProto, helper  # only at build time; the product ships the result

    heads, kv_heads, size = config.n_heads, config.n_kv_heads, config.head_size
    groups = heads // kv_heads
    nodes: list[Any] = []
    constants: list[Any] = []

    def node(op: str, inputs: list[str], outputs: list[str], *, ms: bool = False, **kw: Any) -> str:
        domain = "com.microsoft" if ms else ""
        nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **kw))
        return outputs[0]

    def shape(name: str, dims: list[int]) -> str:
        constants.append(helper.make_tensor(name, TensorProto.INT64, [len(dims)], dims))
        return name

    shape("q_5d", [0, 0, kv_heads, groups, size])
    shape("kv_4d", [0, 0, kv_heads, size])
    shape("tokens_2d", [-1, heads * size])
    shape("qkv_sizes", [(heads + kv_heads) * size, kv_heads * size])
    shape("qk_sizes", [heads * size, kv_heads * size])
    shape("mlp_sizes", [config.intermediate_size] * 2)
    shape("one", [1])
    # Run-time shapes that need B and S: (B, kv_heads, S*G, size) and (B, S*G...) back again.
    node("Shape", ["pad_index"], ["bs"])
    node("Split", ["bs"], ["b", "s"], num_outputs=2)
    shape("groups", [groups])
    node("Mul", ["s", "groups"], ["sg"])
    shape("kv_heads", [kv_heads])
    shape("size", [size])
    shape("group_size", [groups * size])
    node("Concat", ["b", "kv_heads", "sg", "size"], ["q_4d"], axis=0)
    node("Concat", ["b", "kv_heads", "s", "group_size"], ["context_4d"], axis=0)
    node("Shape", ["past_mask"], ["past_len"], start=3, end=4)
    node("Concat", ["past_len", "s"], ["score_sizes"], axis=0)

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
        node("Split", [p + "qkv_bs", "qkv_sizes"], [p + "qk", p + "v_bs"], axis=-1)
        node(
            "RotaryEmbedding",
            [p + "qk", "positions", "cos", "sin"],
            [p + "qk_rot"],
            ms=True,
        )
        node("Split", [p + "qk_rot", "qk_sizes"], [p + "q_bs", p + "k_bs"], axis=-1)
        node("Reshape", [p + "q_bs", "q_5d"], [p + "q5"])
        node("Transpose", [p + "q5"], [p + "q5t"], perm=[0, 2, 1, 3, 4])
        node("Reshape", [p + "q5t", "q_4d"], [p + "q"])
        for part, names in (("k", new_keys), ("v", new_values)):
            node("Reshape", [p + part + "_bs", "kv_4d"], [p + part + "4"])
            node("Transpose", [p + part + "4"], [p + part], perm=[0, 2, 1, 3])
            names.append(p + part)
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
        node("Reshape", [p + "c", "context_4d"], [p + "c4"])
        node("Transpose", [p + "c4"], [p + "c4t"], perm=[0, 2, 1, 3])
        node("Reshape", [p + "c4t", "tokens_2d"], [p + "c_bs"])
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
        node("MatMul", [p + "y", p + "gate_up"], [p + "gu"])
        node("Split", [p + "gu", "mlp_sizes"], [p + "gate", p + "up"], axis=-1)
        node("QuickGelu", [p + "gate"], [p + "silu"], ms=True, alpha=1.0)  # x * sigmoid(1 * x)
        node("Mul", [p + "silu", p + "up"], [p + "m"])
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
        value("block_mask", TensorProto.FLOAT, [1, 1, "SG", "S"]),
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
