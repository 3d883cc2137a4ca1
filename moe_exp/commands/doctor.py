"""`moe-exp doctor`: versions, devices, missing packages, and the backend of each model component.

Importing this file requires only the standard library, so that the report works in an empty
environment; scripts/environment.sh runs `python -m moe_exp.commands.doctor --missing train`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moe_exp.commands.parsers import command, flag, takes
from moe_exp.host.devices import count_gpus, num_cores

SETUP_PY = Path(__file__).resolve().parents[2] / "setup.py"
TRAIN = ("train",)  # the extra that training needs


def install_command(extras: str = "train") -> str:
    """Returns the command that installs this package with `extras`, from a checkout or a package index."""
    if SETUP_PY.is_file():
        return f'pip install -c constraints.txt -e ".[{extras}]" in the checkout of moe_exp'
    return f'pip install "moe-exp[{extras}]"'


# package, consequence of its absence, how to install it
OPTIONAL = (
    ("transformer-engine", "no IMPL=te; this package's norm and attention run instead",
     'pip install "transformer-engine[pytorch]" (GPU)'),
    ("apex", "no fused Adam and no fused gradient accumulation, unless Transformer Engine provides them",
     "from source: NVIDIA/apex (GPU)"),
    ("triton", "on GPUs, no EXPERT_BACKEND=triton and no fusion by torch.compile",
     "pip install triton (GPU)"),
    ("flash-attn", "attention uses torch's scaled_dot_product_attention",
     "pip install flash-attn --no-build-isolation (GPU)"),
    ("megablocks", "no EXPERT_BACKEND=megablocks",
     "pip install --no-build-isolation megablocks[gg] (GPU)"),
    ("grouped_gemm", "on GPUs older than Hopper, a loop over experts replaces grouped GEMMs",
     "pip install --no-build-isolation nv-grouped-gemm (GPU)"),
    ("deep_ep", "no DISPATCHER=deepep; auto uses all-to-all", "from source: deepseek-ai/DeepEP (GPU)"),
    ("bitsandbytes", "no OPTIMIZER=adam8bit", "pip install bitsandbytes (GPU from 0.45, CPU from 0.50)"),
    ("py-spy", "stacks of hanging ranks lack C frames, and stopped ranks have no stack",
     "pip install py-spy"),
    ("wandb", "no metrics in wandb, only in metrics.jsonl and TensorBoard",
     "pip install wandb"),
)  # fmt: skip

_OTHER_NAMES = {"grouped_gemm": "nv-grouped-gemm", "triton": "pytorch-triton"}


def installed_version(package: str) -> str | None:
    """Installed version of the distribution `package`; None if it is not installed."""
    for name in (package, _OTHER_NAMES.get(package)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name) if name else None
    return None


def requirements(extras: Sequence[str] = TRAIN) -> list[str]:
    """Returns the requirements of moe-exp and `extras`. In a checkout, reads them from setup.py; otherwise,
    from the installed package. Raises ValueError for an unknown extra.
    """
    if SETUP_PY.is_file():
        literals = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(SETUP_PY.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        required, known = literals["REQUIRES"], literals["EXTRAS"]
    else:
        lines = importlib.metadata.requires("moe-exp") or []
        extras_there = importlib.metadata.metadata("moe-exp").get_all("Provides-Extra") or []
        known = {name: [line for line in lines if f'extra == "{name}"' in line] for name in extras_there}
        required = [line for line in lines if "extra ==" not in line]
    for name in extras:
        if name not in known:
            raise ValueError(f"extra {name!r} does not exist: use one of {', '.join(known)}")
    found = []
    for line in required + [line for name in extras for line in known[name]]:
        if own := re.match(r"moe-exp\[([\w,]+)\]", line):  # other extras of ours
            found += requirements(own[1].split(","))
            continue
        # our markers only concern Python's version
        markers = re.findall(r"python_version *(<|>=) *[\"'](\d+)\.(\d+)", line)
        if all((sys.version_info >= (int(a), int(b))) == (sign == ">=") for sign, a, b in markers):
            found.append(line.partition(";")[0].strip())
    return list(dict.fromkeys(found))


def unmet_requirements(extras: Sequence[str] = TRAIN) -> list[str]:
    """Returns the requirements of moe-exp and `extras` that are missing, broken, or of the wrong version."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # itself a requirement; versions cannot be compared without it
        return [line for line in requirements(extras) if installed_version(_distribution(line)) is None]

    def is_met(requirement: Requirement) -> bool:
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            return False
        # metadata alone may be left over from a broken installation
        files: list[importlib.metadata.PackagePath] = []
        with suppress(importlib.metadata.PackageNotFoundError):  # a distribution of another name provides it
            files = importlib.metadata.files(requirement.name) or []
        modules = [file for file in files if file.suffix in (".py", ".so")]
        return not modules or any(Path(file.locate()).exists() for file in modules)

    return [line for line in requirements(extras) if not is_met(Requirement(line))]


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0].strip()


def main() -> int:
    """Prints the report; returns 0 if a run on this machine's CPU is possible, else 1."""
    unmet = unmet_requirements()
    # the tables require rich, the devices torch
    if not any(_distribution(line) in ("rich", "torch") for line in unmet):
        from moe_exp.host.progress import print_table

        own = installed_version("moe-exp") or f"checkout {SETUP_PY.parent}"
        rows = [["python", f"{platform.python_version()} ({sys.executable})"], ["moe-exp", own]]
        names = map(_distribution, requirements())
        rows += [[name, installed_version(name) or "missing"] for name in names]
        print_table("Versions", ["package", "version"], rows)
        print_table("Devices", ["device", "what"], device_rows())
        print_table("Optional packages", ["package", "version", "without it", "install"], optional_rows())
        if not unmet:
            print_table("What each part will use", ["part", "backend", "why"], backend_rows())
    return _refused(unmet)


def _refused(unmet: Sequence[str]) -> int:
    """Prints the packages in `unmet`; returns 0 if `unmet` is empty, else 1."""
    if not unmet:
        return 0
    text = f"Required and missing in {sys.executable}: {', '.join(unmet)}\nFix: {install_command()}"
    if SETUP_PY.is_file():
        text += "; the checkout's scripts do this automatically in .venv"
    print(text)
    if not unmet_requirements(()):
        others = "Planning, reports and `moe-exp slurm` with CONTAINER"
        print(f"Training requires these packages. {others} work without them.")
    return 1


def check_kernels() -> int:
    """Compares every Triton kernel with plain PyTorch, on the GPU or in Triton's interpreter, and prints the
    results. Returns 1 if a kernel fails, else 0.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moe_exp.engine.backends import doctor_checks, why_unchecked

        if reason := why_unchecked(device):
            print(f"No kernels checked: {reason}.")
            return 0
        row = "{:26}{:7}{:>7}{:>10}{:>9}  {:7} {}".format
        print(row("kernel", "dtype", "configs", "seconds", "error", "result", "shape"), flush=True)
        start, problems = time.monotonic(), []
        try:
            for check in doctor_checks(device):
                now, result = time.monotonic(), "failed" if check.problem else "ok"
                head = (check.kernel, check.dtype, check.num_configs, f"{now - start:.1f}")
                print(row(*head, f"{check.error:.1e}", result, check.shape), flush=True)
                problems += [check.line(device)] if check.problem else []
                start = now
        except RuntimeError as error:  # of the device, which is unusable afterwards
            print(error)
            return 1
    if on_cpu:
        print(
            "\nNo GPU: kernels were interpreted on the CPU, with their first config and small widths."
            " Not checked: compilation for a GPU, tensor descriptors, other configs."
        )
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


def check_documents() -> int:
    """Runs each kind of attention (DOCUMENT_MASK=true) on packed and on separate documents, and prints a
    table that compares the results. Returns 1 if a token attends beyond its document or window, else 0.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moe_exp.engine.document_leaks import HEADER, find_leaks
        from moe_exp.host.progress import print_table

        leaks = list(find_leaks())
    title = "Packed documents compared with separate documents (DOCUMENT_MASK=true)"
    print_table(title, HEADER, [leak.row for leak in leaks])
    loose = [leak for leak in leaks if not leak.is_tight]
    for leak in loose:
        rule = "tokens attend beyond their document or window"
        print(f"attention={leak.kernel}: {rule} (model {leak.heads}, {leak.dtype}).")
    return int(bool(loose))


@command("doctor", "show versions, devices and missing packages")
@takes(
    flag(
        "--kernels",
        "check every Triton kernel against plain PyTorch instead of showing versions (exit code 1 if one "
        "fails)",
    ),
    flag(
        "--leak-test",
        "check that DOCUMENT_MASK prevents attention between packed documents (exit code 1 if it does not)",
    ),
)
def run_doctor(arguments: argparse.Namespace) -> int:
    if not (arguments.kernels or arguments.leak_test):
        return main()
    if refused := _refused(unmet_requirements()):
        return refused
    code = check_kernels() if arguments.kernels else 0
    return max(code, check_documents() if arguments.leak_test else 0)


def device_rows() -> list[list[str]]:
    """Returns table rows for GPUs (memory, compute capability), CPU cores and host memory."""
    import torch

    rows = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        what = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        rows.append([f"cuda:{index}", what])
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    gpus = count_gpus()
    end = f"runs are refused, as this host has {gpus} GPUs" if gpus else "runs use the CPU and gloo"
    rows = rows or [["GPU", f"none that PyTorch can use ({build}): {end}"]]
    page_bytes, num_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    rows.append(["CPU", f"{num_cores()} cores for this process, of {os.cpu_count()}"])
    return [*rows, ["memory", f"{page_bytes * num_pages / 2**30:.1f} GiB"]]


def optional_rows() -> list[list[str]]:
    """Returns a row per optional package: its version or, if missing, what is lost and how to install it."""
    return [
        [package, version, "", ""] if (version := installed_version(package)) else [package, "missing", *rest]
        for package, *rest in OPTIONAL
    ]


def backend_rows() -> list[list[str]]:
    """Returns a table row per model component: its backend on this machine, and the reason for the choice."""
    import torch

    with warnings.catch_warnings():  # Megatron's import warnings repeat the table above.
        warnings.simplefilter("ignore")
        from moe_exp.config import load_config
        from moe_exp.engine.backends import backends_of

    on_gpu = torch.cuda.is_available()
    config = load_config({"preset": "cpu", "dtype": "bf16" if on_gpu else "fp32"}, {})
    chosen = backends_of(config, "cuda" if on_gpu else "cpu")
    return [[part, backend, reason] for part, (backend, reason) in chosen.items()]


if __name__ == "__main__":
    if sys.argv[1:2] != ["--missing"]:
        sys.exit(main())
    # --missing [EXTRA ...]: the unmet requirements, one a line, for scripts
    missing = unmet_requirements(sys.argv[2:])
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing))
