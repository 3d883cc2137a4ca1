"""`moe-exp data push`, `pull`, `inspect` and `verify`, of finished outputs."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_exp.commands.guard import add_json, print_json


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    push = subparsers.add_parser(
        "push",
        help="copy what a step has made to an object store (s3://, gs://, hf://)",
        description=(
            "Copies the files of a finished step, and its manifest last: without it they are not complete."
            " Called again, it continues with the files that are not there. Training reads token files from"
            " there: TRAIN_DATA=URL/PREFIX."
        ),
    )
    push.add_argument("path", type=Path, help="folder with manifest.json, or prefix of token files")
    push.add_argument("url", help="folder at the store, as in s3://bucket/corpus")
    push.set_defaults(run=_push)
    pull = subparsers.add_parser(
        "pull",
        help="copy it back",
        description=(
            "Copies what `push` has made into a folder, and compares every hash. Called again, it continues"
            " where it stopped."
        ),
    )
    pull.add_argument("url", help="folder at the store, or prefix of token files there")
    pull.add_argument("folder", type=Path, help="gets the files")
    pull.set_defaults(run=_pull)
    about = "describe token files or JSONL files: counts, lengths, duplicates, samples"
    inspect = subparsers.add_parser("inspect", help=about)
    inspect.add_argument("path", type=Path, help="prefix of .bin and .idx, a JSONL file, or a folder of such")
    about = "tokenizer.json or a folder with it, to show samples as text"
    inspect.add_argument("--tokenizer", type=Path, help=about)
    inspect.add_argument("--samples", type=int, default=3, help="documents to show (default: 3)")
    inspect.add_argument("--text-field", default="text", help="field of JSONL with the text (default: text)")
    about = "tokens of a training sample, for the share of documents that it cuts (default: 4096)"
    inspect.add_argument("--seq-len", type=int, default=4096, help=about)
    add_json(inspect)
    inspect.set_defaults(run=_inspect)
    about = "compare files with their manifest, or with another corpus"
    verify = subparsers.add_parser("verify", help=about)
    verify.add_argument("path", type=Path, help="a folder, prefix or file that moe-exp data has made")
    about = "compare the documents with those of OTHER instead, in whatever order"
    verify.add_argument("--against", type=Path, metavar="OTHER", help=about)
    about = "field of JSONL with the text, with --against (default: text)"
    verify.add_argument("--text-field", default="text", help=about)
    verify.set_defaults(run=_verify)


def _push(arguments: argparse.Namespace) -> None:
    from moe_exp.data.download.stores import push

    print(f"complete: {push(arguments.path, arguments.url)}")


def _pull(arguments: argparse.Namespace) -> None:
    from moe_exp.data.download.stores import pull

    paths = pull(arguments.url, arguments.folder)
    print(f"{len(paths)} files are complete in {arguments.folder}")


def _inspect(arguments: argparse.Namespace) -> None:
    from moe_exp.data.inspection import inspect_path, print_inspection

    options = {"tokenizer": arguments.tokenizer, "text_field": arguments.text_field}
    report = inspect_path(arguments.path, num_samples=arguments.samples, seq_len=arguments.seq_len, **options)
    (print_json if arguments.json else print_inspection)(report)


def _verify(arguments: argparse.Namespace) -> int:
    from moe_exp.data.verification import compare, verify

    code = 0
    other, field = arguments.against, arguments.text_field
    # each is printed as soon as it is known
    for finding in [compare(arguments.path, other, text_field=field)] if other else verify(arguments.path):
        print(f"{finding.name}: {finding.problem or 'ok, ' + finding.facts}", flush=True)
        code |= bool(finding.problem)
    return code
