"""The shared expert, which processes every token. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_exp.layers.activations import activate
from moe_exp.layers.experts import ACTIVATIONS


class SharedExpert(nn.Module):
    """y = (act(x W1) W2) * g, where g = sigmoid(x w_g) with a gate (Qwen2-MoE, arXiv:2407.10671), else 1.

    DeepSeekMoE (arXiv:2401.06066). For use outside Megatron; inside, Megatron's SharedExpertMLP does the same
    with tensor parallelism. Weights are in torch's (out, in) order: `weight1` [2F or F, D], gate half first;
    `weight2` [D, F]; `gate_weight` [1, D].

    Args:
        hidden_size: D.
        ffn_size: F.
        activation: a key of ACTIVATIONS.
        gate: scale each token's output by a gate.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        ffn_size: int,
        activation: str = "swiglu",
        gate: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            fix = f"use one of {', '.join(ACTIVATIONS)}"
            raise ValueError(f"activation={activation}: is not an activation. Fix: {fix}.")
        self.activation = activation
        width = ffn_size * (2 if ACTIVATIONS[activation].gated else 1)
        self.weight1 = nn.Parameter(torch.empty(width, hidden_size, dtype=dtype, device=device))
        self.weight2 = nn.Parameter(torch.empty(hidden_size, ffn_size, dtype=dtype, device=device))
        self.gate_weight = (
            nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device)) if gate else None
        )
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initializes the weights."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        hidden = activate(nn.functional.linear(x, self.weight1), self.activation)
        y = nn.functional.linear(hidden, self.weight2)
        return y if self.gate_weight is None else y * torch.sigmoid(nn.functional.linear(x, self.gate_weight))
