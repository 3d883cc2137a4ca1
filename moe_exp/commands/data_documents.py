"""`moe-exp data list`, `download`, `prepare`, `shuffle`, `merge`: from documents to shards."""

import argparse
import glob
import os
from pathlib import Path
from typing import Any

from moe_exp.commands.data import TEXT_DOCUMENTS, either, execution, execution_of, under_way
from moe_exp.commands.parsers import arg, command, flag, group, memory_bytes, repeated, takes
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import print_sources, resolve_source
from moe_exp.data.kinds import KINDS, TextRule, input_error
from moe_exp.host.files import ending
from moe_exp.host.progress import print_summary

_COMMON = ("text_field", "skip_bad", "start_over")  # of shuffle and merge


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_sources()
        parser.exit()


@command("data list", "list the datasets that are known by name: files, size, license")
def run_list(_: argparse.Namespace) -> None:
    print_sources()


_SOURCE = (
    arg(
        "source",
        "a name of `moe-exp data list`, a dataset owner/name of the hub, a folder, a file, or a URL of"
        " an object store (s3://, gs://, hf://)",
    ),
    repeated("--pattern GLOB", "which files instead; may be repeated"),
    arg("--text-field NAME", "field with the text (default: the source's, or text)"),
    arg("--revision", "branch, tag or commit of the dataset (default: the source's, or main)"),
)


@command("data download", "download the files of a dataset from the hub (HF_ENDPOINT, HF_TOKEN)")
@takes(
    *_SOURCE,
    arg("--output-dir FOLDER", "(default: data/<name>_raw)", Path),
    arg("--max-workers N", "files at the same time (default: 8)", default=8),
    arg("--retries N", "failures in a row before it gives up (default: 6)", default=6),
    arg("--bandwidth MB/S", "for the estimate of --dry-run (default: 50)", float, default=50),
    flag("--dry-run", "print files, bytes, free disk and time, and write nothing"),
    flag("--start-over", "fetch everything again, at the newest commit of the revision"),
)
def run_download(arguments: argparse.Namespace) -> None:
    """Fetches and checks a dataset's files. Called again, it resumes where it stopped; when all is there it
    asks nobody.
    """
    for name in ("max_workers", "retries", "bandwidth"):
        if (value := getattr(arguments, name)) <= 0:
            raise input_error(f"{name}={value}", "has to be positive", "leave it out")
    fields = {"text_field": arguments.text_field, "revision": arguments.revision}
    source = resolve_source(arguments.source, patterns=arguments.pattern, **fields)
    folder = arguments.output_dir or Path("data") / f"{source.name}_raw"
    options = {name: getattr(arguments, name) for name in ("max_workers", "dry_run", "start_over")}
    rates = {"max_failures": arguments.retries, "bytes_per_second": arguments.bandwidth * 1e6}
    paths = download(source, folder, **options, **rates)
    if source.path is not None or source.is_embedded:
        why = f"{len(paths)} files are here" if paths else "it comes with Python"
        print(f"{source.name}: nothing to download, {why}.")
    elif not arguments.dry_run:
        print(f"{source.name}: {len(paths)} files are complete in {folder}")


@command("data prepare", "download, convert and shuffle a dataset into shards")
@takes(
    *_SOURCE,
    arg("--list", "print the datasets that have a name, and end", action=_List, nargs=0),
    flag("--dry-run", "print files, disk and time, and write nothing"),
    either("--data-dir FOLDER", "(default: data)", Path, default=Path("data")),
    either("--start-over", "convert and shuffle again, with other settings too", action="store_true"),
    either("--download-again", "fetch the files again too", action="store_true"),
    group(
        "what is kept",
        either("--language CODES", "values of the field language, as in en or en,de"),
        either("--min-language-score X", "of the field language_score, 0 to 1", float),
        either("--min-score X", "of the field score", float),
        either("--min-chars N", "shortest text, characters", int),
        either("--max-chars N", "longest text, characters", int),
        either("--limit N", "maximum number of documents to read", int),
        either("--dedup", "keep one of each text", action="store_true"),
        either(
            "--near-dedup OPTIONS",
            "keep one of texts that are alike, by MinHash; options as in '{hashes_per_bucket: 8}'",
            nargs="?",
            const="{}",
        ),
        either(
            "--filter FILTER",
            "a filter by name, or 'NAME: {option: value}'; may be repeated (docs/corpus.md lists them)",
            action="append",
            default=[],
        ),
        either(
            "--decontaminate FILE",
            "JSONL of benchmark texts, or lm-eval:TASK; drops what shares 12 words in a row; may be repeated",
            action="append",
            default=[],
        ),
        TEXT_DOCUMENTS,
        either("--skip-bad", "skip and count what is no document instead of stopping", action="store_true"),
    ),
    group(
        "shards",
        either("--seed", "of the order and of the validation documents (default: 0)", default=0),
        either("--nchunks N", "shards for training (default: 32)", default=32),
        either("--valid-fraction X", "of the texts, for validation (default: 0.005)", default=0.005),
        either(
            "--memory SIZE",
            "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)",
            memory_bytes,
        ),
    ),
    group(
        "where the tasks run",
        *execution("number of chunks (default: one per input file, at most 64)"),
        either(
            "--shuffle-tasks N",
            "tasks of the shuffle (default: 1; on SLURM and Ray as many as chunks if over 50 GB)",
            int,
        ),
    ),
)
def run_prepare(arguments: argparse.Namespace) -> int:
    """Downloads a dataset, converts it to JSONL chunks in DATA_DIR/NAME and shuffles them into
    DATA_DIR/NAME_shuffled. Called again, it resumes where it stopped. Exit code 75: SLURM jobs are under way;
    the last continues to the shuffle.
    """
    from moe_exp.data.convert.convert import ConvertSettings
    from moe_exp.data.prepare import Preparation, plan, prepare
    from moe_exp.data.shuffle.shuffle import shuffle_summary

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names}

    languages = arguments.language.split(",") if arguments.language else ()
    wanted = Preparation(
        arguments.source,
        patterns=tuple(arguments.pattern),
        settings=ConvertSettings.of(arguments, languages, arguments.filter, arguments.tasks),
        execution=execution_of(arguments),
        shuffle={"num_shards": arguments.nchunks, "memory_bytes": arguments.memory}
        | given("seed", "valid_fraction"),
        **given("data_dir", "revision", "text_field", "start_over", "download_again", "shuffle_tasks"),
    )
    if arguments.dry_run:
        plan(wanted)
        return 0
    if (manifest := prepare(wanted)) is None:
        return under_way(arguments.source)
    shuffled = f"{arguments.data_dir / wanted.source().name}_shuffled"
    print_summary(f"shuffled: {shuffled}", shuffle_summary(manifest))
    return 0


_HOW = (
    arg("--text-field --text_field", "field with the text (default: text)", default="text"),
    flag("--skip-bad", "skip and count lines that are no documents instead of stopping"),
    flag("--start-over", "make it again, with other settings or inputs too"),
    flag("--dry-run", "print what it would take, and touch nothing"),
)


@command("data shuffle", "shuffle documents into shards and a validation file")
@takes(
    arg("inputs INPUT", f"files, or folders of them: {KINDS}", Path, nargs="+"),
    arg("--output", "folder to make (default: that of the input, or its file's name, with _shuffled)", Path),
    arg("--name", "what the file names begin with (default: the output's name without _shuffled)"),
    arg("--seed", type=int, default=0),
    arg("--shards", "training files (default: 32)", default=32, dest="num_shards"),
    arg("--valid-fraction", "of the texts, for validation; at least one (default: 0.005)", default=0.005),
    arg(
        "--memory",
        "budget such as 256MB or 8GB, besides the interpreter's 45 MB (default: a quarter of what is"
        " available)",
        memory_bytes,
    ),
    TEXT_DOCUMENTS,
    *_HOW,
    group(
        "where the tasks run",
        *execution(
            "tasks, on as many cores or machines (default: 1, this process); resume with the same number"
        ),
    ),
)
def run_shuffle(arguments: argparse.Namespace) -> int:
    # before numpy: no matrices here, and its idle threads spin
    """Shuffles documents globally into shards NAME.chunk.00.jsonl ... and NAME.val.jsonl. The result depends
    on the inputs in their order, on --seed, --shards and --valid-fraction, not on --memory or the machine. An
    interrupted call continues when it is repeated.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from moe_exp.data.shuffle.shuffle import (
        check_shuffle,
        estimate_shuffle,
        shuffle_documents,
        shuffle_summary,
    )

    first = arguments.inputs[0].absolute()
    # the name of the output comes from the last part that is no pattern
    while glob.has_magic(first.name) and not first.exists():
        first = first.parent
    suffix = ending(first.name) or first.suffix
    base = first.name if first.is_dir() else first.name[: len(first.name) - len(suffix)]
    output = arguments.output or first.with_name(f"{base}_shuffled")
    name = arguments.name or output.absolute().name.removesuffix("_shuffled")
    options = {"name": name, "num_shards": arguments.num_shards, "valid_fraction": arguments.valid_fraction}
    if arguments.dry_run:
        options |= {"text_field": arguments.text_field, "memory_bytes": arguments.memory}
        estimate = estimate_shuffle(check_shuffle(arguments.inputs, output, **options), arguments.memory)
        if (arguments.tasks or 1) > 1:
            estimate |= {"tasks": arguments.tasks}
        print_summary(f"shuffle to {output}, dry run", estimate)
        return 0
    options |= {name: getattr(arguments, name) for name in ("seed", "tasks", *_COMMON)}
    options |= {"rule": TextRule(arguments.text_documents), "execution": execution_of(arguments)}
    manifest = shuffle_documents(arguments.inputs, output, **options, memory_bytes=arguments.memory)
    if manifest is None:
        return under_way()
    print_summary(f"shuffled: {output}", shuffle_summary(manifest))
    return 0


@command("data merge", "merge shards into one JSONL file, without the validation file")
@takes(
    arg("--input_dir --input-dir", "folder with the shards", Path, required=True),
    arg(
        "--valid_file_name --valid-file-name",
        "file in it to leave out, .jsonl may be left off",
        required=True,
    ),
    arg(
        "--output_file_name --output-file-name",
        "of the merged file, .jsonl may be left off; one with a folder in it is taken as a path",
        required=True,
    ),
    *_HOW,
)
def run_merge(arguments: argparse.Namespace) -> None:
    """Merges the shards of a folder into one file, beside the folder: INPUT_DIR/../OUTPUT_FILE_NAME.jsonl.
    That is the file for preprocess_data.py --input.
    """
    from moe_exp.data.shuffle.merge import estimate_merge, merge, merge_summary

    input_dir, given = arguments.input_dir.absolute(), Path(arguments.output_file_name)
    # a bare name goes beside the folder, a path where it says
    output = given if given.name != arguments.output_file_name else input_dir.parent / given
    if arguments.dry_run:
        options = {name: getattr(arguments, name) for name in ("valid_file_name", "text_field")}
        estimate = estimate_merge(input_dir, output, **options)
        return print_summary(f"merge to {output}, dry run", estimate)
    options = {name: getattr(arguments, name) for name in ("valid_file_name", *_COMMON)}
    manifest = merge(input_dir, output, **options)
    return print_summary(f"merged: {output.parent / manifest['outputs'][0]['name']}", merge_summary(manifest))
