"""A dense run's weights as an MoE model that computes the same: in one layer, and as runs in every kind of
layout.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.layers.references import formula
from helpers.ranks import RankError, free_port, run_on_ranks
from helpers.whole_runs import SMALL, EndedRun, Runs
from moe_exp.checkpoint.integrity import dense_problems
from moe_exp.config import Config, load_config
from moe_exp.config.checks.checks import check_config
from moe_exp.launch.machine_checks import check_files
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

HIDDEN, FFN, TOKENS = 16, 24, 50


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mlp(gated: bool, bias: bool) -> dict[str, Tensor]:
    width = FFN * (1 + gated)
    mlp = {"weight1": 0.3 * _random(width, HIDDEN, seed=1), "weight2": 0.3 * _random(HIDDEN, FFN, seed=2)}
    return mlp | ({"bias1": _random(width, seed=3), "bias2": _random(HIDDEN, seed=4)} if bias else {})


def _dense(x_TD: Tensor, mlp: dict[str, Tensor], activation: str) -> Tensor:
    hidden_TW = torch.nn.functional.linear(x_TD, mlp["weight1"], mlp.get("bias1"))
    return torch.nn.functional.linear(formula(activation, hidden_TW), mlp["weight2"], mlp.get("bias2"))


def split_mlp(mlp: dict[str, Tensor], *, granularity: int, gated: bool) -> list[dict[str, Tensor]]:
    """Splits a dense MLP into shards whose outputs add up to its own: `weight1` [W, D], `weight2` [D, F] and
    perhaps `bias1` [W] and `bias2` [D], which is whole in every shard. W is F, or 2F with gate and up halves.
    """
    parts = {"bias2": [mlp["bias2"]] * granularity} if "bias2" in mlp else {}
    for name in mlp.keys() - {"bias2"}:
        axis = 1 if name == "weight2" else 0
        halves = mlp[name].chunk(2 if gated and axis == 0 else 1, dim=axis)
        pieces = [half.chunk(granularity, dim=axis) for half in halves]
        parts[name] = [torch.cat(part, dim=axis) for part in zip(*pieces, strict=True)]
    return [{name: those[shard] for name, those in parts.items()} for shard in range(granularity)]


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "squared_relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_shards_add_up_to_the_mlp(activation, bias):
    mlp, x_TD = _mlp(ACTIVATIONS[activation][1], bias), _random(TOKENS, HIDDEN, seed=5)
    shards = split_mlp(mlp, granularity=4, gated=ACTIVATIONS[activation][1])
    total = sum(_dense(x_TD, shard, activation) for shard in shards)
    # The output bias is in every one of them.
    expected = _dense(x_TD, mlp, activation) + (3 * mlp["bias2"] if bias else 0)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_shards_by_hand():
    from moe_exp.checkpoint.upcycle import experts_of, virtual_group_router

    # Two hidden units with a gate: rows 0 and 1 are the gate, 2 and 3 what it multiplies.
    mlp = {
        "weight1": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "weight2": torch.tensor([[5.0, 6.0]]),
        "bias2": torch.tensor([8.0]),
    }
    shards = split_mlp(mlp, granularity=2, gated=True)
    assert [shard["weight1"].tolist() for shard in shards] == [[[1.0], [3.0]], [[2.0], [4.0]]]
    assert [shard["weight2"].tolist() for shard in shards] == [[[5.0]], [[6.0]]]
    experts = experts_of(dict(enumerate(shards)), [1, 2, 3], granularity=2, weights_sum=4.0)
    assert experts["weight1"].tolist() == [[[2.0], [4.0]], [[1.0], [3.0]], [[2.0], [4.0]]]
    assert experts["weight2"].tolist() == [[[3.0]], [[2.5]], [[3.0]]]  # times 2 / 4
    assert experts["bias2"].tolist() == [[2.0], [2.0], [2.0]]  # divided by 4
    assert virtual_group_router(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 2).tolist() == [
        [1.0],
        [1.0],
        [3.0],
        [3.0],
    ]


ROUTERS = {
    "softmax of the chosen": {"pre_softmax": False},
    "normalized softmax": {"normalize": True, "scaling_factor": 2.5},
    "sigmoid": {"score": "sigmoid", "scaling_factor": 0.5, "expert_bias": True},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "groups": {"score": "sigmoid", "num_groups": 2, "group_topk": 1},
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(
    ("num_experts", "topk", "granularity"), [(8, 2, 1), (8, 4, 2), (16, 4, 4), (16, 8, 4), (6, 3, 3)]
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layer_computes_the_dense_mlp(activation, num_experts, topk, granularity, router):
    from moe_exp.checkpoint.upcycle import experts_of, shard_of, virtual_group_router

    if num_experts // router.get("num_groups", 1) % granularity:
        pytest.skip("refused: a group of experts does not hold whole virtual groups")
    gated = ACTIVATIONS[activation][1]
    mlp, x_TD = _mlp(gated, bias=False), _random(TOKENS, HIDDEN, seed=5)
    config = RouterConfig(hidden_size=HIDDEN, num_experts=num_experts, topk=topk, **router)
    layer = MoELayer(
        router=Router(config),
        dispatcher=LocalDispatcher(num_experts),
        experts=Experts(
            num_local_experts=num_experts,
            hidden_size=HIDDEN,
            ffn_size=FFN // granularity,
            activation=activation,
            backend="loop",
        ),
        settings=MoESettings(),
    )
    shards = dict(enumerate(split_mlp(mlp, granularity=granularity, gated=gated)))
    filled = experts_of(
        shards, range(num_experts), granularity=granularity, weights_sum=config.scaling_factor
    )
    with torch.no_grad():
        layer.router.weight.copy_(
            virtual_group_router(0.1 * _random(num_experts, HIDDEN, seed=6), granularity)
        )
        layer.experts.weight1.copy_(filled["weight1"])
        layer.experts.weight2.copy_(filled["weight2"])
    chosen_TK = layer.route(x_TD).expert_TK
    counts_TG = torch.stack(
        [(chosen_TK % granularity == shard).sum(dim=1) for shard in range(granularity)], dim=1
    )
    assert (counts_TG == topk // granularity).all()
    assert shard_of(granularity + 1, granularity) == 1 % granularity
    output, expected = layer(x_TD)[0], _dense(x_TD, mlp, activation)
    assert (output - expected).norm() / expected.norm() < 1e-5


MOE = {
    **SMALL, "gpus_per_node": 1, "ffn_hidden_size": 96, "num_experts": 8, "topk": 4,
    "router_pre_softmax": "false", "moe_type": "dmoe", "upcycle_from": "dense",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"router_pre_softmax": "true"},
            "ROUTER_NORMALIZE=auto: upcycling needs router weights that add up to the same",
        ),
        (
            {"router_score": "sigmoid", "topk": 1, "router_pre_softmax": "true"},
            "TOPK=1: upcycling needs router weights that add up",
        ),
        (
            {"moe_ffn_hidden_size": 48},
            "MOE_FFN_HIDDEN_SIZE=48: is not FFN_HIDDEN_SIZE / UPCYCLE_GRANULARITY = 96 / 1",
        ),
        (
            {"upcycle_granularity": 8, "moe_ffn_hidden_size": 12},
            "TOPK=4: is not a multiple of UPCYCLE_GRANULARITY=8",
        ),
        (
            {"upcycle_granularity": 4, "num_experts": 6, "moe_ffn_hidden_size": 24},
            "NUM_EXPERTS=6: is not a multiple of UPCYCLE_GRANULARITY=4",
        ),
        (
            {"moe_type": "moe", "capacity_factor": 1.0},
            "CAPACITY_FACTOR=1.0: upcycling needs every token's experts, this drops some",
        ),
        ({"shared_expert_size": 32}, "SHARED_EXPERT_SIZE=32: a shared expert would add"),
        ({"moe_latent_size": 16}, "MOE_LATENT_SIZE=16: copies of a dense MLP take whole hidden states"),
        ({"load_dir": "runs/other"}, "UPCYCLE_FROM=dense: LOAD_DIR=runs/other names other weights"),
        ({"use_moe": "false"}, "UPCYCLE_FROM=dense: a dense model has no experts to fill"),
        (
            {"upcycle_from": "", "upcycle_granularity": 2},
            "UPCYCLE_GRANULARITY=2: has no effect without UPCYCLE_FROM",
        ),
        (
            {
                "upcycle_granularity": 4,
                "moe_ffn_hidden_size": 24,
                "num_router_groups": 4,
                "router_group_topk": 2,
            },
            "NUM_ROUTER_GROUPS=4: leaves NUM_EXPERTS/NUM_ROUTER_GROUPS experts per group",
        ),
        (
            {"upcycle_granularity": 2, "moe_ffn_hidden_size": 48, "force_routing": "zipf"},
            "FORCE_ROUTING=zipf: does not choose all",
        ),
    ],
)
def test_what_cannot_be_equal_is_refused(settings, line):
    problems = check_config(load_config(MOE | settings, {}))
    assert len(problems) == 1, problems
    assert problems[0].startswith(line)
    assert ". Fix: " in problems[0]


@pytest.mark.parametrize(
    "settings", [{}, {"router_pre_softmax": "true", "topk": 8}, {"moe_type": "moe", "capacity_factor": 2.0}]
)
def test_what_is_equal_is_not_refused(settings):
    assert check_config(load_config(MOE | settings, {})) == []


class Losses(NamedTuple):
    """Of the first global batch and of the validation data; means over the micro-batches of all ranks."""

    train: float
    valid: float
    logits: Tensor | None


def losses_on_a_rank(settings: dict[str, Any], port: int) -> tuple[list[float], list[float], Tensor | None]:
    """Builds the job as `train` does, and runs the first batch and the validation data forward."""
    from moe_exp.engine import runtime
    from moe_exp.train import build, forward_backward

    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    job, _ = build(config, rank)
    assert job.valid_stream is not None
    train, valid = (
        [
            float(total / count)
            for total, count in forward_backward(job, stream, 0, config.num_microbatches, forward_only=True)
        ]
        for stream in (job.train_stream, job.valid_stream)
    )
    logits = None
    if config.world_size == 1:
        tokens = torch.arange(2 * config.seq_len).view(2, -1) % config.vocab_size
        with torch.no_grad():
            logits = job.trained.model[0](tokens, torch.arange(config.seq_len).expand_as(tokens), None)
    runtime.stop()
    return train, valid, logits


def losses(settings: dict[str, Any]) -> Losses:
    ranks = run_on_ranks(settings["gpus_per_node"], losses_on_a_rank, settings, free_port(), join=False)
    train, valid = ([loss for rank in ranks for loss in rank[index]] for index in (0, 1))
    return Losses(sum(train) / len(train), sum(valid) / len(valid), ranks[0][2])


SETTINGS = {
    **SMALL,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "vocab_size": 2048,
    "seq_len": 64,
    "mbsz": 2,
    "gbsz": 8,
    "dtype": "fp32",
    "num_workers": 0,  # on a host with GPUs too: ranks of run_on_ranks may not have processes of their own
    "eval_interval": 1000,
    "eval_iters": 1,
    "topk": 4,
    "num_experts": 8,
    "router_pre_softmax": "false",
}


@pytest.fixture(scope="module")
def dense(session_runs: Runs) -> Callable[[bool], EndedRun]:
    """A dense run of a few steps, with biases or without."""
    done: dict[bool, EndedRun] = {}

    def run(bias: bool) -> EndedRun:
        if bias not in done:
            settings = {
                "NUM_LAYERS": 4,
                "USE_MOE": False,
                "TRAIN_ITERS": 2,
                "EVAL_INTERVAL": 2,
                "EVAL_ITERS": 1,
                "ADD_BIAS_LINEAR": bias,
            }
            done[bias] = session_runs.succeed(f"dense_to_upcycle_{bias}", **settings)
        return done[bias]

    return run


@pytest.fixture(scope="module")
def dense_losses(dense, session_runs: Runs, tmp_path_factory) -> Losses:
    """Of the dense model after its last step, on the first batches."""
    places = {"run_dir": str(tmp_path_factory.mktemp("dense")), "data_dir": str(session_runs.data_dir)}
    source = {"use_moe": "false", "load_dir": str(dense(False).folder.checkpoints), "gpus_per_node": 1}
    return losses(SETTINGS | places | source)


GRANULAR = {"upcycle_granularity": 2, "moe_ffn_hidden_size": 48}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus_per_node": 1},
    "ep2": {"gpus_per_node": 2, "ep": 2},
    "etp2": {"gpus_per_node": 2, "etp": 2},
    "tp2": {"gpus_per_node": 2, "tp": 2},
    "pp2_vpp2": {"gpus_per_node": 2, "pp": 2, "vpp": 2},
    "tp2_ep2_etp2": {"gpus_per_node": 4, "tp": 2, "ep": 2, "etp": 2},
    "tp2_pp2_ep2": {"gpus_per_node": 4, "tp": 2, "pp": 2, "ep": 2},
}
SHORT_LIST = {
    ("granular", "one"),
    ("granular", "ep2"),
    ("granular", "pp2_vpp2"),
    ("plain", "tp2_ep2_etp2"),
}
CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in SHORT_LIST else [pytest.mark.slow])
    for kind in ("plain", "granular", "granular_sigmoid_first_dense")
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_step_0_is_the_dense_model(
    kind, layout, dense, dense_losses, session_runs: Runs, tmp_path, record_property
):
    settings = SETTINGS | LAYOUTS[layout] | ({} if kind == "plain" else GRANULAR)
    if "sigmoid" in kind:
        settings |= {
            "router_score": "sigmoid",
            "router_bias_update_rate": 0.01,
            "router_scaling_factor": 2.5,
            "first_k_dense": 1,
        }
    places = {
        "run_dir": str(tmp_path),
        "data_dir": str(session_runs.data_dir),
        "upcycle_from": str(dense(False).folder.checkpoints),
    }
    assert check_config(load_config(settings | places, {})) == []
    upcycled = losses(settings | places)
    assert upcycled.train == pytest.approx(dense_losses.train, rel=1e-6)
    assert upcycled.valid == pytest.approx(dense_losses.valid, rel=1e-6)
    record_property("relative_error", abs(upcycled.train / dense_losses.train - 1))
    if upcycled.logits is not None:
        assert (upcycled.logits - dense_losses.logits).norm() / dense_losses.logits.norm() < 1e-5


def test_biases_are_split_and_scaled_too(dense, session_runs: Runs, tmp_path):
    source = dense(True).folder.checkpoints
    places = {"data_dir": str(session_runs.data_dir), "add_bias_linear": "true"}
    of_dense = losses(
        SETTINGS
        | places
        | {
            "run_dir": str(tmp_path / "a"),
            "use_moe": "false",
            "load_dir": str(source),
            "gpus_per_node": 1,
        }
    )
    settings = (
        SETTINGS
        | places
        | GRANULAR
        | {
            "router_scaling_factor": 2.5,
            "gpus_per_node": 2,
            "ep": 2,
            "upcycle_from": str(source),
        }
    )
    upcycled = losses(settings | {"run_dir": str(tmp_path / "b")})
    assert upcycled.train == pytest.approx(of_dense.train, rel=1e-6)
    assert upcycled.valid == pytest.approx(of_dense.valid, rel=1e-6)


def test_run_starts_from_the_dense_one_and_resumes_from_itself(dense, dense_losses, runs: Runs):
    source = dense(False).folder.checkpoints / "iter_0000002"
    settings = {
        "UPCYCLE_FROM": source, "UPCYCLE_GRANULARITY": 2, "MOE_FFN_HIDDEN_SIZE": 48, "TOPK": 4,
        "ROUTER_PRE_SOFTMAX": False, "EXIT_INTERVAL": 1, "TRAIN_ITERS": 2, "GPUS_PER_NODE": 2, "EP": 2,
        "NUM_LAYERS": 4, "Z_LOSS_COEFF": 0,
    }  # fmt: skip
    first = runs.stopped("moe", **settings)
    assert (
        f"upcycled from {source}: 4 MoE layers with 4 copies of each of 2 shards of the dense MLP, "
        "router in 4 virtual groups, second projection times 2" in first.stdout
    )
    assert first.curve("lm_loss")[0] == pytest.approx(dense_losses.train, rel=1e-6)
    second = runs.succeed("moe", **settings)
    assert "upcycled from" not in second.stdout
    assert "resumed from iteration 1" in second.stdout
    assert second.curve("iteration") == [1, 2]
    # The optimizer took the weights over: its first step would otherwise put its own copies of the old ones
    # back.
    assert second.curve("lm_loss")[1] < first.curve("lm_loss")[0] + 0.5


def changed_by_a_step_of_size_0(settings: dict[str, Any], port: int) -> float:
    """Trains one step with a learning rate of 0 after the upcycling; the largest change of a weight."""
    from moe_exp.engine import runtime
    from moe_exp.train import build, forward_backward

    config = load_config(settings, {})
    os.environ["MASTER_PORT"] = str(port)
    job, _ = build(config, runtime.start(config))
    weights = [p for chunk in job.trained.model for p in chunk.parameters()]
    before = [p.detach().clone() for p in weights]
    forward_backward(job, job.train_stream, 0, config.num_microbatches)
    for group in job.trained.optimizer.param_groups:
        group["lr"] = 0.0
    updated, *_ = job.trained.optimizer.step()
    assert updated
    return max(float((p - old).abs().max()) for p, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("distributed", [True, False])
def test_main_weights_are_those_of_the_dense_run(distributed, dense, session_runs: Runs, tmp_path):
    settings = {
        "run_dir": str(tmp_path),
        "data_dir": str(session_runs.data_dir),
        "upcycle_from": str(dense(False).folder.checkpoints),
        "gpus_per_node": 1,
        "dtype": "bf16",
        "distributed_optimizer": distributed,
    }
    (change,) = run_on_ranks(1, changed_by_a_step_of_size_0, SETTINGS | settings, free_port(), join=False)
    # The model in bf16 is a copy of the optimizer's fp32 weights after every step.
    assert change == 0


def test_a_damaged_dense_checkpoint_is_refused(dense, session_runs: Runs, tmp_path):
    checkpoints = tmp_path / "dense/checkpoints"
    shutil.copytree(dense(False).folder.checkpoints, checkpoints)
    path = max(checkpoints.glob("iter_*/*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    settings = {"run_dir": str(tmp_path), "data_dir": str(session_runs.data_dir), "gpus_per_node": 1}
    settings |= {"upcycle_from": str(checkpoints)}
    with pytest.raises(RankError, match="has changed since it was written"):
        run_on_ranks(1, changed_by_a_step_of_size_0, SETTINGS | settings, free_port(), join=False)


def test_files_are_checked_before_anything_is_built(dense, session_runs: Runs, tmp_path):
    places = {"run_dir": str(tmp_path), "data_dir": str(session_runs.data_dir), "gpus_per_node": 1}
    checkpoints = str(dense(False).folder.checkpoints)

    def problems(**settings: Any) -> list[str]:
        return check_files(load_config(SETTINGS | places | settings, {}))

    assert problems(upcycle_from=checkpoints) == []
    (line,) = problems(upcycle_from=str(tmp_path))
    assert line.startswith(f"UPCYCLE_FROM={tmp_path}: has no checkpoint. Fix: ")
    (line,) = problems(upcycle_from=checkpoints, normalization="LayerNorm")
    assert (
        line == f"NORMALIZATION=LayerNorm: the dense run UPCYCLE_FROM={checkpoints} has"
        " NORMALIZATION=RMSNorm. Fix: set NORMALIZATION=RMSNorm."
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"rope_original_seq_len": 0}, []),  # the default of yarn
        ({"yarn_beta_fast": 64, "yarn_mscale": 0.7}, ["YARN_BETA_FAST", "YARN_MSCALE"]),
        ({"rope_original_seq_len": 8192}, ["ROPE_ORIGINAL_SEQ_LEN"]),
        ({"ffn_hidden_size": 64, "hidden_size": 48}, ["HIDDEN_SIZE", "HEAD_DIM", "FFN_HIDDEN_SIZE"]),
        ({"activation": "gelu"}, ["ACTIVATION"]),
    ],
)
def test_both_models_compute_the_same(settings, names):
    yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0}
    dense = Config(gpus_per_node=1, use_moe=False, rope_original_seq_len=4096, **yarn)
    moe = Config(gpus_per_node=1, upcycle_from="dense", **yarn).model_copy(update=settings)
    lines = dense_problems(moe, dense.model_dump())
    assert [line.partition("=")[0] for line in lines] == names


def test_an_moe_run_is_no_source(session_runs: Runs, tmp_path):
    source = session_runs.succeed(
        "moe_as_source", TRAIN_ITERS=1, WARMUP_ITERS=0, DECAY_ITERS=1
    ).folder.checkpoints
    settings = SETTINGS | {
        "run_dir": str(tmp_path),
        "data_dir": str(session_runs.data_dir),
        "upcycle_from": str(source),
    }
    settings["gpus_per_node"] = 1
    (line,) = check_files(load_config(settings, {}))
    assert (
        line == f"UPCYCLE_FROM={source}: is the checkpoint of an MoE run. Fix: name a run with USE_MOE=false."
    )
    # A rank that torchrun starts by itself says the same.
    with pytest.raises(RankError) as caught:
        losses(settings)
    assert str(caught.value.error) == line
