"""OFFLOAD_OPTIMIZER: the host trains with the bits of torch's AdamW, in buckets whose copies overlap."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, Leg, run_legs, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.state import Progress
from moe_exp.config import load_config
from moe_exp.engine import offloaded_adam, runtime
from moe_exp.engine.averaged_weights import averaged_weights
from moe_exp.engine.offloaded_adam import OffloadedAdam
from moe_exp.engine.optimizer_classes import Adam
from moe_exp.engine.optimizer_setup import choose_optimizer, skip_steps_not_finite
from moe_exp.training import loop
from moe_exp.training import step as one_iteration
from moe_exp.training.interval import Interval

LONG, SAVED = 20, 10
RUN: dict[str, Any] = {"dtype": "bf16", "lr": 5e-3, "min_lr": 0.0, "warmup_iters": 0, "clip_grad": 0.5}
RUN |= {"lr_groups": "*.router.*:lr=0.5,wd=0", "expert_lr_mult": 0.5}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder / f"iter_{LONG:07d}")
    return {key: reader.read(key) for key in reader.tensors if "rng_state" not in key}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "more"),
    [
        ("one", "DP2", {}), ("DP2", "EP2", {"ema_decay": 0.9, "average_every": 3}),
        ("EP2 whole", "TP2", {"optimizer_state_dtype": "bf16"}), ("PP2", "PP2", {}),
        pytest.param("TP2", "one whole", {}, marks=SLOW),
    ],
)  # fmt: skip
def test_runs_and_resumes_have_the_bits_of_the_device(saved_at, loaded_at, more, tmp_path):
    base = RUN | more | {"train_data": str(write_data(tmp_path))}
    ends, legs = itertools.count(), []

    def add(layout: str, offloads: bool, start: Path | None = None, steps: int = LONG) -> None:
        saves = {LONG: tmp_path / str(next(ends))} | ({} if start else {SAVED: tmp_path / str(offloads)})
        settings = base | LAYOUTS[layout] | {"offload_optimizer": offloads}
        legs.append(Leg(settings, start, steps, saves))

    for offloads in (False, True):
        add(saved_at, offloads)
    for saved, offloads in ((False, False), (False, True), (True, False)):
        add(loaded_at, offloads, tmp_path / str(saved), LONG - SAVED)
    steps = run_legs(legs)
    assert steps[0] == steps[1] and steps[2] == steps[3] == steps[4]
    if saved_at == loaded_at:
        assert steps[2] == steps[0][SAVED:]
    ended = [tensors_of(tmp_path / str(number)) for number in range(5)]
    for place, other in ((0, 1), (2, 3), (2, 4)):
        assert ended[place].keys() == ended[other].keys()
        for key, value in ended[place].items():
            assert ended[other][key].dtype == value.dtype and torch.equal(ended[other][key], value), key
