"""Loads the weights of a checkpoint into a model without optimizer, in any layout. Called by every rank; each
reads its own pieces, one at a time. Without megatron-core, which would unpickle whatever the files contain.
"""

from pathlib import Path

import torch

from moe_exp.checkpoint.format.folders import Manifest, damages
from moe_exp.checkpoint.format.keys import (
    CheckpointKeys,
    check_tensors,
    model_state,
    sharded_tensors,
    zero_missing_biases,
)
from moe_exp.checkpoint.format.torch_dist import COMMON, CheckpointReader
from moe_exp.checkpoint.state import sharding_metadata
from moe_exp.config import Config
from moe_exp.engine.kernel_checks import check_run
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.engine.runtime import Runtime

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module


def check_files(folder: Path) -> None:
    """Compares the files with weights with the manifest; ValueError if one differs."""
    manifest = Manifest.read(folder)
    if manifest is None:
        return  # written by Megatron-LM
    reader, keys = CheckpointReader(folder), CheckpointKeys.read(folder)
    needed = {chunk.file for key in keys.tensors for chunk in reader.tensors[key].chunks}
    needed |= {COMMON, ".metadata"}
    for damage in damages(folder, {name: entry for name, entry in manifest.files.items() if name in needed}):
        raise ValueError(f"{damage}. Fix: use another checkpoint.")


def load_model(config: Config, rank: Runtime, folder: Path) -> GPTModel:
    """This rank's stage with the weights of `folder`, in eval mode, after the self-test of its kernels;
    ValueError if the weights do not fit.
    """
    settings = transformer_config(config)
    failures = check_run(config, rank)
    model = build_chunk(config, settings, rank, 0, initial_weights=False, kernel_failures=failures)
    model.to(rank.device)
    if config.dtype != "fp32":
        Float16Module(settings, model)  # converts to half precision in place, as for training
    read_weights(model, rank, folder)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def read_weights(model: GPTModel, rank: Runtime, folder: Path) -> None:
    """Fills the model in place, in its own dtype."""
    keys, reader = CheckpointKeys.read(folder), CheckpointReader(folder, keep_bytes=1)
    state = model_state(model, sharding_metadata(rank), keys)
    check_tensors(state, keys, folder)
    zero_missing_biases(model, keys)
    for shard in sharded_tensors(state):
        assert shard.data is not None
        # `data` is a view of the parameter, even if it consists of several shards
        shard.data.copy_(_read(reader, shard, folder).view(shard.data.shape))


def _read(reader: CheckpointReader, shard: ShardedTensor, folder: Path) -> torch.Tensor:
    stored, shape = reader.tensors[shard.key].shape, tuple(shard.global_shape)
    if stored != shape and not (shard.allow_shape_mismatch and stored[1:] == shape[1:]):
        raise ValueError(
            f"checkpoint={folder}: {shard.key} has the shape {stored}, the model {shape}. Fix: use another"
            " checkpoint."
        )
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return reader.read(shard.key, shard.global_offset, sizes)
