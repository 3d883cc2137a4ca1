"""Exponential moving average of the weights (EMA_DECAY), in fp32.

With d = EMA_DECAY and the main weights w after a step, the n-th update is

    ema <- ema + (1 - d) / (1 - d^n) * (w - ema)

This is ema <- d * ema + (1 - d) * w with the correction that Adam makes for its moments (Kingma and Ba 2015,
arXiv:1412.6980, section 3): the average of w_1 ... w_n with weights proportional to d^(n-i).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_exp.engine.optimizer_classes import AVERAGE

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

_BLOCK = 1 << 24  # values that are exchanged at once, to bound memory


def allocate_average(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter of this rank's optimizer an average, equal to its weights: fp32, same shape."""
    # A state of the optimizer, so each rank keeps it for the values that it steps on, its shard with the
    # distributed optimizer, and it is saved, loaded and reshaped like the moments.
    for main, state in _states(optimizer):
        state[AVERAGE] = main.detach().float().clone()


def _states(optimizer: MegatronOptimizer) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Main weights and their state, of all parameters."""
    parts = [part.optimizer for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    return [(x, part.state[x]) for part in parts for group in part.param_groups for x in group["params"]]


def _pairs(optimizer: MegatronOptimizer) -> list[tuple[Tensor, Tensor]]:
    """Main weights and their average, of all parameters; empty without an average."""
    return [(main.detach(), state[AVERAGE]) for main, state in _states(optimizer) if AVERAGE in state]


@torch.no_grad()
def restart_average(optimizer: MegatronOptimizer) -> None:
    """Sets the average to the present weights; does nothing without one."""
    for main, average in _pairs(optimizer):
        average.copy_(main)


@torch.no_grad()
def update_average(optimizer: MegatronOptimizer, *, decay: float, number: int) -> None:
    """Updates the moving average of the weights: the n-th update, `number`, with d = `decay`."""
    if pairs := _pairs(optimizer):
        weights, averages = zip(*pairs, strict=True)
        # With the correction the average is the weights after the first update. Without, it would keep a
        # share of d^(n-1) of these long after they are out of date. After some 5 / (1 - d) updates both are
        # alike.
        torch._foreach_lerp_(averages, weights, (1 - decay) / (1 - decay**number))


@contextmanager
def averaged_weights(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> Iterator[None]:
    """Inside, the weights are their average, and afterwards what they were, to the bit.

    Called by every rank, within `parameters_in_sync`. Buffers, such as the expert bias of routers, stay as
    they are.
    """

    @torch.no_grad()
    def exchange() -> None:
        # In place, block by block: a copy of all weights would be 4 bytes per parameter more.
        for main, average in _pairs(optimizer):
            for ours, theirs in zip(main.view(-1).split(_BLOCK), average.view(-1).split(_BLOCK), strict=True):
                held = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(held)
        update_model_weights(optimizer, model)

    exchange()
    yield
    exchange()


def update_model_weights(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> None:
    """Sets the chunks' weights to the optimizer's main weights, rounded, on all ranks, and waits.

    Called by every rank, within `parameters_in_sync`.
    """
    for part in optimizer.chained_optimizers:
        if not isinstance(part, FP32Optimizer) and not part.is_stub_optimizer:
            part._copy_main_params_to_model_params()
    if model[0].ddp_config.use_distributed_optimizer:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
