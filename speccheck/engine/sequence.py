"""One request inside the engine: what was asked, what has been committed, how it ends, its times.

`Sequence.commit` is the only place where tokens become output, one at a time, whatever the size of
the accepted block: the answer ends exactly at the token that completes a stop, and what a verify
step accepted beyond it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from speccheck.engine.adaptive import LengthChange, LengthState
from speccheck.engine.grammar import Grammar, Matcher
from speccheck.engine.sampling import History, SamplingParams, TokenLogprobs
from speccheck.engine.text import Detokenizer, StopMatcher, Tokenizer


@dataclass(frozen=True)
class Request:
    """What the engine is asked. `k` caps the proposal length: None as configured, 0 target-only.

    `arrival_s` is when the server received it, on the engine's clock.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    k: int | None = None
    arrival_s: float = 0.0
    grammar: Grammar | None = None
    """What the answer must be, token by token; None for free text."""
    cache_salt: str = ""
    """Requests find each other's prompts in the prefix cache only under the same salt."""


@dataclass
class RequestStats:
    """Counts and times of one request; seconds on the engine's clock, 0 while not reached."""

    n_prompt: int
    arrival_s: float
    n_cached: int = 0
    """Prompt tokens whose keys were found in the prefix cache."""
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    n_output: int = 0
    n_steps: int = 0
    """Target passes that committed tokens, that of the prompt's end included."""
    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    length_changes: list[LengthChange] = field(default_factory=list)
    """Of an adaptive proposal length."""

    def as_metrics(self, k: int | None) -> dict[str, Any]:
        """As vLLM's `PerRequestMetrics`, "detailed"; `k` is None on target-only servers.

        Accepted counts are taken before a stop cuts the block, steps count only where something
        was drafted, and time to first token runs from scheduling, not from arrival. Unlike vLLM's
        they are there also when a stop string ended the answer.
        """
        generation_s = self.last_token_s - self.first_token_s
        total_s = self.last_token_s - self.scheduled_s
        gaps = self.n_output - 1
        return {
            "time_to_first_token_ms": (self.first_token_s - self.scheduled_s) * 1e3,
            "generation_time_ms": generation_s * 1e3,
            "queue_time_ms": (self.scheduled_s - self.arrival_s) * 1e3,
            "mean_itl_ms": generation_s / gaps * 1e3 if gaps > 0 else None,
            "tokens_per_second": self.n_output / total_s if total_s > 0 else None,
            "speculative_decoding": None if k is None else self._speculation(k),
        }

    def _speculation(self, k: int) -> dict[str, Any]:
        steps = len(self.drafted_per_step)
        accepted, drafted = sum(self.accepted_per_step), sum(self.drafted_per_step)
        histogram = [0] * (k + 1)
        for n in self.accepted_per_step:
            histogram[n] += 1
        found = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": k,
            "per_step_accepted": list(self.accepted_per_step),
            "per_step_drafted": list(self.drafted_per_step),
        }
        if self.length_changes:  # ours: vLLM's length is fixed
            found["proposal_length_changes"] = [
                {"step": change.step, "k": change.k, "reason": change.reason}
                for change in self.length_changes
            ]
        return found


@dataclass
class Output:
    """What one engine step adds to one request. `stats` comes with the last one.

    `finish_reason` is stop | length | abort | error or None; `stop_reason` the stop string or stop
    token id that ended it (None for the end-of-sequence token, as in vLLM).
    """

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stats: RequestStats | None = None


class Sequence:
    """A request in the engine. Row, order and prefill progress belong to the scheduler."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, k: int, seed: int, vocab_size: int
    ) -> None:
        """`k` is the proposal length it may use, `seed` what its chance is drawn from."""
        params = request.params
        self.request = request
        self.k = k
        self.seed = seed
        self.ids = list(request.prompt)
        self.n_prompt = len(request.prompt)
        self.draft_len = 0
        """Tokens whose keys the draft model's cache holds and that are still right."""
        self.length = LengthState()
        self.stats = RequestStats(self.n_prompt, request.arrival_s)
        self.history = History(vocab_size, request.prompt) if params.penalised else None
        self.matcher = None if request.grammar is None else Matcher(request.grammar)
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.row = -1
        self.order = (0, 0)
        self.n_prefilled = 0
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopMatcher(params.stop)

    @property
    def priority(self) -> int:
        """Lower goes first."""
        return self.request.priority

    @property
    def n_output(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.ids) - self.n_prompt

    def draft_budget(self, max_model_len: int) -> int:
        """How many tokens are worth drafting now: never more than the answer may still hold.

        One less than what is left, because a verify step always adds one token of its own.
        Depends on counts only, not on drawn tokens, so it cannot bend the output's law.
        """
        left = min(self.request.params.max_tokens - self.n_output, max_model_len - len(self.ids))
        return max(0, min(self.k, left - 1))

    def commit(self, tokens: Seq[int], eos_ids: frozenset[int], max_model_len: int) -> Output:
        """Append the tokens of one round up to the first that ends the answer."""
        params = self.request.params
        kept: list[int] = []
        pieces: list[str] = []
        for token in tokens:
            self.ids.append(token)
            kept.append(token)
            if self._ends(token, params, eos_ids):
                if params.include_stop_str_in_output:
                    pieces += [self._stops.flush(), self._detokenizer.add(token)]
                break
            piece = self._detokenizer.add(token)
            if params.stop:
                # vLLM looks for stop strings only past min_tokens.
                if self.n_output < params.min_tokens:
                    piece = self._stops.flush() + piece
                else:
                    piece, stop = self._stops.add(
                        piece, include_stop=params.include_stop_str_in_output
                    )
                    if stop is not None:
                        self.finish_reason, self.stop_reason = "stop", stop
            pieces.append(piece)
            if self.finish_reason:
                break
            if self.n_output >= params.max_tokens or len(self.ids) >= max_model_len:
                self.finish_reason = "length"
                break
        if self.finish_reason and not isinstance(self.stop_reason, str):
            pieces.append(self._end_of_text())
        if self.history is not None:
            self.history.commit(kept)
        if self.matcher is not None:
            self.matcher.advance(kept)
        self.stats.n_output = self.n_output
        return Output(
            self.request.request_id,
            kept,
            "".join(pieces),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            stats=self.stats if self.finish_reason else None,
        )

    def _ends(self, token: int, params: SamplingParams, eos_ids: frozenset[int]) -> bool:
        """Whether this token ends the answer by its id."""
        if self.n_output < params.min_tokens:
            return False
        if token in params.stop_token_ids:
            self.stop_reason = token
        elif token not in eos_ids or (params.ignore_eos and self.matcher is None):
            return False  # after the end of a grammar nothing can follow
        self.finish_reason = "stop"
        return True

    def _end_of_text(self) -> str:
        """Text held back for a character or a stop string that will not be completed."""
        return self._stops.flush() + self._detokenizer.flush()
