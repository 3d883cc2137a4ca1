"""Results that the host reads an iteration late: the run is that in which it reads them at once."""

import math
import os
from typing import Any
from unittest.mock import patch

import pytest

from helpers.checkpoint.small_job import records, small_settings, write_tokens
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format import fingerprints
from moe_exp.config import load_config
from moe_exp.engine import faults, optimizer_setup
from moe_exp.layers.kernels import launch
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training import loop
from moe_exp.training import step as one_iteration
from moe_exp.training.loss_guard import GuardEnd

BAD_ITERATION = 3


def trained(settings: dict[str, Any], step: str, port: int) -> tuple[dict[str, Any], list[int]]:
    """A run to its end, whose third iteration has a NaN in the gradients.

    Returns why it ended, and the iterations that were settled during the next one.
    """
    os.environ["MASTER_PORT"] = str(port)
    launch.INTERPRETED = False  # the plain-torch reference of the kernel
    config, stop, iteration, late = load_config(settings, {}), faults.StopSignal(), 0, []
    run_schedule, train_step = one_iteration.run_schedule, loop.train_step

    def one_step(job: Any, progress: Any, *args: Any, last: Any = None, **options: Any) -> Any:
        nonlocal iteration
        iteration = progress.iteration + 1
        if last is not None and last.late_norm is not None:
            late.append(progress.iteration)
        if iteration == 7 and job.runtime.is_first and job.config.run_name.endswith("stopped"):
            stop.reason = "SIGTERM"
        return train_step(job, progress, *args, last=last, **options)

    def schedule(config: Any, model: Any, *args: Any, **options: Any) -> Any:
        found = run_schedule(config, model, *args, **options)
        bad = range(BAD_ITERATION, BAD_ITERATION + (2 if config.run_name.endswith("bad") else 1))
        if iteration in bad:
            next(model[0].parameters()).main_grad.view(-1)[0] = math.nan
        return found

    with (
        patch.object(optimizer_setup, "choose_step", lambda *_, **__: step),
        patch.object(one_iteration, "run_schedule", schedule), patch.object(loop, "train_step", one_step),
    ):  # fmt: skip
        try:
            end: Any = loop.run(config, stop)
        except GuardEnd as error:
            end = str(error)
    return end, late


BIASED = {"router_score": "sigmoid", "router_bias_update_rate": 0.01}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {"ema_decay": 0.7, **BIASED}),
    "whole": ("whole", {"ema_decay": 0.7, **BIASED, "dtype": "bf16"}),
    "whole, DP 2": ("whole", {"gpus_per_node": 2, "ema_decay": 0.7, "qk_clip": 0.5, **BIASED}
                    | {"distributed_optimizer": False}),
    "whole, EP 2, PP 2": ("whole", {"gpus_per_node": 4, "ep": 2, "pp": 2, "dtype": "bf16", **BIASED}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "whole, DP 2")) for case in CASES]
)
def test_late_results_change_no_bit(case, tmp_path):
    step, changes = CASES[case]
    write_tokens(tmp_path)
    folders = {}
    runs: dict[str, dict[str, Any]] = {
        "at once": {},
        "late": {"log_interval": 5},
        "at once to 8": {"exit_interval": 8},
        "late stopped": {"log_interval": 5},
        "late bad": {"log_interval": 5, "max_bad_steps": 2},
    }
    for name, options in runs.items():
        settings = small_settings(tmp_path, name, train_iters=10, **changes) | options
        found = run_on_ranks(
            settings["gpus_per_node"], trained, settings, step, free_port(), join=False, timeout=300
        )
        folders[name] = RunFolder(tmp_path / name), *found[0]
        assert [late for _, late in found] == [found[0][1]] * len(found)

    def saved(name: str, iteration: int) -> Any:
        found = fingerprints.read(folders[name][0].checkpoints / f"iter_{iteration:07d}")
        assert found
        return found

    late = [[], [1, 2, 3, 6, 7, 8, 9], [], [1, 2, 3, 6, 7], [1, 2, 3]]  # torch's step waits for the norm
    assert [late for _, _, late in folders.values()] == ([[]] * 5 if step == "torch" else late)
    assert saved("at once", 10) == saved("late", 10)
    # A stop in iteration 7 is seen in iteration 8, and with it the run ends.
    assert saved("at once to 8", 8) == saved("late stopped", 8)
    events = records(folders["late stopped"][0].path, "event")
    assert [event["iteration"] for event in events if event["event"] == "stop"] == [8]
    # The second bad step in a row is known at once.
    assert "in iterations 3 to 4" in folders["late bad"][1]
    for name in ("lm_loss", "grad_norm", "params_norm", "learning_rate", "consumed_samples"):
        once, late = (
            [
                record[name]
                for record in records(folders[run][0].path, "train")
                if record["iteration"] % 5 == 0
            ]
            for run in ("at once", "late")
        )
        assert name == "lm_loss" or once == late
    losses = [record["lm_loss"] for record in records(folders["at once"][0].path, "train")]
    means = [record["lm_loss"] for record in records(folders["late"][0].path, "train")]
    assert means == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5], rel=1e-12)
    skipped = [record["skipped_iterations"] for record in records(folders["late"][0].path, "train")]
    assert skipped == [1, 0]
