"""config.json <-> Config. Every field needs a rule, no effect on logits, or --ignore-field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from moe_exp.checkpoint.hf.families import ARCHITECTURES, Architecture
from moe_exp.checkpoint.hf.fields import Settings, UnsupportedModel, refuse
from moe_exp.config import Config

# Fields without effect on what the model computes in evaluation.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "aux_loss_alpha", "bos_token_id", "dtype",
    "eos_token_id", "id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux", "torch_dtype",
    "transformers_version", "transformers_weights",
    "unsloth_fixed", "use_cache", "chunk_size_feed_forward", "problem_type", "num_nextn_predict_layers",
    "num_mtp_layers", "resid_pdrop", "embd_pdrop", "initializer_cutoff_factor", "sep_token_id",
    "tokenizer_class", "finetuning_task", "task_specific_params", "tie_encoder_decoder", "torchscript",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "prefix", "_commit_hash",
    "_attn_implementation_autoset", "attn_implementation", "_from_model_config", "moe_router_activation_func",
}  # fmt: skip

# Plainest value of every setting that affects the computation, before the rules; presets are not used.
_PLAIN: Settings = {
    "use_moe": True, "moe_type": "dmoe", "capacity_factor": 0.0, "min_capacity": 0, "moe_layer_freq": "1",
    "first_k_dense": 0, "moe_ffn_hidden_size": 0, "shared_expert_size": 0, "shared_expert_gate": False,
    "moe_latent_size": 0, "router_score": "softmax", "router_pre_softmax": True, "router_normalize": "auto",
    "router_scaling_factor": 1.0, "router_bias_update_rate": 0.0, "num_router_groups": 0,
    "router_group_topk": 0, "force_routing": "none", "aux_loss_type": "aux_loss", "activation": "swiglu",
    "normalization": "RMSNorm", "add_bias_linear": False, "qk_norm": False, "qk_norm_scope": "head",
    "qkv_bias": False, "multi_latent_attention": False, "head_dim": 0,
}  # fmt: skip


def architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json names; UnsupportedModel if it is not one of ours."""
    names = fields.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()}
    if not names and fields.get("model_type") in by_type:
        return by_type[fields["model_type"]]
    fix = f"convert one of {', '.join(ARCHITECTURES)}"
    raise refuse("architectures", ",".join(names) or "(missing)", "is not supported", fix)


def settings_of(
    fields: Mapping[str, Any], architecture: Architecture, *, ignore: Collection[str] = ()
) -> Settings:
    """All settings of the model; UnsupportedModel for the first unsupported field that is not in `ignore`."""
    if fields.get("quantization_config") and "quantization_config" not in ignore:
        method = fields["quantization_config"].get("quant_method", "some method")
        fix = "convert weights in bf16, fp16 or fp32"
        raise refuse("quantization_config", method, "quantized weights are not supported", fix)
    if fields.get("auto_map") and "auto_map" not in ignore:
        does = f"what {architecture.name} of transformers does"
        fix = f"give --ignore-field auto_map where that code computes {does}"
        raise refuse("auto_map", "{...}", "the model comes with code of its own, which is never run", fix)
    known = {name for rule in architecture.fields for name in rule.names} | WITHOUT_EFFECT
    known |= {"quantization_config", "auto_map"}
    for name, value in sorted(fields.items()):
        if name not in known and name not in ignore and value not in (None, False, 0, "", [], {}):
            fix = f"give --ignore-field {name} where it does not change what the model computes"
            raise refuse(name, value, f"is unknown for {architecture.name}", fix)
    # The fields with the defaults of the configuration class, and null replaced by its meaning.
    completed = dict(architecture.defaults)
    for name, value in fields.items():
        if name in ignore:
            continue
        if value is None and name in architecture.defaults and name not in architecture.null:
            rule = f"{architecture.name} of transformers takes no null there"
            raise refuse(name, "null", rule, f"leave it out for {json.dumps(architecture.defaults[name])}")
        completed[name] = architecture.null.get(name) if value is None else value
    settings = _PLAIN | dict(architecture.settings)
    for of_fields in architecture.fields:
        try:
            settings |= of_fields.read(completed)
        except UnsupportedModel:
            raise
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            reason = f"{', '.join(of_fields.names)}: cannot be read ({error})"
            raise UnsupportedModel(f"config.json: {reason}. Fix: correct the config.json.") from None
    if not settings["use_moe"]:
        settings |= {"moe_layer_freq": "1"}
    return settings


def fields_of(config: Config, architecture: Architecture) -> dict[str, Any]:
    """The config.json of a model, without dtype and token ids."""
    fields: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    for rule in architecture.fields:
        fields |= rule.write(config)
    return fields | {"use_cache": True}
