"""A data preparation step: it locks its output, can be resumed, and publishes its files by renaming them.

A running step writes only to `OUTPUT.partial/`. When the step is done, that folder becomes OUTPUT (with a
manifest.json), or its files move next to `OUTPUT.manifest.json`. Any output with its final name is therefore
complete. A killed step resumes from its partial folder. Repeating a finished step with the same settings and
inputs does nothing; with other settings or inputs, it raises an error. With `start_over`, the old output
stays until the new one is complete; if the call is killed, repeat it without `start_over` to resume.
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
MAKE_AGAIN = "use --start-over to recreate it"
# format of the working folders: a stage does not resume from another format
_FORMAT = 1
_BLOCK_BYTES = 2**14
_SAMPLED_BLOCKS = 4


@dataclass
class CorpusStage:
    """A step that is running or has finished."""

    output: Path  # output folder, or output path without suffix
    folder: Path  # working folder
    inputs: list[Path]
    key: dict[str, Any]  # contents of running.json: settings, inputs, and whether it starts over
    is_folder: bool  # whether `output` is a folder
    manifest: dict[str, Any] | None = None  # None while the step is unfinished
    started: float = field(default_factory=time.time)

    def finish(
        self, outputs: Sequence[Path], *, hashes: Mapping[Path, str] | None = None, **facts: Any
    ) -> dict[str, Any]:
        """Publishes the working folder as OUTPUT, or its files in OUTPUT's parent; returns the manifest.

        Args:
            outputs: files to list in the manifest; they are in the working folder.
            hashes: known `file_hash` values of output files; missing ones are computed.
            facts: additional manifest entries.
        """
        for path, before in zip(self.inputs, self.key["inputs"], strict=True):
            if fingerprint(path) != before:
                fix = "repeat the command with --start-over while nothing modifies the file"
                raise input_error(path, f"changed while {self.key['stage']} was reading it", fix)
        files = []
        for path in outputs:
            known = {"name": str(path.relative_to(self.folder)), "bytes": path.stat().st_size}
            files.append(known | {"hash": (hashes or {}).get(path) or file_hash(path)})
        made_at, seconds = time.strftime("%Y-%m-%dT%H:%M:%S%z"), round(time.time() - self.started, 1)
        facts |= {"outputs": files, "made_at": made_at, "seconds": seconds}
        self.manifest = manifest = {**self.key, **facts}
        if self.is_folder:
            write_json(self.folder / "manifest.json", manifest)
            sync_folder(self.folder)
            # a rename cannot replace a non-empty folder: move the old output, which stays until here, aside
            replaced = self.output.with_name(f".{self.output.name}.replaced")
            if self.output.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self.output.rename(replaced)
            self.folder.rename(self.output)
            shutil.rmtree(replaced, ignore_errors=True)
            (self.output / RUNNING).unlink()  # last: a crash before this line loses nothing
            sync_folder(self.output.parent)
        else:
            manifest_path = _manifest_path(self.output, is_folder=False)
            # without it, partly replaced files do not count as finished
            manifest_path.unlink(missing_ok=True)
            for path in outputs:
                path.replace(self.output.parent / path.name)
            write_json(manifest_path, manifest)
            sync_folder(self.output.parent)
            shutil.rmtree(self.folder)
        return manifest


@contextmanager
def run_stage(
    name: str, output: Path, *, settings: Mapping[str, Any], inputs: Iterable[Path], is_folder: bool = True,
    start_over: bool = False, mends_outputs: bool = False, suffixes: Sequence[str] = (),
) -> Iterator[CorpusStage]:  # fmt: skip
    """Opens a step and yields its CorpusStage, `stage`.

    If `stage.manifest` is None, the step is unfinished, and the with block must write to `stage.folder`.
    Files in this folder survive crashes and exceptions, and are available when the step is called again.

    Args:
        output: output folder, or with `is_folder=False` the output path without suffix.
        settings: all settings that affect the outputs, as JSON values.
        start_over: start from scratch, and replace an existing output when the new one is complete.
        mends_outputs: whether the with block itself restores missing files of a finished output.
        suffixes: suffixes of the output files if OUTPUT is not a folder; existing files with these names are
            replaced only with `start_over` or if this step created them.

    Raises:
        ValueError: if another process is working on the output, the output was created or started with other
            settings or inputs, or a file of the finished output is missing.
    """
    output = _place(output)
    inputs = [Path(os.path.abspath(path)) for path in inputs]  # noqa: PTH100
    # through JSON, because they are compared with values read from a file
    key = {"stage": name, "settings": json.loads(json.dumps(settings))}
    key |= {"inputs": [fingerprint(path) for path in inputs]}
    folder = output.with_name(output.name + ".partial")
    with locked(output):
        done = read_json(_manifest_path(output, is_folder=is_folder), start_over=start_over)
        begun = read_json(folder / RUNNING, start_over=start_over)
        # killed while removing the working folder of a finished step: RUNNING may be gone already
        if done is not None and (begun is None or begun.get("id", 0) == done.get("id")):
            shutil.rmtree(folder, ignore_errors=True)
            begun = None
        # a killed start-over resumes as well, when called without --start-over
        resumes = begun is not None and not start_over and _difference(begun, key) is None
        if done is not None and not start_over and not resumes:
            _check_same(output, done, key, "was made")
            place = output if is_folder else output.parent
            if not mends_outputs:
                check_outputs(place, done)
            if is_folder:
                # left over from a call that was killed just before its end
                (output / RUNNING).unlink(missing_ok=True)
                shutil.rmtree(output.with_name(f".{output.name}.replaced"), ignore_errors=True)
            what = "%s: already created by %s with these settings and inputs; nothing to do"
            logger.info(what, output, name)
            yield CorpusStage(output, place, inputs, done, is_folder, done)
            return
        others = [one["stage"] for one in (done, begun) if one and one.get("stage", name) != name]
        if start_over and others:
            rule = f"was created by the step {others[0]} and cannot be replaced by {name}"
            raise input_error(output, rule, "choose another output, or remove it")
        if done is None:
            _check_foreign(output, is_folder, () if begun or start_over else suffixes)
        if begun is not None and not start_over:
            _check_same(output, begun, key, "was started")
        if begun is None or not resumes:
            shutil.rmtree(folder, ignore_errors=True)
            begun = {"id": uuid.uuid4().hex, "format": _FORMAT, "starts_over": start_over}
        folder.mkdir(exist_ok=True)
        # temporary files of a killed write_json must not be published
        for leftover in folder.glob("*.json.*.tmp"):
            leftover.unlink()
        begun |= key
        # before any work: from here on, a crash can be resumed
        write_json(folder / RUNNING, begun)
        yield CorpusStage(output, folder, inputs, begun, is_folder)


def _place(output: Path) -> Path:
    # the target of a link, because a rename would replace the link itself; other paths only become absolute
    return output.resolve() if output.is_symlink() else Path(os.path.abspath(output))  # noqa: PTH100


@contextmanager
def locked(output: Path, waits: str = "") -> Iterator[None]:
    """Locks an output. If it is in use, logs `waits` and blocks, or raises ValueError if `waits` is ''."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout as error:
        if not waits:
            rule, fix = "in use by another process", "wait until that process ends, or choose another output"
            raise input_error(output, rule, fix) from error
        logger.info(waits)
        held = lock.acquire()
    with held:
        yield


def _manifest_path(output: Path, *, is_folder: bool) -> Path:
    return output / "manifest.json" if is_folder else output.with_name(output.name + ".manifest.json")


def check_outputs(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless all files in the manifest exist with the recorded size."""
    for file in manifest["outputs"]:
        path = folder / file["name"]
        size = path.stat().st_size if path.exists() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise input_error(path, f"{found}; its manifest.json lists {file['bytes']} bytes", MAKE_AGAIN)


def _check_foreign(output: Path, is_folder: bool, suffixes: Sequence[str]) -> None:
    # never replace files of OUTPUT's name that another program or the user created
    if is_folder and output.exists() and any(output.iterdir()):
        rule = "already exists without a manifest.json of moe-exp"
        raise input_error(output, rule, "choose another folder, or remove it")
    for path in (Path(f"{output}{suffix}") for suffix in suffixes):
        if path.exists():
            rule = "already exists without a manifest of moe-exp"
            raise input_error(path, rule, "choose another name, or use --start-over")


def _check_same(output: Path, found: dict[str, Any], key: dict[str, Any], verb: str) -> None:
    if difference := _difference(found, key):
        raise input_error(output, f"{verb} {difference}", f"{MAKE_AGAIN}, or choose another output")


def _difference(found: Mapping[str, Any], key: Mapping[str, Any]) -> str | None:
    if found["stage"] != key["stage"]:
        return f"by the step {found['stage']}, not {key['stage']}"
    for field_name in {**found["settings"], **key["settings"]}:
        old, new = (settings.get(field_name) for settings in (found["settings"], key["settings"]))
        # resuming with skip_bad is safe: without it, an invalid line would have stopped the step
        if old != new and (field_name, old, new) != ("skip_bad", False, True):
            return f"with {field_name}={old}, not {new}"
    if found["inputs"] != key["inputs"]:
        old_files, new_files = ({one["name"]: one for one in side["inputs"]} for side in (found, key))
        changed = [one for one in {**old_files, **new_files} if old_files.get(one) != new_files.get(one)]
        how = f"{changed[0]} has changed" if changed else "in another order"
        return f"from other inputs ({how})"
    if "outputs" not in found and found.get("format") != _FORMAT:
        return "by another version of moe_exp"
    return None


def is_stale(
    output: Path, inputs: Iterable[Path], *, settings: Mapping[str, Any] | None = None,
    is_folder: bool = True,
) -> bool:  # fmt: skip
    """Whether OUTPUT was created or started from files other than `inputs`, or with other settings."""
    output = _place(output)
    begun = read_json(output.with_name(output.name + ".partial") / RUNNING, start_over=True)
    done = read_json(_manifest_path(output, is_folder=is_folder), start_over=True)
    now: dict[str, Any] = {"inputs": [fingerprint(path) for path in inputs]}
    if settings is not None:
        now["settings"] = json.loads(json.dumps(settings))
    records = [record for record in (done, begun) if record is not None]
    return bool(records) and not any(now.items() <= record.items() for record in records)


def is_older(output: Path, other: Path) -> bool:
    """Whether `output`'s manifest (running.json if `output` is unfinished) is older than `other`'s."""
    output, made = _place(output), _place(other) / "manifest.json"
    begun = output.with_name(output.name + ".partial") / RUNNING
    newest = next((path for path in (begun, output / "manifest.json") if path.exists()), made)
    return newest.stat().st_mtime_ns < made.stat().st_mtime_ns


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and hash of a file. Hashes only 4 x 16 KB, because a corpus may have 30,000 files."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for block in range(_SAMPLED_BLOCKS):
            file.seek(max(0, size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {"name": path.name, "bytes": size, "sampled_hash": digest.hexdigest()}


def read_json(path: Path, *, start_over: bool = False) -> dict[str, Any] | None:
    """Reads a JSON file; None if it does not exist. With `start_over`, a damaged file is read as {}."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        if start_over:  # only its existence matters
            return {}
        raise input_error(path, f"is damaged ({error})", "remove it, or use --start-over") from error


def free_disk(folder: Path) -> int:
    """Free space (bytes) on the disk of `folder`, which need not exist yet."""
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    return shutil.disk_usage(existing).free


class Unfinished(ValueError):
    """A step could not finish, but its progress is kept; repeat the call to resume it."""


def check_free_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises `Unfinished` if the disk of `folder` lacks space for `what`; `folder` need not exist yet."""
    free_bytes = free_disk(folder)
    if free_bytes < needed_bytes:
        rule = f"has {bytes_text(free_bytes)} free; {what} requires {bytes_text(needed_bytes)}"
        raise Unfinished(f"{folder}: {rule}. Fix: free up space, or choose a folder on another disk.")
