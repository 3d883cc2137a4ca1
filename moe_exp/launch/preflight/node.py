"""Preflight of a node, run by the node's launcher or by `moe-exp watch preflight`. Does not import torch."""

import contextlib
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import Config, raise_for
from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import complain
from moe_exp.host.files import read_json
from moe_exp.host.processes import end_with_parent
from moe_exp.host.progress import progress_of
from moe_exp.launch.preflight import verdicts
from moe_exp.launch.preflight.host_facts import host_facts, own_name, planned_hosts, query_gpus
from moe_exp.launch.preflight.roll_call import RollCall, Server, data_address, unreached
from moe_exp.launch.preflight.verdicts import Finding, NodeVerdict, Verdict
from moe_exp.launch.torchrun_job import child_environment, kill_job, port_problem, torchrun_command
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder, iterations
from moe_exp.watch.excluded_nodes import exclude_list
from moe_exp.watch.hangs.heartbeat import rank_file

MODULE = "moe_exp.launch.preflight.rank"
RESULTS_FOLDER = "MOE_EXP_PREFLIGHT_RESULTS"  # environment variable for the ranks
SETTINGS = "settings.json"  # in that folder, for the ranks; rank_file(..., "json"): a rank's results so far
# timeout for all steps of the ranks, which normally take a fraction of it
_RANKS_SECONDS = 150.0
_REACH_SECONDS = 30.0
_END_SECONDS = 10.0
# up to one in this number of nodes may be broken; if more are missing, the file system is probably slow
_MOST_MISSING = 8


def preflight(config: Config, *, hosts: str = "") -> Verdict:
    """Checks the nodes of a job. Every node calls this function and gets the same verdict.

    `hosts`: SLURM host list in NODE_RANK order, used to name missing nodes (default:
    $SLURM_JOB_NODELIST). Raises ValueError if node 0 cannot be reached, MASTER_PORT is taken, NNODES differs
    between nodes, or two nodes have the same NODE_RANK.
    """
    raise_for(config.node_rank_problems())
    with contextlib.ExitStack() as stack:
        server = None
        # 1. The nodes meet. If some do not join within PREFLIGHT_TIMEOUT, the verdict names only those.
        try:
            if config.node_rank == 0:
                server = Server(config.rendezvous_port, config.nnodes)
                stack.callback(server.close)
        except OSError as error:
            rule = f"node 0 cannot listen on it ({error.strerror or error})"
            raise ValueError(port_problem(config.rendezvous_port, rule, num_nodes=config.nnodes)) from None
        port, seconds = server.port if server else config.rendezvous_port, float(config.preflight_timeout)
        nodes = RollCall(
            config.master_addr, port, node=config.node_rank, num_nodes=config.nnodes, seconds=seconds
        )
        stack.callback(nodes.close)
        door = Server(0, config.nnodes)
        stack.callback(door.stop_listening)
        here = {"host": own_name(), "address": data_address() or nodes.address, "port": door.port}
        # node 0's key becomes the rendezvous key of the ranks of all nodes
        here |= {"key": secrets.token_hex(16)} if server else {}
        came = nodes.meet("hello", here, seconds)
        if server:
            server.stop_listening()
        if config.node_rank not in came:
            rule = f"{here['host']} joined after the other nodes had stopped waiting"
            raise ValueError(f"NODE_RANK={config.node_rank}: {rule}. Fix: restart the job.")
        if len(came) < config.nnodes:
            return verdict_without(config, came, planned_hosts(config.nnodes, hosts))
        # 2. Each node connects to the others, to find unreachable ones before process groups hang on them.
        doors = {node: (other["address"], other["port"]) for node, other in came.items()}
        lost = nodes.meet("reach", unreached(config.node_rank, doors), _REACH_SECONDS)
        if any(lost.values()) or len(lost) < config.nnodes:
            verdict = Verdict.on(came)
            for named in verdict.nodes:
                named.findings += [] if named.node in lost else [_WENT_AWAY]
            pairs = {(node, int(peer)): why for node, peers in lost.items() for peer, why in peers.items()}
            failed = {(min(pair), max(pair)): reason for pair, reason in pairs.items()}
            verdicts.blame_pairs(verdict, failed, "has no connection")
            return verdict
        # 3. Each node checks itself, then runs its ranks with torchrun (rank.py): arithmetic, memory, links.
        clock = nodes.clock_offset() if config.node_rank else (0.0, 0.0)
        gpus, gpu_problem = query_gpus() if count_gpus() else ([], "")
        report = {"host": here["host"], "clock": clock, "gpus": gpus, "gpu_problem": gpu_problem}
        report |= host_facts(Path(config.run_dir))
        report["ranks"] = run_ranks(config, came[0]["key"])
        # 4. With the reports of all nodes, each reaches the same verdict.
        reports = nodes.meet("report", report, _RANKS_SECONDS + _END_SECONDS)
    needed_bytes = checkpoint_bytes(config) if config.save_at_end or config.save_interval else 0
    verdict = verdicts.judge(reports, slow=config.preflight_slow, needed_bytes=needed_bytes)
    for node in sorted(set(came) - set(reports)):
        verdict.nodes.append(NodeVerdict(node, came[node]["host"], [_WENT_AWAY]))
    return verdict


_WENT_AWAY = Finding("failed", "disconnected during the checks")


def verdict_without(config: Config, came: Mapping[int, Mapping[str, Any]], names: list[str]) -> Verdict:
    """Verdict on a job with missing nodes; the nodes that joined (`came`) get no findings."""
    verdict, missing = Verdict.on(came), sorted(set(range(config.nnodes)) - set(came))
    text = f"did not join within PREFLIGHT_TIMEOUT={config.preflight_timeout} s"
    late = Finding("failed", text, is_its_fault=len(missing) <= max(1, config.nnodes // _MOST_MISSING))
    verdict.nodes += [NodeVerdict(node, names[node] if names else "", [late]) for node in missing]
    return verdict


def run_ranks(config: Config, key: str) -> list[dict[str, Any]]:
    """Runs this node's ranks with a timeout; returns one result per rank. `key`: node 0's rendezvous key."""
    first = config.node_rank * config.gpus_per_node
    with tempfile.TemporaryDirectory(prefix="moe_exp_preflight_") as name:
        folder = Path(name)
        # a hung collective must raise in the waiting rank; by default, torch aborts the process
        nccl = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        environ = {**child_environment(config, key), **nccl, **quiet, RESULTS_FOLDER: name}
        (folder / SETTINGS).write_text(config.model_dump_json())
        with (folder / "log").open("wb") as log, _showing(config, folder, first):
            torchrun = subprocess.Popen(
                torchrun_command(config, [], MODULE), env=environ, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    torchrun.wait(_RANKS_SECONDS)
            finally:  # even after Ctrl-C, no process may outlive the launcher
                if timed_out := torchrun.poll() is None:
                    kill_job([torchrun.pid])
                    torchrun.wait()
        printed = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        reports = [_read_rank(folder, rank) for rank in range(first, first + config.gpus_per_node)]
    # the first error of a rank, since torchrun's summary at the end does not show the cause
    errors = [line.strip() for line in printed if "Error" in line and "ChildFailedError" not in line]
    last = (errors or printed[-1:] or ["no output"])[0][:200]
    why = f"timed out after {_RANKS_SECONDS:.0f} s" if timed_out else f"process ended ({last})"
    for found in reports:
        if found["step"] != "done" and not found.get("error"):
            found["error"] = why
    return reports


def _showing(config: Config, folder: Path, rank: int) -> contextlib.AbstractContextManager[None]:
    """Shows on node 0 how many steps `rank` has completed."""
    if config.node_rank:
        return contextlib.nullcontext()
    links = 0
    if config.world_size > 1:  # join, links and all ranks; inside the node; pairs of nodes or ranks
        units = config.nnodes if config.nnodes > 1 else config.world_size
        links = 3 + (config.nnodes > 1 and config.gpus_per_node > 1) + len(verdicts.rounds_of_pairs(units))

    def num_done() -> int:
        return 1 + _read_rank(folder, rank).get("steps_done", -1)

    return progress_of(num_done, "preflight", 3 + links, unit="steps")


def _read_rank(folder: Path, rank: int) -> dict[str, Any]:
    found = {"rank": rank, "device": "no device yet", "step": "start", "pairs": []}
    with contextlib.suppress(OSError, ValueError):  # before its first step
        found |= read_json(rank_file(folder, rank, "json"))
    return found


def wait_for_port(config: Config, seconds: float = 5.0) -> None:
    """Waits until MASTER_PORT of node 0 is free for torchrun."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_server(("", config.rendezvous_port)):
            return
        time.sleep(0.1)


def passes(config: Config) -> bool:
    """Runs the preflight and returns whether training may start.

    With PREFLIGHT=1, every node's launcher calls this function and gets the same result. Node 0 prints the
    table, adds bad nodes to the exclude list, and records the event `preflight`.
    """
    start = time.monotonic()
    try:
        verdict = preflight(config)
    except ValueError as error:
        complain(str(error))
        return False
    if config.node_rank == 0:
        verdicts.print_report(verdict, num_ranks=config.world_size)
        path = exclude_list(config.run_dir)
        if added := verdicts.add_to_list(verdict, path):
            complain(f"{path}: added {', '.join(added)}")
        folder = RunFolder.of(config)
        folder.path.mkdir(parents=True, exist_ok=True)
        hosts = [node.host for node in verdict.to_exclude()]
        details = {"grade": verdict.grade, "seconds": round(time.monotonic() - start, 1)}
        details |= {"findings": verdicts.findings_lines(verdict), "exclude": hosts}
        append_event(folder.metrics, "preflight", max(iterations(folder.checkpoints), default=0), **details)
        wait_for_port(config)
    if verdict.grade != "failed":
        return True
    complain(*(f"preflight {line}" for line in verdicts.findings_lines(verdict) if line.startswith("failed")))
    fix = "restart the job without that node, or set PREFLIGHT=0 to train anyway"
    complain(f"not training: a node failed the preflight. Fix: {fix}.")
    return False
