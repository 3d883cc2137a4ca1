"""Rotary embedding (RoPE, arXiv:2104.09864).

Forward and backward each launch one kernel for queries and one for keys.
Shapes: S sequence length, B batch, H heads, D head size, P rotated channels of a head.
"""

# Why not Megatron's: it launches about 20 operations in each direction for queries and keys, a third of all
# launches of a layer without experts, which limits small models on a GPU. Without Triton, ours launches three
# for each.

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.self_test import KernelCheck, case_of, compare

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

_TILE = 1024  # pairs that a program rotates


def install_rotary() -> bool:
    """Makes `apply_rope_fusion` use `rotate`; returns False if Megatron keeps Transformer Engine's kernel."""
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate
    return rope_utils.fused_apply_rotary_pos_emb is rotate


class TwoRotaries(nn.Module):
    """Two rotary embeddings: Megatron's, and a plain one with a different base for sliding-window layers.

    Megatron passes the same angles to every layer, so the angles of both embeddings are concatenated to
    [positions, 1, 1, 2 * P]. Each layer uses one half of them, see `rotate_windows`.
    """

    def __init__(self, rotary: Any, base: float):
        super().__init__()
        num_pairs, device = len(rotary.inv_freq), rotary.inv_freq.device
        other = RotaryEmbedding(
            2 * num_pairs, 1.0, rotary_base=base, cp_group=rotary.cp_group, use_cpu_initialization=True
        )
        other.inv_freq = other.inv_freq.to(device)
        self.rotaries: Any = nn.ModuleList([rotary, other])
        self.get_rotary_seq_len = rotary.get_rotary_seq_len

    def get_emb(self, *args: Any, **options: Any) -> Any:
        """Angles of all positions, not split by context parallelism; with YaRN, also YaRN's factor."""
        return self._joined([rotary.get_emb(*args, **options) for rotary in self.rotaries])

    def forward(self, *args: Any, **options: Any) -> Any:
        """Angles of this rank's positions; with YaRN, also YaRN's factor."""
        return self._joined([rotary(*args, **options) for rotary in self.rotaries])

    def _joined(self, found: list[Any]) -> Any:
        angles, *factor = found[0] if isinstance(found[0], tuple) else (found[0],)
        both = torch.cat([angles, found[1]], -1)
        return (both, *factor) if factor else both


def rotate_windows(chunk: Any, config: Any, base: float, has_window: Sequence[bool]) -> None:
    """Gives each layer whose `has_window` value is True a plain rotary embedding with `base`."""
    chunk.rotary_pos_emb = TwoRotaries(chunk.rotary_pos_emb, base)
    without_yarn = copy.copy(config)  # Megatron's attention multiplies queries and keys by YaRN's factor
    without_yarn.yarn_rotary_scaling_factor = 1.0

    def take_half(index: int, module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        known = vars(angles := options["rotary_pos_emb"])
        if "halves" not in known:  # all layers share them, and `rotate` caches their cosines
            known["halves"] = [half.contiguous() for half in angles.chunk(2, -1)]
        return args, {**options, "rotary_pos_emb": known["halves"][index]}

    for layer in chunk.decoder.layers:
        is_windowed = has_window[layer.layer_number - 1]
        layer.self_attention.register_forward_pre_hook(partial(take_half, int(is_windowed)), with_kwargs=True)
        if is_windowed:
            layer.self_attention.config = without_yarn


def choose_rotary(is_fused: bool, *, device_type: str, failure: str = "") -> tuple[str, str]:
    """Chooses the rotary embedding; returns name and reason. `is_fused`: Megatron's `apply_rope_fusion`."""
    if failure or not is_fused:
        return "megatron", failure or "DOCUMENT_MASK, YaRN or multi-latent attention"
    if device_type == "cpu" or launch.missing():
        return "torch", launch.missing() or "the Triton kernel is for GPUs"
    return "triton", "queries and keys are rotated by one kernel each"


def rotate(x: Tensor, angles: Tensor, *, interleaved: bool = False, use_kernel: bool | None = None) -> Tensor:
    """Rotates each pair (a, b) of values to (a cos - b sin, b cos + a sin).

    Args:
        x: [S, B, H, D].
        angles: [S, 1 or B, 1, P]; both values of a pair have the same angle. `x[..., P:]` is unchanged.
        interleaved: the values of a pair are adjacent; if False, they are P / 2 apart.
        use_kernel: whether to use the kernel (None: on a GPU that runs Triton kernels).
    """
    # Cosine [..., P] and sine of every pair [..., P / 2], cached on the angles, which all layers share.
    known = vars(angles).setdefault("cos_and_sin", {})
    if x.dtype not in known:
        # Tensors created in inference mode could not be used in training.
        with torch.inference_mode(False):
            known[x.dtype] = angles.cos().to(x.dtype), _pairs(angles, interleaved)[0].sin().to(x.dtype)
    in_torch = x.dtype == torch.float64 or not launch.takes_kernels(x, use_kernel)
    return _Rotate.apply(x, *known[x.dtype], interleaved, rotated_torch if in_torch else rotated)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return first, second


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, function: Any) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.function = interleaved, function
        return function(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.function(grads[0], *ctx.saved_tensors, ctx.interleaved, -1), None, None, None, None


@jit
def _kernel(
    x, cos, sin, y, num_samples, num_heads, stride_s, stride_b, stride_h, num_angles, sign,
    WIDTH: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates the first WIDTH of DIM channels in BLOCK_H heads; BLOCK >= max(WIDTH / 2, DIM - WIDTH)."""
    token = tl.program_id(0).to(tl.int64)
    position, sample = token // num_samples, token % num_samples
    heads, places = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK)[None, :]
    source = x + position * stride_s + sample * stride_b + heads.to(tl.int64) * stride_h
    target = y + (token * num_heads + heads) * DIM
    angle = position * num_angles + sample % num_angles
    is_pair = places < WIDTH // 2
    first = places * 2 if INTERLEAVED else places
    second = first + (1 if INTERLEAVED else WIDTH // 2)
    c = tl.load(cos + angle * WIDTH + first, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + angle * (WIDTH // 2) + places, mask=is_pair, other=0.0).to(tl.float32) * sign
    mask = is_pair & (heads < num_heads)
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, (a * c - b * s).to(y.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * c + a * s).to(y.dtype.element_ty), mask=mask)
    if WIDTH < DIM:
        mask = (places < DIM - WIDTH) & (heads < num_heads)
        tl.store(target + WIDTH + places, tl.load(source + WIDTH + places, mask=mask), mask=mask)


@launch.compilable("rotated", lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotates x by the angle times `sign` (1 or -1). Computes in fp32 and rounds once."""
    x, y = launch.last_contiguous(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    cos, sin = launch.contiguous(cos, sin)
    num_positions, num_samples, num_heads, dim = x.shape
    width = cos.size(-1)
    block = launch.power_of_2(max(width // 2, dim - width))
    block_h = min(launch.power_of_2(num_heads), max(1, _TILE // block))
    if y.numel():
        _kernel[num_positions * num_samples, launch.cdiv(num_heads, block_h)](
            x, cos, sin, y, num_samples, num_heads, *x.stride()[:3], cos.size(1), sign, WIDTH=width, DIM=dim,
            INTERLEAVED=interleaved, BLOCK_H=block_h, BLOCK=block,
        )  # fmt: skip
    return y


def rotated_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Plain-torch reference of `rotated`; unlike `rotated`, it rounds twice."""
    width, out = cos.size(-1), torch.empty_like(x, memory_format=torch.contiguous_format)
    source, turned = x[..., :width], out[..., :width]
    torch.mul(source, cos, out=turned)
    (a, b), (out_a, out_b) = _pairs(source, interleaved), _pairs(turned, interleaved)
    out_a.addcmul_(b, sin, value=-sign)
    out_b.addcmul_(a, sin, value=sign)
    if width < x.size(-1):
        out[..., width:] = x[..., width:]
    return out


def check_rotated(dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    """Compares the kernel with its plain-torch reference. Only some of the channels are rotated."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(9, 2, 3, 96, generator=generator, device=device).to(dtype)
    half = torch.rand(9, 2, 1, 32, generator=generator, device=device) * 50
    for interleaved in (False, True):
        angles = half.repeat_interleave(2, -1) if interleaved else half.repeat(1, 1, 1, 2)
        operands = x[..., 8:], angles.cos().to(dtype), half.sin().to(dtype)
        shape = f"9 positions, 3 heads, 64 of 88 channels{', interleaved' if interleaved else ''}"
        for sign in (1, -1):
            yield compare(case_of(rotated, dtype, shape, *operands, interleaved, sign), device)
