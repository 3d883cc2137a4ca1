"""From the settings of a mixture to token files of each source, their weights, and a datasheet.

DATA_DIR/NAME_<source>/            chunks    DATA_DIR/NAME_<source>_shuffled/    shards
DATA_DIR/NAME/<source>_text_document.bin, .idx    <source>_valid_text_document.bin, .idx
DATA_DIR/NAME/datasheet.md    mixture.json    tokenizer/
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import local_files
from moe_exp.data.kinds import BadDocument
from moe_exp.data.mixture.datasheet import Part, datasheet
from moe_exp.data.mixture.settings import MixedSource, Mixture, effective_weights
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
        names = ("seed", "num_shards", "valid_fraction")
        shuffle = {**self.shuffle, **{name: getattr(self.mixture, name) for name in names}}
        found: dict[str, Preparation] = {}
        for number, one in enumerate(self.mixture.sources):
            try:
                wanted = self._preparation(one, shuffle)
                source = wanted.source()
                if source.path is not None:
                    local_files(source)
            except ValueError as error:
                raise ValueError(f"sources.{number}: {error}") from error
            name = one.name or source.name
            if name in found:
                rule = f"name={name}: is there twice"
                raise ValueError(f"sources.{number}: {rule}. Fix: give it a name of its own.")
            found[name] = replace(wanted, start_over=self.start_over or name in self.start_over_sources)
        if unknown := set(self.start_over_sources) - set(found):
            rule = f"is not a source of {self.name}. Fix: give one of {', '.join(found)}"
            raise ValueError(f"start_over_source={min(unknown)}: {rule}.")
        return self._with_raw_folders(found)

    def _with_raw_folders(self, found: dict[str, Preparation]) -> dict[str, Preparation]:
        """A folder of its own for what is downloaded, where several sources of one name want other files."""
        files: dict[str, set[Any]] = {}
        for wanted in found.values():
            source = wanted.source()
            key = source.repository, source.revision, source.patterns, source.path, source.url
            files.setdefault(source.name, set()).add(key)
        return {
            name: replace(wanted, raw_name=f"{self.name}_{name}")
            if len(files[wanted.source().name]) > 1
            else wanted
            for name, wanted in found.items()
        }

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

    def _preparation(self, one: MixedSource, shuffle: Mapping[str, Any]) -> Preparation:
        wanted = Preparation(
            one.source,
            data_dir=self.data_dir,
            patterns=tuple(one.patterns),
            revision=one.revision,
            text_field=one.text_field,
            settings=replace(one.conversion(), tasks=self.tasks),
            execution=self.execution,
            shuffle=shuffle,
            shuffle_tasks=self.shuffle_tasks,
            download_again=self.download_again,
            clamp_tasks=True,
        )
        name = one.name or wanted.source().name
        return replace(wanted, output_name=f"{self.name}_{name}")


def plan_mixture(mixing: Mixing) -> None:
    """Prints what each source needs, and writes nothing."""
    preparations = mixing.preparations()
    mixing.tokenizer()
    for wanted in preparations.values():
        plan(wanted)


def mix(mixing: Mixing) -> dict[str, Any] | None:
    """Prepares, tokenizes and weighs all sources; one that is done already is not made again.

    Returns:
        What mixture.json says: train_data and valid_data as TRAIN_DATA and VALID_DATA take them, vocab_size,
        tokenizer; None while SLURM jobs are under way.

    Raises:
        ValueError, OSError: as `prepare` and `tokenize_files`; `total_tokens` is more than the sources give.
    """
    preparations = mixing.preparations()
    tokenizer = mixing.tokenizer()
    made = {name: _prepare(name, wanted) for name, wanted in preparations.items()}
    if not all(made.values()):
        return None
    shuffled = {name: manifest for name, manifest in made.items() if manifest}
    tokenizer_name = mixing.mixture.tokenizer or str(mixing.folder / "tokenizer")
    tokenizer = tokenizer or _train_tokenizer(mixing, shuffled)
    tokenizer.log_left_out()
    tokenized = {name: _tokenize(mixing, name, shuffled[name], tokenizer) for name in shuffled}
    parts = _parts(mixing, preparations, shuffled, tokenized)
    for part in parts:
        if part.weight < 0.999 * part.asked:
            what = "%s: %.2f%% of the tokens, not %.2f%%: max_epochs"
            logger.warning(what, part.name, 100 * part.weight, 100 * part.asked)
    total_tokens = mixing.mixture.total_tokens
    for part, one in zip(parts, mixing.mixture.sources, strict=True):
        epochs = part.weight * (total_tokens or 0) / part.num_tokens
        if one.max_epochs is None and epochs > 1:
            what = "%s: read %.2f times in total_tokens=%.4g, and it has no max_epochs"
            logger.warning(what, part.name, epochs, total_tokens)
    text = datasheet(mixing.name, parts, total_tokens=total_tokens, tokenizer=tokenizer_name)
    write_atomically(mixing.folder / "datasheet.md", text)
    facts = {
        "train_data": " ".join(f"{part.weight:.6g} {part.prefix}" for part in parts),
        "valid_data": " ".join(f"{part.weight:.6g} {part.valid_prefix}" for part in parts),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer_name,
        "settings": mixing.mixture.model_dump(mode="json"),
    }
    write_json(mixing.folder / "mixture.json", facts)
    return facts


def _prepare(name: str, wanted: Preparation) -> dict[str, Any] | None:
    """As `prepare`; its errors advise to start over this source alone."""
    try:
        return prepare(wanted)
    except BadDocument:
        raise
    except ValueError as error:
        raise ValueError(str(error).replace("--start-over", f"--start-over-source {name}")) from error


def _shards(mixing: Mixing, name: str, manifest: Mapping[str, Any]) -> tuple[list[Path], Path]:
    """Training files, and the validation file."""
    folder = mixing.data_dir / f"{mixing.name}_{name}_shuffled"
    valid = manifest["valid_file"]
    return [folder / one["name"] for one in manifest["outputs"] if one["name"] != valid], folder / valid


# Tokens belong to the mixture: they are made again if their shards or their tokenizer are others.


def _train_tokenizer(mixing: Mixing, shuffled: Mapping[str, Mapping[str, Any]]) -> TextTokenizer:
    folder = mixing.folder / "tokenizer"
    inputs = [path for name, manifest in shuffled.items() for path in _shards(mixing, name, manifest)[0]]
    vocab_size = mixing.mixture.vocab_size or 0
    known = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else {}
    is_other = known.get("settings", {}).get("vocab_size", vocab_size) != vocab_size
    start_over = mixing.start_over or is_other or is_stale(folder, inputs)
    train_tokenizer(inputs, folder, vocab_size=vocab_size, start_over=start_over)
    return load_named_tokenizer(str(folder), eod_token=mixing.mixture.eod_token)


def _tokenize(
    mixing: Mixing, name: str, manifest: Mapping[str, Any], tokenizer: TextTokenizer
) -> tuple[dict[str, Any], Path, Path]:
    """Manifest and prefix of the training tokens, and prefix of the validation tokens."""
    train, valid = _shards(mixing, name, manifest)
    settings = PartSettings(tokenizer, append_eod=True)
    prefixes = [tokenized_prefix(mixing.folder / stem) for stem in (name, f"{name}_valid")]
    made = []
    for inputs, prefix in zip((train, [valid]), prefixes, strict=True):
        key = stage_settings(settings, default_part_bytes(inputs))
        is_other = is_stale(prefix, inputs, settings=key, is_folder=False)
        start_over = mixing.start_over or is_other
        made.append(tokenize_files(inputs, prefix, settings, workers=mixing.workers, start_over=start_over))
    return made[0], prefixes[0], prefixes[1]


def _parts(
    mixing: Mixing,
    preparations: Mapping[str, Preparation],
    shuffled: Mapping[str, Mapping[str, Any]],
    tokenized: Mapping[str, tuple[dict[str, Any], Path, Path]],
) -> list[Part]:
    mixture = mixing.mixture
    asked = [one.weight / sum(each.weight for each in mixture.sources) for one in mixture.sources]
    tokens = [int(manifest["num_tokens"]) for manifest, _, _ in tokenized.values()]
    limits = [one.max_epochs for one in mixture.sources]
    weights = effective_weights(asked, tokens, limits, mixture.total_tokens)
    parts = []
    for number, (name, wanted) in enumerate(preparations.items()):
        manifest, prefix, valid_prefix = tokenized[name]
        converted = read_json(mixing.data_dir / f"{mixing.name}_{name}/manifest.json", fix=MAKE_AGAIN)
        source, licence = _origin(wanted)
        shards, _ = _shards(mixing, name, shuffled[name])
        steps = converted, shuffled[name], manifest
        parts.append(
            Part(name, source, licence, *steps, shards, prefix, valid_prefix, asked[number], weights[number])
        )
    return parts


def _origin(wanted: Preparation) -> tuple[str, str]:
    """Where the documents are from, and their licence."""
    source = wanted.source()
    if source.repository is None:
        return str(source.path or source.description), source.licence
    manifest = read_json(raw_folder(source, wanted) / "manifest.json", fix=MAKE_AGAIN)
    return f"{source.repository} at {manifest['commit']}", source.licence
