"""The prefix cache: keys and values of prompts that were read before, by blocks of 16 tokens.

As in vLLM a block is found by all tokens up to its end, never by its own alone, and only whole
blocks are kept. Blocks form a tree: a block's key is its parent and its tokens, so equal keys mean
equal prefixes and no hash can collide. Requests with another salt have another root.

The blocks are copies outside of the running rows: a row can be reused the moment its sequence
leaves, and a hit costs a copy of 3 kB a token, far less than reading the token again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from speccheck.engine.llama import Floats

BLOCK_TOKENS = 16
MOST_BLOCKS = 512
"""8,192 tokens; with the packaged pair about 30 MB a server."""


@dataclass
class Block:
    """Keys and values of `BLOCK_TOKENS` tokens: (2*layers, kv_heads, tokens, head_size) each."""

    number: int
    target: Floats
    draft: Floats | None
    """None where the block was read by a request that does not draft with a model."""


class PrefixCache:
    """Blocks by (parent, tokens), the least recently used go first."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._blocks: OrderedDict[tuple[int | str, tuple[int, ...]], Block] = OrderedDict()
        self._numbers = count()
        self._most = most_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, salt: str, ids: Sequence[int], *, drafts: bool) -> list[Block]:
        """Blocks of the longest known prefix of a prompt, in order.

        At least one token is left over, since the last one's logits are wanted. With `drafts` a
        block counts only if it holds the draft model's keys too.
        """
        found: list[Block] = []
        keys = []
        parent: int | str = salt
        for start in range(0, len(ids) - BLOCK_TOKENS, BLOCK_TOKENS):
            key = (parent, tuple(ids[start : start + BLOCK_TOKENS]))
            block = self._blocks.get(key)
            if block is None or (drafts and block.draft is None):
                break
            found.append(block)
            keys.append(key)
            parent = block.number
        for key in reversed(keys):  # parents last: a block must not outlive its parent
            self._blocks.move_to_end(key)
        return found

    def keep(self, salt: str, ids: Sequence[int], target: Floats, draft: Floats | None) -> None:
        """Keep the whole blocks of a prompt that is read.

        target, draft: (2*layers, kv_heads, capacity, head_size), the row it was read into.
        """
        keys = []
        parent: int | str = salt
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            end = start + BLOCK_TOKENS
            key = (parent, tuple(ids[start:end]))
            block = self._blocks.get(key)
            if block is None:
                block = Block(next(self._numbers), target[:, :, start:end].copy(), None)
                self._blocks[key] = block
            if draft is not None and block.draft is None:
                block.draft = draft[:, :, start:end].copy()
            keys.append(key)
            parent = block.number
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
