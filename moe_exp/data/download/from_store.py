"""The files of a source at an object store: listed, fetched in parts, and named in a manifest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import Source, check_names, chosen_files
from moe_exp.data.stage import RUNNING, Stage, check_free_disk, read_json, run_stage
from moe_exp.host.files import bytes_text, ending, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch
from moe_exp.host.progress import print_summary, progress

LISTING = ".listing.json"
_RESERVED = frozenset({"manifest.json", RUNNING, LISTING})

_Listed = dict[str, StoredFile]


def download_from_store(
    source: Source, folder: Path, *, dry_run: bool = False, start_over: bool = False
) -> list[Path]:
    """Fetches the data files of a source with a URL into `folder` and returns them, sorted.

    Repeat the call to fetch the remaining bytes of the files that were listed first. If all files are
    present, no request is sent.

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
        files = _of_manifest(known) if known else _list(source)
        size = bytes_text(sum(file.bytes for file in files.values()))
        where = f"are complete in {folder}" if known else f"would come to {folder}"
        print_summary(f"To download: {source.url}", {"files": len(files), "bytes": f"{size}, {where}"})
        return [folder / name for name in files]
    settings = {"url": source.url, "patterns": list(source.patterns)}
    with run_stage(
        "download", folder, settings=settings, inputs=(), start_over=start_over, mends_outputs=True
    ) as stage:
        if stage.manifest is not None:
            files = _of_manifest(stage.manifest)
        elif listed := read_json(stage.folder / LISTING):
            files = {name: StoredFile(**file) for name, file in listed.items()}
        else:
            files = _first_listing(stage, source)
        total = sum(file.bytes for file in files.values())
        left = [file.bytes for name, file in files.items() if not has_size(stage.folder / name, file.bytes)]
        if left:
            begun = sum(path.stat().st_size for path in stage.folder.rglob(".*.part"))
            check_free_disk(stage.folder, sum(left) - begun, f"the download of {source.url}")
            with progress(f"download {source.name}", total) as advance:
                fetch(_place(source)[0], files, stage.folder, advance)
        if stage.manifest is None:
            versions = {name: file.version for name, file in files.items()}
            facts: dict[str, Any] = {"licence": source.licence, "num_bytes": total, "versions": versions}
            (stage.folder / LISTING).unlink(missing_ok=True)
            stage.finish_folder([stage.folder / name for name in files], **facts)
    return [folder / name for name in files]


def has_size(path: Path, num_bytes: int) -> bool:
    """Whether there is a file of this size."""
    return path.is_file() and path.stat().st_size == num_bytes


def _place(source: Source) -> tuple[Store, str]:
    """The store of a source, and the only file if its URL names one."""
    parent, _, name = source.url.rpartition("/")
    # a folder may be called like a file, as Spark's are
    if ending(source.url) and Store(parent).find(name):
        return Store(parent), name
    return Store(source.url), ""


def _list(source: Source) -> _Listed:
    store, only = _place(source)
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


def _first_listing(stage: Stage, source: Source) -> _Listed:
    """Kept, as what is there may be another listing when this is called again."""
    try:
        files = _list(source)
    except Exception:
        (stage.folder / RUNNING).unlink()
        stage.folder.rmdir()  # which a call with other patterns would be refused
        raise
    write_json(stage.folder / LISTING, {name: asdict(file) for name, file in files.items()})
    return files


def _of_manifest(manifest: dict[str, Any]) -> _Listed:
    versions = manifest["versions"]
    return {one["name"]: StoredFile(one["bytes"], versions[one["name"]]) for one in manifest["outputs"]}
