"""Matrix products of a job, and the implementations of the experts and of the loss. Does not need torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import NamedTuple, TypeVar

from moe_exp.config import Config, setting_error
from moe_exp.planner.hardware import Hardware

T = TypeVar("T")
# Expert backends whose memory `activations.py` knows; a new one has to be checked there.
PRICED_BACKENDS = ("auto", "triton", "loop", "torch", "grouped_gemm", "te", "megablocks")


def priced(config: Config, name: str, costs: Mapping[str, T]) -> T:
    """Returns the entry of `costs` for the value of setting `name`; ValueError if there is no such entry."""
    value = getattr(config, name)
    if value not in costs:
        raise setting_error(name, value, "the planner does not support this value", f"use {', '.join(costs)}")
    return costs[value]


def fp8_parts(config: Config) -> tuple[bool, bool]:
    """Returns whether the routed experts compute in FP8, and whether all other linear layers do.

    With EXPERT_BACKEND=triton, only the experts use FP8. Other backends need Transformer Engine for FP8, so
    IMPL=auto is treated like IMPL=te. Output layer, router and embedding remain in bf16.
    """
    if config.fp8 == "none":
        return False, False
    if config.is_fp8_by_kernels:
        return True, False
    return config.use_moe, config.impl != "local"


def fp8_kept(config: Config) -> tuple[bool, bool]:
    """Returns whether (experts, other layers) save FP8 tensors for backward; Triton experts save bf16."""
    return (False, False) if config.is_fp8_by_kernels else fp8_parts(config)


def planned_backend(config: Config, hardware: Hardware) -> str:
    """Returns EXPERT_BACKEND; if it is `auto`, returns the choice of `grouped_gemm.choose_backend`. The
    result `auto` means any GPU backend except triton: all of these backends need the same memory.
    """
    backend = priced(config, "expert_backend", {name: name for name in PRICED_BACKENDS})
    if backend != "auto":
        return backend
    if hardware.is_cpu:
        return "loop"
    # Assumes that Triton is installed: a plan is usually made on another machine.
    return "triton" if hardware.runs_kernels and config.dtype != "fp32" else "auto"


def planned_loss(config: Config, hardware: Hardware) -> str:
    """Returns CROSS_ENTROPY, or for CROSS_ENTROPY=auto the choice of `cross_entropy.choose_cross_entropy`."""
    by_device = "triton" if hardware.runs_kernels else "megatron"
    kinds = {kind: kind for kind in ("megatron", "triton", "linear")}
    return priced(config, "cross_entropy", kinds | {"auto": by_device})


def counted_as(config: Config, hardware: Hardware) -> dict[str, str]:
    """Returns notes that say which implementations of the experts and the loss a plan assumes."""
    words = {}
    if config.use_moe:
        backend = planned_backend(config, hardware)
        said = f"{backend}, set by EXPERT_BACKEND"
        if config.expert_backend == "auto":
            said = f"{backend}, the choice of EXPERT_BACKEND=auto on this device"
        if backend == "auto":
            needs = "the Triton kernels require compute capability 8.0 or newer"
            why = "DTYPE=fp32" if config.dtype == "fp32" else needs
            said = f"separate grouped GEMMs, not triton: {why}"
        words["experts"] = f"{said} (affects the memory; the predicted time is the same for all backends)"
    loss = planned_loss(config, hardware)
    if loss != "megatron":
        kept = "memory of its kernel" if loss == "triton" else "memory of the output layer's gradients"
        timed = "time of a fused kernel" if hardware.is_recent else "time of Megatron's loss"
        words["cross entropy"] = f"{loss}: {kept}, {timed}"
    if config.fp8 != "none":
        what = " and ".join(compress(("experts", "other layers"), fp8_parts(config)))
        words["FP8"] = f"{what}: planned with FP8 peak and casts; the memory is not verified by measurements"
    return words


class Shape(NamedTuple):
    """Shape of `number` products [rows, depth] x [depth, columns]."""

    rows: float
    columns: float
    depth: float
    number: float = 1
    is_fp8: bool = False


def products(config: Config, *, sequence_parallel: bool) -> dict[str, list[Shape]]:
    """Returns the matrix products of each part (`mlp`, `experts`, `output`...), without attention scores."""
    tokens, hidden = num_tokens(config), config.hidden_size
    experts_in_fp8, others_in_fp8 = fp8_parts(config)
    ways, tp = 2 if config.gated else 1, config.tp
    heads, width = config.num_heads / tp, config.num_heads * config.kv_channels / tp
    values = heads * config.v_head_dim if config.multi_latent_attention else width
    before = projections(config, width, heads, tp=tp)

    def dense(shapes: Iterable[tuple[float, float]]) -> list[Shape]:
        return [Shape(tokens, columns, depth, 1, others_in_fp8) for columns, depth in shapes]

    def mlp(ffn: float) -> list[Shape]:
        return dense([(ways * ffn, hidden), (hidden, ffn)] if ffn else [])

    found = {
        "projections": dense([(hidden, values), *(one for one in before if one[1] == hidden)]),
        "up_projections": dense(one for one in before if one[1] != hidden),  # arXiv:2405.04434
        "mlp": mlp(config.ffn_hidden_size / tp),
        "shared_expert": mlp(config.shared_expert_size / tp if config.use_moe else 0),
        "router": [],
        "latent_projections": [],
        "experts": [],
        "output": [Shape(tokens, config.padded_vocab_size / tp, hidden)],
    }
    if config.use_moe:
        local, ffn = config.num_experts / config.ep, config.expert_ffn_size / config.etp
        each = num_slots(config, sequence_parallel) / local
        rows, width = shared_rows(config, sequence_parallel), config.expert_hidden_size
        found["router"] = [Shape(rows, config.num_router_outputs, hidden)]
        if config.moe_latent_size:
            down_and_up = ((width, hidden), (hidden, width))
            found["latent_projections"] = [Shape(rows, *size, 1, others_in_fp8) for size in down_and_up]
        sizes = ((ways * ffn, width), (width, ffn))
        found["experts"] = [Shape(each, columns, depth, local, experts_in_fp8) for columns, depth in sizes]
    return found


def num_tokens(config: Config) -> float:
    """Returns how many tokens of a micro-batch are on one context-parallel rank."""
    return config.mbsz * config.seq_len / config.cp


def hidden_bytes(config: Config) -> float:
    """Returns the size in bytes of a micro-batch's hidden states on one context-parallel rank."""
    return num_tokens(config) * config.hidden_size * (4 if config.dtype == "fp32" else 2)


def shared_rows(config: Config, sequence_parallel: bool) -> float:
    """Returns how many of a micro-batch's tokens a rank processes outside tensor-parallel products."""
    return num_tokens(config) / (config.tp if sequence_parallel else 1)


def num_slots(config: Config, sequence_parallel: bool) -> float:
    """Returns a rank's slots (token-expert pairs) at even load, including the padding of PAD_TO_CAPACITY."""
    factor, rows = config.expert_capacity_factor, shared_rows(config, sequence_parallel)
    if factor is not None and config.pad_to_capacity:
        return padded_slots(config, rows)
    return rows * config.experts_per_token * config.etp * min(factor or 1.0, 1.0)


def projections(config: Config, query: float, heads: float, *, tp: int) -> list[tuple[float, float]]:
    """(Columns, depth) of attention's input projections on a rank with `query` channels and `heads` heads."""
    hidden, latent, rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels / tp, hidden)]
    up = heads * (config.qk_head_dim + config.v_head_dim)
    queries = [(rank, hidden), (query, rank)] if rank else [(query, hidden)]
    return [(latent + config.qk_pos_emb_head_dim, hidden), (up, latent), *queries]


def padded_slots(config: Config, tokens: float) -> float:
    """Returns the rows that a rank's experts compute with PAD_TO_CAPACITY, if each rank has `tokens` tokens.

    Each rank pads each expert's rows to the capacity for the rank's tokens (layers/moe_layer.py). With TP or
    CP, a rank's slots for an expert may exceed this capacity. The rank then sends more rows; these extra rows
    are not counted here.
    """
    share = tokens * config.topk / config.num_experts
    capacity = max(config.min_capacity, math.ceil(share * (config.expert_capacity_factor or 1.0)))
    return config.num_experts * config.etp * min(capacity, tokens)
