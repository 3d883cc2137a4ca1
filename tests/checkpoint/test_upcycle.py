"""A dense run's weights as an MoE model that computes the same: in one layer, and as runs in any layout."""

import itertools
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers import ROOT
from helpers.checkpoint.ckpt_files import flip_bit
from helpers.checkpoint.small_job import build_small
from helpers.hf.tiny_models import tiny_folder
from helpers.layers.references import formula
from helpers.ranks import RankError, free_port, run_on_ranks
from helpers.servers.hub import HubServer, leave_host_settings
from helpers.whole_runs import SMALL, EndedRun, Runs, clean_environ
from moe_exp.checkpoint.integrity import dense_problems
from moe_exp.checkpoint.upcycle import experts_of, virtual_group_router
from moe_exp.config import Config, load_config
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.engine import runtime
from moe_exp.launch.machine_checks import check_files
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.loop import forward_backward

HIDDEN, FFN, TOKENS = 16, 24, 50


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split_mlp(
    weight1: Tensor, weight2: Tensor, granularity: int, gated: bool
) -> dict[int, dict[str, Tensor]]:
    """Shards, by number, whose outputs add up to those of a dense MLP with `weight1` [W, D] and `weight2`
    [D, F]. W is F, or 2F with gate and up halves.
    """
    halves = [half.chunk(granularity) for half in weight1.chunk(1 + gated)]
    firsts = [torch.cat(part) for part in zip(*halves, strict=True)]
    pairs = zip(firsts, weight2.chunk(granularity, dim=1), strict=True)
    return {shard: {"weight1": one, "weight2": two} for shard, (one, two) in enumerate(pairs)}


def test_experts_by_hand():
    # Two hidden units with a gate: rows 0 and 1 are the gate, 2 and 3 what it multiplies.
    weight1 = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    shards = split_mlp(weight1, torch.tensor([[5.0, 6.0]]), 2, gated=True)
    shards = {shard: parts | {"bias2": torch.tensor([8.0])} for shard, parts in shards.items()}
    experts = experts_of(shards, [1, 2, 3], granularity=2, weights_sum=4.0)
    assert experts["weight1"].tolist() == [[[2.0], [4.0]], [[1.0], [3.0]], [[2.0], [4.0]]]
    assert experts["weight2"].tolist() == [[[3.0]], [[2.5]], [[3.0]]]  # times 2 / 4
    assert experts["bias2"].tolist() == [[2.0], [2.0], [2.0]]  # divided by 4
    assert virtual_group_router(weight1, 2).flatten().tolist() == [1.0, 1.0, 3.0, 3.0]


ROUTERS = {
    "softmax of the chosen": {"pre_softmax": False},
    "normalized softmax": {"normalize": True, "scaling_factor": 2.5},
    "sigmoid": {"score": "sigmoid", "scaling_factor": 0.5, "expert_bias": True},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "groups": {"score": "sigmoid", "num_groups": 2, "group_topk": 1},
}
SIZES = [(8, 2, 1), (8, 4, 2), (16, 4, 4), (16, 8, 4), (6, 3, 3)]


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(("num_experts", "topk", "granularity"), SIZES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layer_computes_the_dense_mlp(activation, num_experts, topk, granularity, router):
    if num_experts // router.get("num_groups", 1) % granularity:
        pytest.skip("refused: a group of experts does not hold whole virtual groups")
    gated = ACTIVATIONS[activation][1]
    weight1, weight2 = 0.3 * _random(FFN * (1 + gated), HIDDEN, seed=1), 0.3 * _random(HIDDEN, FFN, seed=2)
    x_TD = _random(TOKENS, HIDDEN, seed=5)
    config = RouterConfig(hidden_size=HIDDEN, num_experts=num_experts, topk=topk, **router)
    experts = Experts(
        num_local_experts=num_experts, hidden_size=HIDDEN, ffn_size=FFN // granularity, activation=activation,
        backend="loop",
    )  # fmt: skip
    parts = {"router": Router(config), "dispatcher": LocalDispatcher(num_experts), "experts": experts}
    layer = MoELayer(**parts, settings=MoESettings())
    factors = {"granularity": granularity, "weights_sum": config.scaling_factor}
    filled = experts_of(split_mlp(weight1, weight2, granularity, gated=gated), range(num_experts), **factors)
    drawn_ED = 0.1 * _random(num_experts, HIDDEN, seed=6)
    with torch.no_grad():
        layer.router.weight.copy_(virtual_group_router(drawn_ED, granularity))
        layer.experts.weight1.copy_(filled["weight1"])
        layer.experts.weight2.copy_(filled["weight2"])
    chosen_TK = layer.route(x_TD).expert_TK
    for shard in range(granularity):
        assert ((chosen_TK % granularity == shard).sum(dim=1) == topk // granularity).all()
    output, expected = layer(x_TD)[0], formula(activation, x_TD @ weight1.T) @ weight2.T
    assert (output - expected).norm() / expected.norm() < 1e-5


MOE = {
    **SMALL, "gpus_per_node": 1, "ffn_hidden_size": 96, "num_experts": 8, "topk": 4,
    "router_pre_softmax": "false", "moe_type": "dmoe", "upcycle_from": "dense",
}  # fmt: skip
SIGMOID = {"router_score": "sigmoid", "router_bias_update_rate": 0.01, "router_scaling_factor": 2.5}
OF_2 = {"upcycle_granularity": 2, "moe_ffn_hidden_size": 48}
OF_4 = {"upcycle_granularity": 4, "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"router_pre_softmax": "true"}, "ROUTER_NORMALIZE=auto: upcycling requires router weights"),
        (
            {"router_score": "sigmoid", "topk": 1, "router_pre_softmax": "true"},
            "TOPK=1: upcycling requires router weights",
        ),
        ({"moe_ffn_hidden_size": 48}, "MOE_FFN_HIDDEN_SIZE=48: must be FFN_HIDDEN_SIZE / UPCYCLE"),
        ({"upcycle_granularity": 8, "moe_ffn_hidden_size": 12}, "TOPK=4: must be a multiple of UPCYCLE_G"),
        (OF_4 | {"num_experts": 6}, "NUM_EXPERTS=6: must be a multiple of UPCYCLE_GRANULARITY=4"),
        ({"moe_type": "moe", "capacity_factor": 1.0}, "CAPACITY_FACTOR=1.0: may drop tokens"),
        ({"shared_expert_size": 32}, "SHARED_EXPERT_SIZE=32: a shared expert would change"),
        ({"moe_latent_size": 16}, "MOE_LATENT_SIZE=16: "),
        ({"norm_placement": "around_moe"}, "NORM_PLACEMENT=around_moe: norms after MoE layers would change"),
        ({"load_dir": "runs/other"}, "UPCYCLE_FROM=dense: cannot be combined with LOAD_DIR=runs/other"),
        ({"use_moe": "false"}, "UPCYCLE_FROM=dense: a dense model has no experts to initialize"),
        ({"upcycle_from": "", "upcycle_granularity": 2}, "UPCYCLE_GRANULARITY=2: has no effect without"),
        (OF_4 | {"num_router_groups": 4, "router_group_topk": 2}, "NUM_ROUTER_GROUPS=4: NUM_EXPERTS/"),
        (OF_2 | {"force_routing": "zipf"}, "FORCE_ROUTING=zipf: does not select all"),
    ],
)
def test_what_cannot_be_equal_is_refused(settings, line):
    (problem,) = load_config(MOE | settings, {}).problems()
    assert problem.startswith(line) and ". Fix: " in problem


@pytest.mark.parametrize(
    "settings", [{}, {"router_pre_softmax": "true", "topk": 8}, {"moe_type": "moe", "capacity_factor": 2.0}]
)
def test_what_is_equal_is_not_refused(settings):
    assert list(load_config(MOE | settings, {}).problems()) == []


class Losses(NamedTuple):
    """Of the first global batch and of the validation data; means over the micro-batches of all ranks."""

    train: float
    valid: float
    logits: Tensor | None


def losses_on_a_rank(settings: dict[str, Any], port: int) -> tuple[list[float], list[float], Tensor | None]:
    """Builds the job as `train` does, and runs the first batch and the validation data forward."""
    job, _ = build_small(settings, port)
    config, found, logits = job.config, [], None
    for stream in (job.train_stream, job.valid_stream):
        sums = forward_backward(job, stream, 0, config.num_microbatches, forward_only=True)
        found.append([float(total / count) for total, count in sums])
    if config.world_size == 1:
        tokens = torch.arange(2 * config.seq_len).view(2, -1) % config.vocab_size
        with torch.no_grad():
            logits = job.trained.model[0](tokens, torch.arange(config.seq_len).expand_as(tokens), None)
    runtime.stop()
    return *found, logits


def losses(settings: dict[str, Any]) -> Losses:
    ranks = run_on_ranks(settings["gpus_per_node"], losses_on_a_rank, settings, free_port(), join=False)
    train, valid = ([loss for rank in ranks for loss in rank[index]] for index in (0, 1))
    return Losses(sum(train) / len(train), sum(valid) / len(valid), ranks[0][2])


SETTINGS = {
    **SMALL, "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 2048, "seq_len": 64,
    "mbsz": 2, "gbsz": 8, "dtype": "fp32", "eval_interval": 1000, "eval_iters": 1, "topk": 4,
    "num_experts": 8, "router_pre_softmax": "false", "gpus_per_node": 1,
    # on a host with GPUs too: ranks of run_on_ranks may not have processes of their own
    "num_workers": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(session_runs: Runs) -> Callable[[bool], EndedRun]:
    """A dense run of a few steps, with biases or without."""
    settings = {"NUM_LAYERS": 4, "USE_MOE": False, "TRAIN_ITERS": 2, "EVAL_INTERVAL": 2, "EVAL_ITERS": 1}
    return cache(lambda bias: session_runs.succeed(f"dense_{bias}", ADD_BIAS_LINEAR=bias, **settings))


@pytest.fixture(scope="module")
def dense_losses(dense, session_runs: Runs, tmp_path_factory) -> Losses:
    """Of the dense model after its last step, on the first batches."""
    places = {"run_dir": str(tmp_path_factory.mktemp("dense")), "data_dir": str(session_runs.data_dir)}
    source = {"use_moe": "false", "load_dir": str(dense(False).folder.checkpoints)}
    return losses(SETTINGS | places | source)


@pytest.fixture
def settings(dense, session_runs: Runs, tmp_path) -> dict[str, Any]:
    """Of a run that starts from the dense one."""
    places = {"run_dir": str(tmp_path), "data_dir": str(session_runs.data_dir)}
    return SETTINGS | places | {"upcycle_from": str(dense(False).folder.checkpoints)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus_per_node": 1},
    "ep2": {"gpus_per_node": 2, "ep": 2},
    "etp2": {"gpus_per_node": 2, "etp": 2},
    "tp2": {"gpus_per_node": 2, "tp": 2},
    "pp2_vpp2": {"gpus_per_node": 2, "pp": 2, "vpp": 2},
    "tp2_ep2_etp2": {"gpus_per_node": 4, "tp": 2, "ep": 2, "etp": 2},
    "tp2_pp2_ep2": {"gpus_per_node": 4, "tp": 2, "pp": 2, "ep": 2},
}
SHORT = [("granular", "one"), ("granular", "ep2"), ("granular", "pp2_vpp2"), ("plain", "etp2")]
KINDS = {"plain": {}, "granular": OF_2, "granular_sigmoid_first_dense": OF_2 | SIGMOID | {"first_k_dense": 1}}
CASES = [
    pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.slow])
    for case in itertools.product(KINDS, LAYOUTS)
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_step_0_is_the_dense_model(kind, layout, settings, dense_losses, record_property):
    settings = settings | LAYOUTS[layout] | KINDS[kind]
    assert list(load_config(settings, {}).problems()) == []
    upcycled = losses(settings)
    assert upcycled[:2] == pytest.approx(dense_losses[:2], rel=1e-6)
    record_property("relative_error", abs(upcycled.train / dense_losses.train - 1))
    if upcycled.logits is not None:
        assert (upcycled.logits - dense_losses.logits).norm() / dense_losses.logits.norm() < 1e-5


def test_biases_are_split_and_scaled_too(dense, settings, tmp_path):
    source = str(dense(True).folder.checkpoints)
    settings = settings | {"add_bias_linear": "true", "upcycle_from": ""}
    of_dense = losses(settings | {"run_dir": str(tmp_path / "a"), "use_moe": "false", "load_dir": source})
    settings |= OF_2 | {"router_scaling_factor": 2.5, "gpus_per_node": 2, "ep": 2, "upcycle_from": source}
    upcycled = losses(settings | {"run_dir": str(tmp_path / "b")})
    assert upcycled[:2] == pytest.approx(of_dense[:2], rel=1e-6)


def test_run_starts_from_the_dense_one_and_resumes_from_itself(dense, dense_losses, runs: Runs):
    source = dense(False).folder.checkpoints / "iter_0000002"
    settings = {
        "UPCYCLE_FROM": source, "UPCYCLE_GRANULARITY": 2, "MOE_FFN_HIDDEN_SIZE": 48, "TOPK": 4,
        "ROUTER_PRE_SOFTMAX": False, "EXIT_INTERVAL": 1, "TRAIN_ITERS": 2, "GPUS_PER_NODE": 2, "EP": 2,
        "NUM_LAYERS": 4, "Z_LOSS_COEFF": 0,
    }  # fmt: skip
    first = runs.stopped("moe", **settings)
    assert f"upcycled from {source}: 4 MoE layers with 4 copies of each of 2 shards" in first.stdout
    assert first.curve("lm_loss")[0] == pytest.approx(dense_losses.train, rel=1e-6)
    second = runs.succeed("moe", **settings)
    assert "upcycled from" not in second.stdout and second.curve("iteration") == [1, 2]
    # The optimizer took the weights over: its first step would otherwise put its own old copies back.
    assert second.curve("lm_loss")[1] < first.curve("lm_loss")[0] + 0.5


def changed_by_a_step_of_size_0(settings: dict[str, Any], port: int) -> float:
    """Trains one step with a learning rate of 0 after the upcycling; the largest change of a weight."""
    job, _ = build_small(settings, port)
    weights = [p for chunk in job.trained.model for p in chunk.parameters()]
    before = [p.detach().clone() for p in weights]
    forward_backward(job, job.train_stream, 0, job.config.num_microbatches)
    for group in job.trained.optimizer.param_groups:
        group["lr"] = 0.0
    updated, *_ = job.trained.optimizer.step()
    assert updated
    return max(float((p - old).abs().max()) for p, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("distributed", [True, False])
def test_main_weights_are_those_of_the_dense_run(distributed, settings):
    settings = settings | {"dtype": "bf16", "distributed_optimizer": distributed}
    # The model in bf16 is a copy of the optimizer's fp32 weights after every step.
    assert run_on_ranks(1, changed_by_a_step_of_size_0, settings, free_port(), join=False) == [0]


def test_a_damaged_dense_checkpoint_is_refused(dense, settings, tmp_path):
    checkpoints = tmp_path / "dense/checkpoints"
    shutil.copytree(dense(False).folder.checkpoints, checkpoints)
    path = max(checkpoints.glob("iter_*/*.distcp"), key=lambda path: path.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)
    settings = settings | {"upcycle_from": str(checkpoints)}
    with pytest.raises(RankError, match="has changed since it was written"):
        run_on_ranks(1, changed_by_a_step_of_size_0, settings, free_port(), join=False)


def test_files_are_checked_before_anything_is_built(settings, tmp_path):
    def problems(**changes: Any) -> list[str]:
        return check_files(load_config(settings | changes, {}))

    assert problems() == []
    (line,) = problems(upcycle_from=str(tmp_path))
    assert line.startswith(f"UPCYCLE_FROM={tmp_path}: is not a distributed checkpoint")
    (line,) = problems(normalization="LayerNorm")
    assert line.startswith("NORMALIZATION=LayerNorm: ") and "has NORMALIZATION=RMSNorm. Fix: " in line


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
    assert [line.partition("=")[0] for line in dense_problems(moe, dense.model_dump())] == names


@pytest.mark.slow
def test_commands_of_the_page_upcycle_a_hugging_face_model(tmp_path, monkeypatch):
    """As they stand, with a tiny Qwen3 on a local hub; the first loss is that of the run without experts."""
    text = (ROOT / "docs/upcycling.md").read_text().partition("## From a Hugging Face model")[2]
    commands = text.split("```")[1].removeprefix("bash\n").replace("SEQ_LEN=4096", "SEQ_LEN=32")
    texts = [f"def add_{number}(a, b):\n    return a + b + {number}\n" * 20 for number in range(40)]
    (tmp_path / "my_texts").mkdir()
    for number, one in enumerate(texts):
        (tmp_path / f"my_texts/{number}.txt").write_text(one)
    model = tiny_folder(tmp_path / "hub", "qwen3", changes={"vocab_size": 512})
    train_bpe(texts, 512).save(str(model / "tokenizer.json"))
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    leave_host_settings(monkeypatch, tmp_path / "hf_home", "TRANSFORMERS_")
    flags = "--config checkpoints/qwen3-4b/settings.env"
    program = f'set -e\nmoe-exp() {{ {shlex.quote(sys.executable)} -m moe_exp "$@"; }}\n{commands}'
    program += f"TRAIN_DATA=my_texts SEQ_LEN=32 RUN_NAME=dense moe-exp train {flags}\n"
    settings = {"MBSZ": 4, "GBSZ": 8, "TRAIN_ITERS": 2, "EVAL_INTERVAL": 0, "GPUS_PER_NODE": 1}
    with HubServer(model, repository="Qwen/Qwen3-4B") as server:
        settings |= {"LOG_INTERVAL": 1, "HF_ENDPOINT": server.url, "PYTHONPATH": ROOT}
        environ = clean_environ(**settings, MASTER_PORT=free_port())
        options = {"capture_output": True, "text": True, "timeout": 500}
        done = subprocess.run(["bash", "-c", program], cwd=tmp_path, env=environ, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    curves = {}
    for name in ("qwen3-8x4b", "dense"):
        records = read_metrics(RunFolder(tmp_path / "runs" / name).metrics)
        curves[name] = [one["lm_loss"] for one in records if one["kind"] == "train"]
    assert curves["qwen3-8x4b"][0] == pytest.approx(curves["dense"][0], rel=1e-6)
    assert curves["qwen3-8x4b"][1] != curves["dense"][1]
    fields = json.loads((tmp_path / "qwen3-8x4b/config.json").read_text())
    assert fields["architectures"] == ["Qwen3MoeForCausalLM"] and fields["max_position_embeddings"] == 64
    assert (fields["num_experts"], fields["num_experts_per_tok"], fields["norm_topk_prob"]) == (8, 2, True)
    card = (tmp_path / "qwen3-8x4b/README.md").read_text()
    assert "\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-4B\n---\n" in card


@pytest.mark.parametrize("given", [{}, {"router_pre_softmax": "true", "router_normalize": "true"}])
def test_settings_file_of_a_dense_model_is_read_as_that_of_its_moe(given, tmp_path):
    dense = {
        "USE_MOE": "false",
        "LOAD_DIR": "dense",
        "ROUTER_PRE_SOFTMAX": "true",
        "MOE_FFN_HIDDEN_SIZE": "7",
    }
    (tmp_path / "settings.env").write_text("".join(f"{name}={value}\n" for name, value in dense.items()))
    flags = {"config": str(tmp_path / "settings.env"), "num_experts": "8", "topk": "2", **given}
    config = load_config(flags, {"UPCYCLE_FROM": "dense", "PRESET": "reference", "GPUS_PER_NODE": "1"})
    assert (config.use_moe, config.load_dir, config.moe_ffn_hidden_size) == (True, "", 0)
    assert config.router_pre_softmax is bool(given) and list(config.problems()) == []
    assert load_config(flags, {}).load_dir == "dense" and not load_config(flags, {}).use_moe
    (tmp_path / "settings.env").write_text("USE_MOE=true\nROUTER_PRE_SOFTMAX=true\n")
    assert load_config(flags | {"upcycle_from": "dense", "router_pre_softmax": None}, {}).router_pre_softmax


def test_an_moe_run_is_no_source(session_runs: Runs, settings):
    iterations = {"TRAIN_ITERS": 1, "WARMUP_ITERS": 0, "DECAY_ITERS": 1}
    source = session_runs.succeed("moe_as_source", **iterations).folder.checkpoints
    settings = settings | {"upcycle_from": str(source)}
    (line,) = check_files(load_config(settings, {}))
    assert line.startswith(f"UPCYCLE_FROM={source}: is the checkpoint of an MoE run. Fix: ")
