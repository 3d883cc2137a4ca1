"""Global shuffle: JSONL files -> shards in random order and a validation file, within a memory budget.

The order depends on the seed and on each document's place in the inputs, in their order, and on nothing else:
the same bytes for every memory budget, on every machine, after any interruption (`buckets` says how). Shards
are ranges of that order; they differ by one document at most. A document is for validation where a hash of
seed and text is under the wanted fraction, or, where that holds for none, smallest: duplicates stay together,
and there is always one. Lines are written as they were read, without BOM and CR, each with an LF.

    <name>.chunk.00.jsonl ... <name>.chunk.31.jsonl   <name>.val.jsonl   manifest.json
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.data.documents import JSONL_SUFFIXES, Tally, check_apart, estimate_line_bytes, jsonl_files_in
from moe_exp.data.shuffle.blocks import LINE_BYTES, DocumentBlocks, LineBlocks, sum_digests
from moe_exp.data.shuffle.buckets import NUM_KEYS, Dealer, State, ValidTally, spread
from moe_exp.data.stage import Stage, check_free_disk, run_stage
from moe_exp.host.files import write_json
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

SMALLEST_MEMORY_BYTES = 16 * 2**20
DEFAULT_VALID_FRACTION = 0.005
_MOST_BUCKETS = 256  # two open files each
_BUCKET_FILL = 0.85  # random keys: buckets differ
_BLOCK_BYTES = 2**21
_READ_BACK_BYTES = 2**18
_FIXED_BYTES = 2**22  # of small objects, and of what the allocator keeps: the same for every budget
_MOST_LINES = 2**16
_SAVE_BYTES = 2**29
_BYTES_PER_SECOND = 120e6  # one core of 2023, a disk that keeps up


@dataclass(frozen=True)
class Memory:
    """How a budget is divided; the interpreter and its packages (about 45 MB) come on top.

    Args:
        budget_bytes: all of it.
        block_bytes: of the buffer that the inputs are read into, at most.
        longest_bytes: of a line: parsing takes up to six times as much.
        piece_bytes: of the documents that are put in order at once.
    """

    budget_bytes: int
    block_bytes: int
    longest_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, budget_bytes: int) -> Memory:
        """The usual division."""
        return cls(
            budget_bytes, budget_bytes // 16, budget_bytes // 8, (budget_bytes - _FIXED_BYTES) * 3 // 4
        )


def find_jsonl(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as their .jsonl, .jsonl.gz and .jsonl.zst files, sorted by name, without
    *.val.jsonl.

    Raises:
        ValueError: there is none, one is of another kind or there twice.
    """
    files: list[Path] = []
    for path in paths:
        found = jsonl_files_in(path) if path.is_dir() else [path]
        if not found:
            raise ValueError(
                f"input={path}: the folder has no file that ends with {' or '.join(JSONL_SUFFIXES)}. Fix:"
                " another folder."
            )
        files += found
    if not files:
        raise ValueError("input=: no file is given. Fix: give JSONL files or folders of them.")
    for path, times in Counter(file.resolve() for file in files).items():
        if not path.is_file():
            raise ValueError(f"input={path}: there is no such file. Fix: check the path.")
        if not path.name.endswith(JSONL_SUFFIXES):
            raise ValueError(
                f"input={path}: does not end with {' or '.join(JSONL_SUFFIXES)}. Fix: convert it, or"
                " rename it."
            )
        if times > 1:
            raise ValueError(
                f"input={path}: is given {times} times, its documents would be there as often. Fix: give it"
                " once."
            )
    return files


def shuffle(
    inputs: Sequence[Path],
    output: Path,
    *,
    name: str,
    seed: int = 0,
    num_shards: int = 32,
    valid_fraction: float = DEFAULT_VALID_FRACTION,
    memory_bytes: int | None = None,
    text_field: str = "text",
    skip_bad: bool = False,
    start_over: bool = False,
) -> dict[str, Any]:
    """Shuffles the documents of files into shards and a validation file, and returns the manifest.

    An interrupted call goes on where it was when it is made again, with another budget too.

    Args:
        inputs: .jsonl, .jsonl.gz and .jsonl.zst files, and folders of them. Their order counts.
        output: folder to make.
        name: what the names of the files in it begin with.
        seed: of the order and of the choice of validation documents.
        num_shards: training files. Where there are fewer documents, some are empty.
        valid_fraction: of the distinct texts, for validation; at least one.
        memory_bytes: the budget; a quarter of what the machine, or the container, has left by default.
        text_field: name of the field with the text.
        skip_bad: skip and count lines that are no documents instead of stopping at the first.
        start_over: see `run_stage`.

    Raises:
        ValueError: a setting or an input cannot be used, too little disk, no document is left for training;
            see `run_stage`, `LineBlocks`.
        BadDocument: a line is no document, or a compressed file is damaged.
    """
    sizes = {"num_shards": num_shards, "valid_fraction": valid_fraction, "memory_bytes": memory_bytes}
    inputs = check_shuffle(inputs, output, name=name, **sizes)
    memory = Memory.of(_checked_memory(memory_bytes))
    settings = {"name": name, "seed": seed, "num_shards": num_shards, "valid_fraction": valid_fraction}
    settings |= {"text_field": text_field, "skip_bad": skip_bad}
    with run_stage("shuffle", output, settings=settings, inputs=inputs, start_over=start_over) as stage:
        if stage.was_done:
            return stage.manifest or {}
        shuffling = Shuffling(stage, inputs, memory)
        estimate = estimate_shuffle(inputs, memory.budget_bytes)
        check_free_disk(stage.folder, estimate["disk_bytes"] - shuffling.bytes_on_disk(), "the shuffle")
        return shuffling.run(estimate["line_bytes"])


def estimate_shuffle(inputs: Sequence[Path], memory_bytes: int | None = None) -> dict[str, int]:
    """What a shuffle will take: input_bytes, line_bytes (decompressed, roughly), memory_bytes, num_buckets,
    disk_bytes and seconds.
    """
    memory = Memory.of(_checked_memory(memory_bytes))
    sizes = {path: path.stat().st_size for path in find_jsonl(inputs)}
    line_bytes = estimate_line_bytes(sizes)
    num_buckets = _num_buckets(line_bytes, memory)
    return {
        "input_bytes": sum(sizes.values()),
        "line_bytes": line_bytes,
        "memory_bytes": memory.budget_bytes,
        "num_buckets": num_buckets,
        # The lines and their records (a few percent), and once more the bucket that is dealt out, which is
        # removed afterwards.
        "disk_bytes": int(1.05 * line_bytes * (1 + 1 / num_buckets)),
        "seconds": math.ceil(line_bytes / _BYTES_PER_SECOND),
    }


def _num_buckets(line_bytes: int, memory: Memory) -> int:
    return min(_MOST_BUCKETS, 1 + int(line_bytes / (_BUCKET_FILL * memory.piece_bytes)))


def _checked_memory(memory_bytes: int | None) -> int:
    if memory_bytes is None:
        return max(SMALLEST_MEMORY_BYTES, available_memory_bytes() // 4)
    if memory_bytes < SMALLEST_MEMORY_BYTES:
        raise ValueError(
            f"memory={memory_bytes / 2**20:g}MB: must be at least 16 MB. Fix: give 256MB or more."
        )
    return memory_bytes


def check_shuffle(inputs: Iterable[Path], output: Path, **settings: Any) -> list[Path]:
    """Checks the arguments of a shuffle before anything is touched, and returns its input files.

    Args:
        inputs, output: as `shuffle`.
        settings: of `check_settings`.

    Raises:
        ValueError: one of them cannot be used.
    """
    files = find_jsonl(inputs)
    check_settings(**settings)
    check_apart(files, output)
    return files


def check_settings(
    *,
    name: str,
    num_shards: int = 32,
    valid_fraction: float = DEFAULT_VALID_FRACTION,
    memory_bytes: int | None = None,
) -> None:
    """Checks what can be checked of a shuffle whose inputs are not there yet; arguments as of `shuffle`.

    Raises:
        ValueError: one of them cannot be used.
    """
    _checked_memory(memory_bytes)
    if not name or Path(name).name != name:
        raise ValueError(f"name={name}: must be a file name without folders. Fix: another name.")
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1. Fix: give 32.")
    if not 0 < valid_fraction < 1:
        raise ValueError(
            f"valid_fraction={valid_fraction}: must be between 0 and 1. Fix: give {DEFAULT_VALID_FRACTION}."
        )


def shuffle_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Rows of the table at the end."""
    train, valid = manifest["train"], manifest["valid"]
    rows: dict[str, object] = {
        "training documents": train["num_documents"],
        "validation documents": valid["num_documents"],
    }
    rows |= {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    text_bytes = {
        "training text, MB": train["num_text_bytes"],
        "validation text, MB": valid["num_text_bytes"],
    }
    rows |= {name: round(num_bytes / 1e6, 1) for name, num_bytes in text_bytes.items()}
    return rows | {"shards": len(manifest["outputs"]) - 1, "seconds": manifest["seconds"]}


class Shuffling:
    """A shuffle that is running in the folder of its stage.

    Args:
        stage: with the settings.
        inputs: files to read.
        memory: division of the budget.
        save_bytes: that are read between two savings of the state.
    """

    def __init__(self, stage: Stage, inputs: Sequence[Path], memory: Memory, save_bytes: int = _SAVE_BYTES):
        self.stage, self.inputs, self.memory, self.save_bytes = stage, inputs, memory, save_bytes
        self.settings = stage.key["settings"]
        name, num_shards = self.settings["name"], self.settings["num_shards"]
        width = max(2, len(str(num_shards - 1)))
        names = [
            f"{name}.val.jsonl",
            *(f"{name}.chunk.{shard:0{width}d}.jsonl" for shard in range(num_shards)),
        ]
        self.outputs = [stage.folder / file_name for file_name in names]
        self.state_path = stage.folder / "state.json"
        self.state = (
            State.from_json(json.loads(self.state_path.read_text())) if self.state_path.exists() else None
        )

    def bytes_on_disk(self) -> int:
        """What an interrupted call has written."""
        return sum(path.stat().st_size for path in self.stage.folder.iterdir())

    def run(self, line_bytes: int) -> dict[str, Any]:
        """Everything that is left to do; returns the manifest.

        Args:
            line_bytes: what the inputs are thought to have, decompressed.
        """
        threshold = int(self.settings["valid_fraction"] * NUM_KEYS)
        state = self.state = self.state or State(_num_buckets(line_bytes, self.memory), ValidTally(threshold))
        if not state.is_spread:
            self._spread(state, line_bytes)
        self._check_split(state)
        dealer = Dealer(state, self.stage.folder, self.outputs, self.memory.piece_bytes, self._save)
        total_bytes = sum(lines for lines, _ in state.bucket_sizes)
        with progress("shuffle, pass 2 of 2", total_bytes, done=sum(state.output_sizes)) as advance:
            for num_bytes in dealer.deal():
                advance(num_bytes)
        del dealer.view
        return self._finish(
            state,
            [dealer.shard_start(shard + 1) - dealer.shard_start(shard) for shard in range(dealer.num_shards)],
        )

    def _save(self) -> None:
        assert self.state is not None
        write_json(self.state_path, self.state.to_json())

    def _spread(self, state: State, line_bytes: int) -> None:
        # Small enough for a core's cache, large enough that each bucket gets some.
        block_bytes = min(self.memory.block_bytes, max(_BLOCK_BYTES, 2**16 * state.num_buckets))
        lines = LineBlocks(block_bytes, self.memory.longest_bytes)
        options = {name: self.settings[name] for name in ("text_field", "skip_bad")}
        # as much for short lines as two buffers
        most_lines = min(_MOST_LINES, max(1, 2 * self.memory.block_bytes // LINE_BYTES))
        reader = DocumentBlocks(lines, state.read, **options, most_lines=most_lines)
        seed, done = self.settings["seed"], sum(size for size, _ in state.bucket_sizes)
        with progress("shuffle, pass 1 of 2", line_bytes, done=done) as advance:
            passes = spread(
                state,
                self.inputs,
                self.stage.folder,
                reader,
                seed=seed,
                save=self._save,
                save_bytes=self.save_bytes,
            )
            for num_bytes in passes:
                advance(num_bytes)

    def _check_split(self, state: State) -> None:
        num_documents, num_valid = state.read.num_documents, state.valid.total().num_documents
        if not num_documents:
            raise ValueError(
                f"input={self.inputs[0]}: there is no document in the input. Fix: another input."
            )
        if num_valid == num_documents:
            rule = f"all {num_documents} documents are for validation, none is left for training"
            fix = "give a smaller fraction, or more documents with different texts"
            raise ValueError(f"valid_fraction={self.settings['valid_fraction']}: {rule}. Fix: {fix}.")
        if num_documents - num_valid < self.settings["num_shards"]:
            logger.warning(
                "%d documents for training in %d shards: some are empty",
                num_documents - num_valid,
                self.settings["num_shards"],
            )

    def _finish(self, state: State, shard_counts: list[int]) -> dict[str, Any]:
        valid = state.valid.total()
        hashes = check_outputs(
            dict(zip(self.outputs, [valid.num_documents, *shard_counts], strict=True)), state.line_hash
        )
        read = state.read
        train_hash = (read.text_hash - valid.text_hash) % 2**128
        train = Tally(
            read.num_documents - valid.num_documents, read.num_text_bytes - valid.num_text_bytes, train_hash
        )
        self.state_path.unlink()
        return self.stage.finish_folder(
            self.outputs,
            hashes=hashes,
            read=read.to_json(),
            train=train.to_json(),
            valid=valid.to_json(),
            line_hash=f"{state.line_hash:032x}",
            valid_file=self.outputs[0].name,
            num_documents={
                path.name: count
                for path, count in zip(self.outputs, [valid.num_documents, *shard_counts], strict=True)
            },
        )


def check_outputs(counts: dict[Path, int], line_hash: int) -> dict[Path, str]:
    """Reads files back and returns their hashes, if their lines are as many as they should be, and together
    those that were read.

    Args:
        counts: number of lines of each.
        line_hash: sum of the XXH3-128 of all lines modulo 2**128.

    Raises:
        ValueError: they are not.
    """
    fix = "The disk, or another program, has changed it. Fix: give --start-over."
    hashes, found_hash = {}, 0
    with progress("shuffle, check", sum(path.stat().st_size for path in counts)) as advance:
        for path, count in counts.items():
            hashes[path], num_lines, line_hash_of_file = _read_back(path)
            if num_lines != count:
                raise ValueError(f"{path}: {num_lines} documents were read back, {count} were written. {fix}")
            found_hash = (found_hash + line_hash_of_file) % 2**128
            advance(path.stat().st_size)
    if found_hash != line_hash:
        raise ValueError(
            f"{next(iter(counts)).parent}: the lines that were read back are not those of the input. {fix}"
        )
    return hashes


def _read_back(path: Path) -> tuple[str, int, int]:
    """Hash, number of lines, and sum of their hashes; what is kept of a line is gone with its block."""
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
    return whole.hexdigest(), num_lines, line_hash % 2**128


# How much memory there is to use.


_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


_UNKNOWN_BYTES = 2 * 2**30


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """What this process may still use: of the machine, and of the container's or job's control group (version
    2 or 1), the smaller.

    Where neither says (macOS), 2 GB.
    """
    found = [left for left in (_of_machine(proc), *_of_groups(proc, cgroup)) if left is not None]
    return max(0, min(found, default=_UNKNOWN_BYTES))


def _of_machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_groups(proc: Path, cgroup: Path) -> list[int | None]:
    """Left in each group from the process's own up to the root: any of them may have the limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left: list[int | None] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = cgroup if not controllers else cgroup / "memory"
        names = (
            ("memory.max", "memory.current")
            if not controllers
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = root / name.lstrip("/")
        # In a container the group's name may be one of the host, which is not there to be seen: then the root
        # is the container's.
        left += [
            _left(group, *names)
            for group in (folder, *folder.parents)
            if group == root or root in group.parents
        ]
    return left


def _left(group: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    return limit - used + int(statistics.get("inactive_file", 0))  # cache that goes when memory is asked for
