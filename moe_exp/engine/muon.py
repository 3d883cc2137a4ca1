"""Muon: momentum with orthogonalized updates of matrices (Jordan 2024; Liu et al. 2025, arXiv:2502.16982).

    M <- momentum * M + (1 - momentum) * G        U = orthogonalized(lerp(G, M, momentum))
    W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * U

G is the gradient of matrix W, and M is the running mean of G. The factor 0.2 * sqrt(...) makes updates as
large as AdamW's (Liu et al., section 2.2), so AdamW's learning rates apply. The formula is that of
torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`; we apply it in fp32. Each expert's matrix is
orthogonalized separately, and a matrix split over ranks is orthogonalized as a whole. Megatron-Core's Muon
needs the package emerging_optimizers and would use Adam for our experts because their weights are 3D tensors.

Embedding, output layer, norms and biases use AdamW with Adam's settings (as in Jordan 2024). Routers also use
AdamW because they train worse with Muon (docs/recipes.md). Query, key and value projections are stored as one
matrix and therefore orthogonalized together; the same is true of gate and up projections.

Memory: the running mean takes 4 bytes per parameter. If n ranks share the work of a step, the updates
take 4 / n bytes per parameter on each rank, and a communication buffer takes 256 MiB.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_exp.engine.optimizer_classes import Adam
from moe_exp.host.gloo import all_gather
from moe_exp.layers.groups import group_size

# Key in a parameter group of matrices: the axis split over tensor parallel ranks (-2 or -1), or 0.
AXIS = "muon_axis"
_BUCKET = 1 << 26  # values gathered at once from all ranks


class Ranks(NamedTuple):
    """Process groups of the ranks that hold a set of matrices."""

    split: dist.ProcessGroup | None = None  # ranks that each have a part of every matrix; None: not split
    shared: dist.ProcessGroup | None = None  # ranks with the same matrices, which share the work


class _Matrices(NamedTuple):
    """A parameter to update in this step, [rows, columns] or [experts, rows, columns]."""

    parameter: Tensor
    mean: Tensor
    group: Mapping[str, Any]


_Owned = tuple[_Matrices, list[int]]  # a parameter, and indices of some of its matrices


class Muon(Adam):
    """Muon for parameter groups with the key `muon_axis`, AdamW for other groups.

    Args:
        momentum: decay of Muon's running mean.
        dense: process groups of the dense matrices.
        experts: process groups of the experts' matrices (parameters of shape [experts, rows, columns]).
        adam: arguments for Adam.
    """

    def __init__(self, params: Any, *, momentum: float, dense: Ranks, experts: Ranks, **adam: Any):
        super().__init__(params, **adam)
        self._momentum, self._ranks = momentum, {False: dense, True: experts}
        self._waiting: dict[bool, list[_Matrices]] = {False: [], True: []}

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        if AXIS not in group:
            super().allocate(p, group)
        elif not self.state[p]:
            # On every rank, not only on a matrix's owner, so that checkpoints do not depend on owners.
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        # All groups at once: the more matrices, the better the load balance.
        for is_expert, waiting in self._waiting.items():
            if waiting:
                self._step_matrices(waiting, self._ranks[is_expert])
            waiting.clear()

    def _update_by_kernel(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        (self._update if AXIS in group else super()._update_by_kernel)(group, params)

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if AXIS not in group:
            super()._update(group, params)
            return
        for p in params:
            assert p.grad is not None
            mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - self._momentum)
            self._waiting[bool(group.get("is_expert_parallel"))].append(_Matrices(p, mean, group))

    def _step_matrices(self, waiting: Sequence[_Matrices], ranks: Ranks) -> None:
        for p, _, group in waiting:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        if group_size(ranks.shared) == 1:  # no other ranks to share the work with: no copies
            for p, mean, group in waiting:
                assert p.grad is not None
                update = _whole_orthogonalized(p.grad.lerp(mean, self._momentum), group[AXIS], ranks.split)
                p.add_(update, alpha=-group["lr"])
            return
        # Ranks with the same matrices share the work, as in Jordan's and Liu et al.'s code (section 2.3): one
        # of them, the owner, orthogonalizes a matrix (or an expert's), and all add the same bits.
        owned = _owned(waiting, ranks)

        def updates() -> Iterator[Tensor]:  # one at a time, as each is freed once it is in the buffer
            for (p, mean, group), indices in owned[dist.get_rank(ranks.shared)]:
                assert p.grad is not None
                gradient = _stacked(p.grad)[indices].lerp(_stacked(mean)[indices], self._momentum)
                yield _whole_orthogonalized(gradient, group[AXIS], ranks.split)

        _add_gathered(owned, updates(), ranks.shared)


def shared_out(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Returns each task's rank. Costliest first, each task goes to the rank with the least total so far."""
    # The largest total is at most 4/3 of the optimum (Graham 1969, "Bounds on multiprocessing timing
    # anomalies", theorem 2). Ties go to the earlier task and the lower rank: the same result on all ranks.
    ranks, owners = [(0, rank) for rank in range(num_ranks)], [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        sum_so_far, owners[task] = ranks[0]
        heapq.heapreplace(ranks, (sum_so_far + costs[task], owners[task]))
    return owners


def _owned(waiting: Sequence[_Matrices], ranks: Ranks) -> list[list[_Owned]]:
    """Returns the matrices that each rank of `ranks.shared` owns, as (parameter, indices) pairs."""
    costs = []  # proportional to the number of operations in `orthogonalized`
    for each in waiting:
        sizes, axis = list(each.parameter.shape[-2:]), each.group[AXIS]
        if axis:
            sizes[axis] *= group_size(ranks.split)
        short, long = sorted(sizes)
        costs += [short * short * (2 * long + short)] * len(_stacked(each.parameter))
    owners = iter(shared_out(costs, group_size(ranks.shared)))
    owned: list[list[_Owned]] = [[] for _ in range(group_size(ranks.shared))]
    for each in waiting:
        found: dict[int, list[int]] = {}
        for index in range(len(_stacked(each.parameter))):
            found.setdefault(next(owners), []).append(index)
        for owner, indices in found.items():
            owned[owner].append((each, indices))
    return owned


def _add_gathered(
    owned: Sequence[Sequence[_Owned]], updates: Iterable[Tensor], ranks: dist.ProcessGroup | None
) -> None:
    """Gathers all ranks' updates and adds -lr * update to all parameters. `updates`: this rank's updates."""
    targets: list[list[tuple[Tensor, float]]] = [[] for _ in owned]
    for of_rank, own in zip(targets, owned, strict=True):
        for each, indices in own:
            of_rank += [(_stacked(each.parameter)[index].view(-1), each.group["lr"]) for index in indices]
    # Ranks own different numbers of values, but an all-gather needs equal sizes: pad all to the largest.
    longest = max(sum(target.numel() for target, _ in of_rank) for of_rank in targets)
    flat, offset = next(own[0][0].parameter for own in owned if own).new_zeros(longest), 0
    for update in updates:
        flat[offset : offset + update.numel()] = update.reshape(-1)
        offset += update.numel()
    for start in range(0, longest, size := max(1, _BUCKET // len(owned))):
        part = flat[start : start + size]
        gathered = part.new_empty(len(owned), part.numel())
        all_gather(gathered.view(-1), part, group=ranks)
        for of_rank, values in zip(targets, gathered, strict=True):
            # A bucket covers values from `start` on of the rank's concatenated targets.
            offset = 0
            for target, lr in of_rank:
                low, high = max(offset, start), min(offset + target.numel(), start + values.numel())
                if low < high:
                    target[low - offset : high - offset].add_(values[low - start : high - start], alpha=-lr)
                offset += target.numel()


def _stacked(x: Tensor) -> Tensor:
    """View of `x` as [matrices, rows, columns]."""
    return x.view(-1, *x.shape[-2:])


def _whole_orthogonalized(part: Tensor, axis: int, ranks: dist.ProcessGroup | None) -> Tensor:
    """Gathers and orthogonalizes full matrices; returns this rank's part, scaled to Adam's update size."""
    world = group_size(ranks) if axis else 1
    whole = part
    if world > 1:
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous(), group=ranks)
        whole = torch.cat(parts, dim=axis)
    update = orthogonalized(whole) * (0.2 * max(whole.shape[-2:]) ** 0.5)
    return update.chunk(world, dim=axis)[dist.get_rank(ranks)] if world > 1 else update


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximates U V^T for fp32 matrices U S V^T [..., rows, columns] by five Newton-Schulz steps."""
    # Jordan's coefficients: steep at 0, so that small singular values grow fast. The result does not converge
    # to 1, but to 0.7 to 1.2.
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)
