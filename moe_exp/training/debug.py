"""pdb in one rank of a running job.

    from moe_exp.training import debug
    debug.set_trace()          # rank 0 stops here; set_trace(rank=3) stops rank 3

or `breakpoint()` with PYTHONBREAKPOINT=moe_exp.training.debug.set_trace. Call set_trace in code that
every rank runs. Other ranks wait at the same place, outside any collective, until the debugger continues.
While the debugger steps, other ranks run up to their next collective, whose timeout is set to a week. The
debugger reads the standard input of its node's launcher (`moe-exp train`,
`run_moe_from_scratch.sh` or torchrun), and continues when the input ends. `quit` ends the job as failed.
"""

import os
import pdb
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_exp.host.exit_codes import FAILED, report_exit_code
from moe_exp.watch.hangs import heartbeat

_visits: Counter[str] = Counter()  # per place; equal on all ranks, since all run the same code


def set_trace(rank: int = 0) -> None:
    """Opens pdb for global rank `rank` in the terminal of this rank's launcher. The other ranks wait here."""
    frame = sys._getframe().f_back
    assert frame is not None
    if not dist.is_initialized():
        if int(os.environ.get("RANK", "0")) == rank:
            Debugger(rank, lambda: None).set_trace(frame)
        return
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    _visits[place] += 1
    key = f"moe_exp.training.debug/{rank}/{place}/{_visits[place]}"
    store = distributed_c10d._get_default_store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from groups whose backend has no timeout
        for group in list(distributed_c10d._world.pg_map):  # future collectives
            distributed_c10d._set_pg_timeout(timedelta(days=7), group)
    if dist.get_rank() == rank:
        Debugger(rank, lambda: store.set(key, "")).set_trace(frame)
        return
    with heartbeat.during(heartbeat.PAUSED):
        while not store.check([key]):
            time.sleep(0.2)


class Debugger(pdb.Pdb):
    """pdb with `rank` in its prompt. When `rank` resumes, pdb calls `release` to free the other ranks."""

    def __init__(self, rank: int, release: Callable[[], None]):
        # nosigint: Ctrl-C keeps its meaning in a run, save and exit.
        super().__init__(nosigint=True)
        self.prompt = f"(Pdb rank {rank}) "
        self._release = release

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None, *rest: Any) -> None:
        """Prompts until a command continues the run."""
        with heartbeat.during(heartbeat.PAUSED):
            super().interaction(frame, traceback, *rest)
        self._release()

    def do_EOF(self, arg: str) -> bool | None:
        """Continues the run when the input ends."""
        self.message("\nend of standard input, continuing")
        return self.do_continue(arg)

    def do_quit(self, arg: str) -> bool | None:
        """Ends the job."""
        self.message("ending the job")
        report_exit_code(FAILED, by_any_rank=True)  # otherwise the launcher would restart the ranks
        os._exit(FAILED)

    do_q = do_exit = do_quit
