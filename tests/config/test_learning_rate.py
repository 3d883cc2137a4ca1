"""The learning rate of a plan is Megatron's, the decay follows TRAIN_ITERS, and a misfit is reported."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from moe_exp.config import load_config
from moe_exp.config.checks.checks import check_config
from moe_exp.config.choices import SCHEDULES
from moe_exp.config.learning_rate import learning_rate, learning_rate_text, schedule_warnings


def config(**settings):
    return load_config({"preset": "reference", "gpus_per_node": 1, **settings}, {})


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("style", SCHEDULES)
def test_it_is_megatrons(style, warmup):
    from moe_exp.engine.optimizer_setup import build_scheduler

    c = config(train_iters=50, warmup_iters=warmup, decay_iters=40, lr_decay_style=style, wsd_decay_iters=12)
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = build_scheduler(c, optimizer)
    for iteration in range(51):
        assert learning_rate(c, iteration * c.gbsz) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12
        )
        scheduler.step(c.gbsz)


def schedule(**settings):
    c = config(**settings)
    assert check_config(c) == []
    return c.warmup_iters, c.decay_end


def test_decay_and_warm_up_follow_train_iters():
    assert schedule() == (1000, 38000)
    assert schedule(train_iters=40000) == (1000, 38000)
    assert schedule(train_iters=500) == (50, 500)
    assert schedule(train_iters=4) == (0, 4)
    assert schedule(train_iters=80000) == (1000, 80000)
    assert schedule(preset="qwen3-30b-a3b", train_iters=476838) == (1000, 476838)
    assert schedule(preset="olmoe-1b-7b", train_iters=10000) == (1000, 10000)
    # what is given stays
    assert schedule(train_iters=500, warmup_iters=100) == (100, 500)
    assert schedule(train_iters=500, decay_iters=38000) == (1000, 38000)


def test_the_text_has_five_points():
    text = learning_rate_text(config(lr=1e-3, min_lr=0.0, lr_decay_style="linear", train_iters=1000))
    assert text == (
        "learning rate after iteration (linear): 0 at 0 (0%), 0.000833 at 250 (25%), 0.000556 at 500 (50%),"
        " 0.000278 at 750 (75%), 0 at 1000 (100%)"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"preset": "deepseek-v3-like"}, []),  # a batch ramp-up: fewer samples than GBSZ * TRAIN_ITERS
        ({"train_iters": 500}, []),
        ({"train_iters": 476838, "decay_iters": 38000, "lr_decay_style": "constant"}, []),
        ({"train_iters": 1000, "decay_iters": 901}, []),
        ({"train_iters": 1000, "decay_iters": 1099}, []),
        (
            {"train_iters": 476838, "decay_iters": 38000},
            [
                r"DECAY_ITERS=38000: the last 92% of TRAIN_ITERS=476838 would train at MIN_LR=6e-05\. Fix:"
                r" set DECAY_ITERS=0, which follows TRAIN_ITERS\."
            ],
        ),
        (
            {"train_iters": 1000, "decay_iters": 2000, "warmup_iters": 0},
            [
                r"DECAY_ITERS=2000: the run ends at TRAIN_ITERS=1000 with a learning rate of 0\.00033, above"
                r" MIN_LR=6e-05\. Fix: .*"
            ],
        ),
        (
            {"train_iters": 500, "decay_iters": 38000},
            [
                r"WARMUP_ITERS=1000: the run ends at TRAIN_ITERS=500, still warming up, at 0\.0003 of"
                r" LR=0\.0006\. Fix: set WARMUP_ITERS to 50, a tenth of it, or raise TRAIN_ITERS\.",
                r"DECAY_ITERS=38000: .* 0\.0003, above .*",
            ],
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_reported(settings, expected):
    found = schedule_warnings(config(**settings))
    assert len(found) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, found, strict=True))
