"""The optimizer's step with one kernel per tensor, in which the host waits once, after all are launched.

Megatron's step reads the norm of the gradients on the host, scales the gradients, runs the optimizer and
copies the main weights to the model: 28 + 8 + 6 bytes per parameter, and the device idles while the host
waits. Here `adamw_step` gets the norm on the device and does the rest in one pass of 30 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_exp.config import Config
from moe_exp.engine.adamw import split
from moe_exp.engine.optimizer_classes import Adam
from moe_exp.layers.kernels import launch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def choose_step(config: Config, *, device_type: str) -> str:
    """`kernel`, `update` (the kernel takes the place of torch's update alone) or `torch`."""
    if config.optimizer not in ("adam", "muon") or device_type != "cuda" or launch.missing():
        return "torch"
    # Muon's matrices need gradients that are clipped already, and fp16 ones that are checked already.
    return "kernel" if config.optimizer == "adam" and config.dtype != "fp16" else "update"


def use_kernel(optimizer: MegatronOptimizer, config: Config, *, whole_step: bool) -> None:
    """Has the Adam of every part of `optimizer` step by `adamw_step`; with `whole_step` it also clips, skips
    and writes the model's weights.
    """
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    for part in parts:
        assert isinstance(part.optimizer, Adam)
        part.optimizer.uses_kernel = True
    if whole_step:
        # On the instance: the training loop calls it.
        optimizer.step = FusedStep(optimizer, parts, clip=config.clip_grad)


class FusedStep:
    """`step` of Megatron's optimizer; returns whether it was taken, the gradient norm, and the number of
    zeros in the gradients if they are counted.

    Nothing is changed if the norm is not finite.
    """

    def __init__(self, optimizer: MegatronOptimizer, parts: list[Any], *, clip: float):
        self._optimizer, self._parts, self._is_stepping = optimizer, parts, False
        for part in parts:
            pairs = list(_weights(part))
            part.optimizer.clip, part.optimizer.weights = clip, dict(pairs)
            if pairs:
                part._copy_main_params_to_model_params = self._copier(part, pairs)

    def _copier(self, part: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """`part._copy_main_params_to_model_params`, with the rounding of the kernel: a run that resumes
        starts with the weights that it had.
        """
        copy_all = part._copy_main_params_to_model_params

        @torch.no_grad()
        def copy() -> None:
            if not self._is_stepping:  # after a load, for example; a step has written them
                copy_all()
                for main, weight in pairs:
                    weight.copy_(split(main.detach())[0])

        return copy

    @torch.no_grad()
    def __call__(self) -> tuple[bool, float | None, float | None]:
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
        value = float(norm)  # waits for the device
        if math.isfinite(value):
            return True, value, zeros
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if group["params"]:
                    group["step"] -= 1
        return False, value, None

    def _grad_norm(self) -> Tensor:
        """Norm of all gradients over all ranks, fp32 []; a gradient that ranks share counts once."""
        total = torch.zeros((), device=self._device)
        shared = self._optimizer.grads_states_parallel_group_is_shared()
        sums = []
        for part in self._optimizer.chained_optimizers:
            grads = [] if part.is_stub_optimizer else part.get_main_grads_for_grad_norm()
            norms = torch._foreach_norm(grads) if grads else [total]
            sums.append(torch.linalg.vector_norm(torch.stack(norms)).square())
        if shared:
            sums = [torch.stack(sums).sum()]
        for part, squares in zip(self._optimizer.chained_optimizers, sums, strict=False):
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        return torch.stack(sums).sum().sqrt()

    @property
    def _device(self) -> torch.device:
        groups = (group for part in self._parts for group in part.optimizer.param_groups)
        return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))


def _weights(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Main weights and the bf16 weights of the model that they are copied to, of this rank's values."""
    if isinstance(part, DistributedOptimizer):
        groups = zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True)
        for mains, models in groups:
            for main, model in zip(mains, models, strict=True):
                place = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                buffer, _, bucket = part.model_param_gbuf_map[model]
                values = part.buffers[buffer].buckets[bucket].param_data.view(-1)
                yield main, values[place.start : place.end]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                yield main, model.detach()
