"""What is told of a route's transitions: a command, a webhook. Neither ever holds a decision up.

Each hook has a thread and a short queue of its own, so that a webhook that hangs delays no command,
and what comes in order goes out in order. What does not fit into the queue, or could not be
delivered after all tries, is counted and said; the row in the store is there all the same.

A webhook's body is signed: `X-Speccheck-Signature: sha256=` and the HMAC-SHA256, in hex, of the
timestamp in `X-Speccheck-Timestamp`, a dot and the body. `X-Speccheck-Delivery` is the same in
every try, so that a receiver can tell a repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from speccheck import __version__
from speccheck.config import HooksConfig
from speccheck.errors import UsageError
from speccheck.records import SCHEMA_VERSION, Transition, canonical_json, digest, to_json

_WAITING = 100
"""Transitions that may wait for a hook; a route does not move so often."""

_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """A transition as it is told: with the rollout's name and the wall clock."""

    rollout: str
    transition: Transition
    wall_ns: int

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON: the transition's fields, the rollout, the time as text."""
        at = datetime.fromtimestamp(self.wall_ns / 1e9, UTC)
        return {
            "schema_version": SCHEMA_VERSION,
            "rollout": self.rollout,
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **to_json(self.transition),
        }

    @property
    def delivery(self) -> str:
        """The same for the same transition, whoever tells it how often."""
        moved = self.transition
        return digest("delivery", [self.rollout, moved.route, moved.seq, self.wall_ns])


class Hooks:
    """The hooks of a rollout. `fire` returns at once; `close` waits for what is under way."""

    def __init__(self, config: HooksConfig, *, say: Callable[[str], None]) -> None:
        """`say` is told, from a thread of ours, what could not be delivered.

        Raises:
            UsageError: the webhook's secret is not in the environment.
        """
        self._say = say
        self._secret = secret_of(config)
        self._config = config
        self._ended = threading.Event()
        self.lost = 0
        """Tellings that were given up."""
        self._lines: list[tuple[queue.Queue[Event | None], threading.Thread]] = []
        if config.command:
            self._begin("command", self._run_command)
        if config.webhook is not None:
            self._begin("webhook", self._post)

    def _begin(self, name: str, tell: Callable[[Event], str]) -> None:
        waiting: queue.Queue[Event | None] = queue.Queue(_WAITING)

        def work() -> None:
            while (event := waiting.get()) is not None:
                problem = tell(event)
                if problem:
                    with suppress(OSError, ValueError):  # nobody listens any more: tell on
                        self._lose(f"{name} hook, {event.transition.route}: {problem}")

        thread = threading.Thread(target=work, name=f"speccheck-{name}-hook", daemon=True)
        thread.start()
        self._lines.append((waiting, thread))

    def _lose(self, text: str) -> None:
        self.lost += 1
        self._say(text)

    def fire(self, event: Event) -> None:
        """Tell every hook of a transition."""
        for waiting, _ in self._lines:
            try:
                waiting.put_nowait(event)
            except queue.Full:
                self._lose(f"hook, {event.transition.route}: {_WAITING} others wait already")

    def close(self, within_s: float = 30.0) -> None:
        """Wait until everything is told, at most so long; then retries are given up."""
        until = time.monotonic() + within_s
        for waiting, _ in self._lines:
            try:
                waiting.put(None, timeout=max(until - time.monotonic(), 0.01))
            except queue.Full:
                self._lose("a hook did not come to an end")
        for _, thread in self._lines:
            thread.join(max(until - time.monotonic(), 0))
        self._ended.set()
        for _, thread in self._lines:
            thread.join(1.0)
            if thread.is_alive():
                self._lose("a hook did not come to an end")

    # --- the two --------------------------------------------------------------------------------

    def _run_command(self, event: Event) -> str:
        argv, limit_s = self._config.command, self._config.command_timeout_s
        inherited = {k: v for k, v in os.environ.items() if k != self._config.webhook_secret_env}
        with tempfile.TemporaryFile() as errors:  # a pipe would wait for the command's children
            try:
                process = subprocess.Popen(
                    argv,
                    env={**inherited, **environment(event)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                return f"{argv[0]} could not be started ({error})"
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"{argv[0]} did not end within {limit_s:g} s"
            errors.seek(0)
            said = errors.read(10_000).decode("utf-8", "replace").strip().splitlines()
        if code == 0:
            return ""
        return f"{argv[0]} ended with {code}" + (f": {said[-1][:200]}" if said else "")

    def _post(self, event: Event) -> str:
        config = self._config
        pause_s, problem = 1.0, ""
        for attempt in range(1, config.webhook_attempts + 1):
            problem, is_final = self._try(event)
            if not problem:
                return ""
            if is_final or attempt == config.webhook_attempts:
                break
            if _pause(self._ended, pause_s):
                return f"{problem}; given up at the end, after {attempt} tries"
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return f"{problem}; given up after {attempt} tries"

    def _try(self, event: Event) -> tuple[str, bool]:
        """One try: what went wrong, if anything, and whether another is useless.

        What is said does not repeat the URL: it may be a secret.
        """
        body = canonical_json(event.facts).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"speccheck/{__version__}",
            "X-Speccheck-Delivery": event.delivery,
            **signature(self._secret, body, str(int(time.time()))),
        }
        try:
            status = asyncio.run(self._status(body, headers))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"no answer ({type(getattr(error, 'os_error', error)).__name__})", False
        if 200 <= status < 300:
            return "", False
        return f"HTTP {status}", status < 500 and status not in (408, 429)

    async def _status(self, body: bytes, headers: Mapping[str, str]) -> int:
        """POST; the status. All of a try has one limit: a receiver may send a byte a second.

        Redirects are not followed: a signed body goes where the settings say, and nowhere else.
        """
        limit = aiohttp.ClientTimeout(total=self._config.webhook_timeout_s)
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
            session.post(
                str(self._config.webhook), data=body, headers=headers, allow_redirects=False
            ) as reply,
        ):
            return reply.status


def secret_of(config: HooksConfig) -> bytes | None:
    """The key that bodies are signed with; None where they are not.

    Raises:
        UsageError: it is not in the environment.
    """
    if config.webhook_secret_env is None:
        return None
    secret = os.environ.get(config.webhook_secret_env)
    if not secret:
        raise UsageError(
            f"fallback.hooks.webhook_secret_env: {config.webhook_secret_env} is not set;"
            " set it to the key that the receiver checks signatures with"
        )
    return secret.encode()


def _pause(ended: threading.Event, pause_s: float) -> bool:
    """Wait before another try; whether the end came meanwhile."""
    return ended.wait(pause_s)


def signature(secret: bytes | None, body: bytes, timestamp: str) -> dict[str, str]:
    """The headers that sign a body: none without a secret."""
    if secret is None:
        return {}
    made = hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {"X-Speccheck-Timestamp": timestamp, "X-Speccheck-Signature": f"sha256={made}"}


def environment(event: Event) -> Mapping[str, str]:
    """What a command finds in its environment: each fact as SPECCHECK_NAME, all as SPECCHECK_JSON.

    What is missing is empty. `SPECCHECK_BEFORE` and `SPECCHECK_AFTER` are states, `SPECCHECK_SHARE`
    is what may speculate from now on.
    """
    facts = event.facts
    estimate = facts.pop("estimate") or {}
    flat = facts | {name: estimate.get(name) for name in ("value", "low", "high", "method")}
    named = {
        f"SPECCHECK_{name.upper()}": "" if value is None else str(value).replace("\0", "")
        for name, value in flat.items()
    }
    return {**named, "SPECCHECK_JSON": json.dumps(event.facts, ensure_ascii=False)}
