"""Megatron's own SequentialMLP writes and reads the checkpoints that ours reads and writes."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.layers.megatron_pair import megatron_config, start_parallel
from helpers.layers.tiny_moe import cut, random
from helpers.ranks import run_on_ranks
from moe_exp.layers.megatron.sharding import ExpertPlace, shard_experts

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

HIDDEN, FFN, EXPERTS = 8, 12, 4
# Ranks, EP, ETP.
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1)]
CASES = list(itertools.product((False, True), repeat=3))  # gated, with biases, singleton shards
PREFIX = "decoder.layers.1.mlp.experts."


def full_tensors(gated: bool) -> dict[str, Tensor]:
    """Ours for all experts, not split."""
    width = FFN * (1 + gated)
    shapes = {"weight1": (EXPERTS, width, HIDDEN), "weight2": (EXPERTS, HIDDEN, FFN)}
    shapes |= {"bias1": (EXPERTS, width), "bias2": (EXPERTS, HIDDEN)}
    return {name: random(*shape, seed=seed).float() for seed, (name, shape) in enumerate(shapes.items())}


def _sequential_mlp(groups: Any, ep: int, etp: int, gated: bool, bias: bool) -> Any:
    sizes = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN,
        "expert_tensor_parallel_size": etp, "gated_linear_unit": gated,
    }  # fmt: skip
    config = megatron_config(ep, "alltoall", sizes)
    config.add_bias_linear = bias  # refused with ETP > 1, but its modules can be saved
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(EXPERTS // ep, config, linears, groups)


def _megatrons_tensors(experts: Any) -> dict[str, list[Tensor]]:
    """Our name to the tensors of Megatron's experts on this rank."""
    linears = [(expert.linear_fc1, expert.linear_fc2) for expert in experts.local_experts]
    names = {"weight1": (0, "weight"), "weight2": (1, "weight"), "bias1": (0, "bias"), "bias2": (1, "bias")}
    return {
        name: [getattr(pair[index], kind) for pair in linears]
        for name, (index, kind) in names.items()
        if getattr(linears[0][index], kind) is not None
    }


def exchange(
    folder: str, groups: Any, ep: int, etp: int, gated: bool, bias: bool, singleton: bool
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Megatron writes and ours reads, and the other way round; keys and global shapes of both."""
    ep_place, etp_place = ((group.rank(), group.size()) for group in (groups.ep, groups.expt_tp))
    place = ExpertPlace(*ep_place, *etp_place, groups.expt_dp.rank())
    whole, axes = full_tensors(gated), {"weight1": 1, "weight2": 2}
    axes |= {"bias1": 1, "bias2": 1} if bias else {}
    ours = {}
    for name, axis in axes.items():
        halves = 2 if gated and name in ("weight1", "bias1") else 1
        ours[name] = cut(whole[name], axis, groups.ep, groups.expt_tp, halves=halves)
    theirs, case = _sequential_mlp(groups, ep, etp, gated, bias), f"{gated=}, {bias=}, {singleton=}"
    metadata = {"singleton_local_shards": singleton, "dp_cp_group": groups.dp_cp}
    whole_bias2 = whole["bias2"].chunk(ep)[place.ep_rank]

    def fill(scale: float) -> None:
        for name, tensors in _megatrons_tensors(theirs).items():
            for tensor, value in zip(tensors, whole_bias2 if name == "bias2" else ours[name], strict=True):
                tensor.data.copy_(scale * value)

    def shards(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return shard_experts(tensors, PREFIX, place, gated=gated, singleton_local_shards=singleton)

    fill(1.0)
    dist_checkpointing.save(theirs.sharded_state_dict(PREFIX, metadata=metadata), f"{folder}/theirs")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    read = dist_checkpointing.load(shards(zeros), f"{folder}/theirs")
    for name, tensor in ours.items():
        assert torch.equal(read[PREFIX + name], tensor), f"{name} as ours reads it, {case}"

    fill(0.0)
    dist_checkpointing.save(shards(ours), f"{folder}/ours")
    read = dist_checkpointing.load(theirs.sharded_state_dict(PREFIX, metadata=metadata), f"{folder}/ours")
    theirs.load_state_dict({key.removeprefix(PREFIX): value for key, value in read.items()}, strict=False)
    for name, tensors in _megatrons_tensors(theirs).items():
        expected = whole_bias2 if name == "bias2" else ours[name]
        assert torch.equal(torch.stack(tensors), expected), f"{name} as Megatron reads it, {case}"
    described = [dist_checkpointing.load_tensors_metadata(f"{folder}/{who}") for who in ("theirs", "ours")]
    return tuple(
        sorted((key, tuple(value.global_shape)) for key, value in tensors.items()) for tensors in described
    )  # type: ignore[return-value]


def exchange_all(folder: str, ep: int, etp: int) -> list[Any]:
    start_parallel(ep=ep, etp=etp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return [exchange(f"{folder}/{number}", groups, ep, etp, *case) for number, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int, int]], list[Any]]:
    """What `exchange` finds in every case, per rank of a layout."""

    @functools.cache
    def on_layout(layout: tuple[int, int, int]) -> list[Any]:
        folder = tmp_path_factory.mktemp("exchanged")
        for number, who in itertools.product(range(len(CASES)), ("theirs", "ours")):
            (folder / str(number) / who).mkdir(parents=True)
        num_ranks, ep, etp = layout
        return run_on_ranks(num_ranks, exchange_all, str(folder), ep, etp)

    return on_layout


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] * (layout[1:] == (1, 1))) for layout in LAYOUTS],
    ids=lambda layout: "ranks{}_ep{}_etp{}".format(*layout),
)
@pytest.mark.parametrize(("gated", "bias", "singleton"), CASES)
def test_megatrons_experts_and_ours_read_each_other(gated, bias, singleton, layout, exchanged):
    num_matrices = (1 + bias) * (2 + (gated and singleton))  # whose halves are apart if experts are
    for of_rank in exchanged(layout):
        theirs, ours = of_rank[CASES.index((gated, bias, singleton))]
        assert theirs == ours and len(ours) == num_matrices * (EXPERTS if singleton else 1)


@pytest.mark.parametrize(("gated", "singleton"), list(itertools.product((False, True), repeat=2)))
def test_shards_follow_the_key_that_the_optimizer_gives(gated, singleton):
    """Megatron's optimizer replaces key and data of a parameter's shards by those of its moments."""
    place = ExpertPlace(ep_rank=1, ep_size=2, etp_rank=0, etp_size=2, edp_rank=0)
    weight1 = random(EXPERTS // 2, FFN * (1 + gated) // 2, HIDDEN, seed=0).float()
    options = {"gated": gated, "singleton_local_shards": singleton}
    shard = shard_experts({"weight1": weight1}, PREFIX, place, **options)[f"{PREFIX}weight1"]
    moment = replace(shard, key=f"optimizer.state.exp_avg.{shard.key}", data=2 * weight1)
    built = moment.build() if isinstance(moment, ShardedTensorFactory) else [moment]
    assert all(piece.key.startswith(f"optimizer.state.exp_avg.{PREFIX}experts.") for piece in built)
    total = sum(piece.data.sum().item() for piece in built)
    assert total == pytest.approx(2 * weight1.sum().item(), rel=1e-4)
    if isinstance(moment, ShardedTensorFactory):
        assert torch.equal(moment.merge_fn([piece.data for piece in built]), 2 * weight1)
