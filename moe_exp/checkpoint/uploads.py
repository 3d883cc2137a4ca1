"""Copies checkpoints to REMOTE_DIR during training. Rank 0 alone has one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.remote import remote_run, send_checkpoint
from moe_exp.config import Config
from moe_exp.host.files import bytes_text
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Uploads:
    """One checkpoint at a time. While one is under way, only the newest of those that follow is remembered:
    a store that is slower than the saves gets fewer of them.
    """

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._under_way: int | None = None
        self._next: int | None = None
        self._events: deque[tuple[str, int, dict[str, Any]]] = deque()
        newest = folders.latest_iteration(RunFolder.of(config).checkpoints)
        if newest is not None:  # which an earlier start may not have copied
            self.add(newest)

    def add(self, iteration: int) -> None:
        """Has a checkpoint copied."""
        with self._lock:
            self._next = iteration
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def held(self) -> set[int]:
        """Iterations that retention must leave."""
        with self._lock:
            return {one for one in (self._under_way, self._next) if one is not None}

    def wait(self, seconds: float | None = None) -> None:
        """Until all are copied, or have failed, or `seconds` have passed."""
        if (thread := self._thread) is not None:
            logger.info("waiting for the copy of the last checkpoint at %s", remote_run(self._config))
            thread.join(seconds)
            if thread.is_alive():
                logger.warning("the copy is not complete: the next start continues it")

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Kind, iteration and facts of what happened since the last call, for metrics.jsonl."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _work(self) -> None:
        while True:
            with self._lock:
                self._under_way, self._next = self._next, None
                if self._under_way is None:
                    self._thread = None
                    return
                iteration = self._under_way
            self._copy(iteration)

    def _copy(self, iteration: int) -> None:
        start, url = time.monotonic(), remote_run(self._config)
        try:
            num_bytes = send_checkpoint(self._config, iteration)
        except Exception as error:  # whatever it is: the run continues
            logger.warning("the checkpoint at iteration %d was not copied to %s: %s", iteration, url, error)
            self._events.append(("upload_failed", iteration, {"reason": str(error)}))
            return
        seconds = time.monotonic() - start
        what = "copied the checkpoint at iteration %d to %s, %s in %.1f s"
        logger.info(what, iteration, url, bytes_text(num_bytes), seconds)
        self._events.append(("upload", iteration, {"seconds": round(seconds, 3), "bytes": num_bytes}))
