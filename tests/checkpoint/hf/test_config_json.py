"""config.json in its older and its newer form, and what of it becomes which setting."""

import dataclasses
import json
from copy import deepcopy
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_exp.checkpoint.hf.exporting import fields_of
from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES
from moe_exp.checkpoint.hf.fields import UnsupportedModel
from moe_exp.checkpoint.hf.importing import architecture_of, settings_of
from moe_exp.config import Config, load_config
from moe_exp.config.model_changes import function_facts, shape_facts
from moe_exp.config.traits import traits

COEF, Z = "router_aux_loss_coef", "router_z_loss_coef"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "pretraining_tp": 1,
    "transformers_version": "4.40.0", "attention_bias": False, "bos_token_id": 1,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
YARN = {
    "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
BETAS = {"beta_fast": 24, "beta_slow": 2}
# The published config.json of DeepSeek-V3, without its quantization and its code.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
OLD_AND_NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "null": ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
    "none": ({}, {"rope_parameters": {"rope_type": "default"}}),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ),
    "yarn": (
        {"rope_theta": 1e4, "rope_scaling": YARN | {"type": "yarn"}},
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e4}},
    ),
    "yarn without rounding": (
        {"rope_theta": 1e4, "rope_scaling": YARN | {"type": "yarn", "truncate": None}},
        {"rope_parameters": YARN | {"rope_type": "yarn", "truncate": False, "attention_factor": 1.0}},
    ),
    "yarn with other betas": (
        {"rope_theta": 1e4, "rope_scaling": YARN | BETAS | {"type": "yarn"}},
        {"rope_parameters": YARN | BETAS | {"rope_type": "yarn", "rope_theta": 1e4}},
    ),
}


def settings(fields: dict[str, Any]) -> dict[str, Any]:
    return settings_of(fields, architecture_of(fields))


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW.values(), ids=OLD_AND_NEW)
def test_both_forms_of_the_rotary_embedding_say_the_same(old, new):
    assert settings(LLAMA | old) == settings(LLAMA | new)


@pytest.mark.parametrize("form", [form for forms in OLD_AND_NEW.values() for form in forms])
def test_both_forms_are_written(form):
    """Each by itself says what was read."""
    architecture = architecture_of(LLAMA)
    expected = settings(LLAMA | form)
    written = json.loads(json.dumps(fields_of(Config(**expected), architecture)))
    for left_out in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        assert settings({name: value for name, value in written.items() if name not in left_out}) == expected


def test_a_rope_scaling_without_a_form_is_refused_by_name():
    model = Config(**settings(LLAMA)).model_copy(update={"rope_scaling": "new"})
    with pytest.raises(
        UnsupportedModel, match=r"^ROPE_SCALING=new: config.json cannot .* set none, llama3 or yarn"
    ):
        fields_of(model, architecture_of(LLAMA))


def test_the_longest_samples_are_the_length_of_the_model():
    stages = json.dumps([{"from_samples": 8, "seq_len": 4 * LLAMA["max_position_embeddings"]}])
    model = Config(**settings(LLAMA)).model_copy(update={"data_stages": stages})
    assert fields_of(model, architecture_of(LLAMA))["max_position_embeddings"] == 4 * 131072


def test_deepseek_v3_as_it_is_published():
    found = settings(DEEPSEEK)
    expected = {
        "num_layers": 61, "first_k_dense": 3, "num_experts": 256, "topk": 8, "moe_ffn_hidden_size": 2048,
        "shared_expert_size": 2048, "router_score": "sigmoid", "router_normalize": "true",
        "router_scaling_factor": 2.5, "router_bias_update_rate": 1e-3, "num_router_groups": 8,
        "router_group_topk": 4, "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_norm": True,
        "rope_scaling": "yarn", "rope_scaling_factor": 40, "rope_original_seq_len": 4096, "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 1.0, "mtp_num_layers": 1,
    }  # fmt: skip
    assert found.items() >= expected.items()
    back = fields_of(Config(**found), architecture_of(DEEPSEEK))
    lost = {"bos_token_id", "eos_token_id", "torch_dtype", "transformers_version"}
    assert {name for name in DEEPSEEK if name not in back} == lost
    assert all(back[name] == DEEPSEEK[name] for name in DEEPSEEK.keys() - lost - {"rope_scaling"})


# What differs in the published config.json files of Kimi-K2 and Moonlight-16B-A3B, without their code.
KIMI = DEEPSEEK | {
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "rope_scaling": YARN | {"type": "yarn", "factor": 32.0, "beta_fast": 1.0}, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
MOONLIGHT = KIMI | {
    "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
    "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_scaling": None, "routed_scaling_factor": 2.446,
}  # fmt: skip


def test_kimi_k2_is_read_as_deepseek_v3():
    for names in (KIMI["architectures"], None):
        fields = KIMI | {"architectures": names}
        assert architecture_of(fields) is ARCHITECTURES["DeepseekV3ForCausalLM"]
        found = settings(fields)
    expected = {
        "num_experts": 384, "first_k_dense": 1, "num_router_groups": 0, "router_scaling_factor": 2.827,
        "yarn_beta_fast": 1.0, "yarn_beta_slow": 1, "rope_scaling_factor": 32.0, "rotary_base": 5e4,
        "aux_loss_type": "seq_aux_loss", "num_query_groups": 64,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert list(Config(**found | {"train_data": "data", "valid_data": "data"}).problems()) == []
    with pytest.raises(UnsupportedModel, match="--ignore-field auto_map"):
        settings(KIMI | {"auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"}})


def test_moonlight_is_read_as_deepseek_v3():
    """The norms inside its latent attention have another epsilon, 1e-6, than the others."""
    found = settings(MOONLIGHT)
    expected = {"q_lora_rank": 0, "shared_expert_size": 2816, "topk": 6, "router_scaling_factor": 2.446}
    expected |= {"norm_epsilon": 1e-5, "qk_norm_epsilon": 1e-6}
    assert found.items() >= expected.items()
    assert list(Config(**found | {"train_data": "data", "valid_data": "data"}).problems()) == []


# Fields of a config.json, the settings AUX_LOSS_TYPE, AUX_LOSS_COEFF and Z_LOSS_COEFF, and exported fields.
ALPHA = {"aux_loss_alpha": 0.001, "seq_aux": True}
OF_BATCH = ALPHA | {"seq_aux": False}
BALANCING: dict[str, tuple[str, dict[str, Any], tuple[str, str, float], dict[str, Any]]] = {
    "given": ("Mixtral", {COEF: 0.02}, ("aux_loss", "0.02", 0), {COEF: 0.02}),
    "default": ("Mixtral", {}, ("aux_loss", "0.001", 0), {COEF: 0.001}),
    "default of OLMoE": ("Olmoe", {}, ("aux_loss", "0.01", 0), {COEF: 0.01}),
    "zero": ("Qwen3Moe", {COEF: 0}, ("none", "0.0", 0), {COEF: 0.0}),
    "small": ("Qwen2Moe", {COEF: 1e-5}, ("aux_loss", "1e-05", 0), {COEF: 1e-5}),
    "z-loss": ("Olmoe", {COEF: 0.01, Z: 1e-3}, ("aux_loss", "0.01", 1e-3), {COEF: 0.01, Z: 1e-3}),
    "bias": ("DeepseekV3", {}, ("none", "0.0", 0), {}),
    "bias, GLM": ("Glm4Moe", {}, ("none", "0.0", 0), {}),
    "sequences": ("DeepseekV3", ALPHA, ("seq_aux_loss", "0.001", 0), ALPHA),
    "batch": ("DeepseekV3", OF_BATCH, ("aux_loss", "0.001", 0), OF_BATCH),
    "another name": ("Glm4Moe", {COEF: 1e-3}, ("seq_aux_loss", "0.001", 0), ALPHA),
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "expected", "written"), BALANCING.values(), ids=BALANCING)
def test_balancing_there_and_back(family, fields, expected, written):
    architecture = ARCHITECTURES[f"{family}ForCausalLM"]
    whole = {name: value for name, value in fields_of_class(architecture)[2].items() if name != COEF}
    model = Config(**settings_of(whole | fields, architecture))
    assert (model.aux_loss_type, model.aux_loss_coeff, model.z_loss_coeff) == expected
    back = fields_of(model, architecture)
    assert {name: back[name] for name in (COEF, Z, "aux_loss_alpha", "seq_aux") if name in back} == written


@pytest.mark.parametrize(
    ("kinds", "coefficients", "weight"),
    [
        ("global_aux_loss", "0.02", 0.02),
        ("seq_aux_loss,aux_loss", "0.01,0.02", 0.03),
        ("entropy", "0.1", 0.0),
        ("entropy,aux_loss", "0.1,0.02", 0.02),
    ],
)
def test_the_weight_that_an_export_has_is_that_of_the_losses_of_its_formula(kinds, coefficients, weight):
    architecture = ARCHITECTURES["MixtralForCausalLM"]
    model = Config(**settings_of(fields_of_class(architecture)[2], architecture))
    model = model.model_copy(update={"aux_loss_type": kinds, "aux_loss_coeff": coefficients})
    assert fields_of(model, architecture)[COEF] == pytest.approx(weight)


def test_noise_of_the_training_is_taken_over():
    mixtral = ARCHITECTURES["MixtralForCausalLM"]
    noise = {"attention_dropout": 0.1, "router_jitter_noise": 0.02}
    model = Config(**settings_of(fields_of_class(mixtral)[2] | noise, mixtral))
    assert (model.attention_dropout, model.router_jitter) == (0.1, 0.02)
    assert fields_of(model, mixtral).items() >= noise.items()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, ("1", 0)),
        ({"mlp_only_layers": [0, 1]}, ("1", 2)),
        ({"mlp_only_layers": [3]}, ("1,1,1,0", 0)),
        ({"decoder_sparse_step": 2}, ("0,1,0,1", 0)),
        ({"decoder_sparse_step": 4}, ("1", 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, ("1", 3)),
    ],
)
def test_dense_layers_of_qwen(fields, expected):
    qwen = fields_of_class(ARCHITECTURES["Qwen3MoeForCausalLM"])[2] | {"num_hidden_layers": 4}
    found = settings(qwen | fields)
    assert (found["moe_layer_freq"], found["first_k_dense"]) == expected
    is_moe = Config(**found).moe_layers
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    assert is_moe == [layer not in dense and (layer + 1) % step == 0 for layer in range(4)]


# Null is a value of the configuration class here, and the model cannot be built with it.
NULL_BUILDS_NOTHING = {"first_k_dense_replace", "n_group", "topk_group", "num_key_value_heads", "v_head_dim"}
NULL_BUILDS_NOTHING |= {"num_experts_per_tok", "n_routed_experts", "n_shared_experts", "topk_method"}
NULL_BUILDS_NOTHING |= {"num_experts", "num_shared_experts", "moe_k", "moe_num_experts", "moe_norm_min"}
NULL_BUILDS_NOTHING |= {"moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index"}
NULL_BUILDS_NOTHING |= {"moe_layer_interval", "embedding_multiplier", "residual_multiplier"}
NULL_BUILDS_NOTHING |= {"attention_multiplier", "logits_scaling", "num_local_experts", "head_dim", "moe_topk"}
NULL_BUILDS_NOTHING |= {"sliding_window", "num_dense_layers", "route_scale", "global_attn_every_n_layers"}
# Values for fields without a usable default.
USABLE: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 12},
    "Exaone4ForCausalLM": {"layer_types": ["full_attention"] * 32},  # which allow `sliding_window: null`
}


def fields_of_class(architecture: Architecture) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A class of the installed transformers, defaults of fields that we know, a config.json with them."""
    known = {name for rule in architecture.fields for name in rule.names} - {"rope_parameters"}
    of_class = CONFIG_MAPPING[architecture.model_type]
    defaults = {field.name: field.default for field in dataclasses.fields(of_class) if field.name in known}
    values = of_class()
    names = {"architectures": [architecture.name], "model_type": architecture.model_type}
    usable = USABLE.get(architecture.name, {})
    return of_class, defaults, names | {name: getattr(values, name) for name in defaults} | usable


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_a_missing_field_is_what_transformers_makes_of_it(architecture):
    of_class, defaults, whole = fields_of_class(architecture)
    expected = settings_of(whole, architecture)
    for name, default in defaults.items():
        part = {other: value for other, value in whole.items() if other != name}
        if name in architecture.defaults:
            assert architecture.defaults[name] == default, name
            if name not in USABLE.get(architecture.name, {}):
                assert settings_of(part, architecture) == expected, name
        else:
            with pytest.raises(UnsupportedModel, match=rf"{name}=\(missing\)"):
                settings_of(part, architecture)
    assert architecture.defaults.keys() <= defaults.keys()
    rope = of_class().rope_parameters
    rope = rope.get("full_attention", rope)
    assert expected["rotary_base"] == rope["rope_theta"]
    assert expected["rotary_fraction"] == rope.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_null_is_what_transformers_makes_of_it(architecture):
    of_class, defaults, whole = fields_of_class(architecture)
    accepted, may_be_null = set(), set(architecture.null)
    may_be_null |= {name for name, default in architecture.defaults.items() if default is None}
    for name in defaults:
        fields = whole | {name: None}
        try:
            found = getattr(of_class.from_dict(fields), name)
        except StrictDataclassError:
            with pytest.raises(UnsupportedModel, match=f"{name}="):
                settings_of(fields, architecture)
            continue
        if name in NULL_BUILDS_NOTHING and found is None and name not in may_be_null:
            with pytest.raises(UnsupportedModel, match=f"{name}="):
                settings_of(fields, architecture)
            continue
        accepted.add(name)
        is_flag = isinstance(defaults[name], bool)
        meant = whole | {name: bool(found) if is_flag else found}
        if name == "rope_interleave":
            with pytest.raises(UnsupportedModel, match="rope_interleave=False"):
                settings_of(fields, architecture)
        else:
            assert settings_of(fields, architecture) == settings_of(meant, architecture), name
    assert accepted == may_be_null


F, W = "full_attention", "sliding_attention"
# Class, fields, and layers with a window of 5 tokens in transformers.
WINDOWS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Mixtral", {}, [W, W, W, W]),
    ("Mixtral", {"use_sliding_window": False, "max_window_layers": 0}, [W, W, W, W]),  # not its fields
    ("Mixtral", {"sliding_window": None}, [F, F, F, F]),
    ("Mistral", {}, [W, W, W, W]),
    ("Qwen3Moe", {}, [F, F, F, F]),
    ("Qwen3Moe", {"use_sliding_window": True}, [W, W, W, W]),
    ("Qwen3", {"use_sliding_window": False, "max_window_layers": 1}, [F, F, F, F]),
    ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1}, [F, W, W, W]),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [F, W, W, W]),
    ("Qwen2", {"use_sliding_window": True, "layer_types": [W, F, F, W]}, [W, F, F, W]),
    ("Qwen2Moe", {"use_sliding_window": True}, [W, F, W, F]),
    ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 2}, [W, F, F, F]),
    ("Dots1", {"max_window_layers": 3}, [F, F, F, W]),
    ("Dots1", {"layer_types": [W, F, F, F], "max_window_layers": 3}, [W, F, F, F]),
    ("GptOss", {}, [W, F, W, F]),
    ("GptOss", {"layer_types": [F, F, F, F]}, [F, F, F, F]),
    ("Exaone4", {"sliding_window_pattern": 2}, [W, F, W, F]),
    ("Exaone4", {"sliding_window": None, "layer_types": [F, F, F, F]}, [F, F, F, F]),
    ("Exaone4", {"layer_types": [F, F, F, F]}, [F, F, F, F]),
    ("ExaoneMoe", {"sliding_window_pattern": 3}, [W, W, F, W]),
    ("Flint", {}, [F, F, W, F]),
    ("SmolLM3", {"use_sliding_window": True}, [F, F, F, W]),
    ("SmolLM3", {"sliding_window": None}, [F, F, F, F]),
    ("GraniteMoeSWA", {}, [F, W, W, W]),
    ("Mellum", {}, [F, F, F, F]),
    ("Mellum", {"layer_types": [W, W, F, F]}, [W, W, F, F]),
    ("Olmo3", {}, [W, W, W, F]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "kinds"), WINDOWS, ids=lambda value: str(value)[:50])
def test_windows(name, fields, kinds):
    architecture = ARCHITECTURES[f"{name}ForCausalLM"]
    sizes = {"num_hidden_layers": 4, "sliding_window": 5}
    whole = fields_of_class(architecture)[2]
    lists = {key for key, value in whole.items() if isinstance(value, list)} - {"architectures"}
    whole = {key: value for key, value in whole.items() if key not in lists} | sizes | fields
    model = Config(**settings(whole))
    assert model.window_layers == [kind == W for kind in kinds]
    assert model.sliding_window == (5 if W in kinds else 0)
    back = fields_of(model, architecture)
    of_class = CONFIG_MAPPING[architecture.model_type]
    for one in (whole, back):
        read = of_class.from_dict(dict(one))
        default = [W if read.sliding_window is not None else F] * 4
        listed = getattr(read, "layer_types", None) or default
        assert listed == kinds
        assert W not in kinds or read.sliding_window == 5
    assert settings(back) == settings(whole)


# The config.json of openai/gpt-oss-20b.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": [W, F] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


def test_the_preset_of_gpt_oss_is_the_published_model():
    found, preset = Config(**settings(GPT_OSS)), load_config({"preset": "gpt-oss-20b"}, {})
    assert shape_facts(found) == shape_facts(preset)
    assert function_facts(found) == function_facts(preset)
    assert list(found.model_copy(update={"train_data": "d", "valid_data": "d"}).problems()) == []


PLAIN_ROPE, OTHER_ROPE = ({"rope_type": "default", "rope_theta": base} for base in (5e5, 1e4))
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
MIXED = {"layer_types": [W, F, F, W]}
BY_KIND = {"rope_parameters": {F: PLAIN_ROPE, W: OTHER_ROPE}}
# Class, fields, ROTARY_LAYERS, ROTARY_BASE, WINDOW_ROTARY_BASE, ROPE_SCALING.
ROTARY: list[tuple[str, dict[str, Any], tuple[str, float, float, str]]] = [
    ("GptOss", {}, ("1", 150000.0, 0.0, "yarn")),
    ("GptOss", {"rope_theta": 1e4}, ("1", 1e4, 0.0, "yarn")),
    ("GptOss", {"rope_parameters": PLAIN_ROPE}, ("1", 5e5, 0.0, "none")),
    ("GptOss", {"rope_parameters": {}}, ("1", 150000.0, 0.0, "none")),  # only null is YaRN
    ("Exaone4", MIXED, ("windowed", 1e4, 0.0, "none")),
    ("Exaone4", {"layer_types": [F, F, F, F]}, ("0,0,0,0", 1e4, 0.0, "none")),
    ("Exaone4", {"sliding_window": None, "layer_types": [F, F, F, F]}, ("1", 1e4, 0.0, "none")),
    ("Flint", {"layer_types": [W, W, W, W]}, ("windowed", 1e4, 0.0, "none")),
    ("SmolLM3", {}, ("1,1,1,0", 2e6, 0.0, "none")),
    ("SmolLM3", {"no_rope_layers": [0, 1, 1, 1, 0]}, ("0,1,1,1", 2e6, 0.0, "none")),
    ("GraniteMoeSWA", {"layer_rope_theta": [5e5, 0, 2e4, 2e4]}, ("1,0,1,1", 5e5, 2e4, "none")),
    ("GraniteMoeSWA", {"layer_rope_theta": [0, 2e4, 2e4, 2e4]}, ("0,1,1,1", 2e4, 0.0, "none")),
    ("GraniteMoeSWA", {"rope_parameters": YARN_ROPE}, ("1", 5e5, 0.0, "yarn")),
    ("Mellum", MIXED | BY_KIND, ("1", 5e5, 1e4, "none")),
    ("Mellum", BY_KIND, ("1", 5e5, 0.0, "none")),
    ("Mellum", {"layer_types": [W, W, W, W]} | BY_KIND, ("1", 1e4, 0.0, "none")),
    ("Olmo3", {}, ("1", 5e5, 0.0, "none")),
    ("Olmo3", {"rope_parameters": {F: YARN_ROPE, W: YARN_ROPE}}, ("1", 5e5, 0.0, "yarn")),
    ("Olmo3", {"rope_theta": 1e6}, ("1", 1e6, 5e5, "none")),  # only that of the layers without a window
    ("Olmo3", {"rope_theta": 1e6, "rope_scaling": OTHER_ROPE}, ("1", 1e4, 5e5, "none")),
    (
        "Olmo3", {"rope_theta": 5e5, "rope_scaling": YARN_ROPE | {"attention_factor": 1.2079441541679836}},
        ("1", 5e5, 5e5, "yarn"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "expected"), ROTARY, ids=lambda value: str(value)[:50])
def test_rotary_embedding_by_layer(name, fields, expected):
    architecture = ARCHITECTURES[f"{name}ForCausalLM"]
    whole = fields_of_class(architecture)[2]
    lists = {key for key, value in whole.items() if isinstance(value, list)} - {"architectures"}
    whole = (
        {key: value for key, value in whole.items() if key not in lists} | {"num_hidden_layers": 4} | fields
    )
    found = settings(deepcopy(whole))
    names = ("rotary_layers", "rotary_base", "window_rotary_base", "rope_scaling")
    assert tuple(found[key] for key in names) == expected
    assert settings(fields_of(Config(**found), architecture)) == found


# Settings of the model that an import leaves at their defaults, which are the plainest values.
LEFT_AT_DEFAULTS = {
    "dropout", "init_distribution", "parametrization", "mup_base_hidden_size",
    "mup_base_moe_ffn_hidden_size", "mup_base_topk", "mup_rule", "null_experts", "pad_to_capacity",
    "drop_policy", "token_rounding", "router_top_p", "router_dtype", "router_jitter", "router_bias_rule",
    "attention_backend", "expert_backend", "routing_kernels", "moe_sm_margin", "dispatcher", "upcycle_from",
    "upcycle_granularity", "cross_entropy", "impl", "fp8", "fp8_recipe", "ep", "etp",
    "mtp_loss_coeff",
}  # fmt: skip


def test_settings_of_decides_every_setting_of_the_model():
    """Fails for a new setting: add it to `importing._PLAIN` unless its default changes nothing."""
    decided = set(settings(DEEPSEEK)) | {
        name for _, new in OLD_AND_NEW.values() for name in settings(LLAMA | new)
    }
    of_model = {name for name in Config.model_fields if traits(Config, name).part in ("model", "experts")}
    assert of_model - decided == LEFT_AT_DEFAULTS
