"""Files in an object store, through fsspec: s3:// with s3fs, gs:// with gcsfs, hf:// with huggingface_hub.

These packages read credentials and the server address from AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN and fsspec's configuration.
"""

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from moe_exp.host.files import is_url, sync_folder
from moe_exp.host.progress import Advance

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_FAILURES = 8  # consecutive; takes about three minutes
_UNREACHABLE_FAILURES = 4  # if this process has never reached the server: its address may be wrong
_PART_BYTES = 2**25
_WORKERS = 8  # parallel files
# the packages' names for the version of a file's content, best first
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5Hash", "LastModified", "mtime", "created")
_FINAL = (
    FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError,
    NotImplementedError, ImportError, TypeError, ValueError,
)  # fmt: skip
# error classes of botocore and others by name, because the packages are not imported here
_NO_ACCESS = {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_UNREACHABLE_NAMES = {"EndpointConnectionError", "ClientConnectorError", "ConnectError", "gaierror"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "data"}

_reached: set[str] = set()  # protocols whose server has answered


@dataclass(frozen=True)
class StoredFile:
    """Size and version of a file in a store."""

    bytes: int
    version: str  # changes with the content: an ETag or the store's equivalent


class Store:
    """Files below a URL. Thread-safe and fork-safe.

    All methods raise a ValueError if the store denies access or the URL is invalid, and a ConnectionError if
    the store keeps failing. Each error message is a single line and says how to fix the problem.
    """

    def __init__(self, url: str):
        if not is_url(url):
            raise ValueError(f"{url}: must be a URL. Fix: give a URL such as s3://bucket/folder.")
        self.url = url.rstrip("/")
        self.protocol = url.partition("://")[0]

    def _asked(self, name: str, action: Callable[[Any, str], T]) -> T:
        """Returns `action(file system, path of the file)`. Calls `action` again after a temporary error."""
        try:
            from fsspec.core import url_to_fs

            # fsspec caches one file system per process
            fs, root = url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            extra = _EXTRAS.get(self.protocol, "")
            fix = f'pip install "moe-exp[{extra}]"' if extra else "give an s3://, gs:// or hf:// URL"
            raise ValueError(f"{self.url}: {first_line(error)}. Fix: {fix}.") from None
        place = f"{root}/{name}" if name else root

        def limit_of(error: Exception) -> int | None:
            is_unreachable = bool(names_of(error) & _UNREACHABLE_NAMES)
            return _UNREACHABLE_FAILURES if is_unreachable and self.protocol not in _reached else None

        try:
            found = patiently(lambda: action(fs, place), _MAX_FAILURES, passes=_may_pass, limit_of=limit_of)
        except FileNotFoundError:
            _reached.add(self.protocol)
            raise FileNotFoundError(errno.ENOENT, "file not found", self._named(name)) from None
        except Exception as error:
            kind: type[Exception] = ValueError
            rule = first_line(error)
            fix = "check the URL, the region and the store's Python package"
            if names_of(error) & _NO_ACCESS:
                rule = f"access denied ({rule})"
                fix = "set the store's credentials (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
            elif _may_pass(error):
                kind, rule = ConnectionError, f"the store keeps failing ({rule})"
                fix = "check the network and the store's address (for S3 AWS_ENDPOINT_URL), then try again"
            raise kind(f"{self._named(name)}: {rule}. Fix: {fix}.") from error
        _reached.add(self.protocol)
        return found

    def _named(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _listed(self, name: str, action: Callable[[Any, str], T], missing: T) -> T:
        """Result of `action`; `missing` if the file or folder does not exist."""
        try:
            return self._asked(name, action)
        except FileNotFoundError:
            return missing

    def files(self) -> dict[str, StoredFile]:
        """All files below the URL; keys are names relative to the URL."""

        def listed(fs: Any, root: str) -> dict[str, StoredFile]:
            found = fs.find(root, detail=True)
            names = {path: path[len(root) :].lstrip("/") for path in found if path.startswith(f"{root}/")}
            return {name: _stored(found[path]) for path, name in sorted(names.items())}

        return self._listed("", listed, {})

    def find(self, name: str) -> StoredFile | None:
        """Size and version of a file; None if it does not exist."""
        info = self._listed(name, lambda fs, place: fs.info(place), {"type": "missing"})
        return _stored(info) if info["type"] == "file" else None

    def names(self) -> list[str]:
        """Names of the files directly below the URL, without those in subfolders."""
        found: list[Any] = self._listed("", lambda fs, root: fs.ls(root, detail=True), [])
        return sorted(one["name"].rpartition("/")[2] for one in found if one["type"] == "file")

    def some(self, names: Collection[str]) -> dict[str, StoredFile]:
        """The existing files among `names`."""
        if len(names) > 64:  # listing all files is faster
            listed = self.files()
            return {name: listed[name] for name in names if name in listed}
        with ThreadPoolExecutor(_WORKERS) as pool:
            found = zip(names, pool.map(self.find, names), strict=True)
            return {name: file for name, file in found if file is not None}

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes `start` to `end` (exclusive) of a file; FileNotFoundError if it does not exist."""

        def read(fs: Any, place: str) -> bytes:
            data = bytes(fs.cat_file(place, start=start, end=end) if end is not None else fs.cat_file(place))
            if end is not None and len(data) != end - start:
                raise OSError(f"{place}: received {len(data)} bytes instead of {end - start}")
            return data

        return self._asked(name, read)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Results of `read` for each (start, end), read in parallel."""
        with ThreadPoolExecutor(2 * _WORKERS) as pool:
            yield from pool.map(lambda one: self.read(name, *one), ranges)

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file."""
        self._written(name, lambda fs, place: fs.pipe_file(place, data))

    def _written(self, name: str, action: Callable[[Any, str], None]) -> None:
        try:
            self._asked(name, action)
        except FileNotFoundError:
            raise ValueError(f"{self.url}: bucket not found. Fix: create it, or correct the URL.") from None

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._asked(name, lambda fs, place: fs.rm_file(place))

    def upload(self, path: Path, name: str) -> None:
        """Uploads `path`; FileNotFoundError if it is missing, ConnectionError if the copy's size differs."""
        num_bytes = path.stat().st_size
        # by default, s3fs holds ten parts of each file in memory
        options = {"max_concurrency": 2} if self.protocol == "s3" else {}
        self._written(name, lambda fs, place: fs.put_file(str(path), place, **options))
        found = self.find(name)
        if found is None or found.bytes != num_bytes:
            rule = f"has {found.bytes if found else 0} bytes after the upload, but {path} has {num_bytes}"
            raise ConnectionError(f"{self._named(name)}: {rule}. Fix: try again.")

    def download(self, name: str, path: Path, known: StoredFile, advance: Advance) -> None:
        """Downloads a file, or resumes its download. Raises ConnectionError if `known` is outdated."""
        version = xxhash.xxh3_64_hexdigest(f"{known.version} {known.bytes}".encode())
        partial = path.with_name(f".{path.name}.{version[:8]}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as file:
            start = file.tell()
            advance(start)
            while start < known.bytes:
                end = min(start + 4 * _PART_BYTES, known.bytes)
                # four parts at once: bounds memory and the loss if the download is interrupted
                begins = range(start, end, _PART_BYTES)
                for data in self.read_ranges(name, [(one, min(one + _PART_BYTES, end)) for one in begins]):
                    file.write(data)
                    advance(len(data))
                start = end
            file.flush()
            os.fsync(file.fileno())
        # if the file has changed meanwhile, the parts may be from two versions
        if self.find(name) != known:
            partial.unlink()
            rule = "the file changed during the download"
            raise ConnectionError(f"{self._named(name)}: {rule}. Fix: do not modify the file, and try again.")
        partial.replace(path)
        sync_folder(path.parent)


def _stored(info: Mapping[str, Any]) -> StoredFile:
    return StoredFile(int(info["size"]), next((str(info[key]) for key in _VERSIONS if info.get(key)), ""))


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed."""
    final = _NO_ACCESS | {"InvalidRegionError", "ParamValidationError"}
    numbers = (errno.EINVAL, errno.ENOSPC, errno.EPERM, errno.ENAMETOOLONG)
    is_final = isinstance(error, _FINAL) or bool(names_of(error) & final)
    return not is_final and getattr(error, "errno", None) not in numbers


def names_of(error: BaseException | None) -> set[str]:
    """Names of the classes of an error and of its causes."""
    if error is None:
        return set()
    return {kind.__name__ for kind in type(error).__mro__} | names_of(error.__cause__)


def patiently(
    action: Callable[[], T], max_failures: int, *, passes: Callable[[Exception], bool],
    num_left: Callable[[], int] = lambda: 0, limit_of: Callable[[Exception], int | None] = lambda _: None,
    wait_of: Callable[[Exception], float] = lambda _: 0.0,
) -> T:  # fmt: skip
    """Calls `action`, repeats it after temporary failures, and returns its result.

    Args:
        max_failures: number of failures in a row after which the error is raised. The count starts again when
            `num_left` decreases.
        passes: returns whether an error is temporary.
        num_left: returns the remaining amount of work.
        limit_of: returns the limit to use instead of `max_failures` for an error; None keeps `max_failures`.
        wait_of: returns the wait in seconds that an error requests.
    """
    failures, best = 0, num_left()
    while True:
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            left = num_left()
            failures = 1 if left < best else failures + 1
            best = min(best, left)
            if failures >= (limit_of(error) or max_failures):
                raise
            # Jitter, so that workers of a cluster that were refused together do not retry together.
            seconds = max(min(60.0, 2.0 ** (failures - 1)), wait_of(error))
            seconds *= random.uniform(1.0, 1.5)
            what = "%s (failure %d of %d, retrying in %.0f s)"
            logger.warning(what, first_line(error), failures, max_failures, seconds)
            time.sleep(seconds)


def first_line(error: BaseException) -> str:
    """First line of an error's text without the final period. The error's class name if the text is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


# Sets of files. Stores cannot rename: a set is complete once its manifest, the file that lists the others,
# exists. Therefore the manifest is written last.


def send(store: Store, files: Mapping[str, Path], manifest: str, content: bytes, advance: Advance) -> bool:
    """Uploads `files` (keys: names in the store), then publishes them by writing `manifest`.

    The manifest's `content` must be unique to these files. A repeated call resumes an interrupted upload.
    Files published with other `content` are replaced; the old manifest is removed first, because otherwise a
    mix of old and new files would look complete. Returns whether anything was uploaded.
    """
    # The manifest of an unfinished upload: with the same content it is resumed, otherwise started over.
    begun = f"{manifest}.partial"
    there = store.some([*files, manifest, begun])
    sizes = {name: path.stat().st_size for name, path in files.items()}
    same = {name for name, size in sizes.items() if name in there and there[name].bytes == size}
    is_published = manifest in there and store.read(manifest) == content
    if is_published and same == set(files):
        return False
    if manifest in there:
        store.remove(manifest)
    if not is_published and not (begun in there and store.read(begun) == content):
        for name in same:  # of unknown origin: resuming this upload would keep them, because sizes match
            store.remove(name)
        store.write(begun, content)
        same = set()

    def copy(name: str, count: Advance) -> None:
        if name not in same:
            store.upload(files[name], name)
        count(sizes[name])

    _each(copy, sizes, advance)
    store.write(manifest, content)
    store.remove(begun)
    return True


def fetch(store: Store, files: Mapping[str, StoredFile], folder: Path, advance: Advance) -> None:
    """Downloads files into a folder; existing files of the right size are kept."""

    def copy(name: str, count: Advance) -> None:
        path, known = folder / name, files[name]
        if path.is_file() and path.stat().st_size == known.bytes:
            count(known.bytes)
        else:
            store.download(name, path, known, count)

    _each(copy, {name: known.bytes for name, known in files.items()}, advance)


def _each(copy: Callable[[str, Advance], None], sizes: Mapping[str, int], advance: Advance) -> None:
    """Calls `copy(name, advance)` for all files in parallel, the largest first; stops at an error."""
    lock, stopped = threading.Lock(), threading.Event()

    def count(num_bytes: int, now: str = "", /) -> None:
        if stopped.is_set():
            raise InterruptedError  # stops a large file between two parts
        with lock:
            advance(num_bytes)

    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    with ThreadPoolExecutor(_WORKERS) as pool:
        try:
            list(pool.map(copy, names, repeat(count)))  # after an error, cancels files that wait
        finally:
            stopped.set()
