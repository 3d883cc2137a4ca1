"""Optimizer step that uses `adamw_step` and never makes the host wait for the device.

Megatron's step clips only after the host has read the gradient norm; until then, the device idles. Here,
`adamw_step` reads the norm on the device, clips the gradients, skips the step if the norm is not finite, and
writes the model weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_exp.config import Config
from moe_exp.engine.optimizer_classes import Adam, stepped
from moe_exp.layers.kernels import launch
from moe_exp.layers.megatron.moe_parts import device_of_model

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def choose_step(config: Config, *, device_type: str, failure: str = "") -> str:
    """Returns `whole` if the kernel does the whole step, `update` if it only replaces AdamW, else `torch`.

    `failure`: why the kernel's self-test failed, or '' if it passed.
    """
    is_on_device = device_type == "cuda" and not config.offload_optimizer
    if config.optimizer not in ("adam", "muon") or not is_on_device or launch.missing() or failure:
        return "torch"
    # Muon needs clipped gradients of the matrices, and fp16 gradients that the loss scaler has checked.
    return "whole" if config.optimizer == "adam" and config.dtype != "fp16" else "update"


def keeps_remainders(config: Config, step: str) -> bool:
    """Whether main weights are stored as 16-bit remainders (see MAIN_PARAMS); `step`: from `choose_step`."""
    if config.main_params == "auto":
        return step == "whole" and config.dtype == "bf16" and not config.qk_clip
    return config.main_params == "remainder"


def store_main_weights(part: Any) -> None:
    """Splits the main weights of `part`, one of the chained optimizers, and keeps them split (`Adam.split`).

    Code that needs main weights joins them first. They are split again in the next iteration, or when they
    are next copied to the model. Also allocates the moments of `part`.
    """
    adam, zero_grad, copy = part.optimizer, part.zero_grad, part._copy_model_params_to_main_params
    adam.weights, adam.stored = dict(_weights(part)), {}
    for group in adam.param_groups:
        for p in group["params"]:
            adam.allocate(p, group)  # one by one, because main weights and moments may not fit together
            if p in adam.weights:
                adam.split(p)

    def split() -> None:
        for p in adam.weights:
            adam.split(p)

    def split_and_zero_grad(set_to_none: bool = True) -> None:
        split()
        zero_grad(set_to_none)

    def copy_from_model(state_dict: None = None) -> None:
        for p in adam.weights:
            adam.join(p)
        copy(state_dict)
        split()

    part._copy_main_params_to_model_params, part.zero_grad = split, split_and_zero_grad
    part._copy_model_params_to_main_params = copy_from_model


def use_kernel(optimizer: MegatronOptimizer, *, whole_step: bool) -> None:
    """Makes every Adam in `optimizer` use `adamw_step`; if `whole_step`, also uses `FusedStep`."""
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    for part in parts:
        assert isinstance(part.optimizer, Adam)
        part.optimizer.uses_kernel = True
    if whole_step:
        # replaces the method on this instance only
        optimizer.step = FusedStep(optimizer, parts)


class FusedStep:
    """Replaces `step` of Megatron's optimizer; changes nothing if the gradient norm is not finite.

    A call returns a tuple of None, the norm (fp32 []), and the number of zeros in the gradients (None if
    not counted). The host does not wait for the norm. `count_step` must be called when the norm is known,
    and before the next step.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: list[Any]):
        self._optimizer, self._parts, self._is_stepping = optimizer, parts, False
        for part in parts:
            part.optimizer.clip = optimizer.config.clip_grad
            part.optimizer.weights = dict(_weights(part))
            if part.optimizer.weights:
                if hasattr(torch.Tensor, "grad_dtype"):  # before torch 2.10, Megatron copies them to fp32
                    part._copy_model_grads_to_main_grads = partial(_share_gradients, part)
                # Megatron also copies after a load; in a step, the kernel has already written the weights.
                copy = part._copy_main_params_to_model_params
                part._copy_main_params_to_model_params = lambda copy=copy: self._is_stepping or copy()

    @torch.no_grad()
    def __call__(self) -> tuple[None, Tensor, float | None]:
        for part in self._optimizer.chained_optimizers:
            part.prepare_grads()
        norm = self._grad_norm()
        zeros = self._optimizer.count_zeros() if self._optimizer.config.log_num_zeros_in_grad else None
        for part in self._parts:
            part.optimizer.norm = norm
        self._is_stepping = True
        try:
            self._optimizer.step_with_ready_grads()
        finally:
            self._is_stepping = False
        return None, norm, zeros

    def _grad_norm(self) -> Tensor:
        """Norm of the gradients over all ranks, fp32 []; a gradient that several ranks hold counts once."""
        all_parts, zero = self._optimizer.chained_optimizers, torch.zeros((), device=device_of_model())
        sums = []
        for part in all_parts:
            grads = [] if part.is_stub_optimizer else part.get_main_grads_for_grad_norm()
            norms = torch._foreach_norm(grads, dtype=torch.float32) if grads else [zero]
            sums.append(torch.linalg.vector_norm(torch.stack(norms)).square())
        if self._optimizer.grads_states_parallel_group_is_shared():
            sums = [torch.stack(sums).sum()]
        for part, squares in zip(all_parts, sums, strict=False):
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        return torch.stack(sums).sum().sqrt()


def count_step(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Decrements the step count if `FusedStep` skipped its step; returns whether the step was applied."""
    if math.isfinite(norm):
        return True
    for group in optimizer.param_groups:
        if group["params"]:
            group["step"] -= 1
    return False


def _share_gradients(part: Any) -> None:
    """Turns gradients of main weights into views of the gradient buffers, in the buffers' dtype."""
    for main, model in _pairs(part):
        grad = model.main_grad
        if isinstance(part, DistributedOptimizer):
            place = part._get_model_param_range_map(model)["param"]
            grad = grad.view(-1)[place.start : place.end]
        main.grad_dtype = grad.dtype
        main.grad = grad


def _weights(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (main weights, 16-bit model weights) for the part of each parameter that this rank updates."""
    for main, model in _pairs(part):
        if isinstance(part, DistributedOptimizer):
            place = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[model]
            yield main, part.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]
        else:
            yield main, model.detach()


def _pairs(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (main weights, 16-bit model parameter) of one of the chained optimizers."""
    return ((main, model) for model, main in stepped(part) if model.dtype != torch.float32)
