"""Planned against measured time of a training step with sliding windows, relative to the same model without.

    # SEQ_LEN=4096, six windows, dense and MoE, on one rank and thread; 6 min
    python bench/planner/bench_windows.py
    python bench/planner/bench_windows.py --rounds 5 --seq-len 2048

The models take turns in one process, `bench_step.py` has their step. Ratios are medians over the turns.
"""

import argparse
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_step import Ours, timed_ms
from small_model import SETTINGS

from moe_exp.config import load_config
from moe_exp.engine.runtime import start, stop
from moe_exp.host.processes import free_port
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.prediction import predict

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 1024, "num_heads": 8, "num_query_groups": 4,
    "mbsz": 1, "gbsz": 1,
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {}, "2048": {"sliding_window": 2048}, "1024": {"sliding_window": 1024},
    "512": {"sliding_window": 512},
    "512 in every second layer": {"sliding_window": 512, "window_pattern": "2"},
    "128": {"sliding_window": 128}, "16": {"sliding_window": 16},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of all (default: 9)")
    parser.add_argument("--seq-len", type=int, default=4096, help="SEQ_LEN (default: 4096)")
    arguments = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, SEQ_LEN={arguments.seq_len}\n")
    print(
        "| model | window | step, ms | relative | planned | planned / measured |\n|---|---|---|---|---|---|"
    )
    for name, use_moe in (("dense", False), ("MoE", True)):
        sizes = SETTINGS | SIZES | {"use_moe": use_moe, "seq_len": arguments.seq_len}
        configs = {
            window: load_config(sizes | {"gpus_per_node": 1} | more, {}) for window, more in WINDOWS.items()
        }
        hardware = load_hardware("CPU")
        planned = {
            window: predict(PlannedJob.of(config), hardware).time.total for window, config in configs.items()
        }
        rank = start(configs["none"])
        models = {window: Ours(config, rank) for window, config in configs.items()}
        for _ in range(2):
            for model in models.values():
                model.step()
        turns = [
            {window: timed_ms(model.step) for window, model in models.items()}
            for _ in range(arguments.rounds)
        ]
        for window in WINDOWS:
            milliseconds = statistics.median(turn[window] for turn in turns)
            relative = statistics.median(turn[window] / turn["none"] for turn in turns)
            expected = planned[window] / planned["none"]
            row = f"{milliseconds:.0f} | {relative:.3f} | {expected:.3f} | {expected / relative:.2f}"
            print(f"| {name} | {window} | {row} |", flush=True)
        stop()


if __name__ == "__main__":
    main()
