import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import decide, random
from helpers.ranks import run_on_ranks
from moe_exp.layers.dispatcher import AllToAllDispatcher, deepep
from moe_exp.layers.dispatcher.deepep import DeepEPDispatcher, check_deepep, check_rows
from moe_exp.layers.dispatcher.row_order import order_by_expert

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

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    group = SimpleNamespace(size=lambda: 16)
    assert deepep.shared_buffer.__wrapped__(group, 100).sizes == (4800, 48000)


@pytest.mark.skipif(HAS_DEEPEP, reason="deep_ep is installed")
def test_without_the_package():
    with pytest.raises(ValueError, match=r"^dispatcher=deepep: .*deep_ep.*Fix: pip install"):
        check_deepep(ep=2, etp=1)


def test_version_2_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(ElasticBuffer=object))
    with pytest.raises(ValueError, match=r"deep_ep \(version 2 is installed.* Fix: pip install .*@v1"):
        check_deepep(ep=2, etp=1)


@pytest.mark.parametrize(
    ("ep", "etp", "text"),
    [
        (1, 1, r"EP=1\. Fix: set EP to one of 2, 4, 8, "),
        (6, 1, r"EP=6\. Fix: "),
        (2, 2, r"ETP=2 ranks\. Fix: set ETP=1"),
    ],
)
def test_sizes_that_deepep_has_not(ep, etp, text):
    with pytest.raises(ValueError, match=f"^dispatcher=deepep: .*{text}"):
        check_deepep(ep=ep, etp=etp)


def test_rows_that_deepep_does_not_send():
    with pytest.raises(ValueError, match=r"dispatcher=deepep: .* not float32\. Fix: set DTYPE=bf16"):
        check_rows(torch.empty(3, 16))
    with pytest.raises(ValueError, match=r"hidden_size=12: .* multiple of 8"):
        check_rows(torch.empty(3, 12, dtype=torch.bfloat16))
    check_rows(torch.empty(3, 16, dtype=torch.bfloat16))


# Rank 1 of 2 has experts 2 and 3 of 4, and gets two tokens: of experts 3 and 0, and of 2 and 3.
RECEIVED_AK = torch.tensor([[1, -1], [0, 1]])


@pytest.mark.parametrize(
    ("rows_per_expert", "slots", "splits"),
    [(None, [2, 0, 3], (1, 2)), (3, [2, None, None, 0, 3, None], (3, 3))],
)
def test_received_tokens_become_rows_sorted_by_expert(rows_per_expert, slots, splits):
    order, _, found = order_by_expert(
        RECEIVED_AK, RECEIVED_AK >= 0, num_experts=2, splits=(1, 2), rows_per_expert=rows_per_expert
    )
    x_AD, weights_AK = torch.tensor([[10.0], [20.0]]), torch.tensor([[0.5, 0.0], [0.25, 0.75]])
    assert found == splits
    tokens = [0 if slot is None else [10, 10, 20, 20][slot] for slot in slots]
    assert order.rows(x_AD).flatten().tolist() == tokens
    weights = [0 if slot is None else [0.5, 0, 0.25, 0.75][slot] for slot in slots]
    assert order.weights(weights_AK).tolist() == weights
    results = torch.tensor([[9.0 if slot is None else [2.0, 0, 1.0, 4.0][slot]] for slot in slots])
    assert order.tokens(results).flatten().tolist() == [2, 5]


@pytest.mark.parametrize("rows_per_expert", [None, 2])
def test_a_rank_that_receives_nothing(rows_per_expert):
    nothing_AK = torch.empty(0, 2, dtype=torch.int64)
    order, _, splits = order_by_expert(
        nothing_AK, nothing_AK >= 0, num_experts=3, splits=(0, 0, 0), rows_per_expert=rows_per_expert
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
    """DeepEP's Buffer as its documentation describes it, with gloo."""

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
            mine = [x[in_rank[:, dist.get_rank()]] for x, in_rank in zip(sources, handle, strict=True)]
            return torch.cat(mine), None, None, None, None, self._event()
        names = ("topk_idx", "topk_weights", "is_token_in_rank")
        topk_idx, topk_weights, in_rank = (layout[name] for name in names)
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


def through(kind, num_tokens: int, num_experts: int, rows_per_expert, *, device="cpu", dtype=torch.float64):
    """Output and gradients of experts that multiply by a number; the first token is dropped."""
    rank, hidden = dist.get_rank(), 8 if device == "cpu" else 128
    expert_TK = random(num_tokens, num_experts, seed=rank).argsort(dim=1)[:, :3]
    kept_TK = random(num_tokens, 3, seed=rank) > -1
    kept_TK[:1] = False
    x_TD = random(num_tokens, hidden, seed=10 + rank).to(device, dtype).requires_grad_()
    router_dtype = torch.promote_types(dtype, torch.float32)
    weights_TK = random(num_tokens, 3, seed=20 + rank).to(device, router_dtype).requires_grad_()
    decision = decide(expert_TK.to(device), weights_TK, kept_TK=kept_TK.to(device), num_experts=num_experts)
    dispatcher = kind(num_experts, ep_group=dist.group.WORLD, etp_group=None)
    dispatched = dispatcher.finish(dispatcher.start(x_TD, decision, rows_per_expert))
    counts_L = dispatched.tokens_per_expert_L
    scales_L = random(len(dispatched.splits), seed=40 + rank).to(device, router_dtype)
    scales_R = scales_L.repeat_interleave(counts_L) * dispatched.weights_R
    y_TD = dispatcher.combine((dispatched.rows_RD * scales_R.unsqueeze(1)).to(dtype), dispatched.record)
    y_TD.backward(random(num_tokens, hidden, seed=30 + rank).to(device, dtype))
    assert not y_TD[:1].any()
    return [x.detach().double().cpu() for x in (y_TD, x_TD.grad, weights_TK.grad, counts_L)]


def around_a_buffer(num_experts: int):
    """The dispatcher as it is but for its buffer, against AllToAllDispatcher."""
    buffer = GlooBuffer()
    deepep.check_deepep = lambda **_: None
    deepep.check_rows = lambda _: None
    deepep.shared_buffer = lambda *_: buffer
    for num_tokens in (9, 0 if dist.get_rank() == 1 else 4):
        for rows_per_expert in (None, 9):
            found, expected = (
                through(kind, num_tokens, num_experts, rows_per_expert)
                for kind in (DeepEPDispatcher, AllToAllDispatcher)
            )
            for value, other in zip(found, expected, strict=True):
                # the weights travel in fp32
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    # Dispatch and combine, forward and backward, four times.
    assert len(buffer.events) == 16 and all(event.waited for event in buffer.events)


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 4), (4, 4)])
def test_what_is_around_the_buffer(num_ranks, num_experts):
    run_on_ranks(num_ranks, around_a_buffer, num_experts)


def compare_on_gpus():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for rows_per_expert in (None, 60):
        found, expected = (
            through(kind, 50, 8, rows_per_expert, device="cuda", dtype=torch.bfloat16)
            for kind in (DeepEPDispatcher, AllToAllDispatcher)
        )
        for value, other in zip(found, expected, strict=True):
            assert other.norm() > 0
            assert (value - other).norm() <= 1e-2 * other.norm()  # sums in bf16, in another order
    dist.destroy_process_group()


@pytest.mark.gpu
@needs_deepep
def test_deepep_equals_all_to_all():
    run_on_ranks(2, compare_on_gpus, join=False)
