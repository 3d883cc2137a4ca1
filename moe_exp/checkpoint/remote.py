"""The copy of a run at an object store (REMOTE_DIR): the folders and files that it has here.

REMOTE_DIR/RUN_NAME/
    config.yaml provenance.json metrics.jsonl skipped_samples.json    as they were after the last checkpoint
    checkpoints/iter_0000300/...                                      complete with its manifest.json
    checkpoints/latest_checkpointed_iteration.txt                     written last
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.folders import MANIFEST, Manifest
from moe_exp.checkpoint.retention import which_to_remove
from moe_exp.config import Config
from moe_exp.host.files import bytes_text
from moe_exp.host.object_store import Store, StoredFile, fetch, send
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST, RunFolder

logger = logging.getLogger(__name__)

_CHECKPOINTS = "checkpoints"
_FETCHED = ".fetched"  # suffix of a folder that is being copied from the store


def remote_run(config: Config) -> str:
    """URL of the run's copy; empty: it has none."""
    return f"{config.remote_dir.rstrip('/')}/{config.name}" if config.remote_dir else ""


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


def _small_files(run: RunFolder) -> Iterator[Path]:
    yield from (run.config, run.provenance, run.metrics, run.skipped_samples)


def _prune(config: Config, store: Store, newest: int) -> None:
    names = store.list()
    there = [one for one in _complete(list(names)) if one <= newest]
    losses: dict[int, float] = {}
    if config.keep_best:
        for one in there:
            content = store.read(f"{_folder_name(one)}/{MANIFEST}")
            if (loss := Manifest.parse(content, store.url).valid_loss) is not None:
                losses[one] = loss
    kept = {"last": config.keep_last, "every": config.keep_every, "best": config.keep_best}
    for one in which_to_remove(there, losses, **kept):
        inside = [name for name in names if name.startswith(f"{_folder_name(one)}/")]
        for name in sorted(
            inside, key=lambda name: not name.endswith(f"/{MANIFEST}")
        ):  # first, what completes it
            store.remove(name)


def _folder_name(iteration: int) -> str:
    return folders.iteration_folder(Path(), iteration).name


def _complete(names: list[str]) -> list[int]:
    """Iterations of the complete checkpoints among the names of files of a checkpoints folder, in order."""
    found = [Path(name) for name in names if name.endswith(f"/{MANIFEST}")]
    return sorted(folders.iteration_of(path.parent) for path in found if path.parent.name.startswith("iter_"))


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
        fetch_checkpoint(f"{url}/{_CHECKPOINTS}", run.checkpoints)
        there = Store(url).list()
        for path in _small_files(run):
            if path.name in there and not path.exists():
                Store(url).download(path.name, path, there[path.name], lambda *_: None)


def fetch_checkpoint(url: str, checkpoints: Path) -> Path:
    """Copies the newest complete checkpoint of a checkpoints or run folder at a store, or the one of an
    iteration's folder; a call that was stopped is continued.

    Returns:
        Its folder here.

    Raises:
        ValueError: there is none; it does not fit on the disk; or what came is damaged, and was removed.
        ConnectionError: the store keeps failing.
    """
    store, iteration = find_there(url.rstrip("/"))
    final = folders.iteration_folder(checkpoints, iteration)
    if final.is_dir():
        return final
    manifest = Manifest.parse(content := store.read(MANIFEST), store.url)
    listed = store.list()
    files = {
        name: StoredFile(
            entry["bytes"], f"{listed[name].version if name in listed else ''} {entry['xxh3_128']}"
        )
        for name, entry in manifest.files.items()
    }
    partial = final.with_name(final.name + _FETCHED)
    partial.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in partial.iterdir())
    if (free := shutil.disk_usage(partial).free) < manifest.num_bytes - there:
        rule = f"needs {bytes_text(manifest.num_bytes - there)}, {partial} has {bytes_text(free)} free"
        raise ValueError(f"{store.url}: {rule}. Fix: free some space, or choose another RUN_DIR.")
    with progress(f"fetch {store.url}", manifest.num_bytes) as advance:
        fetch(store, files, partial, advance)
    (partial / MANIFEST).write_bytes(content)
    for line in folders.damages(partial, manifest.files):
        shutil.rmtree(partial)
        raise ValueError(
            f"{store.url}: what came is damaged, {line}. Fix: call it again, or name an older one."
        )
    folders.publish(partial, iteration)
    logger.info("fetched the checkpoint at iteration %d from %s", iteration, store.url)
    return final


def find_there(url: str) -> tuple[Store, int]:
    """The folder of a checkpoint that a URL means, and its iteration; raises as `fetch_checkpoint`."""
    name = url.rpartition("/")[2]
    if name.startswith("iter_") and name.removeprefix("iter_").isdecimal():
        return Store(url), folders.iteration_of(Path(name))
    for checkpoints in (url, f"{url}/{_CHECKPOINTS}"):
        newest = newest_there(checkpoints)
        if newest is None:
            continue
        # one that is not complete was being replaced when its run was killed
        whole = [one for one in _complete(list(Store(checkpoints).list())) if one <= newest]
        if whole:
            return Store(f"{checkpoints}/{_folder_name(whole[-1])}"), whole[-1]
    fix = "name a checkpoints folder, a run folder or the folder of one iteration"
    raise ValueError(f"{url}: has no complete checkpoint. Fix: {fix}.")
