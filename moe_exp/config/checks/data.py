"""Rules of DATA_STAGES and DOCUMENT_PACKING; a part of checks.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from moe_exp.config.data_stages import DataStage, microbatch_samples, stages_of
from moe_exp.config.ramp import batch_size_at, ramp_steps
from moe_exp.config.setting_types import blend_members
from moe_exp.config.settings import Config, problem
from moe_exp.host.files import is_url


def check_packing(config: Config) -> Iterator[str]:
    """A line for each setting that DOCUMENT_PACKING=best_fit does not go with."""
    if config.document_packing != "best_fit":
        return
    if not config.eod_mask_loss:
        rule = "fills samples up with end-of-document tokens, whose loss must not count"
        yield problem("document_packing", "best_fit", rule, "set EOD_MASK_LOSS=true")
    if config.data_order == "megatron":
        rule = "is an order of our own, and DATA_ORDER=megatron Megatron's"
        yield problem("document_packing", "best_fit", rule, "set DATA_ORDER=stream")


def check_stages(config: Config) -> Iterator[str]:
    """A line for every rule that a stage breaks."""
    try:
        problems = list(_all_problems(config))
    except (ValueError, ZeroDivisionError):  # of settings that another check names
        return
    for line in problems:
        rule, _, fix = line.rpartition("; ")
        yield problem("data_stages", config.data_stages, rule, fix)


def _all_problems(config: Config) -> Iterator[str]:
    """`rule; fix` each, for settings that otherwise can run."""
    if not config.data_stages:
        return
    if config.data_order == "megatron":
        yield "DATA_ORDER=megatron has one order for the whole run; set DATA_ORDER=stream"
    stages, total = stages_of(with_stage_begins(config)[0]), sum(step.samples for step in ramp_steps(config))
    for number, (before, stage) in enumerate(pairwise(stages), 1):
        for line in _problems(config, before, stage, total):
            yield f"stage {number} {line}"
        if bad := [path for _, path in blend_members(stage.train_data) if is_url(path)]:
            fix = "fetch it with moe-exp data pull"
            yield f"stage {number} has {bad[0]}, and a stage takes files on this machine; {fix}"


def _problems(config: Config, before: DataStage, stage: DataStage, total: int) -> Iterator[str]:
    begins = f"begins at {stage.place},"
    if stage.first_sample <= before.first_sample:
        yield f"{begins} the one before at {before.place}; put the stages in order, at least a batch apart"
        return
    if stage.first_sample >= total:
        end = total if stage.from_tokens is None else f"{total * config.seq_len} tokens"
        yield f"{begins} and the run ends after {end}; let it begin earlier, or set TRAIN_ITERS higher"
        return
    factor, rest = divmod(stage.seq_len, config.seq_len)
    if rest:
        rule = f"has seq_len={stage.seq_len}, no multiple of SEQ_LEN={config.seq_len}"
        yield f"{rule}; give {max(1, factor) * config.seq_len} or {(factor + 1) * config.seq_len}"
        return
    size, replicas = microbatch_samples(config, stage.seq_len), config.data_parallel_size
    steps = ramp_steps(config, total)
    ends = accumulate(step.samples for step in steps)
    sizes = {step.batch_size for step, end in zip(steps, ends, strict=True) if end > stage.first_sample}
    unit = size * replicas * (config.pp if config.vpp else 1)  # Megatron's schedule for VPP
    if size % factor or (bad := sorted(batch for batch in {config.gbsz, *sizes} if batch % unit)):
        batch = config.gbsz if size % factor else bad[0]
        rule = f"has seq_len={stage.seq_len}, so a sample counts as {factor}, and a batch of {batch} is no"
        rule += f" multiple of the {size} samples of a micro-batch times DP={replicas}"
        rule += f" times PP={config.pp} (VPP)" if config.vpp else ""
        if not size % factor and config.gbsz % unit == 0:
            yield f"{rule}; let the steps of RAMPUP_BATCH_SIZE be multiples of {unit}"
        else:
            other = "" if config.vpp else f", or MBSZ to one of {factor}"
            yield f"{rule}; set GBSZ to a multiple of {unit}{other}"


def with_stage_begins(
    config: Config,
    consumed: int = 0,
    skipped: Sequence[tuple[int, int]] = (),
    begun: Sequence[Mapping[str, Any]] = (),
) -> tuple[Config, list[str]]:
    """`config` whose stages in tokens begin with the next batch, and a line for each that this moves.

    Args:
        config: settings.
        consumed, skipped: as of `check_stage_begins`.
        begun: the stages that the checkpoint has begun, as of `SampleOrder`; they keep their first sample.
    """
    given, lines = json.loads(config.data_stages or "[]"), []
    for number, (stage, found) in enumerate(zip(given, stages_of(config)[1:], strict=True), 1):
        if found.from_tokens is None:
            continue
        first = -(-found.from_tokens // config.seq_len)
        old = begun[number - 1] if number <= len(begun) else {}
        if old.get("from_tokens") == found.from_tokens:
            first = old["first_sample"]
        else:
            left_out = _left_out(skipped, first)
            if consumed < first - left_out != (begin := _batch_start(config, first - left_out, consumed)):
                first = begin + batch_size_at(config, begin) + left_out
        stage["from_samples"] = first
        if first * config.seq_len != found.from_tokens:
            token = f"token {first * config.seq_len:,} (sample {first:,})"
            rule = f"stage {number} begins at {token}, the first batch from {found.place} on"
            lines.append(f"DATA_STAGES: {rule}")
    return config.model_copy(update={"data_stages": json.dumps(given) if given else ""}), lines


def _left_out(skipped: Sequence[tuple[int, int]], first: int) -> int:
    return sum(min(end, first) - start for start, end in skipped if start < first)


def check_stage_begins(
    config: Config, consumed: int = 0, skipped: Sequence[tuple[int, int]] = ()
) -> Iterator[str]:
    """A line for each stage that would begin within a batch.

    Not one of the checks of settings alone: where batches begin depends on the run so far.

    Args:
        config: settings.
        consumed: samples, when the run continues.
        skipped: ranges of the stream that it leaves out, in order.
    """
    for number, (before, stage) in enumerate(pairwise(stages_of(config)), 1):
        first = stage.first_sample
        left_out = _left_out(skipped, first)
        begin = _batch_start(config, first - left_out, consumed)
        if consumed < first - left_out != begin:
            fits = [begin + left_out, begin + left_out + batch_size_at(config, begin)]
            fits = [place for place in fits if place > before.first_sample]
            rule = f"stage {number} begins at sample {first}, where no batch begins"
            fix = f"let it begin at sample {' or '.join(map(str, fits))}"
            yield problem("data_stages", config.data_stages, rule, fix)


def _batch_start(config: Config, sample: int, begin: int) -> int:
    """First sample of the batch that has `sample`, of those from `begin` on."""
    for step in ramp_steps(config, sample + 1, begin):
        if begin + step.samples > sample:
            return begin + (sample - begin) // step.batch_size * step.batch_size
        begin += step.samples
    return begin
