"""The `triton` backend as a whole. Without a GPU the kernels run under Triton's interpreter, or their twins
where that is said.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from helpers.layers.kernel_device import needs_kernels
from helpers.layers.references import formula, make_groups
from helpers.layers.tiny_moe import HIDDEN, MODES, TOKENS, cut, decide, pushed_tokens, random, tiny_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.dispatcher import Dispatched, DispatchRecord, LocalDispatcher
from moe_exp.layers.dispatcher.row_order import slots_of, sort_by_expert
from moe_exp.layers.experts import Experts, fused
from moe_exp.layers.experts.fused import fused_experts
from moe_exp.layers.experts.loop import expert_loop
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels import weight_grad as weight_grads
from moe_exp.layers.kernels.slot_sort import slot_sort

FP32 = torch.float32


def leaves_of(
    *, num_tokens=13, topk=2, num_experts=5, hidden=24, ffn=20, activation="swiglu", dtype=torch.float32,
    bias=False,
):  # fmt: skip
    """x, router weights (in fp32 at least), weights and biases, with gradient."""
    width = ffn * (2 if ACTIVATIONS[activation].gated else 1)
    weights = random(num_tokens, topk, seed=2).abs().to(torch.promote_types(dtype, torch.float32))
    scale = 1.5 if ACTIVATIONS[activation].limit else 0.3  # some rows are beyond the limit
    shapes = [(width, hidden), (hidden, ffn), *([(width,), (hidden,)] if bias else [])]
    parameters = [(scale * random(num_experts, *shape, seed=3)).to(dtype) for shape in shapes]
    leaves = (random(num_tokens, hidden, seed=1).to(dtype), weights, *parameters)
    return [leaf.requires_grad_() for leaf in leaves]


def chosen(num_tokens: int, topk: int, num_experts: int) -> torch.Tensor:
    """Experts of the tokens; the last expert gets none."""
    return random(num_tokens, num_experts - 1, seed=5).argsort(dim=1)[:, :topk]


def loop_over_tokens(expert_TK, kept_TK, activation):
    """The reference in plain torch; of a token all slots at once."""

    def function(x_TD, weights_TK, weight1, weight2, *biases):
        bias1, bias2 = biases or (weight1.new_zeros(weight1.shape[:2]), weight2.new_zeros(weight2.shape[:2]))
        weights_TK = weights_TK if kept_TK is None else weights_TK * kept_TK
        outs = []
        for x, weights_K, e in zip(x_TD, weights_TK, expert_TK, strict=True):
            active_KF = formula(activation, weight1[e] @ x + bias1[e])
            outs.append(weights_K @ (torch.einsum("kdf,kf->kd", weight2[e], active_KF) + bias2[e]))
        return torch.stack(outs)

    return function


def with_gradients(function, leaves, dy) -> list[torch.Tensor]:
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def doubles(leaves):
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def errors(actual, expected) -> list[float]:
    return [relative_error(one, other) for one, other in zip(actual, expected, strict=True)]


def assert_same_bits(actual, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def tokens_function(expert_TK, kept_TK=None, activation="swiglu", **options):
    def function(x, weights, weight1_LWD, *parameters):
        slot_R, row_N, offsets_L1 = slot_sort(expert_TK, weight1_LWD.size(0), kept_TK)
        places = {"slot_R": slot_R, "row_TK": row_N.view(expert_TK.shape)}
        arguments = x, weights, offsets_L1, weight1_LWD, *parameters
        return fused_experts(*arguments, activation=activation, **places, **options)

    return function


def rows_function(counts, activation="swiglu", **options):
    offsets_L1 = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return lambda x, weights, *parameters: fused_experts(
        x, weights, offsets_L1, *parameters, activation=activation, **options
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

    expected = with_gradients(loop_over_tokens(expert_TK, kept_TK, activation), doubles(leaves), dy_TD)
    actual = with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD)
    assert [x.dtype for x in actual] == [dtype, dtype, torch.float32, *[dtype] * (4 if bias else 2)]
    assert max(errors(actual, expected)) < limit
    assert not any(gradient[4].any() for gradient in actual[3:])  # the expert without tokens
    assert_same_bits(actual, with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD))


@pytest.mark.parametrize(
    ("activation", "counts"),
    list(zip(ACTIVATIONS, [(3, 0, 4), (9, 0, 5), (0, 0, 1), (37, 0, 0), (1, 1, 1)], strict=True)),
)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_against_the_loop_over_experts(counts, activation, bias):
    leaves = rows_leaves(counts, activation=activation, hidden=7, ffn=5, bias=bias)
    dy_RD = random(sum(counts), 7, seed=7)
    expected = with_gradients(
        lambda x, w, *ps: expert_loop(
            x, w, *ps, rows_per_expert_L=torch.tensor(counts), activation=activation
        ),
        doubles(leaves),
        dy_RD,
    )
    assert max(errors(with_gradients(rows_function(counts, activation), leaves, dy_RD), expected)) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_twins_against_the_loop_over_experts(activation, bias, twins):
    """As a CPU runs them, in float64, with dropped slots."""
    leaves, expert_TK = leaves_of(activation=activation, dtype=torch.float64, bias=bias), chosen(13, 2, 5)
    kept_TK = random(13, 2, seed=6) > -0.3
    slots = sort_by_expert(**slots_of(decide(expert_TK, leaves[1], kept_TK, num_experts=5), 5))
    order = slots.order()
    dy_TD = random(13, 24, seed=7)

    def loop(x, weights, *parameters):
        options = {"rows_per_expert_L": slots.rows_per_expert_E, "activation": activation, "order": order}
        return expert_loop(x, order.weights(weights), *parameters, **options)

    actual = with_gradients(tokens_function(expert_TK, kept_TK, activation), leaves, dy_TD)
    # The router weights are computed with in fp32.
    assert max(errors(actual, with_gradients(loop, leaves, dy_TD))) < 1e-6


@pytest.mark.parametrize("of_tokens", [True, False])
def test_nothing_to_do(of_tokens):
    leaves = leaves_of(num_tokens=0, bias=True) if of_tokens else rows_leaves((0, 0, 0), bias=True)
    function = tokens_function(torch.zeros(0, 2).long()) if of_tokens else rows_function((0, 0, 0))
    y, *gradients = with_gradients(function, leaves, torch.zeros(0, 24))
    assert y.shape == (0, 24)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert not any(gradient.any() for gradient in gradients[2:])


@pytest.mark.parametrize("needed", range(6))
def test_only_what_is_asked_for(needed, twins):
    leaves = rows_leaves((3, 0, 4), bias=True)
    expected = with_gradients(rows_function((3, 0, 4)), leaves, torch.ones(7, 24))[1 + needed]
    alone = [leaf.detach().requires_grad_(index == needed) for index, leaf in enumerate(leaves)]
    rows_function((3, 0, 4))(*alone).sum().backward()  # a gradient that is not contiguous, too
    assert [leaf.grad is not None for leaf in alone] == [index == needed for index in range(6)]
    assert torch.equal(alone[needed].grad, expected)


@needs_kernels
def test_a_backward_pass_sorts_the_experts_once(monkeypatch):
    """For four weight gradients."""
    calls = []
    order = weight_grads.expert_order
    monkeypatch.setattr(fused, "expert_order", lambda offsets: calls.append(1) or order(offsets))
    monkeypatch.setattr(weight_grads, "expert_order", lambda offsets: pytest.fail("sorted again"))
    with_gradients(rows_function((3, 0, 4)), rows_leaves((3, 0, 4), bias=True), torch.ones(7, 24))
    assert calls == [1]


# What is kept for the backward pass


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
    leaves, function = leaves_of(), tokens_function(chosen(13, 2, 5))
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
    """2TD + 4TKF in bf16 with a gate (2TD + 2TKF without) and 12 bytes per row: token, place, weight."""
    num_tokens, topk, num_experts, hidden, ffn = 16, 4, 8, 128, 64
    sizes = {"num_tokens": num_tokens, "topk": topk, "num_experts": num_experts, "hidden": hidden, "ffn": ffn}
    leaves = leaves_of(activation=activation, dtype=torch.bfloat16, **sizes)
    saved: dict[int, int] = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y_TD = tokens_function(chosen(num_tokens, topk, num_experts), None, activation)(*leaves)
    assert y_TD.requires_grad
    parameters = {leaf.data_ptr() for leaf in leaves[2:]}
    kept = sum(size for address, size in saved.items() if address not in parameters)
    indices = 12 * num_tokens * topk + 4 * (num_experts + 1)
    formula_bytes = 2 * num_tokens * hidden + (4 if activation == "swiglu" else 2) * num_tokens * topk * ffn
    assert kept - indices == formula_bytes


# torch.compile and recompute


@pytest.mark.parametrize("of_tokens", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_in_one_graph(of_tokens, twins):
    leaves = leaves_of(bias=True) if of_tokens else rows_leaves((9, 0, 4), bias=True)
    function = tokens_function(chosen(13, 2, 5)) if of_tokens else rows_function((9, 0, 4))
    dy = random(13, 24, seed=7)
    actual = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), leaves, dy)
    assert_same_bits(actual, with_gradients(function, leaves, dy))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed(reentrant, twins):
    leaves, function = leaves_of(bias=True), tokens_function(chosen(13, 2, 5))
    dy = random(13, 24, seed=7).float()
    expected = with_gradients(function, leaves, dy)
    y_TD = checkpoint(function, *leaves, use_reentrant=reentrant)
    y_TD.backward(dy)
    assert_same_bits([y_TD, *(leaf.grad for leaf in leaves)], expected)


# Megatron's main_grad


def backward_of(
    adds_to_main_grad=True, dtype=FP32, bias=False, fp8=False, repeats=1, main_grad=None, **attributes
):
    """Experts with rows (5, 0, 3) after `repeats` backward passes, and what `main_grad` held before.

    Every weight has one in the dtype `main_grad` (None: no weight has one), and other attributes.
    """
    experts = Experts(
        num_local_experts=3, hidden_size=8, ffn_size=6, activation="swiglu", backend="triton", dtype=dtype,
        adds_to_main_grad=adds_to_main_grad, bias=bias, fp8=fp8,
    )  # fmt: skip
    before = {}
    for seed, (name, weight) in enumerate(experts.named_parameters()):
        weight.data.copy_(random(*weight.shape, seed=seed))
        if main_grad is not None:
            before[name] = random(*weight.shape, seed=seed).to(main_grad)
            for attribute, value in {"main_grad": before[name].clone(), **attributes}.items():
                setattr(weight, attribute, value)
    rows_RD, weights_R = random(8, 8, seed=7).to(dtype).requires_grad_(), random(8, seed=8).float()
    dispatched = Dispatched(rows_RD, weights_R, torch.tensor([5, 0, 3]), DispatchRecord(None))
    for _ in range(repeats):  # micro-batches
        experts(dispatched).sum().backward()
    return experts, before


@pytest.mark.parametrize(
    ("dtype", "main_grad", "fp8", "limit"),
    [
        (FP32, FP32, False, 1e-6), (torch.bfloat16, FP32, True, 1e-2),
        (torch.bfloat16, torch.bfloat16, False, 2e-2),
        pytest.param(torch.bfloat16, FP32, False, 1e-2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, torch.bfloat16, True, 2e-2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_first", [False, True])
def test_gradients_are_added_to_main_grad(dtype, main_grad, fp8, limit, is_first):
    """The first of two micro-batches overwrites what is there, if no other one came before."""
    options = {"dtype": dtype, "fp8": fp8}
    plain, _ = backward_of(adds_to_main_grad=False, **options)
    experts, before = backward_of(
        **options, repeats=2, main_grad=main_grad, grad_added_to_main_grad=not is_first
    )
    for (name, weight), ordinary in zip(experts.named_parameters(), plain.parameters(), strict=True):
        kept = torch.zeros_like(before[name]) if is_first else before[name]
        added = (weight.main_grad.float() - kept.float()) / 2
        assert (added - ordinary.grad).norm() < limit * ordinary.grad.norm()
        assert torch.equal(weight.main_grad[1], kept[1])  # the expert without rows
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape


def test_the_gradient_without_values_is_let_go_of(twins):
    experts, _ = backward_of(main_grad=FP32, grad_added_to_main_grad=False)
    for weight in experts.parameters():
        storage = StorageWeakRef(weight.grad.untyped_storage())
        weight.grad = None
        assert storage.expired()


def test_what_is_returned_beside_main_grad(twins):
    experts, _ = backward_of(main_grad=FP32, grad_added_to_main_grad=False, zero_out_wgrad=True)
    assert all(weight.grad_added_to_main_grad and not weight.grad.any() for weight in experts.parameters())
    experts, _ = backward_of(main_grad=FP32)  # without a hook that asks whether it was added
    assert all(weight.grad is None for weight in experts.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"adds_to_main_grad": False, "main_grad": torch.float32},
        {},  # as under FSDP2
        {"main_grad": torch.float32, "__fsdp_param__": True},  # a new buffer for each gradient
    ],
)
def test_ordinary_gradients_without_a_main_grad_to_add_to(options, twins):
    experts, before = backward_of(grad_added_to_main_grad=False, **options)
    for name, weight in experts.named_parameters():
        assert weight.grad[0].any() and not getattr(weight, "grad_added_to_main_grad", False)
        assert not before or torch.equal(weight.main_grad, before[name])


def test_biases_have_ordinary_gradients_beside_main_grad(twins):
    plain, _ = backward_of(adds_to_main_grad=False, bias=True)
    experts, before = backward_of(bias=True, main_grad=FP32, grad_added_to_main_grad=False)
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


@pytest.mark.parametrize("alltoall", [False, True])
@pytest.mark.parametrize("settings", [*MODES.values(), {"latent": 3}], ids=[*MODES, "latent"])
def test_layer_equals_that_of_the_loop(settings, alltoall):
    x_TD, dy_TD = pushed_tokens(TOKENS), random(len(TOKENS), HIDDEN, seed=4)
    expected = layer_results(x_TD, dy_TD, **settings)
    options = {"backend": "triton", "dtype": FP32, "alltoall": alltoall, **settings}
    actual = layer_results(x_TD.float(), dy_TD.float(), **options)
    assert max(errors(actual, expected)) < 1e-5


def test_the_layer_takes_the_tokens_themselves(monkeypatch):
    """No rows are made where all experts are on the rank."""
    monkeypatch.setattr(LocalDispatcher, "start", lambda *args, **kwargs: pytest.fail("rows are made"))
    x_TD, dy_TD = pushed_tokens(TOKENS).float(), torch.ones(len(TOKENS), HIDDEN)
    layer_results(x_TD, dy_TD, backend="triton", dtype=FP32)


def on_ranks(ep: int, etp: int) -> list[float]:
    """Errors against one rank with the tokens of all and the `loop` backend in float64."""
    groups, rank, size = make_groups(ep, etp), dist.get_rank(), dist.get_world_size()
    tokens = [TOKENS[i::size] + [[0, 1]] * i for i in range(size)]
    numbered = list(enumerate(tokens))
    inputs = [(pushed_tokens(t, seed=20 + i), random(len(t), HIDDEN, seed=30 + i)) for i, t in numbered]
    parts = layer_results(*(x.float() for x in inputs[rank]), backend="triton", dtype=FP32, **groups)
    # The losses are those of this rank's tokens alone, so the reference is a sum of layers.
    whole = [layer_results(*one) for one in inputs]
    dweight1, dweight2 = (sum(results[index] for results in whole) for index in (3, 4))
    dweights = cut(dweight1, 1, **groups, halves=2), cut(dweight2, 2, **groups)
    return errors(parts, [*whole[rank][:3], *dweights])


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_experts_over_ranks_equal_one_rank(ep, etp):
    for found in run_on_ranks(ep * etp, on_ranks, ep, etp):
        assert max(found) < 1e-5, found
