"""RollCall as threads of one process: they meet, they are missed, their clocks and settings differ."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from helpers.ranks import free_port
from moe_exp.launch.preflight import roll_call
from moe_exp.launch.preflight.roll_call import RollCall, Server, data_address, knock, peers_of


def join(port: int, node: int, num_nodes: int, seconds: float = 20.0, host: str = "localhost") -> RollCall:
    return RollCall(host, port, node=node, num_nodes=num_nodes, seconds=seconds)


def test_all_get_the_values_of_all_and_the_port_is_free_again():
    port = free_port()

    def node(number: int) -> list[dict[int, object]]:
        with closing(join(port, number, 4)) as nodes:
            hello = nodes.meet("hello", {"number": number}, 20.0)
            if number == 0:
                server.stop_listening()
                socket.create_server(("", port)).close()
            return [hello, nodes.meet("report", [number], 20.0)]

    with closing(Server(port, 4)) as server, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(node, range(4)))
    assert answers == [[{n: {"number": n} for n in range(4)}, {n: [n] for n in range(4)}]] * 4


def test_who_does_not_come_is_left_out_and_who_comes_later_sees_it():
    port = free_port()
    with closing(Server(port, 3)), closing(join(port, 0, 3)) as first, ThreadPoolExecutor(1) as threads:
        second = join(port, 1, 3)
        waiting = threads.submit(second.meet, "hello", "b", 0.5)
        assert first.meet("hello", "a", 0.5) == {0: "a", 1: "b"} == waiting.result()
        with closing(join(port, 2, 3)) as late:
            assert late.meet("hello", "c", 0.5) == {0: "a", 1: "b"}
        # Those that have hung up are not waited for.
        second.close()
        start = time.monotonic()
        assert first.meet("report", 1, 300.0) == {0: 1}
        assert time.monotonic() - start < 100


def test_settings_that_do_not_fit_are_named():
    port = free_port()
    with closing(Server(port, 2)), closing(join(port, 0, 2)):
        with pytest.raises(ValueError, match=r"NODE_RANK=0: \S+ has the same NODE_RANK\. Fix: "):
            join(port, 0, 2)
        with pytest.raises(ValueError, match=r"NNODES=3: node 0 has NNODES=2\. Fix: "):
            join(port, 1, 3)
        # says nothing that is known, and harms nobody
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        join(port, 1, 2).close()


def test_no_node_0_is_an_error_that_names_this_host():
    line = rf"MASTER_ADDR=localhost: {socket.gethostname()} \(node 1\) cannot reach port \d+ in 1 s"
    with pytest.raises(ValueError, match=line):
        join(free_port(), 1, 2, seconds=0.6)


def test_node_0_going_away_is_an_error():
    with socket.create_server(("localhost", 0)) as listener, ThreadPoolExecutor(1) as threads:
        port = listener.getsockname()[1]
        joining = threads.submit(join, port, 1, 2)
        connection, _ = listener.accept()
        connection.close()
        with pytest.raises(ValueError, match="lost its connection to node 0"):
            joining.result()


def test_clock_offset():
    port = free_port()
    with closing(Server(port, 1)), closing(join(port, 0, 1)) as nodes:
        for ahead in (0.0, 30.0, -7.25):
            offset, error = nodes.clock_offset(lambda ahead=ahead: time.time() + ahead)
            assert abs(offset + ahead) <= error + 1e-3, (offset, error)


def test_doors_that_answer_and_doors_that_do_not():
    with closing(Server(0, 3)) as one, closing(Server(0, 3)) as two:
        closed, deaf = free_port(), socket.create_server(("localhost", 0))
        with deaf:
            deaf.settimeout(5)
            doors = {0: ("localhost", one.port), 1: ("localhost", two.port), 2: ("localhost", closed)}
            assert roll_call.unreached(0, doors) == {2: "connection refused"}
            assert roll_call.unreached(2, doors) == {}
        assert knock("localhost", one.port) == ""
    assert knock("localhost", one.port) == "connection refused"


def test_large_jobs_try_peers_at_powers_of_two():
    assert peers_of(1, 4) == [0, 2, 3]
    found = peers_of(0, 1000)
    assert len(found) == 20 and {1, 2, 4, 512, 999} <= set(found)
    tried = {(min(a, b), max(a, b)) for a in range(100) for b in peers_of(a, 100)}
    assert all(any(node in pair for pair in tried) for node in range(100))


def test_address_of_the_interface_that_gloo_uses():
    assert data_address({}) == ""
    assert data_address({"NCCL_SOCKET_IFNAME": "^lo"}) == ""
    assert data_address({"GLOO_SOCKET_IFNAME": "no_such_thing"}) == ""
    assert data_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_nodes_find_each_other_by_both_kinds_of_addresses(host):
    port = free_port()
    with (
        closing(Server(port, 2)),
        closing(join(port, 1, 2, host=host)) as nodes,
        closing(Server(0, 2)) as door,
    ):
        assert nodes.address == host
        assert knock(nodes.address, door.port) == ""
