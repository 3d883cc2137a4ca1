"""The cross entropy kernels against torch's own in float64, whole and with the vocabulary in parts."""

import pytest
import torch
import torch.distributed as dist

from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.layers.kernels import cross_entropy
from moe_exp.layers.kernels.cross_entropy import (
    choose_cross_entropy,
    cross_entropy_gradient,
    cross_entropy_gradient_torch,
    cross_entropy_statistics,
    cross_entropy_statistics_torch,
    linear_losses,
    token_losses,
)

# Losses are fp32 whatever the logits are; the gradient is rounded to their dtype.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def drawn(num_tokens, num_words, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_words, generator=generator).mul(3).to(dtype)
    target = torch.randint(num_words, (num_tokens,), generator=generator)
    return logits.to(DEVICE), target.to(DEVICE), torch.rand(num_tokens, generator=generator).to(DEVICE)


def torchs(logits, target, grad):
    wide = logits.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    return losses.detach(), torch.autograd.grad(losses, wide, grad.double())[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
# one block, and a whole and a half one
@pytest.mark.parametrize("sizes", [(5, 1), (1, 7), (6, 64), (3, 4096), (2, 5000)])
@pytest.mark.usefixtures("poisoned")
def test_loss_and_gradient(dtype, sizes):
    logits, target, grad = drawn(*sizes, dtype=dtype)
    expected = torchs(logits, target, grad)
    logits.requires_grad_()
    losses = token_losses(logits, target)
    (dlogits,) = torch.autograd.grad(losses, logits, grad)
    assert losses.dtype == torch.float32
    if sizes[1] > 1:
        assert relative_error(losses, expected[0]) < 1e-6
        assert relative_error(dlogits, expected[1]) < TOLERANCE[dtype]
    else:  # the only word is certain
        assert not losses.any() and not dlogits.any()


def test_large_logits_and_words_that_are_impossible():
    logits, target, grad = drawn(4, 5000)
    logits[0] += 1e4  # which has three decimals in fp32, and the log of the sum no more
    logits[1] -= 1e4
    logits[2, :4999] = float("-inf")
    target[2] = 4999
    expected = torchs(logits, target, grad)
    logits.requires_grad_()
    losses = token_losses(logits, target)
    (dlogits,) = torch.autograd.grad(losses, logits, grad)
    assert relative_error(losses, expected[0]) < 1e-4
    assert relative_error(dlogits, expected[1]) < 1e-3
    assert losses[2] == 0


def test_rows_with_space_between_them_and_leading_dimensions():
    logits, target, grad = drawn(6, 40)
    padded = torch.full((6, 48), float("nan"), device=DEVICE)
    padded[:, :40] = logits
    losses = token_losses(padded[:, :40].unflatten(0, (2, 3)), target.view(2, 3))
    assert losses.shape == (2, 3)
    assert relative_error(losses.flatten(), torchs(logits, target, grad)[0]) < 1e-6


@needs_kernels
def test_the_gradient_takes_the_memory_of_the_logits():
    logits, target, grad = drawn(6, 64)
    scaled = logits.requires_grad_() * 1
    address, losses = scaled.data_ptr(), token_losses(scaled, target)
    (dscaled,) = torch.autograd.grad(losses, scaled, grad, retain_graph=True)
    assert dscaled.data_ptr() == address
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses, scaled, grad)


def test_no_tokens():
    logits = torch.empty(0, 8, device=DEVICE, requires_grad=True)
    losses = token_losses(logits, torch.empty(0, dtype=torch.int64, device=DEVICE))
    losses.sum().backward()
    assert logits.grad.shape == (0, 8)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
@pytest.mark.parametrize("first", [0, 16, 32])
def test_kernels_against_their_twins_on_a_part_of_the_vocabulary(first, dtype, limit):
    logits, _, grad = drawn(5, 16, dtype=dtype)
    target = torch.tensor([0, 15, 16, 31, 40], device=DEVICE)
    functions = cross_entropy_statistics, cross_entropy_statistics_torch
    for one, other in zip(*(function(logits, target, first) for function in functions), strict=True):
        assert relative_error(one, other) < limit
    log_sum = logits.logsumexp(dim=1) + 1.0  # of the whole vocabulary
    one, other = (
        gradient(logits, target, log_sum, grad.to(dtype), first)
        for gradient in (cross_entropy_gradient, cross_entropy_gradient_torch)
    )
    assert relative_error(one, other) < 4 * limit


def losses_of_rank(logits, target, grad):
    part = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous().requires_grad_()
    losses = token_losses(part, target, dist.group.WORLD)
    return losses.detach(), torch.autograd.grad(losses, part, grad)[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_vocabulary_over_ranks(num_ranks):
    logits, target, grad = (x.cpu() for x in drawn(7, 32))
    expected = torchs(logits, target, grad)
    results = run_on_ranks(num_ranks, losses_of_rank, logits, target, grad)
    for losses, _ in results:
        assert relative_error(losses, expected[0]) < 1e-6
        assert torch.equal(losses, results[0][0])
    assert relative_error(torch.cat([dlogits for _, dlogits in results], dim=1), expected[1]) < 1e-6


def test_only_the_logits_and_a_number_per_token_are_kept():
    logits, target, _ = drawn(64, 512)
    logits.requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        token_losses(logits, target)
    assert sum(x.numel() * x.itemsize for x in kept.values()) == logits.numel() * 4 + 64 * (8 + 4)


def test_which_runs_and_why(monkeypatch):
    assert choose_cross_entropy("megatron", device_type="cuda")[0] == "megatron"
    name, reason = choose_cross_entropy("triton", device_type="cpu")
    assert name == "triton" and reason.endswith("on a CPU in plain torch")
    monkeypatch.setattr("moe_exp.layers.kernels.launch.missing", lambda: "triton is not installed")
    with pytest.raises(ValueError, match=r"^cross_entropy=triton: triton is not installed\. Fix: set CROSS"):
        choose_cross_entropy("triton", device_type="cuda")


def drawn_layer(num_tokens, num_words, width, *, dtype=torch.float32):
    """Hidden states [N, D], weight [V, D], target [N] and mask [N]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (num_tokens, num_words))
    target = torch.randint(num_words, (num_tokens,), generator=generator)
    mask = (torch.rand(num_tokens, generator=generator) < 0.7).float()
    return *(x.to(DEVICE, dtype) for x in (hidden, weight)), target.to(DEVICE), mask.to(DEVICE)


def losses_and_gradients(losses_of, hidden, weight, mask):
    """Losses; gradients of their masked mean."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    losses = losses_of(hidden, weight)
    (losses * mask).sum().div(mask.sum().clamp(min=1)).backward()
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(1, 7, 3), (8, 64, 16), (21, 100, 24)])
@pytest.mark.usefixtures("poisoned")
def test_linear_loss_by_chunks(monkeypatch, dtype, sizes):
    monkeypatch.setattr(cross_entropy, "LOSS_CHUNK_TOKENS", 8)
    hidden, weight, target, mask = drawn_layer(*sizes, dtype=dtype)
    mask[0] = 0 if sizes[0] > 1 else 1

    def unfused(hidden, weight):
        logits = hidden.double() @ weight.double().t()
        return torch.nn.functional.cross_entropy(logits, target, reduction="none")

    expected = losses_and_gradients(unfused, hidden.double(), weight.double(), mask)
    found = losses_and_gradients(lambda *layer: linear_losses(*layer, target, mask), hidden, weight, mask)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    assert not found[1][mask == 0].any()
    # logits are rounded to the dtype, and their gradient
    limits = (1e-6,) * 3 if dtype == torch.float32 else (4 * TOLERANCE[dtype],) * 3
    for one, other, limit in zip(found, expected, limits, strict=True):
        assert relative_error(one, other) < limit


def test_linear_loss_adds_to_main_grad_and_scales_the_gradient():
    hidden, weight, target, mask = drawn_layer(12, 40, 8)
    weight.requires_grad_().main_grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    for scale in (2.0, 0.5):  # two micro-batches
        (linear_losses(hidden, weight, target, mask) * mask).sum().mul(scale).backward()
        assert weight.grad_added_to_main_grad
    _, _, expected = losses_and_gradients(lambda *it: linear_losses(*it, target, mask), hidden, weight, mask)
    assert relative_error(weight.main_grad - 1, 2.5 * mask.sum() * expected) < 1e-6
    hidden.requires_grad_()
    losses = linear_losses(hidden, weight, target, mask)
    losses.sum().backward()  # not a multiple of the mask
    assert hidden.grad.isnan().all() and weight.main_grad.isnan().all()
    losses = linear_losses(hidden, weight, target, torch.zeros_like(mask))
    (dhidden,) = torch.autograd.grad((losses * 0).sum(), hidden, retain_graph=True)
    assert not dhidden.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_linear_loss_without_gradients_multiplies_once(monkeypatch):
    hidden, weight, target, mask = drawn_layer(12, 40, 8)
    losses = linear_losses(hidden, weight.requires_grad_(), target, mask)
    monkeypatch.setattr(cross_entropy, "_gradient", lambda *args: pytest.fail("a gradient is computed"))
    with torch.no_grad():
        assert torch.equal(linear_losses(hidden, weight, target, mask), losses)


def linear_losses_of_rank(hidden, weight, target, mask):
    cross_entropy.LOSS_CHUNK_TOKENS = 4
    part = weight.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
    group = dist.group.WORLD
    return losses_and_gradients(lambda *it: linear_losses(*it, target, mask, group), hidden, part, mask)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_linear_loss_over_ranks(num_ranks):
    hidden, weight, target, mask = (x.cpu() for x in drawn_layer(7, 32, 8, dtype=torch.float32))
    expected = losses_and_gradients(
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="none"),
        hidden.double(), weight.double(), mask,
    )  # fmt: skip
    results = run_on_ranks(num_ranks, linear_losses_of_rank, hidden, weight, target, mask)
    losses, dhidden, dweight = zip(*results, strict=True)
    assert all(torch.equal(one, losses[0]) for one in losses)
    found = losses[0], torch.stack(dhidden).sum(dim=0), torch.cat(dweight)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-6
