"""CONTRIBUTING.md's "Where to start": the files, functions and tables that it names exist."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Where to start")[1].split("\n## ")[0]
CHANGES = re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", SECTION, re.MULTILINE | re.DOTALL)


def test_every_change_has_files_and_tests():
    assert len(CHANGES) >= 18
    for change, text in CHANGES:
        assert re.search(r"^1\. ", text, re.MULTILINE) and re.search(
            r"^Tests: `tests/", text, re.MULTILINE
        ), change


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=[change[:24] for change, _ in CHANGES])
def test_what_a_change_names_exists(change, text):
    """A name in backticks is a path, or a whole word of a file that the same line of the list names."""
    for line in re.split(r"\n(?=\d\. |\n)", text):
        names = re.findall(r"`([^`]+)`", line)
        paths = [ROOT / name for name in names if "/" in name]
        assert [path for path in paths if not path.exists()] == []
        source = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
        words = [name for name in names if re.fullmatch(r"\w+", name)]
        assert [word for word in words if not re.search(rf"\b{word}\b", source)] == [], line
