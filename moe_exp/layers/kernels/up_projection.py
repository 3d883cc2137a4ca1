"""Grouped GEMM of the up-projection: rows gathered inside, weighted activation in the epilogue. Shape suffixes in `moe_exp.layers`.

W is the width of the first projection: 2F for a gated activation (gate half first), else F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.kernels.activation import activate
from moe_exp.layers.kernels.launch import cdiv, compilable, dot_constants, jit, num_programs, power_of_2, runs_kernel, tl, tuned
from moe_exp.layers.kernels.tiles import dot, find_row_tile, in_groups, num_row_tiles

# Predicted, not measured; see docs/performance.md. The first one is for deterministic algorithms.
CONFIGS = [
    {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
]


@tuned(CONFIGS, key=["num_experts", "half", "depth"])
@jit
def _kernel(
    x, w, hidden, active, token, weights, offsets, num_tokens, num_experts, half, depth,
    stride_x, stride_wl, stride_ww, stride_hidden, stride_active,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_m, num_n = num_row_tiles(offsets, num_experts, BLOCK_M, BLOCK_E), tl.cdiv(half, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = in_groups(tile, num_m, num_n, GROUP_M)
        expert, row, row_end = find_row_tile(tile_m, offsets, num_experts, BLOCK_M, BLOCK_E)
        rows, columns = row + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < row_end, columns < half
        is_token = is_row
        source = rows
        if token is not None:
            source = tl.load(token + rows, mask=is_row, other=num_tokens)
            is_token = source < num_tokens
        depths = tl.arange(0, BLOCK_K)
        x_block = x + source.to(tl.int64)[:, None] * stride_x + depths[None, :]
        w_block = w + expert.to(tl.int64) * stride_wl + columns[None, :] * stride_ww + depths[:, None]
        up_block = w_block + half * stride_ww
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = gate
        for start in range(0, depth, BLOCK_K):
            is_depth = depths < depth - start
            a = tl.load(x_block, mask=is_token[:, None] & is_depth[None, :], other=0.0)
            is_weight = is_depth[:, None] & is_column[None, :]
            gate = dot(a, tl.load(w_block, mask=is_weight, other=0.0), gate, PRECISION, INTERPRET)
            if GATED:
                up = dot(a, tl.load(up_block, mask=is_weight, other=0.0), up, PRECISION, INTERPRET)
            x_block += BLOCK_K
            w_block += BLOCK_K
            up_block += BLOCK_K
        is_out = is_row[:, None] & is_column[None, :]
        hidden_block = hidden + rows.to(tl.int64)[:, None] * stride_hidden + columns[None, :]
        tl.store(hidden_block, gate.to(hidden.dtype.element_ty), mask=is_out)
        y = activate(gate, ACTIVATION)
        if GATED:
            tl.store(hidden_block + half, up.to(hidden.dtype.element_ty), mask=is_out)
            y *= up
        if weights is not None:
            y *= tl.load(weights + rows, mask=is_row, other=0.0)[:, None]
        active_block = active + rows.to(tl.int64)[:, None] * stride_active + columns[None, :]
        tl.store(active_block, y.to(active.dtype.element_ty), mask=is_out)


def up_projection_torch(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, token_R: Tensor | None = None, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The twin of `up_projection`."""
    hidden_RW, active_RF = _outputs(x, weight1_LWD, offsets_L1, activation=activation, token_R=token_R)
    hidden_RW.zero_(), active_RF.zero_()
    function, gated = ACTIVATIONS[activation]
    wide = torch.promote_types(x.dtype, torch.float32)
    padded = x if token_R is None else torch.cat([x, x.new_zeros(1, x.size(1))])
    ends = offsets_L1.tolist()
    for w_WD, first, end in zip(weight1_LWD.unbind(0), ends, ends[1:], strict=False):
        rows_RD = x[first:end] if token_R is None else padded[token_R[first:end]]
        torch.mm(rows_RD, w_WD.t(), out=hidden_RW[first:end])
    gate_RF, up_RF = hidden_RW.to(wide).chunk(2, dim=1) if gated else (hidden_RW.to(wide), None)
    result_RF = function(gate_RF) if up_RF is None else function(gate_RF) * up_RF
    result_RF = result_RF if weights_R is None else result_RF * weights_R.unsqueeze(1)
    active_RF[: ends[-1]] = result_RF[: ends[-1]].to(x.dtype)
    return hidden_RW, active_RF


def _outputs(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, token_R: Tensor | None = None, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.size(0) if token_R is None else token_R.size(0), weight1_LWD.size(1)
    return x.new_empty(num_rows, width), x.new_empty(num_rows, width // 2 if ACTIVATIONS[activation][1] else width)


@compilable("up_projection", _outputs)
def up_projection(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, token_R: Tensor | None = None, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """hidden = x[token] W1^T and the weighted activation act(gate) * up * weight, or act(hidden) * weight, both from fp32 sums.

    Args:
        x: tokens [T, D], or with `token_R=None` rows sorted by expert [R, D]; the last dimension contiguous.
        weight1_LWD: of the experts, in torch's (out, in) order, the gate half first; the last dimension contiguous.
        offsets_L1: int32, expert e has rows offsets[e] to offsets[e + 1]; the first is 0.
        activation: a name in activations.ACTIVATIONS.
        token_R: int32, the token of each row; T for a row of padding, which is zero.
        weights_R: fp32, router weight of each row; None for 1.

    Returns:
        hidden [R, W], which backward needs, and the weighted activation [R, F], both in the dtype of x; rows from offsets[L] on have no
        values.
    """
    if not runs_kernel(x):
        return up_projection_torch(x, weight1_LWD, offsets_L1, activation=activation, token_R=token_R, weights_R=weights_R)
    hidden_RW, active_RF = _outputs(x, weight1_LWD, offsets_L1, activation=activation, token_R=token_R)
    (num_rows, half), num_experts = active_RF.shape, weight1_LWD.size(0)
    if num_rows == 0:
        return hidden_RW, active_RF

    def grid(constants: dict[str, int]) -> tuple[int]:
        most_tiles = (cdiv(num_rows, constants["BLOCK_M"]) + num_experts) * cdiv(half, constants["BLOCK_N"])
        return (num_programs(x, most_tiles),)

    _kernel[grid](
        x, weight1_LWD, hidden_RW, active_RF, token_R, weights_R, offsets_L1, x.size(0), num_experts, half, x.size(1),
        x.stride(0), weight1_LWD.stride(0), weight1_LWD.stride(1), hidden_RW.stride(0), active_RF.stride(0),
        ACTIVATION=activation, GATED=ACTIVATIONS[activation][1],
        BLOCK_E=power_of_2(num_experts), **dot_constants(x),
    )  # fmt: skip
    return hidden_RW, active_RF
