"""Documents in files: read line by line, checked, counted and hashed, so that none is lost silently.

A line ends at LF alone, as JSONL says: U+2028 and other separators are text. A BOM at the start of a file and
a CR at the end of a line are not text. Blank lines and empty texts are no documents: they are skipped and
counted. Whatever else is no document stops, or is skipped and counted by its reason, as the caller wants.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson
import xxhash

from moe_exp.data.kinds import (
    BOM,
    DAMAGE,
    FILES,
    JSON_FILES,
    JSON_SUFFIXES,
    KINDS,
    NOT_JSON,
    PARQUET_SUFFIX,
    RECORD_SUFFIXES,
    TEXT_SUFFIXES,
    BadDocument,
    TextRule,
    check_regular,
    damaged,
    decompressed,
    input_error,
    is_compressed,
    raw_lines,
)
from moe_exp.host.files import bytes_text, ending

logger = logging.getLogger(__name__)

BLANK_LINE, EMPTY_TEXT = "blank line", "empty text"

_MOST_NAMED = 5
_OFFICE_SUFFIXES = (".docx", ".doc", ".odt", ".rtf", ".pdf", ".epub", ".html", ".htm", ".pptx", ".tex")
_FIXES = dict.fromkeys(_OFFICE_SUFFIXES, "save it as {}.txt, in UTF-8")
_FIXES |= dict.fromkeys((".csv", ".tsv"), "convert it to {}.jsonl, one object with a field text per line")
_FIXES |= dict.fromkeys((".gz", ".zip", ".tar", ".xz", ".bz2", ".zst"), "unpack it")
_RENAME = "rename it to .txt if it is text in UTF-8, or to .jsonl if each line is a JSON object"
# files that lie beside data and are none: about it, or of the programs that made it
_BESIDE_DATA = re.compile(
    r"(.*/)?(datatrove/.*|[^/]*\.(idx|lock|tmp)|(readme|licen[cs]e|copying|notice|citation|changelog|state"
    r"|dataset_infos?|_success|_(common_)?metadata|running|([^/]*\.)?manifest)(\.[^/]*)?)",
    re.IGNORECASE,
)
_OTHER_FIELD = "name the field with the text (TEXT_FIELD, --text-field or --json-keys)"

_MASK128 = 2**128 - 1


@dataclass
class Tally:
    """Counts of what was read or written; the counts of parts add up to those of the whole.

    Args:
        num_text_bytes: of their texts in UTF-8.
        text_hash: sum of the XXH3-128 of the texts modulo 2**128: equal for the same multiset of texts,
            whatever their order.
        skipped: reason to number of lines that are no documents.
    """

    num_documents: int = 0
    num_text_bytes: int = 0
    text_hash: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, text: bytes, times: int = 1) -> None:
        """Counts a document by its text in UTF-8; -1 times takes out one that was added."""
        self.num_documents += times
        self.num_text_bytes += times * len(text)
        # a sum, so that neither order nor division into tasks matters, and one can be taken out
        self.text_hash = (self.text_hash + times * xxhash.xxh3_128_intdigest(text)) & _MASK128

    def __iadd__(self, other: Tally) -> Tally:
        self.num_documents += other.num_documents
        self.num_text_bytes += other.num_text_bytes
        self.text_hash = (self.text_hash + other.text_hash) & _MASK128
        self.skipped += other.skipped
        return self

    def to_json(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"num_documents": self.num_documents, "num_text_bytes": self.num_text_bytes}
        return counts | {"text_hash": f"{self.text_hash:032x}", "skipped": dict(sorted(self.skipped.items()))}

    @classmethod
    def from_json(cls, counts: dict[str, Any]) -> Tally:
        text_hash, skipped = int(counts["text_hash"], 16), Counter(counts["skipped"])
        return cls(counts["num_documents"], counts["num_text_bytes"], text_hash, skipped)


def is_validation_file(path: Path) -> bool:
    """Whether a file is for validation by its name, such as x.val.jsonl."""
    kind = ending(path.name)
    return kind in JSON_SUFFIXES and path.name.lower().endswith(f".val{kind}")


def files_in(
    folder: Path, *, what: str = "input", text_field: str = "text", with_validation: bool = False
) -> list[Path]:
    """The files of `data_among` in a folder and its subfolders, sorted, without *.val.jsonl by default."""
    paths = sorted(files_below(folder))
    check_regular(path for path in paths if ending(path))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
    has_text = partial(_has_field, folder, text_field)
    files = [folder / name for name in data_among(sizes, str(folder), what, text_field, has_text)]
    validation = [path for path in files if is_validation_file(path)]
    if with_validation or not validation:
        return files
    if len(validation) < len(files):
        names = _some([str(path.relative_to(folder)) for path in validation])
        logger.info("%s: left out, for validation, by name: %s", folder, names)
    return [path for path in files if path not in validation]


def data_among(
    sizes: Mapping[str, int],
    where: str,
    what: str,
    text_field: str = "",
    has_text: Callable[[str], bool] | None = None,
) -> list[str]:
    """Chooses the files with documents among those of a folder; a warning counts and names the others.

    Records (JSON and tables) are chosen, and text files if there are none, as beside records they usually are
    their README and LICENSE. A .json file holds records or facts about them, which `has_text` decides.

    Args:
        sizes: relative name to bytes of each file.
        where, what: the folder or URL and the setting that names it, for messages.
        text_field: field with the text; "" if `has_text` is not given.
        has_text: whether the first object in a .json file has the field. Without it, as at a store, .json
            files are chosen by their names, and only if there are no other records.

    Raises:
        ValueError: files that would be left out have most of the bytes.
    """
    about = {name for name in sizes if _BESIDE_DATA.fullmatch(name)}
    about |= {name for name in sizes if name.endswith(".bin") and f"{name[:-4]}.idx" in sizes}
    records = [name for name in sizes if ending(name) in RECORD_SUFFIXES]
    plain = [name for name in records if ending(name) not in JSON_FILES]
    if has_text:
        records = [name for name in records if ending(name) not in JSON_FILES or has_text(name)]
    else:
        records = plain or [name for name in records if name not in about]
    chosen = records or [name for name in sizes if ending(name) in TEXT_SUFFIXES]
    left_out = {name: sizes[name] for name in sizes.keys() - chosen - about}
    if not left_out or not chosen:
        return chosen
    kinds: Counter[str] = Counter()
    # counted by ending, as there may be thousands
    for name in left_out:
        kind = ending(name) or Path(name).suffix.lower() or "without an ending"
        if kind in JSON_FILES and text_field:
            kind += f" without a field {text_field!r}"
        elif kind in (*JSON_FILES, *TEXT_SUFFIXES):
            kind += " beside records"
        kinds[kind] += 1
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda one: (-one[1], one)))
    num_files = f"{len(left_out)} {'file' if len(left_out) == 1 else 'files'}"
    line = f"left out {num_files}, {bytes_text(sum(left_out.values()))}: {counts} ({_some(sorted(left_out))})"
    # most of it would be lost silently
    if sum(left_out.values()) > sum(sizes[name] for name in chosen if name not in about):
        suffix = ending(chosen[0])
        pattern = f"--pattern '*{suffix}'" if what == "source" else f"'{where}/**/*{suffix}'"
        fix = f"name those to read by a pattern, such as {pattern}, or convert the others to .txt or .jsonl"
        if has_text and any(ending(name) in JSON_FILES for name in left_out):
            fix = f"{_OTHER_FIELD}, or {fix}"
        raise input_error(f"{what}={where}", f"{line}: most of its bytes", fix)
    _warn_once(f"{where}: {line}")
    return chosen


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


@cache  # a command looks into its folders for the estimate, for the check and for the work
def _warn_once(message: str) -> None:
    logger.warning(message)


def _has_field(folder: Path, text_field: str, name: str) -> bool:
    """Whether the first value of a JSON file has the field."""
    try:
        line = next((line for line in raw_lines(folder / name) if line.strip()), b"null")
        first = orjson.loads(line.removeprefix(BOM))
    except (ValueError, *DAMAGE):  # reading it will say what is wrong
        return True
    return isinstance(first, dict) and text_field in first


def files_below(root: Path) -> Iterator[Path]:
    """Files of a folder and its subfolders, links followed; each folder once, by its own name if it can."""
    seen, folders, links = set[Path](), [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = folder.resolve()
        # the latter would take in everything around the root
        if real in seen or real in root.resolve().parents:
            why = "what it links to is there already" if real in seen else "it links to a folder above"
            logger.info("%s: left out, %s", folder, why)
            continue
        seen.add(real)
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                # links last, so that a folder is found by its own name first
                (links if path.is_symlink() else folders).append(path)
            else:
                yield path


def find_inputs(names: Iterable[str | Path], what: str = "input", text_field: str = "text") -> list[Path]:
    """The files that names stand for: files, folders (see `files_in`) and globs, in this order.

    Args:
        what: setting that gives them, for errors.
        text_field: field with the text, by which data are known in a folder with .json files.

    Raises:
        ValueError: there is none, a name stands for nothing, a file is of no kind that can be read or given
            twice; most bytes of a folder would be left out.
    """
    found: list[Path] = []
    for path in map(Path, names):
        if path.exists() or path.is_symlink():
            matches = [path]
        else:  # not Path.glob, which takes no absolute pattern
            matches = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
            if "**" in path.parts:  # which matches what folders hold, too
                matches = [one for one in matches if one.is_file()]
        if not matches:
            is_pattern = glob.has_magic(str(path))
            rule = "no file matches the pattern" if is_pattern else "there is no such file"
            raise input_error(f"{what}={path}", rule, "check the path, or quote the pattern")
        for one in matches:
            files = files_in(one, what=what, text_field=text_field) if one.is_dir() else [one]
            found += files
            if files:
                continue
            if prefixes := sorted(path.with_suffix("") for path in one.glob("*.idx")):
                rule, fix = "the folder has token files", f"give their prefix, {prefixes[0]}"
                raise input_error(f"{what}={one}", rule, fix)
            below = list(files_below(one))
            if any(ending(path) in JSON_FILES for path in below):
                rule = f"its .json files have no field {text_field!r}"
                raise input_error(f"{what}={one}", rule, _OTHER_FIELD)
            others = sorted({path.suffix for path in below if path.suffix})[:_MOST_NAMED]
            rule = f"the folder has no file that ends with {KINDS}{', only ' if others else ''}"
            fix = "give a folder with such files, or convert its files to .txt"
            raise input_error(f"{what}={one}", rule + ", ".join(others), fix)
    if not found:
        raise input_error(f"{what}=", "no file is given", f"give files ({KINDS}) or folders of them")
    check_regular(found)
    # by what links lead to
    for path, times in Counter(file.resolve() for file in found).items():
        if times > 1:
            rule = f"is given {times} times, its documents would be there as often"
            raise input_error(f"{what}={path}", rule, "give it once")
    for path in found:
        if not ending(path):
            fix = _FIXES.get(path.suffix.lower(), _RENAME).format(path.stem)
            raise input_error(f"{what}={path}", f"does not end with {KINDS}", fix)
        if is_validation_file(path) and len(found) > 1:
            logger.warning("%s is for validation, by its name, and is read with the others", path)
    return found


def check_apart(inputs: Iterable[Path], output: Path) -> None:
    """Checks that a step can make, replace and remove the folder `output` without touching its inputs.

    Raises:
        ValueError: a file or folder of the inputs is in `output`, in OUTPUT.partial or OUTPUT.old, is one of
            them, or has one in it.
    """
    for path in inputs:
        places = {Path(os.path.abspath(path)), path.resolve()}  # noqa: PTH100  # a link is lost as a file is
        for suffix in ("", ".partial", ".old"):
            folder = output.resolve().with_name(output.resolve().name + suffix)
            if any(folder in (place, *place.parents) for place in places):
                raise input_error(f"output={output}", f"the input {path} is in it", "another output folder")
            if path.resolve() in folder.parents:
                rule = f"is in the input {path}, of which it would become a part"
                raise input_error(f"output={output}", rule, "another output folder")


def read_documents(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False, rule: TextRule = FILES
) -> Iterator[tuple[bytes, str]]:
    """`read_objects` with the text in place of the object."""
    for line, document in read_objects(path, tally, text_field=text_field, skip_bad=skip_bad, rule=rule):
        yield line, document[text_field]


def read_objects(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False, rule: TextRule = FILES
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields (line of JSONL without its end, JSON object) of every document, and counts into `tally`.

    Args:
        tally: what is read is added here, when it is yielded.
        skip_bad: skip and count what is no document instead of raising. A file that ends early raises all the
            same.

    Raises:
        BadDocument: at the first line that is no document, or if a file is damaged.
    """
    for number, line in read_lines(path, text_field=text_field, rule=rule):
        try:
            document = _object_of(line)
            text = text_in(document, text_field)
        except ValueError as error:
            skip_or_raise(path, number, str(error), tally, skip_bad=skip_bad)
            continue
        tally.add(text.encode())
        yield line, document


def skip_or_raise(path: Path, number: int, reason: str, tally: Tally, *, skip_bad: bool) -> None:
    """Counts line `number` of `path` as skipped, or raises BadDocument unless it or its text is empty."""
    if not skip_bad and reason not in (BLANK_LINE, EMPTY_TEXT):
        raise BadDocument(path, number, reason)
    tally.skipped[reason] += 1


def text_of(line: bytes, text_field: str = "text") -> str:
    """The text of a line of JSONL; ValueError says why the line is no document."""
    return text_in(_object_of(line), text_field)


def text_in(document: dict[str, Any], text_field: str = "text") -> str:
    """The text of a document; ValueError says why it has none."""
    text = document.get(text_field)
    if text_field not in document:
        raise ValueError(f"no field {text_field!r}")
    if not isinstance(text, str):
        kinds = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
        kinds |= {int: "a number", float: "a number"}
        kind = kinds.get(type(text), f"a {type(text).__name__}")
        raise ValueError(f"field {text_field!r} is {kind}, not a text")
    if not text:
        raise ValueError(EMPTY_TEXT)
    return text


def _object_of(line: bytes) -> dict[str, Any]:
    if not line or line.isspace():
        raise ValueError(BLANK_LINE)
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        # lone surrogates, which UTF-8 has no bytes for, may be valid UTF-8 as escapes
        is_utf8 = line.decode(errors="ignore").encode() == line
        raise ValueError(NOT_JSON if is_utf8 else "invalid UTF-8") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def read_lines(
    path: Path, *, text_field: str = "text", rule: TextRule = FILES
) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line of JSONL without LF or CRLF) of a file; BadDocument if it is damaged."""
    number = 0
    try:
        for number, line in enumerate(raw_lines(path, text_field=text_field, rule=rule), 1):
            if number == 1:
                line = line.removeprefix(BOM)
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except DAMAGE as error:
        raise damaged(path, number + 1, error) from error


def lines_before(path: Path, start: int) -> int:
    """Number of lines that start before byte `start` of a file."""
    if not start:
        return 0
    with path.open("rb") as file:
        # an LF at start - 1 begins the line at `start`, which does not count
        num_lines, left = 1, start - 1
        while left and (chunk := file.read(min(2**22, left))):
            num_lines += chunk.count(b"\n")
            left -= len(chunk)
    return num_lines


def estimate_line_bytes(paths: Iterable[Path]) -> int:
    """Decompressed bytes of files, roughly: by the ratio at the beginning of the largest of each kind."""
    total_bytes = 0
    by_suffix: dict[str, list[Path]] = {}
    for path in paths:
        by_suffix.setdefault(ending(path), []).append(path)
    for suffix, files in by_suffix.items():
        sizes, ratio = [path.stat().st_size for path in files], 1.0
        if is_compressed(files[0]):
            with suppress(BadDocument):  # reading it will say so
                ratio = compression_ratio(files[sizes.index(max(sizes))])
        elif suffix == PARQUET_SUFFIX:
            ratio = 2.5  # usually
        total_bytes += int(sum(sizes) * ratio)
    return total_bytes


def compression_ratio(path: Path) -> float:
    """Decompressed by compressed bytes of a .gz or .zst file's beginning, up to 4 MB; raises BadDocument."""
    num_compressed = num_bytes = 0
    with path.open("rb") as file:
        try:
            for chunk in decompressed(path, file):
                num_compressed, num_bytes = file.tell(), num_bytes + len(chunk)
                if num_bytes >= 2**22:
                    break
        except DAMAGE as error:
            # a damaged beginning: name its line
            for _ in read_lines(path):  # which stops at the line
                pass
            raise damaged(path, 1, error) from error
    return num_bytes / num_compressed if num_bytes else 1.0
