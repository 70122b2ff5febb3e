"""The hand-over tried on purpose, before traffic depends on it.

Running answers of the speculative arm are cut off by us after some chunks, the way a server that
dies does it: its connection is closed in mid-answer. What the client then has is held against the
target-only answer to the same prompt, token for token, at temperature 0.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from speccheck import launch
from speccheck.config import GatewayConfig
from speccheck.gateway.asked import Asked
from speccheck.gateway.board import Board
from speccheck.gateway.choose import SPECULATE, TARGET_ONLY, Decided
from speccheck.gateway.gate import Gate, open_sessions
from speccheck.gateway.meters import Meters
from speccheck.gateway.relay import Relay, nowhere
from speccheck.gateway.server import special_ids, why_no_joint
from speccheck.records import Answer, Arm, Handover, Prompt, Receipt

CUTS = (1, 3, 8)
"""Chunks after which an answer is cut off; the first is the one with the role."""
_MAX_TOKENS = 48


@dataclass(frozen=True)
class Exercise:
    """What came of it. `answers` were cut off; the others had ended before."""

    answers: int
    joined: int
    broken: int
    equal: int
    """Joined answers that are target-only's, token for token."""
    ended: int
    """Answers that were over before the cut."""
    skipped: int
    """Prompts of a class that is not handed over."""
    why: str = ""
    """Why nothing was tried, or the first thing that broke."""

    @property
    def note(self) -> str:
        """One line for a packet."""
        if not self.answers:
            return f"hand-over in mid-answer was not exercised: {self.why or 'no answer to cut'}"
        more = f"; the first that broke: {self.why}" if self.broken else ""
        differ = self.joined - self.equal
        unequal = f", {differ} not (a numerical tie can do that)" if differ else ""
        return (
            f"hand-over in mid-answer, exercised: of {self.answers} answers cut off on purpose "
            f"{self.joined} were joined and {self.broken} broke; {self.equal} of {self.joined} are "
            f"target-only's token for token{unequal}{more}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For a stage's evidence."""
        return asdict(self)


class _Kept:
    """An outbox that keeps the last receipt."""

    def __init__(self) -> None:
        self.last: Receipt | None = None

    def put(self, receipt: Receipt, _answer: Answer | None) -> None:
        """Keep it."""
        self.last = receipt


def exercise(pair: launch.Arms, prompts: Sequence[Prompt]) -> Exercise:
    """Cut off answers to these prompts, each at every one of `CUTS`; nothing is stored."""
    why = why_no_joint(pair)
    if why:
        return Exercise(0, 0, 0, 0, 0, 0, why)
    with tempfile.TemporaryDirectory(prefix="speccheck-") as folder:
        board = Board.create(
            Path(folder) / "board", {"routes": {}, "policy": None, "policy_version": ""}
        )
        try:
            return asyncio.run(_exercise(pair, prompts, board))
        finally:
            board.close()


async def _exercise(pair: launch.Arms, prompts: Sequence[Prompt], board: Board) -> Exercise:
    config, kept = GatewayConfig(), _Kept()
    session, raw_session = open_sessions(config.timeouts.connect_s)
    gate = Gate(
        config=config,
        arms={arm.arm: arm for arm in pair},
        api_key=pair.api_key,
        session=session,
        raw_session=raw_session,
        board=board,
        off_folder=Path(),
        outbox=kept,
        meters=Meters(CollectorRegistry()),
        run_id="",
        worker=0,
        no_joint="",
        special=frozenset(special_ids(pair)),
        max_model_len=launch.longest_context(pair.target_only, pair.api_key),
        secret=b"",
    )

    async def ask(body: Mapping[str, Any], arm: Arm, cut: int | None) -> Receipt:
        word = SPECULATE if arm is Arm.SPECULATIVE else TARGET_ONLY
        relay = Relay(
            gate,
            Asked("chat", body),
            "/v1/chat/completions",
            [(b"content-type", b"application/json")],
            Decided(arm, None, word, "exercise"),
            "0" * 32,
            time.perf_counter_ns(),
            nowhere,
            cut_after=cut,
        )
        await relay.run()
        if kept.last is None:
            raise AssertionError("a relay without a receipt")
        return kept.last

    counts = dict.fromkeys(("answers", "joined", "broken", "equal", "ended", "skipped"), 0)
    first_break = ""
    try:
        for prompt in prompts:
            body = _body(pair, prompt)
            if Asked("chat", body).not_joinable:
                counts["skipped"] += 1
                continue
            truth = await ask(body, Arm.TARGET_ONLY, None)
            for cut in CUTS:
                answer = await ask(body, Arm.SPECULATIVE, cut)
                if answer.handover_kind is None:
                    counts["ended"] += 1
                    continue
                counts["answers"] += 1
                if answer.handover_kind == Handover.BROKEN:
                    counts["broken"] += 1
                    first_break = first_break or str(answer.error_message)
                    continue
                counts["joined"] += 1
                counts["equal"] += answer.output_digest == truth.output_digest
    finally:
        await raw_session.close()
        await session.close()
    return Exercise(**counts, why=first_break)


def _body(pair: launch.Arms, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": pair.target_only.model,
        "messages": [dict(message) for message in prompt.messages],
        "stream": True,
        "temperature": 0,
        "max_tokens": min(prompt.max_tokens, _MAX_TOKENS),
    }
    if prompt.stop:
        body["stop"] = list(prompt.stop)
    if prompt.response_format is not None:
        body["response_format"] = dict(prompt.response_format)
    return body
