"""CONTRIBUTING.md's "Where to start": the files, functions and tables that it names are there."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Where to start")[1].split("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in SECTION.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("change", "files", "tests"), ROWS, ids=lambda text: text.strip()[:24])
def test_what_a_row_names_exists(change, files, tests):
    production, proofs = (
        re.findall(r"`(moe_exp/[\w./-]+)`", files),
        re.findall(r"`(tests/[\w/]+\.py)`", tests),
    )
    assert production and proofs, change
    assert [name for name in production + proofs if not (ROOT / name).is_file()] == []
    for file, what in re.findall(r"`(moe_exp/[\w./-]+\.py)`:([^;|]*)", files):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert [
            name for name in re.findall(r"`(\w+)`", what) if not re.search(rf"\b{name}\b", source)
        ] == [], file
