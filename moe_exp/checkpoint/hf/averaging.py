"""Averages the weights of Hugging Face folders of one model, tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_exp.checkpoint.hf.companions import GENERATION, copy_tokenizer
from moe_exp.checkpoint.hf.config_json import WITHOUT_EFFECT
from moe_exp.checkpoint.hf.model_folder import DTYPES, ModelFolder
from moe_exp.checkpoint.hf.shard_writer import Entry, ShardWriter
from moe_exp.checkpoint.hf.target import Progress, check_target, new_folder, no_progress
from moe_exp.checkpoint.tools.average import add_weighted, check_same_shapes
from moe_exp.config import problem
from moe_exp.host.files import write_json
from moe_exp.runs.provenance import package_versions

_MOST_SHARD_BYTES = 5 * 10**9  # of tensors in a file

PROVENANCE = "provenance.json"
_NEVER_DIFFERS = {"architectures", "model_type"}  # of the fields without an effect on the numbers


def are_model_folders(paths: Sequence[Path]) -> bool:
    """Whether the paths are Hugging Face folders, with a config.json; ValueError if only some of them are."""
    found = {path: (path / "config.json").is_file() for path in paths}
    if len(set(found.values())) > 1:
        other = next(path for path, is_folder in found.items() if not is_folder)
        rule = "is no Hugging Face folder, as others are"
        raise ValueError(problem("SRC", other, rule, "average checkpoints, or Hugging Face folders"))
    return any(found.values())


def average_folders(
    sources: Sequence[Path],
    target: Path,
    weights: Sequence[float],
    *,
    progress: Progress = no_progress,
) -> int:
    """Writes a folder with the average of the weights; returns their bytes.

    Values are added in fp64 and rounded once, to the type that the first folder has. In memory is one tensor
    of each folder. Configuration, tokenizer and code are copied from the first; provenance.json has the
    folders with their weights. ValueError, and nothing is written, if the models differ.

    Args:
        sources: folders, each with config.json and safetensors files.
        target: folder to make.
        weights: one for each source, with a sum of 1.
    """
    check_target(target)
    with ExitStack() as opened:
        folders = [opened.enter_context(closing(ModelFolder(source))) for source in sources]
        entries = _entries(folders)
        num_bytes = sum(entry.num_bytes for entry in entries)
        with new_folder(target, num_bytes=num_bytes) as partial:
            shards = opened.enter_context(closing(ShardWriter(partial, entries, max_bytes=_MOST_SHARD_BYTES)))
            with progress("averaging", num_bytes) as advance:
                for entry in entries:
                    shards.add(entry.name, _averaged(folders, weights, entry.name))
                    advance(entry.num_bytes)
            shards.finish()
            _copy_companions(sources[0], partial)
            write_json(partial / PROVENANCE, _provenance(sources, weights))
    return num_bytes


def _averaged(folders: Sequence[ModelFolder], weights: Sequence[float], name: str) -> Tensor:
    values = [folder.read(name) for folder in folders]
    add_weighted(values, weights, out=values[0])
    return values[0]


def _entries(folders: Sequence[ModelFolder]) -> list[Entry]:
    """The tensors to write; ValueError if the folders are not of one model, or have quantized weights."""
    first = folders[0]
    for folder in folders:
        _check_same_config(first, folder)
        check_same_shapes(first.path, first.weights, folder.path, folder.weights)
        for name, weight in folder.weights.items():
            if weight.dtype not in DTYPES:
                rule = f"{name} has the type {weight.dtype}, which is not averaged"
                fix = f"give folders with weights in {', '.join(DTYPES)}"
                raise ValueError(problem("SRC", folder.path, rule, fix))
    return [Entry(name, one.shape, DTYPES[one.dtype]) for name, one in first.weights.items()]


def _check_same_config(first: ModelFolder, other: ModelFolder) -> None:
    expected, found = (_compared(folder.config) for folder in (first, other))
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            rule = (
                f"config.json has {name}={found.get(name)}, that of {first.path} {name}={expected.get(name)}"
            )
            raise ValueError(problem("SRC", other.path, rule, "average folders of one model"))


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields on which numbers depend; null is as good as none."""
    ignored = WITHOUT_EFFECT - _NEVER_DIFFERS
    return {name: value for name, value in config.items() if name not in ignored and value is not None}


def _copy_companions(source: Path, target: Path) -> None:
    for path in [source / "config.json", source / GENERATION, *sorted(source.glob("*.py"))]:
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    copy_tokenizer(source, target)


def _provenance(sources: Sequence[Path], weights: Sequence[float]) -> dict[str, Any]:
    pairs = zip(sources, weights, strict=True)
    return {
        "averaged_from": [{"folder": str(source), "weight": weight} for source, weight in pairs],
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": package_versions(),
    }
