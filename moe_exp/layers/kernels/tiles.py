"""Parts of the grouped GEMM kernels: which tile a program computes, and the product of two blocks. Shape
suffixes in `moe_exp.layers`.

Rows are sorted by expert; expert e has rows offsets[e] to offsets[e + 1]. A tile of rows belongs to one
expert alone. Which one is found from the offsets by the program itself, in registers: nothing has to be
counted before, for no size of tiles, and the host never waits to learn how many there are.
"""

from __future__ import annotations

from moe_exp.layers.kernels.launch import jit, tl


@jit
def row_tile_ends(offsets, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Row tiles of every expert and of those before it, [BLOCK_E]; an expert without rows has none. The last
    is the number of all.
    """
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < num_experts
    rows = tl.load(offsets + expert + 1, mask=is_expert, other=0) - tl.load(
        offsets + expert, mask=is_expert, other=0
    )
    return tl.cumsum((rows + BLOCK_M - 1) // BLOCK_M, 0)


@jit
def row_tile(tile, tile_ends, offsets, BLOCK_M: tl.constexpr):
    """Expert, first row and the end of the expert's rows of a row tile, for 0 <= tile < the number of all."""
    is_before = tile_ends <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    tiles_before = tl.max(tl.where(is_before, tile_ends, 0), 0)
    return expert, tl.load(offsets + expert) + (tile - tiles_before) * BLOCK_M, tl.load(offsets + expert + 1)


@jit
def num_row_tiles(offsets, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Row tiles of all experts."""
    return tl.max(row_tile_ends(offsets, num_experts, BLOCK_M, BLOCK_E), 0)


@jit
def find_row_tile(tile, offsets, num_experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """`row_tile` where the ends of the tiles are not at hand; a kernel that goes through many tiles keeps
    them.
    """
    return row_tile(tile, row_tile_ends(offsets, num_experts, BLOCK_M, BLOCK_E), offsets, BLOCK_M)


@jit
def in_groups(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """The tile's place in both dimensions: GROUP_M rows of tiles go through all columns together, and find
    both operands in the L2.
    """
    tiles_in_group = GROUP_M * num_n
    first_m = (tile // tiles_in_group) * GROUP_M
    size_m = tl.minimum(num_m - first_m, GROUP_M)
    within = tile % tiles_in_group
    return first_m + within % size_m, within // size_m


@jit
def dot(a, b, total, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """total + a @ b in fp32. The interpreter's bf16 product is wrong without a word, so there it gets
    fp32.
    """
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


# A block of results cut into chunks of columns, for epilogues that load and compute more than the registers
# would hold at once.


@jit
def column_chunks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The chunks from left to right, CHUNK times 1, 2, 4 or 8 columns: halves of halves, as a block is cut
    along a new axis of 2.
    """
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


# The activations of the experts and their derivatives as parts of kernels, in fp32. Names as in
# `moe_exp.layers.activations`.


SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476) if tl else None
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327) if tl else None


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """The function on the gate, or on the whole where there is none."""
    if ACTIVATION == "swiglu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "squared_relu":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        y = x * 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
    return y


@jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr):
    """The function and its derivative."""
    if ACTIVATION == "swiglu":
        s = tl.sigmoid(x)
        y = x * s
        dy = s + y * (1.0 - s)
    elif ACTIVATION == "squared_relu":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
        dy = 2.0 * positive
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        y = x * cdf
        dy = cdf + x * tl.exp(-0.5 * x * x) * INV_SQRT_2PI
    return y, dy
