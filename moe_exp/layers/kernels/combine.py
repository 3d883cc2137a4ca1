"""Adds up each token's expert rows; also used for gradients. Shape suffixes: see `moe_exp.layers`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, jit, last_contiguous, tl
from moe_exp.layers.kernels.tuning import configs, rows_class, tuned

# Predicted, not measured: 16 bytes per thread and load in bf16, with all K loads of a token in flight. All
# configs compute the same bits.
CONFIGS = configs("BLOCK_D num_warps num_stages", (1024, 4, 1), (512, 2, 1), (256, 1, 1), (2048, 8, 1))


@tuned(CONFIGS, key=["rows_class", "WIDTH", "TOPK"])
@jit
def _kernel(
    y, row, out, num_rows, rows_class, stride_y, stride_row,
    WIDTH: tl.constexpr, TOPK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        y_row = tl.load(row + token * stride_row + k).to(tl.int64)
        # A dropped slot's row gets width 0, so that one vector comparison handles drops and columns.
        is_wanted = columns < tl.where(y_row < num_rows, WIDTH, 0)
        total += tl.load(y + y_row * stride_y + columns, mask=is_wanted, other=0.0).to(tl.float32)
    block = out + token * WIDTH + columns
    if WIDTH % BLOCK_D == 0:
        tl.store(block, total.to(out.dtype.element_ty))
    else:
        tl.store(block, total.to(out.dtype.element_ty), mask=columns < WIDTH)


def combine_torch(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    dtype = torch.promote_types(y_RD.dtype, torch.float32)
    with_zero = torch.cat([y_RD.to(dtype), y_RD.new_zeros(1, y_RD.size(1), dtype=dtype)])
    total_TD = torch.zeros(row_TK.size(0), y_RD.size(1), dtype=dtype, device=y_RD.device)
    for k in range(row_TK.size(1)):
        total_TD += with_zero.index_select(0, row_TK[:, k].clamp(max=y_RD.size(0)))
    return total_TD.to(y_RD.dtype)


@compilable(
    "combine", lambda y_RD, row_TK: y_RD.new_empty(row_TK.size(0), y_RD.size(1)), twin=combine_torch,
    takes_fp64=False,
)  # fmt: skip
def combine(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Adds each token's K rows in fp32 in slot order; returns the sums [T, D] in the dtype of `y_RD`.

    Args:
        row_TK: row index of each slot, int32 or int64; indices >= R mark dropped slots, which add nothing.
    """
    (num_tokens, topk), width = row_TK.shape, y_RD.size(1)
    out_TD = y_RD.new_empty(num_tokens, width)
    if out_TD.numel() == 0:
        return out_TD
    y_RD, row_TK = last_contiguous(y_RD), last_contiguous(row_TK)
    _kernel[lambda constants: (num_tokens, cdiv(width, constants["BLOCK_D"]))](
        y_RD, row_TK, out_TD, y_RD.size(0), rows_class(num_tokens), y_RD.stride(0), row_TK.stride(0),
        WIDTH=width, TOPK=topk,
    )  # fmt: skip
    return out_TD
