"""Expert activations, with and without the router weight. Shape suffixes: see `moe_exp.layers`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]
QUICK = 1.702  # quick_gelu's factor inside the sigmoid


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, So et al. 2021, Primer (arXiv:2109.08668)."""
    return torch.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), Hendrycks and Gimpel 2016, GELU (arXiv:1606.08415)."""
    return x * torch.sigmoid(QUICK * x)


class Activation(NamedTuple):
    """Computes function(h) or, if `gated`, function(gate) * (up + offset) with h [..., 2F] = (gate, up).

    With a `limit`, `gate` is first clamped to at most `limit`, and `up` to the range [-limit, limit].
    """

    # In Megatron: activation_func, gated_linear_unit, activation_func_clamp_value and glu_linear_offset.
    function: Function
    gated: bool
    limit: float | None = None
    offset: float = 0.0

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Splits `hidden` into gate and up [..., F], clamps both, and returns (gate, up + `offset`)."""
        gate, up = hidden.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up + self.offset if self.offset else up


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(nn.functional.silu, gated=True),
    "clamped_swiglu": Activation(quick_gelu, gated=True, limit=7.0, offset=1.0),  # gpt-oss, arXiv:2508.10925
    "geglu": Activation(nn.functional.gelu, gated=True),
    "gelu": Activation(nn.functional.gelu, gated=False),
    "squared_relu": Activation(squared_relu, gated=False),
}


def activate(hidden: Tensor, name: str) -> Tensor:
    """Applies the activation `name`. Input: [..., 2F] if gated, else [..., F]. Result: [..., F]."""
    activation = ACTIVATIONS[name]
    if not activation.gated:
        return activation.function(hidden)
    gate, up = activation.halves(hidden)
    return activation.function(gate) * up


# Computes an input's gradient from the result's gradient and the input, and writes it to the last argument.
_BACKWARD: dict[Function, Callable[[Tensor, Tensor, Tensor], Any]] = {
    nn.functional.silu: lambda grad, x, out: torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out),
    nn.functional.gelu: lambda grad, x, out: torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=out),
    squared_relu: lambda grad, x, out: torch.mul(grad, torch.relu(x).mul_(2), out=out),
    quick_gelu: lambda grad, x, out: torch.mul(
        grad, (s := torch.sigmoid(QUICK * x)) * (1 + QUICK * x * (1 - s)), out=out
    ),
}


def weighted_activation(hidden_RF: Tensor, weights_R1: Tensor, name: str) -> Tensor:
    """Multiplies the result of `activate` by the router weights. Returns a new tensor, without autograd.

    Args:
        hidden_RF: output of the first projection, [R, 2F] for gated activations, else [R, F].
        weights_R1: router weights in the dtype of `hidden_RF`.
    """
    activation = ACTIVATIONS[name]
    if not activation.gated:
        return activation.function(hidden_RF).mul_(weights_R1)
    gate_RF, up_RF = activation.halves(hidden_RF)
    return activation.function(gate_RF).mul_(up_RF).mul_(weights_R1)


def weighted_activation_backward(
    grad_RF: Tensor, hidden_RF: Tensor, weights_R1: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of the inputs of `weighted_activation`.

    Returns:
        The gradient of `hidden_RF`, the gradient of the weights [R], and the result of `activate`.
    """
    function, gated, limit, _ = ACTIVATIONS[name]
    gate_RF, up_RF = ACTIVATIONS[name].halves(hidden_RF) if gated else (hidden_RF, None)
    active_RF = function(gate_RF)
    product_RF = active_RF if up_RF is None else active_RF * up_RF
    dweights_R = (grad_RF * product_RF).sum(dim=1)
    dproduct_RF = grad_RF * weights_R1
    dhidden_RF = torch.empty_like(hidden_RF)
    if up_RF is None:
        _BACKWARD[function](dproduct_RF, gate_RF, dhidden_RF)
    else:
        dgate_RF, dup_RF = dhidden_RF.chunk(2, dim=1)
        torch.mul(dproduct_RF, active_RF, out=dup_RF)
        _BACKWARD[function](dproduct_RF.mul_(up_RF), gate_RF, dgate_RF)
        if limit is not None:
            gate_RF, up_RF = hidden_RF.chunk(2, dim=1)
            dgate_RF.masked_fill_(gate_RF > limit, 0)
            dup_RF.masked_fill_(up_RF.abs() > limit, 0)
    return dhidden_RF, dweights_R, product_RF


def differentiable_weighted_activation(hidden_RF: Tensor, weights_R: Tensor, name: str) -> Tensor:
    """Differentiable `weighted_activation`. Saves only its inputs for backward; their dtypes may differ."""
    # torch.compile gets plain operations, which it fuses by itself.
    if not torch.compiler.is_compiling():
        return _WeightedActivation.apply(hidden_RF, weights_R, name)
    return activate(hidden_RF, name) * weights_R.to(hidden_RF.dtype).unsqueeze(1)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RF: Tensor, weights_R: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(hidden_RF, weights_R)
        ctx.name = name
        return weighted_activation(hidden_RF, weights_R.to(hidden_RF.dtype).unsqueeze(1), name)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_RF, weights_R = ctx.saved_tensors
        weights_R1 = weights_R.to(hidden_RF.dtype).unsqueeze(1)
        dhidden_RF, dweights_R, _ = weighted_activation_backward(grads[0], hidden_RF, weights_R1, ctx.name)
        return dhidden_RF, dweights_R.to(weights_R.dtype), None
