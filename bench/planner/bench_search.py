"""How fast `moe-exp plan search` is: seconds from the command to its last line, and layouts per second inside
it.

    python bench/planner/bench_search.py             # every preset on 1024 GPUs, the median of 5 calls; 15 s
    python bench/planner/bench_search.py --gpus 64   # on so many

The first figure is that of a process of its own, with the interpreter's start; the second is processor time
of the search alone.
"""

import argparse
import statistics
import subprocess
import sys
import time

from moe_exp.config import load_config
from moe_exp.config.presets import PRESETS
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.search import topology

GPUS_PER_NODE, ROUNDS = 8, 5
LONG = {"preset": "mixtral-8x7b", "seq_len": "32768"}  # context parallelism is searched as well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=1024)
    num_gpus = parser.parse_args().gpus
    models = {name: {"preset": name} for name in PRESETS if name != "cpu"} | {
        "mixtral-8x7b, 32768 tokens": LONG
    }
    print("| model | s of the command | ms of the search | layouts tried | predicted | predicted per s |")
    print("|---|---|---|---|---|---|")
    for name, settings in models.items():
        command = statistics.median(command_seconds(num_gpus, settings) for _ in range(ROUNDS))
        seconds, num_tried, num_predicted = searched(num_gpus, settings)
        print(
            f"| {name} | {command:.2f} | {1000 * seconds:.0f} | {num_tried:,} | {num_predicted:,} |"
            f" {num_predicted / seconds:,.0f} |",
            flush=True,
        )


def command_seconds(num_gpus: int, settings: dict[str, str]) -> float:
    """Wall time of one call."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "moe_exp", "plan", "search", "--gpus", str(num_gpus), *flags],
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def searched(num_gpus: int, settings: dict[str, str]) -> tuple[float, int, int]:
    """Median processor seconds of a search, layouts tried, and how many of them were predicted."""
    config = load_config(
        settings | {"nnodes": str(num_gpus // GPUS_PER_NODE), "gpus_per_node": str(GPUS_PER_NODE)}, {}
    )
    hardware, predict, count = load_hardware("A100-80GB"), topology.predict, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        return predict(*arguments)

    topology.predict = counted
    try:
        found = topology.search(config, hardware)
    finally:
        topology.predict = predict
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        topology.search(config, hardware)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), found.num_tried, count


if __name__ == "__main__":
    main()
