"""Hugging Face -> checkpoint, on one process without ranks; one tensor is in memory at a time."""

from __future__ import annotations

import logging
import math
import re
import shlex
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.torch_dist_writer import CheckpointWriter
from moe_exp.checkpoint.hf.companions import GENERATION, ORIGINAL, copy_tokenizer
from moe_exp.checkpoint.hf.config_json import architecture_of, settings_of
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.fields import Settings
from moe_exp.checkpoint.hf.model_folder import DTYPE_NAMES, DTYPES, TORCH_DTYPES, ModelFolder
from moe_exp.checkpoint.hf.plan import Piece, misfits, pieces
from moe_exp.checkpoint.hf.target import Progress, check_target, new_folder, no_progress
from moe_exp.checkpoint.hf.tensor_rules import CONDITIONS, joined, joined_shape
from moe_exp.checkpoint.state import CONTENT
from moe_exp.config import Config
from moe_exp.config.checks.checks import check_config
from moe_exp.host.files import write_atomically
from moe_exp.runs.run_folder import LATEST

logger = logging.getLogger(__name__)

SETTINGS = "settings.env"
_USUAL_SEQ_LEN = 8192
_LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "cp")
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_COUNTS = ("num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Imported:
    """What was converted.

    Args:
        config: of the model, with every launch setting at its default.
        architecture: of transformers.
        command: that trains on from it.
        notes: what a user should know, a line each.
    """

    config: Config
    architecture: str
    command: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Sources:
    """Pieces with the tensors of the folder that they are read from: name, and index where all experts are in
    one.
    """

    pieces: list[Piece]
    reads: dict[int, list[tuple[str, int | None]]]
    num_bytes: int


def from_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    drop_mtp: bool = False,
    ignore_fields: Collection[str] = (),
    progress: Progress = no_progress,
) -> Imported:
    """Writes a checkpoint of this package, weights alone, with the weights of a Hugging Face folder.

    Args:
        source: folder with config.json and safetensors files.
        target: checkpoints folder to make: `iter_0000000`, the tokenizer, and settings.env for the run that
            goes on from it.
        dtype: of the weights that are written, `fp32`, `bf16` or `fp16`; None: as they are.
        drop_mtp: leave out the layers for multi-token prediction, which the model does without.
        ignore_fields: fields of config.json that would be refused.
        progress: gives a function that takes bytes as they are done.

    Raises:
        ValueError: for whatever is missing, left over, of another shape or not supported; nothing is on disk
            then.
    """
    check_target(target)
    folder = ModelFolder(source)
    try:
        architecture = architecture_of(folder.config)
        _check_counts(folder)
        settings = settings_of(folder.config, architecture, ignore=ignore_fields)
        config = _config(settings)
        _check_trainable(folder, config)
        sources = _match(folder, architecture, config, drop_mtp=drop_mtp)
        stored = _dtype(folder, sources, dtype)
        config = config.model_copy(update={"dtype": DTYPE_NAMES[stored]})
        num_bytes = sources.num_bytes if dtype is None else _num_bytes(sources.pieces, stored)
        with (
            new_folder(target, num_bytes=num_bytes) as partial,
            progress("converting", sources.num_bytes) as advance,
        ):
            config = _write_companions(folder.path, partial, target, config)
            written = folders.iteration_folder(partial, 0)
            _write_weights(folder, sources, written, config, dtype, advance)
            facts = {
                "converted_from": architecture.name,
                "world_size": 1,
                "layout": {name: getattr(config, name) for name in _LAYOUT},
            }
            folders.Manifest(0, folders.entries_of(written), facts).write(written)
            write_atomically(partial / LATEST, "0")
            _write_settings(partial / SETTINGS, settings, config, target)
    finally:
        folder.close()
    return Imported(config, architecture.name, _command(target), tuple(_notes(config)))


def _check_counts(folder: ModelFolder) -> None:
    """Refuses numbers that no list of tensor names should be made for: a layer has tensors, an expert one or
    a row of one.
    """
    most = max(
        [1024, len(folder.weights), *(weight.shape[0] for weight in folder.weights.values() if weight.shape)]
    )
    for name in _COUNTS:
        value = folder.config.get(name)
        if isinstance(value, int) and value > most:
            raise ValueError(
                f"{folder.path}: {name}={value}: is more than its tensors can hold. Fix: take the config.json"
                " of the weights."
            )


def _config(settings: Settings) -> Config:
    try:
        return Config(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(
            f"config.json: {name.upper()}={first['input']}: {first['msg']}. Fix: mend the config.json."
        ) from None


def _check_trainable(folder: ModelFolder, config: Config) -> None:
    """Refuses a model that no run could train on, with the lines of the checks before a run."""
    # not the corpus, which the next run names
    named = config.model_copy(update={"train_data": "data", "valid_data": "data"})
    if problems := check_config(named):
        # Its ways out are other settings, and these are what the config.json says.
        rules = [line.partition(" Fix: ")[0] for line in problems]
        raise ValueError(
            "\n".join(f"{folder.path}: config.json says {rule} Fix: convert another model." for rule in rules)
        )


def _match(folder: ModelFolder, architecture: Architecture, config: Config, *, drop_mtp: bool) -> _Sources:
    """Finds for every piece its tensors, and sees that every tensor is used once and has its shape."""
    planned = [piece for piece in pieces(architecture, config) if piece.key]
    reads: dict[int, list[tuple[str, int | None]]] = {}
    needed: dict[str, tuple[int, ...]] = {}
    for number, piece in enumerate(planned):
        if piece.alias in folder.weights:
            shape = joined_shape(piece.join, [part.shape for part in piece.theirs], config)
            needed[piece.alias] = shape if piece.expert is None else (config.num_experts, *shape)
            reads[number] = [(piece.alias, piece.expert)]
        else:
            needed |= {part.name: part.shape for part in piece.theirs}
            reads[number] = [(part.name, None) for part in piece.theirs]
    unused = _unused(folder, architecture, config, set(needed), drop_mtp=drop_mtp)
    _complain(folder, needed, unused)
    return _Sources(planned, reads, sum(_bytes_of(folder, name) for name in needed))


def _unused(
    folder: ModelFolder, architecture: Architecture, config: Config, needed: set[str], *, drop_mtp: bool
) -> list[str]:
    left = []
    num_predicting = folder.config.get("num_nextn_predict_layers") or 0 if architecture.predicts_more else 0
    for name in sorted(set(folder.weights) - needed):
        layer = _LAYER.match(name)
        if config.tie_embeddings and name == "lm_head.weight":
            _check_tied(folder)
        elif layer and config.num_layers <= int(layer[1]) < config.num_layers + num_predicting:
            if not drop_mtp:
                rule = f"is a layer for multi-token prediction, beyond num_hidden_layers={config.num_layers}"
                raise ValueError(
                    f"{folder.path}: {name} {rule}. Fix: give --drop-mtp to leave such layers out."
                )
        elif not _COMPUTED.fullmatch(name) and not any(
            re.fullmatch(pattern, name) and CONDITIONS[when](config)
            for pattern, when in architecture.without_effect.items()
        ):
            left.append(name)
    return left


def _check_tied(folder: ModelFolder) -> None:
    embedding = "model.embed_tokens.weight"
    if embedding in folder.weights and not torch.equal(folder.read("lm_head.weight"), folder.read(embedding)):
        fix = "set tie_word_embeddings to false in config.json"
        raise ValueError(
            f"{folder.path}: tie_word_embeddings=true, but lm_head.weight is not {embedding}. Fix: {fix}."
        )


def _complain(folder: ModelFolder, needed: dict[str, tuple[int, ...]], unused: list[str]) -> None:
    """One line with everything that does not fit."""
    there = folder.weights
    missing = sorted(name for name in needed if name not in there)
    shapes = [
        f"{name} {list(there[name].shape)} instead of {list(shape)}"
        for name, shape in sorted(needed.items())
        if name in there and there[name].shape != shape
    ]
    types = [
        f"{name} {there[name].dtype}"
        for name in sorted(needed)
        if name in there and there[name].dtype not in DTYPES
    ]
    if lists := misfits(
        {
            "missing": missing,
            "without a use": unused,
            "of another shape": shapes,
            "of a type that is not supported": types,
        }
    ):
        raise ValueError(
            f"{folder.path}: tensors {lists}. Fix: take the config.json that belongs to the weights, or fetch"
            " them again."
        )


def _bytes_of(folder: ModelFolder, name: str) -> int:
    weight = folder.weights[name]
    return math.prod(weight.shape) * DTYPES[weight.dtype].itemsize


def _num_bytes(planned: list[Piece], dtype: torch.dtype) -> int:
    return sum(math.prod(piece.box) for piece in planned) * dtype.itemsize


def _dtype(folder: ModelFolder, sources: _Sources, dtype: str | None) -> torch.dtype:
    """The type that the model is trained in: that of the embedding. One key has one type, so layers of
    several are refused.
    """
    if dtype is not None:
        return TORCH_DTYPES[dtype]
    by_key: dict[str, set[str]] = {}
    for number, piece in enumerate(sources.pieces):
        by_key.setdefault(piece.key, set()).update(
            folder.weights[name].dtype for name, _ in sources.reads[number]
        )
    if mixed := sorted(key for key, types in by_key.items() if len(types) > 1):
        raise ValueError(
            f"{folder.path}: {mixed[0]} would be made of tensors of several types"
            f" ({', '.join(sorted(by_key[mixed[0]]))}). Fix: give --dtype bf16, fp16 or fp32."
        )
    (found,) = by_key[sources.pieces[0].key]
    return DTYPES[found]


def _write_weights(
    folder: ModelFolder,
    sources: _Sources,
    written: Path,
    config: Config,
    dtype: str | None,
    advance: Callable[[int], None],
) -> None:
    writer = CheckpointWriter(written)
    for number, piece in enumerate(sources.pieces):
        parts = [folder.read(name, index) for name, index in sources.reads[number]]
        advance(sum(part.numel() * part.element_size() for part in parts))
        is_joined = len(parts) < len(piece.theirs)
        values = parts[0] if is_joined else joined(piece.join, parts, config)
        writer.add_chunk(
            piece.key,
            _converted(values, piece, dtype).view(piece.box),
            shape=piece.shape,
            offsets=piece.offsets,
        )
    common = {
        "config": config.model_dump(),
        "layout": {"tp": 1, "pp": 1, "device": "cpu"},
        "content_metadata": CONTENT,
    }
    writer.finish(common)


def _converted(values: Tensor, piece: Piece, dtype: str | None) -> Tensor:
    # whose rounding would change which experts are chosen
    if dtype is None or piece.key.endswith("router.expert_bias"):
        return values
    return values.to(TORCH_DTYPES[dtype])


def _write_companions(source: Path, partial: Path, target: Path, config: Config) -> Config:
    (partial / ORIGINAL).mkdir()
    for name in ("config.json", GENERATION):
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / ORIGINAL / name)
    if not copy_tokenizer(source, partial / "tokenizer"):
        logger.warning("%s: has no tokenizer; TOKENIZER stays empty", source)
        return config
    return config.model_copy(update={"tokenizer": str(target.resolve() / "tokenizer")})


def _write_settings(path: Path, settings: Settings, config: Config, target: Path) -> None:
    """All settings of the model, whatever a preset says, and where its weights are."""
    values = settings | {
        "dtype": config.dtype,
        "tokenizer": config.tokenizer,
        "load_dir": str(target.resolve()),
    }
    lines = [f"{name.upper()}={shlex.quote(_text(value))}" for name, value in values.items() if value != ""]
    write_atomically(
        path,
        "\n".join(["# The model of this checkpoint; for `set -a; . settings.env; set +a`", *lines]) + "\n",
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(target: Path) -> str:
    return f"set -a; . {shlex.quote(str(target.resolve() / SETTINGS))}; set +a; moe-exp train"


def _notes(config: Config) -> list[str]:
    notes = []
    if config.seq_len > _USUAL_SEQ_LEN:
        notes.append(
            f"SEQ_LEN={config.seq_len} is the length that the model is published for; give --seq-len to train"
            " at another"
        )
    if added := config.padded_vocab_size - config.vocab_size:
        notes.append(
            f"VOCAB_SIZE={config.vocab_size} is no multiple of 128: {added} rows of zeros were added, whose"
            " logits are 0 and count in the softmax until training has pushed them down"
        )
    return notes
