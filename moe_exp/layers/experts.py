"""The experts of one rank: one weight tensor per projection for all of them. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_exp.layers.dispatcher import Dispatched
from moe_exp.layers.grouped_gemm import BACKENDS

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, So et al. 2021, Primer (arXiv:2109.08668)."""
    return torch.relu(x).square()


# Name to (function, gated). A gated one multiplies the activated first half of a doubled projection by the second half.
ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    "swiglu": (nn.functional.silu, True),
    "geglu": (nn.functional.gelu, True),
    "gelu": (nn.functional.gelu, False),
    "squared_relu": (squared_relu, False),
}


class Experts(nn.Module):
    """y = (act(x W1) * w) W2 per row, w the router weight: so the expert outputs need not be kept for w's gradient.

    Args:
        num_local_experts: L.
        hidden_size: D.
        ffn_size: F on this rank (the width of an expert over the expert tensor parallel size).
        activation: a name in ACTIVATIONS.
        backend: a name in grouped_gemm.BACKENDS.

    Weights, in torch's (out, in) order: `weight1` [L, 2F or F, D], with the gate half first; `weight2` [L, D, F].
    """

    def __init__(
        self,
        *,
        num_local_experts: int,
        hidden_size: int,
        ffn_size: int,
        activation: str,
        backend: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation}: is not an activation. Fix: use one of {', '.join(ACTIVATIONS)}.")
        self.activation, self.gated = ACTIVATIONS[activation]
        self.grouped_gemm = BACKENDS[backend]
        width = ffn_size * (2 if self.gated else 1)
        self.weight1 = nn.Parameter(torch.empty(num_local_experts, width, hidden_size, dtype=dtype, device=device))
        self.weight2 = nn.Parameter(torch.empty(num_local_experts, hidden_size, ffn_size, dtype=dtype, device=device))

    def forward(self, dispatched: Dispatched) -> Tensor:
        counts_L, splits = dispatched.tokens_per_expert_L, dispatched.splits
        if splits is None and dispatched.rows_RD.device.type == "cpu":
            splits = tuple(counts_L.tolist())
        hidden_RF = self.grouped_gemm(dispatched.rows_RD, self.weight1.transpose(1, 2), counts_L, splits)
        hidden_RF = self._activate(hidden_RF) * dispatched.weights_R.unsqueeze(1).to(hidden_RF.dtype)
        return self.grouped_gemm(hidden_RF, self.weight2.transpose(1, 2), counts_L, splits)

    def _activate(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up
