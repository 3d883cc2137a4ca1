#!/usr/bin/env bash
# Runs the comparisons of docs/recipes.md: what each change of the CPU recipe does, and how both of its models
# were tuned. Resumes; one core each, so two parts can run at the same time.
#   bash bench/recipes.sh changes        about two hours on one core
#   bash bench/recipes.sh balance        half an hour: the coefficient of the balancing loss
#   bash bench/recipes.sh documents      half an hour: documents that do not see each other
#   bash bench/recipes.sh tuning 32      batch size 32 (also 16 and 64); about an hour on one core. A part:
#                                        LEARNING_RATES="15 22" MODELS=dmoe RUN_NAME=more bash bench/recipes.sh tuning 16
#   cp runs/recipe_changes/results.json docs/recipes/changes.json   # tuning_32, balance likewise
#   PYTHONPATH=. python docs/generate_recipes.py
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
  exit 0
fi
export PRESET=cpu GPUS_PER_NODE=1

changes() {
  local dense=USE_MOE=false
  RUN_NAME=recipe_changes TRAIN_ITERS=250 moe-exp compare --repeats 3 --runs dmoe,dense \
    --variant not_normalized:ROUTER_PRE_SOFTMAX=true \
    --variant factor_1:ROUTER_SCALING_FACTOR=1 --variant factor_4:ROUTER_SCALING_FACTOR=4 \
    --variant sigmoid:ROUTER_SCORE=sigmoid --variant sqrtsoftplus:ROUTER_SCORE=sqrtsoftplus \
    --variant first_dense:FIRST_K_DENSE=1 \
    --variant seq_aux:AUX_LOSS_TYPE=seq_aux_loss --variant global_aux:AUX_LOSS_TYPE=global_aux_loss \
    --variant no_aux:AUX_LOSS_COEFF=0 --variant no_z_loss:Z_LOSS_COEFF=0 \
    --variant init_02:INIT_STD=0.02 --variant init_10:INIT_STD=0.1 \
    --variant no_decay:WEIGHT_DECAY=0 --variant warmup_0:WARMUP_ITERS=0 --variant warmup_100:WARMUP_ITERS=100 \
    --variant router_lr_low:ROUTER_LR_MULT=0.5 --variant router_lr_high:ROUTER_LR_MULT=2 \
    --variant expert_lr_low:EXPERT_LR_MULT=0.7 --variant expert_lr_high:EXPERT_LR_MULT=1.4 \
    --variant adam:OPTIMIZER=adam --variant dense_adam:$dense,OPTIMIZER=adam \
    --variant dense_init_02:$dense,INIT_STD=0.02 --variant dense_init_10:$dense,INIT_STD=0.1 \
    --variant dense_no_decay:$dense,WEIGHT_DECAY=0 --variant dense_warmup_0:$dense,WARMUP_ITERS=0
}

balance() {
  RUN_NAME=recipe_balance moe-exp compare --runs dmoe \
    --variant aux_4:AUX_LOSS_COEFF=1e-4 --variant aux_3:AUX_LOSS_COEFF=1e-3 --variant aux_2:AUX_LOSS_COEFF=1e-2 \
    --variant aux_1:AUX_LOSS_COEFF=1e-1
}

# Documents that do not see each other, and whole ones. With EOD_MASK_LOSS the loss is over fewer tokens, so
# that eod_* compare with each other only.
documents() {
  RUN_NAME=recipe_documents TRAIN_ITERS=250 moe-exp compare --repeats 3 --runs dmoe,dense \
    --variant masked:DOCUMENT_MASK=true --variant dense_masked:USE_MOE=false,DOCUMENT_MASK=true \
    --variant eod:EOD_MASK_LOSS=true --variant eod_masked:EOD_MASK_LOSS=true,DOCUMENT_MASK=true \
    --variant eod_packed:EOD_MASK_LOSS=true,DOCUMENT_PACKING=best_fit \
    --variant eod_masked_packed:EOD_MASK_LOSS=true,DOCUMENT_MASK=true,DOCUMENT_PACKING=best_fit
}

# The tokens of 1,000 iterations of 32 samples, at each batch size.
tuning() {
  local batch=$1 lr model is_moe own=()
  for lr in ${LEARNING_RATES:-10 15 20 22 33}; do
    for model in ${MODELS:-dense dmoe}; do
      [[ $model == dense ]] && is_moe=false || is_moe=true
      own+=(--variant "${model}_$lr:USE_MOE=$is_moe,LR=${lr}e-3,MIN_LR=${lr}e-4")
    done
  done
  local iterations=$((1000 * 32 / batch))
  RUN_NAME=${RUN_NAME:-recipe_tuning_$batch} GBSZ=$batch TRAIN_ITERS=$iterations WARMUP_ITERS=$((iterations / 10)) \
    EVAL_INTERVAL=$((iterations / 4)) EVAL_ITERS=$((512 / batch)) moe-exp compare "${own[@]}"
}

"$@"
