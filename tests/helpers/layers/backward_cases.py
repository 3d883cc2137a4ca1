"""Rows of experts for tests of the backward kernels; those after the last expert must not be read."""

import torch
from torch import Tensor

from helpers.layers.kernel_device import DEVICE

# Rows per expert: none in front, in the middle, at the end; one expert for all; single rows; nobody. Tiles
# have 32 rows here.
COUNTS = [(0, 5, 0, 33), (40, 0, 0), (1, 1, 1), (7, 64, 2, 0, 0), (0, 0)]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
SPARE_ROWS = 3


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device=DEVICE, dtype=dtype)


def tokens_of_rows(num_rows: int, num_tokens: int, *, seed: int) -> Tensor:
    """The token of each row; `num_tokens` for padding."""
    index = torch.randint(
        0, num_tokens + 1, (num_rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    return index.to(DEVICE)


def rows(x: Tensor, index: Tensor | None) -> Tensor:
    """In float64."""
    x = x.double()
    return x if index is None else torch.cat([x, x.new_zeros(1, x.size(1))])[index.long()]
