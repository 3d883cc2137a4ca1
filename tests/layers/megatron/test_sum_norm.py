"""One kernel for the sum after attention and its norm: the numbers of Megatron's sum and PyTorch's norm."""

import pytest
import torch
from torch import nn

from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.engine import model as engine_model
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of, parts_with_kernels
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import KernelFailure
from moe_exp.layers.megatron import residual

TINY = SMALL | {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_experts": 4,
    "vocab_size": 512,
}
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def results_of(function, operands, grads):
    """Results of a function of three tensors, and the gradients of these."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    found = function(*leaves)
    return [*found, *torch.autograd.grad(found, leaves, grads)]


@pytest.mark.parametrize(
    ("dtype", "device"),
    [(dtype, "cpu") for dtype in LIMITS]
    + [pytest.param(dtype, DEVICE, marks=needs_kernels) for dtype in (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(5, 3, 640), (1, 1, 32), (0, 2, 16)])
def test_values_and_gradients_against_two_operations(dtype, device, shape, monkeypatch):
    if device == "cpu" and dtype == torch.float64:  # others are kernels where the tests are interpreted
        monkeypatch.setattr(launch, "runs_kernel", lambda x: False)
    generator = torch.Generator().manual_seed(0)
    x, other, *grads = torch.randn(4, *shape, generator=generator).to(dtype).to(device)
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype).to(device)

    def two(x, other, weight):
        total = x + other
        return total, nn.functional.rms_norm(total, weight.shape, weight, 1e-3)

    def one(*operands):
        return residual.SumNorm.apply(*operands, 1e-3)

    wanted, found = (results_of(function, (x, other, weight), grads) for function in (two, one))
    for name, a, b in zip(("sum", "norm", "dx", "dother", "dweight"), found, wanted, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert relative_error(a, b) <= LIMITS[dtype], name


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_kernels_are_found_at_the_start(dtype, monkeypatch):
    device = torch.device(DEVICE)
    checks = list(residual.check_sum_norm(dtype, device))
    assert [check.kernel for check in checks] == ["sum_norm", "sum_norm_gradient"]
    assert not any(check.problem for check in checks)
    twin = residual.sum_norm_torch
    monkeypatch.setattr(residual, "sum_norm_torch", lambda *x: twin(*x[:3], 1.0))
    assert "relative error" in next(residual.check_sum_norm(dtype, device)).problem


def losses_and_gradients(settings, names):
    """Losses [B, S] and all gradients of this rank, for each name of the norms."""
    launch.INTERPRETED = False  # the plain-torch references, which are much faster
    results, rank, config = [], None, load_config(TINY | settings, {})
    for name in names:
        engine_model.choose_norm = lambda *_, name=name, **__: (name, "")
        rank = rank or runtime.start(config)
        (model,) = engine_model.build_model(config, rank)
        tokens = torch.randint(500, (2, 13), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(12).expand(2, 12)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.sum().backward()
        gradients = {key: parameter.main_grad.clone() for key, parameter in model.named_parameters()}
        layer = model.module.decoder.layers[0]
        results.append((hasattr(layer.self_attn_bda, "__self__"), losses.detach(), gradients))
    runtime.stop()
    return results


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "full"},
        {"first_k_dense": 1, "norm_placement": "around_moe"},
        {"gpus_per_node": 2, "tp": 2},
        pytest.param({"gpus_per_node": 4, "tp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_with_it(settings):
    ranks = settings.get("gpus_per_node", 1)
    settings = {"gpus_per_node": 1} | settings
    names = ["torch", "triton"]
    for (before, expected, expected_grads), (after, losses, grads) in run_on_ranks(
        ranks, losses_and_gradients, settings, names, join=False
    ):
        assert (before, after) == (False, True)
        assert relative_error(losses, expected) < 1e-6
        assert grads.keys() == expected_grads.keys()
        for key, grad in grads.items():
            assert relative_error(grad, expected_grads[key]) < 1e-5, key


def test_hooks_of_the_norm_run_before_its_weight_is_read():
    """Megatron's hook waits until the weight is gathered from the other ranks (OVERLAP)."""
    layer, values = nn.Module(), torch.randn(3, 1, 8)
    layer.pre_mlp_layernorm, layer.self_attn_bda = nn.RMSNorm(8, eps=1e-5), None
    residual.SumAndNorm(layer)
    arrives = torch.linspace(1, 2, 8)

    def gather(norm, args):
        norm.weight.data.copy_(arrives)

    layer.pre_mlp_layernorm.register_forward_pre_hook(gather)
    total = layer.self_attn_bda(True, False)((values, None), values, 0.0)
    assert torch.equal(total, 2 * values)
    expected = nn.functional.rms_norm(total, (8,), arrives, 1e-5)
    assert relative_error(layer.pre_mlp_layernorm(total), expected) < 1e-6
    assert list(layer.state_dict()) == ["pre_mlp_layernorm.weight"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"normalization": "LayerNorm"}, "NORMALIZATION=LayerNorm"),
        ({"norm_placement": "parallel"}, "NORM_PLACEMENT=parallel"),
        ({"residual_multiplier": 0.5}, "RESIDUAL_MULTIPLIER=0.5"),
        ({"dropout": 0.1}, "DROPOUT=0.1"),
        ({"add_bias_linear": True}, "ADD_BIAS_LINEAR=true"),
        ({"recompute_modules": "norm"}, "RECOMPUTE_MODULES=norm"),
    ],
    ids=str,
)
def test_the_row_of_the_start(settings, reason, monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "")
    monkeypatch.setattr("moe_exp.engine.backends.choose_backend", lambda *args, **options: ("", ""))
    config = load_config(TINY | {"gpus_per_node": 1} | settings, {})
    name, text = backends_of(config, "cuda")["norm"]
    assert (name, reason in text) == ("torch" if reason else "triton", True)
    assert ("norm" in parts_with_kernels(config, torch.device("cuda"))) == (not reason)
    failure = KernelFailure("norm", ["sum_norm is wrong"], "torch")
    name, text = backends_of(config, "cuda", [failure])["norm"]
    assert name == "torch" and "sum_norm is wrong" in text
    assert backends_of(config, "cpu")["norm"][0] == "torch"
