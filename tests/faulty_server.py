"""One arm as a process that fails on demand: `python tests/faulty_server.py ARM [PORT]`.

What a request names as its `user` is what goes wrong with it, where ARM is speculative. GET
/seen says how many requests for an answer came, by `user`; GET /go lets held answers go on.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from scripted_server import (
    DONE,
    MODELS,
    Drop,
    Reset,
    Script,
    ScriptedServer,
    answer,
    chunk,
    gzipped,
    refusal,
    sse,
    target_says,
    text_of,
    whole,
)

IDS = [7, 8, 9, 10, 11, 2]
TEXT = "".join(map(text_of, IDS))
N_BEGUN = 2
_MIB = b"x" * (1 << 20)
_GO_ON = threading.Event()


def begun() -> list[Any]:
    """The first chunks of an answer."""
    steps = [[token] for token in IDS[:N_BEGUN]]
    return list(answer(steps, finish=None, final_usage=False, done=False).parts)


def then(*parts: Any) -> Callable[[], Script]:
    """An answer that begins well."""
    return lambda: Script([*begun(), *parts])


def held() -> Iterator[Any]:
    """A good answer that stops after its beginning until GET /go."""
    yield from begun()
    while not _GO_ON.is_set():
        yield 0.05
    yield from answer([[token] for token in IDS]).parts[len(begun()) :]


def made(parts: Iterator[Any]) -> Script:
    """A script whose parts are made as they are sent."""
    return Script(cast("list[Any]", parts))


SCRIPTS: dict[str, Callable[[], Script]] = {
    "good": lambda: answer([[token] for token in IDS]),
    "gzip": lambda: gzipped(answer([[token] for token in IDS])),
    "slow": lambda: answer([[token] for token in IDS], delay_s=0.1),
    "held": lambda: made(held()),
    # Before anything reached the client.
    "500": lambda: refusal(500, "boom"),
    "503": lambda: refusal(503, "busy"),
    "429": lambda: refusal(429, "slow down"),
    "html": lambda: Script([b"<html>"], content_type="text/html"),
    "reset-first": lambda: Script([Reset()]),
    "error-first": lambda: Script([sse({"error": {"message": "no", "code": 500}}), DONE]),
    "silent": lambda: Script([600.0]),
    # In mid-answer.
    "reset": then(Reset()),
    "closed": then(Drop()),
    "unfinished": then(DONE),
    "error-inside": then(sse({"error": {"message": "boom", "code": 500}}), DONE),
    "truncated-json": then(b'data: {"choices": [{"index"\n\n', DONE),
    "broken-sse": then(b"garbage without end\n", Drop()),
    "half-event": then(sse(chunk("lost", [9]))[:30], Reset()),
    "stall": then(600.0),
    "keep-alive": lambda: made(itertools.chain(begun(), itertools.cycle([b": ping\n\n", 0.1]))),
    "huge-line": lambda: Script([*begun(), b"data: ", *itertools.repeat(_MIB, 64)]),
    # More than was asked for.
    "endless": lambda: Script(
        [*begun(), *(sse(chunk(" a", [1])) for _ in range(1000)), 600.0]  # 16 were allowed
    ),
}


class Pages(dict[str, Any]):
    """MODELS, and what the tests ask for."""

    def __init__(self) -> None:
        super().__init__(MODELS)
        self.seen: Counter[str] = Counter()
        self.update({"/seen": None, "/go": None})

    def __getitem__(self, path: str) -> Any:
        if path == "/go":
            _GO_ON.set()
        return dict(self.seen) if path == "/seen" else super().__getitem__(path)


def main(arm: str, port: int) -> None:
    """Serve until killed; the first line says where."""
    pages = Pages()
    right = target_says()

    def script(body: dict[str, Any], n: int) -> Script:
        user = body.get("user", "")
        if "tokens" not in body:
            pages.seen[user] += 1
        if "tokens" not in body and not body.get("stream"):  # what the gateway tries at its start
            prompt = body["prompt"]
            ids = prompt if isinstance(prompt, list) else [1, 2]
            choice = {
                "prompt_token_ids": ids,
                "token_ids": [3],
                "text": "",
                "finish_reason": "stop",
            }
            return whole({"choices": [choice]})
        is_right = arm == "target" or "messages" not in body
        return right(body, n) if is_right else SCRIPTS[user]()

    with ScriptedServer(script, pages, port) as server:
        print(json.dumps({"url": server.url}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int([*sys.argv, "0"][2]))
