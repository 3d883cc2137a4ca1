"""Which parts of the layer take a kernel where plain torch would do the same: all on a CUDA device, none on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from moe_exp.layers.kernels.launch import missing, runs_kernel

_asked_for = False


def takes_kernels(x: Tensor) -> bool:
    """Whether routing and row order of `x` go through kernels.

    On a CPU Triton's interpreter would run them, far slower than plain torch: only inside `interpreted_kernels`.
    """
    return runs_kernel(x) and not _missing() if x.is_cuda else _asked_for and runs_kernel(x)


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Inside, also tensors of a CPU take kernels, where TRITON_INTERPRET=1 was set before the first import: for tests."""
    global _asked_for
    before, _asked_for = _asked_for, True
    try:
        yield
    finally:
        _asked_for = before


@functools.cache
def _missing() -> str:
    return missing()
