"""The key-value cache of one model: a row per running sequence, read by the graph without a copy.

Rows of a batch lie side by side, so that a slice of rows is one contiguous tensor per layer; the
scheduler keeps decoding sequences in the first rows for that reason. All rows share one capacity
that follows the longest sequence in use in steps, because attention runs over the whole capacity:
a cache of the maximum length would make every short request pay for it.
"""

from __future__ import annotations

import numpy as np

from speccheck.engine.llama import Floats, LlamaConfig

_STEP = 32  # tokens; growing copies the rows in use, so steps are neither tiny nor large


class KVCache:
    """Keys and values, float32 (2*layers, rows, kv_heads, capacity, head_size); keys come first.

    Whoever writes knows the lengths: the cache stores none. What lies beyond a sequence's length is
    stale and must be masked.
    """

    def __init__(self, config: LlamaConfig, n_rows: int) -> None:
        self._shape = (2 * config.n_layers, n_rows, config.n_kv_heads, _STEP, config.head_size)
        self.data: Floats = np.zeros(self._shape, np.float32)

    @property
    def capacity(self) -> int:
        """Tokens a row holds at present."""
        return int(self.data.shape[3])

    def fit(self, n_tokens: int, n_rows: int) -> None:
        """Make room for `n_tokens` in each of the first `n_rows` rows, or give back what is spare.

        Gives back only where half is spare: requests that come and go must not copy every time.
        """
        wanted = -(-max(n_tokens, 1) // _STEP) * _STEP
        if wanted <= self.capacity < 2 * wanted + _STEP:
            return
        layers, rows, heads, _, size = self._shape
        data = np.zeros((layers, rows, heads, wanted, size), np.float32)
        keep = min(wanted, self.capacity)
        data[:, :n_rows, :, :keep] = self.data[:, :n_rows, :, :keep]
        self.data = data

    def write(self, row: int, position: int, block: Floats) -> None:
        """Store `block` (2*layers, kv_heads, n, head_size) at tokens position..position+n."""
        self.data[:, row, :, position : position + block.shape[2]] = block

    def row(self, row: int) -> Floats:
        """Keys and values of one row, (2*layers, kv_heads, capacity, head_size); not a copy."""
        view: Floats = self.data[:, row]
        return view

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        self.data[:, target] = self.data[:, source]
