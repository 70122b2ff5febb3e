"""The prefix cache: what is found is the prompt's own, and answers do not change by it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_models import perturbed_model, random_model

from speccheck.engine.engine import Engine
from speccheck.engine.prefix import BLOCK_TOKENS, PrefixCache
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings

PAIR = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}


# -- the cache by itself --------------------------------------------------------------------------


def keys_of(ids):
    """Keys and values that say which prefix they belong to: a function of all tokens before."""
    sums = np.cumsum([(i + 1) * token for i, token in enumerate(ids)]).astype(np.float32)
    return np.broadcast_to(sums, (2, 1, len(ids))).copy()[..., None]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=70).flatmap(
    lambda tail: st.sampled_from([0, 16, 32, 40]).map(lambda n: [7] * n + tail)
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["", "a"]), PROMPTS, st.booleans(), st.booleans()), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([2, 5, 100]))
def test_what_is_found_was_read_with_the_same_tokens_before_it(steps, most):
    """Any mix of prompts, salts and sizes: blocks are right, bounded, never a whole prompt."""
    cache = PrefixCache(most)
    kept = set()
    for salt, ids, keep, drafts in steps:
        found = cache.find(salt, ids, drafts=drafts)
        n = len(found) * BLOCK_TOKENS
        assert n < len(ids)
        if found:
            assert (salt, tuple(ids[:n])) in kept
            got = np.concatenate([block.target for block in found], axis=2)
            assert np.array_equal(got, keys_of(ids)[:, :, :n])
            if drafts:
                assert all(np.array_equal(b.target, b.draft) for b in found)
        if keep:
            target = keys_of(ids)
            cache.keep(salt, ids, target, target if drafts else None)
            kept |= {
                (salt, tuple(ids[:end])) for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)
            }
        assert len(cache) <= most


def test_the_least_recently_used_prompt_goes_first():
    """With room for two prompts of two blocks, the one that was not asked for again is gone."""
    cache = PrefixCache(4)
    a, b, c = ([i] * 33 for i in range(3))
    for ids in (a, b):
        cache.keep("", ids, keys_of(ids), None)
    assert len(cache.find("", a, drafts=False)) == 2
    cache.keep("", c, keys_of(c), None)
    found = [len(cache.find("", ids, drafts=False)) for ids in (a, b, c)]
    assert found == [2, 0, 2]
    cache.clear()
    assert cache.find("", a, drafts=False) == []


# -- in the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("target") / "m", seed=1, sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return perturbed_model(target, tmp_path_factory.mktemp("draft") / "m", seed=2, noise=0.4)


def engine(target, spec=None, **more):
    raw = {"model": str(target), "speculative_config": spec} | more
    return Engine(EngineSettings.parse(raw))


def ask(server, *prompts, salt="", k=None, **params):
    asked = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | params
    server._n = getattr(server, "_n", 0) + 1
    return server.generate(
        Request(f"{server._n}-{i}", tuple(ids), SamplingParams(**asked), k=k, cache_salt=salt)
        for i, ids in enumerate(prompts)
    )


def prompt(seed, n=50):
    return np.random.default_rng(seed).integers(2, 300, n).tolist()


def speculation(draft, **more):
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4} | more


@pytest.mark.parametrize("arm", ["target_only", "draft_model", "ngram"])
def test_a_warm_prompt_gives_the_cold_answer(arm, target, draft):
    """A, B, A: the second A finds its prompt, B the part it shares, and no answer changes."""
    specs = {
        "target_only": None,
        "draft_model": speculation(draft),
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    }
    server = engine(target, specs[arm])
    a = prompt(1)
    b = a[:20] + prompt(2, 30)
    cold = engine(target, specs[arm], enable_prefix_caching=False)
    answers = [ask(server, ids)[0] for ids in (a, b, a)]
    assert [answer.stats.n_cached for answer in answers] == [0, 16, 48]
    expected = [ask(cold, ids)[0] for ids in (a, b, a)]
    assert [x.token_ids for x in answers] == [x.token_ids for x in expected]
    assert [x.stats.n_cached for x in expected] == [0, 0, 0]
    assert server.metrics.n_prefix_hits == 64
    assert server.metrics.n_prompt_tokens == 150
    if arm == "draft_model":
        drafted = [sum(x.stats.accepted_per_step) for x in answers]
        assert drafted == [sum(x.stats.accepted_per_step) for x in expected]


def test_salts_resets_and_scoring_find_nothing(target):
    """Another salt, a reset, and prompt_logprobs each read the whole prompt."""
    server = engine(target)
    ids = prompt(3)

    def cached(**asked):
        return ask(server, ids, **asked)[0].stats.n_cached

    assert [cached(salt="x"), cached(salt="y"), cached(salt="x")] == [0, 0, 48]
    assert cached(salt="x", prompt_logprobs=1) == 0
    server.reset_prefix_cache()
    assert cached(salt="x") == 0


def test_keys_of_a_request_that_did_not_draft_do_not_serve_one_that_does(target, draft):
    """The draft model has to see the prompt; after it did, both kinds find it."""
    server = engine(target, speculation(draft))
    ids = prompt(4)
    cached = [ask(server, ids, k=k)[0].stats.n_cached for k in (0, 0, None, None, 0)]
    assert cached == [0, 48, 0, 48, 48]


def test_long_prompts_in_pieces_beside_others(target, draft):
    """Found blocks, chunked reading and a full batch together change no answer."""
    shared = prompt(5, 64)
    asked = [shared + prompt(10 + i, 5 + 9 * i) for i in range(8)]
    answers = []
    for caching in (False, True):
        server = engine(
            target,
            speculation(draft),
            max_num_seqs=3,
            max_num_batched_tokens=24,
            enable_prefix_caching=caching,
        )
        answers.append([a.token_ids for a in ask(server, *asked)])
    assert answers[0] == answers[1]
    assert server.metrics.n_prefix_hits >= 64 * 4


def test_the_packaged_pair_says_the_same_warm_and_cold():
    """Real prompts of every family, twice each, under eviction: token ids are those without it."""
    corpora = Path(__file__).parent.parent / "corpora"
    rows = [
        json.loads(path.read_text(encoding="utf-8").splitlines()[i])
        for path in sorted(corpora.glob("*.jsonl"))
        for i in (0, 1)
    ]
    answers = []
    for caching in (False, True):
        settings_ = {"speculative_config": PAIR, "enable_prefix_caching": caching}
        server = Engine(EngineSettings.parse(settings_))
        tokenizer = server.tokenizer
        prompts = [
            tokenizer.encode(tokenizer.render_chat(row["messages"]), add_special_tokens=False)
            for row in rows
        ]
        if caching:
            server._prefixes = PrefixCache(40)
        groups = [prompts[i : i + 6] for i in range(0, len(prompts), 6) for _ in range(2)]
        answers.append([a.token_ids for group in groups for a in ask(server, *group)])
    assert answers[0] == answers[1]
    assert server.metrics.n_prefix_hits > sum(map(len, prompts)) // 2
    assert len(server._prefixes) == 40
