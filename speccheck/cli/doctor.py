"""`speccheck doctor`."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

from pathlib import Path

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave
from speccheck.errors import ExitCode

_MARKS = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


@click.command()
@click.option(
    "--rollout",
    type=PATH,
    default=None,
    help="Check the pair of this rollout too: models, settings, running servers.",
)
@click.option(
    "--python",
    type=str,
    default=None,
    help="The interpreter that has vLLM; the one that runs speccheck otherwise.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(rollout: Path | None, python: str | None, as_json: bool) -> int:  # noqa: FBT001
    """What this machine can run, and whether a pair can be compared.

    Starts nothing and sends no load. Exits with 2 if something must be mended
    before a run.

    \b
    Example:
      speccheck doctor
      speccheck doctor --rollout rollout.yaml
    """
    from speccheck import doctor as checks

    found = checks.examine(rollout, python)
    bad = sum(check.state == "bad" for check in found)
    with reader_may_leave():
        if as_json:
            print_json({"checks": found, "bad": bad})
        else:
            for check in found:
                head = f"{_MARKS[check.state]} {check.name:<18}"
                click.echo(click.wrap_text(check.text, 80, head, " " * len(head)))
            click.echo(f"{bad} to mend" if bad else "nothing to mend")
    return ExitCode.USAGE if bad else ExitCode.PASS
