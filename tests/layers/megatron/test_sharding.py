"""Megatron's own SequentialMLP writes and reads the checkpoints that ours reads and writes."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.layers.megatron_pair import start_parallel
from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks

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


def part_of(tensors: dict[str, Tensor], gated: bool, place: Any) -> dict[str, Tensor]:
    """What a rank holds: by experts, then by the width of both halves of a gated projection."""
    parts = {}
    for name, axis in (("weight1", 1), ("weight2", 2), ("bias1", 1), ("bias2", 1)):
        local = tensors[name].chunk(place.ep_size)[place.ep_rank]
        halves = local.chunk(2, dim=axis) if gated and name in ("weight1", "bias1") else (local,)
        mine = [half.chunk(place.etp_size, dim=axis)[place.etp_rank] for half in halves]
        parts[name] = torch.cat(mine, dim=axis)
    return parts


def _sequential_mlp(groups: Any, ep: int, etp: int, gated: bool, bias: bool) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        gated_linear_unit=gated, add_bias_linear=False, bias_activation_fusion=False,
    )  # fmt: skip
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
    from moe_exp.layers.megatron.sharding import ExpertPlace, shard_experts

    from megatron.core import dist_checkpointing

    place = ExpertPlace(
        groups.ep.rank(),
        groups.ep.size(),
        groups.expt_tp.rank(),
        groups.expt_tp.size(),
        groups.expt_dp.rank(),
    )
    ours = part_of(full_tensors(gated), gated, place)
    if not bias:
        del ours["bias1"], ours["bias2"]
    theirs, case = _sequential_mlp(groups, ep, etp, gated, bias), f"{gated=}, {bias=}, {singleton=}"
    metadata = {"singleton_local_shards": singleton, "dp_cp_group": groups.dp_cp}
    whole_bias2 = full_tensors(gated)["bias2"].chunk(ep)[place.ep_rank]

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
    from megatron.core.process_groups_config import ProcessGroupCollection

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


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "ranks{}_ep{}_etp{}".format(*layout))
@pytest.mark.parametrize(("gated", "bias", "singleton"), CASES)
def test_megatrons_experts_and_ours_read_each_other(gated, bias, singleton, layout, exchanged):
    for of_rank in exchanged(layout):
        theirs, ours = of_rank[CASES.index((gated, bias, singleton))]
        assert theirs == ours
        key = "decoder.layers.1.mlp.experts.experts."
        width = FFN * (1 + gated)
        if not singleton:
            sizes = {"linear_fc1.weight": (width, HIDDEN), "linear_fc2.weight": (HIDDEN, FFN)}
            sizes |= {"linear_fc1.bias": (width,), "linear_fc2.bias": (HIDDEN,)} if bias else {}
            assert dict(ours) == {key + name: (EXPERTS, *shape) for name, shape in sizes.items()}
        else:
            halves = ("_w", "_v") if gated else ("",)
            expected_first = {(f"{key}3.linear_fc1.weight{half}", (FFN, HIDDEN)) for half in halves}
            assert expected_first <= set(ours)
            assert (f"{key}0.linear_fc2.weight", (HIDDEN, FFN)) in ours
            assert len(ours) == EXPERTS * (1 + bias) * (1 + len(halves))
            assert all(re.match(re.escape(key) + r"\d\.", name) for name, _ in ours)


@pytest.mark.parametrize(("gated", "singleton"), list(itertools.product((False, True), repeat=2)))
def test_shards_follow_the_key_that_the_optimizer_gives(gated, singleton):
    """Megatron's optimizer replaces key and data of a parameter's shards by those of its moments."""
    from dataclasses import replace

    from moe_exp.layers.megatron.sharding import ExpertPlace, shard_experts

    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    place = ExpertPlace(ep_rank=1, ep_size=2, etp_rank=0, etp_size=2, edp_rank=0)
    weight1 = part_of(full_tensors(gated), gated, place)["weight1"]
    options = {"gated": gated, "singleton_local_shards": singleton}
    shard = shard_experts({"weight1": weight1}, PREFIX, place, **options)[f"{PREFIX}weight1"]
    moment = replace(shard, key=f"optimizer.state.exp_avg.{shard.key}", data=2 * weight1)
    built = moment.build() if isinstance(moment, ShardedTensorFactory) else [moment]
    assert all(piece.key.startswith(f"optimizer.state.exp_avg.{PREFIX}experts.") for piece in built)
    total = sum(piece.data.sum().item() for piece in built)
    assert total == pytest.approx(2 * weight1.sum().item(), rel=1e-4)
    if isinstance(moment, ShardedTensorFactory):
        assert torch.equal(moment.merge_fn([piece.data for piece in built]), 2 * weight1)
