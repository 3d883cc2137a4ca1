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


def context_ranges(
    num_tokens: int, *, cp_rank: int, cp_size: int, num_stripes: int = 1
) -> tuple[tuple[int, int], ...]:
    """A context parallel rank's two of the 2C pieces of each stripe of a sequence: its own and the opposite.

    So every rank has as much to do if tokens attend to those before them; with documents nearly as much if
    there are several stripes. With one, Megatron's `get_batch_on_this_cp_rank` gives the same, by arguments
    that differ between its versions.

    Args:
        num_tokens: S, a multiple of 2C times `num_stripes` if C > 1.
        cp_rank: this rank, below C.
        cp_size: C.
        num_stripes: equal parts of a sequence, each of which all ranks share.

    Returns:
        First token and the one after the last, of every piece in order.
    """
    if cp_size == 1:
        return ((0, num_tokens),)
    piece = num_tokens // (2 * cp_size * num_stripes)
    places = [
        2 * cp_size * stripe + part
        for stripe in range(num_stripes)
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank)
    ]
    return tuple((place * piece, (place + 1) * piece) for place in places)


def context_part(
    batch: Mapping[str, torch.Tensor], ranges: tuple[tuple[int, int], ...]
) -> dict[str, torch.Tensor]:
    """The part of a batch, each [B, S], that a context parallel rank has: [B, S/C], see `context_ranges`."""
    if len(ranges) == 1:
        return dict(batch)
    return {
        name: torch.cat([values[:, first:end] for first, end in ranges], dim=1)
        for name, values in batch.items()
    }
