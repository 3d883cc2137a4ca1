"""Settings of the data, and DATA_STAGES: from some sample on, other training data or longer samples.

    - from_samples: 200000
      train_data: 0.5 web 0.5 books
    - from_tokens: 4e9
      train_data: good
      seq_len: 4096

A stage has what the one before has, except what it names. Samples are counted in SEQ_LEN tokens throughout:
one of F times SEQ_LEN counts as F. So batches have as many tokens as before, and the schedules of learning
rate and batch size continue.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

from moe_exp.config.sections.optimizer import OptimizerSettings
from moe_exp.config.setting_types import (
    Blend,
    NonNegative,
    OptionalNumbers,
    PathText,
    Rate,
    Stages,
    blend_members,
    data,
)
from moe_exp.host.devices import count_gpus
from moe_exp.host.files import is_url

PREFETCHED_MICROBATCHES = 2  # that each of the NUM_WORKERS has ready
# Of the tokenizer trained on the embedded corpus.
EMBEDDED_VOCAB_SIZE = 2048

_Settings = TypeVar("_Settings", bound="DataSettings")


@dataclass(frozen=True)
class DataStage:
    """Training data from a sample on."""

    first_sample: int  # in samples of SEQ_LEN tokens
    train_data: str
    seq_len: int  # tokens per sample
    # where it should begin, if given in tokens; `first_sample`: the next batch
    from_tokens: int | None = None

    @property
    def place(self) -> str:
        """Where it begins, in the unit in which it was given."""
        return f"sample {self.first_sample}" if self.from_tokens is None else f"token {self.from_tokens}"


class DataSettings(OptimizerSettings):
    """The section Data."""

    train_data: Blend = data(
        "",
        "folder, file or pattern of text (.txt, .md, .jsonl, .json, .parquet, .arrow), or Megatron "
        ".bin/.idx prefixes; 'A' or 'WEIGHT A WEIGHT B ...'; empty: the embedded corpus",
    )
    valid_data: Blend = data(
        "", "validation data, written as in TRAIN_DATA; empty: part of text is held out (docs/corpus.md)"
    )
    text_documents: Literal["file", "block"] = data(
        "file", "what a document of a text file is: the file, or each block between blank lines"
    )
    prepend_bos: bool = data(False, "begin every document of text with the BOS of TOKENIZER")
    text_field: str = data("text", "field of .jsonl, column of .parquet and .arrow, with the text")
    split: OptionalNumbers = data(
        "",
        "instead of VALID_DATA: shares of TRAIN_DATA's documents for training, validation and test: "
        "'99,1', '969,30,1'",
    )
    data_stages: Stages = data(
        "",
        "later stages of the training data, each from a sample or token on with other files, weights or "
        "sample length: a YAML file, or YAML (docs/corpus.md)",
        measured="",
    )
    data_order: Literal["stream", "megatron"] = data(
        "stream",
        "order of the samples; stream: independent of TRAIN_ITERS; megatron: that of Megatron-LM's "
        "GPTDataset",
    )
    document_mask: bool = data(
        False,
        "attention stays inside a document, and positions begin at 0 in each; documents end with the "
        "end-of-document token",
    )
    document_tokens: Rate = data(
        0.0,
        "with DOCUMENT_MASK: length of the part of its document that a token's sample has, mean over tokens, "
        "for FLOPs and planner; 0: measured on the token files of TRAIN_DATA",
        compared=False,
    )
    eod_mask_loss: bool = data(
        False, "leave out the loss of predicting a document's first token from the end of the one before"
    )
    document_packing: Literal["concatenate", "best_fit"] = data(
        "concatenate",
        "how documents become samples; concatenate: all are one text, cut every SEQ_LEN tokens; best_fit: "
        "whole documents that fill a sample best, cut only if longer",
    )
    allow_other_data: bool = data(
        False, "resume from a checkpoint of other data or another order, at the same sample number"
    )
    num_workers: NonNegative = data(
        ...,
        "processes per rank that read training data ahead; 0: the rank reads it itself (default: 2 "
        "with GPUs, else 0)",
        default_factory=lambda: 2 if count_gpus() else 0,
        compared=False,
    )
    tokenizer: PathText = data(
        "",
        "Hugging Face tokenizer folder or tokenizer.json; checked against VOCAB_SIZE; empty: one is trained "
        "on text",
    )
    data_dir: PathText = data("data", "folder of prepared corpora, and of the indices of DATA_ORDER=megatron")

    @property
    def context_stripes(self) -> int:
        """Parts of a sequence, each of which all context parallel ranks share: several with documents, so
        that all ranks have about as many pairs of tokens.
        """
        wanted = (4, 2) if self.document_mask and self.cp > 1 else ()
        return next((number for number in wanted if self.seq_len % (2 * self.cp * number) == 0), 1)

    @property
    def split_shares(self) -> list[float]:
        """SPLIT as numbers; empty if it breaks the rule of their number."""
        shares = [float(share) for share in self.split.split(",") if share]
        return shares if len(shares) <= 3 and any(shares[:1]) else []

    @property
    def stages(self) -> list[DataStage]:
        """TRAIN_DATA and SEQ_LEN from sample 0 on, then the stages of DATA_STAGES. Those in tokens begin with
        a batch after `with_stage_begins`.
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
        found: list[dict[str, Any]] = json.loads(self.data_stages or "[]")
        return found

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest samples that a model is trained on, in any stage."""
        return max(stage.seq_len for stage in self.stages)

    @property
    def stage_blends(self) -> list[str]:
        """The blends that DATA_STAGES names, in order."""
        return [given["train_data"] for given in self._given_stages if "train_data" in given]

    def with_stage_blends(self, blends: Sequence[str]) -> str:
        """DATA_STAGES with other blends in place of `stage_blends`."""
        left = iter(blends)
        changed = [
            stage | ({"train_data": next(left)} if "train_data" in stage else {})
            for stage in self._given_stages
        ]
        return json.dumps(changed) if changed else ""

    def microbatch_samples(self, seq_len: int) -> int:
        """Samples of SEQ_LEN tokens in a micro-batch of samples of `seq_len`: MBSZ, or one of the longer."""
        return max(self.mbsz, seq_len // self.seq_len)

    def with_stage_begins(
        self: _Settings, consumed: int = 0, skipped: Sequence[tuple[int, int]] = (),
        begun: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[_Settings, list[str]]:  # fmt: skip
        """The settings whose stages in tokens begin with the next batch, and a line for each that this moves.

        `consumed`, `skipped`: see `stage_begin_problems`. Stages that are `begun` keep their first sample.
        """
        given, lines = self._given_stages, []
        for number, (stage, found) in enumerate(zip(given, self.stages[1:], strict=True), 1):
            if found.from_tokens is None:
                continue
            first = -(-found.from_tokens // self.seq_len)
            old = begun[number - 1] if number <= len(begun) else {}
            if old.get("from_tokens") == found.from_tokens:
                first = old["first_sample"]
            else:
                left_out = _left_out(skipped, first)
                own = first - left_out
                if consumed < own and (begin := self._batch_start(own, consumed)) != own:
                    first = begin + self.batches.size_at(begin) + left_out
            stage["from_samples"] = first
            if first * self.seq_len != found.from_tokens:
                token = f"token {first * self.seq_len:,} (sample {first:,})"
                rule = f"stage {number} begins at {token}, the first batch from {found.place} on"
                lines.append(f"DATA_STAGES: {rule}")
        return self.model_copy(update={"data_stages": json.dumps(given) if given else ""}), lines

    def stage_begin_problems(
        self, consumed: int = 0, skipped: Sequence[tuple[int, int]] = ()
    ) -> Iterator[str]:
        """Yields a line for each stage that would begin within a batch, which depends on the run so far: the
        number of samples `consumed`, and the ranges of the stream that are left out, in order.
        """
        for number, (before, stage) in enumerate(pairwise(self.stages), 1):
            first = stage.first_sample
            left_out = _left_out(skipped, first)
            own = first - left_out
            if consumed < own and (begin := self._batch_start(own, consumed)) != own:
                fits = [begin + left_out, begin + left_out + self.batches.size_at(begin)]
                fits = [place for place in fits if place > before.first_sample]
                rule = f"stage {number} begins at sample {first}, where no batch begins"
                fix = f"let it begin at sample {' or '.join(map(str, fits))}"
                yield self.problem("data_stages", rule, fix)

    def _batch_start(self, sample: int, begin: int) -> int:
        """First sample of the batch that has `sample`, of those from `begin` on."""
        for step in self.batches.steps(sample + 1, begin):
            if begin + step.samples > sample:
                return begin + (sample - begin) // step.batch_size * step.batch_size
            begin += step.samples
        return begin

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        remote = [name for _, name in blend_members(f"{self.train_data} {self.valid_data}") if is_url(name)]
        if remote and self.data_order == "megatron":
            fix = f"fetch {remote[0]} with moe-exp data pull, or set DATA_ORDER=stream"
            yield self.problem("data_order", "reads files of this machine only", fix)
        fills = self.document_packing == "best_fit"
        yield from self.broken(
            (self.split and self.valid_data, "split",
             f"VALID_DATA={self.valid_data} names the validation files", "set one of the two"),
            (self.split and not self.split_shares, "split",
             "must be up to three numbers, for training, validation and test, and the first more than 0",
             "set for instance SPLIT=99,1"),
            (fills and not self.eod_mask_loss, "document_packing",
             "fills samples up with end-of-document tokens, whose loss must not count",
             "set EOD_MASK_LOSS=true"),
            (fills and self.data_order == "megatron", "document_packing",
             "is an order of our own, and DATA_ORDER=megatron Megatron's", "set DATA_ORDER=stream"),
        )  # fmt: skip
        if not self.train_data:
            yield from self._embedded_problems()
        if self.data_stages:
            yield from self._stage_problems()

    def _embedded_problems(self) -> Iterator[str]:
        """Settings that do not go with the embedded corpus."""
        for name in ("split", "valid_data"):
            if getattr(self, name):
                rule = "the embedded corpus brings its own validation set"
                yield self.problem(name, rule, f"set TRAIN_DATA or drop {name.upper()}")
        if self.vocab_size < EMBEDDED_VOCAB_SIZE:
            rule = f"the embedded corpus (TRAIN_DATA is empty) has {EMBEDDED_VOCAB_SIZE} tokens"
            fix = f"set VOCAB_SIZE to at least {EMBEDDED_VOCAB_SIZE}, or TRAIN_DATA"
            yield self.problem("vocab_size", rule, fix)

    def _stage_problems(self) -> Iterator[str]:
        """A line for every rule that a stage breaks."""
        if self.data_order == "megatron":
            rule = "DATA_ORDER=megatron has one order for the whole run"
            yield self.problem("data_stages", rule, "set DATA_ORDER=stream")
        try:
            stages, total = self.with_stage_begins()[0].stages, sum(s.samples for s in self.batches.steps())
            problems = [self._stage_problem(*pair, total) for pair in pairwise(stages)]
        except (ValueError, ZeroDivisionError):  # of settings that another rule names
            return
        for number, (stage, problem) in enumerate(zip(stages[1:], problems, strict=True), 1):
            if problem:
                rule, fix = problem
                yield self.problem("data_stages", f"stage {number} {rule}", fix)
            if bad := [path for _, path in blend_members(stage.train_data) if is_url(path)]:
                rule = f"stage {number} has {bad[0]}, and a stage takes files on this machine"
                yield self.problem("data_stages", rule, "fetch it with moe-exp data pull")

    def _stage_problem(self, before: DataStage, stage: DataStage, total: int) -> tuple[str, str] | None:
        """The first rule that a stage breaks, and the fix."""
        begins = f"begins at {stage.place},"
        if stage.first_sample <= before.first_sample:
            fix = "put the stages in order, at least a batch apart"
            return f"{begins} the one before at {before.place}", fix
        if stage.first_sample >= total:
            end = total if stage.from_tokens is None else f"{total * self.seq_len} tokens"
            fix = "let it begin earlier, or set TRAIN_ITERS higher"
            return f"{begins} and the run ends after {end}", fix
        factor, rest = divmod(stage.seq_len, self.seq_len)
        if rest:
            rule = f"has seq_len={stage.seq_len}, no multiple of SEQ_LEN={self.seq_len}"
            return rule, f"give {max(1, factor) * self.seq_len} or {(factor + 1) * self.seq_len}"
        size, replicas = self.microbatch_samples(stage.seq_len), self.data_parallel_size
        steps = self.batches.steps(total)
        ends = accumulate(step.samples for step in steps)
        sizes = {step.batch_size for step, end in zip(steps, ends, strict=True) if end > stage.first_sample}
        unit = size * replicas * (self.pp if self.vpp else 1)  # Megatron's schedule for VPP
        bad = [self.gbsz] if size % factor else sorted(n for n in {self.gbsz, *sizes} if n % unit)
        if not bad:
            return None
        rule = f"has seq_len={stage.seq_len}, so a sample counts as {factor}, and a batch of {bad[0]} is no"
        rule += f" multiple of the {size} samples of a micro-batch times DP={replicas}"
        rule += f" times PP={self.pp} (VPP)" if self.vpp else ""
        if not size % factor and self.gbsz % unit == 0:
            return rule, f"let the steps of RAMPUP_BATCH_SIZE be multiples of {unit}"
        other = "" if self.vpp else f", or MBSZ to one of {factor}"
        return rule, f"set GBSZ to a multiple of {unit}{other}"


def _left_out(skipped: Sequence[tuple[int, int]], first: int) -> int:
    return sum(min(end, first) - start for start, end in skipped if start < first)
