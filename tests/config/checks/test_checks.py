from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.config.checks.checks import check_config
from moe_exp.config.presets import PRESETS

# (TP, PP, VPP, EP, ETP, CP) that the package trains with equal losses.
LAYOUTS = [
    (1, 1, "none", 1, 1, 1), (2, 1, "none", 1, 1, 1), (1, 2, "none", 1, 1, 1), (1, 2, "2", 1, 1, 1),
    (1, 1, "none", 2, 1, 1), (1, 1, "none", 4, 1, 1), (2, 1, "none", 2, 1, 1), (2, 1, "none", 2, 2, 1),
    (2, 2, "none", 2, 1, 1), (1, 2, "none", 2, 1, 1), (1, 1, "none", 1, 1, 2),
]  # fmt: skip


def cpu(**values) -> Config:
    return load_config(SMALL | {"gpus_per_node": 1, "mbsz": 8, "gbsz": 32} | values, {})


def only_problem(problems: list[str], expected: str) -> None:
    """Exactly one problem, and it is `expected`, a regular expression for the whole line."""
    assert len(problems) == 1, problems
    assert re.fullmatch(expected, problems[0]), problems[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("moe_type", ["moe", "dmoe"])
def test_layouts_that_train_have_no_problems(layout, ranks, moe_type):
    tp, pp, vpp, ep, etp, cp = layout
    config = cpu(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp, gpus_per_node=ranks, moe_type=moe_type)
    fits = ranks % (tp * pp * cp) == 0 and ranks % (etp * ep * pp) == 0
    problems = check_config(config)
    assert (problems == []) == fits
    assert all(line.startswith("GPUS_PER_NODE=") for line in problems)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_presets_have_no_problems(preset, ranks):
    data = {} if preset in ("cpu", "reference") else {"train_data": "a", "valid_data": "b"}
    assert (
        check_config(load_config({"preset": preset, "gpus_per_node": ranks, "gbsz": 3072} | data, {})) == []
    )


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_accepted_layouts_divide_evenly(data):
    def size(*sizes):
        return data.draw(st.sampled_from(sizes))

    config = cpu(
        tp=size(1, 2, 4), pp=size(1, 2, 4), vpp=size(None, 1, 2, 3), ep=size(1, 2, 3, 4), etp=size(1, 2),
        cp=size(1, 2), mbsz=size(1, 2, 3), gpus_per_node=size(1, 2, 4, 6, 8, 16),
        gbsz=size(1, 8, 12, 16, 24, 32), num_layers=size(2, 4, 6, 8), num_experts=size(4, 6, 8),
        num_heads=size(4, 8), num_query_groups=size(1, 2, 4), seq_len=size(6, 8, 16, 24),
    )  # fmt: skip
    c = config
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
    assert (check_config(config) == []) == even


LATENT = {"multi_latent_attention": True}
MODEL = [
    (
        {"num_heads": 6, "hidden_size": 132, "num_query_groups": 4},
        r"NUM_QUERY_GROUPS=4: does not divide NUM_HEADS=6\. Fix: set NUM_QUERY_GROUPS to one of 1, 2, 3, 6\.",
    ),
    (
        {"hidden_size": 130, "num_query_groups": 4},
        (
            r"NUM_HEADS=4: does not divide HIDDEN_SIZE=130\. Fix: set NUM_HEADS to one of 1, 2, 5, 10, 13,"
            r" 26, 65, 130\."
        ),
    ),
    ({"head_dim": 33}, r"HEAD_DIM=33: rotary .* must be even\. Fix: set HEAD_DIM to 32 or 34\."),
    (
        {"qk_norm_scope": "all"},
        (
            r"QK_NORM_SCOPE=all: has no effect while QK_NORM=false\. Fix: set QK_NORM=true, or"
            r" QK_NORM_SCOPE=head\."
        ),
    ),
    (
        {"qk_norm": True, "qk_norm_scope": "all", "normalization": "LayerNorm"},
        (
            r"QK_NORM_SCOPE=all: there is no NORMALIZATION=LayerNorm over all heads\. Fix: set"
            r" NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head\."
        ),
    ),
    (
        {"rotary_fraction": 0.1},
        (
            r"ROTARY_FRACTION=0\.1: turns 3 of the 32 channels of a head, .* pairs of them\. Fix: set"
            r" ROTARY_FRACTION to 0\.0625 or 0\.125\."
        ),
    ),
    (
        {"rotary_fraction": 0.01},
        r"ROTARY_FRACTION=0\.01: turns 0 of .*\. Fix: set ROTARY_FRACTION to 0\.0625\.",
    ),
    (
        {"rotary_fraction": 0.5, "rope_scaling": "yarn", "rope_scaling_factor": 4},
        (
            r"ROTARY_FRACTION=0\.5: Megatron's YaRN turns all channels of a head\. Fix: set"
            r" ROTARY_FRACTION=1, or ROPE_SCALING=none\."
        ),
    ),
    (
        {"rope_scaling": "yarn"},
        r"ROPE_SCALING=yarn: scales nothing with ROPE_SCALING_FACTOR=1\. Fix: set ROPE_SCALING_FACTOR, or .*",
    ),
    (
        {"rope_scaling": "llama3", "rope_scaling_factor": 8, "rope_original_seq_len": 4096},
        (
            r"ROPE_ORIGINAL_SEQ_LEN=4096: Megatron has the original length of Llama 3 alone\. Fix: set"
            r" ROPE_ORIGINAL_SEQ_LEN=8192, or .*"
        ),
    ),
    (
        {"rope_scaling_factor": 8},
        (
            r"ROPE_SCALING_FACTOR=8\.0: has no effect while ROPE_SCALING=none\. Fix: set ROPE_SCALING, or"
            r" ROPE_SCALING_FACTOR=1\."
        ),
    ),
    (
        {"rope_scaling": "llama3", "rope_scaling_factor": 8, "yarn_beta_fast": 16},
        (
            r"YARN_BETA_FAST=16\.0: has no effect while ROPE_SCALING=llama3\. Fix: set ROPE_SCALING=yarn, or"
            r" YARN_BETA_FAST=32\."
        ),
    ),
    (
        {"rope_scaling": "yarn", "rope_scaling_factor": 8, "yarn_beta_fast": 0.5},
        (
            r"YARN_BETA_FAST=0\.5: is not over YARN_BETA_SLOW=1\. Fix: set YARN_BETA_FAST=32 and"
            r" YARN_BETA_SLOW=1\."
        ),
    ),
    (
        {"kv_lora_rank": 64},
        r"KV_LORA_RANK=64: has no effect while MULTI_LATENT_ATTENTION=false\. Fix: .*, or KV_LORA_RANK=512\.",
    ),
    (
        {**LATENT, "head_dim": 32},
        (
            r"HEAD_DIM=32: QK_HEAD_DIM, .* sizes of heads .*\. Fix: set HEAD_DIM=0, or"
            r" MULTI_LATENT_ATTENTION=false\."
        ),
    ),
    (
        {**LATENT, "qk_norm": True, "qk_norm_scope": "all"},
        (
            r"QK_NORM_SCOPE=all: QK_NORM with MULTI_LATENT_ATTENTION is .*, not of heads\. Fix: set"
            r" QK_NORM_SCOPE=head, or .*"
        ),
    ),
    (
        {**LATENT, "qkv_bias": True},
        r"QKV_BIAS=true: .* have no biases\. Fix: set QKV_BIAS=false, or MULTI_LATENT_ATTENTION=false\.",
    ),
    (
        {**LATENT, "rotary_fraction": 0.5},
        r"ROTARY_FRACTION=0\.5: QK_POS_EMB_HEAD_DIM says .*\. Fix: set ROTARY_FRACTION=1\.0, or .*",
    ),
    (
        {**LATENT, "rope_scaling": "llama3", "rope_scaling_factor": 8},
        (
            r"ROPE_SCALING=llama3: Megatron has YaRN alone with MULTI_LATENT_ATTENTION\. Fix: set"
            r" ROPE_SCALING=yarn or none\."
        ),
    ),
    (
        {**LATENT, "qk_pos_emb_head_dim": 7},
        r"QK_POS_EMB_HEAD_DIM=7: .* turns pairs of channels\. Fix: set QK_POS_EMB_HEAD_DIM=8\.",
    ),
    ({"hidden_size": 132}, r"HEAD_DIM=33: rotary .* must be even\. Fix: .*"),
    (
        {"add_bias_linear": True, "shared_expert_size": 64},
        (
            r"ADD_BIAS_LINEAR=true: Megatron's shared expert has no bias\. Fix: set ADD_BIAS_LINEAR=false or"
            r" SHARED_EXPERT_SIZE=0\."
        ),
    ),
    (
        {"add_bias_linear": True, "etp": 2, "gpus_per_node": 2},
        r"ADD_BIAS_LINEAR=true: .* with ETP=1 only\. Fix: set ADD_BIAS_LINEAR=false or ETP=1\.",
    ),
    (
        {"dispatcher": "deepep", "dtype": "bf16"},
        r"DISPATCHER=deepep: .* EP=1 and ETP=1\. Fix: set DISPATCHER=alltoall\.",
    ),
    (
        {"dispatcher": "deepep", "ep": 2, "gpus_per_node": 2, "dtype": "fp32"},
        r"DISPATCHER=deepep: sends bf16 rows, but DTYPE=fp32\. Fix: set DTYPE=bf16 or DISPATCHER=alltoall\.",
    ),
    (
        {"dispatcher": "deepep", "ep": 2, "gpus_per_node": 2, "dtype": "bf16", "deterministic": True},
        (
            r"DISPATCHER=deepep: .* NaN with the algorithms of DETERMINISTIC=true\. Fix: set"
            r" DISPATCHER=alltoall, or DETERMINISTIC=false\."
        ),
    ),
    (
        {"moe_layer_freq": "0,1"},
        r"MOE_LAYER_FREQ=0,1: has 2 layers, but NUM_LAYERS=4\. Fix: give a number, or a pattern of 4 .*",
    ),
    (
        {"moe_layer_freq": "[0]*4"},
        r"MOE_LAYER_FREQ=\[0\]\*4: leaves no MoE layer of NUM_LAYERS=4\. Fix: set a 1, or USE_MOE=false\.",
    ),
    (
        {"capacity_factor": 2.0},
        (
            r"CAPACITY_FACTOR=2\.0: MOE_TYPE=dmoe drops nothing, .*\. Fix: set MOE_TYPE=moe, or"
            r" CAPACITY_FACTOR=0\."
        ),
    ),
    (
        {"min_capacity": 4},
        r"MIN_CAPACITY=4: MOE_TYPE=dmoe drops nothing, .*\. Fix: set MOE_TYPE=moe, or MIN_CAPACITY=0\.",
    ),
    (
        {"token_rounding": 64, "moe_type": "moe"},
        r"TOKEN_ROUNDING=64: MOE_TYPE=moe has .* capacity\. Fix: set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0\.",
    ),
    (
        {"token_rounding": 10**6},
        (
            r"TOKEN_ROUNDING=1000000: rounds nothing, as a micro-batch has \d+ slots .*TOPK\)\. Fix: set a"
            r" tile .*, or TOKEN_ROUNDING=0\."
        ),
    ),
    (
        {"shared_expert_gate": True},
        r"SHARED_EXPERT_GATE=true: there is no shared expert\. Fix: set SHARED_EXPERT_SIZE, or .*",
    ),
    (
        {"moe_latent_size": 129},
        r"MOE_LATENT_SIZE=129: is over HIDDEN_SIZE=128, .*\. Fix: set MOE_LATENT_SIZE to at most 128, or .*",
    ),
    (
        {"parametrization": "mup", "mup_base_hidden_size": 64, "moe_latent_size": 64},
        r"PARAMETRIZATION=mup: .* MOE_LATENT_SIZE=64, whose .* no rule\. Fix: set MOE_LATENT_SIZE=0\.",
    ),
    (
        {"moe_latent_size": 6, "expert_backend": "torch"},
        (
            r"MOE_LATENT_SIZE=6: EXPERT_BACKEND=torch needs rows of a multiple of 16 bytes, .* in"
            r" fp32 is no such row\. Fix: set MOE_LATENT_SIZE to 4 or 8, or EXPERT_BACKEND=loop\."
        ),
    ),
    ({"router_normalize": "true"}, r"ROUTER_NORMALIZE=true: .*TOPK=1\. Fix: set ROUTER_NORMALIZE=false\."),
    (
        {"aux_loss_type": "aux_loss,seq_aux_loss", "aux_loss_coeff": "1,2,3"},
        (
            r"AUX_LOSS_COEFF=1,2,3: 3 weights for 2 losses in AUX_LOSS_TYPE=aux_loss,seq_aux_loss\. Fix: give"
            r" one for all, or one for each\."
        ),
    ),
    (
        {"aux_loss_type": "sinkhorn", "router_bias_update_rate": 0.001},
        (r"AUX_LOSS_TYPE=sinkhorn: balances by itself and does not go with ROUTER_BIAS_UPDATE_RATE\. .*"),
    ),
    (
        {"router_bias_rule": "quantile", "router_bias_update_rate": 0.001},
        r"ROUTER_BIAS_UPDATE_RATE=0\.001: ROUTER_BIAS_RULE=quantile has no step size\. Fix: set it to 0\.",
    ),
    (
        {"router_bias_rule": "quantile", "num_router_groups": 4, "router_group_topk": 2},
        r"ROUTER_BIAS_RULE=quantile: does not go with NUM_ROUTER_GROUPS: .*\. Fix: set it to sign\.",
    ),
    (
        {"router_bias_rule": "quantile", "aux_loss_type": "sinkhorn"},
        r"ROUTER_BIAS_RULE=quantile: does not go with AUX_LOSS_TYPE=sinkhorn, .*\. Fix: set it to sign\.",
    ),
    (
        {"router_score": "relu"},
        r"ROUTER_SCORE=relu: without the loss l1 nothing limits the experts per token\. Fix: set"
        r" AUX_LOSS_TYPE=l1 and AUX_LOSS_COEFF=1e-8, its weight at the start\.",
    ),
    (
        {"aux_loss_type": "l1"},
        r"AUX_LOSS_TYPE=l1: l1 needs ROUTER_SCORE=relu\. Fix: set ROUTER_SCORE=relu, or another .*",
    ),
    (
        {"router_score": "relu", "aux_loss_type": "l1", "router_bias_update_rate": 0.001},
        r"ROUTER_SCORE=relu: does not go with ROUTER_BIAS_UPDATE_RATE\. Fix: use one of the two\.",
    ),
    (
        {"router_score": "relu", "aux_loss_type": "l1", "null_experts": 2},
        r"ROUTER_SCORE=relu: does not go with NULL_EXPERTS\. Fix: use one of the two\.",
    ),
    (
        {"router_top_p": 0.5, "router_bias_rule": "quantile"},
        r"ROUTER_TOP_P=0\.5: does not go with ROUTER_BIAS_RULE=quantile\. Fix: use one of the two\.",
    ),
    (
        {"null_experts": 2, "force_routing": "zipf"},
        r"NULL_EXPERTS=2: does not go with FORCE_ROUTING=zipf\. Fix: use one of the two\.",
    ),
    (
        {"aux_loss_type": "sinkhorn", "force_routing": "zipf"},
        r"FORCE_ROUTING=zipf: .* so does AUX_LOSS_TYPE=sinkhorn\. Fix: set one of the two to none\.",
    ),
    (
        {"first_k_dense": 4},
        r"FIRST_K_DENSE=4: leaves no MoE layer of NUM_LAYERS=4\. Fix: set FIRST_K_DENSE to at most 3, or .*",
    ),
]

MOE = [
    (
        {"ep": 3, "gpus_per_node": 3, "gbsz": 48},
        r"EP=3: does not divide NUM_EXPERTS=8\. Fix: set EP to one of 1, 2, 4, 8\.",
    ),
    ({"topk": 9}, r"TOPK=9: is over NUM_EXPERTS=8\. Fix: set TOPK to at most 8\."),
    (
        {"etp": 2, "gpus_per_node": 2, "moe_ffn_hidden_size": 99},
        r"ETP=2: does not divide MOE_FFN_HIDDEN_SIZE=99\. Fix: set ETP to .*",
    ),
    (
        {"etp": 2, "gpus_per_node": 2, "ffn_hidden_size": 99},
        r"ETP=2: does not divide FFN_HIDDEN_SIZE=99\. Fix: set ETP to .*",
    ),
    (
        {"dispatcher": "local", "ep": 2, "gpus_per_node": 2},
        r"DISPATCHER=local: needs every expert .* EP=2 and ETP=1\. Fix: set DISPATCHER=alltoall, .*",
    ),
    (
        {"router_pre_softmax": False},
        r"ROUTER_PRE_SOFTMAX=false: .*TOPK=1\. Fix: set ROUTER_PRE_SOFTMAX=true\.",
    ),
    (
        {"num_router_groups": 4},
        (
            r"NUM_ROUTER_GROUPS=4: has no effect while ROUTER_GROUP_TOPK=0\. Fix: set both, or"
            r" NUM_ROUTER_GROUPS=0\."
        ),
    ),
    (
        {"router_group_topk": 2},
        (
            r"ROUTER_GROUP_TOPK=2: has no effect while NUM_ROUTER_GROUPS=0\. Fix: set both, or"
            r" ROUTER_GROUP_TOPK=0\."
        ),
    ),
    (
        {"num_router_groups": 3, "router_group_topk": 2},
        r"NUM_ROUTER_GROUPS=3: does not divide NUM_EXPERTS=8\. Fix: .*",
    ),
    (
        {"num_router_groups": 2, "router_group_topk": 3},
        r"ROUTER_GROUP_TOPK=3: is over NUM_ROUTER_GROUPS=2\. Fix: set ROUTER_GROUP_TOPK to at most 2\.",
    ),
    (
        {"num_router_groups": 4, "router_group_topk": 1, "topk": 3},
        r"TOPK=3: is over the 2 experts .* Fix: set TOPK to at most 2, or ROUTER_GROUP_TOPK to at least 2\.",
    ),
    (
        {"expert_backend": "torch", "ffn_hidden_size": 258},
        r"FFN_HIDDEN_SIZE=258: EXPERT_BACKEND=torch .* Fix: set FFN_HIDDEN_SIZE to 256 or 260, .*",
    ),
    (
        {"expert_backend": "torch", "dtype": "bf16", "ffn_hidden_size": 260},
        r"FFN_HIDDEN_SIZE=260: .* Fix: set FFN_HIDDEN_SIZE to 256 or 264, .*",
    ),
    (
        {"expert_backend": "megablocks", "dtype": "bf16", "ffn_hidden_size": 260},
        r"FFN_HIDDEN_SIZE=260: EXPERT_BACKEND=megablocks .* Fix: set FFN_HIDDEN_SIZE to 256 or 264, .*",
    ),
    (
        {"expert_backend": "grouped_gemm", "dtype": "fp32"},
        (
            r"EXPERT_BACKEND=grouped_gemm: computes in bf16 only, not in fp32\. Fix: set DTYPE=bf16, or"
            r" EXPERT_BACKEND=auto\."
        ),
    ),
    (
        {"expert_backend": "torch", "etp": 2, "gpus_per_node": 2, "ffn_hidden_size": 260},
        r"FFN_HIDDEN_SIZE=260: .*ETP=2.* Fix: set FFN_HIDDEN_SIZE to 256 or 264, .*",
    ),
]

PARALLEL = [
    (
        {"tp": 2, "gpus_per_node": 3},
        (
            r"GPUS_PER_NODE=3: 3 ranks .* multiple of TP\*PP\*CP=2\. Fix: set GPUS_PER_NODE to 2 or 4, or"
            r" change TP, PP, CP\."
        ),
    ),
    (
        {"pp": 2, "nnodes": 2, "cp": 2},
        r"GPUS_PER_NODE=1: 2 ranks .* multiple of TP\*PP\*CP=4\. Fix: set GPUS_PER_NODE to 2, or .*",
    ),
    (
        {"ep": 4, "gpus_per_node": 2},
        (
            r"GPUS_PER_NODE=2: 2 ranks .* multiple of ETP\*EP\*PP=4\. Fix: set GPUS_PER_NODE to 4, or change"
            r" ETP, EP, PP\."
        ),
    ),
    (
        {"node_rank": 1},
        r"NODE_RANK=1: is not below NNODES=1\. Fix: set NODE_RANK to 0, or NNODES to at least 2\.",
    ),
    (
        {"node_rank": 3, "nnodes": 2},
        r"NODE_RANK=3: is not below NNODES=2\. Fix: set NODE_RANK to 0 to 1, or NNODES to at least 4\.",
    ),
    (
        {"tp": 4, "num_query_groups": 2, "gpus_per_node": 4},
        r"TP=4: does not divide NUM_QUERY_GROUPS=2\. Fix: set TP to one of 1, 2\.",
    ),
    (
        {"tp": 2, "shared_expert_size": 99, "gpus_per_node": 2},
        r"TP=2: does not divide SHARED_EXPERT_SIZE=99\. Fix: set TP to one of 1, 3, 9, 11, 33, 99\.",
    ),
    (
        {"tp": 2, "seq_len": 255, "gpus_per_node": 2},
        r"TP=2: SEQ_LEN/CP=255 is not a multiple of TP, .* Fix: set SEQ_LEN to 252 or 256\.",
    ),
    (
        {"cp": 2, "seq_len": 254, "gpus_per_node": 2},
        r"CP=2: SEQ_LEN=254 is not a multiple of 2\*CP, .* Fix: set SEQ_LEN to 252 or 256\.",
    ),
    (
        {"tp": 2, "use_moe": False, "ffn_hidden_size": 99, "gpus_per_node": 2},
        r"TP=2: does not divide FFN_HIDDEN_SIZE=99\. Fix: .*",
    ),
]

PIPELINE = [
    (
        {"pp": 3, "gpus_per_node": 3},
        (
            r"PP=3: does not divide NUM_LAYERS=4\. Fix: set PP to one of 1, 2, 4, or give .* as"
            r" PIPELINE_LAYERS\."
        ),
    ),
    (
        {"first_stage_layers": 2},
        (
            r"FIRST_STAGE_LAYERS=2: there is one stage, PP=1\. Fix: set PP to at least 2, or"
            r" FIRST_STAGE_LAYERS=0\."
        ),
    ),
    (
        {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2, "gpus_per_node": 2},
        (
            r"FIRST_STAGE_LAYERS=1: FIRST_STAGE_LAYERS \+ LAST_STAGE_LAYERS = 1\+2 is not NUM_LAYERS=4\. Fix:"
            r" set one of the two to 0: .*"
        ),
    ),
    (
        {"pp": 4, "last_stage_layers": 2, "gpus_per_node": 4},
        (
            r"LAST_STAGE_LAYERS=2: leaves 2 of NUM_LAYERS=4 layers for the other 3 of PP=4 stages, .*\. Fix:"
            r" give LAST_STAGE_LAYERS so that .*"
        ),
    ),
    (
        {"pp": 2, "vpp": 2, "first_stage_layers": 1, "gpus_per_node": 2},
        (
            r"VPP=2: does not divide the 1 layers of a stage \(NUM_LAYERS=4 over the stages as 1\+3\)\. Fix:"
            r" set VPP=none, or .*"
        ),
    ),
    (
        {"pp": 2, "pipeline_layers": "1,3", "last_stage_layers": 3, "gpus_per_node": 2},
        (
            r"LAST_STAGE_LAYERS=3: PIPELINE_LAYERS=1,3 says what every stage has\. Fix: set"
            r" LAST_STAGE_LAYERS=0, or .*"
        ),
    ),
    (
        {"pp": 2, "pipeline_layers": "1*2,2", "gpus_per_node": 2},
        r"PIPELINE_LAYERS=1\*2,2: has 3 stages, but PP=2\. Fix: give the layers of 2 stages, or set PP=3\.",
    ),
    (
        {"pp": 2, "pipeline_layers": "2,3", "gpus_per_node": 2},
        r"PIPELINE_LAYERS=2,3: adds up to 5 layers, but NUM_LAYERS=4\. Fix: deal out 4 layers\.",
    ),
    (
        {"pp": 4, "pipeline_layers": "2,0,2,0", "gpus_per_node": 4},
        (
            r"PIPELINE_LAYERS=2,0,2,0: only the first stage, .* may be without layers\. Fix: give stage 2 of"
            r" 4 a layer, or leave it out\."
        ),
    ),
    (
        {"pp": 2, "vpp": 2, "pipeline_layers": "0,4", "gpus_per_node": 2},
        (
            r"VPP=2: a stage without layers would have model chunks with nothing at all\. Fix: set VPP=none,"
            r" or .*"
        ),
    ),
    (
        {"pp": 2, "vpp": 2, "pipeline_layers": "3,1", "gpus_per_node": 2},
        r"VPP=2: does not divide the 3 layers of a stage .*",
    ),
    (
        {"vpp": 2},
        r"VPP=2: interleaved stages need a pipeline, but PP=1\. Fix: set VPP=none or PP to at least 2\.",
    ),
    (
        {"pp": 2, "vpp": 3, "gpus_per_node": 2},
        r"VPP=3: does not divide NUM_LAYERS/PP=2\. Fix: set VPP to one of 1, 2\.",
    ),
    (
        {"pp": 2, "vpp": 1, "gpus_per_node": 2},
        (
            r"VPP=1: one model chunk per rank leaves nothing to interleave\. Fix: set VPP=none or VPP to at"
            r" least 2\."
        ),
    ),
    (
        {"pp": 2, "vpp": 2, "gbsz": 24, "gpus_per_node": 2},
        (
            r"VPP=2: .* multiples of PP=2, but GBSZ / \(MBSZ\*DP\) is 3\. Fix: set GBSZ to 16 or 32, or"
            r" VPP=none\."
        ),
    ),
]

OPTIMIZER = [
    (
        {"qk_clip": 100},
        (
            r"QK_CLIP=100\.0: the distributed optimizer gives a rank ranges of values, .*\. Fix: set"
            r" DISTRIBUTED_OPTIMIZER=false, or QK_CLIP=0\."
        ),
    ),
    (
        {"qk_clip": 100, "qk_norm": True, "distributed_optimizer": False},
        r"QK_CLIP=100\.0: QK_NORM=true undoes every scaling .*\. Fix: set QK_CLIP=0, or QK_NORM=false\.",
    ),
    (
        {"optimizer": "muon"},
        (
            r"DISTRIBUTED_OPTIMIZER=true: OPTIMIZER=muon needs whole matrices, .*\. Fix: set"
            r" DISTRIBUTED_OPTIMIZER=false, or OPTIMIZER=adam\."
        ),
    ),
    (
        {"optimizer": "sgd", "optimizer_state_dtype": "bf16"},
        (
            r"OPTIMIZER_STATE_DTYPE=bf16: is of the moments of Adam, but OPTIMIZER=sgd\. Fix: set"
            r" OPTIMIZER_STATE_DTYPE=fp32, or .*=adam\."
        ),
    ),
    (
        {"optimizer_state_dtype": "bf16", "adam_beta2": 0.999},
        (
            r"ADAM_BETA2=0\.999: a moment of OPTIMIZER_STATE_DTYPE=bf16 would not decay .* Fix: set"
            r" ADAM_BETA2 to at most 0\.996, or .*=fp32\."
        ),
    ),
    (
        {"ema_decay": 0.99, "average_every": 11, "train_iters": 10, "warmup_iters": 0},
        r"AVERAGE_EVERY=11: with TRAIN_ITERS=10 the average .* no weights\. Fix: set it to at most 10\.",
    ),
]

BATCH = [
    (
        {"gbsz": 30},
        r"GBSZ=30: is not a multiple of MBSZ\*DP=8\*1=8\. Fix: set GBSZ to 24 or 32, or MBSZ to 2\.",
    ),
    (
        {"gbsz": 40, "gpus_per_node": 2},
        r"GBSZ=40: is not a multiple of MBSZ\*DP=8\*2=16\. Fix: set GBSZ to 32 or 48, or MBSZ to 4\.",
    ),
    ({"gbsz": 4}, r"GBSZ=4: is not a multiple of .* Fix: set GBSZ to 8, or MBSZ to 4\."),
    (
        {"rampup_batch_size": "8 8"},
        (
            r"RAMPUP_BATCH_SIZE=8 8: must be three positive whole numbers\. Fix: give START INCREMENT"
            r" SAMPLES, for instance '8 8 1000'\."
        ),
    ),
    (
        {"rampup_batch_size": "8 8 many"},
        r"RAMPUP_BATCH_SIZE=8 8 many: must be three positive whole numbers\. Fix: .*",
    ),
    (
        {"rampup_batch_size": "8 0 100"},
        r"RAMPUP_BATCH_SIZE=8 0 100: must be three positive whole numbers\. Fix: .*",
    ),
    (
        {"rampup_batch_size": "4 4 100"},
        r"RAMPUP_BATCH_SIZE=4 4 100: step 1 of 8 has a batch of 4, no multiple of MBSZ\*DP=8\*1=8\. .*",
    ),
    (
        {"rampup_batch_size": "16 4 100"},
        r"RAMPUP_BATCH_SIZE=16 4 100: step 2 of 5 has a batch of 20, no multiple of .*=8\. Fix: .*",
    ),
    (
        {"rampup_batch_size": "40 8 100"},
        r"RAMPUP_BATCH_SIZE=40 8 100: START must reach GBSZ=32 in whole steps of INCREMENT\. Fix: .*",
    ),
    (
        {"rampup_batch_size": "8 16 100"},
        r"RAMPUP_BATCH_SIZE=8 16 100: START must reach GBSZ=32 in whole steps of INCREMENT\. Fix: .*",
    ),
    (
        {"rampup_batch_size": "8 8 100", "pp": 2, "vpp": 2, "gpus_per_node": 2},
        (
            r"RAMPUP_BATCH_SIZE=8 8 100: step 1 of 4 has a batch of 8, with VPP=2 no multiple of"
            r" PP\*MBSZ\*DP=2\*8\*1=16\. .* '16 16 1000'\."
        ),
    ),
    (
        {"rampup_batch_size": "16 8 100", "pp": 2, "vpp": 2, "gpus_per_node": 2},
        (
            r"RAMPUP_BATCH_SIZE=16 8 100: step 2 of 3 has a batch of 24, with VPP=2 no multiple of .*=16\."
            r" Fix: .*"
        ),
    ),
    (
        {"warmup_iters": 300},
        (
            r"WARMUP_ITERS=300: is not below TRAIN_ITERS=300, .* Fix: set WARMUP_ITERS below 300, or raise"
            r" TRAIN_ITERS\."
        ),
    ),
    (
        {"decay_iters": 10},
        r"WARMUP_ITERS=20: is not below DECAY_ITERS=10, .* Fix: .* raise DECAY_ITERS\.",
    ),
    (
        {"lr": 1e-4},
        r"MIN_LR=0\.0003: is over LR=0\.0001\. Fix: set MIN_LR to at most 0\.0001, for instance 1e-05\.",
    ),
    (
        {"lr_decay_style": "WSD"},
        (
            r"WSD_DECAY_ITERS=0: LR_DECAY_STYLE=WSD decays over 1 to TRAIN_ITERS=300 iterations\. Fix: set"
            r" WSD_DECAY_ITERS to 1 to 300, .*"
        ),
    ),
    ({"lr_decay_style": "WSD", "wsd_decay_iters": 301}, r"WSD_DECAY_ITERS=301: .*"),
]

DATA = [
    (
        {"train_data": "a"},
        (
            r"VALID_DATA=: TRAIN_DATA=a is no .* of text here, .* EVAL_INTERVAL=100\. Fix: correct"
            r" TRAIN_DATA .* EVAL_INTERVAL=0\."
        ),
    ),
    (
        {"split": "99,1"},
        (
            r"SPLIT=99,1: the embedded corpus brings its own validation set\. Fix: set TRAIN_DATA or drop"
            r" SPLIT\."
        ),
    ),
    (
        {"train_data": "a", "valid_data": "b", "split": "99,1"},
        r"SPLIT=99,1: VALID_DATA=b names .* Fix: set one of the two\.",
    ),
    (
        {"train_data": "a", "split": "0,1"},
        r"SPLIT=0,1: must be up to three numbers, .* Fix: set for instance SPLIT=99,1\.",
    ),
    ({"train_data": "a", "split": "1,1,1,1"}, r"SPLIT=1,1,1,1: must be up to three numbers, .*"),
    (
        {"train_data": "a", "split": "100,0,0"},
        r"SPLIT=100,0,0: leaves nothing to evaluate on every EVAL_INTERVAL=100\. Fix: .*",
    ),
    ({"valid_data": "a"}, r"VALID_DATA=a: .* Fix: set TRAIN_DATA or drop VALID_DATA\."),
    (
        {"vocab_size": 2047},
        (
            r"VOCAB_SIZE=2047: the embedded corpus .* has 2048 tokens\. Fix: set VOCAB_SIZE to at least 2048,"
            r" or TRAIN_DATA\."
        ),
    ),
    ({"eval_iters": 0}, r"EVAL_ITERS=0: .* EVAL_INTERVAL=100\. Fix: set EVAL_ITERS=10 or EVAL_INTERVAL=0\."),
]


@pytest.mark.parametrize(("values", "expected"), MODEL + MOE + PARALLEL + PIPELINE + BATCH + OPTIMIZER + DATA)
def test_settings_that_cannot_run_together(values, expected):
    only_problem(check_config(cpu(**values)), expected)


def test_heads_that_tp_does_not_divide():
    problems = check_config(
        cpu(tp=3, gpus_per_node=3, num_query_groups=4, hidden_size=128, seq_len=258, shared_expert_size=0)
    )
    assert "TP=3: does not divide NUM_HEADS=4. Fix: set TP to one of 1, 2, 4." in problems


def test_all_problems_are_reported_at_once():
    problems = check_config(
        cpu(ep=3, topk=20, tp=4, gpus_per_node=6, vpp=2, min_lr=1.0, rampup_batch_size="x", node_rank=2)
    )
    names = {line.partition("=")[0] for line in problems}
    assert names == {"EP", "TOPK", "TP", "GPUS_PER_NODE", "VPP", "MIN_LR", "NODE_RANK"}


@pytest.mark.parametrize(
    "values",
    [
        {"lr_decay_style": "WSD", "wsd_decay_iters": 30},
        {"rampup_batch_size": "8 8 100"},
        {"rampup_batch_size": "32 8 100"},
        {"router_bias_update_rate": 0.001, "router_score": "sigmoid"},
        {"router_bias_update_rate": 0.001, "router_score": "softmax"},
        {"router_bias_rule": "quantile", "router_score": "softmax", "aux_loss_type": "none"},
        {"aux_loss_type": "seq_aux_loss,aux_loss", "aux_loss_coeff": "0.01,0.001"},
        {"aux_loss_type": "sinkhorn", "router_pre_softmax": False},
        {"moe_layer_freq": "[0]*1+[1]*3"},
        {"moe_type": "moe", "capacity_factor": 1.5, "min_capacity": 4},
        {"add_bias_linear": True, "expert_backend": "triton", "activation": "clamped_swiglu"},
        {"num_router_groups": 4, "router_group_topk": 2, "topk": 4},
        {"router_pre_softmax": False, "topk": 2},
        {"expert_backend": "torch", "dtype": "bf16", "ffn_hidden_size": 264},
        {"expert_backend": "loop", "ffn_hidden_size": 258},
        {"use_moe": False, "add_bias_linear": True, "topk": 9, "num_experts": 3, "router_pre_softmax": False},
        {"tie_embeddings": True, "first_k_dense": 3},
        {"train_data": "a", "eval_interval": 0, "vocab_size": 128},
        {"node_rank": 1, "nnodes": 2},
    ],
)
def test_settings_that_can_run(values):
    assert check_config(cpu(**values)) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"keep_every": 2000},
            (
                r"KEEP_EVERY=2000: has no effect with KEEP_LAST=0, which keeps all checkpoints\. Fix: set"
                r" KEEP_LAST\."
            ),
        ),
        ({"keep_best": 1}, r"KEEP_BEST=1: has no effect with KEEP_LAST=0, .*"),
        (
            {"keep_last": 1, "keep_every": 1500},
            r"KEEP_EVERY=1500: is no multiple of SAVE_INTERVAL=1000\. Fix: set it to 1000\.",
        ),
        (
            {"keep_last": 1, "keep_best": 1, "eval_interval": 300},
            r"KEEP_BEST=1: needs a validation at every save, .*EVAL_INTERVAL=300\. Fix: .*",
        ),
        (
            {"keep_last": 1, "keep_best": 1, "eval_interval": 0},
            r"KEEP_BEST=1: needs a validation at every save, .*",
        ),
        (
            {"keep_last": 1, "spike_action": "rollback"},
            r"KEEP_LAST=1: keeps no checkpoint from before a spike .*Fix: .*",
        ),
    ],
)
def test_retention(values, line):
    schedule = {"save_interval": 1000, "eval_interval": 500}
    only_problem(check_config(cpu(**(schedule | values))), line)
    assert check_config(cpu(**schedule, keep_last=1, keep_every=3000, keep_best=2)) == []
