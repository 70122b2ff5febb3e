"""A wheel, built and installed into a fresh virtual environment, works away from the checkout.

Run by `make wheel-check` and CI. Not a pytest test: it installs packages and takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ROLLOUT = """\
name: wheel
speculation: {method: draft_model, model: packaged, num_speculative_tokens: 4}
corpus: {limit_per_task: 4}
replay: {control_concurrency: 4, probe: {prompts: 2, samples: 3, max_tokens: 8}}
shadow: {requests_per_route: 8, blocks: 4, rate_per_s: 8}
canary: {shares: [0.5], requests_per_step: 16, min_speculative: 4, watch_requests: 0}
client_limits: {lag_floor_s: 1000, loop_stall_s: 1000, loop_stall_share: 1, loop_cpu_share: null}
routes:
  - name: support
    tasks: [support]
"""


def run(command: list[str | Path], cwd: Path, allowed: tuple[int, ...] = (0,)) -> None:
    """Run a command; end with its output if its exit code is not an allowed one."""
    print("$", " ".join(str(part) for part in command), flush=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in allowed:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(f"exit code {done.returncode}, expected one of {allowed}")


def main() -> None:
    """Build, install, run."""
    with tempfile.TemporaryDirectory() as name:
        away = Path(name)
        run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", away, ROOT],
            cwd=away,
        )
        (wheel,) = away.glob("speccheck-*.whl")
        print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB")
        venv.create(away / "venv", with_pip=True)
        binary = away / "venv" / "bin"
        run([binary / "python", "-m", "pip", "install", "-q", wheel], cwd=away)
        (away / "rollout.yaml").write_text(ROLLOUT, encoding="utf-8")
        run([binary / "speccheck", "trace", "--seed", "18"], cwd=away)
        run([binary / "speccheck", "stage", "fixture"], cwd=away)
        # So few requests cannot decide anything: inconclusive is the right answer.
        run([binary / "speccheck", "run", "--keep-going"], cwd=away, allowed=(3,))
        packet = away / "speccheck-run" / "packet.html"
        if not packet.is_file():
            sys.exit("no packet was written")
        print(f"packet: {packet.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
