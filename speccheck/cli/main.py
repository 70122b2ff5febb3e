"""The command line: parse, call one function, print, exit code.

Heavy imports happen inside the commands that need them, so that `speccheck --help` answers at
once. Data goes to standard output, progress and errors to standard error. `main` is the one place
where an error becomes a line and an exit code; with `--json` the error is a JSON object too.
"""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from speccheck import __version__
from speccheck.cli.canary import canary
from speccheck.cli.data import corpus, receipts
from speccheck.cli.doctor import doctor
from speccheck.cli.estimate import estimate
from speccheck.cli.fallback import fallback
from speccheck.cli.gateway import gateway, route
from speccheck.cli.policy import explain, matrix
from speccheck.cli.probe import probe
from speccheck.cli.review import judge, review
from speccheck.cli.revisit import revisit
from speccheck.cli.shell import (
    PATH,
    STAGES,
    nobody_reads,
    print_json,
    reader_may_leave,
    report_options,
    rollout_options,
    store_options,
)
from speccheck.cli.sweep import sweep
from speccheck.cli.watch import watch
from speccheck.errors import ExitCode, SpeccheckError, StoreError, UsageError

if TYPE_CHECKING:
    from speccheck.results import Outcome, WrittenPacket


def _take_signals() -> None:
    """SIGTERM, of a pipeline or an orchestrator, does what Ctrl-C does: servers stopped, what is
    measured kept, exit code 130.

    Raised as SIGINT, so that the event loop's handler takes it. A script's background job ignores
    that; there it is blocked instead, since the loop has a handler only where it is not ignored.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    how = signal.SIG_BLOCK if is_ignored else signal.SIG_UNBLOCK
    signal.pthread_sigmask(how, {signal.SIGINT})
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.raise_signal(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code of the exit-code table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _take_signals()
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
        nobody_reads()
        code = ExitCode.INTERRUPTED
    except Exception:  # noqa: BLE001
        # A bug of ours keeps its traceback, and must not look like a judgement (Python's own 1).
        traceback.print_exc()
        code = ExitCode.COULD_NOT_JUDGE
    sys.exit(int(code or 0))


def _say_error(text: str, code: ExitCode, arguments: Sequence[str]) -> None:
    if "--json" in arguments:
        click.echo(json.dumps({"schema_version": 1, "error": text, "exit_code": int(code)}))
    click.echo(f"speccheck: {text}", err=True)


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
    """Write a commented rollout.yaml and its rules into FOLDER.

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
    from speccheck import console, context, results, stages

    if dry_run:
        planned = stages.describe(rollout)
        print_json(planned) if as_json else console.plan_page(planned)
        return ExitCode.PASS
    with context.open_run(rollout, out, console.Reporter(), fresh=again) as opened:
        stages.run_all(opened, stop_early=not keep_going)
        written = results.write_packet(opened.store, opened.run_id, out)
        ended = results.outcome(opened.store, opened.run_id, written=written)
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
    from speccheck import console, context, results, stages
    from speccheck.records import Stage

    with context.open_run(rollout, out, console.Reporter(), fresh=again) as opened:
        stages.run_stage(opened, Stage(name), stop_early=not keep_going)
        ended = results.outcome(opened.store, opened.run_id, [Stage(name)])
    return _tell(ended, as_json=as_json, junit=junit, summary=summary)


@cli.command()
@click.option("--out", type=PATH, default="demo", show_default=True, help="Folder for the run.")
@click.option("--again", is_flag=True, help="Measure anew, as a new run.")
def demo(out: Path, again: bool) -> int:  # noqa: FBT001
    """The whole job on the embedded engine and the packaged pair.

    Ends with exit code 0 when the run went through and the packet is whole,
    whatever was decided: in the demo one route is meant to fall back.

    \b
    Example:
      speccheck demo --out demo
    """
    from speccheck import console, context, results, stages
    from speccheck.config import write_example

    folder = out / "rollout"
    if not (folder / "rollout.yaml").exists():
        write_example(folder, "demo.yaml")
    with context.open_run(folder / "rollout.yaml", out, console.Reporter(), fresh=again) as opened:
        stages.run_all(opened, stop_early=True)
        written = results.write_packet(opened.store, opened.run_id, out)
        ended = results.outcome(opened.store, opened.run_id, written=written)
    code = _tell(ended, as_json=False, junit=None, summary=None, written=written)
    click.echo(
        f"\n`speccheck run` would exit with {int(code)} here: {code.meaning}.\n"
        "The demo itself ends with 0 whatever was decided, if its packet is whole."
    )
    late = [
        name
        for name, result in ended.stages.items()
        if name in context.LIVE and result.evidence["client_health"].get("is_late")
    ]
    if late:
        click.echo(
            f"This machine was too busy to time requests ({', '.join(late)}), so nothing that\n"
            "rests on times is judged there. On a quieter machine: speccheck demo --again"
        )
    judged = bool(late) or code is not ExitCode.COULD_NOT_JUDGE
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
    with reader_may_leave():
        if as_json:
            packet = {} if written is None else {"packet": written.to_dict()}
            print_json(ended.to_dict() | packet)
        else:
            from speccheck.console import outcome_page

            outcome_page(ended, written)
    return ended.exit_code


# --- looking ------------------------------------------------------------------------------------


@cli.command()
@click.option(
    "--seed", type=click.IntRange(min=0), default=18, show_default=True, help="Of all its draws."
)
@click.option("--table", type=PATH, default=None, help="A table file of your own.")
@click.option(
    "--algorithm",
    default="token",
    show_default=True,
    help="token, block, one_hot, sampler_match, greedy or target_only.",
)
@click.option(
    "--draft-sampling",
    type=click.Choice(["probabilistic", "greedy", "sampled_one_hot", "ngram"]),
    default="probabilistic",
    show_default=True,
    help="How drafts are drawn, and verified.",
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
    print_json({"trace": record}) if as_json else click.echo(fixture.format_trace(record))


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes a free one.",
)
@click.option("--model", default=None, help="Llama folder; the packaged target otherwise.")
@click.option(
    "--speculative-config",
    default=None,
    metavar="JSON",
    help="In vLLM's words; without it the server is target-only.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Requests in one step; more wait.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of requests that bring none.",
)
def serve(
    host: str,
    port: int,
    model: str | None,
    speculative_config: str | None,
    max_num_seqs: int,
    seed: int,
) -> None:
    """The embedded engine behind an OpenAI-compatible HTTP server.

    "adaptive": true in the speculative config makes num_speculative_tokens a
    bound: each request drafts as many as pay, by its recent agreement and by
    what else runs and waits; the reasons stand in its metrics.

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
    from speccheck import results

    with results.open_store(out) as store:
        ended = results.outcome(store, results.pick_run(store, run_id))
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
    from speccheck import results

    with results.open_store(out) as store:
        written = results.write_packet(store, results.pick_run(store, run_id), out)
    with reader_may_leave():
        if as_json:
            print_json(written.to_dict())
        else:
            for path in written.files.values():
                click.echo(path)
            if written.missing:
                click.echo(f"INCOMPLETE: no {', '.join(written.missing)} view", err=True)
    return ExitCode.JUDGED_BAD if written.missing else ExitCode.PASS


for _command in (
    canary,
    doctor,
    receipts,
    corpus,
    estimate,
    sweep,
    revisit,
    review,
    judge,
    matrix,
    explain,
    probe,
    fallback,
    watch,
    gateway,
    route,
):
    cli.add_command(_command)
