"""One run: opened, resumed, driven and closed.

A run is named by a digest of everything that was decided before its first request: rollout (but for
its expiry), rules, corpus and seed. So the same command comes back to the same run and sends only
what is missing, and a changed rule is another run. What is needed while it goes on (prompts per
route, the two arms, the store, progress) is held here, so that a stage can be read as plan, drive,
store, estimate, judge, decide.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from speccheck import __version__, client, eligibility, hooks, launch, store, telemetry, vllm
from speccheck.config import (
    PACKAGED,
    Guardrails,
    Rollout,
    Route,
    Traffic,
    load_guardrails,
    load_rollout,
    package_dir,
    resolve,
)
from speccheck.corpus import Corpus, load_corpus
from speccheck.drive import DriveReport, Endpoint, MonotonicClock, Written, drive
from speccheck.engine.settings import MAX_PROPOSAL_LENGTH
from speccheck.errors import StoreError, UsageError
from speccheck.model_files import check_models
from speccheck.plan import remaining
from speccheck.records import Arm, ArmDescription, PlannedRequest, Prompt, Receipt, Stage, digest

STORE_NAME = "receipts.duckdb"
EVERY_TASK = "*"
LIVE = (Stage.SHADOW, Stage.CANARY)
"""Stages in which the eligibility policy decides where a request goes."""
POLICED = (Stage.REPLAY, *LIVE)
"""Stages whose receipts say what it decides."""
PROTECTED = "protected"
"""Name of the class of traffic that speculation must never delay; no route may be called so."""


_WATCH_EVERY_S = 2.0
"""Between two looks at what servers run while live traffic is driven; a stall lasts ten of them."""


class Reporter(Protocol):
    """Where progress goes."""

    def line(self, text: str) -> None:
        """One line."""

    def stage(self, stage: Stage, text: str) -> None:
        """A stage begins."""

    def phase(self, label: str, total: int) -> AbstractContextManager[None]:
        """A part of a stage that sends `total` requests."""

    def receipt(self, receipt: Receipt) -> None:
        """A request of the current phase is finished."""

    def step(self) -> None:
        """Something of the current phase is finished that leaves no receipt."""


@dataclass
class RunContext:
    """An open run. Made by `open_run`, closed with it."""

    path: Path
    rollout: Rollout
    guardrails: Guardrails
    corpus: Corpus
    store: store.Store
    run_id: str
    out: Path
    report: Reporter
    policy: eligibility.Eligibility | None = None
    """Which requests may speculate; None: all."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _arms: launch.Arms | None = None
    _tokens: dict[str, int] = field(default_factory=dict)
    """Prompt lengths by prompt id, as far as the policy asked for them."""
    _draft: Endpoint | None = None
    _draft_asked: bool = False
    _warm: bool = False
    """Whether this process has sent warm-up requests: servers that it started are cold before."""

    def arms(self) -> launch.Arms:
        """The running pair; started at the first call, stopped when the run closes.

        Raises:
            EngineError: a server does not start or answer.
            UsageError: this run was begun on another engine or configuration.
        """
        if self._arms is None:
            self.report.line("  waiting for the two servers")
            pair = self._stack.enter_context(
                launch.arms(self.rollout, self.out / "logs", say=self.report.line)
            )
            for arm in pair:
                known = {
                    a.engine_config_id
                    for a in self.store.arms(self.run_id, tuple(Stage))
                    if a.arm == arm.arm
                }
                if known and arm.engine_config_id not in known:
                    raise UsageError(
                        f"{self.out}: this run was begun on another {arm.arm} engine or "
                        "configuration; measure it anew with --again"
                    )
            self._check_comparable(pair)
            for arm in pair:
                self.store.put_arm(self.run_id, arm)
            self._arms = pair
        return self._arms

    def _check_comparable(self, pair: launch.Arms) -> None:
        """What would make times of this process no match for the rest, or a waiver void."""
        then, now = self.store.run(self.run_id).config["machine"], launch.machine()
        moved = [name for name in ("processor", "cores") if then.get(name) != now[name]]
        if moved and self.store.arms(self.run_id):
            was = ", ".join(f"{name} {then.get(name)}" for name in moved)
            raise UsageError(
                f"{self.out}: this run was begun on another machine ({was}), and times of two "
                "machines do not mix; measure it anew with --again"
            )
        names = launch.captured_names(pair)
        unknown = sorted(set(self.rollout.waive) - names)
        if unknown and names:
            differ = ", ".join(launch.differences(pair)) or "nothing"
            raise UsageError(
                f"{self.path}: waive: neither server reports {unknown[0]!r}; what differs between "
                f"them is {differ}"
            )

    @property
    def has_arms(self) -> bool:
        """Whether this process has started the pair, or found it running."""
        return self._arms is not None

    def endpoints(self) -> dict[Arm, Endpoint]:
        """Where the load loop reaches each arm."""
        pair = self.arms()
        attached = self.rollout.attached if self.rollout.engine == "attached" else None
        return {
            arm.arm: Endpoint(
                description=arm,
                policy_version=eligibility.policy_version(self.rollout, self.policy),
                served_model=arm.model,
                api_key=pair.api_key,
                extra={} if attached is None else attached.extra,
                omit=frozenset(() if attached is None else attached.omit),
            )
            for arm in pair
        }

    def target(self) -> Endpoint:
        """The target-only arm, running; where servers take turns, it takes its own.

        Raises:
            EngineError: it does not start.
        """
        if (turns := self.arms().turns) is not None:
            turns.take(Arm.TARGET_ONLY)
        return self.endpoints()[Arm.TARGET_ONLY]

    def draft(self) -> Endpoint | None:
        """The draft model served alone, where there is one to serve; started at the first call.

        Raises:
            EngineError: the server does not start or answer.
        """
        if not self._draft_asked:
            self._draft_asked = True
            served = self._stack.enter_context(launch.draft(self.rollout, self.out / "logs"))
            if served is not None:
                key = self.arms().api_key
                version = eligibility.policy_version(self.rollout, self.policy)
                self._draft = Endpoint(served, version, served.model, key)
        return self._draft

    def drive(
        self,
        label: str,
        plan: Sequence[PlannedRequest],
        *,
        give_up_after: int | None = 20,
        on_receipt: Callable[[Receipt], None] | None = None,
        should_send: Callable[[PlannedRequest], PlannedRequest | None] | None = None,
        is_enough: Callable[[], bool] | None = None,
    ) -> None:
        """Send what this run has not sent yet; every receipt is in the store afterwards.

        Warm-up requests of the plan go first, once per process: a resumed run has new servers.
        After `give_up_after` attempts in a row that cannot connect the drive ends in an error; with
        None each of them is a receipt, for those who judge errors.

        Raises:
            EngineError: an arm cannot be reached.
            StoreError: receipts cannot be written.
        """
        plan, door = self._enforce_policy(plan)
        stages = {request.stage for request in plan}
        done = {key for stage in stages for key in self.store.done_keys(self.run_id, stage)}
        left = remaining([r for r in plan if not r.warm_up], self.run_id, done)
        if left and not self._warm:
            left = [r for r in plan if r.warm_up] + left
            self._warm = True

        def decided(planned: PlannedRequest) -> PlannedRequest | None:
            request = planned if should_send is None else should_send(planned)
            return request if request is None or door is None else door.send(request)

        def finished(receipt: Receipt) -> None:
            self.report.receipt(receipt)
            if door is not None:
                door.receipt(receipt)
            if on_receipt is not None:
                on_receipt(receipt)

        def write(batch: Sequence[Written]) -> None:
            self.store.append_receipts(batch)

        async def driven(
            turn: Sequence[PlannedRequest], arms: Sequence[Arm]
        ) -> tuple[DriveReport, dict[Arm, telemetry.Counted | str]]:
            before = await self._scrape(arms)
            async with self._watching(arms if stages <= set(LIVE) else ()) as watched:
                report = await drive(
                    turn,
                    self.endpoints(),
                    clock=MonotonicClock(),
                    run_id=self.run_id,
                    write=write,
                    on_receipt=finished,
                    should_send=decided,
                    is_enough=is_enough,
                    give_up_after=give_up_after,
                    limits=self.rollout.client_limits,
                )
            return report, _counted(before, await self._scrape(arms), watched)

        with self.report.phase(label, len(left)):
            if not left:
                return
            turns = self.arms().turns
            for turn in [left] if turns is None else in_turns(left):
                arms = tuple(Arm) if turns is None else (turn[0].arm,)
                if turns is not None:
                    turns.take(turn[0].arm)
                report, counters = asyncio.run(driven(turn, arms))
                sent = [request for request in turn if not request.warm_up]
                speculated = {request.route for request in turn if request.arm is Arm.SPECULATIVE}
                self.store.append_drive(
                    self.run_id,
                    store.DriveRecord(
                        stage=turn[0].stage,
                        label=label,
                        routes=tuple(sorted(speculated)),
                        completed=report.completed - (len(turn) - len(sent)),
                        health=report.health,
                        counters=counters,
                    ),
                )

    async def _scrape(self, arms: Sequence[Arm]) -> dict[Arm, telemetry.Snapshot | str]:
        pair = self.arms()
        return await telemetry.scrape_all(
            {arm: pair[arm].url for arm in arms},
            now_ns=time.perf_counter_ns,
            api_key=pair.api_key,
        )

    @asynccontextmanager
    async def _watching(
        self, arms: Sequence[Arm]
    ) -> AsyncIterator[Mapping[Arm, list[telemetry.Snapshot]]]:
        """Running requests and tokens of the arms' servers, scraped for the length of the block.

        A scrape that fails is a hole: that servers have no /metrics is said elsewhere.
        """
        found: dict[Arm, list[telemetry.Snapshot]] = {arm: [] for arm in arms}
        pair = self.arms()
        async with client.open_session() as session:
            tasks = [
                asyncio.create_task(
                    telemetry.sample(
                        session,
                        pair[arm].url,
                        now_ns=time.perf_counter_ns,
                        interval_s=_WATCH_EVERY_S,
                        on_sample=seen.append,
                        on_failure=lambda _: None,
                        names=telemetry.STALLING,
                        api_key=pair.api_key,
                    )
                )
                for arm, seen in found.items()
            ]
            try:
                yield found
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _enforce_policy(
        self, plan: Sequence[PlannedRequest]
    ) -> tuple[Sequence[PlannedRequest], eligibility.Door | None]:
        """The plan as the policy has it, and who asks again at send time where pressure matters."""
        if self.policy is None or not all(r.stage in POLICED for r in plan):
            return plan, None
        routes = {route.name for route in self.rollout.routes}
        tokens = self._prompt_tokens(plan)
        door = None
        if all(r.stage in LIVE for r in plan) and self.policy.asks_for & {*eligibility.PRESSURE}:
            door = eligibility.Door(self.policy, routes, tokens)
        return eligibility.enforce(self.policy, plan, routes, tokens), door

    def _prompt_tokens(self, planned: Sequence[PlannedRequest]) -> dict[str, int]:
        """Prompt id -> tokens, where the policy asks: as servers counted them, else tokenized."""
        if self.policy is None or "prompt_tokens" not in self.policy.asks_for:
            return {}
        seen = self.store.columns(self.run_id, ["prompt_id", "prompt_tokens"])
        for prompt_id, tokens in zip(seen["prompt_id"], seen["prompt_tokens"], strict=True):
            if np.isfinite(tokens):
                self._tokens[str(prompt_id)] = int(tokens)
        unknown = {
            r.prompt.prompt_id: r.prompt.messages
            for r in planned
            if r.prompt.prompt_id not in self._tokens
        }
        self._tokens |= launch.count_prompt_tokens(self.rollout, unknown)
        return self._tokens

    def rng(self, *names: object) -> np.random.Generator:
        """The generator of one named part of the run: same run, same name, same numbers."""
        return named_rng(self.rollout.seed, *names)

    def prompts(self, route: Route, traffic: Traffic | None = None) -> tuple[Prompt, ...]:
        """Corpus prompts of a route (or of its traffic in one stage), see `route_prompts`.

        A prompt that an earlier route sends too gets an id of its own here: receipts are keyed by
        prompt, and each route's requests are their own.
        """
        found = route_prompts(self.path, self.corpus, route, traffic)
        earlier = self.rollout.routes[: self.rollout.routes.index(route)]
        taken = {
            prompt.prompt_id
            for other in earlier
            for sent in (None, other.shadow, other.canary)
            for prompt in route_prompts(self.path, self.corpus, other, sent)
        }
        return tuple(
            replace(prompt, prompt_id=f"{prompt.prompt_id}@{route.name}")
            if prompt.prompt_id in taken
            else prompt
            for prompt in found
        )

    def protected_prompts(self) -> tuple[Prompt, ...]:
        """The protected traffic, see `protected_prompts`."""
        return protected_prompts(self.rollout, self.corpus)

    def write(self, name: str, text: str) -> None:
        """Write a file into the run's folder.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            (self.out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{self.out / name}: cannot be written ({error.strerror})") from None


def _counted(
    before: Mapping[Arm, telemetry.Snapshot | str],
    after: Mapping[Arm, telemetry.Snapshot | str],
    watched: Mapping[Arm, Sequence[telemetry.Snapshot]],
) -> dict[Arm, telemetry.Counted | str]:
    """Per arm what its server counted between two scrapes, or why one of them failed."""
    found: dict[Arm, telemetry.Counted | str] = {}
    for arm, first in before.items():
        last = after[arm]
        if isinstance(first, str) or isinstance(last, str):
            found[arm] = first if isinstance(first, str) else str(last)
        else:
            found[arm] = replace(
                telemetry.counted(telemetry.difference(first, last)),
                longest_stall_s=telemetry.longest_stall_s(watched.get(arm, ())),
                waiting=telemetry.waiting(watched.get(arm, ())),
            )
    return found


def in_turns(plan: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """A plan of closed loops cut into turns of one arm each, in the order A B, B A, A B ...

    A turn goes on from one group of the plan (phase and block) to the next, so that there are as
    few changes of server as there can be, and drift falls on both arms alike.
    """
    found: list[list[PlannedRequest]] = []
    for _, group in groupby(plan, lambda r: (r.phase, r.block, r.warm_up)):
        members = list(group)
        last = found[-1][0].arm if found else Arm.TARGET_ONLY
        for arm in sorted(Arm, key=lambda arm: arm is not last):
            mine = [request for request in members if request.arm is arm]
            if mine and found and found[-1][0].arm is arm:
                found[-1] += mine
            elif mine:
                found.append(mine)
    return found


def named_rng(seed: int, *names: object) -> np.random.Generator:
    """The generator of one named part of a run with this seed."""
    parts = [zlib.crc32(str(name).encode()) for name in names]
    return np.random.default_rng([seed, *parts])


def latest_arms(opened: store.Store, run_id: str) -> dict[Arm, ArmDescription]:
    """What each arm ran when a stage last measured it; a sweep runs others beside."""
    return {arm.arm: arm for arm in opened.arms(run_id, tuple(Stage))}


def measured_arms(opened: store.Store, run_id: str) -> launch.Arms | None:
    """The pair that was measured in this run; None before both arms have been."""
    known = latest_arms(opened, run_id)
    if len(known) < len(Arm):
        return None
    return launch.Arms(known[Arm.TARGET_ONLY], known[Arm.SPECULATIVE])


def route_prompts(
    path: Path, corpus: Corpus, route: Route, traffic: Traffic | None = None
) -> tuple[Prompt, ...]:
    """Corpus prompts of a route (or of its traffic in one stage), labelled with its name.

    Protected prompts are left out: they are the traffic that is measured beside the route.

    Raises:
        UsageError: no prompt of the corpus fits; `path` is the rollout that it names.
    """
    tasks = (traffic or route).tasks or route.tasks
    found = tuple(
        replace(prompt, route=route.name)
        for prompt in corpus.prompts
        if prompt.priority != PROTECTED
        and (prompt.route == route.name if tasks is None else _has_task(prompt, tasks))
    )
    if not found:
        wanted = "whose route is this one" if tasks is None else f"of task {', '.join(tasks)}"
        known = ", ".join(sorted({prompt.task for prompt in corpus.prompts}))
        raise UsageError(
            f"{path}: route {route.name}: the corpus has no prompt {wanted} "
            f"(its tasks: {known}); name its tasks, or [{EVERY_TASK!r}] for all"
        )
    return found


def protected_prompts(rollout: Rollout, corpus: Corpus) -> tuple[Prompt, ...]:
    """The protected traffic: prompts of that priority, or of the tasks the rollout names."""
    tasks = rollout.protected_tasks
    return tuple(
        replace(prompt, route=PROTECTED, priority=PROTECTED)
        for prompt in corpus.prompts
        if (prompt.priority == PROTECTED if tasks is None else _has_task(prompt, tasks))
    )


def _has_task(prompt: Prompt, tasks: Sequence[str]) -> bool:
    return EVERY_TASK in tasks or prompt.task in tasks


def _corpus_files(path: Path, entry: str) -> list[Path]:
    """Files of one entry of corpus.paths in the rollout at `path`.

    `packaged` is what the shipped pair was trained for; `packaged:general` the prompts for real
    models, which that pair cannot answer; `packaged:NAME` one family of either.
    """
    folder = package_dir("corpora")
    first, sign, name = entry.partition(":")
    if first != PACKAGED or (sign and not name):
        return [path.parent / entry]
    if not sign:
        return sorted(folder.glob("*.jsonl"))
    known = {file.stem: [file] for file in sorted(folder.rglob("*.jsonl"))}
    known["general"] = sorted((folder / "general").glob("*.jsonl"))
    if name not in known:
        raise UsageError(
            f"{path}: corpus.paths: no packaged prompts are called {name!r}; there are: "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def read_rollout(path: Path) -> tuple[Rollout, Guardrails, Corpus]:
    """A rollout with its rules and prompts, all checked.

    Raises:
        UsageError: with file and line.
    """
    rollout = load_rollout(path)
    if any(route.name == PROTECTED for route in rollout.routes):
        raise UsageError(f"{path}: a route may not be called {PROTECTED!r}: that word is taken")
    rules = resolve(rollout.guardrails, path, package_dir("rules") / "guardrails.yaml")
    guardrails = load_guardrails(rules, rollout.routes)
    paths = [file for entry in rollout.corpus.paths for file in _corpus_files(path, entry)]
    _check_embedded(path, rollout)
    _check_vllm(path, rollout)
    corpus = load_corpus(paths, format=rollout.corpus.format)
    _check_tasks(path, rollout, corpus)
    if rollout.corpus.limit_per_task is not None:
        corpus = corpus.limited(rollout.corpus.limit_per_task)
    return rollout, guardrails, corpus


def _check_embedded(path: Path, rollout: Rollout) -> None:
    """What the embedded engine could not run, said before anything is started.

    Lossy settings are not among it: refusing them is the fixture's verdict.
    """
    if rollout.engine != "embedded":
        return
    k = rollout.speculation.get("num_speculative_tokens")
    if k is None or k > MAX_PROPOSAL_LENGTH:
        raise UsageError(
            f"{path}: speculation: num_speculative_tokens is {k}; the embedded engine takes 1 to "
            f"{MAX_PROPOSAL_LENGTH}"
        )
    for where, model in (
        ("speculation.model", rollout.speculation.get("model")),
        ("embedded.model", rollout.embedded.model),
    ):
        if model not in (None, PACKAGED) and not Path(str(model)).is_dir():
            raise UsageError(
                f"{path}: {where}: there is no folder {model}; give the folder of a model, "
                f"relative to the file, or {PACKAGED!r}"
            )


def _check_tasks(path: Path, rollout: Rollout, corpus: Corpus) -> None:
    """A task that no prompt has would leave its traffic out without a word."""
    known = {EVERY_TASK, *(prompt.task for prompt in corpus.prompts)}
    named = {"protected_tasks": rollout.protected_tasks}
    for route in rollout.routes:
        named[f"route {route.name}"] = route.tasks
        for stage, traffic in (("shadow", route.shadow), ("canary", route.canary)):
            named[f"route {route.name}, {stage}"] = traffic.tasks if traffic is not None else None
    for where, tasks in named.items():
        for task in tasks or ():
            if task not in known:
                raise UsageError(
                    f"{path}: {where}: the corpus has no task {task!r}; it has "
                    f"{', '.join(sorted(known - {EVERY_TASK}))}"
                )


def _check_vllm(path: Path, rollout: Rollout) -> None:
    """What vLLM would refuse after a minute of starting is refused here.

    Raises:
        UsageError: a setting of `speculation`, or a model folder that is not there.
    """
    if rollout.engine != "vllm":
        return
    errors = [f"speculation: {text}" for text in vllm.check_speculation(rollout.speculation).errors]
    draft = rollout.speculation.get("model")
    for key, model, role in (
        ("vllm.target", rollout.vllm.target, "target"),
        ("speculation.model", draft, "draft"),
    ):
        if isinstance(model, str) and (missing := vllm.missing_model(model, role)):
            errors.append(f"{key}: {missing}")
    if errors:
        raise UsageError("\n".join(f"{path}: {text}" for text in errors))


def check_pair(path: Path, rollout: Rollout) -> None:
    """A target and a draft that cannot be a pair start all the same, and fail under load.

    Raises:
        UsageError: what `speccheck doctor` calls bad of the models that we would start.
    """
    if rollout.engine != "vllm":
        return  # the embedded engine refuses such a pair itself
    bad = [check for check in check_models(rollout) if check.state == "bad"]
    if bad:
        raise UsageError("\n".join(f"{path}: {check.name}: {check.text}" for check in bad))


def read_policy(path: Path, rollout: Rollout, corpus: Corpus) -> eligibility.Eligibility | None:
    """The eligibility policy that a rollout names, checked; None where it names none.

    Raises:
        UsageError: with file and line.
    """
    if rollout.eligibility is None:
        return None
    file = policy_path(path, rollout)
    policy = eligibility.load_eligibility(
        file,
        routes=[route.name for route in rollout.routes],
        features={name for prompt in corpus.prompts for name in prompt.features},
    )
    for rule in policy.rules:
        if rule.k is not None and not eligibility.usable_k(rollout, rule.k):
            configured = rollout.speculation["num_speculative_tokens"]
            raise UsageError(
                f"{file}: rule {rule.name!r}: k {rule.k}: the rollout's servers run"
                f" num_speculative_tokens {configured}, and"
                + (" take no more" if rollout.engine == "embedded" else " vLLM takes no other")
            )
    return policy


def policy_path(path: Path, rollout: Rollout) -> Path:
    """Where the eligibility policy of a rollout file is, or would be."""
    name = rollout.eligibility or "eligibility.yaml"
    return resolve(name, path, package_dir("rules") / "eligibility.yaml")


def _table_digest(path: Path, rollout: Rollout) -> str:
    """Digest of the fixture table; what is wrong with the file is for its loader to say."""
    table = resolve(rollout.fixture.table, path, package_dir("corpora") / "fixture_t4.json")
    return digest("table", table.read_text(encoding="utf-8")) if table.is_file() else ""


@contextmanager
def open_run(path: Path, out: Path, report: Reporter, *, fresh: bool) -> Iterator[RunContext]:
    """Open the run that a rollout file names, in `out`; begin it where it is new.

    Args:
        path: rollout.yaml.
        out: folder for the store, the servers' logs and the packet; made if it does not exist.
        report: where progress goes.
        fresh: measure anew although the run exists: a new generation of it.

    Raises:
        UsageError: the rollout, its rules or its corpus are wrong.
        StoreError: the folder or the store cannot be written.
    """
    rollout, guardrails, corpus = read_rollout(path)
    policy = read_policy(path, rollout, corpus)
    check_pair(path, rollout)
    hooks.secret_of(rollout.fallback.hooks)  # not in the canary, when a route falls back
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{out}: cannot be made ({error.strerror}); choose another --out"
        ) from None
    config: dict[str, Any] = {
        # What happens to live traffic changes nothing that a run measures.
        "rollout": rollout.model_dump(mode="json", exclude={"fallback", "gateway"}),
        "guardrails": guardrails.model_dump(mode="json"),
        "speccheck": __version__,
        "fixture_table": _table_digest(path, rollout),
    }
    if policy is not None:
        config["eligibility"] = policy.model_dump(mode="json", exclude_none=True)
    with store.Store.open(out / STORE_NAME) as opened:
        # Until when decisions hold decides none of them: another date is the same run.
        expires = config["rollout"]["expires"]
        identity = [{**config, "rollout": config["rollout"] | {"expires": None}}, corpus.digest]
        known = {run.run_id for run in opened.runs()}
        generation = 0
        while digest("run", [*identity, generation + 1]) in known:
            generation += 1
        if fresh and digest("run", [*identity, generation]) in known:
            generation += 1
        run_id = digest("run", [*identity, generation])
        now = time.time_ns()
        begun = store.Run(
            run_id=run_id,
            created_at_ns=now,
            seed=rollout.seed,
            corpus_digest=corpus.digest,
            rules_digest=digest("rules", config["guardrails"]),
            config={**config, "generation": generation, "machine": launch.machine()},
        )
        if run_id in known:
            # The machine may have had an update since; another one is refused before it measures.
            machine = opened.run(run_id).config["machine"]
            begun = replace(begun, config={**begun.config, "machine": machine})
            opened.put_expiry(run_id, expires)
        opened.begin_run(begun, wall_ns=now, clock_ns=time.perf_counter_ns(), boot=launch.boot_id())
        context = RunContext(path, rollout, guardrails, corpus, opened, run_id, out, report, policy)
        with context._stack:  # noqa: SLF001 (ours)
            yield context
