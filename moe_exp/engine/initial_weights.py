"""Draws initial weights from SEED and global parameter names: the same weights in every parallel layout."""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config import Config
from moe_exp.config.parameter_groups import factors, kind_of
from moe_exp.layers.spec import MegatronExperts

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention


@torch.no_grad()
def initialize_weights(chunk: GPTModel, config: Config) -> None:
    """Draws each weight from a generator seeded with SEED and the weight's name; keeps this rank's shard.

    The initial model therefore does not depend on TP, PP, VPP, EP or ETP. Weights are normal with standard
    deviation INIT_STD, or INIT_STD / sqrt(2 * NUM_LAYERS) for projections into the residual stream (Radford
    et al. 2019, GPT-2). PARAMETRIZATION=mup scales the standard deviation. Norm weights are 1, biases 0.
    """
    for name, module in chunk.named_modules():
        if isinstance(module, MegatronExperts):
            first, stride = module.ep_group.rank() * module.weight1.size(0), 2 if module.gated else 1
            for index, (weight1, weight2) in enumerate(zip(module.weight1, module.weight2, strict=True)):
                key, ranks = f"{global_name(chunk, name)}.{first + index}", module.etp_group
                draw_weight(weight1, f"{key}.weight1", config, dim=0, stride=stride, ranks=ranks)
                draw_weight(weight2, f"{key}.weight2", config, dim=1, stride=1, ranks=ranks)
        if getattr(module, "parallel_mode", "") is None:
            # Transformer Engine marks weights as split even in linear layers that every tensor parallel rank
            # has whole, such as the down projections of latent attention.
            for parameter in module.parameters(recurse=False):
                if hasattr(parameter, "partition_dim"):
                    parameter.tensor_model_parallel, parameter.partition_dim = False, -1
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name or parameter.dim() < 2:
            continue
        # with tied embeddings, the output layer on the last stage is a copy of the embedding
        tied = config.tie_embeddings and name == "output_layer.weight"
        key = "embedding.word_embeddings.weight" if tied else global_name(chunk, name)
        # By name, because Transformer Engine's layers do not record that a rank holds parts of gate and up.
        stride = 2 if config.gated and key.endswith("linear_fc1.weight") else 1
        dim = getattr(parameter, "partition_dim", -1)
        draw_weight(parameter, key, config, dim=dim, stride=stride, ranks=chunk.pg_collection.tp)
    for module in chunk.modules() if config.value_head_dim else ():
        if isinstance(module, SelfAttention):
            # Values of 0 and output weights of 0 give each other no gradient.
            groups, head = module.num_query_groups_per_partition, (-1, config.kv_channels)
            value = module.linear_qkv.weight.unflatten(0, (groups, *head))[:, -1]
            value[:, config.value_head_dim :] = 0
            module.linear_proj.weight.unflatten(1, head)[:, :, config.value_head_dim :] = 0


def draw_weight(
    weight: Tensor, key: str, config: Config, *, dim: int, stride: int, ranks: ProcessGroup
) -> None:
    """Draws the full weight named `key` and copies this rank's shard to `weight`.

    Cuts axis `dim` into stride * n blocks, where n is the size of `ranks`. Rank r keeps blocks r, r + n, ...
    (Megatron's gated projections have stride 2). If `dim` is -1, every rank keeps the full weight.
    """
    num_ranks = ranks.size() if dim >= 0 else 1
    std = config.init_std * factors(config, kind_of(key)).init
    if key.endswith(("linear_proj.weight", "linear_fc2.weight", "weight2", "fc2_latent_proj.weight")):
        std /= math.sqrt(2 * config.num_layers)  # into the residual stream
    shape = [size * num_ranks if index == dim else size for index, size in enumerate(weight.shape)]
    digest = hashlib.sha256(f"{config.seed}:{key}".encode()).digest()
    generator = torch.Generator(device=weight.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(shape, device=weight.device, dtype=torch.float32)
    if config.init_distribution == "truncated_normal":
        torch.nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator)
    else:
        full.normal_(0.0, std, generator=generator)
    if num_ranks > 1:
        full = torch.cat(full.chunk(stride * num_ranks, dim=dim)[ranks.rank() :: num_ranks], dim=dim)
    weight.copy_(full)


def global_name(chunk: GPTModel, name: str) -> str:
    """`name`, with the layer index counted over the whole model instead of over this pipeline stage."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)
