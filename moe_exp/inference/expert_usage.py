"""Which experts take the tokens of which source.

Shapes: L MoE layers, P sources, E experts, K top-k, T tokens. A source is a data prefix; its share s_pe of an
expert is the fraction of its slots (tokens times K, before drops) routed there. An expert's specialisation is
its term of the mutual information of expert and source, in bits, with equally weighted sources:

    b_e = 1/P sum_p s_pe log2(s_pe / mean_p s_pe),    sum_e b_e = I(expert; source), from 0 to log2 P.

b_e is 0 if all sources use an expert equally, and small if it is rarely used, however one-sidedly.
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
    """Counts the choices of this rank's routers, [P, L, E]. `layers` are (index in the whole model, layer
    with a `router`). Before every batch set `source`, and `valid_T` to exclude padding.
    """

    def __init__(
        self, layers: Iterable[tuple[int, nn.Module]], sizes_PLE: tuple[int, int, int], device: torch.device
    ):
        self.counts_PLE = torch.zeros(sizes_PLE, dtype=torch.int64, device=device)
        self.source = 0
        self.valid_T: Tensor | None = None
        for index, layer in layers:
            router = layer.router
            assert isinstance(router, nn.Module)
            router.register_forward_hook(partial(self._add, index))

    def _add(self, layer: int, router: nn.Module, inputs: Any, decision: RoutingDecision) -> None:
        chosen_TK, num_experts = decision.expert_TK, self.counts_PLE.size(2)
        kept_TK = decision.kept_TK  # of a router with a free number of experts
        if self.valid_T is not None:
            valid_TK = self.valid_T.unsqueeze(1).expand_as(chosen_TK)
            kept_TK = valid_TK if kept_TK is None else kept_TK & valid_TK
        self.counts_PLE[self.source, layer] += count_kept(chosen_TK, kept_TK, num_experts)


@dataclass(frozen=True)
class LayerUsage:
    """Usage of one layer's experts."""

    layer: int  # in the model, from 1
    counts_PE: npt.NDArray[np.int64]  # slots

    @property
    def shares_PE(self) -> Float64Array:
        """Shares, see above; rows sum to 1."""
        shares: Float64Array = self.counts_PE / self.counts_PE.sum(axis=1, keepdims=True)
        return shares

    @property
    def bits_E(self) -> Float64Array:
        """Specialisation b_e, see above."""
        shares = self.shares_PE
        mean = shares.mean(axis=0)
        ratio = np.divide(shares, mean, out=np.ones_like(shares), where=shares > 0)
        bits: Float64Array = (shares * np.log2(ratio)).mean(axis=0)
        return np.maximum(bits, 0.0)  # negative only by rounding

    @property
    def order_E(self) -> npt.NDArray[np.int64]:
        """Experts, most specialised first; ties, and one source, by usage."""
        return np.lexsort((-self.shares_PE.mean(axis=0), -self.bits_E.round(12)))

    def to_json(self, sources: list[str]) -> dict[str, Any]:
        """Plain values: lists by expert, tables by source name."""
        by_source = list(zip(sources, self.counts_PE.tolist(), self.shares_PE.tolist(), strict=True))
        return {
            "layer": self.layer,
            "specialisation_bits": float(self.bits_E.sum()),
            "expert_bits": self.bits_E.tolist(),
            "order": self.order_E.tolist(),
            "tokens_per_expert": {name: counts for name, counts, _ in by_source},
            "shares": {name: shares for name, _, shares in by_source},
        }
