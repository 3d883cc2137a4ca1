"""Phases of a layer, for timers: `all_to_all` (dispatch and combine) and `experts`, forward and backward."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_exp.layers.dispatcher import Dispatched, Dispatcher, DispatchRecord, Pending, RoutedTokens
from moe_exp.layers.router import RoutingDecision


class PhaseTimers(Protocol):
    """Receives the phases of a layer; stopping a phase that was not started has no effect."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...


class TimedDispatcher(Dispatcher):
    """A dispatcher that reports to timers when its phases and that of the experts begin and end. Where the
    experts take the tokens themselves, theirs is the only phase.
    """

    def __init__(self, dispatcher: Dispatcher, timers: PhaseTimers):
        self.dispatcher, self.timers = dispatcher, timers
        self.exchange_groups, self.pads = dispatcher.exchange_groups, dispatcher.pads
        self._exchange = "all_to_all" if dispatcher.moves_rows else None

    def start(
        self, x_TD: Tensor, decision: RoutingDecision, *, rows_per_expert: int | None = None
    ) -> Pending:
        x_TD = mark(x_TD, self.timers, begins=self._exchange)
        return self.dispatcher.start(x_TD, decision, rows_per_expert=rows_per_expert)

    def finish(self, pending: Pending) -> Dispatched | RoutedTokens:
        found = self.dispatcher.finish(pending)
        if isinstance(found, RoutedTokens):
            return replace(found, x_TD=mark(found.x_TD, self.timers, begins="experts"))
        rows_RD = mark(found.rows_RD, self.timers, ends=self._exchange, begins="experts")
        return replace(found, rows_RD=rows_RD)

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        y_RD = mark(y_RD, self.timers, ends="experts", begins=self._exchange)
        return mark(self.dispatcher.combine(y_RD, record), self.timers, ends=self._exchange)


def mark(x: Tensor, timers: PhaseTimers, *, ends: str | None = None, begins: str | None = None) -> Tensor:
    """Returns `x` unchanged and marks the boundary between two phases, either of which may be None.

    In backward the gradient of `x` crosses the same mark: the phase that began here ends and the one before
    it begins, so each phase's forward and backward lie between its two marks. A forward pass that is
    recomputed counts again, because it takes its time again; if non-reentrant checkpointing (not used by
    Megatron) starts it in the middle of a phase, the rest of that phase is lost.
    """
    return _Mark.apply(x, timers, ends, begins)


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
