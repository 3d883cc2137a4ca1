"""The copy of a run at an object store (REMOTE_DIR): the folders and files that it has here.

REMOTE_DIR/RUN_NAME/
    config.yaml provenance.json metrics.jsonl skipped_samples.json    as they were after the last checkpoint
    checkpoints/iter_0000300/...                                      complete with its manifest.json
    checkpoints/latest_checkpointed_iteration.txt                     written last

All functions raise a ValueError or a ConnectionError as `Store` does.
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
_FETCHED = ".fetched"  # suffix of a folder that is being copied from the store


def remote_run(config: Config) -> str:
    """URL of the run's copy; empty: it has none."""
    return f"{config.remote_dir.rstrip('/')}/{config.name}" if config.remote_dir else ""


def ahead_problem(config: Config) -> str:
    """Empty, or why the copy is not this run's: it has continued elsewhere since the newest one here."""
    run = RunFolder.of(config)
    there = newest_there(f"{remote_run(config)}/checkpoints")
    here = folders.latest_iteration(run.checkpoints)
    if there is None or here is None or there <= here:
        return ""
    events = (one for one in iter_metrics(run.metrics) if one.get("event") == "checkpoint")
    if any(one["iteration"] == there for one in events):  # a rollback here went back past it
        return ""
    fix = f"remove {run.checkpoints} to continue from {there}, or give another RUN_NAME"
    rule = f"has the checkpoint at iteration {there}, and {run.path} has only {here}"
    return problem("remote_dir", config.remote_dir, rule, fix)


def newest_there(url: str) -> int | None:
    """Iteration of the newest complete checkpoint of a checkpoints folder at a store; None if it has none."""
    try:
        text = Store(url).read(LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        place = f"{url}/{LATEST}={text[:20]!r}"
        raise folders.unusable(place, "must hold the number of an iteration", "write it")
    return int(text)


def _complete(names: Iterable[str]) -> dict[int, str]:
    """Folders of the complete checkpoints by iteration, in order, from the files of a checkpoints folder."""
    found = (match for name in names if (match := _WHOLE.fullmatch(name)))
    return dict(sorted((int(match[2]), match[1]) for match in found))


# Sending


def check_writable(config: Config) -> None:
    """Writes and removes a file in REMOTE_DIR, so that a start ends if that fails, and not the first save."""
    store = Store(remote_run(config))
    store.write(".writable", b"")
    store.remove(".writable")


def send_checkpoint(config: Config, iteration: int) -> int:
    """Copies a checkpoint of the run and the small files of its folder; removes those there that the rules of
    KEEP_LAST keep no longer. Continues what a call that was stopped has begun. Returns the checkpoint's
    bytes; raises a FileNotFoundError if it is not here any more.
    """
    run, store = RunFolder.of(config), Store(remote_run(config))
    folder = folders.iteration_folder(run.checkpoints, iteration)
    content = (folder / MANIFEST).read_bytes()
    files = {path.name: path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST}
    send(Store(f"{store.url}/checkpoints/{folder.name}"), files, MANIFEST, content, lambda *_: None)
    for path in _small_files(run):
        if path.is_file():
            store.write(path.name, path.read_bytes())
    # last, so that what it names is complete
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
        # Newer ones are of an attempt that was given up, or the only good copies of what is damaged here:
        # they stay until the run has passed them, as in its own folder. What is not complete will not be.
        removed = folders.which_to_remove(passed, losses, **rules)
        kept = {complete[one] for one in complete.keys() - set(removed)}
        # first, what completes one
        for name in sorted(names, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)):
            if re.match(r"iter_\d{7,}/", name) and name.partition("/")[0] not in kept:
                there.remove(name)
    return sum(path.stat().st_size for path in files.values())


def _small_files(run: RunFolder) -> list[Path]:
    return [run.config, run.provenance, run.metrics, run.skipped_samples]


class Uploads:
    """Copies checkpoints to REMOTE_DIR during training, on rank 0, one at a time."""

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._under_way: int | None = None
        self._next: int | None = None
        self._events: deque[tuple[str, int, dict[str, Any]]] = deque()
        newest = folders.latest_iteration(RunFolder.of(config).checkpoints)
        if newest is not None:  # which an earlier start may not have copied
            self.add(newest)

    def add(self, iteration: int) -> None:
        """Has a checkpoint copied."""
        with self._lock:
            # Only the newest of those that follow the one under way: a store that is slower than the saves
            # gets fewer.
            self._next = iteration
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def held(self) -> set[int]:
        """Iterations that retention must leave."""
        with self._lock:
            return {one for one in (self._under_way, self._next) if one is not None}

    def wait(self, seconds: float | None = None) -> None:
        """Until all are copied, or have failed, or `seconds` have passed."""
        if (thread := self._thread) is not None:
            logger.info("waiting for the copy of the last checkpoint at %s", remote_run(self._config))
            thread.join(seconds)
            if thread.is_alive():
                logger.warning("the copy is not complete: the next start continues it")

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Kind, iteration and facts of what happened since the last call, for metrics.jsonl."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _work(self) -> None:
        while True:
            # As one step: an `add` in between would leave its checkpoint to a thread that ends.
            with self._lock:
                self._under_way, self._next = self._next, None
                if self._under_way is None:
                    self._thread = None
                    return
                iteration = self._under_way
            start, url = time.monotonic(), remote_run(self._config)
            try:
                num_bytes = send_checkpoint(self._config, iteration)
            # whatever it is: the run continues
            except Exception as error:
                what = "the checkpoint at iteration %d was not copied to %s: %s"
                logger.warning(what, iteration, url, error)
                self._events.append(("upload_failed", iteration, {"reason": str(error)}))
                continue
            seconds = time.monotonic() - start
            what = "copied the checkpoint at iteration %d to %s, %s in %.1f s"
            logger.info(what, iteration, url, bytes_text(num_bytes), seconds)
            self._events.append(("upload", iteration, {"seconds": round(seconds, 3), "bytes": num_bytes}))


# Fetching


def fetch_run(config: Config) -> None:
    """Downloads the run's newest complete checkpoint and small files, unless a checkpoint is here."""
    run, url = RunFolder.of(config), remote_run(config)
    if not url or folders.usable(run.checkpoints):
        return
    run.path.mkdir(parents=True, exist_ok=True)
    with FileLock(run.path / ".remote.lock"):
        if folders.usable(run.checkpoints) or newest_there(f"{url}/checkpoints") is None:
            return
        # first: with a checkpoint here nothing more is fetched
        for path in _small_files(run):
            if not path.exists() and (known := Store(url).find(path.name)):
                Store(url).download(path.name, path, known, lambda *_: None)
        fetch_checkpoint(f"{url}/checkpoints", run.checkpoints)


def fetch_load_dir(config: Config) -> Path:
    """The checkpoint of LOAD_DIR=URL, copied into the run folder by `fetch_checkpoint`."""
    place = xxhash.xxh3_64_hexdigest(config.load_dir.encode())[:8]  # another URL, another checkpoint
    folder = RunFolder.of(config).path / "loaded" / place
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return fetch_checkpoint(config.load_dir, folder)


def fetch_checkpoint(url: str, checkpoints: Path) -> Path:
    """Copies the newest complete checkpoint of a checkpoints or run folder at a store, or the one of an
    iteration's folder; a repeated call resumes. Returns its local folder. Raises a ValueError if the store
    has no checkpoint, the disk is too small, or files arrive damaged (they are removed).
    """
    store, iteration = find_there(url.rstrip("/"))
    final = folders.iteration_folder(checkpoints, iteration)
    manifest = Manifest.parse(content := store.read(MANIFEST), store.url)
    if final.is_dir() and (final / MANIFEST).read_bytes() == content:
        return final
    listed = store.files()
    for name, entry in manifest.files.items():
        if name not in listed or listed[name].bytes != entry["bytes"]:
            rule = "is missing, or has another size than its manifest says"
            raise folders.unusable(f"{store.url}/{name}", rule, "name another checkpoint")
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
            (partial / name).unlink(missing_ok=True)  # so that only this file is fetched again
    if damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        fix = f"repeat the command; if it is damaged there, too, remove {store.url}"
        raise folders.unusable(store.url, f"what came is damaged, {damaged[0]}{more}", fix)
    for other in checkpoints.glob(f"iter_*{_FETCHED}"):  # which an earlier call has not completed
        if other != partial:
            shutil.rmtree(other, ignore_errors=True)
    folders.publish(partial, iteration)
    logger.info("fetched the checkpoint at iteration %d from %s", iteration, store.url)
    return final


def find_there(url: str) -> tuple[Store, int]:
    """The folder of a checkpoint that a URL means, and its iteration; raises as `fetch_checkpoint`."""
    if (named := _WHOLE.fullmatch(f"{url.rpartition('/')[2]}/{MANIFEST}")) and Store(url).find(MANIFEST):
        return Store(url), int(named[2])
    for checkpoints in (url, f"{url}/checkpoints"):
        if (newest := newest_there(checkpoints)) is None:
            continue
        # one that is not complete was being replaced when its run was killed
        complete = _complete(Store(checkpoints).files())
        if whole := [one for one in complete if one <= newest]:
            return Store(f"{checkpoints}/{complete[whole[-1]]}"), whole[-1]
    fix = "name a checkpoints folder, a run folder or the folder of one iteration"
    raise folders.unusable(url, "has no complete checkpoint", fix)
