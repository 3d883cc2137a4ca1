"""Loads this package's checkpoints, and the weights in Megatron-LM's. Called by every rank.

With FINGERPRINTS, what is in the model and the optimizer after a load is compared with what was there before
the save. The checksums of the files say that they are what was written. Fingerprints say that they were
written from, and read into, the right places: under whatever layout, no value of any tensor has changed on
its way through the files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.fingerprints import Fingerprints, Piece, fingerprints_of, shown
from moe_exp.checkpoint.format.folders import first_few, iteration_of, iterations, one_checkpoint, unusable
from moe_exp.checkpoint.format.keys import (
    ROUTER_BIAS,
    CheckpointKeys,
    check_tensors,
    sharded_tensors,
    zero_missing_biases,
)
from moe_exp.checkpoint.format.settings import refuse_other_checkpoint
from moe_exp.checkpoint.format.sharded_load import load_sharded
from moe_exp.checkpoint.format.torch_dist import read_common
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
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.exit_codes import FAILED
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.runs.run_folder import LATEST

from megatron.core.dist_checkpointing.mapping import is_main_replica

logger = logging.getLogger(__name__)


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
    return _progress(config, common, has_average=request.has_average)


def _progress(config: Config, common: dict[str, Any], *, has_average: bool) -> Progress:
    progress = Progress(**common["progress"])
    if progress.consumed_samples and not progress.consumed_tokens:  # of a version that did not count them
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


def compare_restored(
    runtime: Runtime, folder: Path, trained: Trained, converted: Sequence[Owned] | None
) -> int:
    """Compares the model and the optimizer's state (not if `converted` is None) with the fingerprints of the
    iteration's folder that they were loaded from, by one reduction. Returns the number of tensors compared;
    raises a RestoreError on every rank if one differs.

    Moments that the optimizer keeps in 8 bits or bf16 are compared as they were read (`converted`): kept,
    they are rounded again, and blocks of values that share a scale have other borders under another layout.
    Weights of another type than the checkpoint's are left out: they follow from the fp32 main weights, which
    are compared.
    """
    saved = from_first_rank(lambda: fingerprints.read(folder))
    if saved is None:
        of = "as those of Megatron-LM and of older versions: what was loaded is not compared"
        logger.info("%s has no fingerprints, %s", folder, of)
        return 0
    with parameters_in_sync(trained.model):
        mine = fingerprints_of(_pieces(runtime, trained, converted))
    found = _over_all_ranks(runtime, mine, saved)
    names = [name for name, one in found.items() if one != saved[name]]
    if names:
        raise RestoreError(folder, names, len(found))
    logger.info("what was loaded is what was saved: %d tensors have the same fingerprints", len(found))
    return len(found)


def _over_all_ranks(
    runtime: Runtime, mine: Fingerprints, saved: Mapping[str, fingerprints.Fingerprint]
) -> Fingerprints:
    """The whole tensors' fingerprints, of those of the saved ones' type that are on any rank."""
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
            found[name] = replace(one, num_values=count, total=total % 2**64)
    return found


def _pieces(runtime: Runtime, trained: Trained, converted: Sequence[Owned] | None) -> Iterator[Piece]:
    """All values of model and optimizer, each once over all ranks, under the keys of a save."""
    weights = weights_state(runtime, trained.model, None)
    shards = sharded_tensors(weights)
    if converted is not None:
        exact = []
        for owned in owned_state(trained.optimizer):
            moments = MOMENTS if owned.is_converted else ()
            others = {name: value for name, value in owned.values.items() if name not in moments}
            exact.append(replace(owned, values=others))
        shards = chain(shards, shards_of([*exact, *converted], weights))
    for shard in shards:
        if is_main_replica(shard.replica_id):
            yield shard.key, shard.data, shard.global_offset
