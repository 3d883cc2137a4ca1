"""Where curves are marked: stages of data and resumes, each once and after the right iteration."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.run_folders import event
from moe_exp.runs.marks import marks_of


def happened(*names: tuple[str, int], **more: Any) -> list[dict[str, Any]]:
    details: dict[str, dict[str, Any]] = {
        "data_stage": {"stage": 1, "train_data": "web", "seq_len": 64},
        "changed_settings": {"changes": ["LR 0.1 -> 0.2", "TP 1 -> 2"]},
    }
    return [event(name, iteration, "10:00:00", **details.get(name, {})) for name, iteration in names]


CASES: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]] = [
    ([("start", 0), ("checkpoint", 5), ("end", 9)], []),
    # a stage begins with its iteration, a resume comes after one
    ([("start", 0), ("data_stage", 6)], [("data stage 1 from iteration 6: web, SEQ_LEN 64", 5)]),
    ([("start", 0), ("resume", 5)], [("resume after iteration 5", 5)]),
    (
        [("start", 0), ("changed_settings", 5), ("resume", 5)],
        [("resume after iteration 5: LR 0.1 -> 0.2, TP 1 -> 2", 5)],
    ),
    # from LOAD_DIR: the first start is no resume of this run
    ([("resume", 100), ("resume", 105)], [("resume after iteration 105", 105)]),
    # what was undone by going back to a checkpoint, and then happened again
    (
        [("start", 0), ("resume", 8), ("data_stage", 9), ("resume", 5), ("data_stage", 9)],
        [("resume after iteration 5", 5), ("data stage 1 from iteration 9: web, SEQ_LEN 64", 8)],
    ),
]


@pytest.mark.parametrize(("names", "expected"), CASES)
def test_marks(names: list[tuple[str, int]], expected: list[tuple[str, int]]) -> None:
    assert [(mark.text, mark.after) for mark in marks_of(happened(*names))] == expected
