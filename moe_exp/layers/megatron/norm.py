"""Norms for the local spec: Megatron's own torch wrapper refuses sequence parallelism. No megatron import
here.

Shapes of ProjectionNorm: S sequence, B batch, h heads on this rank of H in the model, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import gather_rows


def choose_norm(device_type: str) -> tuple[str, str]:
    """The norm that runs, and the reason in words."""
    reason = f"torch.nn.RMSNorm and LayerNorm, with sequence parallelism, on {device_type}"
    if device_type == "cuda":
        has_kernel = hasattr(torch.ops.aten, "_fused_rms_norm")
        reason += (
            "; RMSNorm is one kernel each way"
            if has_kernel
            else f"; torch {torch.__version__} has no kernel for RMSNorm"
        )
    return "torch", reason


class Norm:
    """torch.nn.RMSNorm or LayerNorm (by `config.normalization`), marked for sequence parallelism.

    Under sequence parallelism every rank sees a part of the tokens; Megatron sums the gradients of the
    parameters that are marked so. A class, because Megatron's specs are built from classes; its signature is
    that of Megatron's norms.

    Args:
        config: has `normalization`, `sequence_parallel` and `params_dtype`.
        hidden_size: size of the last dimension.
        eps: added to the variance.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> nn.Module:
        norm_class = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ProjectionNorm(nn.Module):
    """RMSNorm of a whole query or key projection, all heads together, as in OLMo 2 (arXiv:2501.00656, section
    3.1) and OLMoE.

    y = weight * x / sqrt(mean(x^2) + eps), where the mean is over all H*d channels. The heads, and with them
    the weights, are split over tensor parallel ranks: the sums of squares are exchanged, S*B numbers of each
    rank, and their gradients come back. Computed in fp32 at least.

    Args:
        config: has `params_dtype`.
        num_channels: H*d, of all ranks.
        eps: added to the mean.
        group: ranks that hold the other heads of the same tokens.
    """

    def __init__(self, config: Any, num_channels: int, *, eps: float, group: ProcessGroup):
        super().__init__()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.weight = nn.Parameter(
            torch.ones(num_channels // group.size(), dtype=config.params_dtype, device=device)
        )
        self.num_channels = num_channels
        self.eps = eps
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [S, B, h, d]; the result has its shape and dtype."""
        flat = x.flatten(-2)
        if self.group.size() == 1:
            return nn.functional.rms_norm(flat, self.weight.shape, self.weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        squares = wide.square().sum(-1)
        # Gathered and then added up in order of rank, so that every rank has the same bits.
        total = gather_rows(squares.unsqueeze(0), sizes=[1] * self.group.size(), group=self.group).sum(0)
        normalized = wide * torch.rsqrt(total / self.num_channels + self.eps).unsqueeze(-1)
        return (normalized * self.weight).to(x.dtype).view_as(x)
