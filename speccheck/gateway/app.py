"""The ASGI application: what is served here, what goes to an arm, and what goes no further.

Chat and completion requests get a decision; /health, /metrics and /speccheck/... are the gateway's
own; any other method or path goes to target-only as it is. No framework: a request is a handful of
calls, and each costs every request.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp

from speccheck.gateway import asked as asking
from speccheck.gateway.asked import Asked
from speccheck.gateway.choose import Decided, choose, off_file, position, sticky_key
from speccheck.gateway.gate import Gate, Header
from speccheck.gateway.meters import CONTENT_TYPE, exposition
from speccheck.gateway.relay import (
    CLIENT_GONE,
    Receive,
    Relay,
    Send,
    client_headers,
    error_body,
    nowhere,
    upstream_headers,
)
from speccheck.records import Arm

Scope = Mapping[str, Any]
_JSON: list[Header] = [(b"content-type", b"application/json")]
_ASK_S = 2.0
"""For what the gateway asks target-only on its own account: health, prompt length."""
_TOKENIZED = (
    *("model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""What a prompt is made of."""
_PASSED_ON = Decided(Arm.TARGET_ONLY, None, "target_only", "not a chat or completion request")
_ADMIN = "/speccheck/"


class App:
    """One worker's application."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._mirrors: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        gate = self._gate
        path, method = scope["path"], scope["method"]
        if not scope["raw_path"].startswith(b"/"):
            # `*@host/`, put behind a server's address, would be another server's.
            gate.meters.refused("not a path")
            await _refuse(send, 400, "the request target is not a path", [_CLOSE])
        elif path == "/metrics" and method == "GET":
            page = exposition(os.environ["PROMETHEUS_MULTIPROC_DIR"], gate.said)
            await _reply(send, 200, page, [(b"content-type", CONTENT_TYPE)])
        elif path == "/health" and method == "GET":
            await self._health(send)
        elif path.startswith(_ADMIN):
            await self._admin(path, method, scope["headers"], send)
        elif gate.in_flight_all >= gate.config.limits.max_in_flight:
            gate.meters.refused("too many in flight")
            message = f"the gateway has {gate.in_flight_all} requests in flight, its limit"
            await _refuse(send, 503, message, [(b"retry-after", b"1")])
        else:
            gate.in_flight_all += 1
            gate.meters.in_flight(gate.in_flight_all)
            try:
                await self._take(scope, receive, send)
            finally:
                gate.in_flight_all -= 1
                gate.meters.in_flight(gate.in_flight_all)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then decide and relay, or pass on."""
        arrived_ns = time.perf_counter_ns()
        limit = self._gate.config.limits.max_body_bytes
        try:
            async with asyncio.timeout(self._gate.config.timeouts.request_s):
                body = await _read_body(scope, receive, limit)
        except TimeoutError:
            self._gate.meters.refused("body too slow")
            await _refuse(send, 408, "the request body did not come in time", [_CLOSE])
            return
        except ValueError:
            self._gate.meters.refused("body too long")
            await _refuse(send, 413, f"the request body exceeds {limit} bytes", [_CLOSE])
            return
        if body is None:
            return  # the client went away
        asked = None
        if scope["method"] == "POST":
            asked = asking.read(scope["path"], body, self._gate.extra)
        if asked is None:
            self._gate.meters.passed_on()
            await _unless_gone(receive, self._pass_on(scope, body, send), lambda: False)
            return
        relay = await self._decide(scope, asked, arrived_ns, send)
        await _unless_gone(receive, relay.run(), lambda: relay.is_over)

    async def _decide(self, scope: Scope, asked: Asked, arrived_ns: int, send: Send) -> Relay:
        gate = self._gate
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        request_id = os.urandom(16).hex()
        facts = asked.facts(headers)
        policy = gate.policy
        asks_for = frozenset[str]() if policy is None else policy.asks_for
        if "prompt_tokens" in asks_for and facts.prompt_tokens is None:
            facts = replace(facts, prompt_tokens=await self._count(asked, scope["headers"]))
        facts = replace(facts, concurrency=gate.in_flight_after(), queued=gate.said["queued"])
        key = sticky_key(headers, gate.config.key_header, asked.body) or request_id
        decided = choose(
            asked,
            facts,
            policy=policy,
            routes=gate.routes,
            is_off=gate.is_off,
            key=key,
            not_joinable=gate.not_joinable(asked),
        )
        path = _raw_target(scope)
        relay = Relay(gate, asked, path, scope["headers"], decided, request_id, arrived_ns, send)
        self._mirror(relay)
        return relay

    def _mirror(self, relay: Relay) -> None:
        """Send a copy of a control request to the speculative arm, if there is room for one."""
        gate, decided, mirror = self._gate, relay.decided, self._gate.config.mirror
        if mirror.share == 0 or decided.arm is not Arm.TARGET_ONLY or not decided.is_eligible:
            return
        if position("mirror", relay.request_id) >= mirror.share:
            return
        if len(self._mirrors) >= mirror.max_in_flight:
            gate.meters.mirrored("skipped")
            return
        gate.meters.mirrored("sent")
        copy = replace(
            relay,
            decided=replace(decided, arm=Arm.SPECULATIVE, decision="speculate", reason="mirror"),
            send=nowhere,
            is_mirror=True,
        )
        task = asyncio.create_task(copy.run())
        self._mirrors.add(task)
        task.add_done_callback(self._mirrors.discard)

    async def _count(self, asked: Asked, headers: list[Header]) -> int | None:
        """Prompt length by target-only's own tokenizer; None where it does not say in time."""
        gate, body = self._gate, asked.body
        wanted = {name: body[name] for name in _TOKENIZED if name in body}
        sent = [(n, v) for n, v in upstream_headers(headers, gate.api_key) if n == "authorization"]
        with suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            async with (
                asyncio.timeout(_ASK_S),
                gate.session.post(
                    gate.url(Arm.TARGET_ONLY, "/tokenize"),
                    json=wanted,
                    headers=sent,
                    allow_redirects=False,
                ) as response,
            ):
                count = (await response.json())["count"]
                return count if type(count) is int else None
        return None

    # -- passing on -------------------------------------------------------------------------------

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Anything else: to target-only and back, byte for byte."""
        gate, limits = self._gate, self._gate.config.timeouts
        loop, is_started = asyncio.get_running_loop(), False
        told = gate.told(Arm.TARGET_ONLY, _PASSED_ON)
        try:
            async with (
                asyncio.timeout(limits.total_s),
                asyncio.timeout(limits.connect_s + limits.first_byte_s) as timer,
                gate.raw_session.request(
                    scope["method"],
                    gate.url(Arm.TARGET_ONLY, _raw_target(scope)),
                    data=body or None,
                    headers=upstream_headers(scope["headers"], gate.api_key),
                    allow_redirects=False,
                ) as response,
            ):
                url = gate.arms[Arm.TARGET_ONLY].url
                headers = client_headers(response, url, keep_encoding=True)
                start = {"type": "http.response.start", "status": response.status}
                timer.reschedule(None)
                await send({**start, "headers": [*headers, *told]})
                is_started = True
                while True:
                    timer.reschedule(loop.time() + limits.idle_s)
                    data = await response.content.readany()
                    timer.reschedule(None)
                    await send(
                        {"type": "http.response.body", "body": data, "more_body": bool(data)}
                    )
                    if not data:
                        return
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if is_started:
                return  # an answer that is not ended closes the connection: the client sees it
            is_late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)
            status = 504 if is_late else 502
            what = f"target_only: {type(error).__name__} on {scope['method']} {scope['path']}"
            await _refuse(send, status, what, told)

    # -- our own ----------------------------------------------------------------------------------

    async def _health(self, send: Send) -> None:
        """200 while target-only is well: the gateway serves then, speculating or not."""
        gate = self._gate
        found = dict(zip(Arm, await asyncio.gather(*map(self._is_well, Arm)), strict=True))
        states = {
            name: "disabled" if gate.is_off(name) else route.state
            for name, route in gate.routes.items()
        }
        arms = {str(arm): "ok" if well else "down" for arm, well in found.items()}
        page = json.dumps({**arms, "routes": states, "receipts": gate.said["receipts"]["store"]})
        await _reply(send, 200 if found[Arm.TARGET_ONLY] else 503, page.encode(), _JSON)

    async def _is_well(self, arm: Arm) -> bool:
        gate = self._gate
        headers = {"authorization": f"Bearer {gate.api_key}"} if gate.api_key else {}
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(_ASK_S),
                gate.session.get(
                    gate.url(arm, "/health"), headers=headers, allow_redirects=False
                ) as response,
            ):
                return response.status == 200
        return False

    async def _admin(self, path: str, method: str, headers: list[Header], send: Send) -> None:
        """GET /speccheck/routes, POST /speccheck/routes/NAME/disable and .../enable."""
        gate, token = self._gate, self._gate.admin_token
        given = next((value for name, value in headers if name == b"authorization"), b"")
        if token is None:
            await _refuse(send, 403, "no admin token is set (gateway.admin_token_env)")
            return
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            gate.meters.refused("admin token")
            await _refuse(send, 401, "a bearer token is needed here")
            return
        parts = path.removeprefix(_ADMIN).split("/")
        match (method, parts):
            case ("GET", ["routes"]):
                pass
            case ("POST", ["routes", name, "disable" | "enable" as wanted]) if name in gate.routes:
                file = off_file(gate.off_folder, name)
                try:
                    if wanted == "disable":
                        file.touch()
                    else:
                        file.unlink(missing_ok=True)
                except OSError as error:
                    await _refuse(send, 500, f"{wanted} has no effect: {error.strerror}")
                    return
            case _:
                await _refuse(send, 404, "there is GET routes, POST routes/NAME/disable|enable")
                return
        states = {
            name: {"is_disabled": gate.is_off(name), **gate.said["routes"][name]}
            for name in gate.routes
        }
        await _reply(send, 200, json.dumps({"routes": states}).encode(), _JSON)


_CLOSE: Header = (b"connection", b"close")


def _raw_target(scope: Scope) -> str:
    """Path and query as the client wrote them."""
    raw = scope["raw_path"].decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return f"{raw}?{query}" if query else raw


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body; None where the client went away. ValueError where it is too long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise ValueError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise ValueError
        if not message.get("more_body"):
            return bytes(body)


async def _unless_gone(
    receive: Receive, work: Awaitable[None], is_over: Callable[[], bool]
) -> None:
    """Do the work; cancelled as soon as the client goes away before it has its answer."""
    task = asyncio.current_task()
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not is_over() and task is not None:
            is_gone = True
            task.cancel(CLIENT_GONE)

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
    finally:
        watcher.cancel()


async def _reply(send: Send, status: int, body: bytes, headers: list[Header]) -> None:
    length = (b"content-length", b"%d" % len(body))
    start = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def _refuse(
    send: Send, status: int, message: str, headers: list[Header] | None = None
) -> None:
    body = error_body(status, message, "gateway_error")
    await _reply(send, status, body, [*_JSON, *(headers or [])])
