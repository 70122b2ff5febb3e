"""The command line: parse, call one function, print, exit code.

Heavy imports happen inside the commands that need them, so that `speccheck --help` answers at
once. Data goes to standard output, progress and errors to standard error. `main` is the one place
where an error becomes a line and an exit code; with `--json` the error is a JSON object too.
"""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import click

from speccheck import __version__
from speccheck.errors import ExitCode, SpeccheckError, StoreError, UsageError

if TYPE_CHECKING:
    from speccheck.outcome import Outcome, WrittenPacket
    from speccheck.store import Format

F = TypeVar("F", bound=Callable[..., Any])

OUT = "speccheck-run"
PATH = click.Path(path_type=Path)
STAGES = click.Choice(["fixture", "replay", "shadow", "canary"])


def _report_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """A file that is written at the end; whether it can be is asked before anything is sent."""
    if path is not None and path.is_dir():
        raise click.BadParameter(f"{path} is a folder; name a file", ctx, param)
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}; make it first", ctx, param)
    return path


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code of the exit-code table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(args=arguments, prog_name="speccheck", standalone_mode=False)
        sys.stdout.flush()
    except SpeccheckError as error:
        _say_error(str(error), error.exit_code, arguments)
        code = error.exit_code
    except click.UsageError as error:
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        _say_error(f"{error.format_message()}{where}", ExitCode.USAGE, arguments)
        code = ExitCode.USAGE
    except click.ClickException as error:
        _say_error(error.format_message(), ExitCode.USAGE, arguments)
        code = ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        _say_error(
            "interrupted; run the same command again to resume", ExitCode.INTERRUPTED, arguments
        )
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) went away before it heard the verdict: no pass.
        _nobody_reads()
        code = ExitCode.INTERRUPTED
    except Exception:  # noqa: BLE001
        # A bug of ours keeps its traceback, and must not look like a judgement (Python's own 1).
        traceback.print_exc()
        code = ExitCode.COULD_NOT_JUDGE
    sys.exit(int(code or 0))


def _nobody_reads() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Around the last words of a command: its exit code stands, whether or not they are read."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads()
    except OSError as error:
        _nobody_reads()
        raise StoreError(f"standard output: cannot be written ({error.strerror})") from None


def _say_error(text: str, code: ExitCode, arguments: Sequence[str]) -> None:
    if "--json" in arguments:
        click.echo(json.dumps({"schema_version": 1, "error": text, "exit_code": int(code)}))
    click.echo(f"speccheck: {text}", err=True)


def _print_json(value: Any) -> None:
    from speccheck.records import SCHEMA_VERSION, to_json

    plain = {"schema_version": SCHEMA_VERSION} | to_json(value)
    click.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


report_options = _options(
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

rollout_options = _options(
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
    report_options,
)

out_option = click.option(
    "--out",
    "out",
    type=PATH,
    default=OUT,
    show_default=True,
    help="Folder of the run (it holds receipts.duckdb).",
)

store_options = _options(
    out_option, click.option("--run", "run_id", default=None, help="Run id; the latest otherwise.")
)


class ExitCodeGroup(click.Group):
    """A command group whose help ends with the exit codes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Append the exit codes to the epilog."""
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), code.meaning) for code in ExitCode])


@click.group(
    cls=ExitCodeGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(__version__, prog_name="speccheck")
def cli() -> None:
    """Rollout control for speculative decoding in LLM serving.

    Proves the verifier (fixture), replays quality offline (replay), mirrors
    traffic (shadow), runs a canary, decides per route and renders a packet.

    \b
    Example:
      speccheck init
      speccheck run --rollout rollout.yaml
      speccheck packet
    """


# --- writing the files to start from ------------------------------------------------------------


@cli.command()
@click.argument("folder", type=PATH, default=".")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def init(folder: Path, force: bool) -> None:  # noqa: FBT001 (click passes a flag)
    """Write a commented rollout.yaml and guardrails.yaml into FOLDER.

    \b
    Example:
      speccheck init my-rollout && cd my-rollout && speccheck run
    """
    from speccheck.config import write_example

    for path in write_example(folder, "rollout.yaml", overwrite=force):
        click.echo(f"wrote {path}")
    click.echo(f"next: speccheck run --rollout {folder / 'rollout.yaml'}")


# --- running ------------------------------------------------------------------------------------


@cli.command()
@rollout_options
@click.option("--keep-going", is_flag=True, help="Run later stages although one did not pass.")
@click.option("--dry-run", is_flag=True, help="Print the plan and touch nothing.")
def run(
    rollout: Path,
    out: Path,
    again: bool,  # noqa: FBT001 (click passes flags)
    as_json: bool,  # noqa: FBT001
    junit: Path | None,
    summary: Path | None,
    keep_going: bool,  # noqa: FBT001
    dry_run: bool,  # noqa: FBT001
) -> int:
    """All four stages, then a decision per route and the packet.

    Run the same command again after a crash and it resumes: no receipt is
    lost and none is doubled.

    \b
    Example:
      speccheck run --rollout rollout.yaml --junit speccheck.xml
    """
    from speccheck import console, context, outcome, stages

    if dry_run:
        planned = stages.describe(rollout)
        _print_json(planned) if as_json else console.plan_page(planned)
        return ExitCode.PASS
    with context.open_run(rollout, out, console.Reporter(), fresh=again) as opened:
        stages.run_all(opened, stop_early=not keep_going)
        written = outcome.write_packet(opened.store, opened.run_id, out)
        ended = outcome.outcome(opened.store, opened.run_id, written=written)
    return _tell(ended, as_json=as_json, junit=junit, summary=summary, written=written)


@cli.command()
@click.argument("name", type=STAGES)
@rollout_options
@click.option("--keep-going", is_flag=True, help="Run although the stages before did not pass.")
def stage(
    name: str,
    rollout: Path,
    out: Path,
    again: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    junit: Path | None,
    summary: Path | None,
    keep_going: bool,  # noqa: FBT001
) -> int:
    """One stage: fixture, replay, shadow or canary.

    \b
    Example:
      speccheck stage replay --rollout rollout.yaml --json
    """
    from speccheck import console, context, outcome, stages
    from speccheck.records import Stage

    with context.open_run(rollout, out, console.Reporter(), fresh=again) as opened:
        stages.run_stage(opened, Stage(name), stop_early=not keep_going)
        ended = outcome.outcome(opened.store, opened.run_id, [Stage(name)])
    return _tell(ended, as_json=as_json, junit=junit, summary=summary)


@cli.command()
@click.option("--out", type=PATH, default="demo", show_default=True, help="Folder for the run.")
@click.option("--again", is_flag=True, help="Measure anew, as a new run.")
def demo(out: Path, again: bool) -> int:  # noqa: FBT001
    """The whole job on the embedded engine, with the model pair that comes along.

    Ends with exit code 0 when the run went through and the packet is whole,
    whatever was decided: in the demo one route is meant to fall back.

    \b
    Example:
      speccheck demo --out demo
    """
    from speccheck import console, context, outcome, stages
    from speccheck.config import write_example

    folder = out / "rollout"
    if not (folder / "rollout.yaml").exists():
        write_example(folder, "demo.yaml")
    with context.open_run(folder / "rollout.yaml", out, console.Reporter(), fresh=again) as opened:
        stages.run_all(opened, stop_early=True)
        written = outcome.write_packet(opened.store, opened.run_id, out)
        ended = outcome.outcome(opened.store, opened.run_id, written=written)
    code = _tell(ended, as_json=False, junit=None, summary=None, written=written)
    click.echo(
        f"\n`speccheck run` would exit with {int(code)} here: {code.meaning}.\n"
        "The demo exits with 0 if all four stages ran and the packet is whole."
    )
    judged = code in (ExitCode.PASS, ExitCode.JUDGED_BAD, ExitCode.INCONCLUSIVE)
    return ExitCode.PASS if judged and not written.missing else code


def _tell(
    ended: Outcome,
    *,
    as_json: bool,
    junit: Path | None,
    summary: Path | None,
    written: WrittenPacket | None = None,
) -> ExitCode:
    """Say what came of a command in every form that was asked for; the forms agree."""
    from speccheck import decision

    try:
        if junit is not None:
            junit.write_text(decision.junit(ended.decisions, ended.checks), encoding="utf-8")
        if summary is not None:
            with summary.open("a", encoding="utf-8") as file:
                file.write(decision.summary_markdown(ended.decisions, ended.checks))
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be written ({error.strerror})") from None
    with _reader_may_leave():
        if as_json:
            packet = {} if written is None else {"packet": written.to_dict()}
            _print_json(ended.to_dict() | packet)
        else:
            from speccheck.console import outcome_page

            outcome_page(ended, written)
    return ended.exit_code


# --- looking ------------------------------------------------------------------------------------


@cli.command()
@click.option("--seed", type=click.IntRange(min=0), default=18, show_default=True)
@click.option("--table", type=PATH, default=None, help="A table file of your own.")
@click.option(
    "--algorithm", default="token", show_default=True, help="token, block, one_hot, greedy ..."
)
@click.option(
    "--draft-sampling",
    type=click.Choice(["probabilistic", "greedy", "sampled_one_hot", "ngram"]),
    default="probabilistic",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="Print the trace as JSON.")
def trace(
    seed: int,
    table: Path | None,
    algorithm: str,
    draft_sampling: str,
    as_json: bool,  # noqa: FBT001
) -> None:
    """One run of the verifier on the fixture table, step by step.

    Seed 18 proposes A B C D, accepts A and B, rejects C, draws X from the
    corrected distribution and discards D untested.

    \b
    Example:
      speccheck trace --seed 18
    """
    from speccheck import fixture, tables
    from speccheck.config import package_dir

    loaded = tables.load_table(table or package_dir("corpora") / "fixture_t4.json")
    record = fixture.trace(loaded, seed, algorithm=algorithm, draft_sampling=draft_sampling)
    _print_json({"trace": record}) if as_json else click.echo(fixture.format_trace(record))


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--model", default=None, help="Llama folder; the packaged target otherwise.")
@click.option(
    "--speculative-config",
    default=None,
    metavar="JSON",
    help="In vLLM's words; without it the server is target-only.",
)
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def serve(
    host: str,
    port: int,
    model: str | None,
    speculative_config: str | None,
    max_num_seqs: int,
    seed: int,
) -> None:
    """The embedded engine behind an OpenAI-compatible HTTP server.

    \b
    Example:
      speccheck serve --port 8001 --speculative-config \\
        '{"method": "draft_model", "model": "packaged",
          "num_speculative_tokens": 4}'
    """
    from speccheck.engine import server, settings

    given: dict[str, Any] = {"max_num_seqs": max_num_seqs, "seed": seed}
    if model is not None:
        given["model"] = model
    if speculative_config is not None:
        try:
            given["speculative_config"] = json.loads(speculative_config)
        except ValueError as error:
            raise UsageError(f"--speculative-config: not valid JSON ({error})") from None
    server.serve(settings.EngineSettings.parse(given), host=host, port=port)


@cli.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the decisions as JSON.")
@report_options
def decide(
    out: Path,
    run_id: str | None,
    as_json: bool,  # noqa: FBT001
    junit: Path | None,
    summary: Path | None,
) -> int:
    """What was decided per route, and why; the exit code says it too.

    \b
    Example:
      speccheck decide --json | jq -r '.decisions[] | .route + " " + .action'
    """
    from speccheck import outcome

    with outcome.open_store(out) as store:
        ended = outcome.outcome(store, outcome.pick_run(store, run_id))
    return _tell(ended, as_json=as_json, junit=junit, summary=summary)


@cli.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the files' paths as JSON.")
def packet(out: Path, run_id: str | None, as_json: bool) -> int:  # noqa: FBT001
    """Render packet.html, packet.md and packet.json from the receipts.

    Exits with 1 if the packet lacks one of its three views.

    \b
    Example:
      speccheck packet --out speccheck-run
    """
    from speccheck import outcome

    with outcome.open_store(out) as store:
        written = outcome.write_packet(store, outcome.pick_run(store, run_id), out)
    with _reader_may_leave():
        if as_json:
            _print_json(written.to_dict())
        else:
            for path in written.files.values():
                click.echo(path)
            if written.missing:
                click.echo(f"INCOMPLETE: no {', '.join(written.missing)} view", err=True)
    return ExitCode.JUDGED_BAD if written.missing else ExitCode.PASS


@cli.group()
def receipts() -> None:
    """List, show, export and verify the receipts of a run."""


@receipts.command("list")
@store_options
@click.option("--stage", type=STAGES, default=None)
@click.option("--arm", type=click.Choice(["target_only", "speculative"]), default=None)
@click.option("--route", default=None)
@click.option(
    "--outcome",
    type=click.Choice(["ok", "error", "rejected", "incomplete", "cancelled"]),
    default=None,
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True)
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
    from speccheck import outcome

    with outcome.open_store(out) as store:
        run = outcome.pick_run(store, run_id)
        wanted = {name: value for name, value in filters.items() if value is not None}
        found = store.receipts(run, **wanted)
    if as_json:
        _print_json({"run_id": run, "count": len(found), "receipts": found[:limit]})
        return
    from speccheck.console import receipt_table

    receipt_table(found[:limit], total=len(found))


@receipts.command("show")
@click.argument("receipt_id")
@store_options
@click.option("--json", "as_json", is_flag=True)
def receipts_show(receipt_id: str, out: Path, run_id: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Everything that is known about one receipt; a unique beginning of its id is enough.

    \b
    Example:
      speccheck receipts show receipt:1f0c
    """
    from speccheck import outcome

    with outcome.open_store(out) as store:
        run = outcome.pick_run(store, run_id)
        receipt, answer = outcome.find_receipt(store, run, receipt_id)
    if as_json:
        _print_json({"receipt": receipt, "answer": answer})
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
@click.option("--stage", type=STAGES, default=None)
@click.option("--arm", type=click.Choice(["target_only", "speculative"]), default=None)
@click.option("--route", default=None)
def receipts_export(
    path: Path, out: Path, run_id: str | None, form: str | None, **filters: str | None
) -> None:
    """Write receipts as CSV, Parquet or JSON lines.

    \b
    Example:
      speccheck receipts export receipts.parquet --stage shadow
    """
    from speccheck import outcome

    formats: dict[str, Format] = {"csv": "csv", "parquet": "parquet", "jsonl": "jsonl"}
    chosen = formats.get(form or path.suffix.lstrip(".").lower())
    if chosen is None:
        raise UsageError(f"{path}: name it .csv, .parquet or .jsonl, or give --format")
    with outcome.open_store(out) as store:
        run = outcome.pick_run(store, run_id)
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
    from speccheck import outcome

    with outcome.open_store(out) as store:
        problems = store.verify()
    with _reader_may_leave():
        for problem in problems:
            click.echo(problem)
        click.echo(f"{len(problems)} problems" if problems else "every id and hash agrees")
    return ExitCode.COULD_NOT_JUDGE if problems else ExitCode.PASS


@cli.group()
def corpus() -> None:
    """Check and convert prompts."""


@corpus.command("import")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "native", "spec_bench", "openai_batch", "lines"]),
    default="auto",
    show_default=True,
)
@click.option("--limit", type=click.IntRange(min=1), default=None, help="Only the first prompts.")
def corpus_import(source: Path, target: Path, form: str, limit: int | None) -> None:
    """Convert SOURCE (Spec-Bench, OpenAI batch, plain lines) into a corpus file TARGET.

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
@click.option("--json", "as_json", is_flag=True)
def corpus_check(paths: tuple[Path, ...], as_json: bool) -> None:  # noqa: FBT001
    """Read corpus files, say what is in them, or where they are wrong.

    \b
    Example:
      speccheck corpus check corpora/*.jsonl
    """
    from collections import Counter

    from speccheck.corpus import load_corpus

    loaded = load_corpus(paths)
    tasks = Counter(prompt.task for prompt in loaded.prompts)
    if as_json:
        _print_json({"digest": loaded.digest, "prompts": len(loaded.prompts), "tasks": dict(tasks)})
        return
    for task, count in sorted(tasks.items()):
        click.echo(f"{count:>6}  {task}")
    click.echo(f"{len(loaded.prompts):>6}  prompts, {loaded.digest}")
