"""What a worker knows: configuration, arms, decisions, and where counts and receipts go."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from speccheck.client import api_url
from speccheck.config import GatewayConfig
from speccheck.eligibility import Eligibility
from speccheck.gateway.asked import Asked
from speccheck.gateway.board import Board
from speccheck.gateway.choose import Decided, Standing, off_file
from speccheck.gateway.meters import Meters
from speccheck.gateway.outbox import Outbox
from speccheck.records import Arm, ArmDescription

Header = tuple[bytes, bytes]
_REASON_CHARS = 300


@dataclass
class Gate:
    """The state of one worker."""

    config: GatewayConfig
    arms: Mapping[Arm, ArmDescription]
    api_key: str | None
    session: aiohttp.ClientSession
    raw_session: aiohttp.ClientSession
    """Of the same connections; leaves compressed bodies as they are."""
    board: Board
    off_folder: Path
    outbox: Outbox
    meters: Meters
    run_id: str
    worker: int
    no_joint: str
    """Why running answers are not handed over at all; empty: they are."""
    special: frozenset[int]
    """Ids of special tokens, as far as they are known."""
    max_model_len: int | None
    secret: bytes
    """Of this gateway: prompts are named by a digest that nobody else can try guesses on."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`attached.extra`: what every request carries beside what its client sent."""
    omit: frozenset[str] = frozenset()
    """`attached.omit`: fields that these servers refuse; the gateway adds none of them."""
    admin_token: str | None = None
    in_flight_all: int = 0
    parses: str = ""
    """What the servers were seen to parse out of chat answers; those cannot be handed over."""
    _speculating: int = 0
    _said: dict[str, Any] = field(default_factory=dict)
    _policy: Eligibility | None = None
    _routes: dict[str, Standing] = field(default_factory=dict)

    def _look(self) -> None:
        """Read the board; what is made of it is kept until it says something else."""
        said = self.board.read()
        if said is self._said:
            return
        before, self._said = self._said, said
        policy = said["policy"]
        if policy != before.get("policy"):
            self._policy = None if policy is None else Eligibility.model_validate(policy)
        self._routes = {name: Standing(**state) for name, state in said["routes"].items()}

    @property
    def policy(self) -> Eligibility | None:
        """Which requests may speculate, now."""
        self._look()
        return self._policy

    @property
    def routes(self) -> Mapping[str, Standing]:
        """The state of each route, now."""
        self._look()
        return self._routes

    @property
    def policy_version(self) -> str:
        """Of the policy that holds now."""
        self._look()
        return str(self._said["policy_version"])

    @property
    def said(self) -> Mapping[str, Any]:
        """Everything that the board says."""
        self._look()
        return self._said

    def prompt_id(self, asked: Asked) -> str:
        """A name of what was asked: the same prompt, the same name, and no way back to it."""
        body = asked.body
        said = json.dumps([body.get("messages"), body.get("prompt"), body.get("tools")])
        return (
            f"prompt:{hashlib.blake2b(said.encode(), key=self.secret, digest_size=10).hexdigest()}"
        )

    def is_off(self, route: str) -> bool:
        """Whether a route's kill switch is thrown."""
        return os.path.isfile(off_file(self.off_folder, route))  # noqa: PTH113 (each request)

    def url(self, arm: Arm, raw_path: str) -> URL:
        """Where a path is on an arm; the host is the configured one, whatever the path says.

        ValueError for what is no path: behind a host it could be part of the host.
        """
        if not raw_path.startswith("/"):
            raise ValueError("not a path")
        return URL(api_url(self.arms[arm].url, raw_path), encoded=True)

    def not_joinable(self, asked: Asked) -> str:
        """Why a request could not be handed over, where that keeps it from speculating."""
        if self.config.hand_over != "refuse" or not asked.is_stream:
            return ""
        parsed = self.parses if asked.kind == "chat" else ""
        return asked.not_joinable or self.no_joint or parsed

    def in_flight_after(self) -> int:
        """Requests in flight on the speculative arm, with one more."""
        return self.board.total() + 1

    @contextmanager
    def in_flight(self, arm: Arm) -> Iterator[int]:
        """One more request on an arm; how many with it (on target-only: of this worker)."""
        if arm is Arm.TARGET_ONLY:
            yield max(1, self.in_flight_all - self._speculating)
            return
        self._speculating += 1
        self.board.set_count(self.worker, self._speculating)
        try:
            yield self.board.total()
        finally:
            self._speculating -= 1
            self.board.set_count(self.worker, self._speculating)

    def told(self, arm: Arm, decided: Decided) -> list[Header]:
        """The response headers that say what was decided."""
        said = {
            b"x-speccheck-arm": str(arm),
            b"x-speccheck-route": decided.route or "",
            b"x-speccheck-decision": f"{decided.decision}: {decided.reason}",
            b"x-speccheck-policy": self.policy_version,
        }
        return [(name, _printable(value)) for name, value in said.items()]


def open_sessions(connect_s: float) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
    """The upstream client of one worker, twice over the same connections: the second leaves
    compressed bodies as they are. The first owns the connections.

    Idle ones are dropped after 3 s, before uvicorn's 5 s (vLLM): a request written into a
    connection that the server is just closing would fail by our making.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)

    def session(*, is_owner: bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            connector_owner=is_owner,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            auto_decompress=is_owner,
            read_bufsize=2**16,
            max_line_size=2**16,
            max_field_size=2**16,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trust_env=False,  # a proxy of the environment would be another upstream
        )

    return session(is_owner=True), session(is_owner=False)


def _printable(text: str) -> bytes:
    """Text that can stand in a header: a reason may quote what a client sent."""
    clean = "".join(c if " " <= c <= "~" else "?" for c in text)
    return clean[:_REASON_CHARS].strip().encode()
