"""Hosts in network namespaces of this machine, each with a host name and an interface of its own, on one
bridge. Needs root and iproute2. Whatever happens, the namespaces are removed.

    with hosts(3) as (a, b, c):
        b.slow_down("20mbit")
        process = a.start([sys.executable, "-c", "..."], NODE_RANK=0)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INTERFACE = "eth0"


def missing() -> str:
    """Why there can be no such hosts here, or ''."""
    if os.geteuid():
        return "needs root"
    if lacking := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"needs {' and '.join(lacking)}"
    probe = f"probe{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "exec", probe, "unshare", "--uts", "true")
        _run("ip", "link", "add", probe, "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    finally:
        for command in (("ip", "link", "del", probe), ("ip", "netns", "del", probe)):
            subprocess.run(command, capture_output=True)
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)


@dataclass
class Host:
    """One of them."""

    name: str
    namespace: str
    address: str
    master: str
    outside: str  # other end of its interface
    bridge: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, *command: str) -> None:
        """Runs a command there; CalledProcessError if it fails."""
        _run("ip", "netns", "exec", self.namespace, *command)

    def start(self, command: Sequence[str], **environ: Any) -> subprocess.Popen[str]:
        """Starts a command there, with its output in pipes, GLOO_SOCKET_IFNAME and MASTER_ADDR."""
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": _INTERFACE, "MASTER_ADDR": self.master}
        variables |= {name: str(value) for name, value in environ.items()}
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*there, *named], env=variables, start_new_session=True, **pipes)
        self.processes.append(process)
        return process

    def slow_down(self, rate: str) -> None:
        """Lets only so much out of its interface."""
        limit = f"tbf rate {rate} burst 32kbit latency 400ms"
        self.run(*f"tc qdisc add dev {_INTERFACE} root {limit}".split())

    def part(self) -> None:
        """Takes it out of the bridge: what it sends is lost, and nobody says so."""
        _run("ip", "link", "set", self.outside, "nomaster")

    def join(self) -> None:
        """Puts it back."""
        _run("ip", "link", "set", self.outside, "master", self.bridge)

    def refuse(self, other: Host) -> None:
        """Sends nothing to `other`, and answers nothing."""
        self.run("ip", "route", "add", "unreachable", f"{other.address}/32")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, the first of which is the master."""
    tag = f"m{os.getpid() % 10000}"
    bridge, made = f"{tag}br", []
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number in range(count):
            made.append(_host(tag, bridge, number))
        yield made
    finally:
        for host in made:
            for process in host.processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        for number in range(count):
            namespace = f"{tag}n{number}"
            for pid in _processes_of(namespace):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "link", "del", f"{tag}v{number}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _host(tag: str, bridge: str, number: int) -> Host:
    name, namespace, outside = f"node-{'abcdefgh'[number]}", f"{tag}n{number}", f"{tag}v{number}"
    host = Host(name, namespace, f"10.213.7.{number + 1}", "10.213.7.1", outside, bridge)
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", _INTERFACE, "netns", namespace)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", _INTERFACE)
    host.run("ip", "link", "set", _INTERFACE, "up")
    host.run("ip", "link", "set", "lo", "up")
    return host


def _processes_of(namespace: str) -> list[int]:
    if not Path(f"/run/netns/{namespace}").exists():
        return []
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]
