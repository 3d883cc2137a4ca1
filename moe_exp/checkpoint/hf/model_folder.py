"""Reads and writes the weights of a Hugging Face folder, safetensors files, with one tensor in memory.

Reading uses `pread`: pages of a mapped file would count as memory of the process until it is closed. Writing
does without the safetensors package, which needs all of a file. The format
(https://github.com/huggingface/safetensors): header length (8 bytes, little-endian), header (JSON, padded
with spaces to a multiple of 8 bytes), values of tensor after tensor.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_exp.checkpoint.format.folders import first_few, unusable
from moe_exp.host import files

logger = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # of the setting DTYPE
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def _damaged(place: object, reason: str) -> ValueError:
    return unusable(place, reason, "fetch the folder again")


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a folder, without its values."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class ModelFolder:
    """Config and weights of a folder, values read on request; ValueError if it is incomplete or damaged.

    The weights are those that `from_pretrained` of transformers reads: model.safetensors, or without it the
    files that its index names. Weights that it would take from elsewhere are refused.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            fix = "give a local folder with config.json and safetensors files"
            raise unusable(f"SRC={path}", "is no folder", fix)
        if (path / ADAPTER).is_file():
            rule = f"has {ADAPTER}, and transformers adds the adapter to the weights"
            fix = "merge the adapter: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)"
            raise unusable(f"SRC={path}", rule, fix)
        self.config = read_json(path / "config.json")
        self.weights: dict[str, StoredWeight] = {}
        self._open: tuple[str, Any] | None = None
        index = self._index()
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._read_header(file)
        there = {name: weight.file for name, weight in self.weights.items()}
        index = there if index is None else index
        if differing := sorted(name for name in {*index, *there} if index.get(name) != there.get(name)):
            said, is_in = (where.get(differing[0], "no file") for where in (index, there))
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise _damaged(path / INDEX, f"says {differing[0]} is in {said}, it is in {is_in}{more}")

    def _index(self) -> dict[str, str] | None:
        """File by tensor; None if all tensors are in SINGLE."""
        has_index, is_single = ((self.path / name).is_file() for name in (INDEX, SINGLE))
        used = SINGLE if is_single else INDEX
        if (named := self.config.get("transformers_weights") or used) != used:
            rule = f"transformers_weights={named}: names other weights, not {used}"
            fix = "remove the field, and the weights that are not meant"
            raise unusable(f"{self.path}/config.json", rule, fix)
        if is_single:
            if has_index:
                logger.warning("%s: reading %s, as transformers does, and not %s", self.path, SINGLE, INDEX)
            return None
        if not has_index:
            rule, fix = f"has neither {SINGLE} nor {INDEX}", "fetch the folder again"
            if others := sorted(path.name for path in self.path.glob("*.safetensors")):
                rule += f", but {first_few(others, 3)}"
                fix = f"save the model with save_pretrained of transformers, or {fix}"
            elif any(found for pattern in _PICKLES for found in self.path.glob(pattern)):
                rule = "has pickled weights alone, which can run code when they are read"
                fix = "load it with transformers and save it again: from_pretrained(...).save_pretrained(...)"
            raise unusable(f"SRC={self.path}", rule, fix)
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise _damaged(self.path / INDEX, "has no weight_map")
        return index

    def _read_header(self, file: str) -> None:
        if Path(file).name != file:
            raise _damaged(self.path / INDEX, f"names a file outside the folder, {file}")
        with self._explained(file):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118  # not a dict
                if name in self.weights:
                    raise _damaged(self.path, f"{name} is in {self.weights[name].file} and in {file}")
                entry = opened.get_slice(name)
                self.weights[name] = StoredWeight(file, tuple(entry.get_shape()), entry.get_dtype())

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The values of a tensor, or of one index of its first axis; ValueError if damaged."""
        with self._explained(self.weights[name].file):
            opened = self._opened(self.weights[name].file)
            return opened.get_tensor(name) if index is None else opened.get_slice(name)[index]

    def _opened(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            path = self.path / file
            if not path.is_file():
                raise _damaged(path, "is missing")
            self._open = file, safe_open(str(path), framework="pt", backend="pread")
        return self._open[1]

    @contextlib.contextmanager
    def _explained(self, file: str) -> Iterator[None]:
        try:
            yield
        except SafetensorError as error:
            raise _damaged(self.path / file, f"is damaged ({' '.join(str(error).split())})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; ValueError if it is missing or holds something else."""
    try:
        content = files.read_json(path)
    except FileNotFoundError:
        raise _damaged(path, "is missing") from None
    except ValueError as error:
        raise _damaged(path, f"is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise _damaged(path, "holds no object")
    return content


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors in the order of `entries` into an existing folder, at most `max_bytes` of them per file;
    a larger tensor gets its own file. `finish` writes the index if there is more than one file.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], *, max_bytes: int):
        self.folder = folder
        self._shards: list[list[Entry]] = [[]]
        num_bytes = 0  # of the last shard
        for entry in entries:
            if self._shards[-1] and num_bytes + entry.num_bytes > max_bytes:
                self._shards.append([])
                num_bytes = 0
            self._shards[-1].append(entry)
            num_bytes += entry.num_bytes
        self._expected = [(index, entry) for index, shard in enumerate(self._shards) for entry in shard]
        self._next = 0
        self._file: IO[bytes] | None = None
        self._open_index = -1

    def add(self, name: str, values: Tensor) -> None:
        """Writes the next tensor."""
        index, entry = self._expected[self._next]
        assert (name, tuple(values.shape), values.dtype) == (entry.name, entry.shape, entry.dtype)
        if index != self._open_index:
            self._begin(index)
        assert self._file is not None
        self._file.write(values.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        self._next += 1

    def finish(self) -> None:
        """Closes the last file and writes the index."""
        assert self._next == len(self._expected)
        self.close()
        if len(self._shards) > 1:
            weight_map = {entry.name: self._name(index) for index, entry in self._expected}
            total = sum(entry.num_bytes for _, entry in self._expected)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files.write_json(self.folder / INDEX, index)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, index: int) -> None:
        self.close()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in self._shards[index]:
            end = start + entry.num_bytes
            described = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape)}
            header[entry.name] = {**described, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file, self._open_index = (self.folder / self._name(index)).open("wb"), index
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _name(self, index: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
