"""The commands of the Markdown pages, and whether `moe-exp` takes them."""

import argparse
import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT
from moe_exp import cli

SHELL = ("", "bash", "sh", "console")  # languages of code blocks that may hold commands
# A line that begins like a command; output such as "moe-exp watch: ..." does not.
_ASSIGNMENT = r"\w+=(\"[^\"]*\"|'[^']*'|\S)* "
_PROGRAM = r"(moe-exp (?!\w+: )|bash |python |torchrun )"
_START = re.compile(rf"(\$ )?(export |set -a|for |until |while |do |time |({_ASSIGNMENT})*{_PROGRAM})")
_REDIRECTION = re.compile(r"\s\d?(>>|>|<)(&\d|\s*[\w./~$-]+)")
_KEYWORDS = ("$", "do", "then", "time", "export")


@dataclass(frozen=True)
class Command:
    """A simple command of a page, without comments and redirections."""

    place: str  # page and line
    variables: tuple[str, ...]  # assignments in front of its first word, or that it exports
    words: tuple[str, ...]  # program and arguments

    @property
    def names(self) -> set[str]:
        return {assignment.partition("=")[0] for assignment in self.variables}

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.words)}"


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Number of the first line and text of each code block that may hold commands."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fence, found, first = None, [], 0
    for number, line in enumerate(lines, start=1):
        mark = re.match(r"\s*```(\w*)", line)
        if mark and fence is None:
            fence, found, first = mark[1], [], number + 1
        elif mark:
            if fence in SHELL:
                yield first, "\n".join(found)
            fence = None
        elif fence is not None:
            found.append(line)
        elif line.startswith("    ") and not re.match(r"\s+([-*]|\d+\.) ", line):
            yield number, line


def commands(page: Path) -> list[Command]:
    """All commands of the code blocks of `page`."""
    found = []
    for first, text in blocks(page):
        text = re.sub(r"<<'?(\w+)'?\n.*?\n\s*\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=first):
            found += commands_of_line(line, f"{page.name}:{number}")
    return found


def inline_commands(page: Path) -> list[Command]:
    """The commands among the code spans outside of code blocks."""
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [command for span in spans for command in commands_of_line(span.replace("\\|", "|"), page.name)]


def commands_of_line(line: str, place: str) -> list[Command]:
    """The simple commands of a line; none where it does not look like one."""
    line = re.sub(r"(^|\s)#.*", "", line.strip())
    if not _START.match(line + " "):
        return []
    lexer = shlex.shlex(_REDIRECTION.sub("", line), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    found, words = [], []
    for token in [*lexer, ";"]:
        if not set(token) <= set(";&|"):
            words.append(token)
            continue
        if command := _simple_command(words, place):
            found.append(command)
        words = []
    return found


def _simple_command(words: list[str], place: str) -> Command | None:
    variables = []
    while words and (words[0] in _KEYWORDS or re.match(r"\w+=", words[0])):
        variables += words[:1] if "=" in words[0] else []
        words = words[1:]
    return Command(place, tuple(variables), tuple(words)) if words or variables else None


def moe_exp_arguments(command: Command) -> list[str] | None:
    """The arguments that `moe-exp` gets, of a script of moe_exp/scripts too; None for other programs."""
    program, *rest = [*command.words, ""]
    rest = rest[:-1]
    if Path(program).name == "moe-exp":
        return rest
    if program == "python" and rest[:2] == ["-m", "moe_exp"]:
        return rest[2:]
    if program in ("bash", "python") and rest and rest[0].startswith("moe_exp/scripts/"):
        source = (ROOT / rest[0]).read_text(encoding="utf-8")
        if shell := re.search(r'^moe_exp (\w+) "\$@"', source, flags=re.MULTILINE):
            return [shell[1], *rest[1:]]
        return ["data", re.search(r'main\("([\w-]+)"', source)[1], *rest[1:]]
    return None


def problem_of(arguments: list[str]) -> str:
    """What the parser of `moe-exp` has against the arguments; of a command that a page shortens by `...` or
    `[--flag]`, only whether all of its flags exist. Empty if nothing.
    """
    if any(word == "..." or word.startswith("[") or word.endswith("]") for word in arguments):
        return _unknown_flags(arguments)
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            _parser(*arguments[:1]).parse_args(arguments)
    except SystemExit as end:
        return err.getvalue() if end.code else ""
    return ""


def _unknown_flags(arguments: list[str]) -> str:
    parser, missing = _parser(*arguments[:1]), []
    for word in arguments:
        subparsers = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        if subparsers and word in subparsers[0]:
            parser = subparsers[0][word]
        flag = word.strip("[]").partition("=")[0]
        if flag.startswith("--") and flag not in parser._option_string_actions:
            missing.append(flag)
    return f"unknown: {', '.join(missing)}" if missing else ""


def flags_problem(arguments: list[str]) -> str:
    """As `problem_of` for a command of the text, which may leave out what the command needs."""
    return _unknown_flags([word for word in arguments if word])


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of all below it."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    below = [one for parsers in choices for one in parsers.values()]
    return set(parser._option_string_actions).union(*map(all_flags, below))


_parser = functools.cache(cli.parser_of)


def whole_parser():
    """With every command and every step of `moe-exp data`."""
    return _parser(*cli.COMMANDS)
