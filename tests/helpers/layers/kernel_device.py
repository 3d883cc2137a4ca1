"""Where the kernels of the tests run: interpreted on the CPU without a CUDA device (tests/conftest.py)."""

from types import ModuleType

import pytest
import torch

from moe_exp.layers.kernels import tuning
from moe_exp.layers.kernels.launch import INTERPRETED, missing

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernels = pytest.mark.skipif(
    bool(missing()) or not (INTERPRETED or torch.cuda.is_available()), reason=missing() or "no device"
)

needs_descriptors = pytest.mark.skipif(
    not INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)),
    reason="needs a GPU of compute capability 9.0 or newer",
)


def use_descriptors(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Has the kernel of a module take its first config with tensor descriptors."""
    config = next(config for config in module.CONFIGS if config["TMA"])
    monkeypatch.setattr(module._kernel, "configs", [tuning.make_config(config)])
    monkeypatch.setattr(module._kernel, "choices", {})
    monkeypatch.setattr(module._kernel, "_launchers", {})


def at_real_size(*values: object) -> object:
    """A parameter of real size: skipped where there is no CUDA device."""
    return pytest.param(
        *values, marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")]
    )
