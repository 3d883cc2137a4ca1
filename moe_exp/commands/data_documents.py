"""`moe-exp data list`, `download`, `prepare`, `shuffle` and `merge`: turn datasets into document shards."""

import argparse
import glob
import os
from pathlib import Path
from typing import Any

from moe_exp.commands import data
from moe_exp.commands.data import TEXT_DOCUMENTS, either, execution, execution_of, under_way
from moe_exp.commands.parsers import arg, command, flag, group, memory_bytes, repeated, takes
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import print_sources, resolve_source
from moe_exp.data.kinds import KINDS, TextRule, input_error
from moe_exp.host.files import ending
from moe_exp.host.progress import print_summary

_COMMON = ("text_field", "skip_bad", "start_over")  # options shared by shuffle and merge


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_sources()
        parser.exit()


@command("data list", "list the registered datasets with their files, size and license")
def run_list(_: argparse.Namespace) -> None:
    print_sources()


_SOURCE = (
    arg("source", "dataset name (see `moe-exp data list`), owner/name on the Hugging Face Hub, folder, file, "
        "or object store URL (s3://, gs://, hf://)"),
    repeated("--pattern GLOB", "files to use, instead of those registered for the dataset (repeatable)"),
    arg("--text-field NAME", "field that contains the text (default: as registered for the dataset, "
        "otherwise 'text')"),
    arg("--revision", "branch, tag or commit of the dataset (default: the one registered "
        "for it, otherwise 'main')"),
)  # fmt: skip


@command("data download", "download a dataset's files from the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN)")
@takes(
    *_SOURCE,
    arg("--output-dir FOLDER", "folder for the files (default: data/<name>_raw)", Path),
    arg("--max-workers N", "number of concurrent downloads", default=8),
    arg("--retries N", "number of consecutive failures before giving up", default=6),
    arg("--bandwidth MB/S", "bandwidth assumed by --dry-run (MB/s; default: 50)", float, default=50),
    flag("--dry-run", "print file count and size, free disk space and download time; write nothing"),
    flag("--start-over", "download everything again, at the newest commit of the revision"),
)
def run_download(arguments: argparse.Namespace) -> None:
    """Downloads and checks a dataset's files. Repeat the command to resume. If all files are present, no
    request is sent.
    """
    for name in ("max_workers", "retries", "bandwidth"):
        if (value := getattr(arguments, name)) <= 0:
            raise input_error(f"{name}={value}", "must be positive", f"omit --{name.replace('_', '-')}")
    fields = {"text_field": arguments.text_field, "revision": arguments.revision}
    source = resolve_source(arguments.source, patterns=arguments.pattern, **fields)
    folder = arguments.output_dir or Path("data") / f"{source.name}_raw"
    options = {name: getattr(arguments, name) for name in ("max_workers", "dry_run", "start_over")}
    rates = {"max_failures": arguments.retries, "bytes_per_second": arguments.bandwidth * 1e6}
    paths = download(source, folder, **options, **rates)
    if source.path is not None or source.is_embedded:
        why = f"{len(paths)} local files" if paths else "it is part of Python"
        print(f"{source.name}: nothing to download, {why}.")
    elif not arguments.dry_run:
        print(f"{source.name}: {len(paths)} files are complete in {folder}")


@command("data prepare", "download, convert and shuffle a dataset into shards")
@takes(
    *_SOURCE,
    arg("--list", "list the registered datasets and exit", action=_List, nargs=0),
    flag("--dry-run", "estimate input size, disk space and run time; write nothing"),
    data.DATA_DIR,
    either("--start-over", "convert and shuffle again; replaces earlier results, even those of other "
           "settings", action="store_true"),
    data.DOWNLOAD_AGAIN,
    group(
        "filters",
        either("--language CODES", "languages to keep (field 'language'), such as en or en,de",
               lambda text: text.split(",") if text else [], default=[], dest="languages"),
        either("--min-language-score X", "minimum value of the field 'language_score' (0 to 1)", float),
        either("--min-score X", "minimum value of the field 'score'", float),
        either("--min-chars N", "minimum length of a text (characters)", int),
        either("--max-chars N", "maximum length of a text (characters)", int),
        either("--limit N", "maximum number of documents to read", int),
        either("--dedup", "remove exact duplicates", action="store_true"),
        either("--near-dedup OPTIONS", "remove near duplicates (MinHash), with default options or the given "
               "options, such as '{hashes_per_bucket: 8}'", nargs="?", const="{}"),
        either("--filter FILTER", "filter to apply: NAME or 'NAME: {option: value}' (repeatable; see "
               "docs/corpus.md)",
               action="append", default=[], dest="filters"),
        either("--decontaminate FILE", "remove documents that share 12 consecutive words with a benchmark; "
               "FILE: JSONL file of the benchmark's texts, or lm-eval:TASK (repeatable)", action="append",
               default=[]),
        TEXT_DOCUMENTS,
        either("--skip-bad", "skip and count invalid documents instead of stopping", action="store_true"),
    ),
    group(
        "shards",
        either("--seed", "random seed for shuffling and for held-out documents (default: 0)", default=0),
        either("--nchunks N", "number of training shards", default=32),
        either("--valid-fraction X", "fraction of documents held out for validation", default=0.005),
        data.MEMORY,
    ),
    group(
        "execution",
        *execution("number of chunks (default: one per input file, at most 64)"),
        data.SHUFFLE_TASKS,
    ),
)  # fmt: skip
def run_prepare(arguments: argparse.Namespace) -> int:
    """Downloads a dataset, converts it to JSONL chunks in DATA_DIR/NAME and shuffles them into
    DATA_DIR/NAME_shuffled. Repeat the command to resume. Exit code 75: SLURM jobs are under way; the last
    job also shuffles the chunks.
    """
    from moe_exp.data.convert.convert import ConvertSettings
    from moe_exp.data.prepare import Preparation, plan, prepare
    from moe_exp.data.shuffle.shuffle import shuffle_summary

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names}

    wanted = Preparation(
        arguments.source,
        patterns=tuple(arguments.pattern),
        settings=ConvertSettings.of(arguments, arguments.tasks),
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
    arg("--text-field --text_field", "field that contains the text", default="text"),
    flag("--skip-bad", "skip and count invalid lines instead of stopping"),
    flag("--start-over", "create the output again from scratch, with the current settings and inputs"),
    flag("--dry-run", "print the estimated resources; write nothing"),
)


@command("data shuffle", "shuffle documents into shards and a validation file")
@takes(
    arg("inputs INPUT", f"files or folders: {KINDS}", Path, nargs="+"),
    arg("--output", "folder to create (default: the first input's name plus _shuffled)", Path),
    arg("--name", "prefix of the file names (default: the output folder's name without _shuffled)"),
    arg("--seed", "random seed (default: 0)", default=0),
    arg("--shards", "number of training files", default=32, dest="num_shards"),
    arg("--valid-fraction", "fraction of documents held out for validation, at least one document",
        default=0.005),
    arg("--memory", "memory budget such as 256MB or 8GB; the interpreter takes another 45 MB (default: a "
        "quarter of the free memory)", memory_bytes),
    TEXT_DOCUMENTS,
    *_HOW,
    group(
        "execution",
        *execution(
            "number of tasks on separate cores or machines (default: 1, in-process; resume with the same N)"
        ),
    ),
)  # fmt: skip
def run_shuffle(arguments: argparse.Namespace) -> int:
    """Shuffles documents globally into shards NAME.chunk.00.jsonl ... and NAME.val.jsonl. The result depends
    on the inputs and their order, --seed, --shards and --valid-fraction, but not on --memory or the machine.
    Repeat the command to resume.
    """
    # before numpy is imported: no matrix products here, and OpenBLAS's idle threads spin
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from moe_exp.data.shuffle import shuffle

    first = arguments.inputs[0].absolute()
    # derive the output's name from the last path component without a pattern
    while glob.has_magic(first.name) and not first.exists():
        first = first.parent
    suffix = ending(first.name) or first.suffix
    base = first.name if first.is_dir() else first.name[: len(first.name) - len(suffix)]
    output = arguments.output or first.with_name(f"{base}_shuffled")
    name = arguments.name or output.absolute().name.removesuffix("_shuffled")
    options = {"name": name, "num_shards": arguments.num_shards, "valid_fraction": arguments.valid_fraction}
    if arguments.dry_run:
        options |= {"text_field": arguments.text_field, "memory_bytes": arguments.memory}
        checked = shuffle.check_shuffle(arguments.inputs, output, **options)
        estimate = shuffle.estimate_shuffle(checked, arguments.memory)
        if (arguments.tasks or 1) > 1:
            estimate |= {"tasks": arguments.tasks}
        print_summary(f"shuffle to {output}, dry run", estimate)
        return 0
    options |= {name: getattr(arguments, name) for name in ("seed", "tasks", *_COMMON)}
    options |= {"rule": TextRule(arguments.text_documents), "execution": execution_of(arguments)}
    manifest = shuffle.shuffle_documents(arguments.inputs, output, **options, memory_bytes=arguments.memory)
    if manifest is None:
        return under_way()
    print_summary(f"shuffled: {output}", shuffle.shuffle_summary(manifest))
    return 0


@command("data merge", "merge shards into one JSONL file, without the validation file")
@takes(
    arg("--input_dir --input-dir", "folder with the shards", Path, required=True),
    arg("--valid_file_name --valid-file-name",
        "validation file in the input folder, excluded from the merge (the suffix .jsonl is optional)",
        required=True),
    arg("--output_file_name --output-file-name",
        "path of the merged file; a name without a folder is put next to the input folder (the suffix .jsonl "
        "is optional)",
        required=True),
    *_HOW,
)  # fmt: skip
def run_merge(arguments: argparse.Namespace) -> None:
    """Merges a folder's shards into one file to use with preprocess_data.py --input. The file is beside the
    folder: INPUT_DIR/../OUTPUT_FILE_NAME.jsonl.
    """
    from moe_exp.data.shuffle.merge import estimate_merge, merge, merge_summary

    input_dir, given = arguments.input_dir.absolute(), Path(arguments.output_file_name)
    # a bare name is next to the input folder; a path is used as it is
    output = given if given.name != arguments.output_file_name else input_dir.parent / given
    if arguments.dry_run:
        options = {name: getattr(arguments, name) for name in ("valid_file_name", "text_field")}
        return print_summary(f"merge to {output}, dry run", estimate_merge(input_dir, output, **options))
    options = {name: getattr(arguments, name) for name in ("valid_file_name", *_COMMON)}
    manifest = merge(input_dir, output, **options)
    return print_summary(f"merged: {output.parent / manifest['outputs'][0]['name']}", merge_summary(manifest))
