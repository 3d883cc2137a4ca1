"""Differentiable collectives over rows: what one sends forward comes back as gradient. Shape suffixes in
`moe_exp.layers`.

An `Exchange` says what moves; its `reverse` is its transpose, hence its gradient. It runs in one of two ways:

- `exchange_rows(exchange, x)` launches and waits.
- `arrive(depart(exchange, x, ...))` launches in `depart` and waits in `arrive`. Each is a node of the
  autograd graph: `arrive` launches the reverse exchange in backward and `depart` waits for it. Autograd runs,
  among the nodes that are ready, the one that was made last; so whatever ran between the two in forward runs
  between them in backward, and hides the reverse exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_exp.host import gloo


class Arrival:
    """Tensors that a launched collective will give.

    Args:
        wait: waits and returns them. On a GPU the current stream waits, not the host; it has to be the stream
            of the launch, on which the allocator would otherwise give away the memory that is still being
            sent.
    """

    def __init__(self, wait: Callable[[], list[Tensor | None]]):
        self._wait = wait

    def wait(self) -> list[Tensor | None]:
        return self._wait()


class Exchange(Protocol):
    """What moves where."""

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        """Starts to move `tensors`, None among them staying None; keeps them alive until the arrival is
        waited for.
        """

    @property
    def reverse(self) -> Exchange:
        """The transpose: moves gradients back."""


@dataclass(frozen=True, kw_only=True)
class _OneByOne(ABC):
    """Moves each tensor by a collective of its own, all of them under way together."""

    group: ProcessGroup | None

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        if self.group is None or self.group.size() == 1:
            # Detached: what an autograd function returns must not have a history.
            here = [None if x is None else x.detach() for x in tensors]
            return Arrival(lambda: here)
        sent = [None if x is None else x.contiguous() for x in tensors]
        moves = [None if x is None else self._launch(x, self.group) for x in sent]

        def wait(_alive: Any = sent) -> list[Tensor | None]:
            return [None if move is None else move() for move in moves]

        return Arrival(wait)

    @abstractmethod
    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Starts to move one tensor; what it returns waits for the result."""


@dataclass(frozen=True, kw_only=True)
class AllToAll(_OneByOne):
    """Sends `send[i]` rows to rank i, in that order, and receives `receive[i]` rows from it."""

    send: Sequence[int]
    receive: Sequence[int]

    @property
    def reverse(self) -> AllToAll:
        return AllToAll(group=self.group, send=self.receive, receive=self.send)

    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        out = x.new_empty(sum(self.receive), *x.shape[1:])
        work = torch.distributed.all_to_all_single(
            out, x, list(self.receive), list(self.send), group=group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return out

        return wait


@dataclass(frozen=True, kw_only=True)
class GatherRows(_OneByOne):
    """Rows of all ranks, one rank after the other; `sizes[i]` rows are on rank i."""

    sizes: Sequence[int]

    @property
    def reverse(self) -> ScatterSumRows:
        return ScatterSumRows(group=self.group, sizes=self.sizes)

    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        # gloo refuses blocks of different sizes, so each is padded to the largest.
        largest = max(self.sizes)
        block = x if x.size(0) == largest else torch.cat([x, x.new_zeros(largest - x.size(0), *x.shape[1:])])
        out = x.new_empty(len(self.sizes) * largest, *x.shape[1:])
        work = gloo.all_gather(out, block, group=group, async_op=True)

        def wait(_alive: Tensor = block) -> Tensor:
            work.wait()
            if min(self.sizes) == largest:
                return out
            return torch.cat([part[:size] for part, size in zip(out.split(largest), self.sizes, strict=True)])

        return wait


@dataclass(frozen=True, kw_only=True)
class ScatterSumRows(_OneByOne):
    """Sum of the rows over ranks, of which rank i keeps its `sizes[i]`."""

    sizes: Sequence[int]

    @property
    def reverse(self) -> GatherRows:
        return GatherRows(group=self.group, sizes=self.sizes)

    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        largest = max(self.sizes)
        if min(self.sizes) != largest:
            padded = x.new_zeros(len(self.sizes), largest, *x.shape[1:])
            for block, part in zip(padded, x.split(list(self.sizes)), strict=True):
                block[: part.size(0)] = part
            x = padded.flatten(0, 1)
        out = x.new_empty(largest, *x.shape[1:])
        work = gloo.reduce_scatter(out, x, group=group, async_op=True)

        def wait(_alive: Tensor = x) -> Tensor:
            work.wait()
            return out[: self.sizes[group.rank()]]

        return wait


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        (out,) = exchange.launch([x]).wait()
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.apply(grads[0], ctx.exchange.reverse), None


class _Flight:
    """What `_Depart` and `_Arrive` tell each other. Not part of the graph: holds collectives under way, in
    either direction.
    """

    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        self.outward: Arrival | None = None
        self.homeward: Arrival | None = None
        self.needs_grad: tuple[bool, ...] = ()


class _Depart(torch.autograd.Function):
    """Gives an empty tensor, the edge of the graph to `_Arrive`: the tensors themselves do not exist yet."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: Tensor) -> Tensor:
        ctx.flight = flight
        flight.needs_grad = ctx.needs_input_grad[1:]
        flight.outward = flight.exchange.launch(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arrival, ctx.flight.homeward = ctx.flight.homeward, None
        return None, *arrival.wait()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, flight: _Flight) -> tuple[Tensor | None, ...]:
        ctx.flight, ctx.edge = flight, edge.detach()
        assert flight.outward is not None
        arrival, flight.outward = flight.outward, None
        tensors = tuple(arrival.wait())
        ctx.mark_non_differentiable(
            *(x for x, needed in zip(tensors, flight.needs_grad, strict=True) if not needed)
        )
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        needed = [grad if needed else None for grad, needed in zip(grads, flight.needs_grad, strict=True)]
        flight.homeward = flight.exchange.reverse.launch(needed)
        return ctx.edge, None


class Departed(NamedTuple):
    """Tensors under way; for `arrive`, once."""

    edge: Tensor
    flight: _Flight


def depart(exchange: Exchange, *tensors: Tensor) -> Departed:
    """Launches the exchange of `tensors`, the first of which is a floating-point one; gradients come to those
    that need them.
    """
    flight = _Flight(exchange)
    return Departed(_Depart.apply(flight, *tensors), flight)


def arrive(departed: Departed) -> tuple[Tensor, ...]:
    """Waits for the tensors of `depart`.

    Raises:
        RuntimeError: they arrived before. Two arrivals would both send gradients back.
    """
    if departed.flight.outward is None:
        raise RuntimeError("arrive: these tensors arrived before. Fix: take one result of one depart.")
    return _Arrive.apply(*departed)


def exchange_rows(exchange: Exchange, x_RD: Tensor) -> Tensor:
    """Launches and waits; differentiable any number of times."""
    return _Exchanged.apply(x_RD, exchange)


def gather_rows(x_RD: Tensor, *, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Rows of all ranks, one rank after the other; `sizes[i]` rows are on rank i. The gradient is summed over
    ranks.
    """
    return exchange_rows(GatherRows(group=group, sizes=sizes), x_RD)
