"""`speccheck probe`: sampled losslessness of a running pair, as large as asked."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import json
from pathlib import Path

import click

from speccheck.cli.shell import print_json, reader_may_leave, run_options


def _tests(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of tests, comma-separated; all of them where none is given."""
    from speccheck.battery import KINDS

    if value is None:
        return tuple(KINDS)
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in KINDS:
            known = ", ".join(KINDS)
            raise click.BadParameter(f"no test is called {name!r}; known: {known}", ctx, param)
    return names


@click.command()
@run_options
@click.option(
    *("--prompts", "prompts"),
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Prompts to sample; those where the target is open are chosen.",
)
@click.option(
    *("--samples", "samples"),
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Answers per prompt on each arm; 250 on 20 prompts where you can.",
)
@click.option(
    *("--max-tokens", "max_tokens"),
    type=click.IntRange(min=4),
    default=24,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option(
    *("--margin", "margin"),
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=0.02,
    show_default=True,
    help="How far beyond A/A test T6 may reach; others in proportion.",
)
@click.option(
    "--tests",
    callback=_tests,
    default=None,
    metavar="NAMES",
    help="Comma-separated: T1,T1b,T2,T3,T4,T5,T6,T6b,T7,T8. All of them otherwise.",
)
def probe(
    rollout: Path,
    out: Path,
    again: bool,  # noqa: FBT001 (click passes flags)
    as_json: bool,  # noqa: FBT001
    prompts: int,
    samples: int,
    max_tokens: int,
    margin: float,
    tests: tuple[str, ...],
) -> int:
    """Whether sampled answers follow the target's law: tests T1 to T8.

    Draws answers at temperature 1 on both arms, has the target score every
    token of them, and compares with target-only against itself (A/A).

    Answers are kept: the same command again scores them anew and draws none,
    a larger one adds to them. Greedy outputs are replay's business.

    \b
    Example:
      speccheck probe --rollout rollout.yaml --prompts 20 --samples 250
    """
    from speccheck import console, context, decision
    from speccheck.config import ProbeConfig
    from speccheck.records import to_json
    from speccheck.replay import distributions

    settings = ProbeConfig(prompts=prompts, samples=samples, max_tokens=max_tokens, margin=margin)
    with context.open_run(rollout, out, console.Reporter(), fresh=again) as run:
        routed = {p.prompt_id: p for r in run.rollout.routes for p in run.prompts(r)}
        found = distributions.run_battery(run, tuple(routed.values()), settings, wanted=tests)
        check = decision.Check("probe", found.verdict, found.why)
        code = decision.exit_code([], [check])
        told = {"run_id": run.run_id, "exit_code": int(code), "exit_meaning": code.meaning}
        told |= found.to_dict()
        run.write("probe.json", json.dumps(to_json(told), indent=2) + "\n")
    with reader_may_leave():
        if as_json:
            print_json(told)
        else:
            console.battery_page(found, code)
    return code
