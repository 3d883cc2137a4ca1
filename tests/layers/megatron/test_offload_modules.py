"""OFFLOAD_MODULES: the device's gradients, however late the copies are, and two modules' tensors there.

The simulated device computes at once, so a copy that starts before its source is computed goes unnoticed.
Whole models: test_recompute_modules.py. Bytes: tests/planner/costs/test_saved_tensors.py.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.layers.streams import Device
from moe_exp.layers.megatron import saved_tensors
from moe_exp.layers.megatron.saved_tensors import ActivationOffload

WIDTH = 64
BYTES = 2 * 32 * WIDTH * 4  # of a module: its input, and the result of tanh


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention, self.mlp = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        x = x + self.self_attention(x)
        return x + self.mlp(x).sigmoid()


class Chunk(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.decoder = SimpleNamespace(layers=nn.ModuleList(Layer() for _ in range(4)))
        self.layers = self.decoder.layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def on_device(monkeypatch):
    """The bytes there now and at most. Freed bytes become NaN."""
    bytes_now = {"now": 0, "most": 0}

    class Saved(saved_tensors._Saved):
        _bytes = None

        @property
        def on_device(self):
            return self._bytes

        @on_device.setter
        def on_device(self, tensor):
            if self._bytes is not None:
                bytes_now["now"] -= self._bytes.numel()
                self._bytes.fill_(255)
            self._bytes = tensor
            bytes_now["now"] += 0 if tensor is None else tensor.numel()
            bytes_now["most"] = max(bytes_now.values())

        def __del__(self):
            self.on_device = None

    monkeypatch.setattr(saved_tensors, "_Saved", Saved)
    monkeypatch.setattr(saved_tensors, "SMALLEST", 0)
    return bytes_now


def gradients(chunk, order):
    """After passes such as FFBB: forward, forward, backward of the first, backward of the second."""
    losses, generator = [], torch.Generator().manual_seed(1)
    for kind in order:
        if kind == "F":
            losses.append(chunk.forward(torch.randn(32, WIDTH, generator=generator)).square().mean())
        else:
            losses.pop(0).backward()
    return [weight.grad for weight in chunk.parameters()]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", ["FB", "FBFB", "FFBB", "FFBFBB"])
@pytest.mark.parametrize("modules", [["attention"], ["mlp"], ["attention", "mlp"]])
def test_copies_may_be_late(modules, order, late, on_device, monkeypatch):
    expected = gradients(Chunk(), order)
    Device(monkeypatch, late=(False, late))
    chunk = Chunk()
    ActivationOffload(chunk, modules)
    states, arrive = [], saved_tensors._Group.arrive
    monkeypatch.setattr(
        saved_tensors._Group, "arrive", lambda self: (states.append(self._state), arrive(self))
    )
    for ours, theirs in zip(gradients(chunk, order), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert on_device["now"] == 0
    # Copies back have started before, but for the last module of a pass that others followed.
    assert states.count("on the host") == {"FFBB": 1, "FFBFBB": 2}.get(order, 0)
    assert states.count("returning") == (4 * len(modules) - 1) * order.count("F")
    # with the backward of another micro-batch, also those of the last module
    assert on_device["most"] == (3 if "FF" in order else 2) * BYTES
