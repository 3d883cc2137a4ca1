"""The run folder `$RUN_DIR/$RUN_NAME`: layout, opening and locking, and checks before a start.

    config.yaml        settings of the latest start
    provenance.json    {"starts": [...]}: versions, commit, host, time and command line of each start
    train.log          output of rank 0, and warnings of every rank
    metrics.jsonl      one record per line, see runs/records.py
    checkpoints/       iter_0001000, ...
    dumps/             iter_0000010/rank_00000.safetensors, ... if DUMP_ITERS is set
    skipped_samples.json    samples skipped by rollbacks, see training/loss_guard.py
    bad_steps/         checkpoints saved after MAX_BAD_STEPS bad steps; no run resumes from them
    set_aside/         checkpoints newer than the checkpoint that a rollback returned to
    tensorboard/ wandb/
    profile/           traces of PROFILE_ITERS, snapshots of MEMORY_SNAPSHOT
    summary.json       result of the latest start
    ranks.json         phase times of every rank, from the last minute (watch/slow_ranks.py)
    slurm/             sbatch files and logs of `moe-exp slurm`; `submitted` lists the ids of all jobs
    .rendezvous_key    with several nodes: prefix of the keys in torch's stores; only the owner can read it
    EXIT               created by the user to make the run save and end

The environment is never recorded, so that no credentials end up in a shared folder.
"""

import importlib.metadata
import logging
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from moe_exp.config import TRAITS, Config, ConfigError, problem, to_yaml
from moe_exp.config.loading import recorded_settings
from moe_exp.config.model_changes import OTHER_OPTIMIZER_FLAG, model_changes, optimizer_change
from moe_exp.config.setting_types import Part, as_given, shown
from moe_exp.host.devices import device_name
from moe_exp.host.files import read_json, write_atomically, write_json
from moe_exp.runs.records import append_event

logger = logging.getLogger(__name__)

_exists = os.path.exists  # unlike Path.exists, False if a parent folder is not accessible

_LONGEST_PATH = 3500  # bytes; leaves room in Linux' limit of 4096 for files in the folder

# File in a checkpoints folder with the iteration of the newest complete checkpoint; Megatron's name.
LATEST = "latest_checkpointed_iteration.txt"

# packages that affect a run's numbers or speed
_PACKAGES = (
    "moe_exp", "torch", "megatron-core", "numpy", "triton", "transformer-engine", "flash-attn", "apex",
    "megablocks", "datatrove", "tokenizers", "safetensors", "tensorboard", "wandb",
)  # fmt: skip


class RunFolder:
    """Paths in a run folder, listed at the top of this file. Does not access the disk."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.provenance = path / "provenance.json"
        self.log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.skipped_samples = path / "skipped_samples.json"
        self.bad_steps = path / "bad_steps"
        self.set_aside = path / "set_aside"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.lock = path / ".lock"
        self.rendezvous_key = path / ".rendezvous_key"
        self.profile = path / "profile"
        self.submitted = path / "slurm" / "submitted"
        self.exit_file = path / "EXIT"
        self.summary = path / "summary.json"
        self.ranks = path / "ranks.json"

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """Run folder of `config`; the folder need not exist."""
        return cls(Path(config.run_dir).expanduser() / config.name)


def iterations(checkpoints: Path) -> list[int]:
    """Iterations of all iter_ folders in ascending order, including folders with damaged checkpoints."""
    if not checkpoints.is_dir():
        return []
    found = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def read_rollbacks(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns a run's rollbacks, oldest first; raises ConfigError if skipped_samples.json is damaged."""
    path = folder.skipped_samples
    try:
        return list(read_json(path)["rollbacks"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "restore the file, or remove it to also train on the samples that rollbacks skipped"
        raise ConfigError([f"{path}: cannot be read ({' '.join(str(error).split())}). Fix: {fix}."]) from None


def open_run_folder(
    config: Config, argv: Sequence[str] | None = None, *, resumed_from: int | None = None
) -> RunFolder:
    """Creates or reopens the run folder (rank 0 only). Raises ConfigError if the folder cannot be written.

    Args:
        config: settings of this start, written to config.yaml; provenance.json records the changes since
            the previous start.
        argv: command line to record (default: sys.argv).
        resumed_from: iteration of this run's checkpoint that training resumes from, or None. At a
            resume, changed settings that affect training are logged and recorded as an event.
    """
    folder = RunFolder.of(config)
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        starts = []
        try:
            if folder.provenance.exists():
                starts = list(read_json(folder.provenance)["starts"])
        except (ValueError, KeyError, TypeError):
            broken = folder.provenance.replace(folder.provenance.with_suffix(".json.broken")).name
            line = "cannot read %s: renamed it to %s and created a new record of starts"
            logger.warning(line, folder.provenance, broken)
        _, changed = _changed_settings(folder, config)
        if resumed_from is not None and (matter := changes_of_resume(config)):
            logger.info("%s", changes_text(matter))
            # before config.yaml changes, so that the change is not lost if this start dies
            append_event(folder.metrics, "changed_settings", resumed_from, changes=matter)
        write_atomically(folder.config, to_yaml(config))
        starts.append(provenance(sys.argv if argv is None else argv) | {"changed_settings": changed})
        write_json(folder.provenance, {"starts": starts})
    except OSError as error:
        rule = f"cannot write to {folder.path} ({error.strerror or error})"
        raise ConfigError([problem("run_dir", config.run_dir, rule, "choose a writable RUN_DIR")]) from None
    return folder


def hold_run_folder(config: Config) -> None:
    """Locks the run folder until the process ends (rank 0 only). ConfigError if another run has locked it."""
    # two runs in one folder would delete each other's records and checkpoints
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout:
        raise ConfigError(_held_problem(config)) from None
    _HELD.append(lock)


_HELD: list[BaseFileLock] = []  # an unreferenced lock would be released
_LOCK_SECONDS = 1.0  # `lock_problems` in another process may hold the lock for a moment


def release_run_folders() -> int:
    """Releases all locks of `hold_run_folder` without ending the process; returns their number."""
    num_held = len(_HELD)
    while _HELD:
        _HELD.pop().release()
    return num_held


def _held_problem(config: Config) -> list[str]:
    rule = f"another run is writing to {RunFolder.of(config).path}"
    fix = "wait for the other run to end, or choose another RUN_NAME"
    return [problem("run_name", config.name, rule, fix)]


def lock_problems(config: Config) -> list[str]:
    """Returns an error if another run has locked the run folder. Only the first node checks this."""
    # the nodes of a run would take each other for another run
    lock = RunFolder.of(config).lock
    if config.node_rank or not lock.exists() or not os.access(lock, os.W_OK):
        return []
    try:
        with FileLock(lock, timeout=_LOCK_SECONDS):
            return []
    except Timeout:
        return _held_problem(config)


def _changed_settings(folder: RunFolder, config: Config) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Settings of the previous start, and {name: [before, now]} of the changed settings."""
    before: dict[str, Any] = {}
    with suppress(ValueError):  # config.yaml is missing or unreadable
        before = recorded_settings(folder.config)
    now = config.model_dump()
    changed = {name: [before[name], now[name]] for name in now if before.get(name, now[name]) != now[name]}
    return before, changed


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Metadata of a start: time (ISO 8601 with offset), command line, host, device, versions and commit."""
    started = datetime.now().astimezone()  # before git, which may take seconds on a slow disk
    package, commit, changes = Path(__file__).parent, None, None
    # If the package is installed inside another repository, git would return that one's commit.
    if _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is not None:
        commit = _git(package, "rev-parse", "HEAD")
        changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return {
        "time": started.isoformat(timespec="seconds"),
        "command": list(argv),
        "host": socket.gethostname(),
        "device": device_name(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()} | package_versions(),
        "commit": f"{commit}+changes" if commit and changes else commit,
    }


@cache
def package_versions() -> dict[str, str]:
    """Versions of installed packages that can change a run's numbers or speed; read once per process."""
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git(folder: Path, *arguments: str) -> str | None:
    # inside a git hook, GIT_DIR etc. point to the hook's repository
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    with suppress(OSError, subprocess.SubprocessError):  # git is missing, slow or outside a repository
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environ, check=True)
        return done.stdout.strip()
    return None


# Parts of the settings whose changes are reported at a resume, the most important first.
_REPORTED_PARTS: tuple[Part, ...] = ("learning", "data", "model", "experts", "layout")
# Settings of these parts that have no effect on a resumed run, or only through other settings.
_UNREPORTED = (
    "preset", "allow_other_data", "data_dir", "upcycle_from", "upcycle_granularity", "init_std",
    "init_distribution",
)  # fmt: skip


def changes_of_resume(config: Config) -> list[str]:
    """Changed settings that affect training, such as `LR 0.001 -> 0.003`; [] if there is no checkpoint."""
    folder = RunFolder.of(config)
    if not _exists(folder.checkpoints / LATEST):
        return []  # nothing to resume from
    before, changed = _changed_settings(folder, config)
    decay_before = before.get("decay_iters") or before.get("train_iters")  # 0 stands for TRAIN_ITERS
    changed["decay_iters"] = [decay_before, config.decay_end]
    if decay_before in (None, config.decay_end):
        del changed["decay_iters"]
    return [
        f"{name.upper()} {' -> '.join(shown(as_given(value) or 'empty') for value in changed[name])}"
        for part in _REPORTED_PARTS
        for name, traits in TRAITS.items()
        if traits.part == part and traits.compared and name in changed and name not in _UNREPORTED
    ]


def changes_text(changes: Sequence[str]) -> str:
    """Log line for `changes_of_resume`."""
    return f"resumed with changed settings: {', '.join(changes)}"


def run_folder_problems(config: Config) -> list[str]:
    """Reasons why `config` cannot use its run folder, one line each. Creates nothing."""
    folder, parts = RunFolder.of(config), Path(config.name).parts
    length = len(os.fsencode(folder.path.absolute()))
    rule, fix = "", "use a plain name, and set RUN_DIR to the parent folder"
    if ".." in parts or Path(config.name).is_absolute():
        rule = "must stay inside RUN_DIR"
    elif any(len(os.fsencode(part)) > 255 for part in parts):
        rule, fix = "must have at most 255 bytes", "choose a shorter RUN_NAME"
    elif length > _LONGEST_PATH:
        rule = f"the path of the run folder has {length} bytes, more than {_LONGEST_PATH}"
        fix = "choose a shorter RUN_NAME or RUN_DIR"
    if rule:
        return [problem("run_name", config.name, rule, fix)]
    place = existing_place(folder.path)
    if not place.is_dir():
        rule, fix = f"{place} is a file, not a folder", "choose another RUN_DIR or RUN_NAME"
        return [problem("run_dir", config.run_dir, rule, fix)]
    # Paths of the wrong type: a pipe would block forever, and a folder EXIT would end every start.
    folders = (
        folder.checkpoints, folder.tensorboard, folder.wandb, folder.profile, folder.bad_steps,
        folder.set_aside,
    )  # fmt: skip
    files = {*vars(folder).values(), folder.checkpoints / LATEST} - {folder.path, *folders}
    wrong = [(path, "file") for path in sorted(files) if _exists(path) and not path.is_file()]
    wrong += [(path, "folder") for path in folders if _exists(path) and not path.is_dir()]
    if wrong:
        fix = "move it away, or choose another RUN_NAME"
        return [problem("run_name", config.name, f"{path} is not a {kind}", fix) for path, kind in wrong]
    used = (
        place, folder.checkpoints, folder.tensorboard, folder.config, folder.provenance, folder.log,
        folder.metrics,
    )  # fmt: skip
    fix = "choose a writable RUN_DIR, or change its permissions"
    found = [
        problem("run_dir", config.run_dir, f"{path} is not writable", fix)
        for path in used
        if _exists(path) and not os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK)
    ]
    return found + _model_problems(config, folder)


def existing_place(path: Path) -> Path:
    """`path` if it exists, else its nearest existing parent."""
    while not _exists(path) and path != path.parent:
        path = path.parent
    return path


def _model_problems(config: Config, folder: RunFolder) -> list[str]:
    """Compares `config` with the latest start's settings. Loading a checkpoint also compares its settings."""
    if not _exists(folder.config):
        return []
    try:
        saved = recorded_settings(folder.config)
        shapes, functions = model_changes(config, saved, str(folder.config))
        other_optimizer = optimizer_change(config, saved, str(folder.config))
    except ValueError as error:
        fix = "choose another RUN_NAME, or repair the file"
        return [problem("run_name", config.name, f"{folder.config} cannot be read ({error})", fix)]
    is_trained = (folder.checkpoints / LATEST).exists()
    changes = shapes + (functions if is_trained and not config.allow_other_model else [])
    found = []
    if other_optimizer and is_trained and not config.allow_other_optimizer:
        found.append(other_optimizer.problem(str(folder.path), OTHER_OPTIMIZER_FLAG))
    for change in changes:
        rule = f"{folder.path} contains a model with {change.name.upper()}={change.before}"
        fix = f"choose another RUN_NAME to start a new run, or {change.way_back} to continue the existing run"
        found.append(problem(change.name, change.value, rule, fix))
    return found
