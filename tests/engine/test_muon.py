"""Muon: against torch's own, which computes in bf16, and by singular values."""

from __future__ import annotations

import pytest
import torch

from helpers.relative_error import relative_error
from moe_exp.engine.muon import AXIS, Muon, orthogonalized
from moe_exp.engine.optimizer_classes import allocate_moments, moments

SHAPES = [(16, 16), (7, 33), (40, 5), (1, 9)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def muon(groups: list[dict[str, object]]) -> Muon:
    made = Muon(
        groups, momentum=0.95, tp_group=None, etp_group=None, lr=0.1, weight_decay=0.1, betas=(0.9, 0.95)
    )
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
    experts, alone = (
        torch.nn.Parameter(random(3, 8, 5)),
        [torch.nn.Parameter(part.clone()) for part in random(3, 8, 5)],
    )
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
    adam = torch.optim.AdamW(
        [reference := torch.nn.Parameter(torch.ones(6))], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95)
    )
    for seed in range(2):
        reference.grad = random(6, seed=seed)
        adam.step()
    assert relative_error(norm.detach(), reference.detach()) < 1e-6
    assert set(moments(together, norm)) == {"exp_avg", "exp_avg_sq"}
