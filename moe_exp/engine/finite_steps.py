"""Steps of the optimizer that are made only where the gradient is finite, on all ranks or on none.

Megatron computes the gradient norm before it clips, on every rank the same number: a NaN or an infinity in
one gradient of one rank makes it NaN or infinite on all. With bf16 and fp32 it then makes the step with it
nevertheless; with fp16 the loss scaler looks at the gradients first. Here the step ends where the norm is
known, which costs nothing: the number is on the host already.

A loss that is not finite need not have such a gradient. `train.lm_loss` sees to that, so that the norm speaks
for both.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config


class _NotFiniteError(Exception):
    """Ends Megatron's step between the norm and what is done with it."""

    def __init__(self, norm: float):
        self.norm = norm


def skip_steps_not_finite(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> None:
    """Has `optimizer.step` return `(False, norm, None)` and change nothing where the gradient norm is not
    finite.

    The steps that the loss scaler of fp16 skips stay as they are: `(False, None, None)`. What routers keep of
    a batch (expert bias, the fractions of `global_aux_loss`) stays as it was with either, although Megatron
    moves it on before the step.

    Args:
        optimizer: Megatron's, over the parameters of all chunks.
        model: the chunks of this rank, as `train.connect` leaves them.
    """
    routers = RouterState(model)
    settings = get_model_config(model[0])
    settings.finalize_model_grads_func = routers.remembered_before(settings.finalize_model_grads_func)
    compute_norm, make_step = optimizer.get_grad_norm, optimizer.step

    def finite_norm() -> float:
        norm = float(compute_norm())
        if not math.isfinite(norm):
            raise _NotFiniteError(norm)
        return norm

    def step() -> tuple[bool, float | None, float | None]:
        try:
            updated, norm, num_zeros = make_step()
        except _NotFiniteError as found:
            updated, norm, num_zeros = False, found.norm, None
        if not updated:
            routers.restore()
        return updated, norm, num_zeros

    # Of the instance: Megatron's own step calls the first.
    optimizer.get_grad_norm, optimizer.step = finite_norm, step


class RouterState:
    """What Megatron's `finalize_model_grads` moves on in every router, once per global batch, remembered from
    before it does.

    Args:
        model: the chunks of this rank.
    """

    def __init__(self, model: list[DistributedDataParallel]):
        named = [(name, buffer) for chunk in model for name, buffer in chunk.named_buffers()]
        self._kept = [
            buffer
            for name, buffer in named
            if name.endswith((".router.expert_bias", ".router.global_tokens_per_expert"))
        ]
        self._before = [torch.empty_like(buffer) for buffer in self._kept]

    def remembered_before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """`finalize`, which moves the routers on, with a look at them first."""

        @torch.no_grad()
        def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
            _copy(self._before, self._kept)
            finalize(*args, **kwargs)

        return finalize_model_grads

    @torch.no_grad()
    def restore(self) -> None:
        """Takes back what `finalize` did to the routers."""
        _copy(self._kept, self._before)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
