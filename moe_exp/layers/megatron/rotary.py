"""The rotary embedding (arXiv:2104.09864) in few operations, in the place of Transformer Engine's fused one.

Three each way for queries, and as many for keys. Megatron's own takes about 20 each way for both, a third of
all that a layer without experts starts; on a GPU a small model waits for that.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core.models.common.embeddings import rope_utils


def install() -> bool:
    """Has Megatron call `rotate` where `apply_rope_fusion` is set; False if Transformer Engine is installed,
    whose kernel it calls then.
    """
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate
    return rope_utils.fused_apply_rotary_pos_emb is rotate


def rotate(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of values becomes (a cos - b sin, b cos + a sin).

    Args:
        x: [S, B, H, D].
        angles: [S, 1 or B, 1, P] for the first P of the D values, equal for both of a pair; the others stay.
        interleaved: pairs are neighbours, and not P / 2 apart.
    """
    # Cosine [..., P] and the sine of every pair [..., P / 2]; kept with the angles, which all layers share.
    known = vars(angles).setdefault("cos_and_sin", {})
    if x.dtype not in known:
        # What is made in inference mode could not be used in training.
        with torch.inference_mode(False):
            known[x.dtype] = angles.cos().to(x.dtype), _pairs(angles, interleaved)[0].sin().to(x.dtype)
    return _Rotate.apply(x, *known[x.dtype], interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return first, second


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, ctx.interleaved, sign=-1), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, sign: int) -> Tensor:
    """By the angle, or with sign -1 back."""
    width, out = cos.size(-1), torch.empty_like(x, memory_format=torch.contiguous_format)
    source, turned = x[..., :width], out[..., :width]
    torch.mul(source, cos, out=turned)
    (a, b), (out_a, out_b) = _pairs(source, interleaved), _pairs(turned, interleaved)
    out_a.addcmul_(b, sin, value=-sign)
    out_b.addcmul_(a, sin, value=sign)
    if width < x.size(-1):
        out[..., width:] = x[..., width:]
    return out
