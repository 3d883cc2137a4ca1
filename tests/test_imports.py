"""The import rule of docs/architecture.md, read from the source: at module level and inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from moe_exp.commands.doctor import requirements

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_exp"

# Modules (or folders) of the package and what else of it each may import. What is not named here may import nothing of it.
CPU = {"megatron_cpu", "gloo"}
ENGINE = {"config", "runtime", "model", *CPU}
ALLOWED: dict[str, set[str]] = {
    "model_settings": {"hosts", "presets", "setting_types"},
    "config": {"hosts", "presets", "setting_types", "model_settings", "run_names"},
    "table_console": set(),
    "progress": {"table_console"},
    "planner": {"table_console", "config", "checks"},
    "model_changes": {"config"},
    "run_folder": {"config", "files", "hosts", "model_changes"},
    "data": {"table_console", "config", "megatron_cpu", "files", "progress"},
    "checks": {"config", "attention_checks", "fp8_checks", "pipeline_checks", "training_checks", "divisors"},
    "fp8_checks": {"config", "divisors"},
    "pipeline_checks": {"config", "divisors"},
    "training_checks": {"config", "planner", "setting_types"},
    "attention_checks": {"config"},
    "divisors": {"config"},
    "machine_checks": {"config", "determinism", "hosts", "run_folder", "data", "planner"},
    "megatron_cpu": {"gloo"},
    "determinism": {"config"},
    "runtime": {"config", "determinism", *CPU},
    "layers": {"config", *CPU},
    "model": {"config", "runtime", "layers", "model_loss", *CPU},
    "model_loss": {"layers", *CPU},
    "optimizers": set(),
    "muon": {"optimizers"},
    "loss_scale": {*CPU},
    "optim": {"loss_scale", "config", "runtime", "layers", "model", "muon", "optimizers", "planner", *CPU},
    "checkpoint": {*ENGINE, "planner", "optimizers", "model_changes", "run_folder", "files", "hosts", "progress"},
    "training_data": {*CPU, "config", "runtime", "optim", "data", "checkpoint"},
    "inference": {
        "table_console",
        *ENGINE,
        "checkpoint",
        "progress",
        "run_folder",
        "files",
        "layers",
        "optim",
        "data",
        "checks",
        "hosts",
        "faults",
    },
    "upcycle": {*ENGINE, "checkpoint", "layers", "machine_checks"},
    "hf": {*ENGINE, "checkpoint", "data", "run_folder", "files", "progress"},
    "mirrors": {"config", "run_folder", "files"},
    "records": {"files"},
    "metrics": {"config", "run_folder", "files", "hosts", "planner", "mirrors", "records"},
    "faults": {"hosts"},
    "heartbeat": {"hosts"},
    "watch": {"table_console", "config", "run_folder", "records", "files", "hosts", "progress", "planner", "heartbeat"},
    "preflight": {
        "checks",
        "table_console",
        "config",
        "files",
        "hosts",
        "launch",
        "planner",
        "progress",
        "records",
        "run_folder",
        "torchrun_job",
        "watch",
    },
    "report": {"config", "run_folder", "records", "metrics", "files", "hosts", "planner", "progress"},
    "backends": {*ENGINE, "layers", "optim"},
    "interval": {*ENGINE, "hosts", "checkpoint", "metrics", "planner", "optim", "layers", "phases", "faults"},
    "phases": set(),
    "group_checks": {*ENGINE, "checkpoint"},
    "replica_checks": {"heartbeat", *ENGINE, "checkpoint", "group_checks", "metrics"},
    "dumps": {"heartbeat", "setting_types", *ENGINE, "checkpoint", "group_checks"},
    "exchange": set(),
    "finite_steps": {*CPU},
    "rollback": {*CPU, "checkpoint", "config", "data", "files", "run_folder"},
    "loss_guard": {
        "heartbeat",
        *CPU,
        "checkpoint",
        "config",
        "data",
        "exchange",
        "hosts",
        "metrics",
        "rollback",
        "run_folder",
        "runtime",
        "saving",
        "watch",
    },
    "saving": {*ENGINE, "checkpoint", "metrics", "heartbeat", "hosts"},
    "resuming": {*ENGINE, "checkpoint", "records", "run_folder", "upcycle"},
    "doctor": {"hosts", "backends", "config", *CPU, "runtime", "layers", "optim"},
    "misspelt": {"config"},
    "child_runs": {"config", "hosts", "launch", "run_folder", "torchrun_job"},
    "torchrun_job": {"config", "determinism", "hosts"},
    "failures": {"hosts"},
    "compare": {
        "checks",
        "child_runs",
        "config",
        "failures",
        "files",
        "hosts",
        "machine_checks",
        "metrics",
        "planner",
        "progress",
        "records",
        "report",
        "run_folder",
    },
    "sweep": {
        "checks",
        "child_runs",
        "config",
        "data",
        "failures",
        "files",
        "hosts",
        "machine_checks",
        "metrics",
        "planner",
        "progress",
        "records",
        "run_folder",
        "setting_types",
    },
    "slurm": {"checks", "config", "data", "files", "machine_checks", "run_folder", "setting_types", "watch"},
    "agent": {"hosts", "records", "rounds"},
    "rounds": set(),
    "debug": {"hosts", "heartbeat"},
    "profiling": {"config", "run_folder", "runtime", "setting_types"},
    "launch": {
        "config",
        "misspelt",
        "hosts",
        "presets",
        "checks",
        "machine_checks",
        "planner",
        "preflight",
        "run_folder",
        "data",
        "report",
        "records",
        "torchrun_job",
        "watch",
    },
    # cli, commands, scripts, __main__ and train: see below.
}
NEVER_IMPORTED = {"cli", "scripts", "__main__", "commands", "agent"}
NOT_BY_TRAIN = {
    "hf",
    "inference",
    "report",
    "launch",
    "torchrun_job",
    "child_runs",
    "sweep",
    "slurm",
    "compare",
    "doctor",
    *NEVER_IMPORTED,
}
# Not even inside a function.
NO_TORCH = {
    "config",
    "model_settings",
    "setting_types",
    "run_names",
    "planner",
    "hosts",
    "presets",
    "model_changes",
    "run_folder",
    "files",
    "progress",
    "table_console",
    "misspelt",
    "checks",
    "attention_checks",
    "fp8_checks",
    "training_checks",
    "determinism",
    "divisors",
    "machine_checks",
    "launch",
    "torchrun_job",
    "cli",
    "commands",
    "__main__",
    "records",
    "report",
    "sweep",
    "slurm",
    "watch",
    "heartbeat",
    "compare",
    "child_runs",
    "failures",
}
HEAVY = {"torch", "megatron"}
# Inside layers/: a file imports only files that stand above it in this list.
LAYERS = [
    {"fp8"},
    {"activations", "gemm_packages"},
    {"kernels"},
    {"groups", "recompute", "kv_cache", "phase_marks"},
    {"replay"},
    {"assignment", "losses", "capacity", "grouped_gemm", "collectives", "sharding", "expert_threads"},
    {"router", "attention", "norm", "row_order", "token_loss"},
    {"dispatcher", "expert_loop", "fused_experts"},
    {"experts", "allgather_dispatcher", "deepep_dispatcher", "mesh"},
    {"shared", "moe_layer"},
    {"megatron_parts", "attention_parts"},
    {"spec"},
]
MEGATRON_SIDE = {"spec", "megatron_parts", "attention_parts", "sharding"}
TORCH_IN_DATA = {"dataset", "megatron_dataset", "prefetch", "skipping"}
TORCH_IN_PREFLIGHT = {"device_checks", "link_checks", "preflight_rank"}
OPTIONAL = [
    "transformer_engine",
    "apex",
    "triton",
    "wandb",
    "wandb_workspaces",
    "megablocks",
    "grouped_gemm",
    "flash_attn",
    "deep_ep",
    "bitsandbytes",
]
# Of the extras [data] and [fast], imported by the commands that need them.
DATA_PACKAGES = ["datatrove", "pyarrow", "zstandard", "huggingface_hub", "sentencepiece", "gigatoken", "ray"]


@cache
def imports(path: Path) -> dict[str, bool]:
    """Full names that a file imports, each with whether it does so when it is imported itself."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                # `from moe_exp import gloo` imports the module moe_exp.host.gloo.
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            for name in names:
                found[name] = found.get(name, False) or at_import
            visit(child, at_import and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(path.read_text()), True)
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """`layers` for a file of moe_exp/layers, `model` for moe_exp/engine/model.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def external(path: Path, *, at_import: bool = False) -> set[str]:
    return {name.partition(".")[0] for name, early in imports(path).items() if early or not at_import}


def internal(path: Path) -> set[str]:
    """Units of the package that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("moe_exp.")}


def test_the_reader_sees_imports():
    assert {"planner", "interval"} <= {unit(path) for path in files()}
    assert "spec" in {name.split(".")[2] for name in imports(PACKAGE / "engine/model.py") if name.startswith("moe_exp.layers.")}
    assert imports(PACKAGE / "cli.py")["moe_exp.launch.launch.train"] is False
    assert imports(PACKAGE / "cli.py")["argparse"] is True


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_rule(path):
    name, used = unit(path), internal(path)
    if name not in NEVER_IMPORTED:
        assert not used & NEVER_IMPORTED, f"{path}: nothing imports {NEVER_IMPORTED}"
        if name == "train":
            assert not used & NOT_BY_TRAIN
        else:
            assert used <= ALLOWED.get(name, set()) | {name}
    if name in NO_TORCH:
        assert not external(path) & HEAVY
    if name == "data" and path.stem not in TORCH_IN_DATA:
        assert not external(path) & HEAVY
        assert "megatron_cpu" not in used
    if name == "preflight" and path.stem not in TORCH_IN_PREFLIGHT:
        assert not external(path) & HEAVY
        assert not {f"moe_exp.launch.preflight.{stem}" for stem in TORCH_IN_PREFLIGHT} & {used.rpartition(".")[0] for used in imports(path)}
    if name in ("layers", "metrics", "watch", "faults", "gloo", "megatron_cpu") and path.stem not in MEGATRON_SIDE:
        assert "megatron" not in external(path)
        assert name == "megatron_cpu" or "megatron_cpu" not in used
    if name in ("metrics", "doctor"):
        assert not external(path, at_import=True) & HEAVY
    optional = {"wandb", "tensorboard", *OPTIONAL, *DATA_PACKAGES}
    if path == PACKAGE / "layers" / "kernels" / "launch/launch.py":  # it defines kernels, and does without where Triton is not there
        optional.remove("triton")
    assert not external(path, at_import=True) & optional


@pytest.mark.parametrize("path", sorted((PACKAGE / "layers").rglob("*.py")), ids=lambda path: path.stem)
def test_order_inside_layers(path):
    name = path.relative_to(PACKAGE / "layers").parts[0].removesuffix(".py")
    used = {imported.split(".")[2] for imported in imports(path) if imported.startswith("moe_exp.layers.")}
    if name == "__init__":
        assert not used
        return
    level = next((index for index, names in enumerate(LAYERS) if name in names), None)
    assert level is not None, f"layers/{path.name}: give it a place in LAYERS"
    assert used <= set().union(*LAYERS[:level]) | ({name} if name == "kernels" else set())


def test_megatron_is_prepared_before_it_is_imported():
    for path in files():
        if not external(path) & {"megatron"}:
            continue
        order = list(imports(path))
        first = next(index for index, name in enumerate(order) if name.startswith("megatron."))
        assert "moe_exp.host.megatron_cpu" in order[:first], f"{path}: import moe_exp.host.megatron_cpu before megatron"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_light_modules_do_not_load_torch():
    names = [module_name(path) for path in files() if unit(path) in NO_TORCH | {"metrics", "doctor"} and path.stem != "__main__"]
    assert {"moe_exp.cli", "moe_exp.launch.launch", "moe_exp.planner.costs.params"} <= set(names)
    code = f"import sys, {', '.join(names)}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_every_module_imports_without_the_optional_packages():
    # Backwards (train first), so that few are imported already when their turn comes.
    names = [module_name(path) for path in files() if path.stem != "__main__"][::-1]
    required = {line.partition(">")[0] for line in requirements()}  # triton, from Python 3.12 on
    code = f"""
import importlib, sys
for name in {[name for name in [*OPTIONAL, *DATA_PACKAGES] if name not in required]!r}:
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
print("imported", len({names!r}))
"""
    assert f"imported {len(names)}" in run_python(code)
