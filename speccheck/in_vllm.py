"""vLLM's own rejection sampler on given rounds.

`kernels` runs this text in the interpreter that has vLLM, which need not have speccheck. Rounds
come on standard input; the last line of standard output is the answer (vLLM logs there too).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Read rounds, run them as one batch, count what was committed.

    In: `rounds` [{"drafted": (k,), "p": (k+1, V), "q": (k, V), "n": times}], `probabilistic`
    (whether the sampler is told q), `seed`. Out: `sampled` and `greedy`, a list per round of
    [committed tokens, times]; each round runs once greedy in the same batch.
    """
    asked = json.load(sys.stdin)
    print(f"\n{json.dumps(run(asked))}")


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """See `main`."""
    import torch
    from vllm import __version__
    from vllm.platforms import current_platform

    # Without Triton vLLM puts other kernels in place when a server starts; so do we.
    override = getattr(current_platform, "register_triton_kernel_overrides", None)
    if override is not None:
        override()
    from vllm.v1.sample.rejection_sampler import rejection_sample

    device = torch.device(current_platform.device_type)
    torch.manual_seed(asked["seed"])
    rounds = asked["rounds"]
    k = len(rounds[0]["drafted"])
    times = torch.tensor([r["n"] + 1 for r in rounds])  # one more, greedy
    p = torch.tensor([r["p"] for r in rounds], dtype=torch.float32).repeat_interleave(times, 0)
    q = torch.tensor([r["q"] for r in rounds], dtype=torch.float32).repeat_interleave(times, 0)
    drafted = torch.tensor([r["drafted"] for r in rounds]).repeat_interleave(times, 0)
    n, _, n_tokens = p.shape
    temperature = torch.ones(n)
    temperature[times.cumsum(0) - 1] = 0.0
    bonus = torch.multinomial(p[:, k], 1)  # drawn by vLLM's sampler, not by the kernels tested here
    is_greedy = temperature == 0
    bonus[is_greedy] = p[is_greedy, k].argmax(-1, keepdim=True)
    out = rejection_sample(
        drafted.flatten().to(torch.int32).to(device),
        [k] * n,
        k,
        (torch.arange(1, n + 1) * k).to(torch.int32).to(device),
        q.reshape(n * k, n_tokens).contiguous().to(device) if asked["probabilistic"] else None,
        p[:, :k].reshape(n * k, n_tokens).log().contiguous().to(device),
        bonus.to(torch.int32).to(device),
        SimpleNamespace(
            all_greedy=False,
            all_random=False,
            temperature=temperature.to(device),
            generators={},
        ),
    ).cpu()
    owner = torch.arange(len(rounds)).repeat_interleave(times)
    counts: dict[str, list[Counter[tuple[int, ...]]]] = {
        kind: [Counter() for _ in rounds] for kind in ("sampled", "greedy")
    }
    for row, i, greedy in zip(out.tolist(), owner.tolist(), is_greedy.tolist(), strict=True):
        committed = tuple(token for token in row if token != -1)
        counts["greedy" if greedy else "sampled"][i][committed] += 1
    return {
        "version": __version__,
        "device": str(device),
        **{
            kind: [[[list(c), m] for c, m in one.items()] for one in found]
            for kind, found in counts.items()
        },
    }


if __name__ == "__main__":
    main()
