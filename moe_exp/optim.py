"""Parameter groups, Megatron's (distributed) optimizer, learning-rate schedule and batch ramp-up."""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
from collections.abc import Callable
from typing import Any

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adamw import adamw

from moe_exp.config import Config
from moe_exp.model import DTYPES


class Adam(torch.optim.Optimizer):
    """AdamW with the contract of Apex's FusedAdam, computed by torch's fused kernel.

    Megatron's optimizer expects `step` once per parameter group and `exp_avg` and `exp_avg_sq` as the only state. torch's own
    AdamW keeps a `step` tensor per parameter: checkpoints then hold none, and after a load all parameters share one, which
    advances once per parameter and gives wrong losses. Loshchilov and Hutter 2019 (arXiv:1711.05101).

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        adam_w_mode: has to be true.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ):
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is supported. Fix: use decoupled_weight_decay=True.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        # The kernel adds one to each step tensor before it uses it.
        steps = list(torch.full((len(params),), float(group["step"] - 1), device=params[0].device).unbind()) if params else []
        adamw(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def choose_adam() -> tuple[str, str]:
    """The Adam that runs, and the reason in words."""
    if not megatron.core.optimizer.USING_PYTORCH_OPTIMIZER and megatron.core.optimizer.Adam is not Adam:
        return "fused", f"from {megatron.core.optimizer.Adam.__module__.partition('.')[0]}"
    return "torch fused", "neither Transformer Engine nor Apex is installed; torch's kernel behind Apex's contract"


def _use_our_adam() -> None:
    """Has Megatron use our Adam where neither Transformer Engine's nor Apex's is installed."""
    module, distributed = megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam, module.USING_PYTORCH_OPTIMIZER = Adam, False
        distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = Adam, True, True


def _is_norm_or_bias(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 or getattr(parameter, "is_bias", False)


def build_optimizer(config: Config, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's optimizer over all chunks of this rank; no weight decay on norms and biases."""
    _use_our_adam()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        fp16=config.dtype == "fp16",
        bf16=config.dtype == "bf16",
        params_dtype=DTYPES[config.dtype],
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_param_gather=model[0].ddp_config.overlap_param_gather,
        log_num_zeros_in_grad=True,
    )
    # By dimension, not by name: a norm that falls into the decayed group makes the loss jump at a restart.
    norms_and_biases = ParamKey(predicate=ParamPredicate(name="norms_and_biases", fn=_is_norm_or_bias))
    optimizer = get_megatron_optimizer(
        settings,
        model,
        config_overrides={norms_and_biases: {"wd_mult": 0.0}},
        use_gloo_process_groups=False,
    )
    for part in optimizer.chained_optimizers:
        # Now, not at the first step: fp16 may save before it has made one, and memory that is lacking is missed at once.
        if not part.is_stub_optimizer:
            part.init_state_fn(part.optimizer, part.config)
    return optimizer


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Megatron's schedule. It counts samples, so that a ramped-up batch does not bend the curve."""
    batch = config.gbsz
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_iters * batch,
        lr_decay_steps=(config.decay_iters or config.train_iters) * batch,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=config.wsd_decay_iters * batch or None,
        lr_wsd_decay_style="linear",
    )


class BatchSchedule:
    """Number of micro-batches by samples consumed: constant, or ramped up as RAMPUP_BATCH_SIZE says.

    The rule of Megatron-LM's --rampup-batch-size: the steps from START to GBSZ by INCREMENT are spread evenly over SAMPLES. It is
    written out here because Megatron-Core has no such calculator from 0.18 on.
    """

    def __init__(self, config: Config):
        self._config = config

    def at(self, consumed_samples: int) -> tuple[int, int]:
        """(micro-batches per data parallel rank, global batch size) of the next iteration."""
        config = self._config
        batch_size = config.gbsz
        if config.rampup is not None:
            start, increment, samples = config.rampup
            num_steps = (config.gbsz - start) // increment
            if num_steps and consumed_samples <= samples:
                batch_size = start + int(consumed_samples / (samples / num_steps)) * increment
        return batch_size // (config.mbsz * config.data_parallel_size), batch_size
