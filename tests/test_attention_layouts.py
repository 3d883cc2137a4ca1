"""Attention as published models have it: the same losses and gradients at every layout, and through a checkpoint of another layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from model_on_ranks import Trained, run_models
from relative_error import assert_equal_to

LIMIT = 1e-5
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 10, "qk_pos_emb_head_dim": 6, "v_head_dim": 8, "qk_norm": True,
    "num_query_groups": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "norm over all heads": {"qk_norm": True, "qk_norm_scope": "all"},
    "bias, half turned": {"qkv_bias": True, "rotary_fraction": 0.5, "rope_scaling": "llama3", "rope_scaling_factor": 8, "rotary_base": 1e6},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4, "rope_original_seq_len": 64, "normalization": "LayerNorm", "qk_norm": True},
    "latent": LATENT | {"q_lora_rank": 12},
    "latent, yarn": LATENT | {"rope_scaling": "yarn", "rope_scaling_factor": 4, "rope_original_seq_len": 64, "yarn_mscale_all_dim": 1},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2}),
    "cp2": (2, {"cp": 2}),
}
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """What a kind of model did on a layout; every layout but `one` starts from the checkpoint that `tp2` saved, or `one` for that."""
    folder = tmp_path_factory.mktemp("attention")

    @cache
    def on_one_rank() -> dict[str, Trained]:
        jobs = [settings | {"save": f"{folder}/{index}"} for index, settings in enumerate(KINDS.values())]
        return dict(zip(KINDS, run_models(1, jobs), strict=True))

    @cache
    def on_two_ranks() -> dict[tuple[str, str], Trained]:
        on_one_rank()
        names = list(KINDS)
        jobs = [KINDS[kind] | LAYOUTS[layout][1] | {"load": f"{folder}/{names.index(kind)}", "seed": 99} for kind, layout in CASES]
        return dict(zip(CASES, run_models(2, jobs), strict=True))

    return lambda kind, layout: on_one_rank()[kind] if layout == "one" else on_two_ranks()[kind, layout]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_same_numbers_as_one_rank(kind, layout, trained):
    one, ours = trained(kind, "one"), trained(kind, layout)
    torch.testing.assert_close(ours.losses, one.losses, rtol=LIMIT, atol=0)
    assert ours.grad_norms == pytest.approx(one.grad_norms, rel=LIMIT)
    print(f"largest relative error {assert_equal_to(LIMIT, ours.gradients, one.gradients):.1e}")
