"""DETERMINISTIC: the same bits in every start, those without, and an environment that does not undo it."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.model_on_ranks import TINY, run_models
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format import settings
from moe_exp.config import Config, load_config
from moe_exp.config.sections.optimizer import ENVIRONMENT
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_model
from moe_exp.launch.machine_checks import check_machine
from moe_exp.launch.torchrun_job import child_environment
from moe_exp.layers.megatron.attention import CausalAttention

MODELS = {
    "dense": {"use_moe": False, "dropout": 0.1},
    "dropless": {"router_bias_update_rate": 0.01, "shared_expert_size": 24},
    "our kernels' twins": {
        "expert_backend": "triton", "cross_entropy": "triton", "dtype": "bf16", "num_layers": 1,
    },
    "capacity, padded": {"moe_type": "moe", "capacity_factor": 0.5},
    "capacity, not padded": {"moe_type": "moe", "capacity_factor": 0.5, "pad_to_capacity": False},
}  # fmt: skip
OURS = {name: values[0] for name, values in ENVIRONMENT.items()}


def tiny(*, deterministic: bool = True, **values) -> Config:
    return load_config(TINY | {"gpus_per_node": 1, "deterministic": deterministic} | values, {})


@pytest.fixture
def no_variables(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_training_has_the_same_bits_in_two_starts_and_those_without(tmp_path):
    models = {name: model | {"gbsz": 2} for name, model in MODELS.items()}
    plain = [model | {"save": str(tmp_path / name), "save_after": 1} for name, model in models.items()]
    always = [model | {"deterministic": True} for model in models.values()]
    # What a process has switched on stays on, so those without come first.
    first, second = run_models(1, plain + always, timeout=480), run_models(1, always, timeout=480)
    saved = zip(MODELS, always, strict=True)
    later = [job | {"load": str(tmp_path / name), "iterations": 1} for name, job in saved]
    resumed = run_models(1, later, timeout=480)
    of_models = zip(MODELS, first[: len(MODELS)], first[len(MODELS) :], second, resumed, strict=True)
    for name, expected, found, again, rest in of_models:
        for other in (expected, again):
            assert torch.equal(found.losses, other.losses), name
            assert found.grad_norms == other.grad_norms, name
            assert found.gradients.keys() == other.gradients.keys()
            for key, gradient in found.gradients.items():
                assert torch.equal(gradient, other.gradients[key]), (name, key)
        assert len(set(found.grad_norms)) == 2  # a step changes the model
        assert rest.grad_norms == found.grad_norms[1:], name  # the checkpoint is of a run without


def switched(deterministic: bool) -> tuple[int, bool]:
    """On a rank of its own: torch's mode (0 off, 1 warns, 2 raises), what Megatron's embedding was told."""
    config = tiny(deterministic=deterministic)
    (model,) = build_model(config, runtime.start_alone(config))
    return torch.get_deterministic_debug_mode(), model.module.embedding.word_embeddings.deterministic_mode


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_and_megatron_are_told(deterministic):
    expected = (2 * deterministic, deterministic)
    assert run_on_ranks(1, switched, deterministic, join=False, timeout=480) == [expected]
    assert ("algorithms" in backends_of(tiny(deterministic=deterministic), "cpu")) == deterministic


def test_ranks_get_the_variables_that_are_not_set(no_variables, monkeypatch):
    assert not ENVIRONMENT.keys() & child_environment(tiny(deterministic=False)).keys()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "")
    environ = child_environment(tiny())
    assert {name: environ[name] for name in ENVIRONMENT} == OURS | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("NCCL_ALGO", "Tree", "Ring"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
    ],
)
def test_a_variable_that_undoes_it_is_refused(no_variables, monkeypatch, name, value, good):
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 1)
    monkeypatch.setattr("moe_exp.launch.machine_checks.torch_has_cuda", lambda: True)
    monkeypatch.setenv(name, value)
    (line,) = check_machine(tiny(master_port=free_port()))
    assert (
        line.startswith(f"{name}={value}: lets the order of summation vary, but DETERMINISTIC=true")
        and f" {name}={good}, or " in line
    )
    assert check_machine(tiny(master_port=free_port(), deterministic=False)) == []
    # A rank that no launcher has started finds it, too.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        runtime.make_deterministic(tiny())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rank_without_launcher_sets_the_variables_itself(no_variables, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    environ = dict(os.environ)
    monkeypatch.setattr("os.environ", environ)
    modes = []
    monkeypatch.setattr("torch.use_deterministic_algorithms", modes.append)
    runtime.make_deterministic(tiny())
    assert modes == [True]
    assert {name: environ[name] for name in ENVIRONMENT} == OURS


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_takes_its_deterministic_backward(deterministic, monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, **options):
        asked.append(options["deterministic"])
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: deterministic)
    config = SimpleNamespace(kv_channels=4, attention_dropout=0.0, params_dtype=torch.bfloat16)
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0), tp=None)
    module = CausalAttention(config, 1, None, "self", pg_collection=groups)
    module.backend = "flash-attn"
    module(*torch.randn(3, 2, 1, 1, 4), None)
    assert asked == [deterministic]


def test_a_model_in_use_draws_tokens_and_so_is_not_deterministic(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "read_common", lambda folder: {"config": tiny().model_dump()})
    assert not settings.saved_config(tmp_path).deterministic
