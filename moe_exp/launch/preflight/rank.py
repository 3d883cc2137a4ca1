"""The preflight of one rank, started by torchrun: checks the rank's device, then its links, step by step.

No rank may block other ranks for long. So process groups have short timeouts, and ranks wait for each other
with torch's key-value store instead of a collective. Each step first writes the results so far to a file.
"""

import datetime
import os
import sys
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
from moe_exp.launch.preflight import checks
from moe_exp.launch.preflight.checks import DTYPES, LinkError
from moe_exp.launch.preflight.node import RESULTS_FOLDER, SETTINGS
from moe_exp.launch.preflight.verdicts import rounds_of_pairs
from moe_exp.watch.hangs.heartbeat import rank_file

_LINK_TIMEOUT = datetime.timedelta(seconds=20)
_STEP_TIMEOUT = datetime.timedelta(seconds=60)  # how far other ranks may be behind
_JOIN_TIMEOUT = datetime.timedelta(seconds=60)


class _Rank:
    """This rank's connection to other ranks, and its results. Each step starts by writing them to a file."""

    def __init__(self, config: Config):
        self.config = config
        self.number, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cpu")
        self.values: dict[str, Any] = {
            "rank": self.number, "device": device_label(), "step": "start", "steps_done": -1, "pairs": [],
        }  # fmt: skip
        self._store: Store  # shared by all ranks, from `check_links` on

    def begin(self, step: str) -> None:
        self.values |= {"step": step, "steps_done": self.values["steps_done"] + 1}
        self.write()

    def write(self) -> None:
        write_json(rank_file(Path(os.environ[RESULTS_FOLDER]), self.number, "json"), self.values)

    def check_device(self) -> None:
        """Checks arithmetic and memory of this rank's device, and also host memory if the device is a GPU."""
        self.begin("matmul")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        torch.set_num_threads(self.config.threads_per_rank or 1)
        self.values["matmul"] = checks.check_matmul(self.device, DTYPES[self.config.dtype], seed=self.number)
        self.begin("memory")
        num_ranks, host = self.config.gpus_per_node, torch.device("cpu")
        self.values["memory"] = checks.check_memory(self.device, checks.bytes_to_fill(self.device, num_ranks))
        if self.device != host:
            torch.cuda.empty_cache()
            self.values["host_memory"] = checks.check_memory(host, checks.bytes_to_fill(host, num_ranks))

    def check_links(self) -> None:
        """Measures links in nodes, in node pairs (rank pairs if NNODES is 1) and among all ranks."""
        config = self.config
        if config.world_size == 1:
            return
        self.begin("join")
        store, _, _ = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
        self._store = PrefixStore("preflight", store)
        # the ranks of each node; with one node, each rank is a unit
        size = config.gpus_per_node if config.nnodes > 1 else 1
        units = [list(range(first, first + size)) for first in range(0, config.world_size, size)]
        mine = next(number for number, ranks in enumerate(units) if self.number in ranks)
        if len(units[mine]) > 1:
            self.values["node"] = self._measure("node", f"node {mine}", units[mine])
        for number, partners in enumerate(rounds_of_pairs(len(units)), start=1):
            partner = partners.get(mine)
            if partner is None:
                self._meet(f"pairs {number}")
                continue
            ranks = sorted([*units[mine], *units[partner]])
            twin = units[partner][units[mine].index(self.number)]
            name = f"pair {min(mine, partner)}-{max(mine, partner)}"
            found = self._measure(f"pairs {number}", name, ranks, twin)
            self.values["pairs"].append({"partner": partner, **found})
        self._meet("links")
        # with a broken link, a collective of all ranks would hang without showing which one
        if self._store.add("failures", 0) == 0:
            self.values["all_ranks"] = self._measure("all ranks", "all ranks", range(config.world_size))

    def _meet(self, step: str) -> None:
        """Begins a step and waits until all ranks have reached it; raises RuntimeError on a timeout."""
        self.begin(step)
        # torch's store responds even if collectives hang
        if self._store.add(step, 1) == self.config.world_size:
            self._store.set(f"{step}/all", "")
        self._store.wait([f"{step}/all"], _STEP_TIMEOUT)

    def _measure(self, step: str, name: str, ranks: Sequence[int], twin: int | None = None) -> dict[str, Any]:
        """Measures links among `ranks`; errors are returned, not raised, so that later steps still run."""
        self._meet(step)
        store = PrefixStore(name, self._store)
        try:
            with checks.process_group(store, ranks, self.number, self.device, _LINK_TIMEOUT):
                found = checks.measure_group(ranks, self.device, twin)
                dist.barrier()  # leaving earlier would close connections that other ranks still use
                return found
        except Exception as error:
            self._store.add("failures", 1)
            # damaged data is worse than a timeout or a broken connection
            kind = "wrong" if isinstance(error, LinkError) else "error"
            return {kind: " ".join(str(error).split())[:300]}


def main() -> None:
    """Runs all steps with the settings that the launcher has written to RESULTS_FOLDER."""
    rank = _Rank(Config.model_validate_json((Path(os.environ[RESULTS_FOLDER]) / SETTINGS).read_text()))
    try:
        rank.check_device()
        rank.check_links()
        rank.begin("done")
    except Exception as error:  # any error is a finding
        rank.values["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    rank.write()
    sys.stdout.flush()
    # Skips the cleanup of process groups, which waits for ranks that may be gone. With exit code 1, torchrun
    # would terminate the other ranks.
    os._exit(0)


if __name__ == "__main__":
    main()
