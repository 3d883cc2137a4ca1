"""Whether this machine has room for a run: on disk for its checkpoints, in its GPUs for the model."""

from __future__ import annotations

import shutil

from moe_exp.config import Config
from moe_exp.host.devices import count_gpus, device_name
from moe_exp.host.files import bytes_text
from moe_exp.planner.costs.disk import DiskUse, disk_use, keep_last_that_fits
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.planner.hardware import load_hardware, profile_of
from moe_exp.planner.prediction import predict
from moe_exp.runs.run_folder import RunFolder, existing_place


def memory_warnings(config: Config) -> list[str]:
    """Warns if the planner expects that a rank needs more memory than this host's GPUs have."""
    profile = profile_of(device_name()) if count_gpus() else ""
    if not profile:
        return []
    try:
        expected = predict(Job.of(config), load_hardware(profile))
    except ValueError:  # settings that the planner does not know
        return []
    if not expected.oom:
        return []
    needed, has = (f"{of / 2**30:.1f} GiB" for of in (expected.needed_bytes, expected.memory_bytes))
    rule = f"the planner expects that a rank needs {needed}, and {profile} has {has}"
    fix = "use more GPUs, RECOMPUTE=full, a smaller MBSZ or model, or another layout: moe-exp plan search"
    return [config.problem("gpus_per_node", rule, fix)]


def disk_warnings(config: Config) -> list[str]:
    """Warns if a resumed run has space for its next checkpoint, but not until its end."""
    there, refused, rest = _room(config)
    return rest if there and not refused else []


def disk_problems(c: Config) -> list[str]:
    """Space for all new checkpoints, or for one (DISK_CHECK); for a resumed run only for its next one."""
    there, refused, rest = _room(c)
    return refused if there else refused or rest


def _room(c: Config) -> tuple[list[int], list[str], list[str]]:
    """Existing checkpoints, and problems if the next one, or all of them, do not fit."""
    if c.disk_check == "none" or not (c.save_at_end or c.save_interval):
        return [], [], []
    folder = RunFolder.of(c)
    try:
        place, there = existing_place(folder.path), folder.checkpoint_iterations()
        free_bytes = shutil.disk_usage(place).free
    except OSError:
        return [], [], []
    iteration = max(there, default=0)
    next_save = c.train_iters
    if c.save_interval:
        next_save = min(next_save, (iteration // c.save_interval + 1) * c.save_interval)
    until_end = disk_use(c, iteration=iteration, there=there)
    short = c.model_copy(update={"train_iters": next_save})
    next_bytes = disk_use(short, iteration=iteration, there=there).needed_bytes
    if c.disk_check == "one":
        next_bytes = min(until_end.needed_bytes, checkpoint_bytes(c))
    refused, rest = [], []
    has = f"{place} has {bytes_text(free_bytes)} free and the run needs"
    if free_bytes < next_bytes and (there or c.disk_check == "one"):
        what = " for its next checkpoint, and its records until then" if there else ""
        fix = "make room, or move the run to a larger disk and set RUN_DIR" if there else _LARGER_DISK
        refused.append(c.problem("run_dir", f"{has} {bytes_text(next_bytes)}{what}", fix))
    if free_bytes < until_end.needed_bytes and c.disk_check == "run":
        rest.append(_until_end(c, until_end, has, free_bytes, there))
    return there, refused, rest


_LARGER_DISK = "choose a RUN_DIR on a larger disk, or make room"
_BY_HAND = "; DISK_CHECK=one if you remove checkpoints yourself"


def _until_end(c: Config, use: DiskUse, has: str, free_bytes: int, there: list[int]) -> str:
    rule, fix = f"{has} {bytes_text(use.needed_bytes)}", _LARGER_DISK
    if use.num_new > 1:
        those = f" beside the {len(there)} that are there" if there else ""
        rule += f" until iteration {c.train_iters}: {use.num_new} checkpoints of {bytes_text(use.one_bytes)}"
        rule += f"{those}, and its records"
        if fitting := keep_last_that_fits(c, free_bytes, iteration=max(there, default=0), there=there):
            fix = f"set KEEP_LAST={min(fitting, 3)}, which fits, or {fix}{_BY_HAND}"
        elif free_bytes >= checkpoint_bytes(c):
            fix += _BY_HAND
    return c.problem("run_dir", rule, fix)
