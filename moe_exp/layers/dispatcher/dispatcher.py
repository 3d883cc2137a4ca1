"""Token dispatchers turn tokens into rows sorted by expert, and back. Shape suffixes: see `moe_exp.layers`.

`start` sends the tokens and `finish` receives the rows, so that other work can run in between. `finish`
also returns the record that `combine` needs. The dispatcher itself caches only the sizes of an exchange.

    start:   tokens [T, D] -> rows sorted by expert (RowOrder) -> exchange departs
    finish:  exchange arrives -> rows sorted by local expert [R, D] (a second RowOrder)
    combine: these steps in reverse, as recorded in `DispatchRecord`; sums the K results of each token
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import (
    AllToAll,
    Departed,
    Exchange,
    GatherRows,
    arrive,
    depart,
    exchange_rows,
    gathered,
)
from moe_exp.layers.dispatcher.row_order import (
    RowOrder,
    order_by_expert,
    pad_by_expert,
    regroup_chunks,
    slots_of,
    sort_by_expert,
)
from moe_exp.layers.groups import group_size, start_copy
from moe_exp.layers.router import RoutingDecision


@dataclass(frozen=True)
class DispatchRecord:
    """Steps of `start` and `finish`, recorded so that `combine` can reverse them."""

    order: RowOrder | None  # from this rank's tokens to the rows it sent; None: unchanged
    back: tuple[Exchange, ...] = ()  # exchanges that return the results, in order
    by_expert: RowOrder | None = None  # from received rows to rows sorted by expert; None: unchanged


@dataclass(frozen=True)
class Dispatched:
    """Rows for the experts of this rank."""

    rows_RD: Tensor  # sorted by local expert
    weights_R: Tensor  # router weight of each row, fp32
    tokens_per_expert_L: Tensor  # rows per local expert, int64, on the device
    record: DispatchRecord  # for `combine`
    splits: tuple[int, ...] | None = None  # tokens_per_expert_L on the host, if known without synchronizing


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens and their routing. All experts are on this rank and process the tokens directly."""

    x_TD: Tensor
    decision: RoutingDecision
    rows_per_expert: int | None = None  # see `Dispatcher.start`; ignored by the `triton` backend

    @property
    def record(self) -> DispatchRecord:
        """Empty record: `combine` has nothing to do, because the experts already sum each token's results."""
        # Not a field, because torch.compile does not support its default.
        return DispatchRecord(None)


Pending = Callable[[], Dispatched | RoutedTokens]  # a dispatch in flight; pass to `finish` once


class Dispatcher(ABC):
    """Sends tokens to the ranks of their experts, and sends the results back.

    Tokens whose slots are all dropped (such as padding) are not sent, and their result is zero. Every rank of
    the dispatcher's groups must participate, even a rank without tokens.
    """

    is_local = False  # all experts are on this rank
    moves_rows = True  # False: the experts process the tokens directly
    pads = True  # uses `rows_per_expert`
    # Groups whose ranks exchange rows and must agree on `rows_per_expert`.
    exchange_groups: tuple[ProcessGroup | None, ...] = ()

    @abstractmethod
    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        """Starts sending the tokens of this rank.

        Args:
            x_TD: tokens, any float dtype.
            decision: routing decision for the tokens.
            rows_per_expert: rows of each rank for each expert, after padding with zeros. Shapes then do not
                depend on the data. The number must be equal on all ranks. For any expert, a rank may keep
                at most `rows_per_expert` slots. None: no padding.

        Returns:
            The argument of `finish`. Call `finish` on the same CUDA stream as `start`. Work between the
            two calls overlaps with the exchange, in forward and backward.
        """

    def finish(self, pending: Pending) -> Dispatched | RoutedTokens:
        """Waits for the rows of this rank's experts."""
        return pending()

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        """Sends the weighted results back, and sums the results of each token: [R, D] to [T, D]."""
        if record.by_expert is not None:
            y_RD = record.by_expert.tokens(y_RD)
        for exchange in record.back:
            y_RD = exchange_rows(exchange, y_RD)
        return y_RD if record.order is None else record.order.tokens(y_RD)


class LocalDispatcher(Dispatcher):
    """Dispatcher for experts that are all on this rank.

    If slots were dropped and rows are not padded, the host synchronizes with the GPU to read the number of
    rows.
    """

    is_local = True

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        slots = slots_of(decision, self.num_experts)
        order, counts_E, splits = order_by_expert(**slots, rows_per_expert=rows_per_expert)
        rows_RD, weights_R = order.rows(x_TD), order.weights(decision.weights_TK)
        return lambda: Dispatched(rows_RD, weights_R, counts_E, DispatchRecord(order), splits)


class TokensDispatcher(Dispatcher):
    """Dispatcher for experts that are all on this rank and accept RoutedTokens.

    `pads`: True if the experts need padded rows, so that shapes do not depend on the data.
    """

    is_local = True
    moves_rows = False

    def __init__(self, *, pads: bool):
        self.pads = pads

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        # A graph node older than the shared expert's, so that backward adds the gradients of both in the same
        # order as with timers and with [S, B, D].
        x_TD = x_TD.view_as(x_TD)
        return lambda: RoutedTokens(x_TD, decision, rows_per_expert)


class SpreadDispatcher(Dispatcher):
    """Base class of dispatchers that split experts over `ep_group` and each expert's width over `etp_group`.

    Args:
        num_experts: number of experts on all ranks together, a multiple of the expert parallel size.
        ep_group: expert parallel group; rank i holds experts [i*L, (i+1)*L). None: this rank alone.
        etp_group: expert tensor parallel group. None: this rank alone.
    """

    def __init__(self, num_experts: int, *, ep_group: ProcessGroup | None, etp_group: ProcessGroup | None):
        self.num_experts, self.ep_group, self.etp_group = num_experts, ep_group, etp_group
        self.ep, self.etp = group_size(ep_group), group_size(etp_group)
        self.num_local_experts = experts_per_rank(num_experts, self.ep)
        self.ep_rank = 0 if ep_group is None else ep_group.rank()
        self.etp_rank = 0 if etp_group is None else etp_group.rank()
        self.exchange_groups = ep_group, etp_group


class _ExchangeSizes(NamedTuple):
    """Row counts of this rank: rows to send, to receive and to gather, and rows per expert."""

    send: tuple[int, ...]  # to each rank of the expert parallel group, [EP]
    receive: tuple[int, ...]  # from each rank of the expert parallel group, [EP]
    gathered: tuple[int, ...]  # from each rank of the expert tensor parallel group, [ETP]
    splits: tuple[int, ...]  # per local expert, [L]
    rows_SL: Tensor  # per source rank (ETP * EP) and local expert, on the device


class AllToAllDispatcher(SpreadDispatcher):
    """Sends rows to the ranks of their experts by all-to-all.

    A second all-to-all sends the router weights; NCCL runs both in one kernel. If experts are split over
    `etp_group`, each rank of this group gathers the rows and computes partial results. `combine` sums the
    partial results. Without `rows_per_expert`, the host waits for the GPU once, to read the row counts.
    """

    _padded: tuple[int, _ExchangeSizes] | None = None  # sizes with `rows_per_expert` rows, for later calls

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        if rows_per_expert is None:
            slots = sort_by_expert(**slots_of(decision, self.num_experts))
            sent_E = received_E = slots.rows_per_expert_E.contiguous()
            if self.ep > 1:
                received_E = torch.empty_like(sent_E)
                torch.distributed.all_to_all_single(received_E, sent_E, group=self.ep_group)
            # From every source rank (ETP * EP) for every expert of this rank.
            rows_SL = gathered(received_E, self.etp_group).view(-1, self.num_local_experts)
            read = start_copy(torch.cat([slots.rows_per_expert_E, rows_SL.flatten()]))  # all sizes
            # Without drops the number of rows is known, and the GPU gathers them while the host waits.
            order = slots.order(sum(read()[: self.num_experts]) if slots.has_drops else None)
        else:
            order = pad_by_expert(
                decision.expert_TK, decision.kept_TK, num_experts=self.num_experts,
                rows_per_expert=rows_per_expert, use_kernels=decision.use_kernels,
            )  # fmt: skip
        rows_RD, weights_R = order.rows(x_TD), order.weights(decision.weights_TK)
        if rows_per_expert is None:
            counts = read()
            route = self._route(counts[: self.num_experts], counts[self.num_experts :], rows_SL)
        else:
            if self._padded is None or self._padded[0] != rows_per_expert:
                sources = self.ep * self.etp
                rows_SL = torch.full((sources, self.num_local_experts), rows_per_expert, device=x_TD.device)
                received = [rows_per_expert] * sources * self.num_local_experts
                route = self._route([rows_per_expert] * self.num_experts, received, rows_SL)
                self._padded = rows_per_expert, route
            route = self._padded[1]
        there = AllToAll(group=self.ep_group, send=route.send, receive=route.receive)
        return partial(self._land, depart(there, rows_RD, weights_R), there, order, route)

    def _land(
        self, departed: Departed, there: Exchange, order: RowOrder, route: _ExchangeSizes
    ) -> Dispatched:
        rows, weights = arrive(departed)
        back: tuple[Exchange, ...] = (there.reverse,)
        if self.etp > 1:
            gather = GatherRows(group=self.etp_group, sizes=route.gathered)
            rows, weights = arrive(depart(gather, rows, weights))
            back = (gather.reverse, *back)
        by_expert = None
        # Rows arrive sorted by source rank, and by expert within each source.
        if self.num_local_experts > 1 and self.ep * self.etp > 1:
            by_expert = regroup_chunks(
                route.rows_SL, num_rows=sum(route.splits), use_kernels=order.use_kernels
            )
            rows, weights = by_expert.rows(rows), by_expert.rows(weights)
        return Dispatched(
            rows, weights, route.rows_SL.sum(dim=0), DispatchRecord(order, back, by_expert), route.splits
        )

    def _route(self, sent_E: list[int], received: list[int], rows_SL: Tensor) -> _ExchangeSizes:
        # `received` is [ETP, EP, L], flattened. The all-to-all receives this rank's part of ETP; the gather
        # over the expert tensor parallel group then collects all parts.
        def sums(values: Sequence[int], width: int) -> tuple[int, ...]:  # of adjacent values
            return tuple(sum(values[i : i + width]) for i in range(0, len(values), width))

        per_rank = self.num_local_experts
        by_source = sums(received, per_rank)
        receive = by_source[self.etp_rank * self.ep : (self.etp_rank + 1) * self.ep]
        splits = tuple(sum(received[expert::per_rank]) for expert in range(per_rank))
        return _ExchangeSizes(sums(sent_E, per_rank), receive, sums(by_source, self.ep), splits, rows_SL)


def experts_per_rank(num_experts: int, ep: int) -> int:
    """Number of experts per rank. Raises a ValueError if `ep` does not divide `num_experts`."""
    if num_experts % ep:
        rule = f"must be divisible by the expert parallel size {ep}"
        raise ValueError(f"num_experts={num_experts}: {rule}. Fix: set EP to a divisor of num_experts.")
    return num_experts // ep
