"""Copies a run to an object store (REMOTE_DIR) and back, with the same folder layout:

REMOTE_DIR/RUN_NAME/
    config.yaml provenance.json metrics.jsonl skipped_samples.json    state at the last checkpoint
    checkpoints/iter_0000300/...                                      complete once it has a manifest.json
    checkpoints/latest_checkpointed_iteration.txt                     written last

All functions raise ValueError or ConnectionError in the same cases as `Store`.
"""

import logging
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.folders import MANIFEST, Manifest
from moe_exp.config import Config, problem
from moe_exp.data.stage import check_free_disk
from moe_exp.host.files import bytes_text, write_atomically
from moe_exp.host.object_store import Store, fetch, send
from moe_exp.host.progress import progress
from moe_exp.runs.records import iter_metrics
from moe_exp.runs.run_folder import LATEST, RunFolder

logger = logging.getLogger(__name__)

_WHOLE = re.compile(rf"(iter_(\d{{7,}}))/{re.escape(MANIFEST)}")
_FETCHED = ".fetched"  # suffix of a folder while its files are downloaded


def remote_run(config: Config) -> str:
    """URL of the run's copy in the object store; empty without REMOTE_DIR."""
    return f"{config.remote_dir.rstrip('/')}/{config.name}" if config.remote_dir else ""


def ahead_problem(config: Config) -> str:
    """Error text if the copy in REMOTE_DIR is ahead of the local run; otherwise an empty string."""
    run = RunFolder.of(config)
    there = newest_there(f"{remote_run(config)}/checkpoints")
    here = folders.latest_iteration(run.checkpoints)
    if there is None or here is None or there <= here:
        return ""
    events = (one for one in iter_metrics(run.metrics) if one.get("event") == "checkpoint")
    if any(one["iteration"] == there for one in events):  # saved here, then undone by a rollback
        return ""
    fix = f"remove {run.checkpoints} to resume from iteration {there}, or set another RUN_NAME"
    rule = f"has a checkpoint at iteration {there}, but the newest in {run.path} is at iteration {here}"
    return problem("remote_dir", config.remote_dir, rule, fix)


def newest_there(url: str) -> int | None:
    """Iteration of the newest complete checkpoint in a store's checkpoints folder (None: no checkpoint)."""
    try:
        text = Store(url).read(LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        place = f"{url}/{LATEST}={text[:20]!r}"
        raise folders.unusable(place, "must contain an iteration number", "write the number into this file")
    return int(text)


def _complete(names: Iterable[str]) -> dict[int, str]:
    """Returns {iteration: folder} for complete checkpoints in the file list `names`, in ascending order."""
    found = (match for name in names if (match := _WHOLE.fullmatch(name)))
    return dict(sorted((int(match[2]), match[1]) for match in found))


# Sending


def check_writable(config: Config) -> None:
    """Writes and removes a file in REMOTE_DIR, to report missing permissions at startup."""
    store = Store(remote_run(config))
    store.write(".writable", b"")
    store.remove(".writable")


def send_checkpoint(config: Config, iteration: int) -> int:
    """Uploads a checkpoint and the run's small files, then prunes remote checkpoints (KEEP_LAST). Resumes an
    interrupted upload. Returns the checkpoint's size (bytes). Raises FileNotFoundError if the
    checkpoint is missing.
    """
    run, store = RunFolder.of(config), Store(remote_run(config))
    folder = folders.iteration_folder(run.checkpoints, iteration)
    content = (folder / MANIFEST).read_bytes()
    files = {path.name: path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST}
    send(Store(f"{store.url}/checkpoints/{folder.name}"), files, MANIFEST, content, lambda *_: None)
    for path in _small_files(run):
        if path.is_file():
            store.write(path.name, path.read_bytes())
    # Written after the files, so that it never names an incomplete checkpoint.
    store.write(f"checkpoints/{LATEST}", str(iteration).encode())
    if config.keep_last:
        there = Store(f"{store.url}/checkpoints")
        names = list(there.files())
        complete = _complete(names)
        passed = [one for one in complete if one <= iteration]
        losses: dict[int, float] = {}
        for one in passed if config.keep_best else []:
            manifest = Manifest.parse(there.read(f"{complete[one]}/{MANIFEST}"), there.url)
            if manifest.valid_loss is not None:
                losses[one] = manifest.valid_loss
        rules = {"last": config.keep_last, "every": config.keep_every, "best": config.keep_best}
        # Newer checkpoints are from an abandoned attempt, or the only good copies of damaged local ones. They
        # stay until the run has passed them, as in the local folder. Incomplete ones will never be completed.
        removed = folders.which_to_remove(passed, losses, **rules)
        kept = {complete[one] for one in complete.keys() - set(removed)}
        # Manifests go first: without one, a half-removed checkpoint does not count as complete.
        for name in sorted(names, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)):
            if re.match(r"iter_\d{7,}/", name) and name.partition("/")[0] not in kept:
                there.remove(name)
    return sum(path.stat().st_size for path in files.values())


def _small_files(run: RunFolder) -> list[Path]:
    return [run.config, run.provenance, run.metrics, run.skipped_samples]


class Uploads:
    """Uploads checkpoints to REMOTE_DIR during training, on rank 0, one at a time."""

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._under_way: int | None = None
        self._next: int | None = None
        self._events: deque[tuple[str, int, dict[str, Any]]] = deque()
        newest = folders.latest_iteration(RunFolder.of(config).checkpoints)
        if newest is not None:  # an earlier start may not have uploaded it
            self.add(newest)

    def add(self, iteration: int) -> None:
        """Schedules the upload of a checkpoint."""
        with self._lock:
            # Only the newest waits for the current upload: if the store is slower than the saves, it skips
            # checkpoints.
            self._next = iteration
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def held(self) -> set[int]:
        """Iterations with unfinished uploads; retention must not remove their checkpoints."""
        with self._lock:
            return {one for one in (self._under_way, self._next) if one is not None}

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all uploads have ended, or for at most `seconds`."""
        if (thread := self._thread) is not None:
            logger.info("waiting for the upload of the last checkpoint to %s", remote_run(self._config))
            thread.join(seconds)
            if thread.is_alive():
                logger.warning("the upload is incomplete; the next start resumes it")

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Kind, iteration and details of all events since the last call, for metrics.jsonl."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _work(self) -> None:
        while True:
            # Under one lock: an `add` in between would leave its checkpoint to a thread that is ending.
            with self._lock:
                self._under_way, self._next = self._next, None
                if self._under_way is None:
                    self._thread = None
                    return
                iteration = self._under_way
            start, url = time.monotonic(), remote_run(self._config)
            try:
                num_bytes = send_checkpoint(self._config, iteration)
            # Training must continue regardless of what failed; the next save tries again.
            except Exception as error:
                what = "cannot upload the checkpoint at iteration %d to %s: %s"
                logger.warning(what, iteration, url, error)
                self._events.append(("upload_failed", iteration, {"reason": str(error)}))
                continue
            seconds = time.monotonic() - start
            what = "uploaded the checkpoint at iteration %d to %s (%s in %.1f s)"
            logger.info(what, iteration, url, bytes_text(num_bytes), seconds)
            self._events.append(("upload", iteration, {"seconds": round(seconds, 3), "bytes": num_bytes}))


# Fetching


def fetch_run(config: Config) -> None:
    """If there is no local checkpoint, downloads the run's small files and newest complete checkpoint."""
    run, url = RunFolder.of(config), remote_run(config)
    if not url or folders.usable(run.checkpoints):
        return
    run.path.mkdir(parents=True, exist_ok=True)
    with FileLock(run.path / ".remote.lock"):
        if folders.usable(run.checkpoints) or newest_there(f"{url}/checkpoints") is None:
            return
        # Before the checkpoint: as soon as one exists locally, nothing more is fetched.
        for path in _small_files(run):
            if not path.exists() and (known := Store(url).find(path.name)):
                Store(url).download(path.name, path, known, lambda *_: None)
        fetch_checkpoint(f"{url}/checkpoints", run.checkpoints)


def fetch_load_dir(config: Config) -> Path:
    """Downloads the checkpoint from the URL in LOAD_DIR to the run folder; returns the local iter_ folder."""
    place = xxhash.xxh3_64_hexdigest(config.load_dir.encode())[:8]  # one folder per URL
    folder = RunFolder.of(config).path / "loaded" / place
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return fetch_checkpoint(config.load_dir, folder)


def fetch_checkpoint(url: str, checkpoints: Path) -> Path:
    """Downloads the newest complete checkpoint from a checkpoints, run or iter_ folder in a store. A second
    call resumes an interrupted download. Returns the local iter_ folder. Raises ValueError if the store has
    no checkpoint, if the disk lacks space, or if downloaded files are damaged. Removes damaged files.
    """
    store, iteration = find_there(url.rstrip("/"))
    final = folders.iteration_folder(checkpoints, iteration)
    manifest = Manifest.parse(content := store.read(MANIFEST), store.url)
    if final.is_dir() and (final / MANIFEST).read_bytes() == content:
        return final
    listed = store.files()
    for name, entry in manifest.files.items():
        if name not in listed or listed[name].bytes != entry["bytes"]:
            rule = "is missing, or its size differs from the manifest"
            raise folders.unusable(f"{store.url}/{name}", rule, "specify another checkpoint")
    partial = final.with_name(final.name + _FETCHED)
    partial.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in partial.iterdir())
    check_free_disk(partial, manifest.num_bytes - there, f"the checkpoint {store.url}")
    with progress(f"fetch {store.url}", manifest.num_bytes) as advance:
        fetch(store, {name: listed[name] for name in manifest.files}, partial, advance)
    write_atomically(partial / MANIFEST, content.decode())
    damaged = []
    for name, entry in manifest.files.items():
        if line := next(folders.damages(partial, {name: entry}), ""):
            damaged.append(line)
            (partial / name).unlink(missing_ok=True)  # the next call fetches only this file
    if damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        fix = f"repeat the command; if the store's copy is damaged, remove {store.url}"
        raise folders.unusable(store.url, f"the download is damaged, {damaged[0]}{more}", fix)
    for other in checkpoints.glob(f"iter_*{_FETCHED}"):  # left by interrupted calls
        if other != partial:
            shutil.rmtree(other, ignore_errors=True)
    folders.publish(partial, iteration)
    logger.info("fetched the checkpoint at iteration %d from %s", iteration, store.url)
    return final


def find_there(url: str) -> tuple[Store, int]:
    """Newest complete checkpoint at a URL: its folder and iteration. ValueError if there is no checkpoint."""
    if (named := _WHOLE.fullmatch(f"{url.rpartition('/')[2]}/{MANIFEST}")) and Store(url).find(MANIFEST):
        return Store(url), int(named[2])
    for checkpoints in (url, f"{url}/checkpoints"):
        if (newest := newest_there(checkpoints)) is None:
            continue
        # `latest` may name an incomplete checkpoint if the run was killed while it was being replaced
        complete = _complete(Store(checkpoints).files())
        if whole := [one for one in complete if one <= newest]:
            return Store(f"{checkpoints}/{complete[whole[-1]]}"), whole[-1]
    fix = "specify a checkpoints folder, a run folder or an iter_ folder"
    raise folders.unusable(url, "has no complete checkpoint", fix)
