"""Tokenizing by datatrove's executors, for clusters: a task makes the parts of a range of the input files.

The parts are those of parts.py, and this process joins them as `tokenize_files` does: the bytes are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import setting_error
from moe_exp.data.stage import run_stage
from moe_exp.data.tokens.joined_parts import JoinedParts
from moe_exp.data.tokens.parts import Part, PartEncoder, PartSettings, is_complete
from moe_exp.data.tokens.preprocess import publish
from moe_exp.host.slurm_queue import job_environment

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "slurm", "ray")


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
    """Makes the parts by tasks of datatrove's executor, joins them, and returns the manifest.

    With SLURM it submits the tasks and returns None; called again with the same arguments when they are done,
    it joins. A part that is not what its task wrote is an error; the next call has it made again.

    Args:
        inputs: .jsonl, .jsonl.gz and .jsonl.zst files; task r of T reads a contiguous range of them.
        output: path without suffix.
        settings: how a text becomes tokens.
        executor: local, slurm or ray.
        tasks: at most as many as inputs.
        workers: tasks at a time, of SLURM and Ray. Local tasks run one after the other: datatrove's local
            pool waits forever for a worker that died. On one machine `tokenize_files` is the way.
        slurm: arguments of datatrove's SlurmPipelineExecutor besides these: `partition` and `time` at least.
        start_over: remove what is there.

    Raises:
        ValueError: a setting is wrong; a line is no document; tasks failed; a part is damaged.
    """
    _check(inputs, executor, tasks, slurm)
    key, suffixes = settings.facts() | {"tasks": tasks}, (".bin", ".idx")
    what: dict[str, Any] = {"settings": key, "inputs": inputs, "is_folder": False, "suffixes": suffixes}
    with run_stage("tokenize-by-datatrove", output, **what, start_over=start_over) as stage:
        if stage.was_done:
            return stage.manifest or {}
        parts = [Part(index, path.absolute(), 0, None) for index, path in enumerate(inputs)]
        joined = JoinedParts(stage.folder, output.name, settings)
        joined.resume(parts, output.with_name(f"{output.name}.bin"))
        how = {"tasks": tasks, "workers": workers, "logging_dir": str(stage.folder / "datatrove")}
        task = _Task(stage.folder, parts, settings, tasks)
        if not _is_done(_executor(executor, [task], how, slurm), task, executor):
            return None
        for part in parts[joined.num_parts :]:
            joined.append(part)
        return publish(stage, joined, parts, backend="tokenizers")


def _check(inputs: Sequence[Path], executor: str, tasks: int, slurm: Mapping[str, Any] | None) -> None:
    if executor not in EXECUTORS:
        raise setting_error(
            "executor", executor, f"must be one of {', '.join(EXECUTORS)}", "choose one of them"
        )
    if not 1 <= tasks <= len(inputs):
        rule = f"a task reads whole files, and there are {len(inputs)}"
        raise setting_error("tasks", tasks, rule, f"give 1 to {len(inputs)}")
    if executor == "slurm" and not {"partition", "time"} <= set(slurm or {}):
        rule = "SLURM needs a partition and a time limit"
        raise setting_error("executor", executor, rule, "give --slurm-partition and --slurm-time")


def _executor(name: str, pipeline: list[Any], how: dict[str, Any], slurm: Mapping[str, Any] | None) -> Any:
    from datatrove import executor

    if name == "slurm":
        options = {"job_name": "tokenize", "env_command": job_environment(), **how, **(slurm or {})}
        return executor.SlurmPipelineExecutor(pipeline, **options)
    if name == "ray":
        return executor.RayPipelineExecutor(pipeline, **how)
    return executor.LocalPipelineExecutor(pipeline, **how | {"workers": 1})


def _is_done(run: Any, task: _Task, executor: str) -> bool:
    """Runs or submits the tasks, unless that was done; whether they are done. False with SLURM alone."""
    submitted, logs = task.folder / "submitted", task.folder / "datatrove"
    for rank in range(task.tasks):
        if run.is_rank_completed(rank) and task.missing(rank):  # damaged, and removed when it was joined
            (logs / "completions" / f"{rank:05d}").unlink()
            submitted.unlink(missing_ok=True)
    if not submitted.exists():
        run.run()
    num_left = sum(not run.is_rank_completed(rank) for rank in range(task.tasks))
    if not num_left:
        return True
    if executor != "slurm":  # Ray's returns without an error then
        fix = "see their logs there, and call it again"
        raise ValueError(f"{logs}: {num_left} of {task.tasks} tasks failed. Fix: {fix}.")
    submitted.touch()
    logger.info("%d of %d tasks are not done. Call it again when they are, to join.", num_left, task.tasks)
    logger.info("Should they have failed (see %s): remove %s and call it again.", logs, submitted)
    return False


@dataclass
class _Task:
    """The one step of the pipeline; travels to the tasks by pickle."""

    folder: Path
    parts: list[Part]
    settings: PartSettings
    tasks: int
    stats: Any = None

    def missing(self, rank: int) -> list[Part]:
        """Parts that task `rank` has not made."""
        first, end = (index * len(self.parts) // self.tasks for index in (rank, rank + 1))
        return [part for part in self.parts[first:end] if not is_complete(part, self.folder)]

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        from datatrove.utils.stats import Stats

        self.stats = Stats("tokenize")
        encoder, making = PartEncoder(self.settings, "tokenizers"), self.folder / "making"
        making.mkdir(exist_ok=True)  # a call that asks how far SLURM's tasks are removes *.json.*.tmp above
        for part in self.missing(rank):
            encoder.encode(part, making, lambda num_bytes: None)
            self.stats["parts"].update(1)
            for suffix in (".bin", ".lengths", ".json"):
                (making / f"{part.stem}{suffix}").replace(self.folder / f"{part.stem}{suffix}")
