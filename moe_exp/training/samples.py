"""Reads a run's samples, and compares their files and order with the data of the checkpoint."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.load import saved_progress
from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config, ConfigError
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.data.samples.dataset import Range, Samples, SampleStream, merged, stream_number
from moe_exp.data.samples.megatron_dataset import MegatronOrder, megatron_samples
from moe_exp.data.samples.order import Change, order_changes, order_of_files, place_stages
from moe_exp.data.samples.prefetch import ReadAhead, microbatch_start, microbatch_starts
from moe_exp.data.tokens import manifests
from moe_exp.data.tokens.text_bytes import NOT_KEPT, TokenBytes
from moe_exp.data.tokens.tokens import parse_blend, parse_split
from moe_exp.engine.optimizer_setup import next_batch
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.exit_codes import EXIT_CODE_FILE
from moe_exp.runs.run_folder import RunFolder, read_rollbacks

logger = logging.getLogger(__name__)


def build_data(config: Config) -> tuple[Samples, Samples | None]:
    """Training and validation samples from token files (TRAIN_DATA, VALID_DATA, or the embedded corpus)."""
    train_data, valid_data = _blends(config)
    if config.data_order == "megatron":  # its order depends on the number of samples that the run needs
        num_evaluations = config.train_iters // config.eval_interval + 1 if config.eval_interval else 0
        order = MegatronOrder(
            train=train_data, valid=valid_data, split=config.split, seq_len=config.seq_len, seed=config.seed,
            num_train_samples=config.train_iters * config.gbsz,
            num_valid_samples=num_evaluations * config.eval_iters * config.gbsz,
        )  # fmt: skip
        return megatron_samples(order, Path(config.data_dir))
    train_share, valid_share, _ = parse_split(config.split)
    common: Any = {"seq_len": config.seq_len, "seed": config.seed}
    share, packing = train_share or (0.0, 1.0), config.document_packing
    stream = SampleStream(parse_blend(train_data), **common, share=share, packing=packing)
    for stage in config.stages[1:]:
        blend = parse_blend(stage.train_data or train_data)
        stream.add_stage(blend, seq_len=stage.seq_len, first_sample=stage.first_sample)
    valid_stream = None
    if config.eval_interval and (valid_data or valid_share):
        blend, share = parse_blend(valid_data or train_data), valid_share or (0.0, 1.0)
        valid_stream = SampleStream(blend, **common, shuffle=False, share=share)
    return stream, valid_stream


def _blends(config: Config) -> tuple[str, str]:
    """TRAIN_DATA and VALID_DATA; if TRAIN_DATA is empty, the token files of the embedded corpus."""
    if config.train_data:
        return config.train_data, config.valid_data
    corpus = ensure_embedded_corpus(Path(config.data_dir))
    return str(corpus.train_prefix), str(corpus.valid_prefix)


def describe_documents(config: Config) -> tuple[int | None, float]:
    """The end-of-document token that all files share (None if no setting needs it), and DOCUMENT_TOKENS."""
    if not (config.document_mask or config.eod_mask_loss):
        return None, config.document_tokens
    train_data, valid_data = _blends(config)
    blends = [train_data, valid_data, *(stage.train_data for stage in config.stages[1:])]
    prefixes = [prefix for blend in blends if blend for _, prefix in parse_blend(blend)]
    # normally empty: `machine_checks` has already refused such files
    problems, eod_id = manifests.check_ends(config, prefixes)
    if problems:
        raise ConfigError(problems)
    return eod_id, manifests.with_document_tokens(config, train_data).document_tokens


def check_tokenizers(config: Config) -> None:
    """Raises ConfigError on every rank if the data were tokenized with different tokenizers."""
    if EXIT_CODE_FILE in os.environ:
        return  # the launcher has already checked this
    problems = from_first_rank(lambda: list(manifests.tokenizer_problems(config)))
    if problems and not config.allow_other_data:
        raise ConfigError(problems)
    for line in problems if torch.distributed.get_rank() == 0 else ():
        logger.warning("%s", line)


def with_placed_stages(config: Config, folder: RunFolder, source: Path | None) -> Config:
    """If data stages begin at token numbers, moves them to batch boundaries. `source`: checkpoint to load."""
    if not config.data_stages:
        return config

    def placed() -> tuple[str, list[str]]:
        saved = (saved_progress(source) if source else None) or Progress()
        staged, lines, _ = place_stages(config, vars(saved), read_rollbacks(folder))
        return staged.data_stages, lines

    data_stages, lines = from_first_rank(placed)
    for line in lines:
        logger.info("%s", line)
    return config.model_copy(update={"data_stages": data_stages})


def compare_stages(config: Config, skipped: Sequence[Range], source: Path | None) -> None:
    """Raises ConfigError on every rank if a stage would start inside a batch after resuming from `source`."""
    # Checked at the start; otherwise the run would fail at the stage, maybe after weeks.
    saved = saved_progress(source) if source and config.data_stages else None
    if problems := list(config.stage_begin_problems(saved.consumed_samples if saved else 0, skipped)):
        raise ConfigError(problems)


def read_tokens(samples: Samples, first: int, count: int, *, vocab_size: int) -> torch.Tensor:
    """Reads a batch. If a token is outside the vocabulary, a ValueError names its sample and documents."""
    # On a GPU the embedding would abort with a device-side assert that names neither.
    tokens_BS1 = samples.batch(first, count)
    lowest, highest = (int(bound) for bound in tokens_BS1.aminmax())
    if lowest >= 0 and highest < vocab_size:
        return tokens_BS1
    is_bad_BS1 = (tokens_BS1 < 0) | (tokens_BS1 >= vocab_size)
    row = int(is_bad_BS1.any(dim=1).nonzero()[0])
    token, origin = int(tokens_BS1[row][is_bad_BS1[row]][0]), samples.origin(first + row)
    sample = f"sample {first + row} (documents {', '.join(map(str, origin.documents))})"
    rule = f"{sample} has the token {token}, but VOCAB_SIZE is {vocab_size}"
    fix = "check the file with `moe-exp data verify`, or set VOCAB_SIZE to the size of the file's tokenizer"
    raise ValueError(f"{origin.prefix}: {rule}. Fix: {fix}.")


def bytes_per_token(config: Config, samples: Samples) -> float | None:
    """UTF-8 bytes per token of the validation samples; None if the tokenizer is unknown."""
    name = config.tokenizer
    if not name and not config.train_data:
        name = ensure_embedded_corpus(Path(config.data_dir)).tokenizer_path
    if not name:
        return None
    try:
        blend = config.train_data and (config.valid_data or config.train_data)
        known = manifests.documents_of(blend) or manifests.DocumentTokens()
        table = TokenBytes(known.tokenizer(name))
    except ValueError as error:
        logger.warning("cannot compute the validation loss in bits per byte: %s", error)
        return None
    if table.note:
        logger.info(NOT_KEPT, name, table.note)
    # Read once and not decoded: the table has the number of bytes of each token.
    batches = (samples.batch(index * config.gbsz, config.gbsz) for index in range(config.eval_iters))
    counts = [table.count_samples(batch.numpy(), eod_mask_loss=config.eod_mask_loss) for batch in batches]
    num_bytes, num_tokens = map(sum, zip(*counts, strict=True))
    return num_bytes / num_tokens if num_tokens else None


def compare_data(config: Config, source: Path | None) -> tuple[dict[str, Any], list[Change]]:
    """Returns the sample order and its differences from the checkpoint's order. All ranks must call this.

    Raises ConfigError on every rank if the orders differ, unless ALLOW_OTHER_DATA is set.
    """

    def compared() -> tuple[dict[str, Any], list[Change]]:
        order = order_of_files(config)
        assert order is not None  # `build_data` has built the embedded corpus
        saved = saved_progress(source) if source else None
        if source is None or saved is None or not saved.consumed_samples:
            return order.facts(), []
        name = f"the checkpoint at iteration {saved.iteration} of {one_checkpoint(source).parent}"
        if saved.sample_order is None:
            line = "%s does not record its data: cannot check that TRAIN_DATA is unchanged"
            logger.warning(line, name)
            return order.facts(), []
        next_sample = stream_number(saved.consumed_samples, merged(saved.skipped_samples))
        changes = order_changes(config, order, saved.sample_order, name, next_sample)
        for change in changes if config.allow_other_data else ():
            line = "%s; ALLOW_OTHER_DATA=true: continuing at sample %d"
            logger.warning(line, change, saved.consumed_samples)
        return order.facts(), changes

    sample_order, changes = from_first_rank(compared)
    if changes and not config.allow_other_data:
        raise ConfigError([change.problem for change in changes])
    return sample_order, changes


def read_ahead(config: Config, rank: Runtime, samples: Samples) -> ReadAhead:
    """Wraps `samples` with NUM_WORKERS processes that prefetch this rank's next micro-batches."""
    place = {"dp_rank": rank.groups.dp.rank(), "dp_size": rank.groups.dp.size()}

    def schedule(consumed_samples: int) -> tuple[int, int, int]:
        return next_batch(config, consumed_samples, samples.stage_at(consumed_samples).seq_len)

    def starts(first: int) -> Iterator[tuple[int, int]]:
        size = config.microbatch_samples(samples.stage_at(first).seq_len)
        return microbatch_starts(first - microbatch_start(0, 0, mbsz=size, **place), schedule, **place)

    on_gpu = rank.device.type == "cuda"
    return ReadAhead(samples, starts=starts, num_workers=config.num_workers, pin_memory=on_gpu)
