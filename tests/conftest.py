"""Property tests whose outcome no busy machine can change, and processes that start quickly.

Time limits are off, and examples are the same in each run; `SPECCHECK_EXPLORE=1` draws new ones.
Hundreds of processes are started, each of which would compile our modules anew where Python is told
to keep no bytecode.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "speccheck",
    deadline=None,
    derandomize="SPECCHECK_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("speccheck")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
