"""Checkpoints of this package with the weights of tiny models of transformers, by a mapping of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers.whole_runs import SMALL
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.config import Config

VOCAB, HIDDEN, LAYERS, HEADS, GROUPS, EXPERTS, SEQ_LEN = 257, 32, 2, 4, 2, 4, 48
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "max_position_embeddings": 64, "initializer_range": 0.1,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    **SMALL, "gpus_per_node": 1, "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": 48,
    "num_heads": HEADS, "num_query_groups": GROUPS, "seq_len": SEQ_LEN, "vocab_size": VOCAB,
    "num_experts": EXPERTS, "topk": 2, "router_pre_softmax": False, "rotary_base": 10000.0,
    "norm_epsilon": 1e-5, "dtype": "fp32", "mbsz": 1, "gbsz": 1, "warmup_iters": 0, "train_data": "none",
    "eval_interval": 0, "tokenizer": "bytes",
}  # fmt: skip

KINDS = ("mixtral", "qwen3_moe", "llama", "deepseek_v3")


@torch.no_grad()
def tiny_model(kind: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model with random weights, and the settings of ours that differ from `SETTINGS`."""
    torch.manual_seed(7)
    if kind == "mixtral":
        config = MixtralConfig(
            **_SIZES,
            intermediate_size=48,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            rms_norm_eps=1e-5,
        )
        return MixtralForCausalLM(config).eval(), {}
    if kind == "llama":
        config = LlamaConfig(**_SIZES, intermediate_size=48, rms_norm_eps=1e-5)
        return LlamaForCausalLM(config).eval(), {"use_moe": False}
    if kind == "deepseek_v3":
        return _deepseek()
    experts = {
        "moe_intermediate_size": 24,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 16,
    }
    config = Qwen3MoeConfig(
        **_SIZES | {"rms_norm_eps": 1e-6}, **experts, intermediate_size=48, decoder_sparse_step=1
    )
    settings = {"qk_norm": True, "head_dim": 16, "moe_ffn_hidden_size": 24, "norm_epsilon": 1e-6}
    return Qwen3MoeForCausalLM(config).eval(), settings


def _deepseek() -> tuple[PreTrainedModel, dict[str, Any]]:
    """Multi-latent attention, sigmoid scores with a bias and groups, a shared expert."""
    config = DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": HEADS, "rms_norm_eps": 1e-6}, intermediate_size=48,
        moe_intermediate_size=24, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10, n_routed_experts=EXPERTS, n_shared_experts=1, num_experts_per_tok=2, n_group=2,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=0,
        rope_interleave=True,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    settings = {
        "multi_latent_attention": True, "qk_norm": True, "q_lora_rank": 20, "kv_lora_rank": 16,
        "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10, "moe_ffn_hidden_size": 24,
        "shared_expert_size": 24, "router_score": "sigmoid", "router_bias_update_rate": 0.001,
        "num_router_groups": 2, "router_group_topk": 1, "router_scaling_factor": 2.5, "norm_epsilon": 1e-6,
    }  # fmt: skip
    return model, settings


def write_checkpoint(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """The model's weights as a checkpoint of one iteration, without optimizer."""
    writer = TorchDistWriter(folder)
    for key, values in _tensors(model).items():
        writer.add_tensor(key, values)
    writer.finish({"config": Config(**SETTINGS | settings).model_dump(), "iteration": 0})
    return folder


@torch.no_grad()
def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    layers = model.model.layers
    tensors = {
        "embedding.word_embeddings.weight": _padded(model.model.embed_tokens.weight),
        "output_layer.weight": _padded(model.lm_head.weight),
        "decoder.final_layernorm.weight": model.model.norm.weight,
    }
    per_layer = [_attention(layer) | _mlp(layer) for layer in layers]
    for key in per_layer[0]:
        tensors[f"decoder.layers.{key}"] = torch.stack([values[key] for values in per_layer])
    return tensors


def _padded(weight: Tensor) -> Tensor:
    # Rows that pad the vocabulary: large, so that a logit of theirs would be seen.
    return torch.cat([weight, torch.full((-len(weight) % 128, weight.size(1)), 9.0)])


def _attention(layer: Any) -> dict[str, Tensor]:
    attention = layer.self_attn
    if hasattr(attention, "kv_b_proj"):
        return _latent_attention(layer)
    query, key, value = (getattr(attention, f"{name}_proj").weight.view(GROUPS, -1, HIDDEN) for name in "qkv")
    tensors = {
        "self_attention.linear_qkv.weight": torch.cat([query, key, value], dim=1).flatten(0, 1),
        "self_attention.linear_qkv.layer_norm_weight": layer.input_layernorm.weight,
        "self_attention.linear_proj.weight": attention.o_proj.weight,
    }
    if hasattr(attention, "q_norm"):
        tensors |= {
            f"self_attention.{name}_layernorm.weight": getattr(attention, f"{name}_norm").weight
            for name in "qk"
        }
    return tensors


def _latent_attention(layer: Any) -> dict[str, Tensor]:
    attention, prefix = layer.self_attn, "self_attention."
    return {
        "input_layernorm.weight": layer.input_layernorm.weight,
        f"{prefix}linear_q_down_proj.weight": attention.q_a_proj.weight,
        f"{prefix}linear_q_up_proj.layer_norm_weight": attention.q_a_layernorm.weight,
        f"{prefix}linear_q_up_proj.weight": attention.q_b_proj.weight,
        f"{prefix}linear_kv_down_proj.weight": attention.kv_a_proj_with_mqa.weight,
        f"{prefix}linear_kv_up_proj.layer_norm_weight": attention.kv_a_layernorm.weight,
        f"{prefix}linear_kv_up_proj.weight": attention.kv_b_proj.weight,
        f"{prefix}linear_proj.weight": attention.o_proj.weight,
    }


def _mlp(layer: Any) -> dict[str, Tensor]:
    norm = layer.post_attention_layernorm.weight
    if not hasattr(layer.mlp, "experts"):
        return {
            "mlp.linear_fc1.layer_norm_weight": norm,
            "mlp.linear_fc1.weight": torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            "mlp.linear_fc2.weight": layer.mlp.down_proj.weight,
        }
    extra = {}
    if hasattr(layer.mlp, "shared_experts"):
        shared = layer.mlp.shared_experts
        extra = {
            "mlp.router.expert_bias": layer.mlp.gate.e_score_correction_bias,
            "mlp.shared_experts.linear_fc1.weight": torch.cat(
                [shared.gate_proj.weight, shared.up_proj.weight]
            ),
            "mlp.shared_experts.linear_fc2.weight": shared.down_proj.weight,
        }
    return extra | {
        "pre_mlp_layernorm.weight": norm,
        "mlp.router.weight": layer.mlp.gate.weight,
        "mlp.experts.experts.linear_fc1.weight": layer.mlp.experts.gate_up_proj,
        "mlp.experts.experts.linear_fc2.weight": layer.mlp.experts.down_proj,
    }
