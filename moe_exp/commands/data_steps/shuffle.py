"""`moe-exp data shuffle` and `moe-exp data merge`."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path

from moe_exp.commands.data_steps.shared import (
    add_execution,
    add_text_documents,
    execution_of,
    memory_bytes,
    under_way,
)
from moe_exp.data.kinds import KINDS, TextRule
from moe_exp.host.files import ending

_COMMON = ("text_field", "skip_bad", "start_over")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    _add_shuffle(subparsers.add_parser("shuffle", help="shuffle documents into shards and a validation file"))
    about = "merge shards into one JSONL file, without the validation file"
    _add_merge(subparsers.add_parser("merge", help=about))


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
    from moe_exp.host.progress import print_summary

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
        files = check_shuffle(arguments.inputs, output, **options)
        estimate = estimate_shuffle(files, arguments.memory)
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
    from moe_exp.host.progress import print_summary

    input_dir, given = arguments.input_dir.absolute(), Path(arguments.output_file_name)
    output = given if given.name != arguments.output_file_name else input_dir.parent / given
    if arguments.dry_run:
        options = {name: getattr(arguments, name) for name in ("valid_file_name", "text_field")}
        estimate = estimate_merge(input_dir, output, **options)
        return print_summary(f"merge to {output}, dry run", estimate)
    options = {name: getattr(arguments, name) for name in ("valid_file_name", *_COMMON)}
    manifest = merge(input_dir, output, **options)
    return print_summary(f"merged: {output.parent / manifest['outputs'][0]['name']}", merge_summary(manifest))
