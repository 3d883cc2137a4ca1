"""What the heartbeats, the launcher's look at them and the trace of calls cost per iteration.

    PYTHONPATH=. python bench/bench_hang.py [--pairs 10]

Iterations of the small MoE, by turns with and without: the ratio of the process's own time within each
pair, median and quartiles, on an idle machine in about two minutes.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_step import Ours
from small_model import SETTINGS

from moe_exp.config import Config, load_config
from moe_exp.engine import runtime
from moe_exp.host.processes import free_port
from moe_exp.training import loop
from moe_exp.watch.hangs import heartbeat
from moe_exp.watch.hangs.call_trace import CallTrace
from moe_exp.watch.hangs.heartbeat import HeartbeatWriter, read_beats

MODULES = ("moe_exp", "megatron", "torch.distributed")


class Sides(Ours):
    """One model whose iterations run with something or without it."""

    def step(self) -> float:
        """Seconds of processor time of one iteration."""
        begin = time.process_time()
        loop.train_step(self.job, self.progress, self.interval, count_zeros=False)
        heartbeat.enter("end_of_iteration")
        return time.process_time() - begin

    def ratios(self, on: Callable[[], None], off: Callable[[], None], num_pairs: int) -> list[float]:
        found = []
        for pair in range(num_pairs + 1):
            seconds = {}
            for side in (True, False) if pair % 2 else (False, True):
                (on if side else off)()
                seconds[side] = self.step() + self.step()
            off()
            found.append(seconds[True] / seconds[False])
        return found[1:]


def row(name: str, ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"| {name} | {middle:.4f} | {low:.4f} to {high:.4f} |"


def microseconds(work: Callable[[], object], number: int = 2000) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - begin) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="pairs of two iterations each")
    options = parser.parse_args()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = load_config(
            {
                **SETTINGS,
                "gpus_per_node": 1,
                "threads_per_rank": 1,
                "run_dir": name,
                "run_name": "bench",
            },
            {},
        )
        heart = HeartbeatWriter(folder, 0)
        print(f"one beat: {microseconds(lambda: heart.enter('data')):.2f} us, of six per iteration")
        print(f"the launcher reads a beat: {microseconds(lambda: read_beats(folder)):.0f} us, once a second")
        measure(config, heart, folder, options.pairs)


def measure(config: Config, heart: HeartbeatWriter, folder: Path, num_pairs: int) -> None:
    sides = Sides(config, runtime.start(config))
    sides.step()
    print("\n| what | with / without | middle half |\n|---|---|---|", flush=True)

    def beats(is_on: bool) -> None:
        heartbeat._heart = heart if is_on else None

    print(row("heartbeats", sides.ratios(lambda: beats(True), lambda: beats(False), num_pairs)), flush=True)
    trace = CallTrace(folder / "calls.txt", size_mb=16, modules=MODULES)
    called = trace._called
    before = trace._count
    sides.step()
    print(f"one iteration: {trace._count - before} calls in {', '.join(MODULES)}")
    trace.stop()
    print(
        row(
            "TRACE_CALLS_FROM",
            sides.ratios(lambda: sys.setprofile(called), lambda: sys.setprofile(None), num_pairs),
        ),
        flush=True,
    )
    runtime.stop()


if __name__ == "__main__":
    main()
