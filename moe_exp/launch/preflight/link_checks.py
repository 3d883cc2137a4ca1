"""Speed and correctness of links between ranks: point-to-point, all-reduce and all-to-all.

Rates are those of nccl-tests (doc/PERFORMANCE.md): for n ranks and S bytes per rank in t seconds, all-reduce
2 (n-1)/n S/t, all-to-all (n-1)/n S/t, point-to-point S/t per direction; independent of n if the links are the
limit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_exp.launch.preflight.device_checks import synchronize

_PROBE_BYTES = 128 << 10
_LARGEST_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
_TRANSFER_SECONDS = 0.02  # target for one transfer
_KIND_SECONDS = 0.6  # and for all of a kind, of which the fastest counts
_FEWEST, _MOST = 3, 30
_LATENCY_REPEATS = 30


class LinkError(RuntimeError):
    """The received data differ from what was sent."""


@contextmanager
def process_group(
    store: Store, ranks: Sequence[int], rank: int, device: torch.device, timeout: timedelta
) -> Iterator[None]:
    """Makes `ranks` (global numbers) the default process group inside the block; `store` serves only this
    group.

    Not a subgroup of all: a group of all ranks has to exist first, which one bad link prevents, and torch's
    subgroup names differ between ranks that were in different numbers of them.
    """
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
    """Measures the default process group, of two or more global `ranks`, which all call this at once.

    Returns `latency_us`, of an all-reduce of 8 bytes; `all_reduce`, `all_to_all` and, with the global rank
    `twin` to exchange messages with, `point_to_point` in GB/s; the best of several. Raises LinkError if a
    result is wrong, and RuntimeError if the other ranks do not answer.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    small = torch.zeros(1, dtype=torch.float64, device=device)
    # With NCCL, waiting for a collective's work ends after the timeout; waiting for the device does not.
    dist.all_reduce(small, async_op=True).wait()
    latency = min(_seconds(lambda: dist.all_reduce(small), device) for _ in range(_LATENCY_REPEATS))
    num_bytes, repeats = _affordable(device, size)
    sent, expected = _numbered(num_bytes, size, rank, device)
    swap = torch.empty_like(sent)
    exchange_seconds = _best(lambda: dist.all_to_all_single(swap, sent), device, repeats)
    wrong = (swap != expected).view(size, -1).sum(1)
    if senders := [ranks[index] for index in wrong.nonzero().flatten().tolist()]:
        of = f"from rank {', '.join(map(str, senders))}"
        raise LinkError(f"all-to-all: {int(wrong.sum())} words of 8 bytes {of} are wrong")
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
        raise LinkError(f"point-to-point: {num_wrong} words of 8 bytes from rank {twin} are wrong")
    return rates | {"point_to_point": num_bytes / seconds / 1e9}


def _affordable(device: torch.device, size: int) -> tuple[int, int]:
    """Transfer size and repeats that are short enough on this group's links, the same on all ranks."""
    probe = torch.zeros(_PROBE_BYTES // 4 // size * size, device=device)
    first = dist.all_to_all_single(torch.empty_like(probe), probe, async_op=True)
    assert first is not None  # torch returns None only to ranks outside the group
    first.wait()  # of one collective of each kind, see measure_group
    taken = _best(lambda: dist.all_to_all_single(torch.empty_like(probe), probe), device, _FEWEST)
    slowest = torch.tensor([taken], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = max(1e-6, slowest.item())
    unit = 8 * size
    wanted = int(_PROBE_BYTES * _TRANSFER_SECONDS / seconds)
    num_bytes = max(_PROBE_BYTES, min(_LARGEST_BYTES[device.type], wanted)) // unit * unit
    return num_bytes, max(_FEWEST, min(_MOST, int(_KIND_SECONDS / (seconds * num_bytes / _PROBE_BYTES))))


def _numbered(num_bytes: int, size: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Buffers that a rank sends and expects: each word encodes sender, receiver and position."""
    count = num_bytes // 8 // size
    place = torch.arange(count, device=device)
    others = torch.arange(size, device=device)[:, None]
    sent = (place + (rank * size + others) * count).flatten()
    return sent, (place + (others * size + rank) * count).flatten()


def _check_all_reduce(num_bytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of an all-reduce of integers, whose sum is exact in any order."""
    size, rank = dist.get_world_size(), dist.get_rank()
    factor = size * (size + 1) // 2
    most = max(2, min(1021, 2**24 // factor))  # in fp32 integers are exact up to 2^24
    pattern = torch.arange(num_bytes // 4, device=device).remainder_(most).float()
    best = float("inf")
    for _ in range(repeats):
        total = pattern * (rank + 1)
        best = min(best, _seconds(lambda: dist.all_reduce(total), device))  # noqa: B023  # called at once
        if wrong := int((total != pattern * factor).sum()):
            raise LinkError(f"all-reduce: {wrong} sums are wrong")
    return best


def _best(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    return min(_seconds(action, device) for _ in range(repeats))


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def described(error: Exception) -> dict[str, Any]:
    """An error as a measurement: `wrong` for damaged data, `error` for everything else."""
    kind = "wrong" if isinstance(error, LinkError) else "error"
    return {kind: " ".join(str(error).split())[:300]}
