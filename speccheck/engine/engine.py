"""The engine: one `step` reads some prompt, drafts, verifies and commits, for the whole batch.

Target-only decoding is the same path with nothing drafted, so both arms differ in the drafts and
in nothing else. A step is synchronous and owns no thread: tests and benches call it directly,
`worker.py` runs it for the server.

Chance is counter-based (`verifier.uniform`) per request seed and round: what a request draws does
not depend on what else is in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from speccheck.engine.adaptive import ProposalLengths
from speccheck.engine.cache import KVCache
from speccheck.engine.drafters import NO_DRAFT, Draft, Drafter, ModelDrafter, NgramDrafter
from speccheck.engine.llama import Floats
from speccheck.engine.metrics import EngineMetrics
from speccheck.engine.model import Model
from speccheck.engine.prefix import BLOCK_TOKENS, Block, PrefixCache
from speccheck.engine.sampling import adjust, softmax, token_logprobs, truncate
from speccheck.engine.scheduler import PrefillChunk, Scheduler
from speccheck.engine.sequence import Output, Request, RequestStats, Sequence
from speccheck.engine.settings import EngineSettings, SpeculativeSettings
from speccheck.engine.text import Tokenizer
from speccheck.errors import EngineError, UsageError
from speccheck.verifier import (
    ALGORITHMS,
    RoundOutcome,
    Stream,
    Verifier,
    greedy_round,
    uniform,
    verify,
)

_NO_IDS = np.empty(0, np.int64)
_NO_UNIFORMS = np.empty(0)


@dataclass(frozen=True)
class Completion:
    """A whole answer, as `Engine.generate` gives it."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: RequestStats


class Engine:
    """A target model, perhaps a drafter, and the requests in flight. Not thread-safe."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        verifier: Verifier | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load the models. `verifier` replaces the algorithm the settings ask for (tests do so).

        Raises EngineError for models that cannot be run together, UsageError for settings that do
        not fit them.
        """
        spec = settings.speculative_config
        self.settings = settings
        self.clock = clock
        self.model = Model(settings.model_dir)
        self.tokenizer = Tokenizer(settings.model_dir)
        config = self.model.config
        if self.tokenizer.vocab_size > config.vocab_size:
            raise EngineError(
                f"{settings.model_dir}: the tokenizer has {self.tokenizer.vocab_size} ids, the "
                f"model {config.vocab_size}"
            )
        self.k = 0 if spec is None else spec.num_speculative_tokens
        n_rows = settings.max_num_seqs + 1  # and a spare one to exchange rows through
        self._drafter = None if spec is None else _drafter(spec, self.model, n_rows)
        limit = config.max_positions
        if isinstance(self._drafter, ModelDrafter):
            limit = min(limit, self._drafter.model.config.max_positions)
        self.max_model_len = settings.max_model_len or limit
        if self.max_model_len > limit:
            raise UsageError(
                f"engine settings: max_model_len {self.max_model_len} exceeds the {limit} "
                "positions of the models"
            )
        adaptive = None if spec is None else spec.adaptive
        self._lengths = None if adaptive is None else ProposalLengths(adaptive, self.k)
        self.verifier = verifier or ALGORITHMS[_algorithm(spec)]
        self.metrics = EngineMetrics(None if spec is None else self.k, self.max_model_len)
        self._cache = KVCache(config, n_rows)
        self._prefixes = PrefixCache() if settings.enable_prefix_caching else None
        self._eos = frozenset(config.eos_ids)
        self._scheduler: Scheduler[Sequence] = Scheduler(
            settings.max_num_seqs, self._move_row, chunk_tokens=settings.max_num_batched_tokens
        )
        self._sequences: dict[str, Sequence] = {}
        self._n_seen = 0

    def warm_up(self) -> None:
        """Run the shapes of a first request once, so that it does not pay for first-time work."""
        models = [self.model]
        if isinstance(self._drafter, ModelDrafter):
            models.append(self._drafter.model)
        ids = [0] * min(64, self.max_model_len - 1)
        for model in models:
            cache = KVCache(model.config, 1)
            cache.fit(len(ids), 1)
            model.forward(cache, 0, [0], [ids], last_only=True)
            for width in (1, self.k + 1):
                model.forward(cache, 0, [1], [ids[:width]], last_only=False)

    @property
    def n_unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UsageError where the prompt is empty, too long or a duplicate."""
        if not 0 < len(request.prompt) < self.max_model_len:
            raise UsageError(
                f"request {request.request_id}: a prompt of {len(request.prompt)} tokens does not "
                f"fit a context of {self.max_model_len}"
            )
        if request.request_id in self._sequences:
            raise UsageError(f"request {request.request_id}: this id is in use")
        seed = request.params.seed
        if seed is None:
            # Unseeded requests differ from each other and repeat with the engine's seed.
            seed = (self.settings.seed << 32) + 0x5EED0000 + self._n_seen
        self._n_seen += 1
        sequence = Sequence(
            request,
            self.tokenizer,
            k=self.k if request.k is None else min(request.k, self.k),
            seed=seed,
            vocab_size=self.model.config.vocab_size,
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        self._update_gauges()

    def abort(self, request_id: str) -> None:
        """Drop a request and free its row at once; unknown ids are ignored (it just finished)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._scheduler.remove(sequence)
        self.metrics.count_finished("abort", sequence.stats)
        self._update_gauges()

    def step(self) -> list[Output]:
        """Advance every running request once. Empty when nothing is in flight."""
        scheduler = self._scheduler
        now = self.clock()
        cached: list[tuple[Sequence, list[Block]]] = []
        for sequence in scheduler.admit():
            sequence.stats.scheduled_s = now
            cached.append((sequence, self._find_prefix(sequence)))
        chunks = scheduler.prefill_chunks()
        outputs: list[Output] = []
        n_tokens = sum(chunk.n_tokens for chunk in chunks)
        decoding = scheduler.decoding
        self._fit(decoding, chunks)
        for sequence, blocks in cached:
            self._restore(sequence, blocks)
        if decoding:
            outputs += self._decode(decoding)
            n_tokens += sum(len(output.token_ids) for output in outputs)
        for chunk in chunks:
            output = self._prefill(chunk)
            if output is not None:
                outputs.append(output)
        if n_tokens:
            self.metrics.observe("iteration_tokens_total", n_tokens)
        self._update_gauges()
        return outputs

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end together; answers in the order asked. For tests and benches."""
        order = []
        for request in requests:
            self.add(replace(request, arrival_s=self.clock()))
            order.append(request.request_id)
        tokens: dict[str, list[int]] = {name: [] for name in order}
        texts: dict[str, list[str]] = {name: [] for name in order}
        done: dict[str, Completion] = {}
        while len(done) < len(order):
            for output in self.step():
                name = output.request_id
                tokens[name] += output.token_ids
                texts[name].append(output.text)
                if output.finish_reason and output.stats:
                    done[name] = Completion(
                        tokens[name], "".join(texts[name]), output.finish_reason, output.stats
                    )
        return [done[name] for name in order]

    # ---------------------------------------------------------------------------------------------

    def _prefill(self, chunk: PrefillChunk[Sequence]) -> Output | None:
        """Read a piece of a prompt; the last piece gives the first token of the answer."""
        sequence, start = chunk.sequence, chunk.sequence.n_prefilled
        tokens = sequence.ids[start : start + chunk.n_tokens]
        n_top = sequence.request.params.prompt_logprobs
        logits = self.model.forward(
            self._cache, sequence.row, [start], [tokens], last_only=n_top is None
        )
        if n_top is not None:
            if start == 0:
                sequence.prompt_logprobs.append(None)
            followers = sequence.ids[start + 1 : min(start + len(tokens) + 1, sequence.n_prompt)]
            sequence.prompt_logprobs += [
                token_logprobs(row, token, n_top)
                for row, token in zip(logits, followers, strict=False)
            ]
        if self._drafter is not None and sequence.k:
            self._drafter.prefill(sequence, start, tokens)
        self.metrics.n_prompt_tokens += len(tokens)
        sequence.n_prefilled += len(tokens)
        if sequence.n_prefilled < sequence.n_prompt:
            return None
        self._keep_prefix(sequence)
        self._scheduler.start_decoding(sequence)
        row = logits[-1:]
        output = self._commit(sequence, self._verify([sequence], [NO_DRAFT], row)[0], NO_DRAFT, row)
        if n_top is not None:
            output.prompt_logprobs = sequence.prompt_logprobs
        return output

    def _find_prefix(self, sequence: Sequence) -> list[Block]:
        """Blocks of the prompt that need not be read; counted as read already."""
        request = sequence.request
        # As in vLLM, scoring a prompt reads it whole: its own log-probabilities are wanted.
        if self._prefixes is None or request.params.prompt_logprobs is not None:
            return []
        blocks = self._prefixes.find(
            request.cache_salt, request.prompt, drafts=self._keeps_keys(sequence)
        )
        n = len(blocks) * BLOCK_TOKENS
        sequence.n_prefilled = sequence.stats.n_cached = n
        self.metrics.n_prompt_tokens += n
        self.metrics.n_prefix_queries += sequence.n_prompt
        self.metrics.n_prefix_hits += n
        return blocks

    def _restore(self, sequence: Sequence, blocks: Seq[Block]) -> None:
        """Copy what was found into the row of a sequence that was just admitted."""
        for i, block in enumerate(blocks):
            self._cache.write(sequence.row, i * BLOCK_TOKENS, block.target)
            if self._drafter is not None and sequence.k:
                self._drafter.restore(sequence.row, i * BLOCK_TOKENS, block)

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Put a prompt that was just read into the prefix cache."""
        if self._prefixes is None:
            return
        draft = None
        if self._drafter is not None and self._keeps_keys(sequence):
            draft = self._drafter.kept(sequence.row)
        request = sequence.request
        self._prefixes.keep(
            request.cache_salt, request.prompt, self._cache.row(sequence.row), draft
        )

    def _keeps_keys(self, sequence: Sequence) -> bool:
        """Whether a draft model has to know the prompt of this sequence too."""
        return isinstance(self._drafter, ModelDrafter) and sequence.k > 0

    def reset_prefix_cache(self) -> None:
        """Forget all prompts that were read; requests in flight keep what they have."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def _decode(self, sequences: list[Sequence]) -> list[Output]:
        """Draft, score all drafts in one target pass, verify, commit."""
        drafts = self._propose(sequences)
        tokens = [
            [sequence.ids[-1], *draft.tokens]
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        past = [len(sequence.ids) - 1 for sequence in sequences]
        logits = self.model.forward(self._cache, 0, past, tokens, last_only=False)
        outcomes = self._verify(sequences, drafts, logits)
        outputs = []
        start = 0
        for sequence, draft, outcome in zip(sequences, drafts, outcomes, strict=True):
            end = start + len(draft.tokens) + 1
            outputs.append(self._commit(sequence, outcome, draft, logits[start:end]))
            start = end
        return outputs

    def _propose(self, sequences: list[Sequence]) -> list[Draft]:
        """Drafts of this round; none where none may be made."""
        if self._drafter is not None:
            wanted = [sequence.draft_budget(self.max_model_len) for sequence in sequences]
            if self._lengths is not None:
                wanted = self._adapt(self._lengths, sequences, wanted)
            if any(wanted):
                drafts = self._drafter.propose(sequences, wanted)
                return [_fitting(s, draft) for s, draft in zip(sequences, drafts, strict=True)]
        return [NO_DRAFT] * len(sequences)

    def _adapt(
        self, lengths: ProposalLengths, sequences: list[Sequence], limits: list[int]
    ) -> list[int]:
        """Lengths by agreement and load; what changed is kept with the request."""
        wanted, changes = lengths.choose(
            [sequence.length for sequence in sequences],
            limits,
            self._scheduler.n_waiting,
            [sequence.stats.n_steps for sequence in sequences],
        )
        for sequence, change in zip(sequences, changes, strict=True):
            if change is not None and sequence.k:
                sequence.stats.length_changes.append(change)
        return wanted

    def _verify(
        self, sequences: Seq[Sequence], drafts: Seq[Draft], logits: Floats
    ) -> list[RoundOutcome]:
        """What each sequence's round commits. logits: k_i+1 rows of each sequence, in order."""
        outcomes: list[RoundOutcome | None] = []
        argmaxes = logits.argmax(axis=1).tolist()
        drawn: list[int] = []
        drawn_rows: list[Floats] = []
        start = 0
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            end = start + len(draft.tokens) + 1
            params = sequence.request.params
            rows = None
            if self._needs_adjusting(sequence):
                matcher = sequence.matcher
                rows = adjust(
                    logits[start:end],
                    params,
                    sequence.history,
                    draft.tokens,
                    n_output=sequence.n_output,
                    stop_ids=[*params.stop_token_ids, *self._eos],
                    masks=None if matcher is None else matcher.masks(draft.tokens),
                )
            if not params.greedy:
                drawn.append(i)
                drawn_rows.append(logits[start:end] if rows is None else rows)
                outcomes.append(None)
            elif rows is None:
                outcomes.append(greedy_round(argmaxes[start:end], draft.tokens))
            else:
                outcomes.append(greedy_round(rows.argmax(axis=1).tolist(), draft.tokens))
            start = end
        if drawn:
            temperatures = np.repeat(
                [sequences[i].request.params.temperature for i in drawn],
                [len(rows) for rows in drawn_rows],
            )
            probs = softmax(np.concatenate(drawn_rows), temperatures)
            start = 0
            for i, rows in zip(drawn, drawn_rows, strict=True):
                end = start + len(rows)
                p = truncate(probs[start:end], sequences[i].request.params)
                outcomes[i] = self._draw(sequences[i], drafts[i], p)
                start = end
        return [outcome for outcome in outcomes if outcome is not None]

    def _draw(self, sequence: Sequence, draft: Draft, p: np.ndarray) -> RoundOutcome:
        """One sampled round through the verifier, k = 0 included."""
        seed, round_ = sequence.seed, sequence.stats.n_steps
        final_u = uniform(seed, Stream.BONUS, round_, 0)
        k = len(draft.tokens)
        if not k:
            return verify(self.verifier, p, None, _NO_IDS, _NO_UNIFORMS, final_u)
        accept_u = np.array([uniform(seed, Stream.ACCEPT, round_, i) for i in range(k)])
        ids = np.array(draft.tokens, np.int64)
        return verify(self.verifier, p, draft.rows, ids, accept_u, final_u)

    def _needs_adjusting(self, sequence: Sequence) -> bool:
        """Whether raw logits are not what is drawn from before temperature."""
        params = sequence.request.params
        return bool(
            sequence.history is not None
            or sequence.matcher is not None
            or params.logit_bias
            or sequence.n_output < params.min_tokens
        )

    def _commit(
        self, sequence: Sequence, outcome: RoundOutcome, draft: Draft, logits: Floats
    ) -> Output:
        """Append a round's tokens; count, time and, at the end of the answer, free the row."""
        n_before, n_drafted = len(sequence.ids), len(draft.tokens)
        tokens = [*draft.tokens[: outcome.accepted], outcome.token]
        output = sequence.commit(tokens, self._eos, self.max_model_len)
        sequence.draft_len = min(sequence.draft_len, n_before + outcome.accepted)
        n_top = sequence.request.params.logprobs
        if n_top is not None:
            output.logprobs = [
                token_logprobs(row, token, n_top)
                for row, token in zip(logits, output.token_ids, strict=False)
            ]
        stats, metrics = sequence.stats, self.metrics
        now = self.clock()
        if stats.n_steps:
            metrics.observe("inter_token_latency_seconds", now - stats.last_token_s)
        else:
            stats.first_token_s = now
            metrics.observe("time_to_first_token_seconds", now - stats.arrival_s)
        stats.last_token_s = now
        stats.n_steps += 1
        metrics.n_generation_tokens += len(output.token_ids)
        if self._lengths is not None and stats.n_steps > 1 and sequence.k:
            self._lengths.observe(sequence.length, outcome.accepted, n_drafted)
        if n_drafted:
            stats.accepted_per_step.append(outcome.accepted)
            stats.drafted_per_step.append(n_drafted)
            metrics.count_draft(outcome.accepted, n_drafted)
        if output.finish_reason:
            self._scheduler.remove(sequence)
            del self._sequences[sequence.request.request_id]
            metrics.count_finished(output.finish_reason, stats)
        return output

    def _fit(self, decoding: Seq[Sequence], chunks: Seq[PrefillChunk[Sequence]]) -> None:
        """Make room in both caches for what this step will write, and keep what they hold."""
        rows = self._scheduler.rows
        lengths = [len(sequence.ids) + self.k for sequence in decoding]
        lengths += [chunk.sequence.n_prefilled + chunk.n_tokens for chunk in chunks]
        lengths += [sequence.n_prefilled for sequence in rows[len(decoding) :]]
        longest = max(lengths, default=0)
        self._cache.fit(longest, len(rows))
        if self._drafter is not None:
            self._drafter.fit(longest, len(rows))

    def _move_row(self, source: int, target: int) -> None:
        self._cache.move(source, target)
        if self._drafter is not None:
            self._drafter.move(source, target)

    def _update_gauges(self) -> None:
        rows = self._scheduler.rows
        self.metrics.n_running = len(rows)
        self.metrics.n_waiting = self._scheduler.n_waiting
        room = self.settings.max_num_seqs * self.max_model_len
        self.metrics.cache_usage = sum(s.n_prefilled + s.n_output for s in rows) / room


def _fitting(sequence: Sequence, draft: Draft) -> Draft:
    """A draft cut to what the sequence's grammar allows.

    A draft without chance is cut before its first invalid token, as in vLLM: p is 0 there, so the
    residual is p itself and nothing is lost. A drawn one is cut *after* it: the token must be
    tested and rejected, because drawing from p instead of the residual where an invalid token
    happened to be drawn would bend the law (W39 of the wrong shortcuts).
    """
    if sequence.matcher is None or not draft.tokens:
        return draft
    n = sequence.matcher.valid_prefix(draft.tokens)
    if draft.rows is not None:
        n = min(n + 1, len(draft.tokens))
        return Draft(draft.tokens[:n], draft.rows[:n])
    return Draft(draft.tokens[:n])


def _algorithm(spec: SpeculativeSettings | None) -> str:
    """The verifier for sampled requests; greedy ones need no distribution."""
    if spec is None:
        return "target_only"
    if spec.rejection_sample_method == "block":
        return "block"
    return "token" if spec.draft_sample_method == "probabilistic" else "one_hot"


def _drafter(spec: SpeculativeSettings, target: Model, n_rows: int) -> Drafter:
    """The drafter the config asks for. Raises EngineError for a draft that does not fit."""
    if spec.method == "ngram":
        return NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max)
    drafter = ModelDrafter(
        spec.model_dir, n_rows, probabilistic=spec.draft_sample_method == "probabilistic"
    )
    mine, theirs = target.config.vocab_size, drafter.model.config.vocab_size
    if mine != theirs:
        raise EngineError(
            f"{spec.model_dir}: the draft model has {theirs} tokens, the target {mine}; "
            "they must share one vocabulary"
        )
    return drafter
