"""`moe-exp data list`, `download`, `prepare`, `shuffle`, `merge`: from documents to shards."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path
from typing import Any

from moe_exp.commands.data_steps.shared import (
    add,
    add_execution,
    add_text_documents,
    execution_of,
    memory_bytes,
    under_way,
)
from moe_exp.commands.guard import UNDER_WAY
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import print_sources, resolve_source
from moe_exp.data.kinds import KINDS, TextRule, input_error
from moe_exp.host.files import ending
from moe_exp.host.progress import print_summary

_COMMON = ("text_field", "skip_bad", "start_over")


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_sources()
        parser.exit()


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    about = "list the datasets that are known by name: files, size, license"
    subparsers.add_parser("list", help=about).set_defaults(run=lambda _: print_sources())
    _add_download(subparsers)
    _add_prepare(subparsers)
    _add_shuffle(subparsers.add_parser("shuffle", help="shuffle documents into shards and a validation file"))
    about = "merge shards into one JSONL file, without the validation file"
    _add_merge(subparsers.add_parser("merge", help=about))


def _add_source(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "a name of `moe-exp data list`, a dataset owner/name of the hub, a folder, a file, or a URL of"
    add("source", help=f"{about} an object store (s3://, gs://, hf://)")
    add("--pattern", action="append", default=[], metavar="GLOB", help="which files instead; may be repeated")
    add("--text-field", metavar="NAME", help="field with the text (default: the source's, or text)")
    add("--revision", help="branch, tag or commit of the dataset (default: the source's, or main)")


def _add_download(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "download",
        help="download the files of a dataset from the hub (HF_ENDPOINT, HF_TOKEN)",
        description=(
            "Fetches and checks a dataset's files. Called again, it resumes where it stopped; when all is"
            " there it asks nobody."
        ),
    )
    _add_source(parser)
    add = parser.add_argument
    add("--output-dir", type=Path, metavar="FOLDER", help="(default: data/<name>_raw)")
    add("--max-workers", type=int, default=8, metavar="N", help="files at the same time (default: 8)")
    about = "failures in a row before it gives up (default: 6)"
    add("--retries", type=int, default=6, metavar="N", help=about)
    about = "for the estimate of --dry-run (default: 50)"
    add("--bandwidth", type=float, default=50, metavar="MB/S", help=about)
    add("--dry-run", action="store_true", help="print files, bytes, free disk and time, and write nothing")
    about = "fetch everything again, at the newest commit of the revision"
    add("--start-over", action="store_true", help=about)
    parser.set_defaults(run=_download)


def _download(arguments: argparse.Namespace) -> None:
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


def _add_prepare(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prepare",
        help="download, convert and shuffle a dataset into shards",
        description=(
            "Downloads a dataset, converts it to JSONL chunks in DATA_DIR/NAME and shuffles them into"
            f" DATA_DIR/NAME_shuffled. Called again, it resumes where it stopped. Exit code {UNDER_WAY}:"
            " SLURM jobs are under way; the last continues to the shuffle."
        ),
    )
    _add_source(parser)
    parser.add_argument("--list", action=_List, nargs=0, help="print the datasets that have a name, and end")
    about = "print files, disk and time, and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)
    add(parser, "--data-dir", type=Path, default=Path("data"), metavar="FOLDER", help="(default: data)")
    about = "convert and shuffle again, with other settings too"
    add(parser, "--start-over", action="store_true", help=about)
    add(parser, "--download-again", action="store_true", help="fetch the files again too")
    _add_selection(parser.add_argument_group("what is kept"))
    group = parser.add_argument_group("shards")
    about = "of the order and of the validation documents (default: 0)"
    add(group, "--seed", type=int, default=0, help=about)
    add(group, "--nchunks", type=int, default=32, metavar="N", help="shards for training (default: 32)")
    about = "of the texts, for validation (default: 0.005)"
    add(group, "--valid-fraction", type=float, default=0.005, metavar="X", help=about)
    about = "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)"
    add(group, "--memory", type=memory_bytes, metavar="SIZE", help=about)
    group = parser.add_argument_group("where the tasks run")
    add_execution(group, "number of chunks (default: one per input file, at most 64)")
    about = "tasks of the shuffle (default: 1; on SLURM and Ray as many as chunks if over 50 GB)"
    add(group, "--shuffle-tasks", type=int, metavar="N", help=about)
    parser.set_defaults(run=_prepare)


def _add_selection(group: Any) -> None:
    add(group, "--language", metavar="CODES", help="values of the field language, as in en or en,de")
    add(group, "--min-language-score", type=float, metavar="X", help="of the field language_score, 0 to 1")
    add(group, "--min-score", type=float, metavar="X", help="of the field score")
    add(group, "--min-chars", type=int, metavar="N", help="shortest text, characters")
    add(group, "--max-chars", type=int, metavar="N", help="longest text, characters")
    add(group, "--limit", type=int, metavar="N", help="maximum number of documents to read")
    add(group, "--dedup", action="store_true", help="keep one of each text")
    about = "keep one of texts that are alike, by MinHash; options as in '{hashes_per_bucket: 8}'"
    add(group, "--near-dedup", nargs="?", const="{}", metavar="OPTIONS", help=about)
    about = "a filter by name, or 'NAME: {option: value}'; may be repeated (docs/corpus.md lists them)"
    add(group, "--filter", action="append", default=[], metavar="FILTER", help=about)
    about = "JSONL of benchmark texts, or lm-eval:TASK; drops what shares 12 words in a row; may be repeated"
    add(group, "--decontaminate", action="append", default=[], metavar="FILE", help=about)
    add_text_documents(group)
    about = "skip and count what is no document instead of stopping"
    add(group, "--skip-bad", action="store_true", help=about)


def _prepare(arguments: argparse.Namespace) -> int:
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


# shuffle and merge


def _add_shuffle(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shuffles documents globally into shards NAME.chunk.00.jsonl ... and NAME.val.jsonl. The result"
        " depends on the inputs in their order, on --seed, --shards and --valid-fraction, not on --memory or"
        " the machine. An interrupted call continues when it is repeated."
    )
    add = parser.add_argument
    about = f"files, or folders of them: {KINDS}"
    add("inputs", nargs="+", type=Path, metavar="INPUT", help=about)
    about = "folder to make (default: that of the input, or its file's name, with _shuffled)"
    add("--output", type=Path, help=about)
    add("--name", help="what the file names begin with (default: the output's name without _shuffled)")
    add("--seed", type=int, default=0)
    add("--shards", type=int, default=32, dest="num_shards", help="training files (default: 32)")
    about = "of the texts, for validation; at least one (default: 0.005)"
    add("--valid-fraction", type=float, default=0.005, help=about)
    about = "budget such as 256MB or 8GB, besides the interpreter's 45 MB (default: a quarter of what is"
    add("--memory", type=memory_bytes, help=f"{about} available)")
    add_text_documents(parser)
    _add_common(parser)
    about = "tasks, on as many cores or machines (default: 1, this process); resume with the same number"
    add_execution(parser.add_argument_group("where the tasks run"), about)
    parser.set_defaults(run=_shuffle)


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Merges the shards of a folder into one file, beside the folder: INPUT_DIR/../OUTPUT_FILE_NAME.jsonl."
        " That is the file for preprocess_data.py --input."
    )
    parser.add_argument("--input_dir", "--input-dir", type=Path, required=True, help="folder with the shards")
    valid_help = "file in it to leave out, .jsonl may be left off"
    parser.add_argument("--valid_file_name", "--valid-file-name", required=True, help=valid_help)
    output_help = "of the merged file, .jsonl may be left off; one with a folder in it is taken as a path"
    parser.add_argument("--output_file_name", "--output-file-name", required=True, help=output_help)
    _add_common(parser)
    parser.set_defaults(run=_merge)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text-field", "--text_field", default="text", help="field with the text (default: text)")
    about = "skip and count lines that are no documents instead of stopping"
    add("--skip-bad", action="store_true", help=about)
    add("--start-over", action="store_true", help="make it again, with other settings or inputs too")
    add("--dry-run", action="store_true", help="print what it would take, and touch nothing")


def _shuffle(arguments: argparse.Namespace) -> int:
    # before numpy: no matrices here, and its idle threads spin
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from moe_exp.data.shuffle.shuffle import (
        check_shuffle,
        estimate_shuffle,
        shuffle_documents,
        shuffle_summary,
    )

    first = arguments.inputs[0].absolute()
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


def _merge(arguments: argparse.Namespace) -> None:
    from moe_exp.data.shuffle.merge import estimate_merge, merge, merge_summary

    input_dir, given = arguments.input_dir.absolute(), Path(arguments.output_file_name)
    output = given if given.name != arguments.output_file_name else input_dir.parent / given
    if arguments.dry_run:
        options = {name: getattr(arguments, name) for name in ("valid_file_name", "text_field")}
        estimate = estimate_merge(input_dir, output, **options)
        return print_summary(f"merge to {output}, dry run", estimate)
    options = {name: getattr(arguments, name) for name in ("valid_file_name", *_COMMON)}
    manifest = merge(input_dir, output, **options)
    return print_summary(f"merged: {output.parent / manifest['outputs'][0]['name']}", merge_summary(manifest))
