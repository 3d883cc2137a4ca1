"""Prepares a dataset as shuffled shards in three resumable stages: download, convert, shuffle.

DATA_DIR/NAME_raw/                files from the Hub
DATA_DIR/NAME/                    NAME.chunk.00000.jsonl ..., datatrove/
DATA_DIR/NAME_shuffled/           NAME.chunk.00.jsonl ..., NAME.val.jsonl
"""

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from moe_exp.data.convert.convert import MAX_DEFAULT_TASKS, ConvertSettings, convert
from moe_exp.data.documents import check_apart, compression_ratio
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import Source, python_stdlib_documents, resolve_source
from moe_exp.data.execution import Execution, num_workers
from moe_exp.data.kinds import PARQUET_SUFFIX, is_compressed, total_bytes
from moe_exp.data.shuffle.shuffle import check_settings, shuffle_documents
from moe_exp.data.stage import check_free_disk, free_disk, is_older, is_stale, run_stage
from moe_exp.host.files import bytes_text, ending
from moe_exp.host.progress import print_summary

# Bytes of text per second and core, measured with bench/data/bench_convert.py and bench/data/bench_shuffle.py
# and rounded down. Only used for estimates.
_CONVERT_RATE = 50e6
_SHUFFLE_RATE = 80e6
# Chunks, shards, and the shuffle's scattered lines, which stay until the shards are complete.
_DISK_RATIO = 3.1
_NUM_SAMPLED = 8
_LARGE_BYTES = 50e9  # one process shuffles this in minutes


@dataclass(frozen=True)
class Preparation:
    """Settings of `moe-exp data prepare`.

    `shuffle`: keyword arguments for `shuffle_documents` (seed, num_shards, valid_fraction, memory_bytes).
    """

    name: str  # registered name, dataset on the Hub, file or folder; see `resolve_source`
    data_dir: Path = Path("data")  # parent of the created folders
    patterns: tuple[str, ...] = ()  # this and the next two replace the values registered for the source
    revision: str | None = None
    text_field: str | None = None
    settings: ConvertSettings = field(default_factory=ConvertSettings)  # the text field is the source's
    execution: Execution = field(default_factory=Execution)  # of the conversion and shuffle tasks
    shuffle: Mapping[str, Any] = field(default_factory=dict)
    shuffle_tasks: int | None = None  # default: 1; one per chunk on SLURM and Ray above 50 GB
    start_over: bool = False  # repeat the conversion and the shuffle
    download_again: bool = False  # repeat the download, the conversion and the shuffle
    output_name: str | None = None  # base name of chunk and shard folders and files (default: the source's)
    raw_name: str | None = None  # base name of the download folder (default: the source's)
    clamp_tasks: bool = False  # reduce the tasks to the number of files instead of raising an error

    def source(self) -> Source:
        """The source named `name`; ValueError if it does not exist."""
        options = {name: getattr(self, name) for name in ("patterns", "text_field", "revision")}
        return resolve_source(self.name, **options)


def prepare(wanted: Preparation) -> dict[str, Any] | None:
    """Runs the steps `download`, `convert` and `shuffle`. Skips finished steps. Raises the steps' errors.

    Returns:
        The manifest of the shuffled shards; None while SLURM jobs are active.
    """
    source = wanted.source()
    chunks, shuffled = _checked_folders(source, wanted)
    settings = replace(wanted.settings, text_field=source.text_field)
    # a repeated download may return different files, so all later steps are repeated
    start_over, raw = wanted.start_over or wanted.download_again, raw_folder(source, wanted)
    if source.is_embedded:
        inputs = [write_stdlib(raw, start_over=start_over)]
    else:
        try:
            inputs = download(source, raw, start_over=wanted.download_again)
        except ValueError as error:
            raise ValueError(str(error).replace("--start-over", "--download-again")) from error
    if wanted.clamp_tasks and settings.tasks:
        settings = replace(settings, tasks=min(settings.tasks, len(inputs)))
    # only before the conversion: afterwards most of the space is already in use
    if not chunks.exists():
        there = total_bytes(chunks.with_name(f"{chunks.name}.partial").glob("*.jsonl"))
        needed_bytes = round(_DISK_RATIO * expected_bytes(inputs))
        check_free_disk(wanted.data_dir, needed_bytes - there, "converting and shuffling")
    converted = convert(inputs, chunks, settings, wanted.execution, start_over=start_over)
    if converted is None:
        return None
    print_summary(f"converted: {chunks}", summary_rows(converted))
    outputs = [chunks / one["name"] for one in converted["outputs"]]
    # an earlier call with --start-over, or its last SLURM job, may have replaced the chunks
    if converted.get("starts_over") and (is_stale(shuffled, outputs) or is_older(shuffled, chunks)):
        start_over = True
    # a single task is fastest if one process needs only minutes
    is_large = wanted.execution.executor != "local" and total_bytes(outputs) > _LARGE_BYTES
    tasks = wanted.shuffle_tasks or (len(outputs) if is_large else 1)
    run = {"name": chunks.name, "tasks": tasks, "execution": wanted.execution if tasks > 1 else None}
    options: dict[str, Any] = {**run, **wanted.shuffle}
    return shuffle_documents(outputs, shuffled, start_over=start_over, **options)


def _checked_folders(source: Source, wanted: Preparation) -> tuple[Path, Path]:
    """Checks the shuffle settings and the folders for chunks and shards; returns these two folders."""
    # errors must come before hours of work, and before --start-over removes anything
    name = wanted.output_name or source.name
    made = wanted.data_dir / name, wanted.data_dir / f"{name}_shuffled"
    check_settings(name=name, **{key: value for key, value in wanted.shuffle.items() if key != "seed"})
    given = [*([source.path] if source.path else []), *wanted.settings.benchmark_files()]
    for folder in (*made, *(() if source.path else (raw_folder(source, wanted),))):
        check_apart(given, folder)
    return made


def raw_folder(source: Source, wanted: Preparation) -> Path:
    return wanted.data_dir / f"{wanted.raw_name or source.name}_raw"


def write_stdlib(folder: Path, *, start_over: bool = False) -> Path:
    """Writes Python's standard library to a JSONL file, with paths as ids. Returns the file's path."""
    settings = {"python": platform.python_version()}
    with run_stage("embed", folder, settings=settings, inputs=[], start_over=start_over) as stage:
        path = stage.folder / "python_stdlib.jsonl"
        if stage.manifest is None:
            with path.open("wb") as file:
                for name, text in python_stdlib_documents():
                    file.write(orjson.dumps({"text": text, "id": name}, option=orjson.OPT_APPEND_NEWLINE))
            stage.finish([path])
    return stage.output / path.name


def summary_rows(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Rows for the summary table of a conversion."""
    read, written = manifest["read"], manifest["written"]
    rows: dict[str, Any] = {"input files": len(manifest["inputs"]), "documents read": read["num_documents"]}
    rows |= {f"skipped: {reason}": number for reason, number in read["skipped"].items()}
    rows |= {f"filtered: {name}": tally["num_documents"] for name, tally in manifest["filtered"].items()}
    size = bytes_text(sum(one["bytes"] for one in manifest["outputs"]))
    text = bytes_text(written["num_text_bytes"])
    rows |= {"documents written": written["num_documents"], "text": text, "chunks": len(manifest["outputs"])}
    return rows | {"on disk": size, "seconds": manifest["seconds"]}


def plan(wanted: Preparation) -> None:
    """Prints what `prepare` would do; writes nothing. If the data are not downloaded yet, sizes and times
    are estimated from the registered size of the source.
    """
    source = wanted.source()
    folder, shuffled = _checked_folders(source, wanted)
    if source.is_embedded:
        num_files = 1
        raw_bytes = text_bytes = sum(len(text.encode()) for _, text in python_stdlib_documents())
    else:
        paths = download(source, raw_folder(source, wanted), dry_run=True, start_over=wanted.download_again)
        there, num_files = [path for path in paths if path.exists()], len(paths)
        # 0: unknown before the download
        raw_bytes = total_bytes(paths) if len(there) == num_files else source.num_bytes or 0
        # 2.5: typical size of JSONL relative to Parquet or .zst
        ratio = expected_bytes(there) / max(1, total_bytes(there)) if there else 2.5
        text_bytes = round(ratio * raw_bytes)
    num_tasks = wanted.settings.tasks or min(num_files, MAX_DEFAULT_TASKS)
    execution = wanted.execution
    at_once = num_workers(execution) if execution.executor == "local" else execution.workers
    # concurrent tasks: the time estimate is divided by it
    width = min(num_tasks, at_once or num_tasks)
    disk_bytes = (0 if source.path else raw_bytes) + _DISK_RATIO * text_bytes
    free = bytes_text(free_disk(wanted.data_dir))
    rows: dict[str, object] = {
        "input": f"{num_files:,} files, {_about(raw_bytes)}, in {source.path or raw_folder(source, wanted)}",
        "JSONL": _about(text_bytes),
        "disk": f"{_about(disk_bytes)} for download, chunks and shards; {free} free",
        f"convert to {folder}": f"{num_tasks} tasks, {execution.executor}, {width} concurrent: "
        + _duration(folder, text_bytes / _CONVERT_RATE / width),
        f"shuffle to {shuffled}": f"{wanted.shuffle.get('num_shards', 32)} shards and a validation file: "
        + _duration(shuffled, text_bytes / _SHUFFLE_RATE),
    }
    print_summary(f"To prepare: {source.name}", rows)


def _about(num_bytes: float) -> str:
    return f"about {bytes_text(num_bytes)}" if num_bytes else "size unknown until the download"


def _duration(folder: Path, seconds: float) -> str:
    if (folder / "manifest.json").exists():
        return "already done, if the settings are the same"
    if not seconds:
        return "time unknown until the download"
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"


def expected_bytes(inputs: Sequence[Path]) -> int:
    """Samples the files to estimate their total size as JSONL. BadDocument if a sampled file is damaged."""
    sampled = inputs[:: max(1, len(inputs) // _NUM_SAMPLED)][:_NUM_SAMPLED]
    num_bytes = 0.0
    for path in sampled:
        metadata = None
        if ending(path) == PARQUET_SUFFIX:
            import pyarrow
            import pyarrow.parquet

            with suppress(pyarrow.ArrowException, OSError):  # the conversion reports the error
                metadata = pyarrow.parquet.read_metadata(path)
        if metadata is None:
            num_bytes += path.stat().st_size * (compression_ratio(path) if is_compressed(path) else 1.0)
            continue
        # every row becomes a JSON object that repeats all column names
        names = sum(len(name) + len('"":,') for name in metadata.schema.names)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        num_bytes += metadata.num_rows * names + sum(group.total_byte_size for group in groups)
    return round(num_bytes / max(1, total_bytes(sampled)) * total_bytes(inputs))
