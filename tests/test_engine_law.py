"""Sampled output follows the target's law, and the checks that say so catch wrong verifiers.

Tests T1 to T5 of the battery: the target's conditional probabilities of the generated tokens come
from the plain numpy forward pass, so the only thing shared with the engine is the weights file. A
run is rejected when the smallest of its p-values (Holm) is at most ALPHA: a right engine is
rejected with probability ALPHA at most per run, and the seeds are fixed, so nothing here is flaky.
The first generated token comes from the prompt pass and is left out. The wrong shortcuts carry the
numbers of the catalogue in the statistics notes.
"""

import numpy as np
import pytest
from broken_server import ArgmaxDraft, BonusFromDraft, FallsToLastId
from shortcuts import (
    AbsoluteResidual,
    AcceptIfLikelier,
    AcceptWithTarget,
    FreshDrawAfterMismatch,
    TypicalAcceptance,
)
from test_engine_models import perturbed_model, random_model, reference_logits

from speccheck import battery
from speccheck import verifier as v
from speccheck.controls import Lenience, ResampleFromTarget
from speccheck.engine import drafters
from speccheck.engine.cache import KVCache
from speccheck.engine.drafters import NO_DRAFT, Draft, ModelDrafter
from speccheck.engine.engine import Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings

ALPHA = 1e-3
VOCAB = 24
N_SAMPLES = 1600
N_PROMPTS = 1
N_TOKENS = 6
K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A small model of high entropy."""
    folder = tmp_path_factory.mktemp("target") / "m"
    return random_model(folder, seed=11, vocab=VOCAB, layers=1, sharpness=1.6)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    """A draft of the same kind that agrees with the target in part."""
    return perturbed_model(target, tmp_path_factory.mktemp("draft") / "m", seed=12, noise=0.8)


@pytest.fixture(scope="module")
def prompts(target):
    """A prompt whose first answer token is nearly certain: later positions share contexts."""
    rng = np.random.default_rng(13)
    candidates = rng.integers(2, VOCAB, (3000, 4))
    logits = reference_logits(target, candidates)[:, -1]
    top = softmax(logits).max(axis=1)
    return [tuple(candidates[i].tolist()) for i in np.argsort(-top)[:N_PROMPTS]]


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def build(target, spec=None, verifier=None):
    raw = {"model": str(target), "speculative_config": spec, "max_num_seqs": 128}
    return Engine(EngineSettings.parse(raw), verifier=verifier)


def speculative(draft, **more):
    return {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": K,
        "draft_sample_method": "probabilistic",
    } | more


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": K,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


def sample(engine, prompts, n_tokens=N_TOKENS, **params):
    """(prompts, samples, tokens) generated ids."""
    asked = {"temperature": 1.0, "max_tokens": n_tokens, "ignore_eos": True} | params
    requests = [
        Request(f"{i}-{seed}", prompt, SamplingParams(seed=seed, **asked))
        for i, prompt in enumerate(prompts)
        for seed in range(N_SAMPLES)
    ]
    ids = [answer.token_ids for answer in engine.generate(requests)]
    return np.array(ids).reshape(len(prompts), N_SAMPLES, n_tokens)


def conditionals(target, prompts, tokens, process=softmax):
    """(prompts, samples, tokens-1, vocab) target law of each token from the second on.

    `process` turns logits (samples, vocab) into probabilities; it may take the generated prefix.
    """
    laws = []
    for prompt, rows in zip(prompts, tokens, strict=True):
        ids = np.concatenate([np.tile(prompt, (len(rows), 1)), rows], axis=1)
        laws.append(process(reference_logits(target, ids)[:, len(prompt) : -1]))
    return np.stack(laws)


def p_values(tokens, laws):
    """Smallest-first Holm p-values of T1 to T5 by the product's own battery.

    Every token's law is the reference's whole row, so nothing is lumped into a tail.
    """
    for seen, law in zip(tokens[..., 1:].reshape(-1), laws.reshape(-1, VOCAB), strict=True):
        assert law[seen] > 0, "an impossible token was generated"
    order = np.argsort(-laws, axis=-1, kind="stable")
    ordered = np.take_along_axis(laws, order, axis=-1)
    samples = [
        battery.Sampled(str(i), tuple(row.tolist()), battery.Scores(ids, probs))
        for i, (rows, all_ids, all_probs) in enumerate(zip(tokens, order, ordered, strict=True))
        for row, ids, probs in zip(rows, all_ids, all_probs, strict=True)
    ]
    rng = np.random.default_rng(1)
    found = battery.run(samples, [], rng=rng, wanted=("T1", "T1b", "T2", "T3", "T4", "T5"))
    assert all(t.fit.applies for t in found.tests), [t.why for t in found.tests]
    return {t.name: t.p_adjusted for t in found.tests}


def rejected(p):
    return min(p.values()) <= ALPHA


# -- the engine is right --------------------------------------------------------------------------

RIGHT = {
    "target-only": None,
    "token": {},
    "one-hot": {"draft_sample_method": "greedy"},
    "block": {"rejection_sample_method": "block"},
    "block, one-hot": {"rejection_sample_method": "block", "draft_sample_method": "greedy"},
    "ngram": NGRAM,
    "block, ngram": NGRAM | {"rejection_sample_method": "block"},
    "token, adaptive": {"adaptive": True, "num_speculative_tokens": 6},
    "ngram, adaptive": NGRAM | {"adaptive": {"min_speculative_tokens": 1}},
}


@pytest.mark.parametrize("name", RIGHT)
def test_sampled_output_follows_the_target(name, target, draft, prompts):
    """At temperature 1 every way to speculate passes all six tests."""
    spec = RIGHT[name]
    if spec is not None and "method" not in spec:
        spec = speculative(draft, **spec)
    engine = build(target, spec)
    tokens = sample(engine, prompts)
    p = p_values(tokens, conditionals(target, prompts, tokens))
    assert not rejected(p), p
    if spec is not None:
        assert engine.metrics.n_accepted > 0


def top_k_then_top_p(logits, temperature, k, top_p):
    """The processed law of one row, spelled out."""
    p = softmax(logits / temperature)
    p[p < np.sort(p)[-k]] = 0
    p /= p.sum()
    kept, total = np.zeros_like(p), 0.0
    for token in np.argsort(-p, kind="stable"):
        if total >= top_p:
            break
        kept[token] = p[token]
        total += p[token]
    return kept / kept.sum()


@pytest.mark.parametrize("name", ["target-only", "token", "one-hot", "block", "ngram"])
def test_processed_output_follows_the_processed_target(name, target, draft, prompts):
    """Temperature, top-k and top-p shape ratio, residual and bonus alike."""
    spec = RIGHT[name]
    if spec is not None and "method" not in spec:
        spec = speculative(draft, **spec)
    tokens = sample(build(target, spec), prompts, temperature=0.7, top_k=9, top_p=0.9)
    laws = conditionals(
        target,
        prompts,
        tokens,
        lambda rows: np.apply_along_axis(top_k_then_top_p, -1, rows, 0.7, 9, 0.9),
    )
    p = p_values(tokens, laws)
    assert not rejected(p), p


@pytest.mark.parametrize("name", ["target-only", "token", "ngram"])
def test_penalised_output_follows_the_penalised_target(name, target, draft, prompts):
    """Penalties at drafted positions count the drafted prefix."""
    spec = RIGHT[name]
    if spec is not None and "method" not in spec:
        spec = speculative(draft, **spec)
    tokens = sample(build(target, spec), prompts, frequency_penalty=1.5, presence_penalty=0.5)
    laws = []
    for prompt, rows in zip(prompts, tokens, strict=True):
        ids = np.concatenate([np.tile(prompt, (len(rows), 1)), rows], axis=1)
        logits = reference_logits(target, ids)[:, len(prompt) : -1]
        before = np.cumsum(np.eye(VOCAB)[rows], axis=1)[:, :-1]
        laws.append(softmax(logits - 1.5 * before - 0.5 * (before > 0)))
    p = p_values(tokens, np.stack(laws))
    assert not rejected(p), p


# -- wrong shortcuts are caught -------------------------------------------------------------------


class FirstFailureStopsBlock(v.Block):
    """W32: block verification that stops at the first failure."""

    stops_at_first_rejection = True

    def accepted(self, passed):
        return v.Verifier.accepted(self, passed)


class CoolDraft(ModelDrafter):
    """W07: drafted at half the temperature, verified as if at the request's."""

    def _choose(self, logits, sequences, position):
        hot = super()._choose(logits, sequences, position)
        cool = super()._choose(logits * 2, sequences, position)
        return [(token, row) for (token, _), (_, row) in zip(cool, hot, strict=True)]


class StaleDraftRows(ModelDrafter):
    """W35, of its kind: the rows handed to the verifier belong to the position before."""

    def propose(self, sequences, wanted):
        drafts = super().propose(sequences, wanted)
        return [
            Draft(d.tokens, np.concatenate([d.rows[:1], d.rows[:-1]])) if d.tokens else d
            for d in drafts
        ]


class PeekingDraft(ModelDrafter):
    """W39: a length that looks at what was drawn: cut before the first unlikely token."""

    def propose(self, sequences, wanted):
        cut = []
        for d in super().propose(sequences, wanted):
            likely = [d.rows[i, token] >= 0.15 for i, token in enumerate(d.tokens)]
            n = likely.index(False) if False in likely else len(likely)
            cut.append(Draft(d.tokens[:n], d.rows[:n]) if n else NO_DRAFT)
        return cut


WRONG_VERIFIERS = [
    ResampleFromTarget,
    AcceptIfLikelier,
    TypicalAcceptance,
    AcceptWithTarget,
    FreshDrawAfterMismatch,
    FallsToLastId,
    AbsoluteResidual,
    Lenience,
    BonusFromDraft,
]
WRONG_DRAFTERS = [CoolDraft, ArgmaxDraft, StaleDraftRows, PeekingDraft]


def broken(kind, target, draft, monkeypatch):
    """An engine with one wrong part."""
    if issubclass(kind, v.Verifier):
        return build(target, speculative(draft), kind())
    monkeypatch.setattr("speccheck.engine.engine.ModelDrafter", kind)
    return build(target, speculative(draft))


@pytest.mark.parametrize("kind", [*WRONG_VERIFIERS, *WRONG_DRAFTERS, FirstFailureStopsBlock])
def test_wrong_shortcuts_are_caught(kind, target, draft, prompts, monkeypatch):
    """The same battery on the same amount of tokens rejects each of them."""
    engine = broken(kind, target, draft, monkeypatch)
    tokens = sample(engine, prompts)
    p = p_values(tokens, conditionals(target, prompts, tokens))
    assert rejected(p), p
    print(kind.__name__, {name: f"{value:.1e}" for name, value in p.items()})


class NeverRolledBack(KVCache):
    """A cache in which keys of rejected tokens stay: only positions beyond all earlier are new."""

    def __init__(self, config, n_rows):
        super().__init__(config, n_rows)
        self.written = [0] * n_rows

    def write(self, row, position, block):
        if position == 0:
            self.written[row] = 0
        stale = max(0, self.written[row] - position)
        super().write(row, position + stale, block[:, :, stale:])
        self.written[row] = max(self.written[row], position + block.shape[2])

    def move(self, source, target):
        super().move(source, target)
        self.written[target] = self.written[source]


def test_a_stale_target_cache_is_caught(target, draft, prompts, monkeypatch):
    """W36: keys of rejected tokens kept in the target's cache bend the law of long answers."""
    monkeypatch.setattr("speccheck.engine.engine.KVCache", NeverRolledBack)
    tokens = sample(build(target, speculative(draft)), prompts, n_tokens=20)
    p = p_values(tokens, conditionals(target, prompts, tokens))
    assert rejected(p), p


def test_a_stale_draft_cache_is_lossless_and_only_slow(target, draft, prompts, monkeypatch):
    """W34: the same fault in the draft's cache keeps the law and costs acceptance."""
    right = build(target, speculative(draft))
    sample(right, prompts)
    monkeypatch.setattr("speccheck.engine.drafters.KVCache", NeverRolledBack)
    stale = build(target, speculative(draft))
    tokens = sample(stale, prompts)
    p = p_values(tokens, conditionals(target, prompts, tokens))
    assert not rejected(p), p
    rates = [e.metrics.n_accepted / e.metrics.n_draft_tokens for e in (right, stale)]
    assert rates[1] < rates[0]


def test_wrong_drafters_are_really_used(target, draft, monkeypatch):
    """The patch above replaces the drafter that the engine builds."""
    engine = broken(CoolDraft, target, draft, monkeypatch)
    assert type(engine._drafter) is CoolDraft
    assert drafters.ModelDrafter is ModelDrafter
