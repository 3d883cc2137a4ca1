"""Functions that sum over an optional process group or copy tensors to the host."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; None means this rank alone."""
    return 1 if group is None else group.size()


def sum_over(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of `x` over the ranks of `group`, without gradient; does not modify `x`."""
    if group_size(group) == 1:
        return x.detach()
    total = x.detach().clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def start_copy(x: Tensor) -> Callable[[], list[Any]]:
    """Starts copying a tensor to the host; the returned function waits only for this copy."""
    host = x.to("cpu", non_blocking=True)  # to pinned memory
    copied = torch.cuda.current_stream().record_event() if x.is_cuda else None

    @cache
    def read() -> list[Any]:
        if copied is not None:
            copied.synchronize()
        return list(host.tolist())

    return read
