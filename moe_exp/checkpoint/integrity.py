"""Is a checkpoint what was written, and which one does training resume from? Runs nothing of a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    damages,
    existing,
    iteration_of,
    usable,
)
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, read_common
from moe_exp.engine.runtime import from_first_rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The checkpoint that training continues from."""

    folder: Path  # of its iteration
    damages: tuple[str, ...] = ()  # a line for each newer one that cannot be used


def find_source(path: Path, *, checksums: bool, newest: int | None = None) -> Source | None:
    """The newest whole checkpoint of a checkpoints folder, run folder or iteration's folder, up to the
    iteration `newest`, or None if there is none at all. Called by every rank; writes nothing. With
    `checksums` the ranks read all files, otherwise their sizes. Raises a ValueError on every rank, if no
    checkpoint is whole, or the newest is of a newer format.
    """
    lines: list[str] = []
    for folder in from_first_rank(lambda: usable(path)):
        if newest is not None and iteration_of(folder) > newest:
            continue
        damage = _damage(folder, checksums=checksums)
        if not damage:
            return Source(folder, tuple(lines))
        lines.append(damage)
        if torch.distributed.get_rank() == 0:
            logger.warning("damaged checkpoint: %s", damage)
    if lines:
        others = f" (and {len(lines) - 1} older ones)" if len(lines) > 1 else ""
        raise ValueError(
            f"checkpoint={path}: none can be used, {lines[0]}{others}. Fix: restore the files, or begin anew"
            " elsewhere."
        )
    return None


def _damage(folder: Path, *, checksums: bool) -> str:
    """Damage of a checkpoint in one line, or empty. Called by every rank."""
    damage, files = from_first_rank(lambda: contents(folder))
    if damage:
        return damage
    # The largest first, so that all ranks get about as many bytes.
    names = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = list(damages(folder, {name: files[name] for name in names[rank::world_size]}, checksums=checksums))
    found: list[list[str]] = [[]] * world_size
    torch.distributed.all_gather_object(found, mine)
    lines = sorted(line for some in found for line in some)
    return lines[0] + (f" (and {len(lines) - 1} more files)" if len(lines) > 1 else "") if lines else ""


def contents(folder: Path) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """Damage of a checkpoint by its small files alone, in one line, and its files as the manifest
    has them: without one, as Megatron-LM's, none, and those that `.metadata` names have to be long enough.
    Raises a NewerFormatError if a newer version of this package wrote it.
    """
    try:
        manifest = Manifest.read(existing(folder))
        common, reader = read_common(folder), CheckpointReader(folder)
    except NewerFormatError:
        raise
    except ValueError as error:
        return str(error).partition(". Fix:")[0], {}
    except OSError as error:
        return f"{folder}: cannot be read ({error.strerror or error})", {}
    if manifest is not None:
        return "", manifest.files
    if "versions" in common:
        return f"{folder / MANIFEST}: is missing", {}
    logger.info("%s has no %s, as those of Megatron-LM: its checksums are not checked", folder, MANIFEST)
    return _short_file(reader), {}


def _short_file(reader: CheckpointReader) -> str:
    ends: dict[str, int] = {}
    chunks = chain.from_iterable(tensor.chunks for tensor in reader.tensors.values())
    for chunk in chain(chunks, reader.objects.values()):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.num_bytes)
    for name, end in sorted(ends.items()):
        path = reader.folder / name
        if not path.is_file():
            return f"{path}: is missing"
        if (size := path.stat().st_size) < end:
            return f"{path}: has {size} bytes, at least {end} were written"
    return ""
