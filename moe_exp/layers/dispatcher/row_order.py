"""Moves slots to rows sorted by expert, and back. Shape suffixes: see `moe_exp.layers`.

Both directions gather without atomics, so results are bitwise reproducible. On a CUDA device, Triton
kernels compute the row order and the sums, with int32 indices. RouterConfig explains the argument
`use_kernels`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from moe_exp.layers import native
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.drops import padded_order, padded_order_torch
from moe_exp.layers.kernels.launch import takes_kernels
from moe_exp.layers.kernels.rows import chunk_order, chunk_order_torch, gather_rows
from moe_exp.layers.kernels.slot_sort import slot_sort
from moe_exp.layers.router.decision import RoutingDecision, count_per_expert, without_dropped


@dataclass(frozen=True)
class RowOrder:
    """Mapping between slots and rows."""

    slot_R: Tensor  # slot of each row; N: padding row
    row_N: Tensor  # row of each slot; R: dropped slot
    topk: int  # slots per token
    has_padding: bool = False  # some rows may have no slot
    has_drops: bool = False  # some slots may have no row
    use_kernels: bool | None = None

    def rows(self, x_TD: Tensor) -> Tensor:
        """Gathers the rows from the tokens: [T, D] to [R, D]. Padding rows are zero."""
        return _Moved.apply(x_TD, self, True)

    def tokens(self, y_RD: Tensor) -> Tensor:
        """Sums the rows of each token's kept slots, in slot order: [R, D] to [T, D]."""
        return _Moved.apply(y_RD, self, False)

    def weights(self, weights_TK: Tensor) -> Tensor:
        """Gathers the weight of each row: [T, K] to [R]. Padding rows have weight zero."""
        if takes_kernels(weights_TK, self.use_kernels):
            # Each slot has its own weight, so treat every slot as a token with K = 1.
            return _Moved.apply(weights_TK.reshape(-1), replace(self, topk=1), True)
        return _take(weights_TK.reshape(-1), self.slot_R, self.has_padding)


@dataclass(frozen=True)
class SortedSlots:
    """Slots sorted by expert, dropped slots last."""

    slot_N: Tensor  # slots in sorted order; within an expert, by position
    row_N: Tensor  # row of each slot; at least the number of rows if dropped
    rows_per_expert_E: Tensor  # kept slots per expert, int64, on the device
    topk: int  # slots per token
    has_drops: bool  # some slots may be dropped
    use_kernels: bool | None = None

    def order(self, num_rows: int | None = None) -> RowOrder:
        """The row order. `num_rows`: sum of rows_per_expert_E; if None, read from the GPU when needed."""
        slot_R, row_N = self.slot_N, self.row_N
        if self.has_drops:
            num_rows = int(self.rows_per_expert_E.sum()) if num_rows is None else num_rows
            slot_R, row_N = slot_R[:num_rows], row_N.clamp(max=num_rows)
        return RowOrder(slot_R, row_N, self.topk, has_drops=self.has_drops, use_kernels=self.use_kernels)


def sort_by_expert(
    expert_TK: Tensor, kept_TK: Tensor | None = None, *, num_experts: int, counts_E: Tensor | None = None,
    use_kernels: bool | None = None,
) -> SortedSlots:  # fmt: skip
    """Sorts the slots by expert.

    Args:
        expert_TK: expert of every slot, integer, in [0, E) for kept slots.
        kept_TK: bool, True for slots that are not dropped; None: no slot is dropped.
        counts_E: kept slots per expert, int64, if known.
    """
    if takes_kernels(expert_TK, use_kernels):
        slot_N, row_N, offsets_E1 = slot_sort(expert_TK, num_experts, kept_TK)
        counts_E = offsets_E1.diff().long() if counts_E is None else counts_E
    else:
        expert_N = without_dropped(expert_TK, kept_TK, num_experts).flatten()
        if counts_E is None:
            counts_E = count_per_expert(expert_N, num_experts + 1)[:num_experts]
        if native.takes(expert_N, torch.int64):
            slot_N, row_N = native.sort_slots(expert_N, num_experts)
        else:
            slot_N = torch.argsort(expert_N, stable=True)
            row_N = torch.empty_like(slot_N)
            row_N[slot_N] = torch.arange(slot_N.numel(), device=slot_N.device)
    return SortedSlots(slot_N, row_N, counts_E, expert_TK.size(1), kept_TK is not None, use_kernels)


def pad_by_expert(
    expert_TK: Tensor, kept_TK: Tensor | None = None, *, num_experts: int, rows_per_expert: int,
    use_kernels: bool | None = None,
) -> RowOrder:  # fmt: skip
    """Row order padded to `rows_per_expert` rows for each expert, so that shapes do not depend on the data.

    Args:
        expert_TK, kept_TK: as for `sort_by_expert`.
        rows_per_expert: at least the largest number of kept slots of an expert. This is not checked: an
            expert with more slots would corrupt the rows of other experts.
    """
    padded = padded_order if takes_kernels(expert_TK, use_kernels) else padded_order_torch
    order = padded(expert_TK, num_experts, rows_per_expert, kept_TK)
    return RowOrder(*order, expert_TK.size(1), has_padding=True, has_drops=True, use_kernels=use_kernels)


def order_by_expert(
    expert_TK: Tensor, kept_TK: Tensor | None, *, num_experts: int, counts_E: Tensor | None = None,
    splits: tuple[int, ...] | None = None, rows_per_expert: int | None = None,
    use_kernels: bool | None = None,
) -> tuple[RowOrder, Tensor, tuple[int, ...] | None]:  # fmt: skip
    """Returns the row order, the rows per expert on the device, and their copy on the host (None if unknown).

    Args:
        expert_TK, kept_TK, counts_E: as for `sort_by_expert`.
        splits: `counts_E` on the host. If None and slots may be dropped, the counts are read from the device.
        rows_per_expert: as for `pad_by_expert`; None: no padding.
    """
    options: dict[str, Any] = {"num_experts": num_experts, "use_kernels": use_kernels}
    if rows_per_expert is not None:
        order = pad_by_expert(expert_TK, kept_TK, rows_per_expert=rows_per_expert, **options)
        rows_E = torch.full((num_experts,), rows_per_expert, device=expert_TK.device)
        return order, rows_E, (rows_per_expert,) * num_experts
    slots = sort_by_expert(expert_TK, kept_TK, counts_E=counts_E, **options)
    if splits is None and slots.has_drops:
        # The host needs the sum of the counts. It fetches all of them, as the experts may need them.
        splits = tuple(slots.rows_per_expert_E.tolist())
    return slots.order(None if splits is None else sum(splits)), slots.rows_per_expert_E, splits


def slots_of(decision: RoutingDecision, num_experts: int) -> dict[str, Any]:
    """Arguments of `sort_by_expert` and `order_by_expert` for the slots of a routing decision."""
    return {
        "expert_TK": decision.expert_TK,
        "kept_TK": decision.kept_TK,
        "num_experts": num_experts,
        # The decision's counts include dropped slots.
        "counts_E": decision.tokens_per_expert_E if decision.kept_TK is None else None,
        "use_kernels": decision.use_kernels,
    }


def regroup_chunks(rows_SL: Tensor, *, num_rows: int, use_kernels: bool | None = None) -> RowOrder:
    """Row order that moves chunks of rows from [source, expert] order into [expert, source] order."""
    regrouped = chunk_order if takes_kernels(rows_SL, use_kernels) else chunk_order_torch
    return RowOrder(*regrouped(rows_SL, num_rows), topk=1, use_kernels=use_kernels)


class _Moved(torch.autograd.Function):
    """Moves tokens to rows, or rows to tokens. Each direction is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RowOrder, to_rows: bool) -> Tensor:
        ctx.order, ctx.to_rows = order, to_rows
        return _to_rows(x, order) if to_rows else sum_slots(x, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        back = sum_slots if ctx.to_rows else _to_rows
        return back(grads[0], ctx.order), None, None


def _to_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    if takes_kernels(x_TD, order.use_kernels):
        return gather_rows(x_TD, order.slot_R, order.topk)
    # A padding row's slot is N, one past the last: divided by K it remains one past the last token.
    token_R = order.slot_R if order.topk == 1 else order.slot_R // order.topk
    return _take(x_TD, token_R, order.has_padding)


def sum_slots(y_RD: Tensor, order: RowOrder) -> Tensor:
    """Sums each token's rows in the accumulation dtype of y, without creating a tensor [N, D]."""
    if takes_kernels(y_RD, order.use_kernels):
        if order.topk == 1:
            return gather_rows(y_RD, order.row_N)
        return combine(y_RD, order.row_N.view(-1, order.topk))
    if order.topk == 1 and not order.has_drops:
        return y_RD.index_select(0, order.row_N)
    row_TK = order.row_N.view(-1, order.topk)
    if y_RD.size(0) == 0 or row_TK.size(0) == 0:
        return y_RD.new_zeros(row_TK.size(0), *y_RD.shape[1:])
    if not order.has_drops:
        return embedding_bag(row_TK, y_RD, mode="sum")
    kept_TK = row_TK < y_RD.size(0)
    if order.has_padding:
        # The host does not know the number of kept slots, so a dropped slot reads any row, times zero.
        row_TK = row_TK.clamp(max=y_RD.size(0) - 1)
        return embedding_bag(row_TK, y_RD, mode="sum", per_sample_weights=kept_TK.to(y_RD.dtype))
    # Computes row_TK[kept_TK] without synchronizing.
    kept_T, kept_N, num_kept = kept_TK.sum(dim=1), kept_TK.flatten(), y_RD.size(0)
    place_N = torch.where(kept_N, kept_N.cumsum(0) - 1, num_kept)
    row_R = row_TK.new_empty(num_kept + 1).scatter_(0, place_N, row_TK.flatten())[:num_kept]
    return embedding_bag(row_R, y_RD, kept_T.cumsum(0) - kept_T, mode="sum")


def _take(x: Tensor, index: Tensor, with_zero: bool) -> Tensor:
    """x[index]; if `with_zero`, index len(x) selects zeros."""
    if with_zero:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)
