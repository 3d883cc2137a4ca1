"""Activation recompute runs a layer's forward twice; what counts tokens must count once."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: a forward pass inside it is a
    recomputation.
    """
    return torch._C._current_graph_task_id() != -1


def is_counted_forward() -> bool:
    """Whether this forward pass is the one that counts: True exactly once per micro-batch, with any kind of
    recompute or none.

    Reentrant checkpointing (Megatron's) runs the first pass without gradients and the second, in backward,
    with them: the second counts. Non-reentrant checkpointing runs both with gradients, the second in backward
    under hooks on saved tensors: the first counts. A pass without gradients otherwise is an evaluation.
    """
    if not torch.is_grad_enabled():
        return False
    return not (in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
