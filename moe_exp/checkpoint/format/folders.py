"""Checkpoint folders: names, completeness, selection and retention. This module does not import PyTorch.

checkpoints/
  latest_checkpointed_iteration.txt   iteration of the newest complete checkpoint (Megatron's file name)
  iter_0000300/                       one checkpoint
    .metadata, __0_0.distcp, ...      tensors, see torch_dist.py
    common.pt, metadata.json          unsharded state and the format's name, as in Megatron
    manifest.json                     size and checksum of every other file; written last
  iter_0000600.partial/               checkpoint being written; renamed once every rank is done
  iter_0000100.removed/               checkpoint being removed
  iter_0000300.replaced/              checkpoint being replaced by a new one of iteration 300

A killed run can leave .partial, .removed and .replaced folders behind; `recover` cleans up.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moe_exp.host.files import bytes_text, file_hash, regular, sync_folder, write_atomically, write_json
from moe_exp.runs.run_folder import LATEST, RunFolder, iterations

MANIFEST = "manifest.json"
PARTIAL, REMOVED, REPLACED = ".partial", ".removed", ".replaced"
FORMAT_VERSION = 1


def iteration_folder(checkpoints: Path, iteration: int) -> Path:
    """Folder of one checkpoint, named as in Megatron."""
    return checkpoints / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """Iteration in a checkpoint folder's name; 0 if the name is not `iter_` followed by a number."""
    number = folder.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else 0


def latest_iteration(checkpoints: Path) -> int | None:
    """Iteration in latest_checkpointed_iteration.txt; None if missing. Raises ValueError if unreadable."""
    path = checkpoints / LATEST
    try:
        text = regular(path).read_text().strip()
    # `checkpoints` is an iter_ folder or a file, or the run has not saved yet
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', error)})"
        raise unusable(path, reason, "make the file readable, or specify another checkpoint") from None
    if not text.isdecimal():
        fix = "write the number of the newest iter_ folder into this file"
        raise unusable(f"{path}={text[:20]!r}", "must contain an iteration number", fix)
    return int(text)


def unusable(place: object, reason: str, fix: str = "use another checkpoint") -> ValueError:
    """Builds the error for a checkpoint, file, folder or option (`place`) that cannot be used."""
    return ValueError(f"{place}: {reason}. Fix: {fix}.")


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Shortens a list to a text such as `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def usable(path: Path) -> list[Path]:
    """Checkpoint folders to try when a run resumes, newest first; some may be damaged.

    `path` is a checkpoints, run or iter_ folder. Skips checkpoints that are newer than the iteration in
    latest_checkpointed_iteration.txt. To resume from an earlier checkpoint, users write its iteration into
    this file. Raises ValueError if the file contains no number.
    """
    for checkpoints in (path, path / "checkpoints"):
        newest, found = latest_iteration(checkpoints), iterations(checkpoints)
        if newest is not None:
            # Includes the folder that `latest` names even if it is missing, so that the caller reports it.
            found = sorted({newest, *(i for i in found if i < newest)})
        if found:  # also if the run was killed after the first checkpoint and before writing `latest`
            return [iteration_folder(checkpoints, i) for i in reversed(found)]
    return [path] if (path / "metadata.json").is_file() or re.match(r"iter_\d{7,}", path.name) else []


def holds_checkpoints(path: Path) -> bool:
    """Whether `path` is a run folder, a checkpoints folder or an iter_ folder."""
    is_run = (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()
    return is_run or any((folder / "metadata.json").is_file() for folder in usable(path))


def is_converted(folder: Path) -> bool:
    """Whether the weights were converted by `convert from-hf` (and possibly averaged) rather than trained."""
    manifest = Manifest.read(folder)
    return manifest is not None and "converted_from" in manifest.facts


def one_checkpoint(path: Path) -> Path:
    """Returns the iter_ folder `path`, or the newest iter_ folder under it; ValueError if not found."""
    for checkpoints in (path, path / "checkpoints"):
        if (iteration := latest_iteration(checkpoints)) is not None:
            return existing(iteration_folder(checkpoints, iteration))
    return existing(path)


def existing(folder: Path) -> Path:
    """Returns `folder`; ValueError unless it contains a complete distributed checkpoint."""
    name = f"checkpoint={folder}"
    if folder.suffix in (PARTIAL, REMOVED, REPLACED):
        rule = f"is incomplete: a run was killed while writing or removing it ({folder.suffix})"
        raise unusable(name, rule, "specify another checkpoint")
    if (folder / "metadata.json").is_file():
        return folder
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else "does not exist"
    elif runs := sorted(path.parent.parent.name for path in folder.glob(f"*/checkpoints/{LATEST}")):
        rule = f"is not a run folder, but contains the runs {first_few(runs)}"
    else:
        rule = "is not a distributed checkpoint (metadata.json not found)"
        if (folder / "config.json").is_file():
            rule += "; to convert a Hugging Face folder, use moe-exp convert from-hf"
    raise unusable(name, rule, "specify an iter_ folder, a checkpoints folder or a run folder")


class NewerFormatError(ValueError):
    """An intact checkpoint, but too new for this moe_exp. Runs must not fall back to older checkpoints."""


@dataclass(frozen=True)
class Manifest:
    """Sizes and checksums of the files of a checkpoint."""

    iteration: int  # completed iterations
    # name to {"bytes": size, "xxh3_128": 32 hex digits}; all files except manifest.json
    files: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]  # other facts recorded by the writer: validation loss, versions, layout

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Reads the manifest of `folder`; returns None if it is missing. Raises the errors of `parse`."""
        path = folder / MANIFEST
        try:
            return cls.parse(regular(path).read_bytes(), str(folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from None

    @classmethod
    def parse(cls, text: bytes, folder: str) -> "Manifest":
        """Parses `text`, the manifest of `folder`. ValueError if damaged, NewerFormatError if too new."""
        path = f"{folder}/{MANIFEST}"
        try:
            content = json.loads(text)
            if (version := content["format_version"]) <= FORMAT_VERSION:
                files = {
                    name: {"bytes": int(entry["bytes"]), "xxh3_128": str(entry["xxh3_128"])}
                    for name, entry in content["files"].items()
                }
                return cls(int(content["iteration"]), files, dict(content["facts"]))
        # A flipped bit can cause any of these.
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise _unreadable(path, error) from None
        rule = f"has format version {version}, but this moe_exp supports only up to {FORMAT_VERSION}"
        raise NewerFormatError(f"{path}: {rule}. Fix: update moe_exp.")

    @property
    def valid_loss(self) -> float | None:
        """Validation loss at the time of the save (nats per token), or None."""
        loss = self.facts.get("valid_loss")
        return float(loss) if isinstance(loss, int | float) else None

    def write(self, folder: Path) -> None:
        content = {"format_version": FORMAT_VERSION, "iteration": self.iteration}
        files = dict(sorted(self.files.items()))
        write_json(folder / MANIFEST, content | {"facts": dict(self.facts), "files": files})

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def _unreadable(path: str | Path, error: Exception) -> ValueError:
    return unusable(path, f"cannot be read ({' '.join(str(error).split())})", "use an older checkpoint")


def entry_of(path: Path) -> dict[str, Any]:
    """Manifest entry of one file; reads the whole file."""
    return {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}


def damages(folder: Path, names: Mapping[str, Mapping[str, Any]], *, checksums: bool = True) -> Iterator[str]:
    """Yields a message for each missing or changed file; without `checksums`, compares only the sizes."""
    for name, entry in names.items():
        path = folder / name
        try:
            if not path.is_file():
                yield f"{path}: is missing"
            elif (size := path.stat().st_size) != entry["bytes"]:
                yield f"{path}: has {size} bytes instead of {entry['bytes']}"
            elif checksums and (found := file_hash(path)) != entry["xxh3_128"]:
                hashes = f"xxh3 {found[:8]} instead of {entry['xxh3_128'][:8]}"
                yield f"{path}: has changed since it was written ({hashes})"
        except OSError as error:
            yield f"{path}: cannot be read ({error.strerror or error})"


def set_latest(checkpoints: Path, iteration: int) -> None:
    write_atomically(checkpoints / LATEST, str(iteration))
    sync_folder(checkpoints)


def publish(partial: Path, iteration: int) -> None:
    """Gives `partial` its final name. If a run is killed here, `recover` keeps only complete checkpoints."""
    checkpoints = partial.parent
    final = iteration_folder(checkpoints, iteration)
    replaced, latest = final.with_name(final.name + REPLACED), checkpoints / LATEST
    sync_folder(partial)
    # Everything that needs disk space comes before the first rename. If the run is killed between renames,
    # `recover` restores the name of the replaced checkpoint.
    next_latest = latest.with_suffix(".next")
    write_atomically(next_latest, str(iteration))
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    next_latest.replace(latest)
    sync_folder(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)


def take_name(folder: Path) -> Path:
    """Renames a checkpoint, so that nothing uses it while its files are removed; returns the new path."""
    removed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)  # left by a run that was killed
    return folder.rename(removed)


def recover(checkpoints: Path) -> None:
    """Removes unfinished folders of killed runs; restores an old checkpoint whose replacement is missing."""
    for path in sorted(checkpoints.glob("iter_*.*")):
        # a folder that cannot be written is reported elsewhere
        with contextlib.suppress(OSError):
            if path.suffix == REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, REMOVED, REPLACED):
                shutil.rmtree(path)


def valid_losses(checkpoints: Path) -> dict[int, float]:
    """Validation loss (nats per token) by iteration, for checkpoints whose manifest records it."""
    losses = {}
    for iteration in iterations(checkpoints):
        with contextlib.suppress(ValueError):
            manifest = Manifest.read(iteration_folder(checkpoints, iteration))
            if manifest is not None and (loss := manifest.valid_loss) is not None:
                losses[iteration] = loss
    return losses


def which_to_remove(
    iterations: Sequence[int], losses: Mapping[int, float], *, last: int, every: int, best: int
) -> list[int]:
    """Returns the iterations to remove, in ascending order. Keeps the `last` newest iterations (0: all), the
    multiples of `every` (0: none), and the `best` iterations with the lowest finite validation loss in
    `losses` (nats per token). Among equal losses, newer iterations win. ValueError if a number is negative.
    """
    for name, value in (("last", last), ("every", every), ("best", best)):
        if value < 0:
            raise unusable(f"{name}={value}", "must be 0 or more", "set it to 0 to disable this rule")
    if not last:
        return []
    ordered = sorted(set(iterations))
    known = [one for one in ordered if math.isfinite(losses.get(one, math.nan))]
    kept = {*ordered[-last:], *(one for one in ordered if every and one % every == 0)}
    kept |= set(sorted(known, key=lambda one: (losses[one], -one))[:best])
    return [one for one in ordered if one not in kept]


@contextlib.contextmanager
def new_folder(target: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `target` on success and removed on failure. Raises
    ValueError if `target` exists and is not empty, if it cannot be created, or if less than `num_bytes` of
    disk space is free. These errors change nothing on disk.
    """
    check_target(target)
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        rule = "was left by a killed command, or another command is writing this folder"
        raise unusable(f"DST={partial}", rule, "remove the folder unless another command is writing it")
    missing = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        _remove_empty(missing)
        rule = f"cannot be created ({error.strerror})"
        raise unusable(f"DST={target}", rule, "specify a writable folder") from None
    try:
        free = shutil.disk_usage(partial).free
        # 1% for headers, index and tokenizer
        if free < num_bytes * 1.01:
            rule = f"requires {bytes_text(num_bytes)}, but only {bytes_text(free)} are free"
            raise unusable(f"DST={target}", rule, "free disk space, or specify a folder on another disk")
        yield partial
        # Synced before the rename: after a power failure, `target` must not have incomplete files.
        for path in filter(Path.is_file, partial.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(missing)
        raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # never created, or no longer empty
            folder.rmdir()


def check_target(target: Path) -> None:
    """Raises ValueError if `target` exists, unless it is an empty folder."""
    is_empty = target.is_dir() and not any(target.iterdir())
    if not is_empty and (target.exists() or target.is_symlink()):
        raise unusable(f"DST={target}", "already exists", "specify a new folder, or remove this folder")


def checkpoints_folder(path: Path) -> Path | None:
    """Finds the checkpoints folder, which is `path` or `path`/checkpoints; returns None if neither is one."""
    both = (path, path / "checkpoints")
    return next((one for one in both if (one / LATEST).exists() or iterations(one)), None)


def prunable(path: Path, *, last: int, every: int, best: int) -> dict[Path, int]:
    """Returns the size (bytes) of each checkpoint that no rule of `which_to_remove` keeps. `path` is a
    checkpoints folder or a run folder. The checkpoint in latest_checkpointed_iteration.txt counts as the
    newest and is always kept. ValueError if the folder has no checkpoints, if `last` < 1, or if `best` > 0
    and no checkpoint has a validation loss.
    """
    checkpoints = checkpoints_folder(path)
    if checkpoints is None:
        raise unusable(f"PATH={path}", "has no checkpoints", "specify a checkpoints folder or a run folder")
    if last < 1:
        raise unusable(f"keep-last={last}", "must be 1 or more", "keep at least the newest checkpoint")
    found, latest, losses = iterations(checkpoints), latest_iteration(checkpoints), valid_losses(checkpoints)
    if best and not losses:
        rule = f"no checkpoint in {checkpoints} has a validation loss"
        raise unusable(f"keep-best={best}", rule, "omit --keep-best")
    # Checkpoints newer than `latest` are damaged or abandoned, so they must not displace older ones.
    sound = [iteration for iteration in found if latest is None or iteration <= latest]
    gone, of_all = (which_to_remove(of, losses, last=last, every=every, best=best) for of in (sound, found))
    gone += [iteration for iteration in of_all if iteration not in sound]
    folders = [iteration_folder(checkpoints, iteration) for iteration in gone]
    return {one: sum(path.stat().st_size for path in one.rglob("*") if path.is_file()) for one in folders}


def remove(found: Collection[Path]) -> Iterator[Path]:
    """Removes checkpoints and yields the path of each; ValueError if a run is writing to their folder."""
    if not found:
        return
    checkpoints = next(iter(found)).parent
    lock = RunFolder(checkpoints.parent).lock
    was_used = lock.exists() and os.access(lock, os.W_OK)  # otherwise no run has written here
    try:
        with FileLock(lock, timeout=0) if was_used else contextlib.nullcontext():
            for one in found:
                shutil.rmtree(take_name(one))
                yield one
    except Timeout:
        fix = "wait until the run ends, or set KEEP_LAST in the run"
        raise unusable(f"PATH={checkpoints}", "a run is writing to this folder", fix) from None
