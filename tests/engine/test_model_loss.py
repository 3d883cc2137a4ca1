"""CROSS_ENTROPY=triton computes Megatron's loss and gradients of a whole model; auto takes it on GPUs."""

from functools import partial

import pytest
import torch
from test_backends import TINY

from helpers.ranks import run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.config import load_config
from moe_exp.engine import model as engine_model
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_model
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import KernelFailure


def losses_and_gradients(tp, kinds):
    """Losses [B, S] and all gradients of this rank, for each kind of cross entropy."""
    results, rank = [], None
    for kind in kinds:
        config = load_config(TINY | {"gpus_per_node": tp, "tp": tp, "cross_entropy": kind}, {})
        rank = rank or runtime.start(config)
        (model,) = build_model(config, rank)
        tokens = torch.randint(500, (2, 13), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(12).expand(2, 12)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        weights = torch.rand(losses.shape, generator=torch.Generator().manual_seed(1))
        (losses * weights).sum().backward()
        gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        results.append((losses.detach(), gradients))
    runtime.stop()
    return type(model.module).__name__, results


@pytest.mark.parametrize("tp", [1, 2])
def test_the_same_loss_and_gradients(tp):
    of_ranks = run_on_ranks(tp, losses_and_gradients, tp, ["megatron", "triton"], join=False)
    for name, ((expected, expected_grads), (losses, grads)) in of_ranks:
        assert name == "GPTModelWithOwnLoss"
        assert (losses.shape, losses.dtype) == ((2, 12), torch.float32)
        assert relative_error(losses, expected) < 1e-6
        assert grads.keys() == expected_grads.keys()
        for key, grad in grads.items():
            assert relative_error(grad, expected_grads[key]) < 1e-5, key


def test_auto_takes_the_kernel_where_it_runs(monkeypatch):
    def chosen(device_type, failures=()):
        return backends_of(load_config(TINY, {}), device_type, failures)["cross entropy"]

    assert chosen("cpu")[0] == "megatron"
    monkeypatch.setattr(launch, "missing", lambda: "")
    assert chosen("cuda")[0] == "triton"
    kind, reason = chosen("cuda", [KernelFailure("cross entropy", ["it is wrong"], "megatron")])
    assert kind == "megatron" and reason.endswith("it is wrong")
    monkeypatch.setattr(launch, "missing", lambda: "triton is not installed")
    assert chosen("cuda")[0] == "megatron"


def kinds_as_on_a_gpu() -> list[str]:
    """The model's class where the kernels are right, and where they have failed."""
    choose = partial(engine_model.choose_cross_entropy, device_type="cuda")
    engine_model.choose_cross_entropy = lambda name, *, device_type, failure: choose(name, failure=failure)
    launch.missing = lambda: ""
    config = load_config(TINY, {})
    rank = runtime.start(config)
    failed = KernelFailure("cross entropy", ["it is wrong"], "megatron")
    models = [build_model(config, rank, kernel_failures=failures)[0] for failures in ([], [failed])]
    runtime.stop()
    return [type(model.module).__name__ for model in models]


def test_a_kernel_that_has_failed_is_not_in_the_model():
    assert run_on_ranks(1, kinds_as_on_a_gpu) == [["GPTModelWithOwnLoss", "GPTModel"]]
