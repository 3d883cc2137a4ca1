import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.whole_runs import SMALL
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.presets import PRESETS


def cpu(**values) -> Config:
    return load_config(SMALL | {"gpus_per_node": 1, "mbsz": 8, "gbsz": 32} | values, {})


def problems(settings: str) -> list[str]:
    """Of settings written as in a shell."""
    try:
        return list(cpu(**dict(word.split("=", 1) for word in shlex.split(settings))).problems())
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_presets_have_no_problems(preset, ranks):
    data = {} if preset in ("cpu", "reference") else {"train_data": "a", "valid_data": "b"}
    config = load_config({"preset": preset, "gpus_per_node": ranks, "gbsz": 3072} | data, {})
    assert list(config.problems()) == []


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_accepted_layouts_divide_evenly(data):
    def size(*sizes):
        return data.draw(st.sampled_from(sizes))

    c = cpu(
        tp=size(1, 2, 4), pp=size(1, 2, 4), vpp=size(None, 1, 2, 3), ep=size(1, 2, 3, 4), etp=size(1, 2),
        cp=size(1, 2), mbsz=size(1, 2, 3), gpus_per_node=size(1, 2, 4, 6, 8, 16),
        gbsz=size(1, 8, 12, 16, 24, 32), num_layers=size(2, 4, 6, 8), num_experts=size(4, 6, 8),
        num_heads=size(4, 8), num_query_groups=size(1, 2, 4), seq_len=size(6, 8, 16, 24),
    )  # fmt: skip
    even = (
        c.world_size % (c.tp * c.pp * c.cp) == 0
        and c.world_size % (c.etp * c.ep * c.pp) == 0
        and c.num_experts % c.ep == 0
        and c.num_query_groups % c.tp == 0
        and c.num_layers % (c.pp * (c.vpp or 1)) == 0
        and c.gbsz % (c.mbsz * max(1, c.data_parallel_size)) == 0
        and (c.cp == 1 or c.seq_len % (2 * c.cp) == 0)
        and c.seq_len // c.cp % c.tp == 0
        and (c.vpp is None or (c.pp > 1 and c.vpp > 1 and c.num_microbatches % c.pp == 0))
    )
    assert (list(c.problems()) == []) == even


# Settings, and how the one line begins that refuses them: ... stands for any text. A fix is given where it is
# computed.
MLA = "multi_latent_attention=true"
MUP = "parametrization=mup mup_base_hidden_size=64"
SAVES = "save_interval=1000 eval_interval=500"
WSD_S = "lr_decay_style=WSD-S wsd_decay_iters=30"
REFUSED = [
    # Values that cannot be read
    ("expert_backend=trition", "EXPERT_BACKEND=trition: must be 'auto', ...'"),
    ("deterministic=maybe", "DETERMINISTIC=maybe: must be true or false"),
    ("num_layers=-4", "NUM_LAYERS=-4: must be greater than or equal to 1"),
    ("num_experts=many", "NUM_EXPERTS=many: must be a valid integer"),
    ("lr=nan", "LR=nan: must be a finite number"),
    ("lr=0", "LR=0: must be greater than 0"),
    ("dtype=int8", "DTYPE=int8: must be 'fp32', 'bf16' or 'fp16'"),
    ("master_port=70000", "MASTER_PORT=70000: must be less than or equal to 65535"),
    ("preset=gpt5", "PRESET=gpt5: unknown preset"),
    ("moe_layer_freq=[0]*x", "MOE_LAYER_FREQ=[0]*x: must be a positive number, a ratio n:m, or a list "),
    ("window_pattern=0", "WINDOW_PATTERN=0: must be a positive number, a ratio n:m, or a list "),
    ("window_pattern=3:0", "WINDOW_PATTERN=3:0: must be a positive number, a ratio n:m, or a list "),
    ("moe_layer_freq=__import__('os')", "MOE_LAYER_FREQ=...must be a positive number"),
    ("aux_loss_type=aux_los", "AUX_LOSS_TYPE=aux_los: aux_los is not a loss"),
    (
        "aux_loss_type=aux_loss,none",
        "AUX_LOSS_TYPE=aux_loss,none: must not repeat a loss; none and sinkhorn cannot be",
    ),
    (
        "aux_loss_type=aux_loss,aux_loss",
        "AUX_LOSS_TYPE=aux_loss,aux_loss: must not repeat a loss; none and sinkhorn cannot be",
    ),
    ("aux_loss_coeff=much", "AUX_LOSS_COEFF=much: must be a number of at least 0"),
    # Beyond all bounds
    ("num_layers=1000000000", "NUM_LAYERS=1000000000: must be less than or equal to 10000"),
    ("num_experts=1000000000", "NUM_EXPERTS=1000000000: must be less than or equal to 1048576"),
    ("num_heads=1000000000", "NUM_HEADS=1000000000: must be less than or equal to 65536"),
    (
        "moe_layer_freq=[0,1]*200000000",
        "MOE_LAYER_FREQ=[0,1]*200000000: describes 400000000 layers, more than the limit of 10000",
    ),
    (
        "pipeline_layers=9999*9999,1*2",
        "PIPELINE_LAYERS=9999*9999,1*2: describes 10001 stages, more than the limit of 10000",
    ),
    ("gbsz=1000000000 rampup_batch_size='64 64 1000'", "...: must have at most 10000 steps and "),
    ("run_dir=~no_such_user/x", "RUN_DIR=~no_such_user/x: names the home folder of an unknown user"),
    ("tokenizer=" + "x" * 300, "TOKENIZER=xx...: must have file names of at most 255 bytes"),
    # Model
    ("num_heads=6 hidden_size=132 num_query_groups=4", "NUM_QUERY_GROUPS=4: ...NUM_HEADS=6...1, 2, 3, 6."),
    ("hidden_size=130 num_query_groups=4", "NUM_HEADS=4: must divide HIDDEN_SIZE=130"),
    ("head_dim=33", "HEAD_DIM=33: rotary ... must be even. Fix: set HEAD_DIM to 32 or 34."),
    ("qk_norm_scope=all", "QK_NORM_SCOPE=all: has no effect while QK_NORM=false"),
    (
        "qk_norm=true qk_norm_scope=all normalization=LayerNorm",
        "QK_NORM_SCOPE=all: is not implemented for NORMALIZATION=LayerNorm",
    ),
    ("qk_norm_epsilon=1e-6", "QK_NORM_EPSILON=1e-06: has no effect while QK_NORM=false"),
    ("norm_bias=false", "NORM_BIAS=false: has no effect while NORMALIZATION=RMSNorm"),
    ("norm_bias=false normalization=LayerNorm impl=te", "NORM_BIAS=false: is not possible with Transformer"),
    ("norm_placement=post impl=te", "NORM_PLACEMENT=post: is not possible with Transformer Engine"),
    (
        "qk_norm=true qk_norm_epsilon=1e-6 impl=te",
        "QK_NORM_EPSILON=1e-06: is not possible with Transformer Engine",
    ),
    ("qk_norm=true qk_norm_scope=rotated impl=te", "QK_NORM_SCOPE=rotated: is not possible with Transformer"),
    ("router_group_best=2", "ROUTER_GROUP_BEST=2: must be at most the number of experts in a group"),
    ("norm_placement=post recompute_modules=norm", "RECOMPUTE_MODULES=norm: ...NORM_PLACEMENT=post"),
    (f"{MLA} attention_multiplier=0.1", "ATTENTION_MULTIPLIER=0.1: Megatron's MULTI_LATENT_ATTENTION sets"),
    (
        "rotary_fraction=0.1",
        "ROTARY_FRACTION=0.1: rotates 3 of the 32 channels per head, but rotary position",
    ),
    ("rotary_fraction=0.5 rope_scaling=yarn rope_scaling_factor=4", "ROTARY_FRACTION=0.5: ...YaRN"),
    ("rope_scaling=yarn", "ROPE_SCALING=yarn: has no effect while ROPE_SCALING_FACTOR=1"),
    ("rope_scaling=llama3 rope_scaling_factor=8 rope_original_seq_len=4096", "ROPE_ORIGINAL_SEQ_LEN=4096: "),
    ("rope_scaling_factor=8", "ROPE_SCALING_FACTOR=8.0: has no effect while ROPE_SCALING=none"),
    ("rope_scaling=llama3 rope_scaling_factor=8 yarn_beta_fast=16", "YARN_BETA_FAST=16.0: ...SCALING=llama3"),
    ("rope_scaling=yarn rope_scaling_factor=8 yarn_beta_fast=0.5", "YARN_BETA_FAST=0.5: ...YARN_BETA_SLOW=1"),
    ("kv_lora_rank=64", "KV_LORA_RANK=64: has no effect while MULTI_LATENT_ATTENTION=false...=512."),
    (f"{MLA} head_dim=32", "HEAD_DIM=32: MULTI_LATENT_ATTENTION uses QK_HEAD_DIM, QK_POS_EMB_HEAD_DIM"),
    (
        f"{MLA} qk_norm=true qk_norm_scope=all",
        "QK_NORM_SCOPE=all: with MULTI_LATENT_ATTENTION, QK_NORM normalizes the",
    ),
    ("window_query_groups=2", "WINDOW_QUERY_GROUPS=2: has no effect while SLIDING_WINDOW=0"),
    ("window_query_groups=3 sliding_window=8", "WINDOW_QUERY_GROUPS=3: must divide NUM_HEADS=4"),
    ("value_head_dim=33", "VALUE_HEAD_DIM=33: must be at most the head size 32"),
    (f"{MLA} value_head_dim=16", "VALUE_HEAD_DIM=16: MULTI_LATENT_ATTENTION uses V_HEAD_DIM"),
    (f"{MLA} qkv_bias=true", "QKV_BIAS=true: ... have no biases"),
    (
        f"{MLA} rotary_fraction=0.5",
        "ROTARY_FRACTION=0.5: with MULTI_LATENT_ATTENTION, QK_POS_EMB_HEAD_DIM sets the",
    ),
    (
        f"{MLA} rope_scaling=llama3 rope_scaling_factor=8",
        "ROPE_SCALING=llama3: Megatron's MULTI_LATENT_ATTENTION only supports YaRN",
    ),
    (
        f"{MLA} qk_pos_emb_head_dim=7",
        "QK_POS_EMB_HEAD_DIM=7: rotary position embedding rotates pairs of channels, so the number",
    ),
    ("add_bias_linear=true shared_expert_size=64", "ADD_BIAS_LINEAR=true: Megatron's shared expert has"),
    ("add_bias_linear=true etp=2 gpus_per_node=2", "ADD_BIAS_LINEAR=true: ... only with ETP=1"),
    ("dispatcher=deepep dtype=bf16", "DISPATCHER=deepep: ... EP=1 and ETP=1"),
    ("dispatcher=deepep ep=2 gpus_per_node=2 dtype=fp32", "DISPATCHER=deepep: requires DTYPE=bf16, not fp32"),
    ("dispatcher=deepep ep=2 gpus_per_node=2 dtype=bf16 deterministic=true", "DISPATCHER=deepep: ... NaN "),
    ("window_pattern=2", "WINDOW_PATTERN=2: has no effect while SLIDING_WINDOW=0. Fix: set SLIDING_WINDOW"),
    ("sliding_window=8 window_pattern=0,1", "WINDOW_PATTERN=0,1: has 2 layers, but NUM_LAYERS=4"),
    ("rotary_layers=windowed", "ROTARY_LAYERS=windowed: no layer has a window while SLIDING_WINDOW=0"),
    ("attention_sinks=windowed", "ATTENTION_SINKS=windowed: no layer has a window...or ATTENTION_SINKS=none"),
    ("sliding_window=8 attention_dropout=0.1", "ATTENTION_DROPOUT=0.1: cannot be combined with SLIDING_WIN"),
    (
        "attention_softcap=9 attention_backend=sdpa",
        "ATTENTION_BACKEND=sdpa: supports neither ATTENTION_SINKS",
    ),
    (
        "attention_backend=flex attention_dropout=0.1",
        "ATTENTION_DROPOUT=0.1: cannot be...ATTENTION_BACKEND=flex",
    ),
    ("rotary_layers=3:1 mtp_num_layers=1", "MTP_NUM_LAYERS=1: cannot be combined with SLIDING_WINDOW or ROT"),
    ("moe_layer_freq=0,1", "MOE_LAYER_FREQ=0,1: has 2 layers, but NUM_LAYERS=4... list of 4 "),
    ("moe_layer_freq=[0]*4", "MOE_LAYER_FREQ=[0]*4: leaves no MoE layer among NUM_LAYERS=4"),
    ("first_k_dense=4", "FIRST_K_DENSE=4: leaves no MoE layer among NUM_LAYERS=4"),
    (
        "capacity_factor=2.0",
        "CAPACITY_FACTOR=2.0: only applies to MOE_TYPE=moe; MOE_TYPE=dmoe has no capacity",
    ),
    (
        "token_rounding=64 moe_type=moe",
        "TOKEN_ROUNDING=64: only applies to MOE_TYPE=dmoe; with MOE_TYPE=moe, the capacity",
    ),
    (
        "token_rounding=1000000",
        "TOKEN_ROUNDING=1000000: must be at most 2048, the token-expert pairs of a micro-",
    ),
    ("shared_expert_gate=true", "SHARED_EXPERT_GATE=true: has no effect without a shared expert"),
    ("moe_latent_size=129", "MOE_LATENT_SIZE=129: must be at most HIDDEN_SIZE=128"),
    (
        f"{MUP} moe_latent_size=64",
        "PARAMETRIZATION=mup: cannot be combined with MOE_LATENT_SIZE=64: no muP rule covers",
    ),
    (
        "moe_latent_size=6 expert_backend=torch",
        "MOE_LATENT_SIZE=6: EXPERT_BACKEND=torch requires row sizes divisible by 16 bytes,",
    ),
    ("router_normalize=true", "ROUTER_NORMALIZE=true: ...TOPK=1"),
    (
        "aux_loss_type=aux_loss,seq_aux_loss aux_loss_coeff=1,2,3",
        "AUX_LOSS_COEFF=1,2,3: has 3 weights, but 2 ",
    ),
    ("aux_loss_type=sinkhorn router_bias_update_rate=0.1", "AUX_LOSS_TYPE=sinkhorn: ...BIAS_UPDATE_RATE"),
    ("router_bias_rule=quantile router_bias_update_rate=0.1", "ROUTER_BIAS_UPDATE_RATE=0.1: ...quantile"),
    ("router_bias_rule=quantile num_router_groups=4 router_group_topk=2", "ROUTER_BIAS_RULE=...ROUTER_GROUP"),
    ("router_bias_rule=quantile aux_loss_type=sinkhorn", "ROUTER_BIAS_RULE=quantile: ...TYPE=sinkhorn"),
    ("router_score=relu", "ROUTER_SCORE=relu: requires the loss l1, which limits the number of experts"),
    ("aux_loss_type=l1", "AUX_LOSS_TYPE=l1: l1 requires ROUTER_SCORE=relu"),
    ("router_score=relu aux_loss_type=l1 router_bias_update_rate=0.1", "ROUTER_SCORE=relu: ...UPDATE_RATE."),
    ("router_score=relu aux_loss_type=l1 null_experts=2", "ROUTER_SCORE=relu: ... with NULL_EXPERTS."),
    ("router_top_p=0.5 router_bias_rule=quantile", "ROUTER_TOP_P=0.5: ... with ROUTER_BIAS_RULE=quantile."),
    ("null_experts=2 force_routing=zipf", "NULL_EXPERTS=2: cannot be combined with FORCE_ROUTING=zipf"),
    (
        "aux_loss_type=sinkhorn force_routing=zipf",
        "FORCE_ROUTING=zipf: cannot be combined with AUX_LOSS_TYPE=sinkhorn: both choose",
    ),
    # muP
    (
        "parametrization=mup mup_base_hidden_size=0",
        "MUP_BASE_HIDDEN_SIZE=0: PARAMETRIZATION=mup requires the sizes of a base model",
    ),
    (f"{MUP} optimizer=muon distributed_optimizer=false", "PARAMETRIZATION=mup: ...OPTIMIZER=muon"),
    (
        f"{MUP} tie_embeddings=true",
        "PARAMETRIZATION=mup: cannot be combined with TIE_EMBEDDINGS=true: embedding and",
    ),
    # Experts and router
    ("ep=3 gpus_per_node=3 gbsz=48", "EP=3: must divide NUM_EXPERTS=8... set EP to one of 1, 2, 4,"),
    ("topk=9", "TOPK=9: must be at most NUM_EXPERTS=8... set TOPK to at most"),
    ("etp=2 gpus_per_node=2 moe_ffn_hidden_size=99", "ETP=2: must divide MOE_FFN_HIDDEN_SIZE=99"),
    ("etp=2 gpus_per_node=2 ffn_hidden_size=99", "ETP=2: must divide FFN_HIDDEN_SIZE=99"),
    ("dispatcher=local ep=2 gpus_per_node=2", "DISPATCHER=local: requires every expert ... EP=2 and ETP=1"),
    ("router_pre_softmax=false", "ROUTER_PRE_SOFTMAX=false: ...TOPK=1"),
    ("num_router_groups=4", "NUM_ROUTER_GROUPS=4: has no effect while ROUTER_GROUP_TOPK=0"),
    ("router_group_topk=2", "ROUTER_GROUP_TOPK=2: has no effect while NUM_ROUTER_GROUPS=0"),
    ("num_router_groups=3 router_group_topk=2", "NUM_ROUTER_GROUPS=3: must divide NUM_EXPERTS=8"),
    ("num_router_groups=2 router_group_topk=3", "ROUTER_GROUP_TOPK=3: must be from 1 to NUM_ROUTER_GROUPS=2"),
    (
        "num_router_groups=4 router_group_topk=1 topk=3",
        "TOPK=3: must be at most 2, the number of experts in ROUTER_GROUP_TOPK=1 groups",
    ),
    ("expert_backend=torch ffn_hidden_size=258", "FFN_HIDDEN_SIZE=258: EXPERT_BACKEND=torch ... 256 or 260"),
    ("expert_backend=torch dtype=bf16 ffn_hidden_size=260", "FFN_HIDDEN_SIZE=260: ... 256 or 264, "),
    (
        "expert_backend=grouped_gemm dtype=fp32",
        "EXPERT_BACKEND=grouped_gemm: only supports DTYPE=bf16, not fp32",
    ),
    ("expert_backend=torch etp=2 gpus_per_node=2 ffn_hidden_size=260", "FFN_HIDDEN_SIZE=260: ... 256 or 264"),
    # Parallelism
    (
        "tp=2 gpus_per_node=3",
        "GPUS_PER_NODE=3: 3 ranks (NNODES * GPUS_PER_NODE) must be... set GPUS_PER_NODE to 2 or 4, or change TP, PP,",  # noqa: E501
    ),
    (
        "ep=4 gpus_per_node=2",
        "GPUS_PER_NODE=2: 2 ranks (NNODES * GPUS_PER_NODE) must be... set GPUS_PER_NODE to 4, or change ETP, EP,",  # noqa: E501
    ),
    ("node_rank=1", "NODE_RANK=1: must be less than NNODES=1... set NODE_RANK to 0, or NNODES to at least"),
    ("node_rank=3 nnodes=2", "NODE_RANK=3: must be less than NNODES=2"),
    ("tp=4 num_query_groups=2 gpus_per_node=4", "TP=4: must divide NUM_QUERY_GROUPS=2"),
    ("tp=2 shared_expert_size=99 gpus_per_node=2", "TP=2: ...SHARED_EXPERT_SIZE=99...1, 3, 9, 11, 33, 99."),
    ("tp=2 seq_len=255 gpus_per_node=2", "TP=2: SEQ_LEN/CP=255 ... Fix: set SEQ_LEN to 252 or 256."),
    (
        "cp=2 seq_len=254 gpus_per_node=2",
        "CP=2: SEQ_LEN=254 must be a multiple of 2*CP... set SEQ_LEN to 252 or",
    ),
    ("tp=2 use_moe=false ffn_hidden_size=99 gpus_per_node=2", "TP=2: must divide FFN_HIDDEN_SIZE=99"),
    # Pipeline
    ("pp=3 gpus_per_node=3", "PP=3: must divide NUM_LAYERS=4"),
    (
        "first_stage_layers=2",
        "FIRST_STAGE_LAYERS=2: requires several pipeline stages, but PP=1... set PP to at least 2, or",
    ),
    ("pp=2 first_stage_layers=1 last_stage_layers=2 gpus_per_node=2", "FIRST_STAGE_LAYERS=1: ...one...to 0"),
    ("pp=4 last_stage_layers=2 gpus_per_node=4", "LAST_STAGE_LAYERS=2: leaves 2 of NUM_LAYERS=4 layers"),
    ("pp=2 vpp=2 first_stage_layers=1 gpus_per_node=2", "VPP=2: must divide the 1 layers of a stage"),
    ("pp=2 pipeline_layers=1,3 last_stage_layers=3 gpus_per_node=2", "LAST_STAGE_LAYERS=3: ...LAYERS=1,3"),
    ("pp=2 pipeline_layers=1*2,2 gpus_per_node=2", "PIPELINE_LAYERS=1*2,2: has 3 stages, ... or set PP=3."),
    (
        "pp=2 pipeline_layers=2,3 gpus_per_node=2",
        "PIPELINE_LAYERS=2,3: adds up to 5 layers, but NUM_LAYERS=4",
    ),
    (
        "pp=4 pipeline_layers=2,0,2,0 gpus_per_node=4",
        "PIPELINE_LAYERS=2,0,2,0: every stage except the first (embedding) and the last (output",
    ),
    ("pp=2 vpp=2 pipeline_layers=0,4 gpus_per_node=2", "VPP=2: requires that no pipeline stage is empty"),
    (
        "mtp_num_layers=1 tie_embeddings=true pp=2 gpus_per_node=2",
        "MTP_NUM_LAYERS=1: cannot be combined with TIE_EMBEDDINGS=true and PP=2: ",
    ),
    ("mtp_num_layers=1 pp=2 pipeline_layers=4,0 gpus_per_node=2", "MTP_NUM_LAYERS=1: requires a layer in"),
    (
        "mtp_num_layers=1 fp8=hybrid expert_backend=te dtype=bf16",
        "MTP_NUM_LAYERS=1: cannot be combined with FP8=hybrid in Transformer Engine",
    ),
    ("mtp_loss_coeff=0.1", "MTP_LOSS_COEFF=0.1: has no effect while MTP_NUM_LAYERS=0"),
    ("mtp_num_layers=1 mtp_loss_coeff=0.3:8,0.2:5,0.1", "MTP_LOSS_COEFF=...values end at iterations 8, 5"),
    ("vpp=2", "VPP=2: requires several pipeline stages, but PP=1... set VPP=none, or set PP to at least"),
    ("pp=2 vpp=3 gpus_per_node=2", "VPP=3: must divide NUM_LAYERS/PP=2... set VPP to one of 1,"),
    ("pp=2 vpp=1 gpus_per_node=2", "VPP=1: must be at least 2, as one model chunk per rank cannot"),
    ("pp=2 vpp=2 gbsz=24 gpus_per_node=2", "VPP=2: requires a multiple of PP=2 micro-batches, but GBSZ /"),
    # Optimizer
    ("qk_clip=100", "QK_CLIP=100.0: requires whole heads, but the distributed optimizer splits them"),
    ("qk_clip=100 qk_norm=true distributed_optimizer=false", "QK_CLIP=100.0: cannot be... with QK_NORM=true"),
    (
        "optimizer=muon",
        "DISTRIBUTED_OPTIMIZER=true: OPTIMIZER=muon requires whole matrices, but the distributed",
    ),
    ("optimizer=sgd optimizer_state_dtype=bf16", "OPTIMIZER_STATE_DTYPE=bf16: ...Adam, but OPTIMIZER=sgd"),
    (
        "optimizer_state_dtype=bf16 adam_beta2=0.999",
        "ADAM_BETA2=0.999: is too close to 1 for OPTIMIZER_STATE_DTYPE=bf16: rounding",
    ),
    (
        "main_params=remainder dtype=fp32",
        "MAIN_PARAMS=remainder: requires DTYPE=bf16, not fp32... set DTYPE=bf",
    ),
    (
        "main_params=remainder dtype=bf16 optimizer=sgd",
        "MAIN_PARAMS=remainder: requires OPTIMIZER=adam, not sgd... set OP",
    ),
    (
        "main_params=remainder dtype=bf16 qk_clip=100 distributed_optimizer=false",
        "MAIN_PARAMS=remainder: requires QK_CLIP=0, not 100.0. Fix: set QK_CLIP=0, or MAIN_PARAMS=fp32.",
    ),
    ("grad_dtype=bf16 dtype=fp16", "GRAD_DTYPE=bf16: requires DTYPE=bf16, not fp16... or GRAD_DTYPE=fp32."),
    # Recomputation
    ("recompute_modules=norm,mlp", "RECOMPUTE_MODULES=norm,mlp: mlp is not one of norm, mla_up_proj"),
    (
        "recompute_modules=mla_up_proj",
        "RECOMPUTE_MODULES=mla_up_proj: ...without MULTI_LATENT_ATTENTION=true",
    ),
    (
        "recompute_modules=shared_expert,norm",
        "RECOMPUTE_MODULES=shared_expert,norm: ...or set SHARED_EXPERT_S",
    ),
    (
        "recompute_modules=norm recompute=moe_act",
        "RECOMPUTE_MODULES=norm: ...RECOMPUTE=moe_act... RECOMPUTE=none",
    ),
    ("recompute_modules=norm impl=te", "RECOMPUTE_MODULES=norm: ...remove norm, or set IMPL=local."),
    (
        "recompute_modules=experts fp8=hybrid expert_backend=te dtype=bf16",
        "RECOMPUTE_MODULES=experts: with FP8=hybrid, Transformer Engine cannot recompute",
    ),
    (
        "offload_optimizer=true optimizer=adam dtype=fp16",
        "OFFLOAD_OPTIMIZER=true: requires DTYPE=bf16, not fp16",
    ),
    (
        "offload_optimizer=true dtype=bf16 optimizer=muon distributed_optimizer=false",
        "OFFLOAD_OPTIMIZER=true: requires OPTIMIZER=adam, not muon. Fix: set OPTIMIZER=adam, or OFFL",
    ),
    (
        "offload_optimizer=true dtype=bf16 optimizer=adam main_params=remainder",
        "OFFLOAD_OPTIMIZER=true: requires fp32 main weights, but MAIN_PARAMS=rem... set MAIN_PARAMS=auto",
    ),
    ("ema_decay=0.9 average_every=11 train_iters=10 warmup_iters=0", "AVERAGE_EVERY=11: ... to at most 10."),
    # Batches
    ("gbsz=30", "GBSZ=30: must be a multiple of MBSZ*DP=8*1=8... set GBSZ to 24 or 32, or MBSZ to"),
    ("gbsz=4", "GBSZ=4: must be a multiple of MBSZ*DP=8*1=8... set GBSZ to 8, or MBSZ to"),
    ("rampup_batch_size='8 8'", "RAMPUP_BATCH_SIZE=8 8: must be three positive whole numbers"),
    ("rampup_batch_size='8 0 100'", "RAMPUP_BATCH_SIZE=8 0 100: must be three positive whole numbers"),
    ("rampup_batch_size='4 4 100'", "RAMPUP_BATCH_SIZE=4 4 100: step 1 of 8 has a batch of 4, no"),
    ("rampup_batch_size='16 4 100'", "RAMPUP_BATCH_SIZE=16 4 100: step 2 of 5 has a batch of 20, no"),
    (
        "rampup_batch_size='40 8 100'",
        "RAMPUP_BATCH_SIZE=40 8 100: GBSZ=32 must be START plus a multiple of INCREMENT",
    ),
    (
        "rampup_batch_size='8 16 100'",
        "RAMPUP_BATCH_SIZE=8 16 100: GBSZ=32 must be START plus a multiple of INCREMENT",
    ),
    ("rampup_batch_size='8 8 100' pp=2 vpp=2 gpus_per_node=2", "RAMPUP_BATCH_SIZE=...step 1 of 4 ...VPP=2 "),
    ("warmup_iters=300", "WARMUP_ITERS=300: must be less than TRAIN_ITERS=300, the end of the decay"),
    ("decay_iters=10", "WARMUP_ITERS=20: must be less than DECAY_ITERS=10, the end of the decay"),
    ("lr=0.0001", "MIN_LR=0.0003: must be at most LR=0.0001... lower MIN_LR, for example to"),
    ("lr_decay_style=WSD", "WSD_DECAY_ITERS=0: must be from 1 to TRAIN_ITERS=300 with LR_DECAY_STYLE=WSD"),
    # Learning rate
    ("lr_decay_style=cosin", "LR_DECAY_STYLE=cosin: must be 'cosine', ... or 'power'"),
    (
        "lr_decay_style=constant:80%,line",
        "LR_DECAY_STYLE=constant:80%,line: line cannot be the style of a STYLE:UNTIL piece",
    ),
    (
        "lr_decay_style=constant:80,WSD",
        "LR_DECAY_STYLE=constant:80,WSD: must be a named style, or comma-separated STYLE:UNTIL pieces",
    ),
    ("lr_decay_style=constant,linear", "LR_DECAY_STYLE=constant,linear: only the last STYLE:UNTIL piece "),
    (
        "lr_decay_style=constant:120%,linear",
        "LR_DECAY_STYLE=constant:120%,linear: fractions must be above 0% and at most 100%",
    ),
    (
        "lr_decay_style=linear:90%:101%",
        "LR_DECAY_STYLE=linear:90%:101%: the RATE of a STYLE:UNTIL:RATE piece must not",
    ),
    (
        "lr_decay_style=constant:80%,linear:200",
        "LR_DECAY_STYLE=...: piece 2 ends at iteration 200, not after ",
    ),
    ("lr_decay_style=constant:20,linear", "...: piece 1 ends at iteration 20, not after the warm-up, which"),
    ("lr_decay_style=constant:20%,linear:301", "...: the last piece ends at iteration 301, after"),
    (
        "lr_decay_style=inverse-square-root warmup_iters=0",
        "WARMUP_ITERS=0: must be positive: LR_DECAY_STYLE=inverse-square-root is LR *",
    ),
    (
        "lr_decay_style=inverse-square-root:90%,linear warmup_iters=0",
        "WARMUP_ITERS=0: must be positive: an inverse square root decays from the end",
    ),
    (
        "lr_decay_style=power wsd_decay_iters=301",
        "WSD_DECAY_ITERS=301: must be from 0 to TRAIN_ITERS=300 with LR_DECAY_STYLE=power",
    ),
    ("lr_power_b=0.5", "LR_POWER_B=0.5: ... less than 0"),
    (WSD_S, "WSD_DECAY_ENDS=: LR_DECAY_STYLE=WSD-S requires the ends of all decays"),
    (f"{WSD_S} wsd_decay_ends=49,200", "WSD_DECAY_ENDS=49,200: ...to iteration 49 begins at 19, before "),
    (f"{WSD_S} wsd_decay_ends=50%,60%,50", "WSD_DECAY_ENDS=...to iteration 50 begins at 20, ... at 180."),
    (f"{WSD_S} wsd_decay_ends=271", "WSD_DECAY_ENDS=271: ... to iteration 300 begins at 270, ... at 271."),
    (
        "wsd_decay_ends=1,,2",
        "WSD_DECAY_ENDS=1,,2: must be comma-separated iterations or fractions such as 25%",
    ),
    ("wsd_decay_style=sqrt", "WSD_DECAY_STYLE=sqrt: must be 'linear', ... or 'minus_sqrt'. "),
    # Groups of parameters
    (
        "lr_groups=*.router.*",
        "LR_GROUPS=*.router.*: must be PATTERN:lr=NUMBER,wd=NUMBER, separated by semicolons,",
    ),
    (
        "lr_groups=*:mult=2",
        "LR_GROUPS=*:mult=2: must be PATTERN:lr=NUMBER,wd=NUMBER, separated by semicolons,",
    ),
    ("lr_groups=*:lr=-1", "LR_GROUPS=*:lr=-1: lr=-1 must be a number of at least 0"),
    ("lr_groups=*:wd=inf", "LR_GROUPS=*:wd=inf: wd=inf must be a number of at least 0"),
    ("lr_groups='*.router.*:lr=2;*.roter.weight:lr=2'", "LR_GROUPS=*.roter.weight: matches no parameter "),
    ("lr_groups=*.experts.5.*:lr=2", "LR_GROUPS=*.experts.5.*: matches no parameter of this model"),
    (
        "lr_groups='*:lr=2;*.router.*:lr=3,wd=1'",
        "LR_GROUPS=*.router.*: an earlier pattern already sets the lr of every matching",
    ),
    (
        "lr_groups=*router*:lr=2 router_lr_mult=0.5",
        "ROUTER_LR_MULT=0.5: LR_GROUPS already sets the lr of every matching parameter",
    ),
    (
        "lr_groups=*norm*:wd=1,lr=2",
        "LR_GROUPS=*norm*: has a wd, but only matches norms and biases, which never decay",
    ),
    # Data
    ("train_data=a", "VALID_DATA=: must be set for EVAL_INTERVAL=100; ...TRAIN_DATA=a is not a folder"),
    ("split=99,1", "SPLIT=99,1: cannot be combined with the embedded corpus"),
    ("train_data=a valid_data=b split=99,1", "SPLIT=99,1: cannot be combined with VALID_DATA=b"),
    ("train_data=a split=0,1", "SPLIT=0,1: must be at most three numbers"),
    ("train_data=a split=100,0,0", "SPLIT=100,0,0: has no validation share, but EVAL_INTERVAL=100"),
    ("valid_data=a", "VALID_DATA=a: cannot be combined with the embedded corpus"),
    (
        "vocab_size=2047",
        "VOCAB_SIZE=2047: the embedded corpus ... 2048 distinct tokens. Fix: ... at least 2048",
    ),
    ("eval_iters=0", "EVAL_ITERS=0: ... EVAL_INTERVAL=100. Fix: set EVAL_ITERS=10 or EVAL_INTERVAL=0."),
    # Checkpoints
    (f"{SAVES} keep_every=2000", "KEEP_EVERY=2000: has no effect with KEEP_LAST=0, which keeps all"),
    (f"{SAVES} keep_best=1", "KEEP_BEST=1: has no effect with KEEP_LAST=0"),
    (f"{SAVES} keep_last=1 keep_every=1500", "KEEP_EVERY=1500: ...SAVE_INTERVAL=1000. ... KEEP_EVERY=1000."),
    (
        f"{SAVES} keep_last=1 spike_action=rollback",
        "KEEP_LAST=1: keeps only the last save, but SPIKE_ACTION=rollback may",
    ),
    ("save_interval=1000 eval_interval=300 keep_last=1 keep_best=1", "KEEP_BEST=1: ...EVAL_INTERVAL=300"),
]


@pytest.mark.parametrize(("settings", "line"), REFUSED)
def test_settings_that_cannot_run(settings, line):
    (found,) = problems(settings)
    assert re.match(".*".join(map(re.escape, line.split("..."))), found), found
    assert ". Fix: " in found


@pytest.mark.parametrize("settings", [
    "tp=2 ep=2 gpus_per_node=2",
    "tp=2 ep=2 etp=2 gpus_per_node=4",
    "tp=2 pp=2 ep=2 gpus_per_node=4",
    "pp=2 vpp=2 gpus_per_node=4",
    "ep=4 gpus_per_node=4",
    "cp=2 gpus_per_node=2",
    "lr_decay_style=WSD wsd_decay_iters=30",
    "lr_decay_style=power",
    "lr_decay_style=inverse-square-root",
    f"{WSD_S} wsd_decay_ends='50, 80,90%'",
    "lr_decay_style='constant: 80%, linear'",
    "lr_decay_style=cosine:299:12.5%",
    "lr_decay_style=power:90%,linear warmup_iters=0",
    "rampup_batch_size='8 8 100'",
    "rampup_batch_size='32 8 100'",
    "router_bias_update_rate=0.001 router_score=sigmoid",
    "router_bias_update_rate=0.001 router_score=softmax",
    "router_bias_rule=quantile router_score=softmax aux_loss_type=none",
    "aux_loss_type=seq_aux_loss,aux_loss aux_loss_coeff=0.01,0.001",
    "aux_loss_type=sinkhorn router_pre_softmax=false",
    "moe_layer_freq=[0]*1+[1]*3",
    "moe_type=moe capacity_factor=1.5 min_capacity=4",
    "add_bias_linear=true expert_backend=triton activation=clamped_swiglu",
    "num_router_groups=4 router_group_topk=2 topk=4",
    "router_pre_softmax=false topk=2",
    "expert_backend=torch dtype=bf16 ffn_hidden_size=264",
    "expert_backend=loop ffn_hidden_size=258",
    "use_moe=false add_bias_linear=true topk=9 num_experts=3 router_pre_softmax=false",
    "use_moe=false router_lr_mult=0.5 expert_lr_mult=2.0",  # a dense run of a comparison
    "tie_embeddings=true first_k_dense=3",
    "parametrization=standard tie_embeddings=true optimizer=muon distributed_optimizer=false",
    "lr_groups='*.router.*:lr=3,wd=1;*:lr=2'",
    "lr_groups=*.router.*:wd=0 router_lr_mult=0.5 expert_lr_mult=2.0",
    "lr_groups='decoder.layers.mlp.router.weight:lr=2; decoder.layers.[01].*: lr=2, wd=0 ;'",
    "train_data=a eval_interval=0 vocab_size=128",
    "node_rank=1 nnodes=2",
    f"{SAVES} keep_last=1 keep_every=3000 keep_best=2",
])  # fmt: skip
def test_settings_that_can_run(settings):
    assert problems(settings) == []


def test_all_problems_are_reported_at_once():
    found = problems("ep=3 topk=20 tp=4 gpus_per_node=6 vpp=2 min_lr=1.0 rampup_batch_size=x node_rank=2")
    names = {line.partition("=")[0] for line in found}
    assert names == {"EP", "TOPK", "TP", "GPUS_PER_NODE", "VPP", "MIN_LR", "NODE_RANK"}
    found = problems("moe_type=x num_layers=-1 lr=fast")
    assert [line.partition("=")[0] for line in found] == ["NUM_LAYERS", "MOE_TYPE", "LR"]
    assert "TP=3: must divide NUM_HEADS=4. Fix: set TP to one of 1, 2, 4." in problems(
        "tp=3 gpus_per_node=3 num_query_groups=4 seq_len=258"
    )
