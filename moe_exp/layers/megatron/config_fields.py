"""Fields of Megatron's TransformerConfig that the MoE layer implements, rejects, or can ignore."""

from dataclasses import MISSING, fields

from megatron.core.transformer.transformer_config import TransformerConfig

_FOLLOWED = """
    activation_func activation_func_clamp_value add_bias_linear expert_model_parallel_size
    expert_tensor_parallel_size fp8 fp8_recipe gated_linear_unit glu_linear_offset moe_aux_loss_coeff
    moe_expert_capacity_factor moe_ffn_hidden_size moe_grad_scale_func moe_input_jitter_eps moe_latent_size
    moe_layer_freq moe_pad_expert_input_to_capacity moe_router_bias_update_rate moe_router_dtype
    moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax moe_router_score_function
    moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
    moe_token_drop_policy moe_z_loss_coeff num_moe_experts recompute_granularity recompute_modules
    sequence_parallel
"""

# Field to (rule, fix). The rule is completed by "in this MoE layer".
REFUSED = {
    "calculate_per_token_loss": ("the auxiliary losses are means over tokens", "leave it at False"),
    "expert_gtp_weight_remat_size": (
        "expert weights are split only over expert tensor parallel ranks",
        "leave expert_tensor_parallel_num_weight_shards at None",
    ),
    "fp4": ("the experts compute in fp8 or bf16", "leave it at None, or use fp8"),
    "moe_apply_probs_on_input": ("router weights multiply the experts' hidden rows", "leave it at False"),
    "moe_enable_routing_replay": ("has no effect", "use Router.replay, a RoutingReplay"),
    "moe_expert_rank_capacity_factor": ("capacity limits each expert", "set moe_expert_capacity_factor"),
    "moe_mlp_glu_interleave_size": ("gate and up halves are not interleaved", "leave it at None"),
    "moe_paged_stash": ("activations are not kept in pages", "leave it at False"),
    "moe_router_force_biased": ("the router adds no random bias", "leave it at None"),
    "moe_router_quantile_balancing_ema": (
        "quantile balancing has no moving average",
        'leave it at 0, and pass router={"expert_bias": True, "bias_rule": "quantile"} to decoder_spec',
    ),
    "moe_shared_expert_glu_interleave_size": ("gate and up halves are not interleaved", "leave it at None"),
    "moe_token_dropping": ("has no effect", "set moe_expert_capacity_factor"),
    "overlap_moe_expert_parallel_comm": ("this schedule is not supported", "leave it at False"),
}

# Fields that only choose how Megatron's layer computes the same result, or that its __post_init__ translates
# to other fields.
_IRRELEVANT = """
    activation_func_fp8_input_store bias_activation_fusion delay_wgrad_compute
    expert_tensor_parallel_num_weight_shards gradient_accumulation_fusion moe_deepep_num_sms
    moe_enable_deepep moe_extended_tp
    moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grouped_gemm moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
    moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging
    moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_fp8
    moe_router_padding_for_quantization moe_router_topk_limited_devices moe_shared_expert_overlap
    moe_single_grouped_bias moe_single_grouped_weight moe_token_dispatcher_type moe_use_legacy_grouped_gemm
    use_fused_weighted_squared_relu use_te_activation_func
"""
# The supported values of fields that attention and norm of the local spec implement in part or not at all.
_OF_ATTENTION = {"softmax_type": ("vanilla", "learnable"), "layernorm_zero_centered_gamma": (False,)}
FOLLOWED, IRRELEVANT = frozenset(_FOLLOWED.split()), frozenset(_IRRELEVANT.split())


def check_fields(config: TransformerConfig) -> None:
    """Raises a ValueError if a field is set that affects Megatron's MoE layer but not ours.

    Also raises a ValueError if a moe_ field of a newer Megatron version does not have its default value.
    """
    defaults = {field.name: field.default for field in fields(config)}
    unknown = [
        name
        for name in defaults
        if name.startswith("moe_") and name not in FOLLOWED and name not in IRRELEVANT and name not in REFUSED
    ]
    for name in (*REFUSED, *unknown):
        value, default = getattr(config, name, None), defaults.get(name)
        if value is None or value is False or (default is not MISSING and value == default):
            continue
        rule, fix = REFUSED.get(name, ("is not supported", f"leave it at {default}"))
        raise ValueError(f"{name}={value}: {rule} in this MoE layer. Fix: {fix}.")


def check_attention(config: TransformerConfig) -> None:
    """Raises ValueError if this spec's attention or norm does not support a field's value (Megatron's do)."""
    window = getattr(config, "window_size", None) or (0, 0)
    usual = _OF_ATTENTION | {"window_size": (None, (max(window[0], 0), 0))}
    for name, supported in usual.items():
        if (value := getattr(config, name, supported[0])) not in supported:
            rule = "is not supported by the attention and norm of this layer spec"
            fix = f"set it to {' or '.join(map(str, supported))}, or set use_te=True"
            raise ValueError(f"{name}={value}: {rule}. Fix: {fix}.")
