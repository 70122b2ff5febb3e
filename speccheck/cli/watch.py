"""`speccheck watch`: a live pair followed from outside, on a screen, as lines or as JSON."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speccheck.cli.shell import PATH, reader_may_leave
from speccheck.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from speccheck.records import RouteState, Transition
    from speccheck.watch import View

_QUIET_S = 60.0
"""Without a terminal, a view in which no state has changed is printed so often."""


@click.command()
@click.option(
    "--rollout",
    type=PATH,
    default="rollout.yaml",
    show_default=True,
    help="The rollout file: its routes, rules and block `fallback`.",
)
@click.option("--target-only", "target_only", default=None, metavar="URL", help="That server.")
@click.option("--speculative", default=None, metavar="URL", help="That server.")
@click.option(
    "--out",
    type=PATH,
    default=None,
    help="Folder with a receipts.duckdb: judge by its live receipts, keep transitions there, and"
    " what they rest on. Without it nothing is kept, so nothing can be replayed.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=5.0,
    show_default=True,
    help="Seconds from scrape to scrape.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 60),
    default=3.0,
    show_default=True,
    help="Seconds that a server may take to answer one.",
)
@click.option("--once", is_flag=True, help="Two scrapes an interval apart, one view, the end.")
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(min=0.1),
    default=None,
    help="End after so many seconds.",
)
@click.option("--until-fallback", is_flag=True, help="End when a route falls back or is off.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def watch(
    rollout: Path,
    target_only: str | None,
    speculative: str | None,
    out: Path | None,
    interval: float,
    timeout: float,
    once: bool,  # noqa: FBT001 (click passes flags)
    for_s: float | None,
    until_fallback: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> ExitCode:
    """Follow a live pair without the gateway, and decide the same way.

    By the servers' /metrics (vLLM's names), and by the receipts of a store if
    --out has one. Each transition of a route fires the hooks of the block
    `fallback`. It ends with Ctrl-C, and its exit code says how the routes
    stand then: 0 enabled, 1 fell back or off, 3 on probation, 4 nothing seen.

    \b
    Example:
      speccheck watch --rollout rollout.yaml \\
        --target-only http://gpu1:8000 --speculative http://gpu2:8000
    """
    from speccheck import config, context, fallback, hooks, launch
    from speccheck.records import Arm
    from speccheck.watch import Follower, Watched, follow, urls_of

    loaded = config.load_rollout(rollout)
    rules = config.load_guardrails(
        config.resolve(loaded.guardrails, rollout, config.package_dir("rules") / "guardrails.yaml"),
        loaded.routes,
    )
    urls = urls_of(loaded, {Arm.TARGET_ONLY: target_only, Arm.SPECULATIVE: speculative})
    store = None if out is None else out / context.STORE_NAME
    screen = _Screen(as_json=as_json)
    telling = hooks.Hooks(loaded.fallback.hooks, say=screen.problem)
    key = launch.api_key(loaded)
    follower = Follower(
        Watched(loaded, rules, urls, store, key, interval, timeout), telling, screen.transition
    )
    follower.begin()
    until_s = None if for_s is None else time.monotonic() + for_s

    def ends(states: list[RouteState]) -> bool:
        fell = until_fallback and fallback.exit_code(states) is ExitCode.JUDGED_BAD
        return fell or (until_s is not None and time.monotonic() >= until_s)

    try:
        with screen.shown():
            asyncio.run(
                follow(
                    follower,
                    on_view=screen.view,
                    rounds=2 if once else None,
                    ends=lambda states: ends(list(states)),
                )
            )
    except KeyboardInterrupt:
        pass  # the way in which a watch ends
    finally:
        follower.end()
        telling.close()
    code = follower.exit_code()
    if follower.unwritten:
        screen.problem(f"{len(follower.unwritten)} transitions were not written: {follower.note}")
    unkept = follower.lost + len(follower.unkept)
    if unkept:
        screen.problem(
            f"{unkept} scrapes and marks were not kept, so `speccheck fallback replay` may decide"
            f" otherwise: {follower.note or 'too many had to wait for the store'}"
        )
    with reader_may_leave():
        screen.end(code)
    return code


class _Screen:
    """A live table on a terminal, lines elsewhere, JSON lines where asked for."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._live: Live | None = None
        self._said = ""
        self._said_s = 0.0

    def shown(self) -> AbstractContextManager[object]:
        """The live table while it is open; nothing where there is no terminal."""
        if self._as_json or not sys.stdout.isatty():
            return nullcontext()
        from rich.live import Live

        self._live = Live(auto_refresh=False)
        return self._live

    def view(self, seen: View) -> None:
        """What is seen now."""
        if self._as_json:
            _json_line({"view": _view_json(seen)})
        elif self._live is not None and self._live.is_started:
            self._live.update(table(seen), refresh=True)
        else:
            # Figures move all the time; what is worth a line at once is a state or a failure.
            told = repr(
                (
                    [(route.route, route.state) for route in seen.routes],
                    [(server.arm, server.failure is None) for server in seen.servers],
                    seen.note,
                )
            )
            if told != self._said or time.monotonic() > self._said_s + _QUIET_S:
                self._said, self._said_s = told, time.monotonic()
                self._print("\n".join(lines(seen)))

    def transition(self, moved: Transition) -> None:
        """A route moved."""
        from speccheck.records import to_json

        if self._as_json:
            _json_line({"transition": to_json(moved)})
        else:
            self._print(f"{_clock(time.time_ns())} {moved_line(moved)}")

    def problem(self, text: str) -> None:
        """Something that is no transition and no view."""
        click.echo(f"speccheck: {text}", err=True)

    def end(self, code: ExitCode) -> None:
        """The last line."""
        if self._as_json:
            _json_line({"exit_code": int(code), "exit_meaning": _MEANINGS[code]})
        else:
            click.echo(f"exit code {int(code)}: {_MEANINGS[code]}")

    def _print(self, text: str) -> None:
        if self._live is not None and self._live.is_started:
            from rich.text import Text

            self._live.console.print(Text(text))
        else:
            click.echo(text)
            sys.stdout.flush()


_MEANINGS = {
    ExitCode.PASS: "every route is enabled",
    ExitCode.JUDGED_BAD: "a route fell back or is off",
    ExitCode.INCONCLUSIVE: "a route is on probation",
    ExitCode.COULD_NOT_JUDGE: "the speculative server was not seen",
}


def _json_line(value: dict[str, Any]) -> None:
    from speccheck.records import SCHEMA_VERSION

    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **value}, ensure_ascii=False))
    sys.stdout.flush()


def _view_json(seen: View) -> dict[str, Any]:
    from speccheck.records import to_json

    plain: dict[str, Any] = to_json(seen)
    del plain["wall_ns"]
    at = datetime.fromtimestamp(seen.wall_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    return {"at": at.replace("+00:00", "Z"), **plain}


def _clock(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9).astimezone().strftime("%H:%M:%S")


def moved_line(moved: Transition) -> str:
    """A transition in one line."""
    from speccheck.console import printable

    where = f" ({moved.cohort})" if moved.cohort else ""
    return printable(
        f"{moved.route}: {moved.before} -> {moved.after}, {moved.rule}{where}: {moved.why}"
    )


def figure(value: float, low: float, high: float, unit: str) -> str:
    """A value with its interval, in the unit that people speak of."""

    def one(x: float) -> str:
        if unit == "ratio":
            return f"{100 * (x - 1):+.3g}%" if 0 < x < 1e6 else "no bound"
        if unit in ("share", "rate"):
            return f"{100 * x:.3g}%"
        return f"{x:.3g}"

    return f"{one(value)} ({one(low)} to {one(high)})"


def _server_words(seen: View) -> list[tuple[str, str]]:
    found = []
    for server in seen.servers:
        if server.failure is not None:
            words = f"does not answer: {server.failure}"
        else:
            parts = [
                (server.running, "running {:g}"),
                (server.waiting, "waiting {:g}"),
                (server.tokens_per_s, "{:.3g} tok/s"),
                (server.acceptance, "acceptance {:.3g}"),
            ]
            words = ", ".join(text.format(x) for x, text in parts if x is not None)
        found.append((server.arm, words or "answers, and says nothing of this"))
    return found


def _state_words(route: Any) -> str:
    words = f"{route.state}, share {route.share:.3g}"
    if route.since_s is not None:
        words += f", for {_span(route.since_s)}"
    if route.due_s is not None and route.share == 0:
        words += f", tried again in {_span(max(route.due_s, 0))}"
    if route.fallbacks:
        words += f", {route.fallbacks} fallback{'s' if route.fallbacks > 1 else ''} of late"
    return words


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def lines(seen: View) -> list[str]:
    """A view as lines of text, the first one with the time; changes alone need be printed."""
    from speccheck.console import printable

    said = [f"{arm} {words}" for arm, words in _server_words(seen)]
    rows = [f"{_clock(seen.wall_ns)} {'; '.join(said)}"]
    for route in seen.routes:
        rows.append(f"  {route.route}: {_state_words(route)}")
        for g in route.gauges:
            e = g.estimate
            rows.append(
                f"    {g.rule}{f' ({g.cohort})' if g.cohort else ''}"
                f" {figure(e.value, e.low, e.high, g.unit)},"
                f" limit {_limit(g.limit, g.unit)}, n {e.n}"
            )
    if seen.note:
        rows.append(f"  {seen.note}")
    return [printable(row) for row in rows]


def _limit(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"{100 * (value - 1):+.3g}%"
    return f"{100 * value:.3g}%" if unit in ("share", "rate") else f"{value:.3g}"


def table(seen: View) -> RenderableType:
    """A view for a terminal: the servers, then each route with its rules."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colours = {"enabled": "green", "probation": "yellow", "fell_back": "red", "off": "red"}
    parts: list[RenderableType] = [Text(f"{_clock(seen.wall_ns)}  by {seen.evidence}", style="dim")]
    for arm, words in _server_words(seen):
        style = "red" if words.startswith("does not answer") else ""
        parts.append(Text(f"{arm:<12} {words}", style=style, overflow="ellipsis", no_wrap=True))
    for route in seen.routes:
        parts.append(Text(f"\n{route.route}: {_state_words(route)}", style=colours[route.state]))
        if route.why and route.state != "enabled":
            parts.append(Text(f"  {route.why}", style="dim"))
        if not route.gauges:
            continue
        rows = Table(box=None, pad_edge=False, padding=(0, 1))
        for name, side in (("rule", "left"), ("value (interval)", "left"), ("limit", "right")):
            rows.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
        rows.add_column("n", justify="right")
        rows.add_column("to fail", justify="right")
        for g in route.gauges:
            e = g.estimate
            rows.add_row(
                Text(f"  {g.rule}" + (f" ({g.cohort})" if g.cohort else "")),
                figure(e.value, e.low, e.high, g.unit),
                _limit(g.limit, g.unit),
                str(e.n),
                f"{100 * max(g.weight, 0.0):.0f}%",
            )
        parts.append(rows)
    if seen.note:
        parts.append(Text(seen.note, style="yellow"))
    return Group(*parts)
