"""The faults of bench/mutants/ can be applied. Whether tests notice them: `python bench/mutants.py`."""

import shlex
import shutil
import sys

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import mutants

ALL = mutants.read_mutants()


def test_no_two_faults_have_a_name():
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 120


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_applies_and_leaves_python(mutant, tmp_path):
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    changed = (tmp_path / mutant.file).read_text()
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert changed != (ROOT / mutant.file).read_text()
    files = [word.partition("::")[0] for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files)
