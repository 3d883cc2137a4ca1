import math

import pytest

from moe_exp.config import load_config
from moe_exp.planner.costs.saves import daly_interval, goodput_of, lost_share, young_interval


def goodput(**changes):
    settings = {"preset": "cpu", "gpus_per_node": 1, "nnodes": 4}
    settings |= {"save_interval": 100, "eval_interval": 100, "eval_iters": 4} | changes
    times = {"iteration_seconds": 2.0, "training_seconds": 100_000.0, "save_seconds": 30.0}
    return goodput_of(load_config(settings, {}), **times, node_mtbf_hours=400, restart_minutes=10)


def test_goodput_of_a_worked_example():
    """Four nodes that fail every 400 hours: a failure every 100. Evaluation: 4 batches of 100 at a third."""
    found, evaluation, mtbf = goodput(), 4 / 100 / 3, 360_000
    assert (found.mtbf_hours, found.restart_seconds) == (100, 600)
    assert found.evaluation_share == pytest.approx(evaluation)
    lost = lost_share(200 * (1 + evaluation), 30, mtbf, 600)
    assert found.goodput == pytest.approx(1 / (1 + evaluation) / (1 + lost))
    assert found.wall_seconds == pytest.approx(100_000 / found.goodput)
    one = 2 * (1 + evaluation)
    assert found.best_iterations == round(daly_interval(30, mtbf) / one)
    assert found.young_iterations == round(young_interval(30, mtbf) / one)
    assert found.best_goodput > found.goodput


def test_goodput_without_saves_and_evaluation():
    found = goodput(save_interval=0, eval_interval=0)
    assert found.evaluation_share == 0
    assert found.goodput == pytest.approx(1 / (1 + lost_share(100_000, 30, 360_000, 600)))
    # failures never let it finish
    found = goodput(save_interval=0, nnodes=4000)
    assert (found.goodput, found.wall_seconds) == (0.0, None)
    assert found.best_goodput > 0 and not math.isnan(found.best_goodput)
