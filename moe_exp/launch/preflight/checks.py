"""Preflight checks of a rank. Exact matrix products and memory patterns test its device. Messages,
all-reduce and all-to-all test its links.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_exp.host.devices import available_memory_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PATTERNS = 4
_CPU_SIZE, _CUDA_SIZE = 512, 8192
_TIMED_SECONDS = 0.5

# Complements of each other: each bit is written as 0 and as 1.
_WORDS = (0x5555555555555555, -0x5555555555555556)
# Makes each chunk's word different, so that a stuck address line shows as a neighbor's word.
_ODD = 0x1E3779B97F4A7C15
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 32 << 20, 256 << 20
_DEVICE_SHARE = 0.9  # of a GPU's free memory
_HOST_SHARE, _HOST_CAP_BYTES = 0.2, 1 << 30  # of a host's free memory, for all of its ranks

_PROBE_BYTES = 128 << 10
_LARGEST_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
_TRANSFER_SECONDS = 0.02  # target for one transfer
_KIND_SECONDS = 0.6  # target for all transfers of a kind; the fastest counts
_FEWEST, _MOST = 3, 30
_LATENCY_REPEATS = 30


def check_matmul(device: torch.device, dtype: torch.dtype, *, seed: int, size: int = 0) -> dict[str, Any]:
    """Multiplies matrices whose product is known and compares every element bit for bit.

    Both factors are Sylvester's Hadamard matrix H (H H' = n I, all elements 1 or -1, n a power of two;
    Sylvester 1867). The rows of the left factor and the columns of the right factor get a random order and
    random signs, so the product is n times a signed permutation matrix. Each partial sum is an integer of
    magnitude at most n. A sum of 2^k consecutive terms whose first index is a multiple of 2^k has magnitude 0
    or 2^k. So fp32 accumulation never rounds, however the sum is tiled. The results are exact in fp32, tf32,
    bf16 and fp16.

    Returns `wrong` (number of wrong elements over all products) and `teraflops` of the fastest product.
    `size` is n (default: 512 on a CPU, 8192 on a GPU).
    """
    size = size or (_CUDA_SIZE if device.type == "cuda" else _CPU_SIZE)
    generator = torch.Generator().manual_seed(seed)
    matrix, wrong = hadamard(size, device, dtype), 0
    # accumulate in fp32; this process only runs these checks
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    for _ in range(_PATTERNS):
        rows, columns = (torch.randperm(size, generator=generator).to(device) for _ in range(2))
        bits = (torch.randint(0, 2, (size,), generator=generator) for _ in range(2))
        signs_left, signs_right = ((2 * bit - 1).to(device, dtype) for bit in bits)
        left, right = matrix[rows] * signs_left[:, None], matrix[:, columns] * signs_right
        product = left @ right
        # row i has +-n in the column whose original number equals the row's original number
        place = torch.empty_like(columns)
        place[columns] = torch.arange(size, device=device)
        at = place[rows]
        found = product.gather(1, at[:, None])[:, 0]
        product.scatter_(1, at[:, None], 0)
        # != also counts NaN
        wrong += int((found != signs_left * signs_right[at] * size).sum() + (product != 0).sum())
    # the fastest of many products hides short disturbances, but not a throttled device
    best, end = math.inf, time.perf_counter() + _TIMED_SECONDS
    while time.perf_counter() < end or best == math.inf:
        best = min(best, _best(lambda: left @ right, device, 1))
    return {"wrong": wrong, "teraflops": 2 * size**3 / best / 1e12}


def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sylvester's Hadamard matrix [n, n], built by doubling; n: a power of two."""
    matrix = torch.ones(1, 1, device=device, dtype=dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def check_memory(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Tests at most `num_bytes` of memory. Each pattern is first written to all of it, then read back.

    Returns `wrong` (number of wrong 8-byte words), `bytes` (number of bytes filled), and
    `gigabytes_per_second` of the fastest write + read.
    """
    chunk_bytes = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
    chunks: list[Tensor] = []
    with suppress(torch.OutOfMemoryError, MemoryError, RuntimeError):  # another process needed memory
        for _ in range(num_bytes // chunk_bytes):
            chunks.append(torch.empty(chunk_bytes // 8, dtype=torch.int64, device=device))
    wrong, best = 0, math.inf
    for pattern in _WORDS:
        words = [pattern ^ (number * _ODD & 0x7FFFFFFFFFFFFFFF) for number in range(len(chunks))]
        synchronize(device)
        start = time.perf_counter()
        for chunk, word in zip(chunks, words, strict=True):
            chunk.fill_(word)
        for chunk, word in zip(chunks, words, strict=True):
            # one pass without a large temporary; wrong words are only counted if there are any
            smallest, largest = torch.aminmax(chunk)
            if not smallest.item() == largest.item() == word:
                wrong += int((chunk != word).sum())
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    filled = sum(chunk.nbytes for chunk in chunks)
    rate = 2 * filled / best / 1e9 if filled else 0.0
    return {"wrong": wrong, "bytes": filled, "gigabytes_per_second": rate}


def bytes_to_fill(device: torch.device, num_ranks: int) -> int:
    """Bytes to check per rank: 90% of free GPU memory; on a CPU, min(20% of free RAM, 1 GiB) / num_ranks."""
    if device.type == "cuda":
        return int(_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
    # files in /dev/shm are in memory
    in_use = shutil.disk_usage("/dev/shm").used if Path("/dev/shm").is_dir() else 0
    free_bytes = max(0, available_memory_bytes() - in_use)
    return int(min(_HOST_CAP_BYTES, _HOST_SHARE * free_bytes) / num_ranks)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Links. Rates are defined as in nccl-tests (doc/PERFORMANCE.md): for n ranks and S bytes per rank in t
# seconds, all-reduce 2 (n-1)/n S/t, all-to-all (n-1)/n S/t, point-to-point S/t per direction. They do not
# depend on n if the links are the bottleneck.


class LinkError(RuntimeError):
    """Raised if received data differ from the sent data."""


@contextmanager
def process_group(
    store: Store, ranks: Sequence[int], rank: int, device: torch.device, timeout: timedelta
) -> Iterator[None]:
    """In the block, the global `ranks` form the default process group. No other group may use `store`."""
    # Not subgroups: they need a group of all ranks first, which one bad link prevents, and torch numbers them
    # per process, so names would differ between ranks that were in different numbers of them.
    of_gpu = device if device.type == "cuda" else None  # with a device, NCCL connects immediately
    dist.init_process_group(
        "nccl" if of_gpu else "gloo", store=store, rank=list(ranks).index(rank), world_size=len(ranks),
        timeout=timeout, device_id=of_gpu,
    )  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_group(ranks: Sequence[int], device: torch.device, twin: int | None = None) -> dict[str, float]:
    """Measures the default process group, which consists of the global `ranks` (two or more).

    All of these ranks must call this function. It returns the best of several measurements: `latency_us` is
    the latency of an 8-byte all-reduce; `all_reduce` and `all_to_all` are rates in GB/s. If the global rank
    `twin` is given, `point_to_point` is the rate in GB/s of transfers with that rank. Raises LinkError if a
    result is wrong, and RuntimeError if other ranks do not respond.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    small = torch.zeros(1, dtype=torch.float64, device=device)
    # with NCCL, only waiting for a collective's work times out, not waiting for the device
    dist.all_reduce(small, async_op=True).wait()
    latency = _best(lambda: dist.all_reduce(small), device, _LATENCY_REPEATS)
    num_bytes, repeats = _affordable(device, size)
    # each word encodes sender, receiver and position
    count = num_bytes // 8 // size
    place, others = torch.arange(count, device=device), torch.arange(size, device=device)[:, None]
    sent = (place + (rank * size + others) * count).flatten()
    expected = (place + (others * size + rank) * count).flatten()
    swap = torch.empty_like(sent)
    exchange_seconds = _best(lambda: dist.all_to_all_single(swap, sent), device, repeats)
    wrong = (swap != expected).view(size, -1).sum(1)
    if senders := [ranks[index] for index in wrong.nonzero().flatten().tolist()]:
        of = f"from rank {', '.join(map(str, senders))}"
        raise LinkError(f"all-to-all: received {int(wrong.sum())} wrong 8-byte words {of}")
    reduce_seconds = _check_all_reduce(num_bytes, device, repeats)
    rates = {
        "latency_us": latency * 1e6,
        "all_reduce": 2 * (size - 1) / size * num_bytes / reduce_seconds / 1e9,
        "all_to_all": (size - 1) / size * num_bytes / exchange_seconds / 1e9,
    }
    if twin is None:
        return rates
    peer, place = list(ranks).index(twin), torch.arange(len(sent), device=device)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, place + rank, peer), dist.P2POp(dist.irecv, swap, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    seconds = _best(exchange, device, repeats)
    if num_wrong := int((swap != place + peer).sum()):
        raise LinkError(f"point-to-point: received {num_wrong} wrong 8-byte words from rank {twin}")
    return rates | {"point_to_point": num_bytes / seconds / 1e9}


def _affordable(device: torch.device, size: int) -> tuple[int, int]:
    """Bytes per transfer and number of repeats, the same on all ranks; the slowest rank determines both."""
    probe = torch.zeros(_PROBE_BYTES // 4 // size * size, device=device)
    first = dist.all_to_all_single(torch.empty_like(probe), probe, async_op=True)
    assert first is not None  # torch returns None only to ranks outside the group
    first.wait()  # wait for the work, see measure_group
    taken = _best(lambda: dist.all_to_all_single(torch.empty_like(probe), probe), device, _FEWEST)
    slowest = torch.tensor([taken], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = max(1e-6, slowest.item())
    unit = 8 * size
    wanted = int(_PROBE_BYTES * _TRANSFER_SECONDS / seconds)
    num_bytes = max(_PROBE_BYTES, min(_LARGEST_BYTES[device.type], wanted)) // unit * unit
    return num_bytes, max(_FEWEST, min(_MOST, int(_KIND_SECONDS / (seconds * num_bytes / _PROBE_BYTES))))


def _check_all_reduce(num_bytes: int, device: torch.device, repeats: int) -> float:
    """Duration of the fastest all-reduce, in seconds. The summands are integers, so the sum is exact."""
    size, rank = dist.get_world_size(), dist.get_rank()
    factor = size * (size + 1) // 2
    most = max(2, min(1021, 2**24 // factor))  # integers are exact in fp32 up to 2^24
    pattern = torch.arange(num_bytes // 4, device=device).remainder_(most).float()
    best = math.inf
    for _ in range(repeats):
        total = pattern * (rank + 1)
        best = min(best, _best(lambda: dist.all_reduce(total), device, 1))  # noqa: B023  # called at once
        if wrong := int((total != pattern * factor).sum()):
            raise LinkError(f"all-reduce: {wrong} wrong sums")
    return best


def _best(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Duration of the fastest of `repeats` calls, in seconds."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
