"""Our layer in a torch-native model: FSDP2 or HSDP and tensor parallelism over a device mesh, against one
rank.

    DP=1 SHARD=2 TP=1 torchrun --nproc_per_node=2 tests/test_mesh.py      # FSDP2
    DP=1 SHARD=1 TP=2 torchrun --nproc_per_node=2 tests/test_mesh.py      # tensor parallelism
    # HSDP; NCCL with GPUs, else gloo; a few seconds
    DP=2 SHARD=2 TP=1 torchrun --nproc_per_node=4 tests/test_mesh.py

    # experts over 2 of the 4 ranks, and FSDP2 of the rest
    DP=1 SHARD=4 EP=2 torchrun --nproc_per_node=4 tests/test_mesh.py

DP replicas, each over SHARD ranks with their own data, each over TP ranks with the same data; EP of the SHARD
ranks share the experts. A variable that is not set is 1. Compared are the losses of every step of SGD and the
gradients of the first and the last, in fp32; the exit code is 1 where one differs. pytest runs it, too.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers.mesh_model import (
    EXPERTS,
    VOCAB,
    Meshes,
    Model,
    full,
    initial_weights,
    parallel_model,
    part_of_rank,
    whole_model,
)
from helpers.ranks import run_script_on_ranks
from helpers.relative_error import relative_error

# before moe_exp: it may have to put it on the path
from helpers.under_torchrun import leave, on_first_rank, torchrun, torchrun_job

LIMIT = 1e-5
STEPS, LEARNING_RATE, SEQUENCES, LENGTH = 5, 0.5, 2, 24


def mesh_sizes(environment: dict[str, str]) -> tuple[int, int, int, int]:
    """DP, SHARD, TP and EP.

    Raises:
        ValueError: for what is not a positive number, or not the number of ranks that torchrun started.
    """
    sizes = []
    for name in ("DP", "SHARD", "TP", "EP"):
        value = environment.get(name, "1")
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{name}={value}: is not a positive integer. Fix: set it to a number of ranks.")
        sizes.append(int(value))
    dp, shard, tp, ep = sizes
    world_size = int(environment["WORLD_SIZE"])
    if dp * shard * tp != world_size:
        raise ValueError(
            f"DP={dp}: with SHARD={shard} and TP={tp} that is {dp * shard * tp} ranks, torchrun started"
            f" {world_size}. Fix: set them so that DP*SHARD*TP is --nproc_per_node."
        )
    if shard % ep or EXPERTS % ep:
        raise ValueError(
            f"EP={ep}: does not divide SHARD={shard} and the {EXPERTS} experts of this test. Fix: use a"
            " divisor of both."
        )
    if ep > 1 and tp > 1:
        raise ValueError(f"EP={ep}: with TP={tp} is not a part of this test. Fix: set one of them to 1.")
    return dp, shard, tp, ep


def batch(step: int, data_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of one data parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Model, tokens: Tensor, targets: Tensor) -> Tensor:
    logits, auxiliary = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + auxiliary


def train(
    model: Model, num_data: int, data_ranks: list[int], device: torch.device
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses of every step, summed over `data_ranks` over `num_data`, and whole gradients of the first and
    the last step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for data_rank in data_ranks:
            loss = loss_of(model, *batch(step, data_rank, device))
            # FSDP takes the mean over its ranks, one rank has to take that over its micro-batches.
            (loss / len(data_ranks)).backward()
            total += loss.detach() / num_data
        losses.append(total)
        if step in (0, STEPS - 1):
            gradients.append(
                {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}
            )
        optimizer.step()
    return losses, gradients


def compare(meshes: Meshes, device: torch.device) -> dict[str, float]:
    """Largest relative errors, over ranks and steps, of the losses and of each kind of gradient."""
    dp, shard = meshes.dense["dp"], meshes.dense["shard"]
    num_data, data_rank = (
        dp.size() * shard.size(),
        dp.get_local_rank() * shard.size() + shard.get_local_rank(),
    )
    weights = initial_weights()
    expected_losses, expected = train(whole_model(weights, device), num_data, list(range(num_data)), device)
    losses, found = train(parallel_model(weights, meshes), num_data, [data_rank], device)
    for loss in losses:
        dist.all_reduce(loss, group=dp.get_group())
        dist.all_reduce(loss, group=shard.get_group())
    errors = {
        f"loss, step {i + 1}": relative_error(*pair)
        for i, pair in enumerate(zip(losses, expected_losses, strict=True))
    }
    for when, ours, whole in zip(("first", "last"), found, expected, strict=True):
        for name, gradient in whole.items():
            kind = f"gradients of {name.rpartition('.')[0].replace('blocks.', 'block ')}, {when} step"
            error = relative_error(ours[name], part_of_rank(name, gradient, meshes))
            errors[kind] = max(errors.get(kind, 0.0), error)
    worst = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(errors, worst.tolist(), strict=True))


def main() -> int:
    try:
        sizes = mesh_sizes(dict(os.environ))
    except ValueError as error:
        if os.environ["RANK"] == "0":
            print(error)
        return 1
    with torchrun_job() as device:
        dp, shard, tp, ep = sizes
        meshes = Meshes(
            dense=init_device_mesh(device.type, (dp, shard, tp), mesh_dim_names=("dp", "shard", "tp")),
            experts=init_device_mesh(
                device.type, (dp, shard // ep, ep, tp), mesh_dim_names=("dp", "shard", "ep", "tp")
            ),
        )
        on_first_rank(
            f"DP={dp} SHARD={shard} TP={tp} EP={ep}, {dist.get_backend()}, fp32, torch {torch.__version__};"
            f" limit {LIMIT:g}"
        )
        errors = compare(meshes, device)
        for name, error in errors.items():
            on_first_rank(f"  {name:50} {error:.1e}{'' if error < LIMIT else '   DIFFERS'}")
        equal = max(errors.values()) < LIMIT
        on_first_rank(
            f"{'equal' if equal else 'DIFFERENT'}: the largest relative error is {max(errors.values()):.1e}"
        )
        return 0 if equal else 1


@pytest.mark.slow
def test_under_torchrun():
    result = torchrun(2, __file__, DP=1, SHARD=2, TP=1)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_whole(result.stdout, "DP=1 SHARD=2 TP=1 EP=1")


@pytest.mark.parametrize(
    ("dp", "shard", "tp", "ep"),
    [
        (1, 1, 2, 1),
        (1, 2, 1, 1),
        pytest.param(1, 2, 1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(2, 1, 2, 1, marks=pytest.mark.slow),
        pytest.param(1, 4, 1, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_on_forked_ranks(dp, shard, tp, ep):
    codes, printed = run_script_on_ranks(dp * shard * tp, main, DP=dp, SHARD=shard, TP=tp, EP=ep)
    assert set(codes) == {0}, printed
    _is_whole(printed, f"DP={dp} SHARD={shard} TP={tp} EP={ep}")


def _is_whole(printed, sizes):
    assert sizes in printed
    assert f"loss, step {STEPS}" in printed
    assert "gradients of block 1.moe.experts, last step" in printed


def test_sizes_that_are_not_the_number_of_ranks(monkeypatch, capsys):
    printed = []
    for rank in range(2):
        for name, value in {"DP": 2, "SHARD": 2, "WORLD_SIZE": 2, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        assert main() == 1
        printed.append(capsys.readouterr().out)
    fix = "Fix: set them so that DP*SHARD*TP is --nproc_per_node."
    assert printed == [f"DP=2: with SHARD=2 and TP=1 that is 4 ranks, torchrun started 2. {fix}\n", ""]


@pytest.mark.parametrize("value", ["two", "0", "-1", ""])
def test_size_that_is_no_number(value):
    with pytest.raises(ValueError, match=rf"SHARD={value}: is not a positive integer\. Fix:"):
        mesh_sizes({"SHARD": value, "WORLD_SIZE": "2"})


def test_expert_parallelism_that_does_not_fit():
    with pytest.raises(
        ValueError, match=r"EP=3: does not divide SHARD=2 and the 4 experts of this test\. Fix:"
    ):
        mesh_sizes({"SHARD": "2", "EP": "3", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match=r"EP=2: with TP=2 is not a part of this test\. Fix:"):
        mesh_sizes({"SHARD": "2", "EP": "2", "TP": "2", "WORLD_SIZE": "4"})


if __name__ == "__main__":
    leave(main())
