"""Samples in Megatron-LM's order, from megatron-core's GPTDataset and BlendedDataset.

The same files, SEED, SEQ_LEN, TRAIN_ITERS and GBSZ give the same samples as in Megatron-LM.

Megatron stores the order in index files, which it finds by the data's path and settings. If different text is
tokenized to the same path, Megatron reads the new tokens with the old document lengths. To avoid this, this
module uses a separate index folder for each fingerprint of the data (`dataset.fingerprint_of`). A folder gets
its final name only when it is complete.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from moe_exp.config import setting_error
from moe_exp.data.samples.dataset import DataStage, Origin, fingerprint_of
from moe_exp.data.tokens.tokens import Int64Array, TokenFiles, parse_blend, parse_split, part_tokens

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

logger = logging.getLogger(__name__)

INDEX_FOLDER = "megatron_index"


class MegatronSamples:
    """A GPTDataset or BlendedDataset with the interface of `dataset.Samples`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def stage_at(self, index: int) -> DataStage:
        return DataStage(0, int(self._dataset[0]["tokens"].numel()))

    def sample(self, index: int) -> Int64Array:
        """Sample `index`: int64 token ids of shape [S1]. Raises ValueError if `index` is beyond the last
        sample, because Megatron would put a larger number of samples in a different order.
        """
        if not 0 <= index < len(self._dataset):
            rule = f"Megatron's order was built for {len(self._dataset)} samples"
            fix = "start a new run with a large enough TRAIN_ITERS"
            raise ValueError(f"sample index {index}: {rule}. Fix: {fix}.")
        item = self._dataset[index]
        return np.append(item["tokens"].numpy(), item["labels"][-1].numpy())

    def batch(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.sample(index) for index in range(first, first + count)]))

    def origin(self, index: int) -> Origin:
        """Origin of a sample; its `documents` are the indices of the sequences in the file."""
        dataset = self._dataset
        if isinstance(dataset, BlendedDataset):
            dataset[index]  # opens its index files
            part, index = dataset.dataset_index[index], int(dataset.dataset_sample_index[index])
            dataset = dataset.datasets[part]
        # megatron-core 0.19 adds their lengths
        _, documents, *_ = dataset._query_document_sample_shuffle_indices(index)
        return Origin(str(dataset.dataset_path), tuple(int(document) for document in documents))


@dataclass(frozen=True)
class MegatronOrder:
    """Settings that determine Megatron's sample order."""

    train: str  # TRAIN_DATA
    valid: str  # VALID_DATA; empty with `split` or without evaluation
    split: str  # empty: `train` and `valid` are used completely
    seq_len: int
    seed: int
    num_train_samples: int  # of the whole run, TRAIN_ITERS * GBSZ
    num_valid_samples: int  # of all evaluations of the run, as in Megatron-LM; 0: no validation

    @property
    def prefixes(self) -> list[list[str]]:
        """Prefixes of the training files and, if present, of the validation files."""
        return [[prefix for _, prefix in parse_blend(text)] for text in (self.train, self.valid) if text]


def megatron_samples(order: MegatronOrder, cache_dir: Path) -> tuple[MegatronSamples, MegatronSamples | None]:
    """Training and validation samples. All ranks must call this; with several ranks, torch.distributed must
    be initialized.

    On the first call for an order, rank 0 writes index files to `cache_dir`, which all nodes must share.
    The files take about 12 bytes per sample, plus 4 bytes per document and epoch.

    Raises:
        ValueError: if a file is missing or damaged, the training or validation data are smaller than one
            sample, or data without weights have too few samples (Megatron repeats only data with weights).
    """
    shares = parse_split(order.split)[:2] if order.split else [(0.0, 1.0)] * len(order.prefixes)
    if order.split and order.num_valid_samples and shares[1] is None:
        fix = "set EVAL_INTERVAL=0, or for example SPLIT=99,1"
        raise setting_error("split", order.split, "leaves no documents for validation", fix)
    # Checked here because Megatron would search an empty part for samples forever.
    for position, share in enumerate(shares):
        if share is None or (position and not order.num_valid_samples):
            continue
        for prefix in order.prefixes[min(position, len(order.prefixes) - 1)]:
            num_tokens = part_tokens(TokenFiles(prefix), share, by_sequence=True)
            if num_tokens <= order.seq_len:
                rule = f"has {num_tokens} tokens for {'validation' if position else 'training'}"
                rule += f", but one sample requires SEQ_LEN + 1 = {order.seq_len + 1}"
                raise ValueError(f"{prefix}: {rule}. Fix: use more data or a smaller SEQ_LEN.")
    train, valid = _in_cache(order, cache_dir)
    for name, text, dataset, num_samples in (
        ("TRAIN_DATA", order.train, train, order.num_train_samples),
        ("VALID_DATA", order.valid or order.train, valid, order.num_valid_samples),
    ):
        if dataset is not None and len(dataset) < num_samples:
            rule = f"has {len(dataset)} samples, which Megatron repeats only if weights are given"
            rule += f", but the run requires {num_samples}"
            fix = "add a weight before each prefix, or set DATA_ORDER=stream"
            raise ValueError(f"{name}={text}: {rule}. Fix: {fix}.")
    return MegatronSamples(train), None if valid is None else MegatronSamples(valid)


def _in_cache(order: MegatronOrder, cache_dir: Path) -> tuple[Any, Any]:
    """Loads the training and validation datasets; rank 0 builds their index files if they are missing."""
    is_one_of_several = torch.distributed.is_initialized()
    is_first = not is_one_of_several or torch.distributed.get_rank() == 0
    barrier = torch.distributed.barrier if is_one_of_several else lambda: None
    found: list[Any] = [None, None]  # from rank 0: the folder, and whether it is complete
    with ExitStack() as stack:
        if is_first:
            # `order` includes the paths, because they are part of the names of Megatron's index files.
            key = json.dumps([asdict(order), [fingerprint_of(prefixes) for prefixes in order.prefixes]])
            name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
            folder = cache_dir.absolute() / INDEX_FOLDER / name
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(folder.with_name(f"{name}.lock")))
            found = [folder, folder.is_dir()]
        if is_one_of_several:
            torch.distributed.broadcast_object_list(found)
        folder, is_complete = found
        if not is_complete:
            building, started = folder.with_name(f"{folder.name}.building"), time.monotonic()
            if is_first:
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
            barrier()  # the folder exists
            _build(order, building)
            barrier()  # all ranks have read the files, so the folder can be renamed
            if is_first:
                for path in building.iterdir():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                building.rename(folder)
                logger.info("built Megatron's sample order in %.1f s: %s", time.monotonic() - started, folder)
    barrier()
    return _build(order, folder)  # maps the existing files


def _build(order: MegatronOrder, folder: Path) -> tuple[Any, Any]:
    """Builds both datasets with Megatron, or reads their index files from `folder`."""
    has_validation = order.num_valid_samples > 0
    files: dict[str, Any] = {"split": order.split, "blend": _blend(order.train)}
    if not order.split:
        valid_blend = _blend(order.valid) if has_validation else None
        files = {"blend_per_split": [_blend(order.train), valid_blend, None]}
    # A stub: the token files define their dtype and nothing is masked, but Megatron hashes the identifiers
    # into the names of its index files.
    tokenizer = SimpleNamespace(vocab_size=None, eod=None, unique_identifiers={"class": "_NoTokenizer"})
    config = GPTDatasetConfig(
        random_seed=order.seed, sequence_length=order.seq_len, path_to_cache=str(folder), tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, **files,
    )  # fmt: skip
    if config.split_matrix is not None:
        # No test part, and no validation part without evaluation: Megatron searches an empty part forever.
        config.split_matrix[2 if has_validation else 1 :] = [None] * (1 if has_validation else 2)
    sizes = [order.num_train_samples, order.num_valid_samples, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid


def _blend(text: str) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights as Megatron parses them; the weights are None if `text` has no weights."""
    blend = parse_blend(text)
    is_one_path = text.strip().startswith(blend[0][1])  # a path may contain spaces
    _, weights = get_blend_from_list([blend[0][1]] if is_one_path and len(blend) == 1 else text.split())
    return [prefix for _, prefix in blend], weights
