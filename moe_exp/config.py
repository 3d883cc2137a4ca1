"""Every setting of a run, once.

A setting is resolved in the order default < preset < environment < command line. The environment variable of a field is
its name in capitals (`num_experts` is NUM_EXPERTS), its command-line flag the name in kebab case (`--num-experts`).
Neither torch nor megatron is imported here, so that `--help`, `--dry-run` and the planner answer at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_exp.hosts import count_gpus, num_cores
from moe_exp.presets import PRESETS, preset_values
from moe_exp.run_names import built_name
from moe_exp.setting_types import (
    NO_LOSS,
    LayerPattern,
    LossKinds,
    NonNegative,
    Numbers,
    OptionalNumbers,
    OptionalPositive,
    Positive,
    Probability,
    Rate,
    StageLayers,
    expanded_layers,
    layers_of_pattern,
)


class ConfigError(ValueError):
    """One or more settings that cannot run, each a line of field, value, rule and fix."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # so that it is the same on other ranks
        return type(self), (self.problems,)


def problem(name: str, value: object, rule: str, fix: str) -> str:
    """The one format of a complaint about a setting: name, value, rule, fix."""
    return f"{name.upper()}={value}: {rule}. Fix: {fix}."


PREFETCHED_MICROBATCHES = 2  # that each of the NUM_WORKERS has ready


class Config(BaseModel):
    """All settings of a training run. Field order is the order of `--help` and of docs/settings.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Launch
    preset: str = Field("", description="named set of defaults: " + ", ".join(PRESETS) + "; default: reference with GPUs, else cpu")
    master_addr: str = Field("localhost", description="host of rank 0")
    master_port: int = Field(23456, ge=1, le=65535, description="TCP port on MASTER_ADDR for the rendezvous")
    nnodes: Positive = Field(1, description="number of nodes")
    node_rank: NonNegative = Field(0, description="index of this node")
    gpus_per_node: Positive = Field(
        default_factory=lambda: count_gpus() or min(2, num_cores()),
        description="ranks per node: GPUs, or processes on a CPU host (default: all GPUs; on a CPU host 2, or 1 with one core)",
    )
    threads_per_rank: NonNegative = Field(0, description="torch threads per rank; 0: one on a CPU host, torch's default with GPUs")

    # Model
    num_layers: Positive = Field(24, description="transformer layers")
    hidden_size: Positive = Field(512, description="model width")
    ffn_hidden_size: Positive = Field(1792, description="width of the dense MLP")
    num_heads: Positive = Field(4, description="attention heads")
    num_query_groups: Positive = Field(1, description="key/value heads (GQA); equal to NUM_HEADS: plain multi-head attention")
    head_dim: NonNegative = Field(0, description="size of one head (Megatron: kv_channels); 0: HIDDEN_SIZE / NUM_HEADS")
    multi_latent_attention: bool = Field(
        False, description="DeepSeek's attention (MLA), with the five sizes that follow; NUM_QUERY_GROUPS says nothing then"
    )
    q_lora_rank: NonNegative = Field(0, description="width that queries are projected down to (MLA); 0: they are not")
    kv_lora_rank: Positive = Field(512, description="width that keys and values are projected down to (MLA)")
    qk_head_dim: Positive = Field(128, description="channels of a query or key head without position embedding (MLA)")
    qk_pos_emb_head_dim: Positive = Field(64, description="channels of a query or key head with position embedding (MLA)")
    v_head_dim: Positive = Field(128, description="channels of a value head (MLA)")
    seq_len: Positive = Field(2048, description="tokens per sample")
    vocab_size: Positive = Field(128256, description="tokens of the model's vocabulary, before padding to a multiple of 128")
    activation: Literal["swiglu", "geglu", "gelu", "squared_relu"] = Field("swiglu", description="activation of MLP and experts")
    normalization: Literal["RMSNorm", "LayerNorm"] = Field("RMSNorm", description="norm layers")
    norm_epsilon: float = Field(1e-5, gt=0, description="added to the variance inside a norm")
    add_bias_linear: bool = Field(False, description="biases in the linear layers, experts too")
    qk_norm: bool = Field(False, description="norm on queries and keys; with MLA on what they are projected up from")
    qk_norm_scope: Literal["head", "all"] = Field(
        "head", description="what QK_NORM is a mean over: each head by itself, or all heads together (OLMo 2, OLMoE)"
    )
    qkv_bias: bool = Field(False, description="biases on queries, keys and values alone (Megatron: --add-qkv-bias)")
    rotary_base: float = Field(100000.0, gt=0, description="base of the rotary position embedding")
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="share of each head's channels that are turned")
    rope_scaling: Literal["none", "llama3", "yarn"] = Field(
        "none", description="rotary frequencies for sequences longer than ROPE_ORIGINAL_SEQ_LEN: as Llama 3 has them, or YaRN"
    )
    rope_scaling_factor: float = Field(1.0, ge=1, description="how many times longer (with ROPE_SCALING)")
    rope_original_seq_len: NonNegative = Field(0, description="tokens before scaling; 0: 8192 (the only one) with llama3, 4096 with yarn")
    yarn_beta_fast: float = Field(32.0, gt=0, description="turns over the original length from which a frequency is kept")
    yarn_beta_slow: float = Field(1.0, gt=0, description="turns up to which a frequency is divided by ROPE_SCALING_FACTOR")
    yarn_mscale: Rate = Field(1.0, description="with f = 1 + 0.1*m*ln(factor): queries and keys times f(this) / f(YARN_MSCALE_ALL_DIM)")
    yarn_mscale_all_dim: Rate = Field(0.0, description="see YARN_MSCALE; with MULTI_LATENT_ATTENTION scores are multiplied by f(this)^2")
    tie_embeddings: bool = Field(False, description="output layer shares the weights of the embedding")
    dropout: Probability = Field(0.0, description="dropout after attention, after the MLP and on the embedding")
    attention_dropout: Probability = Field(0.0, description="dropout on attention weights")
    init_std: float = Field(0.02, gt=0, description="standard deviation of the initial weights (Megatron: --init-method-std)")
    init_distribution: Literal["normal", "truncated_normal"] = Field(
        "normal", description="of the initial weights; truncated_normal: none further than 3 standard deviations from 0"
    )

    # Mixture of experts
    use_moe: bool = Field(True, description="false: a dense model")
    num_experts: Positive = Field(8, description="routed experts per MoE layer")
    topk: Positive = Field(1, description="experts per token")
    moe_type: Literal["moe", "dmoe"] = Field("dmoe", description="moe: capacity, tokens over it are dropped; dmoe: dropless")
    moe_ffn_hidden_size: NonNegative = Field(0, description="width of one expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = Field(
        "1", description="every n-th layer is MoE, or a pattern with 1 for each that is: '[0]*3+[1]*21', '0,1,1,1'"
    )
    first_k_dense: NonNegative = Field(0, description="number of first layers that stay dense")
    shared_expert_size: NonNegative = Field(0, description="width of the expert that sees every token; 0: none")
    shared_expert_gate: bool = Field(False, description="a sigmoid gate per token on the shared expert")
    capacity_factor: Rate = Field(0.0, description="tokens an expert takes, relative to its fair share (MOE_TYPE=moe); 0: 1.0")
    min_capacity: NonNegative = Field(0, description="tokens an expert takes at least, per micro-batch (MOE_TYPE=moe)")
    pad_to_capacity: bool = Field(True, description="fill every expert up to its capacity, for fixed shapes (MOE_TYPE=moe)")
    drop_policy: Literal["probs", "position"] = Field(
        "probs", description="over capacity drop the lowest router weights, or the last in the sequence (MOE_TYPE=moe)"
    )
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field("softmax", description="score function of the router")
    router_pre_softmax: bool = Field(True, description="softmax before top-k; false: softmax over the chosen k")
    router_normalize: Literal["auto", "true", "false"] = Field(
        "auto", description="divide the chosen weights by their sum; auto: with sigmoid and sqrtsoftplus when TOPK > 1"
    )
    router_scaling_factor: float = Field(1.0, gt=0, description="factor on the router weights")
    router_dtype: Literal["fp32", "fp64"] = Field("fp32", description="compute type of logits, scores and router weights")
    router_jitter: Probability = Field(0.0, description="in training, noise on the router's input: a factor from [1-j, 1+j]")
    router_bias_update_rate: Rate = Field(0.0, description="step of the aux-loss-free expert bias; 0: no bias")
    num_router_groups: NonNegative = Field(0, description="groups of experts for group-limited top-k; 0: none")
    router_group_topk: NonNegative = Field(0, description="groups a token may use (with NUM_ROUTER_GROUPS)")
    force_routing: Literal["none", "balanced", "zipf"] = Field(
        "none", description="for benchmarks: experts in turn, or skewed by Zipf's law, whatever the router says"
    )
    aux_loss_type: LossKinds = Field(
        "aux_loss",
        description="balancing losses, one or a list with commas: aux_loss (over a micro-batch, whatever ranks hold it), seq_aux_loss "
        "(over each sequence), global_aux_loss (over the global batch), importance; or sinkhorn (routing), or none",
    )
    aux_loss_coeff: Numbers = Field("0.01", description="weight of the balancing loss, or a list with one for each")
    z_loss_coeff: Rate = Field(0.0, description="weight of the router z-loss")
    expert_backend: Literal["auto", "loop", "torch", "grouped_gemm", "te", "megablocks"] = Field(
        "auto", description="grouped GEMM of the experts"
    )
    dispatcher: Literal["auto", "alltoall", "allgather", "deepep", "local"] = Field(
        "auto", description="token dispatcher; local needs EP=1 and ETP=1, deepep its package and GPUs"
    )
    upcycle_from: str = Field(
        "", description="start from a dense run's weights: its checkpoints folder, or that of one iteration; empty: no"
    )
    upcycle_granularity: Positive = Field(1, description="shards of each dense MLP, of which the experts are copies (UPCYCLE_FROM)")
    impl: Literal["auto", "local", "te"] = Field("auto", description="parts around the MoE layer: ours, or Transformer Engine's")

    # Parallelism
    tp: Positive = Field(1, description="tensor parallel size")
    pp: Positive = Field(1, description="pipeline parallel size")
    first_stage_layers: NonNegative = Field(0, description="layers of the first pipeline stage, with the embedding; 0: as the others have")
    last_stage_layers: NonNegative = Field(0, description="layers of the last pipeline stage, with the output layer; 0: as the others have")
    pipeline_layers: StageLayers = Field(
        "", description="instead of the two: layers of every pipeline stage, such as '8,9*10,8'; the first and the last may have 0"
    )
    vpp: OptionalPositive = Field(None, description="model chunks per pipeline rank (interleaved schedule), or none")
    ep: Positive = Field(1, description="expert parallel size")
    etp: Positive = Field(1, description="expert tensor parallel size")
    cp: Positive = Field(1, description="context parallel size")
    distributed_optimizer: bool = Field(True, description="shard the optimizer state over data-parallel ranks")
    overlap: Literal["auto", "true", "false"] = Field("auto", description="overlap gradient reduce and parameter gather; auto: with GPUs")
    recompute: Literal["none", "moe_act", "selective", "full"] = Field(
        "none", description="activation recompute; moe_act: the experts' activation, selective: the MoE layer"
    )

    # Optimization
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    min_lr: Rate = Field(6e-5, description="final learning rate")
    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = Field("cosine", description="learning-rate schedule")
    mbsz: Positive = Field(8, description="micro-batch size, samples")
    gbsz: Positive = Field(64, description="global batch size, samples")
    train_iters: Positive = Field(40000, description="iterations")
    warmup_iters: NonNegative = Field(1000, description="iterations of linear warm-up")
    decay_iters: NonNegative = Field(38000, description="iteration at which MIN_LR is reached; 0: TRAIN_ITERS")
    wsd_decay_iters: NonNegative = Field(0, description="iterations of the final decay (LR_DECAY_STYLE=WSD)")
    rampup_batch_size: str = Field("", description="'START INCREMENT SAMPLES': batch ramp-up from START to GBSZ")
    optimizer: Literal["adam", "adam8bit", "sgd", "muon"] = Field(
        "adam", description="adam: AdamW; adam8bit: with moments in 8 bits (bitsandbytes); sgd; muon: matrices by Muon, the rest by AdamW"
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = Field("fp32", description="of the two moments of OPTIMIZER=adam")
    sgd_momentum: Probability = Field(0.9, description="momentum (OPTIMIZER=sgd); 0: none, and no optimizer state")
    muon_momentum: Probability = Field(0.95, description="momentum (OPTIMIZER=muon)")
    weight_decay: Rate = Field(0.1, description="decoupled with Adam and Muon, part of the gradient with SGD; never on norms and biases")
    adam_beta1: Probability = Field(0.9, description="AdamW beta 1")
    adam_beta2: Probability = Field(0.95, description="AdamW beta 2")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    clip_grad: Rate = Field(1.0, description="largest gradient norm; 0: no clipping")
    seed: NonNegative = Field(1234, description="seed of weights, data order and dropout")
    dtype: Literal["fp32", "bf16", "fp16"] = Field("bf16", description="compute type; gradients are accumulated in fp32")

    # Data
    train_data: str = Field(
        "", description="Megatron .bin/.idx prefixes, 'PREFIX' or 'WEIGHT PREFIX WEIGHT PREFIX ...'; empty: the embedded corpus"
    )
    valid_data: str = Field("", description="the same for validation")
    split: OptionalNumbers = Field(
        "", description="instead of VALID_DATA: shares of TRAIN_DATA's documents for training, validation and test: '99,1', '969,30,1'"
    )
    data_order: Literal["stream", "megatron"] = Field(
        "stream", description="of samples; stream: any number of TRAIN_ITERS has the same; megatron: that of Megatron-LM's GPTDataset"
    )
    allow_other_data: bool = Field(False, description="go on from a checkpoint of other data or another order, at the same sample number")
    num_workers: NonNegative = Field(
        default_factory=lambda: 2 if count_gpus() else 0,
        description="processes per rank that read training data ahead; 0: the rank itself (default: 2 with GPUs, else 0)",
    )
    tokenizer: str = Field("", description="Hugging Face tokenizer folder or tokenizer.json; checked against VOCAB_SIZE")
    data_dir: str = Field("data", description="where prepared corpora are kept, and the indices of DATA_ORDER=megatron")

    # Input and output
    run_dir: str = Field("runs", description="folder of all runs")
    run_name: str = Field("", description="folder of this run inside RUN_DIR; empty: built from the settings")
    load_dir: str = Field(
        "", description="checkpoint to start from: a checkpoints folder, a run folder or the folder of one iteration; empty: the run's own"
    )
    allow_other_model: bool = Field(
        False, description="go on from a checkpoint of a model that computes otherwise (router, norms, rotary base), with the same shapes"
    )
    allow_other_optimizer: bool = Field(False, description="go on from a checkpoint of another optimizer; moments begin at zero")
    save_interval: NonNegative = Field(1000, description="iterations between checkpoints; 0: only at the end")
    save_at_end: bool = Field(True, description="save a checkpoint when the run ends; false: only every SAVE_INTERVAL iterations")
    async_save: bool = Field(False, description="training goes on while a checkpoint's files are written; the next save waits for that")
    keep_last: NonNegative = Field(0, description="the newest so many checkpoints are kept, others are removed; 0: all are kept")
    keep_every: NonNegative = Field(0, description="with KEEP_LAST, also keep those at multiples of it; 0: none for that reason")
    keep_best: NonNegative = Field(0, description="with KEEP_LAST, also keep so many with the lowest validation loss")
    verify_checkpoint: bool = Field(True, description="before loading compare its files' checksums; false: only their sizes")
    exit_interval: NonNegative = Field(0, description="save and end at the next multiple of it; 0: never")
    log_interval: Positive = Field(20, description="iterations between log lines")
    log_timers: bool = Field(False, description="measure milliseconds per iteration by phase: data, all-to-all, experts, optimizer, ...")
    eval_interval: NonNegative = Field(1000, description="iterations between evaluations; 0: none")
    eval_iters: NonNegative = Field(10, description="global batches per evaluation")
    wandb_project: str = Field("", description="wandb project; empty: no wandb")
    wandb_mode: Literal["online", "offline", "disabled"] = Field("online", description="wandb mode")

    # Values that follow from the settings

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the dense part of the model."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def stage_layers(self) -> list[int]:
        """Layers of every pipeline stage, those of all its model chunks together."""
        if self.pipeline_layers:
            return expanded_layers(self.pipeline_layers)
        first, last = self.first_stage_layers, self.last_stage_layers
        others = self.pp - bool(first) - bool(last)
        each = (self.num_layers - first - last) // others if others > 0 else 0
        return [first or each, *[each] * (self.pp - 2), last or each][: self.pp]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per iteration at the full global batch."""
        return self.gbsz // (self.mbsz * self.data_parallel_size)

    @property
    def kv_channels(self) -> int:
        """Size of one attention head, with multi-latent attention of its query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rope_seq_len(self) -> int:
        """ROPE_ORIGINAL_SEQ_LEN with the default of ROPE_SCALING filled in."""
        return self.rope_original_seq_len or (8192 if self.rope_scaling == "llama3" else 4096)

    @property
    def expert_ffn_size(self) -> int:
        """Width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Megatron pads to 128*TP; 128 alone keeps the model the same at every TP."""
        return -(-self.vocab_size // 128) * 128

    @property
    def gated(self) -> bool:
        """Whether the activation multiplies two halves of a doubled first projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def moe_layers(self) -> list[bool]:
        """For every layer whether it is an MoE layer. A pattern of another length than NUM_LAYERS is returned as it is."""
        if not self.use_moe:
            return [False] * self.num_layers
        return list(layers_of_pattern(self.moe_layer_freq, self.num_layers, self.first_k_dense))

    @property
    def router_weights_sum(self) -> float | None:
        """What the router weights of a token add up to, or None where that depends on the token."""
        balanced_by_sinkhorn = self.aux_loss_type == "sinkhorn"
        normalized = self.router_normalize == "true" or (
            self.router_normalize == "auto" and self.router_score != "softmax" and self.topk > 1
        )
        softmax_of_chosen = not self.router_pre_softmax or self.topk == self.num_experts
        if normalized or (self.router_score == "softmax" and softmax_of_chosen and not balanced_by_sinkhorn):
            return self.router_scaling_factor
        return None

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Balancing loss to its weight; with fewer weights than losses the last counts for the rest."""
        kinds = [kind for kind in self.aux_loss_type.split(",") if kind not in NO_LOSS]
        coeffs = [float(coeff) for coeff in self.aux_loss_coeff.split(",")]
        return dict(zip(kinds, coeffs + coeffs[-1:] * len(kinds), strict=False))

    @property
    def expert_capacity_factor(self) -> float | None:
        """CAPACITY_FACTOR of a layer with capacity, None of a dropless one."""
        return None if self.moe_type == "dmoe" else self.capacity_factor or 1.0

    @property
    def rampup(self) -> tuple[int, int, int] | None:
        """RAMPUP_BATCH_SIZE as (start, increment, samples), or None."""
        if not self.rampup_batch_size:
            return None
        start, increment, samples = (int(x) for x in self.rampup_batch_size.split())
        return start, increment, samples

    @property
    def name(self) -> str:
        """RUN_NAME, or the name built from the settings."""
        return self.run_name or built_name(self)


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds one flag per setting to `parser`; values stay text, `load_config` checks them."""
    for name, field in Config.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=name.upper(), help=field.description)


def load_config(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Resolves default < preset < environment < `flags` into one Config.

    Args:
        flags: field name to value, as parsed from the command line; None values count as not given.
        environ: the environment; os.environ by default.

    Raises:
        ConfigError: with every value that cannot be read, all at once.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {k: environ[k.upper()] for k in Config.model_fields if environ.get(k.upper())}
    given |= {k: v for k, v in (flags or {}).items() if v is not None}
    preset = str(given.get("preset") or ("reference" if count_gpus() else "cpu"))
    if preset not in PRESETS:
        raise ConfigError([problem("preset", preset, "is not a preset", "use one of " + ", ".join(PRESETS))])
    try:
        return Config(**(preset_values(preset) | given | {"preset": preset}))
    except ValidationError as error:
        raise ConfigError([_explain(e) for e in error.errors()]) from None


def _explain(error: Any) -> str:
    name = str(error["loc"][0])
    message = error["msg"].removeprefix("Value error, ")
    rule = message[0].lower() + message[1:].partition(", unable to")[0]
    fix = Config.model_fields[name].description if name in Config.model_fields else "see moe-exp train --help"
    return problem(name, error["input"], rule.replace("input should be", "must be"), f"give {name.upper()}, {fix}")


def to_yaml(config: Config) -> str:
    """The settings as YAML, in field order, for `config.yaml` of the run folder."""
    return str(yaml.safe_dump(config.model_dump(), sort_keys=False))
