"""The MoE layer in a torch-native model, whose tensor parallel ranks hold the same tokens. Shape suffixes in
`moe_exp.layers`.

Outside Megatron a tensor parallel rank usually has all tokens of its data parallel rank, as after torch's
RowwiseParallel. Then nothing has to travel: every rank routes every token, computes its part of the experts,
and the outputs are summed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_exp.layers.dispatcher import DispatchRecord, LocalDispatcher, Pending
from moe_exp.layers.groups import group_size
from moe_exp.layers.router import RoutingDecision


class _SumGradient(torch.autograd.Function):
    """x forward; backward the sum of its gradients over the ranks, each of which used x for its part of the
    result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_over(grads[0], ctx.group), None


class _SumOutput(torch.autograd.Function):
    """The sum over the ranks forward; every rank has the whole result's gradient, which is that of its
    part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


class TensorParallelDispatcher(LocalDispatcher):
    """Every expert's width is spread over the ranks of a mesh dimension, on which the tokens are the same.

    The layer's input and output are replicated, like those of a ColwiseParallel and RowwiseParallel pair: one
    all-reduce of the tokens forward, one backward. The gradients of the input and of every parameter outside
    the experts are whole on every rank, those of the experts are whole for the rank's part: nothing is left
    to be summed over the mesh dimension. Give the layer no `microbatch_group` for it: the losses of the same
    tokens are counted once.

    Args:
        num_experts: E.
        tp_mesh: the tensor parallel dimension of the mesh, e.g. `mesh["tp"]`.
    """

    name = "tensor parallel"

    def __init__(self, num_experts: int, *, tp_mesh: DeviceMesh):
        super().__init__(num_experts)
        if tp_mesh.ndim != 1:
            raise ValueError(
                f"tp_mesh={tp_mesh}: has {tp_mesh.ndim} dimensions, not one. Fix: pass one dimension of it,"
                ' as in mesh["tp"].'
            )
        self.group: ProcessGroup = tp_mesh.get_group()

    def start(
        self, x_TD: Tensor, decision: RoutingDecision, *, rows_per_expert: int | None = None
    ) -> Pending:
        """Sorts the slots of `x_TD` by expert; their gradients, and those of the router weights, are summed
        over the ranks.
        """
        if group_size(self.group) > 1:
            x_TD = _SumGradient.apply(x_TD, self.group)
            decision = replace(decision, weights_TK=_SumGradient.apply(decision.weights_TK, self.group))
        return super().start(x_TD, decision, rows_per_expert=rows_per_expert)

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        """Sums the rows of every token and the parts of the ranks: [R, D] to [T, D]."""
        y_TD = super().combine(y_RD, record)
        return _SumOutput.apply(y_TD, self.group) if group_size(self.group) > 1 else y_TD


def expert_width_part(weight: Tensor, *, axis: int, num_halves: int, tp_mesh: DeviceMesh) -> Tensor:
    """This rank's part of an expert weight that holds the whole width F.

    Args:
        weight: `weight1` [E, 2F or F, D] or `weight2` [E, D, F] of all ranks.
        axis: the one with F, 1 for `weight1` and 2 for `weight2`.
        num_halves: 2 for the `weight1` of a gated activation, whose gate half and up half are each cut; else
            1.
        tp_mesh: as for TensorParallelDispatcher.

    Raises:
        ValueError: when the ranks do not divide F.
    """
    ranks, rank = tp_mesh.size(), tp_mesh.get_local_rank()
    width = weight.size(axis) // num_halves
    if width % ranks:
        raise ValueError(
            f"ffn_size={width}: is not divisible by the {ranks} tensor parallel ranks. Fix: use a multiple of"
            f" {ranks}."
        )
    return torch.cat(
        [half.chunk(ranks, dim=axis)[rank] for half in weight.chunk(num_halves, dim=axis)], dim=axis
    )
