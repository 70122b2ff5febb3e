"""One request, one decision with its reason: which arm, and why.

The order: what the policy keeps off is no control of what may speculate, so it is asked first; then
the kill switch and the route's state; then the share, sticky to a key of the client's. The kill
switch is a file, looked for at every request: it holds from the moment it exists, whatever else of
the gateway is hung.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccheck.eligibility import Choice, Eligibility, Facts, decide, route_of
from speccheck.gateway.asked import Asked
from speccheck.records import POLICY, Arm

SPECULATE, TARGET_ONLY, FELL_BACK = "speculate", "target_only", "fell_back"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a route stands: `share` of its eligible traffic may speculate now."""

    share: float
    state: str = "enabled"
    """enabled, fell_back, probation or off."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """Where a request goes. `k` is a proposal length other than the server's own, or None; a
    control has the one that it would run with, for its mirror.
    """

    arm: Arm
    route: str | None
    decision: str
    """speculate, target_only or fell_back, as in a receipt."""
    reason: str
    k: int | None = None
    is_eligible: bool = False
    """Whether it might have speculated: only then is it a control."""


def off_file(folder: Path, route: str) -> Path:
    """The kill switch of a route: while this file exists, nothing on it speculates."""
    return folder / route


def choose(
    asked: Asked,
    facts: Facts,
    *,
    policy: Eligibility | None,
    routes: Mapping[str, Standing],
    is_off: Callable[[str], bool],
    key: str,
    not_joinable: str,
) -> Decided:
    """The decision for one request.

    Args:
        asked: the request.
        facts: what is known of it; its route if the client named one.
        policy: the eligibility policy; None: all of every route.
        routes: state of each route, in the rollout's order.
        is_off: whether a route's kill switch is thrown.
        key: what the share is sticky to.
        not_joinable: why it could not be handed over in mid-answer, where that keeps it off.
    """
    route = find_route(facts, policy, tuple(routes))
    if route is None:
        named = "" if facts.route is None else f" ({facts.route!r} is none of the rollout)"
        return Decided(
            Arm.TARGET_ONLY, None, TARGET_ONLY, f"{POLICY}: the route is not known{named}"
        )
    said = _policy_choice(asked, replace(facts, route=route), policy, not_joinable)
    if not said.speculates:
        return Decided(Arm.TARGET_ONLY, route, TARGET_ONLY, said.receipt_reason)
    state = routes[route]
    if is_off(route):
        return Decided(Arm.TARGET_ONLY, route, FELL_BACK, "disabled by an operator")
    if state.state in ("fell_back", "off"):
        return Decided(
            Arm.TARGET_ONLY, route, FELL_BACK, f"{state.state}: {state.reason or 'no reason given'}"
        )
    if position(route, key) >= state.share:
        reason = f"control: outside the share of {state.share:.4g}"
        return Decided(Arm.TARGET_ONLY, route, TARGET_ONLY, reason, said.k, is_eligible=True)
    reason = f"rule {said.rule!r}" if said.rule else "no policy: all of the route"
    return Decided(Arm.SPECULATIVE, route, SPECULATE, reason, said.k, is_eligible=True)


def find_route(facts: Facts, policy: Eligibility | None, names: Sequence[str]) -> str | None:
    """The route a request is on: named, found by the policy, or the only one there is."""
    if facts.route is not None:
        return facts.route if facts.route in names else None
    if policy is not None and policy.routes:
        found = route_of(policy, facts)
        return found if found in names else None
    return names[0] if len(names) == 1 else None


def _policy_choice(
    asked: Asked, facts: Facts, policy: Eligibility | None, not_joinable: str
) -> Choice:
    if asked.unsupported:
        reason = f"vLLM refuses {asked.unsupported} when it speculates"
        return Choice("target_only", None, "", 0, reason)
    if asked.unreadable:
        return Choice("target_only", None, "", 0, f"{asked.unreadable} is not readable")
    said = Choice("speculate", None, "", 0, "") if policy is None else decide(policy, facts)
    if said.speculates and not_joinable:
        reason = f"no exact hand-over in mid-answer ({not_joinable})"
        return Choice("target_only", None, "", 0, reason)
    return said


def position(route: str, key: str) -> float:
    """Where a key stands in [0, 1) on a route: the same in every worker, every time.

    A key speculates where it stands below the share, so a growing share keeps those it has. The
    routes are hashed apart, or one unlucky client would be the canary of all of them.
    """
    hashed = hashlib.blake2b(f"{route}\n{key}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(hashed, "big") / 2**64


def sticky_key(headers: Mapping[str, str], header: str, body: Mapping[str, Any]) -> str | None:
    """What the client calls itself: the configured header, else OpenAI's `user`, or a session.

    None where it names nothing; then each request is drawn for itself.
    """
    named = headers.get(header.lower()) or body.get("user") or body.get("session_id")
    return named if isinstance(named, str) and named else None
