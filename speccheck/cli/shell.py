"""What every command shares: options, JSON, and a standard output that may be closed early."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from speccheck.errors import StoreError

F = TypeVar("F", bound=Callable[..., Any])

OUT = "speccheck-run"
PATH = click.Path(path_type=Path)
STAGES = click.Choice(["fixture", "replay", "shadow", "canary"])
RECEIPT_STAGES = click.Choice(
    ["replay", "shadow", "canary", "sweep", "calibration", "probe", "gateway"]
)


def _report_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A file that is written at the end; whether it can be is asked before anything is sent."""
    if path is not None and path.is_dir():
        raise click.BadParameter(f"{path} is a folder; name a file", ctx, param)
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}; make it first", ctx, param)
    return path


def nobody_reads() -> None:
    """Point standard output at nothing, since its reader went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Around the last words of a command: its exit code stands, whether or not they are read."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nobody_reads()
    except OSError as error:
        nobody_reads()
        raise StoreError(f"standard output: cannot be written ({error.strerror})") from None


def print_json(value: Any) -> None:
    """One JSON object with the schema version, on standard output."""
    from speccheck.records import SCHEMA_VERSION, to_json

    plain = {"schema_version": SCHEMA_VERSION} | to_json(value)
    click.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """Several click options as one decorator."""

    def add(command: F) -> F:
        for option in reversed(several):
            command = option(command)
        return command

    return add


report_options = options(
    click.option(
        *("--junit", "junit"),
        type=PATH,
        callback=_report_file,
        default=None,
        metavar="FILE",
        help="Write the findings as JUnit XML.",
    ),
    click.option(
        *("--summary", "summary"),
        type=PATH,
        callback=_report_file,
        default=None,
        metavar="FILE",
        help="Append a Markdown summary (for a pipeline's step summary).",
    ),
)

run_options = options(
    click.option(
        *("--rollout", "rollout"),
        type=PATH,
        default="rollout.yaml",
        show_default=True,
        help="The rollout file; `speccheck init` writes one.",
    ),
    click.option(
        *("--out", "out"),
        type=PATH,
        default=OUT,
        show_default=True,
        help="Folder for receipts, logs and the packet.",
    ),
    click.option("--again", is_flag=True, help="Measure anew, as a new run, what was measured."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)

rollout_options = options(run_options, report_options)

out_option = click.option(
    "--out",
    "out",
    type=PATH,
    default=OUT,
    show_default=True,
    help="Folder of the run (it holds receipts.duckdb).",
)

store_options = options(
    out_option, click.option("--run", "run_id", default=None, help="Run id; the latest otherwise.")
)
