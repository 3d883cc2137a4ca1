"""Differentiable collectives over rows: what one sends forward comes back as gradient. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp import gloo


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.splits = send, receive
        ctx.group = group
        out = x.new_empty(sum(receive), *x.shape[1:])
        torch.distributed.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        return _AllToAll.apply(grads[0], receive, send, ctx.group), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather_uneven(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_uneven(grads[0], ctx.sizes, ctx.group), None, None


class _ScatterSumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _reduce_scatter_uneven(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather_uneven(grads[0], ctx.sizes, ctx.group), None, None


def _gather_uneven(x: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    # gloo refuses blocks of different sizes, so each is padded to the largest.
    largest = max(sizes)
    block = x if x.size(0) == largest else torch.cat([x, x.new_zeros(largest - x.size(0), *x.shape[1:])])
    out = x.new_empty(len(sizes) * largest, *x.shape[1:])
    gloo.all_gather(out, block.contiguous(), group=group)
    if min(sizes) == largest:
        return out
    return torch.cat([part[:size] for part, size in zip(out.split(largest), sizes, strict=True)])


def _reduce_scatter_uneven(x: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    largest = max(sizes)
    if min(sizes) != largest:
        padded = x.new_zeros(len(sizes), largest, *x.shape[1:])
        for block, part in zip(padded, x.split(sizes), strict=True):
            block[: part.size(0)] = part
        x = padded.flatten(0, 1)
    out = x.new_empty(largest, *x.shape[1:])
    gloo.reduce_scatter(out, x.contiguous(), group=group)
    return out[: sizes[group.rank()]]


def all_to_all_rows(x_RD: Tensor, *, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Sends `send[i]` rows to rank i and receives `receive[i]` rows from it.

    Args:
        x_RD: rows in the order of the ranks they go to, any dtype.
        send: rows per destination; their sum is R.
        receive: rows per source.
        group: process group.

    Returns:
        The received rows in the order of the ranks they come from; differentiable.
    """
    return _AllToAll.apply(x_RD, send, receive, group)


def gather_rows(x_RD: Tensor, *, sizes: list[int], group: ProcessGroup) -> Tensor:
    """Rows of all ranks, one rank after the other; `sizes[i]` rows are on rank i. The gradient is summed over ranks."""
    return _GatherRows.apply(x_RD, sizes, group)


def scatter_sum_rows(x_RD: Tensor, *, sizes: list[int], group: ProcessGroup) -> Tensor:
    """Sum of x over ranks, of which rank i keeps its `sizes[i]` rows: the inverse of `gather_rows`."""
    return _ScatterSumRows.apply(x_RD, sizes, group)
