"""The layout of docs/architecture.md, read from the source: who imports whom, and how files lie."""

import ast
import re
import subprocess
import sys
import traceback
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.checkpoint.legs import start_job, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.commands.doctor import requirements
from moe_exp.host import megatron_cpu
from moe_exp.layers.router.router import Router

PACKAGE = ROOT / "moe_exp"

# Places of the package from the bottom to the top, and what each imports of those before it.
LOW = {"host", "config"}
FILES = {*LOW, "planner", "runs"}
ALLOWED: dict[str, set[str]] = {
    "host": set(),
    "config": {"host"},
    "layers": LOW,
    "planner": LOW,
    "runs": LOW,
    "data": LOW,
    "engine": {*LOW, "layers"},
    "checkpoint": {*FILES, "layers", "data", "engine"},
    "watch": FILES,
    "report": FILES,
    "training": {*FILES, "layers", "data", "engine", "checkpoint", "watch"},
    "train": {"host", "training"},
    "launch": {*FILES, "checkpoint", "data", "watch"},
    "inference": {*LOW, "layers", "data", "engine", "checkpoint"},
    "studies": {*FILES, "data", "report", "launch"},
    "commands": FILES
    | {"data", "engine", "checkpoint", "watch", "report", "training", "launch", "inference", "studies"},
    "api": {*FILES, "data", "engine", "training", "launch", "inference", "commands", "report"},
    "cli": {"commands"},
    "scripts": {"commands"},
    "__main__": {"cli"},
}
# the functions of the package and its import hook; the old path of the latter
FACES = {"__init__": {"host", "api"}, "megatron_cpu": {"host"}}
# programs that torchrun or a launcher starts
NEVER_IMPORTED = {"moe_exp.launch.agent", "moe_exp.launch.preflight.rank", "moe_exp.train"}

# Inside layers/: a file or folder imports only what stands above it.
LAYERS = [
    {"activations", "groups"},
    {"kernels", "native"},
    {"router"},
    {"dispatcher", "losses"},
    {"experts"},
    {"microbatch", "statistics"},
    {"moe_layer", "mesh"},
    {"megatron"},
    {"spec"},
]
# they import nothing from each other
APART = ("watch/hangs", "watch/watchdog", "watch/blame.py", "watch/excluded_nodes.py", "watch/storage.py")

HEAVY = {"torch", "megatron"}
# Files or folders that may import torch, or megatron, even inside a function; no others do.
TORCH = (
    "host/gloo.py", "host/megatron_cpu.py", "layers", "data/samples", "engine", "checkpoint", "training",
    "inference", "launch/agent.py", "launch/rendezvous.py", "launch/preflight/checks.py",
    "launch/preflight/rank.py", "watch/hangs/heartbeat.py",
    "commands/doctor.py",
)  # fmt: skip
MEGATRON = (
    "layers/megatron", "layers/spec.py", "data/samples", "engine", "checkpoint", "training",
    "inference",
)  # fmt: skip
OPTIONAL = [
    "transformer_engine", "apex", "triton", "wandb", "wandb_workspaces", "megablocks", "grouped_gemm",
    "flash_attn", "deep_ep", "bitsandbytes",
]  # fmt: skip
# Of the extras [data] and [fast], imported by the commands that need them.
DATA_PACKAGES = ["datatrove", "pyarrow", "zstandard", "huggingface_hub", "sentencepiece", "gigatoken", "ray"]


MOST_FILES = 16  # of Python in one folder
SMALL = 40  # lines under which a module has to have more than one user


@cache
def imports(path: Path, *, for_types: bool = False) -> dict[str, bool]:
    """Full names that a file imports, each with whether it does so when it is imported itself; with those for
    the type checker alone, if wanted.
    """
    found: dict[str, bool] = {}

    def visit(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not for_types:
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
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, at_import and not is_function)

    visit(ast.parse(path.read_text()), True)
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`layers/router/router.py`, as it is written in the lists above."""
    return path.relative_to(PACKAGE).as_posix()


def place(path: Path) -> str:
    """`layers` for a file of moe_exp/layers, `train` for moe_exp/train.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def external(path: Path, *, at_import: bool = False) -> set[str]:
    return {name.partition(".")[0] for name, early in imports(path).items() if early or not at_import}


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in files()}


def internal(path: Path, *, for_types: bool = False) -> set[str]:
    """Modules of the package that a file imports."""
    ours = (name for name in imports(path, for_types=for_types) if name.startswith("moe_exp."))
    named = {name if name in modules() else name.rpartition(".")[0] for name in ours}
    return (named & set(modules())) - {module_name(path)}


def lies_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(name_of(path) == place or name_of(path).startswith(f"{place}/") for place in places)


def test_every_place_imports_what_the_table_says_and_no_more():
    for index, (name, below) in enumerate(ALLOWED.items()):
        assert below <= set(list(ALLOWED)[:index]), f"{name}: what it imports has to stand before it"
    found = defaultdict(set)
    for path in files():
        found[place(path)] |= {place(modules()[name]) for name in internal(path)} - {place(path)}
    assert dict(found) == ALLOWED | FACES


def test_no_module_imports_itself_over_others():
    graph = {name: internal(path, for_types=True) for name, path in modules().items()}
    # raises CycleError with the modules of a cycle
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_import_rule(path):
    assert not internal(path) & NEVER_IMPORTED
    if not lies_in(path, TORCH):
        assert "torch" not in external(path)
    if not lies_in(path, MEGATRON):
        assert "megatron" not in external(path)
    starts_ranks = path.name in ("agent.py", "rendezvous.py") or "preflight" in path.parts
    if place(path) in ("commands", "watch", "launch") and not starts_ranks:
        assert not external(path, at_import=True) & HEAVY
    optional = {"wandb", "tensorboard", *OPTIONAL, *DATA_PACKAGES}
    # it defines kernels, and does without where Triton is not there
    if path == PACKAGE / "layers" / "kernels" / "launch.py":
        optional.remove("triton")
    assert not external(path, at_import=True) & optional


@pytest.mark.parametrize("path", sorted((PACKAGE / "layers").rglob("*.py")), ids=name_of)
def test_order_inside_layers(path):
    name = path.relative_to(PACKAGE / "layers").parts[0].removesuffix(".py")
    used = {imported.split(".")[2] for imported in imports(path) if imported.startswith("moe_exp.layers.")}
    if name == "__init__":
        assert not used
        return
    level = next((index for index, names in enumerate(LAYERS) if name in names), None)
    assert level is not None, f"layers/{path.name}: give it a place in LAYERS"
    assert used <= set().union(*LAYERS[:level]) | {name}


def test_subjects_of_watch_import_nothing_from_each_other():
    for subject in APART:
        others = tuple(other for other in APART if other != subject)
        for path in (path for path in files() if lies_in(path, (subject,))):
            assert not [name for name in internal(path) if lies_in(modules()[name], others)], path


def test_folders_can_be_seen_at_a_glance():
    top_files = {"__init__.py", "__main__.py", "api.py", "cli.py", "train.py", "megatron_cpu.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == top_files
    for top in ("moe_exp", "tests", "bench"):
        counts = Counter(path.parent for path in (ROOT / top).rglob("*.py"))
        assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_files_do_not_repeat_their_folder():
    """`watch/watchdog/rules.py`, not `watchdog_rules.py`; a folder's main file may have its name."""
    repeated = {
        name_of(path)
        for path in files()
        if path.stem != (folder := path.parent.name) and folder.removesuffix("s") in path.stem.split("_")
    }
    # what people call the thing
    assert repeated == {"layers/moe_layer.py", "report/wandb_report.py", "runs/run_folder.py"}


def test_small_modules_have_more_than_one_user():
    users = Counter(name for path in files() for name in internal(path))
    entries = ("__init__.py", "__main__.py", "megatron_cpu.py", "train.py")
    for path in files():
        is_entry = path.name in entries or place(path) in ("scripts", "commands")
        if not is_entry and len(path.read_text().splitlines()) < SMALL:
            assert users[module_name(path)] > 1, f"{path}: it could stand where it is used"


def test_torch_has_what_is_called_of_it():
    """Also on lines that only run on a GPU."""
    nodes = (node for path in files() for node in ast.walk(ast.parse(path.read_text())))
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    called = sorted(name for name in attributes if re.fullmatch(r"torch\.[\w.]+", name))
    assert len(called) > 100
    code = f"""
import functools, torch, torch.distributed.checkpoint, torch.multiprocessing, torch.utils.checkpoint
for name in {called}:
    try:
        functools.reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        print(name)
"""
    assert run_python(code) == ""


def test_packages_hand_names_on_and_do_nothing_else():
    for path in PACKAGE.rglob("*/__init__.py"):
        docstring, *rest = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), f"{path}: say what the folder is for"
        assert all(
            isinstance(node, ast.ImportFrom) or ast.unparse(node).startswith("__all__ = ") for node in rest
        ), path


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_light_modules_do_not_load_torch():
    heavy = tuple(name for name in TORCH if not name.startswith(("commands/", "watch/")))
    names = [
        module_name(path)
        for path in files()
        if not lies_in(path, (*heavy, "scripts", "megatron_cpu.py")) and path.stem != "__main__"
    ]
    assert {"moe_exp.cli", "moe_exp.launch.launch", "moe_exp.planner.costs.params"} <= set(names)
    code = f"import sys, {', '.join(names)}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_every_module_imports_without_the_optional_packages():
    # Backwards, so that few are imported already when their turn comes. Before all, the layer spec: it has to
    # bring what Megatron needs on a CPU.
    names = [module_name(path) for path in files() if path.stem != "__main__"][::-1]
    required = {line.partition(">")[0] for line in requirements()}  # triton, from Python 3.12 on
    code = f"""
import importlib, sys
for name in {[name for name in [*OPTIONAL, *DATA_PACKAGES] if name not in required]!r}:
    sys.modules[name] = None
from moe_exp.layers.spec import decoder_spec
import megatron.core.utils
for name in {names!r}:
    importlib.import_module(name)
print(type(megatron.core.utils.__loader__).__name__, "imported", len({names!r}))
"""
    loader = "_Loader" if megatron_cpu.INSTALLED else "SourceFileLoader"
    assert f"{loader} imported {len(names)}" in run_python(code)


def way_of_a_setting() -> dict[str, str]:
    """File to the name that carries NUM_EXPERTS there, in the table of docs/architecture.md."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("The way of NUM_EXPERTS")[2]
    rows = re.findall(r"^\| `([\w./]+)` \| `(\w+)` \|", table.partition("**A batch.**")[0], re.MULTILINE)
    return dict(rows)


def test_the_way_of_a_setting_passes_ten_files():
    way = way_of_a_setting()
    assert len(way) == 10
    for file, name in way.items():
        assert re.search(rf"\b{name}\b", (ROOT / "moe_exp" / file).read_text()), (file, name)


def files_of_stack(settings: dict[str, object], port: int) -> list[str]:
    """Files of the package that are called when a rank builds its first router."""
    found = []

    def record(*args, **kwargs):
        found.append([frame.filename for frame in traceback.extract_stack()])
        return build(*args, **kwargs)

    build, Router.__init__ = Router.__init__, record
    start_job(settings, port)
    return found[0]


def test_a_rank_calls_no_other_file_on_that_way(tmp_path):
    settings = {"train_data": str(write_data(tmp_path)), "run_dir": str(tmp_path), "gpus_per_node": 1}
    (files,) = run_on_ranks(1, files_of_stack, settings, free_port(), join=False)
    package = f"{ROOT / 'moe_exp'}/"
    called = {file.removeprefix(package) for file in files if file.startswith(package)}
    assert called == {"engine/model.py", "layers/megatron/moe_parts.py"} <= set(way_of_a_setting())
