"""All-gather and reduce-scatter on gloo: torch.distributed's against `moe_exp.host.gloo`, between processes
of this machine.

    python bench/bench_gloo.py            # ms per call by size and number of ranks; half a minute on 2 cores
    # then ms per training step at TP=2, the small MoE, turn by turn; 2 min more
    python bench/bench_gloo.py --step

A size is that of the whole tensor: the result of the all-gather, the input of the reduce-scatter. Every rank
has one thread.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_step import Ours, free_port
from small_model import SETTINGS
from torch.multiprocessing.spawn import spawn

from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.host import gloo

from megatron.core.tensor_parallel import layers, mappings

SIZES = {"4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "8 MB": 2**23}
ROUNDS = 7
Collective = Callable[..., Any]
COLLECTIVES: dict[str, tuple[Collective, Collective]] = {
    "all-gather": (dist.all_gather_into_tensor, gloo.all_gather),
    "reduce-scatter": (dist.reduce_scatter_tensor, gloo.reduce_scatter),
}


def join(rank: int, world_size: int, port: int) -> None:
    """What torchrun sets."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in values.items()}
    torch.set_num_threads(1)
    runtime.quiet_third_parties()


def collectives_rank(rank: int, world_size: int, port: int) -> None:
    """One rank: prints a row per collective and size."""
    join(rank, world_size, port)
    dist.init_process_group("gloo")
    for name, functions in COLLECTIVES.items():
        for label, num_bytes in SIZES.items():
            whole = torch.randn(num_bytes // 4)
            part = whole.chunk(world_size)[0].clone()
            tensors = (whole, part) if name == "all-gather" else (part, whole)
            native, ours = turn_by_turn(functions, tensors, num_calls=max(5, min(200, 2**24 // num_bytes)))
            if rank == 0:
                print(
                    f"| {name} | {world_size} | {label} | {native:.2f} | {ours:.2f} | {native / ours:.2f} |",
                    flush=True,
                )
    dist.destroy_process_group()


def turn_by_turn(
    functions: tuple[Collective, Collective], tensors: tuple[torch.Tensor, torch.Tensor], num_calls: int
) -> list[float]:
    """Median ms per call of each function, over rounds of `num_calls` in which they take turns."""
    times: list[list[float]] = [[], []]
    for index in range(ROUNDS + 1):
        for function, column in zip(functions, times, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(num_calls):
                function(*tensors)
            if index > 0:
                column.append((time.perf_counter() - begin) * 1e3 / num_calls)
    return [statistics.median(column) for column in times]


def step_rank(rank: int, port: int, data_dir: str, num_pairs: int) -> None:
    """One of two tensor parallel ranks: training steps with either pair of functions, turn by turn; prints a
    row.
    """
    join(rank, 2, port)
    settings = SETTINGS | {"gpus_per_node": "2", "tp": "2", "data_dir": data_dir}
    config = load_config(settings, environ={})
    model = Ours(config, runtime.start(config))
    pairs: dict[str, list[float]] = {"native": [], "ours": []}
    for index in range(num_pairs + 3):
        for name, (gather, scatter) in zip(pairs, zip(*COLLECTIVES.values(), strict=True), strict=True):
            for module in (layers, mappings):
                module.dist_all_gather_func, module.dist_reduce_scatter_func = gather, scatter
            dist.barrier()
            begin = time.perf_counter()
            model.step()
            if index >= 3:
                pairs[name].append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        native, ours = (statistics.median(column) for column in pairs.values())
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(*pairs.values(), strict=True)], n=4)
        print(
            "\n| step at TP=2 | torch.distributed, ms | moe_exp.host.gloo, ms | ratio, median and quartiles"
            " |\n|---|---|---|---|"
        )
        print(f"| MoE | {native:.0f} | {ours:.0f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |", flush=True)
    runtime.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default 2 4)"
    )
    parser.add_argument("--step", action="store_true", help="also time training steps at TP=2")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps to time (default 20)")
    parser.add_argument(
        "--data-dir", default="data", help="where the embedded corpus is or will be (default data)"
    )
    arguments = parser.parse_args()
    print(f"Median of {ROUNDS} rounds; {os.cpu_count()} cores, torch {torch.__version__}.\n", flush=True)
    print(
        "| collective | ranks | size | torch.distributed, ms | moe_exp.host.gloo, ms | ratio"
        " |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for world_size in arguments.ranks:
        spawn(collectives_rank, (world_size, free_port()), nprocs=world_size)
    if arguments.step:
        spawn(step_rank, (free_port(), arguments.data_dir, arguments.pairs), nprocs=2)


if __name__ == "__main__":
    main()
