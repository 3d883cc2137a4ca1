"""Modules that backward recomputes (RECOMPUTE_MODULES), and modules whose tensors wait in host memory
(OFFLOAD_MODULES): the same bits as without.
"""

from typing import Any

import pytest

from helpers.checkpoint.legs import LAYOUTS, Step, _step, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import runtime
from moe_exp.layers.kernels import launch
from moe_exp.layers.megatron import saved_tensors
from moe_exp.training import loop
from moe_exp.training.interval import Interval

IN_MOE = "moe_act,router,shared_expert,experts"
SHARED = {"shared_expert_size": 16, "z_loss_coeff": 1e-3}
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "qk_norm": True,
}  # fmt: skip
# Settings, and lists for RECOMPUTE_MODULES.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "each": (SHARED, ["norm", "core_attn", *IN_MOE.split(",")]),
    "kernels": (SHARED | {"expert_backend": "triton", "dtype": "bf16"}, ["experts", f"norm,{IN_MOE}"]),
    "kernels, biases": ({"expert_backend": "triton", "add_bias_linear": True}, ["experts,norm"]),
    "grouped GEMM": ({"expert_backend": "torch", "dtype": "bf16"}, ["experts", "moe_act,norm,router"]),
    "latent attention": (LATENT | SHARED, ["mla_up_proj", "norm,mla_up_proj,core_attn,experts"]),
    "capacity": (
        {"moe_type": "moe", "router_score": "sigmoid", "router_bias_update_rate": 0.1},
        [f"norm,{IN_MOE[:14]}"],
    ),
    "rotated heads normalized": (
        {"qk_norm": True, "qk_norm_scope": "rotated", "norm_placement": "around_moe"},
        ["norm,core_attn"],
    ),
    "jitter, dropout": ({"router_jitter": 0.1, "dropout": 0.1}, ["norm,router,experts,core_attn"]),
    "documents": ({"document_mask": True}, ["norm,core_attn,router,experts"]),
    "parallel": ({"norm_placement": "parallel", "first_k_dense": 1}, ["norm,router"]),
    "LayerNorm, dense layer": ({"normalization": "LayerNorm", "first_k_dense": 1}, ["norm,experts"]),
}
ALL = SHARED, [f"norm,core_attn,{IN_MOE}"]
PARALLEL = {layout: LAYOUTS[layout] for layout in ("DP2", "TP2", "PP2_VPP2", "EP2", "TP2_ETP2")} | {
    "CP2": {"gpus_per_node": 2, "cp": 2}
}


def trained(settings: dict[str, Any], port: int) -> list[Step]:
    launch.INTERPRETED = False  # the plain-torch references, which are much faster
    saved_tensors.SMALLEST = 0
    job = start_job(settings, port)
    interval, progress, steps = Interval(job.config, job.runtime, job.trained.model), Progress(), []
    for _ in range(2):
        done = loop.train_step(job, progress, interval, count_zeros=False)
        steps.append(_step(job, progress, interval, done.grad_norm))
    runtime.stop()
    return steps


def offloads(settings: dict[str, Any], lists: list[str]) -> list[dict[str, str]]:
    """Every module, and those that the last of `lists` does not recompute."""
    found = ["attention", "mlp", "experts", *["shared_expert"] * ("shared_expert_size" in settings)]
    again, replaced = lists[-1].split(","), {"moe_act": "experts", "mla_up_proj": "attention"}
    others = set(found) - {replaced.get(name, name) for name in again}
    both = {"offload_modules": ",".join(others), "recompute_modules": lists[-1]}
    return [{"offload_modules": ",".join(found)}, both]


def on_rank(jobs):
    return in_turn(trained, jobs)


# DP2 is in EP2, and both ways to split a tensor in TP2
SLOW = {"kernels, biases", "rotated heads normalized", "documents", "DP2", "TP2_ETP2", "CP2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in [*CASES, *PARALLEL]]
)
def test_same_bits(name, tmp_path):
    settings, lists = CASES.get(name, ALL)
    base = settings | PARALLEL.get(name, {"gpus_per_node": 1})
    base |= {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path / "run")}
    # two micro-batches per rank and iteration
    base |= {"num_layers": 4 if "vpp" in base else 3, "mbsz": 1 if name in ("DP2", "EP2") else 2, "gbsz": 4}
    changes = [{}, *({"recompute_modules": modules} for modules in lists), *offloads(settings, lists)]
    jobs = [(base | change, free_port()) for change in changes]
    for plain, *found in run_on_ranks(base["gpus_per_node"], on_rank, jobs, join=False, timeout=300):
        for change, steps in zip(changes[1:], found, strict=True):
            assert steps == plain, change
