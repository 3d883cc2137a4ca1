"""The benchmark of a training step: moe_exp and megatron-core's own parts compute the same model, and what it
prints can be read.
"""

from __future__ import annotations

import json
import sys
import types
import warnings

import pytest
import torch

from helpers import ROOT
from helpers.ranks import program, run_script_on_ranks

sys.path.append(str(ROOT / "bench/gpu"))  # the modules of the command import each other by name

with warnings.catch_warnings():
    # Megatron warns at import of modules of its own that it has moved.
    warnings.simplefilter("ignore")
    import bench_gpu_step

    from moe_exp.config import load_config


@pytest.mark.slow
def test_megatrons_own_parts_have_the_same_first_loss(tmp_path):
    command = [
        str(ROOT / "bench/gpu/bench_gpu_step.py"),
        "--model",
        "moe",
        "dmoe",
        "--contenders",
        "ours",
        "megatron",
    ]
    command += ["--steps", "1", "--profile", "--json", str(tmp_path / "step.json")]
    codes, printed = run_script_on_ranks(1, program, *command, CUDA_VISIBLE_DEVICES="")
    assert codes == [0], printed
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["model"], row["contender"]) for row in rows] == [
        (model, contender) for model in ("moe", "dmoe") for contender in ("ours", "megatron")
    ]
    for ours, megatron in zip(rows[::2], rows[1::2], strict=True):
        assert ours["first_loss"] == pytest.approx(megatron["first_loss"], rel=1e-5)
        assert min(row["tflops"] for row in (ours, megatron)) > 0
    assert printed.count("aten::mm") == 4  # a table of operators for each


def row(contender, loss):
    return {
        "contender": contender,
        "note": "",
        "num_layers": 2,
        "first_loss": loss,
        "ms": 1.0,
        "tflops": 1.0,
        "peak_bytes": None,
    }


@pytest.mark.parametrize("failing", ["ours", "megatron", "transformers"])
def test_a_contender_that_fails_costs_its_own_row(monkeypatch, tmp_path, failing):
    path = tmp_path / "step.json"
    arguments = types.SimpleNamespace(contenders=["ours", "megatron", "transformers"], json=path)
    results = bench_gpu_step.Results(arguments, types.SimpleNamespace(device=torch.device("cpu")))
    saved = []

    def measure(config, contender, rank, arguments):
        saved.append(
            [row["contender"] for row in json.loads(path.read_text())["rows"]] if path.exists() else []
        )
        if contender == failing:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return row(contender, 7.0)

    monkeypatch.setattr(bench_gpu_step, "measure", measure)
    config = load_config(bench_gpu_step.TINY, environ={})
    assert results.compare("moe", config)
    others = [contender for contender in arguments.contenders if contender != failing]
    # after every row
    assert saved == [[name for name in others if name in arguments.contenders[:count]] for count in range(3)]
    results.save()
    result = json.loads(path.read_text())
    assert [(row["contender"], row["model"]) for row in result["rows"]] == [(name, "moe") for name in others]
    assert result["left_out"] == {f"{failing}, moe": "OutOfMemoryError: CUDA out of memory."}
    assert results.attempts.failed == (["ours, moe"] if failing == "ours" else [])


def test_losses_that_differ(monkeypatch):
    arguments = types.SimpleNamespace(contenders=["ours", "megatron", "transformers"], json=None)
    results = bench_gpu_step.Results(arguments, types.SimpleNamespace(device=torch.device("cpu")))
    losses = {"ours": 7.0, "megatron": 7.001, "transformers": 9.0}
    monkeypatch.setattr(
        bench_gpu_step, "measure", lambda config, contender, *others: row(contender, losses[contender])
    )
    config = load_config(bench_gpu_step.TINY | {"dtype": "fp32"}, environ={})
    assert not results.compare("moe", config)
    losses["megatron"] = 7.00001
    assert results.compare("moe", config)


def test_megatrons_router_on_a_gpu_without_transformer_engine(monkeypatch):
    moe_utils = bench_gpu_step.moe_utils
    if moe_utils.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    monkeypatch.delattr(moe_utils, "te_general_gemm")  # as megatron-core leaves it where no import hook is
    monkeypatch.setattr(bench_gpu_step, "Ours", lambda config, rank: None)
    rank = types.SimpleNamespace(device=torch.device("cuda"))
    _, note = bench_gpu_step.megatron(load_config(bench_gpu_step.TINY, environ={}), rank)
    assert moe_utils.te_general_gemm is None
    assert note == "local spec, experts one by one"


def test_the_router_with_transformer_engine_is_left_alone():
    module = types.SimpleNamespace(HAVE_TE=True, te_general_gemm=len)
    bench_gpu_step.megatron_versions.patch_router(module)
    assert module.te_general_gemm is len


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--expert-backend", "foo"], "EXPERT_BACKEND=foo: must be 'auto', "),
        (["--expert-backend", "te"], "expert_backend=te: "),
        (["--steps", "0"], "argument --steps: 0: has to be a whole number from 1 on."),
        (
            ["--json", "/nonexistent/x.json"],
            "argument --json: /nonexistent/x.json: there is no folder /nonexistent.",
        ),
    ],
)
def test_what_cannot_be_is_said_before_any_work(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu_step.py", *arguments])
    with pytest.raises(SystemExit) as end:
        bench_gpu_step.main()
    assert end.value.code == 2
    out = capsys.readouterr()
    assert f"error: {text}" in out.err
    assert out.out == ""
