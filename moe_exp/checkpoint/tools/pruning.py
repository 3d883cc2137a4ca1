"""`moe-exp ckpt prune`: removes checkpoints by the rules of retention.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from moe_exp.checkpoint.format.folders import (
    REMOVED,
    iteration_folder,
    iterations,
    latest_iteration,
    valid_losses,
)
from moe_exp.checkpoint.retention import which_to_remove
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
        raise ValueError(f"PATH={path}: has no checkpoints. Fix: name a checkpoints folder or a run folder.")
    if last < 1:
        raise ValueError(f"keep-last={last}: must be 1 or more. Fix: keep at least the newest.")
    found, latest, losses = iterations(checkpoints), latest_iteration(checkpoints), valid_losses(checkpoints)
    if best and not losses:
        rule = f"no checkpoint in {checkpoints} says what its validation loss was"
        raise ValueError(f"keep-best={best}: {rule}. Fix: leave --keep-best out.")
    # Checkpoints newer than `latest` are damaged or abandoned, so they must not displace older ones.
    usable = [iteration for iteration in found if latest is None or iteration <= latest]
    gone, of_all = (which_to_remove(of, losses, last=last, every=every, best=best) for of in (usable, found))
    gone += [iteration for iteration in of_all if iteration not in usable]
    folders = {iteration: iteration_folder(checkpoints, iteration) for iteration in gone}
    return [Prunable(folder, iteration, _bytes(folder)) for iteration, folder in folders.items()]


def remove(path: Path, found: list[Prunable]) -> Iterator[Prunable]:
    """Removes checkpoints, renamed first so that none is left half removed, and yields each once it is gone.
    ValueError, and nothing is removed, while a run writes there.
    """
    checkpoints = checkpoints_folder(path)
    if checkpoints is None:
        return
    with _held(checkpoints):
        for one in found:
            removed = one.folder.with_name(one.folder.name + REMOVED)
            shutil.rmtree(removed, ignore_errors=True)
            one.folder.rename(removed)
            shutil.rmtree(removed)
            yield one


@contextmanager
def _held(checkpoints: Path) -> Iterator[None]:
    lock = RunFolder(checkpoints.parent).lock
    if not lock.exists() or not os.access(lock, os.W_OK):  # no run ever wrote here
        yield
        return
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"PATH={checkpoints}: a run is writing there. Fix: wait for its end; KEEP_LAST has it prune by"
            " itself."
        ) from None


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
