"""How stacks are requested and answered: files in RUN/hang. Launchers check `request.json` once a second.

    request.json           the latest request: folder for the answers, hang or stacks, reason
    2026-11-22T03-50-12/   one answer
        node_00000.json    from a launcher: its ranks; `done` once their files are there
        rank_00003.txt     see stack_files.py
        verdict.json       for a hang, by the launcher that asked: whether the ranks are ended
        summary.txt

Every node detects a hang within about a second. Node 0 names the folder; the others wait for it for a while,
then name one themselves.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

from moe_exp.host.files import read_json, write_json

T = TypeVar("T")

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    """A request for the stacks of all ranks."""

    folder: str  # name of the answer's folder in RUN/hang
    kind: Literal["hang", "stacks"]  # stacks: somebody wants to see them, and the run continues
    reason: str
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Answer:
    """The answer of one launcher."""

    node: int
    nnodes: int
    world_size: int
    host: str
    ranks: list[int]
    busy: list[str]  # evidence against a hang: ranks that are paused, debugged, or far from their limit
    done: bool  # the ranks' files are written


def ask(hang: Path, kind: Literal["hang", "stacks"], reason: str) -> Request:
    """Makes the folder of a new answer and writes the request for all launchers."""
    name = datetime.now().astimezone().strftime("%Y-%m-%dT%H-%M-%S")
    for number in count(1):
        request = Request(name if number == 1 else f"{name}-{number}", kind, reason)
        with suppress(FileExistsError):
            (hang / request.folder).mkdir(parents=True)
            break
    write_json(hang / request.folder / "request.json", asdict(request))
    write_json(hang / "request.json", asdict(request))
    return request


def latest_request(folder: Path) -> Request | None:
    """The latest request in RUN/hang, or the request that an answer's folder belongs to."""
    return _read(Request, folder / "request.json")


def write_answer(folder: Path, answer: Answer) -> None:
    write_json(folder / f"node_{answer.node:05d}.json", asdict(answer))


def read_answers(folder: Path) -> list[Answer]:
    """The launchers' answers so far, in order of node."""
    answers = (_read(Answer, path) for path in sorted(folder.glob("node_*.json")))
    return [answer for answer in answers if answer is not None]


def _read(kind: Callable[..., T], path: Path) -> T | None:
    """None if the file is missing, or being written."""
    try:
        # Opened rather than checked with stat: only opening makes a network file system refresh.
        return kind(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def wait_for_answers(folder: Path, *, first_seconds: float, all_seconds: float) -> list[Answer]:
    """Waits `all_seconds` for the answers of all nodes, `first_seconds` for any; returns those so far."""
    start = time.monotonic()
    while True:
        answers, waited = read_answers(folder), time.monotonic() - start
        is_whole = answers and len(answers) == answers[0].nnodes and all(answer.done for answer in answers)
        if is_whole or waited > (all_seconds if answers else first_seconds):
            return answers
        time.sleep(_POLL_SECONDS)


def wait_for_verdict(folder: Path, seconds: float) -> bool | None:
    """Whether the run hangs; None without a verdict in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return bool(read_json(folder / "verdict.json")["is_hang"])
        except (OSError, ValueError, KeyError):
            time.sleep(_POLL_SECONDS)
    return None
