"""Token files: whose tokens all differ; that a tiny model learns at once, and with corrupt samples."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoint.small_job import VOCAB, small_settings
from helpers.jsonl import BinIdxWriter
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.data.tokens.tokens import parse_blend, write_token_files

DISTINCT_VOCAB = 60000
SEQ_LEN, GBSZ = 16, 4
# The loss falls from 5.6 to below 1 in the first half.
SETTINGS: dict[str, Any] = {
    "seq_len": SEQ_LEN, "gbsz": GBSZ, "lr": 0.01, "min_lr": 0.001, "warmup_iters": 5, "decay_iters": 100,
    "train_iters": 100, "num_workers": 0,
}  # fmt: skip


def write_tokens(prefix: Path, documents: Iterable[Any], vocab_size: int = 1000, eod_id: int = 0) -> Path:
    write_token_files(prefix, documents, vocab_size=vocab_size, eod_id=eod_id)
    return prefix


def write_distinct(prefix: str | Path, lengths: Iterable[int], first_id: int = 1) -> str:
    """Documents of the given lengths (EOD included) whose tokens all differ: a sample shows its place."""
    with BinIdxWriter(prefix, vocab_size=DISTINCT_VOCAB) as writer:
        for length in lengths:
            writer.add_document(range(first_id, first_id + length - 1))
            first_id += length - 1
    return str(prefix)


def samples_of(kind: str, blend: str, seq_len: int, num_samples: int, folder: Path) -> Any:
    """Samples in the order of DATA_ORDER=`kind`, of which Megatron's has about `num_samples`."""
    if kind == "stream":
        return SampleStream(parse_blend(blend), seq_len=seq_len, seed=1)
    from moe_exp.data.samples.megatron_dataset import MegatronOrder, megatron_samples

    order = MegatronOrder(blend, "", "", seq_len, 1, num_samples, num_valid_samples=0)
    return megatron_samples(order, folder)[0]


def write_corpus(folder: Path, num_documents: int = 1000) -> Path:
    """Documents of one window each, that count up in steps of one; returns the prefix."""
    numbers, places = range(num_documents), range(SEQ_LEN - 1)
    documents = ([1 + (number * 7 + place) % 60 for place in places] for number in numbers)
    return write_tokens(folder / "tokens", documents, VOCAB)


def corrupt(prefix: Path, samples: range, seed: int = 1234) -> list[int]:
    """Overwrites samples of a run by random tokens, where they lie in the .bin; returns their documents."""
    stream = SampleStream([(1.0, str(prefix))], seq_len=SEQ_LEN, seed=seed)
    documents = [stream.origin(number).documents[0] for number in samples]
    path = prefix.with_suffix(".bin")
    tokens = np.fromfile(path, dtype=np.uint16)
    for document in documents:
        # But for the first token, which is the last label of the window before.
        first, random = document * SEQ_LEN, np.random.default_rng(document)
        tokens[first + 1 : first + SEQ_LEN] = random.integers(100, VOCAB, SEQ_LEN - 1)
    tokens.tofile(path)
    return documents


def spiking_settings(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Settings of a run on it."""
    return small_settings(folder, name, **SETTINGS) | changes
