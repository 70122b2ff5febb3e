"""A running answer continued from its token ids: one answer to the client, nothing lost or doubled.

The arm that failed had *committed* ids, those that reached us in whole events, and its text, which
may lag behind them: bytes of a character that is not complete, and text that may yet become a stop
string, are held back by every server. The other arm is asked for the rest at /v1/completions with
the prompt's ids and all committed ones (VLLM.md 2.7). Three things decide what is right:

1. *No committed id is given up.* Falling back to an earlier point "where the text is clean" would
   draw those tokens again only where they were of a certain kind, and bend the law of sampled
   answers: with A clean and B not, A would come out with p(A) + p(B) p(A).
2. *Text comes from ids.* What was committed is decoded by the server's own /detokenize, and must
   begin with what the client has; the rest of it is what was held back. While a character is
   incomplete, text goes on to be decoded from ids: the new server sees the first bytes of it in its
   prompt, where servers differ in what they then write. From the first whole character on its own
   text is taken.
3. *Stop strings are looked for here*, over held-back and new text, and not by the new server, which
   cannot see one that began before it. The answer ends at the token that completes it, as ever.

A drawn answer goes on with a seed of its own: with the first arm's, the same uniform numbers would
be used twice, and the second half would depend on them through the first.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from speccheck.engine.text import StopMatcher
from speccheck.gateway.asked import Asked
from speccheck.records import Handover

Decode = Callable[[Sequence[int]], Awaitable[str]]
"""Text of token ids by the server's /detokenize, special tokens by name. CannotJoinError."""

_REPLACEMENT = "\ufffd"
_CONTEXT = 6  # prompt ids decoded with the answer's, so that a leading space is kept
_HEAD = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
_SEED_LIMIT = 2**53


class CannotJoinError(Exception):
    """Why this answer cannot be continued exactly; one line."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What of an answer is there when its arm fails."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    """What the client has of it."""
    head: Mapping[str, Any]
    """The last chunk with a choice: what all chunks of this answer have in common."""


def continuation(
    asked: Asked, committed: Committed, max_model_len: int | None
) -> tuple[dict[str, Any], Handover]:
    """The body that asks for the rest, and how exact it is.

    Raises:
        CannotJoinError: of a class that cannot be continued, or no token is left to ask for.
    """
    if asked.not_joinable:
        raise CannotJoinError(asked.not_joinable)
    if not committed.prompt_ids:
        raise CannotJoinError("the server did not send the prompt's token ids")
    limit = asked.limit
    if limit is None and max_model_len is None:
        raise CannotJoinError("neither request nor server says how long the answer may be")
    if limit is None:
        limit = (max_model_len or 0) - len(committed.prompt_ids)
    left = limit - len(committed.ids)
    if left <= 0:
        raise CannotJoinError(
            f"{len(committed.ids)} tokens came where {limit} were allowed, and no end"
        )
    body = {
        **asked.carried(),
        "prompt": [*committed.prompt_ids, *committed.ids],
        "max_tokens": left,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if asked.is_greedy:
        return body, Handover.EXACT
    seed = asked.sampler.seed
    body["seed"] = (
        secrets.randbelow(_SEED_LIMIT) if seed in (None, -1) else _next_seed(asked, committed)
    )
    return body, Handover.EXACT if seed in (None, -1) else Handover.UNSEEDED


def _next_seed(asked: Asked, committed: Committed) -> int:
    text = f"{asked.sampler.seed}\n{len(committed.ids)}"
    return (
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _SEED_LIMIT
    )


@dataclass(slots=True)
class Piece:
    """What one chunk of the new arm adds to the answer."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Continued:
    """The text of an answer across a joint. `begin` once, then `feed` for each chunk, in order."""

    asked: Asked
    committed: Committed
    decode: Decode
    special: Collection[int] = ()
    """Ids that leave no text where special tokens are skipped."""
    _ids: list[int] = field(default_factory=list)
    _known: int = 0
    """Characters of the answer that are settled: given out, or held back for a stop string."""
    _trusts: bool = False
    """Whether the new server's own text is taken."""
    _stops: StopMatcher = field(default_factory=lambda: StopMatcher(()))
    _owed: int = 0
    """Characters that the matcher still holds although the client has them."""
    _base: str | None = None

    async def begin(self) -> str:
        """Text that was committed, not yet sent, and held back for no reason any more.

        Raises:
            CannotJoinError: what the client has is not the beginning of what was committed.
        """
        self._ids = list(self.committed.ids)
        self._stops = StopMatcher(self.asked.stop)
        text = await self._text(self._ids)
        sent = self.committed.text
        if not text.startswith(sent):
            raise CannotJoinError("the text that was sent is not that of the token ids")
        self._known = max(len(sent), len(text.rstrip(_REPLACEMENT)))
        self._trusts = not text.endswith(_REPLACEMENT)
        # A server that gives stop strings out need not hold back their beginnings (vLLM).
        longest = max((len(one) for one in self.asked.stop), default=1)
        tail = sent[max(0, len(sent) - longest + 1) :]
        given, early = self._stops.add(tail, include_stop=self._includes_stop)
        self._owed = len(tail) - len(given)
        held_back = text[len(sent) : self._known]
        out, stop = self._stops.add(held_back, include_stop=self._includes_stop)
        if early is not None or stop is not None:
            raise CannotJoinError("a stop string was complete before the joint")
        return self._unsent(out)

    async def feed(
        self,
        ids: Sequence[int],
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> Piece:
        """The next chunk of the new arm as the client shall see it.

        Raises:
            CannotJoinError: the server cannot decode what it sent.
        """
        before, known, stops = len(self._ids), self._known, copy(self._stops)
        self._ids += ids
        is_last = finish_reason is not None
        ends_itself = finish_reason == "stop" and not isinstance(stop_reason, str)
        new = await self._new_text(text, is_last=is_last, without_last=ends_itself)
        out, stop = self._stops.add(new, include_stop=self._includes_stop)
        if stop is not None:
            if len(ids) > 1:
                return await self._cut_at_stop(before, known, stops, ids)
            return Piece(tuple(ids), self._unsent(out), "stop", stop)
        if is_last:
            out += self._stops.flush()
        return Piece(tuple(ids), self._unsent(out), finish_reason, stop_reason)

    def _unsent(self, out: str) -> str:
        """Text without what the client has already."""
        new = out[self._owed :]
        self._owed = max(0, self._owed - len(out))
        return new

    async def _cut_at_stop(
        self, before: int, known: int, stops: StopMatcher, ids: Sequence[int]
    ) -> Piece:
        """A chunk of several ids with a stop string in it, token by token: the first one counts."""
        out = ""
        for n in range(1, len(ids) + 1):
            whole = await self._text(self._ids[: before + n])
            settled = max(known, len(whole.rstrip(_REPLACEMENT)))
            piece, stop = stops.add(whole[known:settled], include_stop=self._includes_stop)
            out, known = out + piece, settled
            if stop is not None:
                del self._ids[before + n :]
                return Piece(tuple(ids[:n]), self._unsent(out), "stop", stop)
        raise CannotJoinError("the server's text is not that of its token ids")

    @property
    def _includes_stop(self) -> bool:
        return self.asked.body.get("include_stop_str_in_output") is True

    async def _new_text(self, text: str, *, is_last: bool, without_last: bool) -> str:
        """What a chunk adds. `without_last`: its last token ends the answer and leaves no text."""
        if self._trusts:
            self._known += len(text)
            return text
        is_silent = without_last and not self._includes_stop
        whole = await self._text(self._ids[:-1] if is_silent else self._ids)
        settled = len(whole) if is_last else max(self._known, len(whole.rstrip(_REPLACEMENT)))
        new, self._known = whole[self._known : settled], settled
        self._trusts = not whole.endswith(_REPLACEMENT)
        return new

    async def _text(self, ids: Sequence[int]) -> str:
        """The answer's text for these ids, held back by nothing; U+FFFD for incomplete bytes."""
        context = list(self.committed.prompt_ids[-_CONTEXT:])
        if self._base is None:
            self._base = await self.decode(context)
        if self.asked.body.get("skip_special_tokens") is not False:
            ids = [token for token in ids if token not in self.special]
        text = await self.decode([*context, *ids])
        if not text.startswith(self._base):
            raise CannotJoinError("the prompt ends within a character")
        return text[len(self._base) :]


def chunk(asked: Asked, head: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """A chunk in the form of those before the joint, token ids included."""
    choice: dict[str, Any] = {"index": 0}
    if asked.kind == "chat":
        choice["delta"] = {"content": piece.text}
    else:
        choice["text"] = piece.text
    choice |= {
        "logprobs": None,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": list(piece.ids),
    }
    return {name: head[name] for name in _HEAD if name in head} | {"choices": [choice]}


def usage_of(n_prompt: int, n_completion: int) -> dict[str, int]:
    """Usage that adds up over both arms."""
    return {
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_completion,
        "completion_tokens": n_completion,
    }


def usage_chunk(head: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    """The last chunk of an answer whose arm did not come to send its own."""
    common = {name: head[name] for name in _HEAD if name in head}
    return common | {"choices": [], "usage": dict(usage)}


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
