"""Time of Muon's optimizer step on data parallel ranks: every rank orthogonalizes all matrices, against each
matrix by one rank and gathered (`moe_exp.engine.muon`), turn by turn on gloo ranks of this machine.

    # median ms and ratio on 1, 2 and 4 ranks, 16M parameters; 2 min on 4 cores
    python bench/bench_muon.py
    # another size or number of steps
    python bench/bench_muon.py --ranks 2 --hidden 512 --layers 2 --pairs 5

The matrices are those of an MoE: per layer attention projections, and the two projections of 8 experts. Every
rank has one thread, so as many cores as ranks are needed. Gradients are random and the same on all ranks. The
last column is the largest relative difference of a parameter after all steps.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from bench_gloo import join
from bench_step import free_port
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from moe_exp.engine.muon import AXIS, Muon, Ranks

NUM_EXPERTS = 8
WARMUP = 2


def shapes(hidden: int, num_layers: int) -> list[tuple[int, ...]]:
    """Query, key and value projection, its output projection, and gated experts of half the width."""
    layer = [(2 * hidden, hidden), (hidden, hidden), (NUM_EXPERTS, hidden, hidden)]
    return [*layer, (NUM_EXPERTS, hidden, hidden // 2)] * num_layers


def optimizer_of(starts: list[Tensor], gradients: list[Tensor], ranks: Ranks) -> Muon:
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    groups = [{"params": [p], AXIS: 0, "is_expert_parallel": p.dim() == 3} for p in params]
    return Muon(groups, momentum=0.95, dense=ranks, experts=ranks, lr=1e-3, weight_decay=0.1)


def bench_rank(rank: int, world_size: int, port: int, hidden: int, num_layers: int, num_pairs: int) -> None:
    """One rank: rank 0 prints a row."""
    join(rank, world_size, port)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in shapes(hidden, num_layers)]
    gradients = [torch.randn(start.shape, generator=generator) for start in starts]
    sides = [optimizer_of(starts, gradients, ranks) for ranks in (Ranks(), Ranks(shared=dist.group.WORLD))]
    times: list[list[float]] = [[], []]
    for index in range(num_pairs + WARMUP):
        for side, column in zip(sides, times, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            side.step()
            dist.barrier()  # the slowest rank counts
            if index >= WARMUP:
                column.append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        every, shared = (statistics.median(column) for column in times)
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
        print(
            f"| {world_size} | {every:.0f} | {shared:.0f} | {ratio:.2f} ({low:.2f} to {high:.2f})"
            f" | {_difference(*sides):.0e} |",
            flush=True,
        )
    dist.destroy_process_group()


def _difference(one: Muon, other: Muon) -> float:
    pairs = zip(one.param_groups, other.param_groups, strict=True)
    params = [(a["params"][0].detach(), b["params"][0].detach()) for a, b in pairs]
    return max(((a - b).norm() / a.norm()).item() for a, b in params)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (default 1 2 4)"
    )
    parser.add_argument("--hidden", type=int, default=512, help="width of the model (default 512)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default 4)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps to time (default 10)")
    arguments = parser.parse_args()
    millions = sum(torch.Size(shape).numel() for shape in shapes(arguments.hidden, arguments.layers)) / 1e6
    print(
        f"{millions:.1f}M parameters in matrices, median of {arguments.pairs} alternating pairs;"
        f" {os.cpu_count()} cores, torch {torch.__version__}, one thread per rank.\n"
    )
    print(
        "| ranks | every rank all, ms | shared, ms | ratio, median and quartiles | difference |\n"
        "|---|---|---|---|---|",
        flush=True,
    )
    for world_size in arguments.ranks:
        sizes = (arguments.hidden, arguments.layers, arguments.pairs)
        spawn(bench_rank, (world_size, free_port(), *sizes), nprocs=world_size)


if __name__ == "__main__":
    main()
