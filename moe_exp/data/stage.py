"""One step of the corpus, from input files to output files: locked, resumable, published by rename, told in a manifest.

While a stage runs everything it writes is in `OUTPUT.partial/`. When it is done, that becomes OUTPUT (a folder with manifest.json in it),
or its files get their places beside `OUTPUT.manifest.json`. So what has its name is complete. A stage that was killed goes on from what
its folder holds; one that is called again with the same settings and inputs does nothing; with others it refuses.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_RUNNING = "running.json"
_BLOCK_BYTES = 2**14
_SAMPLED_BLOCKS = 4
_CHUNK_BYTES = 2**20


@dataclass
class Stage:
    """A step that is running, or was done before.

    Args:
        name: of the step.
        output: the folder or the path, without suffix, of the files that it makes.
        folder: where it works until it is done.
        key: settings and inputs, as the manifest has them.
        manifest: of the finished step, or None while there is work to do.
        was_done: whether there was nothing to do.
    """

    name: str
    output: Path
    folder: Path
    key: dict[str, Any]
    manifest: dict[str, Any] | None = None
    was_done: bool = False
    started: float = field(default_factory=time.time)

    def finish_folder(self, outputs: Sequence[Path], *, hashes: Mapping[Path, str] | None = None, **facts: Any) -> dict[str, Any]:
        """Turns the working folder into OUTPUT and returns the manifest.

        Args:
            outputs: files in the working folder that the manifest lists with size and hash.
            hashes: what `file_hash` gives for them, where that is known already.
            facts: what else the manifest says: counts and the like.
        """
        self.manifest = self._manifest(outputs, facts, hashes or {})
        write_json(self.folder / "manifest.json", self.manifest)
        sync_folder(self.folder)
        if self.output.exists():  # start_over: what was there stays until here
            old = self.output.with_name(self.output.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            self.output.rename(old)
            self.folder.rename(self.output)
            shutil.rmtree(old)
        else:
            self.folder.rename(self.output)
        (self.output / _RUNNING).unlink()  # last: a crash before this line loses nothing
        sync_folder(self.output.parent)
        return self.manifest

    def finish_files(self, outputs: Sequence[Path], *, hashes: Mapping[Path, str] | None = None, **facts: Any) -> dict[str, Any]:
        """Moves the files of the working folder beside OUTPUT, then writes `OUTPUT.manifest.json`, and returns it; Args as above."""
        manifest_path = _manifest_path(self.output, is_folder=False)
        self.manifest = self._manifest(outputs, facts, hashes or {})
        manifest_path.unlink(missing_ok=True)  # files without it are not taken for finished
        for path in outputs:
            path.replace(self.output.parent / path.name)
        write_json(manifest_path, self.manifest)
        sync_folder(self.output.parent)
        shutil.rmtree(self.folder)
        return self.manifest

    def _manifest(self, outputs: Sequence[Path], facts: Mapping[str, Any], hashes: Mapping[Path, str]) -> dict[str, Any]:
        files = [
            {"name": str(path.relative_to(self.folder)), "bytes": path.stat().st_size, "hash": hashes.get(path) or file_hash(path)}
            for path in outputs
        ]
        made = {"made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "seconds": round(time.time() - self.started, 1)}
        return {"stage": self.name, **self.key, **facts, "outputs": files, **made}


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
) -> Iterator[Stage]:
    """Opens the step: `stage.was_done` tells whether there is anything to do, `stage.folder` where to work.

    What the block writes into `stage.folder` is there again when the step is called after a crash. An exception leaves it.

    Args:
        name: of the step.
        output: the folder that it makes, or with `is_folder=False` the path, without suffix, of its files.
        settings: everything the outputs depend on besides the inputs; plain JSON values.
        inputs: files it reads.
        is_folder: whether OUTPUT is a folder.
        start_over: do not resume, and replace what another call has made, when the new one is complete.
        mends_outputs: the block itself brings back what has gone from a finished output.

    Raises:
        ValueError: another process works on it; it was made, or begun, with other settings or inputs; it is finished and a file is gone.
    """
    output = Path(os.path.abspath(output))  # noqa: PTH100  # resolve() would follow links out of the user's tree
    key = {"settings": json.loads(json.dumps(settings)), "inputs": [fingerprint(path) for path in inputs]}
    folder = output.with_name(output.name + ".partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"{output}: another process is working on it. Fix: wait for it, or choose another output.") from error
    try:
        done = _read_json(_manifest_path(output, is_folder=is_folder), start_over)
        _check_same(output, done, name, key, start_over, "was made")
        if done is not None and not start_over:
            place = output if is_folder else output.parent
            if not mends_outputs:
                _check_outputs(place, done)
            if is_folder:
                (output / _RUNNING).unlink(missing_ok=True)  # of a call that was killed right at its end
            logger.info("%s: is there, made by %s with these settings and inputs: nothing to do", output, name)
            yield Stage(name, output, place, key, done, was_done=True)
            return
        if is_folder and output.exists() and done is None and any(output.iterdir()):
            raise ValueError(f"{output}: is there, without a manifest.json of this program. Fix: choose another folder, or remove it.")
        begun = _read_json(folder / _RUNNING, start_over)
        _check_same(output, begun, name, key, start_over, "was begun")
        if start_over or begun is None:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob("*.json.*.tmp"):  # of write_json in a call that was killed: it must not be published
            leftover.unlink()
        write_json(folder / _RUNNING, {"stage": name, **key})
        yield Stage(name, output, folder, key)
    finally:
        lock.release()


def _manifest_path(output: Path, *, is_folder: bool) -> Path:
    return output / "manifest.json" if is_folder else output.with_name(output.name + ".manifest.json")


def _check_outputs(folder: Path, manifest: Mapping[str, Any]) -> None:
    for file in manifest["outputs"]:
        path = folder / file["name"]
        size = path.stat().st_size if path.exists() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{path}: {found}, its manifest.json says {file['bytes']} bytes. Fix: give --start-over to make it again.")


def _check_same(output: Path, found: dict[str, Any] | None, name: str, key: dict[str, Any], start_over: bool, verb: str) -> None:
    if found is None or start_over:
        return
    fix = "Fix: give --start-over to make it again, or choose another output."
    if found["stage"] != name:
        raise ValueError(f"{output}: {verb} by the step {found['stage']}, not {name}. {fix}")
    for field_name in {**found["settings"], **key["settings"]}:
        old, new = (settings.get(field_name) for settings in (found["settings"], key["settings"]))
        if old != new:
            raise ValueError(f"{output}: {verb} with {field_name}={old}, now it is {new}. {fix}")
    if found["inputs"] != key["inputs"]:
        old_files, new_files = ({one["name"]: one for one in inputs} for inputs in (found["inputs"], key["inputs"]))
        changed = [one for one in {**old_files, **new_files} if old_files.get(one) != new_files.get(one)]
        what = f"{changed[0]} is not what it was" if changed else "their order is another"
        raise ValueError(f"{output}: {verb} from other inputs ({what}). {fix}")


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a hash of four blocks of a file, whenever it was written. 64 KB at most: a corpus may have 30,000 files."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for block in range(_SAMPLED_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {"name": path.name, "bytes": size, "sampled_hash": digest.hexdigest()}


def file_hash(path: Path) -> str:
    """XXH3-128 of a file, 32 hex digits."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):  # one buffer: fresh memory would take longer than the hash
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_json(path: Path, start_over: bool) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        if start_over:  # it was there, whatever it said
            return {}
        raise ValueError(f"{path}: is damaged ({error}). Fix: remove it, or give --start-over.") from error


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` last through a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def check_free_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Whether `what` fits on the disk of `folder`, which need not exist yet.

    Raises:
        ValueError: it does not.
    """
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        rule = f"has {free_bytes / 1e9:.1f} GB free, {what} needs {needed_bytes / 1e9:.1f} GB"
        raise ValueError(f"{folder}: {rule}. Fix: free some space, or choose a folder on another disk.")
