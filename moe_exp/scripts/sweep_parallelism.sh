#!/usr/bin/env bash
# Runs a few iterations of many parallel layouts and writes measured and predicted memory, seconds per iteration
# and TFLOP/s to sweep.csv, sweep.md and sweep.png in $SWEEP_DIR/$SWEEP_NAME.
#
#   bash moe_exp/scripts/sweep_parallelism.sh                       # ten layouts of the small model on a CPU
#   GPUS="4 8" TPS="1 2" EPS="1 2 4" MBSZS="1 2 4" PRESET=reference bash moe_exp/scripts/sweep_parallelism.sh
#   bash moe_exp/scripts/sweep_parallelism.sh --dry-run             # cases and predictions; runs nothing
#   bash moe_exp/scripts/sweep_parallelism.sh --retry-failed        # continues, and reruns failed cases
#   EXECUTOR=slurm SBATCH="--partition=gpu" NODES="1 2 4" GPUS=8 bash moe_exp/scripts/sweep_parallelism.sh
#   bash moe_exp/scripts/sweep_parallelism.sh --help                # this text
#
# Expected time: about three minutes on two cores without any variables; one or two minutes per case on GPUs.
# Repeat the command to run the remaining cases. Layouts that break a rule or are predicted to run out of memory
# are listed in the table but not run.
#
# Lists   GPUS (per node; processes on a CPU) NODES TPS PPS VPPS (numbers or none) EPS ETPS CPS MBSZS; without
#         a list, the run's setting applies (TP for TPS)
# Sweep   SWEEP_ITERS (10) SWEEP_WARMUP (3, not measured) SWEEP_DIR (sweeps) SWEEP_NAME CASE_TIMEOUT (1800 s)
#         RUN_OOM (false) GPU (profile for the predictions) EXECUTOR (local, slurm) SBATCH (further sbatch
#         options)
# Model   PRESET NUM_LAYERS HIDDEN_SIZE NUM_EXPERTS TOPK SEQ_LEN GBSZ DTYPE RECOMPUTE and so on, as in
#         run_moe_from_scratch.sh
#
# Each is also a flag (--tps, --gbsz); `moe-exp sweep --help` lists all. Paths are relative to the current folder.
set -euo pipefail

# shellcheck source=moe_exp/scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
moe_exp sweep "$@"
