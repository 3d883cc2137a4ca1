"""Floating-point operations of an iteration, as Megatron-LM counts them, so that TFLOP/s compare with its logs."""

from __future__ import annotations

from moe_exp.config import Config


def flops_per_iteration(config: Config, batch_size: int | None = None) -> int:
    """Floating-point operations of one iteration, forward and backward, over all ranks.

    Megatron-LM's `num_floating_point_operations` of late 2024, term by term, with B samples of S tokens, L layers, width h,
    n heads of size d in g groups, and V rows of vocabulary:

        12*B*S*L*h^2 * ((1 + g/n + S/h) * n*d/h + topk*ffn/h * (3/2 if gated) + V/(2*L*h))

    Two operations a multiply-add, and a backward pass of twice the forward one: 6 for every weight that a token meets.
    Attention counts all S^2 scores though half of them are masked; norms, softmax, router and recompute count nothing. Ours
    differs where Megatron's one formula takes every layer alike: first dense layers count as dense ones.

    Args:
        config: the settings.
        batch_size: samples in the iteration (batch ramp-up); GBSZ by default.
    """
    tokens = (config.gbsz if batch_size is None else batch_size) * config.seq_len
    num_dense = config.num_layers - sum(config.moe_layers)
    multiply_adds = (
        config.num_layers * _attention(config)
        + num_dense * _mlp(config, config.ffn_hidden_size)
        + (config.num_layers - num_dense) * _mlp(config, config.topk * config.expert_ffn_size + config.shared_expert_size)
        + config.hidden_size * config.padded_vocab_size
    )
    return 6 * tokens * multiply_adds


def _attention(config: Config) -> int:
    """Multiply-adds per token: the projections, then scores and weighted values over the whole sequence."""
    if config.multi_latent_attention:
        return _latent_attention(config)
    query, key = config.num_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    return 2 * config.hidden_size * (query + key) + 2 * config.seq_len * query


def _latent_attention(config: Config) -> int:
    """The same for multi-latent attention, by Megatron-LM's terms of 2025, but for the norms and half of the scores that it leaves out."""
    hidden, latent, value = config.hidden_size, config.kv_lora_rank, config.num_heads * config.v_head_dim
    query = config.num_heads * config.kv_channels
    projected = config.q_lora_rank * (hidden + query) if config.q_lora_rank else hidden * query
    projected += hidden * (latent + config.qk_pos_emb_head_dim) + latent * (config.num_heads * config.qk_head_dim + value)
    return projected + value * hidden + config.seq_len * (query + value)


def _mlp(config: Config, ffn: int) -> int:
    return (3 if config.gated else 2) * config.hidden_size * ffn
