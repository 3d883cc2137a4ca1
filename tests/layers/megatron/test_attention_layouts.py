"""Attention as published models have it, and latent experts: the same losses and gradients at every layout,
and through a checkpoint of another layout.

Runs on several ranks start from the checkpoint of one rank, with another seed, so that a tensor that is not
loaded is seen.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.model_on_ranks import Found, run_models
from helpers.relative_error import assert_equal_to

LIMIT = 1e-5
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8, "qk_norm": True, "num_query_groups": 1,
}  # fmt: skip
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4, "rope_original_seq_len": 64}
KINDS: dict[str, dict[str, Any]] = {
    "norm over all heads": {"qk_norm": True, "qk_norm_scope": "all"},
    "bias, half turned": {
        "qkv_bias": True, "rotary_fraction": 0.5, "rope_scaling": "llama3", "rope_scaling_factor": 8,
        "rotary_base": 1e6,
    },
    "yarn": {"normalization": "LayerNorm", "qk_norm": True, **YARN},
    "latent": LATENT | {"q_lora_rank": 12},
    "latent, yarn": LATENT | YARN | {"yarn_mscale_all_dim": 1},
    "norms after, factors": {
        "norm_placement": "post", "qk_norm": True, "qk_norm_scope": "all", "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 3.0, "dropout": 0.0,
    },
    "rotated heads normalized": {"qk_norm": True, "qk_norm_scope": "rotated", "qk_norm_epsilon": 1e-2},
    "windows, sinks": {
        "sliding_window": 5, "window_pattern": "1:1", "attention_sinks": "windowed",
        "attention_softcap": 4.0, "rotary_layers": "windowed",
    },
    "gate, two rotary embeddings": {
        "attention_gate": True, "sliding_window": 9, "window_pattern": "0,1", "window_rotary_base": 300.0,
        "attention_sinks": "all", "yarn_truncate": False, **YARN,
    },
    "norms around, LayerNorm": {
        "norm_placement": "around", "normalization": "LayerNorm", "first_k_dense": 1, "norm_bias": False,
    },
    "parallel": {
        "norm_placement": "parallel", "normalization": "LayerNorm", "norm_bias": False, "first_k_dense": 1,
        "shared_expert_size": 16,
    },
    "groups of windows": {
        "sliding_window": 6, "window_pattern": "0,1", "window_query_groups": 4, "attention_sinks": "windowed",
        "value_head_dim": 6, "value_scale": 0.7, "qk_norm": True, "qk_norm_scope": "all",
    },
    "latent experts": {
        "moe_latent_size": 12, "add_bias_linear": True, "activation": "clamped_swiglu", "topk": 4,
    },
}  # fmt: skip
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2": {"ep": 2}, "cp2": {"cp": 2}}
# Where a kind does something of its own; the rest is slow.
FAST = [(kind, "tp2") for kind in KINDS if kind != "latent, yarn" and kind != "yarn"]
FAST += [("yarn", "cp2"), ("latent, yarn", "cp2"), ("latent", "pp2"), ("groups of windows", "pp2")]
SLOW = [(kind, layout) for kind in KINDS for layout in LAYOUTS if (kind, layout) not in FAST]

# All that DeepSeek-V3 has, in 4 layers of which the first is dense.
DEEPSEEK = LATENT | YARN | {
    "q_lora_rank": 12, "yarn_mscale_all_dim": 1, "num_layers": 4, "first_k_dense": 1, "num_experts": 8,
    "shared_expert_size": 16, "router_score": "sigmoid", "router_bias_update_rate": 0.01,
    "num_router_groups": 4, "router_group_topk": 2, "router_scaling_factor": 2.5,
    "aux_loss_type": "seq_aux_loss", "distributed_optimizer": True, "norm_placement": "around_moe",
    "qk_norm_epsilon": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoints folder per kind, by its index, once `one_rank` has been asked."""
    return tmp_path_factory.mktemp("attention")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Callable[[str], Found]:
    """What a kind of model did on one rank, or `deepseek`: four iterations, saved after the second, or
    `deepseek resumed` from there.
    """

    @cache
    def run_all() -> dict[str, Found]:
        kinds = enumerate(KINDS.items())
        jobs = {kind: settings | {"save": f"{folder}/{index}"} for index, (kind, settings) in kinds}
        jobs["deepseek"] = DEEPSEEK | {"save": f"{folder}/deepseek", "save_after": 2, "iterations": 4}
        jobs["deepseek resumed"] = DEEPSEEK | {"load": f"{folder}/deepseek", "seed": 99}
        return dict(zip(jobs, run_models(1, list(jobs.values())), strict=True))

    return lambda name: run_all()[name]


@pytest.fixture(scope="module")
def two_ranks(folder: Path, one_rank: Callable[[str], Found]) -> Callable[[str, str], Found]:
    """What a kind of model did on a layout, from the checkpoint of one rank; or `deepseek` from its second
    iteration on.
    """

    @cache
    def run_all(slow: bool) -> dict[tuple[str, str], Found]:
        one_rank("latent")
        names, cases = list(KINDS), SLOW if slow else FAST
        jobs = {
            (kind, layout): KINDS[kind] | LAYOUTS[layout] | {"load": f"{folder}/{names.index(kind)}"}
            for kind, layout in cases
        }
        if not slow:
            jobs["deepseek", "ep2"] = DEEPSEEK | {"ep": 2, "load": f"{folder}/deepseek"}
        # Jobs of one layout that follow one another share their process groups.
        jobs = dict(sorted(jobs.items(), key=lambda job: job[0][1]))
        found = run_models(2, [settings | {"seed": 99} for settings in jobs.values()])
        return dict(zip(jobs, found, strict=True))

    return lambda kind, layout: run_all((kind, layout) in SLOW)[kind, layout]


@pytest.mark.parametrize(
    ("kind", "layout"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_same_numbers_as_one_rank(kind, layout, one_rank, two_ranks):
    one, ours = one_rank(kind), two_ranks(kind, layout)
    torch.testing.assert_close(ours.losses, one.losses, rtol=LIMIT, atol=0)
    assert ours.grad_norms == pytest.approx(one.grad_norms, rel=LIMIT)
    print(f"largest relative error {assert_equal_to(LIMIT, ours.gradients, one.gradients):.1e}")


def test_deepseek_goes_on_bit_for_bit(one_rank):
    whole, resumed = one_rank("deepseek"), one_rank("deepseek resumed")
    assert torch.equal(resumed.losses, whole.losses[len(whole.losses) // 2 :])
    assert resumed.grad_norms == whole.grad_norms[2:]


def test_deepseek_goes_on_with_its_experts_on_two_ranks(one_rank, two_ranks):
    whole, resumed = one_rank("deepseek"), two_ranks("deepseek", "ep2")
    torch.testing.assert_close(resumed.losses, whole.losses[len(whole.losses) // 2 :], rtol=LIMIT, atol=0)
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[2:], rel=LIMIT)


def test_keys_are_those_of_megatron(folder, one_rank):
    """The norms of multi-latent attention belong to the next layer, as in Transformer Engine's layers."""
    from moe_exp.checkpoint.format.folders import iteration_folder
    from moe_exp.checkpoint.format.torch_dist import CheckpointReader

    one_rank("latent")
    prefix, names = "decoder.layers.self_attention.", list(KINDS)
    shapes = {}
    for kind in ("latent", "latent, yarn", "norm over all heads"):
        stored = CheckpointReader(iteration_folder(folder / str(names.index(kind)), 0)).tensors
        own = {key: tensor.shape[1:] for key, tensor in stored.items() if key.startswith(prefix)}
        shapes[kind] = {key.removeprefix(prefix): shape for key, shape in own.items()}
        if kind != "norm over all heads":
            assert stored["decoder.layers.input_layernorm.weight"].shape == (2, 32)
    down_and_up = {
        "linear_kv_down_proj.weight": (16 + 6, 32), "linear_kv_up_proj.weight": (4 * (10 + 8), 16),
        "linear_kv_up_proj.layer_norm_weight": (16,), "linear_proj.weight": (32, 4 * 8),
    }  # fmt: skip
    assert shapes["latent, yarn"] == down_and_up | {"linear_q_proj.weight": (4 * 16, 32)}
    assert shapes["latent"] == down_and_up | {
        "linear_q_down_proj.weight": (12, 32), "linear_q_up_proj.weight": (4 * 16, 12),
        "linear_q_up_proj.layer_norm_weight": (12,),
    }  # fmt: skip
    assert shapes["norm over all heads"] == {
        "linear_qkv.weight": (64, 32), "linear_qkv.layer_norm_weight": (32,), "linear_proj.weight": (32, 32),
        "q_layernorm.weight": (32,), "k_layernorm.weight": (16,),
    }  # fmt: skip


def test_parallel_layers_are_recomputed():
    kind = KINDS["parallel"]
    plain, *others = run_models(1, [kind, kind | {"recompute": "full"}, kind | {"recompute": "selective"}])
    for again in others:
        assert torch.equal(again.losses, plain.losses) and again.grad_norms == plain.grad_norms
        assert assert_equal_to(1e-6, again.gradients, plain.gradients) == 0


def test_missing_channels_of_values_have_no_gradients(one_rank):
    gradients = one_rank("groups of windows").gradients
    for layer, groups in enumerate((2, 4)):
        prefix = f"decoder.layers.{layer}.self_attention."
        value = gradients[f"{prefix}linear_qkv.weight"].view(groups, -1, 8, 32)[:, -1]
        output = gradients[f"{prefix}linear_proj.weight"].view(32, 4, 8)
        assert not value[:, 6:].any() and value[:, :6].all()
        assert not output[..., 6:].any() and output[..., :6].all()


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (2, [{"tp": 2}]),
        pytest.param(4, [{"tp": 4}, {"tp": 2, "ep": 2}, {"tp": 2, "cp": 2}], marks=pytest.mark.slow),
    ],
    ids=["2", "4"],
)
def test_router_biases_have_the_gradient_of_one_rank(num_ranks, layouts):
    """With sequence parallelism every rank routes a part of the sequence."""
    kind = {"add_bias_linear": True, "num_query_groups": 4, "z_loss_coeff": 0.1}
    (one,) = run_models(1, [kind])
    expected = {name: value for name, value in one.gradients.items() if ".router." in name}
    assert len(expected) == 4
    for found in run_models(num_ranks, [kind | layout for layout in layouts]):
        torch.testing.assert_close(found.losses, one.losses, rtol=LIMIT, atol=0)
        assert found.grad_norms == pytest.approx(one.grad_norms, rel=LIMIT)
        assert_equal_to(LIMIT, {name: found.gradients[name] for name in expected}, expected)
