"""The account of activations against what autograd saves in the real model, on processors.

Each saved tensor goes through a hook; those of one storage count once, parameters do not. The largest sum of
an iteration is what the planner calls activations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.model_on_ranks import RandomTokens
from helpers.planner.planned import total
from helpers.ranks import free_port, in_turn, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.planner.costs.activations import activations_of
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.memory import micro_batches_in_flight
from moe_exp.planner.hardware import load_hardware

TINY: dict[str, Any] = {
    **SMALL, "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 320, "num_heads": 4,
    "num_query_groups": 2, "seq_len": 128, "vocab_size": 1024, "num_experts": 8, "topk": 2, "mbsz": 2,
    "gbsz": 2, "distributed_optimizer": False, "num_workers": 0,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 40, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24, "qk_norm": True, "use_moe": False,
}  # fmt: skip
# Indices and statistics of a few bytes per token are left out of the account, or not seen by the hooks.
LIMIT = 0.01
OF_RECOMPUTED = 0.02
DENSE = {"use_moe": False}
LATENT_EXPERTS = {"moe_latent_size": 48}
BF16 = {"dtype": "bf16"}

# What is built, by name.
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense, bf16": DENSE | BF16,
    "tied, short": DENSE | {"tie_embeddings": True, "seq_len": 64, "mbsz": 4, "gbsz": 4},
    "gelu, LayerNorm, biases, norm over all heads": DENSE
    | {"activation": "gelu", "normalization": "LayerNorm", "add_bias_linear": True}
    | {"qk_norm": True, "qk_norm_scope": "all"},
    "geglu, heads with keys of their own": DENSE | {"activation": "geglu", "num_query_groups": 4},
    "clamped swiglu": DENSE | {"activation": "clamped_swiglu"},
    "norm of every head, bf16": DENSE | BF16 | {"qk_norm": True},
    "dropout, bf16": DENSE | BF16 | {"activation": "squared_relu", "dropout": 0.1, "attention_dropout": 0.1},
    "norm of every head after its rotation, bf16": DENSE
    | BF16
    | {"qk_norm": True, "qk_norm_scope": "rotated"},
    "norms after": DENSE | {"norm_placement": "post"},
    "norms after, factors, bf16": BF16
    | {"norm_placement": "post", "embedding_multiplier": 6.0, "residual_multiplier": 0.4}
    | {"attention_multiplier": 0.2, "logits_scaling": 3.0},
    "norms around experts": {"norm_placement": "around_moe"},
    "norms around experts, experts again": {"norm_placement": "around_moe", "recompute": "selective"},
    "norms around, first layer dense": {"norm_placement": "around", "first_k_dense": 1},
    "parallel, first layer dense, bf16": BF16 | {"norm_placement": "parallel", "first_k_dense": 1},
    "key/value heads of windows, values with a factor": DENSE
    | {"sliding_window": 32, "window_pattern": "2", "window_query_groups": 4, "value_scale": 0.5},
    "parallel, experts again": {"norm_placement": "parallel", "recompute": "selective"},
    "windows and sinks": DENSE | {"sliding_window": 40, "attention_sinks": "all"},
    "windows in every second layer, soft cap, bf16": DENSE
    | BF16
    | {"sliding_window": 40, "window_pattern": "2", "attention_softcap": 9.0},
    "output gate": DENSE | {"attention_gate": True},
    "output gate, windows, bf16": DENSE | BF16 | {"attention_gate": True, "sliding_window": 40},
    "two rotary embeddings": DENSE
    | {"sliding_window": 40, "window_pattern": "2", "window_rotary_base": 500.0},
    "latent, windows": LATENT | {"q_lora_rank": 48, "sliding_window": 40},
    "latent": LATENT | {"q_lora_rank": 48},
    "latent, whole queries, bf16": LATENT | BF16,
    "dmoe": {},
    "dmoe, bf16": BF16,
    "first layer dense": {"first_k_dense": 1},
    "moe": {"moe_type": "moe"},
    "moe, twice the capacity, bf16": BF16 | {"moe_type": "moe", "capacity_factor": 2.0, "topk": 1},
    "shared expert, gate, sigmoid, bf16": BF16
    | {"shared_expert_size": 96, "shared_expert_gate": True, "router_score": "sigmoid"},
    "sqrtsoftplus, no z-loss": {"router_score": "sqrtsoftplus", "z_loss_coeff": 0.0},
    "loss by sequence, top 4": {"aux_loss_type": "seq_aux_loss", "topk": 4, "z_loss_coeff": 0.0},
    "grouped GEMM, bf16": BF16 | {"expert_backend": "torch"},
    "grouped GEMM, activation again, bf16": BF16 | {"expert_backend": "torch", "recompute": "moe_act"},
    "rows that travel": {"dispatcher": "alltoall"},
    "latent experts, bf16": BF16 | LATENT_EXPERTS | {"shared_expert_size": 96},
    "latent experts, rows that travel": LATENT_EXPERTS | {"dispatcher": "alltoall"},
    "latent experts, bf16, kernels, selective": BF16
    | LATENT_EXPERTS
    | {"expert_backend": "triton", "recompute": "selective"},
    "kernels": {"expert_backend": "triton"},
    "kernels, bf16": BF16 | {"expert_backend": "triton"},
    "kernels, rows that travel, bf16": BF16 | {"expert_backend": "triton", "dispatcher": "alltoall"},
    "kernels, clamped swiglu, biases, latent, bf16": BF16
    | LATENT_EXPERTS
    | {"expert_backend": "triton", "activation": "clamped_swiglu", "add_bias_linear": True},
    "loss kernel": DENSE | {"cross_entropy": "triton", "mbsz": 2},
    "loss kernel, bf16": DENSE | BF16 | {"cross_entropy": "triton", "mbsz": 2},
    "linear loss, bf16": DENSE | BF16 | {"cross_entropy": "linear", "mbsz": 2},
    "selective": {"recompute": "selective"},
    "full, dense": DENSE | {"recompute": "full"},
    "full, bf16": BF16 | {"recompute": "full"},
}
# RECOMPUTE_MODULES: each module of a model, pairs, and all.
SHARED = {"shared_expert_size": 96, "shared_expert_gate": True, "router_score": "sigmoid"}
RECOMPUTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": (DENSE, ["norm", "core_attn"]),
    "dense, bf16": (DENSE | BF16, ["norm", "core_attn"]),
    "LayerNorm, bf16": (DENSE | BF16 | {"normalization": "LayerNorm"}, ["norm", "core_attn"]),
    "parallel": ({"norm_placement": "parallel", "first_k_dense": 1}, ["norm"]),
    "latent": (LATENT | {"q_lora_rank": 48}, ["norm", "core_attn", "mla_up_proj"]),
    "latent, bf16": (LATENT | BF16, ["norm", "core_attn", "mla_up_proj"]),
    "dmoe": ({}, ["norm", "router", "experts"]),
    "shared expert, bf16": (BF16 | SHARED, ["norm", "shared_expert", "experts"]),
    "grouped GEMM, bf16": (BF16 | {"expert_backend": "torch"}, ["norm", "moe_act", "experts"]),
    "kernels": ({"expert_backend": "triton"}, ["norm", "router", "experts"]),
    "rows that travel, bf16": (
        BF16 | SHARED | {"expert_backend": "triton", "dispatcher": "alltoall"},
        ["router", "shared_expert", "experts"],
    ),
    "latent experts": (LATENT_EXPERTS | {"normalization": "LayerNorm"}, ["norm", "core_attn", "experts"]),
    "moe": ({"moe_type": "moe"}, ["norm", "router", "experts"]),
}


def _lists(modules: list[str]) -> Iterator[str]:
    for number in range(1, len(modules) + 1):
        yield from map(",".join, combinations(modules, number))


# OFFLOAD_MODULES: each module of a model, and all; what is on the device.
OFFLOADED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": (DENSE | {"num_layers": 3}, ["attention", "mlp"]),
    "dense, bf16": (DENSE | BF16, ["attention", "mlp"]),
    "latent, bf16": (LATENT | BF16, ["attention", "mlp"]),
    "dmoe": ({"num_layers": 3}, ["attention", "experts"]),
    "shared expert, bf16": (BF16 | SHARED, ["attention", "shared_expert", "experts"]),
    "grouped GEMM, bf16": (BF16 | {"expert_backend": "torch"}, ["attention", "experts"]),
    "kernels, first layer dense": (
        {"expert_backend": "triton", "first_k_dense": 1, "num_layers": 3}, ["attention", "mlp", "experts"]
    ),
    "rows that travel, bf16": (
        BF16 | SHARED | {"expert_backend": "triton", "dispatcher": "alltoall"},
        ["attention", "shared_expert", "experts"],
    ),
    "latent experts": (LATENT_EXPERTS | {"normalization": "LayerNorm"}, ["attention", "experts"]),
    "moe": ({"moe_type": "moe"}, ["attention", "experts"]),
    "norms again": ({"recompute_modules": "norm,router"}, ["attention", "experts"]),
}  # fmt: skip
MODELS |= {
    f"{name}, {modules} on the host": settings | {"offload_modules": modules}
    for name, (settings, chosen) in OFFLOADED.items()
    for modules in (*chosen, ",".join(chosen))
}
MODELS |= {
    f"{name}, {modules}": settings | {"recompute_modules": modules}
    for name, (settings, chosen) in RECOMPUTED.items()
    for modules in _lists(chosen)
}
# Those of pairs of three modules, between one module and all.
SLOW = {
    f"{name}, {','.join(pair)}"
    for name, (_, chosen) in RECOMPUTED.items()
    if len(chosen) > 2
    for pair in combinations(chosen, 2)
} | {
    "norm of every head after its rotation, bf16", "norms after, factors, bf16",
    "norms around experts, experts again",
}  # fmt: skip
# Kinds of which others are in both tables: in fp32, with the same backend, or with a shared expert.
OTHERS = ("dense, bf16, ", "latent, bf16, ", "LayerNorm, bf16, ", "grouped GEMM, bf16, ", "latent experts, ")
SLOW |= {name for name in MODELS if name.startswith(OTHERS)}
SLOW |= {
    "tp2, dense, bf16", "tp2, dense, bf16, loss kernel", "cp2, dmoe, bf16", "tp2, norm and experts",
    "cp2, norm", "1F1B, dense, full", "interleaved, few",
}  # fmt: skip
# The same over two ranks: the first of them is looked at.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2, dense, bf16": DENSE | BF16 | {"tp": 2},
    "tp2, dense, bf16, loss kernel": DENSE | BF16 | {"tp": 2, "cross_entropy": "triton"},
    "tp2, dense, linear loss": DENSE | {"tp": 2, "cross_entropy": "linear"},
    "tp2, latent": LATENT | {"tp": 2, "q_lora_rank": 48},
    "ep2": {"ep": 2, "gbsz": 4, "force_routing": "balanced"},
    "ep2, moe": {"ep": 2, "gbsz": 4, "moe_type": "moe"},
    "tp2, ep2, latent experts, bf16": BF16 | LATENT_EXPERTS | {"tp": 2, "ep": 2, "force_routing": "balanced"},
    "etp2": {"etp": 2, "tp": 2, "force_routing": "balanced"},
    "cp2": {"cp": 2, **DENSE},
    "cp2, dmoe, bf16": {"cp": 2, **BF16},
    "tp2, norm and experts": {"tp": 2, "recompute_modules": "norm,experts"},
    "tp2, shared expert": {"tp": 2, "recompute_modules": "norm,shared_expert", "shared_expert_size": 96},
    "tp2, latent, all": LATENT | {"tp": 2, "recompute_modules": "norm,mla_up_proj,core_attn"},
    "ep2, experts": {"ep": 2, "gbsz": 4, "force_routing": "balanced", "recompute_modules": "experts,norm"},
    "cp2, windows": {"cp": 2, **DENSE, "sliding_window": 20, "window_pattern": "2"},
    "cp2, norm": {"cp": 2, **DENSE, "recompute_modules": "norm"},
}


class Ledger:
    """Bytes of the storages that autograd holds for backward passes, now and at most."""

    def __init__(self, model: list[Any]):
        self.peak = 0
        self._held: dict[int, list[Any]] = {}  # storages and numbers of their entries
        tensors = [tensor for chunk in model for tensor in (*chunk.parameters(), *chunk.module.buffers())]
        self._of_model = {tensor.untyped_storage()._cdata for tensor in tensors}

    @property
    def now(self) -> int:
        """Megatron frees storages that it computes again, although autograd holds them."""
        return sum(storage.nbytes() for storage, _ in self._held.values())

    def pack(self, tensor: torch.Tensor) -> Entry:
        return Entry(self, tensor)

    def hold(self, storage: Any, change: int) -> None:
        if storage._cdata in self._of_model:
            return
        entry = self._held.setdefault(storage._cdata, [storage, 0])
        entry[1] += change
        if not entry[1]:
            del self._held[storage._cdata]
        self.peak = max(self.peak, self.now)


class Entry:
    """A saved tensor, for as long as autograd keeps it."""

    def __init__(self, ledger: Ledger, tensor: torch.Tensor):
        self.tensor, self._ledger, self._storage = tensor, ledger, tensor.untyped_storage()
        ledger.hold(self._storage, 1)

    def __del__(self) -> None:
        self._ledger.hold(self._storage, -1)


def counted(ledger: Ledger, saved: type) -> type:
    """saved_tensors._Saved, whose bytes on the device are in the ledger."""

    class Counted(saved):  # type: ignore[misc]
        _entry: Entry | None = None

        @property
        def on_device(self) -> torch.Tensor | None:
            return self._entry and self._entry.tensor

        @on_device.setter
        def on_device(self, tensor: torch.Tensor | None) -> None:
            self._entry = None if tensor is None else Entry(ledger, tensor)

    return Counted


def saved_on_rank(jobs: list[dict[str, Any]], ports: list[int]) -> list[tuple[int, int]]:
    """On a rank: the most bytes that each job has saved in an iteration, and those that are left after it."""
    return in_turn(_saved, zip(jobs, ports, strict=True))


def _saved(settings: dict[str, Any], port: int) -> tuple[int, int]:
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.layers.kernels import launch
    from moe_exp.layers.megatron import saved_tensors
    from moe_exp.training import loop

    launch.INTERPRETED = False  # the kernels' twins keep the same, sooner
    saved_tensors.SMALLEST = 4096

    config = of_settings(settings, num_ranks=int(os.environ["WORLD_SIZE"]))
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    loop.optimizer_setup.set_megatron_hooks(model, SimpleNamespace(scale_loss=None))
    ledger, saved = Ledger(model), saved_tensors._Saved
    saved_tensors._Saved = counted(ledger, saved)  # type: ignore[misc]
    trained = SimpleNamespace(model=model)
    job: Any = SimpleNamespace(config=config, runtime=rank, trained=trained, eod_id=None, graphs=None)
    data = RandomTokens(config.seq_len, config.vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda entry: entry.tensor):
        loop.forward_backward(job, data, 0, config.num_microbatches)
    saved_tensors._Saved = saved  # type: ignore[misc]
    runtime.stop()
    return ledger.peak, ledger.now


def of_settings(settings: dict[str, Any], num_ranks: int) -> Config:
    return load_config(TINY | {"gpus_per_node": num_ranks} | settings, {})


def expected(config: Config, stage: int = 0) -> float:
    """The most that is saved at once: layers of all micro-batches in flight, the loss or a layer again."""
    found = activations_of(PlannedJob.of(config), load_hardware("CPU"))
    first = sum(config.stage_layers[:stage])
    is_moe = config.moe_layers[first : first + config.stage_layers[stage]]
    layers = sum(total(found.moe_parts if moe else found.dense_parts) for moe in is_moe)
    pair, last = found.in_transit(is_moe.count(False), is_moe.count(True))
    layers += found.embedding if stage == 0 else 0.0
    in_flight = micro_batches_in_flight(config, config.num_microbatches)[stage]
    output = total(found.output_parts) if stage == config.pp - 1 else 0.0
    # chunks that have run forward for other micro-batches
    waiting = last * ((config.vpp or 1) - (stage == config.pp - 1))
    return in_flight * layers + max(found.recomputed + pair, output + last) + waiting


PIPELINES: dict[str, dict[str, Any]] = {
    "1F1B": {"num_layers": 4, "pp": 2, "gbsz": 8},
    "1F1B, dense, full": DENSE | {"num_layers": 4, "pp": 2, "gbsz": 8, "recompute": "full"},
    "1F1B, on the host": {"num_layers": 4, "pp": 2, "gbsz": 8, "offload_modules": "attention,experts"},
    "interleaved, on the host": {
        "num_layers": 4,
        "pp": 2,
        "vpp": 2,
        "gbsz": 8,
        "offload_modules": "attention,experts",
    },
    "interleaved": {"num_layers": 4, "pp": 2, "vpp": 2, "gbsz": 8},
    "interleaved, few": {"num_layers": 4, "pp": 2, "vpp": 2, "gbsz": 4},
}


@cache
def saved(num_ranks: int, is_slow: bool) -> list[dict[str, tuple[int, int]]]:
    """By rank, of all jobs for so many that are slow or are not."""
    jobs = MODELS if num_ranks == 1 else LAYOUTS | PIPELINES
    jobs = {name: settings for name, settings in jobs.items() if (name in SLOW) == is_slow}
    # those of one layout after each other, see `in_turn`
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp")
    jobs = dict(sorted(jobs.items(), key=lambda job: [job[1].get(size, 1) for size in sizes]))
    ports = [free_port() for _ in jobs]
    ranks = run_on_ranks(num_ranks, saved_on_rank, list(jobs.values()), ports, join=False, timeout=400)
    return [dict(zip(jobs, rank, strict=True)) for rank in ranks]


CASES = [
    *((settings, name, 1, 0) for name, settings in MODELS.items()),
    *((settings, name, 2, 0) for name, settings in LAYOUTS.items()),
    *((settings, name, 2, rank) for rank in (0, 1) for name, settings in PIPELINES.items()),
]


@pytest.mark.parametrize(
    ("settings", "name", "num_ranks", "rank"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] in SLOW)) for case in CASES],
)
def test_saved_bytes(settings, name, num_ranks, rank):
    """Rank 1 is that of the second stage."""
    peak, left = saved(num_ranks, name in SLOW)[rank][name]
    by_module = settings.get("recompute_modules") or settings.get("offload_modules")
    limit = OF_RECOMPUTED if by_module else LIMIT
    assert expected(of_settings(settings, num_ranks), rank) == pytest.approx(peak, rel=limit)
    assert left < 0.01 * peak
