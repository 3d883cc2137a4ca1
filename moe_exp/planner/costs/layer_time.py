"""Time of a layer and of the output layer, for one micro-batch on one rank. Also places the components of
these layers on the device's roofline (Williams et al. 2009). Does not import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.config import setting_error
from moe_exp.config.choices import LOSS_CHUNK_TOKENS
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.device import Device, Pass, exchange_seconds, skew_of
from moe_exp.planner.costs.flops import attended_tokens
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.products import Shape, fp8_parts, num_slots, num_tokens, planned_loss, shared_rows
from moe_exp.planner.hardware import Hardware

# Bytes moved outside the products, (forward, backward), for 2-byte elements.
_SCORE_BYTES = (9, 11)  # unfused attention: scale, mask and softmax in one kernel, dropout and its mask
_RESIDUAL_BYTES = (24, 36)  # per token and hidden channel: two norms, two residuals, biases, dropout
_HEAD_BYTES = (4, 6)  # per channel of queries and keys: rotation, or a norm
_ACTIVATION_BYTES = (6, 10)  # per token and channel of an MLP
_SLOT_BYTES = (12, 16)  # per slot and channel of an expert's input: gathering rows for the experts, and back
_LOGIT_BYTES = (12, 18)  # per token and vocabulary entry: fp32 logits, maximum, exponentials, gradient
_FUSED_LOGIT_BYTES = (4, 6)  # the same for one kernel, which overwrites the logits by their gradient
# Bytes per weight and micro-batch to accumulate a gradient.
_ACCUMULATION_BYTES = {"fp16": 8, "bf16": 8, "fp32": 12, "bf16_fp32grad": 16}
# Flash attention skips the masked half and recomputes the scores for gradients: 5 instead of 4 products.
_FLASH_FORWARD, _FLASH_BACKWARD = 0.5, 0.5 * 2.5
_WINDOW_TILE = 128  # queries of a tile in FlexAttention and flash-attn; about those of our blocks on CPUs
# Share of a layer part's host time that a CUDA graph of each scope saves, estimated from kernel counts.
_GRAPHED = {"attn": 1.0, "mlp": 1.0, "moe_router": 0.3, "moe_preprocess": 0.2}
_ATTENTION_SHARE = 0.7  # of host_dense, estimated from kernel counts
_DENSE_WEIGHTS = 6  # in a layer without experts: norms, projections, router or MLP; an expert has two


@dataclass(frozen=True)
class LayerTimes:
    """Seconds for a micro-batch, excluding collectives."""

    parts: dict[str, Pass]  # ATTENTION, MLP and MOE of a layer, and `output`: the output layer with the loss
    # of a layer without experts, and with
    starts: tuple[float, float]  # kernel launches, on devices where host time is not modeled
    host: tuple[float, float]  # host time

    def layer(self, is_moe: bool) -> Pass:
        starts = self.starts[is_moe]
        of = [self.parts[name] for name in ATTENTION + (MOE if is_moe else MLP)]
        return Pass(starts + sum(one[0] for one in of), 2 * starts + sum(one[1] for one in of))

    def repeated(self, is_moe: bool) -> dict[str, float]:
        """Seconds of recomputation in backward. Keys: values of RECOMPUTE, modules of `Engine.recompute`."""
        forward = {name: one.forward for name, one in self.parts.items()}
        moe = sum(forward[name] for name in MOE) + self.starts[True] - self.starts[False]
        norms = forward["norms"] * 0.4  # their share of the residual bytes
        first = 2 / 3  # share of the experts' products in the first projection, with a gate
        return {
            "none": 0.0,
            "moe_act": forward["activation"] if is_moe else 0.0,
            "selective": moe if is_moe else 0.0,  # dense layers of an MoE model are not recomputed
            "full": self.layer(is_moe).forward,
            "norm": norms,
            "layernorm": norms,
            "mla_up_proj": forward["up_projections"],
            "core_attn": forward["core"],
            "mlp": 0.0 if is_moe else forward["mlp"],
            "router": forward["router"] if is_moe else 0.0,
            "shared_expert": forward["shared_expert"] if is_moe else 0.0,
            "experts": forward["experts"] * first + forward["activation"] if is_moe else 0.0,
        }


ATTENTION = ("norms", "projections", "up_projections", "core")
MLP = ("mlp",)
MOE = ("router", "latent_projections", "rows", "experts", "activation", "shared_expert")


def layer_times(job: PlannedJob, device: Device) -> LayerTimes:
    """Returns the seconds per component of a layer. Raises a ValueError if the device lacks the precision."""
    config, constants, tokens, nothing = job.config, device.constants, num_tokens(job.config), Pass(0, 0)
    rule = "the device has no {} peak throughput (dense_flops in its profile)"
    if any(fp8_parts(config)) and not device.fp8_speedup:
        raise setting_error("fp8", config.fp8, rule.format("FP8"), "choose another --gpu, or set FP8=none")
    if job.engine.is_nvfp4 and not device.fp4_speedup:
        raise setting_error("precision", "nvfp4", rule.format("FP4"), "choose another device or precision")
    elementwise = constants.elementwise if device.is_recent else 1.0
    parts = {name: _linears(job, device, shapes) for name, shapes in job.products.items()}
    parts["core"] = _core(job, device)
    shared = shared_rows(config, job.sequence_parallel) * config.hidden_size
    parts["norms"] = device.moved(shared, _RESIDUAL_BYTES) * elementwise
    if device.is_recent:
        keys = config.num_heads if config.multi_latent_attention else config.num_query_groups
        # Channels of queries and keys count twice if they also have norms.
        rotated = (config.num_heads + keys) * config.kv_channels * (2 if config.qk_norm else 1)
        parts["norms"] += device.moved(tokens * rotated / config.tp, _HEAD_BYTES) * elementwise
        elementwise *= constants.clamped_swiglu if job.engine.clamped_swiglu else 1.0
    ways = 2 if config.gated else 1

    def activated(elements: float) -> Pass:
        return device.moved(elements, _ACTIVATION_BYTES) * elementwise

    parts["mlp"] += activated(tokens * ways * config.ffn_hidden_size / config.tp)
    parts |= {"rows": nothing, "activation": nothing}
    if config.use_moe:
        slots = num_slots(config, job.sequence_parallel)
        parts["activation"] = activated(slots * config.expert_ffn_size / config.etp)
        parts["shared_expert"] += activated(tokens * ways * config.shared_expert_size / config.tp)
        parts["rows"] = device.moved(slots * config.expert_hidden_size, _SLOT_BYTES)
        if device.is_recent:
            # Megatron's all-to-all also sorts the rows by local expert, both ways: half as much again.
            is_sorted = config.ep > 1 and config.dispatcher in ("auto", "alltoall")
            parts["rows"] *= constants.slot_bytes + (0.5 if is_sorted else 0.0)
            parts["experts"] *= 1 / constants.grouped_matrix
            if job.engine.static_rows:
                parts |= {name: parts[name] * constants.static_rows for name in ("rows", "activation")}
        skew = skew_of(job, device.hardware, constants)
        parts |= {name: parts[name] * skew for name in ("rows", "experts", "activation")}
    loss = planned_loss(config, device.hardware)
    logit_bytes = _FUSED_LOGIT_BYTES if device.is_recent and loss != "megatron" else _LOGIT_BYTES
    words = config.padded_vocab_size / config.tp
    parts["output"] += device.moved(tokens * words, logit_bytes)
    if loss == "linear":  # adds the products of chunks in fp32, and in backward their sum to main_grad
        sums = (16 * math.ceil(tokens / LOSS_CHUNK_TOKENS), 12)
        parts["output"] += device.moved(words * config.hidden_size, sums)
    starts = 0.0 if device.is_recent else constants.layer_seconds
    # Each expert of a loop takes 0.1 ms, according to reference runs with and without grouped GEMM.
    looped = 0.125 * config.num_experts / config.ep if config.expert_backend == "loop" else 0
    return LayerTimes(parts, (starts, starts * (2 + looped)), _host_seconds(job, device))


def _host_seconds(job: PlannedJob, device: Device) -> tuple[float, float]:
    """Returns the host seconds for the kernel launches of a dense layer and of an MoE layer."""
    # On older devices, `layer_seconds` covers kernel launches.
    if not device.is_recent:
        return 0.0, 0.0
    config, constants, graphs = job.config, device.constants, job.engine.graphs

    def started(seconds: float, *scopes: str) -> float:
        captured = sum(_GRAPHED[scope] for scope in scopes if scope in graphs) if "all" not in graphs else 1.0
        return seconds * (1 - captured * (1 - constants.host_graph))

    # Casts to FP8 and their scales are separate kernels.
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


def _linears(job: PlannedJob, device: Device, shapes: Sequence[Shape]) -> Pass:
    """Returns the time of matrix products, their gradients, and the accumulation of weight gradients."""
    num_bytes: float = _ACCUMULATION_BYTES[job.precision]
    if job.sharding == "distributed" and not device.is_cpu:  # fused: read and write once
        num_bytes = 2 * job.engine.gradient_bytes
    # FP8 casts read input, weight and output gradient in bf16 and write them twice, by rows and by columns.
    # Current scaling first reads the whole tensor to find its largest value.
    cast_bytes = 6 if device.is_recent and job.config.fp8_recipe == "tensorwise" else 4
    forward = backward = 0.0
    for rows, columns, depth, count, is_fp8 in shapes:
        once, twice = device.linear(rows, columns, depth, count)
        if is_fp8:
            speedup = device.fp4_speedup if job.engine.is_nvfp4 else device.fp8_speedup
            # weights gathered in FP8 need no cast
            cast_weights = 0 if job.engine.gathered_bytes == 1 else columns
            casts = device.moved((rows + cast_weights) * depth * count, (cast_bytes, 0)).forward
            forward += casts * device.cast_share
            backward += device.moved(rows * columns * count, (0, cast_bytes)).backward * device.cast_share
            once, twice = once / speedup, twice / speedup
        forward += once
        backward += twice + columns * depth * count * num_bytes / device.bandwidth
    return Pass(forward, backward)


def _core(job: PlannedJob, device: Device) -> Pass:
    """Returns the time of the products Q K^T and P V of attention for all queries of a rank."""
    config, engine, constants = job.config, job.engine, device.constants
    batch, queries = config.mbsz * config.num_heads / config.tp, config.seq_len / config.cp
    keys, channels = attended_tokens(config, tile=_WINDOW_TILE), float(config.kv_channels)
    if not job.fused_attention:
        scores = device.linear(queries, keys, channels, batch) + device.linear(queries, channels, keys, batch)
        return scores + device.moved(batch * queries * keys, _SCORE_BYTES)
    if config.multi_latent_attention and device.is_recent:
        channels = (channels + config.v_head_dim) / 2
    once = 4 * batch * queries * keys * channels / device.attention_flops
    softmax = 0.0  # the same in the backward pass, which recomputes it
    if rate := device.hardware.exponentials_per_second:
        softmax = _FLASH_FORWARD * batch * queries * keys / rate * constants.exponentials
    if engine.fp8_attention:
        once *= constants.fp8_attention
    return Pass(once * _FLASH_FORWARD + softmax, once * _FLASH_BACKWARD + softmax)


@dataclass(frozen=True)
class Part:
    """A rank's forward plus backward cost per micro-batch, for a layer's component or the output layer."""

    name: str
    flops: float  # a multiply-add counts as two
    num_bytes: float  # minimum traffic of its products; 0 without products
    seconds: float
    bound: str  # compute, memory, links or host
    peak: float  # FLOP/s of the device in the products' type

    @property
    def intensity(self) -> float:
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def peak_share(self) -> float:
        return self.flops / self.seconds / self.peak if self.seconds else 0.0


def roofline(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> list[Part]:
    """Returns the components of a layer (an MoE layer if the model has one) and of the output layer."""
    config = job.config
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    times = layer_times(job, device)
    without = MLP if config.use_moe else MOE
    found = []
    for name, one in times.parts.items():
        flops, num_bytes, peak = 0.0, 0.0, hardware.dense_flops[config.dtype]
        for rows, columns, depth, number, is_fp8 in job.products.get(name, []):
            width = 1 if is_fp8 else device.num_bytes
            peak = hardware.dense_flops.get("fp8", peak) if is_fp8 else peak
            flops += 6 * rows * columns * depth * number
            num_bytes += 3 * width * number * (rows * depth + depth * columns + rows * columns)
        # Attention's products are not in `job.products`, as flash attention never writes the scores.
        if name == "core":
            queries = config.mbsz * config.seq_len / config.cp * config.num_heads / config.tp
            keys = config.mbsz * config.seq_len * config.num_query_groups / config.tp
            channels = float(config.kv_channels)
            if config.multi_latent_attention:  # as in `_core`
                channels = (channels + config.v_head_dim) / 2
                keys = queries * config.cp
            flops = 3.5 * 4 * queries * attended_tokens(config) / 2 * channels
            # queries, result, keys and values, read or written forward and backward
            num_bytes = 3 * device.num_bytes * channels * (2 * queries + 2 * keys)
        is_dense = num_bytes and flops / num_bytes > peak / hardware.memory_bytes_per_second
        bound = "compute" if is_dense else "memory"
        if name not in without and one.forward:
            found.append(Part(name, flops, num_bytes, one.forward + one.backward, bound, peak))
    if config.use_moe and config.ep * config.etp > 1:
        seconds = 4 * exchange_seconds(job, hardware, constants) * skew_of(job, hardware, constants)
        found.append(Part("exchange", 0.0, 0.0, seconds, "links", found[0].peak))
    if host := times.host[config.use_moe]:
        found.append(Part("host, concurrent", 0.0, 0.0, host, "host", found[0].peak))
    return found
