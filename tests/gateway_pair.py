"""A gateway worker in this process, in front of two scripted servers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from scripted_server import MODELS, Script, ScriptedServer, target_says

from speccheck.config import GatewayConfig
from speccheck.gateway.app import App
from speccheck.gateway.board import Board
from speccheck.gateway.choose import Standing
from speccheck.gateway.gate import Gate, open_sessions
from speccheck.gateway.meters import Meters
from speccheck.gateway.worker import Protocol
from speccheck.records import Answer, Arm, ArmDescription, Receipt

WAIT_S = 30.0


@dataclass
class Kept:
    """An outbox that keeps everything."""

    receipts: list[Receipt] = field(default_factory=list)
    answers: list[Answer | None] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def put(self, receipt: Receipt, answer: Answer | None) -> None:
        with self.came:
            self.receipts.append(receipt)
            self.answers.append(answer)
            self.came.notify_all()

    def wait(self, n: int) -> list[Receipt]:
        """The first n receipts, once they are there."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.receipts) >= n, WAIT_S), self.receipts
            return list(self.receipts)


@dataclass
class Running:
    """The gateway, running."""

    url: str
    gate: Gate
    kept: Kept
    board: Board
    servers: Mapping[Arm, ScriptedServer]
    said: dict[str, Any]
    off: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def target(self) -> ScriptedServer:
        return self.servers[Arm.TARGET_ONLY]

    @property
    def speculative(self) -> ScriptedServer:
        return self.servers[Arm.SPECULATIVE]

    def publish(self, **changes: Any) -> None:
        """Say something else on the board."""
        self.said |= changes
        self.board.publish(self.said)

    def stand(self, route: str = "chat", **standing: Any) -> None:
        """Move a route."""
        routes = self.said["routes"] | {route: asdict(Standing(**standing))}
        self.publish(routes=routes)


@contextmanager
def gateway(
    folder: Path,
    target: Callable[[dict[str, Any], int], Script] | None = None,
    speculative: Callable[[dict[str, Any], int], Script] | None = None,
    *,
    policy: Mapping[str, Any] | None = None,
    routes: tuple[str, ...] = ("chat",),
    urls: Mapping[Arm, str] | None = None,
    api_key: str | None = None,
    no_joint: str = "",
    extra: Mapping[str, Any] | None = None,
    omit: frozenset[str] = frozenset(),
    **config: Any,
) -> Iterator[Running]:
    """A worker that serves until the block ends; `config` is its block of rollout.yaml."""
    said: dict[str, Any] = {
        "routes": {name: asdict(Standing(1.0)) for name in routes},
        "policy": policy,
        "policy_version": "policy:test",
        "queued": None,
        "restarts": 0,
        "receipts": {"lost": 0, "written": 0, "waiting": 0, "scrapes_lost": 0, "store": "ok"},
    }
    one = ScriptedServer(target or target_says(), MODELS)
    other = ScriptedServer(speculative or target_says(), MODELS)
    with one, other:
        arms = {
            Arm.TARGET_ONLY: ArmDescription(
                Arm.TARGET_ONLY, one.url, "scripted 1", "target", None, {}
            ),
            Arm.SPECULATIVE: ArmDescription(
                Arm.SPECULATIVE,
                (urls or {}).get(Arm.SPECULATIVE, other.url),
                "scripted 1",
                "target",
                {"method": "ngram", "num_speculative_tokens": 4},
                {},
            ),
        }
        if urls and Arm.TARGET_ONLY in urls:
            arms[Arm.TARGET_ONLY] = ArmDescription(
                Arm.TARGET_ONLY, urls[Arm.TARGET_ONLY], "scripted 1", "target", None, {}
            )
        (folder / "off").mkdir(exist_ok=True)
        board = Board.create(folder / "board", said)
        kept = Kept()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        ready = threading.Event()
        made: list[tuple[Gate, uvicorn.Server, asyncio.AbstractEventLoop]] = []

        async def serve() -> None:
            settings = GatewayConfig.model_validate(config)
            session, raw_session = open_sessions(settings.timeouts.connect_s)
            gate = Gate(
                config=settings,
                arms=arms,
                api_key=api_key,
                session=session,
                raw_session=raw_session,
                board=Board(folder / "board"),
                off_folder=folder / "off",
                outbox=kept,
                meters=Meters(CollectorRegistry()),
                run_id="run:test",
                worker=0,
                no_joint=no_joint,
                special=frozenset(),
                max_model_len=4096,
                secret=b"secret",
                extra=extra or {},
                omit=omit,
                admin_token="admin-token" if settings.admin_token_env else None,
            )

            class Limited(Protocol):
                max_head = settings.limits.max_header_bytes
                head_s = settings.timeouts.request_s

            server = uvicorn.Server(
                uvicorn.Config(
                    App(gate),
                    http=Limited,
                    ws="none",
                    lifespan="off",
                    log_level="error",
                    access_log=False,
                    server_header=False,
                    date_header=False,
                    timeout_graceful_shutdown=1,
                )
            )
            made.append((gate, server, asyncio.get_running_loop()))
            ready.set()
            await server.serve(sockets=[listener])
            await raw_session.close()
            await session.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert ready.wait(WAIT_S)
        gate, server, _ = made[0]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield Running(
                url,
                gate,
                kept,
                board,
                {Arm.TARGET_ONLY: one, Arm.SPECULATIVE: other},
                said,
                folder / "off",
            )
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            listener.close()
            board.close()
