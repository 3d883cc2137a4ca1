"""Save and resume: Megatron's distributed checkpoints (`torch_dist`) with Megatron's sharded keys.

A checkpoint is the folder `checkpoints/iter_0000300`. It is written under a temporary name and renamed once every rank is done;
only then does `latest_checkpointed_iteration.txt` name it. So what `latest` names is always complete.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_attr_wrapped_model

from moe_exp.checkpoint_keys import CheckpointKeys, check_tensors, model_state
from moe_exp.config import Config
from moe_exp.run_folder import LATEST, write_atomically
from moe_exp.runtime import Runtime

logger = logging.getLogger(__name__)

# fully_reshardable: one layout-independent tensor per parameter and optimizer moment.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, "singleton_local_shards": False}


@dataclass
class Progress:
    """How far training has come.

    Args:
        iteration: the last that was done.
        consumed_samples: the next sample's number, in the order that `sample_order` describes.
        skipped_iterations: iterations without an optimizer step.
        sample_order: `SampleOrder.facts`; None in checkpoints of versions that did not keep them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    sample_order: dict[str, Any] | None = None


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds beside `Progress`."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def iteration_folder(checkpoints: Path, iteration: int) -> Path:
    """Folder of one checkpoint, named as Megatron names it."""
    return checkpoints / f"iter_{iteration:07d}"


def latest_iteration(checkpoints: Path) -> int | None:
    """Iteration of the newest complete checkpoint, or None."""
    try:
        return int((checkpoints / LATEST).read_text())
    except FileNotFoundError:
        return None


def saved_progress(checkpoints: Path) -> Progress | None:
    """Of the newest checkpoint of a folder, without its tensors; None where there is none, or Megatron-LM wrote it."""
    iteration = latest_iteration(checkpoints)
    if iteration is None:
        return None
    common = dist_checkpointing.load_common_state_dict(str(iteration_folder(checkpoints, iteration)))
    return Progress(**common["progress"]) if "progress" in common else None


@contextlib.contextmanager
def parameters_in_sync(model: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, every parameter is whole: with overlapped gather, parts are otherwise fetched only as the next forward needs them."""
    overlapped = model[0].ddp_config.overlap_param_gather
    if overlapped:
        for chunk in model:
            chunk.disable_forward_pre_hook()
    yield
    if overlapped:
        for chunk in model:
            chunk.enable_forward_pre_hook()


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
        state = _state(config, runtime, trained, progress)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1 if runtime.device.type == "cpu" else 2)
        # By this description Megatron-LM asks a checkpoint for the keys that it has.
        dist_checkpointing.save(state, str(partial), sharded_strategy=strategy, content_metadata=_FORMAT)
    if runtime.is_first:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_atomically(checkpoints / LATEST, str(progress.iteration))
    torch.distributed.barrier()
    return time.monotonic() - start


def load(config: Config, runtime: Runtime, checkpoints: Path, trained: Trained) -> Progress:
    """Loads the newest checkpoint of a folder into `trained`. Called by every rank.

    Of a checkpoint that Megatron-LM wrote, it takes the weights alone and starts at iteration 0.

    Raises:
        ValueError: when the folder has none, or its parameters are not those of the model.
    """
    iteration = latest_iteration(checkpoints)
    if iteration is None:
        raise ValueError(f"LOAD_DIR={checkpoints}: has no {LATEST}. Fix: name the checkpoints folder of a run.")
    folder = iteration_folder(checkpoints, iteration)
    common = dist_checkpointing.load_common_state_dict(str(folder))
    if "progress" not in common:
        load_weights(runtime, folder, trained)
        return Progress()
    keys = CheckpointKeys.read(folder)
    state = _state(config, runtime, trained, Progress(), keys)
    check_tensors(_chunks_of(state), keys, folder)
    if _layout(config, runtime) != common["layout"]:
        # Random streams belong to tensor and pipeline ranks of one kind of device; with others they start from the seed.
        del state["rng_state"]
    with parameters_in_sync(trained.model):
        loaded = dist_checkpointing.load(state, str(folder))
        for index, chunk in enumerate(trained.model):
            _load_chunk(chunk, loaded[f"model{index}"])
        trained.optimizer.load_state_dict(loaded["optimizer"])
    trained.scheduler.load_state_dict(loaded["scheduler"])
    if "rng_state" in loaded:
        _set_rng_state(loaded["rng_state"][0])
    torch.distributed.barrier()
    return Progress(**loaded["progress"])


def load_weights(runtime: Runtime, folder: Path, trained: Trained) -> None:
    """Loads the weights of one iteration's folder, of this package or of Megatron-LM, and nothing else. Called by every rank.

    Raises:
        ValueError: when its parameters are not those of the model.
    """
    keys = CheckpointKeys.read(folder)
    state = _model_state(runtime, trained.model, keys)
    check_tensors(state, keys, folder)
    with parameters_in_sync(trained.model):
        loaded = dist_checkpointing.load(state, str(folder))
        for index, chunk in enumerate(trained.model):
            _load_chunk(chunk, loaded[f"model{index}"])
        # The optimizer has copies of its own of the weights that were there before.
        trained.optimizer.reload_model_params()


def _load_chunk(chunk: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Loads the parameters of one model chunk; strict, but for what Transformer Engine keeps in `_extra_state`."""
    differing = sorted(name for name in set(unwrapped(chunk).state_dict()) ^ set(state) if not name.endswith("_extra_state"))
    if differing:
        names = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise ValueError(f"checkpoint: it and the model disagree on the parameters {names}. Fix: resume with the same model.")
    unwrapped(chunk).load_state_dict(state, strict=False)


def _state(config: Config, runtime: Runtime, trained: Trained, progress: Progress, keys: CheckpointKeys | None = None) -> dict[str, Any]:
    """What is saved; with `keys`, what is asked of the checkpoint that has them."""
    metadata = sharding_metadata(runtime)
    chunks = _model_state(runtime, trained.model, keys)
    optimizer_model_state = chunks if len(chunks) > 1 else chunks["model0"]
    return {
        **chunks,
        "optimizer": trained.optimizer.sharded_state_dict(optimizer_model_state, is_loading=keys is not None, metadata=metadata),
        "scheduler": trained.scheduler.state_dict(),
        "rng_state": _rng_state(runtime),
        "progress": vars(progress).copy(),
        "config": config.model_dump(),
        "layout": _layout(config, runtime),
    }


def sharding_metadata(runtime: Runtime) -> dict[str, Any]:
    """What Megatron's `sharded_state_dict` takes as metadata."""
    return {**_FORMAT, "dp_cp_group": runtime.groups.dp_cp}


def _model_state(runtime: Runtime, model: list[DistributedDataParallel], keys: CheckpointKeys | None) -> dict[str, Any]:
    metadata = sharding_metadata(runtime)
    # Of the model inside: the data parallel wrapper would put `module.` before Megatron's keys.
    return {f"model{index}": model_state(unwrapped(chunk), metadata, keys) for index, chunk in enumerate(model)}


def _chunks_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("model")}


def unwrapped(chunk: DistributedDataParallel) -> Any:
    """The GPTModel inside the wrappers for data parallelism and half precision."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def _layout(config: Config, runtime: Runtime) -> dict[str, Any]:
    return {"tp": config.tp, "pp": config.pp, "device": runtime.device.type}


def _rng_state(runtime: Runtime) -> ShardedObject:
    state = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if runtime.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    groups = runtime.groups
    shape, place = (groups.pp.size(), groups.tp.size()), (groups.pp.rank(), groups.tp.rank())
    return ShardedObject("rng_state", [state], shape, place, replica_id=groups.dp_cp.rank())


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
