#!/usr/bin/env bash
# Runs a few iterations of each of many layouts, and makes the table of memory, seconds per iteration and
# TFLOP/s that people share, measured beside predicted: sweep.csv, sweep.md and sweep.png in
# $SWEEP_DIR/$SWEEP_NAME.
#
#   bash moe_exp/scripts/sweep_parallelism.sh                       # ten layouts of the small model on a CPU
#   GPUS="4 8" TPS="1 2" EPS="1 2 4" MBSZS="1 2 4" PRESET=reference bash moe_exp/scripts/sweep_parallelism.sh
#   bash moe_exp/scripts/sweep_parallelism.sh --dry-run             # cases and predictions; runs nothing
#   bash moe_exp/scripts/sweep_parallelism.sh --retry-failed        # continues, and repeats what has failed
#   EXECUTOR=slurm SBATCH="--partition=gpu" NODES="1 2 4" GPUS=8 bash moe_exp/scripts/sweep_parallelism.sh
#   bash moe_exp/scripts/sweep_parallelism.sh --help                # this text
#
# Expected time: without any variables about three minutes on two cores; on GPUs a minute or two per case. The
# same command again continues with what is left. Layouts that break a rule, or that are predicted to run out of
# memory, are in the table and do not run.
#
# Lists   GPUS (per node; processes on a CPU) NODES TPS PPS VPPS (numbers or none) EPS ETPS CPS MBSZS; without
#         a list the setting of a run counts, TP for TPS
# Sweep   SWEEP_ITERS (10) SWEEP_WARMUP (3, not measured) SWEEP_DIR (sweeps) SWEEP_NAME CASE_TIMEOUT (1800 s)
#         RUN_OOM (false) GPU (profile for the predictions) EXECUTOR (local, slurm) SBATCH (more options of
#         sbatch)
# Model   PRESET NUM_LAYERS HIDDEN_SIZE NUM_EXPERTS TOPK SEQ_LEN GBSZ DTYPE RECOMPUTE and so on, as in
#         run_moe_from_scratch.sh
#
# Each is a flag, too (--tps, --gbsz); `moe-exp sweep --help` lists all. Relative paths start at the folder
# you are in.
set -euo pipefail

# shellcheck source=moe_exp/scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
moe_exp sweep "$@"
