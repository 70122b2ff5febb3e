"""`speccheck sweep`."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from speccheck.cli.shell import OUT, PATH, print_json, reader_may_leave
from speccheck.errors import ExitCode

if TYPE_CHECKING:
    from speccheck.sweep.rounds import Result

_UNITS = {"s": 1, "m": 60, "h": 3600}


def _numbers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """`1,2,5` as growing whole numbers."""
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", value):
        raise click.BadParameter(f"{value!r}: whole numbers from 1 up, such as 1,2,5", ctx, param)
    numbers = tuple(map(int, value.split(",")))
    if any(b <= a for a, b in pairwise(numbers)):
        raise click.BadParameter(f"{value}: growing numbers, each once", ctx, param)
    return numbers


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """`10m`, `90s` or `1h` in seconds."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", value.strip())
    if found is None or float(found[1]) == 0:
        raise click.BadParameter(f"{value!r}: a time such as 90s, 10m or 1h", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.option(
    *("--rollout", "rollout"),
    type=PATH,
    default="rollout.yaml",
    show_default=True,
    help="The rollout file; its block `sweep` sets the grid.",
)
@click.option(
    *("--out", "out"),
    type=PATH,
    default=OUT,
    show_default=True,
    help="Folder of the run: the receipts join those of its stages.",
)
@click.option("--k", "ks", callback=_numbers, metavar="1,2,5", help="Proposal lengths.")
@click.option(
    *("--concurrency", "concurrency"),
    callback=_numbers,
    metavar="1,8,64",
    help="Requests at once.",
)
@click.option(
    *("--task", "tasks"),
    multiple=True,
    help="Only this task (or `mixed`); may be given several times.",
)
@click.option(
    *("--budget", "budget_s"),
    callback=_seconds,
    metavar="10m",
    help="Time for this command, spent where verdicts are open.",
)
@click.option(
    *("--price", "price"),
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Of an engine hour, for the cost of 1,000 output tokens.",
)
@click.option("--again", is_flag=True, help="Measure anew, as a new run, what was measured.")
@click.option("--figures", is_flag=True, help="Print latencies, throughput, memory and errors too.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sweep(
    rollout: Path,
    out: Path,
    ks: tuple[int, ...] | None,
    concurrency: tuple[int, ...] | None,
    tasks: tuple[str, ...],
    budget_s: float | None,
    price: float | None,
    again: bool,  # noqa: FBT001 (click passes flags)
    figures: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> int:
    """Where does it pay: each proposal length, at each load, by task.

    Calibrates what a draft and a verify step cost on this engine, measures
    every cell against target-only in turns, and sets the cost model's
    prediction beside the measurement. With a budget: a small pass over all
    cells, then more rounds where the interval still straddles the limit.

    Run the same command again after a crash, or for more time, and it goes on.
    Exits with 0 if every cell has a verdict, with 3 if some are open.

    \b
    Example:
      speccheck sweep --rollout rollout.yaml --budget 10m
      speccheck sweep --k 1,3 --concurrency 1,16 --task code --json
    """
    from speccheck import console, context
    from speccheck.sweep import rounds as measuring

    settings = measuring.Settings(
        k=ks,
        concurrency=concurrency,
        tasks=tasks,
        budget_s=budget_s,
        price_per_engine_hour=price,
    )
    with context.open_run(rollout, out, console.Reporter(), fresh=again) as opened:
        result = measuring.sweep(opened, settings)
    with reader_may_leave():
        if as_json:
            print_json({"exit_code": int(_exit_code(result)), **_json(result)})
        else:
            console.sweep_page(result, with_figures=figures)
    return _exit_code(result)


def _exit_code(result: Result) -> ExitCode:
    from speccheck.records import Verdict

    return {
        Verdict.PASS: ExitCode.PASS,
        Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    }.get(result.verdict, ExitCode.COULD_NOT_JUDGE)


def _json(result: Result) -> dict[str, object]:
    """The result with what is computed from its fields."""
    from speccheck.records import to_json

    plain: dict[str, object] = to_json(result)
    for load, known in zip(plain["loads"], result.loads, strict=True):  # type: ignore[call-overload]
        for cell, measured in zip(load["cells"], known.cells, strict=True):
            cell["saved_gap"] = measured.saved_gap
    return plain
