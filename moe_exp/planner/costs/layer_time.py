"""Seconds of one layer, and of the output layer, on one rank for one micro-batch. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.config import Config, problem
from moe_exp.planner.costs.code_paths import fp8_parts, planned_loss
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.flops import attended_tokens
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.products import Device, Pass, Shape, num_slots, num_tokens, shared_rows
from moe_exp.planner.costs.traffic import skew_of

# Bytes that a training step moves beside the products, per element of 2 bytes: (forward, backward).
_SCORE_BYTES = (9, 11)  # unfused attention: scale, mask and softmax in one kernel, dropout and its mask
_RESIDUAL_BYTES = (24, 36)  # per token and hidden channel: two norms, two residuals, biases, dropout
_HEAD_BYTES = (4, 6)  # per channel of queries and keys: rotation, or a norm
_ACTIVATION_BYTES = (6, 10)  # per token and channel of an MLP
_SLOT_BYTES = (12, 16)  # per slot and channel of an expert's input: rows gathered for the experts, and back
# share of those that Megatron's all-to-all adds: rows are sorted again by local expert, there and back
_PERMUTE_SHARE = 0.5
_LOGIT_BYTES = (12, 18)  # per token and row of the vocabulary: fp32 logits, maximum, exponentials, gradient
_FUSED_LOGIT_BYTES = (4, 6)  # the same of one kernel: logits are read, their gradient is written over them
# Bytes per weight and micro-batch for adding a gradient to those before it.
_ACCUMULATION_BYTES = {"fp16": 8, "bf16": 8, "fp32": 12, "bf16_fp32grad": 16}
# FP8: input, weight and gradient of the output are read in bf16 and written twice, by rows and by columns.
_CAST_BYTES = 4
_MAXIMUM_BYTES = 2  # current scaling reads the whole tensor first, for its largest value
# Flash attention leaves out the masked half, computes scores again for gradients, and is slower a FLOP.
_FLASH_FORWARD, _FLASH_BACKWARD = 0.5, 0.5 * 2.5
# share of the residual bytes above that norms read and write
_NORMS_OF_RESIDUAL = 0.4
# Share of the host's seconds of a layer's part that a CUDA graph of a scope saves: estimates, by kernels.
_GRAPHED = {"attn": 1.0, "mlp": 1.0, "moe_router": 0.3, "moe_preprocess": 0.2}
_ATTENTION_SHARE = 0.7  # of host_dense, an estimate, by kernels
# weights of a layer without experts: norms, projections, router or MLP. An expert has two.
_DENSE_WEIGHTS = 6
# share of layer_seconds for each expert of a loop: 0.1 ms, from reference runs with and without grouped GEMM
_LOOPED_EXPERT = 0.125


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro-batch, without collectives.

    Attributes:
        parts: of a layer: norms, projections, up_projections and core of attention, mlp or router,
            latent_projections, rows, experts, activation and shared_expert; and the output layer with the
            loss.
        starts_dense, starts_moe: of kernels, where they are not counted as those of the host.
        host_dense, host_moe: seconds of the host for a layer without experts, and for one with them.
    """

    parts: dict[str, Pass]
    starts_dense: float
    starts_moe: float
    host_dense: float
    host_moe: float

    def layer(self, is_moe: bool) -> Pass:
        starts = self.starts_moe if is_moe else self.starts_dense
        of = [self.parts[name] for name in ATTENTION + (MOE if is_moe else MLP)]
        return Pass(starts + sum(one[0] for one in of), 2 * starts + sum(one[1] for one in of))

    def repeated(self, is_moe: bool) -> dict[str, float]:
        """Forward seconds of what may be computed again, by RECOMPUTE and by the modules of `Engine`."""
        forward = {name: one.forward for name, one in self.parts.items()}
        moe = sum(forward[name] for name in MOE) + self.starts_moe - self.starts_dense
        return {
            "none": 0.0,
            "moe_act": forward["activation"] if is_moe else 0.0,
            "selective": moe if is_moe else 0.0,  # which leaves the dense layers of an MoE model alone
            "full": self.layer(is_moe).forward,
            "layernorm": forward["norms"] * _NORMS_OF_RESIDUAL,
            "mla_up_proj": forward["up_projections"],
            "core_attn": forward["core"],
            "mlp": 0.0 if is_moe else forward["mlp"],
        }


ATTENTION = ("norms", "projections", "up_projections", "core")
MLP = ("mlp",)
MOE = ("router", "latent_projections", "rows", "experts", "activation", "shared_expert")


def layer_times(job: Job, device: Device, constants: TimeConstants) -> LayerTimes:
    config, tokens, nothing = job.config, num_tokens(job.config), Pass(0, 0)
    if any(fp8_parts(config)) and not device.fp8_speedup:
        rule = "the device has no FP8 peak (dense_flops of its profile)"
        raise ValueError(problem("fp8", config.fp8, rule, "choose another --gpu, or set FP8=none"))
    if job.engine.is_nvfp4 and not device.fp4_speedup:
        rule = "the device has no FP4 peak (dense_flops of its profile)"
        raise ValueError(problem("precision", "nvfp4", rule, "choose another device or precision"))
    elementwise = constants.elementwise if device.is_recent else 1.0
    parts = {name: _linears(job, device, shapes) for name, shapes in job.products.items()}
    parts["core"] = _core(job, device, constants)
    parts["norms"] = (
        device.moved(shared_rows(job, tokens) * config.hidden_size, _RESIDUAL_BYTES) * elementwise
    )
    if device.is_recent:
        parts["norms"] += device.moved(tokens * _rotated(config) / config.tp, _HEAD_BYTES) * elementwise
        elementwise *= constants.clamped_swiglu if job.engine.clamped_swiglu else 1.0
    ways = 2 if config.gated else 1

    def activated(elements: float) -> Pass:
        return device.moved(elements, _ACTIVATION_BYTES) * elementwise

    parts["mlp"] += activated(tokens * ways * config.ffn_hidden_size / config.tp)
    parts |= {"rows": nothing, "activation": nothing}
    if config.use_moe:
        slots = num_slots(job, tokens)
        parts["activation"] = activated(slots * config.expert_ffn_size / config.etp)
        parts["shared_expert"] += activated(tokens * ways * config.shared_expert_size / config.tp)
        parts["rows"] = device.moved(slots * config.expert_hidden_size, _SLOT_BYTES)
        if device.is_recent:
            is_sorted = config.ep > 1 and config.dispatcher in ("auto", "alltoall")
            extra = _PERMUTE_SHARE if is_sorted else 0.0
            parts["rows"] *= constants.slot_bytes + extra
            parts["experts"] *= 1 / constants.grouped_matrix
            if job.engine.static_rows:
                parts |= {name: parts[name] * constants.static_rows for name in ("rows", "activation")}
        skew = skew_of(job, device.hardware, constants)
        parts |= {name: parts[name] * skew for name in ("rows", "experts", "activation")}
    runs_kernels = device.hardware.runs_kernels
    loss = planned_loss(config, on_cpu=device.is_cpu, runs_kernels=runs_kernels)
    is_fused = device.is_recent and loss == "triton"
    logit_bytes = _FUSED_LOGIT_BYTES if is_fused else _LOGIT_BYTES
    parts["output"] += device.moved(tokens * config.padded_vocab_size / config.tp, logit_bytes)
    starts = 0.0 if device.is_recent else constants.layer_seconds
    looped = _LOOPED_EXPERT * config.num_experts / config.ep if config.expert_backend == "loop" else 0
    return LayerTimes(parts, starts, starts * (2 + looped), *_host_seconds(job, device, constants))


def _host_seconds(job: Job, device: Device, constants: TimeConstants) -> tuple[float, float]:
    """Seconds of the host for a layer without and one with experts: it starts kernels one by one, but for
    those of a CUDA graph.
    """
    if not device.is_recent:
        return 0.0, 0.0
    config, graphs = job.config, job.engine.graphs

    def started(seconds: float, *scopes: str) -> float:
        captured = sum(_GRAPHED[scope] for scope in scopes if scope in graphs) if "all" not in graphs else 1.0
        return seconds * (1 - captured * (1 - constants.host_graph))

    # casts and their scales are kernels of their own
    for_experts, for_others = (constants.host_fp8 if is_fp8 else 1.0 for is_fp8 in fp8_parts(config))
    local = config.num_experts / config.ep
    attention = started(_ATTENTION_SHARE * constants.host_dense * for_others, "attn")
    mlp = started((1 - _ATTENTION_SHARE) * constants.host_dense * for_others, "mlp")
    experts = started(constants.host_expert * for_experts * local)
    moe = started(constants.host_moe, "moe_router", "moe_preprocess") + experts
    of_overlap = constants.host_overlap if job.engine.overlaps_exchange else 1.0
    of_weight = constants.host_sharded if job.engine.shards_parameters else 0.0
    dense = attention + mlp + of_weight * _DENSE_WEIGHTS
    with_experts = (attention + moe) * of_overlap + of_weight * (_DENSE_WEIGHTS + 2 * local)
    return dense * device.host_share, with_experts * device.host_share


def _linears(job: Job, device: Device, shapes: Sequence[Shape]) -> Pass:
    """Products, their gradients, and the weights' gradients added up."""
    is_fused = job.sharding == "distributed" and not device.is_cpu
    num_bytes: float = _ACCUMULATION_BYTES[job.precision]
    if is_fused:
        num_bytes = 2 * job.engine.gradient_bytes
    is_scaled_by_tensor = device.is_recent and job.config.fp8_recipe == "tensorwise"
    cast_bytes = _CAST_BYTES + (_MAXIMUM_BYTES if is_scaled_by_tensor else 0)
    forward = backward = 0.0
    for rows, columns, depth, count, is_fp8 in shapes:
        once, twice = device.linear(rows, columns, depth, count)
        if is_fp8:
            speedup = device.fp4_speedup if job.engine.is_nvfp4 else device.fp8_speedup
            # weights that come in FP8 are not cast
            cast_weights = 0 if job.engine.gathered_bytes == 1 else columns
            casts = device.moved((rows + cast_weights) * depth * count, (cast_bytes, 0)).forward
            forward += casts * device.cast_share
            backward += device.moved(rows * columns * count, (0, cast_bytes)).backward * device.cast_share
            once, twice = once / speedup, twice / speedup
        forward += once
        backward += twice + columns * depth * count * num_bytes / device.bandwidth
    return Pass(forward, backward)


def _rotated(config: Config) -> float:
    """Channels of queries and keys, twice if they have norms, too."""
    keys = config.num_heads if config.multi_latent_attention else config.num_query_groups
    return (config.num_heads + keys) * config.kv_channels * (2 if config.qk_norm else 1)


def _core(job: Job, device: Device, constants: TimeConstants) -> Pass:
    """Scores and weighted values: every query of the rank with every key of its sequence, or document."""
    config, engine = job.config, job.engine
    batch, queries = config.mbsz * config.num_heads / config.tp, config.seq_len / config.cp
    keys, channels = attended_tokens(config), float(config.kv_channels)
    if not job.fused_attention:
        scores = device.linear(queries, keys, channels, batch) + device.linear(queries, channels, keys, batch)
        return scores + device.moved(batch * queries * keys, _SCORE_BYTES)
    if config.multi_latent_attention and device.is_recent:
        channels = (channels + config.v_head_dim) / 2
    once = 4 * batch * queries * keys * channels / device.attention_flops
    softmax = 0.0  # computed again in the backward pass
    if rate := device.hardware.exponentials_per_second:
        softmax = _FLASH_FORWARD * batch * queries * keys / rate * constants.exponentials
    if engine.window:
        share = (1 + min(1.0, 2 * engine.window / keys)) / 2
        once, softmax = once * share, softmax * share
    if engine.fp8_attention:
        once *= constants.fp8_attention
    return Pass(once * _FLASH_FORWARD + softmax, once * _FLASH_BACKWARD + softmax)
