"""pdb in one rank of a running job.

    from moe_exp.training import debug
    debug.set_trace()          # rank 0 stops here; set_trace(rank=3) for another one

or `breakpoint()`, with PYTHONBREAKPOINT=moe_exp.training.debug.set_trace in the environment. It is for code
that every rank runs: the others wait at the same place until the debugger goes on, and as no collective is
open meanwhile, no timeout runs. Once it steps, they run too, up to their next collective, which waits for a
week from then on. The debugger reads the standard input of the launcher on its node, and works under `moe-exp
train`, the script and torchrun. Where there is nothing to read it goes on at once. `quit` ends the job as
failed.
"""

from __future__ import annotations

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

from moe_exp.host.exit_codes import FAILED, tell_launcher
from moe_exp.watch.hangs import heartbeat

_POLL_SECONDS = 0.2
_LONGEST = timedelta(days=7)

_visits: Counter[str] = Counter()  # of each place: ranks that run the same code agree on them


def set_trace(rank: int = 0) -> None:
    """Stops `rank` in pdb where this is called; the other ranks wait here until it goes on. Called by every
    rank.

    Args:
        rank: of all ranks of the job; on a node whose launcher has a terminal.
    """
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
    _wait_long_in_collectives()
    if dist.get_rank() == rank:
        Debugger(rank, lambda: store.set(key, "")).set_trace(frame)
        return
    with heartbeat.paused():
        while not store.check([key]):
            time.sleep(_POLL_SECONDS)


class Debugger(pdb.Pdb):
    """pdb that lets the other ranks go on when it does.

    Args:
        rank: this one, for the prompt.
        release: lets the others go on.
    """

    def __init__(self, rank: int, release: Callable[[], None]):
        # Ctrl-C asks the run to save and end, here too.
        super().__init__(nosigint=True)
        self.prompt = f"(Pdb rank {rank}) "
        self._release = release

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None, *rest: Any) -> None:
        """A prompt, until a command goes on."""
        with heartbeat.paused():
            super().interaction(frame, traceback, *rest)
        self._release()

    def do_EOF(self, arg: str) -> bool | None:
        """Nobody is there to type, or has gone: the run goes on."""
        self.message("\nend of the standard input: going on")
        return self.do_continue(arg)

    def do_quit(self, arg: str) -> bool | None:
        """Ends the job."""
        self.message("the job ends")
        tell_launcher(FAILED, by_any_rank=True)  # or it would start the ranks again
        os._exit(FAILED)

    do_q = do_exit = do_quit


def _wait_long_in_collectives() -> None:
    """Somebody thinks: collectives of all groups that begin from now on may take a week."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups of a backend without a timeout
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(_LONGEST, group)
