"""Checkpoint -> Hugging Face, in one process, with one layer's largest tensor in memory at a time."""

import contextlib
import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import check_target, new_folder, one_checkpoint, unusable
from moe_exp.checkpoint.format.naming import is_optimizer, single_styles
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, StoredTensor, read_common
from moe_exp.checkpoint.hf.choice import choose_architecture
from moe_exp.checkpoint.hf.companions import (
    GENERATION,
    ORIGINAL,
    as_in_documents,
    as_trained,
    check_tokenizer,
    copy_tokenizer,
    kept_fields,
    token_ids,
    write_generation_config,
    write_model_card,
)
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.model_folder import TORCH_DTYPES, Entry, ShardWriter
from moe_exp.checkpoint.hf.tensor_rules import Piece, Theirs, misfits, pieces, taken_apart
from moe_exp.checkpoint.tools.info import iteration_of
from moe_exp.config import Config
from moe_exp.config.choices import LOSS_STATE
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.own_text import find_prepared_text
from moe_exp.data.tokens.manifests import trained_documents
from moe_exp.host.files import expanded, write_json
from moe_exp.host.processes import own_command
from moe_exp.host.progress import progress

_MAIN = ("optimizer.state.param.", "optimizer.state.fp32_param.")  # distributed optimizer, plain one


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    architecture: str  # of transformers
    num_bytes: int  # of weights
    notes: tuple[str, ...]  # lines for the user


def to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    main_weights: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
    like: Path | None = None,
) -> Exported:
    """Writes a Hugging Face folder with the weights of a checkpoint of this package, of any layout.

    Raises ValueError, and leaves nothing on disk, for a checkpoint without settings, a model that no
    architecture expresses, missing or unused tensors, and a target that cannot be written.

    Args:
        source: an iteration's folder, a checkpoints folder or a run folder.
        target: folder to create.
        dtype: of the written weights, `fp32`, `bf16` or `fp16`; None: kept.
        main_weights: use the optimizer's fp32 copies, which are more precise than the weights of a bf16 run.
        max_shard_bytes: of tensors per file.
        tokenizer: folder or tokenizer.json; None: the checkpoint's TOKENIZER, if it still exists.
        like: Hugging Face folder that provides generation_config.json, token ids and max_position_embeddings;
            None: the one that the checkpoint, or LOAD_DIR of its run, was converted from.
    """
    check_target(target)
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if like is not None and not any((like / name).is_file() for name in ("config.json", GENERATION)):
        rule = f"has neither config.json nor {GENERATION}"
        raise unusable(f"LIKE={like}", rule, "name a Hugging Face folder, or leave it out")
    if max_shard_bytes < 1:
        rule = "must be at least 1 byte"
        raise unusable(f"MAX_SHARD_SIZE={max_shard_bytes}", rule, "give a size such as 5GB")
    folder = one_checkpoint(source)
    config = saved_config(folder)
    architecture = choose_architecture(config)
    planned = list(pieces(architecture.tensors, config, scales=architecture.scales))
    of_file = TORCH_DTYPES[dtype] if dtype else None
    weights = _Weights(CheckpointReader(folder), planned, main=main_weights, dtype=of_file)
    with new_folder(target, num_bytes=weights.num_bytes) as partial:
        with (
            progress("converting", weights.num_bytes) as advance,
            contextlib.closing(ShardWriter(partial, weights.entries, max_bytes=max_shard_bytes)) as shards,
        ):
            for piece in weights.planned:
                advance(_add(weights, piece, config, shards))
            shards.finish()
        tokenizer = tokenizer or _tokenizer_of(config, folder)
        has_tokenizer = tokenizer is not None and copy_tokenizer(tokenizer, partial)
        documents, trained = trained_documents(config, saved_order(folder)), {}
        if has_tokenizer and documents is not None:
            trained = as_in_documents(partial, documents)
        name, of_torch = architecture.name, str(weights.usual_dtype).removeprefix("torch.")
        fields = fields_of(config, architecture) | token_ids(partial)
        longest = 0 if like else fields["max_position_embeddings"]
        if like is None:  # JSON files of the folder that the checkpoint, or LOAD_DIR of its run, came from
            places = [folder.parent, *([expanded(config.load_dir)] if config.load_dir else [])]
            like = next((place / ORIGINAL for place in places if (place / ORIGINAL).is_dir()), None)
        fields |= kept_fields(like)
        # the training may have extended the length of its source
        fields["max_position_embeddings"] = max(longest, fields["max_position_embeddings"])
        # transformers 5 renamed `torch_dtype`, which others still read, to `dtype`
        fields |= as_trained(trained, fields)
        fields |= {"dtype": of_torch, "torch_dtype": of_torch}
        write_json(partial / "config.json", fields)
        write_generation_config(partial, like, fields, trained)
        num_values = sum(math.prod(entry.shape) for entry in weights.entries)  # of all that is written
        facts = f"`{name}`, {num_values:,} parameters, weights in {of_torch}"
        iteration = iteration_of(folder, read_common(folder))
        write_model_card(partial, target.name, facts, source=folder, iteration=iteration)
    return Exported(name, weights.num_bytes, tuple(_notes(config, has_tokenizer)))


def fields_of(config: Config, architecture: Architecture) -> dict[str, Any]:
    """The config.json of a model, without dtype and token ids."""
    fields: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    for rule in architecture.fields:
        fields |= rule.write(config)
    return fields | {"use_cache": True}


class _Weights:
    """The tensors that a model needs; ValueError if one is missing, unused or of another shape."""

    def __init__(
        self, reader: CheckpointReader, planned: list[Piece], *, main: bool, dtype: torch.dtype | None
    ):
        self.reader, self.planned, self.main, self.dtype = reader, planned, main, dtype
        name = f"checkpoint={reader.folder}"
        if main and not any(key.startswith(_MAIN) for key in reader.tensors):
            raise unusable(name, "has no fp32 weights of an optimizer", "omit --weights main")
        self._kept: tuple[str, tuple[int, ...], Tensor] | None = None
        needed = {piece.key: piece.shape for piece in planned if piece.key}
        found = {key: stored.shape for key in needed if (stored := self._stored(key))}
        of_model = {key for key in reader.tensors if not is_optimizer(key)}
        unused = sorted(key for key in of_model - set(needed) if not key.endswith(LOSS_STATE))
        if lists := misfits(needed, found, unused):
            fix = "use another checkpoint of the run"
            single_layers, single_experts = single_styles(unused)
            are_single, _ = single_styles(needed)  # dense and MoE layers cannot be stacked
            if single_experts or (single_layers and not are_single):
                layers = "single" if are_single else "stacked"
                options = ["--weights-only", "--layers", layers, "--experts", "stacked"]
                source = str(reader.folder)
                command = [*own_command(), "ckpt", "reshape", source, f"{source}_stacked", *options]
                fix = f"stack them first, {shlex.join(command)}"
            raise unusable(name, f"tensors {lists}", fix)

        stored = self._stored(planned[0].key)
        assert stored is not None
        self.usual_dtype = dtype or stored.dtype  # of most written weights
        self.entries = [  # all tensors to write, in order
            Entry(part.name, part.shape, self.dtype_of(piece, part))
            for piece in planned
            for part in piece.theirs
        ]
        self.num_bytes = sum(entry.num_bytes for entry in self.entries)

    def _stored(self, key: str) -> StoredTensor | None:
        names = [prefix + key for prefix in (*_MAIN, "")] if self.main else [key]
        return next((self.reader.tensors[name] for name in names if name in self.reader.tensors), None)

    def dtype_of(self, piece: Piece, part: Theirs) -> torch.dtype:
        """Type in which a tensor is written."""
        stored = self._stored(piece.key) if piece.key else None
        # rounding it would change the choice of experts; transformers always keeps it in fp32
        if part.name.endswith("e_score_correction_bias"):
            return torch.float32 if stored is None else stored.dtype
        return self.usual_dtype if stored is None else self.dtype or stored.dtype

    def values(self, piece: Piece) -> Tensor:
        """Values of a piece; a layer's experts are read at once, as they may be one chunk of the file."""
        stored = self._stored(piece.key)
        assert stored is not None
        num_layer_axes = len(piece.shape) - len(piece.theirs[0].shape) - (piece.expert is not None)
        layer, rest = piece.offsets[:num_layer_axes], piece.shape[num_layer_axes:]
        if self._kept is None or self._kept[:2] != (stored.key, layer):
            self._kept = None  # before the next is read
            values = self.reader.read(stored.key, (*layer, *(0,) * len(rest)), ((1,) * num_layer_axes + rest))
            self._kept = stored.key, layer, values.view(rest)
        return self._kept[2] if piece.expert is None else self._kept[2][piece.expert]


def _add(weights: _Weights, piece: Piece, config: Config, shards: ShardWriter) -> int:
    """Writes the tensors of a piece and returns their bytes; frees them before the next one is read."""
    shapes, num_bytes = [part.shape for part in piece.theirs], 0
    parts: Iterable[Tensor] = map(torch.zeros, shapes)
    if piece.key:  # it has an effect
        ours = weights.values(piece)
        ours = ours if piece.factor == 1 else ours.float() * piece.factor
        parts = taken_apart(piece.join, ours, shapes, config)
    for part, values in zip(piece.theirs, parts, strict=True):
        dtype = weights.dtype_of(piece, part)
        shards.add(part.name, values.to(dtype))
        num_bytes += values.numel() * dtype.itemsize
    return num_bytes


def _tokenizer_of(config: Config, folder: Path) -> Path | None:
    named = config.tokenizer
    if not named:
        with contextlib.suppress(ValueError):
            named = find_prepared_text(config, saved_order(folder).get("tokenizer") or "").tokenizer
    paths = [Path(named)] if named else []
    if not (named or config.train_data):
        paths.append(embedded_folder(Path(config.data_dir)) / "tokenizer.json")
    return next((path for path in (*paths, folder.parent / "tokenizer") if path.exists()), None)


def _notes(config: Config, has_tokenizer: bool) -> list[str]:
    notes = []
    if not has_tokenizer:
        named = config.tokenizer
        why = f"TOKENIZER={named} is not there" if named else "the checkpoint names none"
        fix = "give --tokenizer, or copy its files into the folder"
        notes.append(f"no tokenizer was written: {why}; {fix}")
    if added := config.padded_vocab_size - config.vocab_size:
        share = "they have a share in the softmax of training"
        notes.append(f"{added} rows that pad the vocabulary were left out; {share}")
    return notes
