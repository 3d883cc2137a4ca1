"""The dump file of one rank: facts, one a line, then its stacks as py-spy or faulthandler prints them."""

import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_exp.host.files import read_json, regular

logger = logging.getLogger(__name__)

_STACKS, _NATIVE, _CALLS = "--- stacks ---", "--- with C frames ---", "--- latest calls ---"
_PY_SPY_THREAD = re.compile(r'^Thread (\S+) \((.*?)\)(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.+?)(?::(\d+))?\)$")
_FAULTHANDLER_THREAD = re.compile(r"^(Current thread|Thread) (\S+).*\(most recent call first\):$")
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
MAIN = "MainThread"
# on every stack taken while it records a call (TRACE_CALLS_FROM)
_TRACER = "moe_exp/watch/hangs/call_trace.py"
_CURRENT = "current"  # the thread that got the signal, usually the main one
# whose frames show what a rank does; other files are a library's or a user's
PACKAGES = ("moe_exp", "megatron", "torch")
_FOLDERS = "packages"  # name of the fact with their folders


def package_folders() -> list[str]:
    """Folders of PACKAGES as this process would import them, without importing them.

    Names are not enough: a clone may lie in a folder called moe_exp or torch, next to unrelated files.
    """
    specs = filter(None, map(importlib.util.find_spec, PACKAGES))
    folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
    # with a link, a frame may have either path
    return sorted({*folders, *map(os.path.realpath, folders)})


@dataclass(frozen=True)
class Frame:
    """A function on a stack."""

    name: str  # as the tool prints it, qualified or not
    file: str  # from the package name on for PACKAGES (`moe_exp/train.py`), else the whole path
    line: int  # 0 for a function in C

    @property
    def key(self) -> tuple[str, str, int]:
        """The same for every tool."""
        return self.name.rpartition(".")[2], self.file, self.line

    @property
    def place(self) -> str:
        """File, from its package on, and line."""
        for root in ("/site-packages/", "/dist-packages/"):
            if root in self.file:
                return f"{self.file.rpartition(root)[2]}:{self.line}"
        return f"{Path(self.file).name if Path(self.file).is_absolute() else self.file}:{self.line}"

    @property
    def is_in_packages(self) -> bool:
        return self.file.startswith(tuple(f"{name}/" for name in PACKAGES))

    def __str__(self) -> str:
        # without Python's markers for nested functions
        name = self.name.replace(".<locals>", "").removesuffix(".<listcomp>").removesuffix(".<lambda>")
        return f"{name} ({self.place})"


@dataclass(frozen=True)
class Thread:
    """A thread and its Python frames, innermost first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class RankDump:
    """The state of one rank at one moment."""

    rank: int
    facts: Mapping[str, str]  # host, pid, state, phase, ..., see `dump.rank_facts`
    threads: Sequence[Thread] = ()
    native: Sequence[str] = ()  # C functions of the main thread, innermost first
    calls: Sequence[str] = ()  # the latest ones, with TRACE_CALLS_FROM
    collectives: Sequence[Mapping[str, Any]] = ()  # the last of each group, see `dump.last_collectives`

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
    facts = {"rank": rank, **facts, _FOLDERS: os.pathsep.join(package_folders())}
    lines = [*(f"{name}: {value}" for name, value in facts.items()), "", _STACKS, stacks.rstrip()]
    lines += ["", _NATIVE, native.rstrip()] if native else []
    lines += ["", _CALLS, *calls] if calls else []
    (folder / f"rank_{rank:05d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_dumps(folder: Path) -> list[RankDump]:
    """The dumps of all ranks in a folder, in order of rank."""
    return [dump for path in sorted(folder.glob("rank_*.txt")) if (dump := _read(path)) is not None]


def _read(path: Path) -> RankDump | None:
    """Logs a warning and returns None if `write_dump` did not write the file."""
    try:
        text = regular(path).read_text(encoding="utf-8", errors="replace")
        rank = int(path.stem.removeprefix("rank_"))
    except (OSError, ValueError) as error:
        logger.warning("%s is left out: %s", path, getattr(error, "strerror", None) or error)
        return None
    head, _, rest = text.partition(_STACKS + "\n")
    rest, _, calls = rest.partition(_CALLS + "\n")
    stacks, _, native = rest.partition(_NATIVE + "\n")
    facts = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    facts.pop("rank", None)
    folders = facts.pop(_FOLDERS, "").split(os.pathsep)
    collectives = path.with_suffix(".collectives.json")
    try:
        last = list(read_json(collectives)["last"])
    except (OSError, ValueError, LookupError, TypeError):  # no trace is kept
        last = []
    threads, names = parse_stacks(stacks, folders), _native_names(native)
    return RankDump(rank, facts, threads, names, calls.splitlines(), last)


def parse_stacks(text: str, folders: Sequence[str] = ()) -> list[Thread]:
    """Parses the output of `py-spy dump --full-filenames` or faulthandler; MainThread comes first.

    `folders`: of PACKAGES where it was printed; paths of files in them start at the package.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := _PY_SPY_THREAD.match(line):
            threads.append((match[3] or match[1], []))
        elif match := _FAULTHANDLER_THREAD.match(line):
            threads.append((_CURRENT if match[1].startswith("Current") else match[2], []))
        elif _is_tracers(line) or not threads:
            continue
        elif match := _PY_SPY_FRAME.match(line):
            threads[-1][1].append(Frame(match[1], _from_package(match[2], folders), int(match[3] or 0)))
        elif match := _FAULTHANDLER_FRAME.match(line):
            threads[-1][1].append(Frame(match[3], _from_package(match[1], folders), int(match[2])))
    # faulthandler prints no names. The main thread began with a module; it prints at most 100 frames.
    found = []
    for name, frames in ((name, frames) for name, frames in threads if frames):
        is_main = frames[-1].name == "<module>" or "_run_module_as_main" in frames[-1].name
        found.append(Thread(MAIN if is_main else name, tuple(frames)))
    if all(thread.name != MAIN for thread in found):
        found = [replace(one, name=MAIN) if one.name == _CURRENT else one for one in found]
    return sorted(found, key=lambda thread: thread.name != MAIN)


def _from_package(file: str, folders: Sequence[str]) -> str:
    """`moe_exp/train.py` for a file in a package's folder, else the whole path."""
    for folder in filter(None, folders):
        if file.startswith(f"{folder}/"):
            return f"{Path(folder).name}{file[len(folder) :]}"
    return file


def _is_tracers(line: str) -> bool:
    return f"{_TRACER}:" in line or f'{_TRACER}"' in line


def _native_names(text: str) -> list[str]:
    """C functions above the innermost Python frame of the main thread."""
    names: list[str] = []
    is_main = False
    for line in text.splitlines():
        if match := _PY_SPY_THREAD.match(line):
            is_main = match[3] == MAIN
        elif is_main and _is_tracers(line):
            names = []
        elif is_main and (match := _PY_SPY_FRAME.match(line)):
            if match[3]:
                return names
            names.append(match[1])
    return names
