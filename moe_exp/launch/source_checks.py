"""Checks a run's sources on this machine: whether the checkpoint to load fits, where training and data stages
begin, how often each token file is read, and which data is used for validation. No torch.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moe_exp.checkpoint.format.folders import REPLACED, usable
from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.learning_rate import BEGIN, Start
from moe_exp.config.setting_types import names_text
from moe_exp.data.own_text import already_prepared, needs_preparation, validation_overlaps, validation_setting
from moe_exp.data.tokens.manifests import tokenizer_problems
from moe_exp.data.tokens.tokens import Share, TokenFiles, parse_blend, parse_split, part_tokens, share_range
from moe_exp.host.files import is_url, read_json
from moe_exp.runs.run_folder import RunFolder, read_rollbacks, run_folder_problems


class _Source(NamedTuple):
    folder: Path | None  # folder of its iteration; None: training starts at iteration 0
    common: Mapping[str, Any]  # its contents other than tensors
    progress: Mapping[str, Any]  # its training progress; empty: training starts at iteration 0


def source_problems(config: Config) -> list[str]:
    """One line per mismatch between `config` and the checkpoint that training would load now."""
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
    """One line per data stage whose start (given in tokens) is moved to a later batch boundary."""
    with suppress(ValueError):
        if config.data_stages and (source := _source(config)) is not None:
            return _placed(config, source)[1]
    return []


def start_of(config: Config) -> Start:
    """Where training would start, according to files on this machine; `source_problems` reports bad files."""
    with suppress(ValueError):
        if (source := _source(config)) is not None and source.progress:
            from moe_exp.checkpoint.format.settings import saved_start

            return saved_start(source.common)
    return BEGIN


def _source(config: Config) -> _Source | None:
    """The checkpoint that training would load now; None if it cannot be determined here before the
    run starts. Raises ValueError if neither the run folder nor LOAD_DIR has a complete checkpoint.
    """
    if run_folder_problems(config) or config.remote_dir:
        return None
    own = RunFolder.of(config).checkpoints
    if any(own.glob(f"iter_*{REPLACED}")):
        return None  # the run was killed while saving: the ranks will clean up first
    # a run resumes from its own checkpoints; LOAD_DIR only applies to its first start
    place = own if usable(own) else Path(config.load_dir).expanduser() if config.load_dir else None
    if place is None:
        return _Source(None, {}, {})
    # a LOAD_DIR URL is copied when the run starts, and reading a checkpoint requires torch
    if (place != own and is_url(config.load_dir)) or importlib.util.find_spec("torch") is None:
        return None
    from moe_exp.checkpoint.format.torch_dist import read_common
    from moe_exp.checkpoint.integrity import find_source_here

    source = find_source_here(place)
    common = read_common(source.folder) if source else {}
    return _Source(source.folder if source else None, common, common.get("progress") or {})


def _placed(config: Config, source: _Source) -> tuple[Config, list[str], list[str]]:
    """Moves data stages to batch boundaries; returns the new config, a line per moved stage, and problems."""
    if not source.progress:
        staged, lines = config.with_stage_begins()
        return staged, lines, list(staged.stage_begin_problems())
    from moe_exp.data.samples.order import place_stages

    staged, lines, skipped = place_stages(config, source.progress, read_rollbacks(RunFolder.of(config)))
    return staged, lines, list(staged.stage_begin_problems(source.progress["consumed_samples"], skipped))


def _data_problems(config: Config, source: _Source) -> list[str]:
    staged, _, problems = _placed(config, source)
    saved = source.progress.get("sample_order")
    if source.folder is None or problems or not saved or config.allow_other_data:
        return problems
    from moe_exp.data.samples.dataset import merged, stream_number
    from moe_exp.data.samples.order import order_changes, order_of_files

    files = already_prepared(staged)  # otherwise the start compares them after the preparation
    with suppress(ValueError, OSError):  # the checks of files report missing ones
        if files is not None and (order := order_of_files(files)) is not None:
            name = f"the checkpoint at iteration {source.progress['iteration']} of {source.folder.parent}"
            skipped = merged(source.progress.get("skipped_samples") or ())
            next_sample = stream_number(source.progress["consumed_samples"], skipped)
            return [change.problem for change in order_changes(files, order, saved, name, next_sample)]
    return []


# Up to this number of epochs, repeated data is nearly as good as new data (arXiv:2305.16264).
_WORTHWHILE_EPOCHS = 4
_ROUNDING = 1.01  # tolerance for rounded weights and for TRAIN_ITERS in whole batches


def data_warnings(config: Config) -> list[str]:
    """Warns about mismatched tokenizers, token files read too often, and validation on one document or on
    training data.
    """
    with suppress(ValueError, OSError):  # reported by the checks of files
        if not config.train_data or needs_preparation(config):
            return list(validation_overlaps(config))
        shares = parse_split(config.split)
        return [
            *(tokenizer_problems(config) if config.allow_other_data else ()),
            *_repeated(config, shares[0] or (0.0, 1.0)),
            *_small_validation(config, shares[1]),
        ]
    return []


def _repeated(config: Config, share: Share) -> Iterator[str]:
    total = config.seq_len * config.batches.samples_of(config.train_iters, 0)
    stages = config.stages
    # a stage may begin after the last iteration of this run
    firsts = [min(stage.first_sample * config.seq_len, total) for stage in stages]
    tokens, num_sources = Counter[str](), 0  # tokens read per prefix in all stages; size of the largest blend
    for stage, (begin, end) in zip(stages, pairwise([*firsts, total]), strict=True):
        blend = [] if names_text(stage.train_data) else parse_blend(stage.train_data)
        num_sources = max(num_sources, len(blend))
        for weight, prefix in blend:
            tokens[prefix] += round((end - begin) * weight / sum(weight for weight, _ in blend))
    for prefix, read in tokens.items():
        there = part_tokens(TokenFiles(prefix), share, by_sequence=config.data_order == "megatron")
        asked = _max_epochs(prefix)
        # a blend's weights repeat a source unnoticed; with a single source, TRAIN_ITERS repeats it on purpose
        limit = asked or (1 if num_sources > 1 else _WORTHWHILE_EPOCHS)
        if there and read > _ROUNDING * limit * there:
            rule = f"this run reads it {read / there:.2f} times"
            fix = "train for fewer iterations, add data"
            fix += ", or lower the weight of this data" if num_sources > 1 else ""
            if asked:
                rule += f", but its mixture allows max_epochs={asked:g}"
                fix += f"; to respect max_epochs, rerun moe-exp data mix with total_tokens={total:.4g}"
            yield problem("train_data", prefix, rule, fix)


def _max_epochs(prefix: str) -> float | None:
    """The max_epochs stored by `moe-exp data mix` for token files `prefix`; None if it stored no value."""
    path = Path(prefix).with_name("mixture.json")
    # another program may have written a file of this name
    with suppress(KeyError, TypeError, AttributeError, ValueError):
        facts = read_json(path) if path.is_file() else {}
        prefixes = [Path(word).name for word in facts["train_data"].split()[1::2]]
        limits = dict(zip(prefixes, facts["settings"]["sources"], strict=False))
        return float(limits[Path(prefix).name]["max_epochs"])
    return None


def _small_validation(config: Config, share: Share | None) -> Iterator[str]:
    name, part = "train_data", f" for validation with SPLIT={config.split}"
    if config.valid_data:
        name, part, share = validation_setting(config), "", (0.0, 1.0)
    if share is None or not config.eval_interval:
        return
    for _, prefix in parse_blend(config.valid_data or config.train_data):
        begin, end = share_range(TokenFiles(prefix).num_documents, share)
        if end - begin == 1:
            rule = f"has only one document{part}: the loss on one document is not representative"
            yield problem(name, prefix, rule, "hold out more documents")
