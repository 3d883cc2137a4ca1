"""Token files of shards, joined into the files that one run over all of them would have made."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.config import setting_error
from moe_exp.data.stage import check_free_disk, free_disk, run_stage
from moe_exp.data.tokens.ranged import read_ranges
from moe_exp.data.tokens.tokens import (
    bin_idx_problem,
    bin_idx_tokens,
    manifest_of,
    order_problem,
    other_tokenizer,
    read_index,
    tokenizer_fact,
    tokenizer_facts,
    write_index,
)
from moe_exp.host.files import bytes_text
from moe_exp.host.progress import print_summary, progress

logger = logging.getLogger(__name__)

_COPY_BYTES = 2**22


def merge_token_files(prefixes: Sequence[Path], output: Path, *, start_over: bool = False) -> dict[str, Any]:
    """Joins token files of shards, those of other programs too, in order, and returns the manifest.

    Raises:
        ValueError: a file is missing or damaged, types differ, or `output` is one of the shards.
    """
    dtype, needed_bytes = _check(prefixes, output)
    inputs = [Path(f"{prefix}{suffix}") for prefix in prefixes for suffix in (".bin", ".idx")]
    what: dict[str, Any] = {"settings": {}, "inputs": inputs, "is_folder": False, "start_over": start_over}
    with run_stage("merge-tokens", output, **what, suffixes=(".bin", ".idx")) as stage:
        if stage.was_done:
            return stage.manifest or {}
        check_free_disk(output.parent, needed_bytes, f"{output.name}.bin")
        paths = [stage.folder / f"{output.name}{suffix}" for suffix in (".bin", ".idx")]
        with paths[0].open("wb") as file, progress("merging", needed_bytes) as advance:
            for prefix in prefixes:
                for chunk in read_ranges(str(prefix), _ranges(prefix)):
                    file.write(chunk)
                    advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        indices = [read_index(prefix) for prefix in prefixes]
        sizes = np.concatenate([index.sizes for index in indices])
        firsts = np.cumsum([0, *(len(index.sizes) for index in indices)])
        ends = [first + index.documents[1:] for first, index in zip(firsts, indices, strict=False)]
        write_index(paths[1], sizes, indices[0].dtype, np.concatenate([np.zeros(1, np.int64), *ends]))
        first = manifest_of(str(prefixes[0]))
        facts = {name: tokenizer_fact(first, name) for name in ("vocab_size", "eod_id")}
        known: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
        if not other_tokenizer(map(str, prefixes)):
            known["tokenizer"] = tokenizer_facts(first)
        known |= {"num_documents": sum(map(len, ends)), "num_tokens": int(sizes.sum(dtype=np.int64))}
        known["dtype"] = dtype
        return stage.finish_files(paths, **known)


def merge_dry_run(prefixes: Sequence[Path], output: Path) -> None:
    """Prints documents, tokens, bytes and free disk; writes nothing. Raises as `merge_token_files`."""
    dtype, needed_bytes = _check(prefixes, output)
    rows = {
        "inputs": f"{len(prefixes)} pairs of .bin and .idx, tokens as {dtype}",
        "documents": sum(len(read_index(prefix).documents) - 1 for prefix in prefixes),
        "tokens": sum(bin_idx_tokens(prefix) for prefix in prefixes),
        "disk": f"{bytes_text(needed_bytes)}, of {bytes_text(free_disk(output.parent))} free",
        "output": f"{output}.bin, {output}.idx",
    }
    print_summary("merge: what it would do", rows)
    check_free_disk(output.parent, needed_bytes, f"{output.name}.bin")


def _check(prefixes: Sequence[Path], output: Path) -> tuple[str, int]:
    """The type of the tokens, and the bytes of all files."""
    for prefix in prefixes:
        if wrong := bin_idx_problem(prefix, in_order=False):
            raise setting_error("merge", prefix, wrong, "tokenize that shard again")
        if prefix.absolute() == output.absolute():
            raise setting_error("output_prefix", output, "is one of the shards", "give another prefix")
    dtypes = {read_index(prefix).dtype.name: str(prefix) for prefix in prefixes}
    if len(dtypes) > 1:
        places = " and ".join(f"{dtype} in {prefix}" for dtype, prefix in dtypes.items())
        fix = "merge shards of one tokenizer"
        raise setting_error("merge", prefixes[0], f"tokens are stored as {places}", fix)
    if wrong := other_tokenizer(map(str, prefixes)):
        logger.warning("merge: %s", wrong)
    tokens = sum(bin_idx_tokens(prefix) * read_index(prefix).dtype.itemsize for prefix in prefixes)
    return next(iter(dtypes)), tokens + sum(Path(f"{prefix}.idx").stat().st_size for prefix in prefixes)


def _ranges(prefix: Path) -> Iterator[tuple[int, int]]:
    """Bytes of the .bin in the order of the sequences, as Megatron follows the pointers of an index."""
    dtype, sizes, pointers, _ = read_index(prefix)
    if order_problem(prefix) is None:
        num_bytes = int(sizes.sum(dtype=np.int64)) * dtype.itemsize
        for begin in range(0, num_bytes, _COPY_BYTES):
            yield begin, min(begin + _COPY_BYTES, num_bytes)
        return
    for begin, size in zip(pointers.tolist(), sizes.tolist(), strict=True):
        yield begin, begin + size * dtype.itemsize
