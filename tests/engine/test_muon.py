"""Muon: against torch's own, which computes in bf16, and by singular values."""

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.engine import muon as module
from moe_exp.engine.muon import AXIS, Muon, Ranks, orthogonalized, shared_out
from moe_exp.engine.optimizer_classes import allocate_moments, moments

NOBODY = Ranks()
ADAM = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.95)}
SHAPES = [(16, 16), (7, 33), (40, 5), (1, 9)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def muon(groups: list[dict[str, object]], ranks: Ranks = NOBODY) -> Muon:
    made = Muon(groups, momentum=0.95, dense=ranks, experts=ranks, **ADAM)
    allocate_moments(made)
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one_and_vectors_are_kept(shape):
    matrix = random(*shape)
    found = orthogonalized(matrix)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = (u.mT @ found @ v.mT).diagonal()
    assert 0.6 < values.min() <= values.max() < 1.3
    assert relative_error(u @ values.diag() @ v, found) < 1e-4


def test_no_gradient_gives_no_update():
    assert torch.equal(orthogonalized(torch.zeros(4, 6)), torch.zeros(4, 6))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has had Muon since 2.9")
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_torchs_within_bf16(shape):
    p, q = (torch.nn.Parameter(random(*shape)) for _ in range(2))
    start = p.detach().clone()
    ours = muon([{"params": [p], AXIS: 0}])
    theirs = torch.optim.Muon(
        [q], lr=0.1, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(1, 4):
        p.grad = random(*shape, seed=seed)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert relative_error(p.detach() - start, q.detach() - start) < 0.03
    assert relative_error(moments(ours, p)["momentum_buffer"], theirs.state[q]["momentum_buffer"]) < 1e-6


def test_each_expert_by_itself_and_adam_for_other_groups():
    experts = torch.nn.Parameter(random(3, 8, 5))
    alone = [torch.nn.Parameter(part.clone()) for part in random(3, 8, 5)]
    norm = torch.nn.Parameter(torch.ones(6))
    together = muon([{"params": [experts], AXIS: -2, "is_expert_parallel": True}, {"params": [norm]}])
    apart = muon([{"params": alone, AXIS: 0}])
    for seed in range(2):
        experts.grad, norm.grad = random(3, 8, 5, seed=seed + 9), random(6, seed=seed)
        for part, gradient in zip(alone, experts.grad, strict=True):
            part.grad = gradient.clone()
        together.step()
        apart.step()
    assert relative_error(experts.detach(), torch.stack([part.detach() for part in alone])) < 1e-6
    reference = torch.nn.Parameter(torch.ones(6))
    adam = torch.optim.AdamW([reference], **ADAM)
    for seed in range(2):
        reference.grad = random(6, seed=seed)
        adam.step()
    assert relative_error(norm.detach(), reference.detach()) < 1e-6
    assert set(moments(together, norm)) == {"exp_avg", "exp_avg_sq"}


# Shared out over ranks

# Axis that tensor parallel ranks split, and shape; 3 axes: experts.
MATRICES = [(-2, (6, 10)), (-1, (10, 6)), (0, (5, 7)), (-2, (3, 8, 6)), (-1, (5, 4, 6))]
LAYOUTS = {"DP4": (4, 1), "DP2": (2, 1), "DP2 TP2": (2, 2), "TP2": (1, 2), "one rank": (1, 1)}


def after_steps(matrices, data: int, tensor: int, ranks: Ranks = NOBODY, index: int = 0):
    """This rank's parts after three steps; `index` is that among its tensor parallel ranks."""

    def part(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.chunk(tensor, dim=axis)[index].clone() if axis else x

    params = [torch.nn.Parameter(part(random(*shape), axis)) for axis, shape in matrices]
    groups = [
        {"params": [p], AXIS: axis, "is_expert_parallel": p.dim() == 3, "lr": 0.1 * (1 + place)}
        for place, (p, (axis, _)) in enumerate(zip(params, matrices, strict=True))
    ]
    optimizer = muon(groups, ranks)
    for seed in range(1, 4):
        for p, (axis, shape) in zip(params, matrices, strict=True):
            p.grad = part(random(*shape, seed=seed), axis)
        optimizer.step()
    return [p.detach() for p in params]


def in_all_layouts(matrices, bucket: int):
    """By layout: this rank's parts, its place among tensor parallel ranks, and its number of matrices."""
    counted: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        counted.append(x.numel() // (x.shape[-1] * x.shape[-2]))
        return orthogonalized(x)

    module._BUCKET, module.orthogonalized = bucket, counting
    rank, found = dist.get_rank(), {}
    for name, (data, tensor) in LAYOUTS.items():
        size = data * tensor
        meshes = [torch.arange(start, start + size).view(data, tensor) for start in range(0, 4, size)]
        split, _ = dist.new_subgroups_by_enumeration([row.tolist() for mesh in meshes for row in mesh])
        shared, _ = dist.new_subgroups_by_enumeration([row.tolist() for mesh in meshes for row in mesh.T])
        counted.clear()
        parts = after_steps(matrices, data, tensor, Ranks(split, shared), rank % tensor)
        found[name] = (parts, rank % tensor, sum(counted))
    return found


@pytest.mark.parametrize(("matrices", "bucket"), [(MATRICES, 100), (MATRICES[:1], 1 << 26)])
def test_ranks_share_the_matrices_and_get_what_one_rank_gets(matrices, bucket):
    expected = after_steps(matrices, 1, 1)
    found = run_on_ranks(4, in_all_layouts, matrices, bucket)
    num_matrices = 3 * sum(x[0] if len(x) == 3 else 1 for _, x in matrices)
    for name, (data, tensor) in LAYOUTS.items():
        ranks = [layouts[name] for layouts in found]
        for parts, place, _ in ranks:
            for values, whole, (axis, _) in zip(parts, expected, matrices, strict=True):
                part = whole.chunk(tensor, dim=axis)[place] if axis else whole
                assert relative_error(values, part) < 1e-6
            # Replicas have the same bits.
            twin = next(parts for parts, other, _ in ranks if other == place)
            assert all(map(torch.equal, parts, twin))
        # Each matrix is orthogonalized by one data parallel rank, with all of its tensor parallel ranks.
        assert sum(count for *_, count in ranks[: data * tensor]) == num_matrices * tensor
    assert all(map(torch.equal, found[0]["one rank"][0], expected))
    if len(matrices) > 1:
        # 11 matrices a step, on 4 ranks: 3 dense ones, and 8 experts of two sizes, are balanced separately.
        assert all(3 <= layouts["DP4"][2] <= 3 * 4 for layouts in found)


def test_costly_matrices_come_first_to_the_rank_with_the_least():
    # 9 to rank 0, 8 to 1, 5 to 2; then 4 to 2 (has 5), 3 to 1 (has 8), 3 to 0 (has 9, as 2), 1 to 2.
    assert shared_out([3, 9, 4, 5, 8, 1, 3], 3) == [1, 0, 2, 2, 1, 2, 0]
    assert shared_out([7, 7], 4) == [0, 1]


def test_a_step_on_one_rank_is_the_formula_to_the_bit():
    p = torch.nn.Parameter(start := random(7, 33))
    start, gradient = start.clone(), random(7, 33, seed=1)
    p.grad = gradient.clone()
    muon([{"params": [p], AXIS: 0}]).step()
    update = orthogonalized(gradient.lerp(torch.zeros(7, 33).lerp(gradient, 1 - 0.95), 0.95))
    assert torch.equal(p.detach(), (start * (1 - 0.1 * 0.1)).add(update * (0.2 * 33**0.5), alpha=-0.1))
