"""The files of a source at an object store: listed, fetched in parts, and named in a manifest."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import Source, check_names, chosen_files
from moe_exp.data.kinds import input_error
from moe_exp.data.stage import RUNNING, check_free_disk, read_json, run_stage
from moe_exp.host.files import bytes_text, ending, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch
from moe_exp.host.progress import print_summary, progress

LISTING = ".listing.json"
_RESERVED = frozenset({"manifest.json", RUNNING, LISTING})

_Listed = dict[str, StoredFile]


def download_from_store(
    source: Source, folder: Path, *, dry_run: bool = False, start_over: bool = False
) -> list[Path]:
    """`download` for a source with a URL, of a folder or a file: fetches its data files into `folder`.

    Repeat the call to fetch the remaining bytes of the files that were listed first. If all files are
    present, no request is sent. manifest.json has the version that the store gave each.

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
            try:
                files = _list(source)
            except Exception:
                (stage.folder / RUNNING).unlink()
                stage.folder.rmdir()  # which refuses calls with other patterns
                raise
            # kept, as the store may list others when this is called again
            write_json(stage.folder / LISTING, {name: asdict(file) for name, file in files.items()})
        total = sum(file.bytes for file in files.values())
        left = [file.bytes for name, file in files.items() if not has_size(stage.folder / name, file.bytes)]
        if left:
            begun = sum(path.stat().st_size for path in stage.folder.rglob(".*.part"))
            check_free_disk(stage.folder, sum(left) - begun, f"the download of {source.url}")
            with progress(f"download {source.name}", total) as advance:
                fetch(_place(source)[0], files, stage.folder, advance)
        if stage.manifest is None:
            facts: dict[str, Any] = {"licence": source.licence, "num_bytes": total}
            facts["versions"] = {name: file.version for name, file in files.items()}
            (stage.folder / LISTING).unlink(missing_ok=True)
            stage.finish_folder([stage.folder / name for name in files], **facts)
    return [folder / name for name in files]


def has_size(path: Path, num_bytes: int) -> bool:
    """Whether there is a file of this size."""
    return path.is_file() and path.stat().st_size == num_bytes


def _place(source: Source) -> tuple[Store, _Listed]:
    """The store of a source, and the file if its URL names one."""
    parent, _, name = source.url.rpartition("/")
    # a folder may be called like a file, as Spark's are
    if ending(source.url) and (found := Store(parent).find(name)):
        return Store(parent), {name: found}
    return Store(source.url), {}


def _list(source: Source) -> _Listed:
    store, only = _place(source)
    there = only or store.files()
    if not there:
        raise input_error(f"source={source.url}", "there is no such file or folder", "correct the URL")
    names = chosen_files({name: file.bytes for name, file in there.items()}, source.patterns, source.url)
    check_names(names, store.url, _RESERVED)
    return {name: there[name] for name in names}


def _of_manifest(manifest: dict[str, Any]) -> _Listed:
    versions = manifest["versions"]
    return {one["name"]: StoredFile(one["bytes"], versions[one["name"]]) for one in manifest["outputs"]}
