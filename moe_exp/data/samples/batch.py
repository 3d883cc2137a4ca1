"""From samples to what a forward step takes: tokens, labels, positions, what counts; and a rank's part of it.

Shape suffixes: B samples, S tokens that are read, S1 one more, for the last label.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def split_batch(
    tokens_BS1: torch.Tensor, positions_BS: torch.Tensor | None = None, masked_id: int | None = None
) -> dict[str, torch.Tensor]:
    """Splits samples into what Megatron's forward step takes.

    Args:
        tokens_BS1: token ids of shape [B, S1].
        positions_BS: of the tokens in their documents, int64; None: in the samples.
        masked_id: the token that ends a document, after which the next one is not predicted; None: every
            token counts.

    Returns:
        `tokens`, `labels` (the next tokens) and `position_ids`, int64, and `loss_mask`, float32 ones and
        zeros; all of shape [B, S].
    """
    tokens_BS = tokens_BS1[:, :-1].contiguous()
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.size(1)).repeat(len(tokens_BS), 1)
    counted = torch.ones_like(tokens_BS, dtype=torch.bool) if masked_id is None else tokens_BS != masked_id
    return {
        "tokens": tokens_BS,
        "labels": tokens_BS1[:, 1:].contiguous(),
        "loss_mask": counted.float(),
        "position_ids": positions_BS.to(tokens_BS.device, non_blocking=True),
    }


def filler_mask(tokens_BS1: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Which inputs, bool [B, S], only fill a sample up (DOCUMENT_PACKING=best_fit): of the end-of-document
    tokens that it ends with, all but the first, which ends its last document.
    """
    at_end_BS1 = (tokens_BS1 == eod_id).flip(1).cumprod(dim=1).flip(1).bool()
    return torch.nn.functional.pad(at_end_BS1[:, :-2], (1, 0))


def context_part(
    batch: Mapping[str, torch.Tensor], ranges: tuple[tuple[int, int], ...]
) -> dict[str, torch.Tensor]:
    """The part of a batch, each [B, S], that a context parallel rank has: tokens `first` to `end - 1` of each
    of its `ranges`, together [B, S/C].
    """
    if len(ranges) == 1:
        return dict(batch)
    return {
        name: torch.cat([values[:, first:end] for first, end in ranges], dim=1)
        for name, values in batch.items()
    }
