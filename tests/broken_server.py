"""The embedded server with one thing wrong in its speculation: negative controls over the network.

    python tests/broken_server.py W01 --settings '{"speculative_config": {...}}' --port 0

Only what the running process looks up is replaced; no file of the product changes. `RIGHT` names
configurations in which nothing is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

from shortcuts import (
    AcceptUniformInResidual,
    AcceptWithTarget,
    FreshDrawAfterMismatch,
    TargetWithoutRejected,
)

from speccheck import verifier as v
from speccheck.controls import Lenience, ResampleFromTarget
from speccheck.engine import engine, server
from speccheck.engine.drafters import ModelDrafter


class FallsToLastId(v.Token):
    """W18: the residual is not normalised and what is missing falls to the last id."""

    def final(self, step, tau):
        if tau == step.k:
            return step.row(tau)
        row = self.residual(step, tau)
        row[-1] += 1 - row.sum()
        return row


class BonusFromDraft(v.Token):
    """W29, of its kind: the bonus is drawn from a draft row."""

    def final(self, step, tau):
        return step.q[-1] if tau == step.k > 0 else super().final(step, tau)


class ArgmaxDraft(ModelDrafter):
    """W10: the draft is an argmax but is verified as if it had been drawn."""

    def _choose(self, logits, sequences, position):
        drawn = super()._choose(logits, sequences, position)
        return [
            (int(best), row) for best, (_, row) in zip(logits.argmax(axis=1), drawn, strict=True)
        ]


VERIFIERS: dict[str, v.Verifier] = {
    "W01": ResampleFromTarget(),
    "W05": AcceptWithTarget(),
    "W06": FreshDrawAfterMismatch(),
    "W15": AcceptUniformInResidual(),
    "W18": FallsToLastId(),
    "W23": TargetWithoutRejected(),
    "W26": Lenience(),
    "W29": BonusFromDraft(),
}
DRAFTERS: dict[str, type[ModelDrafter]] = {"W10": ArgmaxDraft}

_MODEL: dict[str, Any] = {
    "method": "draft_model",
    "model": "packaged",
    "num_speculative_tokens": 4,
    "draft_sample_method": "probabilistic",
}
RIGHT: dict[str, dict[str, Any]] = {
    "token": _MODEL,
    "one_hot": _MODEL | {"draft_sample_method": "greedy"},
    "block": _MODEL | {"rejection_sample_method": "block"},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}


def break_engine(name: str) -> None:
    """Put a wrong part where the engine of this process takes the right one from."""
    if name in DRAFTERS:
        engine.ModelDrafter = DRAFTERS[name]  # type: ignore[misc]
    else:
        engine.ALGORITHMS = dict(engine.ALGORITHMS) | {"token": VERIFIERS[name]}  # type: ignore[misc]


if __name__ == "__main__":
    if sys.argv[1] in {*VERIFIERS, *DRAFTERS}:
        break_engine(sys.argv[1])
    sys.exit(server.main(sys.argv[2:]))
