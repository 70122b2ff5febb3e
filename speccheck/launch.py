"""Start, wait for, describe and stop the two arms, or attach to servers that run already.

What leaves this module is an `ArmDescription` per arm: URL, model, engine and version, the
speculative config and everything else that was captured from the server. Nothing above `client`
asks which engine it is. Both embedded arms are the same program, the same weights and the same
code path; only the speculative config differs, and `differences` says so from what the servers
themselves report.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccheck import gpus, supervise, vllm
from speccheck.config import PACKAGED, Rollout, VllmServers
from speccheck.engine.settings import SpeculativeSettings
from speccheck.errors import EngineError, UsageError
from speccheck.records import Arm, ArmDescription

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
CONTROL_LENGTHS = (4, 12)
"""Of the prompt-lookup controls of a sweep: two points of a line, the farther within the engine's
limit of 15. What they draft on average is shorter, since a match may end the text.
"""
_LOG_TAIL_LINES = 12
_SERVER_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Arms:
    """The running pair. `api_key` is kept apart from the descriptions, which are stored."""

    target_only: ArmDescription
    speculative: ArmDescription
    api_key: str | None = None
    turns: Turns | None = None
    """Set where only one of the two runs at a time: an arm is then taken before it is used."""

    def __iter__(self) -> Iterator[ArmDescription]:
        return iter((self.target_only, self.speculative))

    def __getitem__(self, arm: Arm) -> ArmDescription:
        return self.target_only if arm is Arm.TARGET_ONLY else self.speculative


@dataclass
class Turns:
    """Two servers of which only one fits: taking one stops the other (`vllm.layout: alternate`)."""

    start: Callable[[Arm], subprocess.Popen[str]]
    """Starts an arm's server and waits until it is ready."""
    _now: Arm | None = None
    _process: subprocess.Popen[str] | None = None

    def take(self, arm: Arm) -> None:
        """Have this arm's server running.

        Raises:
            EngineError: it does not start.
        """
        if self._now is arm and self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._process, self._now = self.start(arm), arm

    def stop(self) -> None:
        """Have none running."""
        if self._process is not None:
            _stop([self._process], vllm.STOP_TIMEOUT_S)
        self._process = self._now = None


@contextmanager
def arms(rollout: Rollout, log_dir: Path, *, say: Callable[[str], None]) -> Iterator[Arms]:
    """The pair that a rollout names, ready to answer; stopped on the way out if we started it.

    Args:
        rollout: what to start or attach to.
        log_dir: folder for the servers' logs (`target_only.log`, `speculative.log`).
        say: told how the start goes on, where it takes long.

    Raises:
        EngineError: a server does not start, does not answer, or dies on the way.
        UsageError: the API key's environment variable is not set.
    """
    if rollout.engine == "attached":
        yield _attach(rollout)
        return
    if rollout.engine == "vllm":
        with _vllm(rollout, log_dir, say) as both:
            yield both
        return
    processes: list[subprocess.Popen[str]] = []
    try:
        urls: dict[Arm, str] = {}
        for arm, config in ((Arm.TARGET_ONLY, None), (Arm.SPECULATIVE, rollout.speculation)):
            process, url = _start_embedded(rollout, arm, config, log_dir / f"{arm}.log")
            processes.append(process)
            urls[arm] = url
        logs = [log_dir / f"{arm}.log" for arm in urls]
        with _ends_are_told(list(zip(processes, logs, strict=True))):
            yield Arms(
                _describe(Arm.TARGET_ONLY, urls[Arm.TARGET_ONLY], None, None),
                _describe(Arm.SPECULATIVE, urls[Arm.SPECULATIVE], None, None),
            )
    finally:
        _stop(processes)


_DYING_S = 1.0
"""From the last connection that a process takes until it has ended."""


@contextmanager
def _ends_are_told(
    servers: Sequence[tuple[subprocess.Popen[str], Path]],
) -> Iterator[None]:
    """What fails while a server of ours has ended fails because of that.

    Raises:
        EngineError: how the server ended and what its log says last, in place of that nobody could
            connect to it.
    """
    try:
        yield
    except EngineError as error:
        give_up = time.monotonic() + _DYING_S
        while time.monotonic() < give_up:
            for process, log in servers:
                if how := _end(process, log):
                    raise EngineError(
                        f"{log.stem} server: ended in mid-run with {how}; the same command starts "
                        f"it again and resumes{vllm.reason(log)}"
                    ) from error
            time.sleep(0.05)
        raise


def _end(process: subprocess.Popen[str], log: Path) -> str:
    """How a server ended, empty while it runs; a supervisor outlives its server by seconds."""
    with suppress(OSError):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(supervise.ENDED):
                return line.removeprefix(supervise.ENDED)
    code = process.poll()
    return "" if code is None else supervise.described(code)


def describe(rollout: Rollout, then: Arms | None = None) -> Arms:
    """What a rollout's arms are now: attached servers are asked, others are not started.

    What only a running vLLM says of itself (its settings) is taken from `then`, the pair that was
    measured; how it would be started, its version and its model files are as they are now.

    Raises:
        EngineError: an attached server does not answer, there is no vLLM, or no pair of one.
        UsageError: settings that no engine takes, or no API key.
    """
    if rollout.engine == "attached":
        return _attach(rollout)
    if rollout.engine == "vllm":
        if then is None:
            raise EngineError("vLLM is asked while it runs: there is no pair that was measured")
        installed = vllm.require(rollout.vllm.python)
        return Arms(
            _would_be(then.target_only, rollout, installed, None),
            _would_be(then.speculative, rollout, installed, rollout.speculation),
        )
    return Arms(
        _embedded_description(rollout, Arm.TARGET_ONLY, None),
        _embedded_description(rollout, Arm.SPECULATIVE, rollout.speculation),
    )


@dataclass(frozen=True, slots=True)
class SweepServers:
    """One target-only server and a speculative one per proposal length, ready to answer."""

    arms: Mapping[int, ArmDescription]
    """Proposal length -> server; 0 is target-only."""
    controls: Mapping[int, ArmDescription]
    """Proposal length -> prompt-lookup server, whose drafts cost nothing: for calibration."""
    pids: Mapping[str, int]
    """URL -> process of those that we started."""
    api_key: str | None = None


@contextmanager
def sweep_servers(
    rollout: Rollout, ks: Sequence[int], log_dir: Path, say: Callable[[str], None]
) -> Iterator[SweepServers]:
    """Servers that differ in their proposal length only; stopped on the way out if we started them.

    Attached servers have the proposal length that they were started with, so there is one, whatever
    `ks` asks for, and no control. vLLM has no control either: its prompt lookup runs on another
    scheduler.

    Args:
        rollout: what to start or attach to.
        ks: proposal lengths.
        log_dir: folder for the servers' logs (`sweep-k0.log` ...).
        say: told of each server that is started.

    Raises:
        EngineError: a server does not start, does not answer, or dies on the way.
        UsageError: the API key's environment variable is not set, an attached server does not say
            its proposal length, the embedded engine does not take one that is asked for, or vLLM's
            servers take turns.
    """
    from speccheck.engine.settings import EngineSettings

    if rollout.engine == "attached":
        pair = _attach(rollout)
        k = (pair.speculative.speculative_config or {}).get("num_speculative_tokens")
        if not isinstance(k, int) or k < 1:
            raise UsageError(
                "speculation.num_speculative_tokens: the attached server does not say its proposal "
                "length, so the rollout must"
            )
        yield SweepServers({0: pair.target_only, k: pair.speculative}, {}, {}, pair.api_key)
        return
    if rollout.engine == "vllm":
        with _vllm_sweep(rollout, ks, log_dir, say) as servers:
            yield servers
        return
    configs: dict[tuple[str, int], Mapping[str, Any] | None] = {("k", 0): None}
    for k in ks:
        configs["k", k] = {**rollout.speculation, "num_speculative_tokens": k}
    if rollout.speculation["method"] == "draft_model":
        kept = {
            name: value
            for name, value in rollout.speculation.items()
            if name == "rejection_sample_method"
        }
        for k in CONTROL_LENGTHS:
            configs["lookup", k] = {
                **kept,
                "method": "ngram",
                "num_speculative_tokens": k,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
    for config in configs.values():
        EngineSettings.parse(_embedded_settings(rollout, config))  # before anything is started
    processes: list[subprocess.Popen[str]] = []
    logs: list[Path] = []
    found: dict[str, dict[int, ArmDescription]] = {"k": {}, "lookup": {}}
    pids: dict[str, int] = {}
    try:
        for (kind, k), config in configs.items():
            say(f"  starting server {len(processes) + 1} of {len(configs)}")
            arm = Arm.TARGET_ONLY if config is None else Arm.SPECULATIVE
            log = log_dir / f"sweep-{kind}{k}.log"
            process, url = _start_embedded(rollout, arm, config, log)
            processes.append(process)
            logs.append(log)
            pids[url] = process.pid
            found[kind][k] = _describe(arm, url, None, None)
        with _ends_are_told(list(zip(processes, logs, strict=True))):
            yield SweepServers(found["k"], found["lookup"], pids)
    finally:
        _stop(processes)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def accepted(differing: Iterable[str], waive: Sequence[str]) -> dict[str, str]:
    """The differences between the arms that do not make the comparison void: name -> why."""
    why = {name: "follows from speculation" for name in differing if vllm.follows(name)}
    return why | {name: "waived by name" for name in differing if name in waive}


@contextmanager
def draft(rollout: Rollout, log_dir: Path) -> Iterator[ArmDescription | None]:
    """The draft model served alone, target-only, or None where there is none to serve.

    What a distribution test needs to know which tokens the draft prefers. Attached: the URL that
    the rollout names as `draft`. No third vLLM server is started: two may fill the GPU.

    Raises:
        EngineError: the server does not start or answer.
    """
    attached, speculation = rollout.attached, rollout.speculation
    if rollout.engine == "attached":
        url = attached.draft if attached is not None else None
        yield None if url is None else _describe(Arm.TARGET_ONLY, url, None, api_key(rollout))
        return
    if rollout.engine == "vllm" or speculation["method"] != "draft_model":
        yield None
        return
    folder = str(SpeculativeSettings.parse(speculation).model_dir)
    alone = rollout.model_copy(
        update={"embedded": rollout.embedded.model_copy(update={"model": folder})}
    )
    log = log_dir / "draft.log"
    process, url = _start_embedded(alone, "draft", None, log)
    try:
        with _ends_are_told([(process, log)]):
            yield _describe(Arm.TARGET_ONLY, url, None, None)
    finally:
        _stop([process])


def differences(pair: Arms) -> dict[str, tuple[Any, Any]]:
    """What differs between the arms beside the speculative config: name -> (target, speculative).

    Names are dotted paths into the captured config. Empty means the comparison is a fair one as
    far as the servers report their configuration.
    """
    found: dict[str, tuple[Any, Any]] = {}
    if pair.target_only.engine != pair.speculative.engine:
        found["engine"] = (pair.target_only.engine, pair.speculative.engine)
    if pair.target_only.model != pair.speculative.model:
        found["model"] = (pair.target_only.model, pair.speculative.model)
    left, right = flat(pair.target_only.config), flat(pair.speculative.config)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            found[name] = (left.get(name), right.get(name))
    return found


def longest_context(arm: ArmDescription, key: str | None) -> int | None:
    """Tokens of prompt and answer that a server takes, by its own account; None if it says none.

    Raises:
        EngineError: the server does not answer.
    """
    for entry in _models(arm.url, key):
        if entry["id"] == arm.model and isinstance(entry.get("max_model_len"), int):
            return int(entry["max_model_len"])
    return None


def _models(url: str, key: str | None) -> list[Mapping[str, Any]]:
    """What a server says that it serves: entries that have an id."""
    listed = (_get_json(url, "/v1/models", key) or {}).get("data")
    return [
        entry
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)
    ]


def count_prompt_tokens(
    rollout: Rollout, chats: Mapping[str, Sequence[Mapping[str, str]]]
) -> dict[str, int]:
    """Name -> prompt length in tokens, by the target's own tokenizer and chat template.

    Attached servers are asked (`/tokenize`, vLLM has it); what they do not answer is left out, and
    so is a model that vLLM would fetch.

    Raises:
        EngineError: the model folder has no readable tokenizer.
    """
    if not chats:
        return {}
    if rollout.engine == "attached":
        attached = rollout.attached
        if attached is None:
            return {}
        key = os.environ.get(attached.api_key_env) if attached.api_key_env else None
        asked = {
            name: render(attached.target_only, attached.model, messages, key)
            for name, messages in chats.items()
        }
        return {
            name: answer["count"]
            for name, answer in asked.items()
            if answer is not None and isinstance(answer["count"], int)
        }
    from speccheck.engine.settings import EngineSettings
    from speccheck.engine.text import Tokenizer

    if rollout.engine == "vllm":
        folder = Path(vllm.model_path(rollout.vllm.target))
        if not (folder / "tokenizer.json").is_file():
            return {}
    else:
        folder = EngineSettings(rollout.embedded.model).model_dir
    tokenizer = Tokenizer(folder)
    return {
        name: len(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False))
        for name, messages in chats.items()
    }


def render(
    url: str, model: str | None, messages: Sequence[Mapping[str, str]], key: str | None
) -> dict[str, Any] | None:
    """What a server makes of a chat (`/tokenize`, vLLM has it): count and tokens; None if it will
    not say.
    """
    body: dict[str, Any] = {"messages": list(messages)}
    if model is not None:
        body["model"] = model
    request = urllib.request.Request(  # noqa: S310 (http(s) only, checked in config)
        f"{url}/tokenize",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    try:
        value = json_of(request, timeout_s=10)
    except NO_REPLY:
        return None  # not known; what then holds is for the caller to say
    if not isinstance(value, dict) or not isinstance(value.get("tokens"), list):
        return None
    return {name: value.get(name) for name in ("count", "tokens")}


def boot_id() -> str:
    """Which start of this machine its monotonic clock counts from; empty where it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def captured_names(pair: Arms) -> set[str]:
    """Names that a difference between these arms can have; empty where servers report nothing."""
    names = {name for arm in pair for name in flat(arm.config)}
    return names | {"engine", "model"} if names else names


def machine() -> dict[str, Any]:
    """What ran the load: system, processor, cores, Python and speccheck versions."""
    from speccheck import __version__

    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "speccheck": __version__,
    }


# --- vLLM ---------------------------------------------------------------------------------------


@contextmanager
def _vllm(rollout: Rollout, log_dir: Path, say: Callable[[str], None]) -> Iterator[Arms]:
    """Two vLLM servers, side by side or in turns."""
    servers = rollout.vllm
    installed = vllm.require(servers.python)
    say(f"  starting vLLM {installed.version}: {installed.start_note}")
    wanted = {Arm.TARGET_ONLY: None, Arm.SPECULATIVE: rollout.speculation}
    if servers.layout == "alternate":
        with _in_turns(rollout, installed, wanted, log_dir, say) as pair:
            yield pair
        return
    jobs = [
        _VllmJob(servers, arm, config, log_dir / f"{arm}.log") for arm, config in wanted.items()
    ]
    own = servers.gpus
    apart = own is not None and own.target_only != own.speculative
    with _started(installed, jobs, say, apart=apart) as urls:
        target, speculative = (
            _describe_vllm(rollout, installed, job, url)
            for job, url in zip(jobs, urls, strict=True)
        )
        yield Arms(target, speculative)


@dataclass(frozen=True, slots=True)
class _VllmJob:
    """One vLLM server that is to be started."""

    servers: VllmServers
    arm: Arm
    speculation: Mapping[str, Any] | None
    log_path: Path


@contextmanager
def _started(
    installed: vllm.Installed,
    jobs: Sequence[_VllmJob],
    say: Callable[[str], None],
    *,
    apart: bool,
) -> Iterator[list[str]]:
    """URLs of ready servers, started together where each has its own memory, else one by one.

    Two that share a GPU measure its free memory at start, and would take each other's.
    """
    together = apart or not any(Path("/dev").glob("nvidia[0-9]*"))
    running: list[tuple[_VllmJob, subprocess.Popen[str], str]] = []

    def wait(job: _VllmJob, process: subprocess.Popen[str], url: str) -> None:
        timeout_s = job.servers.start_timeout_s
        vllm.wait_ready(process, job.arm, url, job.log_path, timeout_s, say)

    try:
        for job in jobs:
            process, url = vllm.start(
                installed, job.servers, job.arm, job.speculation, job.log_path
            )
            running.append((job, process, url))
            if not together:
                wait(*running[-1])
        if together:
            for one in running:
                wait(*one)
        with _ends_are_told([(process, job.log_path) for job, process, _ in running]):
            yield [url for _, _, url in running]
    finally:
        _stop([process for _, process, _ in running], vllm.STOP_TIMEOUT_S)


@contextmanager
def _in_turns(
    rollout: Rollout,
    installed: vllm.Installed,
    wanted: Mapping[Arm, Mapping[str, Any] | None],
    log_dir: Path,
    say: Callable[[str], None],
) -> Iterator[Arms]:
    """Both servers of which one runs at a time, each always on the same port."""
    first, second = (vllm.free_port(port) for port in rollout.vllm.ports)
    servers = rollout.vllm.model_copy(update={"ports": (first, second)})
    urls = {
        arm: f"http://127.0.0.1:{port}" for arm, port in zip(wanted, (first, second), strict=True)
    }
    jobs: dict[Arm, _VllmJob] = {}
    running: list[tuple[subprocess.Popen[str], Path]] = []
    starts = 0

    def start(arm: Arm) -> subprocess.Popen[str]:
        nonlocal starts
        starts += 1
        running.clear()  # we stopped that one ourselves
        jobs[arm] = _VllmJob(servers, arm, wanted[arm], log_dir / f"{arm}-{starts}.log")
        say(f"  {arm} takes its turn")
        process, url = vllm.start(installed, servers, arm, wanted[arm], jobs[arm].log_path)
        try:
            timeout_s = servers.start_timeout_s
            vllm.wait_ready(process, arm, url, jobs[arm].log_path, timeout_s, say)
        except BaseException:
            _stop([process], vllm.STOP_TIMEOUT_S)
            raise
        running.append((process, jobs[arm].log_path))
        return process

    turns = Turns(start)
    try:
        found = {}
        for arm in (Arm.SPECULATIVE, Arm.TARGET_ONLY):  # the first drive begins with target-only
            turns.take(arm)
            found[arm] = _describe_vllm(rollout, installed, jobs[arm], urls[arm])
        with _ends_are_told(running):
            yield Arms(found[Arm.TARGET_ONLY], found[Arm.SPECULATIVE], None, turns)
    finally:
        turns.stop()


@contextmanager
def _vllm_sweep(
    rollout: Rollout, ks: Sequence[int], log_dir: Path, say: Callable[[str], None]
) -> Iterator[SweepServers]:
    """As `sweep_servers`: all of them at once, on ports of their own."""
    if rollout.vllm.layout == "alternate":
        raise UsageError(
            "vllm.layout alternate: a sweep takes turns of seconds and needs all its servers at"
            " once; use side_by_side and give each its share (vllm.args gpu-memory-utilization)"
        )
    installed = vllm.require(rollout.vllm.python)
    servers = rollout.vllm.model_copy(update={"ports": (0, 0)})
    say(f"  starting {1 + len(ks)} servers of vLLM {installed.version}")
    jobs = [_VllmJob(servers, Arm.TARGET_ONLY, None, log_dir / "sweep-k0.log")]
    for k in ks:
        config = {**rollout.speculation, "num_speculative_tokens": k}
        jobs.append(_VllmJob(servers, Arm.SPECULATIVE, config, log_dir / f"sweep-k{k}.log"))
    with _started(installed, jobs, say, apart=False) as urls:
        found = [
            _describe_vllm(rollout, installed, job, url)
            for job, url in zip(jobs, urls, strict=True)
        ]
        yield SweepServers(dict(zip((0, *ks), found, strict=True)), {}, {})


def _describe_vllm(
    rollout: Rollout, installed: vllm.Installed, job: _VllmJob, url: str
) -> ArmDescription:
    """What a server that we started says of itself, and how we started it."""
    said = _describe(job.arm, url, job.servers.name, None)
    launched = _launched(rollout, installed)
    devices = vllm.environment(job.servers, job.arm).get("CUDA_VISIBLE_DEVICES")
    seen = gpus.visible(gpus.found(), devices or os.environ.get("CUDA_VISIBLE_DEVICES"))
    if seen:
        launched["gpus"] = [gpu.to_dict() for gpu in seen]
    return replace(said, config={**said.config, "launched": launched})


def _launched(rollout: Rollout, installed: vllm.Installed) -> dict[str, Any]:
    """How a server is started, without what is each arm's own: port and speculative config."""
    return {
        "build": f"{installed.distribution} {installed.version}",
        "argv": vllm.command(installed, rollout.vllm, None, "PORT"),
        "env": dict(rollout.vllm.env),
    }


def _would_be(
    then: ArmDescription,
    rollout: Rollout,
    installed: vllm.Installed,
    speculation: Mapping[str, Any] | None,
) -> ArmDescription:
    """A measured server's description as it would be if it were started now."""
    target = vllm.model_path(rollout.vllm.target)
    before = then.config.get("launched", {})
    launched = _launched(rollout, installed)
    if "gpus" in before:
        launched["gpus"] = before["gpus"]  # which GPU it would get is not known before it does
    config = {**then.config, "launched": launched}
    if files := _file_digests(Path(target)):
        config["model_files"] = files
    speculative = then.speculative_config
    if speculation is not None:
        asked = dict(speculation)
        if isinstance(asked.get("model"), str):
            asked["model"] = vllm.model_path(asked["model"], "draft")
            if files := _file_digests(Path(asked["model"])):
                asked["model_files"] = files
        speculative = {**(speculative or {}), **asked}
    return replace(
        then,
        model=rollout.vllm.name,
        speculative_config=speculative,
        config=config,
    )


# --- embedded -----------------------------------------------------------------------------------


def _start_embedded(
    rollout: Rollout, name: str, speculative: Mapping[str, Any] | None, log_path: Path
) -> tuple[subprocess.Popen[str], str]:
    """One embedded server as a child process; returns it with its URL once it is ready.

    `name` says what it serves: an arm, or the draft.
    """
    settings = _embedded_settings(rollout, speculative)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "speccheck.engine.server"),
        *("--settings", json.dumps(settings), "--port", "0", "--parent-pid", str(os.getpid())),
    ]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,  # Ctrl-C reaches us first; we stop the servers in order
        )
    # On a machine with few cores the servers would delay the load loop that times them. In one
    # session with it (not a new one: the kernel shares cores between sessions first) they give way.
    os.setpriority(os.PRIO_PROCESS, process.pid, _SERVER_NICENESS)
    try:
        return process, _ready_url(process, name, log_path)
    except BaseException:
        _stop([process])
        raise


def _embedded_settings(rollout: Rollout, speculative: Mapping[str, Any] | None) -> dict[str, Any]:
    """What one embedded server is told, in the shape of `EngineSettings.parse`."""
    settings: dict[str, Any] = {
        **rollout.embedded.model_dump(exclude={"model"}),
        "seed": rollout.seed,
        "speculative_config": dict(speculative) if speculative is not None else None,
    }
    if rollout.embedded.model != PACKAGED:
        settings["model"] = rollout.embedded.model
    return settings


def _embedded_description(
    rollout: Rollout, arm: Arm, speculative: Mapping[str, Any] | None
) -> ArmDescription:
    """What an embedded server of this version would say of itself."""
    from speccheck import __version__
    from speccheck.engine.settings import EngineSettings

    settings = EngineSettings.parse(_embedded_settings(rollout, speculative))
    info = settings.server_info(rollout.embedded.max_model_len)
    return _description(arm, "", settings.name, __version__, info)


def _ready_url(process: subprocess.Popen[str], name: str, log_path: Path) -> str:
    """Wait for the server's line of readiness on its standard output."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stdout = process.stdout
    if stdout is None:
        raise EngineError(f"{name} server: no standard output to read")

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineError(
                f"{name} server: not ready after {START_TIMEOUT_S:.0f} s{_tail(log_path)}"
            ) from None
        if not line:
            code = process.wait()
            raise EngineError(f"{name} server: ended at start with code {code}{_tail(log_path)}")
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and message.get("ready"):
            return str(message["url"])


def _tail(log_path: Path) -> str:
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"; its log cannot be read ({error})"
    shown = "\n    ".join(lines[-_LOG_TAIL_LINES:]) or "(the log is empty)"
    return f"; the end of {log_path}:\n    {shown}"


def _stop(processes: list[subprocess.Popen[str]], timeout_s: float = STOP_TIMEOUT_S) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- attached -----------------------------------------------------------------------------------


def _attach(rollout: Rollout) -> Arms:
    attached = rollout.attached
    if attached is None:
        raise UsageError("engine: attached needs the block `attached` with two URLs")
    key = api_key(rollout)
    pair = Arms(
        _describe(Arm.TARGET_ONLY, attached.target_only, attached.model, key),
        _describe(Arm.SPECULATIVE, attached.speculative, attached.model, key),
        key,
    )
    if pair.target_only.speculative_config is not None:
        raise UsageError(
            f"attached.target_only: the server at {attached.target_only} speculates; "
            "are the two URLs swapped?"
        )
    if pair.speculative.speculative_config is None:
        if _names_speculation(_server_info(attached.speculative, key)):
            raise UsageError(
                f"attached.speculative: the server at {attached.speculative} runs without a "
                "speculative config; start it with one"
            )
        # A server that does not say what it runs: the rollout's word is all there is.
        stated = replace(pair.speculative, speculative_config=rollout.speculation)
        return Arms(pair.target_only, stated, key)
    return pair


def api_key(rollout: Rollout) -> str | None:
    """The key of attached servers, from the environment variable that the rollout names.

    Raises:
        UsageError: the variable is not set.
    """
    name = rollout.attached.api_key_env if rollout.attached is not None else None
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UsageError(f"attached.api_key_env: the environment variable {name} is not set")
    return key


def _describe(arm: Arm, url: str, model: str | None, key: str | None) -> ArmDescription:
    """Ask a server what it is: /v1/models, /version and, where it is open, /server_info.

    Raises:
        EngineError: the server does not answer, or has no model.
    """
    names = [entry["id"] for entry in _models(url, key)]
    if not names:
        raise EngineError(f"{arm} server at {url}: /v1/models lists no model")
    if model is not None and model not in names:
        raise EngineError(
            f"{arm} server at {url}: no model {model!r}; it serves {', '.join(names)}"
        )
    version = _get_json(url, "/version", key, optional="version") or {}
    said = str(version.get("version", "of unknown version"))
    return _description(arm, url, model or names[0], said, _server_info(url, key))


def _description(
    arm: Arm, url: str, model: str, version: str, info: Mapping[str, Any]
) -> ArmDescription:
    """A server's own account of itself as a description, model files included."""
    engine = info.get("engine") or ("vllm" if "vllm_config" in info else "unknown engine")
    speculative: list[Any] = []
    config = _without_speculation(info, speculative)
    described = ArmDescription(
        arm=arm,
        url=url,
        engine=f"{engine} {version}",
        model=model,
        speculative_config=next(
            (one for one in speculative if isinstance(one, dict) and one), None
        ),
        config=config,
    )
    return _with_digests(described)


def _server_info(url: str, key: str | None) -> dict[str, Any]:
    """The server's own account of its configuration; empty where it gives none."""
    info = _get_json(url, "/server_info?config_format=json", key, optional="server_info")
    return dict(vllm.settled(info or {}))


def _names_speculation(info: Mapping[str, Any]) -> bool:
    """Whether a configuration has a speculative config in it, be it null."""
    found: list[Any] = []
    _without_speculation(info, found)
    return bool(found)


def _without_speculation(value: Any, found: list[Any]) -> Any:
    """A captured configuration without its speculative config, which is collected in `found`."""
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, item in value.items():
        if name == "speculative_config":
            found.append(item)
        else:
            kept[name] = _without_speculation(item, found)
    return kept


def model_folder(arm: ArmDescription) -> str | None:
    """The model as vLLM was told to load it: a folder or a hub name; None if it does not say."""
    named = flat(arm.config).get("vllm_config.model_config.model")
    return named if isinstance(named, str) else None


def _with_digests(arm: ArmDescription) -> ArmDescription:
    """Digests of the model files, where the server reads them from a folder of this machine."""
    target = model_folder(arm)
    config = dict(arm.config)
    if target is not None and (files := _file_digests(Path(target))):
        config["model_files"] = files
    speculative = arm.speculative_config
    draft = None if speculative is None else speculative.get("model")
    if speculative is not None and isinstance(draft, str):
        packaged = draft == PACKAGED
        folder = SpeculativeSettings.parse(speculative).model_dir if packaged else Path(draft)
        if files := _file_digests(folder):
            speculative = {**speculative, "model_files": files}
    return replace(arm, config=config, speculative_config=speculative)


def _file_digests(folder: Path) -> dict[str, str]:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return {name: _digest(folder / name) for name in names if (folder / name).is_file()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:20]}"


def _get_json(url: str, path: str, key: str | None, optional: str = "") -> dict[str, Any] | None:
    """GET a JSON object; an `optional` page that is not there is None."""
    request = urllib.request.Request(url + path)  # noqa: S310 (http(s) only, checked in config)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        # vLLM asks its whole system before it answers /server_info: many seconds on a busy machine.
        value = json_of(request, timeout_s=60)
    except urllib.error.HTTPError as error:
        if optional and error.code in (401, 403, 404, 405, 501):
            return None
        raise EngineError(
            f"{url}{path}: HTTP {error.code}; is this the server's base URL?"
        ) from None
    except NO_REPLY as error:
        reason = (
            getattr(error, "reason", None) or " ".join(str(error).split()) or type(error).__name__
        )
        raise EngineError(f"{url}{path}: no answer ({reason}); is the server running?") from None
    return value if isinstance(value, dict) else None


NO_REPLY = (OSError, ValueError, http.client.HTTPException, RecursionError)
"""What comes of a request where the other end is down, no web server, or sends no JSON."""

_LONGEST_REPLY = 64 << 20


def json_of(request: urllib.request.Request, *, timeout_s: float) -> Any:
    """The JSON of a reply; one of `NO_REPLY` is raised where there is none."""
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310
        return json.loads(reply.read(_LONGEST_REPLY))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
