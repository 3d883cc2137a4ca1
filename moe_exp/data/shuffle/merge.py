"""Merges the shards of a folder, except its validation file, into one JSONL file.

Shards written by `shuffle` are copied, and must match the shuffle's manifest. In a folder without such a
manifest, each document is checked. BOM and CR are removed, and each document ends with LF.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.data.documents import Tally, estimate_line_bytes, files_in
from moe_exp.data.kinds import input_error, total_bytes, without_ending
from moe_exp.data.shuffle.blocks import DocumentBlocks, LineBlocks, write_all
from moe_exp.data.stage import MAKE_AGAIN, CorpusStage, check_free_disk, run_stage
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.progress import progress

_BLOCK_BYTES = 2**20
_LONGEST_BYTES = 2**30
_BYTES_PER_SECOND = {True: 500e6, False: 250e6}  # with and without a manifest of the shards


def merge(
    input_dir: Path, output: Path, *, valid_file_name: str, text_field: str = "text", skip_bad: bool = False,
    start_over: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes `OUTPUT.jsonl` and `OUTPUT.manifest.json`, and returns the manifest.

    Repeat an interrupted call to resume it at the shard where it stopped.

    Args:
        input_dir: folder of document files, which are merged in the order of their names.
        output: path of the merged file, with or without .jsonl; must be outside `input_dir`.
        valid_file_name: file in `input_dir` to exclude, with or without its suffix.
        text_field: name of the text field; ignored if there is a manifest.
        skip_bad: whether to skip and count invalid lines; ignored if there is a manifest.
        start_over: see `run_stage`.

    Raises:
        ValueError: if a file is missing or does not match the manifest, or free space is too small; see
            also `run_stage`.
        BadDocument: if a line is invalid, or a compressed file is damaged.
    """
    output = output.with_name(without_ending(output.name))
    shards, manifest = find_shards(input_dir, output, valid_file_name, text_field)
    valid_name = without_ending(Path(valid_file_name).name)
    settings = {"valid_file_name": valid_name, "text_field": text_field, "skip_bad": skip_bad}
    what: dict[str, Any] = {"settings": settings, "inputs": shards, "start_over": start_over}
    with run_stage("merge", output, **what, is_folder=False, suffixes=(".jsonl",)) as stage:
        if stage.manifest is not None:
            return stage.manifest
        merging = Merging(stage, shards, manifest)
        needed_bytes = estimate_line_bytes(shards) - merging.path.stat().st_size
        check_free_disk(stage.folder, needed_bytes, "the merged file")
        return merging.run()


def estimate_merge(input_dir: Path, output: Path, *, valid_file_name: str, text_field: str) -> dict[str, int]:
    """Estimates a merge; returns num_shards, disk_bytes and seconds."""
    shards, manifest = find_shards(input_dir, output, valid_file_name, text_field)
    num_bytes = estimate_line_bytes(shards)
    seconds = 1 + int(num_bytes / _BYTES_PER_SECOND[manifest is not None])
    return {"num_shards": len(shards), "disk_bytes": num_bytes, "seconds": seconds}


def find_shards(
    input_dir: Path, output: Path, valid_file_name: str, text_field: str
) -> tuple[list[Path], dict[str, Any] | None]:
    """Files to merge, in order, and the manifest of the shuffle (None if no shuffle wrote the files)."""
    if not input_dir.is_dir():
        raise ValueError(f"input_dir={input_dir}: folder not found. Fix: set the folder with the shards.")
    if input_dir.resolve() == output.parent.resolve():
        rule = "must not be in the folder to merge"
        raise ValueError(f"output={output}: {rule}. Fix: set a path outside {input_dir}.")
    files = files_in(input_dir, what="input_dir", text_field=text_field, with_validation=True)
    valid_name = without_ending(Path(valid_file_name).name)
    shards = [path for path in files if without_ending(path.name) != valid_name]
    if len(shards) == len(files):
        similar = [path.name for path in files if ".val" in path.name] or ["the name of the validation file"]
        rule = f"not found in {input_dir}"
        raise ValueError(f"valid_file_name={valid_file_name}: {rule}. Fix: set {similar[0]}.")
    if not shards:
        rule = "has only the validation file"
        raise ValueError(f"input_dir={input_dir}: {rule}. Fix: set input_dir to a folder with shards.")
    path = input_dir / "manifest.json"
    manifest: dict[str, Any] = read_json(path, fix="shuffle again, or remove it") if path.exists() else {}
    if manifest.get("stage") != "shuffle":
        return shards, None
    if manifest["valid_file"] != f"{valid_name}.jsonl":
        rule = f"the validation file is {manifest['valid_file']}, which must not be merged"
        raise ValueError(f"valid_file_name={valid_name}: {rule}. Fix: set {manifest['valid_file']}.")
    listed = {one["name"] for one in manifest["outputs"]}
    found = {str(file.relative_to(input_dir)) for file in files}
    # A missing file would lose documents; an extra one was never checked by the shuffle.
    for name in sorted(listed ^ found):
        rule, fix = "is listed in manifest.json but missing", "shuffle again"
        if name in found:
            rule, fix = "is not listed in manifest.json", f"{fix}, or move the file to another folder"
        raise ValueError(f"{input_dir / name}: {rule}. Fix: {fix}.")
    return shards, manifest


class Merging:
    """A merge in progress, whose state is saved in the stage's folder."""

    def __init__(self, stage: CorpusStage, shards: list[Path], manifest: dict[str, Any] | None):
        self.stage, self.shards, self.manifest = stage, shards, manifest
        self.path = stage.folder / f"{stage.output.name}.jsonl"
        self.state_path = stage.folder / "state.json"
        state = read_json(self.state_path, fix=MAKE_AGAIN) if self.state_path.exists() else {}
        # bytes, hash and number of documents of each completed shard
        self.parts: list[dict[str, Any]] = state.get("parts", [])
        self.read = Tally.from_json(state.get("read", {}))
        num_bytes = sum(part["bytes"] for part in self.parts)
        with self.path.open("ab") as file:
            # Shorter after a power failure, or if the file was published but the manifest was not.
            if file.tell() < num_bytes:
                self.parts, self.read, num_bytes = [], Tally(), 0
            file.truncate(num_bytes)  # drops the partial shard of an interrupted call

    def run(self) -> dict[str, Any]:
        """Merges the remaining shards and returns the manifest."""
        done = total_bytes(self.shards[: len(self.parts)])
        num_bytes = total_bytes(self.shards)
        with progress("merge", num_bytes, done=done) as advance, self.path.open("ab", 0) as file:
            for shard in self.shards[len(self.parts) :]:
                self.parts.append(self._write(shard, file.fileno()))
                write_json(self.state_path, {"parts": self.parts, "read": self.read.to_json()})
                advance(shard.stat().st_size)
        counts = [part["num_documents"] for part in self.parts]
        if not sum(counts):
            rule = "the shards have no documents"
            raise ValueError(f"input_dir={self.shards[0].parent}: {rule}. Fix: set another folder.")
        facts = {
            "read": self.manifest["train"] if self.manifest else self.read.to_json(),
            "num_documents": {shard.name: count for shard, count in zip(self.shards, counts, strict=True)},
            "checked_by": "manifest" if self.manifest else "lines",
        }
        return self.stage.finish([self.path], hashes={self.path: self._check_written()}, **facts)

    def _write(self, shard: Path, descriptor: int) -> dict[str, Any]:
        """Writes a shard and compares it with the manifest; returns byte count, hash and document count."""
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
                fix = "shuffle again, or remove manifest.json to merge the files as they are now"
                raise input_error(shard, "was changed: it does not match manifest.json", fix)
        return {"bytes": num_bytes, "hash": digest.hexdigest(), "num_documents": num_documents}

    def _blocks(self, shard: Path) -> Iterator[tuple[list[memoryview], int]]:
        """Yields (bytes to write, number of documents) of each block of a shard."""
        # A plain copy: `_write` compares the hash with the manifest, so parsing would add nothing.
        if self.manifest:
            buffer = bytearray(_BLOCK_BYTES)
            view = memoryview(buffer)
            with shard.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(view):
                    yield [view[:num_bytes]], buffer.count(b"\n", 0, num_bytes)
            return
        settings = self.stage.key["settings"]
        lines = LineBlocks(_BLOCK_BYTES, _LONGEST_BYTES, text_field=settings["text_field"])
        for documents in DocumentBlocks(lines, self.read, skip_bad=settings["skip_bad"]).read(shard):
            self.read += documents.tally()
            places = zip(documents.begins.tolist(), documents.ends.tolist(), strict=True)
            yield [lines.view[begin:end] for begin, end in places], len(documents.ends)

    def _check_written(self) -> str:
        """Reads back the merged file and checks each shard's hash; returns the hash of the whole file."""
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
                    rule = f"the bytes read back differ from the bytes written for {shard.name}"
                    cause = "the disk or another program has changed the file"
                    raise ValueError(f"{self.path}: {rule}; {cause}. Fix: add --start-over.")
        return whole.hexdigest()


def merge_summary(manifest: Mapping[str, Any]) -> dict[str, object]:
    file = manifest["outputs"][0]
    counts = {"documents": manifest["read"]["num_documents"], "shards": len(manifest["num_documents"])}
    skipped = {f"skipped: {reason}": count for reason, count in manifest["read"]["skipped"].items()}
    size = bytes_text(file["bytes"])
    return {"file": file["name"], **counts, "size": size, **skipped, "seconds": manifest["seconds"]}
