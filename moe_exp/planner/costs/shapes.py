"""Shapes of the matrix products of a layer, and rows of a micro-batch on a rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import fp8_parts

if TYPE_CHECKING:
    from moe_exp.planner.costs.job import Job


class Shape(NamedTuple):
    """`number` products [rows, depth] x [depth, columns]."""

    rows: float
    columns: float
    depth: float
    number: float = 1
    is_fp8: bool = False


def products(job: Job) -> dict[str, list[Shape]]:
    """Products of a layer of every kind and of the output layer, by part; scores are not among them."""
    config, tokens, hidden = job.config, num_tokens(job.config), job.config.hidden_size
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
        "experts": [],
        "output": [Shape(tokens, config.padded_vocab_size / tp, hidden)],
    }
    if config.use_moe:
        local, ffn = config.num_experts / config.ep, config.expert_ffn_size / config.etp
        each = num_slots(job, tokens) / local
        found["router"] = [Shape(shared_rows(job, tokens), config.num_experts, hidden)]
        first, second = (ways * ffn, hidden), (hidden, ffn)
        found["experts"] = [
            Shape(each, *first, local, experts_in_fp8),
            Shape(each, *second, local, experts_in_fp8),
        ]
    return found


def num_tokens(config: Config) -> float:
    """Tokens of a micro-batch on a context parallel rank."""
    return config.mbsz * config.seq_len / config.cp


def shared_rows(job: Job, tokens: float) -> float:
    """Rows of a rank between the products of a layer, of `tokens` of its micro-batch."""
    return tokens / job.config.tp if job.sequence_parallel else tokens


def num_slots(job: Job, tokens: float) -> float:
    """Slots (a token's use of an expert) of a rank's experts, all used alike or padded to capacity."""
    config = job.config
    factor, rows = config.expert_capacity_factor, shared_rows(job, tokens)
    if factor is not None and config.pad_to_capacity:
        return padded_slots(config, rows)
    return rows * config.topk * config.etp * min(factor or 1.0, 1.0)


def projections(config: Config, query: float, heads: float, *, tp: int) -> list[tuple[float, float]]:
    """(columns, depth) of the products before the scores, of a rank's query channels and heads."""
    hidden, latent, rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels / tp, hidden)]
    up = heads * (config.qk_head_dim + config.v_head_dim)
    queries = [(rank, hidden), (query, rank)] if rank else [(query, hidden)]
    return [(latent + config.qk_pos_emb_head_dim, hidden), (up, latent), *queries]


def padded_slots(config: Config, tokens: float) -> float:
    """Rows that a rank's experts compute with PAD_TO_CAPACITY, when each rank has `tokens` of the
    micro-batch.

    Every rank gives every expert the capacity of its tokens (layers/moe_layer.py). With TP or CP it gives
    more if a rank keeps more than its share, which is not counted here.
    """
    share = tokens * config.topk / config.num_experts
    capacity = max(config.min_capacity, math.ceil(share * (config.expert_capacity_factor or 1.0)))
    return config.num_experts * config.etp * min(capacity, tokens)
