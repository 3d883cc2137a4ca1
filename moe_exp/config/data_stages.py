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

import json
from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.config.settings import Config


@dataclass(frozen=True)
class DataStage:
    """Training data from a sample on."""

    first_sample: int  # in samples of SEQ_LEN tokens
    train_data: str
    seq_len: int  # tokens per sample
    from_tokens: int | None = (
        None  # where it should begin, if given in tokens; `first_sample`: the next batch
    )

    @property
    def place(self) -> str:
        """Where it begins, in the unit in which it was given."""
        return f"sample {self.first_sample}" if self.from_tokens is None else f"token {self.from_tokens}"


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
