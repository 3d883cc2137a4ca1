"""From a dataset's name to shuffled shards: download, convert, shuffle, each a stage of its own that goes on where it was stopped.

DATA_DIR/NAME_download/           files of the hub
DATA_DIR/NAME/                    NAME.chunk.00000.jsonl ..., datatrove/
DATA_DIR/NAME_shuffled/           NAME.chunk.00.jsonl ..., NAME.val.jsonl
"""

from __future__ import annotations

import logging
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from rich import filesize

from moe_exp.data.convert import ConvertSettings, convert, sort_inputs
from moe_exp.data.datatrove_jobs import Execution, num_workers
from moe_exp.data.datatrove_steps import PARQUET_SUFFIX
from moe_exp.data.hub import download
from moe_exp.data.progress import print_summary
from moe_exp.data.shuffle import shuffle
from moe_exp.data.sources import Source, python_stdlib_documents, resolve_source
from moe_exp.data.stage import check_free_disk, run_stage

logger = logging.getLogger(__name__)

STEPS = ("download", "convert", "shuffle")

# Bytes of text a second and core, measured with bench/bench_convert.py and bench/bench_shuffle.py, rounded down: for estimates alone.
_CONVERT_RATE = 30e6
_SHUFFLE_RATE = 80e6
_NUM_SAMPLED = 8
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and where.

    Args:
        name: registered name, dataset of the hub, file or folder; see `moe_exp.data.sources.resolve_source`.
        data_dir: gets the folders.
        patterns: files of the dataset, in place of its own patterns.
        settings: what is kept; its text field None or "" is the source's.
        execution: where the conversion runs.
        shuffle: keyword arguments of `moe_exp.data.shuffle.shuffle`: seed, num_shards, memory_bytes and so on.
        start_over: make this step and those after it again.
    """

    name: str
    data_dir: Path
    patterns: tuple[str, ...] = ()
    settings: ConvertSettings = field(default_factory=ConvertSettings)
    execution: Execution = field(default_factory=Execution)
    shuffle: Mapping[str, Any] = field(default_factory=dict)
    start_over: str | None = None

    def starts_over(self, step: str) -> bool:
        """Whether `step` is to be made again."""
        return self.start_over is not None and STEPS.index(step) >= STEPS.index(self.start_over)


def prepare(wanted: Preparation) -> dict[str, Any] | None:
    """Runs the steps, those that are done already for nothing, and prints a summary.

    Returns:
        The manifest of the shuffled shards; None while SLURM jobs of the conversion are on their way.

    Raises:
        ValueError, OSError: as `download`, `convert` and `shuffle`.
    """
    source = _source(wanted)
    settings = replace(wanted.settings, text_field=source.text_field)
    chunks = wanted.data_dir / source.name
    inputs = _inputs(source, wanted)
    if not chunks.exists():
        check_free_disk(wanted.data_dir, 3 * expected_bytes(inputs), "converting and shuffling")
    converted = convert(inputs, chunks, settings, wanted.execution, start_over=wanted.starts_over("convert"))
    if converted is None:
        return None
    print_summary(f"convert {source.name}", summary_rows(converted))
    outputs = [chunks / one["name"] for one in converted["outputs"]]
    shuffled = wanted.data_dir / f"{source.name}_shuffled"
    return shuffle(outputs, shuffled, name=source.name, start_over=wanted.starts_over("shuffle"), **wanted.shuffle)


def _source(wanted: Preparation) -> Source:
    return resolve_source(wanted.name, patterns=wanted.patterns, text_field=wanted.settings.text_field or None)


def _inputs(source: Source, wanted: Preparation) -> list[Path]:
    folder = wanted.data_dir / f"{source.name}_download"
    if source.repository is None and source.path is None:
        return [write_stdlib(folder, start_over=wanted.starts_over("download"))]
    return sort_inputs(download(source, folder, start_over=wanted.starts_over("download")))


def write_stdlib(folder: Path, *, start_over: bool = False) -> Path:
    """Writes the standard library's sources as a JSONL file, ids are paths, and returns it."""
    with run_stage("embed", folder, settings={"python": platform.python_version()}, inputs=[], start_over=start_over) as stage:
        path = stage.folder / "python_stdlib.jsonl"
        if not stage.was_done:
            with path.open("wb") as file:
                for name, text in python_stdlib_documents():
                    file.write(orjson.dumps({"text": text, "id": name}, option=orjson.OPT_APPEND_NEWLINE))
            stage.finish_folder([path])
    return stage.output / path.name


def summary_rows(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Of a conversion, for a table."""
    read, written = manifest["read"], manifest["written"]
    rows: dict[str, object] = {"input files": len(manifest["inputs"]), "documents read": read["num_documents"]}
    rows |= {f"skipped: {reason}": number for reason, number in read["skipped"].items()}
    rows |= {f"filtered: {name}": tally["num_documents"] for name, tally in manifest["filtered"].items()}
    size = sum(one["bytes"] for one in manifest["outputs"])
    rows |= {"documents written": written["num_documents"], "text": filesize.decimal(written["num_text_bytes"])}
    return rows | {"chunks": len(manifest["outputs"]), "on disk": filesize.decimal(size), "seconds": manifest["seconds"]}


def plan(wanted: Preparation) -> None:
    """Prints what `prepare` would do, with disk and time; writes nothing. Without the files it goes by the size the source tells."""
    source = _source(wanted)
    folder = wanted.data_dir / f"{source.name}_download"
    if source.repository is None and source.path is None:
        files, text_bytes = 1, sum(len(text.encode()) for _, text in python_stdlib_documents())
        download_bytes = text_bytes
    else:
        paths = download(source, folder, dry_run=True, start_over=wanted.starts_over("download"))
        there = [path for path in paths if path.exists()]
        files, download_bytes = len(paths), _total(paths, source)
        text_bytes = round(expected_bytes(there) * download_bytes / max(1, _size(there))) if there else round(2.5 * download_bytes)
    num_tasks = wanted.settings.tasks or min(files, 64)
    width = num_workers(wanted.execution) if wanted.execution.executor == "local" else wanted.execution.workers or num_tasks
    rows: dict[str, object] = {
        "input": f"{files:,} files, {filesize.decimal(download_bytes)}" + ("" if source.path else f", in {folder}"),
        "text, about": filesize.decimal(text_bytes),
        "disk needed": filesize.decimal((0 if source.path else download_bytes) + 3 * text_bytes)
        + " (download, chunks, shards and buckets)",
        f"convert to {wanted.data_dir / source.name}": f"{num_tasks} tasks, {wanted.execution.executor}, {min(width, num_tasks)} at a time: "
        f"about {_duration(text_bytes / _CONVERT_RATE / min(width, num_tasks))}",
        f"shuffle to {wanted.data_dir / source.name}_shuffled": f"{wanted.shuffle.get('num_shards', 32)} shards and a validation file: "
        f"about {_duration(text_bytes / _SHUFFLE_RATE)}",
    }
    print_summary(f"prepare {source.name}: what would be done", rows)


def _total(paths: Sequence[Path], source: Source) -> int:
    return _size(paths) if all(path.exists() for path in paths) else source.num_bytes or 0


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def expected_bytes(inputs: Sequence[Path]) -> int:
    """About how many bytes of JSONL the files become; a few of them are looked into."""
    step = max(1, len(inputs) // _NUM_SAMPLED)
    sampled = inputs[::step][:_NUM_SAMPLED]
    ratio = sum(_expanded_bytes(path) for path in sampled) / max(1, _size(sampled))
    return round(ratio * _size(inputs))


def _expanded_bytes(path: Path) -> float:
    if path.suffix == PARQUET_SUFFIX:
        return _parquet_text_bytes(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    if path.suffix == ".gz" and head:
        return size * len(zlib.decompressobj(wbits=31).decompress(head)) / len(head)
    if path.suffix == ".zst" and head:
        import zstandard

        return size * len(zstandard.ZstdDecompressor().decompressobj().decompress(head)) / len(head)
    return size


def _parquet_text_bytes(path: Path) -> float:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):  # the conversion will name it
        return path.stat().st_size
    names = sum(len(name) + len('"":,') for name in metadata.schema.names)
    return metadata.num_rows * names + sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
