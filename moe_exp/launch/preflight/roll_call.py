"""Roll call of a job's nodes before torch is loaded: nodes send JSON lines to node 0's MASTER_PORT. No torch.

The main operation is `meet`: each node sends a value and receives the values of all nodes that are in
time. All nodes receive the same values.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil

_RETRY_SECONDS = 0.2
_PATIENCE_SECONDS = 20.0  # how much longer a client waits than the server
_CLOCK_ROUNDS = 9


def listener(port: int, backlog: int) -> socket.socket:
    """Listens on all addresses of this host (IPv6 if available). Port 0 is any free port. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


@dataclass
class _Meeting:
    values: dict[int, Any] = field(default_factory=dict)
    deadline: float = 0.0
    result: dict[int, Any] | None = None  # the answer for all, fixed once the first gets it


class Server:
    """Server of node 0, or, on any node, a server to which other nodes only test the connection.
    Raises OSError if the port is not available.
    """

    def __init__(self, port: int, num_nodes: int):
        self._num_nodes = num_nodes
        self._changed = threading.Condition()
        self._meetings: dict[str, _Meeting] = {}
        self._hosts: dict[int, str] = {}
        self._gone: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._listener = listener(port, backlog=max(128, num_nodes))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="roll call", daemon=True).start()

    def stop_listening(self) -> None:
        """Frees the port; existing connections stay open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()

    def close(self, seconds: float = 10.0) -> None:
        """Waits at most `seconds` for the nodes to disconnect, so that each node receives its last answer."""
        # torchrun needs the port next; nodes that have joined keep their connections
        self.stop_listening()
        deadline = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, address = self._listener.accept()
                peer = address[0].removeprefix("::ffff:")
                thread = threading.Thread(target=self._serve, args=(connection, peer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        # anyone may connect: a connection counts as a node once it has joined
        node = None
        try:
            with connection, connection.makefile("rw", encoding="utf-8") as lines:
                for line in lines:
                    question = json.loads(line)
                    if question["ask"] == "join":
                        answer: dict[str, Any] = self._join(question, address)
                        node = int(question["node"]) if "error" not in answer else None
                    elif question["ask"] == "time":
                        answer = {"time": time.time()}
                    elif node is not None:
                        answer = self._meet(node, question)
                    else:
                        break
                    lines.write(json.dumps(answer) + "\n")
                    lines.flush()
        except (OSError, ValueError, KeyError, TypeError):  # disconnected, also while closing; or a stranger
            pass
        with self._changed:
            if node is not None:
                self._gone.add(node)
            self._changed.notify_all()

    def _join(self, question: dict[str, Any], address: str) -> dict[str, str]:
        node, host = int(question["node"]), str(question["host"])
        with self._changed:
            if question["num_nodes"] != self._num_nodes:
                rule = f"NNODES={question['num_nodes']}: node 0 has NNODES={self._num_nodes}"
                return {"error": f"{rule}. Fix: set the same value on all nodes."}
            if node in self._hosts:
                rule = f"NODE_RANK={node}: {self._hosts[node]} has the same NODE_RANK"
                return {"error": f"{rule}. Fix: number the nodes from 0 to NNODES - 1."}
            self._hosts[node] = host
        return {"address": address}

    def _meet(self, node: int, question: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            meeting = self._meetings.setdefault(question["what"], _Meeting())
            # starts with the first node; a late one finds itself missing in the answer
            meeting.deadline = meeting.deadline or time.monotonic() + question["seconds"]
            if meeting.result is None:
                meeting.values[node] = question["value"]
            self._changed.notify_all()
            # nodes that are late or gone are left out, and thus named, where a collective would hang
            while meeting.result is None:
                left = meeting.deadline - time.monotonic()
                if left <= 0 or not set(range(self._num_nodes)) - set(meeting.values) - self._gone:
                    meeting.result = dict(sorted(meeting.values.items()))
                    self._changed.notify_all()
                else:
                    self._changed.wait(left)
            return {"values": meeting.result}


class RollCall:
    """A node's connection to node 0's server at `host`:`port`. Raises ValueError if node 0 does not answer in
    `seconds` or has a different NNODES, or if another node has the same NODE_RANK.
    """

    def __init__(self, host: str, port: int, *, node: int, num_nodes: int, seconds: float):
        self._place = f"MASTER_ADDR={host}: {socket.gethostname()} (node {node})"
        self._socket = self._connect(host, port, seconds)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        # the host name distinguishes nodes with the same NODE_RANK
        join = {"ask": "join", "node": node, "num_nodes": num_nodes, "host": socket.gethostname()}
        answer = self._ask(join, seconds)
        if "error" in answer:
            self.close()
            raise ValueError(answer["error"])
        self.address = str(answer["address"]) if node else host  # address for the other nodes

    def _connect(self, host: str, port: int, seconds: float) -> socket.socket:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic()))
            except OSError as error:
                if time.monotonic() + _RETRY_SECONDS >= deadline:
                    reason = error.strerror or str(error)
                    fix = "start node 0 with the same PREFLIGHT, and make that port reachable from this host"
                    where = f"{self._place} cannot reach port {port} in {seconds:.0f} s ({reason})"
                    raise ValueError(f"{where}. Fix: {fix}.") from None
                time.sleep(_RETRY_SECONDS)

    def meet(self, what: str, value: Any, seconds: float) -> dict[int, Any]:
        """Sends `value`; returns the nodes' values, keyed by node. Raises ValueError if node 0 is gone.

        All nodes pass the same `what`, a name that no other meeting uses; `value` has JSON types. Nodes that
        call this method more than `seconds` later than the first node are missing from the result.
        """
        ask = {"ask": "meet", "what": what, "value": value, "seconds": seconds}
        answer = self._ask(ask, seconds + _PATIENCE_SECONDS)
        return {int(node): found for node, found in answer["values"].items()}

    def clock_offset(self, clock: Callable[[], float] = time.time) -> tuple[float, float]:
        """Seconds by which node 0's clock is ahead of this node's clock, and the uncertainty.

        As in NTP (RFC 5905, section 8), node 0 is assumed to read its clock halfway between question and
        answer; the error is at most half the round trip. The shortest of several round trips is used.
        """
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            start, before = time.perf_counter(), clock()
            there = self._ask({"ask": "time"}, _PATIENCE_SECONDS)["time"]
            trip = time.perf_counter() - start
            rounds.append((trip, there - before - trip / 2))
        trip, offset = min(rounds)
        return offset, trip / 2

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unsent data may be lost
            self._lines.close()
        self._socket.close()

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            self._lines.write(json.dumps(question) + "\n")
            self._lines.flush()
            if not (line := self._lines.readline()):
                raise ConnectionError("connection closed")
            return dict(json.loads(line))
        except (OSError, ValueError) as error:
            self.close()
            what = f"{self._place} lost its connection to node 0 ({error})"
            raise ValueError(f"{what}. Fix: see the output of node 0.") from None


_KNOCK_SECONDS = 5.0
_MOST_PEERS = 64  # in larger jobs, only peers at power-of-two distances


def knock(address: str, port: int) -> str:
    """Asks a node's server for the time; returns the error, or '' if the server answers."""
    try:
        with socket.create_connection((address, port), timeout=_KNOCK_SECONDS) as connection:
            connection.sendall(b'{"ask": "time"}\n')
            return "" if connection.recv(256) else "connection closed without an answer"
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()


def unreached(node: int, doors: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Peers that `node` cannot reach, and why. `doors` has the address and port of each node's `Server`."""
    peers = peers_of(node, len(doors))
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(peers)))) as threads:
        reasons = threads.map(lambda peer: knock(*doors[peer]), peers)
        return {peer: reason for peer, reason in zip(peers, reasons, strict=True) if reason}


def peers_of(node: int, count: int) -> list[int]:
    """Nodes to which `node` connects: all others. In a large job: those whose rank differs by 1, 2, 4, ..."""
    if count <= _MOST_PEERS + 1:
        return [peer for peer in range(count) if peer != node]
    # about 2 log2(n) peers per node, through which all nodes are connected
    steps = [2**power for power in range(count.bit_length()) if 2**power < count]
    return sorted({(node + sign * step) % count for step in steps for sign in (1, -1)} - {node})


def data_address(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the interface in $GLOO_SOCKET_IFNAME or $NCCL_SOCKET_IFNAME; '' if unset or not found."""
    name = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME") or ""
    name = name.split(",")[0].removeprefix("=")
    # '' for an exclusion such as ^lo or a prefix, which NCCL accepts
    found = psutil.net_if_addrs().get(name, [])
    return next((one.address for one in found if one.family == socket.AF_INET), "")
