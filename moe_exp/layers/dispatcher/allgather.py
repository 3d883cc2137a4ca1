"""All-gather dispatcher: every rank receives all tokens and selects the rows of its experts.

Shape suffixes: see `moe_exp.layers`; in addition, A = tokens of all ranks, S = source ranks (ETP*EP).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_exp.layers.dispatcher.collectives import Departed, Exchange, GatherRows, arrive, depart, gathered
from moe_exp.layers.dispatcher.dispatcher import Dispatched, DispatchRecord, Pending, SpreadDispatcher
from moe_exp.layers.dispatcher.row_order import RowOrder, SortedSlots, order_by_expert, sort_by_expert
from moe_exp.layers.router import RoutingDecision, count_kept
from moe_exp.layers.router.decision import without_dropped


class AllGatherDispatcher(SpreadDispatcher):
    """Gathers tokens and routing over `ep_group`, then `etp_group`; `combine` sums each token's results.

    All-gather sends a token once to every rank; all-to-all sends it up to K times, but only to its experts'
    ranks. Prefer all-gather if K is close to EP or larger. A token's results are summed on each rank, then
    over ranks, in the dtype of the rows. Synchronizes with the device once, to read token and row counts.
    """

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        weights_TK, kept_TK = decision.weights_TK, decision.kept_TK
        expert_TK = without_dropped(decision.expert_TK.to(torch.int32), kept_TK, self.num_experts)
        travelling = None
        if kept_TK is not None:  # select tokens with a kept slot: sort them as slots of a single expert
            kept_T1 = kept_TK.any(dim=1, keepdim=True)
            expert_T1 = torch.zeros_like(kept_T1, dtype=torch.int64)
            travelling = sort_by_expert(expert_T1, kept_T1, num_experts=1, use_kernels=decision.use_kernels)
        sizes = self._exchange_sizes(decision, travelling)
        order = None
        if travelling is not None:
            order = travelling.order(sizes.tokens_ep[self.ep_rank])
            x_TD, weights_TK = order.rows(x_TD), order.rows(weights_TK)
            expert_TK = expert_TK.index_select(0, order.slot_R)
        departed = depart(GatherRows(group=self.ep_group, sizes=sizes.tokens_ep), x_TD, weights_TK, expert_TK)
        return partial(self._land, departed, order, sizes, rows_per_expert, decision.use_kernels)

    def _land(
        self, departed: Departed, order: RowOrder | None, sizes: "_Sizes", rows_per_expert: int | None,
        use_kernels: bool | None,
    ) -> Dispatched:  # fmt: skip
        x_AD, weights_AK, expert_AK = arrive(departed)
        back: tuple[Exchange, ...] = (GatherRows(group=self.ep_group, sizes=sizes.tokens_ep).reverse,)
        if self.etp > 1:
            gather = GatherRows(group=self.etp_group, sizes=sizes.tokens_etp)
            x_AD, weights_AK, expert_AK = arrive(depart(gather, x_AD, weights_AK, expert_AK))
            back = (gather.reverse, *back)
        local_AK = expert_AK.long() - self.num_local_experts * self.ep_rank
        here_AK = (local_AK >= 0) & (local_AK < self.num_local_experts)
        if rows_per_expert is not None:
            rows_per_expert *= self.ep * self.etp
        by_expert, rows_L, splits = order_by_expert(
            local_AK, here_AK, num_experts=self.num_local_experts, counts_E=sizes.rows_L,
            splits=sizes.splits, rows_per_expert=rows_per_expert, use_kernels=use_kernels,
        )  # fmt: skip
        record = DispatchRecord(order, back, by_expert)
        return Dispatched(by_expert.rows(x_AD), by_expert.weights(weights_AK), rows_L, record, splits)

    def _exchange_sizes(self, decision: RoutingDecision, travelling: SortedSlots | None) -> "_Sizes":
        """Gathers all ranks' token counts and the row counts of this rank's experts. Waits for the device."""
        counts_E = count_kept(decision.expert_TK, decision.kept_TK, self.num_experts)
        num_tokens = counts_E.new_full((1,), decision.expert_TK.size(0))
        if travelling is not None:
            num_tokens = travelling.rows_per_expert_E
        counts = gathered(torch.cat([num_tokens, counts_E]), self.ep_group)
        counts = gathered(counts, self.etp_group)
        counts_S = counts.view(self.etp * self.ep, 1 + self.num_experts)
        rows_L = counts_S[:, 1:].sum(dim=0).view(self.ep, -1)[self.ep_rank]
        host = torch.cat([counts_S[:, 0], rows_L]).tolist()
        tokens = [host[i * self.ep : (i + 1) * self.ep] for i in range(self.etp)]
        return _Sizes(
            tokens_ep=tuple(tokens[self.etp_rank]),
            tokens_etp=tuple(map(sum, tokens)),
            splits=tuple(host[self.etp * self.ep :]),
            rows_L=rows_L,
        )


class _Sizes(NamedTuple):
    """Numbers of tokens and rows that this rank exchanges."""

    tokens_ep: tuple[int, ...]  # tokens per rank of the expert parallel group
    tokens_etp: tuple[int, ...]  # tokens per rank of the expert tensor parallel group, after the first gather
    splits: tuple[int, ...]  # rows per local expert, on the host
    rows_L: Tensor  # rows per local expert, on the device
