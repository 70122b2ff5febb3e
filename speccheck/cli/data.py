"""Commands on what is kept: receipts and corpora."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from speccheck.cli.shell import (
    PATH,
    RECEIPT_STAGES,
    out_option,
    print_json,
    reader_may_leave,
    store_options,
)
from speccheck.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from speccheck.store import Format


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which receipts: by stage, arm and route."""
    for option in (
        click.option("--route", default=None, help="Only receipts of this route."),
        click.option(
            "--arm",
            type=click.Choice(["target_only", "speculative"]),
            default=None,
            help="Only receipts of this arm.",
        ),
        click.option(
            "--stage", type=RECEIPT_STAGES, default=None, help="Only receipts of this stage."
        ),
    ):
        command = option(command)
    return command


@click.group()
def receipts() -> None:
    """List, show, export and verify the receipts of a run.

    \b
    Example:
      speccheck receipts list
    """


@receipts.command("list")
@store_options
@_filters
@click.option(
    "--outcome",
    type=click.Choice(["ok", "error", "rejected", "incomplete", "cancelled"]),
    default=None,
    help="Only receipts that ended so.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Only the first so many.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")
def receipts_list(
    out: Path,
    run_id: str | None,
    limit: int,
    as_json: bool,  # noqa: FBT001
    **filters: str | None,
) -> None:
    """One line per receipt, in the order in which they were sent.

    \b
    Example:
      speccheck receipts list --stage canary --outcome error
    """
    from speccheck import results

    with results.open_store(out) as store:
        run = results.pick_run(store, run_id)
        wanted = {name: value for name, value in filters.items() if value is not None}
        found = store.receipts(run, **wanted)
    if as_json:
        print_json({"run_id": run, "count": len(found), "receipts": found[:limit]})
        return
    from speccheck.console import receipt_table

    receipt_table(found[:limit], total=len(found))


@receipts.command("show")
@click.argument("receipt_id")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print receipt and answer as JSON.")
def receipts_show(receipt_id: str, out: Path, run_id: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Everything that is known about one receipt.

    A unique beginning of its id is enough.

    \b
    Example:
      speccheck receipts show receipt:1f0c
    """
    from speccheck import results

    with results.open_store(out) as store:
        run = results.pick_run(store, run_id)
        receipt, answer = results.find_receipt(store, run, receipt_id)
    if as_json:
        print_json({"receipt": receipt, "answer": answer})
        return
    from speccheck.console import receipt_page

    receipt_page(receipt, answer)


@receipts.command("export")
@click.argument("path", type=PATH)
@store_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "jsonl"]),
    default=None,
    help="By the file's ending otherwise.",
)
@_filters
def receipts_export(
    path: Path, out: Path, run_id: str | None, form: str | None, **filters: str | None
) -> None:
    """Write receipts as CSV, Parquet or JSON lines.

    \b
    Example:
      speccheck receipts export receipts.parquet --stage shadow
    """
    from speccheck import results

    formats: dict[str, Format] = {"csv": "csv", "parquet": "parquet", "jsonl": "jsonl"}
    chosen = formats.get(form or path.suffix.lstrip(".").lower())
    if chosen is None:
        raise UsageError(f"{path}: name it .csv, .parquet or .jsonl, or give --format")
    with results.open_store(out) as store:
        run = results.pick_run(store, run_id)
        wanted = {name: value for name, value in filters.items() if value is not None}
        count = store.export(path, chosen, run_id=run, **wanted)
    click.echo(f"wrote {count} receipts to {path}")


@receipts.command("verify")
@out_option
def receipts_verify(out: Path) -> int:
    """Derive every id and hash again and compare.

    \b
    Example:
      speccheck receipts verify
    """
    from speccheck import results

    with results.open_store(out) as store:
        problems = store.verify()
    with reader_may_leave():
        for problem in problems:
            click.echo(problem)
        click.echo(f"{len(problems)} problems" if problems else "every id and hash agrees")
    return ExitCode.COULD_NOT_JUDGE if problems else ExitCode.PASS


@click.group()
def corpus() -> None:
    """Check and convert prompts.

    \b
    Example:
      speccheck corpus check corpus.jsonl
    """


@corpus.command("import")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "native", "spec_bench", "openai_batch", "lines"]),
    default="auto",
    show_default=True,
    help="What SOURCE is; auto tells by its first line.",
)
@click.option("--limit", type=click.IntRange(min=1), default=None, help="Only the first prompts.")
def corpus_import(source: Path, target: Path, form: str, limit: int | None) -> None:
    """Convert SOURCE into a corpus file TARGET.

    SOURCE: questions of Spec-Bench, an OpenAI batch, or one prompt per line.

    \b
    Example:
      speccheck corpus import question.jsonl corpus.jsonl --limit 80
    """
    from speccheck.corpus import Format, import_prompts, write_corpus

    formats: dict[str, Format] = {name: name for name in get_args(Format)}
    prompts = import_prompts(source, format=formats[form])[:limit]
    write_corpus(target, prompts)
    click.echo(f"wrote {len(prompts)} prompts to {target}")


@corpus.command("check")
@click.argument("paths", type=PATH, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print digest and counts as JSON.")
def corpus_check(paths: tuple[Path, ...], as_json: bool) -> None:  # noqa: FBT001
    """Read corpus files, say what is in them, or where they are wrong.

    \b
    Example:
      speccheck corpus check corpora/*.jsonl
    """
    from collections import Counter

    from speccheck.corpus import load_corpus
    from speccheck.replay.grades import validate_checks

    loaded = load_corpus(paths)
    validate_checks(loaded.prompts)
    tasks = Counter(prompt.task for prompt in loaded.prompts)
    if as_json:
        print_json({"digest": loaded.digest, "prompts": len(loaded.prompts), "tasks": dict(tasks)})
        return
    for task, count in sorted(tasks.items()):
        click.echo(f"{count:>6}  {task}")
    click.echo(f"{len(loaded.prompts):>6}  prompts, {loaded.digest}")
