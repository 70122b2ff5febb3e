"""The engine as a whole: same greedy answers in both arms, and every request option honoured."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_engine_models import perturbed_model, random_model, reference_logits

from speccheck.engine.engine import Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings, SpeculativeSettings
from speccheck.errors import EngineError, UsageError

PAIR = Path(__file__).parent.parent / "speccheck" / "engine" / "pair"
VOCAB = 300
NEAR_TIE = 1e-3
"""Logit gap under which float32 may order two tokens either way."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("target") / "m", seed=1, vocab=VOCAB, sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return perturbed_model(target, tmp_path_factory.mktemp("draft") / "m", seed=2, noise=0.4)


def speculative(k, draft=None, **more):
    if draft is None:
        spec = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        spec = {"method": "draft_model", "model": str(draft)}
    return spec | {"num_speculative_tokens": k} | more


def engine(target, spec=None, **more):
    raw = {"model": str(target), "speculative_config": spec} | more
    return Engine(EngineSettings.parse(raw))


def prompts(n, seed=0):
    """Random prompts of mixed length; half repeat a phrase, so that prompt lookup has matches."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        ids = rng.integers(2, VOCAB, rng.integers(3, 40)).tolist()
        out.append(tuple(ids + ids[: len(ids) // 2]) if i % 2 else tuple(ids))
    return out


def run(engine, prompts, **params):
    asked = {"temperature": 0.0, "max_tokens": 40} | params
    return engine.generate(
        Request(f"r{i}", tuple(prompt), SamplingParams(**asked)) for i, prompt in enumerate(prompts)
    )


def first_divergence_gap(folder, prompt, a, b):
    """Reference logit gap of the two tokens where two answers part; None if they do not."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            row = reference_logits(folder, [*prompt, *a[:i]])[-1]
            return abs(row[x] - row[y])
    return None if len(a) == len(b) else np.inf


def assert_same_answers(folder, prompts, expected, got):
    """Token for token, but for flips at near ties, which are shown and must be rare."""
    gaps = [
        first_divergence_gap(folder, prompt, a.token_ids, b.token_ids)
        for prompt, a, b in zip(prompts, expected, got, strict=True)
    ]
    flips = [gap for gap in gaps if gap is not None]
    assert not [gap for gap in flips if gap > NEAR_TIE], f"divergence where it is certain: {flips}"
    assert len(flips) <= len(prompts) / 20, f"too many near ties: {flips}"
    for gap, a, b in zip(gaps, expected, got, strict=True):
        if gap is None:
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)


@pytest.fixture(scope="module")
def alone(target):
    """Target-only answers, one request at a time."""
    server = engine(target, max_num_seqs=1)
    return run(server, prompts(24))


def test_target_only_follows_the_reference_argmax(target, alone):
    """A greedy answer is the argmax of the plain forward pass at each of its positions."""
    for prompt, answer in list(zip(prompts(24), alone, strict=True))[:6]:
        rows = reference_logits(target, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        for row, token in zip(rows, answer.token_ids, strict=True):
            assert row[token] > row.max() - NEAR_TIE


@pytest.mark.parametrize("rows", [1, 5, 16], ids="rows={}".format)
@pytest.mark.parametrize("k", [1, 3, 4, 7], ids="k={}".format)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_greedy_speculation_changes_no_token(target, draft, alone, *, drafter, k, rows):
    """Whatever drafts and whatever shares the batch, answers equal target-only ones."""
    server = engine(
        target, speculative(k, draft if drafter == "model" else None), max_num_seqs=rows
    )
    answers = run(server, prompts(24))
    assert_same_answers(target, prompts(24), alone, answers)
    steps = [a.stats for a in answers]
    accepted = sum(sum(s.accepted_per_step) for s in steps)
    assert 0 < accepted < sum(sum(s.drafted_per_step) for s in steps)


def test_a_perfect_draft_is_accepted_whole(target):
    """The target as its own draft loses no drafted token, also after full acceptance."""
    server = engine(target, speculative(4, target), max_num_seqs=3)
    for answer in run(server, prompts(6), ignore_eos=True):
        assert answer.stats.accepted_per_step == answer.stats.drafted_per_step


def test_chunked_prefill_and_batching_change_no_token(target, alone):
    """A prompt read in small pieces beside running answers gives the same answer."""
    server = engine(target, max_num_seqs=7, max_num_batched_tokens=5)
    assert_same_answers(target, prompts(24), alone, run(server, prompts(24)))


@pytest.mark.parametrize("part", ["draft_model", "ngram"])
def test_the_packaged_pair_speculates_without_changing_a_token(part):
    """Greedy answers of the shipped models on corpus prompts are equal in both arms."""
    corpora = Path(__file__).parent.parent / "corpora"
    files = sorted(corpora.glob("*.jsonl"))
    if not (PAIR / "target" / "model.safetensors").exists() or not files:
        pytest.skip("the packaged pair or the corpora are not here")
    spec = speculative(4, "packaged" if part == "draft_model" else None)
    arms = [Engine(EngineSettings.parse({"speculative_config": s})) for s in (None, spec)]
    tokenizer = arms[0].tokenizer
    asked = []
    for file in files:
        for line in file.read_text().splitlines()[:3]:
            text = tokenizer.render_chat(json.loads(line)["messages"])
            asked.append(tokenizer.encode(text, add_special_tokens=False))
    expected, got = (run(arm, asked, max_tokens=64) for arm in arms)
    assert_same_answers(PAIR / "target", asked, expected, got)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 4])
def test_the_answer_ends_exactly_where_asked(target, k):
    """Length limit, stop id and end-of-sequence cut an accepted block at the right token."""
    server = engine(target, speculative(4, target) if k else None)
    prompt = prompts(1)[0]
    free = run(server, [prompt], ignore_eos=True)[0].token_ids
    for limit in (1, 2, 5, 11):
        answer = run(server, [prompt], ignore_eos=True, max_tokens=limit)[0]
        assert answer.token_ids == free[:limit]
        assert answer.finish_reason == "length"
    at = next(i for i in range(6, 40) if free[i] not in free[:i])
    stopped = run(server, [prompt], ignore_eos=True, stop_token_ids=frozenset([free[at]]))[0]
    assert stopped.token_ids == free[: at + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == server.tokenizer.decode([*prompt[-1:], *free[:at]])[1:]
    held = run(
        server, [prompt], ignore_eos=True, stop_token_ids=frozenset([free[at]]), min_tokens=at + 1
    )[0]
    assert held.token_ids[:at] == free[:at]
    assert held.token_ids[at] != free[at]


def test_no_draft_reaches_past_the_budget(target):
    """The last token of an answer is never drafted for."""
    answer = run(engine(target, speculative(7, target)), [prompts(1)[0]], ignore_eos=True)[0]
    produced = 1
    for accepted, drafted in zip(
        answer.stats.accepted_per_step, answer.stats.drafted_per_step, strict=True
    ):
        assert produced + drafted + 1 <= 40
        produced += accepted + 1


def test_the_context_ends_the_answer(target):
    """An answer stops at max_model_len with reason length, in both arms."""
    for spec in (None, speculative(4, target)):
        server = engine(target, spec, max_model_len=32)
        answer = run(server, [prompts(1)[0][:20]], ignore_eos=True, max_tokens=100)[0]
        assert len(answer.token_ids) == 12
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"min_tokens": 20},
    ],
    ids=lambda params: next(iter(params)),
)
def test_penalties_see_the_drafted_prefix(target, draft, params):
    """With penalties both arms still agree, and the penalties do something."""
    asked = prompts(8)
    plain = run(engine(target), asked, ignore_eos="min_tokens" not in params)
    expected = run(engine(target), asked, ignore_eos="min_tokens" not in params, **params)
    for spec in (speculative(4, draft), speculative(4, target), speculative(4)):
        got = run(engine(target, spec), asked, ignore_eos="min_tokens" not in params, **params)
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    if "min_tokens" in params:
        assert min(len(a.token_ids) for a in expected) >= 20
    else:
        assert [a.token_ids for a in plain] != [a.token_ids for a in expected]


def test_penalties_are_vllms(target):
    """Each token is the argmax of reference logits penalised by vLLM's formulas."""
    prompt = prompts(2)[1]
    answer = run(
        engine(target),
        [prompt],
        ignore_eos=True,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
    )[0].token_ids
    rows = reference_logits(target, [*prompt, *answer])
    for i, token in enumerate(answer):
        row = rows[len(prompt) + i - 1].copy()
        counts = np.bincount(answer[:i], minlength=VOCAB)
        seen = sorted({*prompt, *answer[:i]})
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        row -= 0.7 * counts + 0.4 * (counts > 0)
        assert row[token] > row.max() - NEAR_TIE


def test_logit_bias_and_min_p(target):
    """A large bias forces a token; min_p of 1 leaves only the most likely one."""
    server = engine(target)
    assert run(server, prompts(1), logit_bias={77: 100.0}, max_tokens=5)[0].token_ids == [77] * 5
    greedy = run(server, prompts(3), ignore_eos=True)
    narrow = run(server, prompts(3), ignore_eos=True, temperature=1.0, min_p=1.0)
    assert [a.token_ids for a in narrow] == [a.token_ids for a in greedy]
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        narrow = run(server, prompts(3), ignore_eos=True, temperature=1.0, **options)
        assert [a.token_ids for a in narrow] == [a.token_ids for a in greedy]


def test_logprobs_are_the_raw_ones_of_the_committed_tokens(target, draft):
    """One entry a token, in both arms, equal to the reference's log-softmax, ranks from 1."""
    prompt = prompts(1)[0]
    for spec in (None, speculative(4, draft)):
        server = engine(target, spec)
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, logprobs=3, ignore_eos=True)
        server.add(Request("a", prompt, params))
        tokens, entries = [], []
        while server.n_unfinished:
            for output in server.step():
                tokens += output.token_ids
                entries += output.logprobs
        assert [entry.token for entry in entries] == tokens
        rows = reference_logits(target, [*prompt, *tokens])[len(prompt) - 1 : -1]
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for row, entry in zip(rows, entries, strict=True):
            assert abs(row[entry.token] - entry.logprob) < 1e-3
            assert entry.rank == 1 + (row > row[entry.token] + 1e-4).sum()
            assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()


def test_prompt_logprobs_are_teacher_forcing(target):
    """One entry a prompt token but the first, also when the prompt is read in pieces."""
    prompt = prompts(4)[3]
    server = engine(target, max_num_batched_tokens=4)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    server.add(Request("busy", prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=60)))
    server.step()
    server.add(Request("a", prompt, params))
    found = None
    while server.n_unfinished:
        for output in server.step():
            found = output.prompt_logprobs or found
    rows = reference_logits(target, list(prompt))
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    assert found[0] is None
    assert [entry.token for entry in found[1:]] == list(prompt[1:])
    for row, entry in zip(rows, found[1:], strict=False):
        assert abs(row[entry.token] - entry.logprob) < 1e-3


def test_a_request_can_switch_speculation_off_or_shorten_it(target, draft):
    """With k = 0 nothing is drafted, with k = 2 two at most, beside others that draft four."""
    server = engine(target, speculative(4, draft))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [Request(str(k), prompts(1)[0], params, k=k) for k in (None, 0, 2)]
    free, off, two = server.generate(asked)
    assert off.stats.drafted_per_step == []
    assert max(two.stats.drafted_per_step) == 2
    assert max(free.stats.drafted_per_step) == 4
    assert off.token_ids == two.token_ids == free.token_ids


def test_seeds_decide_the_answer_not_the_company(target, draft):
    """A seeded answer repeats alone and in a batch; another seed and unseeded ones differ."""
    for spec in (None, speculative(4, draft, draft_sample_method="probabilistic")):
        params = [SamplingParams(seed=s, max_tokens=30, ignore_eos=True) for s in (7, 7, 8)]
        params += [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
        server = engine(target, spec)
        together = server.generate(Request(str(i), prompts(1)[0], p) for i, p in enumerate(params))
        alone = server.generate([Request("x", prompts(1)[0], params[0])])[0]
        a, b, c, d, e = (answer.token_ids for answer in together)
        assert a == b == alone.token_ids
        assert len({tuple(x) for x in (a, c, d, e)}) == 4


def test_counters_add_up(target, draft):
    """Server counters are the sums of the per-request ones, and those keep vLLM's invariants."""
    server = engine(target, speculative(4, draft), max_num_seqs=5)
    answers = run(server, prompts(12), temperature=0.9)
    metrics = server.metrics
    assert metrics.n_drafts == sum(len(a.stats.drafted_per_step) for a in answers)
    assert metrics.n_draft_tokens == sum(sum(a.stats.drafted_per_step) for a in answers)
    assert metrics.n_accepted == sum(sum(a.stats.accepted_per_step) for a in answers)
    assert sum(metrics.accepted_per_pos) == metrics.n_accepted
    assert metrics.accepted_per_pos == sorted(metrics.accepted_per_pos, reverse=True)
    assert metrics.n_generation_tokens == sum(len(a.token_ids) for a in answers)
    assert metrics.n_prompt_tokens == sum(len(p) for p in prompts(12))
    assert (metrics.n_running, metrics.n_waiting, metrics.cache_usage) == (0, 0, 0)
    for answer in answers:
        spec = answer.stats.as_metrics(4)["speculative_decoding"]
        histogram = spec["acceptance_histogram"]
        steps, accepted = spec["num_spec_steps"], spec["num_accepted_draft_tokens"]
        assert len(histogram) == 5
        assert sum(histogram) == steps
        assert sum(j * n for j, n in enumerate(histogram)) == accepted
        assert accepted <= spec["num_draft_tokens"] <= steps * 4
        assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert spec["draft_acceptance_rate"] == pytest.approx(accepted / spec["num_draft_tokens"])
        assert spec["num_spec_tokens"] == 4
        # Two steps without drafts at most: the prefill's token, and a last one nothing may follow.
        assert len(answer.token_ids) <= accepted + steps + 2


def test_abort_frees_the_row_before_the_next_step(target, draft):
    """Aborted requests, running or waiting, are gone at once, and the rest goes on undisturbed."""
    server = engine(target, speculative(4, draft), max_num_seqs=2)
    expected = run(engine(target), prompts(4))[3].token_ids
    for i, prompt in enumerate(prompts(4)):
        server.add(Request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=40)))
    server.step()
    assert (server.metrics.n_running, server.metrics.n_waiting) == (2, 2)
    for name in ("0", "2", "1", "never"):
        server.abort(name)
    assert (server.metrics.n_running, server.metrics.n_waiting) == (0, 1)
    tokens = []
    while server.n_unfinished:
        for output in server.step():
            assert output.request_id == "3"
            tokens += output.token_ids
    assert tokens == expected
    assert server.metrics.finished["abort"] == 3


def test_priority_goes_first(target):
    """With one row, a request of lower number is served before earlier ones."""
    server = engine(target, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for name, priority in (("a", 5), ("b", 5), ("c", -1), ("d", 0)):
        server.add(Request(name, prompts(1)[0], params, priority=priority))
    order = []
    while server.n_unfinished:
        order += [o.request_id for o in server.step() if o.finish_reason]
    assert order == ["c", "d", "a", "b"]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"max_num_seq": 3}, "unknown key max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": "8"}, "an integer is wanted"),
        ({"speculative_config": 4}, "speculative_config must be an object"),
        ({"speculative_config": {"method": "eagle"}}, "method is 'eagle'"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is missing"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 16}},
            "num_speculative_tokens is 16; 1 to 15",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokns": 4}},
            "unknown key num_speculative_tokns",
        ),
        (
            {"speculative_config": speculative(4, prompt_lookup_min=4)},
            "prompt_lookup_min 4 > prompt_lookup_max 3",
        ),
        (
            {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
            "draft_model needs `model`",
        ),
        (
            {"speculative_config": speculative(4, "x", rejection_sample_method="synthetic")},
            "rejection_sample_method is 'synthetic'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_usage_errors(raw, words):
    """Each names its key; nothing falls back to a default."""
    with pytest.raises(UsageError) as caught:
        EngineSettings.parse(raw)
    assert words in str(caught.value)


def test_settings_survive_json():
    """What a server reports parses to the same settings."""
    for spec in (None, speculative(4), speculative(3, "dir", draft_sample_method="probabilistic")):
        settings = EngineSettings.parse({"speculative_config": spec, "max_model_len": 99})
        assert EngineSettings.parse(json.loads(json.dumps(settings.as_config()))) == settings
    dashed = {"method": "ngram", "num-speculative-tokens": 2}
    assert SpeculativeSettings.parse(dashed).num_speculative_tokens == 2


def test_models_that_do_not_fit_are_refused(target, tmp_path):
    """Another vocabulary or a context beyond the positions stops the start."""
    other = random_model(tmp_path / "other", vocab=280)
    with pytest.raises(EngineError, match="share one vocabulary"):
        engine(target, speculative(4, other))
    with pytest.raises(UsageError, match="max_model_len 1000 exceeds the 512"):
        engine(target, max_model_len=1000)
    server = engine(target, max_model_len=16)
    for prompt in ((), tuple(range(2, 18))):
        with pytest.raises(UsageError, match="does not fit"):
            server.add(Request("x", prompt, SamplingParams()))
