"""Settings of a mixture, as a mixture.yaml has them.

tokenizer: meta-llama/Llama-3.1-8B      # or vocab_size: 32000, to train one
total_tokens: 20e9
sources:
  - source: fineweb_edu_10bt
    weight: 0.7
    filters: [gopher-quality]
  - source: code/
    name: code
    weight: 0.3
    max_epochs: 4
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moe_exp.data.convert.benchmarks import benchmarks_of
from moe_exp.data.convert.convert import ConvertSettings
from moe_exp.data.convert.duplicates import near_duplicates
from moe_exp.data.convert.named_filters import NamedFilter
from moe_exp.data.kinds import TextRule
from moe_exp.host.files import read_yaml

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class MixedSource(BaseModel):
    """One source.

    Args:
        source: as `moe-exp data prepare` takes it.
        name: of its files; default: that of the source.
        weight: share of the tokens of the training, relative to the other weights.
        max_epochs: how often its tokens may be read, at most; needs `total_tokens`.
        patterns, revision, text_field, text_documents: as of `prepare`.
        languages, min_language_score, min_score, min_chars, max_chars, limit, skip_bad: as of `prepare`.
        filters: filters by name.
        dedup: keep one of each text.
        near_dedup: options of near-duplicate removal; {} for the defaults.
        decontaminate: JSONL file of benchmark texts or lm-eval:TASK, or several.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    name: str = ""
    weight: float = Field(gt=0, allow_inf_nan=False)
    max_epochs: float | None = Field(default=None, gt=0)
    patterns: list[str] = []
    revision: str | None = None
    text_field: str | None = None
    text_documents: Literal["file", "block"] = "file"
    languages: list[str] = []
    min_language_score: float | None = None
    min_score: float | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    limit: int | None = None
    skip_bad: bool = False
    filters: list[str | dict[str, Any]] = []
    dedup: bool = False
    near_dedup: dict[str, int] | None = None
    decontaminate: str | list[str] = []

    @field_validator("name")
    @classmethod
    def _is_file_name(cls, name: str) -> str:
        if name and not _NAME.fullmatch(name):
            raise ValueError("must be letters, digits, '.', '_' and '-'")
        return name

    def conversion(self) -> ConvertSettings:
        """Settings of its conversion.

        Raises:
            ValueError: one is wrong.
        """
        same = ("min_language_score", "min_score", "min_chars", "max_chars", "limit", "skip_bad", "dedup")
        return ConvertSettings(
            languages=tuple(self.languages),
            filters=tuple(map(NamedFilter.parse, self.filters)),
            near_dedup=near_duplicates(self.near_dedup),
            decontaminate=benchmarks_of(self.decontaminate),
            rule=TextRule(self.text_documents),
            **{name: getattr(self, name) for name in same},
        )


class Mixture(BaseModel):
    """A mixture.

    Args:
        sources: at least one; their names differ.
        tokenizer: folder, tokenizer.json, SentencePiece .model, or name on the hub.
        eod_token: the token that ends a document; by default what the tokenizer's files say.
        prepend_bos: begin every document with the tokenizer's BOS.
        vocab_size: tokens of a tokenizer that is trained on the sources, in place of `tokenizer`.
        total_tokens: of the training, for `max_epochs` and the number of epochs in the datasheet.
        seed: of the order and of the validation documents.
        valid_fraction: of the distinct texts of each source, for validation.
        num_shards: training files of each source.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: list[MixedSource] = Field(min_length=1)
    tokenizer: str | None = None
    eod_token: str | None = None
    prepend_bos: bool = False
    vocab_size: int | None = Field(default=None, ge=258)
    total_tokens: float | None = Field(default=None, gt=0)
    seed: int = 0
    valid_fraction: float = Field(default=0.005, gt=0, lt=1)
    num_shards: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Mixture:
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise ValueError("either tokenizer or vocab_size must be given")
        if self.prepend_bos and self.tokenizer is None:
            raise ValueError("prepend_bos needs a tokenizer: one that is trained here has no BOS")
        if self.total_tokens is None and any(one.max_epochs for one in self.sources):
            raise ValueError("max_epochs needs total_tokens")
        return self


def read_mixture(path: Path) -> Mixture:
    """Reads a mixture.

    Raises:
        ValueError: it is no mixture, with the first setting that is wrong.
        OSError: it cannot be read.
    """
    content = read_yaml(path, fix="correct the file")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be settings with a list of sources. Fix: see docs/corpus.md.")
    try:
        return Mixture(**content)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        rule = rule.replace("Extra inputs are not permitted", "is not a setting")
        rule = rule.replace("Field required", "is missing")
        place = ".".join(str(one) for one in first["loc"]) or "settings"
        given = "" if isinstance(first["input"], dict) else f"={first['input']}"
        raise ValueError(f"{path}: {place}{given}: {rule}. Fix: see docs/corpus.md.") from None


def effective_weights(
    weights: Sequence[float],
    tokens: Sequence[int],
    max_epochs: Sequence[float | None],
    total_tokens: float | None,
) -> list[float]:
    """Shares of the tokens of a training, none of which reads a source more often than it may.

    What a source gives up goes to the others, in the ratio of their weights.

    Args:
        weights: asked for, relative.
        tokens: of each source.
        max_epochs: how often each may be read; None for any number.
        total_tokens: of the training; None if no source has a limit.

    Raises:
        ValueError: all sources together are too few.
    """
    limits = [float("inf")] * len(weights)
    if total_tokens:
        epochs = zip(max_epochs, tokens, strict=True)
        limits = [limit * count / total_tokens if limit else float("inf") for limit, count in epochs]
    if sum(limits) < 1:
        most = sum(limits) * (total_tokens or 0)
        rule = f"total_tokens={total_tokens:.4g}: the sources with their max_epochs give {most:.4g}"
        raise ValueError(f"{rule}. Fix: give fewer tokens, more epochs, or another source.")
    shares, full = [0.0] * len(weights), set[int]()
    while True:
        left = 1 - sum(limits[index] for index in full)
        rest = sum(weight for index, weight in enumerate(weights) if index not in full)
        for index, weight in enumerate(weights):
            shares[index] = limits[index] if index in full else left * weight / rest
        over = {index for index, share in enumerate(shares) if index not in full and share > limits[index]}
        if not over:
            return shares
        full |= over
        if len(full) == len(weights):
            return limits
