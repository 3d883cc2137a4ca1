"""Creates a folder atomically, and reports the progress of a conversion."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from moe_exp.checkpoint.format.folders import PARTIAL
from moe_exp.host.files import bytes_text, sync_folder

_MARGIN = 1.01  # headers, index, tokenizer

# (what, total bytes) -> context manager of a function that is called with the bytes just finished
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def no_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """No-op progress, for callers without a terminal."""
    yield lambda num_bytes: None


@contextlib.contextmanager
def new_folder(target: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `target` at the end, or removed if the work fails.
    ValueError, and no change, if `target` exists (unless empty), cannot be created, or the disk lacks room
    for `num_bytes`.
    """
    check_target(target)
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        raise ValueError(
            f"DST={partial}: an earlier call left it behind, or another one is writing it. Fix: remove it."
        )
    missing = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        _remove_empty(missing)
        raise ValueError(
            f"DST={target}: cannot be made ({error.strerror}). Fix: give a folder where you can write."
        ) from None
    try:
        free = shutil.disk_usage(partial).free
        if free < num_bytes * _MARGIN:
            rule = f"needs {bytes_text(num_bytes)}, {bytes_text(free)} are free"
            raise ValueError(f"DST={target}: {rule}. Fix: free some, or give a folder on another disk.")
        yield partial
        _sync_files(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(missing)
        raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # never created, or in use by now
            folder.rmdir()


def check_target(target: Path) -> None:
    """Raises ValueError if `target` exists and is not an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ValueError(f"DST={target}: is there already. Fix: give a new folder, or remove it.")


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
