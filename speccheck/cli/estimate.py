"""What lookup drafting would bring, from logs."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave
from speccheck.errors import UsageError

if TYPE_CHECKING:
    from speccheck.estimate import CohortEstimate, Drafting, LogEstimate
    from speccheck.logs import LoggedAnswer, Reading
    from speccheck.records import Estimate
    from speccheck.speed import Costs

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
@click.option("--suffix-max-tree-depth", type=click.IntRange(2, 256), default=24, show_default=True)
@click.option(
    "--suffix-max-cached-requests", type=click.IntRange(0), default=10_000, show_default=True
)
@click.option("--suffix-max-spec-factor", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--suffix-min-token-prob", type=click.FloatRange(0, 1), default=0.1, show_default=True)
@click.option("--draft-cost", type=click.FloatRange(0), default=None, help="One draft, in passes.")
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
    draft_cost: float | None,
    verify_cost: str | None,
    limit: int | None,
    skip_bad: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """What prompt lookup and suffix drafting would bring, from target-only LOGS.

    No server and no load: the drafter is replayed over each logged answer,
    which at temperature 0 repeats a server's rounds exactly and above it is
    an unbiased draw of them.

    LOGS are JSON lines: a prompt (prompt_token_ids, messages or prompt), an
    answer (output_token_ids or output), and where known id, task, route,
    temperature, max_tokens and finish_reason; or OpenAI batch outputs, with
    their input as --prompts. Texts are cut into tokens again, which is not
    always as the model wrote them: give ids where you have them.

    \b
    Example:
      speccheck estimate answers.jsonl --ngram 2-4
      speccheck estimate --from-run demo --draft-cost 0 \\
        --verify-cost 1:1.05,2:1.09,4:1.2,8:1.5
    """
    from speccheck.estimate import Replay
    from speccheck.logs import Reading, open_tokenizer, read_batch_input
    from speccheck.suffix import SuffixSettings

    if bool(logs) == (from_run is not None):
        raise UsageError("estimate: give LOGS, or --from-run DIR")
    costs = _costs(draft_cost, verify_cost)
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
    opened = []

    def once() -> object:
        if not opened:
            opened.append(open_tokenizer(tokenizer or "packaged"))
        return opened[0]

    reading = Reading(
        once,  # type: ignore[arg-type]
        skip_bad=skip_bad,
        batch_input={} if prompts is None else read_batch_input(prompts),
    )
    total = sum(path.stat().st_size for path in logs if path.is_file())
    if from_run is None:
        answers = (answer for path in logs for answer in reading.answers(path))
    else:
        answers = _of_run(from_run, run_id, rollout, tokenizer)
    for n, answer in enumerate(_told(answers, reading, total)):
        if n == limit:
            break
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
            _page(found, notes)
