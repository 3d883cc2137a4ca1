"""A checkpoint of a run with any setting that saves memory resumes with each of the others."""

from typing import Any

from helpers.checkpoint.legs import Leg, deviations, run_on_rank, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.layers.megatron import offload

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
SAME_BITS = ("bf16 gradients", "recompute", "modules on the host", "optimizer on the host", "remainders")


def on_rank(legs):
    offload.SMALLEST = 0
    return run_on_rank(legs)


def test_each_resumes_from_each(tmp_path):
    base = {"dtype": "bf16", "optimizer": "adam", "mbsz": 8, "num_layers": 2, "gpus_per_node": 1}
    base |= {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run")}
    folders = {name: tmp_path / name for name in SETTINGS}
    legs = [Leg(base | settings, steps=2, saves={2: folders[name]}) for name, settings in SETTINGS.items()]
    legs += [
        Leg(base | settings, start=folder, steps=2)
        for folder in folders.values()
        for settings in SETTINGS.values()
    ]
    jobs = [(leg, free_port()) for leg in legs]
    done = run_on_ranks(1, on_rank, jobs, join=False, timeout=500)[0][len(SETTINGS) :]
    for saved in SETTINGS:
        resumed = dict(zip(SETTINGS, done[: len(SETTINGS)], strict=True))
        del done[: len(SETTINGS)]
        for name, steps in resumed.items():
            if name in SAME_BITS:
                assert steps == resumed["plain"], (saved, name)
            else:
                worst = max(deviations(steps, resumed["plain"]).values())
                assert worst < 0.02, (saved, name)
