#!/usr/bin/env bash
# Trains a Mixture-of-Experts model (or a dense one) from scratch with Megatron-Core, on GPUs or CPUs.
#
#   bash moe_exp/scripts/run_moe_from_scratch.sh             # on an embedded corpus: PRESET=cpu, or gpu on a GPU
#   TRAIN_DATA=folder/of/text bash moe_exp/scripts/run_moe_from_scratch.sh    # with GPUs, PRESET=reference
#   NUM_EXPERTS=64 EP=4 bash moe_exp/scripts/run_moe_from_scratch.sh --train-iters 1000
#   bash moe_exp/scripts/run_moe_from_scratch.sh --dry-run   # settings, launch command, parameters
#   bash moe_exp/scripts/run_moe_from_scratch.sh --help      # this text
#
# Expected time: about four minutes on two cores with PRESET=cpu. The first call also creates .venv, unless an
# environment with the dependencies is active. Repeat the command to resume the run. Works from any folder.
#
# Settings are environment variables or flags of the same name (NUM_EXPERTS, --num-experts). Common settings:
#   Launch    PRESET MASTER_ADDR MASTER_PORT NNODES NODE_RANK GPUS_PER_NODE (ranks per node; processes without
#             GPUs)
#   Model     NUM_LAYERS HIDDEN_SIZE FFN_HIDDEN_SIZE NUM_HEADS NUM_QUERY_GROUPS SEQ_LEN
#   MoE       USE_MOE NUM_EXPERTS TOPK MOE_TYPE (moe: capacity, dmoe: dropless) MOE_FFN_HIDDEN_SIZE
#             CAPACITY_FACTOR AUX_LOSS_TYPE AUX_LOSS_COEFF Z_LOSS_COEFF EXPERT_BACKEND DISPATCHER
#             SHARED_EXPERT_SIZE MOE_LATENT_SIZE
#   Parallel  TP PP VPP (a number or none) EP ETP CP
#   Training  LR MIN_LR MBSZ GBSZ TRAIN_ITERS WARMUP_ITERS DECAY_ITERS RAMPUP_BATCH_SIZE SEED DTYPE (fp32,
#             bf16, fp16)
#   Data      TRAIN_DATA VALID_DATA TOKENIZER DATA_DIR
#   Output    RUN_DIR RUN_NAME LOAD_DIR SAVE_INTERVAL EXIT_INTERVAL LOG_INTERVAL LOG_TIMERS EVAL_INTERVAL
#             EVAL_ITERS WANDB_PROJECT WANDB_MODE
# All settings with their defaults: docs/settings.md or `moe-exp train --help`. Paths are relative to the
# current folder.
set -euo pipefail

# shellcheck source=moe_exp/scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
moe_exp train "$@"
