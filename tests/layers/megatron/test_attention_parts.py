"""What is refused; what is computed is in tests/layers/megatron/test_attention_layouts.py and
tests/proof/test_published_attention.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moe_exp.layers.megatron.attention_parts import latent_attention_spec
from moe_exp.layers.megatron.norm import Norm


@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, False), (2, True)])
def test_latent_attention_has_whole_projections_down(ranks, sequence_parallel):
    config = SimpleNamespace(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    submodules = latent_attention_spec(config, norm=Norm).submodules
    assert submodules.linear_q_down_proj is submodules.linear_kv_down_proj
    assert submodules.linear_q_down_proj is not submodules.linear_q_up_proj
    assert submodules.q_layernorm is submodules.kv_layernorm is Norm


def test_latent_attention_needs_sequence_parallelism():
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=False)
    with pytest.raises(
        ValueError,
        match=r"sequence_parallel=False: multi-latent attention .*\. Fix: set sequence_parallel=True\.",
    ):
        latent_attention_spec(config, norm=Norm)
