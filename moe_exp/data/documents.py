"""Reads, checks, counts and hashes the documents in files, so that no document is lost silently.

Only LF ends a line, as in JSONL: U+2028 and other separators are text. A BOM at the start of a file and a CR
at the end of a line are removed. Blank lines and empty texts are skipped and counted. Any other invalid line
raises an error, unless the caller chooses to skip such lines and count them by reason.
"""

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import xxhash
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from moe_exp.data import kinds
from moe_exp.data.kinds import BOM, DAMAGE, FILES, KINDS, BadDocument, TextRule, input_error, raw_lines
from moe_exp.host.files import bytes_text, ending

logger = logging.getLogger(__name__)

BLANK_LINE, EMPTY_TEXT = "blank line", "empty text"

_MOST_NAMED = 5
_OFFICE_SUFFIXES = (".docx", ".doc", ".odt", ".rtf", ".pdf", ".epub", ".html", ".htm", ".pptx", ".tex")
_FIXES = dict.fromkeys(_OFFICE_SUFFIXES, "save it as {}.txt, in UTF-8")
_FIXES |= dict.fromkeys((".csv", ".tsv"), "convert it to {}.jsonl, one object with the field text per line")
_FIXES |= dict.fromkeys((".gz", ".zip", ".tar", ".xz", ".bz2", ".zst"), "unpack it")
_RENAME = "rename it to .txt if it is UTF-8 text, or to .jsonl if each line is a JSON object"
# files found next to data that are not data: documentation, or files of the programs that wrote it
_BESIDE_DATA = re.compile(
    r"(.*/)?(datatrove/.*|[^/]*\.(idx|lock|tmp)|(readme|licen[cs]e|copying|notice|citation|changelog|state"
    r"|dataset_infos?|_success|_(common_)?metadata|running|([^/]*\.)?manifest)(\.[^/]*)?)",
    re.IGNORECASE,
)
_OTHER_FIELD = "give the name of the text field (TEXT_FIELD, --text-field or --json-keys)"

_MASK128 = 2**128 - 1
TALLIED = ("num_documents", "num_text_bytes", "text_hash")  # counts of a `Tally` that no step may change


C = TypeVar("C", bound="Counted")


class Counted:
    """Base class of dataclasses that are stored as JSON. Reading ignores unknown entries."""

    def to_json(self) -> dict[str, Any]:
        return TypeAdapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_json(cls: type[C], content: Mapping[str, Any]) -> C:
        return TypeAdapter(cls).validate_python(content)


_Hash = Annotated[int, PlainSerializer("{:032x}".format), BeforeValidator(lambda text: int(str(text), 16))]
_Sorted = PlainSerializer(lambda counts: dict(sorted(counts.items())))


@dataclass
class Tally(Counted):
    """Counts of documents that were read or written. The tallies of several files can be added.

    `text_hash` is the sum of the texts' XXH3-128 hashes modulo 2**128, so it does not depend on the order of
    the texts.
    """

    num_documents: int = 0
    num_text_bytes: int = 0  # size of the texts in UTF-8
    text_hash: _Hash = 0
    skipped: Annotated[Counter[str], _Sorted] = field(default_factory=Counter)  # invalid lines by reason

    def add(self, text: bytes, times: int = 1) -> None:
        """Counts a document, given as UTF-8 bytes; `times=-1` undoes an earlier call."""
        self.num_documents += times
        self.num_text_bytes += times * len(text)
        # a sum depends neither on the order nor on the division into tasks, and documents can be removed
        self.text_hash = (self.text_hash + times * xxhash.xxh3_128_intdigest(text)) & _MASK128

    def __iadd__(self, other: "Tally") -> "Tally":
        self.num_documents += other.num_documents
        self.num_text_bytes += other.num_text_bytes
        self.text_hash = (self.text_hash + other.text_hash) & _MASK128
        self.skipped += other.skipped
        return self


def is_validation_file(path: Path) -> bool:
    """Whether a file's name marks it as validation data, such as x.val.jsonl."""
    kind = ending(path.name)
    return kind in kinds.JSON_SUFFIXES and path.name.lower().endswith(f".val{kind}")


def files_in(
    folder: Path, *, what: str = "input", text_field: str = "text", with_validation: bool = False
) -> list[Path]:
    """Returns the data files (see `data_among`) below a folder, sorted; by default without *.val.jsonl."""
    paths = sorted(files_below(folder))
    kinds.check_regular(path for path in paths if ending(path))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
    has_text = partial(_has_field, folder, text_field)
    files = [folder / name for name in data_among(sizes, str(folder), what, text_field, has_text)]
    validation = [path for path in files if is_validation_file(path)]
    if with_validation or not validation:
        return files
    if len(validation) < len(files):
        names = _some([str(path.relative_to(folder)) for path in validation])
        logger.info("%s: left out validation files: %s", folder, names)
    return [path for path in files if path not in validation]


def data_among(
    sizes: Mapping[str, int], where: str, what: str, text_field: str = "",
    has_text: Callable[[str], bool] | None = None,
) -> list[str]:  # fmt: skip
    """Selects the document files in a folder. Warns about all other files except metadata.

    If the folder contains record files (JSON and tables), only they are document files: a text file next to
    them is usually a README or LICENSE. Without record files, the text files are document files.

    Args:
        sizes: maps the relative path of each file to its size in bytes.
        where: the folder or URL, for messages.
        what: name of the setting that contains the folder or URL, for messages.
        text_field: field with the text; "" if `has_text` is not given.
        has_text: returns whether a .json file is a record file, that is, whether its first object has the
            field. None (for object stores): .json files are selected if there are no other record files,
            except .json files that are named like metadata.

    Raises:
        ValueError: the files that are not selected contain most of the bytes.
    """
    about = {name for name in sizes if _BESIDE_DATA.fullmatch(name)}
    about |= {name for name in sizes if name.endswith(".bin") and f"{name[:-4]}.idx" in sizes}
    records = [name for name in sizes if ending(name) in kinds.RECORD_SUFFIXES]
    plain = [name for name in records if ending(name) not in kinds.JSON_FILES]
    if has_text:
        records = [name for name in records if ending(name) not in kinds.JSON_FILES or has_text(name)]
    else:
        records = plain or [name for name in records if name not in about]
    chosen = records or [name for name in sizes if ending(name) in kinds.TEXT_SUFFIXES]
    left_out = {name: sizes[name] for name in sizes.keys() - chosen - about}
    if not left_out or not chosen:
        return chosen
    by_kind: Counter[str] = Counter()
    # counted by ending, because there may be thousands
    for name in left_out:
        kind = ending(name) or Path(name).suffix.lower() or "without an ending"
        if kind in kinds.JSON_FILES and text_field:
            kind += f" without a field {text_field!r}"
        elif kind in (*kinds.JSON_FILES, *kinds.TEXT_SUFFIXES):
            kind += " next to records"
        by_kind[kind] += 1
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(by_kind.items(), key=lambda one: (-one[1], one)))
    num_files = f"{len(left_out)} {'file' if len(left_out) == 1 else 'files'}"
    line = f"left out {num_files}, {bytes_text(sum(left_out.values()))}: {counts} ({_some(sorted(left_out))})"
    # a warning is easily overlooked: refuse to ignore most of the data
    if sum(left_out.values()) > sum(sizes[name] for name in chosen if name not in about):
        suffix = ending(chosen[0])
        pattern = f"--pattern '*{suffix}'" if what == "source" else f"'{where}/**/*{suffix}'"
        fix = f"select files with a pattern such as {pattern}, or convert the other files to .txt or .jsonl"
        if has_text and any(ending(name) in kinds.JSON_FILES for name in left_out):
            fix = f"{_OTHER_FIELD}, or {fix}"
        raise input_error(f"{what}={where}", f"{line}, which is most of the data", fix)
    _warn_once(f"{where}: {line}")
    return chosen


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


@cache  # a command lists its folders several times: to estimate, to check and to read
def _warn_once(message: str) -> None:
    logger.warning(message)


def _has_field(folder: Path, text_field: str, name: str) -> bool:
    """Whether the first value in a JSON file has the field `text_field`."""
    try:
        line = next((line for line in raw_lines(folder / name) if line.strip()), b"null")
        first = orjson.loads(line.removeprefix(BOM))
    except (ValueError, *DAMAGE):  # reading the file reports the error
        return True
    return isinstance(first, dict) and text_field in first


def files_below(root: Path) -> Iterator[Path]:
    """Files in a folder and its subfolders. Follows links, but visits each folder once."""
    seen, folders, links = set[Path](), [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = folder.resolve()
        # a link to a parent would pull in everything around the root
        if real in seen or real in root.resolve().parents:
            why = "its target is already included" if real in seen else "it links to a parent folder"
            logger.info("%s: left out because %s", folder, why)
            continue
        seen.add(real)
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                # links last, so that a folder is listed under its own name rather than a link's
                (links if path.is_symlink() else folders).append(path)
            else:
                yield path


def find_inputs(names: Iterable[str | Path], what: str = "input", text_field: str = "text") -> list[Path]:
    """Returns the files for `names`, in the same order. A name is a file, folder (see `files_in`) or glob.

    Args:
        what: name of the setting that contains `names`, for error messages.
        text_field: field with the text; in a folder, only .json files with this field are data.

    Raises:
        ValueError: no files are given; a name matches nothing; a file is of unknown kind or given twice; most
            of the bytes in a folder are in files that are not selected.
    """
    found: list[Path] = []
    for path in map(Path, names):
        if path.exists() or path.is_symlink():
            matches = [path]
        else:  # Path.glob does not accept absolute patterns
            matches = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
            if "**" in path.parts:  # matches folders in addition to their files
                matches = [one for one in matches if one.is_file()]
        if not matches:
            rule = "no file matches the pattern" if glob.has_magic(str(path)) else "not found"
            raise input_error(f"{what}={path}", rule, "check the path, or quote the pattern")
        for one in matches:
            files = files_in(one, what=what, text_field=text_field) if one.is_dir() else [one]
            found += files
            if files:
                continue
            below = list(files_below(one))
            if prefixes := sorted(path.with_suffix("") for path in one.glob("*.idx")):
                rule, fix = "the folder contains token files", f"give their prefix, {prefixes[0]}"
            elif any(ending(path) in kinds.JSON_FILES for path in below):
                rule, fix = f"its .json files have no field {text_field!r}", _OTHER_FIELD
            else:
                others = sorted({path.suffix for path in below if path.suffix})[:_MOST_NAMED]
                rule = f"the folder contains no file ending with {KINDS}{', only ' if others else ''}"
                rule += ", ".join(others)
                fix = "give a folder with files of these types, or convert its files to .txt"
            raise input_error(f"{what}={one}", rule, fix)
    if not found:
        raise input_error(f"{what}=", "no files given", f"give files ({KINDS}) or folders with such files")
    kinds.check_regular(found)
    # resolved, so that a link and its target count as the same file
    for path, times in Counter(file.resolve() for file in found).items():
        if times > 1:
            rule = f"is given {times} times, which would duplicate its documents"
            raise input_error(f"{what}={path}", rule, "give it once")
    for path in found:
        if not ending(path):
            fix = _FIXES.get(path.suffix.lower(), _RENAME).format(path.stem)
            raise input_error(f"{what}={path}", f"must end with {KINDS}", fix)
        if is_validation_file(path) and len(found) > 1:
            logger.warning("%s is read although its name marks it as validation data", path)
    return found


def check_apart(inputs: Iterable[Path], output: Path) -> None:
    """Raises ValueError if creating, replacing or removing `output` would affect the inputs."""
    # an input may neither be nor contain one of the step's folders, nor be inside of one
    for path in inputs:
        places = {Path(os.path.abspath(path)), path.resolve()}  # noqa: PTH100  # removing a folder removes its links
        for suffix in ("", ".partial", ".old"):
            folder = output.resolve().with_name(output.resolve().name + suffix)
            contains = any(folder in (place, *place.parents) for place in places)
            if contains or path.resolve() in folder.parents:
                rule = f"{'contains' if contains else 'must not be inside'} the input {path}"
                raise input_error(f"output={output}", rule, "choose another output folder")


def read_documents(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False, rule: TextRule = FILES
) -> Iterator[tuple[bytes, str]]:
    """Like `read_objects`, but yields the text instead of the object."""
    for line, document in read_objects(path, tally, text_field=text_field, skip_bad=skip_bad, rule=rule):
        yield line, document[text_field]


def read_objects(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False, rule: TextRule = FILES
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each document as (JSONL line without line end, JSON object).

    Args:
        tally: counts each document before it is yielded.
        skip_bad: skip and count invalid lines instead of raising. A truncated file still raises an error.

    Raises:
        BadDocument: at the first invalid line, or if a file is damaged.
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
    """Counts lines without text as skipped, and with `skip_bad` all bad lines; else raises BadDocument."""
    if not skip_bad and reason not in (BLANK_LINE, EMPTY_TEXT):
        raise BadDocument(path, number, reason)
    tally.skipped[reason] += 1


def text_of(line: bytes, text_field: str = "text") -> str:
    """Returns the text of a JSONL line; raises ValueError with the reason if the line is invalid."""
    return text_in(_object_of(line), text_field)


def text_in(document: dict[str, Any], text_field: str = "text") -> str:
    """Returns a document's text; raises ValueError with the reason if it is missing or invalid."""
    text = document.get(text_field)
    if text_field not in document:
        raise ValueError(f"no field {text_field!r}")
    if not isinstance(text, str):
        words = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
        words |= {int: "a number", float: "a number"}
        kind = words.get(type(text), f"a {type(text).__name__}")
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
        # an escaped lone surrogate is valid UTF-8, but not valid JSON: UTF-8 cannot encode it
        is_utf8 = line.decode(errors="ignore").encode() == line
        raise ValueError(kinds.NOT_JSON if is_utf8 else "invalid UTF-8") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def read_lines(
    path: Path, start: int = 0, end: int | None = None, *, text_field: str = "text", rule: TextRule = FILES
) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, JSONL line without LF or CRLF). Raises BadDocument if the file is damaged.

    `start` and `end` select a range of bytes in a plain JSONL file; both must be line boundaries. The line
    at `start` has the number 1.
    """
    number = 0
    lines = raw_lines(path, text_field=text_field, rule=rule) if end is None else lines_in(path, start, end)
    try:
        for number, line in enumerate(lines, 1):
            if number == 1 and not start:
                line = line.removeprefix(BOM)
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except DAMAGE as error:
        raise kinds.damaged(path, number + 1, error) from error


def lines_in(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yields the lines in a range of bytes of a file."""
    with path.open("rb", buffering=2**20) as file:
        file.seek(start)
        while start < end and (line := file.readline()):
            start += len(line)
            yield line


def estimate_line_bytes(paths: Iterable[Path]) -> int:
    """Estimates the files' decompressed size; reads at most the start of the largest file of each kind."""
    total_bytes = 0
    for suffix, files in groupby(sorted(paths, key=ending), key=ending):
        sizes = {path: path.stat().st_size for path in files}
        ratio = 2.5 if suffix == kinds.PARQUET_SUFFIX else 1.0  # typical for text
        largest = max(sizes, key=sizes.__getitem__)
        if kinds.is_compressed(largest):
            with suppress(BadDocument):  # reading the file reports the error
                ratio = compression_ratio(largest)
        total_bytes += int(sum(sizes.values()) * ratio)
    return total_bytes


def compression_ratio(path: Path) -> float:
    """Compression ratio of the first 4 MB of text in a .gz or .zst file. Raises BadDocument if damaged."""
    num_compressed = num_bytes = 0
    with path.open("rb") as file:
        try:
            for chunk in kinds.decompressed(path, file):
                num_compressed, num_bytes = file.tell(), num_bytes + len(chunk)
                if num_bytes >= 2**22:
                    break
        except DAMAGE as error:
            # reading the lines raises the error with the number of the damaged line
            for _ in read_lines(path):
                pass
            raise kinds.damaged(path, 1, error) from error
    return num_bytes / num_compressed if num_bytes else 1.0
