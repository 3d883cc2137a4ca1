"""The files in RUN/hang: requests for stacks, the launchers' answers, and one dump per rank.

    request.json           the latest request: folder for the answers, kind (hang or stacks), reason
    2026-11-22T03-50-12/   the answers to one request
        node_00000.json    a launcher's answer: its ranks; `done` once the ranks' files are written
        rank_00003.txt     facts, one per line, then the stacks as py-spy or faulthandler prints them
        verdict.json       for a hang: the requesting launcher's decision whether to kill the ranks
        summary.txt

Launchers check `request.json` once a second. All launchers detect a hang at about the same time. Node 0 then
creates the folder for the answers. Another node creates a folder only if node 0 is too slow.
"""

import importlib.util
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from moe_exp.host.files import read_json, regular, write_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    folder: str  # name of the answers' folder in RUN/hang
    kind: Literal["hang", "stacks"]  # stacks: on a user's request; the run continues
    reason: str
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Answer:
    node: int
    nnodes: int
    world_size: int
    host: str
    ranks: list[int]
    busy: list[str]  # evidence against a hang: ranks that are paused, debugged or far from their limit
    done: bool  # the ranks' files are written


def ask(hang: Path, kind: Literal["hang", "stacks"], reason: str) -> Request:
    """Creates the folder for the answers and writes the request for all launchers."""
    name = datetime.now().astimezone().strftime("%Y-%m-%dT%H-%M-%S")
    # mkdir is atomic: two nodes that ask in the same second get two folders
    for number in count(1):
        request = Request(name if number == 1 else f"{name}-{number}", kind, reason)
        with suppress(FileExistsError):
            (hang / request.folder).mkdir(parents=True)
            break
    write_json(hang / request.folder / "request.json", asdict(request))
    write_json(hang / "request.json", asdict(request))
    return request


def latest_request(folder: Path) -> Request | None:
    """Reads the request in `folder`: RUN/hang has the latest request, a folder of answers has its own."""
    return _read(Request, folder / "request.json")


def write_answer(folder: Path, answer: Answer) -> None:
    write_json(folder / f"node_{answer.node:05d}.json", asdict(answer))


def read_answers(folder: Path) -> list[Answer]:
    """The launchers' answers so far, in node order."""
    return list(filter(None, (_read(Answer, path) for path in sorted(folder.glob("node_*.json")))))


def _read(kind: Callable[..., T], path: Path) -> T | None:
    """Content of a JSON file, passed to `kind`; None if the file is missing or incomplete."""
    with suppress(OSError, ValueError, TypeError):
        # open it without a stat first: only opening makes a network file system refresh its cache
        return kind(**read_json(path))
    return None


def wait_for_answers(folder: Path, *, first_seconds: float, all_seconds: float) -> list[Answer]:
    """Returns the answers; waits up to `first_seconds` for the first answer, up to `all_seconds` in total."""
    start = time.monotonic()
    while True:
        answers, waited = read_answers(folder), time.monotonic() - start
        is_whole = answers and len(answers) == answers[0].nnodes and all(answer.done for answer in answers)
        if is_whole or waited > (all_seconds if answers else first_seconds):
            return answers
        time.sleep(_POLL_SECONDS)


def wait_for_verdict(folder: Path, seconds: float) -> bool | None:
    """Waits for the verdict and returns whether the run hangs; None if no verdict arrives in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        verdict = _read(dict[str, Any], folder / "verdict.json") or {}
        if "is_hang" in verdict:
            return bool(verdict["is_hang"])
        time.sleep(_POLL_SECONDS)
    return None


# The dump of one rank.
_STACKS, _NATIVE, _CALLS = "--- stacks ---", "--- with C frames ---", "--- latest calls ---"
_PY_SPY_THREAD = re.compile(r'^Thread (\S+) \((.*?)\)(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.+?)(?::(\d+))?\)$")
_FAULTHANDLER_THREAD = re.compile(r"^(Current thread|Thread) (\S+).*\(most recent call first\):$")
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
MAIN = "MainThread"
# the call trace's own frames are on top of stacks taken while it records a call (TRACE_CALLS_FROM)
_TRACER = re.compile(r'moe_exp/watch/hangs/call_trace\.py[:"]')
_CURRENT = "current"  # the thread that received the signal, usually the main one
# frames of these packages show what a rank does; others belong to libraries or the user
PACKAGES = ("moe_exp", "megatron", "torch")
_FOLDERS = "packages"  # the fact that lists their folders


def package_folders() -> list[str]:
    """Folders from which this process would import PACKAGES; does not import any package."""
    # Names are not enough: a clone may be in a folder called moe_exp or torch, next to unrelated files.
    specs = filter(None, map(importlib.util.find_spec, PACKAGES))
    folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
    # if a folder is a symbolic link, a frame may have either path
    return sorted({*folders, *map(os.path.realpath, folders)})


@dataclass(frozen=True)
class Frame:
    """A function on a stack."""

    name: str  # as the tool prints it, qualified or not
    file: str  # relative to the package's parent for PACKAGES (`moe_exp/training/loop.py`), else absolute
    line: int  # 0 for a function in C

    @property
    def key(self) -> tuple[str, str, int]:
        """Function, file and line; the same whether py-spy or faulthandler printed the frame."""
        return self.name.rpartition(".")[2], self.file, self.line

    @property
    def place(self) -> str:
        """Short file name and line number."""
        file = re.sub(r".*/(site|dist)-packages/", "", self.file)
        return f"{Path(file).name if Path(file).is_absolute() else file}:{self.line}"

    @property
    def is_in_packages(self) -> bool:
        return self.file.startswith(tuple(f"{name}/" for name in PACKAGES))

    def __str__(self) -> str:
        # without Python's markers for nested functions
        name = self.name.replace(".<locals>", "").removesuffix(".<listcomp>").removesuffix(".<lambda>")
        return f"{name} ({self.place})"


@dataclass(frozen=True)
class Thread:
    name: str
    frames: tuple[Frame, ...]  # of Python, innermost first


@dataclass(frozen=True)
class RankDump:
    rank: int
    facts: Mapping[str, str]  # host, pid, state, phase, ...; see `dump.rank_facts`
    threads: Sequence[Thread] = ()
    native: Sequence[str] = ()  # C functions of the main thread, innermost first
    calls: Sequence[str] = ()  # latest function calls, with TRACE_CALLS_FROM
    collectives: Sequence[Mapping[str, Any]] = ()  # last of each group; see `dump.last_collectives`

    @property
    def host(self) -> str:
        return self.facts.get("host", "an unknown host")

    @property
    def iteration(self) -> int:
        return int(self.facts.get("iteration", 0))


def write_dump(
    folder: Path, rank: int, facts: Mapping[str, Any], stacks: str,
    *, native: str = "", calls: Sequence[str] = (),
) -> None:  # fmt: skip
    # the reader's packages may be in other folders
    facts = {"rank": rank, **facts, _FOLDERS: os.pathsep.join(package_folders())}
    lines = [*(f"{name}: {value}" for name, value in facts.items()), "", _STACKS, stacks.rstrip()]
    lines += ["", _NATIVE, native.rstrip()] if native else []
    lines += ["", _CALLS, *calls] if calls else []
    (folder / f"rank_{rank:05d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_dumps(folder: Path) -> list[RankDump]:
    """Reads the dumps of all ranks in a folder, in rank order; skips invalid files with a warning."""
    dumps = []
    for path in sorted(folder.glob("rank_*.txt")):
        try:
            text = regular(path).read_text(encoding="utf-8", errors="replace")
            rank = int(path.stem.removeprefix("rank_"))
        except (OSError, ValueError) as error:
            logger.warning("skipped %s: %s", path, getattr(error, "strerror", None) or error)
            continue
        # the reverse of `write_dump`: calls and native frames may be missing
        head, _, rest = text.partition(_STACKS + "\n")
        rest, _, calls = rest.partition(_CALLS + "\n")
        stacks, _, native = rest.partition(_NATIVE + "\n")
        facts = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        facts.pop("rank", None)
        folders = facts.pop(_FOLDERS, "").split(os.pathsep)
        # {}: torch recorded none
        recorded: dict[str, Any] = _read(dict, path.with_suffix(".collectives.json")) or {}
        threads, names = parse_stacks(stacks, folders), _native_names(native)
        dumps.append(RankDump(rank, facts, threads, names, calls.splitlines(), recorded.get("last", ())))
    return dumps


def parse_stacks(text: str, folders: Sequence[str] = ()) -> list[Thread]:
    """Parses the output of `py-spy dump --full-filenames` or faulthandler; puts MainThread first.
    `folders`: where PACKAGES are on the dump's host. Paths of files there are cut to start at the package.
    """

    def from_package(file: str) -> str:
        inside = (folder for folder in filter(None, folders) if file.startswith(f"{folder}/"))
        return next((f"{Path(folder).name}{file[len(folder) :]}" for folder in inside), file)

    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := _PY_SPY_THREAD.match(line):
            threads.append((match[3] or match[1], []))
        elif match := _FAULTHANDLER_THREAD.match(line):
            threads.append((_CURRENT if match[1].startswith("Current") else match[2], []))
        elif _TRACER.search(line) or not threads:
            continue
        elif match := _PY_SPY_FRAME.match(line):
            threads[-1][1].append(Frame(match[1], from_package(match[2]), int(match[3] or 0)))
        elif match := _FAULTHANDLER_FRAME.match(line):
            threads[-1][1].append(Frame(match[3], from_package(match[1]), int(match[2])))
    # faulthandler prints no thread names, and at most 100 frames. The main thread's outermost frame is a
    # module; if that was cut off, the thread that received the signal counts as the main one.
    found = []
    for name, frames in ((name, frames) for name, frames in threads if frames):
        is_main = frames[-1].name == "<module>" or "_run_module_as_main" in frames[-1].name
        found.append(Thread(MAIN if is_main else name, tuple(frames)))
    if all(thread.name != MAIN for thread in found):
        found = [replace(one, name=MAIN) if one.name == _CURRENT else one for one in found]
    return sorted(found, key=lambda thread: thread.name != MAIN)


def _native_names(text: str) -> list[str]:
    """C functions called from the innermost Python frame of the main thread."""
    names: list[str] = []
    is_main = False
    for line in text.splitlines():
        if match := _PY_SPY_THREAD.match(line):
            is_main = match[3] == MAIN
        elif is_main and _TRACER.search(line):
            names = []
        elif is_main and (match := _PY_SPY_FRAME.match(line)):
            if match[3]:  # C functions have no line numbers
                return names
            names.append(match[1])
    return names
