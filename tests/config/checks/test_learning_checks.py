"""Learning-rate schedules that cannot run are refused in one line."""

from __future__ import annotations

import re

import pytest

from moe_exp.config import ConfigError, load_config
from moe_exp.config.checks.checks import check_config

RUN = {"preset": "cpu", "train_iters": 300, "warmup_iters": 20, "decay_iters": 0, "gpus_per_node": 1}


def problems(**settings: object) -> list[str]:
    try:
        return check_config(load_config(RUN | settings, {}))
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"lr_decay_style": "cosin"},
            r"LR_DECAY_STYLE=cosin: must be 'cosine', .* or 'power'\. Fix: set LR_DECAY_STYLE=cosine\.",
        ),
        (
            {"lr_decay_style": "constant:80%,line"},
            r"LR_DECAY_STYLE=constant:80%,line: line is no piece: these are linear, cosine, .*\. Fix: .*",
        ),
        (
            {"lr_decay_style": "constant:80,WSD"},
            r"LR_DECAY_STYLE=constant:80,WSD: must be one of the names, or STYLE:UNTIL pieces .*",
        ),
        (
            {"lr_decay_style": "constant:80%:1e-4,linear"},
            r"LR_DECAY_STYLE=constant:80%:1e-4,linear: must be one of the names, or .*",
        ),
        ({"lr_decay_style": "constant,linear"}, r"LR_DECAY_STYLE=constant,linear: only the last piece .*"),
        ({"lr_decay_style": "constant:120%,linear"}, r"LR_DECAY_STYLE=.*: has a share that is not over .*"),
        ({"lr_decay_style": "constant:0%,linear"}, r"LR_DECAY_STYLE=.*: has a share that is not over 0% .*"),
        ({"lr_decay_style": "linear:90%:101%"}, r"LR_DECAY_STYLE=.*: a piece may end at most at 100%.*"),
        (
            {"lr_decay_style": "constant:80%,linear:200"},
            (
                r"LR_DECAY_STYLE=constant:80%,linear:200: piece 2 ends at iteration 200, but the piece before"
                r" it ends at 240\. Fix: give the iterations, or shares, in order\."
            ),
        ),
        (
            {"lr_decay_style": "constant:20,linear"},
            r"LR_DECAY_STYLE=.*: piece 1 ends at iteration 20, but the warm-up ends at 20\. Fix: .*",
        ),
        (
            {"lr_decay_style": "constant:20%,linear:301"},
            (
                r"LR_DECAY_STYLE=.*: its last piece ends at iteration 301, after TRAIN_ITERS=300\. Fix: leave"
                r" that end out, or raise TRAIN_ITERS\."
            ),
        ),
        (
            {"lr_decay_style": "inverse-square-root", "warmup_iters": 0},
            r"WARMUP_ITERS=0: LR_DECAY_STYLE=inverse-square-root is LR \* .* Fix: set WARMUP_ITERS .*",
        ),
        (
            {"lr_decay_style": "inverse-square-root:90%,linear", "warmup_iters": 0},
            r"WARMUP_ITERS=0: an inverse square root falls from the end of the warm-up on\. Fix: .*",
        ),
        (
            {"lr_decay_style": "power", "wsd_decay_iters": 301},
            r"WSD_DECAY_ITERS=301: LR_DECAY_STYLE=power decays over 0 to TRAIN_ITERS=300 .*",
        ),
        ({"lr_power_b": 0.5}, r"LR_POWER_B=0\.5: .* less than 0\. Fix: .*"),
        ({"lr_decay_style": "WSD-S"}, r"WSD_DECAY_ITERS=0: LR_DECAY_STYLE=WSD-S decays over 1 to .*"),
        (
            {"lr_decay_style": "WSD-S", "wsd_decay_iters": 30},
            (
                r"WSD_DECAY_ENDS=: LR_DECAY_STYLE=WSD-S needs the iterations .* Fix: set for instance"
                r" WSD_DECAY_ENDS=25%,50%\."
            ),
        ),
        (
            {"lr_decay_style": "WSD-S", "wsd_decay_iters": 30, "wsd_decay_ends": "49,200"},
            (
                r"WSD_DECAY_ENDS=49,200: a decay of WSD_DECAY_ITERS=30 up to iteration 49 begins at 19,"
                r" before the warm-up ends at 20\. Fix: .*"
            ),
        ),
        (
            {"lr_decay_style": "WSD-S", "wsd_decay_iters": 30, "wsd_decay_ends": "50%,60%,50"},
            r"WSD_DECAY_ENDS=50%,60%,50: .* up to iteration 50 begins at 20, before .* ends at 180\. .*",
        ),
        (
            {"lr_decay_style": "WSD-S", "wsd_decay_iters": 30, "wsd_decay_ends": "271"},
            r"WSD_DECAY_ENDS=271: .* up to iteration 300 begins at 270, before the decay .* ends at 271\. .*",
        ),
        ({"wsd_decay_ends": "1,,2"}, r"WSD_DECAY_ENDS=1,,2: must be iterations, or shares .*"),
        ({"wsd_decay_ends": "0"}, r"WSD_DECAY_ENDS=0: must be iterations, or shares .*"),
        ({"wsd_decay_style": "sqrt"}, r"WSD_DECAY_STYLE=sqrt: must be 'linear', .* or 'minus_sqrt'\. .*"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_run(settings, expected):
    (line,) = problems(**settings)
    assert re.fullmatch(expected, line), line


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_decay_style": "power"},
        {"lr_decay_style": "inverse-square-root"},
        {"lr_decay_style": "WSD-S", "wsd_decay_iters": 30, "wsd_decay_ends": "50, 80,90%"},
        {"lr_decay_style": "constant: 80%, linear"},
        {"lr_decay_style": "cosine:299:12.5%"},
        {"lr_decay_style": "power:90%,linear", "warmup_iters": 0},
    ],
)
def test_schedules_that_can_run(settings):
    assert problems(**settings) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_groups": "*.router.*"}, r"LR_GROUPS=\*\.router\.\*: must be PATTERN:lr=NUMBER,wd=NUMBER .*"),
        ({"lr_groups": "*:lr=2,lr=3"}, r"LR_GROUPS=\*:lr=2,lr=3: must be PATTERN:lr=NUMBER,wd=NUMBER .*"),
        ({"lr_groups": "*:mult=2"}, r"LR_GROUPS=\*:mult=2: must be PATTERN:lr=NUMBER,wd=NUMBER .*"),
        ({"lr_groups": "*:lr=-1"}, r"LR_GROUPS=\*:lr=-1: lr=-1 must be a number of at least 0\. Fix: .*"),
        ({"lr_groups": "*:wd=inf"}, r"LR_GROUPS=\*:wd=inf: wd=inf must be a number of at least 0\. Fix: .*"),
        (
            {"lr_groups": "*.router.*:lr=2;*.roter.weight:lr=2"},
            (
                r"LR_GROUPS=\*\.roter\.weight: matches no parameter of this model\. Fix: write it as in"
                r" decoder\.layers\.mlp\.router\.weight, .*, .*\."
            ),
        ),
        (
            {"lr_groups": "*.experts.5.*:lr=2"},
            r"LR_GROUPS=.*: matches no .* in decoder\.layers\.mlp\.experts\.experts\.linear_fc1\.weight, .*",
        ),
        ({"lr_groups": "decoder.layers.9.*:lr=2"}, r"LR_GROUPS=decoder\.layers\.9\.\*: matches no .*"),
        (
            {"lr_groups": "*:lr=2;*.router.*:lr=3,wd=1"},
            (
                r"LR_GROUPS=\*\.router\.\*: an earlier pattern has the lr of every parameter that it is"
                r" for\. Fix: put this pattern before it\."
            ),
        ),
        (
            {"lr_groups": "*router*:lr=2", "router_lr_mult": 0.5},
            r"ROUTER_LR_MULT=0\.5: LR_GROUPS has the lr of .* Fix: leave out one of the two\.",
        ),
        (
            {"lr_groups": "*norm*:wd=1,lr=2"},
            r"LR_GROUPS=\*norm\*: has a wd, but matches norms and biases only, .* Fix: leave out the wd\.",
        ),
    ],
)  # fmt: skip
def test_groups_that_have_no_effect(settings, expected):
    (line,) = problems(**settings)
    assert re.fullmatch(expected, line), line


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_groups": "*.router.*:lr=3,wd=1;*:lr=2"},
        {"lr_groups": "*.router.*:wd=0", "router_lr_mult": 0.5, "expert_lr_mult": 2.0},
        {"lr_groups": "decoder.layers.mlp.router.weight:lr=2; decoder.layers.[01].*: lr=2, wd=0 ;"},
        {"use_moe": False, "router_lr_mult": 0.5, "expert_lr_mult": 2.0},  # a dense run of a comparison
    ],
)  # fmt: skip
def test_groups_that_can_run(settings):
    assert problems(**settings) == []
