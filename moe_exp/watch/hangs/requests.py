"""How stacks are asked for and answered, by files in RUN/hang: every launcher looks for `request.json` once a
second.

    request.json           the latest request: the folder to answer in, hang or stacks, why
    2026-11-22T03-50-12/   one answer
        node_00000.json    a launcher's: which ranks it has; `done` when their files are there
        rank_00003.txt     see stack_files.py
        verdict.json       of a hang, by the launcher that asked: whether the ranks are ended
        summary.txt

A hang is seen on every node, within a second or so. Node 0 names the folder; the others wait for that for a
while, and name one themselves where it does not come.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from moe_exp.host.files import write_json

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    """One wish for the stacks of all ranks.

    Args:
        folder: name of the answer's folder inside RUN/hang.
        kind: hang: a launcher says that the run hangs; stacks: somebody wants to see them, and the run goes
            on.
        reason: in words.
        host: of who asks.
    """

    folder: str
    kind: Literal["hang", "stacks"]
    reason: str
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Answer:
    """What one launcher says.

    Args:
        node: its NODE_RANK.
        nnodes, world_size: of the job.
        host: its name.
        ranks: of this node.
        busy: what speaks against a hang, in words: ranks that are paused, under a debugger, or far from their
            limit.
        done: their files are there.
    """

    node: int
    nnodes: int
    world_size: int
    host: str
    ranks: list[int]
    busy: list[str]
    done: bool


def ask(hang: Path, kind: Literal["hang", "stacks"], reason: str) -> Request:
    """Makes the folder of a new answer and tells the launchers; returns the request."""
    name = datetime.now().astimezone().strftime("%Y-%m-%dT%H-%M-%S")
    number = 1
    while True:
        request = Request(name if number == 1 else f"{name}-{number}", kind, reason)
        try:
            (hang / request.folder).mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        write_json(hang / request.folder / "request.json", asdict(request))
        write_json(hang / "request.json", asdict(request))
        return request


def latest_request(folder: Path) -> Request | None:
    """The latest request of RUN/hang, or the one that the folder of an answer belongs to."""
    try:
        # Opened, not asked for its time: opening is what makes a network file system look again.
        return Request(**json.loads((folder / "request.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_answer(folder: Path, answer: Answer) -> None:
    """Says what this launcher does about the request of `folder`."""
    write_json(folder / f"node_{answer.node:05d}.json", asdict(answer))


def read_answers(folder: Path) -> list[Answer]:
    """What launchers have said so far, in order of node."""
    answers = []
    for path in sorted(folder.glob("node_*.json")):
        try:
            answers.append(Answer(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return answers


def wait_for_answers(folder: Path, *, first_seconds: float, all_seconds: float) -> list[Answer]:
    """Returns when all nodes have answered, or what there is when time is over.

    Args:
        folder: of the answer.
        first_seconds: for a first sign of any launcher.
        all_seconds: for the files of all nodes.
    """
    start = time.monotonic()
    while True:
        answers, waited = read_answers(folder), time.monotonic() - start
        if answers and len(answers) == answers[0].nnodes and all(answer.done for answer in answers):
            return answers
        if waited > (all_seconds if answers else first_seconds):
            return answers
        time.sleep(_POLL_SECONDS)


def give_verdict(folder: Path, *, is_hang: bool, reason: str) -> None:
    """Tells the other launchers whether the ranks are ended."""
    write_json(folder / "verdict.json", {"is_hang": is_hang, "reason": reason})


def wait_for_verdict(folder: Path, seconds: float) -> bool | None:
    """Whether the run was found to hang; None where nobody says it in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return bool(json.loads((folder / "verdict.json").read_text(encoding="utf-8"))["is_hang"])
        except (OSError, ValueError, KeyError):
            time.sleep(_POLL_SECONDS)
    return None
