"""Settings that a checkpoint does not continue with are named before it is loaded; others may change."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import MODEL, Leg, build_job, run_legs, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format.keys import differ_by_padding
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.model_changes import refuse_other_model

OLD: dict[str, Any] = MODEL | {"gpus_per_node": 1}
NAME = "the checkpoint at iteration 6 of runs/x/checkpoints"
FLAG = ", or ALLOW_OTHER_MODEL=true to continue with a different computation"


def lines(before: dict[str, Any], **settings: Any) -> list[str]:
    saved = load_config(OLD | before, {}).model_dump()
    try:
        refuse_other_model(load_config(OLD | before | settings, {}), saved, NAME)
    except ConfigError as error:
        return error.problems
    return []


LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 2.0, "rope_original_seq_len": 32}
WINDOW = {"sliding_window": 8, "window_pattern": "1,0,1,0"}
WINDOWED_SINKS = WINDOW | {"attention_sinks": "windowed"}
SHAPES = [
    ({}, "hidden_size", 64, 32), ({}, "num_layers", 2, 4), ({}, "num_heads", 8, 4),
    ({}, "num_query_groups", 4, 2), ({}, "head_dim", 16, 8), ({}, "vocab_size", 100, 128),
    ({}, "num_experts", 4, 8), ({}, "moe_ffn_hidden_size", 48, 24), ({}, "shared_expert_size", 16, 0),
    ({}, "null_experts", 2, 0), ({"shared_expert_size": 16}, "shared_expert_gate", True, False),
    ({"moe_latent_size": 16}, "moe_latent_size", 24, 16), ({}, "qk_norm", True, False),
    ({}, "mtp_num_layers", 1, 0), ({}, "tie_embeddings", True, False), ({}, "add_bias_linear", True, False),
    ({}, "normalization", "LayerNorm", "RMSNorm"), ({}, "use_moe", False, True),
    ({"first_k_dense": 1}, "ffn_hidden_size", 64, 48), ({}, "qkv_bias", True, False),
    ({}, "norm_placement", "post", "pre"), ({"qk_norm": True}, "qk_norm_scope", "all", "head"),
    ({}, "multi_latent_attention", True, False), ({}, "value_head_dim", 4, 0),
    ({}, "attention_gate", True, False), ({}, "attention_sinks", "all", "none"),
    (WINDOW, "attention_sinks", "windowed", "none"),
    (WINDOWED_SINKS, "window_pattern", "1,1,0,0", "1,0,1,0"),
    ({"normalization": "LayerNorm"}, "norm_bias", False, True),
    ({"sliding_window": 8}, "window_query_groups", 4, 2),
    *((LATENT, name, 24, LATENT[name]) for name in LATENT if name != "multi_latent_attention"),
]  # fmt: skip
FUNCTIONS = [
    ({}, "topk", 4, 2), ({}, "router_score", "sigmoid", "softmax"), ({}, "router_pre_softmax", False, True),
    ({}, "router_top_p", 0.5, 1.0), ({}, "router_normalize", "true", "auto"),
    ({}, "router_scaling_factor", 2.0, 1.0),
    ({"num_router_groups": 4, "router_group_topk": 2}, "num_router_groups", 2, 4),
    ({"num_router_groups": 4, "router_group_topk": 2}, "router_group_topk", 3, 2),
    ({"num_router_groups": 4, "router_group_topk": 2}, "router_group_best", 2, 0),
    ({}, "rotary_base", 5000.0, 10000.0), ({}, "norm_epsilon", 1e-6, 1e-5),
    ({}, "activation", "geglu", "swiglu"), ({}, "force_routing", "balanced", "none"),
    ({"qk_norm": True}, "qk_norm_epsilon", 1e-6, 0.0), ({}, "embedding_multiplier", 12.0, 1.0),
    ({}, "residual_multiplier", 0.5, 1.0), ({}, "attention_multiplier", 0.1, 0.0),
    ({}, "logits_scaling", 6.0, 1.0), ({}, "value_scale", 0.5, 1.0),
    ({}, "rotary_fraction", 0.5, 1.0), ({}, "rope_scaling", "llama3", "none"),
    (YARN, "rope_scaling_factor", 4.0, 2.0), (YARN, "rope_original_seq_len", 64, 32),
    (YARN, "yarn_beta_fast", 16.0, 32.0), (YARN, "yarn_beta_slow", 2.0, 1.0), (YARN, "yarn_mscale", 0.5, 1.0),
    (YARN, "yarn_mscale_all_dim", 0.5, 0.0), (YARN, "yarn_truncate", False, True),
    ({}, "sliding_window", 8, 0), (WINDOW, "window_pattern", "1,1,0,0", "1,0,1,0"),
    (WINDOW, "window_rotary_base", 5000.0, 0.0), ({}, "attention_softcap", 30.0, 0.0),
    ({}, "rotary_layers", "1,1,1,0", "1"),
]  # fmt: skip


def test_a_dense_model_has_no_norms_after_moe_layers():
    assert lines({"use_moe": False}, norm_placement="around_moe") == []


@pytest.mark.parametrize(("before", "name", "value", "old"), SHAPES)
def test_other_shapes_are_refused_whatever_the_flag(before, name, value, old):
    for flag in (False, True):
        found = lines(before, **{name: value}, allow_other_model=flag)
        before_it = f"{name.upper()}={old}"
        assert f"{name.upper()}={value}: {NAME} has {before_it}. Fix: set {before_it}." in found
        # The size of a head follows from that of the model.
        assert {line.partition("=")[0] for line in found} <= {name.upper(), "HEAD_DIM"}


@pytest.mark.parametrize(("before", "name", "value", "old"), FUNCTIONS)
def test_another_function_needs_the_flag(before, name, value, old, caplog):
    assert lines(before, **{name: value}) == [
        f"{name.upper()}={value}: {NAME} has {name.upper()}={old}. Fix: set {name.upper()}={old}{FLAG}."
    ]
    with caplog.at_level(logging.WARNING):
        assert lines(before, **{name: value}, allow_other_model=True) == []
    assert caplog.messages == [
        f"{name.upper()}={value}: {NAME} has {name.upper()}={old}; ALLOW_OTHER_MODEL=true: continuing"
    ]


def test_all_lines_at_once_with_what_helps():
    changes = {"router_bias_update_rate": 0, "first_k_dense": 1, "topk": 1, "activation": "gelu"}
    dense, bias, *others = lines({"router_bias_update_rate": 0.01}, **changes)
    assert dense.startswith(f"MOE_LAYER_FREQ=0111: {NAME} has MOE_LAYER_FREQ=1111. Fix: set MOE_LAYER_FREQ")
    assert "UPDATE_RATE=over 0. Fix: set this rate above 0 (1e-12 keeps the bias) or ROUTER" in bias
    assert [line.partition(":")[0] for line in others] == ["ACTIVATION=gelu", "TOPK=1"]


def test_everything_else_may_change():
    same = {"gpus_per_node", "preset", *(name for _, name, _, _ in SHAPES + FUNCTIONS)}
    same |= {"first_k_dense", "moe_layer_freq", "allow_other_model", "router_bias_update_rate"}
    other: dict[str, Any] = {}
    for name in Config.model_fields.keys() - same:
        value = getattr(load_config(OLD, {}), name)
        if isinstance(value, bool):
            other[name] = not value
        elif isinstance(value, int | float):
            other[name] = value + 1 if value >= 1 or isinstance(value, int) else value / 2
    other |= {"moe_type": "moe", "dtype": "bf16", "expert_backend": "loop", "aux_loss_type": "seq_aux_loss"}
    other |= {"vpp": 2, "recompute": "full"}
    assert len(other) > 45
    assert lines({}, **other) == []
    # Of other versions.
    saved = load_config(OLD, {}).model_dump() | {"no_setting_any_more": 1}
    del saved["first_stage_layers"]
    refuse_other_model(load_config(OLD, {}), saved, NAME)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps."""
    folder = tmp_path_factory.mktemp("source")
    write_data(folder)
    run_legs([Leg(settings(folder), None, 2, {2: folder / "checkpoints"})])
    return folder


def settings(folder: Path) -> dict[str, Any]:
    return {"gpus_per_node": 1, "train_data": str(folder / "tokens")}


def refused(job_settings: dict[str, Any], port: int, checkpoints: str) -> tuple[list[str], bool]:
    """On one rank: why a checkpoint is not loaded, and whether the model is as it was."""
    from moe_exp.checkpoint.load import load
    from moe_exp.engine import runtime

    os.environ["MASTER_PORT"] = str(port)
    config = load_config(MODEL | job_settings, {})
    job = build_job(config, runtime.start(config))
    parameters = list(job.trained.model[0].parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        load(config, job.runtime, Path(checkpoints), job.trained)
    except ValueError as error:
        return str(error).splitlines(), all(map(torch.equal, before, parameters))
    return [], False


def test_nothing_is_loaded_of_another_model(source):
    job = settings(source) | {"num_experts": 4, "topk": 1, "gpus_per_node": 2, "ep": 2}
    files = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    found, _ = outcomes = run_on_ranks(2, refused, job, free_port(), str(source / "checkpoints"), join=False)
    (experts, topk), is_as_it_was = found
    name = f"the checkpoint at iteration 2 of {source / 'checkpoints'}"
    assert experts == f"NUM_EXPERTS=4: {name} has NUM_EXPERTS=8. Fix: set NUM_EXPERTS=8."
    assert topk.startswith(f"TOPK=1: {name} has TOPK=2. Fix: ")
    assert is_as_it_was and outcomes[1] == found
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == files


@pytest.mark.parametrize(
    ("stored", "is_same"), [(256, True), (129, True), (128, False), (8192, True), (8448, False)]
)
def test_vocabularies_thatdiffer_by_padding_alone(stored, is_same):
    """Of a model with 256 rows: Megatron-LM's have up to 128 * TP more."""
    assert differ_by_padding((stored, 32), (256, 32)) == is_same
    assert not differ_by_padding((stored, 48), (256, 32))


def test_weights_without_settings_are_refused_by_their_shapes(source, tmp_path):
    """As of Megatron-LM: fewer experts, and fewer tokens than the model has."""
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    for path in (source / "checkpoints" / "iter_0000002").iterdir():
        (folder / path.name).symlink_to(path)
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    of_weights = {name: value for name, value in common.items() if name not in ("progress", "config")}
    torch.save(of_weights, folder / "common.pt")
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    for change, key, shape, in_model in (
        ({"num_experts": 16}, experts, [4, 8, 48, 32], [4, 16, 48, 32]),
        ({"vocab_size": 129}, "embedding.word_embeddings.weight", [128, 32], [256, 32]),
    ):
        job = settings(source) | change
        (found,) = run_on_ranks(1, refused, job, free_port(), str(tmp_path), join=False)
        ((line,), is_as_it_was) = found
        assert f"{key} with shape {shape}, but the model's shape is {in_model}. Fix" in line and is_as_it_was


def test_losses_with_a_state_may_come_and_go(source):
    """What they keep of past batches begins at zero, or is left out."""
    folder, losses = source / "global", {"aux_loss_type": "global_aux_loss"}
    run_legs([Leg(settings(source) | losses, source / "checkpoints", 1, {3: folder})])
    (steps,) = run_legs([Leg(settings(source), folder, 1)])
    assert steps[0].lm_loss < 5
