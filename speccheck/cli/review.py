"""Pairs of answers for people and for a judge: information beside the verdicts, never a gate."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speccheck.cli.shell import (
    PATH,
    options,
    print_json,
    reader_may_leave,
    store_options,
)
from speccheck.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from speccheck.grading.blind import PreferenceSummary
    from speccheck.records import Preference

_pair_options = options(
    store_options,
    click.option(
        "--rollout",
        type=PATH,
        default="rollout.yaml",
        show_default=True,
        help="The rollout file of the run: it has the prompts.",
    ),
    click.option("--route", default=None, help="Only answers on this route."),
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="Pairs at most.",
    ),
)


@click.group()
def review() -> None:
    """Have people compare answers, not knowing which arm gave them.

    \b
    Example:
      speccheck review export sheet.html
    """


@review.command("export")
@click.argument("sheet", type=PATH)
@_pair_options
@click.option(
    "--key", default=None, metavar="TEXT", help="Draw the sheet that this text draws, again."
)
def review_export(
    sheet: Path,
    out: Path,
    run_id: str | None,
    rollout: Path,
    route: str | None,
    limit: int,
    key: str | None,
) -> None:
    """Write pairs of answers that differ to SHEET, arms hidden.

    SHEET ends in .csv or .html. Which answer stood first is in a key file in
    the run's folder; without it the sheet tells nothing. It holds texts of users and of the model.

    \b
    Example:
      speccheck review export sheet.html --limit 40
    """
    import secrets

    from speccheck import console
    from speccheck.grading import review as sheets
    from speccheck.replay import preferences

    ending = sheet.suffix.lower()
    if ending not in (".csv", ".html"):
        raise UsageError(f"{sheet}: name it .csv or .html")
    with preferences.open_replay(rollout, out, run_id, console.Reporter(), "read") as run:
        pairs = preferences.answer_pairs(run, route)
        made = sheets.make_sheet(run.run_id, pairs, limit, key or secrets.token_hex(16))
    key_file = sheets.key_path(out, made.sheet_id)
    sheets.write(key_file, sheets.key_json(made), mode=0o600)
    text = sheets.sheet_csv(made) if ending == ".csv" else sheets.sheet_html(made)
    sheets.write(sheet, text, mark="\ufeff" if ending == ".csv" else "")
    differing = sum(pair.differs for pair in pairs)
    with reader_may_leave():
        click.echo(f"wrote {sheet}: {len(made.rows)} of {differing} pairs that differ")
        click.echo(f"its key stays here: {key_file}")
        what = "the column verdict" if ending == ".csv" else "the page, and save the verdicts"
        click.echo(f"fill in {what}, then: speccheck review import FILE --out {out}")


@review.command("import")
@click.argument("sheet", type=PATH)
@store_options
@click.option("--reviewer", default=None, help="Whose verdicts these are; the file's name else.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def review_import(
    sheet: Path,
    out: Path,
    run_id: str | None,
    reviewer: str | None,
    as_json: bool,  # noqa: FBT001 (click passes a flag)
) -> None:
    """Read the verdicts (1, 2, tie or empty) of a SHEET that came back.

    Rows that are missing, doubled or edited are refused, each with its line.
    The same reviewer may import again: the last verdict on a pair stands.

    \b
    Example:
      speccheck review import sheet-ada.csv --reviewer ada
    """
    import time

    from speccheck.context import STORE_NAME
    from speccheck.grading import blind
    from speccheck.grading import review as sheets
    from speccheck.store import Store

    who = reviewer or sheet.stem
    made, given = sheets.read_sheet(sheet, out, who)
    if run_id is not None and not made.run_id.startswith(run_id):
        raise UsageError(f"{sheet}: is of run {made.run_id}, not of {run_id}")
    with Store.open(out / STORE_NAME) as store:
        store.run(made.run_id)
        store.put_preferences(made.run_id, given, given_at_ns=time.time_ns())
        found = blind.summarise(p for p in store.preferences(made.run_id) if p.who == who)
    _tell(found, as_json=as_json)
    open_rows = len(made.rows) - len(given)
    if open_rows:
        click.echo(f"{open_rows} rows have no verdict yet", err=True)


@click.command()
@_pair_options
@click.option("--url", required=True, help="An OpenAI-compatible server, with or without /v1.")
@click.option("--model", required=True, help="The judge, as that server calls it.")
@click.option(
    "--api-key-env",
    default=None,
    metavar="NAME",
    help="Environment variable that holds the key; it is kept nowhere.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds for one comparison.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Comparisons at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def judge(
    out: Path,
    run_id: str | None,
    rollout: Path,
    route: str | None,
    limit: int,
    url: str,
    model: str,
    api_key_env: str | None,
    timeout_s: float,
    concurrency: int,
    as_json: bool,  # noqa: FBT001
) -> int:
    """Have a language model compare pairs of answers, arms hidden.

    Each pair is asked in both orders; unless both agree it is a tie. Texts of
    users and of the model are sent to URL. Information only: no rule reads it.

    \b
    Example:
      speccheck judge --url https://api.example.com --model big-one \\
        --api-key-env JUDGE_KEY
    """
    import asyncio
    import os

    from speccheck import console
    from speccheck.grading import blind
    from speccheck.replay import preferences

    api_key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not api_key:
        raise UsageError(f"--api-key-env: {api_key_env} is not set in the environment")
    report = console.Reporter()
    asked = preferences.Judge(url, model, api_key, timeout_s, concurrency)
    with preferences.open_replay(rollout, out, run_id, report, "write") as run:
        pairs = preferences.answer_pairs(run, route)
        done: list[Preference] = []

        def told(found: Preference) -> None:
            done.append(found)
            if len(done) % 10 == 0:
                report.line(f"  {len(done)} pairs judged")

        unanswered = asyncio.run(preferences.judge(run, asked, pairs, limit, told))
        given = run.store.preferences(run.run_id)
        differing = sum(pair.differs for pair in pairs)
    report.line(f"  {len(done)} pairs judged now, {differing} of {len(pairs)} pairs differ")
    if unanswered:
        report.line(f"  {unanswered} pairs got no answer; the same command asks them again")
    _tell([one for one in blind.summarise(given) if one.who == model], as_json=as_json)
    return ExitCode.COULD_NOT_JUDGE if unanswered else ExitCode.PASS


def _tell(found: list[PreferenceSummary], *, as_json: bool) -> None:
    from speccheck.console import preference_line

    with reader_may_leave():
        if as_json:
            value: dict[str, Any] = {"preferences": found}
            print_json(value)
        for one in found if not as_json else ():
            click.echo(preference_line(one))
        if not found and not as_json:
            click.echo("nothing to compare: no pair of answers differs")
