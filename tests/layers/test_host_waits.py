"""The layer never makes the host wait for the GPU, which would run out of work. No GPU is needed: the
operations that would wait are found on a CPU.
"""

from typing import Any

import pytest
import torch

from helpers.layers.references import Waits
from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.losses import AuxLoss


def waits_of(backend: str, router: dict[str, Any], settings: Any, masks: bool = False) -> list[str]:
    """What waits in the second forward and backward pass of a layer."""
    router = {"dtype": "fp32", "use_kernels": backend == "triton", **router}
    options = {"backend": backend, "dtype": torch.float32, "batch_dim": 1, "latent": 4}  # for grouped_mm
    layer = tiny_layer(router=router, **options, **settings)
    x = random(8, 2, HIDDEN, seed=1).float().requires_grad_()
    mask = torch.arange(16).view(8, 2) > 12 if masks else None
    layer(x, padding_mask=mask)[0].sum().backward()
    with Waits() as waits:
        layer(x, padding_mask=mask)[0].sum().backward()
    return waits.found


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
    assert "_local_scalar_dense" in waits_of("torch", {"assignment": "sinkhorn"}, {})
    with Waits() as waits:
        x = torch.arange(3.0)
        torch.as_tensor(1.0)
        x[x > 1]
    assert waits.found == ["lift_fresh", "index"]
