"""Norms for the local spec: Megatron's torch wrapper refuses sequence parallelism. No megatron import here.

Shapes of ProjectionNorm: S sequence, B batch, h heads on this rank of H in the model, d head size.
"""

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
        without = f"torch {torch.__version__} has no kernel for RMSNorm"
        reason += f"; {'RMSNorm is one kernel each way' if has_kernel else without}"
    return "torch", reason


class Norm:
    """torch.nn.RMSNorm or LayerNorm (by `config.normalization`), marked for sequence parallelism.

    With sequence parallelism a rank sees a part of the tokens, and Megatron sums the gradients of marked
    parameters. A class with the signature of Megatron's norms, because specs are built from classes.

    Args:
        config: has `normalization`, `sequence_parallel` and `params_dtype`.
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
    """RMSNorm of a query or key projection over all heads: OLMo 2 (arXiv:2501.00656, sec. 3.1), OLMoE.

    y = weight * x / sqrt(mean(x^2) + eps), with the mean over all H*d channels. Heads and weights are split
    over tensor parallel ranks, which exchange their sums of squares (S*B numbers per rank) and the gradients
    of these. Computed in at least fp32.

    Args:
        config: has `params_dtype`.
        num_channels: H*d, of all ranks.
        group: ranks that hold the other heads of the same tokens.
    """

    def __init__(self, config: Any, num_channels: int, *, eps: float, group: ProcessGroup):
        super().__init__()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.weight = nn.Parameter(
            torch.ones(num_channels // group.size(), dtype=config.params_dtype, device=device)
        )
        self.num_channels, self.eps, self.group = num_channels, eps, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [S, B, h, d]; the result has its shape and dtype."""
        flat = x.flatten(-2)
        if self.group.size() == 1:
            return nn.functional.rms_norm(flat, self.weight.shape, self.weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        squares = wide.square().sum(-1)
        # Gathered, then summed in rank order, so that every rank has the same bits.
        total = gather_rows(squares.unsqueeze(0), sizes=[1] * self.group.size(), group=self.group).sum(0)
        normalized = wide * torch.rsqrt(total / self.num_channels + self.eps).unsqueeze(-1)
        return (normalized * self.weight).to(x.dtype).view_as(x)
