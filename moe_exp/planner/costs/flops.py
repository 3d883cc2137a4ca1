"""Model FLOPs of an iteration."""

from moe_exp.config import Config


def flops_per_iteration(config: Config, batch_size: int | None = None, seq_len: int | None = None) -> int:
    """Returns the model FLOPs of an iteration, forward and backward, over all ranks, for TFLOP/s and MFU.

    The formula of Megatron-LM's `num_floating_point_operations` since 2025, with B samples of S tokens, L
    layers, width h, n heads of size d in g groups, and vocabulary size V:

        12*B*S*L*h^2 * ((1 + g/n + S/(2*h)) * n*d/h + topk*ffn/(2*h) * (3 if gated, else 2) + V/(2*L*h))

    A multiply-add is two operations and the backward pass takes twice the forward pass: 6 FLOPs per weight
    that a token uses. Of the S^2 scores, only the half below the causal mask counts; until late 2024,
    Megatron-LM counted all of them (S/h instead of S/(2*h)). With DOCUMENT_MASK, S in the bracket is
    DOCUMENT_TOKENS. With MOE_LATENT_SIZE=l, topk*ffn is multiplied by l/h, and the two projections of an MoE
    layer add 4*h*l in forward. Norms, softmax, router and recompute are not counted; Megatron-LM counts the
    norms of latent attention.

    Args:
        batch_size: samples of SEQ_LEN in the iteration (default: GBSZ).
        seq_len: length of the actual samples (DATA_STAGES), each counted as several of SEQ_LEN.
    """
    tokens = (config.gbsz if batch_size is None else batch_size) * config.seq_len
    if seq_len not in (None, config.seq_len):
        config = config.model_copy(update={"seq_len": seq_len})
        tokens = tokens // config.seq_len * config.seq_len
    hidden, heads = config.hidden_size, config.num_heads

    def mlp(ffn: int, width: int) -> int:
        return 2 * (3 if config.gated else 2) * width * ffn

    # a token's chosen experts, the shared expert, and the projections to and from the latent size
    routed = round(config.experts_per_token * config.expert_ffn_size)
    moe = mlp(routed, config.expert_hidden_size) + mlp(config.shared_expert_size, hidden)
    moe += 4 * hidden * config.moe_latent_size
    query, value_channels = heads * config.kv_channels, config.kv_channels
    if config.multi_latent_attention:
        latent, value_channels = config.kv_lora_rank, config.v_head_dim
        value = heads * value_channels
        projected = config.q_lora_rank * (hidden + query) if config.q_lora_rank else hidden * query
        projected += hidden * (latent + config.qk_pos_emb_head_dim)
        projected += latent * (heads * config.qk_head_dim + value) + value * hidden
    else:
        projected = 2 * hidden * (query + config.num_query_groups * config.kv_channels)
    attention = 2 * projected + attended_tokens(config) * heads * (config.kv_channels + value_channels)
    num_moe = sum(config.moe_layers)
    layers = config.num_layers * attention + num_moe * moe
    layers += (config.num_layers - num_moe) * mlp(config.ffn_hidden_size, hidden)
    # 3 times: the backward pass computes the gradients of both inputs and weights
    return 3 * tokens * (layers + 2 * hidden * config.padded_vocab_size)


def attended_tokens(config: Config) -> int:
    """Returns keys per query before causal masking: sample length, or document length with DOCUMENT_MASK."""
    in_document = config.document_mask and config.document_tokens
    return min(config.seq_len, round(config.document_tokens)) if in_document else config.seq_len
