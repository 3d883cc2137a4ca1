"""One loss scale for all parameters of an fp16 run.

Megatron gives each part of its optimizer (dense parameters, experts) a loss scaler of its own. The loss is multiplied by the first one's
scale, each part divides its gradients by its own, and lowers it when its own gradients overflow. As soon as one part has overflowed alone
the scales differ for good, and the gradients of the others are wrong by a power of two. Parts of different ranks may differ as well.
"""

import torch

from megatron.core.optimizer import MegatronOptimizer


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Has all parts of `optimizer`, on all ranks, make a step or skip it together, and move their scales alike. Without fp16: nothing.

    Costs one reduction of a number over all ranks per step.
    """
    parts = [part for part in optimizer.chained_optimizers if getattr(part, "grad_scaler", None) is not None]
    if not parts:
        return
    updates, prepare = [part.grad_scaler.update for part in parts], optimizer.prepare_grads
    for part in parts:
        part.grad_scaler.update = _not_yet

    def prepare_grads() -> bool:
        overflowed = torch.tensor(float(prepare()), device=parts[0].found_inf.device)
        torch.distributed.all_reduce(overflowed, op=torch.distributed.ReduceOp.MAX)
        is_overflow = bool(overflowed.item())
        for update in updates:
            update(is_overflow)
        return is_overflow

    # Of the instance: Megatron's own step calls it.
    optimizer.prepare_grads = prepare_grads


def _not_yet(found_inf: bool) -> None:
    """Whether a part alone has overflowed decides nothing."""
