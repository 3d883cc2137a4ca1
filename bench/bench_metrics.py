"""Step time with all metrics on against off, in one process, turn by turn.

    python bench/bench_metrics.py               # median ratio of 10 alternating pairs, MoE and dense; 2 min on 2 cores

A turn is one log interval of `moe_exp.train.train_step` on one rank at PRESET=cpu. On: statistics of the layers, LOG_TIMERS, zeros
in the gradient, the record of the interval, metrics.jsonl, the log lines, TensorBoard and wandb offline where it is installed. Off:
none of it, nor the reduction; the layers' losses are computed in both, as they are trained on. Which side begins changes from
pair to pair. Beside the wall time stands this process's processor time, which other work on the machine moves less; wandb's own
process is not in it.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import argparse
import gc
import importlib.util
import os
import platform
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from bench_step import Ours

from moe_exp import runtime, train
from moe_exp.config import Config, load_config
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.metrics import Metrics
from moe_exp.run_folder import open_run_folder


class Sides(Ours):
    """One model whose intervals run with or without metrics."""

    def __init__(self, config: Config, rank: runtime.Runtime, metrics: Metrics):
        super().__init__(config, rank)
        self.metrics, self.timers = metrics, self.interval.timers

    def interval_ms(self, *, metrics: bool) -> tuple[float, float]:
        """Milliseconds per iteration of one log interval: wall time and processor time."""
        num_iterations, begin, cpu = self.job.config.log_interval, time.perf_counter(), time.process_time()
        with ExitStack() as stack:
            if not metrics:
                stack.enter_context(patch.object(MoELayer, "_add_statistics", lambda *_: None))
            self._set_timers(on=metrics)
            for index in range(num_iterations):
                count_zeros = metrics and index == num_iterations - 1
                found = train.train_step(self.job, self.progress, self.interval, count_zeros=count_zeros)
            if metrics:
                train.log(self.job, self.progress, self.interval, self.metrics, *found)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        self.interval._restart()  # of a turn without metrics nothing is logged
        return seconds * 1e3 / num_iterations, cpu_seconds * 1e3 / num_iterations

    def _set_timers(self, *, on: bool) -> None:
        self.interval.timers = self.timers if on else None
        for layer in self.interval.layers.values():
            layer._token_layer[0].timers = self.interval.timers


def measure(config: Config, rank: runtime.Runtime, name: str, num_pairs: int) -> str:
    """Two rows of the table: medians, and median and quartiles of the ratio within each pair."""
    with Metrics(config, open_run_folder(config)) as metrics:
        sides = Sides(config, rank, metrics)
        for on in (True, False):
            sides.interval_ms(metrics=on)
        gc.collect()
        pairs = []
        for index in range(num_pairs):
            order = (True, False) if index % 2 else (False, True)
            times = {on: sides.interval_ms(metrics=on) for on in order}
            pairs.append((times[False], times[True]))
    rows = []
    for column, kind in enumerate(("wall", "processor")):
        off, on = ([pair[side][column] for pair in pairs] for side in (0, 1))
        low, middle, high = statistics.quantiles([with_metrics / without for without, with_metrics in zip(off, on, strict=True)], n=4)
        medians = f"{statistics.median(off):.1f} | {statistics.median(on):.1f}"
        rows.append(f"| {name}, {kind} time | {medians} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="alternating pairs of log intervals")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread; {options.pairs} pairs of log intervals")
    print("\n| model | off, ms | on, ms | on / off | middle half |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as run_dir:
        settings: dict[str, Any] = {"preset": "cpu", "gpus_per_node": 1, "threads_per_rank": 1, "log_timers": True, "run_dir": run_dir}
        if importlib.util.find_spec("wandb"):
            settings |= {"wandb_project": "bench", "wandb_mode": "offline"}
        configs = {name: load_config(settings | {"use_moe": use_moe}, {}) for name, use_moe in (("MoE", True), ("dense", False))}
        rank = runtime.start(configs["MoE"])
        for name, config in configs.items():
            print(measure(config, rank, name, options.pairs), flush=True)
        runtime.stop()


if __name__ == "__main__":
    main()
