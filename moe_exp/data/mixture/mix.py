"""From the settings of a mixture to token files of each source, their weights, and a datasheet.

DATA_DIR/NAME_<source>/            chunks    DATA_DIR/NAME_<source>_shuffled/    shards
DATA_DIR/NAME/<source>_text_document.bin, .idx    <source>_valid_text_document.bin, .idx
DATA_DIR/NAME/datasheet.md    mixture.json    tokenizer/
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import Source, local_files
from moe_exp.data.kinds import BadDocument
from moe_exp.data.mixture.datasheet import Part, datasheet
from moe_exp.data.mixture.settings import Mixture, effective_weights
from moe_exp.data.prepare import Preparation, plan, prepare, raw_folder
from moe_exp.data.stage import MAKE_AGAIN, is_stale
from moe_exp.data.tasks.execution import Execution
from moe_exp.data.tokens.parts import PartSettings, default_part_bytes
from moe_exp.data.tokens.preprocess import stage_settings, tokenize_files, tokenized_prefix
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_named_tokenizer
from moe_exp.data.tokens.tokenizer_training import train_tokenizer
from moe_exp.host.files import read_json, write_atomically, write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixing:
    """How a mixture is made.

    Args:
        name: of the mixture and its folder.
        mixture: its settings.
        data_dir: gets the folders.
        execution: where conversions and shuffles run.
        shuffle: as of `Preparation`, besides seed, num_shards and valid_fraction.
        tasks: chunks of each source, see `ConvertSettings`.
        shuffle_tasks, start_over, download_again: as of `Preparation`.
        start_over_sources: names of the sources to make again.
        workers: processes that tokenize.
    """

    name: str
    mixture: Mixture
    data_dir: Path = Path("data")
    execution: Execution = field(default_factory=Execution)
    shuffle: Mapping[str, Any] = field(default_factory=dict)
    tasks: int | None = None
    shuffle_tasks: int | None = None
    start_over: bool = False
    start_over_sources: tuple[str, ...] = ()
    download_again: bool = False
    workers: int = 1

    @property
    def folder(self) -> Path:
        """Folder of the token files."""
        return self.data_dir / self.name

    def preparations(self) -> dict[str, Preparation]:
        """The preparation of each source, by the name of its files.

        Raises:
            ValueError: a source cannot be prepared so, or two have one name.
        """
        mixture = self.mixture
        same = {
            name: getattr(self, name) for name in ("data_dir", "execution", "shuffle_tasks", "download_again")
        }
        shuffle = {name: getattr(mixture, name) for name in ("seed", "num_shards", "valid_fraction")}
        found: dict[str, Preparation] = {}
        for number, one in enumerate(mixture.sources):
            try:
                wanted = Preparation(
                    one.source,
                    patterns=tuple(one.patterns),
                    revision=one.revision,
                    text_field=one.text_field,
                    settings=replace(one.conversion(), tasks=self.tasks),
                    shuffle={**self.shuffle, **shuffle},
                    clamp_tasks=True,
                    **same,
                )
                source = wanted.source()
                if source.path is not None:
                    local_files(source)
            except ValueError as error:
                raise ValueError(f"sources.{number}: {error}") from error
            name = one.name or source.name
            if name in found:
                rule = f"name={name}: is there twice"
                raise ValueError(f"sources.{number}: {rule}. Fix: give it a name of its own.")
            start_over = self.start_over or name in self.start_over_sources
            found[name] = replace(wanted, output_name=f"{self.name}_{name}", start_over=start_over)
        if unknown := set(self.start_over_sources) - set(found):
            rule = f"is not a source of {self.name}. Fix: give one of {', '.join(found)}"
            raise ValueError(f"start_over_source={min(unknown)}: {rule}.")
        # a folder of its own for what is downloaded, where several sources of one name want other files
        files: dict[str, set[Any]] = {}
        for source in (wanted.source() for wanted in found.values()):
            key = source.repository, source.revision, source.patterns, source.path, source.url
            files.setdefault(source.name, set()).add(key)
        for name, wanted in found.items():
            if len(files[wanted.source().name]) > 1:
                found[name] = replace(wanted, raw_name=f"{self.name}_{name}")
        return found

    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer that is given, or None if it is to be trained.

        Raises:
            ValueError: there is none of that name, or it has no end-of-document token.
        """
        if not self.mixture.tokenizer:
            return None
        options = {name: getattr(self.mixture, name) for name in ("eod_token", "prepend_bos")}
        tokenizer = load_named_tokenizer(self.mixture.tokenizer, **options)
        try:
            PartSettings(tokenizer, append_eod=True)
        except ValueError as error:
            raise ValueError(str(error).replace("--eod-token", "eod_token")) from error
        return tokenizer


def plan_mixture(mixing: Mixing) -> None:
    """Prints what each source needs, and writes nothing."""
    preparations = mixing.preparations()
    mixing.tokenizer()
    for wanted in preparations.values():
        plan(wanted)


@dataclass(frozen=True)
class _Shards:
    """Shuffled documents of a source: the manifest, the training files and the validation file."""

    manifest: Mapping[str, Any]
    train: Sequence[Path]
    valid: Path


def mix(mixing: Mixing) -> dict[str, Any] | None:
    """Prepares, tokenizes and weighs all sources; one that is done already is not made again.

    Returns:
        What mixture.json says: train_data and valid_data as TRAIN_DATA and VALID_DATA take them, vocab_size,
        tokenizer; None while SLURM jobs are under way.

    Raises:
        ValueError, OSError: as `prepare` and `tokenize_files`; `total_tokens` is more than the sources give.
    """
    mixture, preparations = mixing.mixture, mixing.preparations()
    tokenizer = mixing.tokenizer()
    found = {name: _prepared(name, wanted) for name, wanted in preparations.items()}
    shards = {name: one for name, one in found.items() if one is not None}
    if len(shards) < len(found):
        return None
    tokenizer = tokenizer or _train_tokenizer(mixing, [path for one in shards.values() for path in one.train])
    tokenizer.log_left_out()
    parts = _parts(mixing, preparations, shards, tokenizer)
    for part, one in zip(parts, mixture.sources, strict=True):
        if part.weight < 0.999 * part.asked:
            what = "%s: %.2f%% of the tokens, not %.2f%%: max_epochs"
            logger.warning(what, part.name, 100 * part.weight, 100 * part.asked)
        epochs = part.weight * (mixture.total_tokens or 0) / part.num_tokens
        if one.max_epochs is None and epochs > 1:
            what = "%s: read %.2f times in total_tokens=%.4g, and it has no max_epochs"
            logger.warning(what, part.name, epochs, mixture.total_tokens)
    tokenizer_name = mixture.tokenizer or str(mixing.folder / "tokenizer")
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
    """As `prepare`; its errors advise to start over this source alone."""
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
    return _Shards(manifest, [folder / one for one in names], folder / valid)


# Tokens belong to the mixture: they are made again if their shards or their tokenizer are others.


def _train_tokenizer(mixing: Mixing, inputs: Sequence[Path]) -> TextTokenizer:
    folder, vocab_size = mixing.folder / "tokenizer", mixing.mixture.vocab_size or 0
    known = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
    is_other = known.get("settings", {}).get("vocab_size", vocab_size) != vocab_size
    start_over = mixing.start_over or is_other or is_stale(folder, inputs)
    train_tokenizer(inputs, folder, vocab_size=vocab_size, start_over=start_over)
    return load_named_tokenizer(str(folder), eod_token=mixing.mixture.eod_token)


def _tokenize(
    mixing: Mixing, stem: str, inputs: Sequence[Path], tokenizer: TextTokenizer
) -> tuple[dict[str, Any], Path]:
    """Manifest and prefix of the tokens."""
    settings, prefix = PartSettings(tokenizer, append_eod=True), tokenized_prefix(mixing.folder / stem)
    key = stage_settings(settings, default_part_bytes(inputs))
    start_over = mixing.start_over or is_stale(prefix, inputs, settings=key, is_folder=False)
    return tokenize_files(inputs, prefix, settings, workers=mixing.workers, start_over=start_over), prefix


def _parts(
    mixing: Mixing,
    preparations: Mapping[str, Preparation],
    shards: Mapping[str, _Shards],
    tokenizer: TextTokenizer,
) -> list[Part]:
    parts = []
    for name, wanted in preparations.items():
        made = shards[name]
        tokenized, prefix = _tokenize(mixing, name, made.train, tokenizer)
        _, valid_prefix = _tokenize(mixing, f"{name}_valid", [made.valid], tokenizer)
        converted = read_json(mixing.data_dir / f"{wanted.output_name}/manifest.json", fix=MAKE_AGAIN)
        source = wanted.source()
        origin = _origin(source, raw_folder(source, wanted))
        manifests = converted, made.manifest, tokenized
        parts.append(Part(name, origin, source.licence, *manifests, made.train, prefix, valid_prefix))
    sources, total_weight = mixing.mixture.sources, sum(one.weight for one in mixing.mixture.sources)
    asked = [one.weight / total_weight for one in sources]
    tokens, limits = [part.num_tokens for part in parts], [one.max_epochs for one in sources]
    weights = effective_weights(asked, tokens, limits, mixing.mixture.total_tokens)
    return [replace(part, asked=a, weight=w) for part, a, w in zip(parts, asked, weights, strict=True)]


def _origin(source: Source, raw: Path) -> str:
    """Where the documents are from."""
    if source.repository is None:
        return str(source.path or source.description)
    commit = read_json(raw / "manifest.json", fix=MAKE_AGAIN)["commit"]
    return f"{source.repository} at {commit}"
