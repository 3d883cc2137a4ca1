"""Cross entropy per token on `kernels/cross_entropy.py`; the vocabulary may be split over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.groups import group_size


def choose_cross_entropy(name: str, *, device_type: str, failure: str = "") -> tuple[str, str]:
    """The cross entropy that runs, `megatron` or `triton`, and the reason in words.

    Args:
        name: one of these, or `auto`: triton on a GPU that can run its kernels.
        failure: why `auto` must not take the kernels, see `kernel_choice.failure_of`.
    """
    if name == "megatron":
        return "megatron", "Megatron's, which keeps the probabilities in fp32; asked for by CROSS_ENTROPY"
    if device_type == "cpu":
        if name == "auto":
            return "megatron", "Megatron's; the kernels are for GPUs"
        return "triton", "asked for by CROSS_ENTROPY; on a CPU the same in plain torch"
    from moe_exp.layers.kernels.launch import missing

    if name == "auto":
        if rule := failure or missing():
            return "megatron", f"Megatron's, which keeps the probabilities in fp32; not triton: {rule}"
        return "triton", "a Triton kernel, which keeps the logits and computes the probabilities again"
    if rule := missing():
        raise ValueError(f"cross_entropy=triton: {rule}. Fix: set CROSS_ENTROPY=auto.")
    return "triton", "asked for by CROSS_ENTROPY"


def token_losses(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """log(sum_v exp(z_v)) - z_target of each token, [...] in fp32, the same on every rank of the group.

    Args:
        logits: [..., V] of this rank's words.
        target: [...] the target word in the whole vocabulary.
        group: ranks that hold the other words, equally many each, in rank order; None: this rank alone.
    """
    flat_NV = logits.reshape(-1, logits.size(-1))
    return _TokenLosses.apply(flat_NV, target.reshape(-1), group).view(target.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: ProcessGroup | None) -> Tensor:
        # Imported here because Triton is slow to import and most runs do not need it.
        from moe_exp.layers.kernels.cross_entropy import cross_entropy_statistics

        first = 0 if group is None else group.rank() * logits_NV.size(1)
        log_sum_N, picked_N = cross_entropy_statistics(logits_NV, target_N, first)
        if group_size(group) > 1:  # logsumexp over ranks
            largest_N = log_sum_N.clone()
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
            total_N = (log_sum_N - largest_N).exp_()
            dist.all_reduce(total_N, group=group)
            log_sum_N = largest_N + total_N.log_()
            dist.all_reduce(picked_N, group=group)
        ctx.save_for_backward(logits_NV, target_N, log_sum_N)
        ctx.first = first
        return log_sum_N - picked_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from moe_exp.layers.kernels.cross_entropy import cross_entropy_gradient

        logits_NV, target_N, log_sum_N = ctx.saved_tensors
        grad_N = grads[0].contiguous()
        return cross_entropy_gradient(logits_NV, target_N, log_sum_N, grad_N, ctx.first), None, None
