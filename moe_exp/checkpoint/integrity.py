"""Is a checkpoint what was written, and which one does training resume from? Runs nothing of a file."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    one_checkpoint,
    unusable,
    usable,
)
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, read_common
from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.model_changes import model_changes
from moe_exp.engine.runtime import from_first_rank
from moe_exp.host.files import expanded

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
    folders = from_first_rank(lambda: usable(path))
    folders = [one for one in folders if newest is None or iteration_of(one) <= newest]
    return _first_whole(path, folders, partial(_damage, checksums=checksums))


def find_source_here(path: Path) -> Source | None:
    """`find_source` in one process without a process group; of files it compares the sizes alone."""

    def damage_by_sizes(folder: Path) -> str:
        damage, files = contents(folder)
        return damage or next(damages(folder, files, checksums=False), "")

    return _first_whole(path, usable(path), damage_by_sizes)


def _first_whole(path: Path, folders: Sequence[Path], damage_of: Callable[[Path], str]) -> Source | None:
    lines: list[str] = []
    for folder in folders:
        damage = damage_of(folder)
        if not damage:
            return Source(folder, tuple(lines))
        lines.append(damage)
    if not lines:
        return None
    others = f" (and {len(lines) - 1} older ones)" if len(lines) > 1 else ""
    fix = "restore the files, or start a new run elsewhere"
    raise unusable(f"checkpoint={path}", f"none can be used, {lines[0]}{others}", fix)


def _damage(folder: Path, *, checksums: bool) -> str:
    """Damage of a checkpoint in one line, which rank 0 logs, or empty. Called by every rank."""
    damage, files = from_first_rank(lambda: contents(folder))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not damage:
        # The largest first, so that all ranks get about as many bytes.
        names = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        mine = {name: files[name] for name in names[rank::world_size]}
        found: list[list[str]] = [[]] * world_size
        torch.distributed.all_gather_object(found, list(damages(folder, mine, checksums=checksums)))
        lines = sorted(chain.from_iterable(found))
        more = f" (and {len(lines) - 1} more files)" if len(lines) > 1 else ""
        damage = lines[0] + more if lines else ""
    if damage and rank == 0:
        logger.warning("damaged checkpoint: %s", damage)
    return damage


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
    ends: dict[str, int] = {}
    chunks = chain.from_iterable(tensor.chunks for tensor in reader.tensors.values())
    for chunk in chain(chunks, reader.objects.values()):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.num_bytes)
    for path, end in sorted((folder / name, end) for name, end in ends.items()):
        if not path.is_file():
            return f"{path}: is missing", {}
        if (size := path.stat().st_size) < end:
            return f"{path}: has {size} bytes, at least {end} were written", {}
    return "", {}


def dense_source(config: Config, find: Callable[[Path], Source | None]) -> Path:
    """The folder that UPCYCLE_FROM means; ConfigError if it is no checkpoint of a dense run that fits."""
    try:
        folder = one_checkpoint(expanded(config.upcycle_from))
    except ValueError as error:
        raise ConfigError([str(error).replace("checkpoint=", "UPCYCLE_FROM=", 1)]) from None
    find(folder)
    if problems := dense_problems(config, read_common(folder).get("config")):
        raise ConfigError(problems)
    return folder


def dense_problems(c: Config, dense: Mapping[str, Any] | None) -> list[str]:
    """Why this run cannot start from the dense run with settings `dense`; None: it has none."""
    rule, fix = "was not written by this package", "name a run of it"
    if dense is not None:
        rule, fix = "is the checkpoint of an MoE run", "name a run with USE_MOE=false"
    if dense is None or dense.get("use_moe"):
        return [problem("upcycle_from", c.upcycle_from, rule, fix)]
    source = f"the dense run UPCYCLE_FROM={c.upcycle_from}"
    shapes, functions = model_changes(c.model_copy(update={"use_moe": False}), dense, source)
    return [change.problem(source) for change in shapes + functions]
