"""Cross entropy over a vocabulary that may be split over ranks; forward and backward each read logits once.

The loss of a token with logits z is log(sum_v exp(z_v)) - z_target, in fp32. Shapes: N tokens, V vocabulary
entries of this rank, hidden size D, C tokens per chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config.choices import LOSS_CHUNK_TOKENS
from moe_exp.layers.groups import group_size
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.weight_grad import main_grad_of, placeholder

BLOCK = 4096  # vocabulary entries per step


@jit
def _statistics_kernel(logits, target, log_sum, picked, first, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest, total = float("-inf"), 0.0
    for start in range(0, width, BLOCK):
        words = start + tl.arange(0, BLOCK)
        z = tl.load(logits + words, mask=words < width, other=float("-inf")).to(tl.float32)
        # Online log-sum-exp: the sum is relative to the maximum so far and is rescaled when that grows.
        before = largest
        largest = tl.maximum(before, tl.max(z, 0))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # avoids -inf - -inf while all are -inf
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(z - shift), 0)
    tl.store(log_sum + row, largest + tl.log(total))
    word = tl.load(target + row) - first
    is_here = (word >= 0) & (word < width)
    tl.store(picked + row, tl.load(logits + word, mask=is_here, other=0.0).to(tl.float32))


@jit
def _gradient_kernel(
    logits, target, log_sum, grad, dlogits, first, width, stride, stride_out, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + words, mask=words < width, other=float("-inf")).to(tl.float32)
    probability = tl.exp(z - tl.load(log_sum + row))
    is_target = words == tl.load(target + row) - first
    dz = tl.where(is_target, probability - 1.0, probability) * tl.load(grad + row)
    tl.store(dlogits + row * stride_out + words, dz.to(dlogits.dtype.element_ty), mask=words < width)


def cross_entropy_statistics_torch(logits_NV: Tensor, target_N: Tensor, first: int) -> tuple[Tensor, Tensor]:
    z_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    word_N = target_N - first
    is_here_N = (word_N >= 0) & (word_N < z_NV.size(1))
    picked_N = z_NV.gather(1, word_N.where(is_here_N, 0).unsqueeze(1)).squeeze(1)
    return z_NV.logsumexp(dim=1), picked_N.where(is_here_N, 0.0)


@launch.compilable(
    "cross_entropy_statistics",
    lambda logits_NV, *_: tuple(
        logits_NV.new_empty(logits_NV.size(0), dtype=torch.float32) for part in range(2)
    ),
    twin=cross_entropy_statistics_torch,
    takes_fp64=False,
)
def cross_entropy_statistics(logits_NV: Tensor, target_N: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Computes the loss statistics of this rank's part of the vocabulary.

    Args:
        logits_NV: logits of this rank's vocabulary entries.
        target_N: int64, target id of each token in the whole vocabulary.
        first: index of this rank's first vocabulary entry.

    Returns:
        Log-sum-exp of the logits, and the target's logit (0 if the target is on another rank), both fp32 [N].
    """
    num_rows, width = logits_NV.shape
    (target_N,), logits_NV = launch.contiguous(target_N), launch.last_contiguous(logits_NV)
    log_sum_N, picked_N = (logits_NV.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    if num_rows:
        _statistics_kernel[(num_rows,)](
            logits_NV, target_N, log_sum_N, picked_N, first, width, logits_NV.stride(0),
            BLOCK=min(BLOCK, launch.power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return log_sum_N, picked_N


def cross_entropy_gradient_torch(
    logits_NV: Tensor, target_N: Tensor, log_sum_N: Tensor, grad_N: Tensor, first: int
) -> Tensor:
    probabilities_NV = (logits_NV.to(log_sum_N.dtype) - log_sum_N.unsqueeze(1)).exp_()
    words_V = torch.arange(first, first + logits_NV.size(1), device=logits_NV.device)
    probabilities_NV -= (words_V == target_N.unsqueeze(1)).to(probabilities_NV.dtype)
    return probabilities_NV.mul_(grad_N.unsqueeze(1)).to(logits_NV.dtype)


@launch.compilable(
    "cross_entropy_gradient",
    lambda logits_NV, target_N, log_sum_N, grad_N, first: torch.empty_like(logits_NV),
    twin=cross_entropy_gradient_torch,
    takes_fp64=False,
)
def cross_entropy_gradient(
    logits_NV: Tensor, target_N: Tensor, log_sum_N: Tensor, grad_N: Tensor, first: int
) -> Tensor:
    """Gradient of the logits in their dtype: (softmax - onehot) times the gradient of each token's loss.

    Args:
        logits_NV, target_N, first: as for `cross_entropy_statistics`.
        log_sum_N: log-sum-exp over the whole vocabulary (all ranks).
        grad_N: gradient of each loss, fp32.
    """
    logits_NV = launch.last_contiguous(logits_NV)
    dlogits_NV = logits_NV.new_empty(logits_NV.shape)
    _write_gradient(logits_NV, target_N, log_sum_N, grad_N, first, dlogits_NV)
    return dlogits_NV


def _write_gradient(
    logits_NV: Tensor, target_N: Tensor, log_sum_N: Tensor, grad_N: Tensor, first: int, dlogits_NV: Tensor
) -> None:
    """Writes the gradient to `dlogits_NV`, which may be the same tensor as `logits_NV`."""
    num_rows, width = logits_NV.shape
    target_N, log_sum_N, grad_N = launch.contiguous(target_N, log_sum_N, grad_N)
    if num_rows:
        block = min(BLOCK, launch.power_of_2(width))
        _gradient_kernel[(num_rows, launch.cdiv(width, block))](
            logits_NV, target_N, log_sum_N, grad_N, dlogits_NV, first, width, logits_NV.stride(0),
            dlogits_NV.stride(0), BLOCK=block, num_warps=8,
        )  # fmt: skip


def choose_cross_entropy(name: str, *, device_type: str, failure: str = "") -> tuple[str, str]:
    """Chooses the cross entropy (`megatron`, `triton` or `linear`); returns the choice and the reason.

    Args:
        name: one of these choices, or `auto` (triton on a GPU that runs the Triton kernels, else megatron).
        failure: reason why `auto` must not choose triton (see `launch.failure_of`); empty: no reason.
    """
    if name == "megatron":
        return "megatron", "Megatron's function, which saves probabilities in fp32; set by CROSS_ENTROPY"
    if name == "linear":
        return "linear", f"logits and gradients of {LOSS_CHUNK_TOKENS} tokens at a time; set by CROSS_ENTROPY"
    if device_type == "cpu":
        if name == "auto":
            return "megatron", "Megatron's function; the Triton kernels are for GPUs"
        return "triton", "set by CROSS_ENTROPY; on a CPU in plain torch"
    if name == "auto":
        if rule := failure or launch.missing():
            return "megatron", f"Megatron's function, which saves probabilities in fp32; not triton: {rule}"
        return "triton", "Triton kernels, which save the logits and recompute the probabilities"
    if rule := launch.missing():
        raise ValueError(f"cross_entropy=triton: {rule}. Fix: set CROSS_ENTROPY=auto.")
    return "triton", "set by CROSS_ENTROPY"


def token_losses(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Loss of each token, log(sum_v exp(z_v)) - z_target, fp32 [...], equal on all ranks of the group.

    Args:
        logits: logits of this rank's vocabulary entries, [..., V]. On a GPU, backward overwrites them with
            the gradient.
        target: target ids in the whole vocabulary, [...].
        group: ranks over which the vocabulary is split evenly, in rank order; None if it is not split.
    """
    flat_NV = logits.reshape(-1, logits.size(-1))
    return _TokenLosses.apply(flat_NV, target.reshape(-1), group).view(target.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.first = 0 if group is None else group.rank() * logits_NV.size(1)
        log_sum_N, picked_N = _statistics_of_all_words(logits_NV, target_N, ctx.first, group)
        # Backward recomputes the probabilities. Megatron saves them in fp32: twice the bytes of bf16 logits.
        ctx.save_for_backward(logits_NV, target_N, log_sum_N)
        return log_sum_N - picked_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, target_N, log_sum_N = ctx.saved_tensors
        return _gradient(logits_NV, target_N, log_sum_N, grads[0].contiguous(), ctx.first), None, None


def _statistics_of_all_words(
    logits_NV: Tensor, target_N: Tensor, first: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_statistics` over the whole vocabulary of the group."""
    log_sum_N, picked_N = cross_entropy_statistics(logits_NV, target_N, first)
    if group_size(group) > 1:  # logsumexp over ranks
        largest_N = log_sum_N.clone()
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        total_N = (log_sum_N - largest_N).exp_()
        dist.all_reduce(total_N, group=group)
        log_sum_N = largest_N + total_N.log_()
        dist.all_reduce(picked_N, group=group)
    return log_sum_N, picked_N


def _gradient(logits_NV: Tensor, target_N: Tensor, log_sum_N: Tensor, grad_N: Tensor, first: int) -> Tensor:
    """Same as `cross_entropy_gradient`, but overwrites the logits with the result if the kernel can run."""
    is_fp64 = logits_NV.dtype == torch.float64
    is_eager = not torch.compiler.is_compiling()
    if is_eager and launch.runs_kernel(logits_NV) and logits_NV.is_contiguous() and not is_fp64:
        # Nothing else reads the logits, the largest tensor of a step, so the gradient takes their memory.
        # Autograd raises if a second backward pass needs them.
        _write_gradient(logits_NV, target_N, log_sum_N, grad_N, first, logits_NV)
        torch.autograd.graph.increment_version(logits_NV)
        return logits_NV
    return cross_entropy_gradient(logits_NV, target_N, log_sum_N, grad_N, first)


def linear_losses(
    hidden: Tensor, weight_VD: Tensor, target: Tensor, mask: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """`token_losses` of the logits `hidden @ weight_VD.t()`, computed one chunk of tokens at a time.

    The forward pass also computes the gradients of `hidden` and `weight_VD`, assuming that the gradient of
    each loss is its `mask` value. Backward only multiplies these gradients by a scalar c. The gradients of
    the losses must therefore be c * mask; otherwise, the results are NaN.

    Args:
        hidden: input of the output layer, [..., D], the same on all ranks of the group. Backward returns this
            rank's share of the gradient of `hidden`; the full gradient is the sum over all ranks.
        weight_VD: output weight for this rank's vocabulary entries. Its gradient is added to Megatron's
            `main_grad`, if the weight has one.
        target, group: see `token_losses`.
        mask: 1 for tokens that count, else 0, fp32 [...].
    """
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    flat_ND, (target_N, mask_N) = hidden.reshape(-1, hidden.size(-1)), (x.reshape(-1) for x in (target, mask))
    return _LinearLosses.apply(flat_ND, weight_VD, target_N, mask_N, group, has_backward).view(target.shape)


class _LinearLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, mask_N: Tensor,
        group: ProcessGroup | None, has_backward: bool,
    ) -> Tensor:  # fmt: skip
        first = 0 if group is None else group.rank() * weight_VD.size(0)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        losses_N = torch.empty_like(target_N, dtype=wide)
        if has_backward:
            dhidden_ND = torch.empty_like(hidden_ND)
            dweight_VD = torch.zeros_like(weight_VD, dtype=wide)
        for start in range(0, target_N.size(0), LOSS_CHUNK_TOKENS):
            chunk = slice(start, start + LOSS_CHUNK_TOKENS)
            hidden_CD, target_C = hidden_ND[chunk], target_N[chunk]
            logits_CV = hidden_CD @ weight_VD.t()
            log_sum_C, picked_C = _statistics_of_all_words(logits_CV, target_C, first, group)
            torch.sub(log_sum_C, picked_C, out=losses_N[chunk])
            if has_backward:
                dlogits_CV = _gradient(logits_CV, target_C, log_sum_C, mask_N[chunk], first)
                torch.mm(dlogits_CV, weight_VD, out=dhidden_ND[chunk])
                _add_product(dweight_VD, dlogits_CV.t(), hidden_CD)
                del dlogits_CV
            del logits_CV  # before the next chunk's
        if has_backward:
            ctx.save_for_backward(dhidden_ND, dweight_VD, mask_N)
            ctx.parameter = weight_VD  # a saved tensor may be unpacked as a new object without main_grad
        return losses_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dhidden_ND, dweight_VD, mask_N), grad_N = ctx.saved_tensors, grads[0]
        dhidden = dweight = None
        scale_1 = grad_N.index_select(0, mask_N.argmax(dim=0, keepdim=True))
        scale_1 = scale_1.where((grad_N == scale_1 * mask_N).all(), torch.nan)
        if ctx.needs_input_grad[0]:
            dhidden = dhidden_ND.mul_(scale_1)  # autograd raises if a second backward pass needs it
        if ctx.needs_input_grad[1]:
            if (main_grad := main_grad_of(ctx.parameter)) is not None:
                main_grad.addcmul_(dweight_VD, scale_1)
                dweight = placeholder(ctx.parameter)
            else:
                dweight = dweight_VD.mul_(scale_1).to(ctx.parameter.dtype)
        return dhidden, dweight, None, None, None, None


def _add_product(total_MN: Tensor, a_MC: Tensor, b_CN: Tensor) -> None:
    """Adds a @ b to `total`; the product of 16-bit operands is computed in fp32 if torch supports this."""
    if total_MN.dtype == a_MC.dtype:
        total_MN.addmm_(a_MC, b_CN)
    elif launch.multiplies_16_bits(a_MC, b_CN):
        total_MN += torch.mm(a_MC, b_CN, out_dtype=total_MN.dtype)
    else:
        total_MN += a_MC @ b_CN
