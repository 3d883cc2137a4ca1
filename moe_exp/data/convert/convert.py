"""Files of documents to JSONL chunks: filtered, deduplicated if wished, every document accounted for.

`OUTPUT/NAME.chunk.00003.jsonl` is what task 3 of a datatrove pipeline made of every num_tasks-th input file;
`OUTPUT/datatrove/` has what datatrove reports: completions, logs, stats, executor.json, and counts/ of each
task. An output can only be resumed with the same number of tasks and list of files.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_exp.data.convert.benchmarks import (
    Benchmark,
    ContaminationFilter,
    benchmarks_of,
    contamination_block,
    write_contamination_index,
)
from moe_exp.data.convert.duplicates import (
    BlockStep,
    ClusterNearDuplicates,
    NearDuplicateFilter,
    NearDuplicates,
    SignNearDuplicates,
    exact_block,
    near_duplicates,
    near_filter,
    pair_near_duplicates,
)
from moe_exp.data.convert.filters import (
    LANGUAGE,
    Counts,
    Filter,
    NamedFilter,
    filter_by,
    has_field,
    has_length,
)
from moe_exp.data.convert.steps import ReadFiles, WriteChunk
from moe_exp.data.documents import check_apart
from moe_exp.data.execution import Execution, Pass, bytes_through
from moe_exp.data.jobs import check_no_jobs, merge_stats, run_passes
from moe_exp.data.kinds import FILES, KINDS, TextRule, input_error, total_bytes
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, run_stage
from moe_exp.host.files import ending, read_json, write_json
from moe_exp.host.processes import allow_open_files
from moe_exp.host.progress import progress_of

logger = logging.getLogger(__name__)

_TEMPORARY = "temporary"
MAX_DEFAULT_TASKS = 64  # as many as the runs before this package had
_MOST_FINDERS = 64  # each has a file of every task


@dataclass(frozen=True)
class ConvertSettings:
    """Filters of a conversion. A document without the metadata field of a filter is an error.

    Args:
        tasks: number of chunks, at most that of input files; default: one per file, at most 64.
        languages: kept values of the field `language`; empty for all.
        min_language_score: of the field `language_score`, 0 to 1.
        min_score: of the field `score`.
        min_chars, max_chars: length of kept texts, characters.
        limit: documents to read of all tasks together, dealt evenly; None for all.
        skip_bad: skip and count what is no document instead of stopping.
        filters: filters by name, in this order, after those above.
        dedup: keep one of each text; the metadata field `duplicate_count` says how many others there were.
        near_dedup: keep one of texts that are alike; None for all.
        decontaminate: benchmarks: documents that share 12 words in a row with a text of one are dropped.
    """

    tasks: int | None = None
    text_field: str = "text"
    languages: tuple[str, ...] = ()
    min_language_score: float | None = None
    min_score: float | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    limit: int | None = None
    skip_bad: bool = False
    filters: tuple[NamedFilter, ...] = ()
    dedup: bool = False
    near_dedup: NearDuplicates | None = None
    decontaminate: tuple[Benchmark, ...] = ()
    rule: TextRule = FILES

    def __post_init__(self) -> None:
        for name in ("tasks", "limit", "max_chars"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise input_error(f"{name}={value}", "must be at least 1", "omit it, or give a larger one")
        if self.max_chars is not None and (self.min_chars or 0) > self.max_chars:
            rule = f"no text has at least min_chars={self.min_chars} and at most {self.max_chars} characters"
            raise input_error(f"max_chars={self.max_chars}", rule, "swap them")
        if (score := self.min_language_score) is not None and not 0 <= score <= 1:
            fix = "0.65 is what FineWeb used"
            raise input_error(f"min_language_score={score}", "must be from 0 to 1", fix)
        names = [one.name for one in self.filters]
        if twice := [name for name in names if names.count(name) > 1]:
            raise input_error(f"filter={twice[0]}", "is given twice", "give it once")

    @classmethod
    def of(
        cls, given: Any, languages: Sequence[str], filters: Sequence[Any], tasks: int | None
    ) -> ConvertSettings:
        """From options of a command line or a mixture.yaml; ValueError if one is wrong."""
        same = ("min_language_score", "min_score", "min_chars", "max_chars", "limit", "skip_bad", "dedup")
        return cls(
            tasks,
            languages=tuple(languages),
            filters=tuple(map(NamedFilter.parse, filters)),
            near_dedup=near_duplicates(given.near_dedup),
            decontaminate=benchmarks_of(given.decontaminate),
            rule=TextRule(given.text_documents),
            **{name: getattr(given, name) for name in same},
        )

    def benchmark_files(self) -> list[Path]:
        return [path for one in self.decontaminate for path in one.files]


def convert(
    inputs: Sequence[Path],
    output: Path,
    settings: ConvertSettings,
    execution: Execution | None = None,
    *,
    start_over: bool = False,
) -> dict[str, Any] | None:
    """Converts files, or resumes a stopped call with the same settings.

    Args:
        inputs: files of the kinds of `moe_exp.data.kinds`; their order does not matter.
        output: folder to make; its name is that of the chunks.
        execution: where it runs; default: this machine.
        start_over: throw away what another call has made or begun.

    Returns:
        The manifest; None while SLURM jobs are on their way. Call again to see how far they are, and to
        publish what they have made, unless their last job did.

    Raises:
        ValueError: settings that cannot be, or other ones than those the output was made or begun with; an
            input or the benchmarks in the output folder; counts that do not agree.
        BadDocument: an input that is no document, without `skip_bad`.
        ChildProcessError: a task's process died.
    """
    execution = execution or Execution()
    inputs = sort_inputs(inputs)
    check_apart([*inputs, *settings.benchmark_files()], output)
    if settings.tasks is not None and settings.tasks > len(inputs):
        rule = f"there are {len(inputs)} input files, and a task reads whole files"
        raise input_error(f"tasks={settings.tasks}", rule, f"give at most {len(inputs)}")
    num_tasks = settings.tasks or min(len(inputs), MAX_DEFAULT_TASKS)
    _check_limits(output, settings, num_tasks)
    if start_over or execution.executor != "slurm":
        check_no_jobs(output.with_name(f"{output.name}.partial") / "datatrove")
    benchmarks = [one.facts() for one in settings.decontaminate]
    key = {**asdict(settings), "tasks": num_tasks, **settings.rule.facts()}
    # as before there could be several
    key["decontaminate"] = benchmarks if len(benchmarks) > 1 else next(iter(benchmarks), None)
    key["filters"] = [one.facts() for one in settings.filters] or None
    # `TextRule.facts` has what differs from the default
    del key["rule"]
    with run_stage("convert", output, settings=key, inputs=inputs, start_over=start_over) as stage:
        if stage.manifest is not None:
            return stage.manifest
        passes, counted = _passes(stage, inputs, settings, num_tasks)
        facts = dict[str, Any]()
        if settings.decontaminate:
            index = stage.folder / _TEMPORARY / "benchmarks"
            facts["benchmarks"] = write_contamination_index(settings.decontaminate, index)
            for task, counts in facts["benchmarks"]["tasks"].items():
                if counts["num_short"]:
                    what = "%s: %d of %d texts are too short to be found"
                    logger.warning(what, task, counts["num_short"], counts["num_texts"])
        # a bar over the input bytes of all passes that read, from the files that the tasks write them into
        firsts = [one.pipeline[0] for one in passes]
        reading = [Path(first.progress_folder) for first in firsts if isinstance(first, ReadFiles)]
        total = len(reading) * total_bytes(inputs)  # about: what is filtered is smaller
        bar = progress_of(lambda: bytes_through(reading), f"convert {stage.output.name}", total)
        with nullcontext() if execution.executor == "slurm" else bar:
            done = run_passes(passes, execution, name=stage.output.name)
        return _publish(stage, passes[-1], counted, inputs, facts) if done else None


def sort_inputs(inputs: Sequence[Path]) -> list[Path]:
    """In the order in which they are dealt to tasks; ValueError if one is there twice or of another kind."""
    if not inputs:
        raise input_error("inputs=", "there is no file to convert", "give at least one")
    paths = [Path(os.path.abspath(path)) for path in inputs]  # noqa: PTH100
    ordered = sorted(paths, key=lambda path: path.as_posix())
    for path, following in zip(ordered, [*ordered[1:], None], strict=True):
        if not ending(path):
            raise input_error(path, f"does not end with {KINDS}", "omit it, or rename it")
        if path == following:
            raise input_error(path, "is there twice", "give it once")
    return ordered


def _check_limits(output: Path, settings: ConvertSettings, num_tasks: int) -> None:
    """Limits of steps that read what all tasks have written."""
    if glob.has_magic(str(output.absolute())) and (settings.dedup or settings.decontaminate):
        rule = "datatrove takes *, ? and [ for a pattern, and would find none of its own files"
        raise input_error(f"output={output}", rule, "give another folder")
    # checked before hours of work, not when the finder runs out of them
    needed = 3 * num_tasks + 64  # open in a finder: of each task a signature file, two of duplicates
    if (settings.dedup or settings.near_dedup) and needed > (most := allow_open_files()):
        rule = f"a task that compares their signatures has {needed} files open, and may have {most} here"
        fix = "give fewer, or raise the hard limit of open files (ulimit -Hn)"
        raise input_error(f"tasks={num_tasks}", rule, fix)


def _passes(
    stage: CorpusStage, inputs: Sequence[Path], settings: ConvertSettings, num_tasks: int
) -> tuple[list[Pass], list[Path]]:
    """The pipelines, and the folders of the counts of those that write documents."""
    logs, temporary = stage.folder / "datatrove", stage.folder / _TEMPORARY
    files, filters, passes, counted = list(inputs), _filters(settings), list[Pass](), list[Path]()

    def reader(name: str) -> ReadFiles:
        options = {one: getattr(settings, one) for one in ("text_field", "skip_bad", "limit", "rule")}
        through = str(temporary / f"through_{name}")
        return ReadFiles(*_names_below(files), num_tasks, **options, progress_folder=through)

    def write(folder: Path, stem: str, logs: Path, steps: list[Filter]) -> None:
        first = reader(logs.name)
        counted.append(logs / "counts")
        pipeline = [first, *steps, WriteChunk(folder, stem, first, steps, counted[-1])]
        passes.append(Pass(pipeline, num_tasks, logs))

    # written first, as named filters are slower than reading their result again in each pass below
    if settings.filters and (settings.dedup or settings.near_dedup):
        write(temporary / "filtered", "filtered", logs / "filter", filters)
        files = [temporary / "filtered" / f"filtered.{task:05d}.jsonl" for task in range(num_tasks)]
        settings, filters = replace(settings, text_field="text", skip_bad=False, limit=None, rule=FILES), []
    if settings.dedup:
        signatures, duplicates = str(temporary / "exact_signed"), str(temporary / "exact_found")
        finders = min(num_tasks, _MOST_FINDERS)
        write_signatures = partial(exact_block, "ExactDedupSignature", signatures, finder_workers=finders)
        sign = [reader("sign"), *filters, BlockStep(write_signatures)]
        passes.append(Pass(sign, num_tasks, logs / "exact_sign"))
        find = [BlockStep(partial(exact_block, "ExactFindDedups", signatures, duplicates))]
        passes.append(Pass(find, finders, logs / "exact_find"))
        filters = [*filters, Filter("duplicate", partial(exact_block, "ExactDedupFilter", duplicates))]
    if settings.near_dedup:
        how, folder = settings.near_dedup, str(temporary / "near")
        sign = [reader("near"), *filters, SignNearDuplicates(how, folder)]
        passes.append(Pass(sign, num_tasks, logs / "near_signatures"))
        pair = [BlockStep(partial(pair_near_duplicates, how, folder))]
        passes.append(Pass(pair, how.num_buckets, logs / "near_pairs"))
        # one task: clusters go across all documents
        passes.append(Pass([ClusterNearDuplicates(folder, num_tasks)], 1, logs / "near_clusters"))
        filters = [*filters, NearDuplicateFilter("near duplicate", partial(near_filter, folder), folder)]
    if settings.decontaminate:
        build = partial(contamination_block, temporary / "benchmarks")
        filters = [*filters, ContaminationFilter("contaminated", build)]
    write(stage.folder, f"{stage.output.name}.chunk", logs, filters)
    return passes, counted


def _names_below(inputs: Sequence[Path]) -> tuple[str, list[str]]:
    """The folder of all files, and their paths in it."""
    root = os.path.commonpath([path.parent for path in inputs])
    return root, [path.relative_to(root).as_posix() for path in inputs]


def _filters(settings: ConvertSettings) -> list[Filter]:
    rules: dict[str, Callable[[Any], Any]] = {}
    if settings.languages:
        rules["language"] = partial(has_field, field="language", allowed=list(settings.languages))
    for name in ("language_score", "score"):
        if (minimum := getattr(settings, f"min_{name}")) is not None:
            rules[name] = partial(has_field, field=name, minimum=minimum)
    shortest, longest = settings.min_chars, settings.max_chars
    if shortest is not None or longest is not None:
        rules["length"] = partial(has_length, min_chars=shortest or 0, max_chars=longest)
    by_rule = [Filter(name, partial(filter_by, keeps)) for name, keeps in rules.items()]
    # a name in the manifest that no filter by a field of the documents has
    names = {LANGUAGE: "identified language"}
    return by_rule + [Filter(names.get(one.name, one.name), one.build) for one in settings.filters]


def _publish(
    stage: CorpusStage, main: Pass, counted: Sequence[Path], inputs: Sequence[Path], facts: dict[str, Any]
) -> dict[str, Any]:
    """Checks the sums of all tasks against each other, the inputs and the disk, and publishes the folder."""
    names = [f"{task:05d}.json" for task in range(main.num_tasks)]
    of_tasks = [[read_json(folder / name, fix=MAKE_AGAIN) for folder in counted] for name in names]
    outputs = [stage.folder / f"{stage.output.name}.chunk.{name}l" for name in names]
    fix = "Fix: call it again with --start-over, and check the disk."
    if sorted(name for passes in of_tasks for name in passes[0]["files"]) != _names_below(inputs)[1]:
        raise ValueError(f"{stage.folder}: the tasks did not read each input file once. {fix}")
    if sorted(stage.folder.glob("*.jsonl")) != sorted(outputs):
        raise ValueError(f"{stage.folder}: its chunks are not those of tasks 0 to {len(outputs) - 1}. {fix}")
    for path, passes in zip(outputs, of_tasks, strict=True):
        found, written = path.stat().st_size, passes[-1]["bytes"]
        if found != written:
            raise ValueError(f"{path}: has {found} bytes, its task wrote {written}. {fix}")
    total, tasks = Counts(), list[dict[str, Any]]()
    for task, passes in enumerate(of_tasks):
        counts = Counts.from_json(passes[0])
        for following in passes[1:]:
            # what one pass wrote, the next has to have read
            counts = counts.then(Counts.from_json(following))
        total += counts
        shown = {"task": task, "files": passes[0]["files"]}
        tasks.append(shown | {name: counts.to_json()[name] for name in ("read", "filtered", "written")})
    merge_stats(main)
    shutil.rmtree(stage.folder / _TEMPORARY, ignore_errors=True)
    for left in stage.folder.glob(".*.tmp"):
        left.unlink()
    totals = total.to_json()
    # beside the manifest, which stays small
    if samples := totals.pop("samples"):
        write_json(main.folder / "samples.json", samples)
    hashes = {path: passes[-1]["hash"] for path, passes in zip(outputs, of_tasks, strict=True)}
    return stage.finish_folder(outputs, hashes=hashes, **totals, **facts, tasks=tasks)
