"""What the cases from the field need: servers that say what a case says, and times of its own.

Answers go over HTTP from `scripted_server`; times and counts of cases that are about speed are put
into the client's observations, so that no test waits and none depends on the machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from scripted_server import DONE, Script, chunk, sse, usage_of

from speccheck import client
from speccheck.cli import main
from speccheck.client import Observation, SpecCounts
from speccheck.records import Outcome, PlannedRequest

PATIENT: dict[str, Any] = {
    "lag_floor_s": 1000,
    "loop_stall_s": 1000,
    "loop_stall_share": 1,
    "loop_cpu_share": None,
}
"""client_limits under which a busy machine is no late client: times are not what is tested."""

_PROMPT_IDS = 100_000
_DECODED = range(10_000, 10_500)
"""Tokens of answers to /v1/completions: no chat answer holds them."""


@dataclass
class Say:
    """One answer: its text in one piece per token, what ended it, and what the server counts."""

    text: str
    ids: Sequence[int]
    finish: str = "stop"
    stop: str | None = None
    metrics: Any = None
    reasoning_tokens: int | None = None
    reported_tokens: int | None = None


def script_of(say: Say, prompt_ids: Sequence[int]) -> Script:
    """The answer as vLLM streams it: one chunk with all tokens, then usage."""
    role = chunk("", role="assistant")
    role["prompt_token_ids"] = list(prompt_ids)
    last = chunk(say.text, say.ids, finish=say.finish, stop=say.stop)
    reported = len(say.ids) if say.reported_tokens is None else say.reported_tokens
    details = {} if say.reasoning_tokens is None else {"reasoning": say.reasoning_tokens}
    closing: dict[str, Any] = {
        "choices": [],
        "usage": usage_of(len(prompt_ids), reported, **details),
        "metrics": say.metrics,
    }
    return Script([sse(role), sse(last), sse(closing), DONE], list(say.ids), say.text)


@dataclass
class Model:
    """A scripted server's mind: what it says to prompt i, asked for the n-th time at temperature 0.

    `gaps` are log-probability gaps (nats) by (prompt, position): between the token the target chose
    there and `other`, everywhere else 5 nats. Two computations of the target differ by `noise`.
    """

    say: Callable[[int, int, dict[str, Any]], Say]
    gaps: Mapping[tuple[int, int], float] = field(default_factory=dict)
    other: Callable[[int], int] = lambda token: token + 1
    noise: float = 0.0
    asked: Counter[int] = field(default_factory=Counter)

    def __call__(self, body: dict[str, Any], _n: int) -> Script:
        """Chat answers, and teacher-forced scores of token ids."""
        if "prompt" in body:
            return self._complete(body)
        question = str(body["messages"][-1]["content"])
        number = int(re.search(r"\d+", question)[0])  # type: ignore[index]
        prompt_ids = [_PROMPT_IDS + number]
        if body["max_tokens"] == 1:
            return script_of(Say("x", [1], "length"), prompt_ids)
        n = self.asked[number]
        if not body.get("temperature"):
            self.asked[number] += 1
        return script_of(self.say(number, n, body), prompt_ids)

    def _complete(self, body: dict[str, Any]) -> Script:
        ids = body["prompt"]
        number = ids[0] - _PROMPT_IDS
        choice: dict[str, Any] = {"text": "x", "token_ids": [1], "finish_reason": "length"}
        if body.get("prompt_logprobs"):
            scored: list[Any] = [None]
            for at, token in enumerate(ids[1:]):
                gap = 5.0 if token in _DECODED else self.gaps.get((number, at), 5.0)
                scored.append(
                    {
                        str(token): {"logprob": -0.01, "rank": 1},
                        str(self.other(token)): {"logprob": -0.01 - gap, "rank": 2},
                    }
                )
            choice["prompt_logprobs"] = scored
        elif body.get("logprobs"):
            tokens = list(_DECODED)[: body["max_tokens"]]
            choice["token_ids"] = tokens
            choice["logprobs"] = {
                "tokens": [f"token_id:{t}" for t in tokens],
                "token_logprobs": [-0.01] * len(tokens),
                "top_logprobs": [
                    {
                        f"token_id:{t}": -0.01,
                        f"token_id:{self.other(t)}": -5.01 - self.noise,
                    }
                    for t in tokens
                ],
            }
        return Script([json.dumps({"choices": [choice]}).encode()], content_type="application/json")


@dataclass
class Seen:
    """What the client is made to observe: milliseconds, tokens and counts."""

    tpot_ms: float = 20.0
    ttft_ms: float = 50.0
    tokens: int = 64
    prompt_tokens: int = 100
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    error: str | None = None


def observe(monkeypatch: pytest.MonkeyPatch, see: Callable[[PlannedRequest], Seen]) -> None:
    """Put these observations in place of the network; everything behind the client is real."""

    async def send(*arguments: Any, **_: Any) -> Observation:
        request: PlannedRequest = arguments[3]
        seen = see(request)
        start = client.time.perf_counter_ns()
        first = start + round(1e6 * seen.ttft_ms)
        last = first + round(1e6 * seen.tpot_ms * (seen.tokens - 1))
        if seen.error is not None:
            return Observation(Outcome.ERROR, start, first, error_class=seen.error)
        counts = None
        if seen.drafted is not None:
            steps = seen.steps or -(-seen.drafted // 4)
            counts = SpecCounts(steps, seen.drafted, seen.accepted or 0, None)
        return Observation(
            Outcome.OK,
            start,
            last,
            http_status=200,
            finish_reason="length",
            first_token_ns=first,
            first_content_ns=first,
            last_token_ns=last,
            chunks=seen.tokens,
            prompt_tokens=seen.prompt_tokens,
            completion_tokens=seen.tokens,
            tokens_source="ids",
            token_ids=tuple(range(seen.tokens)),
            counts=counts,
            counts_note="" if counts else "not sent",
        )

    monkeypatch.setattr(client, "send", send)


def slowed(monkeypatch: pytest.MonkeyPatch, tpot_ms: Callable[[PlannedRequest], float]) -> None:
    """Real answers over the network, with times of one's own."""
    real = client.send

    async def send(*arguments: Any, **options: Any) -> Observation:
        seen = await real(*arguments, **options)
        if seen.outcome != Outcome.OK or not seen.completion_tokens:
            return seen
        first = seen.sent_ns + 50_000_000
        last = first + round(1e6 * tpot_ms(arguments[3]) * (seen.completion_tokens - 1))
        return replace(
            seen, first_token_ns=first, first_content_ns=first, last_token_ns=last, done_ns=last
        )

    monkeypatch.setattr(client, "send", send)


def corpus(folder: Path, n: int, **fields: Callable[[int], Any] | Any) -> None:
    """`n` prompts "question i"; fields are values, or functions of i."""
    lines = []
    for i in range(n):
        given = {name: v(i) if callable(v) else v for name, v in fields.items()}
        line = {
            "id": f"p{i}",
            "task": "qa",
            "route": "chat",
            "messages": [{"role": "user", "content": f"question {i}"}],
            "max_tokens": 100,
            "check": {"kind": "none"},
        }
        lines.append(json.dumps(line | given))
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")


@dataclass
class Told:
    """What the user got: exit code, text and JSON."""

    code: int
    text: str
    json: dict[str, Any]

    @property
    def reason(self) -> str:
        """Of the route's decision."""
        (made,) = self.json["decisions"]
        return str(made["reason"])

    @property
    def action(self) -> str:
        """Of the route's decision."""
        (made,) = self.json["decisions"]
        return str(made["action"])

    def finding(self, rule: str, cohort: str = "") -> dict[str, Any]:
        """One finding of the decision."""
        (made,) = self.json["decisions"]
        found = [f for f in made["findings"] if (f["rule"], f["cohort"]) == (rule, cohort)]
        assert len(found) == 1, [(f["rule"], f["cohort"]) for f in made["findings"]]
        return dict(found[0])


@dataclass
class Product:
    """speccheck as its user meets it."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> Told:
        """A command with --json, and what it said."""
        out = ["--out", str(self.folder / "run")]
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *out, "--json"])
        said = self.capsys.readouterr()
        return Told(int(ended.value.code or 0), said.out + said.err, json.loads(said.out))

    def stage(self, name: str) -> Told:
        """One stage of the rollout in the folder."""
        rollout = str(self.folder / "rollout.yaml")
        return self.run("stage", name, "--rollout", rollout, "--keep-going")

    def page(self, *arguments: str) -> str:
        """The same as text on a terminal."""
        with pytest.raises(SystemExit):
            main([*arguments, "--out", str(self.folder / "run")])
        said = self.capsys.readouterr()
        return said.out
