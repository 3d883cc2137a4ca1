"""How the agents of several nodes agree on one start of the ranks after another.

torchrun's static rendezvous does not tell the other nodes of a failure. Its c10d rendezvous does, but numbers
the nodes itself, and NODE_RANK has to mean something. Both of torch 2.13 give the ranks of the next start the
store in which those that died have left their addresses (c10d unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is
set). So this is a rendezvous of our own, by torchrun's interface. A round is one start of all ranks. Agents
meet in a store that the agent of node 0 keeps on MASTER_PORT for as long as it lives; the ranks of a round
have a store of their own, on a free port, which ends with it. The stores of a job on one node listen on the
loopback interface alone; those of several nodes on all, and whoever reaches them can end the job.

    round           number of the current round; whoever wants the next one raises it, and every agent that
                    sees that starts its ranks again
    here/R/NODE     agents of a node that have come to round R
    joined/R        nodes that have come to round R; with the last of them it begins
    port/R          of the store of the ranks of round R
    failed/R        nodes whose ranks have failed in round R
    failures        rounds that have ended so; over MAX_RESTARTS of them `over` is set, and all agents end
    said/R/NODE     what a node has to say of its failures in round R, JSON
    done/R          nodes whose ranks have come to their end in round R: what fails afterwards is no reason
                    for another one
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

_CONNECT_SECONDS = 5.0  # of one attempt: a signal that comes meanwhile is answered after it
_POLL_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"
# Of what a node says of a failed rank, each with its type; anybody who reaches the port may say something.
_FAILURE = {"rank": int, "host": str, "device": str, "cause": str}
_MOST_CHARACTERS = 2000


class Rounds(RendezvousHandler):
    """The agent of one node among all of them.

    Args:
        host: of node 0.
        port: that its agent listens on.
        node_rank: of this node.
        num_nodes: all that take part, in every round.
        max_restarts: rounds that may fail before the last one.
        is_stopping: asked while waiting for other nodes: whether this one was told to end.
        join_seconds: so long a node waits for the others.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        node_rank: int,
        num_nodes: int,
        max_restarts: int,
        is_stopping: Callable[[], bool] = lambda: False,
        join_seconds: float = 600.0,
    ):
        self._host, self._port = _LOOPBACK if num_nodes == 1 else host, port
        self._node_rank, self._num_nodes, self._max_restarts = node_rank, num_nodes, max_restarts
        self._is_stopping, self._join_seconds = is_stopping, join_seconds
        self._agents: Store | None = None
        self._ranks: Store | None = None  # of the current round
        self.round = 0

    # What torchrun's agent asks for

    @property
    def use_agent_store(self) -> bool:
        """Ranks find their store served."""
        return True

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return "rounds"

    def get_run_id(self) -> str:
        """Of the job; the port is what tells jobs apart."""
        return "moe_exp"

    def is_closed(self) -> bool:
        """Whether no further round may begin."""
        return self.is_over

    def set_closed(self) -> None:
        """No further round may begin."""
        self._store.set("over", "1")

    def num_nodes_waiting(self) -> int:
        """Whether some node wants another round."""
        return int(self.has_moved)

    def shutdown(self) -> bool:
        """Nothing is left to do."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until every node has come to the current round.

        Raises:
            RendezvousTimeoutError: not all nodes came in time.
            RendezvousClosedError: the job is over, or this node was told to end.
            RendezvousConnectionError: on node 0, the port is taken.
        """
        deadline = time.monotonic() + self._join_seconds
        self._connect(deadline)
        while not self._joined(deadline):
            pass
        self._ranks = self._store_of_ranks(deadline)
        info = RendezvousStoreInfo(self._host, self._ranks.port)
        return RendezvousInfo(PrefixStore("agents", self._ranks), self._node_rank, self._num_nodes, info)

    # What our agent asks for besides

    @property
    def is_over(self) -> bool:
        """Whether the job has failed once more than it may."""
        return self._store.check(["over"])

    @property
    def has_moved(self) -> bool:
        """Whether the round that this node is in has ended elsewhere."""
        return self._current != self.round or self.is_over

    @property
    def num_failures(self) -> int:
        """Rounds that have failed."""
        return int(self._store.add("failures", 0))

    def has_failed(self, number: int) -> bool:
        """Whether round `number` has ended by a failure."""
        return int(self._store.add(f"failed/{number}", 0)) > 0

    def say(self, failures: list[dict[str, Any]]) -> None:
        """Leaves for node 0 what there is to say of ranks of this node that have failed."""
        bounded = [failure | {"cause": str(failure["cause"])[:_MOST_CHARACTERS]} for failure in failures]
        self._store.set(f"said/{self.round}/{self._node_rank}", json.dumps(bounded))

    def fail(self) -> None:
        """Ends the round, as ranks of this node have failed. The job is over after the last one that may."""
        if (
            int(self._store.add(f"failed/{self.round}", 1)) == 1
            and int(self._store.add("failures", 1)) > self._max_restarts
        ):
            self._store.set("over", "1")
        self.move_on()

    def said(self, number: int) -> list[dict[str, Any]]:
        """What the nodes have said so far of the failures of round `number`; what no agent says is left
        out.
        """
        keys = [f"said/{number}/{node}" for node in range(self._num_nodes)]
        return [
            failure for key in keys if self._store.check([key]) for failure in _failures(self._store.get(key))
        ]

    def move_on(self) -> None:
        """Ends the round for all nodes; the next one begins when all have come to it."""
        self._store.compare_set("round", str(self.round), str(self.round + 1))

    def mark_done(self) -> None:
        """The ranks of this node have come to their end."""
        self._store.add(f"done/{self.round}", 1)

    @property
    def is_done(self) -> bool:
        """Whether the ranks of some node have come to their end in this round."""
        return int(self._store.add(f"done/{self.round}", 0)) > 0

    @property
    def _store(self) -> Store:
        assert self._agents is not None, "the agent has not come to a round yet"
        return self._agents

    @property
    def _current(self) -> int:
        return int(self._store.add("round", 0))

    def _connect(self, deadline: float) -> None:
        if self._agents is None:
            self._agents = self._open(self._port, serve=self._node_rank == 0, deadline=deadline)

    def _joined(self, deadline: float) -> bool:
        """Waits for all nodes in the current round; False where it has ended before they came."""
        self.round = self._current
        if int(self._store.add(f"here/{self.round}/{self._node_rank}", 1)) > 1:
            # in place of an agent of this node that has died: the others' ranks have to start again with ours
            self.move_on()
            return False
        self._store.add(f"joined/{self.round}", 1)
        while int(self._store.add(f"joined/{self.round}", 0)) < self._num_nodes:
            self._wait(deadline)
            if self._current != self.round:
                return False
        if self.is_over:  # a node has come and was told to end while it waited
            raise RendezvousClosedError
        return True

    def _store_of_ranks(self, deadline: float) -> TCPStore:
        self._ranks = None  # that of the last round ends
        key = f"port/{self.round}"
        if self._node_rank == 0:
            store = self._open(0, serve=True, deadline=deadline)
            self._store.set(key, str(store.port))
            return store
        while not self._store.check([key]):
            self._wait(deadline)
        return self._open(int(self._store.get(key)), serve=False, deadline=deadline)

    def _open(self, port: int, *, serve: bool, deadline: float) -> TCPStore:
        """A store that this node serves, or a connection to that of node 0, which may not have started
        yet.
        """
        while True:
            try:
                store = self._store_at(port, serve=serve)
            except (RuntimeError, OSError) as error:
                if serve:
                    raise RendezvousConnectionError(
                        f"port {port} of {self._host}: {str(error).splitlines()[0]}"
                    ) from error
                self._wait(deadline)
            else:
                store.set_timeout(timedelta(seconds=self._join_seconds))
                return store

    def _store_at(self, port: int, *, serve: bool) -> TCPStore:
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        if not serve or self._num_nodes > 1:
            return TCPStore(self._host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
        with socket.socket() as listener:  # TCPStore's own listens on all interfaces
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
            self.set_closed()  # or the other nodes would wait for this one
        if self._is_stopping() or (self._agents is not None and self.is_over):
            raise RendezvousClosedError
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError(
                f"not all of {self._num_nodes} nodes have come within {self._join_seconds:.0f} s"
            )
        time.sleep(_POLL_SECONDS)


def _failures(text: bytes) -> list[dict[str, Any]]:
    try:
        said = json.loads(text)
    except ValueError:
        return []
    return [failure for failure in said if _is_failure(failure)] if isinstance(said, list) else []


def _is_failure(failure: object) -> bool:
    return (
        isinstance(failure, dict)
        and failure.keys() == _FAILURE.keys()
        and all(type(failure[name]) is kind for name, kind in _FAILURE.items())
        and all(len(str(value)) <= _MOST_CHARACTERS for value in failure.values())
    )
