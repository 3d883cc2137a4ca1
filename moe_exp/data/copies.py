"""Finished outputs of stages at an object store: `moe-exp data push` and `pull`.

Every file is there under its name in the manifest, and the manifest comes last: without it the others are not
complete. Hashes are compared after a pull.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.data.download.sources import check_names
from moe_exp.data.kinds import input_error
from moe_exp.data.stage import RUNNING, check_free_disk, check_outputs, locked
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.host.files import has_hash, read_json, write_atomically
from moe_exp.host.object_store import Store, fetch, send
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


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
    manifest = read_json(manifest_path, fix="make it again")
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
    store, names = _manifests(url)
    paths: list[Path] = []
    folder = folder.absolute()
    fix = "choose another folder, or remove it"
    waits = f"waiting for the process that pulls into {folder}"
    with locked(folder, waits):  # both would write the same parts
        for name in names:
            content = store.read(name)
            manifest = _parsed(f"{store.url}/{name}", content)
            target = folder / name
            if target.is_file() and target.read_bytes() != content:
                raise input_error(target, "is there, and is of something else", fix)
            begun = folder / f".{name}.pulled"
            if not target.is_file() and not (begun.is_file() and begun.read_bytes() == content):
                outputs = [folder / one["name"] for one in manifest["outputs"]]
                if foreign := [path for path in outputs if path.exists()]:
                    raise input_error(foreign[0], "is there, and was not pulled", fix)
                folder.mkdir(exist_ok=True)
                write_atomically(begun, content.decode())
            paths += _pulled(store, manifest, folder)
            write_atomically(target, content.decode())  # last: without it they are not complete
            begun.unlink(missing_ok=True)
    return paths


def _manifests(url: str) -> tuple[Store, list[str]]:
    """The store, and the names of the manifests there."""
    url = prefix_of(url.rstrip("/"))
    parent, _, last = url.rpartition("/")
    if not parent.endswith(":/") and Store(parent).find(f"{last}.{MANIFEST}"):
        return Store(parent), [f"{last}.{MANIFEST}"]
    store = Store(url)
    there = store.names()
    names = [MANIFEST] if MANIFEST in there else [name for name in there if name.endswith(f".{MANIFEST}")]
    if not names:
        rule = "is not complete, it has no manifest.json" if there else "has no files"
        raise input_error(f"url={url}", rule, "correct the URL, or push it first")
    return store, names


def _parsed(where: str, content: bytes) -> Mapping[str, Any]:
    try:
        manifest = json.loads(content)
        files = [(str(one["name"]), int(one["bytes"]), str(one["hash"])) for one in manifest["outputs"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise input_error(where, "is no manifest of this program", "push the files again") from None
    check_names([name for name, _, _ in files], where, {MANIFEST, RUNNING})
    return dict(manifest)


def _pulled(store: Store, manifest: Mapping[str, Any], folder: Path) -> list[Path]:
    outputs = {one["name"]: one for one in manifest["outputs"]}
    listed = store.some(list(outputs))
    for name, one in outputs.items():
        if (size := listed[name].bytes if name in listed else None) != one["bytes"]:
            rule = f"has {size} bytes, its manifest says {one['bytes']}" if name in listed else "is missing"
            raise ConnectionError(f"{store.url}/{name}: {rule}. Fix: push it again.")
    total = sum(one["bytes"] for one in outputs.values())
    kept = [*(folder / name for name in outputs), *folder.rglob(".*.part")]
    there = sum(path.stat().st_size for path in kept if path.is_file())
    check_free_disk(folder, total - there, f"the files of {store.url}")
    with progress(f"pull {store.url}", total) as advance:
        fetch(store, {name: listed[name] for name in outputs}, folder, advance)
    with progress("check", total) as advance:
        for name, one in outputs.items():
            if not has_hash(folder / name, one["hash"]):
                (folder / name).unlink()
                rule = "what came has another hash than its manifest says"
                raise ConnectionError(f"{store.url}/{name}: {rule}. Fix: call it again; else push it again.")
            advance(one["bytes"])
    return [folder / name for name in outputs]
