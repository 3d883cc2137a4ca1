"""A block of results cut into chunks of columns, for epilogues that load and compute more than the registers would hold at once."""

from __future__ import annotations

from moe_exp.layers.kernels.launch import jit, tl


@jit
def column_chunks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The chunks from left to right, CHUNK times 1, 2, 4 or 8 columns: halves of halves, as a block is cut along a new axis of 2."""
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
