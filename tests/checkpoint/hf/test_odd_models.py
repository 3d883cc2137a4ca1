"""Models with odd sizes, of every class: the same logits, gradients and tensors."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.hf.logits_on_ranks import our_gradients, our_logits
from helpers.hf.tiny_models import MODELS, their_logits, tiny_folder, tiny_model, weights_of
from helpers.relative_error import assert_equal_to
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf

TOKENS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(0))
ROPE = {"rope_type": "default", "rope_theta": 2e4}
YARN = {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}
Changes = dict[str, Any]

# The first of each list have many changes; they run in the short suite.
ANY: list[Changes] = [
    {"vocab_size": 251, "tie_word_embeddings": True, "num_hidden_layers": 2},
    {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
    {"rms_norm_eps": 1e-4, "rope_parameters": ROPE},
]
GROUPED: list[Changes] = [
    {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
    {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "rope_parameters": YARN},
    {"num_key_value_heads": 4, "rope_parameters": YARN | {"beta_fast": 24, "beta_slow": 2}},
]
LATENT: list[Changes] = [
    {"q_lora_rank": 10, "kv_lora_rank": 6, "v_head_dim": 6, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    {"q_lora_rank": None, "rope_parameters": LATENT_YARN},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "rope_parameters": YARN},
    {"rope_parameters": LATENT_YARN | {"beta_fast": 1.0, "beta_slow": 1.0}},  # as in Kimi-K2
]
UNGROUPED = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 0.3}
DEEPSEEK: list[Changes] = [
    UNGROUPED | {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_shared_experts": 3},
    {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4},
    {"n_routed_experts": 12, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 3},
    UNGROUPED | {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
]
SIGMOID: list[Changes] = [
    UNGROUPED | {"norm_topk_prob": False, "num_experts_per_tok": 1},
    {"norm_topk_prob": False, "n_routed_experts": 8, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 5},
]
DENSE_FIRST: list[Changes] = [
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 2, "intermediate_size": 30},
]
BY_TYPE: list[Changes] = [
    {"mlp_layer_types": ["sparse", "dense", "sparse"]}, {"mlp_layer_types": ["sparse"] * 3},
    {"mlp_layer_types": None, "intermediate_size": 30},
]  # fmt: skip
HALF = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
OF_NUMBER: dict[str, list[Changes]] = {  # classes that call the numbers of experts differently
    "minimax_m2": [
        {"num_local_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 20},
        {"num_local_experts": 7, "num_experts_per_tok": 3},
        HALF | {"head_dim": 8},
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        {"rotary_dim": 4, "head_dim": 10, "rope_parameters": ROPE},
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}, "head_dim": 16, "num_key_value_heads": 1},
    ],
    "hy_v3": [
        {"num_experts": 5, "num_experts_per_tok": 5, "num_shared_experts": 3, "moe_intermediate_size": 12},
        {"num_experts": 7, "num_experts_per_tok": 3, "router_scaling_factor": 0.4, "num_shared_experts": 1},
        {"enable_moe_fp32_combine": False, "num_experts_per_tok": 3},
    ],
    "ernie4_5_moe": [
        {"moe_num_experts": 5, "moe_k": 5, "moe_num_shared_experts": 3, "moe_intermediate_size": 12},
        {"moe_num_experts": 7, "moe_k": 3, "moe_num_shared_experts": 1, "tie_word_embeddings": False},
        {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": 0},
        {"moe_layer_start_index": 2, "intermediate_size": 30, "moe_layer_end_index": 2},
        {"moe_k": 2, "moe_num_experts": 3, "moe_num_shared_experts": 0, "router_aux_loss_coef": 0.0},
    ],
}
WIDTH = {"hidden_size": 24, "intermediate_size": 28}
BY_WIDTH: list[Changes] = [  # head size: hidden_size / num_attention_heads
    {"num_attention_heads": 2, "num_key_value_heads": 1}, {"rope_parameters": YARN}, {"vocab_size": 384},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}, WIDTH,
    {"num_hidden_layers": 1, "num_key_value_heads": 4}, {"max_position_embeddings": 41},
    {"num_key_value_heads": 1, "rope_parameters": YARN | {"beta_fast": 24, "beta_slow": 2}},
]  # fmt: skip
GRANITE: list[Changes] = [
    {"embedding_multiplier": 0.3, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    {"logits_scaling": 0.2, "residual_multiplier": 2.5, "tie_word_embeddings": False},
]
GREEDY = {"topk_method": "greedy", "n_group": None, "topk_group": None}
NUMBERS: list[Changes] = [
    {"num_experts": 5, "num_experts_per_tok": 5}, {"num_experts": 7, "num_experts_per_tok": 3},
    {"norm_topk_prob": False, "num_experts_per_tok": 1},
]  # fmt: skip
BY_LIST: list[Changes] = [
    {"mlp_only_layers": [2], "intermediate_size": 28}, {"mlp_only_layers": [], "decoder_sparse_step": 2},
]  # fmt: skip
PLAIN: list[Changes] = [
    {"vocab_size": 384}, {"num_hidden_layers": 1, "num_key_value_heads": 4}, {"max_position_embeddings": 41},
]  # fmt: skip
WINDOW = {"sliding_window": 5}
SWITCHED = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
F, W = "full_attention", "sliding_attention"
OF_MIMO = {
    F: ROPE | {"partial_rotary_factor": 0.5},
    W: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}
DEEPSEEK_UNSHARED = [
    {name: value for name, value in changes.items() if name != "n_shared_experts"} for changes in DEEPSEEK
]


def by_kind(rows: list[Changes]) -> list[Changes]:
    """The same changes for classes with a rotary embedding for each kind of layer."""
    plain, found = {"rope_type": "default", "rope_theta": 1e4}, []
    for row in rows:
        rope = {"rope_parameters": {F: row["rope_parameters"], W: plain}} if "rope_parameters" in row else {}
        found.append({"layer_types": None, "mlp_layer_types": None} | row | rope)
    return found


OF_WINDOWS: dict[str, list[Changes]] = {
    "gpt_oss": [
        {"num_local_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 12, "sliding_window": 3},
        {"num_local_experts": 7, "num_experts_per_tok": 3, "layer_types": [F, W, W]},
        {"sliding_window": 1, "layer_types": [W] * 3}, {"layer_types": [F] * 3},
        {"sliding_window": 64, "rope_parameters": None}, *ANY, *PLAIN, *GROUPED,
    ],
    "exaone4": [
        {"sliding_window": 2, "sliding_window_pattern": 2, "hidden_size": 40},
        {"sliding_window": None, "layer_types": [F] * 3}, {"layer_types": [F] * 3},
        {"layer_types": [F, W, W]}, *ANY, *PLAIN, *GROUPED,
    ],
    "exaone_moe": [
        UNGROUPED | {"num_experts": 6, "num_experts_per_tok": 6, "num_shared_experts": 3},
        {"num_experts": 12, "n_group": 3, "topk_group": 2, "sliding_window": 2},
        UNGROUPED | {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False},
        {"first_k_dense_replace": 0}, {"first_k_dense_replace": 2, "intermediate_size": 30}, BY_TYPE[0],
        {"layer_types": [W] * 3}, *ANY, *GROUPED,
    ],
    "flint": [
        {"num_experts": 5, "num_experts_per_tok": 5, "sliding_window": 3, "intermediate_size": 30},
        {"num_hidden_layers": 5, "layer_types": None, "mlp_only_layers": None}, *NUMBERS[1:],
        {"mlp_only_layers": [], "decoder_sparse_step": 2}, {"shared_expert_intermediate_size": 64},
        {"layer_types": [W] * 3}, *({"layer_types": None} | one for one in ANY), *GROUPED,
    ],
    "smollm3": [
        {"no_rope_layers": [0, 1, 1], "layer_types": [W, W, F], "sliding_window": 3}, {"head_dim": 20},
        {"use_sliding_window": False}, {"tie_word_embeddings": False}, *ANY, *PLAIN, *GROUPED,
    ],
    "granitemoe_swa": [
        {"layer_rope_theta": [2e4, 0, 1e4], "sliding_window": 3}, {"layer_rope_theta": None}, *GRANITE,
        {"layer_rope_theta": [1e4, 0, 0], "layer_types": [W, F, W]}, {"shared_intermediate_size": 0},
        {"num_local_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 12},
        *({"layer_rope_theta": None} | one for one in (*ANY, *BY_WIDTH)),
    ],
    "mellum": [
        *NUMBERS, {"layer_types": None}, {"mlp_layer_types": None, "sliding_window": 2},
        {"layer_types": [W] * 3}, *by_kind(ANY), *by_kind([*GROUPED, {"rope_parameters": LLAMA3}]),
    ],
    "olmo3": [
        {"sliding_window": 3, "layer_types": [W, F, F]}, {"layer_types": [F] * 3}, {"layer_types": [W] * 3},
        *by_kind([*ANY, *BY_WIDTH]),
    ],
}  # fmt: skip
ODD: dict[str, list[Changes]] = OF_WINDOWS | {
    "mixtral": [
        {"num_local_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 12}, *ANY, *PLAIN,
        {"num_local_experts": 7, "num_experts_per_tok": 3}, {"num_local_experts": 3}, *GROUPED[:2],
        GROUPED[2] | {"head_dim": 6}, WINDOW,
    ],
    "olmoe": [*NUMBERS, *ANY, *BY_WIDTH],
    "qwen3_moe": [*NUMBERS, *({"mlp_only_layers": [1]} | one for one in ANY), *GROUPED, *BY_LIST, SWITCHED],
    "qwen2_moe": [*NUMBERS, *ANY, *BY_WIDTH, *BY_LIST, SWITCHED],
    "deepseek_v3": [*DEEPSEEK, *ANY, *LATENT, *SIGMOID, *DENSE_FIRST],
    "glm4_moe": [
        *DEEPSEEK, *ANY, GROUPED[0] | {"head_dim": 20}, HALF | {"head_dim": 8}, *SIGMOID, *DENSE_FIRST,
        {"use_qk_norm": False}, {"attention_bias": False},
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
    ],
    "llama": [
        *GROUPED, *ANY, *PLAIN, {"rope_parameters": LLAMA3},
        {"head_dim": 20, "rope_parameters": YARN | {"truncate": False}},
        {"intermediate_size": 30, "hidden_size": 40},
    ],
    "qwen3": [
        *GROUPED, *ANY, *PLAIN, SWITCHED | {"tie_word_embeddings": False}, {"head_dim": 20},
        {"intermediate_size": 30, "hidden_size": 36},
    ],
    "dots1": [*DEEPSEEK, *ANY, SWITCHED, *GROUPED, *SIGMOID, *DENSE_FIRST],
    "solar_open": [
        *DEEPSEEK, *ANY, *GROUPED, *SIGMOID, {"attention_bias": False}, {"n_shared_experts": 4, "head_dim": 6}
    ],
    "minimax_m2": [*OF_NUMBER["minimax_m2"], *ANY, GROUPED[0] | {"rope_parameters": ROPE}, *GROUPED[1:]],
    "glm4_moe_lite": [*DEEPSEEK, *ANY, *LATENT, *SIGMOID, *BY_TYPE],
    "deepseek_v2": [
        GREEDY | {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_shared_experts": 3},
        {"n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": 3, "routed_scaling_factor": 0.3},
        GREEDY | {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        {"num_experts_per_tok": 3, "topk_group": 2}, {"num_experts_per_tok": 4},
        {"topk_group": 4, "num_experts_per_tok": 7}, *ANY, *LATENT, *DENSE_FIRST,
    ],
    "hy_v3": [*OF_NUMBER["hy_v3"], *({"mlp_layer_types": None} | one for one in ANY), *GROUPED, *BY_TYPE],
    "ernie4_5_moe": [*OF_NUMBER["ernie4_5_moe"], *ANY, *GROUPED],
    "qwen2": [*ANY, *BY_WIDTH, SWITCHED],
    "olmo2": [*ANY, *BY_WIDTH, {"num_attention_heads": 1, "num_key_value_heads": 1}],
    "flex_olmo": [
        {"num_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 12},
        {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True}, *ANY, *BY_WIDTH,
    ],
    "granite": [*GRANITE, *ANY, *BY_WIDTH],
    "granitemoe": [
        *GRANITE, {"num_local_experts": 5, "num_experts_per_tok": 5, "intermediate_size": 12}, *ANY, *BY_WIDTH
    ],
    "granitemoeshared": [
        *GRANITE, {"shared_intermediate_size": 0}, {"shared_intermediate_size": 48}, *ANY, *BY_WIDTH
    ],
    "hunyuan_v1_moe": [
        {"num_experts": 5, "moe_topk": 5, "intermediate_size": 12},
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 2e4}},
        {"num_experts": 7, "moe_topk": 3}, {"moe_topk": [2, 2, 2]}, *ANY, *GROUPED, {"vocab_size": 384},
        {"num_hidden_layers": 1, "num_key_value_heads": 4}, {"max_position_embeddings": 41},
    ],
    "axk1": [
        *DEEPSEEK, *({"mlp_layer_types": None} | one for one in ANY), *LATENT[:1], *LATENT[2:], *SIGMOID,
        *BY_TYPE,
    ],
    "mistral": [
        *GROUPED, *ANY, {"head_dim": None}, WINDOW,
        {"intermediate_size": 30, "hidden_size": 36},
        {"vocab_size": 384}, {"num_hidden_layers": 1, "num_key_value_heads": 4},
        {"max_position_embeddings": 41},
    ],
}  # fmt: skip
ODD |= {
    "afmoe": [
        {"num_experts": 5, "num_experts_per_tok": 5, "num_shared_experts": 3, "num_dense_layers": 0},
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "mup_enabled": False},
        {"layer_types": [W, W, F], "num_dense_layers": 2}, {"layer_types": [W, W, W], "sliding_window": 3},
        {"layer_types": [F, F, F]}, {"layer_types": None, "global_attn_every_n_layers": 3}, *GROUPED[:2],
        *({"layer_types": None} | one for one in ANY),
        {"route_scale": 0.4, "num_shared_experts": 1},
    ],
    "cohere2": [
        {"layer_types": [F, W, W], "logit_scale": 1.0}, {"layer_types": [W, W, W], "sliding_window": 3},
        {"layer_types": [F, F, F]}, {"sliding_window_pattern": 3, "num_key_value_heads": 1},
        {"tie_word_embeddings": False, "layer_norm_eps": 1e-3}, *ANY[:2], {"rope_parameters": ROPE},
        *BY_WIDTH[:3], {"intermediate_size": 30}, {"num_attention_heads": 8, "num_key_value_heads": 4},
    ],
    "cohere2_moe": [
        {"num_shared_experts": 0, "expert_selection_fn": "sigmoid", "num_experts": 5},
        {"shared_expert_combination_strategy": "sum", "prefix_dense_sliding_window_pattern": 2},
        {"rms_norm_eps": 1e-4, "first_k_dense_replace": 2}, BY_TYPE[0],
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "first_k_dense_replace": 0},
        {"layer_types": [F, W, W], "prefix_dense_sliding_window_pattern": 3},
        {"layer_types": [F, F, F], "num_shared_experts": 1}, {"layer_types": [W, W, W]}, *ANY[:2],
        {"rope_parameters": ROPE}, {"prefix_dense_intermediate_size": None}, *GROUPED[:2],
    ],
    "mimo_v2_flash": [
        *DEEPSEEK_UNSHARED, {"v_head_dim": 12, "attention_value_scale": None, "layer_types": [W, F, W]},
        {"attention_bias": False, "num_attention_heads": 8, "num_key_value_heads": 1, "v_head_dim": 2},
        {"head_dim": 20, "mlp_layer_types": ["sparse"] * 3}, {"norm_topk_prob": False, "sliding_window": 3},
        {"routed_scaling_factor": 0.3, "rope_parameters": OF_MIMO}, ANY[0], {"hidden_size": 40},
        {"rms_norm_eps": 1e-4, "mlp_layer_types": ["sparse", "dense", "dense"]}, {"num_hidden_layers": 7},
    ],
}  # fmt: skip
WITH_EXPERTS = ODD.keys() - {
    "llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "exaone4", "smollm3", "olmo3", "cohere2"
}  # fmt: skip
NUM_SHORT = 1
SHORT = [(name, index) for name, rows in ODD.items() for index in range(min(NUM_SHORT, len(rows)))]
LONG = [(name, index) for name, rows in ODD.items() for index in range(NUM_SHORT, len(rows))]


@pytest.mark.parametrize(
    "cases",
    [SHORT[::2], *(pytest.param(cases, marks=pytest.mark.slow) for cases in (SHORT[1::2], LONG))],
    ids=["short", "others", "long"],
)
def test_logits_and_round_trip(cases, tmp_path):
    theirs = {}
    for name, index in cases:
        folder = tmp_path / f"{name} {index}"
        tiny_folder(folder / "hf", name, changes=deepcopy(ODD[name][index]))  # transformers changes them
        from_hf(folder / "hf", folder / "ours")
        assert to_hf(folder / "ours", folder / "back").architecture == f"{MODELS[name][0]}ForCausalLM"
        before, after = weights_of(folder / "hf"), weights_of(folder / "back")
        assert before.keys() == after.keys(), folder.name
        assert all(torch.equal(before[key], after[key]) for key in before), folder.name
        theirs[folder.name] = their_logits(folder / "back", TOKENS)
    ours = our_logits([tmp_path / name / "ours" for name in theirs], TOKENS)
    assert_equal_to(1e-5, dict(zip(theirs, ours, strict=True)), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}], ids=["tp2", "ep2"])
def test_logits_on_two_ranks(layout, tmp_path):
    """Of all odd models whose sizes two ranks can share."""
    theirs: dict[str, torch.Tensor] = {}
    ranks = {"gpus_per_node": 2, "nnodes": 1, "train_data": "data", "valid_data": "data"} | layout
    for name, index in SHORT + LONG:
        folder = tmp_path / f"{name} {index}"
        tiny_folder(folder / "hf", name, changes=deepcopy(ODD[name][index]))
        config = from_hf(folder / "hf", folder / "ours").config
        if (config.use_moe or "tp" in layout) and not list(config.model_copy(update=ranks).problems()):
            theirs[folder.name] = their_logits(folder / "hf", TOKENS)
    assert {name.split()[0] for name in theirs} >= {
        name for name in ODD if "tp" in layout or name in WITH_EXPERTS
    }
    names = [tmp_path / name / "ours" for name in theirs]
    ours = our_logits(names, TOKENS, num_ranks=2, timeout=500, **layout)
    print(f"{layout}: {len(theirs)} of {len(SHORT + LONG)} models")
    assert_equal_to(1e-5, dict(zip(theirs, ours, strict=True)), theirs)


def test_every_class_has_enough_cases():
    assert ODD.keys() == MODELS.keys()
    assert min(map(len, ODD.values())) >= 12


BASE: list[tuple[str, Changes]] = [(name, {}) for name in ODD]
EVERY = [(name, changes) for name, rows in ODD.items() for changes in rows]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [BASE, EVERY], ids=["base", "odd"])
def test_gradients(cases, tmp_path):
    """An import is linear, so that the import of transformers' gradients is the gradient to expect."""
    folders: list[tuple[Path, Path]] = []
    for number, (name, changes) in enumerate(cases):
        folder = tmp_path / f"{name} {number}"
        model = tiny_model(name, **deepcopy(changes))
        model.save_pretrained(folder / "hf")
        logits = model(TOKENS).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten()).backward()
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
        model.save_pretrained(folder / "hf_grads")
        for kind in ("", "_grads"):
            from_hf(folder / f"hf{kind}", folder / f"ours{kind}")
        folders.append((folder / "ours", folder / "ours_grads"))
    for (name, changes), (found, expected) in zip(cases, our_gradients(folders, TOKENS), strict=True):
        assert len(found) > 15 or "num_hidden_layers" in changes, name
        averages = changes.get("shared_expert_combination_strategy", "average") == "average"
        for key in expected if name == "cohere2_moe" and averages else ():
            if key.endswith("shared_experts.linear_fc2.weight"):  # half of theirs has twice their gradient
                expected[key] = 4 * expected[key]
        errors = {
            key: (found[key] - value).norm() / value.norm().clamp(min=1e-30)
            for key, value in expected.items()
        }
        assert max(errors.values()) < 1e-4, (name, changes, max(errors, key=errors.__getitem__))
