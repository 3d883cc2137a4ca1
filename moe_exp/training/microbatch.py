"""Micro-batches on this rank: reading samples, Megatron's schedule and forward step, and the loss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config import Config
from moe_exp.data.samples.dataset import Samples, context_part, filler_mask, split_batch
from moe_exp.data.samples.prefetch import microbatch_start
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.groups import sum_over
from moe_exp.layers.megatron.documents import Documents, document_lengths, document_positions
from moe_exp.layers.microbatch import context_ranges
from moe_exp.training.samples import read_tokens

from megatron.core.pipeline_parallel import get_forward_backward_func


def read_microbatch(
    config: Config, runtime: Runtime, stream: Samples, first_sample: int, index: int, *,
    eod_id: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Micro-batch `index` of this data-parallel rank in the iteration that starts at `first_sample`.

    Returns:
        This context parallel rank's part [B, S/C] of the tensors of `split_batch` and of `padding_mask` (True
        for filler); `num_counted`, number of tokens of the micro-batch in the loss; `documents`.
    """
    groups, (_, seq_len, has_filler) = runtime.groups, stream.stage_at(first_sample)
    size = config.microbatch_samples(seq_len)
    # The data-parallel size determines which rank gets a micro-batch, but not the samples in it.
    first = microbatch_start(
        first_sample, index, mbsz=size, dp_rank=groups.dp.rank(), dp_size=groups.dp.size()
    )
    tokens = read_tokens(stream, first, size, vocab_size=config.vocab_size)
    lengths = positions = None
    if config.document_mask and eod_id is not None:
        lengths = document_lengths(tokens[:, :-1], eod_id)
        positions = document_positions(lengths)
    masked_id = eod_id if config.eod_mask_loss else None
    batch = split_batch(tokens.to(runtime.device, non_blocking=True), positions, masked_id)
    if has_filler and eod_id is not None:
        batch["padding_mask"] = filler_mask(tokens, eod_id).to(runtime.device, non_blocking=True)
    ranges = context_ranges(
        seq_len, cp_rank=groups.cp.rank(), cp_size=groups.cp.size(), num_stripes=config.context_stripes
    )
    part: dict[str, Any] = context_part(batch, ranges)
    part["num_counted"] = batch["loss_mask"].sum()  # over all context parallel ranks
    part["documents"] = None if lengths is None else Documents(lengths, part["position_ids"], ranges)
    return part


def run_schedule(
    config: Config, model: list[Any], microbatches: Sequence[dict[str, Any]], *, seq_len: int,
    forward_only: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Runs Megatron's schedule; returns `lm_loss` values to log per micro-batch; [] before the last stage."""
    # With VPP, Megatron expects an iterator per chunk. It counts samples of `seq_len` tokens, we of SEQ_LEN.
    has_chunks = len(model) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step, forward_only=forward_only,
        data_iterator=[iter(microbatches) for _ in model] if has_chunks else iter(microbatches),
        model=model if has_chunks else model[0], num_microbatches=len(microbatches), seq_length=seq_len,
        micro_batch_size=config.microbatch_samples(seq_len) * config.seq_len // seq_len,
    )  # fmt: skip
    return [output["lm_loss"] for output in outputs]


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Forward pass of a micro-batch on a stage, for Megatron's schedule; returns output and loss function."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"],
        packed_seq_params=batch["documents"], padding_mask=batch.get("padding_mask"),
    )  # fmt: skip
    return output, partial(lm_loss, batch["loss_mask"], batch["num_counted"], weight=batch.get("weight", 1.0))


def weigh_microbatches(microbatches: Sequence[dict[str, Any]], dp: ProcessGroup) -> None:
    """Sets the `weight` that excludes fully masked micro-batches from the mean. Called by every rank."""
    # Megatron averages over all micro-batches of all data parallel ranks. One that EOD_MASK_LOSS masks
    # completely has loss 0 and would lower the mean.
    num_counting = torch.stack([batch["num_counted"] > 0 for batch in microbatches]).sum()
    num_all = len(microbatches) * dp.size()
    weight = num_all / sum_over(num_counting, dp).clamp(min=1).double()
    for batch in microbatches:
        batch["weight"] = weight


def lm_loss(
    loss_mask: Tensor, num_counted: Tensor, losses: Tensor, *, weight: Tensor | float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's share of a micro-batch's mean cross entropy; the shares of context parallel ranks add up.

    Megatron multiplies the loss by the context parallel size C and averages gradients over DP*C ranks.

    Args:
        loss_mask: [B, S], 1 for each counted token.
        num_counted: number of counted tokens on all context parallel ranks, [].
        losses: cross entropy per token, nats, [B, S].
        weight: weight of the micro-batch, see `weigh_microbatches`.

    Returns:
        The share times `weight`, with gradient; and `lm_loss` for the log, [2]: the cross entropy summed over
        this rank's counted tokens, and the number of these tokens.
    """
    total = (losses.float() * loss_mask).sum()
    # An infinite loss may have finite gradients, and the other ranks see only the gradient norm. This makes
    # the gradients NaN, so that every rank skips the step.
    zero_or_nan = 0 * total.detach()
    logged = torch.stack([total.detach(), loss_mask.sum()])
    loss = (total / num_counted.clamp(min=1) * weight).to(total.dtype)
    return loss * (1 + zero_or_nan), {"lm_loss": logged}
