"""Initializes an MoE model from a dense checkpoint so that both models compute the same function at step 0.

Plain (Komatsuzaki et al. 2023, Sparse Upcycling, arXiv:2212.05055): every expert is a copy of the dense MLP.
Granular (He et al. 2024, Upcycling Large Language Models into Mixture of Experts, arXiv:2410.07524): the
MLP's hidden units are split into G shards, each with 1/G of the width. Expert e is a copy of shard e mod G.

Derivation: the dense MLP y = W2 act(W1 x) + b2 is a sum over hidden units, and therefore over shards: y =
sum_s W2_s h_s + b2 with h_s = act(W1_s x). With a gate, h_s = act(W1gate_s x) * (W1up_s x), and a shard takes
the same rows of W1gate and W1up. The G experts jG to jG + G - 1 form a virtual group: their router rows are
equal, and so are their scores. The top K = G*T experts are therefore T whole groups. Each group contains each
shard once. A token's router weights must add up to a constant c. If the weights are normalized, c is the
scaling factor. The router weights within a group are equal, so those of each shard add up to c/G:

    sum_k w_k (W2'_s(k) h_s(k) + b2') = (c/G) sum_s W2'_s h_s + c b2'

The sum equals y if W2' = (G/c) W2 and b2' = b2 / c.
He et al. also reinitialize half of the router. Here, all router rows of a group start equal and diverge at
the first step, because their gradients differ.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_exp.checkpoint.format.keys import model_state, read_tensors
from moe_exp.checkpoint.format.naming import KEEP_BYTES, LogicalTensor, logical_tensors
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.integrity import dense_source, find_source
from moe_exp.checkpoint.state import Trained, parameters_in_sync, sharding_metadata, unwrapped
from moe_exp.config import Config
from moe_exp.engine.model import moe_layers
from moe_exp.engine.runtime import Runtime, on_every_rank
from moe_exp.layers.megatron.moe_parts import MegatronExperts
from moe_exp.layers.megatron.sharding import TENSORS


def experts_of(
    shards: Mapping[int, Mapping[str, Tensor]], experts: Sequence[int], *, granularity: int,
    weights_sum: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Builds the tensors of L experts from the dense MLP's numbered `shards`. `experts` contains the
    indices of these L experts in the whole layer. `weights_sum`: the sum of a token's router weights.
    Returns `weight1` [L, W/G, D], `weight2` [L, D, F/G], and the biases if the MLP has biases. D is the
    hidden size, F is the dense MLP's width, W is F (2F with a gate), and G is `granularity`.
    """
    # The second projection is linear, so applying the whole factor to it is exact for every activation.
    # He et al. scale both projections, which is exact only if the activation is homogeneous; a different
    # initial scale matters too little to Adam's relative steps to justify an inexact start.
    factors = {"weight2": granularity / weights_sum, "bias2": 1 / weights_sum}
    chosen = [shards[expert % granularity] for expert in experts]
    stacked = {name: torch.stack([shard[name] for shard in chosen]) for name in chosen[0]}
    return {name: tensor * factors.get(name, 1.0) for name, tensor in stacked.items()}


def virtual_group_router(weight_ED: Tensor, granularity: int) -> Tensor:
    """Returns router weights [E, D]: each row equals the first row of its group of `granularity` rows."""
    return weight_ED[::granularity].repeat_interleave(granularity, dim=0)


def upcycle(config: Config, runtime: Runtime, trained: Trained) -> str:
    """Replaces the initial weights with the weights of the dense checkpoint UPCYCLE_FROM. This checkpoint may
    have any parallel layout. No optimizer state is loaded. The router keeps its initial weights, but the
    experts of a virtual group get equal router rows. All ranks must call this function. Returns a one-line
    summary. Raises ValueError if the dense model does not match the MoE model.
    """
    folder = dense_source(config, partial(find_source, checksums=config.verify_checkpoint))
    experts = {layer: module.experts for layer, module in moe_layers(list(trained.model))}

    def read() -> None:
        reader = CheckpointReader(folder, keep_bytes=KEEP_BYTES)
        # Both models share all weights except the MLPs of MoE layers, under the dense model's keys.
        for chunk in map(unwrapped, trained.model):
            layers = [i for i, layer in enumerate(chunk.decoder.layers) if layer.layer_number - 1 in experts]
            mlps = tuple(f"decoder.layers.{i}.mlp." for i in layers)
            whole = model_state(chunk, sharding_metadata(runtime), reader)
            read_tensors([value for name, value in whole.items() if not name.startswith(mlps)], reader)
        dense = logical_tensors(reader)
        for layer, module in moe_layers(list(trained.model)):
            _fill(layer, module.experts, dense, config)
            module.router.weight.copy_(virtual_group_router(module.router.weight, config.upcycle_granularity))

    with torch.no_grad(), parameters_in_sync(trained.model):
        on_every_rank(read)
        # The optimizer's main weights are still copies of the initial weights.
        trained.optimizer.reload_model_params()
    torch.distributed.barrier()
    granularity, copies = config.upcycle_granularity, config.num_experts // config.upcycle_granularity
    what = f"{config.num_experts} copies of the dense MLP"
    if granularity > 1:
        shards = f"{copies} copies of each of {granularity} shards of the dense MLP"
        what = f"{shards}, router in {copies} virtual groups"
    assert config.router_weights_sum is not None  # config/sections/moe.py
    what += f", second projection scaled by {granularity / config.router_weights_sum:g}"
    return f"upcycled from {folder}: {sum(config.moe_layers)} MoE layers with {what}"


def _fill(layer: int, experts: MegatronExperts, dense: Mapping[str, LogicalTensor], config: Config) -> None:
    """Fills this rank's experts with shards of the layer's dense MLP."""
    parameters = dict(experts.named_parameters(recurse=False))
    num_local = experts.weight1.size(0)
    local = range(experts.ep_group.rank() * num_local, (experts.ep_group.rank() + 1) * num_local)
    rank, size, granularity = experts.etp_group.rank(), experts.etp_group.size(), config.upcycle_granularity
    shards: dict[int, dict[str, Tensor]] = {expert % granularity: {} for expert in local}
    for name, parameter in parameters.items():
        key, split_axis, has_gate = TENSORS[name]
        axis = split_axis - 1  # the dense MLP has no expert axis
        whole = dense[f"decoder.layers.{layer}.mlp.{key}"].read().to(parameter.dtype)
        for shard, tensors in shards.items():
            # Position within one half. The output bias is split only across expert-tensor-parallel ranks.
            count, index = (size, rank) if name == "bias2" else (granularity * size, shard * size + rank)
            parts = whole.chunk(2 if has_gate and experts.gated else 1, axis)
            tensors[name] = torch.cat([part.chunk(count, axis)[index] for part in parts], axis)
    assert config.router_weights_sum is not None  # config/sections/moe.py
    filled = experts_of(shards, local, granularity=granularity, weights_sum=config.router_weights_sum)
    for name, parameter in parameters.items():
        parameter.copy_(filled[name])
