"""megatron-core on a host without CUDA, and the traps of such a host that give silently wrong losses."""

import contextlib
import copy
import functools
import importlib
import math
import subprocess
import sys
import warnings

import pytest
import torch

from helpers.ranks import run_on_ranks
from moe_exp.config import Config
from moe_exp.host import gloo, megatron_cpu

with warnings.catch_warnings():
    # Megatron warns at import of modules of its own that it has moved.
    warnings.simplefilter("ignore")
    from moe_exp.engine import optimizer_setup, runtime
    from moe_exp.engine.model import transformer_config
    from moe_exp.engine.optimizer_classes import Adam
    from moe_exp.engine.optimizer_setup import choose_optimizer
    from moe_exp.layers.spec import moe_submodule_spec

    import megatron.core.optimizer
    import megatron.core.utils
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.distributed import DistributedDataParallelConfig as DDPConfig
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.transformer.spec_utils import build_module

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for hosts without CUDA")


def tiny(**settings) -> Config:
    sizes = {
        "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 4, "num_query_groups": 2,
        "seq_len": 16, "vocab_size": 256, "num_experts": 4, "topk": 2, "moe_ffn_hidden_size": 8,
        "gpus_per_node": 1, "dtype": "fp32", "gbsz": 8,
    }  # fmt: skip
    return Config(**(sizes | settings))


@without_cuda
def test_torch_itself_is_unchanged():
    assert megatron_cpu.INSTALLED
    assert torch.cuda.is_available() is False
    assert type(torch) is not type(megatron_cpu._STAND_IN)
    assert sys.modules["torch"] is torch
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    assert torch.tensor.__module__ is None or torch.tensor.__module__.startswith("torch")
    for of_cuda in (
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.empty(1, device="cuda"),
        lambda: torch.ones(1).cuda(),
        lambda: torch.nn.Linear(1, 1).cuda(),
        lambda: torch.cuda.current_device(),
        lambda: torch.tensor([1.0], pin_memory=True),
    ):
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            of_cuda()


@without_cuda
def test_megatron_sees_the_stand_in():
    # This package of Megatron has a module called torch.
    own = "megatron.core.dist_checkpointing.strategies"
    named = [name for name in sys.modules if name.startswith("megatron.core.") and name != own]
    modules = [sys.modules[name] for name in named if hasattr(sys.modules[name], "torch")]
    assert len(modules) > 20
    assert {type(module.torch) for module in modules} == {megatron_cpu._TorchOnCpu}
    stand_in = modules[0].torch
    assert stand_in.nn is torch.nn
    cuda = getattr(stand_in, megatron_cpu._KEYWORD)
    assert cuda.current_device() == torch.device("cpu")
    assert (cuda.is_available(), cuda.device_count(), cuda.memory_allocated()) == (False, 0, 0)
    assert torch.equal(cuda.get_rng_state(), torch.get_rng_state())
    with cuda.stream(cuda.current_stream()):
        cuda.Event(enable_timing=True).record(cuda.Stream())
    assert stand_in.empty(3, pin_memory=True).device.type == "cpu"
    assert stand_in.tensor([3], pin_memory=True).tolist() == [3]
    # A name that no stand-in has is that of torch.
    assert cuda.OutOfMemoryError is torch.cuda.OutOfMemoryError


@without_cuda
def test_words_for_cuda_in_code_become_words_for_the_cpu():
    def code(torch, module):
        def inside():
            words = ("torch.cuda.FloatTensor", ("cuda",))
            return torch.zeros(1, device="cuda").cuda(), module.cuda(torch.cuda.current_device()), words

        return inside()

    code.__code__ = megatron_cpu._for_cpu(code.__code__)
    module = torch.nn.Linear(1, 1)
    zeros, same, words = code(megatron_cpu._STAND_IN, module)
    assert zeros.device.type == "cpu"
    assert same is module
    assert words == ("torch.FloatTensor", ("cpu",))


@without_cuda
def test_megatron_before_us_is_refused():
    with pytest.raises(ImportError, match=r"megatron was imported before moe_exp\. Fix: import moe_exp"):
        megatron_cpu.refuse_if_too_late()


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@without_cuda
def test_import_order():
    result = python("import warnings; warnings.simplefilter('ignore')\nimport megatron.core.enums, moe_exp")
    assert "ImportError: moe_exp: megatron was imported before moe_exp." in result.stderr


def test_importing_the_package_alone_imports_neither_torch_nor_megatron():
    code = "import sys, moe_exp; print(sorted({'torch', 'numpy', 'pydantic', 'megatron'} & set(sys.modules)))"
    assert python(code).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "loader"),
    [
        # in the default suite by test_imports.py's import of every module
        ("", "_Loader" if megatron_cpu.INSTALLED else "SourceFileLoader"),
        ("import torch; torch.cuda.is_available = lambda: True", "SourceFileLoader"),
    ],
    ids=["", "with CUDA"],
)
def test_the_spec_is_there_without_any_earlier_import(before, loader):
    code = f"""
import warnings
warnings.simplefilter("ignore")
{before}
from moe_exp.layers.spec import decoder_spec
import megatron.core.utils
print(decoder_spec.__name__, type(megatron.core.utils.__loader__).__name__)
"""
    done = python(code)
    assert done.stdout == f"decoder_spec {loader}\n", done.stderr


@without_cuda
def test_functions_that_reach_into_cuda_are_mended():
    modules = {name: importlib.import_module(name) for name in megatron_cpu._PATCHES}
    assert modules["megatron.core.tensor_parallel.layers"].dist_all_gather_func is gloo.all_gather
    assert modules["megatron.core.tensor_parallel.mappings"].dist_reduce_scatter_func is gloo.reduce_scatter
    # optional packages that take long are not loaded
    timers = importlib.import_module("megatron.core.timers")
    assert (timers.wandb, timers.SummaryWriter) == (None, None)
    assert not hasattr(importlib.import_module("megatron.core.datasets.indexed_dataset"), "boto3")


def on_rank(tp: int) -> tuple[dict[str, torch.Tensor], float]:
    """Both in one call: to import Megatron on every rank is what takes the time here."""
    return layer_gradients(tp), norm_on_rank()


@functools.cache
def on_ranks(tp: int) -> list[tuple[dict[str, torch.Tensor], float]]:
    return run_on_ranks(tp, on_rank, tp, join=False)


def drawn(layer: torch.nn.Module) -> torch.Generator:
    """Draws the weights of a layer; returns the generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.5, generator=generator)
    return generator


def layer_gradients(tp: int) -> dict[str, torch.Tensor]:
    """Gradients of our MoE layer, after Megatron's reduction, with this rank's part of the sequence."""
    config = tiny(tp=tp, gpus_per_node=tp, z_loss_coeff=0.01)
    groups = runtime.start(config).groups
    settings = transformer_config(config)
    layer = build_module(moe_submodule_spec("loop"), config=settings, pg_collection=groups)
    generator = drawn(layer)
    whole = [torch.randn(8, 2, config.hidden_size, generator=generator) for _ in range(2)]
    x, grad = (tensor.chunk(tp)[groups.tp.rank()] for tensor in whole)
    ddp = DDPConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(settings, ddp, layer, pg_collection=groups)
    out, _ = model(x)
    (out * grad).sum().backward()
    finalize_model_grads([model], pg_collection=groups)
    assert layer.experts.weight1.allreduce is layer.experts.weight2.allreduce is False
    return {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}


def test_expert_gradients_with_tensor_parallel_tokens():
    ((one, _),) = on_ranks(1)
    assert set(one) == {"router.weight", "experts.weight1", "experts.weight2"}
    for gradients, _ in on_ranks(2):
        for name, expected in one.items():
            assert (gradients[name] - expected).norm() <= 1e-6 * expected.norm(), name


def main_grads(adds: bool) -> dict[str, torch.Tensor]:
    """Of Megatron's data parallelism after two micro-batches, in its buffers, with the triton backend."""
    from moe_exp.layers.kernels import launch

    launch.INTERPRETED = False
    config = tiny()
    groups = runtime.start(config).groups
    settings = transformer_config(config)
    layer = build_module(moe_submodule_spec("triton"), config=settings, pg_collection=groups)
    assert layer.experts.adds_to_main_grad and not settings.gradient_accumulation_fusion
    layer.experts.adds_to_main_grad = adds
    generator = drawn(layer)
    # With overlap its hooks want a gradient of every parameter.
    ddp = DDPConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(settings, ddp, layer, pg_collection=groups)
    for last in (False, True):
        x, grad = (torch.randn(8, 2, config.hidden_size, generator=generator) for _ in range(2))
        with contextlib.nullcontext() if last else model.no_sync():
            out, _ = model(x)
            (out * grad).sum().backward()
    finalize_model_grads([model], pg_collection=groups)
    for weight in (layer.experts.weight1, layer.experts.weight2):
        assert weight.grad_added_to_main_grad is adds
    return {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}


def test_gradients_that_the_kernels_add_to_main_grad():
    (plain,), (added,) = (run_on_ranks(1, main_grads, adds, join=False) for adds in (False, True))
    for name, expected in plain.items():
        assert expected.any()
        assert (added[name] - expected).norm() <= 1e-6 * expected.norm(), name


def parameters() -> list[torch.nn.Parameter]:
    generator, shapes = torch.Generator().manual_seed(2), ((5, 3), (7,), (2, 2, 2))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def take_steps(optimizer, params, steps) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def groups_of(params):
    rest = {"params": params[2:], "weight_decay": 0.0, "lr": 3e-2}
    return [{"params": params[:2], "weight_decay": 0.1}, rest]


HYPERPARAMETERS = {"lr": 5e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def test_adam_equals_torch_adamw():
    ours, theirs = parameters(), parameters()
    adam = Adam(groups_of(ours), **HYPERPARAMETERS)
    reference = torch.optim.AdamW(groups_of(theirs), **HYPERPARAMETERS)
    start = [p.detach().clone() for p in ours]
    for steps in (range(10), range(10, 20)):
        take_steps(adam, ours, steps)
        take_steps(reference, theirs, steps)
        for group in adam.param_groups + reference.param_groups:
            group["lr"] *= 0.5
    for p, expected, first in zip(ours, theirs, start, strict=True):
        assert (p - expected).norm() <= 1e-6 * expected.norm()
        assert (p - first).norm() > 0.05 * first.norm()


def test_adam_skips_parameters_without_gradient():
    params = parameters()
    adam = Adam(groups_of(params), **HYPERPARAMETERS)
    set_gradients(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    adam.step()
    assert torch.equal(params[1], before)
    assert params[1] not in adam.state or not adam.state[params[1]]


def test_adam_continues_identically_after_a_load():
    params = parameters()
    adam = Adam(groups_of(params), **HYPERPARAMETERS)
    assert all("step" not in group for group in adam.param_groups)
    take_steps(adam, params, range(5))
    # one step per group and two moments per parameter
    assert [group["step"] for group in adam.param_groups] == [5, 5]
    assert all(set(adam.state[p]) == {"exp_avg", "exp_avg_sq"} for p in params)
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in adam.state_dict()["state"].values())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = Adam(groups_of(copies), **HYPERPARAMETERS)
    loaded.load_state_dict(copy.deepcopy(adam.state_dict()))
    take_steps(adam, params, range(5, 10))
    take_steps(loaded, copies, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    assert [group["step"] for group in loaded.param_groups] == [10, 10]


def test_adam_without_decoupled_weight_decay():
    with pytest.raises(ValueError, match=r"adam_w_mode=False: only decoupled weight decay is .*\. Fix: "):
        Adam(parameters(), adam_w_mode=False)
    with pytest.raises(ValueError, match=r"capturable=True: not supported, .* Fix: "):
        Adam(parameters(), capturable=True)


def test_choose_optimizer():
    sgd = Config(optimizer="sgd", sgd_momentum=0.5)
    assert choose_optimizer(sgd) == ("torch SGD", "OPTIMIZER=sgd, momentum 0.5")
    in_bf16 = Config(optimizer_state_dtype="bf16")
    assert choose_optimizer(in_bf16) == ("torch fused Adam, moments in bf16", "OPTIMIZER_STATE_DTYPE=bf16")
    if optimizer_setup._FUSED_ADAM is not None:
        pytest.skip("Transformer Engine or Apex is installed")
    assert choose_optimizer(Config()) == ("torch fused", "neither Transformer Engine nor Apex is installed")


@pytest.mark.parametrize(("layout", "overlaps"), [({"vpp": 2}, True), ({}, False)])
def test_only_an_interleaved_pipeline_overlaps_its_communication(layout, overlaps):
    settings = transformer_config(tiny(pp=2, gpus_per_node=2, **layout))
    assert (settings.overlap_p2p_comm, settings.batch_p2p_comm) == (overlaps, not overlaps)
    assert settings.deallocate_pipeline_outputs is torch.cuda.is_available()


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"tp": 2, "etp": 2}])
def test_loss_is_not_scaled_per_token(layout):
    assert transformer_config(tiny(gpus_per_node=2, **layout)).calculate_per_token_loss is False


def squares(num_ranks: int, rank: int) -> torch.Tensor:
    """A million numbers of very different sizes, or this rank's part of them."""
    order = torch.randperm(2**20, generator=torch.Generator().manual_seed(1))
    values = torch.logspace(-4, 0, 2**20, dtype=torch.float64)[order]
    return values.float().chunk(num_ranks)[rank]


def norm_on_rank() -> float:
    group = torch.distributed.group.WORLD
    grads = list(squares(group.size(), group.rank()).split(300_000))
    return get_grad_norm_fp32(grads, grad_stats_parallel_group=group)


@without_cuda
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradient_norm_is_accumulated_in_fp64(num_ranks):
    exact = math.sqrt(squares(1, 0).double().square().sum().item())
    for _, norm in on_ranks(num_ranks):
        assert norm == pytest.approx(exact, rel=1e-7)
    # torch's own norm of those numbers in fp32 is further off
    assert abs(squares(1, 0).norm().item() / exact - 1) > 1e-6
    norm, _ = megatron.core.utils.local_multi_tensor_l2_norm(2048, None, [[squares(1, 0)]], False)
    assert norm.item() == pytest.approx(exact, rel=1e-7)
