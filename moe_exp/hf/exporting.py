"""Checkpoint -> Hugging Face, on one process without ranks; one layer's largest tensor and one file of the result are in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.folders import Manifest, one_checkpoint
from moe_exp.checkpoint.torch_dist import CheckpointReader
from moe_exp.config import Config
from moe_exp.files import write_json
from moe_exp.hf.choice import choose_architecture
from moe_exp.hf.companions import (
    copy_tokenizer,
    kept_fields,
    token_ids,
    write_generation_config,
    write_model_card,
)
from moe_exp.hf.config_json import fields_of
from moe_exp.hf.families import Architecture
from moe_exp.hf.importing import DTYPE_NAMES, ORIGINAL, Progress, no_progress
from moe_exp.hf.plan import TRAINING_ONLY, Piece, pieces
from moe_exp.hf.shard_writer import ShardWriter
from moe_exp.hf.target import check_target, new_folder
from moe_exp.hf.tensor_rules import taken_apart

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer."
_MAIN = "optimizer.state.param."
_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# transformers keeps these in fp32 whatever the type of the model.
_ALWAYS_FP32 = "e_score_correction_bias"


@dataclass(frozen=True)
class Exported:
    """What was converted.

    Args:
        architecture: of transformers.
        against: for every other one why it is not that.
        num_bytes: of weights.
        notes: what a user should know, a line each.
    """

    architecture: str
    against: dict[str, list[str]]
    num_bytes: int
    notes: tuple[str, ...]


def to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    main_weights: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
    like: Path | None = None,
    progress: Progress = no_progress,
) -> Exported:
    """Writes a Hugging Face folder with the weights of a checkpoint of this package, of whatever layout.

    Args:
        source: an iteration's folder, a checkpoints folder or a run folder.
        target: folder to make.
        dtype: of the weights that are written, `fp32`, `bf16` or `fp16`; None: as they are.
        main_weights: take the optimizer's fp32 copies, which hold more digits than the weights of a bf16 run.
        max_shard_bytes: of tensors in a file.
        tokenizer: folder or tokenizer.json; None: the checkpoint's TOKENIZER, where that is still there.
        like: Hugging Face folder whose generation_config.json, token ids and max_position_embeddings are taken over; None: the one
            that the checkpoint was converted from.
        progress: gives a function that takes bytes as they are done.

    Raises:
        ValueError: for a checkpoint without settings, a model that no architecture expresses, tensors that are missing or left over,
            and a target that cannot be written; nothing is on disk then.
    """
    check_target(target)
    folder = one_checkpoint(source)
    reader = CheckpointReader(folder)
    config = _config_of(reader)
    choice = choose_architecture(config)
    planned = list(pieces(choice.architecture, config))
    prefix = _MAIN if main_weights else ""
    _check(reader, planned, prefix)
    out_dtype = None if dtype is None else _BY_NAME[dtype]
    like = like or _original(folder)
    tokenizer = tokenizer or _tokenizer_of(config, folder)
    num_bytes = sum(_num_bytes(reader, piece, prefix, out_dtype) for piece in planned)
    with new_folder(target, num_bytes=num_bytes) as partial, progress("converting", num_bytes) as advance:
        with ShardWriter(partial, max_bytes=max_shard_bytes) as shards:
            _write_weights(reader, planned, shards, config, prefix, out_dtype, advance)
            shards.finish()
        fallback = reader.tensors[prefix + planned[0].key].dtype if out_dtype is None else out_dtype
        fields = _fields(config, choice.architecture, like, tokenizer, fallback)
        write_json(partial / "config.json", fields)
        write_generation_config(partial, like, fields)
        has_tokenizer = tokenizer is not None and copy_tokenizer(tokenizer, partial)
        write_model_card(
            partial,
            architecture=choice.architecture.name,
            source=folder,
            iteration=_iteration(folder),
            dtype=DTYPE_NAMES[fallback],
            facts=_facts(planned),
        )
    return Exported(choice.architecture.name, dict(choice.against), num_bytes, tuple(_notes(config, has_tokenizer)))


def _config_of(reader: CheckpointReader) -> Config:
    settings = reader.common().get("config")
    if not isinstance(settings, dict):
        fix = "load it by LOAD_DIR in a run, whose checkpoint can be converted"
        raise ValueError(f"checkpoint={reader.folder}: does not say what model it is, moe_exp did not write it. Fix: {fix}.")
    known = {name: value for name, value in settings.items() if name in Config.model_fields}
    return Config(**known)


def _check(reader: CheckpointReader, planned: list[Piece], prefix: str) -> None:
    """Every tensor of the model is there with its shape, and every one that is there is used."""
    needed = {piece.key: piece.shape for piece in planned if piece.key}
    # Buffers are no parameters: the optimizer has no copy of them.
    stored = {key: reader.tensors.get(_source_key(reader, key, prefix)) for key in needed}
    if prefix and not any(key.startswith(prefix) for key in reader.tensors):
        raise ValueError(f"checkpoint={reader.folder}: has no fp32 weights of the optimizer. Fix: leave --weights main out.")
    missing = [key for key, found in stored.items() if found is None]
    shapes = [f"{key} {list(found.shape)} instead of {list(needed[key])}" for key, found in stored.items() if found and found.shape != needed[key]]
    of_model = {key for key in reader.tensors if not key.startswith(_OPTIMIZER) and not key.startswith("chained_")}
    unused = [key for key in sorted(of_model - set(needed)) if not key.endswith(TRAINING_ONLY)]
    found = [("missing", missing), ("without a use", unused), ("of another shape", shapes)]
    if any(names for _, names in found):
        lists = "; ".join(f"{what}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" * (len(names) > 5)) for what, names in found if names)
        raise ValueError(f"checkpoint={reader.folder}: tensors {lists}. Fix: use another checkpoint of the run.")


def _source_key(reader: CheckpointReader, key: str, prefix: str) -> str:
    return key if prefix and key in reader.tensors and prefix + key not in reader.tensors else prefix + key


def _num_bytes(reader: CheckpointReader, piece: Piece, prefix: str, dtype: torch.dtype | None) -> int:
    stored = reader.tensors[_source_key(reader, piece.key, prefix)].dtype if piece.key else torch.float32
    return sum(math.prod(part.shape) for part in piece.theirs) * (dtype or stored).itemsize


class _LayerTensors:
    """Boxes of tensors, read by layer: a chunk of the checkpoint may hold many experts, and is read once."""

    def __init__(self, reader: CheckpointReader):
        self.reader = reader
        self._kept: tuple[str, tuple[int, ...], Tensor] | None = None

    def box(self, key: str, piece: Piece) -> Tensor:
        """The values of a piece, without the axes of layer and expert."""
        num_axes = len(piece.shape) - len(piece.inner_shape)
        has_experts = piece.expert is not None
        layer = piece.offsets[: num_axes - has_experts]
        if self._kept is None or self._kept[:2] != (key, layer):
            self._kept = None  # before the next is read
            rest = len(piece.shape) - len(layer)
            sizes = (1,) * len(layer) + piece.shape[len(layer) :]
            values = self.reader.read(key, (*layer, *(0,) * rest), sizes)
            self._kept = key, layer, values.view(piece.shape[len(layer) :])
        values = self._kept[2]
        return values[piece.offsets[num_axes - 1]] if has_experts else values


def _write_weights(
    reader: CheckpointReader,
    planned: list[Piece],
    shards: ShardWriter,
    config: Config,
    prefix: str,
    dtype: torch.dtype | None,
    advance: Callable[[int], None],
) -> None:
    layers = _LayerTensors(reader)
    usual = dtype or reader.tensors[prefix + planned[0].key].dtype
    for piece in planned:
        shapes = [part.shape for part in piece.theirs]
        if piece.key:
            parts = taken_apart(piece.join, layers.box(_source_key(reader, piece.key, prefix), piece), shapes, config)
        else:
            parts = [torch.zeros(shape, dtype=usual) for shape in shapes]
        for part, values in zip(piece.theirs, parts, strict=True):
            values = values.to(_target_dtype(part.name, values.dtype if piece.key else torch.float32, usual if not piece.key else dtype))
            shards.add(part.name, values)
            advance(values.numel() * values.element_size())




def _target_dtype(name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if name.endswith(_ALWAYS_FP32):
        return stored
    return dtype or stored


def _fields(config: Config, architecture: Architecture, like: Path | None, tokenizer: Path | None, dtype: torch.dtype) -> dict[str, Any]:
    ids = token_ids(tokenizer) if tokenizer is not None else {}
    kept = kept_fields(like)
    of_torch = str(dtype).removeprefix("torch.")
    # Since version 5 transformers calls `dtype` what others still read as `torch_dtype`.
    return fields_of(config, architecture) | dict(ids) | kept | {"dtype": of_torch, "torch_dtype": of_torch}


def _original(folder: Path) -> Path | None:
    beside = folder.parent / ORIGINAL
    return beside if beside.is_dir() else None


def _tokenizer_of(config: Config, folder: Path) -> Path | None:
    for path in (Path(config.tokenizer) if config.tokenizer else None, folder.parent / "tokenizer"):
        if path is not None and path.exists():
            return path
    return None


def _iteration(folder: Path) -> int:
    manifest = Manifest.read(folder)
    if manifest is not None:
        return manifest.iteration
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else 0


def _facts(planned: list[Piece]) -> str:
    total = sum(math.prod(part.shape) for piece in planned for part in piece.theirs)
    return f"{total:,} parameters"


def _notes(config: Config, has_tokenizer: bool) -> list[str]:
    notes = []
    if not has_tokenizer:
        where = f"TOKENIZER={config.tokenizer} is not there" if config.tokenizer else "the checkpoint names none"
        notes.append(f"No tokenizer was written: {where}. Give --tokenizer, or copy its files into the folder.")
    if added := config.padded_vocab_size - config.vocab_size:
        notes.append(f"{added} rows that pad the vocabulary were left out; they have a share in the softmax of training.")
    return notes
