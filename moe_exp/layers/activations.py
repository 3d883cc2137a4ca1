"""Expert activations, and activation times router weight in one step. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, So et al. 2021, Primer (arXiv:2109.08668)."""
    return torch.relu(x).square()


# Name to (function, gated). Gated: the activated first half of a doubled projection times the second half.
ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    "swiglu": (nn.functional.silu, True),
    "geglu": (nn.functional.gelu, True),
    "gelu": (nn.functional.gelu, False),
    "squared_relu": (squared_relu, False),
}


def _silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)


def _gelu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=out)


def _squared_relu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.mul(grad, torch.relu(x).mul_(2), out=out)


_BACKWARD: dict[Activation, Callable[[Tensor, Tensor, Tensor], None]] = {
    nn.functional.silu: _silu_backward,
    nn.functional.gelu: _gelu_backward,
    squared_relu: _squared_relu_backward,
}


def weighted_activation(hidden_RF: Tensor, weights_R1: Tensor, name: str) -> Tensor:
    """act(h) * w in a new tensor, or act(gate) * up * w if the activation is gated. No autograd.

    Args:
        hidden_RF: output of the first projection, [R, 2F] for gated activations, else [R, F].
        weights_R1: router weights in the dtype of `hidden_RF`.
        name: a key of ACTIVATIONS.
    """
    function, gated = ACTIVATIONS[name]
    if not gated:
        return function(hidden_RF).mul_(weights_R1)
    gate_RF, up_RF = hidden_RF.chunk(2, dim=1)
    return function(gate_RF).mul_(up_RF).mul_(weights_R1)


def weighted_activation_backward(
    grad_RF: Tensor, hidden_RF: Tensor, weights_R1: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `weighted_activation` from the same inputs.

    Returns:
        Gradient of `hidden_RF`, gradient of the weights [R], and the (new) activation without the weight.
    """
    function, gated = ACTIVATIONS[name]
    gate_RF, up_RF = hidden_RF.chunk(2, dim=1) if gated else (hidden_RF, None)
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
    return dhidden_RF, dweights_R, product_RF


def differentiable_weighted_activation(hidden_RF: Tensor, weights_R: Tensor, name: str) -> Tensor:
    """`weighted_activation` with autograd; saves only its inputs. The dtypes may differ.

    Under torch.compile it is plain operations, which the compiler fuses.
    """
    if not torch.compiler.is_compiling():
        return _WeightedActivation.apply(hidden_RF, weights_R, name)
    function, gated = ACTIVATIONS[name]
    gate_RF, up_RF = hidden_RF.chunk(2, dim=1) if gated else (hidden_RF, None)
    product_RF = function(gate_RF) if up_RF is None else function(gate_RF) * up_RF
    return product_RF * weights_R.to(hidden_RF.dtype).unsqueeze(1)


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
