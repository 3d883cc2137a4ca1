"""Whether what is in the model and the optimizer after a load is what was there before the save, by
fingerprints. Called by every rank.

The checksums of the files say that they are what was written. This says that they were written from, and read
into, the right places: under whatever layout, no value of any tensor has changed on its way through the
files.
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
from moe_exp.checkpoint.format.folders import iteration_of, iterations
from moe_exp.checkpoint.format.keys import sharded_tensors
from moe_exp.checkpoint.optimizer_state import Owned, owned_state, shards_of
from moe_exp.checkpoint.state import Trained, parameters_in_sync, weights_state
from moe_exp.config import ConfigError
from moe_exp.engine.optimizer_classes import MOMENTS
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.exit_codes import FAILED
from moe_exp.runs.run_folder import LATEST

from megatron.core.dist_checkpointing.mapping import is_main_replica

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


class RestoreError(ConfigError):
    """Loaded values differ from the saved ones, perhaps by a fault of a node. `names`: of the tensors."""

    exit_code = FAILED  # so that a chain of jobs tries it again

    def __init__(self, folder: Path, names: Sequence[str], num_compared: int):
        self.names, self._arguments = list(names), (folder, list(names), num_compared)
        first = ", ".join(map(shown, self.names[:_NUM_SHOWN]))
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        rule = f"{len(names)} of {num_compared} tensors are not what was saved, by their fingerprints"
        rule += f": {first}{more}"
        fix = "start again, on other nodes if it comes again"
        if older := [one for one in iterations(folder.parent) if one < iteration_of(folder)]:
            fix += f"; to go back to an older checkpoint write {older[-1]} into {folder.parent / LATEST}"
        fix += "; FINGERPRINTS=false continues anyway"
        super().__init__([f"checkpoint={folder}: {rule}. Nothing was changed in it. Fix: {fix}."])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def compare_restored(
    runtime: Runtime,
    folder: Path,
    trained: Trained,
    converted: Sequence[Owned] = (),
    *,
    optimizer: bool = True,
) -> int:
    """Compares the model and, with `optimizer`, its state with the fingerprints of the iteration's folder
    that they were loaded from, by one reduction. Returns the number of tensors compared; raises a
    RestoreError on every rank if one differs.

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
        mine = fingerprints_of(_pieces(runtime, trained, converted, optimizer=optimizer))
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
    sums = zip(saved.items(), table[0].tolist(), table[1].tolist(), strict=True)
    return {
        name: replace(one, num_values=count, total=total % 2**64)
        for (name, one), count, total in sums
        if count
    }


def _pieces(
    runtime: Runtime, trained: Trained, converted: Sequence[Owned], *, optimizer: bool
) -> Iterator[Piece]:
    """All values of model and optimizer, each once over all ranks, under the keys of a save."""
    weights = weights_state(runtime, trained.model, None)
    shards = sharded_tensors(weights)
    if optimizer:
        exact = (
            replace(owned, values={n: v for n, v in owned.values.items() if n not in MOMENTS})
            if owned.is_converted
            else owned
            for owned in owned_state(trained.optimizer)
        )
        shards = chain(shards, shards_of([*exact, *converted], weights))
    for shard in shards:
        if is_main_replica(shard.replica_id):
            yield shard.key, shard.data, shard.global_offset
