"""A small hub on 127.0.0.1: serves a folder as a dataset or model, counts requests and fails as told.

It answers what huggingface_hub asks for a download: the dataset's commit, its tree page by page, and the
files, by HEAD and GET with Range, directly or by a redirect as those outside of git have; no xet.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from moe_exp.data.download.sources import python_stdlib_documents

OUTSIDE_OF_GIT = (".parquet", ".zst", ".gz", ".bin")
_ADDRESS = re.compile(
    r"(?P<api>/api)?(/datasets|/models)?/(?P<repository>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)"
    r"(/(?P<path>.+))?)?"
)


def leave_host_settings(monkeypatch: pytest.MonkeyPatch, home: Path, *others: str) -> None:
    """Removes the host's hub settings, and variables that begin with one of `others`; the cache is `home`."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", *others))]:
        monkeypatch.delenv(name)
    for name, value in (("HF_HOME", str(home)), ("HF_HUB_DISABLE_XET", "1"), ("NO_PROXY", "127.0.0.1")):
        monkeypatch.setenv(name, value)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that fit; after: so many bytes of the body."""

    status: int | None = None  # of the answer, which has `headers`
    cut_after: int | None = None  # the connection is closed, although more bytes were announced
    reset_after: int | None = None  # it is broken off
    hold_after: int | None = None  # nothing more is sent, until the server ends
    where: str = "/resolve/"  # part of the address
    method: str = "GET"
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


class HubServer:
    """Serves `folder` under every dataset's name, or under `repository` alone.

    Attributes:
        url: for HF_ENDPOINT.
        faults: taken from the front as requests come that they fit; a list that anyone may append to.
        requests: (method, address) of all requests so far.
        sizes: file to a wrong size for the listing.
        also_listed: names that are in the listing, and nowhere else.
        page_entries: entries of a page of the tree.
        redirect: whether files outside of git are answered with a redirect.
        token: what files may be had with; everyone may list them, as with a gated dataset.
        held: set when a Fault with hold_after holds.
    """

    def __init__(self, folder: Path, *, repository: str | None = None):
        self.repository, self.token = repository, ""
        self.page_entries, self.redirect = 1000, False
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.sizes: dict[str, int] = {}
        self.also_listed: list[str] = []
        self.held, self.ended = threading.Event(), threading.Event()
        self.commits: dict[str, Path] = {}
        self.lock = threading.Lock()
        self.move_main(folder)

    def move_main(self, folder: Path) -> None:
        """A new commit with the files of `folder`; the earlier ones stay."""
        self.main = hashlib.sha1(f"{folder} {len(self.commits)}".encode()).hexdigest()
        self.commits[self.main] = folder

    def downloads(self, name: str = "") -> list[str]:
        """Addresses of the files that were asked for by GET, those with `name` in them."""
        asked = [path for method, path in list(self.requests) if method == "GET" and name in path]
        return [path for path in asked if not path.startswith("/api/")]

    def take_fault(self, method: str, address: str) -> Fault | None:
        with self.lock:
            self.requests.append((method, address))
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.where in address:
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> HubServer:
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = partial(self.server.serve_forever, poll_interval=0.05)
        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.server.hub
        self.fault = hub.take_fault(self.command, self.path)
        if self.fault and self.fault.status:
            return self.say(self.fault.status, b"out of order", self.fault.headers)
        url = urlsplit(self.path)
        address = _ADDRESS.fullmatch(url.path.removeprefix("/cdn"))
        if address is None or (hub.repository and address["repository"] != hub.repository):
            # as the hub does for those who may not know that it exists
            return self.refuse(401, "RepoNotFound")
        allowed = not hub.token or self.headers.get("Authorization") == f"Bearer {hub.token}"
        if address["what"] == "resolve" and not allowed:
            return self.refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        revision = unquote(address["revision"] or "main")
        commit = hub.main if revision == "main" else revision
        if commit not in hub.commits:
            return self.refuse(404, "RevisionNotFound")
        if address["what"] == "resolve":
            return self.send_file(commit, unquote(address["path"]), is_cdn=url.path.startswith("/cdn"))
        if address["what"] == "tree":
            return self.send_tree(commit, parse_qs(url.query))
        found = {"id": address["repository"], "sha": commit, "private": False, "gated": bool(hub.token)}
        found |= {"tags": [], "downloads": 0, "likes": 0}
        found["siblings"] = [{"rfilename": name} for name in _names(hub.commits[commit])]
        return self.send_json(found)

    def send_tree(self, commit: str, query: dict[str, list[str]]) -> None:
        hub = self.server.hub
        first = int(query.get("cursor", ["0"])[0])
        folder = hub.commits[commit]
        names = _names(folder)
        entries = []
        for name in names[first : first + hub.page_entries]:
            sha256, blob, size = _hashes(folder / name, (folder / name).stat().st_mtime_ns)
            size = hub.sizes.get(name, size)
            entry: dict[str, object] = {"type": "file", "oid": blob, "size": size, "path": name}
            if name.endswith(OUTSIDE_OF_GIT):
                entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
            entries.append(entry)
        entries += [{"type": "file", "oid": "0" * 40, "size": 1, "path": name} for name in hub.also_listed]
        headers = {}
        if (following := first + hub.page_entries) < len(names):
            page = f"{self.path.partition('?')[0]}?recursive=True&expand=False&cursor={following}"
            headers["Link"] = f'<{hub.url}{page}>; rel="next"'
        self.send_json(entries, headers)

    def send_file(self, commit: str, name: str, *, is_cdn: bool) -> None:
        hub = self.server.hub
        path = hub.commits[commit] / name
        if not path.is_file():
            return self.refuse(404, "EntryNotFound")
        content = path.read_bytes()
        sha256, blob, size = _hashes(path, path.stat().st_mtime_ns)
        is_outside = name.endswith(OUTSIDE_OF_GIT)
        etag = f'"{sha256 if is_outside else blob}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        if is_outside:
            headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{sha256}"'}
        if hub.redirect and is_outside and not is_cdn:
            return self.say(302, b"", headers | {"Location": f"/cdn{quote(urlsplit(self.path).path)}"})
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            return self.say(206, content[start:], headers)
        return self.say(200, content, headers)

    def send_json(self, content: object, headers: dict[str, str] | None = None) -> None:
        self.say(200, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def refuse(self, status: int, code: str) -> None:
        self.say(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = self.fault or Fault()
        limits = [one for one in (fault.cut_after, fault.reset_after, fault.hold_after) if one is not None]
        if not limits:
            self.wfile.write(body)
            return
        self.wfile.write(body[: limits[0]])
        self.wfile.flush()
        if fault.hold_after is not None:
            self.server.hub.held.set()
            self.server.hub.ended.wait()
        if fault.reset_after is not None:  # zero seconds of lingering: RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@cache
def _hashes(path: Path, _mtime_ns: int) -> tuple[str, str, int]:
    """SHA-256, git's SHA-1, size."""
    content = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return hashlib.sha256(content).hexdigest(), blob, len(content)


def write_fineweb_parquet(
    path: Path, texts: Sequence[str | None] | None = None, *, num_documents: int = 200
) -> Path:
    """Writes a file with fineweb-edu's columns, by default of texts of the Python standard library."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if texts is None:
        texts = [text for _, text in islice(python_stdlib_documents(), num_documents)]
    rows = range(len(texts))
    scores = [2.5 + (row * 37 % 200) / 100 for row in rows]
    columns = {
        "text": pa.array(texts, pa.string()),
        "id": [f"<urn:uuid:00000000-0000-4000-8000-{row:012d}>" for row in rows],
        "dump": ["CC-MAIN-2019-30"] * len(texts),
        "url": [f"http://example.org/{row}" for row in rows],
        "file_path": ["s3://commoncrawl/crawl-data/CC-MAIN-2019-30/x.warc.gz"] * len(texts),
        "language": ["en"] * len(texts),
        "language_score": [0.7 + (row * 13 % 30) / 100 for row in rows],
        "token_count": pa.array([len(text or "") // 4 for text in texts], pa.int64()),
        "score": scores,
        "int_score": pa.array([round(score) for score in scores], pa.int64()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=64)
    return path
