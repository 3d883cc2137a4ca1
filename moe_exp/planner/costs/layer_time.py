"""Seconds of one layer, and of the output layer, on one rank for one micro-batch. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_exp.config import Config, problem
from moe_exp.planner.costs.activations import padded_slots
from moe_exp.planner.costs.code_paths import fp8_parts
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.flops import attended_tokens
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.products import Device, Pass

# Bytes that a training step moves beside the products, per element of 2 bytes: (forward, backward).
_SCORE_BYTES = (9, 11)  # unfused attention: scale, mask and softmax in one kernel, dropout and its mask
_RESIDUAL_BYTES = (24, 36)  # per token and hidden channel: two norms, two residuals, biases, dropout
_ACTIVATION_BYTES = (6, 10)  # per token and channel of an MLP
_SLOT_BYTES = (12, 16)  # per slot and hidden channel of an MoE layer: rows gathered for the experts, and back
_LOGIT_BYTES = (12, 18)  # per token and row of the vocabulary: fp32 logits, maximum, exponentials, gradient
# Bytes per weight and micro-batch for adding a gradient to those before it.
_ACCUMULATION_BYTES = {"fp16": 8, "bf16": 8, "fp32": 12, "bf16_fp32grad": 16}
# FP8: input, weight and gradient of the output are read in bf16 and written twice, by rows and by columns.
_CAST_BYTES = 4
_FUSED_ACCUMULATION_BYTES = 8  # fp32 sums, added to by the product itself
# Flash attention leaves out the masked half, computes scores again for gradients, and is slower a FLOP.
_FLASH_FORWARD, _FLASH_BACKWARD = 0.5 * 1.3, 0.5 * 1.3 * 2.5
# share of layer_seconds for each expert of a loop: 0.1 ms, from reference runs with and without grouped GEMM
_LOOPED_EXPERT = 0.125


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro-batch, without collectives.

    Attributes:
        dense, moe: a layer without experts, and one with them.
        moe_part: the MoE part of it alone, for recomputation.
        activation: the experts' activation alone.
        output: output layer and loss.
    """

    dense: Pass
    moe: Pass
    moe_part: Pass
    activation: Pass
    output: Pass


def layer_times(job: Job, device: Device, constants: TimeConstants) -> LayerTimes:
    """Times of all kinds of layers of a job."""
    config, tokens = job.config, num_tokens(job.config)
    if any(fp8_parts(config)) and not device.fp8_speedup:
        rule = "the device has no FP8 peak (dense_flops of its profile)"
        raise ValueError(problem("fp8", config.fp8, rule, "choose another --gpu, or set FP8=none"))
    start = Pass(constants.layer_seconds, 2 * constants.layer_seconds)
    common = start + _attention(job, device, tokens)
    common += device.moved(_shared_rows(job, tokens) * config.hidden_size, _RESIDUAL_BYTES)
    moe_part = activation = Pass(0, 0)
    if config.use_moe:
        activated = _slots(job, tokens) * config.expert_ffn_size / config.etp
        activation = device.moved(activated, _ACTIVATION_BYTES)
        moe_part = activation + _moe(job, device, tokens, constants)
    dense = common + _mlp(job, device, tokens, config.ffn_hidden_size / config.tp)
    output = _linear(job, device, tokens, config.padded_vocab_size / config.tp, config.hidden_size)
    output += device.moved(tokens * config.padded_vocab_size / config.tp, _LOGIT_BYTES)
    return LayerTimes(dense, common + moe_part, moe_part, activation, output)


def num_tokens(config: Config) -> float:
    """Tokens of a micro-batch on a context parallel rank."""
    return config.mbsz * config.seq_len / config.cp


def _shared_rows(job: Job, tokens: float) -> float:
    return tokens / job.config.tp if job.sequence_parallel else tokens


def _slots(job: Job, tokens: float) -> float:
    """Slots (a token's use of an expert) of a rank's experts, all used alike or padded to capacity."""
    config = job.config
    factor, rows = config.expert_capacity_factor, _shared_rows(job, tokens)
    if factor is not None and config.pad_to_capacity:
        return padded_slots(config, rows)
    return rows * config.topk * config.etp * min(factor or 1.0, 1.0)


def _linear(
    job: Job,
    device: Device,
    rows: float,
    columns: float,
    depth: float,
    count: float = 1,
    *,
    fp8: bool = False,
) -> Pass:
    """A product [rows, depth] x [depth, columns], its gradients, and the weight's gradient added up."""
    fused = job.sharding == "distributed" and not device.is_cpu
    num_bytes = _FUSED_ACCUMULATION_BYTES if fused else _ACCUMULATION_BYTES[job.precision]
    added = Pass(0, columns * depth * count * num_bytes / device.bandwidth)
    products = device.linear(rows, columns, depth, count)
    if fp8:
        products = Pass(products.forward / device.fp8_speedup, products.backward / device.fp8_speedup)
        added += device.moved((rows + columns) * depth * count, (_CAST_BYTES, 0))
        added += device.moved(rows * columns * count, (0, _CAST_BYTES))
    return products + added


def _attention(job: Job, device: Device, tokens: float) -> Pass:
    config = job.config
    heads, width = config.num_heads / config.tp, config.num_heads * config.kv_channels / config.tp
    values = heads * config.v_head_dim if config.multi_latent_attention else width
    fp8 = fp8_parts(config)[1]
    total = _linear(job, device, tokens, config.hidden_size, values, fp8=fp8)
    for columns, depth in projections(config, width, heads, tp=config.tp):
        total += _linear(job, device, tokens, columns, depth, fp8=fp8)
    # Every query of the rank with every key of its sequence, or of its document.
    batch, queries, keys = config.mbsz * heads, config.seq_len / config.cp, attended_tokens(config)
    channels = config.kv_channels
    if not job.fused_attention:
        scores = device.linear(queries, keys, channels, batch) + device.linear(queries, channels, keys, batch)
        return total + scores + device.moved(batch * queries * keys, _SCORE_BYTES)
    once = 4 * batch * queries * keys * channels / device.flops
    return total + Pass(once * _FLASH_FORWARD, once * _FLASH_BACKWARD)


def projections(config: Config, query: float, heads: float, *, tp: int) -> list[tuple[float, float]]:
    """(columns, depth) of the products before the scores, of a rank's query channels and heads."""
    hidden, latent, rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels / tp, hidden)]
    up = heads * (config.qk_head_dim + config.v_head_dim)
    queries = [(rank, hidden), (query, rank)] if rank else [(query, hidden)]
    return [(latent + config.qk_pos_emb_head_dim, hidden), (up, latent), *queries]


def _mlp(job: Job, device: Device, tokens: float, ffn: float) -> Pass:
    hidden, ways = job.config.hidden_size, 2 if job.config.gated else 1
    fp8 = fp8_parts(job.config)[1]
    products = _linear(job, device, tokens, ways * ffn, hidden, fp8=fp8)
    products += _linear(job, device, tokens, hidden, ffn, fp8=fp8)
    return products + device.moved(tokens * ffn * ways, _ACTIVATION_BYTES)


def _moe(job: Job, device: Device, tokens: float, constants: TimeConstants) -> Pass:
    """Router, rows to and from the experts, their products, shared expert."""
    config, ways = job.config, 2 if job.config.gated else 1
    rows, slots, local = _shared_rows(job, tokens), _slots(job, tokens), config.num_experts / config.ep
    ffn, hidden = config.expert_ffn_size / config.etp, config.hidden_size
    total = device.linear(rows, config.num_experts, hidden) + device.moved(slots * hidden, _SLOT_BYTES)
    fp8 = fp8_parts(config)[0]
    first = _linear(job, device, slots / local, ways * ffn, hidden, local, fp8=fp8)
    total += first + _linear(job, device, slots / local, hidden, ffn, local, fp8=fp8)
    if config.shared_expert_size:
        total += _mlp(job, device, tokens, config.shared_expert_size / config.tp)
    looped = _LOOPED_EXPERT * local if config.expert_backend == "loop" else 0
    starts = constants.layer_seconds * (1 + looped)
    return total + Pass(starts, 2 * starts)
