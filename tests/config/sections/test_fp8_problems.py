"""What FP8 asks of the other settings and of the machine, and what Megatron is told."""

import re

import pytest

from moe_exp.config import load_config
from moe_exp.config.sections.parallel import SIZE_MULTIPLES
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import moe_options, transformer_config
from moe_exp.launch import machine_checks
from moe_exp.launch.machine_checks import check_machine
from moe_exp.layers.experts.grouped_gemm import RECIPES
from moe_exp.planner.costs.products import fp8_kept, fp8_parts

GOOD = {"preset": "reference", "gpus_per_node": "1", "mbsz": "8", "gbsz": "8"}
GOOD |= {"fp8": "hybrid", "expert_backend": "te"}
BY_KERNELS = {"fp8": "e4m3", "fp8_recipe": "blockwise", "expert_backend": "triton"}


def problems(**settings: str) -> list[str]:
    return list(load_config(GOOD | settings, environ={}).problems())


@pytest.mark.parametrize("settings", [
    {}, {"fp8_recipe": "mxfp8"}, {"fp8": "e4m3"}, {"use_moe": "false", "impl": "te"},
    {"fp8": "none", "dtype": "fp32"}, {"impl": "local"}, BY_KERNELS,
    BY_KERNELS | {"impl": "local", "ffn_hidden_size": "1784", "seq_len": "2047", "mbsz": "1"},
])  # fmt: skip
def test_what_goes_together(settings):
    assert problems(**settings) == []


TRITON = {"expert_backend": "triton"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"expert_backend": "auto"}, "FP8=hybrid: requires .*=te or triton, not auto"),
        ({"fp8_recipe": "blockwise"} | TRITON, "FP8=hybrid: is not .*=triton with FP8_RECIPE=blockwise"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"} | TRITON, "FP8=e4m3: is not .* with FP8_RECIPE=mxfp8"),
        ({"fp8": "e4m3"} | TRITON, "FP8=e4m3: is not .* with FP8_RECIPE=tensorwise.* set FP8=e4m3"),
        (BY_KERNELS | {"dtype": "fp32"}, "FP8=e4m3: requires DTYPE=bf16, not fp32"),
        ({"use_moe": "false", "impl": "local"}, "FP8=hybrid: has no effect in .*=local. Fix: set IMPL=te"),
        ({"dtype": "fp32"}, "FP8=hybrid: requires DTYPE=bf16, not fp32. Fix: set DTYPE=bf16"),
        ({"ffn_hidden_size": "1784"}, "FFN_HIDDEN_SIZE=1784: must be a multiple of 16 .*=tensorwise"),
        ({"moe_ffn_hidden_size": "16", "fp8_recipe": "mxfp8"}, "MOE_FFN_HIDDEN_SIZE=16: .*of 32 .*=mxfp8"),
        ({"moe_latent_size": "120"}, "MOE_LATENT_SIZE=120: must be a multiple of 16 .*FP8_RECIPE=tensorwise"),
        ({"seq_len": "2047", "mbsz": "1"}, "SEQ_LEN=2047: with MBSZ=1 a rank has 2047 tokens"),
        ({"seq_len": "2064", "mbsz": "1", "tp": "2", "gpus_per_node": "2", "num_query_groups": "2"},
         "SEQ_LEN=2064: with MBSZ=1 a rank has 1032 tokens, but FP8_RECIPE=tensorwise requires"),
    ],
)  # fmt: skip
def test_what_does_not(settings, expected):
    (line,) = problems(**settings)
    assert re.match(expected, line)


def test_multiples_are_those_of_the_layer():
    assert {name: multiple for name, (_, multiple) in RECIPES.items()} == SIZE_MULTIPLES


def test_megatron_is_told(monkeypatch):
    settings = {"preset": "cpu", "gpus_per_node": "1"}
    assert transformer_config(load_config(settings, environ={})).fp8 is None
    # Megatron asks for the version of Transformer Engine.
    monkeypatch.setattr("megatron.core.transformer.transformer_config.is_te_min_version", bool)
    told = transformer_config(load_config(settings | {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, environ={}))
    assert (told.fp8, told.fp8_recipe) == ("e4m3", "mxfp8")


def test_with_our_kernels_the_experts_are_told_and_the_machine_needs_nothing(monkeypatch):
    """Megatron would ask for Transformer Engine, and the layers around the experts stay in bf16."""
    config = load_config(GOOD | BY_KERNELS, environ={})
    assert transformer_config(config).fp8 is None
    assert moe_options(config)["fp8"] and not moe_options(load_config(GOOD, environ={}))["fp8"]
    monkeypatch.setattr(machine_checks, "count_gpus", lambda: 0)
    assert not [line for line in check_machine(config) if line.startswith("FP8")]
    assert backends_of(config, "cpu")["FP8"][0] == "e4m3"
    assert fp8_parts(config) == (True, False) and fp8_kept(config) == (False, False)
