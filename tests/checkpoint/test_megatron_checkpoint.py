"""Checkpoints go both ways between our model and Megatron's own (local spec): same logits, same gradients."""

import itertools
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from helpers.checkpoint.saving import save
from helpers.layers.megatron_pair import build_latent_projections_without_te
from helpers.ranks import RankError, free_port, run_on_ranks
from helpers.relative_error import assert_equal_to, relative_error
from helpers.whole_runs import SMALL
from moe_exp.checkpoint import save as save_module
from moe_exp.checkpoint.format.folders import iteration_folder
from moe_exp.checkpoint.load import load, load_weights
from moe_exp.checkpoint.optimizer_state import owned_state
from moe_exp.checkpoint.state import Progress, Trained, whole_state
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model, transformer_config
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.layers.spec import decoder_spec

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

LIMIT = 1e-5
MODEL = {
    **SMALL, "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 20,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 16, "vocab_size": 200, "num_experts": 4, "topk": 2,
    "mbsz": 2, "gbsz": 8, "dtype": "fp32",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gated": {},
    "not_gated": {"activation": "gelu", "normalization": "LayerNorm"},
    # Without the load-balancing loss, of which Megatron counts tokens by a top-k without the expert bias, and
    # we by the one that is used.
    "deepseek": {
        "router_score": "sigmoid", "router_bias_update_rate": 0.01, "shared_expert_size": 24,
        "router_scaling_factor": 2.5, "aux_loss_coeff": 0.0, "moe_latent_size": 12,
    },
    "biases": {"add_bias_linear": True},
    "first_dense": {"first_k_dense": 1, "router_pre_softmax": False, "qk_norm": True},
}  # fmt: skip
# What Megatron-LM's script writes, and what it wrote before version 0.14.
STYLES = {"singleton": True, "stacked": False}


def _stock_model(config: Any, groups: Any, *, norm_as_in_te: bool = False) -> Any:
    build_latent_projections_without_te()
    settings = transformer_config(config)
    spec = get_gpt_decoder_block_spec(
        settings, use_transformer_engine=False, normalization=config.normalization
    )
    if norm_as_in_te:
        for index in range(config.first_k_dense, config.num_layers):
            layer = spec.layer_specs[index]
            names = layer.submodules.sharded_state_dict_keys_map
            names = {key: value for key, value in names.items() if "pre_mlp" not in key}
            submodules = replace(layer.submodules, sharded_state_dict_keys_map=names)
            spec.layer_specs[index] = replace(layer, submodules=submodules)
    return _gpt(config, settings, spec, groups)


def _gpt(config: Any, settings: Any, spec: Any, groups: Any) -> Any:
    return GPTModel(
        settings, spec, vocab_size=config.padded_vocab_size, max_sequence_length=config.seq_len,
        position_embedding_type="rope", rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=False, pg_collection=groups,
    )  # fmt: skip


@torch.no_grad()
def _fill(model: Any, ep_rank: int) -> None:
    """Values by name, not by rank; experts by their index in the whole model."""
    for seed, (name, value) in enumerate(sorted([*model.named_parameters(), *model.named_buffers()])):
        if "local_tokens" in name or "inv_freq" in name:
            continue
        shift = 1000 * (1 + ep_rank) if ".local_experts." in name else 0
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed + shift))
        value.copy_(1 + 0.1 * drawn if "norm" in name and name.endswith("weight") else 0.2 * drawn)


def _outputs(model: Any, config: Any) -> dict[str, Tensor]:
    """Logits, and gradients of a fixed function of them; gradients of experts as our two tensors."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (config.mbsz, config.seq_len), generator=generator)
    positions = torch.arange(config.seq_len).expand_as(tokens)
    if config.add_bias_linear:  # Megatron's experts with biases have no backward: a view changed in place
        with torch.no_grad():
            return {"logits": model(tokens, positions, None)}
    logits = model(tokens, positions, None)
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    found, experts = {"logits": logits.detach()}, defaultdict(list)
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        if ".local_experts." in name:
            before, _, after = name.partition(".local_experts.")
            experts[f"{before}.weight{1 if 'fc1' in after else 2}"].append(grad)
        else:
            found[name] = grad.clone()
    return found | {name: torch.stack(tensors) for name, tensors in experts.items()}


def _our_job(settings: dict[str, Any], port: int) -> tuple[Any, Any, Any]:
    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    return config, rank, Trained(model, optimizer, LearningRateScheduler(config, optimizer))


def on_ranks(function: Any, folder: Path, *args: Any, num: int = 1, **changes: Any) -> list[Any]:
    """What a function returns on every rank, with expert parallelism over all of them."""
    settings = MODEL | {"gpus_per_node": num, "ep": num} | changes
    return run_on_ranks(num, function, settings, free_port(), str(folder), *args, join=False)


def both_ways(settings: dict[str, Any], port: int, folder: str, singleton: bool) -> float:
    """On one rank: each reads what the other's model has written. The largest relative error."""
    config, rank, trained = _our_job(settings, port)
    stock = _stock_model(config, rank.groups)
    _fill(stock, rank.groups.ep.rank())
    metadata = {"singleton_local_shards": singleton, "dp_cp_group": rank.groups.dp_cp}
    dist_checkpointing.save(stock.sharded_state_dict(metadata=metadata), f"{folder}/theirs")
    load_weights(rank, Path(folder) / "theirs", trained)
    ours, theirs = trained.model[0].module, _outputs(stock, config)
    error = assert_equal_to(LIMIT, _outputs(ours, config), theirs)

    save(config, rank, Path(folder) / "ours", trained, Progress())
    written = str(iteration_folder(Path(folder) / "ours", 0))
    again = _stock_model(config, rank.groups, norm_as_in_te=True)
    # As Megatron-LM does: it asks for the keys that the checkpoint says it has.
    metadata = {**dist_checkpointing.load_content_metadata(written), "dp_cp_group": rank.groups.dp_cp}
    read = dist_checkpointing.load({"model": again.sharded_state_dict(metadata=metadata)}, written)
    again.load_state_dict(read["model"])
    return max(error, assert_equal_to(LIMIT, _outputs(again, config), theirs))


SHORT = [
    ("gated", "singleton", 1), ("deepseek", "stacked", 2),
]  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.slow])
    for case in itertools.product(VARIANTS, STYLES, (1, 2))
]


@pytest.mark.parametrize(("variant", "style", "ep"), CASES)
def test_same_function_after_an_exchange(variant, style, ep, tmp_path, record_property):
    (tmp_path / "theirs").mkdir()
    errors = on_ranks(both_ways, tmp_path, STYLES[style], num=ep, **VARIANTS[variant])
    record_property("largest_relative_error", max(errors))


def refused(settings: dict[str, Any], port: int, folder: str, of_theirs: dict[str, Any], drop: str) -> None:
    _, rank, trained = _our_job(settings, port)
    stock = _stock_model(load_config(settings | of_theirs, {}), rank.groups)
    state = stock.sharded_state_dict(metadata={"dp_cp_group": rank.groups.dp_cp})
    kept = {name: value for name, value in state.items() if not re.search(drop, name)}
    dist_checkpointing.save(kept, folder)
    load_weights(rank, Path(folder), trained)


@pytest.mark.parametrize(
    ("of_theirs", "drop", "text"),
    [
        ({}, "router", r"has no decoder\.layers\.mlp\.router\.weight"),
        ({"shared_expert_size": 24}, "^$", r"has, unlike the model, .*\.shared_experts\.linear_fc1\.weight"),
        ({"add_bias_linear": True}, r"(qkv|proj|fc1|fc2)\.bias", r"has, unlike the model, .*\.router\.bias"),
    ],
)
def test_another_model_is_refused_by_name(of_theirs, drop, text, tmp_path):
    with pytest.raises(RankError, match=f"checkpoint=.*: {text}.*Fix: ") as caught:
        on_ranks(refused, tmp_path, of_theirs, drop)
    assert isinstance(caught.value.error, ValueError)


def resume_from_before_router_biases(settings: dict[str, Any], port: int, folder: str) -> None:
    """On one rank: biases and their moments are zero after the load, all else is what was saved."""
    config, rank, trained = _our_job(settings, port)

    def of_an_older_version(*args: Any) -> dict[str, Any]:
        state = whole_state(*args)
        end = "router.bias"
        state["model0"] = {k: v for k, v in state["model0"].items() if not v.key.endswith(end)}
        state["optimizer_shards"] = [v for v in state["optimizer_shards"] if not v.key.endswith(end)]
        return state

    def values() -> dict[tuple[str, str], Tensor]:
        names = {parameter: name for name, parameter in trained.model[0].module.named_parameters()}
        owned = owned_state(trained.optimizer)
        return {(names[one.parameter], key): value for one in owned for key, value in one.values.items()}

    def fill(factor: float) -> None:
        for seed, value in enumerate(values().values()):
            value.copy_(factor * torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)))

    fill(1)
    with patch.object(save_module, "whole_state", of_an_older_version):
        save(config, rank, Path(folder), trained, Progress(iteration=3))
    saved = {name: value.clone() for name, value in values().items()}
    fill(2)
    assert load(config, rank, Path(folder), trained).iteration == 3
    biases = {name for name, _ in saved if name.endswith("router.bias")}
    assert len(biases) == config.num_layers
    for name, value in values().items():
        assert torch.equal(value, 0 * value if name[0] in biases else saved[name]), name
    fill(3)
    load_weights(rank, iteration_folder(Path(folder), 3), trained)
    assert not any(trained.model[0].module.get_parameter(name).any() for name in biases)


@pytest.mark.parametrize("distributed", [False, True])
def test_checkpoints_from_before_router_biases_resume(distributed, tmp_path):
    changes = {"add_bias_linear": True, "fingerprints": False, "distributed_optimizer": distributed}
    on_ranks(resume_from_before_router_biases, tmp_path, **changes)


def start_from_megatrons(settings: dict[str, Any], port: int, folder: str) -> None:
    """On one rank: LOAD_DIR names what Megatron-LM's script wrote, with the state of another optimizer."""
    config, rank, trained = _our_job(settings, port)
    stock = _stock_model(config, rank.groups)
    _fill(stock, 0)
    metadata = {"singleton_local_shards": True, "dp_cp_group": rank.groups.dp_cp}
    state = {"model": stock.sharded_state_dict(metadata=metadata), "iteration": 7, "checkpoint_version": 3.0}
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    moment = ShardedTensor.from_rank_offsets(key, torch.ones(32), (0, 0, 1))
    (Path(folder) / "iter_0000007").mkdir()
    dist_checkpointing.save(state | {"optimizer": {"exp_avg": moment}}, f"{folder}/iter_0000007")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("7")

    assert load(config, rank, Path(folder), trained) == Progress()
    before = {name: value.clone() for name, value in trained.model[0].module.named_parameters()}
    router = stock.decoder.layers[1].mlp.router.weight
    assert torch.equal(before["decoder.layers.1.mlp.router.weight"], router)
    for group in trained.optimizer.param_groups:
        group["lr"] = 1e-7
    trained.model[0].zero_grad_buffer()
    _outputs(trained.model[0], config)
    trained.model[0].finish_grad_sync()
    trained.optimizer.step()
    for name, value in trained.model[0].module.named_parameters():
        # A step from the weights that were loaded, not from the optimizer's copies of those before.
        assert 0 < (value - before[name]).abs().max() < 1e-6, name


def test_load_dir_of_megatron_lm_gives_weights_alone(tmp_path):
    on_ranks(start_from_megatrons, tmp_path)


def program_with_our_spec(settings: dict[str, Any], port: int, folder: str, singleton: bool) -> None:
    """On one rank: Megatron's loader and nothing of ours but the layers, both ways; see docs/library.md."""
    config, rank, _ = _our_job(settings, port)
    stock = _stock_model(config, rank.groups)
    _fill(stock, rank.groups.ep.rank())
    logits = _outputs(stock, config)["logits"]
    spec = decoder_spec(transformer_config(config), backend="loop")
    for layer in spec.layer_specs:
        layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    ours = _gpt(config, transformer_config(config), spec, rank.groups)
    metadata = {"singleton_local_shards": singleton, "dp_cp_group": rank.groups.dp_cp}
    for name, writer, reader in (("theirs", stock, ours), ("ours", ours, stock)):
        dist_checkpointing.save(writer.sharded_state_dict(metadata=metadata), f"{folder}/{name}")
        for value in reader.parameters():
            value.data.zero_()
        state = reader.sharded_state_dict(metadata=metadata)
        loaded = dist_checkpointing.load(state, f"{folder}/{name}", strict=StrictHandling.RAISE_ALL)
        reader.load_state_dict(loaded)
        assert relative_error(_outputs(reader, config)["logits"], logits) < LIMIT, name


@pytest.mark.parametrize(
    ("variant", "style", "ep"),
    [
        ("gated", "stacked", 2),
        pytest.param("first_dense", "singleton", 1, marks=pytest.mark.slow),
        pytest.param("biases", "singleton", 1, marks=pytest.mark.slow),
    ],
)
def test_a_megatron_program_exchanges_checkpoints(variant, style, ep, tmp_path):
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    on_ranks(program_with_our_spec, tmp_path, STYLES[style], num=ep, **VARIANTS[variant])
