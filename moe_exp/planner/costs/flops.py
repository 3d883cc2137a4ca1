"""Floating-point operations of the model in an iteration."""

from moe_exp.config import Config


def flops_per_iteration(config: Config, batch_size: int | None = None, seq_len: int | None = None) -> int:
    """Operations of the model in one iteration, forward and backward, over all ranks: what TFLOP/s and MFU
    count.

    The rule of Megatron-LM's `num_floating_point_operations` since 2025, with B samples of S tokens, L
    layers, width h, n heads of size d in g groups, and V rows of vocabulary:

        12*B*S*L*h^2 * ((1 + g/n + S/(2*h)) * n*d/h + topk*ffn/(2*h) * (3 if gated, else 2) + V/(2*L*h))

    Two operations a multiply-add, and a backward pass of twice the forward one: 6 for every weight that a
    token meets. Of the S^2 scores, attention counts the half that the causal mask keeps; until late 2024
    Megatron-LM counted all of them (S/h instead of S/(2*h)).
    With DOCUMENT_MASK, S is here DOCUMENT_TOKENS. With MOE_LATENT_SIZE=l, topk*ffn counts l/h times, and the
    two projections of an MoE layer add 4*h*l forward.
    Norms, softmax, router and recompute count nothing; Megatron-LM counts the norms of latent attention.

    Args:
        batch_size: samples in the iteration (batch ramp-up); GBSZ by default.
        seq_len: tokens of a sample that counts as several of SEQ_LEN (DATA_STAGES).
    """
    tokens = (config.gbsz if batch_size is None else batch_size) * config.seq_len
    if seq_len not in (None, config.seq_len):
        config = config.model_copy(update={"seq_len": seq_len})
        tokens = tokens // config.seq_len * config.seq_len
    num_moe = sum(config.moe_layers)
    dense = (config.num_layers - num_moe) * _mlp(config, config.ffn_hidden_size)
    layers = config.num_layers * _attention(config) + dense + num_moe * _moe(config)
    return 3 * tokens * (layers + 2 * config.hidden_size * config.padded_vocab_size)


def _attention(config: Config) -> int:
    """Operations per token: the projections, then scores and weighted values."""
    if config.multi_latent_attention:
        return _latent_projections(config) + _scores_and_values(config)
    query, key = config.num_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    return 4 * config.hidden_size * (query + key) + _scores_and_values(config)


def _scores_and_values(config: Config) -> int:
    value_channels = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    return attended_tokens(config) * config.num_heads * (config.kv_channels + value_channels)


def attended_tokens(config: Config) -> int:
    """Keys of a query, before the causal mask: of its sample, or with DOCUMENT_MASK of its document."""
    in_document = config.document_mask and config.document_tokens
    return min(config.seq_len, round(config.document_tokens)) if in_document else config.seq_len


def _latent_projections(config: Config) -> int:
    """Operations of multi-latent attention's projections per token."""
    hidden, latent, value = config.hidden_size, config.kv_lora_rank, config.num_heads * config.v_head_dim
    query = config.num_heads * config.kv_channels
    projected = config.q_lora_rank * (hidden + query) if config.q_lora_rank else hidden * query
    projected += hidden * (latent + config.qk_pos_emb_head_dim)
    projected += latent * (config.num_heads * config.qk_head_dim + value) + value * hidden
    return 2 * projected


def _moe(config: Config) -> int:
    """The chosen experts of a token, the shared one, and the projections to and from the latent size."""
    routed = round(config.experts_per_token * config.expert_ffn_size)
    chosen = _mlp(config, routed, config.expert_hidden_size)
    projections = 4 * config.hidden_size * config.moe_latent_size
    return chosen + _mlp(config, config.shared_expert_size) + projections


def _mlp(config: Config, ffn: int, hidden: int | None = None) -> int:
    return 2 * (3 if config.gated else 2) * (hidden or config.hidden_size) * ffn
