"""Settings of the launch, the model and its experts; `config.Config` has them and all others, and says where
values come from.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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
    one_line,
)
from moe_exp.host.devices import count_gpus, num_cores


class ModelSettings(BaseModel):
    """The first settings of `Config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    _one_line = field_validator("*", mode="before")(one_line)

    # Launch
    preset: str = Field(
        "",
        description="named set of defaults: "
        + ", ".join(PRESETS)
        + "; default: reference with GPUs, else cpu",
    )
    master_addr: str = Field("localhost", description="host of rank 0")
    master_port: int = Field(23456, ge=1, le=65535, description="TCP port on MASTER_ADDR for the rendezvous")
    nnodes: NumRanks = Field(1, description="number of nodes")
    node_rank: NonNegative = Field(0, description="index of this node")
    gpus_per_node: NumRanks = Field(
        default_factory=lambda: count_gpus() or min(2, num_cores()),
        description=(
            "ranks per node: GPUs, or processes on a CPU host (default: all GPUs; on a CPU host 2, or 1 with"
            " one core)"
        ),
    )
    threads_per_rank: NonNegative = Field(
        0, description="torch threads per rank; 0: one on a CPU host, torch's default with GPUs"
    )

    # Model
    num_layers: NumLayers = Field(24, description="transformer layers")
    hidden_size: Width = Field(512, description="model width")
    ffn_hidden_size: Width = Field(1792, description="width of the dense MLP")
    num_heads: NumHeads = Field(4, description="attention heads")
    num_query_groups: NumHeads = Field(
        1, description="key/value heads (GQA); equal to NUM_HEADS: plain multi-head attention"
    )
    head_dim: OptionalWidth = Field(
        0, description="size of one head (Megatron: kv_channels); 0: HIDDEN_SIZE / NUM_HEADS"
    )
    multi_latent_attention: bool = Field(
        False,
        description=(
            "DeepSeek's attention (MLA), with the five sizes that follow; NUM_QUERY_GROUPS says nothing then"
        ),
    )
    q_lora_rank: OptionalWidth = Field(
        0, description="width that queries are projected down to (MLA); 0: they are not"
    )
    kv_lora_rank: Width = Field(512, description="width that keys and values are projected down to (MLA)")
    qk_head_dim: Width = Field(
        128, description="channels of a query or key head without position embedding (MLA)"
    )
    qk_pos_emb_head_dim: Width = Field(
        64, description="channels of a query or key head with position embedding (MLA)"
    )
    v_head_dim: Width = Field(128, description="channels of a value head (MLA)")
    seq_len: Positive = Field(2048, description="tokens per sample")
    vocab_size: Positive = Field(
        128256, description="tokens of the model's vocabulary, before padding to a multiple of 128"
    )
    activation: Literal["swiglu", "geglu", "gelu", "squared_relu"] = Field(
        "swiglu", description="activation of MLP and experts"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = Field("RMSNorm", description="norm layers")
    norm_epsilon: float = Field(1e-5, gt=0, description="added to the variance inside a norm")
    add_bias_linear: bool = Field(False, description="biases in the linear layers, experts too")
    qk_norm: bool = Field(
        False, description="norm on queries and keys; with MLA on what they are projected up from"
    )
    qk_norm_scope: Literal["head", "all"] = Field(
        "head",
        description="what QK_NORM is a mean over: each head by itself, or all heads together (OLMo 2, OLMoE)",
    )
    qkv_bias: bool = Field(
        False, description="biases on queries, keys and values alone (Megatron: --add-qkv-bias)"
    )
    rotary_base: float = Field(100000.0, gt=0, description="base of the rotary position embedding")
    rotary_fraction: float = Field(
        1.0, gt=0, le=1, description="share of each head's channels that are turned"
    )
    rope_scaling: Literal["none", "llama3", "yarn"] = Field(
        "none",
        description=(
            "rotary frequencies for sequences longer than ROPE_ORIGINAL_SEQ_LEN: as Llama 3 has them, or YaRN"
        ),
    )
    rope_scaling_factor: float = Field(1.0, ge=1, description="how many times longer (with ROPE_SCALING)")
    rope_original_seq_len: NonNegative = Field(
        0, description="tokens before scaling; 0: 8192 (the only one) with llama3, 4096 with yarn"
    )
    yarn_beta_fast: float = Field(
        32.0, gt=0, description="turns over the original length from which a frequency is kept"
    )
    yarn_beta_slow: float = Field(
        1.0, gt=0, description="turns up to which a frequency is divided by ROPE_SCALING_FACTOR"
    )
    yarn_mscale: Rate = Field(
        1.0,
        description="with f = 1 + 0.1*m*ln(factor): queries and keys times f(this) / f(YARN_MSCALE_ALL_DIM)",
    )
    yarn_mscale_all_dim: Rate = Field(
        0.0, description="see YARN_MSCALE; with MULTI_LATENT_ATTENTION scores are multiplied by f(this)^2"
    )
    tie_embeddings: bool = Field(False, description="output layer shares the weights of the embedding")
    dropout: Probability = Field(
        0.0, description="dropout after attention, after the MLP and on the embedding"
    )
    attention_dropout: Probability = Field(0.0, description="dropout on attention weights")
    init_std: float = Field(
        0.02, gt=0, description="standard deviation of the initial weights (Megatron: --init-method-std)"
    )
    init_distribution: Literal["normal", "truncated_normal"] = Field(
        "normal",
        description=(
            "of the initial weights; truncated_normal: none further than 3 standard deviations from 0"
        ),
    )

    # Mixture of experts
    use_moe: bool = Field(True, description="false: a dense model")
    num_experts: NumExperts = Field(8, description="routed experts per MoE layer")
    topk: NumExperts = Field(1, description="experts per token")
    moe_type: Literal["moe", "dmoe"] = Field(
        "dmoe", description="moe: capacity, tokens over it are dropped; dmoe: dropless"
    )
    moe_ffn_hidden_size: OptionalWidth = Field(0, description="width of one expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = Field(
        "1",
        description=(
            "every n-th layer is MoE, or a pattern with 1 for each that is: '[0]*3+[1]*21', '0,1,1,1'"
        ),
    )
    first_k_dense: NonNegative = Field(0, description="number of first layers that stay dense")
    shared_expert_size: OptionalWidth = Field(
        0, description="width of the expert that sees every token; 0: none"
    )
    shared_expert_gate: bool = Field(False, description="a sigmoid gate per token on the shared expert")
    capacity_factor: Rate = Field(
        0.0, description="tokens an expert takes, relative to its fair share (MOE_TYPE=moe); 0: 1.0"
    )
    min_capacity: NonNegative = Field(
        0, description="tokens an expert takes at least, per micro-batch (MOE_TYPE=moe)"
    )
    pad_to_capacity: bool = Field(
        True, description="fill every expert up to its capacity, for fixed shapes (MOE_TYPE=moe)"
    )
    drop_policy: Literal["probs", "position"] = Field(
        "probs",
        description=(
            "over capacity drop the lowest router weights, or the last in the sequence (MOE_TYPE=moe)"
        ),
    )
    token_rounding: NonNegative = Field(
        0,
        description=(
            "in training, round the rows of every expert in a micro-batch down to a multiple, such as 128, by"
            " dropping its lowest router weights, for full tiles in the grouped GEMM (MOE_TYPE=dmoe); 0: off"
        ),
    )
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        "softmax", description="score function of the router"
    )
    router_pre_softmax: bool = Field(
        True, description="softmax before top-k; false: softmax over the chosen k"
    )
    router_normalize: Literal["auto", "true", "false"] = Field(
        "auto",
        description=(
            "divide the chosen weights by their sum; auto: with sigmoid and sqrtsoftplus when TOPK > 1"
        ),
    )
    router_scaling_factor: float = Field(1.0, gt=0, description="factor on the router weights")
    router_dtype: Literal["fp32", "fp64"] = Field(
        "fp32", description="compute type of logits, scores and router weights"
    )
    router_jitter: Probability = Field(
        0.0, description="in training, noise on the router's input: a factor from [1-j, 1+j]"
    )
    router_bias_update_rate: Rate = Field(
        0.0, description="step of the aux-loss-free expert bias; 0: no bias"
    )
    num_router_groups: NonNegative = Field(
        0, description="groups of experts for group-limited top-k; 0: none"
    )
    router_group_topk: NonNegative = Field(0, description="groups a token may use (with NUM_ROUTER_GROUPS)")
    force_routing: Literal["none", "balanced", "zipf"] = Field(
        "none",
        description="for benchmarks: experts in turn, or skewed by Zipf's law, whatever the router says",
    )
    aux_loss_type: LossKinds = Field(
        "aux_loss",
        description=(
            "balancing losses, one or a list with commas: aux_loss (over a micro-batch, whatever ranks hold"
            " it), seq_aux_loss (over each sequence), global_aux_loss (over the global batch), importance; or"
            " sinkhorn (routing), or none"
        ),
    )
    aux_loss_coeff: Numbers = Field(
        "0.01", description="weight of the balancing loss, or a list with one for each"
    )
    z_loss_coeff: Rate = Field(0.0, description="weight of the router z-loss")
    expert_backend: Literal["auto", "triton", "loop", "torch", "grouped_gemm", "te", "megablocks"] = Field(
        "auto",
        description=(
            "grouped GEMM of the experts; triton: one function of our own kernels, on a CPU the same in plain"
            " torch"
        ),
    )
    routing_kernels: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "router, drops and row order: auto: Triton kernels on GPUs that run them; off: plain torch"
            " everywhere"
        ),
    )
    dispatcher: Literal["auto", "alltoall", "allgather", "deepep", "local"] = Field(
        "auto", description="token dispatcher; local needs EP=1 and ETP=1, deepep its package and GPUs"
    )
    upcycle_from: PathText = Field(
        "",
        description=(
            "start from a dense run's weights: its checkpoints folder, or that of one iteration; empty: no"
        ),
    )
    upcycle_granularity: Positive = Field(
        1, description="shards of each dense MLP, of which the experts are copies (UPCYCLE_FROM)"
    )
    cross_entropy: Literal["megatron", "triton"] = Field(
        "megatron",
        description=(
            "of the output: Megatron's, or our kernel, which keeps logits and no probabilities for backward"
        ),
    )
    impl: Literal["auto", "local", "te"] = Field(
        "auto", description="parts around the MoE layer: ours, or Transformer Engine's"
    )
    fp8: Literal["none", "e4m3", "hybrid"] = Field(
        "none",
        description=(
            "Transformer Engine's products in FP8: e4m3, or hybrid with gradients in e5m2; experts need"
            " EXPERT_BACKEND=te"
        ),
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = Field(
        "tensorwise",
        description=(
            "how FP8 scales: each tensor (Ada, Hopper), blocks of 128 (Hopper), blocks of 32 (mxfp8:"
            " Blackwell)"
        ),
    )
