"""The experts of one rank, with one weight tensor per projection. Shape suffixes: see `moe_exp.layers`."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_exp.layers import activations
from moe_exp.layers.dispatcher import Dispatched, RoutedTokens
from moe_exp.layers.dispatcher.row_order import RowOrder, order_by_expert, slots_of
from moe_exp.layers.experts.fused import fused_experts
from moe_exp.layers.experts.grouped_gemm import (
    BACKENDS,
    BY_SPLITS,
    FUSED,
    PACKAGES,
    check_fp8_kernels,
    check_installed,
    fused_problem,
)
from moe_exp.layers.experts.loop import expert_loop
from moe_exp.layers.kernels.slot_sort import slot_sort


def _check_activation(name: str) -> None:
    if name not in activations.ACTIVATIONS:
        fix = f"use one of {', '.join(activations.ACTIVATIONS)}"
        raise ValueError(f"activation={name}: unknown activation. Fix: {fix}.")


class Experts(nn.Module):
    """y_r = (act(x_r W1^T + b1) * w_r) W2^T + w_r b2 for each row r with router weight w_r.

    The router weight is applied before W2, so the router's gradient can be computed without the experts'
    outputs. The code paths are:

        backend              input                        function
        triton               Dispatched or RoutedTokens   fused.py: Triton kernels that gather the rows
        loop, on a CPU       Dispatched or RoutedTokens   loop.py: one expert at a time, in the CPU's cache
        others, loop on GPU  Dispatched                   grouped GEMM, weighted activation, grouped GEMM

    Weights are in PyTorch's (out, in) order: `weight1` [L, 2F or F, D], gate half first; `weight2` [L, D, F];
    if `bias` is set, also `bias1` [L, 2F or F] and `bias2` [L, D / etp_size].

    Args:
        ffn_size: F on this rank (width of an expert / expert tensor parallel size).
        backend: a name in grouped_gemm.BACKENDS or FUSED.
        bias: add a bias after each projection. The second bias is also multiplied by the router
            weight, so that padding rows remain zero.
        etp_rank, etp_size: rank in the expert tensor parallel group, and size of the group. Each rank stores
            D / etp_size columns of the second bias and adds them to its partial sum.
        recompute_activation: recompute the input of the second GEMM in backward, as fused.py and loop.py
            always do.
        recompute_hidden: also recompute the result of the first GEMM.
        adds_to_main_grad: the `triton` backend adds weight gradients to Megatron's `main_grad`, see fused.py.
        fp8: the `triton` backend computes its matrix products in e4m3, see kernels/fp8.

    Raises:
        ValueError: if the activation or the backend is unknown, the backend cannot run, or the ranks cannot
            split the bias evenly.
    """

    def __init__(
        self, *, num_local_experts: int, hidden_size: int, ffn_size: int, activation: str, backend: str,
        bias: bool = False, etp_rank: int = 0, etp_size: int = 1, recompute_activation: bool = False,
        recompute_hidden: bool = False, adds_to_main_grad: bool = False, fp8: bool = False,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        _check_activation(activation)
        if bias and hidden_size % etp_size:
            rule = f"with biases, it must be a multiple of the expert tensor parallel size {etp_size}"
            raise ValueError(f"hidden_size={hidden_size}: {rule}. Fix: change ETP, or set bias=False.")
        if backend not in FUSED and backend not in BACKENDS:
            fix = f"use one of {', '.join((*FUSED, *BACKENDS))}, or the result of grouped_gemm.choose_backend"
            raise ValueError(f"expert_backend={backend}: unknown backend. Fix: {fix}.")
        if backend in FUSED and (rule := fused_problem(dtype=dtype)):
            raise ValueError(f"expert_backend={backend}: {rule}. Fix: use another backend.")
        if backend in PACKAGES:
            check_installed(backend)
        if fp8:
            check_fp8_kernels(backend, device)
        self.activation, self.gated, self.fp8 = activation, activations.ACTIVATIONS[activation].gated, fp8
        self.backend, self.recompute_activation = backend, recompute_activation
        self.recompute_hidden = recompute_hidden
        self.adds_to_main_grad = adds_to_main_grad
        self.grouped_gemm = None if backend in FUSED else BACKENDS[backend]  # not used by loop.py
        width, part = ffn_size * (2 if self.gated else 1), hidden_size // etp_size
        self.bias2_start = etp_rank * part

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *sizes, dtype=dtype, device=device))

        self.weight1, self.weight2 = empty(width, hidden_size), empty(hidden_size, ffn_size)
        self.bias1: nn.Parameter | None = empty(width) if bias else None
        self.bias2: nn.Parameter | None = empty(part) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initializes weights and biases."""
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Dispatched | RoutedTokens) -> Tensor:
        """For Dispatched, each row's weighted output [R, D]; for RoutedTokens, the sum per token [T, D]."""
        # The only entry point, so that hooks of wrappers run (Megatron's overlapped parameter gather, FSDP2).
        if not isinstance(inputs, RoutedTokens):
            return self._of_rows(inputs)
        x_TD, decision = inputs.x_TD, inputs.decision
        weights_TK, num_experts = decision.weights_TK, self.weight1.size(0)
        if self.backend in FUSED:
            slot_N, row_N, offsets_L1 = slot_sort(decision.expert_TK, num_experts, decision.kept_TK)
            places = {"slot_R": slot_N, "row_TK": row_N.view(decision.expert_TK.shape)}
            return self._fused(x_TD, weights_TK, offsets_L1, **places)
        slots = slots_of(decision, num_experts)
        order, counts_E, _ = order_by_expert(**slots, rows_per_expert=inputs.rows_per_expert)
        run = partial(self._loop, counts_L=counts_E, order=order)
        return self._recomputed(run, x_TD, order.weights(weights_TK))

    @property
    def needs_padding(self) -> bool:
        """Whether static shapes require padding of each expert's rows."""
        return self.backend not in FUSED

    def takes_tokens(self, x: Tensor, *, few_kept: bool = False) -> bool:
        """Whether `forward` accepts RoutedTokens on `x`'s device; `few_kept`: whether few slots are used."""
        # Fused experts do not wait for the number of kept slots and allocate a row for every slot. That would
        # waste memory if few are kept.
        return (self.backend in FUSED and not few_kept) or self._is_loop_on_cpu(x)

    def _of_rows(self, dispatched: Dispatched) -> Tensor:
        rows_RD, weights_R = dispatched.rows_RD, dispatched.weights_R
        counts_L, splits = dispatched.tokens_per_expert_L, dispatched.splits
        if self.grouped_gemm is None:
            offsets_L1 = nn.functional.pad(counts_L.cumsum(0, dtype=torch.int32), (1, 0))
            return self._fused(rows_RD, weights_R, offsets_L1)
        if self._is_loop_on_cpu(rows_RD):
            return self._recomputed(partial(self._loop, counts_L=counts_L), rows_RD, weights_R)
        if splits is None and self.backend in BY_SPLITS:
            splits = tuple(counts_L.tolist())  # once for both GEMMs
        run = partial(self._by_grouped_gemm, counts_L=counts_L, splits=splits)
        return self._recomputed(run, rows_RD, weights_R)

    def _recomputed(self, run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights_R: Tensor) -> Tensor:
        """Calls `run(x, weights_R)`; if `recompute_hidden` is set, backward calls `run` again."""
        if not (self.recompute_hidden and torch.is_grad_enabled()):
            return run(x, weights_R)
        return cast(Tensor, checkpoint(run, x, weights_R, use_reentrant=False, preserve_rng_state=False))

    def _by_grouped_gemm(
        self, rows_RD: Tensor, weights_R: Tensor, counts_L: Tensor, splits: tuple[int, ...] | None
    ) -> Tensor:
        assert self.grouped_gemm is not None
        hidden_RW = self.grouped_gemm(rows_RD, self.weight1.transpose(1, 2), counts_L, splits)
        if self.bias1 is not None:
            hidden_RW = hidden_RW + _BiasOfRows.apply(self.bias1, counts_L, rows_RD.size(0))
        active_RF = activations.differentiable_weighted_activation(hidden_RW, weights_R, self.activation)
        with self._recomputing(active_RF, hidden_RW, weights_R):
            output_RD = self.grouped_gemm(active_RF, self.weight2.transpose(1, 2), counts_L, splits)
        if (bias2_LD := self._whole_bias2()) is None:
            return output_RD
        bias_RD = _BiasOfRows.apply(bias2_LD, counts_L, rows_RD.size(0))
        return output_RD + bias_RD * weights_R.unsqueeze(1).to(bias_RD.dtype)

    def _whole_bias2(self) -> Tensor | None:
        """The second bias [L, D], with zeros in the columns that other ranks store."""
        if self.bias2 is None:
            return None
        after = self.weight2.size(1) - self.bias2_start - self.bias2.size(1)
        return nn.functional.pad(self.bias2, (self.bias2_start, after))

    def _fused(self, x: Tensor, weights: Tensor, offsets_L1: Tensor, **places: Tensor) -> Tensor:
        parameters = self.weight1, self.weight2, self.bias1, self._whole_bias2()
        return fused_experts(
            x, weights, offsets_L1, *parameters, **places, activation=self.activation, fp8=self.fp8,
            adds_to_main_grad=self.adds_to_main_grad, recompute_hidden=self.recompute_hidden,
        )  # fmt: skip

    def _is_loop_on_cpu(self, x: Tensor) -> bool:
        return self.backend == "loop" and x.device.type == "cpu"

    def _loop(self, x: Tensor, weights_R: Tensor, counts_L: Tensor, order: RowOrder | None = None) -> Tensor:
        parameters = self.weight1, self.weight2, self.bias1, self.bias2, self.bias2_start
        options: dict[str, Any] = {"activation": self.activation, "order": order}
        return expert_loop(x, weights_R, *parameters, rows_per_expert_L=counts_L, **options)

    def _recomputing(self, active_RF: Tensor, hidden_RW: Tensor, weights_R: Tensor) -> Any:
        """A context for the second GEMM: if `recompute_activation` is set, `active_RF` is not saved."""
        if not self.recompute_activation or torch.compiler.is_compiling():  # the compiler decides itself
            return nullcontext()
        source_RW, factor_R1 = hidden_RW.detach(), weights_R.detach().to(hidden_RW.dtype).unsqueeze(1)
        address, shape, name = active_RF.data_ptr(), active_RF.shape, self.activation

        def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
            # Identified by address and shape. A grouped GEMM that saves a copy would not be noticed here; a
            # test measures the saved bytes with the `torch` backend.
            if saved.numel() == 0 or saved.data_ptr() != address or saved.shape != shape:
                return saved
            return lambda: activations.weighted_activation(source_RW, factor_R1, name)

        return torch.autograd.graph.saved_tensors_hooks(
            pack, lambda saved: saved() if callable(saved) else saved
        )


class SharedExpert(nn.Module):
    """y = (act(x W1) W2) * g; with a gate (Qwen2-MoE, arXiv:2407.10671), g = sigmoid(x w_g), otherwise g = 1.

    The shared expert of DeepSeekMoE (arXiv:2401.06066), for use outside Megatron. Inside Megatron, use
    Megatron's SharedExpertMLP, which supports tensor parallelism. Weights are in PyTorch's (out, in) order:
    `weight1` [2F or F, D], gate half first; `weight2` [D, F]; `gate_weight` [1, D].
    """

    def __init__(
        self, *, hidden_size: int, ffn_size: int, activation: str = "swiglu", gate: bool = False,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        _check_activation(activation)
        self.activation = activation
        width = ffn_size * (2 if activations.ACTIVATIONS[activation].gated else 1)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight1 = nn.Parameter(torch.empty(width, hidden_size, **options))
        self.weight2 = nn.Parameter(torch.empty(hidden_size, ffn_size, **options))
        self.gate_weight = nn.Parameter(torch.empty(1, hidden_size, **options)) if gate else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initializes the weights."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the shared expert: [..., D] to [..., D]."""
        hidden = activations.activate(nn.functional.linear(x, self.weight1), self.activation)
        y = nn.functional.linear(hidden, self.weight2)
        return y if self.gate_weight is None else y * torch.sigmoid(nn.functional.linear(x, self.gate_weight))


class _BiasOfRows(torch.autograd.Function):
    """Expands biases from [L, F] to [R, F]: each row gets the bias of its expert."""

    @staticmethod
    def forward(ctx: Any, bias_LF: Tensor, counts_L: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(counts_L)
        return bias_LF.repeat_interleave(counts_L, dim=0, output_size=num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (counts_L,) = ctx.saved_tensors
        # Summed in fp32 per expert: index_add_ uses atomics on a GPU, which are not deterministic.
        grad_RF = grads[0] if grads[0].dtype == torch.float64 else grads[0].float()
        sums_LF = torch.segment_reduce(grad_RF, "sum", lengths=counts_L, axis=0, unsafe=True, initial=0)
        return sums_LF.to(grads[0].dtype), None, None
