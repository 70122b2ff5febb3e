"""The parent: it binds the address, keeps the workers alive, decides, and alone writes the store.

It is on the way of no request. What it decides goes onto the board; what the workers saw comes in
as receipts, feeds the route states and waits for the store. A worker that dies is started again;
its clients see their connection closed, and nothing else is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.multiprocess import mark_process_dead

from speccheck import __version__, context, eligibility, fallback, launch, telemetry
from speccheck.client import api_url
from speccheck.config import Guardrails, Rollout
from speccheck.errors import EngineError, SpeccheckError, StoreError, UsageError
from speccheck.gateway.board import Board
from speccheck.gateway.choose import Standing
from speccheck.gateway.outbox import LONGEST_LINE, Moved, Writer, Written, written_of
from speccheck.hooks import Event, Hooks
from speccheck.records import Arm, ArmDescription, Transition, digest
from speccheck.store import RecordedTransition, Run, Store

FOLDER = "gateway"
"""Of the gateway's state, within --out: board, off/, metrics/, pid."""
_LOOK_S = 1.0
_GRACE_S = 15.0
_SOON_S = 5.0
"""A worker that dies sooner after its start is started again with a pause."""


@dataclass
class Options:
    """What the command line says over the rollout; None: as it says."""

    host: str | None = None
    port: int | None = None
    workers: int | None = None


@dataclass
class Worker:
    """A serving process and our end of its line."""

    number: int
    process: asyncio.subprocess.Process
    line: socket.socket
    started_s: float
    is_ready: bool = False


@dataclass
class Parent:
    """The gateway's parent process, once the arms are there."""

    path: Path
    rollout: Rollout
    policy: eligibility.Eligibility | None
    pair: launch.Arms
    folder: Path
    run_id: str
    listener: socket.socket
    writer: Writer
    machines: dict[str, fallback.Machine]
    hooks: Hooks
    no_joint: str
    special: list[int]
    max_model_len: int | None
    say: Callable[[str], None]
    ready: Callable[[str], None]
    workers: dict[int, Worker] = field(default_factory=dict)
    last: dict[str, Transition] = field(default_factory=dict)
    """The last transition of each route that had one."""
    restarts: int = 0
    queued: int | None = None
    _board: Board | None = None
    _told: str = ""
    _notes: fallback.Notes = field(init=False)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _all_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._notes = fallback.Notes(self.rollout.fallback.max_queued)

    # -- deciding ---------------------------------------------------------------------------------

    def standings(self) -> dict[str, Standing]:
        """What is decided for each route: the guard's share, of the share that is configured."""
        config = self.rollout.gateway
        return {
            name: Standing(
                config.share_of(name) * machine.share,
                str(machine.state),
                "" if name not in self.last else self.last[name].why,
            )
            for name, machine in self.machines.items()
        }

    def said(self) -> dict[str, Any]:
        """The board's value."""
        policy = self.policy
        return {
            "routes": {name: asdict(state) for name, state in self.standings().items()},
            "policy": None if policy is None else policy.model_dump(mode="json", exclude_none=True),
            "policy_version": eligibility.policy_version(self.rollout, policy),
            "queued": self.queued,
            "restarts": self.restarts,
            "receipts": {
                "lost": self.writer.lost,
                "written": self.writer.written,
                "waiting": self.writer.waiting,
                "scrapes_lost": self.writer.samples_lost,
                "store": self.writer.problem or "ok",
            },
        }

    def publish(self) -> None:
        """Tell the workers, if there is anything new."""
        value = self.said()
        text = json.dumps(value, sort_keys=True)
        if self._board is not None and text != self._told:
            self._board.publish(value)
            self._told = text

    def observe(self, item: Written, n_bytes: int) -> None:
        """A receipt came in: for the store, and for the guards of all routes that it concerns."""
        receipt, _ = item
        self.writer.put(item, n_bytes)
        at, is_late = self._notes.receipt(receipt)
        if is_late:
            mark = fallback.late_mark(receipt.receipt_id, at)
            self.writer.put_sample(Arm.SPECULATIVE, mark)
        for name, machine in self.machines.items():
            if receipt.priority == "protected" or receipt.route == name:
                share = self.rollout.gateway.share_of(name) * machine.share
                is_drawn = 0 < share < 1 and not receipt.kept_off
                self._moved(machine.observe(receipt, at, share=share if is_drawn else None))

    def _moved(self, transition: Transition | None) -> bool:
        """A guard decided: the workers obey it from the next request on."""
        if transition is None:
            return False
        self.last[transition.route] = transition
        self.publish()
        wall_ns = time.time_ns() - (time.perf_counter_ns() - transition.at_ns)
        settings = self.machines[transition.route].settings.digest
        self.writer.put_transition(Moved(transition, wall_ns, settings))
        self.hooks.fire(Event(self.rollout.name, transition, wall_ns))
        self.say(f"{transition.route}: {transition.before} -> {transition.after}: {transition.why}")
        return True

    def adopt(self, rows: list[RecordedTransition], overtaken: set[str]) -> None:
        """Be where the store says a route is, if somebody else moved it: an operator's reset."""
        for name, machine in self.machines.items():
            kept = [(row.transition, row.wall_ns) for row in rows if row.transition.route == name]
            if not kept or (kept[-1][0].seq < machine.seq and name not in overtaken):
                continue
            now_wall_ns, now_ns = time.time_ns(), time.perf_counter_ns()
            self.machines[name] = fallback.resume(
                machine.settings, name, kept, now_wall_ns=now_wall_ns, now_ns=now_ns
            )
            self.last[name] = kept[-1][0]
            self.begin(name, now_wall_ns, now_ns)
            self.say(f"{name}: {self.machines[name].state}, moved by somebody else")
        self.publish()

    def begin(self, name: str, wall_ns: int, clock_ns: int) -> None:
        """Note that a route's machine was made anew, so that it can be replayed."""
        began = fallback.Began(clock_ns, wall_ns, self.machines[name].seq)
        self.writer.put_sample(Arm.SPECULATIVE, self._notes.began(name, began))

    def reload(self) -> None:
        """Read the policy anew; a wrong one changes nothing."""
        try:
            rollout, _, corpus = context.read_rollout(self.path)
            policy = context.read_policy(self.path, rollout, corpus)
        except (
            SpeccheckError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # YAML has them all
            self.say(f"the policy stays as it was: {error}")
            return
        if [r.name for r in rollout.routes] != [r.name for r in self.rollout.routes]:
            self.say("the policy stays as it was: other routes need a restart")
            return
        shares = {"share": rollout.gateway.share, "shares": rollout.gateway.shares}
        gateway = self.rollout.gateway.model_copy(update=shares)
        before = self.rollout, self.policy
        self.rollout = self.rollout.model_copy(update={"gateway": gateway})
        self.policy = policy
        try:
            self.publish()
        except ValueError as error:  # too long
            self.rollout, self.policy = before
            self.say(f"the policy stays as it was: {error}")
            return
        self.say("policy and shares were read again")

    # -- workers ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until a signal says otherwise."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        self._board = Board.create(self.folder / "board", self.said())
        self._told = json.dumps(self.said(), sort_keys=True)
        numbers = range(self.rollout.gateway.workers)
        tasks: list[asyncio.Task[Any]]
        tasks = [asyncio.create_task(self._keep(number)) for number in numbers]
        tasks.append(asyncio.create_task(self._look()))
        stopping: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        all_ready: asyncio.Task[Any] = asyncio.create_task(self._all_ready.wait())
        try:
            await asyncio.wait([stopping, all_ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._all_ready.is_set():
                host, port = self.listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                self.ready(f"http://{shown}:{port}")
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._stopping.set()
            await self._stop_workers()
            for task in (*tasks, stopping, all_ready):
                task.cancel()
            await asyncio.gather(*tasks, stopping, all_ready, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """Start a worker, and again whenever it ends."""
        pause_s = 0.0
        while not self._stopping.is_set():
            worker = await self._start(number)
            await self._read(worker)
            code = await worker.process.wait()
            worker.line.close()
            # Or what it had in flight would be for ever.
            mark_process_dead(  # type: ignore[no-untyped-call]
                worker.process.pid, str(self.folder / "metrics")
            )
            if self._stopping.is_set():
                return
            if not worker.is_ready and self.restarts == 0:
                raise EngineError(
                    f"worker {number} ended with code {code} before it could serve; "
                    f"see {self.folder / 'worker.log'}"
                )
            self.restarts += 1
            if self._board is not None:
                self._board.set_count(number, 0)
            self.say(f"worker {number} ended with code {code}; it is started again")
            is_soon = time.monotonic() - worker.started_s < _SOON_S
            pause_s = min(_SOON_S, pause_s * 2 or 0.1) if is_soon else 0.0
            await asyncio.sleep(pause_s)
            self.publish()

    async def _start(self, number: int) -> Worker:
        attached = self.rollout.attached if self.rollout.engine == "attached" else None
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        settings = {
            "config": self.rollout.gateway.model_dump(mode="json"),
            "arms": {str(arm.arm): asdict(arm) for arm in self.pair},
            "api_key_env": None if attached is None else attached.api_key_env,
            "extra": {} if attached is None else attached.extra,
            "omit": [] if attached is None else attached.omit,
            "folder": str(self.folder),
            "run_id": self.run_id,
            "worker": number,
            "no_joint": self.no_joint,
            "special": self.special,
            "max_model_len": self.max_model_len,
        }
        log = (self.folder / "worker.log").open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "speccheck.gateway.worker"),
                *("--settings", json.dumps(settings)),
                *("--listener", str(self.listener.fileno()), "--line", str(theirs.fileno())),
                pass_fds=(self.listener.fileno(), theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.folder / "metrics")},
                process_group=0,  # Ctrl-C reaches us first; workers end in order
            )
        finally:
            theirs.close()
            log.close()
        worker = Worker(number, process, ours, time.monotonic())
        self.workers[number] = worker
        return worker

    async def _read(self, worker: Worker) -> None:
        """Take a worker's receipts until its line ends."""
        reader, writer = await asyncio.open_connection(sock=worker.line, limit=2 * LONGEST_LINE)
        try:
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break  # it died while it wrote
                if not worker.is_ready:
                    worker.is_ready = "ready" in json.loads(line)
                    if all(w.is_ready for w in self.workers.values()):
                        self._all_ready.set()
                    continue
                self.observe(written_of(line), len(line))
        except (ConnectionError, ValueError) as error:
            self.say(f"worker {worker.number}: its line broke ({error})")
        finally:
            writer.close()

    async def _stop_workers(self) -> None:
        """Ask them to end, read what they still say, and do not wait for ever."""
        for worker in self.workers.values():
            with suppress(OSError):
                worker.line.shutdown(socket.SHUT_WR)
        waits = [asyncio.create_task(w.process.wait()) for w in self.workers.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_GRACE_S)
            for worker in self.workers.values():
                if late and worker.process.returncode is None:
                    worker.process.kill()
            await asyncio.gather(*waits)

    # -- looking ----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Once a second: the servers' queues, time for the machines, and what the board says."""
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                self.take_scrapes(
                    await asyncio.gather(*(self._scrape(session, arm) for arm in self.pair))
                )
                now_ns = time.perf_counter_ns()
                self._notes.ticked(now_ns)
                for machine in self.machines.values():
                    while self._moved(machine.tick(now_ns)):
                        pass
                self.publish()
                await asyncio.sleep(_LOOK_S)

    def take_scrapes(self, snapshots: Sequence[telemetry.Snapshot]) -> None:
        """A look at both servers: for the guards, and for the store where it says anything new."""
        samples = self._notes.scrapes(
            [fallback.Sample(arm.arm, one) for arm, one in zip(self.pair, snapshots, strict=True)]
        )
        for sample in samples:
            if sample.arm is Arm.SPECULATIVE:
                waiting = sample.snapshot.total(telemetry.WAITING)
                self.queued = None if waiting is None else int(waiting)
            for machine in self.machines.values():
                self._moved(machine.telemetry(sample, sample.snapshot.taken_ns))
        for of, kept in self._notes.worth_keeping(samples):
            self.writer.put_sample(of, kept)

    async def _scrape(
        self, session: aiohttp.ClientSession, arm: ArmDescription
    ) -> telemetry.Snapshot:
        return await telemetry.scrape_or_failure(
            session,
            arm.url,
            now_ns=time.perf_counter_ns,
            names=telemetry.STALLING,
            api_key=self.pair.api_key,
        )


def serve(
    path: Path,
    out: Path,
    options: Options,
    *,
    say: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:
    """Run the gateway of a rollout until SIGTERM or SIGINT.

    Args:
        path: rollout.yaml.
        out: folder for receipts, logs and state; made if it does not exist.
        options: what the command line says instead of the rollout.
        say: told what happens, a line at a time.
        ready: told the URL when requests are answered.

    Raises:
        UsageError: the rollout or its policy is wrong.
        EngineError: an arm does not answer at the start, or the address is taken.
        StoreError: the folder cannot be written.
    """
    rollout, rules, corpus = context.read_rollout(path)
    policy = context.read_policy(path, rollout, corpus)
    context.check_pair(path, rollout)
    given = {name: value for name, value in asdict(options).items() if value is not None}
    rollout = rollout.model_copy(update={"gateway": rollout.gateway.model_copy(update=given)})
    config = rollout.gateway
    token_env = config.admin_token_env
    if token_env and not os.environ.get(token_env):
        raise UsageError(
            f"gateway.admin_token_env: the environment variable {token_env} is not set"
        )
    if rollout.engine == "vllm" and rollout.vllm.layout == "alternate":
        raise UsageError(
            f"{path}: vllm.layout is alternate, and the gateway sends to both servers at once; use "
            "side_by_side with smaller memory fractions, or a GPU for each server"
        )
    with (
        _held(out) as folder,
        _listen(config.host, config.port) as listener,
        launch.arms(rollout, out / "logs", say=say) as pair,
    ):
        no_joint = "hand_over: off" if config.hand_over == "off" else why_no_joint(pair)
        if no_joint and config.hand_over != "off":
            say(
                f"no hand-over in mid-answer: {no_joint}"
                + ("; streams stay on target-only" if config.hand_over == "refuse" else "")
            )
        run = _run_of(rollout, rules, policy)

        begun: list[bool] = []

        def begin(store: Store) -> None:
            """The run's row and this process's anchor once, then where its clock stands."""
            clocks = {
                "wall_ns": time.time_ns(),
                "clock_ns": time.perf_counter_ns(),
            }
            if begun:
                store.resume_run(run.run_id, boot=launch.boot_id(), **clocks)
                return
            store.begin_run(run, boot=launch.boot_id(), **clocks)
            for arm in pair:
                store.put_arm(run.run_id, arm)
            begun.append(True)

        def found(rows: list[RecordedTransition], overtaken: set[str]) -> None:
            with suppress(RuntimeError):  # the loop has ended: the last flush
                loop.call_soon_threadsafe(parent.adopt, rows, overtaken)

        writer = Writer(
            out / context.STORE_NAME,
            begin=begin,
            limit=config.receipts,
            every_s=config.flush_s,
            say=say,
            rollout=rollout.name,
            run_id=run.run_id,
            found=found,
        )
        now_wall_ns, now_ns = time.time_ns(), time.perf_counter_ns()
        telling = Hooks(rollout.fallback.hooks, say=say)
        parent = Parent(
            path,
            rollout,
            policy,
            pair,
            folder,
            run.run_id,
            listener,
            writer,
            _machines(rollout, rules, out / context.STORE_NAME, now_wall_ns, now_ns),
            telling,
            no_joint,
            special_ids(pair),
            launch.longest_context(pair.target_only, pair.api_key),
            say,
            ready,
        )
        for name in parent.machines:
            parent.begin(name, now_wall_ns, now_ns)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            writer.start()
            try:
                runner.run(parent.run())
            finally:
                lost = writer.stop()
                telling.close()
                if lost:
                    say(f"lost: {lost}")


def _machines(
    rollout: Rollout, rules: Guardrails, store: Path, now_wall_ns: int, now_ns: int
) -> dict[str, fallback.Machine]:
    """The guard of each route, standing where the store says that it stood.

    Raises:
        StoreError: the store cannot be read; a route that fell back must not begin enabled.
    """
    rows: list[RecordedTransition] = []
    if store.exists():
        with Store.read(store) as opened:
            rows = opened.transitions(rollout.name)
    return {
        route.name: fallback.resume(
            fallback.settings_of(rollout, rules, route.name),
            route.name,
            [(row.transition, row.wall_ns) for row in rows if row.transition.route == route.name],
            now_wall_ns=now_wall_ns,
            now_ns=now_ns,
        )
        for route in rollout.routes
    }


@contextmanager
def _held(out: Path) -> Iterator[Path]:
    """The gateway's own folder in `out`, made, emptied of what an earlier one left, and held.

    Held by a lock and not by a PID: those are given out again, in a container every time.
    """
    folder = out / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pid = (folder / "pid").open("a+", encoding="ascii")
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be made ({error.strerror}); choose another --out"
        ) from None
    with pid:
        try:
            fcntl.flock(pid, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{out}: a gateway runs there already (PID {running(out)})") from None
        try:
            pid.truncate(0)
            pid.write(str(os.getpid()))
            pid.flush()
            for name in ("off", "metrics"):
                (folder / name).mkdir(exist_ok=True)
            for old in (folder / "metrics").glob("*.db"):
                old.unlink()
            if not (folder / "key").exists():
                (folder / "key").touch(0o600)
                (folder / "key").write_bytes(secrets.token_bytes(32))
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be written ({error.strerror}); choose another --out"
            ) from None
        yield folder


def running(out: Path) -> int | None:
    """The process of the gateway that has its state in `out`; None where there is none."""
    with suppress(OSError), (out / FOLDER / "pid").open(encoding="ascii") as pid:
        try:
            fcntl.flock(pid, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(pid.read() or 0)  # 0: it has just begun
    return None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise EngineError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --port"
        ) from error
    return listener


def _run_of(rollout: Rollout, rules: Guardrails, policy: eligibility.Eligibility | None) -> Run:
    """The run of live traffic: the same rollout, rules, policy and version, the same run."""
    config = {
        "gateway": True,
        "rollout": rollout.model_dump(mode="json", exclude={"gateway"}),
        "guardrails": rules.model_dump(mode="json"),
        "eligibility": None
        if policy is None
        else policy.model_dump(mode="json", exclude_none=True),
        "speccheck": __version__,
    }
    return Run(
        run_id=digest("run", config),
        created_at_ns=time.time_ns(),
        seed=rollout.seed,
        corpus_digest="",
        rules_digest="",
        config=config,
    )


# --- what the arms can do -----------------------------------------------------------------------


def why_no_joint(pair: launch.Arms) -> str:
    """Tries out what a hand-over needs of target-only; why it cannot be had, or nothing."""
    for arm in pair:
        parser = next(
            (v for k, v in launch.flat(arm.config).items() if k.endswith("reasoning_parser") and v),
            None,
        )
        if parser is not None:
            return f"the {arm.arm} server parses reasoning ({parser})"
    arm = pair.target_only
    asked = {"model": arm.model, "prompt": "a b", "max_tokens": 1, "temperature": 0}
    answer = _ask(arm.url, "/v1/completions", {**asked, "return_token_ids": True}, pair.api_key)
    try:
        choice = answer["choices"][0]
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        again = {**asked, "prompt": [*prompt, *ids], "return_token_ids": True}
        rest = _ask(arm.url, "/v1/completions", again, pair.api_key)["choices"][0]
        if rest["prompt_token_ids"] != [*prompt, *ids] or not rest["token_ids"]:
            return f"{arm.url} does not continue from token ids"
        tokens = {"model": arm.model, "tokens": prompt}
        if not isinstance(_ask(arm.url, "/detokenize", tokens, pair.api_key)["prompt"], str):
            return f"{arm.url} does not answer /detokenize"
    except (KeyError, IndexError, TypeError):
        why = answer.get("why", "it sends no token ids") if isinstance(answer, dict) else "no JSON"
        return f"{arm.url}: {why}"
    return ""


def _ask(url: str, path: str, body: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The JSON of a reply, or `{"why": ...}`."""
    request = urllib.request.Request(  # noqa: S310 (http(s) only, checked in config)
        api_url(url, path),
        json.dumps(body).encode(),
        {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    try:
        value = launch.json_of(request, timeout_s=60)
    except urllib.error.HTTPError as error:
        return {"why": f"{path} answers HTTP {error.code}"}
    except launch.NO_REPLY as error:
        return {"why": f"{path} does not answer ({getattr(error, 'reason', error)})"}
    return value if isinstance(value, dict) else {"why": f"{path} answers no JSON object"}


def special_ids(pair: launch.Arms) -> list[int]:
    """Ids of the target's special tokens, where its tokenizer lies on this machine."""
    folder = launch.model_folder(pair.target_only)
    try:
        raw = json.loads((Path(folder or "") / "tokenizer.json").read_text(encoding="utf-8"))
        return [token["id"] for token in raw["added_tokens"] if token["special"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
