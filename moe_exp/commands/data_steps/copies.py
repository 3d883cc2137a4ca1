"""`moe-exp data push`, `pull`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    parser = subparsers.add_parser(
        "push",
        help="copy what a step has made to an object store (s3://, gs://, hf://)",
        description=(
            "Copies the files of a finished step, and its manifest last: without it they are not complete."
            " Called again, it continues with the files that are not there. Training reads token files from"
            " there: TRAIN_DATA=URL/PREFIX."
        ),
    )
    parser.add_argument("path", type=Path, help="folder with manifest.json, or prefix of token files")
    parser.add_argument("url", help="folder at the store, as in s3://bucket/corpus")
    parser.set_defaults(run=_push)
    parser = subparsers.add_parser(
        "pull",
        help="copy it back",
        description=(
            "Copies what `push` has made into a folder, and compares every hash. Called again, it continues"
            " where it stopped."
        ),
    )
    parser.add_argument("url", help="folder at the store, or prefix of token files there")
    parser.add_argument("folder", type=Path, help="gets the files")
    parser.set_defaults(run=_pull)


def _push(arguments: argparse.Namespace) -> None:
    from moe_exp.data.copies import push

    print(f"complete: {push(arguments.path, arguments.url)}")


def _pull(arguments: argparse.Namespace) -> None:
    from moe_exp.data.copies import pull

    paths = pull(arguments.url, arguments.folder)
    print(f"{len(paths)} files are complete in {arguments.folder}")
