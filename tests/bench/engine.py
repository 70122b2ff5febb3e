"""How fast the embedded engine is, target-only against speculative, by task and concurrency.

Run it as `python tests/bench/engine.py [--quick]`. Both arms run in one process, in alternating
blocks on the same prompts, so that a busy machine slows both; figures are medians over blocks and
the speed-up is the median of the ratios of neighbouring blocks. Tokens per second include reading
the prompts, as a client would see it; `tpot` is the speed-up of what follows the first token: the
median over requests of target-only TPOT / speculative TPOT. Temperature 0: the arms must say the
same, and the last column counts answers that differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from speccheck.engine.engine import Engine
from speccheck.engine.sampling import SamplingParams
from speccheck.engine.sequence import Request
from speccheck.engine.settings import EngineSettings

CORPORA = Path(__file__).parent.parent.parent / "corpora"
CONCURRENCY = (1, 4, 8, 16, 32, 64)
QUICK_CONCURRENCY = (1, 16)
QUICK_TASKS = ("json", "code", "summary", "prose")


@dataclass
class Block:
    """One arm on one list of prompts."""

    tokens_per_s: float
    answers: dict[int, list[int]]
    tpot_s: dict[int, float]
    accepted: int
    drafted: int
    rounds: int

    @property
    def n_tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.answers.values()))


def main() -> None:
    """Print one line per task and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tasks and levels, one block each")
    parser.add_argument("--concurrency", type=int, nargs="+")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--repeats", type=int, help="blocks per arm")
    parser.add_argument("--k", type=int, default=4, help="proposal length")
    parser.add_argument("--method", choices=("draft_model", "ngram"), default="draft_model")
    options = parser.parse_args()
    levels = options.concurrency or (QUICK_CONCURRENCY if options.quick else CONCURRENCY)
    tasks = options.tasks or (QUICK_TASKS if options.quick else all_tasks())
    repeats = options.repeats or (1 if options.quick else 3)

    speculative = {"method": options.method, "num_speculative_tokens": options.k}
    if options.method == "draft_model":
        speculative["model"] = "packaged"
    else:
        speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    # Prompts are used again and again here, and reading them is part of what is timed.
    cold = {"enable_prefix_caching": False}
    arms = [
        Engine(EngineSettings.parse(cold | {"speculative_config": s})) for s in (None, speculative)
    ]
    for arm in arms:
        arm.warm_up()
    print(f"one thread per model session, k = {options.k}, {options.method}, temperature 0")
    print(
        f"{'task':<11}{'c':>3}{'target-only':>13}{'speculative':>13}{'ratio':>7}{'tpot':>7}", end=""
    )
    print(f"{'accepted':>10}{'tok/step':>10}{'tokens':>8}{'differ':>8}")
    for task in tasks:
        prompts = load(task, arms[0])
        for level in levels:
            report(task, level, *measure(arms, prompts, level, repeats))


def all_tasks() -> tuple[str, ...]:
    """Task names that have a corpus."""
    return tuple(sorted(path.stem for path in CORPORA.glob("*.jsonl")))


def load(task: str, engine: Engine) -> list[tuple[tuple[int, ...], int]]:
    """Prompt ids and token limits of a task."""
    prompts = []
    for line in (CORPORA / f"{task}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = engine.tokenizer.render_chat(row["messages"])
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        prompts.append((tuple(ids), int(row["max_tokens"])))
    return prompts


def measure(
    arms: list[Engine], prompts: list[tuple[tuple[int, ...], int]], level: int, repeats: int
) -> tuple[list[Block], list[Block]]:
    """Blocks of both arms in ABBA order; two rounds of the batch, at least 12 requests, a block."""
    n = max(12, 2 * level)
    asked = [prompts[i % len(prompts)] for i in range(n)]
    blocks: tuple[list[Block], list[Block]] = ([], [])
    for repeat in range(repeats):
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            blocks[arm].append(run(arms[arm], asked, level))
    return blocks


def run(engine: Engine, asked: list[tuple[tuple[int, ...], int]], level: int) -> Block:
    """A closed loop: `level` requests in flight until all are answered."""
    waiting = deque(enumerate(asked))
    answers: dict[int, list[int]] = {i: [] for i in range(len(asked))}
    tpot_s: dict[int, float] = {}
    accepted = drafted = rounds = 0
    start = engine.clock()
    while waiting or engine.n_unfinished:
        while waiting and engine.n_unfinished < level:
            i, (ids, limit) = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=limit)
            engine.add(Request(str(i), ids, params, arrival_s=engine.clock()))
        for output in engine.step():
            name, stats = int(output.request_id), output.stats
            answers[name] += output.token_ids
            if stats and stats.n_output > 1:
                decode_s = stats.last_token_s - stats.first_token_s
                tpot_s[name] = decode_s / (stats.n_output - 1)
                accepted += sum(stats.accepted_per_step)
                drafted += sum(stats.drafted_per_step)
                rounds += stats.n_steps - 1
    elapsed = engine.clock() - start
    n_tokens = sum(map(len, answers.values()))
    return Block(n_tokens / elapsed, answers, tpot_s, accepted, drafted, rounds)


def report(task: str, level: int, target_only: list[Block], speculative: list[Block]) -> None:
    """One line of the table."""
    pairs = list(zip(target_only, speculative, strict=True))
    a, b = (statistics.median(x.tokens_per_s for x in arm) for arm in (target_only, speculative))
    ratio = statistics.median(s.tokens_per_s / t.tokens_per_s for t, s in pairs)
    tpot = statistics.median(t.tpot_s[i] / s.tpot_s[i] for t, s in pairs for i in t.tpot_s)
    last = speculative[-1]
    differ = sum(last.answers[i] != ids for i, ids in target_only[-1].answers.items())
    rate = last.accepted / last.drafted if last.drafted else float("nan")
    # The first token of an answer comes from its prompt, not from a step.
    per_step = (last.n_tokens - len(last.answers)) / last.rounds if last.rounds else float("nan")
    print(f"{task:<11}{level:>3}{a:>13.0f}{b:>13.0f}{ratio:>6.2f}x{tpot:>6.2f}x", end="")
    print(f"{rate:>10.2f}{per_step:>10.2f}{last.n_tokens:>8}{differ:>8}", flush=True)


if __name__ == "__main__":
    main()
