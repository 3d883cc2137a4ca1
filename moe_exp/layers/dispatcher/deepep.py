"""DeepEP dispatcher: fused all-to-all kernels over NVLink and RDMA (github.com/deepseek-ai/DeepEP).

Each rank that holds any of a token's experts receives the token once, with the token's K expert indices and
router weights. The receiving rank sorts its tokens by expert. DeepEP's combine is the backward of its
dispatch, and vice versa. Shape suffixes: see `moe_exp.layers`; in addition, A = received tokens.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import Arrival, Departed, arrive, depart
from moe_exp.layers.dispatcher.dispatcher import Dispatched, DispatchRecord, Pending, SpreadDispatcher
from moe_exp.layers.dispatcher.row_order import order_by_expert
from moe_exp.layers.groups import group_size
from moe_exp.layers.router import RoutingDecision

INSTALL = "pip install git+https://github.com/deepseek-ai/DeepEP@v1.2.1"
# Group sizes for which DeepEP has tuned configurations; DeepEP rejects other sizes.
SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class DeepEPDispatcher(SpreadDispatcher):
    """Splits experts over `ep_group`. Requires bf16 rows, a CUDA device per rank and NVLink within a node.

    During the exchange, `start` blocks the host until DeepEP has written the row counts to host memory.
    `ep_group` must be an NCCL group; `etp_group` must be None or have one rank.
    """

    def __init__(self, num_experts: int, *, ep_group: ProcessGroup | None, etp_group: ProcessGroup | None):
        check_deepep(ep=group_size(ep_group), etp=group_size(etp_group))
        super().__init__(num_experts, ep_group=ep_group, etp_group=etp_group)

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        check_rows(x_TD)
        assert self.ep_group is not None
        buffer = shared_buffer(self.ep_group, x_TD.size(1) * x_TD.element_size())
        # DeepEP expects int64, and -1 for slots that are not sent.
        expert_TK = decision.expert_TK.to(torch.int64)
        if decision.kept_TK is not None:
            expert_TK = expert_TK.masked_fill(~decision.kept_TK, -1)
        exchange = _Send(buffer, expert_TK, self.num_experts)
        departed = depart(exchange, x_TD, decision.weights_TK)
        return partial(self._land, departed, exchange, rows_per_expert, decision.use_kernels)

    def _land(
        self, departed: Departed, exchange: "_Send", rows_per_expert: int | None, use_kernels: bool | None
    ) -> Dispatched:
        x_AD, weights_AK = arrive(departed)
        by_expert, counts_L, splits = order_by_expert(
            exchange.expert_AK.long(),
            exchange.expert_AK >= 0,  # -1: on another rank
            num_experts=self.num_local_experts,
            splits=exchange.splits,
            rows_per_expert=None if rows_per_expert is None else self.ep * rows_per_expert,
            use_kernels=use_kernels,
        )
        record = DispatchRecord(None, (exchange.reverse,), by_expert)
        return Dispatched(by_expert.rows(x_AD), by_expert.weights(weights_AK), counts_L, record, splits)


def check_deepep(*, ep: int, etp: int) -> None:
    """Raises a ValueError if DeepEP cannot run here with these group sizes."""
    if ep not in SIZES:
        fix = f"set EP to one of {', '.join(map(str, SIZES))}, or use alltoall"
        raise ValueError(f"dispatcher=deepep: does not support EP={ep}. Fix: {fix}.")
    if etp > 1:
        rule = f"cannot split experts over ETP={etp} ranks"
        raise ValueError(f"dispatcher=deepep: {rule}. Fix: set ETP=1, or use alltoall.")
    try:
        importlib.import_module("deep_ep").Buffer  # noqa: B018  # missing in some builds
    except (ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        if hasattr(sys.modules.get("deep_ep"), "ElasticBuffer"):
            reason = "version 2 is installed and not supported"
        rule = f"requires the package deep_ep ({reason})"
        raise ValueError(f"dispatcher=deepep: {rule}. Fix: {INSTALL}, or use alltoall.") from None
    if not torch.cuda.is_available():
        raise ValueError("dispatcher=deepep: requires a CUDA device. Fix: use alltoall.")


def check_rows(x_TD: Tensor) -> None:
    """Raises a ValueError if DeepEP cannot send these rows."""
    if x_TD.dtype != torch.bfloat16:
        rule = f"requires bfloat16 rows, not {str(x_TD.dtype).removeprefix('torch.')}"
        raise ValueError(f"dispatcher=deepep: {rule}. Fix: set DTYPE=bf16, or use alltoall.")
    if x_TD.size(1) % 8:
        rule = "must be a multiple of 8 with dispatcher=deepep"
        raise ValueError(f"hidden_size={x_TD.size(1)}: {rule}. Fix: change hidden_size, or use alltoall.")


@cache
def shared_buffer(group: ProcessGroup, hidden_bytes: int) -> Any:
    """Returns DeepEP's communication buffer (hundreds of MB), which all layers share."""
    Buffer = importlib.import_module("deep_ep").Buffer
    configs = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
    nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    return Buffer(group, nvlink, rdma)


class _Send:
    """Exchange of tokens and weights. The first `launch` computes the layout; later launches reuse it."""

    def __init__(self, buffer: Any, expert_TK: Tensor, num_experts: int):
        self.buffer, self.expert_TK, self.num_experts = buffer, expert_TK, num_experts
        self.handle: Any = None
        self.expert_AK = expert_TK
        self.splits: tuple[int, ...] = ()
        self.received = torch.Size()

    @property
    def reverse(self) -> "_Return":
        return _Return(self)

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        x_TD = tensors[0]
        assert x_TD is not None
        if self.handle is not None:
            x_AD, *_, event = self.buffer.dispatch(x_TD.contiguous(), handle=self.handle, async_finish=True)
            return _arrival(event, [x_AD])
        weights_TK = tensors[1]
        assert weights_TK is not None
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.expert_TK, self.num_experts
        )
        x_AD, self.expert_AK, weights_AK, splits, self.handle, event = self.buffer.dispatch(
            x_TD.contiguous(), topk_idx=self.expert_TK, topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, async_finish=True,
        )  # fmt: skip
        self.splits, self.received = tuple(splits), x_AD.size()
        return _arrival(event, [x_AD, weights_AK])


class _Return:
    """Reverse of `_Send`: sends back sums per token (results or gradients) and router weight gradients."""

    def __init__(self, there: _Send):
        self.there = there

    @property
    def reverse(self) -> _Send:
        return self.there

    def launch(self, tensors: Sequence[Tensor | None]) -> Arrival:
        y_AD, weights_AK = tensors if len(tensors) == 2 else (tensors[0], None)
        if y_AD is None:
            # Only the weights need a gradient, but DeepEP cannot send weights without rows.
            assert weights_AK is not None
            y_AD = weights_AK.new_zeros(self.there.received, dtype=torch.bfloat16)
        weights_AK = None if weights_AK is None else weights_AK.float().contiguous()
        y_TD, weights_TK, event = self.there.buffer.combine(
            y_AD.contiguous(), self.there.handle, topk_weights=weights_AK, async_finish=True
        )
        return _arrival(event, [y_TD, weights_TK][: len(tensors)])


def _arrival(event: Any, tensors: list[Tensor | None]) -> Arrival:
    def wait() -> list[Tensor | None]:
        event.current_stream_wait()
        return tensors

    return wait
