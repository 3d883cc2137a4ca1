"""The outputs of a shuffle: their names, how they are checked and published."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.data.documents import Tally
from moe_exp.data.shuffle.blocks import LineBlocks, sum_digests
from moe_exp.data.stage import Stage

logger = logging.getLogger(__name__)

_READ_BACK_BYTES = 2**18
_CHANGED = "The disk, or another program, has changed it. Fix: give --start-over."


def output_paths(folder: Path, name: str, num_shards: int) -> list[Path]:
    """The validation file and the shards."""
    width = max(2, len(str(num_shards - 1)))
    shards = (f"{name}.chunk.{shard:0{width}d}.jsonl" for shard in range(num_shards))
    return [folder / file_name for file_name in (f"{name}.val.jsonl", *shards)]


def check_split(first_input: Path, settings: Mapping[str, Any], read: Tally, valid: Tally) -> None:
    """Checks that there are documents for training.

    Raises:
        ValueError: there are none.
    """
    if not read.num_documents:
        raise ValueError(f"input={first_input}: there is no document in the input. Fix: another input.")
    num_train = read.num_documents - valid.num_documents
    if not num_train:
        rule = f"all {read.num_documents} documents are for validation, none is left for training"
        fix = "give a smaller fraction, or more documents with different texts"
        raise ValueError(f"valid_fraction={settings['valid_fraction']}: {rule}. Fix: {fix}.")
    if valid.num_documents == 1:
        what = "%s: 1 of %d documents is for validation: its loss says little about other texts"
        logger.warning(what, settings["name"], read.num_documents)
    if num_train < settings["num_shards"]:
        what = "%d documents for training in %d shards: some are empty"
        logger.warning(what, num_train, settings["num_shards"])


@dataclass(frozen=True)
class Shard:
    """An output that was read back.

    Args:
        path: of the file.
        num_documents: lines in it.
        hash: of the file, as `file_hash` gives it.
        line_hash: sum of the XXH3-128 of its lines modulo 2**128.
    """

    path: Path
    num_documents: int
    hash: str
    line_hash: int

    @classmethod
    def read_back(cls, path: Path, num_documents: int) -> Shard:
        """Reads a file that was written.

        Raises:
            ValueError: it does not have `num_documents` lines.
        """
        # What is kept of a line is gone with its block.
        lines = LineBlocks(_READ_BACK_BYTES, path.stat().st_size + 1)
        whole, digest, num_lines, line_hash = xxhash.xxh3_128(), xxhash.xxh3_128_digest, 0, 0
        for begin, end in lines.read(path):
            whole.update(lines.view[:end])
            find, view, digests = lines.buffer.find, lines.view, []
            while begin < end:
                line_end = find(b"\n", begin)
                digests.append(digest(view[begin:line_end]))
                begin = line_end + 1
            num_lines, line_hash = num_lines + len(digests), line_hash + sum_digests(b"".join(digests))
        if num_lines != num_documents:
            rule = f"{num_lines} documents were read back, {num_documents} were written"
            raise ValueError(f"{path}: {rule}. {_CHANGED}")
        return cls(path, num_lines, whole.hexdigest(), line_hash % 2**128)


def finish(
    stage: Stage, outputs: Sequence[Shard], read: Tally, valid: Tally, line_hash: int
) -> dict[str, Any]:
    """Publishes the validation file and the shards, and returns the manifest.

    Args:
        stage: whose folder has them.
        outputs: in the order of `output_paths`.
        read: all documents.
        valid: those for validation.
        line_hash: sum of the XXH3-128 of all lines modulo 2**128.

    Raises:
        ValueError: the lines that were read back are not those of the input.
    """
    if sum(shard.line_hash for shard in outputs) % 2**128 != line_hash:
        rule = "the lines that were read back are not those of the input"
        raise ValueError(f"{stage.folder}: {rule}. {_CHANGED}")
    train_hash = (read.text_hash - valid.text_hash) % 2**128
    num_train, num_text_bytes = (
        getattr(read, name) - getattr(valid, name) for name in ("num_documents", "num_text_bytes")
    )
    train = Tally(num_train, num_text_bytes, train_hash)
    return stage.finish_folder(
        [shard.path for shard in outputs],
        hashes={shard.path: shard.hash for shard in outputs},
        read=read.to_json(),
        train=train.to_json(),
        valid=valid.to_json(),
        line_hash=f"{line_hash:032x}",
        valid_file=outputs[0].path.name,
        num_documents={shard.path.name: shard.num_documents for shard in outputs},
    )
