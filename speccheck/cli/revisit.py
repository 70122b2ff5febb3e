"""Whether what was decided still holds."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave, store_options
from speccheck.errors import UsageError

if TYPE_CHECKING:
    from speccheck.errors import ExitCode
    from speccheck.records import Receipt
    from speccheck.revisit import Revisit

_WORDS = {
    "pass": ("✓", "current"),
    "inconclusive": ("?", "too little evidence"),
    "error": ("!", "could not look"),
    "fail": ("✗", "stale"),
}


@click.command()
@store_options
@click.option(
    "--rollout", type=PATH, default=None, help="Of today; as the run was begun with otherwise."
)
@click.option(
    "--receipts",
    type=PATH,
    default=None,
    metavar="FILE|DIR",
    help="Recent receipts: an export, or the folder of a run.",
)
@click.option(
    "--today", default=None, metavar="DATE", help="For the expiry date; the real one otherwise."
)
@click.option(
    "--max-shift",
    default="10%",
    show_default=True,
    help="Largest total shift of traffic shares that is current.",
)
@click.option(
    "--max-drift",
    default="10%",
    show_default=True,
    help="Largest change of a cohort's acceptance rate that is current, in points.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def revisit(
    out: Path,
    run_id: str | None,
    rollout: Path | None,
    receipts: Path | None,
    today: str | None,
    max_shift: str,
    max_drift: str,
    as_json: bool,  # noqa: FBT001 (click passes a flag)
) -> int:
    """Whether the decisions of a run still rest on what runs now.

    Compares target, draft, engines, policy, rules and corpus with today's,
    and the traffic mix and acceptance with recent receipts. Exits with 0 if
    all is current, 1 if anything is stale (expired, changed, drifted), 3 if
    there is too little evidence, 4 if a server could not be asked.

    \b
    Example:
      speccheck revisit --rollout rollout.yaml --receipts recent.parquet
    """
    from datetime import date

    from speccheck import decision, launch, results
    from speccheck import revisit as held
    from speccheck.context import measured_arms

    try:
        day = datetime.now(UTC).date() if today is None else date.fromisoformat(today)
    except ValueError:
        raise UsageError(f"--today {today!r}: give a date such as 2026-12-31") from None
    limits = {"max_shift": _share("--max-shift", max_shift)}
    limits["max_drift"] = _share("--max-drift", max_drift)
    with results.open_store(out) as store:
        run = store.run(results.pick_run(store, run_id))
        now, files = (
            (held.stored_rollout(run), None) if rollout is None else held.rollout_now(rollout)
        )
        found = held.revisit(
            store,
            run.run_id,
            held.Now(
                arms=lambda: launch.describe(now, measured_arms(store, run.run_id)),
                files=files,
                expires=now.expiry(held.run_date(run)),
                receipts=None if receipts is None else _receipts(receipts, out),
            ),
            today=day,
            **limits,
        )
    code = decision.exit_code((), [decision.Check("revisit", found.verdict, "")])
    with reader_may_leave():
        print_json(_plain(found, code)) if as_json else _page(found)
    return code


def _share(name: str, text: str) -> float:
    from speccheck.config import fraction

    try:
        value = float(fraction(text) if "%" in text else text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    if not 0 < value < 1:
        raise UsageError(f"{name} {text}: give a share between 0 and 1, such as 10%")
    return value


def _receipts(path: Path, out: Path) -> list[Receipt]:
    """Receipts of an export, or of the latest run in a folder."""
    from speccheck import results
    from speccheck.store import read_receipts

    if not path.is_dir():
        return read_receipts(path)
    if path.resolve() == out.resolve():
        raise UsageError(f"--receipts {path}: that is the run itself; give later receipts")
    with results.open_store(path) as store:
        return store.receipts(results.pick_run(store, None))


def _plain(found: Revisit, code: ExitCode) -> dict[str, object]:
    return {
        "run_id": found.run_id,
        "today": str(found.today),
        "verdict": _WORDS[found.verdict.word][1].replace(" ", "_"),
        "exit_code": int(code),
        "items": [
            {
                "name": item.name,
                "verdict": _WORDS[item.verdict.word][1].replace(" ", "_")
                if item.counted
                else "not_compared",
                "why": item.why,
                "was": item.was,
                "now": item.now,
                "estimate": item.estimate,
                "limit": item.limit,
            }
            for item in found.items
        ],
    }


def _page(found: Revisit) -> None:
    """Worst first, 80 columns wide."""
    from speccheck.console import printable

    mark, word = _WORDS[found.verdict.word]
    click.echo(f"{mark} {word}: what {found.run_id} decided, on {found.today}")
    for item in sorted(found.items, key=lambda item: -item.verdict if item.counted else 1):
        mark, word = _WORDS[item.verdict.word] if item.counted else ("–", "not compared")
        text = f"{mark} {item.name}: {item.why}"
        if item.counted and word not in ("current", "stale"):
            text = f"{mark} {item.name}: {word}: {item.why}"
        click.echo(
            textwrap.fill(
                printable(text),
                80,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
        )
