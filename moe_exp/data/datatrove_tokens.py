"""Tokenizing by datatrove, for clusters that run its executors: a task per range of shards, then merged into one .bin and .idx.

datatrove's reader drops lines that it cannot parse; the documents come from ours, which stops. Its tokenizer reads special tokens in a
text as such and takes 65,500 to 65,536 tokens for uint16; both are set here as everywhere in this package. The bytes are those of
`tokenize_files`; the CPU is that of an `encode_batch` loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_exp.config import problem
from moe_exp.data.documents import Tally, read_documents
from moe_exp.data.stage import run_stage
from moe_exp.data.token_merge import merge_token_files
from moe_exp.data.token_parts import PartSettings

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "slurm", "ray")

_BATCH_DOCUMENTS = 1000  # datatrove's default of 10,000 takes 4.6 GB


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

    With SLURM it submits the tasks and returns None; called again with the same arguments when they are done, it merges.

    Args:
        inputs: .jsonl, .jsonl.gz and .jsonl.zst files; task r of T reads a contiguous range of them, so that their order stays.
        output: path without suffix.
        settings: how a text becomes tokens; the tokenizer must be a tokenizer.json.
        executor: local, slurm or ray.
        tasks: at most as many as inputs.
        workers: tasks at a time, of SLURM and Ray. Local tasks run one after the other: datatrove's local pool waits forever for a
            worker that died. On one machine `tokenize_files` is the way.
        slurm: arguments of datatrove's SlurmPipelineExecutor besides these: `partition` and `time` at least.
        start_over: remove what is there.

    Raises:
        ValueError: a setting is wrong, or a line is no document.
    """
    _check(inputs, settings, executor, tasks, slurm)
    key = {"tokenizer": settings.tokenizer.facts(), "json_key": settings.json_key, "append_eod": settings.append_eod, "tasks": tasks}
    folder = output.with_name(output.name + ".datatrove")
    prefixes = [folder / f"{rank:05d}_tokens" for rank in range(tasks)]
    with run_stage(
        "tokenize-by-datatrove", folder, settings=key | {"skip_bad": settings.skip_bad}, inputs=inputs, start_over=start_over
    ) as stage:
        if not stage.was_done:
            tokenizer_path = stage.folder / "tokenizer.json"
            tokenizer_path.write_bytes(settings.tokenizer.content)
            pipeline = [_reader(inputs, settings), _tokenizer(stage.folder, tokenizer_path, settings)]
            run = _executor(executor, pipeline, tasks=tasks, workers=workers, logging_dir=str(stage.folder / "datatrove"), slurm=slurm)
            submitted = stage.folder / "submitted"
            if not submitted.exists():
                run.run()
            if num_left := sum(not run.is_rank_completed(rank) for rank in range(tasks)):
                submitted.touch()
                logger.info("%d of %d tasks are not done. Call it again when they are, to merge.", num_left, tasks)
                logger.info("Should they have failed (see %s): remove %s and call it again.", stage.folder / "datatrove", submitted)
                return None
            stage.finish_folder([stage.folder / f"{prefix.name}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")])
    return merge_token_files(prefixes, output, start_over=start_over)


def _check(inputs: Sequence[Path], settings: PartSettings, executor: str, tasks: int, slurm: Mapping[str, Any] | None) -> None:
    if executor not in EXECUTORS:
        raise ValueError(problem("executor", executor, f"must be one of {', '.join(EXECUTORS)}", "choose one of them"))
    if not 1 <= tasks <= len(inputs):
        raise ValueError(problem("tasks", tasks, f"a task reads whole files, and there are {len(inputs)}", f"give 1 to {len(inputs)}"))
    if settings.tokenizer.kind != "huggingface":
        rule = f"datatrove tokenizes with a tokenizer.json, {settings.tokenizer.name} is none"
        raise ValueError(problem("executor", executor, rule, "leave it out"))
    if executor == "slurm" and not {"partition", "time"} <= set(slurm or {}):
        raise ValueError(
            problem("executor", executor, "SLURM needs a partition and a time limit", "give --slurm-partition and --slurm-time")
        )


def _executor(name: str, pipeline: list[Any], *, slurm: Mapping[str, Any] | None, **how: Any) -> Any:
    if name == "slurm":
        from datatrove.executor import SlurmPipelineExecutor

        return SlurmPipelineExecutor(pipeline, job_name="tokenize", **how, **(slurm or {}))
    if name == "ray":
        from datatrove.executor import RayPipelineExecutor

        return RayPipelineExecutor(pipeline, **how)
    from datatrove.executor import LocalPipelineExecutor

    return LocalPipelineExecutor(pipeline, **how | {"workers": 1})


def _reader(inputs: Sequence[Path], settings: PartSettings) -> Any:
    paths = [str(path.absolute()) for path in inputs]
    json_key, skip_bad = settings.json_key, settings.skip_bad

    def read(data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from datatrove.data import Document

        number = 0
        for path in paths[rank * len(paths) // world_size : (rank + 1) * len(paths) // world_size]:
            for _, text in read_documents(Path(path), Tally(), text_field=json_key, skip_bad=skip_bad):
                yield Document(text=text, id=f"{rank}/{number}")
                number += 1

    return read


def _tokenizer(folder: Path, tokenizer_path: Path, settings: PartSettings) -> Any:
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    allow_special, itemsize = settings.tokenizer.allow_special, settings.dtype.itemsize

    class Step(MegatronDocumentTokenizer):  # type: ignore[misc]
        # Plain properties: a cached_property has a lock in Python 3.10 and 3.11, which hangs in the process that unpickles this class.
        @property
        def tokenizer(self) -> Any:
            if "_tokenizer" not in self.__dict__:
                self._tokenizer = MegatronDocumentTokenizer.tokenizer.func(self)
                self._tokenizer.encode_special_tokens = not allow_special
            return self._tokenizer

        @property
        def token_size(self) -> int:
            return itemsize

    eos_token = settings.tokenizer.eod_token if settings.append_eod else None
    return Step(str(folder), tokenizer_name_or_path=str(tokenizer_path), eos_token=eos_token, batch_size=_BATCH_DOCUMENTS)
