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
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.experts.experts import _BiasOfRows

SCALES = {"clamped_swiglu": 4.0}  # of drawn weights, so that some rows are beyond the limits


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation": "relu"}, r"activation=relu: .* Fix: use one of swiglu, "),
        ({"backend": "auto"}, r"expert_backend=auto: .* Fix: use one of triton, loop, "),
        ({"backend": "te"}, r"expert_backend=te: transformer_engine is not installed\. Fix: pip install "),
        ({"bias": True, "etp_size": 3}, r"hidden_size=4: .* parallel size 3\. Fix: change ETP"),
    ],
)
def test_what_cannot_work_is_refused(changes, text):
    options = {"activation": "gelu", "backend": "loop"} | changes
    with pytest.raises(ValueError, match=f"^{text}"):
        Experts(num_local_experts=1, hidden_size=4, ffn_size=4, **options)


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


def made(
    activation: str, backend: str = "loop", *, splits, hidden=8, ffn=4, bias=False, dtype=torch.float32,
    recompute=False, known_splits=True,
):  # fmt: skip
    """Experts and rows, of which with a bias the last of every expert is padding: zero, with weight 0."""
    experts = Experts(
        num_local_experts=len(splits), hidden_size=hidden, ffn_size=ffn, activation=activation,
        backend=backend, dtype=dtype, bias=bias, recompute_activation=recompute,
    )  # fmt: skip
    with torch.no_grad():
        for seed, parameter in enumerate(experts.parameters()):
            parameter.copy_(SCALES.get(activation, 1.0) * random(*parameter.shape, seed=seed))
    rows_RD = random(sum(splits), hidden, seed=7).to(dtype)
    weights_R = random(sum(splits), seed=8).abs().float()
    if bias:
        rows_RD[last_of(splits)], weights_R[last_of(splits)] = 0, 0
    rows = (rows_RD.requires_grad_(), weights_R.requires_grad_(), torch.tensor(splits))
    return experts, Dispatched(*rows, DispatchRecord(None), splits if known_splits else None)


def last_of(splits) -> list[int]:
    """The last row of every expert that has any."""
    return [sum(splits[: expert + 1]) - 1 for expert in range(len(splits)) if splits[expert]]


def forward_backward(experts: Experts, dispatched: Dispatched) -> list[torch.Tensor]:
    y_RD = experts(dispatched)
    inputs = (dispatched.rows_RD, dispatched.weights_R, *experts.parameters())
    return [y_RD.detach(), *torch.autograd.grad(y_RD, inputs, random(*y_RD.shape, seed=9).to(y_RD.dtype))]


def row_by_row(activation: str, experts: Experts, dispatched: Dispatched, splits) -> list[torch.Tensor]:
    """w * expert(x) with the weight at the end, in float64, and its gradients."""
    given = (dispatched.rows_RD, dispatched.weights_R, *experts.parameters())
    leaves = [leaf.detach().double().requires_grad_() for leaf in given]
    x_RD, weights_R, weight1, weight2 = leaves
    expert_R = [expert for expert, count in enumerate(splits) for _ in range(count)]
    outs = [
        weights_R[row] * (weight2[expert] @ formula(activation, weight1[expert] @ x_RD[row]))
        for row, expert in enumerate(expert_R)
    ]
    y_RD = torch.stack(outs)
    return [y_RD.detach(), *torch.autograd.grad(y_RD, leaves, random(*y_RD.shape, seed=9))]


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
    sizes = {"splits": splits, "hidden": hidden, "ffn": ffn, "known_splits": splits == (2, 5, 1)}
    experts, dispatched = made(activation, backend, dtype=dtype, **sizes)
    gated = ACTIVATIONS[activation].gated
    assert experts.weight1.shape == (3, 2 * ffn if gated else ffn, hidden)
    assert experts.weight2.shape == (3, hidden, ffn)
    actual = forward_backward(experts, dispatched)
    assert actual[0].dtype == dtype
    for one, other in zip(actual, row_by_row(activation, experts, dispatched, splits), strict=True):
        # The router weights are fp32, and so is their gradient.
        limit = 1e-6 if (one.dtype, dtype) == (torch.float32, torch.float64) else tolerance
        assert (one.double() - other).norm() <= limit * other.norm()


# Bias, expert tensor parallelism, recompute


def test_the_gradient_of_a_bias_is_summed_in_fp32():
    """In bf16 a sum of ones ends at 256: the next number is 258."""
    bias_LF = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    _BiasOfRows.apply(bias_LF, torch.tensor([2000, 1000]), 3000).sum().backward()
    assert bias_LF.grad.tolist() == [[2000.0] * 3, [1000.0] * 3]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("backend", "recompute"), [("torch", False), ("torch", True), ("triton", False)])
@pytest.mark.parametrize("splits", [(3, 0, 4), (0, 0, 2), (1, 1, 1), (0, 0, 0)])
def test_other_paths_with_bias_equal_the_function_for_the_cpu(activation, backend, recompute, splits):
    expected = forward_backward(*made(activation, splits=splits, bias=True))
    actual = forward_backward(*made(activation, backend, splits=splits, bias=True, recompute=recompute))
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    for rows_RD in actual[:2]:
        assert not rows_RD[last_of(splits)].any()


class Storages(TorchDispatchMode):
    """Storages of all tensors made in this context, to ask later which of them are still held."""

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
    plain, dispatched = made(activation, "torch", splits=(30, 0, 34), bias=True)
    recomputing, _ = made(activation, "torch", splits=(30, 0, 34), bias=True, recompute=True)
    results = (forward_backward(experts, dispatched) for experts in (recomputing, plain))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert held_bytes(plain, dispatched) - held_bytes(recomputing, dispatched) == 64 * 4 * 4  # R * F floats


def bias_of_ranks(activation: str, backend: str) -> list[torch.Tensor]:
    """Errors on a rank of an expert tensor parallel group, whose partial sums are added."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, dispatched = made(activation, splits=(3, 0, 4), dtype=torch.float64, bias=True)
    experts = Experts(
        num_local_experts=3, hidden_size=8, ffn_size=4 // size, activation=activation, backend=backend,
        dtype=torch.float64 if backend == "loop" else torch.float32, bias=True, etp_rank=rank, etp_size=size,
    )  # fmt: skip

    def cuts(weight1, weight2, bias1, bias2):
        halves = 1 + experts.gated
        axes = ((weight1, 1, halves), (weight2, 2, 1), (bias1, 1, halves), (bias2, 1, 1))
        return [cut(x, axis, None, dist.group.WORLD, halves=parts) for x, axis, parts in axes]

    with torch.no_grad():
        for parameter, part in zip(experts.parameters(), cuts(*whole.parameters()), strict=True):
            parameter.copy_(part)
    expected, dtype = forward_backward(whole, dispatched), experts.weight1.dtype
    dispatched = replace(dispatched, rows_RD=dispatched.rows_RD.detach().to(dtype).requires_grad_())
    results = forward_backward(experts, dispatched)
    for summed in results[:3]:  # outputs, and gradients of rows and weights, are partial sums
        dist.all_reduce(summed)
    expected = [*expected[:3], *cuts(*expected[3:])]
    return [(one - other).norm() / other.norm() for one, other in zip(results, expected, strict=True)]


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "loop"), (2, "loop"), (4, "loop"), (2, "triton")])
def test_bias_under_expert_tensor_parallelism(num_ranks, backend, activation):
    limit = 1e-13 if backend == "loop" else 1e-6
    for errors in run_on_ranks(num_ranks, bias_of_ranks, activation, backend):
        # The gradient of the fp32 router weights is fp32.
        assert all(error <= (1e-6 if index == 2 else limit) for index, error in enumerate(errors))
