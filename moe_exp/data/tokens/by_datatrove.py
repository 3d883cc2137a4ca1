"""Tokenizing by datatrove, for clusters that run its executors: a task per range of shards, then merged into
one .bin and .idx.

datatrove's reader drops lines that it cannot parse; the documents come from ours, which stops. Its tokenizer
reads special tokens in a text as such and takes 65,500 to 65,536 tokens for uint16; both are set here as
everywhere in this package. The bytes are those of `tokenize_files`; the CPU is that of an `encode_batch`
loop. Every task counts and hashes what it reads and what it writes, and its files are read back and compared
with that before they are merged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moe_exp.config import problem
from moe_exp.data.documents import Tally, read_lines, skip_or_raise, text_of
from moe_exp.data.stage import run_stage
from moe_exp.data.tokens.merge import merge_token_files
from moe_exp.data.tokens.parts import PartCounts, PartSettings
from moe_exp.data.tokens.tokenizer import special_token_reason
from moe_exp.data.tokens.tokens import read_index
from moe_exp.host.files import write_json
from moe_exp.host.slurm_queue import job_environment

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "slurm", "ray")

_BATCH_DOCUMENTS = 1000  # datatrove's default of 10,000 takes 4.6 GB
_READ_BYTES = 2**22
# folder: a call that looks how far SLURM's tasks are clears the working folder of temporary .json files
_COUNTS = "counts"


def tokenize_by_datatrove(
    inputs: Sequence[Path],
    output: Path,
    settings: PartSettings,
    *,
    executor: str,
    tasks: int,
    workers: int = 1,
    slurm: Mapping[str, Any] | None = None,
    start_over: bool = False,
) -> dict[str, Any] | None:
    """Runs datatrove's tokenizer in `output`.datatrove/ and merges what the tasks make; returns the manifest.

    With SLURM it submits the tasks and returns None; called again with the same arguments when they are done,
    it merges.

    Args:
        inputs: .jsonl, .jsonl.gz and .jsonl.zst files; task r of T reads a contiguous range of them, so that
            their order stays.
        output: path without suffix.
        settings: how a text becomes tokens; the tokenizer must be a tokenizer.json.
        executor: local, slurm or ray.
        tasks: at most as many as inputs.
        workers: tasks at a time, of SLURM and Ray. Local tasks run one after the other: datatrove's local
            pool waits forever for a worker that died. On one machine `tokenize_files` is the way.
        slurm: arguments of datatrove's SlurmPipelineExecutor besides these: `partition` and `time` at least.
        start_over: remove what is there.

    Raises:
        ValueError: a setting is wrong; a line is no document; tasks failed; what a task has written is not
            what it has read.
    """
    _check(inputs, settings, executor, tasks, slurm)
    key = {
        "tokenizer": settings.tokenizer.facts(),
        "json_key": settings.json_key,
        "append_eod": settings.append_eod,
        "tasks": tasks,
    }
    folder = output.with_name(output.name + ".datatrove")
    with run_stage(
        "tokenize-by-datatrove",
        folder,
        settings=key | {"skip_bad": settings.skip_bad},
        inputs=inputs,
        start_over=start_over,
    ) as stage:
        if not stage.was_done:
            tokenizer_path = stage.folder / "tokenizer.json"
            if not (stage.folder / "submitted").exists():  # tasks may be reading it
                tokenizer_path.write_bytes(settings.tokenizer.content)
                (stage.folder / _COUNTS).mkdir(exist_ok=True)
            pipeline = [
                _step(_Task(stage.folder, [path.absolute() for path in inputs], settings), tokenizer_path)
            ]
            run = _executor(
                executor,
                pipeline,
                tasks=tasks,
                workers=workers,
                logging_dir=str(stage.folder / "datatrove"),
                slurm=slurm,
            )
            if not _is_done(run, stage.folder, executor, tasks):
                return None
            counts, hashes = _checked_counts(stage.folder, settings, tasks)
            outputs = [path for bin_path in hashes for path in (bin_path, bin_path.with_suffix(".idx"))]
            stage.finish_folder(outputs, hashes=hashes, all_tasks=counts.to_json())
    counts = PartCounts.from_json((stage.manifest or {})["all_tasks"])
    tally = counts.tally.to_json()
    facts = {"num_eods": counts.num_eods} | {
        name: tally[name] for name in ("num_text_bytes", "text_hash", "skipped")
    }
    facts |= {"vocab_size": settings.tokenizer.vocab_size, "eod_id": settings.tokenizer.eod_id}
    # A task of blank lines alone has empty files, which are no token files.
    filled = [
        prefix
        for prefix in (_prefix(folder, rank) for rank in range(tasks))
        if Path(f"{prefix}.bin").stat().st_size
    ]
    return merge_token_files(filled, output, start_over=start_over, facts=facts)


def _prefix(folder: Path, rank: int) -> Path:
    return folder / f"{rank:05d}_tokens"


def _is_done(run: Any, folder: Path, executor: str, tasks: int) -> bool:
    """Runs or submits the tasks, unless that was done; whether they are done. False with SLURM alone."""
    submitted = folder / "submitted"
    if not submitted.exists():
        run.run()
    num_left = sum(not run.is_rank_completed(rank) for rank in range(tasks))
    if not num_left:
        return True
    if executor != "slurm":  # Ray's returns without an error then
        raise ValueError(
            f"{folder / 'datatrove'}: {num_left} of {tasks} tasks failed. Fix: see their logs there, and call"
            " it again."
        )
    submitted.touch()
    logger.info("%d of %d tasks are not done. Call it again when they are, to merge.", num_left, tasks)
    logger.info(
        "Should they have failed (see %s): remove %s and call it again.", folder / "datatrove", submitted
    )
    return False


def _check(
    inputs: Sequence[Path], settings: PartSettings, executor: str, tasks: int, slurm: Mapping[str, Any] | None
) -> None:
    if executor not in EXECUTORS:
        raise ValueError(
            problem("executor", executor, f"must be one of {', '.join(EXECUTORS)}", "choose one of them")
        )
    if not 1 <= tasks <= len(inputs):
        raise ValueError(
            problem(
                "tasks",
                tasks,
                f"a task reads whole files, and there are {len(inputs)}",
                f"give 1 to {len(inputs)}",
            )
        )
    if settings.tokenizer.kind != "huggingface":
        rule = f"datatrove tokenizes with a tokenizer.json, {settings.tokenizer.name} is none"
        raise ValueError(problem("executor", executor, rule, "leave it out"))
    if executor == "slurm" and not {"partition", "time"} <= set(slurm or {}):
        raise ValueError(
            problem(
                "executor",
                executor,
                "SLURM needs a partition and a time limit",
                "give --slurm-partition and --slurm-time",
            )
        )


def _executor(name: str, pipeline: list[Any], *, slurm: Mapping[str, Any] | None, **how: Any) -> Any:
    if name == "slurm":
        from datatrove.executor import SlurmPipelineExecutor

        return SlurmPipelineExecutor(
            pipeline, job_name="tokenize", env_command=job_environment(), **how, **(slurm or {})
        )
    if name == "ray":
        from datatrove.executor import RayPipelineExecutor

        return RayPipelineExecutor(pipeline, **how)
    from datatrove.executor import LocalPipelineExecutor

    return LocalPipelineExecutor(pipeline, **how | {"workers": 1})


@dataclass(frozen=True)
class _Task:
    """What is the same for all tasks; travels to them by pickle."""

    folder: Path
    inputs: list[Path]
    settings: PartSettings

    def documents(self, rank: int, world_size: int, read: Tally) -> Iterator[tuple[Path, int, str]]:
        """File, line and text of a task's documents, counted into `read`."""
        for path in self.inputs[
            rank * len(self.inputs) // world_size : (rank + 1) * len(self.inputs) // world_size
        ]:
            for number, line in read_lines(path):
                try:
                    text = text_of(line, self.settings.json_key)
                except ValueError as error:
                    skip_or_raise(path, number, str(error), read, skip_bad=self.settings.skip_bad)
                    continue
                read.add(text.encode())
                yield path, number, text

    def run(self, step: Any, rank: int, world_size: int) -> None:
        """Tokenizes a task's documents by datatrove's `step`, and writes its counts last.

        Raises:
            BadDocument: a line is no document.
            ValueError: what is written is not what was read.
        """
        from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
        from datatrove.utils.batching import batched

        tokenizer, read, counts, digest = self.settings.tokenizer, Tally(), PartCounts(), xxhash.xxh3_128()
        special_tokens, prefix = tokenizer.special_tokens(), _prefix(self.folder, rank)
        is_special = np.zeros(tokenizer.vocab_size, bool)
        is_special[list(special_tokens)] = True
        file = MegatronTokenizedFile(step.output_folder, prefix.name, token_size=step.token_size)
        for batch in batched(self.documents(rank, world_size, read), _BATCH_DOCUMENTS):
            with step.track_time(unit="batch"):
                encodings = step.tokenizer.encode_batch([text for _, _, text in batch])
            for (path, number, text), encoding in zip(batch, encodings, strict=True):
                ids = np.array(encoding.ids, self.settings.dtype)
                found = is_special[ids[: len(ids) - self.settings.append_eod]]
                if found.any():
                    reason = special_token_reason(special_tokens[int(ids[found.argmax()])])
                    skip_or_raise(path, number, reason, read, skip_bad=self.settings.skip_bad)
                    read.take_back(text.encode())
                    continue
                file.write(ids)
                digest.update(ids.data)
                counts.tally.add(text.encode())
                counts.num_tokens += len(ids)
                counts.num_eods += (
                    int(np.count_nonzero(ids == tokenizer.eod_id)) if tokenizer.eod_id is not None else 0
                )
        file.close()
        step.stat_update("tokens", value=counts.num_tokens)
        counts.tally.skipped = read.skipped
        if counts.tally != read:
            raise ValueError(f"{prefix}: {counts.tally} was written, and {read} was read. Fix: report it.")
        counts.token_hash = digest.hexdigest()
        write_json(self.folder / _COUNTS / f"{rank:05d}.json", counts.to_json())


def _step(task: _Task, tokenizer_path: Path) -> Any:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    allow_special, itemsize = task.settings.tokenizer.allow_special, task.settings.dtype.itemsize

    class Step(MegatronDocumentTokenizer):  # type: ignore[misc]
        # Plain properties: a cached_property has a lock in Python 3.10 and 3.11, which hangs in the process
        # that unpickles this class.
        @property
        def tokenizer(self) -> Any:
            if "_tokenizer" not in self.__dict__:
                self._tokenizer = MegatronDocumentTokenizer.tokenizer.func(self)
                self._tokenizer.encode_special_tokens = not allow_special
            return self._tokenizer

        @property
        def token_size(self) -> int:
            return itemsize

        def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
            task.run(self, rank, world_size)

    eos_token = task.settings.tokenizer.eod_token if task.settings.append_eod else None
    return Step(str(task.folder), tokenizer_name_or_path=str(tokenizer_path), eos_token=eos_token)


def _checked_counts(folder: Path, settings: PartSettings, tasks: int) -> tuple[PartCounts, dict[Path, str]]:
    """The sum of what the tasks counted, after it was compared with their files, and the hashes of their
    .bin.

    Raises:
        ValueError: they do not agree, or there is no document.
    """
    total, hashes = PartCounts(), {}
    for rank in range(tasks):
        prefix = _prefix(folder, rank)
        counts_path, bin_path = folder / _COUNTS / f"{rank:05d}.json", Path(f"{prefix}.bin")
        if not counts_path.is_file():
            raise ValueError(f"{counts_path}: is missing, and its task is complete. Fix: give --start-over.")
        counts = PartCounts.from_json(json.loads(counts_path.read_text(encoding="utf-8")))
        lengths, (num_eods, hashes[bin_path]) = read_index(prefix)[1], _eods_and_hash(bin_path, settings)
        facts: dict[str, tuple[Any, Any]] = {
            "documents": (len(lengths), counts.tally.num_documents),
            "tokens": (int(lengths.sum(dtype=np.int64)), counts.num_tokens),
            "bytes": (bin_path.stat().st_size, counts.num_tokens * settings.dtype.itemsize),
            "end-of-document tokens": (num_eods, counts.num_eods),
            "as hash of the tokens": (hashes[bin_path], counts.token_hash),
        }
        if settings.append_eod and not settings.tokenizer.allow_special:
            facts["end-of-document tokens, one a document,"] = (num_eods, counts.tally.num_documents)
        for what, (found, expected) in facts.items():
            if found != expected:
                raise ValueError(
                    f"{bin_path}: {found} {what} instead of {expected}. Fix: check the disk, and give"
                    " --start-over."
                )
        total += counts
    if not total.tally.num_documents:
        raise ValueError(problem("input", folder, "the inputs have no documents", "give files with text"))
    return total, hashes


def _eods_and_hash(path: Path, settings: PartSettings) -> tuple[int, str]:
    """End-of-document tokens in a .bin, and its hash, as `file_hash` gives it."""
    num_eods, digest = 0, xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(
                chunk[: len(chunk) // settings.dtype.itemsize * settings.dtype.itemsize], settings.dtype
            )
            num_eods += (
                int(np.count_nonzero(tokens == settings.tokenizer.eod_id))
                if settings.tokenizer.eod_id is not None
                else 0
            )
    return num_eods, digest.hexdigest()
