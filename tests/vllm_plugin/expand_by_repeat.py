"""Test only: a vLLM plugin that makes the CPU build's sampling right (vllm-project/vllm#55005).

vLLM's CPU stand-in for `expand_kernel` writes into a copy that is thrown away, so the temperature
of drafted positions is whatever memory held. With this folder on PYTHONPATH vLLM finds the entry
point beside it and the same server samples as it should: a broken and a sound server are at hand,
and no wheel is edited. speccheck itself knows of neither.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point `vllm.general_plugins`, called in each of vLLM's processes."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """`x[request]` once per token of the request; tensors as vLLM's function of this name."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
