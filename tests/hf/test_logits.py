"""A converted model computes what transformers computes: logits in fp32, relative error under 1e-5, in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logits_on_ranks import our_logits
from tiny_models import MODELS, VOCAB
from torch import Tensor

from relative_error import assert_equal_to

LIMIT = 1e-5
TOKENS = torch.randint(VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
MOE = [name for name in MODELS if name not in ("llama", "qwen3")]


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor = TOKENS) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(tokens).logits


@pytest.mark.parametrize(
    ("names", "num_ranks", "layout"),
    [
        ([n for n in MODELS if n != "deepseek_v3"], 1, {}),
        (MOE, 2, {"ep": 2}),
        (["qwen3_moe", "qwen2_moe", "deepseek_v3", "qwen3"], 2, {"tp": 2}),
    ],
    ids=["one rank", "ep2", "tp2"],
)
def test_logits(names, num_ranks, layout, hf_folders, checkpoints, record_property):
    ours = our_logits([checkpoints[name] for name in names], TOKENS, num_ranks=num_ranks, **layout)
    found = dict(zip(names, ours, strict=True))
    error = assert_equal_to(LIMIT, found, {name: their_logits(hf_folders[name]) for name in names})
    record_property("largest_relative_error", error)
    print(f"largest relative error {error:.1e}")
