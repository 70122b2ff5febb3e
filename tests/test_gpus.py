"""GPUs are asked for where nvidia-ml-py is; without it, a driver or a GPU there are none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from speccheck import doctor, gpus


class FakeError(Exception):
    """As `pynvml.NVMLError`."""


def library(**changes) -> ModuleType:
    """As much of nvidia-ml-py as is used: two GPUs, the second in MIG mode."""
    module = ModuleType("pynvml")

    def rates(handle):
        if handle == 1:
            raise FakeError("not supported")
        return SimpleNamespace(gpu=37)

    functions = {
        "NVMLError": FakeError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: module.calls.append("shutdown"),
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetMemoryInfo": lambda _h: SimpleNamespace(total=80 << 30, used=10 << 30),
        "nvmlDeviceGetUtilizationRates": rates,
        "nvmlDeviceGetName": lambda i: f"GPU {i}",
        "calls": [],
    }
    for name, value in (functions | changes).items():
        setattr(module, name, value)
    return module


def test_name_memory_and_utilisation(monkeypatch):
    """Of each; what it does not say is unknown, not 0."""
    monkeypatch.setitem(sys.modules, "pynvml", module := library())
    first, second = gpus.found()
    assert (first.name, first.memory_bytes >> 30, first.utilisation) == ("GPU 0", 80, 0.37)
    assert second.utilisation is None
    assert module.calls == ["shutdown"]
    assert "0: GPU 0, 70 of 80 GiB free, 37% busy; 1: GPU 1" in doctor._gpus().text


def fails(*_):
    raise FakeError("driver")


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_no_driver_is_no_gpu(monkeypatch, name):
    """Wherever it gives up."""
    monkeypatch.setitem(sys.modules, "pynvml", library(**{name: fails}))
    assert gpus.found() == ()


def test_without_the_package(monkeypatch):
    """It is no dependency."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.found() == ()


@pytest.mark.parametrize(
    ("devices", "names"),
    [(None, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("GPU-8a2b", [0, 1]), ("", [0, 1])],
)
def test_what_a_server_sees(monkeypatch, devices, names):
    """Numbers choose; names that are no numbers choose nothing that we could tell."""
    monkeypatch.setitem(sys.modules, "pynvml", library())
    assert [gpu.index for gpu in gpus.visible(gpus.found(), devices)] == names
