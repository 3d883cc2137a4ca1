"""Data settings. DATA_STAGES switches to other training data or longer samples during a run:

    - from_samples: 200000
      train_data: 0.5 web 0.5 books
    - from_tokens: 4e9
      train_data: good
      seq_len: 4096

If a stage does not set a value, the previous stage's value applies. Samples are always counted in units of
SEQ_LEN tokens: a sample of F * SEQ_LEN tokens counts as F samples. The tokens per batch therefore stay the
same, and the schedules of learning rate and batch size continue unchanged.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

from moe_exp.config.sections.optimizer import OptimizerSettings
from moe_exp.config.setting_types import Blend, NonNegative, PathText, Rate, Shares, Stages, blend_members
from moe_exp.config.traits import data
from moe_exp.host.devices import count_gpus
from moe_exp.host.files import is_url

PREFETCHED_MICROBATCHES = 2  # per worker process (NUM_WORKERS)
EMBEDDED_VOCAB_SIZE = 2048  # of the tokenizer trained on the embedded corpus

_Settings = TypeVar("_Settings", bound="DataSettings")


@dataclass(frozen=True)
class DataStage:
    """A stage of the training data."""

    first_sample: int  # in samples of SEQ_LEN tokens
    train_data: str
    seq_len: int  # tokens per sample
    # requested start if given in tokens; `first_sample` is then the next start of a batch
    from_tokens: int | None = None

    @property
    def place(self) -> str:
        """Start of the stage, in the unit the user chose."""
        return f"sample {self.first_sample}" if self.from_tokens is None else f"token {self.from_tokens}"


class DataSettings(OptimizerSettings):
    """Settings of the section Data."""

    train_data: Blend = data(
        "",
        "training data: 'PATH' or 'WEIGHT PATH WEIGHT PATH ...'; each PATH is a text file (.txt, .md, "
        ".jsonl, .json, .parquet, .arrow), a folder or pattern of such files, or the prefix of Megatron "
        ".bin/.idx files; empty: the embedded corpus",
    )
    valid_data: Blend = data(
        "", "validation data, in the format of TRAIN_DATA; empty: hold out part of the text (docs/corpus.md)"
    )
    text_documents: Literal["file", "block"] = data(
        "file", "unit that forms a document in text files; file: whole file; block: text between blank lines"
    )
    prepend_bos: bool = data(False, "begin each text document with TOKENIZER's beginning-of-sequence token")
    text_field: str = data("text", "field (.jsonl) or column (.parquet, .arrow) that contains the text")
    split: Shares = data(
        "",
        "relative shares of TRAIN_DATA's documents for training, validation and test, such as '99,1' or "
        "'969,30,1'; cannot be combined with VALID_DATA",
    )
    data_stages: Stages = data(
        "",
        "later training stages with other data, blend weights or sample lengths, each starting at a given "
        "sample or token: a YAML file or YAML text (docs/corpus.md)",
    )
    data_order: Literal["stream", "megatron"] = data(
        "stream",
        "order of the samples; stream: independent of TRAIN_ITERS; megatron: as in Megatron-LM's GPTDataset",
    )
    document_mask: bool = data(
        False,
        "restrict attention to the same document, and start positions at 0 in each document; documents end "
        "with the end-of-document token",
        megatron_flags=("--reset-attention-mask", "--reset-position-ids"),
    )
    document_tokens: Rate = data(
        0.0,
        "token-weighted mean length of the documents in a sample; used by the planner and FLOP counts if "
        "DOCUMENT_MASK is set; 0: measured on TRAIN_DATA's token files",
        compared=False,
    )
    eod_mask_loss: bool = data(
        False,
        "exclude each document's first token from the loss, as it is predicted from the previous document",
        megatron_flags=(),
    )
    document_packing: Literal["concatenate", "best_fit"] = data(
        "concatenate",
        "packing of documents into samples; concatenate: join all documents and cut every SEQ_LEN tokens; "
        "best_fit: fill samples with whole documents, and cut only documents longer than a sample",
    )
    allow_other_data: bool = data(
        False, "resume at the checkpoint's sample number even if the data or its order has changed"
    )
    num_workers: NonNegative = data(
        ...,
        "processes per rank that prefetch training data; 0: the rank reads the data itself (default: 2 with "
        "GPUs, else 0)",
        default_factory=lambda: 2 if count_gpus() else 0,
        compared=False,
    )
    tokenizer: PathText = data(
        "",
        "Hugging Face tokenizer folder or tokenizer.json, with at most VOCAB_SIZE tokens; empty: train a "
        "tokenizer on the training text",
    )
    data_dir: PathText = data(
        "data", "folder for prepared corpora and, with DATA_ORDER=megatron, its index files"
    )

    @property
    def context_stripes(self) -> int:
        """Number of equal stripes that a sequence is cut into. Each stripe is split over all context-parallel
        ranks. With DOCUMENT_MASK, several stripes balance the ranks' attention work.
        """
        wanted = (4, 2) if self.document_mask and self.cp > 1 else ()
        return next((number for number in wanted if self.seq_len % (2 * self.cp * number) == 0), 1)

    @property
    def split_shares(self) -> list[float]:
        """Numbers in SPLIT. The list is empty if SPLIT has over three numbers or the training share is 0."""
        shares = [float(share) for share in self.split.split(",") if share]
        return shares if len(shares) <= 3 and any(shares[:1]) else []

    @property
    def stages(self) -> list[DataStage]:
        """The initial stage (TRAIN_DATA and SEQ_LEN), then the stages in DATA_STAGES. In this
        list, a stage with from_tokens may start inside a batch. `with_stage_begins` moves such stages.
        """
        stages = [DataStage(0, self.train_data, self.seq_len)]
        for given in self._given_stages:
            tokens, last = given.get("from_tokens"), stages[-1]
            first = given.get("from_samples", -(-(tokens or 0) // self.seq_len))
            train_data, seq_len = given.get("train_data", last.train_data), given.get("seq_len", last.seq_len)
            stages.append(DataStage(first, train_data, seq_len, tokens))
        return stages

    @property
    def _given_stages(self) -> list[dict[str, Any]]:
        return list(json.loads(self.data_stages or "[]"))

    @property
    def longest_sample(self) -> int:
        """Tokens per sample in the stage with the longest samples."""
        return max(stage.seq_len for stage in self.stages)

    @property
    def stage_blends(self) -> list[str]:
        """The train_data blends in DATA_STAGES, in order."""
        return [given["train_data"] for given in self._given_stages if "train_data" in given]

    def with_stage_blends(self, blends: Sequence[str]) -> str:
        """Returns DATA_STAGES with `blends` in place of `stage_blends`."""
        left = iter(blends)
        changed = [
            stage | ({"train_data": next(left)} if "train_data" in stage else {})
            for stage in self._given_stages
        ]
        return json.dumps(changed) if changed else ""

    def microbatch_samples(self, seq_len: int) -> int:
        """Micro-batch size of a stage with `seq_len` tokens per sample, counted in samples of SEQ_LEN tokens.

        It is MBSZ, or seq_len / SEQ_LEN (one sample of the stage) if that is larger.
        """
        return max(self.mbsz, seq_len // self.seq_len)

    def with_stage_begins(
        self: _Settings, consumed: int = 0, skipped: Sequence[tuple[int, int]] = (),
        begun: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[_Settings, list[str]]:  # fmt: skip
        """Rounds stages' from_tokens up to a batch start; returns new settings and a message per moved stage.

        `consumed`, `skipped`: see `stage_begin_problems`. `begun`: stages that have begun and do not move.
        """
        given, lines = self._given_stages, []
        for number, (stage, found) in enumerate(zip(given, self.stages[1:], strict=True), 1):
            if found.from_tokens is None:
                continue
            first = -(-found.from_tokens // self.seq_len)
            old = begun[number - 1] if number <= len(begun) else {}
            if old.get("from_tokens") == found.from_tokens:
                first = old["first_sample"]
            elif around := self._batch_around(first, consumed, skipped):
                first = around[1]
            stage["from_samples"] = first
            if first * self.seq_len != found.from_tokens:
                token = f"token {first * self.seq_len:,} (sample {first:,})"
                rule = f"stage {number} begins at {token}, the first batch at or after {found.place}"
                lines.append(f"DATA_STAGES: {rule}")
        return self.model_copy(update={"data_stages": json.dumps(given) if given else ""}), lines

    def stage_begin_problems(
        self, consumed: int = 0, skipped: Sequence[tuple[int, int]] = ()
    ) -> Iterator[str]:
        """Yields a line for each stage that would begin in the middle of a batch.

        Args:
            consumed: number of samples consumed so far.
            skipped: ranges of samples that the run skips, in order, each as (start, end).
        """
        for number, (before, stage) in enumerate(pairwise(self.stages), 1):
            if around := self._batch_around(stage.first_sample, consumed, skipped):
                fits = [str(place) for place in around if place > before.first_sample]
                rule = f"stage {number} begins at sample {stage.first_sample}, which is inside a batch"
                yield self.problem("data_stages", rule, f"start the stage at sample {' or '.join(fits)}")

    def _batch_around(self, sample: int, consumed: int, skipped: Sequence[tuple[int, int]]) -> list[int]:
        """Start and end of the batch that will contain `sample`; [] if a batch starts at `sample`."""
        left_out = sum(min(end, sample) - start for start, end in skipped if start < sample)
        own, begin = sample - left_out, consumed
        for step in self.batches.steps(own + 1, consumed):
            begin += min(own - begin, step.samples) // step.batch_size * step.batch_size
        is_inside = begin < own
        return [begin + left_out, begin + left_out + self.batches.size_at(begin)] if is_inside else []

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        remote = [name for _, name in blend_members(f"{self.train_data} {self.valid_data}") if is_url(name)]
        if remote and self.data_order == "megatron":
            fix = f"download {remote[0]} with moe-exp data pull, or set DATA_ORDER=stream"
            yield self.problem("data_order", "only supports local files", fix)
        fills, is_embedded = self.document_packing == "best_fit", not self.train_data
        own = "cannot be combined with the embedded corpus, which has its own validation data"
        yield from self.broken(
            (self.split and self.valid_data, "split",
             f"cannot be combined with VALID_DATA={self.valid_data}", "omit SPLIT or VALID_DATA"),
            (self.split and not self.split_shares, "split",
             "must be at most three numbers (training, validation, test), with the first above 0",
             "set for example SPLIT=99,1"),
            (fills and not self.eod_mask_loss, "document_packing",
             "pads samples with end-of-document tokens, which the loss must exclude",
             "set EOD_MASK_LOSS=true"),
            (fills and self.data_order == "megatron", "document_packing",
             "cannot be combined with DATA_ORDER=megatron", "set DATA_ORDER=stream"),
            (is_embedded and self.split, "split", own, "set TRAIN_DATA, or omit SPLIT"),
            (is_embedded and self.valid_data, "valid_data", own, "set TRAIN_DATA, or omit VALID_DATA"),
            (is_embedded and self.vocab_size < EMBEDDED_VOCAB_SIZE, "vocab_size",
             f"the embedded corpus (TRAIN_DATA is empty) has {EMBEDDED_VOCAB_SIZE} distinct tokens",
             f"set VOCAB_SIZE to at least {EMBEDDED_VOCAB_SIZE}, or set TRAIN_DATA"),
        )  # fmt: skip
        if self.data_stages:
            yield from self._stage_problems()

    def _stage_problems(self) -> Iterator[str]:
        """Yields a line for every stage that breaks a rule."""
        if self.data_order == "megatron":
            rule = "cannot be combined with DATA_ORDER=megatron, which has one order for the whole run"
            yield self.problem("data_stages", rule, "set DATA_ORDER=stream")
        try:
            stages, total = self.with_stage_begins()[0].stages, sum(s.samples for s in self.batches.steps())
            problems = [self._stage_problem(*pair, total) for pair in pairwise(stages)]
        except (ValueError, ZeroDivisionError):  # caused by settings that another rule reports
            return
        for number, (stage, problem) in enumerate(zip(stages[1:], problems, strict=True), 1):
            if problem:
                rule, fix = problem
                yield self.problem("data_stages", f"stage {number} {rule}", fix)
            if bad := [path for _, path in blend_members(stage.train_data) if is_url(path)]:
                rule = f"stage {number} has {bad[0]}, but stages only support local files"
                yield self.problem("data_stages", rule, "download the data with moe-exp data pull")

    def _stage_problem(self, before: DataStage, stage: DataStage, total: int) -> tuple[str, str] | None:
        """The first rule that the stage violates, and a fix; None if the stage is valid."""
        begins = f"begins at {stage.place},"
        if stage.first_sample <= before.first_sample:
            fix = "put the stages in order, at least a batch apart"
            return f"{begins} but the previous stage at {before.place}", fix
        if stage.first_sample >= total:
            end = f"{total} samples" if stage.from_tokens is None else f"{total * self.seq_len} tokens"
            return f"{begins} but the run ends after {end}", "start the stage earlier, or raise TRAIN_ITERS"
        factor, rest = divmod(stage.seq_len, self.seq_len)
        if rest:
            rule = f"has seq_len={stage.seq_len}, which must be a multiple of SEQ_LEN={self.seq_len}"
            return rule, f"set seq_len to {max(1, factor) * self.seq_len} or {(factor + 1) * self.seq_len}"
        size, replicas = self.microbatch_samples(stage.seq_len), self.data_parallel_size
        steps = self.batches.steps(total)
        ends = accumulate(step.samples for step in steps)
        sizes = {step.batch_size for step, end in zip(steps, ends, strict=True) if end > stage.first_sample}
        unit = size * replicas * (self.pp if self.vpp else 1)  # Megatron's schedule for VPP
        bad = [self.gbsz] if size % factor else sorted(n for n in {self.gbsz, *sizes} if n % unit)
        if not bad:
            return None
        rule = f"has seq_len={stage.seq_len}, so each sample counts as {factor} samples of SEQ_LEN,"
        rule += f" but a batch of {bad[0]} is not a multiple of the {size} samples per micro-batch"
        rule += f" times DP={replicas}"
        rule += f" times PP={self.pp} (VPP)" if self.vpp else ""
        if not size % factor and self.gbsz % unit == 0:
            return rule, f"use multiples of {unit} for all steps of RAMPUP_BATCH_SIZE"
        other = "" if self.vpp else f", or MBSZ to a multiple of {factor}"
        return rule, f"set GBSZ to a multiple of {unit}{other}"
