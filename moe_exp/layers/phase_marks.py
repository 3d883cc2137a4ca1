"""Where a phase of a layer begins and ends, in forward and in backward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class PhaseTimers(Protocol):
    """What a layer reports its phases to; a phase that was not started may be stopped, which says nothing."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...


def mark(x: Tensor, timers: PhaseTimers, *, ends: str | None = None, begins: str | None = None) -> Tensor:
    """`x` unchanged; between two phases, either of which may be None.

    In backward the gradient of `x` comes by here, from the phase that began after this mark: that one ends
    and the one before it begins. So what a phase computes in both directions is between its two marks. A
    forward pass that backward repeats counts again, for it takes its time again; of one that is repeated in
    the middle of a phase (torch's checkpoints without reentry, which Megatron does not use) the rest of that
    phase is lost.

    Args:
        x: what the phases hand over, any shape.
        timers: told of it.
        ends, begins: names of the phases before and after.
    """
    result: Tensor = _Mark.apply(x, timers, ends, begins)
    return result


def _switch(timers: PhaseTimers, ends: str | None, begins: str | None) -> None:
    if ends is not None:
        timers.stop(ends)
    if begins is not None:
        timers.start(begins)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, timers: PhaseTimers, ends: str | None, begins: str | None) -> Tensor:
        ctx.phases = timers, ends, begins
        _switch(timers, ends, begins)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        timers, ends, begins = ctx.phases
        _switch(timers, begins, ends)
        return grads[0], None, None, None
