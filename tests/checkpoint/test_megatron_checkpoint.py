"""Checkpoints go both ways between our model and Megatron's own (stock local spec, SequentialMLP): same
logits, same gradients.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.layers.megatron_pair import build_latent_projections_without_te
from helpers.ranks import RankError, free_port, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.config import load_config

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
        "router_score": "sigmoid",
        "router_bias_update_rate": 0.01,
        "shared_expert_size": 24,
        "router_scaling_factor": 2.5,
        "aux_loss_coeff": 0.0,
        "moe_latent_size": 12,
    },
    "first_dense": {"first_k_dense": 1, "router_pre_softmax": False, "qk_norm": True},
}
# What Megatron-LM's script writes, and what it wrote before version 0.14.
STYLES = {"singleton": True, "stacked": False}


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm().clamp_min(1e-30))


def _stock_model(config: Any, groups: Any, *, norm_as_in_te: bool = False) -> Any:
    from moe_exp.engine.model import transformer_config

    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    build_latent_projections_without_te()
    settings = transformer_config(config)
    spec = get_gpt_decoder_block_spec(
        settings, use_transformer_engine=False, normalization=config.normalization
    )
    if norm_as_in_te:
        for index, is_moe in enumerate(_pattern(config)):
            layer = spec.layer_specs[index]
            keys = {
                key: value
                for key, value in layer.submodules.sharded_state_dict_keys_map.items()
                if "pre_mlp" not in key or not is_moe
            }
            spec.layer_specs[index] = replace(
                layer, submodules=replace(layer.submodules, sharded_state_dict_keys_map=keys)
            )
    return GPTModel(
        settings,
        spec,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_len,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )


def _pattern(config: Any) -> list[bool]:
    return [index >= config.first_k_dense for index in range(config.num_layers)]


@torch.no_grad()
def _fill(model: Any, ep_rank: int) -> None:
    """Values by name, not by rank; experts by their index in the whole model."""
    for seed, (name, value) in enumerate(sorted([*model.named_parameters(), *model.named_buffers()])):
        if "local_tokens" in name or "inv_freq" in name:
            continue
        shift = 1000 * (1 + ep_rank) if ".local_experts." in name else 0
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed + shift))
        value.copy_(1 + 0.1 * drawn if "norm" in name and name.endswith("weight") else 0.2 * drawn)


def _outputs(model: Any, config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of a fixed function of them; gradients of experts as our two tensors."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (config.mbsz, config.seq_len), generator=generator)
    positions = torch.arange(config.seq_len).expand_as(tokens)
    logits = model(tokens, positions, None)
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    grads: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        if ".local_experts." in name:
            before, _, after = name.partition(".local_experts.")
            experts.setdefault(f"{before}.weight{1 if 'fc1' in after else 2}", []).append(grad)
        else:
            grads[name] = grad.clone()
    return logits.detach(), grads | {name: torch.stack(tensors) for name, tensors in experts.items()}


def _assert_equal(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> float:
    assert set(ours[1]) == set(theirs[1])
    errors = {"logits": _relative(ours[0], theirs[0])} | {
        name: _relative(grad, theirs[1][name]) for name, grad in ours[1].items()
    }
    over = {name: error for name, error in errors.items() if not error < LIMIT}
    assert not over, over
    return max(errors.values())


def _our_job(settings: dict[str, Any], port: int) -> tuple[Any, Any, Any]:
    from moe_exp.checkpoint.state import Trained
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.engine.optimizer_setup import build_optimizer, build_scheduler

    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    return config, rank, Trained(model, optimizer, build_scheduler(config, optimizer))


def both_ways(settings: dict[str, Any], port: int, folder: str, singleton: bool) -> float:
    """On one rank: Megatron's model writes and ours reads, ours writes and Megatron's reads. The largest
    relative error.
    """
    config, rank, trained = _our_job(settings, port)
    from moe_exp.checkpoint.format.folders import iteration_folder
    from moe_exp.checkpoint.load import load_weights
    from moe_exp.checkpoint.save import save
    from moe_exp.checkpoint.state import Progress

    from megatron.core import dist_checkpointing

    stock = _stock_model(config, rank.groups)
    _fill(stock, rank.groups.ep.rank())
    metadata = {"singleton_local_shards": singleton, "dp_cp_group": rank.groups.dp_cp}
    dist_checkpointing.save(stock.sharded_state_dict(metadata=metadata), f"{folder}/theirs")
    load_weights(rank, Path(folder) / "theirs", trained)
    ours, theirs = trained.model[0].module, _outputs(stock, config)
    error = _assert_equal(_outputs(ours, config), theirs)

    save(config, rank, Path(folder) / "ours", trained, Progress())
    written = str(iteration_folder(Path(folder) / "ours", 0))
    again = _stock_model(config, rank.groups, norm_as_in_te=True)
    # As Megatron-LM does: it asks for the keys that the checkpoint says it has.
    metadata = {**dist_checkpointing.load_content_metadata(written), "dp_cp_group": rank.groups.dp_cp}
    read = dist_checkpointing.load({"model": again.sharded_state_dict(metadata=metadata)}, written)
    again.load_state_dict(read["model"])
    return max(error, _assert_equal(_outputs(again, config), theirs))


CASES = [
    ("gated", "singleton", 1),
    ("deepseek", "singleton", 2),
    ("deepseek", "stacked", 2),
    ("first_dense", "stacked", 1),
]
ALL = [(variant, style, ep) for variant in VARIANTS for style in STYLES for ep in (1, 2)]


@pytest.mark.parametrize(
    ("variant", "style", "ep"),
    [pytest.param(*case, marks=[] if case in CASES else [pytest.mark.slow]) for case in ALL],
)
def test_same_function_after_an_exchange(variant, style, ep, tmp_path, record_property):
    (tmp_path / "theirs").mkdir()
    settings = MODEL | VARIANTS[variant] | {"gpus_per_node": ep, "ep": ep}
    errors = run_on_ranks(ep, both_ways, settings, free_port(), str(tmp_path), STYLES[style], join=False)
    record_property("largest_relative_error", max(errors))


def refused(settings: dict[str, Any], port: int, folder: str, without_router: bool) -> None:
    _, rank, trained = _our_job(settings, port)
    from moe_exp.checkpoint.load import load_weights

    from megatron.core import dist_checkpointing

    other = load_config(settings | {"shared_expert_size": 24}, {})
    stock = _stock_model(other, rank.groups)
    state = stock.sharded_state_dict(metadata={"dp_cp_group": rank.groups.dp_cp})
    if without_router:
        state = {
            name: value for name, value in state.items() if "router" not in name and "shared" not in name
        }
    dist_checkpointing.save(state, folder)
    load_weights(rank, Path(folder), trained)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (True, r"checkpoint=.*: has no decoder\.layers\.mlp\.router\.weight\. Fix: "),
        (
            False,
            (
                r"checkpoint=.*: has, unlike the model,"
                r" decoder\.layers\.mlp\.shared_experts\.linear_fc1\.weight, .*\. Fix: "
            ),
        ),
    ],
)
def test_another_model_is_refused_by_name(missing, text, tmp_path):
    with pytest.raises(RankError) as caught:
        run_on_ranks(
            1, refused, MODEL | {"gpus_per_node": 1}, free_port(), str(tmp_path), missing, join=False
        )
    assert isinstance(caught.value.error, ValueError)
    assert caught.match(text)


def start_from_megatrons(settings: dict[str, Any], port: int, folder: str) -> None:
    """On one rank: LOAD_DIR names what Megatron-LM's script left behind, with the state of an optimizer that
    is not ours.
    """
    config, rank, trained = _our_job(settings, port)
    from moe_exp.checkpoint.load import load
    from moe_exp.checkpoint.state import Progress

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    stock = _stock_model(config, rank.groups)
    _fill(stock, 0)
    metadata = {"singleton_local_shards": True, "dp_cp_group": rank.groups.dp_cp}
    state = {"model": stock.sharded_state_dict(metadata=metadata), "iteration": 7, "checkpoint_version": 3.0}
    moment = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.ones(32), (0, 0, 1)
    )
    (Path(folder) / "iter_0000007").mkdir()
    dist_checkpointing.save(state | {"optimizer": {"exp_avg": moment}}, f"{folder}/iter_0000007")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("7")

    assert load(config, rank, Path(folder), trained) == Progress()
    before = {name: value.clone() for name, value in trained.model[0].module.named_parameters()}
    assert torch.equal(
        before["decoder.layers.1.mlp.router.weight"], stock.decoder.layers[1].mlp.router.weight
    )
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
    settings = MODEL | {"gpus_per_node": 1}
    run_on_ranks(1, start_from_megatrons, settings, free_port(), str(tmp_path), join=False)


def read_by_stock_spec(settings: dict[str, Any], port: int, folder: str) -> None:
    config, rank, trained = _our_job(settings, port)
    from moe_exp.checkpoint.format.folders import iteration_folder
    from moe_exp.checkpoint.save import save
    from moe_exp.checkpoint.state import Progress

    from megatron.core import dist_checkpointing

    save(config, rank, Path(folder), trained, Progress())
    state = _stock_model(config, rank.groups).sharded_state_dict(metadata={"dp_cp_group": rank.groups.dp_cp})
    dist_checkpointing.load(state, str(iteration_folder(Path(folder), 0)))


def test_stock_local_spec_asks_for_its_own_name_of_the_norm(tmp_path):
    """What docs/architecture.md says about it."""
    with pytest.raises(
        RankError,
        match=r"KeyError: .decoder\.layers\.mlp\.linear_fc1\.layer_norm_weight from model not in state dict",
    ):
        run_on_ranks(
            1, read_by_stock_spec, MODEL | {"gpus_per_node": 1}, free_port(), str(tmp_path), join=False
        )
