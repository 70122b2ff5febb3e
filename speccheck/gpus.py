"""The NVIDIA GPUs of this machine, by nvidia-ml-py where it is installed; nothing depends on it.

Absent (no GPU, no driver, no package) is an empty answer, never an error: the CPU build of vLLM and
the embedded engine need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as it is now."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    utilisation: float | None
    """Share of the last moment in which it worked; None where it does not say (MIG)."""
    driver: str

    def to_dict(self) -> dict[str, Any]:
        """What stays as it is from one moment to the next: part of what a run rests on."""
        return {"name": self.name, "memory_bytes": self.memory_bytes, "driver": self.driver}


def found() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows, in its order."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver, or no GPU
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(pynvml, i, driver) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int, driver: str) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:
        utilisation = None
    name = str(pynvml.nvmlDeviceGetName(handle))
    return Gpu(index, name, int(memory.total), int(memory.used), utilisation, driver)


def visible(all_of_them: tuple[Gpu, ...], devices: str | None) -> tuple[Gpu, ...]:
    """Those that a CUDA_VISIBLE_DEVICES shows; all where it is not set or names none by number.

    >>> visible((), "0,1")
    ()
    """
    if devices is None:
        return all_of_them
    wanted = {int(part) for part in devices.split(",") if part.strip().isdigit()}
    return tuple(gpu for gpu in all_of_them if gpu.index in wanted) or all_of_them
