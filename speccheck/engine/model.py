"""One Llama forward pass over a batch of cached sequences, on ONNX Runtime's CPU provider.

ONNX Runtime rather than numpy, because it keeps the weights packed: scoring k+1 positions then
costs little more than one at small batches and its full arithmetic at large ones, as on a GPU.
With numpy five positions cost three times one, and speculation could not pay.

One thread per session, and no spinning: two engines, a client and a test share few cores, and
OpenMP-style pools collapse when another process holds one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccheck.engine.cache import KVCache
from speccheck.engine.graph import GRAPH_FILE, METADATA_KEY, build_graph, shape_key
from speccheck.engine.llama import Floats, LlamaConfig, read_weights
from speccheck.errors import EngineError

Ints = NDArray[np.int64]
_SEEN, _MASKED = np.float32(0), np.float32(-1e30)


class Model:
    """A loaded model. It holds no sequence state: the caches do, and their owners know lengths."""

    def __init__(self, folder: Path) -> None:
        """Load a Hugging Face Llama directory. Raises EngineError when it cannot be run."""
        self.config = LlamaConfig.read(folder)
        self._session = _session(_read_graph(folder, self.config), folder, self.config)
        layers = range(self.config.n_layers)
        self._cache_names = [f"past_key.{i}" for i in layers] + [f"past_value.{i}" for i in layers]
        self._groups = self.config.n_heads // self.config.n_kv_heads

    def forward(
        self,
        cache: KVCache,
        first_row: int,
        past: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        last_only: bool,
    ) -> Floats:
        """Score new tokens of the sequences in rows first_row..first_row+B and cache their keys.

        `past[b]` is how many tokens of sequence b the cache holds, `tokens[b]` what follows them
        (any number, none included). Returns logits (R, vocab_size): of every new token in order,
        or with `last_only` of the last new token of each sequence that has one.
        """
        batch = len(tokens)
        layout = _layout(tuple(map(len, tokens)))
        lengths = np.array(past, np.int64)[:, None]
        positions = lengths + _counting(layout.width)
        if max(past) + layout.width > self.config.max_positions:  # padding may lie beyond the end
            np.minimum(positions, self.config.max_positions - 1, out=positions)
        mask = np.where(_counting(cache.capacity) < lengths, _SEEN, _MASKED)
        feeds: dict[str, Any] = {
            "tokens": np.array(list(chain.from_iterable(tokens)), np.int64),
            "pad_index": layout.pad_index,
            "pack_index": layout.pack_index,
            "positions": positions,
            "logit_rows": layout.last_rows if last_only else layout.all_rows,
            "past_mask": mask[:, None, None, :],
            "block_mask": _block_mask(layout.width, self._groups),
        }
        rows = cache.data[:, first_row : first_row + batch]
        feeds.update(zip(self._cache_names, rows, strict=True))
        logits, new_kv = self._session.run(None, feeds)
        block = new_kv.reshape(-1, batch, *new_kv.shape[1:])
        for b, new in enumerate(tokens):
            if new:
                cache.write(first_row + b, past[b], block[:, b, :, : len(new)])
        result: Floats = logits
        return result


@dataclass(frozen=True)
class _Layout:
    """How T packed tokens lie in B x S padded cells; see `graph.build_graph`."""

    width: int
    pad_index: Ints
    pack_index: Ints
    all_rows: Ints
    last_rows: Ints


# Steps repeat the same few layouts, and building one costs as much as a draft model's pass.
@lru_cache(maxsize=1024)
def _layout(counts: tuple[int, ...]) -> _Layout:
    """The layout of `counts[b]` tokens a sequence; padded cells repeat token 0 and are not read."""
    width = max(counts)
    filled = np.arange(width) < np.array(counts)[:, None]
    all_rows = np.arange(sum(counts))
    pad_index = np.zeros(filled.shape, np.int64)
    pad_index[filled] = all_rows
    return _Layout(
        width=width,
        pad_index=pad_index,
        pack_index=np.flatnonzero(filled),
        all_rows=all_rows,
        last_rows=np.cumsum([count for count in counts if count]) - 1,
    )


@lru_cache(maxsize=1024)
def _counting(n: int) -> Ints:
    """0..n-1."""
    return np.arange(n)


@lru_cache(maxsize=16)  # a long prompt's is megabytes
def _block_mask(width: int, groups: int) -> Floats:
    """Causal mask within the new block, (1, 1, groups*width, width)."""
    mask = np.where(np.tri(width, dtype=bool), _SEEN, _MASKED)
    return np.tile(mask, (groups, 1))[None, None]


def _read_graph(folder: Path, config: LlamaConfig) -> bytes:
    """graph.onnx of the directory; built on the spot if it is missing and `onnx` is installed."""
    path = folder / GRAPH_FILE
    if path.exists():
        return path.read_bytes()
    try:
        return build_graph(config)
    except ImportError:
        raise EngineError(
            f"{path}: missing; install the onnx package and run "
            f"`python -m speccheck.engine.graph {folder}` once"
        ) from None


def _session(graph: bytes, folder: Path, config: LlamaConfig) -> Any:
    """An ONNX Runtime session of the graph with the directory's weights."""
    import onnxruntime as ort

    weights = read_weights(folder, config)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    )
    try:
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base but Exception
        raise EngineError(
            f"{folder / GRAPH_FILE}: ONNX Runtime refuses the graph ({error}); rebuild it with "
            f"`python -m speccheck.engine.graph {folder}`"
        ) from error
    stored = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    if stored != shape_key(config):
        raise EngineError(
            f"{folder / GRAPH_FILE}: built for another model shape; rebuild it with "
            f"`python -m speccheck.engine.graph {folder}`"
        )
    return session
