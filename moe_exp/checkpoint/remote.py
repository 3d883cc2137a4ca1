"""The copy of a run at an object store (REMOTE_DIR): the folders and files that it has here.

REMOTE_DIR/RUN_NAME/
    config.yaml provenance.json metrics.jsonl skipped_samples.json    as they were after the last checkpoint
    checkpoints/iter_0000300/...                                      complete with its manifest.json
    checkpoints/latest_checkpointed_iteration.txt                     written last
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import xxhash
from filelock import FileLock

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.folders import MANIFEST, Manifest
from moe_exp.checkpoint.retention import which_to_remove
from moe_exp.config import Config, problem
from moe_exp.data.stage import check_free_disk
from moe_exp.host.files import write_atomically
from moe_exp.host.object_store import Store, fetch, send
from moe_exp.host.progress import progress
from moe_exp.runs.records import iter_metrics
from moe_exp.runs.run_folder import LATEST, RunFolder

logger = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
_WHOLE = re.compile(rf"iter_(\d{{7,}})/{re.escape(MANIFEST)}")
_FETCHED = ".fetched"  # suffix of a folder that is being copied from the store


def remote_run(config: Config) -> str:
    """URL of the run's copy; empty: it has none."""
    return f"{config.remote_dir.rstrip('/')}/{config.name}" if config.remote_dir else ""


def ahead_problem(config: Config) -> str:
    """Empty, or why the copy is not this run's: it has continued elsewhere since the newest checkpoint here.

    Raises:
        ValueError, ConnectionError: as of `Store`.
    """
    run, url = RunFolder.of(config), f"{remote_run(config)}/{_CHECKPOINTS}"
    there, here = newest_there(url), folders.latest_iteration(run.checkpoints)
    if there is None or here is None or there <= here:
        return ""
    # one that this folder has had: a rollback went back past it
    if any(
        one.get("event") == "checkpoint" and one["iteration"] == there for one in iter_metrics(run.metrics)
    ):
        return ""
    fix = f"remove {run.checkpoints} to continue from {there}, or give another RUN_NAME"
    rule = f"has the checkpoint at iteration {there}, and {run.path} has only {here}"
    return problem("remote_dir", config.remote_dir, rule, fix)


def newest_there(url: str) -> int | None:
    """Iteration of the newest complete checkpoint of a checkpoints folder at a store; None if it has none.

    Raises:
        ValueError: no access.
        ConnectionError: the store keeps failing.
    """
    try:
        text = Store(url).read(LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        raise ValueError(
            f"{url}/{LATEST}={text[:20]!r}: must hold the number of an iteration. Fix: write it."
        )
    return int(text)


# Sending


def check_writable(config: Config) -> None:
    """Writes and removes a file in REMOTE_DIR, so that a start ends if that fails, and not the first save.

    Raises:
        ValueError, ConnectionError: as of `Store`.
    """
    store = Store(remote_run(config))
    store.write(".writable", b"")
    store.remove(".writable")


def send_checkpoint(config: Config, iteration: int) -> int:
    """Copies a checkpoint of the run and the small files of its folder; removes those there that the rules of
    KEEP_LAST keep no longer. Continues what a call that was stopped has begun.

    Returns:
        Bytes of the checkpoint.

    Raises:
        FileNotFoundError: the checkpoint is not here any more.
        ValueError, ConnectionError: as of `Store`.
    """
    run, url = RunFolder.of(config), remote_run(config)
    folder = folders.iteration_folder(run.checkpoints, iteration)
    content = (folder / MANIFEST).read_bytes()
    files = {path.name: path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST}
    send(Store(f"{url}/{_CHECKPOINTS}/{folder.name}"), files, MANIFEST, content, lambda *_: None)
    store = Store(url)
    for path in _small_files(run):
        if path.is_file():
            store.write(path.name, path.read_bytes())
    store.write(f"{_CHECKPOINTS}/{LATEST}", str(iteration).encode())
    if config.keep_last:
        _prune(config, Store(f"{url}/{_CHECKPOINTS}"), iteration)
    return sum(path.stat().st_size for path in files.values())


def _small_files(run: RunFolder) -> list[Path]:
    return [run.config, run.provenance, run.metrics, run.skipped_samples]


def _prune(config: Config, store: Store, newest: int) -> None:
    names = list(store.files())
    complete = _complete(names)
    there = [one for one in complete if one <= newest]
    losses: dict[int, float] = {}
    if config.keep_best:
        for one in there:
            content = store.read(f"{_folder_name(one)}/{MANIFEST}")
            if (loss := Manifest.parse(content, store.url).valid_loss) is not None:
                losses[one] = loss
    rules = {"last": config.keep_last, "every": config.keep_every, "best": config.keep_best}
    # Newer ones are of an attempt that was given up, or the only good copies of what is damaged here: they
    # stay until the run has passed them, as in its own folder. What is not complete will not be.
    kept = {_folder_name(one) for one in set(complete) - set(which_to_remove(there, losses, **rules))}
    gone = {name.partition("/")[0] for name in names if re.match(r"iter_\d{7,}/", name)} - kept
    for folder in sorted(gone):
        inside = [name for name in names if name.startswith(f"{folder}/")]
        # first, what completes it
        for name in sorted(inside, key=lambda name: not name.endswith(f"/{MANIFEST}")):
            store.remove(name)


def _folder_name(iteration: int) -> str:
    return folders.iteration_folder(Path(), iteration).name


def _complete(names: list[str]) -> list[int]:
    """Iterations of the complete checkpoints among the names of files of a checkpoints folder, in order."""
    return sorted(int(match[1]) for name in names if (match := _WHOLE.fullmatch(name)))


# Fetching


def fetch_run(config: Config) -> None:
    """Copies the newest complete checkpoint of the run's copy, and its small files, to a run folder without
    checkpoints. Does nothing if there is one here, or no copy.

    Raises:
        ValueError, ConnectionError: as of `Store`; or what came is damaged.
    """
    run, url = RunFolder.of(config), remote_run(config)
    if not url or folders.usable(run.checkpoints):
        return
    run.path.mkdir(parents=True, exist_ok=True)
    with FileLock(run.path / ".remote.lock"):
        if folders.usable(run.checkpoints) or newest_there(f"{url}/{_CHECKPOINTS}") is None:
            return
        # first: with a checkpoint here nothing more is fetched
        for name, known in Store(url).some([path.name for path in _small_files(run)]).items():
            if not (run.path / name).exists():
                Store(url).download(name, run.path / name, known, lambda *_: None)
        fetch_checkpoint(f"{url}/{_CHECKPOINTS}", run.checkpoints)


def fetch_load_dir(config: Config) -> Path:
    """The checkpoint of LOAD_DIR=URL, copied into the run folder by `fetch_checkpoint`."""
    place = xxhash.xxh3_64_hexdigest(config.load_dir.encode())[:8]  # another URL, another checkpoint
    folder = RunFolder.of(config).path / "loaded" / place
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        return fetch_checkpoint(config.load_dir, folder)


def fetch_checkpoint(url: str, checkpoints: Path) -> Path:
    """Copies the newest complete checkpoint of a checkpoints or run folder at a store, or the one of an
    iteration's folder; a call that was stopped is continued.

    Returns:
        Its folder here.

    Raises:
        ValueError: there is none; it does not fit on the disk; or files came damaged, and were removed.
        ConnectionError: the store keeps failing.
    """
    store, iteration = find_there(url.rstrip("/"))
    final = folders.iteration_folder(checkpoints, iteration)
    manifest = Manifest.parse(content := store.read(MANIFEST), store.url)
    if final.is_dir() and (final / MANIFEST).read_bytes() == content:
        return final
    listed = store.files()
    missing = [
        name
        for name, entry in manifest.files.items()
        if name not in listed or listed[name].bytes != entry["bytes"]
    ]
    if missing:
        rule = "is missing, or has another size than its manifest says"
        raise ValueError(f"{store.url}/{missing[0]}: {rule}. Fix: name another checkpoint.")
    files = {name: listed[name] for name in manifest.files}
    partial = final.with_name(final.name + _FETCHED)
    partial.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in partial.iterdir())
    check_free_disk(partial, manifest.num_bytes - there, f"the checkpoint {store.url}")
    with progress(f"fetch {store.url}", manifest.num_bytes) as advance:
        fetch(store, files, partial, advance)
    write_atomically(partial / MANIFEST, content.decode())
    damaged = []
    for name, entry in manifest.files.items():
        for line in folders.damages(partial, {name: entry}):
            damaged.append(line)
            (partial / name).unlink(missing_ok=True)  # so that only this file is fetched again
    if damaged:
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        fix = f"call it again; if it is damaged there, too, remove {store.url}"
        raise ValueError(f"{store.url}: what came is damaged, {damaged[0]}{more}. Fix: {fix}.")
    for other in checkpoints.glob(f"iter_*{_FETCHED}"):  # which an earlier call has not completed
        if other != partial:
            shutil.rmtree(other, ignore_errors=True)
    folders.publish(partial, iteration)
    logger.info("fetched the checkpoint at iteration %d from %s", iteration, store.url)
    return final


def find_there(url: str) -> tuple[Store, int]:
    """The folder of a checkpoint that a URL means, and its iteration; raises as `fetch_checkpoint`."""
    name = url.rpartition("/")[2]
    if _WHOLE.fullmatch(f"{name}/{MANIFEST}") and Store(url).find(MANIFEST):
        return Store(url), folders.iteration_of(Path(name))
    for checkpoints in (url, f"{url}/{_CHECKPOINTS}"):
        newest = newest_there(checkpoints)
        if newest is None:
            continue
        # one that is not complete was being replaced when its run was killed
        whole = [one for one in _complete(list(Store(checkpoints).files())) if one <= newest]
        if whole:
            return Store(f"{checkpoints}/{_folder_name(whole[-1])}"), whole[-1]
    fix = "name a checkpoints folder, a run folder or the folder of one iteration"
    raise ValueError(f"{url}: has no complete checkpoint. Fix: {fix}.")
