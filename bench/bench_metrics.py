"""Step time with all metrics on against off, in one process, turn by turn.

    python bench/bench_metrics.py               # median ratio of 10 pairs, MoE and dense; 6 min on 2 cores

A pair is two log intervals of `loop.train_step` of the small model on one rank that run at once, one
iteration of the one, one of the other, so that what else the machine does meets both. On: statistics of the
layers, LOG_TIMERS, zeros in the gradient, the record of the interval, metrics.jsonl, the log lines,
TensorBoard and wandb offline where it is installed. Off: none of it, nor the reduction; the layers' losses
are computed in both, as they are trained on. Which side begins changes from iteration to iteration. Beside
the wall time stands this process's processor time, which other work on the machine moves less; wandb's own
process is not in it.
"""

import argparse
import gc
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch
from bench_step import Ours
from small_model import SETTINGS

from moe_exp.config import Config, load_config
from moe_exp.engine import runtime
from moe_exp.host.processes import free_port
from moe_exp.layers.statistics import MoEStatistics
from moe_exp.runs.run_folder import open_run_folder
from moe_exp.training import loop
from moe_exp.training.interval import Interval, PhaseTimers
from moe_exp.training.metrics import Metrics


class Sides(Ours):
    """One model whose iterations run with or without metrics."""

    def __init__(self, config: Config, rank: runtime.Runtime, metrics: Metrics):
        super().__init__(config, rank)
        self.metrics, self.timers = metrics, self.interval.timers
        self.uncounted = Interval(
            config.model_copy(update={"log_timers": False}), rank, self.job.trained.model
        )

    def pair(self) -> dict[bool, list[float]]:
        """Milliseconds per iteration of one log interval with metrics (True) and one without: wall time,
        processor time.
        """
        num_iterations = self.job.config.log_interval
        spent = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for index in range(num_iterations):
            for on in (True, False) if index % 2 else (False, True):
                begin, cpu = time.perf_counter(), time.process_time()
                self._step(on=on, is_last=index == num_iterations - 1)
                spent[on][0] += time.perf_counter() - begin
                spent[on][1] += time.process_time() - cpu
        return {on: [seconds * 1e3 / num_iterations for seconds in both] for on, both in spent.items()}

    def _step(self, *, on: bool, is_last: bool) -> None:
        """One iteration; with metrics, the record of the interval where it `is_last`."""
        self._set_timers(self.timers if on else None)
        if not on:
            with patch.object(MoEStatistics, "add", lambda *_, **__: None):
                loop.train_step(self.job, self.progress, self.uncounted, count_zeros=False)
            return
        step = loop.train_step(self.job, self.progress, self.interval, count_zeros=is_last)
        if is_last:
            loop.log(self.job, self.progress, self.interval, self.metrics, step)

    def _set_timers(self, timers: PhaseTimers | None) -> None:
        for layer in self.interval.layers.values():
            layer._token_layer[0].timers = timers


def measure(config: Config, rank: runtime.Runtime, name: str, num_pairs: int) -> str:
    """Two rows of the table: medians, and median and quartiles of the ratio within each pair."""
    with Metrics(config, open_run_folder(config)) as metrics:
        sides = Sides(config, rank, metrics)
        sides.pair()
        gc.collect()
        pairs = [sides.pair() for _ in range(num_pairs)]
    rows = []
    for column, kind in enumerate(("wall", "processor")):
        off, on = ([pair[side][column] for pair in pairs] for side in (False, True))
        low, middle, high = statistics.quantiles(
            [with_metrics / without for without, with_metrics in zip(off, on, strict=True)], n=4
        )
        medians = f"{statistics.median(off):.1f} | {statistics.median(on):.1f}"
        rows.append(f"| {name}, {kind} time | {medians} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="pairs of log intervals")
    options = parser.parse_args()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread;"
        f" {options.pairs} pairs of log intervals"
    )
    print("\n| model | off, ms | on, ms | on / off | middle half |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as run_dir:
        settings: dict[str, Any] = {
            **SETTINGS,
            "gpus_per_node": 1,
            "threads_per_rank": 1,
            "log_timers": True,
            "run_dir": run_dir,
        }
        if importlib.util.find_spec("wandb"):
            settings |= {"wandb_project": "bench", "wandb_mode": "offline"}
        configs = {
            name: load_config(settings | {"use_moe": use_moe}, {})
            for name, use_moe in (("MoE", True), ("dense", False))
        }
        rank = runtime.start(configs["MoE"])
        for name, config in configs.items():
            print(measure(config, rank, name, options.pairs), flush=True)
        runtime.stop()


if __name__ == "__main__":
    main()
