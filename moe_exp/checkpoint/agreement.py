"""What one rank finds out, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


def on_first_rank(make: Callable[[], T]) -> T | None:
    """What `make` returns on rank 0, which keeps it for itself; None on the others. Called by every rank. Raises as `from_first_rank`."""
    made: list[T] = []
    from_first_rank(lambda: made.append(make()))
    return made[0] if made else None


def from_first_rank(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, where alone it is called. Called by every rank.

    Raises:
        ValueError: on every rank, where `make` does; so no rank waits for one that has given up.
    """
    box: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            box = [(make(), None)]
        except ValueError as caught:
            box = [(None, caught)]
    torch.distributed.broadcast_object_list(box)
    value, error = box[0]
    if error is not None:
        raise error
    return cast(T, value)


def on_every_rank(make: Callable[[], T]) -> T:
    """What `make` returns, of each rank its own. Called by every rank.

    Raises:
        ValueError: on every rank, with the same text, where `make` does on one; so no rank goes on without it.
    """
    value, line = None, ""
    try:
        value = make()
    except ValueError as caught:
        line = str(caught)
    lines: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lines, line)
    if found := next((text for text in lines if text), ""):
        raise ValueError(found)
    return cast(T, value)
