"""Commands on the live guard: where routes stand, what would be decided again, and the reset."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speccheck.cli.gateway import OUT
from speccheck.cli.shell import PATH, print_json, reader_may_leave
from speccheck.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from speccheck.config import Guardrails, Rollout
    from speccheck.records import Transition
    from speccheck.store import RecordedTransition, Run, Store


out_option = click.option(
    "--out",
    "out",
    type=PATH,
    default=OUT,
    show_default=True,
    help="Folder of the gateway, or of a run that is watched: it holds receipts.duckdb.",
)
run_option = click.option(
    "--run", "run_id", default=None, help="Run id; otherwise the one that was taken up last."
)


@click.group()
def fallback() -> None:
    """See where live routes stand, replay their decisions, reset one.

    \b
    Example:
      speccheck fallback status
    """


@fallback.command("status")
@out_option
@run_option
@click.option("--json", "as_json", is_flag=True, help="Print every transition as JSON.")
def fallback_status(out: Path, run_id: str | None, as_json: bool) -> int:  # noqa: FBT001
    """Where each live route stands, since when, and why.

    Exit code: 0 every route is enabled, 1 one fell back or is off, 3 one is
    on probation.

    \b
    Example:
      speccheck fallback status
    """
    from speccheck import fallback as module
    from speccheck import results
    from speccheck.records import RouteState

    with results.open_store(out) as store:
        run = store.run(results.pick_guarded(store, run_id))
        name = run.config["rollout"]["name"]
        kept = store.transitions(name)
    routes = dict.fromkeys(_routes(run), RouteState.ENABLED)
    routes |= {row.transition.route: row.transition.after for row in kept}
    code = module.exit_code(routes.values())
    last = {row.transition.route: row for row in kept}
    with reader_may_leave():
        if as_json:
            told = [
                {"route": route, "state": state, "transitions": _rows_json(kept, route)}
                for route, state in routes.items()
            ]
            print_json({"rollout": name, "exit_code": int(code), "routes": told})
        else:
            for route, state in routes.items():
                click.echo(_status_line(route, state, last.get(route)))
    return code


@fallback.command("replay")
@out_option
@run_option
@click.option(
    "--rollout",
    type=PATH,
    default=None,
    help="Settings and rules to decide by; otherwise those of the run, and the guard's defaults.",
)
@click.option("--route", default=None, help="One route; all otherwise.")
@click.option(
    "--receipts",
    "file",
    type=PATH,
    default=None,
    help="Receipts of `speccheck receipts export` instead of the store's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the transitions as JSON.")
def fallback_replay(
    out: Path,
    run_id: str | None,
    rollout: Path | None,
    route: str | None,
    file: Path | None,
    as_json: bool,  # noqa: FBT001
) -> int:
    """Decide again from the receipts and scrapes that were kept.

    And from what operators did. The same receipts and settings give the same
    decisions, byte for byte. Where the store has transitions of the run, each
    route says whether these are the same ones. A `speccheck watch` with --out
    keeps its scrapes in a run of its own; without it nothing is kept, and what
    it decided cannot be decided again. Exit code: 0 routes end enabled, 1 one
    fell back or is off, 3 one is on probation, 4 the replay and the store do not
    agree.

    \b
    Example:
      speccheck fallback replay --rollout rollout.yaml
    """
    from speccheck import fallback as module
    from speccheck import results
    from speccheck.records import FOLLOWED, to_json

    with results.open_store(out) as store:
        run = store.run(results.pick_guarded(store, run_id))
        settings, rules = _files(rollout, run)
        names = _routes(run) if route is None else [route]
        if route is not None and route not in _routes(run):
            raise UsageError(f"no route {route!r}; there are: {', '.join(_routes(run))}")
        found = {name: _replayed(store, run, settings, rules, name, file) for name in names}
    code = module.exit_code(one["state"] for one in found.values())
    if any(one["agrees"] is False for one in found.values()):
        code = ExitCode.COULD_NOT_JUDGE
    with reader_may_leave():
        if as_json:
            told = [
                {**one, "route": name, "transitions": to_json(one["transitions"])}
                for name, one in found.items()
            ]
            print_json({"run_id": run.run_id, "exit_code": int(code), "routes": told})
        else:
            if FOLLOWED in run.config:
                followed = run.config[FOLLOWED] or "no run"
                click.echo(f"by a watch of {followed} ({run.run_id})")
            for name, one in found.items():
                _print_replay(name, one)
    return code


def _print_replay(name: str, one: dict[str, Any]) -> None:
    from speccheck.cli.watch import moved_line

    click.echo(
        f"{name}: {one['state']}; {one['receipts']} receipts, {one['samples']} scrapes,"
        f" {len(one['transitions'])} transitions"
    )
    for moved in one["transitions"]:
        click.echo(f"  {moved.at_ns / 1e9:.3f} s {moved_line(moved)}")
    if one["agrees"] is not None:
        click.echo(f"  {'as recorded' if one['agrees'] else 'NOT as recorded'}{one['note']}")
    elif one["note"]:
        click.echo(f"  {one['note']}")


def _replayed(
    store: Store, run: Run, rollout: Rollout, rules: Guardrails, route: str, file: Path | None
) -> dict[str, Any]:
    """What a route's guard decides on what was kept, and whether that is what the store says."""
    from speccheck import fallback as module
    from speccheck.records import FOLLOWED, Arm, to_json
    from speccheck.store import read_receipts
    from speccheck.watch import LIVE

    settings = module.settings_of(rollout, rules, route)
    rows = store.transitions(run.config["rollout"]["name"], route)
    mine = [row for row in rows if row.run_id == run.run_id]
    if file is None:
        source = run.config.get(FOLLOWED, run.run_id)
        receipts, _ = store.arrived_after(source, -1, LIVE)
    else:
        receipts = read_receipts(file)
    kept = module.kept_of({arm: store.snapshots(run.run_id, arm) for arm in Arm})
    recorded = [row.transition for row in mine]
    until_ns = recorded[-1].at_ns if recorded else 0
    if route in kept.began:
        timed = (
            module.as_taken(receipts, kept.taken)
            if FOLLOWED in run.config
            else module.as_arrived(receipts, kept.late)
        )
        receipts = [receipt for _, receipt in timed]
        machine, made, same = module.replay_all(
            settings,
            route,
            [(row.transition, row.wall_ns) for row in rows],
            timed,
            kept,
            mine={row.transition.seq for row in mine},
            until_ns=until_ns,
        )
    else:
        earlier = rows[: rows.index(mine[0])] if mine else []
        anchor = store.anchors(run.run_id)[0]
        machine = module.resume(
            settings,
            route,
            [(row.transition, row.wall_ns) for row in earlier],
            now_wall_ns=anchor.wall_ns,
            now_ns=anchor.clock_ns,
        )
        made = module.replay(
            machine,
            receipts,
            kept.samples,
            [moved for moved in recorded if moved.who],
            until_ns=until_ns,
        )
        # Time may have gone on after the last row was written: nobody has told us how far.
        same = to_json(made[: len(recorded)]) == to_json(recorded)
    others = {row.settings for row in mine} - {settings.digest}
    note = "; it was decided by other settings then" if others else ""
    agrees = same if recorded else None
    if not same and not kept.samples and any(one.rule in module.OF_SCRAPES for one in recorded):
        agrees = None
        note = "cannot be decided again: it rests on scrapes, and none were kept in this run"
    return {
        "state": machine.state,
        "receipts": len(receipts),
        "samples": len(kept.samples),
        "transitions": made,
        "agrees": agrees,
        "note": note,
    }


@fallback.command("reset")
@click.argument("route")
@click.option("--reason", required=True, help="Why it may be tried again; kept for good.")
@out_option
@run_option
def fallback_reset(route: str, reason: str, out: Path, run_id: str | None) -> int:
    """Let a live ROUTE that fell back or is off be tried again.

    It is on probation then: its fallbacks are forgotten and its evidence begins
    from nothing. The reset is kept with its reason. The gateway may run
    meanwhile: it takes the reset over within gateway.flush_s (2 s).

    \b
    Example:
      speccheck fallback reset chat --reason "new driver, see #412"
    """
    from speccheck import fallback as module
    from speccheck import results

    with results.open_store(out, mode="write") as store:
        run = store.run(results.pick_guarded(store, run_id))
        name = run.config["rollout"]["name"]
        known = [*_routes(run), *{row.transition.route for row in store.transitions(name)}]
        if route not in known:
            raise UsageError(f"{store.path}: no route {route!r}; it has {', '.join(_routes(run))}")
        rollout, rules = _files(None, run)
        settings = module.settings_of(rollout, rules, route)
        kept = [(row.transition, row.wall_ns) for row in store.transitions(name, route)]
        now_wall_ns, now_ns = time.time_ns(), time.perf_counter_ns()
        machine = module.resume(settings, route, kept, now_wall_ns=now_wall_ns, now_ns=now_ns)
        first = machine.reset(now_ns, f"an operator ({reason})")
        if first is None:
            raise UsageError(
                f"{store.path}: route {route} is {machine.state}, so there is nothing to reset"
            )
        # Its cool-down may have ended while nobody was there to say so.
        made = [first, *iter(lambda: machine.tick(0), None)]
        for moved in made:
            wall_ns = now_wall_ns - (now_ns - moved.at_ns)
            store.append_transition(
                name, moved, run_id=run.run_id, wall_ns=wall_ns, settings=settings.digest
            )
    for moved in made:
        click.echo(f"{route}: {moved.before} -> {moved.after}: {moved.why}")
    return ExitCode.PASS


def _routes(run: Run) -> list[str]:
    return [entry["name"] for entry in run.config["rollout"]["routes"]]


def _files(path: Path | None, run: Run) -> tuple[Rollout, Guardrails]:
    """The settings to decide by: of a file, or of the run."""
    from speccheck.config import (
        Guardrails,
        Rollout,
        load_guardrails,
        load_rollout,
        package_dir,
        resolve,
    )

    packaged = package_dir("rules") / "guardrails.yaml"
    if path is not None:
        rollout = load_rollout(path)
        return rollout, load_guardrails(resolve(rollout.guardrails, path, packaged), rollout.routes)
    rollout = Rollout.model_validate(run.config["rollout"])
    if "guardrails" in run.config:
        return rollout, Guardrails.model_validate(run.config["guardrails"])
    return rollout, load_guardrails(packaged, rollout.routes)


def _rows_json(kept: Sequence[RecordedTransition], route: str) -> list[dict[str, Any]]:
    from speccheck.records import to_json

    return [
        {"at": _when(row.wall_ns), "run_id": row.run_id, **to_json(row.transition)}
        for row in kept
        if row.transition.route == route
    ]


def _status_line(route: str, state: str, last: RecordedTransition | None) -> str:
    from speccheck.console import printable

    if last is None:
        return f"{route}: {state}, as it began"
    moved: Transition = last.transition
    text = f"{route}: {state} since {_when(last.wall_ns)}, {moved.rule}: {moved.why}"
    return printable(text)


def _when(wall_ns: int) -> str:
    at = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
