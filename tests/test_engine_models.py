"""Model directories made on the spot, and the forward pass against a plain numpy one.

The builders here are used by the other engine tests. `reference_logits` is written from the Llama
equations, in float64, for one sequence at a time and without a cache: what it shares with the
engine is the weights file.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from speccheck.engine.cache import KVCache
from speccheck.engine.graph import build_graph, main
from speccheck.engine.llama import LlamaConfig, read_weights
from speccheck.engine.model import Model
from speccheck.errors import EngineError

N_SPECIAL = 2  # <s> 0, </s> 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def write_tokenizer(folder, vocab_size):
    """One token per byte if the vocabulary holds them, else words t2, t3, ..."""
    vocab = {"<s>": 0, "</s>": 1}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size >= len(vocab) + len(alphabet):
        vocab |= {letter: i for i, letter in enumerate(alphabet, start=N_SPECIAL)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        vocab |= {f"t{i}": i for i in range(N_SPECIAL, vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t2"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder, config, weights):
    """A Hugging Face Llama directory with its graph."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder, config["vocab_size"])
    assert main([str(folder)]) == 0
    return folder


def random_model(
    folder,
    *,
    seed=0,
    vocab=300,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ff=48,
    positions=512,
    sharpness=1.0,
    tied=False,
    dtype=np.float32,
):
    """A random Llama; `sharpness` scales the logits (their standard deviation, about)."""
    size = hidden // heads
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    rng = np.random.default_rng(seed)

    def random(rows, columns, scale=1.0):
        return (rng.standard_normal((rows, columns)) * scale * columns**-0.5).astype(dtype)

    weights = {
        "model.embed_tokens.weight": random(vocab, hidden, hidden**0.5),
        "model.norm.weight": np.ones(hidden, dtype),
    }
    if not tied:
        weights["lm_head.weight"] = random(vocab, hidden, sharpness)
    for i in range(layers):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": (1 + rng.standard_normal(hidden) / 8).astype(dtype),
            layer + "post_attention_layernorm.weight": np.ones(hidden, dtype),
            layer + "self_attn.q_proj.weight": random(heads * size, hidden, 2.0),
            layer + "self_attn.k_proj.weight": random(kv_heads * size, hidden, 2.0),
            layer + "self_attn.v_proj.weight": random(kv_heads * size, hidden),
            layer + "self_attn.o_proj.weight": random(hidden, heads * size),
            layer + "mlp.gate_proj.weight": random(ff, hidden),
            layer + "mlp.up_proj.weight": random(ff, hidden),
            layer + "mlp.down_proj.weight": random(hidden, ff),
        }
    return write_model(folder, config, weights)


def perturbed_model(source, folder, *, seed, noise):
    """A copy of a model with noise on its output head: a draft that is right often, not always."""
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    rng = np.random.default_rng(seed)
    head = weights["lm_head.weight"]
    scale = noise * head.std()
    weights["lm_head.weight"] = (head + rng.standard_normal(head.shape) * scale).astype(head.dtype)
    return write_model(folder, config, weights)


def chain_model(folder, text, *, strength=60.0):
    """A model that says `text` over and over: each of its bytes follows the one before.

    The bytes of `text` must differ from each other; any other token leads to the first one.
    """
    ids = byte_ids(text)
    assert len(set(ids)) == len(ids)
    vocab = hidden = 272
    following = np.full(vocab, ids[0])
    following[ids] = [*ids[1:], ids[0]]
    folder = random_model(folder, vocab=vocab, positions=4096)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    head = np.zeros((vocab, hidden), np.float32)
    head[following, np.arange(vocab)] = strength / hidden**0.5
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": np.eye(vocab, dtype=np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": head,
        layer + "input_layernorm.weight": np.ones(hidden, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
        layer + "mlp.gate_proj.weight": np.zeros((8, hidden), np.float32),
        layer + "mlp.up_proj.weight": np.zeros((8, hidden), np.float32),
        layer + "mlp.down_proj.weight": np.zeros((hidden, 8), np.float32),
        layer + "self_attn.o_proj.weight": np.zeros((hidden, 32), np.float32),
    }
    for name in "qkv":
        weights[f"{layer}self_attn.{name}_proj.weight"] = np.zeros((32, hidden), np.float32)
    return write_model(folder, config, weights)


def byte_ids(text):
    """Token ids of a text under the byte tokenizer of `write_tokenizer`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = encoded.pre_tokenize_str(text)
    return [alphabet.index(letter) + N_SPECIAL for piece, _ in pieces for letter in piece]


def reference_logits(folder, ids):
    """Float64 logits (..., n, vocab) of a Llama for ids (..., n), straight from its equations."""
    c = json.loads((folder / "config.json").read_text())
    w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    ids = np.asarray(ids)
    n = ids.shape[-1]

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c["rms_norm_eps"]) * weight

    angles = np.arange(n)[:, None] / c["rope_theta"] ** (np.arange(0, size, 2) / size)
    cos, sin = (np.concatenate([f(angles)] * 2, axis=1)[:, None] for f in (np.cos, np.sin))

    def rotate(x, n_heads):
        x = x.reshape(*ids.shape, n_heads, size)
        half = size // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin

    h = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = norm(h, w[p + "input_layernorm.weight"])
        q = rotate(x @ w[p + "self_attn.q_proj.weight"].T, heads)
        k = rotate(x @ w[p + "self_attn.k_proj.weight"].T, kv_heads)
        v = (x @ w[p + "self_attn.v_proj.weight"].T).reshape(*ids.shape, kv_heads, size)
        out = np.empty((*ids.shape, heads, size))
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[..., head, :] @ k[..., group, :].swapaxes(-1, -2) / np.sqrt(size)
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[..., head, :] = weights @ v[..., group, :]
        h = h + out.reshape(*ids.shape, -1) @ w[p + "self_attn.o_proj.weight"].T
        x = norm(h, w[p + "post_attention_layernorm.weight"])
        gate = x @ w[p + "mlp.gate_proj.weight"].T
        up = x @ w[p + "mlp.up_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(h, w["model.norm.weight"]) @ head.T


SHAPES = [
    {"layers": 1, "heads": 3, "kv_heads": 3, "hidden": 96, "ff": 256, "tied": True},
    {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "ff": 40},
    {"layers": 3, "heads": 8, "kv_heads": 2, "hidden": 64, "ff": 96, "dtype": np.float16},
    {"layers": 2, "heads": 4, "kv_heads": 1, "hidden": 32, "vocab": 500},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cached_batches_equal_the_reference(shape, tmp_path):
    """Logits do not depend on how a text is cut into calls or on what shares the batch."""
    folder = random_model(tmp_path / "model", seed=3, **shape)
    model = Model(folder)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in (90, 33, 71, 12)]
    expected = [reference_logits(folder, text) for text in texts]
    cache = KVCache(model.config, len(texts) + 1)
    done = [0] * len(texts)
    worst = 0.0
    while any(n < len(text) for n, text in zip(done, texts, strict=True)):
        new = []
        for n, text in zip(done, texts, strict=True):
            width = int(rng.choice([0, 1, 1, 5, 17]))
            new.append(text[n : n + width])
        if not any(new):
            continue
        cache.fit(max(n + len(x) for n, x in zip(done, new, strict=True)), len(texts))
        logits = model.forward(cache, 0, done, new, last_only=False)
        wanted = np.concatenate(
            [e[n : n + len(x)] for e, n, x in zip(expected, done, new, strict=True)]
        )
        worst = max(worst, float(np.abs(logits - wanted).max()))
        done = [n + len(x) for n, x in zip(done, new, strict=True)]
    assert worst < 2e-4


def test_last_only_gives_the_last_row_of_each_sequence_with_tokens(tmp_path):
    """A sequence without new tokens has no row."""
    folder = random_model(tmp_path / "model")
    model = Model(folder)
    texts = [[5, 6, 7], [], [8, 9]]
    cache = KVCache(model.config, 3)
    cache.fit(8, 3)
    rows = model.forward(cache, 0, [0, 0, 0], texts, last_only=True)
    wanted = [reference_logits(folder, text)[-1] for text in texts if text]
    np.testing.assert_allclose(rows, wanted, atol=2e-4)


def test_what_lies_beyond_a_sequence_is_never_read(tmp_path):
    """Stale keys after a rollback change nothing."""
    model = Model(random_model(tmp_path / "model"))
    clean, dirty = KVCache(model.config, 1), KVCache(model.config, 1)
    dirty.data[:] = 1e3
    for cache in (clean, dirty):
        model.forward(cache, 0, [0], [[3, 4, 5]], last_only=True)
        model.forward(cache, 0, [3], [[9, 9, 9, 9]], last_only=True)  # rejected later
    a = model.forward(clean, 0, [3], [[7]], last_only=True)
    b = model.forward(dirty, 0, [3], [[7]], last_only=True)
    np.testing.assert_array_equal(a, b)


def test_growing_shrinking_and_moving_keep_a_row(tmp_path):
    """A cache row survives every change of capacity that still holds it, and a move."""
    model = Model(random_model(tmp_path / "model"))
    cache = KVCache(model.config, 3)
    model.forward(cache, 0, [0], [[3, 4, 5, 6]], last_only=True)
    before = cache.data[:, 0, :, :4].copy()
    cache.fit(400, 1)
    assert cache.capacity >= 400
    cache.move(0, 2)
    cache.fit(10, 3)
    assert cache.capacity < 400
    np.testing.assert_array_equal(cache.data[:, 2, :, :4], before)


def test_transformers_agrees(tmp_path):
    """The reference itself is what Hugging Face computes, where that is installed."""
    torch = pytest.importorskip("torch", reason="torch is not a dependency")
    transformers = pytest.importorskip("transformers", reason="transformers is not a dependency")
    folder = random_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, reference_logits(folder, ids), atol=2e-4)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_the_packaged_model_equals_the_reference(part):
    """The committed graph belongs to the committed weights."""
    folder = Path(__file__).parent.parent / "speccheck" / "engine" / "pair" / part
    if not (folder / "model.safetensors").exists():
        pytest.skip("the packaged pair is not here")
    model = Model(folder)
    ids = list(range(20, 60))
    cache = KVCache(model.config, 1)
    cache.fit(len(ids), 1)
    logits = model.forward(cache, 0, [0], [ids], last_only=False)
    assert np.abs(logits - reference_logits(folder, ids)).max() < 2e-3
    assert (folder / "graph.onnx").read_bytes() == build_graph(LlamaConfig.read(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"intermediate_size": 49}, "config.json says (49, 32)"),
        ({"num_hidden_layers": 1}, "tensors the graph does not use: model.layers.1"),
        ({"tie_word_embeddings": True, "vocab_size": 299}, "(299, 32)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_directory_that_is_no_plain_llama_is_refused_by_name(change, words, tmp_path):
    """The error names the field or tensor that does not fit."""
    folder = random_model(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EngineError) as caught:
        read_weights(folder, LlamaConfig.read(folder))
    assert words in str(caught.value)


def test_a_graph_of_another_shape_is_refused(tmp_path):
    """A stale graph.onnx names the command that rebuilds it."""
    folder = random_model(tmp_path / "model")
    other = random_model(tmp_path / "other", positions=256)
    (folder / "graph.onnx").write_bytes((other / "graph.onnx").read_bytes())
    with pytest.raises(EngineError, match=r"python -m speccheck\.engine\.graph"):
        Model(folder)


def test_missing_files_are_named(tmp_path):
    """No config, no weights, broken JSON: one line with the path."""
    with pytest.raises(EngineError, match=r"config\.json"):
        Model(tmp_path)
    folder = random_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        Model(folder)


def test_a_missing_graph_is_built(tmp_path):
    """Without graph.onnx the graph is built in memory, where `onnx` is installed."""
    folder = random_model(tmp_path / "model")
    (folder / "graph.onnx").unlink()
    assert Model(folder).config.n_layers == 2
