"""kill -9 of the speculative server under running streams, again and again, and what came of it.

Run it as `python tests/bench/kill.py [--rounds 20] [--streams 50] [--out FOLDER]`. The embedded
pair runs as two processes behind `speccheck gateway`. In each round all streams are begun on a
route of their own (so that a guard which turned one round's route off does not keep the next from
speculating), the speculative server is killed once enough of them are in mid-answer, and it is
started again on its port. Half of the rounds are at temperature 0, where each answer must be
target-only's, token for token; the others are drawn at 0.7.

Printed for each temperature: answers, how many ended before the kill, were joined, were begun again
on target-only, or broke; for each answer it is checked that the client saw one role, one end, one
[DONE], one response id, and a usage that counts the ids it got. At the end `speccheck fallback
replay` decides again, and must agree byte for byte. Exit code 1 where any of that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from speccheck.records import Receipt
from speccheck.store import Store

CORPORA = Path(__file__).resolve().parent.parent.parent / "corpora"
SPEC = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}
SETTINGS = {"seed": 1, "max_num_seqs": 64}
MAX_TOKENS = 48
WAIT_S = 300.0
TEMPERATURES = (0.0, 0.7)


def prompts(n: int) -> list[list[dict[str, str]]]:
    """The first prompts of each packaged task in turn."""
    tasks = [
        path.read_text(encoding="utf-8").splitlines() for path in sorted(CORPORA.glob("*.jsonl"))
    ]
    lines = [task[i] for i in range(n) for task in tasks if i < len(task)]
    found = [json.loads(line) for line in lines]
    return [one["messages"] for one in found if len(str(one["messages"])) < 400][:n]


class Server:
    """One arm as a process; started again on the same port."""

    def __init__(self, speculation: dict[str, Any] | None) -> None:
        self._settings = json.dumps({**SETTINGS, "speculative_config": speculation})
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "speccheck.engine.server", "--settings", self._settings),
                *("--port", str(self.port), "--parent-pid", str(os.getpid())),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """Without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Seen:
    """What a client has of an answer."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    roles: int = 0
    ends: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    usage: int | None = None
    is_done: bool = False
    error: str = ""
    arm: str = ""

    @property
    def wrong(self) -> str:
        """What an answer must not look like, or empty."""
        if self.error:
            return f"error: {self.error[:200]}"
        checks = {
            "no [DONE]": self.is_done,
            f"{self.roles} roles": self.roles == 1,
            f"ends {self.ends}": len(self.ends) == 1,
            f"{len(self.names)} response ids": len(self.names) == 1,
            f"usage {self.usage}, ids {len(self.ids)}": self.usage == len(self.ids),
        }
        return ", ".join(text for text, is_right in checks.items() if not is_right)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    messages: Any,
    temperature: float,
    route: str,
    on_token: Any,
) -> Seen:
    """One streamed chat."""
    seen = Seen()
    body = {
        "model": "speccheck-target",
        "messages": messages,
        "temperature": temperature,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers={"x-speccheck-route": route}
        ) as reply:
            seen.arm = reply.headers.get("x-speccheck-arm", "")
            if reply.status != 200:
                seen.error = f"HTTP {reply.status}: {await reply.text()}"
                return seen
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    seen.is_done = True
                    continue
                value = json.loads(line[6:])
                if "error" in value:
                    seen.error = value["error"]["message"]
                    continue
                seen.names.add(value["id"])
                if value.get("usage") and not value["choices"]:
                    seen.usage = value["usage"]["completion_tokens"]
                for choice in value["choices"]:
                    seen.roles += "role" in choice["delta"]
                    seen.text += choice["delta"].get("content") or ""
                    seen.ids += choice.get("token_ids") or ()
                    seen.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                on_token()
    except (aiohttp.ClientError, OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def one_round(
    url: str, server: Server, asked: list[Any], temperature: float, route: str, part: float
) -> list[Seen]:
    """All streams at once; the server is killed when so much of all tokens has come."""
    came, is_killed = 0, False

    def on_token() -> None:
        nonlocal came, is_killed
        came += 1
        if not is_killed and came >= part * len(asked):
            is_killed = True
            server.kill()

    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        seen = await asyncio.gather(
            *(ask(session, url, one, temperature, route, on_token) for one in asked)
        )
    if not is_killed:
        raise SystemExit(f"{route}: nothing came that could be cut")
    return seen


def gateway(folder: Path, target: Server, speculative: Server, routes: list[str]) -> Any:
    """`speccheck gateway` over the pair; its process and URL."""
    rollout = {
        "name": "killed",
        "engine": "attached",
        "attached": {"target_only": target.url, "speculative": speculative.url},
        "speculation": SPEC,
        "routes": [{"name": name} for name in routes],
        "gateway": {"port": 0, "workers": 2, "flush_s": 0.5},
        # A server that is away between two rounds is none of the next route's fault.
        "fallback": {"max_unreachable_s": None, "max_stall_s": None},
    }
    (folder / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "speccheck", "gateway", "--json"),
            *("--rollout", str(folder / "rollout.yaml"), "--out", str(folder / "out")),
        ],
        stdout=subprocess.PIPE,
        stderr=(folder / "err").open("w"),
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit((folder / "err").read_text())
    return process, json.loads(line)["url"]


def counted(receipts: list[Receipt], route: str) -> Counter[str]:
    """What the receipts of a round say."""
    found: Counter[str] = Counter()
    for receipt in receipts:
        if receipt.route == route and receipt.attempt == 0:
            found[receipt.handover_kind or f"{receipt.outcome}, no hand-over"] += 1
    return found


def main() -> int:
    """Drive all rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="kills at each temperature")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--out", type=Path, default=None, help="kept; otherwise a temporary folder")
    options = parser.parse_args()
    started_s = time.monotonic()
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        target, speculative = Server(None), Server(SPEC)
        stack.callback(target.kill)
        stack.callback(lambda: speculative.process.poll() is None and speculative.kill())
        routes = [f"r{t}-{n}" for t in TEMPERATURES for n in range(options.rounds)]
        process, url = gateway(folder, target, speculative, routes)
        stack.callback(process.kill)
        asked = prompts(options.streams)

        async def truths() -> list[Seen]:
            async with aiohttp.ClientSession() as session:
                return await asyncio.gather(
                    *(ask(session, target.url, one, 0.0, "", lambda: None) for one in asked)
                )

        truth = asyncio.run(truths())
        wrong: list[str] = []
        equal: Counter[float] = Counter()
        for temperature in TEMPERATURES:
            for n in range(options.rounds):
                route = f"r{temperature}-{n}"
                part = 2 + 10 * n / options.rounds  # events a stream when the server is killed
                seen = asyncio.run(one_round(url, speculative, asked, temperature, route, part))
                speculative.start()
                wrong += [f"{route}: {one.wrong}" for one in seen if one.wrong]
                if temperature == 0:
                    same = sum(
                        (a.ids, a.text, a.ends) == (b.ids, b.text, b.ends)
                        for a, b in zip(seen, truth, strict=True)
                    )
                    equal[temperature] += same
                print(f"{route}: {len(seen)} answers", file=sys.stderr, flush=True)
        process.terminate()
        process.wait(WAIT_S)
        with Store.read(folder / "out" / "receipts.duckdb") as store:
            (run,) = store.runs()
            receipts = store.receipts(run.run_id)
            moved = store.transitions("killed")
            problems = store.verify()
        n = options.rounds * len(asked)
        for temperature in TEMPERATURES:
            total: Counter[str] = Counter()
            for k in range(options.rounds):
                total += counted(receipts, f"r{temperature}-{k}")
            more = f"; {equal[0.0]} of {n} equal target-only's" if temperature == 0 else ""
            kills = f"{n} answers, {options.rounds} kills"
            print(f"temperature {temperature}: {kills}: {dict(total)}{more}")
        first = {r.pair_id for r in receipts if r.attempt == 0}
        print(f"requests with a receipt: {len(first)} of {2 * n}; transitions: {len(moved)}")
        print(f"answers that look wrong to the client: {len(wrong)} {wrong[:3]}; store: {problems}")
        replay = [sys.executable, "-m", "speccheck", "fallback", "replay", "--json"]
        said = [
            subprocess.run(
                [*replay, "--out", str(folder / "out")], capture_output=True, check=False
            )
            for _ in range(2)
        ]
        agrees = [one["agrees"] for one in json.loads(said[0].stdout)["routes"]]
        print(
            f"replay: {agrees.count(True)} routes as recorded, {agrees.count(False)} not,"
            f" {agrees.count(None)} without transitions; twice the same: "
            f"{said[0].stdout == said[1].stdout}"
        )
        print(f"{time.monotonic() - started_s:.0f} s")
        is_well = not wrong and not problems and equal[0.0] == n and False not in agrees
        return 0 if is_well and len(first) == 2 * n else 1


if __name__ == "__main__":
    sys.exit(main())
