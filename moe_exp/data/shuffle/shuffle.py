"""Global shuffle: JSONL files -> shards in random order and a validation file, within a memory budget.

The order depends on the seed and on each document's place in the inputs, in their order, and on nothing else:
the same bytes for every memory budget, on every machine, after any interruption (`buckets` says how). Shards
are ranges of that order; they differ by one document at most. A document is for validation if a hash of
seed and text is under the wanted fraction, or, if that holds for none, smallest: duplicates stay together,
and there is always one. Lines are written as they were read, without BOM and CR, each with an LF.

    <name>.chunk.00.jsonl ... <name>.chunk.31.jsonl   <name>.val.jsonl   manifest.json
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_exp.data.documents import check_apart, estimate_line_bytes, find_inputs
from moe_exp.data.kinds import FILES, TextRule
from moe_exp.data.shuffle.blocks import LINE_BYTES, DocumentBlocks, LineBlocks
from moe_exp.data.shuffle.buckets import NUM_KEYS, Dealer, State, ValidTally, spread
from moe_exp.data.shuffle.outputs import Shard, check_split, finish, output_paths, stage_settings
from moe_exp.data.stage import MAKE_AGAIN, Stage, check_free_disk, run_stage
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.memory import available_memory_bytes
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

TASKS = "tasks.json"  # in the working folder of a shuffle by tasks
SMALLEST_MEMORY_BYTES = 16 * 2**20
DEFAULT_VALID_FRACTION = 0.005
_MOST_BUCKETS = 256  # two open files each
_BUCKET_FILL = 0.85  # random keys: buckets differ
_BLOCK_BYTES = 2**21
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
        piece_bytes = (budget_bytes - _FIXED_BYTES) * 3 // 4
        return cls(budget_bytes, budget_bytes // 16, budget_bytes // 8, piece_bytes)


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
    rule: TextRule = FILES,
) -> dict[str, Any]:
    """Shuffles the documents of files into shards and a validation file, and returns the manifest.

    An interrupted call continues where it was when it is made again, with another budget too.

    Args:
        inputs: files of the kinds of `moe_exp.data.kinds`, and folders of them. Their order counts.
        output: folder to make.
        name: what the names of the files in it begin with.
        seed: of the order and of the choice of validation documents.
        num_shards: training files. If there are fewer documents, some are empty.
        valid_fraction: of the distinct texts, for validation; at least one.
        memory_bytes: the budget; a quarter of what the machine, or the container, has left by default.
        text_field: name of the field with the text.
        skip_bad: skip and count lines that are no documents instead of stopping at the first.
        start_over: see `run_stage`.
        rule: what a document of a text file is.

    Raises:
        ValueError: a setting or an input cannot be used, too little disk, no document is left for training;
            see `run_stage`, `LineBlocks`.
        BadDocument: a line is no document, or a compressed file is damaged.
    """
    sizes = {"num_shards": num_shards, "valid_fraction": valid_fraction, "memory_bytes": memory_bytes}
    inputs = check_shuffle(inputs, output, text_field=text_field, name=name, **sizes)
    memory = Memory.of(checked_memory(memory_bytes))
    settings = stage_settings(name, seed, num_shards, valid_fraction, text_field, skip_bad, rule)
    with run_stage("shuffle", output, settings=settings, inputs=inputs, start_over=start_over) as stage:
        if stage.was_done:
            return stage.manifest or {}
        if (stage.folder / TASKS).exists():
            num_tasks = read_json(stage.folder / TASKS, fix=MAKE_AGAIN)["tasks"]
            fix = f"give --tasks {num_tasks} (in prepare: --shuffle-tasks), or --start-over"
            raise ValueError(f"tasks=1: {output} was begun by {num_tasks} tasks. Fix: {fix}.")
        shuffling = Shuffling(stage, inputs, memory, rule=rule)
        estimate = estimate_shuffle(inputs, memory.budget_bytes)
        check_free_disk(stage.folder, estimate["disk_bytes"] - shuffling.bytes_on_disk(), "the shuffle")
        return shuffling.run(estimate["line_bytes"])


def estimate_shuffle(inputs: Sequence[Path], memory_bytes: int | None = None) -> dict[str, int]:
    """input_bytes, line_bytes (decompressed, roughly), memory_bytes, num_buckets, disk_bytes and seconds."""
    memory = Memory.of(checked_memory(memory_bytes))
    sizes = {path: path.stat().st_size for path in find_inputs(inputs)}
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


def checked_memory(memory_bytes: int | None) -> int:
    """The budget, by default a quarter of what the machine or the container has left.

    Raises:
        ValueError: it is too small.
    """
    if memory_bytes is None:
        return max(SMALLEST_MEMORY_BYTES, available_memory_bytes() // 4)
    if memory_bytes < SMALLEST_MEMORY_BYTES:
        fix = "give 256MB or more"
        raise ValueError(f"memory={memory_bytes / 2**20:g}MB: must be at least 16 MB. Fix: {fix}.")
    return memory_bytes


def check_shuffle(
    inputs: Iterable[Path], output: Path, *, text_field: str = "text", **settings: Any
) -> list[Path]:
    """Checks the arguments of a shuffle before anything is touched, and returns its input files.

    Args:
        inputs, output, text_field: as `shuffle`.
        settings: of `check_settings`.

    Raises:
        ValueError: one of them cannot be used.
    """
    files = find_inputs(inputs, text_field=text_field)
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
    checked_memory(memory_bytes)
    if not name or Path(name).name != name:
        raise ValueError(f"name={name}: must be a file name without folders. Fix: another name.")
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1. Fix: give 32.")
    if not 0 < valid_fraction < 1:
        fix = f"give {DEFAULT_VALID_FRACTION}"
        raise ValueError(f"valid_fraction={valid_fraction}: must be between 0 and 1. Fix: {fix}.")


def shuffle_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Rows of the table at the end."""
    train, valid = manifest["train"], manifest["valid"]
    rows: dict[str, object] = {"training documents": train["num_documents"]}
    rows |= {"validation documents": valid["num_documents"]}
    rows |= {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    rows |= {"training text": bytes_text(train["num_text_bytes"])}
    rows |= {"validation text": bytes_text(valid["num_text_bytes"])}
    return rows | {"shards": len(manifest["outputs"]) - 1, "seconds": manifest["seconds"]}


class Shuffling:
    """A shuffle that is running in the folder of its stage.

    Args:
        stage: with the settings.
        inputs: files to read.
        memory: division of the budget.
        save_bytes: that are read between two savings of the state.
        rule: what a document of a text file is.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[Path],
        memory: Memory,
        save_bytes: int = _SAVE_BYTES,
        rule: TextRule = FILES,
    ):
        self.rule = rule
        self.stage, self.inputs, self.memory, self.save_bytes = stage, inputs, memory, save_bytes
        self.settings = stage.key["settings"]
        self.outputs = output_paths(stage.folder, self.settings["name"], self.settings["num_shards"])
        self.state_path = stage.folder / "state.json"
        self.state: State | None = None
        if self.state_path.exists():
            self.state = State.from_json(read_json(self.state_path, fix=MAKE_AGAIN))

    def bytes_on_disk(self) -> int:
        """Bytes that an interrupted call has written."""
        return sum(path.stat().st_size for path in self.stage.folder.iterdir())

    def run(self, line_bytes: int) -> dict[str, Any]:
        """Everything that is left to do; returns the manifest.

        Args:
            line_bytes: what the inputs are thought to have, decompressed.
        """
        threshold = int(self.settings["valid_fraction"] * NUM_KEYS)
        state = self.state = self.state or State(_num_buckets(line_bytes, self.memory), ValidTally(threshold))
        self._save()  # so that what began is known
        if not state.is_spread:
            self._spread(state, line_bytes)
        check_split(self.inputs[0], self.settings, state.read, state.valid.total())
        dealer = Dealer(state, self.stage.folder, self.outputs, self.memory.piece_bytes, self._save)
        total_bytes = sum(lines for lines, _ in state.bucket_sizes)
        with progress("shuffle, pass 2 of 2", total_bytes, done=sum(state.output_sizes)) as advance:
            for num_bytes in dealer.deal():
                advance(num_bytes)
        dealer.lines.free()
        starts = [dealer.shard_start(shard) for shard in range(dealer.num_shards + 1)]
        return self._finish(state, [end - start for start, end in pairwise(starts)])

    def _save(self) -> None:
        assert self.state is not None
        write_json(self.state_path, self.state.to_json())

    def _spread(self, state: State, line_bytes: int) -> None:
        # Small enough for a core's cache, large enough that each bucket gets some.
        block_bytes = min(self.memory.block_bytes, max(_BLOCK_BYTES, 2**16 * state.num_buckets))
        options = {name: self.settings[name] for name in ("text_field", "skip_bad")}
        how = {"text_field": options["text_field"], "rule": self.rule}
        lines = LineBlocks(block_bytes, self.memory.longest_bytes, **how)
        # as much for short lines as two buffers
        most_lines = min(_MOST_LINES, max(1, 2 * self.memory.block_bytes // LINE_BYTES))
        reader = DocumentBlocks(lines, state.read, **options, most_lines=most_lines)
        seed, done = self.settings["seed"], sum(size for size, _ in state.bucket_sizes)
        with progress("shuffle, pass 1 of 2", line_bytes, done=done) as advance:
            saving: dict[str, Any] = {"save": self._save, "save_bytes": self.save_bytes}
            passes = spread(state, self.inputs, self.stage.folder, reader, seed=seed, **saving)
            for num_bytes in passes:
                advance(num_bytes)

    def _finish(self, state: State, shard_counts: list[int]) -> dict[str, Any]:
        counts = dict(zip(self.outputs, [state.valid.total().num_documents, *shard_counts], strict=True))
        made = []
        with progress("shuffle, check", sum(path.stat().st_size for path in counts)) as advance:
            for path, count in counts.items():
                made.append(Shard.read_back(path, count))
                advance(path.stat().st_size)
        self.state_path.unlink()
        return finish(self.stage, made, state.read, state.valid.total(), state.line_hash)
