"""Micro-batches on this rank: reading samples, Megatron's schedule and forward step, and the loss."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config, ConfigError
from moe_exp.data.samples.dataset import Samples, context_part, filler_mask, future_batch, split_batch
from moe_exp.data.samples.prefetch import microbatch_start
from moe_exp.engine.graphs import CudaGraph, MicrobatchGraphs
from moe_exp.engine.model import moe_layers
from moe_exp.engine.optimizer_setup import next_batch
from moe_exp.engine.runtime import Runtime, from_all_ranks
from moe_exp.layers.groups import sum_over
from moe_exp.layers.kernels.launch import in_one_line
from moe_exp.layers.megatron.documents import Documents, document_lengths, document_positions
from moe_exp.layers.microbatch import context_ranges
from moe_exp.training.samples import read_tokens

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config

logger = logging.getLogger(__name__)


def read_microbatch(
    config: Config, runtime: Runtime, stream: Samples, first_sample: int, index: int, *,
    eod_id: int | None = None, forward_only: bool = False, dp_rank: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Reads micro-batch `index` of the iteration that starts at `first_sample`, for data-parallel rank
    `dp_rank` (default: this rank).

    Returns:
        The tensors of `split_batch`, and `padding_mask` (True for filler) if there is filler. Each tensor is
        this rank's slice [B, S/C] among C context parallel ranks. `num_counted` is the number of counted
        tokens on all C ranks. `documents` is None without document masking. Training with MTP_NUM_LAYERS=K
        adds the tensors of `future_batch`; `num_future` [K], the number of counted tokens per layer; and
        `future_weight`, MTP_LOSS_COEFF / K. The weight is a tensor because a CUDA graph would treat a
        Python number as a constant.
    """
    groups, (_, seq_len, has_filler) = runtime.groups, stream.stage_at(first_sample)
    size = config.microbatch_samples(seq_len)
    # The data-parallel size determines which rank gets a micro-batch, but not the samples in it.
    first = microbatch_start(
        first_sample, index, mbsz=size, dp_rank=groups.dp.rank() if dp_rank is None else dp_rank,
        dp_size=groups.dp.size(),
    )  # fmt: skip
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
    if config.mtp_num_layers and not forward_only:
        batch |= future_batch(tokens, batch, config.mtp_num_layers)
    part: dict[str, Any] = context_part(batch, ranges)
    if "future_mask" in batch:
        part["num_future"] = batch["future_mask"].sum(dim=(0, 1))
        weight = config.mtp_loss_coeff_at(first_sample) / config.mtp_num_layers
        part["future_weight"] = torch.full((), weight, device=runtime.device)
    part["num_counted"] = batch["loss_mask"].sum()  # over all context parallel ranks
    part["documents"] = None if lengths is None else Documents(lengths, part["position_ids"], ranges)
    return part


def run_schedule(
    config: Config, model: list[Any], microbatches: Sequence[dict[str, Any]], *, seq_len: int,
    forward_only: bool = False, graphs: MicrobatchGraphs | None = None,
) -> list[Tensor]:  # fmt: skip
    """Runs Megatron's schedule; with `graphs`, each training micro-batch replays its CUDA graph. The last
    pipeline stage returns each micro-batch's `lm_loss` for the log. Its shape is [2], or [2 * (1+K)] in
    training with MTP_NUM_LAYERS=K. Other stages return [].
    """
    step = forward_step if graphs is None or forward_only else partial(graphs_step, graphs, len(microbatches))
    # With VPP, Megatron expects an iterator per chunk. It counts samples of `seq_len` tokens, we of SEQ_LEN.
    has_chunks = len(model) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=step, forward_only=forward_only,
        data_iterator=[iter(microbatches) for _ in model] if has_chunks else iter(microbatches),
        model=model if has_chunks else model[0], num_microbatches=len(microbatches), seq_length=seq_len,
        micro_batch_size=config.microbatch_samples(seq_len) * config.seq_len // seq_len,
    )  # fmt: skip
    return [output["lm_loss"] for output in outputs]


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Forward step for Megatron's schedule: runs a stage's forward pass; returns output and loss function."""
    batch = next(data_iterator)
    names = ("future_tokens", "future_mask", "future_weight")
    future = {name: batch[name] for name in names if name in batch}
    output = model(
        batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"],
        packed_seq_params=batch["documents"], padding_mask=batch.get("padding_mask"),
        loss_mask=batch["loss_mask"], **future,
    )  # fmt: skip
    weight = batch.get("weight", 1.0)
    if future:
        return output, partial(loss_with_future, batch)
    return output, partial(lm_loss, batch["loss_mask"], batch["num_counted"], weight=weight)


def start_graphs(
    config: Config, runtime: Runtime, model: Sequence[Any], samples: Samples, progress: Progress,
    eod_id: int | None,
) -> tuple[MicrobatchGraphs | None, str]:  # fmt: skip
    """Captures and checks the CUDA graph of the next micro-batch. Called by every rank.

    If any rank fails, all ranks return None and the error. With CUDA_GRAPH=on, all raise ConfigError.
    """
    graphs, first = build_graphs(model, CudaGraph), progress.consumed_samples
    number, _, _ = next_batch(config, first, samples.stage_at(first).seq_len)
    batch = read_microbatch(config, runtime, samples, first, 0, eod_id=eod_id)
    if config.eod_mask_loss:
        weigh_microbatches([batch], runtime.groups.dp)
    try:
        failure = graphs.check(batch, number)
    except RuntimeError as error:  # also if memory is full
        failure = in_one_line(error)
    if not (failure := next(filter(None, from_all_ranks(failure)), "")):
        return graphs, ""
    if config.cuda_graph == "on":
        rule = f"the CUDA graph of a micro-batch failed: {failure}"
        raise ConfigError([config.problem("cuda_graph", rule, "set CUDA_GRAPH=auto")])
    logger.warning("CUDA_GRAPH=auto: continuing without CUDA graphs: %s", failure)
    del graphs  # before their memory is released
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return None, failure


def build_graphs(model: Sequence[Any], graph: Callable[[], CudaGraph]) -> MicrobatchGraphs:
    """CUDA graphs for micro-batches of this rank's model, which must be a single chunk."""
    (chunk,) = model
    settings = get_model_config(chunk)

    def region(batch: dict[str, Any], num_microbatches: int) -> Tensor:
        # as in the forward and backward step of Megatron's schedule
        output, loss_of = forward_step(iter([batch]), chunk)
        loss, logged = loss_of(output)
        scale = settings.grad_scale_func
        if settings.num_moe_experts is not None:
            MoEAuxLossAutoScaler.set_loss_scale(scale(torch.ones(1, device=loss.device)) / num_microbatches)
        torch.autograd.backward(scale(loss / num_microbatches))
        return logged["lm_loss"]

    layers = [layer for _, layer in moe_layers([chunk])]
    return MicrobatchGraphs(
        region, [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        [layer.statistics for layer in layers],
        [buffer for layer in layers for buffer in layer.router.buffers()], graph,
    )  # fmt: skip


def graphs_step(
    graphs: MicrobatchGraphs, num_microbatches: int, data_iterator: Any, model: Any
) -> tuple[Tensor, Any]:
    """Megatron's forward step with CUDA graphs. It also runs backward, and gives Megatron a loss of 0."""
    logged = graphs.run(next(data_iterator), num_microbatches)
    return logged, lambda logged: (torch.zeros_like(logged[0]), {"lm_loss": logged})


def weigh_microbatches(microbatches: Sequence[dict[str, Any]], dp: ProcessGroup) -> None:
    """Sets `weight` so that fully masked micro-batches do not lower the mean loss. Called by every rank."""
    # Megatron averages over all micro-batches of all data parallel ranks. One that EOD_MASK_LOSS masks
    # completely has loss 0 and would lower the mean.
    num_counting = torch.stack([batch["num_counted"] > 0 for batch in microbatches]).sum()
    weight = len(microbatches) * dp.size() / sum_over(num_counting, dp).clamp(min=1).double()
    for batch in microbatches:
        batch["weight"] = weight


def lm_loss(
    loss_mask: Tensor, num_counted: Tensor, losses: Tensor, *, weight: Tensor | float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's share of a micro-batch's mean cross entropy.

    The shares of all C context parallel ranks sum to the mean. Megatron multiplies the loss by C and averages
    gradients over DP*C ranks, so the C shares are summed.

    Args:
        loss_mask: [B, S], 1 for each counted token.
        num_counted: number of counted tokens on all context parallel ranks, [].
        losses: cross entropy per token, nats, [B, S].
        weight: weight of the micro-batch, see `weigh_microbatches`.

    Returns:
        This rank's share of the mean, times `weight`, with gradient; and `lm_loss` for the log. `lm_loss` [2]
        is the sum of the cross entropy over this rank's counted tokens, and the number of these tokens.
    """
    total = (losses.float() * loss_mask).sum()
    # An infinite loss may have finite gradients, and the other ranks see only the gradient norm. This makes
    # the gradients NaN, so that every rank skips the step.
    zero_or_nan = 0 * total.detach()
    logged = torch.stack([total.detach(), loss_mask.sum()])
    loss = (total / num_counted.clamp(min=1) * weight).to(total.dtype)
    return loss * (1 + zero_or_nan), {"lm_loss": logged}


def loss_with_future(batch: Mapping[str, Any], losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`lm_loss` plus MTP_LOSS_COEFF times the mean loss of the K multi-token prediction layers.

    `losses`: cross entropy of the main model and of each layer, [1+K, B, S]. The tensor for the
    log has a loss sum and a token count for the main model and for each layer, [2 * (1+K)].
    """
    masks = batch["loss_mask"], *batch["future_mask"].unbind(dim=2)
    counts, weight = (batch["num_counted"], *batch["num_future"]), batch.get("weight", 1.0)
    depths = zip(masks, counts, losses, strict=True)
    parts = [lm_loss(mask, count, loss, weight=weight) for mask, count, loss in depths]
    main, *others = (loss for loss, _ in parts)
    logged = torch.cat([shown["lm_loss"] for _, shown in parts])
    return main + batch["future_weight"] * torch.stack(others).sum(), {"lm_loss": logged}
