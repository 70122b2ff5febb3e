"""Commands on a canary: where its monitors stand, and the reset of a route that fell back."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import time
from pathlib import Path

import click

from speccheck.cli.shell import out_option, print_json, reader_may_leave, store_options
from speccheck.errors import ExitCode


@click.group()
def canary() -> None:
    """See where a canary stands, or reset a route that fell back.

    \b
    Example:
      speccheck canary status
    """


@canary.command("status")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def canary_status(out: Path, run_id: str | None, as_json: bool) -> int:  # noqa: FBT001
    """Where each monitor stands, and what would decide it.

    Per route: step and share, how requests fell to the arms, restarts,
    outages; per rule the estimate with its anytime interval, the evidence on
    both sides, and how many requests are still needed. The exit code is that
    of its decisions, or of its monitors where none was taken yet.

    \b
    Example:
      speccheck canary status --out speccheck-run
    """
    from speccheck import canary as module
    from speccheck import decision, results
    from speccheck.records import Verdict

    with results.open_store(out) as store:
        run = results.pick_run(store, run_id)
        routes = module.survey(store, run)
    begun = [r for r in routes if r.verdict is not None]
    code = decision.exit_code(
        (), [decision.Check(r.route, Verdict[str(r.verdict).upper()], r.why) for r in begun]
    )
    with reader_may_leave():
        if as_json:
            told = {"run_id": run, "exit_code": int(code), "exit_meaning": code.meaning}
            print_json({**told, "routes": routes})
        else:
            from speccheck.console import canary_page

            canary_page(run, routes)
            click.echo(f"exit code {int(code)}: {code.meaning}")
    return code


@canary.command("reset")
@click.argument("route")
@click.option("--reason", required=True, help="Why it may be tried again; kept for good.")
@out_option
@click.option("--run", "run_id", default=None, help="Run id; the latest otherwise.")
def canary_reset(route: str, reason: str, out: Path, run_id: str | None) -> int:
    """Let a ROUTE that fell back be tried again, from the first share on.

    Its evidence starts from nothing. The reset is kept in the chain of
    decisions, with its reason.

    \b
    Example:
      speccheck canary reset chat --reason "draft retrained, see #412"
    """
    from speccheck import canary as module
    from speccheck import results

    with results.open_store(out, mode="write") as store:
        run = results.pick_run(store, run_id)
        made = module.reset(store, run, route, reason, now_ns=time.time_ns())
    click.echo(f"{route}: {made.reason}")
    click.echo("next: speccheck stage canary, which begins at the first share")
    return ExitCode.PASS
