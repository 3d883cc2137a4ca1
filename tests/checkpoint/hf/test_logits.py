"""A converted model computes what transformers computes: logits in fp32, relative error under 1e-5."""

import shutil

import pytest
import torch

from helpers.hf.logits_on_ranks import our_logits
from helpers.hf.tiny_models import MODELS, VOCAB, their_logits
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.hf.exporting import to_hf

LIMIT = 1e-5
TOKENS = torch.randint(VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
MOE = [name for name in MODELS if name not in ("llama", "qwen3")]
CASES = [
    pytest.param(list(MODELS), 1, {}, id="one rank"),
    pytest.param(["olmoe", "qwen2_moe", "deepseek_v3", "glm4_moe"], 2, {"tp": 2, "ep": 2}, id="tp2 ep2"),
    pytest.param(MOE, 2, {"ep": 2}, id="ep2", marks=pytest.mark.slow),
    pytest.param(list(MODELS), 2, {"tp": 2}, id="tp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("names", "num_ranks", "layout"), CASES)
def test_logits(names, num_ranks, layout, hf_folders, checkpoints, record_property):
    ours = our_logits([checkpoints[name] for name in names], TOKENS, num_ranks=num_ranks, **layout)
    found = dict(zip(names, ours, strict=True))
    error = assert_equal_to(LIMIT, found, {name: their_logits(hf_folders[name], TOKENS) for name in names})
    record_property("largest_relative_error", error)
    print(f"largest relative error {error:.1e}")


def test_router_scaling_factor(checkpoints, tmp_path):
    """config.json of these has no field for it, so the export multiplies the experts' outputs."""
    names = ["mixtral", "qwen2_moe"]
    for name in names:
        common = one_checkpoint(shutil.copytree(checkpoints[name], tmp_path / name)) / "common.pt"
        state = torch.load(common, weights_only=False)
        state["config"]["router_scaling_factor"] = 2.5
        torch.save(state, common)
        to_hf(tmp_path / name, tmp_path / f"{name}_hf")
    ours = dict(zip(names, our_logits([tmp_path / name for name in names], TOKENS), strict=True))
    assert_equal_to(LIMIT, ours, {name: their_logits(tmp_path / f"{name}_hf", TOKENS) for name in names})
    unscaled = our_logits([checkpoints[name] for name in names], TOKENS)
    for name, old in zip(names, unscaled, strict=True):
        assert (ours[name] - old).abs().max() > 0.01 * old.abs().max()
