"""Reads a Hugging Face folder: config.json, and safetensors weights tensor by tensor. Uses `pread`, as pages
of a mapped file would count as memory of the process until the file is closed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_exp.host import files

logger = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # of the setting DTYPE
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FETCH = "fetch the folder again"


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
            raise ValueError(
                f"SRC={path}: is no folder. Fix: give a local folder with config.json and safetensors files."
            )
        if (path / ADAPTER).is_file():
            rule = f"has {ADAPTER}, and transformers adds the adapter to the weights"
            fix = "merge the adapter: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)"
            raise ValueError(f"SRC={path}: {rule}. Fix: {fix}.")
        self.config = read_json(path / "config.json")
        self.weights: dict[str, StoredWeight] = {}
        self._open: tuple[str, Any] | None = None
        index = self._index()
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._read_header(file)
        if index is not None:
            self._compare(index)

    def _index(self) -> dict[str, str] | None:
        """File by tensor; None if all tensors are in SINGLE."""
        has_index, is_single = ((self.path / name).is_file() for name in (INDEX, SINGLE))
        used = SINGLE if is_single else INDEX
        if (named := self.config.get("transformers_weights") or used) != used:
            rule = f"names other weights, not {used}"
            fix = "remove the field, and the weights that are not meant"
            raise ValueError(f"{self.path}/config.json: transformers_weights={named}: {rule}. Fix: {fix}.")
        if is_single:
            if has_index:
                logger.warning("%s: reading %s, as transformers does, and not %s", self.path, SINGLE, INDEX)
            return None
        if not has_index:
            raise self._no_weights()
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ValueError(f"{self.path / INDEX}: has no weight_map. Fix: {_FETCH}.")
        return index

    def _no_weights(self) -> ValueError:
        rule, fix = f"has neither {SINGLE} nor {INDEX}", _FETCH
        if others := sorted(path.name for path in self.path.glob("*.safetensors")):
            rule += f", but {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}"
            fix = f"save the model with save_pretrained of transformers, or {fix}"
        elif any(found for pattern in _PICKLES for found in self.path.glob(pattern)):
            rule = "has pickled weights alone, which can run code when they are read"
            fix = "load it with transformers and save it again: from_pretrained(...).save_pretrained(...)"
        return ValueError(f"SRC={self.path}: {rule}. Fix: {fix}.")

    def _read_header(self, file: str) -> None:
        if Path(file).name != file:
            raise ValueError(f"{self.path / INDEX}: names a file outside the folder, {file}. Fix: {_FETCH}.")
        with self._explained(file):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118  # not a dict
                if name in self.weights:
                    raise ValueError(
                        f"{self.path}: {name} is in {self.weights[name].file} and in {file}. Fix: {_FETCH}."
                    )
                entry = opened.get_slice(name)
                self.weights[name] = StoredWeight(file, tuple(entry.get_shape()), entry.get_dtype())

    def _compare(self, index: Mapping[str, str]) -> None:
        there = {name: weight.file for name, weight in self.weights.items()}
        if differing := sorted(name for name in {*index, *there} if index.get(name) != there.get(name)):
            said, is_in = (where.get(differing[0], "no file") for where in (index, there))
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ValueError(
                f"{self.path / INDEX}: says {differing[0]} is in {said}, it is in {is_in}{more}. Fix:"
                f" {_FETCH}."
            )

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The values of a tensor, or of one index of its first axis; ValueError if damaged."""
        with self._explained(self.weights[name].file):
            opened = self._opened(self.weights[name].file)
            return opened.get_tensor(name) if index is None else opened.get_slice(name)[index]

    def close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def _opened(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self.close()
            path = self.path / file
            if not path.is_file():
                raise FileNotFoundError(f"{path}: is missing. Fix: {_FETCH}.")
            self._open = file, safe_open(str(path), framework="pt", backend="pread").__enter__()
        return self._open[1]

    @contextlib.contextmanager
    def _explained(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None
        except SafetensorError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path / file}: is damaged ({reason}). Fix: {_FETCH}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; ValueError if it is missing or holds something else."""
    try:
        content = files.read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing. Fix: {_FETCH}.") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}). Fix: {_FETCH}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no object. Fix: {_FETCH}.")
    return content
