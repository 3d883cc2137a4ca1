"""Writes one rank's files of a checkpoint. No collectives: an error stays on its rank until asked for."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from moe_exp.checkpoint.format.fingerprints import Fingerprints
from moe_exp.checkpoint.format.torch_dist import COMMON
from moe_exp.host.devices import rank_place
from moe_exp.host.files import HashedFile


@dataclass(frozen=True)
class Written:
    """Report of a rank to rank 0 about its files."""

    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)  # where each of its pieces lies
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its files, for the manifest
    fingerprints: Fingerprints = field(default_factory=dict)  # its shares of those of the tensors
    error: str = ""  # why it failed, in a line; empty: it did not


def write_rank_files(
    folder: Path, rank: int, items: list[tuple[MetadataIndex, Tensor | io.BytesIO]], common: dict[str, Any]
) -> Written:
    """Writes `items` and, on rank 0, `common`; synced when it returns. Raises nothing."""
    try:
        places, entries = {}, {}
        if items:
            name = f"__{rank}_0.distcp"
            with HashedFile(folder / name) as file:
                for index, data in items:
                    start = file.tell()
                    _write(file, data)
                    places[index] = _StorageInfo(name, start, file.tell() - start)
            entries[name] = file.entry()
        if rank == 0:
            with HashedFile(folder / COMMON) as file:
                torch.save(common, cast("IO[bytes]", file))
            entries[COMMON] = file.entry()
    except Exception as error:
        return Written(error=error_line(error, rank))
    return Written(places, entries)


def _write(file: HashedFile, data: Tensor | io.BytesIO) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    data = data.detach().cpu()
    if data.untyped_storage().nbytes() != data.numel() * data.element_size():
        data = data.clone()  # torch.save writes the whole storage of a view
    torch.save(data, cast("IO[bytes]", file))


def error_line(error: Exception, rank: int) -> str:
    """An error in a line, with the rank that had it."""
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{rank_place(rank)}: {' '.join(reason.split())}"
