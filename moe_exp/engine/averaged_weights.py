"""Exponential moving average of the weights (EMA_DECAY), in fp32.

Let d be EMA_DECAY, and let w be the main weights after a step. The n-th update is

    ema <- ema + (1 - d) / (1 - d^n) * (w - ema)

This is ema <- d * ema + (1 - d) * w with Adam's bias correction (Kingma and Ba 2015, arXiv:1412.6980,
section 3). After n updates, ema is a weighted average of w_1 ... w_n, in which the weight of w_i is
proportional to d^(n-i).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_exp.engine.optimizer_classes import AVERAGE, joined

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

_BLOCK = 1 << 24  # values exchanged at once, to bound memory


def allocate_average(optimizer: MegatronOptimizer) -> None:
    """Adds an fp32 average, initially equal to the weights, to the optimizer state of every parameter."""
    # As optimizer state, it is sharded by the distributed optimizer, and saved, loaded and resharded like the
    # moments.
    for main, state in _states(optimizer):
        state[AVERAGE] = main.detach().float().clone()


def _states(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields (main weights, optimizer state) of every parameter."""
    for part in optimizer.chained_optimizers:
        for group in [] if part.is_stub_optimizer else part.optimizer.param_groups:
            for main in group["params"]:
                with joined(part.optimizer, main):
                    yield main, part.optimizer.state[main]


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (main weights, average) of every parameter; yields nothing without EMA_DECAY."""
    return ((main.detach(), state[AVERAGE]) for main, state in _states(optimizer) if AVERAGE in state)


@torch.no_grad()
def restart_average(optimizer: MegatronOptimizer) -> None:
    """Resets the average to the current weights; does nothing without EMA_DECAY."""
    for main, average in _pairs(optimizer):
        average.copy_(main)


@torch.no_grad()
def update_average(optimizer: MegatronOptimizer, *, decay: float, number: int) -> None:
    """Updates the moving average of the weights; in this module's formula, n is `number` and d is `decay`."""
    for main, average in _pairs(optimizer):
        # Without the correction, the initial weights would keep a share of d^n in the average. After about
        # 5 / (1 - d) updates it makes no difference.
        average.lerp_(main, (1 - decay) / (1 - decay**number))


@contextmanager
def averaged_weights(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> Iterator[None]:
    """Weights and average are swapped in the block. Every rank must call this inside `parameters_in_sync`."""

    @torch.no_grad()
    def exchange() -> None:
        # A second exchange undoes it, to the bit. In place and block by block, because a copy of all weights
        # would need 4 more bytes per parameter. Buffers such as the expert bias have no average.
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
    """Copies the rounded main weights to the model. Every rank must call this inside `parameters_in_sync`."""
    for part in optimizer.chained_optimizers:
        if not isinstance(part, FP32Optimizer) and not part.is_stub_optimizer:
            part._copy_main_params_to_model_params()
    if model[0].ddp_config.use_distributed_optimizer:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
