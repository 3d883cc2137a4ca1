"""Loads this package's checkpoints, or weights saved by Megatron-LM. All ranks must call these functions."""

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint import state as training_state
from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.fingerprints import Fingerprint, TensorPiece, fingerprints_of, shown
from moe_exp.checkpoint.format.folders import first_few, iteration_of, one_checkpoint
from moe_exp.checkpoint.format.keys import check_tensors, read_state, sharded_tensors
from moe_exp.checkpoint.format.naming import KEEP_BYTES
from moe_exp.checkpoint.format.settings import refuse_other_checkpoint
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, read_common
from moe_exp.checkpoint.optimizer_state import OptimizerRequest, Owned, only, owned_state, shards_of
from moe_exp.checkpoint.state import Progress, Trained, parameters_in_sync, unwrapped
from moe_exp.config import Config, ConfigError
from moe_exp.config.model_changes import optimizer_change
from moe_exp.engine.averaged_weights import restart_average
from moe_exp.engine.optimizer_classes import AVERAGE
from moe_exp.engine.runtime import Runtime, from_first_rank, on_every_rank
from moe_exp.host.exit_codes import FAILED
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.runs.run_folder import LATEST, iterations

from megatron.core.dist_checkpointing.mapping import is_main_replica

logger = logging.getLogger(__name__)


class RestoreError(ConfigError):
    """Loaded values differ from the saved ones, possibly due to a faulty node. `names`: affected tensors."""

    exit_code = FAILED  # so that a chain of jobs retries it

    def __init__(self, folder: Path, names: Sequence[str], num_compared: int):
        self.names, self._arguments = list(names), (folder, list(names), num_compared)
        rule = f"{len(names)} of {num_compared} tensors differ from what was saved (fingerprint mismatch)"
        rule += f": {first_few([shown(name) for name in names])}"
        fix = "start the run again, on other nodes if this error repeats"
        if older := [one for one in iterations(folder.parent) if one < iteration_of(folder)]:
            fix += f"; to use an older checkpoint, write {older[-1]} into {folder.parent / LATEST}"
        fix += "; to continue anyway, set FINGERPRINTS=false"
        super().__init__([f"checkpoint={folder}: {rule}. The checkpoint was not modified. Fix: {fix}."])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def saved_progress(path: Path) -> Progress | None:
    """Reads the progress of the checkpoint at `path` (see `load`); None if it only has weights."""
    common = read_common(one_checkpoint(path))
    return Progress(**common["progress"]) if "progress" in common else None


def load(config: Config, runtime: Runtime, path: Path, trained: Trained) -> Progress:
    """Loads the iter_ folder `path`, or the newest checkpoint in `path`, into `trained`. A weights-only or
    Megatron-LM checkpoint provides only weights, and the iteration is 0. If the checkpoint's
    model or optimizer differs from `config`, raises ConfigError before loading anything. Raises ValueError
    if there is no checkpoint or if its parameters differ from the model's. Raises RestoreError if loaded
    values differ from the saved ones.
    """
    # a rank that alone cannot read a file must not leave the others waiting for it
    folder = on_every_rank(lambda: one_checkpoint(path))
    common = on_every_rank(lambda: compare_model(config, folder))
    if "progress" not in common:  # only weights
        load_weights(runtime, folder, trained)
        if config.fingerprints:
            compare_restored(runtime, folder, trained, None)
        return Progress(num_averaged=int(config.ema_decay > 0))
    reader = _reader(folder)
    state = training_state.weights_state(runtime, trained.model, reader)
    has_moments = optimizer_change(config, common["config"], str(folder)) is None
    request = OptimizerRequest(trained.optimizer, state, reader, with_moments=has_moments)
    state["optimizer_shards"] = request.shards
    check_tensors(state, reader)
    if training_state.layout(config, runtime) == common["layout"]:
        # Random streams depend on the tensor and pipeline layout and the device type. If these have changed,
        # the streams start from the seed.
        state["rng_state"] = training_state.rng_state(runtime)
    with parameters_in_sync(trained.model):
        _load_model(state, trained, reader)
        request.finish(common["optimizer"], trained.model)
    if config.fingerprints:
        compare_restored(runtime, folder, trained, request.converted)
    trained.scheduler.load_state_dict(common["scheduler"])
    if "rng_state" in state:
        training_state.set_rng_state(state["rng_state"][0])
    torch.distributed.barrier()
    return resumed_progress(config, common, has_average=request.has_average)


def resumed_progress(config: Config, common: dict[str, Any], *, has_average: bool) -> Progress:
    """Progress from which a run with `config` resumes."""
    progress = Progress(**common["progress"])
    # Older versions did not count tokens. The count follows from the SEQ_LEN of that run, not of this one.
    if progress.consumed_samples and not progress.consumed_tokens:
        progress.consumed_tokens = progress.consumed_samples * common["config"]["seq_len"]
        progress.consumed_flops = flops_per_iteration(config, progress.consumed_samples)
    if config.ema_decay and not has_average:
        logger.info("EMA_DECAY=%g: the moving average starts from the checkpoint's weights", config.ema_decay)
        progress.num_averaged = 1
    elif has_average and not config.ema_decay:
        logger.info("EMA_DECAY=0: the checkpoint's moving average of the weights is discarded")
        progress.num_averaged = 0
    return progress


def compare_model(config: Config, folder: Path) -> dict[str, Any]:
    """Returns the checkpoint's unsharded state; ConfigError if the checkpoint does not match `config`."""
    common = read_common(folder)
    if "config" in common:
        refuse_other_checkpoint(config, folder, common)
    return common


def load_weights(runtime: Runtime, folder: Path, trained: Trained) -> None:
    """Loads only the weights of an iter_ folder; ValueError if the weights do not match the model."""
    reader = _reader(folder)
    state = training_state.weights_state(runtime, trained.model, reader)
    check_tensors(state, reader)
    with parameters_in_sync(trained.model):
        _load_model(state, trained, reader)
        # The optimizer's main weights are still copies of the initial weights.
        trained.optimizer.reload_model_params()
        restart_average(trained.optimizer)


def _reader(folder: Path) -> CheckpointReader:
    return on_every_rank(lambda: CheckpointReader(folder, keep_bytes=KEEP_BYTES, checksums=False))


def _load_model(state: dict[str, Any], trained: Trained, reader: CheckpointReader) -> None:
    read_state(state, reader)
    for index, chunk in enumerate(map(unwrapped, trained.model)):
        # Transformer Engine's state; all other values are already in the parameters and buffers
        extra = {name: x for name, x in state[f"model{index}"].items() if name.endswith("_extra_state")}
        chunk.load_state_dict(extra, strict=False)


def compare_restored(
    runtime: Runtime, folder: Path, trained: Trained, converted: Sequence[Owned] | None
) -> int:
    """Compares the loaded model and optimizer state with the fingerprints in the iter_ `folder`. Uses one
    all-reduce. Returns the number of tensors compared. Raises RestoreError on every rank if a tensor differs.
    `converted`: the moments as read from the checkpoint, if the optimizer keeps them in bf16 or 8 bits. If
    `converted` is None, the optimizer state is not compared.
    """
    # Checksums show that the files are intact. Fingerprints also show that each value was written from and
    # read into the right place, under any parallel layout.
    saved = from_first_rank(lambda: fingerprints.read(folder))
    if saved is None:
        of = "written by Megatron-LM or an older version; the loaded values are not verified"
        logger.info("%s has no fingerprints (%s)", folder, of)
        return 0
    with parameters_in_sync(trained.model):
        mine = fingerprints_of(_pieces(runtime, trained, converted))
    # Weights whose dtype differs from the checkpoint's are skipped: they follow from the fp32 main weights,
    # which are compared. Totals become signed because PyTorch cannot sum unsigned integers.
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
    logger.info("verified the loaded values: the fingerprints of all %d tensors match", len(found))
    return len(found)


def _pieces(runtime: Runtime, trained: Trained, converted: Sequence[Owned] | None) -> Iterator[TensorPiece]:
    """Yields model and optimizer values with their checkpoint keys. Each value is from exactly one rank."""
    weights = training_state.weights_state(runtime, trained.model, None)
    shards = sharded_tensors(weights)
    if converted is not None:
        # Moments kept in 8 bits or bf16 are compared as read: the optimizer's copy is rounded again, and
        # under another layout the blocks that share a scale have different boundaries.
        whole = owned_state(trained.optimizer)
        exact = [only(owned, ("param", AVERAGE)) if owned.is_converted else owned for owned in whole]
        shards = chain(shards, shards_of([*exact, *converted], weights))
    for shard in shards:
        if is_main_replica(shard.replica_id):
            yield shard.key, shard.data, shard.global_offset
