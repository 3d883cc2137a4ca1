"""The `triton` backend: all experts of a rank in one autograd function. Shape suffixes: see `moe_exp.layers`.

The kernels read the rows directly from the tokens, without a sorted copy.
"""

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.fp8 import products as in_fp8
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.rows import gather_rows
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import expert_order, main_grad_of, placeholder, weight_grad


def fused_experts(
    x: Tensor, weights: Tensor, offsets_L1: Tensor, weight1_LWD: Tensor, weight2_LDF: Tensor,
    bias1_LW: Tensor | None = None, bias2_LD: Tensor | None = None, *, activation: str,
    slot_R: Tensor | None = None, row_TK: Tensor | None = None, adds_to_main_grad: bool = False,
    recompute_hidden: bool = False, fp8: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y_r = w_r * expert(x_r) for each row r, [R, D]; with `row_TK`, their sum per token, [T, D].

    The host never waits for the device.

    Args:
        x: rows [R, D], sorted by expert; with `slot_R` and `row_TK`, tokens [T, D].
        weights: router weights [R] or [T, K], used in fp32.
        offsets_L1: first row of each expert, on the device, see `moe_exp.layers`.
        weight1_LWD: weights of the first projection; the gate's half comes first.
        slot_R, row_TK: the slot of each row, and the row of each slot; both come from `slot_sort`.
        adds_to_main_grad: if a weight has Megatron's `main_grad`, the kernels write its gradient there, and
            its `grad` is not valid. The gradient is added to `main_grad`, or overwrites it if the weight's
            `grad_added_to_main_grad` is False. Under torch.compile, `adds_to_main_grad` has no effect.
        recompute_hidden: compute the first projection again in backward instead of keeping its result.
        fp8: compute the matrix products in e4m3, see kernels/fp8.
    """
    tensors = x, weights, weight1_LWD, weight2_LDF, bias1_LW, bias2_LD
    # Inside an autograd function's forward, gradients are always disabled.
    has_backward = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    options = activation, adds_to_main_grad, recompute_hidden, fp8, has_backward
    return _Experts.apply(*tensors, offsets_L1, slot_R, row_TK, *options)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, weight1_LWD: Tensor, weight2_LDF: Tensor,
        bias1_LW: Tensor | None, bias2_LD: Tensor | None, offsets_L1: Tensor, slot_R: Tensor | None,
        row_TK: Tensor | None, activation: str, adds_to_main_grad: bool, recompute_hidden: bool, fp8: bool,
        has_backward: bool,
    ) -> Tensor:  # fmt: skip
        # The kernels read the weights contiguously; reshape keeps the strides if it can return a view.
        x, weights_R, token_R = x.contiguous(), weights.reshape(-1).float().contiguous(), None
        if slot_R is not None:
            token_R, weights_R = slot_R // weights.size(1), weights_R.index_select(0, slot_R)
        up: Any = in_fp8.up_projection if fp8 else up_projection
        product: Any = in_fp8.grouped_matmul if fp8 else grouped_matmul
        gathering: dict[str, Any] = {"activation": activation, "token_R": token_R, "weights_R": weights_R}
        # Not `|`, which torch.compile supports only in later versions.
        options = {**gathering, "bias1_LW": bias1_LW, "keeps_hidden": has_backward and not recompute_hidden}
        hidden_RW, active_RF = up(x, weight1_LWD, offsets_L1, **options)
        of_bias = None if bias2_LD is None else weights_R
        y_RD = product(active_RF, weight2_LDF.transpose(1, 2), offsets_L1, bias2_LD, of_bias)
        # In bf16 with a gated activation, about 2TD + 4TKF bytes. Backward recomputes the input of the second
        # projection, as in SonicMoE (arXiv:2512.14080).
        ctx.save_for_backward(
            x, weights_R, weight1_LWD, weight2_LDF, bias1_LW, bias2_LD, offsets_L1, token_R, row_TK, hidden_RW
        )
        ctx.activation, ctx.weights_dtype, ctx.fp8 = activation, weights.dtype, fp8
        ctx.recompute_hidden = recompute_hidden
        ctx.parameters = None, None
        if adds_to_main_grad and not torch.compiler.is_compiling():
            # Saved tensors may be unpacked as new objects, which lack Megatron's attributes.
            ctx.parameters = weight1_LWD, weight2_LDF
        return y_RD if row_TK is None else combine(y_RD, row_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under torch.utils.checkpoint a second access is an error.
        x, weights_R, weight1_LWD, weight2_LDF, bias1_LW, bias2_LD, *places, hidden_RW = ctx.saved_tensors
        offsets_L1, token_R, row_TK = places
        dy = grads[0].contiguous()
        back: Any = in_fp8.activation_grad if ctx.fp8 else activation_grad
        product: Any = in_fp8.grouped_matmul if ctx.fp8 else grouped_matmul
        sums: Any = in_fp8.weight_grad if ctx.fp8 else weight_grad
        options = {"activation": ctx.activation, "token_R": token_R, "weights_R": weights_R}
        if ctx.recompute_hidden:
            up: Any = in_fp8.up_projection if ctx.fp8 else up_projection
            hidden_RW, _ = up(x, weight1_LWD, offsets_L1, bias1_LW=bias1_LW, keeps_hidden=True, **options)
        dhidden_RW, weighted_RF, dweights_R = back(dy, weight2_LDF, hidden_RW, offsets_L1, **options)
        dx = dweights = dweight1 = dweight2 = dbias1 = dbias2 = None
        main1, main2 = (
            main_grad_of(parameter) if needed else None
            for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[2:4], strict=True)
        )
        # The first micro-batch of an iteration overwrites main_grad, which saves zeroing and reading it.
        adds1, adds2 = (getattr(parameter, "grad_added_to_main_grad", True) for parameter in ctx.parameters)
        order_L = expert_order(offsets_L1) if not ctx.fp8 and any(ctx.needs_input_grad[2:6]) else None
        if ctx.needs_input_grad[3]:
            options = {"order_L": order_L, "out": main2, "adds": adds2}
            dweight2 = sums(dy, weighted_RF, offsets_L1, a_index_R=token_R, **options)
        del weighted_RF
        if ctx.needs_input_grad[2]:
            options = {"order_L": order_L, "out": main1, "adds": adds1}
            dweight1 = sums(dhidden_RW, x, offsets_L1, b_index_R=token_R, **options)
        if ctx.needs_input_grad[4]:  # a sum over rows is a product with ones
            ones_R1 = dhidden_RW.new_ones(dhidden_RW.size(0), 1)
            dbias1 = weight_grad(ones_R1, dhidden_RW, offsets_L1, order_L=order_L).squeeze(1)
        if ctx.needs_input_grad[5]:
            weights_R1 = weights_R.to(dy.dtype).unsqueeze(1)
            dbias2 = weight_grad(weights_R1, dy, offsets_L1, b_index_R=token_R, order_L=order_L).squeeze(1)
        if ctx.needs_input_grad[0]:
            dx = product(dhidden_RW, weight1_LWD, offsets_L1)
            del dhidden_RW
            dx = dx if row_TK is None else combine(dx, row_TK)
        if ctx.needs_input_grad[1]:
            if bias2_LD is not None:
                # dy_r . b2 of the row's expert: one product of all rows (or tokens) with all experts, then
                # the needed entries.
                row_R = torch.arange(dweights_R.size(0), device=dy.device)
                expert_R = torch.searchsorted(offsets_L1[1:], row_R, right=True)
                expert_R.clamp_(max=bias2_LD.size(0) - 1)  # of rows past the last
                products = (dy @ bias2_LD.t())[row_R if token_R is None else token_R, expert_R]
                dweights_R = dweights_R + products
            if row_TK is not None:
                dweights_R = gather_rows(dweights_R, row_TK.flatten()).view(row_TK.shape)
            dweights = dweights_R.to(ctx.weights_dtype)
        if main2 is not None:
            dweight2 = placeholder(ctx.parameters[1])
        if main1 is not None:
            dweight1 = placeholder(ctx.parameters[0])
        return dx, dweights, dweight1, dweight2, dbias1, dbias2, *(None,) * 8
