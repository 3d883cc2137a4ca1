"""The files of a source at an object store: listed, fetched in parts, and named in a manifest."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_exp.data.download.names import check_names
from moe_exp.data.download.sources import Source, chosen_files
from moe_exp.data.stage import RUNNING, Stage, check_free_disk, read_json, run_stage
from moe_exp.host.files import bytes_text, ending, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch
from moe_exp.host.progress import print_summary, progress

logger = logging.getLogger(__name__)

_LISTING = ".listing.json"
_RESERVED = frozenset({"manifest.json", RUNNING, _LISTING})

Listed = dict[str, StoredFile]


def download_from_store(
    source: Source, folder: Path, *, dry_run: bool = False, start_over: bool = False
) -> list[Path]:
    """The data files of a source with a URL, sorted, fetched into `folder`.

    A call that was stopped continues with the bytes that are not there, of the files that were listed first.
    One that is finished makes no request.

    Args:
        source: with `url`, a folder or a file.
        folder: gets the files, and manifest.json with the version that the store gave each.
        dry_run: print how much there is to do, write nothing, and return the paths that there would be.
        start_over: list and fetch everything again.

    Raises:
        ValueError: a pattern matches nothing; no access; too little disk; other settings than before.
        ConnectionError: the store keeps failing, or a file is another one by now.
    """
    if dry_run:
        known = None if start_over else read_json(folder / "manifest.json")
        files = _of_manifest(known) if known else _list(source, *_place(source))
        size = bytes_text(sum(file.bytes for file in files.values()))
        where = f"are complete in {folder}" if known else f"would come to {folder}"
        print_summary(f"To download: {source.url}", {"files": len(files), "bytes": f"{size}, {where}"})
        return [folder / name for name in files]
    settings = {"url": source.url, "patterns": list(source.patterns)}
    with run_stage(
        "download", folder, settings=settings, inputs=(), start_over=start_over, mends_outputs=True
    ) as stage:
        files = _known(stage) or _first_listing(stage, source)
        total = sum(file.bytes for file in files.values())
        present = {name for name, file in files.items() if _has_size(stage.folder / name, file)}
        if stage.manifest is None or len(present) < len(files):
            left = sum(file.bytes for name, file in files.items() if name not in present)
            left -= sum(path.stat().st_size for path in stage.folder.rglob(".*.part"))
            check_free_disk(stage.folder, left, f"the download of {source.url}")
            with progress(f"download {source.name}", total) as advance:
                fetch(_place(source)[0], files, stage.folder, advance)
        if stage.manifest is None:
            versions = {name: file.version for name, file in files.items()}
            facts: dict[str, Any] = {"licence": source.licence, "num_bytes": total, "versions": versions}
            (stage.folder / _LISTING).unlink(missing_ok=True)
            stage.finish_folder([stage.folder / name for name in files], **facts)
    return [folder / name for name in files]


def _place(source: Source) -> tuple[Store, str]:
    """The store of a source, and the only file if its URL names one."""
    parent, _, name = source.url.rpartition("/")
    # a folder may be called like a file, as Spark's are
    if ending(source.url) and Store(parent).find(name):
        return Store(parent), name
    return Store(source.url), ""


def _list(source: Source, store: Store, only: str) -> Listed:
    if only:
        found = store.find(only)
        there = {only: found} if found else {}
    else:
        there = store.files()
    if not there:
        raise ValueError(f"source={source.url}: there is no such file or folder. Fix: correct the URL.")
    names = chosen_files({name: file.bytes for name, file in there.items()}, source.patterns, source.url)
    check_names(names, store.url, _RESERVED)
    return {name: there[name] for name in names}


def _first_listing(stage: Stage, source: Source) -> Listed:
    """Kept, as what is there may be another listing when this is called again."""
    try:
        files = _list(source, *_place(source))
    except Exception:
        (stage.folder / RUNNING).unlink()
        stage.folder.rmdir()  # which a call with other patterns would be refused
        raise
    write_json(stage.folder / _LISTING, {name: asdict(file) for name, file in files.items()})
    return files


def _known(stage: Stage) -> Listed | None:
    if stage.manifest is not None:
        return _of_manifest(stage.manifest)
    listed = read_json(stage.folder / _LISTING)
    return {name: StoredFile(**file) for name, file in listed.items()} if listed else None


def _of_manifest(manifest: dict[str, Any]) -> Listed:
    versions = manifest["versions"]
    return {one["name"]: StoredFile(one["bytes"], versions[one["name"]]) for one in manifest["outputs"]}


def _has_size(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes
