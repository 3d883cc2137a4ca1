"""Checkpoint -> Hugging Face, on one process without ranks; a layer's largest tensor is in memory at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from moe_exp.checkpoint.format.folders import Manifest, one_checkpoint
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, StoredTensor
from moe_exp.checkpoint.hf.choice import choose_architecture
from moe_exp.checkpoint.hf.companions import (
    ORIGINAL,
    copy_tokenizer,
    kept_fields,
    token_ids,
    write_generation_config,
    write_model_card,
)
from moe_exp.checkpoint.hf.config_json import fields_of
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.model_folder import TORCH_DTYPES
from moe_exp.checkpoint.hf.plan import TRAINING_ONLY, Piece, Theirs, misfits, pieces
from moe_exp.checkpoint.hf.shard_writer import Entry, ShardWriter
from moe_exp.checkpoint.hf.target import Progress, check_target, new_folder, no_progress
from moe_exp.checkpoint.hf.tensor_rules import taken_apart
from moe_exp.config import Config
from moe_exp.host.files import write_json

_OPTIMIZER = ("optimizer.", "chained_")
# Of the distributed optimizer, and of the other one.
_MAIN = ("optimizer.state.param.", "optimizer.state.fp32_param.")
# Rounded, it would choose other experts; transformers keeps it in fp32 whatever the type of the model.
_NEVER_ROUNDED = "e_score_correction_bias"


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
    against: Mapping[str, list[str]]
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
        like: Hugging Face folder whose generation_config.json, token ids and max_position_embeddings are
            taken over; None: the one that the checkpoint was converted from.
        progress: gives a function that takes bytes as they are done.

    Raises:
        ValueError: for a checkpoint without settings, a model that no architecture expresses, tensors that
            are missing or left over, and a target that cannot be written; nothing is on disk then.
    """
    check_target(target)
    for name, path in (("tokenizer", tokenizer), ("like", like)):
        if path is not None and not path.exists():
            raise ValueError(
                f"{name.upper()}={path}: is not there. Fix: give a path that exists, or leave it out."
            )
    if max_shard_bytes < 1:
        raise ValueError(
            f"MAX_SHARD_SIZE={max_shard_bytes}: must be at least 1 byte. Fix: give a size such as 5GB."
        )
    folder = one_checkpoint(source)
    reader = CheckpointReader(folder)
    config = _config_of(reader)
    choice = choose_architecture(config)
    planned = list(pieces(choice.architecture, config))
    weights = _Weights(
        reader, planned, main=main_weights, dtype=None if dtype is None else TORCH_DTYPES[dtype]
    )
    with new_folder(target, num_bytes=weights.num_bytes) as partial:
        with progress("converting", weights.num_bytes) as advance:
            _write_weights(
                weights, config, ShardWriter(partial, weights.entries, max_bytes=max_shard_bytes), advance
            )
        tokenizer = tokenizer or _tokenizer_of(config, folder)
        has_tokenizer = tokenizer is not None and copy_tokenizer(tokenizer, partial)
        like = like or _original(folder)
        _write_companions(
            partial,
            folder,
            config,
            choice.architecture,
            weights,
            like=like,
            tokenizer=tokenizer,
            title=target.name,
        )
    return Exported(
        choice.architecture.name, choice.against, weights.num_bytes, tuple(_notes(config, has_tokenizer))
    )


def _config_of(reader: CheckpointReader) -> Config:
    settings = reader.common().get("config")
    if not isinstance(settings, dict):
        fix = "load it by LOAD_DIR in a run, whose checkpoint can be converted"
        raise ValueError(
            f"checkpoint={reader.folder}: does not say what model it is, moe_exp did not write it. Fix:"
            f" {fix}."
        )
    # Settings that a later version has given up have no say in what is computed.
    try:
        return Config(**{name: value for name, value in settings.items() if name in Config.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{str(first['loc'][0]).upper()}={first['input']}: {first['msg']}"
        raise ValueError(
            f"checkpoint={reader.folder}: {what}. Fix: use the version of moe_exp that wrote it."
        ) from None


class _Weights:
    """The tensors of a checkpoint that a model is made of.

    Args:
        reader: of the checkpoint.
        planned: pieces of the model.
        main: take the optimizer's fp32 copies of parameters; what is no parameter has none.
        dtype: of what is written; None: as it is stored.

    Raises:
        ValueError: where one is missing, has another shape, or is left over.
    """

    def __init__(
        self, reader: CheckpointReader, planned: list[Piece], *, main: bool, dtype: torch.dtype | None
    ):
        self.reader, self.planned, self.main, self.dtype = reader, planned, main, dtype
        if main and not any(key.startswith(_MAIN) for key in reader.tensors):
            raise ValueError(
                f"checkpoint={reader.folder}: has no fp32 weights of an optimizer. Fix: leave --weights main"
                " out."
            )
        self._kept: tuple[str, tuple[int, ...], Tensor] | None = None
        needed = {piece.key: piece.shape for piece in planned if piece.key}
        stored = {key: self._stored(key) for key in needed}
        missing = [key for key, found in stored.items() if found is None]
        shapes = [
            f"{key} {list(it.shape)} instead of {list(needed[key])}"
            for key, it in stored.items()
            if it and it.shape != needed[key]
        ]
        of_model = {
            key
            for key in reader.tensors
            if not key.startswith(_OPTIMIZER) and not key.endswith(TRAINING_ONLY)
        }
        if lists := misfits(
            {"missing": missing, "without a use": sorted(of_model - set(needed)), "of another shape": shapes}
        ):
            raise ValueError(
                f"checkpoint={reader.folder}: tensors {lists}. Fix: use another checkpoint of the run."
            )

    def _stored(self, key: str) -> StoredTensor | None:
        copies = [self.reader.tensors.get(prefix + key) for prefix in _MAIN] if self.main else []
        return next((copy for copy in copies if copy), self.reader.tensors.get(key))

    @property
    def usual_dtype(self) -> torch.dtype:
        """Of the weights that are written, but for single ones."""
        stored = self._stored(self.planned[0].key)
        assert stored is not None
        return self.dtype or stored.dtype

    def dtype_of(self, piece: Piece, part: Theirs) -> torch.dtype:
        """In which a tensor is written."""
        stored = self._stored(piece.key) if piece.key else None
        if part.name.endswith(_NEVER_ROUNDED):
            return torch.float32 if stored is None else stored.dtype
        return self.usual_dtype if stored is None else self.dtype or stored.dtype

    @property
    def entries(self) -> list[Entry]:
        """All that is written, in order."""
        return [
            Entry(part.name, part.shape, self.dtype_of(piece, part))
            for piece in self.planned
            for part in piece.theirs
        ]

    @property
    def num_bytes(self) -> int:
        """Of all that is written."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def num_parameters(self) -> int:
        """Of all that is written, tensors without effect included."""
        return sum(math.prod(entry.shape) for entry in self.entries)

    def values(self, piece: Piece) -> Tensor:
        """Of a piece, without the axes of layer and expert. A layer's experts are read at once: they may be
        one chunk of the checkpoint.
        """
        stored = self._stored(piece.key)
        assert stored is not None
        num_layer_axes = len(piece.shape) - len(piece.inner_shape) - (piece.expert is not None)
        layer, rest = piece.offsets[:num_layer_axes], piece.shape[num_layer_axes:]
        if self._kept is None or self._kept[:2] != (stored.key, layer):
            self._kept = None  # before the next is read
            values = self.reader.read(stored.key, (*layer, *(0,) * len(rest)), ((1,) * num_layer_axes + rest))
            self._kept = stored.key, layer, values.view(rest)
        return self._kept[2] if piece.expert is None else self._kept[2][piece.expert]


def _write_weights(
    weights: _Weights, config: Config, shards: ShardWriter, advance: Callable[[int], None]
) -> None:
    try:
        for piece in weights.planned:
            advance(_add(weights, piece, config, shards))
        shards.finish()
    finally:
        shards.close()


def _add(weights: _Weights, piece: Piece, config: Config, shards: ShardWriter) -> int:
    """Writes what a piece becomes; returns its bytes. Nothing of it is held afterwards, when the next tensor
    is read.
    """
    shapes = [part.shape for part in piece.theirs]
    has_effect = bool(piece.key)
    parts = (
        taken_apart(piece.join, weights.values(piece), shapes, config)
        if has_effect
        else map(torch.zeros, shapes)
    )
    num_bytes = 0
    for part, values in zip(piece.theirs, parts, strict=True):
        dtype = weights.dtype_of(piece, part)
        shards.add(part.name, values.to(dtype))
        num_bytes += values.numel() * dtype.itemsize
    return num_bytes


def _write_companions(
    partial: Path,
    folder: Path,
    config: Config,
    architecture: Architecture,
    weights: _Weights,
    *,
    like: Path | None,
    tokenizer: Path | None,
    title: str,
) -> None:
    ids: dict[str, Any] = dict(token_ids(tokenizer))
    of_torch = str(weights.usual_dtype).removeprefix("torch.")
    # Since version 5 transformers calls `dtype` what others still read as `torch_dtype`.
    fields = (
        fields_of(config, architecture)
        | ids
        | kept_fields(like)
        | {
            "dtype": of_torch,
            "torch_dtype": of_torch,
        }
    )
    write_json(partial / "config.json", fields)
    write_generation_config(partial, like, fields)
    size = f"{weights.num_parameters:,} parameters"
    write_model_card(
        partial,
        architecture=architecture.name,
        source=folder,
        iteration=_iteration(folder),
        dtype=of_torch,
        facts=size,
        title=title,
    )


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


def _notes(config: Config, has_tokenizer: bool) -> list[str]:
    notes = []
    if not has_tokenizer:
        where = (
            f"TOKENIZER={config.tokenizer} is not there" if config.tokenizer else "the checkpoint names none"
        )
        notes.append(
            f"no tokenizer was written: {where}; give --tokenizer, or copy its files into the folder"
        )
    if added := config.padded_vocab_size - config.vocab_size:
        notes.append(
            f"{added} rows that pad the vocabulary were left out; they have a share in the softmax of"
            " training"
        )
    return notes
