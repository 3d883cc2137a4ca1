"""The rotary embedding in few operations equals Megatron's."""

import pytest
import torch

from helpers.layers.references import Operations
from helpers.relative_error import relative_error
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.engine.model import transformer_config
from moe_exp.layers.megatron import attention as rotary

from megatron.core.models.common.embeddings import rope_utils

ERRORS = {torch.float64: 1e-15, torch.float32: 2e-7, torch.bfloat16: 5e-3}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def drawn(dtype, *, samples=1, width=32, interleaved=False, device="cpu"):
    """Values [S, B, H, D], their gradient, and angles for `width` of the 32 values of a head."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, 2, 3, 32, generator=generator).to(dtype) for _ in range(2))
    half = torch.rand(64, samples, 1, width // 2, generator=generator) * 50
    angles = torch.stack((half, half), -1).flatten(-2) if interleaved else torch.cat((half, half), -1)
    return x.to(device).requires_grad_(), dy.to(device), angles.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("dtype", ERRORS)
def test_values_and_gradients_are_those_of_megatron(dtype, width, interleaved, samples, device):
    x, dy, angles = drawn(dtype, samples=samples, width=width, interleaved=interleaved, device=device)
    results = []
    for function in (
        lambda: rope_utils._apply_rotary_pos_emb_bshd(x, angles, interleaved),
        lambda: rotary.rotate(x, angles, interleaved=interleaved),
    ):
        x.grad = None
        y = function()
        y.backward(dy)
        results.append((y.detach(), x.grad))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        assert relative_error(found, expected) <= ERRORS[dtype]


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


@pytest.mark.parametrize(("impl", "on_gpu", "fused"), [("te", True, True), ("local", True, False)])
def test_with_transformer_engine_it_is_theirs_and_only_with_their_layers(monkeypatch, impl, on_gpu, fused):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert transformer_config(load_config({**SMALL, "impl": impl}, {})).apply_rope_fusion is fused
