"""Norms for the local spec: Megatron's own torch wrapper refuses sequence parallelism. No megatron import here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def choose_norm(device_type: str) -> tuple[str, str]:
    """The norm that runs, and the reason in words."""
    return "torch", f"torch.nn.RMSNorm and LayerNorm, with sequence parallelism, on {device_type}"


class Norm:
    """torch.nn.RMSNorm or LayerNorm (by `config.normalization`), marked for sequence parallelism.

    Under sequence parallelism every rank sees a part of the tokens; Megatron sums the gradients of the parameters that are
    marked so. A class, because Megatron's specs are built from classes; its signature is that of Megatron's norms.

    Args:
        config: has `normalization`, `sequence_parallel` and `params_dtype`.
        hidden_size: size of the last dimension.
        eps: added to the variance.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:  # type: ignore[misc]
        norm_class = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
