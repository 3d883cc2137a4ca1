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

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers.layers.mesh_model import (
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
    """DP, SHARD, TP and EP."""
    dp, shard, tp, ep = (int(environment.get(name, "1")) for name in ("DP", "SHARD", "TP", "EP"))
    if dp * shard * tp != int(environment["WORLD_SIZE"]):
        raise SystemExit("set DP, SHARD and TP so that DP*SHARD*TP is --nproc_per_node")
    if shard % ep or EXPERTS % ep or (ep > 1 and tp > 1):
        raise SystemExit(f"EP must divide SHARD and the {EXPERTS} experts of this test, and needs TP=1")
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
    """Losses of every step, summed over `data_ranks` over `num_data`; first and last gradients, whole."""
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
            gradients.append({name: full(p.grad).clone() for name, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


def compare(meshes: Meshes, device: torch.device) -> dict[str, float]:
    """Largest relative errors, over ranks and steps, of the losses and of each kind of gradient."""
    dp, shard = meshes.dense["dp"], meshes.dense["shard"]
    num_data = dp.size() * shard.size()
    data_rank = dp.get_local_rank() * shard.size() + shard.get_local_rank()
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
    dp, shard, tp, ep = mesh_sizes(dict(os.environ))
    with torchrun_job() as device:
        meshes = Meshes(
            dense=init_device_mesh(device.type, (dp, shard, tp), mesh_dim_names=("dp", "shard", "tp")),
            experts=init_device_mesh(
                device.type, (dp, shard // ep, ep, tp), mesh_dim_names=("dp", "shard", "ep", "tp")
            ),
        )
        on_first_rank(f"DP={dp} SHARD={shard} TP={tp} EP={ep}, {dist.get_backend()}, fp32; limit {LIMIT:g}")
        errors = compare(meshes, device)
        for name, error in errors.items():
            on_first_rank(f"  {name:50} {error:.1e}{'' if error < LIMIT else '   DIFFERS'}")
        equal = max(errors.values()) < LIMIT
        on_first_rank("equal" if equal else "DIFFERENT")
        return 0 if equal else 1


@pytest.mark.slow
def test_under_torchrun():
    result = torchrun(2, __file__, DP=1, SHARD=2, TP=1)
    assert result.returncode == 0, result.stdout + result.stderr
    _is_whole(result.stdout, "DP=1 SHARD=2 TP=1 EP=1")


FAST = [(1, 1, 2, 1), (1, 2, 1, 1)]
SLOW = [(1, 2, 1, 2), (2, 1, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1), (1, 4, 1, 2), (2, 2, 1, 2)]
SIZES = [*FAST, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW)]


@pytest.mark.parametrize(("dp", "shard", "tp", "ep"), SIZES)
def test_on_forked_ranks(dp, shard, tp, ep):
    codes, printed = run_script_on_ranks(dp * shard * tp, main, DP=dp, SHARD=shard, TP=tp, EP=ep)
    assert set(codes) == {0}, printed
    _is_whole(printed, f"DP={dp} SHARD={shard} TP={tp} EP={ep}")


def _is_whole(printed, sizes):
    assert sizes in printed
    assert f"loss, step {STEPS}" in printed
    assert "gradients of block 1.moe.experts, last step" in printed


if __name__ == "__main__":
    leave(main())
