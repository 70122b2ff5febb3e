"""One serving process: `python -m speccheck.gateway.worker`, started by `server`.

It has the listening socket and a line to the parent by their descriptors. When that line ends, so
does the worker: nothing outlives the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from speccheck.config import GatewayConfig
from speccheck.gateway.app import App
from speccheck.gateway.board import Board
from speccheck.gateway.gate import Gate, open_sessions
from speccheck.gateway.meters import Meters
from speccheck.gateway.outbox import SocketOutbox
from speccheck.gateway.relay import error_body
from speccheck.records import Arm, ArmDescription

GRACE_S = 10
"""How long running answers may take when the gateway is stopped."""


class Protocol(HttpToolsProtocol):
    """uvicorn's, with an end to heads and trailers that are too long or do not end.

    uvicorn has no limit of its own here: a client that sends one header for ever, or nothing at
    all, would hold memory or a connection for as long as it likes.
    """

    max_head = 0
    head_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """A client came: its first head is awaited."""
        super().connection_made(transport)
        self._since_body = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It went."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes; counted as long as they are no body."""
        self._since_body += len(data)
        super().data_received(data)
        # One read may hold the end of a head and much of a body: judged only if no end came.
        if self._since_body > self.max_head:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A head begins; on a kept connection, long after the one before."""
        super().on_message_begin()
        if not self._in_head:
            self._in_head = True
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head, self._since_body = False, 0
        self._head_came()
        size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if size > self.max_head:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body: what comes between two of them is a head of its own."""
        self._since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._since_body = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._too_late)

    def _head_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse_head(self) -> None:
        if self.transport.is_closing():
            return
        body = error_body(431, f"the head exceeds {self.max_head} bytes", "gateway_error")
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()


class Line(asyncio.Protocol):
    """The line to the parent. When its other end is closed, the worker ends too."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self.closed = asyncio.get_running_loop().create_future()

    def eof_received(self) -> bool:
        """The parent wants no more, but still reads."""
        self._server.should_exit = True
        return True

    def connection_lost(self, _exc: Exception | None) -> None:
        """Everything that was written has gone, or the parent has."""
        self._server.should_exit = True
        if not self.closed.done():
            self.closed.set_result(None)


def arm_of(value: Mapping[str, Any]) -> ArmDescription:
    """A description as the parent wrote it."""
    return ArmDescription(**{**value, "arm": Arm(value["arm"])})


async def serve(settings: Mapping[str, Any], listener: socket.socket, end: socket.socket) -> None:
    """Serve until the parent says so, or is gone."""
    loop = asyncio.get_running_loop()
    config = GatewayConfig.model_validate(settings["config"])
    meters = Meters()
    session, raw_session = open_sessions(config.timeouts.connect_s)
    token_env, key_env = config.admin_token_env, settings["api_key_env"]
    Protocol.max_head = config.limits.max_header_bytes
    Protocol.head_s = config.timeouts.request_s
    uvicorn_config = uvicorn.Config(
        _not_yet,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",  # what clients get wrong would fill the disk
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=4096,
    )
    server = uvicorn.Server(uvicorn_config)
    transport, line = await loop.create_connection(lambda: Line(server), sock=end)
    gate = Gate(
        config=config,
        arms={Arm(name): arm_of(value) for name, value in settings["arms"].items()},
        api_key=(os.environ.get(key_env) or None) if key_env else None,
        session=session,
        raw_session=raw_session,
        board=Board(Path(settings["folder"]) / "board"),
        off_folder=Path(settings["folder"]) / "off",
        outbox=SocketOutbox(transport, meters.lost),
        meters=meters,
        run_id=settings["run_id"],
        worker=settings["worker"],
        no_joint=settings["no_joint"],
        special=frozenset(settings["special"]),
        max_model_len=settings["max_model_len"],
        secret=(Path(settings["folder"]) / "key").read_bytes(),
        extra=settings["extra"],
        omit=frozenset(settings["omit"]),
        admin_token=(os.environ.get(token_env) or None) if token_env else None,
    )
    gate.board.set_count(gate.worker, 0)
    uvicorn_config.app = App(gate)
    transport.write(json.dumps({"ready": os.getpid()}).encode() + b"\n")
    try:
        await server.serve(sockets=[listener])
    finally:
        gate.board.set_count(gate.worker, 0)
        await raw_session.close()
        await session.close()
        transport.close()
        await line.closed


async def _not_yet(_scope: Any, _receive: Any, _send: Any) -> None:
    """In place of the application until it is made."""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m speccheck.gateway.worker`; gives back an exit code."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m speccheck.gateway.worker")
    parser.add_argument("--settings", required=True, help="a JSON object; no secrets")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--line", type=int, required=True, help="descriptor of the parent's line")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # uvicorn raises a signal once more after an orderly end; it has done its work by then.
        signal.signal(number, lambda *_: None)
    listener = socket.socket(fileno=options.listener)
    end = socket.socket(fileno=options.line)
    end.settimeout(0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(json.loads(options.settings), listener, end))
    return 0


if __name__ == "__main__":
    sys.exit(main())
