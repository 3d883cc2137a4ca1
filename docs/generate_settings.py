"""Writes docs/settings.md from the fields of `moe_exp.config.Config`: PYTHONPATH=. python
docs/generate_settings.py
"""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from moe_exp.config import TRAITS, Config, names_by_section
from moe_exp.config.choices import choices_of
from moe_exp.config.presets import PRESETS

SETTINGS_MD = Path(__file__).with_name("settings.md")

# Settings that Megatron-LM spells like us.
SAME_FLAG = [
    "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "normalization", "norm_epsilon",
    "rotary_base", "attention_dropout", "num_experts", "lr", "min_lr", "lr_decay_style", "train_iters",
    "rampup_batch_size", "optimizer", "sgd_momentum", "muon_momentum", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_eps", "clip_grad", "seed", "save_interval", "exit_interval", "log_interval",
    "eval_interval", "eval_iters", "split", "num_workers", "async_save",
]  # fmt: skip

# Megatron-LM's flag, where its name is not the setting's own name in kebab case.
MEGATRON_FLAGS = {
    "nnodes": "torchrun --nnodes",
    "node_rank": "torchrun --node-rank",
    "gpus_per_node": "torchrun --nproc-per-node",
    "max_restarts": "torchrun --max-restarts",
    "exit_duration": "--exit-duration-in-mins",
    "profile_iters": "--profile --profile-step-start --profile-step-end",
    "memory_snapshot": "--record-memory-history",
    "profile_ranks": "--profile-ranks",
    "check_interval": "--check-weight-hash-across-dp-replicas-interval",
    "log_timers": "--timing-log-level",
    "master_addr": "torchrun --master-addr",
    "master_port": "torchrun --master-port",
    "num_heads": "--num-attention-heads",
    "first_stage_layers": "--decoder-first-pipeline-num-layers",
    "last_stage_layers": "--decoder-last-pipeline-num-layers",
    "pipeline_layers": "--pipeline-model-parallel-layout (with E, t, L)",
    "num_query_groups": "--group-query-attention --num-query-groups",
    "head_dim": "--kv-channels",
    "multi_latent_attention": "--multi-latent-attention",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "seq_len": "--seq-length",
    "activation": "--swiglu, --squared-relu; clamped_swiglu: --quick-geglu --activation-func-clamp-value 7 "
    "--glu-linear-offset 1",
    "add_bias_linear": "--disable-bias-linear (inverse)",
    "qk_norm": "--qk-layernorm (one head at a time)",
    "qkv_bias": "--add-qkv-bias",
    "rotary_fraction": "--rotary-percent",
    "rope_scaling": "--use-rope-scaling (llama3), --position-embedding-type yarn",
    "rope_scaling_factor": "--rope-scaling-factor (llama3), --rotary-scaling-factor (MLA)",
    "rope_original_seq_len": "--original-max-position-embeddings (MLA)",
    "yarn_beta_fast": "--beta-fast (MLA)",
    "yarn_beta_slow": "--beta-slow (MLA)",
    "yarn_mscale": "--mscale (MLA)",
    "yarn_mscale_all_dim": "--mscale-all-dim (MLA)",
    "tie_embeddings": "--untie-embeddings-and-output-weights (inverse)",
    "dropout": "--hidden-dropout",
    "init_std": "--init-method-std",
    "topk": "--moe-router-topk",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_layer_freq": "--moe-layer-freq",
    "first_k_dense": "--moe-layer-freq (as a pattern)",
    "moe_type": "moe: --moe-expert-capacity-factor is given, dmoe: it is not",
    "use_moe": "true: --num-experts is given",
    "shared_expert_gate": "--moe-shared-expert-gate",
    "drop_policy": "--moe-token-drop-policy",
    "router_dtype": "--moe-router-dtype",
    "router_jitter": "--moe-input-jitter",
    "force_routing": "--moe-router-force-load-balancing (balanced)",
    "shared_expert_size": "--moe-shared-expert-intermediate-size",
    "moe_latent_size": "--moe-latent-size",
    "capacity_factor": "--moe-expert-capacity-factor",
    "pad_to_capacity": "--moe-pad-expert-input-to-capacity",
    "router_score": "--moe-router-score-function",
    "router_pre_softmax": "--moe-router-pre-softmax",
    "router_scaling_factor": "--moe-router-topk-scaling-factor",
    "router_bias_update_rate": "--moe-router-bias-update-rate",
    "router_bias_rule": "--moe-router-load-balancing-type quantile_balancing",
    "num_router_groups": "--moe-router-num-groups",
    "router_group_topk": "--moe-router-group-topk",
    "aux_loss_type": "--moe-router-load-balancing-type",
    "aux_loss_coeff": "--moe-aux-loss-coeff",
    "z_loss_coeff": "--moe-z-loss-coeff",
    "expert_backend": "--moe-grouped-gemm",
    "routing_kernels": "--moe-router-fusion --moe-permute-fusion (its own kernels)",
    "dispatcher": "--moe-token-dispatcher-type",
    "cross_entropy": "--cross-entropy-loss-fusion (its own kernels)",
    "upcycle_from": "--moe-use-upcycling --load",
    "upcycle_granularity": "--moe-upcycling-granularity",
    "impl": "--transformer-impl",
    "fp8": "--fp8-format",
    "fp8_recipe": "--fp8-recipe",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-layers-per-virtual-pipeline-stage (layers per chunk; VPP counts chunks)",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "cp": "--context-parallel-size",
    "distributed_optimizer": "--use-distributed-optimizer",
    "overlap": "--overlap-grad-reduce --overlap-param-gather",
    "recompute": "--recompute-granularity",
    "mbsz": "--micro-batch-size",
    "gbsz": "--global-batch-size",
    "warmup_iters": "--lr-warmup-iters",
    "decay_iters": "--lr-decay-iters",
    "lr_groups": "--decoupled-lr --decoupled-min-lr (embedding and output layer)",
    "wsd_decay_iters": "--lr-wsd-decay-iters",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "parametrization": "mup: --use-mup",
    "qk_clip": "--qk-clip --qk-clip-threshold",
    "deterministic": "--deterministic-mode",
    "optimizer_state_dtype": "--exp-avg-dtype --exp-avg-sq-dtype",
    "dtype": "--bf16, --fp16",
    "train_data": "--train-data-path",
    "valid_data": "--valid-data-path",
    "document_mask": " ".join(TRAITS["document_mask"].megatron_flags or ()) + " (both names work here, too)",
    "eod_mask_loss": "--eod-mask-loss",
    "data_dir": "--data-cache-path (indices of DATA_ORDER=megatron)",
    "tokenizer": "--tokenizer-model",
    "run_dir": "--save",
    "run_name": "--wandb-exp-name",
    "keep_every": "--save-retain-interval",
    "load_dir": "--load",
    "wandb_project": "--wandb-project",
}

HEADER = """\
# Settings

This page lists every setting of a training run, with its default, its values and Megatron-LM's flag for the
same thing. All commands that train, plan or submit a run accept these settings.

```bash
export PRESET=reference GPUS_PER_NODE=8 USE_MOE=true NUM_EXPERTS=64 TOPK=1 MOE_TYPE=dmoe
export TP=1 PP=1 VPP=none EP=4
export LR=0.0006 MIN_LR=0.00006 MBSZ=8 GBSZ=64 TRAIN_ITERS=40000 WARMUP_ITERS=1000 DECAY_ITERS=38000
bash moe_exp/scripts/run_moe_from_scratch.sh --dry-run
```

## How settings are read

- A setting is an environment variable (`NUM_EXPERTS=64`), a flag (`--num-experts 64`) or a line of a
  [settings file](#settings-files).
- If a setting is given in several places, the first of these applies: command line, environment, settings
  file, preset, default.
- `--dry-run` prints the resulting settings, where each of them comes from, the torchrun command, the
  parameter report and the learning rate at 0, 25, 50, 75 and 100% of the run. It starts nothing.
- A value that cannot run is refused before anything starts, with exit code 2. Each problem is one line with
  the variable, its value, the rule and a fix; all problems are reported at once.
- A variable that looks like a misspelt setting (`NUM_EXPRTS`) causes a warning. A flag, or a name in a
  settings file, that does not exist is an error, which names the nearest setting: `--learning-rate`,
  `--lr`.
- The last column of the tables names Megatron-LM's flag for the same thing. It is empty if Megatron-LM has
  none.

## Settings files

```bash
moe-exp train --config settings.env                             # lines NAME=value, or YAML
moe-exp train --config runs/NAME --lr 0.001 --run-name other    # a new run with the settings of another
moe-exp train --resume runs/NAME                                # continue a run with its own settings
moe-exp train --resume runs/NAME --train-iters 20000            # the same, with one change
```

`--config FILE` reads settings from a file. The commands `train`, `plan`, `compare`, `ladder`, `mup`, `sweep`
and `slurm`, and the scripts that call them, accept it. FILE is one of these:

- `config.yaml` of a run, or the run folder that has it.
- YAML with some settings, in lower or upper case: `num_experts: 64`. A null value counts as not set, except
  for settings that accept `none`. Put lists into quotes: `moe_layer_freq: "[0]*3+[1]*21"`.
- Lines NAME=value, as `moe-exp plan search --export FILE` and `moe-exp convert from-hf` write them. Values
  are quoted as in a shell. An empty value counts as not set, as in the environment. Variables such as `$HOME`
  are not replaced but refused. `set -a; source FILE; set +a` sets the same values in the environment.

Relative paths start at the folder you are in. The settings of a file that belong to SLURM or to a sweep are
read by `slurm` and `sweep` only. A name that is not a setting, a value that cannot be read and a missing
file are errors of one line each. A warning names the variables of the environment that differ from the file
and are used instead. The launcher reads the file once per start and passes its values to the ranks, so that
a later edit does not change a running job, also not when its ranks restart. On several nodes, every node
reads the file.

`config.yaml` of a run also records where it was started. `--config` does not take over its RUN_NAME,
MASTER_ADDR, MASTER_PORT and NODE_RANK: the new run has the name you give, or one built from its settings. If
that is the run folder of the file itself, the command ends with an error instead of continuing that run.
RUN_DIR, GPUS_PER_NODE and all other settings are taken over. Another PRESET beside such a file is an error,
as the file already has every setting. In all other files, RUN_NAME counts like every setting, so that the
same command again resumes the run.

`--resume RUN_FOLDER` reads the run's own `config.yaml` and continues in that folder; RUN_DIR and RUN_NAME
follow from it. Flags and environment variables win over the file.

## VOCAB_SIZE

If VOCAB_SIZE is in no flag, variable or settings file, it is the size of the tokenizer of the data: the
largest of those in the manifests of TRAIN_DATA and VALID_DATA, and of TOKENIZER. The launcher prints the
value and the reason, `VOCAB_SIZE=1000: vocabulary of data/x_text_document, 1024 with padding`; the dry run
has them in the list of settings. The embedding is padded to a multiple of 128 rows. A run that resumes keeps
the VOCAB_SIZE of its `config.yaml`. Preset and default apply to the embedded corpus, and to data without a
manifest if TOKENIZER is empty. A VOCAB_SIZE that you give must not be smaller than that of data and
TOKENIZER.

## Presets

A preset is a named set of defaults: `PRESET=mixtral-8x7b`. `USE_MOE=false` makes any of them dense. The
values of the presets are in `moe_exp/config/presets.py`. SLURM jobs have `reference` by default, with
CPU_NODES=true `cpu`.

{presets}

## The length of a run

If you set TRAIN_ITERS, the learning rate follows: DECAY_ITERS=0 means that MIN_LR is reached at TRAIN_ITERS,
and the warm-up of the preset is shortened to a tenth of the run if it is longer. The preset `reference`
decays over 38000 of its 40000 iterations; with another TRAIN_ITERS it follows, too. If you set WARMUP_ITERS
or DECAY_ITERS yourself, your value is used; a warning says if the run ends inside the warm-up, or if the
decay ends before 90% or after 110% of the run. Both count batches of GBSZ, so a run with RAMPUP_BATCH_SIZE
ends before MIN_LR unless you set DECAY_ITERS.

## Layouts

GPUS_PER_NODE is the number of ranks on a node: GPUs, or processes on a machine without GPUs. TP, PP, VPP,
EP, ETP and CP work on both kinds of machine, so you can try a layout on a laptop:

```bash
GPUS_PER_NODE=4 TP=2 PP=2 EP=2 TRAIN_ITERS=20 bash moe_exp/scripts/run_moe_from_scratch.sh
```

On a machine with fewer GPUs than ranks, `CUDA_VISIBLE_DEVICES=` in front runs it on the CPU.

With the same MBSZ and GBSZ, the initial weights, the order of the samples and the losses do not depend on
the layout ([architecture.md](architecture.md#what-makes-a-run-the-same-in-every-layout)). On several nodes,
run the same command on each node with NNODES, MASTER_ADDR and that node's NODE_RANK; with SLURM see
[slurm.md](slurm.md).

`PYTHONPATH=. python docs/generate_settings.py` generates this file.
"""

# What docs/settings.md says about each preset.
PRESET_TEXTS = {
    "cpu": "4 layers of width 32, 64 experts, top-4: the default without GPUs",
    "gpu": "8 layers of width 1536, 16 experts, top-2, 0.91 billion parameters, for one GPU "
    "([page](one_gpu.md)): the default with GPUs, without TRAIN_DATA",
    "reference": "24 layers of width 512, 64 experts, top-1, 4.37 billion parameters, for 8 GPUs: the "
    "default with GPUs and TRAIN_DATA",
    "olmoe-1b-7b": "OLMoE, as published",
    "mixtral-8x7b": "Mixtral 8x7B, as published",
    "qwen3-30b-a3b": "Qwen3-30B-A3B, as published",
    "gpt-oss-20b": "gpt-oss-20b, as published",
    "deepseek-v3-like": "DeepSeek-V3",
}


def _values(field: Any) -> str:
    annotation = field.annotation
    if choices := choices_of(field):
        return ", ".join(choices)
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    if isinstance(annotation, type):
        return {int: "integer", float: "number", str: "text", bool: "true, false"}[annotation]
    return "number or values" if str in get_args(annotation) else "integer or none"  # MTP_LOSS_COEFF, VPP


def _default(name: str) -> str:
    field = Config.model_fields[name]
    if field.default_factory:
        return "by machine"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    if isinstance(field.default, bool | None):
        return str(field.default).lower()
    return str(field.default) or "empty"


def _megatron(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in SAME_FLAG else MEGATRON_FLAGS.get(name, "")


def render() -> str:
    """The text of docs/settings.md."""
    presets = "\n".join(
        f"| `{name}` | {PRESET_TEXTS[name]} |" for name in sorted(PRESETS, key=list(PRESET_TEXTS).index)
    )
    lines = [HEADER.replace("{presets}", f"| `PRESET` | model |\n|---|---|\n{presets}")]
    for heading, names in names_by_section().items():
        lines += [
            f"## {heading}\n",
            "| setting | default | values | meaning | Megatron |",
            "|---|---|---|---|---|",
        ]
        for name in names:
            field = Config.model_fields[name]
            cells = [
                name.upper(),
                _default(name),
                _values(field),
                field.description or "",
                _megatron(name),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    SETTINGS_MD.write_text(render(), encoding="utf-8")
