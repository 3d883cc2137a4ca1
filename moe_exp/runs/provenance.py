"""Provenance of a run: package versions, commit, host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from moe_exp.host.devices import device_name

# Packages that affect a run's numbers or speed.
_PACKAGES = (
    "moe_exp", "torch", "megatron-core", "numpy", "triton", "transformer-engine", "flash-attn", "apex",
    "megablocks", "datatrove", "tokenizers", "safetensors", "tensorboard", "wandb",
)  # fmt: skip


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Time (ISO 8601 with offset), command line, host, device, package versions and commit of one start."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(argv),
        "host": socket.gethostname(),
        "device": device_name(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()} | package_versions(),
        "commit": _commit(),
    }


@cache
def package_versions() -> dict[str, str]:
    """Versions of installed packages that can change a run's numbers or speed; read once per process."""
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _commit() -> str | None:
    """Commit of the checkout of this package, with "+changes" for edited files; None outside a checkout."""
    package = Path(__file__).parent
    # If installed inside another repository, git would return that one's commit.
    if _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{commit}+changes" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    # Inside a git hook, GIT_DIR etc. point to the hook's repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
