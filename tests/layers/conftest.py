"""Fixtures of the tests of kernels."""

import pytest
import torch
from torch.utils._device import _device_constructors

from moe_exp.layers.kernels import launch


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in the place of the kernels, as on a CPU without the interpreter."""
    monkeypatch.setattr(launch, "INTERPRETED", False)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its relatives give NaN, or the largest integer: what a kernel leaves out shows."""
    _device_constructors()  # torch keeps what it finds the first time; `torch.device` as a context needs it

    def filled(make):
        def call(*args, **kwargs):
            x = make(*args, **kwargs)
            if x.dtype == torch.bool:
                return x.fill_(True)
            return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
