"""Differentiable collectives over rows. Shape suffixes: see `moe_exp.layers`.

An `Exchange` moves rows between ranks. Its `reverse` is the transposed exchange, which moves the gradients.
There are two ways to run an exchange:

- `exchange_rows(exchange, x)` launches the exchange and waits for the result.
- `arrive(depart(exchange, x, ...))` launches in `depart` and waits in `arrive`. `depart` and `arrive` are
  nodes of the autograd graph: in backward, `arrive` launches the reverse exchange and `depart` waits for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager

from moe_exp.host import gloo

# Waits for a collective in flight and returns its results. On a GPU the current stream waits, not the host.
# This must be the stream of the launch; otherwise the allocator could reuse memory that is still being sent.
Arrival = Callable[[], list[Tensor | None]]


class Exchange(Protocol):
    """An exchange of rows between ranks."""

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        """Starts moving `tensors`. They stay alive until the returned function is called. None stays None."""

    @property
    def reverse(self) -> "Exchange":
        """The transposed exchange, which moves gradients back."""


@dataclass(frozen=True, kw_only=True)
class _OneByOne(ABC):
    """Moves each tensor with its own collective; all collectives run concurrently."""

    group: ProcessGroup | None

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        if self.group is None or self.group.size() == 1:
            # Detached, because an autograd function must not return tensors with a history.
            here = [None if x is None else x.detach() for x in tensors]
            return lambda: here
        sent = [None if x is None else x.contiguous() for x in tensors]
        moves = [None if x is None else self._launch(x, self.group) for x in sent]

        def wait(_alive: Any = sent) -> list[Tensor | None]:
            return [None if move is None else move() for move in moves]

        return wait

    @abstractmethod
    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        """Starts moving one tensor, and returns a function that waits for the result."""


@dataclass(frozen=True, kw_only=True)
class AllToAll(_OneByOne):
    """Sends `send[i]` rows to rank i and receives `receive[i]` rows from it. Rows are in rank order."""

    send: Sequence[int]
    receive: Sequence[int]

    @property
    def reverse(self) -> "AllToAll":
        return AllToAll(group=self.group, send=self.receive, receive=self.send)

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        moved = [x for x in tensors if x is not None]
        if len(moved) < 2 or not can_join(self.group, moved[0].device):
            return super().launch(tensors)
        with _coalescing_manager(self.group, moved[0].device, async_ops=True) as joint:
            arrival = super().launch(tensors)

        def wait() -> list[Tensor | None]:
            joint.wait()
            return arrival()

        return wait

    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        out = x.new_empty(sum(self.receive), *x.shape[1:])
        work = torch.distributed.all_to_all_single(
            out, x, list(self.receive), list(self.send), group=group, async_op=True
        )

        def wait() -> Tensor:
            if work is not None:  # on ranks of the group, None if `launch` waits for all tensors together
                work.wait()
            return out

        return wait


@dataclass(frozen=True, kw_only=True)
class GatherRows(_OneByOne):
    """Concatenates the rows of all ranks; rank i has `sizes[i]` rows."""

    sizes: Sequence[int]

    @property
    def reverse(self) -> "ScatterSumRows":
        return ScatterSumRows(group=self.group, sizes=self.sizes)

    def _launch(self, x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
        # gloo does not support blocks of different sizes, so each is padded to the largest.
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
    """Sums rows over ranks; rank i keeps its `sizes[i]` rows."""

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


def can_join(group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether the group's backend can run several all-to-alls as one (NCCL: in one kernel)."""
    return group is not None and group.size() > 1 and group._get_backend(device).supports_coalescing


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        (out,) = exchange.launch([x])()
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.apply(grads[0], ctx.exchange.reverse), None


@dataclass(eq=False)
class _Flight:
    """Collectives in flight; `_Depart` and `_Arrive` share this state outside the autograd graph."""

    exchange: Exchange
    outward: Arrival | None = None
    homeward: Arrival | None = None
    needs_grad: tuple[bool, ...] = ()


class _Depart(torch.autograd.Function):
    """Starts the exchange. Returns an empty tensor that links the autograd graph to `_Arrive`."""

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
        return None, *arrival()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, flight: _Flight) -> tuple[Tensor | None, ...]:
        ctx.flight, ctx.edge = flight, edge.detach()
        assert flight.outward is not None
        arrival, flight.outward = flight.outward, None
        tensors = tuple(arrival())
        ctx.mark_non_differentiable(
            *(x for x, needed in zip(tensors, flight.needs_grad, strict=True) if not needed)
        )
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Autograd runs the newest ready node first. So work that ran between `depart` and `arrive` in forward
        # also runs between them in backward and hides the reverse exchange.
        flight = ctx.flight
        needed = [grad if needed else None for grad, needed in zip(grads, flight.needs_grad, strict=True)]
        flight.homeward = flight.exchange.reverse.launch(needed)
        return ctx.edge, None


Departed = tuple[Tensor, _Flight]  # edge in the graph and tensors in flight; pass to `arrive` once


def depart(exchange: Exchange, *tensors: Tensor) -> Departed:
    """Launches the exchange of `tensors` (the first must be floating-point)."""
    flight = _Flight(exchange)
    return _Depart.apply(flight, *tensors), flight


def arrive(departed: Departed) -> tuple[Tensor, ...]:
    """Waits for the exchange that `depart` launched. A second call fails: it would send gradients again."""
    if departed[1].outward is None:
        raise RuntimeError("arrive: called twice for the same depart(). Fix: reuse the first result.")
    return _Arrive.apply(*departed)


def exchange_rows(exchange: Exchange, x_RD: Tensor) -> Tensor:
    """Launches the exchange and waits for the result. Supports higher derivatives."""
    return _Exchanged.apply(x_RD, exchange)


def gather_rows(x_RD: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenates the rows of all ranks; every rank must have the same number of rows. Gradients are summed
    over ranks.
    """
    return exchange_rows(GatherRows(group=group, sizes=[x_RD.size(0)] * group.size()), x_RD)


def gathered(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Like `gather_rows`, but without gradient. Returns `x` if the group has one rank or is None."""
    if group is None or group.size() == 1:
        return x
    out = x.new_empty(group.size() * x.size(0), *x.shape[1:])
    gloo.all_gather(out, x.contiguous(), group=group)
    return out
