"""Records and replays routing decisions, to train or score with the experts that another run chose."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def in_backward() -> bool:
    """Whether autograd is running backward on this thread; a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_counted_forward() -> bool:
    """Whether routing counts include this forward pass: True once per micro-batch, with or without recompute.

    Under torch.compile, every forward pass with gradients is counted, because compiled layers cannot detect
    recompute.
    """
    # Reentrant checkpointing (Megatron's) runs the first pass without gradients and the second, in backward,
    # with gradients: the second counts. Non-reentrant checkpointing runs both with gradients, the second
    # under saved-tensor hooks: the first counts. Any other pass without gradients is an evaluation.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return not (in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)


class RoutingReplay:
    """Decisions of one router: a [T, K] tensor of chosen experts for each forward pass, in order.

    A replay still computes the weights from the scores of the current pass, so that gradients reach the
    router.

    Args:
        recorded: decisions to replay; None: record new decisions.
    """

    def __init__(self, recorded: Sequence[Tensor] | None = None):
        self.decisions: list[Tensor] = [] if recorded is None else list(recorded)
        self.is_replay = recorded is not None
        self._next = 0
        self._to_recompute: deque[Tensor] = deque()

    def apply(self, expert_TK: Tensor, *, training: bool) -> Tensor:
        """The experts to use: the router's choice `expert_TK` or, in a replay, the recorded choice."""
        # A recomputation reuses the decision of its forward pass. In Megatron's schedules, backward passes
        # have the order of the forward passes.
        if in_backward() and self._to_recompute:
            return self._to_recompute.popleft()
        if not self.is_replay:
            chosen_TK = expert_TK
            self.decisions.append(chosen_TK.detach())
        elif self._next == len(self.decisions):
            rule = f"the recording ends after pass {self._next}"
            raise ValueError(f"routing replay={self._next + 1} passes: {rule}. Fix: record all these passes.")
        else:
            chosen_TK = self.decisions[self._next].to(expert_TK.device)
            self._next += 1
            if chosen_TK.shape != expert_TK.shape:
                rule = f"the recorded decision of pass {self._next} has shape {tuple(chosen_TK.shape)}"
                fix = "replay with the micro-batches of the recording"
                raise ValueError(f"routing replay={tuple(expert_TK.shape)}: {rule}. Fix: {fix}.")
        if training:
            self._to_recompute.append(chosen_TK)
        return chosen_TK


def _routers(model: nn.Module) -> dict[str, Any]:
    """Routers of the model, found by their `replay` attribute (importing Router here would be circular)."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "replay")}


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Inside the context, records decisions by router name: one [T, K] tensor for each forward pass."""
    replays = {name: RoutingReplay() for name in _routers(model)}
    with _attached(model, replays):
        yield {name: replay.decisions for name, replay in replays.items()}


@contextmanager
def replay_routing(model: nn.Module, recorded: dict[str, list[Tensor]]) -> Iterator[None]:
    """Inside the context, every router of `model` replays the decisions of `record_routing`."""
    names = list(_routers(model))
    if missing := sorted(set(names) - set(recorded)):
        rule = "no decisions were recorded for this router"
        fix = "record the decisions with the model that replays them"
        raise ValueError(f"routing replay={missing[0]}: {rule}. Fix: {fix}.")
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
