"""Files at object stores: those of a source, and finished outputs of stages (`moe-exp data push` and `pull`).

A source is listed, fetched in parts, and named in a manifest. Of an output every file is there under its name
in the manifest, which comes last: without it the others are not complete. Hashes are compared after a pull.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import Source, check_names, chosen_files
from moe_exp.data.kinds import input_error, total_bytes
from moe_exp.data.stage import RUNNING, check_free_disk, check_outputs, locked, read_json, run_stage
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.host import files as host_files
from moe_exp.host.files import bytes_text, ending, has_hash, write_atomically, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch, send
from moe_exp.host.progress import print_summary, progress

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

LISTING = ".listing.json"


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
        known = None if start_over else read_json(folder / MANIFEST)
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
            begun = total_bytes(stage.folder.rglob(".*.part"))
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


def _place(source: Source) -> tuple[Store, dict[str, StoredFile]]:
    """The store of a source, and the file if its URL names one."""
    parent, _, name = source.url.rpartition("/")
    # a folder may be called like a file, as Spark's are
    if ending(source.url) and (found := Store(parent).find(name)):
        return Store(parent), {name: found}
    return Store(source.url), {}


def _list(source: Source) -> dict[str, StoredFile]:
    store, only = _place(source)
    there = only or store.files()
    if not there:
        raise input_error(f"source={source.url}", "there is no such file or folder", "correct the URL")
    names = chosen_files({name: file.bytes for name, file in there.items()}, source.patterns, source.url)
    check_names(names, store.url, {MANIFEST, RUNNING, LISTING})
    return {name: there[name] for name in names}


def _of_manifest(manifest: dict[str, Any]) -> dict[str, StoredFile]:
    versions = manifest["versions"]
    return {one["name"]: StoredFile(one["bytes"], versions[one["name"]]) for one in manifest["outputs"]}


# Finished outputs


def push(path: Path, url: str) -> str:
    """Copies what a step has made to a store; a call that was stopped is continued.

    Args:
        path: folder with manifest.json, or prefix of token files.
        url: folder at the store.

    Returns:
        URL of the folder, or of the prefix.

    Raises:
        ValueError: `path` is no finished output; no access.
        ConnectionError: the store keeps failing.
    """
    prefix = Path(prefix_of(str(path)))
    is_folder = (path / MANIFEST).is_file()
    manifest_path = path / MANIFEST if is_folder else prefix.with_name(f"{prefix.name}.{MANIFEST}")
    if not manifest_path.is_file():
        rule = f"has no {MANIFEST}, so that it is no finished output of `moe-exp data`"
        raise input_error(f"path={path}", rule, "give the folder, or the prefix of .bin and .idx")
    folder = manifest_path.parent
    manifest = host_files.read_json(manifest_path, fix="make it again")
    check_outputs(folder, manifest)
    files = {one["name"]: folder / one["name"] for one in manifest["outputs"]}
    store, name = Store(url), manifest_path.name
    total = sum(one["bytes"] for one in manifest["outputs"])
    with progress(f"push {path}", total) as advance:
        if not send(store, files, name, manifest_path.read_bytes(), advance):
            logger.info("%s: is there already, with the same manifest", store.url)
    return store.url if is_folder else f"{store.url}/{prefix.name}"


def pull(url: str, folder: Path) -> list[Path]:
    """Copies back what `push` has made, and compares every hash; a call that was stopped is continued.

    Args:
        url: folder at the store, or a prefix of token files there.
        folder: gets the files and their manifest.

    Raises:
        ValueError: nothing complete is there; no access; too little disk; `folder` holds something else.
        ConnectionError: the store keeps failing, or what it gave is not what the manifest says.
    """
    url = prefix_of(url.rstrip("/"))
    parent, _, last = url.rpartition("/")
    if not parent.endswith(":/") and Store(parent).find(f"{last}.{MANIFEST}"):
        store, names = Store(parent), [f"{last}.{MANIFEST}"]
    else:
        store = Store(url)
        there = store.names()
        # of a folder one, else those of all prefixes in it
        names = [MANIFEST] if MANIFEST in there else [one for one in there if one.endswith(f".{MANIFEST}")]
        if not names:
            rule = "is not complete, it has no manifest.json" if there else "has no files"
            raise input_error(f"url={url}", rule, "correct the URL, or push it first")
    folder = folder.absolute()
    # two would write the same parts
    with locked(folder, f"waiting for the process that pulls into {folder}"):
        return [path for name in names for path in _pulled(store, name, folder)]


def _pulled(store: Store, name: str, folder: Path) -> list[Path]:
    """Fetches the files of one manifest, which gets its place when they are complete."""
    content, where = store.read(name), f"{store.url}/{name}"
    try:
        outputs = {str(one["name"]): one for one in json.loads(content)["outputs"]}
        sizes = {name: int(one["bytes"]) for name, one in outputs.items()}
        hashes = {name: str(one["hash"]) for name, one in outputs.items()}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise input_error(where, "is no manifest of this program", "push the files again") from None
    check_names(list(outputs), where, {MANIFEST, RUNNING})
    fix = "choose another folder, or remove it"
    paths, target, begun = [folder / one for one in outputs], folder / name, folder / f".{name}.pulled"
    # the same name, and another output
    if target.is_file() and target.read_bytes() != content:
        raise input_error(target, "is there, and is of something else", fix)
    if not target.is_file() and not (begun.is_file() and begun.read_bytes() == content):
        if foreign := [path for path in paths if path.exists()]:
            raise input_error(foreign[0], "is there, and was not pulled", fix)
        folder.mkdir(exist_ok=True)
        write_atomically(begun, content.decode())
    listed = store.some(list(outputs))
    for one, size in sizes.items():
        if (found := listed[one].bytes if one in listed else None) != size:
            rule = f"has {found} bytes, its manifest says {size}" if one in listed else "is missing"
            raise ConnectionError(f"{store.url}/{one}: {rule}. Fix: push it again.")
    total = sum(sizes.values())
    # what an earlier call has fetched takes its space already
    kept = [*paths, *folder.rglob(".*.part")]
    there = sum(path.stat().st_size for path in kept if path.is_file())
    check_free_disk(folder, total - there, f"the files of {store.url}")
    with progress(f"pull {store.url}", total) as advance:
        fetch(store, {one: listed[one] for one in outputs}, folder, advance)
    with progress("check", total) as advance:
        for one, size in sizes.items():
            if not has_hash(folder / one, hashes[one]):
                (folder / one).unlink()
                rule = "what came has another hash than its manifest says"
                raise ConnectionError(f"{store.url}/{one}: {rule}. Fix: call it again; else push it again.")
            advance(size)
    write_atomically(target, content.decode())  # last: without it they are not complete
    begun.unlink(missing_ok=True)
    return paths
