"""The experts one by one on a CPU: each expert's data stays in cache. Shape suffixes in `moe_exp.layers`.

Writes and gathers no tensor of R rows that backward or the next step does not need: on a CPU the pages of a
fresh tensor cost as much as computing on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.activations import weighted_activation, weighted_activation_backward
from moe_exp.layers.dispatcher.row_order import RowOrder, sum_slots
from moe_exp.layers.experts.threads import for_each_expert


@dataclass(frozen=True)
class ExpertWeights:
    """`weight1` [L, 2F or F, D], `weight2` [L, D, F], and optionally `bias1` [L, 2F or F] and `bias2` [L, D].

    Under expert tensor parallelism `bias2` has only a part of D, starting at column `bias2_start`.
    """

    weight1: Tensor
    weight2: Tensor
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    bias2_start: int = 0


# Up to this many rows (as in token-by-token generation), handing them to threads takes longer than computing.
_FEW_ROWS = 8


def expert_loop(
    x: Tensor,
    weights_R: Tensor,
    parameters: ExpertWeights,
    *,
    splits: Sequence[int],
    activation: str,
    order: RowOrder | None = None,
) -> Tensor:
    """y = (act(x W1^T + b1) * w) W2^T + w * b2 per row, expert by expert.

    Saves its arguments and x W1^T + b1; backward recomputes the activation while its input is in the cache.

    Args:
        x: rows sorted by expert [R, D]; with `order` the tokens [T, D].
        weights_R: router weight per row.
        splits: rows of each expert.
        activation: a key of activations.ACTIVATIONS.
        order: how tokens become rows.

    Returns:
        [R, D]; with `order` the sum over the rows of every token, [T, D].
    """
    p = parameters
    return _ExpertLoop.apply(
        x, weights_R, p.weight1, p.weight2, p.bias1, p.bias2, p.bias2_start, list(splits), activation, order
    )


class _ExpertLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights_R: Tensor,
        weight1_LFD: Tensor,
        weight2_LDF: Tensor,
        bias1_LF: Tensor | None,
        bias2_LD: Tensor | None,
        bias2_start: int,
        splits: list[int],
        activation: str,
        order: RowOrder | None,
    ) -> Tensor:
        num_rows = weights_R.size(0)
        hidden_RF, output_RD = x.new_empty(num_rows, weight1_LFD.size(1)), x.new_empty(num_rows, x.size(1))
        rows_of, weights = _rows_of(x, splits, order), weights_R.to(x.dtype).unsqueeze(1).split(splits)
        hiddens, outputs, weight1, weight2 = (
            hidden_RF.split(splits),
            output_RD.split(splits),
            weight1_LFD.unbind(0),
            weight2_LDF.unbind(0),
        )

        def one_expert(e: int) -> None:
            if not splits[e]:
                return
            hidden, output = hiddens[e], outputs[e]
            torch.mm(rows_of(e), weight1[e].t(), out=hidden)
            if bias1_LF is not None:
                hidden += bias1_LF[e]
            torch.mm(weighted_activation(hidden, weights[e], activation), weight2[e].t(), out=output)
            if bias2_LD is not None:
                output.narrow(1, bias2_start, bias2_LD.size(1)).addcmul_(weights[e], bias2_LD[e])

        if num_rows <= _FEW_ROWS:
            for expert in range(len(splits)):
                one_expert(expert)
        else:
            for_each_expert(one_expert, splits)
        ctx.save_for_backward(x, weights_R, weight1_LFD, weight2_LDF, bias1_LF, bias2_LD, hidden_RF)
        ctx.bias2_start, ctx.splits, ctx.activation, ctx.order = bias2_start, splits, activation, order
        return output_RD if order is None else sum_slots(output_RD, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: under torch.utils.checkpoint a second access is an error
        x, weights_R, weight1_LFD, weight2_LDF, _, bias2_LD, hidden_RF = saved
        splits, order, needs_x = ctx.splits, ctx.order, ctx.needs_input_grad[0]
        dx_RD, dweights_R = x.new_empty(hidden_RF.size(0), x.size(1)), torch.empty_like(weights_R)
        dweight1_LFD, dweight2_LDF, dbias1_LF, dbias2_LD = (
            torch.empty_like(parameter) if parameter is not None and needs_grad else None
            for parameter, needs_grad in zip(saved[2:6], ctx.needs_input_grad[2:6], strict=True)
        )
        rows_of, grads_of = _rows_of(x, splits, order), _rows_of(grads[0].contiguous(), splits, order)
        weights, hiddens = weights_R.to(x.dtype).unsqueeze(1).split(splits), hidden_RF.split(splits)
        weight1, weight2 = weight1_LFD.unbind(0), weight2_LDF.unbind(0)
        dx, dweights = dx_RD.split(splits), dweights_R.split(splits)

        def one_expert(e: int) -> None:
            grad = grads_of(e)
            dhidden, dweight, active = weighted_activation_backward(
                torch.mm(grad, weight2[e]), hiddens[e], weights[e], ctx.activation
            )
            if dweight2_LDF is not None:
                torch.mm(grad.t(), active.mul_(weights[e]), out=dweight2_LDF[e])
            if dweight1_LFD is not None:
                torch.mm(dhidden.t(), rows_of(e), out=dweight1_LFD[e])
            if needs_x:
                torch.mm(dhidden, weight1[e], out=dx[e])
            if dbias1_LF is not None:
                torch.sum(dhidden, dim=0, out=dbias1_LF[e])
            if bias2_LD is not None:
                grad = grad.narrow(1, ctx.bias2_start, bias2_LD.size(1))
                dweight += torch.mv(grad, bias2_LD[e])
                if dbias2_LD is not None:
                    torch.mv(grad.t(), weights[e].squeeze(1), out=dbias2_LD[e])
            dweights[e].copy_(dweight)

        for_each_expert(one_expert, splits)
        dx_out = (dx_RD if order is None else sum_slots(dx_RD, order)) if needs_x else None
        return dx_out, dweights_R, dweight1_LFD, dweight2_LDF, dbias1_LF, dbias2_LD, None, None, None, None


def _rows_of(x: Tensor, splits: list[int], order: RowOrder | None) -> Callable[[int], Tensor]:
    """The rows of an expert: a part of `x`, or tokens gathered on demand."""
    if order is None:
        return x.split(splits).__getitem__
    if order.has_padding:  # whose token is one past the last
        x = torch.cat([x, x.new_zeros(1, x.size(1))])
    token_R = order.slot_R if order.topk == 1 else order.slot_R // order.topk
    tokens = token_R.split(splits)
    return lambda e: x.index_select(0, tokens[e])
