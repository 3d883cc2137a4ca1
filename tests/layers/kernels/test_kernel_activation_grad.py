import pytest
import torch

from helpers.layers.backward_cases import COUNTS, DTYPES, SPARE_ROWS, drawn, offsets_of, rows, tokens_of_rows
from helpers.layers.kernel_device import DEVICE, needs_descriptors, use_descriptors
from helpers.layers.references import formula
from helpers.relative_error import relative_error
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.kernels import activation_grad as module
from moe_exp.layers.kernels.activation_grad import activation_grad, activation_grad_torch

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(counts, activation, *, dtype=torch.float32, width=40, depth=24, gathers=True, num_tokens=9):
    """Arguments of activation_grad."""
    num_rows = sum(counts) + SPARE_ROWS
    gated, limit = ACTIVATIONS[activation].gated, ACTIVATIONS[activation].limit
    hidden_RW = drawn(num_rows, width * (1 + gated), dtype=dtype, seed=1) * (limit or 1)
    hidden_RW[sum(counts) :] = float("nan")
    options = {
        "activation": activation,
        "token_R": tokens_of_rows(num_rows, num_tokens, seed=2) if gathers else None,
        "weights_R": drawn(num_rows, dtype=torch.float32, seed=3).abs(),
    }
    dy = drawn(num_tokens if gathers else num_rows, depth, dtype=dtype, seed=4)
    return (dy, drawn(len(counts), depth, width, dtype=dtype, seed=5), hidden_RW, offsets_of(counts)), options


def by_autograd(args, options):
    """Gradients of sum(dy * ((act(h) * w) W2^T)) in float64, and act(h) * w: of the experts' rows alone."""
    dy, weight2_LDF, hidden_RW, offsets_L1 = args
    ends = offsets_L1.tolist()
    hidden_RW = hidden_RW[: ends[-1]].double().requires_grad_()
    weights_R = options["weights_R"][: ends[-1]].double().requires_grad_()
    weighted_RF = formula(options["activation"], hidden_RW) * weights_R.unsqueeze(1)
    dy_RD = rows(dy, options["token_R"])[: ends[-1]]
    loss = sum(
        (dy_RD[a:b] * (weighted_RF[a:b] @ w.double().t())).sum()
        for a, b, w in zip(ends, ends[1:], weight2_LDF, strict=False)
    )
    dhidden_RW, dweights_R = torch.autograd.grad(loss, (hidden_RW, weights_R))
    return dhidden_RW, weighted_RF.detach(), dweights_R


def errors(actual, expected):
    return [relative_error(one[: len(other)], other) for one, other in zip(actual, expected, strict=True)]


def assert_same_rows(one, other, num_rows):
    assert all(torch.equal(x[:num_rows], y[:num_rows]) for x, y in zip(one, other, strict=True))


FUNCTIONS = [(activation_grad, dtype, limit) for dtype, limit in DTYPES.items()]
FUNCTIONS += [(activation_grad_torch, torch.float64, 1e-12), (activation_grad_torch, torch.bfloat16, 1e-2)]


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("function", "dtype", "limit"), FUNCTIONS)
def test_against_autograd(function, dtype, limit, activation, gathers):
    args, options = inputs((0, 5, 0, 33), activation, dtype=dtype, gathers=gathers)
    if dtype == torch.float64:
        options["weights_R"] = options["weights_R"].double()
    actual = function(*args, **options)
    assert [x.dtype for x in actual] == [dtype, dtype, torch.promote_types(dtype, torch.float32)]
    assert max(errors(actual, by_autograd(args, options))) < limit


def test_padding_only():
    """There is no token, and every row is padding."""
    args, options = inputs((0, 5, 0, 33), "swiglu", num_tokens=0)
    assert max(errors(activation_grad(*args, **options), by_autograd(args, options))) < 1e-6


@needs_descriptors
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_by_descriptors(dtype, activation, gathers, monkeypatch):
    use_descriptors(monkeypatch, module)
    test_against_autograd(activation_grad, dtype, DTYPES[dtype], activation, gathers)


@pytest.mark.parametrize(
    ("counts", "sizes"), list(zip(COUNTS, [(33, 65), (64, 64), (7, 3), (65, 1), (3, 1)], strict=True))
)
def test_sizes_and_routings(counts, sizes):
    args, options = inputs(counts, "swiglu", width=sizes[0], depth=sizes[1])
    actual = activation_grad(*args, **options)
    assert max(errors(actual, by_autograd(args, options))) < 1e-6
    assert_same_rows(activation_grad(*args, **options), actual, sum(counts))


def test_no_rows_at_all():
    args, options = inputs((0, 0), "gelu", gathers=False)
    args = (args[0][:0], args[1], args[2][:0], args[3])
    result = activation_grad(*args, activation="gelu", weights_R=options["weights_R"][:0])
    assert [tuple(x.shape) for x in result] == [(0, 40), (0, 40), (0,)]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_at_a_real_size(dtype, limit, activation):
    counts = (0, 1000, 3001, *[511] * 13)
    args, options = inputs(counts, activation, dtype=dtype, width=768, depth=2048, num_tokens=2048)
    first, second = (activation_grad(*args, **options) for _ in range(2))
    assert max(errors(first, by_autograd(args, options))) < limit
    assert_same_rows(first, second, sum(counts))
