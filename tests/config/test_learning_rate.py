"""The learning rate of a plan is Megatron's, the decay follows TRAIN_ITERS, and a misfit is reported."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from moe_exp.config import load_config
from moe_exp.config.choices import DECAYS
from moe_exp.config.learning_rate import (
    Start,
    learning_rate,
    learning_rate_text,
    schedule_change,
    schedule_warnings,
)


def config(**settings):
    return load_config({"preset": "reference", "gpus_per_node": 1, **settings}, {})


# Of everything that Megatron's scheduler has, and of what it does not have.
MEGATRONS = [{"lr_decay_style": style} for style in ("cosine", "linear", "constant", "inverse-square-root")]
MEGATRONS += [{"lr_decay_style": "WSD", "wsd_decay_style": decay} for decay in DECAYS]
MEGATRONS += [{"lr_decay_style": "WSD", "wsd_decay_iters": 38}]  # begins in the warm-up
OURS = [
    {"lr_decay_style": "WSD-S", "wsd_decay_ends": "20,75%", "wsd_decay_iters": 8},
    {"lr_decay_style": "power", "lr_power_a": 1e-3},
    {"lr_decay_style": "constant:15:80%,cosine:20:10%,linear:50%:100%,inverse-square-root:90%,minus_sqrt"},
]


def megatrons_scheduler(c, groups):
    """Megatron's own scheduler, with the settings that it had here before it got its rates from us."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    end, batch = c.decay_iters or c.train_iters, c.gbsz
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups), init_lr=0.0, max_lr=c.lr, min_lr=c.min_lr,
        lr_warmup_steps=c.warmup_iters * batch, lr_decay_steps=end * batch, lr_decay_style=c.lr_decay_style,
        start_wd=c.weight_decay, end_wd=c.weight_decay, wd_incr_steps=c.train_iters * batch,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
        wsd_decay_steps=c.wsd_decay_iters * batch, lr_wsd_decay_style=c.wsd_decay_style,
    )  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("style", MEGATRONS, ids=lambda style: "-".join(map(str, style.values())))
def test_it_is_megatrons(style, warmup):
    settings = {"train_iters": 50, "decay_iters": 40, "wsd_decay_iters": 12, "warmup_iters": warmup}
    c = config(**settings | style)
    groups = [{}, {"max_lr": 2 * c.lr, "min_lr": 0.0}]
    scheduler = megatrons_scheduler(c, groups)
    for iteration in range(51):
        samples = iteration * c.gbsz
        assert learning_rate(c, samples) == pytest.approx(groups[0]["lr"], rel=1e-12)
        own = learning_rate(c, samples, max_lr=2 * c.lr, min_lr=0.0)
        assert own == pytest.approx(groups[1]["lr"], rel=1e-12)
        scheduler.step(c.gbsz)


@pytest.mark.parametrize("style", MEGATRONS + OURS, ids=lambda style: style["lr_decay_style"])
def test_training_has_these_rates_in_a_ramp_and_after_a_resume_in_any_iteration(style):
    from moe_exp.engine.optimizer_setup import LearningRateScheduler

    settings = {"train_iters": 50, "warmup_iters": 7, "wsd_decay_iters": 12, "rampup_batch_size": "16 16 900"}
    c = config(**settings | style)
    assert list(c.problems()) == []
    group = {"max_lr": c.lr / 4, "min_lr": c.min_lr / 4, "wd_mult": 0.5}
    optimizer = SimpleNamespace(param_groups=[group])
    scheduler, samples, rates = LearningRateScheduler(c, optimizer), 0, []
    assert scheduler.state_dict().keys() == megatrons_scheduler(config(), []).state_dict().keys()
    while samples <= 50 * c.gbsz:
        assert scheduler.get_lr({}) == learning_rate(c, samples)
        assert group["lr"] == learning_rate(c, samples, max_lr=c.lr / 4, min_lr=c.min_lr / 4)
        assert group["lr"] == pytest.approx(learning_rate(c, samples) / 4, rel=1e-12)
        assert group["weight_decay"] == c.weight_decay / 2
        for other in (c, config(train_iters=80)):  # the same schedule, and another one
            resumed = LearningRateScheduler(other, SimpleNamespace(param_groups=[{}]))
            resumed.load_state_dict(scheduler.state_dict())
            assert resumed.get_lr({}) == learning_rate(other, samples)
        rates.append(group["lr"])
        scheduler.step(c.batches.size_at(samples))
        samples += c.batches.size_at(samples)
    assert len(rates) > 50 and len(set(rates)) > 7


# Iteration to rate. LR=1e-3, MIN_LR=1e-4, 100 iterations of warm-up, and 1000 in all: docs/learning_rate.md.
EXAMPLES = [
    ({"lr_decay_style": "constant"}, {0: 0.0, 50: 5e-4, 100: 1e-3, 1000: 1e-3, 2000: 1e-3}),
    ({"lr_decay_style": "linear"}, {100: 1e-3, 550: 5.5e-4, 1000: 1e-4, 2000: 1e-4}),
    ({"lr_decay_style": "cosine"}, {100: 1e-3, 400: 7.75e-4, 550: 5.5e-4, 1000: 1e-4}),
    ({"lr_decay_style": "inverse-square-root"}, {50: 5e-4, 400: 5e-4, 900: 3.33333e-4, 1001: 1e-4}),
    ({"lr_decay_style": "WSD"}, {100: 1e-3, 800: 1e-3, 850: 7.75e-4, 900: 5.5e-4, 1000: 1e-4}),
    ({"lr_decay_style": "WSD", "wsd_decay_style": "cosine"}, {850: 8.68198e-4, 900: 5.5e-4, 1000: 1e-4}),
    ({"lr_decay_style": "WSD", "wsd_decay_style": "exponential"}, {850: 7.13614e-4, 900: 4.72792e-4}),
    ({"lr_decay_style": "WSD", "wsd_decay_style": "minus_sqrt"}, {850: 5.5e-4, 900: 3.63604e-4, 1000: 1e-4}),
    ({"lr_decay_style": "WSD-S", "wsd_decay_ends": "500"},
     {300: 1e-3, 400: 5.5e-4, 499: 1.045e-4, 500: 1e-3, 800: 1e-3, 900: 5.5e-4, 1000: 1e-4, 1001: 1e-4}),
    ({"lr_decay_style": "constant:50%,cosine:700:20%,constant:800,linear"},
     {500: 1e-3, 600: 6e-4, 700: 2e-4, 799: 2e-4, 900: 1.5e-4, 1000: 1e-4, 1001: 1e-4}),
    # Warm-up to the rate of the first piece, a jump, and up again.
    ({"lr_decay_style": "constant:200:60%,constant:400:20%,linear:600:100%,constant"},
     {50: 3e-4, 100: 6e-4, 199: 6e-4, 200: 2e-4, 500: 6e-4, 600: 1e-3, 2000: 1e-3}),
]  # fmt: skip


@pytest.mark.parametrize(("style", "rates"), EXAMPLES, ids=lambda value: "-".join(map(str, value))[:40])
def test_worked_examples(style, rates):
    c = config(**{"lr": 1e-3, "min_lr": 1e-4, "train_iters": 1000, "warmup_iters": 100,
                  "wsd_decay_iters": 200} | style)  # fmt: skip
    assert list(c.problems()) == []
    found = {iteration: learning_rate(c, iteration * c.gbsz) for iteration in rates}
    assert found == pytest.approx(rates, rel=1e-5)


def test_power_counts_tokens():
    """GBSZ * A * tokens^B = 2^10 * 4 / sqrt(iteration * 2^20) = 4 / sqrt(iteration), at most 0.2."""
    c = config(
        lr=0.2, min_lr=0.0, train_iters=10000, warmup_iters=100, wsd_decay_iters=1000, lr_decay_style="power",
        gbsz=1024, seq_len=1024, lr_power_a=4.0, lr_power_b=-0.5,
    )  # fmt: skip
    rates = {50: 0.1, 100: 0.2, 400: 0.2, 1600: 0.1, 6400: 0.05, 9000: 0.0421637, 9500: 0.0210819, 10000: 0}
    assert {i: learning_rate(c, i * 1024) for i in rates} == pytest.approx(rates, rel=1e-5)
    # Half the rates with half of LR; not below MIN_LR.
    half = {i: learning_rate(c, i * 1024, max_lr=0.1, min_lr=0.03) for i in (50, 1600, 6400)}
    assert half == pytest.approx({50: 0.05, 1600: 0.05, 6400: 0.03})


def test_power_is_that_of_the_paper():
    """Shen et al. 2024, section 3.2: "10 trillion token corpus and a batch size 1024 [...] 0.0011"."""
    c = config(
        lr=0.02, lr_decay_style="power", gbsz=1024, seq_len=4096, lr_power_a=4.6, min_lr=0.0,
        train_iters=10**7, warmup_iters=1000,
    )  # fmt: skip
    assert learning_rate(c, 10**13 // 4096) == pytest.approx(0.0011, abs=5e-5)


def schedule(**settings):
    c = config(**settings)
    assert list(c.problems()) == []
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


def test_the_text_has_pieces_and_five_points():
    c = config(lr=1e-3, min_lr=0.0, lr_decay_style="constant:80%,linear", train_iters=100)
    pieces, points = learning_rate_text(c).split(": ")
    assert pieces.endswith("(constant:80%,linear; constant until 80, linear until 100)")
    assert points == "0 at 0 (0%), 0.001 at 25 (25%), 0.001 at 50 (50%), 0.001 at 75 (75%), 0 at 100 (100%)"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"preset": "deepseek-v3-like"}, []),  # a batch ramp-up: fewer samples than GBSZ * TRAIN_ITERS
        ({"train_iters": 500}, []),
        ({"train_iters": 476838, "decay_iters": 38000, "lr_decay_style": "constant"}, []),
        ({"train_iters": 1000, "decay_iters": 901}, []),
        ({"train_iters": 1000, "decay_iters": 1099}, []),
        # a ramp-up
        ({"gbsz": 64, "rampup_batch_size": "16 16 1000000", "warmup_iters": 10, "train_iters": 40000},
         [r"DECAY_ITERS=38000: .* ends at TRAIN_ITERS=40000 with .*, above MIN_LR=6e-05\. .*=17430,"]),
        # 5% fewer samples, which is the whole final decay
        ({"preset": "deepseek-v3-like", "lr_decay_style": "WSD", "wsd_decay_iters": 10_000},
         [r"DECAY_ITERS=0: .* rate of 0\.00022, above MIN_LR=2\.2e-05\. .* DECAY_ITERS=228\d{3},"]),
        ({"train_iters": 476838, "decay_iters": 38000}, [r"DECAY_ITERS=38000: the last 92% .*6e-05\. .*=0,"]),
        ({"train_iters": 1000, "decay_iters": 2000, "warmup_iters": 0},
         [r"DECAY_ITERS=2000: .* rate of 0\.00033, above MIN_LR=6e-05\. "]),
        ({"train_iters": 500, "decay_iters": 38000},
         [r"WARMUP_ITERS=1000: .* rate of 0\.0003 instead of LR=0\.0006\. .* to 50,",
          r"DECAY_ITERS=38000: .*0\.0003, "]),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_the_run_is_reported(settings, expected):
    found = list(schedule_warnings(config(**settings)))
    assert len(found) == len(expected)
    assert all(re.match(pattern, line) for pattern, line in zip(expected, found, strict=True)), found


# Another GBSZ at a resume

STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": "cosine"},
    {"lr_decay_style": "linear", "warmup_iters": 0},
    {"lr_decay_style": "WSD", "wsd_decay_iters": 48},
    {"lr_decay_style": "WSD-S", "wsd_decay_iters": 12, "wsd_decay_ends": "48,75%"},
    {"lr_decay_style": "constant:48,cosine:72:50%,linear"},
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style["lr_decay_style"])
@pytest.mark.parametrize("gbsz", [8, 32, 48])
def test_another_batch_size_is_refused_with_settings_that_continue_the_schedule(style, gbsz):
    sizes = {"gbsz": 16, "mbsz": 1, "train_iters": 120, "warmup_iters": 12}
    before = {"lr": 1e-3, "min_lr": 1e-4} | sizes | style
    old = config(**before)
    start = Start(66, 66 * 16)
    line = schedule_change(config(**before | {"gbsz": gbsz}), old, start)
    assert line is not None and line.startswith(
        f"GBSZ={gbsz}: after training with GBSZ=16 to iteration 66, the learning"
    )
    assert line.endswith("or GBSZ=16.")
    given = dict(re.findall(r"([A-Z_]+)=(\S+)", line.partition("Fix: set ")[2].partition(" (the same")[0]))
    new = config(**before | {"gbsz": gbsz} | {name.lower(): value for name, value in given.items()})
    assert list(new.problems()) == []
    assert schedule_change(new, old, start) is None
    for iteration in range(66, new.train_iters + 1):
        samples = 66 * 16 + (iteration - 66) * gbsz
        assert learning_rate(new, samples) == pytest.approx(learning_rate(old, samples), rel=1e-9), iteration
    assert learning_rate(new, samples) == pytest.approx(1e-4)
    assert list(schedule_warnings(new, start)) == []
    text = learning_rate_text(new, start)
    assert f"{learning_rate(old, 66 * 16):.3g} at 66 (resumed)" in text
    assert text.endswith(f"0.0001 at {new.train_iters} (100%)")


def test_a_run_that_has_ended_keeps_its_schedule_and_the_new_length():
    old = config(gbsz=16, mbsz=1, train_iters=120, warmup_iters=12, lr=1e-3, min_lr=1e-4)
    new = config(gbsz=32, mbsz=1, train_iters=300, lr=1e-3, min_lr=1e-4)
    line = schedule_change(new, old, Start(120, 1920))
    assert line is not None and "Fix: set WARMUP_ITERS=6 DECAY_ITERS=60 (the same schedule" in line


@pytest.mark.parametrize(
    ("changed", "old"),
    [
        ({"gbsz": 16, "lr": 2e-3, "train_iters": 300}, {}),  # what is asked for, not a consequence
        ({"gbsz": 16, "mbsz": 4, "gpus_per_node": 2}, {}),
        ({"gbsz": 32, "rampup_batch_size": "16 16 4000"}, {"gbsz": 32}),
        ({"gbsz": 32, "lr_decay_style": "constant"}, {"lr_decay_style": "constant"}),
    ],
)
def test_other_changes_at_a_resume_are_not_refused(changed, old):
    usual = {"gbsz": 16, "mbsz": 1, "train_iters": 120, "warmup_iters": 12}
    assert schedule_change(config(**usual | changed), config(**usual | old), Start(66, 66 * 16)) is None
    assert schedule_change(config(**usual | {"gbsz": 32}), config(**usual), Start()) is None


def test_the_text_of_a_resumed_ramp_has_its_own_samples():
    """20 batches of 16, then those of 32: 320 samples of the schedule's 3200 in a fifth of the iterations."""
    c = config(lr=1e-3, min_lr=0.0, lr_decay_style="linear", train_iters=100, warmup_iters=0, gbsz=32)
    points = "0.0009 at 20 (resumed), 0.00085 at 25 (25%), 0.0006 at 50 (50%), 0.00035 at 75 (75%)"
    assert f"(linear): {points}, 0.0001 at 100 " in learning_rate_text(c, Start(20, 320))
    assert "0.00095 at 20 (resumed)" in learning_rate_text(c, Start(20, 320, skipped_samples=160))
    (line,) = schedule_warnings(c, Start(20, 320))
    assert "Fix: set DECAY_ITERS=90, " in line


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0.3", [0.3] * 6), (0, [0.0] * 6), ("0.3:60%, 0.1", [0.3, 0.3, 0.3, 0.1, 0.1, 0.1]),
        ("0.3:1,0.2:80%,0", [0.3, 0.2, 0.2, 0.2, 0.0, 0.0]),
    ],
)  # fmt: skip
def test_mtp_loss_coeff_by_samples(given, expected):
    c = config(mtp_num_layers=1, mtp_loss_coeff=given, train_iters=5, warmup_iters=0, gbsz=8, mbsz=1)
    assert [c.mtp_loss_coeff_at(8 * iteration) for iteration in range(6)] == expected


@pytest.mark.parametrize(
    "given", ["", "x", "-1", "nan", "0.3,0.1", "0.3:,0.1", "0.3:0%,0.1", "0.3:7", "1:-1,0"]
)
def test_a_wrong_mtp_loss_coeff_is_refused(given):
    with pytest.raises(ValueError, match=r"^MTP_LOSS_COEFF="):
        config(mtp_num_layers=1, mtp_loss_coeff=given)
