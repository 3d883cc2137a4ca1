"""The layer never makes the host wait for the GPU, which would run out of work. No GPU is needed: the test
looks for operations that would wait.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

HIDDEN, EXPERTS = 16, 8
# Values that Python gets from a tensor, sizes that depend on values, and tensors made from values of Python:
# on a GPU these are copied from unpinned memory.
WAITING_CALLS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "lift_fresh"}


class Calls(TorchFunctionMode):
    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in WAITING_CALLS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING_OPERATIONS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def waits_of(backend: str, router: dict[str, Any], settings: Any, masks: bool = False) -> list[str]:
    """What waits in the second forward and backward pass of a layer."""
    torch.manual_seed(1)
    layer = MoELayer(
        router=Router(RouterConfig(HIDDEN, EXPERTS, 2, use_kernels=backend == "triton", **router)),
        dispatcher=LocalDispatcher(EXPERTS),
        experts=Experts(
            num_local_experts=EXPERTS, hidden_size=HIDDEN, ffn_size=16, activation="swiglu", backend=backend
        ),
        settings=MoESettings(batch_dim=1, **settings),
    )
    x = torch.randn(8, 2, HIDDEN, requires_grad=True)
    mask = torch.arange(16).view(8, 2) > 12 if masks else None
    layer(x, padding_mask=mask)[0].sum().backward()
    found: list[str] = []
    with Calls(found), Operations(found):
        layer(x, padding_mask=mask)[0].sum().backward()
    return found


LOSSES = {"losses": (AuxLoss("aux_loss", 0.01), AuxLoss("seq_aux_loss", 0.01)), "z_loss_coeff": 1e-3}
PADDED = {"capacity_factor": 1.0, "pad_to_capacity": True}


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("backend", "router", "settings"),
    [
        ("triton", {}, {"losses": LOSSES["losses"][:1], "z_loss_coeff": 1e-3}),
        ("triton", {"score": "sigmoid", "expert_bias": True}, LOSSES),
        ("triton", {}, {"capacity_factor": 1.0}),
        ("triton", {}, PADDED | {"drop_policy": "position"}),
        ("torch", {}, LOSSES),
        ("torch", {"score": "sigmoid", "num_groups": 4, "group_topk": 2}, PADDED),
    ],
)
def test_the_host_never_waits(backend, router, settings, masks):
    if backend == "triton":
        pytest.importorskip("triton")
    # Without kernels and padding, experts need the number of slots that are not masked.
    expected = ["tolist"] if backend == "torch" and masks and settings is LOSSES else []
    assert waits_of(backend, router, settings, masks) == expected


def test_waits_are_found():
    """Of the backend for CPUs, which reads the number of rows, and of Sinkhorn's test for convergence."""
    assert "tolist" in waits_of("loop", {}, {})
    assert {"item", "_local_scalar_dense"} <= set(waits_of("torch", {"assignment": "sinkhorn"}, {}))
    with Operations(found := []):
        x = torch.arange(3.0)
        torch.as_tensor(1.0)
        x[x > 1]
    assert found == ["lift_fresh", "index"]
