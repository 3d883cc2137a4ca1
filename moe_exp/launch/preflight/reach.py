"""Checks that nodes can connect to each other: otherwise torch's process groups only hang. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from moe_exp.launch.preflight.roll_call import close_listener, listener

_KNOCK_SECONDS = 5.0
_MOST_PEERS = 64  # beyond it, only peers at distances of powers of two
_SIOCGIFADDR = 0x8915  # Linux: get an interface's address


class Door:
    """A port of this node that echoes a byte until it is closed."""

    def __init__(self) -> None:
        self._listener = listener(0, backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_KNOCK_SECONDS)
                connection.sendall(connection.recv(1))

    def close(self) -> None:
        close_listener(self._listener)


def knock(address: str, port: int) -> str:
    """Sends a byte there and back; returns the reason of a failure, or ''."""
    try:
        with socket.create_connection((address, port), timeout=_KNOCK_SECONDS) as connection:
            connection.sendall(b"?")
            return "" if connection.recv(1) == b"?" else "connection closed without an answer"
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()


def unreached(node: int, doors: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Nodes that this one cannot reach, with the reason; `doors`: address and port of every node."""
    peers = peers_of(node, doors)
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(peers)))) as threads:
        reasons = threads.map(lambda peer: knock(*doors[peer]), peers)
        return {peer: reason for peer, reason in zip(peers, reasons, strict=True) if reason}


def peers_of(node: int, nodes: Iterable[int]) -> list[int]:
    """Nodes to try: all, or in a large job those at distances 1, 2, 4, ... on both sides."""
    order = sorted(nodes)
    place, count = order.index(node), len(order)
    if count <= _MOST_PEERS + 1:
        return [peer for peer in order if peer != node]
    steps = [2**power for power in range(count.bit_length()) if 2**power < count]
    return sorted({order[(place + sign * step) % count] for step in steps for sign in (1, -1)} - {node})


def data_address(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; '' if there is none."""
    name = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME") or ""
    name = name.split(",")[0].removeprefix("=")
    if not name or name.startswith("^") or sys.platform != "linux":
        return ""
    import fcntl  # not on all systems

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""  # NCCL also accepts a prefix of a name
    return socket.inet_ntoa(answer[20:24])
