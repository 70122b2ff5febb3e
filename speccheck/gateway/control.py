"""What an operator does to a gateway from outside: look at it, and throw a route's kill switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccheck.errors import StoreError, UsageError
from speccheck.gateway.board import Board
from speccheck.gateway.choose import off_file
from speccheck.gateway.server import FOLDER, running


def status(out: Path) -> dict[str, Any]:
    """What the board says, each route with whether its kill switch is thrown.

    Raises:
        UsageError: no gateway has had its state in `out`.
    """
    folder = out / FOLDER
    try:
        board = Board(folder / "board")
    except (OSError, ValueError):
        raise UsageError(
            f"{out}: no gateway has run there; give its --out, or start one with speccheck gateway"
        ) from None
    said = board.read()
    board.close()
    if not said:
        raise UsageError(f"{out}: the gateway is just starting; ask again")
    routes = {
        name: {**one, "is_disabled": off_file(folder / "off", name).is_file()}
        for name, one in said["routes"].items()
    }
    return {
        "is_running": running(out) is not None,
        "policy_version": said["policy_version"],
        "routes": routes,
        "receipts": said["receipts"],
    }


def switch(out: Path, name: str, *, is_off: bool) -> None:
    """Throw a route's kill switch, or take it back. It holds from the next request on.

    Raises:
        UsageError: no such route, or no gateway.
        StoreError: the folder cannot be written.
    """
    known = status(out)["routes"]
    if name not in known:
        raise UsageError(f"no route {name}; there are: {', '.join(known)}")
    file = off_file(out / FOLDER / "off", name)
    try:
        if is_off:
            file.touch()
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{file}: cannot be written ({error.strerror})") from None
