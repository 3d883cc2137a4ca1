"""Muon: momentum with orthogonalized updates of matrices (Jordan 2024; Liu et al. 2025, arXiv:2502.16982).

    M <- momentum * M + (1 - momentum) * G        U = orthogonalized(lerp(G, M, momentum))
    W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * U

The factor makes updates as large as AdamW's (Liu et al., section 2.2), so AdamW's learning rates apply. Like
torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, but in fp32, over whole matrices in any layout, and
per expert. Megatron-Core's Muon needs the package emerging_optimizers and leaves tensors without exactly two
axes, such as our experts, to Adam.

Embedding, output layer, norms and biases use AdamW (Jordan 2024) with Adam's settings, and so do routers:
Muon trains them worse (docs/recipes.md). The query, key and value projections are one matrix as stored, and
so are gate and up projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_exp.engine.optimizer_classes import MOMENTS, Adam

# In a parameter group of matrices: the axis split over tensor parallel ranks (-2 or -1), or 0.
AXIS = "muon_axis"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_STEPS = 5
_EPSILON = 1e-7


class Muon(Adam):
    """Muon for the parameter groups that have a `muon_axis`, AdamW for the others.

    Args:
        momentum: decay of Muon's running mean.
        tp_group: ranks that split the matrices of dense groups.
        etp_group: ranks that split those of groups with `is_expert_parallel`, [experts, rows, columns] each.
        adam: arguments of Adam.
    """

    def __init__(
        self,
        params: Any,
        *,
        momentum: float,
        tp_group: dist.ProcessGroup | None,
        etp_group: dist.ProcessGroup | None,
        **adam: Any,
    ):
        super().__init__(params, **adam)
        self._momentum, self._tp_group, self._etp_group = momentum, tp_group, etp_group

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        if AXIS not in group:
            super().allocate(p, group)
        elif not self.state[p]:
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    def moments(self, p: Tensor) -> dict[str, Tensor]:
        return {name: self.state[p][name] for name in MOMENTS if name in self.state[p]}

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if AXIS not in group:
            super()._update(group, params)
            return
        ranks = self._etp_group if group.get("is_expert_parallel") else self._tp_group
        for p in params:
            assert p.grad is not None
            mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - self._momentum)
            update = _whole_orthogonalized(p.grad.lerp(mean, self._momentum), group[AXIS], ranks)
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def _whole_orthogonalized(part: Tensor, axis: int, ranks: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of the orthogonalized whole, scaled to the size of Adam's updates."""
    world = dist.get_world_size(ranks) if ranks is not None and axis else 1
    whole = part
    if world > 1:
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous(), group=ranks)
        whole = torch.cat(parts, dim=axis)
    update = orthogonalized(whole) * (0.2 * max(whole.shape[-2:]) ** 0.5)
    return update.chunk(world, dim=axis)[dist.get_rank(ranks)] if world > 1 else update


def orthogonalized(matrices: Tensor) -> Tensor:
    """Near U V^T for every fp32 matrix U S V^T [..., rows, columns]: singular values become 0.7 to 1.2.

    Five Newton-Schulz steps.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPSILON)
    for _ in range(_NUM_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)
