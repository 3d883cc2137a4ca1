"""Rendezvous of the nodes' agents before each start of the ranks; implements torchrun's interface.

torchrun's static rendezvous does not report failures to other nodes. The c10d rendezvous reports failures,
but assigns its own node numbers instead of NODE_RANK. In torch 2.13, both leave addresses of dead ranks in
the store of restarted ranks (c10d does not if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
This file solves all three problems.

A round lasts from one start of all ranks to the next. Agents meet in a store on MASTER_PORT; the store lives
as long as node 0's agent. The ranks of each round have their own store on a free port. Stores of single-node
jobs listen only on the loopback interface. Stores of multi-node jobs listen on all interfaces, and anyone who
can reach such a store can end the job. A store that does not respond for SILENCE_SECONDS counts as lost.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, api

# Keys of the agents' store. All but the first have the job's key (`torchrun_job.shared_key`) as a prefix, so
# that jobs that share a port by mistake do not interfere.
#     key             fingerprint of the job's key
#     round           number of the current round; an agent increments it to request a restart, and all agents
#                     that see the change restart their ranks
#     here/R/NODE     number of agents of a node that joined round R
#     joined/R        number of nodes that joined round R; the round starts when all have joined
#     port/R          port of the store of the ranks of round R
#     failed/R        number of nodes whose ranks failed in round R
#     failures        number of failed rounds; beyond MAX_RESTARTS, `over` is set and all agents exit
#     said/R/NODE     a node's report on its failures in round R, JSON
#     done/R          number of nodes whose ranks finished in round R; later failures cause no restart

# Timeout for unacknowledged data: longer than a flapping link or a failover, short enough to save on SIGTERM.
SILENCE_SECONDS = 30
# Timeout of node 0 in later rounds: the other nodes only have to terminate their ranks first.
_REJOIN_SECONDS = 45.0
_EXIT_SECONDS = 300.0  # how long finished nodes wait for the others
_CONNECT_SECONDS = 5.0  # per attempt, which delays the handling of signals
_POLL_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"
# Fields and types of a failure report; anyone who can reach the port may send one.
_FAILURE = {"rank": int, "host": str, "device": str, "cause": str}
_MOST_CHARACTERS = 2000


class RestartRendezvous(RendezvousHandler):
    """Lets the agents of all nodes meet in node 0's store. With one node, port 0 means any free port.

    Args:
        is_stopping: called while waiting for other nodes; returns True if a stop was requested.
        join_seconds: timeout for joining the first round.
        key: secret shared by the nodes of the job.
    """

    def __init__(
        self, host: str, port: int, *, node_rank: int, num_nodes: int, max_restarts: int,
        is_stopping: Callable[[], bool] = lambda: False, join_seconds: float = 600.0, key: str = "",
    ):  # fmt: skip
        self._host, self._port = _LOOPBACK if num_nodes == 1 else host, port
        self._node_rank, self._num_nodes, self._max_restarts = node_rank, num_nodes, max_restarts
        self._is_stopping, self._join_seconds, self._key = is_stopping, join_seconds, key
        self._agents: Store | None = None
        self._ranks: TCPStore | None = None
        self.round = 0

    # torchrun's interface

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "rounds"

    def get_run_id(self) -> str:
        """A constant name, since the port distinguishes jobs."""
        return "moe_exp"

    def is_closed(self) -> bool:
        return self.is_over

    def set_closed(self) -> None:
        self._store.set("over", "1")

    def num_nodes_waiting(self) -> int:
        """1 if a node has requested another round, else 0."""
        return int(self.has_moved)

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until every node has joined the current round. Raises RendezvousTimeoutError if not all nodes
        join in time, RendezvousClosedError if the job is over or a stop was requested, and
        RendezvousConnectionError if node 0's port is taken or node 0 has a different key.
        """
        if self._ranks is not None and self._node_rank == 0:
            self._join_seconds = min(_REJOIN_SECONDS, self._join_seconds)
        deadline = time.monotonic() + self._join_seconds
        self._connect(deadline)
        while not self._joined(deadline):
            pass
        self._ranks = None  # ends the last round's store
        key = f"port/{self.round}"
        if self._node_rank == 0:
            self._ranks = self._open(0, serve=True, deadline=deadline)
            self._store.set(key, str(self._ranks.port))
        else:
            while not self._store.check([key]):
                self._wait(deadline)
            self._ranks = self._open(int(self._store.get(key)), serve=False, deadline=deadline)
        info = RendezvousStoreInfo(self._host, self._ranks.port)
        return RendezvousInfo(PrefixStore("agents", self._ranks), self._node_rank, self._num_nodes, info)

    # Additional methods for our agent

    @property
    def is_over(self) -> bool:
        """Whether the job was closed or has failed more than MAX_RESTARTS times."""
        return self._store.check(["over"])

    @property
    def has_moved(self) -> bool:
        """Whether another node has ended the round that this node is in."""
        return self._current != self.round or self.is_over

    @property
    def num_failures(self) -> int:
        return int(self._store.add("failures", 0))

    def has_failed(self, number: int) -> bool:
        return int(self._store.add(f"failed/{number}", 0)) > 0

    def say(self, failures: list[dict[str, Any]]) -> None:
        """Reports this node's failed ranks to node 0."""
        bounded = [failure | {"cause": str(failure["cause"])[:_MOST_CHARACTERS]} for failure in failures]
        self._store.set(f"said/{self.round}/{self._node_rank}", json.dumps(bounded))

    def fail(self) -> None:
        """Ends the round because ranks failed; after MAX_RESTARTS restarts, ends the job as well."""
        # several nodes may report the same round: only the first report counts
        is_first = int(self._store.add(f"failed/{self.round}", 1)) == 1
        if is_first and int(self._store.add("failures", 1)) > self._max_restarts:
            self.set_closed()
        self.move_on()

    def said(self, number: int) -> list[dict[str, Any]]:
        """Valid failure reports received so far in round `number`."""
        found: list[Any] = []
        for key in (f"said/{number}/{node}" for node in range(self._num_nodes)):
            with suppress(ValueError):
                report = json.loads(self._store.get(key)) if self._store.check([key]) else []
                found += report if isinstance(report, list) else []
        # do not trust the content: accept exactly these fields, and no long strings
        found = [one for one in found if isinstance(one, dict)]
        found = [one for one in found if {name: type(value) for name, value in one.items()} == _FAILURE]
        return [one for one in found if all(len(str(value)) <= _MOST_CHARACTERS for value in one.values())]

    def move_on(self) -> None:
        """Ends the round for all nodes; the next round starts when all nodes have joined."""
        # compare_set: if several nodes end the same round, only the first one increments it
        self._store.compare_set("round", str(self.round), str(self.round + 1))

    @property
    def num_done(self) -> int:
        """Number of nodes whose ranks have finished in this round."""
        return int(self._store.add(f"done/{self.round}", 0))

    def finish(self) -> None:
        """Records that this node's ranks have finished; waits for other nodes, which need node 0's store."""
        self._store.add(f"done/{self.round}", 1)
        deadline = time.monotonic() + _EXIT_SECONDS
        with suppress(DistError):  # node 0 has left
            while self.num_done < self._num_nodes and time.monotonic() < deadline:
                self._is_stopping()
                time.sleep(_POLL_SECONDS)

    def reconnect(self) -> bool:
        """Reconnects to node 0. Returns False if it is unreachable; raises ConnectionError if it refuses."""
        try:
            # a plain socket distinguishes a host that refuses from an unreachable one
            socket.create_connection((self._host, self._port), _CONNECT_SECONDS).close()
            self._agents = PrefixStore(self._key, self._store_at(self._port, serve=False))
        except (ConnectionRefusedError, ConnectionResetError):
            raise
        except (DistError, OSError):
            return False
        return True

    @property
    def _store(self) -> Store:
        assert self._agents is not None, "next_rendezvous has not been called"
        return self._agents

    @property
    def _current(self) -> int:
        return int(self._store.add("round", 0))

    def _connect(self, deadline: float) -> None:
        if self._agents is not None:
            return
        store = self._open(self._port, serve=self._node_rank == 0, deadline=deadline)
        self._port = store.port  # replaces 0
        fingerprint = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        if self._node_rank == 0:
            store.set("key", fingerprint)
        elif store.get("key") != fingerprint.encode():
            raise api.RendezvousConnectionError(
                f"node 0 at {self._host}:{self._port} has a different key: another job uses the"
                " port, or the nodes do not share RUN_DIR. Fix: set MASTER_PORT to an unused port and RUN_DIR"
                " to a folder on a shared file system"
            )
        self._agents = PrefixStore(self._key, store)

    def _joined(self, deadline: float) -> bool:
        """Waits until all nodes have joined the current round; returns False if the round ends earlier."""
        self.round = self._current
        if int(self._store.add(f"here/{self.round}/{self._node_rank}", 1)) > 1:
            # this agent replaces a dead one of this node: the other nodes' ranks must restart with ours
            self.move_on()
            return False
        self._store.add(f"joined/{self.round}", 1)
        while int(self._store.add(f"joined/{self.round}", 0)) < self._num_nodes:
            self._wait(deadline)
            if self._current != self.round:
                return False
        if self.is_over:  # another node joined, but was stopped while it waited
            raise api.RendezvousClosedError
        return True

    def _open(self, port: int, *, serve: bool, deadline: float) -> TCPStore:
        """If `serve`, starts a store; else connects to node 0's store, with retries until `deadline`."""
        while True:
            try:
                store = self._store_at(port, serve=serve)
            except (RuntimeError, OSError) as error:
                if serve:
                    from moe_exp.launch.torchrun_job import port_problem  # an agent starts without settings

                    rule = f"node 0 cannot listen on it ({str(error).splitlines()[0]})"
                    line = port_problem(port, rule, num_nodes=self._num_nodes)
                    raise api.RendezvousConnectionError(line) from error
                self._wait(deadline)
            else:
                store.set_timeout(timedelta(seconds=self._join_seconds))
                return store

    def _store_at(self, port: int, *, serve: bool) -> TCPStore:
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        if not serve or self._num_nodes > 1:
            store = TCPStore(self._host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
            if not serve and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                _limit_silence(port)
            return store
        # TCPStore's own socket would listen on all interfaces
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_LOOPBACK, port))
            listener.listen(socket.SOMAXCONN)
            port, descriptor = listener.getsockname()[1], listener.detach()
        return TCPStore(
            _LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=descriptor,
        )  # fmt: skip

    def _wait(self, deadline: float) -> None:
        if self._agents is not None and self._is_stopping():
            self.set_closed()  # the other nodes must not wait for this one
        if self._is_stopping() or (self._agents is not None and self.is_over):
            raise api.RendezvousClosedError
        if time.monotonic() > deadline:
            line = f"not all {self._num_nodes} nodes joined within {self._join_seconds:.0f} s"
            raise api.RendezvousTimeoutError(line)
        time.sleep(_POLL_SECONDS)


def _limit_silence(port: int) -> None:
    """Sets timeouts on connections to `port`: for unacknowledged data and for silence. Torch sets none."""
    options = {
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): SILENCE_SECONDS * 1000,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): SILENCE_SECONDS // 2,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): SILENCE_SECONDS // 4,
    }
    for entry in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] == port:  # raises if it is not connected
                for name, value in options.items():
                    connection.setsockopt(*name, value)
