"""Which parts of the layer take a kernel where plain torch would do the same: all on a CUDA device, none on a
CPU.

The switch is one for the process and not an argument of the layer: row orders and drops are functions of
tensors, called forward and backward, and a process trains one model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from moe_exp.layers.kernels.launch import missing, runs_kernel

ROUTING_KERNELS = ("auto", "off")

_asked_for = False
_switched_off = False


def choose_routing(name: str, *, device_type: str, router_problem: str = "") -> tuple[str, str]:
    """What the router, drops and row orders run, and the reason in words.

    Args:
        name: one of ROUTING_KERNELS.
        device_type: `cpu` or `cuda`.
        router_problem: why the router itself takes no kernel, see `router.kernel_problem`.
    """
    if name == "off":
        return "torch", "asked for by ROUTING_KERNELS"
    if device_type == "cpu":
        return "torch", "the kernels are for GPUs"
    if rule := missing():
        return "torch", f"not triton: {rule}"
    if router_problem:
        return (
            "triton",
            f"Triton kernels for row order and drops; the router itself in torch: {router_problem}",
        )
    return "triton", "Triton kernels for the router, row order and drops"


def set_routing_kernels(name: str) -> None:
    """Switches the kernels of routing and row order for all layers of this process: what ROUTING_KERNELS says
    of the last model built.

    Args:
        name: `auto`: on a GPU that can run them; `off`: plain torch everywhere.

    Raises:
        ValueError: for another name.
    """
    global _switched_off
    if name not in ROUTING_KERNELS:
        raise ValueError(f"routing_kernels={name}: is not a choice. Fix: use {' or '.join(ROUTING_KERNELS)}.")
    _switched_off = name == "off"


def takes_kernels(x: Tensor) -> bool:
    """Whether routing and row order of `x` go through kernels.

    On a CPU Triton's interpreter would run them, far slower than plain torch: only inside
    `interpreted_kernels`.
    """
    if _switched_off:
        return False
    return runs_kernel(x) and not _missing() if x.is_cuda else _asked_for and runs_kernel(x)


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Inside, also tensors of a CPU take kernels, where TRITON_INTERPRET=1 was set before the first import:
    for tests.
    """
    global _asked_for
    before, _asked_for = _asked_for, True
    try:
        yield
    finally:
        _asked_for = before


@functools.cache
def _missing() -> str:
    return missing()
