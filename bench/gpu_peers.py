"""Whose MoE layers `bench_gpu_layer.py` compares, ours among them: from weights to a function of tokens and routing.

What is called was read in the sources of the packages: transformers 5.23, liger-kernel 0.8.5, sonic-moe 0.1.2.post1, scattermoe's main
branch; grouped_gemm and Transformer Engine are called as EXPERT_BACKEND calls them (`moe_exp.layers.gemm_packages`).
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_floors import Shape
from gpu_inputs import Routing, Weights
from torch import Tensor, nn
from torch.nn.functional import silu

from moe_exp.layers.capacity import count_per_expert
from moe_exp.layers.dispatcher import Dispatched, DispatchRecord, LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.grouped_gemm import BACKENDS, GroupedGemm, choose_backend
from moe_exp.layers.moe_layer import MoELayer, MoESettings
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision

Layer = Callable[[Tensor, Routing], Tensor]  # x [T, D] to y [T, D]


@dataclass(frozen=True)
class Provider:
    """One way to compute the layer.

    Args:
        build: makes the function for a shape from the weights, which it must use as they are.
        why_not: why it cannot run on a device in a dtype; empty where it can.
        note: for the report, after `build`.
    """

    build: Callable[[Shape, Weights], Layer]
    why_not: Callable[[torch.device, torch.dtype], str]
    note: Callable[[], str] = str


# Ours


class _GivenRouting(MoELayer):
    """Our layer with the router's decision given from outside, and without the losses, which the peers do not compute."""

    routing: Routing

    def route(self, x_TD: Tensor, padding_mask_T: Tensor | None = None, *, shape: torch.Size | None = None) -> RoutingDecision:
        expert_TK, weights_TK = self.routing.expert_TK, self.routing.weights_TK
        unused = weights_TK.new_empty(0)  # the scores and logits are for the losses
        counts_E = count_per_expert(expert_TK.flatten(), self.router.config.num_experts)
        return RoutingDecision(expert_TK, weights_TK, unused, unused, counts_E)

    def auxiliary_loss(self, decision: RoutingDecision, shape: torch.Size) -> None:
        return None


def _ours(backend: str) -> Provider:
    def build(shape: Shape, weights: Weights) -> Layer:
        with torch.device("meta"):
            experts = Experts(
                num_local_experts=shape.experts, hidden_size=shape.hidden, ffn_size=shape.ffn, activation="swiglu", backend=backend
            )
        experts.weight1, experts.weight2 = weights.weight1_LWD, weights.weight2_LDF
        if shape.arrives:
            return lambda x_RD, routing: experts(_arrived(x_RD, routing))
        router = Router(RouterConfig(shape.hidden, shape.experts, shape.topk))
        layer = _GivenRouting(router=router, dispatcher=LocalDispatcher(shape.experts), experts=experts, settings=MoESettings())

        def forward(x_TD: Tensor, routing: Routing) -> Tensor:
            layer.routing = routing
            return layer(x_TD)[0]

        return forward

    def why_not(device: torch.device, dtype: torch.dtype) -> str:
        try:
            choose_backend(backend, device_type=device.type, dtype=dtype)
        except ValueError as error:
            return str(error)
        return ""

    return Provider(build, why_not)


def _arrived(x_RD: Tensor, routing: Routing) -> Dispatched:
    """Rows as the all-to-all leaves them."""
    return Dispatched(x_RD, routing.weights_TK.flatten(), routing.counts_E, DispatchRecord(None), routing.splits)


# Plain torch around a grouped GEMM: permute, two or three products, unpermute


def _permuted(gemm: GroupedGemm, why_not: Callable[[torch.device, torch.dtype], str], *, num_products: int = 2) -> Provider:
    def build(shape: Shape, weights: Weights) -> Layer:
        weight1_LDW, weight2_LFD = weights.weight1_LWD.transpose(1, 2), weights.weight2_LDF.transpose(1, 2)

        def forward(x_TD: Tensor, routing: Routing) -> Tensor:
            rows_RD, row_N, counts_E = _permute(x_TD, routing, shape)
            if num_products == 2:
                gate_RF, up_RF = gemm(rows_RD, weight1_LDW, counts_E, routing.splits).chunk(2, dim=1)
            else:
                gate_RF, up_RF = (gemm(rows_RD, half, counts_E, routing.splits) for half in weight1_LDW.chunk(2, dim=2))
            y_RD = gemm(silu(gate_RF) * up_RF, weight2_LFD, counts_E, routing.splits)
            return _unpermute(y_RD, row_N, routing.weights_TK)

        return forward

    return Provider(build, why_not)


def _permute(x_TD: Tensor, routing: Routing, shape: Shape) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows sorted by expert, the row of every slot, and the rows per expert."""
    if shape.arrives:
        return x_TD, None, routing.counts_E
    slot_R = routing.expert_TK.flatten().argsort(stable=True)
    row_N = torch.empty_like(slot_R)
    row_N[slot_R] = torch.arange(slot_R.numel(), device=slot_R.device)
    return x_TD.index_select(0, slot_R // shape.topk), row_N, count_per_expert(routing.expert_TK.flatten(), shape.experts)


def _unpermute(y_RD: Tensor, row_N: Tensor | None, weights_TK: Tensor) -> Tensor:
    y_ND = y_RD if row_N is None else y_RD.index_select(0, row_N)
    return (y_ND.unflatten(0, weights_TK.shape) * weights_TK.to(y_ND.dtype).unsqueeze(2)).sum(dim=1)


# Other people's layers


def _transformers(shape: Shape, weights: Weights) -> Layer:
    """Qwen3's experts (OLMoE's and Mixtral's are the same code) with transformers' `grouped_mm` implementation."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.ffn, num_experts=shape.experts, num_experts_per_tok=shape.topk
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = weights.weight1_LWD, weights.weight2_LDF
    return lambda x_TD, routing: experts(x_TD, routing.expert_TK, routing.weights_TK.to(x_TD.dtype))


_liger_configs: list[tuple[int, int]] = []


def _liger(shape: Shape, weights: Weights) -> Layer:
    """liger-kernel's fused MoE. It compiles for every shape anew, so its autotune list is cut: two configs per matrix product."""
    from liger_kernel.ops import fused_moe_kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    if not _liger_configs:
        for kernel in vars(fused_moe_kernels).values():
            if isinstance(configs := getattr(kernel, "configs", None), list):
                kernel.configs = [config for config in configs if _liger_keeps(config)] or configs
                _liger_configs.append((len(kernel.configs), len(configs)))

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        arguments = (x_TD, weights.weight1_LWD, weights.weight2_LDF, routing.expert_TK.int(), routing.weights_TK)
        return LigerFusedMoEFunction.apply(*arguments)

    return forward


def _liger_keeps(config: Any) -> bool:
    blocks, shape = config.kwargs, (config.num_warps, config.num_stages)
    if "BLOCK_H" in blocks:  # of the sum over K
        return blocks["BLOCK_H"] == 512 and blocks["BLOCK_K"] == 8 and shape[0] == 4
    if "BLOCK_M" in blocks:  # of the weight gradients
        return blocks["BLOCK_M"] == 128 and blocks["BLOCK_N"] == 128 and blocks["BLOCK_K"] == 32
    return blocks["BLOCK_N"] == 128 and blocks["BLOCK_K"] == 64 and shape in ((4, 3), (8, 3))


def _liger_note() -> str:
    kept, all_configs = (sum(column) for column in zip(*_liger_configs, strict=True)) if _liger_configs else (0, 0)
    return f"autotune list cut to {kept} of {all_configs} configs"


def _sonic(shape: Shape, weights: Weights) -> Layer:
    """sonic-moe with routing from outside, on weights in torch's order: gate half first."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    if "concat_layout" not in inspect.signature(moe_general_routing_inputs).parameters:
        raise RuntimeError("this version interleaves gate and up rows: its weights are others")

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        token_N = torch.arange(shape.tokens, device=x_TD.device, dtype=torch.int32).repeat_interleave(shape.topk)
        weights1, weights2 = weights.weight1_LWD.permute(1, 2, 0), weights.weight2_LDF.permute(1, 2, 0)
        y_TD, _ = moe_general_routing_inputs(
            x_TD, routing.weights_TK.flatten(), token_N, routing.expert_TK.flatten().int(), weights1, None, weights2, None,
            E=shape.experts, stream_id=torch.cuda.current_stream().cuda_stream, activation_type=ActivationType.SWIGLU, concat_layout=True,
        )  # fmt: skip
        return y_TD

    return forward


def _scatter(shape: Shape, weights: Weights) -> Layer:
    """ScatterMoE's MLP with gate and up halves in our order."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    weight1_LDW, weight2_LFD = weights.weight1_LWD.transpose(1, 2), weights.weight2_LDF.transpose(1, 2)

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        order = flatten_sort_count(routing.expert_TK, num_experts=shape.experts)
        gate_RF, up_RF = parallel_linear(x_TD, weight1_LDW, shape.topk, *order, grouped_out=True).chunk(2, dim=1)
        gates_TK = routing.weights_TK.to(x_TD.dtype)
        return parallel_linear(silu(gate_RF) * up_RF, weight2_LFD, 1, *order, grouped_in=True, gates=gates_TK)

    return forward


# Who can run here


def _needs(*modules: str, oldest: tuple[int, int] | None = None) -> Callable[[torch.device, torch.dtype], str]:
    """`why_not` of a provider that imports `modules`; with `oldest`, the compute capability of the CUDA device that it wants."""

    def why_not(device: torch.device, dtype: torch.dtype) -> str:
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            return f"{' and '.join(missing)} not installed"
        if oldest is None:
            return ""
        if device.type != "cuda":
            return "needs a CUDA device"
        found = torch.cuda.get_device_capability(device)
        return "" if found >= oldest else f"needs compute capability {oldest[0]}.{oldest[1]}, this is {found[0]}.{found[1]}"

    return why_not


def _as_backend(name: str) -> Callable[[torch.device, torch.dtype], str]:
    return _ours(name).why_not


OURS = "ours"
PROVIDERS: dict[str, Provider] = {
    OURS: _ours("triton"),
    "ours, torch": _ours("torch"),
    "loop": _ours("loop"),
    "grouped_mm, 2 products": _permuted(BACKENDS["torch"], _as_backend("torch")),
    "grouped_mm, 3 products": _permuted(BACKENDS["torch"], _as_backend("torch"), num_products=3),
    "transformers": Provider(_transformers, _needs("transformers")),
    "liger": Provider(_liger, _needs("liger_kernel", "triton", oldest=(8, 0)), _liger_note),
    "sonic-moe": Provider(_sonic, _needs("sonicmoe", "quack", "cutlass", oldest=(9, 0))),
    "scattermoe": Provider(_scatter, _needs("scattermoe", "triton", oldest=(8, 0))),
    "grouped_gemm": _permuted(BACKENDS["grouped_gemm"], _as_backend("grouped_gemm")),
    "te": _permuted(BACKENDS["te"], _as_backend("te")),
}


def parameters(weights: Weights) -> list[nn.Parameter]:
    return [weights.weight1_LWD, weights.weight2_LDF]
