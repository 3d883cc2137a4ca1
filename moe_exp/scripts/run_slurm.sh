#!/usr/bin/env bash
# Submits a training run to SLURM as a chain of jobs, each of which resumes from the newest checkpoint.
#
#   export NNODES=4 GPUS_PER_NODE=8 PARTITION=gpu
#   bash moe_exp/scripts/run_slurm.sh --dry-run                             # the sbatch file; submits nothing
#   TIME_LIMIT=1-00:00:00 NUM_JOBS=22 bash moe_exp/scripts/run_slurm.sh     # three weeks
#   AFTER=123456 NUM_JOBS=5 bash moe_exp/scripts/run_slurm.sh               # five more jobs after job 123456
#   bash moe_exp/scripts/run_slurm.sh --help                                # this text
#
# Expected time: a few seconds. The first call also creates .venv, unless an environment with the dependencies
# is active. Run it on a login node, in a folder shared with the nodes. The sbatch file and all logs are in
# $RUN_DIR/$RUN_NAME/slurm.
#
# Jobs      NUM_JOBS (1) CHAIN (array, dependency) AFTER (ids to wait for) TIME_LIMIT (24:00:00)
#           SIGNAL_SECONDS (600: time before the limit at which a job saves) REQUEUE (true) MAX_FAILURES (3:
#           consecutive failures without a new checkpoint after which the chain ends) RETRY_SECONDS (60: wait
#           before a retry, times the number of consecutive failures)
# Where     NNODES GPUS_PER_NODE CPU_NODES (false; true: nodes without GPUs) PARTITION ACCOUNT QOS CONSTRAINT
#           NICE EXCLUSIVE (true) CPUS_PER_TASK EXCLUDE_FILE (RUN_DIR/exclude_nodes.txt) JOB_NAME EXTRA_SBATCH
# Software  MODULES ("cuda/12.6 nccl") SETUP (a file to source) CONTAINER (an image: pyxis and enroot, or a
#           .sif of apptainer) CONTAINER_RUNTIME CONTAINER_MOUNTS CONTAINER_PYTHON PASS_ENV ("WANDB_API_KEY":
#           passed from this shell, never written to a file)
# Run       PRESET NUM_LAYERS NUM_EXPERTS TRAIN_DATA RUN_NAME and so on, as in run_moe_from_scratch.sh
#
# Each is also a flag (--time-limit, --num-experts); `moe-exp slurm --help` lists all. docs/slurm.md explains
# the steps from a dry run to a chain of jobs.
set -euo pipefail

# shellcheck source=moe_exp/scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
moe_exp slurm "$@"
