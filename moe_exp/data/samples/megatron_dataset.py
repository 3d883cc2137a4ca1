"""Samples in the order of Megatron-LM, by megatron-core's own GPTDataset and BlendedDataset.

Same files, SEED, SEQ_LEN, TRAIN_ITERS and GBSZ give the samples of a run of Megatron-LM.

Megatron keeps the order in index files, and finds them again by the path of the tokens and the settings: when
other text has been tokenized to the same path, it reads the new tokens by the old documents' lengths. Here
every folder of index files belongs to one content of the token files (`dataset.fingerprint_of`), and gets its
name when it is complete.
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
    """Samples of a GPTDataset or a BlendedDataset of such, by number. The interface is `dataset.Samples`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def stage_at(self, index: int) -> DataStage:
        return DataStage(0, int(self._dataset[0]["tokens"].numel()))

    def sample(self, index: int) -> Int64Array:
        """Sample number `index`: int64 token ids of shape [S1]; ValueError if there are not that many, as a
        longer run has another order from its first sample on.
        """
        if not 0 <= index < len(self._dataset):
            rule = f"Megatron's order was built for {len(self._dataset)} samples"
            fix = "start with the TRAIN_ITERS that the run is to have"
            raise ValueError(f"sample index {index}: {rule}. Fix: {fix}.")
        item = self._dataset[index]
        return np.append(item["tokens"].numpy(), item["labels"][-1].numpy())

    def batch(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.sample(index) for index in range(first, first + count)]))

    def origin(self, index: int) -> Origin:
        """The origin of a sample, whose documents are the file's sequences."""
        dataset = self._dataset
        if isinstance(dataset, BlendedDataset):
            dataset[index]  # which opens its index files
            part, index = dataset.dataset_index[index], int(dataset.dataset_sample_index[index])
            dataset = dataset.datasets[part]
        _, documents, *_ = dataset._query_document_sample_shuffle_indices(index)  # 0.19 adds their lengths
        return Origin(str(dataset.dataset_path), tuple(int(document) for document in documents))


@dataclass(frozen=True)
class MegatronOrder:
    """Settings that Megatron's order depends on."""

    train: str  # TRAIN_DATA
    valid: str  # VALID_DATA; empty with `split`, or if nothing is evaluated
    split: str  # empty: `train` and `valid` are read whole
    seq_len: int
    seed: int
    num_train_samples: int  # of the whole run, TRAIN_ITERS * GBSZ
    num_valid_samples: int  # of all evaluations of the run, as Megatron-LM counts them; 0: no validation

    @property
    def prefixes(self) -> list[list[str]]:
        """Prefixes of the training files, and of the validation files if there are any."""
        return [[prefix for _, prefix in parse_blend(text)] for text in (self.train, self.valid) if text]


def megatron_samples(order: MegatronOrder, cache_dir: Path) -> tuple[MegatronSamples, MegatronSamples | None]:
    """Training and validation samples. Collective: every rank calls it; torch.distributed is up if several.

    The first call for an order writes about 12 bytes a sample and 4 a document and epoch under `cache_dir`;
    rank 0 does, so the nodes of a job have to share that folder.

    Raises:
        ValueError: a file is missing or damaged, a part is smaller than a sample, or prefixes without weights
            hold too few samples.
    """
    shares = parse_split(order.split)[:2] if order.split else [(0.0, 1.0)] * len(order.prefixes)
    if order.split and order.num_valid_samples and shares[1] is None:
        fix = "set EVAL_INTERVAL=0, or for instance SPLIT=99,1"
        raise setting_error("split", order.split, "leaves nothing for validation", fix)
    # checked here, as Megatron would look for samples of an empty part without end
    for position, share in enumerate(shares):
        if share is None or (position and not order.num_valid_samples):
            continue
        for prefix in order.prefixes[min(position, len(order.prefixes) - 1)]:
            num_tokens = part_tokens(TokenFiles(prefix), share, by_sequence=True)
            if num_tokens <= order.seq_len:
                rule = f"has {num_tokens} tokens for {'validation' if position else 'training'}"
                rule += f", one sample needs SEQ_LEN + 1 = {order.seq_len + 1}"
                raise ValueError(f"{prefix}: {rule}. Fix: use more data or a smaller SEQ_LEN.")
    train, valid = _in_cache(order, cache_dir)
    for name, text, dataset, num_samples in (
        ("TRAIN_DATA", order.train, train, order.num_train_samples),
        ("VALID_DATA", order.valid or order.train, valid, order.num_valid_samples),
    ):
        if dataset is not None and len(dataset) < num_samples:
            rule = f"without weights Megatron reads prefixes once, {len(dataset)} samples"
            rule += f", and the run takes {num_samples}"
            fix = "give each prefix a weight, or set DATA_ORDER=stream"
            raise ValueError(f"{name}={text}: {rule}. Fix: {fix}.")
    return MegatronSamples(train), None if valid is None else MegatronSamples(valid)


def _in_cache(order: MegatronOrder, cache_dir: Path) -> tuple[Any, Any]:
    """Training and validation dataset, by index files that rank 0 has built if they were not there."""
    is_one_of_several = torch.distributed.is_initialized()
    is_first = not is_one_of_several or torch.distributed.get_rank() == 0
    barrier = torch.distributed.barrier if is_one_of_several else lambda: None
    found: list[Any] = [None, None]  # of rank 0: the folder, and whether it is complete
    with ExitStack() as stack:
        if is_first:
            # The paths too, as they are part of the names that Megatron gives the files.
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
            barrier()  # the folder is there
            _build(order, building)
            barrier()  # all have read what rank 0 wrote
            if is_first:
                for path in building.iterdir():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                building.rename(folder)
                what = "Megatron's sample order: built in %.1f s, kept in %s"
                logger.info(what, time.monotonic() - started, folder)
    barrier()
    return _build(order, folder)  # found there; the arrays stay on disk


def _build(order: MegatronOrder, folder: Path) -> tuple[Any, Any]:
    """Has Megatron build both datasets, or read them from `folder`."""
    has_validation = order.num_valid_samples > 0
    files: dict[str, Any] = {"split": order.split, "blend": _blend(order.train)}
    if not order.split:
        valid_blend = _blend(order.valid) if has_validation else None
        files = {"blend_per_split": [_blend(order.train), valid_blend, None]}
    # Files have their own type, and nothing is masked. The identifiers are part of the names of index files.
    tokenizer = SimpleNamespace(vocab_size=None, eod=None, unique_identifiers={"class": "_NoTokenizer"})
    config = GPTDatasetConfig(
        random_seed=order.seed,
        sequence_length=order.seq_len,
        path_to_cache=str(folder),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **files,
    )
    if config.split_matrix is not None:
        # No test part, and none for validation if there is no evaluation: Megatron would search one that is
        # empty without end.
        config.split_matrix[2 if has_validation else 1 :] = [None] * (1 if has_validation else 2)
    sizes = [order.num_train_samples, order.num_valid_samples, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid


def _blend(text: str) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights as Megatron reads them: None where there are none, for its own order by size."""
    blend = parse_blend(text)
    is_one_path = text.strip().startswith(blend[0][1])  # which may have spaces in it
    _, weights = get_blend_from_list([blend[0][1]] if is_one_path and len(blend) == 1 else text.split())
    return [prefix for _, prefix in blend], weights
