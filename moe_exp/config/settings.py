"""Every setting of a run, once.

A setting is resolved in the order default < preset < environment < command line. The environment variable of
a field is its name in capitals (`num_experts` is NUM_EXPERTS), its command-line flag the name in kebab case
(`--num-experts`). Those of the launch, the model and its experts are in config/model_settings.py. Neither
torch nor megatron is imported here, so that `--help`, `--dry-run` and the planner answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from moe_exp.config.model_settings import ModelSettings
from moe_exp.config.setting_types import (
    NO_LOSS,
    Blend,
    Iterations,
    NonNegative,
    NumRanks,
    OptionalNumbers,
    OptionalPositive,
    PathText,
    Positive,
    Probability,
    RankList,
    Rate,
    Seed,
    StageLayers,
    Timeout,
    WholeNumbers,
    expanded_layers,
    layers_of_pattern,
    shown,
)
from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import BAD_INPUT


class ConfigError(ValueError):
    """One or more settings that cannot run, each a line of field, value, rule and fix. `exit_code`: of a job
    that ends by it.
    """

    exit_code = BAD_INPUT

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # so that it is the same on other ranks
        return type(self), (self.problems,)


def problem(name: str, value: object, rule: str, fix: str) -> str:
    """The one format of a complaint about a setting: name, value, rule, fix."""
    return f"{name.upper()}={shown(value)}: {rule}. Fix: {fix}."


PREFETCHED_MICROBATCHES = 2  # that each of the NUM_WORKERS has ready


class Config(ModelSettings):
    """All settings of a training run. Field order is the order of `--help` and of docs/settings.md."""

    # Parallelism
    tp: NumRanks = Field(1, description="tensor parallel size")
    pp: NumRanks = Field(1, description="pipeline parallel size")
    first_stage_layers: NonNegative = Field(
        0, description="layers of the first pipeline stage, with the embedding; 0: as the others have"
    )
    last_stage_layers: NonNegative = Field(
        0, description="layers of the last pipeline stage, with the output layer; 0: as the others have"
    )
    pipeline_layers: StageLayers = Field(
        "",
        description=(
            "instead of the two: layers of every pipeline stage, such as '8,9*10,8'; the first and the last"
            " may have 0"
        ),
    )
    vpp: OptionalPositive = Field(
        None, description="model chunks per pipeline rank (interleaved schedule), or none"
    )
    ep: NumRanks = Field(1, description="expert parallel size")
    etp: NumRanks = Field(1, description="expert tensor parallel size")
    cp: NumRanks = Field(1, description="context parallel size")
    distributed_optimizer: bool = Field(
        True, description="shard the optimizer state over data-parallel ranks"
    )
    overlap: Literal["auto", "true", "false"] = Field(
        "auto", description="overlap gradient reduce and parameter gather; auto: with GPUs"
    )
    recompute: Literal["none", "moe_act", "selective", "full"] = Field(
        "none", description="activation recompute; moe_act: the experts' activation, selective: the MoE layer"
    )

    # Optimization
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    min_lr: Rate = Field(6e-5, description="final learning rate")
    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = Field(
        "cosine", description="learning-rate schedule"
    )
    mbsz: Positive = Field(8, description="micro-batch size, samples")
    gbsz: Positive = Field(64, description="global batch size, samples")
    train_iters: Positive = Field(40000, description="iterations")
    warmup_iters: NonNegative = Field(1000, description="iterations of linear warm-up")
    decay_iters: NonNegative = Field(
        38000, description="iteration at which MIN_LR is reached; 0: TRAIN_ITERS"
    )
    wsd_decay_iters: NonNegative = Field(0, description="iterations of the final decay (LR_DECAY_STYLE=WSD)")
    rampup_batch_size: str = Field(
        "", description="'START INCREMENT SAMPLES': batch ramp-up from START to GBSZ"
    )
    optimizer: Literal["adam", "adam8bit", "sgd", "muon"] = Field(
        "adam",
        description=(
            "adam: AdamW; adam8bit: with moments in 8 bits (bitsandbytes); sgd; muon: matrices by Muon, the"
            " rest by AdamW"
        ),
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the two moments of OPTIMIZER=adam"
    )
    sgd_momentum: Probability = Field(
        0.9, description="momentum (OPTIMIZER=sgd); 0: none, and no optimizer state"
    )
    muon_momentum: Probability = Field(0.95, description="momentum (OPTIMIZER=muon)")
    weight_decay: Rate = Field(
        0.1,
        description="decoupled with Adam and Muon, part of the gradient with SGD; never on norms and biases",
    )
    adam_beta1: Probability = Field(0.9, description="AdamW beta 1")
    adam_beta2: Probability = Field(0.95, description="AdamW beta 2")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    clip_grad: Rate = Field(1.0, description="largest gradient norm; 0: no clipping")
    seed: Seed = Field(1234, description="seed of weights, data order and dropout")
    deterministic: bool = Field(
        False,
        description=(
            "the same bits in every start on the same GPUs, software and layout: deterministic algorithms,"
            " which may be slower; an operation that has none ends the run"
        ),
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", description="compute type; gradients are accumulated in fp32"
    )

    # Data
    train_data: Blend = Field(
        "",
        description=(
            "Megatron .bin/.idx prefixes, 'PREFIX' or 'WEIGHT PREFIX WEIGHT PREFIX ...'; empty: the embedded"
            " corpus"
        ),
    )
    valid_data: Blend = Field("", description="the same for validation")
    split: OptionalNumbers = Field(
        "",
        description=(
            "instead of VALID_DATA: shares of TRAIN_DATA's documents for training, validation and test:"
            " '99,1', '969,30,1'"
        ),
    )
    data_order: Literal["stream", "megatron"] = Field(
        "stream",
        description=(
            "of samples; stream: any number of TRAIN_ITERS has the same; megatron: that of Megatron-LM's"
            " GPTDataset"
        ),
    )
    allow_other_data: bool = Field(
        False, description="go on from a checkpoint of other data or another order, at the same sample number"
    )
    num_workers: NonNegative = Field(
        default_factory=lambda: 2 if count_gpus() else 0,
        description=(
            "processes per rank that read training data ahead; 0: the rank itself (default: 2 with GPUs,"
            " else 0)"
        ),
    )
    tokenizer: PathText = Field(
        "", description="Hugging Face tokenizer folder or tokenizer.json; checked against VOCAB_SIZE"
    )
    data_dir: PathText = Field(
        "data", description="where prepared corpora are kept, and the indices of DATA_ORDER=megatron"
    )

    # Input and output
    run_dir: PathText = Field("runs", description="folder of all runs")
    run_name: str = Field("", description="folder of this run inside RUN_DIR; empty: built from the settings")
    load_dir: PathText = Field(
        "",
        description=(
            "checkpoint to start from: a checkpoints folder, a run folder or the folder of one iteration;"
            " empty: the run's own"
        ),
    )
    allow_other_model: bool = Field(
        False,
        description=(
            "go on from a checkpoint of a model that computes otherwise (router, norms, rotary base), with"
            " the same shapes"
        ),
    )
    allow_other_optimizer: bool = Field(
        False, description="go on from a checkpoint of another optimizer; moments begin at zero"
    )
    save_interval: NonNegative = Field(1000, description="iterations between checkpoints; 0: only at the end")
    save_at_end: bool = Field(
        True, description="save a checkpoint when the run ends; false: only every SAVE_INTERVAL iterations"
    )
    async_save: bool = Field(
        False,
        description="training goes on while a checkpoint's files are written; the next save waits for that",
    )
    keep_last: NonNegative = Field(
        0, description="the newest so many checkpoints are kept, others are removed; 0: all are kept"
    )
    keep_every: NonNegative = Field(
        0, description="with KEEP_LAST, also keep those at multiples of it; 0: none for that reason"
    )
    keep_best: NonNegative = Field(
        0, description="with KEEP_LAST, also keep so many with the lowest validation loss"
    )
    verify_checkpoint: bool = Field(
        True, description="before loading compare its files' checksums; false: only their sizes"
    )
    exit_interval: NonNegative = Field(0, description="save and end at the next multiple of it; 0: never")
    log_interval: Positive = Field(20, description="iterations between log lines")
    log_timers: bool = Field(
        False,
        description="measure milliseconds per iteration by phase: data, all-to-all, experts, optimizer, ...",
    )
    eval_interval: NonNegative = Field(1000, description="iterations between evaluations; 0: none")
    eval_iters: NonNegative = Field(10, description="global batches per evaluation")
    wandb_project: str = Field("", description="wandb project; empty: no wandb")
    wandb_mode: Literal["online", "offline", "disabled"] = Field("online", description="wandb mode")

    # Staying alive
    fingerprints: bool = Field(
        True,
        description=(
            "at every save a fingerprint of each tensor, which has to be the same again after a load; false:"
            " neither"
        ),
    )
    check_interval: NonNegative = Field(
        0,
        description=(
            "iterations between comparisons of the replicas of the parameters; 0: only before the first"
            " iteration of a start"
        ),
    )
    dump_iters: Iterations = Field(
        "",
        description=(
            "after these iterations, such as 10,20 or 10-12, parameters, gradients and moments go to"
            " RUN_DIR/RUN_NAME/dumps"
        ),
    )
    dump_ranks: WholeNumbers = Field(
        "", description="with DUMP_ITERS, the ranks that do so, such as 0,4; empty: all"
    )
    disk_check: Literal["run", "one", "none"] = Field(
        "run",
        description=(
            "free disk that a start asks for; run: for all checkpoints until its end, of a run that has some"
            " for the next; one: for one, others are removed by hand; none"
        ),
    )
    max_bad_steps: NonNegative = Field(
        10,
        description=(
            "iterations in a row with a loss or gradient that is not finite after which the run ends as"
            " failed; 0: it goes on"
        ),
    )
    spike_action: Literal["none", "log", "rollback"] = Field(
        "log",
        description=(
            "at a spike of the loss; log: an event; rollback: also go back to a checkpoint before it and skip"
            " its batches"
        ),
    )
    max_rollbacks: NonNegative = Field(
        5, description="rollbacks of a run; at the next spike it ends as failed"
    )
    preflight: bool = Field(
        False,
        description=(
            "before training check every node: arithmetic, memory, links, disks, clocks; a failing one ends"
            " the job"
        ),
    )
    preflight_timeout: Positive = Field(
        300, description="seconds that nodes wait for each other at the start of the preflight"
    )
    preflight_slow: float = Field(
        0.7, gt=0, le=1, description="a node is slow below this share of the other nodes' median speed"
    )
    hang_timeout: Timeout = Field(
        "auto",
        description=(
            "seconds after which an iteration counts as hanging: stacks to hang/, and the ranks end for a"
            " restart; auto: ten times the median, at least 180; none: never"
        ),
    )
    hang_timeout_other: OptionalPositive = Field(
        1500,
        description=(
            "the same for each part of the start, the first iterations, a batch of an evaluation and a save;"
            " none: never"
        ),
    )
    trace_calls_from: NonNegative = Field(
        0,
        description=(
            "from this iteration on every rank keeps its latest function calls in hang/calls/, which costs"
            " time; 0: never"
        ),
    )
    trace_calls_mb: Positive = Field(
        16, description="size of that file per rank, MB; older calls make room for newer ones"
    )
    trace_calls_in: str = Field(
        "moe_exp,megatron,torch.distributed", description="packages and modules whose calls are kept"
    )
    max_restarts: NonNegative = Field(
        0, description="after failures of ranks they start again, so many times per launch; 0: never"
    )
    exit_duration: Rate = Field(
        0.0, description="minutes since the launch after which the run saves and ends; 0: never"
    )
    profile_iters: Iterations = Field(
        "", description="iterations that torch's profiler traces, such as 10-12 or 10,20; empty: none"
    )
    profile_ranks: RankList = Field(
        "0", description="ranks of PROFILE_ITERS and MEMORY_SNAPSHOT: '0', '0,3', or all"
    )
    memory_snapshot: Iterations = Field(
        "",
        description=(
            "iterations whose allocations on the GPU are recorded for pytorch.org/memory_viz, as"
            " PROFILE_ITERS"
        ),
    )

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
        """For every layer whether it is an MoE layer. A pattern of another length than NUM_LAYERS is returned
        as it is.
        """
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


def built_name(config: Config) -> str:
    """Name of a run that was given none: what its checkpoints depend on, so that other settings get another
    folder.
    """
    vpp = "none" if config.vpp is None else config.vpp
    name = f"moe_{str(config.use_moe).lower()}"
    if config.use_moe:
        name += f"_num_experts_{config.num_experts}_topk_{config.topk}_type_{config.moe_type}"
    name += f"_num_nodes_{config.nnodes}_gpus_per_node_{config.gpus_per_node}"
    name += f"_TP_{config.tp}_PP_{config.pp}_VPP_{vpp}_EP_{config.ep}"
    name += "".join(
        f"_{key.upper()}_{getattr(config, key)}" for key in ("etp", "cp") if getattr(config, key) > 1
    )
    return name if config.optimizer == "adam" else f"{name}_OPTIMIZER_{config.optimizer}"
