"""Experts of gpt-oss in MXFP4: decoded as by transformers, exported in bf16 or fp32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.hf.logits_on_ranks import our_logits
from helpers.hf.tiny_models import their_logits, tiny_folder, weights_of
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.checkpoint.hf.model_folder import unpacked

TOKENS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(0))


def packed(shape: tuple[int, ...], seed: int, scales: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks [..., 16] and scales [...]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(*scales, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("exponents", [(0, 2), (100, 140), (253, 254)])
def test_decodes_as_transformers(exponents):
    blocks, scales = packed((3, 10, 5), 0, exponents)
    found = torch.stack([unpacked(*expert) for expert in zip(blocks, scales, strict=True)])
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))
    every_byte = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    ones = torch.full((16, 1), 127, dtype=torch.uint8)
    assert unpacked(every_byte, ones).unique().tolist() == [
        -6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with experts in MXFP4, as gpt-oss is published."""
    sizes = {"intermediate_size": 32, "hidden_size": 64}
    source = tiny_folder(tmp_path / "hf", "gpt_oss", dtype=torch.bfloat16, changes=sizes)
    weights = weights_of(source)
    for seed, name in enumerate(sorted(name for name in weights if name.endswith("_proj"))):
        experts, inputs, outputs = weights.pop(name).shape
        # large enough that the activation's limits are reached
        blocks, scales = packed((experts, outputs, inputs // 32), seed, (124, 127))
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(fields))
    return source


def test_a_folder(folder, tmp_path):
    assert from_hf(folder, tmp_path / "ours").config.dtype == "bf16"
    to_hf(tmp_path / "ours", tmp_path / "back")
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    dequantize = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantize, **options)
    expected, found = theirs.state_dict(), weights_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    from_hf(folder, tmp_path / "fp32", dtype="fp32")
    (ours,) = our_logits([tmp_path / "fp32"], TOKENS)
    with torch.no_grad():
        assert_equal_to(1e-5, {"": ours}, {"": theirs.float().eval()(TOKENS).logits})
    assert_equal_to(1e-5, {"": ours}, {"": their_logits(tmp_path / "back", TOKENS)})


@pytest.mark.parametrize("wrong", ["no scales", "shape", "floats"])
def test_refused(wrong, folder, tmp_path):
    weights = weights_of(folder)
    name = "model.layers.1.mlp.experts.down_proj"
    if wrong == "no scales":
        weights.pop(f"{name}_scales")
    elif wrong == "shape":
        weights[f"{name}_scales"] = weights[f"{name}_scales"][:, :-1].contiguous()
    else:  # as transformers writes a model that it has decoded
        weights[f"{name}_blocks"] = weights[f"{name}_blocks"].float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name}_blocks: must be U8 .* Fix: download"):
        from_hf(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
