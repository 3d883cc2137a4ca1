"""The optimizers by themselves: against torch's, and what becomes of moments that are not kept in fp32."""

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.relative_error import relative_error
from moe_exp.config import Config
from moe_exp.engine import optimizer_setup
from moe_exp.engine.optimizer_classes import (
    BLOCK,
    SMALL,
    Adam,
    Adam8bit,
    Sgd,
    allocate_moments,
    dequantized,
    moments,
    quantized,
    set_moments,
)

from megatron.core.optimizer import clip_grads

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizers: list[torch.optim.Optimizer], *, steps: int, first: int = 0) -> None:
    """The same gradients for all of them."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1 + step)
        for same in zip(*map(parameters_of, optimizers), strict=True):
            gradient, exponent = (torch.randn(same[0].shape, generator=generator) for _ in range(2))
            gradient *= 10**exponent
            for p in same:
                p.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


def clones(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def all_moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value.clone() for p in parameters_of(optimizer) for value in moments(optimizer, p).values()]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_to_the_bit_with_momentum_from_the_start(momentum):
    params = parameters(7, 300)
    copies = clones(params)
    settings = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1}
    ours, theirs = Sgd(params, **settings), torch.optim.SGD(copies, **settings)
    allocate_moments(ours)
    for first in range(3):
        train([ours, theirs], steps=1, first=first)
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    assert [set(moments(ours, p)) for p in params] == [{"momentum_buffer"} if momentum else set()] * 2


def test_bf16_moments_follow_fp32_ones():
    params = parameters(5, 3000)
    copies, start = clones(params), clones(params)
    ours = Adam(params, **HYPERPARAMETERS, state_dtype=torch.bfloat16)
    exact = Adam(copies, **HYPERPARAMETERS)
    train([ours, exact], steps=30)
    assert {value.dtype for p in params for value in ours.state[p].values()} == {torch.bfloat16}
    for p, q, s in zip(params, copies, start, strict=True):
        assert 1e-6 < relative_error(p.detach() - s.detach(), q.detach() - s.detach()) < 0.02
    for a, b in zip(all_moments(ours), all_moments(exact), strict=True):
        assert relative_error(a, b) < 0.01


TABLES = {"signed": torch.linspace(-0.993, 1, 256), "unsigned": torch.linspace(0, 1, 256) ** 3}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", [1, BLOCK, 5 * BLOCK + 3])
def test_codes_are_the_nearest(name, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    values = values if name == "signed" else values.square()
    codes, scale = quantized(values, TABLES[name])
    assert (codes.dtype, codes.shape, scale.shape) == (torch.uint8, (size,), (-(-size // BLOCK),))
    found = dequantized(codes, scale, TABLES[name])
    best = (TABLES[name] * scale.repeat_interleave(BLOCK)[:size, None] - values[:, None]).abs().amin(1)
    assert torch.allclose((found - values).abs(), best, rtol=0, atol=1e-6 * float(scale.max()))


@pytest.mark.parametrize("name", TABLES)
def test_what_was_quantized_before_gets_the_same_codes(name):
    """Also blocks whose largest value is negative, and blocks of zeros."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (20 * BLOCK + 9,), generator=generator, dtype=torch.uint8)
    codes[: 4 * BLOCK] = torch.randint(0, 100, (4 * BLOCK,), generator=generator, dtype=torch.uint8)
    # A block has its largest value: that is what its scale is from.
    codes[::BLOCK] = 255
    codes[: 4 * BLOCK : BLOCK] = 0 if name == "signed" else 255
    scale = torch.rand(21, generator=generator) * 10.0 ** torch.arange(-10, 11)
    values = dequantized(codes, scale, TABLES[name])
    again, scale_again = quantized(values, TABLES[name])
    assert torch.equal(again, codes)
    assert torch.allclose(scale_again, scale, rtol=3e-7, atol=0)
    nothing = torch.zeros(BLOCK)
    assert torch.equal(dequantized(*quantized(nothing, TABLES[name]), TABLES[name]), nothing)


def test_large_tensors_are_converted_in_pieces(monkeypatch):
    values = torch.randn(7 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    whole = quantized(values, TABLES["signed"])
    back = dequantized(*whole, TABLES["signed"])
    monkeypatch.setattr("moe_exp.engine.optimizer_classes._CHUNK", 2 * BLOCK)
    in_pieces = quantized(values, TABLES["signed"])
    assert torch.equal(in_pieces[0], whole[0]) and torch.equal(in_pieces[1], whole[1])
    assert torch.equal(dequantized(*whole, TABLES["signed"]), back)


@pytest.fixture
def bitsandbytes() -> Any:
    from moe_exp.launch.machine_checks import bitsandbytes_problem

    if reason := bitsandbytes_problem("GPU" if torch.cuda.is_available() else "CPU"):
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes
    return bitsandbytes


SIZES = (SMALL - 1, SMALL, 20_011)


def test_adam8bit_is_that_of_bitsandbytes(bitsandbytes):
    """To the bit where moments are codes; small tensors have torch's fp32 Adam."""
    params = parameters(*SIZES)
    copies, exact = clones(params), clones(params)
    ours = Adam8bit(params, **HYPERPARAMETERS)
    theirs = bitsandbytes.optim.AdamW8bit(copies, **HYPERPARAMETERS)
    train([ours, theirs, Adam(exact, **HYPERPARAMETERS)], steps=10)
    assert all(torch.equal(p, q) for p, q in zip(params[1:], copies[1:], strict=True))
    assert torch.equal(params[0], exact[0])
    assert [ours.state[p]["exp_avg"].dtype for p in params] == [torch.float32, torch.uint8, torch.uint8]
    state = ours.state[params[2]]
    num_bytes = sum(value.nbytes for value in state.values())
    assert num_bytes / SIZES[2] == pytest.approx(2 * (1 + 4 / BLOCK), rel=0.01)


def test_adam8bit_goes_on_with_moments_that_were_fp32_in_between(bitsandbytes):
    params = parameters(*SIZES)
    copies = clones(params)
    through, loaded = (Adam8bit(p, **HYPERPARAMETERS) for p in (params, copies))
    train([through], steps=5)
    allocate_moments(loaded)
    for p, q in zip(params, copies, strict=True):
        q.data.copy_(p.data)
        set_moments(loaded, q, {name: value.clone() for name, value in moments(through, p).items()})
        assert torch.equal(through.state[p]["exp_avg"], loaded.state[q]["exp_avg"])
        assert torch.equal(through.state[p]["exp_avg_sq"], loaded.state[q]["exp_avg_sq"])
    loaded.param_groups[0]["step"] = through.param_groups[0]["step"]
    train([through, loaded], steps=5, first=5)
    assert all(relative_error(p.detach(), q.detach()) < 1e-6 for p, q in zip(params, copies, strict=True))


def test_adam8bit_goes_on_from_fp32_moments(bitsandbytes):
    """The moments have the error of the codes, 2 % of a normal value at most."""
    params = parameters(*SIZES)
    copies = clones(params)
    exact, ours = Adam(params, **HYPERPARAMETERS), Adam8bit(copies, **HYPERPARAMETERS)
    for p in params:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    exact.step()
    allocate_moments(ours)
    for p, q in zip(params, copies, strict=True):
        set_moments(ours, q, moments(exact, p))
    errors = [relative_error(a, b) for a, b in zip(all_moments(ours), all_moments(exact), strict=True)]
    assert errors[:2] == [0.0, 0.0]
    assert all(0 < error < 0.02 for error in errors[2:])


@pytest.mark.parametrize("ends_in_error", [False, True])
def test_megatron_builds_the_chosen_class_only_while_the_optimizer_is_built(ends_in_error):
    import megatron.core.optimizer as module
    import megatron.core.optimizer.distrib_optimizer as distributed

    names = [(module, "Adam"), (module, "SGD"), (module, "USING_PYTORCH_OPTIMIZER"), (distributed, "Adam")]
    before = [getattr(owner, name) for owner, name in names]
    with suppress(RuntimeError), optimizer_setup._megatron_builds(Config(optimizer="sgd"), "torch"):
        assert module.SGD is Sgd and distributed.Adam == (Sgd,) and not module.USING_PYTORCH_OPTIMIZER
        if ends_in_error:
            raise RuntimeError
    assert [getattr(owner, name) for owner, name in names] == before


def test_norm_and_clipping_of_all_gradients_at_once(monkeypatch):
    """In place of Megatron's, where Transformer Engine and Apex are missing on a GPU."""
    weights = parameters(15, 7, 8)
    for weight in weights:
        weight.grad = weight.detach() + 1
    whole, grads = torch.cat([weight.grad for weight in weights]), [weight.grad for weight in weights]
    norm, each = clip_grads.multi_tensor_applier(optimizer_setup.norm_of_all, None, [grads], False)
    assert each is None and norm.shape == (1,) and norm.dtype == torch.float32
    torch.testing.assert_close(norm[0], whole.norm())
    doubled = [torch.empty_like(grad) for grad in grads]
    clip_grads.multi_tensor_applier(optimizer_setup.scale_all, None, [grads, doubled], 2.0)
    assert torch.equal(torch.cat(doubled), whole * 2)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", optimizer_setup.scale_all)
    clip_grads.clip_grad_by_total_norm_fp32(weights, max_norm=0.5, total_norm=norm.item())
    torch.testing.assert_close(torch.cat([weight.grad for weight in weights]), whole * 0.5 / norm)
