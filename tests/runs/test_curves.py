"""The loss curve: a PNG that holds its curves, and leaves pyplot alone."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import event
from moe_exp.runs.curves import draw_loss_curve, marks_of, smoothed, wrapped

matplotlib_image = pytest.importorskip("matplotlib.image")


def records(num_train: int) -> list[dict[str, Any]]:
    losses = {i: 3 + 8 / i for i in range(1, num_train + 1)}
    train = {"kind": "train", "learning_rate": 1e-3}
    curve = [train | {"iteration": i, "lm_loss": loss} for i, loss in losses.items()]
    valid = {"kind": "valid", "iteration": num_train, "lm_loss": 3.5}
    return [{"kind": "event", "iteration": 0}, *curve, valid]


def pixels_like(path: Path, color: tuple[int, int, int]) -> int:
    """Number of pixels within 2% of an RGB color (0 to 255)."""
    image = matplotlib_image.imread(path)[..., :3]
    return int((abs(image - [value / 255 for value in color]).max(axis=-1) < 0.02).sum())


MARK = (0x6A, 0x3D, 0x9A)
SMOOTH, RAW, VALID, RATE = (0x1F, 0x5F, 0x9E), (0x9D, 0xC3, 0xE6), (0xD9, 0x54, 0x1E), (0xC4, 0xC4, 0xC4)


def test_a_long_run_shows_all_four_curves(tmp_path: Path) -> None:
    noisy = records(200)
    for record in noisy[1:-1]:
        record["lm_loss"] += (-1) ** record["iteration"]
    draw_loss_curve(noisy, tmp_path / "a.png", "name")
    assert all(pixels_like(tmp_path / "a.png", color) > 50 for color in (SMOOTH, RAW, VALID, RATE))
    assert matplotlib_image.imread(tmp_path / "a.png").shape[:2] == (720, 1200)


@pytest.mark.parametrize("num_train", [1, 5])
def test_a_short_run_has_no_smoothed_curve(tmp_path: Path, num_train: int) -> None:
    draw_loss_curve(records(num_train), tmp_path / "a.png", "name" * 100)
    assert pixels_like(tmp_path / "a.png", RAW) < 5 and pixels_like(tmp_path / "a.png", SMOOTH) > 50


def test_a_loss_that_is_null_leaves_a_gap(tmp_path: Path) -> None:
    for name, change in (("whole", {}), ("gap", {"lm_loss": None})):
        drawn = [r | change if r["kind"] == "train" and 20 < r["iteration"] < 70 else r for r in records(90)]
        draw_loss_curve(drawn, tmp_path / name, "$name$")
    assert 0 < pixels_like(tmp_path / "gap", SMOOTH) < 0.7 * pixels_like(tmp_path / "whole", SMOOTH)


def test_stages_and_resumes_are_marked(tmp_path: Path) -> None:
    at = {"data_stage": 41, "changed_settings": 70}
    events = [event(name, iteration, "10:00:00", **DETAILS[name]) for name, iteration in at.items()]
    draw_loss_curve(records(90), tmp_path / "a.png", "name")
    draw_loss_curve([*records(90), *events], tmp_path / "b.png", "name")
    assert pixels_like(tmp_path / "a.png", MARK) == 0
    image = matplotlib_image.imread(tmp_path / "b.png")[..., :3]
    dark = (abs(image - [value / 255 for value in MARK]).max(axis=-1) < 0.1).sum(axis=0)
    columns = [column for column in range(len(dark)) if dark[column] > 150]
    # The axes reach from 108 to 1104 pixels, and from 0 to 90.9 iterations.
    expected = [108 + 996 * after / 90.9 for after in (40, 70)]
    assert all(min(abs(column - x) for column in columns) < 2 for x in expected)
    assert all(min(abs(column - x) for x in expected) < 3 for column in columns)


def test_nothing_to_draw(tmp_path: Path) -> None:
    nothing = [{"kind": "train", "iteration": 1, "lm_loss": None, "learning_rate": 1.0}]
    with pytest.raises(ValueError, match="records=1: no train record has a loss"):
        draw_loss_curve(nothing, tmp_path / "a.png", "name")
    assert not (tmp_path / "a.png").exists()


def test_pyplot_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    draw_loss_curve(records(3), tmp_path / "a.png", "name")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_long_names_break_before_a_word_and_lose_nothing() -> None:
    name = "moe_true_num_experts_64_topk_1_type_dmoe_num_nodes_1_gpus_per_node_8"
    name += "_TP_1_PP_1_VPP_none_EP_4_ETP_2_CP_2"
    assert wrapped(name).split("\n") == [name.removesuffix("CP_2"), "CP_2"]
    assert list(map(len, wrapped("x" * 150).split("\n"))) == [101, 49]


def test_smoothed_is_a_centred_mean_that_keeps_gaps() -> None:
    values = [float(i) for i in range(20)]
    assert smoothed(values, 2) == values  # a straight line has no lag
    assert smoothed([0.0] * 16 + [3.0] + [0.0] * 16, 1)[14:19] == [0.0, 1.0, 1.0, 1.0, 0.0]
    gap = smoothed([1.0] * 16 + [math.nan, 2.0, 2.0, 2.0], 1)
    assert math.isnan(gap[16]) and gap[15] == 1.0 and gap[17] == 2.0


DETAILS: dict[str, dict[str, Any]] = {
    "data_stage": {"stage": 1, "train_data": "web", "seq_len": 64},
    "changed_settings": {"changes": ["LR 0.1 -> 0.2", "TP 1 -> 2"]},
}
STAGE, CHANGES = "data stage 1 from iteration {}: web, SEQ_LEN 64", "LR 0.1 -> 0.2, TP 1 -> 2"
CASES = [
    ([("start", 0), ("checkpoint", 5), ("end", 9)], []),
    # a stage begins with its iteration, a resume comes after one
    ([("start", 0), ("data_stage", 6)], [(STAGE.format(6), 5)]),
    ([("start", 0), ("resume", 5)], [("resume after iteration 5", 5)]),
    ([("start", 0), ("changed_settings", 5), ("resume", 5)], [(f"resume after iteration 5: {CHANGES}", 5)]),
    # from LOAD_DIR: the first start is no resume of this run
    ([("resume", 100), ("resume", 105)], [("resume after iteration 105", 105)]),
    # what was undone by going back to a checkpoint, and then happened again
    (
        [("start", 0), ("resume", 8), ("data_stage", 9), ("resume", 5), ("data_stage", 9)],
        [("resume after iteration 5", 5), (STAGE.format(9), 8)],
    ),
]


@pytest.mark.parametrize(("names", "expected"), CASES)
def test_marks(names: list[tuple[str, int]], expected: list[tuple[str, int]]) -> None:
    events = [event(name, iteration, "10:00:00", **DETAILS.get(name, {})) for name, iteration in names]
    assert [(mark.text, mark.after) for mark in marks_of(events)] == expected
