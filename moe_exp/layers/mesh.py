"""The MoE layer in a torch-native model whose tensor parallel ranks hold the same tokens.

No tokens are exchanged: every rank routes all tokens and computes its shard of every expert, and the outputs
are summed over ranks. Shape suffixes: see `moe_exp.layers`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_exp.layers.dispatcher import DispatchRecord, LocalDispatcher, Pending
from moe_exp.layers.groups import group_size, sum_over
from moe_exp.layers.router import RoutingDecision


class _Summed(torch.autograd.Function):
    """Sums over ranks in forward if `forward` is True, else in backward. The other pass is the identity."""

    # An input is used by every rank's part, so its gradients are summed. After a sum in forward, every rank
    # already has the gradient of the whole.

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, forward: bool) -> Tensor:
        ctx.group = None if forward else group
        return sum_over(x.contiguous(), group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] if ctx.group is None else sum_over(grads[0].contiguous(), ctx.group), None, None


class TensorParallelDispatcher(LocalDispatcher):
    """Splits every expert's width over the ranks of a mesh dimension. These ranks hold the same tokens.

    The layer's input and output are replicated, and the tokens are all-reduced once in forward and once in
    backward, as with ColwiseParallel followed by RowwiseParallel. Gradients are then complete on every rank
    and need no reduction over the mesh dimension. Do not include this dimension in the layer's
    `microbatch_group`: the losses of these tokens would be counted more than once.

    Args:
        tp_mesh: the tensor parallel dimension of the mesh, e.g. `mesh["tp"]`.
    """

    is_local = False  # every expert needs all ranks

    def __init__(self, num_experts: int, *, tp_mesh: DeviceMesh):
        super().__init__(num_experts)
        if tp_mesh.ndim != 1:
            rule = f"must have one dimension, not {tp_mesh.ndim}"
            fix = 'pass one dimension of the mesh, such as mesh["tp"]'
            raise ValueError(f"tp_mesh={tp_mesh}: {rule}. Fix: {fix}.")
        self.group: ProcessGroup = tp_mesh.get_group()

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        """Sorts the slots by expert. Backward sums the gradients of tokens and routing weights over ranks."""
        if group_size(self.group) > 1:
            x_TD = _Summed.apply(x_TD, self.group, False)
            decision = replace(decision, weights_TK=_Summed.apply(decision.weights_TK, self.group, False))
        return super().start(x_TD, decision, rows_per_expert=rows_per_expert)

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        """Sums the rows of each token, then sums these sums over ranks: [R, D] to [T, D]."""
        y_TD = super().combine(y_RD, record)
        return _Summed.apply(y_TD, self.group, True) if group_size(self.group) > 1 else y_TD


def expert_width_part(weight: Tensor, *, axis: int, num_halves: int, tp_mesh: DeviceMesh) -> Tensor:
    """This rank's part of an expert weight; the full width F must be a multiple of the number of ranks.

    Args:
        weight: full `weight1` [E, 2F or F, D] or `weight2` [E, D, F].
        axis: axis of F: 1 for `weight1`, 2 for `weight2`.
        num_halves: 2 for a gated `weight1`, whose gate and up halves are split separately; else 1.
    """
    ranks, rank = tp_mesh.size(), tp_mesh.get_local_rank()
    width = weight.size(axis) // num_halves
    if width % ranks:
        rule = f"must be divisible by the number of tensor parallel ranks, {ranks}"
        raise ValueError(f"ffn_size={width}: {rule}. Fix: use a multiple of {ranks}.")
    return torch.cat(
        [half.chunk(ranks, dim=axis)[rank] for half in weight.chunk(num_halves, dim=axis)], dim=axis
    )
