"""Words that readers stumbled over do not come back: in README, docs, help and public docstrings."""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator

from helpers import ROOT
from helpers.docs.commands import whole_parser

# What to write instead is in CONTRIBUTING.md.
AVOIDED = (
    r"told|tells?|telling", r"go(es|ing)? on|went on", r"mend(s|ed|ing)?", r"other than in",
    r"makes? no step", r"whole or not at all", r"look(s|ed|ing)? (at|after)", r"know before",
    r"runs? of weeks", r"without a word", r"so (many|long)(?! (as|that|\w+ that))",
    r"obey(s|ed)?|manners|speaks? against|born", r"by hand",
)  # fmt: skip
ANY = re.compile(rf"\b({'|'.join(AVOIDED)})\b", flags=re.IGNORECASE)
FIRST_WORDS = ("Of", "Those", "That", "What")  # of a docstring


def test_words_are_not_in_the_documentation():
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"))
    assert _found((page.name, page.read_text(encoding="utf-8")) for page in pages) == []


def test_words_are_not_in_the_help():
    assert _found(_helps(whole_parser(), "moe-exp")) == []


def test_words_are_not_in_public_docstrings():
    docstrings = dict(_docstrings())
    assert len(docstrings) > 1000
    assert _found(docstrings.items()) == []
    assert [place for place, text in docstrings.items() if text.split()[0] in FIRST_WORDS] == []


def _found(texts: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f"{place}:{number}: {line.strip()}"
        for place, text in texts
        for number, line in enumerate(text.splitlines(), start=1)
        if ANY.search(line)
    ]


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
