"""One Llama forward pass over a batch of cached sequences, on ONNX Runtime's CPU provider.

ONNX Runtime rather than numpy, because it keeps the weights packed: scoring k+1 positions then
costs little more than one at small batches and its full arithmetic at large ones, as on a GPU.
With numpy five positions cost three times one, and speculation could not pay.

One thread per session, and no spinning: two engines, a client and a test share few cores, and
OpenMP-style pools collapse when another process holds one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccheck.engine.cache import KVCache
from speccheck.engine.graph import GRAPH_FILE, METADATA_KEY, build_graph, shape_key
from speccheck.engine.llama import Floats, LlamaConfig, read_weights
from speccheck.errors import EngineError

Ints = NDArray[np.int64]
_MASKED = np.float32(-1e30)


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
        counts = [len(new) for new in tokens]
        width = max(counts)
        if min(counts) == width:
            pad_index, pack_index = _uniform(batch, width)
        else:
            pad_index, pack_index = _ragged(counts, width)
        flat = np.fromiter((token for new in tokens for token in new), np.int64, sum(counts))
        lengths = np.asarray(past, np.int64)[:, None]
        positions = lengths + np.arange(width)
        if positions.max() >= self.config.max_positions:  # only padding may lie beyond the end
            np.minimum(positions, self.config.max_positions - 1, out=positions)
        capacity = cache.capacity
        mask = np.where(np.arange(capacity) < lengths, np.float32(0), _MASKED)
        if last_only:
            logit_rows = np.cumsum([count for count in counts if count]) - 1
        else:
            logit_rows = np.arange(flat.size)
        last_row = first_row + batch
        feeds: dict[str, Any] = {
            "tokens": flat,
            "pad_index": pad_index,
            "pack_index": pack_index,
            "positions": positions,
            "logit_rows": logit_rows,
            "past_mask": mask[:, None, None, :],
            "block_mask": _block_mask(width, self._groups),
        }
        for layer, name in enumerate(self._cache_names):
            feeds[name] = cache.data[layer, first_row:last_row]
        logits, new_kv = self._session.run(None, feeds)
        block = new_kv.reshape(-1, batch, *new_kv.shape[1:])
        for b, count in enumerate(counts):
            if count:
                cache.write(first_row + b, past[b], block[:, b, :, :count])
        result: Floats = logits
        return result


@lru_cache(maxsize=512)
def _uniform(batch: int, width: int) -> tuple[Ints, Ints]:
    """Padding indices of a batch in which each sequence has the same number of new tokens."""
    cells = np.arange(batch * width)
    return cells.reshape(batch, width), cells


def _ragged(counts: list[int], width: int) -> tuple[Ints, Ints]:
    """Padding indices of a mixed batch; padded cells repeat token 0 and are never read back."""
    filled = np.arange(width) < np.asarray(counts)[:, None]
    pad_index = np.zeros(filled.shape, np.int64)
    pad_index[filled] = np.arange(sum(counts))
    return pad_index, np.flatnonzero(filled)


@lru_cache(maxsize=64)
def _block_mask(width: int, groups: int) -> Floats:
    """Causal mask within the new block, (1, 1, width*groups, width)."""
    mask = np.where(np.tri(width, dtype=bool), np.float32(0), _MASKED)
    return np.repeat(mask, groups, axis=0)[None, None]


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
