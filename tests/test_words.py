"""Words that readers stumbled over do not come back: counted in README, docs, help and public docstrings."""

import argparse
import ast
import re
from collections.abc import Iterator

import pytest

from helpers import ROOT
from helpers.docs.commands import whole_parser

# What to write instead is in CONTRIBUTING.md.
AVOIDED = {
    "told, tells": r"told|tells?|telling",
    "goes on": r"go(es|ing)? on|went on",
    "mend": r"mend(s|ed|ing)?",
    "other than in": r"other than in",
    "makes no step": r"makes? no step",
    "whole or not at all": r"whole or not at all",
    "looks at, looks after": r"look(s|ed|ing)? (at|after)",
    "know before": r"know before",
    "runs of weeks": r"runs? of weeks",
    "without a word": r"without a word",
    "so many, so long": r"so (many|long)(?! (as|that|\w+ that))",
    "obeyed, manners, born": r"obey(s|ed)?|manners|speaks? against|born",
    "by hand": r"by hand",
}
ANY = re.compile(rf"\b({'|'.join(AVOIDED.values())})\b", flags=re.IGNORECASE)
FIRST_WORDS = ("Of", "Those", "That", "What")  # of a docstring
# Page or module to the text that may stand there, such as the output of a program.
ALLOWED: dict[str, tuple[str, ...]] = {}


def test_words_are_not_in_the_documentation(capsys):
    pages = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in _pages()}
    _refuse(pages, capsys)


def test_words_are_not_in_the_help(capsys):
    _refuse(dict(_helps(whole_parser(), "moe-exp")), capsys)


def test_words_are_not_in_public_docstrings(capsys):
    docstrings = dict(_docstrings())
    assert len(docstrings) > 1000
    _refuse(docstrings, capsys)
    assert [place for place, text in docstrings.items() if text.split()[0] in FIRST_WORDS] == []


@pytest.mark.parametrize("text", ["it goes on", "is told its tasks", "mended by hand", "so many files"])
def test_the_words_are_found(text):
    assert _found({"page": text})


def _refuse(texts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = _found(texts)
    counts = {name: sum(name == one for one, _ in found) for name in AVOIDED}
    with capsys.disabled():
        print(f"\n{len(texts)} texts:", ", ".join(f"{name} {count}" for name, count in counts.items()))
    assert found == []


def _found(texts: dict[str, str]) -> list[tuple[str, str]]:
    found = []
    for place, text in texts.items():
        for allowed in ALLOWED.get(place.partition(":")[0], ()):
            text = text.replace(allowed, "")
        if not ANY.search(text):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            names = [name for name, pattern in AVOIDED.items() if re.search(rf"(?i)\b({pattern})\b", line)]
            found += [(name, f"{place}:{number}: {line.strip()}") for name in names]
    return found


def _pages() -> Iterator:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    yield from sorted((ROOT / "docs").glob("*.md"))


def _helps(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, str]]:
    yield path, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from _helps(subparser, f"{path} {name}")


def _docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of modules, and of classes and functions without an underscore in front."""
    for file in sorted((ROOT / "moe_exp").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = getattr(node, "name", "")
            if (text := ast.get_docstring(node)) and not name.startswith("_"):
                yield f"{file.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)} {name}", text
