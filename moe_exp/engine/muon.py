"""Muon: momentum whose matrices are orthogonalized before they are subtracted (Jordan 2024; Liu et al. 2025,
arXiv:2502.16982).

    M <- momentum * M + (1 - momentum) * G        U = orthogonalized(lerp(G, M, momentum))
    W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * U

The factor makes an update as large as AdamW's (section 2.2 of the second), so that a learning rate for AdamW
serves. As torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, but in fp32, of a whole matrix whatever the
layout, and of every expert's matrix by itself. Megatron-Core's Muon needs the package emerging_optimizers,
and leaves to Adam what is no tensor of two axes, as our experts.

Embedding, output layer, norms and biases are left to AdamW (Jordan 2024), with the settings of Adam. The
projections of queries, keys and values are one matrix, and so are gate and up projection: as they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_exp.engine.optimizers import MOMENTS, Adam

# of a parameter group of matrices: the axis that tensor parallel ranks split, -2 or -1, or 0 where they do
# not
AXIS = "muon_axis"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_STEPS = 5
_EPSILON = 1e-7


class Muon(Adam):
    """Muon for the parameter groups that have a `muon_axis`, AdamW for the others.

    Args:
        params: groups.
        momentum: decay of Muon's running mean.
        tp_group: ranks that split the matrices of dense groups.
        etp_group: ranks that split those of groups with `is_expert_parallel`, whose tensors are [experts,
            rows, columns].
        adam: of Adam.
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
    """This rank's part of the orthogonalized whole, times what makes it as large as an update of Adam.

    Where a rank has a part of the gate and one of the up projection, the rows of the whole are in another
    order than in the model's tensor; orthogonalization does not depend on it.
    """
    world = dist.get_world_size(ranks) if ranks is not None and axis else 1
    whole = part
    if world > 1:
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous(), group=ranks)
        whole = torch.cat(parts, dim=axis)
    update = orthogonalized(whole) * (0.2 * max(whole.shape[-2:]) ** 0.5)
    return update.chunk(world, dim=axis)[dist.get_rank(ranks)] if world > 1 else update


def orthogonalized(matrices: Tensor) -> Tensor:
    """Near U V^T for every matrix U S V^T: its singular values become 0.7 to 1.2, by five steps of Newton and
    Schulz.

    Args:
        matrices: fp32 [..., rows, columns].
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPSILON)
    for _ in range(_NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
