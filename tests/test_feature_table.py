"""docs/moe_layer.md names settings and tests that exist."""

import re

import pytest

from helpers import ROOT
from moe_exp.config import Config

TEXT = (ROOT / "docs" / "moe_layer.md").read_text(encoding="utf-8")
PROOFS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@pytest.mark.parametrize(("file", "name"), PROOFS)
def test_proof_exists(file, name):
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_flags_exist():
    rows = [line.split("|") for line in TEXT.splitlines() if line.count("|") == 4]
    flags = {flag for row in rows for flag in re.findall(r"\b([A-Z][A-Z_]+)\b(?:=\w+)?", row[2])}
    assert len(flags) > 30
    assert flags <= {name.upper() for name in Config.model_fields}
