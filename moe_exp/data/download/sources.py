"""Sources of documents: datasets on the hub by name, local files, and the Python standard library.

The default corpus, sources of Python and torch, needs no network: both are on every host that runs this.
Sizes and commits of datasets are those of their pages on the hub; a number that is not exact to the byte is
shown as "about".
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
from pathlib import Path, PurePosixPath

from rich.table import Table

from moe_exp.data.documents import data_among, files_below, files_in
from moe_exp.data.kinds import KINDS, RECORD_SUFFIXES, check_regular, input_error, without_ending
from moe_exp.host.exit_codes import printable
from moe_exp.host.files import DATA_SUFFIXES, bytes_text, count_text, ending, expanded, is_url
from moe_exp.host.progress import table_console

logger = logging.getLogger(__name__)

PYTHON_STDLIB_LICENSE = "PSF-2.0"
TORCH_LICENSE = "BSD-3-Clause"

# Tests are left out because CPython's own are many but a distribution's package often lacks them; installed
# packages because they have other licences and differ from host to host.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """A dataset on the hub, files on this machine (`path`) or at a store (`url`), or the standard library.

    Args:
        name: what its folders and files are called.
        repository: owner/name of the dataset on the hub.
        revision: branch, tag or commit. What is downloaded is the commit it stands for at that time.
        patterns: which files; `*` matches slashes too. None at all: every file of a format in DATA_SUFFIXES.
        licence: SPDX name or a few words.
        num_bytes: of the files to download, compressed.
        num_tokens: about; the publisher's count.
        is_exact: whether `num_bytes` is to the byte, at `revision`.
        note: what else one has to know.
    """

    name: str
    description: str
    repository: str | None = None
    revision: str = "main"
    patterns: tuple[str, ...] = ()
    path: Path | None = None
    url: str = ""
    text_field: str = "text"
    licence: str = "unknown"
    num_bytes: int | None = None
    num_tokens: int | None = None
    is_exact: bool = False
    note: str = ""

    @property
    def is_embedded(self) -> bool:
        """Whether it is the standard library."""
        return self.repository is None and self.path is None and not self.url


_FINEWEB_EDU = Source(
    "fineweb_edu", "FineWeb-Edu: educational pages of Common Crawl", repository="HuggingFaceFW/fineweb-edu",
    revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9", patterns=("data/*.parquet",), licence="ODC-By 1.0",
    num_bytes=4_500 * 10**9, num_tokens=1_500 * 10**9,
    note="Without sample/, whose documents are in data/ too. The first release, 95 crawls, had 3.8 TB.",
)  # fmt: skip
_FINEWEB = Source(
    "fineweb", "FineWeb: Common Crawl, filtered and deduplicated per crawl",
    repository="HuggingFaceFW/fineweb", revision="9bb295ddab0e05d785b879661af7260fed5140fc",
    patterns=("data/*.parquet",), licence="ODC-By 1.0", num_bytes=50_000 * 10**9, num_tokens=17_000 * 10**9,
    note="Without sample/, whose documents are in data/ too. The first release, 96 crawls, had 44 TB.",
)  # fmt: skip
_DCLM = Source(
    "dclm_baseline_1.0", "DCLM-Baseline: Common Crawl, deduplicated and chosen by a classifier",
    repository="mlfoundations/dclm-baseline-1.0",
    revision="a3b142c183aebe5af344955ae20836eb34dcf69b",  # in earlier ones the files were called .jsonl.zstd
    patterns=("global-shard_*_of_10/local-shard_*_of_10/*.jsonl.zst",), licence="CC BY 4.0",
    num_bytes=7_196_105_155_016, num_tokens=4_000 * 10**9, is_exact=True,
    note="27,838 files, about 3 billion documents.",
)  # fmt: skip
_SLIMPAJAMA = Source(
    "slimpajama", "SlimPajama-627B: RedPajama, cleaned and deduplicated",
    repository="cerebras/SlimPajama-627B", revision="2d0accdd58c5d5511943ca1f5ff0e3eb5e293543",
    patterns=("train/*/*.jsonl.zst",), licence="Apache-2.0, and those of its seven parts",
    num_bytes=895 * 10**9, num_tokens=627 * 10**9,
    note=(
        "The training split; validation/ and test/ (500M tokens each, no text of train/ in them) by"
        " --pattern. Was not open to everyone in 2026: ask its owner for access."
    ),
)  # fmt: skip
_PYTHON_STDLIB = Source(
    "python_stdlib", "The Python standard library's sources, part of the embedded corpus",
    licence=PYTHON_STDLIB_LICENSE, num_tokens=3 * 10**6,
    note="On every machine with Python: nothing to download.",
)  # fmt: skip
_SAMPLE = ("sample/10BT/*.parquet",)
_FINEWEB_EDU_10BT = replace(
    _FINEWEB_EDU, name="fineweb_edu_10bt", description="FineWeb-Edu, the sample of 10 billion tokens",
    patterns=_SAMPLE, num_bytes=28_518_193_415, num_tokens=10 * 10**9, is_exact=True,
    note="14 files, 9,672,101 documents.",
)  # fmt: skip
_FINEWEB_10BT = replace(
    _FINEWEB, name="fineweb_10bt", description="FineWeb, the sample of 10 billion tokens",
    patterns=_SAMPLE, num_bytes=31 * 10**9, num_tokens=10 * 10**9, note="About 14.9 million documents.",
)  # fmt: skip
_DCLM_10PRCT = replace(
    _DCLM, name="dclm_baseline_1.0_10prct", description="The first of the ten parts of DCLM-Baseline",
    patterns=("global-shard_01_of_10/local-shard_*_of_10/*.jsonl.zst",),
    num_bytes=720 * 10**9, num_tokens=400 * 10**9, is_exact=False, note="",
)  # fmt: skip

_WEB = _FINEWEB_EDU_10BT, _FINEWEB_EDU, _FINEWEB_10BT, _FINEWEB, _DCLM_10PRCT, _DCLM
SOURCES: dict[str, Source] = {one.name: one for one in (_PYTHON_STDLIB, *_WEB, _SLIMPAJAMA)}


def resolve_source(
    name_or_path: str,
    *,
    patterns: Sequence[str] = (),
    text_field: str | None = None,
    revision: str | None = None,
) -> Source:
    """The source of a registered name, a URL, a file or folder, or a dataset `owner/name` of the hub; in this
    order.

    Args:
        name_or_path: what the user gave. A folder that is called like a registered name is `./name`.
        patterns, text_field, revision: in place of the source's own.

    Raises:
        ValueError: nothing of that name; a revision for what is not on the hub.
    """
    if not name_or_path.strip():
        fix = "give a name of `moe-exp data list`, a dataset owner/name, a folder or a file"
        raise input_error("source=", "is empty", fix)
    if name_or_path in SOURCES:
        source = SOURCES[name_or_path]
    elif is_url(name_or_path):
        url = name_or_path.rstrip("/")
        file_name = url.rpartition("/")[2]
        if "*" in url:
            fix = f"give the folder, and --pattern '{file_name}'"
            raise input_error(f"source={name_or_path}", "has a pattern in the URL", fix)
        source = Source(without_ending(file_name), url, url=url, licence="yours to know")
    elif expanded(name_or_path).exists():
        path = Path(os.path.abspath(expanded(name_or_path)))  # noqa: PTH100  # resolve() names a link's target
        source = Source(without_ending(path.name), f"{path}", path=path, licence="yours to know")
    elif _REPOSITORY.fullmatch(name_or_path):
        what, name = f"{name_or_path} on the hub", name_or_path.partition("/")[2]
        source = Source(name, what, repository=name_or_path, licence="see its page")
    else:
        if "/" in name_or_path or ending(name_or_path):
            rule = "there is no such file or folder, and no dataset of that form"
            raise input_error(f"source={name_or_path}", rule, "correct the path")
        # most likely a name of `moe-exp data list` that was misspelt
        nearest = difflib.get_close_matches(name_or_path.lower(), SOURCES, n=1, cutoff=0)[0]
        rule = "is no source that has a name, no file or folder, and no dataset owner/name"
        fix = f"did you mean {nearest}? `moe-exp data list` shows all"
        raise input_error(f"source={name_or_path}", rule, fix)
    if source.repository is None and revision is not None:
        raise input_error(f"revision={revision}", f"{source.name} is not on the hub", "leave it out")
    if patterns and source.is_embedded:
        raise input_error(f"pattern={patterns[0]}", f"{source.name} is no set of files", "leave it out")
    given = {"patterns": tuple(patterns), "text_field": text_field, "revision": revision}
    changes: dict[str, object] = {name: value for name, value in given.items() if value}
    # what is known of the source's own files does not hold for others
    if patterns or (revision and revision != source.revision):
        changes |= {"num_bytes": None, "num_tokens": None, "is_exact": False, "note": ""}
    return replace(source, **changes)  # type: ignore[arg-type]


def local_files(source: Source) -> list[Path]:
    """The data files of a source with a path, sorted; ValueError if it has no data files."""
    assert source.path is not None
    if source.path.is_file():
        if not ending(source.path):
            raise input_error(source.path, f"is none of {KINDS}", "give a file that is")
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
    """The names that match a pattern, or without patterns those of `data_among`; sorted.

    Args:
        sizes: name to bytes of each file.
        patterns: of names; in what they match, records have precedence over text.
        where: folder or URL, for messages.
    """
    # a folder may have a million files
    some = ", ".join(sorted(sizes)[:4]) or "nothing"
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(sizes, pattern)
        if not matching:
            rule = f"matches no file of {where}, which has {some}"
            raise input_error(f"pattern={pattern}", rule, "choose a pattern that matches")
        if other := [name for name in matching if not ending(name)]:
            rule = f"matches {other[0]}, which is none of {KINDS}"
            fix = f"end it with one of them, as in {pattern}{DATA_SUFFIXES[0]}"
            raise input_error(f"pattern={pattern}", rule, fix)
        # without records text files, as a README.md beside records is no data
        chosen.update([name for name in matching if ending(name) in RECORD_SUFFIXES] or matching)
    if not patterns:
        chosen.update(data_among(sizes, where, "source"))
        if not chosen:
            raise input_error(where, f"has no file of {KINDS}, only {some}", "choose another")
    return sorted(chosen)


def check_names(names: Collection[str], server: str, reserved: Collection[str]) -> None:
    """Raises ValueError unless every file that a server lists has its own place in the folder of a download.

    Args:
        reserved: names of what the download itself keeps in the folder.
    """
    known, fix = set(names), "leave it out by --pattern, or choose another dataset"
    for name in names:
        check_inside(name, server)
        # names come from a server: nothing of it may reach another place or our own files
        if (first := name.partition("/")[0]) in reserved:
            raise _refused(name, f"{first} is what the download itself keeps there", server, fix)
        if above := known & {str(folder) for folder in PurePosixPath(name).parents}:
            raise _refused(name, f"{min(above)} is a file as well", server, fix)


def check_inside(name: str, server: str) -> None:
    """Raises ValueError unless a name that a server lists is printable and inside the download's folder."""
    parts = name.split("/")
    if printable(name) != name or "\n" in name or "\t" in name:
        raise _refused(name, "it has control characters", server)
    if not {"", ".", ".."}.isdisjoint(parts):
        raise _refused(name, "it leads out of the folder of the download", server)
    if any(len(part.encode()) > 255 for part in parts) or len(name.encode()) > 2000:
        raise _refused(name, "it is longer than a file name may be, 255 bytes", server)


def _refused(name: str, rule: str, server: str, fix: str = "choose another dataset") -> ValueError:
    # it goes to a terminal, where control characters could do harm
    shown = ascii(name)[1:-1]
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return input_error(shown, f"{server} lists a file of this name, and {rule}", fix)


def print_sources() -> None:
    """A table of the registered sources, on standard output."""
    console = table_console()
    also = "Also: a dataset owner/name of the hub, a folder, a file, a URL of an object store."
    table = Table(title="Sources", title_justify="left", caption=also, caption_justify="left")
    for heading in ("name", "dataset", "files", "download", "tokens", "licence", "what it is"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "download", "tokens"))
    for source in SOURCES.values():
        about = "" if source.is_exact or not source.num_bytes else "about "
        size = about + bytes_text(source.num_bytes) if source.num_bytes else "none"
        tokens = f"about {count_text(source.num_tokens)}" if source.num_tokens else "?"
        what = f"{source.description}. {source.note}".strip()
        files = ", ".join(source.patterns) or "this interpreter's .py files"
        table.add_row(source.name, source.repository or "embedded", files, size, tokens, source.licence, what)
    console.print(table)


def python_stdlib_documents(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the .py files of this interpreter's standard library, sorted by path.

    Folders of tests and of installed packages are left out. The text is licensed under PSF-2.0, the Python
    Software Foundation licence (https://docs.python.org/3/license.html). Files that cannot be decoded with
    the encoding that they declare (UTF-8 if they declare none) are skipped, and a warning names them.
    ValueError: no .py file under `root`, as in an interpreter whose standard library is a zip file.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = _python_files(root)
    if not paths:
        rule = f"the embedded corpus needs the .py files of {root}, which has none"
        raise input_error("TRAIN_DATA=", rule, "set TRAIN_DATA")
    yield from _read_files(root, paths)


def torch_documents(max_bytes: int, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of .py files of the installed torch, licensed under BSD-3-Clause.

    The files are chosen, and sorted, by a hash of their paths, so that a share of them is a sample of all.

    Args:
        max_bytes: largest total size; stops before the first file that would exceed it.
        root: that of torch, which is not imported, by default.
    """
    if root is None:
        found = importlib.util.find_spec("torch")
        if found is None or not found.submodule_search_locations:
            return
        root = Path(found.submodule_search_locations[0])
    num_bytes, paths = 0, []
    for path in sorted(_python_files(root), key=path_hash):
        # stops at the first that does not fit: what is chosen does not depend on the later ones
        num_bytes += (root / path).stat().st_size
        if num_bytes > max_bytes:
            break
        paths.append(path)
    for path, text in _read_files(root, paths):
        yield f"torch/{path}", text


def path_hash(path: str) -> bytes:
    """Puts files in an order, or into parts, that do not depend on which other files there are."""
    return hashlib.sha256(path.encode()).digest()


def _read_files(root: Path, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    skipped = []
    for path in paths:
        try:
            with tokenize.open(root / path) as file:
                text = file.read()
        except (UnicodeDecodeError, SyntaxError):  # SyntaxError: tokenize does not know the declared encoding
            skipped.append(path)
            continue
        yield path, text
    if skipped:
        what = "skipped %d of %d files of %s, not decodable: %s"
        logger.warning(what, len(skipped), len(paths), root, ", ".join(skipped))


def _python_files(root: Path) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        # in place: os.walk does not descend into what is taken out
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        found += [path.relative_to(root).as_posix() for path in paths]
    return sorted(found)
