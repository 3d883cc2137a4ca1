import functools

import pytest
import torch
import torch.distributed as dist

from helpers.layers.references import Waits, make_groups
from helpers.layers.tiny_moe import EXPERTS, HIDDEN, decide, pushed_tokens, random, tiny_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.dispatcher import AllToAllDispatcher, Dispatcher, LocalDispatcher, row_order
from moe_exp.layers.dispatcher import dispatcher as dispatchers
from moe_exp.layers.dispatcher.allgather import AllGatherDispatcher
from moe_exp.layers.dispatcher.collectives import AllToAll, GatherRows, ScatterSumRows

OVER_RANKS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
LAYOUTS = [(2, 1), (1, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (2, 2)))]


# Identity experts: y_t = x_t * sum of the weights of its kept slots, whatever the layout.


def check_identity(dispatcher: Dispatcher, expert_TK, kept_TK, *, rows_per_expert=None, seed=0, parts=1):
    """`parts` ranks each compute a part of every row, as with expert tensor parallelism."""
    weights_TK = random(*expert_TK.shape, seed=seed).requires_grad_()
    x_TD, grad_TD = (random(expert_TK.size(0), HIDDEN, seed=seed + place) for place in (1, 2))
    keep_TK = torch.ones_like(expert_TK, dtype=torch.bool) if kept_TK is None else kept_TK
    # Whatever a padding token holds must not reach anything.
    x_TD = x_TD.masked_fill(~keep_TK.any(dim=1, keepdim=True), float("nan")).requires_grad_()
    decision = decide(expert_TK, weights_TK, kept_TK=kept_TK)
    dispatched = dispatcher.finish(dispatcher.start(x_TD, decision, rows_per_expert))
    results_RD = dispatched.rows_RD * dispatched.weights_R.unsqueeze(1) / parts
    y_TD = dispatcher.combine(results_RD, dispatched.record)
    y_TD.backward(grad_TD)

    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)

    x_TD0 = x_TD.detach().nan_to_num(0.0)
    factor_T1 = (weights_TK.detach() * keep_TK).sum(dim=1, keepdim=True)
    close(y_TD, x_TD0 * factor_T1)
    close(x_TD.grad, grad_TD * factor_T1)
    close(weights_TK.grad, keep_TK * (x_TD0 * grad_TD).sum(dim=1, keepdim=True))
    splits = dispatched.tokens_per_expert_L.tolist()
    assert sum(splits) == dispatched.rows_RD.size(0) == dispatched.weights_R.numel()
    assert dispatched.splits is None or list(dispatched.splits) == splits
    return dispatched


def drawn_cases(num_ranks: int) -> list:
    """Each rank's expert_TK and kept_TK, and rows_per_expert; some ranks have no tokens."""
    generator = torch.Generator().manual_seed(num_ranks)
    cases = []
    for case in range(16):
        topk = [1, 2, 3, EXPERTS][case % 4]
        ranks = []
        for rank in range(num_ranks):
            num_tokens = int(torch.randint(1, 8, (), generator=generator))
            if case == 7 or (case % 3 == 1 and rank == case % num_ranks):
                num_tokens = 0
            expert_TK = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :topk]
            if case % 5 == 4:  # all tokens to the first experts
                expert_TK = torch.arange(topk).repeat(num_tokens, 1)
            kept_TK = torch.rand(num_tokens, topk, generator=generator) < [0.0, 0.6, 0.9][case % 3]
            ranks.append((expert_TK, None if case % 4 == 0 else kept_TK))
        cases.append((ranks, None if case % 2 else 7))
    return cases


def check_drawn_cases(ep: int, etp: int):
    groups = make_groups(ep, etp)
    rank = dist.get_rank()
    dispatchers = {name: make(EXPERTS, **groups) for name, make in OVER_RANKS.items()}
    if ep * etp == 1:
        dispatchers["local"] = LocalDispatcher(EXPERTS)
    for name, dispatcher in dispatchers.items():
        for number, (ranks, rows_per_expert) in enumerate(drawn_cases(ep * etp)):
            options = {"rows_per_expert": rows_per_expert, "seed": 1000 * rank + number, "parts": etp}
            dispatched = check_identity(dispatcher, *ranks[rank], **options)
            received = torch.tensor(dispatched.rows_RD.size(0))
            dist.all_reduce(received)
            kept = sum(expert.numel() if keep is None else int(keep.sum()) for expert, keep in ranks)
            padded = EXPERTS * (rows_per_expert or 0) * ep * etp * etp
            assert received == (padded or etp * kept), (name, number)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), *LAYOUTS])
def test_identity_experts_on_ranks(ep, etp):
    run_on_ranks(ep * etp, check_drawn_cases, ep, etp)


def record_collectives(launches, waits=lambda: None):
    """On a rank: calls `launches` with the shape of all that is sent from now on, `waits` when it is waited
    for.
    """
    for kind in (AllToAll, GatherRows, ScatterSumRows):

        def launch_and_record(self, x, group, launch=kind._launch):
            launches(tuple(x.shape))
            wait = launch(self, x, group)
            return lambda: waits() or wait()

        kind._launch = launch_and_record


def count_what_is_sent():
    """Shapes that travel if 3 of 5 tokens have no kept slot, and if only the other 2 are there."""
    groups, shapes, launched = make_groups(2, 1), {}, []
    record_collectives(launched.append)
    expert_TK = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 2]])
    kept_TK = torch.tensor([[False, False], [True, True], [False, False], [False, False], [True, False]])
    for name, make in OVER_RANKS.items():
        for tokens in (slice(None), [1, 4]):
            launched.clear()
            check_identity(make(EXPERTS, **groups), expert_TK[tokens], kept_TK[tokens])
            shapes.setdefault(name, []).append(list(launched))
    return shapes


def test_tokens_without_a_kept_slot_do_not_travel():
    for shapes in run_on_ranks(2, count_what_is_sent):
        for name, (with_padding, without) in shapes.items():
            assert with_padding == without, name
        assert shapes["alltoall"][0][:2] == [(3, HIDDEN), (3,)]
        assert shapes["allgather"][0][:3] == [(2, HIDDEN), (2, 2), (2, 2)]


def count_waits():
    """Waits of every dispatcher: dropless, with drops, with drops and padding."""
    counts: dict[str, list[int]] = {}
    groups = make_groups(2, 1)
    for name in ("local", *OVER_RANKS):
        for kept, rows_per_expert in ((False, None), (True, None), (True, 9)):
            dispatcher = LocalDispatcher(EXPERTS) if name == "local" else OVER_RANKS[name](EXPERTS, **groups)
            expert_TK = random(9, EXPERTS, seed=dist.get_rank()).argsort(dim=1)[:, :2]
            kept_TK = random(9, 2, seed=dist.get_rank()) > 0 if kept else None
            decision = decide(expert_TK, random(9, 2, seed=1).requires_grad_(), kept_TK=kept_TK)
            for _ in range(2):  # the second time, when constants are made
                with Waits() as waits:
                    x_TD = random(9, HIDDEN, seed=2).requires_grad_()
                    dispatched = dispatcher.finish(dispatcher.start(x_TD, decision, rows_per_expert))
                    weighted_RD = dispatched.rows_RD * dispatched.weights_R.unsqueeze(1)
                    dispatcher.combine(weighted_RD, dispatched.record).sum().backward()
            counts.setdefault(name, []).append(len(waits.found))
    return counts


def test_waits_for_the_device():
    for counts in run_on_ranks(2, count_waits):
        assert counts == {"local": [0, 1, 0], "alltoall": [1, 1, 0], "allgather": [1, 1, 1]}


def steps_of_start(has_drops: bool) -> list[str]:
    """What the host does in order, in forward and backward of a dispatch by all-to-all over two ranks."""
    steps: list[str] = []

    def record(owner, name, step):
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: steps.append(step) or function(*args, **options))

    def start_copy(counts, start=dispatchers.start_copy):
        steps.append("copy")
        read = start(counts)
        return lambda: steps.append("read") or read()

    dispatchers.start_copy = start_copy
    record(dist, "all_to_all_single", "exchange")
    record(dispatchers.RowOrder, "rows", "rows")
    record(dispatchers.RowOrder, "weights", "weights")
    dispatcher = AllToAllDispatcher(EXPERTS, **make_groups(2, 1))
    expert_TK = torch.tensor([[0, 1], [1, 2], [3, 0]])
    kept_TK = torch.tensor([[True, False]] * 3) if has_drops else None
    check_identity(dispatcher, expert_TK, kept_TK)
    return steps


def test_the_host_reads_after_the_launch_of_the_rows():
    """With drops it needs their number first. A layer has seven all-to-alls: the counts; rows and weights;
    results; and back the gradients of these three.
    """
    for steps in run_on_ranks(2, steps_of_start, False):
        assert steps[:7] == ["exchange", "copy", "rows", "weights", "read", "exchange", "exchange"]
        assert steps.count("exchange") == 7
    for steps in run_on_ranks(2, steps_of_start, True):
        assert steps[:7] == ["exchange", "copy", "read", "rows", "weights", "read", "exchange"]


def make_with_three_experts(name):
    OVER_RANKS[name](3, ep_group=dist.group.WORLD, etp_group=None)


@pytest.mark.parametrize("name", OVER_RANKS)
def test_experts_that_the_ranks_do_not_divide(name):
    with pytest.raises(RuntimeError, match=r"num_experts=3: .* 2\. Fix: set EP to a divisor"):
        run_on_ranks(2, make_with_three_experts, name)


# What is computed between start and finish.


def record_order(name: str, ep: int, etp: int) -> list[str]:
    """Launches and waits of a layer with a shared expert, forward and backward."""
    events: list[str] = []
    groups = make_groups(ep, etp)
    record_collectives(lambda _: events.append("launch"), lambda: events.append("wait"))
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.weight.register_post_accumulate_grad_hook(lambda _: events.append("shared backward"))
    layer = tiny_layer(shared=shared, **groups)
    layer.dispatcher = OVER_RANKS[name](EXPERTS, **groups)
    x_TD = pushed_tokens([[0, 3], [1, 2], [2, 0]], seed=dist.get_rank()).requires_grad_()
    layer(x_TD)[0].square().sum().backward()
    assert events.count("launch") == events.count("wait")
    return events


def under_way(events: list[str], name: str) -> int:
    """Collectives in flight while `name` happens."""
    before = events[: events.index(name)]
    return before.count("launch") - before.count("wait")


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "forward"), [("alltoall", 2), ("allgather", 3)])
def test_the_shared_expert_overlaps_with_both_ways(name, forward, ep, etp):
    """Rows and weights (and experts, of the all-gather) forward, their gradients backward."""
    for events in run_on_ranks(ep * etp, record_order, name, ep, etp):
        assert under_way(events, "shared") == forward
        assert under_way(events, "shared backward") == 2


# Whole layers on ranks against one rank. Every case has four tokens for each of four ranks.

ROUND_ROBIN = [[t % 4, (t + 1) % 4] for t in range(16)]
PADDED = {"pad_to_capacity": True}
CASES = {
    "even": (ROUND_ROBIN, 2, {}),
    "uneven": ([[0, 1]] * 3 + [[3, 0]] + [[0, 2]] * 7 + [[2, 1]] + [[0, 3]] * 4, 2, {}),
    "empty experts": ([[1, 2]] * 9 + [[2, 1]] * 7, 2, {}),
    "all tokens to the first expert": ([[0]] * 16, 1, {}),
    "all tokens to the last expert": ([[3]] * 16, 1, {}),
    "one token per rank": ([[2, 1], [3, 0], [2, 0], [2, 3]], 2, {}),
    "every expert": (ROUND_ROBIN, 4, {}),
    "drops": (ROUND_ROBIN[:8] + [[0, 1]] * 8, 2, {"capacity_factor": 0.8}),
    "drops and padding": (ROUND_ROBIN[:8] + [[0, 1]] * 8, 2, PADDED | {"capacity_factor": 0.8}),
    "padding only": (ROUND_ROBIN, 2, PADDED | {"capacity_factor": 4.0}),
    "drops of whole experts' worth": ([[3]] * 16, 1, PADDED | {"capacity_factor": 0.5}),
    "not gated": (ROUND_ROBIN, 2, {"activation": "squared_relu"}),
}


def run_case(name: str, dispatcher: str = "local", **groups):
    """Output, gradients of input, router, and expert weights, loss and kept slots, of this rank's tokens."""
    experts, topk, settings = CASES[name]
    x_TD, grad_TD = pushed_tokens(experts), random(len(experts), HIDDEN, seed=9)
    if groups:
        group = groups["microbatch_group"]
        x_TD, grad_TD = (x.chunk(group.size())[group.rank()].clone() for x in (x_TD, grad_TD))
    layer = tiny_layer(topk=topk, aux_loss_coeff=0.3, z_loss_coeff=0.2, **settings, **groups)
    if groups:
        del groups["microbatch_group"]
        layer.dispatcher = OVER_RANKS[dispatcher](EXPERTS, **groups)
    x_TD.requires_grad_()
    y_TD, loss = layer(x_TD)
    ((y_TD * grad_TD).sum() + loss).backward()
    grads = [x_TD.grad, layer.router.weight.grad, layer.experts.weight1.grad, layer.experts.weight2.grad]
    kept_TK = layer.route(x_TD.detach()).kept_TK
    return y_TD.detach(), grads, loss.item(), kept_TK


def run_cases_on_rank(ep: int, etp: int):
    groups = make_groups(ep, etp) | {"microbatch_group": dist.group.WORLD}
    return {(kind, name): run_case(name, kind, **groups) for kind in OVER_RANKS for name in CASES}


@functools.cache
def on_ranks(ep: int, etp: int):
    return run_on_ranks(ep * etp, run_cases_on_rank, ep, etp)


def join_experts(ranks: list[torch.Tensor], axis: int, halves: int, ep: int, etp: int) -> torch.Tensor:
    """The tensor of all experts from the parts of the ranks: the inverse of `tiny_moe.cut`."""
    whole = []
    for e in range(ep):
        parts = [rank.chunk(halves, dim=axis) for rank in ranks[e * etp : (e + 1) * etp]]
        whole.append(torch.cat([part[half] for half in range(halves) for part in parts], dim=axis))
    return torch.cat(whole)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ep", "etp"), LAYOUTS)
@pytest.mark.parametrize("dispatcher", OVER_RANKS)
def test_layer_on_ranks_equals_one_rank(dispatcher, ep, etp, name):
    y_TD, (x_grad, router_grad, grad1, grad2), loss, kept_TK = run_case(name)
    ranks = [rank[dispatcher, name] for rank in on_ranks(ep, etp)]

    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    close(torch.cat([rank[0] for rank in ranks]), y_TD)
    close(torch.cat([rank[1][0] for rank in ranks]), x_grad)
    close(sum(rank[1][1] for rank in ranks), router_grad)
    close(join_experts([rank[1][2] for rank in ranks], 1, 1 if name == "not gated" else 2, ep, etp), grad1)
    close(join_experts([rank[1][3] for rank in ranks], 2, 1, ep, etp), grad2)
    assert sum(rank[2] for rank in ranks) == pytest.approx(loss, rel=1e-12)
    assert (kept_TK is not None and not kept_TK.all()) == ("drops" in name)
    if kept_TK is not None:
        assert torch.equal(torch.cat([rank[3] for rank in ranks]), kept_TK)


def padded_on_rank(experts: list[list[int]], spread: bool) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Rows of every expert, output and gradients of this rank; all experts on every rank unless `spread`."""
    group = dist.group.WORLD if dist.is_initialized() else None
    parts, rank = (1, 0) if group is None else (group.size(), group.rank())
    whole = pushed_tokens(experts), random(len(experts), HIDDEN, seed=9)
    x_TD, grad_TD = (x.chunk(parts)[rank].clone() for x in whole)
    settings = {"capacity_factor": 1.0, "pad_to_capacity": True, "microbatch_group": group}
    layer = tiny_layer(ep_group=group if spread else None, aux_loss_coeff=0.3, **settings)
    rows, pad_by_expert = [], row_order.pad_by_expert

    def pad_and_record(*arguments, **options):
        rows.append(options["rows_per_expert"])
        return pad_by_expert(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        for module in (dispatchers, row_order):
            patched.setattr(module, "pad_by_expert", pad_and_record)
        y_TD, loss = layer(x_TD.requires_grad_())
        ((y_TD * grad_TD).sum() + loss).backward()
    gradients = [layer.router.weight.grad, layer.experts.weight1.grad, layer.experts.weight2.grad]
    return *rows, y_TD.detach(), gradients


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_padding_is_to_the_capacity_of_the_rank_s_tokens(ranks, spread):
    whole_rows, y_TD, (router, *weights) = padded_on_rank(ROUND_ROBIN, False)
    assert whole_rows == 8  # 16 tokens of 2 experts over 4
    found = run_on_ranks(ranks, padded_on_rank, ROUND_ROBIN, spread)
    assert [rank[0] for rank in found] == [8 // ranks] * ranks
    assert_equal_to(1e-12, {"y": torch.cat([rank[1] for rank in found])}, {"y": y_TD})
    assert_equal_to(1e-12, {"router": sum(rank[2][0] for rank in found)}, {"router": router})
    for place, weight in enumerate(weights, start=1):
        of_ranks = [rank[2][place] for rank in found]
        assert_equal_to(1e-12, {"w": torch.cat(of_ranks) if spread else sum(of_ranks)}, {"w": weight})


def test_padding_makes_room_for_what_a_rank_keeps_beyond_its_share():
    # the first of two ranks keeps six of the eight slots of expert 0, and its share is four
    experts = [[0, 1]] * 6 + [[2, 3]] * 2 + ROUND_ROBIN[:8]
    _, y_TD, _ = padded_on_rank(experts, False)
    alone, spread = (run_on_ranks(2, padded_on_rank, experts, is_spread) for is_spread in (False, True))
    assert [rank[0] for rank in alone] == [6, 4]
    assert [rank[0] for rank in spread] == [6, 6]  # the same for all that exchange rows
    for found in (alone, spread):
        assert_equal_to(1e-12, {"y": torch.cat([rank[1] for rank in found])}, {"y": y_TD})
