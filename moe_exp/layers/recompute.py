"""Activation recompute runs a layer's forward twice; tokens must be counted once."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread: a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_counted_forward() -> bool:
    """Whether this forward pass counts: True exactly once per micro-batch, with or without recompute.

    Reentrant checkpointing (Megatron's) runs the first pass without gradients and the second, in backward,
    with them: the second counts. Non-reentrant checkpointing runs both with gradients, the second under hooks
    on saved tensors: the first counts. Any other pass without gradients is an evaluation. A compiled layer
    cannot see who calls it: under torch.compile every pass with gradients counts.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return not (in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
