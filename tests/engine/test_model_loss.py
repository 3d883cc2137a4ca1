"""CROSS_ENTROPY=triton and linear compute Megatron's loss and gradients of a whole model; auto takes triton
on GPUs.
"""

from functools import partial

import pytest
import torch
from test_backends import TINY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.model_on_ranks import _run, assembled_job
from helpers.ranks import run_jobs, run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.config import load_config
from moe_exp.engine import model as engine_model
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_model
from moe_exp.layers.kernels import cross_entropy, launch
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


# More than one chunk per micro-batch, and two micro-batches.
CHUNK, CHUNKED = 80, {"mbsz": 12, "gbsz": 24}
MASKED = {"document_mask": True, "eod_mask_loss": True}
TIED = {"tie_embeddings": True}
OVERLAPPED = {"overlap": "true", "distributed_optimizer": True}  # parameters arrive during the next forward
ON_ONE = [MASKED, TIED, {"use_moe": False, "parametrization": "mup", "mup_base_hidden_size": 16}]
ON_TWO = [{"tp": 2} | MASKED, {"tp": 2} | TIED, {"pp": 2} | MASKED | TIED, {"cp": 2} | MASKED]
ON_TWO.append({"ep": 2} | OVERLAPPED)
ON_FOUR = [{"tp": 2, "pp": 2} | MASKED, {"tp": 2, "pp": 2} | TIED, {"tp": 2, "ep": 2} | OVERLAPPED]


def in_chunks(settings, port):
    """On a rank: a job of `run_models`, in plain torch; test_kernel_cross_entropy.py has the kernels."""
    cross_entropy.LOSS_CHUNK_TOKENS, launch.INTERPRETED = CHUNK, False
    return _run(settings, port)


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, ON_ONE),
        (2, ON_TWO[::2]),
        pytest.param(2, ON_TWO[1::2], marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
    ids=["1", "2", "2, others", "4"],
)
def test_linear_is_the_unfused_loss(num_ranks, layouts):
    kinds = ("megatron", "linear")
    jobs = [(CHUNKED | layout | {"cross_entropy": kind},) for layout in layouts for kind in kinds]
    found = [assembled_job(of_ranks) for of_ranks in run_jobs(num_ranks, in_chunks, jobs)]
    for layout, expected, ours in zip(layouts, found[::2], found[1::2], strict=True):
        assert relative_error(ours.losses, expected.losses) < 1e-6, layout
        assert ours.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
        assert ours.gradients.keys() == expected.gradients.keys()
        for name, gradient in ours.gradients.items():
            assert relative_error(gradient, expected.gradients[name]) < 1e-6, (layout, name)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def largest_tensors(kinds):
    """Elements of the largest tensor in forward and backward, in training and in validation, by kind."""
    cross_entropy.LOSS_CHUNK_TOKENS, found, rank = 16, {}, None
    for kind in kinds:
        config = load_config(TINY | {"seq_len": 120, "use_moe": False, "cross_entropy": kind}, {})
        rank = rank or runtime.start(config)
        (model,) = build_model(config, rank)
        tokens, positions = torch.randint(500, (2, 121)), torch.arange(120).expand(2, 120)
        with Largest() as training:
            model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).sum().backward()
        with Largest() as validation, torch.no_grad():
            model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        logits = model(tokens[:, :-1], positions, None)
        assert logits.shape == (2, 120, config.padded_vocab_size)
        found[kind] = training.numel, validation.numel, logits.numel()
    runtime.stop()
    return found


def test_linear_never_holds_the_logits():
    (found,) = run_on_ranks(1, largest_tensors, ["megatron", "linear"])
    training, validation, logits = found["megatron"]
    assert min(training, validation) >= logits
    training, validation, logits = found["linear"]
    assert max(training, validation) < logits / 2


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
    assert run_on_ranks(1, kinds_as_on_a_gpu) == [["GPTModelWithOwnLoss", "PredictingModel"]]
