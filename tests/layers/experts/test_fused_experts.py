"""The `triton` backend as a whole. Without a GPU the kernels run under Triton's interpreter, or their twins
where that is said.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from helpers.layers.kernel_device import DEVICE
from helpers.layers.references import Waits, formula, make_groups
from helpers.layers.tiny_moe import HIDDEN, cut, pushed_tokens, random, tiny_layer
from helpers.ranks import run_on_ranks
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.dispatcher import Dispatched, DispatchRecord, LocalDispatcher, sort_slots
from moe_exp.layers.experts import Experts, fused
from moe_exp.layers.experts.fused import experts_of_rows, experts_of_tokens
from moe_exp.layers.experts.loop import ExpertWeights, expert_loop
from moe_exp.layers.kernels import launch
from moe_exp.layers.router import RoutingDecision

TOKENS = [[t % 4, (t + 1) % 4] for t in range(9)] + [[0, 1]] * 4 + [[2, 0]] * 4


@pytest.fixture
def twins(monkeypatch):
    """Plain torch in the place of the kernels, as on a CPU without the interpreter."""
    monkeypatch.setattr(launch, "INTERPRETED", False)


def leaves_of(
    *, num_tokens=13, topk=2, num_experts=5, hidden=24, ffn=20, activation="swiglu", dtype=torch.float32,
    bias=False,
):  # fmt: skip
    """x, router weights, weight1 and weight2, bias1 and bias2 with gradient; the router weights are fp32 at
    least.
    """
    width = ffn * (2 if ACTIVATIONS[activation].gated else 1)
    x, weights = random(num_tokens, hidden, seed=1).to(dtype), random(num_tokens, topk, seed=2).abs()
    scale = 1.5 if ACTIVATIONS[activation].limit else 0.3  # some rows are beyond the limit
    shapes = [(width, hidden), (hidden, ffn), *([(width,), (hidden,)] if bias else [])]
    parameters = [(scale * random(num_experts, *shape, seed=3)).to(dtype) for shape in shapes]
    return [
        leaf.requires_grad_()
        for leaf in (x, weights.to(torch.promote_types(dtype, torch.float32)), *parameters)
    ]


def chosen(num_tokens: int, topk: int, num_experts: int) -> torch.Tensor:
    """Experts of the tokens; the last expert gets none."""
    return random(num_tokens, num_experts - 1, seed=5).argsort(dim=1)[:, :topk]


def token_by_token(
    x_TD, weights_TK, expert_TK, kept_TK, weight1, weight2, bias1=None, bias2=None, *, activation
):
    bias1 = weight1.new_zeros(weight1.shape[:2]) if bias1 is None else bias1
    bias2 = weight2.new_zeros(weight2.shape[:2]) if bias2 is None else bias2
    outs = []
    for t, x in enumerate(x_TD):
        out = torch.zeros_like(x)
        for k, e in enumerate(expert_TK[t].tolist()):
            if kept_TK is None or kept_TK[t, k]:
                active = formula(activation, weight1[e] @ x + bias1[e])
                out = out + weights_TK[t, k] * (weight2[e] @ active + bias2[e])
        outs.append(out)
    return torch.stack(outs)


def with_gradients(function, leaves, dy) -> list[torch.Tensor]:
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def doubles(leaves):
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def errors(actual, expected) -> list[float]:
    return [
        ((one.double() - other.double()).norm() / other.double().norm()).item()
        for one, other in zip(actual, expected, strict=True)
    ]


def tokens_function(expert_TK, kept_TK, activation):
    return lambda x, weights, *parameters: experts_of_tokens(
        x, weights, expert_TK, kept_TK, *parameters, activation=activation
    )


def rows_function(counts, activation):
    counts_L = torch.tensor(counts)
    return lambda x, weights, *parameters: experts_of_rows(
        x, weights, counts_L, *parameters, activation=activation
    )


def rows_leaves(counts, **options):
    x, weights, *matrices = leaves_of(num_tokens=sum(counts), topk=1, num_experts=len(counts), **options)
    return [x, weights.detach().flatten().requires_grad_(), *matrices]


# Numbers


# Triton's interpreter rounds to bf16 by leaving bits out, which is twice as far off as a GPU.
BF16_LIMIT = 2e-2 if launch.INTERPRETED else 1e-2


@pytest.mark.parametrize(
    ("dtype", "limit", "activation", "drops", "bias"),
    [
        (torch.float32, 1e-6, "swiglu", True, False),
        (torch.float32, 1e-6, "gelu", True, True),
        (torch.float32, 1e-6, "clamped_swiglu", True, True),
        (torch.bfloat16, BF16_LIMIT, "swiglu", False, False),
        (torch.bfloat16, BF16_LIMIT, "geglu", False, True),
        *(
            pytest.param(torch.float32, 1e-6, activation, True, bias, marks=pytest.mark.slow)
            for activation in sorted(ACTIVATIONS)
            for bias in (False, True)
        ),
        pytest.param(torch.float32, 1e-6, "swiglu", False, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, 2e-3, "geglu", True, True, marks=pytest.mark.slow),
    ],
)
def test_tokens_against_a_loop_over_them(dtype, limit, activation, drops, bias):
    leaves, expert_TK = leaves_of(activation=activation, dtype=dtype, bias=bias), chosen(13, 2, 5)
    kept_TK = random(13, 2, seed=6) > -0.3 if drops else None
    dy_TD = random(13, 24, seed=7).to(dtype)
    expected = with_gradients(
        lambda x, w, *ps: token_by_token(x, w, expert_TK, kept_TK, *ps, activation=activation),
        doubles(leaves),
        dy_TD,
    )
    actual = with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD)
    assert [x.dtype for x in actual] == [dtype, dtype, torch.float32, *[dtype] * (4 if bias else 2)]
    assert max(errors(actual, expected)) < limit
    assert not any(gradient[4].any() for gradient in actual[3:])  # the expert without tokens
    again = with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD)
    assert all(torch.equal(one, other) for one, other in zip(actual, again, strict=True))


@pytest.mark.parametrize(
    ("activation", "counts"),
    list(zip(ACTIVATIONS, [(3, 0, 4), (9, 0, 5), (0, 0, 1), (37, 0, 0), (1, 1, 1)], strict=True)),
)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_against_the_loop_over_experts(counts, activation, bias):
    leaves, dy_RD = (
        rows_leaves(counts, activation=activation, hidden=7, ffn=5, bias=bias),
        random(sum(counts), 7, seed=7),
    )
    expected = with_gradients(
        lambda x, w, *ps: expert_loop(
            x, w, ExpertWeights(*ps), rows_per_expert_L=torch.tensor(counts), activation=activation
        ),
        doubles(leaves),
        dy_RD,
    )
    assert max(errors(with_gradients(rows_function(counts, activation), leaves, dy_RD), expected)) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_twins_against_the_loop_over_experts(activation, bias, twins):
    """Both as a CPU runs them, in float64: tokens, with dropped slots."""
    leaves, expert_TK = leaves_of(activation=activation, dtype=torch.float64, bias=bias), chosen(13, 2, 5)
    kept_TK = random(13, 2, seed=6) > -0.3
    nothing = torch.empty(0)
    decision = RoutingDecision(expert_TK, leaves[1], nothing, nothing, torch.empty(5), kept_TK)
    slots = sort_slots(decision, num_experts=5)
    order = slots.order()
    dy_TD = random(13, 24, seed=7)

    def loop(x, weights, *parameters):
        return expert_loop(
            x,
            order.weights(weights),
            ExpertWeights(*parameters),
            rows_per_expert_L=slots.rows_per_expert_E,
            activation=activation,
            order=order,
        )

    actual = with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD)
    # The router weights are computed with in fp32.
    assert max(errors(actual, with_gradients(loop, leaves, dy_TD))) < 1e-6


def test_nothing_to_do():
    for leaves, function in (
        (
            leaves_of(num_tokens=0, bias=True),
            tokens_function(torch.zeros(0, 2, dtype=torch.int64), None, "swiglu"),
        ),
        (rows_leaves((0, 0, 0), bias=True), rows_function((0, 0, 0), "swiglu")),
    ):
        y, *gradients = with_gradients(function, leaves, torch.zeros(0, 24))
        assert y.shape == (0, 24)
        assert [x.shape for x in gradients] == [x.shape for x in leaves]
        assert not any(gradient.any() for gradient in gradients[2:])


def test_a_token_whose_slots_are_dropped_reaches_nothing():
    leaves, expert_TK = leaves_of(bias=True), chosen(13, 2, 5)
    kept_TK = torch.ones(13, 2, dtype=torch.bool)
    kept_TK[4] = False
    with torch.no_grad():
        leaves[0][4] = float("nan")
    dy_TD = random(13, 24, seed=7)
    dy_TD[4] = float("nan")
    y_TD, dx_TD, dweights_TK, *dmatrices = with_gradients(
        tokens_function(expert_TK, kept_TK, "swiglu"), leaves, dy_TD
    )
    assert not y_TD[4].any() and not dx_TD[4].any() and not dweights_TK[4].any()
    assert all(x.isfinite().all() for x in (y_TD, dx_TD, dweights_TK, *dmatrices))


@pytest.mark.parametrize("needed", range(6))
def test_only_what_is_asked_for(needed, twins):
    leaves = rows_leaves((3, 0, 4), bias=True)
    expected = with_gradients(rows_function((3, 0, 4), "swiglu"), leaves, torch.ones(7, 24))[1 + needed]
    alone = [leaf.detach().requires_grad_(index == needed) for index, leaf in enumerate(leaves)]
    rows_function((3, 0, 4), "swiglu")(*alone).sum().backward()  # a gradient that is not contiguous, too
    assert [leaf.grad is not None for leaf in alone] == [index == needed for index in range(6)]
    assert torch.equal(alone[needed].grad, expected)


def test_router_weights_with_strides():
    """A column of a wider tensor, and one weight for all rows."""
    (x, weights, *matrices), counts = rows_leaves((3, 0, 4)), (3, 0, 4)
    column, expanded = (
        torch.stack([weights, weights + 1], dim=1)[:, 0].detach(),
        weights[:1].detach().expand(7),
    )
    for strided in (column, expanded):
        dense = [x, strided.clone().contiguous(), *matrices]
        expected = with_gradients(
            rows_function(counts, "swiglu"),
            [leaf.detach().requires_grad_() for leaf in dense],
            torch.ones(7, 24),
        )
        actual = with_gradients(
            rows_function(counts, "swiglu"), [x, strided.requires_grad_(), *matrices], torch.ones(7, 24)
        )
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


# What is kept, and what waits


@pytest.fixture
def kept_rows(monkeypatch):
    """Rows of the pre-activation that every forward pass wrote."""
    up_projection, found = fused.up_projection, []

    def record(*args, **kwargs):
        hidden_RW, active_RF = up_projection(*args, **kwargs)
        found.append(hidden_RW.size(0))
        return hidden_RW, active_RF

    monkeypatch.setattr(fused, "up_projection", record)
    return found


def test_nothing_is_written_for_a_backward_pass_that_does_not_come(kept_rows, twins):
    leaves, function = leaves_of(), tokens_function(chosen(13, 2, 5), None, "swiglu")
    expected = function(*leaves)
    with torch.no_grad():
        assert torch.equal(function(*leaves), expected)
    assert torch.equal(function(*(leaf.detach() for leaf in leaves)), expected)
    assert kept_rows == [26, 0, 0]
    # Full recompute: only the second pass is followed by a backward pass.
    checkpoint(function, *leaves, use_reentrant=True).sum().backward()
    assert kept_rows[3:] == [0, 26]


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_bytes_kept_for_backward(activation, twins):
    """2TD + 4TKF in bf16 with a gate (2TD + 2TKF without) and, for each row, its token, its place and its
    weight: 12 bytes.
    """
    num_tokens, topk, num_experts, hidden, ffn = 16, 4, 8, 128, 64
    leaves = leaves_of(
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        hidden=hidden,
        ffn=ffn,
        activation=activation,
        dtype=torch.bfloat16,
    )
    saved: dict[int, int] = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y_TD = tokens_function(chosen(num_tokens, topk, num_experts), None, activation)(*leaves)
    assert y_TD.requires_grad
    kept = sum(
        size for address, size in saved.items() if address not in {leaf.data_ptr() for leaf in leaves[2:]}
    )
    indices = 12 * num_tokens * topk + 4 * (num_experts + 1)
    formula_bytes = 2 * num_tokens * hidden + (4 if activation == "swiglu" else 2) * num_tokens * topk * ffn
    assert kept - indices == formula_bytes
    if activation == "swiglu":
        assert kept < 1.05 * formula_bytes


@pytest.mark.parametrize("drops", [False, True])
def test_the_host_does_not_wait(drops):
    leaves = [leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves_of(bias=True)]
    expert_TK = chosen(13, 2, 5).to(DEVICE)
    kept_TK = (random(13, 2, seed=6) > 0).to(DEVICE) if drops else None
    function, dy = tokens_function(expert_TK, kept_TK, "swiglu"), torch.ones(13, 24, device=DEVICE)
    with Waits() as waits:
        with_gradients(function, leaves, dy)
    assert waits.found == []


# torch.compile and recompute


@pytest.mark.parametrize("of_tokens", [True, False])
def test_compiled_in_one_graph(of_tokens, twins):
    leaves = leaves_of(bias=True) if of_tokens else rows_leaves((9, 0, 4), bias=True)
    function = (
        tokens_function(chosen(13, 2, 5), None, "swiglu") if of_tokens else rows_function((9, 0, 4), "swiglu")
    )
    dy = random(13, 24, seed=7)
    expected = with_gradients(function, leaves, dy)
    actual = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), leaves, dy)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed(reentrant, twins):
    leaves, function, dy = (
        leaves_of(bias=True),
        tokens_function(chosen(13, 2, 5), None, "swiglu"),
        random(13, 24, seed=7).float(),
    )
    expected = with_gradients(function, leaves, dy)
    y_TD = checkpoint(function, *leaves, use_reentrant=reentrant)
    y_TD.backward(dy)
    assert all(
        torch.equal(one, other)
        for one, other in zip([y_TD, *(leaf.grad for leaf in leaves)], expected, strict=True)
    )


# Megatron's main_grad


def with_main_grad(experts: Experts, **attributes) -> dict[str, torch.Tensor]:
    """Gives both weights a main_grad with something in it, and returns that."""
    before = {}
    for seed, (name, weight) in enumerate(experts.named_parameters()):
        before[name] = random(*weight.shape, seed=seed).float()
        for attribute, value in {"main_grad": before[name].clone(), **attributes}.items():
            setattr(weight, attribute, value)
    return before


def rows_of_experts(counts, adds_to_main_grad: bool, dtype=torch.float32, bias=False):
    experts = Experts(
        num_local_experts=len(counts), hidden_size=8, ffn_size=6, activation="swiglu", backend="triton",
        dtype=dtype, adds_to_main_grad=adds_to_main_grad, bias=bias,
    )  # fmt: skip
    for seed, weight in enumerate(experts.parameters()):
        weight.data.copy_(random(*weight.shape, seed=seed))
    rows_RD, weights_R = (
        random(sum(counts), 8, seed=7).to(dtype).requires_grad_(),
        random(sum(counts), seed=8).float(),
    )
    return experts, Dispatched(rows_RD, weights_R, torch.tensor(counts), DispatchRecord(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_main_grad(dtype):
    counts = (5, 0, 3)
    plain, dispatched = rows_of_experts(counts, adds_to_main_grad=False, dtype=dtype)
    plain(dispatched).sum().backward()
    experts, dispatched = rows_of_experts(counts, adds_to_main_grad=True, dtype=dtype)
    before = with_main_grad(experts, grad_added_to_main_grad=False)
    for _ in range(2):  # micro-batches
        experts(dispatched).sum().backward()
    for (name, weight), ordinary in zip(experts.named_parameters(), plain.parameters(), strict=True):
        added = (weight.main_grad - before[name]) / 2
        assert (added - ordinary.grad).norm() < (
            1e-6 if dtype == torch.float32 else 1e-2
        ) * ordinary.grad.norm()
        assert torch.equal(weight.main_grad[1], before[name][1])  # the expert without rows
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape


def test_the_gradient_without_values_is_let_go_of(twins):
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True)
    with_main_grad(experts, grad_added_to_main_grad=False)
    experts(dispatched).sum().backward()
    for weight in experts.parameters():
        storage = StorageWeakRef(weight.grad.untyped_storage())
        weight.grad = None
        assert storage.expired()


def test_what_is_returned_beside_main_grad(twins):
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True)
    with_main_grad(experts, grad_added_to_main_grad=False, zero_out_wgrad=True)
    experts(dispatched).sum().backward()
    assert all(weight.grad_added_to_main_grad and not weight.grad.any() for weight in experts.parameters())
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True)
    with_main_grad(experts)  # nobody asks whether it was added
    experts(dispatched).sum().backward()
    assert all(weight.grad is None for weight in experts.parameters())


def test_main_grad_of_megatron_fsdp_is_not_added_to(twins):
    """It has a new buffer for each gradient, with what is in memory."""
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True)
    before = with_main_grad(experts, grad_added_to_main_grad=False, __fsdp_param__=True)
    experts(dispatched).sum().backward()
    for name, weight in experts.named_parameters():
        assert weight.grad[0].any() and torch.equal(weight.main_grad, before[name])


def test_main_grad_in_another_dtype_is_not_added_to(twins):
    """Megatron's without grad_reduce_in_fp32: its hook adds the ordinary gradient."""
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True)
    before = with_main_grad(experts, grad_added_to_main_grad=False)
    for weight in experts.parameters():
        weight.main_grad = weight.main_grad.bfloat16()
    experts(dispatched).sum().backward()
    for name, weight in experts.named_parameters():
        assert weight.grad[0].any() and not weight.grad_added_to_main_grad
        assert torch.equal(weight.main_grad, before[name].bfloat16())


@pytest.mark.parametrize("adds_to_main_grad", [False, True])
def test_ordinary_gradients_otherwise(adds_to_main_grad, twins):
    """Not asked for; or asked for, but there is no main_grad, as under FSDP2."""
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=adds_to_main_grad)
    before = {} if adds_to_main_grad else with_main_grad(experts, grad_added_to_main_grad=False)
    experts(dispatched).sum().backward()
    for name, weight in experts.named_parameters():
        assert weight.grad[0].any()
        assert not before or (
            torch.equal(weight.main_grad, before[name]) and not weight.grad_added_to_main_grad
        )


def test_biases_have_ordinary_gradients_beside_main_grad(twins):
    plain, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=False, bias=True)
    plain(dispatched).sum().backward()
    experts, dispatched = rows_of_experts((5, 0, 3), adds_to_main_grad=True, bias=True)
    before = with_main_grad(experts, grad_added_to_main_grad=False)
    experts(dispatched).sum().backward()
    for name, parameter in experts.named_parameters():
        is_bias = name.startswith("bias")
        assert parameter.grad_added_to_main_grad != is_bias
        if is_bias:
            assert torch.equal(parameter.grad, plain.get_parameter(name).grad) and parameter.grad[0].any()
            assert torch.equal(parameter.main_grad, before[name])


# The layer, and its experts on several ranks


def layer_results(x_TD, dy_TD, **options):
    """Output and gradients of a tiny layer, with its losses."""
    layer = tiny_layer(aux_loss_coeff=0.3, z_loss_coeff=0.2, **options)
    x_TD = x_TD.detach().requires_grad_()
    y_TD, loss = layer(x_TD)
    ((y_TD * dy_TD).sum() + loss).backward()
    latent = [] if layer.down is None else [layer.down.weight, layer.up.weight]
    parameters = (layer.router.weight, layer.experts.weight1, layer.experts.weight2, *latent)
    return [y_TD.detach(), x_TD.grad, *(parameter.grad for parameter in parameters)]


MODES = {
    "dropless": {},
    "capacity": {"capacity_factor": 0.7},
    "padded": {"capacity_factor": 0.7, "pad_to_capacity": True},
    "latent": {"latent": 3},
}


@pytest.mark.parametrize("alltoall", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_layer_equals_that_of_the_loop(mode, alltoall):
    x_TD, dy_TD = pushed_tokens(TOKENS), random(len(TOKENS), HIDDEN, seed=4)
    expected = layer_results(x_TD, dy_TD, **MODES[mode])
    actual = layer_results(
        x_TD.float(), dy_TD.float(), backend="triton", dtype=torch.float32, alltoall=alltoall, **MODES[mode]
    )
    assert max(errors(actual, expected)) < 1e-5


def test_the_layer_takes_the_tokens_themselves(monkeypatch):
    """No rows are made where all experts are on the rank."""
    monkeypatch.setattr(LocalDispatcher, "start", lambda *args, **kwargs: pytest.fail("rows are made"))
    layer_results(
        pushed_tokens(TOKENS).float(), torch.ones(len(TOKENS), HIDDEN), backend="triton", dtype=torch.float32
    )


def on_ranks(ep: int, etp: int) -> list[float]:
    """Each rank has tokens of its own; the errors against one rank with all of them and the `loop` backend in
    float64.
    """
    groups, rank, size = make_groups(ep, etp), dist.get_rank(), dist.get_world_size()
    tokens = [TOKENS[i::size] + [[0, 1]] * i for i in range(size)]
    inputs = [
        (pushed_tokens(t, seed=20 + i), random(len(t), HIDDEN, seed=30 + i)) for i, t in enumerate(tokens)
    ]
    parts = layer_results(*(x.float() for x in inputs[rank]), backend="triton", dtype=torch.float32, **groups)
    # The losses' shares are of this rank's tokens alone: so the reference is the sum over ranks of layers
    # that have all experts.
    whole = [layer_results(*one) for one in inputs]
    dweight1, dweight2 = (sum(results[index] for results in whole) for index in (3, 4))
    expected = [
        *whole[rank][:3],
        cut(dweight1, 1, groups["ep_group"], groups["etp_group"], halves=2),
        cut(dweight2, 2, groups["ep_group"], groups["etp_group"]),
    ]
    return errors(parts, expected)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_experts_over_ranks_equal_one_rank(ep, etp):
    for found in run_on_ranks(ep * etp, on_ranks, ep, etp):
        assert max(found) < 1e-5, found


DEVICE_SIZES = {"num_tokens": 2048, "topk": 8, "num_experts": 64, "hidden": 2048, "ffn": 1024}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_at_a_real_size(activation):
    leaves = [
        leaf.detach().cuda().requires_grad_()
        for leaf in leaves_of(activation=activation, dtype=torch.bfloat16, **DEVICE_SIZES)
    ]
    expert_TK, dy_TD = chosen(2048, 8, 64).cuda(), random(2048, 2048, seed=7).cuda()
    run = functools.partial(with_gradients, tokens_function(expert_TK, None, activation), leaves, dy_TD)
    first, second = run(), run()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    def dense(x, weights, weight1, weight2):
        out = torch.zeros_like(x)
        for e in range(64):
            token, k = (expert_TK == e).nonzero(as_tuple=True)
            # kept in bf16, which decides what is beyond the limit
            hidden = (x[token] @ weight1[e].t()).bfloat16().double()
            y = formula(activation, hidden) @ weight2[e].t()
            out = out.index_add(0, token, y * weights[token, k].unsqueeze(1))
        return out

    assert max(errors(first, with_gradients(dense, doubles(leaves), dy_TD))) < 1e-2
