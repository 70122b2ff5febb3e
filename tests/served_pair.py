"""Server processes with or without a fault, and rollouts attached to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from test_engine_models import perturbed_model, random_model

HERE = Path(__file__).parent
SMALL_VOCAB = 24


@contextmanager
def served(name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """URL of an embedded server process with this shortcut in it; `right` is none."""
    process = subprocess.Popen(
        [
            *(sys.executable, str(HERE / "broken_server.py"), name),
            *("--settings", json.dumps(settings), "--parent-pid", str(os.getpid())),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def small_pair(folder: Path) -> dict[str, str]:
    """A random target of high entropy, a draft that agrees in part, and prompts in their words."""
    target = random_model(folder / "t", seed=11, vocab=SMALL_VOCAB, layers=1, sharpness=1.6)
    draft = perturbed_model(target, folder / "d", seed=12, noise=0.8)
    for model in (target, draft):  # answers of full length: nothing ends them
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        del config["eos_token_id"]
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(3)
    lines = [
        {
            "id": f"p{i}",
            "task": "noise",
            "route": "all",
            "max_tokens": 16,
            "messages": [
                {
                    "role": "user",
                    "content": " ".join(f"t{j}" for j in rng.integers(2, SMALL_VOCAB, 4)),
                }
            ],
            "check": {"kind": "none"},
        }
        for i in range(24)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "corpus.jsonl").write_text(text, encoding="utf-8")
    return {"target": str(target), "draft": str(draft), "corpus": str(folder / "corpus.jsonl")}


def write_rollout(path: Path, urls: Mapping[str, str], speculation: Mapping[str, Any], **more: Any):
    """A rollout attached to these URLs (target_only, speculative and perhaps draft)."""
    rollout = {
        "name": path.stem,
        "engine": "attached",
        "attached": dict(urls),
        "speculation": dict(speculation),
        "routes": [{"name": "all", "tasks": ["*"]}],
        "replay": {"concurrency": 16},
    }
    path.write_text(json.dumps(rollout | more), encoding="utf-8")
    return path
