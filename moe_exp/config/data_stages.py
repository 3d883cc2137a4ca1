"""DATA_STAGES: from some sample on, other training data or longer samples. No torch.

    - from_samples: 200000
      train_data: 0.5 web 0.5 books
    - from_tokens: 4e9
      train_data: good
      seq_len: 4096

A stage has what the one before has, except what it names. Samples are counted in SEQ_LEN tokens throughout:
one of F times SEQ_LEN counts as F. So batches have as many tokens as before, and the schedules of learning
rate and batch size continue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from moe_exp.host.files import expanded, regular, shallow

if TYPE_CHECKING:
    from moe_exp.config.settings import Config

_BEGINS = ("from_samples", "from_tokens")
_KEYS = (*_BEGINS, "train_data", "seq_len")


@dataclass(frozen=True)
class DataStage:
    """Training data from a sample on.

    Args:
        first_sample: in samples of SEQ_LEN tokens.
        train_data: as TRAIN_DATA.
        seq_len: tokens per sample.
        from_tokens: where it should begin, if it was given in tokens: `first_sample` is of the next batch.
    """

    first_sample: int
    train_data: str
    seq_len: int
    from_tokens: int | None = None

    @property
    def place(self) -> str:
        """Where it begins, in the unit in which it was given."""
        return f"sample {self.first_sample}" if self.from_tokens is None else f"token {self.from_tokens}"


def read_stages(value: object) -> str:
    """The setting's text as JSON, from a YAML file, or from YAML in the setting itself.

    Raises:
        ValueError: the file cannot be read, or holds something else; without the name of the setting.
    """
    text = str(value).strip()
    if not text:
        return ""
    if not text.startswith(("[", "-", "{")):
        try:
            text = regular(expanded(text)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not text"
            raise ValueError(f"cannot be read as a file ({reason})") from None
    try:
        stages = yaml.safe_load(shallow(text))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0][:80]})") from None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError("must be a list of stages, each with from_samples or from_tokens")
    return json.dumps([_read_stage(number, stage) for number, stage in enumerate(stages, 1)])


def _read_stage(number: int, stage: dict[Any, Any]) -> dict[str, Any]:
    if unknown := [name for name in stage if name not in _KEYS]:
        raise ValueError(f"stage {number} has {str(unknown[0])[:40]!r}, which is none of {', '.join(_KEYS)}")
    begins = [name for name in _BEGINS if name in stage]
    if len(begins) != 1:
        raise ValueError(f"stage {number} must have one of from_samples and from_tokens")
    numbers = {name: _whole(number, name, stage[name]) for name in (*begins, "seq_len") if name in stage}
    data = stage.get("train_data")
    if data is not None and not (isinstance(data, str) and data.strip()):
        raise ValueError(f"stage {number}: train_data must be text as in TRAIN_DATA")
    if data is None and "seq_len" not in numbers:
        raise ValueError(f"stage {number} changes nothing: it needs train_data or seq_len")
    return numbers | ({} if data is None else {"train_data": data.strip()})


def _whole(number: int, name: str, value: object) -> int:
    try:
        found = float(value)  # type: ignore[arg-type]  # 4e9 is text for YAML
    except (TypeError, ValueError, OverflowError):
        found = -1.0
    if not (1 <= found < 2**53 and found == int(found)):
        raise ValueError(f"stage {number}: {name}={str(value)[:40]} must be a whole number of at least 1")
    return int(found)


def stages_of(config: Config) -> list[DataStage]:
    """TRAIN_DATA and SEQ_LEN from sample 0 on, then the stages of DATA_STAGES. Those in tokens begin with a
    batch after `with_stage_begins`.
    """
    stages = [DataStage(0, config.train_data, config.seq_len)]
    for given in json.loads(config.data_stages or "[]"):
        tokens, last = given.get("from_tokens"), stages[-1]
        first = given.get("from_samples", -(-(tokens or 0) // config.seq_len))
        data, seq_len = given.get("train_data", last.train_data), given.get("seq_len", last.seq_len)
        stages.append(DataStage(first, data, seq_len, tokens))
    return stages


def longest_sample(config: Config) -> int:
    """Tokens of the longest samples that a model is trained on, in any stage."""
    return max(stage.seq_len for stage in stages_of(config))


def stage_blends(config: Config) -> list[str]:
    """The blends that DATA_STAGES names, in order."""
    return [given["train_data"] for given in json.loads(config.data_stages or "[]") if "train_data" in given]


def with_stage_blends(config: Config, blends: Sequence[str]) -> str:
    """DATA_STAGES with other blends in place of `stage_blends`."""
    left = iter(blends)
    given = json.loads(config.data_stages or "[]")
    changed = [stage | ({"train_data": next(left)} if "train_data" in stage else {}) for stage in given]
    return json.dumps(changed) if changed else ""


def microbatch_samples(config: Config, seq_len: int) -> int:
    """Samples of SEQ_LEN tokens in a micro-batch of samples of `seq_len`: MBSZ, or one of the longer ones."""
    return max(config.mbsz, seq_len // config.seq_len)
