"""Two scripted servers as the arms of a rollout, and a stage of it run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_server import Script, ScriptedServer, answer, spec_metrics

from speccheck import context, results, stages
from speccheck.console import Reporter
from speccheck.records import Arm, Stage

MODELS = {"/v1/models": {"data": [{"id": "target"}]}}
ROLLOUT: dict[str, Any] = {
    "name": "attached",
    "engine": "attached",
    "speculation": {"method": "ngram", "num_speculative_tokens": 4},
    "corpus": {"paths": ["corpus.jsonl"]},
    "fixture": {"seeds": 500},
    "shadow": {"requests_per_route": 40, "rate_per_s": 200, "blocks": 4},
    "canary": {"shares": [0.5], "requests_per_step": 40, "rate_per_s": 200, "watch_requests": 0},
    "warm_up": 1,
    "routes": [{"name": "chat"}],
}


def target_answer(_body: dict[str, Any], _n: int) -> Script:
    """40 tokens, one a chunk."""
    return answer([[i] for i in range(40)], finish="length")


def speculative_answer(_body: dict[str, Any], _n: int) -> Script:
    """The same 40 tokens in chunks of four, with counts: 30 of 40 drafted tokens accepted."""
    steps = [[4 * i + j for j in range(4)] for i in range(10)]
    return answer(steps, finish="length", metrics=spec_metrics([(3, 4)] * 10, 4))


@dataclass
class Pair:
    """The running servers, and the folder of the rollout that names them."""

    folder: Path
    servers: Mapping[Arm, ScriptedServer]

    @property
    def rollout(self) -> Path:
        """The rollout file."""
        return self.folder / "rollout.yaml"

    def run(self, stage: Stage, *, keep_going: bool = True) -> results.Outcome:
        """Run one stage; what it came to."""
        out = self.folder / "run"
        with context.open_run(self.rollout, out, Reporter(), fresh=False) as opened:
            stages.run_stage(opened, stage, stop_early=not keep_going)
            return results.outcome(opened.store, opened.run_id, [stage])


@contextmanager
def attached_pair(
    folder: Path,
    *,
    target: Callable[[dict[str, Any], int], Script] = target_answer,
    speculative: Callable[[dict[str, Any], int], Script] = speculative_answer,
    prompts: int = 8,
    protected: int = 0,
    **changes: Any,
) -> Iterator[Pair]:
    """Both servers, running, and a rollout over `prompts` prompts, and `protected` ones beside;
    `changes` replace the rollout's keys.
    """
    with ScriptedServer(target, MODELS) as one, ScriptedServer(speculative, MODELS) as other:
        attached = {"target_only": one.url, "speculative": other.url}
        rollout = ROLLOUT | {"attached": attached} | changes
        (folder / "rollout.yaml").write_text(json.dumps(rollout), encoding="utf-8")
        lines = [
            {
                "id": f"p{i}",
                "task": "qa",
                "route": "chat",
                "messages": [{"role": "user", "content": f"question {i}"}],
                "max_tokens": 40,
                "check": {"kind": "none"},
                "priority": "normal" if i < prompts else "protected",
            }
            for i in range(prompts + protected)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "corpus.jsonl").write_text(text, encoding="utf-8")
        yield Pair(folder, {Arm.TARGET_ONLY: one, Arm.SPECULATIVE: other})
