"""Which wrong verifiers the battery finds on a served pair, by which test, with how many tokens.

Run it as `python tests/bench/detection.py [NAMES] [--pair small|packaged] [--samples N]` (or `make
detection`). Each shortcut is patched into a server process of its own (`tests/broken_server.py`)
and all is asked over HTTP, as `speccheck probe` does. A line shows the first size of a doubling
schedule at which the battery fails, by which test, with p and effect at that size, and how many
tokens the recipes of STATS 1.6 and 3.2 predict for 90 % power at the battery's level. Predictions
come from the exact law of the shortcut in rows of this pair's models, computed apart from any
server. Right configurations must not fail at any size.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from broken_server import DRAFTERS, RIGHT, VERIFIERS
from served_pair import served, small_pair, write_rollout

from speccheck import battery, console, context, probe, stats
from speccheck.battery import Battery, Sampled
from speccheck.config import ProbeConfig
from speccheck.engine.cache import KVCache
from speccheck.engine.model import Model
from speccheck.engine.settings import PAIR_DIR
from speccheck.records import Arm, Verdict
from speccheck.replay import distributions

WRONG = ("W01", "W05", "W06", "W10", "W15", "W18", "W23", "W29")
LEVEL = battery.ALPHA / len(battery.KINDS)
CONTEXTS = 600
"""Contexts from which a prediction is made."""


class Bench:
    """A pair of models, their servers and a folder for the runs."""

    def __init__(self, stack: ExitStack, pair: str, settings: ProbeConfig) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.settings = settings
        if pair == "small":
            self.models = small_pair(self.folder)
        else:
            self.models = {name: str(PAIR_DIR / name) for name in ("target", "draft")}
        serving = {"seed": 1, "model": self.models["target"], "served_model_name": "pair"}
        self.serving = serving
        self.target_url = stack.enter_context(served("right", serving))
        draft = serving | {"model": self.models["draft"]}
        self.draft_url = stack.enter_context(served("right", draft))

    def drawn(self, name: str) -> tuple[Sequence[Sampled], Sequence[Sampled]]:
        """Scored samples of both arms, with one verifier behind the speculative URL."""
        config = RIGHT.get(name, RIGHT["token"])
        if "model" in config:
            config = config | {"model": self.models["draft"]}
        with served(name, self.serving | {"speculative_config": config}) as url:
            urls = {"target_only": self.target_url, "speculative": url}
            if config["method"] == "draft_model":
                urls["draft"] = self.draft_url
            paths = [self.models.get("corpus", "packaged")]
            path = self.folder / f"{name}.yaml"
            write_rollout(path, urls, config, corpus={"paths": paths}, seed=5)
            with context.open_run(path, self.folder / name, console.Reporter(), fresh=False) as run:
                prompts = run.prompts(run.rollout.routes[0])
                found, why = distributions.draw(run, prompts, self.settings)
                assert not why, why
                self.starts = asked_ids(run, prompts)
                return found[Arm.SPECULATIVE], found[Arm.TARGET_ONLY]

    def rows(self, samples: Sequence[Sampled]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(p, q, answer index) at the verified tokens of samples, whole rows, by the models."""
        found = []
        for role in ("target", "draft"):
            model = Model(Path(self.models[role]))
            rows = []
            for s in samples:
                start = self.starts[s.prompt]
                cache = KVCache(model.config, 1)
                cache.fit(len(start) + len(s.tokens), 1)
                ids = [*start, *s.tokens]
                logits = model.forward(cache, 0, [0], [ids], last_only=False).astype(float)
                rows.append(softmax(logits[len(start) : len(ids) - 1]))
            found.append(np.concatenate(rows))
        number = [i for i, s in enumerate(samples) for _ in s.tokens[1:]]
        return found[0], found[1], number


def asked_ids(run: context.RunContext, prompts) -> dict[str, Sequence[int]]:
    """Prompt ids as the target renders them."""
    import asyncio

    from speccheck.client import open_session

    async def ask():
        async with open_session() as session:
            target = run.endpoints()[Arm.TARGET_ONLY]
            known = {r.prompt_id for r in run.store.receipts(run.run_id)}
            return {
                p.prompt_id: await probe.prompt_ids(session, target, p)
                for p in prompts
                if p.prompt_id in known
            }

    return asyncio.run(ask())


def softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of probabilities."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def sizes(most: int) -> list[int]:
    """Samples per prompt: 2, 4, 8 ... and the most."""
    return [n for n in (2**i for i in range(1, 12)) if n < most] + [most]


def part(samples: Sequence[Sampled], n: int) -> list[Sampled]:
    """The first n samples of each prompt."""
    met: Counter[str] = Counter()
    kept = []
    for sample in samples:
        met[sample.prompt] += 1
        if met[sample.prompt] <= n:
            kept.append(sample)
    return kept


def judged(arm: Sequence[Sampled], control: Sequence[Sampled], n: int) -> Battery:
    """The battery on the first n samples of each prompt."""
    return battery.run(part(arm, n), part(control, n), rng=np.random.default_rng(1), margin=0.04)


# --- what the recipes predict -------------------------------------------------------------------


def law(name: str, p: np.ndarray, q: np.ndarray) -> np.ndarray | None:
    """Law of the token at a drafted index under a shortcut, (n, V); None: only the bonus is off."""
    at = np.arange(len(p))
    accepted = np.minimum(p, q)
    z = 1 - accepted.sum(axis=1, keepdims=True)
    weights = np.maximum(p - q, 0)
    residual = weights / np.maximum(z, 1e-300)
    both = q * p
    match = both.sum(axis=1, keepdims=True)
    h = np.minimum(1, p / np.maximum(q, 1e-300))
    if name == "W01":
        return accepted + z * p
    if name == "W05":
        return both + (1 - match) * residual
    if name == "W06":
        return both + (1 - match) * p
    if name == "W10":
        best = q.argmax(axis=1)
        certain = np.zeros_like(p)
        certain[at, best] = 1
        passes = h[at, best][:, None]
        return passes * certain + (1 - passes) * residual
    if name == "W15":
        # The correction is read with the u that failed the test, so from the top of the CDF.
        ends = np.cumsum(residual, axis=1)
        found = accepted.copy()
        for i in range(len(p)):
            over = np.maximum(ends[i][None, :] - h[i][:, None], 0)
            mass = (q[i][:, None] * over).sum(axis=0)
            found[i] += np.diff(mass, prepend=0)
        return found
    if name == "W18":
        found = accepted + z * weights
        found[:, -1] += (z * (1 - z))[:, 0]
        return found
    if name == "W23":
        share = q * (1 - h) / np.maximum(1 - p, 1e-300)
        return accepted + p * (share.sum(axis=1, keepdims=True) - share)
    return None


def lumped(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows over the categories that the battery sees: the target's top and a tail."""
    top = np.take_along_axis(rows, order, axis=1)
    return np.concatenate([top, 1 - top.sum(axis=1, keepdims=True)], axis=1)


def predicted(name: str, bench: Bench, arm: Sequence[Sampled], control: Sequence[Sampled]) -> str:
    """The tests that need fewest tokens (or visits), with their numbers."""
    per_answer = max(1, bench.settings.max_tokens - 1)
    picked = control[: max(1, CONTEXTS // per_answer)]
    p, q, _ = bench.rows(picked)
    if p.shape[1] > 100 and name == "W15":  # quadratic in the vocabulary
        p, q = p[::8], q[::8]
    order = np.argsort(-p, axis=1, kind="stable")[:, : probe.TOP_ROWS]
    names = Counter(s for a in arm for s in a.strata or ())
    total = sum(names.values())
    z = (NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(0.9)) ** 2
    shape = lumped(p, order)
    hs = {
        "T3": stats.surprisal(shape),
        "T6": stats.draft_sign(shape, lumped(q, order)),
        "T6b": stats.draft_log_ratio(shape, lumped(q, order)),
    }
    if name == "W29":
        # The bonus comes from the draft's row of the position before, which saw one token less.
        pi, shape, share = lumped(q[:-1], order[1:]), shape[1:], names["bonus"] / total
        found = {}
        for test, h in hs.items():
            n = z * variance(shape, h[1:]) / ((pi - shape) * h[1:]).sum(axis=1).mean() ** 2
            found[test] = n / share**2
            if test == "T6":
                found["T7"] = n / share
        best = min(found, key=lambda test: found[test])
        return f"{best} {math.ceil(found[best]):,}"
    pi = law(name, p, q)
    if pi is None:
        return "-"
    drafted = 1 - (names["bonus"] + names[""]) / total
    apart = lumped(pi, order) - shape
    found = {
        test: z * variance(shape, h) / (drafted * (apart * h).sum(axis=1).mean()) ** 2
        for test, h in hs.items()
    }
    # T4: the token id that is off most, corrected for how many there are.
    off, spread = drafted * (pi - p).mean(axis=0), (p * (1 - p)).mean(axis=0)
    common = spread > 1e-3
    level = LEVEL / max(1, int(common.sum()))
    z_id = (NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(0.9)) ** 2
    if common.any():
        found["T4"] = float((z_id * spread[common] / np.maximum(off[common] ** 2, 1e-12)).min())
    best = min(found, key=lambda test: found[test])
    text = f"{best} {math.ceil(found[best]):,}"
    visits = repeated(arm, name, bench)
    return f"{text}; T5 {visits:,} visits" if visits else text


def repeated(arm: Sequence[Sampled], name: str, bench: Bench) -> int | None:
    """Visits that T5 needs: noncentrality over the mean chi-square distance at its nodes."""
    visits: Counter[tuple[str, tuple[int, ...]]] = Counter(
        (a.prompt, a.tokens[:i]) for a in arm for i in range(1, len(a.tokens))
    )
    nodes = {node: n for node, n in visits.items() if n >= 2 * stats.LEAST_VARIANCE}
    if not nodes:
        return None
    distances, weights, freedom = [], [], 0
    for (prompt, prefix), n in nodes.items():
        p, q, _ = bench.rows([Sampled(prompt, (*prefix, 0))])
        row, pi = p[-1], law(name, p[-1:], q[-1:])
        if pi is None:
            return None
        cells = [c for c in np.argsort(-row)[:5] if row[c] * n >= stats.LEAST_VARIANCE]
        e = np.append(row[cells], 1 - row[cells].sum())
        o = np.append(pi[0][cells], 1 - pi[0][cells].sum())
        if len(cells) < 2 and e[-1] * n < stats.LEAST_VARIANCE:
            continue
        distances.append(((o - e) ** 2 / np.maximum(e, 1e-9)).sum())
        weights.append(n)
        freedom += len(e) - 1
    if not freedom:
        return None
    distance = float(np.average(distances, weights=weights))
    return math.ceil(stats.noncentrality_for_power(freedom, LEVEL) / distance)


def variance(p: np.ndarray, h: np.ndarray) -> float:
    """Mean variance of h."""
    return float(((p * h**2).sum(axis=1) - (p * h).sum(axis=1) ** 2).mean())


# --- the table ----------------------------------------------------------------------------------

HEAD = f"{'id':<8}{'by':<5}{'tokens':>8} {'p':>9}  {'effect (limits)':<26} predicted"


def row(name: str, bench: Bench) -> str:
    """One line: caught by, tokens, p, effect, prediction."""
    arm, control = bench.drawn(name)
    failed = []
    for n in sizes(bench.settings.samples or 1):
        found = judged(arm, control, n)
        failed = [t for t in found.judged if t.verdict is Verdict.FAIL]
        if failed:
            break
    if name in RIGHT:
        assert not failed, [t.why for t in failed]
        effects = ", ".join(f"{t.name} {t.fit.effect.value:.3f}" for t in found.judged)
        return f"{name:<8}-    {found.tokens:>8,} {'':>9}  {found.verdict.word}: {effects}"
    expected = predicted(name, bench, arm, control)
    if not failed:
        return f"{name:<8}none {found.tokens:>8,} {'':>9}  {'not caught':<26} {expected}"
    first = min(failed, key=lambda t: t.p_adjusted)
    e = first.fit.effect
    effect = f"{e.value:.3f} ({e.low:.3f} to {e.high:.3f})"
    size = f"{found.tokens:,}"
    line = f"{name:<8}{first.name:<5}{size:>8} {first.p_adjusted:>9.1e}  {effect:<26} {expected}"
    if first.name == "T5":
        line += f" (had {first.fit.n:,})"
    return line


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=[*RIGHT, *WRONG])
    parser.add_argument("--pair", choices=["small", "packaged"], default="packaged")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    settings = ProbeConfig(
        prompts=options.prompts, samples=options.samples, max_tokens=options.max_tokens
    )
    unknown = set(options.names) - {*RIGHT, *VERIFIERS, *DRAFTERS}
    if unknown:
        parser.error(f"no shortcut is called {', '.join(sorted(unknown))}")
    lines = []
    with ExitStack() as stack:
        bench = Bench(stack, options.pair, settings)
        for name in options.names:
            started = time.monotonic()
            lines.append(row(name, bench))
            print(f"{lines[-1]}   [{time.monotonic() - started:.0f} s]", flush=True)
    print("\n".join(["", f"pair {options.pair}", HEAD, *lines]))
    return lines


if __name__ == "__main__":
    main()
