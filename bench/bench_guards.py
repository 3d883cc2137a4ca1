"""What all guards of a run cost together: iterations of two ranks with them and without, by turns.

    PYTHONPATH=. python bench/bench_guards.py            # median ratio of 10 pairs, CPU preset's MoE and dense; 3 min on 2 cores

With them, an iteration of `moe_exp.train.train`: heartbeats and the launcher's look at them, the reduction in which all ranks hear of
each other's loss and reasons to stop, the EXIT file, the spike detector, profiler and call trace that are off. Without: train_step
alone. A pair is `--iterations` of each, one of the one after one of the other; which side begins changes from one to the next. A save
with FINGERPRINTS against one without, as a share of the default SAVE_INTERVAL, stands below: it is not in the pairs.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
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

from moe_exp import faults, heartbeat, runtime, train
from moe_exp.checkpoint.save import Saver
from moe_exp.config import Config, load_config
from moe_exp.heartbeat import Heart, read_beats
from moe_exp.hosts import free_port
from moe_exp.loss_guard import Iteration, LossGuard
from moe_exp.profiling import Recorder
from moe_exp.watch.call_trace import trace_calls

NUM_RANKS = 2
BEATS = "BENCH_BEATS"


class Guarded(Ours):
    """One rank's model, whose iterations run with the guards of `train.train` or without."""

    def __init__(self, config: Config, rank: runtime.Runtime, heart: Heart):
        super().__init__(config, rank)
        job = self.job
        self.heart = heart
        self.guard = LossGuard(config, rank, job.folder, job.trained, job.train_stream, self.progress, None)
        exit_file = job.folder.exit_file if rank.is_first else None
        self.rules = faults.StopRules(faults.StopSignal(), exit_file, exit_minutes=config.exit_duration, exit_interval=0)
        self.recorder = Recorder(config, rank, job.folder)

    def seconds(self, *, on: bool) -> float:
        """Wall time of one iteration on this rank; all begin together."""
        torch.distributed.barrier()
        begin = time.perf_counter()
        heartbeat._heart = self.heart if on else None
        if on:
            self._guarded()
        else:
            train.train_step(self.job, self.progress, self.interval, count_zeros=False)
        return time.perf_counter() - begin

    def _guarded(self) -> None:
        job, progress = self.job, self.progress
        trace_calls(job.config, job.folder, job.runtime.rank, progress.iteration + 1)
        self.recorder.begin(progress.iteration + 1)
        step = train.train_step(job, progress, self.interval, count_zeros=False)
        heartbeat.enter("end_of_iteration")
        with heartbeat.during("profile"):
            self.recorder.end(progress.iteration)
        end = train.tell_all_ranks(job, step, self.rules.reason(progress.iteration), is_writing=False)
        done = Iteration(progress.iteration, step.first_sample, step.batch_size, step.updated, step.grad_norm)
        self.guard.look(progress, done, end, lambda: None)


def pairs(config: Config, rank: runtime.Runtime, heart: Heart, num_pairs: int, num_iterations: int) -> str:
    """A row of the table. An iteration takes as long as on the rank that takes longest: the others wait for it in the next one."""
    sides = Guarded(config, rank, heart)
    found = []
    for pair in range(num_pairs + 1):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for index in range(num_iterations):
            for on in (True, False) if (pair + index) % 2 else (False, True):
                seconds[on].append(sides.seconds(on=on))
        longest = torch.tensor([seconds[False], seconds[True]], dtype=torch.float64)
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
        found.append((longest.mean(dim=1) * 1e3).tolist())
    off, on_ = zip(*found[1:], strict=True)  # the first one warms up
    low, middle, high = statistics.quantiles([b / a for a, b in zip(off, on_, strict=True)], n=4)
    save_ms = _seconds_of_fingerprints(sides) * 1e3
    share = save_ms / (config.save_interval * statistics.median(off))
    cells = [f"{statistics.median(off):.1f}", f"{statistics.median(on_):.1f}", f"{middle:.4f}", f"{low:.4f} to {high:.4f}"]
    return " | ".join(["", *cells, f"{save_ms:.0f} ms, {share:.3%} of {config.save_interval} iterations |"])


def _seconds_of_fingerprints(sides: Guarded) -> float:
    """What they add to a save: medians of three with and without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    config, rank = sides.job.config, sides.job.runtime
    for _ in range(3):
        for on in (False, True):
            saver = Saver(config.model_copy(update={"fingerprints": on}), rank, sides.job.folder.checkpoints)
            saver.begin(sides.job.trained, sides.progress)
            saved = saver.finish()
            assert saved is not None and not saved.error, saved
            seconds[on].append(saved.seconds)
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


def rank_main(options: argparse.Namespace) -> None:
    """One rank, started by torchrun."""
    folder = Path(os.environ[BEATS])
    heart = Heart(folder, int(os.environ["RANK"]))
    settings = {"preset": "cpu", "gpus_per_node": NUM_RANKS, "threads_per_rank": 1, "ep": NUM_RANKS, "run_dir": str(folder)}
    configs = {"MoE": load_config(settings, {}), "dense": load_config(settings | {"use_moe": False, "ep": 1}, {})}
    rank = runtime.start(configs["MoE"])
    for name, config in configs.items():
        row = pairs(config, rank, heart, options.pairs, options.iterations)
        if rank.is_first:
            print(f"| {name}{row}", flush=True)
    runtime.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20, help="of each side in a pair (default: 20)")
    options = parser.parse_args()
    if BEATS in os.environ:
        rank_main(options)
        return 0
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {NUM_RANKS} ranks; {options.pairs} pairs\n")
    print("| model | without, ms | with, ms | with / without | middle half | FINGERPRINTS of a save |\n" + "|---" * 6 + "|", flush=True)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "--master-port", str(free_port())]
    with tempfile.TemporaryDirectory() as name:
        environ = os.environ | {BEATS: name, "OMP_NUM_THREADS": "1"}
        ranks = subprocess.Popen([sys.executable, *torchrun, *sys.argv], env=environ)
        while ranks.poll() is None:  # what the launcher does, once a second
            time.sleep(1.0)
            read_beats(Path(name))
        return ranks.returncode


if __name__ == "__main__":
    sys.exit(main())
