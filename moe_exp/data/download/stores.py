"""Downloads sources from object stores; copies outputs to and from stores (`moe-exp data push` and `pull`).

The manifest of an output is transferred last; an output without a manifest counts as incomplete. `pull`
verifies all hashes.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from moe_exp.data.documents import Counted
from moe_exp.data.download.sources import Source, check_names, chosen_files
from moe_exp.data.kinds import input_error, total_bytes
from moe_exp.data.stage import RUNNING, CorpusStage, check_free_disk, check_outputs, locked, read_json
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.host import files as host_files
from moe_exp.host.files import ending, has_hash, write_atomically, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch, send
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LISTING = ".files.json"
# Names that huggingface_hub and downloads use in the download folder.
RESERVED = frozenset({MANIFEST, RUNNING, LISTING, ".cache", ".huggingface"})


@dataclass(frozen=True)
class Listing(Counted):
    """The files of a source, sorted by name and checked with `check_names`. In a Hub commit, the version of
    an LFS file is its SHA-256, and the version of any other file is its git SHA-1.
    """

    server: str  # for errors
    files: dict[str, StoredFile]
    commit: str = ""

    def __post_init__(self) -> None:
        check_names(self.files, self.server, RESERVED)

    @classmethod
    def of_manifest(cls, manifest: dict[str, Any], server: str) -> "Listing":
        versions = manifest.get("sha256") or manifest["versions"]
        sizes = {one["name"]: one["bytes"] for one in manifest["outputs"]}
        files = {name: StoredFile(size, versions[name]) for name, size in sizes.items()}
        return cls(server, files, manifest.get("commit", ""))

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def missing(self, folder: Path) -> "Listing":
        """Listing of the files that are missing from `folder` or have a different size there."""
        there = {name for name in self.files if (folder / name).is_file()}
        sizes = {name: (folder / name).stat().st_size for name in there}
        left = {name: one for name, one in self.files.items() if sizes.get(name) != one.bytes}
        return replace(self, files=left)


def kept_listing(stage: CorpusStage, name: str, server: str, list_now: Callable[[], Listing]) -> Listing:
    """Returns the stored listing if the download was begun before; otherwise creates and stores a listing."""
    if stage.manifest is not None:
        return Listing.of_manifest(stage.manifest, server)
    if listed := read_json(stage.folder / LISTING):
        return Listing.from_json(listed)
    try:
        listing = list_now()
        check_free_disk(stage.folder, listing.num_bytes, f"the download of {name}")
        write_json(stage.folder / LISTING, listing.to_json())
    except Exception:
        # Nothing is fetched yet, and a remaining folder would reject a call with corrected patterns.
        rmtree(stage.folder)
        raise
    return listing


def fetch_from_store(source: Source, listing: Listing, stage: CorpusStage) -> None:
    """Downloads a source's missing files from an object store and finishes the stage. manifest.json
    records the version of each file in the store.
    """
    if left := listing.missing(stage.folder).num_bytes:
        begun = total_bytes(stage.folder.rglob(".*.part"))
        check_free_disk(stage.folder, left - begun, f"the download of {source.url}")
        with progress(f"download {source.name}", listing.num_bytes) as advance:
            fetch(_place(source)[0], listing.files, stage.folder, advance)
    if stage.manifest is None:
        facts: dict[str, Any] = {"licence": source.licence, "num_bytes": listing.num_bytes}
        facts["versions"] = {name: file.version for name, file in listing.files.items()}
        stage.finish([stage.folder / name for name in listing.files], **facts)


def _place(source: Source) -> tuple[Store, dict[str, StoredFile]]:
    """Returns the store of a source, and its file as {name: file}, or {} if the URL names a folder."""
    parent, _, name = source.url.rpartition("/")
    # A folder may be named like a file: Spark writes folders called x.parquet.
    if ending(source.url) and (found := Store(parent).find(name)):
        return Store(parent), {name: found}
    return Store(source.url), {}


def list_store(source: Source) -> Listing:
    """Data files of a source in a store; ValueError if there are none or a pattern matches nothing."""
    store, only = _place(source)
    there = only or store.files()
    if not there:
        raise input_error(f"source={source.url}", "file or folder not found", "correct the URL")
    names = chosen_files({name: file.bytes for name, file in there.items()}, source.patterns, source.url)
    return Listing(source.url, {name: there[name] for name in names})


# Finished outputs


def push(path: Path, url: str) -> str:
    """Uploads a finished output to a store. To resume an interrupted upload, repeat the call.

    Args:
        path: folder with manifest.json, or prefix of token files.
        url: folder in the store.

    Returns:
        URL of the uploaded folder or prefix.

    Raises:
        ValueError: if `path` is not a finished output, or access is denied.
        ConnectionError: if the store keeps failing.
    """
    prefix = Path(prefix_of(str(path)))
    is_folder = (path / MANIFEST).is_file()
    manifest_path = path / MANIFEST if is_folder else prefix.with_name(f"{prefix.name}.{MANIFEST}")
    if not manifest_path.is_file():
        rule = f"has no {MANIFEST} and so is not a finished output of `moe-exp data`"
        raise input_error(f"path={path}", rule, "pass the folder, or the prefix of .bin and .idx")
    folder = manifest_path.parent
    manifest = host_files.read_json(manifest_path, fix="create the output again")
    check_outputs(folder, manifest)
    files = {one["name"]: folder / one["name"] for one in manifest["outputs"]}
    store, name = Store(url), manifest_path.name
    with progress(f"push {path}", sum(one["bytes"] for one in manifest["outputs"])) as advance:
        if not send(store, files, name, manifest_path.read_bytes(), advance):
            logger.info("%s is already complete, with the same manifest", store.url)
    return store.url if is_folder else f"{store.url}/{prefix.name}"


def pull(url: str, folder: Path) -> list[Path]:
    """Downloads an output uploaded by `push` and verifies its hashes; a repeated call resumes the download.

    Args:
        url: URL of a folder, or of a prefix of token files, in the store.
        folder: destination of the files and their manifest.

    Raises:
        ValueError: if the output is missing or incomplete, access is denied, free space is too small, or
            `folder` already has different files with the same names.
        ConnectionError: if the store keeps failing, or a file differs from the manifest.
    """
    url = prefix_of(url.rstrip("/"))
    parent, _, last = url.rpartition("/")
    if not parent.endswith(":/") and Store(parent).find(f"{last}.{MANIFEST}"):
        store, names = Store(parent), [f"{last}.{MANIFEST}"]
    else:
        store = Store(url)
        there = store.names()
        # one manifest for a folder, or those of all prefixes in it
        names = [MANIFEST] if MANIFEST in there else [one for one in there if one.endswith(f".{MANIFEST}")]
        if not names:
            rule = "is incomplete: manifest.json not found" if there else "has no files"
            raise input_error(f"url={url}", rule, "correct the URL, or push the output first")
    folder = folder.absolute()
    # Two processes would write to the same partial files.
    with locked(folder, f"waiting for another process that pulls into {folder}"):
        return [path for name in names for path in _pulled(store, name, folder)]


def _pulled(store: Store, name: str, folder: Path) -> list[Path]:
    """Downloads the files listed in one manifest, then writes the manifest itself."""
    content, where = store.read(name), f"{store.url}/{name}"
    try:
        outputs = {str(one["name"]): one for one in json.loads(content)["outputs"]}
        sizes = {name: int(one["bytes"]) for name, one in outputs.items()}
        hashes = {name: str(one["hash"]) for name, one in outputs.items()}
    except (ValueError, KeyError, TypeError, RecursionError):
        rule = "is not a valid manifest of `moe-exp data`"
        raise input_error(where, rule, "push the files again") from None
    check_names(list(outputs), where, {MANIFEST, RUNNING})
    fix = "choose another folder, or remove it"
    paths, target, begun = [folder / one for one in outputs], folder / name, folder / f".{name}.pulled"
    # Another output may have the same name.
    if target.is_file() and target.read_bytes() != content:
        raise input_error(target, "exists and belongs to another output", fix)
    if not target.is_file() and not (begun.is_file() and begun.read_bytes() == content):
        if foreign := [path for path in paths if path.exists()]:
            raise input_error(foreign[0], "exists and was not pulled", fix)
        folder.mkdir(exist_ok=True)
        write_atomically(begun, content.decode())
    listed = store.some(list(outputs))
    for one, size in sizes.items():
        if (found := listed[one].bytes if one in listed else None) != size:
            rule = f"has {found} bytes, but its manifest lists {size}" if one in listed else "is missing"
            raise ConnectionError(f"{store.url}/{one}: {rule}. Fix: repeat moe-exp data push.")
    total = sum(sizes.values())
    # Bytes fetched by an earlier call already occupy their space.
    there = sum(path.stat().st_size for path in [*paths, *folder.rglob(".*.part")] if path.is_file())
    check_free_disk(folder, total - there, f"the files of {store.url}")
    with progress(f"pull {store.url}", total) as advance:
        fetch(store, {one: listed[one] for one in outputs}, folder, advance)
    with progress("check", total) as advance:
        for one, size in sizes.items():
            if not has_hash(folder / one, hashes[one]):
                (folder / one).unlink()
                rule = "the hash of the received bytes differs from its manifest"
                fix = "repeat the command; if it fails again, push the file again"
                raise ConnectionError(f"{store.url}/{one}: {rule}. Fix: {fix}.")
            advance(size)
    write_atomically(target, content.decode())  # last: it marks the files as complete
    begun.unlink(missing_ok=True)
    return paths
