"""The self-test of the kernels at a start: what a run does where one is wrong."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.checkpoint.small_job import build_small, records, small_settings, train_whole, write_tokens
from helpers.ranks import RankError, free_port, run_on_ranks
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.engine import backends, runtime
from moe_exp.layers.experts import grouped_gemm
from moe_exp.layers.experts.experts import Experts
from moe_exp.layers.kernels import (
    activation_grad,
    combine,
    grouped_matmul,
    launch,
    self_test,
    tuning,
    up_projection,
    weight_grad,
)
from moe_exp.layers.kernels.launch import KernelFailure
from moe_exp.layers.megatron import moe_parts
from moe_exp.training import loop

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")

CHOOSE = grouped_gemm.choose_backend
TUNED = [activation_grad, combine, grouped_matmul, up_projection, weight_grad]


def as_on_a_gpu(name: str, **options: Any) -> tuple[str, str]:
    """`choose_backend` where auto is triton, and after that the loop."""
    return CHOOSE(name, **options | {"device_type": "cuda", "dtype": torch.float16})


def pretend(broken_rank: int | None) -> list[str]:
    """On a rank: auto is as on a GPU, and a kernel is wrong on one rank. The list gets all warnings."""
    for place in (backends, moe_parts):
        place.choose_backend = as_on_a_gpu
    kernel = grouped_matmul._kernel.fn
    run = kernel.run
    if int(os.environ["RANK"]) == broken_rank:
        kernel.run = lambda *args, **kwargs: (run(*args, **kwargs), args[2].mul_(2))
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_exp").addHandler(handler)
    return warnings


def built(settings: dict[str, Any], broken_rank: int | None, port: int) -> tuple[set[str], list[str]]:
    """On a rank: the backends of the experts that a start builds, and its warnings."""
    warnings = pretend(broken_rank)
    job, _ = build_small(settings, port)
    experts = (module for chunk in job.trained.model for module in chunk.modules())
    found = {module.backend for module in experts if isinstance(module, Experts)}
    runtime.stop()
    return found, warnings


def trained(settings: dict[str, Any], port: int) -> None:
    pretend(0)
    train_whole(settings, port)


def tuned(settings: dict[str, Any], port: int) -> dict[str, Any]:
    """On a rank: the number of timed configs and the choices when training begins and at the end, and all
    warnings. On rank 0 every config is faster than the one before, on others slower.
    """
    warnings, num_timed, begin, states = pretend(None), 0, loop.train, []
    faster = -1 if os.environ["RANK"] == "0" else 1

    def stopwatch(run: Any) -> float:
        nonlocal num_timed
        num_timed += 1
        return faster * num_timed

    def note(*args: Any) -> Any:
        states.append((num_timed, tuning.choices()))
        return begin(*args)

    for module in TUNED:
        module._kernel.configs = [tuning.make_config(config) for config in module.CONFIGS]
    tuning.milliseconds, loop.train = stopwatch, note
    backends.check_kernels = lambda *args: []  # takes a minute for all configs
    self_test.ROWS_OF_CLASSES = ()
    train_whole(settings, port)
    return {"begin": states[0], "end": (num_timed, tuning.choices()), "warnings": warnings}


@pytest.fixture
def settings(tmp_path):
    write_tokens(tmp_path)
    return small_settings(tmp_path, "run", train_iters=2)


def test_auto_continues_on_another_backend_with_a_warning_and_an_event(settings, tmp_path):
    run_on_ranks(1, trained, settings, free_port(), join=False)
    assert len(records(tmp_path / "run", "train")) == 2
    (event,) = [event for event in records(tmp_path / "run", "event") if event["event"] == "kernels_failed"]
    assert (event["iteration"], event["part"], event["backend"]) == (0, "experts", "loop")
    forward, backward = event["problems"]
    assert forward.startswith("kernel grouped_matmul (fp32, 40 rows, 3 experts, 32 x 48, swiglu; ")
    assert "relative error 1 (limit 0.0001)" in forward and "gradient of the rows" in backward
    log = (tmp_path / "run" / "train.log").read_text()
    assert "WARNING" in log and f"EXPERT_BACKEND=auto falls back to loop: {forward}" in log
    assert "grouped GEMM: loop (not triton: the self-test failed: kernel grouped_matmul" in log


def test_a_backend_that_was_named_ends_the_start(settings):
    with pytest.raises(RankError) as raised:
        run_on_ranks(1, built, settings | {"expert_backend": "triton"}, 0, free_port(), join=False)
    (line,) = raised.value.error.problems
    assert line.startswith("EXPERT_BACKEND=triton: ") and "kernel grouped_matmul (" in line
    assert line.endswith("; and 1 more. Fix: set EXPERT_BACKEND=auto.") and "\n" not in line


@pytest.mark.parametrize(
    ("num_ranks", "broken_rank", "backend"),
    [(1, None, "triton"), pytest.param(2, 0, "loop", marks=pytest.mark.slow), (2, 1, "loop")],
)
def test_auto_takes_kernels_that_are_right_on_all_ranks(settings, num_ranks, broken_rank, backend):
    settings |= {"gpus_per_node": num_ranks, "ep": num_ranks}
    for found, warnings in run_on_ranks(num_ranks, built, settings, broken_rank, free_port(), join=False):
        assert found == {backend}
        assert len(warnings) == (0 if broken_rank is None else 2)
        assert all(f"(rank {broken_rank}, " in warning for warning in warnings)


@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_ranks_take_what_is_fastest_on_the_first_and_time_nothing_in_training(settings, ep):
    """Also in evaluation, where the hidden activation is not kept."""
    two = settings | {"gpus_per_node": 2, "ep": ep, "eval_interval": 1, "eval_iters": 1, "split": "90,10"}
    two |= {"train_iters": 1, "num_layers": 1}
    first, second = run_on_ranks(2, tuned, two, free_port(), join=False)
    assert first["begin"] == first["end"] and second["begin"] == second["end"]
    assert first["warnings"] == second["warnings"] == []
    num_timed, choices = first["begin"]
    assert num_timed > 0 and second["begin"] == (0, choices)
    # One expert GEMM forward and one backward; weight gradients are written and added. In fp32 there are no
    # descriptors.
    expected = {"up_projection": 2, "grouped_matmul": 2, "activation_grad": 1, "weight_grad": 4}
    assert {name: len(found) for name, found in choices.items()} == expected | {"combine": 2 - ep}
    for module in TUNED:
        last = max(i for i, config in enumerate(module.CONFIGS) if not config.get("TMA"))
        assert set(choices[module._kernel.name].values()) <= {last}


def test_full_memory_ends_the_tuning_and_not_the_start(monkeypatch, caplog):
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backends, "timing_cases", full)
    monkeypatch.setattr(combine._kernel, "configs", combine._kernel.configs * 2)
    monkeypatch.setattr(backends, "parts_with_kernels", lambda *args: ["experts"])
    monkeypatch.setattr(backends, "can_check", lambda device: True)
    monkeypatch.setattr(backends, "from_first_rank", lambda make: make())
    caplog.set_level(logging.INFO)
    rank: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    backends.tune_run(load_config({"preset": "cpu"}, {}), rank, [])
    assert "some kernels are not tuned because GPU memory is full: OutOfMemoryError" in caplog.text


RANK: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, host="here")


def small(**settings: Any) -> Config:
    return load_config({"preset": "cpu", "gpus_per_node": 1} | settings, {})


def test_nothing_is_compared_where_no_kernel_runs(monkeypatch):
    """As in a CPU's default start."""
    monkeypatch.setattr(backends, "check_kernels", lambda *args: pytest.fail("a kernel is run"))
    assert backends.check_run(small(), RANK) == []
    monkeypatch.setattr(backends, "can_check", lambda device: False)  # not interpreted: the twins run
    assert backends.check_run(small(expert_backend="triton"), RANK) == []


@pytest.mark.parametrize(
    ("part", "backend"),
    [
        ("routing", "torch"),
        ("cross entropy", "megatron"),
        ("rotary embedding", "megatron"),
        ("norm", "torch"),
    ],
)
def test_wrong_kernels_are_reported_and_others_run(monkeypatch, part, backend):
    wrong = SimpleNamespace(problem="wrong", line=lambda device: "a kernel is wrong")
    monkeypatch.setattr(backends, "parts_with_kernels", lambda *args: ["experts", part])
    monkeypatch.setattr(backends, "can_check", lambda device: True)
    monkeypatch.setattr(backends, "check_kernels", lambda other, *_: [wrong] if other == part else [])
    monkeypatch.setattr(backends, "check_rotated", lambda *_: [wrong])
    monkeypatch.setattr(backends, "check_sum_norm", lambda *_: [wrong])
    assert backends.check_run(small(), RANK) == [KernelFailure(part, ["a kernel is wrong"], backend)]
    if part == "cross entropy":  # named, it ends the start
        for kind in ("triton", "linear"):
            with pytest.raises(
                ConfigError, match=rf"CROSS_ENTROPY={kind}: .*\. Fix: set CROSS_ENTROPY=auto\."
            ):
                backends.check_run(small(cross_entropy=kind), RANK)


def test_the_loss_is_compared_where_auto_takes_its_kernels(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "")
    for loss, found in (
        ("auto", {"cuda"}),
        ("triton", {"cuda", "cpu"}),
        ("linear", {"cuda", "cpu"}),
        ("megatron", set()),
    ):
        config = small(use_moe=False, cross_entropy=loss)
        for kind in ("cuda", "cpu"):
            parts = backends.parts_with_kernels(config, torch.device(kind))
            others = ["optimizer", "rotary embedding", "norm"] * (kind == "cuda")
            assert parts == ["cross entropy"] * (kind in found) + others, (loss, kind)


def test_a_margin_leaves_a_multiprocessor(monkeypatch):
    """The interpreter has two."""
    monkeypatch.setattr(launch, "_num_free_processors", 0)
    monkeypatch.setattr(backends, "check_kernels", lambda *args: [])
    assert backends.check_run(small(expert_backend="triton", moe_sm_margin=1), RANK) == []
    assert launch._num_free_processors == 1
    with pytest.raises(ConfigError, match=r"MOE_SM_MARGIN=2: must be less .*\. Fix: set at most 1\."):
        backends.check_run(small(expert_backend="triton", moe_sm_margin=2), RANK)
