"""`moe-exp data list`, `download`."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_exp.data.hub import download
from moe_exp.data.sources import print_sources, resolve_source


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    _add_list(subparsers)
    _add_download(subparsers)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a source: for `download` and `prepare`."""
    parser.add_argument("source", help="a name of `moe-exp data list`, a dataset owner/name of the hub, a folder, or a file")
    parser.add_argument("--pattern", action="append", default=[], metavar="GLOB", help="which files instead; may be repeated")
    parser.add_argument("--text-field", metavar="NAME", help="field with the text (default: the source's, or text)")
    parser.add_argument("--revision", help="branch, tag or commit of the dataset (default: the source's, or main)")


def _add_list(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("list", help="the datasets that have a name here: files, size, licence")
    parser.set_defaults(run=lambda _: print_sources())


def _add_download(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "download",
        help="the files of a dataset, from the hub (HF_ENDPOINT, HF_TOKEN)",
        description="Fetches and checks a dataset's files. Called again it goes on where it stopped; when all is there it asks nobody.",
    )
    add_source_arguments(parser)
    parser.add_argument("--output-dir", type=Path, metavar="FOLDER", help="(default: data/<name>_raw)")
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="files at the same time (default: 8)")
    parser.add_argument("--retries", type=int, default=6, metavar="N", help="failures in a row before it gives up (default: 6)")
    parser.add_argument("--bandwidth", type=float, default=50, metavar="MB/S", help="for the estimate of --dry-run (default: 50)")
    parser.add_argument("--dry-run", action="store_true", help="print files, bytes, free disk and time, and write nothing")
    parser.add_argument("--start-over", action="store_true", help="fetch everything again, at the newest commit of the revision")
    parser.set_defaults(run=_download)


def _download(arguments: argparse.Namespace) -> None:
    for name in ("max_workers", "retries", "bandwidth"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"{name}={getattr(arguments, name)}: has to be positive. Fix: leave it out.")
    source = resolve_source(arguments.source, patterns=arguments.pattern, text_field=arguments.text_field, revision=arguments.revision)
    folder = arguments.output_dir or Path("data") / f"{source.name}_raw"
    paths = download(
        source,
        folder,
        max_workers=arguments.max_workers,
        dry_run=arguments.dry_run,
        start_over=arguments.start_over,
        max_failures=arguments.retries,
        bytes_per_second=arguments.bandwidth * 1e6,
    )
    if source.repository is None:
        print(f"{source.name}: nothing to download, {f'{len(paths)} files are here' if paths else 'it comes with Python'}.")
    elif not arguments.dry_run:
        print(f"{source.name}: {len(paths)} files are complete in {folder}")
