#!/usr/bin/env python3
"""Bandwidth and latency of the collectives of training between the ranks of a job: NCCL on GPUs, gloo
without.

    torchrun --nproc-per-node 8 bench/gpu/bench_comm.py                            # one node, 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
        bench/gpu/bench_comm.py --json comm.json
    torchrun --nproc-per-node 2 bench/gpu/bench_comm.py --sizes 4K 1M              # on a CPU

The first is meant to take about a minute, not measured.

A size is that of the whole tensor: what an all-reduce takes on every rank, what an all-gather gives, what a
reduce-scatter takes, what a rank sends in an all-to-all (the dispatcher of expert parallelism) with its own
part. Bus bandwidth is what a rank sends to others per second, so that it can be compared with the link: of a
size S on n ranks (n-1)/n * S, twice that for an all-reduce. Every result is compared, exactly, before it is
timed. Time of a call: that of the slowest rank, median of the rounds.

The last lines are the entries of a hardware profile of the planner (`moe-exp plan --gpu FILE.json`), node_ or
network_: the largest all-reduce gives bytes per second, the smallest the latency, as bench_device.py has
them.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bench_arguments
import torch
import torch.distributed as dist
from gpu_clock import elapsed_ms
from gpu_machine import origin
from torch import Tensor

SIZES = ["4K", "64K", "1M", "16M", "64M", "256M"]
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
ROUNDS = 7


class Collective(NamedTuple):
    """Args: run: (output, input); sizes: elements of input and output from those of the whole and the ranks;
    sent: shares of the whole that a rank sends, over (n-1)/n; expected: the result on a rank from the inputs
    of all.
    """

    run: Callable[[Tensor, Tensor], Any]
    sizes: Callable[[int, int], tuple[int, int]]
    sent: int
    expected: Callable[[list[Tensor], int], Tensor]


def _all_reduce(output: Tensor, given: Tensor) -> None:
    dist.all_reduce(given)  # in place, as gradients are reduced


# Their names since torch 2.13, which warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _mine(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    return whole.chunk(num_ranks)[rank]


COLLECTIVES = {
    "all-reduce": Collective(
        _all_reduce, lambda whole, n: (whole, 0), 2, lambda given, rank: sum(given[1:], given[0])
    ),
    "all-gather": Collective(
        _all_gather, lambda whole, n: (whole // n, whole), 1, lambda given, rank: torch.cat(given)
    ),
    "reduce-scatter": Collective(
        _reduce_scatter,
        lambda whole, n: (whole, whole // n),
        1,
        lambda given, rank: _mine(sum(given[1:], given[0]), rank, len(given)),
    ),
    "all-to-all": Collective(
        dist.all_to_all_single,
        lambda whole, n: (whole, whole),
        1,
        lambda given, rank: torch.cat([_mine(x, rank, len(given)) for x in given]),
    ),
}


def values(rank: int, count: int, device: torch.device) -> Tensor:
    """Whole numbers that differ by rank and place, and whose sums over ranks are exact."""
    return ((torch.arange(count, device=device) * 7 + rank * 13) % 101).float()


def check(name: str, count: int, device: torch.device) -> None:
    """Compares the result of a collective with the one computed from the inputs of all ranks.

    Raises:
        SystemExit: where they differ, which ends the job.
    """
    collective, rank, num_ranks = COLLECTIVES[name], dist.get_rank(), dist.get_world_size()
    sizes = collective.sizes(count, num_ranks)
    given, output = values(rank, sizes[0], device), torch.full((sizes[1],), float("nan"), device=device)
    collective.run(output, given)
    expected = collective.expected([values(other, sizes[0], device) for other in range(num_ranks)], rank)
    if not torch.equal(given if name == "all-reduce" else output, expected):
        raise SystemExit(f"{name} of {4 * count} bytes: wrong result on rank {rank}")


def milliseconds(name: str, count: int, device: torch.device) -> float:
    """Of one call, on the slowest rank."""
    collective, num_ranks = COLLECTIVES[name], dist.get_world_size()
    sizes = collective.sizes(count, num_ranks)
    given, output = torch.zeros(sizes[0], device=device), torch.empty(sizes[1], device=device)
    call = partial(collective.run, output, given)
    num_calls = max(3, min(100, 2**26 // (4 * count)))
    elapsed_ms([call] * 3, device)
    times = torch.empty(ROUNDS)
    for index in range(ROUNDS):
        dist.barrier()
        times[index] = elapsed_ms([call] * num_calls, device)
    times = times.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def measure(sizes: list[int], device: torch.device) -> list[dict[str, Any]]:
    """A row for every collective and size, printed on rank 0 as they come."""
    rows, num_ranks = [], dist.get_world_size()
    for name, collective in COLLECTIVES.items():
        for num_bytes in sizes:
            count = max(1, num_bytes // 4 // num_ranks) * num_ranks
            check(name, count, device)
            ms = milliseconds(name, count, device)
            sent = collective.sent * 4 * count * (num_ranks - 1) / num_ranks
            row = {
                "collective": name,
                "bytes": 4 * count,
                "ms": ms,
                "sent_bytes": sent,
                "bus_bytes_per_second": sent / ms * 1e3,
            }
            if dist.get_rank() == 0:
                print(
                    f"| {name} | {4 * count / 2**20:.4g} | {ms:.3f} |"
                    f" {row['bus_bytes_per_second'] / 1e9:.2f} |",
                    flush=True,
                )
            rows.append(row)
    return rows


def profile_entries(rows: list[dict[str, Any]], num_hosts: int, source: str) -> dict[str, Any]:
    """What a hardware profile of the planner says of this link."""
    reduces = sorted((row for row in rows if row["collective"] == "all-reduce"), key=lambda row: row["bytes"])
    link = "node" if num_hosts == 1 else "network"
    values = {
        f"{link}_bytes_per_second": round(reduces[-1]["bus_bytes_per_second"], -7),
        f"{link}_latency_seconds": round(reduces[0]["ms"] / 1e3, 7),
    }
    return {name: {"value": value, "source": source} for name, value in values.items()}


def hosts() -> list[str]:
    """The host of every rank."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, platform.node())
    return names


def bytes_of(text: str) -> int:
    """4K, 1M, 2G or a number of bytes."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no size. Fix: give bytes, or such as 64K, 1M")
    return int(number) * unit


def parse_arguments() -> argparse.Namespace:
    """What is asked for, of a job that can do it: else one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=bytes_of,
        default=[bytes_of(size) for size in SIZES],
        help=f"default {' '.join(SIZES)}",
    )
    # Its folder has to be there on the host of rank 0 alone.
    kind = bench_arguments.result_file if os.environ.get("RANK") == "0" else Path
    parser.add_argument("--json", type=kind, help="rank 0 writes rows and profile entries there")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("RANK is not set. Fix: start it with torchrun, see --help.")
    if os.environ["WORLD_SIZE"] == "1":
        parser.error(
            "WORLD_SIZE=1: one rank sends nothing to anybody. Fix: torchrun --nproc-per-node 2 or more."
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, device_id=device if on_gpu else None)
    num_hosts, num_ranks = len(set(hosts())), dist.get_world_size()
    card = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if on_gpu else "gloo"
    source = (
        f"bench/gpu/bench_comm.py, {num_ranks} ranks on {num_hosts} host(s), {card}, {library}, torch"
        f" {torch.__version__}"
    )
    if dist.get_rank() == 0:
        print(
            f"{source}; median of {ROUNDS} rounds, slowest rank\n\n| collective | MiB | ms | bus, GB/s"
            " |\n|---|---|---|---|",
            flush=True,
        )
    rows = measure(sorted(arguments.sizes), device)
    if dist.get_rank() == 0:
        entries = profile_entries(rows, num_hosts, source)
        print("", json.dumps(entries, indent=1), sep="\n")
        if arguments.json:
            arguments.json.write_text(
                json.dumps(origin(device) | {"source": source, "rows": rows, "profile": entries}, indent=1)
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
