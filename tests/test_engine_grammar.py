"""Structured output: masks against jsonschema, and the law of masked sampling under speculation."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_law import (
    N_SAMPLES,
    NGRAM,
    K,
    build,
    conditionals,
    draft,  # noqa: F401 (a fixture)
    p_values,
    prompts,  # noqa: F401 (a fixture)
    rejected,
    speculative,
    target,  # noqa: F401 (a fixture)
)

from speccheck.engine import engine as engine_module
from speccheck.engine.drafters import Draft
from speccheck.engine.grammar import (
    DEAD,
    Grammar,
    InOrder,
    Matcher,
    OneOf,
    Repeated,
    Vocabulary,
    compile_format,
    compile_schema,
)
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings, SpeculativeSettings
from speccheck.engine.text import Tokenizer
from speccheck.errors import UsageError

EOS = 256
BYTES = Vocabulary([bytes([i]) for i in range(256)] + [None], {EOS}, 257)


def grammar(schema, vocabulary=BYTES):
    return Grammar(compile_schema(schema, "schema"), vocabulary)


def accepts(language, text):
    """Whether the grammar takes the whole text and may end after it."""
    state = 0
    for byte in text.encode():
        state = language.step(state, byte)
        if state == DEAD:
            return False
    return language.may_end(state)


# -- schemas and values that fit them, written as the engine writes them ---------------------------

SCALARS = st.one_of(
    st.tuples(st.just({"type": "string"}), st.text(max_size=6)),
    st.tuples(st.just({"type": "integer"}), st.integers(-(10**6), 10**6)),
    st.tuples(st.just({"type": "number"}), st.floats(-1e6, 1e6)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "null"}), st.none()),
    st.lists(st.text(max_size=4), min_size=1, max_size=3).map(lambda v: ({"enum": v}, v[-1])),
    st.integers().map(lambda v: ({"const": v}, v)),
    st.text(min_size=1, max_size=3).map(
        lambda v: ({"type": "string", "minLength": 1, "maxLength": 3}, v)
    ),
)


def arrays(inner):
    return st.lists(inner, min_size=1, max_size=1).flatmap(
        lambda one: st.integers(0, 3).map(
            lambda n: ({"type": "array", "items": one[0][0], "maxItems": 3}, [one[0][1]] * n)
        )
    )


def objects(inner):
    names = st.lists(st.text(max_size=3), unique=True, max_size=3)

    def made(given_names):
        n = len(given_names)
        parts = st.lists(inner, min_size=n, max_size=n)
        flags = st.lists(st.booleans(), min_size=n, max_size=n)

        def whole(drawn):
            values, required = drawn
            schema = {
                "type": "object",
                "properties": {name: s for name, (s, _) in zip(given_names, values, strict=True)},
                "required": [n for n, r in zip(given_names, required, strict=True) if r],
                "additionalProperties": False,
            }
            there = zip(given_names, values, required, strict=True)
            return schema, {name: value for name, (_, value), r in there if r}

        return st.tuples(parts, flags).map(whole)

    return names.flatmap(made)


FITTING = st.recursive(
    SCALARS, lambda inner: st.one_of(arrays(inner), objects(inner)), max_leaves=4
)


@settings(max_examples=60, deadline=None)
@given(FITTING)
def test_what_fits_a_schema_is_accepted(pair):
    """Any value that jsonschema takes, written by json.dumps in the schema's order, is accepted."""
    schema, value = pair
    jsonschema.validate(value, schema)
    assert accepts(grammar(schema), json.dumps(value, ensure_ascii=False))


@settings(max_examples=60, deadline=None)
@given(FITTING, st.randoms(use_true_random=False))
def test_whatever_the_masks_lead_to_is_valid(pair, random):
    """A random walk along the masks, of many kinds of schema, ends in a valid value."""
    schema, _ = pair
    matcher = Matcher(grammar(schema))
    written = bytearray()
    while len(written) < 400:
        allowed = np.flatnonzero(matcher.grammar.mask(matcher.state))
        if EOS in allowed and (len(written) > 60 or len(allowed) == 1 or random.random() < 0.3):
            break
        # Closing early keeps walks short.
        closing = [t for t in allowed if chr(t) in '"}]0.'] if len(written) > 60 else []
        token = random.choice(closing or [t for t in allowed if t != EOS])
        written.append(token)
        matcher.advance([token])
    else:
        return
    jsonschema.validate(json.loads(written.decode()), schema)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_changed_text_is_accepted_only_if_it_is_still_valid(data):
    """One byte removed, doubled or replaced: nothing invalid is accepted."""
    schema, value = data.draw(FITTING)
    raw = json.dumps(value, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, max(0, len(raw) - 1)))
    raw = (
        raw[:at]
        + data.draw(st.sampled_from([b"", raw[at : at + 1] * 2, b'"', b"}", b","]))
        + raw[at + 1 :]
    )
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    if accepts(grammar(schema), text):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"a": [1, {"b": null}], "c": "x"}', True),
        ("{}", True),
        ('{"a":1}', True),
        ("[1]", False),
        ('{"a": 01}', False),
        ('{"a": 1,}', False),
        ('{"a" : 1}', False),
        ('{"a": 1}}', False),
        ('{"a": "\\u00e9\\n\\ud7ff"}', True),
        ('{"a": "\\ud800"}', False),
        ('{"a": "\n"}', False),
    ],
)
def test_json_object_is_any_object(text, ok):
    """Objects of any depth and nothing else; half a surrogate and bare line ends are no JSON."""
    language = Grammar(compile_format({"type": "json_object"}), BYTES)
    assert accepts(language, text) is ok


def test_a_schema_may_refer_to_itself():
    """$ref within the schema: a tree of any depth."""
    schema = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["name"],
            }
        },
        "$ref": "#/$defs/tree",
    }
    language = grammar(schema)
    assert accepts(language, '{"name": "a", "parts": [{"name": "b", "parts": []}, {"name": "c"}]}')
    assert not accepts(language, '{"name": "a", "parts": [{"parts": []}]}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "a+"}, "'pattern' is not supported"),
        ({"type": "integer", "minimum": 3}, "'minimum' is not supported"),
        ({"oneOf": [{"type": "null"}]}, "'oneOf' is not supported"),
        ({"type": "thing"}, "schema.type"),
        ({"type": "object", "required": ["a"]}, "'a' is not among the properties"),
        ({"type": "object", "properties": {"a": {"format": "date"}}}, "schema.properties.a"),
        ({"$ref": "http://x/y"}, "only references within"),
        ({"$ref": "#/$defs/none"}, "is not in the schema"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems 3 exceeds maxItems 2"),
        ({"type": "string", "maxLength": 10**6}, "0 to 256"),
        ({"$ref": "#"}, "allows no value"),
        ([], "a schema is an object"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(schema, words):
    """No restriction is ever dropped: 'almost valid' is what structured output must prevent."""
    with pytest.raises(UsageError, match=words):
        grammar(schema)


@cache
def packaged():
    folder = EngineSettings().model_dir
    tokens = Tokenizer(folder).token_bytes()
    return Vocabulary(tokens, {1}, 2048)


def test_token_bytes_are_what_the_tokenizer_decodes():
    """Ids of any text give its bytes back; special tokens have none."""
    tokenizer = Tokenizer(EngineSettings().model_dir)
    tokens = tokenizer.token_bytes()
    for text in ('{"name": "née 世界 🙂"}', "a\n\tb", "plain words"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokens[i] for i in ids) == text.encode()
    assert tokens[:6] == [None] * 6


def test_masks_of_a_real_vocabulary_are_those_of_its_tokens_one_by_one():
    """The walk over the trie finds exactly the tokens that lead on."""
    schema = {
        "type": "object",
        "properties": {"customer": {"type": "string"}, "quantity": {"type": "integer"}},
        "required": ["customer", "quantity"],
    }
    vocabulary = packaged()
    matcher = Matcher(grammar(schema, vocabulary))
    text = '{"customer": "Félix", "quantity": 64}'
    for token in Tokenizer(EngineSettings().model_dir).encode(text, add_special_tokens=False):
        mask = matcher.grammar.mask(matcher.state)
        one_by_one = [
            matcher.grammar.after(matcher.state, t) != DEAD for t in range(vocabulary.size)
        ]
        one_by_one[1] = matcher.grammar.may_end(matcher.state)
        assert mask.tolist() == one_by_one
        assert mask[token]
        matcher.advance([token])
    assert np.flatnonzero(matcher.grammar.mask(matcher.state)).tolist() == [1]


# -- the law --------------------------------------------------------------------------------------

LETTERS = Vocabulary([None, None, *(bytes([97 + i]) for i in range(22))], (), 24)
EVEN = OneOf(frozenset(range(97, 107)))
ODD = OneOf(frozenset(range(105, 119)))
TURNS = Repeated(InOrder((EVEN, ODD)))
"""Ten letters at even places, fourteen at odd ones, two of them in both."""


def turn_masks(n_rows, n_tokens):
    mask = np.zeros((n_tokens, 24), bool)
    for i in range(n_tokens):
        allowed = EVEN.bytes if i % 2 == 0 else ODD.bytes
        mask[i, [byte - 97 + 2 for byte in allowed]] = True
    return np.broadcast_to(mask, (n_rows, n_tokens, 24))


def constrained_ids(engine, asked, n_samples, n_tokens=6):
    """Sampled ids in the language TURNS, one list an answer."""
    language = Grammar(TURNS, LETTERS)
    requests = [
        Request(
            f"{i}-{seed}",
            prompt,
            SamplingParams(temperature=1.0, max_tokens=n_tokens, seed=seed),
            grammar=language,
        )
        for i, prompt in enumerate(asked)
        for seed in range(n_samples)
    ]
    return [answer.token_ids for answer in engine.generate(requests)]


def constrained(engine, asked):
    """As `test_engine_law.sample`, in the language TURNS, which has no end."""
    return np.array(constrained_ids(engine, asked, N_SAMPLES)).reshape(len(asked), N_SAMPLES, -1)


def masked_softmax(logits):
    allowed = turn_masks(len(logits), logits.shape[1] + 1)[:, 1:]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True)) * allowed
    return weights / weights.sum(axis=-1, keepdims=True)


WAYS = {"token": {}, "block": {"rejection_sample_method": "block"}, "ngram": NGRAM}


@pytest.mark.parametrize("name", WAYS)
def test_masked_output_follows_the_masked_target(name, target, draft, prompts):  # noqa: F811
    """Masks shape ratio, residual and bonus; drafts that break the grammar do not bend the law."""
    spec = WAYS[name]
    if "method" not in spec:
        spec = speculative(draft, **spec)
    engine = build(target, spec)
    tokens = constrained(engine, prompts)
    p = p_values(tokens, conditionals(target, prompts, tokens, masked_softmax))
    assert not rejected(p), p
    assert engine.metrics.n_accepted > 0
    assert engine.metrics.n_draft_tokens < K * engine.metrics.n_drafts  # some were cut


def cut_before(sequence, draft):  # noqa: F811
    """W39 for grammars: a drawn draft cut before its first invalid token, then p."""
    n = sequence.matcher.valid_prefix(draft.tokens)
    return Draft(draft.tokens[:n], None if draft.rows is None else draft.rows[:n])


def test_a_drawn_draft_cut_before_an_invalid_token_is_caught(monkeypatch, target, draft, prompts):  # noqa: F811
    """Cutting by what was drawn and then drawing from p is not lossless, and shows."""
    monkeypatch.setattr(engine_module, "_fitting", cut_before)
    tokens = constrained(build(target, speculative(draft)), prompts)
    assert rejected(p_values(tokens, conditionals(target, prompts, tokens, masked_softmax)))


def test_a_mask_on_the_first_row_only_lets_invalid_tokens_through(
    monkeypatch,
    target,  # noqa: F811
    draft,  # noqa: F811
    prompts,  # noqa: F811
):
    """What vllm#44993 did inside an accepted block; here an impossible token comes out."""
    masks = Matcher.masks
    monkeypatch.setattr(
        Matcher,
        "masks",
        lambda self, ids: [masks(self, ids)[0], *(np.ones(24, bool) for _ in ids)],
    )
    monkeypatch.setattr(engine_module, "_fitting", lambda _, draft: draft)
    answers = constrained_ids(build(target, speculative(draft)), prompts, 40)
    allowed = turn_masks(1, 6)[0]
    assert any(not allowed[i, token] for ids in answers for i, token in enumerate(ids))


def test_greedy_json_is_the_same_on_both_arms():
    """The packaged pair in json_schema mode: equal answers, all valid, with drafts accepted."""
    from pathlib import Path

    from speccheck.config import package_dir
    from speccheck.engine.engine import Engine

    lines = (Path(package_dir("corpora")) / "json.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if (row := json.loads(line))["check"].get("schema")][:6]
    spec = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}
    answers = []
    for config in (None, SpeculativeSettings.parse(spec)):
        engine = Engine(EngineSettings(speculative_config=config))
        asked = []
        for i, row in enumerate(rows):
            ids = engine.tokenizer.encode(
                engine.tokenizer.render_chat(row["messages"]), add_special_tokens=False
            )
            asked.append(
                Request(
                    str(i),
                    tuple(ids),
                    SamplingParams(temperature=0.0, max_tokens=120),
                    grammar=grammar(row["check"]["schema"], packaged()),
                )
            )
        answers.append(engine.generate(asked))
    for row, one, other in zip(rows, *answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == "stop"
        jsonschema.validate(json.loads(one.text), row["check"]["schema"])
        assert sum(other.stats.accepted_per_step) > 0
