"""FP8 versions of the matrix products in `experts.fused`; arguments and results are as in the bf16 kernels.

Operands are quantized right before each product. The quantized operands are not saved, so backward has the
same saved tensors as in bf16. Shape suffixes: see `moe_exp.layers`.
"""

import torch
from torch import Tensor

from moe_exp.layers.activations import weighted_activation
from moe_exp.layers.kernels.activation_grad import activation_backward_torch
from moe_exp.layers.kernels.fp8.block import block_matmul, block_weight_grad
from moe_exp.layers.kernels.fp8.quantize import quantize_blocks, quantize_columns, quantize_rows
from moe_exp.layers.kernels.launch import by_twins, compilable


def grouped_matmul(
    x: Tensor, w_LIO: Tensor, offsets_L1: Tensor, bias_LO: Tensor | None = None,
    weights_R: Tensor | None = None, *, index_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.grouped_matmul` in FP8. With `index_R`, row r of the left operand is `x[index_R[r]]`."""
    operands = *quantize_rows(x, index_R), *quantize_blocks(w_LIO.transpose(1, 2))
    return block_matmul(*operands, offsets_L1, x.dtype, bias_LO, weights_R)


def up_projection(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, token_R: Tensor | None = None,
    weights_R: Tensor, bias1_LW: Tensor | None = None, keeps_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.up_projection` with the product in FP8. Plain torch computes the activation in fp32."""
    hidden_RW = grouped_matmul(x, weight1_LWD.transpose(1, 2), offsets_L1, bias1_LW, index_R=token_R)
    active_RF = weighted_activation(hidden_RW.float(), weights_R.unsqueeze(1), activation).to(x.dtype)
    return hidden_RW if keeps_hidden else hidden_RW[:0], active_RF


def activation_grad(
    dy: Tensor, weight2_LDF: Tensor, hidden_RW: Tensor, offsets_L1: Tensor, *, activation: str,
    token_R: Tensor | None = None, weights_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.activation_grad` with the product in FP8."""
    dactive_RF = grouped_matmul(dy, weight2_LDF, offsets_L1, index_R=token_R)
    return _activation_backward(dactive_RF, hidden_RW, weights_R, activation)


# Opaque to torch.compile, which cannot trace the writes to parts of a tensor.
_activation_backward = compilable(
    "fp8_activation_backward",
    lambda dactive, hidden, weights, _: tuple(torch.empty_like(x) for x in (hidden, dactive, weights)),
)(activation_backward_torch)


def weight_grad(
    a: Tensor, b: Tensor, offsets_L1: Tensor, *, a_index_R: Tensor | None = None,
    b_index_R: Tensor | None = None, order_L: Tensor | None = None, out: Tensor | None = None,
    adds: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.weight_grad` in FP8; ignores `order_L`."""
    dw_LMN = a.new_empty(offsets_L1.size(0) - 1, a.size(1), b.size(1)) if out is None else out
    operands = *quantize_columns(a, offsets_L1, a_index_R), *quantize_columns(b, offsets_L1, b_index_R)
    block_weight_grad(dw_LMN, *operands, offsets_L1, adds and out is not None)
    return dw_LMN


grouped_matmul_torch, up_projection_torch = by_twins(grouped_matmul), by_twins(up_projection)
activation_grad_torch, weight_grad_torch = by_twins(activation_grad), by_twins(weight_grad)
