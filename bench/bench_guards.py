"""What all guards of a run cost together per iteration, as a share of the iteration itself.

    # median ratio of 10 pairs, the small MoE and dense; 2 min on 2 cores
    PYTHONPATH=. python bench/bench_guards.py

Two ranks train. After each `train_step` all wait for each other, and then the guards of `training/loop.py`
are timed: the reduction in which all ranks hear of each other's loss and reasons to stop, the EXIT file, the
spike detector, profiler and call trace that are off, and once more the heartbeats that train_step itself has.
A pair is the time of `--iterations` iterations without the guards and with them; both are of the rank that
took longest. Other work on the machine moves whole iterations by some percent, which is more than the guards
take, so they are not compared with other iterations. The launcher's look at the heartbeats runs beside, once
a second. A save with FINGERPRINTS against one without stands in the last column: it is not in the pairs.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_step import Ours
from small_model import SETTINGS

from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.config import Config, load_config
from moe_exp.engine import faults, runtime
from moe_exp.host.processes import free_port
from moe_exp.training import loop
from moe_exp.training.loss_guard import LossGuard
from moe_exp.training.recordings import Recorder
from moe_exp.watch.hangs import heartbeat
from moe_exp.watch.hangs.call_trace import trace_calls
from moe_exp.watch.hangs.heartbeat import read_beats

NUM_RANKS = 2
BEATS = "BENCH_BEATS"


class Guarded(Ours):
    """One rank's model and the guards of `loop.train`."""

    def __init__(self, config: Config, rank: runtime.Runtime):
        super().__init__(config, rank)
        job = self.job
        parts = (job.folder, job.trained, job.train_stream, self.progress)
        self.guard = LossGuard(config, rank, *parts, None, lambda: None)
        exit_file = job.folder.exit_file if rank.is_first else None
        self.rules = faults.StopRules(
            faults.StopSignal(), exit_file, exit_minutes=config.exit_duration, exit_interval=0
        )
        self.recorder = Recorder(config, rank, job.folder)

    def seconds(self) -> tuple[float, float]:
        """Wall time of one iteration on this rank and of its guards; for each of them all ranks begin
        together.
        """
        job, progress = self.job, self.progress
        torch.distributed.barrier()
        begin = time.perf_counter()
        step = loop.train_step(job, progress, self.interval, count_zeros=False)
        in_step = time.perf_counter() - begin
        torch.distributed.barrier()
        begin = time.perf_counter()
        heartbeat.begin(progress.iteration, job.config.num_microbatches)
        for phase in heartbeat.ITERATION_PHASES[1:]:
            heartbeat.enter(phase)
        trace_calls(job.config, job.folder, job.runtime.rank, progress.iteration + 1)
        self.recorder.begin(progress.iteration + 1)
        with heartbeat.during("profile"):
            self.recorder.end(progress.iteration)
        stop = self.rules.reason(progress.iteration)
        self.guard.check(progress, loop.end_iteration(job, step, stop, is_writing=False)())
        return in_step, time.perf_counter() - begin


def pairs(config: Config, rank: runtime.Runtime, num_pairs: int, num_iterations: int) -> str:
    """A row of the table."""
    sides = Guarded(config, rank)
    found = []
    for _ in range(num_pairs + 1):
        longest = torch.tensor([sides.seconds() for _ in range(num_iterations)], dtype=torch.float64)
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
        found.append((longest.mean(dim=0) * 1e3).tolist())
    steps, guards = zip(*found[1:], strict=True)  # the first one warms up
    low, middle, high = statistics.quantiles(
        [1 + guard / step for step, guard in zip(steps, guards, strict=True)], n=4
    )
    save_ms = _seconds_of_fingerprints(sides) * 1e3
    share = save_ms / (config.save_interval * statistics.median(steps))
    cells = [
        f"{statistics.median(steps):.1f}",
        f"{statistics.median(guards):.3f}",
        f"{middle:.5f}",
        f"{low:.5f} to {high:.5f}",
    ]
    return " | ".join(["", *cells, f"{save_ms:.0f} ms, {share:.3%} of {config.save_interval} iterations |"])


def _seconds_of_fingerprints(sides: Guarded) -> float:
    """What they add to a save: medians of three with and without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    config, rank = sides.job.config, sides.job.runtime
    for _ in range(3):
        for on in (False, True):
            saver = CheckpointWriter(
                config.model_copy(update={"fingerprints": on}), rank, sides.job.folder.checkpoints
            )
            saver.begin(sides.job.trained, sides.progress)
            saved = saver.finish()
            assert saved is not None and not saved.error, saved
            seconds[on].append(saved.seconds)
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


def rank_main(options: argparse.Namespace) -> None:
    """One rank, started by torchrun."""
    folder = Path(os.environ[BEATS])
    heartbeat._heart = heartbeat.HeartbeatWriter(folder, int(os.environ["RANK"]))
    settings = {
        **SETTINGS,
        "gpus_per_node": NUM_RANKS,
        "threads_per_rank": 1,
        "ep": NUM_RANKS,
        "run_dir": str(folder),
    }
    configs = {
        "MoE": load_config(settings, {}),
        "dense": load_config(settings | {"use_moe": False, "ep": 1}, {}),
    }
    rank = runtime.start(configs["MoE"])
    for name, config in configs.items():
        row = pairs(config, rank, options.pairs, options.iterations)
        if rank.is_first:
            print(f"| {name}{row}", flush=True)
    runtime.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=10, help="in a pair (default: 10)")
    options = parser.parse_args()
    if BEATS in os.environ:
        rank_main(options)
        return 0
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {NUM_RANKS} ranks;"
        f" {options.pairs} pairs\n"
    )
    print(
        "| model | an iteration, ms | its guards, ms | with / without | middle half | FINGERPRINTS of a"
        " save |\n" + "|---" * 6 + "|",
        flush=True,
    )
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(NUM_RANKS),
        "--master-port",
        str(free_port()),
    ]
    with tempfile.TemporaryDirectory() as name:
        environ = os.environ | {BEATS: name, "OMP_NUM_THREADS": "1"}
        ranks = subprocess.Popen([sys.executable, *torchrun, *sys.argv], env=environ)
        while ranks.poll() is None:  # what the launcher does, once a second
            time.sleep(1.0)
            read_beats(Path(name))
        return ranks.returncode


if __name__ == "__main__":
    sys.exit(main())
