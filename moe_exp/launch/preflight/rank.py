"""The preflight of one rank, started by torchrun: first its device, then the links, step by step.

No step of one rank may block the others for long: process groups have short timeouts, ranks wait for each
other at torch's store rather than in a collective, and results so far are written before each step. `node.py`
reads the files.
"""

import datetime
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from moe_exp.config import Config
from moe_exp.host.devices import device_label
from moe_exp.host.files import write_json
from moe_exp.launch.preflight.checks import (
    DTYPES,
    LinkError,
    bytes_to_fill,
    check_matmul,
    check_memory,
    measure_group,
    process_group,
)
from moe_exp.launch.preflight.node import RESULTS_FOLDER, SETTINGS, rank_file
from moe_exp.launch.preflight.verdicts import rounds_of_pairs

_LINK_TIMEOUT = datetime.timedelta(seconds=20)
_STEP_TIMEOUT = datetime.timedelta(seconds=60)  # how far the other ranks may be behind
_JOIN_TIMEOUT = datetime.timedelta(seconds=60)


class _Results:
    """This rank's results, written at the start of each step."""

    def __init__(self, rank: int):
        self._begun = time.monotonic()
        self._path = rank_file(Path(os.environ[RESULTS_FOLDER]), rank)
        self.values: dict[str, Any] = {
            "rank": rank, "host": socket.gethostname(), "device": device_label(),
            "step": "start", "steps_done": -1, "seconds": {}, "pairs": [],
        }  # fmt: skip

    def begin(self, step: str) -> None:
        now = time.monotonic()
        self.values["seconds"][self.values["step"]] = round(now - self._begun, 3)
        self.values |= {"step": step, "steps_done": self.values["steps_done"] + 1}
        self._begun = now
        self.write()

    def write(self) -> None:
        write_json(self._path, self.values)


def main() -> None:
    """Runs all steps with the settings that the launcher has left in RESULTS_FOLDER."""
    config = Config.model_validate_json((Path(os.environ[RESULTS_FOLDER]) / SETTINGS).read_text())
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    results = _Results(rank)
    try:
        check_device(config, results, local_rank)
        check_links(config, results, rank, local_rank)
        results.begin("done")
    except Exception as error:  # any error is a finding
        results.values["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    results.write()
    sys.stdout.flush()
    # Skips the cleanup of process groups, which waits for ranks that may be gone. With 1, torchrun would end
    # the other ranks.
    os._exit(0)


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def check_device(config: Config, results: _Results, local_rank: int) -> None:
    """Checks arithmetic and memory of this rank's device, and on a GPU host also the host's memory."""
    results.begin("matmul")
    device = _device(local_rank)
    torch.set_num_threads(config.threads_per_rank or 1)
    results.values["matmul"] = check_matmul(device, DTYPES[config.dtype], seed=results.values["rank"])
    results.begin("memory")
    results.values["memory"] = check_memory(device, bytes_to_fill(device, config.gpus_per_node))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        host = torch.device("cpu")
        results.values["host_memory"] = check_memory(host, bytes_to_fill(host, config.gpus_per_node))


def check_links(config: Config, results: _Results, rank: int, local_rank: int) -> None:
    """Measures inside the node, in pairs of nodes (of ranks, if there is one node), and over all ranks."""
    if config.world_size == 1:
        return
    results.begin("join")
    store, _, _ = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    # the ranks meet at torch's store, which answers even if a collective does not
    links = _Links(store, results, rank, _device(local_rank), config.world_size)
    # ranks of each node; with one node, each rank by itself
    size = config.gpus_per_node if config.nnodes > 1 else 1
    units = [list(range(first, first + size)) for first in range(0, config.world_size, size)]
    mine = next(number for number, ranks in enumerate(units) if rank in ranks)
    if len(units[mine]) > 1:
        results.values["node"] = links.measure("node", f"node {mine}", units[mine])
    for number, pairs in enumerate(rounds_of_pairs(len(units)), start=1):
        partner = next((pair[1 - pair.index(mine)] for pair in pairs if mine in pair), None)
        if partner is None:
            links.meet(f"pairs {number}")
            continue
        ranks, twin = sorted([*units[mine], *units[partner]]), units[partner][units[mine].index(rank)]
        name = f"pair {min(mine, partner)}-{max(mine, partner)}"
        found = links.measure(f"pairs {number}", name, ranks, twin)
        results.values["pairs"].append({"partner": partner, **found})
    # a collective over a broken link would only hang, and name nobody
    if not links.have_failed():
        results.values["all_ranks"] = links.measure("all ranks", "all ranks", range(config.world_size))


class _Links:
    """Measures groups in turn; ranks meet at the store, which answers even if a collective does not."""

    def __init__(self, store: Store, results: _Results, rank: int, device: torch.device, num_ranks: int):
        self._store, self._results = PrefixStore("preflight", store), results
        self._rank, self._device, self._num_ranks = rank, device, num_ranks

    def meet(self, step: str) -> None:
        """Starts a step once all ranks have reached it; raises RuntimeError if they do not."""
        self._results.begin(step)
        if self._store.add(step, 1) == self._num_ranks:
            self._store.set(f"{step}/all", "")
        self._store.wait([f"{step}/all"], _STEP_TIMEOUT)

    def measure(self, step: str, name: str, ranks: Sequence[int], twin: int | None = None) -> dict[str, Any]:
        """The result of `measure_group`, or its error: the other links are still measured."""
        self.meet(step)
        store = PrefixStore(name, self._store)
        try:
            with process_group(store, ranks, self._rank, self._device, _LINK_TIMEOUT):
                found = measure_group(ranks, self._device, twin)
                dist.barrier()  # leaving earlier would close connections that others still use
                return found
        except Exception as error:
            self._store.add("failures", 1)
            # damaged data is graver than everything else: no answer, a broken connection
            kind = "wrong" if isinstance(error, LinkError) else "error"
            return {kind: " ".join(str(error).split())[:300]}

    def have_failed(self) -> bool:
        """Whether any rank's group has failed; called by every rank after the last measurement."""
        self.meet("links")
        return self._store.add("failures", 0) > 0


if __name__ == "__main__":
    main()
