"""Settings that the checks accept can be built and trained: a random walk, a few changes at a time."""

import math
import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from helpers.model_on_ranks import TINY, RandomTokens
from helpers.planner.built_ranks import build_rank
from helpers.ranks import run_on_ranks
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.choices import LOSSES, OPTIMIZERS, SCORES
from moe_exp.config.traits import traits
from moe_exp.launch.machine_checks import check_machine

NUMBERS = (0, 1, 2, 3, 4, 6, 8, 16, 0.01, 0.5, 0.9, 1.5)
# Of settings that are neither a bool, a Literal nor any small number; widths, so that heads have some.
VALUES: dict[str, tuple[Any, ...]] = {
    "gpus_per_node": (1, 2, 4, 8),
    "hidden_size": (32, 48, 64), "ffn_hidden_size": (16, 48, 64), "moe_ffn_hidden_size": (0, 16, 20, 32),
    "shared_expert_size": (0, 16, 32), "moe_latent_size": (0, 16, 24), "num_heads": (2, 4, 8),
    "num_query_groups": (1, 2, 4), "head_dim": (0, 8, 16), "kv_lora_rank": (8, 16), "q_lora_rank": (0, 8),
    "qk_head_dim": (4, 8), "qk_pos_emb_head_dim": (4, 8), "v_head_dim": (4, 8), "seq_len": (16, 24, 32),
    "vocab_size": (128, 200), "num_layers": (1, 2, 3, 4, 8), "num_experts": (2, 3, 4, 8),
    "topk": (1, 1, 2, 3, 4), "mbsz": (1, 2, 4), "gbsz": (8, 16, 24), "router_score": tuple(SCORES),
    "router_scaling_factor": (0.5, 1.0, 2.5), "optimizer": tuple(OPTIMIZERS), "mup_base_hidden_size": (0, 16),
    "aux_loss_type": (*LOSSES, "none", "sinkhorn", "aux_loss,seq_aux_loss", "l1,entropy"),
    "aux_loss_coeff": ("0.01", "0.01,0.02"), "moe_layer_freq": ("1", "2", "0,1", "[0]*1+[1]*3"),
    "pipeline_layers": ("", "1,1", "1,2", "1,2,2,1", "0,2,2,0"), "vpp": (None, 1, 2), "rotary_base": (1e4,),
    "rope_original_seq_len": (0, 16, 8192), "rope_scaling_factor": (1.0, 2.0), "dispatcher": ("auto", "local",
    "alltoall", "allgather"), "expert_backend": ("auto", "loop", "grouped_mm", "triton"),
    "token_rounding": (0, 4, 8), "init_std": (0.02,), "dtype": ("fp32", "bf16"), "impl": ("auto", "local"),
    "qk_clip": (0.0, 1.0),
}  # fmt: skip
FIXED = {"use_moe", "preset", "nnodes", "threads_per_rank", "upcycle_from", "upcycle_granularity", "mup_rule"}
DRAWN = [
    name
    for name in Config.model_fields
    if name not in FIXED and (name in VALUES or traits(Config, name).part in ("model", "experts", "layout"))
]
ONE_RANK = dict.fromkeys(("gpus_per_node", "tp", "pp", "ep", "etp", "cp"), 1)
ONE_RANK |= {"vpp": None, "pipeline_layers": ""}
START = TINY | {"num_layers": 4, "num_experts": 4, "gbsz": 16, "gpus_per_node": 1}
START |= {"train_data": "tokens", "eval_interval": 0}


def values_of(name: str) -> tuple[Any, ...]:
    annotation = Config.model_fields[name].annotation
    if annotation is bool:
        return (True, False)
    literal: tuple[Any, ...] = get_args(annotation) if get_origin(annotation) is Literal else NUMBERS
    usual = START.get(name, Config.model_fields[name].default)
    return (usual, *VALUES.get(name, literal))


def accepted(seed: int, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings without end, each of which the checks accept and which differ by some from those before."""
    draw, settings = random.Random(seed), START
    while True:
        settings = START if draw.random() < 0.01 else settings
        names = draw.sample(DRAWN, draw.randint(1, 3))
        changed = settings | {name: draw.choice(values_of(name)) for name in names}
        try:
            config = load_config(changed | fixed, {})
        except ConfigError:
            continue
        if not any(config.problems()) and not [*check_machine(config)]:
            settings = changed | fixed
            yield settings


def failures(seed: int, count: int, trains: bool) -> list[str]:
    """On a rank: what building the last rank, or training on one rank, raised, with the settings."""
    found = []
    for settings in islice(accepted(seed, ONE_RANK if trains else {}), count):
        config = load_config(settings, {})
        try:
            if trains:
                train_step(config)
            else:
                build_rank(config, config.world_size - 1)
        except Exception as error:
            others = {name: value for name, value in settings.items() if START.get(name) != value}
            found.append(f"{type(error).__name__}: {error}: {others}")
    return found


def train_step(config: Config) -> None:
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
    from moe_exp.training import loop

    rank = runtime.start_alone(config)
    try:
        model = build_model(config, rank)
        optimizer = build_optimizer(config, model)
        LearningRateScheduler(config, optimizer)
        loop.optimizer_setup.set_megatron_hooks(model, optimizer)
        trained = SimpleNamespace(model=model)
        job: Any = SimpleNamespace(config=config, runtime=rank, trained=trained, eod_id=None, graphs=None)
        ((total, num_counted), *_) = loop.forward_backward(job, RandomTokens(config.seq_len, 100), 0, 1)
        assert math.isfinite(total / num_counted)
        optimizer.step()
    finally:
        runtime.stop()


@pytest.mark.parametrize(
    ("seed", "count", "trains"),
    [
        (1, 20, False),
        (2, 8, True),
        pytest.param(3, 1000, False, marks=pytest.mark.slow),
        pytest.param(4, 500, True, marks=pytest.mark.slow),
    ],
)
def test_what_the_checks_accept_is_built(seed, count, trains):
    (found,) = run_on_ranks(1, failures, seed, count, trains, join=False, timeout=1200)
    assert not found, "\n".join(found)
