"""Marks where a phase of a layer begins and ends, in forward and in backward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class PhaseTimers(Protocol):
    """Receives the phases of a layer; stopping a phase that was not started has no effect."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...


def mark(x: Tensor, timers: PhaseTimers, *, ends: str | None = None, begins: str | None = None) -> Tensor:
    """Returns `x` unchanged and marks the boundary between two phases, either of which may be None.

    In backward the gradient of `x` crosses the same mark: the phase that began here ends and the one before
    it begins, so each phase's forward and backward lie between its two marks. A forward pass that is
    recomputed counts again, because it takes its time again; if non-reentrant checkpointing (not used by
    Megatron) starts it in the middle of a phase, the rest of that phase is lost.
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
