"""A command line in this process, under a time limit: its exit code and what it printed."""

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_exp import cli
from moe_exp.runs.records import TRAIN_KEYS

LIMIT_SECONDS = 10
EXIT_CODES = (0, 1, 2, 75)  # docs/architecture.md, "Ends of a run"; 1: what a user can fix


class _Overtime(BaseException):
    """No Exception: nothing in the package may take it for an error of its own."""


@dataclass(frozen=True)
class Answer:
    """What a command line has come to; `failure` is empty where it has answered as every command has to."""

    code: int | None
    out: str
    err: str
    failure: str


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises inside the block, also in a system call, after `seconds` of CPU time, or 20 times as long by the
    clock: a busy host is no fault.
    """

    def ring(number: int, frame: object) -> None:
        raise _Overtime

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def answer(argv: Sequence[str], *, codes: Sequence[int] = EXIT_CODES) -> Answer:
    """Runs `moe-exp` with `argv`; anything but an exit code of `codes`, in time and with a line of its own on
    stderr where it is not 0, is a failure.
    """
    out, err, failure, code = io.StringIO(), io.StringIO(), "", None
    try:
        with time_limit(LIMIT_SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(list(argv))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except _Overtime:
        failure = f"has not answered in {LIMIT_SECONDS} s:\n{traceback.format_exc(limit=-4)}"
    except BaseException:
        failure = traceback.format_exc(limit=-8)
    if not failure and code not in codes:
        failure = f"exit code {code}"
    if not failure and "Traceback (most recent call last)" in err.getvalue() + out.getvalue():
        failure = f"prints a traceback:\n{err.getvalue()}"
    if not failure and any(len(line) > 12_000 for line in err.getvalue().splitlines()):
        failure = "prints a line of over 12,000 characters"
    return Answer(code, out.getvalue(), err.getvalue(), failure)


JUNK_KINDS = (
    "missing", "folder", "link_to_nothing", "link_to_itself", "fifo", "socket", "device", "unreadable",
    "empty", "truncated", "binary", "not_utf8", "deep_lists", "deep_objects", "long_number", "number", "null",
    "list", "wrong_types", "wrong_events", "nul_bytes", "yaml_tag",
)  # fmt: skip


def wrong_events() -> Iterator[str]:
    """Records whose values have types that they should not have."""
    names = ("hang", "rank_failed", "start", "end", "checkpoint", "spike", "restart", [])
    values = (3, None, True, "x", [], {"a": 1}, 1e300)
    for kind, name, value in itertools.product(("event", "train", "valid", None), names, values):
        record = {"kind": kind, "event": name, "iteration": value, "time": value}
        yield json.dumps(record) + "\n"
        yield json.dumps(record | dict.fromkeys([*TRAIN_KEYS, "ranks", "hosts", "seconds"], value)) + "\n"


def spoil(path: Path, kind: str) -> None:
    """Puts something of `kind` where a file, or a folder, belongs."""
    content = path.read_bytes() if path.is_file() else b'{"a": 1}\n' * 9
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    deep = 100_000
    contents = {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "binary": bytes(range(256)) * 64,
        "not_utf8": b'{"kind": "\xff\xfe\xe9"}\n',
        "deep_lists": b"[" * deep + b"]" * deep + b"\n",
        "deep_objects": b'{"a":' * deep + b"1" + b"}" * deep + b"\n",
        "long_number": b'{"kind": "train", "iteration": ' + b"9" * 5000 + b"}\n",
        "number": b"7\n",
        "null": b"null\n",
        "list": b"[1, null, {}]\n",
        "wrong_types": b'{"kind": [], "iteration": "x", "event": 3, "starts": 1, "files": 7, "status": {}, '
        b'"outputs": {"a": []}, "settings": [], "version": "9", "cases": 4, "rollbacks": [null]}\n',
        "wrong_events": "".join(wrong_events()).encode(),
        "nul_bytes": b"\0" * 4096,
        "yaml_tag": b"!!python/object/apply:os.system ['true']\n",
    }
    links = {"link_to_nothing": path.with_name("nowhere"), "link_to_itself": path.name, "device": "/dev/null"}
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has at most 108 bytes
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "unreadable":
        path.write_bytes(content)
        path.chmod(0)
    elif kind != "missing":
        path.write_bytes(contents[kind])
