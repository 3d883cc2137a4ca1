"""moe-exp doctor: the report, with and without what it asks for."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from helpers import ROOT
from moe_exp.commands import doctor


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "env": environ, "timeout": 120}
    return subprocess.run([sys.executable, *arguments], **options)


def pretend_missing(monkeypatch, *packages: str) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)


def test_report_names_versions_devices_packages_and_backends(monkeypatch, capsys):
    rows = [["attention", "sdpa", "flash-attn needs a GPU"]]
    monkeypatch.setattr(doctor, "backend_rows", lambda: rows)
    assert doctor.main() == 0
    report = capsys.readouterr().out
    texts = ["megatron-core", "cores for this process", "GiB", "flash-attn needs a GPU"]
    texts += [importlib.metadata.version("torch"), *(package for package, *_ in doctor.OPTIONAL)]
    assert all(text in report for text in texts)
    assert "\x1b[" not in report  # plain where it is not a terminal


@pytest.mark.slow
def test_command_says_what_each_part_will_use():
    done = run_module("-W", "ignore", "-m", "moe_exp", "doctor")
    assert done.returncode == 0, done.stderr
    backends = done.stdout.partition("What each part will use")[2]
    parts = [line.split("  ")[0].strip() for line in backends.splitlines()]
    known = ["communication", "attention", "norm", "grouped GEMM", "routing", "cross entropy", "optimizer"]
    assert [part for part in parts if part in known] == known


def test_optional_package_that_is_missing_has_cost_and_installation(monkeypatch):
    names = [package for package, *_ in doctor.OPTIONAL]
    pretend_missing(monkeypatch, *names, "nv-grouped-gemm", "pytorch-triton")
    for package, version, cost, install in doctor.optional_rows():
        assert version == "missing" and cost and install, package


@pytest.mark.parametrize("package", ["torch", "rich", "megatron-core", "psutil"])
def test_required_package_that_is_missing_is_an_error_with_its_fix(package, monkeypatch, capsys):
    pretend_missing(monkeypatch, package)
    assert doctor.main() == 1
    report = capsys.readouterr().out
    assert f"Required and missing in {sys.executable}: {package}" in report
    assert 'pip install -c constraints.txt -e ".[train]"' in report


@pytest.mark.parametrize(
    ("version", "meets"), [("2.5.1", False), ("2.6.0+cpu", True), ("2.8.0a0+5228986c39.nv25.06", True)]
)
def test_versions_of_a_range(version, meets, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"torch": version}.get)
    monkeypatch.setattr(doctor, "requirements", lambda extras=(): ["torch>=2.6"])
    assert doctor.unmet_requirements() == ([] if meets else ["torch>=2.6"])


def test_package_whose_files_are_gone_is_unmet(monkeypatch, tmp_path):
    files, gone = importlib.metadata.files, importlib.metadata.PackagePath("numpy/__init__.py")
    gone.dist = importlib.metadata.PathDistribution(tmp_path / "numpy-2.0.dist-info")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [gone] if name == "numpy" else files(name))
    assert [line.partition(">")[0] for line in doctor.unmet_requirements()] == ["numpy"]


def lines_of(extras: list[str]) -> set[str]:
    """Requirements but that of triton, of which the tests need a newer one than training does."""
    return {line for line in doctor.requirements(extras) if Requirement(line).name != "triton"}


def test_extras_add_their_requirements():
    assert lines_of(["wandb", "dev"]) > lines_of(["train"])
    with pytest.raises(ValueError, match=r"extra .nonsense. does not exist: use one of plan, .*, dev"):
        doctor.requirements(["nonsense"])


def test_a_requirement_of_other_pythons_is_none(monkeypatch):
    for python, has_triton in [((3, 11, 7), False), ((3, 12, 0), True), ((4, 0, 0), True)]:
        monkeypatch.setattr(sys, "version_info", python)
        assert ("triton>=3.0" in doctor.requirements()) == has_triton
        assert "torch>=2.6" in doctor.requirements()


def test_missing_is_answered_without_third_party_packages():
    """The scripts ask a Python in which nothing is installed: -S leaves site-packages out."""
    done = run_module("-S", "-m", "moe_exp.commands.doctor", "--missing", "train")
    assert done.returncode == 1
    assert done.stdout.splitlines() == doctor.requirements()
    assert done.stderr == ""


def test_missing_is_answered_without_importing_torch():
    """Every command of the scripts asks first, and torch takes a second."""
    asks = "import sys; from moe_exp.commands.doctor import unmet_requirements as unmet"
    assert run_module("-c", f"{asks}; print(unmet(), 'torch' in sys.modules)").stdout == "[] False\n"


def test_kernels_are_compared(monkeypatch, capsys):
    pytest.importorskip("triton")
    from moe_exp.engine import backends
    from moe_exp.layers.kernels import combine

    monkeypatch.setattr(backends, "_DOCTOR_CASES", backends._DOCTOR_CASES[:1])
    assert doctor.check_kernels() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    results = {row[0]: row[5] for row in rows if row[5:] and row[5] in ("ok", "failed")}
    assert set(results.values()) == {"ok"}
    assert {"up_projection", "weight_grad", "router_topk", "chunk_order"} <= set(results)

    kernel = combine._kernel.fn
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **kwargs: (run(*args, **kwargs), args[2].zero_()))
    assert doctor.check_kernels() == 1
    report = capsys.readouterr().out
    assert [line.split()[0] for line in report.splitlines() if " failed " in line] == ["combine"] * 2
    assert "kernel combine (bf16, " in report and "relative error 1 (limit 0.03)" in report


def test_kernels_that_cannot_be_compared(monkeypatch, capsys):
    from moe_exp.engine import backends

    monkeypatch.setattr(backends, "can_check", lambda device: False)
    monkeypatch.setattr(backends, "missing", lambda: "triton is not installed")
    assert doctor.check_kernels() == 0
    assert capsys.readouterr().out == "No kernels checked: triton is not installed.\n"


def test_a_login_node_needs_neither_torch_nor_megatron(monkeypatch, capsys):
    """`pip install moe-exp[plan]`: no package of training is among its requirements, dev has all of them."""
    of_plan = {Requirement(line).name for line in doctor.requirements(["plan"])}
    assert not of_plan & {"torch", "megatron-core", "triton", "safetensors", "tensorboard", "matplotlib"}
    of_training = lines_of(["train"]) - lines_of([])
    assert of_training and of_training <= lines_of(["dev"])
    pretend_missing(monkeypatch, "torch", "megatron-core")
    assert doctor.main() == 1
    assert "Planning, reports and `moe-exp slurm` with CONTAINER" in capsys.readouterr().out
