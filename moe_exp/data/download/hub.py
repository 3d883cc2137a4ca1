"""A dataset's files from the hub: listed at one commit, fetched, compared, and named in a manifest.

huggingface_hub moves the bytes. What it accepts and this does not: a pattern that matches nothing, a file of
another size than listed, a server that fails while the folder holds something. Its own retries are few, so
failures that pass are waited out here. When all files are there, one pass compares each with the SHA-256 (or
git's SHA-1 of small ones) that the hub has for it.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.data.download.from_store import download_from_store
from moe_exp.data.download.hub_errors import check_online, endpoint, explained, patiently
from moe_exp.data.download.names import check_inside, check_names, refused
from moe_exp.data.download.sources import Source, chosen_files, local_files
from moe_exp.data.stage import RUNNING, Stage, check_free_disk, free_disk, read_json, run_stage
from moe_exp.host.files import bytes_text, ending, write_json
from moe_exp.host.progress import print_summary, progress, progress_of

logger = logging.getLogger(__name__)

_MANY_FILES = 500
_CHUNK_BYTES = 2**22
_LISTING = ".listing.json"
_CHECKED = ".checked"  # of earlier versions
# what the library and this keep beside the files of the hub
RESERVED = frozenset({"manifest.json", RUNNING, _LISTING, _CHECKED, ".cache", ".huggingface"})
_COMMIT = re.compile(r"[0-9a-f]{40}")

_Hashes = tuple[str, str]  # of a file: XXH3-128 and SHA-256


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it: `sha256` if it is kept outside of git, else `blob`, git's SHA-1."""

    name: str
    bytes: int
    sha256: str | None
    blob: str


@dataclass(frozen=True)
class Listing:
    """The files of a source at one commit, sorted by name."""

    commit: str
    files: tuple[HubFile, ...]

    def __post_init__(self) -> None:
        """Whether every file has a place of its own in a folder, whoever has made the listing.

        Raises:
            ValueError: one has not.
        """
        check_names([file.name for file in self.files], endpoint(), RESERVED)
        for file in self.files:
            if not isinstance(file.bytes, int) or file.bytes < 0:
                raise refused(file.name, f"{file.bytes} is no number of bytes", endpoint())

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Listing:
        return cls(content["commit"], tuple(HubFile(**file) for file in content["files"]))


def download(
    source: Source,
    folder: Path,
    *,
    max_workers: int = 8,
    dry_run: bool = False,
    start_over: bool = False,
    max_failures: int = 6,
    bytes_per_second: float = 50e6,
) -> list[Path]:
    """The data files of a source on this machine, sorted: fetched into `folder`, or those of its path. For
    those of an object store see `download_from_store`.

    A call that was stopped continues with the files that are not complete, at the same commit. One that is
    finished makes no request. The token is huggingface_hub's (HF_TOKEN, or `hf auth login`), the server
    HF_ENDPOINT.

    Args:
        source: what; for the standard library, which needs no files, the result is empty.
        folder: gets the files under their names in the repository, and manifest.json.
        max_workers: files at the same time.
        dry_run: print how much there is to do, write nothing, and return the paths that there would be.
        start_over: fetch everything again, at the commit that the revision stands for now.
        max_failures: failures in a row, without one more complete file, before it gives up.
        bytes_per_second: of the network, for the estimate of `dry_run`.

    Raises:
        ValueError: a pattern matches nothing; no access; no such dataset or revision; too little disk; a file
            that is not what the listing says; the folder was made from something else; files are missing and
            HF_HUB_OFFLINE is set.
        ConnectionError: the server keeps failing.
    """
    if source.path is not None:
        return local_files(source)
    folder = Path(folder)
    if source.url:
        return download_from_store(source, folder, dry_run=dry_run, start_over=start_over)
    if source.repository is None:
        return []
    settings: dict[str, Any] = {"repository": source.repository, "revision": source.revision}
    settings |= {"patterns": list(source.patterns)}
    if dry_run:
        known = None if start_over else _plan(folder, settings)
        listing, complete = known or (_list_files(source, max_failures), set())
        _print_plan(source, folder, listing, complete, bytes_per_second)
        return [folder / file.name for file in listing.files]
    with run_stage(
        "download", folder, settings=settings, inputs=(), start_over=start_over, mends_outputs=True
    ) as stage:
        listing = _known_listing(stage) or _first_listing(stage, source, max_failures)
        hub = _Fetcher(source, listing, stage.folder, max_workers, max_failures)
        if stage.manifest is None:
            _finish(stage, source, listing, hub.fetch(listing.files))
        elif missing := hub.missing(listing.files):
            logger.warning("%s: %d files are gone or have another size, fetching them", folder, len(missing))
            hub.fetch(missing)
        _remove_traces(stage.output)
    return [folder / file.name for file in listing.files]


def _known_listing(stage: Stage) -> Listing | None:
    """Listing of the finished or interrupted download, as the revision may be another commit by now."""
    if stage.manifest is not None:
        return _listing_of_manifest(stage.manifest)
    listed = read_json(stage.folder / _LISTING)
    return Listing.from_json(listed) if listed else None


def _first_listing(stage: Stage, source: Source, max_failures: int) -> Listing:
    """Notes it in the folder; on an error removes that, which a call with other patterns would be refused."""
    try:
        listing = _list_files(source, max_failures)
        check_free_disk(stage.folder, listing.num_bytes, f"the download of {source.name}")
        write_json(stage.folder / _LISTING, asdict(listing))
    except Exception:
        shutil.rmtree(stage.folder)
        raise
    return listing


def _listing_of_manifest(manifest: dict[str, Any]) -> Listing:
    hashes = manifest["sha256"]
    files = (
        HubFile(file["name"], file["bytes"], hashes[file["name"]], blob="") for file in manifest["outputs"]
    )
    return Listing(manifest["commit"], tuple(files))


def _finish(stage: Stage, source: Source, listing: Listing, hashes: dict[str, _Hashes]) -> None:
    names = [file.name for file in listing.files]
    facts: dict[str, Any] = {"commit": listing.commit, "endpoint": endpoint(), "licence": source.licence}
    facts |= {"text_field": source.text_field, "num_files": len(names), "num_bytes": listing.num_bytes}
    facts |= {"sha256": {name: hashes[name][1] for name in names}}
    places = {stage.folder / name: hashes[name][0] for name in names}
    manifest = stage.finish_folder(list(places), hashes=places, **facts)
    rows: dict[str, object] = {"dataset": source.repository, "commit": listing.commit, "files": len(names)}
    rows |= {"bytes": listing.num_bytes, "licence": source.licence, "folder": stage.output}
    print_summary(f"Downloaded {source.name}", rows | {"seconds": manifest["seconds"]})


def _remove_traces(folder: Path) -> None:
    """Removes what only an interrupted download needs; the library keeps a file for each in .cache."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for name in (_LISTING, _CHECKED):
        (folder / name).unlink(missing_ok=True)


# ---- what there is


def _list_files(source: Source, max_failures: int) -> Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    repository = source.repository or ""
    check_online(f"the files of {repository} are not known yet")
    api = HfApi(endpoint=endpoint())

    def list_once() -> Listing:
        commit: str | None = source.revision
        if not _COMMIT.fullmatch(source.revision):
            commit = api.dataset_info(repository, revision=source.revision, timeout=60).sha
        found = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        files = {file.path: file for file in found if isinstance(file, RepoFile)}
        for name in files:  # also of those that are not wanted: the library walks through all of them
            check_inside(name, endpoint())
        names = chosen_files(
            {name: file.size for name, file in files.items()},
            source.patterns,
            f"{repository} at {source.revision}",
        )
        return Listing(commit or "", tuple(_hub_file(files[name]) for name in names))

    with explained(source.repository or "", source.revision):
        return patiently(list_once, max_failures)


def _hub_file(file: Any) -> HubFile:
    return HubFile(file.path, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)


def _plan(folder: Path, settings: dict[str, Any]) -> tuple[Listing, set[str]] | None:
    """Listing of a finished or interrupted download, and the names of its files that are there."""
    manifest = read_json(folder / "manifest.json")
    partial = folder.with_name(folder.name + ".partial")
    begun, listed = read_json(partial / RUNNING), read_json(partial / _LISTING)
    if manifest and manifest["settings"] == settings:
        listing, place = _listing_of_manifest(manifest), folder
    elif begun and listed and begun["settings"] == settings:
        listing, place = Listing.from_json(listed), partial
    else:
        return None
    return listing, {file.name for file in listing.files if _has_size(place, file)}


def _print_plan(
    source: Source, folder: Path, listing: Listing, complete: set[str], bytes_per_second: float
) -> None:
    left_bytes = sum(file.bytes for file in listing.files if file.name not in complete)
    free_bytes = free_disk(folder)
    room = f"{bytes_text(free_bytes)} at {folder}{', too little' if free_bytes < left_bytes else ''}"
    rows = {
        "dataset": f"{source.repository} at {listing.commit}",
        "files": f"{len(listing.files):,}, of which {len(complete):,} are there",
        "bytes to fetch": f"{left_bytes:,} ({bytes_text(left_bytes)})",
        "free disk": room,
        "time": f"{left_bytes / bytes_per_second / 3600:.1f} hours at {bytes_text(bytes_per_second)}/s",
        "licence": source.licence,
    }
    print_summary(f"To download: {source.name}", rows)


# ---- fetching and checking


class _Fetcher:
    """Brings the files of a listing into a folder, complete and checked."""

    def __init__(self, source: Source, listing: Listing, folder: Path, max_workers: int, max_failures: int):
        self.source, self.listing, self.folder = source, listing, folder
        self.max_workers, self.max_failures = max_workers, max_failures

    def missing(self, files: Sequence[HubFile]) -> list[HubFile]:
        return [file for file in files if not _has_size(self.folder, file)]

    def fetch(self, files: Sequence[HubFile]) -> dict[str, _Hashes]:
        """Gets the missing ones of `files`, compares all with the listing, and returns their hashes."""
        for attempt in (1, 2):
            if missing := self.missing(files):
                self._get(missing)
            hashes = self._hash(files)
            wrong = [file for file, found in zip(files, hashes, strict=True) if found is None]
            if not wrong:
                return {file.name: found for file, found in zip(files, hashes, strict=True) if found}
            for file in wrong:
                (self.folder / file.name).unlink()
            if attempt == 1:
                what = "%s: %d files have another hash than listed, fetching them again"
                logger.warning(what, wrong[0].name, len(wrong))
        listed = f"{endpoint()} lists for {self.source.repository} at {self.listing.commit}"
        rule = f"its hash is not what {listed}, fetched twice"
        raise ValueError(f"{wrong[0].name}: {rule}. Fix: try again later, or another HF_ENDPOINT.")

    def _get(self, missing: list[HubFile]) -> None:
        num_files = f"{len(missing)} of {len(self.listing.files)} files"
        check_online(f"{num_files} are missing in {self.folder}, such as {missing[0].name}")
        # of a killed process: the library starts such a file anew
        for leftover in (self.folder / ".cache").rglob("*.incomplete"):
            leftover.unlink()
        for file in missing:  # a file of another size would be taken for complete
            (self.folder / file.name).unlink(missing_ok=True)
        sizes = {file.name: file.bytes for file in missing}
        check_free_disk(self.folder, sum(sizes.values()), f"the download of {self.source.name}")
        repository, revision = self.source.repository or "", self.source.revision
        bar = progress_of(lambda: _bytes_so_far(self.folder, sizes), "download", sum(sizes.values()))
        with explained(repository, revision), bar:
            patiently(lambda: self._get_once(missing), self.max_failures, lambda: len(self.missing(missing)))

    def _get_once(self, files: Sequence[HubFile]) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        names = [file.name for file in self.missing(files)]
        patterns = [glob.escape(name) for name in names]
        if len(names) > _MANY_FILES:  # it compares each with each file of the repository
            suffixes = {name[-len(ending(name)) :] for name in names}
            patterns = list(self.source.patterns) or [f"*{suffix}" for suffix in sorted(suffixes)]
        disable_progress_bars()  # of each file
        snapshot_download(
            self.source.repository or "",
            repo_type="dataset",
            revision=self.listing.commit,
            local_dir=self.folder,
            allow_patterns=patterns,
            max_workers=self.max_workers,
            endpoint=endpoint(),
        )
        missing = self.missing(files)
        there = [file for file in missing if (self.folder / file.name).is_file()]
        if there:
            size = (self.folder / there[0].name).stat().st_size
            (self.folder / there[0].name).unlink()
            rule = f"has {size:,} bytes, {endpoint()} lists {there[0].bytes:,} at {self.listing.commit}"
            raise ValueError(f"{there[0].name}: {rule}. Fix: try again later, or another HF_ENDPOINT.")
        if missing:  # the library returns the folder as it is where it cannot list the files
            raise ConnectionError(f"{len(missing)} files did not come, such as {missing[0].name}")

    def _hash(self, files: Sequence[HubFile]) -> list[_Hashes | None]:
        workers = min(self.max_workers, os.cpu_count() or 1)
        found = []
        with (
            progress("check", sum(file.bytes for file in files)) as advance,
            ThreadPoolExecutor(workers) as pool,
        ):
            for file, hashes in zip(
                files, pool.map(lambda one: _hash_file(self.folder, one), files), strict=True
            ):
                found.append(hashes)
                advance(file.bytes)
        return found


def _has_size(folder: Path, file: HubFile) -> bool:
    try:
        return (folder / file.name).stat().st_size == file.bytes
    except (FileNotFoundError, NotADirectoryError):
        return False


def _hash_file(folder: Path, file: HubFile) -> _Hashes | None:
    """Hashes of a file from one pass; None if they are not what the listing says."""
    content, whole = hashlib.sha256(), xxhash.xxh3_128()
    blob = hashlib.sha1(f"blob {file.bytes}\0".encode(), usedforsecurity=False)
    with (folder / file.name).open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            content.update(chunk)
            whole.update(chunk)
            if file.sha256 is None:
                blob.update(chunk)
    found, listed = (content, file.sha256) if file.sha256 else (blob, file.blob)
    return (whole.hexdigest(), content.hexdigest()) if found.hexdigest() == listed else None


def _bytes_so_far(folder: Path, sizes: dict[str, int]) -> int:
    """Bytes of finished files, which have a .metadata file, and of files that still grow."""
    root = folder / ".cache" / "huggingface" / "download"
    total = 0
    for path in root.rglob("*"):
        if path.suffix == ".metadata":
            total += sizes.get(path.relative_to(root).as_posix().removesuffix(".metadata"), 0)
        elif path.suffix == ".incomplete":
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total
