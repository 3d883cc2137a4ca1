"""What the Megatron side of the layer refuses, and how it reads Megatron's settings."""

import re
import sys
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.layers.megatron_pair import megatron_config, start_parallel
from helpers.layers.tiny_moe import cut, plain_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.activations import quick_gelu, squared_relu
from moe_exp.layers.experts import SharedExpert
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.megatron import moe_parts
from moe_exp.layers.megatron.attention import CausalAttention, Norm
from moe_exp.layers.megatron.config_fields import FOLLOWED, IRRELEVANT, REFUSED, check_fields
from moe_exp.layers.megatron.moe_parts import Linear, MegatronMoELayer, MegatronRouter
from moe_exp.layers.router import RouterConfig
from moe_exp.layers.spec import decoder_spec, latent_attention_spec, moe_submodule_spec

from megatron.core import activations as megatron_activations
from megatron.core import tensor_parallel
from megatron.core.fusions import fused_bias_geglu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer as MoELayerOfMegatron
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

# Fields whose names do not begin with moe_ and that change an MoE layer of Megatron's.
NAMED_OTHERWISE = """
    activation_func activation_func_clamp_value activation_func_fp8_input_store add_bias_linear
    bias_activation_fusion calculate_per_token_loss delay_wgrad_compute expert_model_parallel_size
    expert_tensor_parallel_size fp4 fp8 fp8_recipe gated_linear_unit glu_linear_offset
    gradient_accumulation_fusion num_moe_experts overlap_moe_expert_parallel_comm recompute_granularity
    recompute_modules sequence_parallel use_fused_weighted_squared_relu use_te_activation_func
"""
SETTINGS = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 6,
    "moe_ffn_hidden_size": 12,
}  # fmt: skip


def settings(**changes: Any) -> TransformerConfig:
    config = TransformerConfig(**SETTINGS, moe_router_topk=2)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_width_of_a_rank():
    assert moe_parts.ffn_per_rank(12, 4) == 3
    with pytest.raises(ValueError, match=r"moe_ffn_hidden_size=12: .* ETP=5"):
        moe_parts.ffn_per_rank(12, 5)


def without_sequence_parallelism(ep: int, etp: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Output of a layer whose tensor parallel ranks have all tokens, that of one rank, and an error."""
    ranks = dist.get_world_size()
    start_parallel(tp=ranks, ep=ep, etp=etp)
    others = {
        "tensor_model_parallel_size": ranks, "expert_tensor_parallel_size": etp,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_overlap": True,  # of Megatron's dispatcher, whose part ours has
    }  # fmt: skip
    config = megatron_config(ep, "alltoall", SETTINGS | others)
    layer = build_module(moe_submodule_spec("loop"), config=config)
    hidden = config.hidden_size
    shared = SharedExpert(hidden_size=hidden, ffn_size=8)
    router = RouterConfig(hidden, config.num_moe_experts, topk=2)
    alone = plain_layer(router, config.moe_ffn_hidden_size, batch_dim=1, shared=shared)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in alone.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 3)
        layer.router.weight.copy_(alone.router.weight)
        groups = get_default_pg_collection()
        layer.experts.weight1.copy_(cut(alone.experts.weight1, 1, groups.ep, groups.expt_tp, halves=2))
        layer.experts.weight2.copy_(cut(alone.experts.weight2, 2, groups.ep, groups.expt_tp))
        first, second = layer.shared_experts.linear_fc1, layer.shared_experts.linear_fc2
        first.weight.copy_(cut(alone.shared.weight1, 0, None, groups.tp, halves=2))
        second.weight.copy_(cut(alone.shared.weight2, 1, None, groups.tp))
        tokens = torch.randn(5, 3, hidden, generator=generator)
        found, expected = layer.eval()(tokens)[0], alone.eval()(tokens)[0]
        assert not layer._token_layer[0].is_training
        padding_BS = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [1]])
        found = torch.cat([found, layer(tokens, padding_mask=padding_BS)[0]])
        expected = torch.cat([expected, alone(tokens, padding_BS.T)[0]])
    with pytest.raises(ValueError) as error:
        layer.train()(tokens)
    return found, expected, str(error.value)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (1, 1)])
def test_inference_without_sequence_parallelism(ep, etp):
    for found, expected, refused in run_on_ranks(2, without_sequence_parallelism, ep, etp):
        assert expected.abs().mean() > 0.1
        assert_equal_to(1e-6, {"output": found}, {"output": expected})
        assert refused.startswith("sequence_parallel=False: training with TP=2")


def initial_weights(ep: int, etp: int) -> list[torch.Tensor]:
    """Router, experts of this rank, and the random numbers that follow."""
    start_parallel(tp=etp, ep=ep, etp=etp)
    layer = build_module(moe_submodule_spec(), config=TransformerConfig(**SETTINGS, moe_router_topk=2))
    experts = layer.experts.weight1.detach(), layer.experts.weight2.detach()
    return [layer.router.weight.detach(), torch.rand(4), *experts]


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (1, 1)])
def test_experts_begin_with_other_weights_on_every_expert_parallel_rank(ep, etp):
    (*same, first1, first2), (*as_well, second1, second2) = run_on_ranks(2, initial_weights, ep, etp)
    assert all(map(torch.equal, same, as_well))
    is_replicated = ep * etp == 1
    assert torch.equal(first1, second1) == torch.equal(first2, second2) == is_replicated
    for weight in (first1, first2, second1, second2):
        assert 0.009 < weight.std().item() < 0.022


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_the_local_dispatcher_needs_all_experts_here(ep, etp):
    groups = SimpleNamespace(ep=SimpleNamespace(size=lambda: ep), expt_tp=SimpleNamespace(size=lambda: etp))
    with pytest.raises(ValueError, match=rf"^dispatcher=local: .* not EP={ep} and ETP={etp}\."):
        moe_parts._dispatcher("local", settings(), groups)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), ([0, 1, 1, 0], [0, 1, 1, 0])],
)
def test_every_nth_layer_is_counted_from_the_first_as_in_megatron(frequency, expected):
    found = run_on_ranks(1, moe_layers_of, frequency)[0]
    assert found == (expected, expected)


def moe_layers_of(frequency: int | list[int]) -> tuple[list[int], list[int]]:
    """Which layers are MoE layers, in our spec and in Megatron's."""
    start_parallel()
    config = TransformerConfig(**SETTINGS | {"num_layers": 4}, moe_router_topk=2, moe_layer_freq=frequency)
    ours = decoder_spec(config).layer_specs
    theirs = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs
    own = [int(layer.submodules.mlp.module is MegatronMoELayer) for layer in ours]
    parts = [layer.submodules.mlp for layer in theirs]
    # from 0.18 on they are partial functions
    classes = [part.func if isinstance(part, partial) else part.module for part in parts]
    return own, [int(one is MoELayerOfMegatron) for one in classes]


def test_a_layer_without_a_spec():
    with pytest.raises(ValueError, match=r"submodules=None: .* Fix: use moe_submodule_spec\(\)\."):
        MegatronMoELayer(settings())


@pytest.mark.parametrize(
    ("kinds", "coeffs", "expected"),
    [
        ("aux_loss", 0.5, (AuxLoss("aux_loss", 0.5),)),
        ("none", 0.5, ()),
        ("sinkhorn", 0.0, ()),
        (["aux_loss", "l1"], [0.5, 0.25], (AuxLoss("aux_loss", 0.5), AuxLoss("l1", 0.25))),
    ],
)
def test_losses_of_a_transformer_config(kinds, coeffs, expected):
    config = settings(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coeffs)
    assert moe_parts.balancing_losses(config) == expected
    with pytest.raises(ValueError, match=r"aux_loss_type=aux: .* Fix: use aux_loss"):
        moe_parts.balancing_losses(settings(moe_router_load_balancing_type="aux"))


def drop_policy_of(policy: str) -> str:
    start_parallel(tp=1, ep=1, etp=1)
    config = settings(moe_token_drop_policy=policy, moe_expert_capacity_factor=1.0)
    return build_module(moe_submodule_spec(), config=config)._token_layer[0].settings.drop_policy


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drop_policy_of_a_transformer_config(policy):
    assert run_on_ranks(1, drop_policy_of, policy) == [policy]


def test_activation_of_a_transformer_config():
    for function in (squared_relu, megatron_activations.squared_relu):
        assert moe_parts.activation_name(settings(activation_func=function)) == "squared_relu"
    x = torch.linspace(-3, 3, 25)
    assert torch.equal(megatron_activations.squared_relu(x), squared_relu(x))
    clamped = {"gated_linear_unit": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    for function in (quick_gelu, megatron_activations.quick_gelu, fused_bias_geglu.quick_gelu):
        assert moe_parts.activation_name(settings(activation_func=function, **clamped)) == "clamped_swiglu"
    assert torch.equal(megatron_activations.quick_gelu(x), quick_gelu(x))
    others = {"gated_linear_unit": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0}
    for name, value in (*others.items(), ("activation_func_clamp_value", 0.0)):
        config = settings(activation_func=quick_gelu, **clamped)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=rf"activation_func=.*{name}={value}.* is not supported in MoE"):
            moe_parts.activation_name(config)


def test_router_of_a_transformer_config():
    losses = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.1]}
    config = settings(moe_router_dtype="fp64", moe_input_jitter_eps=0.1, **losses)
    router = moe_parts.router_config(config, {"score": "sqrtsoftplus", "normalize": False})
    assert (router.global_fractions, router.dtype, router.jitter, router.topk) == (True, "fp64", 0.1, 2)
    assert (router.score, router.assignment) == ("sqrtsoftplus", "topk")
    assert not router.normalizes and not router.pre_softmax
    for name, value, assignment in (
        ("load_balancing_type", "sinkhorn", "sinkhorn"), ("force_load_balancing", True, "balanced")
    ):  # fmt: skip
        config = settings(**{f"moe_router_{name}": value})
        assert moe_parts.router_config(config, {}).assignment == assignment


def test_an_expert_bias_that_nothing_would_update_is_refused():
    groups = SimpleNamespace(tp_cp=None)
    rules = {"expert_bias": True, "score": "sigmoid"}
    with pytest.raises(ValueError, match=r"^expert_bias=True: .* Fix: set moe_router_enable_expert_bias="):
        MegatronRouter(settings(), groups, rules)
    assert MegatronRouter(settings(), groups, rules | {"bias_rule": "quantile"}).config.finds_quantiles


def test_latent_projections_of_transformer_engine_are_built_as_by_megatron():
    """Arguments of its linear layer; without it Megatron's own, with initial weights and biases of zero."""
    config = settings(moe_latent_size=8, sequence_parallel=True)
    calls: list[Any] = []

    def linear(*sizes: int, **options: Any) -> None:
        calls.append((sizes, {name: value for name, value in options.items() if value}))

    moe_parts.latent_projections(config, linear, "tensor parallel ranks", torch.device("cpu"))
    always = {"config": config, "bias": True, "parallel_mode": "duplicated"}
    first, second = config.init_method, config.output_layer_init_method
    assert calls == [((16, 8), always | {"init_method": first}), ((8, 16), always | {"init_method": second})]
    down, up = moe_parts.latent_projections(config, Linear, "tensor parallel ranks", torch.device("cpu"))
    assert (down.weight.shape, up.weight.shape) == ((8, 16), (16, 8))
    assert not down.bias.any() and not up.bias.any()
    assert [p.sequence_parallel for one in (down, up) for p in one.parameters()] == [True] * 4
    assert down.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert up.weight.std().item() == pytest.approx(0.02 / 2, rel=0.3)  # of two layers


def test_every_moe_field_of_megatron_is_followed_refused_or_irrelevant():
    words = ("moe_", "activation_func", "glu", "expert_")
    names = {field.name for field in fields(TransformerConfig)}
    concerned = {name for name in names if name.startswith(words) or name in NAMED_OTHERWISE.split()}
    lists = (FOLLOWED, set(REFUSED), IRRELEVANT)
    wrong = {name: n for name in concerned if (n := sum(name in one for one in lists)) != 1}
    assert not wrong, f"not in exactly one list of config_fields.py: {wrong}"
    assert len(concerned) > 50


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("moe_apply_probs_on_input", True, "leave it at False"),
        ("calculate_per_token_loss", True, "leave it at False"),
        ("fp4", "e2m1", "leave it at None, or use fp8"),
        ("overlap_moe_expert_parallel_comm", True, "leave it at False"),
        ("window_size", (128, 1), r"set it to None or \(128, 0\), or set use_te=True"),
        ("softmax_type", "off-by-one", "set it to vanilla or learnable, or set use_te=True"),
        ("layernorm_zero_centered_gamma", True, "set it to False, or set use_te=True"),
    ],
)
def test_fields_that_the_layer_does_not_follow_are_refused(name, value, text):
    config = settings(**{name: value})
    message = rf"^{name}={re.escape(str(value))}: .* Fix: {text}"
    with pytest.raises(ValueError, match=message):
        decoder_spec(config)
    if "use_te" not in text:
        with pytest.raises(ValueError, match=message):
            build_module(moe_submodule_spec(), config=config)


def test_fp8_of_transformer_engine_is_recomputed_by_it(monkeypatch):
    given = []
    package = SimpleNamespace(te_checkpoint=lambda function, *args: given.append(args) or function(args[-1]))
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", package)
    layer = SimpleNamespace(config=SimpleNamespace(fp8="hybrid"), tp_group="tp")
    assert MegatronMoELayer._recomputed(layer, lambda x: x + 1, 2) == 3
    assert given == [(False, tensor_parallel.get_cuda_rng_tracker, "tp", 2)]


def test_auto_backend_is_that_of_the_dtype_of_the_parameters(monkeypatch):
    asked = []

    def choose(name, **how):
        asked.append((name, how))
        return "loop", ""

    monkeypatch.setattr(moe_parts, "choose_backend", choose)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=one, expt_tp=one, expt_dp=one)
    config = settings(params_dtype=torch.bfloat16)
    build_module(moe_submodule_spec().submodules.experts, 2, config, pg_collection=groups)
    assert asked == [("auto", {"device_type": "cpu", "dtype": torch.bfloat16})]


def test_a_field_of_a_newer_megatron_is_refused_unless_at_its_default():
    @dataclass
    class Newer(TransformerConfig):
        moe_new_rule: float = 0.5

    check_fields(Newer(**SETTINGS))
    with pytest.raises(ValueError, match=r"moe_new_rule=0\.7: is not supported .* Fix"):
        check_fields(Newer(**SETTINGS, moe_new_rule=0.7))


CORE = ModuleSpec(module=CausalAttention)


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True), (2, False)])
def test_latent_attention_has_whole_projections_down(ranks, sequence_parallel):
    config = SimpleNamespace(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    if ranks == 2 and not sequence_parallel:
        with pytest.raises(ValueError, match=r"sequence_parallel=False: .* Fix: set sequence_parallel=True"):
            latent_attention_spec(config, norm=Norm, core=CORE)
        return
    parts = latent_attention_spec(config, norm=Norm, core=CORE).submodules
    assert parts.linear_q_down_proj is parts.linear_kv_down_proj is not parts.linear_q_up_proj
    assert parts.q_layernorm is parts.kv_layernorm is Norm
