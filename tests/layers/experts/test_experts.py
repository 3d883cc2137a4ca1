from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.layers.references import formula
from helpers.layers.tiny_moe import cut, random
from helpers.ranks import run_on_ranks
from moe_exp.layers.activations import differentiable_weighted_activation
from moe_exp.layers.dispatcher import Dispatched, DispatchRecord
from moe_exp.layers.dispatcher.row_order import RowOrder
from moe_exp.layers.experts import ACTIVATIONS, Experts, squared_relu
from moe_exp.layers.experts.experts import _BiasOfRows

SCALES = {"clamped_swiglu": 4.0}  # of drawn weights, so that some rows are beyond the limits


def test_every_activation_is_tested():
    assert {name: activation.gated for name, activation in ACTIVATIONS.items()} == {
        "swiglu": True,
        "clamped_swiglu": True,
        "geglu": True,
        "gelu": False,
        "squared_relu": False,
    }


def test_unknown_activation():
    with pytest.raises(
        ValueError,
        match=r"activation=relu: is not an activation\. Fix: use one of swiglu, clamped_swiglu, geglu, gelu,",
    ):
        Experts(num_local_experts=1, hidden_size=4, ffn_size=4, activation="relu", backend="loop")


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (
            "auto",
            r"grouped_gemm\.choose_backend says which one auto is\. Fix: use one of triton, loop, torch, ",
        ),
        ("nope", r"is not a backend\. Fix: use one of triton, loop, torch, "),
        ("te", r"transformer_engine is not installed\. Fix: pip install "),
    ],
)
def test_backends_that_are_none(backend, told):
    with pytest.raises(ValueError, match=f"^expert_backend={backend}: {told}"):
        Experts(num_local_experts=1, hidden_size=4, ffn_size=4, activation="swiglu", backend=backend)


def test_squared_relu_by_hand():
    assert squared_relu(torch.tensor([-2.0, 0.0, 3.0])).tolist() == [0, 0, 9]


def test_clamped_swiglu_by_hand():
    """Gates of which one is above 7, ups beyond both limits; no gradient where it is clamped."""
    hidden_RF = torch.tensor([[8.0, 1.0, -9.0, 2.0, -8.0, 0.5]], dtype=torch.float64, requires_grad=True)
    y_RF = differentiable_weighted_activation(hidden_RF, torch.tensor([2.0]), "clamped_swiglu")
    sigmoid = [1 / (1 + math.exp(-1.702 * gate)) for gate in (7, 1, -9)]
    expected = [2 * 7 * sigmoid[0] * 3, 2 * sigmoid[1] * (-7 + 1), 2 * -9 * sigmoid[2] * 1.5]
    assert y_RF[0].tolist() == pytest.approx(expected, rel=1e-12)
    (dhidden_RF,) = torch.autograd.grad(y_RF.sum(), hidden_RF)
    assert (dhidden_RF != 0).tolist() == [[False, True, True, True, False, True]]
    assert dhidden_RF[0, 3].item() == pytest.approx(2 * 7 * sigmoid[0], rel=1e-12)


def make(
    activation: str, *, splits, hidden: int, ffn: int, dtype=torch.float64, backend="loop", known_splits=True
):
    experts = Experts(
        num_local_experts=len(splits),
        hidden_size=hidden,
        ffn_size=ffn,
        activation=activation,
        backend=backend,
        dtype=dtype,
    )
    with torch.no_grad():
        for seed, weight in enumerate(experts.parameters()):
            weight.copy_(SCALES.get(activation, 1.0) * random(*weight.shape, seed=seed))
    rows_RD = random(sum(splits), hidden, seed=7).to(dtype).requires_grad_()
    weights_R = random(sum(splits), seed=8).abs().float().requires_grad_()
    nothing = torch.empty(0)
    dispatched = Dispatched(
        rows_RD,
        weights_R,
        torch.tensor(splits),
        DispatchRecord(RowOrder(nothing, nothing, 1)),
        splits if known_splits else None,
    )
    return experts, dispatched


def reference(activation: str, experts: Experts, dispatched: Dispatched, splits):
    """Row by row, w * expert(x) with the weight at the end."""
    rows = [
        leaf.detach().double().requires_grad_()
        for leaf in (dispatched.rows_RD, dispatched.weights_R, experts.weight1, experts.weight2)
    ]
    x_RD, weights_R, weight1, weight2 = rows
    outs, row = [], 0
    for expert, count in enumerate(splits):
        for _ in range(count):
            outs.append(weights_R[row] * (weight2[expert] @ formula(activation, weight1[expert] @ x_RD[row])))
            row += 1
    return torch.stack(outs), rows


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("splits", [(3, 0, 4), (0, 0, 1), (2, 5, 1)])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "hidden", "ffn"),
    [
        ("loop", torch.float64, 1e-13, 5, 3),
        ("loop", torch.float32, 1e-5, 5, 3),
        ("torch", torch.float32, 1e-5, 8, 4),
    ],
)
def test_experts_against_a_loop_over_rows(activation, splits, backend, dtype, tolerance, hidden, ffn):
    experts, dispatched = make(
        activation,
        splits=splits,
        hidden=hidden,
        ffn=ffn,
        dtype=dtype,
        backend=backend,
        known_splits=splits == (2, 5, 1),
    )
    gated = ACTIVATIONS[activation].gated
    assert experts.weight1.shape == (3, 2 * ffn if gated else ffn, hidden)
    assert experts.weight2.shape == (3, hidden, ffn)
    expected, leaves = reference(activation, experts, dispatched, splits)
    grad_RD = random(*expected.shape, seed=9)
    expected.backward(grad_RD)
    actual = experts(dispatched)
    assert actual.dtype == dtype
    actual.backward(grad_RD.to(dtype))

    tensors = (dispatched.rows_RD, dispatched.weights_R, experts.weight1, experts.weight2)
    pairs = [(actual.detach(), expected.detach())] + [
        (tensor.grad, leaf.grad) for tensor, leaf in zip(tensors, leaves, strict=True)
    ]
    for one, other in pairs:
        # The router weights are fp32, and so is their gradient.
        limit = 1e-6 if (one.dtype, dtype) == (torch.float32, torch.float64) else tolerance
        assert (one.double() - other).norm() <= limit * other.norm()


def test_gradcheck():
    experts, like = make("swiglu", splits=(2, 0, 1), hidden=3, ffn=2)

    def run(rows_RD, weights_R, weight1, weight2):
        dispatched = Dispatched(rows_RD, weights_R, like.tokens_per_expert_L, like.record, like.splits)
        return torch.func.functional_call(experts, {"weight1": weight1, "weight2": weight2}, (dispatched,))

    weights_R = like.weights_R.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(run, (like.rows_RD, weights_R, experts.weight1, experts.weight2))


# Bias, expert tensor parallelism, recompute


def with_bias(
    backend: str, *, splits, recompute=False, dtype=torch.float32, hidden=8, ffn=4, activation="swiglu"
):
    """Experts with a bias, rows of which the last of every expert is padding: zero, with weight 0."""
    experts = Experts(
        num_local_experts=len(splits), hidden_size=hidden, ffn_size=ffn, activation=activation,
        backend=backend, dtype=dtype, bias=True, recompute_activation=recompute,
    )  # fmt: skip
    with torch.no_grad():
        for seed, parameter in enumerate(experts.parameters()):
            parameter.copy_(SCALES.get(activation, 1.0) * random(*parameter.shape, seed=seed))
    rows_RD, weights_R = (
        random(sum(splits), hidden, seed=7).to(dtype),
        random(sum(splits), seed=8).abs().float(),
    )
    last = [sum(splits[: expert + 1]) - 1 for expert in range(len(splits)) if splits[expert]]
    rows_RD[last], weights_R[last] = 0, 0
    nothing = torch.empty(0)
    record = DispatchRecord(RowOrder(nothing, nothing, 1))
    return (
        experts,
        Dispatched(
            rows_RD.requires_grad_(), weights_R.requires_grad_(), torch.tensor(splits), record, splits
        ),
        last,
    )


def test_the_gradient_of_a_bias_is_summed_in_fp32():
    """In bf16 a sum of ones ends at 256: the next number is 258."""
    bias_LF = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    _BiasOfRows.apply(bias_LF, torch.tensor([2000, 1000]), 3000).sum().backward()
    assert bias_LF.grad.tolist() == [[2000.0] * 3, [1000.0] * 3]


def forward_backward(experts: Experts, dispatched: Dispatched) -> list[torch.Tensor]:
    y_RD = experts(dispatched)
    inputs = (dispatched.rows_RD, dispatched.weights_R, *experts.parameters())
    return [y_RD.detach(), *torch.autograd.grad(y_RD, inputs, random(*y_RD.shape, seed=9).to(y_RD.dtype))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("backend", "recompute"), [("torch", False), ("torch", True), ("triton", False)])
@pytest.mark.parametrize("splits", [(3, 0, 4), (0, 0, 2), (1, 1, 1), (0, 0, 0)])
def test_other_paths_with_bias_equal_the_function_for_the_cpu(activation, backend, recompute, splits):
    expected = forward_backward(*with_bias("loop", splits=splits, activation=activation)[:2])
    experts, dispatched, last = with_bias(backend, splits=splits, recompute=recompute, activation=activation)
    actual = forward_backward(experts, dispatched)
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    y_RD, drows_RD = actual[:2]
    assert not y_RD[last].any()
    assert not drows_RD[last].any()


@pytest.mark.parametrize("backend", ["loop", "torch", "triton"])
def test_padding_adds_nothing_to_the_gradient_of_a_bias(backend):
    experts, padded, last = with_bias(backend, splits=(3, 2, 4))
    kept = torch.tensor([row for row in range(9) if row not in last])
    rows, weights = (x.detach()[kept].requires_grad_() for x in (padded.rows_RD, padded.weights_R))
    without = Dispatched(rows, weights, torch.tensor([2, 1, 3]), padded.record, (2, 1, 3))
    dy_RD = random(9, 8, seed=9).float()
    with_padding = torch.autograd.grad(experts(padded), list(experts.parameters()), dy_RD)
    for one, other in zip(
        with_padding,
        torch.autograd.grad(experts(without), list(experts.parameters()), dy_RD[kept]),
        strict=True,
    ):
        assert (one - other).norm() <= 1e-6 * other.norm()


class Storages(TorchDispatchMode):
    """Storages of all tensors made in this context, to ask later which of them are still held; hooks cannot
    hide any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return result

    def held_bytes(self) -> int:
        return sum(size for storage, size in self.sizes.items() if not storage.expired())


def held_bytes(experts: Experts, dispatched: Dispatched) -> int:
    """Bytes held between forward and backward by what forward made."""
    with Storages() as storages:
        y_RD = experts(dispatched)
    assert y_RD.requires_grad
    return storages.held_bytes()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recompute_keeps_less_and_gives_the_same_bits(activation):
    plain, dispatched, _ = with_bias("torch", splits=(30, 0, 34), activation=activation)
    recomputing, _, _ = with_bias("torch", splits=(30, 0, 34), recompute=True, activation=activation)
    for one, other in zip(
        forward_backward(recomputing, dispatched), forward_backward(plain, dispatched), strict=True
    ):
        assert torch.equal(one, other)
    assert held_bytes(plain, dispatched) - held_bytes(recomputing, dispatched) == 64 * 4 * 4  # R * F floats


def bias_of_ranks(activation: str, backend: str) -> list[torch.Tensor]:
    """On each rank of an expert tensor parallel group: its cut of the experts on the whole rows; the partial
    sums are added.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, dispatched, _ = with_bias("loop", splits=(3, 0, 4), dtype=torch.float64, activation=activation)
    experts = Experts(
        num_local_experts=3, hidden_size=8, ffn_size=4 // size, activation=activation, backend=backend,
        dtype=torch.float64 if backend == "loop" else torch.float32, bias=True, etp_rank=rank, etp_size=size,
    )  # fmt: skip
    group, halves = dist.group.WORLD, 1 + experts.gated
    cuts = [
        cut(whole.weight1, 1, None, group, halves=halves),
        cut(whole.weight2, 2, None, group),
        cut(whole.bias1, 1, None, group, halves=halves),
        cut(whole.bias2, 1, None, group),
    ]
    with torch.no_grad():
        for parameter, part in zip(experts.parameters(), cuts, strict=True):
            parameter.copy_(part)
    expected, dtype = forward_backward(whole, dispatched), experts.weight1.dtype
    dispatched = replace(dispatched, rows_RD=dispatched.rows_RD.detach().to(dtype).requires_grad_())
    results = forward_backward(experts, dispatched)
    for summed in results[:3]:  # outputs, and gradients of rows and weights, are partial sums
        dist.all_reduce(summed)
    dweight1, dweight2, dbias1, dbias2 = expected[3:]
    parts = [
        cut(dweight1, 1, None, group, halves=halves),
        cut(dweight2, 2, None, group),
        cut(dbias1, 1, None, group, halves=halves),
        cut(dbias2, 1, None, group),
    ]
    return [
        (one - other).norm() / other.norm()
        for one, other in zip(results, [*expected[:3], *parts], strict=True)
    ]


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "loop"), (2, "loop"), (4, "loop"), (2, "triton")])
def test_bias_under_expert_tensor_parallelism(num_ranks, backend, activation):
    limit = 1e-13 if backend == "loop" else 1e-6
    for errors in run_on_ranks(num_ranks, bias_of_ranks, activation, backend):
        # The gradient of the fp32 router weights is fp32.
        assert all(error <= (1e-6 if index == 2 else limit) for index, error in enumerate(errors))


def test_a_bias_that_ranks_cannot_share():
    expected = (
        r"hidden_size=6: with a bias it has to be a multiple of the expert tensor parallel size 4\. Fix:"
        r" change ETP or leave the bias out\."
    )
    with pytest.raises(ValueError, match=expected):
        Experts(
            num_local_experts=1,
            hidden_size=6,
            ffn_size=4,
            activation="gelu",
            backend="loop",
            bias=True,
            etp_size=4,
        )


def test_bf16_experts_return_bf16():
    experts, dispatched = make("swiglu", splits=(2, 3), hidden=8, ffn=8, dtype=torch.bfloat16)
    expected, _ = reference("swiglu", experts, dispatched, (2, 3))
    actual = experts(dispatched)
    assert actual.dtype == torch.bfloat16
    assert (actual.double() - expected).norm() < 0.02 * expected.norm()
