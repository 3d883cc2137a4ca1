"""Loads this package's checkpoints, and the weights in Megatron-LM's. Called by every rank."""

import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.fingerprints import Fingerprint, TensorPiece, fingerprints_of, shown
from moe_exp.checkpoint.format.folders import first_few, iteration_of, iterations, one_checkpoint, unusable
from moe_exp.checkpoint.format.keys import (
    ROUTER_BIAS,
    CheckpointKeys,
    check_tensors,
    sharded_tensors,
    zero_missing_biases,
)
from moe_exp.checkpoint.format.settings import refuse_other_checkpoint
from moe_exp.checkpoint.format.torch_dist import read_common, read_metadata
from moe_exp.checkpoint.optimizer_state import OptimizerRequest, Owned, owned_state, shards_of
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
from moe_exp.config import Config, ConfigError
from moe_exp.config.choices import LOSS_STATE
from moe_exp.config.model_changes import optimizer_change
from moe_exp.engine.averaged_weights import restart_average
from moe_exp.engine.optimizer_classes import MOMENTS
from moe_exp.engine.runtime import Runtime, from_first_rank, on_every_rank
from moe_exp.host.exit_codes import FAILED
from moe_exp.host.megatron_versions import LOAD_WARNINGS
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.runs.run_folder import LATEST

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

logger = logging.getLogger(__name__)

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class RestoreError(ConfigError):
    """Loaded values differ from the saved ones, perhaps by a fault of a node. `names`: of the tensors."""

    exit_code = FAILED  # so that a chain of jobs tries it again

    def __init__(self, folder: Path, names: Sequence[str], num_compared: int):
        self.names, self._arguments = list(names), (folder, list(names), num_compared)
        rule = f"{len(names)} of {num_compared} tensors are not what was saved, by their fingerprints"
        rule += f": {first_few([shown(name) for name in names])}"
        fix = "start again, on other nodes if it comes again"
        if older := [one for one in iterations(folder.parent) if one < iteration_of(folder)]:
            fix += f"; to go back to an older checkpoint write {older[-1]} into {folder.parent / LATEST}"
        fix += "; FINGERPRINTS=false continues anyway"
        super().__init__([f"checkpoint={folder}: {rule}. Nothing was changed in it. Fix: {fix}."])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def saved_progress(path: Path) -> Progress | None:
    """Progress of a checkpoint (`path` as in `load`), without its tensors; None if Megatron-LM wrote it."""
    common = read_common(one_checkpoint(path))
    return Progress(**common["progress"]) if "progress" in common else None


def load(config: Config, runtime: Runtime, path: Path, trained: Trained) -> Progress:
    """Loads the checkpoint that `path` means into `trained`: one iteration's folder, or the newest of a
    folder; of one that Megatron-LM wrote the weights alone, at iteration 0. Called by every rank.

    ConfigError, before anything is loaded, if it is of another model or optimizer (`model_changes`);
    RestoreError if memory differs from what was saved (FINGERPRINTS); ValueError if the folder has none, or
    its parameters are not those of the model.
    """
    folder = one_checkpoint(path)
    common = compare_model(config, folder)
    if "progress" not in common:  # weights alone
        load_weights(runtime, folder, trained)
        if config.fingerprints:
            compare_restored(runtime, folder, trained, None)
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
    return resumed_progress(config, common, has_average=request.has_average)


def resumed_progress(config: Config, common: dict[str, Any], *, has_average: bool) -> Progress:
    """Progress of a run with `config` that continues from a checkpoint."""
    progress = Progress(**common["progress"])
    # Older versions counted no tokens: they follow from the SEQ_LEN of that run, not of this one.
    if progress.consumed_samples and not progress.consumed_tokens:
        progress.consumed_tokens = progress.consumed_samples * common["config"]["seq_len"]
        progress.consumed_flops = flops_per_iteration(config, progress.consumed_samples)
    if config.ema_decay and not has_average:
        logger.info("EMA_DECAY=%g: the average starts with the weights of the checkpoint", config.ema_decay)
        progress.num_averaged = 1
    elif has_average and not config.ema_decay:
        logger.info("EMA_DECAY=0: the checkpoint's average of the weights is dropped")
        progress.num_averaged = 0
    return progress


def compare_model(config: Config, folder: Path) -> dict[str, Any]:
    """Returns what is not sharded; ConfigError if an iteration's folder is of another model than `config`."""
    common = read_common(folder)
    if "config" in common:
        refuse_other_checkpoint(config, folder, common)
    return common


def load_weights(runtime: Runtime, folder: Path, trained: Trained) -> None:
    """Loads only the weights of an iteration's folder; ValueError if they are not those of the model."""
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
    # Transformer Engine's state, and what `check_tensors` allows to be missing
    optional = ("_extra_state", ROUTER_BIAS, *LOSS_STATE)
    for index, chunk in enumerate(map(unwrapped, trained.model)):
        zero_missing_biases(chunk, keys)
        weights = loaded[f"model{index}"]
        on_one_side = set(chunk.state_dict()) ^ set(weights)
        if differing := sorted(name for name in on_one_side if not name.endswith(optional)):
            rule = f"it and the model disagree on the parameters {first_few(differing)}"
            raise unusable("checkpoint", rule, "resume with the same model")
        chunk.load_state_dict(weights, strict=False)
    return loaded


def load_sharded(
    state: dict[str, Any], folder: Path, *, validate_access_integrity: bool = True
) -> dict[str, Any]:
    """The steps of Megatron's `dist_checkpointing.load`, which unpickles `.metadata`, and objects with
    `weights_only=False`, without running anything of a file. Called by every rank; `state` is used up. With
    `validate_access_integrity` every value has to have one rank that owns it. Raises a ValueError on every
    rank, if `.metadata` or an object holds more than the format's classes, tensors and plain values, or a
    file or a tensor is not what was asked for.
    """
    # Here it runs nothing; Megatron reads it again.
    on_every_rank(lambda: read_metadata(folder))
    loaded = on_every_rank(lambda: read_common(folder))
    force_all_tensors_to_non_fp8(state)
    sharded, not_sharded, factories = load_preprocess(state)
    merge(loaded, not_sharded)
    sharded, _ = extract_sharded_base(sharded)
    if validate_access_integrity:
        validate_sharding_integrity(determine_global_metadata(sharded)[1])

    def read() -> dict[str, Any]:
        # Every `torch.load` of this process is `weights_only` until the end, whatever its caller says.
        before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
        os.environ[_FORCE] = "1"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", LOAD_WARNINGS, UserWarning)
                return dict(TorchDistLoadShardedStrategy().load(sharded, folder))
        except (CheckpointException, pickle.UnpicklingError) as error:
            # The first is no Exception but a BaseException, with what went wrong by rank.
            cause: BaseException = error
            if isinstance(error, CheckpointException):
                cause = next(iter(error.failures.values()))[0]
            reason = " ".join(str(cause).split())[:200]
            if isinstance(cause, pickle.UnpicklingError):
                reason = "an object in it is no plain value, loading it would run code"
            raise unusable(f"checkpoint={folder}", f"cannot be used ({reason})") from None
        finally:
            del os.environ[_FORCE]
            os.environ.update({name: value for name, value in before.items() if value is not None})

    # From Megatron 0.19 on its ranks read by themselves: where the files of one are damaged, the others would
    # continue without it.
    merge(loaded, on_every_rank(read))
    return dict(apply_factory_merges(loaded, factories))


def compare_restored(
    runtime: Runtime, folder: Path, trained: Trained, converted: Sequence[Owned] | None
) -> int:
    """Compares the model and the optimizer's state (not if `converted` is None) with the fingerprints of the
    iteration's folder that they were loaded from, by one reduction. Returns the number of tensors compared;
    raises a RestoreError on every rank if one differs.
    """
    # The checksums of the files say that they are what was written; fingerprints, that they were written
    # from, and read into, the right places: under whatever layout, no value has changed on its way through
    # the files.
    saved = from_first_rank(lambda: fingerprints.read(folder))
    if saved is None:
        of = "as those of Megatron-LM and of older versions: what was loaded is not compared"
        logger.info("%s has no fingerprints, %s", folder, of)
        return 0
    with parameters_in_sync(trained.model):
        mine = fingerprints_of(_pieces(runtime, trained, converted))
    # Weights of another type than the checkpoint's are left out: they follow from the fp32 main weights,
    # which are compared. Each total becomes a signed number, as torch sums no unsigned ones.
    table = torch.zeros(2, len(saved), dtype=torch.int64)
    for place, (name, one) in enumerate(saved.items()):
        if name in mine and mine[name].dtype == one.dtype:
            total = mine[name].total
            table[0, place] = mine[name].num_values
            table[1, place] = total - 2**64 if total >= 2**63 else total
    table = table.to(runtime.device)
    torch.distributed.all_reduce(table)
    found = {}
    for (name, one), count, total in zip(saved.items(), *table.tolist(), strict=True):
        if count:
            found[name] = Fingerprint(one.dtype, count, total % 2**64)
    names = [name for name, one in found.items() if one != saved[name]]
    if names:
        raise RestoreError(folder, names, len(found))
    logger.info("what was loaded is what was saved: %d tensors have the same fingerprints", len(found))
    return len(found)


def _pieces(runtime: Runtime, trained: Trained, converted: Sequence[Owned] | None) -> Iterator[TensorPiece]:
    """All values of model and optimizer, each once over all ranks, under the keys of a save."""
    weights = weights_state(runtime, trained.model, None)
    shards = sharded_tensors(weights)
    if converted is not None:
        # Moments that the optimizer keeps in 8 bits or bf16 are compared as they were read: kept, they are
        # rounded again, and blocks of values that share a scale have other borders under another layout.
        exact = []
        for owned in owned_state(trained.optimizer):
            moments = MOMENTS if owned.is_converted else ()
            others = {name: value for name, value in owned.values.items() if name not in moments}
            exact.append(replace(owned, values=others))
        shards = chain(shards, shards_of([*exact, *converted], weights))
    for shard in shards:
        if is_main_replica(shard.replica_id):
            yield shard.key, shard.data, shard.global_offset
