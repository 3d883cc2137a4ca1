"""One entry more in a table of config/choices.py: all follow; what would have to compute it refuses it."""

import inspect
import json
import re
import runpy
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from helpers import ROOT
from helpers.ranks import free_port
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES
from moe_exp.checkpoint.hf.importing import architecture_of
from moe_exp.cli import main
from moe_exp.config import ConfigError, choices, load_config
from moe_exp.config.sections.router import NAMES, RouterConfig
from moe_exp.config.settings import Config
from moe_exp.engine.optimizer_setup import LearningRateScheduler, choose_optimizer
from moe_exp.launch.machine_checks import check_machine
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.experts.grouped_gemm import BACKENDS, FUSED, choose_backend
from moe_exp.layers.kernels.scores import KERNEL_SCORES
from moe_exp.layers.kernels.topk import SCORE_FUNCTIONS
from moe_exp.layers.losses import AUX_LOSSES, AuxLoss
from moe_exp.layers.moe_layer import needs_scores
from moe_exp.layers.router.router import kernel_problem
from moe_exp.planner import hardware
from moe_exp.planner.costs.params import optimizer_state_bytes

TABLES = {
    "router_score": (choices.SCORES, choices.Score(normalizes=True)),
    "aux_loss_type": (choices.LOSSES, choices.Loss("over a decade", needs_scores=True)),
    "lr_decay_style": (choices.SCHEDULES, choices.Schedule(has_final_decay=True)),
    "optimizer": (choices.OPTIMIZERS, choices.Optimizer("of no kind", "adam", is_sharded=False)),
    "expert_backend": (choices.EXPERT_BACKENDS, choices.ExpertBackend(("nosuch",), "pip it", ("bf16",), 16)),
}


@pytest.fixture(params=[*TABLES, "dispatcher"])
def added(request, monkeypatch):
    """The name of a setting, whose table has the entry `dummy`."""
    if request.param == "dispatcher":
        choices.DISPATCHERS.append("dummy")
        request.addfinalizer(choices.DISPATCHERS.pop)
    else:
        table, entry = TABLES[request.param]
        monkeypatch.setitem(table, "dummy", entry)
    return request.param


def config_with(name: str, **settings: object) -> Config:
    places = {"gpus_per_node": 1, "run_name": "x", "master_port": free_port()}
    given = SMALL | places | {name: "dummy"} | settings
    return load_config({key: str(value) for key, value in given.items()}, {})


def test_settings_help_and_documents_follow(added, capsys):
    assert getattr(config_with(added), added) == "dummy"
    with pytest.raises(ConfigError) as error:
        load_config({added: "dumy"}, {})
    assert "dummy" in str(error.value) or added == "aux_loss_type"
    if added == "aux_loss_type":  # its help is written once, when the module is imported
        return
    assert "dummy" in choices.choices_of(Config.model_fields[added])
    render = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"), run_name="docs")["render"]
    (row,) = (line for line in render().splitlines() if line.startswith(f"| {added.upper()} |"))
    assert "dummy" in row


def test_traits_are_followed(added):
    config = config_with(added, topk=2)
    if added == "router_score":
        assert config.router_weights_sum == 1.0
        assert RouterConfig(8, 4, 2, score="sigmoid").normalizes
    elif added == "aux_loss_type":
        assert needs_scores([AuxLoss("dummy", 1.0)])
    elif added == "lr_decay_style":
        (problem,) = config.problems()
        assert "with LR_DECAY_STYLE=dummy" in problem
    elif added == "optimizer":
        (problem,) = config.problems()
        assert "OPTIMIZER=dummy requires whole matrices" in problem
    elif added == "expert_backend":
        (problem,) = config_with(added, dtype="fp32").problems()
        assert problem.startswith("EXPERT_BACKEND=dummy: only supports DTYPE=bf16, not fp32")
        (problem,) = check_machine(config)
        assert problem.startswith("EXPERT_BACKEND=dummy: nosuch is not installed. Fix: pip it")


def test_what_cannot_compute_it_refuses_it_by_name(added, capsys):
    if added == "router_score":
        with pytest.raises(ValueError, match="score=dummy: must be one of softmax, sigmoid, sqrtsoftplus"):
            RouterConfig(8, 4, 2, score="dummy")
    elif added == "dispatcher":
        assert main(["plan", "--preset=cpu", "--gpu=h100", "--gpus=2", "--ep=2", "--dispatcher=dummy"]) != 0
        assert "DISPATCHER=dummy: the planner does not support this value" in capsys.readouterr().err
    elif added == "lr_decay_style":
        with pytest.raises(
            ValueError, match=r"lr_decay_style=dummy: its pieces are not defined in config/sections/learning"
        ):
            LearningRateScheduler(config_with(added), SimpleNamespace(param_groups=[{}]))
    elif added == "optimizer":
        with pytest.raises(ValueError, match="optimizer=dummy: has no class"):
            choose_optimizer(config_with(added))
        with pytest.raises(ValueError, match="OPTIMIZER=dummy"):
            optimizer_state_bytes(config_with(added))
    elif added == "expert_backend":
        with pytest.raises(ValueError, match="expert_backend=dummy: unknown backend"):
            choose_backend("dummy", device_type="cpu", dtype=torch.float32)
        with pytest.raises(ValueError, match="expert_backend=dummy: unknown backend"):
            Experts(num_local_experts=1, hidden_size=8, ffn_size=8, activation="gelu", backend="dummy")


def test_every_entry_has_its_function():
    assert {"softmax", *SCORE_FUNCTIONS} == set(choices.SCORES) - {"relu"} == set(KERNEL_SCORES)
    assert set(NAMES["score"]) == set(choices.SCORES)
    assert set(AUX_LOSSES) == set(choices.LOSSES)
    assert {*BACKENDS, *FUSED} == set(choices.EXPERT_BACKENDS)
    activations = get_args(Config.model_fields["activation"].annotation)
    gated = {name: load_config({"preset": "cpu", "activation": name}, {}).gated for name in activations}
    assert gated == {name: activation.gated for name, activation in ACTIVATIONS.items()}
    for name in KERNEL_SCORES:
        assert kernel_problem(RouterConfig(8, 4, 2, score=name), needs_scores=False) == ""


def test_a_device_is_one_file(tmp_path, monkeypatch, capsys):
    copied = tmp_path / "profiles"
    shutil.copytree(hardware.PROFILES, copied)
    profile = json.loads((copied / "H200-141GB.json").read_text())
    (copied / "dummy.json").write_text(json.dumps(profile | {"name": "dummy"}))
    monkeypatch.setattr(hardware, "PROFILES", copied)
    monkeypatch.setattr(hardware, "hardware_names", hardware.hardware_names.__wrapped__)  # not cached
    assert "dummy" in hardware.hardware_names()
    assert main(["plan", "--preset=cpu", "--gpu=dummy", "--gpus=2"]) == 0
    assert "dummy" in capsys.readouterr().out
    (copied / "dummy.json").write_text(json.dumps(profile | {"name": "dummy", "num_units": 123}))
    assert main(["plan", "hardware"]) == 0
    printed = capsys.readouterr().out
    assert "dummy" in printed and re.search(r"num_units\W+123 ", printed)
    (copied / "dummy.json").write_text(json.dumps({k: v for k, v in profile.items() if k != "memory_bytes"}))
    assert main(["plan", "--preset=cpu", "--gpu=dummy"]) != 0
    assert "memory_bytes" in capsys.readouterr().err


def test_a_hugging_face_family_is_one_entry(monkeypatch):
    of_mixtral = ARCHITECTURES["MixtralForCausalLM"]
    monkeypatch.setitem(ARCHITECTURES, "DummyForCausalLM", replace(of_mixtral, name="DummyForCausalLM"))
    assert architecture_of({"architectures": ["DummyForCausalLM"]}).name == "DummyForCausalLM"
    with pytest.raises(ValueError, match="DummyForCausalLM"):
        architecture_of({"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(TypeError):
        type(of_mixtral)(name="DummyForCausalLM")


def test_decays_are_those_of_megatron():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    source = inspect.getsource(OptimizerParamScheduler.get_lr)
    assert all(f'lr_wsd_decay_style == "{name}"' in source for name in choices.DECAYS)
