"""Whose MoE layers `bench_gpu_layer.py` compares, ours among them: from weights to a function of tokens and
routing.

What is called was read in the sources of the packages: transformers 5.23, liger-kernel 0.8.5, sonic-moe
0.1.2.post1, scattermoe's main branch, Transformer Engine 2.x; grouped_gemm is called as EXPERT_BACKEND calls
it (`moe_exp.layers.experts.grouped_gemm`). Each has the parameters that it would have in its own model:
those of Transformer Engine are one per expert, of three products gate and up apart.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_floors import Shape
from gpu_inputs import Leaves, Routing, Weights, gate_and_up, one_per_expert, whole
from torch import Tensor, nn
from torch.nn.functional import silu

from moe_exp.layers.dispatcher import Dispatched, DispatchRecord, LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.experts.grouped_gemm import BACKENDS, GroupedGemm, choose_backend
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig, RoutingDecision
from moe_exp.layers.router.decision import count_per_expert

Layer = Callable[[Tensor, Routing], Tensor]  # x [T, D] to y [T, D]


@dataclass(frozen=True)
class Provider:
    """One way to compute the layer.

    Args:
        build: makes the function for a shape from `leaves`, which it must use as they are.
        why_not: why it cannot run on a device in a dtype; empty where it can.
        leaves: the weights as its parameters.
        sorts: brings rows in order by expert even where they arrive so, as it has no other way in.
        note: for the report, after `build`.
    """

    build: Callable[[Shape, Sequence[nn.Parameter]], Layer]
    why_not: Callable[[torch.device, torch.dtype], str]
    leaves: Callable[[Weights], Leaves] = whole
    sorts: bool = False
    note: Callable[[], str] = str


# Ours


class _GivenRouting(MoELayer):
    """Our layer with the router's decision given from outside, and without the losses, which the peers do not
    compute.
    """

    routing: Routing

    def route(
        self, x_TD: Tensor, padding_mask_T: Tensor | None = None, *, shape: torch.Size | None = None
    ) -> RoutingDecision:
        expert_TK, weights_TK = self.routing.expert_TK, self.routing.weights_TK
        unused = weights_TK.new_empty(0)  # the scores and logits are for the losses
        counts_E = count_per_expert(expert_TK.flatten(), self.router.config.num_experts)
        return RoutingDecision(expert_TK, weights_TK, unused, unused, counts_E)

    def auxiliary_loss(self, decision: RoutingDecision, shape: torch.Size) -> None:
        return None


def _ours(backend: str, *, sorts: bool = False) -> Provider:
    def build(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
        with torch.device("meta"):
            experts = Experts(
                num_local_experts=shape.experts,
                hidden_size=shape.hidden,
                ffn_size=shape.ffn,
                activation="swiglu",
                backend=backend,
            )
        experts.weight1, experts.weight2 = parameters
        if shape.arrives and not sorts:
            return lambda x_RD, routing: experts(_arrived(x_RD, routing))
        router = Router(RouterConfig(shape.hidden, shape.experts, shape.topk))
        layer = _GivenRouting(
            router=router, dispatcher=LocalDispatcher(shape.experts), experts=experts, settings=MoESettings()
        )

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

    return Provider(build, why_not, sorts=sorts)


def _arrived(x_RD: Tensor, routing: Routing) -> Dispatched:
    """Rows as the all-to-all leaves them."""
    return Dispatched(
        x_RD, routing.weights_TK.flatten(), routing.counts_E, DispatchRecord(None), routing.splits
    )


# Plain torch around a grouped GEMM: permute, two or three products, unpermute


def _permuted(
    gemm: GroupedGemm, backend: str, *, leaves: Callable[[Weights], Leaves] = whole, wants_splits: bool = True
) -> Provider:
    def build(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
        *weights1_LDW, weight2_LFD = (weight.transpose(1, 2) for weight in parameters)

        def forward(x_TD: Tensor, routing: Routing) -> Tensor:
            rows_RD, row_N, counts_E = _permute(x_TD, routing, shape)
            splits = _splits(routing, counts_E) if wants_splits else routing.splits
            hidden = [gemm(rows_RD, weight1_LDW, counts_E, splits) for weight1_LDW in weights1_LDW]
            gate_RF, up_RF = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=1)
            return _unpermute(
                gemm(silu(gate_RF) * up_RF, weight2_LFD, counts_E, splits), row_N, routing.weights_TK
            )

        return forward

    return Provider(build, _ours(backend).why_not, leaves)


def _splits(routing: Routing, counts_E: Tensor) -> Sequence[int]:
    """Rows per expert on the host. To be asked for once per forward, not per product: the host waits for the
    device.
    """
    return counts_E.tolist() if routing.splits is None else routing.splits


def _te(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
    """Transformer Engine's GroupedLinear with our weights as its parameters."""
    from transformer_engine.pytorch import GroupedLinear

    options = {"bias": False, "params_dtype": parameters[0].dtype, "device": "meta"}
    up = GroupedLinear(shape.experts, shape.hidden, 2 * shape.ffn, **options)
    down = GroupedLinear(shape.experts, shape.ffn, shape.hidden, **options)
    for index, parameter in enumerate(parameters):
        setattr(up if index < shape.experts else down, f"weight{index % shape.experts}", parameter)

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        rows_RD, row_N, counts_E = _permute(x_TD, routing, shape)
        splits = list(_splits(routing, counts_E))
        gate_RF, up_RF = up(rows_RD, splits).chunk(2, dim=1)
        return _unpermute(down(silu(gate_RF) * up_RF, splits), row_N, routing.weights_TK)

    return forward


def _permute(x_TD: Tensor, routing: Routing, shape: Shape) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows sorted by expert, the row of every slot, and the rows per expert."""
    if shape.arrives:
        return x_TD, None, routing.counts_E
    slot_R = routing.expert_TK.flatten().argsort(stable=True)
    row_N = torch.empty_like(slot_R)
    row_N[slot_R] = torch.arange(slot_R.numel(), device=slot_R.device)
    return (
        x_TD.index_select(0, slot_R // shape.topk),
        row_N,
        count_per_expert(routing.expert_TK.flatten(), shape.experts),
    )


def _unpermute(y_RD: Tensor, row_N: Tensor | None, weights_TK: Tensor) -> Tensor:
    y_ND = y_RD if row_N is None else y_RD.index_select(0, row_N)
    return (y_ND.unflatten(0, weights_TK.shape) * weights_TK.to(y_ND.dtype).unsqueeze(2)).sum(dim=1)


# Other people's layers


def _transformers(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
    """Qwen3's experts (OLMoE's and Mixtral's are the same code) with transformers' `grouped_mm`
    implementation.
    """
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.topk,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = parameters
    return lambda x_TD, routing: experts(x_TD, routing.expert_TK, routing.weights_TK.to(x_TD.dtype))


_liger_configs: list[tuple[int, int]] = []


def _liger(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
    """liger-kernel's fused MoE. It compiles for every shape anew, so its autotune list is cut: two configs
    per matrix product.
    """
    from liger_kernel.ops import fused_moe_kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    if not _liger_configs:
        for kernel in vars(fused_moe_kernels).values():
            if isinstance(configs := getattr(kernel, "configs", None), list):
                kernel.configs = [config for config in configs if _liger_keeps(config)] or configs
                _liger_configs.append((len(kernel.configs), len(configs)))

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        arguments = (x_TD, *parameters, routing.expert_TK.int(), routing.weights_TK)
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
    kept, all_configs = (
        (sum(column) for column in zip(*_liger_configs, strict=True)) if _liger_configs else (0, 0)
    )
    return f"autotune list cut to {kept} of {all_configs} configs"


def _sonic(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
    """sonic-moe with routing from outside, on weights in torch's order: gate half first."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    if "concat_layout" not in inspect.signature(moe_general_routing_inputs).parameters:
        raise RuntimeError("this version interleaves gate and up rows: its weights are others")

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        token_N = torch.arange(shape.tokens, device=x_TD.device, dtype=torch.int32).repeat_interleave(
            shape.topk
        )
        weights1, weights2 = (weight.permute(1, 2, 0) for weight in parameters)
        y_TD, _ = moe_general_routing_inputs(
            x_TD, routing.weights_TK.flatten(), token_N, routing.expert_TK.flatten().int(), weights1, None,
            weights2, None, E=shape.experts, stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=ActivationType.SWIGLU, concat_layout=True,
        )  # fmt: skip
        return y_TD

    return forward


def _scatter(shape: Shape, parameters: Sequence[nn.Parameter]) -> Layer:
    """ScatterMoE's MLP with gate and up halves in our order."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    weight1_LDW, weight2_LFD = (weight.transpose(1, 2) for weight in parameters)

    def forward(x_TD: Tensor, routing: Routing) -> Tensor:
        order = flatten_sort_count(routing.expert_TK, num_experts=shape.experts)
        gate_RF, up_RF = parallel_linear(x_TD, weight1_LDW, shape.topk, *order, grouped_out=True).chunk(
            2, dim=1
        )
        gates_TK = routing.weights_TK.to(x_TD.dtype)
        return parallel_linear(silu(gate_RF) * up_RF, weight2_LFD, 1, *order, grouped_in=True, gates=gates_TK)

    return forward


# Who can run here


def _needs(
    *modules: str, oldest: tuple[int, int] | None = None
) -> Callable[[torch.device, torch.dtype], str]:
    """`why_not` of a provider that imports `modules`; with `oldest`, the compute capability of the CUDA
    device that it wants.
    """

    def why_not(device: torch.device, dtype: torch.dtype) -> str:
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            return f"{' and '.join(missing)} not installed"
        if oldest is None:
            return ""
        if device.type != "cuda":
            return "needs a CUDA device"
        found = torch.cuda.get_device_capability(device)
        return (
            ""
            if found >= oldest
            else f"needs compute capability {oldest[0]}.{oldest[1]}, this is {found[0]}.{found[1]}"
        )

    return why_not


OURS, OURS_SORTING = "ours", "ours, sorting"
# the second where rows arrive: what peers are compared with that sort such rows again
OUR_KERNELS = (OURS, OURS_SORTING)
PROVIDERS: dict[str, Provider] = {
    OURS: _ours("triton"),
    OURS_SORTING: _ours("triton", sorts=True),
    "ours, torch": _ours("torch"),
    "loop": _permuted(BACKENDS["loop"], "loop"),
    "grouped_mm, 2 products": _permuted(BACKENDS["torch"], "torch", wants_splits=False),
    "grouped_mm, 3 products": _permuted(BACKENDS["torch"], "torch", wants_splits=False, leaves=gate_and_up),
    "transformers": Provider(_transformers, _needs("transformers"), sorts=True),
    "liger": Provider(_liger, _needs("liger_kernel", "triton", oldest=(8, 0)), sorts=True, note=_liger_note),
    "sonic-moe": Provider(_sonic, _needs("sonicmoe", "quack", "cutlass", oldest=(9, 0)), sorts=True),
    "scattermoe": Provider(_scatter, _needs("scattermoe", "triton", oldest=(8, 0)), sorts=True),
    "grouped_gemm": _permuted(BACKENDS["grouped_gemm"], "grouped_gemm"),
    "te": Provider(_te, _ours("te").why_not, one_per_expert),
}
PEERS = [name for name in PROVIDERS if name not in OUR_KERNELS]
