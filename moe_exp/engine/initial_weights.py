"""Initial weights, drawn by SEED and global parameter name, so that they are the same in every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from moe_exp.config import Config
from moe_exp.config.parametrization import factors, kind_of
from moe_exp.layers.spec import MegatronExperts

from megatron.core.models.gpt import GPTModel


@torch.no_grad()
def initialize_weights(chunk: GPTModel, config: Config) -> None:
    """Draws every weight from its own generator, keyed by seed and global name, and keeps this rank's part.

    So the initial model does not depend on TP, PP, VPP, EP and ETP. Normal with standard deviation INIT_STD,
    or INIT_STD / sqrt(2 * NUM_LAYERS) for projections into the residual stream (Radford et al. 2019, GPT-2).
    Norms are 1, biases 0. PARAMETRIZATION=mup has factors of its own on top.
    """
    for name, module in chunk.named_modules():
        if isinstance(module, MegatronExperts):
            _initialize_experts(global_name(chunk, name), module, config)
        if getattr(module, "parallel_mode", "") is None:
            _mark_whole(module)
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name or parameter.dim() < 2:
            continue
        # If tied, the output layer of the last stage is a copy of the embedding.
        tied = config.tie_embeddings and name == "output_layer.weight"
        key = "embedding.word_embeddings.weight" if tied else global_name(chunk, name)
        dim = getattr(parameter, "partition_dim", -1)
        # By name: Transformer Engine's layers do not record that a rank holds parts of gate and up.
        stride = 2 if config.gated and key.endswith("linear_fc1.weight") else 1
        world = chunk.pg_collection.tp.size() if dim >= 0 else 1
        rank = chunk.pg_collection.tp.rank() if dim >= 0 else 0
        full = _draw(_full_shape(parameter, dim, world), key, _std(key, config), config, parameter)
        parameter.copy_(_part(full, dim, stride, rank, world))


def _mark_whole(linear: torch.nn.Module) -> None:
    """Says of a linear layer of Transformer Engine that every tensor parallel rank has all of it, such as the
    down projections of latent attention: it marks its weights as parts also if it does not split them.
    """
    for parameter in linear.parameters(recurse=False):
        if hasattr(parameter, "partition_dim"):
            parameter.tensor_model_parallel, parameter.partition_dim = False, -1  # type: ignore[attr-defined]


def _initialize_experts(name: str, experts: MegatronExperts, config: Config) -> None:
    rank, world = experts.etp_group.rank(), experts.etp_group.size()
    first = experts.ep_group.rank() * experts.weight1.size(0)
    for key, weight, dim, stride in (
        ("weight1", experts.weight1, 0, 2 if experts.gated else 1),
        ("weight2", experts.weight2, 1, 1),
    ):
        for index, expert in enumerate(weight):
            full_key = f"{name}.{first + index}.{key}"
            full = _draw(_full_shape(expert, dim, world), full_key, _std(full_key, config), config, weight)
            expert.copy_(_part(full, dim, stride, rank, world))


def _std(key: str, config: Config) -> float:
    std = config.init_std * factors(config, kind_of(key)).init
    to_residual = key.endswith(
        ("linear_proj.weight", "linear_fc2.weight", "weight2", "fc2_latent_proj.weight")
    )
    return std / math.sqrt(2 * config.num_layers) if to_residual else std


def _full_shape(local: Tensor, dim: int, world: int) -> list[int]:
    return [size * world if index == dim else size for index, size in enumerate(local.shape)]


def _draw(shape: list[int], key: str, std: float, config: Config, like: Tensor) -> Tensor:
    digest = hashlib.sha256(f"{config.seed}:{key}".encode()).digest()
    generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(shape, device=like.device, dtype=torch.float32)
    if config.init_distribution == "truncated_normal":
        return torch.nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator)
    return full.normal_(0.0, std, generator=generator)


def _part(full: Tensor, dim: int, stride: int, rank: int, world: int) -> Tensor:
    """Every `world`-th of stride*world blocks of `full`, as Megatron splits gated projections (stride 2)."""
    if world == 1:
        return full
    return torch.cat(full.chunk(stride * world, dim=dim)[rank::world], dim=dim)


def global_name(chunk: GPTModel, name: str) -> str:
    """`name` with the layer's index in the whole model instead of on this stage."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)
