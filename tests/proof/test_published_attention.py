"""Our attention against that of transformers: outputs, every gradient; published rotary frequencies."""

from functools import partial
from typing import Any

import pytest

from helpers.layers.attention_pair import Pair, rope, run_all
from helpers.ranks import run_on_ranks

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA3_OURS = {"rotary_base": 5e5, "rope_scaling": "llama3", "rope_scaling_factor": 8.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_OURS = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 16}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 7,
    "num_key_value_heads": 4,
}  # fmt: skip
LATENT_OURS = {
    "multi_latent_attention": True, "qk_norm": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 7,
}  # fmt: skip
# DeepSeek-V3's: the factor on queries and keys is 1, scores are multiplied by (1 + 0.1 ln 40)^2.
FACTORS = {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
FACTORS_OURS = {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "yarn_mscale_all_dim": 1.0}
OTHERS = {"mscale": 0.9, "mscale_all_dim": 0.4}
OTHERS_OURS = {"yarn_mscale": 0.9, "yarn_mscale_all_dim": 0.4}
BETAS = {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.3}
BETAS_OURS = {
    "rope_scaling": "yarn", "rope_scaling_factor": 16.0, "yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0,
    "yarn_mscale": 0.8, "yarn_mscale_all_dim": 0.3,
}  # fmt: skip


def yarn(theirs: dict[str, Any], factors: dict[str, float], original: int, base: float = 1e4) -> Any:
    return theirs | rope("yarn", base, **factors, original_max_position_embeddings=original)


llama, qwen3, deepseek = (
    partial(Pair, *names) for names in (("llama", "Llama"), ("qwen3", "Qwen3"), ("deepseek_v3", "DeepseekV3"))
)
SHORT = LATENT | {"max_position_embeddings": 640}
SHORT_OURS = LATENT_OURS | FACTORS_OURS | {"rope_original_seq_len": 16}
PAIRS = {
    "OLMoE": Pair("olmoe", "Olmoe", {}, {"qk_norm": True, "qk_norm_scope": "all"}),
    "Qwen3": qwen3({"head_dim": 12}, {"head_dim": 12, "qk_norm": True}),
    "Qwen3, YaRN": qwen3(
        {"head_dim": 16, "max_position_embeddings": 64, **rope("yarn", **YARN)},
        {"head_dim": 16, "qk_norm": True, **YARN_OURS},
    ),
    "Qwen2, biases": Pair("qwen2", "Qwen2", {}, {"qkv_bias": True}),
    "Llama 3": llama(rope("llama3", 5e5, **LLAMA3), LLAMA3_OURS),
    "DeepSeek-V3": deepseek(LATENT, LATENT_OURS),
    "DeepSeek-V3, queries whole": deepseek(LATENT | {"q_lora_rank": None}, LATENT_OURS | {"q_lora_rank": 0}),
    "DeepSeek-V3, YaRN": deepseek(yarn(SHORT, FACTORS, 16), SHORT_OURS),
    "DeepSeek-V3, YaRN, other factors": deepseek(yarn(SHORT, FACTORS | OTHERS, 16), SHORT_OURS | OTHERS_OURS),
    "StableLM, half turned": Pair(
        "stablelm", "StableLm", rope(partial_rotary_factor=0.5), {"rotary_fraction": 0.5}
    ),
}
WIDE, LONG = {"head_dim": 128}, LATENT | {"qk_rope_head_dim": 64, "max_position_embeddings": 163840}
FREQUENCIES = {
    "Llama 3.1": llama(WIDE | rope("llama3", 5e5, **LLAMA3), WIDE | LLAMA3_OURS),
    "Llama 3.2": llama(
        WIDE | rope("llama3", 5e5, **(LLAMA3 | {"factor": 32.0})),
        WIDE | LLAMA3_OURS | {"rope_scaling_factor": 32.0},
    ),
    "Qwen3, 128k": qwen3(
        yarn(WIDE, {"factor": 4.0}, 32768, 1e6),
        WIDE | YARN_OURS | {"rotary_base": 1e6, "rope_original_seq_len": 32768},
    ),
    "DeepSeek-V3, 160k": deepseek(
        yarn(LONG, FACTORS, 4096), LATENT_OURS | FACTORS_OURS | {"qk_pos_emb_head_dim": 64}
    ),
    "YaRN, other betas": qwen3(
        yarn(WIDE | {"max_position_embeddings": 65536}, BETAS, 4096), WIDE | BETAS_OURS
    ),
}


@pytest.fixture(scope="session")
def errors() -> dict[str, dict[str, float]]:
    """Relative errors by comparison and tensor, all made in one process, which imports Megatron once."""
    return run_on_ranks(1, run_all, PAIRS, FREQUENCIES, join=False)[0]


@pytest.mark.parametrize("name", [*PAIRS, *FREQUENCIES])
def test_attention_and_rotary_frequencies(name, errors):
    found, limit = errors[name], 1e-5 if name in PAIRS else 1e-6
    print(f"largest relative error {max(found.values()):.1e}")
    assert {tensor: error for tensor, error in found.items() if not error < limit} == {}
