"""The activations of the experts and their derivatives as parts of kernels, in fp32. Names as in
`moe_exp.layers.activations`.
"""

from __future__ import annotations

from moe_exp.layers.kernels.launch import jit, tl

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476) if tl else None
INV_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327) if tl else None


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """The function on the gate, or on the whole where there is none."""
    if ACTIVATION == "swiglu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "squared_relu":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        y = x * 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
    return y


@jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr):
    """The function and its derivative."""
    if ACTIVATION == "swiglu":
        s = tl.sigmoid(x)
        y = x * s
        dy = s + y * (1.0 - s)
    elif ACTIVATION == "squared_relu":
        positive = tl.maximum(x, 0.0)
        y = positive * positive
        dy = 2.0 * positive
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        y = x * cdf
        dy = cdf + x * tl.exp(-0.5 * x * x) * INV_SQRT_2PI
    return y, dy
