"""Saving. Called by every rank."""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import shutil
import time
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from moe_exp.checkpoint.folders import iteration_folder
from moe_exp.checkpoint.state import CONTENT, Progress, Trained, parameters_in_sync, whole_state
from moe_exp.config import Config
from moe_exp.files import write_atomically
from moe_exp.run_folder import LATEST
from moe_exp.runtime import Runtime


def save(config: Config, runtime: Runtime, checkpoints: Path, trained: Trained, progress: Progress) -> float:
    """Writes a checkpoint and publishes it; returns the seconds it took. Called by every rank."""
    start = time.monotonic()
    final = iteration_folder(checkpoints, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    if runtime.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    with parameters_in_sync(trained.model):
        state = whole_state(config, runtime, trained, progress)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1 if runtime.device.type == "cpu" else 2)
        # By this description Megatron-LM asks a checkpoint for the keys that it has.
        dist_checkpointing.save(state, str(partial), sharded_strategy=strategy, content_metadata=CONTENT)
    if runtime.is_first:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_atomically(checkpoints / LATEST, str(progress.iteration))
    torch.distributed.barrier()
    return time.monotonic() - start
