"""The rotary embedding in few operations equals Megatron's."""

import functools

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.layers.references import Operations
from helpers.relative_error import relative_error
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.engine.backends import backends_of, parts_with_kernels
from moe_exp.engine.model import transformer_config
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import INTERPRETED, KernelFailure
from moe_exp.layers.megatron import rotary

from megatron.core.models.common.embeddings import rope_utils

ERRORS = {torch.float64: 1e-15, torch.float32: 2e-7, torch.bfloat16: 5e-3}
# device, and whether the kernel rotates
CASES = [
    ("cpu", False),
    pytest.param("cpu", True, marks=pytest.mark.skipif(not INTERPRETED, reason="not interpreted")),
    *(
        pytest.param("cuda", on, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
        for on in (False, True)
    ),
]


def drawn(dtype, *, samples=1, width=32, interleaved=False, device="cpu"):
    """Values [S, B, H, D], their gradient, and angles for `width` of the 32 values of a head."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, 2, 3, 32, generator=generator).to(dtype) for _ in range(2))
    half = torch.rand(64, samples, 1, width // 2, generator=generator) * 50
    angles = torch.stack((half, half), -1).flatten(-2) if interleaved else torch.cat((half, half), -1)
    return x.to(device).requires_grad_(), dy.to(device), angles.to(device)


@pytest.mark.parametrize(("device", "use_kernel"), CASES)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("dtype", ERRORS)
def test_values_and_gradients_are_those_of_megatron(dtype, width, interleaved, samples, device, use_kernel):
    x, dy, angles = drawn(dtype, samples=samples, width=width, interleaved=interleaved, device=device)
    results = []
    for function in (
        lambda: rope_utils._apply_rotary_pos_emb_bshd(x, angles, interleaved),
        lambda: rotary.rotate(x, angles, interleaved=interleaved, use_kernel=use_kernel),
    ):
        x.grad = None
        y = function()
        y.backward(dy)
        results.append((y.detach(), x.grad))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        # the interpreter truncates to bf16
        assert relative_error(found, expected) <= ERRORS[dtype] * (2 if use_kernel else 1)


@needs_kernels
def test_one_kernel_in_each_direction(monkeypatch):
    """Of a view, as keys are, with heads that do not fill a program; also a gradient of strides 0."""
    mixed, angles = torch.randn(5, 2, 3, 72, device=DEVICE), torch.rand(5, 1, 1, 24, device=DEVICE)
    angles, key = torch.cat((angles, angles), -1), mixed[..., 8:].requires_grad_()
    monkeypatch.setattr(rotary, "_TILE", 64)  # two heads in a program
    found, expected = [], []
    for results, use_kernel in ((found, True), (expected, False)):
        y = rotary.rotate(key, angles, use_kernel=use_kernel)
        results += [y, *torch.autograd.grad(y, key, torch.ones(1, device=DEVICE).expand_as(y))]
        results += torch.autograd.grad(rotary.rotate(key, angles, use_kernel=use_kernel), key, y.detach())
    assert found[0].is_contiguous()
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 2e-7
    with Operations() as seen:
        rotary.rotate(key, angles, use_kernel=True)
    assert not seen.counts["mul"] and not seen.counts["addcmul_"]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_found_at_the_start(dtype, monkeypatch):
    device = torch.device(DEVICE)
    assert not any(check.problem for check in rotary.check_rotated(dtype, device))
    kernel = rotary.rotated
    wrong = functools.wraps(kernel)(lambda *args: kernel(*args[:-1], 1))
    monkeypatch.setattr(rotary, "rotated", wrong)
    problems = [check.problem for check in rotary.check_rotated(dtype, device)]
    assert ["relative error" in problem for problem in problems] == [False, True] * 2


def test_a_part_of_a_larger_tensor_is_not_changed():
    """Queries are a view of what one product computes for queries, keys and values."""
    mixed = torch.randn(8, 2, 3, 48)
    before, angles = mixed.clone(), torch.rand(8, 1, 1, 16).repeat(1, 1, 1, 2)
    found = rotary.rotate(mixed[..., :32], angles)
    assert torch.equal(mixed, before)
    assert relative_error(found, rope_utils._apply_rotary_pos_emb_bshd(mixed[..., :32], angles)) < 2e-7


def test_cosine_and_sine_are_computed_once():
    x, dy, angles = drawn(torch.bfloat16)
    with Operations() as seen:
        for _ in range(3):
            rotary.rotate(x, angles).backward(dy)
    assert (seen.counts["cos"], seen.counts["sin"]) == (1, 1)
    assert (seen.counts["mul"], seen.counts["addcmul_"]) == (6, 12)
    assert not seen.counts["cat"] and not seen.counts["neg"]


def test_what_inference_has_computed_is_no_obstacle_to_training():
    x, dy, angles = drawn(torch.float32)
    with torch.inference_mode():
        rotary.rotate(x, angles)
    rotary.rotate(x, angles).backward(dy)


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ({}, True),
        ({"document_mask": "true"}, False),
        ({"rope_scaling": "yarn", "rope_scaling_factor": "2", "rope_original_seq_len": "32"}, False),
    ],
)
def test_megatron_calls_it(settings, fused):
    config = load_config({**SMALL, **settings}, {})
    assert transformer_config(config).apply_rope_fusion is fused
    assert rope_utils.fused_apply_rotary_pos_emb is rotary.rotate


def test_the_row_of_the_start(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "")
    monkeypatch.setattr("moe_exp.engine.backends.choose_backend", lambda *args, **options: ("", ""))
    failures = [KernelFailure("rotary embedding", ["rotated is wrong"], "megatron")]
    masked, part = {"document_mask": "true"}, "rotary embedding"
    for settings, failed, name in (({}, [], "triton"), ({}, failures, "megatron"), (masked, [], "megatron")):
        config = load_config({**SMALL, "gpus_per_node": 1, **settings}, {})
        found, reason = backends_of(config, "cuda", failed)[part]
        assert found == name and ("rotated is wrong" in reason) == bool(failed)
        assert part not in backends_of(config, "cpu", failed)
        assert (part in parts_with_kernels(config, torch.device("cuda"))) == (settings == {})
    assert rotary.choose_rotary(True, device_type="cpu")[0] == "torch"


@pytest.mark.parametrize(("impl", "on_gpu", "fused"), [("te", True, True), ("local", True, False)])
def test_with_transformer_engine_it_is_theirs_and_only_with_their_layers(monkeypatch, impl, on_gpu, fused):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert transformer_config(load_config({**SMALL, "impl": impl}, {})).apply_rope_fusion is fused
