"""Layer features that Megatron lacks: norms after attention and MLP (OLMo 2, arXiv:2501.00656, section 3.2);
attention and MLP in parallel (GPT-J, Cohere2); constant factors on embeddings, residuals and logits
(Granite 3.0); on a GPU, one kernel that computes both the residual sum after attention and its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.self_test import KernelCheck, case_of, compare
from moe_exp.layers.megatron.attention import Norm

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer


class ResidualAdd(nn.Module):
    """Computes residual + multiplier * Norm(result) after attention or MLP; replaces Megatron's
    bias-dropout-add (`*_bda`).

    Args:
        norm: class of the norm, or IdentityOp for no norm.
        multiplier: factor on the result.
    """

    def __init__(self, config: Any, norm: type, multiplier: float):
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.multiplier = multiplier

    def forward(self, training: bool, is_fused: bool) -> Callable[..., Tensor]:
        """Returns the function f((result, bias or None), residual, dropout) for tensors [S, B, D]."""
        return partial(self._add, get_bias_dropout_add(training, is_fused))

    def _add(
        self, add: Any, result: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        x, bias = result
        x = self.norm(x if bias is None else x + bias)
        x = x if self.multiplier == 1 else x * self.multiplier
        added: Tensor = add((x, None), residual, dropout)
        return added


class ParallelLayer(TransformerLayer):  # type: ignore[misc]
    """TransformerLayer that computes x + attention(n) + MLP(n), where n = norm(x)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._normalized: list[Tensor] = []
        self.input_layernorm.register_forward_hook(self._keep)
        # Megatron adds attention to x before this norm, an IdentityOp.
        self.pre_mlp_layernorm.register_forward_hook(self._take)

    def _keep(self, norm: nn.Module, args: tuple[Tensor, ...], normalized: Tensor) -> None:
        self._normalized.append(normalized)

    def _take(self, norm: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return self._normalized.pop()


def change_residuals(spec: ModuleSpec, config: Any, *, placement: str, multiplier: float) -> None:
    """Changes the spec of a transformer layer for NORM_PLACEMENT and RESIDUAL_MULTIPLIER.

    In checkpoints, norms after attention and MLP are named `post_self_attn_layernorm` and
    `post_mlp_layernorm`.
    """
    parts = spec.submodules
    both = ("self_attn", "mlp")
    after = {"post": both, "around": both, "around_moe": ("mlp",), "pre": (), "parallel": ()}[placement]
    if placement == "post":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if placement == "parallel":
        spec.module, parts.pre_mlp_layernorm = ParallelLayer, IdentityOp
    for name in both if multiplier != 1 else after:
        params = {"config": config, "norm": Norm if name in after else IdentityOp, "multiplier": multiplier}
        setattr(parts, f"{name}_bda", ModuleSpec(module=ResidualAdd, params=params))
        parts.sharded_state_dict_keys_map[f"{name}_bda.norm."] = f"post_{name}_layernorm."


def scale_ends(chunk: Any, *, embedding: float, logits: float) -> None:
    """Multiplies a model chunk's embeddings by `embedding`, and divides its logits by `logits`."""
    if embedding != 1 and hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(lambda module, args, embedded: embedded * embedding)
    if logits != 1 and chunk.post_process:
        # The input of the output layer is divided, because CROSS_ENTROPY=linear has no logits.
        chunk.output_layer.register_forward_pre_hook(lambda module, args: (args[0] / logits, *args[1:]))


def change_norms(chunk: Any, *, qk_epsilon: float, has_bias: bool) -> None:
    """Sets the epsilon of the query and key norms to `qk_epsilon` (0: no change). With multi-latent
    attention, these are the norms of the compressed vectors. Removes the biases of LayerNorms if `has_bias`
    is False.
    """
    of_qk = ("q_layernorm", "k_layernorm", "kv_layernorm")
    for name, module in chunk.named_modules():
        if qk_epsilon and name.endswith(of_qk) and hasattr(module, "eps"):
            module.eps = qk_epsilon
        if not has_bias and isinstance(module, nn.LayerNorm):
            module.register_parameter("bias", None)


def choose_norm(device_type: str, *, problem: str = "", failure: str = "") -> tuple[str, str]:
    """Chooses the norm implementation; returns its name and the reason.

    Args:
        problem: why the kernel does not support the model's settings, see `sum_problem`.
        failure: why the kernel must not run, see `launch.failure_of`.
    """
    reason = f"torch.nn.RMSNorm and LayerNorm, with sequence parallelism, on {device_type}"
    if device_type == "cpu":
        return "torch", reason
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):
        reason += f"; torch {torch.__version__} has no fused RMSNorm kernel"
    if without := failure or problem or launch.missing():
        return "torch", f"{reason}; no kernel for the sum after attention and its norm: {without}"
    return "triton", f"one kernel for the sum after attention and its norm; others: {reason}"


class SumAndNorm:
    """Computes the residual sum after a layer's attention and the norm of this sum in one kernel."""

    def __init__(self, layer: TransformerLayer):
        self._norm = layer.pre_mlp_layernorm
        self._normalized: list[Tensor] = []
        layer.self_attn_bda, self._norm.forward = self._function, self._forward

    def _function(self, training: bool, is_fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, result: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        # A call of the module, whose hooks wait until its weight is gathered (OVERLAP).
        total, normalized = self._norm(result[0], residual)
        self._normalized.append(normalized)
        return total

    def _forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:  # called by the layer with the sum
            return self._normalized.pop()
        return SumNorm.apply(x, residual, self._norm.weight, self._norm.eps)


class SumNorm(torch.autograd.Function):
    """Maps (x, residual, weight, epsilon) to the sum x + residual and the sum's RMSNorm; see `sum_norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total, normalized, scale = sum_norm(x, residual, weight, epsilon)
        ctx.save_for_backward(total, scale, weight)
        return total, normalized

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dx, dweight = sum_norm_gradient(*grads, *ctx.saved_tensors)
        return dx, dx, dweight, None


@jit
def _kernel(
    x, residual, weight, total, normalized, scale, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one row."""
    columns = tl.arange(0, BLOCK)
    is_column, row = columns < WIDTH, tl.program_id(0).to(tl.int64)
    places = row * WIDTH + columns
    a = tl.load(x + places, mask=is_column, other=0.0).to(tl.float32)
    b = tl.load(residual + places, mask=is_column, other=0.0).to(tl.float32)
    rounded = (a + b).to(total.dtype.element_ty)  # the norm is that of the stored sum
    tl.store(total + places, rounded, mask=is_column)
    wide = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    tl.store(scale + row, factor)
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normalized + places, (wide * factor * w).to(normalized.dtype.element_ty), mask=is_column)


@jit
def _gradient_kernel(
    dtotal, dnormalized, total, scale, weight, dx, partial_sums, num_rows, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes every num_programs-th row and adds up the weight's gradient over its rows."""
    first, columns = tl.program_id(0), tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(first, num_rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * WIDTH + columns
        factor = tl.load(scale + row)
        unit = tl.load(total + places, mask=is_column, other=0.0).to(tl.float32) * factor
        dy = tl.load(dnormalized + places, mask=is_column, other=0.0).to(tl.float32)
        dw += dy * unit
        dy *= w
        through_norm = (dy - unit * (tl.sum(dy * unit, 0) / WIDTH)) * factor
        beside_norm = tl.load(dtotal + places, mask=is_column, other=0.0).to(tl.float32)
        tl.store(dx + places, (through_norm + beside_norm).to(dx.dtype.element_ty), mask=is_column)
    tl.store(partial_sums + first * WIDTH + columns, dw, mask=is_column)


def sum_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return total, (wide * scale * weight).to(x.dtype), scale.squeeze(-1)


def _outputs(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@launch.compilable("sum_norm", _outputs, twin=sum_norm_torch, takes_fp64=False)
def sum_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of `x` and `residual`, both [..., D], and the RMSNorm of the sum with `weight` [D].
    Both results have the inputs' dtype. The third result is each row's normalization factor (without the
    weight), fp32 [...].
    """
    x, residual, weight = launch.contiguous(x, residual, weight)
    total, normalized, scale = _outputs(x)
    if x.numel():
        sizes = _sizes(x.size(-1))
        _kernel[(scale.numel(),)](x, residual, weight, total, normalized, scale, epsilon, **sizes)
    return total, normalized, scale


def sum_norm_gradient_torch(
    dtotal: Tensor, dnormalized: Tensor, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    unit = total.to(scale.dtype) * scale.unsqueeze(-1)
    dy = dnormalized.to(scale.dtype)
    dweight, dy = (dy * unit).flatten(0, -2).sum(0), dy * weight
    dx = (dy - unit * (dy * unit).mean(-1, keepdim=True)) * scale.unsqueeze(-1) + dtotal
    return dx.to(total.dtype), dweight.to(weight.dtype)


@launch.compilable(
    "sum_norm_gradient",
    lambda dtotal, dnormalized, total, scale, weight: (torch.empty_like(total), torch.empty_like(weight)),
    twin=sum_norm_gradient_torch, takes_fp64=False,
)  # fmt: skip
def sum_norm_gradient(
    dtotal: Tensor, dnormalized: Tensor, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `sum_norm`'s gradients: one for `x` and `residual` (they are equal), and one for `weight`."""
    dtotal, dnormalized, total, weight = launch.contiguous(dtotal, dnormalized, total, weight)
    dx, num_rows, width = torch.empty_like(total), scale.numel(), weight.numel()
    if num_rows == 0:
        return dx, torch.zeros_like(weight)
    programs = launch.num_programs(total, num_rows, per_processor=4, takes_all=True)
    sums = scale.new_empty(programs, width)
    _gradient_kernel[(programs,)](
        dtotal, dnormalized, total, scale, weight, dx, sums, num_rows, **_sizes(width)
    )
    return dx, sums.sum(0).to(weight.dtype)


def _sizes(width: int) -> dict[str, int]:
    block = launch.power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def check_sum_norm(dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    """Compares both kernels with their plain-torch references, at a width that is not a power of 2."""
    generator = torch.Generator(device).manual_seed(0)
    x, residual, dtotal, dnormalized = torch.randn(4, 37, 640, generator=generator, device=device).to(dtype)
    weight = torch.rand(640, generator=generator, device=device).to(dtype) + 0.5
    total, _, scale = sum_norm_torch(x, residual, weight, 1e-5)
    shape = "37 rows of 640"
    yield compare(case_of(sum_norm, dtype, shape, x, residual, weight, 1e-5), device)
    of_gradient = dtotal, dnormalized, total, scale, weight
    yield compare(case_of(sum_norm_gradient, dtype, shape, *of_gradient), device)
