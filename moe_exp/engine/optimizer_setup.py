"""Sets up Megatron's optimizer: parameter groups, steps, learning rate and batch ramp-up."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch

from moe_exp.config import Config
from moe_exp.config.choices import LOSS_STATE, SCORES
from moe_exp.config.learning_rate import learning_rate
from moe_exp.config.parameter_groups import Multiples, are_alike, multiples_of
from moe_exp.engine.averaged_weights import allocate_average
from moe_exp.engine.fused_step import choose_step, keeps_remainders, store_main_weights, use_kernel
from moe_exp.engine.initial_weights import global_name
from moe_exp.engine.model import DTYPES
from moe_exp.engine.muon import AXIS, Muon, Ranks
from moe_exp.engine.offloaded_adam import BUCKET, OffloadedAdam
from moe_exp.engine.optimizer_classes import Adam, Adam8bit, Sgd, allocate_moments
from moe_exp.engine.qk_clip import clip_attention_logits
from moe_exp.layers.experts.experts import Experts
from moe_exp.layers.experts.grouped_gemm import FUSED
from moe_exp.layers.kernels.launch import KernelFailure, failure_of
from moe_exp.layers.megatron.moe_parts import MegatronRouter, device_of_model

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_attr_wrapped_model, get_model_config, local_multi_tensor_l2_norm

# Transformer Engine's or Apex's fused Adam, if one of them is installed
_FUSED_ADAM = None if megatron.core.optimizer.USING_PYTORCH_OPTIMIZER else megatron.core.optimizer.Adam


def choose_optimizer(config: Config, *, device_type: str = "cpu", failure: str = "") -> tuple[str, str]:
    """(name of the optimizer that runs, reason); `failure` is the result of the AdamW kernel's self-test."""
    name = config.optimizer
    if name == "sgd":
        return "torch SGD", f"OPTIMIZER=sgd, momentum {config.sgd_momentum:g}"
    if name == "muon":
        reason = f"OPTIMIZER=muon, momentum {config.muon_momentum:g}"
        reason += "; each matrix is orthogonalized in fp32 by one data parallel rank"
        return "Muon, AdamW for embeddings, routers, norms and biases", reason
    if name == "adam8bit":
        return f"bitsandbytes {version('bitsandbytes')} 8-bit Adam", "OPTIMIZER=adam8bit"
    if name != "adam":
        raise ValueError(f"optimizer={name}: has no class in engine/optimizer_setup.py. Fix: use adam.")
    step = choose_step(config, device_type=device_type, failure=failure)
    kept = "; main weights as 16-bit remainders" if keeps_remainders(config, step) else ""
    if config.offload_optimizer:
        reason = f"OFFLOAD_OPTIMIZER=true, two buckets of {BUCKET >> 20} Mi values in flight"
        return "torch fused AdamW on the host", f"{reason}, moments in {config.optimizer_state_dtype}"
    if step != "torch":
        return "triton", f"AdamW with clipping and bf16 weights in one pass{kept}"
    if config.optimizer_state_dtype == "bf16":
        return "torch fused Adam, moments in bf16", f"OPTIMIZER_STATE_DTYPE=bf16{kept}"
    if kept:
        return "torch fused", "MAIN_PARAMS=remainder"
    if _FUSED_ADAM is not None:
        return "fused", f"from {_FUSED_ADAM.__module__.partition('.')[0]}"
    return "torch fused", failure or "neither Transformer Engine nor Apex is installed"


@contextmanager
def _megatron_builds(config: Config, step: str) -> Iterator[None]:
    """In the `with` block, Megatron builds the chosen optimizer, and DistributedOptimizer accepts it."""
    # Megatron has no argument for the class, but looks up names in its modules: patch and restore them.
    is_bf16 = config.optimizer_state_dtype == "bf16"
    is_plain = step == "torch" and not is_bf16 and not keeps_remainders(config, step)
    of_adam = OffloadedAdam if config.offload_optimizer else (is_plain and _FUSED_ADAM) or Adam
    chosen: Any = {"adam": of_adam, "sgd": Sgd, "adam8bit": Adam8bit, "muon": Muon}[config.optimizer]
    made: Any = partial(chosen, state_dtype=torch.bfloat16) if is_bf16 else chosen
    if chosen is Muon:
        dense = Ranks(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        experts = Ranks(
            parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_data_parallel_group()
        )
        made = partial(Muon, momentum=config.muon_momentum, dense=dense, experts=experts)
    module, distributed = megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
    # The last value passes an isinstance check, which refuses SGD because of Megatron's checkpoint format; we
    # write our own.
    values = [(module, "Adam", made), (module, "SGD", chosen), (module, "USING_PYTORCH_OPTIMIZER", False)]
    values += [(distributed, "Adam", (chosen,))]
    if config.offload_optimizer:
        # Megatron makes fp32 main weights of all parameters by this method, and they may not fit.
        nan = torch.full((), math.nan, device=device_of_model())
        values += [(torch.Tensor, "float", lambda x: nan.expand_as(x))]
    with ExitStack() as patches:
        for owner, name, value in values:
            patches.enter_context(mock.patch.object(owner, name, value))
        yield
    if _FUSED_ADAM is None:
        # Not restored, because state dicts read it later. Like Apex, our classes keep the step in the group.
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def _is_norm_or_bias(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 or getattr(parameter, "is_bias", False)


def _is_matrix(parameter: torch.Tensor, name: str, *, axis: int) -> bool:
    """Whether the parameter is a matrix that TP splits on `axis`; 0 means a matrix that TP does not split.
    Norms, biases, embeddings, output layers and routers are not such matrices.
    """
    if _is_norm_or_bias(parameter) or getattr(parameter, "is_embedding_or_output_parameter", False):
        return False
    if ".router." in name:
        return False
    if parameter.dim() == 3:  # experts: rows of the first projection, columns of the second
        return axis == (-2 if name.endswith("weight1") else -1)
    split = getattr(parameter, "partition_dim", -1)
    return axis == (split - 2 if split >= 0 else 0)


def parameter_names(model: list[DistributedDataParallel]) -> dict[int, str]:
    """Maps `id`s of this rank's parameters to checkpoint names with layer numbers, equal in all layouts."""
    names = {}
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in model:
        inner = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for own, shard in inner.sharded_state_dict(metadata=metadata).items():
            if isinstance(shard, ShardedTensor | ShardedTensorFactory):
                layer = ".".join(global_name(inner, own).split(".")[:3])
                # Megatron's key has no layer number if all layers are of the same kind.
                names[id(shard.data)] = re.sub(r"^decoder\.layers(?=\.\D)", layer, shard.key)
    return names


def _own_groups(config: Config, model: list[DistributedDataParallel]) -> dict[ParamKey, Any]:
    """Megatron's overrides for the parameter groups of LR_GROUPS and muP (config/parameter_groups.py)."""
    if are_alike(config):
        return {}
    found: dict[Multiples, set[int]] = {}
    for parameter, name in parameter_names(model).items():
        found.setdefault(multiples_of(config, name), set()).add(parameter)
    overrides = {}
    for own, parameters in found.items():
        rates = {"max_lr": config.lr * own.lr, "min_lr": config.min_lr * own.lr} if own.lr != 1 else {}
        decay = {"wd_mult": own.wd} if own.wd != 1 else {}
        if rates or decay:
            among = ParamPredicate(name=str(own), fn=lambda x, ids=parameters: id(x) in ids)
            overrides[ParamKey(predicate=among)] = rates | decay
    return overrides


def build_optimizer(
    config: Config, model: list[DistributedDataParallel], kernel_failures: Sequence[KernelFailure] = ()
) -> MegatronOptimizer:
    """Megatron's optimizer for all model chunks of this rank, without weight decay on norms and biases."""
    failure = failure_of("optimizer", kernel_failures)
    step = choose_step(config, device_type=device_of_model().type, failure=failure)
    settings = OptimizerConfig(
        optimizer="sgd" if config.optimizer == "sgd" else "adam", sgd_momentum=config.sgd_momentum,
        lr=config.lr, min_lr=config.min_lr, weight_decay=config.weight_decay, adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2, adam_eps=config.adam_eps, clip_grad=config.clip_grad,
        fp16=config.dtype == "fp16", bf16=config.dtype == "bf16", params_dtype=DTYPES[config.dtype],
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_param_gather=model[0].ddp_config.overlap_param_gather, log_num_zeros_in_grad=True,
    )  # fmt: skip
    # By dimension instead of name: a norm in the decayed group would make the loss jump at a restart.
    norms_and_biases = ParamKey(predicate=ParamPredicate(name="norms_and_biases", fn=_is_norm_or_bias))
    overrides = {norms_and_biases: {"wd_mult": 0.0}} | _own_groups(config, model)
    for axis in (0, -1, -2) if config.optimizer == "muon" else ():
        among = ParamWithNamePredicate(name=f"matrices_{axis}", fn=partial(_is_matrix, axis=axis))
        overrides[ParamKey(with_name_predicate=among)] = {AXIS: axis}
    with _megatron_builds(config, step):
        optimizer = get_megatron_optimizer(
            settings, model, config_overrides=overrides, use_gloo_process_groups=False
        )
    for part in optimizer.chained_optimizers:
        # Before the first step: fp16 runs may save before any step, and out-of-memory errors occur early.
        if not part.is_stub_optimizer:
            if keeps_remainders(config, step) or config.offload_optimizer:
                store_main_weights(part)
            elif isinstance(part.optimizer, Adam | Sgd):
                allocate_moments(part.optimizer)
            else:
                part.init_state_fn(part.optimizer, part.config)
    if config.ema_decay:
        allocate_average(optimizer)
    share_loss_scale(optimizer)
    if step != "torch":
        use_kernel(optimizer, whole_step=step == "whole")
    if torch.cuda.is_available() and clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = norm_of_all, scale_all
    if config.qk_clip:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        clip_attention_logits(optimizer, model, config.qk_clip, replicas)
    return optimizer


def set_megatron_hooks(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Sets Megatron's hooks for zeroing and finalizing gradients, loss scaling and delayed communication."""
    settings = get_model_config(model[0])
    overwritten = [p for chunk in model for p in leave_to_kernels(chunk)]

    def finalize(*args: Any, **kwargs: Any) -> None:
        for parameter in overwritten:
            if not parameter.grad_added_to_main_grad:  # no micro-batch has used these experts
                parameter.main_grad.zero_()
        finalize_model_grads(*args, **kwargs)

    settings.finalize_model_grads_func = finalize
    settings.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        settings.no_sync_func = no_sync if len(model) > 1 else no_sync[0]


def leave_to_kernels(chunk: DistributedDataParallel) -> list[Any]:
    """Makes `zero_grad_buffer` skip the gradients that the expert kernels overwrite. Returns the parameters
    of these gradients.

    This saves writing and reading 4 bytes per expert parameter. Most gradients belong to experts.
    """
    found: list[Any] = []
    for module in chunk.modules():
        if isinstance(module, Experts) and module.adds_to_main_grad and module.backend in FUSED:
            weights: tuple[Any, ...] = module.weight1, module.weight2
            found += [w for w in weights if w.requires_grad]
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        grads, params = buffer.grad_data, set(buffer.params)
        starts = {w.main_grad.storage_offset() - grads.storage_offset(): w for w in found if w in params}
        edges = [0, *(edge for start in sorted(starts) for edge in (start, start + starts[start].numel()))]
        edges.append(grads.numel())
        # replaces the method on this instance only
        others = [grads[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        buffer.reset = partial(torch._foreach_zero_, others)
    return found


class LearningRateScheduler(OptimizerParamScheduler):  # type: ignore[misc]
    """Megatron's scheduler with rates from `config.learning_rate`; each group may set max_lr and min_lr."""

    def __init__(self, config: Config, optimizer: MegatronOptimizer):
        # Set first, because Megatron's constructor calls get_lr. Steps are samples, so that a batch ramp-up
        # does not distort the schedule.
        self._config, batch = config, config.gbsz
        super().__init__(
            optimizer, init_lr=0.0, max_lr=config.lr, min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_iters * batch, lr_decay_steps=config.decay_end * batch,
            lr_decay_style=config.lr_decay_style, start_wd=config.weight_decay, end_wd=config.weight_decay,
            wd_incr_steps=config.train_iters * batch, wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
            wsd_decay_steps=config.wsd_decay_iters * batch, lr_wsd_decay_style=config.wsd_decay_style,
        )  # fmt: skip

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Current learning rate of a parameter group; `{}` gives the rate without factors of LR_GROUPS."""
        bounds = {name: param_group[name] for name in ("max_lr", "min_lr") if name in param_group}
        return learning_rate(self._config, self.num_steps, **bounds)


def next_batch(config: Config, consumed_samples: int, seq_len: int) -> tuple[int, int, int]:
    """(micro-batches per data parallel rank, micro-batch size, global batch size) of the next iteration."""
    # samples have `seq_len` tokens (DATA_STAGES), but are counted in units of SEQ_LEN tokens
    size, batch_size = config.microbatch_samples(seq_len), config.batches.size_at(consumed_samples)
    return batch_size // (size * config.data_parallel_size), size, batch_size


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Makes all chained optimizers on all ranks skip steps together and share one loss scale (fp16 only)."""
    # Megatron gives each part of its optimizer (dense parameters, experts) its own loss scaler. The loss is
    # multiplied by the scale of the first one, but each part divides its gradients by its own scale and
    # lowers it when its own gradients overflow. From then on, other gradients are wrong by a power of two.
    parts = [part for part in optimizer.chained_optimizers if getattr(part, "grad_scaler", None) is not None]
    if not parts:
        return
    updates, prepare = [part.grad_scaler.update for part in parts], optimizer.prepare_grads
    for part in parts:
        part.grad_scaler.update = lambda found_inf: None  # called with the overflow of one part only

    def prepare_grads() -> bool:
        overflowed = torch.tensor(float(prepare()), device=parts[0].found_inf.device)
        torch.distributed.all_reduce(overflowed, op=torch.distributed.ReduceOp.MAX)
        is_overflow = bool(overflowed.item())
        for update in updates:
            update(is_overflow)
        return is_overflow

    optimizer.prepare_grads = prepare_grads  # on the instance, where Megatron's own step finds it


# Skipping of optimizer steps with a non-finite gradient, on all ranks or none.
#
# Megatron computes the gradient norm before clipping. It is identical on every rank: a NaN or infinity on any
# rank makes it NaN or infinite on all. With bf16 and fp32 Megatron takes the step anyway; with fp16 the loss
# scaler checks the gradients first. Here the step ends once the norm is known, at no cost: it is already on
# the host. `microbatch.lm_loss` ensures that a non-finite loss has a non-finite gradient.


class _NotFiniteError(Exception):
    """Raised with the gradient norm as argument, to end Megatron's step before the norm is used."""


def skip_steps_not_finite(optimizer: MegatronOptimizer, model: list[DistributedDataParallel]) -> None:
    """Makes `optimizer.step` return `(False, norm, None)` and change nothing if the gradient is not finite.

    A step that fp16's loss scaler skips still returns `(False, None, None)`. The fused optimizer step
    (`FusedStep`) returns `(None, norm, zeros)`, because it does not know yet whether the step is skipped.
    Every skipped step restores the router state (expert bias, state of balancing losses). Call this function
    after `set_megatron_hooks`.
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

    def step() -> tuple[bool | None, Any, float | None]:
        try:
            updated, norm, num_zeros = make_step()
        except _NotFiniteError as found:
            updated, norm, num_zeros = False, found.args[0], None
        if not updated:  # finalize_model_grads has already updated the routers
            routers.restore(torch.as_tensor(norm).isfinite() if updated is None else None)
        return updated, norm, num_zeros

    # on the instance, where Megatron's own step finds get_grad_norm
    optimizer.get_grad_norm, optimizer.step = finite_norm, step


class RouterState:
    """Copy of the router state, taken before a global batch updates that state."""

    def __init__(self, model: list[DistributedDataParallel]):
        modules = (module for chunk in model for module in chunk.modules())
        self._routers = [module for module in modules if isinstance(module, MegatronRouter)]
        named = [(name, buffer) for chunk in model for name, buffer in chunk.named_buffers()]
        self._kept = [buffer for name, buffer in named if name.endswith((".router.expert_bias", *LOSS_STATE))]
        self._before = [torch.empty_like(buffer) for buffer in self._kept]
        # From the configuration: a stage without MoE layers takes part in the exchange, too.
        score = SCORES.get(getattr(get_model_config(model[0]), "moe_router_score_function", ""))
        exchanges = score is not None and score.uses_positive
        self._stages = parallel_state.get_pipeline_model_parallel_group() if exchanges else None

    def remembered_before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """Hook that copies the router state, then calls `finalize` and the routers' `end_of_global_batch`."""

        @torch.no_grad()
        def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
            if self._kept:
                torch._foreach_copy_(self._before, self._kept)
            finalize(*args, **kwargs)
            if self._stages is not None:
                # Every ReLU router gets the counts of all layers, so that `l1` has a single weight: TOPK is a
                # mean over tokens and layers (ReMoE, arXiv:2412.14711, equation 7).
                counts = [router.slots_and_tokens for router in self._routers]
                # starts at zeros, because a stage may have no MoE layer
                total = torch.zeros(2, dtype=torch.int64, device=device_of_model())
                total += sum(counts)
                torch.distributed.all_reduce(total, group=self._stages)
                for count in counts:
                    count.copy_(total)
            for router in self._routers:
                router.end_of_global_batch()

        return finalize_model_grads

    @torch.no_grad()
    def restore(self, unless: torch.Tensor | None = None) -> None:
        """Restores the routers' state from the copy, unless the device tensor `unless` (bool []) is true."""
        for kept, before in zip(self._kept, self._before, strict=True):
            kept.copy_(before if unless is None else torch.where(unless, kept, before))


# Without Transformer Engine and Apex, Megatron waits for the GPU once per gradient to compute the norm, and
# scales gradients one by one. These two functions with Megatron's arguments replace that.


def norm_of_all(
    chunk_size: int, noop_flag: Any, tensors: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Norm over all tensors together, fp32 [1], and None in place of the per-tensor norms."""
    norms = torch._foreach_norm([x for some in tensors for x in some], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale_all(chunk_size: int, noop_flag: Any, tensors: list[list[torch.Tensor]], factor: float) -> None:
    """Writes `factor` times the first list of tensors to the second list, which may be the same list."""
    sources, targets = tensors
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
