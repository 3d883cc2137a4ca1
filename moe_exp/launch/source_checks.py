"""Files that a start uses, on this machine: the checkpoint that it continues from (whether it fits, where
training starts, where stages begin), how often it reads each token file, and what it validates on. No torch.
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
from moe_exp.data.own_text import (
    already_prepared,
    needs_preparation,
    validation_overlaps,
    validation_setting,
)
from moe_exp.data.tokens.manifests import tokenizer_problems
from moe_exp.data.tokens.tokens import Share, TokenFiles, parse_blend, parse_split, part_tokens, share_range
from moe_exp.host.files import is_url, read_json
from moe_exp.runs.run_folder import RunFolder, read_rollbacks, run_folder_problems


class _Source(NamedTuple):
    folder: Path | None  # of its iteration; None: training starts at iteration 0
    common: Mapping[str, Any]  # what it has beside tensors
    progress: Mapping[str, Any]  # of that; empty: at iteration 0


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
    # a run continues from its own checkpoints; LOAD_DIR is for its first start
    place = own if usable(own) else Path(config.load_dir).expanduser() if config.load_dir else None
    if place is None:
        return _Source(None, {}, {})
    # a LOAD_DIR at a store is copied only at the start, and without torch no checkpoint can be read
    if (place != own and is_url(config.load_dir)) or importlib.util.find_spec("torch") is None:
        return None
    from moe_exp.checkpoint.format.torch_dist import read_common
    from moe_exp.checkpoint.integrity import find_source_here

    source = find_source_here(place)
    common = read_common(source.folder) if source else {}
    return _Source(source.folder if source else None, common, common.get("progress") or {})


def _placed(config: Config, source: _Source) -> tuple[Config, list[str], list[str]]:
    """`config` whose stages in tokens begin with a batch, a line for each that this moves, and problems."""
    if not source.progress:
        staged, lines = config.with_stage_begins()
        return staged, lines, list(staged.stage_begin_problems())
    from moe_exp.data.samples.order import place_stages

    rollbacks = read_rollbacks(RunFolder.of(config))
    staged, lines, skipped = place_stages(config, source.progress, rollbacks)
    consumed = source.progress["consumed_samples"]
    return staged, lines, list(staged.stage_begin_problems(consumed, skipped))


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


# Repeated up to so often, data is worth nearly as much as new data (arXiv:2305.16264).
_WORTHWHILE_EPOCHS = 4
_ROUNDING = 1.01  # of weights, and of TRAIN_ITERS to whole batches


def data_warnings(config: Config) -> list[str]:
    """Warns of token files that do not fit together, of sources that are read too often, and of validation on
    one document; where a setting names text, of validation on what is trained on. Empty if files cannot be
    read.
    """
    with suppress(ValueError, OSError):  # which the checks of files name
        if not config.train_data or needs_preparation(config):
            return list(validation_overlaps(config))
        shares = parse_split(config.split) if config.split else [(0.0, 1.0), None]
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
    tokens, num_sources = Counter[str](), 0  # read of each prefix in all stages; in the largest blend
    for stage, (begin, end) in zip(stages, pairwise([*firsts, total]), strict=True):
        blend = [] if names_text(stage.train_data) else parse_blend(stage.train_data)
        num_sources = max(num_sources, len(blend))
        for weight, prefix in blend:
            tokens[prefix] += round((end - begin) * weight / sum(weight for weight, _ in blend))
    for prefix, read in tokens.items():
        there = part_tokens(TokenFiles(prefix), share, by_sequence=config.data_order == "megatron")
        asked = _max_epochs(prefix)
        # The weights of a blend repeat a source unnoticed; TRAIN_ITERS repeats a single one on purpose.
        limit = asked or (1 if num_sources > 1 else _WORTHWHILE_EPOCHS)
        if there and read > _ROUNDING * limit * there:
            rule = f"this run reads it {read / there:.2f} times"
            fix = "train for fewer iterations, add data"
            fix += ", or lower its weight" if num_sources > 1 else ""
            if asked:
                rule += f", and its mixture says max_epochs={asked:g}"
                fix += f"; for max_epochs, repeat data mix with total_tokens={total:.4g}"
            yield problem("train_data", prefix, rule, fix)


def _max_epochs(prefix: str) -> float | None:
    """The limit that `moe-exp data mix` was given for these token files, if it has made them."""
    path = Path(prefix).with_name("mixture.json")
    with suppress(KeyError, TypeError, AttributeError, ValueError):  # another program's file of this name
        facts = read_json(path) if path.is_file() else {}
        prefixes = [Path(word).name for word in facts["train_data"].split()[1::2]]
        limits = dict(zip(prefixes, facts["settings"]["sources"], strict=False))
        return float(limits[Path(prefix).name]["max_epochs"])
    return None


def _small_validation(config: Config, share: Share | None) -> Iterator[str]:
    name, part = "train_data", f" for validation by SPLIT={config.split}"
    if config.valid_data:
        name, part, share = validation_setting(config), "", (0.0, 1.0)
    if share is None or not config.eval_interval:
        return
    for _, prefix in parse_blend(config.valid_data or config.train_data):
        begin, end = share_range(TokenFiles(prefix).num_documents, share)
        if end - begin == 1:
            rule = f"has one document{part}: its loss says little about other texts"
            yield problem(name, prefix, rule, "hold out more documents")
