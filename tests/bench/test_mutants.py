"""The faults of bench/mutants/ can be applied. Whether tests notice them: `python bench/mutants.py`."""

import shlex
import shutil
import sys
from collections import Counter

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import mutants

ALL = mutants.read_mutants()


def test_there_are_at_least_120_faults_and_no_two_have_a_name():
    assert len(ALL) >= 120
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []


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


def test_a_fault_that_is_no_longer_there_is_an_error(tmp_path):
    (tmp_path / "moe_exp").mkdir()
    (tmp_path / "moe_exp" / "one.py").write_text("a = b\na = b\n")
    twice = mutants.Mutant(file="moe_exp/one.py", fault="a sign", old="a = b", new="a = -b", tests="tests")
    with pytest.raises(ValueError, match="occurs 2 times, it must once"):
        twice.apply(tmp_path)


def test_results_table_counts_survivors_with_a_reason(tmp_path):
    one, two = ALL[:2]
    results = mutants.Results(tmp_path / "results.json")
    results.add(one.key, {"outcome": "failed"})
    results.add(two.key, {"outcome": "survived"})
    table = mutants.results_table([one, two], mutants.Results(tmp_path / "results.json"))
    assert "| all | 2 | 1 |" in table
    assert f"- {two.name}: {two.survives or 'NOT EXPLAINED'}" in table
