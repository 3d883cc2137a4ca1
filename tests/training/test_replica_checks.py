"""Replicas that differ by a bit, and groups that are wrong, are named on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import start_job, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.state import Progress, parameters_in_sync, unwrapped
from moe_exp.engine.initial_weights import global_name
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.replica_checks import is_norm_or_bias, named_parameters, replica_problems

ROUTER = "decoder.layers.1.mlp.router.weight"
NORM = "decoder.layers.2.pre_mlp_layernorm.weight"
PROJECTION = "decoder.layers.3.self_attention.linear_qkv.weight"
EXPERTS = "decoder.layers.0.mlp.experts.weight2"
BIAS = "decoder.layers.0.mlp.router.expert_bias"


def problems_of(job: Any) -> list[str]:
    lines = replica_problems(job.config, job.runtime, job.trained)
    return [line.replace(job.runtime.host, "HOST") for line in lines]


def found_on_rank(
    settings: dict[str, Any], changes: list[tuple[int, str]], port: int, steps: int = 0
) -> list[Any]:
    """The problems before and after `steps`, and change by change with one bit flipped on a rank."""
    job = start_job(settings, port)
    found = [problems_of(job)]
    interval, progress = Interval(job.config, job.runtime, job.trained.model), Progress()
    for _ in range(steps):
        loop.train_step(job, progress, interval, count_zeros=False)
        found.append(problems_of(job))
    with parameters_in_sync(job.trained.model):
        tensors = dict(named_parameters(job.trained.model))
        for chunk in job.trained.model:
            inner = unwrapped(chunk)
            tensors |= {global_name(inner, name): buffer for name, buffer in inner.named_buffers()}
    for rank, name in changes:
        for times in range(2):  # and back
            if job.runtime.rank == rank:
                values = tensors[name].detach()
                values.view(torch.int16 if values.element_size() == 2 else torch.int32).view(-1)[0] ^= 1
            if not times:
                found.append(problems_of(job))
    found.append(problems_of(job))
    return found


def on_ranks(tmp_path: Path, changes: list[tuple[int, str]], steps: int = 0, **settings: Any) -> list[Any]:
    settings = {"train_data": str(write_data(tmp_path))} | settings
    first, *others = run_on_ranks(
        settings["gpus_per_node"], found_on_rank, settings, changes, free_port(), steps, join=False
    )
    assert all(other == first for other in others)
    assert [first[index] for index in (*range(steps + 1), -1)] == [[]] * (steps + 2)
    return first[steps + 1 : -1]


def test_a_bit_on_one_of_four_ranks(tmp_path):
    """TP 2, DP 2; experts EP 2, expert DP 2: rank 2 has the same experts as rank 0."""
    changes = [(3, ROUTER), (1, NORM), (2, PROJECTION), (2, EXPERTS), (0, BIAS)]
    settings = {"gpus_per_node": 4, "tp": 2, "ep": 2, "router_score": "sigmoid"}
    router, norm, projection, experts, bias = on_ranks(
        tmp_path, changes, **settings, router_bias_update_rate=1e-3
    )
    data, tensor = "data parallel replicas must be equal", "tensor parallel ranks must be equal"
    doubt = "; it is unknown which copy is right"
    assert router == [
        f"replicas: {ROUTER} on rank 3 (HOST) differs from rank 1 (HOST): {data}{doubt}",
        f"replicas: {ROUTER} on rank 3 (HOST) differs from ranks 0, 1, 2 (HOST): {tensor}",
    ]
    assert norm[1] == f"replicas: {NORM} on rank 1 (HOST) differs from ranks 0, 2, 3 (HOST): {tensor}"
    pair = "on rank 2 (HOST) differs from rank 0 (HOST)"
    assert projection == [f"replicas: {PROJECTION} {pair}: {data}{doubt}"]
    assert experts == [f"replicas: {EXPERTS} {pair}: expert {data}{doubt}"]
    assert bias[1] == f"replicas: {BIAS} on rank 0 (HOST) differs from ranks 1, 2, 3 (HOST): {tensor}"


def test_a_tied_embedding_on_the_last_stage_and_steps_with_overlap(tmp_path):
    """With overlapped gather, parameters have to be fetched before they are compared."""
    tied = "output_layer.weight"
    settings = {"gpus_per_node": 2, "pp": 2, "tie_embeddings": True, "dtype": "bf16"}
    (line,) = on_ranks(tmp_path, [(1, tied)], steps=2, **settings)[0]
    where = "embedding.word_embeddings.weight on rank 1 (HOST) differs from rank 0 (HOST)"
    assert line.startswith(f"replicas: {where}: first and last pipeline stage, ")
    assert on_ranks(tmp_path, [], steps=2, gpus_per_node=2, overlap="true", dtype="bf16") == []


def test_parts_of_an_expert_on_different_ranks_are_no_replicas(tmp_path):
    assert on_ranks(tmp_path, [], gpus_per_node=2, tp=2, etp=2) == []


def test_names_of_norms_and_biases():
    biases = ("x.linear_qkv.bias", "x.mlp.experts.bias1", "x.mlp.experts.bias2")
    norms = ("decoder.final_layernorm.weight", "x.linear_qkv.layer_norm_weight", "x.q_layernorm.weight")
    embeddings = ("embedding.word_embeddings.weight", "output_layer.weight")
    no = (ROUTER, PROJECTION, EXPERTS, "x.experts.weight1", *embeddings)
    assert all(map(is_norm_or_bias, (NORM, *norms, *biases))) and not any(map(is_norm_or_bias, no))


def groups_on_rank(settings: dict[str, Any], port: int) -> list[Any]:
    """The problems of sound groups, with a norm moved to the matrices, with it in no group, and in two."""
    job = start_job(settings, port)
    found = [problems_of(job)]
    groups = job.trained.optimizer.chained_optimizers[0].optimizer.param_groups
    norms, matrices = sorted(groups, key=lambda group: group["wd_mult"])
    moved = norms["params"][-1]
    for of_norms, of_matrices in (([], [moved]), ([], []), ([moved, moved], [])):
        if job.runtime.rank == 1:
            norms["params"] = [p for p in norms["params"] if p is not moved] + of_norms
            matrices["params"] = [p for p in matrices["params"] if p is not moved] + of_matrices
        found.append(problems_of(job))
    return found


@pytest.mark.parametrize(("distributed", "dtype"), [(True, "bf16"), (False, "fp32"), (False, "bf16")])
def test_a_norm_in_the_wrong_group_in_none_and_in_two(distributed, dtype, tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 2, "dtype": dtype}
    settings["distributed_optimizer"] = distributed
    first, second = run_on_ranks(2, groups_on_rank, settings, free_port(), join=False)
    assert first == second
    sound, decays, none, two = first
    assert sound == []
    (line,) = decays
    name = line.split()[1]
    assert is_norm_or_bias(name)
    assert line == f"optimizer: {name} is a norm or bias but has weight decay (0.1), on rank 1 (HOST)"
    wrong = f"optimizer: {name} is in %d parameter groups of the optimizer instead of one, on rank 1 (HOST)"
    if distributed or dtype == "bf16":
        assert none == [wrong % 0]
    else:
        assert none == [
            f"optimizer: {name}: the optimizer updates 32 values instead of 64, on ranks 0, 1 (HOST)"
        ]
    assert wrong % 2 in two


# The router of rank 1 gets a flipped bit in its third step, from outside.
SITECUSTOMIZE = """
import os
if os.environ.get("RANK") == "1":
    import torch
    import moe_exp  # before megatron
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from moe_exp.checkpoint.optimizer_state import owned_state
    step, calls = ChainedOptimizer.step, []
    def flip(self):
        done = step(self)
        calls.append(1)
        if len(calls) == 3:
            parameters = (owned.parameter for owned in owned_state(self))
            router = next(one for one in parameters if tuple(one.shape) == (8, 64))
            router.detach().view(torch.int32).view(-1)[0] ^= 1 << 12  # the lowest might be rounded away
        return done
    ChainedOptimizer.step = flip
"""


@pytest.mark.slow
def test_a_run_ends_at_the_next_comparison(tmp_path, script_runs):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    settings = {
        "GPUS_PER_NODE": 2, "CHECK_INTERVAL": 2, "SAVE_INTERVAL": 4, "DISTRIBUTED_OPTIMIZER": False,
        "TRAIN_ITERS": 8, "WARMUP_ITERS": 4, "DECAY_ITERS": 8,
    }  # fmt: skip
    run = script_runs.run("flipped", PYTHONPATH=tmp_path, **settings)
    assert run.code == 1, run.text
    line, end = (line for line in run.stderr.splitlines() if line.startswith("moe-exp: "))
    assert ".mlp.router.weight on rank 1 (" in line
    assert end.startswith("moe-exp: the run ends after iteration 4 without a save. Fix: ")
    assert "Traceback" not in run.text
    (event,) = run.events("replicas_differ")
    assert (event["iteration"], event["problems"]) == (4, [line.removeprefix("moe-exp: ")])
    assert not list(run.folder.checkpoints.glob("iter_*"))
