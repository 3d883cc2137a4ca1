"""The weights of a checkpoint in a model without optimizer, under whatever layout. Called by every rank.

Read by `checkpoint.torch_dist` and not by megatron-core, which would unpickle what the files say: every rank
reads the pieces that it holds, and in memory are its weights and one stored piece.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import Manifest, damages
from moe_exp.checkpoint.format.keys import CheckpointKeys, check_tensors, model_state
from moe_exp.checkpoint.format.torch_dist import COMMON, CheckpointReader
from moe_exp.checkpoint.state import sharding_metadata
from moe_exp.config import Config
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.engine.runtime import Runtime

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module


def check_files(folder: Path) -> None:
    """Sizes and checksums of the files that a model is read from, those of the optimizer alone left out.

    Raises:
        ValueError: with the first file that is not what it was when it was written.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        return  # one that Megatron-LM wrote
    reader, keys = CheckpointReader(folder), CheckpointKeys.read(folder)
    needed = {COMMON, ".metadata"} | {
        chunk.file for key in keys.tensors for chunk in reader.tensors[key].chunks
    }
    for damage in damages(folder, {name: entry for name, entry in manifest.files.items() if name in needed}):
        raise ValueError(f"{damage}. Fix: use another checkpoint.")


def load_model(config: Config, rank: Runtime, folder: Path) -> GPTModel:
    """This rank's stage of the model with the weights of `folder`, for evaluation alone.

    Raises:
        ValueError: when the tensors are not those of the model, or a file is damaged.
    """
    settings = transformer_config(config)
    model = build_chunk(config, settings, rank, 0, initial_weights=False).to(rank.device)
    if config.dtype != "fp32":
        Float16Module(settings, model)  # turns it into half precision in place, as for training
    read_weights(model, rank, folder)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def read_weights(model: GPTModel, rank: Runtime, folder: Path) -> None:
    """Fills the model in place, in its own type."""
    keys, reader = CheckpointKeys.read(folder), CheckpointReader(folder)
    state = model_state(model, sharding_metadata(rank), keys)
    check_tensors(state, keys, folder)
    for value in state.values():
        for shard in _shards(value):
            assert shard.data is not None
            # `data` is a view of the parameter, also where one parameter is several shards.
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


def _shards(value: Any) -> Iterator[ShardedTensor]:
    if isinstance(value, ShardedTensorFactory):
        value = value.build()
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _shards(part)
