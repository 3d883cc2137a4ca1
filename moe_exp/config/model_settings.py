"""Settings of launch, model and experts: the base class of `config.Config`, which explains their sources."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from moe_exp.config.choices import DISPATCHERS, EXPERT_BACKENDS, LOSSES, MUP_RULES, SCORES, one_of
from moe_exp.config.presets import PRESETS
from moe_exp.config.setting_types import (
    LayerPattern,
    LossKinds,
    NonNegative,
    Numbers,
    NumExperts,
    NumHeads,
    NumLayers,
    NumRanks,
    OptionalWidth,
    PathText,
    Positive,
    Probability,
    Rate,
    Width,
    experts,
    layout,
    model,
    one_line,
    place,
)
from moe_exp.host.devices import count_gpus, num_cores


class ModelSettings(BaseModel):
    """The first settings of `Config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    _one_line = field_validator("*", mode="before")(one_line)

    # Launch
    preset: str = layout(
        "",
        "named set of defaults: "
        + ", ".join(PRESETS)
        + "; default: reference with GPUs and TRAIN_DATA, else cpu",
        costs=False,
    )
    master_addr: str = place("localhost", "host of rank 0")
    master_port: int = place(
        0,
        "TCP port on MASTER_ADDR for the rendezvous; 0: a free one with one node, 23456 with several",
        ge=0,
        le=65535,
    )
    nnodes: NumRanks = layout(1, "number of nodes")
    node_rank: NonNegative = place(0, "index of this node", measured=0)
    gpus_per_node: NumRanks = layout(
        ...,
        "ranks per node: GPUs, or processes on a CPU host (default: all GPUs; on a CPU host and with "
        "PRESET=cpu at most 2)",
        default_factory=lambda: count_gpus() or min(2, num_cores()),
    )
    threads_per_rank: NonNegative = layout(
        0,
        "torch threads per rank; 0: one on a CPU host, torch's default with GPUs",
        costs=False,
        compared=False,
    )

    # Model
    num_layers: NumLayers = model(24, "transformer layers")
    hidden_size: Width = model(512, "model width")
    ffn_hidden_size: Width = model(1792, "width of the dense MLP")
    num_heads: NumHeads = model(4, "attention heads")
    num_query_groups: NumHeads = model(
        1, "key/value heads (GQA); equal to NUM_HEADS: plain multi-head attention"
    )
    head_dim: OptionalWidth = model(0, "size of one head; 0: HIDDEN_SIZE / NUM_HEADS")
    multi_latent_attention: bool = model(
        False,
        "DeepSeek's attention (MLA), with the five sizes that follow; NUM_QUERY_GROUPS is then not used",
    )
    q_lora_rank: OptionalWidth = model(0, "width that queries are projected down to (MLA); 0: no projection")
    kv_lora_rank: Width = model(512, "width that keys and values are projected down to (MLA)")
    qk_head_dim: Width = model(128, "channels of a query or key head without position embedding (MLA)")
    qk_pos_emb_head_dim: Width = model(64, "channels of a query or key head with position embedding (MLA)")
    v_head_dim: Width = model(128, "channels of a value head (MLA)")
    seq_len: Positive = model(2048, "tokens per sample")
    vocab_size: Positive = model(
        128256,
        "tokens of the model's vocabulary, before padding to a multiple of 128; not given: that of the data "
        "or TOKENIZER, if it is known",
    )
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"] = model(
        "swiglu", "activation of MLP and experts; clamped_swiglu: that of gpt-oss, with limits of 7"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = model("RMSNorm", "norm layers")
    norm_epsilon: float = model(1e-05, "added to the variance inside a norm", gt=0, costs=False)
    add_bias_linear: bool = model(False, "biases in the linear layers, also of experts and router")
    qk_norm: bool = model(
        False, "norm on queries and keys; with MLA on the compressed vectors that they are projected up from"
    )
    qk_norm_scope: Literal["head", "all"] = model(
        "head", "what QK_NORM averages over: each head separately, or all heads together (OLMo 2, OLMoE)"
    )
    qkv_bias: bool = model(False, "biases on queries, keys and values only")
    rotary_base: float = model(100000.0, "base of the rotary position embedding", gt=0, costs=False)
    rotary_fraction: float = model(1.0, "share of each head's channels that are rotated", gt=0, le=1)
    rope_scaling: Literal["none", "llama3", "yarn"] = model(
        "none", "rotary frequencies for sequences longer than ROPE_ORIGINAL_SEQ_LEN, as in Llama 3 or by YaRN"
    )
    rope_scaling_factor: float = model(1.0, "factor by which ROPE_SCALING extends the sequence length", ge=1)
    rope_original_seq_len: NonNegative = model(
        0, "sequence length before scaling; 0: 8192 with llama3 (the only value allowed), 4096 with yarn"
    )
    yarn_beta_fast: float = model(
        32.0, "number of rotations over ROPE_ORIGINAL_SEQ_LEN from which a frequency is kept (yarn)", gt=0
    )
    yarn_beta_slow: float = model(
        1.0,
        "number of rotations over ROPE_ORIGINAL_SEQ_LEN up to which a frequency is divided by "
        "ROPE_SCALING_FACTOR (yarn)",
        gt=0,
    )
    yarn_mscale: Rate = model(
        1.0,
        "queries and keys are multiplied by f(YARN_MSCALE) / f(YARN_MSCALE_ALL_DIM), with f(m) = 1 + "
        "0.1*m*ln(ROPE_SCALING_FACTOR)",
    )
    yarn_mscale_all_dim: Rate = model(
        0.0,
        "see YARN_MSCALE; with MULTI_LATENT_ATTENTION, attention scores are multiplied by "
        "f(YARN_MSCALE_ALL_DIM)^2",
    )
    tie_embeddings: bool = model(False, "output layer shares the weights of the embedding")
    dropout: Probability = model(0.0, "dropout after attention, after the MLP and on the embedding")
    attention_dropout: Probability = model(0.0, "dropout on attention weights")
    init_std: float = model(0.02, "standard deviation of the initial weights", gt=0, costs=False)
    init_distribution: Literal["normal", "truncated_normal"] = model(
        "normal",
        "distribution of the initial weights; truncated_normal: none further than 3 standard "
        "deviations from 0",
        costs=False,
    )
    parametrization: Literal["standard", "mup"] = model(
        "standard",
        "how initial weights, learning rates and weight decay depend on the model's sizes; mup: so that LR "
        "found on a small model holds for a larger one",
        costs=False,
    )
    mup_base_hidden_size: NonNegative = model(
        0, "HIDDEN_SIZE for which LR and INIT_STD were found (PARAMETRIZATION=mup)", costs=False
    )
    mup_base_moe_ffn_hidden_size: NonNegative = model(
        0, "its MOE_FFN_HIDDEN_SIZE; 0: in proportion to HIDDEN_SIZE as in this model", costs=False
    )
    mup_base_topk: NonNegative = model(0, "its TOPK; 0: as in this model", costs=False)
    mup_rule: Annotated[str, one_of(MUP_RULES)] = model(
        "mean_field",
        "initial weights of the experts' second projection with PARAMETRIZATION=mup; "
        + ", ".join(f"{name}: {rule.text}" for name, rule in MUP_RULES.items()),
        costs=False,
    )

    # Mixture of experts
    use_moe: bool = model(True, "false: a dense model")
    num_experts: NumExperts = experts(8, "routed experts per MoE layer")
    topk: NumExperts = experts(1, "experts per token")
    null_experts: NonNegative = experts(
        0,
        "null experts beside NUM_EXPERTS, which compute nothing: tokens that choose them use fewer experts, "
        "on average TOPK * NUM_EXPERTS / (NUM_EXPERTS + NULL_EXPERTS) if loads are balanced",
    )
    moe_type: Literal["moe", "dmoe"] = experts(
        "dmoe", "moe: with capacity, tokens above it are dropped; dmoe: dropless"
    )
    moe_ffn_hidden_size: OptionalWidth = experts(0, "width of one expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = experts(
        "1", "every n-th layer is MoE, or a pattern with 1 for each that is: '[0]*3+[1]*21', '0,1,1,1'"
    )
    first_k_dense: NonNegative = experts(0, "number of first layers that stay dense")
    shared_expert_size: OptionalWidth = experts(
        0, "width of the shared expert, which processes every token; 0: none"
    )
    shared_expert_gate: bool = experts(False, "a sigmoid gate per token on the shared expert")
    moe_latent_size: OptionalWidth = experts(
        0,
        "width that the tokens of routed experts are projected down to before the dispatch, by a projection "
        "that all experts of a layer share, and back up from after the combine (LatentMoE); 0: none",
    )
    capacity_factor: Rate = experts(
        0.0, "capacity of an expert relative to its fair share (MOE_TYPE=moe); 0: 1.0"
    )
    min_capacity: NonNegative = experts(
        0, "smallest capacity of an expert, tokens per micro-batch (MOE_TYPE=moe)"
    )
    pad_to_capacity: bool = experts(
        True, "fill every expert up to its capacity, for fixed shapes (MOE_TYPE=moe)"
    )
    drop_policy: Literal["probs", "position"] = experts(
        "probs",
        "tokens to drop over capacity (MOE_TYPE=moe); probs: those with the lowest router weights; "
        "position: the last in the sequence",
    )
    token_rounding: NonNegative = experts(
        0,
        "in training, round the rows of every expert in a micro-batch down to a multiple of this "
        "number, such as 128, so that the grouped GEMM has full tiles; the rows with the lowest "
        "router weights are dropped (MOE_TYPE=dmoe); 0: off",
    )
    router_score: Annotated[str, one_of(SCORES)] = experts(
        "softmax",
        "score function of the router; relu: a token uses the experts of positive logit, and the loss l1 of "
        "AUX_LOSS_TYPE brings their mean number to TOPK",
    )
    router_top_p: float = experts(
        1.0,
        "a token uses the fewest of its TOPK experts whose scores add up to this fraction; 1: all",
        gt=0,
        le=1,
    )
    router_pre_softmax: bool = experts(True, "softmax before top-k; false: softmax over the chosen k")
    router_normalize: Literal["auto", "true", "false"] = experts(
        "auto",
        "divide the chosen weights by their sum; auto: with "
        + " and ".join(name for name, score in SCORES.items() if score.normalizes)
        + " when TOPK > 1",
    )
    router_scaling_factor: float = experts(1.0, "factor on the router weights", gt=0)
    router_dtype: Literal["fp32", "fp64"] = experts(
        "fp32", "compute type of logits, scores and router weights"
    )
    router_jitter: Probability = experts(
        0.0, "in training, noise on the router's input: a factor from [1-j, 1+j]"
    )
    router_bias_update_rate: Rate = experts(
        0.0, "step of the aux-loss-free expert bias; 0: no bias (or ROUTER_BIAS_RULE=quantile)"
    )
    router_bias_rule: Literal["sign", "quantile"] = experts(
        "sign",
        "how the expert bias moves after an iteration; sign: by ROUTER_BIAS_UPDATE_RATE towards the mean "
        "load; quantile: to the value that would have balanced the iteration, without a step size",
    )
    num_router_groups: NonNegative = experts(0, "groups of experts for group-limited top-k; 0: none")
    router_group_topk: NonNegative = experts(0, "groups a token may use (with NUM_ROUTER_GROUPS)")
    force_routing: Literal["none", "balanced", "zipf"] = experts(
        "none",
        "for benchmarks, ignore the router's choice; balanced: experts in turn; zipf: load skewed by "
        "Zipf's law",
    )
    aux_loss_type: LossKinds = experts(
        "aux_loss",
        "balancing losses, one or a list with commas: "
        + ", ".join(f"{name} ({loss.text})" if loss.text else name for name, loss in LOSSES.items())
        + "; or sinkhorn (routing), or none",
    )
    aux_loss_coeff: Numbers = experts(
        "0.01", "weight of the balancing loss, or a list with one for each", costs=False
    )
    z_loss_coeff: Rate = experts(0.0, "weight of the router z-loss")
    expert_backend: Annotated[str, one_of(EXPERT_BACKENDS, "auto")] = experts(
        "auto",
        "grouped GEMM of the experts; triton: this package's kernels in one autograd function, on a "
        "CPU the same in plain torch",
    )
    routing_kernels: Literal["auto", "off"] = experts(
        "auto",
        "implementation of router, token drops and row order; auto: Triton kernels on GPUs that run "
        "them; off: plain torch everywhere",
    )
    moe_sm_margin: NonNegative = experts(
        0,
        "multiprocessors of the GPU that the expert GEMMs leave free for communication "
        "(EXPERT_BACKEND=triton)",
    )
    dispatcher: Annotated[str, one_of(DISPATCHERS, "auto")] = experts(
        "auto", "token dispatcher; local needs EP=1 and ETP=1, deepep its package and GPUs"
    )
    upcycle_from: PathText = experts(
        "",
        "start from the weights of a dense run: its checkpoints folder, or the folder of one "
        "iteration; empty: no upcycling",
        costs=False,
        measured="",
    )
    upcycle_granularity: Positive = experts(
        1,
        "number of parts that each dense MLP is split into; the experts are copies of the parts "
        "(UPCYCLE_FROM)",
        costs=False,
        measured=1,
    )
    cross_entropy: Literal["auto", "megatron", "triton"] = model(
        "auto",
        "loss of the output layer; megatron: Megatron's; triton: this package's kernel, which keeps "
        "logits and no probabilities for backward; auto: triton on GPUs that run it, else megatron",
    )
    impl: Literal["auto", "local", "te"] = model(
        "auto",
        "implementation of the layers around the MoE layer; local: this package's; te: Transformer "
        "Engine's; auto: te with GPUs if it is installed",
    )
    fp8: Literal["none", "e4m3", "hybrid"] = model(
        "none",
        "matrix products in FP8; e4m3: all in e4m3; hybrid: gradients in e5m2; with EXPERT_BACKEND=te "
        "Transformer Engine's, with triton those of the experts alone (e4m3, FP8_RECIPE=blockwise)",
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = model(
        "tensorwise",
        "how FP8 scales: each tensor (Ada, Hopper), blocks of 128 (Hopper), blocks of 32 (mxfp8: Blackwell)",
    )
