"""Declarations of commands and their arguments, and the parsers built from them.

Imports only the standard library, because `doctor` must also run before any packages are installed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from moe_exp.host.exit_codes import printable

Argument = Callable[[Any], object]  # adds itself to a parser, or to a group of one
Kind = Callable[[str], Any]
Handler = Callable[[argparse.Namespace], int | None]

_MOST_COLUMNS = 110
_EXAMPLES = "examples:"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ExactParser(argparse.ArgumentParser):
    """Parser that refuses abbreviated flags. Errors are one line and suggest the closest valid word."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": HelpFormatter, **options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Prints the message, with the nearest valid command or value, and exits with code 2."""
        found = re.fullmatch(r"argument (.+): invalid choice: '(.+)' \(choose from (.+)\)", message)
        if found and (near := difflib.get_close_matches(found[2], re.findall(r"[\w.-]+", found[3]), n=1)):
            # argparse would list every choice
            message = f"argument {found[1]}: invalid choice: '{found[2]}', did you mean {near[0]}?"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {printable(message)}{end} Help: {self.prog} --help\n")

    def refuse_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Exits with an error for arguments that are not defined."""
        from moe_exp.config.settings_file import similar_settings

        flags = [one[2:].replace("-", "_") for one in self._option_string_actions if one.startswith("--")]
        lines = []
        for flag in (one.partition("=")[0] for one in arguments if one.startswith("--")):
            near = [f"--{one.replace('_', '-')}" for one in similar_settings(flag, flags)]
            lines.append(f"{flag} does not exist" + (f", did you mean {' or '.join(near)}?" if near else ""))
        self.error("; ".join(lines) or f"unrecognized arguments: {' '.join(arguments)}")


def arg(words: str, about: str | None = None, kind: Kind | None = None, /, **options: Any) -> Argument:
    """Declares an argument.

    Args:
        words: names and metavar of the argument, such as `--top N` or `source SRC`.
        about: help text; a default other than 0 or '' is appended unless the text already states it.
        kind: type of the value, or a function that parses the value. If omitted: the type of `default`
            in `options` if `default` is a number, else str.
        options: options of argparse's `add_argument`.
    """
    names = [word for word in words.split() if word.startswith("-")] or words.split()[:1]
    if metavar := words.split()[len(names) :]:
        options["metavar"] = metavar[0]
    default = options.get("default")
    if kind is None and type(default) in (int, float):
        kind = type(default)
    if about and default and isinstance(default, str | int | float) and "default: " not in about:
        about = f"{about} (default: {default})"
    options |= {"type": kind} if kind else {}
    return lambda parser: parser.add_argument(*names, help=about, **options)


def flag(words: str, about: str, /) -> Argument:
    """Declares an option without a value."""
    return arg(words, about, action="store_true")


def string(words: str, about: str, /) -> Argument:
    """Declares a text option; the default is an empty string."""
    return arg(words, about, default="")


def repeated(words: str, about: str, /) -> Argument:
    """Declares a repeatable option, whose values are collected in a list."""
    return arg(words, about, action="append", default=[])


JSON = flag("--json", "print one JSON object and nothing else")  # for commands that use `print_json`


def group(title: str, *arguments: Argument, about: str | None = None) -> Argument:
    """Groups arguments under a title in the help."""
    return _together(lambda parser: parser.add_argument_group(title, about), arguments)


def one_of(*arguments: Argument, required: bool = False) -> Argument:
    """Declares mutually exclusive arguments."""
    return _together(lambda parser: parser.add_mutually_exclusive_group(required=required), arguments)


def _together(group_in: Callable[[Any], Any], arguments: Sequence[Argument]) -> Argument:
    def add(parser: argparse.ArgumentParser) -> None:
        place = group_in(parser)
        for argument in arguments:
            argument(place)

    return add


@dataclass
class _Declared:
    about: str
    options: dict[str, Any]  # of the parser
    arguments: Sequence[Argument] = ()
    run: Handler | None = None  # None: requires a subcommand


_taken: dict[Handler, tuple[Argument, ...]] = {}
_declared: dict[str, _Declared] = {}  # by the words after `moe-exp`, in the order of the help


def takes(*arguments: Argument) -> Callable[[Handler], Handler]:
    """Declares the arguments of the decorated command function, in the order in which `--help` lists them."""

    def declare(run: Handler) -> Handler:
        _taken[run] = arguments
        return run

    return declare


def command(path: str, about: str, **options: Any) -> Callable[[Handler], Handler]:
    """Declares the command `moe-exp PATH`, which runs the decorated function. Without a decorated function,
    the command is a group of subcommands.

    Args:
        about: description in the list of commands.
        options: options of the command's parser. The docstring of the decorated function becomes the
            command's description in `--help`.
    """
    own = _declared[path] = _Declared(about, options)

    def declare(run: Handler) -> Handler:
        own.run, own.arguments = run, _taken.get(run, ())
        if run.__doc__:
            own.options["description"] = " ".join(run.__doc__.split())
        return run

    return declare


def add_parser(subparsers: Any, path: str) -> ExactParser:
    """Adds the parser of a declared command and the parsers of its subcommands."""
    own = _declared[path]
    texts: dict[str, Any] = {"description": f"{own.about[0].upper()}{own.about[1:]}."}
    if (group := _declared.get(path.rpartition(" ")[0])) and group.run:
        # an omitted flag must not override one given before the subcommand: `moe-exp plan --tp 4 run`
        texts["argument_default"] = argparse.SUPPRESS
    if path in EXAMPLES:
        texts["epilog"] = "\n  ".join((_EXAMPLES, *EXAMPLES[path]))
    parser: ExactParser = subparsers.add_parser(path.split()[-1], help=own.about, **texts | own.options)
    if below := [other for other in _declared if other.rpartition(" ")[0] == path]:
        # without prog, argparse would derive the name from a custom `usage`
        commands = parser.add_subparsers(
            dest=f"{path}_command", metavar="command", required=own.run is None, prog=parser.prog
        )
        for other in below:
            add_parser(commands, other)
    if own.run:
        parser.set_defaults(run=own.run)
    for argument in own.arguments:
        argument(parser)
    if parser.usage is None and any((one.title or "").endswith(" settings") for one in parser._action_groups):
        parser.usage = f"{parser.prog} [options] [settings]"
    return parser


def memory_bytes(text: str) -> int:
    """Converts a size such as `256MB`, `8GB`, `8GiB` or a plain number to bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if not match or match[2] not in _UNITS or len(match[1]) > 20:
        rule = "must be a number with KB, MB, GB, MiB or GiB. Fix: write for example 256MB"
        raise argparse.ArgumentTypeError(f"memory={text}: {rule}.")
    return int(float(match[1]) * _UNITS[match[2]])


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def positive_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the options in `names` that the user has set. Raises ValueError if one is not positive."""
    from moe_exp.config import setting_error

    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            fix = "set a positive number, or omit it"
            raise setting_error(name, f"{value:g}", "must be a positive number", fix)
    return given


def print_json(value: object) -> None:
    """Prints `value` as one JSON object; converts paths and other unsupported types to strings."""
    print(json.dumps(value, ensure_ascii=False, default=str))


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that limits the width of the help, and keeps the line breaks of examples."""

    def __init__(self, prog: str, **options: Any):
        columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        super().__init__(prog, **{"width": columns - 2, "max_help_position": 28, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return textwrap.indent(text, indent)
        return super()._fill_text(text, width, indent)


def _path_of(example: str) -> str:
    """Extracts the command (such as `train` or `ckpt info`) from an example line."""
    first, second = [*example.split(), ""][1:3]
    has_commands = first in ("data", "ckpt", "mup", "convert", "plan", "watch") and second[:1].isalpha()
    return f"{first} {second}" if has_commands else first


# Examples for `--help`.
_LINES = """
moe-exp train                                        # PRESET=cpu on an embedded corpus
moe-exp train --train-data folder/of/text --num-experts 16 --topk 2 --dry-run
moe-exp train --resume runs/NAME --train-iters 1000   # continue a run with its own settings
moe-exp train --config runs/NAME --lr 0.001 --run-name other_lr   # a run with settings of another
moe-exp data list
moe-exp data download fineweb_edu_10bt --dry-run
moe-exp data prepare fineweb_edu_10bt --dry-run        # size, time and disk
moe-exp data prepare fineweb_edu_10bt --workers 16
moe-exp data prepare my_crawl --filter gopher-quality --filter pii --dedup --near-dedup
moe-exp data shuffle data/mine --output data/mine_shuffled --shards 8
moe-exp data shuffle 'notes/**/*.md' --output data/notes --text-documents block
moe-exp data shuffle data/web --tasks 512 --executor slurm --partition cpu
moe-exp data mix mixture.yaml --dry-run    # size, time and disk of each source
moe-exp data mix mixture.yaml --workers 16
moe-exp data push data/mine_text_document s3://bucket/corpus    # token files
moe-exp data push data/mine_shuffled s3://bucket/mine_shuffled
moe-exp data pull s3://bucket/corpus data/corpus
moe-exp data merge --input-dir mine_shuffled --valid-file-name mine.val --output-file-name mine
moe-exp data tokenize --input mine.jsonl --output-prefix mine --tokenizer-model tok --append-eod
moe-exp data tokenize --input mine_shuffled --output-prefix mine --tokenizer-model tok --dry-run
moe-exp data tokenize --input big_shuffled --output-prefix big --tokenizer-model tok --append-eod \
--tasks 512 --executor slurm --partition cpu
moe-exp data train-tokenizer data/mine.jsonl --out data/tok --vocab-size 8192
moe-exp data inspect data/mine_text_document
moe-exp data verify data/mine_shuffled
moe-exp ckpt info runs/NAME
moe-exp ckpt verify runs/NAME
moe-exp ckpt reshape runs/NAME new/checkpoints --weights-only --dtype bf16
moe-exp ckpt diff runs/ONE runs/OTHER
moe-exp ckpt average runs/NAME runs/NAME_mean --last 4
moe-exp ckpt average runs/NAME runs/NAME_mean --last 8 --weights 1-sqrt
moe-exp ckpt prune runs/NAME --keep-last 3 --dry-run
moe-exp ckpt shrink old/checkpoints --dry-run
moe-exp compare                                      # dense against MoE at equal FLOPs
moe-exp compare --repeats 3 --train-iters 500
moe-exp compare --variant e8:num_experts=8 --variant e32:num_experts=32 --dry-run
moe-exp ladder --sizes 16,24,32,48          # scaling laws and effective speedup of dmoe over dense
moe-exp ladder my_ladder.yaml --repeats 5 --dry-run
moe-exp mup check                                    # are outputs the same size at every width?
moe-exp mup check --parametrization standard --experts 4,8,16
moe-exp mup transfer --widths 32,64,128 --lrs 0.004,0.008,0.016,0.032,0.064
moe-exp convert from-hf hf://Qwen/Qwen3-30B-A3B checkpoints/qwen3
moe-exp convert to-hf runs/NAME exported
moe-exp plan --preset qwen3-30b-a3b --gpus 64 --gpu H100-80GB --ep 8 --tokens 1T
moe-exp plan run --preset mixtral-8x7b --gpus 128 --pp 8 --ep 8 --mbsz 1
moe-exp plan search --preset mixtral-8x7b --gpus 128 --gbsz 1024
moe-exp plan search --preset mixtral-8x7b --gpus 128 --gbsz 1024 --explain TP=4,PP=8,EP=8
moe-exp plan search --preset mixtral-8x7b --gpus 128 --gbsz 1024 --export topology.env
moe-exp plan calibrate --runs runs.csv --out profile.json
moe-exp plan predict --runs runs.csv --out predicted.csv
moe-exp plan hardware
moe-exp plan explain --preset qwen3-30b-a3b --gpus 32 --gpu H100 --pp 4 --ep 8 --svg step.svg
moe-exp plan roofline --preset mixtral-8x7b --gpus 64 --gpu B200 --ep 8
moe-exp plan compare-hardware --preset qwen3-30b-a3b --gpus 64 --gbsz 1024 --prices H100=2,B200=4
moe-exp plan nearest --preset qwen3-30b-a3b --gpus 64 --gpu H100 --ep 8
moe-exp report runs/dense runs/moe                   # report.html; 'runs/*' for all runs
moe-exp report runs/moe --watch                      # follow a run in the terminal
moe-exp report runs/dense runs/moe --format md
moe-exp slurm --nnodes 16 --gpus-per-node 8 --time-limit 24:00:00 --num-jobs 5 --dry-run
moe-exp slurm --nnodes 16 --gpus-per-node 8 --preset qwen3-30b-a3b --ep 8 --partition gpu
moe-exp sweep --dry-run                              # the layouts that would run
moe-exp sweep --gpus 4 --tps 1,2 --eps 1,2,4
moe-exp sweep --retry-failed
moe-exp score --checkpoint runs/NAME --tokens ids.npy --out logits.npy
moe-exp eval --checkpoint runs/NAME                  # the run's own validation data
moe-exp eval --checkpoint runs/NAME --data data/other_text_document --experts
moe-exp eval --checkpoint checkpoints/qwen3 --data-of runs/NAME   # another model on the same data
moe-exp generate --checkpoint runs/NAME --prompt "def main("
moe-exp generate --checkpoint runs/NAME --prompt-file prompts.txt --temperature 0.8 --json
moe-exp watch preflight --nnodes 1 --gpus-per-node 8
moe-exp watch exclude runs/exclude_nodes.txt --add node17 --reason 'Xid 79'
moe-exp watch blame runs/NAME
moe-exp watch diagnose runs/NAME                     # restart, exclude a node, wait or stop
moe-exp watch run runs/NAME                          # once, as from cron
moe-exp watch run runs/NAME --every 300 --alert-file alerts.txt
moe-exp watch stacks runs/NAME
moe-exp watch diff runs/ONE runs/OTHER
moe-exp watch storage runs
moe-exp doctor
moe-exp doctor --kernels
""".strip().splitlines()
EXAMPLES = {path: tuple(examples) for path, examples in groupby(_LINES, _path_of)}
EXAMPLES["plan"] += (EXAMPLES["plan search"][0], EXAMPLES["plan hardware"][0])
