"""docs/moe_layer.md names settings and tests that exist."""

import ast
import re

import pytest

from helpers import ROOT
from moe_exp.config import Config

TEXT = (ROOT / "docs" / "moe_layer.md").read_text(encoding="utf-8")
PROOFS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@pytest.mark.parametrize(("file", "name"), PROOFS)
def test_proof_exists(file, name):
    functions = [
        node.name
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert name in functions


def test_flags_exist():
    rows = [line.split("|") for line in TEXT.splitlines() if line.count("|") == 4]
    flags = {
        word.partition("=")[0] for row in rows for word in re.findall(r"\b[A-Z][A-Z_]{1,}\b(?:=\w+)?", row[2])
    }
    assert len(flags) > 30
    assert flags <= {name.upper() for name in Config.model_fields}
