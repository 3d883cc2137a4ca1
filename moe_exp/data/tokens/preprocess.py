"""Tokenization of document files into .bin/.idx, reproducible and resumable after any crash.

The inputs are cut into parts (parts.py). Worker processes tokenize the parts in any order, and this process
joins them in input order. Tasks on many machines can do both steps instead (by_tasks.py).
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from moe_exp.config import setting_error
from moe_exp.data.documents import Tally, estimate_line_bytes, read_lines, text_of
from moe_exp.data.execution import Execution, Through, bytes_through, num_workers
from moe_exp.data.jobs import WorkerPool, check_no_jobs
from moe_exp.data.kinds import FILES, TextRule, is_stream, total_bytes
from moe_exp.data.shuffle.blocks import Slice
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, Unfinished, check_free_disk, free_disk, run_stage
from moe_exp.data.tokens import tokens as token_files
from moe_exp.data.tokens.by_tasks import BLOCK_BYTES, PASSES, TASKS, TaskTokens, run_tasks
from moe_exp.data.tokens.encoders import choose_backend, one_thread
from moe_exp.data.tokens.parts import (
    JOINED,
    JoinedParts,
    Part,
    PartEncoder,
    PartSettings,
    default_part_bytes,
    is_complete,
    plan_parts,
)
from moe_exp.data.tokens.ranged import read_ranges
from moe_exp.host.devices import num_cores
from moe_exp.host.files import bytes_text, read_json, replacing, write_json
from moe_exp.host.progress import print_summary, progress, progress_of

logger = logging.getLogger(__name__)

_SAMPLED_PLACES, _SAMPLE_BYTES, _DRY_RUN_SAMPLE_BYTES = 8, 2**16, 2**20
_INDEX_BYTES_PER_DOCUMENT = 20
_COPY_BYTES = 2**22


def tokenized_prefix(output_prefix: str | Path, json_key: str = "text") -> Path:
    """Prefix of the token files, named as in Megatron: PREFIX_text_document."""
    return Path(f"{output_prefix}_{json_key}_document")


def tokenize_files(
    inputs: Sequence[Path], output: Path, settings: PartSettings, *, workers: int = 1, **options: Any
) -> dict[str, Any]:
    """Calls `tokenize_documents` with `workers` worker processes; `workers=1` uses only this process."""
    return tokenize_documents(inputs, output, settings, execution=Execution(workers=workers), **options) or {}


def tokenize_documents(
    inputs: Sequence[Path], output: Path, settings: PartSettings, *, tasks: int | None = None,
    execution: Execution | None = None, backend: str = "auto", start_over: bool = False,
    part_bytes: int | None = None, block_bytes: int = BLOCK_BYTES,
) -> dict[str, Any] | None:  # fmt: skip
    """Writes `output`.bin, .idx and .manifest.json; each document becomes one sequence, in input order.

    The files do not depend on `tasks` or `execution`.

    Args:
        inputs: files of a kind listed in `moe_exp.data.kinds`.
        output: path without suffix, see `tokenized_prefix`.
        tasks: number of tasks that make and join parts; may change when resuming. With tasks, the tokens are
            stored on disk twice until the files are published. By default, worker processes on this machine
            do the work instead of tasks.
        execution: where the tasks run (default: this machine).
        backend: auto, gigatoken or tokenizers; `tokenizers` means the package that defines the tokenizer.
        start_over: replace existing files.
        part_bytes: input size per part (default: `default_part_bytes`).
        block_bytes: size of the blocks of the .bin; each block is copied and hashed by one task. If there are
            several blocks, the hash in the manifest is a hash of the block hashes.

    Returns:
        The manifest, or None while SLURM jobs are running. After the jobs end, repeat the call to publish the
        files.

    Raises:
        ValueError: if a setting or a line is invalid, there is too little free space, a part is damaged (the
            next call makes it again), or a worker process died.
        ChildProcessError: if a task's process died.
    """
    execution = execution or Execution()
    is_local = execution.executor == "local"
    if tasks is None and not is_local:
        fix = "set --tasks to the number of cores to use"
        raise setting_error("executor", execution.executor, "requires --tasks to be set", fix)
    if tasks is not None and tasks < 1:
        raise setting_error("tasks", tasks, "must be at least 1", "set --tasks to the number of cores")
    jobs_folder = output.with_name(f"{output.name}.partial") / "datatrove" / PASSES[-1]
    if start_over or is_local:
        check_no_jobs(jobs_folder)
    part_bytes = part_bytes or default_part_bytes(inputs)
    what: dict[str, Any] = {"settings": stage_settings(settings, part_bytes), "inputs": inputs}
    what |= {"is_folder": False, "suffixes": (".bin", ".idx")}
    with run_stage("tokenize", output, **what, start_over=start_over) as stage:
        if stage.manifest is not None:
            return stage.manifest
        # a run without tasks cannot be resumed with tasks, or vice versa
        if tasks is not None and (stage.folder / JOINED).exists():
            rule = f"cannot be set, because {stage.output} was started without --tasks"
            fix = "omit --tasks, or add --start-over"
            raise setting_error("tasks", tasks, rule, fix)
        if tasks is None and (stage.folder / TASKS).exists():
            before = read_json(stage.folder / TASKS, fix=MAKE_AGAIN)["tasks"]
            rule = f"must be {before}, because {stage.output} was started with {before} tasks"
            raise setting_error("tasks", "", rule, f"set --tasks {before}, or add --start-over")
        parts = plan_parts(inputs if tasks is None else stage.inputs, part_bytes)
        joined = JoinedParts(stage.folder, output, parts, settings)
        workers = usable(num_workers(execution)) if tasks is None else len(parts)
        chosen = _pinned_backend(stage, backend, inputs, settings, min(workers, len(parts)))
        hashes = None
        if tasks is None:
            joined.resume()
            _make_parts(_PartMaker(settings, chosen, stage.folder), workers, joined)
        else:
            job = TaskTokens(stage.folder, joined.bin_path, parts, settings, chosen, tasks, block_bytes)
            job.begin(jobs_folder)
            if all(job.place("joined", task).exists() for task in range(tasks)):  # perhaps published already
                joined.take_back()
            if (whole_hash := run_tasks(job, execution, stage)) is None:
                return None
            for part in parts:
                joined.add(joined.read_counts(part))
            hashes = {joined.bin_path: whole_hash}
        return _publish(stage, joined, backend=chosen, hashes=hashes)


def stage_settings(settings: PartSettings, part_bytes: int) -> dict[str, Any]:
    """Settings that, together with the inputs, determine the output files."""
    return settings.facts() | {"part_bytes": part_bytes}


def _publish(
    stage: CorpusStage, joined: JoinedParts, *, backend: str, hashes: Mapping[Path, str] | None
) -> dict[str, Any]:
    """Writes the index of the joined parts and finishes the stage; returns the manifest."""
    counts = joined.counts
    if not counts.tally.num_documents:
        raise setting_error(
            "input", stage.inputs[0], "the inputs have no documents", "name files that contain text"
        )
    joined.write_index()
    return stage.finish(
        [joined.bin_path, joined.idx_path], hashes=hashes, num_tokens=counts.num_tokens,
        num_eods=counts.num_eods, dtype=joined.settings.dtype.name, backend=backend,
        num_checked=counts.num_checked, num_rerouted=counts.num_rerouted, **counts.tally.to_json(),
        tokenizer=joined.settings.tokenizer.recorded(),
    )  # fmt: skip


def usable(workers: int) -> int:
    """The smaller of `workers` and the number of cores that this process may use."""
    available = num_cores()
    if workers > available:
        what = "%d workers requested, but starting only %d because this process has no more cores"
        logger.info(what, workers, available)
    return min(workers, available)


def _pinned_backend(
    stage: CorpusStage, requested: str, inputs: Sequence[Path], settings: PartSettings, num_apart: int
) -> str:
    """Backend of this tokenization; the first call chooses it with a sample, later calls return it."""
    path = stage.folder / "backend.json"
    if path.exists():
        begun: str = read_json(path, fix=MAKE_AGAIN)["backend"]
        if requested not in ("auto", begun):
            rule = f"cannot be used, because {stage.output} was started with {begun}"
            raise setting_error("backend", requested, rule, f"set --backend {begun}, or add --start-over")
        logger.info("backend: %s (as when %s was started)", begun, stage.output)
        return begun
    estimate = _Estimate(inputs, settings, requested, num_apart, _SAMPLE_BYTES)
    logger.info("backend: %s, %s", estimate.backend, estimate.reason)
    check_free_disk(stage.output.parent, estimate.disk_bytes, f"{stage.output.name}.bin (estimated)")
    write_json(path, {"backend": estimate.backend, "reason": estimate.reason})
    return estimate.backend


class _PartMaker:
    """Tokenizes parts, in this process or in a worker."""

    def __init__(self, settings: PartSettings, backend: str, folder: Path):
        self._settings, self._backend, self._folder = settings, backend, folder

    @cached_property
    def _encoder(self) -> PartEncoder:
        return PartEncoder(self._settings, self._backend)

    @cached_property
    def _through(self) -> Through:
        return Through(self._folder / "through", os.getpid())

    def __call__(self, part: Part) -> None:
        with one_thread():
            self._encoder.encode(part, self._folder, self._through.advance)
        self._through.end_file(part.num_bytes)


def _make_parts(maker: _PartMaker, workers: int, joined: JoinedParts) -> None:
    """Makes the missing parts and joins all parts in order as they become available."""
    folder = joined.folder
    for leftover in folder.glob("*.tmp"):
        leftover.unlink()
    rmtree(folder / "through", ignore_errors=True)
    missing = [part for part in joined.parts[joined.num_parts :] if not is_complete(part, folder)]
    total = sum(part.num_bytes for part in joined.parts)
    done = total - sum(part.num_bytes for part in missing)

    def describe(part: Part) -> tuple[str, str]:
        return f"tokenize: the process for part {part.index} of {part.path}", ""

    try:
        with (
            progress_of(lambda: done + bytes_through([folder / "through"]), "tokenizing", total),
            WorkerPool(maker, min(workers, len(missing)), preload=__name__, describe=describe) as pool,
        ):
            joined.append_complete()
            for _ in pool.run(missing):
                joined.append_complete()
    except ChildProcessError as error:  # keeps the parts: the next start of a training run resumes them
        raise Unfinished(str(error)) from error


# Estimates


class _Estimate:
    """Backend, tokens, disk space and time of a tokenization, estimated with sample texts."""

    def __init__(
        self, inputs: Sequence[Path], settings: PartSettings, backend: str, num_apart: int, sample_bytes: int
    ):
        sample = sample_texts(inputs, settings.json_key, sample_bytes, settings.rule)
        num_bytes = sum(len(text.encode()) for text in sample)
        # Measured with one thread, like the workers, and in CPU time, because others may use the machine.
        with one_thread():
            self.backend, self.reason, encode = choose_backend(settings.tokenizer, backend, sample)
            started = time.process_time()
            self.tokens_per_byte = (len(encode(sample)[0]) if sample else 0) / max(1, num_bytes)
            seconds = time.process_time() - started
        self.input_bytes = total_bytes(inputs)
        # An upper bound: JSONL also has escapes and other fields.
        text_bytes = estimate_line_bytes(inputs)
        num_documents = int(len(sample) * text_bytes / max(1, num_bytes + len(sample) - 1))
        num_added = settings.append_eod + (settings.tokenizer.bos_id is not None)
        self.num_tokens = int(text_bytes * self.tokens_per_byte) + num_documents * num_added
        bin_bytes = self.num_tokens * settings.dtype.itemsize
        # `num_apart` parts that are not joined yet and the one being joined also take disk space.
        share = min(1.0, (num_apart + 1) * default_part_bytes(inputs) / max(1, self.input_bytes))
        self.disk_bytes = int(bin_bytes * (1 + share)) + num_documents * _INDEX_BYTES_PER_DOCUMENT
        self.seconds_of_one = text_bytes / max(1.0, num_bytes / max(seconds, 1e-3))


def dry_run(
    inputs: Sequence[Path], output: Path, settings: PartSettings, *, workers: int, backend: str,
    by_tasks: bool = False,
) -> None:  # fmt: skip
    """Prints an estimate of tokens, disk space and time, and writes nothing. Raises ValueError if a setting
    is invalid or there is too little free space. `by_tasks`: whether tasks make all parts before any part
    is joined.
    """
    num_apart = len(plan_parts(inputs, default_part_bytes(inputs))) if by_tasks else workers
    estimate = _Estimate(inputs, settings, backend, num_apart, _DRY_RUN_SAMPLE_BYTES)
    made_by = settings.tokenizer
    rows = {
        "inputs": f"{len(inputs)} files, {bytes_text(estimate.input_bytes)}",
        "tokenizer": f"{made_by.name}, {made_by.vocab_size:,} tokens, EOD {made_by.eod_token}",
        "backend": f"{estimate.backend}: {estimate.reason}",
        "tokens": f"at most about {estimate.num_tokens:,} ({estimate.tokens_per_byte:.3f} per byte of text)",
        "disk": f"about {bytes_text(estimate.disk_bytes)}",
        "time": f"at most about {estimate.seconds_of_one / workers:,.0f} s with {workers} workers",
        "output": f"{output}.bin, {output}.idx",
    }
    print_summary("tokenize (dry run, estimated with a sample)", rows)
    check_free_disk(output.parent, estimate.disk_bytes, f"{output.name}.bin")


def sample_texts(inputs: Sequence[Path], json_key: str, num_bytes: int, rule: TextRule = FILES) -> list[str]:
    """Returns sample documents from the start and middle of a few inputs; skips invalid lines."""
    num_files = min(len(inputs), _SAMPLED_PLACES)
    parts = [
        Slice(path, 0, None) if is_stream(path) else Slice(path, start, path.stat().st_size)
        for path in (inputs[index * len(inputs) // num_files] for index in range(num_files))
        for start in (0, path.stat().st_size // 2)
    ]
    texts: list[str] = []
    for part in dict.fromkeys(parts):
        left = num_bytes // len(parts)
        for _, line in read_lines(part.path, *part.bounds(), text_field=json_key, rule=rule):
            with suppress(ValueError):  # an invalid line
                texts.append(text_of(line, json_key)[: num_bytes // len(parts)])
            left -= len(line)
            if left <= 0:
                break
    return texts


def summary_rows(manifest: dict[str, Any], seconds: float) -> dict[str, object]:
    """Rows of the table printed after a tokenization."""
    tally, num_tokens = Tally.from_json(manifest), manifest["num_tokens"]
    rows: dict[str, object] = {"documents": tally.num_documents, "tokens": num_tokens}
    rows["end-of-document tokens"] = manifest["num_eods"]
    rows["tokens per byte"] = f"{num_tokens / tally.num_text_bytes:.3f}"
    rows |= {"tokens/s": f"{num_tokens / max(seconds, 1e-3):,.0f}", "backend": manifest["backend"]}
    if manifest["backend"] == "gigatoken":
        rows["documents compared"] = manifest["num_checked"]
        rows["documents encoded by the slower package"] = manifest["num_rerouted"]
    return rows | {f"skipped: {reason}": number for reason, number in sorted(tally.skipped.items())}


# Merge of token files: the same files as one run over all inputs


def _ranges(prefix: Path, index: token_files.Index) -> Iterator[tuple[int, int]]:
    """Yields byte ranges that cover the sequences in index order, the order in which Megatron reads them."""
    if token_files.order_problem(prefix) is None:  # contiguous, so copy large pieces
        end = int(index.sizes.sum(dtype=np.int64)) * index.dtype.itemsize
        yield from ((start, min(start + _COPY_BYTES, end)) for start in range(0, end, _COPY_BYTES))
        return
    for pointer, size in zip(index.pointers, index.sizes, strict=True):
        yield int(pointer), int(pointer) + int(size) * index.dtype.itemsize


def merge_token_files(prefixes: Sequence[Path], output: Path, *, start_over: bool = False) -> dict[str, Any]:
    """Joins token files (also from other programs) in the order of `prefixes`; returns the manifest.

    Raises:
        ValueError: if a file is missing or damaged, dtypes differ, or `output` is one of `prefixes`.
    """
    indices, needed_bytes = _check_shards(prefixes, output)
    inputs = [Path(f"{prefix}{suffix}") for prefix in prefixes for suffix in (".bin", ".idx")]
    what: dict[str, Any] = {"settings": {}, "inputs": inputs, "is_folder": False, "start_over": start_over}
    with run_stage("merge-tokens", output, **what, suffixes=(".bin", ".idx")) as stage:
        if stage.manifest is not None:
            return stage.manifest
        check_free_disk(output.parent, needed_bytes, f"{output.name}.bin")
        paths = [stage.folder / f"{output.name}{suffix}" for suffix in (".bin", ".idx")]
        with replacing(paths[0]) as file, progress("merging", needed_bytes) as advance:
            for prefix, index in zip(prefixes, indices, strict=True):
                for chunk in read_ranges(str(prefix), _ranges(prefix, index)):
                    file.write(chunk)
                    advance(len(chunk))
        sizes = np.concatenate([index.sizes for index in indices])
        firsts = np.cumsum([0, *(len(index.sizes) for index in indices)])
        last = [first + index.documents[1:] for first, index in zip(firsts, indices, strict=False)]
        documents = np.concatenate([np.zeros(1, np.int64), *last])
        token_files.write_index(paths[1], sizes, indices[0].dtype, documents)
        first = token_files.manifest_of(str(prefixes[0]))
        facts = {name: token_files.tokenizer_fact(first, name) for name in ("vocab_size", "eod_id")}
        known: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
        if not token_files.other_tokenizer(map(str, prefixes)):
            known["tokenizer"] = token_files.tokenizer_facts(first)
        known |= {"num_documents": sum(map(len, last)), "num_tokens": int(sizes.sum(dtype=np.int64))}
        return stage.finish(paths, **known, dtype=indices[0].dtype.name)


def merge_dry_run(prefixes: Sequence[Path], output: Path) -> None:
    """Prints the size of a merge and writes nothing. Raises the errors of `merge_token_files`."""
    indices, needed_bytes = _check_shards(prefixes, output)
    rows = {
        "inputs": f"{len(prefixes)} pairs of .bin and .idx, tokens as {indices[0].dtype.name}",
        "documents": sum(len(index.documents) - 1 for index in indices),
        "tokens": sum(map(token_files.bin_idx_tokens, prefixes)),
        "disk": f"{bytes_text(needed_bytes)} of {bytes_text(free_disk(output.parent))} free",
        "output": f"{output}.bin, {output}.idx",
    }
    print_summary("merge (dry run)", rows)
    check_free_disk(output.parent, needed_bytes, f"{output.name}.bin")


def _check_shards(prefixes: Sequence[Path], output: Path) -> tuple[list[token_files.Index], int]:
    """Checks the shards; returns their indices and total size in bytes."""
    for prefix in prefixes:
        if wrong := token_files.bin_idx_problem(prefix, in_order=False):
            raise setting_error("merge", prefix, wrong, "tokenize this shard again")
        if prefix.absolute() == output.absolute():
            rule = "must not be one of the shards"
            raise setting_error("output_prefix", output, rule, "set another prefix")
    indices = [token_files.read_index(prefix) for prefix in prefixes]
    dtypes = {index.dtype.name: prefix for index, prefix in zip(indices, prefixes, strict=True)}
    if len(dtypes) > 1:
        places = " and ".join(f"{dtype} in {prefix}" for dtype, prefix in dtypes.items())
        fix = "merge only shards tokenized with the same tokenizer"
        raise setting_error("merge", prefixes[0], f"dtypes differ: tokens are stored as {places}", fix)
    if wrong := token_files.other_tokenizer(map(str, prefixes)):
        logger.warning("merge: %s", wrong)
    num_tokens = sum(map(token_files.bin_idx_tokens, prefixes))
    index_bytes = sum(Path(f"{prefix}.idx").stat().st_size for prefix in prefixes)
    return indices, num_tokens * indices[0].dtype.itemsize + index_bytes
