"""CONTRIBUTING.md's "Where to start": twelve changes, at most four files each, and every file is there."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Where to start")[1].split("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("| ")][1:]


def test_there_are_twelve_changes():
    assert len(ROWS) == 12 and all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize(("change", "files", "tests"), ROWS, ids=lambda text: text.strip()[:24])
def test_named_files_exist_and_are_few(change, files, tests):
    production = re.findall(r"`(moe_exp/[\w./-]+)`", files)
    assert 1 <= len(production) <= 4, change
    proofs = re.findall(r"`(tests/[\w/]+\.py)`", tests)
    assert proofs, change
    assert [name for name in production + proofs if not (ROOT / name).is_file()] == []


def test_named_functions_and_tables_exist():
    for _, files, _ in ROWS:
        for file, what in re.findall(r"`(moe_exp/[\w./-]+\.py)`:([^;|]*)", files):
            source = (ROOT / file).read_text(encoding="utf-8")
            assert [name for name in re.findall(r"`(\w+)`", what) if name not in source] == [], file


def test_commands_of_the_first_block_name_files_that_exist():
    for path in re.findall(r"(?:bash|python) ([\w/]+\.(?:sh|py))", TEXT):
        assert (ROOT / path).is_file()
