"""Folders of checkpoints: names, the mark of a complete one, which can be used, and which are kept. No torch.

checkpoints/
  latest_checkpointed_iteration.txt   iteration of the newest complete checkpoint; the name is Megatron's
  iter_0000300/                       one checkpoint
    .metadata, __0_0.distcp, ...      tensors, see torch_dist.py
    common.pt, metadata.json          the rest, and the format's name, as Megatron writes them
    manifest.json                     size and checksum of every other file; written last
  iter_0000600.partial/               one that is being written; renamed once every rank is done
  iter_0000100.removed/               one that is being removed
  iter_0000300.replaced/              one whose place the next one of the same iteration takes, while that
                                      happens

A run that is killed leaves some of the last three behind; `recover` ends what it had begun.
"""

from __future__ import annotations

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
from moe_exp.runs.run_folder import LATEST, RunFolder

MANIFEST = "manifest.json"
PARTIAL, REMOVED, REPLACED = ".partial", ".removed", ".replaced"
FORMAT_VERSION = 1
_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(checkpoints: Path, iteration: int) -> Path:
    """Folder of one checkpoint, named as Megatron names it."""
    return checkpoints / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """The iteration in the name of a checkpoint's folder; 0 if it has another name."""
    number = folder.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else 0


def latest_iteration(checkpoints: Path) -> int | None:
    """Iteration of the newest complete checkpoint, or None; a ValueError if the file cannot be read."""
    path = checkpoints / LATEST
    try:
        text = regular(path).read_text().strip()
    # `checkpoints` is an iteration's folder or a file, or a run has saved nothing
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', error)})"
        raise unusable(path, reason, "make it readable, or name another") from None
    if not text.isdecimal():
        fix = "write that of the newest iter_ folder into it"
        raise unusable(f"{path}={text[:20]!r}", "must hold the number of an iteration", fix)
    return int(text)


def unusable(place: object, reason: str, fix: str = "use another checkpoint") -> ValueError:
    """The error about a checkpoint, or a part of it."""
    return ValueError(f"{place}: {reason}. Fix: {fix}.")


def first_few(names: Sequence[str], most: int = 5) -> str:
    """`a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def iterations(checkpoints: Path) -> list[int]:
    """Iterations of all folders that are not partial, whole or damaged, in order."""
    if not checkpoints.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def usable(path: Path) -> list[Path]:
    """The folders of the checkpoints that a run may resume from, the best first, whole or damaged. `path` is
    a checkpoints folder, a run folder or an iteration's; checkpoints newer than `latest` are left out:
    whoever goes back writes an older iteration there. Raises a ValueError if `latest` holds no number.
    """
    for checkpoints in (path, path / "checkpoints"):
        newest, found = latest_iteration(checkpoints), iterations(checkpoints)
        if newest is not None:
            # Its own folder even where that is gone: somebody has to say so.
            found = sorted({newest, *(i for i in found if i < newest)})
        if found:  # killed between the first checkpoint and `latest`
            return [iteration_folder(checkpoints, i) for i in reversed(found)]
    return [path] if (path / "metadata.json").is_file() or _NAME.match(path.name) else []


def holds_checkpoints(path: Path) -> bool:
    """Whether `path` is a run folder, or one of distributed checkpoints or of one of their iterations."""
    is_run = (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()
    return is_run or any((folder / "metadata.json").is_file() for folder in usable(path))


def is_converted(folder: Path) -> bool:
    """Whether the weights came from `convert from-hf`, unchanged or averaged, and not from a training."""
    manifest = Manifest.read(folder)
    return manifest is not None and "converted_from" in manifest.facts


def one_checkpoint(path: Path) -> Path:
    """The iteration's folder that `path` means, or its newest one; a ValueError if there is none."""
    for checkpoints in (path, path / "checkpoints"):
        if (iteration := latest_iteration(checkpoints)) is not None:
            return existing(iteration_folder(checkpoints, iteration))
    return existing(path)


def existing(folder: Path) -> Path:
    """`folder`, or a ValueError if it is not that of a whole distributed checkpoint."""
    name = f"checkpoint={folder}"
    if folder.suffix in (PARTIAL, REMOVED, REPLACED):
        rule = f"is incomplete: a run was killed while it wrote or removed it ({folder.suffix})"
        raise unusable(name, rule, "name another one")
    if (folder / "metadata.json").is_file():
        return folder
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else "does not exist"
    elif runs := sorted(path.parent.parent.name for path in folder.glob(f"*/checkpoints/{LATEST}")):
        first = ", ".join(runs[:5]) + (" ..." if len(runs) > 5 else "")
        rule = f"holds no checkpoint itself; the runs in it do: {first}"
    else:
        rule = "holds no distributed checkpoint (no metadata.json)"
        if (folder / "config.json").is_file():
            rule += "; it is a Hugging Face folder, which moe-exp convert from-hf converts"
    raise unusable(name, rule, "name an iter_ folder, a checkpoints folder or a run folder")


class NewerFormatError(ValueError):
    """A newer version wrote it: nothing is wrong, so no older checkpoint may take its place."""


@dataclass(frozen=True)
class Manifest:
    """Sizes and checksums of the files of a checkpoint."""

    iteration: int  # the last that was done
    # name to {"bytes": size, "xxh3_128": 32 hex digits}; all but manifest.json itself
    files: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]  # what else the writer noted: loss at the time of saving, versions

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of `folder`; None: of Megatron-LM. NewerFormatError, or ValueError if unreadable."""
        path = folder / MANIFEST
        try:
            return cls.parse(regular(path).read_bytes(), str(folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from None

    @classmethod
    def parse(cls, text: bytes, folder: str) -> Manifest:
        """The manifest of `folder`; raises as `read`."""
        path = f"{folder}/{MANIFEST}"
        try:
            content = json.loads(text)
            if (version := content["format_version"]) <= FORMAT_VERSION:
                files = {
                    name: {"bytes": int(entry["bytes"]), "xxh3_128": str(entry["xxh3_128"])}
                    for name, entry in content["files"].items()
                }
                return cls(int(content["iteration"]), files, dict(content["facts"]))
        # as a flipped bit will have it
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise _unreadable(path, error) from None
        rule = f"has format version {version}, this moe_exp reads up to {FORMAT_VERSION}"
        raise NewerFormatError(f"{path}: {rule}. Fix: update moe_exp.")

    @property
    def valid_loss(self) -> float | None:
        """Validation loss when it was saved, nats per token."""
        loss = self.facts.get("valid_loss")
        return float(loss) if isinstance(loss, int | float) else None

    def write(self, folder: Path) -> None:
        content = {"format_version": FORMAT_VERSION, "iteration": self.iteration}
        write_json(folder / MANIFEST, content | {"facts": dict(self.facts), "files": dict(self.files)})

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def _unreadable(path: str | Path, error: Exception) -> ValueError:
    return unusable(path, f"cannot be read ({' '.join(str(error).split())})", "use an older checkpoint")


def entry_of(path: Path) -> dict[str, Any]:
    """Manifest entry of one file. Reads the whole file."""
    return {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}


def entries_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Manifest entries of a folder's files, in order of their names."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: entry_of(path) for path in files}


def damages(folder: Path, names: Mapping[str, Mapping[str, Any]], *, checksums: bool = True) -> Iterator[str]:
    """A line for each file of the entries `names` that is missing or changed; without `checksums` by size."""
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
    """Renames `partial` to the newest checkpoint; killed anywhere, `recover` finds a whole one."""
    checkpoints = partial.parent
    final = iteration_folder(checkpoints, iteration)
    replaced, latest = final.with_name(final.name + REPLACED), checkpoints / LATEST
    sync_folder(partial)
    # Whatever needs space comes before the first rename.
    next_latest = latest.with_suffix(".next")
    write_atomically(next_latest, str(iteration))
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    next_latest.replace(latest)
    sync_folder(checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)


def take_name(folder: Path) -> Path:
    """Takes the name by which a checkpoint is found, before its files are removed; returns the new one."""
    removed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)  # left by a run that was killed
    return folder.rename(removed)


def recover(checkpoints: Path) -> None:
    """Ends what killed runs had begun; a checkpoint that was not replaced gets its name back."""
    for path in sorted(checkpoints.glob("iter_*.*")):
        # a folder that cannot be written is found out, and said, elsewhere
        with contextlib.suppress(OSError):
            if path.suffix == REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, REMOVED, REPLACED):
                shutil.rmtree(path)


def valid_losses(checkpoints: Path) -> dict[int, float]:
    """Iteration to validation loss, nats per token, of the checkpoints whose manifest has one."""
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
    """The iterations that no rule keeps, in order; the newest always stays. Kept are the `last` newest (0:
    all), the multiples of `every` (0: none), and the `best` with the lowest of `losses` (iteration to
    validation loss, nats per token, finite), of equal ones the newer. ValueError for a negative number.
    """
    for name, value in (("last", last), ("every", every), ("best", best)):
        if value < 0:
            raise unusable(f"{name}={value}", "must be 0 or more", "give 0 to leave this rule out")
    if not last:
        return []
    ordered = sorted(set(iterations))
    known = [one for one in ordered if math.isfinite(losses.get(one, math.nan))]
    kept = {*ordered[-last:], *(one for one in ordered if every and one % every == 0)}
    kept |= set(sorted(known, key=lambda one: (losses[one], -one))[:best])
    return [one for one in ordered if one not in kept]


@contextlib.contextmanager
def new_folder(target: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `target` at the end, or removed if the work fails.
    ValueError, and no change, if `target` exists (unless empty), cannot be created, or the disk lacks room
    for `num_bytes`.
    """
    check_target(target)
    partial = target.with_name(target.name + PARTIAL)
    if partial.exists():
        rule = "an earlier call left it behind, or another one is writing it"
        raise unusable(f"DST={partial}", rule, "remove it")
    missing = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        _remove_empty(missing)
        rule = f"cannot be made ({error.strerror})"
        raise unusable(f"DST={target}", rule, "give a folder where you can write") from None
    try:
        free = shutil.disk_usage(partial).free
        # headers, index and tokenizer take the rest
        if free < num_bytes * 1.01:
            rule = f"needs {bytes_text(num_bytes)}, {bytes_text(free)} are free"
            raise unusable(f"DST={target}", rule, "free some, or give a folder on another disk")
        yield partial
        # After a crash of the machine the new name must not stand for files that never reached the disk.
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
        with contextlib.suppress(OSError):  # never created, or in use by now
            folder.rmdir()


def check_target(target: Path) -> None:
    """Raises ValueError if `target` exists and is not an empty folder."""
    is_empty = target.is_dir() and not any(target.iterdir())
    if not is_empty and (target.exists() or target.is_symlink()):
        raise unusable(f"DST={target}", "exists already", "give a new folder, or remove it")


def checkpoints_folder(path: Path) -> Path | None:
    """`path` if it is a checkpoints folder, or that of the run folder `path`; None if it is neither."""
    both = (path, path / "checkpoints")
    return next((one for one in both if (one / LATEST).exists() or iterations(one)), None)


def prunable(path: Path, *, last: int, every: int, best: int) -> dict[Path, int]:
    """Checkpoints of a checkpoints or run folder that no rule of `which_to_remove` keeps, with their bytes.
    Never `latest`; `last` counts from it, too. ValueError if there are none, `last` < 1 or `best` without
    validation losses.
    """
    checkpoints = checkpoints_folder(path)
    if checkpoints is None:
        raise unusable(f"PATH={path}", "has no checkpoints", "name a checkpoints folder or a run folder")
    if last < 1:
        raise unusable(f"keep-last={last}", "must be 1 or more", "keep at least the newest")
    found, latest, losses = iterations(checkpoints), latest_iteration(checkpoints), valid_losses(checkpoints)
    if best and not losses:
        rule = f"no checkpoint in {checkpoints} says what its validation loss was"
        raise unusable(f"keep-best={best}", rule, "omit --keep-best")
    # Checkpoints newer than `latest` are damaged or abandoned, so they must not displace older ones.
    sound = [iteration for iteration in found if latest is None or iteration <= latest]
    gone, of_all = (which_to_remove(of, losses, last=last, every=every, best=best) for of in (sound, found))
    gone += [iteration for iteration in of_all if iteration not in sound]
    folders = [iteration_folder(checkpoints, iteration) for iteration in gone]
    return {one: sum(path.stat().st_size for path in one.rglob("*") if path.is_file()) for one in folders}


def remove(found: Collection[Path]) -> Iterator[Path]:
    """Removes checkpoints, and yields each once it is gone; ValueError, and no change, while a run writes."""
    if not found:
        return
    checkpoints = next(iter(found)).parent
    lock = RunFolder(checkpoints.parent).lock
    was_used = lock.exists() and os.access(lock, os.W_OK)  # else no run ever wrote here
    try:
        with FileLock(lock, timeout=0) if was_used else contextlib.nullcontext():
            for one in found:
                shutil.rmtree(take_name(one))
                yield one
    except Timeout:
        fix = "wait for its end; KEEP_LAST has it prune by itself"
        raise unusable(f"PATH={checkpoints}", "a run is writing there", fix) from None
