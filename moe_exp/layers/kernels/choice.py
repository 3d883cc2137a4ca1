"""Which parts of the layer use kernels instead of plain torch: all on a CUDA device, none on a CPU.

The switch is per process and not an argument of the layer: row orders and drops are functions of tensors,
called forward and backward, and a process trains one model.
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
_distrusted: dict[str, str] = {}  # see `distrust`


def choose_routing(name: str, *, device_type: str, router_problem: str = "") -> tuple[str, str]:
    """Implementation of router, drops and row orders, and the reason in words.

    Args:
        name: one of ROUTING_KERNELS.
        device_type: `cpu` or `cuda`.
        router_problem: why the router itself takes no kernel, see `router.kernel_problem`.
    """
    if name == "off":
        return "torch", "asked for by ROUTING_KERNELS"
    if device_type == "cpu":
        return "torch", "the kernels are for GPUs"
    if rule := distrusted("routing") or missing():
        return "torch", f"not triton: {rule}"
    if router_problem:
        return (
            "triton",
            f"Triton kernels for row order and drops; the router itself in torch: {router_problem}",
        )
    return "triton", "Triton kernels for the router, row order and drops"


def set_routing_kernels(name: str) -> None:
    """Switches the kernels of routing and row order for this process; the last model built wins.

    Args:
        name: `auto`: on a GPU that can run them; `off`: plain torch everywhere.

    Raises:
        ValueError: for another name.
    """
    global _switched_off
    if name not in ROUTING_KERNELS:
        raise ValueError(f"routing_kernels={name}: is not a choice. Fix: use {' or '.join(ROUTING_KERNELS)}.")
    _switched_off = name == "off"


def distrust(part: str, reason: str) -> None:
    """Disables the kernels of `experts` or `routing` in this process after a failed self-test."""
    _distrusted[part] = reason


def distrusted(part: str) -> str:
    """Why the kernels of `experts` or `routing` are disabled, in words; empty if they are not."""
    return _distrusted.get(part, "")


def takes_kernels(x: Tensor) -> bool:
    """Whether routing and row order of `x` use kernels.

    On a CPU only inside `interpreted_kernels`: Triton's interpreter is far slower than plain torch.
    """
    if _switched_off or _distrusted.get("routing"):
        return False
    return runs_kernel(x) and not _missing() if x.is_cuda else _asked_for and runs_kernel(x)


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Context for tests: kernels also on CPU tensors, if TRITON_INTERPRET=1 was set before the first
    import.
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
