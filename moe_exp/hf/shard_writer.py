"""Writes tensors as the sharded safetensors files of a Hugging Face folder, in the order in which they come."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from moe_exp.files import write_json
from moe_exp.hf.model_folder import INDEX, SINGLE


class ShardWriter:
    """Collects tensors up to the size of a file, writes it, and so on; `finish` gives the files their names and writes the index.

    Args:
        folder: that is there.
        max_bytes: of tensors in a file; a larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.total_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, values: Tensor) -> None:
        """A tensor. It is copied where it is a part of a larger one, of which nothing is kept."""
        values = values.detach().contiguous()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()
        size = values.numel() * values.element_size()
        if self._pending and self._pending_bytes + size > self.max_bytes:
            self._write()
        self._pending[name] = values
        self._pending_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        """Writes what is left, and the index where there is more than one file."""
        if self._pending:
            self._write()
        if len(self._files) == 1:
            self._temporary(0).rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._temporary(index).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))})

    def _write(self) -> None:
        save_file(self._pending, self._temporary(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, index: int) -> Path:
        return self.folder / f"shard_{index:05d}.safetensors"
