"""Token dispatchers: from tokens to rows sorted by expert, and back. Shape suffixes in `moe_exp.layers`.

`dispatch` returns the rows and a frozen record; `combine` takes the record, so a dispatcher keeps no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp import gloo
from moe_exp.layers.capacity import count_per_expert, rank_in_expert
from moe_exp.layers.collectives import all_to_all_rows, gather_rows, scatter_sum_rows
from moe_exp.layers.losses import group_size
from moe_exp.layers.router import RoutingDecision


@dataclass(frozen=True)
class RowOrder:
    """How slots become rows.

    Args:
        slot_R: the slot of each row; N for a row of padding.
        row_N: the row of each slot; R for a dropped slot.
        topk: slots per token.
    """

    slot_R: Tensor
    row_N: Tensor
    topk: int
    has_padding: bool = False
    has_drops: bool = False

    def rows(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [R, D]; padding is zero."""
        return _TokensToRows.apply(x_TD, self)

    def tokens(self, y_RD: Tensor) -> Tensor:
        """[R, D] to [T, D], the sum over the K slots of a token in slot order; a dropped slot adds nothing."""
        return _RowsToTokens.apply(y_RD, self)

    def weights(self, weights_TK: Tensor) -> Tensor:
        """[T, K] to [R]."""
        return _take(weights_TK.reshape(-1), self.slot_R, self.has_padding)


def _take(x: Tensor, index: Tensor, with_zero: bool) -> Tensor:
    """x[index]; with `with_zero` an index of len(x) gives zero."""
    if with_zero:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)


def _to_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    token_R = order.slot_R if order.topk == 1 else order.slot_R // order.topk
    return _take(x_TD, token_R, order.has_padding)


def sum_slots(y_RD: Tensor, order: RowOrder) -> Tensor:
    """[R, D] to [T, D] without autograd, see RowOrder.tokens."""
    if order.topk > 1 and y_RD.device.type == "cpu":
        # Reads every row once; a gather and a sum would write and read all of them in between, which takes 6 to 8 times as long.
        y_RD = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.size(1))]) if order.has_drops else y_RD
        return torch.nn.functional.embedding_bag(order.row_N.view(-1, order.topk), y_RD, mode="sum")
    y_ND = _take(y_RD, order.row_N, order.has_drops)
    return y_ND if order.topk == 1 else y_ND.view(-1, order.topk, y_ND.size(-1)).sum(dim=1)


class _TokensToRows(torch.autograd.Function):
    """Forward and backward are gathers, each the transpose of the other: no atomics, the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return _to_rows(x_TD, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_slots(grads[0], ctx.order), None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return sum_slots(y_RD, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_rows(grads[0], ctx.order), None


def sort_by_expert(decision: RoutingDecision, *, num_experts: int) -> tuple[RowOrder, Tensor]:
    """Row order in which the kept slots are sorted by expert, and the rows per expert [E]."""
    expert_TK, kept_TK = decision.expert_TK, decision.kept_TK
    if kept_TK is None:
        slot_R = torch.argsort(expert_TK.flatten(), stable=True)
        return RowOrder(slot_R, _inverse(slot_R), expert_TK.size(1)), decision.tokens_per_expert_E
    expert_N = expert_TK.masked_fill(~kept_TK, num_experts).flatten()
    order_N = torch.argsort(expert_N, stable=True)
    counts_E = count_per_expert(expert_N, num_experts + 1)[:num_experts]
    num_rows = int(counts_E.sum())
    row_N = _inverse(order_N).clamp_(max=num_rows)
    return RowOrder(order_N[:num_rows], row_N, expert_TK.size(1), has_drops=True), counts_E


def pad_by_expert(decision: RoutingDecision, *, num_experts: int, rows_per_expert: int) -> tuple[RowOrder, Tensor]:
    """Row order with `rows_per_expert` rows for every expert, zero rows where it has fewer: shapes do not depend on the data."""
    expert_TK, kept_TK = decision.expert_TK, decision.kept_TK
    expert_N = (expert_TK if kept_TK is None else expert_TK.masked_fill(~kept_TK, num_experts)).flatten()
    num_slots, num_rows = expert_N.numel(), num_experts * rows_per_expert
    place_N = rank_in_expert(expert_N, None, num_experts=num_experts)
    row_N = torch.where(expert_N < num_experts, expert_N * rows_per_expert + place_N, num_rows)
    slot_R = torch.full((num_rows + 1,), num_slots, device=row_N.device, dtype=row_N.dtype)
    slot_R[row_N] = torch.arange(num_slots, device=row_N.device)
    counts_E = torch.full((num_experts,), rows_per_expert, device=row_N.device, dtype=torch.int64)
    # A padding row's slot is N, one past the last: divided by K it has to stay one past the last token.
    return RowOrder(slot_R[:num_rows], row_N, expert_TK.size(1), has_padding=True, has_drops=True), counts_E


def _inverse(permutation_N: Tensor) -> Tensor:
    inverse_N = torch.empty_like(permutation_N)
    inverse_N[permutation_N] = torch.arange(permutation_N.numel(), device=permutation_N.device)
    return inverse_N


@dataclass(frozen=True)
class DispatchRecord:
    """What `combine` needs to undo a `dispatch`: the order of this rank's rows, and how the rows travelled."""

    order: RowOrder
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    by_expert: RowOrder | None = None


@dataclass(frozen=True)
class Dispatched:
    """Rows for the experts of this rank.

    Args:
        rows_RD: sorted by local expert.
        weights_R: router weight of each row, fp32.
        tokens_per_expert_L: rows per local expert, int64, on the device.
        record: for `combine`.
        splits: tokens_per_expert_L as Python ints where they are known without waiting for the device.
    """

    rows_RD: Tensor
    weights_R: Tensor
    tokens_per_expert_L: Tensor
    record: DispatchRecord
    splits: tuple[int, ...] | None = None


class LocalDispatcher:
    """All experts are on this rank.

    Args:
        num_experts: E.
    """

    name = "local"

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, decision: RoutingDecision, *, rows_per_expert: int | None = None) -> Dispatched:
        """Sorts the slots of `x_TD` by expert; `rows_per_expert` pads every expert to that many rows."""
        order, counts_E = self.row_order(decision, rows_per_expert)
        splits = None if rows_per_expert is None else (rows_per_expert,) * self.num_experts
        return Dispatched(order.rows(x_TD), order.weights(decision.weights_TK), counts_E, DispatchRecord(order), splits)

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        """Sums the rows of every token: [R, D] to [T, D]."""
        return record.order.tokens(y_RD)

    def row_order(self, decision: RoutingDecision, rows_per_expert: int | None) -> tuple[RowOrder, Tensor]:
        """How this rank's slots are sorted by expert, and the rows per expert [E]."""
        if rows_per_expert is None:
            return sort_by_expert(decision, num_experts=self.num_experts)
        return pad_by_expert(decision, num_experts=self.num_experts, rows_per_expert=rows_per_expert)


class AllToAllDispatcher(LocalDispatcher):
    """Experts are spread over `ep_group`, and each expert's width over `etp_group`.

    The rows go to the ranks of their experts by one all-to-all, and where an expert is split, are gathered over
    `etp_group`, whose ranks each compute a part of every row's result; the way back sums the parts.

    Args:
        num_experts: E, over all ranks.
        ep_group: expert parallel group; rank i holds experts [i*L, (i+1)*L).
        etp_group: expert tensor parallel group.
    """

    name = "alltoall"

    def __init__(self, num_experts: int, *, ep_group: ProcessGroup | None, etp_group: ProcessGroup | None):
        super().__init__(num_experts)
        self.ep_group, self.etp_group = ep_group, etp_group
        if num_experts % group_size(ep_group):
            raise ValueError(f"num_experts={num_experts}: is not divisible by the expert parallel size {group_size(ep_group)}.")
        self.num_local_experts = num_experts // group_size(ep_group)

    def dispatch(self, x_TD: Tensor, decision: RoutingDecision, *, rows_per_expert: int | None = None) -> Dispatched:
        order, counts_E = self.row_order(decision, rows_per_expert)
        counts = self._exchange_counts(counts_E, rows_per_expert)
        send, receive, gathered, chunks = self._plan(counts)
        rows, weights = order.rows(x_TD), order.weights(decision.weights_TK).unsqueeze(1)
        rows, weights = self._to_expert_ranks(rows, send, receive, gathered), self._to_expert_ranks(weights, send, receive, gathered)
        by_expert = self._expert_order(chunks, x_TD.device)
        if by_expert is not None:
            rows, weights = by_expert.rows(rows), by_expert.rows(weights)
        splits = tuple(chunks.view(-1, self.num_local_experts).sum(dim=0).tolist())
        record = DispatchRecord(order, tuple(send), tuple(receive), tuple(gathered), by_expert)
        return Dispatched(rows, weights.squeeze(1), torch.tensor(splits, device=x_TD.device), record, splits)

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        if record.by_expert is not None:
            y_RD = record.by_expert.tokens(y_RD)
        if self.etp_group is not None and record.gathered:
            y_RD = scatter_sum_rows(y_RD, sizes=list(record.gathered), group=self.etp_group)
        if self.ep_group is not None and group_size(self.ep_group) > 1:
            y_RD = all_to_all_rows(y_RD, send=list(record.receive), receive=list(record.send), group=self.ep_group)
        return record.order.tokens(y_RD)

    def _exchange_counts(self, counts_E: Tensor, rows_per_expert: int | None) -> Tensor:
        """Rows that every rank has for every expert, [ETP, EP, E], on the host. The only wait for the device, and one exchange."""
        ep, etp = group_size(self.ep_group), group_size(self.etp_group)
        if rows_per_expert is not None:
            return torch.full((etp, ep, self.num_experts), rows_per_expert)
        for group, size in ((self.ep_group, ep), (self.etp_group, etp)):
            if size > 1:
                gathered = counts_E.new_empty(size * counts_E.numel())
                gloo.all_gather(gathered, counts_E.flatten(), group=group)
                counts_E = gathered
        return counts_E.view(etp, ep, self.num_experts).cpu()

    def _plan(self, counts: Tensor) -> tuple[list[int], list[int], list[int], Tensor]:
        """Splits of the all-to-all, rows per rank of the gather ([] without ETP), rows per received chunk [ETP, EP, L]."""
        etp, ep, _ = counts.shape
        me = 0 if self.ep_group is None else self.ep_group.rank()
        my_etp = 0 if self.etp_group is None else self.etp_group.rank()
        by_rank = counts.view(etp, ep, ep, self.num_local_experts)
        send = by_rank[my_etp, me].sum(dim=-1).tolist()
        chunks = by_rank[:, :, me]
        receive = chunks[my_etp].sum(dim=-1).tolist()
        gathered = chunks.sum(dim=(1, 2)).tolist() if etp > 1 else []
        return send, receive, gathered, chunks

    def _to_expert_ranks(self, rows: Tensor, send: list[int], receive: list[int], gathered: list[int]) -> Tensor:
        if self.ep_group is not None and group_size(self.ep_group) > 1:
            rows = all_to_all_rows(rows, send=send, receive=receive, group=self.ep_group)
        if self.etp_group is not None and gathered:
            rows = gather_rows(rows, sizes=gathered, group=self.etp_group)
        return rows

    def _expert_order(self, chunks: Tensor, device: torch.device) -> RowOrder | None:
        """Order that sorts received rows, which come by source rank, by expert; None where they are sorted already."""
        num_sources = chunks.numel() // self.num_local_experts
        if self.num_local_experts == 1 or num_sources == 1:
            return None
        expert_C = torch.arange(self.num_local_experts).repeat(num_sources)
        slot_R = torch.argsort(torch.repeat_interleave(expert_C, chunks.flatten()), stable=True).to(device, non_blocking=True)
        return RowOrder(slot_R, _inverse(slot_R), topk=1)
