"""The text of an answer over a joint is the text of the answer that was never cut.

Servers are played by the engine's own `Sequence` (token by token, holding back what may become a
stop string) and by a copy of how vLLM does it: tokenizers' DecodeStream, which begins with the
whole prompt where that ends within a character, and a buffer that holds back the length of the
longest stop string. Each answer is cut at every chunk, and chunks of both arms are of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request, Sequence
from speccheck.engine.settings import EngineSettings
from speccheck.engine.text import Tokenizer
from speccheck.gateway.asked import Asked
from speccheck.gateway.joint import (
    CannotJoinError,
    Committed,
    Continued,
    Piece,
    chunk,
    continuation,
    usage_chunk,
    usage_of,
)
from speccheck.records import Handover

TOKENIZER = Tokenizer(EngineSettings().model_dir)
SPECIAL = frozenset(range(6))
EOS = frozenset({1})
PROMPT = (0, 4, *TOKENIZER.encode("Say something é", add_special_tokens=False), 5)
ALPHABET = "ab \nQ:é€世🙂"


async def decode(ids: Seq[int]) -> str:
    """/detokenize, as both engines answer it: special tokens by name."""
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass
class Said:
    """What a server sent in one chunk."""

    ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Engine:
    """The embedded engine's text."""

    def __init__(self, prompt: Seq[int], params: SamplingParams) -> None:
        self._sequence = Sequence(
            Request("r", tuple(prompt), params), TOKENIZER, k=0, seed=0, vocab_size=2048
        )

    def say(self, ids: Seq[int]) -> Said:
        out = self._sequence.commit(ids, EOS, 10_000)
        return Said(out.token_ids, out.text, out.finish_reason, out.stop_reason)


class Vllm:
    """vLLM's text: FastIncrementalDetokenizer and its stop buffer (v1/engine/detokenizer.py)."""

    def __init__(self, prompt: Seq[int], params: SamplingParams) -> None:
        self._params = params
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._n, self._text, self._sent = 0, "", 0
        keep = 0 if params.include_stop_str_in_output else 1
        self._buffer = max((len(s) for s in params.stop), default=1) - 1 if keep else 0

    def say(self, ids: Seq[int]) -> Said:
        said: list[int] = []
        finish: str | None = None
        reason: str | int | None = None
        for token in ids:
            self._n += 1
            said.append(token)
            if token in EOS and not self._params.ignore_eos:
                finish = "stop"
                break
            self._text += self._stream.step(TOKENIZER._tokenizer, token) or ""
            hit = min(
                ((at, s) for s in self._params.stop if (at := self._text.find(s)) >= 0),
                default=None,
            )
            if hit is not None:
                end = hit[0] + len(hit[1]) * self._params.include_stop_str_in_output
                self._text, finish, reason = self._text[:end], "stop", hit[1]
                break
            if self._n >= self._params.max_tokens:
                finish = "length"
                break
        end = len(self._text) - (0 if finish else self._buffer)
        text, self._sent = self._text[self._sent : max(end, self._sent)], max(end, self._sent)
        return Said(said, text, finish, reason)


def cut_up(ids: Seq[int], sizes: Seq[int]) -> list[list[int]]:
    """Ids in chunks of these sizes, used in turn."""
    chunks, at, i = [], 0, 0
    while at < len(ids):
        size = sizes[i % len(sizes)]
        chunks.append(list(ids[at : at + size]))
        at, i = at + size, i + 1
    return chunks


def whole(server: type, ids: Seq[int], params: SamplingParams) -> Said:
    """The answer that nobody cut."""
    told = server(PROMPT, params)
    answer = Said([], "")
    for token in ids:
        said = told.say([token])
        answer = Said(
            answer.ids + said.ids, answer.text + said.text, said.finish_reason, said.stop_reason
        )
        if said.finish_reason:
            break
    return answer


async def joined(server, ids, params, asked, sizes, rest_sizes, at):
    """The answer cut after `at` chunks and continued; None where it had ended by then."""
    first = server(PROMPT, params)
    committed, text = [], ""
    for piece in cut_up(ids, sizes)[:at]:
        said = first.say(piece)
        committed, text = committed + said.ids, text + said.text
        if said.finish_reason:
            return None
    before = Committed(PROMPT, tuple(committed), text, {})
    body, _ = continuation(asked, before, 10_000)
    assert body["prompt"] == [*PROMPT, *committed]
    assert "stop" not in body
    second = server(body["prompt"], replace(params, stop=(), max_tokens=body["max_tokens"]))
    going_on = Continued(asked, before, decode, SPECIAL)
    answer = Said(list(committed), text + await going_on.begin())
    for piece in cut_up(ids[len(committed) :], rest_sizes):
        said = second.say(piece)
        new = await going_on.feed(said.ids, said.text, said.finish_reason, said.stop_reason)
        answer.ids += new.ids
        answer.text += new.text
        answer.finish_reason, answer.stop_reason = new.finish_reason, new.stop_reason
        if new.finish_reason:
            break
    return answer


def asked_for(limit: int, stop: Seq[str], *, include: bool = False, **more) -> Asked:
    body = {"stream": True, "temperature": 0, "max_tokens": limit, "stop": list(stop)}
    return Asked("chat", {**body, "include_stop_str_in_output": include, **more})


def check_every_cut(server, ids, stop, sizes, rest_sizes, *, include=False, max_tokens=None):
    """Every cut of this answer is continued to the same ids, text and end."""
    limit = max_tokens or len(ids)
    params = SamplingParams(
        temperature=0, max_tokens=limit, stop=tuple(stop), include_stop_str_in_output=include
    )
    asked = asked_for(limit, stop, include=include)
    truth = whole(server, ids, params)
    cuts = 0
    for at in range(len(ids) + 1):
        answer = asyncio.run(joined(server, ids, params, asked, sizes, rest_sizes, at))
        if answer is None:
            break
        cuts += 1
        assert answer == truth, at
    return cuts


texts = st.text(st.sampled_from(ALPHABET), min_size=1, max_size=14)
stops = st.lists(st.text(st.sampled_from("a\nQ:é世🙂"), min_size=1, max_size=4), max_size=2)
chunk_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.parametrize("server", [Engine, Vllm])
@settings(max_examples=120)
@given(texts, stops, chunk_sizes, chunk_sizes, st.booleans())
def test_every_cut_gives_the_answer_that_was_not_cut(server, text, stop, sizes, rest, include):
    """Characters and stop strings split anywhere, chunks of any size, ended by EOS."""
    assert check_every_cut(server, [*ids_of(text), 1], stop, sizes, rest, include=include) >= 1


@pytest.mark.parametrize("server", [Engine, Vllm])
def test_a_stop_string_over_the_joint_ends_the_answer(server):
    """Begun by the first arm, completed by the second: not a letter of it is shown."""
    ids = ids_of("ab\n\nQ: more")
    params = SamplingParams(temperature=0, max_tokens=50, stop=("\n\nQ:",))
    asked = asked_for(50, ["\n\nQ:"])
    for at in range(2, 6):
        answer = asyncio.run(joined(server, ids, params, asked, [1], [1], at))
        if answer is not None:
            assert (answer.text, answer.finish_reason, answer.stop_reason) == (
                "ab",
                "stop",
                "\n\nQ:",
            )
            assert answer.ids == ids_of("ab\n\nQ:")


def test_the_servers_own_text_is_wrong_where_a_character_is_split():
    """Why text is decoded from ids there: one loses the character, the other repeats the prompt."""
    ids = ids_of("€")
    prompt = [*PROMPT, *ids[:-1]]
    params = SamplingParams(temperature=0, max_tokens=9)
    assert Engine(prompt, params).say(ids[-1:]).text == ""
    assert len(Vllm(prompt, params).say(ids[-1:]).text) > 10


@given(st.lists(st.integers(0, 2047), min_size=1, max_size=12), chunk_sizes, chunk_sizes)
def test_any_ids_are_joined_or_refused(ids, sizes, rest):
    """Broken bytes and special tokens: the same ids, and no letter lost; or a clear refusal."""
    ids = [token for token in ids if token != 1] + [1]
    params = SamplingParams(temperature=0, max_tokens=len(ids))
    asked = asked_for(len(ids), [])
    truth = whole(Engine, ids, params)
    refused = 0
    for at in range(len(ids)):
        try:
            answer = asyncio.run(joined(Engine, ids, params, asked, sizes, rest, at))
        except CannotJoinError:
            refused += 1
            continue
        if answer is None:
            break
        assert answer.ids == truth.ids
        assert answer.text.replace("\ufffd", "") == truth.text.replace("\ufffd", "")
    assert not refused or "\ufffd" in truth.text


def test_text_that_is_not_that_of_the_ids_is_refused():
    """What the client has must be the beginning of what was committed."""
    asked = asked_for(9, [])
    before = Committed(PROMPT, tuple(ids_of("abc")), "xyz", {})
    with pytest.raises(CannotJoinError, match="not that of the token ids"):
        asyncio.run(Continued(asked, before, decode, SPECIAL).begin())


@pytest.mark.parametrize(
    ("more", "limit", "why"),
    [
        ({"max_tokens": 3}, None, "3 tokens came where 3 were allowed"),
        ({"max_tokens": None}, None, "how long"),
        ({"tools": [{"type": "function"}]}, None, "tools"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(more, limit, why):
    """No budget left, no budget known, or a class that cannot be continued."""
    asked = asked_for(9, [], **more)
    with pytest.raises(CannotJoinError, match=why):
        continuation(asked, Committed(PROMPT, (7, 8, 9), "", {}), limit)


def test_the_budget_of_both_arms_is_that_of_the_request():
    """max_tokens where it is given, else what fits the model, or the 16 of /v1/completions."""
    before = Committed(PROMPT, (7, 8, 9), "", {})
    assert continuation(asked_for(9, []), before, None)[0]["max_tokens"] == 6
    chat = Asked("chat", {"stream": True, "temperature": 0})
    assert continuation(chat, before, 100)[0]["max_tokens"] == 100 - len(PROMPT) - 3
    completion = Asked("completion", {"stream": True, "prompt": "x", "temperature": 0})
    assert continuation(completion, before, 100)[0]["max_tokens"] == 13


def test_a_drawn_answer_goes_on_with_numbers_of_its_own():
    """The first arm's seed again would draw the second half from the first half's numbers."""
    before = Committed(PROMPT, (7, 8, 9), "", {})
    drawn = asked_for(9, [], temperature=1)
    seeds = {continuation(drawn, before, None)[0]["seed"] for _ in range(8)}
    assert len(seeds) == 8
    assert continuation(drawn, before, None)[1] is Handover.EXACT
    seeded = asked_for(9, [], temperature=1, seed=5)
    one, kind = continuation(seeded, before, None)
    again, _ = continuation(seeded, before, None)
    assert kind is Handover.UNSEEDED
    assert one["seed"] == again["seed"] != 5
    assert "seed" not in continuation(asked_for(9, [], seed=5), before, None)[0]


def test_chunks_after_the_joint_look_like_those_before():
    """One id, one model, one form; usage over both arms."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": {}}
    asked = asked_for(9, [])
    made = chunk(asked, head, Piece((7,), "a", "stop", "Q"))
    assert made == {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {"content": "a"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "Q",
                "token_ids": [7],
            }
        ],
    }
    assert usage_chunk(head, usage_of(5, 9))["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
    }
