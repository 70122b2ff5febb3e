"""The Llama architecture in a hundred lines, and a start that already knows how to copy.

Parameter names are Hugging Face's, so that the state dict is the file. What decides whether a
model this small learns to copy within minutes is where it starts: `induce` builds an induction
circuit (Olsson et al. 2022, "In-context learning and induction heads") into ordinary weights. In
layer 0 two heads look one and two tokens back and write what they see into subspaces of their own;
from layer 1 on, heads look for a place whose previous token equals the current one and copy what
stands there. Everything else is trained as usual, and nothing but plain Llama weights comes out.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; `width` is heads * 32."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ff: int
    vocabulary: int = 2048
    head: int = 32
    theta: float = 10_000.0
    eps: float = 1e-5


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length x head) in Hugging Face's layout: dimension i pairs with i + 16."""
    frequencies = shape.theta ** (-torch.arange(0, shape.head, 2) / shape.head)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dimensions by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within a batch of sequences of equal length."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, -1, self.shape.head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, -1, self.shape.head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.shape.head).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = functional.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each position."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then MLP, each added to its input."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token ids to the normed hidden state; `head` turns that into logits (tied embeddings)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Normed hidden states of a batch of ids."""
        cos, sin = rotation(self.shape, ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return hidden @ self.embed_tokens.weight.T


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal rows that ignore dimension 0, which carries the constant."""
    matrix = torch.randn(columns - 1, rows, generator=generator)
    basis, _ = torch.linalg.qr(matrix)
    return torch.cat((torch.zeros(rows, 1), basis.T), dim=1)


def copy_values(attention: Attention, kv_head: int, generator: torch.Generator) -> None:
    """Output = transposed value: what the heads of this group attend to, they write down again."""
    shape = attention.shape
    group = shape.heads // shape.kv_heads
    value = orthonormal(shape.head, shape.width, generator)
    attention.v_proj.weight[kv_head * shape.head : (kv_head + 1) * shape.head] = value
    for q_head in range(kv_head * group, (kv_head + 1) * group):
        columns = slice(q_head * shape.head, (q_head + 1) * shape.head)
        attention.o_proj.weight[:, columns] = value.T * (0.8 / group)


@torch.no_grad()
def induce(model: Llama, twins: list[tuple[int, int]], generator: torch.Generator) -> None:
    """Set the weights to the copying start; `twins` are the ids of "X" and " X".

    With less than two layers there is no circuit, only the look-back heads and one that copies.
    """
    shape, sigma = model.shape, 0.5
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            if name.endswith("down_proj.weight"):
                weight.mul_(0.3)
    embedding = model.embed_tokens.weight
    embedding.normal_(0, sigma, generator=generator)
    for bare, spaced in twins:
        embedding[spaced] = 0.8 * embedding[bare] + 0.6 * embedding[spaced]
    embedding[:, 0] = 4 * sigma
    model.norm.weight.fill_(0.1)

    group, half = shape.heads // shape.kv_heads, shape.head // 2
    frequencies = shape.theta ** (-torch.arange(half) / half)
    fast = [i for i in range(half) if frequencies[i] >= 0.02]
    slow = [i for i in range(half) if frequencies[i] < 0.02]
    slow_rows = torch.tensor([*slow, *(i + half for i in slow)])
    attention = cast("Layer", model.layers[0]).self_attn
    n_back = 2
    # Without groups each look-back head has a key head of its own; else both share key head 0.
    for q_head in range(n_back):
        kv_head = q_head // group
        q, k = q_head * shape.head, kv_head * shape.head
        attention.q_proj.weight[q : q + shape.head] *= 0.1
        if q_head % group == 0:
            attention.k_proj.weight[k : k + shape.head] *= 0.1
            attention.v_proj.weight[k : k + shape.head] = orthonormal(
                shape.head, shape.width, generator
            )
        strength, shift = 1.6, q_head + 1
        for i in fast:
            angle = frequencies[i] * shift
            attention.k_proj.weight[k + i, 0] = strength
            attention.k_proj.weight[k + i + half, 0] = 0.0
            attention.q_proj.weight[q + i, 0] = strength * math.cos(angle)
            attention.q_proj.weight[q + i + half, 0] = -strength * math.sin(angle)
    subspaces = orthonormal(n_back * shape.head, shape.width, generator).view(
        n_back, shape.head, -1
    )
    for q_head in range(n_back):
        q = q_head * shape.head
        attention.o_proj.weight[:, q : q + shape.head] = subspaces[q_head].T
    for q_head in range(n_back, -(-n_back // group) * group):
        attention.o_proj.weight[:, q_head * shape.head :][:, : shape.head] *= 0.3
    for kv_head in range(-(-n_back // group), shape.kv_heads):
        copy_values(attention, kv_head, generator)
    # What the look-back heads read of a token: later queries must read the same of the current one.
    read = attention.v_proj.weight[: shape.head].clone()

    for depth in range(1, shape.layers):
        attention = cast("Layer", model.layers[depth]).self_attn
        for kv_head in range(shape.kv_heads):
            copy_values(attention, kv_head, generator)
        if depth > 2:
            continue
        for q_head in (0, group):  # one head for each key head
            kv_head = q_head // group
            mix = orthonormal(len(slow_rows), shape.head + 1, generator)[:, 1:]
            key = mix @ subspaces[0]
            query = mix @ read
            if kv_head == 1:  # the last two tokens must match, not only the last one
                mix = orthonormal(len(slow_rows), shape.head + 1, generator)[:, 1:]
                key = key + mix @ subspaces[1]
                query = query + mix @ subspaces[0]
            attention.k_proj.weight[kv_head * shape.head :][: shape.head] *= 0.1
            attention.q_proj.weight[q_head * shape.head :][: shape.head] *= 0.1
            attention.k_proj.weight[kv_head * shape.head + slow_rows] += key
            attention.q_proj.weight[q_head * shape.head + slow_rows] += query * 2.5
