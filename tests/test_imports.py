"""The module order of the design: data flows one way, and so do imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "speccheck"

# This list is the map of the program: a module imports only from those before it.
ORDER = [
    "errors",
    "records",
    "config",
    "corpus",
    "verifier",
    "law",
    "tables",
    "coverage",
    "controls",
    "fixture",
    "engine",
    "suffix",
    "logs",
    "plan",
    "turns",
    "supervise",
    "gpus",
    "vllm",
    "in_vllm",
    "kernels",
    "model_files",
    "launch",
    "dialects",
    "client",
    "eligibility",
    "telemetry",
    "health",
    "drive",
    "store",
    "stats",
    "lossless",
    "battery",
    "grading",
    "quality",
    "drift",
    "measure",
    "speed",
    "tally",
    "hooks",
    "context",
    "sweep",
    "matrix",
    "guardrails",
    "decision",
    "proposal",
    "monitors",
    "scraped",
    "fallback",
    "watch",
    "charts",
    "packet",
    "gateway",
    "estimate",
    "revisit",
    "doctor",
    "probe",
    "replay",
    "slices",
    "shadow",
    "canary",
    "stages",
    "results",
    "console",
    "cli",
    "__main__",
]

ENGINE_MAY_USE = {"errors", "records", "verifier"}

HEAVY = {"scipy", "duckdb", "jinja2", "matplotlib", "onnxruntime", "numpy", "pydantic", "aiohttp"}


def module_of(path: Path) -> str:
    """`engine` for everything in speccheck/engine, otherwise the file's stem."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Modules of speccheck that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "speccheck":
            found |= {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("speccheck."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("speccheck.")}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_those_before_it(path: Path) -> None:
    """No module imports one that stands after it in ORDER."""
    module = module_of(path)
    used = imported_modules(path) - {module}
    if module == "engine":
        assert used <= ENGINE_MAY_USE, f"engine is used by, and does not use: {used}"
        return
    late = {name for name in used if ORDER.index(name) > ORDER.index(module)}
    assert not late, f"{module} imports {late}, which come after it"


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A file that imports backwards is noticed."""
    path = tmp_path / "x.py"
    path.write_text("from speccheck.cli import main\nimport speccheck.store\n")
    assert imported_modules(path) == {"cli", "store"}


def test_only_stats_imports_scipy_and_only_store_and_grading_import_duckdb() -> None:
    """One module owns each heavy dependency (grading runs a model's SQL in a throw-away one)."""
    users: dict[str, set[str]] = {"scipy": set(), "duckdb": set()}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                if name.split(".")[0] in users:
                    users[name.split(".")[0]].add(module_of(path))
    assert users["scipy"] <= {"stats"}
    assert users["duckdb"] <= {"store", "grading"}


def loaded(code: str, of: set[str]) -> str:
    """Which of these modules a fresh Python has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(sorted(set(sys.modules) & {of!r}))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()[-1]


def test_help_loads_nothing_heavy() -> None:
    """`speccheck --help` imports none of the heavy packages."""
    code = (
        "from speccheck.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    )
    assert loaded(code, HEAVY) == "[]"


def test_no_command_waits_for_distributions_that_it_may_not_use() -> None:
    """The main path starts without scipy.stats, which takes longer to import than all else."""
    assert loaded("import speccheck.stages", {"scipy.stats", "scipy.optimize"}) == "[]"
