"""Commands on live traffic: the gateway, and the kill switch of its routes."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave
from speccheck.errors import ExitCode, UsageError

OUT = "speccheck-gateway"

out_option = click.option(
    "--out",
    "out",
    type=PATH,
    default=OUT,
    show_default=True,
    help="Folder of the gateway: receipts.duckdb, logs, state.",
)


@click.command()
@click.option(
    "--rollout",
    type=PATH,
    default="rollout.yaml",
    show_default=True,
    help="The rollout file; its block `gateway` has the settings.",
)
@out_option
@click.option("--host", default=None, help="Address to listen on, over the rollout's.")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="0 takes a free one.")
@click.option("--workers", type=click.IntRange(1, 64), default=None, help="Serving processes.")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as JSON.")
def gateway(
    rollout: Path,
    out: Path,
    host: str | None,
    port: int | None,
    workers: int | None,
    as_json: bool,  # noqa: FBT001 (click passes a flag)
) -> ExitCode:
    """The two arms behind one OpenAI-compatible address, until Ctrl-C.

    Each request gets one decision (eligibility policy, kill switch, route
    state, share), told in x-speccheck-* headers and kept as a receipt. An
    answer whose speculative server fails is continued on target-only.

    \b
    Labels of a request, all optional, by header: x-speccheck-route, -task,
    -language, -priority (normal, protected), -output-band, and
    x-speccheck-key, which the share is sticky to.

    \b
    Example:
      speccheck gateway --rollout rollout.yaml --port 8080
      curl -N localhost:8080/v1/chat/completions -H 'x-speccheck-route: chat' \\
        -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    """
    from speccheck.gateway import server

    def ready(url: str) -> None:
        with reader_may_leave():
            if as_json:
                click.echo(json.dumps({"schema_version": 1, "ready": True, "url": url}))
            else:
                click.echo(f"listening on {url}")

    server.serve(
        rollout,
        out,
        server.Options(host, port, workers),
        say=lambda text: click.echo(text, err=True),
        ready=ready,
    )
    return ExitCode.PASS


@click.group()
def route() -> None:
    """The kill switch: a route off and on again, at once.

    \b
    Example:
      speccheck route disable chat
    """


@route.command("disable")
@click.argument("name")
@out_option
def route_disable(name: str, out: Path) -> ExitCode:
    """From the next request on nothing on route NAME speculates.

    It is a file, off/NAME in the gateway's folder: making it by hand is the
    same. It outlives the gateway.

    \b
    Example:
      speccheck route disable chat
    """
    from speccheck.gateway import control

    control.switch(out, name, is_off=True)
    click.echo(f"{name}: off; `speccheck route enable {name}` takes it back")
    return ExitCode.PASS


@route.command("enable")
@click.argument("name")
@out_option
def route_enable(name: str, out: Path) -> ExitCode:
    """Take back `route disable`; what the route's state says holds again.

    \b
    Example:
      speccheck route enable chat
    """
    from speccheck.gateway import control

    control.switch(out, name, is_off=False)
    click.echo(f"{name}: no longer disabled by an operator")
    return ExitCode.PASS


@route.command("status")
@click.argument("name", required=False)
@out_option
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def route_status(name: str | None, out: Path, as_json: bool) -> ExitCode:  # noqa: FBT001
    """What holds for each route, or for NAME, as the workers read it.

    \b
    Example:
      speccheck route status
    """
    from speccheck.gateway import control

    found: dict[str, Any] = control.status(out)
    if name is not None:
        if name not in found["routes"]:
            raise UsageError(f"no route {name}; there are: {', '.join(found['routes'])}")
        found = {**found, "routes": {name: found["routes"][name]}}
    with reader_may_leave():
        if as_json:
            print_json(found)
        else:
            for route_name, one in found["routes"].items():
                state = "disabled by an operator" if one["is_disabled"] else one["state"]
                reason = f" ({one['reason']})" if one["reason"] else ""
                click.echo(f"{route_name}: {state}, share {one['share']:.4g}{reason}")
            click.echo(
                f"receipts: {found['receipts']['written']} written, "
                f"{found['receipts']['waiting']} waiting, {found['receipts']['lost']} lost; "
                f"scrapes: {found['receipts']['scrapes_lost']} lost"
            )
            if not found["is_running"]:
                click.echo("the gateway is not running", err=True)
    return ExitCode.PASS
