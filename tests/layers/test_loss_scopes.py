"""Every balancing loss has one gradient of router and input, however its tokens are cut: over tensor, context
and data parallel ranks, into micro-batches, with and without recompute.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from helpers.ranks import run_on_ranks
from moe_exp.layers.losses import (
    AuxLoss,
    global_balancing_loss_share,
    load_balancing_loss_share,
    sequence_balancing_loss_share,
)
from moe_exp.layers.microbatch import MoESettings, context_ranges

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
SEQUENCES, LENGTH = 8, 12
TOKENS_BSD = random(SEQUENCES, LENGTH, HIDDEN, seed=11)


def close(actual, expected, rtol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


# Values by hand


def test_sequence_loss_by_hand():
    # Two sequences of four and six tokens, the second four padded to six. E = 2, K = 1.
    scores_BSE = torch.tensor(
        [[[0.75, 0.25]] * 4 + [[0.0, 0.0]] * 2, [[0.75, 0.25]] * 3 + [[0.25, 0.75]] * 3]
    )
    expert_BSK = scores_BSE.argmax(dim=-1, keepdim=True)
    valid_BS = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    # 2 * (1 * .75 + 0 * .25) = 1.5 and 2 * (.5 * .5 + .5 * .5) = 1.
    loss = sequence_balancing_loss_share(scores_BSE, expert_BSK, valid_BS)
    assert loss.item() == pytest.approx(1.25, rel=1e-6)
    # Together they are 7 to 3 tokens, and the mean scores .6 and .4: 2 * (.7 * .6 + .3 * .4) = 1.08.
    flat_TE = scores_BSE.flatten(0, 1)[valid_BS.flatten()]
    loss = load_balancing_loss_share(flat_TE, torch.tensor([7, 3]), topk=1)
    assert loss.item() == pytest.approx(1.08, rel=1e-6)


def test_global_loss_by_hand():
    scores_TE, own = torch.tensor([[0.75, 0.25]] * 10), torch.tensor([10, 0])
    # Without a global batch yet, all ten of this micro-batch went to expert 0: 2 * .75. After one with
    # fractions .2 and .8: 2 * (.2 * .75 + .8 * .25).
    for counts, expected in (([0.0, 0.0], 1.5), ([20.0, 80.0], 0.7)):
        loss = global_balancing_loss_share(scores_TE, torch.tensor(counts), own)
        assert loss.item() == pytest.approx(expected)


# The layer: gradients of router and input from the balancing losses alone


def layer_with(kind, **arguments):
    router = {"global_fractions": kind == "global_aux_loss"}
    return tiny_layer(losses=(AuxLoss(kind, 0.7),), router=router, **arguments)


def backward(layer, x_BSD, *, num_microbatches, num_replicas=1):
    """Gradients of the mean over micro-batches and replicas, for one batch of this rank."""
    layer.router.weight.grad = None
    x_BSD = x_BSD.clone().requires_grad_()
    for part_BSD in x_BSD.chunk(num_microbatches):
        _, loss = layer(part_BSD)
        (loss / (num_microbatches * num_replicas)).backward()
    return layer.router.weight.grad.clone(), x_BSD.grad


def second_batch(layer, x, group=None, num_microbatches=1):
    """Gradients of router and input from the balancing loss of the second of two global batches."""
    for _ in range(2):
        gradients = backward(layer, x, num_microbatches=num_microbatches)
        layer.router.end_of_batch(group)
    return gradients


def two_batches(kind, *, num_microbatches, rank=0, num_replicas=1, group=None, **arguments):
    """The second of two global batches, so that there is state of the first."""
    layer = layer_with(kind, **arguments)
    for seed in (0.5, 1.0):
        mine_BSD = (TOKENS_BSD * seed).chunk(num_replicas)[rank]
        gradients = backward(layer, mine_BSD, num_microbatches=num_microbatches, num_replicas=num_replicas)
        layer.router.end_of_batch(group)
    return gradients


@functools.cache
def for_every_kind(num_ranks, function, argument):
    """Kind of loss to what each rank finds, by `function(kind, argument)`."""
    ranks = run_on_ranks(num_ranks, on_rank, function, argument)
    return {kind: [rank[kind] for rank in ranks] for kind in KINDS}


def on_rank(function, argument):
    return {kind: function(kind, argument) for kind in KINDS}


def data_parallel(kind, num_microbatches):
    group = dist.group.WORLD
    ranks = {"rank": group.rank(), "num_replicas": group.size(), "group": group}
    router, x = two_batches(kind, num_microbatches=num_microbatches, **ranks)
    dist.all_reduce(router)
    return router, x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_data_parallel_ranks_and_micro_batches_do_not_change_the_gradient(kind, num_ranks):
    router, x = two_batches(kind, num_microbatches=4)
    ranks = for_every_kind(num_ranks, data_parallel, 4 // num_ranks)[kind]
    close(ranks[0][0], router)
    close(torch.cat([rank[1] for rank in ranks]), x)
    assert router.norm() > 1e-3


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_scopes_other_than_the_micro_batch_do_not_depend_on_its_size(kind, num_microbatches):
    router, x = two_batches(kind, num_microbatches=1)
    other_router, other_x = two_batches(kind, num_microbatches=num_microbatches)
    close(other_router, router)
    close(other_x, x)


def test_global_loss_of_one_batch_is_the_formula_over_all_of_it():
    """With the fractions of the very batch."""
    router, x = second_batch(layer_with("global_aux_loss"), TOKENS_BSD, num_microbatches=4)
    whole = layer_with("aux_loss")
    whole_router, whole_x = backward(whole, TOKENS_BSD, num_microbatches=1)
    close(router, whole_router)
    close(x, whole_x)


def split_sequence(kind, context_parallel_size):
    """Tensor parallel ranks hold pieces of the sequence [S, B, D], context parallel ones two blocks each."""
    group = dist.group.WORLD
    layer = layer_with(kind, microbatch_group=group, context_parallel_size=context_parallel_size, batch_dim=1)
    positions = torch.arange(LENGTH)
    mine = positions.chunk(group.size())[group.rank()]
    if context_parallel_size > 1:
        ranges = context_ranges(LENGTH, cp_rank=group.rank(), cp_size=group.size())
        mine = torch.cat([positions[first:end] for first, end in ranges])
    router, x_grad = second_batch(layer, TOKENS_BSD.transpose(0, 1)[mine], group)
    dist.all_reduce(router)
    return router, mine, x_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "cp"), [(2, 1), (2, 2), (4, 1)])
def test_ranks_that_share_a_micro_batch_do_not_change_the_gradient(kind, num_ranks, cp):
    router, x_grad = second_batch(layer_with(kind, batch_dim=1), TOKENS_BSD.transpose(0, 1))
    ranks = for_every_kind(num_ranks, split_sequence, cp)[kind]
    close(ranks[0][0], router)
    for _, mine, grad in ranks:
        close(grad, x_grad[mine])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_counts_once_and_has_the_same_gradient(use_reentrant):
    losses = tuple(AuxLoss(kind, 0.1 * (i + 1)) for i, kind in enumerate(KINDS))
    router = {"global_fractions": True, "expert_bias": True, "score": "sigmoid"}
    results = []
    for recompute in (False, True):
        layer = tiny_layer(losses=losses, z_loss_coeff=0.3, router=router)
        x = TOKENS_BSD.clone().requires_grad_()
        y, loss = checkpoint(layer, x, use_reentrant=use_reentrant) if recompute else layer(x)
        (y.square().sum() + loss).backward()
        statistics = layer.statistics
        counts = [layer.router.local_tokens_per_expert, layer.router.batch_tokens_per_expert]
        counts += [statistics.tokens_per_expert_E, statistics.sums]
        results.append([x.grad, *(parameter.grad for parameter in layer.parameters()), *counts])
        assert statistics.num_microbatches == 1
        assert statistics.tokens_per_expert_E.sum() == SEQUENCES * LENGTH * 2
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_as_if_it_were_not_there(kind):
    """The tokens of padding change neither the loss nor the gradient, and get none."""
    padding_BS = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding_BS[:, 9:] = True
    x = TOKENS_BSD[:2].clone().requires_grad_()
    layer, short = layer_with(kind, z_loss_coeff=0.3), layer_with(kind, z_loss_coeff=0.3)
    y, loss = layer(x, padding_BS)
    (y.square().sum() + loss).backward()
    x_short = TOKENS_BSD[:2, :9].clone().requires_grad_()
    y_short, loss_short = short(x_short)
    (y_short.square().sum() + loss_short).backward()
    close(loss, loss_short)
    close(y[:, :9], y_short)
    assert not y[:, 9:].any() and not x.grad[:, 9:].any()
    close(x.grad[:, :9], x_short.grad)
    for parameter, expected in zip(layer.parameters(), short.parameters(), strict=True):
        close(parameter.grad, expected.grad)
    assert torch.equal(layer.statistics.tokens_per_expert_E, short.statistics.tokens_per_expert_E)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_alone_has_no_loss(kind):
    x = TOKENS_BSD[:2].clone().requires_grad_()
    layer = layer_with(kind)
    y, loss = layer(x, torch.ones(2, LENGTH, dtype=torch.bool))
    (y.square().sum() + loss).backward()
    assert loss == 0 and not y.any() and not x.grad.any()
    assert not any(parameter.grad.any() for parameter in layer.parameters() if parameter.grad is not None)


def test_padding_takes_no_capacity_and_is_no_drop():
    # Capacity ceil(12 * 2 / 4 * 0.5) = 3; half of the 24 are padding, that would fill the experts first.
    padding_BS = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding_BS[:, : LENGTH // 2] = True
    layer = tiny_layer(capacity_factor=0.5, drop_policy="position")
    layer(TOKENS_BSD[:2], padding_BS)
    alone = tiny_layer(capacity_factor=0.5, drop_policy="position")
    alone(TOKENS_BSD[:2, LENGTH // 2 :])
    assert torch.equal(layer.statistics.tokens_per_expert_E, alone.statistics.tokens_per_expert_E)
    assert layer.statistics.sums[0] == alone.statistics.sums[0]


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_losses_count_the_experts_of_highest_score_whatever_the_bias(kind):
    router = {"expert_bias": True, "score": "sigmoid", "global_fractions": kind == "global_aux_loss"}
    plain, layer = (tiny_layer(losses=(AuxLoss(kind, 0.7),), router=router) for _ in range(2))
    layer.router.expert_bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    for _ in range(2):  # the second with the fractions of the first
        close(layer(TOKENS_BSD)[1], plain(TOKENS_BSD)[1])
        for one in (plain, layer):
            one.router.end_of_batch()
    assert layer.statistics.tokens_per_expert_E[0] == 2 * SEQUENCES * LENGTH
    if kind == "global_aux_loss":
        counts = layer.router.global_tokens_per_expert
        assert torch.equal(counts, plain.router.global_tokens_per_expert) and len(counts.unique()) > 1
        assert counts.sum() == SEQUENCES * LENGTH * 2
        assert "global_tokens_per_expert" in layer.router.state_dict()


def test_losses_in_a_list_add_up():
    coeffs = {"aux_loss": 0.5, "seq_aux_loss": 0.25, "entropy": 2.0}
    layer = tiny_layer(losses=tuple(AuxLoss(kind, coeff) for kind, coeff in coeffs.items()))
    _, loss = layer(TOKENS_BSD)
    balance, z, _, *each = layer.statistics.sums[4:].tolist()
    expected = sum(coeff * value for coeff, value in zip(coeffs.values(), each, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert each[0] == balance and z > 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AuxLoss("aux", 0.1), r"aux_loss_type=aux: .* Fix: use aux_loss, "),
        (lambda: AuxLoss("aux_loss", -0.1), r"aux_loss_coeff=-0\.1: .* negative"),
        (lambda: MoESettings(drop_policy="last"), r"drop_policy=last: .* Fix: use probs or position"),
        (lambda: MoESettings(capacity_factor=0.0), r"capacity_factor=0\.0: .* positive"),
        (lambda: MoESettings(pad_to_capacity=True), r"pad_to_capacity=True: .* Fix: set capacity_factor"),
        (lambda: MoESettings(min_capacity=3), r"min_capacity=3: .* Fix: set capacity_factor"),
        (
            lambda: MoESettings(token_rounding=-1),
            r"token_rounding=-1: .* negative\. Fix: set token_rounding to 0",
        ),
        (
            lambda: MoESettings(token_rounding=64, capacity_factor=1.0),
            "token_rounding=64: .* capacity_factor",
        ),
        (lambda: tiny_layer(losses=(AuxLoss("global_aux_loss", 1),)), r"Fix: set global_fractions=True"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
