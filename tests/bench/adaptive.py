"""The adaptive proposal length against every fixed one, on mixed traffic, at several loads.

Run it as `python tests/bench/adaptive.py [--quick] [--costs]`. All engines run in one process and
take turns on the same prompts, in an order that is turned round by round. Times are CPU seconds of
this process (each model has one thread), so that what else runs on the machine counts for little.
Figures are ratios to target-only in the same round: tokens per second, higher is better, the
geometric mean over rounds with its interval (one-sided 5 %). Temperature 0: the last column counts
answers that differ from target-only's.

Traffic: short requests, high agreement (code, support, json) and low agreement (prose), 2 : 2 : 1.

`--costs` fits what a step costs instead: the defaults of `engine.adaptive.StepCosts`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine import Block, load, run

from speccheck import stats
from speccheck.engine.drafters import Draft
from speccheck.engine.engine import Engine
from speccheck.engine.sequence import Sequence
from speccheck.engine.settings import EngineSettings
from speccheck.records import Estimate

CONCURRENCY = (1, 8, 32)
FIXED = (1, 2, 3, 5, 8)
ROUNDS = 8
MIX = (("code", 2), ("tool_text", 4), ("support", 1), ("json", 1), ("prose", 2))
"""Task and weight; tool_text answers are the short ones."""


def spec(k: int, **more: Any) -> dict[str, Any]:
    """A speculative config of the packaged draft."""
    return {"method": "draft_model", "model": "packaged", "num_speculative_tokens": k, **more}


def engine_of(config: dict[str, Any] | None) -> Engine:
    """An engine that is warm and whose clock is this process's CPU time."""
    made = Timed(EngineSettings.parse({"speculative_config": config}), clock=time.process_time)
    made.warm_up()
    return made


@dataclass(frozen=True)
class Pass:
    """One decode step: its rows, its drafts and its seconds."""

    n: int
    rows: int
    positions: int
    seconds: float


class Timed(Engine):
    """An engine that notes what its decode steps cost."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.passes: list[Pass] = []
        self._lengths_now: list[int] = []

    def _propose(self, sequences: list[Sequence]) -> list[Draft]:
        drafts = super()._propose(sequences)
        self._lengths_now = [len(draft.tokens) for draft in drafts]
        return drafts

    def _decode(self, sequences: list[Sequence]) -> Any:
        n, start = len(sequences), self.clock()
        outputs = super()._decode(sequences)
        ks = self._lengths_now
        self.passes.append(Pass(n, n + sum(ks), max(ks, default=0), self.clock() - start))
        return outputs


def main() -> None:
    """Print the table, or the costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds, the first two loads")
    parser.add_argument("--costs", action="store_true", help="fit the costs of a step instead")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--concurrency", type=int, nargs="+")
    options = parser.parse_args()
    levels = options.concurrency or (CONCURRENCY[:2] if options.quick else CONCURRENCY)
    rounds = options.rounds or (2 if options.quick else ROUNDS)
    arms: dict[str, Engine] = {"target-only": engine_of(None)}
    arms |= {f"k={k}": engine_of(spec(k)) for k in FIXED}
    arms["adaptive"] = engine_of(spec(FIXED[-1], adaptive=True))
    prompts = mixed(arms["target-only"])
    if options.costs:
        fit(arms, prompts, levels, rounds)
        return
    print(f"{rounds} rounds of mixed traffic; tokens per CPU second over target-only's")
    print(f"{'c':>3} " + "".join(f"{name:>20}" for name in list(arms)[1:]) + f"{'differ':>8}")
    for level in levels:
        report(level, measure(arms, prompts, level, rounds))


def mixed(engine: Engine) -> list[tuple[tuple[int, ...], int]]:
    """Prompts of all tasks in turns, by weight."""
    by_task = {task: load(task, engine) for task, _ in MIX}
    found = []
    for i in range(40):
        for task, weight in MIX:
            rows = by_task[task]
            found += [rows[(i * weight + j) % len(rows)] for j in range(weight)]
    return found


def measure(
    arms: dict[str, Engine], prompts: list[tuple[tuple[int, ...], int]], level: int, rounds: int
) -> dict[str, list[Block]]:
    """A block of each arm in each round, the order turned by one from round to round."""
    n = max(10, level + level // 2)
    blocks: dict[str, list[Block]] = {name: [] for name in arms}
    names = list(arms)
    for i in range(rounds):
        asked = [prompts[(i * n + j) % len(prompts)] for j in range(n)]
        for name in names[i % len(names) :] + names[: i % len(names)]:
            blocks[name].append(run(arms[name], asked, level))
    return blocks


def report(level: int, blocks: dict[str, list[Block]]) -> None:
    """One line: each arm over target-only; then adaptive over the best fixed length."""
    target = blocks["target-only"]
    ratios = {name: over(mine, target) for name, mine in blocks.items() if name != "target-only"}
    cells = [f"{e.value:.2f} ({e.low:.2f}-{e.high:.2f})" for e in ratios.values()]
    differ = sum(
        s.answers[i] != ids
        for t, s in zip(target, blocks["adaptive"], strict=True)
        for i, ids in t.answers.items()
    )
    print(f"{level:>3} " + "".join(f"{cell:>20}" for cell in cells) + f"{differ:>8}", flush=True)
    best = max((name for name in ratios if name != "adaptive"), key=lambda n: ratios[n].value)
    against = over(blocks["adaptive"], blocks[best])
    drafted = sum(block.drafted for block in blocks["adaptive"])
    steps = sum(block.rounds for block in blocks["adaptive"])
    print(
        f"    adaptive over the best fixed ({best}): {against.value:.3f} ({against.low:.3f} to"
        f" {against.high:.3f}); it drafts {drafted / steps:.2f} tokens a step"
    )


def over(mine: list[Block], base: list[Block]) -> Estimate:
    """Tokens per second over those of other blocks of the same rounds."""
    return stats.geometric_mean_ratio(
        [block.tokens_per_s for block in base],
        [block.tokens_per_s for block in mine],
        alpha=0.05,
    )


def fit(
    arms: dict[str, Engine],
    prompts: list[tuple[tuple[int, ...], int]],
    levels: tuple[int, ...],
    rounds: int,
) -> None:
    """Least squares without negative costs, in passes of target-only with one sequence."""
    from scipy.optimize import nnls

    for level in levels:
        measure(arms, prompts, level, rounds)
    passes = [one for engine in arms.values() for one in engine.passes]
    # Steps alike are one point, at their lower quartile: what disturbs a step makes it longer.
    alike: dict[tuple[int, ...], list[float]] = {}
    for one in passes:
        key = (one.n, one.rows, one.positions)
        alike.setdefault(key, []).append(one.seconds)
    points = {key: times for key, times in alike.items() if len(times) >= 3}
    x = np.array([(1, n, rows, n * (width + 1), width) for n, rows, width in points])
    y = np.array([np.quantile(times, 0.25) for times in points.values()])
    weight = np.sqrt([len(times) for times in points.values()]) / y
    costs, _ = nnls(x * weight[:, None], y * weight)
    unit = costs[:4].sum()
    names = ("step", "sequence", "token", "cell", "draft_step")
    print(f"{len(passes)} steps, {len(points)} kinds; one pass of one sequence {unit * 1e3:.3f} ms")
    for name, cost in zip(names, costs / unit, strict=True):
        print(f"{name:<12}{cost:8.4f}")
    off = np.abs(x @ costs / y - 1)
    print(
        f"off by {np.median(off):.1%} at the median, {np.quantile(off, 0.9):.1%} at the ninetieth"
    )


if __name__ == "__main__":
    main()
