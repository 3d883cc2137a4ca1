"""Building blocks of the grouped GEMM kernels: tile order, products, column chunks and activations.

Expert e has the sorted rows offsets[e] to offsets[e + 1] - 1. Shape suffixes: see `moe_exp.layers`.
"""

from __future__ import annotations

from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.activations import QUICK as QUICK_GELU
from moe_exp.layers.kernels.launch import jit, tl


@jit
def row_tile_ends(offsets, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Number of row tiles up to and including each expert, [BLOCK_E]. An expert without rows has no tile."""
    # Each program finds the expert of its row tile from the offsets, in registers. So nothing needs to be
    # counted in advance for each tile size, and the host never waits for the number of tiles.
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < num_experts
    rows = tl.load(offsets + expert + 1, mask=is_expert, other=0) - tl.load(
        offsets + expert, mask=is_expert, other=0
    )
    return tl.cumsum((rows + BLOCK_M - 1) // BLOCK_M, 0)


@jit
def row_tile(tile, tile_ends, offsets, BLOCK_M: tl.constexpr):
    """Expert of row tile `tile`, first row of the tile, and end of the expert's rows (exclusive)."""
    is_before = tile_ends <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    tiles_before = tl.max(tl.where(is_before, tile_ends, 0), 0)
    return expert, tl.load(offsets + expert) + (tile - tiles_before) * BLOCK_M, tl.load(offsets + expert + 1)


@jit
def in_groups(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column index of tile `tile`; each group of GROUP_M tile rows is numbered column by column."""
    # GROUP_M rows of tiles use the same columns consecutively, while these are in the L2 cache.
    tiles_in_group = GROUP_M * num_n
    first_m = (tile // tiles_in_group) * GROUP_M
    size_m = tl.minimum(num_m - first_m, GROUP_M)
    within = tile % tiles_in_group
    return first_m + within % size_m, within // size_m


@jit
def tile_place(
    tile, num_m, num_n, tile_ends, offsets, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """For tile `tile` in a grid of num_m x num_n tiles: the results of `row_tile`, and the column index."""
    tile_m, tile_n = in_groups(tile, num_m, num_n, GROUP_M)
    expert, row, row_end = row_tile(tile_m, tile_ends, offsets, BLOCK_M)
    return expert, row, row_end, tile_n


@jit
def row_sources(tokens, rows, row_end, num_tokens):
    """Operand row to read for each row of a tile, and whether the row is a token (False: padding).

    If `tokens` is None, the operand's rows are already in sorted order.
    """
    # Padding and rows past the end read another row, so that the loop over the depth needs no mask for them.
    source, is_token = tl.minimum(rows, row_end - 1), rows < row_end
    if tokens is not None:
        source = tl.load(tokens + source)
        is_token = source < num_tokens
        source = tl.minimum(source, num_tokens - 1)
    return source, is_token


@jit
def dot(a, b, total, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """total + a @ b in fp32."""
    if INTERPRET:  # the interpreter's bf16 product is silently wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@jit
def load_where(block, mask, IS_WHOLE: tl.constexpr):
    """Values at the addresses `block`, or zero where `mask` is False. IS_WHOLE: `mask` is True everywhere."""
    return tl.load(block, mask=None if IS_WHOLE else mask, other=None if IS_WHOLE else 0.0)


@jit
def column_chunks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Column chunks from left to right, for epilogues that cannot hold all columns in registers at once."""
    # Triton cannot slice a block, but it can split an axis of size 2: halve the columns repeatedly.
    tl.static_assert(COLUMNS // CHUNK <= 8)
    chunks = (x,)
    for level in tl.static_range(3):
        if CHUNK << level < COLUMNS:
            halves = ()
            for i in tl.static_range(1 << level):
                pair = tl.reshape(chunks[i], (ROWS, 2, COLUMNS >> level + 1))
                halves = halves + tl.permute(pair, (0, 2, 1)).split()
            chunks = halves  # type: ignore[assignment]
    return chunks


# Activations of the experts and their derivatives in fp32; names as in `moe_exp.layers.activations`.
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476) if tl else None
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327) if tl else None
QUICK: tl.constexpr = tl.constexpr(QUICK_GELU) if tl else None
LIMIT: tl.constexpr = tl.constexpr(ACTIVATIONS["clamped_swiglu"].limit) if tl else None
OFFSET: tl.constexpr = tl.constexpr(ACTIVATIONS["clamped_swiglu"].offset) if tl else None


@jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr):
    """The activation function at `x` and its derivative; in a gated MLP, `x` is the gate."""
    if ACTIVATION == "swiglu":
        s = tl.sigmoid(x)
        y = x * s
        dy = s + y * (1.0 - s)
    elif ACTIVATION == "squared_relu":
        positive = tl.where(x < 0.0, 0.0, x)  # unlike a maximum, NaN stays NaN
        y = positive * positive
        dy = 2.0 * positive
    elif ACTIVATION == "clamped_swiglu":
        clamped = tl.where(x > LIMIT, LIMIT, x)
        s = tl.sigmoid(clamped * QUICK)
        y = clamped * s
        dy = tl.where(x > LIMIT, 0.0, s + y * QUICK * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "geglu" or ACTIVATION == "gelu", "no such activation")
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        y = x * cdf
        dy = cdf + x * tl.exp(-0.5 * x * x) * INV_SQRT_2PI
    return y, dy


@jit
def linear_unit(up, ACTIVATION: tl.constexpr):
    """Factor that multiplies the activated gate: `up`, clamped and shifted if clamped_swiglu."""
    if ACTIVATION == "clamped_swiglu":
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
    return up


@jit
def linear_unit_grad(dunit, up, ACTIVATION: tl.constexpr):
    """Gradient of `up`, given the gradient `dunit` of the result of `linear_unit`."""
    if ACTIVATION == "clamped_swiglu":
        dunit = tl.where(tl.abs(up) > LIMIT, 0.0, dunit)
    return dunit
