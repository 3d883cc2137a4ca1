"""First step (reader) and last step (writer) of a datatrove pipeline. Their document counts reveal losses.

A datatrove step is any callable that takes documents, rank and world size. These steps, and the filters
between them, are plain classes that can be pickled. datatrove's own objects are created only in the process
that runs the pipeline.
"""

import base64
import contextlib
import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_exp.data.convert.filters import Counts, Filter
from moe_exp.data.documents import Tally, read_documents, read_objects, skip_or_raise, text_in
from moe_exp.data.execution import Through, complete_files, task_stats
from moe_exp.data.kinds import FILES, TABLE_SUFFIXES, TextRule, is_stream, read_table
from moe_exp.host.files import ending, file_hash, write_json


@dataclass
class ReadFiles:
    """First step: each task reads every `num_tasks`-th file by the rules of `moe_exp.data.documents`.

    Columns or fields other than text and id become metadata, as in datatrove's readers. A document without an
    id gets the id `FILE/NUMBER`.
    """

    root: str
    files: list[str]  # relative to `root`
    num_tasks: int  # that share the files
    progress_folder: Path  # where tasks publish their progress, see `Through`
    text_field: str = "text"  # this and the others as in `ConvertSettings`
    skip_bad: bool = False
    limit: int | None = None
    rule: TextRule = FILES
    stats: Any = field(default=None, init=False, repr=False)
    tally: Tally = field(default_factory=Tally, init=False, repr=False)

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from datatrove.data import Document

        self.stats, self.tally, limit = task_stats("📖 - READER: checked"), Tally(), None
        if self.limit is not None:
            # the first tasks get the remainder
            limit = self.limit // self.num_tasks + (rank < self.limit % self.num_tasks)
        through = Through(self.progress_folder, rank)
        for name in self.task_files(rank):
            path = Path(self.root, name)
            first = self.tally.num_documents
            if limit == first:
                return
            for number, row in enumerate(self._rows(path, through)):
                text, found_id = row.pop(self.text_field), row.pop("id", None)
                if "metadata" in row:  # flattened into the other fields, as in datatrove's BaseReader
                    nested = row.pop("metadata")
                    if isinstance(nested, str):
                        with contextlib.suppress(json.JSONDecodeError):
                            nested = json.loads(nested)
                    row = (nested if isinstance(nested, dict) else {"metadata": nested}) | row
                yield Document(text, f"{name}/{number}" if found_id is None else found_id, metadata=row)
                if limit == self.tally.num_documents:
                    break
            through.end_file(path.stat().st_size)
            self.stats["input_files"].update(1)
            self.stats["documents"].update(self.tally.num_documents - first, "input_file")

    def task_files(self, rank: int) -> list[str]:
        return self.files[rank :: self.num_tasks]

    def _rows(self, path: Path, through: Through) -> Iterator[dict[str, Any]]:
        options: dict[str, Any] = {"text_field": self.text_field, "skip_bad": self.skip_bad}
        if ending(path) in TABLE_SUFFIXES:
            yield from read_rows(path, self.tally, **options, advance=through.advance)
            return
        # the lines of a stream do not have the size of the file's bytes
        is_read_as_it_is = not is_stream(path)
        for line, document in read_objects(path, self.tally, **options, rule=self.rule):
            yield document
            if is_read_as_it_is:
                through.advance(len(line) + 1)


def read_rows(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False,
    advance: Callable[[float], None] | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields the rows of a Parquet or Arrow file. Options and errors: see `read_objects` and `read_table`.
    After every batch, `advance` is called with the batch's approximate size in the file, in bytes.
    """
    odd: list[str] | None = None
    for before, batch in read_table(path, text_field=text_field):
        if odd is None:
            odd = [one.name for one in batch.schema if one.name != text_field and _is_odd(one.type)]
        for number, row in enumerate(_rows_of(batch), before + 1):
            try:
                if row is None:
                    raise ValueError("invalid UTF-8")
                text = text_in(row, text_field)
            except ValueError as error:
                skip_or_raise(path, number, str(error), tally, skip_bad=skip_bad)
                continue
            tally.add(text.encode())
            # most tables have no column that needs conversion
            yield row | {name: _plain(row[name]) for name in odd} if odd else row
        if advance:
            advance(min(batch.nbytes, path.stat().st_size))


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yields the rows of a batch, and None instead of a row with invalid UTF-8."""
    try:
        yield from batch.to_pylist()
    # raised before the first row is yielded: pyarrow does not validate strings when it reads them
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield None


def _is_odd(kind: Any) -> bool:
    """Whether an Arrow type, or a type nested in it, has values that JSON cannot represent."""
    from pyarrow import types

    if types.is_nested(kind):
        return any(_is_odd(kind.field(index).type) for index in range(kind.num_fields))
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return is_bytes or types.is_decimal(kind) or types.is_duration(kind) or types.is_time(kind)


def _plain(value: Any) -> Any:
    """Converts a value for JSON: bytes to base64, decimals and times to strings, durations to seconds."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal | datetime.time):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass
class WriteChunk:
    """Last step: writes a temporary file, reads it back, and publishes it if the counts reveal no loss."""

    folder: Path
    stem: str  # start of the name of each task's file, such as `STEM.00003.jsonl`
    reader: ReadFiles  # this and the filters: the preceding steps of the pipeline
    filters: list[Filter]
    counts_folder: Path  # for each task's counts, such as `00003.json`
    stats: Any = None

    def __repr__(self) -> str:
        return f"💽 - WRITER: {self.folder}/{self.stem}.*.jsonl"

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        from datatrove.pipeline.writers import JsonlWriter

        with complete_files([self.folder / f"{self.stem}.{rank:05d}.jsonl"]) as (temporary,):
            temporary.touch()  # a task with no document has an empty chunk
            writer = JsonlWriter(str(temporary.parent), "${rank}.jsonl", compression=None, adapter=_line)
            # datatrove's template prefers metadata to the rank: a field `rank` would split the output
            label = f"{self.stem}.XXXXX.jsonl"  # for its stats
            writer._get_output_filename = lambda _, rank=0: label if rank == "XXXXX" else temporary.name
            self.stats = writer.stats
            for _ in writer.run(data, rank, world_size):
                pass
            # read back from disk, so that the manifest describes what the next step will read
            written = Tally()
            for _ in read_documents(temporary, written):
                pass
            counts = Counts(
                self.reader.tally,
                written,
                {one.name: one.dropped for one in self.filters},
                {one.name: one.reasons for one in self.filters if set(one.reasons) - {""}},
                {one.name: (one.before, one.after) for one in self.filters if one.before.num_documents},
                [sample for one in self.filters for sample in one.samples],
            )
            counts.check(f"task {rank}")
            facts = {"task": rank, "files": self.reader.task_files(rank)}
            facts |= {"bytes": temporary.stat().st_size, "hash": file_hash(temporary)}
        self.counts_folder.mkdir(parents=True, exist_ok=True)
        write_json(self.counts_folder / f"{rank:05d}.json", facts | counts.to_json())


def _line(_writer: Any, document: Any) -> dict[str, Any]:
    # the same line as from DiskWriter's adapter, but without a deep copy of the metadata
    line = {"text": document.text, "id": document.id}
    return {**line, "metadata": document.metadata} if document.metadata else line
