"""Exchange between all ranks after every iteration, in one small reduction, so that all decide the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IterationEnd:
    """Values of an iteration that every rank knows.

    Args:
        stop: why some rank was asked to end the run, of `faults.STOP_REASONS`; empty: none was.
        is_writing: some rank still writes files of a checkpoint.
        lm_loss: cross entropy, nats per token, mean over micro-batches; may not be finite.
    """

    stop: str
    is_writing: bool
    lm_loss: float


def end_of_iteration(
    *,
    stop: str,
    reasons: Sequence[str],
    is_writing: bool,
    losses: Sequence[Tensor],
    num_shares: int,
    device: torch.device,
) -> IterationEnd:
    """Exchanges with the other ranks. Called by every rank; one collective, and the host waits for the GPU.

    Args:
        stop: why this rank was asked to end the run, one of `reasons`, or empty.
        reasons: all there are; the first that any rank has is used.
        is_writing: this rank still writes files of a checkpoint.
        losses: this rank's shares of the micro-batches' losses, [] each, if it counts them; else empty.
        num_shares: micro-batches of the iteration over all data-parallel ranks.
        device: of this rank.
    """
    flags = [float(reason == stop) for reason in reasons] + [float(is_writing)]
    table = torch.zeros(len(flags) + 1, dtype=torch.float64)
    table[:-1] = torch.tensor(flags, dtype=torch.float64)
    table = table.to(device)
    if losses:
        table[-1] = torch.stack(list(losses)).double().sum()
    torch.distributed.all_reduce(table)
    *counts, writing, loss = table.tolist()
    given = next((reason for reason, count in zip(reasons, counts, strict=True) if count), "")
    return IterationEnd(given, bool(writing), loss / num_shares)
