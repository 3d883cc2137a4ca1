"""`moe-exp ckpt prune`: removes checkpoints by the rules of a run (`which_to_remove`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from moe_exp.checkpoint.format.folders import (
    iteration_folder,
    iterations,
    latest_iteration,
    take_name,
    unusable,
    valid_losses,
    which_to_remove,
)
from moe_exp.checkpoint.tools.info import checkpoints_folder
from moe_exp.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Prunable:
    """A checkpoint to remove."""

    folder: Path
    iteration: int
    num_bytes: int


def prunable(path: Path, *, last: int, every: int, best: int) -> list[Prunable]:
    """Checkpoints of a checkpoints or run folder that no rule of `which_to_remove` keeps. Never `latest`;
    `last` counts from it, too. ValueError if there are none, `last` < 1 or `best` without validation losses.
    """
    checkpoints = checkpoints_folder(path)
    if checkpoints is None:
        raise unusable(f"PATH={path}", "has no checkpoints", "name a checkpoints folder or a run folder")
    if last < 1:
        raise unusable(f"keep-last={last}", "must be 1 or more", "keep at least the newest")
    found, latest, losses = iterations(checkpoints), latest_iteration(checkpoints), valid_losses(checkpoints)
    if best and not losses:
        rule = f"no checkpoint in {checkpoints} says what its validation loss was"
        raise unusable(f"keep-best={best}", rule, "omit --keep-best")
    # Checkpoints newer than `latest` are damaged or abandoned, so they must not displace older ones.
    usable = [iteration for iteration in found if latest is None or iteration <= latest]
    gone, of_all = (which_to_remove(of, losses, last=last, every=every, best=best) for of in (usable, found))
    gone += [iteration for iteration in of_all if iteration not in usable]
    folders = {iteration: iteration_folder(checkpoints, iteration) for iteration in gone}
    return [Prunable(folder, iteration, _bytes(folder)) for iteration, folder in folders.items()]


def remove(found: list[Prunable]) -> Iterator[Prunable]:
    """Removes checkpoints, renamed first so that none is left half removed, and yields each once it is gone.
    ValueError, and nothing is removed, while a run writes there.
    """
    if not found:
        return
    checkpoints = found[0].folder.parent
    lock = RunFolder(checkpoints.parent).lock
    was_used = lock.exists() and os.access(lock, os.W_OK)  # else no run ever wrote here
    try:
        with FileLock(lock, timeout=0) if was_used else nullcontext():
            for one in found:
                shutil.rmtree(take_name(one.folder))
                yield one
    except Timeout:
        fix = "wait for its end; KEEP_LAST has it prune by itself"
        raise unusable(f"PATH={checkpoints}", "a run is writing there", fix) from None


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
