"""All-gather and reduce-scatter that are also fast on gloo. Measurements: docs/performance.md."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# gloo runs both as a ring of small steps that each wait for a thread to wake up, which dominates the time of
# tensor parallelism. An all-to-all moves the same bytes with a single wait (`bench/bench_gloo.py`).

# Above this size of the gathered tensor, the copies for an all-to-all cost more than the waits in the ring.
_LARGE_BYTES = 4 * 2**20


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Like torch.distributed.all_gather_into_tensor: concatenates x of all ranks along dimension 0."""
    if not _is_gloo(group) or out.nbytes > _LARGE_BYTES:
        return dist.all_gather_into_tensor(out, x, group=group, async_op=async_op)
    copies = x.flatten().repeat(dist.get_world_size(group))
    return dist.all_to_all_single(out.view(-1), copies, group=group, async_op=async_op)


def reduce_scatter(out: Tensor, x: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Like torch.distributed.reduce_scatter_tensor: sums x over ranks and splits dimension 0 among them."""
    if not _is_gloo(group):
        return dist.reduce_scatter_tensor(out, x, group=group, async_op=async_op)
    # summed on this rank in rank order, not along the way as in a ring
    parts = torch.empty_like(x, memory_format=torch.contiguous_format).view(dist.get_world_size(group), -1)
    work = dist.all_to_all_single(parts.view(-1), x.contiguous().view(-1), group=group, async_op=async_op)

    def wait() -> None:
        if work is not None:
            work.wait()
        torch.sum(parts, dim=0, out=out.view(-1))

    return SimpleNamespace(wait=wait) if async_op else wait()


def _is_gloo(group: ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo"
