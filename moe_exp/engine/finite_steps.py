"""Skips optimizer steps whose gradient is not finite, on all ranks or none.

Megatron computes the gradient norm before clipping, identical on every rank: one NaN or infinity on one rank
makes it NaN or infinite on all. With bf16 and fp32 it takes the step anyway; with fp16 the loss scaler checks
the gradients first. Here the step ends once the norm is known, at no cost: it is already on the host.

A loss that is not finite need not have such a gradient; `training.microbatch.lm_loss` ensures that it does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_exp.config.choices import LOSS_STATE
from moe_exp.layers.megatron.moe_parts import MegatronRouter, device_of_model

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config


class _NotFiniteError(Exception):
    """Ends Megatron's step between the norm and its use."""

    def __init__(self, norm: float):
        self.norm = norm


def skip_steps_not_finite(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> None:
    """Makes `optimizer.step` return `(False, norm, None)` and change nothing if the norm is not finite.

    Steps that fp16's loss scaler skips still return `(False, None, None)`. In both cases the batch state of
    routers (expert bias, and what losses keep) is restored (Megatron updates it first). Called after
    `set_megatron_hooks`.
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

    # On the instance: Megatron's own step calls get_grad_norm.
    optimizer.get_grad_norm, optimizer.step = finite_norm, step


class RouterState:
    """Router state that is updated per global batch, saved before."""

    def __init__(self, model: list[DistributedDataParallel]):
        modules = (module for chunk in model for module in chunk.modules())
        self._routers = [module for module in modules if isinstance(module, MegatronRouter)]
        named = [(name, buffer) for chunk in model for name, buffer in chunk.named_buffers()]
        self._kept = [buffer for name, buffer in named if name.endswith((".router.expert_bias", *LOSS_STATE))]
        self._before = [torch.empty_like(buffer) for buffer in self._kept]
        has_relu = getattr(get_model_config(model[0]), "moe_router_score_function", "") == "relu"
        self._stages = parallel_state.get_pipeline_model_parallel_group() if has_relu else None

    def remembered_before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """`finalize`, which updates routers, and the update that is ours, after a copy of their state."""

        @torch.no_grad()
        def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
            if self._kept:
                torch._foreach_copy_(self._before, self._kept)
            finalize(*args, **kwargs)
            if self._stages is not None:
                self._share_counts(self._stages)
            for router in self._routers:
                router.end_of_global_batch()

        return finalize_model_grads

    def _share_counts(self, stages: ProcessGroup) -> None:
        """Gives every ReLU router the counts of all layers, so that `l1` has one weight: TOPK is a mean over
        tokens and layers (ReMoE, arXiv:2412.14711, equation 7).
        """
        counts = [router.slots_and_tokens for router in self._routers]
        total = torch.zeros(2, dtype=torch.int64, device=device_of_model())  # a stage may have no MoE layer
        total += sum(counts)
        torch.distributed.all_reduce(total, group=stages)
        for count in counts:
            count.copy_(total)

    @torch.no_grad()
    def restore(self) -> None:
        """Reverts what was done to the routers."""
        if self._kept:
            torch._foreach_copy_(self._kept, self._before)
