"""Constraints on data, its split, packing and DATA_STAGES."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from moe_exp.config.data_stages import DataStage, microbatch_samples, stages_of
from moe_exp.config.ramp import batch_size_at, ramp_steps
from moe_exp.config.setting_types import blend_members, names_text, shown
from moe_exp.config.settings import Config
from moe_exp.host.files import is_url

# Of the tokenizer trained on the embedded corpus.
EMBEDDED_VOCAB_SIZE = 2048


def check_data(c: Config) -> Iterator[str]:
    """TRAIN_DATA, VALID_DATA, SPLIT, DOCUMENT_PACKING and the validation."""
    if c.eval_interval and not c.eval_iters:
        rule = f"evaluates nothing every EVAL_INTERVAL={c.eval_interval}"
        yield c.problem("eval_iters", rule, "set EVAL_ITERS=10 or EVAL_INTERVAL=0")
    if c.train_data and not (c.valid_data or c.split or names_text(c.train_data)) and c.eval_interval:
        rule = f"TRAIN_DATA={shown(c.train_data)} is no folder or file of text here, and for token files"
        rule += f" there is nothing to evaluate on every EVAL_INTERVAL={c.eval_interval}"
        fix = "correct TRAIN_DATA if it should name text, else set VALID_DATA, SPLIT=99,1 or EVAL_INTERVAL=0"
        yield c.problem("valid_data", rule, fix)
    remote = [name for _, name in blend_members(f"{c.train_data} {c.valid_data}") if is_url(name)]
    if remote and c.data_order == "megatron":
        fix = f"fetch {remote[0]} with moe-exp data pull, or set DATA_ORDER=stream"
        yield c.problem("data_order", "reads files of this machine only", fix)
    if c.split:
        yield from _split(c)
    fills = c.document_packing == "best_fit"
    yield from c.problems(
        (fills and not c.eod_mask_loss, "document_packing",
         "fills samples up with end-of-document tokens, whose loss must not count", "set EOD_MASK_LOSS=true"),
        (fills and c.data_order == "megatron", "document_packing",
         "is an order of our own, and DATA_ORDER=megatron Megatron's", "set DATA_ORDER=stream"),
    )  # fmt: skip
    if c.train_data:
        return
    for name in ("split", "valid_data"):
        if getattr(c, name):
            rule = "the embedded corpus brings its own validation set"
            yield c.problem(name, rule, f"set TRAIN_DATA or drop {name.upper()}")
    if c.vocab_size < EMBEDDED_VOCAB_SIZE:
        rule = f"the embedded corpus (TRAIN_DATA is empty) has {EMBEDDED_VOCAB_SIZE} tokens"
        fix = f"set VOCAB_SIZE to at least {EMBEDDED_VOCAB_SIZE}, or TRAIN_DATA"
        yield c.problem("vocab_size", rule, fix)


def _split(c: Config) -> Iterator[str]:
    if c.valid_data:
        rule = f"VALID_DATA={c.valid_data} names the validation files"
        yield c.problem("split", rule, "set one of the two")
    shares = [float(share) for share in c.split.split(",")]
    if len(shares) > 3 or not shares[0]:
        rule = "must be up to three numbers, for training, validation and test, and the first more than 0"
        yield c.problem("split", rule, "set for instance SPLIT=99,1")
    elif c.eval_interval and not sum(shares[1:2]):
        rule = f"leaves nothing to evaluate on every EVAL_INTERVAL={c.eval_interval}"
        yield c.problem("split", rule, "set for instance SPLIT=99,1, or EVAL_INTERVAL=0")


def check_stages(config: Config) -> Iterator[str]:
    """A line for every rule that a stage breaks."""
    if not config.data_stages:
        return
    if config.data_order == "megatron":
        rule = "DATA_ORDER=megatron has one order for the whole run"
        yield config.problem("data_stages", rule, "set DATA_ORDER=stream")
    try:
        stages, total = stages_of(with_stage_begins(config)[0]), sum(s.samples for s in ramp_steps(config))
        problems = [_stage_problem(config, *pair, total) for pair in pairwise(stages)]
    except (ValueError, ZeroDivisionError):  # of settings that another check names
        return
    for number, (stage, problem) in enumerate(zip(stages[1:], problems, strict=True), 1):
        if problem:
            rule, fix = problem
            yield config.problem("data_stages", f"stage {number} {rule}", fix)
        if bad := [path for _, path in blend_members(stage.train_data) if is_url(path)]:
            rule = f"stage {number} has {bad[0]}, and a stage takes files on this machine"
            yield config.problem("data_stages", rule, "fetch it with moe-exp data pull")


def _stage_problem(config: Config, before: DataStage, stage: DataStage, total: int) -> tuple[str, str] | None:
    """The first rule that a stage breaks, and the fix."""
    begins = f"begins at {stage.place},"
    if stage.first_sample <= before.first_sample:
        return f"{begins} the one before at {before.place}", "put the stages in order, at least a batch apart"
    if stage.first_sample >= total:
        end = total if stage.from_tokens is None else f"{total * config.seq_len} tokens"
        return f"{begins} and the run ends after {end}", "let it begin earlier, or set TRAIN_ITERS higher"
    factor, rest = divmod(stage.seq_len, config.seq_len)
    if rest:
        rule = f"has seq_len={stage.seq_len}, no multiple of SEQ_LEN={config.seq_len}"
        return rule, f"give {max(1, factor) * config.seq_len} or {(factor + 1) * config.seq_len}"
    size, replicas = microbatch_samples(config, stage.seq_len), config.data_parallel_size
    steps = ramp_steps(config, total)
    ends = accumulate(step.samples for step in steps)
    sizes = {step.batch_size for step, end in zip(steps, ends, strict=True) if end > stage.first_sample}
    unit = size * replicas * (config.pp if config.vpp else 1)  # Megatron's schedule for VPP
    bad = [config.gbsz] if size % factor else sorted(n for n in {config.gbsz, *sizes} if n % unit)
    if not bad:
        return None
    rule = f"has seq_len={stage.seq_len}, so a sample counts as {factor}, and a batch of {bad[0]} is no"
    rule += f" multiple of the {size} samples of a micro-batch times DP={replicas}"
    rule += f" times PP={config.pp} (VPP)" if config.vpp else ""
    if not size % factor and config.gbsz % unit == 0:
        return rule, f"let the steps of RAMPUP_BATCH_SIZE be multiples of {unit}"
    other = "" if config.vpp else f", or MBSZ to one of {factor}"
    return rule, f"set GBSZ to a multiple of {unit}{other}"


def with_stage_begins(
    config: Config, consumed: int = 0, skipped: Sequence[tuple[int, int]] = (),
    begun: Sequence[Mapping[str, Any]] = (),
) -> tuple[Config, list[str]]:  # fmt: skip
    """`config` whose stages in tokens begin with the next batch, and a line for each that this moves.

    `consumed`, `skipped`: see `check_stage_begins`. Stages that are `begun` keep their first sample.
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
    """A line for each stage that would begin within a batch, which depends on the run so far: the number of
    samples `consumed`, and the ranges of the stream that are left out, in order.
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
            yield config.problem("data_stages", rule, fix)


def _batch_start(config: Config, sample: int, begin: int) -> int:
    """First sample of the batch that has `sample`, of those from `begin` on."""
    for step in ramp_steps(config, sample + 1, begin):
        if begin + step.samples > sample:
            return begin + (sample - begin) // step.batch_size * step.batch_size
        begin += step.samples
    return begin
