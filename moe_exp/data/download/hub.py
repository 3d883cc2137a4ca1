"""Downloads of datasets and models from the Hugging Face Hub.

huggingface_hub transfers the files, resumes partial ones and retries a request a few times; this module
retries longer. A final pass compares each file's hash with the hash listed by the Hub: SHA-256, or git's
SHA-1 for small files.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import xxhash

from moe_exp.data.download.sources import Source, check_inside, chosen_files, local_files, model_files
from moe_exp.data.download.stores import LISTING, Listing, fetch_from_store, kept_listing, list_store
from moe_exp.data.kinds import input_error
from moe_exp.data.stage import RUNNING, check_free_disk, free_disk, read_json, run_stage
from moe_exp.host.files import bytes_text
from moe_exp.host.object_store import StoredFile, first_line, names_of, patiently
from moe_exp.host.progress import print_summary, progress, progress_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_BYTES = 2**22
# The HTTP package, and with it the error types, depends on the version of huggingface_hub.
_HTTP_PACKAGES = frozenset({"httpx", "httpx2", "httpcore", "requests", "urllib3"})
_UNREACHABLE = frozenset({"ConnectError", "NewConnectionError", "ConnectionRefusedError", "gaierror"})

_Hashes = tuple[str, str]  # XXH3-128 and SHA-256 of a file


def download(
    source: Source, folder: Path, *, max_workers: int = 8, dry_run: bool = False, start_over: bool = False,
    max_failures: int = 6, bytes_per_second: float = 50e6,
) -> list[Path]:  # fmt: skip
    """Downloads the data files of a source into `folder` and returns their sorted paths.

    Repeat the call to resume the download at the same commit. If all files are present, no request is sent.
    As in huggingface_hub, the token comes from HF_TOKEN or `hf auth login`, and the server from HF_ENDPOINT.
    The files of a local source are not copied.

    Args:
        source: source to download. The embedded corpus (Python's standard library) requires no download.
        folder: destination of manifest.json and of the files, which have the same names as in the repository.
        dry_run: print the remaining work, write nothing and return the expected paths.
        start_over: download everything again, at the commit that the revision now refers to.
        max_failures: give up after this many consecutive failures. Each completed file restarts the count.
        bytes_per_second: assumed network speed for the estimate of `dry_run`.

    Raises:
        ValueError: if a pattern matches nothing, access is denied, the dataset or revision is missing, free
            space is too small, a file differs from the listing, the folder was created with other settings,
            or files are missing and HF_HUB_OFFLINE is set.
        ConnectionError: if the server keeps failing.
    """
    if source.path is not None:
        return local_files(source)
    if source.is_embedded:
        return []
    server = source.url or endpoint()
    list_now = partial(_list_files, source, max_failures)
    settings: dict[str, Any] = {"repository": source.repository, "revision": source.revision}
    if source.url:
        list_now, settings = partial(list_store, source), {"url": source.url}
    settings |= {"patterns": list(source.patterns)}
    if dry_run:
        return _plan(source, folder, None if start_over else settings, list_now, bytes_per_second)
    with run_stage(
        "download", folder, settings=settings, inputs=(), start_over=start_over, mends_outputs=True
    ) as stage:
        # A resumed download keeps its commit: the revision may refer to another one by now.
        listing = kept_listing(stage, source.name, server, list_now)
        hub = _Fetcher(source, listing, stage.folder, max_workers, max_failures)
        if source.url:
            fetch_from_store(source, listing, stage)
        elif stage.manifest is None:
            hashes = hub.fetch(listing)
            facts: dict[str, Any] = {
                "commit": listing.commit, "endpoint": endpoint(), "licence": source.licence,
                "text_field": source.text_field, "num_files": len(hashes), "num_bytes": listing.num_bytes,
                "sha256": {name: sha256 for name, (_, sha256) in hashes.items()},
            }  # fmt: skip
            places = {stage.folder / name: whole for name, (whole, _) in hashes.items()}
            manifest = stage.finish(list(places), hashes=places, **facts)
            rows: dict[str, object] = {source.repo_type: source.repository, "commit": listing.commit}
            rows |= {"files": len(hashes), "bytes": facts["num_bytes"], "license": source.licence}
            rows |= {"folder": stage.output, "seconds": manifest["seconds"]}
            print_summary(f"Downloaded {source.name}", rows)
        elif (missing := listing.missing(stage.folder)).files:
            what = "%s: downloading %d files that are missing or differ in size"
            logger.warning(what, folder, len(missing.files))
            hub.fetch(missing)
        # huggingface_hub writes a metadata file per download there.
        shutil.rmtree(stage.output / ".cache", ignore_errors=True)
        (stage.output / LISTING).unlink(missing_ok=True)
    return [folder / name for name in listing.files]


def download_model(source: Source, parent: Path, check: Callable[[Path], object]) -> tuple[Path, str]:
    """Downloads a model to `parent/OWNER--NAME@REVISION`; a repeated call continues at the same commit.

    First downloads only config.json and calls `check` with its folder, then downloads all other files.
    Returns the folder and `hf://OWNER/NAME@COMMIT`. Raises the errors of `download` and `check`.
    """
    folder = parent / f"{source.repository}@{source.revision}".replace("/", "--")
    if not folder.exists():
        of_config, max_failures = replace(source, patterns=("config.json",)), 6
        with TemporaryDirectory() as place:
            listing = _list_files(of_config, max_failures)
            _Fetcher(of_config, listing, Path(place), 1, max_failures).fetch(listing)
            check(Path(place))
    download(source, folder)
    return folder, f"hf://{source.repository}@{(read_json(folder / 'manifest.json') or {})['commit']}"


# Listing


def _list_files(source: Source, max_failures: int) -> Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    repository, kind = source.repository or "", source.repo_type
    _check_online(f"the files of {repository} have not been listed yet")
    api = HfApi(endpoint=endpoint())

    def list_once() -> Listing:
        # Resolve a branch once, so that all files come from the same commit.
        commit: str | None = source.revision
        if not re.fullmatch(r"[0-9a-f]{40}", source.revision):
            commit = api.repo_info(repository, revision=source.revision, repo_type=kind, timeout=60).sha
        found = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type=kind)
        files = {file.path: file for file in found if isinstance(file, RepoFile)}
        for name in files:  # including files that are not selected: errors may print their names
            check_inside(name, endpoint())
        sizes = {name: file.size for name, file in files.items()}
        # not with the library's own patterns, which do not report that they match nothing
        choose = chosen_files if kind == "dataset" else model_files
        names = choose(sizes, source.patterns, f"{repository} at {source.revision}")
        versions = {name: one.lfs.sha256 if one.lfs else one.blob_id for name, one in files.items()}
        chosen = {name: StoredFile(sizes[name], versions[name]) for name in names}
        return Listing(endpoint(), chosen, commit or "")

    return _asked(list_once, source, max_failures)


def _plan(
    source: Source, folder: Path, settings: dict[str, Any] | None, list_now: Callable[[], Listing],
    bytes_per_second: float,
) -> list[Path]:  # fmt: skip
    """Prints what is left to download. Returns all paths. Ignores earlier downloads if `settings` is None."""
    listing, place, server = None, folder, source.url or endpoint()
    if settings is not None:  # a finished or interrupted download has stored its listing
        begun_folder = folder.with_name(folder.name + ".partial")
        begun = read_json(begun_folder / RUNNING) or {}
        if (manifest := read_json(folder / "manifest.json")) and manifest["settings"] == settings:
            listing = Listing.of_manifest(manifest, server)
        elif begun.get("settings") == settings and (listed := read_json(begun_folder / LISTING)):
            listing, place = Listing.from_json(listed), begun_folder
    listing = listing or list_now()
    left, num_files = listing.missing(place), len(listing.files)
    left_bytes, free_bytes = left.num_bytes, free_disk(folder)
    room = f"{bytes_text(free_bytes)} at {folder}{' (not enough)' if free_bytes < left_bytes else ''}"
    rows = {
        "dataset": source.url or f"{source.repository} at {listing.commit}",
        "files": f"{num_files:,} ({num_files - len(left.files):,} present)",
        "bytes to fetch": f"{left_bytes:,} ({bytes_text(left_bytes)})",
        "free disk": room,
        "time": f"{left_bytes / bytes_per_second / 3600:.1f} hours at {bytes_text(bytes_per_second)}/s",
        "license": source.licence,
    }
    print_summary(f"To download: {source.name}", rows)
    return [folder / name for name in listing.files]


# Transfer and verification


@dataclass
class _Fetcher:
    """Downloads the files of a listing into a folder and verifies them."""

    source: Source
    listing: Listing
    folder: Path
    max_workers: int
    max_failures: int

    def fetch(self, wanted: Listing) -> dict[str, _Hashes]:
        """Downloads the missing files, compares all files with the listing and returns the files' hashes."""
        # Try twice: a proxy or the disk may have damaged a file that is intact on the Hub.
        for attempt in (1, 2):
            if (missing := wanted.missing(self.folder)).files:
                self._get(missing)
            hashes, workers = dict[str, _Hashes](), min(self.max_workers, os.cpu_count() or 1)
            with progress("check", wanted.num_bytes) as advance, ThreadPoolExecutor(workers) as pool:
                hashed = pool.map(lambda one: _hash_file(self.folder / one[0], one[1]), wanted.files.items())
                for (name, file), found in zip(wanted.files.items(), hashed, strict=True):
                    advance(file.bytes)
                    if found is not None:
                        hashes[name] = found
            wrong = [name for name in wanted.files if name not in hashes]
            if not wrong:
                return hashes
            for name in wrong:
                (self.folder / name).unlink()
            if attempt == 1:
                logger.warning("%s: hash mismatch in %d files; downloading them again", wrong[0], len(wrong))
        listed = f"{endpoint()} lists for {self.source.repository} at {self.listing.commit}"
        rule = f"its hash differs from the one that {listed}, after two downloads"
        raise input_error(wrong[0], rule, "try again later or set another HF_ENDPOINT")

    def _get(self, missing: Listing) -> None:
        num_files = f"{len(missing.files)} of {len(self.listing.files)} files"
        _check_online(f"{num_files} are missing in {self.folder}, such as {next(iter(missing.files))}")
        # Left by a terminated process: huggingface_hub restarts such a file from its first byte.
        for leftover in (self.folder / ".cache").rglob("*.incomplete"):
            leftover.unlink()
        for name in missing.files:  # huggingface_hub would accept a file of another size as complete
            (self.folder / name).unlink(missing_ok=True)
        check_free_disk(self.folder, missing.num_bytes, f"the download of {self.source.name}")

        def get() -> None:
            from huggingface_hub.utils.tqdm import disable_progress_bars

            disable_progress_bars()  # one bar per file
            with ThreadPoolExecutor(self.max_workers) as pool:
                list(pool.map(self._get_file, missing.missing(self.folder).files))

        with progress_of(lambda: bytes_there(self.folder, missing), "download", missing.num_bytes):
            _asked(get, self.source, self.max_failures, lambda: len(missing.missing(self.folder).files))

    def _get_file(self, name: str) -> None:
        from huggingface_hub import hf_hub_download

        place: dict[str, Any] = {"revision": self.listing.commit, "endpoint": endpoint()}
        place |= {"repo_type": self.source.repo_type, "local_dir": self.folder}
        path = Path(hf_hub_download(self.source.repository or "", name, **place))
        # huggingface_hub compares with the server's present metadata, not with our listing.
        if (size := path.stat().st_size) != (listed := self.listing.files[name].bytes):
            path.unlink()
            rule = f"has {size:,} bytes, but {endpoint()} lists {listed:,} at {self.listing.commit}"
            raise input_error(name, rule, "try again later or set another HF_ENDPOINT")


def bytes_there(folder: Path, wanted: Listing) -> int:
    """Bytes downloaded so far: complete files plus partial ones in huggingface_hub's cache folder."""
    total = wanted.num_bytes - wanted.missing(folder).num_bytes
    for path in (folder / ".cache").rglob("*.incomplete"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _hash_file(path: Path, listed: StoredFile) -> _Hashes | None:
    """Hashes of a file, or None if they differ from the listing."""
    content, whole = hashlib.sha256(), xxhash.xxh3_128()
    blob = hashlib.sha1(f"blob {listed.bytes}\0".encode(), usedforsecurity=False)
    # The Hub lists no SHA-256 for small files, only git's hash.
    is_blob = len(listed.version) == 2 * blob.digest_size
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            content.update(chunk)
            whole.update(chunk)
            if is_blob:
                blob.update(chunk)
    found = blob if is_blob else content
    return (whole.hexdigest(), content.hexdigest()) if found.hexdigest() == listed.version else None


# Requests and their errors


def endpoint() -> str:
    """URL of the Hub. HF_ENDPOINT is read at each call, whereas huggingface_hub reads it only at import."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _check_online(why: str) -> None:
    # huggingface_hub checks the same variables, but its error does not name the missing files.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            fix = "unset it, or copy the complete folder including manifest.json from another machine"
            raise input_error(f"{name}={os.environ[name]}", why, fix)


def _asked(
    action: Callable[[], T], source: Source, max_failures: int, num_left: Callable[[], int] = lambda: 0
) -> T:
    """Runs an action that uses the Hub. Repeats it after temporary failures. Raises one-line errors."""

    def limit_of(error: Exception) -> int | None:
        is_unreachable = _response(error) is None and names_of(error) & _UNREACHABLE
        return 2 if is_unreachable else None  # huggingface_hub has already tried for half a minute

    def wait_of(error: Exception) -> float:
        # Seconds only: if the header is a date, the usual waits apply.
        seconds = getattr(_response(error), "headers", {}).get("Retry-After", "")
        return min(float(seconds), 900.0) if seconds.isdigit() else 0.0

    try:
        waits: dict[str, Any] = {"limit_of": limit_of, "wait_of": wait_of}
        return patiently(action, max_failures, passes=passes, num_left=num_left, **waits)
    except Exception as error:
        kinds, response, name = names_of(error), _response(error), source.repository
        status, what = response.status_code if response is not None else None, source.repo_type
        page = f"{endpoint()}/{'datasets/' if what == 'dataset' else ''}{name}"
        if "RevisionNotFoundError" in kinds:
            rule, fix = f"not found in {name}", f"use main or a revision listed on {page}"
            raise input_error(f"revision={source.revision}", rule, fix) from error
        if "GatedRepoError" in kinds or status == 403:
            fix = f"accept the license on {page}, and set HF_TOKEN to a token of the same account"
            raise input_error(f"source={name}", "access requires its owner's permission", fix) from error
        # The Hub's answer does not distinguish a private repository from a missing one.
        if status in (401, 404):
            rule = f"no such public {what} at {endpoint()}"
            fix = f"check the name (a local folder must exist); for a private {what} set HF_TOKEN to a token"
            raise input_error(f"source={name}", rule, f"{fix} with read access") from error
        if passes(error):
            fix = "check the network and HF_ENDPOINT, then repeat the command: complete files are kept"
            rule = f"{endpoint()} keeps failing ({first_line(error)})"
            raise ConnectionError(f"{name}: {rule}. Fix: {fix}.") from error
        if status is not None:
            rule = f"{endpoint()} returned status {status} ({first_line(error)})"
            raise input_error(f"source={name}", rule, "check HF_ENDPOINT") from error
        raise


def passes(error: BaseException) -> bool:
    """Whether a retry may help, because the server is busy or the connection failed."""
    if (response := _response(error)) is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    for cause in _causes(error):
        of_network = isinstance(cause, (ConnectionError, TimeoutError))
        if isinstance(cause, OSError) and cause.errno is not None and not of_network:
            return False  # an error of this machine: disk full, no permission
    # hf_xet, the Hub's transfer library, raises RuntimeError when a connection fails.
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, RuntimeError)) or package in _HTTP_PACKAGES


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    # huggingface_hub wraps the HTTP library's error, which has the response.
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException) -> Any:
    """The server's response stored in an error or in one of its causes. None if there is no response."""
    responses = (getattr(cause, "response", None) for cause in _causes(error))
    return next((one for one in responses if one is not None), None)
