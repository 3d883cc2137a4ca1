"""Initializes an MoE model from a dense checkpoint so that both models compute the same function at step 0.

Plain (Komatsuzaki et al. 2023, Sparse Upcycling, arXiv:2212.05055): every expert is a copy of the dense MLP.
Granular (He et al. 2024, Upcycling Large Language Models into Mixture of Experts, arXiv:2410.07524): the
MLP's hidden units are split into G shards, and expert e is a copy of shard e mod G, with 1/G of the width.

Derivation: the dense MLP y = W2 act(W1 x) + b2 is a sum over hidden units, and therefore over shards: y =
sum_s W2_s h_s + b2 with h_s = act(W1_s x). With a gate, h_s = act(W1gate_s x) * (W1up_s x), and a shard has
the same rows of both halves. The G experts jG to jG + G - 1 form a virtual group: their router rows are
equal, and so are their scores. The top K = G*T experts are therefore T whole groups, which contain each shard
T times. The router weights of a token must add up to a constant c (for normalized weights, the scaling
factor). The router weights within a group are equal, so the router weights of each shard add up to c/G:

    sum_k w_k (W2'_s(k) h_s(k) + b2') = (c/G) sum_s W2'_s h_s + c b2'    hence W2' = (G/c) W2, b2' = b2 / c.

He et al. also reinitialize half of the router. Here, all router rows of a group start equal and diverge at
the first step, because their gradients differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.keys import CheckpointKeys, model_state
from moe_exp.checkpoint.format.naming import single_styles
from moe_exp.checkpoint.integrity import dense_source, find_source
from moe_exp.checkpoint.load import load_sharded
from moe_exp.checkpoint.state import Trained, parameters_in_sync, sharding_metadata, unwrapped
from moe_exp.config import Config
from moe_exp.engine.model import moe_layers
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.megatron.moe_parts import MegatronExperts

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

# Our experts' tensor names: (Megatron's name in the dense MLP, split axis, halves of that axis with a gate).
_DENSE = {
    "weight1": ("linear_fc1.weight", 0, 2),
    "weight2": ("linear_fc2.weight", 1, 1),
    "bias1": ("linear_fc1.bias", 0, 2),
    "bias2": ("linear_fc2.bias", 0, 1),
}


def experts_of(
    shards: Mapping[int, Mapping[str, Tensor]], experts: Sequence[int], *, granularity: int,
    weights_sum: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Builds the tensors of L `experts` (indices in the whole layer) from the dense MLP's numbered `shards`.
    `weights_sum` is c, the sum of a token's router weights. Returns `weight1` [L, W/G, D], `weight2` [L, D,
    F/G], and the biases if the MLP has biases.
    """
    # The second projection is linear, so applying the whole factor to it is exact for every activation.
    # He et al. scale both projections, which is exact only if the activation is homogeneous; a different
    # initial scale matters too little to Adam's relative steps to justify an inexact start.
    factors = {"weight2": granularity / weights_sum, "bias2": 1 / weights_sum}
    chosen = [shards[expert % granularity] for expert in experts]
    stacked = {name: torch.stack([shard[name] for shard in chosen]) for name in chosen[0]}
    return {name: tensor * factors.get(name, 1.0) for name, tensor in stacked.items()}


def virtual_group_router(weight_ED: Tensor, granularity: int) -> Tensor:
    """Router rows [E, D], with every group of G consecutive rows replaced by copies of its first row."""
    return weight_ED[::granularity].repeat_interleave(granularity, dim=0)


def upcycle(config: Config, runtime: Runtime, trained: Trained) -> str:
    """Replaces initial weights by those of the dense run UPCYCLE_FROM, saved under any layout. The optimizer
    starts from zero. The router keeps its initial weights, but rows in a virtual group become equal. All
    ranks must call this function. Returns a one-line summary; ValueError if the dense model does not match
    the MoE model.
    """
    folder = dense_source(config, partial(find_source, checksums=config.verify_checkpoint))
    keys = CheckpointKeys.read(folder)
    experts = {layer: module.experts for layer, module in moe_layers(list(trained.model))}
    with torch.no_grad(), parameters_in_sync(trained.model):
        requests = {str(layer): _requests(layer, module, config, keys) for layer, module in experts.items()}
        state: dict[str, Any] = {"experts": requests}
        # Both models share all weights except the MLPs of MoE layers, under the dense model's keys.
        for index, chunk in enumerate(map(unwrapped, trained.model)):
            layers = [i for i, layer in enumerate(chunk.decoder.layers) if layer.layer_number - 1 in experts]
            mlps = tuple(f"decoder.layers.{i}.mlp." for i in layers)
            whole = model_state(chunk, sharding_metadata(runtime), keys)
            outside = {name: value for name, value in whole.items() if not name.startswith(mlps)}
            state[f"model{index}"] = {name: _off_the_grid(value) for name, value in outside.items()}
        # Several experts and ranks request the same pieces, so the check for a single owner does not apply.
        loaded = load_sharded(state, folder, validate_access_integrity=False)
        for index, chunk in enumerate(map(unwrapped, trained.model)):
            # without Transformer Engine's state, which is not a tensor
            own = {name: one for name, one in chunk.state_dict().items() if isinstance(one, Tensor)}
            found = loaded[f"model{index}"]
            weights = {name: value.view_as(own[name]) for name, value in found.items() if name in own}
            chunk.load_state_dict(weights, strict=False)
        for layer, module in moe_layers(list(trained.model)):
            _fill(module.experts, loaded["experts"][str(layer)], config)
            module.router.weight.copy_(virtual_group_router(module.router.weight, config.upcycle_granularity))
        # The optimizer's main weights are still copies of the initial weights.
        trained.optimizer.reload_model_params()
    torch.distributed.barrier()
    granularity, copies = config.upcycle_granularity, config.num_experts // config.upcycle_granularity
    what = f"{config.num_experts} copies of the dense MLP"
    if granularity > 1:
        shards = f"{copies} copies of each of {granularity} shards of the dense MLP"
        what = f"{shards}, router in {copies} virtual groups"
    assert config.router_weights_sum is not None  # config/sections/backends.py
    what += f", second projection scaled by {granularity / config.router_weights_sum:g}"
    return f"upcycled from {folder}: {sum(config.moe_layers)} MoE layers with {what}"


def _off_the_grid(shard: Any) -> Any:
    """Makes the layer axis that Megatron prepends to a shard an ordinary axis of size 1."""
    # Megatron requests shards with a prepended layer axis as one grid over all layers. Here, only some
    # layers are needed, in other pieces.
    if isinstance(shard, ShardedTensorFactory):
        build, merge = shard.build_fn, shard.merge_fn
        dim = shard.data.dim()
        return replace(
            shard,
            build_fn=lambda *arguments: [_off_the_grid(piece) for piece in build(*arguments)],
            merge_fn=lambda pieces: merge([piece.flatten(0, piece.dim() - dim) for piece in pieces]),
        )
    if not isinstance(shard, ShardedTensor) or not shard.prepend_axis_num:
        return shard
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return replace(shard, data=shard.data.view(shape), local_shape=shape, prepend_axis_num=0)


def _local_experts(experts: MegatronExperts) -> range:
    num_local = experts.weight1.size(0)
    return range(experts.ep_group.rank() * num_local, (experts.ep_group.rank() + 1) * num_local)


def _requests(layer: int, experts: MegatronExperts, config: Config, keys: CheckpointKeys) -> dict[str, Any]:
    """Pieces of dense tensors for this rank's experts, by shard and name; gate and up are two pieces."""
    parameters = dict(experts.named_parameters(recurse=False))

    def pieces(name: str, shard: int) -> list[ShardedTensor]:
        key, axis, halves = _DENSE[name]
        like, halves = parameters[name][0], halves if experts.gated else 1
        rank, size = experts.etp_group.rank(), experts.etp_group.size()
        # Position within one half. The output bias is split only across expert-tensor-parallel ranks.
        count, index = config.upcycle_granularity * size, shard * size + rank
        if name == "bias2":
            count, index = size, rank
        single_layers, _ = single_styles(keys.tensors)
        before = () if single_layers else ((0, layer, config.num_layers),)
        full_key = f"decoder.layers.mlp.{key}" if before else f"decoder.layers.{layer}.mlp.{key}"
        shape = [length // halves if dim == axis else length for dim, length in enumerate(like.shape)]
        places = [(len(before) + axis, half * count + index, halves * count) for half in range(halves)]
        empty = partial(like.new_empty, [1] * len(before) + shape)
        return [ShardedTensor.from_rank_offsets(full_key, empty(), *before, place) for place in places]

    shards = sorted({expert % config.upcycle_granularity for expert in _local_experts(experts)})
    return {str(shard): {name: pieces(name, shard) for name in parameters} for shard in shards}


def _fill(experts: MegatronExperts, loaded: Mapping[str, Mapping[str, list[Tensor]]], config: Config) -> None:
    parameters = dict(experts.named_parameters(recurse=False))
    shards: dict[int, dict[str, Tensor]] = {}
    for shard, tensors in loaded.items():
        shards[int(shard)] = {}
        for name, pieces in tensors.items():  # with or without the layer axis
            like = parameters[name][0]
            joined = torch.cat(pieces, dim=_DENSE[name][1] - like.dim())
            shards[int(shard)][name] = joined.view_as(like)
    assert config.router_weights_sum is not None  # config/sections/backends.py
    c, granularity = config.router_weights_sum, config.upcycle_granularity
    filled = experts_of(shards, _local_experts(experts), granularity=granularity, weights_sum=c)
    for name, parameter in parameters.items():
        parameter.copy_(filled[name])
