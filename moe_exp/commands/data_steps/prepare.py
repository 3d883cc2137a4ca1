"""`moe-exp data list`, `download`, `prepare`."""

from __future__ import annotations

import argparse
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
        if getattr(arguments, name) <= 0:
            raise ValueError(f"{name}={getattr(arguments, name)}: has to be positive. Fix: leave it out.")
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


# prepare


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
    _add_shards(parser.add_argument_group("shards"))
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


def _add_shards(group: Any) -> None:
    about = "of the order and of the validation documents (default: 0)"
    add(group, "--seed", type=int, default=0, help=about)
    add(group, "--nchunks", type=int, default=32, metavar="N", help="shards for training (default: 32)")
    about = "of the texts, for validation (default: 0.005)"
    add(group, "--valid-fraction", type=float, default=0.005, metavar="X", help=about)
    about = "of a task of the shuffle, as in 8GB (default: a quarter of what is left for all of them)"
    add(group, "--memory", type=memory_bytes, metavar="SIZE", help=about)


def _prepare(arguments: argparse.Namespace) -> int:
    from moe_exp.data.convert.benchmarks import benchmarks_of
    from moe_exp.data.convert.convert import ConvertSettings
    from moe_exp.data.convert.duplicates import near_duplicates
    from moe_exp.data.convert.named_filters import NamedFilter
    from moe_exp.data.kinds import TextRule
    from moe_exp.data.prepare import Preparation, plan, prepare
    from moe_exp.data.shuffle.shuffle import shuffle_summary
    from moe_exp.host.progress import print_summary

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names}

    wanted = Preparation(
        arguments.source,
        patterns=tuple(arguments.pattern),
        settings=ConvertSettings(
            languages=tuple(arguments.language.split(",")) if arguments.language else (),
            rule=TextRule(arguments.text_documents),
            filters=tuple(map(NamedFilter.parse, arguments.filter)),
            near_dedup=near_duplicates(arguments.near_dedup),
            decontaminate=benchmarks_of(arguments.decontaminate),
            **given("min_language_score", "min_score", "min_chars", "max_chars", "limit"),
            **given("tasks", "skip_bad", "dedup"),
        ),
        execution=execution_of(arguments),
        shuffle={"num_shards": arguments.nchunks, "memory_bytes": arguments.memory}
        | given("seed", "valid_fraction"),
        **given("data_dir", "revision", "text_field", "start_over", "download_again", "shuffle_tasks"),
    )
    if arguments.dry_run:
        plan(wanted)
        return 0
    manifest = prepare(wanted)
    if manifest is None:
        return under_way(arguments.source)
    shuffled = f"{arguments.data_dir / wanted.source().name}_shuffled"
    print_summary(f"shuffled: {shuffled}", shuffle_summary(manifest))
    return 0
