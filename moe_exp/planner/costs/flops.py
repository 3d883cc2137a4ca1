"""Model FLOPs of an iteration."""

import re

from moe_exp.config import Config
from moe_exp.config.parameter_names import layer_sizes

_PRODUCT = re.compile(r"linear_\w+\.weight$|latent_proj\.weight$")  # not norms, router and gates


def flops_per_iteration(config: Config, batch_size: int | None = None, seq_len: int | None = None) -> int:
    """Returns the model FLOPs of an iteration (forward and backward, all ranks) to compute TFLOP/s and MFU.

    The formula is that of Megatron-LM's `num_floating_point_operations` since 2025, for B samples of S
    tokens, L layers of width h, n heads of size d in g groups, topk experts (1 if dense) of width ffn, and V
    tokens in the vocabulary:

        12*B*S*L*h^2 * ((1 + g/n + S/(2*h)) * n*d/h + topk*ffn/(2*h) * (3 if gated, else 2) + V/(2*L*h))

    A multiply-add is two operations, and backward costs twice as much as forward. So a token costs 6 FLOPs
    per weight that it uses. Of the S^2 attention scores, only the half kept by the causal mask is counted;
    until late 2024, Megatron-LM counted all S^2 (S/h instead of S/(2*h)). With DOCUMENT_MASK, S in S/(2*h) is
    DOCUMENT_TOKENS; with SLIDING_WINDOW, it is the result of `attended_tokens`. With MOE_LATENT_SIZE=l,
    topk*ffn is multiplied by l/h, and the two projections of an MoE layer add 4*h*l per token in
    forward. ATTENTION_GATE adds 2*h*n*d per token and layer in forward. Each multi-token prediction layer
    (MTP_NUM_LAYERS) adds a transformer layer, an output layer, and a projection (4*h^2 in forward). Norms,
    softmax, router and recompute are not counted here; Megatron-LM counts the norms of latent attention.

    Args:
        batch_size: samples of SEQ_LEN tokens in the iteration (default: GBSZ).
        seq_len: sample length if DATA_STAGES changes it; `batch_size` still counts samples of SEQ_LEN tokens.
    """
    tokens = (config.gbsz if batch_size is None else batch_size) * config.seq_len
    if seq_len not in (None, config.seq_len):
        config = config.model_copy(update={"seq_len": seq_len})
        tokens = tokens // config.seq_len * config.seq_len
    # a token's chosen experts, as a width
    routed, one = round(config.experts_per_token * config.expert_ffn_size), config.expert_ffn_size
    # that a token uses in the products of a dense layer, an MoE layer, and a dense layer with a window
    weights = []
    for sizes in (*layer_sizes(config), layer_sizes(config, has_window=True)[0]):
        used = {name: size for name, size in sizes.items() if _PRODUCT.search(name)}
        experts = sum(size for name, size in used.items() if ".experts." in name)
        weights.append(sum(used.values()) - experts + experts // (config.num_experts * one) * routed)
    is_moe, num_mtp = config.all_moe_layers, config.mtp_num_layers
    num_layers, num_moe = len(is_moe), sum(is_moe)
    layers = 2 * ((num_layers - num_moe) * weights[0] + num_moe * weights[1])
    layers += 2 * sum(config.window_layers) * (weights[2] - weights[0])
    layers += 2 * num_mtp * 2 * config.hidden_size**2  # the projection before the layer
    value_channels = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    channels = config.num_heads * (config.kv_channels + value_channels)
    layers += round(num_layers * attended_tokens(config) * channels)
    # 3 times: the backward pass computes the gradients of both inputs and weights
    return 3 * tokens * (layers + (1 + num_mtp) * 2 * config.hidden_size * config.padded_vocab_size)


def attended_tokens(config: Config, tile: int = 0) -> float:
    """Returns twice the average number of keys that a query sees under the causal mask. Without a window,
    this is the sample length or, with DOCUMENT_MASK, the document length. If only some
    layers have SLIDING_WINDOW, the result is the mean over all layers.

    Args:
        tile: number of queries that a kernel processes at once; the kernel reads all keys of these queries.
    """
    in_document = config.document_mask and config.document_tokens
    length = min(config.seq_len, round(config.document_tokens)) if in_document else config.seq_len
    window = min(config.sliding_window + tile, length)
    windowed = sum(config.window_layers) / config.num_layers
    return length - windowed * (length - 2 * window + window**2 / length)
