"""One step of the corpus, from input files to output files: locked, resumable, published by rename.

While a stage runs everything it writes is in `OUTPUT.partial/`. When it is done, that becomes OUTPUT (a
folder with manifest.json in it), or its files get their places beside `OUTPUT.manifest.json`. So what has its
name is complete. A stage that was killed continues from what its folder holds; one that is called again with
the same settings and inputs does nothing; with others it refuses. `start_over` begins anew; what was there
stays until the new is complete, and a killed start-over continues when the step is called without it.
"""

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from moe_exp.data.kinds import input_error
from moe_exp.host import files
from moe_exp.host.files import bytes_text, file_hash, sync_folder, write_json

logger = logging.getLogger(__name__)

RUNNING = "running.json"
MAKE_AGAIN = "give --start-over to make it again"
# of what stages leave in their working folders: one that another version has begun is not resumed
_FORMAT = 1
_BLOCK_BYTES = 2**14
_SAMPLED_BLOCKS = 4


@dataclass
class CorpusStage:
    """A step that is running, or was done before.

    Args:
        output: the folder or the path, without suffix, of the files that it makes.
        folder: where it works until it is done.
        key: what its running.json says: settings and inputs, as the manifest has them, and whether it starts
            over.
        manifest: of the finished step, or None while there is work to do.
        was_done: whether there was nothing to do.
    """

    name: str
    output: Path
    folder: Path
    inputs: list[Path]
    key: dict[str, Any]
    manifest: dict[str, Any] | None = None
    was_done: bool = False
    started: float = field(default_factory=time.time)

    def finish_folder(
        self, outputs: Sequence[Path], *, hashes: Mapping[Path, str] | None = None, **facts: Any
    ) -> dict[str, Any]:
        """Turns the working folder into OUTPUT and returns the manifest.

        Args:
            outputs: files in the working folder that the manifest lists with size and hash.
            hashes: what `file_hash` gives for them, if that is known already.
            facts: what else the manifest says.
        """
        self.manifest = self._manifest(outputs, facts, hashes or {})
        write_json(self.folder / "manifest.json", self.manifest)
        sync_folder(self.folder)
        # a folder cannot replace another in one step: what was there steps aside
        replaced = self.output.with_name(f".{self.output.name}.replaced")
        if self.output.exists():  # what was there stays until here
            shutil.rmtree(replaced, ignore_errors=True)
            self.output.rename(replaced)
        self.folder.rename(self.output)
        shutil.rmtree(replaced, ignore_errors=True)
        (self.output / RUNNING).unlink()  # last: a crash before this line loses nothing
        sync_folder(self.output.parent)
        return self.manifest

    def finish_files(
        self, outputs: Sequence[Path], *, hashes: Mapping[Path, str] | None = None, **facts: Any
    ) -> dict[str, Any]:
        """Moves the files beside OUTPUT, then writes and returns `OUTPUT.manifest.json`; Args as above."""
        manifest_path = _manifest_path(self.output, is_folder=False)
        self.manifest = self._manifest(outputs, facts, hashes or {})
        manifest_path.unlink(missing_ok=True)  # files without it are not taken for finished
        for path in outputs:
            path.replace(self.output.parent / path.name)
        write_json(manifest_path, self.manifest)
        sync_folder(self.output.parent)
        shutil.rmtree(self.folder)
        return self.manifest

    def _manifest(
        self, outputs: Sequence[Path], facts: Mapping[str, Any], hashes: Mapping[Path, str]
    ) -> dict[str, Any]:
        for path, before in zip(self.inputs, self.key["inputs"], strict=True):
            if fingerprint(path) != before:
                rule = f"changed while {self.name} read it"
                raise input_error(path, rule, "leave it alone, and give --start-over")
        files = []
        for path in outputs:
            known = {"name": str(path.relative_to(self.folder)), "bytes": path.stat().st_size}
            files.append(known | {"hash": hashes.get(path) or file_hash(path)})
        made_at, seconds = time.strftime("%Y-%m-%dT%H:%M:%S%z"), round(time.time() - self.started, 1)
        return {**self.key, **facts, "outputs": files, "made_at": made_at, "seconds": seconds}


@contextmanager
def run_stage(
    name: str,
    output: Path,
    *,
    settings: Mapping[str, Any],
    inputs: Iterable[Path],
    is_folder: bool = True,
    start_over: bool = False,
    mends_outputs: bool = False,
    suffixes: Sequence[str] = (),
) -> Iterator[CorpusStage]:
    """Opens the step: `stage.was_done` says whether there is anything to do, `stage.folder` where to work.

    What the block writes into `stage.folder` is there again when the step is called after a crash. An
    exception leaves it.

    Args:
        output: the folder that it makes, or with `is_folder=False` the path, without suffix, of its files.
        settings: everything the outputs depend on besides the inputs; plain JSON values.
        start_over: begin anew, and replace what another call has made, when the new one is complete.
        mends_outputs: the block itself brings back what has gone from a finished output.
        suffixes: of files beside OUTPUT that it must not replace, unless it has made them or `start_over` is
            given.

    Raises:
        ValueError: another process works on it; it was made, or begun, with other settings or inputs; it is
            finished and a file is gone.
    """
    output = _place(output)
    inputs = [Path(os.path.abspath(path)) for path in inputs]  # noqa: PTH100
    # by way of JSON, as they are compared with what a file says
    key = {"stage": name, "settings": json.loads(json.dumps(settings))}
    key |= {"inputs": [fingerprint(path) for path in inputs]}
    folder = output.with_name(output.name + ".partial")
    with locked(output):
        done = read_json(_manifest_path(output, is_folder=is_folder), start_over=start_over)
        begun = read_json(folder / RUNNING, start_over=start_over)
        # killed right at its end: of the folder, which it removed, RUNNING may be gone already
        if done is not None and (begun is None or begun.get("id", 0) == done.get("id")):
            shutil.rmtree(folder, ignore_errors=True)
            begun = None
        # also a start-over that was killed: called without --start-over it continues
        resumes = begun is not None and not start_over and _difference(begun, key) is None
        if done is not None and not start_over and not resumes:
            _check_same(output, done, key, "was made")
            place = output if is_folder else output.parent
            if not mends_outputs:
                check_outputs(place, done)
            if is_folder:
                # of a call that was killed right at its end, as the next
                (output / RUNNING).unlink(missing_ok=True)
                shutil.rmtree(output.with_name(f".{output.name}.replaced"), ignore_errors=True)
            what = "%s: is there, made by %s with these settings and inputs: nothing to do"
            logger.info(what, output, name)
            yield CorpusStage(name, output, place, inputs, done, done, was_done=True)
            return
        others = [one["stage"] for one in (done, begun) if one and one.get("stage", name) != name]
        if start_over and others:
            rule = f"is the work of the step {others[0]}, which {name} does not replace"
            raise input_error(output, rule, "choose another output, or remove it")
        if done is None:
            _check_foreign(output, is_folder, () if begun or start_over else suffixes)
        if begun is not None and not start_over:
            _check_same(output, begun, key, "was begun")
        if begun is None or not resumes:
            shutil.rmtree(folder, ignore_errors=True)
            begun = {"id": uuid.uuid4().hex, "format": _FORMAT, "starts_over": start_over}
        folder.mkdir(exist_ok=True)
        # of write_json in a call that was killed: it must not be published
        for leftover in folder.glob("*.json.*.tmp"):
            leftover.unlink()
        begun |= key
        # before any work: a crash from here on is resumed
        write_json(folder / RUNNING, begun)
        yield CorpusStage(name, output, folder, inputs, begun)


def _place(output: Path) -> Path:
    # a link's target, as a rename would replace the link itself; else only absolute
    return output.resolve() if output.is_symlink() else Path(os.path.abspath(output))  # noqa: PTH100


@contextmanager
def locked(output: Path, waits: str = "") -> Iterator[None]:
    """Holds the lock of an output. If another process has it, logs `waits` and waits for it.

    Raises:
        ValueError: another process has it, and `waits` is empty.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        if not waits:
            rule, fix = "another process is working on it", "wait for it, or choose another output"
            raise input_error(output, rule, fix) from error
        logger.info(waits)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _manifest_path(output: Path, *, is_folder: bool) -> Path:
    return output / "manifest.json" if is_folder else output.with_name(output.name + ".manifest.json")


def check_outputs(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless the files of a manifest are there with their sizes."""
    for file in manifest["outputs"]:
        path = folder / file["name"]
        size = path.stat().st_size if path.exists() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise input_error(path, f"{found}, its manifest.json says {file['bytes']} bytes", MAKE_AGAIN)


def _check_foreign(output: Path, is_folder: bool, suffixes: Sequence[str]) -> None:
    # what has OUTPUT's name and is not of this program is not replaced
    if is_folder and output.exists() and any(output.iterdir()):
        rule = "is there, without a manifest.json of this program"
        raise input_error(output, rule, "choose another folder, or remove it")
    for path in (Path(f"{output}{suffix}") for suffix in suffixes):
        if path.exists():
            rule = "is there, without a manifest of this program"
            raise input_error(path, rule, "choose another name, or give --start-over")


def _check_same(output: Path, found: dict[str, Any], key: dict[str, Any], verb: str) -> None:
    if difference := _difference(found, key):
        raise input_error(output, f"{verb} {difference}", f"{MAKE_AGAIN}, or choose another output")


def _difference(found: Mapping[str, Any], key: Mapping[str, Any]) -> str | None:
    if found["stage"] != key["stage"]:
        return f"by the step {found['stage']}, not {key['stage']}"
    for field_name in {**found["settings"], **key["settings"]}:
        old, new = (settings.get(field_name) for settings in (found["settings"], key["settings"]))
        # without skip_bad no bad document has been read so far
        is_compatible = (field_name, old, new) == ("skip_bad", False, True)
        if old != new and not is_compatible:
            return f"with {field_name}={old}, now it is {new}"
    if found["inputs"] != key["inputs"]:
        old_files, new_files = ({one["name"]: one for one in side["inputs"]} for side in (found, key))
        changed = [one for one in {**old_files, **new_files} if old_files.get(one) != new_files.get(one)]
        how = f"{changed[0]} is not what it was" if changed else "their order is another"
        return f"from other inputs ({how})"
    if "outputs" not in found and found.get("format") != _FORMAT:
        return "by another version of moe_exp"
    return None


def is_stale(
    output: Path,
    inputs: Iterable[Path],
    *,
    settings: Mapping[str, Any] | None = None,
    is_folder: bool = True,
) -> bool:
    """Whether OUTPUT was made or begun from other files than `inputs`, or with other settings."""
    output = _place(output)
    begun = read_json(output.with_name(output.name + ".partial") / RUNNING, start_over=True)
    done = read_json(_manifest_path(output, is_folder=is_folder), start_over=True)
    now: dict[str, Any] = {"inputs": [fingerprint(path) for path in inputs]}
    if settings is not None:
        now["settings"] = json.loads(json.dumps(settings))
    records = [record for record in (done, begun) if record is not None]
    return bool(records) and not any(now.items() <= record.items() for record in records)


def is_older(output: Path, other: Path) -> bool:
    """Whether the folder OUTPUT was begun, or made, before the folder `other` was made."""
    output, made = _place(output), _place(other) / "manifest.json"
    begun = output.with_name(output.name + ".partial") / RUNNING
    newest = next((path for path in (begun, output / "manifest.json") if path.exists()), made)
    return newest.stat().st_mtime_ns < made.stat().st_mtime_ns


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a hash of four blocks of a file: 64 KB at most, as a corpus may have 30,000 files."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for block in range(_SAMPLED_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {"name": path.name, "bytes": size, "sampled_hash": digest.hexdigest()}


def read_json(path: Path, *, start_over: bool = False) -> dict[str, Any] | None:
    """Reads a JSON file; None if there is none. With `start_over` a damaged one is no error but {}."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        if start_over:  # it was there, whatever it said
            return {}
        raise input_error(path, f"is damaged ({error})", "remove it, or give --start-over") from error


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    return shutil.disk_usage(existing).free


class Unfinished(ValueError):
    """A step that could not be finished for now: what is done stays, and the same call continues."""


def check_free_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises `Unfinished` if `what` does not fit on the disk of `folder`, which need not exist yet."""
    free_bytes = free_disk(folder)
    if free_bytes < needed_bytes:
        rule = f"has {bytes_text(free_bytes)} free, {what} needs {bytes_text(needed_bytes)}"
        raise Unfinished(f"{folder}: {rule}. Fix: free some space, or choose a folder on another disk.")
