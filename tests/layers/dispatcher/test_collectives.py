from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.dispatcher import collectives
from moe_exp.layers.dispatcher.collectives import (
    AllToAll,
    GatherRows,
    ScatterSumRows,
    arrive,
    depart,
    exchange_rows,
)

# Rows from rank i (row) to rank j (column).
ROUTES = {
    2: {
        "even": [[2, 2], [2, 2]],
        "uneven": [[3, 0], [1, 5]],
        "nothing": [[0, 0], [0, 0]],
        "all to one": [[4, 0], [3, 0]],
    },
    4: {"uneven": [[1, 2, 0, 3], [0, 0, 0, 0], [5, 1, 1, 1], [2, 0, 0, 1]]},
}
SIZES = {
    2: {"even": [3, 3], "uneven": [4, 1], "one empty": [0, 2], "nothing": [0, 0]},
    4: {"uneven": [2, 0, 5, 1]},
}


class Recorder:
    """An exchange, and the reverse of it, that note when they are launched and waited for."""

    def __init__(self, exchange, events: list[str], way: str = "there"):
        self.exchange, self.events, self.way = exchange, events, way

    @property
    def reverse(self) -> Recorder:
        return Recorder(self.exchange.reverse, self.events, "back" if self.way == "there" else "there")

    def launch(self, tensors):
        self.events.append(f"launch {self.way}")
        wait = self.exchange.launch(tensors)
        return lambda: self.events.append(f"wait {self.way}") or wait()


def make(kind: str, name: str):
    """The exchange, the rows that each rank gives, and the function from these to what this rank gets."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    if kind == "alltoall":
        route = torch.tensor(ROUTES[ranks][name])
        send, receive = route.tolist(), route.t().tolist()
        given = [random(sum(send[i]), 3, seed=i) for i in range(ranks)]
        exchange = AllToAll(group=group, send=send[rank], receive=receive[rank])
        return exchange, given, lambda given: torch.cat([x.split(send[i])[rank] for i, x in enumerate(given)])
    sizes = SIZES[ranks][name]
    if kind == "gather":
        given = [random(n, 3, seed=i) for i, n in enumerate(sizes)]
        return GatherRows(group=group, sizes=sizes), given, torch.cat
    given = [random(sum(sizes), 3, seed=i) for i in range(ranks)]
    return ScatterSumRows(group=group, sizes=sizes), given, lambda given: sum(given).split(sizes)[rank]


def there_and_back(kind: str, name: str, run: Callable):
    """The result against what all ranks give, and the gradient against the transpose."""
    exchange, given, reference = make(kind, name)
    rank = dist.get_rank()
    x = given[rank].clone().requires_grad_()
    y = run(exchange, x)
    expected = reference(given)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    y.backward(random(*y.shape, seed=50 + rank))
    # The gradient: by moving it back through the transpose.
    (back,) = exchange.reverse.launch([random(*y.shape, seed=50 + rank)])()
    torch.testing.assert_close(x.grad, back, rtol=0, atol=0)
    # And the transpose is one: <A x, g> = <x, A^T g>, summed over ranks.
    sides = torch.stack([(y.detach() * random(*y.shape, seed=50 + rank)).sum(), (given[rank] * back).sum()])
    dist.all_reduce(sides)
    torch.testing.assert_close(sides[0], sides[1], rtol=1e-13, atol=1e-13)


def split(exchange, x):
    (y,) = arrive(depart(exchange, x))
    return y


def run_every_case():
    ranks = dist.get_world_size()
    for kind, names in (("alltoall", ROUTES), ("gather", SIZES), ("scatter", SIZES)):
        for name in names[ranks]:
            there_and_back(kind, name, exchange_rows)
            there_and_back(kind, name, split)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_values_and_gradients(num_ranks):
    run_on_ranks(num_ranks, run_every_case)


def overlapped(between: bool):
    """Two tensors to the other rank with a layer in between, or after."""
    events: list[str] = []
    rank = dist.get_rank()
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(random(3, 3, seed=7))
        layer.bias.zero_()
    layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("layer backward"))
    x, w = random(4, 3, seed=rank).requires_grad_(), random(4, seed=10 + rank).requires_grad_()
    exchange = AllToAll(
        group=dist.group.WORLD, send=[1, 3] if rank == 0 else [2, 2], receive=[1, 2] if rank == 0 else [3, 2]
    )
    # As in a model: the tensors have a history.
    departed = depart(Recorder(exchange, events), x * 2, w.square())
    if between:
        beside = layer(x)
        events.append("layer")
    rows, weights = arrive(departed)
    if not between:
        beside = layer(x)
        events.append("layer")
    events.append("forward done")
    ((rows * weights.unsqueeze(1)).square().sum() + beside.square().sum()).backward()
    return events, [rows.detach(), weights.detach(), x.grad, w.grad, layer.weight.grad]


def test_what_runs_between_overlaps_in_forward_and_backward():
    ranks = run_on_ranks(2, overlapped, True)
    forward, back = "launch there, layer, wait there, forward done", "launch back, layer backward, wait back"
    for events, _ in ranks:
        assert ", ".join(events) == f"{forward}, {back}"
    for (events, values), (_, others) in zip(run_on_ranks(2, overlapped, False), ranks, strict=True):
        # The recorder would show it: without overlap the layer runs outside.
        assert events[-3:] == ["layer backward", "launch back", "wait back"]
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))


def backward_of(run, x):
    # Reentrant checkpointing does not work with autograd.grad.
    leaf = x.detach().requires_grad_()
    run(leaf).sum().backward()
    return leaf.grad


def odd_uses():
    rank, group = dist.get_rank(), dist.group.WORLD
    exchange = AllToAll(group=group, send=[1, 1], receive=[1, 1])
    x, frozen = random(2, 3, seed=rank).requires_grad_(), random(2, seed=rank)
    numbers = torch.tensor([rank, rank + 10])

    departed = depart(exchange, x, frozen, numbers)
    y, still, got = arrive(departed)
    assert (y.requires_grad, still.requires_grad, got.requires_grad) == (True, False, False)
    assert got.tolist() == [[0, 1], [10, 11]][rank]
    with pytest.raises(RuntimeError, match="arrive: called twice"):
        arrive(departed)

    # Twice through one graph.
    (once,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (twice,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(once, twice) and torch.equal(once, 2 * x)

    # The weights alone.
    weights = frozen.clone().requires_grad_()
    rows, moved = arrive(depart(exchange, x.detach(), weights))
    assert not rows.requires_grad
    (moved * torch.tensor([1.0, 2.0])).sum().backward()
    assert weights.grad.tolist() == [rank + 1, rank + 1]

    with torch.no_grad():
        (y,) = arrive(depart(exchange, x))
        assert not y.requires_grad

    # Recomputed: the second forward sends once more, and the gradients come back by the second.
    def inner(x):
        departed = depart(exchange, x.sin())
        beside = x.cos()
        return (arrive(departed)[0] * beside).sin()

    for reentrant in (True, False):
        recomputed = functools.partial(checkpoint, inner, use_reentrant=reentrant)
        assert torch.equal(backward_of(recomputed, x), backward_of(inner, x))

    # Sent memory that the caller forgets, and that is given away again: the exchange has to keep it.
    large = AllToAll(group=group, send=[1000, 1000], receive=[1000, 1000])
    pending = [depart(large, torch.full((2000, 50), float(i))) for i in range(20)]
    junk = [torch.full((2000, 50), -1.0) for _ in range(20)]
    assert [arrive(one)[0].unique().tolist() for one in pending] == [[float(i)] for i in range(20)]
    assert len(junk) == 20

    # A dispatch that is never finished, as when an error is raised in between, or recomputation stops early.
    depart(exchange, x)
    dist.barrier()


def test_odd_uses():
    run_on_ranks(2, odd_uses)


class Joined:
    """As NCCL's: the collectives begun inside return no work of their own, and are waited for together."""

    def __init__(self, seen):
        self.works, self.seen = [], seen

    def __enter__(self):
        self._all_to_all = dist.all_to_all_single
        dist.all_to_all_single = lambda *args, **kw: self.works.append(self._all_to_all(*args, **kw))
        return self

    def __exit__(self, *error):
        dist.all_to_all_single = self._all_to_all
        self.seen.append(len(self.works))

    def wait(self):
        for work in self.works:
            work.wait()
        self.seen.append("waited")


def joined():
    group, seen, results = dist.group.WORLD, [], []
    collectives._coalescing_manager = lambda *args, **kw: Joined(seen)
    exchange = AllToAll(group=group, send=[1, 2], receive=[1, 1] if dist.get_rank() == 0 else [2, 2])
    for can_join in (False, True):
        collectives.can_join = lambda *_, can_join=can_join: can_join
        x, weights = (random(3, *size, seed=dist.get_rank()).requires_grad_() for size in ((4,), ()))
        rows, moved = arrive(depart(exchange, x, weights))
        (rows.square().sum() + moved.square().sum() + exchange_rows(exchange, x).sum()).backward()
        results.append([rows, moved, x.grad, weights.grad])
    return seen, results


def test_several_tensors_are_exchanged_together_where_the_backend_can():
    """In both directions, with the same results; a single tensor needs nothing to join."""
    for seen, (apart, together) in run_on_ranks(2, joined):
        assert seen == [2, "waited", 2, "waited"]
        assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


@pytest.mark.parametrize("run", [exchange_rows, split])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (GatherRows, {"sizes": [3]}),
        (ScatterSumRows, {"sizes": [3]}),
        (AllToAll, {"send": [3], "receive": [3]}),
    ],
)
def test_without_a_group_rows_stay(kind, rows, run):
    x = random(3, 2, seed=1).requires_grad_()
    y = run(kind(group=None, **rows), x)
    assert torch.equal(y, x)
    y.backward(random(3, 2, seed=2))
    assert torch.equal(x.grad, random(3, 2, seed=2))


class Canary:
    pass


def freed():
    """Whether the graph behind a tensor is freed with the last reference to what was made from it."""
    results = []
    exchange = AllToAll(group=dist.group.WORLD, send=[1, 1], receive=[1, 1])
    for land in (False, True):
        history = random(2, 3, seed=1).requires_grad_() * 2
        canary = Canary()
        history.grad_fn.metadata["canary"] = canary
        sight = weakref.ref(canary)
        departed = depart(exchange, history)
        arrived = arrive(departed) if land else None
        del canary, history
        gc.collect()
        alive = sight() is not None
        del departed, arrived
        deadline = time.monotonic() + 20
        while sight() is not None and time.monotonic() < deadline:  # the process group has rows on their way
            gc.collect()
        results.append((alive, sight() is None))
    dist.barrier()
    return results


def test_the_shared_state_of_the_two_nodes_does_not_keep_the_graph_alive():
    assert run_on_ranks(2, freed) == [[(True, True), (True, True)]] * 2
