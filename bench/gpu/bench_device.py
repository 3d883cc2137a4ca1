#!/usr/bin/env python3
"""Measures what a hardware profile of the planner says of the processors of this machine, and prints the
profile.

    # half a minute; `moe-exp plan ... --gpu my_cpu.json` takes it
    python bench/gpu/bench_device.py > my_cpu.json

One thread per process, as a rank of a CPU host has. Best of several, so that other work on the machine counts
as little as it can.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIZE, COPIED_BYTES, SENT_BYTES = 1536, 2**28, 2**24


def seconds_of(work: Callable[[], object], repeats: int = 12) -> list[float]:
    """Seconds of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def flops(dtype: torch.dtype) -> float:
    """Of a product of square matrices."""
    a, b = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    return 2 * SIZE**3 / min(seconds_of(lambda: a @ b))


def copied_bytes_per_second() -> float:
    """Bytes read and written by a copy."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / min(seconds_of(lambda: target.copy_(source)))


def _rank(rank: int, store: str, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    small, large = torch.zeros(1), torch.zeros(SENT_BYTES // 4)
    latency = statistics.median(seconds_of(lambda: dist.all_reduce(small), 500))
    seconds = min(seconds_of(lambda: dist.all_reduce(large)))
    if rank == 0:
        # two ranks send all of it once in a reduce-scatter and an all-gather
        results.put((latency, SENT_BYTES / seconds))
    dist.destroy_process_group()


def links() -> tuple[float, float]:
    """Seconds of a small all-reduce between two processes, and bytes per second that each sends in a large
    one.
    """
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, args=(f"{folder}/store", results), nprocs=2)
    latency, speed = results.get()
    return latency, speed


def main() -> None:
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    latency, speed = links()
    source = f"bench/gpu/bench_device.py, one thread, {cores} cores"
    values = {
        "memory_bytes": psutil.virtual_memory().total // cores,
        "dense_flops": {name: round(flops(getattr(torch, kind)), -8) for name, kind in
                        (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))},
        "memory_bytes_per_second": round(copied_bytes_per_second(), -8),
        "num_units": 1,
        "node_bytes_per_second": round(speed, -7),
        "network_bytes_per_second": round(speed, -7),
        "node_latency_seconds": round(latency, 6),
        "network_latency_seconds": round(latency, 6),
        "gpus_per_node": cores,
        "network_share": 1.0,
        "matrix_share": 1.0,
    }  # fmt: skip
    profile = {"name": "CPU", "architecture": "cpu"} | {
        name: {"value": value, "source": source} for name, value in values.items()
    }
    print(json.dumps(profile, indent=2))


if __name__ == "__main__":
    main()
