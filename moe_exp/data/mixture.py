"""Makes a mixture from mixture.yaml: token files and an effective weight per source, and a datasheet.

tokenizer: meta-llama/Llama-3.1-8B      # or vocab_size: 32000, to train one
total_tokens: 20e9
sources:
  - source: fineweb_edu_10bt
    weight: 0.7
    filters: [gopher-quality]
  - source: code/
    name: code
    weight: 0.3
    max_epochs: 4

DATA_DIR/NAME_<source>/            chunks    DATA_DIR/NAME_<source>_shuffled/    shards
DATA_DIR/NAME/<source>_text_document.bin, .idx    <source>_valid_text_document.bin, .idx
DATA_DIR/NAME/datasheet.md    mixture.json    tokenizer/
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moe_exp.data.convert.convert import ConvertSettings
from moe_exp.data.datasheet import MixturePart, datasheet
from moe_exp.data.download.sources import local_files
from moe_exp.data.kinds import BadDocument, input_error
from moe_exp.data.prepare import Preparation, prepare, raw_folder
from moe_exp.data.stage import MAKE_AGAIN, is_stale
from moe_exp.data.tokens.parts import PartSettings, default_part_bytes
from moe_exp.data.tokens.preprocess import stage_settings, tokenize_files, tokenized_prefix
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_named_tokenizer
from moe_exp.data.tokens.tokenizer_training import train_tokenizer
from moe_exp.host.files import read_json, read_yaml, write_atomically, write_json

logger = logging.getLogger(__name__)


class MixedSource(BaseModel):
    """One source of a mixture. `patterns` and the fields after it are options of `moe-exp data prepare`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str  # dataset, file or folder, as for `moe-exp data prepare`
    name: str = ""  # base name of the created files (default: the source's name)
    weight: float = Field(gt=0, allow_inf_nan=False)  # share of the training tokens, relative to the others
    max_epochs: float | None = Field(default=None, gt=0)  # over its tokens; requires `total_tokens`
    patterns: list[str] = []
    revision: str | None = None
    text_field: str | None = None
    text_documents: Literal["file", "block"] = "file"
    languages: list[str] = []
    min_language_score: float | None = None
    min_score: float | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    limit: int | None = None
    skip_bad: bool = False
    filters: list[str | dict[str, Any]] = []
    dedup: bool = False
    near_dedup: dict[str, int] | None = None  # {} for the defaults
    decontaminate: str | list[str] = []  # JSONL file with benchmark texts or lm-eval:TASK, or a list of them

    @field_validator("name")
    @classmethod
    def _is_file_name(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            rule = "must consist of letters, digits, '.', '_' and '-', and begin with a letter or digit"
            raise ValueError(rule)
        return name


class Mixture(BaseModel):
    """Contents of mixture.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[MixedSource] = Field(min_length=1)  # names must be unique
    tokenizer: str | None = None  # folder, tokenizer.json, SentencePiece .model, or name on the Hub
    eod_token: str | None = None  # end-of-document token (default: defined by the tokenizer's files)
    prepend_bos: bool = False  # start every document with the tokenizer's BOS token
    vocab_size: int | None = Field(default=None, ge=258)  # of a tokenizer to train, instead of `tokenizer`
    total_tokens: float | None = Field(default=None, gt=0)  # of the training, for epochs and `max_epochs`
    seed: int = 0  # for the document order and the choice of validation documents
    valid_fraction: float = Field(default=0.005, gt=0, lt=1)  # of each source's distinct texts
    num_shards: int = Field(default=32, ge=1)  # training files per source

    @model_validator(mode="after")
    def _fits(self) -> "Mixture":
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise ValueError("requires either tokenizer or vocab_size, not both")
        if self.prepend_bos and self.tokenizer is None:
            rule = "prepend_bos requires tokenizer, because a tokenizer trained here has no BOS token"
            raise ValueError(rule)
        if self.total_tokens is None and any(one.max_epochs for one in self.sources):
            raise ValueError("max_epochs requires total_tokens")
        return self


def read_mixture(path: Path) -> Mixture:
    """Reads a mixture.yaml; raises a ValueError that names the first invalid setting."""
    content = read_yaml(path, fix="correct the file")
    if not isinstance(content, dict):
        raise input_error(path, "must contain settings with a list of sources", "see docs/corpus.md")
    try:
        return Mixture(**content)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        rule = rule.replace("Extra inputs are not permitted", "is not a setting")
        rule = rule.replace("Field required", "is missing")
        place = ".".join(str(one) for one in first["loc"]) or "settings"
        given = "" if isinstance(first["input"], dict) else f"={first['input']}"
        raise input_error(path, f"{place}{given}: {rule}", "see docs/corpus.md") from None


def effective_weights(
    weights: Sequence[float],
    tokens: Sequence[int],
    max_epochs: Sequence[float | None],
    total_tokens: float | None,
) -> list[float]:
    """Returns each source's share of the training tokens, limited by its maximum number of epochs.

    If a source reaches its limit, the other sources supply the missing tokens in proportion to their weights.

    Args:
        weights: requested relative weights.
        max_epochs: maximum number of epochs of each source; None for unlimited.
        total_tokens: number of training tokens; None if no source has max_epochs.
    """
    limits = [float("inf")] * len(weights)
    if total_tokens:
        epochs = zip(max_epochs, tokens, strict=True)
        limits = [limit * count / total_tokens if limit else float("inf") for limit, count in epochs]
    # even all epochs of all sources do not provide enough tokens
    if sum(limits) < 1:
        most = sum(limits) * (total_tokens or 0)
        rule, fix = f"max_epochs limits the sources to {most:.4g}", "lower total_tokens, raise max_epochs"
        raise input_error(f"total_tokens={total_tokens:.4g}", rule, f"{fix}, or add another source")
    # In this order, a source that reaches its limit leaves the rest to the sources that follow.
    shares = [0.0] * len(weights)
    left = sorted(range(len(weights)), key=lambda one: limits[one] / weights[one])
    while left:
        share_of_all = (1 - sum(shares)) / sum(weights[one] for one in left)
        index = left.pop(0)
        shares[index] = min(limits[index], weights[index] * share_of_all)
    return shares


@dataclass(frozen=True)
class Mixing:
    """Settings of `moe-exp data mix`."""

    name: str  # of the mixture and its folder
    mixture: Mixture
    every: Preparation  # settings that the preparations of all sources share
    tasks: int | None = None  # chunks per source, see `ConvertSettings`
    start_over_sources: tuple[str, ...] = ()  # names
    workers: int = 1  # tokenizer processes

    @property
    def folder(self) -> Path:
        return self.every.data_dir / self.name

    def preparations(self) -> dict[str, Preparation]:
        """Preparation of each source, by name; ValueError if two sources have the same name."""
        shuffle = {name: getattr(self.mixture, name) for name in ("seed", "num_shards", "valid_fraction")}
        same: dict[str, Any] = {"clamp_tasks": True, "shuffle": {**self.every.shuffle, **shuffle}}
        found: dict[str, Preparation] = {}
        for number, one in enumerate(self.mixture.sources):
            try:
                settings = ConvertSettings.of(one, self.tasks)
                own: dict[str, Any] = {"revision": one.revision, "text_field": one.text_field}
                own |= {"patterns": tuple(one.patterns), "settings": settings}
                wanted = replace(self.every, name=one.source, **own, **same)
                source = wanted.source()
                if source.path is not None:
                    local_files(source)
            except ValueError as error:
                raise ValueError(f"sources.{number}: {error}") from error
            name = one.name or source.name
            if name in found:
                rule = f"name={name}: must be unique"
                raise input_error(f"sources.{number}", rule, "give this source another name")
            start_over = self.every.start_over or name in self.start_over_sources
            found[name] = replace(wanted, output_name=f"{self.name}_{name}", start_over=start_over)
        if unknown := set(self.start_over_sources) - set(found):
            fix = f"give one of {', '.join(found)}"
            raise input_error(f"start_over_source={min(unknown)}", f"must be a source of {self.name}", fix)
        # sources with the same name but different files get separate download folders
        files: dict[str, set[Any]] = {}
        for source in (wanted.source() for wanted in found.values()):
            key = source.repository, source.revision, source.patterns, source.path, source.url
            files.setdefault(source.name, set()).add(key)
        for name, wanted in found.items():
            if len(files[wanted.source().name]) > 1:
                found[name] = replace(wanted, raw_name=f"{self.name}_{name}")
        return found

    def tokenizer(self) -> TextTokenizer | None:
        """The configured tokenizer, or None if it will be trained."""
        if not self.mixture.tokenizer:
            return None
        options = {name: getattr(self.mixture, name) for name in ("eod_token", "prepend_bos")}
        tokenizer = load_named_tokenizer(self.mixture.tokenizer, **options)
        try:
            PartSettings(tokenizer, append_eod=True)
        except ValueError as error:
            raise ValueError(str(error).replace("--eod-token", "eod_token")) from error
        return tokenizer


# Shuffled documents of a source: manifest, training files, validation file.
_Shards = tuple[Mapping[str, Any], list[Path], Path]


def mix(mixing: Mixing) -> dict[str, Any] | None:
    """Prepares and tokenizes all sources and computes their weights. Finished sources are reused.

    Returns:
        Contents of mixture.json; None while SLURM jobs are active. The contents include vocab_size,
        tokenizer, train_data (value for TRAIN_DATA) and valid_data (value for VALID_DATA).

    Raises:
        ValueError: if there are too few tokens.
        ValueError, OSError: see `prepare` and `tokenize_files`.
    """
    mixture, preparations = mixing.mixture, mixing.preparations()
    tokenizer = mixing.tokenizer()
    found = {name: _prepared(name, wanted) for name, wanted in preparations.items()}
    shards = {name: one for name, one in found.items() if one is not None}
    if len(shards) < len(found):
        return None
    if tokenizer is None:
        folder, vocab_size = mixing.folder / "tokenizer", mixture.vocab_size or 0
        inputs = [path for _, train, _ in shards.values() for path in train]
        known = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
        # a tokenizer for other shards or another vocabulary size is replaced, not reported as an error
        is_other = known.get("settings", {}).get("vocab_size", vocab_size) != vocab_size
        start_over = mixing.every.start_over or is_other or is_stale(folder, inputs)
        train_tokenizer(inputs, folder, vocab_size=vocab_size, start_over=start_over)
        tokenizer = load_named_tokenizer(str(folder), eod_token=mixture.eod_token)
    tokenizer.log_left_out()
    parts = _parts(mixing, preparations, shards, tokenizer)
    for part, one in zip(parts, mixture.sources, strict=True):
        if part.weight < 0.999 * part.asked:
            what = "%s: %.2f%% of the tokens instead of %.2f%%, limited by max_epochs"
            logger.warning(what, part.name, 100 * part.weight, 100 * part.asked)
        epochs = part.weight * (mixture.total_tokens or 0) / part.num_tokens
        if one.max_epochs is None and epochs > 1:
            what = "%s: read for %.2f epochs with total_tokens=%.4g; max_epochs is not set"
            logger.warning(what, part.name, epochs, mixture.total_tokens)
    tokenizer_name = mixture.tokenizer or str(mixing.folder / "tokenizer")
    # rewritten every time: this is fast if nothing else has changed
    text = datasheet(mixing.name, parts, total_tokens=mixture.total_tokens, tokenizer=tokenizer_name)
    write_atomically(mixing.folder / "datasheet.md", text)
    facts = {
        "train_data": " ".join(f"{part.weight:.6g} {part.prefix}" for part in parts),
        "valid_data": " ".join(f"{part.weight:.6g} {part.valid_prefix}" for part in parts),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer_name,
        "settings": mixture.model_dump(mode="json"),
    }
    write_json(mixing.folder / "mixture.json", facts)
    return facts


def _prepared(name: str, wanted: Preparation) -> _Shards | None:
    # errors that suggest --start-over should suggest starting over only this source
    try:
        manifest = prepare(wanted)
    except BadDocument:
        raise
    except ValueError as error:
        raise ValueError(str(error).replace("--start-over", f"--start-over-source {name}")) from error
    if manifest is None:
        return None
    folder, valid = wanted.data_dir / f"{wanted.output_name}_shuffled", manifest["valid_file"]
    names = [one["name"] for one in manifest["outputs"] if one["name"] != valid]
    return manifest, [folder / one for one in names], folder / valid


def _parts(
    mixing: Mixing, preparations: dict[str, Preparation], shards: dict[str, _Shards], tokenizer: TextTokenizer
) -> list[MixturePart]:
    settings, parts = PartSettings(tokenizer, append_eod=True), []

    def tokenize(stem: str, inputs: Sequence[Path]) -> tuple[dict[str, Any], Path]:
        prefix, key = tokenized_prefix(mixing.folder / stem), default_part_bytes(inputs)
        is_other = is_stale(prefix, inputs, settings=stage_settings(settings, key), is_folder=False)
        start_over = mixing.every.start_over or is_other
        return tokenize_files(inputs, prefix, settings, workers=mixing.workers, start_over=start_over), prefix

    for name, wanted in preparations.items():
        shuffled, train, valid = shards[name]
        # token files belong to the mixture: they are rebuilt when their shards or tokenizer change
        (tokenized, prefix), (_, valid_prefix) = tokenize(name, train), tokenize(f"{name}_valid", [valid])
        converted = read_json(mixing.every.data_dir / f"{wanted.output_name}/manifest.json", fix=MAKE_AGAIN)
        source = wanted.source()
        origin = str(source.path or source.description)
        if source.repository is not None:
            commit = read_json(raw_folder(source, wanted) / "manifest.json", fix=MAKE_AGAIN)["commit"]
            origin = f"{source.repository} at {commit}"
        facts = name, origin, source.licence, converted, shuffled, tokenized["num_tokens"]
        parts.append(MixturePart(*facts, train, prefix, valid_prefix))
    sources, total_weight = mixing.mixture.sources, sum(one.weight for one in mixing.mixture.sources)
    asked = [one.weight / total_weight for one in sources]
    tokens, limits = [part.num_tokens for part in parts], [one.max_epochs for one in sources]
    weights = effective_weights(asked, tokens, limits, mixing.mixture.total_tokens)
    return [replace(part, asked=a, weight=w) for part, a, w in zip(parts, asked, weights, strict=True)]
