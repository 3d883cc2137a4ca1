"""A checkpoint of a run with any setting that saves memory resumes with each of the others."""

import itertools
from typing import Any

import pytest

from helpers.checkpoint.legs import Leg, deviations, run_on_rank, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.layers.megatron import saved_tensors

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 gradients": {"grad_dtype": "bf16"},
    "linear loss": {"cross_entropy": "linear"},
    "recompute": {"recompute_modules": "norm,router,experts"},
    "modules on the host": {"offload_modules": "attention,experts"},
    "optimizer on the host": {"offload_optimizer": True},
    "bf16 moments": {"optimizer_state_dtype": "bf16"},
    "remainders": {"main_params": "remainder"},
}
ALL = list(itertools.product(SETTINGS, SETTINGS))
WITH_PLAIN = [pair for pair in ALL if "plain" in pair]
SAME_BITS = ("bf16 gradients", "recompute", "modules on the host", "optimizer on the host", "remainders")


def on_rank(legs):
    saved_tensors.SMALLEST = 0
    return run_on_rank(legs)


@pytest.mark.parametrize(
    "pairs", [WITH_PLAIN, pytest.param(ALL, marks=pytest.mark.slow)], ids=["plain", "all"]
)
def test_each_resumes_from_each(pairs, tmp_path):
    base = {"dtype": "bf16", "optimizer": "adam", "mbsz": 8, "num_layers": 2, "gpus_per_node": 1}
    base |= {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run")}
    folders = {name: tmp_path / name for name in SETTINGS}
    legs = [Leg(base | settings, steps=2, saves={2: folders[name]}) for name, settings in SETTINGS.items()]
    legs += [Leg(base | SETTINGS[name], start=folders[saved], steps=2) for saved, name in pairs]
    jobs = [(leg, free_port()) for leg in legs]
    done = run_on_ranks(1, on_rank, jobs, join=False, timeout=500)[0][len(SETTINGS) :]
    resumed = dict(zip(pairs, done, strict=True))
    for (saved, name), steps in resumed.items():
        plain = resumed[saved, "plain"]
        if name in SAME_BITS:
            assert steps == plain, (saved, name)
        else:
            assert max(deviations(steps, plain).values()) < 0.02, (saved, name)
