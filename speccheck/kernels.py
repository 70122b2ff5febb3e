"""The rejection sampling that a vLLM installation runs, on the fixture's table.

The fixture proves the algorithm that a speculative config names; a server runs vLLM's kernels. Here
they are called in the interpreter that has vLLM (`in_vllm`), on rounds that begin at the table's
first position, and what they commit is held against the exact law of such a round. That says
nothing of how a server makes the rows it hands to them: replay looks at that.

Tested is `v1/sample/rejection_sampler.rejection_sample` of the V1 runner, with whatever kernels
that machine gives it; the V2 runner's sampler has no entry that can be called alone.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speccheck.errors import EngineError
from speccheck.fixture import CHI_SQUARE_ALARM, Chi2Tail, chi_square
from speccheck.law import DRAFT_SAMPLING, Decoding, Table, blocks, round_law
from speccheck.verifier import ALGORITHMS, Greedy

N_ROUNDS = 20_000
TIMEOUT_S = 300.0
"""Importing vLLM alone takes 10 to 60 s, by how busy the machine is."""
_SEED = 1


@dataclass(frozen=True)
class AcceptedLength:
    """How often a round accepted so many drafts."""

    accepted: int
    exact: str
    """As a fraction."""
    expected: float
    observed: float


@dataclass(frozen=True)
class Kernels:
    """What vLLM's rejection sampler did on the table."""

    version: str
    device: str
    n: int
    """Rounds drawn."""
    lengths: tuple[AcceptedLength, ...]
    statistic: float | None
    """Chi-square over whole committed blocks; None where an impossible one came up."""
    df: int
    p_value: float
    level: float
    """Rejects below."""
    greedy_rounds: int
    greedy_wrong: int
    """Rounds at temperature 0, in the same batch, that are not the target's argmaxes."""

    @property
    def reasons(self) -> list[str]:
        """Why it failed; empty if it passed."""
        found = []
        if self.p_value < self.level:
            found.append(
                f"vLLM {self.version}'s rejection sampler does not keep the target's law on the "
                f"fixture's table: p {self.p_value:.2g} over {self.n} rounds (level {self.level:g})"
            )
        if self.greedy_wrong:
            found.append(
                f"vLLM {self.version}'s rejection sampler at temperature 0: {self.greedy_wrong} of "
                f"{self.greedy_rounds} rounds are not the target's argmaxes"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the reasons in it."""
        return asdict(self) | {"reasons": self.reasons}


def run(
    table: Table, python: str, *, algorithm: str, draft_sampling: str, chi2_sf: Chi2Tail
) -> Kernels | str:
    """Conformance of the vLLM that `python` has; or, in words, why it was not tested.

    Args:
        table: the fixture's.
        python: an interpreter that has vLLM.
        algorithm: of the fixture; the sampler has none for blocks.
        draft_sampling: how drafts are drawn, see `law.DRAFT_SAMPLING`.
        chi2_sf: tail of the chi-square law.
    """
    if algorithm not in ("token", "one_hot"):
        return f"{algorithm} verification is not in the sampler that can be called alone"
    decoding = Decoding(table, ALGORITHMS[algorithm], DRAFT_SAMPLING[draft_sampling])
    asked = _rounds(decoding, probabilistic=algorithm == "token")
    try:
        answer = _ask(python, asked)
    except EngineError as error:
        return str(error)
    return _judge(decoding, asked, answer, chi2_sf)


def _rounds(decoding: Decoding, *, probabilistic: bool) -> dict[str, Any]:
    """Every block that can be drafted first, with its rows and how often it is."""
    start = decoding.start()
    drawn = blocks(decoding, start)
    shares = np.array([float(mass) for _, mass in drawn])
    times = np.random.default_rng(_SEED).multinomial(N_ROUNDS, shares / shares.sum())
    rounds = []
    for (drafted, _), n in zip(drawn, times, strict=True):
        step = decoding.step(start, drafted)
        rounds.append(
            {
                "drafted": list(drafted),
                "p": step.p.astype(float).tolist(),
                "q": step.q[: step.k].astype(float).tolist(),
                "n": int(n),
            }
        )
    return {"rounds": rounds, "probabilistic": probabilistic, "seed": _SEED}


def _ask(python: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    # As text: run as a file, its folder would come first among imports, and `vllm` would be ours.
    source = Path(__file__).with_name("in_vllm.py").read_text(encoding="utf-8")
    command = [python, "-c", source]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{python} did not run ({error})") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise EngineError(f"vLLM's rejection sampler could not be called ({last[:200]})")
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise EngineError("vLLM's rejection sampler could not be called (no answer)") from None
    return found


def _judge(
    decoding: Decoding, asked: Mapping[str, Any], answer: Mapping[str, Any], chi2_sf: Chi2Tail
) -> Kernels:
    exact: dict[tuple[int, ...], Any] = defaultdict(int)
    for (tokens, _, _), mass in round_law(decoding, decoding.start()).items():
        exact[tokens] += mass
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    for found in answer["sampled"]:
        for tokens, times in found:
            seen[tuple(tokens)] += times
    outcomes = sorted(exact.keys() | seen.keys())
    n = sum(seen.values())
    observed = np.array([seen.get(one, 0) for one in outcomes])
    statistic, df = chi_square(observed, n * np.array([float(exact.get(o, 0)) for o in outcomes]))
    lengths = []
    for tau in range(len(asked["rounds"][0]["drafted"]) + 1):
        mass = sum((m for tokens, m in exact.items() if len(tokens) == tau + 1), start=0)
        times = sum(m for tokens, m in seen.items() if len(tokens) == tau + 1)
        lengths.append(AcceptedLength(tau, str(mass), float(mass), times / n))
    greedy = Decoding(decoding.table, Greedy(), decoding.drafting, decoding.proposal_length)
    wrong = sum(
        tuple(found[0][0]) != _argmaxes(greedy, tuple(one["drafted"]))
        for one, found in zip(asked["rounds"], answer["greedy"], strict=True)
    )
    return Kernels(
        version=answer["version"],
        device=answer["device"],
        n=n,
        lengths=tuple(lengths),
        statistic=None if np.isinf(statistic) else statistic,
        df=df,
        p_value=0.0 if np.isinf(statistic) else chi2_sf(statistic, df),
        level=CHI_SQUARE_ALARM,
        greedy_rounds=len(asked["rounds"]),
        greedy_wrong=wrong,
    )


def _argmaxes(decoding: Decoding, drafted: tuple[int, ...]) -> tuple[int, ...]:
    """What temperature 0 commits of a block: the target's argmaxes until one differs."""
    start = decoding.start()
    committed: list[int] = []
    for i in range(len(drafted) + 1):
        best = int(decoding.target_row(start, drafted[:i]).argmax())
        committed.append(best)
        if i == len(drafted) or best != drafted[i]:
            break
    return tuple(committed)
