"""Records routing decisions and replays them, to train or score with the experts that another run chose.

Activation recompute runs a layer's forward twice: `is_counted_forward` says which of the passes counts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread: a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_counted_forward() -> bool:
    """Whether this forward pass counts: True exactly once per micro-batch, with or without recompute.

    Under torch.compile every pass with gradients counts, as a compiled layer cannot see who calls it.
    """
    # Reentrant checkpointing (Megatron's) runs the first pass without gradients and the second, in backward,
    # with them: the second counts. Non-reentrant checkpointing runs both with gradients, the second under
    # hooks on saved tensors: the first counts. Any other pass without gradients is an evaluation.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return not (in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)


class RoutingReplay:
    """Decisions of one router: one [T, K] tensor per forward pass, in order.

    Weights are always computed from the scores of the current pass, so gradients reach the router in a
    replay, too.

    Args:
        recorded: decisions to replay; None records.
    """

    def __init__(self, recorded: Sequence[Tensor] | None = None):
        self.decisions: list[Tensor] = [] if recorded is None else list(recorded)
        self.is_replay = recorded is not None
        self._next = 0
        self._to_recompute: deque[Tensor] = deque()

    def apply(self, expert_TK: Tensor, *, training: bool) -> Tensor:
        """Called by the router with its own choice; returns the choice to use."""
        # A recomputation reuses the decision of its forward pass: backward passes come in the order of
        # forward passes, as in Megatron's schedules.
        if in_backward() and self._to_recompute:
            return self._to_recompute.popleft()
        if not self.is_replay:
            chosen_TK = expert_TK
            self.decisions.append(chosen_TK.detach())
        elif self._next == len(self.decisions):
            rule = f"only {self._next} are recorded"
            raise ValueError(f"routing replay={self._next + 1} passes: {rule}. Fix: record as many.")
        else:
            chosen_TK = self.decisions[self._next].to(expert_TK.device)
            self._next += 1
            if chosen_TK.shape != expert_TK.shape:
                rule = f"pass {self._next} recorded {tuple(chosen_TK.shape)} tokens and experts"
                fix = "replay the same micro-batches"
                raise ValueError(f"routing replay={tuple(expert_TK.shape)}: {rule}. Fix: {fix}.")
        if training:
            self._to_recompute.append(chosen_TK)
        return chosen_TK


def _routers(model: nn.Module) -> dict[str, Any]:
    """Modules with a `replay` attribute; the Router class cannot be imported from here."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "replay")}


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Records the decisions of every router inside the context: name to [T, K] per forward pass."""
    replays = {name: RoutingReplay() for name in _routers(model)}
    with _attached(model, replays):
        yield {name: replay.decisions for name, replay in replays.items()}


@contextmanager
def replay_routing(model: nn.Module, recorded: dict[str, list[Tensor]]) -> Iterator[None]:
    """Inside the context, every router of `model` repeats what `record_routing` recorded, pass by pass."""
    names = list(_routers(model))
    missing = sorted(set(names) - set(recorded))
    if missing:
        rule = "nothing is recorded for this router"
        raise ValueError(f"routing replay={missing[0]}: {rule}. Fix: record with the same model.")
    with _attached(model, {name: RoutingReplay(recorded[name]) for name in names}):
        yield


@contextmanager
def _attached(model: nn.Module, replays: dict[str, RoutingReplay]) -> Iterator[None]:
    routers = _routers(model)
    for name, router in routers.items():
        router.replay = replays[name]
    try:
        yield
    finally:
        for router in routers.values():
            router.replay = None
