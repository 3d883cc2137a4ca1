"""Tiny random models of transformers, one of every architecture that is converted, and folders with them."""

import logging
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_exp.inference.evaluate import HeldOut

VOCAB, HIDDEN, LAYERS = 256, 32, 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
_QWEN = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_YARN = _PLAIN_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
_GROUPED = {"intermediate_size": 48, "moe_intermediate_size": 16, "first_k_dense_replace": 1}

_BY_KIND = {
    "full_attention": _PLAIN_YARN | {"rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_WINDOW = {"sliding_window": 9}
_GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15,
    "logits_scaling": 6.0,
}  # fmt: skip

# Name to the class of transformers and what differs from _SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4, "rope_theta": 1e6}),
    "olmoe": ("Olmoe", {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", _QWEN | {"norm_topk_prob": True, "head_dim": 12, "mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", _QWEN | {"shared_expert_intermediate_size": 20}),
    "deepseek_v3": ("DeepseekV3", _LATENT | _GROUPED | {
        "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "rope_parameters": _YARN | {"rope_theta": 1e4},
    }),
    "glm4_moe": ("Glm4Moe", _GROUPED | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "routed_scaling_factor": 1.5,
        "use_qk_norm": True, "attention_bias": True,
    }),
    "dots1": ("Dots1", _GROUPED | {
        "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "head_dim": 12, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None,
    }),
    "solar_open": ("SolarOpen", {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
        "attention_bias": True, "routed_scaling_factor": 1.5,
    }),
    "minimax_m2": ("MiniMaxM2", {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT | {
        "intermediate_size": 48, "moe_intermediate_size": 16, "rms_norm_eps": 1e-6, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "q_lora_rank": None, "routed_scaling_factor": 1.5,
    }),
    "deepseek_v2": ("DeepseekV2", _LATENT | _GROUPED | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 16.0, "q_lora_rank": None,
        "rope_parameters": _YARN | {"rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "hy_v3": ("HYV3", {
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 12, "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"],
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "intermediate_size": 48, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2,
        "head_dim": 12,
    }),
    "olmo2": ("Olmo2", {"intermediate_size": 48}),
    "flex_olmo": ("FlexOlmo", {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("Granite", {"intermediate_size": 48, "tie_word_embeddings": True} | _GRANITE),
    "granitemoe": ("GraniteMoe", _GRANITE | {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True
    }),
    "granitemoeshared": ("GraniteMoeShared", _GRANITE | {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
    }),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {
        "intermediate_size": 24, "num_experts": 4, "moe_topk": 2, "head_dim": 12,
    }),
    "axk1": ("AXK1", _LATENT | {
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }),
    "llama": ("Llama", {"intermediate_size": 48, "rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    "qwen2": ("Qwen2", {"intermediate_size": 48, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"intermediate_size": 48, "head_dim": 12, "sliding_window": None}),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12, "tie_word_embeddings": True}),
    "gpt_oss": ("GptOss", _WINDOW | {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
        "rope_parameters": _PLAIN_YARN | {"rope_theta": 1.5e5, "truncate": False},
    }),
    "exaone4": ("Exaone4", _WINDOW | {"intermediate_size": 48, "sliding_window_pattern": 3}),
    "exaone_moe": ("ExaoneMoe", _QWEN | _WINDOW | {
        "num_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "num_shared_experts": 2,
        "sliding_window_pattern": 2,
    }),
    "flint": ("Flint", _QWEN | _WINDOW | {
        "head_dim": 12, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "smollm3": ("SmolLM3", _WINDOW | {
        "intermediate_size": 48, "use_sliding_window": True, "no_rope_layer_interval": 2,
    }),
    "granitemoe_swa": ("GraniteMoeSWA", _GRANITE | _WINDOW | {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 20, "layer_rope_theta": [0, 1e4, 1e4],
    }),
    "mellum": ("Mellum", _QWEN | _WINDOW | {
        "head_dim": 12, "rope_parameters": _BY_KIND, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "olmo3": ("Olmo3", _WINDOW | {
        "intermediate_size": 48, "rope_parameters": _BY_KIND,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }),
    "afmoe": ("Afmoe", _QWEN | _WINDOW | {
        "head_dim": 12, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.5,
        "mup_enabled": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "cohere2": ("Cohere2", _WINDOW | {
        "intermediate_size": 48, "sliding_window_pattern": 2, "logit_scale": 0.3,
    }),
    "cohere2_moe": ("Cohere2Moe", _WINDOW | {
        "intermediate_size": 16, "prefix_dense_intermediate_size": 48, "num_experts": 4, "head_dim": 12,
        "first_k_dense_replace": 1, "num_shared_experts": 2, "sliding_window_pattern": 2, "logit_scale": 0.3,
    }),
    "mimo_v2_flash": ("MiMoV2Flash", _WINDOW | {
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "head_dim": 12, "v_head_dim": 8, "attention_bias": True,
    }),
}  # fmt: skip
# What runs with PRESET=reference are: top-1 without normalization, no biases, no shared expert.
REFERENCE = _QWEN | {"shared_expert_intermediate_size": 0, "qkv_bias": False, "num_experts_per_tok": 1}
REFERENCE |= {"mlp_only_layers": [0]}


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of transformers with random weights, none of them at a value that hides an error."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    cls, differing = MODELS[name]
    settings = deepcopy(_SIZES | differing | changes)  # transformers changes dictionaries
    config = getattr(transformers, f"{cls}Config")(**settings, attn_implementation="eager")
    with warnings.catch_warnings():
        # a shared expert of size 0
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = getattr(transformers, f"{cls}ForCausalLM")(config).eval()
    with torch.no_grad():
        for seed, (key, value) in enumerate(sorted([*model.named_parameters(), *model.named_buffers()])):
            if "inv_freq" not in key:
                value.copy_(tiny_values(key, value, seed))
    return model.to(dtype)


def tiny_values(key: str, value: Tensor, seed: int) -> Tensor:
    """Random values for a tensor, in the range that its name asks for."""
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in key:
        return 1 + 0.2 * drawn
    if key.endswith("bias"):
        return 0.2 * drawn
    return drawn if "embed" in key else drawn * max(value.size(-1), 1) ** -0.5


def tiny_folder(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """The folder that `save_pretrained` writes for `tiny_model`; `options` are save_pretrained's."""
    tiny_model(name, dtype=dtype, **(changes or {})).save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """fp32 logits [B, S, V] by transformers of a folder, which has to have every weight but empty ones."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    empty = {name for name, value in model.state_dict().items() if not value.numel()}
    assert set(info["missing_keys"]) <= empty
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()(tokens).logits


def their_loss(folder: Path, held_out: HeldOut) -> float:
    """Loss per token by transformers of a folder, in fp32."""
    nats = 0.0
    for first in range(0, len(held_out), 32):
        sequences = held_out.read(first, min(32, len(held_out) - first))
        for length in {len(ids) for ids in sequences}:
            tokens = torch.from_numpy(np.stack([ids for ids in sequences if len(ids) == length]))
            logits = their_logits(folder, tokens[:, :-1]).flatten(0, 1)
            nats += cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").item()
    return nats / int((held_out.ends - held_out.begins - 1).sum())


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def save_tokenizer(folder: Path, num_words: int, num_added: int) -> None:
    """Writes a tokenizer.json with added tokens behind its words, the last of them not special."""
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(num_words)}, "w0"))
    names = [f"<added_{number}>" for number in range(num_added)]
    tokenizer.add_tokens([AddedToken(name, special=name != names[-1]) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
