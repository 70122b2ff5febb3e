"""Property tests whose outcome no busy machine can change, and processes that start quickly.

Time limits are off, and examples are the same in each run; `SPECCHECK_EXPLORE=1` draws new ones.
Hundreds of processes are started, each of which would compile our modules anew where Python is told
to keep no bytecode.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "speccheck",
    deadline=None,
    derandomize="SPECCHECK_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("speccheck")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONG = (
    *("test_main_path", "test_engine_law", "test_gateway_process", "test_launch_vllm"),
    *("test_faults", "test_resume", "test_probe", "test_sweep", "test_shortcuts", "test_packet"),
)
"""Files that take longest, which xdist hands out first: none is left alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; with `--no-loadscope-reorder` xdist keeps this order."""
    place = {name: n for n, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
