"""Reads weights in MXFP4 (OCP Microscaling Formats 1.0), the published format of gpt-oss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors of a weight
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_mxfp4(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are in MXFP4."""
    how = fields.get("quantization_config")
    return isinstance(how, dict) and how.get("quant_method") == "mxfp4"


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes an expert's weight to [I, O] in bf16, which holds every value exactly.

    Args:
        blocks: [O, I / 32, 16], with two values of four bits per byte, the lower bits first.
        scales: [O, I / 32], exponents of 2 plus 127.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    of_byte = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    exponents = scales.int().unsqueeze(-1) - 127
    return torch.ldexp(of_byte[blocks.int()].flatten(-2), exponents).flatten(-2).bfloat16().t()
