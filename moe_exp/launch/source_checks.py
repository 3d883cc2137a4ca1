"""The checkpoint that a start continues from, by files on this machine: whether it fits the settings, where
training starts, and where stages begin. Reads no tensors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from moe_exp.checkpoint.format.folders import REPLACED, usable
from moe_exp.config import Config, ConfigError
from moe_exp.config.checks.data import check_stage_begins, with_stage_begins
from moe_exp.config.learning_rate import BEGIN, Start
from moe_exp.data.own_text.settings import already_prepared
from moe_exp.host.files import is_url
from moe_exp.runs.run_folder import RunFolder, read_rollbacks, run_folder_problems


class _Source(NamedTuple):
    folder: Path | None  # of its iteration; None: training starts at iteration 0
    common: Mapping[str, Any]  # what it has beside tensors

    @property
    def progress(self) -> Mapping[str, Any]:
        return self.common.get("progress") or {}


def source_problems(config: Config) -> list[str]:
    """A line for everything in which `config` does not fit the checkpoint that it would continue from."""
    try:
        if (source := _source(config)) is None:
            return []
        if source.folder is not None and "config" in source.common:
            from moe_exp.checkpoint.format.settings import refuse_other_checkpoint

            refuse_other_checkpoint(config, source.folder, source.common)
        return _data_problems(config, source)
    except ConfigError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]


def stage_lines(config: Config) -> list[str]:
    """A line for each stage in tokens that begins with a later batch; where they fit the checkpoint."""
    with suppress(ValueError):
        if config.data_stages and (source := _source(config)) is not None:
            return _placed(config, source)[1]
    return []


def start_of(config: Config) -> Start:
    """Where training starts, by files on this machine; `source_problems` names what is wrong with them."""
    with suppress(ValueError):
        if (source := _source(config)) is not None and source.progress:
            from moe_exp.checkpoint.format.settings import saved_start

            return saved_start(source.common)
    return BEGIN


def _source(config: Config) -> _Source | None:
    """The checkpoint that a start continues from; None where only the ranks, or another machine, can know.

    Raises:
        ValueError: no checkpoint of the run folder, or of LOAD_DIR, is whole.
    """
    if run_folder_problems(config) or config.remote_dir:
        return None
    own = RunFolder.of(config).checkpoints
    if any(own.glob(f"iter_*{REPLACED}")):
        return None  # of a run that was killed while it saved: the ranks first tidy up
    place = own if usable(own) else Path(config.load_dir).expanduser() if config.load_dir else None
    if place is None:
        return _Source(None, {})
    if (place != own and is_url(config.load_dir)) or importlib.util.find_spec("torch") is None:
        return None
    from moe_exp.checkpoint.format.torch_dist import read_common
    from moe_exp.checkpoint.integrity import find_source_here

    source = find_source_here(place)
    return _Source(source.folder, read_common(source.folder)) if source else _Source(None, {})


def _placed(config: Config, source: _Source) -> tuple[Config, list[str], list[str]]:
    """`config` whose stages in tokens begin with a batch, a line for each that this moves, and problems."""
    if not source.progress:
        staged, lines = with_stage_begins(config)
        return staged, lines, list(check_stage_begins(staged))
    from moe_exp.data.samples.order import place_stages

    rollbacks = read_rollbacks(RunFolder.of(config))
    staged, lines, skipped = place_stages(config, source.progress, rollbacks)
    consumed = source.progress["consumed_samples"]
    return staged, lines, list(check_stage_begins(staged, consumed, skipped))


def _data_problems(config: Config, source: _Source) -> list[str]:
    staged, _, problems = _placed(config, source)
    saved = source.progress.get("sample_order")
    if source.folder is None or problems or not saved or config.allow_other_data:
        return problems
    from moe_exp.data.samples.dataset import merged, stream_number
    from moe_exp.data.samples.order import order_changes, order_of_files

    files = already_prepared(staged)  # else the start compares it after the preparation
    with suppress(ValueError, OSError):  # the checks of files name what is missing
        if files is not None and (order := order_of_files(files)) is not None:
            name = f"the checkpoint at iteration {source.progress['iteration']} of {source.folder.parent}"
            skipped = merged(source.progress.get("skipped_samples") or ())
            next_sample = stream_number(source.progress["consumed_samples"], skipped)
            return [change.problem for change in order_changes(files, order, saved, name, next_sample)]
    return []
