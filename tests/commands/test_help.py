"""`--help` of every command: a summary, the options in groups, and examples that the parser takes."""

import argparse
import shlex
from collections.abc import Iterator

import pytest

from helpers.docs.commands import problem_of, whole_parser
from moe_exp import cli
from moe_exp.commands.parsers import EXAMPLES
from moe_exp.config import names_by_section

PARSER = whole_parser()


def leaves(
    parser: argparse.ArgumentParser = PARSER, path: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands that can be run, with their words."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not actions or path == "plan":
        yield path, parser
    for action in actions:
        for name, subparser in action.choices.items():
            yield from leaves(subparser, f"{path} {name}".strip())


COMMANDS = dict(leaves())


def test_every_command_has_examples():
    assert set(COMMANDS) == set(EXAMPLES)
    assert all(1 <= len(lines) <= 4 for lines in EXAMPLES.values())


@pytest.mark.parametrize("path", COMMANDS)
def test_help_begins_with_a_summary_and_ends_with_examples(path):
    text = COMMANDS[path].format_help()
    usage, summary, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: moe-exp {path}")
    assert summary[0].isupper() and summary.rstrip().endswith(".")
    assert text.split("examples:\n  ")[1].splitlines()[0] == EXAMPLES[path][0]


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_accepted(example):
    program, *arguments = shlex.split(example.partition(" >")[0], comments=True)
    assert program == "moe-exp"
    assert problem_of(arguments) == ""


@pytest.mark.parametrize("path", ["train", "compare", "sweep", "slurm", "plan"])
def test_settings_are_grouped_by_section(path):
    groups = {group.title: group for group in COMMANDS[path]._action_groups}
    for heading, names in names_by_section().items():
        found = {action.dest for action in groups[f"{heading} settings"]._group_actions}
        assert found <= set(names)
        assert found or path == "sweep"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("tran", "invalid choice: 'tran', did you mean train? Help: moe-exp --help"),
        ("plan searhc", "argument command: invalid choice: 'searhc', did you mean"),
        ("watch run x --evry=3", "--evry does not exist, did you mean --every? Help: moe-exp watch run"),
        ("watch exclude list --ad x", "--ad does not exist, did you mean --add? Help: moe-exp watch exclude"),
        ("train --num-exp=4", "--num-exp does not exist, did you mean --num-experts? Help: moe-exp train"),
        ("train --learning-rate 1", "--learning-rate does not exist, did you mean --lr or --min-lr?"),
        ("train --micro-batch-size=4", "--micro-batch-size does not exist, did you mean --mbsz?"),
        ("train --foo 1 --num-layer 2", "--foo does not exist; --num-layer does"),
        ("train x", "unrecognized arguments: x"),
        ("train --lr=--", "error: argument --lr: expected one argument. Help: moe-exp"),
        ("eval", "are required: --checkpoint. Help: moe-exp eval --help"),
    ],
)
def test_an_error_is_one_line_that_names_the_nearest_word_and_the_help(arguments, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("moe-exp")
    assert error.count("\n") == 1
