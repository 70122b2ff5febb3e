"""From a row of logits to the distribution a token is drawn from, in vLLM's order of steps.

Order: minimum length, logit bias, penalties, grammar, temperature, min-p, top-k, top-p. The same
functions serve every row of a round: row i of a draft is processed as if the i drafted tokens
before it had been committed, which is what makes verification against these rows right.

Probabilities are float64: the verifier divides and subtracts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from speccheck.engine.llama import Floats

Probs = NDArray[np.float64]
GREEDY_BELOW = 1e-5  # vLLM's limit under which a temperature is greedy


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler and of the end of its answer; vLLM's names and defaults.

    `logprobs` and `prompt_logprobs` count alternatives (None: not wanted, -1: whole vocabulary).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether tokens are argmaxes rather than draws."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the row depends on which tokens came before."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


class History:
    """Token counts of one sequence, for penalties: prompt tokens seen, output tokens counted."""

    def __init__(self, vocab_size: int, prompt: Sequence[int]) -> None:
        self.in_prompt = np.zeros(vocab_size, bool)
        self.in_prompt[np.asarray(prompt, np.int64)] = True
        self.output_counts = np.zeros(vocab_size, np.int32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        np.add.at(self.output_counts, np.asarray(tokens, np.int64), 1)


def adjust(
    rows: Floats,
    params: SamplingParams,
    history: History | None,
    draft: Sequence[int],
    *,
    n_output: int,
    stop_ids: Sequence[int],
    masks: Sequence[NDArray[np.bool_]] | None = None,
) -> Floats:
    """Minimum length, logit bias, penalties and masks on the (k+1, vocab) rows of one sequence.

    Row i follows `n_output` committed tokens and draft[:i]. `stop_ids` are masked while the answer
    is shorter than `min_tokens`. Returns new rows; `history` is None where nothing is penalised,
    `masks` (True: allowed) where the answer has no grammar.
    """
    rows = rows.copy()
    for i in range(len(rows)):
        row = rows[i]
        if n_output + i < params.min_tokens:
            row[list(stop_ids)] = -np.inf
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if history is None:
            continue
        counts = history.output_counts
        if i:
            counts = counts.copy()
            np.add.at(counts, np.asarray(draft[:i], np.int64), 1)
        if params.repetition_penalty != 1.0:
            seen = history.in_prompt | (counts > 0)
            scale = np.where(row > 0, 1 / params.repetition_penalty, params.repetition_penalty)
            row[seen] *= scale[seen].astype(np.float32)
        row -= (params.frequency_penalty * counts).astype(np.float32)
        row -= (params.presence_penalty * (counts > 0)).astype(np.float32)
    if masks is not None:
        for row, mask in zip(rows, masks, strict=True):
            row[~mask] = -np.inf
    return rows


def softmax(rows: Floats, temperatures: NDArray[np.float64]) -> Probs:
    """Float64 probabilities of logits (n, vocab) at temperatures (n,), all above 0."""
    scaled = rows.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    scaled /= temperatures[:, None]
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled


def truncate(probs: Probs, params: SamplingParams) -> Probs:
    """min-p, top-k and top-p on (n, vocab) rows, renormalised after each, as vLLM does.

    Tokens tied with the k-th stay. The most likely token always stays.
    """
    if params.min_p > 0:
        floor = params.min_p * probs.max(axis=1, keepdims=True)
        probs = _renormalised(np.where(probs < floor, 0.0, probs))
    vocab = probs.shape[1]
    if 0 < params.top_k < vocab:
        kth = np.partition(probs, vocab - params.top_k, axis=1)[:, vocab - params.top_k, None]
        probs = _renormalised(np.where(probs < kth, 0.0, probs))
    if params.top_p < 1:
        order = np.argsort(-probs, axis=1, kind="stable")
        ordered = np.take_along_axis(probs, order, axis=1)
        before = np.cumsum(ordered, axis=1) - ordered
        keep = before < params.top_p
        keep[:, 0] = True
        kept = np.zeros_like(keep)
        np.put_along_axis(kept, order, keep, axis=1)
        probs = _renormalised(np.where(kept, probs, 0.0))
    return probs


def _renormalised(probs: Probs) -> Probs:
    total: Probs = probs.sum(axis=1, keepdims=True)
    return probs / total


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability under the raw model row, its rank from 1, and alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(row: Floats, token: int, n_top: int) -> TokenLogprobs:
    """Raw log-probabilities (natural log, before temperature and masks: vLLM's `raw_logprobs`).

    row: (vocab,). `n_top` alternatives by falling probability, -1 for all of them.
    """
    logits = row.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    n_top = len(logits) if n_top < 0 else min(n_top, len(logits))
    if n_top:
        candidates = np.argpartition(-logits, n_top - 1)[:n_top]
        order = candidates[np.lexsort((candidates, -logits[candidates]))]
    else:
        order = np.empty(0, np.int64)
    return TokenLogprobs(
        token=token,
        logprob=float(logits[token]),
        rank=int((logits > logits[token]).sum()) + 1,
        top=tuple((int(i), float(logits[i])) for i in order),
    )
