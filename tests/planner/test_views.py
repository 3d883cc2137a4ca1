"""The schedule of an iteration takes as long as the formula of `timing.py` says, and keeps its own rules."""

from itertools import pairwise

import pytest

from moe_exp.config import load_config
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.prediction import load_constants
from moe_exp.planner.views import as_svg, as_text, timeline

H100 = load_hardware("H100")
CONSTANTS = load_constants().time


def job(**settings):
    usual = {"preset": "qwen3-30b-a3b", "nnodes": 4, "gpus_per_node": 8, "ep": 8, "gbsz": 64, "mbsz": 1}
    return PlannedJob.of(load_config(usual | settings, {}))


@pytest.mark.parametrize(
    "layout",
    [{"pp": 1}, {"pp": 4}, {"pp": 4, "vpp": 2}, {"pp": 2, "vpp": 4}, {"pp": 4, "vpp": 3, "gbsz": 32}],
)
def test_it_takes_as_long_as_the_formula_says(layout):
    of = job(**layout)
    drawn = timeline(of, H100, CONSTANTS)
    assert drawn.passes_end + drawn.after == pytest.approx(time_of(of, H100, CONSTANTS).total, rel=1e-3)


def test_a_stage_does_one_thing_at_a_time_and_passes_follow_each_other():
    drawn = timeline(job(pp=4, vpp=2), H100, CONSTANTS)
    ends = {(event.kind, event.chunk * 4 + event.stage, event.microbatch): event for event in drawn.events}
    assert len(ends) == len(drawn.events) == 2 * 2 * 4 * 8
    for stage in range(4):
        events = sorted((one.start, one.end) for one in drawn.events if one.stage == stage)
        assert all(first[1] <= second[0] + 1e-12 for first, second in pairwise(events))
    for (kind, place, microbatch), event in ends.items():
        after = (kind, place - 1 if kind == "forward" else place + 1, microbatch)
        if after in ends:
            assert event.start >= ends[after].end - 1e-12


def test_1f1b_by_hand():
    """Two stages, two micro-batches: stage 1 goes backward as soon as it went forward."""
    orders = {stage: [] for stage in range(2)}
    for event in sorted(timeline(job(pp=2, gbsz=32), H100, CONSTANTS).events, key=lambda one: one.start):
        orders[event.stage].append(event.kind[0] + str(event.microbatch))
    assert orders == {0: ["f0", "f1", "b0", "b1"], 1: ["f0", "b0", "f1", "b1"]}


def test_pictures():
    drawn = timeline(job(pp=4), H100, CONSTANTS)
    lines = list(as_text(drawn, width=80))
    assert len(lines) == 5 and all(len(line.split("|")[1]) == 80 for line in lines[:4])
    assert lines[0].split("|")[1].startswith("0") and lines[3].split("|")[1].startswith(".")
    picture = as_svg(drawn)
    assert picture.count("<svg") == 1 and "stage 3" in picture and "exchange" in picture
