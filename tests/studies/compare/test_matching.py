"""Sizes that match in FLOPs or active parameters per token, and what cannot be matched."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.whole_runs import SMALL
from moe_exp.config import ConfigError
from moe_exp.config.parsers import POINTS
from moe_exp.studies.compare import variants
from moe_exp.studies.compare.variants import Variant, apart, make_variants, match_sizes


@st.composite
def moe_models(draw):
    """Settings of an MoE model, from tiny to large, in layouts that are allowed."""
    layers, tp = draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 4]))
    heads = 4 * draw(st.integers(1, 8))
    return SMALL | {
        "num_layers": layers, "hidden_size": heads * draw(st.sampled_from([32, 64, 128])), "num_heads": heads,
        "num_query_groups": 4, "ffn_hidden_size": 8 * tp * draw(st.integers(12, 300)),
        "moe_ffn_hidden_size": draw(st.sampled_from([0, 64, 200, 1000])),
        "num_experts": draw(st.sampled_from([8, 16])), "topk": draw(st.integers(1, 6)),
        "seq_len": 64 * draw(st.integers(1, 30)), "shared_expert_size": draw(st.sampled_from([0, 256])),
        "first_k_dense": draw(st.integers(0, layers - 1)),
        "activation": draw(st.sampled_from(["swiglu", "gelu"])), "tie_embeddings": draw(st.booleans()),
        "tp": tp, "gpus_per_node": 4, "gbsz": 16, "mbsz": 1,
    }  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(moe_models(), st.sampled_from(["flops", "active-params"]))
def test_a_dense_model_matches_within_one_percent(given_settings, match):
    moe, dense = match_sizes(make_variants("dmoe,dense", [], given_settings), match)
    assert list(moe.config.problems()) == [] and list(dense.config.problems()) == []
    measure = variants.MEASURES[match]
    assert measure(dense.config) == pytest.approx(measure(moe.config), rel=0.01)
    changed = moe.config.model_dump().items() ^ dense.config.model_dump().items()
    assert {name for name, _ in changed} <= {"use_moe", "ffn_hidden_size"}


@settings(max_examples=40, deadline=None)
@given(moe_models(), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_other_experts_match_too(given_settings, topk, etp):
    finer = f"finer:NUM_EXPERTS=64,TOPK={topk},ETP={etp},SHARED_EXPERT_SIZE=0"
    moe, other = match_sizes(make_variants("dmoe", [finer], given_settings), "flops")
    assert other.config.expert_ffn_size % etp == 0
    # Widths are multiples of ETP: in a small model half a step may be more than 1%.
    wider = other.config.model_copy(update={"moe_ffn_hidden_size": other.config.expert_ffn_size + etp})
    step = apart(wider, other.config, "flops")
    assert abs(apart(other.config, moe.config, "flops")) < max(0.01, 0.51 * step)


def test_the_width_by_hand():
    # One layer in four is dense: (3 * 2 * 128 + 256) / 4 = 256 per layer.
    settings = SMALL | {"topk": 2, "moe_ffn_hidden_size": 128, "ffn_hidden_size": 256, "first_k_dense": 1}
    moe, dense = match_sizes(make_variants("dmoe,dense", [], settings), "flops")
    assert dense.config.ffn_hidden_size == 256
    # Two experts of 96 and a shared one of 64 meet a token.
    settings = SMALL | {"topk": 2, "moe_ffn_hidden_size": 96, "shared_expert_size": 64}
    moe, dense = match_sizes(make_variants("dmoe,dense", [], settings), "flops")
    assert (dense.config.ffn_hidden_size, apart(dense.config, moe.config, "flops")) == (256, 0.0)


def test_the_router_counts_as_active_parameters():
    settings = SMALL | {"num_experts": 256, "topk": 4}
    moe, dense = match_sizes(make_variants("dmoe,dense", [], settings), "active-params")
    # Four experts of 256; 256 rows of 128 router weights are 256 / 3 channels of an MLP of three matrices.
    active = variants.MEASURES["active-params"]
    exact = variants.matched_width(dense.config, active(moe.config), active)
    assert exact == dense.config.ffn_hidden_size and abs(exact - (1024 + 256 / 3)) <= 32
    assert abs(apart(dense.config, moe.config, "active-params")) <= 2e-3


def test_the_reference_is_the_first_with_experts():
    made = make_variants("dense,moe,dmoe", [], SMALL | {"topk": 2})
    assert variants.reference_of(made).name == "moe"
    dense, *_ = match_sizes(made, "flops")
    assert dense.config.ffn_hidden_size == 512
    dense = make_variants("dense", ["deep:USE_MOE=false,NUM_LAYERS=8"], SMALL)
    assert variants.reference_of(dense).name == "dense"


def test_a_width_that_is_given_is_kept_and_a_model_that_is_too_large_refused():
    _, mine = match_sizes(make_variants("dmoe", ["mine:USE_MOE=false,FFN_HIDDEN_SIZE=1000"], SMALL), "flops")
    assert mine.config.ffn_hidden_size == 1000
    with pytest.raises(ConfigError, match=r"VARIANT=deep: .* FLOPs per token of dmoe .* FFN_HIDDEN_SIZE"):
        match_sizes(make_variants("dmoe", ["deep:USE_MOE=false,NUM_LAYERS=60"], SMALL), "flops")


def test_the_schedule_goes_with_the_iterations():
    names = ("train_iters", "decay_iters", "warmup_iters", "wsd_decay_iters")
    settings = SMALL | dict(zip(names, (100, 80, 10, 20), strict=True)) | {"lr_decay_style": "WSD"}
    variant = Variant.of("a", {}, settings)
    for chosen in ((150, 120, 10, 30), (5, 4, 3, 1)):
        found = variant.lasting(chosen[0]).config
        assert tuple(getattr(found, name) for name in names) == chosen
        assert list(found.problems()) == []
    assert variant.lasting(100) is variant
    two = Variant.of("a", {}, SMALL).lasting(2)
    assert list(two.config.problems()) == [] and two.config.warmup_iters == 1
    cosine = {"decay_iters": 0, "lr_decay_style": "cosine", "wsd_decay_iters": 0}
    assert Variant.of("b", {}, settings | cosine).lasting(50).config.decay_iters == 0


def test_points_of_the_schedule_go_with_the_iterations():
    settings = SMALL | {"train_iters": 100, "decay_iters": 0, "warmup_iters": 10, "wsd_decay_iters": 10}
    pieces = {"lr_decay_style": "constant:40,cosine:70%:10%,linear:90:50%,linear"}
    longer = Variant.of("a", {}, settings | pieces).lasting(150)
    assert longer.config.lr_decay_style == "constant:60,cosine:70%:10%,linear:135:50%,linear"
    cycles = {"lr_decay_style": "WSD-S", "wsd_decay_ends": "30,50%,75"}
    longer = Variant.of("a", {}, settings | cycles).lasting(150)
    assert longer.config.wsd_decay_ends == "45,50%,112"
    assert list(longer.config.problems()) == [] and longer.flags["lr_decay_style"] == "WSD-S"
    values = {"mtp_num_layers": 1, "mtp_loss_coeff": "1:30,0.3:50%,1"}
    longer = Variant.of("a", {}, settings | values).lasting(150)
    assert longer.config.mtp_loss_coeff == "1:45,0.3:50%,1"
    shares = Variant.of("a", {}, settings).lasting(150)
    assert set(POINTS).isdisjoint(shares.flags.keys() - SMALL.keys())
