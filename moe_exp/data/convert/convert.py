"""Converts data files to JSONL chunks, with optional filters and deduplication. Fails if documents are lost.

Each task of the datatrove pipeline reads every num_tasks-th input file and writes one chunk, such as
`OUTPUT/NAME.chunk.00003.jsonl` for task 3. `OUTPUT/datatrove/` contains datatrove's own files (completions,
logs, stats, executor.json) and the folder counts/ with a file per task. An interrupted conversion can only
be resumed with the same files and number of tasks.
"""

import glob
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from moe_exp.data.convert import benchmarks, duplicates
from moe_exp.data.convert.duplicates import NearDuplicateFilter, exact_block, near_filter, run_block
from moe_exp.data.convert.filters import Counts, Filter, NamedFilter, filters_of
from moe_exp.data.convert.steps import ReadFiles, WriteChunk
from moe_exp.data.documents import check_apart
from moe_exp.data.execution import Execution, Pass, Step
from moe_exp.data.jobs import check_no_jobs, merge_stats, run_passes
from moe_exp.data.kinds import FILES, TextRule, input_error
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, run_stage
from moe_exp.host.files import read_json, write_json
from moe_exp.host.processes import allow_open_files

logger = logging.getLogger(__name__)

_TEMPORARY = "temporary"
MAX_DEFAULT_TASKS = 64  # chosen for compatibility: data prepared before this package existed has 64 chunks
_MOST_FINDERS = 64  # each opens a file of every task


@dataclass(frozen=True)
class ConvertSettings:
    """Settings of a conversion. A conversion fails if a document lacks a metadata field that a filter needs.

    `dedup` keeps one copy of each text; its metadata field `duplicate_count` counts the removed copies.
    `decontaminate` drops documents that share 12 consecutive words with a text of the given benchmarks.
    """

    tasks: int | None = None  # chunks, at most the number of input files (default: one per file, at most 64)
    text_field: str = "text"
    languages: tuple[str, ...] = ()  # values of the field `language` to keep; empty for all
    min_language_score: float | None = None  # minimum of the field `language_score`, 0 to 1
    min_score: float | None = None  # minimum of the field `score`
    min_chars: int | None = None  # length limits of kept texts (characters)
    max_chars: int | None = None
    limit: int | None = None  # documents to read, divided evenly among the tasks; None for all
    skip_bad: bool = False  # skip and count invalid lines instead of stopping
    filters: tuple[NamedFilter, ...] = ()  # applied in this order after the ones above
    dedup: bool = False
    near_dedup: duplicates.NearDuplicates | None = None  # keep one of several similar texts; None to keep all
    decontaminate: tuple[benchmarks.Benchmark, ...] = ()
    rule: TextRule = FILES

    def __post_init__(self) -> None:
        for name in ("tasks", "limit", "max_chars"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise input_error(f"{name}={value}", "must be at least 1", "omit it, or give a larger value")
        if self.max_chars is not None and (self.min_chars or 0) > self.max_chars:
            rule = f"must not be less than min_chars={self.min_chars}"
            raise input_error(f"max_chars={self.max_chars}", rule, "raise max_chars or lower min_chars")
        if (score := self.min_language_score) is not None and not 0 <= score <= 1:
            fix = "use, for example, 0.65 as FineWeb does"
            raise input_error(f"min_language_score={score}", "must be between 0 and 1", fix)
        names = [one.name for one in self.filters]
        if twice := [name for name in names if names.count(name) > 1]:
            raise input_error(f"filter={twice[0]}", "is given twice", "give it once")

    @classmethod
    def of(cls, given: Any, tasks: int | None) -> "ConvertSettings":
        """Creates settings from command-line options or mixture.yaml; ValueError if any option is invalid."""
        same = ("min_language_score", "min_score", "min_chars", "max_chars", "limit", "skip_bad", "dedup")
        return cls(
            tasks,
            languages=tuple(given.languages),
            filters=tuple(map(NamedFilter.parse, given.filters)),
            near_dedup=duplicates.near_duplicates(given.near_dedup),
            decontaminate=benchmarks.benchmarks_of(given.decontaminate),
            rule=TextRule(given.text_documents),
            **{name: getattr(given, name) for name in same},
        )

    def benchmark_files(self) -> list[Path]:
        return [path for one in self.decontaminate for path in one.files]


def convert(
    inputs: Sequence[Path], output: Path, settings: ConvertSettings, execution: Execution | None = None, *,
    start_over: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Converts files, or resumes an interrupted call with the same settings.

    Args:
        inputs: files of the kinds in `moe_exp.data.kinds`, in any order.
        output: output folder; the chunks are named after it.
        start_over: discard the results of earlier calls.

    Returns:
        The manifest; None while SLURM jobs are active. A later call then reports the
        jobs' progress, and publishes the output if the last job has not done so.

    Raises:
        ValueError: settings are invalid or differ from those of an existing output; an input or benchmark is
            in the output folder; the final counts show lost or repeated documents.
        BadDocument: a line is invalid and `skip_bad` is not set.
        ChildProcessError: a task's process died.
    """
    execution = execution or Execution()
    inputs = sorted((Path(os.path.abspath(path)) for path in inputs), key=Path.as_posix)  # noqa: PTH100
    check_apart([*inputs, *settings.benchmark_files()], output)
    if settings.tasks is not None and settings.tasks > len(inputs):
        rule = f"must be at most the number of input files ({len(inputs)}), because a task reads whole files"
        raise input_error(f"tasks={settings.tasks}", rule, f"give at most {len(inputs)}")
    num_tasks = settings.tasks or min(len(inputs), MAX_DEFAULT_TASKS)
    # requirements of steps that read the output of all tasks
    if glob.has_magic(str(output.absolute())) and (settings.dedup or settings.decontaminate):
        rule = "must not contain *, ? or [, which datatrove would interpret as a pattern"
        raise input_error(f"output={output}", rule, "give another folder")
    # open files in a finder: for each task a signature file and two of duplicates
    needed = 3 * num_tasks + 64
    if (settings.dedup or settings.near_dedup) and needed > (most := allow_open_files()):
        rule = f"comparing signatures requires {needed} open files, but the limit is {most}"
        fix = "use fewer tasks, or raise the hard limit of open files (ulimit -Hn)"
        raise input_error(f"tasks={num_tasks}", rule, fix)
    if start_over or execution.executor != "slurm":
        check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove")
    chosen = [one.facts() for one in settings.decontaminate]
    key = {**asdict(settings), "tasks": num_tasks, **settings.rule.facts()}
    # a single benchmark is not a list, as in manifests written before several were allowed
    key["decontaminate"] = chosen if len(chosen) > 1 else next(iter(chosen), None)
    key["filters"] = [one.facts() for one in settings.filters] or None
    # `TextRule.facts` has added the values that differ from the default
    del key["rule"]
    with run_stage("convert", output, settings=key, inputs=inputs, start_over=start_over) as stage:
        if stage.manifest is not None:
            return stage.manifest
        passes, counted = _passes(stage, inputs, settings, num_tasks)
        facts = dict[str, Any]()
        if settings.decontaminate:
            index = stage.folder / _TEMPORARY / "benchmarks"
            facts["benchmarks"] = benchmarks.write_contamination_index(settings.decontaminate, index)
            for task, counts in facts["benchmarks"]["tasks"].items():
                if counts["num_short"]:
                    what = "%s: %d of %d texts are too short to be found in documents"
                    logger.warning(what, task, counts["num_short"], counts["num_texts"])
        done = run_passes(passes, execution, stage, "convert")
        return _publish(stage, passes[-1], counted, inputs, facts) if done else None


def _passes(
    stage: CorpusStage, inputs: Sequence[Path], settings: ConvertSettings, num_tasks: int
) -> tuple[list[Pass], list[Path]]:
    """Returns all passes, and the counts/ folders of those passes that write documents."""
    logs, temporary = stage.folder / "datatrove", stage.folder / _TEMPORARY
    files, filters, passes, counted = list(inputs), filters_of(settings), list[Pass](), list[Path]()

    def read(logs: Path, last: Callable[[ReadFiles], Any]) -> None:
        options = {one: getattr(settings, one) for one in ("text_field", "skip_bad", "limit", "rule")}
        through = temporary / f"through_{logs.name}"
        first = ReadFiles(*_names_below(files), num_tasks, through, **options)
        passes.append(Pass([first, *filters, last(first)], num_tasks, logs, through))

    def write(folder: Path, stem: str, logs: Path) -> None:
        counted.append(logs / "counts")
        read(logs, lambda first: WriteChunk(folder, stem, first, filters, counted[-1]))

    # named filters are slow: write their result once, and read it in each of the passes below
    if settings.filters and (settings.dedup or settings.near_dedup):
        write(temporary / "filtered", "filtered", logs / "filter")
        files = [temporary / "filtered" / f"filtered.{task:05d}.jsonl" for task in range(num_tasks)]
        settings, filters = replace(settings, text_field="text", skip_bad=False, limit=None, rule=FILES), []
    if settings.dedup:
        signatures, found = str(temporary / "exact_signed"), str(temporary / "exact_found")
        finders = min(num_tasks, _MOST_FINDERS)
        write_signatures = partial(exact_block, "ExactDedupSignature", signatures, finder_workers=finders)
        read(logs / "exact_sign", lambda _: Step(partial(run_block, write_signatures)))
        find_duplicates = partial(exact_block, "ExactFindDedups", signatures, found)
        passes.append(Pass([Step(partial(run_block, find_duplicates))], finders, logs / "exact_find"))
        filters = [*filters, Filter("duplicate", partial(exact_block, "ExactDedupFilter", found))]
    if settings.near_dedup:
        how, folder = settings.near_dedup, str(temporary / "near")
        sign = Step(partial(duplicates.sign_near_duplicates, how, folder))
        read(logs / "near_signatures", lambda _: sign)
        pair = Step(partial(run_block, partial(duplicates.pair_near_duplicates, how, folder)))
        passes.append(Pass([pair], how.num_buckets, logs / "near_pairs"))
        # one task, because clusters span all documents
        cluster = Step(partial(duplicates.cluster_near_duplicates, folder, num_tasks))
        passes.append(Pass([cluster], 1, logs / "near_clusters"))
        filters = [*filters, NearDuplicateFilter("near duplicate", partial(near_filter, folder), folder)]
    if settings.decontaminate:
        build = partial(benchmarks.contamination_block, temporary / "benchmarks")
        filters = [*filters, Filter("contaminated", build, words="contaminated_ngram")]
    write(stage.folder, f"{stage.output.name}.chunk", logs)
    return passes, counted


def _names_below(inputs: Sequence[Path]) -> tuple[str, list[str]]:
    """Returns the files' common parent folder and their paths relative to it."""
    root = os.path.commonpath([path.parent for path in inputs])
    return root, [path.relative_to(root).as_posix() for path in inputs]


def _publish(
    stage: CorpusStage, main: Pass, counted: Sequence[Path], inputs: Sequence[Path], facts: dict[str, Any]
) -> dict[str, Any]:
    """Checks the tasks' results against each other, the input files and the chunks; publishes the folder."""
    # a lost or repeated document would go unnoticed in a corpus: every count must agree
    names = [f"{task:05d}.json" for task in range(main.num_tasks)]
    of_tasks = [[read_json(folder / name, fix=MAKE_AGAIN) for folder in counted] for name in names]
    outputs = [stage.folder / f"{stage.output.name}.chunk.{name}l" for name in names]
    fix = "Fix: repeat the command with --start-over, and check the disk."
    if sorted(name for passes in of_tasks for name in passes[0]["files"]) != _names_below(inputs)[1]:
        raise ValueError(f"{stage.folder}: the tasks did not read each input file exactly once. {fix}")
    if sorted(stage.folder.glob("*.jsonl")) != sorted(outputs):
        raise ValueError(f"{stage.folder}: must have one chunk per task (0 to {len(outputs) - 1}). {fix}")
    for path, passes in zip(outputs, of_tasks, strict=True):
        found, written = path.stat().st_size, passes[-1]["bytes"]
        if found != written:
            raise ValueError(f"{path}: has {found} bytes, but its task wrote {written}. {fix}")
    total, tasks = Counts(), list[dict[str, Any]]()
    for task, passes in enumerate(of_tasks):
        # `then` checks that each pass read what the previous one wrote
        counts = reduce(Counts.then, map(Counts.from_json, passes))
        total += counts
        shown = {"task": task, "files": passes[0]["files"]}
        tasks.append(shown | {name: counts.to_json()[name] for name in ("read", "filtered", "written")})
    merge_stats(main)
    shutil.rmtree(stage.folder / _TEMPORARY, ignore_errors=True)
    for left in stage.folder.glob(".*.tmp"):
        left.unlink()
    totals = total.to_json()
    # samples go into a separate file to keep the manifest small
    if samples := totals.pop("samples"):
        write_json(main.folder / "samples.json", samples)
    hashes = {path: passes[-1]["hash"] for path, passes in zip(outputs, of_tasks, strict=True)}
    return stage.finish(outputs, hashes=hashes, **totals, **facts, tasks=tasks)
