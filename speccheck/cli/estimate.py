"""What lookup drafting would bring, from logs."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave
from speccheck.errors import UsageError

if TYPE_CHECKING:
    from speccheck.estimate import Drafting, LogEstimate, Prices
    from speccheck.logs import LoggedAnswer, Reading
    from speccheck.records import Estimate

_EVERY_S = 2.0


@click.command()
@click.argument("logs", type=PATH, nargs=-1)
@click.option(
    "--from-run",
    type=PATH,
    default=None,
    metavar="DIR",
    help="Use the target-only answers that the replay of a run kept.",
)
@click.option("--run", "run_id", default=None, help="Run id in DIR; the latest otherwise.")
@click.option(
    "--rollout", type=PATH, default=None, help="Of that run, where its corpus is your own."
)
@click.option(
    "--prompts", type=PATH, default=None, help="Batch input that belongs to batch outputs in LOGS."
)
@click.option(
    "--tokenizer",
    default=None,
    metavar="PATH",
    help="tokenizer.json of the target, for texts; the packaged one otherwise.",
)
@click.option("--k", "ks", default="1-8", show_default=True, help="Proposal lengths: 1-8 or 1,2,4.")
@click.option(
    "--ngram",
    "ngrams",
    multiple=True,
    default=("5-5",),
    show_default=True,
    metavar="MIN-MAX",
    help="prompt_lookup_min and max; may be given several times.",
)
@click.option("--suffix/--no-suffix", default=True, show_default=True, help="Suffix drafting too.")
@click.option(
    "--suffix-max-tree-depth",
    type=click.IntRange(2, 256),
    default=24,
    show_default=True,
    help="suffix_decoding_max_tree_depth of vLLM.",
)
@click.option(
    "--suffix-max-cached-requests",
    type=click.IntRange(0),
    default=10_000,
    show_default=True,
    help="suffix_decoding_max_cached_requests of vLLM.",
)
@click.option(
    "--suffix-max-spec-factor",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="suffix_decoding_max_spec_factor of vLLM.",
)
@click.option(
    "--suffix-min-token-prob",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="suffix_decoding_min_token_prob of vLLM.",
)
@click.option(
    "--costs",
    "costs_dir",
    type=PATH,
    default=None,
    metavar="DIR",
    help="Run that holds a calibration of the target (`speccheck sweep` makes one).",
)
@click.option(
    "--draft-cost", type=click.FloatRange(0), default=None, help="One draft step, in plain passes."
)
@click.option(
    "--verify-cost",
    default=None,
    metavar="K:COST,...",
    help="A verify step in plain passes, by proposal length: 1:1.02,4:1.10.",
)
@click.option("--limit", type=click.IntRange(1), default=None, help="Only the first answers.")
@click.option("--skip-bad", is_flag=True, help="Leave out lines that cannot be used; count them.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def estimate(
    logs: tuple[Path, ...],
    from_run: Path | None,
    run_id: str | None,
    rollout: Path | None,
    prompts: Path | None,
    tokenizer: str | None,
    ks: str,
    ngrams: tuple[str, ...],
    suffix: bool,  # noqa: FBT001 (click passes flags)
    suffix_max_tree_depth: int,
    suffix_max_cached_requests: int,
    suffix_max_spec_factor: float,
    suffix_min_token_prob: float,
    costs_dir: Path | None,
    draft_cost: float | None,
    verify_cost: str | None,
    limit: int | None,
    skip_bad: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """What lookup drafting would bring, from target-only LOGS.

    Prompt lookup and suffix drafting, each proposal length. No server and no
    load: the drafter is replayed over each logged answer, which at
    temperature 0 repeats a server's rounds exactly and above it is an
    unbiased draw of them.

    LOGS are JSON lines: a prompt (prompt_token_ids, messages or prompt), an
    answer (output_token_ids or output), and where known id, task, route,
    temperature, max_tokens and finish_reason; or OpenAI batch outputs, with
    their input as --prompts. Texts are cut into tokens again, which is not
    always as the model wrote them: give ids where you have them.

    \b
    Example:
      speccheck estimate answers.jsonl --ngram 2-4
      speccheck estimate --from-run demo --verify-cost 2:1.09,4:1.2,8:1.5
    """
    from speccheck.estimate import Replay
    from speccheck.logs import Reading, open_tokenizer, read_batch_input
    from speccheck.suffix import SuffixSettings

    if bool(logs) == (from_run is not None):
        raise UsageError("estimate: give LOGS, or --from-run DIR")
    costs = _costs(costs_dir, draft_cost, verify_cost)
    settings = SuffixSettings(
        suffix_max_tree_depth,
        suffix_max_cached_requests,
        suffix_max_spec_factor,
        suffix_min_token_prob,
    )
    replay = Replay(
        ks=_lengths(ks),
        ngrams=[_sizes(text) for text in ngrams],
        suffix=settings if suffix else None,
    )
    reading = Reading(
        cache(lambda: open_tokenizer(tokenizer or "packaged")),
        skip_bad=skip_bad,
        batch_input={} if prompts is None else read_batch_input(prompts),
    )
    total = sum(path.stat().st_size for path in logs if path.is_file())
    answers: Iterable[LoggedAnswer] = (a for path in logs for a in reading.answers(path))
    if from_run is not None:
        answers = _of_run(from_run, run_id, rollout, tokenizer)
    for answer in islice(_told(answers, reading, total), limit):
        replay.add(answer)
    found = replay.estimates(costs)
    notes = [*found.notes, *_notes(reading, packaged=tokenizer is None)]
    with reader_may_leave():
        if as_json:
            print_json(
                {
                    "answers": replay.n_answers,
                    "tokens": replay.n_tokens,
                    "cohorts": found.cohorts,
                    "notes": notes,
                    "skipped": reading.skipped.n,
                    "skipped_first": reading.skipped.complaints,
                    "ignored_keys": dict(reading.ignored),
                }
            )
        else:
            _page(found, notes, is_priced=bool(costs))


# --- parsing ------------------------------------------------------------------------------------


def _lengths(text: str) -> list[int]:
    """Proposal lengths: "1-8", "4" or "1,2,4"."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 1 <= low <= high <= 64:
            raise UsageError(f"--k {text!r}: give lengths from 1 to 64, such as 1-8 or 1,2,4")
        found += range(low, high + 1)
    return found


def _sizes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--ngram {text!r}: give prompt_lookup_min-prompt_lookup_max, such as 2-4")
    return low, high


def _costs(folder: Path | None, draft: float | None, verify: str | None) -> dict[str, Prices]:
    from speccheck.estimate import Prices
    from speccheck.speed import Costs

    if folder is not None and (draft is not None or verify is not None):
        raise UsageError("give --costs, or --draft-cost and --verify-cost, not both")
    if folder is not None:
        return _calibrated(folder)
    if verify is None:
        if draft is not None:
            raise UsageError("--draft-cost alone prices nothing; give --verify-cost too")
        return {}
    steps: dict[int, float] = {}
    for part in verify.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+(?:\.\d+)?)\s*", part)
        if not match or int(match[1]) < 1:
            raise UsageError(f"--verify-cost {verify!r}: give K:COST pairs, such as 1:1.02,4:1.1")
        steps[int(match[1])] = float(match[2])
    return {"given costs": Prices(Costs(draft or 0.0, steps))}


def _calibrated(folder: Path) -> dict[str, Prices]:
    """Costs of lookup drafting from a run's calibration."""
    from speccheck import results
    from speccheck.estimate import lookup_costs
    from speccheck.sweep import rounds

    with results.open_store(folder) as store:
        run = results.pick_run(store, None)
        found = rounds.calibrated(store, run)
    costs = lookup_costs(found)
    if not costs:
        why = "no calibration in it"
        if found:
            why = "its calibration tells no verify cost apart, or none with limits"
        raise UsageError(f"{folder}: {why}; `speccheck sweep` calibrates, or give --verify-cost")
    return costs


# --- answers ------------------------------------------------------------------------------------


def _of_run(
    folder: Path, run_id: str | None, rollout: Path | None, tokenizer: str | None
) -> list[LoggedAnswer]:
    """The target-only answers that a run kept, with the prompts of its corpus."""
    from speccheck import context, estimate, logs, results
    from speccheck.config import PACKAGED, package_dir
    from speccheck.corpus import load_corpus
    from speccheck.records import Arm

    with results.open_store(folder) as store:
        run = store.run(results.pick_run(store, run_id))
        settings = run.config["rollout"]["corpus"]
        if rollout is not None:
            corpus = context.read_rollout(rollout)[2]
        elif list(settings["paths"]) == [PACKAGED]:
            corpus = load_corpus(sorted(package_dir("corpora").glob("*.jsonl")))
            if settings["limit_per_task"] is not None:
                corpus = corpus.limited(settings["limit_per_task"])
        else:
            raise UsageError(f"{folder}: its prompts are your own files; give --rollout too")
        if corpus.digest != run.corpus_digest:
            raise UsageError(f"{folder}: the corpus is not the one that this run was measured on")
        arm = context.latest_arms(store, run.run_id).get(Arm.TARGET_ONLY)
        captured = {} if arm is None else arm.config.get("vllm_config", {}).get("model_config", {})
        model = Path(str(captured.get("model", "")))
        known = str(model) if (model / "tokenizer.json").is_file() else PACKAGED
        opened = logs.open_tokenizer(tokenizer or known)
        return list(estimate.run_answers(store, run.run_id, corpus, opened))


def _told(
    answers: Iterable[LoggedAnswer], reading: Reading, total_bytes: int
) -> Iterator[LoggedAnswer]:
    """The answers, with a line on standard error every two seconds."""
    last = time.monotonic()
    for n, answer in enumerate(answers, start=1):
        yield answer
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            share = f" ({reading.bytes_read / total_bytes:.0%} of the file)" if total_bytes else ""
            click.echo(f"  {n:,} answers{share}", err=True)


def _notes(reading: Reading, *, packaged: bool) -> list[str]:
    notes = []
    if reading.retokenised:
        notes.append(
            f"{reading.retokenised:,} answers came as text and were cut into tokens again, not "
            "always as the model wrote them"
            + (
                ", and with the packaged tokenizer: if it is not the target's, all figures are "
                "rough (--tokenizer)"
                if packaged
                else ""
            )
        )
    if reading.skipped.n:
        notes.append(
            f"{reading.skipped.n:,} lines left out, the first: {reading.skipped.complaints[0]}"
        )
    if reading.ignored:
        names = ", ".join(f"{name} ({n:,})" for name, n in reading.ignored.most_common(8))
        notes.append(f"keys that mean nothing here: {names}")
    return notes


# --- the page -----------------------------------------------------------------------------------


def _page(found: LogEstimate, notes: list[str], *, is_priced: bool) -> None:
    """All figures, then what they come to, 80 columns wide."""
    from speccheck.console import printable

    for cohort in found.cohorts:
        click.echo(
            f"{printable(cohort.name)}: {cohort.prompts:,} prompts, {cohort.answers:,} answers, "
            f"{cohort.decode_tokens:,} decode tokens"
        )
        method = ""
        for line in cohort.drafting:
            if line.method != method:
                method = line.method
                click.echo(f"  {method:<16}{_heading(line)}")
            click.echo(_row(line))
        click.echo("")
    click.echo("Intervals: 5 % on each side, prompts as clusters (n: prompts with drafts).")
    click.echo("saved: share of the target's decode passes, before costs of draft and verify.")
    for note in notes:
        click.echo(textwrap.fill(f"Note: {printable(note)}.", 80, subsequent_indent="  "))
    click.echo("")
    if not found.cohorts[0].best:
        why = (
            "none is calibrated as far as these k" if is_priced else "give --costs or --verify-cost"
        )
        click.echo(f"Best k: not estimated without verify costs; {why}.")
        return
    click.echo("Best k, after costs:")
    for cohort in found.cohorts:
        click.echo(f"  {printable(cohort.name)}")
        for best in cohort.best:
            click.echo(f"    {best.method}, {best.load}: {best.words}")


def _heading(line: Drafting) -> str:
    last = "speed-up" if len(line.speedup) == 1 else "tokens/pass"
    return f"{'acceptance':<20}{'n':>5} coverage  {last:<19} saved"


def _row(line: Drafting) -> str:
    last = line.tokens_per_pass
    if len(line.speedup) == 1:
        (last,) = line.speedup.values()
    return (
        f"    k = {line.k:<10}{_interval(line.acceptance):<20}{line.acceptance.n:>5}"
        f"{_percent(line.coverage):>9}  {_interval(last):<19}{_percent(line.saved_share):>6}"
    )


def _interval(estimate: Estimate) -> str:
    if not estimate.is_known:
        return "no draft"
    if math.isinf(estimate.high):
        return f"{estimate.value:.2f} (no interval)"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.0%}" if estimate.is_known else "-"
