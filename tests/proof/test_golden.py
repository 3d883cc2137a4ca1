"""The package computes, writes and prints what golden.json holds: the short form of golden.py, by part."""

import json
import warnings

import pytest

from proof import golden

RECORD = json.loads(golden.RECORD.read_text())


# `run` and `old_run` also train.
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.slow] * (part in ("train", "studies"))) for part in golden.PARTS],
)
def test_golden_record(part):
    if why := golden.other_versions(RECORD):
        pytest.skip(why)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of other packages, in what runs here and not in a process
        found = golden.entries_of(part, short=True)
    same_cpu = RECORD["cpu"] == golden.cpu()
    if not same_cpu:
        print(f"another CPU than {RECORD['cpu']}: numbers are compared within {golden.LIMITS}")
    differing = golden.compare(part, RECORD["entries"], found, short=True, same_cpu=same_cpu)
    again = f"Intended: python tests/proof/golden.py --write --only {part}"
    assert not differing, "\n".join([*differing, again])


CASES = {
    "equal": ([1.5, 2.5], [1.5, 2.5], True, True),
    "last bit": ([1.5, 2.5], [1.5, 2.5000000000000004], False, True),
    "another sign": ([2.5], [-2.5], False, False),
    "not a number": ([2.5], [float("nan")], False, False),
    "one number less": ([1.5, 2.5], [1.5], False, False),
    "a count of computed scores": ([1, 2], [1, 3], False, True),
    "a hash of computed numbers": (["ab"], ["cd"], False, True),
}


@pytest.mark.parametrize(("before", "now", "here", "elsewhere"), CASES.values(), ids=CASES)
def test_differences_here_and_on_another_cpu(before, now, here, elsewhere):
    """`here` and `elsewhere`: whether the two count as equal on the CPU of the record, and on another."""
    for same_cpu, is_equal in ((True, here), (False, elsewhere)):
        texts = golden.compare("train", {"train/a": before}, {"train/a": now}, short=True, same_cpu=same_cpu)
        assert [text.partition(":")[0] for text in texts] == ["train/a"] * (not is_equal)


def test_entries_that_are_new_or_gone_are_named():
    before, now = {"data/a": ["1"], "usage/b": ["1"]}, {"data/c": ["1"]}
    texts = golden.compare("data", before, now, short=True, same_cpu=True)
    assert texts == ["data/a: is no longer there", "data/c: is new"]
