"""`moe-exp data inspect` and `moe-exp data verify`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moe_exp.commands.guard import add_json, print_json

if TYPE_CHECKING:
    from moe_exp.data.inspect.verification import Finding

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    inspect = subparsers.add_parser(
        "inspect", help="describe token files or JSONL files: counts, lengths, duplicates, samples"
    )
    inspect.add_argument("path", type=Path, help="prefix of .bin and .idx, a JSONL file, or a folder of such")
    inspect.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json or a folder with it, to show samples as text"
    )
    inspect.add_argument("--samples", type=int, default=3, help="documents to show (default: 3)")
    inspect.add_argument("--text-field", default="text", help="field of JSONL with the text (default: text)")
    about = "tokens of a training sample, for the share of documents that it cuts (default: 4096)"
    inspect.add_argument("--seq-len", type=int, default=4096, help=about)
    add_json(inspect)
    inspect.set_defaults(run=_inspect)
    check = subparsers.add_parser("verify", help="compare files with their manifest, or with another corpus")
    add = check.add_argument
    add("path", type=Path, help="a folder, prefix or file that moe-exp data has made")
    about = "compare the documents with those of OTHER instead, in whatever order"
    add("--against", type=Path, metavar="OTHER", help=about)
    add("--text-field", default="text", help="field of JSONL with the text, with --against (default: text)")
    check.set_defaults(run=_verify)


def _inspect(arguments: argparse.Namespace) -> int:
    from moe_exp.data.inspect.inspection import inspect_path, print_inspection

    options = {"tokenizer": arguments.tokenizer, "text_field": arguments.text_field}
    report = inspect_path(arguments.path, num_samples=arguments.samples, seq_len=arguments.seq_len, **options)
    if arguments.json:
        print_json(report)
    else:
        print_inspection(report)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from moe_exp.data.inspect.verification import compare, verify

    if arguments.against:
        return _print_finding(compare(arguments.path, arguments.against, text_field=arguments.text_field))
    return max([_print_finding(finding) for finding in verify(arguments.path)], default=0)


def _print_finding(finding: Finding) -> int:
    """Prints a line as soon as it is known; 1 for a problem."""
    print(f"{finding.name}: {finding.problem or 'ok, ' + finding.facts}", flush=True)
    return int(bool(finding.problem))
