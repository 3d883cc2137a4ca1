"""Loads this package's checkpoints, and the weights in Megatron-LM's. Called by every rank."""

import logging
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.keys import ROUTER_BIAS, CheckpointKeys, check_tensors, zero_missing_biases
from moe_exp.checkpoint.format.settings import refuse_other_checkpoint
from moe_exp.checkpoint.format.sharded_load import load_sharded
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.optimizer_state import OptimizerRequest
from moe_exp.checkpoint.restored import compare_restored
from moe_exp.checkpoint.state import (
    Progress,
    Trained,
    layout,
    parameters_in_sync,
    rng_state,
    set_rng_state,
    unwrapped,
    weights_state,
)
from moe_exp.config import Config
from moe_exp.config.choices import LOSS_STATE
from moe_exp.config.model_changes import optimizer_change
from moe_exp.engine.averaged_weights import restart_average
from moe_exp.engine.runtime import Runtime
from moe_exp.planner.costs.flops import flops_per_iteration

from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


def saved_progress(path: Path) -> Progress | None:
    """Progress of a checkpoint, read without its tensors; None if Megatron-LM wrote it. `path` as in
    `load`.
    """
    common = read_common(one_checkpoint(path))
    return Progress(**common["progress"]) if "progress" in common else None


def load(config: Config, runtime: Runtime, path: Path, trained: Trained) -> Progress:
    """Loads the checkpoint that `path` means into `trained`: one iteration's folder, or the newest of a
    folder. Called by every rank.

    Of a checkpoint that Megatron-LM wrote, it takes the weights alone and starts at iteration 0.

    Raises:
        ConfigError: when it is of another model or optimizer, see `model_changes`; nothing is loaded then.
        RestoreError: if memory differs from what was saved (FINGERPRINTS).
        ValueError: when the folder has none, or its parameters are not those of the model.
    """
    folder = one_checkpoint(path)
    common = compare_model(config, folder)
    if "progress" not in common:
        load_weights(runtime, folder, trained)
        if config.fingerprints:
            compare_restored(runtime, folder, trained, optimizer=False)
        return Progress(num_averaged=int(config.ema_decay > 0))
    keys = CheckpointKeys.read(folder)
    state = weights_state(runtime, trained.model, keys)
    has_moments = optimizer_change(config, common["config"], str(folder)) is None
    request = OptimizerRequest(trained.optimizer, state, keys, with_moments=has_moments)
    state["optimizer_shards"] = request.shards
    check_tensors(state, keys, folder)
    if layout(config, runtime) == common["layout"]:
        # Random streams belong to tensor and pipeline ranks of one kind of device; with others they start
        # from the seed.
        state["rng_state"] = rng_state(runtime)
    with parameters_in_sync(trained.model):
        loaded = _load_model(state, folder, trained, keys)
        request.finish(common["optimizer"], trained.model)
    if config.fingerprints:
        compare_restored(runtime, folder, trained, request.converted)
    trained.scheduler.load_state_dict(common["scheduler"])
    if "rng_state" in state:
        set_rng_state(loaded["rng_state"][0])
    torch.distributed.barrier()
    progress = _progress(config, common)
    progress.num_averaged = _num_averaged(config, progress, has_average=request.has_average)
    return progress


def _num_averaged(config: Config, progress: Progress, *, has_average: bool) -> int:
    """Updates of the average of the weights; of one that starts here the weights count as the first."""
    if config.ema_decay and not has_average:
        logger.info("EMA_DECAY=%g: the average starts with the weights of the checkpoint", config.ema_decay)
        return 1
    if has_average and not config.ema_decay:
        logger.info("EMA_DECAY=0: the checkpoint's average of the weights is dropped")
        return 0
    return progress.num_averaged


def _progress(config: Config, common: dict[str, Any]) -> Progress:
    progress = Progress(**common["progress"])
    if progress.consumed_samples and not progress.consumed_tokens:  # of a version that did not count them
        progress.consumed_tokens = progress.consumed_samples * common["config"]["seq_len"]
        progress.consumed_flops = flops_per_iteration(config, progress.consumed_samples)
    return progress


def compare_model(config: Config, folder: Path) -> dict[str, Any]:
    """Raises a ConfigError if an iteration's folder is of another model or optimizer than `config`, before
    that is built; of one that Megatron-LM wrote nothing is known but its tensors. Returns what is not
    sharded.
    """
    common = read_common(folder)
    if "config" in common:
        refuse_other_checkpoint(config, folder, common)
    return common


def load_weights(runtime: Runtime, folder: Path, trained: Trained) -> None:
    """Loads the weights of an iteration's folder, of this package or Megatron-LM, and nothing else. Called by
    every rank. Raises a ValueError if its parameters are not those of the model.
    """
    keys = CheckpointKeys.read(folder)
    state = weights_state(runtime, trained.model, keys)
    check_tensors(state, keys, folder)
    with parameters_in_sync(trained.model):
        _load_model(state, folder, trained, keys)
        # The optimizer has copies of its own of the weights that were there before.
        trained.optimizer.reload_model_params()
        restart_average(trained.optimizer)


def _load_model(
    state: dict[str, Any], folder: Path, trained: Trained, keys: CheckpointKeys
) -> dict[str, Any]:
    loaded = load_sharded(state, folder)
    for index, chunk in enumerate(trained.model):
        zero_missing_biases(unwrapped(chunk), keys)
        _load_chunk(chunk, loaded[f"model{index}"])
    return loaded


def _load_chunk(chunk: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Loads a model chunk's parameters; strict, but for Transformer Engine's `_extra_state`, and what
    `check_tensors` allows to be missing.
    """
    on_one_side = set(unwrapped(chunk).state_dict()) ^ set(state)
    differing = sorted(
        name for name in on_one_side if not name.endswith(("_extra_state", ROUTER_BIAS, *LOSS_STATE))
    )
    if differing:
        names = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise ValueError(
            f"checkpoint: it and the model disagree on the parameters {names}. Fix: resume with the same"
            " model."
        )
    unwrapped(chunk).load_state_dict(state, strict=False)
