from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.capacity import count_per_expert
from moe_exp.layers.dispatcher import AllToAllDispatcher, deepep
from moe_exp.layers.dispatcher.deepep import (
    DeepEPDispatcher,
    check_deepep,
    check_rows,
    received_order,
    sent_experts,
)
from moe_exp.layers.router import RoutingDecision

HAS_DEEPEP = importlib.util.find_spec("deep_ep") is not None
needs_deepep = pytest.mark.skipif(
    not HAS_DEEPEP or torch.cuda.device_count() < 2,
    reason="needs two CUDA devices with NVLink and the package deep_ep",
)


def test_the_buffer_has_the_larger_size_of_both_directions_for_each_network(monkeypatch):
    """DeepEP's Buffer(group, num_nvl_bytes, num_rdma_bytes)."""

    def config(nvlink: int, rdma: int) -> SimpleNamespace:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda num_bytes, ranks: nvlink * num_bytes * ranks,
            get_rdma_buffer_size_hint=lambda num_bytes, ranks: rdma * num_bytes * ranks,
        )

    class Buffer:
        get_dispatch_config = staticmethod(lambda ranks: config(2, 30))
        get_combine_config = staticmethod(lambda ranks: config(3, 20))

        def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
            self.sizes = (num_nvl_bytes, num_rdma_bytes)

    class Group:
        size = staticmethod(lambda: 16)

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    deepep.shared_buffer.cache_clear()
    try:
        assert deepep.shared_buffer(Group(), 100).sizes == (4800, 48000)
    finally:
        deepep.shared_buffer.cache_clear()


@pytest.mark.skipif(HAS_DEEPEP, reason="deep_ep is installed")
def test_without_the_package():
    message = (
        r"^dispatcher=deepep: needs the package deep_ep \(No module named 'deep_ep'\)\. "
        r"Fix: pip install git\+https://github\.com/deepseek-ai/DeepEP@v1\.2\.1, or use alltoall\.$"
    )
    with pytest.raises(ValueError, match=message):
        check_deepep(ep=2, etp=1)


@pytest.mark.parametrize(
    ("ep", "etp", "message"),
    [
        (1, 1, r"dispatcher=deepep: has no kernels for EP=1\. Fix: EP among 2, 4, 8, .*, or alltoall\."),
        (6, 1, r"dispatcher=deepep: has no kernels for EP=6\. Fix: "),
        (2, 2, r"dispatcher=deepep: cannot split experts over ETP=2 ranks\. Fix: ETP=1, or use alltoall\."),
    ],
)
def test_sizes_that_deepep_has_not(ep, etp, message):
    with pytest.raises(ValueError, match=message):
        check_deepep(ep=ep, etp=etp)


def test_one_rank_is_refused():
    with pytest.raises(ValueError, match=r"dispatcher=deepep: has no kernels for EP=1\."):
        DeepEPDispatcher(4, ep_group=None, etp_group=None)


def test_rows_that_deepep_does_not_send():
    with pytest.raises(
        ValueError,
        match=r"dispatcher=deepep: sends bfloat16 rows, not float32\. Fix: DTYPE=bf16, or use alltoall\.",
    ):
        check_rows(torch.empty(3, 16))
    with pytest.raises(
        ValueError,
        match=r"hidden_size=12: DeepEP sends rows of a multiple of 8\. Fix: choose one, or use alltoall\.",
    ):
        check_rows(torch.empty(3, 12, dtype=torch.bfloat16))
    check_rows(torch.empty(3, 16, dtype=torch.bfloat16))


def decide(expert_TK, weights_TK, *, kept_TK=None, num_experts: int) -> RoutingDecision:
    nothing = torch.empty(0)
    return RoutingDecision(
        expert_TK, weights_TK, nothing, nothing, count_per_expert(expert_TK.flatten(), num_experts), kept_TK
    )


# What rank 1 of 2 gets of these four tokens when it has experts 2 and 3 of 4.
EXPERT_TK = torch.tensor([[3, 0], [0, 1], [2, 3], [1, 2]])
KEPT_TK = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
RECEIVED_AK = torch.tensor([[1, -1], [0, 1]])


def test_experts_as_deepep_takes_them():
    weights_TK = torch.ones(4, 2)
    assert sent_experts(decide(EXPERT_TK, weights_TK, num_experts=4)).tolist() == EXPERT_TK.tolist()
    sent_TK = sent_experts(decide(EXPERT_TK, weights_TK, kept_TK=KEPT_TK, num_experts=4))
    assert sent_TK.dtype == torch.int64
    assert sent_TK.tolist() == [[3, 0], [0, 1], [2, 3], [1, -1]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_received_tokens_become_rows_sorted_by_expert(dtype):
    order, splits = received_order(RECEIVED_AK.to(dtype), [1, 2])
    x_AD, weights_AK = torch.tensor([[10.0], [20.0]]), torch.tensor([[0.5, 0.0], [0.25, 0.75]])
    assert splits == (1, 2)
    assert order.rows(x_AD).flatten().tolist() == [20, 10, 20]
    assert order.weights(weights_AK).tolist() == [0.25, 0.5, 0.75]
    assert order.tokens(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist() == [2, 5]


def test_received_tokens_with_padding():
    order, splits = received_order(RECEIVED_AK, [1, 2], rows_per_expert=3)
    x_AD, weights_AK = torch.tensor([[10.0], [20.0]]), torch.tensor([[0.5, 0.0], [0.25, 0.75]])
    assert splits == (3, 3)
    assert order.rows(x_AD).flatten().tolist() == [20, 0, 0, 10, 20, 0]
    assert order.weights(weights_AK).tolist() == [0.25, 0, 0, 0.5, 0.75, 0]
    assert order.tokens(torch.tensor([[1.0], [9.0], [9.0], [2.0], [4.0], [9.0]])).flatten().tolist() == [2, 5]


@pytest.mark.parametrize("rows_per_expert", [None, 2])
def test_a_rank_that_receives_nothing(rows_per_expert):
    order, splits = received_order(
        torch.empty(0, 2, dtype=torch.int64), [0, 0, 0], rows_per_expert=rows_per_expert
    )
    rows_RD = order.rows(torch.empty(0, 5))
    assert rows_RD.shape == (sum(splits), 5)
    assert order.tokens(rows_RD).shape == (0, 5)


class Event:
    def __init__(self):
        self.waited = False

    def current_stream_wait(self):
        self.waited = True


class GlooBuffer:
    """What DeepEP's documentation says of its Buffer, written down with gloo: for the part of our dispatcher
    that is around it.
    """

    def __init__(self):
        self.events: list[Event] = []

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        rank_TK = torch.where(topk_idx >= 0, topk_idx // (num_experts // dist.get_world_size()), -1)
        in_rank = torch.stack([(rank_TK == rank).any(dim=1) for rank in range(dist.get_world_size())], dim=1)
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)])
        return in_rank.sum(dim=0), None, per_expert, in_rank, Event()

    def dispatch(self, x, *, handle=None, async_finish, **layout):
        assert x.is_contiguous() and async_finish
        sources = [None] * dist.get_world_size()
        if handle is not None:
            assert not layout
            dist.all_gather_object(sources, x)
            received = torch.cat(
                [x[in_rank[:, dist.get_rank()]] for x, in_rank in zip(sources, handle, strict=True)]
            )
            return received, None, None, None, None, self._event()
        topk_idx, topk_weights, in_rank = (
            layout["topk_idx"],
            layout["topk_weights"],
            layout["is_token_in_rank"],
        )
        assert topk_weights.dtype == torch.float32
        dist.all_gather_object(sources, (x, topk_idx, topk_weights, in_rank))
        mine = [[part[in_rank[:, dist.get_rank()]] for part in parts] for *parts, in_rank in sources]
        x, topk_idx, topk_weights = (torch.cat(parts) for parts in zip(*mine, strict=True))
        experts = layout["num_tokens_per_expert"].numel() // dist.get_world_size()
        local = topk_idx - experts * dist.get_rank()
        local = torch.where((topk_idx >= 0) & (local >= 0) & (local < experts), local, -1)
        splits = [int((local == expert).sum()) for expert in range(experts)]
        handle = [in_rank for *_, in_rank in sources]
        return x, local, topk_weights.masked_fill(local < 0, 0), splits, handle, self._event()

    def combine(self, x, handle, *, topk_weights=None, async_finish):
        assert x.is_contiguous() and async_finish
        me, parts = dist.get_rank(), [None] * dist.get_world_size()
        dist.all_gather_object(parts, (x, topk_weights))
        sums = []
        for which in (0, 1):
            if parts[0][which] is None:
                sums.append(None)
                continue
            total = parts[0][which].new_zeros(handle[me].size(0), parts[0][which].size(1))
            for rank, part in enumerate(parts):
                from_each = part[which].split([int(in_rank[:, rank].sum()) for in_rank in handle])
                total[handle[me][:, rank]] += from_each[me]
            sums.append(total)
        return *sums, self._event()

    def _event(self):
        self.events.append(Event())
        return self.events[-1]


def around_a_buffer(num_experts: int):
    """The dispatcher as it is but for its buffer, against AllToAllDispatcher."""
    rank, buffer = dist.get_rank(), GlooBuffer()
    deepep.check_deepep = lambda **_: None
    deepep.check_rows = lambda _: None
    deepep.shared_buffer = lambda *_: buffer
    groups = {"ep_group": dist.group.WORLD, "etp_group": None}
    for num_tokens in (9, 0 if rank == 1 else 4):
        for rows_per_expert in (None, 9):
            results = []
            for kind in (DeepEPDispatcher, AllToAllDispatcher):
                expert_TK = random(num_tokens, num_experts, seed=rank).argsort(dim=1)[:, :3]
                kept_TK = random(num_tokens, 3, seed=rank) > -1
                kept_TK[:1] = False
                leaves = (
                    random(num_tokens, 8, seed=10 + rank).requires_grad_(),
                    random(num_tokens, 3, seed=20 + rank).requires_grad_(),
                )
                decision = decide(expert_TK, leaves[1], kept_TK=kept_TK, num_experts=num_experts)
                dispatcher = kind(num_experts, **groups)
                dispatched = dispatcher.dispatch(leaves[0], decision, rows_per_expert=rows_per_expert)
                scale = random(len(dispatched.splits), 8, seed=40 + rank).repeat_interleave(
                    dispatched.tokens_per_expert_L, dim=0
                )
                y_TD = dispatcher.combine(
                    dispatched.rows_RD * dispatched.weights_R.unsqueeze(1) * scale, dispatched.record
                )
                y_TD.backward(random(num_tokens, 8, seed=30 + rank))
                results.append(
                    [y_TD.detach(), *(leaf.grad for leaf in leaves), dispatched.tokens_per_expert_L]
                )
            for value, expected in zip(*results, strict=True):
                # the weights travel in fp32
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            assert not results[0][0][:1].any()
    # Dispatch and combine, forward and backward, four times.
    assert len(buffer.events) == 16 and all(event.waited for event in buffer.events)


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 4), (4, 4)])
def test_what_is_around_the_buffer(num_ranks, num_experts):
    run_on_ranks(num_ranks, around_a_buffer, num_experts)


def through(dispatcher, rows_per_expert):
    """Output and gradients of experts that multiply by a number of their own, on this rank's GPU in bf16."""
    rank, num_experts, hidden = dist.get_rank(), 8, 128
    expert_TK = torch.stack(
        [
            torch.randperm(num_experts, generator=torch.Generator().manual_seed(100 * rank + t))[:3]
            for t in range(50)
        ]
    )
    kept_TK = random(50, 3, seed=rank) > -1
    kept_TK[7] = False
    x_TD = random(50, hidden, seed=10 + rank).to("cuda", torch.bfloat16).requires_grad_()
    weights_TK = random(50, 3, seed=20 + rank).to("cuda", torch.float32).requires_grad_()
    decision = decide(expert_TK.cuda(), weights_TK, kept_TK=kept_TK.cuda(), num_experts=num_experts)
    dispatched = dispatcher.dispatch(x_TD, decision, rows_per_expert=rows_per_expert)
    first = rank * len(dispatched.splits)
    factors = (
        torch.arange(first, first + len(dispatched.splits), device="cuda").repeat_interleave(
            dispatched.tokens_per_expert_L
        )
        / 8
    )
    rows_RD = dispatched.rows_RD * (dispatched.weights_R * factors).unsqueeze(1)
    y_TD = dispatcher.combine(rows_RD.to(torch.bfloat16), dispatched.record)
    y_TD.backward(random(50, hidden, seed=30 + rank).to("cuda", torch.bfloat16))
    return [x.detach().double().cpu() for x in (y_TD, x_TD.grad, weights_TK.grad)]


def compare_on_gpus():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for rows_per_expert in (None, 60):
        groups = {"ep_group": dist.group.WORLD, "etp_group": None}
        got, expected = (
            through(kind(8, **groups), rows_per_expert) for kind in (DeepEPDispatcher, AllToAllDispatcher)
        )
        for value, other in zip(got, expected, strict=True):
            assert other.norm() > 0
            assert (value - other).norm() <= 1e-2 * other.norm()  # sums in bf16, in another order
        assert not got[0][7].any() and not got[1][7].any()
    dist.destroy_process_group()


@pytest.mark.gpu
@needs_deepep
def test_deepep_equals_all_to_all():
    run_on_ranks(2, compare_on_gpus, join=False)
