"""Merge: the shards of a folder, without its validation file, one after the other into one JSONL file.

Shards that `shuffle` has made are copied and have to be what their manifest says. Documents of other folders
are checked one by one, and written without BOM and CR, each with an LF.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.data.documents import Tally, estimate_line_bytes, files_in
from moe_exp.data.kinds import total_bytes, without_ending
from moe_exp.data.shuffle.blocks import DocumentBlocks, LineBlocks, write_all
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, check_free_disk, run_stage
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.progress import progress

_BLOCK_BYTES = 2**20
_LONGEST_BYTES = 2**30
_BYTES_PER_SECOND = {True: 500e6, False: 250e6}  # whether a manifest vouches for the shards


def merge(
    input_dir: Path,
    output: Path,
    *,
    valid_file_name: str,
    text_field: str = "text",
    skip_bad: bool = False,
    start_over: bool = False,
) -> dict[str, Any]:
    """Writes `OUTPUT.jsonl` and `OUTPUT.manifest.json`, and returns the manifest.

    An interrupted call continues with the shard it was at when it is made again.

    Args:
        input_dir: folder of files with documents; they are merged in the order of their names.
        output: path of the file, with or without .jsonl; not in `input_dir`.
        valid_file_name: the file in `input_dir` to leave out, with or without its suffix.
        text_field, skip_bad: where there is no manifest: name of the field with the text, and whether to skip
            and count lines that are no documents.
        start_over: see `run_stage`.

    Raises:
        ValueError: a file is missing, is not in the manifest or not what it says; there is too little disk;
            see `run_stage`.
        BadDocument: a line is no document, or a compressed file is damaged.
    """
    output = output.with_name(without_ending(output.name))
    shards, manifest = find_shards(input_dir, output, valid_file_name, text_field)
    valid_name = without_ending(Path(valid_file_name).name)
    settings = {"valid_file_name": valid_name, "text_field": text_field, "skip_bad": skip_bad}
    what: dict[str, Any] = {"settings": settings, "inputs": shards, "start_over": start_over}
    with run_stage("merge", output, **what, is_folder=False, suffixes=(".jsonl",)) as stage:
        if stage.was_done:
            return stage.manifest or {}
        merging = Merging(stage, shards, manifest)
        needed_bytes = estimate_line_bytes(shards) - merging.path.stat().st_size
        check_free_disk(stage.folder, needed_bytes, "the merged file")
        return merging.run()


def estimate_merge(
    input_dir: Path, output: Path, *, valid_file_name: str, text_field: str = "text"
) -> dict[str, int]:
    """Estimate of a merge: num_shards, disk_bytes and seconds."""
    shards, manifest = find_shards(input_dir, output, valid_file_name, text_field)
    num_bytes = estimate_line_bytes(shards)
    seconds = 1 + int(num_bytes / _BYTES_PER_SECOND[manifest is not None])
    return {"num_shards": len(shards), "disk_bytes": num_bytes, "seconds": seconds}


def find_shards(
    input_dir: Path, output: Path, valid_file_name: str, text_field: str
) -> tuple[list[Path], dict[str, Any] | None]:
    """The files to merge, in order, and the manifest of the shuffle that made them, or None."""
    if not input_dir.is_dir():
        raise ValueError(f"input_dir={input_dir}: there is no such folder. Fix: the folder with the shards.")
    if input_dir.resolve() == output.parent.resolve():
        rule = "is in the folder that is merged"
        raise ValueError(f"output={output}: {rule}. Fix: a path outside {input_dir}.")
    files = files_in(input_dir, what="input_dir", text_field=text_field, with_validation=True)
    valid_name = without_ending(Path(valid_file_name).name)
    shards = [path for path in files if without_ending(path.name) != valid_name]
    if len(shards) == len(files):
        similar = [path.name for path in files if ".val" in path.name] or ["the name of the validation file"]
        rule = f"there is no such file in {input_dir}"
        raise ValueError(f"valid_file_name={valid_file_name}: {rule}. Fix: give {similar[0]}.")
    if not shards:
        rule = "there is only the validation file"
        raise ValueError(f"input_dir={input_dir}: {rule}. Fix: a folder with shards.")
    path = input_dir / "manifest.json"
    manifest: dict[str, Any] = read_json(path, fix="shuffle again, or remove it") if path.exists() else {}
    if manifest.get("stage") != "shuffle":
        return shards, None
    if manifest["valid_file"] != f"{valid_name}.jsonl":
        rule = f"the validation file is {manifest['valid_file']}, its documents would be in the merged file"
        raise ValueError(f"valid_file_name={valid_name}: {rule}. Fix: give that.")
    listed = {one["name"] for one in manifest["outputs"]}
    found = {str(file.relative_to(input_dir)) for file in files}
    # a file more or less than the shuffle made
    for name in sorted(listed ^ found):
        rule = "is missing, and is" if name in listed else "is there, and is not"
        fix = "shuffle again, or move the file" if name in found else "shuffle again"
        raise ValueError(f"{input_dir / name}: {rule} in manifest.json. Fix: {fix}.")
    return shards, manifest


class Merging:
    """A merge that is running in the folder of its stage."""

    def __init__(self, stage: CorpusStage, shards: list[Path], manifest: dict[str, Any] | None):
        self.stage, self.shards, self.manifest = stage, shards, manifest
        self.path = stage.folder / f"{stage.output.name}.jsonl"
        self.state_path = stage.folder / "state.json"
        nothing: dict[str, Any] = {"parts": [], "read": Tally().to_json()}
        state = read_json(self.state_path, fix=MAKE_AGAIN) if self.state_path.exists() else nothing
        # One for each shard that is written: its bytes, hash and documents.
        self.parts: list[dict[str, Any]] = state["parts"]
        self.read = Tally.from_json(state["read"])
        num_bytes = sum(part["bytes"] for part in self.parts)
        with self.path.open("ab") as file:
            # after a power cut, or when the file had its place already and the manifest was not written
            if file.tell() < num_bytes:
                self.parts, self.read, num_bytes = [], Tally(), 0
            file.truncate(num_bytes)  # what was written of a shard when the step was interrupted

    def run(self) -> dict[str, Any]:
        """Everything that is left to do; returns the manifest."""
        done = total_bytes(self.shards[: len(self.parts)])
        num_bytes = total_bytes(self.shards)
        with progress("merge", num_bytes, done=done) as advance, self.path.open("ab", 0) as file:
            for shard in self.shards[len(self.parts) :]:
                self.parts.append(self._write(shard, file.fileno()))
                write_json(self.state_path, {"parts": self.parts, "read": self.read.to_json()})
                advance(shard.stat().st_size)
        counts = [part["num_documents"] for part in self.parts]
        if not sum(counts):
            rule = "there is no document in the shards"
            raise ValueError(f"input_dir={self.shards[0].parent}: {rule}. Fix: another folder.")
        whole_hash = self._check_written()
        facts = {
            "read": self.manifest["train"] if self.manifest else self.read.to_json(),
            "num_documents": {shard.name: count for shard, count in zip(self.shards, counts, strict=True)},
            "checked_by": "manifest" if self.manifest else "lines",
        }
        return self.stage.finish_files([self.path], hashes={self.path: whole_hash}, **facts)

    def _write(self, shard: Path, descriptor: int) -> dict[str, Any]:
        """Writes a shard; returns its bytes, hash and documents, which are those of the manifest."""
        digest, num_bytes, num_documents = xxhash.xxh3_128(), 0, 0
        for slices, count in self._blocks(shard):
            for one in slices:
                digest.update(one)
            num_bytes += write_all(descriptor, slices, self.path)
            num_documents += count
        if self.manifest:
            listed = next(one for one in self.manifest["outputs"] if one["name"] == shard.name)
            expected = listed["hash"], self.manifest["num_documents"][shard.name]
            if (digest.hexdigest(), num_documents) != expected:
                fix = "shuffle again, or remove manifest.json to merge what is there, document by document"
                rule = "is not what manifest.json says, it was changed since"
                raise ValueError(f"{shard}: {rule}. Fix: {fix}.")
        return {"bytes": num_bytes, "hash": digest.hexdigest(), "num_documents": num_documents}

    def _blocks(self, shard: Path) -> Iterator[tuple[list[memoryview], int]]:
        """What is written of each block of a shard, and the number of its documents."""
        if self.manifest:  # as it is: its hash is compared with the manifest's at the end
            buffer = bytearray(_BLOCK_BYTES)
            view = memoryview(buffer)
            with shard.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(view):
                    yield [view[:num_bytes]], buffer.count(b"\n", 0, num_bytes)
            return
        lines = LineBlocks(_BLOCK_BYTES, _LONGEST_BYTES)
        options = {name: self.stage.key["settings"][name] for name in ("text_field", "skip_bad")}
        for documents in DocumentBlocks(lines, self.read, **options).read(shard):
            self.read += documents.tally()
            places = zip(documents.begins.tolist(), documents.ends.tolist(), strict=True)
            yield [lines.view[begin:end] for begin, end in places], len(documents.ends)

    def _check_written(self) -> str:
        """Hash of the file, which is read back: each part has to be what was written."""
        buffer, whole = memoryview(bytearray(_BLOCK_BYTES)), xxhash.xxh3_128()
        num_bytes = self.path.stat().st_size
        with progress("merge, check", num_bytes) as advance, self.path.open("rb", buffering=0) as file:
            for shard, part in zip(self.shards, self.parts, strict=True):
                digest, left = xxhash.xxh3_128(), part["bytes"]
                while left and (num_bytes := file.readinto(buffer[:left])):
                    digest.update(buffer[:num_bytes])
                    whole.update(buffer[:num_bytes])
                    left -= num_bytes
                    advance(num_bytes)
                if digest.hexdigest() != part["hash"]:
                    rule = f"what was written of {shard.name} is not what was read back"
                    fix = "the disk, or another program, has changed it. Fix: give --start-over"
                    raise ValueError(f"{self.path}: {rule}: {fix}.")
        return whole.hexdigest()


def merge_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    file = manifest["outputs"][0]
    counts = {"documents": manifest["read"]["num_documents"], "shards": len(manifest["num_documents"])}
    skipped = {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    size = bytes_text(file["bytes"])
    return {"file": file["name"], **counts, "size": size, **skipped, "seconds": manifest["seconds"]}
