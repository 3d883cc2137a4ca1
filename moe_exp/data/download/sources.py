"""Sources of documents: registered datasets on the Hub, local files, object stores and the embedded corpus.

The embedded corpus, the source code of Python and PyTorch, needs no network because every host has both
installed. Dataset sizes and commits are taken from the Hub's dataset pages; rounded sizes are shown with
"about".
"""

import difflib
import fnmatch
import hashlib
import importlib.util
import logging
import os
import re
import sysconfig
import tokenize
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from rich.table import Table

from moe_exp.data.documents import data_among, files_below, files_in
from moe_exp.data.kinds import KINDS, RECORD_SUFFIXES, check_regular, input_error, without_ending
from moe_exp.host.exit_codes import printable
from moe_exp.host.files import DATA_SUFFIXES, bytes_text, count_text, ending, expanded, is_url, read_yaml
from moe_exp.host.progress import table_console

logger = logging.getLogger(__name__)

PYTHON_STDLIB_LICENSE = "PSF-2.0"
TORCH_LICENSE = "BSD-3-Clause"

# Tests are skipped because many distributions do not package CPython's; installed packages because they have
# other licenses and differ between hosts.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL = re.compile(rf"(?:hf://)?({_REPOSITORY.pattern})(?:@([\w./-]+))?")
LEGAL_FILES = ("LICEN[CS]E*", "NOTICE*", "USE_POLICY*")
# What transformers and `convert from-hf` read of a model, and its license; no pickles, which can run code.
_MODEL_FILES = ("*.json", "model*.safetensors", "*.model", "merges.txt", "*.jinja", "README.md", *LEGAL_FILES)


@dataclass(frozen=True)
class Source:
    """A Hub dataset, local files (`path`), files in an object store (`url`), or Python's standard library."""

    name: str  # prefix of its folders and files
    description: str
    repository: str | None = None  # owner/name of the dataset on the Hub
    revision: str = "main"  # branch, tag or commit, resolved to a commit when the download starts
    patterns: tuple[str, ...] = ()  # of the files to use; `*` also matches slashes. Empty: all data files
    path: Path | None = None
    url: str = ""
    text_field: str = "text"
    licence: str = "unknown"  # SPDX name or a short description
    num_bytes: int | None = None  # size of the (compressed) files to download
    num_tokens: int | None = None  # approximate count, from the publisher
    is_exact: bool = False  # whether `num_bytes` is exact at `revision`
    note: str = ""  # remarks for `moe-exp data list`
    repo_type: str = "dataset"  # or model

    @property
    def is_embedded(self) -> bool:
        """Whether this source is Python's standard library, which is in the embedded corpus."""
        return self.repository is None and self.path is None and not self.url


@cache
def registered_sources() -> dict[str, Source]:
    """Sources in sources.yaml, by name."""
    listed = read_yaml(Path(__file__).with_name("sources.yaml"))
    found = {name: Source(name, **facts) for name, facts in listed.items()}
    return {name: replace(one, patterns=tuple(one.patterns)) for name, one in found.items()}


def resolve_source(
    name_or_path: str, *, patterns: Sequence[str] = (), text_field: str | None = None,
    revision: str | None = None,
) -> Source:  # fmt: skip
    """Finds a source by its name: registered name, URL, local path or Hub dataset, tried in this order.

    Args:
        name_or_path: name as given by the user. A folder with the same name as a registered source must be
            given as `./name`.
        patterns, text_field, revision: replace the registered values.

    Raises:
        ValueError: if the source is unknown, or a revision is given for a source that is not on the Hub.
    """
    if not name_or_path.strip():
        fix = "set a name from `moe-exp data list`, a dataset owner/name, a folder or a file"
        raise input_error("source=", "must not be empty", fix)
    registered = registered_sources()
    if name_or_path in registered:
        source = registered[name_or_path]
    elif is_url(name_or_path):
        url = name_or_path.rstrip("/")
        file_name = url.rpartition("/")[2]
        if "*" in url:
            fix = f"use the folder's URL and --pattern '{file_name}'"
            raise input_error(f"source={name_or_path}", "the URL must not contain a pattern", fix)
        source = Source(without_ending(file_name), url, url=url, licence="not recorded")
    elif expanded(name_or_path).exists():
        path = Path(os.path.abspath(expanded(name_or_path)))  # noqa: PTH100  # resolve() names a link's target
        source = Source(without_ending(path.name), f"{path}", path=path, licence="not recorded")
    elif _REPOSITORY.fullmatch(name_or_path):
        what, name = f"{name_or_path} on the Hub", name_or_path.partition("/")[2]
        source = Source(name, what, repository=name_or_path, licence="see its page")
    else:
        if "/" in name_or_path or ending(name_or_path):
            rule = "file or folder not found, and not of the form owner/name"
            raise input_error(f"source={name_or_path}", rule, "correct the path")
        # A single word is most likely a misspelled name from `moe-exp data list`.
        nearest = difflib.get_close_matches(name_or_path.lower(), registered, n=1, cutoff=0)[0]
        rule = "unknown source: not a registered name, a file or folder, or a dataset owner/name"
        fix = f"did you mean {nearest}? `moe-exp data list` shows all"
        raise input_error(f"source={name_or_path}", rule, fix)
    if source.repository is None and revision is not None:
        rule = f"only applies to datasets on the Hub, not to {source.name}"
        raise input_error(f"revision={revision}", rule, "omit --revision")
    if patterns and source.is_embedded:
        raise input_error(f"pattern={patterns[0]}", f"does not apply to {source.name}", "omit --pattern")
    given = {"patterns": tuple(patterns), "text_field": text_field, "revision": revision}
    changes: dict[str, object] = {name: value for name, value in given.items() if value}
    # The registered sizes and notes only describe the registered files.
    if patterns or (revision and revision != source.revision):
        changes |= {"num_bytes": None, "num_tokens": None, "is_exact": False, "note": ""}
    return replace(source, **changes)  # type: ignore[arg-type]


def local_files(source: Source) -> list[Path]:
    """Sorted data files of a local source; raises ValueError if it has none."""
    assert source.path is not None
    if source.path.is_file():
        if not ending(source.path):
            raise input_error(source.path, f"must be one of {KINDS}", "choose another file")
        return [source.path]
    if not source.patterns and (
        found := files_in(source.path, what="source", text_field=source.text_field, with_validation=True)
    ):
        return sorted(found, key=lambda path: path.as_posix())
    below = {path.relative_to(source.path).as_posix(): 0 for path in files_below(source.path)}
    files = [source.path / name for name in chosen_files(below, source.patterns, str(source.path))]
    check_regular(files)
    return files


def chosen_files(sizes: Mapping[str, int], patterns: Sequence[str], where: str) -> list[str]:
    """Sorted names of the files that match any pattern, or of the data files if there are no patterns.

    Args:
        sizes: maps each file's name to its size in bytes.
        patterns: name patterns. If a pattern matches record files (JSON and tables) and also text files,
            the text files are ignored.
        where: folder or URL, for messages.
    """
    # Only a few for error messages: a folder may have a million files.
    some = ", ".join(sorted(sizes)[:4]) or "nothing"
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(sizes, pattern)
        if not matching:
            rule = f"matches no file in {where}, which has {some}"
            raise input_error(f"pattern={pattern}", rule, "choose a pattern that matches")
        if other := [name for name in matching if not ending(name)]:
            rule = f"matches {other[0]}, which is not one of {KINDS}"
            fix = f"end the pattern with one of these suffixes, such as {pattern}{DATA_SUFFIXES[0]}"
            raise input_error(f"pattern={pattern}", rule, fix)
        # Text files count only without record files: a README.md next to records is not data.
        chosen.update([name for name in matching if ending(name) in RECORD_SUFFIXES] or matching)
    if not patterns:
        chosen.update(data_among(sizes, where, "source"))
        if not chosen:
            raise input_error(where, f"has no file of type {KINDS}, only {some}", "choose another source")
    return sorted(chosen)


def model_source(name: str) -> Source | None:
    """Source of the Hub model `hf://OWNER/NAME[@REVISION]`. `hf://` may be omitted if no local path has this
    name. Returns None if `name` is a local path. Raises ValueError if the name after `hf://` is
    invalid.
    """
    found, is_explicit = _MODEL.fullmatch(name), name.startswith("hf://")
    if found is None and is_explicit:
        raise input_error(f"SRC={name}", "is not the name of a model", "use hf://OWNER/NAME@REVISION")
    if found is None or (not is_explicit and Path(name).exists()):
        return None
    name, revision, page = found[1], found[2] or "main", "see its page"
    return Source(name, "", name, revision, _MODEL_FILES, licence=page, repo_type="model")


def model_files(sizes: Mapping[str, int], patterns: Sequence[str], where: str) -> list[str]:
    """Sorted names of top-level files. Raises ValueError if config.json or safetensors are missing."""
    names = [name for name in sizes if "/" not in name]
    if missing := [one for one in ("config.json", "model*.safetensors") if not fnmatch.filter(names, one)]:
        fix = "choose another model, or load it with transformers and convert what save_pretrained writes"
        raise input_error(where, f"has no {missing[0]}", fix)
    return sorted({name for one in patterns for name in fnmatch.filter(names, one)})


def check_names(names: Collection[str], server: str, reserved: Collection[str]) -> None:
    """Raises ValueError if a listed path is outside the download folder, is also the folder of another
    path, or begins with a name in `reserved`. The download itself uses the reserved names.
    """
    known, fix = set(names), "exclude it with --pattern, or choose another dataset"
    for name in names:
        check_inside(name, server)
        # The server chooses the names: they must not reach other folders or our own files.
        if (first := name.partition("/")[0]) in reserved:
            raise _refused(name, f"{first} is reserved for the download itself", server, fix)
        if above := known & {str(folder) for folder in PurePosixPath(name).parents}:
            raise _refused(name, f"{min(above)} is also a file", server, fix)


def check_inside(name: str, server: str) -> None:
    """Raises ValueError if a name listed by a server is unprintable or outside the download folder."""
    parts = name.split("/")
    if printable(name) != name or "\n" in name or "\t" in name:
        raise _refused(name, "it has control characters", server)
    if not {"", ".", ".."}.isdisjoint(parts):
        raise _refused(name, "it leads outside the download folder", server)
    if any(len(part.encode()) > 255 for part in parts) or len(name.encode()) > 2000:
        raise _refused(name, "it exceeds the limit for file names (255 bytes)", server)


def _refused(name: str, rule: str, server: str, fix: str = "choose another dataset") -> ValueError:
    # The message is printed to a terminal, where control characters could do harm.
    shown = ascii(name)[1:-1]
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return input_error(shown, f"{server} lists a file of this name, and {rule}", fix)


def print_sources() -> None:
    """Prints a table of the registered sources."""
    console = table_console()
    also = "Also accepted: a Hub dataset owner/name, a folder, a file, a URL of an object store."
    table = Table(title="Sources", title_justify="left", caption=also, caption_justify="left")
    for heading in ("name", "dataset", "files", "download", "tokens", "license", "description"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "download", "tokens"))
    for source in registered_sources().values():
        about = "" if source.is_exact or not source.num_bytes else "about "
        size = about + bytes_text(source.num_bytes) if source.num_bytes else "none"
        tokens = f"about {count_text(source.num_tokens)}" if source.num_tokens else "?"
        what = f"{source.description}. {source.note}".strip()
        files = ", ".join(source.patterns) or "this interpreter's .py files"
        table.add_row(source.name, source.repository or "embedded", files, size, tokens, source.licence, what)
    console.print(table)


def python_stdlib_documents(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the standard library's .py files, sorted by path.

    Skips tests and installed packages. Files that cannot be decoded with their declared encoding (default:
    UTF-8) are skipped with a warning. License: PSF-2.0 (https://docs.python.org/3/license.html).

    Raises:
        ValueError: if `root` has no .py files, for example because the standard library is a zip file.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = _python_files(root)
    if not paths:
        rule = f"the embedded corpus requires .py files, and {root} has none"
        raise input_error("TRAIN_DATA=", rule, "set TRAIN_DATA")
    yield from _read_files(root, paths)


def torch_documents(max_bytes: int, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the installed PyTorch's .py files, licensed under BSD-3-Clause.

    The files are sorted by a hash of their paths, so that the first ones are a random sample.

    Args:
        max_bytes: maximum total size; stops before the first file that would exceed it.
        root: folder of the files (default: the installed torch, found without importing it).
    """
    if root is None:
        found = importlib.util.find_spec("torch")
        if found is None or not found.submodule_search_locations:
            return
        root = Path(found.submodule_search_locations[0])
    num_bytes, paths = 0, []
    for path in sorted(_python_files(root), key=path_hash):
        # Stop at the first file that does not fit, so that the choice is independent of later files.
        num_bytes += (root / path).stat().st_size
        if num_bytes > max_bytes:
            break
        paths.append(path)
    for path, text in _read_files(root, paths):
        yield f"torch/{path}", text


def path_hash(path: str) -> bytes:
    """Hash of a file's path, for ordering or splitting files. The hash does not depend on other files."""
    return hashlib.sha256(path.encode()).digest()


def _read_files(root: Path, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    skipped = []
    for path in paths:
        try:
            with tokenize.open(root / path) as file:
                text = file.read()
        except (UnicodeDecodeError, SyntaxError):  # SyntaxError: unknown encoding declared
            skipped.append(path)
            continue
        yield path, text
    if skipped:
        what = "skipped %d of %d files in %s that could not be decoded: %s"
        logger.warning(what, len(skipped), len(paths), root, ", ".join(skipped))


def _python_files(root: Path) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        # In place: os.walk does not descend into removed folders.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        found += [path.relative_to(root).as_posix() for path in paths]
    return sorted(found)
