"""Which experts take the tokens of which source. Shapes: L layers with experts, P sources, E experts, K
top-k, T tokens.

A source is a data prefix. Its share for an expert is the part of its slots (tokens times K, before any drop)
that the router gives that expert. How far an expert tells sources apart is its term of the mutual information
of expert and source, with sources of equal weight, in bits:

    b_e = 1/P sum_p s_pe log2(s_pe / mean_p s_pe),    sum_e b_e = I(expert; source), of 0 to log2 P.

b_e is 0 where all sources use an expert alike, and small where hardly anybody uses it, however one-sided that
is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moe_exp.layers.router import RoutingDecision, count_kept

Float64Array = npt.NDArray[np.float64]


class RouterCounts:
    """Counts on this rank what its routers choose; `source` is set before every batch, and `valid_T` to leave
    padding out.

    Args:
        layers: index in the whole model, and the layer with a `router`, of those on this rank.
        num_layers: of the whole model.
        num_sources: P.
        num_experts: E.
        device: of the counts.
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, nn.Module]],
        *,
        num_layers: int,
        num_sources: int,
        num_experts: int,
        device: torch.device,
    ):
        self.counts_PLE = torch.zeros(num_sources, num_layers, num_experts, dtype=torch.int64, device=device)
        self.source = 0
        self.valid_T: Tensor | None = None
        for index, layer in layers:
            router = layer.router
            assert isinstance(router, nn.Module)
            router.register_forward_hook(partial(self._add, index))

    def _add(self, layer: int, router: nn.Module, inputs: Any, decision: RoutingDecision) -> None:
        kept_TK = None if self.valid_T is None else self.valid_T.unsqueeze(1).expand_as(decision.expert_TK)
        self.counts_PLE[self.source, layer] += count_kept(
            decision.expert_TK, kept_TK, self.counts_PLE.size(2)
        )


@dataclass(frozen=True)
class LayerUsage:
    """Of one layer.

    Args:
        layer: number in the model, from 1.
        counts_PE: slots of every source per expert.
    """

    layer: int
    counts_PE: npt.NDArray[np.int64]

    @property
    def shares_PE(self) -> Float64Array:
        """Rows sum to 1."""
        shares: Float64Array = self.counts_PE / self.counts_PE.sum(axis=1, keepdims=True)
        return shares

    @property
    def bits_E(self) -> Float64Array:
        """How far each expert tells the sources apart, see the top of the file."""
        shares = self.shares_PE
        mean = shares.mean(axis=0)
        ratio = np.divide(shares, mean, out=np.ones_like(shares), where=shares > 0)
        bits: Float64Array = (shares * np.log2(ratio)).mean(axis=0)
        return np.maximum(bits, 0.0)  # less than 0 by rounding alone

    @property
    def order_E(self) -> npt.NDArray[np.int64]:
        """Experts, the most specialised first; of equal ones, and with one source, the most used."""
        return np.lexsort((-self.shares_PE.mean(axis=0), -self.bits_E.round(12)))

    def to_json(self, sources: list[str]) -> dict[str, Any]:
        """Experts by their index, sources by name."""
        by_source = list(zip(sources, self.counts_PE.tolist(), self.shares_PE.tolist(), strict=True))
        return {
            "layer": self.layer,
            "specialisation_bits": float(self.bits_E.sum()),
            "expert_bits": self.bits_E.tolist(),
            "order": self.order_E.tolist(),
            "tokens_per_expert": {name: counts for name, counts, _ in by_source},
            "shares": {name: shares for name, _, shares in by_source},
        }
