"""The average of the weights (EMA_DECAY) while training: its loss, and that evaluating it changes nothing."""

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.checkpoint.saving import save
from helpers.checkpoint.small_job import build_small, small_settings, write_tokens
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.optimizer_state import owned_state
from moe_exp.checkpoint.state import parameters_in_sync, rng_state
from moe_exp.checkpoint.tools.reshape import average
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval

DECAY = 0.6
LAYOUTS: dict[str, dict[str, Any]] = {
    "one, fp32": {},
    "DP2, bf16, overlapped": {"gpus_per_node": 2, "dtype": "bf16", "overlap": "true"},
    "DP2, fp32": {"gpus_per_node": 2},
    "DP2, whole, bf16": {"gpus_per_node": 2, "dtype": "bf16", "distributed_optimizer": False},
    "TP2, Muon": {"gpus_per_node": 2, "tp": 2, "optimizer": "muon", "distributed_optimizer": False},
    "PP2, fp32, overlapped": {"gpus_per_node": 2, "pp": 2, "overlap": "true", "tie_embeddings": True},
    "EP2, fp16": {"gpus_per_node": 2, "ep": 2, "dtype": "fp16"},
    "CP2": {"gpus_per_node": 2, "cp": 2},
    "PP2_EP2, biased": {"gpus_per_node": 4, "pp": 2, "ep": 2, "router_bias_update_rate": 0.01},
}


def state_of(job: Any) -> dict[str, list[bytes]]:
    """Weights, the optimizer's state and the random streams, to the bit."""
    with parameters_in_sync(job.trained.model):
        weights = [parameter.detach() for chunk in job.trained.model for parameter in chunk.parameters()]
    states = [owned.values for owned in owned_state(job.trained.optimizer)]
    owned = [value for values in states for name, value in values.items() if name != "ema"]
    found = {"weights": [one.float().numpy().tobytes() for one in weights]}
    found["optimizer"] = [one.numpy().tobytes() for one in owned]
    found["random"] = [rng_state(job.runtime).data[0]["cpu"].numpy().tobytes()]
    return found


def losses_of(metrics: Mock) -> list[tuple[float, float | None]]:
    """Of every evaluation: with the weights, and with their average."""
    return [(call.args[1], call.kwargs["ema_lm_loss"]) for call in metrics.valid.call_args_list]


def trained(settings: dict[str, Any], port: int, folder: str) -> dict[str, Any]:
    """On one rank: some iterations with an evaluation after each second, and perhaps a save."""
    job, progress = build_small(settings, port)
    interval, metrics, norms = Interval(job.config, job.runtime, job.trained.model), Mock(), []
    # fp16 begins with steps that are skipped, until the loss scale fits
    for iteration in range(1, 30 if job.config.dtype == "fp16" else 6):
        step = loop.train_step(job, progress, interval, count_zeros=False)
        norms.append((step.grad_norm, [float(total / count) for total, count in step.losses]))
        if iteration % 2 == 1:
            loop.validate(job, progress, metrics)
    if folder:
        save(job.config, job.runtime, Path(folder), job.trained, progress)
    found = {"norms": norms, "losses": losses_of(metrics), "num_averaged": progress.num_averaged}
    found |= state_of(job)
    runtime.stop()
    return found


def validated(settings: dict[str, Any], port: int, folder: str) -> float:
    """On one rank: the loss of what `moe-exp ckpt average --ema` makes of a checkpoint, as a start."""
    if int(os.environ["RANK"]) == 0:
        average([one_checkpoint(Path(folder))], Path(folder) / "mean", [1.0], of_ema=True)
        (Path(folder) / "done").touch()
    while not (Path(folder) / "done").exists():
        time.sleep(0.01)
    job, progress = build_small(settings | {"load_dir": f"{folder}/mean"}, port)
    loop.validate(job, progress, metrics := Mock())
    runtime.stop()
    return losses_of(metrics)[0][0]


def both_and_loaded(settings: dict[str, Any], ports: list[int], folder: str) -> tuple[Any, Any, float]:
    with_average = settings | {"ema_decay": DECAY, "run_name": "averaged"}
    plain, averaged = in_turn(trained, [(settings, ports[0], ""), (with_average, ports[1], folder)])
    (loss,) = in_turn(validated, [(settings | {"run_name": "loaded"}, ports[2], folder)])
    return plain, averaged, loss


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "DP2, bf16, overlapped"]


@pytest.mark.parametrize("layout", ["DP2, bf16, overlapped", *SLOW])
def test_evaluating_the_average_changes_nothing_of_training(layout, tmp_path):
    """To the bit: weights, moments, random streams, losses and gradients."""
    tokens = write_tokens(tmp_path)
    settings = small_settings(tmp_path, "plain", valid_data=str(tokens), eval_interval=1, eval_iters=2)
    settings |= LAYOUTS[layout] | {"lr": 0.01, "warmup_iters": 0}
    num_ranks, ports, folder = settings["gpus_per_node"], [free_port() for _ in range(3)], tmp_path / "saved"
    found = run_on_ranks(num_ranks, both_and_loaded, settings, ports, str(folder), join=False)
    for plain, averaged, loss in found:
        for name in ("weights", "optimizer", "random", "norms"):
            assert plain[name] == averaged[name], name
        assert [one[0] for one in plain["losses"]] == [one[0] for one in averaged["losses"]]
        assert {one[1] for one in plain["losses"]} == {None}
        first, last = averaged["losses"][0], averaged["losses"][-1]
        # one update: the weights themselves
        assert first == ((first[0], None) if settings["dtype"] == "fp16" else (first[0], first[0]))
        assert averaged["num_averaged"] >= 5
        assert abs(last[0] - last[1]) > 1e-6
        assert loss == last[1]
