"""Every setting of a run, once.

Resolved in the order default < preset < settings file < environment < command line. A field's environment
variable is its name in capitals (`num_experts` is NUM_EXPERTS), its flag the name in kebab case
(`--num-experts`). Settings of launch, model and experts are in config/model_settings.py. Imports neither
torch nor megatron, so that `--help`, `--dry-run` and the planner answer at once.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from moe_exp.config.choices import DECAYS, NO_LOSS, OPTIMIZERS, SCHEDULES, SCORES, one_of
from moe_exp.config.model_settings import ModelSettings
from moe_exp.config.parsers import read_composed
from moe_exp.config.setting_types import (
    Blend,
    Iterations,
    IterationsOrShares,
    NonNegative,
    NumRanks,
    OptionalNumbers,
    OptionalPositive,
    ParameterGroups,
    PathText,
    Positive,
    Probability,
    RankList,
    Rate,
    Seed,
    StageLayers,
    Stages,
    Timeout,
    WholeNumbers,
    as_given,
    care,
    data,
    experts,
    layers_of_pattern,
    layout,
    learning,
    output,
    place,
    shown,
    stage_terms,
    traits,
)
from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import BAD_INPUT


class ConfigError(ValueError):
    """Invalid settings, each a line of field, value, rule and fix; `exit_code` is that of the failing job."""

    exit_code = BAD_INPUT

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # so that it is the same on other ranks
        return type(self), (self.problems,)


def problem(name: str, value: object, rule: str, fix: str) -> str:
    """Formats a problem with a setting: name, value, rule, fix."""
    return f"{name.upper()}={shown(value)}: {rule}. Fix: {fix}."


def setting_error(name: str, value: object, rule: str, fix: str) -> ValueError:
    """The error for a setting or an argument, as `problem` words it."""
    return ValueError(problem(name, value, rule, fix))


PREFETCHED_MICROBATCHES = 2  # that each of the NUM_WORKERS has ready


class Config(ModelSettings):
    """All settings of a training run. Field order is the order of `--help` and of docs/settings.md."""

    # Parallelism
    tp: NumRanks = layout(1, "tensor parallel size; above 1 with sequence parallelism")
    pp: NumRanks = layout(1, "pipeline parallel size")
    first_stage_layers: NonNegative = layout(
        0, "number of layers of the first pipeline stage, which has the embedding; 0: as the other stages"
    )
    last_stage_layers: NonNegative = layout(
        0, "number of layers of the last pipeline stage, which has the output layer; 0: as the other stages"
    )
    pipeline_layers: StageLayers = layout(
        "",
        "number of layers of every pipeline stage, such as '8,9*10,8', instead of FIRST_STAGE_LAYERS "
        "and LAST_STAGE_LAYERS; the first and the last may be 0",
    )
    vpp: OptionalPositive = layout(None, "model chunks per pipeline rank (interleaved schedule), or none")
    ep: NumRanks = experts(1, "expert parallel size")
    etp: NumRanks = experts(1, "expert tensor parallel size")
    cp: NumRanks = layout(1, "context parallel size")
    distributed_optimizer: bool = layout(True, "shard the optimizer state over data-parallel ranks")
    overlap: Literal["auto", "true", "false"] = layout(
        "auto", "overlap gradient reduce and parameter gather; auto: with several GPUs per stage"
    )
    recompute: Literal["none", "moe_act", "selective", "full"] = layout(
        "none",
        "activation recompute; moe_act: the experts' activation, selective: the MoE layer (both: attention "
        "scores of a dense model), full: every layer",
    )

    # Optimization
    lr: float = learning(0.0006, "peak learning rate", gt=0)
    min_lr: Rate = learning(6e-05, "final learning rate")
    router_lr_mult: float = learning(1.0, "LR and MIN_LR of routers, as a multiple", gt=0)
    expert_lr_mult: float = learning(1.0, "LR and MIN_LR of routed experts, as a multiple", gt=0)
    lr_groups: ParameterGroups = learning(
        "",
        "multiples of LR and MIN_LR (lr) and of WEIGHT_DECAY (wd) by names of parameters: "
        "'*.router.*:lr=0.5,wd=0;*embedding*:lr=2'; the first pattern counts (docs/learning_rate.md)",
    )
    lr_decay_style: Annotated[str, one_of(SCHEDULES, read=read_composed)] = learning(
        "cosine",
        "learning-rate schedule; or its pieces: 'constant:80%,linear' (docs/learning_rate.md)",
        measured="constant",
    )
    mbsz: Positive = learning(8, "micro-batch size, samples", costs=True)
    gbsz: Positive = learning(64, "global batch size, samples", costs=True)
    train_iters: Positive = learning(40000, "iterations")
    warmup_iters: NonNegative = learning(
        1000, "iterations of linear warm-up; if only TRAIN_ITERS is set, at most a tenth of it", measured=0
    )
    decay_iters: NonNegative = learning(0, "iteration at which MIN_LR is reached; 0: TRAIN_ITERS", measured=0)
    wsd_decay_iters: NonNegative = learning(
        0, "iterations of the final decay (LR_DECAY_STYLE=WSD, power), and of every decay (WSD-S)"
    )
    wsd_decay_style: Annotated[str, one_of(DECAYS)] = learning(
        "linear", "shape of these decays; minus_sqrt: 1 - sqrt"
    )
    wsd_decay_ends: IterationsOrShares = learning(
        "",
        "iterations, or shares such as 25%,50%, with which decays before the final one end; after each "
        "the rate is LR again (LR_DECAY_STYLE=WSD-S)",
    )
    lr_power_a: float = learning(
        4.0, "A of LR_DECAY_STYLE=power: at most LR, and at most GBSZ * A * tokens^B", gt=0
    )
    lr_power_b: float = learning(-0.51, "B of LR_DECAY_STYLE=power", lt=0)
    rampup_batch_size: str = learning(
        "", "'START INCREMENT SAMPLES': batch ramp-up from START to GBSZ", measured=""
    )
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = learning(
        "adam",
        "; ".join(f"{name}: {it.text}" if it.text else name for name, it in OPTIMIZERS.items()),
        costs=True,
    )
    optimizer_state_dtype: Literal["fp32", "bf16"] = learning(
        "fp32", "type of the two moments of OPTIMIZER=adam", costs=True
    )
    sgd_momentum: Probability = learning(
        0.9, "momentum (OPTIMIZER=sgd); 0: none, and no optimizer state", costs=True
    )
    muon_momentum: Probability = learning(0.95, "momentum (OPTIMIZER=muon)")
    qk_clip: Rate = learning(
        0.0,
        "largest attention logit: a head with a larger one gets smaller query and key projections after the "
        "step (QK-clip, with OPTIMIZER=muon MuonClip; Kimi K2 has 100); 0: off",
        costs=True,
    )
    weight_decay: Rate = learning(
        0.1,
        "weight decay; decoupled with Adam and Muon, added to the gradient with SGD; never applied to "
        "norms and biases",
    )
    adam_beta1: Probability = learning(0.9, "AdamW beta 1")
    adam_beta2: Probability = learning(0.95, "AdamW beta 2")
    adam_eps: float = learning(1e-08, "AdamW epsilon", gt=0)
    clip_grad: Rate = learning(1.0, "maximum gradient norm; 0: no clipping")
    ema_decay: Probability = learning(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999, in fp32 and in checkpoints, "
        "validated as ema_lm_loss; 0: none",
        costs=True,
    )
    average_every: Positive = learning(
        1, "with EMA_DECAY: optimizer steps between updates of the average", measured=1
    )
    seed: Seed = learning(1234, "seed of weights, data order and dropout")
    deterministic: bool = learning(
        False,
        "bit-identical results in every start on the same GPUs, software and layout, by deterministic "
        "algorithms, which may be slower; an operation without one ends the run",
        costs=True,
    )
    dtype: Literal["fp32", "bf16", "fp16"] = learning(
        "bf16", "compute type; gradients are accumulated in fp32", costs=True
    )

    # Data
    train_data: Blend = data(
        "",
        "folder, file or pattern of text (.txt, .md, .jsonl, .json, .parquet, .arrow), or Megatron "
        ".bin/.idx prefixes; 'A' or 'WEIGHT A WEIGHT B ...'; empty: the embedded corpus",
    )
    valid_data: Blend = data(
        "", "validation data, written as in TRAIN_DATA; empty: part of text is held out (docs/corpus.md)"
    )
    text_documents: Literal["file", "block"] = data(
        "file", "what a document of a text file is: the file, or each block between blank lines"
    )
    prepend_bos: bool = data(False, "begin every document of text with the BOS of TOKENIZER")
    text_field: str = data("text", "field of .jsonl, column of .parquet and .arrow, with the text")
    split: OptionalNumbers = data(
        "",
        "instead of VALID_DATA: shares of TRAIN_DATA's documents for training, validation and test: "
        "'99,1', '969,30,1'",
    )
    data_stages: Stages = data(
        "",
        "later stages of the training data, each from a sample or token on with other files, weights or "
        "sample length: a YAML file, or YAML (docs/corpus.md)",
        measured="",
    )
    data_order: Literal["stream", "megatron"] = data(
        "stream",
        "order of the samples; stream: independent of TRAIN_ITERS; megatron: that of Megatron-LM's "
        "GPTDataset",
    )
    document_mask: bool = data(
        False,
        "attention stays inside a document, and positions begin at 0 in each; documents end with the "
        "end-of-document token",
    )
    document_tokens: Rate = data(
        0.0,
        "with DOCUMENT_MASK: length of the part of its document that a token's sample has, mean over tokens, "
        "for FLOPs and planner; 0: measured on the token files of TRAIN_DATA",
        compared=False,
    )
    eod_mask_loss: bool = data(
        False, "leave out the loss of predicting a document's first token from the end of the one before"
    )
    document_packing: Literal["concatenate", "best_fit"] = data(
        "concatenate",
        "how documents become samples; concatenate: all are one text, cut every SEQ_LEN tokens; best_fit: "
        "whole documents that fill a sample best, cut only if longer",
    )
    allow_other_data: bool = data(
        False, "resume from a checkpoint of other data or another order, at the same sample number"
    )
    num_workers: NonNegative = data(
        ...,
        "processes per rank that read training data ahead; 0: the rank reads it itself (default: 2 "
        "with GPUs, else 0)",
        default_factory=lambda: 2 if count_gpus() else 0,
        compared=False,
    )
    tokenizer: PathText = data(
        "",
        "Hugging Face tokenizer folder or tokenizer.json; checked against VOCAB_SIZE; empty: one is trained "
        "on text",
    )
    data_dir: PathText = data("data", "folder of prepared corpora, and of the indices of DATA_ORDER=megatron")

    # Input and output
    run_dir: PathText = place("runs", "folder of all runs")
    run_name: str = place("", "folder of this run inside RUN_DIR; empty: built from the settings")
    load_dir: PathText = output(
        "",
        "checkpoint to start from, with its optimizer and iteration (without them after ckpt reshape "
        "--weights-only): a checkpoints folder, a run folder or the folder of one iteration, or its URL at "
        "an object store; empty: the run's own",
        measured="",
    )
    remote_dir: str = output(
        "",
        "folder at an object store (s3://, gs://) that gets a copy of the run: each checkpoint, and"
        " config.yaml and metrics.jsonl with it; a run folder without checkpoints continues from it",
        measured="",
        compared=False,
    )
    allow_other_model: bool = output(
        False,
        "resume from a checkpoint of a model of the same shapes that computes something else (router,"
        " norms, rotary base)",
    )
    allow_other_optimizer: bool = output(
        False, "resume from a checkpoint of another optimizer; its moments start at zero"
    )
    save_interval: NonNegative = output(
        1000, "iterations between checkpoints; 0: only at the end", measured=0
    )
    save_at_end: bool = output(
        True,
        "save a checkpoint when the run ends; false: only every SAVE_INTERVAL iterations",
        measured=False,
    )
    async_save: bool = output(
        False,
        "continue training while the files of a checkpoint are written; the next save waits for them",
        measured=False,
        compared=False,
    )
    keep_last: NonNegative = output(
        0, "number of newest checkpoints to keep, others are removed; 0: keep all", measured=0, compared=False
    )
    keep_every: NonNegative = output(
        0,
        "with KEEP_LAST, also keep checkpoints at multiples of this iteration; 0: none",
        measured=0,
        compared=False,
    )
    keep_best: NonNegative = output(
        0,
        "with KEEP_LAST, also keep this number of checkpoints with the lowest validation loss",
        measured=0,
        compared=False,
    )
    verify_checkpoint: bool = output(
        True,
        "compare the checksums of a checkpoint's files before loading it; false: only their sizes",
        compared=False,
    )
    exit_interval: NonNegative = output(0, "save and end at the next multiple of it; 0: never", measured=0)
    log_interval: Positive = output(20, "iterations between log lines", measured=1)
    log_timers: bool = output(
        False, "measure milliseconds per iteration by phase: data, all-to-all, experts, optimizer, ..."
    )
    eval_interval: NonNegative = output(1000, "iterations between evaluations; 0: none", measured=0)
    eval_iters: NonNegative = output(10, "global batches per evaluation")
    tensorboard_axes: bool = output(
        False,
        "TensorBoard: repeat the losses over tokens, FLOPs and training time, as runs named by_*",
        compared=False,
    )
    wandb_project: str = output("", "wandb project; empty: no wandb", measured="", compared=False)
    prometheus_file: PathText = output(
        "",
        "file NAME.prom that has the newest metrics, for node_exporter's textfile collector; empty: none",
        measured="",
        compared=False,
    )
    wandb_mode: Literal["online", "offline", "disabled"] = output("online", "wandb mode", compared=False)

    # Reliability and debugging
    fingerprints: bool = care(
        True, "take a fingerprint of each tensor at every save and compare it after a load; false: neither"
    )
    check_interval: NonNegative = care(
        0,
        "iterations between comparisons of the replicas of the parameters; 0: only before the first "
        "iteration of a start",
    )
    dump_iters: Iterations = care(
        "",
        "after these iterations, such as 10,20 or 10-12, write parameters, gradients and moments to "
        "RUN_DIR/RUN_NAME/dumps",
        measured="",
    )
    dump_ranks: WholeNumbers = care("", "ranks that write DUMP_ITERS, such as 0,4; empty: all", measured="")
    disk_check: Literal["run", "one", "none"] = care(
        "run",
        "free disk that a start requires; run: for all checkpoints until its end (a resumed run: for "
        "the next one); one: for one checkpoint, if you remove others yourself; none: not checked",
    )
    max_bad_steps: NonNegative = care(
        10,
        "consecutive iterations with a loss or gradient that is not finite, after which the run ends "
        "as failed; 0: never",
        compared=True,
    )
    spike_action: Literal["none", "log", "rollback"] = care(
        "log",
        "at a loss spike; none: nothing; log: write an event; rollback: also return to a checkpoint "
        "before it and skip its batches",
        compared=True,
        measured="none",
    )
    max_rollbacks: NonNegative = care(
        5, "rollbacks of a run; the next spike ends it as failed", compared=True
    )
    preflight: bool = care(
        False,
        "check every node before training: arithmetic, memory, links, disks, clocks; a failing node "
        "ends the job",
        measured=False,
    )
    preflight_timeout: Positive = care(
        300, "seconds that nodes wait for each other at the start of the preflight"
    )
    preflight_slow: float = care(
        0.7, "a node is slow below this share of the other nodes' median speed", gt=0, le=1
    )
    hang_timeout: Timeout = care(
        "auto",
        "seconds after which an iteration counts as hanging: stacks are written to hang/ and the "
        "ranks end for a restart; auto: ten times the median, at least 180; none: never",
    )
    hang_timeout_other: OptionalPositive = care(
        1500,
        "timeout in seconds, as HANG_TIMEOUT, for each part of the start, the first iterations, a "
        "batch of an evaluation and a save; none: never",
    )
    trace_calls_from: NonNegative = care(
        0,
        "iteration from which every rank keeps its latest function calls in hang/calls/, which costs "
        "time; 0: never",
    )
    trace_calls_mb: Positive = care(16, "size of that file per rank, MB; newer calls replace older ones")
    trace_calls_in: str = care(
        "moe_exp,megatron,torch.distributed", "packages and modules whose calls are kept"
    )
    max_restarts: NonNegative = care(
        0, "number of restarts of the ranks per launch after a rank has failed; 0: never", measured=0
    )
    exit_duration: Rate = care(
        0.0,
        "minutes since the launch after which the run saves and ends; 0: never",
        measured=0,
        compared=True,
    )
    profile_iters: Iterations = care(
        "", "iterations that torch's profiler traces, such as 10-12 or 10,20; empty: none", measured=""
    )
    profile_ranks: RankList = care("0", "ranks of PROFILE_ITERS and MEMORY_SNAPSHOT: '0', '0,3', or all")
    memory_snapshot: Iterations = care(
        "",
        "iterations whose allocations on the GPU are recorded for pytorch.org/memory_viz, as PROFILE_ITERS",
        measured="",
    )

    def problem(self, name: str, rule: str, fix: str) -> str:
        """A line on setting `name`: its value, the rule that it breaks, and the fix."""
        return problem(name, as_given(getattr(self, name)), rule, fix)

    def problems(self, *rules: tuple[object, str, str, str]) -> Iterator[str]:
        """A line for each broken rule of `rules`: whether it is broken, setting, rule and fix."""
        return (self.problem(name, rule, fix) for is_broken, name, rule, fix in rules if is_broken)

    # Values that follow from the settings

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.gpus_per_node

    @property
    def rendezvous_port(self) -> int:
        """MASTER_PORT; 0: one that is free when the agent of the only node listens on it."""
        return self.master_port or (23456 if self.nnodes > 1 else 0)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the dense part of the model."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def context_stripes(self) -> int:
        """Parts of a sequence, each of which all context parallel ranks share: several with documents, so
        that all ranks have about as many pairs of tokens.
        """
        wanted = (4, 2) if self.document_mask and self.cp > 1 else ()
        return next((number for number in wanted if self.seq_len % (2 * self.cp * number) == 0), 1)

    @property
    def stage_layers(self) -> list[int]:
        """Layers of every pipeline stage, over all its model chunks."""
        if self.pipeline_layers:
            return [layers for layers, times in stage_terms(self.pipeline_layers) for _ in range(times)]
        first, last = self.first_stage_layers, self.last_stage_layers
        others = self.pp - bool(first) - bool(last)
        each = (self.num_layers - first - last) // others if others > 0 else 0
        return [first or each, *[each] * (self.pp - 2), last or each][: self.pp]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per iteration at the full global batch."""
        return self.gbsz // (self.mbsz * self.data_parallel_size)

    @property
    def decay_end(self) -> int:
        """Iteration at which MIN_LR is reached."""
        return self.decay_iters or self.train_iters

    @property
    def kv_channels(self) -> int:
        """Size of an attention head; with multi-latent attention, of its query and key."""
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
    def expert_ffn_setting(self) -> str:
        """The setting that gives it."""
        return "moe_ffn_hidden_size" if self.moe_ffn_hidden_size else "ffn_hidden_size"

    @property
    def is_fp8_by_kernels(self) -> bool:
        """Whether FP8 is that of EXPERT_BACKEND=triton: experts alone, without Transformer Engine."""
        return self.fp8 != "none" and self.use_moe and self.expert_backend == "triton"

    @property
    def expert_hidden_size(self) -> int:
        """Width of a routed expert's input and output: MOE_LATENT_SIZE, or the model's."""
        return self.moe_latent_size or self.hidden_size

    @property
    def num_router_outputs(self) -> int:
        """Experts and null experts."""
        return self.num_experts + self.null_experts

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts that a token uses if loads are balanced; with ROUTER_TOP_P the most."""
        if self.null_experts:
            return self.topk * self.num_experts / self.num_router_outputs
        return self.topk

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers have a bias per expert."""
        return self.router_bias_update_rate > 0 or self.router_bias_rule == "quantile"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, padded to 128 (Megatron: 128*TP), so that TP does not change the model."""
        return -(-self.vocab_size // 128) * 128

    @property
    def gated(self) -> bool:
        """Whether the activation is gated, i.e. the first projection is doubled."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def moe_layers(self) -> list[bool]:
        """Whether each layer is an MoE layer; a pattern keeps its length even if it is not NUM_LAYERS."""
        if not self.use_moe:
            return [False] * self.num_layers
        return list(layers_of_pattern(self.moe_layer_freq, self.num_layers, self.first_k_dense))

    @property
    def router_weights_sum(self) -> float | None:
        """The sum of a token's router weights, or None if it depends on the token."""
        balanced_by_sinkhorn = self.aux_loss_type == "sinkhorn"
        normalized = self.router_normalize == "true" or (
            self.router_normalize == "auto" and SCORES[self.router_score].normalizes and self.topk > 1
        )
        if self.router_score == "relu" or self.router_top_p < 1 or self.null_experts:
            return None  # of a token without experts it is 0
        softmax_of_chosen = not self.router_pre_softmax or self.topk == self.num_experts
        if normalized or (self.router_score == "softmax" and softmax_of_chosen and not balanced_by_sinkhorn):
            return self.router_scaling_factor
        return None

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Balancing loss to weight; the last weight repeats for further losses."""
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
        """RUN_NAME, or one of the settings that checkpoints depend on, so that each gets its own folder."""
        if self.run_name:
            return self.run_name
        name = f"moe_{str(self.use_moe).lower()}"
        if self.use_moe:
            name += f"_num_experts_{self.num_experts}_topk_{self.topk}_type_{self.moe_type}"
        name += f"_num_nodes_{self.nnodes}_gpus_per_node_{self.gpus_per_node}"
        name += f"_TP_{self.tp}_PP_{self.pp}_VPP_{as_given(self.vpp)}_EP_{self.ep}"
        name += f"_ETP_{self.etp}" if self.etp > 1 else ""
        name += f"_CP_{self.cp}" if self.cp > 1 else ""
        return name if self.optimizer == "adam" else f"{name}_OPTIMIZER_{self.optimizer}"


TRAITS = {name: traits(Config, name) for name in Config.model_fields}
# First setting of each section of `--help` and docs/settings.md, in the order of the fields.
SECTIONS = {
    "Launch": "preset",
    "Model": "num_layers",
    "Mixture of experts": "use_moe",
    "Parallelism": "tp",
    "Optimization": "lr",
    "Data": "train_data",
    "Input and output": "run_dir",
    "Reliability and debugging": "fingerprints",
}


def sections() -> dict[str, list[str]]:
    """Names of the settings by section, in order."""
    heading_of = {first: heading for heading, first in SECTIONS.items()}
    found: dict[str, list[str]] = {}
    for name in Config.model_fields:
        if name in heading_of:
            names = found[heading_of[name]] = []
        names.append(name)
    return found
