"""Removing checkpoints of a run by the rules of retention.py, by hand: `moe-exp ckpt prune`."""

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
    """A checkpoint that goes: its folder, iteration and bytes."""

    folder: Path
    iteration: int
    num_bytes: int


def prunable(path: Path, *, last: int, every: int, best: int) -> list[Prunable]:
    """The checkpoints of a checkpoints folder or run folder that no rule keeps; never the one that `latest`
    names.

    Args:
        path: of the folder.
        last: keep so many of the newest, and of the newest up to `latest`.
        every: keep those whose iteration is a multiple of it; 0: this rule keeps none.
        best: keep so many of those with the lowest validation loss; 0: this rule keeps none.

    Raises:
        ValueError: where the folder has no checkpoints, or a rule would keep none.
    """
    checkpoints = checkpoints_folder(path)
    if checkpoints is None:
        raise ValueError(f"PATH={path}: has no checkpoints. Fix: name a checkpoints folder or a run folder.")
    if last < 1:
        raise ValueError(f"keep-last={last}: must be 1 or more. Fix: keep at least the newest.")
    found, latest, losses = iterations(checkpoints), latest_iteration(checkpoints), valid_losses(checkpoints)
    if best and not losses:
        raise ValueError(
            f"keep-best={best}: no checkpoint in {checkpoints} says what its validation loss was. Fix: leave"
            " --keep-best out."
        )
    # Newer ones than `latest` are damaged, or of an attempt that was given up: they do not take the place of
    # those before.
    usable = [iteration for iteration in found if latest is None or iteration <= latest]
    gone = which_to_remove(usable, losses, last=last, every=every, best=best)
    gone += [i for i in which_to_remove(found, losses, last=last, every=every, best=best) if i not in usable]
    folders = [iteration_folder(checkpoints, iteration) for iteration in gone]
    return [
        Prunable(folder, iteration, _bytes(folder)) for folder, iteration in zip(folders, gone, strict=True)
    ]


def remove(path: Path, found: list[Prunable]) -> Iterator[Prunable]:
    """Removes checkpoints and yields each when it is gone. One that is half removed is no checkpoint any
    more: it is renamed first.

    Raises:
        ValueError: while a run writes there; nothing is removed then.
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
