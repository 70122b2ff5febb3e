"""Commands on what may speculate: the matrix, the policy that follows from it, and one request."""
# ruff: noqa: D301 (click keeps the lines after the character \b as they are; in r"" it is two others)

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speccheck.cli.shell import PATH, print_json, reader_may_leave, store_options
from speccheck.errors import ExitCode, StoreError, UsageError

if TYPE_CHECKING:
    from speccheck.config import Rollout, Route
    from speccheck.corpus import Corpus
    from speccheck.eligibility import Facts
    from speccheck.records import Prompt

rollout_option = click.option(
    "--rollout",
    "rollout",
    type=PATH,
    default="rollout.yaml",
    show_default=True,
    help="The rollout file; it names the eligibility policy.",
)


@click.command()
@store_options
@rollout_option
@click.option("--propose", is_flag=True, help="Print an eligibility policy as a diff.")
@click.option("--accept", is_flag=True, help="Print that diff and write it.")
@click.option("--json", "as_json", is_flag=True, help="Print the matrix, or the proposal, as JSON.")
def matrix(
    out: Path,
    run_id: str | None,
    rollout: Path,
    propose: bool,  # noqa: FBT001 (click passes flags)
    accept: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> int:
    """What to do per cohort: which proposal length, or target-only.

    From everything that the run measured, its sweep too. --propose turns it
    into an eligibility policy, --accept writes that; the next run obeys it.

    \b
    Example:
      speccheck matrix
      speccheck matrix --propose | less
      speccheck matrix --accept
    """
    from speccheck import console, results

    with results.open_store(out) as store:
        run = results.pick_run(store, run_id)
        if propose or accept:
            return _proposal(results.propose_policy(store, run, rollout), accept, as_json)
        found = results.workload(store, run)
    if not found.rows:
        raise StoreError(
            f"{out}: run {run} has no cohort that was measured on both arms; run a stage "
            "(speccheck stage replay) or speccheck sweep"
        )
    with reader_may_leave():
        if as_json:
            print_json(
                {
                    "run_id": run,
                    "rows": list(found.rows),
                    "warnings": list(found.warnings),
                    "advice": list(found.advice),
                    "refusals": list(found.refusals),
                }
            )
        else:
            console.matrix_page(run, found)
    return ExitCode.PASS


def _proposal(made: Any, accept: bool, as_json: bool) -> int:  # noqa: FBT001
    """Show what would change, write it if that was asked, and say which."""
    diff = made.diff
    written = made.accept() if accept else []
    with reader_may_leave():
        if as_json:
            print_json(
                {
                    "run_id": made.run_id,
                    "diff": diff,
                    "policy": made.policy.model_dump(mode="json", exclude_none=True),
                    "written": [str(path) for path in written],
                }
            )
        else:
            click.echo(diff, nl=False)
    if not diff:
        click.echo("nothing to propose: the policy says all of it already", err=True)
    elif not accept:
        click.echo("nothing was written; --accept writes this", err=True)
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if made.note:
        click.echo(f"then {made.note}", err=True)
    return ExitCode.PASS


@click.command()
@rollout_option
@click.option("--prompt", default=None, metavar="TEXT", help="A user's message.")
@click.option("--prompt-id", default=None, metavar="ID", help="A prompt of the corpus.")
@click.option("--route", default=None, help="Needed where the rollout has several.")
@click.option("--task", default=None, help="What the caller says it is.")
@click.option("--language", default=None, help="Of the prompt, such as en.")
@click.option(
    "--priority",
    type=click.Choice(["normal", "protected"]),
    default="normal",
    show_default=True,
    help="Protected traffic must not be delayed.",
)
@click.option("--temperature", type=click.FloatRange(0), default=None, help="Else the route's.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=None, help="The request's own limit."
)
@click.option(
    "--output-band",
    type=click.Choice(["short", "medium", "long"]),
    default=None,
    help="Expected length of the answer.",
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=None, help="Else counted.")
@click.option("--feature", "features", multiple=True, help="A sampling feature; repeatable.")
@click.option("--concurrency", type=click.IntRange(min=1), default=None, help="In flight, with it.")
@click.option("--queued", type=click.IntRange(min=0), default=None, help="Waiting at the server.")
@click.option("--json", "as_json", is_flag=True, help="Print choice and facts as JSON.")
def explain(
    rollout: Path,
    prompt: str | None,
    prompt_id: str | None,
    route: str | None,
    as_json: bool,  # noqa: FBT001
    features: tuple[str, ...],
    **known: Any,
) -> int:
    """Which rule of the eligibility policy a request meets.

    One line: arm and proposal length, the rule, why, and the policy version.
    What is not given and not known counts as not known: target-only.

    \b
    Example:
      speccheck explain --prompt-id json-003 --concurrency 4
      speccheck explain --prompt "Write a poem" --route chat --temperature 1.2
    """
    from speccheck import eligibility
    from speccheck.context import read_policy, read_rollout

    loaded, _, corpus = read_rollout(rollout)
    policy = read_policy(rollout, loaded, corpus)
    facts = _facts(loaded, corpus, rollout, prompt, prompt_id, route, features, known)
    version = eligibility.policy_version(loaded, policy)
    if policy is None:
        k = loaded.speculation.get("num_speculative_tokens")
        line = "speculate: the rollout names no eligibility policy, so all of every route may"
        choice: dict[str, Any] = {"use": "speculate", "k": k, "rule": "", "number": 0}
    else:
        line = eligibility.explain(policy, facts)
        made = eligibility.decide(policy, facts)
        choice = {"use": made.use, "k": made.k, "rule": made.rule, "number": made.number}
    if as_json:
        given = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name in eligibility.Facts.__dataclass_fields__
            if (value := getattr(facts, name)) is not None
        }
        print_json({**choice, "line": line, "policy_version": version, "facts": given})
    else:
        click.echo(f"{line} [{version}]")
    return ExitCode.PASS


def _facts(
    loaded: Rollout,
    corpus: Corpus,
    path: Path,
    text: str | None,
    prompt_id: str | None,
    route_name: str | None,
    features: tuple[str, ...],
    known: dict[str, Any],
) -> Facts:
    """What is known of the request that was described: as given, else from corpus and route."""
    from dataclasses import replace

    from speccheck import launch
    from speccheck.eligibility import Facts, facts_of
    from speccheck.plan import Phase, closed_loop
    from speccheck.records import Arm, Sampler, Stage

    if text is not None and prompt_id is not None:
        raise UsageError("--prompt and --prompt-id: give one of them")
    found = None
    if prompt_id is not None:
        found = next((p for p in corpus.prompts if p.prompt_id == prompt_id), None)
        if found is None:
            raise UsageError(f"{path}: its corpus has no prompt {prompt_id!r}")
    route = _route(loaded, corpus, path, route_name, found)
    temperature = known["temperature"] if known["temperature"] is not None else route.temperature
    facts = Facts(temperature=temperature, features=frozenset(features))
    chats: dict[str, Any] = {}
    if found is not None:
        import numpy as np

        sampler = Sampler(temperature=temperature, top_p=route.top_p)
        phase = Phase("", Stage.CANARY, "", sampler, max_tokens=route.max_tokens)
        (request,) = closed_loop(
            phase, [found], rng=np.random.default_rng(0), arms=[Arm.SPECULATIVE]
        )
        facts = facts_of(request, {})
        facts = replace(facts, features=(facts.features or frozenset()) | set(features))
        chats = {"": found.messages}
    elif text is not None:
        chats = {"": [{"role": "user", "content": text}]}
    if chats and known["prompt_tokens"] is None:
        counted = launch.count_prompt_tokens(loaded, chats)
        facts = replace(facts, prompt_tokens=counted.get(""))
    given = {name: value for name, value in known.items() if value is not None}
    return replace(facts, route=route.name, **given)


def _route(
    loaded: Rollout, corpus: Corpus, path: Path, name: str | None, prompt: Prompt | None
) -> Route:
    """The route asked for, else the only one that fits."""
    from speccheck.context import route_prompts

    fits = [
        route
        for route in loaded.routes
        if (name is None or route.name == name)
        and (
            name is not None
            or prompt is None
            or prompt.prompt_id in {p.prompt_id for p in route_prompts(path, corpus, route)}
        )
    ]
    if len(fits) != 1:
        routes = ", ".join(route.name for route in loaded.routes)
        what = f"no route {name!r}" if name else "which route is not clear; give --route"
        raise UsageError(f"{path}: {what} (it has {routes})")
    return fits[0]
