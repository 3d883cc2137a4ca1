"""A dataset's files from the hub: listed at one commit, fetched, compared with the listing, and told in a manifest.

huggingface_hub moves the bytes. What it accepts and this does not: a pattern that matches nothing, a file of another size than listed,
a server that fails while the folder holds something. Its own retries are few, so failures that pass are waited out here.
Files are checked as they are on disk: their size, and the SHA-256 (or git's SHA-1 of small ones) that the hub has for them.
"""

from __future__ import annotations

import email.utils
import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from moe_exp.data.progress import print_summary, progress
from moe_exp.data.sources import DATA_SUFFIXES, Source, chosen_files, local_files
from moe_exp.data.stage import Stage, check_free_disk, run_stage, write_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_WAIT_SECONDS = 60.0
_LONGEST_RETRY_AFTER_SECONDS = 900.0
_POLL_SECONDS = 1.0
_CHUNK_BYTES = 2**22
_LISTING, _CHECKED = "listing.json", "checked.jsonl"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it; `sha256` where it is kept outside of git, `blob` is git's SHA-1 otherwise."""

    name: str
    bytes: int
    sha256: str | None
    blob: str


@dataclass(frozen=True)
class Listing:
    """The files of a source at one commit, sorted by name."""

    commit: str
    files: tuple[HubFile, ...]

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
    """The data files of a source on this machine, sorted: fetched into `folder`, or those of its path as they are.

    A call that was stopped goes on with the files that are not complete, at the same commit. One that is finished makes no request.
    The token is huggingface_hub's (HF_TOKEN, or `hf auth login`), the server HF_ENDPOINT.

    Args:
        source: what; for the standard library, which needs no files, the result is empty.
        folder: gets the files under their names in the repository, and manifest.json.
        max_workers: files at the same time.
        dry_run: print how much there is to do, write nothing, and return the paths that there would be.
        start_over: fetch everything again, at the commit that the revision stands for now.
        max_failures: failures in a row, without one more complete file, before it gives up.
        bytes_per_second: of the network, for the estimate of `dry_run`.

    Raises:
        ValueError: a pattern matches nothing; no access; no such dataset or revision; too little disk; a file that is not what the
            listing says; the folder was made from something else; files are missing and HF_HUB_OFFLINE is set.
        ConnectionError: the server keeps failing.
    """
    if source.path is not None:
        return local_files(source)
    if source.repository is None:
        return []
    folder = Path(folder)
    if dry_run:
        listing, complete = _plan(source, folder, start_over=start_over, max_failures=max_failures)
        _print_plan(source, folder, listing, complete, bytes_per_second)
        return [folder / file.name for file in listing.files]
    settings = {"repository": source.repository, "revision": source.revision, "patterns": list(source.patterns)}
    with run_stage("download", folder, settings=settings, inputs=(), start_over=start_over) as stage:
        listing = _known_listing(stage) or _list_files(source, max_failures)
        hub = _Fetcher(source, listing, stage.folder, max_workers, max_failures)
        if stage.manifest is None:
            write_json(stage.folder / _LISTING, asdict(listing))
            _finish(stage, source, listing, hub.fetch())
        elif hub.missing():
            logger.warning("%s: %d files are gone or were changed, fetching them", folder, len(hub.missing()))
            hub.fetch()
            _remove_traces(stage.folder)
    return [folder / file.name for file in listing.files]


def _known_listing(stage: Stage) -> Listing | None:
    """Of the finished or the interrupted download: the revision may stand for another commit by now."""
    if stage.manifest is not None:
        return Listing.from_json(stage.manifest)
    try:
        return Listing.from_json(json.loads((stage.folder / _LISTING).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _finish(stage: Stage, source: Source, listing: Listing, outputs: list[dict[str, Any]]) -> None:
    _remove_traces(stage.folder)
    facts = asdict(listing) | {"num_files": len(listing.files), "num_bytes": listing.num_bytes}
    facts |= {"endpoint": endpoint(), "licence": source.licence, "text_field": source.text_field}
    manifest = stage.finish_folder(outputs, **facts)
    rows = {"dataset": source.repository, "commit": listing.commit, "files": len(listing.files), "bytes": listing.num_bytes}
    print_summary(f"Downloaded {source.name}", rows | {"licence": source.licence, "folder": stage.output, "seconds": manifest["seconds"]})


def _remove_traces(folder: Path) -> None:
    """What only an interrupted download needs; the library keeps a small file for each of its own in .cache."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for name in (_LISTING, _CHECKED):
        (folder / name).unlink(missing_ok=True)


# ---- what there is


def endpoint() -> str:
    """Address of the hub; the library reads HF_ENDPOINT once, when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _list_files(source: Source, max_failures: int) -> Listing:
    from huggingface_hub import HfApi

    _check_online(f"the files of {source.repository} are not known yet")
    api = HfApi(endpoint=endpoint())

    def list_once() -> Listing:
        commit = source.revision
        if not _COMMIT.fullmatch(commit):
            commit = api.dataset_info(source.repository, revision=source.revision, timeout=60).sha
        found = api.list_repo_tree(source.repository, recursive=True, revision=commit, repo_type="dataset")
        files = {file.path: file for file in found if hasattr(file, "blob_id")}  # folders have none
        names = chosen_files(list(files), source.patterns, f"{source.repository} at {source.revision}")
        listed = ((name, files[name]) for name in names)
        return Listing(commit, tuple(HubFile(name, one.size, one.lfs and one.lfs.sha256, one.blob_id) for name, one in listed))

    with _explained(source):
        return _patiently(list_once, max_failures)


def _plan(source: Source, folder: Path, *, start_over: bool, max_failures: int) -> tuple[Listing, set[str]]:
    """The listing, and the names of the files that are there already. Writes nothing."""
    for place, name in ((folder, "manifest.json"), (folder.with_name(folder.name + ".partial"), _LISTING)):
        if (place / name).is_file() and not start_over:
            listing = Listing.from_json(json.loads((place / name).read_text(encoding="utf-8")))
            return listing, {file.name for file in listing.files if _has_size(place, file)}
    return _list_files(source, max_failures), set()


def _print_plan(source: Source, folder: Path, listing: Listing, complete: set[str], bytes_per_second: float) -> None:
    left_bytes = sum(file.bytes for file in listing.files if file.name not in complete)
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    rows = {
        "dataset": f"{source.repository} at {listing.commit}",
        "files": f"{len(listing.files):,}, of which {len(complete):,} are there",
        "bytes to fetch": f"{left_bytes:,} ({left_bytes / 1e9:.1f} GB)",
        "free disk": f"{shutil.disk_usage(existing).free / 1e9:.1f} GB at {folder}",
        "time": f"{left_bytes / bytes_per_second / 3600:.1f} hours at {bytes_per_second / 1e6:g} MB/s",
        "licence": source.licence,
    }
    print_summary(f"To download: {source.name}", rows)


# ---- fetching and checking


class _Fetcher:
    """Brings the files of a listing into a folder, complete and checked."""

    def __init__(self, source: Source, listing: Listing, folder: Path, max_workers: int, max_failures: int):
        self.source, self.listing, self.folder = source, listing, folder
        self.max_workers, self.max_failures = max_workers, max_failures

    def missing(self) -> list[HubFile]:
        return [file for file in self.listing.files if not _has_size(self.folder, file)]

    def fetch(self) -> list[dict[str, Any]]:
        """Returns name, size and hashes of every file, in the order of the listing."""
        for attempt in (1, 2):
            if missing := self.missing():
                self._get(missing)
            checked, wrong = self._check()
            if not wrong:
                return [checked[file.name] for file in self.listing.files]
            for file in wrong:
                (self.folder / file.name).unlink()
            if attempt == 1:
                logger.warning("%s: %d files have another hash than listed, fetching them again", wrong[0].name, len(wrong))
        raise ValueError(
            f"{wrong[0].name}: its hash is not what {endpoint()} lists for {self.source.repository} at {self.listing.commit}, "
            "fetched twice. Fix: try another HF_ENDPOINT."
        )

    def _get(self, missing: list[HubFile]) -> None:
        _check_online(f"{len(missing)} of {len(self.listing.files)} files are missing in {self.folder}, such as {missing[0].name}")
        for leftover in (self.folder / ".cache").rglob("*.incomplete"):  # of a killed process: the library starts such a file anew
            leftover.unlink()
        for file in missing:  # a file of another size would be taken for complete
            (self.folder / file.name).unlink(missing_ok=True)
        left_bytes = sum(file.bytes for file in missing)
        check_free_disk(self.folder, left_bytes, f"the download of {self.source.name}")
        with _explained(self.source), _watch(self.folder, missing):
            _patiently(self._get_once, self.max_failures, lambda: len(self.missing()))

    def _get_once(self) -> None:
        from huggingface_hub import snapshot_download

        patterns = list(self.source.patterns) or [f"*{suffix}" for suffix in DATA_SUFFIXES]
        snapshot_download(
            self.source.repository or "",
            repo_type="dataset",
            revision=self.listing.commit,
            local_dir=self.folder,
            allow_patterns=patterns,
            max_workers=self.max_workers,
            endpoint=endpoint(),
            tqdm_class=_silent_bar(),
        )
        missing = self.missing()
        there = [file for file in missing if (self.folder / file.name).is_file()]
        if there:
            size = (self.folder / there[0].name).stat().st_size
            (self.folder / there[0].name).unlink()
            rule = f"has {size:,} bytes, {endpoint()} lists {there[0].bytes:,} at {self.listing.commit}"
            raise ValueError(f"{there[0].name}: {rule}. Fix: try again later, or another HF_ENDPOINT.")
        if missing:  # the library returns the folder as it is where it cannot list the files
            raise _IncompleteError(f"{len(missing)} files did not come, such as {missing[0].name}")

    def _check(self) -> tuple[dict[str, dict[str, Any]], list[HubFile]]:
        """Hashes what was not hashed before the process was killed. Returns (name to entry of the manifest, files that are wrong)."""
        journal = self.folder / _CHECKED
        checked = _read_journal(journal, self.folder)
        todo = [file for file in self.listing.files if file.name not in checked]
        done_bytes = self.listing.num_bytes - sum(file.bytes for file in todo)
        wrong, lock = [], threading.Lock()
        workers = min(self.max_workers, os.cpu_count() or 1)
        with progress("check", self.listing.num_bytes, done=done_bytes) as advance, journal.open("a", encoding="utf-8") as log:

            def count(num_bytes: int) -> None:
                with lock:
                    advance(num_bytes)

            with ThreadPoolExecutor(workers) as pool:
                hashing = {pool.submit(_hash_file, self.folder / file.name, file, count): file for file in todo}
                for future in as_completed(hashing):
                    file, entry = hashing[future], future.result()
                    if entry is None:
                        wrong.append(file)
                        continue
                    checked[file.name] = entry
                    stamp = (self.folder / file.name).stat().st_mtime_ns
                    log.write(json.dumps({**entry, "mtime_ns": stamp}) + "\n")
                    log.flush()
        return checked, wrong


class _IncompleteError(ConnectionError):
    """The library came back without all files."""


def _has_size(folder: Path, file: HubFile) -> bool:
    try:
        return (folder / file.name).stat().st_size == file.bytes
    except (FileNotFoundError, NotADirectoryError):
        return False


def _hash_file(path: Path, file: HubFile, count: Callable[[int], None]) -> dict[str, Any] | None:
    """Entry of the manifest, or None where the hash is not that of the listing. Both hashes in one pass over the file."""
    content, whole = hashlib.sha256(), xxhash.xxh3_128()
    blob = hashlib.sha1(f"blob {file.bytes}\0".encode(), usedforsecurity=False)
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            content.update(chunk)
            whole.update(chunk)
            if file.sha256 is None:
                blob.update(chunk)
            count(len(chunk))
    found, listed = (content, file.sha256) if file.sha256 else (blob, file.blob)
    if found.hexdigest() != listed:
        return None
    return {"name": file.name, "bytes": file.bytes, "hash": whole.hexdigest(), "sha256": content.hexdigest()}


def _read_journal(journal: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Entries of files that are still what they were when they were hashed."""
    found: dict[str, dict[str, Any]] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        try:
            entry = json.loads(line)
            stat = (folder / entry["name"]).stat()
        except (ValueError, FileNotFoundError):  # half a line of a killed process; a file that is gone
            continue
        if (stat.st_mtime_ns, stat.st_size) == (entry.pop("mtime_ns"), entry["bytes"]):
            found[entry["name"]] = entry
    return found


# ---- progress


def _silent_bar() -> type:
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **settings: Any):
            super().__init__(*args, **{**settings, "disable": True})

    return Silent


@contextmanager
def _watch(folder: Path, missing: list[HubFile]) -> Iterator[None]:
    """Our progress bar, from what grows on disk: how the library tells its own differs from version to version."""
    sizes = {file.name: file.bytes for file in missing}
    stop = threading.Event()
    with progress("download", sum(sizes.values())) as advance:

        def poll() -> None:
            seen, is_last = 0, False
            while not is_last:
                is_last = stop.wait(_POLL_SECONDS)
                now = _bytes_so_far(folder, sizes)
                advance(now - seen)
                seen = now

        thread = threading.Thread(target=poll, name="download progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _bytes_so_far(folder: Path, sizes: dict[str, int]) -> int:
    """Of finished files, which have a .metadata there, and of those that grow."""
    root = folder / ".cache" / "huggingface" / "download"
    total = 0
    for place, _, names in os.walk(root):
        for name in names:
            path = Path(place) / name
            if name.endswith(".metadata"):
                total += sizes.get(path.relative_to(root).as_posix().removesuffix(".metadata"), 0)
            elif name.endswith(".incomplete"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
    return total


# ---- failures


def _patiently(action: Callable[[], T], max_failures: int, num_left: Callable[[], int] = lambda: 0) -> T:
    """Runs it until it succeeds, or has failed `max_failures` times since `num_left()` went down; waits longer each time."""
    failures, best = 0, num_left()
    while True:
        try:
            return action()
        except Exception as error:
            if not _passes(error):
                raise
            left = num_left()
            failures = 1 if left < best else failures + 1
            best = min(best, left)
            if failures >= max_failures:
                raise
            # Jitter: workers of one cluster that were refused together do not come back together.
            seconds = max(min(_LONGEST_WAIT_SECONDS, 2.0 ** (failures - 1)), _retry_after(error)) * random.uniform(1.0, 1.5)
            logger.warning("%s. Failure %d of %d, trying again in %.0f s", _first_line(error), failures, max_failures, seconds)
            time.sleep(seconds)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; the library wraps what the server said."""
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    """HTTP status that the server answered with."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None


def _passes(error: BaseException) -> bool:
    """Whether trying again may help: the server is busy or broken, or the connection is."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, (ConnectionError, TimeoutError)):
            return False  # of this machine: disk full, no permission
    # Errors of a connection have the type of the library's HTTP package, which differs from version to version; hf_xet has RuntimeError.
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, RuntimeError)) or package in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


def _retry_after(error: BaseException) -> float:
    """Seconds that the server asks to wait, 0 where it says nothing."""
    for cause in _causes(error):
        value = getattr(getattr(cause, "response", None), "headers", {}).get("Retry-After")
        if value is None:
            continue
        try:
            seconds = float(value) if value.isdigit() else email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            continue
        return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_SECONDS)
    return 0.0


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _check_online(why: str) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ValueError(f"{name}={os.environ[name]}: {why}. Fix: unset it, or bring the whole folder with its manifest.json.")


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turns what the library raises into one line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"{endpoint()}/datasets/{source.repository}"
    try:
        yield
    except Exception as error:
        kinds = tuple(type(cause) for cause in _causes(error))
        if any(issubclass(kind, GatedRepoError) for kind in kinds) or _status(error) == 403:
            rule = "its owner gives access on request"
            fix = f"accept its licence on {page}, and set HF_TOKEN to a token of that account"
        elif (
            any(issubclass(kind, RepositoryNotFoundError) for kind in kinds)
            or _status(error) in (401, 404)
            and RevisionNotFoundError not in kinds
        ):
            rule = f"{endpoint()} has no such dataset, or none that is open to everyone"
            fix = "check the name (a local folder has to exist); for a private one set HF_TOKEN to a token that may read it"
        elif any(issubclass(kind, RevisionNotFoundError) for kind in kinds):
            raise ValueError(
                f"revision={source.revision}: {source.repository} has none of that name. Fix: choose one of {page}."
            ) from error
        elif isinstance(error, ValueError) or isinstance(error, OSError) and error.errno == errno.ENOSPC or not _passes(error):
            raise
        else:
            fix = "call it again: complete files are kept"
            raise ConnectionError(f"{source.repository}: {endpoint()} keeps failing ({_first_line(error)}). Fix: {fix}.") from error
        raise ValueError(f"source={source.repository}: {rule}. Fix: {fix}.") from error
