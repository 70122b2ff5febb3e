"""Text that comes in pieces is the text that comes at once, and stop strings cut it exactly."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_models import byte_ids, random_model

from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request, Sequence
from speccheck.engine.text import Detokenizer, StopMatcher, Tokenizer
from speccheck.errors import EngineError

EOS = frozenset([1])
ALPHABET = "abAB é€😀\u200b日"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("m") / "m")


@pytest.fixture(scope="module")
def tokenizer(folder):
    """One token per byte, so that most characters are split."""
    return Tokenizer(folder)


@settings(deadline=None)
@given(st.text(max_size=40), st.text(max_size=10))
def test_pieces_join_to_the_text_and_never_show_half_a_character(tokenizer, text, prompt):
    """Byte by byte, after any prompt: pieces join to the text and bring no U+FFFD of their own."""
    detokenizer = Detokenizer(tokenizer, byte_ids(prompt), skip_special_tokens=True)
    pieces = [detokenizer.add(token) for token in byte_ids(text)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(0, 257), max_size=60))
def test_broken_bytes_come_out_as_the_decoder_shows_them(tokenizer, ids):
    """Any ids at all: pieces join to what decoding everything at once gives."""
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    text = "".join([*(detokenizer.add(token) for token in ids), detokenizer.flush()])
    whole = tokenizer.decode(ids)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")


@settings(deadline=None)
@given(
    st.lists(st.text("ab€x", max_size=4), max_size=12),
    st.lists(st.text("ab€x", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_string_is_found_wherever_the_pieces_end(pieces, stops, include):
    """Output is the text before the first completed stop; nothing of a stop leaks before it."""
    matcher = StopMatcher(stops)
    out, hit, fed = "", None, ""
    for piece in pieces:
        fed += piece
        given_out, hit = matcher.add(piece, include_stop=include)
        out += given_out
        if hit is not None:
            break
    whole = "".join(pieces)
    if hit is None:
        assert not any(stop in whole for stop in stops)
        assert out + matcher.flush() == whole
    else:
        end = next(n for n in range(len(fed) + 1) if fed[:n].endswith(tuple(stops)))
        assert hit == next(stop for stop in stops if fed[:end].endswith(stop))
        assert out == fed[: end if include else end - len(hit)]
        earlier = fed[: len(fed) - len(piece)]
        assert not any(stop in earlier for stop in stops)


def blocks(draw, ids):
    """The ids cut into rounds of 1 to 5, as verify steps would commit them."""
    out = []
    while ids:
        n = draw(st.integers(1, 5))
        out.append(ids[:n])
        ids = ids[n:]
    return out


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_an_answer_does_not_depend_on_how_rounds_cut_it(tokenizer, data):
    """Text, ids, reason and stop are the same in rounds of one token and of several."""
    text = data.draw(st.text(ALPHABET, min_size=1, max_size=30))
    stops = tuple(data.draw(st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=2)))
    params = SamplingParams(
        stop=stops,
        max_tokens=data.draw(st.integers(1, 40)),
        min_tokens=data.draw(st.integers(0, 3)),
        include_stop_str_in_output=data.draw(st.booleans()),
        stop_token_ids=frozenset(data.draw(st.sets(st.sampled_from(byte_ids("aB€")), max_size=1))),
    )
    ids = [*byte_ids(text), 1]

    def answer(rounds):
        sequence = Sequence(Request("x", (0,), params), tokenizer, k=4, seed=0, vocab_size=300)
        outputs = []
        for tokens in rounds:
            outputs.append(sequence.commit(tokens, EOS, 1000))
            if outputs[-1].finish_reason:
                break
        last = outputs[-1]
        tokens = [token for output in outputs for token in output.token_ids]
        shown = "".join(output.text for output in outputs)
        assert not any(stop in shown for stop in stops) or (
            params.include_stop_str_in_output or params.min_tokens
        )
        return tokens, shown, last.finish_reason, last.stop_reason

    assert answer([[token] for token in ids]) == answer(blocks(data.draw, ids))


@pytest.mark.parametrize(
    ("stop", "include", "text", "n_tokens", "reason"),
    [
        (("€d",), False, "abéc", 9, "€d"),
        (("€d",), True, "abéc€d", 9, "€d"),
        (("zz", "é"), False, "ab", 4, "é"),
        (("d😀e", "€"), False, "abéc", 8, "€"),
        ((), False, "abéc€d😀e", 15, None),
        (("eX",), True, "abéc€d😀e", 15, None),
    ],
)
def test_ids_end_with_the_token_that_completes_the_stop(
    tokenizer, stop, include, text, *, n_tokens, reason
):
    """No id is left past a stop string, and none before it is lost."""
    ids = [*byte_ids("abéc€d😀e"), 1]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, max_tokens=99)
    sequence = Sequence(Request("x", (0,), params), tokenizer, k=4, seed=0, vocab_size=300)
    output = sequence.commit(ids, EOS, 1000)
    assert output.text == text
    assert output.token_ids == ids[:n_tokens]
    assert output.finish_reason == "stop"
    assert output.stop_reason == reason


def test_chat_templates_and_their_complaints(folder, tokenizer, tmp_path):
    """Rendering, continuing the last message, and errors as one line."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so far "}]
    assert tokenizer.render_chat(chat[:1]) == "<s>user:hi</s><s>assistant:"
    continued = tokenizer.render_chat(
        chat, add_generation_prompt=False, continue_final_message=True
    )
    assert continued == "<s>user:hi</s><s>assistant:so far "
    with pytest.raises(ValueError, match="last message is empty"):
        tokenizer.render_chat(
            [{"role": "assistant", "content": " "}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    for template, words in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        (None, "no chat template"),
    ):
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(ValueError, match=words):
            Tokenizer(tmp_path).render_chat(chat)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(EngineError, match="does not compile"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
