"""Checks the checkpoint that a start continues from, by files on this machine: its model and its samples,
and whether a stage begins within a batch. Reads no tensors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError
from moe_exp.config.checks.data import check_stage_begins, with_stage_begins
from moe_exp.data.own_text.settings import already_prepared
from moe_exp.host.files import is_url
from moe_exp.runs.run_folder import RunFolder, run_folder_problems


def source_problems(config: Config) -> list[str]:
    """A line for everything in which `config` does not fit the checkpoint that it would continue from."""
    return _source_checks(config)[0]


def stage_lines(config: Config) -> list[str]:
    """A line for each stage in tokens that begins with a later batch."""
    return _source_checks(config)[1]


def _source_checks(config: Config) -> tuple[list[str], list[str]]:
    if importlib.util.find_spec("torch") is None:
        return [], []  # a login node that submits jobs in a container
    if run_folder_problems(config) or config.remote_dir or is_url(config.load_dir):
        return [], []  # of a checkpoint at a store, only the ranks know the progress
    try:
        folder, common = _source(config)
        if folder is not None and "config" in common:
            from moe_exp.checkpoint.format.settings import refuse_other_checkpoint

            refuse_other_checkpoint(config, folder, common)
    except ConfigError as error:
        return error.problems, []
    except ValueError as error:
        return [str(error)], []
    if RunFolder.of(config).skipped_samples.exists():
        return [], []  # only the ranks know what rollbacks skip
    return _data_checks(config, common.get("progress") or {}, folder)


def _source(config: Config) -> tuple[Path | None, Mapping[str, Any]]:
    """The iteration's folder and its values beside tensors; None for a start at iteration 0, or from a store.

    Raises:
        ValueError: no checkpoint of the run folder, or of LOAD_DIR, is whole.
    """
    own, given = RunFolder.of(config).checkpoints, Path(config.load_dir).expanduser()
    if own.exists():
        from moe_exp.checkpoint.format.folders import REPLACED, usable

        if any(own.glob(f"iter_*{REPLACED}")):
            return None, {}  # of a run that was killed while it saved: the ranks first tidy up
        if usable(own):
            return _newest(own)
    if not config.load_dir or is_url(config.load_dir):
        return None, {}
    return _newest(given)


def _newest(place: Path) -> tuple[Path | None, Mapping[str, Any]]:
    from moe_exp.checkpoint.format.torch_dist import read_common
    from moe_exp.checkpoint.integrity import find_source_here

    source = find_source_here(place)
    return (source.folder, read_common(source.folder)) if source else (None, {})


def _data_checks(
    config: Config, progress: Mapping[str, Any], folder: Path | None
) -> tuple[list[str], list[str]]:
    """Problems of the data, and lines about stages, from a checkpoint's `Progress`."""
    consumed, saved = progress.get("consumed_samples") or 0, progress.get("sample_order") or {}
    skipped: Sequence[tuple[int, int]] = [(a, b) for a, b in progress.get("skipped_samples") or ()]
    next_sample = 0
    if consumed:
        from moe_exp.data.samples.skipping import merged, stream_number

        skipped = merged(skipped)
        next_sample = stream_number(consumed, skipped)
    begun = [stage for stage in saved.get("stages", ()) if stage["first_sample"] <= next_sample]
    staged, lines = with_stage_begins(config, consumed, skipped, begun)
    problems = list(check_stage_begins(staged, consumed, skipped))
    if folder is None or not (consumed and saved) or problems or config.allow_other_data:
        return problems, lines
    from moe_exp.data.samples.order import order_changes, order_of_files

    files = already_prepared(staged)  # else the start compares it after the preparation
    with suppress(ValueError, OSError):  # the checks of files name what is missing
        if files is not None and (order := order_of_files(files)) is not None:
            name = f"the checkpoint at iteration {progress['iteration']} of {folder.parent}"
            changes = order_changes(files, order, saved, name, next_sample)
            problems = [change.problem for change in changes]
    return problems, lines
